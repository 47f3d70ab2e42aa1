"""Files that mean harm: pickles that would run something, small files that become large, files that never end."""

import gzip
import io
import json
import os
import pickle
import struct
import tracemalloc
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import make_memory
from PIL import Image
from safetensors import safe_open

from recollect import Classifier, Images, Memory, Recipe, compose, data, distill, limits, preset
from recollect.cli import main
from recollect.data import readers
from recollect.data.fitting import open_picture
from recollect.data.images import make_images
from recollect.data.pickles import unpickle
from recollect.errors import RecollectError
from recollect.header import Header
from recollect.nets import Network
from recollect.runs import Run

RNG = np.random.default_rng(0)


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


def test_python2_pickle_is_what_pickle_itself_reads():
    value = {"data": RNG.integers(0, 256, (4, 3072), dtype=np.uint8), "labels": [1, 2, 3, 4]}
    found = pickle.loads(python2_pickle(value), encoding="latin1")
    assert np.array_equal(found["data"], value["data"])
    assert found["labels"] == value["labels"]


@pytest.mark.parametrize("dump", PICKLERS.values(), ids=PICKLERS)
def test_plain_values_come_through(dump):
    value = {"data": RNG.integers(0, 256, (4, 300), dtype=np.uint8), "labels": [1, -2, 3], "name": "cat", "": {}}
    found = unpickle(dump(value))
    assert np.array_equal(found.pop("data"), value.pop("data"))
    assert found == value


