"""What a person sees: progress bars in a terminal, plain lines when piped, tables. No torch here."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from recollect.evaluation import Evaluation

LINE_SECONDS = 5.0  # between plain lines


@contextmanager
def steps(name: str, total: int, quiet: bool = False, done: int = 0) -> Iterator[Callable[[dict[str, Any]], None] | None]:
    """Progress of outer steps: step, loss, speed, time left."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with _bar(name, total, done) as update:
            yield update
    else:
        yield _lines(name, total)


@contextmanager
def _bar(name: str, total: int, done: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=total, completed=done, loss="-", speed="")

        def update(line: dict[str, Any]) -> None:
            if line["step"] <= progress.tasks[0].completed:  # the next run of a selection
                progress.reset(task)
            progress.update(task, completed=line["step"], loss=_loss(line), speed=f"{line['seconds']:.2f} s/step")

        yield update


def _lines(name: str, total: int) -> Callable[[dict[str, Any]], None]:
    began = last = previous = 0.0
    first = None

    def line(values: dict[str, Any]) -> None:
        nonlocal began, first, last, previous
        step, now = values["step"], time.monotonic()
        if first is None or step <= previous:  # the first step, of this run or the next of a selection
            began, first = now - values["seconds"], step
        previous = step
        if now - last < LINE_SECONDS and step not in (first, total):
            return
        last = now
        per_step = (now - began) / (step - first + 1)
        left = per_step * (total - step)
        text = f"{name}: step {step}/{total}  loss {_loss(values)}  {per_step:.2f} s/step  {left:.0f} s left"
        print(text, file=sys.stderr, flush=True)

    return line


def _loss(line: dict[str, Any]) -> str:
    return "exploded" if line["loss"] is None else f"{line['loss']:.4f}"


def accuracy_table(title: str, rows: Sequence[tuple["Evaluation", str]]) -> None:
    """Evaluations with a word on their size, as one table on stdout."""
    table = Table()
    for heading in ("trained on", "size", "network", "accuracy, %", "n"):
        table.add_column(heading, justify="left" if heading in ("trained on", "network") else "right", overflow="fold")
    for evaluation, size in rows:
        shown = f"{evaluation.mean:.1f} ± {evaluation.deviation:.1f}"
        table.add_row(evaluation.name, size, evaluation.network, shown, str(len(evaluation.values)))
    say(title)
    say(table)


def pairs(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """A page of names and values."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    say(title)
    say(table)


def say(what: Any) -> None:
    """To stdout. A table is as wide as the terminal, or 110 columns into a pipe; a line of text is never broken."""
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False, markup=False, emoji=False)
    console.print(what, soft_wrap=isinstance(what, str))


def confusion(names: Sequence[str], counts: list[list[int]], on: str) -> None:
    """Accuracy, and how often each class was taken for each; of many classes only the most frequent mistakes."""
    total, right = sum(map(sum, counts)), sum(counts[i][i] for i in range(len(names)))
    table = Table()
    if len(names) <= 10:
        table.add_column("true class \\ answer", overflow="fold")
        for name in names:
            table.add_column(name, justify="right", overflow="fold")
        for name, row in zip(names, counts, strict=True):
            table.add_row(name, *map(str, row))
    else:
        for heading in ("true class", "answer", "images"):
            table.add_column(heading, overflow="fold")
        mistakes = [(counts[i][j], names[i], names[j]) for i in range(len(names)) for j in range(len(names)) if i != j]
        for count, truth, answer in sorted(mistakes, key=lambda mistake: -mistake[0])[:10]:
            table.add_row(truth, answer, str(count))
    say(f"accuracy {100 * right / total:.1f} % of {total:,} images of the {on} split")
    say(table)


def class_names(names: Sequence[str]) -> str:
    return f"{len(names)}: {', '.join(names[:20])}{' ...' * (len(names) > 20)}"


def listed(value: Any) -> str:
    """A header's value in words; four digits of a number are enough here."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {listed(each)}" for name, each in value.items())
    if isinstance(value, list):
        return " ".join(map(listed, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
