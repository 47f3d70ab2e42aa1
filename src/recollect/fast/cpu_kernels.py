"""The ConvNet's kernels on a CPU: what stands between its convolutions, in loops that numba compiles.

A block is y = w * x, then InstanceNorm, ReLU and 2x2 average pooling to a. For each of its passes there is one kernel:

    forward    y, and its tangent if wanted -> a, and its tangent
    backward   the gradient by a, and its tangent if wanted -> the gradient by y, and its tangent

Maps are channels-last, [images, pixels, channels], pixels row by row; the innermost loops run over channels, which the compiler
turns into vectors. A map is read twice, the second time from the cache. As in kernels.py: where a pixel is alive (z > 0) the
block is linear in y; forward keeps for each 2x2 square how many of its pixels are alive and the sums of y-hat and its tangent
over them; and with u and v constant in a square, and A, B, C, E constant in a channel of an image,

    gy = [z > 0] u + A (y - mean) + B           dgy = [z > 0] v + A (dy - dmean) + C (y - mean) + E

All arithmetic is float32. What is stored has the type of the arrays given: float32, or bfloat16 as uint16. A leading d is a
tangent, a g a gradient: dy, gy, dgy. `None` for the tangents leaves them out: each such choice is compiled by itself.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

EPSILON = np.float32(1e-5)
ZERO, ONE, QUARTER, FOUR = (np.float32(n) for n in (0, 1, 0.25, 4))
OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy", "fastmath": {"contract", "nsz"}}
instruction: Any = intrinsic


def compiled(function) -> Any:
    """At its first call; the machine code is kept for the next process where there is a place to write to."""
    try:
        return njit(function, cache=True, **OPTIONS)
    except RuntimeError:
        return njit(function, **OPTIONS)


class _BFloat(ir.Type):
    """llvmlite has no name for it."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat)

    def __hash__(self):
        return hash(_BFloat)


@instruction
def _rounded(context, number):
    """A float32 as the bits of the nearest bfloat16."""

    def build(_, builder, __, given):
        return builder.bitcast(builder.fptrunc(given[0], _BFloat()), ir.IntType(16))

    return types.uint16(types.float32), build


@instruction
def _float(context, number):
    """The way back."""
    return types.float32(types.uint32), lambda _, builder, __, given: builder.bitcast(given[0], ir.FloatType())


def wide(number) -> Any:
    """A stored number as float32."""


def narrow(number, array) -> Any:
    """A float32 as an array stores it; to bfloat16 by rounding to the nearest, ties to even."""


@overload(wide)
def _wide(number):
    if number == types.uint16:
        return lambda number: _float(np.uint32(number) << np.uint32(16))
    return lambda number: number


@overload(narrow)
def _narrow(number, array):
    if array.dtype != types.uint16:
        return lambda number, array: number

    return lambda number, array: _rounded(number)


@compiled
def _moments(n, y, dy, ddy, sums, stats):
    """The statistics of image n: mean, scale, and with tangents the mean of dy and that of y-hat dy."""
    pixels, channels = y.shape[1:]
    share = np.float32(1 / pixels)
    sums[:] = ZERO
    for p in range(0, pixels, 4):  # moments about some pixel, so that nothing large cancels
        for c in range(channels):
            pivot = wide(y[n, 0, c])
            y0, y1 = wide(y[n, p, c]) - pivot, wide(y[n, p + 1, c]) - pivot
            y2, y3 = wide(y[n, p + 2, c]) - pivot, wide(y[n, p + 3, c]) - pivot
            sums[0, c] += (y0 + y1) + (y2 + y3)
            sums[1, c] += (y0 * y0 + y1 * y1) + (y2 * y2 + y3 * y3)
            if dy is not None:
                d0, d1 = wide(dy[n, p, c]), wide(dy[n, p + 1, c])
                d2, d3 = wide(dy[n, p + 2, c]), wide(dy[n, p + 3, c])
                if ddy is not None:
                    d0, d1 = d0 + wide(ddy[n, p, c]), d1 + wide(ddy[n, p + 1, c])
                    d2, d3 = d2 + wide(ddy[n, p + 2, c]), d3 + wide(ddy[n, p + 3, c])
                sums[2, c] += (d0 + d1) + (d2 + d3)
                sums[3, c] += (y0 * d0 + y1 * d1) + (y2 * d2 + y3 * d3)
    for c in range(channels):
        off = sums[0, c] * share
        scale = ONE / math.sqrt(sums[1, c] * share - off * off + EPSILON)
        stats[0, n, c] = wide(y[n, 0, c]) + off
        stats[1, n, c] = scale
        if dy is not None:
            stats[2, n, c] = sums[2, c] * share
            stats[3, n, c] = (sums[3, c] * share - off * sums[2, c] * share) * scale


