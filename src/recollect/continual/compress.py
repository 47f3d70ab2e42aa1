"""Compress: tasks distilled into memories while their batches stream by, one after another or side by side.

Tasks share nothing: everything random is drawn by seed, step and task (an unroll's length by the first two), so a task's
memory does not depend on which tasks were beside it. On a GPU the inner networks of all tasks are one batched unroll. No
network is ever trained on the stream.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

import recollect
from recollect import fast, unroll
from recollect.config import Recipe, to_json
from recollect.continual.buffer import Buffer, Reservoir, Sketch
from recollect.continual.config import ContinualConfig
from recollect.continual.streams import Batch, Stream
from recollect.data import augment
from recollect.devices import device_name
from recollect.distillation import BACK, JUMP, MOST_SKIPS, WILD
from recollect.distillation import _initialise as initialise
from recollect.errors import RecollectError
from recollect.fast import Compute, span
from recollect.fast.engine import Engine, Start
from recollect.header import Header
from recollect.memory import Memory, recall, usual_bases
from recollect.nets import Network, Shape
from recollect.seeds import Purpose, seeded

ADAM_BETA2, ADAM_EPSILON = 0.999, 1e-8


# --- sizes -------------------------------------------------------------------------------------------------------------


class Size(NamedTuple):
    """Of a task's memory."""

    bases: int
    matrices: int
    floats: int


