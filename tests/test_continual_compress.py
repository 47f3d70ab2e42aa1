"""Compress: a task's memory does not depend on which tasks were beside it, nor on the engine; the account of the buffer holds
at every batch."""

import math
from pathlib import Path

import pytest
import torch

from recollect import Memory, RecollectError, fast, load
from recollect.budget import Budget
from recollect.config import Sizes, changed
from recollect.continual import compress
from recollect.continual.compress import Compressor, account, make_objective, task_budget
from recollect.continual.config import STREAMS, ContinualConfig
from recollect.continual.learners import Compress, accuracy
from recollect.continual.streams import Stream
from recollect.fast.engine import Engine
from recollect.memory import recall
from recollect.objectives import unrolled
from recollect.objectives.unrolled import Unrolled
from recollect.starts import described

CONFIG = changed(ContinualConfig(), 
    tasks=3, per_task=25, buffer=12, network="mlp:width=6", bases=3, inner_steps=3, inner_lr=0.1, outer_per_batch=2,
    init="unit", replay=6,
)  # fmt: skip
PERMUTATIONS = changed(CONFIG, kind="permutations", bases=2, downsample=1)
SPLIT = changed(CONFIG, kind="split", tasks=3, per_task=None, classes_per_task=1)
RANDOM = changed(CONFIG, inner_steps=6, window=2, window_place="random")
KINDS = {"rotations": CONFIG, "permutations": PERMUTATIONS, "split": SPLIT}
SAMPLES = changed(CONFIG, init="samples")
ACCOUNTED = KINDS | {
    "samples kept smaller": changed(CONFIG, kept_downsample=2),
    "begun as samples": SAMPLES,
    "begun as samples kept smaller": changed(SAMPLES, kept_downsample=2),
}
SIDE_BY_SIDE = ACCOUNTED | {"unrolls of random length": RANDOM}


def distilled(images, config, tasks, device="cpu") -> list[Memory]:
    stream = Stream(images, config, 1)
    compressor = Compressor(stream, config, tasks, device)
    for batches in zip(*(stream.task(task) for task in tasks), strict=True):
        compressor.observe(batches)
    return compressor.memories()


def assert_close(one: Memory, other: Memory, **tolerance) -> None:
    torch.testing.assert_close(one.bases, other.bases, **tolerance)
    torch.testing.assert_close(one.addressing, other.addressing, **tolerance)


# --- sizes ---------------------------------------------------------------------------------------------------------


def sizes(stream: str, shape, classes: int) -> tuple[int, int]:
    memory = STREAMS[stream].memory
    return Budget(1, classes, shape, memory.downsample, share=10 * math.prod(shape)).sizes(memory)


def test_the_paper_s_sizes():
    grey, colour = (1, 28, 28), (3, 32, 32)
    assert sizes("rotations", grey, 10) == (24, 13)
    assert sizes("permutations", grey, 10) == (8, 19)
    assert sizes("cifar100", colour, 5) == (24, 102)
    assert 24 * 196 + 13 * 240 <= 7840


def test_a_share_too_small_for_the_bases(toy_images):
    stream = Stream(toy_images, CONFIG)
    with pytest.raises(
        RecollectError, match=r"24 bases do not fit 1/3 of a buffer of 12 images \(256 numbers\): at most 13 .* a larger buffer"
    ):
        Compressor(stream, changed(CONFIG, bases=24), [0])
    assert task_budget(stream, CONFIG, 0).sizes(Sizes(bases=13)) == (13, 1)
    with pytest.raises(RecollectError, match=r"beside even one base .*larger buffer, larger images or more classes"):
        Budget(1, 3, (1, 8, 8), 1, share=66).sizes(Sizes())
    with pytest.raises(RecollectError, match="a buffer of 2 images cannot serve 3 tasks"):
        account(stream, changed(CONFIG, buffer=2), 3)
    with pytest.raises(RecollectError, match="downsample is 9 for images of 8x8"):
        Compressor(stream, changed(CONFIG, downsample=9), [0])
    assert task_budget(stream, CONFIG, 0).sizes(Sizes())[0] == 256 // (16 + 4 * 3)


# --- side by side --------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(monkeypatch):
    """The engine of a GPU, its steps uncaptured, wherever an unroll is asked for."""

    def switch() -> None:
        make_objective.cache_clear()
        init = Unrolled.__init__

        def with_engine(self, network, inner, device, compute="auto", compile=False):
            init(self, network, inner, device, compute)
            self.engine = Engine(*fast.passes(network, device, compute))

        monkeypatch.setattr(Unrolled, "__init__", with_engine)

    yield switch
    make_objective.cache_clear()


