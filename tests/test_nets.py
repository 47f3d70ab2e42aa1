"""The networks: the paper's sizes, logits for every image size, seeds, options, and what is refused."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from recollect.errors import RecollectError
from recollect.nets import NETWORKS, InstanceNorm, Network, constructor, threads_for

NARROW = ["convnet:width=4", "resnet12:width=2", "alexnet:width=2", "mlp:width=8", "lamaml:width=16,hidden=32"]


def count(network, shape, classes) -> int:
    return sum(p.numel() for p in Network(network, shape, classes).fresh(0).values())


# Sizes


def test_the_papers_convnet_has_its_320010_parameters():
    """What design.md counts: 320,010 floats a step of the trajectory."""
    params = Network("convnet", (3, 32, 32), 10).fresh(0)
    assert sum(p.numel() for p in params.values()) == 320_010
    assert [tuple(p.shape) for p in params.values()] == [
        *[(128, 3, 3, 3), (128,), (128,), (128,)],
        *[(128, 128, 3, 3), (128,), (128,), (128,)] * 2,
        *[(10, 2048), (10,)],
    ]


def test_the_papers_convnet_layer_by_layer():
    kinds = [type(layer) for layer in Network("convnet", (3, 32, 32), 10).module]
    assert kinds == [*[nn.Conv2d, InstanceNorm, nn.ReLU, nn.AvgPool2d] * 3, nn.Flatten, nn.Linear]


def test_resnet12_is_its_blocks_written_out():
    network = Network("resnet12:width=3", (2, 16, 16), 4)
    params = {name: p.double() for name, p in network.fresh(0).items()}
    assert len(params) == 4 * (3 * 3 + 3) + 2
    x = torch.randn(2, 2, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = network.logits(params, x)
    tensors = iter(params.values())

    def normed(x, padding):
        weight, scale, shift = (next(tensors) for _ in range(3))
        x = F.conv2d(x, weight, padding=padding)
        return F.group_norm(x, x.shape[1], scale, shift)

    for side in (8, 4, 2, 2):
        body = normed(F.relu(normed(F.relu(normed(x, 1)), 1)), 1)
        x = F.relu(body + normed(x, 0))
        x = F.max_pool2d(x, 2) if x.shape[-1] > side else x
        assert x.shape[-1] == side
    torch.testing.assert_close(logits, F.linear(x.flatten(1), *tensors))


def test_alexnet_layer_by_layer():
    network = Network("alexnet:width=2", (3, 32, 32), 4)
    layers = [type(layer) for layer in network.module]
    block = [nn.Conv2d, InstanceNorm, nn.ReLU]
    pooled = [*block, nn.MaxPool2d]
    assert layers == [*pooled, *pooled, *block, *block, *pooled, nn.Flatten, nn.Linear]
    kernels = [tuple(p.shape) for p in network.fresh(0).values() if p.ndim == 4]
    assert kernels == [(4, 3, 5, 5), (6, 4, 5, 5), (8, 6, 3, 3), (6, 8, 3, 3), (6, 6, 3, 3)]


def test_28x28_images_are_padded_to_32x32_maps():
    network = Network("convnet", (1, 28, 28), 10)
    maps = network.module[:1](torch.zeros(2, 1, 28, 28))
    assert maps.shape[2:] == (32, 32)
    assert network.module[:-2](torch.zeros(2, 1, 28, 28)).shape == (2, 128, 4, 4)
    assert network.module[-1].in_features == 2048


@pytest.mark.parametrize(
    ("network", "shape", "features"),
    [
        ("convnet", (3, 64, 64), 128 * 4 * 4),
        ("convnet:depth=3", (3, 64, 64), 128 * 8 * 8),
        ("convnet:depth=1,width=5", (3, 32, 32), 5 * 16 * 16),
        ("resnet12", (3, 32, 32), 512 * 2 * 2),
        ("alexnet", (3, 32, 32), 192 * 4 * 4),
        ("mlp", (1, 28, 28), 256),
    ],
)
def test_the_features_of_the_last_layer(network, shape, features):
    *_, last = Network(network, shape, 7).module
    assert (last.in_features, last.out_features) == (features, 7)


def test_the_mlp_of_the_continual_protocol():
    assert count("mlp", (1, 28, 28), 10) == 784 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10
    assert count("mlp:depth=1,width=4", (1, 2, 2), 3) == 4 * 4 + 4 + 4 * 3 + 3


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(2, 2), (3, 5), (8, 8), (16, 16), (28, 28), (32, 32), (32, 20), (64, 64)], ids=str)
@pytest.mark.parametrize("name", NARROW)
def test_logits_for_every_size(name, size, channels):
    network = Network(name, (channels, *size), 5)
    images = torch.randn(3, channels, *size, generator=torch.Generator().manual_seed(0))
    params = network.fresh(1)
    logits = network.logits(params, images)
    assert logits.shape == (3, 5)
    assert logits.isfinite().all()
    assert not torch.allclose(logits[0], logits[1])  # the images do matter
    torch.testing.assert_close(network.logits(params, images[1:2]), logits[1:2], rtol=1e-4, atol=1e-5)


def test_narrow_networks_are_all_there_are():
    assert [name.partition(":")[0] for name in NARROW] == list(NETWORKS)


# InstanceNorm


@pytest.mark.parametrize("size", [(8, 8), (2, 3), (1, 2)], ids=str)
def test_instance_norm_is_group_norm_with_a_group_for_each_channel(size):
    generator = torch.Generator().manual_seed(0)
    ours, torchs = InstanceNorm(6).double(), nn.GroupNorm(6, 6).double()
    for name in ("weight", "bias"):
        values = torch.randn(6, generator=generator, dtype=torch.float64)
        getattr(ours, name).data, getattr(torchs, name).data = values, values.clone()
    x = torch.randn(4, 6, *size, generator=generator, dtype=torch.float64) * 3 + 2
    weights = torch.randn(4, 6, *size, generator=generator, dtype=torch.float64)
    found = []
    for norm in (ours, torchs):
        leaf = x.clone().requires_grad_()
        value = norm(leaf)
        gradients = torch.autograd.grad((value * weights).sum(), [leaf, norm.weight, norm.bias])
        found.append([value, *gradients])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_instance_norm_starts_as_torchs_and_has_no_statistics():
    ours, torchs = InstanceNorm(6), nn.GroupNorm(6, 6)
    assert {n: p.tolist() for n, p in ours.named_parameters()} == {n: p.tolist() for n, p in torchs.named_parameters()}
    assert list(ours.buffers()) == []


def test_instance_norm_differentiates_twice():
    norm = InstanceNorm(2).double()
    x = torch.randn(2, 2, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(norm, (x,))


# Seeds


@pytest.mark.parametrize("name", NARROW)
def test_a_seed_is_a_start_and_another_seed_another(name):
    network, again = (Network(name, (3, 16, 16), 5) for _ in range(2))
    first = network.fresh(3)
    torch.rand(7)
    second, other = again.fresh(3), network.fresh(4)
    assert list(first) == list(second) == list(other)
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert all(first[n].data_ptr() != network.fresh(3)[n].data_ptr() for n in first)
    matrices = [n for n, p in first.items() if p.ndim > 1]
    assert matrices
    assert not any(torch.equal(first[n], other[n]) for n in matrices)
    assert not any(p.requires_grad for p in first.values())


def test_a_fresh_start_is_torchs_own():
    """The default initialisation of torch, as the networks are plain modules."""
    torch_state = torch.get_rng_state()
    try:
        torch.manual_seed(11)
        module = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5))
    finally:
        torch.set_rng_state(torch_state)
    fresh = Network("mlp:width=8,depth=1", (3, 2, 2), 5).fresh(11)
    assert all(torch.equal(fresh[name], p) for name, p in module.named_parameters())


@pytest.mark.parametrize("name", NARROW)
def test_drawn_on_a_gpu_as_torch_initialises(name):
    """By the draws of a GPU, here made on the CPU: the same bounds and deviations, and the norms' constants."""
    network = Network(name, (3, 16, 16), 5)
    ours, theirs = network._uniform(torch.Generator().manual_seed(1)), network.fresh(0)
    assert list(ours) == list(theirs)
    for name, p in theirs.items():
        assert ours[name].shape == p.shape
        if p.numel() > 500:
            assert 0.9 < float(ours[name].std() / p.std()) < 1.1
            assert 0.95 < float(ours[name].abs().max() / p.abs().max()) < 1.05
            assert not torch.equal(ours[name], p)  # another seed, another start
        elif p.unique().numel() == 1:
            assert torch.equal(ours[name], p)
    again = network._uniform(torch.Generator().manual_seed(1))
    assert all(torch.equal(ours[name], p) for name, p in again.items())


