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
    """a memory file, the folder of a run, or a name (recollect zoo)"""
    out: Path
    """file (npz, sheet) or folder (png, pt) to write"""
    classes: tuple[str, ...] = ()
    """names of the classes to recall, in this order. Default: all"""
    words: tuple[str, ...] = ()
    """names of classes to recall instead, also of ones that the memory never saw, where it was distilled with vectors of words
    (recollect words)"""
    format: Literal["npz", "png", "sheet", "pt"] = "npz"
    """npz: one archive; png: a folder for each class; sheet: one picture; pt: images.pt and labels.pt as plain tensors"""

    def perform(self) -> int:
        from recollect.export import export
        from recollect.memory import Memory

        memory = Memory.load(memory_path(self.memory))
        export(memory, list(self.classes) or None, self.out, self.format, self.words or None)
        terminal.say(str(self.out))
        return 0
