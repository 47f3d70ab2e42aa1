"""Budget by property testing; how bases and addressing begin; recall against sums written out; the file: what is saved is what is
loaded, or nothing."""

import errno
import json
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_distillation import CONFIG, toy
from torch.nn import functional as F

from recollect.budget import PRECISIONS, Budget
from recollect.config import changed
from recollect.data.preprocess import Preprocess
from recollect.decisions import resolve
from recollect.distiller import Distiller
from recollect.errors import RecollectError
from recollect.header import Header
from recollect.memory import Memory, one_hot_addressing, recall
from recollect.nets import Network

quick = settings(max_examples=60, deadline=None)
NAMES = ["cat", "dog", "ship"]


def make(names=NAMES, matrices=2, bases=4, shape=(2, 6, 8), downsample=2, kind=torch.float32, seed=0, **more) -> Memory:
    """A memory of random tensors."""
    header = Header("toy", list(names), list(shape), downsample, **more)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(bases, *header.base_shape, generator=generator).to(kind)
    addressing = torch.randn(matrices, len(names), bases, generator=generator).to(kind)
    return Memory(values, addressing, header)


def make_one_hot(classes=3, per_class=2, shape=(2, 6, 8), downsample=1, kind=torch.float32) -> Memory:
    header = Header("toy", [f"class {c}" for c in range(classes)], list(shape), downsample, "one-hot")
    values = torch.randn(classes * per_class, *header.base_shape, generator=torch.Generator().manual_seed(0)).to(kind)
    return Memory(values, one_hot_addressing(classes, per_class), header)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# Budget: K c h w + r d_y K <= N C c H W


@st.composite
def budgets(draw) -> Budget:
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 40)), draw(st.integers(1, 40)))
    return Budget(
        images_per_class=draw(st.integers(1, 50)),
        classes=draw(st.integers(1, 200)),
        image_shape=shape,
        downsample=draw(st.integers(1, min(shape[1:]))),
        precision=draw(st.sampled_from(list(PRECISIONS))),
    )


def cost(budget: Budget, bases: int, matrices: int) -> int:
    """The left-hand side, in numbers."""
    channels, height, width = budget.image_shape
    sides = math.ceil(height / budget.downsample), math.ceil(width / budget.downsample)
    return bases * channels * sides[0] * sides[1] + matrices * budget.classes * bases


def allowed(budget: Budget) -> int:
    """The right-hand side, in numbers of its precision."""
    floats = budget.images_per_class * budget.classes * math.prod(budget.image_shape)
    return floats if budget.precision == "float32" else 2 * floats


@settings(max_examples=300, deadline=None)
@given(budgets(), st.data())
def test_matrices_fit_and_one_more_would_not(budget, data):
    assume(cost(budget, 1, 1) <= allowed(budget))
    bases = data.draw(st.integers(1, budget.bases(1)))
    matrices = budget.matrices(bases)
    assert matrices >= 1
    assert cost(budget, bases, matrices) <= allowed(budget) < cost(budget, bases, matrices + 1)
    assert budget.bases(matrices) >= bases


@settings(max_examples=300, deadline=None)
@given(budgets(), st.integers(1, 2000))
def test_bases_fit_and_one_more_would_not(budget, matrices):
    if cost(budget, 1, matrices) > allowed(budget):
        with pytest.raises(RecollectError, match=f"{matrices} addressing matrices do not fit .* take fewer matrices"):
            budget.bases(matrices)
        return
    bases = budget.bases(matrices)
    assert cost(budget, bases, matrices) <= allowed(budget) < cost(budget, bases + 1, matrices)
    assert budget.matrices(bases) >= matrices


