"""The readers, each on small files in its real format; every kind of bad file; the split."""

import gzip
import os
import pickle
import struct
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from recollect import data
from recollect.data import readers
from recollect.data.images import Split, make_images, stratified
from recollect.errors import RecollectError

RNG = np.random.default_rng(0)


def random_images(n: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, 256, (n, *shape), dtype=np.uint8)


def rows(images, labels) -> list[tuple[bytes, int]]:
    """Images and labels as something that compares without regard to order."""
    return sorted(
        (np.ascontiguousarray(image).tobytes(), int(label)) for image, label in zip(images, labels, strict=True)
    )


def assert_holds(found: data.Images, train: tuple, test: tuple) -> None:
    """Training data is in train and validation, whole and once; test data is the test set, in order. NCHW."""
    for split in (found.train, found.validation, found.test):
        assert split.images.dtype == torch.uint8
        assert split.labels.dtype == torch.int64
    both = found.train + found.validation
    assert both.images.shape[1:] == train[0].shape[1:]
    assert rows(both.images.numpy(), both.labels) == rows(*train)
    assert np.array_equal(found.test.images.numpy(), test[0])
    assert found.test.labels.tolist() == list(test[1])


def refused(match: str, *args, **kwargs) -> str:
    """`load` refuses, in one line that matches."""
    with pytest.raises(RecollectError, match=match) as caught:
        data.load(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- the split -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), max_size=200), st.floats(0.01, 0.9), st.integers(0, 2**31))
def test_stratified_holds_out_the_share_of_each_class(labels, share, seed):
    labels = torch.tensor(labels, dtype=torch.int64)
    kept, held = stratified(labels, share, seed)
    assert sorted(kept.tolist() + held.tolist()) == list(range(len(labels)))  # disjoint and whole
    again = stratified(labels, share, seed)
    assert torch.equal(kept, again[0])
    assert torch.equal(held, again[1])
    for label, n in Counter(labels.tolist()).items():
        out = int((labels[held] == label).sum())
        assert abs(out - share * n) <= 1 or n == 1
        assert (1 <= out < n) if n > 1 else out == 0


def test_split_depends_on_the_seed_alone():
    labels = torch.arange(10).repeat(30)
    first, second = stratified(labels, 0.1, 0)[1], stratified(labels, 0.1, 1)[1]
    assert not torch.equal(first, second)
    assert stratified(torch.arange(2).repeat_interleave(10), 0.2, 0)[1].tolist() == [1, 4, 13, 19]  # for all time


def test_digits():
    from sklearn.datasets import load_digits

    found = data.load("digits")
    assert found.name == "digits"
    assert found.shape == (1, 8, 8)
    assert found.class_names == tuple("0123456789")
    whole = found.train + found.validation + found.test
    official = load_digits()
    expected = np.floor(official.images[:, None] * 255 / 16 + 0.5).astype(np.uint8)
    assert rows(whole.images.numpy(), whole.labels) == rows(expected, official.target)
    assert int(whole.images.max()) == 255
    assert len(found.test) == pytest.approx(1797 * 0.2, abs=5)
    assert len(found.validation) == pytest.approx(1797 * 0.8 * 0.1, abs=5)
    same, other = data.load("digits", seed=0), data.load("digits", seed=1)
    assert torch.equal(found.validation.images, same.validation.images)
    assert torch.equal(found.test.images, same.test.images)
    assert rows(found.test.images.numpy(), found.test.labels) != rows(other.test.images.numpy(), other.test.labels)


def split_of(labels: list[int], shape=(1, 2, 2)) -> Split:
    return Split(torch.zeros(len(labels), *shape, dtype=torch.uint8), torch.tensor(labels))


@pytest.mark.parametrize(
    ("train", "test", "names", "message"),
    [
        (split_of([0, 0, 2, 2]), None, "abc", "class 'b' has no training images"),
        (split_of([0, 0, 1, 3]), None, "abc", r"label 3 is out of range for 3 classes \(0..2\)"),
        (split_of([0, -1, 1, 2]), None, "abc", "label -1 is out of range"),
        (split_of([0, 0, 1, 1]), split_of([2]), "ab", r"\(test\): label 2"),
        (split_of([0, 0, 1, 1]), split_of([]), "ab", r"\(test\): no images"),
        (split_of([0, 0, 1, 1]), split_of([1], (1, 3, 2)), "ab", "--size"),
        (split_of([0, 0, 1, 1]), split_of([1], (3, 2, 2)), "ab", "all grey or all RGB"),
        (split_of([0, 0, 1, 1]), None, "aa", "two classes are named 'a'"),
        (split_of([0, 1]), None, "ab", "too few images"),
        (Split(torch.zeros(2, 1, 2, 2), torch.tensor([0, 1])), None, "ab", "torch.float32"),
        (Split(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1])), None, "ab", "3 images but 2 labels"),
    ],
)
def test_make_images_checks(train, test, names, message):
    with pytest.raises(RecollectError, match=message):
        make_images("toy", train, test, tuple(names))


# --- names, places -------------------------------------------------------------------------------------------------


def test_unknown_names_and_paths(tmp_path):
    assert "did you mean 'cifar10'" in refused("unknown dataset 'cifar-10'", "cifar-10")
    refused("unknown dataset ''", "")
    refused("unknown dataset 'hf:'", "hf:")
    refused("no such file or folder: .*nowhere/pictures", tmp_path / "nowhere/pictures")
    refused("no such file or folder", "nowhere.npz")
    refused("no such file or folder", "x/" * 5000)
    (tmp_path / "notes.txt").write_text("hello")
    refused("notes.txt: neither a folder nor an .npz", tmp_path / "notes.txt")
    for size in (0, -3):
        refused(f"size {size} is not an image size", "digits", size=size)


