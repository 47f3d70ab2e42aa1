"""Folders: which picture files there are, and the label and split of each: by class folders, by a pattern, or by a .csv file.

Nothing is opened here but the .csv. What is wrong is collected, so that `load` can refuse the first and `check` list them all.
"""

import csv
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from recollect.data.readers import content, parsing
from recollect.errors import RecollectError
from recollect.reading import Reading

MEANS = {
    "{label}": "(?P<label>[^/]+)", "{split}": "(?P<split>[^/]+)",
    "**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]",
}  # fmt: skip
"""what a pattern's parts are as regular expressions"""


class File(NamedTuple):
    """A picture of a folder."""

    path: Path
    label: str
    role: str
    """train, validation or test"""


class Wrong(NamedTuple):
    """What cannot be used."""

    kind: str
    path: Path
    why: str
    """with the remedy"""
    is_file: bool = False
    """whether --skip-bad leaves it out"""


class Listing(NamedTuple):
    """What a folder has."""

    files: list[File]
    class_names: tuple[str, ...]
    wrong: list[Wrong]
    deep: str = ""
    """the pattern that has the pictures in nested folders too"""


def listed(folder: Path, reading: Reading) -> Listing:
    """The pictures of a folder, in a fixed order, and what cannot be used."""
    if reading.labels:
        found = _by_table(folder, Path(os.path.expanduser(reading.labels)))
    elif reading.pattern:
        found = _by_pattern(folder, reading.pattern)
    else:
        return _by_class_folders(folder)
    names = tuple(sorted({file.label for file in found if file.role == "train"}))
    return Listing(found, names, _unknown_classes(found, names))


def _unknown_classes(files: list[File], names: Collection[str]) -> list[Wrong]:
    """The first picture of each class that no training picture has."""
    known = set(names)
    first = {file.label: file.path for file in reversed(files) if file.label not in known}
    remedy = "is not among the training classes: add it there too"
    return [Wrong("class", path, f"{path}: class '{label}' {remedy}") for label, path in sorted(first.items())]


def _by_class_folders(folder: Path) -> Listing:
    """Class folders of pictures, either directly or inside train/ beside val/ and test/."""
    inside = [child.name for child in visible(folder) if child.is_dir()]
    if not inside:
        tables = [child for child in visible(folder) if child.suffix.lower() == ".csv"]
        other = f", or give its labels (--labels {tables[0]})" if tables else ", or give a .csv of labels (--labels)"
        raise RecollectError(f"{folder}: no class folders in it: put the pictures of each class in a folder of its own{other}")
    found = roles(inside)
    if "train" not in found or len(found) < len(inside):  # 'train' may be a class among others, with cars and buses
        found = {"train": ""}
    deep = "{split}/{label}/**/*" if len(found) > 1 or found["train"] else "{label}/**/*"
    files, wrong = [], []
    for role, name in found.items():
        for child in visible(folder / name):
            if not child.is_dir():
                why = f"{child}: a file beside the class folders has no class: move it away, or leave such files out (--skip-bad)"
                wrong.append(Wrong("stray", child, why, is_file=True))
                continue
            for path in visible(child):
                if path.is_dir():
                    remedy = f"give --pattern '{deep}', or move its pictures up"
                    wrong.append(Wrong("nested", path, f"{path}: a folder inside a class folder: {remedy}"))
                else:
                    files.append(File(path, child.name, role))
    names = tuple(child.name for child in visible(folder / found["train"]) if child.is_dir())
    return Listing(files, names, wrong + _unknown_classes(files, names), deep)


def visible(folder: Path) -> list[Path]:
    """What a folder holds, sorted, hidden files left out."""
    try:
        return sorted(child for child in folder.iterdir() if not child.name.startswith("."))
    except OSError as error:
        remedy = "check that it is a folder of the dataset"
        raise RecollectError(f"{folder}: cannot be listed ({error.strerror}): {remedy}") from error


