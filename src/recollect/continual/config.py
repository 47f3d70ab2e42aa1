"""Every choice of a continual run, and a preset for each of the paper's streams. No torch here."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from recollect.config import InnerLoop, OuterStep, Sizes, changed, flag, group
from recollect.config import check as check_numbers
from recollect.errors import RecollectError, unknown

LEARNERS = ("compress", "union", "gdumb", "online", "er", "agem", "ewc", "all-data")
"""In the order of the table; `union` is compress-then-recall without the task's number at test."""


@dataclass(frozen=True)
class Tasks:
    """How tasks stream by."""

    kind: Literal["rotations", "permutations", "split"] = "rotations"
    """difference between tasks: an angle (rotations), a permutation of the pixels, or their classes (split)"""
    tasks: int | None = 20
    """number of tasks; None makes as many as there are classes for, in the stream split"""
    per_task: int | None = 1000
    """training images of a task; None takes all there are"""
    classes_per_task: int | None = None
    """number of classes of a task, in the stream split"""
    batch: int = 10
    """incoming images of a batch"""
    preprocess: Literal["pixels", "normalise"] = "pixels"
    """preprocessing of images: pixels in 0..1 as they are, or normalise each channel to mean 0 and deviation 1"""
    use_validation: bool = False
    """stream the validation split too, for a final run when nothing is left to choose"""
    on: Literal["test", "validation"] = "test"
    """split to report; choose settings on validation"""


@dataclass(frozen=True)
class Keeping:
    """What may be kept of a stream, and how it is used while a task streams by."""

    images: Annotated[int, flag("buffer")] = 200
    """budget of the buffer in images; memories and real samples share it, counted in floats"""
    outer_per_batch: int = 4
    """outer steps for each incoming batch (the paper's #Replay); 0 leaves a memory as its initial samples"""
    replay: int = 190
    """samples of the reservoir in the outer loss, beside the incoming batch"""
    kept_downsample: int = 1
    """factor by which the reservoir's samples are smaller than images on each side; they keep their lowest frequencies, and more
    of them fit"""
    test_steps: int | None = None
    """steps of a fresh network on a recall, at test. Default: as many as the unroll has"""


@dataclass(frozen=True)
class Baselines:
    """The learners beside ours."""

    lr: Annotated[float, flag("baseline_lr")] = 0.1
    """learning rate of Online, ER and EWC, by SGD on the stream"""
    agem_lr: float = 0.01
    """learning rate of A-GEM, by SGD on the stream"""
    glances: int = 5
    """steps of Online, ER, A-GEM and EWC on each incoming batch"""
    replay: Annotated[int, flag("baseline_replay")] = 10
    """buffered samples that ER sees beside the incoming batch"""
    agem_reference: int = 256
    """buffered samples of earlier tasks that A-GEM must not get worse on"""
    ewc_strength: float = 5.0
    """strength of EWC's penalty"""
    data_lr: float = 0.01
    """learning rate of networks on real images, one for each task (gdumb, all-data); inner_momentum holds for them too"""
    data_batch: int = 64
    """images of a training step on real images (gdumb, all-data)"""
    gdumb_epochs: int = 200
    """passes over a task's share of real images (gdumb)"""
    all_epochs: int = 50
    """passes over all images of a task (all-data)"""


@dataclass(frozen=True)
class ContinualConfig:
    """How tasks stream by, and how each learner deals with them. In Python, the defaults are the paper's for Rotations, and
    where it says nothing those of its dataset distillation; STREAMS has a preset for each stream, the command line's defaults."""

    stream: Annotated[Tasks, *group("stream")] = Tasks()
    buffer: Annotated[Keeping, *group("buffer")] = Keeping()
    memory: Annotated[Sizes, *group("memory")] = Sizes(bases=24)
    inner: Annotated[InnerLoop, *group("inner loop")] = InnerLoop(
        network="mlp", steps=150, per_class=32, window=None, window_place="late"
    )
    outer: Annotated[OuterStep, *group("outer step")] = OuterStep(
        optimiser="sgd", lr=0.1, momentum=0.5, schedule="constant", clip_running=0.0, ema=0.0
    )
    baselines: Annotated[Baselines, *group("baselines")] = Baselines()
    compute: Literal["auto", "bf16", "tf32", "fp32"] = "auto"
    """precision of products on a GPU. auto: bf16 for convnet and lamaml, TF32 for others"""