@pytest.mark.parametrize("name", list(data.NAMED))
def test_missing_dataset_says_what_where_and_how(name, tmp_path):
    message = refused(f"dataset '{name}' is not there", name, root=tmp_path)
    for layout in data.NAMED[name].layouts:
        assert all(names[0] in message for names in layout.files)
    assert f"{tmp_path}, " in message or f"{tmp_path}. " in message
    assert str(tmp_path / data.NAMED[name].folders[0]) in message
    assert f"`recollect data get {name}`" in message
    assert "--root" in message
    assert "RECOLLECT_DATA" in message


def test_incomplete_dataset_names_the_gap(tmp_path):
    (tmp_path / "svhn").mkdir()
    (tmp_path / "svhn/test_32x32.mat").write_bytes(b"")
    assert f"{tmp_path}/svhn lacks train_32x32.mat" in refused("svhn", "svhn", root=tmp_path)


def test_root_from_environment_and_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RECOLLECT_DATA", "~/sets")
    assert data.data_root() == tmp_path / "sets"
    assert data.data_root("~/other") == tmp_path / "other"
    monkeypatch.delenv("RECOLLECT_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data.data_root() == tmp_path / "cache/recollect"


def test_import_stays_light():
    heavy = {"sklearn", "scipy", "PIL", "pooch", "requests", "datasets", "rich"}
    code = f"import sys, recollect.data, recollect.data.fetch; sys.exit(str({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "set()"


# --- IDX -----------------------------------------------------------------------------------------------------------


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, dot: str = "-", gz: bool = False) -> tuple[tuple, tuple]:
    """A toy MNIST of 40 training and 20 test images in the official files; returns its arrays as NCHW."""
    folder.mkdir(parents=True, exist_ok=True)
    sets = []
    for stem, n in (("train", 40), ("t10k", 20)):
        images, labels = random_images(n, 28, 28), RNG.permutation(np.arange(n, dtype=np.uint8) % 10)
        for kind, array in ((f"images{dot}idx3-ubyte", images), (f"labels{dot}idx1-ubyte", labels)):
            content = idx_bytes(array)
            (folder / f"{stem}-{kind}{'.gz' if gz else ''}").write_bytes(gzip.compress(content) if gz else content)
        sets.append((images[:, None], labels))
    return sets[0], sets[1]


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("dot", ["-", "."])
@pytest.mark.parametrize("place", ["mnist", "MNIST/raw", "."])
def test_mnist(place, dot, gz, tmp_path):
    train, test = write_idx(tmp_path / place, dot, gz)
    found = data.load("MNIST", root=tmp_path)
    assert_holds(found, train, test)
    assert found.name == "mnist"
    assert found.class_names == tuple("0123456789")
    assert len(found.validation) == 10  # one of each class's four
    assert_holds(data.load(tmp_path / place), train, test)  # the folder given directly


def test_fashion_mnist_never_takes_the_files_of_mnist(tmp_path):
    write_idx(tmp_path / "mnist")
    train, test = write_idx(tmp_path / "FashionMNIST/raw")
    found = data.load("fashion-mnist", root=tmp_path)
    assert_holds(found, train, test)
    assert found.class_names[9] == "Ankle boot"
    assert data.load(tmp_path / "FashionMNIST/raw").name == "fashion-mnist"
    refused("'fashion-mnist' is not there", "fashion-mnist", root=tmp_path / "mnist")


