"""The ConvNet's passes by hand: Triton kernels (kernels.py) around the library's convolutions, on one vector of weights.

The adjoint carries value and tangent side by side. Stacked as A = [a; da] and G = [dgy; gy], one convolution serves both:

    w * A = [w * a; w * da]       tangent of the map: w * da + dw * a
    w^T G = [w^T dgy; w^T gy]     tangent of the gradient: w^T dgy + dw^T gy
    A x G = a x dgy + da x gy     the tangent of the gradient by w, in one product over 2 B images

so that a layer costs five launches for its eight convolutions, and the sums are taken where they are next read.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recollect.fast import edge_kernels as edges_written
from recollect.fast import kernels as written
from recollect.fast.layout import Block, Layout
from recollect.nets import Network, Params

aten = torch.ops.aten
kernels: Any = written  # launched as kernel[grid](...), which no type checker knows
edges: Any = edges_written
TILES = {
    ("forward", "first", False): (64, 32, 4, 3, 4),
    ("forward", "first", True): (32, 64, 4, 3, 2),
    ("backward", "first", False): (64, 64, 4, 3, 4),
    ("backward", "first", True): (64, 64, 4, 3, 1),
    ("forward", "large", False): (32, 32, 4, 1, 4),
    ("forward", "large", True): (64, 32, 8, 1, 4),
    ("backward", "large", False): (64, 64, 4, 1, 4),
    ("backward", "large", True): (64, 32, 8, 1, 4),
}
SMALL_TILES = (64, 32, 2, 1, 1)
"""How a kernel cuts its work up: rows, channels, warps, stages, unrolling; for the first block and for maps above 8x8, with a
tangent or not, and for all others. The best of 5 to 20 each on an H200, at 320 images of 32x32, width 128, bf16."""


class ConvNet(Layout):
    """The passes of a ConvNet in one precision: "bf16", or "tf32" and "fp32" on float32 tensors."""

    stacks, splits = False, True
    benchmark = True  # let the library try its convolutions: they are few, and run many times

    def __init__(self, network: Network, precision: str):
        super().__init__(network)
        self.precision, self.kind = precision, torch.bfloat16 if precision == "bf16" else torch.float32
        self.padded = _power(network.classes, 16)

    def work(self, images: int) -> dict[str, tuple[float, float]]:
        """(operations, bytes) of each pass: products of the convolutions, and what the launches read and write between them,
        each tensor once."""
        patches = self.blocks[0].side ** 2 * self.patch
        operations, numbers = self.operations(images), {"gradient": 3.0 * patches, "adjoint": 5.0 * patches}
        for number, block in enumerate(self.blocks):
            whole = self.width * block.side**2
            numbers["gradient"] += (5 / 4 + (6 if number else 0)) * whole
            numbers["adjoint"] += (13 / 4 + (16 if number else 0)) * whole
        return {name: (operations[name], images * numbers[name] * self.kind.itemsize) for name in operations}

    def held(self, images: int, adjoint: bool) -> int:
        """Bytes of all tensors of a pass over so many images."""
        size, first = self.kind.itemsize, self.blocks[0].side ** 2
        stack = 2 if adjoint else 1
        numbers = first * (self.patch + (2 * 9 * self.channels if adjoint else 0))
        rest = 0
        for number, block in enumerate(self.blocks):
            whole, pooled = self.width * block.side**2, self.width * block.side**2 // 4
            numbers += 3 * stack * pooled  # a, its sums, the gradient by it
            rest += pooled  # counts, a byte each
            if number:
                numbers += (5 if adjoint else 2) * whole + (pooled if adjoint else 0)
        return images * (size * numbers + rest + 4 * self.width * self.rows)

    # ---- the passes -------------------------------------------------------------------------------------------------

    def gradient(self, vector: Tensor, images: Tensor, labels: Tensor, total: int | None = None) -> Tensor:
        """dL/dtheta; the loss is the mean over `total` images, these unless told."""
        return self._value(vector, images, labels, total)[0]

    def judge(self, vector: Tensor, images: Tensor, labels: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
        """(dL/dtheta, L)."""
        gradient, losses = self._value(vector, images, labels, total)
        return gradient, losses.sum() / (total or len(images))

    def _value(self, vector: Tensor, images: Tensor, labels: Tensor, total: int | None) -> tuple[Tensor, Tensor]:
        found, given = torch.empty_like(vector), self._given(vector)
        run = _Launch(self, images, tangent=False)
        maps: list[Any] = [None]
        kept, pooled = [], []
        for number, block in enumerate(self.blocks):
            if number:
                maps.append(F.conv2d(pooled[-1], given.weights[number], padding=1))
            pooled.append(run.forward(block, given, None, maps[number]))
            kept.append(run.kept)
        ga, losses = run.head(pooled[-1], given, None, labels, total or len(images), self._head(found))
        for number, block in reversed(list(enumerate(self.blocks))):
            gy = run.backward(block, given, None, maps[number], kept[number], ga)
            if number:
                before, weight = pooled[number - 1], given.weights[number]
                ga = _backward("input", gy, before, weight)
                self._store(_backward("weight", gy, before, weight), found, block)
        run.total(found)
        return found, losses

    def adjoint(
        self, vector: Tensor, images: Tensor, labels: Tensor, mu: Tensor, total: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """(H mu, (d/dx) <g, mu>)."""
        found, given, moved = torch.empty_like(vector), self._given(vector), self._given(mu)
        count, run = len(images), _Launch(self, images, tangent=True)
        maps: list[Any] = [None]
        kept, pooled = [], []
        for number, block in enumerate(self.blocks):
            if number:
                both = F.conv2d(pooled[-1], given.weights[number], padding=1)
                moving = F.conv2d(pooled[-1][:count], moved.weights[number], padding=1)
                maps.append((both[:count], both[count:], moving))
            pooled.append(run.forward(block, given, moved, maps[number]))
            kept.append(run.kept)
        both, _ = run.head(pooled[-1], given, moved, labels, total or count, self._head(found))
        back = (both[count:], both[:count], None)
        for number, block in reversed(list(enumerate(self.blocks))):
            both = run.backward(block, given, moved, maps[number], kept[number], back)
            if number:
                before, weight = pooled[number - 1], given.weights[number]
                stack = _backward("input", both, before, weight)
                moving = _backward("input", both[count:], before[:count], moved.weights[number])
                back = (stack[count:], stack[:count], moving)
                self._store(_backward("weight", both, before, weight), found, block)
        run.total(found)
        return found, run.fold()

    def _given(self, vector: Tensor) -> "_Given":
        return _Given(self.parts(vector), self.parts(vector.to(self.kind)), self)

    def _head(self, found: Tensor) -> tuple[Tensor, Tensor]:
        parts = self.parts(found)
        return parts[f"{self.linear}.weight"], parts[f"{self.linear}.bias"]

    def _store(self, by_weight: Tensor, found: Tensor, block: Block) -> None:
        taken = by_weight.permute(0, 2, 3, 1)
        found[block.start : block.start + taken.numel()].view(taken.shape).copy_(taken)


@dataclass
class _Given:
    """One vector as the kernels want it: norms in float32, products in the computing type."""

    exact: Params
    rounded: Params
    net: ConvNet

    @cached_property
    def weights(self) -> list[Tensor]:
        first, *rest = (self.rounded[f"{block.name}.weight"] for block in self.net.blocks)
        return [first, *(weight.permute(0, 3, 1, 2) for weight in rest)]

    def norm(self, block: Block) -> tuple[Tensor, Tensor]:
        return self.exact[f"{block.norm}.weight"], self.exact[f"{block.norm}.bias"]

    @property
    def head(self) -> tuple[Tensor, Tensor]:
        return self.rounded[f"{self.net.linear}.weight"], self.exact[f"{self.net.linear}.bias"]


class _Launch:
    """The kernels of one pass over a batch, and what they hand on to each other."""

    def __init__(self, net: ConvNet, images: Tensor, tangent: bool):
        self.net, self.count, self.tangent, self.device = net, len(images), tangent, images.device
        side, options = net.blocks[0].side, {"INPUTS": net.channels, "PADDING": net.padding, "SOURCE": net.source}
        self.shared = options | {"SIDE": side}
        self.dots = {"DOT": "tf32" if net.precision == "tf32" else "ieee"}
        pixels = min(256, side * side)
        self.parts = {"TAPS": 9 * net.channels, "PARTS": side * side // pixels}
        self.patches = self._new(self.count, side * side, net.patch)
        self.gram = self._new(self.count, self.parts["PARTS"], net.patch, net.patch, kind=torch.float32)
        self.partial = self._new(self.count, net.rows, net.width, kind=torch.float32)
        edges.unfold[(self.count, self.parts["PARTS"])](
            images.contiguous(), self.patches, self.gram,
            PIXELS=pixels, K=net.patch, **self.shared, **self.dots,
        )  # fmt: skip

    def _new(self, *shape: int, kind: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=kind or self.net.kind, device=self.device)

    def _maps(self, side: int) -> Tensor:
        """A map for each image, or value and tangent stacked; channels-last."""
        return self._new(self.count * (1 + self.tangent), side, side, self.net.width).permute(0, 3, 1, 2)

    def _halves(self, both: Tensor, swapped: bool = False) -> tuple[Tensor, Tensor | None]:
        """(value, tangent) of a stack; in the way back the tangent comes first."""
        if not self.tangent:
            return both, None
        first, second = both[: self.count], both[self.count :]
        return (second, first) if swapped else (first, second)

    def forward(self, block: Block, given: "_Given", moved: "_Given | None", maps) -> Tensor:
        """a, or [a; da]; `kept` is what backward needs of it."""
        net, fused, side = self.net, block is self.net.blocks[0], block.side // 2
        y, dy, ddy = maps if isinstance(maps, tuple) else (maps, None, None)
        both = self._maps(side)
        a, da = self._halves(both)
        stats = self._new(4 if self.tangent else 2, self.count, net.width, kind=torch.float32)
        alive = self._new(self.count, side * side, net.width, kind=torch.int8)
        above, dabove = self._halves(self._maps(side))
        self.kept = (stats, alive, above, dabove)
        tiles = _tiles("forward", block, net, fused, self.tangent)
        kernels.forward[(self.count, net.width // tiles["CHANNELS"])](
            y, dy, ddy, *self._first(fused, given, moved),
            *given.norm(block), *(moved.norm(block) if moved else (None, None)), a, da, *self.kept, self.count,
            SIDE=block.side, C=net.width, K=net.patch, FUSED=fused, TANGENT=self.tangent, EXACT=net.precision == "fp32",
            **self.parts, **self.dots, **tiles,
        )  # fmt: skip
        return both

    def backward(self, block: Block, given: "_Given", moved: "_Given | None", maps, kept, back) -> Any:
        """gy, or [dgy; gy]; for the first block nothing, but it leaves the gradient by the patches to `fold`."""
        net, fused = self.net, block is self.net.blocks[0]
        y, dy, ddy = maps if isinstance(maps, tuple) else (maps, None, None)
        ga, dga, ddga = back if isinstance(back, tuple) else (back, None, None)
        both = None if fused else self._maps(block.side)
        gy, dgy = (None, None) if both is None else self._halves(both, swapped=True)
        tiles = _tiles("backward", block, net, fused, self.tangent)
        parts = net.width // tiles["CHANNELS"]
        self.by_patch = self._new(parts, self.count, 9 * net.channels, block.side**2) if fused and self.tangent else None
        gamma, beta = given.norm(block)
        kernels.backward[(self.count, parts)](
            y, dy, ddy, *self._first(fused, given, moved),
            gamma, beta, moved.norm(block)[0] if moved else None, *kept,
            ga, dga, ddga, gy, dgy, self.by_patch, self.partial, self.count,
            FIRST_ROW=block.row, ALL_ROWS=net.rows, SIDE=block.side, C=net.width, K=net.patch,
            FUSED=fused, TANGENT=self.tangent, SMALL_DOT="ieee" if net.precision == "fp32" else "tf32",
            **self.parts, **self.dots, **tiles,
        )  # fmt: skip
        return both

    def _first(self, fused: bool, given: "_Given", moved: "_Given | None") -> tuple[Tensor | None, ...]:
        """The patches and weights of the first convolution, for the kernels that do it themselves."""
        first = self.patches, self.gram, given.weights[0], moved.weights[0] if moved else None
        return first if fused else (None,) * 4

    def total(self, found: Tensor) -> None:
        """The rows that backward left for each image, added up at the head of the vector."""
        shape = {"ALL_ROWS": self.net.rows, "C": self.net.width, "ROWS": 64, "CHANNELS": 16}
        edges.total[(self.net.rows, self.net.width // 16)](self.partial, found, self.count, **shape)

    def fold(self) -> Tensor:
        """The gradient by the images, from that by their patches."""
        net, parts = self.net, self.by_patch
        assert parts is not None  # backward of the first block came before
        by_images = self._new(self.count, net.channels, net.source, net.source, kind=torch.float32)
        pixels = _power(net.source**2, 16, most=256)
        grid = (self.count, net.channels, -(-(net.source**2) // pixels))
        edges.fold[grid](parts, by_images, self.count, PARTS=len(parts), PIXELS=pixels, **self.shared)
        return by_images

    def head(self, features: Tensor, given: _Given, moved: "_Given | None", labels: Tensor, total: int, out):
        """(the gradient by the features, or [tangent; gradient]; every image's loss). Writes the layer's own gradient."""
        net = self.net
        a, da = self._halves(features)
        both = self._maps(net.blocks[-1].side // 2)
        ga, dga = self._halves(both, swapped=True)
        losses = self._new(self.count, kind=torch.float32)
        ge = self._new(self.count, net.padded)
        dge = self._new(self.count, net.padded) if self.tangent else None
        shape = {"FEATURES": net.features, "CLASSES": net.classes, "PADDED": net.padded, "ROWS": 16}
        shape |= {"BLOCK": min(4096 // net.padded, net.features), "TANGENT": self.tangent, "num_stages": 3, **self.dots}
        weight, bias = given.head
        dweight, dbias = moved.head if moved else (None, None)
        edges.head[(-(-self.count // 16),)](
            a, da, weight, dweight, bias, dbias, labels.contiguous(), losses, ge, dge, ga, dga, self.count, total, **shape
        )  # fmt: skip
        shape |= {"BLOCK": 16, "ROWS": 64, "num_warps": 2}
        edges.head_weights[(net.features // 16,)](a, da, ge, dge, *out, self.count, **shape)
        return both, losses


def _tiles(kernel: str, block: Block, net: ConvNet, fused: bool, tangent: bool) -> dict[str, int]:
    large = TILES[kernel, "first" if fused else "large", tangent]
    rows, channels, warps, stages, unroll = large if fused or block.side > 8 else SMALL_TILES
    if net.kind == torch.float32:  # twice the registers
        rows, stages, unroll = min(rows, 32), 1, 1
    shape = {"ROWS": min(rows, block.side**2), "CHANNELS": min(channels, net.width)}
    return shape | {"num_warps": warps, "num_stages": stages, "UNROLL": unroll}


def _backward(of: str, by_output: Tensor, images: Tensor, weight: Tensor) -> Tensor:
    """The gradient by a convolution's "input" or "weight"."""
    wanted = [of == "input", of == "weight", False]
    found = aten.convolution_backward(by_output, images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, wanted)
    return found[wanted.index(True)]


def _power(number: int, least: int, most: int | None = None) -> int:
    """The power of two at or above a number, between bounds."""
    power = max(least, 1 << (number - 1).bit_length())
    return min(power, most) if most else power
