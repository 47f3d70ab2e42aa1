"""The config: what is written is what is read; a wrong value is named."""

import json
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recollect import DistillConfig, Recipe, RecollectError, preset
from recollect.config import PRESETS, InnerLoop, OuterStep, Sizes, changed, check, from_json, setting, settings, to_json
from recollect.continual.config import Baselines, ContinualConfig


def any_of(kind):
    """Any instance of a config, its settings filled by their types alone."""
    floats = st.floats(allow_nan=False)
    special = {float: floats, float | None: floats | st.none()}  # NaN is not equal to itself
    by_type = lambda hint: special[hint] if hint in special else st.from_type(hint)  # noqa: E731
    values = st.fixed_dictionaries({name: by_type(hint) for name, (_, hint) in settings(kind).items()})
    return values.map(lambda chosen: changed(kind(), **chosen))


@given(any_of(DistillConfig) | any_of(Recipe) | any_of(ContinualConfig))
def test_round_trip(config):
    text = json.dumps(to_json(config))
    assert from_json(type(config), json.loads(text), "here") == config


@pytest.mark.parametrize("name", settings(DistillConfig))
def test_a_wrong_type_is_named(name):
    values = to_json(DistillConfig())
    wrong: list[object] = [[], {}, object(), ["convnet"]]
    if name not in ("network", "augment", "encoder_augment", "device", "start", "experts", "loss", "pool"):
        wrong += ["", "a word", "1"]
    if settings(DistillConfig)[name][1] is not bool:
        wrong += [True]
    for value in wrong:
        with pytest.raises(RecollectError, match=f"config.json: {name} cannot be"):
            from_json(DistillConfig, values | {name: value}, "config.json")


def test_settings_are_changed_by_their_names():
    config = preset("fast", inner_lr=0.5, outer_lr=0.25, query="images")
    assert (config.inner.lr, config.outer.lr, config.query.kind) == (0.5, 0.25, "images")
    assert setting(config, "inner_lr") == 0.5
    assert changed(config, inner_lr=DistillConfig().inner.lr, outer_lr=0.03, query="labels") == DistillConfig()
    with pytest.raises(RecollectError, match="unknown setting 'inner_rl': did you mean 'inner_lr'"):
        changed(config, inner_rl=1.0)
    with pytest.raises(RecollectError, match="unknown bridge 'fulll': did you mean 'full'"):
        check(changed(config, bridge="fulll"))


def test_what_distillation_and_streams_share_is_one_dataclass_each():
    ours, theirs = (typing.get_type_hints(kind) for kind in (DistillConfig, ContinualConfig))
    assert [ours[name] for name in ("memory", "inner", "outer")] == [Sizes, InnerLoop, OuterStep]
    assert all(ours[name] is theirs[name] for name in ("memory", "inner", "outer"))


def test_words_of_0_1_are_still_read():
    assert from_json(DistillConfig, {"query_form": "chances"}, "").query.form == "probabilities"
    assert from_json(ContinualConfig, {"rival_lr": 0.5, "rival_replay": 3}, "").baselines == Baselines(lr=0.5, replay=3)


def test_an_unknown_field_is_named_and_a_missing_one_is_the_default():
    values = to_json(preset("fast", bases=3))
    older = {name: value for name, value in values.items() if name != "ema"}
    assert from_json(DistillConfig, older, "config.json") == preset("fast", bases=3)
    with pytest.raises(RecollectError, match=r"unknown setting in config\.json 'inner_step': did you mean 'inner_steps'"):
        from_json(DistillConfig, values | {"inner_step": 3}, "config.json")


def test_a_whole_number_is_a_float_and_a_float_is_no_whole_number():
    values = to_json(DistillConfig())
    assert from_json(DistillConfig, values | {"outer_lr": 1}, "").outer.lr == 1
    with pytest.raises(RecollectError, match=r"bases cannot be 4\.0"):
        from_json(DistillConfig, values | {"bases": 4.0}, "")


def test_every_preset_can_be_used():
    for name, config in PRESETS.items():
        assert preset(name) == config
        check(config)
    with pytest.raises(RecollectError, match="unknown preset 'papre': did you mean 'paper'"):
        preset("papre")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        *((f, (0, -1)) for f in ("images_per_class", "bases", "downsample", "inner_steps", "inner_per_class", "window")),
        *((f, (0, -1)) for f in ("classes_per_step", "networks_per_step", "outer_steps", "real_per_class")),
        *((f, (0.0, -0.1, float("inf"), float("nan"))) for f in ("inner_lr", "outer_lr")),
        *((f, (-0.1, 1.0, 2.0, float("nan"))) for f in ("inner_momentum", "outer_momentum", "ema")),
        *((f, (-0.1, float("inf"), float("nan"))) for f in ("clip_running", "clip_norm", "checkpoint_seconds")),
        ("seed", (-1,)),
    ],
)
def test_numbers_that_cannot_be_meant(field, values):
    for value in values:
        with pytest.raises(RecollectError, match=f"{field} is {value}.*: give"):
            check(changed(DistillConfig(), **{field: value}))


def test_the_edges_can_be_meant():
    check(changed(DistillConfig(), inner_momentum=0.0, outer_momentum=0.0, ema=0.0, clip_running=0.0, window=60))
    check(changed(DistillConfig(), inner_steps=1, window=None, checkpoint_seconds=0.0))
