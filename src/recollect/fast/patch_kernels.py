"""patches.py in Triton: one number of the result for each place, whatever it takes to find it."""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from recollect.fast.patches import Window

BLOCK = 1024


def launch(kernel, given: Tensor, alive: Tensor | None, window: "Window", *shape: int) -> Tensor:
    """What a kernel makes of maps or patches, [N, *shape]."""
    given, found = given.contiguous(), given.new_empty(len(given), *shape)
    if count := found.numel():
        kernel[(triton.cdiv(count, BLOCK),)](
            given, given if alive is None else alive.contiguous(), found, count, alive is not None, window.height,
            window.width, window.out_height, window.out_width, window.channels, window.kernel, window.stride,
            window.padding, BLOCK,
        )  # fmt: skip
    return found


@triton.jit
def spread(
    maps, alive, patches, count, RELU: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    C: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """patches[n, a, b, i, j, c] = maps[n, a STRIDE + i - PADDING, b STRIDE + j - PADDING, c], or 0 outside
    and, with RELU, where alive is not above 0"""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    c = at % C
    j = at // C % K
    i = at // (C * K) % K
    b = at // (C * K * K) % OUT_W
    a = at // (C * K * K * OUT_W) % OUT_H
    n = at // (C * K * K * OUT_W * OUT_H)
    h = a * STRIDE + i - PADDING
    w = b * STRIDE + j - PADDING
    seen = inside & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    place = ((n * H + h) * W + w) * C + c
    value = tl.load(maps + place, mask=seen, other=0.0).to(tl.float32)
    if RELU:
        value = tl.where(tl.load(alive + place, mask=seen, other=1.0).to(tl.float32) <= 0, 0.0, value)  # but not nan
    tl.store(patches + at, value, mask=inside)


@triton.jit
def gather(
    patches, alive, maps, count, RELU: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    C: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """maps[n, h, w, c] = the sum of patches[n, a, b, i, j, c] over all a, b, i, j that look at h, w; with RELU 0
    where alive is not above 0"""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    c = at % C
    w = at // C % W
    h = at // (C * W) % H
    n = at // (C * W * H)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(K):
        down = h + PADDING - i
        a = down // STRIDE
        rows = inside & (down >= 0) & (down % STRIDE == 0) & (a < OUT_H)
        for j in tl.static_range(K):
            right = w + PADDING - j
            b = right // STRIDE
            seen = rows & (right >= 0) & (right % STRIDE == 0) & (b < OUT_W)
            place = ((((n * OUT_H + a) * OUT_W + b) * K + i) * K + j) * C + c
            total += tl.load(patches + place, mask=seen, other=0.0)
    if RELU:
        total = tl.where(tl.load(alive + at, mask=inside, other=1.0).to(tl.float32) <= 0, 0.0, total)
    tl.store(maps + at, total, mask=inside)
