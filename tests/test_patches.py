"""Patches of maps, and the way back: against torch's own, and each other's transpose; in Triton's interpreter too."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from recollect import unroll
from recollect.fast import patches
from recollect.fast.chain import Chain
from recollect.fast.engine import Engine
from recollect.fast.patches import Window
from recollect.nets import Network

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=25, deadline=None)
@given(
    size=st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(2, 7)] * 2),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
)
@pytest.mark.parametrize("kind", ["torch", "triton"])
def test_there_and_back(kind, size, kernel, stride, padding):
    if kind == "triton":
        pytest.importorskip("triton")
    count, channels, height, width = size
    window = Window(channels, height, width, min(kernel, height, width), stride, padding)
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(count, height, width, channels, generator=generator).to(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patches, "_has_kernels", lambda *_: kind == "triton")
        found = window.spread(maps)
        columns = F.unfold(maps.movedim(-1, 1), window.kernel, padding=padding, stride=stride)  # [N, C k k, L]
        expected = columns.unflatten(1, (channels, -1)).permute(0, 3, 2, 1).reshape(found.shape)
        assert torch.equal(found, expected)
        other = torch.randn(found.shape, generator=generator).to(DEVICE)
        back = window.gather(other)
    assert back.shape == maps.shape
    assert torch.isclose((back.double() * maps).sum(), (other.double() * found).sum(), rtol=1e-5, atol=1e-4)
    columns = other.unflatten(3, (-1, channels)).permute(0, 4, 3, 1, 2).reshape(columns.shape)
    expected = F.fold(columns, (height, width), window.kernel, padding=padding, stride=stride).movedim(1, -1)
    assert torch.allclose(back, expected, atol=1e-5)


def test_a_network_s_passes_by_the_kernels(monkeypatch):
    """La-MAML's network in float32, one captured step after another, against float64."""
    pytest.importorskip("triton")
    if DEVICE == "cpu":
        monkeypatch.setattr(patches, "_has_kernels", lambda tensor, _: tensor.dtype == torch.float32)
    net = Network("lamaml:width=4,hidden=5", (2, 5, 6), 3)
    engine = Engine(Chain(net))
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        images, query = (torch.randn(n, 2, 5, 6, generator=generator).to(DEVICE) for n in (6, 4))
        labels, truth = (torch.randint(3, (n,), generator=generator).to(DEVICE) for n in (6, 4))
        batches = torch.randint(6, (3, 4), generator=generator).to(DEVICE)
        params = net.fresh(seed, DEVICE)
        ours = engine.metagradient(params, images, labels, batches, (query, truth), lr=0.1, momentum=0.9)
        exact = {name: p.double() for name, p in params.items()}
        theirs = unroll.metagradient(
            net.loss, exact, images.double(), labels, batches, (query.double(), truth), lr=0.1, momentum=0.9
        )
        assert theirs.images.norm() > 0
        assert float((ours.images - theirs.images).norm() / theirs.images.norm()) < 1e-4


def test_kernels_are_for_float32_on_a_gpu_that_they_reach():
    near, far = Window(1, 4, 4, 3, 1, 1), Window(1, 4, 4, 1, 4, 0)  # the second has more maps than patches
    assert not patches._has_kernels(torch.zeros(1), near)
    if DEVICE == "cuda":
        assert patches._has_kernels(torch.zeros(1, device=DEVICE), near) == patches._triton
        assert not patches._has_kernels(torch.zeros(1, device=DEVICE, dtype=torch.double), near)
        for window in (near, far):
            many = torch.zeros(1, device=DEVICE).expand(patches.MOST // 16 + 1)
            assert not patches._has_kernels(many, window)
