"""The ConvNet as its kernels see it: which networks fit them, and the weights as one vector.

The vector holds the first convolution as [K, C] (its 9 taps and inputs, padded to K) and gamma and beta of every block: the
rows that kernels add up image by image. Then come the other convolutions as [C out, 3, 3, C in], the linear layer with its
features in the order of channels-last maps, and its bias. Biases of the convolutions are not in it: the norm takes them away,
so their gradients are zero.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from recollect.nets import InstanceNorm, Network, Params


@dataclass(frozen=True)
class Block:
    """One convolution with its norm and pooling: what the kernels need to know of it."""

    name: str
    norm: str
    side: int
    """of its map, before pooling"""
    row: int
    """of its gamma among the rows that lead the vector; beta's is the next"""
    start: int
    """of its convolution in the vector"""


def unfit(network: Network) -> str | None:
    """Why the kernels cannot run a network; None if they can."""
    module, (inputs, height, breadth) = network.module, network.shape
    if network.criterion is not nn.functional.cross_entropy:
        return "its loss is not cross-entropy"
    layers = list(module) if isinstance(module, nn.Sequential) else []
    blocks, rest = divmod(len(layers) - 2, 4)
    first, linear = (layers[0], layers[-1]) if layers else (None, None)
    if blocks < 1 or rest or not (isinstance(first, nn.Conv2d) and isinstance(linear, nn.Linear)):
        return "it is not a ConvNet: blocks of convolution, norm, ReLU and pooling, then one linear layer"
    width, padding = first.out_channels, cast(tuple[int, int], first.padding if isinstance(first.padding, tuple) else (1, 1))
    plain: list[nn.Module] = []
    with torch.device("meta"):
        for number in range(blocks):
            has_bias = getattr(layers[4 * number], "bias", None) is not None
            around = 1 if number else padding
            plain += [nn.Conv2d(width if number else inputs, width, 3, padding=around, bias=has_bias), InstanceNorm(width)]
            plain += [nn.ReLU(), nn.AvgPool2d(2)]
        plain += [nn.Flatten(), nn.Linear(linear.in_features, network.classes)]
    for layer, wanted in zip(layers, plain, strict=True):
        if type(layer) is not type(wanted) or (str(layer) != str(wanted) and not isinstance(layer, nn.ReLU)):
            return f"its layer is {layer}, not {wanted}"
    if width not in (16, 32, 64, 128, 256):
        return f"its width is {width}, not 16, 32, 64, 128 or 256"
    side = height + 2 * padding[0] - 2
    if height != breadth or padding[0] != padding[1] or side & (side - 1) or not 8 <= side <= 64 or side >> blocks < 2:
        return f"its maps are {side}x{breadth + 2 * padding[1] - 2}, not square with a power of two from 8 to 64"
    if inputs > 7:
        return f"its images have {inputs} channels, not 1 to 7"
    return None


class Layout:
    """A ConvNet's weights in one vector."""

    def __init__(self, network: Network):
        self.network = network
        layers = list(cast(nn.Sequential, network.module))
        count, first = len(layers) // 4, cast(nn.Conv2d, layers[0])
        self.source, self.channels, self.classes = network.shape[1], network.shape[0], network.classes
        self.width, self.padding = first.out_channels, cast(tuple[int, int], first.padding)[0]
        self.patch = max(16, 1 << (9 * self.channels - 1).bit_length())
        side, self.rows = self.source + 2 * self.padding - 2, self.patch + 2 * count
        self.blocks: list[Block] = []
        start = self.rows * self.width
        for number in range(count):
            row = self.patch + 2 * number
            self.blocks.append(Block(f"{4 * number}", f"{4 * number + 1}", side, row, start if number else 0))
            start += 9 * self.width**2 if number else 0
            side //= 2
        self.linear, self.head_at, self.features = f"{len(layers) - 1}", start, side * side * self.width
        self.size = start + self.classes * (self.features + 1)

    def operations(self, images: int) -> dict[str, float]:
        """Products of the convolutions in each pass."""
        found = {"gradient": 0.0, "adjoint": 0.0}
        for number, block in enumerate(self.blocks):
            unit = images * 2 * 9 * (self.width if number else self.channels) * self.width * block.side**2
            found["gradient"] += (3 if number else 2) * unit
            found["adjoint"] += (8 if number else 5) * unit
        return found

    def parts(self, vector: Tensor) -> Params:
        """Its named parts, as views in their own layout."""
        found, width = {}, self.width
        rows = vector[: self.rows * width].view(self.rows, width)
        for number, block in enumerate(self.blocks):
            weight = vector[block.start : block.start + 9 * width**2]
            found[f"{block.name}.weight"] = weight.view(width, 3, 3, width) if number else rows[: self.patch]
            found[f"{block.norm}.weight"], found[f"{block.norm}.bias"] = rows[block.row], rows[block.row + 1]
        head = vector[self.head_at :]
        found[f"{self.linear}.weight"] = head[: -self.classes].view(self.classes, self.features)
        found[f"{self.linear}.bias"] = head[-self.classes :]
        return found

    def _in_order(self, vector: Tensor) -> Params:
        """The same, as views that count through each part as the network does."""
        parts, side, linear = self.parts(vector), self.blocks[-1].side // 2, f"{self.linear}.weight"
        parts["0.weight"] = parts["0.weight"][: 9 * self.channels].T
        for block in self.blocks[1:]:
            parts[f"{block.name}.weight"] = parts[f"{block.name}.weight"].permute(0, 3, 1, 2)
        parts[linear] = parts[linear].unflatten(1, (side, side, self.width)).permute(0, 3, 1, 2)
        return parts

    def pack(self, params: Params) -> Tensor:
        """The vector of these parameters."""
        vector = next(iter(params.values())).new_zeros(self.size, dtype=torch.float32)
        for name, part in self._in_order(vector).items():
            part.copy_(params[name].reshape(part.shape))
        return vector

    def unpack(self, vector: Tensor, like: Params) -> Params:
        """Parameters again; the convolutions' biases, which do not move, as they are in `like`."""
        params = {name: p.to(vector.device) for name, p in like.items()}
        for name, part in self._in_order(vector).items():
            params[name] = part.clone(memory_format=torch.contiguous_format).view(like[name].shape)
        return params
