"""Pickles: pickled bytes become a dict of plain values and arrays. Nothing that the bytes name is imported or called.

A pickle is a program. The few names that a pickled array needs lead to stand-ins that check their arguments, and numpy
never sees the pickle's state, because numpy's own `__setstate__` trusts it.
"""

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np


def unpickle(raw: bytes) -> dict[str, Any]:
    """A pickled dict of arrays, numbers, strings and lists; its keys as str. Other bytes raise almost any exception."""
    # Reading the program before running it refuses lengths beyond its end. And a memo number sizes the unpickler's
    # table: ten bytes could ask for 64 GB.
    for opcode, argument, _ in pickletools.genops(raw):
        if opcode.name in ("PUT", "LONG_BINPUT") and (argument or 0) > len(raw):
            raise pickle.UnpicklingError(f"memo {argument} is out of range")
    found = _Unpickler(io.BytesIO(raw), encoding="latin1").load()  # Python 2 wrote the official files
    if not isinstance(found, dict):
        raise pickle.UnpicklingError(f"it holds a {type(found).__name__} instead of a dict")
    return {text(key): value.array if isinstance(value, _Array) else value for key, value in found.items()}


def text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> "_Name":
        if f"{module}.{name}" not in _STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no dataset needs")
        return _Name(f"{module}.{name}")


class _Name(str):
    """A name that a pickle may use. To call it is to call its stand-in; without a `__dict__` nothing can be set on it."""

    __slots__ = ()

    def __call__(self, *args: object) -> object:
        return _STAND_INS[self](*args)


class _Dtype:
    """What a pickled dtype becomes: its type code, then its byte order."""

    __slots__ = ("dtype",)

    def __init__(self, code: object, *_: object) -> None:
        self.dtype = np.dtype(text(code))
        if self.dtype.kind not in "biufSU":
            raise pickle.UnpicklingError(f"arrays of type {text(code)!r} are refused")

    def __setstate__(self, state: tuple) -> None:
        _, order, subarray, names, fields, *_ = state
        if not (subarray is names is fields is None):
            raise pickle.UnpicklingError("structured arrays are refused")
        self.dtype = self.dtype.newbyteorder(order)


class _Array:
    """What a pickled array becomes: built from its bytes, which the shape has to fit."""

    __slots__ = ("array",)

    def __init__(self, kind: object, shape: object, code: object) -> None:
        if kind != "numpy.ndarray" or shape != (0,) or code not in ("b", b"b"):
            raise pickle.UnpicklingError("_reconstruct is only for an empty ndarray")
        self.array = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(data, (bytes, str)):
            raise pickle.UnpicklingError("an array without plain bytes is refused")
        flat = np.frombuffer(data if isinstance(data, bytes) else data.encode("latin1"), dtype.dtype)
        self.array = flat.reshape(shape, order="F" if fortran else "C")


def _encode(string: object, encoding: object) -> bytes:
    if not isinstance(string, str) or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("encode is only for latin1")
    return string.encode("latin1")


def _uncallable(*_: object) -> None:
    raise pickle.UnpicklingError("numpy.ndarray is only a name here")


_STAND_INS: dict[str, Callable[..., object]] = {
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.ndarray": _uncallable,
    "numpy.dtype": _Dtype,
    "_codecs.encode": _encode,
}