@quick
@given(budgets())
def test_a_budget_counts_what_it_says(budget):
    assert budget.floats == budget.images_per_class * budget.classes * math.prod(budget.image_shape)
    assert budget.numbers == allowed(budget)
    assert budget.base_numbers == math.prod(budget.base_shape) == cost(budget, 1, 0)
    per_class = budget.per_class()
    used = per_class * budget.classes * budget.base_numbers
    assert used <= allowed(budget) < used + budget.classes * budget.base_numbers
    assert per_class >= budget.images_per_class
    if cost(budget, 1, 1) <= allowed(budget):
        assert budget.matrices(budget.default_bases()) >= 1


CIFAR10, CIFAR100, MNIST = Budget(1, 10, (3, 32, 32)), Budget(1, 100, (3, 32, 32)), Budget(1, 10, (1, 28, 28))


@pytest.mark.parametrize(
    ("budget", "bases", "matrices"),
    [(CIFAR10, 16, 115), (CIFAR10, 24, 51), (CIFAR10, 32, 19), (CIFAR100, 64, 40), (MNIST, 16, 29)],
)
def test_the_papers_numbers_of_matrices(budget, bases, matrices):
    assert budget.matrices(bases) == matrices


def test_default_bases():
    """A matrix for every 20 numbers of a base and 4 or more, or where not so many fit, one or more."""
    assert [budget.default_bases() for budget in (MNIST, CIFAR10, CIFAR100)] == [27, 26, 67]
    assert [budget.matrices(budget.default_bases()) for budget in (MNIST, CIFAR10, CIFAR100)] == [9, 41, 38]
    tight = Budget(1, 2, (3, 8, 8), downsample=1, query_size=64)
    assert tight.default_bases() == tight.bases(1) == 1
    assert tight.matrices(1) == 3
    small = Budget(1, 10, (1, 8, 8))
    assert (small.default_bases(), small.matrices(11)) == (11, 4)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_half_precision_holds_twice_the_numbers_and_says_so(precision):
    half = Budget(1, 10, (3, 32, 32), precision=precision)
    assert half.numbers == 2 * CIFAR10.numbers == 61440
    assert half.floats == CIFAR10.floats
    assert half.name == f"1 image per class ({precision})"
    assert half.matrices(16) == (61440 - 16 * 768) // 160 == 307
    assert (CIFAR10.name, Budget(10, 10, (3, 32, 32)).name) == ("1 image per class", "10 images per class")


def test_odd_sides_round_up():
    assert Budget(1, 2, (3, 7, 5)).base_shape == (3, 4, 3)
    assert Budget(1, 2, (3, 7, 5), downsample=3).base_shape == (3, 3, 2)
    assert make(shape=(1, 7, 5), downsample=2).recall()[0].shape[1:] == (1, 7, 5)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: Budget(0, 10, (3, 32, 32)), "images per class is 0: give 1 or more"),
        (lambda: Budget(-3, 10, (3, 32, 32)), "images per class is -3: give 1 or more"),
        (lambda: Budget(1, 10, (3, 32, 32), downsample=0), "downsample is 0 for images of 32x32: give 1 to 32"),
        (lambda: Budget(1, 10, (3, 32, 8), downsample=9), "downsample is 9 for images of 32x8: give 1 to 8"),
        (lambda: Budget(1, 10, (3, 32, 32), precision="float61"), "unknown precision 'float61': did you mean 'float16'"),
        (lambda: CIFAR10.matrices(0), "number of bases is 0: give 1 to 39"),
        (lambda: CIFAR10.matrices(-1), "number of bases is -1: give 1 to 39"),
        (lambda: CIFAR10.matrices(40), "40 bases do not fit 1 image per class .* at most 39 bases .* take fewer bases"),
        (lambda: CIFAR10.bases(0), "number of addressing matrices is 0: give 1 or more"),
        (lambda: CIFAR10.bases(10**9), "1000000000 addressing matrices do not fit .* take fewer matrices or more images"),
    ],
)
def test_an_impossible_budget_names_the_value_and_the_remedy(attempt, message):
    with pytest.raises(RecollectError, match=message):
        attempt()


