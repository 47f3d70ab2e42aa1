"""Convolutions and linear layers with ReLUs between them, by hand and of many networks at once: MLPs, La-MAML's network.

Where many small networks are unrolled side by side, as a stream's tasks are, what counts is how many kernels a step has and
how often the weights are copied. Here each product is one batched product that reads weights and writes gradients where they
lie, in the stacked vectors; a convolution is a product of the patches of its maps (patches.py), which are channels-last.

Of a layer z = h W' + b, with d for the loss's gradient by z, and a dot for a tangent in the direction mu = (W., b.):

    z. = h. W' + h W.' + b.       d. = (d. W + d W. of the layer above) where h > 0       (H mu) = d.' h + d' h.
"""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recollect.fast.flat import General, Pair
from recollect.fast.patches import Window, through_relu
from recollect.nets import Network, Params, squared_error
from recollect.unroll import Passes

ALIGNED = 32  # numbers: each network's vector begins where wide loads can
WEIGHING = nn.Conv2d, nn.Linear


def fits(network: Network) -> bool:
    """Whether a network is convolutions, a flattening, then linear layers, each with bias and ReLUs between them, and nothing
    else; and its loss one of the two that are known here."""
    if network.criterion not in (nn.functional.cross_entropy, squared_error):
        return False
    layers = list(network.module) if type(network.module) is nn.Sequential else []
    kinds = [type(layer) for layer in layers]
    convolutions = kinds.index(nn.Flatten) // 2 if nn.Flatten in kinds else 0
    linear = len(layers) // 2 - convolutions
    expected = [*[nn.Conv2d, nn.ReLU] * convolutions, nn.Flatten, nn.Linear, *[nn.ReLU, nn.Linear] * (linear - 1)]
    names = [f"{n}.{kind}" for n, layer in enumerate(layers) if type(layer) in WEIGHING for kind in ("weight", "bias")]
    own = [name for name, _ in network.module.named_parameters()] == names  # each its own, each with a bias
    hooked = any(each._forward_hooks or each._forward_pre_hooks for each in network.module.modules())
    return linear > 0 and kinds == expected and all(_plain(layer) for layer in layers) and own and not hooked


def _plain(layer: nn.Module) -> bool:
    """A layer without the options that nobody here has use for."""
    if isinstance(layer, nn.Flatten):
        return (layer.start_dim, layer.end_dim) == (1, -1)
    if not isinstance(layer, nn.Conv2d):
        return True
    square = all(len(set(pair)) == 1 for pair in (layer.kernel_size, layer.stride, layer.padding))  # "same" is no pair
    return square and layer.groups == 1 and set(layer.dilation) == {1} and layer.padding_mode == "zeros"


class Layer(NamedTuple):
    """Weights of one layer of all networks, or what belongs to them."""

    weight: Tensor
    """[S, out, in]"""
    bias: Tensor
    """[S, 1, out]"""


