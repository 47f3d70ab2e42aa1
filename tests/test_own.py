"""What is given in Python: loss, augmentation, optimiser, pool, objective. The docs' examples run; mistakes are one line."""

import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from test_distillation import CONFIG, toy
from test_seams import MeanImages
from torch import nn
from torch.nn import functional as F

from recollect import RecollectError, distill
from recollect.cli import main
from recollect.config import changed
from recollect.data import augment
from recollect.data.preprocess import Preprocess
from recollect.decisions import resolve
from recollect.distiller import Distiller
from recollect.nets import Network, mlp
from recollect.objectives import Found
from recollect.runs import Run, Stopped, load_checkpoint

PAGE = Path(__file__).parent.parent / "docs" / "objectives.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


@pytest.mark.parametrize("example", EXAMPLES, ids=["objective", "loss", "augment", "optimiser", "pool"])
def test_the_page_s_examples_run(example):
    found: dict = {}
    exec(compile(example, "objectives.md", "exec"), found)
    assert found["memory"].header.made["steps"] == 20
    assert [value for value in found["memory"].header.made["config"].values() if str(value).startswith("custom ")]


def focal(logits, labels):
    chances = torch.log_softmax(logits, 1).gather(1, labels[:, None])[:, 0]
    return -((1 - chances.exp()) ** 2 * chances).mean()


def noise(batch, generator):
    return batch * (1 + 0.5 * torch.rand(len(batch), 1, 1, 1, generator=generator).to(batch)) + 0.1 * batch.flip(-1)


def networks(count: int = 3) -> list[nn.Module]:
    net = Network("mlp:width=8", (1, 4, 4), 3)
    return [net._build(100 + number) for number in range(count)]


def tensors(memory):
    return torch.cat([memory.bases.flatten(), memory.addressing.flatten()])


# --- each does what it says --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["mlp:width=8", "convnet:width=4,depth=1"])
def test_a_loss_is_the_inner_and_the_outer_one(network):
    """Cross-entropy of one's own gives what the usual one gives; another, another memory."""
    config = changed(CONFIG, network=network)
    usual = distill(toy(), config)
    again = distill(toy(), config, loss=lambda logits, labels: F.cross_entropy(logits, labels))
    torch.testing.assert_close(tensors(again), tensors(usual), rtol=1e-4, atol=1e-5)
    other = distill(toy(), config, loss=focal)
    assert not torch.allclose(tensors(other), tensors(usual), rtol=1e-2)
    assert other.header.made["config"]["loss"] == "custom focal"


@pytest.mark.parametrize("network", ["mlp:width=8", "convnet:width=16,depth=1"])
def test_an_augmentation_is_seen_by_every_inner_step(network):
    """The gradient by the recalled images is that of one graph, with the augmentation called by hand."""
    images = toy() if network.startswith("mlp") else eight()
    config = resolve(changed(CONFIG, network=network, networks_per_step=2, inner_per_class=2, compute="fp32"), images)
    net = Network(network, images.shape, 3)
    distiller = Distiller(images, config, Preprocess.fit(images.train.images), net, augmented=noise)
    state = distiller.begin()
    drawn = distiller.draw(0, len(state.addressing))
    recalled = distiller._recall(drawn, state)
    found = distiller.objective.gradient(recalled._replace(images=recalled.images.detach()), recalled, drawn.objective)
    leaf, total = recalled.images.detach().double().requires_grad_(), 0
    seeds = []
    for start in drawn.objective:
        theta = {name: p.double().requires_grad_() for name, p in start.params.items()}
        velocity = {name: torch.zeros_like(p) for name, p in theta.items()}
        for t, rows in enumerate(start.batches):
            (numbers,) = start.augment.numbers.values()
            high, low = (int(number * 2**24) for number in numbers[t, 0].double())
            generator = torch.Generator().manual_seed(high * 2**24 + low)
            seeds.append(generator.initial_seed())
            loss = net.loss(theta, noise(leaf[rows], generator), recalled.labels[rows])
            slopes = torch.autograd.grad(loss, list(theta.values()), create_graph=True)
            for name, slope in zip(list(theta), slopes, strict=True):
                velocity[name] = config.inner.momentum * velocity[name] + slope
                theta[name] = theta[name] - config.inner.lr * velocity[name]
        total = total + net.loss(theta, recalled.images.detach().double(), recalled.labels) / 2
    assert len(set(seeds)) == 2 * config.inner.steps
    (expected,) = torch.autograd.grad(total, leaf)
    assert float((found.images - expected).norm() / expected.norm()) < 1e-3


