"""What `recollect bench cpu` measures, in small: which figures there are, not how large they are."""

import pytest

pytest.importorskip("numba")

from recollect import fast
from recollect.bench import cpu as bench
from recollect.nets import Network

SMALL = Network("convnet:width=16,depth=1", (1, 8, 8), 3)


@pytest.fixture
def small(monkeypatch):
    sizes = dict(batch=4, steps=2, real=3, per_class=2)
    monkeypatch.setattr(bench, "CONVNET", SMALL)
    monkeypatch.setattr(bench, "SETTINGS", (("short", SMALL, sizes, None, True), ("long", SMALL, sizes, 1, False)))
    monkeypatch.setattr(bench, "DIGITS", {"network": "convnet:width=16,depth=1", "inner_steps": 2, "window": 2, "outer_steps": 2})
    monkeypatch.setattr(bench, "EPOCHS", 1)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_figures(small, monkeypatch, bf16):
    monkeypatch.setattr(fast, "computes_in_bf16", lambda: bf16)
    *_, found = bench.cpu()
    modes = ["fp32", "bf16"] if bf16 else ["fp32"]
    ways = [f"short: {way}" for way in ("full graph", "general", *modes)] + [f"long: {way}" for way in ("general", *modes)]
    assert [name for name in found if name.endswith("s an outer step")] == [f"{way}, s an outer step" for way in ways]
    for mode in modes:
        assert found[f"short: full graph / {mode}"] > 0
        assert found[f"long: {mode}, of the convolutions' rate"] > 0
        assert 0 < found[f"one pass of 12 images, gradient, {mode}: relative error"] < (1e-4 if mode == "fp32" else 0.5)
    accuracies = [value for name, value in found.items() if "validation accuracy" in name]
    assert len(accuracies) == (2 if bf16 else 0)
    assert all(0 <= value <= 100 for value in accuracies)
