"""Figures of the paper, drawn from memories and rows."""

from pathlib import Path
from typing import Any

from recollect.memory import Memory
from recollect.reproduce.rows import Row
from recollect.reproduce.tables import Cell, Table
from recollect.show import charts, heat
from recollect.show.pictures import recalled
from recollect.show.sources import OURS, Measured
from recollect.show.style import save
from recollect.show.tables import SUPERCLASS, by_superclass


def draw(cell: Cell, memory: Memory, path: Path) -> dict[str, Any]:
    """Draw the figure of a cell, and say in numbers what it shows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if cell.figure == "recalled":
        save(recalled(memory, list(memory.class_names)[:5]), path)
        return {"recalled images of each class": len(memory.addressing)}
    order, _ = by_superclass(list(memory.class_names))
    save(heat.similarity(memory, order), path)
    return _alike(memory)


def _alike(memory: Memory) -> dict[str, Any]:
    """The mean similarity of two classes, of two of one superclass, and the two that are most alike."""
    matrix, names = memory.similarity(), memory.class_names
    pairs = [(i, j) for i in range(len(names)) for j in range(i)]
    first, second = max(pairs, key=lambda pair: float(matrix[pair]))
    mean = sum(float(matrix[pair]) for pair in pairs) / len(pairs)
    found: dict[str, Any] = {"mean similarity of two classes": mean}
    within = [
        pair for pair in pairs if names[pair[0]] in SUPERCLASS and SUPERCLASS[names[pair[0]]] == SUPERCLASS.get(names[pair[1]])
    ]
    if within:
        found["of one superclass"] = sum(float(matrix[pair]) for pair in within) / len(within)
    return found | {"most alike": f"{names[second]} and {names[first]}, {float(matrix[first, second]):.2f}"}


def curve(table: Table, rows: dict[str, Row], path: Path) -> None:
    """Accuracy against the setting that a table varies."""
    points = []
    for cell in table.cells:
        if row := rows.get(cell.name):
            (one,) = row["accuracies"]
            config = row["made"] | {"images_per_class": cell.settings["images_per_class"]}
            n = len(one["values"])
            point = Measured(OURS, cell.dataset, config, one["network"], one["on"], one["mean"], one["deviation"], n, path)
            points.append(point)
    if points:
        path.parent.mkdir(parents=True, exist_ok=True)
        save((charts.number_of_bases if table.curve == "bases" else charts.inner_steps)(points), path)
