"""Names, places, the split, and the readers, each on small files in its real format; every kind of bad file."""

import gzip
import pickle
import struct
import subprocess
import sys
import zlib
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from test_hostile import PICKLERS

from recollect import data
from recollect.data import readers
from recollect.data.images import Parts, Split, make_images, stratified
from recollect.errors import RecollectError

RNG = np.random.default_rng(0)


def random_images(n: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, 256, (n, *shape), dtype=np.uint8)


def rows(images, labels) -> list[tuple[bytes, int]]:
    """Images and labels as something that compares without regard to order."""
    return sorted((np.asarray(image).tobytes(), int(label)) for image, label in zip(images, labels, strict=True))


def whole(found: data.Images) -> Split:
    return found.train + found.validation + found.test


def assert_split(split: Split, images, labels) -> None:
    """The split is these images and labels, in this order. NCHW."""
    assert split.images.dtype == torch.uint8
    assert split.labels.dtype == torch.int64
    assert np.array_equal(split.images, images)
    assert split.labels.tolist() == list(labels)


def assert_holds(found: data.Images, train: tuple, test: tuple) -> None:
    """Training data is in train and validation, whole and once; test data is the test set, in order."""
    both = found.train + found.validation
    assert both.images.shape == train[0].shape
    assert rows(both.images, both.labels) == rows(*train)
    assert len(found.validation) > 0
    assert_split(found.test, *test)


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


def test_what_is_shown_of_images_is_short(toy_images):
    assert repr(toy_images) == "Images(toy: 3 classes of 1x8x8; 42 train, 6 validation, 12 test)"
    assert repr(toy_images.test) == "Split(12 images of 1x8x8)"


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
    everything, official = whole(found), load_digits()
    expected = np.floor(official.images[:, None] * 255 / 16 + 0.5).astype(np.uint8)
    assert rows(everything.images, everything.labels) == rows(expected, official.target)
    assert int(everything.images.max()) == 255
    assert len(found.test) == pytest.approx(1797 * 0.2, abs=5)
    assert len(found.validation) == pytest.approx(1797 * 0.8 * 0.1, abs=5)
    same, other = data.load("digits", seed=0), data.load("digits", seed=1)
    assert torch.equal(whole(found).images, whole(same).images)
    assert rows(found.test.images, found.test.labels) != rows(other.test.images, other.test.labels)


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
        (Split(torch.zeros(2, 1, 2, 2).double(), torch.tensor([0, 1])), None, "ab", "torch.float64"),
        (Split(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1])), None, "ab", "3 images but 2 labels"),
    ],
)
def test_make_images_checks(train, test, names, message):
    splits = {"train": train} if test is None else {"train": train, "test": test}
    with pytest.raises(RecollectError, match=message):
        make_images("toy", Parts(splits, tuple(names)))


# --- names, places -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def debian(tmp_path, monkeypatch) -> Path:
    """Not this machine's /usr/share/datasets."""
    monkeypatch.setattr(data, "DEBIAN", tmp_path / "debian")
    return data.DEBIAN


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


def test_debian_package_serves_when_the_root_does_not(debian, tmp_path):
    packaged = write_idx(debian / "fashion-mnist", gz=True)
    (tmp_path / "flat").mkdir()
    assert_holds(data.load("fashion-mnist", root=tmp_path / "flat"), *packaged)
    own = write_idx(tmp_path / "flat")
    assert_holds(data.load("fashion-mnist", root=tmp_path / "flat"), *own)


