"""Every choice in one place: frozen dataclasses from which the command line, the saved JSON and the Python call all come.

Nothing here imports torch, so that `recollect --help` answers at once.
"""

import dataclasses
import typing
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, TypeVar

from recollect.errors import RecollectError, unknown

T = TypeVar("T")


@dataclass(frozen=True)
class Recipe:
    """How a fresh network is trained on a recall: the paper's protocol."""

    network: str = "convnet"
    """convnet, resnet12, alexnet or mlp, with options: convnet:width=64,depth=4"""
    epochs: int = 300
    """passes over the recalled images"""
    batch: int = 640
    """images a step"""
    lr: float = 0.01
    """learning rate, constant"""
    momentum: float = 0.9
    """of SGD"""
    augment: str = "none"
    """fresh for every image and step: any of flip, rotate, crop, cutout, brightness, contrast, saturation, joined by +"""


@dataclass(frozen=True)
class DistillConfig:
    """How a dataset becomes a memory (Algorithm 1). The defaults are the preset `fast`."""

    images_per_class: int = 1
    """the budget: as many floats as this many images of each class"""
    bases: int | None = None
    """how many shared bases (K); the addressing matrices fill the rest of the budget. Default: as many as fit with one matrix
    for every 20 numbers of a base, and four or more"""
    addressing: Literal["learned", "one-hot"] = "learned"
    """learned addressing over shared bases, or one-hot: plain per-class images, as in standard distillation"""
    matrices: int | None = None
    """how many addressing matrices (r): images that each query recalls. Default: as many as the budget holds"""
    query: Literal["labels", "images"] = "labels"
    """what a memory is asked with: labels; or pictures, through an encoder that is trained with it"""
    shots: int = 5
    """pictures of each class that an outer step asks with (query images)"""
    query_size: int = 64
    """numbers that the encoder makes of a picture (query images)"""
    query_form: Literal["unit", "chances"] = "unit"
    """what pictures are asked with (query images). unit: each by itself, with its vector at length 1, as in the paper;
    chances: all pictures of a class together, with the softmax of their mean"""
    encoder_lr: float = 0.001
    """the encoder's learning rate (query images)"""
    encoder_epochs: int = 0
    """passes over the training images in which the encoder first learns to name their classes (query images; its
    query_size must be as many or more)"""
    encoder_augment: str = "none"
    """of the pictures it sees, in these passes and in outer steps: flip, crop, ... joined by + (query images)"""
    downsample: int = 2
    """bases are this much smaller than images on each side"""
    precision: Literal["float32", "float16", "bfloat16"] = "float32"
    """of the numbers in the file; half precision buys twice the numbers and is a budget of its own"""
    init: Literal["kaiming", "xavier", "unit"] = "kaiming"
    """of bases and addressing: Kaiming uniform (the paper), Xavier uniform (its code), or so that recalls have variance 1"""
    start: str | None = None
    """a memory of the same sizes to go on from (its file), instead of fresh bases and addressing. One that is asked with labels
    can go on with query images, as chances"""
    preprocess: Literal["auto", "normalise", "zca"] = "auto"
    """per-channel normalisation, with or without ZCA whitening. Auto: ZCA for svhn, cifar10 and cifar100"""
    network: str = "convnet"
    """the inner network: convnet, resnet12, alexnet or mlp, with options: convnet:width=64,depth=4"""

    inner_steps: int = 60
    """length of the unroll (T)"""
    inner_per_class: int | None = None
    """recalled images of each class that an inner step sees. Default: 10, or all where there are fewer"""
    inner_optimiser: Literal["sgd", "adam"] = "sgd"
    """of the inner loop"""
    inner_lr: float = 0.01
    """its learning rate (alpha_0)"""
    inner_momentum: float = 0.9
    """its momentum (beta_0)"""
    bridge: Literal["full", "forward-only", "none"] = "full"
    """whether the adjoint crosses steps through the momentum; none: no momentum at all"""
    window: int | None = 40
    """how many steps of the unroll the adjoint covers (None: all)"""
    window_place: Literal["late", "random"] = "random"
    """the window ends with the unroll, or the unroll ends at random, not before the window is full"""
    classes_per_step: int | None = None
    """labels sampled for each outer step (None: all; with query images, 5)"""
    networks_per_step: int = 1
    """fresh inner networks for each outer step, their gradients averaged"""
    augment: str = "none"
    """any of flip, rotate, crop, cutout, brightness, contrast, saturation, joined by +"""
    augment_scope: Literal["sample", "outer"] = "sample"
    """fresh for every recalled image and inner step; or one transform with one parameter for all images, recalled and
    real, of an outer step"""

    outer_steps: int = 1000
    """how often the memory is updated"""
    outer_optimiser: Literal["adam", "sgd"] = "adam"
    """of the memory"""
    outer_lr: float = 0.03
    """its learning rate (alpha_1)"""
    outer_momentum: float = 0.9
    """momentum of SGD, first decay rate of Adam (beta_1)"""
    outer_schedule: Literal["cosine", "constant"] = "cosine"
    """of the learning rate over the outer steps"""
    real_per_class: int = 200
    """real images of each class in the outer loss (fewer where there are fewer)"""
    clip_running: float = 2.0
    """clip the outer gradient at this many times the running mean of its norm, and skip one of 20 times, which comes from
    an inner loop that diverged (0: do neither)"""
    clip_norm: float = 0.0
    """clip the outer gradient at this norm (0: do not)"""
    ema: float = 0.99
    """decay of the average of the memory that is saved (0: save the memory itself)"""

    use_validation: bool = False
    """distil the validation split too: for a final run, when nothing is left to choose"""
    seed: int = 0
    """of everything random"""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one"""
    compute: Literal["auto", "bf16", "tf32", "fp32"] = "auto"
    """precision of the inner loop's products on a GPU. Auto: bf16 for the ConvNet and lamaml, TF32 for others"""
    compile: bool = False
    """torch.compile the inner passes: half a minute to start, then faster; worth it on long runs of large networks. The
    ConvNet on a GPU, the mlp and lamaml everywhere are written by hand and do not need it"""
    checkpoint_seconds: float = 60.0
    """how often a checkpoint is written"""
    keep_every: int = 0
    """also keep the memory as it is after every so many outer steps, in the run's folder (0: only at the end)"""


