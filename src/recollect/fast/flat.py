"""Any network's passes on one vector of weights, and the same in pieces for a batch that does not fit.

One vector is what makes an inner step short: one kernel updates it, one keeps it in the trajectory, whatever the network.
"""

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jvp, vmap

from recollect.nets import Network, Params
from recollect.unroll import Passes


class Flat(Protocol):
    """Passes over a network whose weights are one vector. `total` is the number of images that the loss is a mean over, where
    these are only some of them."""

    network: Network
    benchmark: bool
    """whether the library should try out its convolutions, which takes memory"""
    stacks: bool
    """whether it is Stacking, and that pays"""
    splits: bool
    """whether a batch may be passed in pieces"""

    def held(self, images: int, adjoint: bool) -> int: ...
    def pack(self, params: Params) -> Tensor: ...
    def unpack(self, vector: Tensor, like: Params) -> Params: ...
    def gradient(self, vector: Tensor, images: Tensor, labels: Tensor, total: int | None = None) -> Tensor: ...
    def judge(self, vector: Tensor, images: Tensor, labels: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]: ...
    def adjoint(
        self, vector: Tensor, images: Tensor, labels: Tensor, mu: Tensor, total: int | None = None
    ) -> tuple[Tensor, Tensor]: ...


class Stacking(Flat, Protocol):
    """Passes over several networks at once, their vectors stacked."""

    def gradients(self, vectors: Tensor, images: Tensor, labels: Tensor) -> Tensor: ...
    def judges(self, vectors: Tensor, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]: ...
    def adjoints(self, vectors: Tensor, images: Tensor, labels: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]: ...


class General:
    """The passes of unroll.py, eager or compiled, for any network."""

    benchmark = False
    splits = True

    def __init__(self, network: Network, passes: Passes):
        self.network, self.passes = network, passes
        # in one batched pass where there is no convolution, which would become a grouped one: slow
        self.stacks = not network.convolves
        self.shapes = {name: p.shape for name, p in network.module.named_parameters()}

    @cached_property
    def _activations(self) -> int:
        """Numbers that the network's layers put out for one image."""
        counted: list[int] = []
        layers = [m for m in self.network.module.modules() if next(m.children(), None) is None]
        hooks = [layer.register_forward_hook(lambda _, __, out: counted.append(out.numel())) for layer in layers]
        with torch.no_grad():
            self.network.module(torch.zeros(1, *self.network.shape))
        for hook in hooks:
            hook.remove()
        return sum(counted)

    def held(self, images: int, adjoint: bool) -> int:
        """Bytes of a pass: about two tensors a layer, and seven with the tangents of both ways (measured)."""
        return images * self._activations * 4 * (7 if adjoint else 2)

    def pack(self, params: Params) -> Tensor:
        return torch.cat([params[name].flatten() for name in self.shapes])

    def unpack(self, vector: Tensor, like: Params) -> Params:
        """Tensors of their own: torch.compile cannot take the tangent of a view (torch 2.11)."""
        return {name: view.clone() for name, view in self._views(vector).items()}

    def _views(self, vector: Tensor) -> Params:
        pieces = vector.split([shape.numel() for shape in self.shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}

    def gradient(self, vector: Tensor, images: Tensor, labels: Tensor, total: int | None = None) -> Tensor:
        found = self.pack(self.passes.gradient(self.unpack(vector, {}), images, labels))
        return found if total is None else found * (len(images) / total)

    def judge(self, vector: Tensor, images: Tensor, labels: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
        slope, value = self.passes.judge(self.unpack(vector, {}), images, labels)
        share = 1.0 if total is None else len(images) / total
        return self.pack(slope) * share, value * share

    def adjoint(
        self, vector: Tensor, images: Tensor, labels: Tensor, mu: Tensor, total: int | None = None
    ) -> tuple[Tensor, Tensor]:
        curvature, by_images = self.passes.adjoint(self.unpack(vector, {}), images, labels, self.unpack(mu, {}))
        share = 1.0 if total is None else len(images) / total
        return self.pack(curvature) * share, by_images * share

    def gradients(self, vectors: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """The same of several networks, stacked: [S, P] for [S, P], [S, B, ...], [S, B]."""
        return vmap(lambda v, x, y: self.pack(grad(self.network.loss)(self._views(v), x, y)))(vectors, images, labels)

    def judges(self, vectors: Tensor, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """([S, P], [S]); the images may be the same for all."""

        def one(vector: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            slope, value = grad_and_value(self.network.loss)(self._views(vector), x, y)
            return self.pack(slope), value

        return vmap(one, (0, 0 if images.ndim == 5 else None, 0 if labels.ndim == 2 else None))(vectors, images, labels)

    def adjoints(self, vectors: Tensor, images: Tensor, labels: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
        """([S, P], [S, B, ...])"""

        def one(vector: Tensor, x: Tensor, y: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
            gradients = grad(self.network.loss, argnums=(0, 1))
            tangents = (self._views(direction),)
            curvature, by_x = jvp(lambda theta: gradients(theta, x, y), (self._views(vector),), tangents)[1]
            return self.pack(curvature), by_x

        return vmap(one)(vectors, images, labels, mu)


class Pieces:
    """The same passes over at most `most` images at a time: exact, since no image's norm looks at another image."""

    stacks = False
    splits = True

    def __init__(self, flat: Flat, most: int):
        self.flat, self.most, self.network, self.benchmark = flat, most, flat.network, flat.benchmark
        self.pack, self.unpack = flat.pack, flat.unpack

    def held(self, images: int, adjoint: bool) -> int:
        return self.flat.held(min(images, self.most), adjoint)

    def gradient(self, vector: Tensor, images: Tensor, labels: Tensor, total: int | None = None) -> Tensor:
        if len(images) <= self.most:
            return self.flat.gradient(vector, images, labels, total)
        return self.judge(vector, images, labels, total)[0]

    def judge(self, vector: Tensor, images: Tensor, labels: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
        if len(images) <= self.most:
            return self.flat.judge(vector, images, labels, total)
        total, slope, value = total or len(images), torch.zeros_like(vector), vector.new_zeros(())
        for part, truth in zip(images.split(self.most), labels.split(self.most), strict=True):
            by_vector, loss = self.flat.judge(vector, part, truth, total)
            slope += by_vector
            value = value + loss
        return slope, value

    def adjoint(
        self, vector: Tensor, images: Tensor, labels: Tensor, mu: Tensor, total: int | None = None
    ) -> tuple[Tensor, Tensor]:
        if len(images) <= self.most:
            return self.flat.adjoint(vector, images, labels, mu, total)
        total, curvature, by_images = total or len(images), torch.zeros_like(vector), []
        for part, truth in zip(images.split(self.most), labels.split(self.most), strict=True):
            by_vector, by_part = self.flat.adjoint(vector, part, truth, mu, total)
            curvature += by_vector
            by_images.append(by_part)
        return curvature, torch.cat(by_images)
