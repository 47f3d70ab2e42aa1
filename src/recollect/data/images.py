"""Images: uint8 tensors, labels, class names, and a split that is fixed by a seed; what every dataset becomes.

A reader returns Parts; `make_images` checks them and adds what the dataset does not bring along.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from recollect.errors import RecollectError, unknown
from recollect.files import sha256
from recollect.reading import Reading

VALIDATION_SHARE = 0.1  # of the training data: the only images anything is ever chosen on
TEST_SHARE = 0.2  # where a dataset has no test set of its own


@dataclass(frozen=True)
class Split:
    """Some images of a dataset, with their labels.

    Examples:
        >>> test = recollect.load("digits").test
        >>> test.images.shape, len(test[test.labels == 3])
        (torch.Size([359, 1, 8, 8]), 37)
    """

    images: Tensor
    """uint8 [N, C, H, W]; or float32, as vectors of d numbers are: [N, d, 1, 1]"""
    labels: Tensor
    """int64 [N]; zeros where there are continuous targets"""
    targets: Tensor | None = None
    """float32 [N, targets], in their own units"""
    vectors: Tensor | None = None
    """float32 [N, d_y], where each image has a query vector of its own"""

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Split({len(self):,} images of {'x'.join(map(str, self.images.shape[1:]))})"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of images, labels and targets."""
        told = self.images, self.labels, *([] if self.targets is None else [self.targets])
        return sha256(*(tensor.numpy().tobytes() for tensor in told))

    def __getitem__(self, index: Tensor) -> "Split":
        targets, vectors = (None if tensor is None else tensor[index] for tensor in (self.targets, self.vectors))
        return Split(self.images[index], self.labels[index], targets, vectors)

    def __add__(self, other: "Split") -> "Split":
        return Split(
            torch.cat([self.images, other.images]),
            torch.cat([self.labels, other.labels]),
            _joined(self.targets, other.targets),
            _joined(self.vectors, other.vectors),
        )


def _joined(ours: Tensor | None, theirs: Tensor | None) -> Tensor | None:
    if (ours is None) != (theirs is None):
        raise RecollectError("one of two splits has targets or query vectors, and the other has none: give both or neither")
    return None if ours is None or theirs is None else torch.cat([ours, theirs])


def from_numpy(images: np.ndarray, labels: ArrayLike) -> Split:
    """A Split of uint8 [N, C, H, W], or of floats: those too, or vectors [N, d]. Whole numbers [N] are labels, floats [N] or
    [N, targets] are continuous targets. Images are copied only where torch cannot take them."""
    if images.ndim == 2:
        images = images[:, :, None, None].astype(np.float32)
    elif images.dtype != np.uint8 and images.dtype.kind in "fiu":
        images = images.astype(np.float32)
    pixels, truth = torch.from_numpy(np.require(images, requirements=("C", "W"))), np.array(labels)
    if truth.dtype.kind != "f":
        return Split(pixels, torch.from_numpy(truth.astype(np.int64).reshape(-1)))
    targets = torch.from_numpy(truth.astype(np.float32).reshape(len(truth), -1))
    return Split(pixels, torch.zeros(len(truth), dtype=torch.int64), targets)


@dataclass(frozen=True)
class Parts:
    """What a reader found."""

    splits: Mapping[str, Split]  # train, and what there is of validation and test
    class_names: tuple[str, ...] = ()  # none: the labels' numbers are the names
    superclasses: tuple[int, ...] | None = None
    columns: tuple[str, ...] = ()
    pictures: Reading | None = None  # how they were made alike, where they were pictures


class Words(NamedTuple):
    """How a word becomes a query vector: y = (what the model embeds it in - mean) projection, made one of length 1."""

    model: str
    """a name that is kept in files"""
    projection: Tensor
    """[D, d_y]"""
    mean: Tensor
    """[D]"""


@dataclass(frozen=True)
class Images:
    """A dataset in three parts. Training looks at `train`, choices at `validation`; `test` is read once, at the end.

    Examples:
        >>> images = recollect.load("digits")
        >>> images.shape, images.classes, len(images.only(["3", "8"]).train)
        ((1, 8, 8), 10, 256)
    """

    name: str
    """of the dataset, which memories carry on"""
    train: Split
    validation: Split
    test: Split
    class_names: tuple[str, ...]
    """by the number of their label; of continuous targets their names"""
    superclasses: tuple[int, ...] | None = None
    """for each class the number of its superclass (CIFAR-100)"""
    columns: tuple[str, ...] = ()
    """names of the numbers of a vector; none where images are images"""
    vectors: Tensor | None = None
    """float32 [classes, d_y], where each class has a query vector of its own"""
    words: Words | None = None
    """how these vectors are made of words, if they are"""
    pictures: Reading | None = None
    """how they were made alike, where they were pictures"""

    def __repr__(self) -> str:
        parts = f"{len(self.train):,} train, {len(self.validation):,} validation, {len(self.test):,} test"
        names = f"{self.classes} classes" if self.train.targets is None else ", ".join(self.class_names[:3])
        return f"Images({self.name}: {names} of {'x'.join(map(str, self.shape))}; {parts})"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width)"""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    @property
    def classes(self) -> int:
        """number of classes, or of continuous targets: outputs of a network"""
        return len(self.class_names)

    def only(self, class_names: Sequence[str]) -> "Images":
        """The images of some classes, numbered in the order they are named in."""
        if self.train.targets is not None:
            raise RecollectError(f"{self.name} has continuous targets, and no classes to choose from: leave the classes out")
        for place, name in enumerate(class_names):
            if name not in self.class_names:
                raise unknown(f"class of {self.name}", name, self.class_names)
            if name in class_names[:place]:
                raise RecollectError(f"class '{name}' of {self.name} is named twice: name it once")
        old = [self.class_names.index(name) for name in class_names]
        number = torch.full((self.classes,), -1)
        number[old] = torch.arange(len(old))

        above = None if self.superclasses is None else tuple(self.superclasses[label] for label in old)
        kept = (split[number[split.labels] >= 0] for split in (self.train, self.validation, self.test))
        train, validation, test = (replace(split, labels=number[split.labels]) for split in kept)
        vectors, names = None if self.vectors is None else self.vectors[old], tuple(class_names)
        return Images(self.name, train, validation, test, names, above, self.columns, vectors, self.words, self.pictures)


def stratified(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices (kept, held out): `share` of each class held out, at least one where the class has two or more."""
    generator = torch.Generator().manual_seed(seed)
    held = torch.zeros(len(labels), dtype=torch.bool)
    for of_class in filter(len, labels.argsort(stable=True).split(labels.bincount().tolist())):
        count = min(max(round(len(of_class) * share), 1), len(of_class) - 1)
        held[of_class[torch.randperm(len(of_class), generator=generator)[:count]]] = True
    return (~held).nonzero().flatten(), held.nonzero().flatten()


