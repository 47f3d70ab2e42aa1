"""Readers: the official binary files of each dataset, any .npz, and the digits, from their bytes to Parts.

Files come from strangers: a reader executes nothing it reads (pickles included), and every damaged file ends in one
RecollectError that names it. Where files lie is the business of `load`; labels and missing splits that of `make_images`.
"""

import gzip
import io
import itertools
import math
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic

from recollect import limits
from recollect.data.images import Parts, Split, from_numpy
from recollect.data.pickles import text, unpickle
from recollect.errors import RecollectError

DIGITS = tuple("0123456789")
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
AGAIN = "the file is damaged: delete it and get the dataset again"


def content(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():  # a pipe or a device can be read for ever
            raise RecollectError(f"{path}: not a file (a folder, a pipe or a device): give a file")
        return path.read_bytes()
    except OSError as error:
        raise RecollectError(f"{path}: cannot be read ({error.strerror}): check that it is a file you may read") from error


@contextmanager
def parsing(what: str, remedy: str) -> Iterator[None]:
    """Around another library's parser: on damaged input these raise almost anything, and all of it means the same."""
    try:
        yield
    except RecollectError:
        raise
    except Exception as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise RecollectError(f"{what} ({line}): {remedy}") from error


def _in_range(path: Path, labels: list[int], low: int, high: int) -> None:
    bad = next((label for label in labels if not low <= label <= high), None)
    if bad is not None:
        raise RecollectError(f"{path}: label {bad} is out of range ({low}..{high}): {AGAIN}")


def digits() -> Parts:
    """Scikit-learn's 1,797 handwritten digits of 8x8, 0..16 stretched to 0..255. They come with the package."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = np.rint(images.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    return Parts({"train": from_numpy(pixels, labels)}, DIGITS)


def idx_set(paths: Sequence[Path], class_names: tuple[str, ...]) -> Parts:
    """Training images, training labels, test images, test labels."""
    splits = {}
    for part, (images_path, labels_path) in (("train", paths[:2]), ("test", paths[2:])):
        images, labels = idx(images_path, 3), idx(labels_path, 1)
        if len(images) != len(labels):
            remedy = "the two files are not of one dataset; get the dataset again"
            raise RecollectError(f"{images_path}: {len(images)} images, but {len(labels)} labels in {labels_path}: {remedy}")
        splits[part] = from_numpy(images[:, None], labels)
    return Parts(splits, class_names)


def idx(path: Path, dimensions: int) -> np.ndarray:
    """One IDX file of bytes, plain or gzipped: two zeros, type 8, number of dimensions, each dimension, the bytes."""
    raw, magic = content(path), bytes([0, 0, 8, dimensions])
    with parsing(f"{path}: gzip data ends early or is broken", AGAIN):
        packed = io.BytesIO(raw)
        file = gzip.GzipFile(fileobj=packed) if raw[:2] == b"\x1f\x8b" else packed
        head = file.read(4 + 4 * dimensions)
        if head[:4] != magic:
            found = f"starts with {head[:4].hex() or 'nothing'}, not {magic.hex()}"
            raise RecollectError(f"{path}: not an IDX file of bytes in {dimensions} dimension(s) ({found}): {AGAIN}")
        shape = [int.from_bytes(head[i : i + 4], "big") for i in range(4, len(head), 4)]
        size = math.prod(shape)
        limits.check(f"{path}: an array of {shape}", size, len(raw))
        pixels = file.read(size + 1)  # to the end, where gzip has its checksum
    if len(shape) != dimensions or len(pixels) != size:
        has = f"{len(pixels)} bytes" if len(pixels) <= size else "more bytes"
        raise RecollectError(f"{path}: {has} after its header, which asks for {size} ({shape}): {AGAIN}")
    return np.frombuffer(pixels, np.uint8).reshape(shape)


def cifar10(paths: Sequence[Path]) -> Parts:
    """Five training batches and the test batch, binary or pickled."""
    batches = [_cifar_records(path, {"labels": 10}) for path in paths]
    return Parts({"train": _cifar_split(batches[:5]), "test": _cifar_split(batches[5:])}, CIFAR10)


def cifar100(paths: Sequence[Path]) -> Parts:
    """The binary files train.bin, test.bin and fine_label_names.txt, or the pickled files train, test and meta."""
    train, test = (_cifar_records(path, {"coarse_labels": 20, "fine_labels": 100}) for path in paths[:2])
    is_text = paths[2].suffix == ".txt"
    found = content(paths[2]).decode("utf-8", "replace").split() if is_text else _unpickled(paths[2]).get("fine_label_names")
    names = found if isinstance(found, list) and all(isinstance(name, str | bytes) for name in found) else []
    if len(names) != 100:
        raise RecollectError(f"{paths[2]}: {len(names)} class names instead of 100: {AGAIN}")
    coarse, fine = train[:, 0], train[:, 1]
    superclasses = np.zeros(100, np.uint8)
    superclasses[fine] = coarse
    if (superclasses[fine] != coarse).any():
        raise RecollectError(f"{paths[0]}: a class belongs to two superclasses: {AGAIN}")
    splits = {"train": _cifar_split([train]), "test": _cifar_split([test])}
    return Parts(splits, tuple(map(text, names)), tuple(superclasses.tolist()))


def _cifar_records(path: Path, limits: Mapping[str, int]) -> np.ndarray:
    """uint8 [N, labels + 3x32x32], where the labels of each kind are known to be below its limit."""
    if path.suffix != ".bin":
        return _cifar_pickle(path, limits)
    raw, record = content(path), len(limits) + 3072
    if not raw or len(raw) % record:
        raise RecollectError(f"{path}: {len(raw)} bytes is not a whole number of records of {record}: {AGAIN}")
    records = np.frombuffer(raw, np.uint8).reshape(-1, record)
    for column, limit in enumerate(limits.values()):
        _in_range(path, records[:, column].tolist(), 0, limit - 1)
    return records


def _cifar_pickle(path: Path, limits: Mapping[str, int]) -> np.ndarray:
    """The pickled batch as the same records as the binary version's."""
    batch = _unpickled(path)
    data = batch.get("data")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise RecollectError(f"{path}: no 'data' of bytes [N, 3072]: this is not a CIFAR batch, or {AGAIN}")
    for key, limit in limits.items():
        labels = batch.get(key)
        if not isinstance(labels, list) or not all(type(label) is int for label in labels):
            raise RecollectError(f"{path}: no list of whole numbers '{key}': this is not the right CIFAR, or {AGAIN}")
        if len(labels) != len(data):
            raise RecollectError(f"{path}: {len(data)} images but {len(labels)} '{key}': {AGAIN}")
        _in_range(path, labels, 0, limit - 1)
    return np.column_stack([*(np.array(batch[key], np.uint8) for key in limits), data])


def _unpickled(path: Path) -> dict[str, Any]:
    with parsing(f"{path}: not a readable pickle of arrays", AGAIN):
        return unpickle(content(path))


def _cifar_split(batches: list[np.ndarray]) -> Split:
    """From records: the last label, then the pixels."""
    images = np.concatenate([records[:, -3072:] for records in batches])
    return from_numpy(images.reshape(-1, 3, 32, 32), np.concatenate([records[:, -3073] for records in batches]))


def svhn(paths: Sequence[Path]) -> Parts:
    """train_32x32.mat and test_32x32.mat."""
    return Parts({"train": _mat(paths[0]), "test": _mat(paths[1])}, DIGITS)


def _mat(path: Path) -> Split:
    """X uint8 [32, 32, 3, N] and y [N, 1], where the label 10 means the digit 0."""
    with parsing(f"{path}: not a readable .mat file", AGAIN):
        found = read_mat(str(path), content(path), ("X", "y"))
    images, labels = found.get("X"), found.get("y")
    if images is None or labels is None:
        raise RecollectError(f"{path}: has no variables X and y: this is not SVHN's cropped format (train_32x32.mat)")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2] != 3:
        what = f"X is {images.dtype} {list(images.shape)} and y {labels.dtype}"
        raise RecollectError(f"{path}: {what}, not uint8 [32, 32, 3, N]: {AGAIN}")
    if labels.size != images.shape[3]:
        raise RecollectError(f"{path}: {images.shape[3]} images but {labels.size} labels: {AGAIN}")
    _in_range(path, labels.flatten().tolist(), 1, 10)
    return from_numpy(images.transpose(3, 2, 0, 1), labels.flatten() % 10)


