"""Charts: accuracy against a setting or the budget, and the curves of a run."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from recollect.errors import RecollectError
from recollect.selection import Selection
from recollect.show import style
from recollect.show.sources import EVERYTHING, OURS, Measured, is_number
from recollect.show.style import COLUMN, LINES, MARKERS, PAGE, at_values, legend_name, short, styled
from recollect.show.tables import PAPER, PAPER_MEMORY, PAPER_PER_CLASS

MOST_POINTS = 150  # of a curve: each the mean of as many steps as it takes, with their range as a band
OF_KIND = {OURS: (style.BLUE, "o"), "per-class images": (style.GREEN, "D"), "random real images": (style.PURPLE, "P")}
THEIRS = (
    (PAPER_MEMORY, f"memory ({PAPER})", style.VERMILION, "s"),
    (PAPER_PER_CLASS, f"per-class images ({PAPER})", style.QUIET, "^"),
)
CURVES = {"loss": "outer loss", "norm": "norm of the outer gradient", "validation": "validation accuracy, %"}
MOMENTUM = {"full": "full momentum", "forward-only": "forward-only momentum", "none": "no momentum"}


@styled
def selection_figure(selection: Selection) -> Figure:
    """Accuracy on the validation split against the setting that was varied."""
    figure = Figure((3.75, 2.55))
    axes = figure.subplots()
    places, found = range(len(selection.values)), selection.evaluations
    what = "R2" if found[0].errors else "accuracy, %"
    axes.errorbar(places, [each.mean for each in found], [each.deviation for each in found], fmt="o-", color=style.BLUE)
    axes.set_xticks(places, [short(str(value), 24) for value in selection.values])
    axes.set(xlabel=selection.field.replace("_", " "), ylabel=f"validation {what} ({len(found[0].values)} networks)")
    return figure


@styled
def number_of_bases(points: Sequence[Measured]) -> Figure:
    """Accuracy against the number of bases K; the addressing matrices fill the rest of the budget. A line for each budget."""
    return _against(points, "bases", "number of bases", _dataset_and_budget, log=False)


@styled
def inner_steps(points: Sequence[Measured]) -> Figure:
    """Accuracy against the length of the unroll, with and without momentum in the inner loop."""
    many = len({(point.dataset, point.budget) for point in points}) > 1

    def line(point: Measured) -> str:
        bridge = "none" if point.config.get("inner_momentum") == 0 else point.config.get("bridge")
        momentum = MOMENTUM.get(str(bridge), "?")
        return f"{momentum}, {_dataset_and_budget(point)}" if many else momentum

    return _against(points, "inner_steps", "inner steps", line, log=True)


def _dataset_and_budget(point: Measured) -> str:
    return f"{short(point.dataset, 24)}, {point.budget}"


def _against(points: Sequence[Measured], setting: str, words: str, line: Callable[[Measured], str], log: bool) -> Figure:
    figure = Figure((COLUMN, 2.5))
    axes = figure.subplots()
    for place, (name, some) in enumerate(_named(points, line).items()):
        _line(axes, setting, some, name, LINES[place % len(LINES)], MARKERS[place % len(MARKERS)])
    values = sorted({point.number(setting) for point in points})
    if log:
        axes.set_xscale("log")
    if log or len(values) <= 8:
        at_values(axes.xaxis, values)
    axes.set(xlabel=words, ylabel=_accuracy(points))
    _legend(figure)
    return figure


def _named(points: Sequence[Measured], line: Callable[[Measured], str]) -> dict[str, list[Measured]]:
    """Points by the line they are on; the split is named where there are several."""
    splits = {point.on for point in points}
    named: dict[str, list[Measured]] = {}
    for point in points:
        name = line(point) if len(splits) == 1 else f"{line(point)}, {point.on}"
        named.setdefault(name, []).append(point)
    return named


def _line(axes, setting: str, points: Sequence[Measured], name: str, color: str, marker: str) -> None:
    """Every point with its deviation, and a line through their means at each x."""
    xs, means, deviations = zip(*((point.number(setting), point.mean, point.deviation) for point in points), strict=True)
    axes.errorbar(xs, means, deviations, fmt=marker, color=color)
    places = sorted(set(xs))
    through = [np.mean([mean for x, mean in zip(xs, means, strict=True) if x == place]) for place in places]
    alone = marker if len(places) == len(xs) else None  # else the line's mean is no point
    axes.plot(places, through, color=color, marker=alone, label=legend_name(name))


def _accuracy(points: Iterable[Measured]) -> str:
    points = list(points)
    splits = {point.on for point in points}
    what = "R2" if any(point.rmse for point in points) else "accuracy, %"
    return f"{splits.pop()} {what}" if len(splits) == 1 else what


def _legend(figure: Figure) -> None:
    """One legend above all panels, each name once, in as many columns as fit."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    names = sorted(found, key=lambda name: (PAPER in name, name == EVERYTHING))
    columns = int(figure.get_figwidth() / (0.06 * max(map(len, names)) + 0.5))
    handles = [found[name] for name in names]
    figure.legend(handles, names, loc="outside upper left", ncols=max(1, min(len(names), columns)))


