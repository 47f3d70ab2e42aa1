"""Rows of results: what was asked of a cell, what came out, where and how. Each is a file below the runs; those that are kept are
gathered in one file a scale.

A row that was made under another config than is asked for now is refused, wherever it lies.
"""

import json
import shutil
from pathlib import Path
from typing import Any, TypedDict

from recollect.config import fits
from recollect.errors import RecollectError
from recollect.files import compact, read_json, write_compact
from recollect.reproduce.scales import Scale
from recollect.reproduce.tables import TABLES, Cell, Table


class Accuracy(TypedDict):
    """One column of a row, in percent."""

    network: str
    mean: float
    deviation: float
    n: str
    on: str
    protocol: str
    values: list[float]


class Row(TypedDict):
    asked: dict[str, Any]
    """what the cell is given at its scale"""
    command: str
    objective: str
    minutes: float | None
    """of distilling"""
    measured_minutes: float | None
    """of training networks on what was recalled"""
    hardware: str
    commit: str
    torch: str
    numbers: int
    """in the memory"""
    made: dict[str, Any]
    """what was decided for the dataset and the minutes"""
    accuracies: list[Accuracy]
    measures: dict[str, Any]
    """what else there is to say"""


def asked(cell: Cell, scale: Scale) -> dict[str, Any]:
    """What a cell is given, as a row keeps it."""
    data, classes = scale.data(cell)
    given: dict[str, Any] = {"data": data, "classes": classes}
    if cell.kind in ("best", "compared", "timed"):
        networks = [scale.network(cell, name) for name in cell.networks]
        given |= {"legs": scale.legs(cell), "networks": networks, "count": scale.networks, "epochs": scale.epochs, "on": cell.on}
    elif cell.kind == "stream":
        given |= {"settings": scale.stream, "seeds": scale.seeds, **cell.settings}
    elif cell.kind == "compose":
        given |= scale.tasks._asdict() | {"test ways": cell.settings["ways"]}
    else:
        given |= scale.pictures._asdict() | cell.settings
    return json.loads(compact(given))


def path(out: Path, scale: Scale, cell: Cell) -> Path:
    return out / scale.name / "rows" / cell.table / f"{cell.name}.json"


def picture(out: Path, scale: Scale, cell: Cell) -> Path:
    """The figure of a cell, if it has one."""
    return path(out, scale, cell).with_suffix(".png")


def save(out: Path, scale: Scale, cell: Cell, row: Row) -> None:
    write_compact(path(out, scale, cell), row)


def made(out: Path, scale: Scale, cell: Cell) -> Row | None:
    """The row of a cell that is finished."""
    place = path(out, scale, cell)
    return _checked(place, read_json(place), cell, asked(cell, scale), "--out") if place.is_file() else None


def partly(place: Path, given: dict[str, Any]) -> dict[str, Any]:
    """What an unfinished cell has so far."""
    if not place.is_file():
        return {}
    found = read_json(place)
    _refuse_other(place, found.get("asked"), given, "--out")
    return found["rows"] if isinstance(found.get("rows"), dict) else {}


def save_partly(place: Path, given: dict[str, Any], found: dict[str, Any]) -> None:
    write_compact(place, {"asked": given, "rows": found})


def is_row(found: Any, columns: int | None) -> bool:
    """Whether it is whole, and has so many accuracies; with None, any number."""
    if not fits(found, Row) or set(Row.__annotations__) - set(found):
        return False
    accuracies = found["accuracies"]
    return columns in (None, len(accuracies)) and not any(set(Accuracy.__annotations__) - set(each) for each in accuracies)


def _checked(place: Path, found: dict[str, Any], cell: Cell, given: dict[str, Any], flag: str) -> Row:
    if not is_row(found, len(cell.columns)):
        raise RecollectError(f"{place} is no row of recollect reproduce, or damaged: delete it, and run the same command again")
    _refuse_other(place, found["asked"], given, flag)
    return found  # pyright: ignore


def _refuse_other(place: Path, before: Any, given: dict[str, Any], flag: str) -> None:
    if before == given:
        return
    before = before if isinstance(before, dict) else {}
    name = next(name for name in {**given, **before} if before.get(name) != given.get(name))
    raise RecollectError(
        f"{place} was made with {name} {_short(before.get(name))}, not {_short(given.get(name))}: delete it, or give "
        f"another {flag}"
    )


def _short(value: Any) -> str:
    text = compact(value).replace("\n", "")
    return text if len(text) <= 100 else f"{text[:97]}..."


# --- what is kept --------------------------------------------------------------------------------------------------------


def kept(results: Path, scale: str) -> dict[str, dict[str, Row]]:
    """Table -> cell -> row, of one scale."""
    place = results / f"{scale}.json"
    found = read_json(place) if place.is_file() else {}
    for table, rows in found.items():
        columns = {cell.name: len(cell.columns) for cell in TABLES[table].cells} if table in TABLES else {}
        for name, row in rows.items() if isinstance(rows, dict) else [("", None)]:
            if not is_row(row, columns.get(name)):
                raise RecollectError(f"{place} is damaged at {table} {name}: restore it, or give another --results")
    return found


def check_kept(results: Path, scale: Scale, cells: list[Cell]) -> None:
    """Refuse kept rows of these cells that were made under another config, before anything is made anew."""
    found = kept(results, scale.name)
    for cell in cells:
        if row := found.get(cell.table, {}).get(cell.name):
            place = Path(f"{results / scale.name}.json: {cell.table} {cell.name}")
            _refuse_other(place, row["asked"], asked(cell, scale), "--results")


def gather(out: Path, results: Path, figures: Path, scale: Scale, table: Table) -> None:
    """Add what is finished of a table to what is kept, in the order of its cells."""
    found = kept(results, scale.name)
    mine = dict(found.get(table.name, {}))
    for cell in table.cells:
        if row := made(out, scale, cell):
            mine[cell.name] = row
            if (drawn := picture(out, scale, cell)).is_file():
                figures.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(drawn, figures / f"{scale.name}-{cell.table}-{cell.name}.png")
    if mine:
        ordered = {cell.name: mine[cell.name] for cell in table.cells if cell.name in mine}
        write_compact(results / f"{scale.name}.json", dict(sorted((found | {table.name: ordered}).items())))
