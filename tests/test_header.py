"""Damaged, foreign and hostile files: a RecollectError or a memory that works, and never anything else."""

import hashlib
import json
import os
import pickle
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recollect.errors import RecollectError
from recollect.header import Header, TensorInfo, parse, read_header
from recollect.memory import Memory, one_hot_addressing

NAMES = ["cat", "dog", "naïve 船"]


def tensors_of(kind: str) -> tuple[dict[str, torch.Tensor], Header]:
    generator = torch.Generator().manual_seed(0)
    if kind == "one-hot":
        bases = torch.randn(6, 1, 4, 3, generator=generator)
        return {"bases": bases, "addressing": one_hot_addressing(3, 2)}, Header("toy", NAMES, [1, 4, 3], 1, "one-hot")
    dtype = getattr(torch, kind)
    tensors = {"bases": torch.randn(4, 2, 2, 3, generator=generator), "addressing": torch.randn(2, 3, 4, generator=generator)}
    accuracy = [{"network": "convnet", "mean": 0.5, "n": 20}]
    header = Header("toy", NAMES, [2, 4, 6], 2, accuracy=accuracy, made={"seed": 1})
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}, header


KINDS = ["float32", "bfloat16", "one-hot"]


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


def build(tensors: dict[str, torch.Tensor], header: dict | str | None) -> bytes:
    """A file written without recollect: any tensors, any header, and the checksum that these tensors have."""
    if header is None:
        return safetensors.torch.save(tensors)
    if isinstance(header, dict):
        bodies = [tensors[name] for name in ("bases", "addressing") if name in tensors]
        digest = hashlib.sha256(b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in bodies))
        header = json.dumps({"checksum": digest.hexdigest()} | header)
    return safetensors.torch.save(tensors, {"recollect": header})


def raw_header(header: Header) -> dict:
    """The header's JSON, less its checksum."""
    values = json.loads(header.to_json())
    del values["checksum"]
    return values


def whole_file(kind: str) -> bytes:
    tensors, header = tensors_of(kind)
    return build(tensors, raw_header(header))


def attempt(read: Callable, *args) -> tuple:
    """(what was read, "") or (None, our error's message); any other exception goes through, and fails the test."""
    try:
        return read(*args), ""
    except RecollectError as error:
        return None, str(error)


def loads(path: Path, data: bytes) -> bool:
    """Whether these bytes are a memory; if not, the error must be ours and name the file, and if so it must work."""
    path.write_bytes(data)
    found, refusal = attempt(read_header, path)
    memory, why = attempt(Memory.load, path)
    if memory is None:
        assert str(path) in why
        assert found is not None or str(path) in refusal
        return False
    assert found is not None
    images, labels = memory.recall()
    assert images.shape == (len(memory.class_names) * len(memory.addressing), *memory.image_shape)
    assert images.isfinite().all()
    assert len(labels) == len(images)
    memory.save(path)  # and it can be kept
    return True


def test_a_whole_file_is_read(tmp_path, kind):
    path = tmp_path / "memory.safetensors"
    assert loads(path, whole_file(kind))
    tensors, header = tensors_of(kind)
    found, infos = read_header(path)
    assert raw_header(found) == raw_header(header)
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}
    assert infos == {name: TensorInfo(tuple(t.shape), names[t.dtype]) for name, t in tensors.items()}


def test_what_build_writes_is_what_save_writes(tmp_path, kind):
    Memory(*(tensors := tensors_of(kind))[0].values(), tensors[1]).save(tmp_path / "memory.safetensors")
    saved = Memory.load(tmp_path / "memory.safetensors").header
    (tmp_path / "built").write_bytes(build(tensors[0], raw_header(tensors[1])))
    assert Memory.load(tmp_path / "built").header == saved


# Damage to the bytes


def test_every_truncation_is_refused(tmp_path, kind):
    data = whole_file(kind)
    for length in range(0, len(data), 3):
        assert not loads(tmp_path / "memory.safetensors", data[:length])


