"""Algorithm 1 as a run: outer steps until they are done, with checkpoints and resume.

A resumed run ends bit-for-bit like one that was never interrupted. Only `images.train` is looked at (and `validation`, if told
to).
"""

import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.functional import cross_entropy

from recollect import distributed, outer
from recollect.config import DistillConfig, changed, preset, to_json
from recollect.data.augment import Own
from recollect.data.images import Images
from recollect.data.preprocess import Preprocess
from recollect.data.vectors import Given as Vectors
from recollect.data.vectors import attached, checked
from recollect.decisions import MakesQuery, fingerprint, query_of, resolve, training_split
from recollect.devices import find_device
from recollect.distiller import Distiller, MakesObjective, prepared_targets
from recollect.errors import RecollectError
from recollect.memory import Memory
from recollect.minutes import CHOSEN, MINUTES, afford
from recollect.nets import Constructor, Criterion, squared_error
from recollect.outer import MOST_SKIPS, State
from recollect.own import FEW, Given, Optimiser, Pool
from recollect.runs import (
    Interrupted,
    Run,
    Signals,
    Stopped,
    check_same,
    check_threads,
    load_checkpoint,
    own,
    restoring,
    save_checkpoint,
)

Progress = Callable[[dict[str, Any]], None]
LONG = 3600.0  # seconds that are worth a word before they are spent


