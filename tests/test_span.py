"""The inner loop in the coordinates of a few bases, against the whole one."""

import pytest
import torch
from test_fast_engine import DEVICE, distance

from recollect import unroll
from recollect.fast import span
from recollect.fast.engine import Engine, Start
from recollect.nets import Network

SHAPE, BASES, IMAGES, NETWORKS = (1, 5, 4), 3, 6, 2


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double).to(DEVICE)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("bridge", ["full", "forward-only", "none"])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("dependent", [False, True])
def test_the_same_metagradient(dependent, window, bridge, depth):
    net = Network(f"mlp:width=8,depth={depth}", SHAPE, 3)
    bases = numbers(NETWORKS, BASES, *SHAPE, seed=0)
    if dependent:
        bases[:, 2] = 0.5 * bases[:, 0] - bases[:, 1]
    images = torch.einsum("snk,skchw->snchw", numbers(NETWORKS, IMAGES, BASES, seed=1), bases)
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(3, (NETWORKS, IMAGES), generator=generator).to(DEVICE)
    query = numbers(NETWORKS, 5, *SHAPE, seed=3), torch.randint(3, (NETWORKS, 5), generator=generator).to(DEVICE)
    starts = [
        Start(
            {name: p.double() for name, p in net.fresh(seed, DEVICE).items()}, torch.randint(IMAGES, (6, 4), generator=generator)
        )
        for seed in range(NETWORKS)
    ]
    options = {"lr": 0.1, "momentum": 0.9, "bridge": bridge, "window": window}
    engine = Engine(span.Spanned(net, BASES))
    for real in (query[0], -query[0]):  # the second with what the first has captured
        _, found = span.by_images(engine, starts, images, labels, (real, query[1]), bases, **options)
        for k, start in enumerate(starts):
            judged = real[k], query[1][k]
            theirs = unroll.metagradient(
                net.loss, start.params, images[k], labels[k], start.batches.to(DEVICE), judged, **options
            )
            assert theirs.images.norm() > 0
            assert distance(found[k], theirs.images) < (1e-6 if dependent else 1e-11)


def test_a_vector_has_room_for_one_more_weight():
    net = Network("mlp:width=8,depth=1", SHAPE, 8)  # whose 8 x 3 + 8 + 8 x 8 + 8 numbers fill no whole number of 32
    for bases in (3, 6):  # 8 x 6 + 80 = 128 do
        flat = span.Spanned(net, bases)
        params = {**net.fresh(0), "1.weight": torch.ones(8, bases)}
        packed = flat.pack(params)
        assert len(packed) % 32 == 0
        assert len(packed) > flat.size
        assert not packed[flat.size :].any()


def test_it_pays_for_perceptrons_and_few_bases():
    assert span.pays(Network("mlp", (1, 28, 28), 10), 24)
    assert not span.pays(Network("mlp:width=8", (1, 4, 4), 10), 9)
    assert not span.pays(Network("lamaml:width=4", (3, 32, 32), 10), 24)
    assert not span.pays(Network("convnet:width=4", (3, 32, 32), 10), 24)


def test_rows_are_orthonormal():
    frame = span.orthonormal(numbers(2, 3, 10, seed=0))
    assert torch.allclose(frame @ frame.mT, torch.eye(3, dtype=torch.double).to(DEVICE).expand(2, 3, 3), atol=1e-8)
    assert not span.orthonormal(torch.zeros(2, 3, 10)).any()  # no span, and no NaN
