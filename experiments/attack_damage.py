"""How the attack damages things: bytes, JSON, the tensors of a file, the program of a pickle. Every choice is the generator's."""

import copy
import io
import json
import pickletools
import shutil
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

WORDS = [
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    9,
    127,
    128,
    219,
    255,
    256,
    2**15 - 1,
    2**16 - 1,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**64 - 1,
]
"""what sizes and types in headers may not be"""
NUMBERS = [0, 1, -1, 2, 3, 1000, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**12, 10**30, 10**400, 0.0, -0.0, 0.5, 1.5, -1.5]
NUMBERS += [1e-300, 1e6, 1e30, 1e300, 1e308, float("nan"), float("inf"), -float("inf"), 5e-324]
EVIL = "\x1b]0;owned\x07\x1b[2J\ud800\u202e\n"
TEXTS = [
    "",
    "x",
    "none",
    "auto",
    "cpu",
    "cuda",
    "../../x",
    "/dev/zero",
    "hf:x/y",
    "$\\frac{$",
    "%s%n",
    "{0}",
    "a/b",
    ".",
    "\0",
    EVIL,
]
TEXTS += ["flip", "flip+crop+cutout", "crop+" * 50, "x" * 70_000, "١٢", "zca-0000000000000000.safetensors", "custom x"]
NETWORKS = [
    "mlp",
    "convnet",
    "resnet12",
    "alexnet",
    "lamaml",
    "mlp:",
    "mlp:width=",
    "mlp:width=0",
    "mlp:width=9999999999",
    "custom f",
]
NETWORKS += [
    "mlp:depth=65536",
    "mlp:width=" + "9" * 4401,
    "mlp:width=1048576",
    "mlp:width=1000,depth=1000",
    "mlp:width=1,depth=1000",
]
NETWORKS += [
    "convnet:width=1048576",
    "convnet:depth=1000,width=1",
    "resnet12:width=1048576",
    "lamaml:hidden=1048576",
    "mlp:width=٣",
]
DIGITS, DEEP = "@digits", "@deep"
RAW = {f'"{DIGITS}"': "9" * 4401, f'"{DEEP}"': "[" * 100_000 + "]" * 100_000}
"""values that json.dumps does not write"""


