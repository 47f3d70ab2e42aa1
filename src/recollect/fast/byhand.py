"""The ConvNet's passes by hand, the order of their work on any chip: kernels around the library's convolutions. convnet.py has
the kernels' launches on a GPU, cpu.py those on a CPU.

The adjoint carries value and tangent side by side. Stacked as A = [a; da] and G = [dgy; gy], one convolution serves both:

    w * A = [w * a; w * da]       tangent of the map: w * da + dw * a
    w^T G = [w^T dgy; w^T gy]     tangent of the gradient: w^T dgy + dw^T gy
    A x G = a x dgy + da x gy     the tangent of the gradient by w, in one product over 2 B images

so that a layer has five launches for its eight convolutions, and the sums are taken where they are next read.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from recollect.fast.flat import Pair, alone
from recollect.fast.layout import Layout
from recollect.nets import Network

aten = torch.ops.aten


class ByHand(Layout, ABC):
    """The passes of a ConvNet in one precision: "bf16", or others on float32 tensors."""

    stacks, splits = False, True

    def __init__(self, network: Network, precision: str):
        super().__init__(network)
        self.precision, self.kind = precision, torch.bfloat16 if precision == "bf16" else torch.float32

    def gradient(self, vectors: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        return self._run(vectors[0], images[0], labels[0], None)[0][None]

    def judge(self, vectors: Tensor, images: Tensor, labels: Tensor) -> Pair:
        found, losses = self._run(vectors[0], *alone(images, labels), None)
        return found[None], losses.sum()[None] / len(losses)

    def adjoint(self, vectors: Tensor, images: Tensor, labels: Tensor, mu: Tensor) -> Pair:
        found, by_images = self._run(vectors[0], images[0], labels[0], mu[0])
        return found[None], by_images[None]

    @abstractmethod
    def _run(self, vector: Tensor, images: Tensor, labels: Tensor, mu: Tensor | None) -> Pair:
        """(dL/dtheta, every image's loss) of one network; with mu (H mu, (d/dx) <g, mu>)."""


class Given:
    """One vector as a pass wants it: in float32, and rounded to the type of the products."""

    def __init__(self, net: ByHand, vector: Tensor):
        self.exact, self.rounded = net.parts(vector), net.parts(vector.to(net.kind))
        first, *rest = (self.rounded[f"{block.name}.weight"] for block in net.blocks)
        self.weights = [first, *(weight.permute(0, 3, 1, 2) for weight in rest)]
        self.norms = [(self.exact[f"{block.norm}.weight"], self.exact[f"{block.norm}.bias"]) for block in net.blocks]


class Batch(ABC):
    """Images on their way through the network and back; with `moved`, the tangents in its direction too. `found` takes the
    gradient by the weights, or its tangent.

    A map goes from block to block as a pair: value and tangent stacked, on the way back tangent first; and what is still to be
    added to the tangent.
    """

    def __init__(self, net: ByHand, given: Given, moved: Given | None, images: Tensor, found: Tensor):
        self.net, self.given, self.moved, self.images = net, given, moved, images
        self.count, self.found = len(images), net.parts(found)
        self.kept: dict[int, tuple[Tensor | None, ...]] = {}
        """of each block, what its backward needs of its forward"""

    @abstractmethod
    def forward(self, number: int, y: Tensor | None, moving: Tensor | None) -> Tensor:
        """a of a block, or [a; da]. The first one makes its own map, of the images' patches."""

    @abstractmethod
    def head(self, features: Tensor, labels: Tensor, total: int) -> Pair:
        """(the gradient by the features, or [tangent; gradient]; every image's loss), the loss a mean over `total` images."""

    @abstractmethod
    def backward(self, number: int, y: Tensor | None, moving: Tensor | None, ga: Tensor, rest: Tensor | None) -> Tensor | None:
        """gy of a block, or [dgy; gy], from that by a; nothing of the first one."""

    @abstractmethod
    def add(self, number: int, by_weight: Tensor) -> None:
        """To `found`, of a convolution after the first."""

    def there_and_back(self, labels: Tensor, total: int) -> Tensor:
        """Every image's loss."""
        weights, pooled = self.given.weights, []
        maps: list[tuple[Tensor | None, Tensor | None]] = []
        for number, weight in enumerate(weights):
            y = F.conv2d(pooled[-1], weight, padding=1) if number else None
            moving = F.conv2d(pooled[-1][: self.count], self.moved.weights[number], padding=1) if number and self.moved else None
            maps.append((y, moving))
            pooled.append(self.forward(number, *maps[-1]))
        back, losses = self.head(pooled[-1], labels, total)
        rest = None
        for number, weight in reversed(list(enumerate(weights))):
            gy = self.backward(number, *maps[number], back, rest)
            if number and gy is not None:
                below = pooled[number - 1]
                back = _by_input(gy, below, weight)
                if self.moved:
                    rest = _by_input(gy[self.count :], below[: self.count], self.moved.weights[number])
                self.add(number, _by_weight(gy, below, weight))
        return losses

    def new(self, *shape: int, kind: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=kind or self.net.kind, device=self.images.device)

    def maps(self, side: int) -> Tensor:
        """A map for each image, or two stacked; channels-last."""
        return self.new(self.count * (2 if self.moved else 1), side, side, self.net.width).permute(0, 3, 1, 2)

    def halves(self, both: Tensor | None, back: bool = False) -> tuple[Tensor | None, Tensor | None]:
        """(value, tangent) of a stack."""
        if both is None or not self.moved:
            return both, None
        first, second = both[: self.count], both[self.count :]
        return (second, first) if back else (first, second)


def _by_input(by_output: Tensor, images: Tensor, weight: Tensor) -> Tensor:
    return _backward(by_output, images, weight, [True, False, False])[0]


def _by_weight(by_output: Tensor, images: Tensor, weight: Tensor) -> Tensor:
    return _backward(by_output, images, weight, [False, True, False])[1]


def _backward(by_output: Tensor, images: Tensor, weight: Tensor, wanted: list[bool]):
    return aten.convolution_backward(by_output, images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, wanted)
