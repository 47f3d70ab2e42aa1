"""Any network's passes on one vector of weights; the same in pieces for a batch that does not fit, over the processes of a run,
and judged by where the weights are.

One vector is what makes an inner step short: one kernel updates it, one keeps it in the trajectory, whatever the network.
"""

from collections.abc import Iterator
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor
from torch.func import vmap

from recollect.distributed import Ranks
from recollect.nets import Network, Params, views
from recollect.unroll import Passes, eager

Pair = tuple[Tensor, Tensor]
"""(dL/dtheta, L) of a judge, (H mu, (d/dx) <g, mu>) of an adjoint"""


class Flat(Protocol):
    """Passes over networks whose weights are one vector each: [S, P] of S networks, their images [S, B, ...], labels [S, B]
    or targets [S, B, ...]."""

    network: Network
    benchmark: bool
    """whether the library should try out its convolutions, which takes memory"""
    stacks: bool
    """whether it takes several networks at once, and that pays; else S is 1"""
    splits: bool
    """whether a batch may be passed in pieces"""

    def held(self, images: int, adjoint: bool) -> int: ...
    def pack(self, params: Params) -> Tensor: ...
    def unpack(self, vector: Tensor, like: Params) -> Params: ...
    def gradient(self, vectors: Tensor, images: Tensor, labels: Tensor) -> Tensor: ...
    def judge(self, vectors: Tensor, images: Tensor, labels: Tensor) -> Pair:
        """Images and labels may be the same for all: [B, ...]."""
        ...

    def adjoint(self, vectors: Tensor, images: Tensor, labels: Tensor, mu: Tensor) -> Pair: ...


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
        return views(vector, self.shapes)

    def gradient(self, vectors: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        if len(vectors) > 1:
            return self.judge(vectors, images, labels)[0]
        return self.pack(self.passes.gradient(self.unpack(vectors[0], {}), images[0], labels[0]))[None]

    def judge(self, vectors: Tensor, images: Tensor, labels: Tensor) -> Pair:
        if len(vectors) > 1:
            at = 0 if images.ndim == 5 else None
            return vmap(partial(self._judge, self._eager), (0, at, at))(vectors, images, labels)
        slope, value = self._judge(self.passes, vectors[0], *alone(images, labels))
        return slope[None], value[None]

    def adjoint(self, vectors: Tensor, images: Tensor, labels: Tensor, mu: Tensor) -> Pair:
        if len(vectors) > 1:
            return vmap(partial(self._adjoint, self._eager))(vectors, images, labels, mu)
        curvature, by_images = self._adjoint(self.passes, vectors[0], images[0], labels[0], mu[0])
        return curvature[None], by_images[None]

    @cached_property
    def _eager(self) -> Passes:
        """Passes that vmap can take."""
        return eager(self.network.loss)

    def _judge(self, passes: Passes, vector: Tensor, images: Tensor, labels: Tensor) -> Pair:
        slope, value = passes.judge(self.unpack(vector, {}), images, labels)
        return self.pack(slope), value

    def _adjoint(self, passes: Passes, vector: Tensor, images: Tensor, labels: Tensor, mu: Tensor) -> Pair:
        curvature, by_images = passes.adjoint(self.unpack(vector, {}), images, labels, self.unpack(mu, {}))
        return self.pack(curvature), by_images


def alone(images: Tensor, labels: Tensor) -> Pair:
    """What one network is judged by, [B, ...] each, whether it was given as its own or for all."""
    return (images[0], labels[0]) if images.ndim == 5 else (images, labels)


class Pieces:
    """The same passes over at most `most` images at a time: exact, since no image's norm looks at another image."""

    stacks = False
    splits = True

    def __init__(self, flat: Flat, most: int):
        self.flat, self.most, self.network, self.benchmark = flat, most, flat.network, flat.benchmark
        self.pack, self.unpack = flat.pack, flat.unpack

    def held(self, images: int, adjoint: bool) -> int:
        return self.flat.held(min(images, self.most), adjoint)

    def _parts(self, images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Some images, their labels, and what share of all they are."""
        for part, truth in zip(*(each.split(self.most, images.ndim - 4) for each in (images, labels)), strict=True):
            yield part, truth, part.shape[-4] / images.shape[-4]

    def gradient(self, vectors: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        if images.shape[-4] <= self.most:
            return self.flat.gradient(vectors, images, labels)
        return self.judge(vectors, images, labels)[0]

    def judge(self, vectors: Tensor, images: Tensor, labels: Tensor) -> Pair:
        slope, value = torch.zeros_like(vectors), vectors.new_zeros(len(vectors))
        for part, truth, share in self._parts(images, labels):
            by_vector, loss = self.flat.judge(vectors, part, truth)
            slope.add_(by_vector, alpha=share)
            value = value + share * loss
        return slope, value

    def adjoint(self, vectors: Tensor, images: Tensor, labels: Tensor, mu: Tensor) -> Pair:
        if images.shape[-4] <= self.most:
            return self.flat.adjoint(vectors, images, labels, mu)
        curvature, by_images = torch.zeros_like(vectors), []
        for part, truth, share in self._parts(images, labels):
            by_vector, by_part = self.flat.adjoint(vectors, part, truth, mu)
            curvature.add_(by_vector, alpha=share)
            by_images.append(share * by_part)
        return curvature, torch.cat(by_images, 1)


class Towards:
    """Passes of another Flat, whose judge looks at no image: in the place of images it is given goals [S, 1, 1, 1, P], as
    `pack` makes them of weights, and in that of labels their ways [S, 1]; without S they are for all."""

    def __init__(self, flat: Flat):
        self.flat, self.network = flat, flat.network
        self.benchmark, self.stacks, self.splits, self.held = flat.benchmark, flat.stacks, flat.splits, flat.held
        self.pack, self.unpack, self.gradient, self.adjoint = flat.pack, flat.unpack, flat.gradient, flat.adjoint

    def judge(self, vectors: Tensor, images: Tensor, labels: Tensor) -> Pair:
        away, ways = vectors - images.reshape(-1, images.shape[-1]), labels.reshape(-1, 1)
        return 2 * away / ways, (away.square() / ways).sum(1)

    @cached_property
    def passes(self) -> Passes:
        """The same for `unroll.metagradient`, of any network's passes."""
        assert isinstance(self.flat, General)

        def judge(params: Params, goal: Tensor, way: Tensor) -> tuple[Params, Tensor]:
            slope, value = self.judge(self.pack(params)[None], goal, way)
            return self.unpack(slope[0], params), value[0]

        return Passes(self.flat.passes.gradient, self.flat.passes.adjoint, judge)


class Shards:
    """The same passes, each process over its part of a batch; equal to rounding, since the loss is a mean over images.

    For networks that are too large for one process. Every process has all weights and the whole trajectory. What is found of
    the weights is summed over the wire, so all go on with the same. A gradient by images is left to the process that passed
    them: the others have zeros there, and whoever wants all adds them up once, after the unroll.
    """

    splits = False  # out of memory, one process alone would go on in pieces, and the others wait

    def __init__(self, flat: Flat, ranks: Ranks):
        self.flat, self.ranks, self.network = flat, ranks, flat.network
        self.benchmark, self.stacks = flat.benchmark, flat.stacks

    def pack(self, params: Params) -> Tensor:
        return self.flat.pack(params)

    def unpack(self, vector: Tensor, like: Params) -> Params:
        return self.flat.unpack(vector, like)

    def held(self, images: int, adjoint: bool) -> int:
        return self.flat.held(-(-images // self.ranks.world), adjoint)

    def _part(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, slice, float]:
        """This process's images and labels, where they are, and what share of all they are."""
        dim = images.ndim - 4
        count, rank, world = images.shape[dim], self.ranks.rank, self.ranks.world
        start, stop = count * rank // world, count * (rank + 1) // world
        mine = images.narrow(dim, start, stop - start), labels.narrow(dim, start, stop - start)
        return *mine, slice(start, stop), (stop - start) / count

    def gradient(self, vectors: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        seen, truth, _, share = self._part(images, labels)
        found = self.flat.gradient(vectors, seen, truth) * share if share else torch.zeros_like(vectors)
        return self.ranks.total(found)

    def judge(self, vectors: Tensor, images: Tensor, labels: Tensor) -> Pair:
        seen, truth, _, share = self._part(images, labels)
        both = vectors.new_zeros(len(vectors), vectors.shape[1] + 1)
        if share:
            slope, value = self.flat.judge(vectors, seen, truth)
            both = torch.cat([slope, value[:, None]], 1) * share
        both = self.ranks.total(both)
        return both[:, :-1], both[:, -1]

    def adjoint(self, vectors: Tensor, images: Tensor, labels: Tensor, mu: Tensor) -> Pair:
        seen, truth, place, share = self._part(images, labels)
        curvature, by_images = torch.zeros_like(vectors), torch.zeros_like(images)
        if share:
            found, by_seen = self.flat.adjoint(vectors, seen, truth, mu)
            curvature, by_images[:, place] = found * share, by_seen * share
        return self.ranks.total(curvature), by_images