@compiled
def forward(y, dy, ddy, gamma, beta, dgamma, dbeta, a, da, stats, alive, above, dabove):
    """Statistics of each image's channels, then the pooled map; and of each square what backward will need.

    The tangent of y is dy + ddy.
    """
    images, pixels, channels = y.shape
    side = int(math.sqrt(pixels))
    half = side // 2
    sums = np.empty((4, channels), np.float32)
    for n in range(images):
        _moments(n, y, dy, ddy, sums, stats)
        for row in range(half):
            for column in range(half):
                s = row * half + column
                p0 = 2 * row * side + 2 * column
                p2 = p0 + side
                for c in range(channels):
                    mean, scale, gain, offset = stats[0, n, c], stats[1, n, c], gamma[c], beta[c]
                    y0, y1 = wide(y[n, p0, c]) - mean, wide(y[n, p0 + 1, c]) - mean
                    y2, y3 = wide(y[n, p2, c]) - mean, wide(y[n, p2 + 1, c]) - mean
                    slope = gain * scale
                    h0, h1 = y0 * slope + offset > ZERO, y1 * slope + offset > ZERO
                    h2, h3 = y2 * slope + offset > ZERO, y3 * slope + offset > ZERO
                    total = ((y0 if h0 else ZERO) + (y1 if h1 else ZERO)) + ((y2 if h2 else ZERO) + (y3 if h3 else ZERO))
                    count = ((ONE if h0 else ZERO) + (ONE if h1 else ZERO)) + ((ONE if h2 else ZERO) + (ONE if h3 else ZERO))
                    total *= scale
                    a[n, s, c] = narrow((total * gain + count * offset) * QUARTER, a)
                    alive[n, s, c] = np.uint8(count)
                    above[n, s, c] = narrow(total, above)
                    if dy is not None:
                        d0, d1 = wide(dy[n, p0, c]), wide(dy[n, p0 + 1, c])
                        d2, d3 = wide(dy[n, p2, c]), wide(dy[n, p2 + 1, c])
                        if ddy is not None:
                            d0, d1 = d0 + wide(ddy[n, p0, c]), d1 + wide(ddy[n, p0 + 1, c])
                            d2, d3 = d2 + wide(ddy[n, p2, c]), d3 + wide(ddy[n, p2 + 1, c])
                        dmean = stats[2, n, c]
                        moved = ((d0 - dmean if h0 else ZERO) + (d1 - dmean if h1 else ZERO)) + (
                            (d2 - dmean if h2 else ZERO) + (d3 - dmean if h3 else ZERO)
                        )
                        moved = (moved - total * stats[3, n, c]) * scale
                        da[n, s, c] = narrow((dgamma[c] * total + gain * moved + dbeta[c] * count) * QUARTER, da)
                        dabove[n, s, c] = narrow(moved, dabove)


@compiled
def _terms(n, gamma, beta, dgamma, stats, alive, above, dabove, ga, dga, ddga, by_gamma, by_beta, sums, terms):
    """What is constant in a channel of image n: u's factor, beta, mean, A, B, and with tangents v's factor, C, E less A dmean."""
    squares, channels = ga.shape[1:]
    share = np.float32(0.25 / squares)
    sums[:] = ZERO
    for s in range(squares):
        for c in range(channels):
            given, count, total = wide(ga[n, s, c]) * QUARTER, np.float32(alive[n, s, c]), wide(above[n, s, c])
            sums[0, c] += given * count
            sums[1, c] += given * total
            if dga is not None:
                moved = wide(dga[n, s, c])
                if ddga is not None:
                    moved += wide(ddga[n, s, c])
                moved *= QUARTER
                sums[2, c] += moved * count
                sums[3, c] += moved * total + given * wide(dabove[n, s, c])
    for c in range(channels):
        scale, betas, gammas = stats[1, n, c], sums[0, c] * share, sums[1, c] * share
        factor = scale * gamma[c]
        terms[0, c], terms[1, c], terms[2, c] = factor, beta[c], stats[0, n, c]
        terms[3, c], terms[4, c] = -factor * gammas * scale, -factor * betas
        if dga is None:
            by_beta[c] += sums[0, c]
            by_gamma[c] += sums[1, c]
        else:
            by_beta[c] += sums[2, c]
            by_gamma[c] += sums[3, c]
            mixed = stats[3, n, c] * scale
            dfactor = scale * dgamma[c] - mixed * factor
            dgammas = sums[3, c] * share
            terms[5, c] = dfactor
            terms[6, c] = scale * (factor * gammas * mixed - dfactor * gammas - factor * dgammas)
            terms[7, c] = -dfactor * betas - factor * sums[2, c] * share - terms[3, c] * stats[2, n, c]