@styled
def budget(points: Sequence[Measured]) -> Figure:
    """Accuracy against images per class, beside the paper's and what the same floats buy otherwise; a panel a dataset."""
    datasets = list(dict.fromkeys(point.dataset for point in points))
    columns = min(len(datasets), 3)
    rows = math.ceil(len(datasets) / columns)
    figure = Figure((COLUMN if columns == 1 else PAGE, 2.1 * rows + 0.8))
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(datasets) :]:
        axes.remove()
    for axes, dataset in zip(figure.axes, datasets, strict=True):
        _budget_panel(axes, dataset, [point for point in points if point.dataset == dataset])
    for axes in grid[:, 0]:
        axes.set_ylabel(_accuracy(points))
    _legend(figure)
    return figure


def _budget_panel(axes, dataset: str, points: Sequence[Measured]) -> None:
    limited = [point for point in points if point.name != EVERYTHING]
    shown = {point.number("images_per_class") for point in limited}
    for name, some in _named(limited, _kind).items():
        _line(axes, "images_per_class", some, name, *OF_KIND.get(_kind(some[0]), (style.ORANGE, "v")))
    for point in [point for point in points if point.name == EVERYTHING][:1]:
        axes.axhline(point.mean, color=style.INK, linestyle=":", linewidth=1, label=EVERYTHING)
    for table, name, color, marker in THEIRS:
        if dataset in table:
            means, deviations = zip(*table[dataset].values(), strict=True)
            look = {"color": color, "marker": marker, "markerfacecolor": "none", "linestyle": "--"}
            axes.errorbar(list(table[dataset]), means, deviations, label=name, **look)
            shown |= table[dataset].keys()
    axes.set(xscale="log", xlabel="images per class", title=short(dataset, 24))
    at_values(axes.xaxis, sorted(shown))


def _kind(point: Measured) -> str:
    """What the networks of a point were trained on."""
    if point.name != OURS:
        return point.name.removesuffix(" (BPTT)")
    precision = point.config.get("precision", "float32")
    kind = "per-class images" if point.config.get("addressing") == "one-hot" else OURS
    return kind if precision == "float32" else f"{kind} ({precision})"


@styled
def curves(runs: dict[str, list[dict[str, Any]]], keys: Sequence[str] = tuple(CURVES)) -> Figure:
    """Loss, norm of the outer gradient, and validation accuracy where it was measured, against the outer step.

    `runs` are lines of metrics by the name of their run.
    """
    keys = [key for key in keys if any(series(lines, key) for lines in runs.values())]
    if not keys:
        raise RecollectError(f"{', '.join(runs)} has no finite number in its metrics: there is no curve to draw")
    figure = Figure((COLUMN if len(keys) == 1 else PAGE, 2.3 if len(runs) == 1 else 2.6))
    grid = figure.subplots(1, len(keys), squeeze=False)[0]
    for axes, key in zip(grid, keys, strict=True):
        for place, (name, lines) in enumerate(runs.items()):
            _curve(axes, series(lines, key), legend_name(name), LINES[place % len(LINES)], log=key == "norm")
        axes.set(ylabel=CURVES[key], xlabel="outer step")
        axes.xaxis.set(major_locator=MaxNLocator(5, steps=[1, 2, 5, 10], integer=True), major_formatter="{x:,.0f}")
    if len(runs) > 1:
        _legend(figure)
    return figure


def series(lines: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """The steps that have a finite number of this name, each with its number."""
    return [(line["step"], float(line[key])) for line in lines if is_number(line.get(key))]


def _curve(axes, points: list[tuple[int, float]], name: str, color: str, log: bool) -> None:
    points = [(step, value) for step, value in points if value > 0 or not log]
    if not points:
        return
    size = math.ceil(len(points) / MOST_POINTS)
    groups = [np.array(points[first : first + size]) for first in range(0, len(points), size)]
    xs, means = zip(*(group.mean(0).tolist() for group in groups), strict=True)
    if size > 1:
        low, high = ([pick(group[:, 1]) for group in groups] for pick in (np.min, np.max))
        axes.fill_between(xs, low, high, color=color, alpha=0.2, linewidth=0)
    axes.plot(xs, means, color=color, label=name, marker="o" if len(xs) <= 12 else None)
    if log:
        axes.set_yscale("log")
        values = [value for _, value in points]
        is_narrow = math.log10(max(values)) - math.log10(min(values)) < 2  # then numbers between powers of ten are written too
        locator = LogLocator(subs=(1, 2, 5), numticks=6) if is_narrow else LogLocator(numticks=5)
        axes.yaxis.set(major_locator=locator, major_formatter="{x:g}", minor_formatter=NullFormatter())
