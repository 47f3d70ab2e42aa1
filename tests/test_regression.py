"""Kernel ridge regression as an objective: its gradient against float64 autograd, its pool, resume."""

import os
import signal

import pytest
import torch
from test_distillation import CONFIG, toy

import recollect
from recollect import distill
from recollect.config import changed
from recollect.nets import Network
from recollect.objectives import Chance, Examples
from recollect.objectives.regression import MOST_STEPS, POOL, RIDGE, Regression
from recollect.runs import Stopped

SETTINGS = changed(CONFIG, objective="regression", network="convnet:width=4,depth=1", outer_steps=6)


def examples(count: int, seed: int) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    return Examples(torch.randn(count, 1, 4, 4, generator=generator, dtype=torch.float64), torch.arange(count) % 3)


def made(augment: str = "none", per_class: int | None = 2) -> Regression:
    inner = changed(CONFIG.inner, augment=augment, inner_per_class=per_class)
    return Regression(Network("convnet:width=4,depth=1", (1, 4, 4), 3), inner, "cpu")


def test_gradient_by_recalled_images_is_autograd_s():
    """By the inverse itself, in float64, with real features held fixed; rows that were not drawn have none."""
    objective, real = made(), examples(12, 1)
    recalled = Examples(examples(15, 0).images, torch.arange(3).repeat_interleave(5))
    chance = Chance(lambda number: torch.Generator().manual_seed(number), torch.Generator())
    drawn = objective.draw(recalled.labels, chance)
    assert torch.bincount(recalled.labels[drawn.rows]).tolist() == [2, 2, 2]
    objective._fill(3)
    for member in objective.pool:
        member |= {kind: {name: p.double() for name, p in member[kind].items()} for kind in ("params", "mean", "square")}
    params = dict(objective.pool[drawn.member]["params"])
    found = objective.gradient(recalled, real, drawn)

    images = recalled.images.clone().requires_grad_()
    layers = objective.network.module[:-1]
    features = lambda x: torch.func.functional_call(layers, {n: params[n] for n, _ in layers.named_parameters()}, (x,))  # noqa: E731
    ours, theirs = features(images[drawn.rows]), features(real.images).detach()
    kernel = ours @ ours.T
    targets = lambda labels: torch.eye(3, dtype=torch.float64)[labels] - 1 / 3  # noqa: E731
    inverse = torch.linalg.inv(kernel + RIDGE * kernel.trace() / 6 * torch.eye(6, dtype=torch.float64))
    value = ((theirs @ ours.T) @ inverse @ targets(recalled.labels[drawn.rows]) - targets(real.labels)).square().mean()
    (expected,) = torch.autograd.grad(value, images)
    assert found.value.item() == pytest.approx(value.item(), rel=1e-9)
    torch.testing.assert_close(found.images, expected, rtol=1e-6, atol=1e-10)
    assert expected.abs().sum() > 0


def test_the_pool_has_staggered_ages_and_begins_anew():
    objective = made()
    objective._fill(0)
    ages = [member["age"] for member in objective.pool]
    assert ages == [number * MOST_STEPS // POOL for number in range(POOL)]
    before = objective.to_dict()["pool"]
    images, labels = examples(6, 0).images.float(), torch.arange(6) % 3
    losses = []
    for _ in range(5):
        losses.append(float(objective.network.loss(objective.pool[3]["params"], images, labels)))
        objective._age(3, images, labels, 9)
    assert losses == sorted(losses, reverse=True)
    assert (objective.pool[3]["age"], objective.pool[3]["steps"]) == (ages[3] + 5, 5)
    assert [member["age"] for member in before] == ages  # what was held before a step stays
    objective.pool[3]["age"] = MOST_STEPS - 1
    objective._age(3, images, labels, 9)
    assert (objective.pool[3]["age"], objective.pool[3]["steps"]) == (0, 0)
    fresh = objective.network.fresh(9)
    assert all(torch.equal(p, fresh[name]) for name, p in objective.pool[3]["params"].items())
    assert not torch.equal(before[3]["params"]["0.weight"], fresh["0.weight"])


def test_one_adam_step_is_torch_s():
    objective = made()
    member = objective._fresh(0)
    for kind in ("params", "mean", "square"):  # a bias before a norm has a gradient of rounding alone, which Adam blows up
        member[kind] = {name: p.double() for name, p in member[kind].items()}
    objective.pool = [member]
    mine = {name: p.clone().requires_grad_() for name, p in member["params"].items()}
    optimiser = torch.optim.Adam(mine.values(), 3e-4)
    images, labels = examples(6, 0).images, torch.arange(6) % 3
    for _ in range(3):
        optimiser.zero_grad()
        objective.network.loss(mine, images, labels).backward()
        optimiser.step()
        objective._age(0, images, labels, 0)
    for name in ("0.weight", "1.weight", "1.bias", "5.weight", "5.bias"):
        torch.testing.assert_close(objective.pool[0]["params"][name], mine[name].detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("changes", [{}, {"addressing": "one-hot", "bases": None}, {"augment": "flip+crop"}])
def test_resumes_bit_for_bit(changes, tmp_path):
    config = changed(SETTINGS, **changes)
    distill(toy(), config, run=tmp_path / "whole")

    def stop(line):
        if line["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        distill(toy(), config, run=tmp_path / "parts", progress=stop)
    distill(toy(), config, run=tmp_path / "parts", resume=True)
    memories = [(tmp_path / folder / "memory.safetensors").read_bytes() for folder in ("parts", "whole")]
    assert memories[0] == memories[1]


def test_learns():
    config = changed(SETTINGS, outer_steps=150, outer_lr=0.05, init="samples", network="convnet:width=8,depth=1")
    lines = []
    memory = distill(toy(), config, progress=lines.append)
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert recollect.evaluate(memory, toy(), networks=2, recipe=recollect.Recipe("mlp:width=8", lr=0.1)).mean > 80
