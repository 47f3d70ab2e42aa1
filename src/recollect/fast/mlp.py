"""The multilayer perceptron by hand: linear layers and ReLUs, of many networks at once.

Where many small networks are unrolled side by side, as a stream's tasks are, what counts is how many kernels a step has and
how often the weights are copied. Here each product is one batched product that reads weights and writes gradients where they
lie, in the stacked vectors.

Of a layer z = h W' + b, with d for the loss's gradient by z, and a dot for a tangent in the direction mu = (W., b.):

    z. = h. W' + h W.' + b.       d. = (d. W + d W. of the layer above) where h > 0       (H mu) = d.' h + d' h.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from recollect.fast.flat import General
from recollect.nets import Network, Params
from recollect.unroll import Passes

ALIGNED = 32  # numbers: each network's vector begins where wide loads can

through_relu = (
    torch.ops.aten.threshold_backward
)  # (what comes, the ReLU's value, 0): its way back, and its tangent's way on


def fits(network: Network) -> bool:
    """Whether a network is a flattening, then linear layers with bias and ReLUs between them, and nothing else."""
    layers = list(network.module) if type(network.module) is nn.Sequential else []
    names = [f"{number}.{kind}" for number in range(1, len(layers), 2) for kind in ("weight", "bias")]
    return (
        len(layers) > 1
        and [type(layer) for layer in layers] == [nn.Flatten, nn.Linear, *[nn.ReLU, nn.Linear] * (len(layers) // 2 - 1)]
        and (layers[0].start_dim, layers[0].end_dim) == (1, -1)
        and [name for name, _ in network.module.named_parameters()] == names  # each its own, each with a bias
        and not any(each._forward_hooks or each._forward_pre_hooks for each in network.module.modules())
    )


class Layer(NamedTuple):
    """Weights of one layer of all networks, or what belongs to them."""

    weight: Tensor
    """[S, out, in]"""
    bias: Tensor
    """[S, 1, out]"""


class MLP(General):
    """Passes over one network or several, [S, ...]."""

    def __init__(self, network: Network):
        super().__init__(network, Passes(self._gradient, self._adjoint, self._judge))
        self.size = sum(shape.numel() for shape in self.shapes.values())
        """numbers of a network; the rest of its vector is 0"""

    def pack(self, params: Params) -> Tensor:
        return nn.functional.pad(super().pack(params), (0, -self.size % ALIGNED))

    def _views(self, vector: Tensor) -> Params:
        return super()._views(vector[: self.size])

    def _gradient(self, params: Params, images: Tensor, labels: Tensor) -> Params:
        return self._views(self.gradient(self.pack(params), images, labels))

    def _judge(self, params: Params, images: Tensor, labels: Tensor) -> tuple[Params, Tensor]:
        slope, value = self.judge(self.pack(params), images, labels)
        return self._views(slope), value

    def _adjoint(self, params: Params, images: Tensor, labels: Tensor, mu: Params) -> tuple[Params, Tensor]:
        curvature, by_images = self.adjoint(self.pack(params), images, labels, self.pack(mu))
        return self._views(curvature), by_images

    def gradient(self, vector: Tensor, images: Tensor, labels: Tensor, total: int | None = None) -> Tensor:
        return self.gradients(vector[None], images[None], labels[None], total)[0]

    def judge(self, vector: Tensor, images: Tensor, labels: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
        slope, value = self.judges(vector[None], images[None], labels[None], total)
        return slope[0], value[0]

    def adjoint(
        self, vector: Tensor, images: Tensor, labels: Tensor, mu: Tensor, total: int | None = None
    ) -> tuple[Tensor, Tensor]:
        curvature, by_images = self.adjoints(vector[None], images[None], labels[None], mu[None], total)
        return curvature[0], by_images[0]

    @torch.no_grad()
    def gradients(self, vectors: Tensor, images: Tensor, labels: Tensor, total: int | None = None) -> Tensor:
        layers = self._layers(vectors)
        values = _values(layers, images.flatten(2))
        return self._slopes(vectors, layers, values, _by_logits(values[-1].softmax(-1), labels, total))

    @torch.no_grad()
    def judges(
        self, vectors: Tensor, images: Tensor, labels: Tensor, total: int | None = None
    ) -> tuple[Tensor, Tensor]:
        count = len(vectors)
        images = images.expand(count, *images.shape[-4:])  # they may be the same for all
        labels = labels.expand(count, labels.shape[-1])
        layers = self._layers(vectors)
        values = _values(layers, images.flatten(2))
        logs = values[-1].log_softmax(-1)
        value = -logs.gather(-1, labels[..., None]).sum((1, 2)) / (total or labels.shape[1])
        return self._slopes(vectors, layers, values, _by_logits(logs.exp(), labels, total)), value

    @torch.no_grad()
    def adjoints(
        self, vectors: Tensor, images: Tensor, labels: Tensor, mu: Tensor, total: int | None = None
    ) -> tuple[Tensor, Tensor]:
        layers, moves = self._layers(vectors), self._layers(mu)
        values = _values(layers, images.flatten(2))
        dots = _tangents(layers, moves, values)
        chances = values[-1].softmax(-1)
        backs = _backs(layers, values, _by_logits(chances, labels, total))
        spread = chances * dots[-1]
        back_dot = (spread - chances * spread.sum(-1, keepdim=True)) / (total or labels.shape[1])
        found, slopes = self._empty(vectors)
        for number in reversed(range(len(layers))):
            layer, move, back, slope = layers[number], moves[number], backs[number], slopes[number]
            torch.bmm(back_dot.mT, values[number], out=slope.weight)
            if number:
                slope.weight.baddbmm_(back.mT, dots[number])
            torch.sum(back_dot, 1, keepdim=True, out=slope.bias)
            back_dot = torch.bmm(back_dot, layer.weight).baddbmm_(back, move.weight)
            if number:
                back_dot = through_relu(back_dot, values[number], 0)
        return found, back_dot.view(images.shape)

    def _layers(self, vectors: Tensor) -> list[Layer]:
        """Views into the vectors."""
        shapes = list(self.shapes.values())
        pieces = vectors[:, : self.size].split([shape.numel() for shape in shapes], 1)
        views = [piece.unflatten(1, shape) for piece, shape in zip(pieces, shapes, strict=True)]
        return [Layer(weight, bias[:, None]) for weight, bias in zip(views[::2], views[1::2], strict=True)]

    def _empty(self, like: Tensor) -> tuple[Tensor, list[Layer]]:
        """Vectors to write gradients to."""
        found = torch.empty_like(like)
        found[:, self.size :] = 0
        return found, self._layers(found)

    def _slopes(self, vectors: Tensor, layers: list[Layer], values: list[Tensor], by_logits: Tensor) -> Tensor:
        found, slopes = self._empty(vectors)
        for slope, value, back in zip(slopes, values, _backs(layers, values, by_logits), strict=False):
            torch.bmm(back.mT, value, out=slope.weight)
            torch.sum(back, 1, keepdim=True, out=slope.bias)
        return found


def _values(layers: list[Layer], images: Tensor) -> list[Tensor]:
    """What each layer sees, [S, B, in]; and the logits."""
    values = [images]
    for layer in layers:
        if len(values) > 1:
            values[-1].relu_()
        values.append(torch.baddbmm(layer.bias, values[-1], layer.weight.mT))
    return values


def _tangents(layers: list[Layer], moves: list[Layer], values: list[Tensor]) -> list[Tensor]:
    """Of the values; the images have none, and their place is not read."""
    dots = [values[0]]
    for number, (layer, move) in enumerate(zip(layers, moves, strict=True)):
        dot = torch.baddbmm(move.bias, values[number], move.weight.mT)
        if number:
            dot.baddbmm_(dots[number], layer.weight.mT)
        dots.append(through_relu(dot, values[number + 1], 0) if layer is not layers[-1] else dot)
    return dots


def _by_logits(chances: Tensor, labels: Tensor, total: int | None) -> Tensor:
    """The gradient of the mean cross-entropy."""
    right = labels[..., None] == torch.arange(chances.shape[-1], device=labels.device)
    return (chances - right.to(chances)) / (total or labels.shape[1])


def _backs(layers: list[Layer], values: list[Tensor], by_logits: Tensor) -> list[Tensor]:
    """The gradient by each layer's output before its ReLU."""
    backs = [by_logits]
    for layer, value in zip(layers[:0:-1], values[-2:0:-1], strict=True):
        backs.append(through_relu(torch.bmm(backs[-1], layer.weight), value, 0))
    return backs[::-1]