def roles(names: Collection[str]) -> dict[str, str]:
    """Which of these names is the train, validation and test split. A lone validation split is what people test on."""
    found = {role: role for role in ("train", "test") if role in names}
    validation = [name for name in ("validation", "valid", "val") if name in names]
    return found | {"validation" if "test" in names else "test": name for name in validation[:1]}


def _by_pattern(folder: Path, pattern: str) -> list[File]:
    """The files whose paths below the folder fit a pattern."""
    unknown = [part for part in re.findall(r"\{[^}]*\}", pattern) if part not in MEANS]
    if unknown or pattern.count("{label}") != 1 or pattern.count("{split}") > 1:
        what = f"has {unknown[0]}" if unknown else "needs {label} once, and {split} at most once"
        raise RecollectError(f"pattern '{pattern}' {what}: give one such as '{{label}}/**/*.png'")
    parts = re.split(r"(\{label\}|\{split\}|\*\*/|\*\*|\*|\?)", pattern)
    expression = re.compile("".join(MEANS.get(part) or re.escape(part) for part in parts), re.IGNORECASE)
    paths = sorted(_below(folder))
    matches = [(path, match) for path in paths if (match := expression.fullmatch(path))]
    if not matches:
        have = f"such as {paths[0]}" if paths else "there are none"
        raise RecollectError(f"{folder}: no file fits the pattern '{pattern}' (its files: {have}): give another (--pattern)")
    if "{split}" not in pattern:
        return [File(folder / path, match["label"], "train") for path, match in matches]
    names = {match["split"] for _, match in matches}
    role = {name: role for role, name in roles(names).items()}
    if "train" not in names or names - role.keys():
        remedy = "name them train and test, with val beside them if you like"
        raise RecollectError(f"{folder}: the splits are {', '.join(sorted(names))[:200]}: {remedy}")
    return [File(folder / path, match["label"], role[match["split"]]) for path, match in matches]


def _below(folder: Path) -> Iterator[str]:
    """The files of a folder and of those in it, without hidden ones; a link that leads back up is followed once."""
    been: set[str] = set()
    for place, inside, names in os.walk(folder, followlinks=True):
        inside[:] = [name for name in inside if not name.startswith(".") and os.path.realpath(f"{place}/{name}") not in been]
        been.update(os.path.realpath(f"{place}/{name}") for name in inside)
        yield from (Path(place, name).relative_to(folder).as_posix() for name in names if not name.startswith("."))


def _by_table(folder: Path, table: Path) -> list[File]:
    """The files that a .csv names, with their labels; commas, semicolons or tabs part its columns."""
    lines = content(table).decode("utf-8-sig", "replace").splitlines()
    head = lines[0] if lines else ""
    with parsing(f"{table}: not a readable .csv file", "save it as UTF-8 with commas between its columns"):
        rows = list(csv.reader(lines, delimiter=max(",;\t", key=head.count)))
    columns = [name.strip().lower() for name in rows[0]] if rows else []
    if not {"file", "label"} <= set(columns):
        has = ", ".join(columns)[:200] or "nothing"
        raise RecollectError(f"{table}: its first line has no columns file and label (it has {has}): name them so")
    file, label, known = columns.index("file"), columns.index("label"), {}
    for number, row in enumerate(rows[1:], 2):
        if not any(map(str.strip, row)):
            continue
        name, value = (row[place].strip() if place < len(row) else "" for place in (file, label))
        if not name or not value:
            raise RecollectError(f"{table}: row {number} lacks a file or a label: fill it in, or leave the row out")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise RecollectError(f"{table}: row {number} names {name}, outside of {folder}: name files below the folder")
        if known.setdefault(Path(name), value) != value:
            raise RecollectError(f"{table}: {name} has two labels, {known[Path(name)]} and {value}: give it one")
    if not known:
        raise RecollectError(f"{table}: names no file: add rows")
    return [File(folder / name, value, "train") for name, value in sorted(known.items())]
