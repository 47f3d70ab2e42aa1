"""The web page."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from recollect.commands.inputs import Files, memory_path
from recollect.errors import RecollectError


@dataclass(frozen=True)
class Studio(Files):
    """Look into memories, and build and try classifiers of their classes, on a web page (pip install 'recollect[studio]')."""

    memories: Positional[tuple[Path, ...]] = ()
    """memory files, folders of runs, names (recollect zoo), or hub:owner/name; the files in memories/ are added. Default: the
    zoo's that come with the package"""
    port: int = 8765
    """port to serve the page at; 0 takes any that is free"""
    host: str = "127.0.0.1"
    """address to serve the page at; with one other than the default, whoever reaches this machine can use it"""
    data: tuple[str, ...] = ()
    """datasets to test classifiers on: accuracy and confusion matrix. Default: digits, for memories of the digits"""

    def perform(self) -> int:
        from recollect import zoo

        try:
            from recollect.studio.app import serve
        except ImportError as error:
            raise RecollectError(f"the studio needs {error.name}: pip install 'recollect[studio]'") from None
        shipped = [Path(name) for name, entry in zoo.index().items() if entry["ships"]]
        memories = [memory_path(path) for path in self.memories or shipped]
        serve(memories, [self.load(name) for name in self.data], self.host, self.port)
        return 0
