"""Rows of full scale that earlier scripts have measured, from their own result files: results/memories, streams, compose, ask."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recollect.budget import Budget
from recollect.config import DistillConfig, changed, from_json
from recollect.data.readers import parsing
from recollect.files import read_json
from recollect.reproduce.rows import Accuracy, Row, is_row
from recollect.reproduce.tables import METHODS, SOURCES, TABLES, Cell
from recollect.reproduce.work import accuracy
from recollect.show.streams import NAMES

SHAPES = {
    "mnist": (10, (1, 28, 28)), "fashion-mnist": (10, (1, 28, 28)), "svhn": (10, (3, 32, 32)), "cifar10": (10, (3, 32, 32)),
    "cifar100": (100, (3, 32, 32)), "tinyimagenet": (200, (3, 64, 64)),
}  # fmt: skip
"""classes and image shape of each dataset"""


def found(results: Path) -> dict[str, dict[str, Row]]:
    """Table -> cell -> row, as far as the files of these scripts are there."""
    every = {"table1": _memories, "continual": _streams, "compose": _composed, "ask": _asked}
    made: dict[str, dict[str, Row]] = {}
    for name, read in every.items():
        with parsing(f"{results} has a damaged result file of {name}", "restore it"):
            made[name] = {cell.name: _whole(cell, row) for cell, row in read(results)}
    return {name: rows for name, rows in made.items() if rows}


def _whole(cell: Cell, row: Row) -> Row:
    if not is_row(row, len(cell.columns)):
        raise ValueError(cell.name)
    return row


def _row(environment: dict[str, Any], command: str, accuracies: list[Accuracy], **more: Any) -> Row:
    base: dict[str, Any] = {
        "asked": {}, "command": command, "objective": "unrolled", "minutes": None, "measured_minutes": None,
        "hardware": environment.get("cuda") or environment.get("processor") or "", "commit": environment.get("commit") or "",
        "torch": environment.get("torch") or "", "numbers": 0, "made": {}, "accuracies": accuracies, "measures": {},
    }  # fmt: skip
    return {**base, **more}  # pyright: ignore


def _memories(results: Path) -> Iterator[tuple[Cell, Row]]:
    for cell in TABLES["table1"].cells:
        path = results / "memories" / f"{cell.name}.json"
        if not path.is_file() or "test" not in (written := read_json(path)):
            continue
        test, legs = written["test"], written["legs"]
        one = accuracy(test["values"], test["network"], test["on"], test["protocol"])
        config = changed(from_json(DistillConfig, legs[-1]["config"], path), start=None)
        classes, shape = SHAPES[cell.dataset]
        bases = config.memory.bases or 0
        budget = Budget(config.budget.images_per_class, classes, shape, config.memory.downsample)
        numbers = bases * (budget.base_numbers + (config.memory.matrices or 0) * classes)
        steps = sum(leg["config"]["outer_steps"] for leg in legs)
        made = legs[-1]["config"] | {"outer_steps": steps}
        command = f"python experiments/memories.py --root DATA --only {cell.name}"
        minutes = sum(leg["minutes"] for leg in legs)
        yield cell, _row(written["environment"], command, [one], minutes=minutes, numbers=numbers, made=made)


def _streams(results: Path) -> Iterator[tuple[Cell, Row]]:
    for cell in TABLES["continual"].cells:
        path = results / "streams" / f"{cell.name}.json"
        if not path.is_file():
            continue
        written, accuracies = read_json(path), []
        for learner in cell.settings["learners"]:
            row = written["rows"][learner]
            values = [sum(matrix[-1]) / len(matrix[-1]) for matrix in row["matrices"]]
            accuracies.append(accuracy(values, written["config"]["network"], row["on"], NAMES[learner], "seeds"))
        seconds = written["rows"]["compress"].get("distilling_seconds")
        more = {"minutes": sum(seconds) / 60 if seconds else None, "made": written["config"]}
        yield cell, _row(written["environment"], written["command"], accuracies, **more)


def _composed(results: Path) -> Iterator[tuple[Cell, Row]]:
    for cell in TABLES["compose"].cells:
        path = results / f"compose-cifar100-{cell.name}.json"
        if not path.is_file():
            continue
        written = read_json(path)
        rows = [written["rows"][f"{cell.name}, {source}"] for source in SOURCES]
        accuracies = [accuracy(row["values"], "convnet", written["settings"]["on"], row["protocol"], "tasks") for row in rows]
        numbers = sum(each["floats"] for each in written["distilled"].values())
        yield cell, _row(written["environment"], written["command"], accuracies, numbers=numbers)


def _asked(results: Path) -> Iterator[tuple[Cell, Row]]:
    path = results / "ask-cifar100.json"
    if not path.is_file():
        return
    written = read_json(path)
    for cell in TABLES["ask"].cells:
        shots, accuracies = cell.settings["shots"], []
        rows = [written["rows"][f"{method}, {shots} shot"] for method in METHODS]
        for row in rows:
            values = [value for draw in row["values"] for value in draw]
            one = accuracy(values, "convnet", row["on"], f"{written['settings']['ways']}-way tasks")
            accuracies.append(one | {"n": row["n"]})
        minutes = rows[0]["minutes of distilling"]
        yield cell, _row(rows[0]["environment"], written["command"], accuracies, minutes=minutes)
