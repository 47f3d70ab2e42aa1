"""Captured training, uncaptured: the same networks as the plain loop with torch.optim gives."""

from dataclasses import replace

import pytest
import torch

from recollect import Recipe, unroll
from recollect.evaluation import _train_one
from recollect.fast import train as module
from recollect.fast.flat import General
from recollect.nets import Network

RECIPE = Recipe(epochs=5, batch=4, lr=0.05)
CONVNET = Network("convnet:width=4,depth=1", (2, 4, 4), 3)
SEEDS = [5, 6, 7]


def part(count: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, 4, 4, generator=generator), torch.arange(count) % 3


def assert_as_one_by_one(parts, recipe, network=CONVNET):
    flat = General(network, unroll.eager(network.loss))
    found = module.train(flat, parts, recipe, SEEDS, "cpu")
    for each, seed, ours in zip(parts, SEEDS, found, strict=True):
        expected = _train_one(network, each, recipe, seed)
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(ours[name], value, rtol=0, atol=1e-6)
    return found


@pytest.mark.parametrize("augmentation", ["none", "flip+rotate+crop+cutout"])
@pytest.mark.parametrize("batch", [1, 4, 5, 10, 640], ids=lambda b: f"batch{b}")
def test_as_one_by_one(batch, augmentation):
    """Ten images: in single ones, with a shorter last batch, in halves, all at once, and fewer than a batch."""
    assert_as_one_by_one([part(10)] * 3, replace(RECIPE, batch=batch, augment=augmentation))


def test_any_network_and_momentum():
    assert_as_one_by_one([part(10)] * 3, replace(RECIPE, momentum=0.0), Network("mlp:width=8", (2, 4, 4), 3))


def test_parts_of_their_own_and_of_other_sizes():
    assert_as_one_by_one([part(10, 0), part(10, 1), part(7, 2)], replace(RECIPE, augment="flip"))
    assert_as_one_by_one([part(10, 0), (part(10, 0)[0], part(10, 0)[1].flip(0)), part(10, 0)], RECIPE)


@pytest.mark.parametrize("most", [1, 9, 13])
def test_a_few_steps_on_the_device_at_a_time(most, monkeypatch):
    recipe = replace(RECIPE, augment="flip+crop")
    whole = assert_as_one_by_one([part(10)] * 3, recipe)
    monkeypatch.setattr(module, "MOST_ROWS", most)
    for ours, expected in zip(assert_as_one_by_one([part(10)] * 3, recipe), whole, strict=True):
        assert all(torch.equal(ours[name], value) for name, value in expected.items())


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
    assert_as_one_by_one([part(10, 0), part(10, 1), part(10, 2)], replace(RECIPE, epochs=epochs, augment="rotate"))
    assert len(captures) == 2  # full batches and the shorter last one


def test_what_is_on_the_device_is_not_sent_again(monkeypatch):
    sent, copy = [], torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda mine, other: (sent.append(other), copy(mine, other))[1])
    images, labels = part(10)
    assert_as_one_by_one([(images, labels)] * 3, RECIPE)
    assert [sum(each is tensor for each in sent) for tensor in (images, labels)] == [1, 1]
