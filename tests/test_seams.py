"""What a stranger can define in ten lines each: an objective, a query kind, an executor. Through the public interface alone."""

from dataclasses import dataclass

import pytest
import torch
from test_distillation import CONFIG, toy

import recollect
from recollect import Memory, RecollectError, distill
from recollect.config import changed
from recollect.objectives import Found, Objective


class MeanImages:
    """Squared distance between the mean recalled and the mean real image of each class; it counts its steps."""

    def __init__(self, network, *_):
        self.classes, self.steps = network.classes, 0

    def draw(self, labels, chance):
        return None

    def gradient(self, recalled, real, drawn):
        self.steps += 1
        one_hot = torch.nn.functional.one_hot(recalled.labels, self.classes).float()
        images = recalled.images.requires_grad_()
        ours = torch.einsum("nc,n...->c...", one_hot / one_hot.sum(0), images)
        theirs = torch.stack([real.images[real.labels == label].mean(0) for label in range(self.classes)])
        value = (ours - theirs).square().sum()
        return Found(value.detach(), torch.autograd.grad(value, images)[0])

    def to_dict(self):
        return {"steps": self.steps}

    def load(self, saved):
        self.steps = saved["steps"]


@dataclass
class TwoNumbers:
    """Each class is asked for with a vector of two numbers: a place on a circle."""

    config: object
    shape: tuple
    classes: int
    size, shots, each, ways = 2, 0, 1, None

    def fresh(self, seed, device):
        return {}

    def vectors(self, params, labels, pictures):
        angles = labels * (2 * torch.pi / self.classes)
        return torch.stack([angles.cos(), angles.sin()], 1)

    def header(self):
        return {"kind": "circle", "size": 2}


@pytest.mark.parametrize("addressing", ["learned", "one-hot"])
def test_an_objective_of_ones_own(addressing):
    assert issubclass(MeanImages, Objective)
    config = changed(CONFIG, outer_steps=40, outer_lr=0.1, addressing=addressing, bases=None, init="unit")
    lines = []
    memory = distill(toy(), config, objective=MeanImages, progress=lines.append)
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert memory.header.made["config"]["objective"] == "custom MeanImages"
    assert recollect.evaluate(memory, toy(), networks=2).mean > 50  # of three classes


def test_its_state_is_in_the_checkpoint(tmp_path):
    config = changed(CONFIG, outer_steps=4)
    made = []

    def watched(*arguments):
        made.append(MeanImages(*arguments))
        return made[-1]

    def stop(line):
        if line["step"] == 2:
            raise KeyboardInterrupt

    whole = distill(toy(), config, objective=watched, run=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        distill(toy(), changed(config, checkpoint_seconds=0.0), objective=watched, run=tmp_path / "run", progress=stop)
    parts = distill(toy(), changed(config, checkpoint_seconds=0.0), objective=watched, run=tmp_path / "run", resume=True)
    assert torch.equal(parts.bases, whole.bases)
    assert made[-1].steps == 4 > made[-2].steps


def test_a_query_kind_of_ones_own(tmp_path):
    """Its file can be asked with vectors, also between those of the classes; and says so where it is asked by name."""
    config = changed(CONFIG, outer_steps=60, inner_steps=15, inner_lr=0.1, outer_lr=0.05, init="unit")
    distill(toy(), config, query=TwoNumbers).save(tmp_path / "circle.safetensors")
    memory = Memory.load(tmp_path / "circle.safetensors")
    assert memory.addressing.shape[1] == 2
    images, rows = memory.recall(TwoNumbers(None, (), 3).vectors({}, torch.arange(3), None))
    assert images.shape[1:] == (1, 4, 4)
    assert rows.tolist() == [row for row in range(3) for _ in range(len(memory.addressing))]
    network = recollect.Network("mlp:width=8", (1, 4, 4), 3)
    theta = {name: p.requires_grad_() for name, p in network.fresh(0).items()}
    for _ in range(200):
        gradients = torch.autograd.grad(network.loss(theta, images, rows), list(theta.values()))
        theta = {name: p - 0.1 * g for (name, p), g in zip(theta.items(), gradients, strict=True)}
    prepared = memory.preprocess()(toy().test.images)
    assert (network.logits(theta, prepared).argmax(1) == toy().test.labels).float().mean() > 0.7
    with pytest.raises(RecollectError, match=r"is asked with vectors \(circle\): give floats \[Q, 2\]"):
        memory.recall(["top"])
