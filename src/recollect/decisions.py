"""Every "auto" and default decided for a dataset, and what cannot be is refused, before the first hour is spent."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from recollect import fast, limits
from recollect.budget import Budget
from recollect.config import Asking, DistillConfig, changed, check, setting
from recollect.data import augment
from recollect.data.images import Images, Split
from recollect.devices import find_device
from recollect.errors import RecollectError
from recollect.files import sha256
from recollect.memory import Memory
from recollect.nets import Shape, constructor
from recollect.queries import QUERIES, STAND_INS, Labels, Pictures, Query, Targets, Vectors

MakesQuery = Callable[[DistillConfig, Shape, int], Query]

FOR_TARGETS = ("unrolled", "regression")  # objectives that do not go class by class
ZCA_DATASETS = ("svhn", "cifar10", "cifar100")


def training_split(images: Images, config: DistillConfig) -> Split:
    """The images that a distillation may look at."""
    return images.train + images.validation if config.run.use_validation else images.train


def budget(config: DistillConfig, images: Images, query: Query) -> Budget:
    """What a memory of these images may take."""
    limits, downsample = config.budget, config.memory.downsample
    common = images.shape, downsample, limits.precision, query.size
    if isinstance(query, Targets):
        return Budget(limits.images_per_class, STAND_INS, *common, called=f"{limits.images_per_class * STAND_INS} images")
    return Budget(limits.images_per_class, images.classes, *common)


def query_of(config: DistillConfig, images: Images, given: MakesQuery | None = None) -> Query:
    """The query kind of a config, or what was given in Python."""
    return given(config, images.shape, images.classes) if given else QUERIES[config.query.kind](config, images)


def fingerprint(images: Images, config: DistillConfig) -> str:
    """SHA-256 of the training images, and of query vectors that are given with them."""
    split = training_split(images, config)
    given = [vectors.numpy().tobytes() for vectors in (images.vectors, split.vectors) if vectors is not None]
    return sha256(split.fingerprint.encode(), *given) if given else split.fingerprint


def _as_data_are(config: DistillConfig, images: Images, given: MakesQuery | None) -> DistillConfig:
    """The same config with what follows from the kind of data: continuous targets, given vectors, columns of a table."""
    kind, continuous = config.query.kind, images.train.targets is not None
    if continuous and (given or kind not in ("labels", "targets")):
        asked = "a query kind of your own" if given else f"query {kind}"
        raise RecollectError(f"{images.name} has continuous targets, which are its queries: leave out {asked}")
    if continuous and config.outer.objective not in FOR_TARGETS:
        raise RecollectError(
            f"objective {config.outer.objective} compares class by class, and {images.name} has continuous targets: give "
            f"objective {' or '.join(FOR_TARGETS)}"
        )
    has_vectors = images.vectors is not None or images.train.vectors is not None
    if continuous or (has_vectors and kind == "labels" and not given):
        config = changed(config, query="targets" if continuous else "vectors")
    if images.columns:
        network = config.inner.network
        config = changed(config, network="mlp" if network == DistillConfig().inner.network else network, downsample=1)
    return config


def resolve(config: DistillConfig, images: Images, given: MakesQuery | None = None) -> DistillConfig:
    """The same config with every "auto" and default decided for these images; refuses what cannot be."""
    check(config)
    config = _as_data_are(config, images, given)
    if images.classes < 2 and given is None and config.query.kind != "targets":
        raise RecollectError(f"{images.name} has one class, '{images.class_names[0]}': give two or more, to be told apart")
    augment.parse(config.inner.augment)
    augment.parse(config.query.encoder_augment)
    if not config.inner.network.startswith("custom "):
        constructor(config.inner.network)
    _check_count(config, training_split(images, config))
    if given is None and config.query.kind == "images":
        config = changed(config, classes_per_step=config.budget.classes_per_step or min(5, images.classes))
    query = query_of(config, images, given)
    _check_query(config, query, images)
    if config.run.start:
        config = _sizes_of_start(config, start_memory(config, images, query))
    bases, matrices = budget(config, images, query).sizes(config.memory)
    ways, per_class = config.budget.classes_per_step, matrices * query.each
    classes = STAND_INS if isinstance(query, Targets) else images.classes
    inner = min(10, per_class) if config.inner.per_class is None else config.inner.per_class
    if inner > per_class:
        raise RecollectError(
            f"inner_per_class is {inner}, but each class recalls only {per_class} images: give at most {per_class}"
        )
    if ways is not None and ways > classes and not isinstance(query, Targets):
        raise RecollectError(f"classes_per_step is {ways}, but there are {images.classes} classes")
    rows = 8 * config.inner.steps * inner * (ways or classes)  # of the recalled set, that each network's steps see
    copies = config.inner.networks_per_step
    limits.check(f"an unroll of {config.inner.steps:,} inner_steps", rows)
    limits.check(f"{copies:,} networks_per_step", copies * rows)
    config, preprocess = _matching(config), preprocess_of(config.run.preprocess, images)
    device = find_device(config.run.device)
    fast.check(config.run.compute, device)
    return changed(config, bases=bases, matrices=matrices, inner_per_class=inner, preprocess=preprocess, device=device)


def _check_count(config: DistillConfig, split: Split) -> None:
    """Refuse more images than there are."""
    asked, most = config.budget.images_per_class, int(split.labels.bincount().max())
    if split.targets is None and asked > most:
        raise RecollectError(f"images_per_class is {asked}, but no class has more than {most}: give fewer")
    if split.targets is None:
        return
    if asked * STAND_INS > most:
        raise RecollectError(
            f"images_per_class is {asked}, {asked * STAND_INS} images with continuous targets, and there are {most}: give fewer"
        )
    if (targets := config.budget.classes_per_step or STAND_INS) > most // 2:
        raise RecollectError(
            f"classes_per_step is {targets} targets of {most}: give at most {most // 2}, the others are to judge"
        )


def preprocess_of(name: str, images: Images) -> str:
    """Which preprocessing "auto" is."""
    return ("zca" if images.name in ZCA_DATASETS else "normalise") if name == "auto" else name


def _matching(config: DistillConfig) -> DistillConfig:
    """The same config with the defaults of its objective; refuses what another objective would ignore."""
    objective, matching, per_class = config.outer.objective, config.matching, config.budget.images_per_class
    if matching.siamese and objective not in ("gradients", "distributions"):
        raise RecollectError(
            f"siamese is for the objectives gradients and distributions, and this one is {objective}: leave it out"
        )
    if matching.siamese and (config.inner.augment == "none" or config.inner.augment_scope == "outer"):
        raise RecollectError(
            "siamese draws one of several augmentations for each class: give --augment crop+cutout+scale+rotate, say (flip too, "
            "but for digits), and leave --augment-scope out"
        )
    if (matching.experts is not None) != (objective == "trajectories"):
        if matching.experts is not None:
            raise RecollectError(f"experts are for the objective trajectories, and this one is {objective}: leave them out")
        raise RecollectError(
            "objective trajectories needs experts: make them by recollect experts DATA, then give --experts FOLDER"
        )
    if objective != "gradients":
        return config
    if config.inner.networks_per_step > 1:
        raise RecollectError("networks_per_step is for objectives without a state, and gradients has one network: leave it out")
    usual = {"network_lasts": 50 if per_class >= 50 else 10 if per_class >= 10 else 1}
    usual |= {"network_steps": 10 if per_class >= 50 else 50}
    return changed(config, **{name: value for name, value in usual.items() if setting(config, name) is None})


def _sizes_of_start(config: DistillConfig, start: Memory) -> DistillConfig:
    """The same config with the sizes of the memory that the run goes on from."""
    own = {"bases": len(start.bases), "matrices": len(start.addressing)}
    given = {name: setting(config, name) for name in own if setting(config, name) is not None}
    if any(given[name] != own[name] for name in given):
        raise RecollectError(f"{config.run.start} has {own}, which cannot become {given}: leave them out, or start afresh")
    return changed(config, **(own if config.memory.addressing == "learned" else {}))


def _check_query(config: DistillConfig, query: Query, images: Images) -> None:
    """Refuse what a memory of this query kind cannot have."""
    if not isinstance(query, Labels) and config.memory.addressing == "one-hot":
        raise RecollectError("one-hot addressing supports label queries only: drop --addressing or --query")
    if not isinstance(query, Labels) and config.memory.init == "samples":
        raise RecollectError("init samples supports label queries only: give another init, or query labels")
    if not isinstance(query, Pictures):
        for name in ("encoder_epochs", "encoder_augment", "query_form"):
            usual, value = setting(DistillConfig(), name), setting(config, name)
            if value != usual:
                raise RecollectError(
                    f"{name} is {value}, and a memory that is asked with {config.query.kind} has no encoder: leave it out, or "
                    "give query images"
                )
        if isinstance(query, Vectors) and query.shots:
            _check_shots(query.shots, training_split(images, config), images.classes)
    else:
        _check_pictures(config.query, training_split(images, config), images.classes)


def _check_shots(shots: int, split: Split, classes: int) -> None:
    least = int(split.labels.bincount(minlength=classes).min())
    if least <= shots:
        raise RecollectError(f"shots is {shots}, but a class has only {least} images: give at most {least - 1}")


def _check_pictures(asking: Asking, split: Split, classes: int) -> None:
    _check_shots(asking.shots, split, classes)
    if asking.encoder_epochs and asking.size < classes:
        raise RecollectError(
            f"query_size is {asking.size}, too small for an encoder that learns to name {classes} classes: "
            f"give {classes} or more, or no encoder_epochs"
        )


def same(ours: Tensor, theirs: Tensor | None) -> bool:
    """Whether both are there, and equal."""
    return theirs is not None and torch.equal(ours, theirs)


def start_memory(config: DistillConfig, images: Images, query: Query) -> Memory:
    """The memory that a run goes on from, if it is of these images and settings. One of labels can go on with pictures: class
    probabilities act as soft labels."""
    start = config.run.start or ""
    memory, asking = Memory.load(Path(start)), config.query
    theirs = memory.asked
    if isinstance(theirs, Pictures) and asking.encoder_epochs:
        raise RecollectError(f"{start} has an encoder that has learnt: leave out encoder_epochs")
    if isinstance(theirs, Labels) and isinstance(query, Pictures):
        if not (query.form == "probabilities" and query.size == theirs.size and asking.encoder_epochs):
            raise RecollectError(
                f"{start} is asked with labels: to go on from it with pictures, give query_form probabilities, query_size "
                f"{theirs.size}, and encoder_epochs (15) to learn the labels in"
            )
        theirs = query
    for what, found, ours in (
        ("classes", memory.class_names, images.class_names),
        ("image shape", memory.image_shape, images.shape),
        ("downsample", memory.header.downsample, config.memory.downsample),
        ("addressing", memory.header.addressing, config.memory.addressing),
        ("query", type(theirs).__name__.lower(), type(query).__name__.lower()),
        ("query form", getattr(theirs, "form", None), getattr(query, "form", None)),
        ("query size", memory.addressing.shape[1], query.size),
        ("mean of the targets", getattr(theirs, "mean", None), getattr(query, "mean", None)),
    ):
        if found != ours:
            raise RecollectError(f"{start} has {what} {found}, this run {ours}: give a memory of the same kind")
    if isinstance(query, Vectors) and not (memory.vectors is not None and same(memory.vectors, query.table)):
        raise RecollectError(f"{start} is asked with other vectors than this run: give it the same (--vectors)")
    return memory
