"""The buffer: reservoir sampling correct to the last sample, balanced sampling, and an account of every float."""

import pytest
import torch
from scipy.fft import dctn

from recollect import RecollectError
from recollect.continual.buffer import Balanced, Buffer, Everything, Reservoir, Sketch
from recollect.continual.streams import Batch
from recollect.seeds import seeded

SHAPE = (1, 2, 2)


def batch(labels, task: int = 0) -> Batch:
    labels = torch.as_tensor(labels)
    images = labels.to(torch.uint8)[:, None, None, None].expand(-1, *SHAPE).clone()
    return Batch(images, labels, torch.full_like(labels, task))


def kept(reservoir: Reservoir) -> list[int]:
    labels = reservoir.labels[: len(reservoir)].tolist()
    assert reservoir.images[: len(reservoir), 0, 0, 0].tolist() == labels  # images and labels stay together
    return labels


def test_a_reservoir_keeps_everything_until_it_is_full():
    reservoir = Reservoir(5, SHAPE, seeded(0))
    reservoir.add(batch([3, 1]))
    reservoir.add(batch([4, 2]))
    assert kept(reservoir) == [3, 1, 4, 2]


@pytest.mark.parametrize("size", [2, 7])
def test_every_sample_is_kept_with_the_same_probability(size):
    """The first and the last too: chi-square of how often each of 7 is among 3, over 1,500 reservoirs (6 degrees of freedom;
    22.5 is passed once in a thousand)."""
    repeats, capacity, samples = 1500, 3, 7
    counts = torch.zeros(samples)
    generator = seeded(11, size)
    for _ in range(repeats):
        reservoir = Reservoir(capacity, SHAPE, generator)
        for part in torch.arange(samples).split(size):
            reservoir.add(batch(part))
        found = kept(reservoir)
        assert len(set(found)) == capacity
        counts[found] += 1
    expected = repeats * capacity / samples
    variance = expected * (1 - capacity / samples)
    # counts sum to a constant: the covariance of n draws of k without replacement, inverted
    chi_square = ((counts - expected) ** 2).sum() / variance * (samples - 1) / samples
    assert chi_square < 22.5, counts


def test_a_draw_is_without_replacement_and_can_leave_tasks_out():
    reservoir = Reservoir(10, SHAPE, seeded(0))
    reservoir.add(batch([0, 1, 2], task=0))
    reservoir.add(batch([3, 4], task=1))
    assert sorted(reservoir.draw(99, seeded(1)).labels.tolist()) == [0, 1, 2, 3, 4]
    assert len(reservoir.draw(2, seeded(1)).labels) == 2
    earlier = reservoir.draw(99, seeded(1), lambda tasks: tasks != 1)
    assert sorted(earlier.labels.tolist()) == [0, 1, 2]
    assert reservoir.draw(2, seeded(1)).labels.tolist() == reservoir.draw(2, seeded(1)).labels.tolist()
    assert len(Reservoir(3, SHAPE, seeded(0)).draw(2, seeded(0)).labels) == 0


def test_a_reservoir_can_be_saved():
    one, other = (Reservoir(2, SHAPE, seeded(0)) for _ in range(2))
    one.add(batch([1, 2, 3]))
    other.load(one.to_dict())
    one.add(batch(range(4, 30)))
    other.add(batch(range(4, 30)))
    assert kept(one) == kept(other)


def test_balanced_sampling():
    store = Balanced(4, seeded(0))
    store.add(batch([0] * 10 + [1] * 5))
    assert sorted(store.all().labels.tolist()) == [0, 0, 1, 1]
    store.add(batch([2, 3, 3, 3]))
    assert sorted(store.all().labels.tolist()) == [0, 1, 2, 3]
    everything = Everything()
    everything.add(batch([1, 1]))
    everything.add(batch([2]))
    assert everything.all().labels.tolist() == [1, 1, 2]


def test_the_account():
    buffer = Buffer(10, SHAPE, tasks=5)
    assert (buffer.total, buffer.share, buffer.capacity) == (40, 8, 10)
    buffer.note(0, 0, 10)
    buffer.note(0, 1, 10)
    buffer.store(7)
    buffer.note(0, 2, 0)
    assert buffer.capacity == 8  # 33 floats are left
    assert [(line["samples"], line["memory_floats"]) for line in buffer.log] == [(10, 0), (0, 7)]  # only what changed
    with pytest.raises(AssertionError, match="36 floats of samples and 7 of memories exceed 40"):
        buffer.note(1, 0, 9)
    with pytest.raises(AssertionError, match="a memory of 9 floats does not fit a share of 8"):
        buffer.store(9)


def test_samples_may_be_kept_smaller():
    buffer = Buffer(10, (1, 4, 4), tasks=5, kept_downsample=2)
    assert (buffer.total, buffer.share, buffer.capacity) == (160, 32, 40)
    buffer.store(30)
    assert buffer.capacity == 32  # 130 floats are left
    buffer.note(1, 0, 32)
    with pytest.raises(AssertionError, match="132 floats of samples and 30 of memories exceed 160"):
        buffer.note(1, 0, 33)


def test_a_sketch_has_the_lowest_frequencies():
    shape = 3, 5, 4
    images = torch.randint(256, (6, *shape), dtype=torch.uint8)
    whole = Sketch(shape, 60)
    assert torch.allclose(whole.waves @ whole.waves.T, torch.eye(60), atol=1e-6)
    assert torch.equal(whole.images(whole.of(images), torch.uint8), images)
    expected = torch.as_tensor(dctn(images.double().numpy(), axes=(1, 2, 3), norm="ortho")).flatten(1)
    assert torch.allclose(whole.of(images).double().sort().values, expected.sort().values, atol=1e-3)
    one = Sketch(shape, 1)  # the mean of all
    grey = images.float().mean((1, 2, 3), keepdim=True)
    assert torch.allclose(one.images(one.of(images), torch.float32), grey.expand(-1, *shape), atol=1e-3)
    three = Sketch(shape, 3)  # the mean of each channel, before any place
    colour = images.float().mean((2, 3), keepdim=True)
    assert torch.allclose(three.images(three.of(images), torch.float32), colour.expand(-1, *shape), atol=1e-3)
    assert torch.equal(whole.waves[:20], Sketch(shape, 20).waves)
    waves = Sketch((3, 16, 16), 48).waves.unflatten(1, (3, -1))
    grey = (waves - waves.mean(1, keepdim=True)).abs().amax((1, 2)) < 1e-6
    assert grey.sum() == 31  # colours have half the frequencies on each side: about a quarter of grey's, twice
    assert three.images(three.of(images[:0]), torch.uint8).shape == (0, *shape)


def test_a_sketch_of_pixels_stays_in_their_range():
    edge = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    edge[..., 4:] = 255
    sketch = Sketch((1, 8, 8), 16)
    numbers = sketch.of(edge)
    pixels, floats = (sketch.images(numbers, kind) for kind in (torch.uint8, torch.float32))
    assert (pixels.min(), pixels.max()) == (0, 255)
    assert floats.min() < -1 < 256 < floats.max()


def test_more_tasks_than_the_buffer_can_serve():
    with pytest.raises(RecollectError, match=r"a buffer of 10 images cannot serve 11 tasks.* at most 10 tasks$"):
        Buffer(10, SHAPE, tasks=11)
