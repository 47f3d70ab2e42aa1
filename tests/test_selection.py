"""Selection: on the validation split, resumable, and the best is the best."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from test_distillation import CONFIG, toy

from recollect import RecollectError, Split, select
from recollect.config import changed
from recollect.evaluation import Evaluation
from recollect.files import held

module = sys.modules["recollect.selection"]
SHORT = changed(CONFIG, outer_steps=2)


def test_tries_every_value_and_never_reads_the_test_split(tmp_path):
    poison = Split(torch.full((9, 1, 4, 4), float("nan")), torch.full((9,), 99))
    found = select(replace(toy(), test=poison), SHORT, "bases", [2, 3, 4], run=tmp_path / "s", networks=2)
    assert found.values == [2, 3, 4]
    assert [evaluation.on for evaluation in found.evaluations] == ["validation"] * 3
    for value in (2, 3, 4):
        config = json.loads((tmp_path / "s" / f"bases={value}" / "config.json").read_text())
        assert config["distill"]["bases"] == value


def test_a_selection_and_its_runs_are_one_process_s_alone(tmp_path):
    for place in (tmp_path / "s", tmp_path / "s" / "bases=2"):
        with held(place), pytest.raises(RecollectError, match=rf"{place} is in use by process"):
            select(
                toy(), SHORT, "bases", [2, 3], run=tmp_path / "s", networks=2, resume=(tmp_path / "s" / "config.json").exists()
            )
    assert not list(tmp_path.rglob("*.safetensors"))


def test_best_is_the_highest_mean(tmp_path, monkeypatch):
    means = iter([50.0, 70.0, 60.0])
    made = lambda *_, **__: Evaluation("x", "mlp", (next(means),), "validation", "", 0.0)  # noqa: E731
    monkeypatch.setattr(module, "evaluate", made)
    assert select(toy(), SHORT, "outer_lr", [0.1, 0.2, 0.3], run=tmp_path / "s").best == 0.2


def test_resumes_without_repeating_what_is_done(tmp_path, monkeypatch):
    whole = select(toy(), SHORT, "bases", [2, 3], run=tmp_path / "whole", networks=2)
    real, calls = module.distill, []

    def interrupted(images, config, **options):
        calls.append(config.memory.bases)
        if calls == [2, 3]:
            raise KeyboardInterrupt
        return real(images, config, **options)

    monkeypatch.setattr(module, "distill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        select(toy(), SHORT, "bases", [2, 3], run=tmp_path / "parts", networks=2)
    found = select(toy(), SHORT, "bases", [2, 3], run=tmp_path / "parts", networks=2, resume=True)
    assert calls == [2, 3, 3]
    assert [e.values for e in found.evaluations] == [e.values for e in whole.evaluations]


def test_refusals(tmp_path):
    with pytest.raises(RecollectError, match="did you mean 'bases'"):
        select(toy(), SHORT, "base", [2], run=tmp_path / "s")
    with pytest.raises(RecollectError, match="no values of bases"):
        select(toy(), SHORT, "bases", [], run=tmp_path / "s")
    with pytest.raises(RecollectError, match="99 bases do not fit"):
        select(toy(), SHORT, "bases", [2, 99], run=tmp_path / "s")
    with pytest.raises(RecollectError, match="nothing to select on"):
        select(toy(), changed(SHORT, use_validation=True), "bases", [2], run=tmp_path / "s")
    assert not (tmp_path / "s").exists()
    select(toy(), SHORT, "bases", [2], run=tmp_path / "s", networks=1)
    with pytest.raises(RecollectError, match="already holds a run"):
        select(toy(), SHORT, "bases", [2], run=tmp_path / "s", networks=1)
    with pytest.raises(RecollectError, match="was begun with networks 1, not 2"):
        select(toy(), SHORT, "bases", [2], run=tmp_path / "s", networks=2, resume=True)