@pytest.mark.parametrize("dtype", ["bool", "int16", ">i4", "float64", "S3", "U2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_plain_arrays_come_through(dtype, order):
    array = np.asarray(RNG.integers(0, 9, (3, 4)).astype(dtype), order=order)
    found = unpickle(pickle.dumps({"a": array}, protocol=2))["a"]
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


class Call:
    """Pickles to a call of any function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


RECONSTRUCT = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\n"
STRUCTURED = np.zeros(2, [("a", "u1"), ("b", "u1")])
EVIL = {  # the pickle, and why it is refused
    "os.system": (pickle.dumps({"data": Call(os.system, "touch mark")}), r"it asks for (posix|nt)\.system"),
    "eval": (pickle.dumps({"data": Call(eval, "open('mark', 'w')")}, protocol=0), r"__builtin__\.eval"),
    "python 2's eval": (b"c__builtin__\neval\n(S\"open('mark', 'w')\"\ntR.", r"it asks for __builtin__\.eval"),
    "inst opcode": (b"(S'touch mark'\nios\nsystem\n.", "no dataset needs the instruction INST"),
    "getattr": (pickle.dumps(Call(getattr, "x", "join")), r"it asks for builtins\.getattr"),
    "numpy.load": (pickle.dumps(Call(np.load, "mark")), r"it asks for numpy\.load"),
    "dotted name": (b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.", r"it asks for numpy\.ndarray\.tofile"),
    "object array": (pickle.dumps({"data": np.array([[1], None], object)}, protocol=2), "type 'O8' are refused"),
    "structured array": (pickle.dumps({"data": STRUCTURED}, protocol=2), "type 'V2' are refused"),
    "fields set on a plain dtype": (
        b"\x80\x02}U\x04datacnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|N(U\x01at}U\x01aK\x00stbs.",
        "structured arrays are refused",
    ),
    "subclass rebuilt": (RECONSTRUCT + b"dtype\nK\x00\x85U\x01b\x87R.", "only for an empty ndarray"),
    "array with memory": (RECONSTRUCT + b"ndarray\nK\x09\x85U\x01b\x87R.", "only for an empty ndarray"),
    "ndarray called": (b"\x80\x02cnumpy\nndarray\nK\x09\x85R.", "numpy.ndarray is only a name"),
    "array of less than its shape": (
        pickle.dumps({"data": np.zeros((3, 5), np.uint8)}, protocol=2).replace(b"K\x03K\x05\x86", b"K\x04K\x05\x86"),
        "cannot reshape",
    ),
    "other codec": (b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.", "only for latin1"),
    "attributes on a name": (b"\x80\x02c_codecs\nencode\n}U\x08__call__K\x01sb.", "no tuple where one is needed"),
    "slots of a name": (b"\x80\x02c_codecs\nencode\nN}U\x08__call__K\x01s\x86b.", "no array where one is needed"),
    "name as a class": (b"\x80\x02cnumpy\nndarray\n)\x81.", "NEWOBJ"),
    "persistent id": (b"Pthing\n.", "PERSID"),
    "tuples 200,000 deep as a key": (b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.", "a key is no string"),
    "a key of 2^60 nodes": (b"\x80\x02}()q\x00" + b"h\x00h\x00\x86q\x00" * 59 + b"u.", "a key is no string"),
    "one string as many arrays": (
        b"\x80\x02](X"
        + struct.pack("<I", 10**5)
        + b"a" * 10**5
        + b"q\x00"
        + b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R" * 9
        + b"e.",
        "it makes more bytes than it has",
    ),
    "memo of nothing": (b"\x80\x02h\x07.", "there is no memo 7"),
    "nothing on the stack": (b"\x80\x02.", "no object where one is needed"),
    "no mark": (b"\x80\x02]e.", "no mark where one is needed"),
    "a type of many": (b"\x80\x02cnumpy\ndtype\nU\x05i4,i4K\x00K\x01\x87R.", "arrays of type 'i4,i4' are refused"),
    "bytearray of 1 TB": (b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".", "expected 1099511627776 bytes"),
    "extension": (b"\x80\x02\x82\x01.", "EXT1"),
    "no dict": (pickle.dumps([1]), "holds a list instead of a dict"),
}


@pytest.mark.parametrize("kind", EVIL)
def test_malicious_pickle_is_refused_and_does_nothing(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw, reason = EVIL[kind]
    with pytest.raises(Exception, match=reason):
        unpickle(raw)
    assert not Path("mark").exists()
    assert np.dtype("u1").fields is None


@pytest.mark.parametrize("raw", [b"\x80\x02}r\xff\xff\xff\xff.", b"}p4294967295\n."])
def test_a_memo_far_away_takes_no_room(raw):
    assert unpickle(raw) == {}


# --- small files that become large, and files that never end ---------------------------------------------------------


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    """What --most-gib sets is this process's."""
    monkeypatch.setenv(limits.VARIABLE, "")


def test_a_file_may_take_the_limit_or_some_times_its_size(monkeypatch):
    limits.check("it", 2 * 2**30)
    with pytest.raises(RecollectError, match=r"it would take 2.0 GiB of memory, more than the limit of 2: .* --most-gib 3"):
        limits.check("it", 2 * 2**30 + 1, own=2**20)
    limits.check("it", 32 * 2**30, own=2**30)
    monkeypatch.setenv(limits.VARIABLE, "3")
    limits.check("it", 3 * 2**30)
    with pytest.raises(RecollectError, match="it would take"):
        limits.check("it", 10**5000)


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "much"])
def test_a_limit_that_is_none(given, monkeypatch):
    monkeypatch.setenv(limits.VARIABLE, given)
    with pytest.raises(RecollectError, match=f"RECOLLECT_MOST_GIB .* is '{given}': give a number of GiB"):
        limits.most()


