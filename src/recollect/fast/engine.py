"""An unroll that stays on the device: each inner step and each adjoint step is one captured graph, replayed.

The step's number, its batch, the trajectory and all sums live in tensors of fixed place, so that between two steps there
is no Python, no copy from the host and no allocation. Several inner networks are branches of the same graph and fill the
chip together. Without CUDA the very same steps run uncaptured, one operation after another: that is how they are tested.
"""

import gc
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recollect import unroll
from recollect.data.augment import Drawn, Schedule
from recollect.fast.flat import Flat, Pieces
from recollect.nets import Params
from recollect.unroll import Bridge, MetaGradient, Optimiser

MOST_PLANS = 4  # captured at a time: an outer step may draw one of several augmentations
_switches = threading.RLock()
WARM_UP = 2  # runs before a capture: kernels are compiled, convolutions choose their algorithm


class Start(NamedTuple):
    """One inner network of an outer step."""

    params: Params
    """theta_0"""
    batches: Tensor
    """[T, B] rows of the recalled set"""
    augment: Schedule | None = None

    @property
    def numbers(self) -> Drawn:
        return self.augment.numbers if self.augment else {}


class _Loop(NamedTuple):
    """What the steps of an unroll do, and how many there may be."""

    window: int
    capacity: int
    lr: float
    beta: float
    bridge: Bridge
    optimiser: Optimiser


@contextmanager
def precision(name: str, benchmark: bool = False) -> Iterator[None]:
    """The library's own products of float32 in full, or with "tf32" and "bf16" in TF32, while this lasts; sums of bf16 in full.

    The switches are the whole process's, so one thread at a time has them; captured steps need them no more.
    """
    with _switches:
        products = torch.backends.cuda.matmul
        before = products.allow_tf32, products.allow_bf16_reduced_precision_reduction
        products.allow_tf32, products.allow_bf16_reduced_precision_reduction = name != "fp32", False
        try:
            with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark, deterministic=False, allow_tf32=name != "fp32"):
                yield
        finally:
            products.allow_tf32, products.allow_bf16_reduced_precision_reduction = before


