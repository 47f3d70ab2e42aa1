"""What a person sees: progress bars in a terminal, plain lines when piped, tables. No torch here."""

import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import permutations
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

if TYPE_CHECKING:
    from recollect.data.check import Checked
    from recollect.evaluation import Evaluation
    from recollect.training import Progress as Training

LINE_SECONDS = 5.0  # between plain lines
PATIENCE = 1.0  # seconds until Ctrl-C is answered by a word
SHOWN = 5  # files of a finding
SHORT_SECONDS = 1.0  # of a training that is over before one would look


@contextmanager
def steps(
    name: str, total: int, quiet: bool = False, done: int = 0, unit: str = "step"
) -> Iterator[Callable[[dict[str, Any]], None] | None]:
    """Progress of outer steps, or of an amount of other units: how many there are by now, the seconds that the last took, and its
    loss or what else is to be shown."""
    name = plain(name)
    if quiet:
        yield None
    elif sys.stderr.isatty():
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"), TimeElapsedColumn()
        with Progress(TextColumn("{task.description}", markup=False), *columns, console=Console(stderr=True)) as bar:
            yield _in_bar(bar, bar.add_task(name, total=total, completed=done, told=""), _teller(total, unit))
    else:
        yield _lines(name, _teller(total, unit), unit)


Teller = Callable[[dict[str, Any]], tuple[bool, float, float, str]]


def _teller(total: float, unit: str) -> Teller:
    """Of each step: whether a run begins with it (a selection has several), the time, how many there will be, all in words."""
    began, first, previous = 0.0, 0.0, math.inf

    def told(values: dict[str, Any]) -> tuple[bool, float, float, str]:
        nonlocal began, first, previous, total
        step, now, total = values["step"], time.monotonic(), values.get("of", total)
        begins, previous = step < previous, step
        if begins:
            began, first = now - values["seconds"], step - values.get("amount", 1)
        each, loss = (now - began) / (step - first), values.get("loss")
        what = values.get("what") or ("loss exploded" if loss is None else f"loss {loss:.4f}")
        return begins, now, total, f"{what}  {each:.2f} s/{unit}  {lasting(each * max(total - step, 0))} left"

    return told


def _in_bar(bar: Progress, task: TaskID, tell: Teller) -> Callable[[dict[str, Any]], None]:
    def update(line: dict[str, Any]) -> None:
        begins, _, total, told = tell(line)
        if begins:
            bar.reset(task)
        bar.update(task, completed=line["step"], total=total, told=told)

    return update


def _lines(name: str, tell: Teller, unit: str) -> Callable[[dict[str, Any]], None]:
    last = -math.inf

    def line(values: dict[str, Any]) -> None:
        nonlocal last
        (begins, now, total, told), step = tell(values), values["step"]
        if begins or now - last >= LINE_SECONDS or step > total - 1e-6:
            last = now
            print(f"{name}: {unit} {round(step, 1)}/{total}  {told}", file=sys.stderr, flush=True)

    return line


def of_all(show: Callable[[dict[str, Any]], None], total: float) -> Callable[[dict[str, Any]], None]:
    """Steps of several jobs at once, each line with its job's name, as one display."""
    at: dict[str, float] = {}

    def update(line: dict[str, Any]) -> None:
        before, at[line["job"]] = at.get(line["job"], 0.0), line["step"]
        loss = "exploded" if line.get("loss") is None else f"{line['loss']:.4f}"
        words = {"what": f"{line['job']}: loss {loss}", "of": total, "amount": max(line["step"] - before, 1e-9)}
        show(line | words | {"step": sum(at.values())})

    return update


