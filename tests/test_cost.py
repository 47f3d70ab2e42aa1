"""What a run takes, before it is started: counted as its parts are, measured by a clock of the tests, and as the page says."""

import json
from pathlib import Path

import pytest
import torch
from conftest import experiment_module

from recollect import cost, load
from recollect.cli import main
from recollect.config import DistillConfig, changed, preset
from recollect.continual.config import STREAMS
from recollect.decisions import resolve
from recollect.distiller import Distiller
from recollect.fast.cpu import CpuConvNet
from recollect.files import read_json
from recollect.nets import Network

ROOT = Path(__file__).parent.parent
SMALL = preset("fast", network="mlp:width=16", bases=6, downsample=1, inner_steps=20, window=10, outer_steps=50)


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def work(images, devices=1, **settings) -> cost.Work:
    config = resolve(changed(SMALL, **settings), images)
    return cost.work(config, images.shape, images.classes, len(images.train.images), devices)


def test_products_are_those_of_the_layers():
    mlp = Network("mlp:width=7", (1, 8, 8), 3).module
    linear = [layer for layer in mlp.modules() if isinstance(layer, torch.nn.Linear)]
    with torch.device("meta"):
        size = cost.size_of(Network("mlp:width=7", (1, 8, 8), 3).module, (1, 8, 8))
    assert size.products == sum(2 * layer.weight.numel() for layer in linear)
    assert size.weights == sum(p.numel() for p in mlp.parameters())


def test_passes_are_those_of_the_convnet_by_hand():
    network = Network("convnet", (3, 32, 32), 10)
    with torch.device("meta"):
        size = cost.size_of(Network("convnet", (3, 32, 32), 10).module, (3, 32, 32))
    by_hand = CpuConvNet(network, "fp32").operations(100)
    for name, passes in (("gradient", cost.GRADIENT), ("adjoint", cost.ADJOINT)):
        assert passes * size.products * 100 == pytest.approx(by_hand[name], rel=0.05)


def test_each_setting_counts(digits):
    base = work(digits)
    assert work(digits, networks_per_step=3).operations == pytest.approx(3 * base.operations)
    short, longer = (work(digits, inner_steps=2 * t, window=t, real_per_class=1) for t in (10, 20))
    assert longer.operations / short.operations == pytest.approx(2, rel=0.05)  # but for the images that judge
    assert work(digits, window=5).memory < base.memory
    assert cost.unroll_of(SMALL) == (15, 10)  # which ends at random, from 10 to 20
    assert cost.unroll_of(changed(SMALL, window_place="late")) == (20, 10)
    assert cost.unroll_of(changed(SMALL, window=None)) == (20, 20)


def test_devices_share(digits):
    alone, four = work(digits, networks_per_step=4), work(digits, 4, networks_per_step=4)
    assert four.operations == pytest.approx(alone.operations / 4)
    assert (alone.wire, alone.idle) == (0, 0)
    state = Distiller(digits, resolve(SMALL, digits), *_parts(digits)).begin()
    assert four.wire == 3 * 4 * sum(tensor.numel() for tensor in state.learned)
    assert work(digits, 3).idle == 2
    by_batch = work(digits, 2, shard="batch")
    assert by_batch.operations == pytest.approx(work(digits).operations / 2, rel=0.01)
    assert by_batch.wire > four.wire


def _parts(images):
    config = resolve(SMALL, images)
    return cost.Preprocess.fit(images.train.images, config.run.preprocess), Network(config.inner.network, images.shape, 10)


class Clock:
    """A Distiller whose outer steps take what a formula says, by a clock that only they move."""

    now = 0.0

    def __init__(self, images, config, *_):
        self.inner = config.inner
        self.begin = lambda: None
        self.threads = lambda: torch.no_grad()

    def step(self, state):
        inner = self.inner
        steps, back = cost.unroll_of(changed(DistillConfig(), inner_steps=inner.steps, window=inner.window,
                                             window_place=inner.window_place))  # fmt: skip
        Clock.now += inner.networks_per_step * (0.5 + 0.2 * steps + 0.7 * back)


def test_long_unrolls_are_extrapolated_from_short_ones(digits, monkeypatch):
    monkeypatch.setattr(cost, "Distiller", Clock)
    monkeypatch.setattr(cost.time, "perf_counter", lambda: Clock.now)
    config = changed(SMALL, networks_per_step=2)
    assert cost.measured(digits, config).each == pytest.approx(2 * (0.5 + 0.2 * 15 + 0.7 * 10))
    monkeypatch.setattr(cost, "SHORT", 1e9)
    before = Clock.now
    assert cost.measured(digits, config).each == pytest.approx(2 * (0.5 + 0.2 * 15 + 0.7 * 10))
    assert Clock.now > before


