"""Figures from memories and runs. Each function gives a matplotlib Figure; nothing here trains or chooses."""

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from recollect.errors import RecollectError
from recollect.files import unwritable
from recollect.memory import Memory
from recollect.select import Selection

INK, BAR = "#222222", "#0072b2"  # of Okabe and Ito's colour-blind safe palette
MOST_CLASSES, MOST_RECALLED = 20, 8  # shown in the figure of a memory


def memory_figure(memory: Memory, title: str = "") -> Figure:
    """Bases, recalled images of each class, and how similar the classes' mean coefficients are."""
    classes = min(len(memory.class_names), MOST_CLASSES)
    figure = Figure(figsize=(12, 4.6), layout="constrained", facecolor="white")
    figure.suptitle(title or _describe(memory), color=INK, fontsize=11)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.1])
    _show(left, mosaic(viewable_bases(memory)), f"bases ({len(memory.bases)})")
    recalled, columns = recalled_by_class(memory, list(range(classes)))
    _show(middle, mosaic(recalled, columns), "recalled images, a row a class")
    if classes <= 30:
        side = middle.get_images()[0].get_array().shape[0] / classes
        middle.set_yticks([side * (row + 0.5) for row in range(classes)], memory.class_names[:classes], fontsize=8)
    _similarity(figure, right, memory, classes)
    return figure


def _describe(memory: Memory) -> str:
    budget = memory.header.budget.get("name", "")
    return (
        f"{memory.header.dataset}, {budget}: {memory.floats:,} numbers, {len(memory.bases)} bases, "
        f"{len(memory.addressing)} images a class"
    )


def _show(axes, picture: np.ndarray, title: str) -> None:
    axes.imshow(picture, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _similarity(figure, axes, memory: Memory, classes: int) -> None:
    names = memory.class_names[:classes]
    image = axes.imshow(memory.similarity()[:classes, :classes].numpy(), cmap="PuOr", vmin=-1, vmax=1)
    axes.set_title("similarity of the classes' mean coefficients", fontsize=10, color=INK)
    axes.set_xticks(range(classes), names, rotation=90 if max(map(len, names)) > 2 else 0, fontsize=8)
    axes.set_yticks(range(classes), names, fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.8)


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


def viewable_bases(memory: Memory) -> Tensor:
    """Bases as uint8 pictures [K, c, h, w], each stretched to its own range: a base is no image, its scale is free."""
    bases = memory.bases.float()
    low, high = bases.amin((1, 2, 3), keepdim=True), bases.amax((1, 2, 3), keepdim=True)
    return _picture((bases - low) / (high - low).clamp_min(1e-12))


def recalled_by_class(memory: Memory, query: list[int]) -> tuple[Tensor, int]:
    """A few recalled images of each class as uint8 pixels, class after class; and how many a class."""
    images, _ = memory.recall(query)
    columns = min(len(memory.addressing), MOST_RECALLED)
    chosen = images.view(len(query), -1, *memory.image_shape)[:, :columns].flatten(0, 1)
    return pixels(memory, chosen), columns


def pixels(memory: Memory, images: Tensor) -> Tensor:
    """What a network sees -> uint8 pixels, by the memory's own preprocessing undone."""
    return _picture(memory.preprocess().undo(images))


def _picture(images: Tensor) -> Tensor:
    return (images.clamp(0, 1) * 255).round().to(torch.uint8)


def mosaic(images: Tensor, columns: int | None = None, gap: int = 1) -> np.ndarray:
    """uint8 [N, C, H, W] -> one picture, [h, w] grey or [h, w, 3], images side by side in rows."""
    count, channels, height, width = images.shape
    columns = columns or int(np.ceil(np.sqrt(count)))
    rows = -(-count // columns)
    sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, channels), 255, np.uint8)
    for number, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
        top, left = number // columns * (height + gap), number % columns * (width + gap)
        sheet[top : top + height, left : left + width] = image
    if channels not in (1, 3):
        raise RecollectError(f"images of {channels} channels cannot be shown as a picture: 1 or 3 can")
    return sheet[..., 0] if channels == 1 else sheet


def save(figure: Figure, path: Path) -> None:
    """As PNG or SVG, by the path's ending."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise unwritable(path, error) from error
