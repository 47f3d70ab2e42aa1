"""The ConvNet's passes by hand: Triton kernels (kernels.py) around the library's convolutions, on one vector of weights.

The adjoint carries value and tangent side by side. Stacked as A = [a; da] and G = [dgy; gy], one convolution serves both:

    w * A = [w * a; w * da]       tangent of the map: w * da + dw * a
    w^T G = [w^T dgy; w^T gy]     tangent of the gradient: w^T dgy + dw^T gy
    A x G = a x dgy + da x gy     the tangent of the gradient by w, in one product over 2 B images

so that a layer costs five launches for its eight convolutions, and the sums are taken where they are next read.

The vector holds, block after block, the first convolution as [K, C] (its 9 taps and inputs, padded to K), or a later one as
[C out, 3, 3, C in]; gamma; beta; then the linear layer, its features in the order of channels-last maps, and its bias.
Biases of the convolutions are not in it: the norm takes them away, so their gradients are zero.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recollect.fast import kernels
from recollect.nets import InstanceNorm, Network, Params

aten = torch.ops.aten
TILES: dict[tuple[str, bool, bool], tuple[int, int, int, int]] = {}  # (kernel, fused, tangent): rows, channels, warps, stages


@dataclass(frozen=True)
class Block:
    """One convolution with its norm and pooling: what the kernels need to know of it."""

    name: str
    norm: str
    side: int
    """of its map, before pooling"""
    start: int
    """of its weights in the vector"""
    inputs: int
    """values of a patch (first block, padded) or channels"""


def unfit(network: Network) -> str | None:
    """Why these kernels cannot run a network; None if they can."""
    layers = list(cast(nn.Sequential, network.module)) if isinstance(network.module, nn.Sequential) else []
    blocks, rest = divmod(len(layers) - 2, 4)
    if blocks < 1 or rest:
        return "it is not a ConvNet with pooling in every block"
    for conv, norm, relu, pool in zip(*(layers[k : 4 * blocks : 4] for k in range(4)), strict=True):
        kinds = isinstance(conv, nn.Conv2d) and isinstance(norm, InstanceNorm) and isinstance(relu, nn.ReLU)
        if not kinds or not isinstance(pool, nn.AvgPool2d) or pool.kernel_size != 2 or conv.kernel_size != (3, 3):
            return "it is not a ConvNet with pooling in every block"
    if not isinstance(layers[-2], nn.Flatten) or not isinstance(layers[-1], nn.Linear):
        return "it does not end in one linear layer"
    width, (inputs, height, breadth) = layers[0].out_channels, network.shape
    side = height + 2 * layers[0].padding[0] - 2
    if width not in (16, 32, 64, 128, 256):
        return f"its width is {width}, not 16, 32, 64, 128 or 256"
    if height != breadth or side & (side - 1) or not 8 <= side <= 64 or side >> blocks < 2:
        return f"its maps are {side}x{breadth + 2 * layers[0].padding[0] - 2}, not square with a power of two from 8 to 64"
    if inputs > 7:
        return f"its images have {inputs} channels, not 1 to 7"
    return None


class ConvNet:
    """The passes of a ConvNet in one precision: "bf16", or "tf32" and "fp32" on float32 tensors."""

    def __init__(self, network: Network, precision: str):
        self.network, self.precision = network, precision
        self.kind = torch.bfloat16 if precision == "bf16" else torch.float32
        self.dot = "tf32" if precision == "tf32" else "ieee"
        layers = list(cast(nn.Sequential, network.module))
        count = len(layers) // 4
        self.source, self.channels = network.shape[1], network.shape[0]
        self.width, self.padding = layers[0].out_channels, layers[0].padding[0]
        self.patch = _power(9 * self.channels, 16)
        self.classes, self.padded = network.classes, _power(network.classes, 16)
        self.blocks: list[Block] = []
        start, side, inputs = 0, self.source + 2 * self.padding - 2, self.patch
        for number in range(count):
            self.blocks.append(Block(f"{4 * number}", f"{4 * number + 1}", side, start, inputs))
            start += self.width * ((inputs if number == 0 else 9 * inputs) + 2)
            side, inputs = side // 2, self.width
        self.linear, self.head_at, self.features = f"{len(layers) - 1}", start, side * side * self.width
        self.size = start + self.classes * (self.features + 1)

    # ---- the vector -------------------------------------------------------------------------------------------------

    def _parts(self, vector: Tensor) -> dict[str, Tensor]:
        """Its named parts, as views in their own layout."""
        parts, width = {}, self.width
        for number, block in enumerate(self.blocks):
            taps = block.inputs if number == 0 else 9 * block.inputs
            weight, gamma, beta = vector[block.start : block.start + width * (taps + 2)].split((width * taps, width, width))
            parts[f"{block.name}.weight"] = weight.view(taps, width) if number == 0 else weight.view(width, 3, 3, width)
            parts[f"{block.norm}.weight"], parts[f"{block.norm}.bias"] = gamma, beta
        head = vector[self.head_at :]
        parts[f"{self.linear}.weight"] = head[: -self.classes].view(self.classes, self.features)
        parts[f"{self.linear}.bias"] = head[-self.classes :]
        return parts

    def pack(self, params: Params) -> Tensor:
        """The vector of these parameters."""
        first = next(iter(params.values()))
        vector = first.new_zeros(self.size, dtype=torch.float32)
        side = self.blocks[-1].side // 2
        for name, part in self._parts(vector).items():
            value = params[name]
            if name == "0.weight":
                part[: 9 * self.channels] = value.flatten(1).T
            elif name == f"{self.linear}.weight":
                part.copy_(value.unflatten(1, (self.width, side, side)).permute(0, 2, 3, 1).flatten(1))
            else:
                part.copy_(value.permute(0, 2, 3, 1) if value.ndim == 4 else value)
        return vector

    def unpack(self, vector: Tensor, like: Params) -> Params:
        """Parameters again; the convolutions' biases, which do not move, as they are in `like`."""
        params, side = dict(like), self.blocks[-1].side // 2
        for name, part in self._parts(vector).items():
            if name == "0.weight":
                part = part[: 9 * self.channels].T.reshape(like[name].shape)
            elif name == f"{self.linear}.weight":
                part = part.unflatten(1, (side, side, self.width)).permute(0, 3, 1, 2).flatten(1)
            else:
                part = part.permute(0, 3, 1, 2) if part.ndim == 4 else part
            params[name] = part.clone(memory_format=torch.contiguous_format)
        return params

    def work(self, images: int) -> dict[str, tuple[float, float]]:
        """(operations, bytes) of each pass: products of the convolutions, and what the launches read and write between them,
        each tensor once."""
        operations = {"gradient": 0.0, "adjoint": 0.0}
        numbers = {"gradient": 3.0, "adjoint": 5.0}
        patches = self.blocks[0].side ** 2 * self.patch
        numbers = {name: times * patches for name, times in numbers.items()}
        for number, block in enumerate(self.blocks):
            inputs = self.channels if number == 0 else self.width
            unit = 2 * 9 * inputs * self.width * block.side**2
            operations["gradient"] += (3 if number else 2) * unit
            operations["adjoint"] += (8 if number else 5) * unit
            whole, pooled = self.width * block.side**2, self.width * block.side**2 / 4
            numbers["gradient"] += 5 * pooled + (6 * whole if number else 0)
            numbers["adjoint"] += 13 * pooled + (16 * whole if number else 0)
        size = 2 if self.precision == "bf16" else 4
        return {name: (images * operations[name], images * numbers[name] * size) for name in operations}

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
        count, run = len(images), _Launch(self, len(images), tangent=False)
        patches, means = run.unfold(images)
        maps, pooled, stats = [None], [], []
        for number, block in enumerate(self.blocks):
            if number:
                maps.append(_convolve(pooled[-1], given.weights[number]))
            a, kept = run.forward(block, given, None, maps[number], None, None, patches, means)
            pooled.append(a)
            stats.append(kept)
        ga, losses = run.head(pooled[-1], given, None, labels, total or count, self._head(found))
        for number, block in reversed(list(enumerate(self.blocks))):
            arguments = (block, given, None, maps[number], None, None, patches, stats[number], ga, None, None)
            gy, _, partial = run.backward(*arguments)
            self._sum(partial, found, block, number)
            if number:
                weight = given.weights[number]
                ga, by_weight, _ = _backward(gy, pooled[number - 1], weight, (True, True))
                self._store(by_weight, found, block)
        return found, losses

    def adjoint(
        self, vector: Tensor, images: Tensor, labels: Tensor, mu: Tensor, total: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """(H mu, (d/dx) <g, mu>)."""
        found, given, moved = torch.empty_like(vector), self._given(vector), self._given(mu)
        count, run = len(images), _Launch(self, len(images), tangent=True)
        patches, means = run.unfold(images)
        maps: list[tuple[Any, Any, Any]] = [(None, None, None)]
        pooled, stats = [], []
        for number, block in enumerate(self.blocks):
            if number:
                both = _convolve(pooled[-1], given.weights[number])
                moving = _convolve(pooled[-1][:count], moved.weights[number])
                maps.append((both[:count], both[count:], moving))
            a, kept = run.forward(block, given, moved, *maps[number], patches, means)
            pooled.append(a)
            stats.append(kept)
        both, _ = run.head(pooled[-1], given, moved, labels, total or count, self._head(found))
        dga, ga, moving = both[:count], both[count:], None
        by_patch = None
        for number, block in reversed(list(enumerate(self.blocks))):
            arguments = (block, given, moved, *maps[number], patches, stats[number], ga, dga, moving)
            both, by_patch, partial = run.backward(*arguments)
            self._sum(partial, found, block, number)
            if number:
                before = pooled[number - 1]
                back, by_weight, _ = _backward(both, before, given.weights[number], (True, True))
                moving, _, _ = _backward(both[count:], before[:count], moved.weights[number], (True, False))
                dga, ga = back[:count], back[count:]
                self._store(by_weight, found, block)
        return found, run.fold(by_patch)

    def _given(self, vector: Tensor) -> "_Given":
        return _Given(self._parts(vector), self._parts(vector.to(self.kind)), self)

    def _head(self, found: Tensor) -> tuple[Tensor, Tensor]:
        parts = self._parts(found)
        return parts[f"{self.linear}.weight"], parts[f"{self.linear}.bias"]

    def _sum(self, partial: Tensor, found: Tensor, block: Block, number: int) -> None:
        """The images' parts of a gradient, added up where they belong."""
        start = block.start if number == 0 else block.start + 9 * block.inputs * self.width
        place = found[start : start + partial[0].numel()].view(partial.shape[1:])
        torch.sum(partial, 0, out=place)

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
    """The kernels of one pass over a batch."""

    def __init__(self, net: ConvNet, count: int, tangent: bool):
        self.net, self.count, self.tangent = net, count, tangent

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

    def unfold(self, images: Tensor) -> tuple[Tensor, Tensor]:
        net, self.device = self.net, images.device
        side = net.blocks[0].side
        patches = self._new(self.count, side * side, net.patch)
        means = self._new(self.count, net.patch, kind=torch.float32)
        options = {"SOURCE": net.source, "SIDE": side, "PADDING": net.padding, "INPUTS": net.channels, "K": net.patch}
        kernels.unfold[(self.count,)](images.contiguous(), patches, means, **options, ROWS=min(64, side * side))
        return patches, means

    def fold(self, by_patch: Tensor) -> Tensor:
        net = self.net
        by_images = self._new(self.count, net.channels, net.source, net.source, kind=torch.float32)
        pixels = _power(net.source**2, 16, most=256)
        grid = (self.count, net.channels, -(-(net.source**2) // pixels))
        options = {"SOURCE": net.source, "SIDE": net.blocks[0].side, "PADDING": net.padding, "INPUTS": net.channels}
        kernels.fold[grid](by_patch, by_images, self.count, len(by_patch), **options, K=net.patch, PIXELS=pixels)
        return by_images

    def forward(self, block: Block, given: _Given, moved: "_Given | None", y, dy, ddy, patches, means):
        net, fused = self.net, block is self.net.blocks[0]
        both = self._maps(block.side // 2)
        a, da = self._halves(both)
        stats = self._new(4 if self.tangent else 2, self.count, net.width, kind=torch.float32)
        shape = _tiles("forward", block, net, fused, self.tangent)
        kernels.forward[(self.count, net.width // shape["CHANNELS"])](
            y, dy, ddy, patches if fused else None, means if fused else None,
            given.weights[0] if fused else None, moved.weights[0] if fused and moved else None,
            *given.norm(block), *(moved.norm(block) if moved else (None, None)), a, da, stats, self.count,
            SIDE=block.side, C=net.width, K=net.patch, FUSED=fused, TANGENT=self.tangent, PRECISION=net.dot, **shape,
        )  # fmt: skip
        return both, stats

    def backward(self, block: Block, given: _Given, moved: "_Given | None", y, dy, ddy, patches, stats, ga, dga, ddga):
        """(gy, or [dgy; gy]; the tangent of the gradient by the patches, first block; the parts of the norm's gradient)."""
        net, fused = self.net, block is self.net.blocks[0]
        both = None if fused else self._maps(block.side)
        gy, dgy = (None, None) if both is None else self._halves(both, swapped=True)
        shape = _tiles("backward", block, net, fused, self.tangent)
        by_patch = self._new(net.width // shape["CHANNELS"], *patches.shape) if fused and self.tangent else None
        partial = self._new(self.count, (net.patch if fused else 0) + 2, net.width, kind=torch.float32)
        gamma, beta = given.norm(block)
        kernels.backward[(self.count, net.width // shape["CHANNELS"])](
            y, dy, ddy, patches if fused else None,
            given.weights[0] if fused else None, moved.weights[0] if fused and moved else None,
            gamma, beta, moved.norm(block)[0] if moved else None, stats, ga, dga, ddga, gy, dgy, by_patch, partial, self.count,
            SIDE=block.side, C=net.width, K=net.patch, FUSED=fused, TANGENT=self.tangent, PRECISION=net.dot, **shape,
        )  # fmt: skip
        return both, by_patch, partial

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
        shape |= {"BLOCK": min(64, net.features), "TANGENT": self.tangent, "PRECISION": net.dot}
        weight, bias = given.head
        dweight, dbias = moved.head if moved else (None, None)
        kernels.head[(-(-self.count // 16),)](
            a, da, weight, dweight, bias, dbias, labels, losses, ge, dge, ga, dga, self.count, total, **shape
        )
        kernels.head_weights[(net.features // shape["BLOCK"],)](a, da, ge, dge, *out, self.count, **shape)
        return both, losses


def _tiles(kernel: str, block: Block, net: ConvNet, fused: bool, tangent: bool) -> dict[str, int]:
    """How a kernel cuts its work up, found on an H200 (recollect bench engine)."""
    rows, channels, warps, stages = TILES.get((kernel, fused, tangent), (64, 32, 4, 1))
    return {
        "ROWS": min(rows, block.side**2),
        "CHANNELS": min(channels, net.width),
        "num_warps": warps,
        "num_stages": stages,
    }


def _convolve(images: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(images, weight, padding=1)


def _backward(by_output: Tensor, images: Tensor, weight: Tensor, wanted: tuple[bool, bool]):
    return aten.convolution_backward(
        by_output, images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [*wanted, False]
    )


def _power(number: int, least: int, most: int | None = None) -> int:
    """The power of two at or above a number, between bounds."""
    power = max(least, 1 << (number - 1).bit_length())
    return min(power, most) if most else power