def test_the_most_bases_that_the_error_offers_do_fit():
    assert CIFAR10.matrices(39) == 1


# recall: x'_i = y^T A_i B, upsampled


@quick
@given(st.tuples(*[st.integers(1, 4)] * 4), st.tuples(*[st.integers(1, 3)] * 3), st.integers(1, 3), st.integers(0, 2**16))
def test_recall_is_the_sum_written_out(sizes, base, scale, seed):
    count, matrices, classes, bases = sizes
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(bases, *base, generator=generator, dtype=torch.float64)
    addressing = torch.randn(matrices, classes, bases, generator=generator, dtype=torch.float64)
    queries = torch.randn(count, classes, generator=generator, dtype=torch.float64)
    size = (base[1] * scale, base[2] * scale - (scale > 1))
    found = recall(values, addressing, queries, size)
    assert found.shape == (count * matrices, base[0], *size)
    for q in range(count):
        for i in range(matrices):
            small = torch.zeros(1, *base, dtype=torch.float64)
            for y in range(classes):
                for k in range(bases):
                    small[0] += queries[q, y] * addressing[i, y, k] * values[k]
            large = F.interpolate(small, size=size, mode="bilinear", align_corners=False)[0]
            torch.testing.assert_close(found[q * matrices + i], large, rtol=1e-12, atol=1e-12)


def test_upsampling_has_its_samples_at_pixel_centres():
    found = recall(torch.tensor([[[[0.0, 1.0]]]]), torch.ones(1, 1, 1), torch.ones(1, 1), (2, 4))
    assert found.tolist() == [[[[0.0, 0.25, 0.75, 1.0]] * 2]]


def doubles(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def test_recall_is_linear_in_bases_in_addressing_and_in_the_query():
    b1, b2, a1, a2, y1, y2 = doubles(*[(3, 2, 3, 4)] * 2, *[(2, 5, 3)] * 2, *[(4, 5)] * 2)
    size = (5, 8)
    assert_close = torch.testing.assert_close
    mixed = 2 * recall(b1, a1, y1, size) - 3 * recall(b2, a1, y1, size)
    assert_close(recall(2 * b1 - 3 * b2, a1, y1, size), mixed)
    mixed = 2 * recall(b1, a1, y1, size) - 3 * recall(b1, a2, y1, size)
    assert_close(recall(b1, 2 * a1 - 3 * a2, y1, size), mixed)
    mixed = 2 * recall(b1, a1, y1, size) - 3 * recall(b1, a1, y2, size)
    assert_close(recall(b1, a1, 2 * y1 - 3 * y2, size), mixed)


def test_the_gradient_of_recall():
    inputs = [t.requires_grad_() for t in doubles((2, 2, 2, 3), (2, 3, 2), (2, 3))]
    assert torch.autograd.gradcheck(lambda *args: recall(*args, (4, 5)), inputs)


@pytest.mark.parametrize(
    ("query", "labels"),
    [
        (None, [0, 1, 2]),
        ([2, 0], [2, 0]),
        ((1,), [1]),
        (range(2), [0, 1]),
        (["ship", "cat"], [2, 0]),
        ("dog", [1]),
        (2, [2]),
        (["dog", 0, "dog"], [1, 0, 1]),
        ([1, 1, 1], [1, 1, 1]),
        (torch.tensor([2, 0, 2]), [2, 0, 2]),
        (torch.tensor([1], dtype=torch.uint8), [1]),
        (torch.tensor(0), [0]),
        (np.array([2, 1]), [2, 1]),
        (np.int64(1), [1]),
    ],
)
def test_any_classes_in_any_order(query, labels):
    memory = make()
    images, found = memory.recall(query)
    assert found.tolist() == [label for label in labels for _ in range(2)]
    everything, _ = memory.recall()
    by_class = everything.view(3, 2, 2, 6, 8)
    torch.testing.assert_close(images, by_class[labels].flatten(0, 1))
    torch.testing.assert_close(memory.coefficients(query), memory.coefficients()[labels])


def test_vectors_mix_classes():
    memory = make()
    vectors = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 2.0], [1.0, 0.0, 0.0]])
    images, labels = memory.recall(vectors)
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    cats, dogs, ships = memory.recall()[0].split(2)
    torch.testing.assert_close(images, torch.cat([(cats + dogs) / 2, 2 * ships, cats]))
    torch.testing.assert_close(memory.recall(vectors.double())[0], images)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (["shp"], "unknown class 'shp': did you mean 'ship'"),
        ("cats", "unknown class 'cats': did you mean 'cat'"),
        (["cat", "zebra"], "unknown class 'zebra': known: cat, dog, ship"),
        ([3], "label 3 is not one of this memory's 0 to 2"),
        ([0, -1], "label -1 is not one of this memory's 0 to 2"),
        (torch.tensor([7]), "label 7 is not one"),
        ([1.0], "label 1.0 is not one"),
        (torch.tensor([True, False, True]), "label True is not one"),
        ([[0, 1]], r"label \[0, 1\] is not one"),
        (torch.zeros(2, 4), r"query vectors are \[2, 4\]: give \[Q, 3\]"),
        (torch.zeros(3), r"query vectors are \[3\]: give \[Q, 3\]"),
        (torch.zeros(0, 3), r"query vectors are \[0, 3\]: give \[Q, 3\]"),
        ([], "the query is empty: name at least one class"),
        (torch.tensor([], dtype=torch.long), "the query is empty"),
    ],
)
def test_a_wrong_query_says_what_is_wrong(query, message):
    with pytest.raises(RecollectError, match=message):
        make().recall(query)


