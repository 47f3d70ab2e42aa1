"""The ConvNet's kernels before the first block and behind the last, in Triton: patches of images, sums over images, the linear
layer with its loss."""

import triton
import triton.language as tl

from recollect.fast.kernels import pixel_of


@triton.jit
def unfold(
    images, x, gram, PIXELS: tl.constexpr,
    SOURCE: tl.constexpr, SIDE: tl.constexpr, PADDING: tl.constexpr, INPUTS: tl.constexpr, K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The 3x3 patches of PIXELS pixels of an image, [pixels, K], zero beyond their 9 INPUTS values; and the sum of products of
    these patches, each with a 1 behind its values, so that their sum is among the products."""
    n = tl.program_id(0)
    k = tl.arange(0, K)[:, None]
    r = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    pixel = pixel_of(r, SIDE)[None, :]
    down = k // 3 % 3 - PADDING
    right = k % 3 - PADDING
    row = pixel // SIDE + down
    column = pixel % SIDE + right
    inside = (k < 9 * INPUTS) & (row >= 0) & (row < SOURCE) & (column >= 0) & (column < SOURCE)
    at = (n * INPUTS + k // 9) * SOURCE * SOURCE + down * SOURCE + right + pixel // SIDE * SOURCE + pixel % SIDE
    patches = tl.load(images + at, mask=inside, other=0.0).to(x.dtype.element_ty)  # [K, pixels]: neighbours side by side
    tl.store(x + (n * SIDE * SIDE + r)[:, None] * K + tl.arange(0, K)[None, :], tl.trans(patches))
    marked = tl.where(k == 9 * INPUTS, 1.0, patches.to(tl.float32)).to(x.dtype.element_ty)
    out = (n * tl.num_programs(1) + tl.program_id(1)) * K * K + k * K + tl.arange(0, K)[None, :]
    tl.store(gram + out, tl.dot(marked, tl.trans(marked), input_precision=DOT))


@triton.jit
def fold(
    gx, by_images, images, PARTS: tl.constexpr,
    SOURCE: tl.constexpr, SIDE: tl.constexpr, PADDING: tl.constexpr, INPUTS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """The way back: the gradient by an image from the PARTS of that by its patches. PIXELS pixels of one of its channels."""
    HALF: tl.constexpr = SIDE // 2
    SQUARES: tl.constexpr = HALF * HALF
    n = tl.program_id(0)
    channel = tl.program_id(1)
    pixel = tl.program_id(2) * PIXELS + tl.arange(0, PIXELS)
    total = tl.zeros([PIXELS], tl.float32)
    for tap in tl.static_range(9):
        row = pixel // SOURCE + PADDING - tap // 3
        column = pixel % SOURCE + PADDING - tap % 3
        inside = (row >= 0) & (row < SIDE) & (column >= 0) & (column < SIDE) & (pixel < SOURCE * SOURCE)
        r = (row % 2 * 2 + column % 2) * SQUARES + row // 2 * HALF + column // 2
        for part in tl.static_range(PARTS):
            at = (((part * images + n) * INPUTS + channel) * 9 + tap) * SIDE * SIDE + r
            total += tl.load(gx + at, mask=inside, other=0.0).to(tl.float32)
    out = (n * INPUTS + channel) * SOURCE * SOURCE + pixel
    tl.store(by_images + out, total, mask=pixel < SOURCE * SOURCE)


@triton.jit
def total(partial, out, images, ALL_ROWS: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """The sum over images of one of the rows that backward left for each."""
    row = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in range(0, images, ROWS):
        n = start + tl.arange(0, ROWS)
        at = (n[:, None] * ALL_ROWS + row) * C + c[None, :]
        sums += tl.load(partial + at, mask=(n < images)[:, None], other=0.0)
    tl.store(out + row * C + c, tl.sum(sums, 0))


@triton.jit
def head(
    a, da, w, dw, bias, dbias, labels, losses, ge, dge, ga, dga, images, total,
    FEATURES: tl.constexpr, CLASSES: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TANGENT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The linear layer and cross-entropy for ROWS images: losses, ge = dL/dlogits, ga = dL/da; and their tangents.

    The loss is the mean over `total` images; classes are padded to PADDED.
    """
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = n < images
    e = tl.arange(0, PADDED)
    real = e < CLASSES
    f = tl.arange(0, BLOCK)
    logits = tl.zeros([ROWS, PADDED], tl.float32)
    dlogits = tl.zeros([ROWS, PADDED], tl.float32)
    for start in range(0, FEATURES, BLOCK):
        at = n[:, None] * FEATURES + start + f[None, :]
        weights = tl.load(w + e[None, :] * FEATURES + start + f[:, None], mask=real[None, :], other=0.0)
        features = tl.load(a + at, mask=here[:, None], other=0.0)
        logits += tl.dot(features, weights, input_precision=DOT)
        if TANGENT:
            dfeatures = tl.load(da + at, mask=here[:, None], other=0.0)
            dweights = tl.load(dw + e[None, :] * FEATURES + start + f[:, None], mask=real[None, :], other=0.0)
            dlogits += tl.dot(dfeatures, weights, input_precision=DOT)
            dlogits += tl.dot(features, dweights, input_precision=DOT)
    logits += tl.load(bias + e, mask=real, other=0.0)[None, :]
    logits = tl.where(real[None, :], logits, float("-inf"))
    logits -= tl.max(logits, 1)[:, None]
    exponentials = tl.exp(logits)
    sums = tl.sum(exponentials, 1)
    p = exponentials / sums[:, None]
    mine = e[None, :] == tl.load(labels + n, mask=here, other=0)[:, None]
    tl.store(losses + n, tl.log(sums) - tl.sum(tl.where(mine, logits, 0.0), 1), mask=here)
    kind = a.dtype.element_ty
    by_logits = tl.where(here[:, None], (p - tl.where(mine, 1.0, 0.0)) / total, 0.0).to(kind)
    tl.store(ge + n[:, None] * PADDED + e[None, :], by_logits, mask=here[:, None])
    if TANGENT:
        dlogits += tl.load(dbias + e, mask=real, other=0.0)[None, :]
        moved = p * (dlogits - tl.sum(p * dlogits, 1)[:, None]) / total
        dby_logits = tl.where(here[:, None], moved, 0.0).to(kind)
        tl.store(dge + n[:, None] * PADDED + e[None, :], dby_logits, mask=here[:, None])
    for start in range(0, FEATURES, BLOCK):
        at = n[:, None] * FEATURES + start + f[None, :]
        weights = tl.load(w + e[:, None] * FEATURES + start + f[None, :], mask=real[:, None], other=0.0)
        by_a = tl.dot(by_logits, weights, input_precision=DOT)
        tl.store(ga + at, by_a.to(kind), mask=here[:, None])
        if TANGENT:
            dweights = tl.load(dw + e[:, None] * FEATURES + start + f[None, :], mask=real[:, None], other=0.0)
            dby_a = tl.dot(dby_logits, weights, input_precision=DOT)
            dby_a += tl.dot(by_logits, dweights, input_precision=DOT)
            tl.store(dga + at, dby_a.to(kind), mask=here[:, None])


@triton.jit
def head_weights(
    a, da, ge, dge, by_w, by_bias, images,
    FEATURES: tl.constexpr, CLASSES: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TANGENT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The gradient by the linear layer's weights (its tangent, with TANGENT) for BLOCK features."""
    f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, PADDED)
    total = tl.zeros([PADDED, BLOCK], tl.float32)
    bias = tl.zeros([PADDED], tl.float32)
    for start in range(0, images, ROWS):
        n = start + tl.arange(0, ROWS)
        here = n < images
        features = tl.load(a + n[:, None] * FEATURES + f[None, :], mask=here[:, None], other=0.0)
        by_logits = tl.load(ge + n[None, :] * PADDED + e[:, None], mask=here[None, :], other=0.0)
        if TANGENT:
            dfeatures = tl.load(da + n[:, None] * FEATURES + f[None, :], mask=here[:, None], other=0.0)
            dby_logits = tl.load(dge + n[None, :] * PADDED + e[:, None], mask=here[None, :], other=0.0)
            total += tl.dot(by_logits, dfeatures, input_precision=DOT)
            total += tl.dot(dby_logits, features, input_precision=DOT)
            bias += tl.sum(dby_logits.to(tl.float32), 1)
        else:
            total += tl.dot(by_logits, features, input_precision=DOT)
            bias += tl.sum(by_logits.to(tl.float32), 1)
    tl.store(by_w + e[:, None] * FEATURES + f[None, :], total, mask=e[:, None] < CLASSES)
    if tl.program_id(0) == 0:
        tl.store(by_bias + e, bias, mask=e < CLASSES)
