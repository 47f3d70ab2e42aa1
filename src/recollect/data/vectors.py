"""Query vectors that are given: one for each class, or one for each training image; from an array, or from an .npz file.

A file has `vectors` [classes, d_y] and the `names` of the classes, in any order; or `vectors` [N, d_y] alone, one for each
training image. Beside them it may say how a word becomes such a vector: `model` (the name of what embeds words in D numbers),
`projection` [D, d_y] and `mean` [D].
"""

import os
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recollect.data.images import Images, Parts, Words
from recollect.data.readers import content, npy, parsing
from recollect.errors import RecollectError
from recollect.limits import MOST_SIZE

REMEDY = "write it anew with numpy.savez(FILE, names=[classes], vectors=[classes, numbers])"


@dataclass(frozen=True)
class Given:
    """Vectors as a file or an array has them."""

    vectors: Tensor
    """[classes or training images, d_y]"""
    names: tuple[str, ...] = ()
    """of the classes; none where the rows are training images, or the classes in the order of the dataset"""
    words: Words | None = None


def checked(array: Any, where: object) -> Tensor:
    """Float32 [rows, d_y]."""
    try:
        plain = array.detach().cpu().numpy() if isinstance(array, Tensor) else array
        vectors = torch.from_numpy(np.array(plain, np.float32))
    except (TypeError, ValueError):
        raise RecollectError(f"{where} are no numbers: give an array [classes or training images, numbers]") from None
    if vectors.ndim != 2 or 0 in vectors.shape or vectors.shape[1] > MOST_SIZE:
        raise RecollectError(f"{where} are {list(vectors.shape)}: give [classes or training images, numbers]")
    if not vectors.isfinite().all():
        raise RecollectError(f"{where} have NaN or infinite values: remove them")
    return vectors


def read(path: Path) -> Given:
    """The vectors of a file."""
    if not os.path.isfile(path):
        raise RecollectError(f"vectors file {path} does not exist: {REMEDY}")
    with parsing(f"{path}: not a readable .npz of plain arrays", REMEDY), zipfile.ZipFile(path) as archive:
        size, known = len(content(path)), {name.removesuffix(".npy") for name in archive.namelist()}
        wanted = [name for name in ("vectors", "names", "model", "projection", "mean") if name in known]
        arrays = {name: npy(f"{path}: '{name}'", archive, name, size) for name in wanted}
    if "vectors" not in arrays:
        raise RecollectError(f"{path} has no array 'vectors': {REMEDY}")
    vectors, names = checked(arrays["vectors"], f"the vectors of {path}"), tuple(map(str, arrays.get("names", np.array([])).flat))
    if names and len(names) != len(vectors):
        raise RecollectError(f"{path} has {len(names)} names and {len(vectors)} vectors: give each class one of both")
    return Given(vectors, names, _words(arrays, vectors.shape[1], path))


def _words(arrays: dict[str, np.ndarray], size: int, path: Path) -> Words | None:
    if not {"model", "projection", "mean"} <= arrays.keys():
        return None
    projection, mean = (checked(np.atleast_2d(arrays[name]), f"{name} of {path}") for name in ("projection", "mean"))
    if projection.shape != (mean.shape[1], size):
        raise RecollectError(f"{path}: projection is {list(projection.shape)}, not {[mean.shape[1], size]}: {REMEDY}")
    return Words(str(arrays["model"]), projection, mean[0])


def of_training_images(parts: Parts, given: Given) -> Parts:
    """What a reader found, each training image with its vector, if the vectors are not those of classes."""
    if given.names or len(given.vectors) != len(parts.splits["train"]):
        return parts
    return replace(parts, splits={**parts.splits, "train": replace(parts.splits["train"], vectors=given.vectors)})


def attached(images: Images, given: Given, where: object) -> Images:
    """The same images, their classes (or their training images) with these vectors."""
    if images.train.targets is not None:
        raise RecollectError(f"{images.name} has continuous targets, which are its queries: leave out {where}")
    if images.train.vectors is not None and not given.names:  # from before some were held out
        return replace(images, words=given.words)
    if given.names:
        known = set(given.names)
        for name in images.class_names:
            if name not in known:
                raise RecollectError(f"{where}: no vector for class '{name}' of {images.name}: give every class one")
        number = {name: row for row, name in reversed([*enumerate(given.names)])}
        rows = given.vectors[[number[name] for name in images.class_names]]
        return replace(images, vectors=rows, words=given.words)
    if len(given.vectors) == images.classes:
        return replace(images, vectors=given.vectors, words=given.words)
    if len(given.vectors) == len(images.train):
        return replace(images, train=replace(images.train, vectors=given.vectors), words=given.words)
    raise RecollectError(
        f"{where}: {len(given.vectors)} vectors, but {images.name} has {images.classes} classes and {len(images.train)} "
        "training images: give one for each of either"
    )
