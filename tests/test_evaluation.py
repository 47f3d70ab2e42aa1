"""Evaluation: the protocol, baselines, and what is read. Selection: on the validation split, resumable, and the best is best."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from test_distillation import CONFIG, toy

from recollect import Memory, Recipe, RecollectError, Split, distill, fast, load, select
from recollect.config import changed, preset
from recollect.coresets import herding, k_center
from recollect.data.preprocess import Preprocess
from recollect.evaluation import Evaluation, chosen_real, evaluate, full_data, random_real
from recollect.files import held

RECIPE = Recipe(network="mlp:width=8", epochs=6, batch=4, lr=0.05)


def memory():
    return distill(toy(), changed(CONFIG, outer_steps=2))


def test_evaluation_says_what_it_is():
    found = evaluate(memory(), toy(), recipe=RECIPE, networks=4)
    assert len(found.values) == 4
    values = torch.tensor(found.values, dtype=torch.float64)
    assert found.mean == pytest.approx(float(values.mean()))
    assert found.deviation == pytest.approx(float(values.std()))
    assert found.protocol == "4 networks, 6 epochs, batch 4, SGD 0.05, momentum 0.9"
    assert found.values == evaluate(memory(), toy(), recipe=RECIPE, networks=4).values
    assert found.values != evaluate(memory(), toy(), recipe=RECIPE, networks=4, seed=1).values
    assert "seconds" not in found.entry()


def test_progress_is_passed_on_and_changes_nothing():
    seen, ours, images = [], memory(), toy()
    options = {"recipe": RECIPE, "networks": 2}
    told = evaluate(ours, images, **options, progress=seen.append)
    assert told.values == evaluate(ours, images, **options).values
    assert [(now.networks, now.epoch, now.epochs) for now in seen] == [(2, epoch, 6) for epoch in range(1, 7)]
    preprocess = ours.preprocess()
    random_real(images, 2, preprocess, RECIPE, networks=2, progress=seen.append)
    full_data(images, preprocess, RECIPE, networks=2, progress=seen.append)
    assert len(seen) == 3 * 6


@pytest.mark.parametrize("on", ["test", "validation"])
def test_reads_the_split_it_is_told_and_no_other(on):
    """The other split poisoned, the numbers do not change; this one relabelled, they do."""
    clean, ours = toy(), memory()
    other = "validation" if on == "test" else "test"
    poison = Split(torch.full((9, 1, 4, 4), float("nan")), torch.full((9,), 99))
    found = evaluate(ours, clean, recipe=RECIPE, networks=3, on=on).values
    assert evaluate(ours, replace(clean, **{other: poison}), recipe=RECIPE, networks=3, on=on).values == found
    part = getattr(clean, on)
    moved = replace(clean, **{on: Split(part.images, (part.labels + 1) % 3)})
    assert evaluate(ours, moved, recipe=RECIPE, networks=3, on=on).values != found


def test_random_real_draws_training_images_anew_for_each_network(monkeypatch):
    images, preprocess = toy(), Preprocess.fit(toy().train.images)
    seen = []
    module = sys.modules["recollect.evaluation"]
    real = module.train
    monkeypatch.setattr(module, "train", lambda net, parts, *rest: (seen.extend(parts), real(net, parts, *rest))[1])
    random_real(images, 2, preprocess, RECIPE, networks=3)
    training = preprocess(images.train.images)
    for pictures, labels in seen:
        assert torch.bincount(labels).tolist() == [2, 2, 2]
        for picture, label in zip(pictures, labels, strict=True):
            match = (training == picture).flatten(1).all(1).nonzero().flatten()
            assert images.train.labels[match[0]] == label
    assert not torch.equal(seen[0][0], seen[1][0])


def test_herding_and_k_center_are_their_definitions():
    """Against searches over all rows, written out; no row twice; never more than there are."""
    features = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, found = features.mean(0), []
    for _ in range(6):
        rest = [row for row in range(20) if row not in found]
        found.append(min(rest, key=lambda row: float((features[[*found, row]].mean(0) - mean).norm())))
    assert herding(features, 6).tolist() == found
    assert sorted(herding(features, 30).tolist()) == sorted(k_center(features, 30).tolist()) == list(range(20))
    centres = [min(range(20), key=lambda row: float((features[row] - mean).norm()))]
    for _ in range(5):
        centres.append(max(range(20), key=lambda row: float((features[row] - features[centres]).norm(dim=1).min())))
    assert k_center(features, 6).tolist() == centres
    assert (features[herding(features, 6)].mean(0) - mean).norm() < (features[k_center(features, 6)].mean(0) - mean).norm()


@pytest.mark.parametrize("how", ["herding", "k-center"])
def test_chosen_real_images_are_training_images_of_their_classes(how, monkeypatch):
    """The same for all networks, by the features of one that has seen the training images and nothing else."""
    images, preprocess, parts = toy(), Preprocess.fit(toy().train.images), []
    module = sys.modules["recollect.evaluation"]
    real = module.train
    monkeypatch.setattr(module, "train", lambda net, given, *rest: (parts.extend(given), real(net, given, *rest))[1])
    found = chosen_real(images, how, 2, preprocess, RECIPE, networks=3)
    assert (found.name, len(found.values)) == (f"real images by {how}", 3)
    training = preprocess(images.train.images)
    for pictures, labels in parts:
        assert torch.equal(pictures, parts[0][0])
        assert torch.bincount(labels).tolist() == [2, 2, 2]
        for picture, label in zip(pictures, labels, strict=True):
            match = (training == picture).flatten(1).all(1).nonzero().flatten()
            assert images.train.labels[match[0]] == label
    poison = Split(torch.full((9, 1, 4, 4), float("nan")), torch.full((9,), 99))
    again = chosen_real(replace(images, validation=poison), how, 2, preprocess, RECIPE, networks=3)
    assert again.values == found.values
    assert chosen_real(images, how, 2, preprocess, RECIPE, networks=3, seed=1).values != found.values


def test_full_data_learns():
    images = toy(40)
    recipe = replace(RECIPE, epochs=30)
    whole = full_data(images, Preprocess.fit(images.train.images), recipe, networks=3)
    assert whole.mean > 90


@pytest.mark.parametrize(("width", "bf16", "said"), [(32, True, ", bf16"), (32, False, ""), (16, True, "")])
def test_the_protocol_says_where_the_arithmetic_is_half(monkeypatch, width, bf16, said):
    monkeypatch.setattr(fast, "computes_in_bf16", lambda: bf16)
    recipe = replace(RECIPE, network=f"convnet:width={width},depth=1", epochs=1)
    images = load("digits").only(["0", "1"])
    found = random_real(images, 1, Preprocess.fit(images.train.images, "normalise", "cpu"), recipe, networks=1)
    assert found.protocol == f"1 networks, 1 epochs, batch 4, SGD 0.05, momentum 0.9{said}"


def test_refusals():
    with pytest.raises(RecollectError, match="give the memory's own dataset"):
        evaluate(memory(), replace(toy(), class_names=("a", "b", "c")))
    with pytest.raises(RecollectError, match="number of networks is 0"):
        evaluate(memory(), toy(), networks=0)
    with pytest.raises(RecollectError, match="epochs is 0"):
        evaluate(memory(), toy(), recipe=replace(RECIPE, epochs=0))
    with pytest.raises(RecollectError, match="cannot evaluate on 'train'"):
        evaluate(memory(), toy(), on="train")  # pyright: ignore
    with pytest.raises(RecollectError, match="compute is tf32, which needs a CUDA device"):
        evaluate(memory(), toy(), device="cpu", compute="tf32")


def test_recipe_of_the_memory_is_the_inner_loops():
    made = distill(toy(), changed(CONFIG, outer_steps=1, inner_lr=0.03, inner_momentum=0.8))
    assert (made.header.recipe["lr"], made.header.recipe["momentum"]) == (0.03, 0.8)
    assert (made.header.recipe["epochs"], made.header.recipe["batch"]) == (300, 640)


@pytest.mark.parametrize("whole", [False, True])
def test_a_whitening_file_that_is_not_there_is_fitted_again(tmp_path, whole):
    images = toy()
    config = preset("fast", network="mlp:width=8", bases=2, outer_steps=1, inner_steps=2, window=None, preprocess="zca")
    memory = distill(images, changed(config, use_validation=whole))
    memory.save(tmp_path / "memory.safetensors")
    options = {"networks": 2, "recipe": Recipe(network="mlp:width=8", epochs=3)}
    before = evaluate(memory, images, **options)
    (sidecar,) = tmp_path.glob("zca-*")
    sidecar.unlink()
    found = Memory.load(tmp_path / "memory.safetensors")
    with pytest.warns(UserWarning, match=r"zca-\w+.safetensors is not at hand: fitted again from the training images"):
        assert evaluate(found, images, **options).values == before.values
    found.save(tmp_path / "again.safetensors")
    sidecar.unlink()  # which came back with that
    others = replace(images, train=Split(255 - images.train.images, images.train.labels))
    with pytest.raises(RecollectError, match="not at hand, and these training images are not those it was fitted to"):
        evaluate(Memory.load(tmp_path / "memory.safetensors"), others, **options)


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


def test_what_selection_refuses(tmp_path):
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
