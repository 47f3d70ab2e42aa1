"""Streams: exact angles, permutations and class orders; every batch once; nothing built before it is reached."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import toy_arrays
from PIL import Image

from recollect import Images, RecollectError, Split, load
from recollect.config import changed
from recollect.continual import streams
from recollect.continual.config import STREAMS, ContinualConfig, check, check_learners
from recollect.continual.streams import Stream, rotation

ROTATIONS = changed(ContinualConfig(), tasks=4, per_task=25)
PERMUTATIONS = changed(ROTATIONS, kind="permutations")
SPLIT = changed(ROTATIONS, kind="split", tasks=None, per_task=None, classes_per_task=1)


def seen(stream: Stream, number: int) -> Split:
    batches = list(stream.task(number))
    assert all(batch.task == number for batch in batches)
    return Split(torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches]))


@pytest.mark.parametrize("side", [8, 27, 28])
def test_rotation_is_pils(side):
    image = np.random.default_rng(0).integers(1, 256, (side, side), dtype=np.uint8)
    angles = [0.0, 9.0, 45.0, 60.0, 90.0, 180.0, *np.random.default_rng(1).uniform(0, 180, 500)]
    for angle in angles:
        mine = np.append(image.flatten(), 0)[rotation(float(angle), side)].reshape(side, side)
        np.testing.assert_array_equal(mine, np.asarray(Image.fromarray(image).rotate(float(angle))))


def test_rotation_in_floats_differs_on_a_border_at_most():
    numbers = torch.arange(1, 785, dtype=torch.float64).view(1, 1, 28, 28)
    wrong = 0
    for angle in range(0, 180, 3):
        cosine, sine = np.cos(np.radians(angle + 0.123)), np.sin(np.radians(angle + 0.123))
        turn = torch.tensor([[[cosine, -sine, 0.0], [sine, cosine, 0.0]]], dtype=torch.float64)
        grid = torch.nn.functional.affine_grid(turn, [1, 1, 28, 28], align_corners=False)
        found = torch.nn.functional.grid_sample(numbers, grid, mode="nearest", align_corners=False).flatten()
        wrong += int(((found - 1) % 785 != rotation(angle + 0.123, 28)).sum())
    assert wrong < 60 * 784 / 1000


def test_angles_are_by_the_seed_each_in_its_own_part_of_the_half_turn(toy_images):
    config = changed(ROTATIONS, tasks=20)
    found = [Stream(toy_images, config, seed).angles for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    assert all(9 * t <= angle < 9 * (t + 1) for angles in found for t, angle in enumerate(angles))


def test_a_task_of_rotations_is_the_drawn_images_turned(toy_images):
    stream = Stream(toy_images, ROTATIONS, 3)
    split = seen(stream, 2)
    plain = toy_images.train[stream._rows(2)]
    assert split.labels.tolist() == plain.labels.tolist()
    for turned, image in zip(split.images, plain.images, strict=True):
        expected = np.asarray(Image.fromarray(image[0].numpy()).rotate(stream.angles[2]))
        np.testing.assert_array_equal(turned[0].numpy(), expected)
    assert len(stream.test(2)) == len(toy_images.test)  # all of it, to the last image


def test_permutations_are_those_of_torch_seed_0_in_every_run(toy_images):
    torch.manual_seed(0)
    expected = [torch.randperm(64) for _ in range(4)]
    for seed in (0, 5):
        stream = Stream(toy_images, PERMUTATIONS, seed)
        for number, order in enumerate(expected):  # the first task is permuted too
            plain = toy_images.train[stream._rows(number)]
            assert torch.equal(seen(stream, number).images.flatten(1), plain.images.flatten(1)[:, order])


def test_a_split_has_each_class_in_one_task_by_the_seed(toy_images):
    orders = [Stream(toy_images, SPLIT, seed).task_classes for seed in range(8)]
    assert orders[0] == Stream(toy_images, SPLIT, 0).task_classes
    assert all(sorted(sum(order, ())) == [0, 1, 2] for order in orders)
    assert len(set(map(tuple, orders))) > 1
    stream = Stream(toy_images, SPLIT, 1)
    for number, (label,) in enumerate(stream.task_classes):
        assert set(seen(stream, number).labels.tolist()) == {label}
        assert set(stream.test(number).labels.tolist()) == {label}
        assert stream.masks[number].tolist() == [c == label for c in range(3)]


@pytest.mark.parametrize("config", [ROTATIONS, PERMUTATIONS, SPLIT])
def test_every_sample_comes_once_in_batches_of_ten(toy_images, config):
    stream = Stream(toy_images, config)
    for task in stream:
        sizes = [len(batch.labels) for batch in task]
        assert len(task) == len(sizes) == stream.batches(task.number)
        assert set(sizes[:-1]) == {10}
        wanted = config.stream.per_task or int((toy_images.train.labels == stream.task_classes[task.number][0]).sum())
        assert sum(sizes) == wanted == len(set(stream._rows(task.number).tolist()))


def test_a_second_look_is_an_error(toy_images):
    stream = Stream(toy_images, ROTATIONS)
    task = stream.task(1)
    next(iter(task))
    with pytest.raises(RecollectError, match="task 1 has already streamed by, and a batch is seen once"):
        list(task)
    with pytest.raises(RecollectError, match="task 1 has already been taken"):
        stream.task(1)
    with pytest.raises(RecollectError, match="task 4 is not one of this stream's 0 to 3"):
        stream.task(4)


def test_only_the_batch_that_is_looked_at_is_built(toy_images, monkeypatch):
    built = []
    look = Stream._look
    monkeypatch.setattr(Stream, "_look", lambda self, images, number: built.append(len(images)) or look(self, images, 0))
    stream = Stream(toy_images, ROTATIONS)
    tasks = [stream.task(number) for number in range(4)]
    assert built == []
    batches = iter(tasks[2])
    next(batches)
    next(batches)
    assert built == [10, 10]


def test_a_task_can_begin_where_it_was_interrupted(toy_images):
    whole = [batch.images for batch in Stream(toy_images, ROTATIONS).task(0)]
    task = Stream(toy_images, ROTATIONS).task(0)
    task.skip(2)
    assert torch.equal(next(iter(task)).images, whole[2])


def test_the_record_tells_all_that_was_drawn(toy_images):
    record = Stream(toy_images, ROTATIONS, 7).record()
    assert record["seed"] == 7
    assert len(record["angles"]) == len(set(record["training_rows_sha256"])) == 4
    record = Stream(toy_images, PERMUTATIONS).record()
    assert record["permutations"]["torch_seed"] == 0
    assert len(set(record["permutations"]["sha256"])) == 4
    classes = Stream(toy_images, SPLIT).record()["classes"]
    assert sorted(name for (name,) in classes) == ["cat", "dog", "frog"]
    assert Stream(toy_images, SPLIT).record() == Stream(toy_images, SPLIT).record()


def test_validation_is_streamed_only_when_asked(toy_images):
    everything = len(toy_images.train) + len(toy_images.validation)
    stream = Stream(toy_images, changed(ROTATIONS, per_task=everything, use_validation=True))
    assert len(seen(stream, 0)) == everything
    stream = Stream(toy_images, changed(ROTATIONS, on="validation"))
    assert len(stream.test(0)) == len(toy_images.validation)


def test_pixels_or_normalised(toy_images):
    pixels = toy_images.train.images
    assert torch.equal(Stream(toy_images, ROTATIONS).preprocess(pixels), pixels / 255)
    prepared = Stream(toy_images, changed(ROTATIONS, preprocess="normalise")).preprocess(pixels)
    assert abs(float(prepared.mean())) < 1e-5


def test_the_paper_s_streams():
    """docs/protocols.md, section 2."""
    expected = {  # tasks, images a task, buffer, bases, smaller by, outer steps a batch
        "rotations": (20, 1000, 200, 24, 2, 4),
        "permutations": (20, 1000, 200, 8, 1, 20),
        "many": (100, 200, 1000, 8, 1, 20),
        "cifar100": (20, None, 200, 24, 2, 4),
        "rotations-60k": (20, 60000, 200, 24, 2, 2),
        "permutations-60k": (20, 60000, 200, 8, 1, 2),
    }
    for name, numbers in expected.items():
        c = STREAMS[name]
        protocol = (c.stream.tasks, c.stream.per_task, c.buffer.images)
        assert (*protocol, c.memory.bases, c.memory.downsample, c.buffer.outer_per_batch) == numbers
        assert (c.stream.batch, c.inner.momentum) == (10, 0.9)
    c = ContinualConfig()  # the presets of the streams have rates of their own
    assert (c.stream.batch, c.outer.lr, c.outer.momentum) == (10, 0.1, 0.5)
    assert (c.inner.lr, c.inner.momentum) == (0.01, 0.9)
    assert STREAMS["cifar100"].stream.classes_per_task == 5
    assert STREAMS["cifar100"].inner.network == "lamaml"
    for config in STREAMS.values():
        check(config)


def few(images: Images, **parts: Split) -> Images:
    return replace(images, **parts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(outer_per_batch=-1), "outer_per_batch is -1: give 0 or more"),
        (dict(objective="trajectories"), "objective is trajectories, whose experts a stream's tasks do not have"),
        (dict(outer_per_batch=0), r"outer_per_batch is 0, which leaves memories random \(kaiming\): give more, or init samples"),
        (dict(tasks=0), "tasks is 0: give 1 or more"),
        (dict(outer_lr=float("nan")), "outer_lr is nan: give a number above 0"),
        (dict(ema=1.0), "ema is 1.0: give a number from 0 to below 1"),
        (dict(per_task=0), "task 0 of toy has no samples: give per_task 1 or more"),
        (dict(per_task=100), r"per_task is 100, but task 0 of toy has 42 training images: .* \(--use-validation\)"),
        (dict(per_task=100, use_validation=True), "has 48 training images: give at most 48$"),
        (dict(on="validation", use_validation=True), "use_validation streams the validation split"),
        (dict(classes_per_task=2), "classes_per_task is for the stream split"),
        (dict(tasks=None), "tasks is None"),
        (dict(kind="split"), "the stream split needs classes_per_task"),
        (dict(kind="split", classes_per_task=2, tasks=None), "3 classes do not make whole tasks of 2: .* 1 or 3"),
        (dict(kind="split", classes_per_task=2, tasks=2), "2 tasks of 2 classes would overlap: 3 classes make 1"),
        (dict(kind="split", classes_per_task=4, tasks=None), "3 classes do not make whole tasks of 4"),
    ],
)
def test_bad_settings_are_one_clear_line(toy_images, change, message):
    with pytest.raises(RecollectError, match=message) as caught:
        Stream(toy_images, changed(ROTATIONS, **change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([(0, 1), (1, 2)], "class 1 is in task 0 and in task 1: the tasks of a split must not overlap"),
        ([(0, 0)], "class 0 is in task 0 and in task 0"),
        ([(0,), ()], "task 1 has no classes"),
        ([(0, 3)], "task 0 has class 3: give 0 to 2"),
        ([], "no groups of classes"),
    ],
)
def test_bad_groups_are_refused(toy_images, groups, message):
    with pytest.raises(RecollectError, match=message):
        Stream(toy_images, SPLIT, groups=groups)


def test_groups_can_be_given(toy_images):
    stream = Stream(toy_images, SPLIT, groups=[(2,), (1, 0)])
    assert stream.task_classes == [(2,), (1, 0)]
    with pytest.raises(RecollectError, match="groups of classes are for the stream split"):
        Stream(toy_images, ROTATIONS, groups=[(2,), (1, 0)])


def test_a_task_without_samples_is_refused(toy_images):
    without = toy_images.train[(toy_images.train.labels != 1).nonzero().flatten()]
    with pytest.raises(RecollectError, match="task 1 of toy has no samples: leave its classes out"):
        Stream(few(toy_images, train=without), SPLIT, groups=[(0,), (1,)])
    without = toy_images.test[(toy_images.test.labels != 1).nonzero().flatten()]
    with pytest.raises(RecollectError, match="task 1 of toy has no test images"):
        Stream(few(toy_images, test=without), SPLIT, groups=[(0,), (1,)])


def test_other_bad_input(toy_images, tmp_path):
    with pytest.raises(RecollectError, match="seed is -1"):
        Stream(toy_images, ROTATIONS, -1)
    arrays = toy_arrays()
    np.savez(tmp_path / "wide.npz", **arrays | {"images": arrays["images"][..., :6]})
    with pytest.raises(RecollectError, match="images of 8x6 cannot be rotated in place"):
        Stream(load(tmp_path / "wide.npz"), ROTATIONS)
    with pytest.raises(RecollectError, match="unknown learner 'replay'"):
        check_learners(["online", "replay"])
    with pytest.raises(RecollectError, match="no learner named"):
        check_learners([])
    assert streams.PERMUTATION_SEED == 0