class Engine:
    """`unroll.metagradient` for one network, with the same meaning; several inner networks at a time with `together`.

    Several networks are one batched computation where their passes stack, and parallel branches of a graph where not.
    """

    def __init__(self, flat: Flat, compute: str = "fp32"):
        self.flat, self.compute = flat, compute
        self.plans: dict[tuple, _Plan] = {}
        self.most: int | None = None
        """images in one pass, where more did not fit"""

    def metagradient(
        self, params: Params, images: Tensor, labels: Tensor, batches: Tensor, query: tuple[Tensor, Tensor], **options
    ) -> MetaGradient:
        """See `unroll.metagradient`; `augment` must be a Schedule."""
        start = Start(params, batches, options.pop("augment", None))
        return self.together([start], images, labels, query, **options)[0]

    def together(
        self,
        starts: Sequence[Start],
        images: Tensor,
        labels: Tensor,
        query: tuple[Tensor, Tensor],
        *,
        lr: float,
        momentum: float,
        bridge: Bridge = "full",
        window: int | None = None,
        optimiser: Optimiser = "sgd",
        longest: int | None = None,
        weights: bool = True,
    ) -> list[MetaGradient]:
        """One metagradient for each inner network, all of them of the same length.

        `images`, `labels` and `query` are the same for all of them; or with one more dimension in front, each has its own.
        `longest` is the longest unroll to come: up to it, unrolls of different lengths share their captured steps.
        Where `weights` are not wanted, `params` are left empty.
        """
        steps, batch = starts[0].batches.shape
        window, beta = unroll.checked_window(window, steps), 0.0 if bridge == "none" else momentum
        loop = _Loop(window, max(steps, longest or 0), lr, beta, bridge, optimiser)
        if any(start.batches.shape != starts[0].batches.shape for start in starts):
            raise ValueError("inner networks side by side need batches of the same shape")
        names = tuple(tuple((name, n.shape[1]) for name, n in start.numbers.items()) for start in starts)
        key = (len(starts), batch, images.shape, query[0].shape, images.dtype, images.device, names, loop)
        while key not in self.plans:
            while len(self.plans) >= MOST_PLANS:
                self.plans.pop(next(iter(self.plans)))  # its graphs hold memory
            flat = Pieces(self.flat, self.most) if self.most else self.flat
            try:
                with precision(self.compute, self.flat.benchmark):
                    self.plans[key] = _Plan(flat, starts, images, labels, query, loop)
            except torch.OutOfMemoryError:
                largest = self.most or max(batch, query[0].shape[-4])
                if largest == 1 or not self.flat.splits:
                    raise
                self._split(-(-largest // 2))
        return self.plans[key].run(starts, images, labels, query, weights)

    def needs(self, networks: int, batch: int, query: int, window: int, optimiser: Optimiser = "sgd") -> int:
        """About how many bytes an unroll takes: the trajectory, and a pass twice over, which leaves room for the
        convolutions' workspaces and for gaps between tensors."""
        size = sum(p.numel() for p in self.flat.network.module.parameters())
        kept = (window + 1) * (1 if optimiser == "sgd" else 4) + 8
        passes = max(networks * self.flat.held(batch, True), networks * self.flat.held(query, False))
        return networks * kept * size * 4 + 2 * passes

    def _split(self, most: int) -> None:
        """From now on no more than `most` images in one pass."""
        self.most = most
        self.plans.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        warnings.warn(f"out of GPU memory: going on with at most {most} images in one pass (exact, slower)", stacklevel=3)


class _Inner:
    """The tensors of some inner networks that step together: one, or several stacked along the first dimension."""

    def __init__(self, starts: Sequence[Start], group: slice, images: Tensor, size: int, loop: _Loop):
        self.group, starts = group, starts[group]
        count, batch, device = len(starts), starts[0].batches.shape[1], images.device
        new, self.batch = images.new_zeros, batch
        self.theta, self.mean, self.square, self.slope, self.mu = (new(count, size) for _ in range(5))
        self.by_mean, self.by_square = new(count, size), new(count, size)
        # weights before each step (for Adam its gradient and averages too); row 0 takes the steps before the window
        self.trajectory = [new(loop.window + 1, count, size) for _ in range(1 if loop.optimiser == "sgd" else 4)]
        # of each step: the rows of its batches, those of the gradient by images, and where in the trajectory it belongs
        steps = max(loop.capacity, WARM_UP)
        self.plan = torch.zeros(steps, 2 * count * batch + 1, dtype=torch.long, device=device)
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.by_images, self.value = new(count, *images.shape[-4:]), new(count)
        self.augment = Schedule({name: new(steps, count * batch, 2) for name in starts[0].numbers})

    def begin(self, starts: Sequence[Start], pack: Callable[[Params], Tensor], images: Tensor, window: int) -> None:
        starts = starts[self.group]
        self.theta.copy_(torch.stack([pack(start.params) for start in starts]))
        for tensor in (self.mean, self.square, self.mu, self.by_mean, self.by_square, self.by_images, self.step):
            tensor.zero_()
        steps, each = len(starts[0].batches), self.by_images.shape[1]
        rows = torch.stack([start.batches.to(self.plan.device) for start in starts], 1)  # [T, S, B]
        own = rows + each * torch.arange(len(starts), device=rows.device)[:, None]
        self.plan[:steps, :-1].copy_(torch.cat([own if images.ndim == 5 else rows, own], 1).flatten(1))
        self.plan[:steps, -1].copy_(torch.arange(window - steps + 1, window + 1).clamp_(min=0))
        for name, into in self.augment.numbers.items():
            into[:steps].copy_(torch.cat([start.numbers[name].expand(-1, self.batch, 2) for start in starts], 1))


class _Plan:
    """Steps for one shape of unroll: captured once, replayed for every outer step."""

    def __init__(
        self, flat: Flat, starts: Sequence[Start], images: Tensor, labels: Tensor, query: tuple[Tensor, Tensor], loop: _Loop
    ):
        self.flat, self.loop = flat, loop
        size = len(flat.pack(starts[0].params))
        self.images = torch.zeros_like(images)
        self.labels = torch.zeros_like(labels, device=images.device)
        self.query = (torch.zeros_like(query[0]), torch.zeros_like(query[1]))
        alike = len({tuple(start.numbers) for start in starts}) == 1
        each = len(starts) if flat.stacks and alike else 1
        groups = (slice(first, first + each) for first in range(0, len(starts), each))
        self.inner = [_Inner(starts, group, images, size, loop) for group in groups]
        pool = torch.cuda.graph_pool_handle() if images.is_cuda else None  # they never run at the same time
        self.forward, self.judge, self.adjoint = (
            captured(lambda step=step: self._side_by_side(step), images.device, pool)
            for step in (self._forward, self._judge, self._adjoint)
        )

    def run(
        self, starts: Sequence[Start], images: Tensor, labels: Tensor, query: tuple[Tensor, Tensor], weights: bool
    ) -> list[MetaGradient]:
        self.images.copy_(images)
        self.labels.copy_(labels)
        for mine, given in zip(self.query, query, strict=True):
            mine.copy_(given)
        for inner in self.inner:
            inner.begin(starts, self.flat.pack, images, self.loop.window)
        for _ in range(len(starts[0].batches)):
            self.forward()
        self.judge()
        for _ in range(self.loop.window):
            self.adjoint()
        found = []
        for inner in self.inner:
            parts = inner.value.clone(), inner.by_images.clone(), inner.theta
            for start, value, by_images, theta in zip(starts[inner.group], *parts, strict=True):
                found.append(MetaGradient(value, by_images, self.flat.unpack(theta, start.params) if weights else {}))
        return found

    def _side_by_side(self, step: Callable[[_Inner], None]) -> None:
        """The step of every inner network; on a GPU each on a stream of its own, so that they become parallel branches."""
        if len(self.inner) == 1 or not self.images.is_cuda:
            for inner in self.inner:
                step(inner)
            return
        main = torch.cuda.current_stream()
        streams = [torch.cuda.Stream() for _ in self.inner]
        for inner, stream in zip(self.inner, streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                step(inner)
        for stream in streams:
            main.wait_stream(stream)

    def _batch(self, inner: _Inner) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """This step's images [S B, ...] and labels [S, B, ...]; rows of the gradient by images; its place in the trajectory."""
        plan = inner.plan.index_select(0, inner.step).flatten()
        rows, own = plan[:-1].chunk(2)
        images, labels = _of(inner.group, self.images, self.labels)
        if images.ndim == 5:
            images, labels = images.flatten(0, 1), labels.flatten(0, 1)
        truth = labels.index_select(0, rows).unflatten(0, (len(inner.theta), -1))
        return images.index_select(0, rows), truth, own, plan[-1:]

    def _forward(self, inner: _Inner) -> None:
        seen, labels, _, place = self._batch(inner)
        seen = inner.augment(seen, inner.step).unflatten(0, labels.shape[:2])
        gradient = self.flat.gradient(inner.theta, seen, labels)
        inner.trajectory[0].index_copy_(0, place, inner.theta[None])
        if self.loop.optimiser == "sgd":
            torch.add(gradient, inner.mean, alpha=self.loop.beta, out=inner.mean)
            inner.theta.add_(inner.mean, alpha=-self.loop.lr)
        else:
            state, t = (inner.theta, inner.mean, inner.square), inner.step.double() + 1
            found = unroll.adam_step(self.loop.lr, self.loop.beta, t, state[0], gradient, *state[1:])
            for into, tensor in zip(state, found, strict=True):
                into.copy_(tensor)
            for block, tensor in zip(inner.trajectory[1:], (gradient, inner.mean, inner.square), strict=True):
                block.index_copy_(0, place, tensor[None])
        inner.step.add_(1)

    def _judge(self, inner: _Inner) -> None:
        images, labels = _of(inner.group, *self.query)
        for into, tensor in zip((inner.slope, inner.value), self.flat.judge(inner.theta, images, labels), strict=True):
            into.copy_(tensor)

    def _adjoint(self, inner: _Inner) -> None:
        inner.step.sub_(1)
        images, labels, own, place = self._batch(inner)
        before, *adam = (block.index_select(0, place).squeeze(0) for block in inner.trajectory)
        if self.loop.optimiser == "sgd":
            inner.mu.mul_(self.loop.beta if self.loop.bridge == "full" else 0.0).add_(inner.slope, alpha=-self.loop.lr)
        else:
            (gradient, mean, square), t = adam, inner.step.double() + 1
            carried = inner.mu, inner.by_mean, inner.by_square
            found = unroll.adam_adjoint(
                self.loop.lr, self.loop.beta, t, self.loop.bridge, gradient, mean, square, inner.slope, *carried[1:]
            )
            for into, tensor in zip(carried, found, strict=True):
                into.copy_(tensor)
        seen, pull = unroll.with_pullback(inner.augment if inner.augment.numbers else None, images, inner.step)
        curvature, by_seen = self.flat.adjoint(before, seen.unflatten(0, labels.shape[:2]), labels, inner.mu)
        inner.slope.add_(curvature)
        inner.by_images.flatten(0, 1).index_add_(0, own, pull(by_seen.flatten(0, 1)))


def _of(group: slice, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """A group's part of both; all of them where all networks have the same."""
    return (images, labels) if images.ndim == 4 else (images[group], labels[group])


def captured(step: Callable[[], None], device: torch.device, pool: Any = None) -> Callable[[], None]:
    """A step as one graph launch; as it is where there is no CUDA. Graphs that never run at the same time may share a pool."""
    if device.type != "cuda":
        return step
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.empty_cache()  # what the warm-up needed, the graph will need again
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # other threads may go on
        with no_garbage(), torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            step()
    return graph.replay


@contextmanager
def no_garbage() -> Iterator[None]:
    """Nothing is collected while this lasts: an older graph that is freed during a capture would spoil it.

    The collector is the whole process's, as the switches are: one thread at a time is in here.
    """
    with _switches:
        gc.collect()  # or what is due would wait
        was = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was:
                gc.enable()