def test_the_global_generators_are_left_alone(monkeypatch):
    def reseeded(*_):
        raise AssertionError("the generators of the GPUs were reseeded")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", reseeded)
    before = torch.get_rng_state()
    network = Network("convnet:width=4", (3, 8, 8), 5)
    network.fresh(9)

    def broken(shape, classes):
        torch.rand(5)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Network(broken, (3, 8, 8), 5)
    assert torch.equal(torch.get_rng_state(), before)


# Logits and loss


def test_logits_are_a_function_of_the_parameters_given():
    network = Network("convnet:width=4", (3, 8, 8), 5)
    images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    params = {name: p.clone().requires_grad_() for name, p in network.fresh(1).items()}
    plain = network.construct((3, 8, 8), 5)
    plain.load_state_dict(params)
    torch.testing.assert_close(network.logits(params, images), plain(images))
    gradients = torch.autograd.grad(network.logits(params, images).square().sum(), list(params.values()))
    assert all(g.abs().sum() > 0 for name, g in zip(params, gradients, strict=True) if name.endswith("weight"))
    zeros = {name: torch.zeros_like(p) for name, p in params.items()}
    assert network.logits(zeros, images).abs().max() == 0


def test_loss_is_the_mean_cross_entropy():
    network = Network("mlp:width=8", (1, 2, 2), 3)
    params = {name: p.double() for name, p in network.fresh(0).items()}
    images = torch.randn(4, 1, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([0, 2, 1, 1])
    probabilities = network.logits(params, images).softmax(1)
    by_hand = -sum(probabilities[n, label].log() for n, label in enumerate(labels)) / 4
    torch.testing.assert_close(network.loss(params, images, labels), by_hand)


# Options


def test_options_are_passed_on():
    assert count("convnet:width=7,depth=2", (3, 8, 8), 2) == 3 * 7 * 9 + 21 + 7 * 7 * 9 + 21 + 7 * 4 * 2 + 2
    assert count("convnet:", (3, 8, 8), 2) == count("convnet", (3, 8, 8), 2)
    assert count("convnet:depth=2,width=7", (3, 8, 8), 2) == count("convnet:width=7,depth=2", (3, 8, 8), 2)
    assert count("resnet12:width=4", (3, 8, 8), 2) < count("resnet12:width=8", (3, 8, 8), 2)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("convnt", "unknown network 'convnt': did you mean 'convnet'.* any function"),
        ("resnet", "unknown network 'resnet': did you mean 'resnet12'"),
        ("", "unknown network ''"),
        ("convnet:widht=3", "unknown option of convnet 'widht': did you mean 'width'.* known: depth, width"),
        ("resnet12:depth=3", "unknown option of resnet12 'depth'.* known: width"),
        ("convnet:shape=3", "unknown option of convnet 'shape'"),
        ("convnet:width=0", "network 'convnet:width=0': width is '0', not a positive whole number"),
        ("convnet:width=-4", "width is '-4', not a positive whole number"),
        ("convnet:width=1.5", "width is '1.5', not a positive"),
        ("convnet:width=", "width is '', not a positive"),
        ("convnet:width", r"width is '', not a positive whole number \(convnet:width=2\)"),
    ],
)
def test_a_wrong_name_or_option_offers_the_nearest(network, message):
    with pytest.raises(RecollectError, match=message):
        constructor(network)


