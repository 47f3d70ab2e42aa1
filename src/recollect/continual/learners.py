"""The learners, on one small protocol: observe a batch, end a task, predict with or without the task's number.

Compress-then-recall trains nothing on the stream: at test a fresh network learns from the task's memory. Its baselines are
kept simple, and to their papers; what each may look at stands in its docstring.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from recollect.config import Recipe
from recollect.continual.buffer import Balanced, Buffer, Everything, Reservoir
from recollect.continual.compress import Compressor, account, local_labels
from recollect.continual.config import LEARNERS, ContinualConfig, check_learners
from recollect.continual.metrics import Matrix, square
from recollect.continual.streams import Batch, Stream
from recollect.errors import RecollectError
from recollect.evaluation import memory_recipe
from recollect.memory import Memory
from recollect.nets import Network, Params
from recollect.seeds import Purpose, network_seed, seeded
from recollect.training import Part, train

PER_TASK = ("compress", "gdumb", "all-data")  # learners with a network for each task


class Learner(Protocol):
    """What every learner can do. `task` is None for a learner that is not told."""

    def observe(self, batch: Batch) -> None: ...
    def end_task(self) -> None: ...
    def predict(self, images: Tensor, task: int | None) -> Tensor:
        """uint8 [N, C, H, W] -> labels [N], of all classes of the stream"""
        ...


def make(name: str, stream: Stream, config: ContinualConfig, device: str = "cpu") -> Learner:
    """A learner for a stream, by its name."""
    check_learners([name])
    return KINDS[name](stream, config, device)


def is_told(name: str, config: ContinualConfig) -> bool:
    """Whether a learner is told the task at test: always with a network for each, and one for all where it masks classes."""
    return name in PER_TASK or (name != "union" and config.stream.kind == "split")


def accuracy(learner: Learner, stream: Stream, task: int, told: bool = True) -> float:
    """In percent, on what a task is judged by."""
    split = stream.test(task)
    predicted = learner.predict(split.images, task if told else None).cpu()
    return 100 * float((predicted == split.labels).double().mean())


def taught(learner: Learner, stream: Stream) -> Iterator[Learner]:
    """The whole of a learner's life: as it is after each task."""
    for task in stream:
        for batch in task:
            learner.observe(batch)
        learner.end_task()
        yield learner


def accuracy_matrix(
    name: str, after_tasks: Iterable[Learner], stream: Stream, progress: Callable[[int], None] = lambda task: None
) -> Matrix:
    """Row i: the accuracy on tasks 0..i after task i. A network for each task is judged once: later ones do not change it."""
    rows: list[list[float]] = []
    told = is_told(name, stream.config)
    for task, learner in enumerate(after_tasks):
        known = rows[-1] if rows and name in PER_TASK else []
        rows.append(known + [accuracy(learner, stream, seen, told) for seen in range(len(known), task + 1)])
        progress(task)
    return square(rows)


class _Place:
    """Where a learner is in its stream: tasks come in their order, each with a batch at least."""

    def __init__(self, ended: int = 0):
        self.ended, self.begun = ended, False

    def observe(self, batch: Batch) -> None:
        if batch.task != self.ended:
            raise RecollectError(
                f"a batch of task {batch.task} came where task {self.ended} is due: give tasks in their order, and end each"
            )
        self.begun = True

    def end_task(self) -> None:
        if not self.begun:
            raise RecollectError(f"task {self.ended} ends without a batch: a task needs samples")
        self.ended, self.begun = self.ended + 1, False

    def check(self, task: int) -> None:
        if not 0 <= task < self.ended:
            known = f"it has seen 0 to {self.ended - 1}" if self.ended else "it has seen none yet"
            raise RecollectError(f"the learner never saw task {task}: {known}")


def _logits(network: Network, params: Params, images: Tensor, stream: Stream, device: str) -> Tensor:
    """[N, classes], a few thousand images at a time."""
    with torch.no_grad():
        return torch.cat([network.logits(params, stream.prepare(part.to(device))) for part in images.split(4096)])


