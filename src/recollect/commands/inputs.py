"""What commands are told of images and memories."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from tyro.conf import Positional

from recollect import zoo
from recollect.config import fits
from recollect.errors import RecollectError
from recollect.files import write_through

if TYPE_CHECKING:
    from recollect.data.images import Images


@dataclass(frozen=True, kw_only=True)
class Files:
    """Where the official files are, and how other images are read."""

    root: Path | None = None
    """folder with the official files of named datasets. Default: $RECOLLECT_DATA, else the user's cache"""
    size: int | None = None
    """resize the images of a folder to this many pixels on each side"""
    target: tuple[str, ...] = ()
    """column of a .csv to predict, or several: of numbers continuous targets, of words classes"""
    label: str | None = None
    """column of a .csv that has classes, be they words or numbers"""

    def load(self, name: str) -> "Images":
        return loaded({"name": name}, root=self.root, size=self.size, target=list(self.target), label=self.label)


@dataclass(frozen=True)
class Data(Files):
    """Which images."""

    data: Positional[str]
    """images to read: digits, mnist, fashion-mnist, cifar10, cifar100, svhn, tinyimagenet, a folder of class folders, a .npz
    file, or hf:owner/name; or vectors: diabetes, wine, breast-cancer, iris, a .npz or .csv file"""
    classes: tuple[str, ...] = ()
    """names of the classes to take, in this order. Default: all"""
    vectors: Path | None = None
    """file of query vectors, .npz: names and vectors of the classes, or a vector of each training image"""


def spec(data: Data) -> dict[str, Any]:
    """How to load the images again: what a run's config.json keeps."""
    name = data.data
    if Path(name).exists():
        name = str(Path(name).resolve())
    root = str(data.root.resolve()) if data.root else None
    known = {"name": name, "root": root, "size": data.size, "classes": list(data.classes)}
    more = {"target": list(data.target), "label": data.label, "vectors": data.vectors and str(data.vectors.resolve())}
    return known | {name: value for name, value in more.items() if value}


class _Spec(TypedDict):
    name: str
    root: str | None
    size: int | None
    classes: list[str] | None
    target: list[str]
    label: str
    vectors: str


def loaded(data: dict[str, Any], **instead: Any) -> "Images":
    """The images of what `spec` wrote, with what is given instead."""
    from recollect.data import load

    if not fits(data, _Spec) or "name" not in data:
        raise RecollectError(f"the run's config.json has data {f'{data!r:.100}'}: restore its name, root, size and classes")
    known: dict[str, Any] = {name: data.get(name) for name in ("root", "size", "classes", "target", "label", "vectors")}
    known |= {name: value for name, value in instead.items() if value not in (None, (), [])}
    lists: dict[str, Any] = {name: known.pop(name) or () for name in ("classes", "target")}
    return load(data["name"], **known, **lists)


def memory_path(path: Path) -> Path:
    """A memory file, given as itself, as the folder of its run, or by its name in the zoo."""
    return path / "memory.safetensors" if path.is_dir() else zoo.find(path)


def write_to(path: Path, value: object) -> None:
    """As JSON, to a file of the user's; - is standard output."""
    text = json.dumps(value, indent=2) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        write_through(path, text.encode())


def at_least_one(networks: int) -> None:
    if networks < 1:
        raise RecollectError(f"number of networks is {networks}: give 1 or more (--networks)")
