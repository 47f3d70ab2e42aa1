"""Patches of maps, and the way back: against torch's own, and each other's transpose; in Triton's interpreter too."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from recollect import unroll
from recollect.fast import patches
from recollect.fast.chain import Chain, Half
from recollect.fast.engine import Engine, Start
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
        alive = torch.randn(maps.shape, generator=generator).to(DEVICE)
        alive[0, 0, 0, 0] = torch.nan  # which a ReLU lets through
        dead = alive <= 0
        assert torch.equal(window.spread(maps, alive), window.spread(maps.masked_fill(dead, 0)))
        assert torch.equal(window.spread(alive, alive).nan_to_num(), window.spread(alive.relu()).nan_to_num())
        assert window.spread(alive, alive).isnan().sum() == window.spread(alive.isnan().float()).sum()
        assert torch.equal(window.gather(other, alive), back.masked_fill(dead, 0))
    assert back.shape == maps.shape
    assert torch.isclose((back.double() * maps).sum(), (other.double() * found).sum(), rtol=1e-5, atol=1e-4)
    columns = other.unflatten(3, (-1, channels)).permute(0, 4, 3, 1, 2).reshape(columns.shape)
    expected = F.fold(columns, (height, width), window.kernel, padding=padding, stride=stride).movedim(1, -1)
    assert torch.allclose(back, expected, atol=1e-5)


@pytest.mark.parametrize(("passes", "tolerance"), [(Chain, 1e-4), (Half, 0.1)])
def test_a_network_s_passes_by_the_kernels(monkeypatch, passes, tolerance):
    """La-MAML's network in float32 and bf16, one captured step after another, against float64."""
    pytest.importorskip("triton")
    if DEVICE == "cpu":
        monkeypatch.setattr(patches, "_has_kernels", lambda tensor, _: tensor.dtype != torch.double)
    net = Network("lamaml:width=4,hidden=5", (2, 5, 6), 3)
    engine = Engine(passes(net))
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
        assert float((ours.images - theirs.images).norm() / theirs.images.norm()) < tolerance


def test_half_precision_against_float64():
    """Of two unrolls that learn, side by side; their queries are judged in full."""
    net, generator = Network("lamaml:width=16,hidden=32", (3, 8, 8), 3), torch.Generator().manual_seed(0)
    labels = torch.arange(3).repeat_interleave(20)
    images = (torch.randn(3, 3, 8, 8, generator=generator)[labels] + torch.randn(60, 3, 8, 8, generator=generator)).to(DEVICE)
    batches = torch.stack([torch.randperm(60, generator=generator)[:30] for _ in range(30)]).to(DEVICE)
    labels, query = labels.to(DEVICE), (images[::2], labels[::2].to(DEVICE))
    asked = {"lr": 0.02, "momentum": 0.9, "window": 10}
    starts = [Start(net.fresh(seed, DEVICE), batches) for seed in range(2)]
    exact = [
        unroll.metagradient(
            net.loss, {name: p.double() for name, p in start.params.items()}, images.double(), labels, batches,
            (query[0].double(), query[1]), **asked,
        ).images
        for start in starts
    ]  # fmt: skip
    for passes, least, most in ((Chain(net), 0, 1e-3), (Half(net), 1e-3, 0.1)):
        for found, expected in zip(Engine(passes).together(starts, images, labels, query, **asked), exact, strict=True):
            assert least <= float((found.images - expected).norm() / expected.norm()) < most
    vector = Chain(net).pack(starts[0].params)
    assert torch.equal(Half(net).judge(vector[None], *query)[0], Chain(net).judge(vector[None], *query)[0])
    assert Half(net).held(10, adjoint=True) < Chain(net).held(10, adjoint=True)


def test_kernels_are_for_float32_and_bf16_on_a_gpu_that_they_reach():
    near, far = Window(1, 4, 4, 3, 1, 1), Window(1, 4, 4, 1, 4, 0)  # the second has more maps than patches
    assert not patches._has_kernels(torch.zeros(1), near)
    if DEVICE == "cuda":
        for kind in (torch.float32, torch.bfloat16):
            assert patches._has_kernels(torch.zeros(1, device=DEVICE, dtype=kind), near) == patches._triton
        assert not patches._has_kernels(torch.zeros(1, device=DEVICE, dtype=torch.double), near)
        for window in (near, far):
            many = torch.zeros(1, device=DEVICE).expand(patches.MOST // 16 + 1)
            assert not patches._has_kernels(many, window)
