"""Figures from memories and runs. Each function gives a matplotlib Figure; nothing here trains or chooses."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from recollect.errors import RecollectError
from recollect.files import write_atomically
from recollect.memory import Memory
from recollect.select import Selection

INK, BAR = "#222222", "#0072b2"  # of Okabe and Ito's colour-blind safe palette
MOST_CLASSES, MOST_RECALLED, MOST_LETTERS = 20, 8, 14  # shown in the figure of a memory
HEIGHT = 4.0  # of its panels, in inches
WORDS: dict[str, Any] = {"fontsize": 8, "parse_math": False}  # a class name may hold a $


def memory_figure(memory: Memory, title: str = "") -> Figure:
    """Bases, recalled images of each class, and how similar the classes' mean coefficients are: three panels side by side.

    Bases and recalled images are each stretched to their own range: their scale is free, and most leave that of pixels.
    """
    names = [_short(name) for name in memory.class_names[:MOST_CLASSES]]
    bases = mosaic(stretched(memory.bases.float()), math.isqrt(len(memory.bases)))
    recalled = mosaic(*recalled_by_class(memory, list(range(len(names)))))
    widths = [min(max(0.4, picture.shape[1] / len(picture)), 2) for picture in (bases, recalled)]  # for a height of 1
    widths += [1.1]
    size = HEIGHT * sum(widths) + 1 + 0.16 * max(map(len, names)), HEIGHT + 0.7
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    figure.suptitle(title or _describe(memory), color=INK, fontsize=11, parse_math=False)
    left, middle, right = figure.subplots(1, 3, width_ratios=widths)
    _show(left, bases, "bases")
    everything = len(names) == len(memory.class_names)
    _show(
        middle, recalled, "recalled" if everything else f"recalled, {len(names)} of {len(memory.class_names)} classes"
    )
    side = len(recalled) / len(names)
    middle.set_yticks([side * (row + 0.5) - 0.5 for row in range(len(names))], names, **WORDS)
    _similarity(figure, right, memory, names)
    return figure


def _short(name: str) -> str:
    return name if len(name) <= MOST_LETTERS else name[: MOST_LETTERS - 1] + "…"


def _describe(memory: Memory) -> str:
    name = ", ".join(filter(None, (memory.header.dataset, str(memory.header.budget.get("name", "")))))
    recalled = len(memory.addressing) * len(memory.class_names)
    return f"{name}: {memory.floats:,} numbers, {len(memory.bases)} bases, {recalled:,} recalled images"


def _show(axes, picture: np.ndarray, title: str) -> None:
    axes.imshow(picture, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    _plain(axes, title)
    axes.set_xticks([])
    axes.set_yticks([])


def _plain(axes, title: str) -> None:
    """One title, no frame, no tick marks; panels hang from the same line."""
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_anchor("N")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _similarity(figure, axes, memory: Memory, names: list[str]) -> None:
    places = range(len(names))
    image = axes.imshow(memory.similarity(list(places)).numpy(), cmap="PuOr", vmin=-1, vmax=1)
    _plain(axes, "similarity of the classes' mean coefficients")
    axes.set_xticks(places, names if max(map(len, names)) <= 2 else [""] * len(names), **WORDS)
    axes.set_yticks(places, names, **WORDS)
    bar = figure.colorbar(image, ax=axes, shrink=0.5, ticks=[-1, 0, 1])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8)


def selection_figure(selection: Selection) -> Figure:
    """Accuracy on the validation split against the setting that was varied."""
    figure = Figure(figsize=(5, 3.4), layout="constrained", facecolor="white")
    axes = figure.subplots()
    places = range(len(selection.values))
    means = [evaluation.mean for evaluation in selection.evaluations]
    axes.errorbar(places, means, [e.deviation for e in selection.evaluations], fmt="o-", color=BAR, capsize=3)
    axes.set_xticks(places, [str(value) for value in selection.values])
    axes.set_xlabel(selection.field.replace("_", " "))
    networks = len(selection.evaluations[0].values)
    axes.set_ylabel(f"validation accuracy, % ({networks} networks)")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def recalled_by_class(memory: Memory, query: list[int]) -> tuple[Tensor, int]:
    """A few recalled images of each class as uint8 pictures, class after class; and how many a class."""
    images, _ = memory.recall(query)
    columns = min(len(memory.addressing), MOST_RECALLED, max(len(query), 4))
    chosen = images.view(len(query), -1, *memory.image_shape)[:, :columns].flatten(0, 1)
    return stretched(memory.preprocess().undo(chosen)), columns


def stretched(images: Tensor) -> Tensor:
    """[N, C, H, W] as uint8 pictures, each from black to white over its own range."""
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    return _picture((images - low) / (high - low).clamp_min(1e-12))


def pixels(memory: Memory, images: Tensor) -> Tensor:
    """What a network sees -> uint8 pixels, by the memory's own preprocessing undone."""
    return _picture(memory.preprocess().undo(images))


def _picture(images: Tensor) -> Tensor:
    return (images.clamp(0, 1) * 255).round().to(torch.uint8)


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


def save(figure: Figure, path: Path) -> None:
    """As PNG or SVG, by the path's ending; atomically."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.removeprefix("."), dpi=150)
    write_atomically(path, buffer.getvalue())
