"""A .safetensors file whose metadata holds one JSON header of ours: what memories and classifiers are kept in.

Header and shapes are read without torch. Nothing that a file brings along is executed; a damaged or foreign one gets a
RecollectError that names it.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from recollect.errors import RecollectError
from recollect.files import MOST_DEPTH, is_deep, sha256, write_through

if TYPE_CHECKING:
    from torch import Tensor


class TensorInfo(NamedTuple):
    """Shape and type of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: str
    """as safetensors writes it: F32, F16, BF16, U8"""


@dataclass(frozen=True)
class Kind:
    """One kind of these files: the metadata's key to its header, that header's version, and words for errors."""

    name: str
    key: str
    owner: str
    format: int
    remedy: str

    def damaged(self, where: object, why: str) -> RecollectError:
        return RecollectError(f"{where} is damaged or not a {self.name} of recollect ({why}): {self.remedy}")

    def read(self, path: Path) -> tuple[str, dict[str, TensorInfo]]:
        """The header's text, and what tensors there are. Loads neither tensors nor torch."""
        if not os.path.isfile(path):  # false, where Path.is_file raises, for a name that is too long
            raise RecollectError(
                f"{self.name} file {path} does not exist: give the path of a .safetensors file that recollect wrote"
            )
        try:
            with safe_open(path, framework="np") as file:
                metadata = file.metadata() or {}
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                tensors = {name: TensorInfo(tuple(s.get_shape()), str(s.get_dtype())) for name, s in slices.items()}
        except (SafetensorError, OSError, ValueError) as error:
            raise self.damaged(path, f"not a whole .safetensors file: {error}") from None
        if self.key not in metadata:
            foreign = f"a .safetensors file without {self.owner} header"
            raise self.damaged(path, "a memory" if "recollect" in metadata else foreign)
        return metadata[self.key], tensors

    def parse(self, text: str, where: object) -> dict[str, Any]:
        """The header's fields, of a version that is known."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            raise self.damaged(where, "its header is not JSON") from None
        if not isinstance(fields, dict):
            raise self.damaged(where, "its header is not a JSON object")
        if is_deep(fields):
            raise self.damaged(where, f"its header is JSON of more than {MOST_DEPTH} levels")
        version = fields.get("format")
        if type(version) is int and version > self.format:
            raise RecollectError(
                f"{where} has {self.name} format {version}, and this recollect reads up to {self.format}: "
                "update it (pip install -U recollect)"
            )
        if type(version) is not int or version != self.format:
            raise self.damaged(where, f"its format is {version!r}, not {self.format}")
        return fields

    def tensors(self, path: Path) -> "dict[str, Tensor]":
        import safetensors.torch

        try:
            return safetensors.torch.load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise self.damaged(path, f"its tensors cannot be read: {error}") from None

    def write(self, path: Path, header: str, tensors: "dict[str, Tensor]") -> None:
        """Atomically, where the path leads."""
        import safetensors.torch

        write_through(path, safetensors.torch.save(tensors, {self.key: header}))


def plain(tensors: "dict[str, Tensor]") -> "dict[str, Tensor]":
    """As they are written."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def checksum(tensors: "Iterable[Tensor]") -> str:
    """SHA-256 of their bytes, in this order."""
    import torch

    return sha256(*(t.contiguous().flatten().view(torch.uint8).numpy().tobytes() for t in tensors))
