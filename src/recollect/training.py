"""Fresh networks trained by SGD with momentum: one loop over a network's passes (fast/flat.py), whatever the device.

On CUDA a step is one captured graph, replayed, and networks come one after another, since each fills the chip. On a CPU networks
whose passes stack are trained side by side, in one batched step. A network is the same alone or beside others. What the
steps see lies on the device, where a counter says which comes next: the host only launches.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from recollect import fast
from recollect.config import Recipe, check_values
from recollect.data import augment
from recollect.errors import RecollectError
from recollect.fast import Compute
from recollect.fast.engine import captured, precision
from recollect.fast.flat import Flat
from recollect.nets import Network, Params, threads_for
from recollect.seeds import Purpose, seeded

MOST_ROWS = 2**20  # of the networks' orders that lie on the device at a time
MOST_BYTES = 2**31  # of a pass over networks side by side
MOST_REPORTS = 100  # of one network's progress
FAR = 1e12  # a squared error, of standardised targets

Part = tuple[Tensor, Tensor]
"""images as a network sees them, labels; on any device"""


class Cancelled(Exception):
    """A training that was told to stop."""


class Progress(NamedTuple):
    """How far a training is: networks that are finished, those that are trained now side by side, all there are; and of those
    now their epoch, and the loss on its last batch by forward pass (the mean; NaN where weights are not finite)."""

    finished: int
    together: int
    networks: int
    epoch: int
    epochs: int
    loss: float


def train(
    network: Network,
    parts: list[Part],
    recipe: Recipe,
    seeds: list[int],
    device: str = "cpu",
    compute: Compute = "auto",
    progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    every_epoch: Callable[[list[Params]], None] | None = None,
) -> list[Params]:
    """One network for each part, by SGD with momentum from fresh parameters.

    Arguments:
        parts: a part that follows itself is not sent to the device again.
        progress: told how far it is, about 100 times a network; it does not change the arithmetic.
        cancelled: asked after each step; once it says yes, Cancelled is raised.
        every_epoch: given the weights after each epoch, of the networks that are trained side by side.
    """
    check_values(recipe)
    flat, used = fast.passes(network, device, compute, half=False)
    plan, trained = None, {}
    often = math.ceil(recipe.epochs / MOST_REPORTS)
    with _room_for(network, recipe), torch.cuda.device(device) if device.startswith("cuda") else threads_for(network):
        for group in _groups(flat, parts, recipe.batch, device):
            mine = [parts[number] for number in group]
            if plan is None or plan.images.shape != (len(mine), *mine[0][0].shape):
                plan = _Plan(flat, mine, recipe, device, used)
            for done in plan.steps(mine, [seeds[number] for number in group]):
                epoch, more = divmod(done, plan.epoch)
                if every_epoch and not more:
                    every_epoch(plan.params())
                if progress and not more and (epoch % often == 0 or epoch in (1, recipe.epochs)):
                    progress(Progress(len(trained), len(mine), len(parts), epoch, recipe.epochs, plan.loss()))
                if cancelled and cancelled():
                    raise Cancelled
            trained.update(zip(group, plan.params(), strict=True))
    return [trained[number] for number in range(len(parts))]


@contextmanager
def _room_for(network: Network, recipe: Recipe) -> Iterator[None]:
    """An allocator's words, where a step does not fit into memory, become ours."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            shape = "x".join(map(str, network.shape))
            raise RecollectError(
                f"no room for a step of {recipe.network} on images of {shape}: give a smaller batch than {recipe.batch}, or a "
                "smaller network"
            ) from error
        raise


