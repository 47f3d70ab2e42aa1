"""The learners on tiny streams of each kind: the protocol, what makes each what it is, and determinism by seed."""

import pytest
import torch

from recollect import RecollectError, load
from recollect.config import changed
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
from recollect.continual.metrics import metrics
from recollect.continual.streams import Batch, Stream

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
