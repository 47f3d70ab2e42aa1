"""The pictures of the README and of docs/mathematics.md, from MNIST and the zoo's mnist-1.

    python experiments/docs_figures.py --root DATA

writes docs/figures/front.png (a dataset, its memory, and what that recalls), recall.png (one recall as a weighted sum) and
unroll.png (one outer step).
"""

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

import recollect
from recollect.show.figures import mosaic, recalled_by_class, save, stretched
from recollect.show.style import BLUE, INK, PAGE, QUIET, SIMILARITY, VERMILION, bare, styled

HERE = Path(__file__).parent.parent
COLUMNS = 8  # images of each class
TERMS = 6  # of a weighted sum


@styled
def front(images: recollect.Images, memory: recollect.Memory) -> Figure:
    """Three steps, left to right: real images, bases with addressing, recalled images."""
    count, classes = len(images.train), range(images.classes)
    rows = [(images.train.labels == label).nonzero().flatten()[:COLUMNS] for label in classes]
    real = mosaic(images.train.images[np.concatenate(rows)], COLUMNS)
    kept = mosaic(stretched(memory.bases.float()), 4)
    recalled = mosaic(*recalled_by_class(memory, list(classes), COLUMNS))
    figure = Figure((PAGE, 2.55))
    axes = figure.subplots(1, 4, width_ratios=[0.8, 1, 0.42, 0.8])
    titles = [
        f"dataset: {count:,} images\n{count * images.train.images[0].numel():,} numbers",
        f"memory: {len(memory.bases)} bases\n{memory.bases.numel():,} numbers",
        f"+ addressing\n{memory.addressing.numel():,} numbers",
        f"recalled: {len(memory.addressing)} images per class\nto train any network on",
    ]
    for place, picture in {0: real, 1: kept, 3: recalled}.items():
        axes[place].imshow(picture, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    mean = memory.mean_coefficients().numpy()  # [classes, bases]
    most = abs(mean).max()
    axes[2].imshow(mean, cmap=SIMILARITY, vmin=-most, vmax=most, interpolation="nearest", aspect="auto")
    for each, title in zip(axes, titles, strict=True):
        bare(each, title)
        each.set(xticks=[], yticks=[])
    side = len(real) / images.classes
    for place in (0, 3):
        axes[place].set_yticks([side * (label + 0.5) for label in classes], images.class_names)
    axes[2].set_yticks(list(classes), images.class_names)
    axes[2].set_xlabel("bases", color=QUIET)
    for left in (axes[0], axes[2]):
        left.annotate("→", (1.06, 0.5), xycoords="axes fraction", ha="left", va="center", fontsize=16, color=INK)
    return figure


@styled
def one_recall(memory: recollect.Memory, name: str) -> Figure:
    """The image that the first matrix recalls of a class, beside its bases with the largest coefficients."""
    weights = memory.coefficients([name])[0, 0]  # [K]
    largest = weights.abs().argsort(descending=True)[:TERMS]
    picture = memory.preprocess().undo(memory.recall([name])[0][:1])
    figure = Figure((PAGE, 1.25))
    axes = figure.subplots(1, TERMS + 1)
    for each, number in zip(axes, largest.tolist(), strict=False):
        each.imshow(stretched(memory.bases[number][None].float())[0, 0], cmap="gray", interpolation="nearest")
        bare(each, f"{weights[number]:+.2f} ×".replace("-", "−"))
    axes[-1].imshow(stretched(picture)[0, 0], cmap="gray", interpolation="nearest")
    bare(axes[-1], f"… = a recalled {name}")
    for each in axes:
        each.set(xticks=[], yticks=[])
    return figure


def box(axes: Axes, x: float, y: float, text: str, colour: str = INK, width: float = 1.15) -> None:
    axes.add_patch(FancyBboxPatch((x - width / 2, y - 0.22), width, 0.44, "round,pad=0.04", fill=False, edgecolor=colour))
    axes.text(x, y, text, ha="center", va="center", color=colour)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, text: str = "", off: float = 0.14
) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="->", mutation_scale=9, color=colour, shrinkA=0, shrinkB=0))
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + off
    axes.text(*middle, text, ha="center", va="center", color=colour)


@styled
def unroll() -> Figure:
    """Forwards above, the adjoint below."""
    figure = Figure((PAGE, 2.1))
    axes = figure.subplots()
    axes.set(xlim=(-0.75, 9.6), ylim=(-0.55, 2.55), xticks=[], yticks=[])
    bare(axes)
    steps = {2.2: "θ₀", 3.9: "θ₁", 5.6: "…", 7.3: "θT"}
    box(axes, 0, 2.2, "bases B\naddressing A")
    box(axes, 4.75, 2.2, "recalled images  x′ = up(yᵀA B)", BLUE, 4.2)
    arrow(axes, (0.62, 2.2), (2.6, 2.2), INK, "recall")
    for x, text in steps.items():
        box(axes, x, 1.1, text, width=0.6)
    box(axes, 8.85, 1.1, "J: loss on\nreal images")
    places = list(steps)
    for start, end in pairwise(places):
        arrow(axes, (start + 0.35, 1.1), (end - 0.35, 1.1), INK, "SGD")
        arrow(axes, ((start + end) / 2, 1.93), ((start + end) / 2, 1.38), BLUE)
    arrow(axes, (7.65, 1.1), (8.22, 1.1), INK)
    arrow(axes, (8.85, 0.83), (8.85, 0.1), VERMILION)
    arrow(
        axes,
        (8.85, 0.1),
        (2.2, 0.1),
        VERMILION,
        "adjoint, last step first: λ, μ carried back; dJ/dx of every step added up",
        -0.24,
    )
    arrow(axes, (2.2, 0.1), (0, 1.93), VERMILION, "")
    axes.text(0.45, 0.75, "dJ/dA, dJ/dB", ha="center", va="center", color=VERMILION)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder with the official files")
    parser.add_argument("--out", type=Path, default=HERE / "docs" / "figures", help="folder to write to")
    given = parser.parse_args()
    mnist = recollect.Memory.load("mnist-1")
    save(unroll(), given.out / "unroll.png")
    save(one_recall(mnist, "3"), given.out / "recall.png")
    save(front(recollect.load("mnist", given.root), mnist), given.out / "front.png")
