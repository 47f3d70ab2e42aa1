"""Pickles: pickled bytes become a dict of plain values and arrays. Nothing that the bytes name is imported or called.

A pickle is a program. What a pickled dataset needs of its machine is here: some forty instructions that make numbers, strings,
lists, tuples and dicts, and five names that lead to stand-ins. Keys are strings, bytes or whole numbers, so nothing that is
nested is ever hashed; no instruction copies more than the bytes that it brings along.
"""

import pickletools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

PLAIN = re.compile(r"[|<>=]?[biufSU]\d{1,9}")  # what an array's type may be called
_MARK, _ORDERS = object(), ("|", "<", ">", "=")


class PickleError(ValueError):
    """The program is not one that a dataset needs."""


def unpickle(raw: bytes) -> dict[str, Any]:
    """A pickled dict of arrays, numbers, strings and lists; its keys as str. Other bytes raise almost any exception."""
    found = _Machine(len(raw), _STAND_INS.get).run(raw)
    if not isinstance(found, dict):
        raise PickleError(f"it holds a {type(found).__name__} instead of a dict")
    return {text(key): value.array if isinstance(value, _Array) else value for key, value in found.items()}


def check_torch(raw: bytes) -> None:
    """Refuse a program that torch need not run to make tensors, numbers, strings and containers of them. Its own reader
    hashes keys of any kind, and can be led beyond the end of the stack."""
    _Machine(len(raw), _for_torch).run(raw)


def text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


class _Machine:
    """A stack of values, and a memo of those that are named again."""

    def __init__(self, most: int, named: "Callable[[str], Callable[..., object] | None]") -> None:
        self.named = named
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.left = 2 * most  # bytes that strings may become: an array is in its file once, and made twice at most

    def run(self, raw: bytes) -> object:
        for opcode, argument, _ in pickletools.genops(raw):  # which refuses lengths beyond the end
            if opcode.name in _CONSTANTS:
                self.stack.append(argument)
            elif opcode.name in _FRESH:
                self.stack.append(_FRESH[opcode.name]())
            elif opcode.name in _DOES:
                _DOES[opcode.name](self, argument)
            elif opcode.name == "STOP":
                break
            else:
                raise PickleError(f"no dataset needs the instruction {opcode.name}")
        return self.pop()

    def pop(self, kind: Any = object) -> Any:
        """The topmost value, which must be of a kind."""
        if not self.stack or self.stack[-1] is _MARK or not isinstance(self.stack[-1], kind):
            raise PickleError(f"no {getattr(kind, '__name__', 'array')} where one is needed")
        return self.stack.pop()

    def top(self, kind: Any) -> Any:
        self.stack.append(found := self.pop(kind))
        return found

    def marked(self) -> list[Any]:
        """The values since the last mark."""
        found = []
        while self.stack and self.stack[-1] is not _MARK:
            found.append(self.stack.pop())
        if not self.stack:
            raise PickleError("no mark where one is needed")
        self.stack.pop()
        return found[::-1]

    def tuple(self, count: int) -> None:
        self.stack.append(tuple(self.pop() for _ in range(count))[::-1])

    def extend(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def update(self, values: list[Any]) -> None:
        if len(values) % 2 or not all(type(key) in (str, bytes, int) for key in values[::2]):
            raise PickleError("a key is no string, bytes or whole number")
        self.top(dict).update(zip(values[::2], values[1::2], strict=True))

    def dict(self, values: list[Any]) -> None:
        self.stack.append({})
        self.update(values)

    def put(self, number: int) -> None:
        self.memo[number] = self.top(object)

    def get(self, number: int) -> None:
        if number not in self.memo:
            raise PickleError(f"there is no memo {number}")
        self.stack.append(self.memo[number])

    def name(self, module: str, name: str) -> None:
        found = self.named(f"{module}.{name}")
        if found is None:
            raise PickleError(f"it asks for {module}.{name}, which no dataset needs")
        self.stack.append(_Name(found))

    def call(self) -> None:
        arguments, function = self.pop(tuple), self.pop()
        if not isinstance(function, _Name):
            raise PickleError(f"a {type(function).__name__} is called")
        self.stack.append(function.leads_to(*arguments))
        if isinstance(self.stack[-1], bytes):
            self._account(self.stack[-1])

    def stored(self) -> None:
        """A storage, which lies beside the program of torch's archives; other pickles have none."""
        self.pop(tuple)
        if self.named is not _for_torch:
            raise PickleError("no dataset needs the instruction BINPERSID")
        self.stack.append(_Tensor())

    def build(self) -> None:
        state, built = self.pop(tuple), self.top(_Array | _Dtype)
        built.set(*state)
        if isinstance(built, _Array):
            self._account(built.array)

    def _account(self, made: "bytes | np.ndarray") -> None:
        self.left -= made.nbytes if isinstance(made, np.ndarray) else len(made)
        if self.left < 0:
            raise PickleError("it makes more bytes than it has")


class _Name:
    """A name that the program asked for, and what it leads to here."""

    def __init__(self, leads_to: Callable[..., object]) -> None:
        self.leads_to = leads_to


class _Dtype:
    """What a pickled dtype becomes: its type code, then its byte order."""

    def __init__(self, code: object, *_: object) -> None:
        if not PLAIN.fullmatch(text(code) if isinstance(code, str | bytes) else ""):
            raise PickleError(f"arrays of type {code!r:.20} are refused")
        self.dtype = np.dtype(text(code))

    def set(self, _: object, order: object, subarray: object, names: object, fields: object, *rest: object) -> None:
        if not (subarray is names is fields is None) or not isinstance(order, str | bytes) or text(order) not in _ORDERS:
            raise PickleError("structured arrays are refused")
        self.dtype = self.dtype.newbyteorder(text(order))  # pyright: ignore


class _Array:
    """What a pickled array becomes: built from its bytes, which the shape has to fit."""

    def __init__(self, kind: object, shape: object, code: object) -> None:
        if not (isinstance(kind, _Name) and kind.leads_to is _uncallable) or shape != (0,) or code not in ("b", b"b"):
            raise PickleError("_reconstruct is only for an empty ndarray")
        self.array = np.empty(0, np.uint8)

    def set(self, _: object, shape: object, dtype: object, fortran: object, data: object) -> None:
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes | str) or not isinstance(shape, tuple):
            raise PickleError("an array without plain bytes is refused")
        flat = np.frombuffer(data if isinstance(data, bytes) else data.encode("latin1"), dtype.dtype)
        self.array = flat.reshape(shape, order="F" if fortran else "C")


