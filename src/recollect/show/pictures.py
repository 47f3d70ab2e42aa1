"""What a memory looks like: its bases, what it recalls, and both beside the similarity of its classes."""

import io
import math

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from recollect.errors import RecollectError
from recollect.memory import Memory, Query, recall
from recollect.queries import Targets
from recollect.show.heat import draw_similarity
from recollect.show.style import COLUMN, PAGE, bare, short, styled

MOST_CLASSES, MOST_RECALLED, MOST_BASES = 20, 8, 256  # shown in a figure
MOST_ROWS = 10  # classes where bases and similarity share the page
CELL = 0.34  # inches: an image


@styled
def bases(memory: Memory) -> Figure:
    """The bases as they are stored, each stretched to its own range: their scale is free."""
    shown = memory.bases[:MOST_BASES]
    columns = wide_columns(len(shown))
    picture = mosaic(stretched(shown.float()), columns)
    width = COLUMN if len(shown) <= 64 else PAGE
    figure = Figure((width, width * len(picture) / picture.shape[1] + 0.3))
    _show(figure.subplots(), picture, f"{short(memory.header.dataset, 24)}: {describe_bases(memory)}")
    return figure


def wide_columns(count: int) -> int:
    """Columns of a mosaic that is a little wider than high."""
    return min(count, math.ceil(math.sqrt(count * 1.6)))


def describe_bases(memory: Memory) -> str:
    count = len(memory.bases)
    number = f"{count:,}" if count <= MOST_BASES else f"the first {MOST_BASES:,} of {count:,}"
    channels, height, width = memory.bases.shape[1:]
    size = f"{channels} numbers" if (height, width) == (1, 1) else f"{height}x{width}"
    return f"{number} base{'s' if count > 1 else ''} of {size}"


@styled
def recalled(memory: Memory, query: Query = None) -> Figure:
    """A few recalled images of each class of the query, their preprocessing undone; by default of the first classes.

    A class is a row, or a column where that makes the better page.
    """
    chosen, names = named(memory, query, MOST_CLASSES if query is None else None)
    images, many = recalled_by_class(memory, chosen)
    names = [short(name) for name in names]
    wide = many * 2 < len(names)
    if wide:
        images = images.view(len(names), many, *images.shape[1:]).transpose(0, 1).flatten(0, 1)
    across, down = (len(names), many) if wide else (many, len(names))
    picture = mosaic(images, across)
    longest = max(map(len, names))
    words = 0.12 if wide and longest <= 2 else 0.058 * longest + 0.1
    figure = Figure((CELL * across + 0.15 + (0 if wide else words), CELL * down + 0.3 + (words if wide else 0)))
    axes = figure.subplots()
    _show(axes, picture, _title(memory, names) if query is None else "recalled")
    _name(axes.xaxis if wide else axes.yaxis, picture.shape[1] if wide else len(picture), names)
    return figure


@styled
def memory_figure(memory: Memory) -> Figure:
    """Bases, recalled images of each class, and how similar the classes' mean coefficients are: three panels side by side."""
    labels = memory.labels(None).tolist()[:MOST_ROWS]
    names = [short(memory.class_names[label]) for label in labels]
    left = mosaic(stretched(memory.bases[:MOST_BASES].float()), math.isqrt(min(len(memory.bases), MOST_BASES)))
    middle = mosaic(*recalled_by_class(memory, labels))
    widths = [min(max(0.4, picture.shape[1] / len(picture)), 1.5) for picture in (left, middle)] + [1.1]
    words = 0.8 + 0.14 * max(map(len, names))
    height = min(2.6, (PAGE - words) / sum(widths))
    figure = Figure((height * sum(widths) + words, height + 0.6))
    name = ", ".join(filter(None, (short(memory.header.dataset, 24), str(memory.header.budget.get("name", "")))))
    count = len(memory.addressing) * len(memory.class_names)
    figure.suptitle(f"{name}: {memory.floats:,} numbers, {len(memory.bases)} bases, {count:,} recalled images")
    first, second, third = figure.subplots(1, 3, width_ratios=widths)
    _show(first, left, "bases" if len(memory.bases) <= MOST_BASES else f"bases, {MOST_BASES} of {len(memory.bases):,}")
    _show(second, middle, _title(memory, names))
    _name(second.yaxis, len(middle), names)
    draw_similarity(figure, third, memory, labels, "similarity of classes", height)
    if max(map(len, names)) > 2:  # the rows are named, and below there is no room
        third.set_xticks([])
    return figure


def _title(memory: Memory, names: list[str]) -> str:
    every = len(memory.class_names)
    if isinstance(memory.asked, Targets) or len(names) == every:
        return "recalled"
    return f"recalled, {len(names)} of {every} classes"


def _show(axes, picture: np.ndarray, title: str) -> None:
    axes.imshow(picture, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    bare(axes, title)
    axes.set(xticks=[], yticks=[])


def _name(axis, length: int, names: list[str]) -> None:
    side = (length + 1) / len(names)
    long = axis.axis_name == "x" and max(map(len, names)) > 2
    axis.set_ticks([side * (place + 0.5) - 1 for place in range(len(names))], names, rotation=90 if long else 0)


def named(memory: Memory, query: Query = None, most: int | None = None) -> tuple[Query, list[str]]:
    """A query, or what stands for all, one by one: labels with the names of classes, or continuous targets in their own units."""
    if isinstance(memory.asked, Targets):
        targets = memory.asked.undo(memory.queries(query)[:most, :-1])
        return targets, [", ".join(f"{value:.3g}" for value in row) for row in targets.tolist()]
    labels = memory.labels(query).tolist()[:most]
    return labels, [memory.class_names[label] for label in labels]


def recalled_by_class(memory: Memory, query: Query, most: int = MOST_RECALLED) -> tuple[Tensor, int]:
    """A few recalled images of each class, or target, as uint8 pictures, one after another; and how many of each."""
    columns = min(len(memory.addressing), most)
    some = memory.addressing[:columns].float()
    images = recall(memory.bases.float(), some, memory.queries(query), memory.image_shape[1:])
    return stretched(memory.preprocess().undo(images)), columns


def stretched(images: Tensor) -> Tensor:
    """[N, C, H, W] as uint8 pictures, each from black to white over its own range; a vector becomes a row of pixels."""
    if images.shape[1] > 1 and images.shape[2:] == (1, 1):
        images = images.permute(0, 2, 3, 1)
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    return to_pixels((images - low) / (high - low).clamp_min(1e-12))


def to_pixels(images: Tensor) -> Tensor:
    """Floats of 0..1, or beyond, as uint8."""
    return (images.clamp(0, 1) * 255).round().to(torch.uint8)


def png(images: Tensor, columns: int = 1) -> bytes:
    """uint8 [N, C, H, W] as one PNG, side by side in rows."""
    buffer = io.BytesIO()
    Image.fromarray(mosaic(images, columns)).save(buffer, "PNG")
    return buffer.getvalue()


def mosaic(images: Tensor, columns: int, gap: int = 1) -> np.ndarray:
    """uint8 [N, C, H, W] -> one picture, [h, w] grey or [h, w, 3], images side by side in rows."""
    count, channels, height, width = images.shape
    if channels not in (1, 3):
        raise RecollectError(f"images of {channels} channels cannot be shown as a picture: 1 or 3 can")
    rows = -(-count // columns)
    sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, channels), 255, np.uint8)
    for number, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
        top, left = number // columns * (height + gap), number % columns * (width + gap)
        sheet[top : top + height, left : left + width] = image
    return sheet[..., 0] if channels == 1 else sheet
