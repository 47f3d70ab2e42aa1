"""Readers: the bytes of each format become Parts, and nothing else happens here.

Each reader takes the files of one dataset and returns what they hold. Files come from strangers: a reader executes
nothing it reads (pickles included), and every damaged file ends in one RecollectError that names it. Where the files
lie is the business of `load`; checking labels and cutting the missing splits that of `images.make_images`.
"""

import gzip
import io
import math
import os
import pickle
import pickletools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recollect.data.images import Split
from recollect.errors import RecollectError

if TYPE_CHECKING:
    from PIL.Image import Image

DIGITS = tuple("0123456789")
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
AGAIN = "the file is damaged: delete it and get the dataset again"


@dataclass(frozen=True)
class Parts:
    """What a reader found; a split that the files do not have is None."""

    train: Split
    test: Split | None
    class_names: tuple[str, ...]
    validation: Split | None = None
    superclasses: tuple[int, ...] | None = None


def digits() -> Parts:
    """Scikit-learn's 1,797 handwritten digits of 8x8, 0..16 stretched to 0..255. They come with the package."""
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    images = np.rint(found.data.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    return Parts(_split(images, found.target), None, DIGITS)


# --- IDX (MNIST, Fashion-MNIST) ------------------------------------------------------------------------------------


def idx_set(paths: Sequence[Path], class_names: tuple[str, ...]) -> Parts:
    """Training images, training labels, test images, test labels."""
    pairs = []
    for images_path, labels_path in (paths[:2], paths[2:]):
        images, labels = idx(images_path, 3), idx(labels_path, 1)
        if len(images) != len(labels):
            raise RecollectError(
                f"{images_path}: {len(images)} images, but {len(labels)} labels in {labels_path}: "
                "the two files are not of one dataset; get the dataset again"
            )
        pairs.append(_split(images[:, None], labels))
    return Parts(pairs[0], pairs[1], class_names)


def idx(path: Path, dimensions: int) -> np.ndarray:
    """One IDX file of bytes, plain or gzipped: two zeros, type 8, number of dimensions, each dimension, the bytes."""
    raw = _bytes(path)
    if raw[:2] == b"\x1f\x8b":
        with _parsing(f"{path}: gzip data ends early or is broken", AGAIN):
            raw = gzip.decompress(raw)
    if raw[:4] != bytes([0, 0, 8, dimensions]):
        raise RecollectError(
            f"{path}: not an IDX file of bytes in {dimensions} dimension(s) (starts with {raw[:4].hex() or 'nothing'}, "
            f"not {bytes([0, 0, 8, dimensions]).hex()}): {AGAIN}"
        )
    start = 4 + 4 * dimensions
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, start, 4)]
    if len(raw) != start + math.prod(shape):
        raise RecollectError(
            f"{path}: {len(raw)} bytes, but its header ({shape}) asks for {start + math.prod(shape)}: {AGAIN}"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


# --- CIFAR ---------------------------------------------------------------------------------------------------------


def cifar10_binary(paths: Sequence[Path]) -> Parts:
    """Five training batches and the test batch, each record a label and 3x32x32 bytes."""
    *train, test = (_cifar_records(path, (10,)) for path in paths)
    return Parts(*_cifar_splits(train, test), CIFAR10)


def cifar100_binary(paths: Sequence[Path]) -> Parts:
    """train.bin, test.bin and fine_label_names.txt; each record a coarse label, a fine label and 3x32x32 bytes."""
    train, test = (_cifar_records(path, (20, 100)) for path in paths[:2])
    names = tuple(_bytes(paths[2]).decode("utf-8", "replace").split())
    return _cifar100(paths, train, test, names)


def cifar10_python(paths: Sequence[Path]) -> Parts:
    """Five pickled training batches and the test batch."""
    *train, test = (_cifar_pickle(path, {"labels": 10}) for path in paths)
    return Parts(*_cifar_splits(train, test), CIFAR10)


def cifar100_python(paths: Sequence[Path]) -> Parts:
    """The pickled files train, test and meta."""
    train, test = (_cifar_pickle(path, {"coarse_labels": 20, "fine_labels": 100}) for path in paths[:2])
    names = unpickle(paths[2]).get("fine_label_names")
    return _cifar100(paths, train, test, tuple(_text(name) for name in names) if isinstance(names, list) else ())


def _cifar100(paths: Sequence[Path], train: np.ndarray, test: np.ndarray, names: tuple[str, ...]) -> Parts:
    if len(names) != 100:
        raise RecollectError(f"{paths[2]}: {len(names)} class names instead of 100: {AGAIN}")
    coarse, fine = train[:, 0], train[:, 1]
    superclasses = np.zeros(100, np.uint8)
    superclasses[fine] = coarse
    if (superclasses[fine] != coarse).any():
        raise RecollectError(f"{paths[0]}: a class belongs to two superclasses: {AGAIN}")
    return Parts(*_cifar_splits([train], test), names, superclasses=tuple(superclasses.tolist()))


def _cifar_records(path: Path, limits: tuple[int, ...]) -> np.ndarray:
    """uint8 [N, labels + 3072], where label column i is known to be below limits[i]."""
    raw, record = _bytes(path), len(limits) + 3072
    if not raw or len(raw) % record:
        raise RecollectError(f"{path}: {len(raw)} bytes is not a whole number of records of {record}: {AGAIN}")
    records = np.frombuffer(raw, np.uint8).reshape(-1, record)
    for column, limit in enumerate(limits):
        _in_range(path, records[:, column], 0, limit - 1)
    return records


def _cifar_pickle(path: Path, limits: Mapping[str, int]) -> np.ndarray:
    """The pickled batch as the same records as the binary version's."""
    batch = unpickle(path)
    data = batch.get("data")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise RecollectError(f"{path}: no 'data' of bytes [N, 3072]: this is not a CIFAR batch, or {AGAIN}")
    columns = []
    for key, limit in limits.items():
        labels = batch.get(key)
        if not isinstance(labels, list) or not all(type(label) is int for label in labels):
            raise RecollectError(f"{path}: no list of whole numbers '{key}': this is not the right CIFAR, or {AGAIN}")
        if len(labels) != len(data):
            raise RecollectError(f"{path}: {len(data)} images but {len(labels)} '{key}': {AGAIN}")
        _in_range(path, labels, 0, limit - 1)
        columns.append(np.array(labels, np.uint8))
    return np.column_stack([*columns, data])


def _cifar_splits(train: Sequence[np.ndarray], test: np.ndarray) -> tuple[Split, Split]:
    whole = (np.concatenate(train), test)
    first, second = (_split(r[:, -3072:].reshape(-1, 3, 32, 32), r[:, -3073]) for r in whole)
    return first, second


# --- pickles, without what makes them dangerous ----------------------------------------------------------------------


def unpickle(path: Path) -> dict[str, Any]:
    """A pickled dict of arrays, numbers, strings and lists; its keys as str. Nothing the file names is ever called.

    The names a pickle may call are mapped to the stand-ins below, which check their arguments; numpy itself never sees
    the pickle's state, because numpy's own `__setstate__` trusts it.
    """
    raw = _bytes(path)
    with _parsing(f"{path}: not a readable pickle of arrays", AGAIN):
        # A memo number sizes the unpickler's table: ten bytes could ask for 64 GB.
        for opcode, argument, _ in pickletools.genops(raw):
            if opcode.name in ("PUT", "LONG_BINPUT") and not 0 <= int(argument or 0) <= len(raw):
                raise pickle.UnpicklingError(f"memo {argument} is out of range")
        found = _Unpickler(io.BytesIO(raw), encoding="latin1").load()  # Python 2 wrote the official files
    if not isinstance(found, dict):
        raise RecollectError(f"{path}: holds a {type(found).__name__} instead of a dict: {AGAIN}")
    return {_text(key): value.array if isinstance(value, _Array) else value for key, value in found.items()}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no dataset needs")
        return _ALLOWED[module, name]


class _NdarrayName:
    """numpy.ndarray, as a name only: an argument of _reconstruct."""

    __slots__ = ()


class _Dtype:
    """What a pickled dtype becomes: its code and byte order, until an array needs it."""

    __slots__ = ("dtype",)

    def __init__(self, code: str) -> None:
        self.dtype = np.dtype(code)
        if self.dtype.kind not in "biufSU":
            raise pickle.UnpicklingError(f"arrays of type {code!r} are refused")

    def __setstate__(self, state: tuple) -> None:
        _, order, subarray, names, fields, *_ = state
        if not (subarray is names is fields is None) or order not in ("|", "<", ">", "="):
            raise pickle.UnpicklingError("structured arrays are refused")
        self.dtype = self.dtype.newbyteorder(order)


class _Array:
    """What a pickled array becomes: built from its bytes, which the shape has to fit."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(data, (bytes, str)):
            raise pickle.UnpicklingError("an array without plain bytes is refused")
        raw = data if isinstance(data, bytes) else data.encode("latin1")
        flat = np.frombuffer(raw, dtype.dtype)
        self.array = flat.reshape(shape, order="F" if fortran else "C")


class _Reconstruct:
    __slots__ = ()

    def __call__(self, kind: object, shape: object, code: object) -> _Array:
        if not isinstance(kind, _NdarrayName) or shape != (0,) or code not in ("b", b"b"):
            raise pickle.UnpicklingError("_reconstruct is only for an empty ndarray")
        return _Array()


class _MakeDtype:
    __slots__ = ()

    def __call__(self, code: object, align: object = False, copy: object = True) -> _Dtype:
        if not isinstance(code, (str, bytes)):
            raise pickle.UnpicklingError("a dtype without a type code is refused")
        return _Dtype(_text(code))


class _Encode:
    __slots__ = ()

    def __call__(self, text: object, encoding: object) -> bytes:
        if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError("encode is only for latin1")
        return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], object] = {
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy._core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy", "ndarray"): _NdarrayName(),
    ("numpy", "dtype"): _MakeDtype(),
    ("_codecs", "encode"): _Encode(),
}


# --- SVHN ----------------------------------------------------------------------------------------------------------


def svhn(paths: Sequence[Path]) -> Parts:
    """train_32x32.mat and test_32x32.mat."""
    train, test = (_mat(path) for path in paths)
    return Parts(train, test, DIGITS)


def _mat(path: Path) -> Split:
    """X uint8 [32, 32, 3, N] and y [N, 1], where the label 10 means the digit 0."""
    from scipy.io import loadmat

    with _parsing(f"{path}: not a readable .mat file", AGAIN):
        found = loadmat(io.BytesIO(_bytes(path)), variable_names=("X", "y"))
    images, labels = found.get("X"), found.get("y")
    if images is None or labels is None:
        raise RecollectError(f"{path}: has no variables X and y: this is not SVHN's cropped format (train_32x32.mat)")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2] != 3 or labels.dtype.kind not in "iu":
        raise RecollectError(
            f"{path}: X is {images.dtype} {list(images.shape)} and y {labels.dtype}, not uint8 [32, 32, 3, N]: {AGAIN}"
        )
    if labels.size != images.shape[3]:
        raise RecollectError(f"{path}: {images.shape[3]} images but {labels.size} labels: {AGAIN}")
    _in_range(path, labels, 1, 10)
    return _split(images.transpose(3, 2, 0, 1), labels.astype(np.int64).flatten() % 10)


# --- pictures: TinyImageNet, any folder of class folders, Hugging Face ------------------------------------------------


def tiny_imagenet(paths: Sequence[Path]) -> Parts:
    """Its folder, found by val/val_annotations.txt: train/<wnid>/images/*.JPEG, val/images; val is the test set."""
    annotations, folder = paths[0], paths[0].parent.parent
    wnids = [child.name for child in _visible(folder / "train") if child.is_dir()]
    number = {wnid: i for i, wnid in enumerate(wnids)}
    train = [(path, i) for wnid, i in number.items() for path in _visible(folder / "train" / wnid / "images")]
    test = []
    for line, fields in enumerate(map(str.split, _bytes(annotations).decode("utf-8", "replace").splitlines()), 1):
        if len(fields) < 2 or fields[1] not in number:
            raise RecollectError(f"{annotations}: line {line} does not name a picture and a folder of train/: {AGAIN}")
        test.append((annotations.parent / "images" / fields[0], number[fields[1]]))
    names = _tiny_names(folder / "words.txt", wnids)
    # A few of its pictures are grey; all are 64x64.
    return Parts(_picture_split(train, None, "RGB"), _picture_split(test, None, "RGB"), names)


def _tiny_names(words: Path, wnids: list[str]) -> tuple[str, ...]:
    """The first synonym of each wnid; with the wnid where two share it, or the wnid alone without words.txt."""
    known: dict[str, str] = {}
    if words.is_file():
        for line in _bytes(words).decode("utf-8", "replace").splitlines():
            wnid, _, synonyms = line.partition("\t")
            known[wnid] = synonyms.split(",")[0].strip()
    names = [known.get(wnid) or wnid for wnid in wnids]
    return tuple(
        name if names.count(name) == 1 else f"{name} ({wnid})" for name, wnid in zip(names, wnids, strict=True)
    )


def image_folder(folder: Path, size: int | None) -> Parts:
    """Class folders of pictures, either directly or inside train/ beside val/ and test/."""
    inside = [child.name for child in _visible(folder) if child.is_dir()]
    if not inside:
        raise RecollectError(f"{folder}: no class folders in it: put the pictures of each class in a folder of its own")
    splits = _roles(inside) if "train" in inside else {}
    if sorted(splits.values()) != sorted(inside):  # also when 'train' is a class among others, with cars and buses
        splits = {"train": ""}
    names = [child.name for child in _class_folders(folder / splits["train"])]
    parts = {role: _labelled(folder / part, names, size) for role, part in splits.items()}
    return _assemble(parts, tuple(names))


def _labelled(folder: Path, names: list[str], size: int | None) -> Split:
    """The pictures of one split, labelled by the place of their folder's name in `names`."""
    labelled = []
    for child in _class_folders(folder):
        if child.name not in names:
            raise RecollectError(f"{child}: class '{child.name}' is not among the training classes: add it there too")
        labelled += [(path, names.index(child.name)) for path in _visible(child)]
    return _picture_split(labelled, size)


def _class_folders(folder: Path) -> list[Path]:
    children = _visible(folder)
    for child in children:
        if not child.is_dir():
            raise RecollectError(f"{child}: a file beside the class folders has no class: move it away")
    return children


def hugging_face(name: str, size: int | None) -> Parts:
    """A dataset of the Hugging Face hub, or a local folder that its library reads."""
    try:
        import datasets
    except ImportError as error:
        raise RecollectError(f"hf:{name}: needs the datasets package: pip install 'recollect[hf]'") from error
    local = Path(os.path.expanduser(name))
    saved = any((local / mark).is_file() for mark in ("dataset_dict.json", "state.json"))
    with _parsing(f"hf:{name}: cannot be loaded", "check the name and the network"):
        found: Any = datasets.load_from_disk(str(local)) if saved else datasets.load_dataset(str(local))
    found = found if isinstance(found, dict) else {"train": found}
    roles = _roles(found)
    if "train" not in roles:
        raise RecollectError(f"hf:{name}: no split named train (it has {', '.join(found)}): choose a dataset with one")
    features = found[roles["train"]].features
    image = [key for key, feature in features.items() if isinstance(feature, datasets.Image)]
    label = [key for key, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    if not label and "int" in str(getattr(features.get("label"), "dtype", "")):
        label = ["label"]
    if not image or not label:
        raise RecollectError(
            f"hf:{name}: needs a column of images and one of class labels, but has {', '.join(features)}: "
            "cast them to Image and ClassLabel, or choose another dataset"
        )
    parts = {r: _hf_split(f"hf:{name} {key}", found[key], image[0], label[0], size) for r, key in roles.items()}
    return _assemble(parts, tuple(getattr(features[label[0]], "names", ())) or _numbered(f"hf:{name}", parts["train"]))


def _hf_split(what: str, rows: Any, image: str, label: str, size: int | None) -> Split:
    labels = list(rows[label])
    if None in labels:
        raise RecollectError(
            f"{what}[{labels.index(None)}]: has no '{label}': leave unlabelled rows out of the dataset"
        )
    pictures = ((f"{what}[{i}]", lambda i=i: rows[i][image]) for i in range(len(labels)))
    return _split(_stack(pictures, len(labels), size), np.array(labels, np.int64))


def _picture_split(labelled: list[tuple[Path, int]], size: int | None, mode: str | None = None) -> Split:
    pictures = ((str(path), lambda path=path: _open(path)) for path, _ in labelled)
    return _split(_stack(pictures, len(labelled), size, mode), np.array([label for _, label in labelled], np.int64))


def _open(path: Path) -> "Image":
    from PIL import Image

    with Image.open(path) as picture:
        picture.load()
        return picture


def _stack(
    pictures: Iterable[tuple[str, Callable[[], "Image | None"]]], count: int, size: int | None, mode: str | None = None
) -> np.ndarray:
    """Pictures (name, how to open it) of one size and channel count as uint8 [N, C, H, W]."""
    stack, first = np.empty((count, 0, 0, 0), np.uint8), ""
    for i, (what, opened) in enumerate(pictures):
        pixels = _pixels(what, opened, size, mode)
        if i == 0:
            stack, first = np.empty((count, *pixels.shape), np.uint8), what
        (one_h, one_w, one_c), (h, w, c) = stack[0].shape, pixels.shape
        if c != one_c:
            grey, colour = (first, what) if c == 3 else (what, first)
            raise RecollectError(f"{grey} is grey but {colour} is in colour: convert them all to grey or all to RGB")
        if (h, w) != (one_h, one_w):
            remedy = f"give one size to resize all to, as in --size {min(h, w)}"
            raise RecollectError(f"{first} is {one_w}x{one_h} but {what} is {w}x{h}: {remedy}")
        stack[i] = pixels
    return stack.transpose(0, 3, 1, 2)


def _pixels(what: str, opened: Callable[[], "Image | None"], size: int | None, mode: str | None) -> np.ndarray:
    """uint8 [H, W, 1 or 3] of one picture: grey stays grey (16 bits lose the lower 8), all else becomes RGB."""
    from PIL import Image

    with _parsing(f"{what}: not a picture, or a damaged one", "replace it or move it out of the dataset"):
        picture = opened()
        if picture is None or picture.mode == "F":
            raise RecollectError(f"{what}: not a picture of whole numbers: save it as PNG or JPEG, or leave it out")
        if picture.mode.startswith("I"):
            picture = Image.fromarray((np.asarray(picture).clip(0, 65535) >> 8).astype(np.uint8))
        own = "L" if picture.mode in ("1", "L", "LA") else "RGB"
        if picture.mode == "P":  # a palette's transparency is only understood on the way to RGBA
            picture = picture.convert("RGBA")
        picture = picture.convert(mode or own)
        if size is not None:
            picture = picture.resize((size, size), Image.Resampling.BILINEAR)
    return np.atleast_3d(np.asarray(picture))


# --- .npz ----------------------------------------------------------------------------------------------------------

# For each convention (Keras, MedMNIST, one set) the keys of each split's images and labels; train has to be there.
NPZ_KEYS: tuple[dict[str, tuple[str, str]], ...] = (
    {"train": ("x_train", "y_train"), "validation": ("x_val", "y_val"), "test": ("x_test", "y_test")},
    {p: (f"{k}_images", f"{k}_labels") for p, k in (("train", "train"), ("validation", "val"), ("test", "test"))},
    {"train": ("images", "labels")},
)


def npz(path: Path) -> Parts:
    """Arrays of images and labels, under the keys of Keras, of MedMNIST, or plain images and labels."""
    with (
        _parsing(f"{path}: not a readable .npz of plain arrays", "write it anew with numpy.savez"),
        np.load(io.BytesIO(_bytes(path)), allow_pickle=False) as archive,
    ):
        arrays = {key: archive[key] for key in archive.files}
    keys = next((style for style in NPZ_KEYS if style["train"][0] in arrays), None)
    if keys is None:
        raise RecollectError(
            f"{path}: no images in it (it has {', '.join(arrays) or 'nothing'}): name the arrays x_train, y_train, "
            "x_test, y_test, or train_images, train_labels, ..., or images and labels"
        )
    parts = {}
    for part, (images, labels) in keys.items():
        if images in arrays or labels in arrays:
            for key, other in ((images, labels), (labels, images)):
                if key not in arrays:
                    raise RecollectError(f"{path}: '{other}' without '{key}': add the array '{key}'")
            pixels = _npz_images(f"{path}: '{images}'", arrays[images])
            parts[part] = _split(pixels, _npz_labels(f"{path}: '{labels}'", arrays[labels]))
    if "class_names" not in arrays:
        return _assemble(parts, _numbered(str(path), parts["train"]))
    names = arrays["class_names"]
    if names.ndim != 1 or names.dtype.kind not in "US":
        raise RecollectError(f"{path}: 'class_names' is {names.dtype} {list(names.shape)}: make it a list of strings")
    return _assemble(parts, tuple(_text(name) for name in names.tolist()))


def _npz_images(what: str, images: np.ndarray) -> np.ndarray:
    """uint8 [N, C, H, W] from NHW, NHWC or NCHW; floats of 0..1 stretched to 0..255."""
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[3] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    elif images.ndim != 4 or images.shape[1] not in (1, 3):
        raise RecollectError(
            f"{what} is {list(images.shape)}: make it [N, H, W], [N, H, W, 1 or 3] or [N, 1 or 3, H, W]"
        )
    if images.dtype == np.uint8:
        return images
    if images.dtype.kind != "f":
        raise RecollectError(f"{what} is {images.dtype}: save it as uint8 in 0..255 or as floats in 0..1")
    if not np.isfinite(images).all():
        raise RecollectError(f"{what} has NaN or infinite values: remove the damaged images")
    if images.size and (images.min() < 0 or images.max() > 1):
        raise RecollectError(
            f"{what} has floats in {images.min():g}..{images.max():g}: scale them to 0..1 or save uint8"
        )
    return np.rint(images.astype(np.float32) * 255).astype(np.uint8)


def _npz_labels(what: str, labels: np.ndarray) -> np.ndarray:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise RecollectError(f"{what} is {labels.dtype} {list(labels.shape)}: make it one whole number per image, [N]")
    return labels


# --- what the readers share ----------------------------------------------------------------------------------------


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecollectError(
            f"{path}: cannot be read ({error.strerror}): check that it is a file you may read"
        ) from error


def _visible(folder: Path) -> list[Path]:
    """What a folder holds, sorted, hidden files left out."""
    try:
        return sorted(child for child in folder.iterdir() if not child.name.startswith("."))
    except OSError as error:
        raise RecollectError(
            f"{folder}: cannot be listed ({error.strerror}): check that it is a folder of the dataset"
        ) from error


def _split(images: np.ndarray, labels: np.ndarray) -> Split:
    return Split(torch.from_numpy(np.array(images, order="C")), torch.from_numpy(np.array(labels, np.int64)))


def _roles(names: Iterable[str]) -> dict[str, str]:
    """Which of these names is the train, validation and test split. A lone validation split is what people test on."""
    names = list(names)
    validation = next((name for name in ("validation", "valid", "val") if name in names), None)
    roles = {role: role for role in ("train", "test") if role in names}
    if validation is not None:
        roles["validation" if "test" in names else "test"] = validation
    return roles


def _assemble(parts: Mapping[str, Split], class_names: tuple[str, ...]) -> Parts:
    return Parts(parts["train"], parts.get("test"), class_names, parts.get("validation"))


def _numbered(what: str, train: Split) -> tuple[str, ...]:
    """Class names where there are none: the numbers 0.. of the training labels."""
    highest = int(train.labels.max()) if len(train) else 0
    if highest >= max(len(train), 1):  # some class would have no image; and a label of 2**40 would fill the memory
        raise RecollectError(
            f"{what}: label {highest} is out of range for {len(train)} images: number the classes from 0"
        )
    return tuple(str(i) for i in range(highest + 1))


def _in_range(path: Path, labels: Any, low: int, high: int) -> None:
    bad = next((label for label in np.asarray(labels).flatten().tolist() if not low <= label <= high), None)
    if bad is not None:
        raise RecollectError(f"{path}: label {bad} is out of range ({low}..{high}): {AGAIN}")


def _text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


@contextmanager
def _parsing(what: str, remedy: str) -> Iterator[None]:
    """Around another library's parser: on damaged input these raise almost anything, and all of it means the same."""
    try:
        yield
    except RecollectError:
        raise
    except Exception as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise RecollectError(f"{what} ({line}): {remedy}") from error
