"""What a person sees of a continual run: progress over tasks and learners, the table beside the paper's, two figures."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from recollect.continual.config import LEARNERS
from recollect.continual.learners import PER_TASK
from recollect.continual.metrics import Spread, mean_matrix, spread
from recollect.continual.run import Result
from recollect.files import write_json
from recollect.jobs import Tell
from recollect.show import terminal
from recollect.show.heat import accuracy_matrix
from recollect.show.style import COLUMN, LINES, MARKERS, PAPER_WHITE, new, save, styled

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


PAPER: dict[str, dict[str, Quoted]] = {
    "rotations": {
        "compress": Quoted(80.32, 0.28),
        "online": Quoted(53.38, 1.53, -5.44),
        "ewc": Quoted(57.96, 1.33, -20.42),
        "GEM": Quoted(67.38, 1.75, -18.02),
        "MER": Quoted(77.42, 0.78, -5.60),
        "La-MAML": Quoted(77.42, 0.65, -8.64),
        "Sparse-La-MAML": Quoted(77.77, 0.58, -8.16),
    },
    "permutations": {
        "compress": Quoted(78.48, 0.76),
        "online": Quoted(55.42, 0.65, -13.76),
        "ewc": Quoted(62.32, 1.34, -13.32),
        "GEM": Quoted(55.42, 1.10, -24.42),
        "MER": Quoted(73.46, 0.45, -9.96),
        "La-MAML": Quoted(74.34, 0.67, -7.60),
        "Sparse-La-MAML": Quoted(76.88, 0.72, -8.39),
    },
    "many": {
        "compress": Quoted(74.07, 0.51),
        "online": Quoted(32.62, 0.43, -19.06),
        "ewc": Quoted(33.10, 0.14, -18.50),
        "GEM": Quoted(39.50, 0.62, -17.50),
        "MER": Quoted(51.00, 0.54, -13.57),
        "La-MAML": Quoted(50.43, 0.21, -10.00),
        "Sparse-La-MAML": Quoted(50.81, 0.79, -13.73),
    },
    "cifar100": {  # its Online cell repeats that of MANY, and is left out
        "compress": Quoted(62.58, 1.1),
        "GEM": Quoted(48.27, 1.10, -13.7),
        "MER": Quoted(51.38, 1.05, -12.83),
        "La-MAML": Quoted(61.18, 1.44, -9.00),
    },
    "rotations-60k": {
        "compress": Quoted(88.3, 0.58),
        "Kernel Continual Learning": Quoted(81.8, 0.60),
        "Stable SGD": Quoted(70.8, 0.78),
        "multitask, all at once": Quoted(87.3, 0.47),
    },
    "permutations-60k": {
        "compress": Quoted(87.3, 0.92),
        "Kernel Continual Learning": Quoted(85.5, 0.78),
        "Stable SGD": Quoted(80.1, 0.51),
        "multitask, all at once": Quoted(86.5, 0.21),
    },
}
"""The paper's tables, its baselines' figures as it quotes them."""


# --- progress ----------------------------------------------------------------------------------------------------------


@contextmanager
def progress(name: str, quiet: bool = False) -> Iterator[Callable[[int, float], Tell] | None]:
    """A bar in a terminal, plain lines when piped; for `run`."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=Console(stderr=True)) as bar:
            yield lambda total, done: _in_bar(bar, name, total, done)
    else:
        yield lambda total, done: _lines(name, total, done)


def _in_bar(bar: Bar, name: str, total: int, done: float) -> Tell:
    task = bar.add_task(name, total=total)
    bar.advance(task, done)
    return lambda what, amount: bar.update(task, advance=amount, description=f"{name}: {what}")


def _lines(name: str, total: int, done: float) -> Tell:
    last, first, began = 0.0, done, time.monotonic()

    def line(what: str, amount: float) -> None:
        nonlocal done, last
        done += amount
        now = time.monotonic()
        if now - last < terminal.LINE_SECONDS and done < total - 1e-6:
            return
        last = now
        left = (now - began) / max(done - first, 1e-9) * max(total - done, 0)
        shown = f", {left:.0f} s left" if done > first else ""
        print(f"{name}: {what}: {done:.1f} of {total} tasks{shown}", file=sys.stderr, flush=True)

    return line


