"""Figures from memories, runs and results: `recollect plot`. Nothing here trains or chooses.

Each function gives a matplotlib Figure; `FIGURES` names those that the command line draws, and `draw` reads what they need.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from matplotlib.figure import Figure

from recollect.errors import RecollectError, unknown
from recollect.memory import Memory, Query
from recollect.selection import Selection
from recollect.show.charts import budget, curves, inner_steps, number_of_bases, selection_figure
from recollect.show.heat import accuracy_matrix, architectures, similarity
from recollect.show.pictures import bases, memory_figure, mosaic, recalled, recalled_by_class, stretched
from recollect.show.sources import OURS, Measured, Source, read
from recollect.show.style import MOST_LETTERS, kind_of, save

__all__ = ["FIGURES", "MOST_LETTERS", "draw", "kind_of", "mosaic", "recalled_by_class", "save", "stretched"]

FIGURES: dict[str, tuple[str, Callable[[list[Source], Query], Figure]]] = {
    "memory": ("has_labels", lambda sources, _: memory_figure(_memory(sources))),
    "bases": ("memory", lambda sources, _: bases(_memory(sources))),
    "recalled": ("has_recall", lambda sources, query: recalled(_memory(sources), query)),
    "similarity": ("has_labels", lambda sources, query: similarity(_memory(sources), query)),
    "curves": ("metrics", lambda sources, _: curves(_by_name(sources))),
    "number-of-bases": ("points", lambda sources, _: number_of_bases(_ours(sources))),
    "inner-steps": ("points", lambda sources, _: inner_steps(_ours(sources))),
    "budget": ("points", lambda sources, _: budget([point for source in sources for point in _own_network(source)])),
    "architectures": ("points", lambda sources, _: architectures(_of_memories(sources))),
    "selection": ("selection", lambda sources, _: selection_figure(cast(Selection, _one(sources).selection))),
    "continual": ("matrix", lambda sources, _: accuracy_matrix(_one(sources).matrix or [], sources[0].matrix_of)),
}
"""name -> the part of a source that it needs, and what draws it from sources and the classes asked for"""
PARTS = {
    "has_labels": "the memory must be asked with the names of classes",
    "has_recall": "the memory must be asked with the names of classes, or with continuous targets",
    "memory": "a memory is needed",
    "metrics": "the folder of a run that has begun is needed",
    "points": "no accuracy was measured yet (recollect evaluate)",
    "selection": "a selection is needed (recollect select)",
    "matrix": "an accuracy matrix is needed (recollect continual)",
}
"""of a source"""
WITH_CLASSES = ("recalled", "similarity")


def draw(figure: str, paths: Sequence[Path], classes: Sequence[str] = ()) -> Figure:
    """The figure of this name from memory files, folders of runs and selections, or JSON results."""
    if figure not in FIGURES:
        raise unknown("figure", figure, FIGURES)
    if not paths:
        raise RecollectError(f"nothing to draw '{figure}' from: give a memory file, the folder of a run, or a JSON result")
    if classes and figure not in WITH_CLASSES:
        raise RecollectError(f"--classes is for {' and '.join(WITH_CLASSES)}: leave it out of '{figure}'")
    sources = [read(Path(path)) for path in paths]
    for source in sources:
        if figure not in (can := possible(source)):
            gives = f"it can give {', '.join(can)}" if can else "it holds nothing to draw yet"
            raise RecollectError(
                f"{source.path} cannot give the figure '{figure}', for which {PARTS[FIGURES[figure][0]]}: {gives}"
            )
    return FIGURES[figure][1](sources, list(classes) or None)


def possible(source: Source) -> list[str]:
    """The figures that can be drawn from it."""
    return [figure for figure, (part, _) in FIGURES.items() if getattr(source, part)]


def _one(sources: list[Source]) -> Source:
    if len(sources) > 1:
        raise RecollectError(f"this figure is of one memory, run or file, and {len(sources)} were given: draw each by itself")
    return sources[0]


def _memory(sources: list[Source]) -> Memory:
    return Memory.load(_one(sources).memory or sources[0].path)


def _by_name(sources: list[Source]) -> dict[str, list[dict]]:
    """Metrics by the name of their folder, or by as much of its path as tells the runs apart."""
    parts = [source.path.resolve().parts for source in sources]
    every = (["/".join(part[-length:]) for part in parts] for length in range(1, max(map(len, parts)) + 1))
    names = next(names for names in every if len(set(names)) == len(set(parts)))
    return {name: source.metrics for name, source in zip(names, sources, strict=True)}


def _own_network(source: Source) -> list[Measured]:
    """What was measured with the network that the memory was distilled with."""
    found = [point for point in source.points if point.network == point.config.get("network", point.network)]
    if not any(point.name == OURS for point in found):
        remedy = "recollect evaluate it without --architectures"
        raise RecollectError(f"{source.path} has no accuracy of the network it was distilled with: {remedy}")
    return found


def _of_memories(sources: list[Source]) -> list[Measured]:
    found = [point for source in sources for point in source.points if point.name == OURS]
    if not found:
        raise RecollectError(f"{sources[0].path} has no accuracy of a memory, only of others: recollect evaluate it")
    return found


def _ours(sources: list[Source]) -> list[Measured]:
    return [point for source in sources for point in _own_network(source) if point.name == OURS]