def test_the_flag_goes_with_any_command(tmp_path, capsys):
    for name in ("train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / f"{name}-ubyte.gz").touch()
    images = tmp_path / "train-images-idx3-ubyte.gz"
    images.write_bytes(gzip.compress(struct.pack(">4B3I", 0, 0, 8, 3, 40, 2**14, 2**14)))
    assert main(["data", "show", "mnist", "--root", str(tmp_path)]) == 2
    assert "would take 10.0 GiB of memory, more than the limit of 2" in capsys.readouterr().err
    assert main(["--most-gib", "9", "data", "show", "mnist", "--root", str(tmp_path)]) == 2
    assert "more than the limit of 9" in capsys.readouterr().err
    assert main(["data", "show", "mnist", "--root", str(tmp_path), "--most-gib=many"]) == 2
    assert "is 'many': give a number of GiB" in capsys.readouterr().err
    assert main(["data", "show", "mnist", "--most-gib", "1\0\ud800"]) == 2
    assert r"is '1\x00\ud800': give a number of GiB" in capsys.readouterr().err


def test_gzip_is_unpacked_no_further_than_its_header_tells(tmp_path):
    """6 GiB of zeros in 3 MB; here behind a header that asks for 16 bytes."""
    path, zeros = tmp_path / "x.gz", zlib.compressobj(9, wbits=31)
    packed = zeros.compress(struct.pack(">4B3I", 0, 0, 8, 3, 4, 2, 2))
    packed += b"".join(zeros.compress(bytes(2**20)) for _ in range(64)) + zeros.flush()
    path.write_bytes(packed)
    assert peak_of(lambda: refused("more bytes after its header", readers.idx, path, 3)) < 2**22


def refused(match: str, call, *arguments) -> None:
    with pytest.raises(RecollectError, match=match):
        call(*arguments)


def peak_of(call) -> int:
    call()  # what is imported at first
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_arrays_that_nobody_reads_are_not_unpacked(tmp_path):
    path = tmp_path / "x.npz"
    arrays = {"images": np.zeros((20, 4, 4), np.uint8), "labels": np.arange(20) % 2, "other": np.zeros(2**26, np.uint8)}
    np.savez_compressed(path, **arrays)
    assert peak_of(lambda: data.load(path)) < 2**24


def test_an_array_larger_than_the_limit(tmp_path, monkeypatch):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, images=np.zeros((64, 256, 256), np.uint8), labels=np.arange(64) % 2)
    monkeypatch.setenv(limits.VARIABLE, "0.001")
    refused(r"'images' of \[64, 256, 256\] would take .* --most-gib 1", data.load, path)


