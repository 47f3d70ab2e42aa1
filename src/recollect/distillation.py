"""Algorithm 1: repeat { recall, unroll the inner loop, metagradient, outer step }, with checkpoints and resume.

Every outer step draws from a generator of its own, seeded by (seed, step): a resumed run needs no generator's state, and
ends in the bytes of one that was never interrupted. Only `images.train` is looked at (and `validation`, if told to).
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import recollect
from recollect import fast, unroll
from recollect.config import DistillConfig, Recipe, check, to_json
from recollect.data import augment
from recollect.data.images import Images, Split
from recollect.data.preprocess import Preprocess
from recollect.devices import device_name, find_device
from recollect.errors import RecollectError
from recollect.fast.engine import Start
from recollect.fast.train import train
from recollect.files import sha256
from recollect.header import Header
from recollect.memory import PRECISIONS, Budget, Memory, encode, encoder_network, one_hot_addressing, recall
from recollect.nets import Constructor, Network, Params, constructor, threads_for
from recollect.runs import Run, check_same, load_checkpoint, save_checkpoint
from recollect.seeds import Purpose, network_seed, seeded

ZCA_DATASETS = ("svhn", "cifar10", "cifar100")
ENCODER = "convnet"  # makes query vectors of pictures
MOST_SKIPS = 20  # outer steps in a row without a usable gradient before a run stops; in a stream, without a finite one
WILD = 20.0  # times its running norm: an outer gradient larger than that came from an inner loop that diverged
JUMP = 2.0  # times itself: more than that a single gradient does not count in the running norm
BACK = 0.2  # of the way back to the average, where there is no usable gradient

Progress = Callable[[dict[str, Any]], None]


class Stopped(Exception):
    """A run that was told to stop, and saved first. `signal` is SIGINT or SIGTERM."""

    def __init__(self, number: int, folder: Path, step: int):
        super().__init__(number, folder, step)  # what it is made of, so that it can come from another process
        self.signal = number

    def __str__(self) -> str:
        _, folder, step = self.args
        return f"stopped after outer step {step}: continue with recollect resume {folder}"


def resolve(config: DistillConfig, images: Images) -> DistillConfig:
    """The same config with every "auto" and default decided for these images; refuses what cannot be."""
    check(config)
    augment.parse(config.augment)
    augment.parse(config.encoder_augment)
    if not config.network.startswith("custom "):
        constructor(config.network)
    classes = images.classes
    most = int(training_split(images, config).labels.bincount().max())
    if config.images_per_class > most:
        raise RecollectError(
            f"images_per_class is {config.images_per_class}, but no class has more than {most}: give fewer"
        )
    if config.start:
        config = _sizes_of_start(config, _start(config, images))
    bases, matrices = _sizes(config, images)
    ways, per_class = config.classes_per_step, matrices
    if config.query == "images":
        _check_pictures(config, images)
        ways, per_class = ways or min(5, classes), matrices * queries_per_class(config)
    else:
        _check_labels(config)
    inner = min(10, per_class) if config.inner_per_class is None else config.inner_per_class
    if inner > per_class:
        raise RecollectError(
            f"inner_per_class is {inner}, but each class recalls only {per_class} images: give at most {per_class}"
        )
    if config.classes_per_step is not None and config.classes_per_step > classes:
        raise RecollectError(f"classes_per_step is {config.classes_per_step}, but there are {classes} classes")
    preprocess = config.preprocess
    if preprocess == "auto":
        preprocess = "zca" if images.name in ZCA_DATASETS else "normalise"
    device = find_device(config.device)
    fast.check(config.compute, device)
    decided = {"bases": bases, "matrices": matrices, "inner_per_class": inner, "classes_per_step": ways}
    return replace(config, **decided, preprocess=preprocess, device=device)


def _sizes_of_start(config: DistillConfig, start: Memory) -> DistillConfig:
    """The same config with the sizes of the memory that the run goes on from."""
    own = {"bases": len(start.bases), "matrices": len(start.addressing)}
    given = {name: getattr(config, name) for name in own if getattr(config, name) is not None}
    if any(given[name] != own[name] for name in given):
        raise RecollectError(f"{config.start} has {own}, which cannot become {given}: leave them out, or start afresh")
    return replace(config, **(own if config.addressing == "learned" else {}))


def _sizes(config: DistillConfig, images: Images) -> tuple[int, int]:
    """Bases, and images that each query recalls."""
    budget = _budget(config, images)
    if config.addressing == "one-hot":
        bases = budget.per_class() * images.classes
        if config.bases not in (None, bases):
            raise RecollectError(f"bases is {config.bases}, but one-hot addressing has {bases} here: leave it out")
        return bases, budget.per_class()
    bases = config.bases or (budget.bases(config.matrices) if config.matrices else budget.default_bases())
    most = budget.matrices(bases)
    if config.matrices is not None and config.matrices > most:
        raise RecollectError(
            f"matrices is {config.matrices}, but only {most} fit beside {bases} bases: give fewer of either"
        )
    return bases, config.matrices or most


def _check_labels(config: DistillConfig) -> None:
    """Refuse what only a memory that is asked with pictures can have."""
    for name in ("encoder_epochs", "encoder_augment", "query_form"):
        if (value := getattr(config, name)) != getattr(DistillConfig, name):
            raise RecollectError(
                f"{name} is {value}, and a memory that is asked with labels has no encoder: leave it out, or give query images"
            )


def queries_per_class(config: DistillConfig) -> int:
    """A label; each picture of a class; or all of them together."""
    return config.shots if config.query == "images" and config.query_form == "unit" else 1


def _check_pictures(config: DistillConfig, images: Images) -> None:
    """Refuse what a memory that is asked with pictures cannot have."""
    if config.addressing == "one-hot":
        raise RecollectError("one-hot addressing answers labels alone: leave it out, or --query images")
    least = int(training_split(images, config).labels.bincount(minlength=images.classes).min())
    if least <= config.shots:
        raise RecollectError(f"shots is {config.shots}, but a class has only {least} images: give at most {least - 1}")
    if config.encoder_epochs and config.query_size < images.classes:
        raise RecollectError(
            f"query_size is {config.query_size}, too small for an encoder that learns to name {images.classes} classes: "
            f"give {images.classes} or more, or no encoder_epochs"
        )


def _start(config: DistillConfig, images: Images) -> Memory:
    """The memory that a run goes on from, if it is of these images and settings. One of labels can go on with pictures:
    their chances are labels that are not sure."""
    memory = Memory.load(Path(config.start or ""))
    query, form = ("images" if memory.encoder else "labels"), memory.header.query.get("form", "unit")
    if memory.encoder and config.encoder_epochs:
        raise RecollectError(f"{config.start} has an encoder that has learnt: leave out encoder_epochs")
    if query == "labels" and config.query == "images":
        alike = (config.query_form, config.query_size) == ("chances", len(memory.class_names))
        if not (alike and config.encoder_epochs):
            raise RecollectError(
                f"{config.start} is asked with labels: to go on from it with pictures, give query_form chances, query_size "
                f"{len(memory.class_names)}, and encoder_epochs (15) to learn the labels in"
            )
        query, form = config.query, config.query_form
    for what, theirs, ours in (
        ("classes", memory.class_names, images.class_names),
        ("image shape", memory.image_shape, images.shape),
        ("downsample", memory.header.downsample, config.downsample),
        ("addressing", memory.header.addressing, config.addressing),
        ("query", query, config.query),
        ("query form", form, config.query_form),
        ("query size", memory.addressing.shape[1], _query_size(config, images)),
    ):
        if theirs != ours:
            raise RecollectError(f"{config.start} has {what} {theirs}, this run {ours}: give a memory of the same kind")
    return memory


def _query_size(config: DistillConfig, images: Images) -> int:
    return config.query_size if config.query == "images" else images.classes


def _budget(config: DistillConfig, images: Images) -> Budget:
    size = config.query_size if config.query == "images" else None
    return Budget(config.images_per_class, images.classes, images.shape, config.downsample, config.precision, size)


@dataclass
class State:
    """All that changes from one outer step to the next."""

    bases: Tensor
    addressing: Tensor
    encoder: Params
    """what makes query vectors of pictures; empty where labels are asked with"""
    optimiser: torch.optim.Optimizer
    average: list[Tensor]
    """the EMA of bases, addressing and encoder"""
    step: int = 0
    norm: float = 0.0
    """running mean of the outer gradient's norm"""
    skipped: int = 0
    """outer steps without a usable gradient, in all"""
    skipped_in_a_row: int = 0
    before: dict[str, Any] = field(default_factory=dict)
    """how the memory that this run goes on from was made"""

    @property
    def tensors(self) -> list[Tensor]:
        return [self.bases, self.addressing, *self.encoder.values()]

    @property
    def learned(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors if tensor.requires_grad]

    def to_dict(self) -> dict[str, Any]:
        numbers = {name: getattr(self, name) for name in ("step", "norm", "skipped", "skipped_in_a_row")}
        tensors = {"tensors": [tensor.detach() for tensor in self.tensors], "average": self.average}
        return numbers | tensors | {"optimiser": self.optimiser.state_dict()}

    def load(self, saved: dict[str, Any]) -> None:
        with torch.no_grad():
            for name in ("tensors", "average"):
                for mine, theirs in zip(getattr(self, name), saved[name], strict=True):
                    mine.copy_(theirs)
        self.optimiser.load_state_dict(saved["optimiser"])
        for name in ("step", "norm", "skipped", "skipped_in_a_row"):
            setattr(self, name, saved[name])