@compiled
def backward(y, dy, ddy, gamma, beta, dgamma, stats, alive, above, dabove, ga, dga, ddga, by_gamma, by_beta):
    """gy, in y's place; with tangents dgy in y's place and gy in dy's. The gradients by gamma and beta, or with tangents their
    tangents, are added to what is there.

    The tangent of the gradient by a is dga + ddga.
    """
    images, pixels, channels = y.shape
    side = int(math.sqrt(pixels))
    half = side // 2
    sums = np.empty((4, channels), np.float32)
    terms = np.empty((8, channels), np.float32)
    for n in range(images):
        _terms(n, gamma, beta, dgamma, stats, alive, above, dabove, ga, dga, ddga, by_gamma, by_beta, sums, terms)
        for row in range(half):
            for column in range(half):
                s = row * half + column
                corner = 2 * row * side + 2 * column
                for c in range(channels):
                    given = wide(ga[n, s, c]) * QUARTER
                    sums[0, c] = given * terms[0, c]
                    if dy is not None:
                        moved = wide(dga[n, s, c])
                        if ddga is not None:
                            moved += wide(ddga[n, s, c])
                        sums[1, c] = given * terms[5, c] + moved * terms[0, c] * QUARTER
                for p in (corner, corner + 1, corner + side, corner + side + 1):
                    for c in range(channels):
                        value = wide(y[n, p, c]) - terms[2, c]
                        lives = value * terms[0, c] + terms[1, c] > ZERO
                        by_y = (sums[0, c] if lives else ZERO) + (terms[3, c] * value + terms[4, c])
                        if dy is None:
                            y[n, p, c] = narrow(by_y, y)
                        else:
                            moved = wide(dy[n, p, c])
                            if ddy is not None:
                                moved += wide(ddy[n, p, c])
                            rest = terms[3, c] * moved + (terms[6, c] * value + terms[7, c])
                            y[n, p, c] = narrow((sums[1, c] if lives else ZERO) + rest, y)
                            dy[n, p, c] = narrow(by_y, dy)


@compiled
def unfold(images, padding, patches, across):
    """The 3x3 patches of images [n, c, h, w]: [n, pixels, K], zero beyond their 9 c values, whose order is that of a weight; and
    the same across, [K, n pixels]."""
    count, inputs, height, width = images.shape
    side = height + 2 * padding - 2
    patches[:, :, 9 * inputs :] = narrow(ZERO, patches)
    across[:] = narrow(ZERO, across)
    for n in range(count):
        for row in range(side):
            for column in range(side):
                p = row * side + column
                for c in range(inputs):
                    for tap in range(9):
                        i, j = row + tap // 3 - padding, column + tap % 3 - padding
                        value = images[n, c, i, j] if 0 <= i < height and 0 <= j < width else ZERO
                        patches[n, p, 9 * c + tap] = narrow(value, patches)
        for k in range(9 * inputs):
            c, down, right = k // 9, k % 9 // 3 - padding, k % 3 - padding
            first, last = max(0, -right), min(side, width - right)
            for row in range(max(0, -down), min(side, height - down)):
                start = (n * side + row) * side
                source, into = (images[n, c, row + down, first + right : last + right], across[k, start + first : start + last])
                for column in range(len(source)):
                    into[column] = narrow(source[column], across)


@compiled
def fold(by_patches, padding, by_images):
    """The way back: the gradient by images from that by their patches."""
    count, inputs, height, width = by_images.shape
    side = height + 2 * padding - 2
    by_images[:] = ZERO
    for n in range(count):
        for row in range(side):
            for column in range(side):
                p = row * side + column
                for c in range(inputs):
                    for tap in range(9):
                        i, j = row + tap // 3 - padding, column + tap % 3 - padding
                        if 0 <= i < height and 0 <= j < width:
                            by_images[n, c, i, j] += wide(by_patches[n, p, 9 * c + tap])
