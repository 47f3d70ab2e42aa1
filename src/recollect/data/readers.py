"""Readers: the official binary files of each dataset, any .npz, and the digits, from their bytes to Parts.

Files come from strangers: a reader executes nothing it reads (pickles included), and every damaged file ends in one
RecollectError that names it. Where files lie is the business of `load`; labels and missing splits that of `make_images`.
"""

import gzip
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from recollect.data.images import Parts, Split, from_numpy
from recollect.data.pickles import text, unpickle
from recollect.errors import RecollectError

DIGITS = tuple("0123456789")
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
AGAIN = "the file is damaged: delete it and get the dataset again"


def content(path: Path) -> bytes:
    try:
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
    if raw[:2] == b"\x1f\x8b":
        with parsing(f"{path}: gzip data ends early or is broken", AGAIN):
            raw = gzip.decompress(raw)
    if raw[:4] != magic:
        found = f"starts with {raw[:4].hex() or 'nothing'}, not {magic.hex()}"
        raise RecollectError(f"{path}: not an IDX file of bytes in {dimensions} dimension(s) ({found}): {AGAIN}")
    start = 4 + 4 * dimensions
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, start, 4)]
    if len(raw) != start + math.prod(shape):
        raise RecollectError(f"{path}: {len(raw)} bytes, but its header ({shape}) asks for {start + math.prod(shape)}: {AGAIN}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def cifar10(paths: Sequence[Path]) -> Parts:
    """Five training batches and the test batch, binary or pickled."""
    batches = [_cifar_records(path, {"labels": 10}) for path in paths]
    return Parts({"train": _cifar_split(batches[:5]), "test": _cifar_split(batches[5:])}, CIFAR10)


def cifar100(paths: Sequence[Path]) -> Parts:
    """The binary files train.bin, test.bin and fine_label_names.txt, or the pickled files train, test and meta."""
    train, test = (_cifar_records(path, {"coarse_labels": 20, "fine_labels": 100}) for path in paths[:2])
    is_text = paths[2].suffix == ".txt"
    found = content(paths[2]).decode("utf-8", "replace").split() if is_text else _unpickled(paths[2]).get("fine_label_names")
    names = found if isinstance(found, list) else []
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
    from scipy.io import loadmat

    with parsing(f"{path}: not a readable .mat file", AGAIN):
        found = loadmat(io.BytesIO(content(path)), variable_names=("X", "y"))
    images, labels = found.get("X"), found.get("y")
    if images is None or labels is None:
        raise RecollectError(f"{path}: has no variables X and y: this is not SVHN's cropped format (train_32x32.mat)")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2] != 3 or labels.dtype.kind not in "iu":
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
)


def npz(path: Path) -> Parts:
    """Arrays of images and labels, under the keys of Keras, of MedMNIST, or plain images and labels."""
    with (
        parsing(f"{path}: not a readable .npz of plain arrays", "write it anew with numpy.savez"),
        np.load(io.BytesIO(content(path)), allow_pickle=False) as archive,
    ):
        arrays = {key: archive[key] for key in archive.files}
    keys = next((style for style in NPZ_KEYS if style["train"][0] in arrays), None)
    if keys is None:
        remedy = "name the arrays x_train, y_train, x_test, y_test, or train_images, train_labels, ..., or images and labels"
        raise RecollectError(f"{path}: no images in it (it has {', '.join(arrays) or 'nothing'}): {remedy}")
    splits = {}
    for part, (images, labels) in keys.items():
        if (images in arrays) != (labels in arrays):
            here, lacking = (images, labels) if images in arrays else (labels, images)
            raise RecollectError(f"{path}: '{here}' without '{lacking}': add the array '{lacking}'")
        if images in arrays:
            pixels = _npz_images(f"{path}: '{images}'", arrays[images])
            splits[part] = from_numpy(pixels, _npz_labels(f"{path}: '{labels}'", arrays[labels]))
    names = arrays.get("class_names", np.empty(0, "U"))
    if names.ndim != 1 or names.dtype.kind not in "US":
        raise RecollectError(f"{path}: 'class_names' is {names.dtype} {list(names.shape)}: make it a list of strings")
    return Parts(splits, tuple(map(text, names.tolist())))


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


def _npz_labels(what: str, labels: np.ndarray) -> np.ndarray:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise RecollectError(f"{what} is {labels.dtype} {list(labels.shape)}: make it one whole number per image, [N]")
    return labels
