"""Augmentation as batched tensor code: parameters are drawn first, from an explicit generator, and then applied.

Drawn once, an augmentation is a fixed, differentiable function of the images (linear but for its offsets), which is what
the adjoint of an unroll needs: the same draw gives the same images going forward and back.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recollect.errors import unknown

ROTATION_DEGREES = 15.0
SCALE = 1.2  # the most that an image grows or shrinks
CROP_SHARE = 0.125  # of a side: the most that an image is shifted
CUTOUT_SHARE = 0.5  # of a side: the square that is cut out

Own = Callable[[Tensor, torch.Generator], Tensor]
"""an augmentation of somebody's own: (a batch, a generator on the CPU) -> a batch of the same size"""
Names = tuple["str | Own", ...]
Drawn = dict[Any, Tensor]
"""by name, or by the function itself"""


def parse(names: "str | Own") -> Names:
    """ "flip+rotate" -> ("flip", "rotate"); "none" -> (); a function stands for itself"""
    if not isinstance(names, str):
        return (names,)
    chosen = () if names in ("none", "") else tuple(names.split("+"))
    for name in chosen:
        if name not in TRANSFORMS:
            raise unknown("augmentation", name, ["none", *TRANSFORMS], "Join several with '+'.")
    return chosen


def draw(names: Names, count: int, generator: torch.Generator) -> Drawn:
    """Fresh parameters in [0, 1) for every one of `count` images and each transform; for a function its seed, of all of them."""
    return {n: torch.rand(count if isinstance(n, str) else 1, 2, generator=generator).expand(count, 2) for n in names}


def draw_shared(names: Names, generator: torch.Generator) -> Drawn:
    """One of the transforms with one parameter, the same for all images it will be applied to."""
    if not names:
        return {}
    pick = int(torch.randint(len(names), (), generator=generator))
    return draw((names[pick],), 1, generator)


def apply(images: Tensor, drawn: Drawn) -> Tensor:
    """[N, C, H, W] -> the same shape; parameters are for each image, or one for all."""
    for name, numbers in drawn.items():
        if isinstance(name, str):
            images = TRANSFORMS[name](images, numbers.to(images).expand(len(images), 2))
        else:
            images = _by_function(name, images, numbers.expand(len(images), 2))
    return images


def _by_function(function: Own, images: Tensor, numbers: Tensor) -> Tensor:
    """Images with the same numbers are a batch, which these are the seed of."""
    ends = (numbers[1:] != numbers[:-1]).any(1).nonzero().flatten() + 1
    batches, seeds = images.tensor_split(ends.tolist()), numbers.tensor_split(ends.tolist())
    seeded = [torch.Generator().manual_seed(int((each[0].double() * 2**24).long() @ torch.tensor([2**24, 1]))) for each in seeds]
    return torch.cat([function(*each) for each in zip(batches, seeded, strict=True)])


@dataclass(frozen=True)
class Schedule:
    """Drawn for every step of an unroll: [T, images or 1, 2] numbers for each transform, on any device."""

    numbers: Drawn

    @staticmethod
    def of(steps: Sequence[Drawn]) -> "Schedule":
        return Schedule({name: torch.stack([drawn[name] for drawn in steps]) for name in steps[0]})

    def __call__(self, images: Tensor, step: "int | Tensor") -> Tensor:
        """The images as that step sees them; its number may be a tensor of one element, so that no host need know it."""
        at = step if isinstance(step, Tensor) else torch.tensor([step])
        return apply(images, {name: n.index_select(0, at.to(n.device)).squeeze(0) for name, n in self.numbers.items()})


def _flip(images: Tensor, numbers: Tensor) -> Tensor:
    return torch.where((numbers[:, 0] < 0.5)[:, None, None, None], images.flip(-1), images)


def _rotate(images: Tensor, numbers: Tensor) -> Tensor:
    """By up to 15 degrees either way, bilinear, zero outside."""
    angle = (numbers[:, 0] * 2 - 1) * math.radians(ROTATION_DEGREES)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    # the grid is in units of half a side, so that an image that is not square needs its aspect here
    aspect = images.shape[-2] / images.shape[-1]
    turn = torch.stack([cos, -sin * aspect, zero, sin / aspect, cos, zero], 1).view(-1, 2, 3)
    grid = F.affine_grid(turn, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _scale(images: Tensor, numbers: Tensor) -> Tensor:
    """Each side by itself between 1/1.2 and 1.2 of its length, bilinear, zero outside."""
    low = 1 / SCALE
    sizes, zero = low + (SCALE - low) * numbers, torch.zeros_like(numbers[:, 0])
    grow = torch.stack([sizes[:, 0], zero, zero, zero, sizes[:, 1], zero], 1).view(-1, 2, 3)
    grid = F.affine_grid(grow, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _crop(images: Tensor, numbers: Tensor) -> Tensor:
    """Shift by whole pixels, zero outside."""
    height, width = images.shape[-2:]
    reach = max(1, round(CROP_SHARE * min(height, width)))
    start = (numbers * (2 * reach + 1)).long()  # [N, 2]
    rows = start[:, 0, None] + torch.arange(height, device=images.device)
    columns = start[:, 1, None] + torch.arange(width, device=images.device)
    padded = F.pad(images, (reach, reach, reach, reach))
    return padded.take_along_dim(rows[:, None, :, None], 2).take_along_dim(columns[:, None, None, :], 3)


def _cutout(images: Tensor, numbers: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    side = max(1, round(CUTOUT_SHARE * min(height, width)))
    rows = torch.arange(height, device=images.device)[None] - (numbers[:, :1] * height).floor() + side // 2
    columns = torch.arange(width, device=images.device)[None] - (numbers[:, 1:] * width).floor() + side // 2
    inside = ((rows >= 0) & (rows < side))[:, :, None] & ((columns >= 0) & (columns < side))[:, None, :]
    return images * (~inside)[:, None]


def _brightness(images: Tensor, numbers: Tensor) -> Tensor:
    return images + (numbers[:, 0] - 0.5)[:, None, None, None]


def _contrast(images: Tensor, numbers: Tensor) -> Tensor:
    mean = images.mean((1, 2, 3), keepdim=True)
    return mean + (images - mean) * (numbers[:, 0] + 0.5)[:, None, None, None]


def _saturation(images: Tensor, numbers: Tensor) -> Tensor:
    grey = images.mean(1, keepdim=True)
    return grey + (images - grey) * (numbers[:, 0] * 2)[:, None, None, None]


TRANSFORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flip": _flip,
    "rotate": _rotate,
    "crop": _crop,
    "cutout": _cutout,
    "brightness": _brightness,
    "contrast": _contrast,
    "saturation": _saturation,
    "scale": _scale,
}
