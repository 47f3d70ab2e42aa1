"""Heat maps: similarity of classes, accuracy across architectures, the accuracy matrix of a stream of tasks."""

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from matplotlib.figure import Figure

from recollect.continual.metrics import Matrix, metrics
from recollect.errors import RecollectError
from recollect.memory import Memory, Query
from recollect.show.sources import Measured
from recollect.show.style import ACCURACY, COLUMN, PAGE, PAPER_WHITE, SIMILARITY, bare, short, styled
from recollect.show.tables import by_superclass

NAME_INCHES = 0.1  # a tick label needs this much


@styled
def similarity(memory: Memory, query: Query = None) -> Figure:
    """Cosine similarity of the mean coefficients of each pair of classes, superclass by superclass where they are known."""
    labels = memory.labels(query).tolist()
    if memory.header.addressing == "one-hot":
        raise RecollectError("the memory's addressing is one-hot: its classes share no bases, and have no similarity to show")
    side = COLUMN if len(labels) <= 20 else min(PAGE, COLUMN + 0.05 * len(labels))
    figure = Figure((side, side * 0.94))
    title = f"similarity of classes, {short(memory.header.dataset, 24)}"
    draw_similarity(figure, figure.subplots(), memory, labels, title, side * 0.72)
    return figure


def draw_similarity(figure: Figure, axes, memory: Memory, labels: list[int], title: str, side: float) -> None:
    order, superclasses = by_superclass([memory.class_names[label] for label in labels])
    labels = [labels[number] for number in order]
    image = axes.imshow(memory.similarity(labels).numpy(), cmap=SIMILARITY, vmin=-1, vmax=1, interpolation="nearest")
    bare(axes, title)
    places, names = _names([memory.class_names[label] for label in labels], superclasses, side)
    axes.set_yticks(places, names)
    axes.set_xticks(places, names, rotation=0 if max(map(len, names)) <= 2 else 90)
    for end in list(accumulate(count for _, count in superclasses))[:-1] if len(superclasses) > 1 else []:
        for line in (axes.axhline, axes.axvline):
            line(end - 0.5, color=PAPER_WHITE, linewidth=0.7)
    bar = figure.colorbar(image, ax=axes, shrink=0.5, ticks=[-1, 0, 1], aspect=14)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)


def _names(classes: list[str], superclasses: list[tuple[str, int]], side: float) -> tuple[list[float], list[str]]:
    """Where the names on an axis stand: every class, the superclasses, or as many classes as can be read."""
    step = math.ceil(len(classes) * NAME_INCHES / side)
    if superclasses and 1 < step <= min(count for _, count in superclasses):
        ends = list(accumulate(count for _, count in superclasses))
        middles = [end - (count + 1) / 2 for end, (_, count) in zip(ends, superclasses, strict=True)]
        return middles, [short(name, 30) for name, _ in superclasses]
    shown = range(0, len(classes), step)
    return list(map(float, shown)), [short(classes[number]) for number in shown]


@styled
def architectures(points: Sequence[Measured]) -> Figure:
    """Accuracy of networks (columns) on memories distilled with others (rows); a panel for each dataset and budget."""
    panels = list(dict.fromkeys((point.dataset, point.budget) for point in points))
    rows = list(dict.fromkeys(str(point.config.get("network", "?")) for point in points))
    columns = list(dict.fromkeys(point.network for point in points))
    names = [short(name, 24) for name in (*rows, *columns)]
    words = 0.065 * max(map(len, names)) + 0.3
    titles = [short(", ".join(panel), 40) for panel in panels]
    width = len(panels) * max(0.62 * len(columns) + 0.2, 0.07 * max(map(len, titles))) + words
    figure = Figure((max(2.4, width), 0.42 * len(rows) + words + 0.45))
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    low, high = (pick(point.mean for point in points) for pick in (min, max))
    for axes, panel, title in zip(grid, panels, titles, strict=True):
        table = np.full((len(rows), len(columns)), np.nan)
        for point in points:
            if (point.dataset, point.budget) == panel:
                place = rows.index(str(point.config.get("network", "?"))), columns.index(point.network)
                table[place] = point.mean
                _in_cell(axes, place, f"{point.mean:.1f}\n±{point.deviation:.1f}", (low, high))
        axes.imshow(table, cmap=ACCURACY, vmin=low, vmax=high, aspect="auto")
        bare(axes, title)
        axes.set_xticks(range(len(columns)), names[len(rows) :], rotation=90 if max(map(len, columns)) > 9 else 0)
        axes.set_yticks(range(len(rows)), names[: len(rows)] if axes is grid[0] else [""] * len(rows))
        axes.set_xlabel("trained on its recall")
    grid[0].set_ylabel("distilled with")
    figure.suptitle(f"{' and '.join(sorted({point.on for point in points}))} accuracy, %")
    return figure


def _in_cell(axes, place: tuple[int, int], text: str, limits: tuple[float, float], size: float = 7) -> None:
    """Words in a cell of a map, dark on its light colours and light on its dark ones."""
    value = float(text.split()[0])
    bright = (value - limits[0]) / max(limits[1] - limits[0], 1e-9) > 0.55
    color = "#000000" if bright else "#fffffe"  # not the paper's white, which a dark page turns
    axes.text(place[1], place[0], text, ha="center", va="center", fontsize=size, color=color, linespacing=1.1)


@styled
def accuracy_matrix(matrix: Sequence[Sequence[float | None]], title: str = "") -> Figure:
    """R[i, t], accuracy on task t after task i, in percent; None, or a shorter row, where it was not measured."""
    columns = max(map(len, matrix))
    filled = [[*row, *[None] * (columns - len(row))] for row in matrix]
    table = np.array(filled, float)  # None is NaN
    side = COLUMN if columns <= 20 else min(PAGE, COLUMN + 0.03 * columns)
    figure = Figure((side, side * 0.92))
    axes = figure.subplots()
    low = math.floor(np.nanmin(table) / 10) * 10
    high = max(math.ceil(np.nanmax(table) / 10) * 10, low + 10)
    image = axes.imshow(table, cmap=ACCURACY, vmin=low, vmax=high, interpolation="nearest")
    bare(axes, "\n".join(filter(None, (title, _summary(filled)))))
    axes.set(xlabel="accuracy on task", ylabel="after task")
    step = 1 if columns <= 12 else 5 if columns <= 50 else 10
    for axis, count in ((axes.yaxis, len(matrix)), (axes.xaxis, columns)):
        shown = [number for number in range(count) if (number + 1) % step == 0 or number == 0]
        axis.set_ticks(shown, [str(number + 1) for number in shown])
    for row, column in np.argwhere(~np.isnan(table)).tolist() if columns <= 10 else []:
        _in_cell(axes, (row, column), f"{table[row, column]:.0f}", (low, high), size=6.5)
    bar = figure.colorbar(image, ax=axes, shrink=0.6, aspect=18)
    bar.set_label("%", rotation=0)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)
    return figure


def _summary(matrix: Matrix) -> str:
    """RA, LA and BTI of a finished stream."""
    try:
        found = metrics(matrix)
    except RecollectError:
        return ""
    return f"RA {found.ra:.1f}, LA {found.la:.1f}, BTI {found.bti:+.1f}".replace("-", "\N{MINUS SIGN}")
