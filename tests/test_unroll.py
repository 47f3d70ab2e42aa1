"""The metagradient against a plain full-graph autograd loop in float64, and against finite differences."""

import shutil

import pytest
import torch
from torch import Tensor

from recollect import unroll
from recollect.errors import RecollectError
from recollect.fast.compiled import compiled
from recollect.nets import Network

SHAPE = (2, 8, 8)
NETWORKS = ["convnet:width=4,depth=2", "resnet12:width=2", "alexnet:width=2", "mlp:width=6"]


def oracle(loss, params, images, labels, batches, query, *, lr, momentum, bridge, window, optimiser, augment):
    """The inner loop written out with torch.optim's update rules, one graph over all of it."""
    images = images.clone().requires_grad_()
    theta = {name: p.clone().requires_grad_() for name, p in params.items()}
    beta = 0.0 if bridge == "none" else momentum
    mean = {name: torch.zeros_like(p) for name, p in theta.items()}
    square = {name: torch.zeros_like(p) for name, p in theta.items()}
    steps = len(batches)
    for t in range(steps):
        if window is not None and t == steps - window:  # cut all that leads here
            theta = {name: p.detach().requires_grad_() for name, p in theta.items()}
            mean = {name: m.detach() for name, m in mean.items()}
            square = {name: v.detach() for name, v in square.items()}
        inside = window is None or t >= steps - window
        source = images if inside else images.detach()
        batch = source[batches[t]]
        if augment:
            batch = augment(batch, t)
        gradient = torch.autograd.grad(loss(theta, batch, labels[batches[t]]), list(theta.values()), create_graph=True)
        if bridge == "forward-only":  # the bridge is cut; the current gradient is not
            mean = {name: m.detach() for name, m in mean.items()}
            square = {name: v.detach() for name, v in square.items()}
        for name, g in zip(list(theta), gradient, strict=True):
            if optimiser == "sgd":
                mean[name] = beta * mean[name] + g
                theta[name] = theta[name] - lr * mean[name]
            else:
                mean[name] = beta * mean[name] + (1 - beta) * g
                square[name] = 0.999 * square[name] + 0.001 * g * g
                # the smallest possible floor under the root, so that autograd's 0 * inf is 0
                root = (square[name] / (1 - 0.999 ** (t + 1))).clamp_min(1e-300).sqrt()
                theta[name] = theta[name] - lr * mean[name] / (1 - beta ** (t + 1)) / (root + 1e-8)
    value = loss(theta, *query)
    (by_images,) = torch.autograd.grad(value, images)
    return unroll.MetaGradient(value.detach(), by_images, {name: p.detach() for name, p in theta.items()})


def setting(network: str, steps: int = 5, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    net = Network(network, SHAPE, 3)
    params = {name: p.double() for name, p in net.fresh(seed).items()}
    images = torch.randn(6, *SHAPE, generator=generator, dtype=torch.float64)
    labels = torch.arange(6) % 3
    batches = torch.stack([torch.randperm(6, generator=generator)[:4] for _ in range(steps)])
    query = (torch.randn(5, *SHAPE, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1]))
    return net.loss, params, images, labels, batches, query


def shift(images: Tensor, step: int) -> Tensor:
    """An augmentation that mixes pixels differently at each step."""
    return torch.roll(images, step, dims=-1) * (1 + 0.1 * step) + 0.2 * images.flip(-2)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("augment", [None, shift], ids=["plain", "augmented"])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("bridge", ["full", "forward-only", "none"])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("network", NETWORKS)
def test_against_full_graph(network, optimiser, bridge, window, augment):
    options = dict(lr=0.05 if optimiser == "sgd" else 1e-3, momentum=0.9, bridge=bridge, window=window)
    options |= dict(optimiser=optimiser, augment=augment)
    ours = unroll.metagradient(*setting(network), **options)
    theirs = oracle(*setting(network), **options)
    assert distance(ours.loss, theirs.loss) < 1e-12
    assert distance(ours.images, theirs.images) < 1e-10
    for name, p in theirs.params.items():  # Adam turns the rounding of a bias before a norm (true gradient 0) into steps
        assert torch.allclose(ours.params[name], p, rtol=0, atol=1e-12 if optimiser == "sgd" else 1e-9)


@pytest.mark.parametrize("bridge", ["full", "forward-only", "none"])
def test_bridges_differ(bridge):
    """The three are three: none equals another, so a bridge that is ignored would be noticed."""
    found = unroll.metagradient(*setting("mlp:width=6"), lr=0.05, momentum=0.9, bridge=bridge).images
    for other in {"full", "forward-only", "none"} - {bridge}:
        assert distance(unroll.metagradient(*setting("mlp:width=6"), lr=0.05, momentum=0.9, bridge=other).images, found) > 0.05


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_against_finite_differences(optimiser):
    loss, params, images, labels, batches, query = setting("mlp:width=6", steps=8)
    options = dict(lr=0.05 if optimiser == "sgd" else 1e-3, momentum=0.9, optimiser=optimiser)
    found = unroll.metagradient(loss, params, images, labels, batches, query, **options).images
    direction = torch.randn(images.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    epsilon = 1e-6
    ahead, behind = (
        unroll.metagradient(loss, params, images + sign * epsilon * direction, labels, batches, query, **options).loss
        for sign in (1, -1)
    )
    assert torch.isclose((found * direction).sum(), (ahead - behind) / (2 * epsilon), rtol=1e-5)


def test_adam_with_a_dead_unit():
    """A weight whose gradient is always 0 leaves v at 0: the adjoint must stay finite and exact."""
    loss, params, images, labels, batches, query = setting("mlp:width=6")
    params["1.bias"][0], params["1.weight"][0] = -100.0, 0.0
    options = dict(lr=1e-3, momentum=0.9, bridge="full", window=None, optimiser="adam", augment=None)
    ours = unroll.metagradient(loss, params, images, labels, batches, query, **options)
    theirs = oracle(loss, params, images, labels, batches, query, **options)
    assert distance(ours.images, theirs.images) < 1e-10


def test_images_outside_the_batches_have_no_gradient():
    loss, params, images, labels, _, query = setting("mlp:width=6")
    batches = torch.tensor([[0, 1], [1, 2]])
    found = unroll.metagradient(loss, params, images, labels, batches, query, lr=0.1, momentum=0.9).images
    assert found[3:].abs().max() == 0
    assert found[:3].flatten(1).norm(dim=1).min() > 0


def test_a_row_twice_in_a_batch_counts_twice():
    loss, params, images, labels, _, query = setting("mlp:width=6")
    batches = torch.tensor([[0, 0, 1]])
    options = dict(lr=0.05, momentum=0.9, bridge="full", window=None, optimiser="sgd", augment=None)
    ours = unroll.metagradient(loss, params, images, labels, batches, query, **options).images
    assert distance(ours, oracle(loss, params, images, labels, batches, query, **options).images) < 1e-10


@pytest.mark.parametrize("window", [0, -1, 6])
def test_bad_window(window):
    with pytest.raises(RecollectError, match=f"window of {window} steps in an unroll of 5"):
        unroll.metagradient(*setting("mlp:width=6"), lr=0.1, momentum=0.9, window=window)


def test_without_a_compiler_it_says_so_and_runs(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    loss, params, images, labels, batches, query = setting("mlp:width=6", steps=2)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        slow = compiled(loss)
    found = unroll.metagradient(loss, params, images, labels, batches, query, lr=0.05, momentum=0.9, passes=slow)
    assert found.images.isfinite().all()
