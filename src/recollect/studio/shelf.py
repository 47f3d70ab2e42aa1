"""The shelf: the memories that the studio was given, and what a browser needs to recall from them.

Nothing else is ever read. Recall is linear and preprocessing is undone by an affine map, so a picture is a sum of K pictures:
undo(sum_k v_k up(B_k)) = sum_k v_k L(B_k) + undo(0). The L(B_k) are made here once, and the browser mixes them.
"""

import math
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recollect.composition import Composition, compose
from recollect.data import load
from recollect.data.images import Images
from recollect.errors import RecollectError
from recollect.evaluation import memory_recipe
from recollect.export import npz
from recollect.memory import Classes, Memory
from recollect.memory import recall as recall_images
from recollect.queries import Pictures
from recollect.show.pictures import png, to_pixels
from recollect.show.sources import OURS, Measured, of_memory

OWN = Path("memories")  # the project's own, looked for where the studio is started
MOST_NUMBERS = 2**25  # sent to a browser or recalled at once: 134 MB of floats

AT_ONCE = 8  # single pictures that a server may have to recall beside each other

Choice = tuple[int, int]
"""a class: the number of its memory on the shelf, and its label there"""


class Missing(RecollectError):
    """Something that is not on the shelf."""


@dataclass
class Entry:
    """A memory on the shelf."""

    number: int
    path: Path
    memory: Memory
    points: list[Measured]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def pictures(self) -> Tensor:
        """[K + 1, C, h, w]: what each base adds to a picture of pixels in 0..1; the last is the picture of no base at all.

        Without whitening they have the size of the bases, and a mix of them is upsampled as a recall is.
        """
        with self.lock:
            return self._pictures

    @cached_property
    def _pictures(self) -> Tensor:
        preprocess, bases = self.memory.preprocess(), self.memory.bases.float()
        if preprocess.zca is not None:
            self._check(len(bases) * math.prod(self.memory.image_shape))
            each = torch.eye(len(bases))[None]  # the r = 1 addressing whose k-th query recalls base k
            bases = recall_images(bases, each, torch.eye(len(bases)), self.memory.image_shape[1:])
        self._check(bases.numel())
        undone = preprocess.undo(torch.cat([bases, torch.zeros_like(bases[:1])]))
        return torch.cat([undone[:-1] - undone[-1:], undone[-1:]])

    def _check(self, numbers: int) -> None:
        if numbers > MOST_NUMBERS:
            raise RecollectError(f"{self.memory.name} is too large for a browser ({numbers:,} numbers): use Python")

    def coefficients(self, label: int) -> Tensor:
        """[r, K]: what a class is recalled with"""
        return self.memory.coefficients([self.label(label)])[0]

    def label(self, label: int) -> int:
        if not 0 <= label < len(self.memory.class_names):
            raise Missing(f"{self.memory.name} has no class {label}: it has 0 to {len(self.memory.class_names) - 1}")
        return label

    def recall(self, coefficients: Sequence[float]) -> bytes:
        """The picture that these coefficients recall, as PNG."""
        pictures = self.pictures()
        if len(coefficients) != len(pictures) - 1:
            raise RecollectError(f"{len(coefficients)} coefficients for {len(pictures) - 1} bases: give one for each")
        self._check(AT_ONCE * math.prod(self.memory.image_shape))
        mixing = torch.tensor([*coefficients, 1.0])[None, None]  # [r = 1, d_y = 1, K + 1]
        image = recall_images(pictures, mixing, torch.ones(1, 1), self.memory.image_shape[1:])[0]
        shown = image if len(image) == 3 else image[:1]
        return png(to_pixels(shown[None]))

    def to_json(self) -> dict[str, Any]:
        memory, header, recipe = self.memory, self.memory.header, memory_recipe(self.memory)
        has_classes = memory.asked.has_classes
        ours = next((point for point in self.points if point.name == OURS), None)
        return {
            "id": self.number,
            "name": memory.name,
            "dataset": header.dataset,
            "classes": list(memory.class_names) if has_classes else [],
            "asked_with": "labels" if has_classes else "pictures" if isinstance(memory.asked, Pictures) else memory.asked.unit,
            "image_shape": list(memory.image_shape),
            "bases": len(memory.bases),
            "matrices": len(memory.addressing),
            "numbers": memory.floats,
            "bytes": memory.nbytes,
            "budget": str(header.budget.get("name", "")),
            "network": recipe.network,
            "epochs": recipe.epochs,
            "accuracy": ours and {name: getattr(ours, name) for name in ("mean", "deviation", "n", "on")},
        }