def eight():
    import recollect

    return recollect.load("digits").only(["0", "1", "2"])


def test_batches_side_by_side_have_generators_of_their_own():
    images, seen = torch.rand(5, 1, 2, 2), []
    one, two = (augment.draw((noise,), count, torch.Generator().manual_seed(count)) for count in (2, 3))
    both = {noise: torch.cat([one[noise], two[noise]])}
    seen = torch.cat([augment.apply(images[:2], one), augment.apply(images[2:], two)])
    assert torch.equal(augment.apply(images, both), seen)
    assert not torch.equal(augment.apply(images[:2], two | {noise: two[noise][:2]}), seen[:2])


def test_any_optimiser_of_torch():
    """The usual one by its class gives the same bytes; the schedule drives its rate; others are others."""
    usual = distill(toy(), CONFIG)
    again = distill(toy(), CONFIG, optimiser=partial(torch.optim.Adam, betas=(0.9, 0.999)))
    assert torch.equal(tensors(again), tensors(usual))
    assert again.header.made["config"]["outer_optimiser"] == "custom partial"
    for kind in (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Adafactor):
        assert not torch.allclose(tensors(distill(toy(), CONFIG, optimiser=kind)), tensors(usual))


def test_inner_networks_begin_with_those_of_a_pool(monkeypatch):
    """By their modules or their weights; several are drawn from."""
    from recollect import unroll

    real, seen = unroll.metagradient, []
    monkeypatch.setattr(unroll, "metagradient", lambda *given, **more: (seen.append(given[1]), real(*given, **more))[1])
    modules = networks()
    memory = distill(toy(), CONFIG, pool=modules)
    weights = [dict(module.state_dict()) for module in modules]
    which = [[all(torch.equal(theta[n], w[n]) for n in w) for w in weights].index(True) for theta in seen]
    assert len(which) == 6
    assert len(set(which)) > 1
    again = distill(toy(), CONFIG, pool=weights)
    assert torch.equal(tensors(again), tensors(memory))
    assert memory.header.made["config"]["pool"].startswith("custom 3 networks, ")


# --- checkpoints ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["unrolled", "regression", "gradients", "distributions"])
def test_resumes_bit_for_bit(objective, tmp_path):
    config = changed(CONFIG, objective=objective, **({"network_lasts": 4} if objective == "gradients" else {}))
    amsgrad = partial(torch.optim.AdamW, amsgrad=True)
    given = {"loss": focal, "augment": noise, "optimiser": amsgrad, "pool": networks()}
    distill(toy(), config, run=tmp_path / "whole", **given)

    def stop(line):
        if line["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        distill(toy(), config, run=tmp_path / "parts", progress=stop, **given)
    assert load_checkpoint(Run(tmp_path / "parts").checkpoint_path)["config"]["loss"] == "custom focal"
    for name, without in (("loss", "usual"), ("augment", "none"), ("optimiser", "adam"), ("pool", "none")):
        less = {key: value for key, value in given.items() if key != name}
        with pytest.raises(RecollectError, match=rf"was begun with \w*{name} 'custom .*', not '{without}'"):
            distill(toy(), config, run=tmp_path / "parts", resume=True, **less)
    with pytest.raises(RecollectError, match="was begun with pool 'custom 3 networks, "):
        distill(toy(), config, run=tmp_path / "parts", resume=True, **given | {"pool": networks()[::-1]})
    distill(toy(), config, run=tmp_path / "parts", resume=True, **given)
    memories = [(tmp_path / folder / "memory.safetensors").read_bytes() for folder in ("parts", "whole")]
    assert memories[0] == memories[1]


@pytest.mark.parametrize(
    ("name", "given"), [("loss", focal), ("augment", noise), ("optimiser", torch.optim.RMSprop), ("pool", None)]
)
def test_the_command_line_cannot_go_on_with_it(name, given, tmp_path, capsys):
    run, data = tmp_path / "run", {"name": "digits", "root": None, "size": None, "classes": []}
    distill(toy(), CONFIG, run=run, data=data, **{name: given or networks(1)})
    assert main(["resume", str(run)]) == 2
    assert f"given in Python (custom {'1 networks' if name == 'pool' else given.__name__}" in capsys.readouterr().err
    assert main(["info", str(run)]) == 0


# --- mistakes ------------------------------------------------------------------------------------------------------------------


class Broken(MeanImages):
    """Found, spoilt."""

    spoilt = staticmethod(lambda found: found)

    def gradient(self, recalled, real, drawn):
        return self.spoilt(super().gradient(recalled, real, drawn))


def spoiling(change):
    return type("Mine", (Broken,), {"spoilt": staticmethod(change)})


def linear(inputs, outputs):
    return lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs))


