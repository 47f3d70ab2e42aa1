"""What a memory recalls, as files."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from recollect.commands.inputs import memory_path
from recollect.errors import RecollectError
from recollect.show import terminal

if TYPE_CHECKING:
    from torch import Tensor

    from recollect.memory import Memory


@dataclass(frozen=True)
class Recall:
    """Export what a memory recalls."""

    memory: Positional[Path]
    """a memory file, the folder of a run, a name (recollect zoo), or hub:owner/name"""
    out: Path
    """file (npz, sheet, parquet) or folder (png, pt, ddranking) to write"""
    classes: tuple[str, ...] = ()
    """names of the classes to recall, in this order. Default: all"""
    words: tuple[str, ...] = ()
    """names to recall instead, also of classes that the memory never saw, where it was distilled with vectors of words (recollect
    words)"""
    targets: tuple[float, ...] = ()
    """continuous targets to recall, in their own units; of several targets one row after another. Default: some that stand for
    the data"""
    format: Literal["npz", "png", "sheet", "pt", "csv", "ddranking", "parquet"] = "npz"
    """npz: one archive; png: a folder for each class; sheet: one picture; pt: images.pt and labels.pt as plain tensors; csv: of
    vectors, a row each; ddranking: a folder that DD-Ranking's package evaluates; parquet: a table that Hugging Face datasets
    reads"""

    def perform(self) -> int:
        from recollect.export import export
        from recollect.memory import Memory

        memory = Memory.load(memory_path(self.memory))
        if sum(map(bool, (self.targets, self.classes, self.words))) > 1:
            raise RecollectError("classes, words and targets cannot be recalled together: give one of them")
        if self.words:
            memory = memory.of_words(self.words)
        export(memory, list(self.classes) or _rows(memory, self.targets), self.out, self.format)
        terminal.say(str(self.out))
        return 0


def _rows(memory: "Memory", targets: tuple[float, ...]) -> "Tensor | None":
    """Targets as rows of as many as the memory has."""
    import torch

    from recollect.queries import Targets

    if not targets:
        return None
    if not isinstance(memory.asked, Targets):
        raise RecollectError(f"{memory.name} is asked with a {memory.asked.unit}, not with targets: leave --targets out")
    count = len(memory.class_names)
    if len(targets) % count:
        raise RecollectError(
            f"{len(targets)} numbers are no rows of {count} targets ({', '.join(memory.class_names)}): give {count} each"
        )
    return torch.tensor(targets, dtype=torch.float64).view(-1, count)
