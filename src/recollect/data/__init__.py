"""Data: from files on disk to `Images`. This file knows names and places; `readers` and `pictures` know the formats.

Nothing here downloads: `fetch.get` does, and puts the files where `load` looks.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from recollect import limits
from recollect.data import pictures, readers, tables
from recollect.data import vectors as given
from recollect.data.images import Images, Parts, Split, make_images
from recollect.data.tables import BUNCHES, from_dataset
from recollect.errors import RecollectError, unknown
from recollect.reading import Reading, reading

__all__ = ["Images", "Split", "from_dataset", "load"]

MOST_SIZE = 65536  # pixels on a side that images are resized to
DEBIAN = Path("/usr/share/datasets")  # where Debian's packages put theirs, as dataset-fashion-mnist does


@dataclass(frozen=True)
class Layout:
    """One way in which a dataset is published: its files, and the reader that takes them in this order."""

    files: tuple[tuple[str, ...], ...]  # for each file the names it goes by, the official one first
    read: Callable[[Sequence[Path]], Parts]
    note: str = ""

    def find(self, folder: Path) -> tuple[list[Path], list[str]]:
        """The files that are in `folder`, and the official names of those that are not."""
        hits = [[folder / name for name in names if os.path.isfile(folder / name)] for names in self.files]
        lacking = [names[0] for names, hit in zip(self.files, hits, strict=True) if not hit]
        return [hit[0] for hit in hits if hit], lacking


@dataclass(frozen=True)
class Named:
    """A dataset with a name: the folders under the root where its files may lie, and in which layouts."""

    folders: tuple[str, ...]
    layouts: tuple[Layout, ...]


def _idx(class_names: tuple[str, ...]) -> tuple[Layout, ...]:
    stems = ("train-images", 3), ("train-labels", 1), ("t10k-images", 3), ("t10k-labels", 1)
    files = tuple(tuple(f"{stem}{dot}idx{n}-ubyte{gz}" for dot in "-." for gz in ("", ".gz")) for stem, n in stems)
    return (Layout(files, partial(readers.idx_set, class_names=class_names), " (plain or .gz)"),)


def _files(read: Callable[[Sequence[Path]], Parts], *names: str) -> Layout:
    return Layout(tuple((name,) for name in names), read)


_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")

NAMED: dict[str, Named] = {
    "mnist": Named(("mnist", "MNIST/raw"), _idx(readers.DIGITS)),
    "fashion-mnist": Named(("fashion-mnist", "FashionMNIST/raw"), _idx(readers.FASHION)),
    "cifar10": Named(
        ("cifar-10-batches-bin", "cifar-10-batches-py"),
        tuple(_files(readers.cifar10, *(batch + suffix for batch in _BATCHES)) for suffix in (".bin", "")),
    ),
    "cifar100": Named(
        ("cifar-100-binary", "cifar-100-python"),
        (
            _files(readers.cifar100, "train.bin", "test.bin", "fine_label_names.txt"),
            _files(readers.cifar100, "train", "test", "meta"),
        ),
    ),
    "svhn": Named(("svhn",), (_files(readers.svhn, "train_32x32.mat", "test_32x32.mat"),)),
    "tinyimagenet": Named(("tiny-imagenet-200",), (_files(pictures.tiny_imagenet, "val/val_annotations.txt"),)),
}


def load(
    name_or_path: str | Path,
    root: str | Path | None = None,
    size: int | None = None,
    seed: int = 0,
    classes: Sequence[str] = (),
    target: str | Sequence[str] = (),
    label: str | None = None,
    vectors: str | Path | None = None,
    **options: Any,
) -> Images:
    """Read a dataset.

    Arguments:
        name_or_path: digits, mnist, fashion-mnist, cifar10, cifar100, svhn or tinyimagenet; diabetes, wine, breast-cancer or iris
            (vectors); a folder of class folders of images; an .npz file of images or vectors; a .csv file; or `hf:owner/name`, a
            Hugging Face dataset.
        root: where the files of named datasets lie; $RECOLLECT_DATA, or else the user's cache folder.
        size: resize every image to size x size.
        seed: of the split, where the dataset does not bring its own validation or test images.
        classes: names of the only classes to take, in this order. Default: all.
        target: the column of a .csv to predict: of numbers a continuous target (there may be several), of words classes.
        label: the column of a .csv that has classes, be they words or numbers.
        vectors: an .npz file with a query vector for each class, or for each training image.
        options: of pictures in a folder: colour ("rgb", "grey"), fit ("stretch", "crop", "pad"), background, labels (a .csv
            file), pattern, skip_bad. See [your own pictures](tutorials/own-pictures.md).

    Returns:
        Images, with a stratified tenth of the training data held out for validation.

    Examples:
        >>> recollect.load("digits", classes=["3", "8"])
        Images(digits: 2 classes of 1x8x8; 256 train, 29 validation, 72 test)
    """
    if size is not None and not 1 <= size <= MOST_SIZE:
        raise RecollectError(f"size {size} is not an image size: give a number of pixels, 1 to {MOST_SIZE:,}")
    how = reading(**options)
    if how.fit != "stretch" and size is None:
        raise RecollectError(f"fit {how.fit} needs a size to bring pictures to: give one, as in --size 32")
    columns = [target] if isinstance(target, str) else list(target)
    if (columns or label) and Path(name_or_path).suffix.lower() != ".csv":
        raise RecollectError(f"target {(*columns, label)[0]} is a column of a .csv, and {name_or_path} is none: leave it out")
    name, parts = _read(name_or_path, root, size, columns, label, how)
    if parts.pictures is None and how != Reading():
        raise RecollectError(f"{name} is no folder of pictures: leave out {', '.join(how.given())}")
    beside = None if vectors is None else given.read(Path(os.path.expanduser(str(vectors))))
    if beside:
        parts = given.of_training_images(parts, beside)
    if size is not None and parts.splits["train"].images.is_floating_point():
        raise RecollectError(f"size {size} is for images, and {name} has vectors: leave it out")
    if size is not None:
        parts = replace(parts, splits={part: _resized(split, size) for part, split in parts.splits.items()})
    images = make_images(name, parts, seed)
    images = images.only(classes) if classes else images
    return given.attached(images, beside, vectors) if beside else images


def data_root(root: str | Path | None = None) -> Path:
    """The folder of the named datasets."""
    chosen = root or os.environ.get("RECOLLECT_DATA")
    if not chosen:
        import pooch

        chosen = pooch.os_cache("recollect")
    return Path(os.path.expanduser(chosen))


def _read(
    name_or_path: str | Path, root: str | Path | None, size: int | None, target: Sequence[str], label: str | None, how: Reading
) -> tuple[str, Parts]:
    """The dataset's name, and what its reader found."""
    name = str(name_or_path)
    if isinstance(name_or_path, str):
        if name.lower() == "digits":
            return "digits", readers.digits()
        if name.lower() in BUNCHES:
            return name.lower(), tables.bunch(name.lower())
        if name.lower() in NAMED:
            layout, files = locate(name.lower(), data_root(root))
            return name.lower(), layout.read(files)
        if name.startswith("hf:") and name != "hf:":
            return name, pictures.hugging_face(name.removeprefix("hf:"), size, how)
    place = os.path.expanduser(name)
    if not name or not os.path.exists(place):
        known = ["digits", *NAMED, *BUNCHES]
        if "/" in name or name.endswith((".npz", ".csv")):
            raise RecollectError(f"no such file or folder: {place}: check the path, or name one of: {', '.join(known)}")
        raise unknown("dataset", name, known, "A folder of class folders, an .npz or .csv file or hf:owner/name also work")
    path = Path(place)
    if path.suffix == ".npz":
        return path.stem, readers.npz(path)
    if path.suffix.lower() == ".csv":
        return path.stem, tables.table(path, target, label)
    if not path.is_dir():
        raise RecollectError(f"{path}: neither a folder nor an .npz or .csv file: give a folder of class folders, or such a file")
    for owner in _owners(path) or NAMED:  # the official files, wherever they lie
        for layout in NAMED[owner].layouts:
            files, lacking = layout.find(path)
            if not lacking:
                return owner, layout.read(files)
    return path.resolve().name, pictures.image_folder(path, size, how)