def smaller(shape: Shape, times: int, name: str) -> Shape:
    """The shape of images that are so much smaller on each side."""
    channels, height, width = shape
    if times > min(height, width):
        raise RecollectError(f"{name} is {times} for images of {height}x{width}: give less")
    return channels, -(-height // times), -(-width // times)


def memory_size(config: ContinualConfig, shape: Shape, classes: int, share: int) -> Size:
    """What fits a task's share of the buffer (eqn 4)."""
    base = math.prod(smaller(shape, config.downsample, "downsample"))
    most = share // (base + classes)
    bases = config.bases or usual_bases(share, base, classes) or 1
    if bases > most:
        fits = f"at most {most} fit with one addressing matrix" if most else "not even one fits"
        raise RecollectError(
            f"{bases} bases do not fit a task's share of {share:,} floats: {fits}; "
            "take fewer bases, a larger buffer, fewer tasks or a larger downsample"
        )
    matrices = (share - bases * base) // (classes * bases)
    return Size(bases, matrices, bases * base + matrices * classes * bases)


def memory_sizes(stream: Stream, config: ContinualConfig) -> list[Size]:
    """Of every task's memory; refuses a buffer that cannot serve them."""
    share = Buffer(config.buffer, stream.shape, stream.tasks).share
    return [memory_size(config, stream.shape, len(classes), share) for classes in stream.task_classes]


def account(stream: Stream, config: ContinualConfig, task: int) -> Buffer:
    """The buffer as it is when a task begins: with the memories of those before it."""
    sample = math.prod(smaller(stream.shape, config.kept_downsample, "kept_downsample"))
    buffer = Buffer(config.buffer, stream.shape, stream.tasks, sample)
    for size in memory_sizes(stream, config)[:task]:
        buffer.store(size.floats)
    return buffer


def recall_recipe(config: ContinualConfig, recalled: int, classes: int) -> Recipe:
    """How a fresh network is trained on a recall: as the inner loop does it."""
    batch = min(config.inner_per_class * classes, recalled)
    steps = config.test_steps or config.inner_steps
    epochs = -(-steps // -(-recalled // batch))
    return Recipe(config.network, epochs, batch, config.inner_lr, config.inner_momentum, config.augment)


# --- the distillation --------------------------------------------------------------------------------------------------


class Unroller:
    """Metagradients of several inner networks, each with a recalled set and a query of its own: the one place where the
    engine is picked."""

    def __init__(self, network: Network, device: str, compute: Compute = "auto"):
        self.network = network
        self.engine = fast.fastest(network, device, compute) if device.startswith("cuda") else None
        self.passes = fast.any_network(network).passes
        self.spanned: dict[int, Engine] = {}
        """of so many bases"""
        self.room = True
        """for coordinates; where there is none, the other way may do with less, in pieces"""

    def __call__(
        self, starts: Sequence[Start], images: Tensor, labels: Tensor, query: tuple[Tensor, Tensor], bases: Tensor | None,
        longest: int, **options: Any,
    ) -> Tensor:  # fmt: skip
        """[S, N, C, H, W], [S, N] and ([S, Q, C, H, W], [S, Q]) -> dJ / d images, [S, N, C, H, W]; where it is worth while, in
        the span of bases [S, K, C, H, W]. `longest` is the longest unroll to come."""
        if bases is not None and self.room and not starts[0].augment:
            try:
                return self._in_coordinates(starts, images, labels, query, bases, longest=longest, **options)
            except torch.OutOfMemoryError:
                self.spanned.clear()
                self.room = False
        if self.engine:
            found = self.engine.together(starts, images, labels, query, longest=longest, **options, weights=False)
        else:
            found = [
                unroll.metagradient(
                    self.network.loss, start.params, images[k], labels[k], start.batches, (query[0][k], query[1][k]),
                    augment=start.augment, passes=self.passes, **options,
                )
                for k, start in enumerate(starts)
            ]  # fmt: skip
        return torch.stack([each.images for each in found])

    def _in_coordinates(
        self, starts: Sequence[Start], images: Tensor, labels: Tensor, query: tuple[Tensor, Tensor], bases: Tensor,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        count = bases.shape[1]
        if count not in self.spanned:
            self.spanned[count] = Engine(
                span.Spanned(self.network, count), self.engine.compute if self.engine else "fp32"
            )
        step = len(starts) if self.engine else 1  # one by one a CPU gives the same bytes, whoever is beside it
        places = [slice(first, first + step) for first in range(0, len(starts), step)]
        return torch.cat([
            span.by_images(
                self.spanned[count], starts[at], images[at], labels[at], (query[0][at], query[1][at]), bases[at], **options
            )
            for at in places
        ])  # fmt: skip


@lru_cache(maxsize=2)
def _unroller(network: str, shape: Shape, classes: int, device: str, compute: Compute) -> Unroller:
    """What a GPU has captured for it serves all tasks to come."""
    return Unroller(Network(network, shape, classes), device, compute)


class Compressor:
    """The memories of some tasks of a stream, distilled in step while their batches come.

    The tasks must have the same number of classes and batches. All tensors that change have the tasks in front, [G, ...].
    """

    def __init__(self, stream: Stream, config: ContinualConfig, tasks: Sequence[int], device: str = "cpu"):
        self.stream, self.config, self.tasks, self.device = stream, config, tuple(tasks), device
        alike = {(len(stream.task_classes[task]), stream.batches(task)) for task in tasks}
        if len(alike) != 1:
            raise ValueError("tasks side by side need the same numbers of classes and batches")
        (self.classes, self.batches), seed = alike.pop(), stream.seed
        self.augmentation = augment.parse(config.augment)
        self.size = memory_sizes(stream, config)[tasks[0]]
        self.buffers = [account(stream, config, task) for task in tasks]
        sample = self.buffers[0].sample
        self.sketch = Sketch(stream.shape, sample, device) if config.kept_downsample > 1 else None
        """how samples are kept, where not as they are"""
        shape = (sample,) if self.sketch else stream.shape
        self.reservoirs = [
            Reservoir(buffer.capacity, shape, seeded(seed, Purpose.KEEP, task))
            for task, buffer in zip(tasks, self.buffers, strict=True)
        ]
        self.local = local_labels(stream)
        self.unroll = _unroller(config.network, stream.shape, self.classes, device, config.compute)
        self.learned = [torch.stack(parts).to(device) for parts in zip(*map(self._first, tasks), strict=True)]
        """bases [G, K, c, h, w] and addressing [G, r, d_y, K]"""
        self.average = [tensor.clone() for tensor in self.learned]
        self.mean, self.square = ([torch.zeros_like(tensor) for tensor in self.learned] for _ in range(2))
        self.norm, self.taken, self.skipped, self.not_finite = (
            torch.zeros(len(tasks), device=device) for _ in range(4)
        )
        """of each task: running mean of the gradient's norm; outer steps taken, skipped, and in a row without a finite
        gradient (one that is only large will be usual some day)"""
        needed = -(-self.size.matrices * self.classes // config.batch)
        self.waits = min(needed, self.batches // 2) if config.init == "samples" else 0
        """batches that only fill the reservoirs, before memories begin as samples"""
        self.everything = torch.arange(self.classes * self.size.matrices, device=device).expand(config.inner_steps, -1)
        self.step, self.seen = 0, 0  # outer steps; batches

    def _first(self, task: int) -> tuple[Tensor, Tensor]:
        bases = torch.empty(self.size.bases, *smaller(self.stream.shape, self.config.downsample, "downsample"))
        addressing = torch.empty(self.size.matrices, self.classes, self.size.bases)
        init = "kaiming" if self.config.init == "samples" else self.config.init
        initialise(bases, addressing, init, seeded(self.stream.seed, Purpose.TASK_START, task))
        return bases, addressing

    def observe(self, batches: Sequence[Batch]) -> None:
        """One incoming batch of every task: outer steps on it and on what the reservoirs hold, then it may be kept."""
        if self.config.init == "samples" and self.seen == self.waits:
            self._begin_as_samples(batches)
        for _ in range(self.config.outer_per_batch if self.seen >= self.waits else 0):
            self._outer_step(batches)
        settled = not self.config.outer_per_batch and self.seen >= self.waits  # nothing is left to learn from samples
        for batch, reservoir, buffer in zip(batches, self.reservoirs, self.buffers, strict=True):
            if settled:
                reservoir.clear()
            else:
                reservoir.add(batch._replace(images=self.sketch.of(batch.images)) if self.sketch else batch)
            buffer.note(batch.task, self.seen, len(reservoir))
        self.seen += 1
        hopeless = (self.not_finite >= MOST_SKIPS).nonzero().flatten().tolist()
        if hopeless:
            raise RecollectError(
                f"the outer gradient of task {self.tasks[hopeless[0]]} was not finite {MOST_SKIPS} times in a row: lower "
                f"inner_lr ({self.config.inner_lr}), outer_lr ({self.config.outer_lr}) or inner_steps ({self.config.inner_steps})"
            )

    def _begin_as_samples(self, batches: Sequence[Batch]) -> None:
        """Make every memory recall the samples that there are, each class its own, as nearly as its bases allow. Random is what
        is left: bases beyond the number of samples, and addressing of a class of which none has come."""
        bases, addressing = self.learned
        for number, (batch, reservoir) in enumerate(zip(batches, self.reservoirs, strict=True)):
            draws = seeded(self.stream.seed, Purpose.TASK_START, batch.task)
            pixels, labels = self._samples(batch, reservoir, len(reservoir), draws)
            found, coefficients = described(self.stream.preprocess(pixels).cpu(), bases[number].shape)
            bases[number, : len(found)] = found.to(self.device)
            for label in labels.unique().tolist():
                rows = (labels == label).nonzero().flatten()
                chosen = coefficients[rows[torch.arange(self.size.matrices) % len(rows)]]
                addressing[number, :, label] = F.pad(chosen, (0, self.size.bases - len(found))).to(self.device)
        self.average = [tensor.clone() for tensor in self.learned]

    def _outer_step(self, batches: Sequence[Batch]) -> None:
        """Lines 4 to 16 of Algorithm 1, for all tasks."""
        config, copies, length = self.config, self.config.networks_per_step, self._length()
        starts = [self._start(task, copy, length) for task in self.tasks for copy in range(copies)]
        pixels, truth = (part.repeat_interleave(copies, 0) for part in self._query(batches))
        bases, addressing = (tensor.requires_grad_() for tensor in self.learned)
        queries = torch.eye(self.classes, device=self.device)
        recalled = vmap(recall, (0, 0, None, None))(
            bases, addressing, queries, self.stream.shape[1:]
        )  # [G, N, C, H, W]
        labels = torch.arange(self.classes, device=self.device).repeat_interleave(self.size.matrices)
        by_images = self.unroll(
            starts, recalled.detach().repeat_interleave(copies, 0), labels.expand(len(starts), -1), (pixels, truth),
            self._whole_bases(), config.inner_steps, lr=config.inner_lr, momentum=config.inner_momentum,
            bridge=config.bridge, window=config.window,
        )  # fmt: skip
        gradients = torch.autograd.grad(recalled, (bases, addressing), by_images.unflatten(0, (-1, copies)).mean(1))
        with torch.no_grad():
            self._update(gradients)
        self.step += 1

    def _whole_bases(self) -> Tensor | None:
        """As large as images, for every inner network, where these are unrolled in coordinates of theirs: [S, K, C, H, W]"""
        if not span.pays(self.unroll.network, self.size.bases):
            return None
        one = torch.eye(self.size.bases, device=self.device)
        whole = vmap(lambda bases: recall(bases, one[None], one, self.stream.shape[1:]))(self.learned[0].detach())
        return whole.repeat_interleave(self.config.networks_per_step, 0)

    def _length(self) -> int:
        """Inner steps of this outer step: the same for all tasks, whoever is beside them."""
        if self.config.window is None or self.config.window_place == "late":
            return self.config.inner_steps
        generator = seeded(self.stream.seed, Purpose.LENGTH, self.step)
        return int(torch.randint(self.config.window, self.config.inner_steps + 1, (), generator=generator))

    def _start(self, task: int, copy: int, steps: int) -> Start:
        """A fresh network, what each of its inner steps sees of the recalled images, and how augmented. Where that is not all,
        none comes again before the others of its class: metagradients vary less than if each step drew its own."""
        matrices, each = self.size.matrices, self.config.inner_per_class
        generator = seeded(self.stream.seed, Purpose.INNER, task, self.step, copy)
        params = self.unroll.network.drawn(int(torch.randint(2**62, (), generator=generator)), self.device)
        rows = self.everything[:steps]  # [T, B]
        if each < matrices:
            passes = torch.rand(self.classes, -(-steps * each // matrices), matrices, generator=generator).argsort(-1)
            picks = passes.flatten(1)[:, : steps * each] + torch.arange(self.classes)[:, None] * matrices
            rows = picks.view(self.classes, steps, each).transpose(0, 1).flatten(1)
        if not self.augmentation:
            return Start(params, rows)
        drawn = [augment.draw(self.augmentation, rows.shape[1], generator) for _ in range(steps)]
        return Start(params, rows, augment.Schedule.of(drawn))

    def _query(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """The incoming batch and a replay, for each task: [G, Q, C, H, W] and labels [G, Q]. Where there is less than Q, the
        same again: shapes never change, and each image counts about as much as any other."""
        images, labels = [], []
        for batch, reservoir in zip(batches, self.reservoirs, strict=True):
            draws = seeded(self.stream.seed, Purpose.REPLAY, batch.task, self.step)
            seen, truth = self._samples(batch, reservoir, self.config.replay, draws)
            places = torch.arange(self.config.batch + self.config.replay) % len(truth)
            images.append(seen[places.to(self.device)])
            labels.append(truth[places])
        return self.stream.preprocess(torch.stack(images)), torch.stack(labels).to(self.device)

    def _samples(
        self, batch: Batch, reservoir: Reservoir, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """A batch and up to `count` of a reservoir: pixels on the device, and their places among the task's classes."""
        kept = reservoir.draw(count, generator)
        replayed = self.sketch.images(kept.images, batch.images.dtype) if self.sketch else kept.images
        truth = torch.cat([self.local[part.tasks, part.labels] for part in (batch, kept)])
        return torch.cat([batch.images.to(self.device), replayed.to(self.device)]), truth

    def _update(self, gradients: Sequence[Tensor]) -> None:
        """Clip, step and average, each task by itself; a task without a usable gradient goes back towards its average."""
        config = self.config
        norm = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)  # [G]
        usual, good = torch.where(self.norm > 0, self.norm, math.inf), norm.isfinite()  # before the first, all is usual
        mean = 0.9 * self.norm + 0.1 * torch.minimum(norm, JUMP * self.norm)
        self.norm = torch.where(good, torch.where(self.norm > 0, mean, norm), self.norm)
        limit = torch.full_like(norm, config.clip_norm or math.inf)
        if config.clip_running:
            good &= norm <= WILD * usual
            limit = torch.minimum(limit, config.clip_running * usual)
        scale = torch.where(norm > limit, limit / norm, 1.0)
        self.taken += good
        self.skipped += ~good
        self.not_finite = torch.where(norm.isfinite(), 0.0, self.not_finite + 1)
        decay = ((1 + self.taken) / (10 + self.taken)).clamp(max=config.ema)  # a short memory while there is little
        for number, gradient in enumerate(gradients):
            tensor = self.learned[number].detach()
            moved = self._moved(number, gradient * _like(scale, gradient), _like(good, gradient))
            average, fine = self.average[number], _like(good, tensor)
            self.learned[number] = torch.where(fine, tensor - self._rate() * moved, tensor.lerp(average, BACK))
            self.average[number] = torch.where(
                fine, average.lerp(self.learned[number], _like(1 - decay, tensor)), average
            )

    def _moved(self, number: int, gradient: Tensor, good: Tensor) -> Tensor:
        """The direction of SGD with momentum, or of Adam; its averages change only where the gradient is good."""
        beta = self.config.outer_momentum
        fresh = 1.0 if self.config.outer_optimiser == "sgd" else 1 - beta
        self.mean[number] = torch.where(good, beta * self.mean[number] + fresh * gradient, self.mean[number])
        if self.config.outer_optimiser == "sgd":
            return self.mean[number]
        square = ADAM_BETA2 * self.square[number] + (1 - ADAM_BETA2) * gradient**2
        self.square[number] = torch.where(good, square, self.square[number])
        taken = _like(self.taken, gradient).clamp(min=1)
        root = (self.square[number] / (1 - ADAM_BETA2**taken)).sqrt()
        return self.mean[number] / (1 - beta**taken) / (root + ADAM_EPSILON)

    def _rate(self) -> float:
        if self.config.outer_schedule == "constant":
            return self.config.outer_lr
        steps = self.config.outer_per_batch * (self.batches - self.waits)
        return self.config.outer_lr * 0.5 * (1 + math.cos(math.pi * self.step / steps))

    def memories(self) -> list[Memory]:
        """What has been distilled, task by task; with it the real samples are gone."""
        found = []
        for number, (task, buffer) in enumerate(zip(self.tasks, self.buffers, strict=True)):
            bases, addressing = (tensor[number].cpu().clone() for tensor in self.average)
            memory = Memory(bases, addressing, self._header(task, int(self.taken[number]), int(self.skipped[number])))
            if not (bases.isfinite().all() and addressing.isfinite().all()):
                raise RecollectError(
                    f"the memory of task {task} is not finite: lower outer_lr ({self.config.outer_lr})"
                )
            memory.fitted = self.stream.preprocess
            found.append(memory)
            buffer.store(memory.floats)
            buffer.note(task, self.seen, 0)
        return found

    def _header(self, task: int, steps: int, skipped: int) -> Header:
        stream, config = self.stream, self.config
        classes, share = stream.task_classes[task], self.buffers[0].share
        recalled = self.size.matrices * self.classes
        return Header(
            dataset=f"task {task} of {stream.tasks} of {stream.name} ({config.kind})",
            class_names=[stream.class_names[label] for label in classes],
            image_shape=list(stream.shape),
            downsample=config.downsample,
            preprocessing=stream.preprocess.to_json(),
            recipe=to_json(recall_recipe(config, recalled, self.classes)),
            made={
                "config": to_json(config),
                "task": task,
                "labels": list(classes),
                "angle": stream.angles[task] if stream.angles else None,
                "seed": stream.seed,
                "steps": steps,
                "skipped": skipped,
                "recollect": recollect.__version__,
                "torch": torch.__version__,
                "device": device_name(self.device),
            },
            budget={
                "name": f"1/{stream.tasks} of a buffer of {config.buffer} images",
                "images_per_class": max(1, config.buffer // (stream.tasks * self.classes)),
                "numbers": share,
                "used": self.size.floats,
                "counted": "bases and addressing",
            },
        )

    def to_dict(self) -> dict[str, Any]:
        """All that changes, for a checkpoint: a stream does not come twice, so the samples are in it."""
        names = ("learned", "average", "mean", "square", "norm", "taken", "skipped", "not_finite", "step", "seen")
        state = {name: getattr(self, name) for name in names}
        state["learned"] = [tensor.detach() for tensor in self.learned]
        kept = {"reservoirs": [r.to_dict() for r in self.reservoirs], "logs": [b.log for b in self.buffers]}
        return {"tasks": list(self.tasks)} | state | kept

    def load(self, saved: dict[str, Any]) -> None:
        for name in ("learned", "average", "mean", "square"):
            setattr(self, name, [tensor.to(self.device) for tensor in saved[name]])
        for name in ("norm", "taken", "skipped", "not_finite"):
            setattr(self, name, saved[name].to(self.device))
        self.step, self.seen = saved["step"], saved["seen"]
        for reservoir, buffer, samples, log in zip(
            self.reservoirs, self.buffers, saved["reservoirs"], saved["logs"], strict=True
        ):
            reservoir.load(samples)
            buffer.log = log


def described(images: Tensor, bases: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Up to K bases [K, c, h, w] and coefficients [N, K] that recall images [N, c, H, W] with the least squared error: singular
    vectors of what such bases can recall of them. Component by component, both have the same scale."""
    most, _, *small = bases
    units = torch.eye(math.prod(small))
    recalled = recall(units.view(-1, 1, *small), units[None], units, (images.shape[-2], images.shape[-1]))
    span, mixed = torch.linalg.qr(
        recalled.flatten(1).double().T
    )  # pixels of a base are recalled as span @ mixed @ pixels
    within = (images.flatten(2).double() @ span).flatten(1)
    left, sizes, right = torch.linalg.svd(within, full_matrices=False)
    scales = (sizes[:most] / math.sqrt(within.numel())).sqrt()
    vectors = right[:most].unflatten(1, (-1, len(units))) * math.sqrt(within.shape[1])
    found = torch.linalg.solve(mixed, vectors.mT).mT * scales[:, None, None]
    coefficients = left[:, :most] * math.sqrt(len(within)) * scales
    return found.reshape(-1, *bases[1:]).float(), coefficients.float()


def _like(values: Tensor, tensor: Tensor) -> Tensor:
    """[G] -> [G, 1, ...], to go with a tensor [G, ...]."""
    return values.view(-1, *[1] * (tensor.ndim - 1))


def local_labels(stream: Stream) -> Tensor:
    """[tasks, classes]: a label of the stream -> its place among the task's own."""
    local = torch.zeros(stream.tasks, stream.classes, dtype=torch.long)
    for task, labels in enumerate(stream.task_classes):
        local[task, list(labels)] = torch.arange(len(labels))
    return local
