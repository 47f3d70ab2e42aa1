"""Training: the same networks alone, side by side and by torch.optim, whatever is told of them."""

import itertools
import math
import sys
from dataclasses import replace

import pytest
import torch

from recollect import Recipe, RecollectError
from recollect.data import augment
from recollect.nets import Network, squared_error
from recollect.seeds import seeded
from recollect.training import Cancelled, Progress, accuracy, train

module = sys.modules["recollect.training"]

RECIPE = Recipe(epochs=5, batch=4, lr=0.05)
CONVNET, MLP = (Network(name, (2, 4, 4), 3) for name in ("convnet:width=4,depth=1", "mlp:width=8"))
SEEDS = [5, 6, 7]


def part(count: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, 4, 4, generator=generator), torch.arange(count) % 3


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
    return {name: p.detach() for name, p in params.items()}


def same(ours: dict, others: dict) -> bool:
    return ours.keys() == others.keys() and all(torch.equal(ours[name], p) for name, p in others.items())


def assert_as_by_hand(parts, recipe, network=CONVNET):
    found = train(network, parts, recipe, SEEDS)
    for each, seed, ours in zip(parts, SEEDS, found, strict=True):
        expected = by_hand(network, *each, recipe, seed)
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(ours[name], value, rtol=0, atol=1e-5)  # processors round products differently
    return found


@pytest.mark.parametrize("name", ["convnet:width=16,depth=1", "mlp:width=8"])
def test_continuous_targets(name):
    """By squared error, alone and side by side, whatever the network's passes for labels are."""
    network = Network(name, (1, 8, 8), 2, squared_error)
    generator = torch.Generator().manual_seed(0)
    parts = [(torch.randn(12, 1, 8, 8, generator=generator), torch.randn(12, 2, generator=generator)) for _ in range(2)]
    recipe = Recipe(epochs=4, batch=5, lr=0.1)
    for (images, targets), seed, ours in zip(parts, SEEDS[:2], train(network, parts, recipe, SEEDS[:2]), strict=True):
        for key, value in by_hand(network, images, targets, recipe, seed).items():
            assert torch.allclose(ours[key], value, rtol=0, atol=1e-4)
        error = lambda params: (network.logits(params, images) - targets).square().mean()  # noqa: B023, E731
        assert float(error(ours)) == pytest.approx(float(network.loss(ours, images, targets)))
        assert error(ours) < error(network.fresh(seed))


@pytest.mark.parametrize("augmentation", ["none", "flip+rotate+crop+cutout"])
@pytest.mark.parametrize("batch", [1, 4, 5, 10, 640], ids=lambda b: f"batch{b}")
@pytest.mark.parametrize("network", [CONVNET, MLP], ids=["convnet", "mlp"])
def test_as_by_hand(network, batch, augmentation):
    """Ten images: in single ones, with a shorter last batch, in halves, all at once, and fewer than a batch."""
    assert_as_by_hand([part(10)] * 3, replace(RECIPE, batch=batch, augment=augmentation), network)


@pytest.mark.parametrize("augmentation", ["none", "flip+crop"])
@pytest.mark.parametrize("name", ["mlp:width=8", "lamaml:width=4,hidden=6", "convnet:width=4,depth=1"])
def test_alone_and_together_are_the_same(name, augmentation):
    network, recipe = Network(name, (2, 4, 4), 3), replace(RECIPE, epochs=6, augment=augmentation)
    parts = [part(10, seed) for seed in range(3)]
    for each, seed, ours in zip(parts, SEEDS, train(network, parts, recipe, SEEDS), strict=True):
        (alone,) = train(network, [each], recipe, [seed])
        for key, value in alone.items():
            assert torch.allclose(ours[key], value, atol=1e-6)


def test_no_momentum():
    for network in (CONVNET, MLP):
        assert_as_by_hand([part(10)] * 3, replace(RECIPE, momentum=0.0), network)


@pytest.mark.parametrize("network", [CONVNET, MLP], ids=["convnet", "mlp"])
def test_parts_of_their_own_and_of_other_sizes(network):
    assert_as_by_hand([part(10, 0), part(10, 1), part(7, 2)], replace(RECIPE, augment="flip"), network)
    assert_as_by_hand([part(10, 0), part(7, 2), part(10, 1)], RECIPE, network)
    assert_as_by_hand([part(10, 0), (part(10, 0)[0], part(10, 0)[1].flip(0)), part(10, 0)], RECIPE, network)


@pytest.mark.parametrize("most", [1, 9, 13])
@pytest.mark.parametrize("network", [CONVNET, MLP], ids=["convnet", "mlp"])
def test_a_few_steps_on_the_device_at_a_time(network, most, monkeypatch):
    recipe = replace(RECIPE, augment="flip+crop")
    whole = assert_as_by_hand([part(10)] * 3, recipe, network)
    monkeypatch.setattr(module, "MOST_ROWS", most)
    for ours, expected in zip(assert_as_by_hand([part(10)] * 3, recipe, network), whole, strict=True):
        assert same(ours, expected)


