"""One style for every figure: sizes of a printed column, colours that colour-blind readers tell apart, words as they are.

Figures are written here too, and the same figure is always the same bytes.
"""

import io
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, fontManager, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import NullLocator

from recollect.errors import RecollectError
from recollect.files import write_through

INK, QUIET, GRID, PAPER_WHITE = "#222222", "#767676", "#d9d9d9", "#ffffff"
BLUE, VERMILION, GREEN, PURPLE, ORANGE = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"  # of Okabe and Ito
LINES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, INK)
MARKERS = "osD^vP"  # a second way to tell lines apart
ACCURACY, SIMILARITY = "cividis", "PuOr"  # colour maps: one way, and two ways from 0
DARK = {INK: "#e4e6ea", QUIET: "#9aa1ab", GRID: "#3a4049", BLUE: "#56b4e9", PAPER_WHITE: "#14171c"}
"""what the colours become on a dark page"""
COLUMN, PAGE = 3.4, 7.0  # inches: one column of a printed page, and its whole width
DPI = 200  # of a PNG
MOST_LETTERS = 14  # of a class name
KINDS = ("png", "svg")

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "figure.titlesize": 9,
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 8),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 7),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), QUIET),
    **dict.fromkeys(("figure.facecolor", "savefig.facecolor"), PAPER_WHITE),
    "grid.color": GRID,
    **dict.fromkeys(("grid.linewidth", "axes.linewidth"), 0.6),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.axisbelow", "axes.grid"), True),
    "axes.grid.axis": "y",
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "errorbar.capsize": 2,
    "legend.frameon": False,
    "text.parse_math": False,  # a name may hold a $
    "svg.hashsalt": "recollect",
    "figure.dpi": DPI,
    "figure.constrained_layout.use": True,
    **dict.fromkeys(("figure.constrained_layout.h_pad", "figure.constrained_layout.w_pad"), 0.05),
}
styled = matplotlib.rc_context(STYLE)
"""the decorator of a function that draws a figure"""


def encoded(figure: Figure, kind: str = "png", transparent: bool = False) -> bytes:
    """The figure as a PNG or SVG file."""
    buffer = io.BytesIO()
    metadata = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():  # ticks are made while drawing
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # of a letter that no font here has, which is said below
        _find_letters(figure)
        _settle(figure)
        figure.savefig(buffer, format=kind, dpi=DPI, metadata=metadata, transparent=transparent)
    return buffer.getvalue()


def _find_letters(figure: Figure) -> None:
    """Give names in any script the installed fonts that have their letters; what none has is shown as a box, and said once."""
    ticks = [label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in axis.get_ticklabels()]
    texts = [text for text in [*figure.findobj(Text), *ticks] if not text.get_text().isascii()]
    families, lacking = _families("".join(sorted({letter for text in texts for letter in text.get_text()})))
    for text in texts if families else ():
        text.set_fontfamily([str(STYLE["font.family"]), *families])
    if lacking and not lacking <= _SAID:
        _SAID.update(lacking)
        shown = "".join(sorted(lacking))[:20]
        warnings.warn(f"no installed font has {shown}: figures show boxes (a font for any script: fonts-noto)", stacklevel=2)


_SAID: set[str] = set()  # letters that no font has


@cache
def _families(letters: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """Installed fonts for the letters that the usual one lacks, and those that none has."""
    lacking = {letter for letter in letters if letter.isprintable() and not letter.isspace()}
    lacking -= set(map(chr, get_font(findfont(str(STYLE["font.family"]))).get_charmap()))
    found: list[str] = []
    for entry in sorted(fontManager.ttflist, key=lambda entry: entry.name) if lacking else ():
        if entry.name.startswith("Last Resort") or entry.style != "normal":  # the first has a box for everything
            continue
        with suppress(OSError, RuntimeError):
            if has := lacking & set(map(chr, get_font(entry.fname).get_charmap())):
                found.append(entry.name)
                lacking -= has
    return tuple(dict.fromkeys(found)), frozenset(lacking)


def _settle(figure: Figure) -> None:
    """Lay it out, to a millionth of its size: the solver's last digits depend on where in memory things lie."""
    if isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for axes in figure.axes:
            left, bottom, width, height = (round(length, 6) for length in axes.get_position(original=True).bounds)
            axes.set_position((left, bottom, width, height))


def on_dark(svg: bytes) -> bytes:
    """The same SVG for a dark page: its ink light, its blue lighter."""
    for light, dark in DARK.items():
        svg = svg.replace(light.encode(), dark.encode())
    return svg


def save(figure: Figure, path: Path) -> None:
    """As PNG or SVG, by the path's ending; atomically."""
    write_through(path, encoded(figure, kind_of(path)))


def kind_of(path: Path) -> str:
    kind = path.suffix.lower().removeprefix(".")
    if kind not in KINDS:
        raise RecollectError(f"a figure cannot be written as '{path.name}': give a name that ends in .png or .svg (--out)")
    return kind


def short(name: str, most: int = MOST_LETTERS) -> str:
    """A name as it fits beside a picture, every character of it one that can be drawn."""
    name = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    return name if len(name) <= most else name[: most - 1] + "…"


def legend_name(name: str) -> str:
    """matplotlib leaves out of a legend what begins with an underscore."""
    return short(name, 72).lstrip("_") or "?"


def bare(axes, title: str = "") -> None:
    """One title, no frame, no tick marks: for pictures and maps, which hang from the same line."""
    axes.set(title=title, anchor="N")
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def at_values(axis, values: list[int]) -> None:
    """Ticks at these values and nowhere else, written as plain numbers."""
    axis.set_ticks(values, [f"{value:,}" for value in values])
    axis.set_minor_locator(NullLocator())
