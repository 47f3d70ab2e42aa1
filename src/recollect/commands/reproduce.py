"""The paper's tables and figures."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional

from recollect.commands.performing import JOBS, Performing
from recollect.show import terminal

SECONDS = 30.0  # between two lines of one cell


@dataclass(frozen=True)
class Reproduce:
    """Reproduce a table or figure of the paper, cell by cell; goes on where it was stopped, and keeps what is finished."""

    table: Positional[str] = ""
    """table1, ablation, momentum, inner-steps, cross-architecture, bases, objectives, similarity, visualisations, continual,
    compose or ask"""
    scale: Literal["quick", "full"] = "quick"
    """size of the experiment. quick: half an hour of two cores a cell, five networks; full: the paper's protocol, on a GPU"""
    cells: tuple[str, ...] = ()
    """names of the only cells to make, or how they begin: cifar10-1 svhn-10. Default: all of the scale"""
    list: bool = False
    """list the tables, or the cells of one, and make nothing"""
    out: Path = Path("runs/reproduce")
    """folder of the runs and of the rows that are finished"""
    results: Path = Path("results/reproduce")
    """folder of the rows that are kept, a file a scale"""
    pages: Path = Path("docs/results")
    """folder of the pages and figures that are made of the rows"""
    root: Path | None = None
    """folder with the official files of named datasets. Default: $RECOLLECT_DATA, else the user's cache"""
    device: str = "auto"
    """device that computes: cpu, cuda, or auto (cuda where there is one)"""
    quiet: bool = False
    """print the result alone"""
    jobs: Annotated[Performing, *JOBS] = Performing()

    def perform(self) -> int:
        from recollect.reproduce import page, tables

        if self.list or not self.table:
            return _listed(self.table)
        table = tables.named(self.table)
        outcome = self._made(table)
        for each in outcome.failed:
            print(f"{', '.join(each.cells)}: {each.why}", file=sys.stderr)
        terminal.say(f"page  {outcome.page}")
        found = page.every(self.results)[self.scale].get(table.name, {})
        terminal.say(f"{table.title}, {self.scale} scale: {len(found)} of {len(table.cells)} cells")
        shown = [
            (cell.name, column, page.quoted(printed), page.spread(accuracy))
            for cell in table.cells
            if cell.name in found
            for column, printed, accuracy in zip(cell.columns, cell.paper, found[cell.name]["accuracies"], strict=True)
        ]
        if shown:
            terminal.say(terminal.table(("cell", "column", "paper, %", "ours, %"), shown, left=("cell", "column")))
        return 2 if any(not each.why.startswith("not run") for each in outcome.failed) else 0

    def _made(self, table: Any) -> Any:
        from recollect.devices import find_device
        from recollect.reproduce.run import Places, reproduce
        from recollect.reproduce.scales import scaled

        scale = scaled(self.scale)
        if scale.name == "full" and find_device(self.device) == "cpu":
            print("note: full scale is for a GPU; on a processor a cell takes days", file=sys.stderr)
        options: dict[str, Any] = dict(root=str(self.root) if self.root else None, device=self.device)
        options |= dict(executor=self.jobs.chosen(), tell=_teller(self.quiet))
        places = Places(self.out, self.results, self.pages)
        try:
            return reproduce(table, scale, self.cells, places=places, **options)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("stopped: the same command goes on from here") from None


def _listed(name: str) -> int:
    from recollect.reproduce import page, tables

    if name:
        rows = page.cells(tables.named(name))
        terminal.say(terminal.table(("cell", "in the table", "paper, %"), rows, left=("cell", "in the table")))
        return 0
    each = [(table.name, table.title, table.source, str(len(table.cells))) for table in tables.TABLES.values()]
    terminal.say(terminal.table(("table", "what", "in the paper", "cells"), each, left=("table", "what", "in the paper")))
    terminal.say("the cells of one: recollect reproduce TABLE --list")
    return 0


def _teller(quiet: bool) -> Any:
    """Lines on stderr: every half minute one of each cell, and each that is done."""
    last: dict[str, float] = {}

    def tell(what: Any, _: float) -> None:
        cell, told = what
        if quiet or (cell != "done" and time.monotonic() - last.get(cell, float("-inf")) < SECONDS):
            return
        last[cell] = time.monotonic()
        if isinstance(told, dict):
            loss = "exploded" if told.get("loss") is None else f"{told['loss']:.4f}"
            told = f"outer step {told['step']}/{told.get('of', '?')}  loss {loss}  {told['seconds']:.2f} s/step"
        print(f"{cell}: {told}", file=sys.stderr, flush=True)

    return tell
