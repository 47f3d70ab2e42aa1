"""Datasets: to get, and to look at."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, subcommand

from recollect.commands.inputs import Data, loaded, spec
from recollect.errors import RecollectError
from recollect.show import terminal


@dataclass(frozen=True)
class DataGet:
    """Download the official files of datasets, with checksums; an interrupted download resumes."""

    names: Positional[tuple[str, ...]]
    """datasets to download: mnist, fashion-mnist, cifar10, cifar100, svhn, tinyimagenet"""
    root: Path | None = None
    """folder to put the files in. Default: $RECOLLECT_DATA, else the user's cache"""
    mirror: str | None = None
    """address of a folder with the same files"""
    quiet: bool = False
    """print the result alone"""

    def perform(self) -> int:
        from recollect.data.fetch import get

        if not self.names:
            raise RecollectError("no dataset named: recollect data get mnist")
        for name in self.names:
            terminal.say(str(get(name, root=self.root, base_url=self.mirror, progress=not self.quiet)))
        return 0


@dataclass(frozen=True)
class DataShow:
    """Read a dataset, and show its sizes and classes."""

    images: OmitArgPrefixes[Data]

    def perform(self) -> int:
        images = loaded(spec(self.images))
        rows = [
            ("image", "x".join(map(str, images.shape))),
            ("classes" if images.train.targets is None else "targets", terminal.class_names(images.class_names)),
            ("train, validation, test", ", ".join(f"{len(s):,}" for s in (images.train, images.validation, images.test))),
        ]
        terminal.pairs(images.name, rows)
        return 0


DATA = {"get": DataGet, "show": DataShow}


@dataclass(frozen=True)
class DataTop:
    """Download datasets, or look at images."""

    command: OmitArgPrefixes[Annotated[DataGet, subcommand("get")] | Annotated[DataShow, subcommand("show")]]

    def perform(self) -> int:
        return self.command.perform()