def test_size_resizes_array_datasets_as_pillow_does(tmp_path):
    _, (images, _) = write_idx(tmp_path)
    found = data.load("mnist", root=tmp_path, size=16)
    assert found.shape == (1, 16, 16)
    pillow = [np.asarray(Image.fromarray(image[0]).resize((16, 16), Image.Resampling.BILINEAR)) for image in images]
    assert np.abs(found.test.images[:, 0].numpy().astype(int) - np.stack(pillow)).max() <= 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-10], "bytes, but its header"),
        (lambda raw: raw + b"x", "bytes, but its header"),
        (lambda raw: b"", "starts with nothing"),
        (lambda raw: b"\0\0\x0d" + raw[3:], "not an IDX file of bytes in 3"),
        (lambda raw: idx_bytes(np.zeros(40, np.uint8)), "not an IDX file of bytes in 3"),
        (lambda raw: idx_bytes(np.zeros((39, 28, 28), np.uint8)), "39 images, but 40 labels in .*train-labels"),
        (lambda raw: gzip.compress(raw)[:-200], "gzip data ends early or is broken"),
        (lambda raw: gzip.compress(raw)[:5], "gzip data ends early or is broken"),
        (lambda raw: gzip.compress(raw)[:500] + b"\xff" * 500, "gzip data ends early or is broken"),
    ],
)
def test_damaged_idx(damage, message, tmp_path):
    write_idx(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    assert str(path) in refused(message, "mnist", root=tmp_path)


def test_unreadable_file_is_named(tmp_path):
    with pytest.raises(RecollectError, match=r"nothing: cannot be read \(No such file"):
        readers.idx(tmp_path / "nothing", 3)


# --- CIFAR, binary and pickled -------------------------------------------------------------------------------------


def cifar_arrays(n: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    return random_images(n, 3, 32, 32), RNG.permutation(np.arange(n) % classes).astype(np.uint8)


def python2_pickle(value) -> bytes:
    """Protocol 2 as Python 2 wrote it: strings are byte strings, arrays are from numpy.core.multiarray."""

    def dump(value) -> bytes:
        match value:
            case str():
                return dump(value.encode())
            case bytes() if len(value) < 256:
                return b"U" + struct.pack("<B", len(value)) + value
            case bytes():
                return b"T" + struct.pack("<i", len(value)) + value
            case int():
                return b"J" + struct.pack("<i", value)
            case list():
                return b"](" + b"".join(map(dump, value)) + b"e"
            case dict():
                return b"}(" + b"".join(dump(k) + dump(v) for k, v in value.items()) + b"u"
            case np.ndarray():
                empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
                dtype = b"cnumpy\ndtype\n" + dump(value.dtype.str[1:]) + b"K\x00K\x01\x87R"
                dtype += b"(K\x03U\x01|NNN" + dump(-1) + dump(-1) + b"K\x00tb"
                shape = b"(" + b"".join(map(dump, value.shape)) + b"t"
                return empty + b"(K\x01" + shape + dtype + b"\x89" + dump(value.tobytes()) + b"tb"
        raise TypeError(type(value))

    return b"\x80\x02" + dump(value) + b"."


PICKLERS = {
    "python2": python2_pickle,
    "protocol2": lambda value: pickle.dumps(value, protocol=2),
    "protocol4": lambda value: pickle.dumps(value, protocol=4),
    "bytes keys": lambda value: pickle.dumps({key.encode(): item for key, item in value.items()}, protocol=3),
}


def write_cifar10(folder: Path, dump=None) -> tuple[tuple, tuple]:
    """Five batches of 20 and a test batch of 10; binary, or pickled by `dump`."""
    folder.mkdir(parents=True, exist_ok=True)
    batches = [cifar_arrays(20, 10) for _ in range(5)] + [cifar_arrays(10, 10)]
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for name, (images, labels) in zip(names, batches, strict=True):
        flat = images.reshape(len(images), -1)
        if dump is None:
            (folder / f"{name}.bin").write_bytes(np.column_stack([labels, flat]).tobytes())
        else:
            batch = {"batch_label": name, "labels": labels.tolist(), "data": flat, "filenames": ["a.png"] * len(flat)}
            (folder / name).write_bytes(dump(batch))
    train = [np.concatenate(arrays) for arrays in zip(*batches[:5], strict=True)]
    return (train[0], train[1]), batches[5]


@pytest.mark.parametrize("style", ["binary", *PICKLERS])
def test_cifar10(style, tmp_path):
    folder = tmp_path / ("cifar-10-batches-bin" if style == "binary" else "cifar-10-batches-py")
    train, test = write_cifar10(folder, PICKLERS.get(style))
    found = data.load("cifar10", root=tmp_path)
    assert_holds(found, train, test)
    assert found.class_names[:3] == ("airplane", "automobile", "bird")
    assert found.superclasses is None
    assert_holds(data.load(folder), train, test)


def test_python2_pickle_is_what_pickle_itself_reads():
    value = {"data": random_images(4, 3072), "labels": [1, 2, 3, 4]}
    found = pickle.loads(python2_pickle(value), encoding="latin1")
    assert np.array_equal(found["data"], value["data"])
    assert found["labels"] == value["labels"]


COARSE = np.arange(100) * 7 % 20


def write_cifar100(folder: Path, dump=None, coarse=COARSE) -> tuple[tuple, tuple]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"thing_{i}" for i in range(100)]
    sets = cifar_arrays(200, 100), cifar_arrays(100, 100)
    for name, (images, fine) in zip(("train", "test"), sets, strict=True):
        flat = images.reshape(len(images), -1)
        if dump is None:
            content = np.column_stack([coarse[fine].astype(np.uint8), fine, flat]).tobytes()
            (folder / f"{name}.bin").write_bytes(content)
        else:
            batch = {"data": flat, "fine_labels": fine.tolist(), "coarse_labels": coarse[fine].tolist()}
            (folder / name).write_bytes(dump(batch))
    if dump is None:
        (folder / "fine_label_names.txt").write_text("\n".join(names) + "\n\n")
    else:
        (folder / "meta").write_bytes(dump({"fine_label_names": names, "coarse_label_names": ["c"] * 20}))
    return sets


@pytest.mark.parametrize("style", ["binary", "python2", "protocol2"])
def test_cifar100(style, tmp_path):
    folder = tmp_path / ("cifar-100-binary" if style == "binary" else "cifar-100-python")
    train, test = write_cifar100(folder, PICKLERS.get(style))
    found = data.load("cifar100", root=tmp_path)
    assert_holds(found, train, test)
    assert found.class_names[42] == "thing_42"
    assert found.superclasses == tuple(COARSE.tolist())


def test_damaged_cifar(tmp_path):
    write_cifar10(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    good = path.read_bytes()
    for bad, message in (
        (good[:-1], "61459 bytes is not a whole number of records of 3073"),
        (b"", "0 bytes"),
        (b"\x0b" + good[1:], r"label 11 is out of range \(0..9\)"),
    ):
        path.write_bytes(bad)
        assert str(path) in refused(message, "cifar10", root=tmp_path)
    write_cifar100(tmp_path)
    (tmp_path / "fine_label_names.txt").write_text("one two three")
    refused("fine_label_names.txt: 3 class names instead of 100", "cifar100", root=tmp_path)
    write_cifar100(tmp_path)
    raw = bytearray((tmp_path / "train.bin").read_bytes())
    raw[0] = (raw[0] + 1) % 20
    (tmp_path / "train.bin").write_bytes(raw)
    refused("train.bin: a class belongs to two superclasses", "cifar100", root=tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": random_images(20, 3071)}, r"no 'data' of bytes \[N, 3072\]"),
        ({"data": random_images(20, 3072).astype(np.int64)}, "no 'data' of bytes"),
        ({"data": [1, 2]}, "no 'data' of bytes"),
        ({"labels": [0] * 19}, "20 images but 19 'labels'"),
        ({"labels": [0] * 19 + [10]}, "label 10 is out of range"),
        ({"labels": [0] * 19 + [2**70]}, "out of range"),
        ({"labels": [0.5] * 20}, "no list of whole numbers 'labels'"),
        ({"labels": "zero"}, "no list of whole numbers 'labels'"),
    ],
)
def test_wrong_cifar_pickle(change, message, tmp_path):
    write_cifar10(tmp_path, PICKLERS["protocol2"])
    path = tmp_path / "data_batch_2"
    path.write_bytes(pickle.dumps({"data": random_images(20, 3072), "labels": [0] * 20} | change, protocol=2))
    assert str(path) in refused(message, "cifar10", root=tmp_path)


class Call:
    """Pickles to a call of any function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


STRUCTURED = np.zeros(2, [("a", "u1"), ("b", "u1")])
EVIL = {
    "os.system": lambda mark: pickle.dumps({"data": Call(os.system, f"touch {mark}")}),
    "eval": lambda mark: pickle.dumps({"data": Call(eval, f"open({str(mark)!r}, 'w')")}, protocol=0),
    "python 2's eval": lambda mark: b"c__builtin__\neval\n(S\"open('" + str(mark).encode() + b"', 'w')\"\ntR.",
    "inst opcode": lambda mark: b"(S'touch " + str(mark).encode() + b"'\nios\nsystem\n.",
    "getattr": lambda mark: pickle.dumps(Call(getattr, "x", "join")),
    "numpy.load": lambda mark: pickle.dumps(Call(np.load, str(mark))),
    "dotted name": lambda mark: b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.",
    "object array": lambda mark: pickle.dumps({"data": np.array([[1], None], dtype=object)}, protocol=2),
    "structured array": lambda mark: pickle.dumps({"data": STRUCTURED}, protocol=2),
    "fields set on a plain dtype": lambda mark: (
        b"\x80\x02}U\x04datacnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|N(U\x01at}U\x01aK\x00stbs."
    ),
    "subclass rebuilt": lambda mark: (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\ndtype\nK\x00\x85U\x01b\x87R."
    ),
    "array with memory": lambda mark: (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x09\x85U\x01b\x87R."
    ),
    "other codec": lambda mark: b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.",
    "attributes on a stand-in": lambda mark: b"\x80\x02c_codecs\nencode\n}U\x08__call__K\x01sb.",
    "stand-in as a class": lambda mark: b"\x80\x02cnumpy\nndarray\n)\x81.",
    "persistent id": lambda mark: b"Pthing\n.",
    "memo of 64 GB": lambda mark: b"\x80\x02}r\xff\xff\xff\xff.",
    "extension": lambda mark: b"\x80\x02\x82\x01.",
}


REASONS = {
    "os.system": r"it asks for (posix|nt)\.system",
    "python 2's eval": r"it asks for __builtin__\.eval",
    "numpy.load": r"it asks for numpy\.load",
    "object array": "arrays of type 'O8' are refused",
    "structured array": "arrays of type 'V2' are refused",
    "fields set on a plain dtype": "structured arrays are refused",
    "memo of 64 GB": "memo 4294967295 is out of range",
    "other codec": "encode is only for latin1",
}


@pytest.mark.parametrize("kind", list(EVIL))
def test_malicious_pickle_is_refused_and_does_nothing(kind, tmp_path):
    mark, path = tmp_path / "mark", tmp_path / "data_batch_1"
    path.write_bytes(EVIL[kind](mark))
    with pytest.raises(
        RecollectError, match=f"data_batch_1: not a readable pickle of arrays .*{REASONS.get(kind, '')}"
    ):
        readers.unpickle(path)
    assert not mark.exists()
    assert np.dtype("u1").fields is None


def test_pickle_that_is_no_dict(tmp_path):
    (tmp_path / "x").write_bytes(pickle.dumps([1]))
    with pytest.raises(RecollectError, match="holds a list instead of a dict"):
        readers.unpickle(tmp_path / "x")


@pytest.mark.parametrize("dtype", ["bool", "int16", ">i4", "float64", "S3", "U2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_unpickle_keeps_plain_arrays(dtype, order, tmp_path):
    array = np.asarray(RNG.integers(0, 9, (3, 4)).astype(dtype), order=order)
    (tmp_path / "x").write_bytes(pickle.dumps({"a": array}, protocol=2))
    found = readers.unpickle(tmp_path / "x")["a"]
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


# --- SVHN ----------------------------------------------------------------------------------------------------------


def write_svhn(folder: Path, **changes) -> tuple[tuple, tuple]:
    from scipy.io import savemat

    folder.mkdir(parents=True, exist_ok=True)
    sets = []
    for name, n in (("train", 30), ("test", 10)):
        images, labels = random_images(n, 3, 32, 32), RNG.permutation(np.arange(n) % 10)
        official = {"X": images.transpose(2, 3, 1, 0), "y": np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]}
        official |= {key: value for key, value in changes.items() if name == "train"}
        savemat(folder / f"{name}_32x32.mat", official, do_compression=True)
        sets.append((images, labels))
    return sets[0], sets[1]


def test_svhn(tmp_path):
    train, test = write_svhn(tmp_path / "svhn")
    found = data.load("svhn", root=tmp_path)
    assert_holds(found, train, test)  # the official label 10 is the digit 0
    assert found.class_names == tuple("0123456789")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": np.full((30, 1), 11, np.uint8)}, r"label 11 is out of range \(1..10\)"),
        ({"y": np.ones((29, 1), np.uint8)}, "30 images but 29 labels"),
        ({"y": np.full((30, 1), 1.5)}, "float64"),
        ({"X": np.zeros((32, 32, 3, 30))}, "X is float64"),
        ({"X": "text"}, "X is"),
    ],
)
def test_wrong_svhn(changes, message, tmp_path):
    write_svhn(tmp_path, **changes)
    assert "train_32x32.mat" in refused(message, "svhn", root=tmp_path)


def test_damaged_svhn(tmp_path):
    from scipy.io import savemat

    write_svhn(tmp_path)
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(path.read_bytes()[:5000])
    refused("train_32x32.mat: not a readable .mat file", "svhn", root=tmp_path)
    savemat(path, {"z": np.zeros(3)})
    refused("train_32x32.mat: has no variables X and y", "svhn", root=tmp_path)


# --- pictures ------------------------------------------------------------------------------------------------------


def save_picture(path: Path, mode: str = "RGB", size: tuple[int, int] = (8, 6)) -> np.ndarray:
    """A random picture of width x height `size`; returns what its file decodes to, [C, H, W]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    w, h = size
    Image.fromarray(random_images(h, w, 3) if mode == "RGB" else random_images(h, w)).save(path)
    with Image.open(path) as picture:
        return np.asarray(picture.convert(mode)).reshape(h, w, -1).transpose(2, 0, 1)


WNIDS = ["n001", "n002", "n003"]


def write_tiny(folder: Path) -> tuple[tuple, tuple]:
    train = [
        (save_picture(folder / f"train/{wnid}/images/{wnid}_{i}.JPEG", size=(64, 64)), label)
        for label, wnid in enumerate(WNIDS)
        for i in range(4)
    ]
    (folder / "train/n001/n001_boxes.txt").write_text("n001_0.JPEG\t0\t0\t1\t1\n")
    test, lines = [], []
    for i, label in enumerate([2, 0, 1, 2]):
        test.append((save_picture(folder / f"val/images/val_{i}.JPEG", size=(64, 64)), label))
        lines.append(f"val_{i}.JPEG\t{WNIDS[label]}\t0\t32\t44\t62\n")
    grey = save_picture(folder / "val/images/val_4.JPEG", "L", (64, 64))  # a few official pictures are grey
    test.append((grey.repeat(3, axis=0), 0))
    lines.append("val_4.JPEG\tn001\t0\t32\t44\t62\n")
    (folder / "val/val_annotations.txt").write_text("".join(lines))
    (folder / "words.txt").write_text("n001\tcrane\nn002\tgoldfish, Carassius auratus\nn003\tcrane, bird\nn9\tx\n")
    pairs = [tuple(np.stack(column) for column in zip(*split, strict=True)) for split in (train, test)]
    return pairs[0], pairs[1]


def test_tiny_imagenet(tmp_path):
    folder = tmp_path / "tiny-imagenet-200"
    train, test = write_tiny(folder)
    found = data.load("tinyimagenet", root=tmp_path)
    assert_holds(found, train, test)
    assert found.class_names == ("crane (n001)", "goldfish", "crane (n003)")
    assert data.load("tinyimagenet", root=tmp_path, size=32).shape == (3, 32, 32)
    (folder / "words.txt").unlink()
    assert data.load(folder).class_names == tuple(WNIDS)
    with (folder / "val/val_annotations.txt").open("a") as file:
        file.write("val_5.JPEG\tn777\t0\t0\t0\t0\n")
    refused("val_annotations.txt: line 6", "tinyimagenet", root=tmp_path)


def test_tiny_imagenet_with_a_missing_picture(tmp_path):
    write_tiny(tmp_path)
    (tmp_path / "val/images/val_2.JPEG").unlink()
    refused("val_2.JPEG: .*No such file", "tinyimagenet", root=tmp_path)


def write_folder(folder: Path, classes: str, n: int = 5, mode: str = "RGB") -> tuple[np.ndarray, list[int]]:
    images, labels = [], []
    for label, name in enumerate(classes):
        for i in range(n):
            images.append(save_picture(folder / name / f"{i}.png", mode))
            labels.append(label)
    return np.stack(images), labels


def test_folder_of_class_folders(tmp_path):
    folder = tmp_path / "pets"
    images, labels = write_folder(folder, "ab")
    (folder / ".DS_Store").write_bytes(b"hidden")
    (folder / "a/.hidden.txt").write_bytes(b"hidden")
    found = data.load(str(folder))
    assert found.name == "pets"
    assert found.class_names == ("a", "b")
    whole = found.train + found.validation + found.test
    assert rows(whole.images.numpy(), whole.labels) == rows(images, labels)
    assert (len(found.test), len(found.validation)) == (2, 2)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_folder_with_its_own_splits(mode, tmp_path):
    train = write_folder(tmp_path / "train", "abc", 4, mode)
    held = write_folder(tmp_path / "val", "abc", 2, mode)
    (tmp_path / "README.md").write_text("not a class")
    assert_holds(data.load(tmp_path), train, held)  # a lone val is what people test on
    test = write_folder(tmp_path / "test", "bc", 1, mode)
    found = data.load(tmp_path)
    assert np.array_equal(found.train.images.numpy(), train[0])
    assert np.array_equal(found.validation.images.numpy(), held[0])
    assert np.array_equal(found.test.images.numpy(), test[0])
    assert found.test.labels.tolist() == [1, 2]  # counted among the training classes


def test_train_may_be_a_class(tmp_path):
    write_folder(tmp_path / "vehicles", ["bus", "car", "train"])
    assert data.load(tmp_path / "vehicles").class_names == ("bus", "car", "train")


def test_folder_resized(tmp_path):
    write_folder(tmp_path, "ab")
    save_picture(tmp_path / "a/large.png", size=(31, 17))
    message = refused("--size", tmp_path)
    assert "a/0.png is 8x6 but" in message
    assert "a/large.png is 31x17" in message
    found = data.load(tmp_path, size=5)
    assert found.shape == (3, 5, 5)
    with Image.open(tmp_path / "a/large.png") as picture:
        expected = np.asarray(picture.resize((5, 5), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    whole = found.train + found.validation + found.test
    assert any(np.array_equal(image, expected) for image in whole.images.numpy())


def test_modes_of_pictures(tmp_path):
    folder = tmp_path / "grey"
    for name in "ab":
        for i in range(3):
            save_picture(folder / name / f"{i}.png", "L")
    Image.fromarray(np.full((6, 8), 0x1234, np.uint16)).save(folder / "a/deep.png")
    Image.fromarray(np.eye(6, 8, dtype=bool)).save(folder / "a/bits.png")
    Image.fromarray(random_images(6, 8)).convert("LA").save(folder / "b/alpha.png")
    found = data.load(folder)
    whole = found.train + found.validation + found.test
    assert found.shape == (1, 6, 8)
    assert any((image == 0x12).all() for image in whole.images.numpy())
    assert any((image == np.eye(6, 8) * 255).all() for image in whole.images.numpy())
    colour = tmp_path / "colour"
    write_folder(colour, "ab", 3)
    for mode in ("RGBA", "P", "CMYK"):
        Image.fromarray(random_images(6, 8, 3)).convert(mode).save(colour / "a" / f"{mode}.tiff")
    Image.fromarray(random_images(6, 8, 3)).convert("P").save(colour / "a/see-through.png", transparency=b"\0\1")
    assert data.load(colour).shape == (3, 6, 8)
    save_picture(colour / "b/9.png", "L")
    assert "colour/a/0.png is in colour" in refused("b/9.png is grey but", colour)
    Image.fromarray(np.zeros((6, 8), np.float32)).save(folder / "a/float.tiff")
    refused("float.tiff: not a picture of whole numbers", folder)


def test_bad_folders(tmp_path):
    (tmp_path / "empty").mkdir()
    refused("empty: no class folders in it", tmp_path / "empty")
    folder = tmp_path / "pets"
    write_folder(folder, "ab")
    (folder / "c").mkdir()
    refused("class 'c' has no training images", folder)
    (folder / "c").rmdir()
    (folder / "a/notes.txt").write_text("not a picture")
    refused("a/notes.txt: not a picture, or a damaged one", folder)
    (folder / "a/notes.txt").unlink()
    whole = (folder / "a/0.png").read_bytes()
    (folder / "a/0.png").write_bytes(whole[:-60])
    refused("a/0.png: not a picture, or a damaged one", folder)
    (folder / "a/0.png").unlink()
    (folder / "a/0.png").mkdir()
    refused("a/0.png: .*Is a directory", folder)
    (folder / "a/0.png").rmdir()
    (folder / "list.csv").write_text("x")
    refused("list.csv: a file beside the class folders", folder)
    write_folder(tmp_path / "sets/train", "ab")
    write_folder(tmp_path / "sets/test", "ac")
    refused("class 'c' is not among the training classes", tmp_path / "sets")


# --- .npz ----------------------------------------------------------------------------------------------------------


def write_npz(path: Path, **arrays) -> Path:
    np.savez_compressed(path, **arrays)
    return path


@pytest.mark.parametrize(("layout", "channels"), [("NHW", 1), ("NHWC", 1), ("NHWC", 3), ("NCHW", 1), ("NCHW", 3)])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
@pytest.mark.parametrize("flat", [True, False])
def test_npz_of_keras(channels, layout, dtype, flat, tmp_path):
    images, labels = random_images(30, channels, 5, 7), np.arange(30) % 3

    def stored(images):
        images = {"NHW": images[:, 0], "NHWC": images.transpose(0, 2, 3, 1), "NCHW": images}[layout]
        return images if dtype == "uint8" else (images / 255).astype(dtype)

    y = labels if flat else labels[:, None]
    arrays = {"x_train": stored(images[:20]), "y_train": y[:20], "x_test": stored(images[20:]), "y_test": y[20:]}
    found = data.load(write_npz(tmp_path / "toy.npz", **arrays))
    assert_holds(found, (images[:20], labels[:20]), (images[20:], labels[20:]))
    assert found.name == "toy"
    assert found.class_names == ("0", "1", "2")


def test_npz_of_medmnist(tmp_path):
    images, labels = random_images(30, 6, 6), (np.arange(30) % 2).astype(np.uint8)[:, None]
    arrays = {}
    for part, rows_ in (("train", slice(0, 20)), ("val", slice(20, 24)), ("test", slice(24, 30))):
        arrays |= {f"{part}_images": images[rows_], f"{part}_labels": labels[rows_]}
    found = data.load(write_npz(tmp_path / "med.npz", **arrays, class_names=["ill", "well"]))
    assert np.array_equal(found.train.images[:, 0].numpy(), images[:20])
    assert np.array_equal(found.validation.images[:, 0].numpy(), images[20:24])
    assert np.array_equal(found.test.images[:, 0].numpy(), images[24:])
    assert found.class_names == ("ill", "well")


def test_npz_of_one_set_is_cut_in_three(tmp_path):
    path = write_npz(tmp_path / "one.npz", images=random_images(40, 6, 6), labels=np.arange(40) % 2)
    found = data.load(str(path), seed=3)
    assert (len(found.train), len(found.validation), len(found.test)) == (28, 4, 8)


def test_npz_floats_are_rounded(tmp_path):
    images = np.linspace(0, 1, 6 * 4).reshape(6, 2, 2)
    path = write_npz(tmp_path / "x.npz", x_train=images, y_train=[0, 1] * 3, x_test=images, y_test=[0, 1] * 3)
    assert data.load(path).test.images.flatten().tolist() == [round(255 * i / 23) for i in range(24)]


NAN = np.full((6, 4, 4), 0.5)
NAN[2, 1, 1] = np.nan
SIX = np.array([0, 1] * 3)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"stuff": SIX}, r"no images in it \(it has stuff\)"),
        ({}, "it has nothing"),
        ({"images": random_images(6, 4, 4)}, "'images' without 'labels'"),
        (
            {"x_train": random_images(6, 4, 4), "y_train": SIX, "x_test": random_images(6, 4, 4)},
            "'x_test' without 'y_test'",
        ),
        ({"images": NAN, "labels": SIX}, "'images' has NaN"),
        ({"images": np.full((6, 4, 4), np.inf), "labels": SIX}, "'images' has NaN or infinite"),
        ({"images": np.full((6, 4, 4), 200.0), "labels": SIX}, r"floats in 200..200: scale them to 0..1"),
        ({"images": np.full((6, 4, 4), -0.1), "labels": SIX}, r"floats in -0.1"),
        ({"images": np.zeros((6, 4, 4), np.int64), "labels": SIX}, "int64: save it as uint8"),
        ({"images": random_images(6, 16), "labels": SIX}, r"\[6, 16\]: make it \[N, H, W\]"),
        ({"images": random_images(6, 4, 4, 2), "labels": SIX}, r"\[6, 4, 4, 2\]: make it"),
        ({"images": random_images(6, 4, 4), "labels": SIX[:5]}, "6 images but 5 labels"),
        ({"images": random_images(6, 4, 4), "labels": SIX.astype(float)}, "one whole number per image"),
        ({"images": random_images(6, 4, 4), "labels": np.zeros((6, 14), int)}, r"\[6, 14\]: make it one whole number"),
        ({"images": random_images(6, 4, 4), "labels": SIX + 2**40}, "out of range"),
        ({"images": random_images(6, 4, 4), "labels": SIX - 1}, "label -1 is out of range"),
        ({"images": random_images(6, 4, 4), "labels": SIX * 2}, "class '1' has no training images"),
        ({"images": random_images(6, 4, 4), "labels": SIX, "class_names": ["one"]}, "label 1 is out of range"),
        ({"images": random_images(6, 4, 4), "labels": SIX, "class_names": [1, 2]}, "list of strings"),
        ({"images": random_images(0, 4, 4), "labels": SIX[:0]}, "no images"),
        ({"images": np.array([None] * 6), "labels": SIX}, "not a readable .npz of plain arrays"),
    ],
)
def test_wrong_npz(arrays, message, tmp_path):
    path = write_npz(tmp_path / "bad.npz", **arrays)
    assert "bad" in refused(message, path)


