"""The dial called minutes: which objective, network and number of outer steps fit into them on this device, by a few timed steps.

Nothing that was asked for by name is changed but the number of outer steps. What is chosen goes into the run's config, so that a
resumed run ends bit-for-bit like one that was not interrupted. How the recipes were chosen stands in docs/recipe.md.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

from recollect import distributed
from recollect.config import DistillConfig, changed, setting
from recollect.errors import RecollectError
from recollect.outer import State

TIMED, SHARE = 3, 0.02  # outer steps of each recipe at least, after one to warm up; and share of the time
MINUTES = 10.0  # where nothing is asked for, on a CPU
MARGIN = 0.98  # of the time that is left: saving takes some
SHORT = {"inner_steps": 40, "window": 25, "inner_lr": 0.02, "init": "samples", "real_per_class": 100}

RECIPES: dict[str, tuple[tuple[dict[str, Any], int], ...]] = {
    "cuda": (({}, 1),),
    "cpu": (
        (SHORT | {"network": "convnet"}, 1500),
        (SHORT | {"network": "convnet:width=64"}, 1000),
        (SHORT | {"network": "convnet:width=32"}, 100),
        ({"objective": "regression", "network": "convnet:width=32", "real_per_class": 50, "init": "samples"}, 1),
    ),
}
"""by device, the best first: settings, and how many outer steps they need to be worth it"""


CHOSEN = ("objective", "network", "inner_steps", "window", "inner_lr", "init", "real_per_class", "outer_steps")


class Steps(Protocol):
    """What can be timed: a Distiller."""

    def begin(self) -> State: ...
    def step(self, state: State) -> dict[str, Any]: ...


def afford(
    config: DistillConfig, seconds: float, make: Callable[[DistillConfig], Steps], say: Callable[[str], None]
) -> DistillConfig:
    """The config with the first recipe of which enough outer steps fit into so many seconds, and their number.

    Arguments:
        config: decided for its images; settings that differ from the defaults stay.
        make: what performs outer steps of a config.
        say: told in three lines what was chosen, and why.
    """
    seconds = distributed.current().first(seconds)
    deadline, usual, found = _now() + seconds, DistillConfig(), None
    tried = []
    for recipe, enough in RECIPES[config.run.device.partition(":")[0]]:
        own = {name: value for name, value in recipe.items() if setting(config, name) == setting(usual, name)}
        if config.query.kind != "labels" or config.run.start:
            own.pop("init", None)
        found = changed(config, **own)
        if found.inner.window and found.inner.window > found.inner.steps:
            found = changed(found, window=found.inner.steps)
        if found in [each for each, _ in tried]:
            continue
        each = seconds_a_step(make(found), SHARE * seconds)
        tried.append((found, each))
        if (deadline - _now()) * MARGIN / each >= enough:
            break
    assert found is not None
    each, left = tried[-1][1], (deadline - _now()) * MARGIN
    if left < each:
        needed = (seconds - left + each) / 60
        raise RecollectError(f"minutes is {seconds / 60:.3g}, too few for one outer step here: give {needed * 1.2:.2g} or more")
    found = changed(tried[-1][0], outer_steps=int(left / each))
    chosen = ", ".join(f"{name} {setting(found, name)}" for name in ("objective", "network", "inner_steps", "window"))
    say(f"{seconds / 60:.3g} minutes on {config.run.device}: {found.budget.outer_steps:,} outer steps of {each:.2g} s")
    say(f"chosen: {chosen}")
    say(_why(tried))
    return found


def _why(tried: list[tuple[DistillConfig, float]]) -> str:
    refused = [f"{config.inner.network} ({config.outer.objective}, {each:.2g} s a step)" for config, each in tried[:-1]]
    return f"because too few steps fit of {', '.join(refused)}" if refused else "because enough steps fit of it"


def _now() -> float:
    """By the clock of rank 0, which all processes of a run go by."""
    return distributed.current().first(time.perf_counter())


def seconds_a_step(distiller: Steps, least: float) -> float:
    """Of an outer step: the mean over so many seconds, since unrolls may differ in length."""
    state = distiller.begin()
    distiller.step(state)
    began, done = _now(), 0
    while done < TIMED or _now() - began < least:
        distiller.step(state)
        done += 1
    return (_now() - began) / done
