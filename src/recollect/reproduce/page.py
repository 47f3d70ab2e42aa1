"""The page of a table: what the paper prints beside ours, one scale at a time, and where every row comes from. Made of the kept
rows alone, so that a page is never typed."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from recollect.files import write_atomically
from recollect.reproduce import earlier, paper, rows
from recollect.reproduce.rows import Accuracy, Row
from recollect.reproduce.tables import DATASETS, TABLES, Cell, Table

HEADINGS = {"full": "Full scale", "quick": "Quick scale"}
WORDS = {
    "full": "The paper's protocol, on a GPU; twenty networks where it has twenty.",
    "quick": "On a processor: at most half an hour of two cores a cell, five networks. Compare these with each other, and with "
    "the paper for its order alone.",
}
NOT_RUN = "not run"
ROWS = dict[str, dict[str, dict[str, Row]]]
"""scale -> table -> cell -> row"""


def every(results: Path) -> ROWS:
    """All rows there are: those of recollect reproduce, and at full scale, where there are none, those of earlier scripts."""
    found = {scale: dict(rows.kept(results, scale)) for scale in HEADINGS}
    for table, made in earlier.found(results.parent).items():
        found["full"][table] = made | found["full"].get(table, {})
    return found


def write(table: Table, results: Path, pages: Path) -> Path:
    """Write the page of a table; returns its file."""
    path = pages / f"{table.name}.md"
    write_atomically(path, page(table, every(results), pages).encode())
    return path


def page(table: Table, found: ROWS, pages: Path) -> str:
    """The text of a table's page."""
    parts = [f"# {table.title}", f"{table.source} of the paper. {table.equal}{'' if table.equal.endswith('.') else '.'}"]
    if table.name in paper.NOTES:
        parts.append(paper.NOTES[table.name])
    parts.append(
        f"Made by `recollect reproduce {table.name}` (`--scale full` on a GPU); accuracies are percent, ± the standard deviation."
    )
    for scale, heading in HEADINGS.items():
        mine = found[scale].get(table.name, {})
        parts += [f"## {heading}", WORDS[scale]]
        parts += [_grid(table, mine)] if any(cell.columns for cell in table.cells) else []
        parts += _figures(table, scale, mine, pages)
        parts += [_provenance(table, mine)] if mine else []
        if lacking := [f"`{cell.name}`" for cell in table.cells if cell.name not in mine]:
            which = f": {', '.join(lacking)}" if not all(cell.columns for cell in table.cells) else ""
            parts.append(f"What was not run{which} is made by `recollect reproduce {table.name} --scale {scale} --cells CELL`.")
    if table.name == "table1":
        parts += ["## What the paper quotes of others", _others()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    cells = [list(headings), ["---"] * len(headings), *([text.replace("|", "\\|") for text in line] for line in lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _grid(table: Table, mine: dict[str, Row]) -> str:
    """The paper's cells, each beside ours; a cell that the paper does not have is ours alone."""
    columns = list(dict.fromkeys(column for cell in table.cells for column in cell.columns))
    ours: dict[tuple[str, str], str] = {}
    theirs: dict[tuple[str, str], str] = {}
    for cell in table.cells:
        values = [spread(each) for each in mine[cell.name]["accuracies"]] if cell.name in mine else [NOT_RUN] * len(cell.columns)
        for column, value, printed in zip(cell.columns, values, cell.paper, strict=True):
            ours[cell.row, column] = value
            if printed:
                theirs[cell.row, column] = quoted(printed)
    quotes = {column for _, column in theirs}
    headings = [
        "",
        *(heading for each in columns for heading in ([f"{each}: paper", "ours"] if each in quotes else [f"{each}: ours"])),
    ]
    lines = []
    for row in dict.fromkeys(row for row, _ in ours):
        line = [row]
        for column in columns:
            line += [theirs.get((row, column), "")] if column in quotes else []
            line += [ours.get((row, column), "")]
        lines.append(line)
    return _markdown(headings, lines)


def spread(accuracy: Accuracy) -> str:
    return f"{accuracy['mean']:.1f} ± {accuracy['deviation']:.1f}"


def quoted(value: paper.Quoted | None) -> str:
    if value is None:
        return "–"
    printed = [f"{number:.1f}" if round(number, 1) == number else f"{number:.2f}" for number in value if number is not None]
    return " ± ".join(printed)


def _figures(table: Table, scale: str, mine: dict[str, Row], pages: Path) -> list[str]:
    """The pictures that are there, with what they show in numbers."""
    names = {cell.name: f"{cell.row}" for cell in table.cells if cell.figure and cell.name in mine}
    found = []
    if table.curve and (pages / "figures" / f"{scale}-{table.name}.png").is_file():
        found.append(f"![{table.title}](figures/{scale}-{table.name}.png)")
    for name, words in names.items():
        told = "; ".join(f"{what} {_number(value)}" for what, value in mine[name]["measures"].items())
        found.append(f"**{words}**: {told}.\n\n![{words}](figures/{scale}-{table.name}-{name}.png)")
    return found


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _provenance(table: Table, mine: dict[str, Row]) -> str:
    headings = ["cell", "n", "on", "network", "objective", "how", "minutes", "hardware", "commit", "command"]
    lines = []
    for cell in table.cells:
        if cell.name not in mine:
            continue
        row = mine[cell.name]
        accuracies = row["accuracies"]
        told = [", ".join(dict.fromkeys(each[what] for each in accuracies)) for what in ("n", "on", "network")]
        minutes = "–" if row["minutes"] is None else f"{row['minutes']:.1f}"
        if row["measured_minutes"] is not None:
            minutes += f" + {row['measured_minutes']:.1f}"
        line = [*told, row["objective"], _how(row), minutes, row["hardware"], row["commit"] or "–", f"`{row['command']}`"]
        lines.append([cell.name, *line])
    words = "Minutes are of distilling; a second number is of training networks on what was recalled."
    return f"{_markdown(headings, lines)}\n\n{words}"


HOW = {
    "network": "",
    "inner_steps": "T ",
    "window": "window ",
    "outer_steps": "outer steps ",
    "bases": "bases ",
    "matrices": "matrices ",
    "experts": "experts ",
}


def _how(row: Row) -> str:
    """The settings that say most."""
    made = row["made"]
    return ", ".join(f"{words}{'whole' if made[name] is None else made[name]}" for name, words in HOW.items() if name in made)


def _others() -> str:
    names = list(paper.OTHERS)
    lines = []
    for dataset, words in DATASETS.items():
        for budget in paper.FULL[dataset]:
            printed = [*(paper.OTHERS[name].get(dataset, {}).get(budget) for name in names), paper.FULL[dataset][budget]]
            lines.append([f"{words}, {budget}", *map(quoted, printed)])
    return _markdown(["", *names, "the paper"], lines)


# --- the README, and the pages together ------------------------------------------------------------------------------------


def summary(found: ROWS) -> str:
    """The README's table: what has been run of Table 1 at full scale."""
    mine, lines = found["full"].get("table1", {}), []
    lacking: dict[str, list[str]] = {}
    for cell in TABLES["table1"].cells:
        if cell.name not in mine:
            lacking.setdefault(DATASETS[cell.dataset], []).append(str(cell.settings["images_per_class"]))
            continue
        row = mine[cell.name]
        minutes = "–" if row["minutes"] is None else f"{row['minutes']:.1f}"
        printed = f"{paper.FULL[cell.dataset][cell.settings['images_per_class']][0]:.1f}"
        lines.append([f"`{cell.name}`", f"{row['numbers']:,}", spread(row["accuracies"][0]), printed, minutes])
    if lacking:
        words = "; ".join(f"{name} with {', '.join(budgets)}" for name, budgets in lacking.items())
        lines.append([f"{words} images per class", "", NOT_RUN, "", ""])
    return _markdown(["", "numbers", "test accuracy, %", "paper", "GPU minutes (mostly shared)"], lines)


def overview(found: ROWS) -> str:
    """The page of the pages."""
    lines = []
    for table in TABLES.values():
        counts = [f"{len(found[scale].get(table.name, {}))} of {len(table.cells)}" for scale in HEADINGS]
        lines.append([f"[{table.name}]({table.name}.md)", table.title, table.source, *counts])
    words = "Each page is made of `results/` by `recollect reproduce`; `python experiments/pages.py` makes them all again."
    table = _markdown(["", "what", "in the paper", "full: cells run", "quick: cells run"], lines)
    return f"# The paper's tables and figures\n\n{words}\n\n{table}\n"


def pages(results: Path, where: Path) -> dict[str, str]:
    """File name -> text, of all pages."""
    found = every(results)
    return {"README.md": overview(found)} | {f"{table.name}.md": page(table, found, where) for table in TABLES.values()}


def cells(table: Table) -> list[tuple[str, str, str]]:
    """What --list shows of a table: cell, where it stands, what the paper prints there."""
    return [(cell.name, _place(cell), "; ".join(map(quoted, cell.paper))) for cell in table.cells]


def _place(cell: Cell) -> str:
    return "; ".join(filter(None, (cell.row, ", ".join(cell.columns))))