def test_size_resizes_array_datasets_as_pillow_does(tmp_path):
    _, (images, _) = write_idx(tmp_path)
    found = data.load("mnist", root=tmp_path, size=16)
    assert found.shape == (1, 16, 16)
    pillow = [np.asarray(Image.fromarray(image[0]).resize((16, 16), Image.Resampling.BILINEAR)) for image in images]
    assert np.abs(found.test.images[:, 0].numpy().astype(int) - np.stack(pillow)).max() <= 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-10], "31350 bytes after its header, which asks for 31360"),
        (lambda raw: raw + b"x", "more bytes after its header"),
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
        ({"labels": Path}, "not a readable pickle of arrays .it asks for pathlib"),
    ],
)
def test_wrong_cifar_pickle(change, message, tmp_path):
    write_cifar10(tmp_path, PICKLERS["protocol2"])
    path = tmp_path / "data_batch_2"
    path.write_bytes(pickle.dumps({"data": random_images(20, 3072), "labels": [0] * 20} | change, protocol=2))
    assert str(path) in refused(message, "cifar10", root=tmp_path)


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
        ({"y": np.full((30, 1), 1.5)}, "'y' is no array of whole numbers"),
        ({"X": np.zeros((32, 32, 3, 30))}, "'X' is no array of whole numbers"),
        ({"X": np.zeros((32, 32, 3, 30), np.int16)}, "X is int16"),
        ({"X": "text"}, "'X' is no array of whole numbers"),
    ],
)
def test_wrong_svhn(changes, message, tmp_path):
    write_svhn(tmp_path, **changes)
    assert "train_32x32.mat" in refused(message, "svhn", root=tmp_path)


ARRAYS = {
    "X": random_images(8, 6, 3, 5),
    "y": np.arange(300, dtype=np.uint16)[:, None],
    "z": np.arange(-7, 5, dtype=np.int32).reshape(3, 4),
    "long": np.arange(3, dtype=np.int64)[None],
    "empty": np.zeros((0, 3), np.uint8),
    "small": np.array([[1, 2]], np.uint8),
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("wanted", [("X",), ("y", "z"), tuple(ARRAYS)])
def test_mat_is_what_scipy_reads(compressed, wanted, tmp_path):
    from scipy.io import loadmat, savemat

    savemat(path := tmp_path / "a.mat", {"text": "hello"} | ARRAYS | {"real": np.eye(3)}, do_compression=compressed)
    found, theirs = readers.read_mat("a", path.read_bytes(), wanted), loadmat(path)
    assert found.keys() == set(wanted)
    for name, array in found.items():
        assert array.dtype == theirs[name].dtype
        assert np.array_equal(array, theirs[name])


def test_mat_headers_that_ended_the_process(tmp_path):
    """Scipy's parser in C died of some; here every byte of the header may be anything."""
    from scipy.io import savemat

    savemat(path := tmp_path / "a.mat", {"X": random_images(4, 4, 3, 2), "y": np.ones((2, 1), np.uint8)})
    raw = path.read_bytes()
    for place in range(120, 200):
        for value in {219, 0, 255, raw[place] ^ 128, (raw[place] + 1) % 256}:
            path.write_bytes(raw[:place] + bytes([value]) + raw[place + 1 :])
            with suppress(RecollectError):
                readers.svhn([path, path])


def test_damaged_svhn(tmp_path):
    from scipy.io import savemat

    write_svhn(tmp_path)
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(path.read_bytes()[:5000])
    refused("train_32x32.mat: not a readable .mat file", "svhn", root=tmp_path)
    savemat(path, {"z": np.zeros(3)})
    refused("train_32x32.mat: has no variables X and y", "svhn", root=tmp_path)


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
    rows_of = {"train": slice(0, 20), "validation": slice(20, 24), "test": slice(24, 30)}
    arrays = {}
    for part, kept in rows_of.items():
        key = "val" if part == "validation" else part
        arrays |= {f"{key}_images": images[kept], f"{key}_labels": labels[kept]}
    found = data.load(write_npz(tmp_path / "med.npz", **arrays, class_names=["ill", "well"]))
    for part, kept in rows_of.items():
        assert_split(getattr(found, part), images[kept, None], labels[kept, 0])
    assert found.class_names == ("ill", "well")


def test_npz_of_one_set_is_cut_in_three(tmp_path):
    path = write_npz(tmp_path / "one.npz", images=random_images(40, 6, 6), labels=np.arange(40) % 2)
    found = data.load(str(path), seed=3)
    assert (len(found.train), len(found.validation), len(found.test)) == (28, 4, 8)


def test_npz_floats_are_rounded(tmp_path):
    images = np.linspace(0, 1, 6 * 4).reshape(6, 2, 2)
    path = write_npz(tmp_path / "x.npz", x_train=images, y_train=[0, 1] * 3, x_test=images, y_test=[0, 1] * 3)
    assert data.load(path).test.images.flatten().tolist() == [round(255 * i / 23) for i in range(24)]


SIX, PIXELS = np.array([0, 1] * 3), random_images(6, 4, 4)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"stuff": SIX}, r"no images in it \(it has stuff\)"),
        ({}, "it has nothing"),
        ({"images": PIXELS}, "'images' without 'labels'"),
        ({"x_train": PIXELS, "y_train": SIX, "x_test": PIXELS}, "'x_test' without 'y_test'"),
        ({"x_train": PIXELS, "y_train": SIX, "y_test": SIX}, "'y_test' without 'x_test'"),
        ({"images": PIXELS, "labels": SIX[:5]}, "6 images but 5 labels"),
        ({"images": PIXELS, "labels": SIX.astype(float)}, "one whole number per image"),
        ({"images": PIXELS, "labels": np.zeros((6, 14), int)}, r"\[6, 14\]: make it one whole number"),
        ({"images": PIXELS, "labels": SIX + 2**40}, "out of range"),
        ({"images": PIXELS, "labels": SIX - 1}, "label -1 is out of range"),
        ({"images": PIXELS, "labels": SIX * 2}, "class '1' has no training images"),
        ({"images": PIXELS, "labels": SIX, "class_names": ["one"]}, "label 1 is out of range"),
        ({"images": PIXELS, "labels": SIX, "class_names": [1, 2]}, "list of strings"),
        ({"images": PIXELS[:0], "labels": SIX[:0]}, "no images"),
    ],
)
def test_wrong_npz(arrays, message, tmp_path):
    assert "bad" in refused(message, write_npz(tmp_path / "bad.npz", **arrays))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.where(np.arange(6)[:, None, None] == 2, np.nan, PIXELS / 255), "'images' has NaN"),
        (np.full((6, 4, 4), np.inf), "'images' has NaN or infinite"),
        (np.full((6, 4, 4), 200.0), r"floats in 200..200: scale them to 0..1"),
        (np.full((6, 4, 4), -0.1), r"floats in -0.1"),
        (np.zeros((6, 4, 4), np.int64), "int64: save it as uint8"),
        (random_images(6, 16), r"\[6, 16\]: make it \[N, H, W\]"),
        (random_images(6, 4, 4, 2), r"\[6, 4, 4, 2\]: make it"),
        (np.zeros((0, 4, 4)), "no images"),
        (np.array([None] * 6), "not a readable .npz of plain arrays"),
    ],
)
def test_wrong_npz_images(images, message, tmp_path):
    assert "bad" in refused(message, write_npz(tmp_path / "bad.npz", images=images, labels=SIX[: len(images)]))


