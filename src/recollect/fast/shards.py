"""Any passes with each batch split over the processes of a run, for networks that are too large for one of them.

Every process has all weights and the whole trajectory; it passes a part of each batch. What is found of the weights is summed
over the wire, so all go on with the same. A gradient by images is left to the process that passed them: the others have zeros
there, and whoever wants all adds them up once, after the unroll.
"""

import torch
from torch import Tensor

from recollect.distributed import Ranks
from recollect.fast.flat import Flat, Pair
from recollect.nets import Params


class Shards:
    """The same passes, each process over its part of a batch; equal to rounding, since the loss is a mean over images."""

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
