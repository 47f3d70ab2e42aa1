"""What a cell is given at each scale: the settings of its distillation, in legs, and of what is measured with it.

quick is for a CPU: at most half an hour of two cores a cell, five networks. full is the paper's protocol, on a GPU, with the best
recipe of docs/recipe.md and twenty networks. A test has a scale of its own, of seconds.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from recollect.errors import unknown
from recollect.reproduce.tables import Cell

Settings = dict[str, Any]

ALL = {"bases": 16}
LONG = ALL | {"inner_steps": 200, "window": 60, "outer_lr": 0.015, "outer_steps": 3000}
FLIPPED = ALL | {"augment": "flip", "window": 60}
WHOLE = {"inner_steps": 150, "window": None, "inner_per_class": 32, "outer_lr": 0.015}
TEN = {"images_per_class": 10, "bases": 160, "init": "samples"}
LEGS: dict[str, list[Settings]] = {
    "mnist-1": [ALL | {"outer_steps": 1500}, LONG],
    "fashion-mnist-1": [ALL | {"outer_steps": 3500}, LONG, ALL | WHOLE | {"inner_per_class": 29, "outer_steps": 1200}],
    "svhn-1": [
        ALL | {"inner_steps": 150, "window": 60, "outer_steps": 3000},
        ALL | WHOLE | {"outer_steps": 800},
        ALL | WHOLE | {"outer_lr": 0.03, "outer_steps": 900},
    ],
    "cifar10-1": [
        FLIPPED | {"inner_steps": 150, "outer_steps": 4000},
        FLIPPED | {"inner_steps": 250, "outer_lr": 0.02, "outer_steps": 9500},
        FLIPPED | WHOLE | {"outer_steps": 500},
        FLIPPED | WHOLE | {"outer_steps": 4400},
    ],
    "mnist-10": [TEN | {"outer_steps": 2000}, LONG | TEN | {"outer_steps": 2000}],
    "fashion-mnist-10": [TEN | {"outer_steps": 2000}, LONG | TEN | {"outer_steps": 2000}],
    "cifar10-10": [FLIPPED | TEN | {"inner_steps": 150, "outer_steps": 3000}, FLIPPED | TEN | WHOLE | {"outer_steps": 1000}],
}
"""of cells of Table 1 at full scale, each from the memory of the one before: docs/recipe.md. Others have the two of `_usual`"""


def _usual(cell: Cell) -> list[Settings]:
    """A long unroll with a window, then the whole adjoint with the larger batch: what took CIFAR-10 to the paper's figure."""
    first: Settings = {"inner_steps": 150, "window": 60, "outer_steps": 3000}
    if cell.settings["images_per_class"] > 1:
        first["init"] = "samples"
    return [first, WHOLE | {"outer_steps": 1000}]


class Pictures(NamedTuple):
    """Recall with pictures."""

    labels: Settings
    """of the memory that is asked with labels"""
    asked: Settings
    """of those that are asked with pictures, which go on from it"""
    draws: int
    ways: int = 5


class Tasks(NamedTuple):
    """Classes that were never seen together."""

    settings: Settings
    tests: int
    """test tasks"""
    epochs: int | None = None
    full_epochs: int = 30
    ways: int = 5
    """classes of a memory"""


