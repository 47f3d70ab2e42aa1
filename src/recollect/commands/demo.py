"""The digits."""

import sys
from dataclasses import dataclass
from pathlib import Path

from recollect.commands.inputs import at_least_one


@dataclass(frozen=True)
class Demo:
    """Distil the digits and compare with baselines, in two minutes; nothing is downloaded."""

    out: Path | None = None
    """folder of the run. Default: runs/demo, or the next free number after it"""
    networks: int = 20
    """number of fresh networks for each row of the table"""
    quiet: bool = False
    """print the result alone"""

    def perform(self) -> int:
        at_least_one(self.networks)
        from recollect.demo import demo
        from recollect.runs import Run, Stopped

        folder = self.out or _free(Path("runs") / "demo")
        Run(folder).refuse_if_used()
        try:
            demo(folder, self.networks, self.quiet)
        except Stopped as stopped:
            print("stopped: start the demo again", file=sys.stderr)
            return 128 + stopped.signal
        return 0


def _free(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3, ... that is not there yet."""
    number, candidate = 1, folder
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate
