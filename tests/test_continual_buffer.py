"""The buffer: reservoir sampling correct to the last sample, balanced sampling, and an account of every float."""

import pytest
import torch

from recollect import RecollectError
from recollect.continual.buffer import Balanced, Buffer, Everything, Reservoir, resized
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
    buffer = Buffer(10, (1, 4, 4), tasks=5, kept=(1, 2, 2))
    assert (buffer.total, buffer.share, buffer.capacity) == (160, 32, 40)
    buffer.store(30)
    assert buffer.capacity == 32  # 130 floats are left
    buffer.note(1, 0, 32)
    with pytest.raises(AssertionError, match="132 floats of samples and 30 of memories exceed 160"):
        buffer.note(1, 0, 33)


def test_resized():
    image = torch.tensor([[[[0, 1, 10, 10], [2, 3, 10, 12]]]], dtype=torch.uint8)
    small = resized(image, (1, 2))
    assert (small.dtype, small.tolist()) == (torch.uint8, [[[[2, 10]]]])  # the means 1.5 and 10.5, rounded to even
    assert resized(image.float(), (1, 2)).tolist() == [[[[1.5, 10.5]]]]
    assert resized(small, (1, 4)).tolist() == [[[[2, 4, 8, 10]]]]
    assert resized(image, (2, 4)) is image
    assert resized(image[:0], (1, 2)).shape == (0, 1, 1, 2)


def test_more_tasks_than_the_buffer_can_serve():
    with pytest.raises(RecollectError, match=r"a buffer of 10 images cannot serve 11 tasks.* at most 10 tasks$"):
        Buffer(10, SHAPE, tasks=11)