@pytest.mark.parametrize("downsample", [1, 2])
def test_one_hot_addressing_recalls_the_images_of_each_class(downsample):
    classes, per_class = 3, 4
    addressing = one_hot_addressing(classes, per_class)
    assert addressing.shape == (4, 3, 12)
    assert addressing.dtype == torch.uint8
    for i in range(per_class):  # the paper's indexing, entry by entry
        for m in range(classes):
            for n in range(classes * per_class):
                assert addressing[i, m, n] == (n == m * per_class + i)
    memory = make_one_hot(classes, per_class, downsample=downsample)
    images, labels = memory.recall()
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert torch.equal(images, F.interpolate(memory.bases, size=(6, 8), mode="bilinear"))
    if downsample == 1:
        assert torch.equal(memory.recall([2])[0], memory.bases[8:])


def test_dataset_feeds_a_data_loader():
    memory = make()
    dataset = memory.dataset(["dog", "cat"])
    assert len(dataset) == 4
    batches = list(torch.utils.data.DataLoader(dataset, batch_size=3))
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    expected = memory.recall(["dog", "cat"])
    assert torch.equal(images, expected[0])
    assert torch.equal(labels, expected[1])


def test_coefficients_and_their_similarity_are_what_they_are_defined_as():
    memory = make(matrices=3)
    query = torch.tensor([[1.0, 0.0, 0.0], [0.25, 0.5, -1.0]])
    a, y = memory.addressing.double().numpy(), query.double().numpy()
    coefficients = np.stack([[y[q] @ a[i] for i in range(3)] for q in range(2)])
    mean = coefficients.mean(1)
    cosine = mean @ mean.T / np.outer(*[np.linalg.norm(mean, axis=1)] * 2)
    np.testing.assert_allclose(memory.coefficients(query), coefficients, atol=1e-5)
    np.testing.assert_allclose(memory.mean_coefficients(query), mean, atol=1e-5)
    np.testing.assert_allclose(memory.similarity(query), cosine, atol=1e-5)


@pytest.mark.parametrize(("kind", "size"), [(torch.float32, 4), (torch.float16, 2), (torch.bfloat16, 2)])
def test_size_counts_learned_addressing_and_not_an_implied_one(kind, size):
    learned, implied = make(kind=kind), make_one_hot(kind=kind)
    assert learned.floats == 4 * 2 * 3 * 4 + 2 * 3 * 4
    assert repr(learned) == "Memory(toy: 3 classes of 2x6x8; 4 bases, 2 matrices, 120 numbers)"
    assert learned.nbytes == size * learned.floats
    assert implied.floats == 6 * 2 * 6 * 8
    assert implied.nbytes == size * implied.floats


def test_a_memory_at_the_budgets_edge_has_its_floats():
    budget = Budget(1, 10, (3, 32, 32))
    memory = make([str(c) for c in range(10)], budget.matrices(16), 16, (3, 32, 32))
    assert budget.numbers - 160 < memory.floats <= budget.numbers
    assert memory.recall()[0].shape == (1150, 3, 32, 32)


def test_half_precision_is_recalled_in_float32():
    for kind in (torch.float16, torch.bfloat16):
        memory = make(kind=kind)
        exact = recall(memory.bases.double(), memory.addressing.double(), torch.eye(3).double(), (6, 8))
        images, _ = memory.recall()
        assert images.dtype == torch.float32
        torch.testing.assert_close(images.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(bases=torch.zeros(4, 2, 3, 5)), r"bases are \[2, 3, 5\] where the header tells \[2, 3, 4\]"),
        (dict(bases=torch.zeros(5, 2, 3, 4)), "addressing is for 4 bases, and it has 5"),
        (dict(bases=torch.zeros(4, 2, 3, 4).double()), "'bases' is torch.float64"),
        (dict(addressing=torch.zeros(2, 2, 4)), "addressing is for 2 classes, and the header names 3"),
        (dict(addressing=torch.zeros(0, 3, 4)), r"'addressing' is F32 \[0, 3, 4\]"),
        (dict(addressing=torch.zeros(2, 3, 4, dtype=torch.uint8)), "'addressing' is U8"),
        (dict(header=Header("toy", ["a", "a", "b"], [2, 6, 8], 2)), "'class_names'"),
        (dict(header=Header("toy", NAMES, [2, 6, 8], 2, accuracy=[{"mean": math.nan}])), "cannot be written as JSON"),
    ],
)
def test_tensors_and_header_that_do_not_belong_together_are_refused(change, message):
    memory = make()
    parts = dict(bases=memory.bases, addressing=memory.addressing, header=memory.header) | change
    with pytest.raises(RecollectError, match=message):
        Memory(**parts)


# The file


def json_values():
    leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
    names = st.text().map("more {}".format)  # none of those whose values are checked
    return st.dictionaries(names, st.recursive(leaves, lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=4))


@st.composite
def memories(draw) -> Memory:
    names = draw(st.lists(st.text(), min_size=1, max_size=4, unique=True))
    shape = tuple(draw(st.integers(1, 7)) for _ in range(3))
    downsample, matrices = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(list(PRECISIONS.values())))
    more = dict(made=draw(json_values()), accuracy=draw(st.lists(json_values(), max_size=2)))
    if draw(st.booleans()):
        header = Header(draw(st.text()), names, list(shape), downsample, "one-hot", **more)
        addressing = one_hot_addressing(len(names), matrices)
        values = torch.randn(len(names) * matrices, *header.base_shape, generator=torch.Generator().manual_seed(0))
        return Memory(values.to(kind), addressing, header)
    return make(names, matrices, draw(st.integers(1, 4)), shape, downsample, kind, draw(st.integers(0, 99)), **more)


