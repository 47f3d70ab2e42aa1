"""`reproduce`: the jobs of a table's cells, performed by any executor; what is finished is gathered, and its page written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from recollect.data import NAMED, data_root, locate
from recollect.devices import find_device
from recollect.errors import RecollectError
from recollect.jobs import Executor, Inline, Job
from recollect.objectives import OBJECTIVES
from recollect.reproduce import page, pictures, rows
from recollect.reproduce.scales import Scale
from recollect.reproduce.tables import Cell, Table, chosen
from recollect.reproduce.work import Failed, Place, perform


@dataclass(frozen=True)
class Places:
    """Folders."""

    out: Path = Path("runs/reproduce")
    """runs and rows"""
    results: Path = Path("results/reproduce")
    """rows that are kept, a file a scale"""
    pages: Path = Path("docs/results")
    """a page a table, and figures"""

    @property
    def figures(self) -> Path:
        return self.pages / "figures"


@dataclass(frozen=True)
class Outcome:
    """What became of the cells."""

    made: list[str]
    failed: list[Failed]
    page: Path


def reproduce(
    table: Table,
    scale: Scale,
    cells: Sequence[str] = (),
    *,
    places: Places | None = None,
    root: str | None = None,
    device: str = "auto",
    executor: Executor | None = None,
    tell: Callable[[Any, float], None] = lambda what, amount: None,
) -> Outcome:
    """Make the rows of a table that are not there yet, and its page.

    Arguments:
        cells: their names, or beginnings of them. Default: all of the scale, but for those whose data are not
            at hand.
        places: folders; relative ones are below the working folder.
        root: folder of the named datasets.
        executor: performs the jobs; by default one after another, in this process.
        tell: told (what, amount); what is (the cell, an outer step's numbers or words), or ("done", words).
    """
    places = places or Places()
    find_device(device)
    due = chosen(table, cells, scale.name != "full")
    lacking = {cell.name: why for cell in due if (why := _lacks(cell, scale, root))}
    if cells and lacking:
        raise RecollectError(next(iter(lacking.values())))
    due = [cell for cell in due if cell.name not in lacking]
    rows.check_kept(places.results, scale, due)
    due = [cell for cell in due if rows.made(places.out, scale, cell) is None]
    place = Place(places.out, scale, root, device)

    def told(what: Any, amount: float) -> None:
        if what[0] == "done":
            show(table, scale, places)
        tell(what, amount)

    words = ("--scale", scale.name, "--out", places.out, "--results", places.results, "--pages", places.pages, "--device", device)
    words = tuple(str(word.absolute() if isinstance(word, Path) else word) for word in words) + (("--root", root) if root else ())

    def job(some: tuple[Cell, ...]) -> Job:
        command = ("recollect", "reproduce", table.name, "--cells", *(cell.name for cell in some), *words)
        return Job(some[0].run, perform, (some, place), len(some), places.out / scale.name, command)

    if due:
        (places.out / scale.name).mkdir(parents=True, exist_ok=True)
    jobs = [job(tuple(some)) for some in _together(due)]
    failed = [each for each in (executor or Inline()).run(jobs, told) if each is not None]
    failed += [Failed((f"{table.name} {name}",), f"not run: {why}") for name, why in lacking.items()]
    return Outcome([cell.name for cell in due], failed, show(table, scale, places))


def _together(cells: list[Cell]) -> list[list[Cell]]:
    """Cells of one job: they have one folder, or memories in common."""
    shares = lambda cell: cell.table if cell.kind in ("compose", "ask") else cell.run  # noqa: E731
    return [list(some) for _, some in groupby(cells, shares)]


def _lacks(cell: Cell, scale: Scale, root: str | None) -> str:
    """Why a cell cannot be made here; "" where it can."""
    objective, (name, _) = cell.settings.get("objective", "unrolled"), scale.data(cell)
    if objective not in OBJECTIVES:
        return f"{cell.table} {cell.name} needs the objective {objective}, which this version does not have: leave it out"
    try:
        if name in NAMED:
            locate(name, data_root(root))
    except RecollectError as error:
        return str(error)
    return ""


def show(table: Table, scale: Scale, places: Places) -> Path:
    """Gather what is finished, draw the table's figure, and write its page."""
    rows.gather(places.out, places.results, places.figures, scale, table)
    if table.curve and (found := rows.kept(places.results, scale.name).get(table.name)):
        pictures.curve(table, found, places.figures / f"{scale.name}-{table.name}.png")
    return page.write(table, places.results, places.pages)
