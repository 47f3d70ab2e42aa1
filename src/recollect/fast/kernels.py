"""The ConvNet's kernels: everything of a block but its 128-channel convolutions, in Triton.

A block is y = w * x, then InstanceNorm, ReLU and 2x2 average pooling to a. For each of its passes there is one kernel:

    forward    y, and its tangent if wanted -> a, and its tangent
    backward   the gradient by a, and its tangent if wanted -> the gradient by y, and its tangent

The first block's convolution has so few products that its maps are never written: with FUSED, both kernels take the image's
patches instead of y and multiply them anew wherever y is needed, and backward goes on to the gradient by weights and patches.

Maps are channels-last. A map's pixels are numbered by their place in the 2x2 square first, and by the square then, so that
pixel r of an image lies in square r % SQUARES: pooling adds up four tiles, and its way back reads one square for each pixel.
Statistics and all that is elementwise are float32; what is stored, and what goes into a matrix product, has the type of the
tensors given. Written by hand, d is a tangent and g a gradient: dy, gy, dgy.
"""

import triton
import triton.language as tl

EPSILON = tl.constexpr(1e-5)


@triton.jit
def _y(y, dy, ddy, x, w, n, r, c, SIDE: tl.constexpr, C: tl.constexpr, K: tl.constexpr, FUSED: tl.constexpr, PRECISION: tl.constexpr):
    """y at pixels r and channels c of image n: read (as the sum of dy and ddy, for a tangent), or multiplied anew."""
    HALF: tl.constexpr = SIDE // 2
    SQUARES: tl.constexpr = HALF * HALF
    if FUSED:
        k = tl.arange(0, K)
        patches = tl.load(x + (n * SIDE * SIDE + r)[:, None] * K + k[None, :])
        return tl.dot(patches, w, input_precision=PRECISION)
    else:
        place = r // SQUARES
        square = r % SQUARES
        pixel = (2 * (square // HALF) + place // 2) * SIDE + 2 * (square % HALF) + place % 2
        at = (n * SIDE * SIDE + pixel)[:, None] * C + c[None, :]
        if y is None:
            return tl.load(dy + at).to(tl.float32) + tl.load(ddy + at).to(tl.float32)
        else:
            return tl.load(y + at).to(tl.float32)


@triton.jit
def forward(
    y, dy, ddy, x, means, w, dw, gamma, beta, dgamma, dbeta, a, da, stats, images,
    SIDE: tl.constexpr, C: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    FUSED: tl.constexpr, TANGENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One image and CHANNELS channels: statistics (kept for the way back), then the pooled map."""
    HALF: tl.constexpr = SIDE // 2
    SQUARES: tl.constexpr = HALF * HALF
    PIXELS: tl.constexpr = SIDE * SIDE
    n = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    rows = tl.arange(0, ROWS)
    weight = None
    dweight = None
    if FUSED:
        k = tl.arange(0, K)
        weight = tl.load(w + k[:, None] * C + c[None, :])
        patch = tl.load(means + n * K + k)[:, None]
        mean = tl.sum(patch * weight.to(tl.float32), 0)
        if TANGENT:
            dweight = tl.load(dw + k[:, None] * C + c[None, :])
            dmean = tl.sum(patch * dweight.to(tl.float32), 0)
    else:
        mean = tl.zeros([CHANNELS], tl.float32)
        dmean = tl.zeros([CHANNELS], tl.float32)
        for start in range(0, PIXELS, ROWS):
            mean += tl.sum(_y(y, None, None, x, weight, n, start + rows, c, SIDE, C, K, FUSED, PRECISION), 0)
            if TANGENT:
                dmean += tl.sum(_y(None, dy, ddy, x, dweight, n, start + rows, c, SIDE, C, K, FUSED, PRECISION), 0)
        mean /= PIXELS
        dmean /= PIXELS

    variance = tl.zeros([CHANNELS], tl.float32)
    covariance = tl.zeros([CHANNELS], tl.float32)
    for start in range(0, PIXELS, ROWS):
        centred = _y(y, None, None, x, weight, n, start + rows, c, SIDE, C, K, FUSED, PRECISION) - mean[None, :]
        variance += tl.sum(centred * centred, 0)
        if TANGENT:
            covariance += tl.sum(
                centred * _y(None, dy, ddy, x, dweight, n, start + rows, c, SIDE, C, K, FUSED, PRECISION), 0
            )
    scale = 1 / tl.sqrt_rn(variance / PIXELS + EPSILON)
    share = covariance / PIXELS * scale  # mean of y-hat times dy
    at = n * C + c
    tl.store(stats + at, mean)
    tl.store(stats + images * C + at, scale)
    if TANGENT:
        tl.store(stats + 2 * images * C + at, dmean)
        tl.store(stats + 3 * images * C + at, share)

    gain = tl.load(gamma + c)[None, :]
    offset = tl.load(beta + c)[None, :]
    if TANGENT:
        dgain = tl.load(dgamma + c)[None, :]
        doffset = tl.load(dbeta + c)[None, :]
    TILE: tl.constexpr = ROWS if ROWS < SQUARES else SQUARES
    squares = tl.arange(0, TILE)
    for start in range(0, SQUARES, TILE):
        pooled = tl.zeros([TILE, CHANNELS], tl.float32)
        dpooled = tl.zeros([TILE, CHANNELS], tl.float32)
        for place in tl.static_range(4):
            r = place * SQUARES + start + squares
            hat = (_y(y, None, None, x, weight, n, r, c, SIDE, C, K, FUSED, PRECISION) - mean[None, :]) * scale[None, :]
            z = hat * gain + offset
            pooled += tl.maximum(z, 0.0)
            if TANGENT:
                moved = _y(None, dy, ddy, x, dweight, n, r, c, SIDE, C, K, FUSED, PRECISION) - dmean[None, :]
                dhat = (moved - hat * share[None, :]) * scale[None, :]
                dpooled += tl.where(z > 0, dgain * hat + gain * dhat + doffset, 0.0)
        out = (n * SQUARES + start + squares)[:, None] * C + c[None, :]
        tl.store(a + out, (pooled * 0.25).to(a.dtype.element_ty))
        if TANGENT:
            tl.store(da + out, (dpooled * 0.25).to(da.dtype.element_ty))


@triton.jit
def _back(
    y, dy, ddy, x, w, dw, ga, dga, ddga, mean, scale, dmean, share, gain, dgain, offset, n, r, c,
    SIDE: tl.constexpr, C: tl.constexpr, K: tl.constexpr, FUSED: tl.constexpr, TANGENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(y-hat, gz, their tangents) at pixels r: what both sweeps of backward begin with."""
    SQUARES: tl.constexpr = (SIDE // 2) * (SIDE // 2)
    hat = (_y(y, None, None, x, w, n, r, c, SIDE, C, K, FUSED, PRECISION) - mean) * scale
    alive = hat * gain + offset > 0
    at = (n * SQUARES + r % SQUARES)[:, None] * C + c[None, :]
    gz = tl.where(alive, tl.load(ga + at).to(tl.float32) * 0.25, 0.0)
    dhat = hat
    dgz = gz
    if TANGENT:
        dhat = (_y(None, dy, ddy, x, dw, n, r, c, SIDE, C, K, FUSED, PRECISION) - dmean - hat * share) * scale
        given = tl.load(dga + at).to(tl.float32)
        if ddga is not None:
            given += tl.load(ddga + at).to(tl.float32)
        dgz = tl.where(alive, given * 0.25, 0.0)
    return hat, gz, dhat, dgz


@triton.jit
def backward(
    y, dy, ddy, x, w, dw, gamma, beta, dgamma, stats, ga, dga, ddga, gy, dgy, gx, partial, images,
    SIDE: tl.constexpr, C: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    FUSED: tl.constexpr, TANGENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One image and CHANNELS channels: gy (and dgy), and this image's part of the gradients by gamma and beta.

    `partial` holds, for each image, K rows by the fused weight (none if not FUSED), one by gamma and one by beta. With
    TANGENT it gets the tangents of these gradients alone, and if FUSED, gx gets these channels' part of the tangent of the
    gradient by the patches.
    """
    PIXELS: tl.constexpr = SIDE * SIDE
    n = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    rows = tl.arange(0, ROWS)
    at = n * C + c
    mean = tl.load(stats + at)[None, :]
    scale = tl.load(stats + images * C + at)[None, :]
    gain = tl.load(gamma + c)[None, :]
    offset = tl.load(beta + c)[None, :]
    dmean = mean
    share = mean
    dgain = gain
    if TANGENT:
        dmean = tl.load(stats + 2 * images * C + at)[None, :]
        share = tl.load(stats + 3 * images * C + at)[None, :]
        dgain = tl.load(dgamma + c)[None, :]
    weight = None
    dweight = None
    if FUSED:
        k = tl.arange(0, K)
        weight = tl.load(w + k[:, None] * C + c[None, :])
        if TANGENT:
            dweight = tl.load(dw + k[:, None] * C + c[None, :])

    by_beta = tl.zeros([CHANNELS], tl.float32)
    by_gamma = tl.zeros([CHANNELS], tl.float32)
    dby_beta = tl.zeros([CHANNELS], tl.float32)
    dby_gamma = tl.zeros([CHANNELS], tl.float32)
    for start in range(0, PIXELS, ROWS):
        hat, gz, dhat, dgz = _back(
            y, dy, ddy, x, weight, dweight, ga, dga, ddga, mean, scale, dmean, share, gain, dgain, offset, n, start + rows, c,
            SIDE, C, K, FUSED, TANGENT, PRECISION,
        )  # fmt: skip
        by_beta += tl.sum(gz, 0)
        by_gamma += tl.sum(gz * hat, 0)
        if TANGENT:
            dby_beta += tl.sum(dgz, 0)
            dby_gamma += tl.sum(dgz * hat + gz * dhat, 0)

    WEIGHTS: tl.constexpr = K if FUSED else 0
    part = partial + n * (WEIGHTS + 2) * C + c
    tl.store(part + WEIGHTS * C, dby_gamma if TANGENT else by_gamma)
    tl.store(part + (WEIGHTS + 1) * C, dby_beta if TANGENT else by_beta)
    by_beta = by_beta[None, :] / PIXELS
    by_gamma = by_gamma[None, :] / PIXELS
    dby_beta = dby_beta[None, :] / PIXELS
    dby_gamma = dby_gamma[None, :] / PIXELS
    factor = scale * gain
    dfactor = scale * (dgain - share * gain * scale)

    if FUSED:
        by_weight = tl.zeros([K, CHANNELS], tl.float32)
    for start in range(0, PIXELS, ROWS):
        r = start + rows
        hat, gz, dhat, dgz = _back(
            y, dy, ddy, x, weight, dweight, ga, dga, ddga, mean, scale, dmean, share, gain, dgain, offset, n, r, c,
            SIDE, C, K, FUSED, TANGENT, PRECISION,
        )  # fmt: skip
        centred = gz - by_beta - hat * by_gamma
        by_y = factor * centred
        if TANGENT:
            dby_y = dfactor * centred + factor * (dgz - dby_beta - dhat * by_gamma - hat * dby_gamma)
        if FUSED:
            k = tl.arange(0, K)
            patches = tl.load(x + (n * PIXELS + r)[None, :] * K + k[:, None])  # [K, ROWS]
            kind = patches.dtype
            if TANGENT:
                by_weight += tl.dot(patches, dby_y.to(kind), input_precision=PRECISION)
                by_patch = tl.dot(by_y.to(kind), tl.trans(dweight), input_precision=PRECISION)
                by_patch += tl.dot(dby_y.to(kind), tl.trans(weight), input_precision=PRECISION)
                out = (tl.program_id(1) * images + n) * PIXELS + r
                tl.store(gx + out[:, None] * K + k[None, :], by_patch.to(gx.dtype.element_ty))
            else:
                by_weight += tl.dot(patches, by_y.to(kind), input_precision=PRECISION)
        else:
            HALF: tl.constexpr = SIDE // 2
            SQUARES: tl.constexpr = HALF * HALF
            pixel = (2 * (r % SQUARES // HALF) + r // SQUARES // 2) * SIDE + 2 * (r % SQUARES % HALF) + r // SQUARES % 2
            out = (n * PIXELS + pixel)[:, None] * C + c[None, :]
            tl.store(gy + out, by_y.to(gy.dtype.element_ty))
            if TANGENT:
                tl.store(dgy + out, dby_y.to(dgy.dtype.element_ty))
    if FUSED:
        k = tl.arange(0, K)
        tl.store(part[None, :] + k[:, None] * C, by_weight)


@triton.jit
def unfold(
    images, x, means,
    SOURCE: tl.constexpr, SIDE: tl.constexpr, PADDING: tl.constexpr, INPUTS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """An image's 3x3 patches, [pixels, K], zero beyond its 9 INPUTS values; and the mean patch."""
    HALF: tl.constexpr = SIDE // 2
    SQUARES: tl.constexpr = HALF * HALF
    n = tl.program_id(0)
    k = tl.arange(0, K)[None, :]
    mean = tl.zeros([K], tl.float32)
    for start in range(0, SIDE * SIDE, ROWS):
        r = (start + tl.arange(0, ROWS))[:, None]
        row = 2 * (r % SQUARES // HALF) + r // SQUARES // 2 + k // 3 % 3 - PADDING
        column = 2 * (r % SQUARES % HALF) + r // SQUARES % 2 + k % 3 - PADDING
        inside = (k < 9 * INPUTS) & (row >= 0) & (row < SOURCE) & (column >= 0) & (column < SOURCE)
        at = ((n * INPUTS + k // 9) * SOURCE + row) * SOURCE + column
        patches = tl.load(images + at, mask=inside, other=0.0).to(x.dtype.element_ty)
        tl.store(x + (n * SIDE * SIDE + r) * K + k, patches)
        mean += tl.sum(patches.to(tl.float32), 0)
    tl.store(means + n * K + tl.arange(0, K), mean / (SIDE * SIDE))


@triton.jit
def fold(
    gx, by_images, images, PARTS: tl.constexpr,
    SOURCE: tl.constexpr, SIDE: tl.constexpr, PADDING: tl.constexpr, INPUTS: tl.constexpr, K: tl.constexpr, PIXELS: tl.constexpr,
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
            at = ((part * images + n) * SIDE * SIDE + r) * K + channel * 9 + tap
            total += tl.load(gx + at, mask=inside, other=0.0).to(tl.float32)
    out = (n * INPUTS + channel) * SOURCE * SOURCE + pixel
    tl.store(by_images + out, total, mask=pixel < SOURCE * SOURCE)


@triton.jit
def head(
    a, da, w, dw, bias, dbias, labels, losses, ge, dge, ga, dga, images, total,
    FEATURES: tl.constexpr, CLASSES: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TANGENT: tl.constexpr, PRECISION: tl.constexpr,
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
        logits += tl.dot(features, weights, input_precision=PRECISION)
        if TANGENT:
            dfeatures = tl.load(da + at, mask=here[:, None], other=0.0)
            dweights = tl.load(dw + e[None, :] * FEATURES + start + f[:, None], mask=real[None, :], other=0.0)
            dlogits += tl.dot(dfeatures, weights, input_precision=PRECISION)
            dlogits += tl.dot(features, dweights, input_precision=PRECISION)
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
        by_a = tl.dot(by_logits, weights, input_precision=PRECISION)
        tl.store(ga + at, by_a.to(kind), mask=here[:, None])
        if TANGENT:
            dweights = tl.load(dw + e[:, None] * FEATURES + start + f[None, :], mask=real[:, None], other=0.0)
            dby_a = tl.dot(dby_logits, weights, input_precision=PRECISION)
            dby_a += tl.dot(by_logits, dweights, input_precision=PRECISION)
            tl.store(dga + at, dby_a.to(kind), mask=here[:, None])


@triton.jit
def head_weights(
    a, da, ge, dge, by_w, by_bias, images,
    FEATURES: tl.constexpr, CLASSES: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TANGENT: tl.constexpr, PRECISION: tl.constexpr,
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
            total += tl.dot(by_logits, dfeatures, input_precision=PRECISION)
            total += tl.dot(dby_logits, features, input_precision=PRECISION)
            bias += tl.sum(dby_logits.to(tl.float32), 1)
        else:
            total += tl.dot(by_logits, features, input_precision=PRECISION)
            bias += tl.sum(by_logits.to(tl.float32), 1)
    tl.store(by_w + e[:, None] * FEATURES + f[None, :], total, mask=e[:, None] < CLASSES)
    if tl.program_id(0) == 0:
        tl.store(by_bias + e, bias, mask=e < CLASSES)