@settings(max_examples=80, deadline=None)
@given(memories())
def test_what_is_saved_is_what_is_loaded(tmp_path_factory, memory):
    path = tmp_path_factory.mktemp("memory") / "memory.safetensors"
    memory.save(path)
    found = Memory.load(path)
    assert same_bits(found.bases, memory.bases)
    assert same_bits(found.addressing, memory.addressing)
    assert found.class_names == memory.class_names
    assert json.loads(found.header.to_json()) | {"checksum": ""} == json.loads(memory.header.to_json())
    assert torch.equal(found.recall()[0], memory.recall()[0])
    assert (found.floats, found.nbytes, found.folder) == (memory.floats, memory.nbytes, path.parent)
    before = path.read_bytes()
    found.save(path)
    assert path.read_bytes() == before  # the same memory is the same bytes


def test_strided_tensors_and_parameters_are_saved_by_value(tmp_path):
    memory = make()
    block = torch.cat([memory.bases.flatten(), memory.addressing.flatten()])
    bases, addressing = block[:96].view(4, 2, 3, 4), block[96:].view(2, 3, 4)
    twisted = bases.contiguous(memory_format=torch.channels_last).requires_grad_()
    for number, parts in enumerate([(bases, addressing), (twisted, addressing.mT.contiguous().mT)]):
        Memory(*parts, memory.header).save(tmp_path / f"{number}.safetensors")
    memory.save(tmp_path / "plain.safetensors")
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


@pytest.mark.parametrize("step", ["replace", "fsync"])
@pytest.mark.parametrize(
    ("number", "message"), [(errno.ENOSPC, "no space left to write .*: make room"), (errno.EACCES, "cannot write")]
)
def test_a_save_that_fails_leaves_all_as_it_was(tmp_path, monkeypatch, step, number, message):
    path = tmp_path / "memory.safetensors"
    make(seed=1).save(path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(RecollectError, match=message):
            make(seed=2).save(path)
        with pytest.raises(RecollectError, match=message):
            make(seed=2).save(tmp_path / "new.safetensors")
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["memory.safetensors"]
    make(seed=2).save(path)
    assert path.read_bytes() != before


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "memory.safetensors"
    make(seed=1).save(path)
    before, seen, fsync = path.read_bytes(), [], os.fsync

    def look(descriptor):
        fsync(descriptor)
        seen.append(path.read_bytes() == before)

    monkeypatch.setattr(os, "fsync", look)
    make(seed=2).save(path)
    assert seen == [True, False]  # the file's bytes, then its name
    assert path.read_bytes() != before


@pytest.mark.parametrize("place", ["file/memory.safetensors", "folder", "x" * 300])
def test_a_place_that_cannot_be_written_is_named(tmp_path, place):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RecollectError, match=f"cannot write .*{place}"):
        make().save(tmp_path / place)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_save_makes_the_folder(tmp_path):
    make().save(str(tmp_path / "a" / "b" / "memory.safetensors"))
    assert Memory.load(str(tmp_path / "a" / "b" / "memory.safetensors")).class_names == tuple(NAMES)


def test_with_accuracy_replaces_what_was_measured_the_same_way(tmp_path):
    first, second = {"network": "convnet", "on": "test", "mean": 0.5}, {"network": "mlp", "on": "test", "mean": 0.25}
    memory = make().with_accuracy(first, second)
    better = memory.with_accuracy(first | {"mean": 0.75})
    assert better.header.accuracy == [second, first | {"mean": 0.75}]
    assert memory.header.accuracy == [first, second]
    better.save(tmp_path / "memory.safetensors")
    assert Memory.load(tmp_path / "memory.safetensors").header.accuracy == better.header.accuracy


