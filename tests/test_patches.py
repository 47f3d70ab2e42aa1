"""Patches of maps, and the way back: against torch's own, and each other's transpose; in Triton's interpreter too."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from recollect.fast import patches
from recollect.fast.patches import Window

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


def test_kernels_are_for_float32_on_a_gpu_that_they_reach():
    assert not patches._has_kernels(torch.zeros(1), 1)
    if DEVICE == "cuda":
        assert patches._has_kernels(torch.zeros(1, device=DEVICE), 1) == patches._triton
        assert not patches._has_kernels(torch.zeros(1, device=DEVICE), patches.MOST + 1)
        assert not patches._has_kernels(torch.zeros(1, device=DEVICE, dtype=torch.double), 1)
