"""The header of a memory file: what a memory says about itself. Read and checked here without torch, and without running
anything that the file brings along.

A memory is one .safetensors file with the tensors `bases` [K,c,h,w] and `addressing` [r,d_y,K], `vectors` [C,d_y] where its
queries are given ones, and `encoder.*` where it is asked with pictures or words;
`__metadata__["recollect"]` is the JSON of the dataclass below.
"""

import json
import math
import re
import typing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict

from recollect.config import Recipe, fits, read_recipe, settings
from recollect.errors import RecollectError
from recollect.queries import Stated, Targets, Vectors, is_valid, stated
from recollect.reading import is_stated
from recollect.tensorfile import Kind, TensorInfo

MEMORY = Kind("memory", "recollect", "recollect's", 1, "fetch or distil it again")
_damaged = MEMORY.damaged
MAX_SIDE, MAX_NUMBERS = 65536, 2**26  # of an image: a header that asks for more is damaged


def smaller(shape: tuple[int, int, int], times: int) -> tuple[int, int, int]:
    """The shape of images that are so much smaller on each side, rounded up."""
    channels, height, width = shape
    return channels, -(-height // times), -(-width // times)


@dataclass(frozen=True)
class Header:
    """Everything in a memory file but its tensors."""

    dataset: str
    class_names: list[str]
    """by the number of their label; of continuous targets their names, one for each output of a network"""
    image_shape: list[int]
    """[channels, height, width] of a recalled image"""
    downsample: int = 1
    """bases are this much smaller than images on each side, rounded up; recall upsamples bilinearly"""
    addressing: str = "learned"
    """"learned", or "one-hot" for per-class images: then the matrices are implied and not counted"""
    query: dict[str, Any] = field(default_factory=dict)
    """what it is asked with: empty for labels; for pictures the encoder's network, size and form of a vector, ways and shots;
    for vectors and targets kind and size, and what makes them of words or numbers"""
    preprocessing: dict[str, Any] = field(default_factory=dict)
    """how real images were prepared: mean, std, for ZCA the sidecar file with its matrix, and how pictures were fitted"""
    budget: dict[str, Any] = field(default_factory=dict)
    """what was allowed, what is used, and how it was counted"""
    recipe: dict[str, Any] = field(default_factory=dict)
    """how to train on a recall: network, epochs, batch, lr, momentum, augment"""
    made: dict[str, Any] = field(default_factory=dict)
    """config, steps, seed, versions, device"""
    accuracy: list[dict[str, Any]] = field(default_factory=list)
    """measured: network, mean, deviation, n, on what, by which protocol"""
    checksum: str = ""
    """SHA-256 of the tensors' bytes, bases first"""
    format: int = MEMORY.format

    @property
    def base_shape(self) -> tuple[int, int, int]:
        """[c, h, w] of a base"""
        channels, height, width = self.image_shape
        return smaller((channels, height, width), self.downsample)

    @property
    def asked(self) -> Stated:
        """The kind of its queries."""
        channels, height, width = self.image_shape
        return stated(self.query, (channels, height, width), len(self.class_names))

    def to_json(self) -> str:
        try:
            return json.dumps(asdict(self), sort_keys=True, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:  # NaN, or a hostile depth
            raise RecollectError(f"the memory's header cannot be written as JSON: {error}") from None


def parse(text: str, where: object) -> Header:
    """The header in `text`, every field of the right type and size."""
    raw = MEMORY.parse(text, where)
    known = {f.name for f in fields(Header)}
    try:
        header = Header(**{name: value for name, value in raw.items() if name in known})
    except TypeError as error:
        raise _damaged(where, f"its header lacks a field ({error})") from None
    _check(header, where)
    try:
        read_recipe({name: value for name, value in header.recipe.items() if name in settings(Recipe)}, "its recipe")
        header.to_json()  # what is read here can be written again
    except RecollectError as error:
        raise _damaged(where, str(error)) from None
    return header


class _Whitening(TypedDict):
    file: str
    epsilon: float


class _Preprocessing(TypedDict):
    mean: list[float]
    std: list[float]
    zca: _Whitening | None
    columns: list[str]
    pictures: dict | None


class _Made(TypedDict):
    config: dict
    steps: int


class _Accuracy(TypedDict):
    network: str
    on: str
    mean: float
    deviation: float
    n: int
    protocol: str


INSIDE = {"preprocessing": _Preprocessing, "made": _Made, "accuracy": list[_Accuracy]}
"""what is looked at of fields that may say more"""
_WHITENING = re.compile(r"zca-[0-9a-f]{16}\.safetensors")


def can_prepare(preprocessing: object) -> bool:
    """Whether a header's preprocessing has the right types, and names its whitening file as we do."""
    if not isinstance(preprocessing, dict) or not fits(preprocessing, _Preprocessing):
        return False
    if len(preprocessing.get("columns", [])) not in (0, len(preprocessing.get("mean", []))):
        return False
    zca, pictures = preprocessing.get("zca"), preprocessing.get("pictures")
    return (pictures is None or is_stated(pictures)) and (zca is None or bool(_WHITENING.fullmatch(zca.get("file", ""))))


def _check(header: Header, where: object) -> None:
    names, shape = header.class_names, header.image_shape
    types = typing.get_type_hints(Header) | INSIDE
    wrong = {name: not fits(getattr(header, name), hint) for name, hint in types.items()}
    wrong |= {
        "class_names": wrong["class_names"] or not names or len(set(names)) != len(names),
        "image_shape": wrong["image_shape"] or len(shape) != 3 or not _fits(shape),
        "downsample": wrong["downsample"] or not 0 < header.downsample <= MAX_SIDE,
        "addressing": header.addressing not in ("learned", "one-hot"),
        "query": not is_valid(header.query),
        "preprocessing": not can_prepare(header.preprocessing),
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise _damaged(where, f"its header's '{name}' cannot be {str(getattr(header, name))[:60]!r}")


def _fits(shape: list[int]) -> bool:
    return all(0 < side <= MAX_SIDE for side in shape) and math.prod(shape) <= MAX_NUMBERS


def read_header(path: "Path | str") -> tuple[Header, dict[str, TensorInfo]]:
    """Header and tensor shapes of a memory file, checked against each other. Loads neither tensors nor torch."""
    text, tensors = MEMORY.read(path := Path(path))
    header = parse(text, path)
    check_tensors(header, tensors, path)
    return header, tensors


def check_tensors(header: Header, tensors: dict[str, TensorInfo], where: object) -> None:
    """The tensors must be there, of a known type, and of the shapes that the header tells."""
    for name, dimensions in (("bases", 4), ("addressing", 3)):
        if name not in tensors:
            raise _damaged(where, f"it has no tensor '{name}'")
        allowed = ("F32", "F16", "BF16") if (name, header.addressing) != ("addressing", "one-hot") else ("U8",)
        info = tensors[name]
        if info.dtype not in allowed or len(info.shape) != dimensions or 0 in info.shape:
            raise _damaged(where, f"its tensor '{name}' is {info.dtype} {list(info.shape)}")
    bases, addressing = tensors["bases"].shape, tensors["addressing"].shape
    if bases[1:] != header.base_shape:
        raise _damaged(where, f"its bases are {list(bases[1:])} where the header tells {list(header.base_shape)}")
    if addressing[2] != bases[0]:
        raise _damaged(where, f"its addressing is for {addressing[2]} bases, and it has {bases[0]}")
    if header.addressing == "one-hot" and bases[0] != addressing[0] * addressing[1]:
        raise _damaged(where, f"its one-hot addressing is {list(addressing)}")
    if addressing[1] != header.asked.size:
        gives = "its encoder gives" if "encoder" in header.query else "the header names"
        what = "numbers" if header.query else "classes"
        raise _damaged(where, f"its addressing is for {addressing[1]} {what}, and {gives} {header.asked.size}")
    _check_vectors(header, tensors.get("vectors"), where)


def _check_vectors(header: Header, info: TensorInfo | None, where: object) -> None:
    asked = header.asked
    if not isinstance(asked, Vectors | Targets) or (info is None and isinstance(asked, Vectors) and not asked.has_classes):
        return
    if info is None:
        raise _damaged(where, "it has no tensor 'vectors'")
    if isinstance(asked, Targets) and len(asked.mean) != len(header.class_names):
        raise _damaged(where, f"its targets are {len(asked.mean)}, and its header names {len(header.class_names)}")
    rows = len(header.class_names) if isinstance(asked, Vectors) else max(1, *info.shape[:1])
    if info.dtype != "F32" or info.shape != (rows, asked.size):
        raise _damaged(where, f"its tensor 'vectors' is {info.dtype} {list(info.shape)}, not F32 {[rows, asked.size]}")