class _TaskNetworks:
    """Fresh networks, one for each task, each trained on a set of its own."""

    def __init__(self, stream: Stream, config: ContinualConfig, device: str):
        self.stream, self.config, self.device = stream, config, device
        self.params: dict[int, Params] = {}
        self.unions: dict[int, Params] = {}

    def train(self, parts: dict[int, Part], recipe: Recipe) -> None:
        """All of these, together where they have as many classes; labels are places among the task's own."""
        classes = {task: len(self.stream.task_classes[task]) for task in parts}
        for count in {*classes.values()}:
            tasks = [task for task in parts if classes[task] == count]
            seeds = [network_seed(self.stream.seed, Purpose.TRAIN, task) for task in tasks]
            some = [parts[task] for task in tasks]
            found = train(self._network(tasks[0]), some, recipe, seeds, self.device, self.config.compute)
            self.params.update(zip(tasks, found, strict=True))

    def logits(self, images: Tensor, task: int) -> Tensor:
        return _logits(self._network(task), self.params[task], images, self.stream, self.device)

    def predict(self, images: Tensor, task: int) -> Tensor:
        return torch.tensor(self.stream.task_classes[task], device=self.device)[self.logits(images, task).argmax(1)]

    def union(self, parts: Sequence[Part], recipe: Recipe, images: Tensor) -> Tensor:
        """Labels of all classes, by one network on the sets of all these tasks together; trained once for so many tasks."""
        network, number = Network(self.config.inner.network, self.stream.shape, self.stream.classes), len(parts)
        if number not in self.unions:
            whole = torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])
            seeds = [network_seed(self.stream.seed, Purpose.UNION, number)]
            (self.unions[number],) = train(network, [whole], recipe, seeds, self.device, self.config.compute)
        return _logits(network, self.unions[number], images, self.stream, self.device).argmax(1)

    def _network(self, task: int) -> Network:
        return Network(self.config.inner.network, self.stream.shape, len(self.stream.task_classes[task]))


class Compress:
    """Compress-then-recall: of a task only its memory stays. Told the task, it recalls that memory and trains a fresh network
    on it; not told, a fresh network on all memories together (the row "union" of the tables).

    Arguments:
        memories: of the first tasks, where they have been distilled already. Batches of these tasks are let go.
        seen: whether it has seen these tasks, and can be asked about them at once.
    """

    def __init__(
        self, stream: Stream, config: ContinualConfig, device: str = "cpu", memories: Sequence[Memory] = (), seen: bool = True
    ):
        account(stream, config, stream.tasks)  # refuses before anything is computed
        self.stream, self.config, self.device = stream, config, device
        self.memories = list(memories)  # of the tasks so far, and those that were given
        self.place = _Place(len(memories) if seen else 0)
        self.buffer: Buffer | None = None  # the account of the task that is being learnt, or was last
        self._compressor: Compressor | None = None
        self._networks = _TaskNetworks(stream, config, device)

    def observe(self, batch: Batch) -> None:
        self.place.observe(batch)
        if batch.task < len(self.memories):
            return
        if self._compressor is None:
            self._compressor = Compressor(self.stream, self.config, [batch.task], self.device)
            self.buffer = self._compressor.buffers[0]
        self._compressor.observe([batch])

    def end_task(self) -> None:
        self.place.end_task()
        if self._compressor:
            self.memories += self._compressor.memories()
        self._compressor = None

    def predict(self, images: Tensor, task: int | None) -> Tensor:
        if task is None:
            return self._predict_union(images)
        self._recall(task)
        return self._networks.predict(images, task)

    def logits(self, images: Tensor, task: int) -> Tensor:
        """[N, classes of the task], of the network that the task's memory trains."""
        self._recall(task)
        return self._networks.logits(images, task)

    def _recall(self, task: int) -> None:
        """Networks from the memories that have none yet."""
        self.place.check(task)
        missing = {t: memory.recall() for t, memory in enumerate(self.memories) if t not in self._networks.params}
        if missing:
            self._networks.train(missing, memory_recipe(self.memories[0]))

    def _predict_union(self, images: Tensor) -> Tensor:
        """By a network on everything that the memories of all tasks seen recall, in as many passes as over one memory."""
        self.place.check(0)
        seen = self.memories[: self.place.ended]
        recalled = [memory.recall() for memory in seen]
        labels = [torch.tensor(classes)[p] for (_, p), classes in zip(recalled, self.stream.task_classes, strict=False)]
        parts = list(zip((images for images, _ in recalled), labels, strict=True))
        return self._networks.union(parts, memory_recipe(seen[0]), images)