# For each convention (Keras, MedMNIST, one set) the keys of each split's images and labels; train has to be there.
NPZ_KEYS: tuple[dict[str, tuple[str, str]], ...] = (
    {"train": ("x_train", "y_train"), "validation": ("x_val", "y_val"), "test": ("x_test", "y_test")},
    {p: (f"{k}_images", f"{k}_labels") for p, k in (("train", "train"), ("validation", "val"), ("test", "test"))},
    {"train": ("images", "labels")},
    {"train": ("X", "y")},
)


def npz(path: Path) -> Parts:
    """Arrays of images and labels, under the keys of Keras, of MedMNIST, or plain images and labels; under x and y also vectors,
    grids and continuous targets."""
    with (
        parsing(f"{path}: not a readable .npz of plain arrays", "write it anew with numpy.savez"),
        zipfile.ZipFile(io.BytesIO(raw := content(path))) as archive,
    ):
        names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
        keys = next((style for style in NPZ_KEYS if style["train"][0] in names), None)
        if keys is None:
            styles = "x_train, y_train, x_test, y_test, or train_images, train_labels, ..., or images and labels, or X and y"
            remedy = f"name the arrays {styles}"
            raise RecollectError(f"{path}: no images in it (it has {', '.join(names)[:200] or 'nothing'}): {remedy}")
        read = [name for name in (*itertools.chain(*keys.values()), "class_names") if name in names]
        arrays = {name: npy(f"{path}: '{name}'", archive, name, len(raw)) for name in read}
    splits = {}
    for part, (images, labels) in keys.items():
        if (images in arrays) != (labels in arrays):
            here, lacking = (images, labels) if images in arrays else (labels, images)
            raise RecollectError(f"{path}: '{here}' without '{lacking}': add the array '{lacking}'")
        if images in arrays:
            x, y = (_npz_x, _npz_y) if images.lower().startswith("x") else (_npz_images, _npz_labels)
            pixels = x(f"{path}: '{images}'", arrays[images])
            splits[part] = from_numpy(pixels, y(f"{path}: '{labels}'", arrays[labels]))
    called = arrays.get("class_names", np.empty(0, "U"))
    if called.ndim != 1 or called.dtype.kind not in "US":
        raise RecollectError(f"{path}: 'class_names' is {called.dtype} {list(called.shape)}: make it a list of strings")
    return Parts(splits, tuple(map(text, called.tolist())))