@pytest.mark.parametrize("kind", SIDE_BY_SIDE)
def test_tasks_side_by_side_give_what_they_give_one_after_another(toy_images, kind, engine):
    """To the byte, but for the rounding of a GPU's batched unroll."""
    config = changed(SIDE_BY_SIDE[kind], networks_per_step=2, ema=0.5, clip_running=2.0)
    together = distilled(toy_images, config, [0, 1, 2])
    backwards = [distilled(toy_images, config, [task])[0] for task in (2, 1, 0)][::-1]
    for one, other in zip(together, backwards, strict=True):
        assert_close(one, other, rtol=0, atol=0)
        assert one.header == other.header
    assert not torch.allclose(together[0].bases, together[1].bases)
    engine()
    for one, other in zip(together, distilled(toy_images, config, [0, 1, 2]), strict=True):
        assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", SIDE_BY_SIDE)
def test_in_coordinates_of_the_bases_or_not(toy_images, kind, engine, monkeypatch):
    """The same memories to rounding, on a CPU and by a GPU's engine, with fewer tasks side by side in the end too."""
    config, found = changed(SIDE_BY_SIDE[kind], networks_per_step=2), []
    for switch in (lambda: None, engine):
        switch()
        for pays in (False, True):
            asked = []
            monkeypatch.setattr(compress.span, "pays", lambda *given, pays=pays, asked=asked: asked.append(given) or pays)
            found += [distilled(toy_images, config, [0, 1]) + distilled(toy_images, config, [1])]
            assert asked[0][1] == len(found[0][0].bases)

    tried = []

    def no_room(*given, **options):
        tried.append(1)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(unrolled.span, "by_images", no_room)  # then the other way is taken, from then on
    found += [distilled(toy_images, config, [0, 1]) + distilled(toy_images, config, [1])]
    assert len(tried) == 1
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_the_engine_does_the_network_of_la_maml_too(toy_images, engine):
    config = changed(SPLIT, network="lamaml:width=2,hidden=3", inner_steps=2, outer_per_batch=1)
    expected = distilled(toy_images, config, [0, 1])
    engine()
    found = [*distilled(toy_images, config, [0, 1]), *distilled(toy_images, config, [0])]
    for one, other in zip([*expected, expected[0]], found, strict=True):
        assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_the_same_task_alone_is_the_same_to_the_byte(toy_images):
    """In whatever order tasks are distilled, or in whatever process."""
    first = distilled(toy_images, CONFIG, [1])[0]
    distilled(toy_images, CONFIG, [2])
    again = distilled(toy_images, CONFIG, [1])[0]
    assert torch.equal(first.bases, again.bases)
    assert torch.equal(first.addressing, again.addressing)


def test_by_seed(toy_images):
    memories = []
    for seed in (0, 0, 1):
        stream = Stream(toy_images, CONFIG, seed)
        compressor = Compressor(stream, CONFIG, [0])
        for batch in stream.task(0):
            compressor.observe([batch])
        memories += compressor.memories()
    assert torch.equal(memories[0].bases, memories[1].bases)
    assert not torch.equal(memories[0].bases, memories[2].bases)


def test_tasks_that_are_not_alike_cannot_be_stacked(toy_images):
    stream = Stream(toy_images, SPLIT, groups=[(0,), (1, 2)])
    with pytest.raises(ValueError, match="the same numbers of classes and batches"):
        Compressor(stream, SPLIT, [0, 1])


OTHERS = {name: changed(CONFIG, objective=name) for name in ("regression", "gradients", "distributions")}


@pytest.mark.parametrize("name", OTHERS)
def test_each_task_has_an_objective_of_its_own(toy_images, name):
    """Its memory is the same whoever is beside it, and another than the unroll's; a batch may lack a class."""
    config = changed(OTHERS[name], outer_lr=0.1)
    together = distilled(toy_images, config, [0, 1, 2])
    backwards = [distilled(toy_images, config, [task])[0] for task in (2, 1, 0)][::-1]
    for one, other in zip(together, backwards, strict=True):
        assert_close(one, other, rtol=0, atol=0)
    assert not torch.allclose(together[0].bases, distilled(toy_images, changed(config, objective="unrolled"), [0])[0].bases)
    few = changed(config, batch=1, replay=0)  # images of one class
    assert all(memory.bases.isfinite().all() and memory.header.made["skipped"] == 0 for memory in distilled(toy_images, few, [0]))


