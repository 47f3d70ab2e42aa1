"""Images: uint8 tensors, labels, class names, and a split that is fixed by a seed; what every dataset becomes.

A reader returns Parts; `make_images` checks them and adds what the dataset does not bring along.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """uint8 [N, C, H, W]"""
    labels: Tensor
    """int64 [N]"""

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Split({len(self):,} images of {'x'.join(map(str, self.images.shape[1:]))})"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all of it."""
        return sha256(self.images.numpy().tobytes(), self.labels.numpy().tobytes())

    def __getitem__(self, index: Tensor) -> "Split":
        return Split(self.images[index], self.labels[index])

    def __add__(self, other: "Split") -> "Split":
        return Split(torch.cat([self.images, other.images]), torch.cat([self.labels, other.labels]))


def from_numpy(images: np.ndarray, labels: ArrayLike) -> Split:
    """A Split of uint8 [N, C, H, W] and whole numbers [N]; images are copied only where torch cannot take them."""
    writable = np.require(images, requirements=("C", "W"))
    return Split(torch.from_numpy(writable), torch.from_numpy(np.array(labels, np.int64)))


@dataclass(frozen=True)
class Parts:
    """What a reader found."""

    splits: Mapping[str, Split]  # train, and what there is of validation and test
    class_names: tuple[str, ...] = ()  # none: the labels' numbers are the names
    superclasses: tuple[int, ...] | None = None
    pictures: Reading | None = None  # how they were made alike, where they were pictures


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
    superclasses: tuple[int, ...] | None = None
    """for each class the number of its superclass (CIFAR-100)"""
    pictures: Reading | None = None
    """how they were made alike, where they were pictures"""

    def __repr__(self) -> str:
        parts = f"{len(self.train):,} train, {len(self.validation):,} validation, {len(self.test):,} test"
        return f"Images({self.name}: {self.classes} classes of {'x'.join(map(str, self.shape))}; {parts})"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width)"""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    @property
    def classes(self) -> int:
        """number of classes"""
        return len(self.class_names)

    def only(self, class_names: Sequence[str]) -> "Images":
        """The images of some classes, numbered in the order they are named in."""
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
        train, validation, test = (Split(split.images, number[split.labels]) for split in kept)
        return Images(self.name, train, validation, test, tuple(class_names), above, self.pictures)


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
    highest = int(train.labels.max()) if len(train) else 0
    if not parts.class_names and highest >= max(len(train), 1):  # some class has no image; 2**40 names would fill the memory
        raise RecollectError(f"{name}: label {highest} is out of range for {len(train)} images: number the classes from 0")
    class_names = parts.class_names or tuple(map(str, range(highest + 1)))
    for part, split in parts.splits.items():
        _check(f"{name} ({part})", split, train.images.shape[1:], len(class_names))
    if twice := [each for each, count in Counter(class_names).items() if count > 1]:
        raise RecollectError(f"{name}: two classes are named '{twice[0]}': give each class a name of its own")
    if lacking := (train.labels.bincount(minlength=len(class_names)) == 0).nonzero().flatten().tolist():
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
    return Images(name, train, validation, test, class_names, parts.superclasses, parts.pictures)


def _check(what: str, split: Split, shape: torch.Size, classes: int) -> None:
    if len(split.images) != len(split.labels):
        raise RecollectError(f"{what}: {len(split.images)} images but {len(split.labels)} labels: one label per image")
    if len(split) == 0:
        raise RecollectError(f"{what}: no images: add some, or leave this part out")
    if split.images.dtype != torch.uint8 or split.images.ndim != 4:
        raise RecollectError(f"{what}: images are {split.images.dtype} {list(split.images.shape)}, not uint8 [N, C, H, W]")
    own = split.images.shape[1:]
    if own != shape:
        remedy = "give a size to resize to (--size)" if own[0] == shape[0] else "make all grey or all RGB"
        raise RecollectError(f"{what}: images of {list(own)} beside training images of {list(shape)}: {remedy}")
    low, high = int(split.labels.min()), int(split.labels.max())
    if low < 0 or high >= classes:
        raise RecollectError(f"{what}: label {low if low < 0 else high} is out of range for {classes} classes (0..{classes - 1})")