def npy(what: str, archive: zipfile.ZipFile, name: str, own: int) -> np.ndarray:
    """One array of an archive; how large it is, is known before it is unpacked."""
    with archive.open(f"{name}.npy") as file:
        head = {(1, 0): read_array_header_1_0, (2, 0): read_array_header_2_0}.get(read_magic(file))
        if head is None:
            raise ValueError(f"'{name}' has a version that no plain array needs")
        shape, fortran, kind = head(file)
        if kind.kind not in "biufSU" or min(shape, default=0) < 0:
            raise ValueError(f"'{name}' is {kind} {list(shape)}"[:200])
        size = math.prod(shape) * kind.itemsize
        limits.check(f"{what} of {list(shape)}", size, own)
        data = file.read(size + 1)  # to the end, where zip has its checksum
    if len(data) != size:
        raise ValueError(f"'{name}' has not the {size} bytes that its header asks for")
    return np.ndarray(shape, kind, data, order="F" if fortran else "C")


def _npz_images(what: str, images: np.ndarray) -> np.ndarray:
    """uint8 [N, C, H, W] from NHW, NHWC or NCHW; floats of 0..1 stretched to 0..255."""
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[3] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    elif images.ndim != 4 or images.shape[1] not in (1, 3):
        raise RecollectError(f"{what} is {list(images.shape)}: make it [N, H, W], [N, H, W, 1 or 3] or [N, 1 or 3, H, W]")
    if images.dtype == np.uint8:
        return images
    if images.dtype.kind != "f":
        raise RecollectError(f"{what} is {images.dtype}: save it as uint8 in 0..255 or as floats in 0..1")
    if not np.isfinite(images).all():
        raise RecollectError(f"{what} has NaN or infinite values: remove the damaged images")
    if images.size and (images.min() < 0 or images.max() > 1):
        raise RecollectError(f"{what} has floats in {images.min():g}..{images.max():g}: scale them to 0..1 or save uint8")
    return np.rint(images.astype(np.float32) * 255).astype(np.uint8)


def _npz_x(what: str, x: np.ndarray) -> np.ndarray:
    """The same; vectors [N, d], and grids [N, H, W] of floats beyond 0..1, as they are."""
    if x.ndim == 2 and x.dtype.kind in "biuf":
        return x
    is_grid = x.ndim == 3 and x.dtype.kind == "f" and x.size and (x.min() < 0 or x.max() > 1)
    return x[:, None] if is_grid else _npz_images(what, x)


def _npz_y(what: str, y: np.ndarray) -> np.ndarray:
    """Labels; or floats [N] or [N, targets]."""
    return y if y.dtype.kind == "f" and y.ndim in (1, 2) else _npz_labels(what, y)


def _npz_labels(what: str, labels: np.ndarray) -> np.ndarray:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise RecollectError(f"{what} is {labels.dtype} {list(labels.shape)}: make it one whole number per image, [N]")
    return labels


# MATLAB's files of version 5, as far as SVHN needs them: plain arrays of whole numbers, compressed or not. An element is a type,
# a length and so many bytes; a matrix is one that holds others: flags, dimensions, a name, and values.

NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 12: "i8", 13: "u8"}  # types of an element
CLASSES = {8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}  # of a matrix
MATRIX, COMPRESSED, COMPLEX, MOST_HEAD = 14, 15, 0x0800, 4096
CHUNK = 2**16


Bytes = bytearray | memoryview


class _Reads(Protocol):
    def read(self, size: int, /) -> Bytes: ...


class _Plain:
    """Bytes as they are, without a copy."""

    def __init__(self, raw: memoryview):
        self.raw = raw

    def read(self, size: int, /) -> memoryview:
        found, self.raw = self.raw[:size], self.raw[size:]
        return found


class _Inflated:
    """Compressed bytes, unpacked as far as they are read."""

    def __init__(self, raw: memoryview):
        self.raw, self.place, self.waiting, self.zlib = raw, 0, b"", zlib.decompressobj()

    def read(self, size: int, /) -> bytearray:
        found, have = bytearray(size), 0
        while have < size and not self.zlib.eof:
            if not self.waiting:
                self.waiting = bytes(self.raw[self.place : self.place + CHUNK])
                self.place += CHUNK
                if not self.waiting:
                    break
            some = self.zlib.decompress(self.waiting, size - have)
            found[have : have + len(some)] = some
            have += len(some)
            self.waiting = self.zlib.unconsumed_tail
        return found if have == size else found[:have]


def read_mat(what: str, raw: bytes, wanted: Collection[str]) -> dict[str, np.ndarray]:
    """The wanted arrays of a file's bytes. Anything but such a file raises ValueError, or zlib's error."""
    order = {b"IM": "<", b"MI": ">"}.get(raw[126:128])
    if order is None or raw[124:126] not in (b"\0\1", b"\1\0"):
        raise ValueError("not a .mat file of version 5")
    view, place, found = memoryview(raw), 128, {}
    while place < len(raw):
        kind, size = np.frombuffer(view[place : place + 8], order + "u4").tolist()
        body = view[place + 8 : place + 8 + size]
        if len(body) < size:
            raise ValueError(f"it ends {size - len(body)} bytes early")
        place += 8 + size + (0 if kind == COMPRESSED else -size % 8)
        stream: _Reads = _Inflated(body) if kind == COMPRESSED else _Plain(body)
        if kind == COMPRESSED:
            kind, size = _numbers(_exactly(stream, 8), order + "u4")
        if kind == MATRIX:
            found |= _matrix(f"{what}", stream, order, wanted, len(raw))
            if set(wanted) <= found.keys():
                break
    return found


def _matrix(what: str, stream: _Reads, order: str, wanted: Collection[str], own: int) -> dict[str, np.ndarray]:
    """Its name and values; nothing, if it is not wanted."""
    flags, shape, name = (_numbers(*_element(stream, order)) for _ in range(3))
    if not flags or not shape or min(shape) < 0:
        raise ValueError(f"a matrix has the flags {flags} and the dimensions {shape}")
    called = "".join(map(chr, name))
    if called not in wanted:
        return {}
    kind = CLASSES.get(flags[0] & 0xFF)
    if kind is None or flags[0] & COMPLEX:
        raise ValueError(f"'{called}' is no array of whole numbers")
    limits.check(f"{what}: '{called}' of {shape}", math.prod(shape) * np.dtype(kind).itemsize, own)
    values = np.frombuffer(*_element(stream, order, math.prod(shape)))
    if len(stream.read(9)) > 8:  # to the end, where zlib has its checksum
        raise ValueError(f"'{called}' is longer than its dimensions {shape}")
    return {called: values.astype(kind, copy=False).reshape(shape, order="F")}


def _element(stream: _Reads, order: str, count: int | None = None) -> tuple[Bytes, str]:
    """The bytes of the next element, and their type: of so many numbers, or of a head."""
    head = _exactly(stream, 8)
    kind, size = _numbers(head, order + "u4")
    small = kind >> 16
    if small:
        kind, size = kind & 0xFFFF, small
    if kind not in NUMBERS or size > (MOST_HEAD if count is None else count * np.dtype(NUMBERS[kind]).itemsize):
        raise ValueError(f"an element of type {kind} has {size} bytes")
    if small and size > 4:
        raise ValueError(f"a small element has {size} bytes")
    data = head[4 : 4 + size] if small else _exactly(stream, size)
    if not small and count is None:
        _exactly(stream, -size % 8)
    return data, order + NUMBERS[kind]


def _exactly(stream: _Reads, size: int) -> Bytes:
    if len(found := stream.read(size)) < size:
        raise ValueError("it ends early")
    return found


def _numbers(data: Bytes, kind: str) -> list[int]:
    return np.frombuffer(data, kind).tolist()
