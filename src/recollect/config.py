"""Every choice in one place: frozen dataclasses from which the command line, the saved JSON and the Python call all come.

What distillation and streams share (the size of a memory, the inner loop, the outer step) is one dataclass each, nested in both.
Every setting has one name of its own, that of its flag: `inner_lr` on the command line, in files and in `changed` is
`config.inner.lr` in code. Nothing here imports torch, so that `recollect --help` answers at once.
"""

import dataclasses
import typing
from dataclasses import dataclass
from functools import cache, reduce
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar

from tyro.conf import OmitArgPrefixes, Suppress, arg

from recollect.errors import RecollectError, unknown

T = TypeVar("T")


def flag(name: str) -> Any:
    """A setting that is not called as its field."""
    return arg(name=name.replace("_", "-"), prefix_name=False)


def group(title: str) -> Any:
    """Settings under a heading of their own in the help."""
    return OmitArgPrefixes[Annotated[Any, arg(name=title, prefix_name=False)]].__metadata__


@dataclass(frozen=True)
class Recipe:
    """How a fresh network is trained on a recall: the paper's protocol.

    Examples:
        >>> recollect.Recipe(network="mlp:width=128", epochs=50, lr=0.05)
        Recipe(network='mlp:width=128', epochs=50, batch=640, lr=0.05, momentum=0.9, augment='none')
    """

    network: str = "convnet"
    """network to train: convnet, resnet12, alexnet, mlp or lamaml, with options: convnet:width=64,depth=4"""
    epochs: int = 300
    """passes over the recalled images"""
    batch: int = 640
    """images of a training step"""
    lr: float = 0.01
    """learning rate of SGD, constant"""
    momentum: float = 0.9
    """momentum of SGD"""
    augment: str = "none"
    """augmentation, fresh for every image and step: any of flip, rotate, scale, crop, cutout, brightness, contrast, saturation,
    joined by +"""


@dataclass(frozen=True)
class Limits:
    """What a distillation may spend: floats, outer steps, and images in each."""

    images_per_class: int = 1
    """budget of the memory: as many floats as this many images of each class; with continuous targets, as ten times as many
    images"""
    precision: Literal["float32", "float16", "bfloat16"] = "float32"
    """precision of the numbers in the file; half precision buys twice the numbers and is a budget of its own"""
    minutes: float | None = None
    """how long to distil: chooses objective, network, unroll and outer_steps for this device by a few timed steps; other
    settings that are given stay. Default: 10 on a CPU where no setting is given, else outer_steps decide"""
    outer_steps: int = 1000
    """number of outer steps: updates of the memory"""
    classes_per_step: int | None = None
    """classes sampled for each outer step, or continuous targets. Default: all classes, 5 with query images, or 10 targets"""
    real_per_class: int = 200
    """real images of each class in the outer loss (fewer where there are fewer)"""


@dataclass(frozen=True)
class Sizes:
    """What a memory is made of, and how it begins."""

    bases: int | None = None
    """number of shared bases (K); the addressing matrices fill the rest of the budget. Default: as many as fit with one matrix
    for every 20 numbers of a base, and four or more"""
    matrices: int | None = None
    """number of addressing matrices (r): images that each query recalls. Default: as many as the budget holds"""
    addressing: Literal["learned", "one-hot"] = "learned"
    """kind of addressing: learned, over shared bases; or one-hot, plain images of each class as in standard distillation"""
    downsample: int = 2
    """factor by which bases are smaller than images on each side"""
    init: Literal["kaiming", "xavier", "unit", "samples"] = "kaiming"
    """start of bases and addressing. kaiming: Kaiming uniform (the paper); xavier: Xavier uniform (the paper's code); unit:
    recalls have variance 1; samples: recalls are real images, as nearly as they can be"""


