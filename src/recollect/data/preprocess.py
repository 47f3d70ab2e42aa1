"""Preprocessing: per-channel normalisation, and ZCA whitening on top of it. Both can be undone, for viewing.

Statistics come from training images only. A memory's header carries mean and std; the ZCA matrix (38 MB at 32x32 colour)
lies in a sidecar file beside the memory, named by its content, which several memories share.
"""

import math
import os
import threading
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from recollect.errors import RecollectError, unknown
from recollect.files import sha256, write_atomically
from recollect.reading import is_stated

SMALLEST = 1e-7  # of the largest float of a channel: a deviation below it is rounding
ZCA_EPSILON = 0.1  # added to the eigenvalues, under the root
_first_use = threading.Lock()  # torch loads its solvers at the first call, and fails where two threads make it
MOST_PREPARED = 8192  # images that are turned from pixels to floats at a time on a GPU


@dataclass(frozen=True)
class Zca:
    """x -> (x - mean) W on flattened, normalised images; W is symmetric."""

    mean: Tensor  # [D]
    matrix: Tensor  # [D, D]

    def to(self, device: "torch.device | str") -> "Zca":
        return Zca(self.mean.to(device), self.matrix.to(device))

    def file_bytes(self) -> bytes:
        return safetensors.torch.save({"matrix": self.matrix.cpu().contiguous(), "mean": self.mean.cpu().contiguous()})

    @cached_property
    def file_name(self) -> str:
        return _file_name(self.file_bytes())


def _file_name(data: bytes) -> str:
    return f"zca-{sha256(data)[:16]}.safetensors"


@dataclass(frozen=True)
class Preprocess:
    """From uint8 pixels to what a network sees, and back.

    Examples:
        >>> images = recollect.load("digits")
        >>> preprocess = recollect.Preprocess.fit(images.train.images)
        >>> seen = preprocess(images.test.images)
        >>> seen.shape, bool((preprocess.undo(seen) * 255 - images.test.images).abs().max() < 0.01)
        (torch.Size([359, 1, 8, 8]), True)
    """

    mean: tuple[float, ...]
    """of each channel, of pixels in 0..1"""
    std: tuple[float, ...]
    """of each channel"""
    zca: Zca | None = None
    """whitening on top of it"""
    columns: tuple[str, ...] = ()
    """names of the channels, where these are the numbers of a vector"""
    pictures: dict[str, str] | None = None
    """how pictures of any size become pixels before: fit, and the background of transparent ones (see `load`)"""

    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 [N, C, H, W], or floats as they are, -> float32 [N, C, H, W]"""
        images = (
            (pixels if pixels.is_floating_point() else pixels.float() / 255) - self._channels(self.mean, pixels)
        ) / self._channels(self.std, pixels)
        if self.zca is None:
            return images
        zca = self.zca.to(images.device)
        return ((images.flatten(1) - zca.mean) @ zca.matrix).view_as(images)

    def to(self, device: "torch.device | str") -> "Preprocess":
        """The same with its matrix on a device, so that it need not travel at every call."""
        return self if self.zca is None else replace(self, zca=self.zca.to(device))

    def on(self, device: str, pixels: Tensor) -> Tensor:
        """The same on a device; to a GPU they travel as pixels, some at a time, and are prepared there.

        Arguments:
            device: "cpu", "cuda" or "cuda:1".
            pixels: uint8 [N, C, H, W].
        """
        if device == "cpu":
            return self(pixels)
        images = torch.empty(pixels.shape, device=device)
        for place, some in zip(images.split(MOST_PREPARED), pixels.split(MOST_PREPARED), strict=True):
            place.copy_(self(some.to(device)))
        return images

    def undo(self, images: Tensor) -> Tensor:
        """What a network sees -> float pixels, 0..1 for a real image (a recalled one may lie outside); floats as they were."""
        if self.zca is not None:
            zca = self.zca.to(images.device)
            whole, singular = torch.linalg.solve_ex(zca.matrix.double(), images.flatten(1).double().T)
            if singular:
                raise RecollectError(
                    f"the whitening of {zca.file_name} cannot be undone: its file is not one of ours; copy it again"
                )
            whole = whole.T
            images = (whole.float() + zca.mean).view_as(images)
        return images * self._channels(self.std, images) + self._channels(self.mean, images)

    @staticmethod
    def _channels(values: tuple[float, ...], like: Tensor) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None, None]

    def is_for(self, shape: tuple[int, int, int]) -> bool:
        """Whether images of (channels, height, width) can be prepared by it."""
        return len(self.mean) == shape[0] and (self.zca is None or len(self.zca.mean) == math.prod(shape))

    @staticmethod
    def fit(
        pixels: Tensor, kind: str = "normalise", device: "torch.device | str" = "cpu", columns: tuple[str, ...] = ()
    ) -> "Preprocess":
        """From training images.

        Arguments:
            pixels: uint8 [N, C, H, W], or floats.
            kind: "normalise", or "zca" for whitening on top of it.
            device: where a whitening is fitted; a GPU is faster.
            columns: names of the channels, where these are the numbers of a vector.
        """
        if kind not in ("normalise", "zca"):
            raise unknown("preprocessing", kind, ["normalise", "zca"])
        mean, std = (_of_floats if pixels.is_floating_point() else _of_pixels)(pixels.transpose(0, 1).flatten(1))
        plain = Preprocess(tuple(mean.tolist()), tuple(std.tolist()), columns=columns)
        return plain if kind == "normalise" else replace(plain, zca=_fit_zca(plain, pixels, device))

    def to_json(self) -> dict[str, Any]:
        """As a memory's header has it: mean, std, the whitening's file; of vectors their columns, of pictures their fit."""
        zca = None if self.zca is None else {"file": self.zca.file_name, "epsilon": ZCA_EPSILON}
        more = ({"columns": list(self.columns)} if self.columns else {}) | ({"pictures": self.pictures} if self.pictures else {})
        return {"mean": list(self.mean), "std": list(self.std), "zca": zca} | more

    def save_sidecar(self, folder: Path) -> None:
        """Put the ZCA file where a memory in `folder` looks for it (nothing to do without ZCA)."""
        if self.zca is not None and not (folder / self.zca.file_name).exists():
            write_atomically(folder / self.zca.file_name, self.zca.file_bytes())

    @staticmethod
    def from_json(header: dict[str, Any], folder: Path, pixels: Tensor | None = None) -> "Preprocess":
        """From a memory's header.

        Arguments:
            header: what `to_json` gave.
            folder: where the whitening file lies.
            pixels: the training images it was fitted to, from which a whitening file that is not at hand is fitted again.
        """
        try:
            mean, std = tuple(map(float, header["mean"])), tuple(map(float, header["std"]))
            name = None if header["zca"] is None else str(header["zca"]["file"])
            columns, pictures = tuple(map(str, header.get("columns", ()))), header.get("pictures")
            if len(mean) != len(std) or min(std) <= 0 or not all(map(math.isfinite, mean + std)):
                raise ValueError
            if (columns and len(columns) != len(mean)) or not (pictures is None or is_stated(pictures)):
                raise ValueError
        except (KeyError, TypeError, ValueError, OverflowError):
            raise RecollectError(f"preprocessing {f'{header!r:.300}'} is damaged: mean, std and zca are expected") from None
        if name is not None and pixels is not None and not os.path.isfile(folder / name):
            return _again(Preprocess(mean, std, columns=columns, pictures=pictures), pixels, name)
        return Preprocess(mean, std, None if name is None else _load_zca(folder, name), columns, pictures)


def _of_pixels(by_channel: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of uint8 [C, N] as 0..1; a channel without contrast carries nothing to scale."""
    counts = torch.stack([torch.bincount(channel.int(), minlength=256) for channel in by_channel]).double()
    levels = torch.arange(256, dtype=torch.float64) / 255
    mean = counts @ levels / counts.sum(1)
    std = ((counts * (levels - mean[:, None]) ** 2).sum(1) / counts.sum(1)).sqrt()
    std[(counts > 0).sum(1) == 1] = 1.0
    return mean, std