def test_damaged_npz(tmp_path):
    path = write_npz(tmp_path / "x.npz", images=random_images(20, 8, 8), labels=np.arange(20) % 2)
    good = path.read_bytes()
    np.save(tmp_path / "one.npy", np.zeros(3))
    bad = [good[:-30], b"", b"hello", (tmp_path / "one.npy").read_bytes(), pickle.dumps({"images": 1})]
    for content in bad:
        path.write_bytes(content)
        refused("x.npz: not a readable .npz", path)


# --- Hugging Face --------------------------------------------------------------------------------------------------


@pytest.fixture
def hf(tmp_path, monkeypatch):
    """The datasets package, offline and with its cache in the test's folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, tmp_path / "cache" / name.lower())
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    return datasets


def hf_rows(datasets, n: int, label, mode: str = "RGB"):
    shape = (6, 8, 3) if mode == "RGB" else (6, 8)
    images = [random_images(1, *shape)[0] for _ in range(n)]
    columns = {"picture": [Image.fromarray(image) for image in images], "label": [i % 2 for i in range(n)]}
    features = datasets.Features({"picture": datasets.Image(), "label": label})
    pixels = np.stack(images).reshape(n, 6, 8, -1).transpose(0, 3, 1, 2)
    return datasets.Dataset.from_dict(columns, features=features), (pixels, columns["label"])


def test_hugging_face_parquet(hf, tmp_path):
    folder = tmp_path / "owner/name"
    (folder / "data").mkdir(parents=True)
    kept = {}
    for part, n in (("train", 12), ("validation", 4), ("test", 6)):
        rows_, kept[part] = hf_rows(hf, n, hf.ClassLabel(names=["cat", "dog"]))
        rows_.to_parquet(folder / f"data/{part}-00000-of-00001.parquet")
    found = data.load(f"hf:{folder}")
    assert found.name == f"hf:{folder}"
    assert found.class_names == ("cat", "dog")
    for part, (images, labels) in kept.items():
        assert np.array_equal(getattr(found, part).images.numpy(), images)
        assert getattr(found, part).labels.tolist() == labels
    assert data.load(f"hf:{folder}", size=4).shape == (3, 4, 4)


def test_hugging_face_saved_to_disk_with_plain_numbers(hf, tmp_path):
    rows_, train = hf_rows(hf, 12, hf.Value("int64"), "L")
    held, test = hf_rows(hf, 4, hf.Value("int64"), "L")
    hf.DatasetDict(train=rows_, valid=held).save_to_disk(tmp_path / "saved")
    found = data.load(f"hf:{tmp_path}/saved")
    assert_holds(found, train, test)  # a lone validation split is the test set
    assert found.class_names == ("0", "1")


def test_hugging_face_folder_of_pictures(hf, tmp_path):
    images, labels = write_folder(tmp_path / "pets/train", ["cat", "dog"])
    found = data.load(f"hf:{tmp_path}/pets")
    whole = found.train + found.validation + found.test
    assert found.class_names == ("cat", "dog")
    assert rows(whole.images.numpy(), whole.labels) == rows(images, labels)


def test_bad_hugging_face(hf, tmp_path, monkeypatch):
    refused("hf:nobody/nothing: cannot be loaded", "hf:nobody/nothing")
    texts = hf.Dataset.from_dict({"text": ["a"], "label": [0]})
    hf.DatasetDict(train=texts).save_to_disk(tmp_path / "texts")
    refused("needs a column of images and one of class labels, but has text, label", f"hf:{tmp_path}/texts")
    hf.DatasetDict(test=texts).save_to_disk(tmp_path / "tests")
    refused(r"no split named train \(it has test\)", f"hf:{tmp_path}/tests")
    rows_, _ = hf_rows(hf, 6, hf.ClassLabel(names=["cat", "dog"]))
    features = rows_.features
    holes = hf.Dataset.from_dict({"picture": rows_["picture"], "label": [0, 1, None, 1, 0, 1]}, features=features)
    holes.save_to_disk(tmp_path / "holes")
    refused(r"train\[2\]: has no 'label'", f"hf:{tmp_path}/holes")
    broken = hf.Dataset.from_dict(
        {"picture": [{"bytes": b"nonsense", "path": None}] * 6, "label": [0, 1] * 3}, features=features
    )
    broken.save_to_disk(tmp_path / "broken")
    refused(r"train\[0\]: not a picture, or a damaged one", f"hf:{tmp_path}/broken")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(r"pip install 'recollect\[hf\]'", "hf:owner/name")


# --- any damage at all ---------------------------------------------------------------------------------------------


def damaged(raw: bytes, rng: np.random.Generator) -> bytes:
    """A few bytes changed, or the end cut off, or a piece taken out."""
    start, stop = sorted(rng.integers(0, len(raw), 2).tolist())
    match rng.integers(3):
        case 0:
            return raw[:start]
        case 1:
            return raw[:start] + raw[stop:]
    changed = bytearray(raw)
    for place in rng.integers(0, min(len(raw), int(rng.choice([200, len(raw)]))), 4):
        changed[place] = rng.integers(256)
    return bytes(changed)


@pytest.mark.parametrize("kind", ["idx", "gz", "cifar", "pickle", "mat", "png", "jpeg", "npz"])
@pytest.mark.filterwarnings("ignore")
def test_fuzz_any_damage_is_our_error_or_a_valid_dataset(kind, tmp_path):
    rng = np.random.default_rng(zlib.crc32(kind.encode()))
    path = tmp_path / "file"
    if kind in ("idx", "gz"):
        write_idx(tmp_path, gz=kind == "gz")
        path = tmp_path / ("train-images-idx3-ubyte" + (".gz" if kind == "gz" else ""))
    elif kind in ("cifar", "pickle"):
        write_cifar10(tmp_path, python2_pickle if kind == "pickle" else None)
        path = tmp_path / ("test_batch" + ("" if kind == "pickle" else ".bin"))
    elif kind == "mat":
        write_svhn(tmp_path)
        path = tmp_path / "test_32x32.mat"
    elif kind == "npz":
        path = write_npz(tmp_path / "x.npz", images=random_images(20, 4, 4), labels=np.arange(20) % 2)
    else:
        write_folder(tmp_path / "pets", "ab")
        save_picture(path := tmp_path / f"pets/a/x.{kind}")
    good, refusals = path.read_bytes(), []
    for _ in range(150):
        path.write_bytes(damaged(good, rng))
        try:
            found = data.load(path if kind == "npz" else path.parents[1] if kind in ("png", "jpeg") else tmp_path)
            assert found.train.images.dtype == torch.uint8
        except RecollectError as error:
            refusals.append(str(error))
    assert len(refusals) > 10
    assert not any("\n" in message for message in refusals)