class GDumb:
    """One network for each task, trained at test on the task's share of real images, kept class by class. Not told the task, one
    network on all that is kept, as in its paper."""

    def __init__(self, stream: Stream, config: ContinualConfig, device: str = "cpu"):
        self.stream, self.config = stream, config
        self.buffer = Buffer(config.buffer.images, stream.shape, stream.tasks)
        self.place = _Place()
        self._store, self._epochs = self._begin()
        self._networks = _TaskNetworks(stream, config, device)
        self._kept: list[Part] = []

    def _begin(self) -> "tuple[Balanced | Everything, int]":
        """Where the images of the next task are kept, and how many passes are made over them."""
        share = self.buffer.share // self.buffer.sample
        draws = seeded(self.stream.seed, Purpose.DRAW, self.place.ended)
        return Balanced(share, draws), self.config.baselines.gdumb_epochs

    def observe(self, batch: Batch) -> None:
        self.place.observe(batch)
        self._store.add(batch)

    def end_task(self) -> None:
        task, baselines = self.place.ended, self.config.baselines
        self.place.end_task()
        kept, inner = self._store.all(), self.config.inner
        self._recipe = Recipe(inner.network, self._epochs, baselines.data_batch, baselines.data_lr, inner.momentum)
        part = self.stream.prepare(kept.images), local_labels(self.stream)[task, kept.labels]
        self._networks.train({task: part}, self._recipe)
        self._kept.append((part[0], kept.labels))
        self._store, self._epochs = self._begin()

    def predict(self, images: Tensor, task: int | None) -> Tensor:
        if task is None:
            self.place.check(0)
            return self._networks.union(self._kept, self._recipe, images)
        self.place.check(task)
        return self._networks.predict(images, task)


class AllData(GDumb):
    """The upper bound: one network for each task, on all of its images, many passes. It keeps what no other may."""

    def _begin(self) -> "tuple[Balanced | Everything, int]":
        return Everything(), self.config.baselines.all_epochs


