"""Fresh networks trained at the speed of a GPU: a step is one captured graph, replayed.

The images, the order in which a network sees them and the numbers of its augmentation lie on the device, where a counter says
which come next: the host only launches. Without CUDA the very same steps run uncaptured: that is how they are tested.
"""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from recollect.config import Recipe
from recollect.data import augment
from recollect.fast.engine import captured, precision
from recollect.fast.flat import Flat
from recollect.nets import Params
from recollect.seeds import Purpose, seeded

MOST_ROWS = 2**20  # of a network's order that lie on the device at a time


def batches(count: int, recipe: Recipe, generator: torch.Generator) -> Iterator[tuple[Tensor, augment.Drawn]]:
    """(rows, augmentation parameters) of each step: every image once an epoch, in an order of its own."""
    names = augment.parse(recipe.augment)
    for _ in range(recipe.epochs):
        for rows in torch.randperm(count, generator=generator).split(recipe.batch):
            yield rows, augment.draw(names, len(rows), generator)


def train(
    flat: Flat, parts: list[tuple[Tensor, Tensor]], recipe: Recipe, seeds: list[int], device: str, compute: str = "fp32"
) -> list[Params]:
    """One network for each part, by SGD with momentum from fresh parameters.

    They come one after another, since each fills the chip; what is captured for one serves all of the same size.

    Arguments:
        parts: (images as a network sees them, labels), on any device; a part that follows itself is not sent again.
        compute: the precision of the library's own products.
    """
    plan, trained = None, []
    for (images, labels), seed in zip(parts, seeds, strict=True):
        if plan is None or plan.images.shape != images.shape:
            with precision(compute, flat.benchmark):
                plan = _Plan(flat, images, recipe, torch.device(device))
        trained.append(plan.run(images, labels, seed))
    return trained


class _Plan:
    """Steps for one size of training set: captured once, replayed for every network."""

    def __init__(self, flat: Flat, images: Tensor, recipe: Recipe, device: torch.device):
        self.flat, self.recipe, self.held = flat, recipe, None
        count, batch = len(images), min(recipe.batch, len(images))
        self.images = images.new_zeros(images.shape, device=device)
        self.labels, self.at = (torch.zeros(n, dtype=torch.long, device=device) for n in (count, 1))
        self.theta = flat.pack(flat.network.fresh(0, device))
        self.speed = torch.zeros_like(self.theta)
        # what the next steps see, one batch behind another; `at` is where the next one begins
        self.most = min(recipe.epochs * -(-count // batch), max(1, MOST_ROWS // batch))
        self.order = torch.zeros(self.most * batch, dtype=torch.long, device=device)
        self.numbers = {
            name: images.new_zeros(len(self.order), 2, device=device) for name in augment.parse(recipe.augment)
        }
        self.ahead = torch.arange(batch, device=device)
        sizes = {batch, count % batch or batch}  # an epoch's last batch may be shorter
        self.steps = {size: captured(lambda size=size: self._step(size), self.images.device) for size in sizes}

    def run(self, images: Tensor, labels: Tensor, seed: int) -> Params:
        """A network trained on these, of this seed; what comes next is drawn while the device still works on what it has."""
        coming = batches(len(labels), self.recipe, seeded(seed, Purpose.STEPS))
        steps = list(islice(coming, self.most))
        if self.held is None or self.held[0] is not images or self.held[1] is not labels:
            self.images.copy_(images)
            self.labels.copy_(labels)
            self.held = images, labels
        fresh = self.flat.network.fresh(seed, self.theta.device)
        self.theta.copy_(self.flat.pack(fresh))
        self.speed.zero_()
        while steps:
            self._fill(self.order, [rows for rows, _ in steps])
            for name, numbers in self.numbers.items():
                self._fill(numbers, [drawn[name] for _, drawn in steps])
            self.at.zero_()
            for rows, _ in steps:
                self.steps[len(rows)]()
            steps = list(islice(coming, self.most))
        return self.flat.unpack(self.theta, fresh)

    @staticmethod
    def _fill(place: Tensor, pieces: list[Tensor]) -> None:
        whole = torch.cat(pieces)
        place[: len(whole)].copy_(whole)

    def _step(self, size: int) -> None:
        place = (self.at + self.ahead[:size]).clamp_(max=len(self.order) - 1)  # a capture's trial runs may overshoot
        rows = self.order.index_select(0, place)
        drawn = {name: numbers.index_select(0, place) for name, numbers in self.numbers.items()}
        seen = augment.apply(self.images.index_select(0, rows), drawn)
        gradient = self.flat.gradient(self.theta, seen, self.labels.index_select(0, rows))
        torch.add(gradient, self.speed, alpha=self.recipe.momentum, out=self.speed)
        self.theta.add_(self.speed, alpha=-self.recipe.lr)
        self.at.add_(size)
