"""What a memory recalls, as files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from recollect.commands.inputs import memory_path
from recollect.show import terminal


@dataclass(frozen=True)
class Recall:
    """Export what a memory recalls."""

    memory: Positional[Path]
    """a memory file, the folder of a run, a name (recollect zoo), or hub:owner/name"""
    out: Path
    """file (npz, sheet, parquet) or folder (png, pt, ddranking) to write"""
    classes: tuple[str, ...] = ()
    """names of the classes to recall, in this order. Default: all"""
    format: Literal["npz", "png", "sheet", "pt", "ddranking", "parquet"] = "npz"
    """npz: one archive; png: a folder for each class; sheet: one picture; pt: images.pt and labels.pt as plain tensors;
    ddranking: a folder that DD-Ranking's package evaluates; parquet: a table that Hugging Face datasets reads"""

    def perform(self) -> int:
        from recollect.export import export
        from recollect.memory import Memory

        memory = Memory.load(memory_path(self.memory))
        export(memory, list(self.classes) or None, self.out, self.format)
        terminal.say(str(self.out))
        return 0
