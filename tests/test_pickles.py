"""The restricted unpickler: what honest pickles of arrays hold comes through, and no other pickle does anything at all."""

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from recollect.data.pickles import unpickle

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
    "inst opcode": (b"(S'touch mark'\nios\nsystem\n.", r"it asks for os\.system"),
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
    "attributes on a name": (b"\x80\x02c_codecs\nencode\n}U\x08__call__K\x01sb.", "has no attribute '__dict__'"),
    "slots of a name": (b"\x80\x02c_codecs\nencode\nN}U\x08__call__K\x01s\x86b.", "attribute '__call__' is read-only"),
    "name as a class": (b"\x80\x02cnumpy\nndarray\n)\x81.", "NEWOBJ"),
    "persistent id": (b"Pthing\n.", "persistent"),
    "memo of 64 GB": (b"\x80\x02}r\xff\xff\xff\xff.", "memo 4294967295 is out of range"),
    "memo of 64 GB in decimals": (b"}p4294967295\n.", "memo 4294967295 is out of range"),
    "bytearray of 1 TB": (b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".", "expected 1099511627776 bytes"),
    "extension": (b"\x80\x02\x82\x01.", "unregistered extension code"),
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
