"""Recalled and real images of the same class, side by side: what the objectives that compare them class by class share."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recollect.config import InnerLoop
from recollect.data import augment
from recollect.errors import RecollectError
from recollect.objectives.seam import Chance, Examples, Found, batches


class Pairing(NamedTuple):
    """Rows of the recalled set and their augmentation: one for each class, that of its real images too, or of rows alone."""

    rows: Tensor
    """[classes, each]"""
    shared: list[augment.Drawn]
    own: list[augment.Drawn]


class Pair(NamedTuple):
    """One class."""

    rows: Tensor
    """of the recalled set, [each]"""
    leaf: Tensor
    """the recalled images, to differentiate by"""
    ours: Tensor
    theirs: Tensor
    """recalled and real images, as a network sees them"""
    label: Tensor


def pairing(labels: Tensor, inner: InnerLoop, siamese: bool, chance: Chance, generator: torch.Generator) -> Pairing:
    """All that is random in it, for a recalled set with these labels."""
    _check_classes(labels)
    names, classes = augment.parse(inner.augment), len(labels.unique_consecutive())
    rows = batches(labels, 1, inner.per_class, generator).view(classes, -1)
    if siamese:
        return Pairing(rows, [augment.draw_shared(names, generator) for _ in rows], [{}] * classes)
    if chance.shared:  # real images have it already
        return Pairing(rows, [{}] * classes, [chance.shared] * classes)
    return Pairing(rows, [{}] * classes, [augment.draw(names, rows.shape[1], generator) for _ in rows])


def _check_classes(labels: Tensor) -> None:
    if labels.is_floating_point():
        what = "this objective compares class by class, and these targets are continuous"
        raise RecollectError(f"{what}: give objective unrolled or regression")


def pairs(recalled: Examples, real: Examples, drawn: Pairing) -> Iterator[Pair]:
    """Of the classes that have real images: a batch of a stream may lack one."""
    _check_classes(recalled.labels)
    for rows, shared, own in zip(drawn.rows.to(recalled.images.device), drawn.shared, drawn.own, strict=True):
        leaf, label = recalled.images[rows].requires_grad_(), recalled.labels[rows[0]]
        if not len(alike := real.images[real.labels == label]):
            continue
        ours, theirs = (augment.apply(images, shared) for images in (leaf, alike))
        yield Pair(rows, leaf, augment.apply(ours, own), theirs, label)


def found(value: Tensor, recalled: Examples, rows: Sequence[Tensor], gradients: Sequence[Tensor]) -> Found:
    """A value, and the gradient that each pair has of it."""
    return Found(value, torch.zeros_like(recalled.images).index_copy_(0, torch.cat(list(rows)), torch.cat(list(gradients))))