def locate(name: str, root: Path) -> tuple[Layout, list[Path]]:
    """The first place and layout that hold a named dataset whole."""
    places = [root / folder for folder in dict.fromkeys((*NAMED[name].folders, name))]
    # Files that lie in the root itself count, unless the root is another dataset's folder: the files of MNIST and
    # Fashion-MNIST have the same names.
    places += [root] if name in (_owners(root) or [name]) else []
    places += [DEBIAN / name]
    incomplete = ""
    for place in places:
        for layout in NAMED[name].layouts:
            files, lacking = layout.find(place)
            if not lacking:
                return layout, files
            if files:
                incomplete = incomplete or f"; {place} lacks {', '.join(lacking)}"
    wanted = ", or ".join(", ".join(names[0] for names in layout.files) + layout.note for layout in NAMED[name].layouts)
    raise RecollectError(
        f"dataset '{name}' is not there: looked for {wanted} in {', '.join(map(str, places))}{incomplete}. Get it with "
        f"`recollect data get {name}`, or point --root (or RECOLLECT_DATA) at a folder that has these files"
    )


def _owners(folder: Path) -> list[str]:
    """The datasets whose usual folder this is, by its name."""
    return [name for name, named in NAMED.items() if any(folder.match(usual) for usual in (*named.folders, name))]


def _resized(split: Split, size: int) -> Split:
    if len(split) == 0 or split.images.shape[2:] == (size, size):
        return split
    limits.check(f"{len(split):,} images of {size}x{size}", len(split) * split.images.shape[1] * size**2, split.images.nbytes)
    return replace(split, images=F.interpolate(split.images, (size, size), mode="bilinear", antialias=True))
