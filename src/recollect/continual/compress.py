"""Compress: tasks distilled into memories while their batches stream by, one after another or side by side.

Tasks share nothing: everything random is drawn by seed, step and task (an unroll's length by the first two), so a task's
memory does not depend on which tasks were beside it. The objective and the outer step are those of every distillation.
No network is ever trained on the stream.
"""

import warnings
from collections.abc import Sequence
from functools import lru_cache, partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from recollect import outer, starts
from recollect.budget import Budget
from recollect.config import InnerLoop, Recipe, to_json
from recollect.continual.buffer import Buffer, Reservoir, Sketch
from recollect.continual.config import ContinualConfig
from recollect.continual.streams import Batch, Stream
from recollect.data import augment
from recollect.distiller import counted, made
from recollect.errors import RecollectError
from recollect.fast import span
from recollect.header import Header
from recollect.memory import Memory, recall
from recollect.nets import Network, Shape
from recollect.objectives import OBJECTIVES, Chance, Examples, Objective, Problem, SideBySide, gradients
from recollect.outer import MOST_SKIPS, State
from recollect.queries import Labels
from recollect.seeds import Purpose, seeded


def task_budget(stream: Stream, config: ContinualConfig, task: int) -> Budget:
    """A task's share of the buffer."""
    images, tasks, classes = config.buffer.images, stream.tasks, len(stream.task_classes[task])
    per_class = max(1, images // (tasks * classes))
    share = Buffer(images, stream.shape, tasks).share
    called = f"1/{tasks} of a buffer of {images} images"
    return Budget(per_class, classes, stream.shape, config.memory.downsample, share=share, called=called)


def account(stream: Stream, config: ContinualConfig, task: int) -> Buffer:
    """The buffer as it is when a task begins: with the memories of those before it. Refuses one that cannot serve them."""
    buffer = Buffer(config.buffer.images, stream.shape, stream.tasks, config.buffer.kept_downsample)
    for earlier in range(task):
        budget = task_budget(stream, config, earlier)
        bases, matrices = budget.sizes(config.memory)
        addressing = matrices * budget.classes * bases if config.memory.addressing == "learned" else 0
        buffer.store(bases * budget.base_numbers + addressing)
    return buffer


def recall_recipe(config: ContinualConfig, recalled: int, classes: int) -> Recipe:
    """How a fresh network is trained on a recall: as the inner loop does it."""
    inner = config.inner
    batch = min((inner.per_class or recalled) * classes, recalled)
    steps = config.buffer.test_steps or inner.steps
    epochs = -(-steps // -(-recalled // batch))
    return Recipe(inner.network, epochs, batch, inner.lr, inner.momentum, inner.augment)


@lru_cache(maxsize=2)
def make_objective(
    name: str, inner: InnerLoop, shape: Shape, classes: int, device: str, compute: str, thread: int
) -> tuple[Network, Objective]:
    """What a GPU has captured for it serves all tasks to come, those of one thread: an engine works for one at a time."""
    network = Network(inner.network, shape, classes)
    return network, OBJECTIVES[name](network, inner, device, compute)


class Compressor:
    """The memories of some tasks of a stream, distilled in step while their batches come.

    The tasks must have the same number of classes and batches.
    """

    def __init__(self, stream: Stream, config: ContinualConfig, tasks: Sequence[int], device: str = "cpu"):
        self.stream, self.config, self.tasks, self.device = stream, config, tuple(tasks), device
        alike = {(len(stream.task_classes[task]), stream.batches(task)) for task in tasks}
        if len(alike) != 1:
            raise ValueError("tasks side by side need the same numbers of classes and batches")
        self.classes, self.batches = alike.pop()
        self.augmentation = augment.parse(config.inner.augment)
        self.budget = task_budget(stream, config, tasks[0])
        self.bases, self.matrices = self.budget.sizes(config.memory)
        self.buffers = [account(stream, config, task) for task in tasks]
        sample = self.buffers[0].sample
        self.sketch = Sketch(stream.shape, sample, device) if config.buffer.kept_downsample > 1 else None
        shape = (sample,) if self.sketch else stream.shape
        draws = [seeded(stream.seed, Purpose.KEEP, task) for task in tasks]
        self.reservoirs = [Reservoir(b.capacity, shape, drawn) for b, drawn in zip(self.buffers, draws, strict=True)]
        self.local = local_labels(stream)
        given = config.outer.objective, config.inner, stream.shape, self.classes, device, config.compute
        self.network, objective = make_objective(*given, get_ident())
        self.objectives = [objective] * len(tasks)
        """one for all tasks if it takes them side by side; else each has its own, whose state is the task's"""
        if not isinstance(objective, SideBySide):
            self.objectives = [make_objective.__wrapped__(*given, get_ident())[1] for _ in tasks]
        self.states = [self._begin(task) for task in tasks]
        self.queries = Labels(self.classes).vectors({}, torch.arange(self.classes, device=device), torch.empty(0))
        needed = -(-self.matrices * self.classes // config.stream.batch)
        # batches that only fill the reservoirs, before memories begin as samples
        self.waits = min(needed, self.batches // 2) if config.memory.init == "samples" else 0
        self.step, self.seen = 0, 0  # outer steps; batches

    def _begin(self, task: int) -> State:
        sizes = self.config.memory
        bases, addressing = starts.fresh(sizes, self.budget, seeded(self.stream.seed, Purpose.TASK_START, task))
        addressing = addressing.to(self.device).requires_grad_(sizes.addressing == "learned")
        return outer.begin(bases.to(self.device).requires_grad_(), addressing, {}, self.config.outer)

    def observe(self, batches: Sequence[Batch]) -> None:
        """One incoming batch of every task: outer steps on it and on what the reservoirs hold, then it may be kept."""
        steps = self.config.buffer.outer_per_batch
        if self.config.memory.init == "samples" and self.seen == self.waits:
            self._begin_as_samples(batches)
        for _ in range(steps if self.seen >= self.waits else 0):
            self._outer_step(batches)
        settled = not steps and self.seen >= self.waits  # nothing is left to learn from samples
        for batch, reservoir, buffer in zip(batches, self.reservoirs, self.buffers, strict=True):
            if settled:
                reservoir.seen = 0
            else:
                reservoir.add(batch._replace(images=self.sketch.of(batch.images)) if self.sketch else batch)
            buffer.note(batch.task, self.seen, len(reservoir))
        self.seen += 1
        for task, state in zip(self.tasks, self.states, strict=True):
            if state.not_finite >= MOST_SKIPS:
                raise RecollectError(
                    f"the outer gradient of task {task} was not finite {MOST_SKIPS} times in a row: lower inner_lr "
                    f"({self.config.inner.lr}), outer_lr ({self.config.outer.lr}) or inner_steps ({self.config.inner.steps})"
                )

    @torch.no_grad()
    def _begin_as_samples(self, batches: Sequence[Batch]) -> None:
        """Make every memory recall the samples that there are, each class its own, as nearly as its bases allow."""
        for state, batch, reservoir in zip(self.states, batches, self.reservoirs, strict=True):
            draws = seeded(self.stream.seed, Purpose.TASK_START, batch.task)
            pixels, labels = self._samples(batch, reservoir, len(reservoir), draws)
            images = self.stream.prepare(pixels).cpu()
            one_hot = self.config.memory.addressing == "one-hot"
            starts.begin_as_samples(state.bases, state.addressing, images, labels, one_hot)
            outer.forget(state)

    def _outer_step(self, batches: Sequence[Batch]) -> None:
        """Lines 4 to 16 of Algorithm 1, for all tasks."""
        labels = torch.arange(self.classes).repeat_interleave(self.matrices)
        recalled = [recall(state.bases, state.addressing, self.queries, self.stream.shape[1:]) for state in self.states]
        problems = [
            Problem(Examples(images.detach(), labels.to(self.device), self._span(state)), *self._drawn(place, batch, labels))
            for place, (state, images, batch) in enumerate(zip(self.states, recalled, batches, strict=True))
        ]
        steps = self.config.buffer.outer_per_batch * (self.batches - self.waits)
        values = gradients(self.objectives, problems)
        for task, state, images, found in zip(self.tasks, self.states, recalled, values, strict=True):
            by_learned = torch.autograd.grad(images, state.learned, found.images)
            line = outer.advance(state, float(found.value), by_learned, self.config.outer, steps)
            if line["loss"] is None and outer.is_round(state.skipped):
                self._complain(task, state)
        self.step += 1

    def _span(self, state: State) -> Tensor | None:
        """The bases as large as images, where an unroll in coordinates of theirs pays: [K, C, H, W]"""
        if not span.pays(self.network, self.bases):
            return None
        units = torch.eye(self.bases, device=self.device)
        return recall(state.bases.detach(), units[None], units, self.stream.shape[1:])

    def _drawn(self, place: int, batch: Batch, labels: Tensor) -> tuple[Examples, Any]:
        """Real images and all else that is random in a task's outer step. Where there are fewer images than usual, the same
        again: shapes never change, and each image counts about as much as any other."""
        seed, config = self.stream.seed, self.config
        replaying = seeded(seed, Purpose.REPLAY, batch.task, self.step)
        pixels, truth = self._samples(batch, self.reservoirs[place], config.buffer.replay, replaying)
        places = torch.arange(config.stream.batch + config.buffer.replay) % len(truth)
        images = self.stream.prepare(pixels[places.to(self.device)])
        shared = augment.draw_shared(self.augmentation, replaying) if config.inner.augment_scope == "outer" else {}
        network = partial(seeded, seed, Purpose.INNER, batch.task, self.step)
        chance = Chance(network, seeded(seed, Purpose.LENGTH, self.step), shared)
        real = Examples(augment.apply(images, shared), truth[places].to(self.device))
        return real, self.objectives[place].draw(labels, chance)

    def _samples(self, batch: Batch, reservoir: Reservoir, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A batch and up to `count` of a reservoir: pixels on the device, and their places among the task's classes."""
        kept = reservoir.draw(count, generator)
        replayed = self.sketch.images(kept.images, batch.images.dtype) if self.sketch else kept.images
        truth = torch.cat([self.local[part.tasks, part.labels] for part in (batch, kept)])
        return torch.cat([batch.images.to(self.device), replayed.to(self.device)]), truth

    def memories(self) -> list[Memory]:
        """What has been distilled, task by task; with it the real samples are gone."""
        for task, state in zip(self.tasks, self.states, strict=True):
            self._complain(task, state)
        found = [self._memory(task, state) for task, state in zip(self.tasks, self.states, strict=True)]
        for task, memory, buffer in zip(self.tasks, found, self.buffers, strict=True):
            buffer.store(memory.floats)
            buffer.note(task, self.seen, 0)
        return found

    def _memory(self, task: int, state: State) -> Memory:
        stream, config, classes = self.stream, self.config, self.stream.task_classes[task]
        bases, addressing = (tensor.cpu().clone() for tensor in state.average)
        if not (bases.isfinite().all() and addressing.isfinite().all()):
            raise RecollectError(f"the memory of task {task} is not finite: lower outer_lr ({config.outer.lr})")
        one_hot = config.memory.addressing == "one-hot"
        drawn = {"task": task, "labels": list(classes), "angle": stream.angles[task] if stream.angles else None}
        header = Header(
            dataset=f"task {task} of {stream.tasks} of {stream.name} ({config.stream.kind})",
            class_names=[stream.class_names[label] for label in classes],
            image_shape=list(stream.shape),
            downsample=config.memory.downsample,
            addressing=config.memory.addressing,
            preprocessing=stream.preprocess.to_json(),
            recipe=to_json(recall_recipe(config, self.matrices * self.classes, self.classes)),
            made=made(config, state, stream.seed, self.device) | drawn,
            budget=counted(self.budget, bases, addressing, one_hot),
        )
        memory = Memory(bases, addressing.to(torch.uint8) if one_hot else addressing, header)
        memory.fitted = stream.preprocess
        return memory

    def _complain(self, task: int, state: State) -> None:
        if words := outer.complaint(state, self.config.inner.lr):
            warnings.warn(f"task {task}: {words} (--inner-lr)", stacklevel=2)

    def to_dict(self) -> dict[str, Any]:
        """All that changes, for a checkpoint: a stream does not come twice, so the samples are in it."""
        kept = {"reservoirs": [r.to_dict() for r in self.reservoirs], "logs": [b.log for b in self.buffers]}
        states = [state.to_dict() | {"objective": own.to_dict()} for state, own in zip(self.states, self.objectives, strict=True)]
        return {"tasks": list(self.tasks), "step": self.step, "seen": self.seen, "states": states} | kept

    def load(self, saved: dict[str, Any]) -> None:
        self.step, self.seen = map(int, (saved["step"], saved["seen"]))
        for place in range(len(self.tasks)):
            self.states[place].load(saved["states"][place])
            self.objectives[place].load(saved["states"][place].get("objective", {}))
            self.reservoirs[place].load(saved["reservoirs"][place])
            self.buffers[place].log = saved["logs"][place]


def local_labels(stream: Stream) -> Tensor:
    """[tasks, classes]: a label of the stream -> its place among the task's own."""
    local = torch.zeros(stream.tasks, stream.classes, dtype=torch.long)
    for task, labels in enumerate(stream.task_classes):
        local[task, list(labels)] = torch.arange(len(labels))
    return local
