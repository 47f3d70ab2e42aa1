"""A memory to the Hugging Face Hub."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from recollect.commands.inputs import memory_path
from recollect.show import terminal


@dataclass(frozen=True)
class Push:
    """Send a memory to the Hugging Face Hub, with a card. Then hub:owner/name works wherever a memory file does."""

    memory: Positional[Path]
    """a memory file, the folder of a run, a name (recollect zoo), or hub:owner/name"""
    name: Positional[str]
    """owner/name of the repository, which is created where there is none"""
    dataset: bool = False
    """send what the memory recalls instead, as a dataset of pictures that the Hub's viewer shows"""
    private: bool = False
    """create the repository for its owner alone"""
    licence: str | None = None
    """licence of the data by the Hub's name, such as cc-by-4.0. Default: that of an official dataset, else unknown"""

    def perform(self) -> int:
        from recollect.memory import Memory
        from recollect.publish import push_to_hub

        memory = Memory.load(memory_path(self.memory))
        page = push_to_hub(memory, self.name, dataset=self.dataset, private=self.private, licence=self.licence)
        terminal.say(page)
        return 0