@dataclass(frozen=True)
class Asking:
    """What a memory is asked with."""

    kind: Annotated[Literal["labels", "images", "vectors", "targets"], flag("query")] = "labels"
    """kind of query that a memory answers: labels; images through an encoder that is trained with the memory; vectors that are
    given, of each class or of each training image; or continuous targets. Data with vectors or continuous targets are asked with
    these"""
    shots: int = 5
    """pictures of each class in the query of an outer step (query images), or training images with whose vectors it asks (query
    vectors, where they are of images)"""
    size: Annotated[int, flag("query_size")] = 64
    """size of the query vector that the encoder makes of a picture (query images)"""
    form: Annotated[Literal["unit", "probabilities"], flag("query_form")] = "unit"
    """query vectors of pictures (query images). unit: one of length 1 for each picture, as in the paper; probabilities: one for
    all pictures of a class, the softmax of their mean"""
    encoder_lr: float = 0.001
    """learning rate of the encoder (query images)"""
    encoder_epochs: int = 0
    """passes over the training images in which the encoder first learns to classify them (query images; query_size must be at
    least the number of classes)"""
    encoder_augment: str = "none"
    """augmentation of the pictures that the encoder sees: flip, crop, ... joined by + (query images)"""


@dataclass(frozen=True)
class InnerLoop:
    """How a fresh network is trained on what is recalled, and how its trajectory is differentiated."""

    network: str = "convnet"
    """inner network: convnet, resnet12, alexnet, mlp or lamaml, with options: convnet:width=64,depth=4"""
    steps: Annotated[int, flag("inner_steps")] = 60
    """length of the unroll (T)"""
    per_class: Annotated[int | None, flag("inner_per_class")] = None
    """recalled images of each class in an inner step. Default: 10, or all where there are fewer"""
    optimiser: Annotated[Literal["sgd", "adam"], flag("inner_optimiser")] = "sgd"
    """optimiser of the inner loop"""
    lr: Annotated[float, flag("inner_lr")] = 0.01
    """learning rate of the inner loop (alpha_0), and of networks that are trained on the memory"""
    momentum: Annotated[float, flag("inner_momentum")] = 0.9
    """momentum of the inner loop (beta_0), and of networks that are trained on the memory"""
    bridge: Literal["full", "forward-only", "none"] = "full"
    """treatment of the inner momentum by the adjoint. full: exact; forward-only: left out of the adjoint; none: no momentum at
    all"""
    window: int | None = 40
    """number of last steps of the unroll that the adjoint covers; None, or more than there are, covers all"""
    window_place: Literal["late", "random"] = "random"
    """place of the window. late: it ends with the unroll; random: the unroll ends at random, not before the window is full"""
    networks_per_step: int = 1
    """fresh inner networks for each outer step, their gradients averaged"""
    augment: str = "none"
    """augmentation of recalled images: any of flip, rotate, scale, crop, cutout, brightness, contrast, saturation, joined by +"""
    augment_scope: Literal["sample", "outer"] = "sample"
    """scope of the augmentation. sample: fresh for every recalled image and inner step; outer: one transform for all images of an
    outer step, recalled and real"""

    @property
    def covered(self) -> int:
        """How many last steps the adjoint covers: a window that is longer than the unroll is the whole of it."""
        return self.steps if self.window is None else min(self.window, self.steps)


@dataclass(frozen=True)
class OuterStep:
    """What drives the memory, and how it is updated."""

    objective: Literal["unrolled", "regression", "gradients", "distributions", "trajectories"] = "unrolled"
    """objective of the memory. unrolled: the loss of networks that were trained on the recall (the paper); regression: kernel
    ridge regression on features of a pool of networks; gradients: recalled and real images pull a network's weights the same
    way (DC); distributions: their mean features are the same (DM); trajectories: training on the recall leads where training
    on real images led (TM, needs experts)"""
    optimiser: Annotated[Literal["adam", "sgd"], flag("outer_optimiser")] = "adam"
    """optimiser of the memory"""
    lr: Annotated[float, flag("outer_lr")] = 0.03
    """learning rate of the memory (alpha_1)"""
    momentum: Annotated[float, flag("outer_momentum")] = 0.9
    """momentum of SGD, or first decay rate of Adam, for the memory (beta_1)"""
    schedule: Annotated[Literal["cosine", "constant"], flag("outer_schedule")] = "cosine"
    """schedule of the memory's learning rate over the outer steps"""
    clip_running: float = 2.0
    """multiple of its running mean norm at which the outer gradient is clipped; one of 20 times the mean comes from an inner loop
    that diverged, and is skipped. 0 does neither"""
    clip_norm: float = 0.0
    """norm at which the outer gradient is clipped; 0 does not clip"""
    ema: float = 0.99
    """decay of the average of the memory that is saved; 0 saves the memory itself"""