class Chain(General):
    """Passes over one network or several, [S, ...]. Inside, a weight's inputs are in the order of channels-last maps."""

    def __init__(self, network: Network):
        super().__init__(network, Passes(self._gradient_of, self._adjoint_of, self._judge_of))
        self.stacks = True
        self.size = sum(shape.numel() for shape in self.shapes.values())
        """numbers of a network; the rest of its vector is 0"""
        self.windows: list[Window | None] = []
        """of each layer, if it is a convolution"""
        self.inputs: dict[str, tuple[int, ...]] = {}
        """of each weight, what one output has: channels, and places"""
        channels, height, width = network.shape
        for name, layer in network.module.named_children():
            if isinstance(layer, nn.Conv2d):
                kernel, stride, padding = (int(pair[0]) for pair in (layer.kernel_size, layer.stride, layer.padding))
                window = Window(channels, height, width, kernel, stride, padding)
                self.inputs[f"{name}.weight"] = (channels, kernel * kernel)
                self.windows.append(window)
                channels, height, width = layer.out_channels, window.out_height, window.out_width
            elif isinstance(layer, nn.Linear):
                after_maps = bool(self.windows) and self.windows[-1] is not None
                self.inputs[f"{name}.weight"] = (channels, height * width) if after_maps else (layer.in_features, 1)
                self.windows.append(None)

    def held(self, images: int, adjoint: bool) -> int:
        """Bytes of a pass: beside the layers' maps their patches."""
        patches = sum(w.out_height * w.out_width * w.length for w in self.windows if w)
        return super().held(images, adjoint) + images * patches * 4 * (5 if adjoint else 2)

    def pack(self, params: Params) -> Tensor:
        inward = {name: p.reshape(len(p), *self.inputs[name]).mT if name in self.inputs else p for name, p in params.items()}
        return nn.functional.pad(super().pack(inward), (0, -self.size % ALIGNED))

    def _views(self, vector: Tensor) -> Params:
        found = super()._views(vector[: self.size])
        for name, inputs in self.inputs.items():
            found[name] = found[name].reshape(-1, *inputs[::-1]).mT.reshape(self.shapes[name])
        return found

    # the same by names, of one network

    def _gradient_of(self, params: Params, images: Tensor, labels: Tensor) -> Params:
        return self._views(self.gradient(self.pack(params)[None], images[None], labels[None])[0])

    def _judge_of(self, params: Params, images: Tensor, labels: Tensor) -> tuple[Params, Tensor]:
        slope, value = self.judge(self.pack(params)[None], images, labels)
        return self._views(slope[0]), value[0]

    def _adjoint_of(self, params: Params, images: Tensor, labels: Tensor, mu: Params) -> tuple[Params, Tensor]:
        curvature, by_images = self.adjoint(self.pack(params)[None], images[None], labels[None], self.pack(mu)[None])
        return self._views(curvature[0]), by_images[0]

    @torch.no_grad()
    def gradient(self, vectors: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        layers = self._layers(vectors)
        seen, alive, logits = self._forward(layers, images)
        back = _slope(_wide(logits), labels).to(logits)
        return self._slopes(vectors, layers, seen, alive, back)[0]

    @torch.no_grad()
    def judge(self, vectors: Tensor, images: Tensor, labels: Tensor) -> Pair:
        count = len(vectors)
        images = images.expand(count, *images.shape[-4:])  # they may be the same for all
        labels = labels.expand(count, *labels.shape[-1 - labels.is_floating_point() :])
        layers = self._layers(vectors)
        seen, alive, logits = self._forward(layers, images)
        value, by_logits = _loss(logits, labels)
        slope, back = self._slopes(vectors, layers, seen, alive, by_logits)
        return self._judged(slope, back), value

    def _judged(self, slope: Tensor, back: Tensor) -> Tensor:
        """The gradient by all weights, as the adjoint begins with it; `back` is that by the first layer's products."""
        return slope

    @torch.no_grad()
    def adjoint(self, vectors: Tensor, images: Tensor, labels: Tensor, mu: Tensor) -> Pair:
        layers, moves = self._layers(vectors), self._layers(mu)
        seen, alive, logits = self._forward(layers, images)
        seen_dots, dot = self._tangents(layers, moves, seen, alive)
        back, back_dot = (part.to(logits) for part in _tangent(_wide(logits), dot, labels))
        found, slopes = self._empty(vectors)
        for number in reversed(range(1, len(layers))):
            layer, move, slope, below = layers[number], moves[number], slopes[number], alive[number - 1]
            torch.bmm(back_dot.mT, seen[number], out=slope.weight)
            slope.weight.baddbmm_(back.mT, seen_dots[number])
            torch.sum(back_dot, 1, keepdim=True, out=slope.bias)
            back_dot = torch.bmm(back_dot, layer.weight).baddbmm_(back, move.weight)
            back_dot = self._gather(number, back_dot, below)
            back = self._gather(number, torch.bmm(back, layer.weight), below)
        torch.bmm(back_dot.mT, seen[0], out=slopes[0].weight)
        torch.sum(back_dot, 1, keepdim=True, out=slopes[0].bias)
        by_seen = torch.bmm(back_dot, layers[0].weight).baddbmm_(back, moves[0].weight)
        return found, self._by_images(by_seen, back_dot, back, mu, images)

    def _by_images(self, by_seen: Tensor, back_dot: Tensor, back: Tensor, mu: Tensor, images: Tensor) -> Tensor:
        """The gradient by what was given, from that by what the first layer sees."""
        return self._leave(self._gather(0, by_seen, None), images)

    def _layers(self, vectors: Tensor) -> list[Layer]:
        """Views into the vectors."""
        shapes = list(self.shapes.values())
        pieces = vectors[:, : self.size].split([shape.numel() for shape in shapes], 1)
        pairs = zip(shapes[::2], pieces[::2], pieces[1::2], strict=True)
        return [Layer(weight.unflatten(1, (shape[0], -1)), bias[:, None]) for shape, weight, bias in pairs]

    def _empty(self, like: Tensor) -> tuple[Tensor, list[Layer]]:
        """Vectors to write gradients to."""
        found = torch.empty_like(like)
        found[:, self.size :] = 0
        return found, self._layers(found)

    # maps are rows of channels, [S, B H W, C]; so is what a linear layer sees, [S, B, in]

    def _enter(self, images: Tensor) -> Tensor:
        return images.movedim(2, -1).flatten(1, 3) if self.windows[0] else images.flatten(2)

    def _leave(self, rows: Tensor, images: Tensor) -> Tensor:
        """The same way back, to what `images` is like."""
        if not self.windows[0]:
            return rows.view(images.shape)
        count, batch, channels, height, width = images.shape
        return rows.reshape(count, batch, height, width, channels).movedim(-1, 2)

    def _spread(self, number: int, rows: Tensor, alive: Tensor | None) -> Tensor:
        """What a layer sees of the rows below it, through the ReLU between them, if there is one: `alive` is what it was
        given."""
        if window := self.windows[number]:
            return window.spread(rows.reshape(window.maps), alive).reshape(len(rows), -1, window.length)
        return through_relu(rows, alive).view(len(rows), -1, prod(self._inputs(number)))

    def _gather(self, number: int, seen: Tensor, alive: Tensor | None) -> Tensor:
        """Its transpose, for gradients."""
        if window := self.windows[number]:
            patches = seen.view(-1, window.out_height, window.out_width, window.length)
            return window.gather(patches, alive).reshape(len(seen), -1, window.channels)
        return through_relu(seen.reshape(len(seen), -1, self._inputs(number)[0]), alive) if number else seen

    def _inputs(self, number: int) -> tuple[int, ...]:
        return list(self.inputs.values())[number]

    def _forward(self, layers: list[Layer], images: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """What each layer sees, what each ReLU is given, and the logits."""
        seen, alive, rows = [], [], self._enter(images)
        for number, layer in enumerate(layers):
            if number:
                alive.append(rows)
            seen.append(self._spread(number, rows, rows if number else None))
            rows = torch.baddbmm(layer.bias if number else self._first_bias(layer, images), seen[-1], layer.weight.mT)
        return seen, alive, rows

    def _first_bias(self, layer: Layer, images: Tensor) -> Tensor:
        return layer.bias

    def _tangents(
        self, layers: list[Layer], moves: list[Layer], seen: list[Tensor], alive: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """Of what each layer sees, but the first: images have none, and their place is not read; and of the logits."""
        dots, rows = [seen[0]], torch.baddbmm(moves[0].bias, seen[0], moves[0].weight.mT)
        for number in range(1, len(layers)):
            dots.append(self._spread(number, rows, alive[number - 1]))
            rows = torch.baddbmm(moves[number].bias, seen[number], moves[number].weight.mT)
            rows.baddbmm_(dots[number], layers[number].weight.mT)
        return dots, rows

    def _slopes(
        self, vectors: Tensor, layers: list[Layer], seen: list[Tensor], alive: list[Tensor], back: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradient by all weights, from that by the logits; and that by the first layer's products."""
        found, slopes = self._empty(vectors)
        for number in reversed(range(len(layers))):
            torch.bmm(back.mT, seen[number], out=slopes[number].weight)
            torch.sum(back, 1, keepdim=True, out=slopes[number].bias)
            if number:
                back = self._gather(number, torch.bmm(back, layers[number].weight), alive[number - 1])
        return found, back


class Half(Chain):
    """The same with bfloat16 inside a pass: half the bytes to move. In full are the softmax, what is summed over steps (weights,
    momentum, the adjoint), and the judging of queries."""

    def gradient(self, vectors: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        return super().gradient(vectors.bfloat16(), images.bfloat16(), labels).to(vectors)

    def adjoint(self, vectors: Tensor, images: Tensor, labels: Tensor, mu: Tensor) -> Pair:
        halved = (vectors.bfloat16(), images.bfloat16(), labels, mu.bfloat16())
        curvature, by_images = super().adjoint(*halved)
        return curvature.to(vectors), by_images.to(images)

    def held(self, images: int, adjoint: bool) -> int:
        return super().held(images, adjoint) // 2 if adjoint else super().held(images, adjoint)


def _wide(numbers: Tensor) -> Tensor:
    """In float32 at least."""
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))


# the mean loss: cross-entropy of labels [S, B], or squared error of targets [S, B, outputs]


def _loss(logits: Tensor, labels: Tensor) -> Pair:
    """Values [S], and their gradient by the logits."""
    if labels.is_floating_point():
        return (logits - labels).square().mean((1, 2)), _slope(logits, labels)
    logs = logits.log_softmax(-1)
    return -logs.gather(-1, labels[..., None]).sum((1, 2)) / labels.shape[1], _by_logits(logs.exp(), labels)


def _slope(logits: Tensor, labels: Tensor) -> Tensor:
    """The gradient alone."""
    if labels.is_floating_point():
        return (logits - labels) * (2 / logits[0].numel())
    return _by_logits(logits.softmax(-1), labels)


def _tangent(logits: Tensor, dot: Tensor, labels: Tensor) -> Pair:
    """The gradient, and its tangent in the direction that the logits move in."""
    if labels.is_floating_point():
        return _slope(logits, labels), dot * (2 / logits[0].numel())
    probabilities = logits.softmax(-1)
    moved = probabilities * dot
    return _by_logits(probabilities, labels), (moved - probabilities * moved.sum(-1, keepdim=True)) / labels.shape[1]


def _by_logits(probabilities: Tensor, labels: Tensor) -> Tensor:
    right = labels[..., None] == torch.arange(probabilities.shape[-1], device=labels.device)
    return (probabilities - right.to(probabilities)) / labels.shape[1]
