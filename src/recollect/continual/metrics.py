"""RA, LA, BTI, BWT and forgetting from one accuracy matrix; their mean and deviation over seeds. Plain numbers.

R[i][t] is the accuracy on task t after task i, and None for t > i, tasks yet to come. With T tasks:

    RA  = mean over t of R[T-1][t]                        retained accuracy
    LA  = mean over t of R[t][t]                          learning accuracy
    BTI = sum over t of (R[T-1][t] - R[t][t]) / T         the paper's: over all T tasks, of which the last adds 0
    BWT = the same sum / (T - 1)                          as other libraries average it
    forgetting = mean over t < T-1 of max over i < T-1 of R[i][t], less R[T-1][t]
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from recollect.errors import RecollectError

Matrix = list[list[float | None]]


@dataclass(frozen=True)
class Metrics:
    """Of one learner on one stream, in percent."""

    ra: float
    la: float
    bti: float
    bwt: float | None
    """None where there is one task: there is nothing to forget"""
    forgetting: float | None
    curve: tuple[float, ...]
    """RA against tasks seen: after each task the mean accuracy on the tasks so far"""


def metrics(matrix: Matrix) -> Metrics:
    rows = _triangle(matrix)
    tasks, last, first = len(rows), rows[-1], [row[-1] for row in rows]
    change = sum(after - before for after, before in zip(last, first, strict=True))
    lost = [max(rows[i][t] for i in range(t, tasks - 1)) - last[t] for t in range(tasks - 1)]
    return Metrics(
        ra=sum(last) / tasks,
        la=sum(first) / tasks,
        bti=change / tasks,
        bwt=change / (tasks - 1) if tasks > 1 else None,
        forgetting=sum(lost) / (tasks - 1) if tasks > 1 else None,
        curve=tuple(sum(row) / len(row) for row in rows),
    )


def square(rows: Sequence[Sequence[float]]) -> Matrix:
    """Rows of 1, 2, 3, ... accuracies as a matrix."""
    return [[*row, *[None] * (len(rows) - len(row))] for row in rows]


def _triangle(matrix: Matrix) -> list[list[float]]:
    rows: list[list[float]] = []
    for number, row in enumerate(matrix):
        known = [value for value in row[: number + 1] if value is not None]
        if len(row) != len(matrix) or len(known) != number + 1:
            raise RecollectError(
                f"row {number} of an accuracy matrix of {len(matrix)} tasks is {row}: give {number + 1} accuracies, then None"
            )
        rows.append(known)
    if not rows:
        raise RecollectError("an accuracy matrix without rows: run at least one task")
    return rows


def mean_matrix(matrices: Sequence[Matrix]) -> Matrix:
    """Cell by cell, over seeds."""
    rows = zip(*map(_triangle, matrices), strict=True)
    return square([[sum(cells) / len(cells) for cells in zip(*row, strict=True)] for row in rows])


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (n - 1) over seeds."""

    mean: float
    deviation: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.deviation:.2f}" if self.n > 1 else f"{self.mean:.2f}"


def spread(values: Sequence[float]) -> Spread:
    if not values:
        raise RecollectError("a mean of no values: run at least one seed")
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))
