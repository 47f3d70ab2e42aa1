"""Algorithm 1: repeat { draw -> recall -> objective -> outer step }, with checkpoints and resume.

Every outer step draws from generators of its own, keyed by (seed, step): a resumed run needs no generator's state, and ends
bit-for-bit like one that was never interrupted. Only `images.train` is looked at (and `validation`, if told to).
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import recollect
from recollect import outer, queries, starts
from recollect.config import DistillConfig, Recipe, changed, preset, to_json
from recollect.data import augment
from recollect.data.images import Images
from recollect.data.preprocess import Preprocess
from recollect.decisions import MakesQuery, budget, query_of, resolve, start_memory, training_split
from recollect.devices import device_name, find_device
from recollect.errors import RecollectError
from recollect.files import sha256
from recollect.header import Header
from recollect.memory import PRECISIONS, Budget, Memory, recall
from recollect.minutes import CHOSEN, MINUTES, afford
from recollect.nets import Constructor, Network, threads_for
from recollect.objectives import OBJECTIVES, Chance, Examples, Objective
from recollect.objectives.unrolled import Unrolled
from recollect.outer import MOST_SKIPS, State
from recollect.queries import Pictures
from recollect.runs import Interrupted, Run, Signals, Stopped, check_same, load_checkpoint, save_checkpoint
from recollect.seeds import Purpose, network_seed, seeded
from recollect.training import train

Progress = Callable[[dict[str, Any]], None]
MakesObjective = Callable[..., Objective]


class Draws(NamedTuple):
    """What one outer step draws: labels, a transform shared by all its images, real images, and what the objective needs."""

    labels: Tensor
    shared: augment.Drawn
    shots: Tensor
    """rows of the pictures that the memory is asked with, class by class; none where labels are"""
    seen: augment.Drawn
    """how the encoder sees them"""
    rows: Tensor
    truth: Tensor
    objective: Any


class Distiller:
    """The data, the query kind and the objective of one run, and the gradient they give."""

    def __init__(
        self,
        images: Images,
        config: DistillConfig,
        preprocess: Preprocess,
        network: Network,
        objective: MakesObjective | None = None,
        query: MakesQuery | None = None,
    ):
        self.images, self.config, self.network, self.device = images, config, network, config.run.device
        self.stated, self.preprocess = preprocess, preprocess.to(self.device)  # for files, for images
        self.shape, self.classes = images.shape, images.classes
        real = training_split(images, config)
        self.pixels, self.labels = real.images.to(self.device), real.labels
        self.by_class = [(real.labels == label).nonzero().flatten() for label in range(images.classes)]
        self.query = query_of(config, images, query)
        make, run = objective or OBJECTIVES[config.outer.objective], config.run
        self.objective = make(network, config.inner, self.device, run.compute, run.compile)
        self.draws_ahead = self.device.startswith("cuda")
        """while the device is busy"""
        self.ahead: dict[int, Draws] = {}

    def threads(self) -> AbstractContextManager[None]:
        """As many as pay for its steps; a GPU, or an encoder with convolutions, may have them all."""
        alone = self.draws_ahead or isinstance(self.query, Pictures)
        return nullcontext() if alone else threads_for(self.network)

    @property
    def needs(self) -> int | None:
        """About how many bytes of GPU memory an outer step takes; None where nobody knows."""
        if not (self.draws_ahead and isinstance(self.objective, Unrolled)):
            return None
        chosen = self.config.budget.classes_per_step or self.classes
        query = chosen * self.config.budget.real_per_class
        unrolls = self.objective.needs(chosen * (self.config.inner.per_class or 0), query)
        return unrolls + self.pixels.numel() + 2 * query * self.pixels[0].numel() * 4

    # --- the beginning, and the end ----------------------------------------------------------------------------------------

    def begin(self) -> State:
        """Fresh bases and addressing, or those of the memory to go on from, and the outer optimiser."""
        config = self.config
        bases, addressing = self._fresh()
        bases = bases.to(self.device).requires_grad_()
        addressing = addressing.to(self.device).requires_grad_(config.memory.addressing == "learned")
        encoder, before = self.query.fresh(config.run.seed, self.device), {}
        if config.run.start:
            start = start_memory(config, self.images, self.query)
            before = start.header.made
            learned = [start.bases, start.addressing, *start.encoder.values()]
            with torch.no_grad():  # one of labels has no encoder
                for mine, theirs in zip([bases, addressing, *encoder.values()], learned, strict=bool(start.encoder)):
                    mine.copy_(theirs)
        state = outer.begin(bases, addressing, encoder, config.outer, config.query.encoder_lr)
        state.before = before
        return state

    def _fresh(self) -> tuple[Tensor, Tensor]:
        sizes, generator = self.config.memory, seeded(self.config.run.seed, Purpose.START)
        bases, addressing = starts.fresh(sizes, budget(self.config, self.images, self.query), generator)
        if sizes.init == "samples":
            rows = torch.cat([of[torch.randperm(len(of), generator=generator)[: sizes.matrices]] for of in self.by_class])
            pixels = self.preprocess(self.pixels[rows.to(self.device)]).cpu()
            starts.begin_as_samples(bases, addressing, pixels, self.labels[rows], sizes.addressing == "one-hot")
        return bases, addressing

    def to_dict(self, state: State) -> dict[str, Any]:
        return state.to_dict() | {"objective": self.objective.to_dict()}

    def load(self, state: State, saved: dict[str, Any]) -> None:
        state.load(saved)
        self.objective.load(saved.get("objective", {}))

    def memory(self, state: State) -> Memory:
        """The memory that a state stands for: the average, in the precision of the file."""
        config, images = self.config, self.images
        bases, addressing, *rest = (tensor.detach().cpu() for tensor in state.average)
        encoder, kind = dict(zip(state.encoder, rest, strict=True)), PRECISIONS[config.budget.precision]
        one_hot = config.memory.addressing == "one-hot"
        beside = {"encoder": sum(p.numel() for p in encoder.values())} if encoder else {}
        allowed = budget(config, images, self.query)
        header = Header(
            dataset=images.name,
            class_names=list(images.class_names),
            image_shape=list(images.shape),
            downsample=config.memory.downsample,
            addressing=config.memory.addressing,
            query=self.query.header(),
            preprocessing=self.stated.to_json(),
            recipe=to_json(_recipe(config)),
            made=made(config, state, config.run.seed, self.device),
            budget=counted(allowed, bases, addressing, one_hot) | beside,
        )
        memory = Memory(bases.to(kind), addressing.to(torch.uint8 if one_hot else kind), header, encoder)
        memory.fitted = self.stated
        return memory

    # --- an outer step -------------------------------------------------------------------------------------------------------

    def step(self, state: State, signals: Signals | None = None) -> dict[str, Any]:
        """One outer step, in place; a signal may drop it until its gradient is there. Returns what to log of it."""
        with (signals or Signals()).drops():
            value, gradients = self.gradient(state)
        return outer.advance(state, value, gradients, self.config.outer, self.config.budget.outer_steps)

    def gradient(self, state: State) -> tuple[float, list[Tensor]]:
        """J and its gradient by the learned tensors at one outer step (lines 4-15 of Algorithm 1)."""
        drawn = self.ahead.pop(state.step, None) or self.draw(state.step, len(state.addressing))
        recalled = self._recall(drawn, state)
        pixels = self.preprocess(self.pixels[drawn.rows.to(self.device)])
        real = Examples(augment.apply(pixels, drawn.shared), drawn.truth.to(self.device))
        found = self.objective.gradient(recalled._replace(images=recalled.images.detach()), real, drawn.objective)
        if self.draws_ahead:
            self.ahead[state.step + 1] = self.draw(state.step + 1, len(state.addressing))
        return float(found.value), list(torch.autograd.grad(recalled.images, state.learned, found.images))

    def _recall(self, drawn: Draws, state: State) -> Examples:
        """Line 5: the recalled set."""
        pictures = augment.apply(self.preprocess(self.pixels[drawn.shots.to(self.device)]), drawn.seen)
        groups = pictures.unflatten(0, (len(drawn.labels), -1)) if len(drawn.shots) else pictures
        queries = self.query.vectors(state.encoder, drawn.labels.to(self.device), groups)
        images = recall(state.bases, state.addressing, queries, self.shape[1:])
        return Examples(images, self._recalled_labels(drawn.labels, len(state.addressing)).to(self.device))

    def _recalled_labels(self, labels: Tensor, matrices: int) -> Tensor:
        """[N]: class labels; or places in the query, where classes have no labels."""
        numbers = labels if self.query.ways is None else torch.arange(len(labels))
        return numbers.repeat_interleave(self.query.each * matrices)

    # --- draws -----------------------------------------------------------------------------------------------------------

    def draw(self, step: int, matrices: int) -> Draws:
        """All that is random in an outer step."""
        config, seed = self.config, self.config.run.seed
        generator = seeded(seed, Purpose.STEPS, step)
        labels = self._labels(generator)
        names = augment.parse(config.inner.augment)
        shared = augment.draw_shared(names, generator) if config.inner.augment_scope == "outer" else {}
        shots, rows, truth = self._real(labels, generator)
        seen = augment.draw(augment.parse(config.query.encoder_augment), len(shots), generator)

        def network(number: int) -> torch.Generator:
            """The first goes on with the step's generator; the others have their own, whoever computes them."""
            return seeded(seed, Purpose.STEPS, step, number) if number else generator

        objective = self.objective.draw(self._recalled_labels(labels, matrices), Chance(network, generator, shared))
        return Draws(labels, shared, shots, seen, rows, truth, objective)

    def _labels(self, generator: torch.Generator) -> Tensor:
        """Line 4: a subset of the labels, in order."""
        count = self.config.budget.classes_per_step or self.classes
        return torch.randperm(self.classes, generator=generator)[:count].sort().values

    def _real(self, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Line 14: rows and labels of real images of the chosen classes; before them, the rows of other ones to ask with."""
        ask, count = self.query.shots, self.config.budget.real_per_class
        shots, rows, truth = [], [], []
        for place, label in enumerate(labels.tolist()):
            of_class = self.by_class[label]
            order = of_class[torch.randperm(len(of_class), generator=generator)]
            pick = order[ask : ask + count]
            shots.append(order[:ask])
            rows.append(pick)
            truth.append(torch.full_like(pick, label if self.query.ways is None else place))
        return torch.cat(shots), torch.cat(rows), torch.cat(truth)

    def teach(self, state: State) -> None:
        """The encoder learns to name the classes: its query vectors are then evidence for each."""
        config, query = self.config, self.query
        assert isinstance(query, Pictures)
        network, seed = Network(query.encoder, self.shape, query.size), network_seed(config.run.seed, Purpose.TEACH)
        part = self.preprocess.on(self.device, self.pixels), self.labels
        (params,) = train(network, [part], encoder_recipe(config), [seed], self.device, config.run.compute)
        with torch.no_grad():
            for name, p in params.items():
                state.encoder[name].copy_(p)
        outer.forget(state)


def encoder_recipe(config: DistillConfig) -> Recipe:
    """How an encoder is taught to name classes, before it is distilled with."""
    return Recipe(queries.ENCODER, config.query.encoder_epochs, batch=128, augment=config.query.encoder_augment)


# --- the memory ------------------------------------------------------------------------------------------------------------


def _recipe(config: DistillConfig) -> Recipe:
    """The paper's protocol, at the inner loop's rates and with its augmentation."""
    inner = config.inner
    augmentation = inner.augment if inner.augment_scope == "sample" else "none"
    if inner.optimiser == "adam":
        return Recipe(network=inner.network, augment=augmentation)
    return Recipe(network=inner.network, lr=inner.lr, momentum=inner.momentum, augment=augmentation)


def made(config: Any, state: State, seed: int, device: str) -> dict[str, Any]:
    """How a memory was made, for its header."""
    told = {"config": to_json(config), "steps": state.step, "skipped": state.skipped, "seed": seed}
    told |= {"recollect": recollect.__version__, "torch": torch.__version__, "device": device_name(device)}
    return told | ({"start": state.before} if state.before else {})


def counted(budget: Budget, bases: Tensor, addressing: Tensor, one_hot: bool) -> dict[str, Any]:
    """What was allowed and what is used (eqn 4), for its header."""
    return {
        "name": budget.name,
        "images_per_class": budget.images_per_class,
        "numbers": budget.numbers,
        "used": bases.numel() + (0 if one_hot else addressing.numel()),
        "counted": "bases alone; one-hot addressing is implied" if one_hot else "bases and addressing",
    }


# --- the run ----------------------------------------------------------------------------------------------------------------


def distill(
    images: Images,
    config: DistillConfig | None = None,
    *,
    network: Constructor | None = None,
    objective: MakesObjective | None = None,
    query: MakesQuery | None = None,
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
        config: every choice; None is the preset `fast`, on a CPU for 10 minutes.
        network: a function (image shape, classes) -> nn.Module, instead of the config's named network.
        objective: a function (network, inner loop, device, compute, compile) -> Objective, instead of a named one.
        query: a function (config, image shape, classes) -> Query, instead of a named kind.
        preprocess: how to prepare the images, where several memories are to share it; None fits it to the training images.
        run: a folder for config, metrics, checkpoints and the memory. Without it nothing is written.
        resume: continue the run in that folder, from its last checkpoint.
        data: how `images` were loaded, for the run's config.json, so that `recollect resume` can load them again.
        progress: called with the numbers of each outer step.
        say: called with lines for a person, such as the memory that the run will need.
    """
    began, alone = time.perf_counter(), config is None and find_device("auto") == "cpu"
    config = resolve(config or preset("fast", minutes=MINUTES if alone else None), images, query)
    own = _named(network=network, objective=objective, query=query)
    ways = query_of(config, images, query).ways or images.classes
    split, saved = training_split(images, config), None
    folder = None if run is None else Run.open(run, "distill") if resume else Run(run)
    fingerprint = sha256(split.images.numpy().tobytes(), split.labels.numpy().tobytes())
    if folder and resume:
        config = changed(_as_begun(config, folder), **own)
        saved = _resumable(folder, config, fingerprint)
        if saved and saved["state"]["step"] >= config.budget.outer_steps and folder.memory_path.exists():
            return Memory.load(folder.memory_path)
    elif folder:
        folder.refuse_if_used()
    if folder and saved:
        preprocess = Preprocess.from_json(saved["preprocessing"], folder.folder, split.images)
    prepared = preprocess or Preprocess.fit(split.images, config.run.preprocess, config.run.device)

    def make(config: DistillConfig) -> Distiller:
        net = Network(network or config.inner.network, images.shape, ways)
        return Distiller(images, config, prepared, net, objective, query)

    if config.budget.minutes is not None and not (folder and resume):
        config = afford(config, 60 * config.budget.minutes - (time.perf_counter() - began), make, say)
    config = changed(config, **own)
    if folder and not resume:
        folder = Run.create(folder.folder, "distill", {"data": data or {}, "distill": to_json(config)})
    distiller = make(config)
    _tell(distiller, say)
    return _perform(folder, distiller, saved, fingerprint, _of(config, progress))


def _named(**given: object) -> dict[str, str]:
    """What was given in Python, as a config says it."""
    return {name: f"custom {getattr(v, '__qualname__', type(v).__name__)}" for name, v in given.items() if v is not None}


def _as_begun(config: DistillConfig, folder: Run) -> DistillConfig:
    """With what was chosen for its minutes, where it has any."""
    begun = folder.settings["distill"] if config.budget.minutes is not None else {}
    return changed(config, **{name: begun[name] for name in CHOSEN if name in begun})


def _of(config: DistillConfig, progress: Progress | None) -> Progress:
    """Told of how many steps there will be."""
    return lambda line: progress(line | {"of": config.budget.outer_steps}) if progress else None


def _perform(
    folder: Run | None, distiller: Distiller, saved: dict[str, Any] | None, fingerprint: str, progress: Progress
) -> Memory:
    """All outer steps, from what was saved if anything was; kept in a folder, if there is one."""
    state = distiller.begin()
    if saved:
        distiller.load(state, saved["state"])
    if not folder:
        with distiller.threads():
            trouble = _loop(distiller, state, progress, lambda: None, Signals())
        if trouble:
            raise RecollectError(f"{trouble}. Give run= to keep the last good memory")
        return distiller.memory(state)
    config, preprocess = distiller.config, distiller.stated
    if not state.step:
        preprocess.save_sidecar(folder.folder)
    folder.forget_after(state.step)

    def record(line: dict[str, Any]) -> None:
        folder.log(line)
        if config.run.keep_every and state.step % config.run.keep_every == 0:
            distiller.memory(state).save(folder.kept(state.step))
        progress(line)

    def save() -> None:
        known = {"config": to_json(config), "data": fingerprint, "preprocessing": preprocess.to_json()}
        save_checkpoint(folder.checkpoint_path, known | {"state": distiller.to_dict(state)})

    with Signals().collected() as signals, distiller.threads():
        trouble = _loop(distiller, state, record, save, signals)
    save()
    distiller.memory(state).save(folder.memory_path)
    if trouble:
        raise RecollectError(f"{trouble}. The last good memory is {folder.memory_path}")
    if state.step < config.budget.outer_steps:
        raise Stopped(signals.caught[0], folder.folder, state.step)
    return Memory.load(folder.memory_path)


def _tell(distiller: Distiller, say: Callable[[str], None]) -> None:
    if distiller.needs is not None:
        free = torch.cuda.mem_get_info(distiller.config.run.device)[0]
        say(f"needs about {distiller.needs / 2**30:.1f} GiB of GPU memory, of which {free / 2**30:.1f} GiB are free")


def _loop(distiller: Distiller, state: State, record: Progress, save: Callable[[], None], signals: Signals) -> str | None:
    """Outer steps until they are done, a signal is caught, or nothing usable comes out any more (then it says so). A step that a
    signal interrupts is dropped."""
    config, saved_at = distiller.config, time.monotonic()
    while state.step < config.budget.outer_steps and not signals.caught:
        began, before = time.perf_counter(), distiller.objective.to_dict()
        try:
            if config.query.encoder_epochs and state.step == 0:
                with signals.drops():
                    distiller.teach(state)
            line = distiller.step(state, signals)
        except Interrupted:
            distiller.objective.load(before)
            break
        except torch.OutOfMemoryError:  # with all that can be split split: somebody else took the memory
            return (
                f"out of GPU memory after outer step {state.step}: free some on {config.run.device} and resume the run, or "
                f"start one with a smaller window ({config.inner.window}) or fewer real images "
                f"({config.budget.real_per_class} a class)"
            )
        record(line | {"seconds": round(time.perf_counter() - began, 4)})
        if state.not_finite >= MOST_SKIPS:
            return (
                f"the outer gradient exploded {MOST_SKIPS} times in a row, up to outer step {state.step}: lower "
                f"inner_lr ({config.inner.lr}), outer_lr ({config.outer.lr}) or inner_steps ({config.inner.steps})"
            )
        if time.monotonic() - saved_at >= config.run.checkpoint_seconds:
            save()
            saved_at = time.monotonic()
    return None


def _resumable(folder: Run, config: DistillConfig, fingerprint: str) -> dict[str, Any] | None:
    """The checkpoint to continue from (None: killed before the first), if it belongs to this config and these images."""
    folder.check(config)
    saved = load_checkpoint(folder.checkpoint_path, "config", "data", "preprocessing", "state")
    if saved:
        check_same(folder.folder, saved["config"], config)
    if saved and saved["data"] != fingerprint:
        raise RecollectError(f"{folder.folder} was begun with other training images: resume it with the same data")
    return saved
