"""What can drive a memory. seam.py says what an objective is; each of the other files is one, and one line in OBJECTIVES."""

from collections.abc import Callable

from recollect.objectives.distributions import Distributions
from recollect.objectives.gradients import Gradients
from recollect.objectives.regression import Regression
from recollect.objectives.seam import (
    ByBatch,
    ByNetwork,
    Chance,
    Examples,
    Found,
    Objective,
    Problem,
    SideBySide,
    Source,
    gradients,
)
from recollect.objectives.trajectories import Trajectories
from recollect.objectives.unrolled import Unrolled

__all__ = [
    "OBJECTIVES",
    "ByBatch",
    "ByNetwork",
    "Chance",
    "Examples",
    "Found",
    "Objective",
    "Problem",
    "SideBySide",
    "Source",
    "gradients",
]

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "unrolled": Unrolled,
    "regression": Regression,
    "gradients": Gradients,
    "distributions": Distributions,
    "trajectories": Trajectories,
}
"""name -> constructor (network, inner loop, device, compute, compile, matching, source)"""
