"""The ConvNet's kernels: everything of a block but its 128-channel convolutions, in Triton.

A block is y = w * x, then InstanceNorm, ReLU and 2x2 average pooling to a. For each of its passes there is one kernel:

    forward    y, and its tangent if wanted -> a, and its tangent
    backward   the gradient by a, and its tangent if wanted -> the gradient by y, and its tangent

The first block's convolution has so few products that its maps are never written: with FUSED, both kernels take the image's
patches instead of y and multiply them anew wherever y is needed, and backward goes on to the gradient by weights and patches.

What makes them short: where a pixel is alive (z > 0) the block is linear in y, and everything else is the same for a whole
2x2 square or a whole channel. So forward keeps, for each square, how many of its pixels are alive and the sums of y-hat and
its tangent over them; the norm's own gradients follow from those without another look at y. With u and v constant in a
square, and A, B, C, E constant in a channel of an image,

    gy = [z > 0] u + A (y - mean) + B           dgy = [z > 0] v + A (dy - dmean) + C (y - mean) + E

and for the first block the linear terms need no pixels at all, but the patches' mean and covariance.

Maps are channels-last. A map's pixels are numbered by their place in the 2x2 square first, and by the square then, so that
pixel r of an image lies in square r % SQUARES. Statistics and all that is elementwise are float32; what is stored, and what
goes into a matrix product, has the type of the tensors given. A leading d is a tangent, a g a gradient: dy, gy, dgy.
"""

import triton
import triton.language as tl

EPSILON = tl.constexpr(1e-5)


@triton.jit
def _y(y, more, x, w, n, r, c, SIDE: tl.constexpr, C: tl.constexpr, K: tl.constexpr, FUSED: tl.constexpr, DOT: tl.constexpr):
    """y at pixels r and channels c of image n: read, as a sum of two if there is `more`; or multiplied anew."""
    if FUSED:
        k = tl.arange(0, K)
        patches = tl.load(x + (n * SIDE * SIDE + r)[:, None] * K + k[None, :])
        return tl.dot(patches, w, input_precision=DOT)
    else:
        at = (n * SIDE * SIDE + pixel_of(r, SIDE))[:, None] * C + c[None, :]
        value = tl.load(y + at).to(tl.float32)
        if more is not None:
            value += tl.load(more + at).to(tl.float32)
        return value