SNIPPETS = [
    b"cos\nsystem\n",
    b"cposix\nsystem\n",
    b"X\x04\x00\x00\x00trueq\x00",
    b"\x85R",
    b"q\x00",
    b"h\x00",
    b"r\xff\xff\xff\xff",
]
SNIPPETS += [bytes([code]) for code in b"(tldua}])\x85\x86\x87Ne02\x94Rbs\x81\x93Q\x8f\x90\x97\x98."]
SNIPPETS += [b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"c_codecs\nencode\n"]
SNIPPETS += [b"ccollections\nOrderedDict\n", b"ctorch\nFloatStorage\n", b"j\x01\x00\x00\x00", b"\x8a\xff" + b"\x7f" * 255]
SNIPPETS += [b"\x8b\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 7 + b"\x7f", b"\x95" + b"\xff" * 8, b"I" + b"9" * 5000 + b"\n"]
SNIPPETS += [b"F1e999\n", b"Fnan\n", b"K\x01K\x02K\x03", b"X\x03\x00\x00\x00O8x"]
SNIPPETS += [
    b"})" + b"\x85" * 3000 + b"K\x01s",
    b"}()q\x07" + b"h\x07h\x07\x86q\x07" * 59 + b"u",
    b"})" + b"\x85" * 200_000 + b"K\x01s",
]
"""pieces of pickles; the last three are dicts whose key is nested, shared, and too deep for the processor's stack"""


def hurt(rng: Random, data: bytes) -> bytes:
    """One wound or some; more in the head, where sizes and types stand."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        end = len(found)
        if not end:
            break
        at = rng.randrange(min(end, rng.choice((16, 64, 300, end, end))))
        to = min(end, at + rng.choice((1, 2, 4, 8, 100, end)))
        match rng.randrange(10):
            case 0:
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                found[at] = rng.randrange(256)
            case 2:
                size, order = rng.choice((1, 2, 4, 8)), rng.choice("<>")
                word = rng.choice(WORDS) % 2 ** (8 * size)
                found[at : at + size] = struct.pack(order + {1: "B", 2: "H", 4: "I", 8: "Q"}[size], word)
            case 3:
                found[at:at] = rng.randbytes(rng.choice((1, 2, 4, 100)))
            case 4:
                del found[at:to]
            case 5:
                found[at:at] = found[at:to][:5000]
            case 6:
                found[at:to] = bytes(to - at)
            case 7:
                del found[at:]
            case 8:
                other = rng.randrange(end)
                found[at:to] = found[other : other + to - at]
            case 9:
                found[at : at + 1] = rng.choice(b'"{}[],:0129\\\x00\xff-.e').to_bytes(1, "little")
    return bytes(found)


# --- JSON ------------------------------------------------------------------------------------------------------------


def anything(rng: Random) -> Any:
    """A value that is not expected."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice((None, True, False, [], {}, [[]], {"": None}, [None], {"a": [1]}, DIGITS, DEEP))
    if kind == 1:
        return rng.choice(TEXTS)
    if kind == 2:
        return nested(rng.choice((3, 90, 110, 400)))
    return rng.choice(NUMBERS)


def nested(depth: int) -> Any:
    value: Any = {}
    for level in range(depth):
        value = [value] if level % 2 else {"deeper": value}
    return value


def twisted(rng: Random, value: Any) -> Any:
    """The same with some values, keys or types that are not expected."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(value))
        if not places:
            return anything(rng)
        holder, key = rng.choice(places)
        old = holder[key]
        match rng.randrange(8):
            case 0 if isinstance(holder, dict):
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(TEXTS)] = old
            case 2:
                holder[key] = [old]
            case 3:
                other, there = rng.choice(places)
                if there in other if isinstance(other, dict) else there < len(other):
                    holder[key] = copy.deepcopy(other[there])
            case 4 if isinstance(old, int | float):
                holder[key] = old + rng.choice((-1, 1, 10**6)) if rng.random() < 0.5 else rng.choice(NUMBERS)
            case 5 if key in ("network", "encoder"):
                holder[key] = rng.choice(NETWORKS)
            case 6 if isinstance(old, list) and old:
                holder[key] = old * rng.choice((0, 2, 300)) if rng.random() < 0.5 else old[1:]
            case _:
                holder[key] = anything(rng)
    return value


def _places(value: Any) -> Any:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def dumped(value: Any) -> bytes:
    """JSON, with what only a hostile writer writes."""
    text = json.dumps(value)
    for word, raw in RAW.items():
        text = text.replace(word, raw)
    return text.encode()


def json_file(rng: Random, value: Any) -> bytes:
    return hurt(rng, json.dumps(value).encode()) if rng.random() < 0.2 else dumped(twisted(rng, value))


# --- tensors and pickles ---------------------------------------------------------------------------------------------

Tensors = dict[str, tuple[str, list[int], bytes]]
"""name -> (type, shape, bytes)"""


def safetensors_bytes(tensors: Tensors, metadata: dict[str, bytes], rng: Random | None = None) -> bytes:
    """A .safetensors file; with a generator, one whose table of contents lies."""
    table: dict[str, Any] = {"__metadata__": {name: text.decode("utf-8", "replace") for name, text in metadata.items()}}
    body = b""
    for name, (kind, shape, data) in tensors.items():
        table[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    head = json.dumps(twisted(rng, table) if rng else table).encode()
    return struct.pack("<Q", len(head)) + head + body


def program(rng: Random, data: bytes, snippets: Sequence[bytes]) -> bytes:
    """A pickle with instructions left out, repeated, moved or put in."""
    places = [place for _, _, place in pickletools.genops(data)]
    parts = [data[start:end] for start, end in zip(places, [*places[1:], len(data)], strict=True)]
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(parts))
        match rng.randrange(5):
            case 0:
                del parts[at : at + rng.choice((1, 1, 2, 5))]
            case 1:
                parts.insert(at, rng.choice(parts) if parts else b".")
            case 2:
                parts.insert(at, rng.choice(snippets))
            case 3:
                piece, times = rng.choice(snippets), rng.choice((2, 60, 5000))
                parts[at:at] = [piece] * min(times, 1 + 500_000 // len(piece))
            case 4:
                other = rng.randrange(len(parts))
                parts[at], parts[other] = parts[other], parts[at]
        if not parts:
            break
    return b"".join(parts)


def png_chunks(rng: Random, data: bytes) -> bytes:
    """A PNG with damaged chunks whose checksums are right."""
    chunks, place = [], 8
    while place + 8 <= len(data):
        size = int.from_bytes(data[place : place + 4], "big")
        chunks.append((data[place + 4 : place + 8], data[place + 8 : place + 8 + size]))
        place += 12 + size
    at = rng.randrange(len(chunks))
    kind, body = chunks[at]
    match rng.randrange(4):
        case 0:
            chunks[at] = kind, hurt(rng, body)
        case 1:
            chunks[at] = rng.choice((b"IDAT", b"PLTE", b"tRNS", b"zTXt", b"iCCP", b"gAMA", b"acTL", b"fdAT", b"eXIf")), body
        case 2:
            chunks.insert(at, chunks[rng.randrange(len(chunks))])
        case 3:
            raw = hurt(rng, zlib.decompress(body)) if kind == b"IDAT" else rng.randbytes(20)
            chunks[at] = rng.choice((kind, b"zTXt", b"iCCP")), zlib.compress(raw + bytes(rng.choice((0, 10**6))))
    out = io.BytesIO(data[:8])
    out.seek(8)
    for kind, body in chunks:
        out.write(struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)))
    return out.getvalue()


# --- cases ----------------------------------------------------------------------------------------------------

Files = dict[str, bytes]
"""name in the case's folder -> content"""


@dataclass(frozen=True)
class Kind:
    """One kind of file: how a damaged one is made, and what reads it."""

    name: str
    make: Callable[[Random], Files]
    read: Callable[[Path, Random], object]
    share: float = 10
    """of the cases"""


def put(folder: Path, files: Files) -> None:
    """The case's folder with nothing but these files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, raw in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