def by_a_stranger(path):
    """Recall with nothing but torch, safetensors and json: no line of recollect."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["recollect"])
        bases, addressing = file.get_tensor("bases").float(), file.get_tensor("addressing").float()
    images = torch.einsum("ryk,kchw->yrchw", addressing, bases).flatten(0, 1)
    images = F.interpolate(images, size=header["image_shape"][1:], mode="bilinear", align_corners=False)
    labels = torch.arange(len(header["class_names"])).repeat_interleave(len(addressing))
    return images, labels


@pytest.mark.parametrize("downsample", [1, 2])
@pytest.mark.parametrize("kind", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("build", [make, make_one_hot])
def test_a_strangers_ten_lines_recall_the_same(tmp_path, build, kind, downsample):
    memory = build(downsample=downsample, kind=kind)
    memory.save(tmp_path / "memory.safetensors")
    images, labels = by_a_stranger(tmp_path / "memory.safetensors")
    expected = Memory.load(tmp_path / "memory.safetensors").recall()
    torch.testing.assert_close(images, expected[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(labels, expected[1])


# What is beside it: preprocessing


def test_the_preprocessing_travels_with_the_file(tmp_path):
    pixels = torch.randint(256, (40, 2, 6, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    preprocess = Preprocess.fit(pixels, "zca")
    preprocess.save_sidecar(tmp_path)
    make(preprocessing=preprocess.to_json()).save(tmp_path / "memory.safetensors")
    found = Memory.load(tmp_path / "memory.safetensors")
    assert torch.equal(found.preprocess()(pixels), preprocess(pixels))
    assert torch.equal(found.with_accuracy({"mean": 1.0}).preprocess()(pixels), preprocess(pixels))
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (tmp_path / "memory.safetensors").rename(elsewhere / "memory.safetensors")
    with pytest.raises(RecollectError, match=f"whitening file zca-.* is not beside the memory in {elsewhere}: copy"):
        Memory.load(elsewhere / "memory.safetensors").preprocess()


def test_preprocessing_for_other_images_is_refused(tmp_path):
    pixels = torch.randint(256, (9, 2, 3, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    smaller = Preprocess.fit(pixels, "zca")
    smaller.save_sidecar(tmp_path)
    grey = {"mean": [0.5], "std": [0.5], "zca": None}
    for preprocessing in (grey, smaller.to_json()):
        memory = make(preprocessing=preprocessing)
        memory.folder = tmp_path
        with pytest.raises(RecollectError, match=r"preprocessing is not for its images of \[2, 6, 8\]"):
            memory.preprocess()
    with pytest.raises(RecollectError, match=r"preprocessing \{\} is damaged"):
        make().preprocess()


def begun(**changes):
    images = toy()
    config = resolve(changed(CONFIG, **changes), images)
    network = Network(config.inner.network, images.shape, 3)
    return images, Distiller(images, config, Preprocess.fit(images.train.images), network).begin()


@pytest.mark.parametrize("changes", [{"bases": 15}, {"addressing": "one-hot", "bases": None}])
def test_samples_are_recalled(changes):
    """Each class recalls training images of its own: as many bases as samples, at full size."""
    images, state = begun(init="samples", images_per_class=6, downsample=1, **changes)
    recalled = recall(state.bases, state.addressing, torch.eye(3), (4, 4)).detach()
    labels = torch.arange(3).repeat_interleave(len(state.addressing))
    real = Preprocess.fit(images.train.images)(images.train.images)
    far, nearest = (recalled[:, None] - real).flatten(2).norm(dim=2).min(1)
    assert torch.equal(images.train.labels[nearest], labels)
    if "addressing" in changes:
        assert far.max() == 0
        assert len(nearest.unique()) == len(nearest)
    assert state.addressing.requires_grad == ("addressing" not in changes)


def test_unit_recalls_have_variance_one():
    _, state = begun(init="unit", images_per_class=12, bases=8)
    assert recall(state.bases, state.addressing, torch.eye(3), (4, 4)).var().item() == pytest.approx(1, abs=0.35)


def test_the_fresh_start_is_the_seed_s():
    first, again, other = (begun(seed=seed)[1] for seed in (0, 0, 1))
    assert torch.equal(first.bases, again.bases)
    assert not torch.equal(first.bases, other.bases)
    assert begun(init="xavier")[1].bases.abs().max() != begun(init="kaiming")[1].bases.abs().max()
