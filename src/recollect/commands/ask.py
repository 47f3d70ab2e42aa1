"""A classifier from pictures whose labels nobody knows, or from words."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from recollect.commands.inputs import Files, memory_path
from recollect.commands.training import Training, check_use, trained, use
from recollect.errors import RecollectError


@dataclass(frozen=True)
class Ask(Files, Training):
    """Train a classifier from pictures whose labels nobody knows, with a memory that was distilled with --query images; or from
    names alone (--words), with one that was distilled with vectors of words."""

    memory: Positional[Path]
    """a memory file, the folder of a run, a name (recollect zoo), or hub:owner/name"""
    pictures: Positional[tuple[Path, ...]]
    """a folder of pictures for each class, or one folder with such folders in it"""
    words: tuple[str, ...] = ()
    """names of the classes, where no pictures are given; classes that the memory never saw may have them"""
    data: str | None = None
    """dataset that the memory was made of, from which a whitening file that is not beside the memory is fitted again"""

    def perform(self) -> int:
        from recollect.composition import ask, folders
        from recollect.memory import Memory

        if self.words and self.pictures:
            raise RecollectError("a memory is asked with pictures or with words: leave out the ones or the others")
        groups = self.words or folders(self.pictures)
        memory = Memory.load(memory_path(self.memory))
        check_use(memory.image_shape, self)
        images = self.load(self.data, memory.header) if self.data else None
        composition = ask(memory, groups, images)
        use(trained(composition, self), self)
        return 0
