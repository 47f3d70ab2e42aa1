"""Result files: what they say of themselves, and how they are written.

    python experiments/record.py results/bench.json ...

writes a file of a `recollect` command as the scripts write theirs: numbers to six digits, and a list or object of plain
values, such as a row of a matrix, on one line.
"""

import ast
import shlex
import sys
from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recollect import RecollectError
from recollect.continual.metrics import metrics, spread
from recollect.files import read_json
from recollect.files import write_compact as write
from recollect.runs import environment


def begun(script: str, given: Namespace, not_settings: Collection[str], arguments: list[str] | None) -> dict[str, Any]:
    """The file `given.out` as far as it was written with the same settings, or a new one."""
    settings = {name: value for name, value in vars(given).items() if name not in not_settings}
    if given.out.exists():
        found = read_json(given.out)
        if found["settings"] != settings:
            raise RecollectError(f"{given.out} was begun with other settings: give another --out")
        return found
    command = shlex.join(["python", f"experiments/{script}.py", *(sys.argv[1:] if arguments is None else arguments)])
    return {"command": command, "settings": settings, "environment": environment(), "rows": {}}


def setting(text: str) -> tuple[str, Any]:
    """name=value, where the value is a word or as Python writes it."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def show(what: tuple[str, dict[str, Any]], _: float) -> None:
    """Every hundredth outer step that a job tells of: (the job, the numbers of the step)."""
    name, line = what
    if line["step"] % 100 == 0:
        print(name, line, flush=True)


def learner_row(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row of a stream's table, of one learner's runs in the order of their seeds."""
    of_runs = [metrics(run["matrix"]) for run in runs]
    row: dict[str, Any] = {"on": runs[0]["on"]}
    for name in ("ra", "la", "bti", "bwt", "forgetting"):
        values = [value for each in of_runs if (value := getattr(each, name)) is not None]
        row[name] = asdict(spread(values)) if values else None
    for name in ("seconds", "distilling_seconds"):
        if name in runs[0]:
            row[name] = [run[name] for run in runs]
    environments = [(run["device"], run["environment"]) for run in runs if "device" in run]
    row["where"] = sorted({told["processor" if device == "cpu" else "cuda"] for device, told in environments})
    return row | {"matrices": [triangle(run["matrix"]) for run in runs]}


def triangle(matrix: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """R[i][t] for t <= i; of a learner that forgets nothing, whose columns are constant, the last row alone."""
    rows = [[round(value, 3) for value in row if value is not None] for row in matrix]
    return rows[-1:] if all(row == rows[-1][: len(row)] for row in rows) else rows


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name), read_json(Path(name)))
