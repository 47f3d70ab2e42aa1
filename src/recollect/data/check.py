"""Check: everything that is wrong or odd in a folder of pictures, found in one pass and listed at once.

The folder is listed, opened and divided by the functions that `load` uses: what is said to be readable is.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from recollect.data.fitting import Fitted, background_for, full_size, is_clear, is_grey, open_picture
from recollect.data.folders import File, Listing, listed
from recollect.data.images import Images, Parts, from_numpy, make_images
from recollect.data.readers import parsing
from recollect.errors import RecollectError
from recollect.reading import Reading, reading

if TYPE_CHECKING:
    from PIL.Image import Image

THUMB = 16  # pixels a side of what near-duplicates are compared by
ALIKE = 0.99  # correlation of two thumbnails from which on they are
FLAT = 4.0  # deviation of a thumbnail, of 255, below which it shows nothing to compare
BLOCK = 1024  # thumbnails that are compared with the others at a time
FEW, LARGE, LONG = 20, 256, 1.5  # pictures of a class; pixels a side; one side to the other


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or odd."""

    kind: str
    """what it is, in one word"""
    what: str
    """the same as a phrase"""
    remedy: str
    files: tuple[str, ...] = ()
    """where it is, each with a word where they differ"""
    stops: bool = False
    """whether the folder cannot be read as long as it is so"""
    flag: str = ""
    """option that settles it"""


@dataclass(frozen=True)
class Checked:
    """What is in a folder of pictures."""

    folder: str
    pictures: int
    """that can be read"""
    classes: dict[str, int]
    """pictures of each class"""
    sizes: dict[str, int]
    """pictures of each width x height, the most frequent first"""
    findings: tuple[Finding, ...]

    @property
    def is_readable(self) -> bool:
        """Whether `load` reads it, with the same options."""
        return not any(finding.stops for finding in self.findings)

    @property
    def flags(self) -> str:
        """The options that let it be read."""
        return " ".join(dict.fromkeys(finding.flag for finding in self.findings if finding.stops and finding.flag))


class Seen(NamedTuple):
    """What is kept of a picture."""

    file: File
    size: tuple[int, int]
    grey: bool
    clear: bool
    deep: bool
    thumb: Fitted


def check(folder: Path, size: int | None = None, seed: int = 0, **options: object) -> Checked:
    """Look at every picture of a folder. Options are those of `load`; what they settle does not stop it from being read."""
    how = reading(**options)
    listing = listed(folder, how)
    files = listed(folder, replace(how, pattern=listing.deep)).files if _has(listing, "nested") else listing.files
    seen, bad = [], []
    for file in files:
        try:
            with parsing(f"{file.path}: not a picture, or a damaged one", "replace it"):
                seen.append(_seen(file, open_picture(file.path, size or THUMB)))
        except RecollectError as error:
            bad.append(str(error).removeprefix(f"{folder}/"))
    findings = [*_paths(folder, listing, how.skip_bad)]
    if bad:
        findings.append(
            Finding("unreadable", f"unreadable files: {len(bad)}", "replace or remove them, or leave them out (--skip-bad)",
                    tuple(bad), not how.skip_bad, "--skip-bad")
        )  # fmt: skip
    findings += _shapes(folder, seen, size, how.fit) + _colours(folder, seen, how.colour)
    images, names = None, sorted({*listing.class_names, *(each.file.label for each in seen if each.file.role == "train")})
    known = [each for each in seen if each.file.label in names]
    try:
        images = _divided(folder.name, known, tuple(names), seed)
    except RecollectError as error:
        findings.append(Finding("split", str(error).partition(": ")[2], "see above", stops=True))
    findings += _classes(known, names, images) + _duplicates(folder, known, images, how)
    counted = Counter(each.file.label for each in seen)
    sizes = Counter(f"{width}x{height}" for width, height in (each.size for each in seen))
    return Checked(str(folder), len(seen), dict(sorted(counted.items())), dict(sizes.most_common()), tuple(findings))


def _has(listing: Listing, kind: str) -> bool:
    return any(wrong.kind == kind for wrong in listing.wrong)


