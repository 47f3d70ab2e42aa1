"""The config: what is written is what is read; a wrong value is named."""

import json
import typing
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recollect import DistillConfig, Recipe, RecollectError, preset
from recollect.config import PRESETS, changed, check, from_json, to_json


def any_of(kind):
    """Any instance of a config, its fields filled by their types alone."""
    by_type = lambda hint: st.floats(allow_nan=False) if hint is float else st.from_type(hint)  # noqa: E731
    return st.builds(kind, **{name: by_type(hint) for name, hint in typing.get_type_hints(kind).items()})


@given(any_of(DistillConfig) | any_of(Recipe))
def test_round_trip(config):
    text = json.dumps(to_json(config))
    assert from_json(type(config), json.loads(text), "here") == config


@pytest.mark.parametrize("field", [f.name for f in fields(DistillConfig)])
def test_a_wrong_type_is_named(field):
    values = to_json(DistillConfig())
    wrong: list[object] = [[], {}, object(), ["convnet"]]
    if field not in ("network", "augment", "encoder_augment", "device", "start"):
        wrong += ["", "a word", "1"]
    if typing.get_type_hints(DistillConfig)[field] is not bool:
        wrong += [True]
    for value in wrong:
        with pytest.raises(RecollectError, match=f"config.json: {field} cannot be"):
            from_json(DistillConfig, values | {field: value}, "config.json")


def test_an_unknown_field_is_named_and_a_missing_one_is_the_default():
    values = to_json(preset("fast", bases=3))
    older = {name: value for name, value in values.items() if name != "ema"}
    assert from_json(DistillConfig, older, "config.json") == preset("fast", bases=3)
    with pytest.raises(
        RecollectError, match=r"unknown setting in config\.json 'inner_step': did you mean 'inner_steps'"
    ):
        from_json(DistillConfig, values | {"inner_step": 3}, "config.json")


def test_a_whole_number_is_a_float_and_a_float_is_no_whole_number():
    values = to_json(DistillConfig())
    assert from_json(DistillConfig, values | {"outer_lr": 1}, "").outer_lr == 1
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
        *(
            (f, (0, -1))
            for f in ("images_per_class", "bases", "downsample", "inner_steps", "inner_per_class", "window")
        ),
        *((f, (0, -1)) for f in ("classes_per_step", "networks_per_step", "outer_steps", "real_per_class")),
        *((f, (0.0, -0.1, float("inf"), float("nan"))) for f in ("inner_lr", "outer_lr")),
        *((f, (-0.1, 1.0, 2.0, float("nan"))) for f in ("inner_momentum", "outer_momentum", "ema")),
        *((f, (-0.1, float("inf"), float("nan"))) for f in ("clip_running", "clip_norm", "checkpoint_seconds")),
        ("seed", (-1,)),
        ("window", (61,)),
    ],
)
def test_numbers_that_cannot_be_meant(field, values):
    for value in values:
        with pytest.raises(RecollectError, match=f"{field} is {value}.*: give"):
            check(changed(DistillConfig(), **{field: value}))


def test_the_edges_can_be_meant():
    check(changed(DistillConfig(), inner_momentum=0.0, outer_momentum=0.0, ema=0.0, clip_running=0.0, window=60))
    check(changed(DistillConfig(), inner_steps=1, window=None, checkpoint_seconds=0.0))
