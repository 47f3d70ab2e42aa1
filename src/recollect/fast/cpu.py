"""The ConvNet's passes by hand on a CPU: numba's loops (cpu_kernels.py) around the library's convolutions.

As convnet.py does it on a GPU, the adjoint carries value and tangent side by side: stacked as A = [a; da] and G = [dgy; gy], one
convolution serves both.

    w * A = [w * a; w * da]       tangent of the map: w * da + dw * a
    w^T G = [w^T dgy; w^T gy]     tangent of the gradient: w^T dgy + dw^T gy
    A x G = a x dgy + da x gy     the tangent of the gradient by w

What bounds a CPU is its memory. So a pass takes a few images at a time, from the first layer to the last and back: their maps
never leave the cache. Threads share a batch, each with images of its own: they meet once a pass, not at every operation, and
their sums are added in a fixed order.
"""

import os
import platform
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recollect.fast import cpu_kernels as kernels
from recollect.fast.layout import Layout
from recollect.nets import Network

aten = torch.ops.aten
ONEDNN = platform.machine() in ("x86_64", "AMD64") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
PIECE = 6 * 2**20
"""bytes of the largest map of the images that go through the network together: what is held of them fits into the cache"""
LEAST = 2**19  # numbers of those maps that are worth a thread
Maps = tuple[Tensor, Tensor | None, Tensor | None]
Pass = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(images, labels, a vector that takes the sums) -> what there is for each image"""


class CpuConvNet(Layout):
    """The passes of a ConvNet in one precision: "fp32"; or "bf16", where sums, weights and norms stay in float32."""

    stacks, splits, benchmark = False, True, False

    def __init__(self, network: Network, precision: str):
        super().__init__(network)
        self.kind = torch.bfloat16 if precision == "bf16" else torch.float32
        self.largest = self.blocks[0].side ** 2 * self.width
        self.piece = max(1, PIECE // (self.largest * self.kind.itemsize))

    def held(self, images: int, adjoint: bool) -> int:
        """Bytes of the maps of a pass: of all threads, each with one piece."""
        at_once = min(images, self.piece * torch.get_num_threads())
        return at_once * self.kind.itemsize * self.largest * (4 if adjoint else 2)

    def gradient(self, vector: Tensor, images: Tensor, labels: Tensor, total: int | None = None) -> Tensor:
        """dL/dtheta; the loss is the mean over `total` images, these unless told."""
        return self.judge(vector, images, labels, total)[0]

    @torch.no_grad()
    def judge(self, vector: Tensor, images: Tensor, labels: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
        """(dL/dtheta, L)."""
        given, total = _Given(self, vector), total or len(images)
        found, losses = self._shared(lambda x, y, found: _value(given, x, y, found, total), images, labels)
        return found, losses.sum() / total

    @torch.no_grad()
    def adjoint(
        self, vector: Tensor, images: Tensor, labels: Tensor, mu: Tensor, total: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """(H mu, (d/dx) <g, mu>)."""
        given, moved, total = _Given(self, vector), _Given(self, mu), total or len(images)
        return self._shared(lambda x, y, found: _adjoint(given, moved, x, y, found, total), images, labels)

    def _shared(self, work: Pass, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A pass over all images: the sum of the vectors that it finds, and what it gives for each image."""
        images = images.detach().float().contiguous()

        def share(seen: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
            found, count = torch.zeros(self.size), -(-len(seen) // self.piece)
            pieces = zip(seen.tensor_split(count), truth.tensor_split(count), strict=True)
            return found, torch.cat([work(*piece, found) for piece in pieces])

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


class _Given:
    """One vector as a pass wants it: norms and head in float32, convolutions in the computing type."""

    def __init__(self, net: CpuConvNet, vector: Tensor):
        self.net, self.parts = net, net.parts(vector)
        first, *rest = (self.parts[f"{block.name}.weight"].to(net.kind) for block in net.blocks)
        self.weights = [first, *(weight.permute(0, 3, 1, 2) for weight in rest)]
        self.head = self.parts[f"{net.linear}.weight"], self.parts[f"{net.linear}.bias"]
        self.norms = [[self.parts[f"{block.norm}.{name}"].numpy() for name in ("weight", "bias")] for block in net.blocks]


def _value(given: _Given, images: Tensor, labels: Tensor, found: Tensor, total: int) -> Tensor:
    """Adds the gradient by the weights to `found`; every image's loss."""
    run, maps, pooled = _Piece(given, None, images, found), [], []
    for number, weight in enumerate(given.weights):
        maps.append(_convolve(pooled[-1], weight) if number else run.first(given))
        pooled.append(run.forward(number, (maps[-1], None, None)))
    ga, losses = run.head(pooled[-1], labels, total)
    for number, weight in reversed(list(enumerate(given.weights))):
        gy = maps[number]
        run.backward(number, (gy, None, None), (ga, None, None))
        if number:
            ga = _by_input(gy, pooled[number - 1], weight)
            run.add(number, _by_weight(gy, pooled[number - 1], weight))
    run.add_first(maps[0])
    return losses


def _adjoint(given: _Given, moved: _Given, images: Tensor, labels: Tensor, found: Tensor, total: int) -> Tensor:
    """Adds H mu to `found`; (d/dx) <g, mu>."""
    run, count = _Piece(given, moved, images, found), len(images)
    y, dy = run.first(given), run.first(moved)
    maps: list[Maps] = [(y, dy, None)]
    stacks, pooled = [], []
    for number, weight in enumerate(given.weights):
        if number:
            both = _convolve(pooled[-1], weight)
            stacks.append(both)
            maps.append((both[:count], both[count:], _convolve(pooled[-1][:count], moved.weights[number])))
        pooled.append(run.forward(number, maps[-1]))
    both, _ = run.head(pooled[-1], labels, total)
    back: Maps = (both[count:], both[:count], None)
    for number, weight in reversed(list(enumerate(given.weights))):
        run.backward(number, maps[number], back)
        if number:
            before, stack = pooled[number - 1], stacks[number - 1]  # [dgy; gy] now
            both = _by_input(stack, before, weight)
            back = both[count:], both[:count], _by_input(stack[count:], before[:count], moved.weights[number])
            run.add(number, _by_weight(stack, before, weight))
    run.add_first(y)  # dgy now, and dy is gy
    return run.by_images(y, dy, images)


class _Piece:
    """A few images on their way through the network and back; `found` takes the sums."""

    def __init__(self, given: _Given, moved: _Given | None, images: Tensor, found: Tensor):
        self.net, self.given, self.moved = given.net, given, moved
        self.count, self.found = len(images), self.net.parts(found)
        self.patches = self._new(self.count, self.net.blocks[0].side ** 2, self.net.patch)
        self.kept: list[tuple[Tensor | None, ...]] = []
        """of each block, what its backward needs of its forward"""
        self.across = self._new(self.net.patch, self.count * self.patches.shape[1])
        kernels.unfold(images.numpy(), self.net.padding, _array(self.patches), _array(self.across))

    def _new(self, *shape: int, kind: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=kind or self.net.kind)

    def _maps(self, side: int) -> Tensor:
        """A map for each image, or two stacked; channels-last."""
        stacks = 1 if self.moved is None else 2
        return self._new(stacks * self.count, side, side, self.net.width).permute(0, 3, 1, 2)

    def _halves(self, both: Tensor) -> tuple[Tensor, Tensor | None]:
        return both[: self.count], None if self.moved is None else both[self.count :]

    def first(self, given: _Given) -> Tensor:
        """The first block's map: its convolution is a product of the patches."""
        side, width = self.net.blocks[0].side, self.net.width
        return _product(_rows(self.patches), given.weights[0]).view(-1, side, side, width).permute(0, 3, 1, 2)

    def forward(self, number: int, maps: Maps) -> Tensor:
        """a, or [a; da]."""
        squares, width = self.net.blocks[number].side // 2, self.net.width
        pooled, above = self._maps(squares), self._maps(squares)
        stats = self._new(2 if self.moved is None else 4, self.count, width, kind=torch.float32)
        alive = self._new(self.count, squares**2, width, kind=torch.uint8)
        self.kept.append((stats, alive, *self._halves(above)))
        dnorm = self.moved.norms[number] if self.moved else (None, None)
        written = map(_array, (*self._halves(pooled), *self.kept[-1]))
        kernels.forward(*map(_array, maps), *self.given.norms[number], *dnorm, *written)
        return pooled

    def backward(self, number: int, maps: Maps, back: Maps) -> None:
        """gy in the map's place; or [dgy; gy] in that of [y; dy]."""
        norm = self.net.blocks[number].norm
        sums = (self.found[f"{norm}.weight"].numpy(), self.found[f"{norm}.bias"].numpy())
        dgamma = self.moved.norms[number][0] if self.moved else None
        read = map(_array, (*self.kept[number], *back))
        kernels.backward(*map(_array, maps), *self.given.norms[number], dgamma, *read, *sums)

    def add(self, number: int, by_weight: Tensor) -> None:
        self.found[f"{self.net.blocks[number].name}.weight"] += by_weight.permute(0, 2, 3, 1)

    def add_first(self, by_y: Tensor) -> None:
        self.found["0.weight"] += _product(self.across, _rows(by_y))

    def by_images(self, dgy: Tensor, gy: Tensor, images: Tensor) -> Tensor:
        """The gradient by the images, from those by the first block's map."""
        assert self.moved is not None
        by_patches = _product(_rows(dgy), self.given.weights[0].T)
        by_patches += _product(_rows(gy), self.moved.weights[0].T)
        found = torch.empty_like(images)
        kernels.fold(_array(by_patches.view_as(self.patches)), self.net.padding, found.numpy())
        return found

    def head(self, pooled: Tensor, labels: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """The linear layer and cross-entropy: (the gradient by the features, or [tangent; gradient]; every image's loss)."""
        features, dfeatures = self._halves(pooled.permute(0, 2, 3, 1).flatten(1).float())
        (weight, bias), name = self.given.head, self.net.linear
        logs = torch.addmm(bias, features, weight.T).log_softmax(1)
        probabilities = logs.exp()
        by_logits = (probabilities - F.one_hot(labels, self.net.classes)) / total
        both, by_weight, by_bias = by_logits @ weight, by_logits.T @ features, by_logits.sum(0)
        if self.moved and dfeatures is not None:
            dweight, dbias = self.moved.head
            dlogits = torch.addmm(dbias, dfeatures, weight.T).addmm_(features, dweight.T)
            dby_logits = probabilities * (dlogits - (probabilities * dlogits).sum(1, keepdim=True)) / total
            both = torch.cat([(dby_logits @ weight).addmm_(by_logits, dweight), both])
            by_weight = (dby_logits.T @ features).addmm_(by_logits.T, dfeatures)
            by_bias = dby_logits.sum(0)
        self.found[f"{name}.weight"] += by_weight
        self.found[f"{name}.bias"] += by_bias
        both = both.to(self.net.kind).unflatten(1, (*pooled.shape[2:], self.net.width)).permute(0, 3, 1, 2)
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


def _convolve(images: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(images, weight, padding=1)


def _by_input(by_output: Tensor, images: Tensor, weight: Tensor) -> Tensor:
    return _backward(by_output, images, weight, [True, False, False])[0]


def _by_weight(by_output: Tensor, images: Tensor, weight: Tensor) -> Tensor:
    return _backward(by_output, images, weight, [False, True, False])[1]


def _backward(by_output: Tensor, images: Tensor, weight: Tensor, wanted: list[bool]):
    return aten.convolution_backward(by_output, images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, wanted)