@pytest.mark.parametrize("config", [CONFIG, SAMPLES, *OTHERS.values()], ids=["random", "samples", *OTHERS])
def test_a_checkpoint_goes_on_to_the_same_bytes(toy_images, tmp_path, config):
    whole = distilled(toy_images, config, [0, 2])
    stream = Stream(toy_images, config, 1)
    begun = Compressor(stream, config, [0, 2])
    tasks = [iter(stream.task(task)) for task in (0, 2)]
    begun.observe([next(task) for task in tasks])
    torch.save(begun.to_dict(), tmp_path / "state.pt")
    stream = Stream(toy_images, config, 1)
    resumed = Compressor(stream, config, [0, 2])
    resumed.load(torch.load(tmp_path / "state.pt", weights_only=True))
    rest = [stream.task(task) for task in (0, 2)]
    for task in rest:
        task.skip(resumed.seen)
    for batches in zip(*rest, strict=True):
        resumed.observe(batches)
    for one, other in zip(whole, resumed.memories(), strict=True):
        assert torch.equal(one.bases, other.bases)
    assert [line["samples"] for line in resumed.buffers[0].log] == [10, 12, 0]


# --- the buffer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ACCOUNTED)
def test_samples_and_memories_fit_the_total_at_every_batch(toy_images, kind):
    config = changed(ACCOUNTED[kind], outer_per_batch=1, inner_steps=1)
    stream = Stream(toy_images, config, 1)
    learner = Compress(stream, config)
    total, image, memories = config.buffer.images * 64, 64 // config.buffer.kept_downsample**2, 0
    for task in stream:
        room = (total - memories) // image
        assert room >= config.buffer.images - -(-config.buffer.images * task.number // stream.tasks)  # 1 - (t-1)/T of it at least
        for number, batch in enumerate(task):
            learner.observe(batch)
            samples = len(learner._compressor.reservoirs[0])
            assert samples == min(room, 10 * number + len(batch.labels))
            assert samples * image + memories <= total
        learner.end_task()
        memories += learner.memories[-1].floats
        assert learner.buffer.memories == memories <= (task.number + 1) * total // stream.tasks
        assert learner.buffer.log[-1]["samples"] == 0
        assert all(line["sample_floats"] + line["memory_floats"] <= line["total"] for line in learner.buffer.log)


def test_samples_go_when_a_memory_that_is_not_distilled_is_there(toy_images):
    config = changed(SAMPLES, per_task=40, buffer=30, bases=6, outer_per_batch=0)
    learner, stream = Compress(Stream(toy_images, config), config), Stream(toy_images, config)
    samples = []
    for batch in stream.task(0):
        learner.observe(batch)
        samples.append(len(learner._compressor.reservoirs[0]))
    waits = learner._compressor.waits
    assert 0 < waits < 4
    assert samples == [10 * (number + 1) if number < waits else 0 for number in range(4)]
    assert [line["samples"] for line in learner.buffer.log] == [*samples[:waits], 0]


def real(compressor: Compressor, batch):
    labels = torch.arange(compressor.classes).repeat_interleave(compressor.matrices)
    return compressor._drawn(0, batch, labels)[0]


def test_the_outer_loss_sees_the_incoming_batch_and_the_reservoir(toy_images):
    stream = Stream(toy_images, CONFIG)
    compressor = Compressor(stream, CONFIG, [0])
    first, second, _ = stream.task(0)
    images, labels, _ = real(compressor, first)
    assert images.shape == (16, 1, 8, 8)  # always: 10 incoming and 6 of the reservoir, or the same again
    assert labels.tolist() == [*first.labels.tolist(), *first.labels[:6].tolist()]
    compressor.observe([first])
    images, labels, _ = real(compressor, second)
    assert torch.equal(images[:10], second.images / 255)
    known = {tuple(image.flatten().tolist()) for image in first.images}
    replayed = {tuple((255 * image).round().int().flatten().tolist()) for image in images[10:]}
    assert replayed <= known
    assert len(replayed) == 6
    smaller = changed(CONFIG, kept_downsample=8)
    compressor = Compressor(Stream(toy_images, smaller), smaller, [0])
    compressor.observe([first])
    assert compressor.reservoirs[0].capacity == 12 * 64
    assert real(compressor, second).images[10:].flatten(1).std(1).max() == 0  # their means are all that was kept
    with pytest.raises(RecollectError, match="kept_downsample is 9 for images of 8x8: give 1 to 8"):
        Compressor(stream, changed(CONFIG, kept_downsample=9), [1])


def test_labels_of_a_split_are_places_among_the_task_s_own_classes(toy_images):
    stream = Stream(toy_images, SPLIT, groups=[(2,), (1, 0)])
    compressor = Compressor(stream, SPLIT, [1])
    batch = next(iter(stream.task(1)))
    labels = real(compressor, batch).labels
    assert labels[:10].tolist() == [{1: 0, 0: 1}[label] for label in batch.labels.tolist()]


# --- the inner loop ---------------------------------------------------------------------------------------------------


def test_a_hopeless_task_says_so(toy_images, monkeypatch):
    monkeypatch.setattr(compress, "MOST_SKIPS", 2)
    config = changed(CONFIG, inner_lr=1e6)
    with pytest.raises(RecollectError, match="the outer gradient of task 1 was not finite 2 times in a row: lower inner_lr"):
        distilled(toy_images, config, [1])


def test_plain_images_of_each_class(toy_images):
    """One-hot addressing: what the same floats buy without shared bases."""
    (memory,) = distilled(toy_images, changed(CONFIG, addressing="one-hot", bases=None), [1])
    assert memory.header.addressing == "one-hot"
    assert memory.floats == len(memory.bases) * 16 <= 256


def test_augmentation(toy_images):
    plain, flipped = (distilled(toy_images, changed(CONFIG, augment=a), [0])[0] for a in ("none", "flip+crop"))
    assert not torch.equal(plain.bases, flipped.bases)
    assert flipped.header.recipe["augment"] == "flip+crop"
    with pytest.raises(RecollectError, match="unknown augmentation 'flop'"):
        distilled(toy_images, changed(CONFIG, augment="flop"), [0])


def test_an_inner_step_may_see_some_of_the_recalled_images(toy_images):
    config = changed(CONFIG, inner_per_class=2)
    stream = Stream(toy_images, config)
    compressor = Compressor(stream, config, [0, 1])
    matrices = compressor.matrices
    labels = torch.arange(3).repeat_interleave(matrices)
    batches = [next(iter(stream.task(task))) for task in (0, 1)]

    def rows(task: int) -> torch.Tensor:
        return compressor._drawn(task, batches[task], labels)[1][0].batches

    assert rows(0).shape == (config.inner.steps, 6)
    assert all((row // matrices).tolist() == [0, 0, 1, 1, 2, 2] for row in rows(0))
    assert torch.equal(rows(0), rows(0))
    assert not torch.equal(rows(0), rows(1))


def test_unrolls_of_random_length(toy_images, monkeypatch):
    """From the window's to the whole, by seed and step; the window is at the end of each."""
    lengths, windows, real = [], set(), unrolled.unroll.metagradient
    monkeypatch.setattr(compress.span, "pays", lambda *_: False)

    def watched(loss, params, images, labels, batches, query, **options):
        lengths.append(len(batches))
        windows.add(options["window"])
        return real(loss, params, images, labels, batches, query, **options)

    monkeypatch.setattr(unrolled.unroll, "metagradient", watched)
    config = changed(RANDOM, outer_per_batch=10)
    distilled(toy_images, config, [0])
    once = [*lengths]
    assert set(once) == {2, 3, 4, 5, 6}
    assert windows == {2}
    distilled(toy_images, config, [1, 2])
    assert lengths[len(once) :] == [length for length in once for _ in range(2)]


# --- a memory that begins as samples -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("small", "size", "images"), [((3, 4, 4), (8, 8), 30), ((1, 4, 3), (7, 6), 30), ((2, 5, 5), (5, 5), 3)])
def test_images_that_bases_can_recall_are_described_exactly(small, size, images):
    draws, count = torch.Generator().manual_seed(0), min(5, images)
    bases, mixed = torch.randn(count, *small, generator=draws), torch.randn(images, count, generator=draws)
    seen = recall(bases, torch.eye(count)[None], mixed, size)
    found, coefficients = described(seen, (5, *small))
    assert found.shape == (count, *small)
    assert coefficients.shape == (images, count)
    torch.testing.assert_close(recall(found, torch.eye(count)[None], coefficients, size), seen, rtol=0, atol=1e-4)


def test_others_are_described_with_the_least_error():
    seen = torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    found, coefficients = (part.requires_grad_() for part in described(seen, (4, 3, 4, 4)))
    error = (recall(found, torch.eye(4)[None], coefficients, (8, 8)) - seen).square().sum()
    for gradient in torch.autograd.grad(error, (found, coefficients)):
        assert gradient.abs().max() < 1e-3 * error  # nothing near is better
    among = described(seen[:, :, ::2, ::2], (4, 3, 4, 4))  # pixels of whole images, rank 4
    values = torch.linalg.svdvals(seen[:, :, ::2, ::2].flatten(1))
    left = (recall(among[0], torch.eye(4)[None], among[1], (4, 4)) - seen[:, :, ::2, ::2]).square().sum()
    torch.testing.assert_close(left, values[4:].square().sum(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("still", [{"outer_lr": 1e-9}, {"outer_per_batch": 0}])
def test_a_memory_begins_as_the_samples_that_have_come(still, toy_images):
    config = changed(SAMPLES, per_task=40, buffer=120, bases=30, downsample=1, **still)
    stream = Stream(toy_images, config, 1)
    compressor = Compressor(stream, config, [0])
    batches = list(stream.task(0))
    assert compressor.waits == 2  # half of four: 21 recalled images need three
    for batch in batches[:2]:
        compressor.observe([batch])
        assert (compressor.step, len(compressor.reservoirs[0])) == (0, 10 * compressor.seen)
    compressor.observe([batches[2]])
    assert compressor.step == config.buffer.outer_per_batch
    recalled, labels = compressor.memories()[0].recall()
    images, truth = (torch.cat([getattr(batch, part) for batch in batches[:3]]) for part in ("images", "labels"))
    far, nearest = (recalled[:, None] - stream.preprocess(images)).flatten(2).norm(dim=2).min(1)
    assert far.max() < 1e-3  # 30 bases recall 30 samples
    assert torch.equal(truth[nearest], labels)
    assert len(nearest.unique()) == len(labels)


def test_what_no_sample_describes_stays_random(toy_images):
    config = changed(SAMPLES, per_task=25, bases=13)
    stream = Stream(toy_images, config, 1)
    compressor, first = Compressor(stream, config, [0]), next(iter(stream.task(0)))
    before = [tensor.detach().clone() for tensor in compressor.states[0].learned]
    label = int(first.labels[0])
    few = first._replace(images=first.images[:1], labels=first.labels[:1])
    compressor._begin_as_samples([few])
    bases, addressing = compressor.states[0].learned
    assert not torch.equal(bases[0], before[0][0])
    assert torch.equal(bases[1:], before[0][1:])
    assert addressing[:, label, 1:].abs().max() == 0
    others = [other for other in range(3) if other != label]
    assert torch.equal(addressing[:, others], before[1][:, others])


# --- the memory ----------------------------------------------------------------------------------------------------


def test_a_task_s_memory_is_a_memory(toy_images, tmp_path):
    memory = distilled(toy_images, SPLIT, [1])[0]
    memory.save(tmp_path / "memory.safetensors")
    found = Memory.load(tmp_path / "memory.safetensors")
    (label,) = Stream(toy_images, SPLIT, 1).task_classes[1]
    assert found.class_names == (toy_images.class_names[label],)
    assert found.header.dataset == "task 1 of 3 of toy (split)"
    assert found.header.made["labels"] == [label]
    assert found.recall()[0].shape == (len(found.addressing), 1, 8, 8)
    assert found.floats <= found.header.budget["numbers"] == 4 * 64


def test_it_is_trained_at_test_as_in_the_inner_loop():
    recipe = compress.recall_recipe(STREAMS["rotations"], 130, 10)
    assert (recipe.network, recipe.epochs, recipe.batch, recipe.lr, recipe.momentum) == ("mlp", 40, 130, 0.03, 0.9)
    recipe = compress.recall_recipe(STREAMS["cifar100"], 510, 5)
    assert (recipe.epochs, recipe.batch) == (59, 50)  # eleven steps a pass, 640 at least


def test_the_example_of_the_page_learns(tmp_path, monkeypatch, capsys):
    """docs/continual.md: permuted digits in one pass, each task in the floats of 40 of its 400 images."""
    page = (Path(__file__).parents[1] / "docs" / "continual.md").read_text()
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    learner, stream = names["learner"], names["stream"]
    assert min(accuracy(learner, stream, task) for task in range(2)) > 55
    assert accuracy(learner, stream, 1, told=False) > 35
    assert "% told the task" in capsys.readouterr().out
    assert Memory.load("task-0.safetensors").floats == learner.memories[0].floats
    fresh = Stream(load("digits"), names["config"])
    nothing = Compress(fresh, names["config"], memories=Compressor(fresh, names["config"], [0]).memories())
    assert accuracy(nothing, fresh, 0) < 40
