"""The paper's tables and figures as data: the cells of each, what is asked of a cell, and what the paper prints there.

A cell says what the paper says of it, and no more; how it is distilled is a matter of the scale.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from recollect.errors import RecollectError, unknown
from recollect.reproduce import paper
from recollect.reproduce.paper import Quoted
from recollect.show.streams import PAPER as STREAMS

Kind = Literal["best", "compared", "timed", "stream", "compose", "ask"]
DATASETS = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "svhn": "SVHN",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "tinyimagenet": "TinyImageNet",
}
AUGMENTED = ("cifar10", "cifar100")  # by the paper
NETWORKS = {"alexnet": "AlexNet", "resnet12": "ResNet-12", "convnet": "ConvNet"}
SHOWN = ("apple", "aquarium_fish", "baby", "bed", "bottle")  # of CIFAR-100, in the paper's pictures


@dataclass(frozen=True)
class Cell:
    """One thing to distil and measure: a row of results, with one accuracy for each of its columns."""

    table: str
    name: str
    dataset: str
    row: str
    """where it stands in the table"""
    columns: tuple[str, ...]
    paper: tuple[Quoted | None, ...]
    """what the paper prints there"""
    kind: Kind = "compared"
    """distilled as well as can be, or like the cells that it is compared with: as many outer steps, or minutes; or a stream,
    memories of tasks, pictures"""
    settings: dict[str, Any] = field(default_factory=dict)
    """what the paper says of it"""
    networks: tuple[str, ...] = ("convnet",)
    """trained on the recall, one for each column"""
    on: Literal["test", "validation"] = "test"
    classes: tuple[str, ...] = ()
    """the only classes of the dataset. Default: all"""
    shared: str = ""
    """the table whose cell of the same name has this very memory"""
    figure: Literal["", "similarity", "recalled"] = ""
    """drawn of its memory"""
    is_usual: bool = True
    """whether it is run where no cells are named at quick scale"""

    @property
    def run(self) -> str:
        """The folder of its distillation."""
        return f"{self.shared or self.table}/{self.name}"


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    source: str
    """where it is in the paper"""
    equal: str
    """what is the same for all of its cells, and why"""
    cells: tuple[Cell, ...]
    curve: Literal["", "bases", "inner_steps"] = ""
    """the setting against which accuracies are drawn"""


def budgets(dataset: str) -> tuple[int, ...]:
    """Images per class for which the paper has the dataset."""
    return tuple(paper.FULL[dataset])


def _augmented(dataset: str) -> dict[str, Any]:
    return {"augment": "flip"} if dataset in AUGMENTED else {}


def _named(dataset: str, budget: int) -> str:
    return f"{DATASETS[dataset]}, {budget}"


def _table1() -> Iterator[Cell]:
    for dataset in DATASETS:
        for budget in budgets(dataset):
            settings = {"images_per_class": budget, **_augmented(dataset)}
            quoted = (paper.FULL[dataset][budget],)
            row, columns = DATASETS[dataset], (f"{budget} image{'s' * (budget > 1)} per class",)
            yield Cell("table1", f"{dataset}-{budget}", dataset, row, columns, quoted, "best", settings)


PER_CLASS = {"addressing": "one-hot", "downsample": 1}
VARIANTS: dict[str, tuple[str, dict[str, Any], paper.ByBudget]] = {
    "gradients": ("single-step gradient matching", PER_CLASS | {"objective": "gradients"}, paper.GRADIENTS),
    "bptt": ("BPTT", PER_CLASS, paper.BPTT),
    "downsampling": ("+ downsampling", {"addressing": "one-hot"}, paper.DOWNSAMPLED),
    "addressing": ("+ addressing", {}, paper.WITHOUT_AUGMENTATION),
    "augmentation": ("+ augmentation", {"augment": "flip"}, paper.FULL),
}
"""of the ablation: the column, its settings, what the paper prints"""


def _ablation() -> Iterator[Cell]:
    for dataset in paper.BPTT:
        for budget in budgets(dataset):
            for variant, (column, settings, quoted) in VARIANTS.items():
                if variant == "augmentation" and dataset not in AUGMENTED:
                    continue
                last = variant == "addressing" and dataset not in AUGMENTED  # all there is, where nothing is augmented
                value = (paper.FULL if last else quoted)[dataset][budget]
                usual = budget == 1 and dataset in ("mnist", "fashion-mnist", "cifar10")
                name, given = f"{dataset}-{budget}-{variant}", {"images_per_class": budget, **settings}
                yield Cell(
                    "ablation", name, dataset, _named(dataset, budget), (column,), (value,), "compared", given, is_usual=usual
                )


def _momentum() -> Iterator[Cell]:
    words = {"none": "no momentum", "forward-only": "forward-only momentum", "full": "full momentum"}
    for budget in (1, 10):
        for bridge, column in words.items():
            settings = {"images_per_class": budget, "bridge": bridge, "inner_steps": 200, **PER_CLASS}
            quoted = (paper.MOMENTUM[bridge][budget],)
            yield Cell(
                "momentum",
                f"cifar10-{budget}-{bridge}",
                "cifar10",
                _named("cifar10", budget),
                (column,),
                quoted,
                "compared",
                settings,
            )


def _inner_steps() -> Iterator[Cell]:
    for dataset in ("cifar10", "svhn"):
        for steps in (1, 10, 100):
            for bridge, column in (("none", "no momentum"), ("full", "momentum")):
                settings = {"images_per_class": 1, "bridge": bridge, "inner_steps": steps, **PER_CLASS}
                name, row = f"{dataset}-1-{steps}-{bridge}", f"{DATASETS[dataset]}, {steps} inner step{'s' * (steps > 1)}"
                yield Cell(
                    "inner-steps", name, dataset, row, (column,), (None,), "compared", settings, is_usual=dataset == "cifar10"
                )


def _cross_architecture() -> Iterator[Cell]:
    for budget in (1, 10):
        for made, words in NETWORKS.items():
            quoted = tuple(paper.ACROSS[made][budget][network] for network in NETWORKS)
            settings = {"images_per_class": budget, "network": made, **_augmented("cifar10")}
            row = f"distilled with {words}, {budget} image{'s' * (budget > 1)} per class"
            yield Cell(
                "cross-architecture", f"cifar10-{budget}-{made}", "cifar10", row, tuple(NETWORKS.values()), quoted, "compared",
                settings, tuple(NETWORKS), is_usual=budget == 1,
            )  # fmt: skip


def _bases() -> Iterator[Cell]:
    for dataset in ("mnist", "fashion-mnist", "cifar10"):
        for bases in (8, 16, 24, 32):
            settings = {"images_per_class": 1, "bases": bases, **_augmented(dataset)}
            name, row = f"{dataset}-1-{bases}", _named(dataset, 1)
            yield Cell("bases", name, dataset, row, (f"{bases} bases",), (None,), "compared", settings, on="validation")


def _similarity() -> Iterator[Cell]:
    for dataset in AUGMENTED:
        settings = {"images_per_class": 1, **_augmented(dataset)}
        yield Cell(
            "similarity", f"{dataset}-1", dataset, DATASETS[dataset], (), (), "best", settings, (), shared="table1",
            figure="similarity",
        )  # fmt: skip


def _visualisations() -> Iterator[Cell]:
    same, by_budget = "the same number of recalled images", "images per class"
    whole: dict[str, Any] = {"downsample": 1, "augment": "flip"}
    for name, row, settings in (
        ("cifar100-100-bptt", f"{same}: BPTT, 100", {"images_per_class": 100, "addressing": "one-hot"}),
        ("cifar100-2-bases", f"{by_budget}: 2, with 8 bases", {"images_per_class": 2, "bases": 8}),
        ("cifar100-10-bases", f"{same}, and {by_budget}: 10, with 43 bases", {"images_per_class": 10, "bases": 43}),
        ("cifar100-50-bases", f"{by_budget}: 50, with 215 bases", {"images_per_class": 50, "bases": 215}),
    ):
        yield Cell(
            "visualisations", name, "cifar100", row, (), (), "compared", whole | settings, (), classes=SHOWN, figure="recalled"
        )


OBJECTIVES: dict[str, paper.ByBudget] = {
    "unrolled": paper.BPTT, "regression": {}, "gradients": paper.GRADIENTS, "distributions": paper.OTHERS["DM"],
    "trajectories": paper.OTHERS["TM"],
}  # fmt: skip
"""each with what the paper prints of it on per-class images"""


def _objectives() -> Iterator[Cell]:
    """All for the same minutes; then two hours of each, of which the best two are run."""
    for dataset in ("mnist", "fashion-mnist"):
        learned = DATASETS[dataset], {}, {"unrolled": paper.FULL}
        pixels = f"{DATASETS[dataset]}, plain pixels", PER_CLASS, OBJECTIVES
        for objective in OBJECTIVES:
            for ending, (column, settings, quoted) in (("", learned), ("-pixels", pixels)):
                given = {"images_per_class": 1, "objective": objective, **settings}
                value = (quoted.get(objective, {}).get(dataset, {}).get(1),)
                yield Cell("objectives", f"{dataset}-{objective}{ending}", dataset, objective, (column,), value, "timed", given)
            given = {"images_per_class": 1, "objective": objective, "minutes": 120.0}
            yield Cell(
                "objectives", f"2h-{dataset}-{objective}", dataset, f"{objective}, two hours", (learned[0],), (None,), "timed",
                given, is_usual=False,
            )  # fmt: skip


LEARNERS = {"compress": "compress-then-recall", "gdumb": "GDumb per task", "online": "Online", "ewc": "EWC"}


def _continual() -> Iterator[Cell]:
    words = {"many": "MANY", "cifar100": "CIFAR-100"}
    for stream, quoted in STREAMS.items():
        values = {learner: (each.ra, each.deviation) for learner, each in quoted.items()}
        learners = ("compress", "gdumb") if stream.endswith("-60k") else tuple(LEARNERS)
        row = words.get(stream, stream.removesuffix("-60k").capitalize())
        row += ", 60,000 images a task" if stream.endswith("-60k") else ""
        yield Cell(
            "continual", stream, "cifar100" if stream == "cifar100" else "mnist", row, tuple(LEARNERS[each] for each in learners),
            tuple(values.get(each) for each in learners), "stream", {"learners": list(learners)}, (),
            is_usual=not stream.endswith("-60k"),
        )  # fmt: skip


SOURCES = ("memories", "random real images", "all the data")
METHODS = ("image addressing", "nearest neighbour", "classify-then-recall")


def _compose() -> Iterator[Cell]:
    for ways, quoted in paper.COMPOSED.items():
        values = tuple(quoted.get(source) for source in SOURCES)
        yield Cell("compose", f"{ways}-way", "cifar100", f"{ways} classes", SOURCES, values, "compose", {"ways": ways}, ())


def _ask() -> Iterator[Cell]:
    for shots, quoted in paper.ASKED.items():
        values = tuple(quoted[method] for method in METHODS)
        yield Cell("ask", f"{shots}-shot", "cifar100", f"{shots} shot", METHODS, values, "ask", {"shots": shots}, ())


STEPS = "All cells have the same number of outer steps, as in the paper"
TABLES = {
    table.name: table
    for table in (
        Table(
            "table1", "Accuracy by dataset and budget", "Table 1",
            "Every cell has the best recipe of its scale: at quick scale the same minutes.", tuple(_table1()),
        ),
        Table(
            "ablation", "What each component adds", "Tables 2 and 7",
            f"{STEPS}: minutes would favour BPTT, whose steps see fewer images. Single-step gradient matching steps otherwise; "
            "it has as many outer steps too.", tuple(_ablation()),
        ),
        Table(
            "momentum", "Momentum in the inner loop and in its adjoint", "Table 8",
            f"{STEPS}; steps cost nearly the same with and without.", tuple(_momentum()),
        ),
        Table(
            "inner-steps", "Length of the unroll, with and without momentum", "Figure 4",
            f"{STEPS}. A step of 100 inner steps takes far longer than one of 1; the minutes stand beside them.",
            tuple(_inner_steps()), curve="inner_steps",
        ),
        Table(
            "cross-architecture", "Memories of one architecture, networks of another", "Table 6",
            f"{STEPS}; the minutes of the larger networks stand beside them.", tuple(_cross_architecture()),
        ),
        Table(
            "bases", "Accuracy against the number of bases", "Figures 2 and 5",
            f"{STEPS}, and each is judged on the validation split, where the paper chooses the number.", tuple(_bases()),
            curve="bases",
        ),
        Table(
            "objectives", "What addressing adds under each objective", "After Table 2",
            "All cells have the same minutes and the same network; plain pixels are per-class images of the same floats.",
            tuple(_objectives()),
        ),
        Table(
            "similarity", "How similar the coefficients of classes are", "Figures 3 and 6",
            "The memories are those of Table 1; the cosine of two classes' mean coefficients.", tuple(_similarity()),
        ),
        Table(
            "visualisations", "Recalled images", "Figures 8 to 14",
            f"{STEPS}. Five classes of CIFAR-100, bases as large as images, as in the paper.", tuple(_visualisations()),
        ),
        Table(
            "continual", "Compress-then-recall on streams of tasks", "Table 3 and section 5.2",
            "Retained accuracy (RA). Every learner sees a stream once; other learners are in [continual.md](../continual.md).",
            tuple(_continual()),
        ),
        Table(
            "compose", "Classes that were never seen together", "Section 5.3.1",
            "One classifier for each test task; the deviation is over tasks.", tuple(_compose()),
        ),
        Table(
            "ask", "Recall with pictures", "Table 4",
            "20 5-way tasks; the deviation is over tasks and draws of pictures.", tuple(_ask()),
        ),
    )
}  # fmt: skip
"""name -> what it is, in the order of the paper"""


def named(table: str) -> Table:
    if table not in TABLES:
        raise unknown("table", table, TABLES)
    return TABLES[table]


def chosen(table: Table, names: Sequence[str], quick: bool) -> list[Cell]:
    """The cells of these names, or whose names begin with them; without any, the usual ones of the scale."""
    if not names:
        return [cell for cell in table.cells if cell.is_usual or not quick]
    for name in names:
        if not any(_is(cell, name) for cell in table.cells):
            raise unknown(f"cell of {table.name}", name, [cell.name for cell in table.cells])
    found = [cell for cell in table.cells if any(_is(cell, name) for name in names)]
    if not found:
        raise RecollectError(f"{table.name} has no cells: name another table")
    return found


def _is(cell: Cell, name: str) -> bool:
    return cell.name == name or cell.name.startswith(f"{name}-")
