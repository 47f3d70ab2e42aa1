"""The report of a run: one HTML file that shows what came out, how, and at what cost. It asks nothing of anywhere.

Everything in it is read from the run's folder, so that it can be written again at any time. Whatever is not markup made
here is escaped (names of classes and datasets are a user's), and the page allows no scripts.
"""

import base64
import html
import io
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from recollect.config import DistillConfig, to_json
from recollect.errors import RecollectError
from recollect.files import read_json, write_atomically
from recollect.memory import Memory
from recollect.queries import Pictures, Targets
from recollect.runs import Run
from recollect.show import charts, heat, pictures, style
from recollect.show.sources import OURS, Measured, is_number, metrics, of_memory
from recollect.show.terminal import lasting, listed

FILE = "report.html"
CSS = re.sub(r"\s*\n\s*", "", Path(__file__).with_suffix(".css").read_text("utf-8"))
MOST_PICTURES, MOST_CLASSES, MOST_SIDE = 240, 120, 64  # recalled images, their classes, and pixels on a side
META = (
    "<meta charset='utf-8'>"
    "<meta name='viewport' content='width=device-width, initial-scale=1'>"
    "<meta name='color-scheme' content='light dark'>"
    '<meta http-equiv="Content-Security-Policy" content="'
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    "\"><link rel='icon' href='data:,'>"
)


def write(folder: "Path | str") -> Path:
    """Write the report of the run in this folder, and give its path."""
    run = Run.open(folder)
    path = run.folder / FILE
    write_atomically(path, page(run).encode("utf-8", "replace"))
    return path


def page(run: Run) -> str:
    """The report as HTML."""
    memory, points, lines = Memory.load(run.memory_path), of_memory(run.memory_path), metrics(run)
    parts = [
        ("accuracy", "Accuracy", _accuracy, memory, points),
        ("training", "Training", _training, lines),
        ("bases", "Bases", _bases, memory),
        ("recalled", "Recalled images", _recalled, memory),
        ("similarity", "Similarity of classes", _similarity, memory),
        ("use", "Use it", _use, memory, run),
        ("cost", "What it cost", _cost, memory, points, lines, run),
        ("config", "Configuration", _config, run.settings),
        ("environment", "Environment", _environment, run),
    ]
    title = ", ".join(filter(None, (memory.header.dataset, str(memory.header.budget.get("name", "")))))
    head = tag("head", Html(META), tag("title", f"{title}: a memory of recollect"), tag("style", Html(CSS)))
    links = tag("nav", *(tag("a", words, href=f"#{name}") for name, words, *_ in parts))
    sections = [tag("section", tag("h2", words), *_shown(*content), id=name) for name, words, *content in parts]
    header = tag("header", tag("h1", title), tag("p", _sentence(memory)), _tiles(memory, points, lines))
    body = tag("body", header, links, tag("main", *sections), tag("footer", "Written by recollect."))
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _shown(make: Callable[..., list["Html"]], *what: Any) -> list["Html"]:
    """A section, or why this memory has none: its kind of query or of addressing, its channels, a file that was left behind."""
    try:
        return make(*what)
    except RecollectError as error:
        return [_note(f"Not shown: {error}.")]


class Html(str):
    """Text that is markup already. All other text is escaped on its way into a page."""


def tag(name: str, *content: "str | None", **attributes: object) -> Html:
    """An element; `class_` is written class, and what is None is left out."""
    written = "".join(f' {key.rstrip("_")}="{_escaped(value)}"' for key, value in attributes.items() if value is not None)
    inner = "".join(part if isinstance(part, Html) else _escaped(part) for part in content if part is not None)
    return Html(f"<{name}{written}>" if name in ("img", "source") else f"<{name}{written}>{inner}</{name}>")


def _note(words: str, *more: str) -> Html:
    return tag("p", words, *more, class_="note")


def _escaped(value: object) -> str:
    text = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in str(value))
    return html.escape(text, quote=True)


def _table(rows: Iterable[Sequence["str | None"]], headings: Sequence[str] = (), class_: str = "") -> Html:
    head = tag("thead", tag("tr", *(tag("th", words, scope="col") for words in headings))) if headings else None
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return tag("div", tag("table", head, tag("tbody", *body), class_=class_ or None), class_="scroll")


