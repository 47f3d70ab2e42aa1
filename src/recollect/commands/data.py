"""Datasets: to get, and to look at."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg, subcommand

from recollect.commands.inputs import Data, loaded, spec, write_to
from recollect.errors import RecollectError
from recollect.reading import Reading
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


@dataclass(frozen=True)
class DataCheck:
    """List everything that is wrong or odd in a folder of pictures. Exit code 1: it cannot be read with these options."""

    folder: Positional[Path]
    """folder of pictures to look at"""
    size: int | None = None
    """pixels on each side that all pictures will be resized to"""
    reading: Annotated[OmitArgPrefixes[Reading], arg(name="")] = field(default_factory=Reading)
    json: Path | None = None
    """file to write all findings to, with every path; - writes them to standard output"""

    def perform(self) -> int:
        from recollect.data.check import check

        if not self.folder.is_dir():
            raise RecollectError(f"{self.folder} is not a folder: give a folder of pictures")
        with terminal.loading(self.folder):
            found = check(self.folder, self.size, **vars(self.reading))
        if self.json:
            write_to(self.json, asdict(found) | {"readable": found.is_readable, "flags": found.flags})
        if str(self.json) != "-":
            terminal.checked(found)
        return 0 if found.is_readable else 1


DATA = {"get": DataGet, "show": DataShow, "check": DataCheck}


@dataclass(frozen=True)
class DataTop:
    """Download datasets, look at images, or check a folder of pictures."""

    command: OmitArgPrefixes[
        Annotated[DataGet, subcommand("get")]
        | Annotated[DataShow, subcommand("show")]
        | Annotated[DataCheck, subcommand("check")]
    ]

    def perform(self) -> int:
        return self.command.perform()
