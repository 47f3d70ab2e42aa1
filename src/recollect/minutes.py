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
"""by device, the best first and each costlier than the next: settings, and how many outer steps they need to be worth it"""
FLIPPED = ("cifar10", "cifar100")
"""datasets whose unrolls flip what is recalled on a CPU, unless another augmentation is asked for"""
CHOSEN = ("objective", "network", "inner_steps", "window", "inner_lr", "init", "real_per_class", "augment", "outer_steps")


class Steps(Protocol):
    """What can be timed: a Distiller."""

    def begin(self) -> State: ...
    def step(self, state: State) -> dict[str, Any]: ...


def afford(
    config: DistillConfig, dataset: str, seconds: float, make: Callable[[DistillConfig], Steps], say: Callable[[str], None]
) -> DistillConfig:
    """The config with the best recipe of which enough outer steps fit into the seconds that are left, and their number.
    Cheap recipes are timed first: where time is short, little of it is spent on choosing.

    Arguments:
        config: decided for its images; settings that differ from the defaults stay.
        make: what performs outer steps of a config.
        say: told in three lines what was chosen, and why.
    """
    seconds = distributed.current().first(seconds)
    minutes = config.budget.minutes or seconds / 60
    deadline, best, refused = _now() + seconds, None, None

    def fit(each: float) -> float:
        return (deadline - _now()) * MARGIN / each

    for recipe, enough in reversed(RECIPES[config.run.device.partition(":")[0]]):
        flips = {"augment": "flip"} if dataset in FLIPPED and "inner_steps" in recipe else {}
        found = _beside(config, recipe | flips)
        if best and found == best[0]:
            continue
        if best and fit(best[1]) < enough:  # of a costlier one even fewer
            break
        each = seconds_a_step(make(found), SHARE * seconds)
        if best and fit(each) < enough:
            refused = found, each
            break
        best = found, each
    assert best is not None
    found, each = best
    if fit(each) < 1:
        needed = minutes + (_now() - deadline + each) / 60
        raise RecollectError(f"minutes is {minutes:.3g}, too few for one outer step here: give {needed * 1.2:.2g} or more")
    found = changed(found, outer_steps=int(fit(each)))
    chosen = ", ".join(f"{name} {setting(found, name)}" for name in ("objective", "network", "inner_steps", "window", "augment"))
    say(f"{minutes:.3g} minutes on {config.run.device}: {found.budget.outer_steps:,} outer steps of {each:.2g} s")
    say(f"chosen: {chosen}")
    say(_why(refused))
    return found


def _beside(config: DistillConfig, recipe: dict[str, Any]) -> DistillConfig:
    """The config with what a recipe says of settings that nobody has asked for."""
    usual = DistillConfig()
    own = {name: value for name, value in recipe.items() if setting(config, name) == setting(usual, name)}
    if config.query.kind != "labels" or config.run.start:
        own.pop("init", None)
    return changed(config, **own)


def _why(refused: tuple[DistillConfig, float] | None) -> str:
    if refused is None:
        return "because it is the best of which enough outer steps fit"
    config, each = refused
    return f"because too few outer steps fit of {config.inner.network} ({config.outer.objective}, {each:.2g} s a step)"


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