@contextmanager
def answering() -> Iterator[None]:
    """Ctrl-C is answered within a second, also while a long operation, which Python cannot interrupt, is at work."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before, over = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False), threading.Event()

    def watch() -> None:
        with reader:
            while number := reader.recv(1):  # nothing, once the other end is closed
                if number[0] == signal.SIGINT and not over.wait(PATIENCE):
                    print("stopping, as soon as the operation at work ends", file=sys.stderr, flush=True)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        writer.close()


def loading(what: object) -> AbstractContextManager[Any]:
    """A word in a terminal while torch and data come."""
    return Console(stderr=True).status(plain(f"loading {what}")) if sys.stderr.isatty() else nullcontext()


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
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def accuracy_table(title: str, rows: Sequence[tuple["Evaluation", str]]) -> None:
    """Evaluations with a word on their size, as one table on stdout."""
    measured = ("R2", "RMSE") if rows and rows[0][0].errors else ("accuracy, %",)
    cells = [(e.name, size, e.network, *scores(e), str(len(e.values))) for e, size in rows]
    say(title, table(("trained on", "size", "network", *measured, "n"), cells, left=("trained on", "network")))


def metric(rows: Sequence[tuple["Evaluation", str]]) -> str:
    """What was measured."""
    return "R2 and RMSE" if any(found.errors for found, _ in rows) else "accuracy"


def scores(found: "Evaluation") -> tuple[str, ...]:
    """Accuracy in percent; or R2, and RMSE to four digits."""
    if not found.errors:
        return (f"{found.mean:.1f} ± {found.deviation:.1f}",)
    mean, deviation = found.rmse
    return f"{found.mean:.3f} ± {found.deviation:.3f}", f"{mean:.4g} ± {deviation:.2g}"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ()) -> Table:
    """A table whose columns stand right, as numbers do, but for those named in `left`."""
    found = Table(*(Column(plain(each), justify="left" if each in left else "right", overflow="fold") for each in headings))
    for row in rows:
        found.add_row(*map(plain, row))
    return found


def pairs(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """A page of names and values."""
    table = Table(Column(style="bold"), Column(overflow="fold"), show_header=False)
    for row in rows:
        table.add_row(*map(plain, row))
    say(title, table)


def say(*things: Any) -> None:
    """To stdout. A table is as wide as the terminal, or 110 columns into a pipe; a line of text is never broken."""
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False, markup=False, emoji=False)
    for thing in things:
        console.print(plain(thing) if isinstance(thing, str) else thing, soft_wrap=isinstance(thing, str))


def plain(text: str) -> str:
    """As it may be printed, whatever file it comes from: line breaks, escape sequences and half characters are spelt out."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def confusion(names: Sequence[str], counts: list[list[int]], on: str) -> None:
    """Accuracy, and how often each class was taken for each; of many classes only the most frequent mistakes."""
    total, right = sum(map(sum, counts)), sum(counts[i][i] for i in range(len(names)))
    if len(names) <= 10:
        corner = "true class \\ answer"
        counted = [(name, *map(str, row)) for name, row in zip(names, counts, strict=True)]
        shown = table((corner, *names), counted, left=(corner,))
    else:
        pairs = sorted(permutations(range(len(names)), 2), key=lambda pair: -counts[pair[0]][pair[1]])[:10]
        mistakes = [(names[truth], names[answer], str(counts[truth][answer])) for truth, answer in pairs]
        shown = table(("true class", "answer", "images"), mistakes, left=("true class", "answer"))
    say(f"accuracy {100 * right / total:.1f} % of {total:,} images of the {on} split", shown)


def checked(found: "Checked") -> None:
    """What was found in a folder of pictures: a summary, what stops it from being read, and what is worth a look."""
    sizes = [f"{size} ({count:,})" for size, count in found.sizes.items()]
    classes = [f"{name} ({count:,})" for name, count in found.classes.items()]
    rows = [
        ("pictures", f"{found.pictures:,}"),
        ("classes", class_names(classes)),
        ("sizes", ", ".join(sizes[:SHOWN]) + f", {len(sizes) - SHOWN} more" * (len(sizes) > SHOWN)),
    ]
    pairs(found.folder, rows)
    settled = [finding.what for finding in found.findings if finding.flag and not finding.stops]
    if settled:
        say("Settled by these options:", *(f"- {each}" for each in settled))
    for title, stops in (("It cannot be read as it is:", True), ("Worth a look:", False)):
        several = [each for each in found.findings if each.stops == stops and (stops or not each.flag)]
        if several:
            say(title)
        for finding in several:
            say(f"- {finding.what}. {finding.remedy[:1].upper()}{finding.remedy[1:]}.")
            for file in finding.files[:SHOWN]:
                say(f"    {file}")
            if len(finding.files) > SHOWN:
                say(f"    ... and {len(finding.files) - SHOWN:,} more (--json - has them all)")
    if found.is_readable:
        say("It can be read with these options.")
    elif found.flags:
        say(f"Options to try: {found.flags}")


def class_names(names: Sequence[str]) -> str:
    return f"{len(names)}: {', '.join(names[:20])}{' ...' * (len(names) > 20)}"


def listed(value: Any) -> str:
    """A header's value in words; four digits of a number are enough here."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {listed(each)}" for name, each in value.items())
    if isinstance(value, list):
        return " ".join(map(listed, value))
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
