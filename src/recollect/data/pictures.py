"""Pictures: datasets whose images are files or rows to decode one by one: TinyImageNet, image folders, Hugging Face.

Pillow decodes, and resizes on the way when a size is given; one dataset is all grey or all RGB, and all of one size.
"""

import io
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recollect import limits
from recollect.data.images import Parts, Split, from_numpy
from recollect.data.readers import AGAIN, content, parsing
from recollect.errors import RecollectError

if TYPE_CHECKING:
    import PIL.Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
FORMATS_READ = "PNG, JPEG, WebP, GIF or BMP"
PIXEL_BYTES = 16  # of a picture while it is decoded and converted


def tiny_imagenet(paths: Sequence[Path]) -> Parts:
    """Its folder, found by val/val_annotations.txt: train/<wnid>/images/*.JPEG, val/images; val is the test set."""
    annotations, folder = paths[0], paths[0].parent.parent
    wnids = [child.name for child in visible(folder / "train") if child.is_dir()]
    number = {wnid: i for i, wnid in enumerate(wnids)}
    train = [(path, i) for wnid, i in number.items() for path in visible(folder / "train" / wnid / "images")]
    test = []
    for line, fields in enumerate(map(str.split, _lines(annotations)), 1):
        if len(fields) < 2 or fields[1] not in number or Path(fields[0]).name != fields[0]:
            raise RecollectError(f"{annotations}: line {line} does not name a picture and a folder of train/: {AGAIN}")
        test.append((annotations.parent / "images" / fields[0], number[fields[1]]))
    # A few of its pictures are grey; all are 64x64.
    splits = {"train": _from_files(train, None, "RGB"), "test": _from_files(test, None, "RGB")}
    return Parts(splits, _tiny_names(folder / "words.txt", wnids))


def _tiny_names(words: Path, wnids: list[str]) -> tuple[str, ...]:
    """The first synonym of each wnid; with the wnid where two share it, or the wnid alone without words.txt."""
    fields = (line.partition("\t") for line in _lines(words)) if words.is_file() else ()
    known = {wnid: synonyms.split(",")[0].strip() for wnid, _, synonyms in fields}
    names = [known.get(wnid) or wnid for wnid in wnids]
    return tuple(name if names.count(name) == 1 else f"{name} ({wnid})" for name, wnid in zip(names, wnids, strict=True))


def _lines(path: Path) -> list[str]:
    return content(path).decode("utf-8", "replace").splitlines()


def image_folder(folder: Path, size: int | None) -> Parts:
    """Class folders of pictures, either directly or inside train/ beside val/ and test/."""
    inside = [child.name for child in visible(folder) if child.is_dir()]
    if not inside:
        raise RecollectError(f"{folder}: no class folders in it: put the pictures of each class in a folder of its own")
    roles = _roles(inside)
    if "train" not in roles or len(roles) < len(inside):  # 'train' may be a class among others, with cars and buses
        roles = {"train": ""}
    names = [child.name for child in _class_folders(folder / roles["train"])]
    splits = {role: _labelled(folder / name, names, size) for role, name in roles.items()}
    return Parts(splits, tuple(names))


def _labelled(folder: Path, names: list[str], size: int | None) -> Split:
    """The pictures of one split, labelled by the place of their folder's name in `names`."""
    folders = _class_folders(folder)
    for child in folders:
        if child.name not in names:
            raise RecollectError(f"{child}: class '{child.name}' is not among the training classes: add it there too")
    return _from_files([(path, names.index(child.name)) for child in folders for path in visible(child)], size)


def _class_folders(folder: Path) -> list[Path]:
    children = visible(folder)
    for child in children:
        if not child.is_dir():
            raise RecollectError(f"{child}: a file beside the class folders has no class: move it away")
    return children


def visible(folder: Path) -> list[Path]:
    """What a folder holds, sorted, hidden files left out."""
    try:
        return sorted(child for child in folder.iterdir() if not child.name.startswith("."))
    except OSError as error:
        remedy = "check that it is a folder of the dataset"
        raise RecollectError(f"{folder}: cannot be listed ({error.strerror}): {remedy}") from error


def _roles(names: Collection[str]) -> dict[str, str]:
    """Which of these names is the train, validation and test split. A lone validation split is what people test on."""
    roles = {role: role for role in ("train", "test") if role in names}
    validation = [name for name in ("validation", "valid", "val") if name in names]
    return roles | {"validation" if "test" in names else "test": name for name in validation[:1]}