@dataclass(frozen=True)
class Matching:
    """What the objectives gradients, distributions and trajectories compare, and by which networks."""

    siamese: bool = False
    """augment real and recalled images of a class alike: one of the augmentations, with one parameter, drawn anew each outer step
    (objectives gradients, where it is called DSA, and distributions)"""
    network_lasts: int | None = None
    """number of outer steps before a fresh network takes the place of the last (objective gradients). Default: 1; with 10 images
    per class or more 10, with 50 or more 50"""
    network_steps: int | None = None
    """number of SGD steps on the recall that a network takes between two outer steps (objective gradients). Default: 50; with 50
    images per class or more 10"""
    experts: str | None = None
    """folder of expert trajectories, as recollect experts makes them (objective trajectories)"""
    expert_epochs: int = 2
    """epochs of an expert that the inner steps on the recall are to make up for (objective trajectories)"""
    expert_starts: int = 5
    """first epochs of an expert, the untrained network's included, whose weights an inner loop may begin with (objective
    trajectories)"""


@dataclass(frozen=True)
class Running:
    """Where a distillation starts from, runs, and what it keeps."""

    start: str | None = None
    """file of a memory of the same sizes to go on from, or its name in the zoo or on the Hub. Default: fresh bases and
    addressing. A memory of labels can go on with query images, as probabilities"""
    preprocess: Literal["auto", "normalise", "zca"] = "auto"
    """preprocessing of images: normalise each channel, or zca, whitening too; auto is zca for svhn, cifar10 and cifar100"""
    use_validation: bool = False
    """distil the validation split too, for a final run when nothing is left to choose"""
    seed: int = 0
    """seed of all random draws"""
    device: str = "auto"
    """device that computes: cpu, cuda, or auto (cuda where there is one)"""
    compute: Literal["auto", "bf16", "tf32", "fp32"] = "auto"
    """precision of the inner loop's products. auto: on a GPU bf16 for the ConvNet and lamaml, TF32 for others; on a CPU bf16 for
    ConvNets of width 32 or more where the processor multiplies in it, else fp32"""
    compile: bool = False
    """compile the inner passes by torch.compile: half a minute to start, then faster; worth it on long runs of large networks.
    The ConvNet on a GPU, the mlp and lamaml everywhere are written by hand and gain nothing"""
    shard: Literal["networks", "batch"] = "networks"
    """what the processes of torchrun share out. networks: the inner networks of an outer step, with the same result by any number
    of processes; batch: each inner batch and the real batch, for networks too large for one process, equal to rounding"""
    checkpoint_seconds: float = 60.0
    """seconds from one checkpoint to the next"""
    loss: Suppress[str] = "usual"
    """loss of the networks, inside the inner loop and outside: the usual one, or what was given in Python"""
    pool: Suppress[str] = "none"
    """networks whose weights inner networks begin with: none, which are fresh then, or what was given in Python"""
    keep_every: int = 0
    """number of outer steps after which the run's folder keeps a copy of the memory, each time; 0 keeps only the last"""


@dataclass(frozen=True)
class DistillConfig:
    """How a dataset becomes a memory (Algorithm 1). The defaults are the preset `fast`; `preset` makes others.

    Each part is a dataclass of settings. A setting is called as its flag: `--inner-lr` is `inner_lr` in `preset`, and
    `config.inner.lr` to read.

    Examples:
        >>> config = recollect.preset("fast", inner_lr=0.05)
        >>> config.inner.lr, config.budget.images_per_class
        (0.05, 1)
    """

    budget: Annotated[Limits, *group("budget")] = Limits()
    memory: Annotated[Sizes, *group("memory")] = Sizes()
    query: Annotated[Asking, *group("query")] = Asking()
    inner: Annotated[InnerLoop, *group("inner loop")] = InnerLoop()
    outer: Annotated[OuterStep, *group("outer step")] = OuterStep()
    matching: Annotated[Matching, *group("matching objectives")] = Matching()
    run: Annotated[Running, *group("run")] = Running()


