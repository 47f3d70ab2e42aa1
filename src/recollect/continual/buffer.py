"""What may be kept of a stream: real samples by reservoir sampling or class by class, and an account of every float."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recollect.budget import check_smaller
from recollect.continual.streams import Batch
from recollect.errors import RecollectError
from recollect.header import smaller
from recollect.nets import Shape

KEPT = ("images", "labels", "tasks", "seen")  # of a reservoir, in a checkpoint


class Buffer:
    """The account: at every moment the floats of real samples and finished memories fit the total.

    Arguments:
        images: the total, in images of `shape`. Labels are not counted, as nobody does.
        tasks: that will share it.
        kept_downsample: real samples are kept by as many floats as images have that are this much smaller on each side.
    """

    def __init__(self, images: int, shape: Shape, tasks: int, kept_downsample: int = 1):
        check_smaller(shape, kept_downsample, "kept_downsample")
        self.sample = math.prod(smaller(shape, kept_downsample))  # floats of a real sample
        self.total = images * math.prod(shape)
        if images < tasks:
            raise RecollectError(
                f"a buffer of {images} images cannot serve {tasks} tasks, each with an image at least: "
                f"give a buffer of {tasks} or more, or at most {images} tasks"
            )
        self.share = self.total // tasks  # floats that a task's memory may take for good
        self.memories = 0  # floats of finished memories
        self.log: list[dict[str, Any]] = []  # a line whenever what is kept has changed

    @property
    def capacity(self) -> int:
        """Real samples that fit beside the finished memories."""
        return (self.total - self.memories) // self.sample

    def store(self, floats: int) -> None:
        """A finished memory, for good."""
        assert floats <= self.share, f"a memory of {floats} floats does not fit a share of {self.share}"
        self.memories += floats

    def note(self, task: int, batch: int, samples: int) -> None:
        """After each batch, and each task: the account holds."""
        kept = samples * self.sample
        exceeds = f"{kept} floats of samples and {self.memories} of memories exceed {self.total}"
        assert kept + self.memories <= self.total, exceeds
        line = {"samples": samples, "sample_floats": kept, "memory_floats": self.memories, "total": self.total}
        if not self.log or any(self.log[-1][name] != value for name, value in line.items()):
            self.log.append({"task": task, "batch": batch} | line)


class Reservoir:
    """A uniform sample of all that was added, whenever one looks (Vitter's algorithm R)."""

    def __init__(self, capacity: int, shape: Sequence[int], generator: torch.Generator):
        self.capacity, self.generator, self.seen = capacity, generator, 0
        self.images = torch.zeros(capacity, *shape, dtype=torch.uint8)
        self.labels, self.tasks = (torch.zeros(capacity, dtype=torch.long) for _ in range(2))

    def __len__(self) -> int:
        return min(self.seen, self.capacity)

    def add(self, batch: Batch) -> None:
        """The n-th sample is kept with probability capacity / n, in the place of any other."""
        self.images = self.images.to(batch.images.dtype)  # uint8 of our streams, floats of others' and of sketches
        numbers = self.seen + torch.arange(1, len(batch.labels) + 1)
        drawn = (torch.rand(len(numbers), dtype=torch.float64, generator=self.generator) * numbers).long()
        places = torch.where(numbers <= self.capacity, numbers - 1, drawn)
        for row in (places < self.capacity).nonzero().flatten().tolist():  # in order: a later one may replace it
            for kept, new in zip((self.images, self.labels, self.tasks), batch, strict=True):
                kept[places[row]] = new[row]
        self.seen += len(numbers)

    def draw(self, count: int, generator: torch.Generator, which: Callable[[Tensor], Tensor] | None = None) -> Batch:
        """Up to `count` of the samples, without replacement; `which` says from their tasks which may be drawn."""
        rows = torch.arange(len(self))
        if which is not None:
            rows = rows[which(self.tasks[: len(self)])]
        rows = rows[torch.randperm(len(rows), generator=generator)[:count]]
        return Batch(self.images[rows], self.labels[rows], self.tasks[rows])

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in KEPT} | {"generator": self.generator.get_state()}

    def load(self, saved: dict[str, Any]) -> None:
        for name in KEPT[:3]:
            mine, theirs = getattr(self, name), saved[name]
            if theirs.shape != mine.shape or (name != "images" and theirs.dtype != mine.dtype):
                raise TypeError(f"{name} of a reservoir like {list(mine.shape)} are expected")
        vars(self).update({name: saved[name] for name in KEPT} | {"seen": int(saved["seen"])})
        self.generator.set_state(saved["generator"])


class Sketch:
    """Images by a few numbers: the lowest frequencies of their cosine transform, those of colours up to half as high as those
    of grey, since colours have less detail."""

    def __init__(self, shape: Shape, numbers: int, device: str = "cpu"):
        places = torch.cartesian_prod(*map(torch.arange, shape))  # of all frequencies, [C * H * W, 3]
        heights = (places[:, 1:] / torch.tensor(shape[1:])).norm(dim=1) * torch.where(places[:, 0] > 0, 2, 1)
        chosen = places[heights.argsort(stable=True)[:numbers]]
        channels, rows, columns = (_cosines(side)[kept] for side, kept in zip(shape, chosen.T, strict=True))
        self.shape = shape
        self.waves = torch.einsum("nc,nh,nw->nchw", channels, rows, columns).flatten(1).float().to(device)
        """[numbers, C * H * W], orthonormal"""

    def of(self, images: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, numbers], on the processor"""
        return (images.to(self.waves.device).flatten(1).float() @ self.waves.T).cpu()

    def images(self, numbers: Tensor, kind: torch.dtype) -> Tensor:
        """[N, numbers] -> what they tell of the images, [N, C, H, W] on the device; whole pixels where these are asked for."""
        found = (numbers.to(self.waves) @ self.waves).unflatten(1, self.shape)
        return found.round().clamp(0, 255).to(kind) if kind == torch.uint8 else found.to(kind)


def _cosines(side: int) -> Tensor:
    """[frequencies, places] of the orthonormal cosine transform (DCT-II)."""
    frequencies, places = torch.arange(side, dtype=torch.float64)[:, None], torch.arange(side) + 0.5
    waves = torch.cos(math.pi / side * frequencies * places) * math.sqrt(2 / side)
    waves[0] /= math.sqrt(2)
    return waves


class Balanced:
    """GDumb's greedy sampler: full, it takes a sample of a class it has fewer of, in the place of one of the largest."""

    def __init__(self, capacity: int, generator: torch.Generator):
        self.capacity, self.generator = capacity, generator
        self.samples: list[tuple[Tensor, Tensor, Tensor]] = []
        self.labels: list[int] = []

    def add(self, batch: Batch) -> None:
        for label, sample in zip(batch.labels.tolist(), zip(*batch, strict=True), strict=True):
            if len(self.samples) < self.capacity:
                self.samples.append(sample)
                self.labels.append(label)
                continue
            counts = Counter(self.labels)
            ((largest, most),) = counts.most_common(1)
            if counts[label] < most:
                places = [place for place, kept in enumerate(self.labels) if kept == largest]
                place = places[int(torch.randint(len(places), (), generator=self.generator))]
                self.samples[place], self.labels[place] = sample, label

    def all(self) -> Batch:
        return Batch(*(torch.stack(parts) for parts in zip(*self.samples, strict=True)))


class Everything(list[Batch]):
    """No buffer at all, but the whole task: the upper bound's."""

    add = list.append

    def all(self) -> Batch:
        return Batch(*(torch.cat(parts) for parts in zip(*self, strict=True)))
