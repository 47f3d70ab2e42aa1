"""What the paths given to `recollect plot` hold: memories, metrics, accuracies, a selection, an accuracy matrix.

Files are read and checked here; nothing is drawn, and tensors are not loaded.
"""

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from recollect import zoo
from recollect.continual.metrics import Matrix
from recollect.data.readers import parsing
from recollect.errors import RecollectError
from recollect.evaluation import FOLDER, Evaluation, kept
from recollect.files import read_json
from recollect.header import read_header
from recollect.queries import Targets
from recollect.runs import Run
from recollect.selection import FILE, Selection

OURS, EVERYTHING = "memory", "all the data"  # names of evaluations


@dataclass(frozen=True)
class Measured:
    """One accuracy, and of what."""

    name: str
    """what the networks were trained on: "memory", or a baseline"""
    dataset: str
    config: dict[str, Any]
    """of the distillation"""
    network: str
    on: str
    """the split"""
    mean: float
    deviation: float
    n: int
    where: Path
    """the file it is from"""
    size: str = ""
    protocol: str = ""
    seconds: float | None = None
    rmse: tuple[float, float] | None = None
    """mean and deviation, of continuous targets; the mean is their R2 then, and no accuracy"""

    @property
    def score(self) -> str:
        """In words: R2 with three digits, or percent."""
        return f"{self.mean:.3f} ± {self.deviation:.3f}" if self.rmse else f"{self.mean:.1f} ± {self.deviation:.1f}"

    @property
    def budget(self) -> str:
        count = self.config.get("images_per_class", "?")
        name = f"{count} image{'' if count == 1 else 's'} per class"
        precision = self.config.get("precision", "float32")
        return name if precision == "float32" else f"{name} ({precision})"

    def weight(self, epochs: int) -> tuple[int, int]:
        """How much it was measured: its epochs, as far as they count, and its networks."""
        own = re.search(r"(\d+) epochs", self.protocol)
        return min(int(own[1]) if own else 0, epochs), self.n

    def number(self, setting: str) -> int:
        """A whole number of the config."""
        found = self.config.get(setting)
        if type(found) is not int or found < 1:
            raise RecollectError(f"{self.where} does not tell its {setting}: give the folder of the run")
        return found


@dataclass(frozen=True)
class Source:
    """One path, and what it holds."""

    path: Path
    memory: Path | None = None
    run: Run | None = None
    points: list[Measured] = field(default_factory=list)
    selection: Selection | None = None
    matrix: Matrix | None = None
    matrix_of: str = ""
    """whose matrix it is, in words"""

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return metrics(self.run) if self.run else []

    @cached_property
    def has_labels(self) -> bool:
        """Whether it is a memory that is asked with the names of classes."""
        return self.memory is not None and read_header(self.memory)[0].asked.has_classes

    @cached_property
    def has_recall(self) -> bool:
        """Whether it is a memory that says itself what there is to recall: classes, or targets that stand for the data."""
        return self.has_labels or (self.memory is not None and isinstance(read_header(self.memory)[0].asked, Targets))


def read(path: Path) -> Source:
    """What a path holds: a memory file, a JSON file, the folder of a run or of a selection."""
    if path.is_dir():
        return _folder(path)
    path = zoo.find(path)
    return _json(path) if path.suffix.lower() == ".json" else Source(path, memory=path, points=of_memory(path))


def _folder(path: Path) -> Source:
    if (path / FILE).is_file():
        return _selection(path / FILE)
    run, matrix, name = Run(path), *_matrix_in(path)
    memory = run.memory_path if run.memory_path.is_file() else None
    if not (memory or matrix or run.is_begun):
        raise RecollectError(f"{path} holds neither a run, nor a selection, nor an accuracy matrix: give another folder")
    return Source(path, memory, run, of_memory(memory) if memory else [], matrix=matrix, matrix_of=name)


def _matrix_in(folder: Path) -> tuple[Matrix | None, str]:
    """The first accuracy matrix in a folder, and whose it is: of a continual run, that of the first seed's memories."""
    for pattern in ("*.json", "seed-*/compress.json", "seed-*/*.json"):
        for file in sorted(folder.glob(pattern)):
            try:
                found = read_json(file)
            except RecollectError:  # of somebody else
                continue
            if "matrix" in found:
                whose = file.stem if file.parent == folder else f"{folder.resolve().name}: {file.stem}, {file.parent.name}"
                return _checked_matrix(found["matrix"], file), whose
    return None, ""


def _json(path: Path) -> Source:
    found = read_json(path)
    if "matrix" in found:
        return Source(path, matrix=_checked_matrix(found["matrix"], path), matrix_of=path.stem)
    if {"field", "values", "results"} <= found.keys():
        return _selection(path)
    if "rows" in found:
        folder = path.parent.parent if path.parent.name == FOLDER else path.parent
        memory = folder / Path(str(found.get("memory", "memory.safetensors"))).name
        if not memory.is_file():
            raise RecollectError(f"{path} is an evaluation, but its memory is not beside it: give the memory file or its run")
        return Source(path, memory=memory, points=of_memory(memory, path))
    if found and all(isinstance(each, dict) and {"config", "evaluation"} <= each.keys() for each in found.values()):
        with _checked(path):
            points = [_measured(e["evaluation"], str(e.get("dataset", path.stem)), e["config"], path) for e in found.values()]
        return Source(path, points=points)
    raise RecollectError(f"{path} is no evaluation, selection, result or accuracy matrix of recollect: give another file")