# --- settings by name ----------------------------------------------------------------------------------------------------


@cache
def settings(kind: type) -> dict[str, tuple[tuple[str, ...], Any]]:
    """Name -> where it stands (fields, from the outermost in) and its type; of all settings of a dataclass."""
    found: dict[str, tuple[tuple[str, ...], Any]] = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        plain, *extras = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
        if dataclasses.is_dataclass(plain):
            found |= {leaf: ((name, *path), type_) for leaf, (path, type_) in settings(typing.cast(type, plain)).items()}
        else:
            called = next((extra.name for extra in extras if getattr(extra, "name", None)), name)
            found[called.replace("-", "_")] = ((name,), plain)
    return found


def changed(config: T, **values: Any) -> T:
    """The same with other settings, each by its own name: changed(config, inner_lr=0.05, outer_steps=200)."""
    known = settings(type(config))
    deeper: dict[str, dict[str, Any]] = {}
    own: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise unknown("setting", name, known)
        field, *rest = known[name][0]
        if rest:
            deeper.setdefault(field, {})[name] = value
        else:
            own[field] = value
    own |= {field: changed(getattr(config, field), **some) for field, some in deeper.items()}
    return dataclasses.replace(typing.cast(Any, config), **own)


def setting(config: Any, name: str) -> Any:
    """One setting by its name."""
    return reduce(getattr, settings(type(config))[name][0], config)


def to_json(config: Any) -> dict[str, Any]:
    """All settings by their names."""
    return {name: plain_number(setting(config, name)) for name in settings(type(config))}


def plain_number(value: Any) -> Any:
    """A number of another maker, such as numpy's, as JSON has it; whatever else as it is."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


RENAMED = {"rival_lr": "baseline_lr", "rival_replay": "baseline_replay"}
"""settings of 0.1 that have another name now"""
REWORDED = {("query_form", "chances"): "probabilities"}
"""their values"""


def renewed(values: dict[str, Any]) -> dict[str, Any]:
    """Settings that 0.1 may have written, in today's names and words."""
    values = {RENAMED.get(name, name): value for name, value in values.items()}
    return {n: REWORDED.get((n, value), value) if isinstance(value, str) else value for n, value in values.items()}


def from_json(kind: type[T], values: dict[str, Any], where: object) -> T:
    """The dataclass that `to_json` wrote, or 0.1. An unknown or ill-typed setting is an error that names it; one that is missing
    is younger than what was written, and has its default."""
    known = settings(kind)
    values = renewed(values)
    for name, value in values.items():
        if name not in known:
            raise unknown(f"setting in {where}", name, known)
        if not fits(value, known[name][1]):
            raise RecollectError(f"{where}: {name} cannot be {f'{value!r:.60}'}")
    if any(len(path) > 1 for path, _ in known.values()):
        return changed(kind(), **values)
    try:  # one that is not nested may have fields without defaults
        return kind(**{known[name][0][0]: value for name, value in values.items()})
    except TypeError as error:
        raise RecollectError(f"{where} lacks a setting ({error})") from None


def fits(value: object, hint: Any) -> bool:
    """Whether a value of JSON has this type. A whole number is a float too; a typed dict may lack keys, and have others."""
    inside = typing.get_args(hint)
    if hint is Any:
        return True
    if typing.get_origin(hint) is Literal:
        return value in inside
    if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union:
        return any(fits(value, option) for option in inside)
    if typing.is_typeddict(hint):
        known = typing.get_type_hints(hint)
        return isinstance(value, dict) and all(fits(value[name], known[name]) for name in value if name in known)
    if typing.get_origin(hint) is list:
        return type(value) is list and all(fits(each, inside[0]) for each in value)
    if hint is float:
        return type(value) is float or (type(value) is int and abs(value) < MOST_FLOAT)
    return type(value) is (typing.get_origin(hint) or hint)


# --- presets and checks --------------------------------------------------------------------------------------------------


