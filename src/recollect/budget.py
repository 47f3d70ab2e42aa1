"""Budget (eqn 4): the floats that a memory may take, and the sizes that fit."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from recollect.config import Sizes
from recollect.errors import RecollectError, unknown
from recollect.header import smaller

Precision = Literal["float32", "float16", "bfloat16"]
PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Budget:
    """The floats that N images of each class would take, and what memories fit into them (eqn 4).

    K c h w + r d_y K <= N C c H W. In half precision (`precision`) the same bytes hold twice the numbers; that is a
    budget of its own name, not the paper's.

    Examples:
        >>> budget = recollect.Budget(images_per_class=1, classes=10, image_shape=(3, 32, 32))  # of CIFAR-10
        >>> budget.floats, budget.matrices(bases=16), budget.bases(matrices=51)
        (30720, 115, 24)
    """

    images_per_class: int
    classes: int
    image_shape: tuple[int, int, int]
    """(channels, height, width)"""
    downsample: int = 2
    """bases are this much smaller than images on each side"""
    precision: Precision = "float32"
    query_size: int | None = None
    """d_y: numbers in a query vector, where it is not one for each class"""
    share: int | None = None
    """floats, where they are not those of whole images of each class: a task's share of a buffer"""
    called: str = ""
    """what that share is called"""

    def __post_init__(self) -> None:
        if self.images_per_class < 1:
            raise RecollectError(f"images per class is {self.images_per_class}: give 1 or more")
        check_smaller(self.image_shape, self.downsample, "downsample")
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)

    @property
    def floats(self) -> int:
        """N C c H W: the right-hand side of eqn 4."""
        return self.share or self.images_per_class * self.classes * math.prod(self.image_shape)

    @property
    def numbers(self) -> int:
        """How many numbers of this precision the budget's bytes hold."""
        return self.floats * 4 // PRECISIONS[self.precision].itemsize

    @property
    def base_shape(self) -> tuple[int, int, int]:
        """(c, h, w) of a base"""
        return smaller(self.image_shape, self.downsample)

    @property
    def base_numbers(self) -> int:
        """c h w"""
        return math.prod(self.base_shape)

    @property
    def query_numbers(self) -> int:
        """d_y"""
        return self.query_size or self.classes

    @property
    def name(self) -> str:
        """As it stands in tables: the default counts floats as the paper does, any other says what it is."""
        images = self.called or f"{self.images_per_class} image{'s' if self.images_per_class > 1 else ''} per class"
        return images if self.precision == "float32" else f"{images} ({self.precision})"

    def matrices(self, bases: int) -> int:
        """r: how many addressing matrices fit beside K bases."""
        most = self.bases(1)
        if bases < 1:
            raise RecollectError(f"number of bases is {bases}: give 1 to {most}")
        r = (self.numbers - bases * self.base_numbers) // (self.query_numbers * bases)
        if r < 1:
            raise RecollectError(
                f"{bases} bases do not fit {self.name} ({self.numbers:,} numbers): at most {most} bases leave room for "
                f"one addressing matrix; take fewer bases, {self._more}, or a larger downsample"
            )
        return r

    def bases(self, matrices: int) -> int:
        """K: how many bases fit with r addressing matrices."""
        if matrices < 1:
            raise RecollectError(f"number of addressing matrices is {matrices}: give 1 or more")
        k = self.numbers // (self.base_numbers + matrices * self.query_numbers)
        if k < 1:
            raise RecollectError(
                f"{matrices} addressing matrices do not fit {self.name} ({self.numbers:,} numbers) beside even one base "
                f"({self.classes:,} class{'es' * (self.classes > 1)} of images of {'x'.join(map(str, self.image_shape))}): "
                f"take fewer matrices or {self._more}, larger images or more classes"
            )
        return k

    @property
    def _more(self) -> str:
        return "a larger buffer" if self.share else "more images per class"

    def default_bases(self) -> int:
        """As many as fit with one addressing matrix for every 20 numbers of a base, and with 4 or more; two where only one would.
        For 1 image per class 27 of MNIST, 26 of CIFAR-10, 67 of CIFAR-100. A rule through the few points where it was looked for.
        """
        usual = self.numbers // (self.base_numbers + max(4, self.base_numbers // 20) * self.query_numbers)
        return max(usual, min(self.bases(1), 2))

    def per_class(self) -> int:
        """How many images of each class fit without learned addressing (K = N', one-hot A)."""
        return self.numbers // (self.classes * self.base_numbers)

    def sizes(self, wanted: Sizes) -> tuple[int, int]:
        """Bases, and images that each query recalls: as wanted, where that fits, and else as many as fit."""
        if wanted.addressing == "one-hot":
            bases = self.per_class() * self.classes
            if wanted.bases not in (None, bases):
                raise RecollectError(f"bases is {wanted.bases}, but one-hot addressing has {bases} here: leave it out")
            if not bases:
                raise RecollectError(f"one-hot addressing needs an image of each class, more than {self.name}: give {self._more}")
            return bases, self.per_class()
        bases = wanted.bases or (self.bases(wanted.matrices) if wanted.matrices else self.default_bases())
        most = self.matrices(bases)
        if wanted.matrices is not None and wanted.matrices > most:
            raise RecollectError(f"matrices is {wanted.matrices}, but only {most} fit beside {bases} bases: give fewer of either")
        return bases, wanted.matrices or most


def check_smaller(shape: tuple[int, int, int], times: int, name: str) -> None:
    """Refuse images that would be smaller than a pixel."""
    if not 1 <= times <= min(shape[1:]):
        raise RecollectError(f"{name} is {times} for images of {shape[1]}x{shape[2]}: give 1 to {min(shape[1:])}")