@triton.jit
def pixel_of(r, SIDE: tl.constexpr):
    """Where pixel r lies in the map, row by row."""
    HALF: tl.constexpr = SIDE // 2
    SQUARES: tl.constexpr = HALF * HALF
    place = r // SQUARES
    square = r % SQUARES
    return (2 * (square // HALF) + place // 2) * SIDE + 2 * (square % HALF) + place % 2


@triton.jit
def _pool(values):
    """The sum over the pixels of each square, of a whole map: its places lie one behind the other."""
    return tl.sum(tl.reshape(values, [4, values.shape[0] // 4, values.shape[1]]), 0)


@triton.jit
def _spread(values):
    """The way back: a value for each square, at all of its pixels."""
    four = tl.broadcast_to(values[None, :, :], [4, values.shape[0], values.shape[1]])
    return tl.reshape(four, [4 * values.shape[0], values.shape[1]])


@triton.jit
def _moments(gram, n, k, TAPS: tl.constexpr, SIDE: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr):
    """An image's mean patch, and the sum of products of its patches about it, from the parts that `unfold` left."""
    products = tl.zeros([K, K], tl.float32)
    for part in tl.static_range(PARTS):
        products += tl.load(gram + ((n * PARTS + part) * K + k[:, None]) * K + k[None, :])
    sums = tl.sum(tl.where((k == TAPS)[:, None], products, 0.0), 0)
    sums = tl.where(k < TAPS, sums, 0.0)
    mean = sums / (SIDE * SIDE)
    inside = (k < TAPS)[:, None] & (k < TAPS)[None, :]
    return mean, tl.where(inside, products - sums[:, None] * mean[None, :], 0.0)


@triton.jit
def forward(
    y, dy, ddy, x, gram, w, dw, gamma, beta, dgamma, dbeta, a, da, stats, count, above, dabove, images,
    TAPS: tl.constexpr, PARTS: tl.constexpr,
    SIDE: tl.constexpr, C: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    UNROLL: tl.constexpr, FUSED: tl.constexpr, TANGENT: tl.constexpr, EXACT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One image and CHANNELS channels: statistics, then the pooled map; and of each square what backward will need."""
    SQUARES: tl.constexpr = SIDE * SIDE // 4
    PIXELS: tl.constexpr = SIDE * SIDE
    TILE: tl.constexpr = ROWS if ROWS < SQUARES else SQUARES
    WHOLE: tl.constexpr = not FUSED and ROWS >= PIXELS  # y is read once, and kept
    n = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    rows = tl.arange(0, ROWS)
    weight = None
    dweight = None
    pivot = tl.zeros([CHANNELS], tl.float32)
    dpivot = tl.zeros([CHANNELS], tl.float32)
    if FUSED:  # the mean patch gives the means
        k = tl.arange(0, K)
        weight = tl.load(w + k[:, None] * C + c[None, :])
        patch, spread = _moments(gram, n, k, TAPS, SIDE, K, PARTS)
        patch = patch[:, None]
        pivot = tl.sum(patch * weight.to(tl.float32), 0)
        if TANGENT:
            dweight = tl.load(dw + k[:, None] * C + c[None, :])
            dpivot = tl.sum(patch * dweight.to(tl.float32), 0)
    elif not WHOLE:  # moments about some pixel, so that nothing large cancels
        pivot = tl.load(y + n * PIXELS * C + c).to(tl.float32)

    if WHOLE:
        all_y = _y(y, None, None, None, n, rows, c, SIDE, C, K, FUSED, DOT)
        mean = tl.sum(all_y, 0) / PIXELS
        off_mean = all_y - mean[None, :]
        variance = tl.sum(off_mean * off_mean, 0) / PIXELS
        dmean = mean
        covariance = variance
        if TANGENT:
            all_dy = _y(dy, ddy, None, None, n, rows, c, SIDE, C, K, FUSED, DOT)
            dmean = tl.sum(all_dy, 0) / PIXELS
            covariance = tl.sum(off_mean * (all_dy - dmean[None, :]), 0) / PIXELS
    elif FUSED and not EXACT:  # and the patches' covariance the rest, to what cancels in float32
        response = tl.dot(spread, weight.to(tl.float32), input_precision="ieee")
        mean = pivot
        dmean = dpivot
        variance = tl.maximum(tl.sum(response * weight.to(tl.float32), 0), 0.0) / PIXELS
        covariance = variance
        if TANGENT:
            covariance = tl.sum(response * dweight.to(tl.float32), 0) / PIXELS
    else:
        first = tl.zeros([ROWS, CHANNELS], tl.float32)
        second = tl.zeros([ROWS, CHANNELS], tl.float32)
        dfirst = tl.zeros([ROWS, CHANNELS], tl.float32)
        mixed = tl.zeros([ROWS, CHANNELS], tl.float32)
        for start in range(0, PIXELS, ROWS):
            value = _y(y, None, x, weight, n, start + rows, c, SIDE, C, K, FUSED, DOT) - pivot[None, :]
            first += value
            second += value * value
            if TANGENT:
                moving = _y(dy, ddy, x, dweight, n, start + rows, c, SIDE, C, K, FUSED, DOT) - dpivot[None, :]
                dfirst += moving
                mixed += value * moving
        off = tl.sum(first, 0) / PIXELS
        doff = tl.sum(dfirst, 0) / PIXELS
        mean = pivot + off
        dmean = dpivot + doff
        variance = tl.sum(second, 0) / PIXELS - off * off
        covariance = tl.sum(mixed, 0) / PIXELS - off * doff
    scale = 1 / tl.sqrt_rn(variance + EPSILON)
    share = covariance * scale  # mean of y-hat times dy
    at = n * C + c
    tl.store(stats + at, mean)
    tl.store(stats + images * C + at, scale)
    if TANGENT:
        tl.store(stats + 2 * images * C + at, dmean)
        tl.store(stats + 3 * images * C + at, share)

    gain = tl.load(gamma + c)
    offset = tl.load(beta + c)
    slope = (gain * scale)[None, :]
    shift = (offset - gain * scale * mean)[None, :]
    squares = tl.arange(0, TILE)
    for start in range(0, SQUARES, TILE):
        alive = tl.zeros([TILE, CHANNELS], tl.float32)
        total = tl.zeros([TILE, CHANNELS], tl.float32)
        dtotal = tl.zeros([TILE, CHANNELS], tl.float32)
        if WHOLE:
            here = all_y * slope + shift > 0
            alive = _pool(tl.where(here, 1.0, 0.0))
            total = _pool(tl.where(here, all_y - mean[None, :], 0.0))
            if TANGENT:
                dtotal = _pool(tl.where(here, all_dy - dmean[None, :], 0.0))
        else:
            for place in tl.range(0, 4, loop_unroll_factor=UNROLL):
                r = place * SQUARES + start + squares
                value = _y(y, None, x, weight, n, r, c, SIDE, C, K, FUSED, DOT)
                here = value * slope + shift > 0
                alive += tl.where(here, 1.0, 0.0)
                total += tl.where(here, value - mean[None, :], 0.0)
                if TANGENT:
                    moving = _y(dy, ddy, x, dweight, n, r, c, SIDE, C, K, FUSED, DOT)
                    dtotal += tl.where(here, moving - dmean[None, :], 0.0)
        out = (n * SQUARES + start + squares)[:, None] * C + c[None, :]
        total *= scale[None, :]
        kind = a.dtype.element_ty
        tl.store(a + out, ((total * gain[None, :] + alive * offset[None, :]) * 0.25).to(kind))
        tl.store(count + out, alive.to(tl.int8))
        tl.store(above + out, total.to(kind))
        if TANGENT:
            dtotal = dtotal * scale[None, :] - total * (share * scale)[None, :]
            dgain = tl.load(dgamma + c)[None, :]
            doffset = tl.load(dbeta + c)[None, :]
            tl.store(da + out, ((dgain * total + gain[None, :] * dtotal + doffset * alive) * 0.25).to(kind))
            tl.store(dabove + out, dtotal.to(kind))


@triton.jit
def backward(
    y, dy, ddy, x, gram, w, dw, gamma, beta, dgamma, stats, count, above, dabove, ga, dga, ddga, gy, dgy, gx, partial,
    images, FIRST_ROW: tl.constexpr, ALL_ROWS: tl.constexpr, TAPS: tl.constexpr, PARTS: tl.constexpr,
    SIDE: tl.constexpr, C: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    UNROLL: tl.constexpr, FUSED: tl.constexpr, TANGENT: tl.constexpr, DOT: tl.constexpr, SMALL_DOT: tl.constexpr,
):  # fmt: skip
    """One image and CHANNELS channels: gy (and dgy), and this image's part of the gradients by the block's own weights.

    `partial` holds ALL_ROWS rows for each image; this block writes gamma's and beta's at FIRST_ROW, and if FUSED the
    convolution's at 0. With TANGENT these are the tangents of the gradients, and if FUSED, gx gets these channels' part of
    the tangent of the gradient by the patches, as TAPS maps.
    """
    SQUARES: tl.constexpr = SIDE * SIDE // 4
    PIXELS: tl.constexpr = SIDE * SIDE
    TILE: tl.constexpr = ROWS if ROWS < SQUARES else SQUARES
    WHOLE: tl.constexpr = not FUSED and ROWS >= PIXELS
    n = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    squares = tl.arange(0, TILE)
    if WHOLE:  # read y while the sums below are taken
        pixels = tl.arange(0, PIXELS)
        all_y = _y(y, None, None, None, n, pixels, c, SIDE, C, K, FUSED, DOT)
        if TANGENT:
            all_dy = _y(dy, ddy, None, None, n, pixels, c, SIDE, C, K, FUSED, DOT)

    betas = tl.zeros([TILE, CHANNELS], tl.float32)
    gammas = tl.zeros([TILE, CHANNELS], tl.float32)
    dbetas = tl.zeros([TILE, CHANNELS], tl.float32)
    dgammas = tl.zeros([TILE, CHANNELS], tl.float32)
    for start in range(0, SQUARES, TILE):
        at = (n * SQUARES + start + squares)[:, None] * C + c[None, :]
        given = tl.load(ga + at).to(tl.float32) * 0.25
        alive = tl.load(count + at).to(tl.float32)
        total = tl.load(above + at).to(tl.float32)
        betas += given * alive
        gammas += given * total
        if TANGENT:
            moving = tl.load(dga + at).to(tl.float32)
            if ddga is not None:
                moving += tl.load(ddga + at).to(tl.float32)
            moving *= 0.25
            dbetas += moving * alive
            dgammas += moving * total + given * tl.load(dabove + at).to(tl.float32)
    by_beta = tl.sum(betas, 0)
    by_gamma = tl.sum(gammas, 0)
    dby_beta = tl.sum(dbetas, 0)
    dby_gamma = tl.sum(dgammas, 0)
    part = partial + n * ALL_ROWS * C + c
    tl.store(part + FIRST_ROW * C, dby_gamma if TANGENT else by_gamma)
    tl.store(part + (FIRST_ROW + 1) * C, dby_beta if TANGENT else by_beta)

    by_beta /= PIXELS
    by_gamma /= PIXELS
    gain = tl.load(gamma + c)
    offset = tl.load(beta + c)
    mean = tl.load(stats + n * C + c)
    scale = tl.load(stats + (images + n) * C + c)
    factor = scale * gain
    slope = factor[None, :]
    shift = (offset - factor * mean)[None, :]
    A = -factor * by_gamma * scale
    B = -factor * by_beta
    E = B
    CC = A
    dfactor = factor
    dmean = mean
    if TANGENT:
        dby_beta /= PIXELS
        dby_gamma /= PIXELS
        dmean = tl.load(stats + (2 * images + n) * C + c)
        share = tl.load(stats + (3 * images + n) * C + c)
        dfactor = scale * (tl.load(dgamma + c) - share * factor)
        CC = scale * (factor * by_gamma * share * scale - dfactor * by_gamma - factor * dby_gamma)
        E = -dfactor * by_beta - factor * dby_beta

    if FUSED:
        k = tl.arange(0, K)
        weight = tl.load(w + k[:, None] * C + c[None, :])
        patch, spread = _moments(gram, n, k, TAPS, SIDE, K, PARTS)
        kind = weight.dtype
        linear = weight.to(tl.float32) * CC[None, :]
        if TANGENT:
            dweight = tl.load(dw + k[:, None] * C + c[None, :])
            linear += dweight.to(tl.float32) * A[None, :]
            across = tl.dot(weight.to(tl.float32) * A[None, :], tl.trans(dweight.to(tl.float32)), input_precision=SMALL_DOT)
            across += tl.dot(linear, tl.trans(weight.to(tl.float32)), input_precision=SMALL_DOT)
            constant = tl.sum(dweight.to(tl.float32) * B[None, :] + weight.to(tl.float32) * E[None, :], 1)
            constant -= tl.sum(patch[:, None] * across, 0)
            across = across.to(kind)
        by_weight = tl.dot(spread, linear, input_precision=SMALL_DOT) + PIXELS * patch[:, None] * E[None, :]

    for start in range(0, SQUARES, TILE):
        at = (n * SQUARES + start + squares)[:, None] * C + c[None, :]
        given = tl.load(ga + at).to(tl.float32) * 0.25
        u = given * factor[None, :]
        v = u
        if TANGENT:
            moving = tl.load(dga + at).to(tl.float32)
            if ddga is not None:
                moving += tl.load(ddga + at).to(tl.float32)
            v = given * dfactor[None, :] + moving * (factor * 0.25)[None, :]
            if FUSED:  # only matrix products are to come: half the registers
                u = u.to(kind)
                v = v.to(kind)
        if WHOLE:
            here = all_y * slope + shift > 0
            value = all_y - mean[None, :]
            out = (n * PIXELS + pixel_of(pixels, SIDE))[:, None] * C + c[None, :]
            by_y = tl.where(here, _spread(u), 0.0) + A[None, :] * value + B[None, :]
            tl.store(gy + out, by_y.to(gy.dtype.element_ty))
            if TANGENT:
                dby_y = tl.where(here, _spread(v), 0.0) + A[None, :] * (all_dy - dmean[None, :])
                dby_y += CC[None, :] * value + E[None, :]
                tl.store(dgy + out, dby_y.to(dgy.dtype.element_ty))
        else:
            for place in tl.range(0, 4, loop_unroll_factor=UNROLL):
                r = place * SQUARES + start + squares
                if FUSED:
                    patches = tl.load(x + (n * PIXELS + r)[:, None] * K + k[None, :])
                    here = tl.dot(patches, weight, input_precision=DOT) * slope + shift > 0
                    alive_v = tl.where(here, v, 0.0).to(kind)
                    by_weight += tl.dot(tl.trans(patches), alive_v, input_precision=DOT)
                    if TANGENT:
                        by_patch = tl.dot(tl.where(here, u, 0.0).to(kind), tl.trans(dweight), input_precision=DOT)
                        by_patch += tl.dot(alive_v, tl.trans(weight), input_precision=DOT)
                        by_patch += tl.dot(patches, across, input_precision=DOT)
                        by_patch += constant[None, :]
                        out = ((tl.program_id(1) * images + n) * TAPS + k)[None, :] * PIXELS + r[:, None]
                        tl.store(gx + out, by_patch.to(gx.dtype.element_ty), mask=(k < TAPS)[None, :])
                else:
                    value = _y(y, None, None, None, n, r, c, SIDE, C, K, FUSED, DOT)
                    here = value * slope + shift > 0
                    value -= mean[None, :]
                    out = (n * PIXELS + pixel_of(r, SIDE))[:, None] * C + c[None, :]
                    by_y = tl.where(here, u, 0.0) + A[None, :] * value + B[None, :]
                    tl.store(gy + out, by_y.to(gy.dtype.element_ty))
                    if TANGENT:
                        moved = _y(dy, ddy, None, None, n, r, c, SIDE, C, K, FUSED, DOT) - dmean[None, :]
                        dby_y = tl.where(here, v, 0.0) + A[None, :] * moved + CC[None, :] * value + E[None, :]
                        tl.store(dgy + out, dby_y.to(dgy.dtype.element_ty))
    if FUSED:
        tl.store(part[None, :] + k[:, None] * C, by_weight)
