"""What a person sees: progress bars in a terminal, plain lines when piped, tables. No torch here."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

if TYPE_CHECKING:
    from recollect.evaluation import Evaluation
    from recollect.training import Progress as Training

LINE_SECONDS = 5.0  # between plain lines
SHORT_SECONDS = 2.0  # of a training that is over before one would look


@contextmanager
def steps(
    name: str, total: int, quiet: bool = False, done: int = 0, unit: str = "step"
) -> Iterator[Callable[[dict[str, Any]], None] | None]:
    """Progress of outer steps, or of other units: how many, loss, speed, time left."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with bar(MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"), TextColumn("{task.fields[speed]}")) as progress:
            yield _in_bar(progress, name, total, done, unit)
    else:
        yield _lines(name, total, unit)


def bar(*columns: ProgressColumn) -> Progress:
    """A bar on stderr, with these columns and the time left."""
    columns = (BarColumn(), *columns, TextColumn("left"), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}", markup=False), *columns, console=Console(stderr=True))


def _in_bar(progress: Progress, name: str, total: int, done: int, unit: str) -> Callable[[dict[str, Any]], None]:
    task = progress.add_task(name, total=total, completed=done, loss="-", speed="")

    def update(line: dict[str, Any]) -> None:
        if line["step"] <= progress.tasks[0].completed:  # the next run of a selection
            progress.reset(task)
        progress.update(
            task, completed=line["step"], total=line.get("of", total), loss=_loss(line), speed=f"{line['seconds']:.2f} s/{unit}"
        )

    return update


def _lines(name: str, total: int, unit: str) -> Callable[[dict[str, Any]], None]:
    began, last, first, previous = 0.0, 0.0, 0, math.inf

    def line(values: dict[str, Any]) -> None:
        nonlocal began, first, last, previous, total
        step, now, total = values["step"], time.monotonic(), values.get("of", total)
        if step <= previous:  # the first step, of this run or the next of a selection
            began, first = now - values["seconds"], step
        previous = step
        if now - last >= LINE_SECONDS or step in (first, total):
            last, per_step = now, (now - began) / (step - first + 1)
            told = f"loss {_loss(values)}  {per_step:.2f} s/{unit}  {lasting(per_step * (total - step))} left"
            print(f"{name}: {unit} {step}/{total}  {told}", file=sys.stderr, flush=True)

    return line


@contextmanager
def trainings(name: str, quiet: bool = False) -> Iterator[Callable[["Training"], None] | None]:
    """Progress of networks that are trained: epochs of all of them."""
    with steps(name, 1, quiet, unit="epoch") as show:
        began = time.monotonic()

        def progress(now: "Training") -> None:
            done = now.finished * now.epochs + now.together * now.epoch
            spent = time.monotonic() - began
            seconds = spent / done
            if show and spent > SHORT_SECONDS:
                show({"step": done, "of": now.networks * now.epochs, "loss": now.loss, "seconds": seconds})

        yield progress


def lasting(seconds: float) -> str:
    """A time as a person says it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _loss(line: dict[str, Any]) -> str:
    return "exploded" if line["loss"] is None else f"{line['loss']:.4f}"


def accuracy_table(title: str, rows: Sequence[tuple["Evaluation", str]]) -> None:
    """Evaluations with a word on their size, as one table on stdout."""
    table = _table("trained on", "size", "network", "accuracy, %", "n", left=("trained on", "network"))
    for evaluation, size in rows:
        shown = f"{evaluation.mean:.1f} ± {evaluation.deviation:.1f}"
        table.add_row(evaluation.name, size, evaluation.network, shown, str(len(evaluation.values)))
    say(title, table)


def _table(*headings: str, left: Sequence[str]) -> Table:
    return Table(*(Column(each, justify="left" if each in left else "right", overflow="fold") for each in headings))


def pairs(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """A page of names and values."""
    table = Table(Column(style="bold"), Column(overflow="fold"), show_header=False)
    for row in rows:
        table.add_row(*row)
    say(title, table)


def say(*things: Any) -> None:
    """To stdout. A table is as wide as the terminal, or 110 columns into a pipe; a line of text is never broken."""
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False, markup=False, emoji=False)
    for thing in things:
        console.print(thing, soft_wrap=isinstance(thing, str))


def confusion(names: Sequence[str], counts: list[list[int]], on: str) -> None:
    """Accuracy, and how often each class was taken for each; of many classes only the most frequent mistakes."""
    total, right = sum(map(sum, counts)), sum(counts[i][i] for i in range(len(names)))
    if len(names) <= 10:
        corner = "true class \\ answer"
        table = Table(Column(corner, overflow="fold"), *(Column(name, justify="right", overflow="fold") for name in names))
        for name, row in zip(names, counts, strict=True):
            table.add_row(name, *map(str, row))
    else:
        table = Table(*(Column(heading, overflow="fold") for heading in ("true class", "answer", "images")))
        mistakes = [(counts[i][j], names[i], names[j]) for i in range(len(names)) for j in range(len(names)) if i != j]
        for count, truth, answer in sorted(mistakes, key=lambda mistake: -mistake[0])[:10]:
            table.add_row(truth, answer, str(count))
    say(f"accuracy {100 * right / total:.1f} % of {total:,} images of the {on} split", table)


def class_names(names: Sequence[str]) -> str:
    return f"{len(names)}: {', '.join(names[:20])}{' ...' * (len(names) > 20)}"


def listed(value: Any) -> str:
    """A header's value in words; four digits of a number are enough here."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {listed(each)}" for name, each in value.items())
    if isinstance(value, list):
        return " ".join(map(listed, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
