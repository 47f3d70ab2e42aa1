"""How memories begin: random by the rule that is named, or recalling real samples."""

import pytest
import torch
from test_distillation import CONFIG, toy

from recollect.config import changed
from recollect.data.preprocess import Preprocess
from recollect.decisions import resolve
from recollect.distiller import Distiller
from recollect.memory import recall
from recollect.nets import Network


def begun(**changes):
    images = toy()
    config = resolve(changed(CONFIG, **changes), images)
    network = Network(config.inner.network, images.shape, 3)
    return images, Distiller(images, config, Preprocess.fit(images.train.images), network).begin()


@pytest.mark.parametrize("changes", [{"bases": 15}, {"addressing": "one-hot", "bases": None}])
def test_samples_are_recalled(changes):
    """Each class recalls training images of its own: as many bases as samples, at full size."""
    images, state = begun(init="samples", images_per_class=6, downsample=1, **changes)
    recalled = recall(state.bases, state.addressing, torch.eye(3), (4, 4)).detach()
    labels = torch.arange(3).repeat_interleave(len(state.addressing))
    real = Preprocess.fit(images.train.images)(images.train.images)
    far, nearest = (recalled[:, None] - real).flatten(2).norm(dim=2).min(1)
    assert torch.equal(images.train.labels[nearest], labels)
    if "addressing" in changes:
        assert far.max() == 0
        assert len(nearest.unique()) == len(nearest)
    assert state.addressing.requires_grad == ("addressing" not in changes)


def test_unit_recalls_have_variance_one():
    _, state = begun(init="unit", images_per_class=12, bases=8)
    assert recall(state.bases, state.addressing, torch.eye(3), (4, 4)).var().item() == pytest.approx(1, abs=0.35)


def test_the_fresh_start_is_the_seed_s():
    first, again, other = (begun(seed=seed)[1] for seed in (0, 0, 1))
    assert torch.equal(first.bases, again.bases)
    assert not torch.equal(first.bases, other.bases)
    assert begun(init="xavier")[1].bases.abs().max() != begun(init="kaiming")[1].bases.abs().max()