def first_state(config: DistillConfig, images: Images) -> State:
    """Fresh bases and addressing, and the outer optimiser."""
    budget = _budget(config, images)
    generator = seeded(config.seed, Purpose.START)
    assert config.bases is not None  # resolve() decided it
    bases = torch.empty(config.bases, *budget.base_shape)
    if config.addressing == "one-hot":
        addressing = one_hot_addressing(images.classes, budget.per_class()).float()
        bases.normal_(generator=generator)
    else:
        assert config.matrices is not None
        addressing = torch.empty(config.matrices, _query_size(config, images), config.bases)
        _initialise(bases, addressing, config.init, generator)
    bases = bases.to(config.device).requires_grad_()
    addressing = addressing.to(config.device).requires_grad_(config.addressing == "learned")
    encoder: Params = {}
    groups = [{"params": [tensor for tensor in (bases, addressing) if tensor.requires_grad], "first": config.outer_lr}]
    if config.query == "images":
        fresh = Network(ENCODER, images.shape, config.query_size).fresh(config.seed, config.device)
        encoder = {name: p.requires_grad_() for name, p in fresh.items()}
        groups.append({"params": list(encoder.values()), "first": config.encoder_lr})
    if config.outer_optimiser == "sgd":
        optimiser = torch.optim.SGD(groups, lr=config.outer_lr, momentum=config.outer_momentum)
    else:
        optimiser = torch.optim.Adam(groups, lr=config.outer_lr, betas=(config.outer_momentum, 0.999))
    tensors, before = [bases, addressing, *encoder.values()], {}
    if config.start:
        start = _start(config, images)
        before = start.header.made
        learned = [start.bases, start.addressing, *start.encoder.values()]
        with torch.no_grad():
            for mine, theirs in zip(tensors, learned, strict=bool(start.encoder)):  # one of labels has no encoder
                mine.copy_(theirs)
    average = [tensor.detach().clone() for tensor in tensors]
    return State(bases, addressing, encoder, optimiser, average, before=before)