def _encode(string: object, encoding: object) -> bytes:
    if not isinstance(string, str) or encoding not in ("latin1", "latin-1"):
        raise PickleError("encode is only for latin1")
    return string.encode("latin1")


def _uncallable(*_: object) -> None:
    raise PickleError("numpy.ndarray is only a name here")


_STAND_INS: dict[str, Callable[..., object]] = {
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.ndarray": _uncallable,
    "numpy.dtype": _Dtype,
    "_codecs.encode": _encode,
}


class _Tensor:
    """Stands for what torch makes: a tensor, a storage, an empty OrderedDict."""

    def __init__(self, *_: object) -> None: ...


def _ordered(*given: object) -> object:
    if given:
        raise PickleError("an OrderedDict is only for nothing")
    return _Tensor()


def _for_torch(name: str) -> Callable[..., object] | None:
    is_known = name in _OF_TORCH or re.fullmatch(r"torch\.\w*Storage", name)
    return _ordered if name == "collections.OrderedDict" else _Tensor if is_known else None


_OF_TORCH = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter", "torch.Size", "torch.device")
_CONSTANTS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING"),
    *("SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
"""instructions whose argument is a value"""
_FRESH: dict[str, Callable[[], object]] = {
    "MARK": lambda: _MARK, "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict,
}  # fmt: skip
_DOES: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda m, _: None,
    "FRAME": lambda m, _: None,
    "LIST": lambda m, _: m.stack.append(m.marked()),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.marked())),
    "DICT": lambda m, _: m.dict(m.marked()),
    "TUPLE1": lambda m, _: m.tuple(1),
    "TUPLE2": lambda m, _: m.tuple(2),
    "TUPLE3": lambda m, _: m.tuple(3),
    "APPEND": lambda m, _: m.extend([m.pop()]),
    "APPENDS": lambda m, _: m.extend(m.marked()),
    "SETITEM": lambda m, _: m.update([m.pop(), m.pop()][::-1]),
    "SETITEMS": lambda m, _: m.update(m.marked()),
    "MEMOIZE": lambda m, _: m.put(len(m.memo)),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    "GLOBAL": lambda m, name: m.name(*name.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.name(*[m.pop(str), m.pop(str)][::-1]),
    "BINPERSID": lambda m, _: m.stored(),
    "REDUCE": lambda m, _: m.call(),
    "BUILD": lambda m, _: m.build(),
}
