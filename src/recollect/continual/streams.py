"""Streams: tasks in order, batch by batch, and every batch is seen once.

A task of Rotations or Permutations is one gather of pixels, so that a task is a vector of 784 numbers until it is reached;
a task of a split is a few classes. Nothing here trains, and nothing is kept of a batch that has gone by.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from recollect.continual.config import ContinualConfig, check
from recollect.data.images import Images, Split
from recollect.data.preprocess import Preprocess
from recollect.errors import RecollectError
from recollect.files import sha256
from recollect.seeds import Purpose, seeded

PERMUTATION_SEED = 0  # the same permutations in every run
Groups = Sequence[Sequence[int]]
"""the classes of each task"""


class Batch(NamedTuple):
    """Some images with their labels, and the task that each is of."""

    images: Tensor
    """uint8 [B, C, H, W]"""
    labels: Tensor
    """int64 [B], of all classes of the stream"""
    tasks: Tensor
    """int64 [B]"""

    @property
    def task(self) -> int:
        """of a batch of the stream, which is of one task"""
        return int(self.tasks[0])


class Task:
    """One task of a stream: its batches, to be iterated over once. Only the batch that is looked at is ever built."""

    def __init__(self, number: int, rows: Sequence[Tensor], build: Callable[[Tensor], Batch]):
        self.number, self._rows, self._build, self._begun = number, rows, build, False

    def __len__(self) -> int:
        """Batches to come."""
        return len(self._rows)

    def skip(self, batches: int) -> None:
        """Begin after these: a run that was interrupted has seen them."""
        self._rows = self._rows[batches:]

    def __iter__(self) -> Iterator[Batch]:
        if self._begun:
            raise RecollectError(
                f"task {self.number} has already streamed by, and a batch is seen once: keep what you need in a buffer"
            )
        self._begun = True
        return map(self._build, self._rows)


class Stream:
    """The tasks of one run, by its seed.

    Arguments:
        images: what `recollect.load` gives.
        groups: for a split, the classes of each task, instead of an order drawn by the seed.
        device: where test images are built. Training images come from the processor's memory.
    """

    def __init__(self, images: Images, config: ContinualConfig, seed: int = 0, groups: Groups | None = None, device: str = "cpu"):
        check(config)
        if seed < 0:
            raise RecollectError(f"seed is {seed}: give 0 or more")
        self.config, self.seed, self.name = config, seed, images.name
        self.shape, self.classes, self.class_names = images.shape, images.classes, images.class_names
        self._train = images.train + images.validation if config.stream.use_validation else images.train
        judged = images.validation if config.stream.on == "validation" else images.test
        self._judged = Split(judged.images.to(device), judged.labels)
        normalised = config.stream.preprocess == "normalise"
        self.preprocess = Preprocess.fit(images.train.images) if normalised else as_pixels(images.shape[0])
        """two numbers a channel, which the baselines' code takes as known too"""
        self.prepare: Callable[[Tensor], Tensor] = self.preprocess
        """images as a network sees them"""
        self.task_classes = self._task_classes(groups)
        """for each task the labels that it has"""
        self.tasks = len(self.task_classes)
        draws = torch.rand(self.tasks, dtype=torch.float64, generator=seeded(seed, Purpose.ANGLES))
        angles = ((torch.arange(self.tasks) + draws) * 180.0 / self.tasks).tolist()
        self.angles: list[float] | None = angles if config.stream.kind == "rotations" else None
        """one for each task, uniform in its part of the half turn: [9t, 9(t+1)) degrees for 20 tasks"""
        self._gathers = self._find_gathers()
        self._taken: set[int] = set()
        for number in range(self.tasks):
            self._check(number)

    @property
    def permutations(self) -> Tensor | None:
        """int32 [tasks, pixels]: the pixel that each pixel of a task's images is taken from."""
        return torch.stack(self._gathers).int() if self.config.stream.kind == "permutations" else None

    @property
    def masks(self) -> Tensor:
        """bool [tasks, classes]: which labels each task has."""
        return torch.stack([torch.isin(torch.arange(self.classes), torch.tensor(labels)) for labels in self.task_classes])

    def batches(self, number: int) -> int:
        """Batches of a task."""
        return -(-len(self._rows(number)) // self.config.stream.batch)

    def task(self, number: int) -> Task:
        """A task; each only once."""
        if not 0 <= number < self.tasks:
            raise RecollectError(f"task {number} is not one of this stream's 0 to {self.tasks - 1}")
        if number in self._taken:
            raise RecollectError(f"task {number} has already been taken from this stream, and is seen once")
        self._taken.add(number)
        return Task(number, self._rows(number).split(self.config.stream.batch), partial(self._batch, number))

    def _batch(self, number: int, rows: Tensor) -> Batch:
        split = self._train[rows]
        return Batch(self._look(split.images, number), split.labels, torch.full_like(split.labels, number))

    def __iter__(self) -> Iterator[Task]:
        return (self.task(number) for number in range(self.tasks))

    def test(self, number: int) -> Split:
        """What a task is judged by, as often as anyone likes."""
        split = self._judged[_of(self._judged.labels, self.task_classes[number])]
        return Split(self._look(split.images, number), split.labels)

    def record(self) -> dict[str, Any]:
        """Everything that was drawn, for the run's folder."""
        drawn: dict[str, Any] = {"kind": self.config.stream.kind, "dataset": self.name, "seed": self.seed, "tasks": self.tasks}
        if self.angles is not None:
            drawn["angles"] = self.angles
        if self.config.stream.kind == "permutations":
            hashes = [sha256(gather.numpy().tobytes()) for gather in self._gathers]
            drawn["permutations"] = {"torch_seed": PERMUTATION_SEED, "sha256": hashes}
        if self.config.stream.kind == "split":
            drawn["classes"] = [[self.class_names[label] for label in labels] for labels in self.task_classes]
        drawn["training_rows_sha256"] = [sha256(self._rows(t).numpy().tobytes()) for t in range(self.tasks)]
        return drawn

    def _task_classes(self, groups: Groups | None) -> list[tuple[int, ...]]:
        kind, tasks, size = self.config.stream.kind, self.config.stream.tasks, self.config.stream.classes_per_task or 1
        if kind != "split":
            if groups is not None:
                raise RecollectError(f"groups of classes are for the stream split: {kind} has all in each task")
            return [tuple(range(self.classes))] * (tasks or 1)
        if groups is not None:
            return _checked(groups, self.classes)
        if tasks is None and self.classes % size:
            divisors = [str(n) for n in range(1, self.classes + 1) if self.classes % n == 0]
            raise RecollectError(
                f"{self.classes} classes do not make whole tasks of {size}: give classes_per_task {' or '.join(divisors)}, "
                "or a number of tasks"
            )
        most = self.classes // size
        if (tasks or most) > most:
            raise RecollectError(f"{tasks} tasks of {size} classes would overlap: {self.classes} classes make {most} of them")
        order = torch.randperm(self.classes, generator=seeded(self.seed, Purpose.CLASS_ORDER))
        return [tuple(labels.tolist()) for labels in order.split(size)[: tasks or most]]

    def _find_gathers(self) -> list[Tensor]:
        """For each task the pixel that each of its pixels is taken from; H*W stands for black."""
        height, width = self.shape[1:]
        if self.angles is not None:
            if height != width:
                raise RecollectError(f"images of {height}x{width} cannot be rotated in place: give square ones (--size)")
            return [rotation(angle, height) for angle in self.angles]
        if self.config.stream.kind == "permutations":
            generator = torch.Generator().manual_seed(PERMUTATION_SEED)
            return [torch.randperm(height * width, generator=generator) for _ in range(self.tasks)]
        return []

    def _look(self, images: Tensor, number: int) -> Tensor:
        """Images as a task shows them."""
        if not self._gathers:
            return images
        flat = F.pad(images.flatten(2), (0, 1))  # black, for pixels from outside
        return flat.index_select(2, self._gathers[number].to(flat.device)).view_as(images)

    def _rows(self, number: int) -> Tensor:
        """Training images of a task, in the order they come."""
        rows = _of(self._train.labels, self.task_classes[number])
        order = torch.randperm(len(rows), generator=seeded(self.seed, Purpose.TASK_ROWS, number))
        return rows[order[: self.config.stream.per_task]]

    def _check(self, number: int) -> None:
        there, wanted = len(_of(self._train.labels, self.task_classes[number])), self.config.stream.per_task
        task = f"task {number} of {self.name}"
        if there == 0 or wanted == 0:
            raise RecollectError(f"{task} has no samples: {'give per_task 1 or more' if there else 'leave its classes out'}")
        if (wanted or 0) > there:
            more = "" if self.config.stream.use_validation else ", or add the validation split (--use-validation)"
            has = f"{task} has {there:,} training images: give at most {there:,}{more}"
            raise RecollectError(f"per_task is {wanted:,}, but {has}")
        if len(_of(self._judged.labels, self.task_classes[number])) == 0:
            raise RecollectError(f"{task} has no {self.config.stream.on} images: leave its classes out")


def rotation(angle: float, side: int) -> Tensor:
    """[side * side]: where each pixel comes from when an image is turned counter-clockwise by `angle` degrees about its
    centre, nearest neighbour, side * side (black) from outside. PIL turns the places: in floats (affine_grid, grid_sample) a
    pixel in some thousands falls on the other side of a border."""
    places = np.arange(side * side, dtype=np.int32).reshape(side, side)
    return torch.from_numpy(np.array(Image.fromarray(places).rotate(angle, fillcolor=side * side))).long().flatten()


def as_pixels(channels: int) -> Preprocess:
    """Pixels in 0..1 as they are."""
    return Preprocess((0.0,) * channels, (1.0,) * channels)


def _of(labels: Tensor, classes: Sequence[int]) -> Tensor:
    """Rows with one of these labels."""
    return torch.isin(labels, torch.tensor(classes)).nonzero().flatten()


def _checked(groups: Groups, classes: int) -> list[tuple[int, ...]]:
    owner: dict[int, int] = {}
    for number, labels in enumerate(groups):
        if not labels:
            raise RecollectError(f"task {number} has no classes: give at least one")
        for label in labels:
            if not 0 <= label < classes:
                raise RecollectError(f"task {number} has class {label}: give 0 to {classes - 1}")
            if label in owner:
                raise RecollectError(
                    f"class {label} is in task {owner[label]} and in task {number}: the tasks of a split must not overlap"
                )
            owner[label] = number
    if not groups:
        raise RecollectError("no groups of classes: give at least one task")
    return [tuple(labels) for labels in groups]