# Any function is a network


def test_a_function_is_a_network():
    def pooled(shape, classes):
        return nn.Sequential(nn.Conv2d(shape[0], 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))

    assert constructor(pooled) is pooled
    network = Network(pooled, (2, 5, 9), 3)
    assert network.logits(network.fresh(0), torch.zeros(4, 2, 5, 9)).shape == (4, 3)
    assert torch.equal(network.fresh(2)["0.weight"], Network(pooled, (2, 5, 9), 3).fresh(2)["0.weight"])


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm2d(4), nn.InstanceNorm2d(4, track_running_stats=True)], ids=["BatchNorm", "InstanceNorm"]
)
def test_running_statistics_are_refused_with_the_remedy(layer):
    def with_buffers(shape, classes):
        return nn.Sequential(nn.Conv2d(shape[0], 4, 3), layer, nn.Flatten(), nn.LazyLinear(classes))

    with pytest.raises(RecollectError, match=r"keeps buffers .*BatchNorm.* use InstanceNorm or GroupNorm"):
        Network(with_buffers, (3, 8, 8), 5)


def test_norms_without_statistics_are_taken():
    def grouped(shape, classes):
        return nn.Sequential(nn.Conv2d(shape[0], 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4 * 36, classes))

    assert Network(grouped, (3, 8, 8), 5).fresh(0)


@pytest.mark.parametrize("name", ["convnet:width=4", "resnet12:width=2", "alexnet:width=2"])
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1)], ids=str)
def test_images_that_are_too_small_are_refused(name, size):
    with pytest.raises(RecollectError, match=f"images of {size[0]}x{size[1]} are too small for '{name}': use mlp"):
        Network(name, (3, *size), 5)
    assert Network("mlp:width=4", (3, *size), 5).fresh(0)


def test_fresh_in_threads():
    network = Network("mlp:width=64", (1, 8, 8), 3)
    alone = [network.fresh(seed) for seed in range(40)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(network.fresh, range(40)))
    for a, b in zip(alone, together, strict=True):
        assert all(torch.equal(p, b[name]) for name, p in a.items())


def test_a_small_network_has_one_thread(monkeypatch):
    """Also while others want it too; afterwards there are as many as before."""
    count = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: count[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: count.__setitem__(0, number))
    small = Network("mlp:width=8", (1, 8, 8), 3)
    one, other = (threads_for(small) for _ in range(2))
    for enter, exit, expected in ((one, None, 1), (other, None, 1), (None, one, 1), (None, other, 4)):
        enter.__enter__() if enter else exit.__exit__(None, None, None)
        assert count == [expected]
    for large in (Network("mlp:width=512", (1, 28, 28), 10), Network("convnet:width=4,depth=1", (1, 8, 8), 3)):
        with threads_for(large):
            assert count == [4]
    with pytest.raises(ValueError, match="x"), threads_for(small):
        raise ValueError("x")
    assert count == [4]
