"""The ConvNet's passes on a CPU: byhand.py with numba's loops (cpu_kernels.py).

What bounds a CPU is its memory. So a pass takes a few images at a time, from the first layer to the last and back: their maps
never leave the cache. Threads share a batch, each with images of its own: they meet once a pass, not at every operation, and
their sums are added in a fixed order.
"""

import os
import platform
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recollect.fast import cpu_kernels as kernels
from recollect.fast.byhand import Batch, ByHand, Given
from recollect.fast.flat import Pair
from recollect.nets import Network

ONEDNN = platform.machine() in ("x86_64", "AMD64") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
PIECE = 6 * 2**20
"""bytes of the largest map of the images that go through the network together: what is held of them fits into the cache"""
LEAST = 2**19  # numbers of those maps that are worth a thread


class CpuConvNet(ByHand):
    """The passes of a ConvNet in one precision: "fp32"; or "bf16", where sums, weights and norms stay in float32."""

    benchmark = False

    def __init__(self, network: Network, precision: str):
        super().__init__(network, precision)
        self.largest = self.blocks[0].side ** 2 * self.width
        self.piece = max(1, PIECE // (self.largest * self.kind.itemsize))

    def held(self, images: int, adjoint: bool) -> int:
        """Bytes of the maps of a pass: of all threads, each with one piece."""
        at_once = min(images, self.piece * torch.get_num_threads())
        return at_once * self.kind.itemsize * self.largest * (4 if adjoint else 2)

    @torch.no_grad()
    def _run(self, vector: Tensor, images: Tensor, labels: Tensor, mu: Tensor | None) -> Pair:
        """The sum of the vectors that the pieces find, and what each gives for its images."""
        images, total = images.detach().float().contiguous(), len(images)
        given, moved = Given(self, vector), None if mu is None else Given(self, mu)

        def piece(seen: Tensor, truth: Tensor, found: Tensor) -> Tensor:
            run = _Piece(self, given, moved, seen, found)
            losses = run.there_and_back(truth, total)
            return run.by_images(moved) if moved else losses

        def share(seen: Tensor, truth: Tensor) -> Pair:
            found, count = torch.zeros(self.size), -(-len(seen) // self.piece)
            pieces = zip(seen.tensor_split(count), truth.tensor_split(count), strict=True)
            return found, torch.cat([piece(*each, found) for each in pieces])

        threads = max(1, min(torch.get_num_threads(), len(images), len(images) * self.largest // LEAST))
        if threads == 1:
            return share(images, labels)
        shares = images.tensor_split(threads), labels.tensor_split(threads)
        results = list(_workers(threads, os.getpid()).map(share, *shares))
        found = results[0][0]
        for other, _ in results[1:]:
            found += other
        return found, torch.cat([each for _, each in results])


@lru_cache(maxsize=4)
def _workers(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads of which each computes by itself. A forked process has none of its parent's."""
    before, together = torch.get_num_threads(), threading.Barrier(threads + 1)

    def alone() -> None:
        torch.get_num_threads()  # or the first operation would undo the next line
        torch.set_num_threads(1)
        together.wait()

    pool = ThreadPoolExecutor(threads, "recollect")
    for _ in range(threads):
        pool.submit(alone)
    together.wait()
    torch.set_num_threads(before)  # what other new threads get
    return pool


class _Piece(Batch):
    """A few images on their way."""

    def __init__(self, net: CpuConvNet, given: Given, moved: Given | None, images: Tensor, found: Tensor):
        super().__init__(net, given, moved, images, found)
        self.patches = self.new(self.count, net.blocks[0].side ** 2, net.patch)
        self.across = self.new(net.patch, self.count * self.patches.shape[1])
        kernels.unfold(images.numpy(), net.padding, _array(self.patches), _array(self.across))
        self.first = self._product(given), self._product(moved) if moved else None

    def _product(self, given: Given) -> Tensor:
        """The first block's map: its convolution is a product of the patches."""
        side, width = self.net.blocks[0].side, self.net.width
        return _product(_rows(self.patches), given.weights[0]).view(-1, side, side, width).permute(0, 3, 1, 2)

    def _maps(self, number: int, y: Tensor | None, moving: Tensor | None) -> Iterator[np.ndarray | None]:
        return map(_array, (*(self.halves(y) if number else self.first), moving))

    def forward(self, number: int, y: Tensor | None, moving: Tensor | None) -> Tensor:
        side, width = self.net.blocks[number].side // 2, self.net.width
        pooled = self.maps(side)
        stats = self.new(4 if self.moved else 2, self.count, width, kind=torch.float32)
        alive = self.new(self.count, side**2, width, kind=torch.uint8)
        self.kept[number] = (stats, alive, *self.halves(self.maps(side)))
        norms = (*self.given.norms[number], *(self.moved.norms[number] if self.moved else (None, None)))
        written = (*self.halves(pooled), *self.kept[number])
        kernels.forward(*self._maps(number, y, moving), *map(_array, (*norms, *written)))
        return pooled

    def backward(self, number: int, y: Tensor | None, moving: Tensor | None, ga: Tensor, rest: Tensor | None) -> Tensor | None:
        """In the map's place."""
        norm, dgamma = self.net.blocks[number].norm, self.moved.norms[number][0] if self.moved else None
        read = (*self.given.norms[number], dgamma, *self.kept[number], *self.halves(ga, back=True), rest)
        sums = (self.found[f"{norm}.weight"], self.found[f"{norm}.bias"])
        kernels.backward(*self._maps(number, y, moving), *map(_array, (*read, *sums)))
        if number == 0:
            self.found["0.weight"] += _product(self.across, _rows(self.first[0]))
        return y

    def add(self, number: int, by_weight: Tensor) -> None:
        self.found[f"{self.net.blocks[number].name}.weight"] += by_weight.permute(0, 2, 3, 1)

    def by_images(self, moved: Given) -> Tensor:
        """The gradient by the images, from those by the first block's map."""
        dgy, gy = self.first
        assert gy is not None
        by_patches = _product(_rows(dgy), self.given.weights[0].T)
        by_patches += _product(_rows(gy), moved.weights[0].T)
        found = torch.empty_like(self.images)
        kernels.fold(_array(by_patches.view_as(self.patches)), self.net.padding, found.numpy())
        return found

    def head(self, features: Tensor, labels: Tensor, total: int) -> Pair:
        layer = [f"{self.net.linear}.{name}" for name in ("weight", "bias")]
        a, da = self.halves(features.permute(0, 2, 3, 1).flatten(1).float())
        weight, bias = (self.given.exact[name] for name in layer)
        assert a is not None
        logs = torch.addmm(bias, a, weight.T).log_softmax(1)
        probabilities = logs.exp()
        by_logits = (probabilities - F.one_hot(labels, self.net.classes)) / total
        both, by_weight, by_bias = by_logits @ weight, by_logits.T @ a, by_logits.sum(0)
        if self.moved and da is not None:
            dweight, dbias = (self.moved.exact[name] for name in layer)
            dlogits = torch.addmm(dbias, da, weight.T).addmm_(a, dweight.T)
            dby_logits = probabilities * (dlogits - (probabilities * dlogits).sum(1, keepdim=True)) / total
            both = torch.cat([(dby_logits @ weight).addmm_(by_logits, dweight), both])
            by_weight = (dby_logits.T @ a).addmm_(by_logits.T, da)
            by_bias = dby_logits.sum(0)
        for name, found in zip(layer, (by_weight, by_bias), strict=True):
            self.found[name] += found
        both = both.to(self.net.kind).unflatten(1, (*features.shape[2:], self.net.width)).permute(0, 3, 1, 2)
        return both, -logs.gather(1, labels[:, None]).squeeze(1)


def _rows(maps: Tensor) -> Tensor:
    """A row for each pixel, the same memory: of maps [n, C, h, w], channels-last, or of patches [n, pixels, K]."""
    return (maps.permute(0, 2, 3, 1) if maps.ndim == 4 else maps).flatten(0, -2)


def _product(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows @ matrix; by oneDNN, since torch takes MKL for float32, which is half as fast on other makers' processors."""
    if ONEDNN:
        return torch.ops.mkldnn._linear_pointwise(rows, matrix.T, None, "none", [], "")
    return rows @ matrix


def _array(tensor: Tensor | None) -> np.ndarray | None:
    """As the kernels take it: maps as [n, pixels, C], bfloat16 as uint16."""
    if tensor is None:
        return None
    if tensor.ndim == 4:
        tensor = tensor.permute(0, 2, 3, 1).flatten(1, 2)
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