def no_gradient(found):
    return torch.autograd.grad(found.value, found.images)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"objective": spoiling(lambda f: f.value)}, r"objective Mine gives Tensor, not Found\(value, gradient by the recalled"),
        ({"objective": spoiling(lambda f: (f.value, None))}, "objective Mine gives tuple, not Found"),
        ({"objective": spoiling(lambda f: Found(f.value, f.images[:2]))}, r"a gradient of \[2, 1, 4, 4\]: give"),
        ({"objective": spoiling(lambda f: Found(f.images, f.images))}, "objective Mine gives a value of"),
        ({"objective": spoiling(no_gradient)}, r"objective Mine fails \(RuntimeError: element 0 of tensors"),
        ({"objective": lambda network: None}, r"objective .*<lambda> fails \(TypeError: "),
        ({"loss": lambda logits, labels: F.cross_entropy(logits, labels, reduction="none")}, r"gives \[4\], not one number"),
        ({"loss": lambda logits, labels: logits.sum().item()}, "gives float, not one number"),
        ({"loss": lambda logits, labels: (logits.argmax(1) != labels).float().mean()}, "has no gradient by the network"),
        ({"loss": lambda logits, labels: F.cross_entropy(logits, labels[:2])}, r"<lambda> fails \(ValueError: Expected"),
        ({"augment": lambda x, g: x[..., 1:]}, r"makes torch.float32 \[4, 1, 4, 3\] of images of \[4, 1, 4, 4\]: it must keep"),
        ({"augment": lambda x, g: x.numpy()}, r"augment .*<lambda> fails \(\w+Error"),
        ({"augment": lambda x, g: (x > 0).float()}, "has no gradient by the images: leave out detach"),
        ({"augment": lambda x, g: x + torch.randn(x.shape)}, "gives other images when it is called again: draw from"),
        ({"augment": lambda x: x}, r"augment .*<lambda> fails \(TypeError"),
        ({"optimiser": torch.optim.LBFGS}, r"optimiser LBFGS fails \(TypeError: .*closure"),
        ({"optimiser": torch.optim.SparseAdam}, r"optimiser SparseAdam fails \(RuntimeError"),
        ({"optimiser": lambda groups, lr: groups}, "is none of torch.optim: give a class"),
        ({"optimiser": "adam"}, r"optimiser str fails \(TypeError"),
        ({"pool": []}, "pool is empty: give one or more networks"),
        ({"pool": [mlp((1, 4, 4), 3, width=9)]}, "network 0 of the pool has other weights than mlp:width=8: give"),
        ({"pool": [*networks(1), {"1.weight": torch.zeros(8, 16)}]}, "network 1 of the pool has other weights"),
        ({"pool": [7]}, r"pool fails \(AttributeError"),
        ({"network": linear(16, 7)}, r"gives \[4, 7\] for 4 images: give \[4, 3\]"),
        ({"network": linear(17, 3)}, r"network .* fails \(RuntimeError: mat1"),
    ],
)  # fmt: skip
def test_mistakes_are_one_clear_line(given, message, tmp_path):
    with pytest.raises(RecollectError, match=message) as caught:
        distill(toy(), CONFIG, run=tmp_path / "run", **given)
    assert "\n" not in str(caught.value)
    if "objective" not in given:
        assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (changed(CONFIG, augment_scope="outer"), {"augment": noise}, "which images of an outer step cannot share"),
        (changed(CONFIG, objective="distributions", siamese=True), {"augment": noise}, "siamese draws one of several"),
    ],
)  # fmt: skip
def test_what_a_function_cannot_be_asked_for(config, given, message):
    with pytest.raises(RecollectError, match=message):
        distill(toy(), config, **given)