def distill(
    images: Images,
    config: DistillConfig | None = None,
    *,
    network: Constructor | None = None,
    objective: MakesObjective | None = None,
    query: MakesQuery | None = None,
    loss: Criterion | None = None,
    augment: Own | None = None,
    optimiser: Optimiser | None = None,
    pool: Pool | None = None,
    vectors: ArrayLike | Tensor | None = None,
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
        loss: a function (outputs of a network [N, classes], labels [N]) -> scalar, inside the inner loop and outside, instead
            of cross-entropy.
        augment: a function (a batch [N, C, H, W], a generator on the CPU) -> a batch of that size, instead of named augmentations
            of recalled images.
        optimiser: a class of torch.optim, called with groups of tensors and `lr`, instead of the outer step's named optimiser.
        pool: networks, or their weights by name, one of which every inner network begins with, instead of a fresh one.
        vectors: query vectors [classes, d_y], or [N, d_y] of the training images, which then are what the memory is asked with.
        preprocess: how to prepare the images, where several memories are to share it; None fits it to the training images.
        run: a folder for config, metrics, checkpoints and the memory. Without it nothing is written.
        resume: continue the run in that folder, from its last checkpoint. Of several processes, rank 0 alone uses it.
        data: how `images` were loaded, for the run's config.json, so that `recollect resume` can load them again.
        progress: called with the numbers of each outer step.
        say: called with lines for a person, such as the memory that the run will need.

    Returns:
        The memory: the average of the last outer steps (`ema`), as a file of the run would have it.

    Examples:
        >>> images = recollect.load("digits")
        >>> config = recollect.preset("fast", network="mlp:width=32", inner_steps=5, window=5, outer_steps=3)
        >>> recollect.distill(images, config)
        Memory(digits: 10 classes of 1x8x8; 11 bases, 4 matrices, 616 numbers)
    """
    began, alone = time.perf_counter(), config is None and find_device("auto") == "cpu"
    if vectors is not None:
        images = attached(images, Vectors(checked(vectors, "vectors")), "vectors")
    config = resolve(config or preset("fast", minutes=MINUTES if alone else None), images, query)
    given = Given(network, objective, query, loss, augment, optimiser, pool)
    return _distilled(images, config, given, preprocess, run, resume, data or {}, progress, say, began)


def _distilled(
    images: Images, config: DistillConfig, given: Given, preprocess: Preprocess | None, run: "Path | str | None", resume: bool,
    data: dict[str, Any], progress: Progress | None, say: Callable[[str], None], began: float,
) -> Memory:  # fmt: skip
    """See `distill`."""
    own, query = given.named(), query_of(config, images, given.query)
    split, saved = training_split(images, config), None
    targets = prepared_targets(query, split)
    seen, ranks = fingerprint(images, config), distributed.current()
    ranks.meet(config.run.device, to_json(config) | own | {"training images": seen[:16], "resume": resume})
    resuming, run = bool(run and resume), None if ranks.rank else run  # one has the folder
    with ExitStack() as alone_in:
        folder = alone_in.enter_context(Run.working(run, "distill")) if run and resuming else Run(run) if run else None
        if folder and resuming:
            config, saved = _resumable(folder, config, own, seen)
        elif folder:
            folder.refuse_if_used()
        config, saved = ranks.first((config, saved))
        if resuming and (finished := ranks.first(_finished(folder, config, saved))):
            return finished
        prepared = ranks.first(None if ranks.rank else _preprocess(folder, config, saved, images, preprocess))
        assert prepared is not None

        def make(config: DistillConfig) -> Distiller:
            usual = cross_entropy if targets is None else squared_error
            net = given.network_for(config, images.shape, query.ways or images.classes, usual)
            truth = split.labels if targets is None else targets
            given.check(config, net, prepared.on(config.run.device, split.images[:FEW]), truth[:FEW])
            return Distiller(images, config, prepared, net, given.objective, given.query, given.augment, given.optimiser)

        if config.budget.minutes is not None and not resuming:
            left = 60 * config.budget.minutes - (time.perf_counter() - began)
            config = afford(config, images.name, left, make, say)
        config = changed(config, **own)
        distiller = make(config)
        if folder and not resuming:
            begun = Run.working(folder.folder, "distill", {"data": data, "distill": to_json(config)})
            folder = alone_in.enter_context(begun)
        return _perform(folder, distiller, saved, seen, watched(config, progress, say), say)


def _finished(folder: Run | None, config: DistillConfig, saved: dict[str, Any] | None) -> Memory | None:
    """The memory of a run of which nothing is left to do."""
    whole = folder and saved and saved["state"]["step"] >= config.budget.outer_steps and folder.memory_path.exists()
    return Memory.load(folder.memory_path) if folder and whole else None


def _preprocess(
    folder: Run | None, config: DistillConfig, saved: dict[str, Any] | None, images: Images, given: Preprocess | None
) -> Preprocess:
    """As the checkpoint says, as it was given, or fitted."""
    pixels = training_split(images, config).images
    if folder and saved:
        return Preprocess.from_json(saved["preprocessing"], folder.folder, pixels)
    fitted = given or Preprocess.fit(pixels, config.run.preprocess, config.run.device, images.columns)
    return replace(fitted, pictures=images.pictures.stated()) if images.pictures else fitted


def _as_begun(config: DistillConfig, folder: Run) -> DistillConfig:
    """With what was chosen for its minutes, where it has any."""
    begun = folder.settings["distill"] if config.budget.minutes is not None else {}
    return changed(config, **{name: begun[name] for name in CHOSEN if name in begun})


def watched(config: DistillConfig, progress: Progress | None, say: Callable[[str], None]) -> Progress:
    """Told of how many steps there will be. A long run on a CPU is announced, with what makes it shorter."""
    seen = 0

    def watch(line: dict[str, Any]) -> None:
        nonlocal seen
        seen += 1
        left = line["seconds"] * (config.budget.outer_steps - line["step"])
        if seen == 2 and config.run.device == "cpu" and left > LONG:  # the first one compiles
            say(
                f"about {left / 3600:.1f} hours on this processor; shorter: minutes 10, a smaller network "
                "(convnet:width=32), or a GPU"
            )
        if progress:
            progress(line | {"of": config.budget.outer_steps})

    return watch


def _perform(
    folder: Run | None,
    distiller: Distiller,
    saved: dict[str, Any] | None,
    fingerprint: str,
    progress: Progress,
    say: Callable[[str], None],
) -> Memory:
    """All outer steps, from what was saved if anything was; kept in a folder, if there is one."""
    _tell(distiller, say)
    state, ranks = distiller.begin(), distiller.ranks
    if saved:
        with restoring(folder.checkpoint_path if folder else Path("checkpoint")):
            distiller.load(state, saved["state"])
    ranks.level([*state.tensors, *state.average])  # to the last bit, whatever processor began them
    if not folder:
        with Signals().collected() if ranks.world > 1 else nullcontext(Signals()) as signals, distiller.threads():
            trouble = _loop(distiller, state, progress, lambda: None, signals)
        if trouble:
            raise RecollectError(f"{trouble}. Give run= to keep the last good memory")
        if signals.caught:
            raise KeyboardInterrupt
        _complain(state, distiller.config)
        return distiller.memory(state)
    config, preprocess = distiller.config, distiller.stated
    if not state.step:
        preprocess.save_sidecar(folder.folder)
    folder.forget_after(state.step)

    def record(line: dict[str, Any]) -> None:
        folder.log(line)
        if config.run.keep_every and state.step % config.run.keep_every == 0:
            distiller.memory(state).save(own(folder.kept(state.step)))
        progress(line)

    def save() -> None:
        known = {"config": to_json(config), "data": fingerprint, "preprocessing": preprocess.to_json()}
        known |= {} if distiller.draws_ahead else {"threads": torch.get_num_threads()}
        save_checkpoint(folder.checkpoint_path, known | {"state": distiller.to_dict(state)})

    with Signals().collected() as signals, distiller.threads():
        check_threads(folder.folder, saved or {})
        try:
            trouble = _loop(distiller, state, record, save, signals)
        except distributed.Lost:
            save()  # what all of them have done
            raise
        save()
    distiller.memory(state).save(own(folder.memory_path))
    if trouble:
        raise RecollectError(f"{trouble}. The last good memory is {folder.memory_path}")
    if state.step < config.budget.outer_steps:
        raise Stopped(signals.caught[0], folder.folder, state.step)
    _complain(state, config)
    return Memory.load(folder.memory_path)


def _complain(state: State, config: DistillConfig) -> None:
    if words := outer.complaint(state, config.inner.lr):
        warnings.warn(f"{words} (--inner-lr)", stacklevel=2)


def _tell(distiller: Distiller, say: Callable[[str], None]) -> None:
    networks, world = distiller.config.inner.networks_per_step, distiller.ranks.world
    if distiller.config.run.shard == "networks" and world > networks:
        say(
            f"{world} processes share {networks} inner networks an outer step: {world - networks} idle. More "
            "networks_per_step, or shard batch, would give them work"
        )
    if distiller.needs is not None:
        free = torch.cuda.mem_get_info(distiller.config.run.device)[0]
        say(f"needs about {distiller.needs / 2**30:.1f} GiB of GPU memory, of which {free / 2**30:.1f} GiB are free")


def _loop(distiller: Distiller, state: State, record: Progress, save: Callable[[], None], signals: Signals) -> str | None:
    """Outer steps until they are done, a signal is caught, or nothing usable comes out any more (then it says so). A step that a
    signal interrupts is dropped."""
    config, ranks, saved_at = distiller.config, distiller.ranks, time.monotonic()
    while state.step < config.budget.outer_steps and not _told_to_stop(ranks, signals):
        began, before = time.perf_counter(), distiller.objective.to_dict()
        try:
            if config.query.encoder_epochs and state.step == 0:
                with signals.drops() if ranks.world == 1 else nullcontext():
                    distiller.teach(state)
                ranks.level([*state.tensors, *state.average])
            line = distiller.step(state, signals)
        except Interrupted:
            distiller.objective.load(before)
            break
        except distributed.Lost:
            distiller.objective.load(before)
            raise
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
        if line["loss"] is None and outer.is_round(state.skipped):
            _complain(state, config)
        if time.monotonic() - saved_at >= config.run.checkpoint_seconds:
            save()
            saved_at = time.monotonic()
    return None


def _told_to_stop(ranks: distributed.Ranks, signals: Signals) -> bool:
    """All after the same step, whichever of them a signal reached."""
    number = ranks.highest(max(signals.caught, default=0))
    if number and not signals.caught:
        signals.caught.append(number)
    return bool(number)


def _resumable(
    folder: Run, config: DistillConfig, own: dict[str, str], fingerprint: str
) -> tuple[DistillConfig, dict[str, Any] | None]:
    """The config as the run was begun, and the checkpoint to continue from (None: killed before the first), if it belongs to this
    config and these images."""
    config = changed(_as_begun(config, folder), **own)
    folder.check(config)
    saved = load_checkpoint(folder.checkpoint_path, config=dict, data=str, preprocessing=dict, state=dict)
    if saved:
        with restoring(folder.checkpoint_path):
            outer.check_numbers(saved["state"])
        check_same(folder.folder, saved["config"], config)
    if saved and saved["data"] != fingerprint:
        raise RecollectError(f"{folder.folder} was begun with other training images: resume it with the same data")
    return config, saved