def metrics(run: Run) -> list[dict[str, Any]]:
    """The lines of a run's metrics, and the validation accuracies that memories on the way and at its end have recorded."""
    lines = run.metrics()
    for path in filter(Path.is_file, [*run.folder.glob("memory-*.safetensors"), run.memory_path]):
        header, _ = read_header(path)
        for entry in header.accuracy:
            if entry.get("on") == "validation" and type(header.made.get("steps")) is int:
                lines.append({"step": header.made["steps"], "validation": entry.get("mean")})
    return sorted(lines, key=lambda line: line["step"])


def of_memory(path: Path, evaluation: Path | None = None) -> list[Measured]:
    """The accuracies of a memory file, its baselines too: of one evaluation; or, of all beside it and of its header, the best of
    each kind. A quick look never stands in for a longer one, nor the validation split for the test split."""
    header, tensors = read_header(path)
    made, known = header.made.get("config"), {"images_per_class": header.budget.get("images_per_class")}
    config = known | (made if isinstance(made, dict) else {}) | {"bases": tensors["bases"].shape[0]}
    points: list[Measured] = []
    if not evaluation:
        with _checked(path):
            points += [_measured(entry, header.dataset, config, path) for entry in header.accuracy]
    for file in [evaluation] if evaluation else kept(path):
        with _checked(file):
            points += [_measured(row, header.dataset, config, file, row.get("name")) for row in read_json(file)["rows"]]
    return points if evaluation else _best(points, header.recipe.get("epochs", 0))


def _best(points: list[Measured], epochs: int) -> list[Measured]:
    """Of each name and network the point with most epochs, up to the memory's own, then most networks, then the newest."""
    best: dict[tuple[str, str], Measured] = {}
    tested = [point for point in points if point.on == "test"]
    for point in tested or points:
        other = best.get((point.name, point.network))
        if other is None or point.weight(epochs) >= other.weight(epochs):
            best[point.name, point.network] = point
    names = list(dict.fromkeys(name for name, _ in best))
    return sorted(best.values(), key=lambda point: names.index(point.name))


def _selection(path: Path) -> Source:
    """What `recollect.select` has written, as far as it came."""
    found = read_json(path)
    with _checked(path):
        results = [Evaluation.from_json(row) for row in found["results"]]
        chosen = Selection(str(found["field"]), list(found["values"])[: len(results)], results)
        dataset = Path(str(found["data"].get("name", ""))).stem or path.parent.name
        configs = [{**found["distill"], chosen.field: value} for value in chosen.values]
        each = zip(results, configs, strict=True)
        points = [_measured(result.to_json(), dataset, config, path) for result, config in each]
    if not points:
        raise RecollectError(f"{path} has no result yet: finish it (recollect resume {path.parent})")
    return Source(path, points=points, selection=chosen)


def _measured(row: dict[str, Any], dataset: str, config: dict[str, Any], where: Path, name: object = OURS) -> Measured:
    mean, deviation, n, seconds = row["mean"], row.get("deviation", 0.0), row.get("n", 1), row.get("seconds")
    if not (is_number(mean) and is_number(deviation) and is_number(n)):
        raise ValueError(mean, deviation, n)
    words = {key: str(row.get(key, "")) for key in ("network", "on", "size", "protocol")}
    time, (rmse, spread) = float(seconds) if is_number(seconds) else None, (row.get("rmse"), row.get("rmse_deviation", 0.0))
    error = (float(rmse), float(spread)) if is_number(rmse) and is_number(spread) else None
    return Measured(
        str(name or ""), dataset, dict(config), mean=mean, deviation=deviation, n=int(n), where=where, seconds=time, rmse=error,
        **words,
    )  # fmt: skip


def _checked(path: Path) -> AbstractContextManager[None]:
    return parsing(f"{path} has an accuracy without mean, deviation or n", "evaluate again (recollect evaluate)")


def is_number(value: object) -> TypeGuard[int | float]:
    """A finite number; JSON may bring any other, and whole numbers that no float holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100


def _checked_matrix(matrix: object, path: Path) -> Matrix:
    """Rows of percentages; None, or a shorter row, where nothing was measured."""
    rows = matrix if isinstance(matrix, list) and all(isinstance(row, list) for row in matrix) else []
    values = [value for row in rows for value in row]
    known = [value for value in values if is_number(value) and 0 <= value <= 100]
    if not known or len(known) + values.count(None) != len(values):
        raise RecollectError(f"{path}: 'matrix' is no accuracy matrix: rows of percentages are expected, a row a task")
    return rows