def _initialise(bases: Tensor, addressing: Tensor, init: str, generator: torch.Generator) -> None:
    if init == "unit":  # variance of a recalled pixel: K * 1 * (1/K)
        bases.normal_(generator=generator)
        addressing.normal_(std=len(bases) ** -0.5, generator=generator)
        return
    fill = torch.nn.init.kaiming_uniform_ if init == "kaiming" else torch.nn.init.xavier_uniform_
    fill(bases, generator=generator)
    for matrix in addressing:
        fill(matrix, generator=generator)


class _Draws(NamedTuple):
    """What one outer step draws: labels, a transform shared by all its images, real images, inner networks."""

    labels: Tensor
    shared: augment.Drawn
    shots: Tensor
    """rows of the pictures that the memory is asked with, class by class; none where labels are"""
    seen: augment.Drawn
    """how the encoder sees them"""
    rows: Tensor
    truth: Tensor
    starts: list[Start]


class Distiller:
    """The data and the network of one run, and the metagradient they give. Holds nothing that changes."""

    def __init__(self, images: Images, config: DistillConfig, preprocess: Preprocess, network: Network):
        self.config, self.preprocess, self.network = config, preprocess.to(config.device), network
        self.shape, self.classes = images.shape, images.classes
        real = training_split(images, config)
        self.pixels, self.labels = real.images.to(config.device), real.labels
        self.by_class = [(real.labels == label).nonzero().flatten() for label in range(images.classes)]
        self.augmentation = augment.parse(config.augment)
        asked = config.query == "images"
        self.encoder = encoder_network(ENCODER, images.shape, config.query_size) if asked else None
        self.on_gpu = config.device.startswith("cuda")
        if self.on_gpu:
            self.engine = fast.fastest(network, config.device, config.compute, config.compile)
        else:
            self.passes = fast.any_network(network, config.compile).passes
        self.ahead: dict[int, _Draws] = {}

    def threads(self) -> AbstractContextManager[None]:
        """As many as pay for its steps; a GPU, or an encoder with convolutions, may have them all."""
        return nullcontext() if self.on_gpu or self.encoder else threads_for(self.network)

    @property
    def needs(self) -> int | None:
        """About how many bytes of GPU memory an outer step takes; None without a GPU."""
        if not self.on_gpu:
            return None
        config, chosen = self.config, self.config.classes_per_step or self.classes
        batch, query = chosen * (config.inner_per_class or 0), chosen * config.real_per_class
        window = config.window or config.inner_steps
        unrolls = self.engine.needs(config.networks_per_step, batch, query, window, config.inner_optimiser)
        return unrolls + self.pixels.numel() + 2 * query * math.prod(self.shape) * 4

    def gradient(self, state: State) -> tuple[float, list[Tensor]]:
        """J and its gradient by the learned tensors at one outer step (lines 4-15 of Algorithm 1)."""
        config, device = self.config, self.config.device
        drawn = self.ahead.pop(state.step, None) or self._draw(state.step, len(state.addressing))
        recalled, labels = self._recall(drawn, state)
        pixels = self.preprocess(self.pixels[drawn.rows.to(self.pixels.device)])
        query = augment.apply(pixels, drawn.shared), drawn.truth.to(device)
        options = {
            "lr": config.inner_lr,
            "momentum": config.inner_momentum,
            "bridge": config.bridge,
            "window": min(config.window or config.inner_steps, len(drawn.starts[0].batches)),
            "optimiser": config.inner_optimiser,
        }
        if self.on_gpu:
            arguments = (drawn.starts, recalled.detach(), labels, query)
            found = self.engine.together(*arguments, **options, longest=config.inner_steps, weights=False)
            self.ahead[state.step + 1] = self._draw(state.step + 1, len(state.addressing))  # while the GPU is busy
        else:
            found = [
                unroll.metagradient(
                    self.network.loss, start.params, recalled.detach(), labels, start.batches, query,
                    augment=start.augment, passes=self.passes, **options,
                )
                for start in drawn.starts
            ]  # fmt: skip
        value = sum(float(each.loss) for each in found) / len(found)
        by_images = torch.stack([each.images for each in found]).mean(0)
        return value, list(torch.autograd.grad(recalled, state.learned, by_images))

    def _recall(self, drawn: "_Draws", state: State) -> tuple[Tensor, Tensor]:
        """Line 5: the recalled set, [Q r, C, H, W], and its labels. Asked with pictures, labels are places in the query."""
        device = self.config.device
        if self.encoder:
            pictures = augment.apply(self.preprocess(self.pixels[drawn.shots.to(device)]), drawn.seen)
            groups = pictures.unflatten(0, (len(drawn.labels), -1))
            queries = encode(self.encoder, state.encoder, groups, self.config.query_form)
            labels = torch.arange(len(drawn.labels)).repeat_interleave(queries_per_class(self.config))
        else:
            queries = torch.nn.functional.one_hot(drawn.labels, self.classes).float().to(device)
            labels = drawn.labels
        recalled = recall(state.bases, state.addressing, queries, self.shape[1:])
        return recalled, labels.repeat_interleave(len(state.addressing)).to(device)

    def _draw(self, step: int, matrices: int) -> "_Draws":
        """All that is random in an outer step."""
        config, generator = self.config, seeded(self.config.seed, Purpose.STEPS, step)
        labels = self._labels(generator)
        shared = augment.draw_shared(self.augmentation, generator) if config.augment_scope == "outer" else {}
        shots, rows, truth = self._real(labels, generator)
        seen = augment.draw(augment.parse(config.encoder_augment), len(shots), generator)
        matrices *= queries_per_class(config)
        starts, steps = [], None
        for _ in range(config.networks_per_step):
            params = self.network.drawn(int(torch.randint(2**62, (), generator=generator)), config.device)
            batches = self._batches(len(labels), matrices, steps, generator)
            starts.append(Start(params, batches, self._augmentation(shared, batches.shape, generator)))
            steps = len(batches)
        return _Draws(labels, shared, shots, seen, rows, truth, starts)

    def _labels(self, generator: torch.Generator) -> Tensor:
        """Line 4: a subset of the labels, in order."""
        count = self.config.classes_per_step or self.classes
        return torch.randperm(self.classes, generator=generator)[:count].sort().values

    def _batches(self, classes: int, matrices: int, steps: int | None, generator: torch.Generator) -> Tensor:
        """Line 9 for all inner steps: [T, B] rows of the recalled set, the same number of each class in each step."""
        config = self.config
        if steps is None:
            steps = config.inner_steps
            if config.window and config.window_place == "random":
                steps = int(torch.randint(config.window, steps + 1, (), generator=generator))
        assert config.inner_per_class is not None  # resolve() decided it
        drawn = torch.rand(steps, classes, matrices, generator=generator)
        picks = drawn.topk(config.inner_per_class, largest=False).indices
        return (picks + torch.arange(classes)[:, None] * matrices).flatten(1)

    def _real(self, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Line 14: rows and labels of real images of the chosen classes; before them, the rows of other ones to ask with."""
        ask = self.config.shots if self.encoder else 0
        shots, rows, truth = [], [], []
        for place, label in enumerate(labels.tolist()):
            of_class = self.by_class[label]
            order = of_class[torch.randperm(len(of_class), generator=generator)]
            pick = order[ask : ask + self.config.real_per_class]
            shots.append(order[:ask])
            rows.append(pick)
            truth.append(torch.full_like(pick, place if self.encoder else label))
        return torch.cat(shots), torch.cat(rows), torch.cat(truth)

    def _augmentation(
        self, shared: augment.Drawn, shape: torch.Size, generator: torch.Generator
    ) -> augment.Schedule | None:
        """What happens to the batch of each inner step."""
        if shared:
            return augment.Schedule({name: numbers.expand(shape[0], 1, 2) for name, numbers in shared.items()})
        if not self.augmentation:
            return None
        return augment.Schedule.of([augment.draw(self.augmentation, shape[1], generator) for _ in range(shape[0])])

    def teach(self, state: State) -> None:
        """The encoder learns to name the classes: its query vectors are then evidence for each."""
        config, device = self.config, self.config.device
        flat, compute = fast.passes(Network(ENCODER, self.shape, config.query_size), device, config.compute, half=False)
        part = self.preprocess.on(device, self.pixels), self.labels
        (params,) = train(
            flat, [part], encoder_recipe(config), [network_seed(config.seed, Purpose.TEACH)], device, compute
        )
        with torch.no_grad():
            for name, p in params.items():
                state.encoder[name].copy_(p)
            for mean, now in zip(state.average, state.tensors, strict=True):
                mean.copy_(now)

    def step(self, state: State) -> dict[str, Any]:
        """One outer step, in place: gradient, clip, update, average. Returns what to log of it."""
        config = self.config
        value, gradients = self.gradient(state)
        norm = float(torch.stack([g.norm() for g in gradients]).norm())
        state.step += 1
        usual = state.norm or math.inf  # before the first there is none, and nothing is too large
        wild = config.clip_running and norm > WILD * usual
        if math.isfinite(norm):
            state.norm = 0.9 * usual + 0.1 * min(norm, JUMP * usual) if state.norm else norm
        if wild or not (math.isfinite(value) and math.isfinite(norm)):
            state.skipped, state.skipped_in_a_row = state.skipped + 1, state.skipped_in_a_row + 1
            with torch.no_grad():
                for mean, now in zip(state.average, state.tensors, strict=True):
                    now.lerp_(mean, BACK)
            return {"step": state.step, "loss": None, "norm": None, "skipped": state.skipped}
        state.skipped_in_a_row = 0
        limit = min(config.clip_norm or math.inf, (config.clip_running or math.inf) * usual)
        scale = min(1.0, limit / norm) if norm > 0 else 1.0
        share = self._share(state.step)
        for group in state.optimiser.param_groups:
            group["lr"] = group["first"] * share
        for tensor, gradient in zip(state.learned, gradients, strict=True):
            tensor.grad = gradient * scale
        state.optimiser.step()
        decay = min(
            config.ema, (1 + state.step) / (10 + state.step)
        )  # a short memory while there is little to remember
        for mean, now in zip(state.average, state.tensors, strict=True):
            mean.lerp_(now.detach(), 1 - decay)
        return {
            "step": state.step,
            "loss": value,
            "norm": norm,
            "lr": config.outer_lr * share,
            "skipped": state.skipped,
        }

    def _share(self, step: int) -> float:
        """Of the learning rate, at this outer step."""
        if self.config.outer_schedule == "constant":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * (step - 1) / self.config.outer_steps))


def training_split(images: Images, config: DistillConfig) -> Split:
    """The images that a distillation may look at."""
    return images.train + images.validation if config.use_validation else images.train


def _recipe(config: DistillConfig) -> Recipe:
    """The paper's protocol, at the inner loop's rates and with its augmentation."""
    augmentation = config.augment if config.augment_scope == "sample" else "none"
    if config.inner_optimiser == "adam":
        return Recipe(network=config.network, augment=augmentation)
    return Recipe(network=config.network, lr=config.inner_lr, momentum=config.inner_momentum, augment=augmentation)


def encoder_recipe(config: DistillConfig) -> Recipe:
    """How an encoder is taught to name classes, before it is distilled with."""
    return Recipe(ENCODER, config.encoder_epochs, batch=128, augment=config.encoder_augment)


def to_memory(state: State, images: Images, config: DistillConfig, preprocess: Preprocess) -> Memory:
    """The memory that a state stands for: the average, in the precision of the file."""
    bases, addressing, *rest = (tensor.detach().cpu() for tensor in state.average)
    encoder = dict(zip(state.encoder, rest, strict=True))
    query = {}
    if encoder:
        query = {"encoder": ENCODER, "size": config.query_size, "form": config.query_form}
        query |= {"ways": config.classes_per_step, "shots": config.shots}
    kind = PRECISIONS[config.precision]
    one_hot = config.addressing == "one-hot"
    budget = _budget(config, images)
    header = Header(
        dataset=images.name,
        class_names=list(images.class_names),
        image_shape=list(images.shape),
        downsample=config.downsample,
        addressing=config.addressing,
        query=query,
        preprocessing=preprocess.to_json(),
        recipe=to_json(_recipe(config)),
        made={
            "config": to_json(config),
            "steps": state.step,
            "skipped": state.skipped,
            "seed": config.seed,
            "recollect": recollect.__version__,
            "torch": torch.__version__,
            "device": device_name(config.device),
            **({"start": state.before} if state.before else {}),
        },
        budget={
            "name": budget.name,
            "images_per_class": config.images_per_class,
            "numbers": budget.numbers,
            "used": bases.numel() + (0 if one_hot else addressing.numel()),
            "counted": "bases alone; one-hot addressing is implied" if one_hot else "bases and addressing",
            **({"encoder": sum(p.numel() for p in encoder.values())} if encoder else {}),
        },
    )
    memory = Memory(bases.to(kind), addressing.to(torch.uint8 if one_hot else kind), header, encoder)
    memory.fitted = preprocess
    return memory


def distill(
    images: Images,
    config: DistillConfig | None = None,
    *,
    network: Constructor | None = None,
    preprocess: Preprocess | None = None,
    run: "Path | str | None" = None,
    resume: bool = False,
    data: dict[str, Any] | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Memory:
    """Distil `images` into a memory.

    Arguments:
        images: what `recollect.load` gives. Only its training split is looked at.
        config: every choice; None is the preset `fast`.
        network: a function (image shape, classes) -> nn.Module, instead of the config's named network.
        preprocess: how to prepare the images, where several memories are to share it; None fits it to the training images.
        run: a folder for config, metrics, checkpoints and the memory. Without it nothing is written.
        resume: continue the run in that folder, from its last checkpoint.
        data: how `images` were loaded, for the run's config.json, so that `recollect resume` can load them again.
        progress: called with the numbers of each outer step.
        say: called with lines for a person, such as the memory that the run will need.
    """
    config = resolve(config or DistillConfig(), images)
    if network is not None:
        config = replace(config, network=f"custom {getattr(network, '__qualname__', type(network).__name__)}")
    ways = config.classes_per_step if config.query == "images" else images.classes
    net = Network(network or config.network, images.shape, ways or images.classes)
    if run is None:
        preprocess = preprocess or Preprocess.fit(
            training_split(images, config).images, config.preprocess, config.device
        )
        state, distiller = first_state(config, images), Distiller(images, config, preprocess, net)
        _tell(distiller, say)
        with distiller.threads():
            trouble = _loop(distiller, state, lambda line: progress(line) if progress else None, lambda: None, [])
        if trouble:
            raise RecollectError(f"{trouble}. Give run= to keep the last good memory")
        return to_memory(state, images, config, preprocess)
    settings = {"data": data or {}, "distill": to_json(config)}
    folder = Run.open(run, "distill") if resume else Run.create(run, "distill", settings)
    return _distill_into(folder, resume, images, config, net, preprocess, progress, say)


def _distill_into(
    folder: Run,
    resume: bool,
    images: Images,
    config: DistillConfig,
    net: Network,
    preprocess: Preprocess | None,
    progress: Progress | None,
    say: Callable[[str], None],
) -> Memory:
    """A run in its folder, from the beginning or from its last checkpoint."""
    split = training_split(images, config)
    fingerprint = sha256(split.images.numpy().tobytes(), split.labels.numpy().tobytes())
    saved = _resumable(folder, config, fingerprint) if resume else None
    if saved and saved["state"]["step"] >= config.outer_steps and folder.memory_path.exists():
        return Memory.load(folder.memory_path)
    if saved:
        preprocess = Preprocess.from_json(saved["preprocessing"], folder.folder, split.images)
    else:
        preprocess = preprocess or Preprocess.fit(split.images, config.preprocess, config.device)
        preprocess.save_sidecar(folder.folder)
    state, distiller = first_state(config, images), Distiller(images, config, preprocess, net)
    _tell(distiller, say)
    if saved:
        state.load(saved["state"])
    if resume:
        folder.forget_after(state.step)

    def record(line: dict[str, Any]) -> None:
        folder.log(line)
        if config.keep_every and state.step % config.keep_every == 0:
            to_memory(state, images, config, preprocess).save(folder.kept(state.step))
        if progress:
            progress(line)

    def save() -> None:
        frozen = {"config": to_json(config), "data": fingerprint, "preprocessing": preprocess.to_json()}
        save_checkpoint(folder.checkpoint_path, {**frozen, "state": state.to_dict()})

    with _signals() as caught, distiller.threads():
        trouble = _loop(distiller, state, record, save, caught)
    save()
    to_memory(state, images, config, preprocess).save(folder.memory_path)
    if trouble:
        raise RecollectError(f"{trouble}. The last good memory is {folder.memory_path}")
    if state.step < config.outer_steps:
        raise Stopped(caught[0], folder.folder, state.step)
    return Memory.load(folder.memory_path)


def _tell(distiller: Distiller, say: Callable[[str], None]) -> None:
    if distiller.needs is not None:
        free = torch.cuda.mem_get_info(distiller.config.device)[0]
        say(f"needs about {distiller.needs / 2**30:.1f} GiB of GPU memory, of which {free / 2**30:.1f} GiB are free")


def _loop(
    distiller: Distiller, state: State, record: Progress, save: Callable[[], None], caught: list[int]
) -> str | None:
    """Outer steps until they are done, a signal is caught, or nothing usable comes out any more (then it says so)."""
    config, saved_at = distiller.config, time.monotonic()
    while state.step < config.outer_steps and not caught:
        began = time.perf_counter()
        try:
            if config.encoder_epochs and state.step == 0:
                distiller.teach(state)
            line = distiller.step(state)
        except torch.OutOfMemoryError:  # with all that can be split split: somebody else took the memory
            return (
                f"out of GPU memory after outer step {state.step}: free some on {config.device} and resume the run, or "
                f"start one with a smaller window ({config.window}) or fewer real images ({config.real_per_class} a class)"
            )
        record(line | {"seconds": round(time.perf_counter() - began, 4)})
        if state.skipped_in_a_row >= MOST_SKIPS:
            return (
                f"the outer gradient exploded {MOST_SKIPS} times in a row, up to outer step {state.step}: lower "
                f"inner_lr ({config.inner_lr}), outer_lr ({config.outer_lr}) or inner_steps ({config.inner_steps})"
            )
        if time.monotonic() - saved_at >= config.checkpoint_seconds:
            save()
            saved_at = time.monotonic()
    return None


def _resumable(folder: Run, config: DistillConfig, fingerprint: str) -> dict[str, Any] | None:
    """The checkpoint to continue from (None: killed before the first), if it belongs to this config and these images."""
    settings, defaults = {"distill": to_json(config)}, to_json(DistillConfig())
    folder.check(settings, defaults)
    saved = load_checkpoint(folder.checkpoint_path, "config", "data", "preprocessing", "state")
    if saved:
        check_same(folder.folder, saved["config"], settings, defaults)
    if saved and saved["data"] != fingerprint:
        raise RecollectError(f"{folder.folder} was begun with other training images: resume it with the same data")
    return saved


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects Ctrl-C and SIGTERM, so that a step can be finished and saved; a second one stops at once."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def remember(number: int, _: object) -> None:
        caught.append(number)
        for each in numbers:
            signal.signal(each, before[each])

    for number in numbers:
        signal.signal(number, remember)
    try:
        yield caught
    finally:
        for number in numbers:
            signal.signal(number, before[number])