@dataclass(frozen=True)
class Scale:
    """What cells are given."""

    name: str
    networks: int
    """fresh networks for each accuracy"""
    best: Settings | None
    """of cells that are distilled as well as can be; None: in the legs above"""
    compared: Settings
    """of cells that are compared with each other"""
    timed: Settings
    """of cells that have the same minutes"""
    steps: dict[int, int]
    """outer steps of these, from so many images per class on"""
    longest: int
    """inner steps: the paper's, where they are not more"""
    tasks: Tasks
    pictures: Pictures
    architectures: dict[str, str] = field(default_factory=dict)
    """networks in the place of the paper's, to distil with"""
    trained: dict[str, str] = field(default_factory=dict)
    """networks in the place of the paper's, to train on a recall; `dataset network` for one dataset alone"""
    stream: Settings = field(default_factory=dict)
    seeds: int = 5
    epochs: int = 300
    experts: tuple[int, int] = (10, 10)
    """how many, and their epochs"""
    instead: str = ""
    """the dataset in the place of every other, for a test of seconds"""

    def data(self, cell: Cell) -> tuple[str, tuple[str, ...]]:
        """The dataset of a cell, and the only classes to take of it."""
        return (self.instead, ()) if self.instead else (cell.dataset, cell.classes)

    def legs(self, cell: Cell) -> list[Settings]:
        """The settings of each leg of a cell's distillation."""
        own = dict(cell.settings)
        if cell.kind == "best":
            if self.best is not None:
                return [self.best | own]
            legs = LEGS.get(cell.name) or _usual(cell)
            return [own | leg for leg in legs]
        if cell.kind == "timed":
            return [self.timed | own]
        if "network" in own:
            own["network"] = self.architectures.get(own["network"], own["network"])
        if "inner_steps" in own:
            own["inner_steps"] = min(own["inner_steps"], self.longest)
        least = max(count for count in self.steps if count <= own["images_per_class"])
        return [self.compared | {"outer_steps": self.steps[least]} | own]

    def network(self, cell: Cell, name: str) -> str:
        """What is trained on the recall of a cell, where the paper trains this."""
        return self.trained.get(f"{cell.dataset} {name}") or self.trained.get(name, name)


WAYS = {"images_per_class": 1, "bases": 18, "augment": "flip", "outer_steps": 700}
LABELS = {
    "bases": 64, "matrices": 16, "augment": "flip", "real_per_class": 20, "inner_lr": 0.03, "inner_steps": 40, "window": 30,
    "classes_per_step": 20, "outer_steps": 6000,
}  # fmt: skip
ASKED = {
    "query": "images", "query_form": "probabilities", "query_size": 100, "encoder_epochs": 30, "encoder_augment": "flip+crop",
    "encoder_lr": 1e-4, "outer_lr": 0.01, "outer_steps": 1000,
}  # fmt: skip
SMALL = {"network": "convnet:width=32", "inner_lr": 0.02, "init": "samples", "real_per_class": 100}

QUICK = Scale(
    "quick",
    networks=5,
    best={"minutes": 20.0},
    compared=SMALL | {"inner_steps": 60, "window": None},
    timed={"minutes": 20.0, "network": "convnet:width=32"},
    steps={1: 300, 10: 120, 50: 120, 100: 120},
    longest=100,
    architectures={"convnet": "convnet:width=32", "resnet12": "resnet12:width=8", "alexnet": "alexnet:width=16"},
    trained={
        "cifar100 convnet": "convnet:width=64", "tinyimagenet convnet": "convnet:width=32", "resnet12": "resnet12:width=16",
        "alexnet": "alexnet:width=32",
    },
    stream={"outer_per_batch": 1},
    seeds=2,
    tasks=Tasks(WAYS | SMALL | {"inner_steps": 40, "window": 25, "outer_steps": 60}, tests=20, full_epochs=5),
    pictures=Pictures(
        LABELS | SMALL | {"inner_lr": 0.03, "real_per_class": 20, "outer_steps": 120},
        ASKED | {"encoder_epochs": 3, "outer_steps": 40}, draws=1,
    ),
)  # fmt: skip
FULL = Scale(
    "full",
    networks=20,
    best=None,
    compared=WHOLE | {"outer_steps": 3000},
    timed={"minutes": 20.0},
    steps={1: 3000},
    longest=200,
    tasks=Tasks(WAYS, tests=1000),
    pictures=Pictures(LABELS, ASKED, draws=5),
)
SCALES = {scale.name: scale for scale in (QUICK, FULL)}


def scaled(name: str) -> Scale:
    if name not in SCALES:
        raise unknown("scale", name, SCALES)
    return SCALES[name]
