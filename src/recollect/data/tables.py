"""Tables, and whatever else is examples with something to predict: a .csv, scikit-learn's own, a torch Dataset, two arrays.

A vector of d numbers is an image of d channels and one pixel, so that all that is done for images serves vectors too: each
channel is standardised by itself, and bases are in R^d.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from recollect import limits
from recollect.data.images import Images, Parts, from_numpy, make_images
from recollect.data.readers import content, parsing
from recollect.errors import RecollectError, unknown

BUNCHES = {"diabetes": "load_diabetes", "wine": "load_wine", "breast-cancer": "load_breast_cancer", "iris": "load_iris"}
"""name -> scikit-learn's loader; they come with the package"""
MOST_WORDS = 100  # different ones in a column
Pair = Dataset | tuple[Any, Any]
"""a torch Dataset of (image or vector, label or target), or these as two arrays"""


def bunch(name: str) -> Parts:
    """One of scikit-learn's tables, in its own units."""
    from sklearn import datasets

    options = {"scaled": False} if name == "diabetes" else {}
    found = getattr(datasets, BUNCHES[name])(**options)
    classes = getattr(found, "target_names", None)
    split = from_numpy(found.data, found.target)
    return Parts({"train": split}, () if classes is None else tuple(map(str, classes)), columns=tuple(found.feature_names))


def table(path: Path, target: Sequence[str], label: str | None) -> Parts:
    """A .csv whose first line names its columns. Columns of words are one-hot; what is predicted is the columns `target`, or the
    classes in the column `label`."""
    with parsing(f"{path}: not a readable .csv", "save it as UTF-8 with commas, and the names of the columns in the first line"):
        rows = [row for row in csv.reader(io.StringIO(content(path).decode("utf-8-sig")), strict=True) if row]
    names, rows = (rows[0], rows[1:]) if rows else ([], [])
    if len(rows) < 1 or len(set(names)) != len(names):
        raise RecollectError(f"{path}: needs a first line of column names that differ, and examples below it")
    if short := next((number for number, row in enumerate(rows, 2) if len(row) != len(names)), None):
        raise RecollectError(
            f"{path}: example {short - 1} has {len(rows[short - 2])} values for {len(names)} columns: correct it"
        )
    columns = {name: [row[place].strip() for row in rows] for place, name in enumerate(names)}
    if not target and label is None:
        raise RecollectError(f"{path}: which column is to be predicted? give --target NAME; columns: {', '.join(names)[:200]}")
    for name in [*target, *([label] if label else [])]:
        if name not in columns:
            raise unknown(f"column of {path.name}", name, names)
    if len(target) == 1 and label is None and not _is_numeric(columns[target[0]]):
        target, label = (), target[0]
    if target and label is not None:
        raise RecollectError(f"{path}: target {target[0]} and label {label} cannot both be predicted: leave one out")
    used = [name for name in names if name not in target and name != label]
    wide = sum(min(len(set(columns[name])), MOST_WORDS) for name in used if not _is_numeric(columns[name]))
    limits.check(f"{path}: {len(rows):,} examples with {wide:,} columns of words", 4 * len(rows) * wide)
    found = [_encoded(path, name, columns[name]) for name in used]
    if not found:
        raise RecollectError(f"{path}: has no columns beside those to be predicted: add some")
    vectors = np.concatenate([values for _, values in found], 1)
    called = tuple(name for own, _ in found for name in own)
    if label is None:
        truth = np.concatenate([_numbers(path, name, columns[name]) for name in target], 1)
        return Parts({"train": from_numpy(vectors, truth)}, tuple(target), columns=called)
    number = {name: place for place, name in enumerate(sorted(set(columns[label])))}
    return Parts({"train": from_numpy(vectors, [number[each] for each in columns[label]])}, tuple(number), columns=called)


def _is_numeric(values: Sequence[str]) -> bool:
    """Whether all but what is missing are numbers."""
    return all(value == "" or _number(value) is not None for value in values)


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _encoded(path: Path, name: str, values: list[str]) -> tuple[list[str], np.ndarray]:
    """Names and values [N, columns]: of numbers one column, of words one for each."""
    if _is_numeric(values):
        return [name], _numbers(path, name, values)
    words = sorted(set(values))
    if len(words) > MOST_WORDS:
        raise RecollectError(f"{path}: column '{name}' has {len(words):,} different words: leave it out of the file")
    return [f"{name}={word}" for word in words], np.array([[value == word for word in words] for value in values], np.float32)


def _numbers(path: Path, name: str, values: list[str]) -> np.ndarray:
    found = [_number(value) for value in values]
    bad = next((row for row, number in enumerate(found) if number is None or not np.isfinite(number)), None)
    if bad is not None:
        raise RecollectError(
            f"{path}: column '{name}' has '{values[bad][:40]}' in example {bad + 1}: give a number, or leave it out"
        )
    return np.array(found, np.float64)[:, None]


def from_dataset(
    train: Pair,
    test: Pair | None = None,
    validation: Pair | None = None,
    *,
    name: str = "dataset",
    class_names: Sequence[str] = (),
    columns: Sequence[str] = (),
    seed: int = 0,
) -> Images:
    """Images, vectors or grids of your own, with classes or with continuous targets.

    Arguments:
        train: a torch Dataset of (x, y), or a pair of arrays (X, y). Each x is an image [C, H, W] or [H, W] (uint8, or floats as
            they are), a PIL image, or a vector [d]. Whole numbers y are classes, floats are continuous targets (one or several).
        test: the same; None holds a fifth of the training data out.
        validation: the same; None holds a tenth of the training data out.
        name: what memories call the dataset.
        class_names: of the classes by their number, or of the targets. Default: the Dataset's own `classes`, or their numbers.
        columns: names of the numbers of a vector.
        seed: of the split.

    Returns:
        Images, as `load` gives.

    Examples:
        >>> import torch
        >>> x = torch.rand(100, 5)
        >>> recollect.from_dataset((x, x.sum(1)), name="sums", class_names=["sum"])
        Images(sums: sum of 5x1x1; 72 train, 8 validation, 20 test)
    """
    given = {"train": train, "validation": validation, "test": test}
    splits = {part: from_numpy(*_arrays(f"{name} ({part})", each)) for part, each in given.items() if each is not None}
    names = class_names or getattr(train, "classes", ()) if splits["train"].targets is None else class_names
    return make_images(name, Parts(splits, tuple(map(str, names)), columns=tuple(map(str, columns))), seed)


def _arrays(what: str, given: Any) -> tuple[np.ndarray, np.ndarray]:
    """X [N, d], [N, C, H, W] or uint8 [N, ...], and y."""
    with parsing(f"{what}: not examples of one size", "give a torch Dataset of (x, y), or two arrays (X, y)"):
        pairs = (
            (given[0], given[1]) if isinstance(given, tuple) else zip(*(given[row][:2] for row in range(len(given))), strict=True)
        )
        x, y = (_stacked(each) for each in pairs)
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    if x.ndim not in (2, 4):
        raise RecollectError(f"{what}: examples are {list(x.shape[1:])}: give images [C, H, W] or [H, W], or vectors [d]")
    return x, y


def _stacked(values: Any) -> np.ndarray:
    if isinstance(values, np.ndarray | torch.Tensor):
        return np.asarray(values)
    return np.stack([np.asarray(each) for each in values])