def test_damaged_npz(tmp_path):
    path = write_npz(tmp_path / "x.npz", images=random_images(20, 8, 8), labels=np.arange(20) % 2)
    good = path.read_bytes()
    np.save(tmp_path / "one.npy", np.zeros(3))
    bad = [good[:-30], b"", b"hello", (tmp_path / "one.npy").read_bytes(), pickle.dumps({"images": 1})]
    for content in bad:
        path.write_bytes(content)
        refused("x.npz: not a readable .npz", path)


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


def assert_any_damage_is_our_error_or_a_valid_dataset(path: Path, source: Path) -> None:
    """Damage the file at `path` in many ways, and load `source` each time."""
    rng = np.random.default_rng(zlib.crc32(path.name.encode()))
    good, refusals = path.read_bytes(), []
    for _ in range(150):
        path.write_bytes(damaged(good, rng))
        try:
            assert data.load(source).train.images.dtype == torch.uint8
        except RecollectError as error:
            refusals.append(str(error))
    assert len(refusals) > 10
    assert not any("\n" in message for message in refusals)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("write", "file"),
    [
        (write_idx, "train-images-idx3-ubyte"),
        (lambda folder: write_idx(folder, gz=True), "train-images-idx3-ubyte.gz"),
        (write_cifar10, "test_batch.bin"),
        (lambda folder: write_cifar10(folder, PICKLERS["python2"]), "test_batch"),
        (write_svhn, "test_32x32.mat"),
    ],
)
def test_fuzz_official_files(write, file, tmp_path):
    write(tmp_path)
    assert_any_damage_is_our_error_or_a_valid_dataset(tmp_path / file, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_fuzz_npz(tmp_path):
    path = write_npz(tmp_path / "x.npz", images=random_images(20, 4, 4), labels=np.arange(20) % 2)
    assert_any_damage_is_our_error_or_a_valid_dataset(path, path)
