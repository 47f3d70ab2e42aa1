"""The ConvNet's passes on a GPU: byhand.py with Triton's kernels (kernels.py, edge_kernels.py)."""

from typing import Any

import torch
from torch import Tensor

from recollect.fast import edge_kernels as edges_written
from recollect.fast import kernels as written
from recollect.fast.byhand import Batch, ByHand, Given
from recollect.fast.flat import Pair
from recollect.fast.layout import Block
from recollect.nets import Network

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


class ConvNet(ByHand):
    """The passes of a ConvNet in one precision: "bf16", or "tf32" and "fp32" on float32 tensors."""

    benchmark = True  # let the library try its convolutions: they are few, and run many times

    def __init__(self, network: Network, precision: str):
        super().__init__(network, precision)
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

    def _run(self, vector: Tensor, images: Tensor, labels: Tensor, mu: Tensor | None) -> Pair:
        found = torch.empty_like(vector)
        run = _Launch(self, Given(self, vector), None if mu is None else Given(self, mu), images, found)
        losses = run.there_and_back(labels, len(images))
        run.total(found)
        return found, losses if mu is None else run.fold()


class _Launch(Batch):
    """The kernels of one pass over a batch, and what they hand on to each other."""

    def __init__(self, net: ConvNet, given: Given, moved: Given | None, images: Tensor, found: Tensor):
        super().__init__(net, given, moved, images, found)
        self.net, self.tangent = net, moved is not None
        side, options = net.blocks[0].side, {"INPUTS": net.channels, "PADDING": net.padding, "SOURCE": net.source}
        self.shared = options | {"SIDE": side}
        self.dots = {"DOT": "tf32" if net.precision == "tf32" else "ieee"}
        pixels = min(256, side * side)
        self.parts = {"TAPS": 9 * net.channels, "PARTS": side * side // pixels}
        self.patches = self.new(self.count, side * side, net.patch)
        self.gram = self.new(self.count, self.parts["PARTS"], net.patch, net.patch, kind=torch.float32)
        self.partial = self.new(self.count, net.rows, net.width, kind=torch.float32)
        edges.unfold[(self.count, self.parts["PARTS"])](
            images.contiguous(), self.patches, self.gram,
            PIXELS=pixels, K=net.patch, **self.shared, **self.dots,
        )  # fmt: skip

    def forward(self, number: int, y: Tensor | None, moving: Tensor | None) -> Tensor:
        net, block = self.net, self.net.blocks[number]
        pooled, side = self.maps(block.side // 2), block.side // 2
        stats = self.new(4 if self.tangent else 2, self.count, net.width, kind=torch.float32)
        alive = self.new(self.count, side * side, net.width, kind=torch.int8)
        self.kept[number] = (stats, alive, *self.halves(self.maps(side)))
        tiles = _tiles("forward", block, net, number == 0, self.tangent)
        kernels.forward[(self.count, net.width // tiles["CHANNELS"])](
            *self.halves(y), moving, *self._first(number), *self.given.norms[number],
            *(self.moved.norms[number] if self.moved else (None, None)), *self.halves(pooled), *self.kept[number], self.count,
            SIDE=block.side, C=net.width, K=net.patch, FUSED=number == 0, TANGENT=self.tangent, EXACT=net.precision == "fp32",
            **self.parts, **self.dots, **tiles,
        )  # fmt: skip
        return pooled

    def backward(self, number: int, y: Tensor | None, moving: Tensor | None, ga: Tensor, rest: Tensor | None) -> Tensor | None:
        """The first block leaves the gradient by the patches to `fold`."""
        net, block, fused = self.net, self.net.blocks[number], number == 0
        gy = None if fused else self.maps(block.side)
        tiles = _tiles("backward", block, net, fused, self.tangent)
        parts = net.width // tiles["CHANNELS"]
        self.by_patch = self.new(parts, self.count, 9 * net.channels, block.side**2) if fused and self.tangent else None
        kernels.backward[(self.count, parts)](
            *self.halves(y), moving, *self._first(number), *self.given.norms[number],
            self.moved.norms[number][0] if self.moved else None, *self.kept[number],
            *self.halves(ga, back=True), rest, *self.halves(gy, back=True), self.by_patch, self.partial, self.count,
            FIRST_ROW=block.row, ALL_ROWS=net.rows, SIDE=block.side, C=net.width, K=net.patch,
            FUSED=fused, TANGENT=self.tangent, SMALL_DOT="ieee" if net.precision == "fp32" else "tf32",
            **self.parts, **self.dots, **tiles,
        )  # fmt: skip
        return gy

    def add(self, number: int, by_weight: Tensor) -> None:
        self.found[f"{self.net.blocks[number].name}.weight"].copy_(by_weight.permute(0, 2, 3, 1))

    def _first(self, number: int) -> tuple[Tensor | None, ...]:
        """The patches and weights of the first convolution, for the kernels that do it themselves."""
        if number:
            return (None,) * 4
        return self.patches, self.gram, self.given.weights[0], self.moved.weights[0] if self.moved else None

    def total(self, found: Tensor) -> None:
        """The rows that backward left for each image, added up at the head of the vector."""
        shape = {"ALL_ROWS": self.net.rows, "C": self.net.width, "ROWS": 64, "CHANNELS": 16}
        edges.total[(self.net.rows, self.net.width // 16)](self.partial, found, self.count, **shape)

    def fold(self) -> Tensor:
        """The gradient by the images, from that by their patches."""
        net, parts = self.net, self.by_patch
        assert parts is not None  # backward of the first block came before
        by_images = self.new(self.count, net.channels, net.source, net.source, kind=torch.float32)
        pixels = _power(net.source**2, 16, most=256)
        grid = (self.count, net.channels, -(-(net.source**2) // pixels))
        edges.fold[grid](parts, by_images, self.count, PARTS=len(parts), PIXELS=pixels, **self.shared)
        return by_images

    def head(self, features: Tensor, labels: Tensor, total: int) -> Pair:
        net, weight, bias = self.net, f"{self.net.linear}.weight", f"{self.net.linear}.bias"
        a, da = self.halves(features)
        both = self.maps(net.blocks[-1].side // 2)
        losses = self.new(self.count, kind=torch.float32)
        ge = self.new(self.count, net.padded)
        dge = self.new(self.count, net.padded) if self.tangent else None
        shape = {"FEATURES": net.features, "CLASSES": net.classes, "PADDED": net.padded, "ROWS": 16}
        shape |= {"BLOCK": min(4096 // net.padded, net.features), "TANGENT": self.tangent, "num_stages": 3, **self.dots}
        dweight, dbias = (self.moved.rounded[weight], self.moved.exact[bias]) if self.moved else (None, None)
        edges.head[(-(-self.count // 16),)](
            a, da, self.given.rounded[weight], dweight, self.given.exact[bias], dbias, labels.contiguous(), losses, ge, dge,
            *self.halves(both, back=True), self.count, total, **shape,
        )  # fmt: skip
        shape |= {"BLOCK": 16, "ROWS": 64, "num_warps": 2}
        edges.head_weights[(net.features // 16,)](a, da, ge, dge, self.found[weight], self.found[bias], self.count, **shape)
        return both, losses


def _tiles(kernel: str, block: Block, net: ConvNet, fused: bool, tangent: bool) -> dict[str, int]:
    large = TILES[kernel, "first" if fused else "large", tangent]
    rows, channels, warps, stages, unroll = large if fused or block.side > 8 else SMALL_TILES
    if net.kind == torch.float32:  # twice the registers
        rows, stages, unroll = min(rows, 32), 1, 1
    shape = {"ROWS": min(rows, block.side**2), "CHANNELS": min(channels, net.width)}
    return shape | {"num_warps": warps, "num_stages": stages, "UNROLL": unroll}


def _power(number: int, least: int, most: int | None = None) -> int:
    """The power of two at or above a number, between bounds."""
    power = max(least, 1 << (number - 1).bit_length())
    return min(power, most) if most else power
