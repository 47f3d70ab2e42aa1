"""Every choice of a continual run in one frozen dataclass, and a preset for each of the paper's streams. No torch here."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from recollect.errors import RecollectError, unknown

LEARNERS = ("compress", "union", "gdumb", "online", "er", "agem", "ewc", "all-data")
"""In the order of the table; `union` is compress-then-recall without the task's number at test."""


@dataclass(frozen=True)
class ContinualConfig:
    """How tasks stream by, and how each learner deals with them. In Python, the defaults are the paper's for Rotations, and
    where it says nothing those of its dataset distillation; STREAMS has a preset for each stream, the command line's defaults."""

    kind: Literal["rotations", "permutations", "split"] = "rotations"
    """what tells tasks apart: an angle, a permutation of the pixels, or their classes"""
    tasks: int | None = 20
    """how many (None: for split, as many as the classes make)"""
    per_task: int | None = 1000
    """training images of a task (None: all there are)"""
    classes_per_task: int | None = None
    """for split alone"""
    batch: int = 10
    """images that come at a time"""
    preprocess: Literal["pixels", "normalise"] = "pixels"
    """pixels in 0..1 as they are, or each channel at mean 0 and deviation 1"""
    use_validation: bool = False
    """stream the validation split too: for a final run, when nothing is left to choose"""
    on: Literal["test", "validation"] = "test"
    """the split to report; whatever you choose by it, choose on validation"""
    network: str = "mlp"
    """of every learner: mlp (784-256-256-10), lamaml, convnet, ..."""
    buffer: int = 200
    """images that may be kept; memories and real samples share it, counted in floats"""

    bases: int | None = 24
    """of a task's memory; its addressing matrices fill the rest of the task's share. Default: as
    many as fit with one matrix for every 20 numbers of a base, and four or more"""
    downsample: int = 2
    """bases are this much smaller than images on each side"""
    init: Literal["kaiming", "xavier", "unit", "samples"] = "kaiming"
    """of bases and addressing: random, or such that they recall samples of the task as nearly as they can (outer steps begin
    when as many have come as the memory recalls images, or half of the task's batches)"""
    outer_per_batch: int = 4
    """outer steps for each incoming batch (the paper's #Replay); 0 leaves a memory as its samples, not distilled"""
    replay: int = 190
    """samples of the reservoir beside the incoming batch in the outer loss (fewer where there are fewer)"""
    kept_downsample: int = 1
    """the reservoir's samples are kept by their lowest frequencies, as many numbers as images have that are this much smaller
    on each side, so that more of them fit"""
    inner_steps: int = 150
    """length of the unroll (T)"""
    inner_per_class: int = 32
    """recalled images of each class that an inner step sees (all, where there are fewer)"""
    inner_lr: float = 0.01
    """of the inner loop, and of the network that is trained at test"""
    inner_momentum: float = 0.9
    """of both"""
    bridge: Literal["full", "forward-only", "none"] = "full"
    """whether the adjoint crosses steps through the momentum; none: no momentum at all"""
    window: int | None = None
    """how many last steps of the unroll the adjoint covers (None: all)"""
    window_place: Literal["late", "random"] = "late"
    """where there is a window: it ends with the unroll, or the unroll ends at random, not before the window is full"""
    networks_per_step: int = 1
    """fresh inner networks for each outer step, their gradients averaged"""
    augment: str = "none"
    """of recalled images, fresh for each image and inner step: any of flip, rotate, crop, cutout, ... joined by +"""
    outer_optimiser: Literal["sgd", "adam"] = "sgd"
    """of the memory"""
    outer_lr: float = 0.1
    """its learning rate"""
    outer_momentum: float = 0.5
    """momentum of SGD, first decay rate of Adam"""
    outer_schedule: Literal["constant", "cosine"] = "constant"
    """of the learning rate over a task"""
    clip_norm: float = 0.0
    """clip a task's outer gradient at this norm (0: do not)"""
    clip_running: float = 0.0
    """clip it at this many times the running mean of its norm, and skip one of 20 times (0: do neither)"""
    ema: float = 0.0
    """decay of the average of the memory that is kept (0: keep the memory itself)"""
    test_steps: int | None = None
    """of a fresh network on a recall, at test. Default: as many as the unroll has"""

    rival_lr: float = 0.1
    """SGD of Online, ER and EWC on the stream itself"""
    agem_lr: float = 0.01
    """and of A-GEM"""
    glances: int = 5
    """their steps on each incoming batch"""
    rival_replay: int = 10
    """buffered samples beside the incoming batch, for ER"""
    agem_reference: int = 256
    """buffered samples of earlier tasks that A-GEM must not get worse on (fewer where there are fewer)"""
    ewc_strength: float = 5.0
    """of EWC's penalty"""
    data_lr: float = 0.01
    """networks on real images, one for each task (gdumb, all-data): SGD with inner_momentum"""
    data_batch: int = 64
    """their batch"""
    gdumb_epochs: int = 200
    """passes over a task's share of real images"""
    all_epochs: int = 50
    """passes over all images of a task"""

    compute: Literal["auto", "bf16", "tf32", "fp32"] = "auto"
    """precision of products on a GPU. Auto: bf16 for convnet and lamaml, TF32 for others"""