def _seen(file: File, picture: "Image") -> Seen:
    """Its thumbnail is what `fitted` would give at that size."""
    from PIL import Image

    clear, small = is_clear(picture), (THUMB, THUMB)
    deep = picture.mode.startswith("I")
    if deep:
        shown = Image.fromarray((np.asarray(picture).clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    else:
        shown = picture.convert("RGBA" if clear else "RGB")
    planes = np.asarray(shown.resize(small, Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    thumb = Fitted(planes[:3], planes[3] if clear else None, clear)
    return Seen(file, full_size(picture), is_grey(picture), clear, deep, thumb)


def _below(folder: Path, several: Iterable[Seen]) -> tuple[str, ...]:
    return tuple(str(each.file.path.relative_to(folder)) for each in several)


PATHS = {
    "stray": ("files without a class: {n}", "move them away, or leave them out (--skip-bad)", "--skip-bad"),
    "nested": ("folders inside class folders: {n}", "give --pattern '{deep}', or move their pictures up", "--pattern '{deep}'"),
    "class": ("classes that have no training pictures: {n}", "add them there too", ""),
}
"""of each kind of wrong path: what it is, its remedy, and the option that settles it"""


def _paths(folder: Path, listing: Listing, skip_bad: bool) -> Iterable[Finding]:
    for kind, (what, remedy, flag) in PATHS.items():
        found = [wrong for wrong in listing.wrong if wrong.kind == kind]
        names = tuple(str(wrong.path.relative_to(folder)) for wrong in found)
        remedy, flag = (text.replace("{deep}", listing.deep) for text in (remedy, flag))
        if found:
            stops = not (skip_bad and found[0].is_file)
            yield Finding(kind, what.format(n=len(found)), remedy, names, stops, flag)


def _shapes(folder: Path, seen: Sequence[Seen], size: int | None, fit: str) -> list[Finding]:
    sizes, found = Counter(each.size for each in seen), []
    if not sizes:
        return []
    most, _ = sizes.most_common(1)[0]
    if len(sizes) > 1:
        odd = [each for each in seen if each.size != most]
        what = f"pictures of other sizes than {most[0]}x{most[1]}: {len(odd)}"
        remedy = "give one size to bring all to, as in --size 32"
        found.append(Finding("sizes", what, remedy, _below(folder, odd), size is None, "--size 32"))
    elif size is None and max(most) > LARGE:
        remedy = "give a size to bring them to, as in --size 32"
        found.append(Finding("large", f"large pictures: {most[0]}x{most[1]}", remedy))
    long = [each for each in seen if max(each.size) > LONG * min(each.size)]
    if long and fit == "stretch":
        what = f"pictures far from square: {len(long)}"
        found.append(Finding("proportions", what, "--fit crop or --fit pad keeps their proportions", _below(folder, long)))
    return found


def _colours(folder: Path, seen: Sequence[Seen], colour: str | None) -> list[Finding]:
    grey, coloured = [each for each in seen if each.grey], [each for each in seen if not each.grey]
    clear, deep, found = [each for each in seen if each.clear], [each for each in seen if each.deep], []
    if grey and coloured:
        few = min(grey, coloured, key=len)
        what = f"grey pictures: {len(grey)}, and {len(coloured)} in colour"
        remedy = "make all of them one: --colour rgb, or --colour grey"
        found.append(Finding("colour", what, remedy, _below(folder, few), colour is None, "--colour rgb"))
    if clear:
        what = f"pictures transparent in parts: {len(clear)}"
        remedy = "they are put on white, or on black or grey where more of them stand out; --background names a colour"
        found.append(Finding("transparency", what, remedy, _below(folder, clear)))
    if deep:
        found.append(Finding("depth", f"pictures of 16 bits: {len(deep)}", "their lower 8 are left out", _below(folder, deep)))
    return found


def _divided(name: str, seen: Sequence[Seen], names: tuple[str, ...], seed: int) -> Images:
    """The splits that `load` makes, of images that are the pictures' numbers."""
    numbers = np.arange(len(seen), dtype=np.uint32).view(np.uint8).reshape(-1, 1, 1, 4)
    splits = {}
    for role in {"train": 0} | dict.fromkeys(each.file.role for each in seen):
        places = [place for place, each in enumerate(seen) if each.file.role == role]
        splits[role] = from_numpy(numbers[places], [names.index(seen[place].file.label) for place in places])
    return make_images(name, Parts(splits, names), seed)


def _roles(images: Images) -> dict[int, str]:
    """The split of each picture, by its number."""
    found = {}
    for role in ("train", "validation", "test"):
        numbers = getattr(images, role).images.numpy().reshape(-1, 4).copy().view(np.uint32)
        found |= dict.fromkeys(numbers.flatten().tolist(), role)
    return found


def _classes(seen: Sequence[Seen], names: Sequence[str], images: Images | None) -> list[Finding]:
    found, counted = [], Counter(each.file.label for each in seen)
    if len(names) == 1:
        found.append(Finding("classes", f"one class alone: {names[0]}", "add another: a memory tells classes apart"))
    if images:
        for role in ("test", "validation"):
            counts = getattr(images, role).labels.bincount(minlength=len(names)).tolist()
            lacking = tuple(name for name, count in zip(names, counts, strict=True) if not count)
            if lacking:
                what = f"classes without a picture in the {role} split: {len(lacking)}"
                found.append(Finding("split", what, "give each three pictures or more", lacking))
    few = tuple(f"{name} ({counted[name]})" for name in names if 0 < counted[name] < FEW)
    if few:
        what = f"classes of fewer than {FEW} pictures: {len(few)}"
        found.append(Finding("classes", what, "add pictures: their accuracies are noisy", few))
    return found


def _duplicates(folder: Path, seen: Sequence[Seen], images: Images | None, how: Reading) -> list[Finding]:
    """Near-duplicates that lie in two splits, or have two labels; turned and mirrored ones are not found."""
    ground = background_for(how, [each.thumb for each in seen]) or "white"
    first = leaders(np.stack([each.thumb.on(ground) for each in seen])) if seen else []
    pairs = [(leader, place) for place, leader in enumerate(first) if leader != place]
    role, found = _roles(images) if images else {}, []
    split = [pair for pair in pairs if role and role[pair[0]] != role[pair[1]]]
    named = [pair for pair in pairs if seen[pair[0]].file.label != seen[pair[1]].file.label]
    for kind, several, what, remedy in (
        ("duplicates", split, "two splits", "keep one of each: a test on what was trained on says too much"),
        ("labels", named, "two classes", "keep one of each, in the right class"),
    ):
        if several:
            names = ["{} ({})", "{} ({})"] if kind == "duplicates" else ["{}", "{}"]
            shown = [_below(folder, [seen[place] for place in pair]) for pair in several]
            told = tuple(
                " = ".join(name.format(path, role.get(place)) for name, path, place in zip(names, paths, pair, strict=True))
                for paths, pair in zip(shown, several, strict=True)
            )
            found.append(Finding(kind, f"near-duplicates in {what}: {len(several)}", remedy, told))
    return found


def leaders(thumbs: np.ndarray) -> list[int]:
    """For each thumbnail [N, C, H, W] the number of the first that is nearly the same: its own, if there is none before it.

    Two are if their pixels correlate, over all channels; brightness and contrast do not count. Plain ones are like no other.
    """
    flat = thumbs.reshape(len(thumbs), -1).astype(np.float32)
    flat -= flat.mean(1, keepdims=True)
    deviation = np.sqrt((flat**2).mean(1, keepdims=True))
    unit = np.where(deviation < FLAT, 0, flat / np.maximum(deviation * np.sqrt(flat.shape[1]), 1e-9)).astype(np.float32)
    first = np.arange(len(unit))
    for start in range(0, len(unit), BLOCK):
        block = np.arange(start, min(start + BLOCK, len(unit)))
        alike = unit[block] @ unit[: block[-1] + 1].T >= ALIKE
        alike[np.arange(len(block)), block] = True
        first[block] = alike.argmax(1)
    return first.tolist()
