"""Pictures: datasets whose images are files or rows to decode one by one: TinyImageNet, image folders, Hugging Face.

`folders` finds the files, `fitting` makes pixels of each; here they become splits. One dataset is all grey or all RGB, and all of
one size.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recollect import limits
from recollect.data.fitting import Fitted, background_for, decoded, fitted, open_picture
from recollect.data.folders import listed, roles, visible
from recollect.data.images import Parts, Split, from_numpy
from recollect.data.readers import AGAIN, content, parsing
from recollect.errors import RecollectError
from recollect.reading import Reading, rgb

if TYPE_CHECKING:
    import PIL.Image

SHOWN = 3  # of the files that a notice names


class Item(NamedTuple):
    """A picture to be read."""

    name: str
    open: "Callable[[], PIL.Image.Image | None]"
    label: int
    role: str


def tiny_imagenet(paths: Sequence[Path]) -> Parts:
    """Its folder, found by val/val_annotations.txt: train/<wnid>/images/*.JPEG, val/images; val is the test set."""
    annotations, folder = paths[0], paths[0].parent.parent
    wnids = [child.name for child in visible(folder / "train") if child.is_dir()]
    number = {wnid: i for i, wnid in enumerate(wnids)}
    found = [(path, i, "train") for wnid, i in number.items() for path in visible(folder / "train" / wnid / "images")]
    for line, fields in enumerate(map(str.split, _lines(annotations)), 1):
        if len(fields) < 2 or fields[1] not in number or Path(fields[0]).name != fields[0]:
            raise RecollectError(f"{annotations}: line {line} does not name a picture and a folder of train/: {AGAIN}")
        found.append((annotations.parent / "images" / fields[0], number[fields[1]], "test"))
    splits, _ = _splits(_items(found, None), None, Reading(colour="rgb"), _bytes(found))  # a few are grey; all are 64x64
    return Parts(splits, _tiny_names(folder / "words.txt", wnids))


def _tiny_names(words: Path, wnids: list[str]) -> tuple[str, ...]:
    """The first synonym of each wnid; with the wnid where two share it, or the wnid alone without words.txt."""
    fields = (line.partition("\t") for line in _lines(words)) if words.is_file() else ()
    known = {wnid: synonyms.split(",")[0].strip() for wnid, _, synonyms in fields}
    names = [known.get(wnid) or wnid for wnid in wnids]
    return tuple(name if names.count(name) == 1 else f"{name} ({wnid})" for name, wnid in zip(names, wnids, strict=True))


def _lines(path: Path) -> list[str]:
    return content(path).decode("utf-8", "replace").splitlines()


def image_folder(folder: Path, size: int | None, reading: Reading) -> Parts:
    """The pictures of a folder: by class folders, a pattern of paths or a .csv of labels."""
    files, names, wrong, _ = listed(folder, reading)
    left_out = [each.why for each in wrong if reading.skip_bad and each.is_file]
    if refused := [each for each in wrong if not (reading.skip_bad and each.is_file)]:
        raise RecollectError(refused[0].why)
    number = {name: place for place, name in enumerate(names)}
    found = [(file.path, number[file.label], file.role) for file in files]
    splits, how = _splits(_items(found, size), size, reading, _bytes(found), left_out)
    return Parts(splits, names, pictures=how)


def _items(found: list[tuple[Path, int, str]], size: int | None) -> list[Item]:
    return [Item(str(path), partial(open_picture, path, size), label, role) for path, label, role in found]


def _bytes(found: list[tuple[Path, int, str]]) -> int:
    return sum(path.stat().st_size for path, *_ in found if os.path.isfile(path))


def hugging_face(name: str, size: int | None, reading: Reading) -> Parts:
    """A dataset of the Hugging Face hub, or a local folder that its library reads."""
    try:
        import datasets
    except ImportError as error:
        raise RecollectError(f"hf:{name}: needs the datasets package: pip install 'recollect[hf]'") from error
    if reading.labels or reading.pattern:
        raise RecollectError(f"hf:{name}: has labels of its own: leave out labels and pattern, which are for a folder")
    local = Path(os.path.expanduser(name))
    saved = any((local / mark).is_file() for mark in ("dataset_dict.json", "state.json"))
    with parsing(f"hf:{name}: cannot be loaded", "check the name and the network"):
        found: Any = datasets.load_from_disk(str(local)) if saved else datasets.load_dataset(str(local))
    found = found if isinstance(found, dict) else {"train": found}
    role = roles(found)
    if "train" not in role:
        raise RecollectError(f"hf:{name}: no split named train (it has {', '.join(found)}): choose a dataset with one")
    features = found["train"].features
    image = [key for key, feature in features.items() if isinstance(feature, datasets.Image)]
    label = [key for key, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    if not label and "int" in str(getattr(features.get("label"), "dtype", "")):
        label = ["label"]
    if not image or not label:
        what = f"needs a column of images and one of class labels, but has {', '.join(features)}"
        raise RecollectError(f"hf:{name}: {what}: cast them to Image and ClassLabel, or choose another dataset")
    items = [item for r, key in role.items() for item in _rows(f"hf:{name} {key}", found[key], image[0], label[0], r, size)]
    mode = {"L": "grey", "RGB": "rgb"}.get(features[image[0]].mode)
    reading = replace(reading, colour=reading.colour or mode)
    own = sum(int(getattr(getattr(found[key], "data", None), "nbytes", 0)) for key in role.values())
    splits, how = _splits(items, size, reading, own)
    return Parts(splits, tuple(getattr(features[label[0]], "names", ())), pictures=how)


def _rows(what: str, rows: Any, image: str, label: str, role: str, size: int | None) -> list[Item]:
    from datasets import Image

    labels = list(rows[label])
    if None in labels:
        raise RecollectError(f"{what}[{labels.index(None)}]: has no '{label}': leave unlabelled rows out of the dataset")
    rows = rows.cast_column(image, Image(decode=False))  # its own decoder takes every format
    names = [f"{what}[{i}]" for i in range(len(labels))]
    return [Item(name, partial(_cell, name, rows, i, image, size), labels[i], role) for i, name in enumerate(names)]


def _cell(name: str, rows: Any, number: int, column: str, size: int | None) -> "PIL.Image.Image | None":
    if (cell := rows[number][column]) is None:
        return None
    return decoded(name, content(Path(cell["path"] or "")) if cell["bytes"] is None else cell["bytes"], size)


def _splits(
    items: list[Item], size: int | None, reading: Reading, own: int, left_out: Sequence[str] = ()
) -> tuple[dict[str, Split], Reading]:
    """Splits of pictures that come from `own` bytes in all, and how they were read: on which background."""
    stack, kept, clear, bad = _stack(items, size, reading, own)
    train = [picture for place, picture in clear.items() if items[kept[place]].role == "train"]
    background = background_for(reading, train or list(clear.values()))
    for place, picture in clear.items():
        stack[place] = picture.on(background or "white")
    _notify(items, [*left_out, *bad], sum(picture.is_clear for picture in clear.values()), background, reading)
    splits, found = {}, [items[number] for number in kept]
    for role in {"train": 0} | dict.fromkeys(item.role for item in items):
        places = [place for place, item in enumerate(found) if item.role == role]
        images = stack if len(places) == len(stack) else stack[places]
        splits[role] = from_numpy(images, [found[place].label for place in places])
    colour = background and f"#{bytes(rgb(background)).hex()}"
    return splits, replace(reading, background=colour)


def _stack(
    items: list[Item], size: int | None, reading: Reading, own: int
) -> tuple[np.ndarray, list[int], dict[int, Fitted], list[str]]:
    """uint8 [N, C, H, W], the numbers of the items in it, those among them that need a background, and what was left out."""
    stack, kept, clear, bad = np.empty((len(items), 0, 0, 0), np.uint8), [], {}, []
    for number, item in enumerate(items):
        try:
            with parsing(f"{item.name}: not a picture, or a damaged one", "replace it, or leave such files out (--skip-bad)"):
                found = fitted(item.name, item.open(), None if size is None else (size, size), reading)
        except RecollectError as error:
            if not reading.skip_bad:
                raise
            bad.append(str(error))
            continue
        if not kept:
            alike = f"{'without a --size, ' if size is None else ''}{len(items):,} pictures like {item.name}"
            limits.check(alike, len(items) * found.pixels.nbytes, own)
            stack = np.empty((len(items), *found.pixels.shape), np.uint8)
        _check_alike(items[kept[0]].name if kept else item.name, stack.shape[1:], item.name, found.pixels.shape)
        stack[len(kept)] = found.pixels
        if found.alpha is not None:
            clear[len(kept)] = found
        kept.append(number)
    if items and not kept:
        raise RecollectError(f"none of {len(items):,} files is a picture that can be read: {bad[0]}")
    return stack[: len(kept)], kept, clear, bad


def _check_alike(first: str, shape: tuple[int, ...], name: str, found: tuple[int, ...]) -> None:
    """Refuse a picture that is not like the first."""
    if found[0] != shape[0]:
        grey, colour = (first, name) if found[0] == 3 else (name, first)
        raise RecollectError(f"{grey} is grey but {colour} is in colour: make all of them one (--colour rgb, or --colour grey)")
    if found != shape:
        remedy = f"give one size to resize all to, as in --size {min(32, *found[1:])}"
        raise RecollectError(f"{first} is {shape[2]}x{shape[1]} but {name} is {found[2]}x{found[1]}: {remedy}")


def _notify(items: list[Item], bad: Sequence[str], clear: int, background: str | None, reading: Reading) -> None:
    """One line on what was done to the pictures."""
    words = []
    if bad:
        names = ", ".join(each.partition(": ")[0] for each in bad[:SHOWN]) + ", ..." * (len(bad) > SHOWN)
        files = f"{len(bad):,} file{'s' * (len(bad) > 1)}"
        words.append(f"{files} left out that cannot be read: {names} (recollect data check lists all)")
    if clear:
        chosen = "" if reading.background else ", on which they stand out (--background)"
        words.append(f"{clear:,} of {len(items):,} pictures are transparent in parts: put on {background}{chosen}")
    if words:
        warnings.warn("; ".join(words), stacklevel=2)