def _of_floats(by_channel: Tensor) -> tuple[Tensor, Tensor]:
    """The same of floats as they are."""
    exact = by_channel.double()
    mean, std = exact.mean(1), exact.std(1, correction=0)
    std[std <= SMALLEST * exact.abs().amax(1)] = 1.0
    return mean, std


def _again(stated: Preprocess, pixels: Tensor, name: str) -> Preprocess:
    """Fitted to the same training images once more (a whitening file need not travel with a memory)."""
    found = Preprocess.fit(pixels)
    if not np.allclose([found.mean, found.std], [stated.mean, stated.std], rtol=0, atol=1e-6):
        what = f"these training images are not those it was fitted to (mean {found.mean}, not {stated.mean})"
        raise RecollectError(f"the whitening file {name} is not at hand, and {what}: give the memory's own dataset")
    warnings.warn(f"the whitening file {name} is not at hand: fitted again from the training images", stacklevel=3)
    return Preprocess.fit(pixels, "zca", "cuda" if torch.cuda.is_available() else "cpu", stated.columns)


def _fit_zca(plain: Preprocess, pixels: Tensor, device: "torch.device | str") -> Zca:
    """W = U (S + 0.1)^(-1/2) U^T of the covariance U S U^T of flattened, normalised images; float64, in blocks."""
    size = pixels[0].numel()
    total = torch.zeros(size, dtype=torch.float64, device=device)
    products = torch.zeros(size, size, dtype=torch.float64, device=device)
    for block in pixels.split(4096):
        flat = plain(block.to(device)).flatten(1)
        total += flat.double().sum(0)
        products += (flat.T @ flat).double()
    mean = total / len(pixels)
    with _first_use:
        values, vectors = torch.linalg.eigh(products / len(pixels) - torch.outer(mean, mean))
    matrix = (vectors * (values.clamp_min(0) + ZCA_EPSILON).rsqrt()) @ vectors.T
    return Zca(mean.float().cpu(), matrix.float().cpu())


def _load_zca(folder: Path, name: str) -> Zca:
    path = folder / name
    if Path(name).name != name or not os.path.isfile(path):
        again = "where the memory's dataset is given, as in recollect evaluate, compose --test or ask --data, it is fitted again"
        raise RecollectError(f"the whitening file {name} is not beside the memory in {folder}: copy it there ({again})")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecollectError(f"the whitening file {path} cannot be read: {error}") from None
    if _file_name(data) != name:
        raise RecollectError(f"the whitening file {path} is damaged: its content does not match its name; copy it again")
    try:
        tensors = safetensors.torch.load(data)
        zca = Zca(tensors["mean"], tensors["matrix"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise RecollectError(f"the whitening file {path} cannot be read: {error}") from None
    size, kinds = zca.mean.numel(), {zca.mean.dtype, zca.matrix.dtype}
    finite = bool(zca.mean.isfinite().all() and zca.matrix.isfinite().all())
    if zca.mean.shape != (size,) or zca.matrix.shape != (size, size) or kinds != {torch.float32} or not finite:
        raise RecollectError(f"the whitening file {path} holds no matrix and mean that belong together: copy it again")
    return zca