_SHORT: dict[str, Any] = {
    "inner_steps": 40, "inner_lr": 0.03, "outer_optimiser": "adam", "outer_lr": 0.02, "outer_momentum": 0.9,
    "outer_schedule": "cosine", "clip_running": 2.0, "ema": 0.99,
}  # fmt: skip
"""ours, for the MLP on MNIST: docs/continual-settings.md"""
_ROTATIONS = changed(ContinualConfig(), **_SHORT, replay=10)
# where a batch has 20 steps, it counts less in each
_PERMUTATIONS = changed(_ROTATIONS, kind="permutations", bases=8, downsample=1, outer_per_batch=20, replay=90)
_LARGE = {"per_task": 60_000, "use_validation": True, "outer_per_batch": 2, "replay": 10, "inner_lr": 0.08, "all_epochs": 5}
_SPLIT = changed(ContinualConfig(), kind="split", tasks=None, per_task=None, preprocess="normalise")
_CIFAR = changed(
    _SPLIT, tasks=20, classes_per_task=5, network="lamaml", baseline_lr=0.03, agem_lr=0.03,
    **_SHORT | {"inner_steps": 160, "inner_lr": 0.01, "outer_lr": 0.03}, init="samples", kept_downsample=7, window=20,
    window_place="random", inner_per_class=10, augment="flip+crop", test_steps=640,
)  # fmt: skip

STREAMS: dict[str, ContinualConfig] = {
    "rotations": _ROTATIONS,
    "permutations": _PERMUTATIONS,
    "many": changed(_PERMUTATIONS, tasks=100, per_task=200, buffer=1000, ewc_strength=0.03),
    "cifar100": _CIFAR,
    "rotations-60k": changed(_ROTATIONS, **_LARGE),
    "permutations-60k": changed(_PERMUTATIONS, **_LARGE),
    "split": changed(
        _SPLIT,
        classes_per_task=2,
        bases=None,
        outer_per_batch=2,
        init="samples",
        **_SHORT | {"inner_steps": 20, "inner_lr": 0.05},
    ),
}
"""The protocol is the paper's (tasks, buffer, network, bases, outer steps a batch), how a task is distilled is ours. `split` is
for any dataset, and short: two minutes for the digits on a CPU."""

DATASETS = {name: "cifar100" if name == "cifar100" else "mnist" for name in STREAMS}
"""of each stream, where no other is given"""


def check(config: ContinualConfig) -> None:
    """Refuse numbers that cannot be meant, and settings that exclude each other."""
    check_numbers(config)
    stream, init = config.stream, config.memory.init
    if config.outer.objective == "trajectories":
        raise RecollectError("objective is trajectories, whose experts a stream's tasks do not have: give another")
    if not config.buffer.outer_per_batch and init != "samples":
        raise RecollectError(f"outer_per_batch is 0, which leaves memories random ({init}): give more, or init samples")
    if stream.on == "validation" and stream.use_validation:
        raise RecollectError("use_validation streams the validation split, so it cannot be reported: turn one off")
    if stream.kind != "split" and stream.classes_per_task is not None:
        raise RecollectError(f"classes_per_task is for the stream split: every task of {stream.kind} has all classes")
    if stream.kind == "split" and stream.classes_per_task is None:
        raise RecollectError("the stream split needs classes_per_task: give 1 or more")
    if stream.kind != "split" and stream.tasks is None:
        raise RecollectError(f"tasks is None, but {stream.kind} can go on for ever: give a number")


def check_learners(names: "tuple[str, ...] | list[str]") -> None:
    for name in names:
        if name not in LEARNERS:
            raise unknown("learner", name, LEARNERS)
    if not names:
        raise RecollectError(f"no learner named: give some of {', '.join(LEARNERS)}")