def _data(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _figure(figure: Figure, words: str, class_: str = "chart") -> Html:
    """A drawn figure, with ink for a light page and for a dark one."""
    drawn = style.encoded(figure, "svg", transparent=True)
    dark = tag("source", media="(prefers-color-scheme: dark)", srcset=_data(style.on_dark(drawn), "svg+xml"))
    width, height = (round(inches * 96) for inches in figure.get_size_inches())
    light = tag("img", src=_data(drawn, "svg+xml"), alt=words, class_=class_, width=width, height=height)
    return tag("picture", dark, light)


def _pixels(images: Tensor, columns: int, words: str, cell: int) -> Html:
    """uint8 images [N, C, H, W] side by side; the gaps between them let the page through."""
    sheet = Image.fromarray(pictures.mosaic(images, columns))
    sheet.putalpha(Image.fromarray(255 - pictures.mosaic(torch.zeros_like(images[:, :1]), columns)))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", optimize=True)
    width = columns * cell
    height = round(width * sheet.height / sheet.width)
    return tag("img", src=_data(buffer.getvalue(), "png"), alt=words, class_="pixels", width=width, height=height)


def _shrunk(images: Tensor) -> Tensor:
    """uint8 images, none larger than a page can show of many."""
    side = max(MOST_SIDE, *images.shape[-2:])
    size = [max(1, round(length * MOST_SIDE / side)) for length in images.shape[-2:]]
    return torch.nn.functional.interpolate(images.float(), size, mode="area").round().to(torch.uint8)


def _sentence(memory: Memory) -> str:
    count, matrices, classes = len(memory.bases), len(memory.addressing), len(memory.class_names)
    parts = f"{_number(count, 'base')} and {_number(matrices, 'addressing matri', 'x', 'ces')}"
    if not memory.asked.has_classes:
        return f"{parts}, asked with {_asked(memory)}."
    shape = "x".join(map(str, memory.image_shape[1:]))
    each = f"{matrices:,} for each of {_number(classes, 'class', '', 'es')}"
    return f"{parts} recall {_number(matrices * classes, 'image')} of {shape}: {each}."


def _asked(memory: Memory) -> str:
    if isinstance(memory.asked, Targets):
        return f"continuous targets ({', '.join(memory.class_names)})"
    return "pictures" if isinstance(memory.asked, Pictures) else "vectors"


def _number(count: int, word: str, one: str = "", many: str = "s") -> str:
    return f"{count:,} {word}{one if count == 1 else many}"


def _tiles(memory: Memory, points: list[Measured], lines: list[dict[str, Any]]) -> Html:
    best = next((point for point in points if point.name == OURS), None)
    seconds, allowed = sum(_seconds(lines)), memory.header.budget.get("numbers")
    tiles = [
        (best.score, f"{'R2 on' if best.rmse else '%'} {best.on}{'' if best.rmse else ' accuracy'}, {_number(best.n, 'network')}")
        if best
        else ("–", "accuracy not measured yet" if memory.asked.has_classes else f"asked with {_asked(memory)}"),
        (f"{memory.floats:,}", f"numbers of {allowed:,} allowed" if is_number(allowed) else "numbers"),
        (_bytes(memory.nbytes), f"as {str(memory.bases.dtype).removeprefix('torch.')}"),
        (lasting(seconds) if seconds else "–", "to distil"),
    ]
    return tag("dl", *(tag("div", tag("dt", words), tag("dd", number)) for number, words in tiles), class_="tiles")


def _accuracy(memory: Memory, points: list[Measured]) -> list[Html]:
    if not isinstance(memory.asked, Targets):
        memory.labels()  # of a memory that is asked with anything else, an accuracy depends on that
    if not points:
        return [_note("Not measured yet. In this folder: ", tag("code", "recollect evaluate ."))]
    rows = [(p.name, _bar(p), *_error(p), p.size or "–", p.network, str(p.n)) for p in points]
    splits = " and ".join(sorted({point.on for point in points}))
    note = f"Mean ± standard deviation over fresh networks, on the {splits} split; memory: {points[0].protocol or 'not told'}."
    measured = ("R2", "RMSE") if points[0].rmse else ("accuracy, %",)
    return [_table(rows, ("trained on", *measured, "size", "network", "n"), "wide"), _note(note)]


def _bar(point: Measured) -> Html:
    percent = 100 * point.mean if point.rmse else point.mean
    length = tag("span", tag("i", style=f"width:{min(max(percent, 0), 100):.1f}%"), class_="bar")
    return Html(tag("b", point.score) + length)


def _error(point: Measured) -> list[str]:
    return [f"{point.rmse[0]:.4g} ± {point.rmse[1]:.2g}"] if point.rmse else []


def _training(lines: list[dict[str, Any]]) -> list[Html]:
    known = {key: words for key, words in charts.CURVES.items() if charts.series(lines, key)}
    drawn = [_figure(charts.curves({"run": lines}, (key,)), f"{words} by outer step") for key, words in known.items()]
    return [tag("div", *drawn, class_="charts") if drawn else _note("No metrics were kept.")]


def _bases(memory: Memory) -> list[Html]:
    shown = _shrunk(pictures.stretched(memory.bases[: pictures.MOST_BASES].float()))
    columns = pictures.wide_columns(len(shown))
    cell = 88 if len(shown) <= 16 else 60 if len(shown) <= 64 else 44
    words = pictures.describe_bases(memory)
    note = _note(f"{words[0].upper()}{words[1:]}, each stretched to its own range of values.")
    return [_pixels(shown, columns, "the bases", cell), note]


def _recalled(memory: Memory) -> list[Html]:
    chosen, names = pictures.named(memory, most=MOST_CLASSES)
    most = max(1, min(pictures.MOST_RECALLED, MOST_PICTURES // len(names)))
    images, columns = pictures.recalled_by_class(memory, chosen, most)
    cards = []
    for name, some in zip(names, _shrunk(images).split(columns), strict=True):
        shown = _pixels(some, columns, f"recalled images of {name}", 60 if columns <= 3 else 44)
        cards.append(tag("figure", shown, tag("figcaption", name)))
    note = f"{columns} of {len(memory.addressing):,} recalled images of each {memory.asked.unit}, as pixels again"
    if memory.asked.has_classes and len(names) < len(memory.class_names):
        note += f"; the first {len(names)} of {len(memory.class_names):,} classes"
    return [tag("div", *cards, class_="cards"), _note(f"{note}. Each is stretched from black to white.")]


def _similarity(memory: Memory) -> list[Html]:
    note = "Cosine similarity of the classes' mean coefficients: 1 where two classes mix the bases alike."
    look = "chart large" if len(memory.class_names) > pictures.MOST_CLASSES else "chart"
    return [tag("div", _figure(heat.similarity(memory), "similarity of classes", look), class_="scroll"), _note(note)]


def _use(memory: Memory, run: Run) -> list[Html]:
    lines = ["import recollect", "", f'memory = recollect.Memory.load("{run.memory_path.name}")']
    if isinstance(memory.asked, Pictures):
        shots = _number(memory.asked.shots, "picture")
        lines = ["from pathlib import Path", "", *lines]
        lines += [f'groups = {{name: list(Path(name).iterdir()) for name in ("these", "those")}}  # folders, {shots} or more']
        lines += ["classifier = recollect.ask(memory, groups).train()", 'print(classifier.classify("picture.png"))']
    elif isinstance(memory.asked, Targets):
        some = [[round(mean, 2) for mean in memory.asked.mean]]
        lines += ["images, targets = memory.recall()  # a training set; targets are standardised"]
        lines += [f"images, targets = memory.recall({some!r})  # of any targets, a row each: {', '.join(memory.class_names)}"]
        lines += ["preprocess, undo = memory.preprocess(), memory.asked.undo  # for real images, and for a network's outputs"]
    else:
        some = list(memory.class_names[:2])
        query = some if max(map(len, some)) <= 40 else list(range(len(some)))
        lines += ["images, labels = memory.recall()  # a training set of every class"]
        lines += [f"images, labels = memory.recall({query!r})  # or of some of them"]
        lines += ["preprocess = memory.preprocess()  # for the real images that a network trained on a recall will see"]
    return [tag("p", "In Python, in the folder of this file:"), tag("pre", tag("code", "\n".join(lines)))]


def _cost(memory: Memory, points: list[Measured], lines: list[dict[str, Any]], run: Run) -> list[Html]:
    made, asked = memory.header.made, run.settings["distill"].get("outer_steps")
    steps = made["steps"] if is_number(made.get("steps")) else len([line for line in lines if "loss" in line])
    seconds = _seconds(lines)
    evaluated = [point.seconds for point in points if point.seconds is not None]
    rows = [
        ("outer steps", f"{steps:,} of {asked:,}" if is_number(asked) else f"{steps:,}"),
        ("without a usable gradient", str(made.get("skipped", "?"))),
        ("distilling", lasting(sum(seconds)) if seconds else "not told"),
        ("an outer step", f"{median(seconds):.3g} s (median)" if seconds else "not told"),
        ("evaluating", lasting(sum(evaluated)) if evaluated else "not told"),
        ("device", str(made.get("device", "?"))),
        ("the memory's file", _bytes(run.memory_path.stat().st_size)),
    ]
    zca = memory.header.preprocessing.get("zca")
    sidecar = run.folder / Path(str(zca["file"])).name if isinstance(zca, dict) and "file" in zca else None
    if sidecar and sidecar.is_file():
        rows.append(("its whitening file", f"{_bytes(sidecar.stat().st_size)}, shared by memories of the same data"))
    return [_table(rows)]


def _config(config: dict[str, Any]) -> list[Html]:
    usual, asked = to_json(DistillConfig()), config["distill"]
    told = {name: listed(value) for name, value in asked.items()}
    rows = [(name, tag("b", words) if usual.get(name, asked[name]) != asked[name] else words) for name, words in told.items()]
    data = [(f"data, {name}", listed(value)) for name, value in config["data"].items()]
    note = _note("Bold: other than the preset fast.")
    return [tag("details", tag("summary", f"{len(rows)} settings"), note, _table([*data, *rows]))]


def _environment(run: Run) -> list[Html]:
    path = run.folder / "environment.json"
    if not path.is_file():
        return [_note("Not kept.")]
    return [_table((name, listed(value)) for name, value in read_json(path).items())]


def _seconds(lines: list[dict[str, Any]]) -> list[float]:
    return [line["seconds"] for line in lines if is_number(line.get("seconds"))]


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB" if count >= 1e3 else f"{count} bytes"
