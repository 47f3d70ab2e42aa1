"""What the paths given to `recollect plot` hold: memories, metrics, accuracies, a selection, an accuracy matrix.

Files are read and checked here; nothing is drawn, and tensors are not loaded.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from recollect.continual.metrics import Matrix
from recollect.errors import RecollectError
from recollect.evaluation import Evaluation
from recollect.files import read_json
from recollect.header import read_header
from recollect.queries import Labels
from recollect.runs import Run
from recollect.selection import FILE, Selection

OURS, EVERYTHING = "memory", "all the data"  # names of evaluations
OF_MEMORY = ("memory", "bases", "recalled", "similarity")  # names of figures
OF_ACCURACY = ("number-of-bases", "inner-steps", "budget", "architectures")


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

    @property
    def budget(self) -> str:
        count = self.config.get("images_per_class", "?")
        name = f"{count} image{'' if count == 1 else 's'} per class"
        precision = self.config.get("precision", "float32")
        return name if precision == "float32" else f"{name} ({precision})"

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
    selection: Path | None = None
    matrix: Matrix | None = None
    matrix_of: str = ""
    """whose matrix it is, in words"""

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return metrics(self.run) if self.run else []

    @property
    def gives(self) -> list[str]:
        """The figures that can be drawn from it."""
        by_name = self.memory and isinstance(read_header(self.memory)[0].asked, Labels)
        found = [*OF_MEMORY] if by_name else ["bases"] if self.memory else []
        found += ["curves"] * bool(self.metrics) + [*OF_ACCURACY] * bool(self.points)
        return found + ["selection"] * bool(self.selection) + ["continual"] * bool(self.matrix)

    def check(self, figure: str) -> None:
        """An error that says what it can give instead."""
        if figure in self.gives:
            return
        reasons: dict[str, str] = dict.fromkeys(OF_ACCURACY, f"no accuracy was measured yet (recollect evaluate {self.path})")
        reasons |= dict.fromkeys(OF_MEMORY, "it is asked with pictures, and not by the names of classes")
        reasons |= {} if self.run else {"curves": "a memory file has no curves, but the folder of its run does"}
        why = reasons.get(figure) if self.memory else None
        can = f"it can give {', '.join(self.gives)}" if self.gives else "it holds nothing to draw yet"
        raise RecollectError(f"{self.path} cannot give the figure '{figure}': {'; '.join(filter(None, (why, can)))}")


def read(path: Path) -> Source:
    """What a path holds: a memory file, a JSON file, the folder of a run or of a selection."""
    if path.is_dir():
        return _folder(path)
    if path.suffix.lower() == ".json":
        return _json(path)
    read_header(path)  # refuses anything else
    return Source(path, memory=path, points=of_memory(path))


def _folder(path: Path) -> Source:
    if (path / FILE).is_file():
        return Source(path, selection=path / FILE, points=of_selection(path / FILE)[2])
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
        return Source(path, selection=path, points=of_selection(path)[2])
    if "rows" in found:
        memory = path.parent / Path(str(found.get("memory", "memory.safetensors"))).name
        if not memory.is_file():
            raise RecollectError(f"{path} is an evaluation, but its memory is not beside it: give the memory file or its run")
        return Source(path, memory=memory, points=of_memory(memory, path))
    if found and all(isinstance(each, dict) and {"config", "evaluation"} <= each.keys() for each in found.values()):
        every = [(each["evaluation"], str(each.get("dataset", path.stem)), each["config"]) for each in found.values()]
        return Source(path, points=[_measured(*each, path) for each in every])
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
    """The accuracies of a memory file, its baselines too: from the evaluation beside it, else from its header."""
    header, tensors = read_header(path)
    made, known = header.made.get("config"), {"images_per_class": header.budget.get("images_per_class")}
    config = known | (made if isinstance(made, dict) else {}) | {"bases": tensors["bases"].shape[0]}
    beside = evaluation or Run(path.parent).evaluation_path
    if beside.is_file() and (found := read_json(beside)).get("memory", "memory.safetensors") == path.name:
        return [_measured(row, header.dataset, config, beside, None) for row in _list(found.get("rows"), beside)]
    return [_measured(entry, header.dataset, config, path) for entry in header.accuracy]


def of_selection(path: Path) -> tuple[str, list[Any], list[Measured]]:
    """The setting that a select.json varied, the values that have a result, and their accuracies."""
    found = read_json(path)
    varied, values, config, data = (found.get(name) for name in ("field", "values", "distill", "data"))
    if not (isinstance(varied, str) and isinstance(values, list) and isinstance(config, dict)):
        raise RecollectError(f"{path} is no selection of recollect: 'field', 'values' and 'distill' are expected")
    results = _list(found.get("results"), path)
    if not results:
        raise RecollectError(f"{path} has no result yet: finish it (recollect resume {path.parent})")
    dataset = (Path(str(data.get("name", ""))).stem if isinstance(data, dict) else "") or path.parent.name
    pairs = zip(values, results, strict=False)
    measured = [_measured(result, dataset, config | {varied: value}, path) for value, result in pairs]
    return varied, values[: len(measured)], measured


def selection(path: Path) -> Selection:
    """The same as `recollect.select` gave it."""
    varied, values, measured = of_selection(path)
    results = []
    for point, row in zip(measured, read_json(path)["results"], strict=False):
        scores = _list(row.get("values"), path)
        if not scores or not all(map(is_number, scores)):
            raise _damaged(path)
        results.append(Evaluation(point.name, point.network, tuple(scores), point.on, point.protocol, point.seconds or 0.0))
    return Selection(varied, values, results)


def _list(rows: object, path: Path) -> list[Any]:
    if not isinstance(rows, list):
        raise _damaged(path)
    return rows


def _measured(row: object, dataset: str, config: object, where: Path, name: str | None = OURS) -> Measured:
    if not (isinstance(row, dict) and isinstance(config, dict)):
        raise _damaged(where)
    mean, deviation, n, seconds = row.get("mean"), row.get("deviation", 0.0), row.get("n", 1), row.get("seconds")
    if not (is_number(mean) and is_number(deviation) and is_number(n)):
        raise _damaged(where)
    words = {key: str(row.get(key, "")) for key in ("network", "on", "size", "protocol")}
    numbers = {"mean": float(mean), "deviation": float(deviation), "n": int(n)}
    time = float(seconds) if is_number(seconds) else None
    return Measured(name or str(row.get("name", "")), dataset, config, where=where, seconds=time, **words, **numbers)


def _damaged(path: Path) -> RecollectError:
    return RecollectError(f"{path} has an accuracy without mean, deviation or n: evaluate again (recollect evaluate)")


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