def make_images(name: str, parts: Parts, seed: int = 0) -> Images:
    """Check what a reader read; name the classes and hold images out where the dataset does not do so itself."""
    train, validation, test = parts.splits["train"], parts.splits.get("validation"), parts.splits.get("test")
    is_vectors = train.images.is_floating_point() and train.images.shape[2:] == (1, 1)
    columns = parts.columns or (tuple(map(str, range(train.images.shape[1]))) if is_vectors else ())
    if train.targets is not None:
        parts = replace(parts, class_names=parts.class_names or _numbered("target", train.targets.shape[1]))
    highest = int(train.labels.max()) if len(train) else 0
    if not parts.class_names and highest >= max(len(train), 1):  # some class has no image; 2**40 names would fill the memory
        raise RecollectError(f"{name}: label {highest} is out of range for {len(train)} images: number the classes from 0")
    class_names = parts.class_names or tuple(map(str, range(highest + 1)))
    for part, split in parts.splits.items():
        _check(f"{name} ({part})", split, train.images.shape[1:], len(class_names))
    if twice := [each for each, count in Counter(class_names).items() if count > 1]:
        raise RecollectError(f"{name}: two classes are named '{twice[0]}': give each class a name of its own")
    if is_vectors and len(columns) != train.images.shape[1]:
        raise RecollectError(
            f"{name}: {len(columns)} names for vectors of {train.images.shape[1]} numbers: give each one of its own"
        )
    if train.targets is None and (
        lacking := (train.labels.bincount(minlength=len(class_names)) == 0).nonzero().flatten().tolist()
    ):
        remedy = "add some, or leave the class out of the dataset"
        raise RecollectError(f"{name}: class '{class_names[lacking[0]]}' has no training images: {remedy}")
    if test is None:
        kept, held = stratified(train.labels, TEST_SHARE, seed)
        train, test = train[kept], train[held]
    if validation is None:
        kept, held = stratified(train.labels, VALIDATION_SHARE, seed + 1)
        train, validation = train[kept], train[held]
    if not (len(validation) and len(test)):
        remedy = "give at least 3 images of each class"
        raise RecollectError(f"{name}: too few images to hold some out for validation and test: {remedy}")
    above, pictures = parts.superclasses, parts.pictures
    return Images(name, train, validation, test, class_names, above, columns, pictures=pictures)


def _numbered(word: str, count: int) -> tuple[str, ...]:
    return (word,) if count == 1 else tuple(f"{word} {number}" for number in range(count))


def _check(what: str, split: Split, shape: torch.Size, classes: int) -> None:
    if len(split.images) != len(split.labels):
        raise RecollectError(f"{what}: {len(split.images)} images but {len(split.labels)} labels: one label per image")
    if len(split) == 0:
        raise RecollectError(f"{what}: no images: add some, or leave this part out")
    if split.images.dtype not in (torch.uint8, torch.float32) or split.images.ndim != 4:
        raise RecollectError(f"{what}: images are {split.images.dtype} {list(split.images.shape)}, not uint8 [N, C, H, W]")
    if split.images.is_floating_point() and not split.images.isfinite().all():
        raise RecollectError(f"{what}: has NaN or infinite values: remove these examples")
    own = split.images.shape[1:]
    if own != shape:
        remedy = "give a size to resize to (--size)" if own[0] == shape[0] else "make all grey or all RGB"
        raise RecollectError(f"{what}: images of {list(own)} beside training images of {list(shape)}: {remedy}")
    if split.targets is not None:
        _check_targets(what, split.targets, classes)
        return
    low, high = int(split.labels.min()), int(split.labels.max())
    if low < 0 or high >= classes:
        raise RecollectError(f"{what}: label {low if low < 0 else high} is out of range for {classes} classes (0..{classes - 1})")


def _check_targets(what: str, targets: Tensor, names: int) -> None:
    if targets.ndim != 2 or targets.shape[1] != names:
        raise RecollectError(f"{what}: targets are {list(targets.shape)} for {names} names: give [N, {names}]")
    if bad := (~targets.isfinite().all(1)).nonzero().flatten().tolist():
        raise RecollectError(f"{what}: the target of example {bad[0] + 1} is NaN or infinite: remove it")