class Online:
    """One network, by plain SGD on every batch as it comes; nothing is kept."""

    def __init__(self, stream: Stream, config: ContinualConfig, device: str = "cpu"):
        self.stream, self.config, self.device = stream, config, device
        self.network = Network(config.inner.network, stream.shape, stream.classes)
        self.params = self.network.fresh(network_seed(stream.seed, Purpose.FRESH), device)
        self.masks = stream.masks.to(device)
        self.lr = config.baselines.lr
        self.place, self.steps = _Place(), 0

    def observe(self, batch: Batch) -> None:
        self.place.observe(batch)
        for _ in range(self.config.baselines.glances):
            direction = self._direction(batch)
            self.params = {name: p - self.lr * direction[name] for name, p in self.params.items()}
            self.steps += 1

    def end_task(self) -> None:
        self.place.end_task()

    def predict(self, images: Tensor, task: int | None) -> Tensor:
        """Told the task, the logits of other tasks' classes are masked."""
        logits = _logits(self.network, self.params, images, self.stream, self.device)
        if task is not None:
            self.place.check(task)
            logits = logits.masked_fill(~self.masks[task], -torch.inf)
        return logits.argmax(1)

    def _direction(self, batch: Batch) -> Params:
        return self._gradient(batch)

    def _gradient(self, batch: Batch) -> Params:
        return grad(self._loss)(self.params, *self._prepared(batch))

    def _loss(self, params: Params, images: Tensor, labels: Tensor, masks: Tensor) -> Tensor:
        """Each image among the classes of its own task."""
        return F.cross_entropy(self.network.logits(params, images).masked_fill(~masks, -torch.inf), labels)

    def _prepared(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        images, labels, tasks = (part.to(self.device) for part in batch)
        return self.stream.prepare(images), labels, self.masks[tasks]

    def _generator(self) -> torch.Generator:
        return seeded(self.stream.seed, Purpose.DRAW, self.steps)


class Replay(Online):
    """Experience replay (ER): every step sees the incoming batch and as many samples of a reservoir over all tasks."""

    def __init__(self, stream: Stream, config: ContinualConfig, device: str = "cpu"):
        super().__init__(stream, config, device)
        self.buffer = Buffer(config.buffer.images, stream.shape, stream.tasks)
        self.reservoir = self._empty()
        self.batches = 0

    def _empty(self) -> Reservoir:
        draws = seeded(self.stream.seed, Purpose.DRAW, self.place.ended)
        return Reservoir(self.buffer.capacity, self.stream.shape, draws)

    def observe(self, batch: Batch) -> None:
        super().observe(batch)
        self.reservoir.add(batch)
        self.buffer.note(batch.task, self.batches, len(self.reservoir))
        self.batches += 1

    def _direction(self, batch: Batch) -> Params:
        kept = self.reservoir.draw(self.config.baselines.replay, self._generator())
        return self._gradient(Batch(*(torch.cat(parts) for parts in zip(batch, kept, strict=True))))


class AGem(Replay):
    """A-GEM: the gradient of the incoming batch, less its part against the gradient on samples of earlier tasks."""

    def __init__(self, stream: Stream, config: ContinualConfig, device: str = "cpu"):
        super().__init__(stream, config, device)
        self.lr = config.baselines.agem_lr

    def _direction(self, batch: Batch) -> Params:
        gradient = self._gradient(batch)
        earlier = self.reservoir.draw(self.config.baselines.agem_reference, self._generator(), lambda tasks: tasks != batch.task)
        if not len(earlier.labels):
            return gradient
        reference = self._gradient(earlier)
        product = sum((gradient[name] * g).sum() for name, g in reference.items())
        square = sum((g * g).sum() for g in reference.values())
        share = torch.clamp(torch.as_tensor(product), max=0) / torch.as_tensor(square).clamp_min(1e-12)
        return {name: g - share * reference[name] for name, g in gradient.items()}


class Ewc(Replay):
    """EWC: weights that earlier tasks need are held in place. The buffer holds samples of the current task alone, for the
    Fisher information at its end; the penalties of all tasks are one quadratic, of two vectors the size of the network,
    which nobody counts against the buffer."""

    def __init__(self, stream: Stream, config: ContinualConfig, device: str = "cpu"):
        super().__init__(stream, config, device)
        self.fisher = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self.pull = dict(self.fisher)  # sum over tasks of Fisher information times the weights at the task's end

    def _direction(self, batch: Batch) -> Params:
        strength = self.config.baselines.ewc_strength
        gradient = self._gradient(batch)
        return {n: g + strength * (self.fisher[n] * self.params[n] - self.pull[n]) for n, g in gradient.items()}

    def end_task(self) -> None:
        super().end_task()
        samples = self.reservoir.draw(len(self.reservoir), self._generator())
        images, labels, masks = (part[:, None] for part in self._prepared(samples))
        each = vmap(grad(self._loss), (None, 0, 0, 0))
        for some in zip(images.split(50), labels.split(50), masks.split(50), strict=True):
            for name, g in each(self.params, *some).items():
                found = (g**2).sum(0) / len(labels)
                self.fisher[name] = self.fisher[name] + found
                self.pull[name] = self.pull[name] + found * self.params[name]
        self.reservoir = self._empty()


KINDS: dict[str, Callable[[Stream, ContinualConfig, str], Learner]] = dict(
    zip(LEARNERS, (Compress, Compress, GDumb, Online, Replay, AGem, Ewc, AllData), strict=True)
)