@pytest.mark.parametrize(("shape", "kind"), [((2**40,), "|u1"), ((1,), "<U999999999"), ((2**62, 2**62), "<f8"), ((-1,), "|u1")])
def test_an_array_that_claims_to_be_large(shape, kind, tmp_path):
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    with zipfile.ZipFile(path := tmp_path / "x.npz", "w") as archive:
        archive.writestr("labels.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode())
        archive.writestr("images.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode())
    refused("would take|not a readable .npz", data.load, path)


def png(width: int, height: int) -> bytes:
    """A grey picture of zeros, made without its pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def write_pictures(folder: Path, raw: bytes, n: int = 8) -> Path:
    for number in range(n):
        place = folder / "ab"[number % 2] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(raw)
    return folder


def test_a_picture_of_few_bytes_and_many_pixels(tmp_path):
    folder = write_pictures(tmp_path / "pets", png(13_000, 13_000))
    refused("0.png: a picture of 13000x13000 would take 2.5 GiB", open_picture, folder / "a/0.png")


def test_a_large_first_picture(tmp_path, monkeypatch):
    """Room for all is made when the first is known."""
    buffer = io.BytesIO()
    Image.new("L", (1000, 1000)).save(buffer, "PNG")
    folder = write_pictures(tmp_path / "pets", buffer.getvalue(), 200)
    monkeypatch.setenv(limits.VARIABLE, "0.1")
    refused("200 pictures like .*0.png would take 0.2 GiB", data.load, folder)


def test_formats_that_start_programs(tmp_path):
    """Pillow gives an .eps to Ghostscript, whatever it is called."""
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(x) (w) file\n%%EOF\n"
    folder = write_pictures(tmp_path / "pets", eps)
    refused("not a picture, or a damaged one: give a PNG, JPEG, WebP, GIF or BMP file", data.load, folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_pipes_and_devices_are_no_files(tmp_path):
    folder = write_pictures(tmp_path / "pets", png(8, 8))
    (folder / "a/0.png").unlink()
    os.mkfifo(folder / "a/0.png")
    os.mkfifo(tmp_path / "x.npz")
    refused("x.npz: not a file", data.load, tmp_path / "x.npz")
    refused("0.png: not a file", data.load, folder)
    refused("not a file", readers.idx, Path("/dev/zero"), 3)
    assert main(["info", str(tmp_path / "x.npz")]) == 2
    with pytest.raises(RecollectError, match="does not exist"):
        Classifier.load(tmp_path / "x.npz")


# --- what files say of themselves ------------------------------------------------------------------------------------------


def saved(path: Path, **changes) -> Path:
    """A memory's file whose header says something else."""
    make_memory().save(path)
    with safe_open(path, "pt") as file:
        header, tensors = json.loads(file.metadata()["recollect"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    path.write_bytes(safetensors.torch.save(tensors, {"recollect": json.dumps(header | changes)}))
    return path


PREPROCESSING = {"mean": [0.5], "std": [0.25], "zca": None}


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": {"lr": 1e300}},
        {"recipe": {"batch": 10**30}},
        {"recipe": {"epochs": "many"}},
        {"recipe": {"momentum": -1}},
        {"recipe": []},
        {"preprocessing": PREPROCESSING | {"zca": "zca"}},
        {"preprocessing": PREPROCESSING | {"zca": {}}},
        {"preprocessing": PREPROCESSING | {"zca": {"file": 5}}},
        {"preprocessing": PREPROCESSING | {"zca": {"file": "../../etc/passwd"}}},
        {"preprocessing": PREPROCESSING | {"zca": {"file": "x" * 5000}}},
        {"preprocessing": PREPROCESSING | {"mean": 0.5}},
        {"accuracy": [{"network": ["mlp"]}]},
        {"accuracy": [{"mean": 10**400}]},
        {"made": {"config": "none"}},
    ],
)
def test_headers_are_checked_where_they_are_read(changes, tmp_path):
    refused(r"x.safetensors is damaged", Memory.load, saved(tmp_path / "x.safetensors", **changes))


@pytest.mark.parametrize(
    "network",
    [
        "mlp:width=9999999999",
        "mlp:width=" + "9" * 4401,
        "mlp:depth=65536",
        "mlp:width=1000000,depth=900",
        "resnet12:width=1000000",
    ],
)
def test_networks_are_known_by_their_size_before_they_are_made(network, tmp_path):
    refused("not a positive whole number|would take|cannot be made", Network, network, (3, 64, 64), 10)
    query = {"encoder": network, "size": 3, "ways": 2, "shots": 1, "form": "unit"}
    refused("x.safetensors is damaged", Memory.load, saved(tmp_path / "x.safetensors", query=query))
    refused("not a positive whole|would take|cannot be made", distill, two_classes(), preset("fast", network=network))


def two_classes(side: int = 8, classes: int = 2) -> Images:
    labels = torch.arange(40) % classes
    parts = readers.Parts(
        {"train": readers.Split(torch.arange(40).byte()[:, None, None, None].expand(-1, 1, side, side), labels)}
    )
    return make_images("toy", parts)


def test_a_memory_of_few_bytes_and_many_images(tmp_path, monkeypatch):
    memory = make_memory()
    monkeypatch.setenv(limits.VARIABLE, "0.000001")
    many = Memory(memory.bases[:, :, :1, :1], memory.addressing, replace(memory.header, image_shape=[1, 64, 64], downsample=64))
    refused("15 images of toy would take .* --most-gib 1", many.recall)
    memory.recall()


def test_a_one_hot_memory_is_as_large_as_its_file(tmp_path):
    """What is implied would be a million times more than what is there."""
    header = Header("toy", ["a"], [1, 4, 4], 1, "one-hot")
    refused(r"its one-hot addressing is \[1000, 1, 1\]", Memory, torch.zeros(1, 1, 4, 4), torch.ones(1000, 1, 1).byte(), header)


def test_a_classifiers_header_without_a_field(tmp_path):
    path = tmp_path / "c.safetensors"
    compose([make_memory()]).train(Recipe("mlp:width=2", epochs=1)).save(path)
    with safe_open(path, "pt") as file:
        header, tensors = json.loads(file.metadata()["recollect-classifier"]), {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    for field in header:
        for changed in ({n: v for n, v in header.items() if n != field}, header | {field: {"": None}}, header | {field: 10**400}):
            path.write_bytes(safetensors.torch.save(tensors, {"recollect-classifier": json.dumps(changed)}))
            refused("c.safetensors", Classifier.load, path)


@pytest.mark.parametrize("data", [{"name": "digits", "size": "8"}, {"name": ["digits"]}, {"name": "digits", "classes": "01"}])
def test_a_config_with_wrong_data(data, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"kind": "distill", "data": data, "distill": {}}))
    assert main(["resume", str(tmp_path)]) == 2
    assert "config.json has data" in capsys.readouterr().err


def test_metrics_that_are_none(tmp_path):
    good = {"step": 1, "loss": 0.5}
    bad = [
        "[" * 100_000,
        '{"step": ' + "[" * 500 + "]" * 500 + "}",
        '{"step": "1"}',
        '{"step": 2, "loss": "\\ud800"}',
        '{"step": 3, "x": []}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join([json.dumps(good), *bad]) + "\n")
    assert Run(tmp_path).metrics() == [good]
    Run(tmp_path).forget_after(1)
    assert Run(tmp_path).metrics() == [good]


def test_what_files_say_does_not_steer_the_terminal(tmp_path, capsys):
    evil = "\x1b]0;owned\x07\x1b[2J\ud800\u202e\n"
    path = saved(tmp_path / "x.safetensors", dataset=evil, class_names=[evil, "b", "c"], made={evil: evil}, budget={"name": evil})
    assert main(["info", str(path)]) == 0
    assert main(["recall", str(path), "--out", str(tmp_path / "x.npz"), "--classes", "x"]) == 2
    shown = "".join(capsys.readouterr())
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert r"\x1b]0;owned\x07\x1b[2J\ud800\u202e\n" in shown


def test_a_header_names_no_place_to_read(tmp_path, capsys, monkeypatch):
    """Whoever sends a memory does not choose what is opened here."""
    np.savez(tmp_path / "there.npz", images=np.zeros((40, 8, 8), np.uint8), labels=np.arange(40) % 3)
    monkeypatch.setattr("recollect.data.load", None)
    for name in (str(tmp_path / "there.npz"), "hf:somebody/something", str(tmp_path)):
        path = saved(tmp_path / "x.safetensors", dataset=name)
        assert main(["evaluate", str(path)]) == 2
        assert "which is no official dataset: say where it is (--data)" in capsys.readouterr().err


# --- sizes that cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "settings", "match"),
    [
        (two_classes(classes=1), {}, "toy has one class, '0': give two or more"),
        (two_classes(side=1), {"downsample": 1}, r"2 classes of images of 1x1x1\): take"),
        (two_classes(), {"inner_steps": 10**12}, "inner_steps is 1,000,000,000,000: give 1 to 2,147,483,647"),
        (two_classes(), {"inner_steps": 2**31 - 1, "window": None}, "an unroll of 2,147,483,647 inner_steps would take"),
        (two_classes(), {"networks_per_step": 2**31 - 1}, "2,147,483,647 networks_per_step would take"),
        (two_classes(), {"network": "mlp:width=1000000000000"}, "width is '1000000000000', not a positive whole number"),
        (two_classes(), {"outer_steps": "many"}, "outer_steps cannot be 'many'"),
    ],
)
def test_settings_that_no_machine_has_room_for(images, settings, match):
    refused(match, distill, images, preset("fast", **{"network": "mlp:width=4", "bases": 1} | settings))
