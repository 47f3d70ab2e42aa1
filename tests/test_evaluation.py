"""Evaluation: the protocol step by step, networks alone and together, baselines, and what is read."""

import sys
from dataclasses import replace

import pytest
import torch
from test_distillation import CONFIG, toy

from recollect import Memory, Recipe, RecollectError, Split, distill
from recollect.config import changed, preset
from recollect.data import augment
from recollect.data.preprocess import Preprocess
from recollect.evaluation import accuracy, across, evaluate, full_data, random_real, train
from recollect.nets import Network
from recollect.seeds import seeded

RECIPE = Recipe(network="mlp:width=8", epochs=6, batch=4, lr=0.05)


def memory():
    return distill(toy(), changed(CONFIG, outer_steps=2))


def by_hand(network: Network, images, labels, recipe: Recipe, seed: int):
    """The paper's protocol written out with torch.optim, one image order an epoch."""
    params = {name: p.requires_grad_() for name, p in network.fresh(seed).items()}
    optimiser = torch.optim.SGD(params.values(), lr=recipe.lr, momentum=recipe.momentum)
    generator = seeded(seed, 1)
    for _ in range(recipe.epochs):
        for rows in torch.randperm(len(labels), generator=generator).split(recipe.batch):
            drawn = augment.draw(augment.parse(recipe.augment), len(rows), generator)
            optimiser.zero_grad()
            network.loss(params, augment.apply(images[rows], drawn), labels[rows]).backward()
            optimiser.step()
    return params


@pytest.mark.parametrize("augmentation", ["none", "flip+crop"])
@pytest.mark.parametrize("name", ["mlp:width=8", "convnet:width=4,depth=1"])
def test_alone_together_and_by_hand_are_the_same(name, augmentation):
    network = Network(name, (1, 4, 4), 3)
    recipe = replace(RECIPE, augment=augmentation)
    generator = torch.Generator().manual_seed(0)
    parts = [(torch.randn(10, 1, 4, 4, generator=generator), torch.arange(10) % 3) for _ in range(3)]
    seeds = [5, 6, 7]
    together = train(network, parts, recipe, seeds)
    for part, seed, ours in zip(parts, seeds, together, strict=True):
        (alone,) = train(network, [part], recipe, [seed])
        expected = by_hand(network, *part, recipe, seed)
        for key, value in expected.items():
            assert torch.allclose(alone[key], value, atol=1e-5)
            assert torch.allclose(ours[key], value, atol=1e-5)


def test_accuracy_counts():
    network = Network("mlp:width=8", (1, 4, 4), 3)
    params = network.fresh(0)
    images = torch.randn(3000, 1, 4, 4)
    labels = network.logits(params, images).argmax(1).clone()
    labels[:30] = (labels[:30] + 1) % 3
    assert accuracy(network, params, images, labels) == pytest.approx(0.99)


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


def test_full_data_learns():
    images = toy(40)
    recipe = replace(RECIPE, epochs=30)
    whole = full_data(images, Preprocess.fit(images.train.images), recipe, networks=3)
    assert whole.mean > 90


def test_across_architectures():
    rows = across(memory(), toy(), ["mlp:width=8", "convnet:width=4,depth=1"], recipe=RECIPE, networks=2)
    assert [row.network for row in rows] == ["mlp:width=8", "convnet:width=4,depth=1"]


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