@dataclass(frozen=True)
class Shelf:
    """All the memories, and the datasets to test classifiers on."""

    entries: list[Entry]
    problems: list[str]  # files of the project's own that cannot be read, in words
    data: list[Images]

    def __getitem__(self, number: int) -> Entry:
        if not 0 <= number < len(self.entries):
            raise Missing(f"there is no memory {number} on the shelf: it holds {len(self.entries)}")
        return self.entries[number]

    def file_name(self, entry: Entry) -> str:
        """What a memory's file is called, with its folder's name where several are called so; never where it lies."""
        name = entry.path.name
        alike = [each for each in self.entries if each.path.name == name]
        return f"{entry.path.resolve().parent.name}/{name}" if alike[1:] else name

    def without_paths(self, words: str) -> str:
        """A message with the names of files, and not where they lie."""
        folders = {str(place) for entry in self.entries for place in (entry.path.parent, entry.path.resolve().parent, Path.cwd())}
        for folder in sorted({*folders, str(OWN)} - {".", "/"}, key=len, reverse=True):
            words = words.replace(f"{folder}/", "").replace(folder, Path(folder).name)
        return re.sub(r"(?<![\w.:/])(?:/[^\s/'\":,]+)+/(?=[^\s/])", "", words)

    def parts(self, choices: Sequence[Choice]) -> list[tuple[Entry, Classes]]:
        """Classes in the order they were picked, those of one memory together where they follow each other."""
        groups = ((self[number], group) for number, group in groupby(choices, key=lambda choice: choice[0]))
        return [(entry, entry.memory[[entry.label(label) for _, label in group]]) for entry, group in groups]

    def compose(self, choices: Sequence[Choice]) -> Composition:
        """The training set of some classes, unless it is too large for a server that others use too."""
        parts = self.parts(choices)
        images = max(len(entry.memory.addressing) for entry, _ in parts) * len(choices)
        if images * max(math.prod(entry.memory.image_shape) for entry, _ in parts) > MOST_NUMBERS:
            raise RecollectError(f"{images:,} images are too many to recall at once here: pick fewer classes")
        return compose([classes for _, classes in parts])

    def recalled(self, choices: Sequence[Choice]) -> bytes:
        """The training set as .npz: images (as a network sees them), pixels (uint8), labels, class_names."""
        found = self.compose(choices)
        return npz(found.images, found.labels, found.class_names, found.preprocess)


def stock(paths: Sequence[Path], data: Sequence[Images] = ()) -> Shelf:
    """Load the memories that were given, and the project's own; of the latter a damaged one is told, and left out.

    Where no datasets are given, memories of the digits are tested on these, which come with the library.
    """
    found: dict[Path, Entry] = {}
    problems = []
    for path in (*paths, *sorted(OWN.glob("*.safetensors"))):
        if path.resolve() in found or (path.name.startswith("zca-") and path not in paths):
            continue
        try:
            memory = Memory.load(path)
            found[path.resolve()] = Entry(len(found), path, memory, of_memory(path))
        except RecollectError as error:
            if path in paths:
                raise
            problems.append(str(error))
    entries = list(found.values())
    at_hand = [load("digits")] if any(entry.memory.header.dataset == "digits" for entry in entries) else []
    return Shelf(entries, problems, list(data) or at_hand)