def test_a_stream_is_extrapolated_from_the_beginning_of_a_task(digits, monkeypatch):
    now, asked = [0.0], []

    def run(images, config, *, out, seeds, learners, device):
        asked.append((config.stream.tasks, config.buffer.images))
        now[0] += 2.0 + 0.01 * config.stream.per_task

    monkeypatch.setattr(cost, "run_stream", run)
    monkeypatch.setattr(cost.time, "perf_counter", lambda: now[0])
    config = changed(STREAMS["rotations"], tasks=20, per_task=1000, buffer=200)
    assert cost.measured_stream(digits, config, ["er"]) == {"er": pytest.approx(20 * (2.0 + 10.0))}
    assert set(asked) == {(1, 10)}


def test_the_h200_is_as_fast_as_it_was():
    """Its rates give the seconds of results/engine.json."""
    network = "convnet"
    for found, steps, batch, window in (
        ("320 images a step", 150, 32, None), ("100 images a step", 150, 10, None),
        ("320 images a step, window of 50", 150, 32, 50),
    ):  # fmt: skip
        rows = [run["engine"][found] for run in read_json(ROOT / "results" / "engine.json")["runs"] if found in run["engine"]]
        config = preset(
            "fast", network=network, inner_steps=steps, window=window, window_place="late", inner_per_class=batch,
            real_per_class=64, bases=46, matrices=115,
        )  # fmt: skip
        used = cost.work(config, (3, 32, 32), 10, 50_000)
        assert cost.DEVICES["h200"].seconds(used) == pytest.approx(rows[0]["(d) ConvNet, bf16"]["seconds"], rel=0.15)


def test_a_core_is_as_fast_as_it_was():
    """About: its rates are for a glance, before anything is measured."""
    plan, found = experiment_module("plan"), read_json(ROOT / "results" / "plan.json")["settings"]
    for name, (shape, settings) in plan.SETTINGS.items():
        images, measured = plan.noise(shape), found["rows"][name]["measured"]["s a step"]
        config = resolve(changed(DistillConfig(), **settings), images)
        if config.outer.objective == "unrolled":
            used = cost.work(config, images.shape, images.classes, len(images.train.images))
            guessed = cost.DEVICES["epyc-core"].seconds(used) / found["environment"]["threads"]
            assert 1 / 3 < guessed / measured < 3


TINY = ["--network", "mlp:width=8", "--inner-steps", "3", "--window", "3", "--outer-steps", "10"]


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cost, "LONG", 0.1)
    path = tmp_path / "plan.json"
    words = ["plan", "digits", *TINY, "--on", "here", "h200", "l40s", "--devices", "3", "--json", str(path)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "measured on this cpu; 2 idle" in out
    assert "by measured rates; 2 idle" in out
    assert "estimate, by the peak rate" in out
    rows = json.loads(path.read_text())["rows"]
    assert [row["on"] for row in rows] == ["here", "h200", "l40s"]
    for row in rows:
        assert row["in all"] == pytest.approx(row["before"] + 10 * row["seconds"])
    assert main(["plan", "digits", "--on", "abacus"]) == 2
    assert "unknown device 'abacus'" in capsys.readouterr().err
    assert main(["plan", "digits", "--devices", "0"]) == 2


def test_the_command_of_a_stream(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cost, "measured_stream", lambda images, config, learners, device: dict.fromkeys(learners, 10.0))
    words = ["plan", "digits", "--stream", "split", "--learners", "compress", "er", "--seeds", "3", "--workers", "2"]
    assert main(words) == 0
    assert "in all about 30 s: 3 seeds, 2 at a time" in capsys.readouterr().out
    assert main([*words, "--seeds", "0"]) == 2


def test_advice(digits):
    lines = cost.advice(digits, SMALL)
    assert 1 <= len(lines) <= 3
    assert "10 classes" in lines[0]


def test_the_page_has_the_tables_of_the_file():
    plan = experiment_module("plan")
    found = read_json(ROOT / "results" / "plan.json")
    text = (ROOT / "docs" / "scale.md").read_text()
    assert plan.paged(text, found) == text
    assert set(plan.tables(found)) == {"settings", "factors", "paper"}
    for row in found["settings"]["rows"].values():
        assert 1 / 1.3 < row["ratio"] < 1.3
    assert len(found["settings"]["rows"]) >= 5
    for name, row in found["paper"]["rows"].items():
        again = plan.on_paper(*map(int, name.split(", ")))
        assert again == pytest.approx(row, rel=1e-5)