def test_every_flipped_bit_of_the_tensors_is_noticed(tmp_path, kind):
    data = whole_file(kind)
    start = 8 + struct.unpack("<Q", data[:8])[0]
    for place in range(start, len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << (place % 8)
        assert not loads(tmp_path / "memory.safetensors", bytes(flipped))


def mutations(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Bits flipped, bytes put in, left out and overwritten, chunks swapped, repeated and moved."""
    rng = random.Random(seed)
    for _ in range(count):
        a, b, c, d = sorted(rng.randrange(len(data)) for _ in range(4))
        noise = rng.randbytes(rng.randint(1, 8))
        yield rng.choice(
            [
                lambda a=a: data[:a] + bytes([data[a] ^ 1 << rng.randrange(8)]) + data[a + 1 :],
                lambda a=a: data[: a % 8] + bytes([rng.randrange(256)]) + data[a % 8 + 1 :],  # the header's length
                lambda a=a, noise=noise: data[:a] + noise + data[a:],
                lambda a=a, noise=noise: data[:a] + noise + data[a + len(noise) :],
                lambda a=a: data[:a] + data[a + rng.randint(1, 8) :],
                lambda a=a, b=b, c=c, d=d: data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:],
                lambda a=a, b=b: data[:b] + data[a:b] + data[b:],
                lambda a=a, b=b: data[:a] + bytes(b - a) + data[b:],
                lambda a=a: data[:a] + rng.choice(b'"{}[],:0129\\\x00\xff').to_bytes(1, "little") + data[a + 1 :],
            ]
        )()


def test_random_damage_never_gets_past(tmp_path, kind):
    data, path = whole_file(kind), tmp_path / "memory.safetensors"
    body = data[8 + struct.unpack("<Q", data[:8])[0] :]
    kept = [path.read_bytes() for damaged in mutations(data, 1500, seed=len(data)) if loads(path, damaged)]
    assert len(kept) < 100  # only where words of the header were hit that nobody can check
    assert all(saved.endswith(body) for saved in kept)


# Damage to the header, with a right checksum


def nested(depth: int) -> dict:
    value: dict = {}
    for _ in range(depth):
        value = {"deeper": value}
    return value


VALUES = [None, True, 0, -1, 1.5, 10**30, "", "1", "x" * 70000, [], [[]], {}, {"a": 1}, [1], [None], ["a", "a"], [1, 2]]
SHAPES = [[0, 4, 6], [2, 4], [2, 4, 6, 1], [2, -4, 6], [2, 4.0, 6], ["2", 4, 6], [True, 4, 6], [2, 10**12, 6]]
EDITS: list[dict] = [
    *({name: value} for name in Header.__dataclass_fields__ for value in VALUES),
    *({"image_shape": shape} for shape in [*SHAPES, [4, 2, 6], [2, 5, 6], [2, 4, 8], [65537] * 3]),
    *({"downsample": value} for value in (1, 3, 10**9)),
    *({"class_names": names} for names in (["a"], ["a", "b", "c", "d"], ["a", "b", "b"], ["a", "b", 3])),
    *({"format": value} for value in (2, 10**20, "1", 1.0, True, -1, 0, [1])),
    *({"accuracy": value} for value in ([{"mean": float("nan")}], [{"mean": 1e300 * 1e10}], [1])),
    *({"made": value} for value in (nested(300), nested(800), {"loss": float("-inf")})),
    {"checksum": "0" * 64},
    {"addressing": "one-hot"},
    {"addressing": "learned"},
]


@pytest.mark.parametrize("number", range(len(KINDS)), ids=KINDS)
def test_every_edit_of_the_header_is_survived(tmp_path, number):
    tensors, header = tensors_of(KINDS[number])
    values = raw_header(header)
    assert len(EDITS) > 200
    for edit in EDITS:
        loads(tmp_path / "memory.safetensors", build(tensors, values | edit))
    for name in values:
        left = {key: value for key, value in values.items() if key != name}
        needed = name in ("dataset", "class_names", "image_shape", "format")
        readable = loads(tmp_path / "memory.safetensors", build(tensors, left))
        assert not (needed and readable)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"format": 2}, "has memory format 2, and this recollect reads up to 1: update it"),
        ({"format": "1"}, "its format is '1', not 1"),
        ({"format": True}, "its format is True, not 1"),
        ({"format": 0}, "its format is 0, not 1"),
        ({"image_shape": [2, 4, 8]}, r"bases are \[2, 2, 3\] where the header tells \[2, 2, 4\]"),
        ({"image_shape": [2, 65536, 65536], "downsample": 32768}, "'image_shape' cannot be"),
        ({"image_shape": [2, 65537, 6]}, "'image_shape' cannot be"),
        ({"downsample": 1}, "where the header tells"),
        ({"downsample": 0}, "'downsample' cannot be '0'"),
        ({"class_names": ["a", "b"]}, "addressing is for 3 classes, and the header names 2"),
        ({"class_names": ["a", "b", "a"]}, "'class_names' cannot be"),
        ({"class_names": []}, "'class_names' cannot be"),
        ({"addressing": "one-hot"}, "'addressing' is F32"),
        ({"addressing": "dense"}, "'addressing' cannot be 'dense'"),
        ({"checksum": "0" * 64}, "its tensors do not match its checksum; fetch or distil it again"),
        ({"preprocessing": None}, "'preprocessing' cannot be"),
        ({"made": {"loss": float("nan")}}, "damaged .*JSON"),
        ({"made": nested(800)}, "damaged .*JSON"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, edit, message):
    tensors, header = tensors_of("float32")
    path = tmp_path / "memory.safetensors"
    path.write_bytes(build(tensors, raw_header(header) | edit))
    with pytest.raises(RecollectError, match=message):
        Memory.load(path)


@pytest.mark.parametrize("shape", [[True, 4, 3], [1, 4.0, 3], ["1", 4, 3], [1, 4], [0, 4, 3], [1, -4, 3]], ids=str)
def test_a_shape_is_three_whole_numbers(shape):
    values = raw_header(tensors_of("one-hot")[1])
    assert parse(json.dumps(values), "the file").base_shape == (1, 4, 3)
    with pytest.raises(RecollectError, match=r"the file is damaged .*'image_shape' cannot be"):
        parse(json.dumps(values | {"image_shape": shape}), "the file")


def test_fields_of_tomorrow_are_passed_over(tmp_path):
    tensors, header = tensors_of("float32")
    assert loads(tmp_path / "memory.safetensors", build(tensors, raw_header(header) | {"licence": "MIT"}))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(list(Header.__dataclass_fields__)), json_values, max_size=3), json_values)
def test_no_json_gets_past_parse(edit, anything):
    values = raw_header(tensors_of("float32")[1])
    for text in (json.dumps(values | edit), json.dumps(anything)):
        header, why = attempt(parse, text, "the file")
        if header is None:
            assert "the file" in why
        else:
            assert parse(header.to_json(), "the file") == header


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", '"x"', "[" * 100000, '{"format": 1' + "0" * 5000 + "}"])
def test_what_is_no_json_object_is_refused(tmp_path, text):
    assert not loads(tmp_path / "memory.safetensors", build(tensors_of("float32")[0], text))


# Damage to the tensors, with a right checksum


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict], dict]:
    return lambda tensors: tensors | {name: change(tensors[name]).contiguous()}


def filled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def fill(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[1] = value
        return tensor

    return fill


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("bases", filled(float("nan"))), "not finite: distil it again"),
        (changed("addressing", filled(float("inf"))), "not finite: distil it again"),
        (changed("bases", lambda t: t[:3]), "addressing is for 4 bases, and it has 3"),
        (changed("bases", lambda t: t[:0]), r"'bases' is F32 \[0, 2, 2, 3\]"),
        (changed("bases", lambda t: t.flatten(1)), r"'bases' is F32 \[4, 12\]"),
        (changed("bases", torch.Tensor.double), "'bases' is F64"),
        (changed("addressing", torch.Tensor.long), "'addressing' is I64"),
        (changed("addressing", lambda t: t[:, :2]), "addressing is for 2 classes"),
        (changed("addressing", lambda t: t[0]), r"'addressing' is F32 \[3, 4\]"),
        (lambda tensors: {"bases": tensors["bases"]}, "it has no tensor 'addressing'"),
        (lambda tensors: {"addressing": tensors["addressing"]}, "it has no tensor 'bases'"),
    ],
)
def test_wrong_tensors_are_named(tmp_path, change, message):
    tensors, header = tensors_of("float32")
    path = tmp_path / "memory.safetensors"
    path.write_bytes(build(change(tensors), raw_header(header)))
    with pytest.raises(RecollectError, match=message):
        Memory.load(path)


@pytest.mark.parametrize("dtype", ["F64", "BOOL", "I8", "U16", "C64", "F8_E4M3", "F8_E8M0", "F4", "F6_E2M3", "Q4"])
def test_another_tensor_of_any_type_beside_ours(tmp_path, dtype):
    """Written by hand, so that it may be of a type that torch does not know."""
    data = whole_file("float32")
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header["another"] = {"dtype": dtype, "shape": [16], "data_offsets": [len(body), len(body)]}
    bits = int("".join(filter(str.isdigit, dtype.split("_")[0])) or 8)
    header["another"]["data_offsets"][1] += 2 * bits
    text = json.dumps(header).encode()
    loads(tmp_path / "memory.safetensors", struct.pack("<Q", len(text)) + text + body + bytes(2 * bits))


# What is no memory at all


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_never_executed(tmp_path):
    payload, path = Payload(tmp_path / "executed"), tmp_path / "memory.safetensors"
    tensors, header = tensors_of("float32")
    torch.save({"bases": tensors["bases"], "payload": payload}, tmp_path / "pickle.pt")
    data = pickle.dumps(payload, protocol=0)
    assert not loads(path, data)
    assert not loads(path, pickle.dumps(payload))
    assert not loads(path, (tmp_path / "pickle.pt").read_bytes())
    assert not loads(path, build(tensors, data.decode()))
    assert loads(path, build(tensors, raw_header(header) | {"made": {"config": {"x": data.decode()}}}))
    assert not loads(path, whole_file("float32") + data)
    assert not (tmp_path / "executed").exists()
    pickle.loads(data)  # the trap itself does work
    assert (tmp_path / "executed").is_dir()


def test_foreign_files_are_refused(tmp_path):
    tensors, header = tensors_of("float32")
    path = tmp_path / "memory.safetensors"
    foreign = [
        b"",
        b"\x00",
        bytes(8),
        bytes(1000),
        b"\xff" * 1000,
        b"\x02" + bytes(7) + b"{}",
        b"PK\x03\x04" + bytes(100),
        b"\x89PNG\r\n\x1a\n" + bytes(100),
        random.Random(0).randbytes(5000),
        build(tensors, None),
        safetensors.torch.save(tensors, {"format": "pt"}),
        safetensors.torch.save(tensors, {"Recollect": json.dumps(raw_header(header))}),
        safetensors.torch.save({"weight": torch.zeros(3)}, {"recollect": json.dumps(raw_header(header))}),
        safetensors.torch.save({}),
    ]
    for data in foreign:
        assert not loads(path, data)
    path.write_bytes(build(tensors, None))
    with pytest.raises(RecollectError, match=r"a \.safetensors file without recollect's header"):
        Memory.load(path)


@pytest.mark.parametrize("name", ["missing.safetensors", "folder", "x" * 300, "nul\0byte", "file/memory.safetensors"])
def test_a_path_that_is_no_file_is_named(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for read in (read_header, Memory.load):
        with pytest.raises(RecollectError, match=r"memory file .* does not exist: give the path of a \.safetensors"):
            read(tmp_path / name)


def test_a_header_is_read_without_torch(tmp_path, kind):
    path = tmp_path / "memory.safetensors"
    path.write_bytes(whole_file(kind))
    code = (
        "import sys; from recollect.header import read_header; header, tensors = read_header(sys.argv[1]);"
        "print(ascii(header.class_names), tensors['bases'].shape); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{NAMES!a} {tuple(tensors_of(kind)[0]['bases'].shape)}"