_SHORT: dict[str, Any] = {
    "inner_steps": 40, "inner_lr": 0.03, "outer_optimiser": "adam", "outer_lr": 0.02, "outer_momentum": 0.9,
    "outer_schedule": "cosine", "clip_running": 2.0, "ema": 0.99,
}  # fmt: skip
"""ours, for the MLP on MNIST: docs/continual-settings.md"""
_ROTATIONS = replace(ContinualConfig(), **_SHORT, replay=10)
_PERMUTATIONS = replace(
    _ROTATIONS, kind="permutations", bases=8, downsample=1, outer_per_batch=20, replay=90
)  # where a batch has 20 steps, it counts less in each
_LARGE = {
    "per_task": 60_000, "use_validation": True, "outer_per_batch": 2, "replay": 10, "inner_lr": 0.08, "all_epochs": 5,
}  # fmt: skip
_SPLIT = replace(ContinualConfig(), kind="split", tasks=None, per_task=None, preprocess="normalise")
_CIFAR = replace(
    _SPLIT, tasks=20, classes_per_task=5, network="lamaml", rival_lr=0.03, agem_lr=0.03,
    **_SHORT | {"inner_steps": 160, "inner_lr": 0.01, "outer_lr": 0.03}, init="samples", kept_downsample=7, window=20,
    window_place="random", inner_per_class=10, augment="flip+crop", test_steps=640,
)  # fmt: skip

STREAMS: dict[str, ContinualConfig] = {
    "rotations": _ROTATIONS,
    "permutations": _PERMUTATIONS,
    "many": replace(_PERMUTATIONS, tasks=100, per_task=200, buffer=1000, ewc_strength=0.03),
    "cifar100": _CIFAR,
    "rotations-60k": replace(_ROTATIONS, **_LARGE),
    "permutations-60k": replace(_PERMUTATIONS, **_LARGE),
    "split": replace(_SPLIT, classes_per_task=2, bases=None),
}
"""The protocol is the paper's (tasks, buffer, network, bases, outer steps a batch). How a task is distilled is ours, but for
`split`, which has the defaults above."""

DATASETS = {name: "cifar100" if name == "cifar100" else "mnist" for name in STREAMS}
"""of each stream, where no other is given"""


def stream_config(name: str) -> ContinualConfig:
    if name not in STREAMS:
        raise unknown("stream", name, STREAMS)
    return STREAMS[name]


def check(config: ContinualConfig) -> None:
    """Refuse numbers that cannot be meant, and settings that exclude each other."""
    least = {
        "tasks": 1, "per_task": 0, "classes_per_task": 1, "batch": 1, "buffer": 1, "bases": 1, "downsample": 1,
        "outer_per_batch": 0, "replay": 0, "inner_steps": 1, "inner_per_class": 1, "window": 1, "networks_per_step": 1,
        "test_steps": 1, "glances": 1, "rival_replay": 0, "agem_reference": 1, "data_batch": 1, "gdumb_epochs": 1,
        "all_epochs": 1, "clip_norm": 0, "clip_running": 0, "ewc_strength": 0, "kept_downsample": 1,
    }  # fmt: skip
    for name, low in least.items():
        value = getattr(config, name)
        if value is not None and not low <= value < math.inf:  # which NaN is not, either
            raise RecollectError(f"{name} is {value}: give {low} or more")
    for name in ("inner_lr", "outer_lr", "rival_lr", "agem_lr", "data_lr"):
        if not 0 < getattr(config, name) <= 1e6:
            raise RecollectError(
                f"{name} is {getattr(config, name)}: give a number above 0, such as 0.01, and not beyond 1e6"
            )
    for name in ("inner_momentum", "outer_momentum", "ema"):
        if not 0 <= getattr(config, name) < 1:
            raise RecollectError(f"{name} is {getattr(config, name)}: give a number from 0 to below 1")
    if config.window is not None and config.window > config.inner_steps:
        raise RecollectError(
            f"window is {config.window} in an unroll of {config.inner_steps} inner_steps: give at most {config.inner_steps}"
        )
    if not config.outer_per_batch and config.init != "samples":
        raise RecollectError(
            f"outer_per_batch is 0, which leaves memories random ({config.init}): give more, or init samples"
        )
    if config.on == "validation" and config.use_validation:
        raise RecollectError("use_validation streams the validation split, so it cannot be reported: turn one off")
    if config.kind != "split" and config.classes_per_task is not None:
        raise RecollectError(f"classes_per_task is for the stream split: every task of {config.kind} has all classes")
    if config.kind == "split" and config.classes_per_task is None:
        raise RecollectError("the stream split needs classes_per_task: give 1 or more")
    if config.kind != "split" and config.tasks is None:
        raise RecollectError(f"tasks is None, but {config.kind} can go on for ever: give a number")


def check_learners(names: "tuple[str, ...] | list[str]") -> None:
    for name in names:
        if name not in LEARNERS:
            raise unknown("learner", name, LEARNERS)
    if not names:
        raise RecollectError(f"no learner named: give some of {', '.join(LEARNERS)}")
