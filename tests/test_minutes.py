"""The dial called minutes: what is chosen by a clock of our own, what stays as it was asked for, resume, bad input."""

import os
import signal

import pytest
from test_distillation import CONFIG, toy

from recollect import DistillConfig, RecollectError, distill, minutes, preset
from recollect.config import changed
from recollect.decisions import resolve
from recollect.distillation import watched
from recollect.minutes import RECIPES, afford
from recollect.runs import Run, Stopped


class Clock:
    """Seconds pass with outer steps alone."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(minutes.time, "perf_counter", lambda: self.now)

    def steps(self, seconds):
        """What is timed: an outer step of a config takes seconds(config)."""

        class Steps:
            def __init__(self, clock, config):
                self.clock, self.config = clock, config

            def begin(self):
                return None

            def step(self, state):
                self.clock.now += seconds(self.config)

        return lambda config: Steps(self, config)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def config() -> DistillConfig:
    return changed(DistillConfig(), device="cpu")


def by_width(config: DistillConfig) -> float:
    if config.outer.objective == "regression":
        return 0.1
    return {"convnet": 4.0, "convnet:width=64": 2.0, "convnet:width=32": 1.0}[config.inner.network]


def test_the_widest_network_of_which_enough_steps_fit(clock, config):
    lines = []
    long = afford(config, "mnist", 10_000, clock.steps(by_width), lines.append)
    assert long.inner.network == "convnet"
    assert 2000 < long.budget.outer_steps * 4.0 / 4 < 2500
    assert len(lines) == 3
    assert afford(config, "mnist", 2_500, clock.steps(by_width), lines.append).inner.network == "convnet:width=64"
    middle = afford(config, "mnist", 600, clock.steps(by_width), lines.append)
    assert (middle.inner.network, middle.outer.objective, middle.inner.steps) == ("convnet:width=32", "unrolled", 40)
    assert lines[-1] == "because it is the best of which enough outer steps fit"
    short = afford(config, "mnist", 60, clock.steps(by_width), lines.append)
    assert (short.outer.objective, short.budget.real_per_class) == ("regression", 50)
    assert lines[-1] == "because too few outer steps fit of convnet:width=32 (unrolled, 1 s a step)"


def test_little_time_is_not_spent_on_costly_recipes(clock, config):
    costs = {"regression": 1.0, "convnet:width=32": 20.0, "convnet:width=64": 200.0, "convnet": 1000.0}
    by_name = lambda config: costs["regression" if config.outer.objective == "regression" else config.inner.network]  # noqa: E731
    assert afford(config, "mnist", 90, clock.steps(by_name), lambda line: None).outer.objective == "regression"
    assert clock.now < 10


@pytest.mark.parametrize("seconds", [120, 600, 3000])
def test_ends_on_time(clock, config, seconds):
    found = afford(config, "mnist", seconds, clock.steps(by_width), lambda line: None)
    total = clock.now + found.budget.outer_steps * by_width(found)
    assert 0.9 * seconds < total <= seconds


def test_what_is_asked_for_by_name_stays(clock, config):
    asked = changed(config, network="convnet:width=64", inner_steps=20, window=20, init="unit")
    found = afford(asked, "mnist", 6000, clock.steps(by_width), lambda line: None)
    assert (found.inner.network, found.inner.steps, found.memory.init) == ("convnet:width=64", 20, "unit")
    assert afford(changed(config, inner_steps=20), "mnist", 6000, clock.steps(by_width), print).inner.covered == 20
    pictures = changed(config, query="images")
    assert afford(pictures, "mnist", 6000, clock.steps(by_width), lambda line: None).memory.init == "kaiming"


def test_unrolls_flip_objects_and_no_digits(clock, config):
    def found(dataset, asked=config, seconds=600):
        return afford(asked, dataset, seconds, clock.steps(by_width), lambda line: None)

    assert found("cifar10").inner.augment == "flip"
    assert found("mnist").inner.augment == found("svhn").inner.augment == "none"
    assert found("cifar10", changed(config, augment="crop")).inner.augment == "crop"
    assert found("cifar10", seconds=90).inner.augment == "none"  # regression
    assert found("cifar10", changed(config, device="cuda")).inner.augment == "none"


def test_a_gpu_has_the_preset(clock):
    cuda = changed(DistillConfig(), device="cuda:1")
    found = afford(cuda, "mnist", 100, clock.steps(lambda config: 0.5), lambda line: None)
    assert changed(found, outer_steps=cuda.budget.outer_steps) == cuda
    assert 180 < found.budget.outer_steps < 200


def test_too_few_minutes(clock, config):
    with pytest.raises(RecollectError, match=r"minutes is 0\.1, too few for one outer step here: give [\d.]+ or more"):
        afford(config, "mnist", 6, clock.steps(lambda config: 3.0), lambda line: None)
    asked = changed(config, minutes=0.5)  # of which preparing the images has taken more
    with pytest.raises(RecollectError, match=r"minutes is 0\.5, too few for one outer step here: give [1-9][\d.]* or more"):
        afford(asked, "mnist", -20, clock.steps(lambda config: 3.0), lambda line: None)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_no_minutes_at_all(value):
    with pytest.raises(RecollectError, match="minutes is"):
        resolve(preset("fast", minutes=value), toy())


def test_recipes_are_settings():
    for recipes in RECIPES.values():
        for recipe, enough in recipes:
            changed(DistillConfig(), **recipe)
            assert enough >= 1


def test_what_was_chosen_is_in_the_run_and_resumes_bit_for_bit(tmp_path, monkeypatch):
    config = changed(CONFIG, minutes=1.0, outer_steps=7)
    monkeypatch.setattr(minutes, "seconds_a_step", lambda distiller, least: 10.0)
    whole = distill(toy(), config, run=tmp_path / "whole")
    chosen = Run(tmp_path / "whole").settings["distill"]
    assert (chosen["minutes"], chosen["outer_steps"]) == (1.0, 5)
    assert whole.header.made["steps"] == 5

    def stop(line):
        assert line["of"] == 5
        if line["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        distill(toy(), config, run=tmp_path / "parts", progress=stop)
    monkeypatch.setattr(minutes, "seconds_a_step", lambda distiller, least: 1.0)  # it would choose otherwise now
    distill(toy(), config, run=tmp_path / "parts", resume=True)
    memories = [(tmp_path / folder / "memory.safetensors").read_bytes() for folder in ("parts", "whole")]
    assert memories[0] == memories[1]


@pytest.mark.parametrize(("seconds", "device", "told"), [(5.0, "cpu", True), (3.0, "cpu", False), (5.0, "cuda", False)])
def test_a_long_run_on_a_cpu_is_announced_with_the_remedy(seconds, device, told):
    lines, shown = [], []
    watch = watched(changed(DistillConfig(), device=device), shown.append, lines.append)
    for step in (1, 2, 3):
        watch({"step": step, "seconds": 1000.0 if step == 1 else seconds})  # the first compiles
    assert [line["of"] for line in shown] == [1000] * 3
    assert len(lines) == told
    assert not told or lines[0].startswith("about 1.4 hours on this processor; shorter: minutes 10")
