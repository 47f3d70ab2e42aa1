"""Figures."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from recollect.show import terminal


@dataclass(frozen=True)
class Plot:
    """Draw a figure from memories, runs and results."""

    figure: Positional[str]
    """figure to draw: memory, bases, recalled, similarity (of a memory); curves (of runs); number-of-bases, inner-steps, budget,
    architectures (of measured accuracies); selection; continual (of an accuracy matrix)"""
    paths: Positional[tuple[Path, ...]]
    """memory files, folders of runs or selections, JSON results, names of the zoo, hub:owner/name; one, or several to compare"""
    out: Path
    """figure's file to write, .png or .svg"""
    classes: tuple[str, ...] = ()
    """names of the classes to show, in this order (recalled, similarity)"""

    def perform(self) -> int:
        from recollect.show import figures

        figures.kind_of(self.out)
        figures.save(figures.draw(self.figure, self.paths, self.classes), self.out)
        terminal.say(str(self.out))
        return 0