def test_as_many_side_by_side_as_fit(monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 1)
    seen = []
    assert_as_by_hand([part(10)] * 3, RECIPE, MLP)
    train(MLP, [part(10)] * 3, RECIPE, SEEDS, progress=seen.append)
    assert {now.together for now in seen} == {1}


@pytest.mark.parametrize("epochs", [1, 5])
def test_trial_runs_before_a_capture_leave_no_trace(epochs, monkeypatch):
    """Not even where they run past the end of the order; and what was captured serves all networks of a size."""
    captures = []

    def captured(step, device):
        captures.append(device)
        for _ in range(3):
            step()
        return step

    monkeypatch.setattr(module, "captured", captured)
    assert_as_by_hand([part(10, 0), part(10, 1), part(10, 2)], replace(RECIPE, epochs=epochs, augment="rotate"))
    assert len(captures) == 2  # full batches and the shorter last one


def test_what_is_on_the_device_is_not_sent_again(monkeypatch):
    sent, copy = [], torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda mine, other: (sent.append(other), copy(mine, other))[1])
    images, labels = part(10)
    assert_as_by_hand([(images, labels)] * 3, RECIPE)
    assert [sum(each is tensor for each in sent) for tensor in (images, labels)] == [1, 1]


# --- progress --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [CONVNET, MLP], ids=["convnet", "mlp"])
def test_progress_changes_no_bit(network):
    recipe, parts = replace(RECIPE, augment="flip"), [part(10, seed) for seed in range(3)]
    seen: list[Progress] = []
    told = train(network, parts, recipe, SEEDS, progress=seen.append, cancelled=lambda: False)
    for ours, alone in zip(told, train(network, parts, recipe, SEEDS), strict=True):
        assert same(ours, alone)
    assert sum(now.together for now in seen) == 5 * 3  # each network's every epoch
    assert seen[-1][:5] == ((0, 3, 3, 5, 5) if network is MLP else (2, 1, 3, 5, 5))


@pytest.mark.parametrize("network", [CONVNET, MLP], ids=["convnet", "mlp"])
def test_the_loss_is_that_of_the_epochs_last_batch(network):
    """By the weights after its step: those of a training that ends there. Side by side, the mean over the networks."""
    seen: list[Progress] = []
    parts, recipe = [part(10, seed) for seed in range(2)], replace(RECIPE, augment="crop")
    train(network, parts, recipe, SEEDS[:2], progress=seen.append)
    for epoch in range(1, 6):
        values = []
        for (images, labels), seed in zip(parts, SEEDS[:2], strict=True):
            shorter = replace(recipe, epochs=epoch)
            *_, (rows, drawn) = module.batches(len(labels), shorter, seeded(seed, 1))
            params = by_hand(network, images, labels, shorter, seed)
            values.append(float(network.loss(params, augment.apply(images[rows], drawn), labels[rows])))
        losses = [now.loss for now in seen if now.epoch == epoch]
        expected = [sum(values) / 2] if network is MLP else values
        assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("epochs", "told"), [(100, 100), (101, 52), (250, 85), (1000, 101)])
def test_a_long_training_tells_of_a_hundred_epochs(epochs, told):
    seen: list[Progress] = []
    train(MLP, [part(4)], replace(RECIPE, epochs=epochs), [0], progress=seen.append)
    assert len(seen) == told
    assert [now.epoch for now in seen] == sorted({now.epoch for now in seen})
    assert seen[-1].epoch == epochs


def test_a_loss_that_is_not_finite_is_told():
    seen: list[Progress] = []
    train(MLP, [part(10)] * 2, replace(RECIPE, lr=1e6), SEEDS[:2], progress=seen.append)
    assert math.isnan(seen[-1].loss)


@pytest.mark.parametrize("network", [CONVNET, MLP], ids=["convnet", "mlp"])
def test_cancelled_after_a_step(network):
    asked = itertools.count(1)
    with pytest.raises(Cancelled):
        train(network, [part(10)], RECIPE, [0], cancelled=lambda: next(asked) == 4)
    assert next(asked) == 5


# --- what is refused, and how accuracy counts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs is 0: give 1 or more"),
        ({"batch": -1}, "batch is -1: give 1 or more"),
        ({"lr": 0.0}, "lr is 0.0: give a number above 0"),
        ({"augment": "flp"}, "unknown augmentation 'flp'"),
    ],
)
def test_recipes_that_cannot_be(change, message):
    with pytest.raises(RecollectError, match=message):
        train(MLP, [part(10)], replace(RECIPE, **change), [0])


def test_accuracy_counts():
    network = Network("mlp:width=8", (1, 4, 4), 3)
    params = network.fresh(0)
    images = torch.randn(3000, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = network.logits(params, images).argmax(1).clone()
    labels[:30] = (labels[:30] + 1) % 3
    assert accuracy(network, params, images, labels) == pytest.approx(0.99)
