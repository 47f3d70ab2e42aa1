"""What a person sees of a continual run: progress over tasks and learners, the table beside the paper's, two figures."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from recollect.continual.config import LEARNERS
from recollect.continual.learners import PER_TASK
from recollect.continual.metrics import Spread, mean_matrix, spread
from recollect.continual.run import Result
from recollect.files import write_json
from recollect.jobs import Tell
from recollect.show import terminal
from recollect.show.heat import accuracy_matrix
from recollect.show.style import COLUMN, LINES, MARKERS, PAPER_WHITE, save, styled

NAMES = {
    "compress": "compress-then-recall",
    "union": "union of memories",
    "gdumb": "GDumb per task",
    "online": "Online",
    "er": "experience replay",
    "agem": "A-GEM",
    "ewc": "EWC",
    "all-data": "all data per task",
}


class Quoted(NamedTuple):
    """What the paper prints: mean and deviation of RA, and BTI."""

    ra: float
    deviation: float
    bti: float | None = None

    def __str__(self) -> str:
        return f"{self.ra:.2f} ± {self.deviation:.2f}"


_STREAMS = ("rotations", "permutations", "many", "cifar100", "rotations-60k", "permutations-60k")
_QUOTED: dict[str, tuple[tuple[float, ...], ...]] = {
    "compress": ((80.32, 0.28), (78.48, 0.76), (74.07, 0.51), (62.58, 1.1), (88.3, 0.58), (87.3, 0.92)),
    "online": ((53.38, 1.53, -5.44), (55.42, 0.65, -13.76), (32.62, 0.43, -19.06)),  # CIFAR-100's repeats that of MANY
    "ewc": ((57.96, 1.33, -20.42), (62.32, 1.34, -13.32), (33.10, 0.14, -18.50)),
    "GEM": ((67.38, 1.75, -18.02), (55.42, 1.10, -24.42), (39.50, 0.62, -17.50), (48.27, 1.10, -13.7)),
    "MER": ((77.42, 0.78, -5.60), (73.46, 0.45, -9.96), (51.00, 0.54, -13.57), (51.38, 1.05, -12.83)),
    "La-MAML": ((77.42, 0.65, -8.64), (74.34, 0.67, -7.60), (50.43, 0.21, -10.00), (61.18, 1.44, -9.00)),
    "Sparse-La-MAML": ((77.77, 0.58, -8.16), (76.88, 0.72, -8.39), (50.81, 0.79, -13.73)),
    "Kernel Continual Learning": ((), (), (), (), (81.8, 0.60), (85.5, 0.78)),
    "Stable SGD": ((), (), (), (), (70.8, 0.78), (80.1, 0.51)),
    "multitask, all at once": ((), (), (), (), (87.3, 0.47), (86.5, 0.21)),
}
PAPER = {
    stream: {learner: Quoted(*cells[place]) for learner, cells in _QUOTED.items() if any(cells[place : place + 1])}
    for place, stream in enumerate(_STREAMS)
}
"""The paper's tables, its baselines' figures as it quotes them: stream -> learner -> what it prints."""


@contextmanager
def progress(name: str, quiet: bool = False) -> Iterator[Callable[[int, float], Tell] | None]:
    """Tasks of all learners and seeds that are done; for `run`."""
    with terminal.steps(name, 1, quiet, unit="task") as show:

        def begin(total: int, done: float) -> Tell:
            last = time.monotonic()

            def tell(what: str, amount: float) -> None:
                nonlocal done, last
                done, before, last = done + amount, last, time.monotonic()
                if show and amount:
                    show({"step": done, "amount": amount, "of": total, "seconds": last - before, "what": what})

            return tell

        yield begin if show else None


def summary(results: Sequence[Result], stream: str) -> list[dict[str, Any]]:
    """A row for each learner that was run, and for each baseline that only the paper has."""
    quoted = PAPER.get(stream, {})
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys((*LEARNERS, *quoted)):
        found = [result for result in results if result.learner == name]
        if not found and name in LEARNERS:
            continue
        row: dict[str, Any] = {"learner": name, "n": len(found)}
        untold = [result.untold for result in found if result.untold is not None]
        row |= {"untold": asdict(spread(untold))} if untold else {}
        for metric in ("ra", "la", "bti", "bwt", "forgetting"):
            values = [value for result in found if (value := getattr(result.metrics, metric)) is not None]
            row[metric] = asdict(spread(values)) if values else None
        seconds = round(sum(result.seconds for result in found), 2) if found else None
        rows.append(row | {"seconds": seconds, "paper": quoted[name]._asdict() if name in quoted else None})
    return rows


def table(results: Sequence[Result], stream: str, told: str) -> Table:
    """The paper's table beside ours; `told` says what a single network is told of the task at test. Where classes tell tasks
    apart, the accuracy without the task's number comes first."""
    quoted, rows, known = PAPER.get(stream, {}), [], summary(results, stream)
    free = any("untold" in row for row in known)
    metrics = ("bti",) if free and quoted else ("la", "bti", "bwt")  # as wide as a page
    for row in known:
        name, theirs = row["learner"], quoted.get(row["learner"])
        cells = [str(Spread(**row["untold"])) if "untold" in row else ""] if free else []
        cells += ["yes" if name in PER_TASK else "no" if name == "union" else told]
        cells += [str(Spread(**row["ra"])) if row["ra"] else "not run"]
        cells += [f"{row[metric]['mean']:.2f}" if row[metric] else "" for metric in metrics]
        paper = [str(theirs), "n/a" if theirs.bti is None else f"{theirs.bti:.2f}"] if theirs else ["", ""]
        rows.append((NAMES.get(name, name), *cells, str(row["n"] or ""), *(paper if quoted else [])))
    headings = ["learner", *(["class-incremental"] if free else []), "task id", "RA", *map(str.upper, metrics), "n"]
    return terminal.table([*headings, *(["paper: RA", "BTI"] if quoted else [])], rows, left=("learner", "task id"))


@styled
def curve(results: Sequence[Result], title: str = "") -> Figure:
    """RA against tasks seen, a line for each learner, with the deviation over seeds."""
    figure = Figure((COLUMN, 2.6))
    axes = figure.subplots()
    for number, name in enumerate(dict.fromkeys(result.learner for result in results)):
        curves = [result.metrics.curve for result in results if result.learner == name]
        points = [spread(values) for values in zip(*curves, strict=True)]
        color = LINES[number % len(LINES)]
        marks: dict[str, Any] = {"marker": MARKERS[number % len(MARKERS)], "markevery": max(1, len(points) // 10)}
        if number >= len(LINES):
            marks["markerfacecolor"] = PAPER_WHITE
        places = range(1, len(points) + 1)
        axes.plot(places, [point.mean for point in points], color=color, label=NAMES[name], **marks)
        low, high = ([p.mean + sign * p.deviation for p in points] for sign in (-1, 1))
        axes.fill_between(places, low, high, color=color, alpha=0.2, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="tasks seen", ylabel="mean accuracy on them, %", title=title)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def finish(results: Sequence[Result], stream: str, folder: Path) -> None:
    """The table as a file, and the figures, in the run's folder."""
    write_json(folder / "table.json", {"stream": stream, "rows": summary(results, stream)})
    save(curve(results, stream), folder / "curve.png")
    for name in dict.fromkeys(result.learner for result in results):
        mean = mean_matrix([result.matrix for result in results if result.learner == name])
        save(accuracy_matrix(mean, f"{stream}: {NAMES[name]}"), folder / f"matrix-{name}.png")
