"""A classifier from pictures whose labels nobody knows."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from recollect.commands.inputs import Files, memory_path
from recollect.commands.training import Training, check_use, trained, use


@dataclass(frozen=True)
class Ask(Files, Training):
    """Train a classifier from pictures whose labels nobody knows, with a memory that was distilled with --query images."""

    memory: Positional[Path]
    """a memory file, the folder of a run, a name (recollect zoo), or hub:owner/name"""
    pictures: Positional[tuple[Path, ...]]
    """a folder of pictures for each class, or one folder with such folders in it"""
    data: str | None = None
    """dataset that the memory was made of, from which a whitening file that is not beside the memory is fitted again"""

    def perform(self) -> int:
        from recollect.composition import ask, folders
        from recollect.memory import Memory

        groups = folders(self.pictures)
        memory = Memory.load(memory_path(self.memory))
        check_use(memory.image_shape, self)
        images = self.load(self.data, memory.header) if self.data else None
        composition = ask(memory, groups, images)
        use(trained(composition, self), self)
        return 0
