"""What commands are told of images and memories."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from tyro.conf import OmitArgPrefixes, Positional, arg

from recollect import zoo
from recollect.config import fits
from recollect.errors import RecollectError
from recollect.files import write_through
from recollect.reading import OPTIONS, Fit, Reading

if TYPE_CHECKING:
    from recollect.data.images import Images
    from recollect.header import Header


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
    reading: Annotated[OmitArgPrefixes[Reading], arg(name="")] = field(default_factory=Reading)

    def given(self) -> dict[str, Any]:
        """What the flags say, as `loaded` takes it."""
        known = {"root": self.root, "size": self.size, "target": list(self.target), "label": self.label}
        return known | self.reading.given()

    def load(self, name: str, header: "Header | None" = None) -> "Images":
        """The images of this name; pictures are made like those of a memory, where its header is given and nothing else said."""
        usual: dict[str, Any] = {"name": name}
        if header and (name.startswith("hf:") or Path(name).expanduser().is_dir()):
            usual |= like(header)
        return loaded(usual, **self.given())


def like(header: "Header") -> dict[str, Any]:
    """How pictures become images like those that a memory was made of, if it was made of pictures."""
    (channels, height, width), stated = header.image_shape, header.preprocessing.get("pictures")
    if stated is None or channels not in (1, 3):
        return {}
    found = {"colour": "rgb" if channels == 3 else "grey"} | stated
    return found | {"size": height} if height == width else found | {"fit": "stretch"}


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
    return known | {name: value for name, value in more.items() if value} | data.reading.given()


class _Spec(TypedDict):
    name: str
    root: str | None
    size: int | None
    classes: list[str] | None
    colour: Literal["rgb", "grey"] | None
    fit: Fit
    background: str | None
    labels: str | None
    pattern: str | None
    skip_bad: bool
    target: list[str]
    label: str
    vectors: str


def loaded(data: dict[str, Any], **instead: Any) -> "Images":
    """The images of what `spec` wrote, with what is given instead."""
    from recollect.data import load

    if not fits(data, _Spec) or "name" not in data:
        raise RecollectError(f"the run's config.json has data {f'{data!r:.100}'}: restore its name, root, size and classes")
    known: dict[str, Any] = {n: data.get(n) for n in ("root", "size", "classes", "target", "label", "vectors")}
    known |= {name: data[name] for name in OPTIONS if name in data}
    known |= {name: value for name, value in instead.items() if value not in (None, (), [])}
    if known.get("labels"):
        known["labels"] = Path(known["labels"])
    lists: dict[str, Any] = {name: known.pop(name) or () for name in ("classes", "target")}
    return load(data["name"], **known, **lists)


def memory_path(path: Path) -> Path:
    """A memory file, given as itself, as the folder of its run, or by its name in the zoo or on the Hub."""
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