def _groups(flat: Flat, parts: list[Part], batch: int, device: str) -> list[list[int]]:
    """Numbers of the networks that are trained side by side: those of one size, as far as their passes fit."""
    if device.startswith("cuda") or not flat.stacks:
        return [[number] for number in range(len(parts))]
    batch = min(batch, max([1, *(len(labels) for _, labels in parts)]))
    most = max(1, MOST_BYTES // flat.held(batch, adjoint=False))
    alike: dict[torch.Size, list[int]] = {}
    for number, (images, _) in enumerate(parts):
        alike.setdefault(images.shape, []).append(number)
    return [same[first : first + most] for same in alike.values() for first in range(0, len(same), most)]


def batches(count: int, recipe: Recipe, generator: torch.Generator) -> Iterator[tuple[Tensor, augment.Drawn]]:
    """(rows, augmentation parameters) of each step: every image once an epoch, in an order of its own."""
    names = augment.parse(recipe.augment)
    for _ in range(recipe.epochs):
        for rows in torch.randperm(count, generator=generator).split(recipe.batch):
            yield rows, augment.draw(names, len(rows), generator)


class _Plan:
    """Steps for so many networks and one size of training set: captured once, replayed for every group."""

    def __init__(self, flat: Flat, parts: list[Part], recipe: Recipe, device: str, compute: str):
        self.flat, self.recipe, self.device, self.compute = flat, recipe, device, compute
        networks, images = len(parts), parts[0][0]
        self.count, batch = len(images), min(recipe.batch, len(images))
        self.images = images.new_zeros(networks, *images.shape, device=device)
        self.labels = torch.zeros(networks, *parts[0][1].shape, dtype=parts[0][1].dtype, device=device)
        self.held: list[Part | None] = [None] * networks
        self.fresh: list[Params] = []
        self.theta = flat.pack(flat.network.fresh(0, device)).repeat(networks, 1)
        self.velocity = torch.zeros_like(self.theta)
        # what the next steps see, one batch behind another; `at` is where the next one begins
        self.epoch = -(-self.count // batch)
        self.most = min(recipe.epochs * self.epoch, max(1, MOST_ROWS // (networks * batch)))
        self.order = torch.zeros(networks, self.most * batch, dtype=torch.long, device=device)
        names = augment.parse(recipe.augment)
        self.numbers = {name: images.new_zeros(*self.order.shape, 2, device=device) for name in names}
        self.at, self.ahead = torch.zeros(1, dtype=torch.long, device=device), torch.arange(batch, device=device)
        self.last = self.count % batch or batch  # images of an epoch's last batch
        with precision(compute, flat.benchmark):
            at = self.images.device
            self.step = {size: captured(lambda size=size: self._step(size), at) for size in {batch, self.last}}

    def steps(self, parts: list[Part], seeds: list[int]) -> Iterator[int]:
        """Do them one at a time, and count; what comes next is drawn while the device still works on what it has."""
        drawn = [batches(self.count, self.recipe, seeded(seed, Purpose.STEPS)) for seed in seeds]
        coming, done = zip(*drawn, strict=True), 0
        steps = list(islice(coming, self.most))
        self._begin(parts, seeds)
        while steps:
            self._fill(steps)
            for (rows, _), *_ in steps:
                self.step[len(rows)]()
                done += 1
                yield done
            steps = list(islice(coming, self.most))

    def params(self) -> list[Params]:
        return [self.flat.unpack(theta, fresh) for theta, fresh in zip(self.theta, self.fresh, strict=True)]

    def loss(self) -> float:
        """See Progress."""
        if not self.theta.isfinite().all():
            return math.nan
        with torch.no_grad(), precision(self.compute):
            given = zip(self.params(), *self._batch(self.at - self.last, self.last), strict=True)
            return float(torch.stack([self.flat.network.loss(*each) for each in given]).mean())

    def _begin(self, parts: list[Part], seeds: list[int]) -> None:
        for place, part in enumerate(parts):
            if self.held[place] is not part:
                self.images[place].copy_(part[0])
                self.labels[place].copy_(part[1])
                self.held[place] = part
        self.fresh = [self.flat.network.fresh(seed, self.device) for seed in seeds]
        for theta, fresh in zip(self.theta, self.fresh, strict=True):
            theta.copy_(self.flat.pack(fresh))
        self.velocity.zero_()

    def _fill(self, steps: list[tuple[tuple[Tensor, augment.Drawn], ...]]) -> None:
        """What the next steps of each network see; rows are those of all networks' images."""
        for place, own in enumerate(zip(*steps, strict=True)):
            rows = torch.cat([rows for rows, _ in own]) + place * self.count
            self.order[place, : len(rows)].copy_(rows)
            for name, numbers in self.numbers.items():
                numbers[place, : len(rows)].copy_(torch.cat([drawn[name] for _, drawn in own]))
        self.at.zero_()

    def _batch(self, at: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Images [S, B, ...] as they are augmented, and labels [S, B, ...]."""
        place = (at + self.ahead[:size]).clamp_(max=self.order.shape[1] - 1)  # a capture's trial runs may overshoot
        rows = self.order.index_select(1, place)
        drawn = {name: numbers.index_select(1, place).flatten(0, 1) for name, numbers in self.numbers.items()}
        seen = augment.apply(self.images.flatten(0, 1).index_select(0, rows.flatten()), drawn)
        labels = self.labels.flatten(0, 1).index_select(0, rows.flatten())
        return seen.unflatten(0, rows.shape), labels.unflatten(0, rows.shape)

    def _step(self, size: int) -> None:
        """Side by side the products are rounded by themselves, alone together with the sums: as 0.1 did, to the bit."""
        seen, labels = self._batch(self.at, size)
        lr, momentum, gradient = self.recipe.lr, self.recipe.momentum, self.flat.gradient(self.theta, seen, labels)
        if len(self.theta) > 1:
            self.velocity.mul_(momentum).add_(gradient)
            self.theta.sub_(lr * self.velocity)
        else:
            torch.add(gradient, self.velocity, alpha=momentum, out=self.velocity)
            self.theta.add_(self.velocity, alpha=-lr)
        self.at.add_(size)


@torch.no_grad()
def squared_errors(network: Network, params: Params, images: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error of each target: [targets], float64. Outputs that are not finite count as far away."""
    sums = torch.zeros(targets.shape[1], dtype=torch.float64, device=targets.device)
    for batch, truth in zip(images.split(2048), targets.split(2048), strict=True):
        away = (network.logits(params, batch) - truth).double().square()
        sums += away.nan_to_num(FAR, posinf=FAR).clamp(max=FAR).sum(0)
    return sums / len(targets)


@torch.no_grad()
def accuracy(network: Network, params: Params, images: Tensor, labels: Tensor) -> float:
    """Share of images whose highest logit is their label's."""
    right = 0
    for batch, truth in zip(images.split(2048), labels.split(2048), strict=True):
        if batch.is_cuda:
            batch = batch.contiguous(memory_format=torch.channels_last)
        right += int((network.logits(params, batch).argmax(1) == truth).sum())
    return right / len(labels)