PAPER = changed(
    DistillConfig(), inner_steps=150, inner_per_class=32, window=None, window_place="late", augment_scope="outer",
    outer_steps=50_000, outer_optimiser="sgd", outer_lr=0.1, outer_momentum=0.5, outer_schedule="constant",
    real_per_class=64, clip_running=0.0, ema=0.0,
)  # fmt: skip
"""The paper's settings. It augments CIFAR-10 and CIFAR-100 by flip+rotate, and takes 200 inner steps for 50 images."""

PRESETS = {"fast": DistillConfig(), "paper": PAPER}


def preset(name: str, **values: Any) -> DistillConfig:
    """A named DistillConfig, with other settings.

    Arguments:
        name: "fast", which was chosen on validation splits, or "paper".
        values: settings by their names, those of the flags with underscores.

    Returns:
        A DistillConfig, to give to `distill` or `select`.

    Examples:
        >>> config = recollect.preset("fast", images_per_class=10, outer_steps=200)
        >>> config.budget.outer_steps
        200
    """
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return changed(PRESETS[name], **values)


LEAST = {
    "images_per_class": 1, "bases": 1, "matrices": 1, "shots": 1, "query_size": 2, "encoder_epochs": 0, "downsample": 1,
    "inner_steps": 1, "inner_per_class": 1, "window": 1, "classes_per_step": 1, "networks_per_step": 1, "outer_steps": 1,
    "real_per_class": 1, "seed": 0, "clip_running": 0, "clip_norm": 0, "checkpoint_seconds": 0, "keep_every": 0,
    "tasks": 1, "per_task": 0, "classes_per_task": 1, "batch": 1, "buffer": 1, "outer_per_batch": 0, "replay": 0,
    "test_steps": 1, "glances": 1, "baseline_replay": 0, "agem_reference": 1, "data_batch": 1, "gdumb_epochs": 1,
    "all_epochs": 1, "network_lasts": 1, "network_steps": 0, "expert_epochs": 1, "expert_starts": 1, 
    "ewc_strength": 0, "kept_downsample": 1, "epochs": 1,
}  # fmt: skip
"""of every setting that is counted or may be 0"""
MOST, MOST_SEED, MOST_FLOAT = 2**31 - 1, 2**63 - 1, 10**300
"""of every setting that is counted; of a seed; of a whole number that stands for a float"""
PLAIN = (str, bool, int, float, list, dict, tuple, type(None))
RATES = ("lr", "minutes", "inner_lr", "outer_lr", "encoder_lr", "baseline_lr", "agem_lr", "data_lr")
DECAYS = ("momentum", "inner_momentum", "outer_momentum", "ema")


def check_values(config: Any) -> None:
    """Refuse values of single settings that cannot be meant."""
    for name, (_, hint) in settings(type(config)).items():
        value: Any = setting(config, name)
        if value is None:
            if not fits(value, hint):
                raise RecollectError(f"{name} cannot be None")
            continue
        if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
            raise unknown(name, value, typing.get_args(hint))
        if type(value) in PLAIN and not fits(value, hint):  # numbers of other makers, as numpy's, pass
            raise RecollectError(f"{name} cannot be {f'{value!r:.60}'}")
        most = MOST_SEED if name == "seed" else MOST
        if name in LEAST and not LEAST[name] <= value < float("inf"):  # which NaN is not, either
            raise RecollectError(f"{name} is {value}: give {LEAST[name]} or more")
        if name in LEAST and isinstance(value, int) and value > most:
            raise RecollectError(f"{name} is {min(value, 10**30):,}: give {LEAST[name]} to {most:,}")
        if name in RATES and not 0 < value <= 1e6:
            raise RecollectError(f"{name} is {value}: give a number above 0, such as 0.01, and not beyond 1e6")
        if name in DECAYS and not 0 <= value < 1:
            raise RecollectError(f"{name} is {value}: give a number from 0 to below 1")


def read_recipe(values: dict[str, Any], where: object) -> Recipe:
    """A recipe that a file tells, every value of the right type and in a range that can be meant."""
    recipe = from_json(Recipe, values, where)
    try:
        check_values(recipe)
    except RecollectError as error:
        raise RecollectError(f"{where}: {error}") from None
    return recipe


def check(config: Any) -> None:
    """Refuse values that cannot be meant."""
    check_values(config)