def hugging_face(name: str, size: int | None) -> Parts:
    """A dataset of the Hugging Face hub, or a local folder that its library reads."""
    try:
        import datasets
    except ImportError as error:
        raise RecollectError(f"hf:{name}: needs the datasets package: pip install 'recollect[hf]'") from error
    local = Path(os.path.expanduser(name))
    saved = any((local / mark).is_file() for mark in ("dataset_dict.json", "state.json"))
    with parsing(f"hf:{name}: cannot be loaded", "check the name and the network"):
        found: Any = datasets.load_from_disk(str(local)) if saved else datasets.load_dataset(str(local))
    found = found if isinstance(found, dict) else {"train": found}
    roles = _roles(found)
    if "train" not in roles:
        raise RecollectError(f"hf:{name}: no split named train (it has {', '.join(found)}): choose a dataset with one")
    features = found["train"].features
    image = [key for key, feature in features.items() if isinstance(feature, datasets.Image)]
    label = [key for key, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    if not label and "int" in str(getattr(features.get("label"), "dtype", "")):
        label = ["label"]
    if not image or not label:
        what = f"needs a column of images and one of class labels, but has {', '.join(features)}"
        raise RecollectError(f"hf:{name}: {what}: cast them to Image and ClassLabel, or choose another dataset")
    splits = {r: _from_rows(f"hf:{name} {key}", found[key], image[0], label[0], size) for r, key in roles.items()}
    return Parts(splits, tuple(getattr(features[label[0]], "names", ())))


def _from_rows(what: str, rows: Any, image: str, label: str, size: int | None) -> Split:
    from datasets import Image
    from PIL import ImageOps

    labels = list(rows[label])
    if None in labels:
        raise RecollectError(f"{what}[{labels.index(None)}]: has no '{label}': leave unlabelled rows out of the dataset")
    mode, rows = rows.features[image].mode, rows.cast_column(image, Image(decode=False))  # its own decoder takes every format

    def picture(i: int) -> "PIL.Image.Image | None":
        if (cell := rows[i][image]) is None:
            return None
        path = Path(cell["path"] or "")
        return ImageOps.exif_transpose(decoded(f"{what}[{i}]", content(path) if cell["bytes"] is None else cell["bytes"]))

    own = int(getattr(getattr(rows, "data", None), "nbytes", 0))
    mode = mode if mode in ("L", "RGB") else None
    return from_numpy(_stack([f"{what}[{i}]" for i in range(len(labels))], picture, size, mode, own), labels)


def _from_files(labelled: list[tuple[Path, int]], size: int | None, mode: str | None = None) -> Split:
    own = sum(path.stat().st_size for path, _ in labelled if os.path.isfile(path))
    images = _stack([str(path) for path, _ in labelled], lambda i: open_picture(labelled[i][0]), size, mode, own)
    return from_numpy(images, [label for _, label in labelled])


def open_picture(path: Path) -> "PIL.Image.Image":
    """A picture of a file, decoded."""
    return decoded(str(path), content(path))


def decoded(name: str, raw: bytes) -> "PIL.Image.Image":
    """A picture of its bytes. Its size is known, and refused, before it is decoded; other formats' decoders start programs, or
    are seldom looked at."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):  # the limit is ours
            opened = Image.open(io.BytesIO(raw), formats=FORMATS)
    except UnidentifiedImageError:
        raise RecollectError(f"{name}: not a picture, or a damaged one: give a {FORMATS_READ} file") from None
    limits.check(f"{name}: a picture of {opened.width}x{opened.height}", PIXEL_BYTES * opened.width * opened.height, len(raw))
    opened.load()
    return opened


def _stack(
    names: list[str], picture: Callable[[int], "PIL.Image.Image | None"], size: int | None, mode: str | None = None, own: int = 0
) -> np.ndarray:
    """Pictures of one size and channel count as uint8 [N, C, H, W]; `picture` opens them by number, of `own` bytes in all."""
    stack = np.empty((len(names), 0, 0, 0), np.uint8)
    for i, name in enumerate(names):
        with parsing(f"{name}: not a picture, or a damaged one", "replace it or move it out of the dataset"):
            pixels = pixels_of(name, picture(i), size, mode)
        if i == 0:
            limits.check(f"{len(names):,} pictures like {name}", len(names) * pixels.nbytes, own)
            stack = np.empty((len(names), *pixels.shape), np.uint8)
        (first_c, first_h, first_w), (c, h, w) = stack[0].shape, pixels.shape
        if c != first_c:
            grey, colour = (names[0], name) if c == 3 else (name, names[0])
            raise RecollectError(f"{grey} is grey but {colour} is in colour: convert them all to grey or all to RGB")
        if (h, w) != (first_h, first_w):
            remedy = f"give one size to resize all to, as in --size {min(h, w)}"
            raise RecollectError(f"{names[0]} is {first_w}x{first_h} but {name} is {w}x{h}: {remedy}")
        stack[i] = pixels
    return stack


def pixels_of(name: str, picture: "PIL.Image.Image | None", size: int | None, mode: str | None) -> np.ndarray:
    """uint8 [1 or 3, H, W] of one picture: grey stays grey (16 bits lose the lower 8), all else becomes RGB."""
    from PIL import Image

    if picture is None or picture.mode == "F":
        raise RecollectError(f"{name}: not a picture of whole numbers: save it as PNG or JPEG, or leave it out")
    if picture.mode.startswith("I"):
        picture = Image.fromarray((np.asarray(picture).clip(0, 65535) >> 8).astype(np.uint8))
    own = "L" if picture.mode in ("1", "L", "LA") else "RGB"
    if picture.mode == "P":  # a palette's transparency is only understood on the way to RGBA
        picture = picture.convert("RGBA")
    picture = picture.convert(mode or own)
    if size is not None:
        limits.check(f"{name}: {size}x{size} pixels", PIXEL_BYTES * size**2)
        picture = picture.resize((size, size), Image.Resampling.BILINEAR)
    return np.atleast_3d(np.asarray(picture)).transpose(2, 0, 1)