# --- the table ---------------------------------------------------------------------------------------------------------


def summary(results: Sequence[Result], stream: str) -> list[dict[str, Any]]:
    """A row for each learner, run or not, and for each baseline that only the paper has."""
    quoted = PAPER.get(stream, {})
    rows: list[dict[str, Any]] = []
    for name in (*LEARNERS, *(name for name in quoted if name not in LEARNERS)):
        found = [result for result in results if result.learner == name]
        row: dict[str, Any] = {"learner": name, "n": len(found)}
        for metric in ("ra", "la", "bti", "bwt", "forgetting"):
            values = [value for result in found if (value := getattr(result.metrics, metric)) is not None]
            row[metric] = asdict(spread(values)) if values else None
        row["seconds"] = round(sum(result.seconds for result in found), 2) if found else None
        row["paper"] = quoted[name]._asdict() if name in quoted else None
        rows.append(row)
    return rows


def table(results: Sequence[Result], stream: str, told: str) -> Table:
    """The paper's table beside ours; `told` says what a single network is told of the task at test."""
    quoted, shown = PAPER.get(stream, {}), Table()
    for heading in ("learner", "task id", "RA, %", "LA", "BTI", "BWT", "n", "paper: RA, %", "BTI"):
        shown.add_column(heading, justify="left" if heading in ("learner", "task id") else "right", no_wrap=True)
    for row in summary(results, stream):
        name, theirs = row["learner"], quoted.get(row["learner"])
        cells = [str(Spread(**row["ra"])) if row["ra"] else "not run", *map(_mean, (row["la"], row["bti"], row["bwt"]))]
        paper = [str(theirs), "n/a" if theirs.bti is None else f"{theirs.bti:.2f}"] if theirs else ["", ""]
        is_told = "yes" if name in PER_TASK else "no" if name == "union" else told
        shown.add_row(NAMES.get(name, name), is_told, *cells, str(row["n"] or ""), *paper)
    return shown


def _mean(found: dict[str, Any] | None) -> str:
    return "" if found is None else f"{found['mean']:.2f}"


# --- figures -----------------------------------------------------------------------------------------------------------


@styled
def curve(results: Sequence[Result], title: str = "") -> Figure:
    """RA against tasks seen, a line for each learner, with the deviation over seeds."""
    figure = new(COLUMN, 2.6)
    axes = figure.subplots()
    for number, name in enumerate(dict.fromkeys(result.learner for result in results)):
        curves = [result.metrics.curve for result in results if result.learner == name]
        points = [spread(values) for values in zip(*curves, strict=True)]
        color, mark = LINES[number % len(LINES)], MARKERS[number % len(MARKERS)]
        hollow = {} if number < len(LINES) else {"markerfacecolor": PAPER_WHITE}
        places, means = range(1, len(points) + 1), [point.mean for point in points]
        marks: dict[str, Any] = {"marker": mark, "markevery": max(1, len(points) // 10)} | hollow
        axes.plot(places, means, color=color, label=NAMES[name], **marks)
        low, high = ([p.mean + sign * p.deviation for p in points] for sign in (-1, 1))
        axes.fill_between(places, low, high, color=color, alpha=0.2, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("tasks seen")
    axes.set_ylabel("mean accuracy on them, %")
    axes.set_title(title)
    axes.grid(axis="y")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def matrix(results: Sequence[Result], title: str = "") -> Figure:
    """One learner's accuracy matrix, the mean over seeds."""
    return accuracy_matrix(mean_matrix([result.matrix for result in results]), title)


def finish(results: Sequence[Result], stream: str, folder: Path) -> None:
    """The table as a file, and the figures, in the run's folder."""
    write_json(folder / "table.json", {"stream": stream, "rows": summary(results, stream)})
    save(curve(results, stream), folder / "curve.png")
    for name in dict.fromkeys(result.learner for result in results):
        of_learner = [result for result in results if result.learner == name]
        save(matrix(of_learner, f"{stream}: {NAMES[name]}"), folder / f"matrix-{name}.png")
