"""The learners on tiny streams of each kind, their buffer to the last sample and float, and the metrics computed by hand."""

import pytest
import torch
from scipy.fft import dctn

from recollect import RecollectError, load
from recollect.config import changed
from recollect.continual.buffer import Balanced, Buffer, Everything, Reservoir, Sketch
from recollect.continual.config import LEARNERS, ContinualConfig
from recollect.continual.learners import (
    AGem,
    AllData,
    Compress,
    Ewc,
    GDumb,
    Online,
    Replay,
    accuracy_matrix,
    is_told,
    make,
    taught,
)
from recollect.continual.metrics import mean_matrix, metrics, spread, square
from recollect.continual.streams import Batch, Stream
from recollect.seeds import seeded

CONFIG = changed(ContinualConfig(), 
    tasks=2, per_task=15, buffer=6, network="mlp:width=4", bases=2, inner_steps=2, outer_per_batch=1, replay=4,
    glances=2, gdumb_epochs=2, all_epochs=2, baseline_replay=4,
)  # fmt: skip
KINDS = {
    "rotations": CONFIG,
    "permutations": changed(CONFIG, kind="permutations", downsample=1),
    "split": changed(CONFIG, kind="split", classes_per_task=1, per_task=14, preprocess="normalise"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LEARNERS)
def test_every_learner_on_every_kind_of_stream(toy_images, kind, name):
    found = []
    for seed in (0, 0, 1):
        stream = Stream(toy_images, KINDS[kind], seed)
        found.append(accuracy_matrix(name, taught(make(name, stream, KINDS[kind]), stream), stream))
    matrix = found[0]
    assert matrix == found[1]  # by seed
    assert [[value is None for value in row] for row in matrix] == [[False, True], [False, False]]
    assert all(0 <= value <= 100 for row in matrix for value in row if value is not None)
    assert 0 <= metrics(matrix).ra <= 100


def test_unknown_learner(toy_images):
    with pytest.raises(RecollectError, match="unknown learner 'online2': did you mean 'online'"):
        make("online2", Stream(toy_images, CONFIG), CONFIG)


@pytest.mark.parametrize("name", LEARNERS)
def test_a_task_that_was_never_seen(toy_images, name):
    stream = Stream(toy_images, CONFIG)
    learner = make(name, stream, CONFIG)
    with pytest.raises(RecollectError, match="never saw task 0: it has seen none yet"):
        learner.predict(toy_images.test.images, 0)
    for batch in stream.task(0):
        learner.observe(batch)
    learner.end_task()
    with pytest.raises(RecollectError, match="never saw task 1: it has seen 0 to 0"):
        learner.predict(toy_images.test.images, 1)
    with pytest.raises(RecollectError, match="never saw task -1"):
        learner.predict(toy_images.test.images, -1)


def test_without_the_task_there_must_be_one(toy_images):
    with pytest.raises(RecollectError, match="never saw task 0"):
        GDumb(Stream(toy_images, CONFIG), CONFIG).predict(toy_images.test.images, None)
    with pytest.raises(RecollectError, match="never saw task 0"):
        Compress(Stream(toy_images, CONFIG), CONFIG).predict(toy_images.test.images, None)


@pytest.mark.parametrize("name", LEARNERS)
def test_tasks_come_in_their_order_and_with_samples(toy_images, name):
    stream = Stream(toy_images, CONFIG)
    learner, first, second = make(name, stream, CONFIG), batches(stream), batches(stream, 1)
    with pytest.raises(RecollectError, match="task 0 ends without a batch: a task needs samples"):
        learner.end_task()
    with pytest.raises(RecollectError, match="a batch of task 1 came where task 0 is due"):
        learner.observe(second[0])
    learner.observe(first[0])
    with pytest.raises(RecollectError, match="a batch of task 1 came where task 0 is due"):
        learner.observe(second[0])
    learner.end_task()
    with pytest.raises(RecollectError, match="a batch of task 0 came where task 1 is due"):
        learner.observe(first[1])
    with pytest.raises(RecollectError, match="task 1 ends without a batch"):
        learner.end_task()


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_told_the_task(kind):
    told = {name for name in LEARNERS if is_told(name, KINDS[kind])}
    assert told == ({*LEARNERS} - {"union"} if kind == "split" else {"compress", "gdumb", "all-data"})


# --- one network on the stream -------------------------------------------------------------------------------------


def batches(stream: Stream, task: int = 0) -> list[Batch]:
    return list(stream.task(task))


def vector(params) -> torch.Tensor:
    return torch.cat([p.flatten() for p in params.values()])


def test_online_is_sgd(toy_images):
    stream = Stream(toy_images, CONFIG)
    learner = Online(stream, CONFIG)
    params = [p.clone().requires_grad_() for p in learner.params.values()]
    optimiser = torch.optim.SGD(params, lr=CONFIG.baselines.lr)
    for batch in batches(stream):
        learner.observe(batch)
        for _ in range(CONFIG.baselines.glances):
            optimiser.zero_grad()
            learner.network.loss(dict(zip(learner.params, params, strict=True)), batch.images / 255, batch.labels).backward()
            optimiser.step()
    for mine, theirs in zip(learner.params.values(), params, strict=True):
        torch.testing.assert_close(mine, theirs.detach())


def test_in_a_split_only_the_task_s_own_logits_count(toy_images):
    """The bias of classes of other tasks gets no gradient, and they are never predicted with the task's number."""
    config = changed(KINDS["split"], classes_per_task=1, tasks=3, per_task=None)
    stream = Stream(toy_images, config, groups=[(2, 0), (1,)])
    learner = Online(stream, config)
    before = learner.params["5.bias"].clone()
    for batch in batches(stream):
        learner.observe(batch)
    learner.end_task()
    moved = (learner.params["5.bias"] - before).tolist()
    assert moved[1] == 0
    assert moved[0] == pytest.approx(-moved[2], abs=1e-6)
    assert abs(moved[0]) > 1e-4
    assert set(learner.predict(toy_images.test.images, 0).tolist()) <= {0, 2}
    for batch in batches(stream, 1):
        learner.observe(batch)
    learner.end_task()
    assert set(learner.predict(toy_images.test.images, 1).tolist()) == {1}


def test_replay_sees_the_batch_and_the_buffer(toy_images, monkeypatch):
    stream = Stream(toy_images, CONFIG)
    learner = Replay(stream, CONFIG)
    seen = []
    gradient = Replay._gradient
    monkeypatch.setattr(Replay, "_gradient", lambda self, batch: seen.append(len(batch.labels)) or gradient(self, batch))
    for task in range(2):
        for batch in stream.task(task):
            learner.observe(batch)
            assert len(learner.reservoir) * 64 <= learner.buffer.total
        learner.end_task()
    assert seen == [10, 10, 9, 9, 14, 14, 9, 9]  # four of the six kept beside each batch of ten and five
    assert set(learner.reservoir.tasks.tolist()) == {0, 1}
    assert learner.buffer.log[-1]["samples"] == 6


def test_a_gem_does_not_go_against_the_buffer(toy_images):
    stream = Stream(toy_images, CONFIG)
    learner = AGem(stream, CONFIG)
    for batch in stream.task(0):
        learner.observe(batch)
    learner.end_task()
    against = 0
    for batch in stream.task(1):
        opposite = batch._replace(labels=(batch.labels + 1) % 3)  # so that tasks contradict each other
        plain = vector(learner._gradient(opposite))
        earlier = learner.reservoir.draw(99, learner._generator(), lambda tasks: tasks != 1)
        reference = vector(learner._gradient(earlier))
        direction = vector(learner._direction(opposite))
        if plain @ reference < 0:
            against += 1
            assert abs(float(direction @ reference)) < 1e-5 * float(plain.norm() * reference.norm())
            expected = plain - (plain @ reference) / (reference @ reference) * reference
            torch.testing.assert_close(direction, expected)
        else:
            torch.testing.assert_close(direction, plain)
        learner.observe(opposite)
    assert against


def test_ewc_holds_weights_by_the_fisher_information_of_each_task(toy_images):
    config = changed(CONFIG, ewc_strength=3.0)
    stream = Stream(toy_images, config)
    learner = Ewc(stream, config)
    ends = []
    for task in range(2):
        for batch in stream.task(task):
            learner.observe(batch)
        kept = learner.reservoir.draw(99, learner._generator())
        each = [learner._gradient(Batch(*(part[k : k + 1] for part in kept))) for k in range(len(kept.labels))]
        fisher = torch.stack([vector(g) ** 2 for g in each]).mean(0)
        ends.append((fisher, vector(learner.params)))
        learner.end_task()
        assert len(learner.reservoir) == 0
    batch = batches(Stream(toy_images, config))[0]
    now = vector(learner.params)
    penalty = sum(fisher * (now - end) for fisher, end in ends)
    found = vector(learner._direction(batch)) - vector(learner._gradient(batch))
    torch.testing.assert_close(found, 3.0 * penalty, rtol=1e-3, atol=1e-6)


# --- one network for each task -------------------------------------------------------------------------------------


def test_gdumb_keeps_the_task_s_share_and_all_data_keeps_all(toy_images, monkeypatch):
    sizes = []
    for kind in (GDumb, AllData):
        stream = Stream(toy_images, CONFIG)
        learner = kind(stream, CONFIG)
        train = type(learner._networks).train
        monkeypatch.setattr(
            type(learner._networks),
            "train",
            lambda self, parts, recipe, train=train: (
                sizes.extend((len(labels), recipe.epochs) for _, labels in parts.values()) or train(self, parts, recipe)
            ),
        )
        for task in stream:
            for batch in task:
                learner.observe(batch)
            learner.end_task()
        monkeypatch.undo()
    assert sizes == [(3, 2), (3, 2), (15, 2), (15, 2)]


def test_the_upper_bound_is_above_and_replay_beats_online():
    """Permuted digits: what the comparisons are for. A seed, a few seconds."""
    config = changed(ContinualConfig(), 
        kind="permutations", tasks=3, per_task=300, buffer=60, network="mlp:width=64", baseline_lr=0.3, glances=3,
        data_lr=0.1, data_batch=32, all_epochs=20, gdumb_epochs=50,
    )  # fmt: skip
    images = load("digits")
    found = {}
    for name in ("online", "er", "gdumb", "all-data"):
        stream = Stream(images, config)
        found[name] = metrics(accuracy_matrix(name, taught(make(name, stream, config), stream), stream))
    assert found["all-data"].ra > 85
    assert found["all-data"].ra > found["gdumb"].ra > 40
    assert found["er"].ra > found["online"].ra
    assert found["all-data"].bti == found["gdumb"].bti == 0
    assert found["online"].bti < -5


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


MATRIX = square([[90.0], [70.0, 80.0], [75.0, 50.0, 60.0]])


def test_by_hand():
    found = metrics(MATRIX)
    assert found.ra == pytest.approx((75 + 50 + 60) / 3)
    assert found.la == pytest.approx((90 + 80 + 60) / 3)
    assert found.bti == pytest.approx(((75 - 90) + (50 - 80) + 0) / 3)
    assert found.bwt == pytest.approx(((75 - 90) + (50 - 80)) / 2)
    assert found.forgetting == pytest.approx(((90 - 75) + (80 - 50)) / 2)
    assert found.curve == pytest.approx((90, 75, 185 / 3))


def test_forgetting_counts_from_the_best_of_the_tasks_before_the_last():
    found = metrics(square([[50.0], [60.0, 10.0], [40.0, 30.0, 99.0]]))
    assert found.forgetting == pytest.approx(((60 - 40) + (10 - 30)) / 2)
    assert found.bwt == pytest.approx(((40 - 50) + (30 - 10)) / 2)


def test_one_task_has_nothing_to_forget():
    found = metrics([[42.0]])
    assert (found.ra, found.la, found.bti, found.bwt, found.forgetting) == (42, 42, 0, None, None)


def test_a_matrix_is_square_and_none_lies_ahead():
    assert MATRIX == [[90, None, None], [70, 80, None], [75, 50, 60]]
    for wrong in ([], [[1.0, 2.0]], [[None]], [[1.0, None], [None, 2.0]]):
        with pytest.raises(RecollectError, match="accuracy matrix"):
            metrics(wrong)


def test_over_seeds():
    found = spread([1.0, 2.0, 6.0])
    assert (found.mean, found.n) == (3.0, 3)
    assert found.deviation == pytest.approx(7**0.5)
    assert str(found) == "3.00 ± 2.65"
    assert str(spread([1.0])) == "1.00"
    with pytest.raises(RecollectError, match="a mean of no values"):
        spread([])
    other = square([[80.0], [60.0, 70.0], [65.0, 40.0, 50.0]])
    assert mean_matrix([MATRIX, other]) == [[85, None, None], [65, 75, None], [70, 45, 55]]