PAPER = DistillConfig(
    inner_steps=150,
    inner_per_class=32,
    window=None,
    window_place="late",
    augment_scope="outer",
    outer_steps=50_000,
    outer_optimiser="sgd",
    outer_lr=0.1,
    outer_momentum=0.5,
    outer_schedule="constant",
    real_per_class=64,
    clip_running=0.0,
    ema=0.0,
)
"""The paper's settings. It augments CIFAR-10 and CIFAR-100 by flip+rotate, and takes 200 inner steps for 50 images."""

PRESETS = {"fast": DistillConfig(), "paper": PAPER}


def preset(name: str) -> DistillConfig:
    """A named DistillConfig: "fast" (the default) or "paper"."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name]


def check(config: DistillConfig) -> None:
    """Refuse numbers that cannot be meant."""
    least = {
        "images_per_class": 1, "bases": 1, "matrices": 1, "shots": 1, "query_size": 2, "encoder_epochs": 0,
        "downsample": 1, "inner_steps": 1,
        "inner_per_class": 1, "window": 1, "classes_per_step": 1, "networks_per_step": 1, "outer_steps": 1,
        "real_per_class": 1, "seed": 0, "inner_momentum": 0, "outer_momentum": 0, "clip_running": 0, "clip_norm": 0, "ema": 0,
        "checkpoint_seconds": 0, "keep_every": 0,
    }  # fmt: skip
    for name, low in least.items():
        value = getattr(config, name)
        if value is not None and not low <= value < float("inf"):  # which NaN is not, either
            raise RecollectError(f"{name} is {value}: give {low} or more")
    for name in ("inner_lr", "outer_lr", "encoder_lr"):
        if not 0 < getattr(config, name) <= 1e6:
            raise RecollectError(f"{name} is {getattr(config, name)}: give a number above 0, such as 0.01")
    for name in ("inner_momentum", "outer_momentum", "ema"):
        if getattr(config, name) >= 1:
            raise RecollectError(f"{name} is {getattr(config, name)}: give a number from 0 to below 1")
    if config.window is not None and config.window > config.inner_steps:
        raise RecollectError(
            f"window is {config.window} in an unroll of {config.inner_steps} inner_steps: give at most {config.inner_steps}"
        )


def to_json(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def from_json(kind: type[T], values: dict[str, Any], where: object) -> T:
    """The dataclass that `to_json` wrote. An unknown or ill-typed field is an error that names it; one that is missing is
    younger than what was written, and has its default."""
    hints = typing.get_type_hints(kind)
    for name in values:
        if name not in hints:
            raise unknown(f"setting in {where}", name, hints)
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise RecollectError(f"{where}: {name} cannot be {value!r}")
    return kind(**values)


def _fits(value: object, hint: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if isinstance(hint, UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint
