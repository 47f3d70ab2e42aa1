"""A recall as files that other programs read: .npz, a folder of PNGs, one contact sheet, plain .pt tensors, .csv of vectors."""

import csv
import io
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from recollect.data.preprocess import Preprocess
from recollect.errors import RecollectError
from recollect.files import write_through
from recollect.memory import Memory, Query
from recollect.queries import Targets
from recollect.show.pictures import png, to_pixels

Format = Literal["npz", "png", "sheet", "pt", "csv"]


def export(memory: Memory, query: Query, out: Path, kind: Format, words: Sequence[str] | None = None) -> None:
    """Write what a query or words recall to `out`, a file (npz, sheet, csv) or a folder (png, pt) that must not be there yet; all
    of it, or nothing."""
    if out.exists():
        raise RecollectError(f"{out} already exists: give another name (--out)")
    recalled, names = memory.recall(query, words=words), words or memory.class_names
    files = {"npz": _npz, "png": _png, "sheet": _sheet, "pt": _pt, "csv": _csv}[kind](memory, names, *recalled)
    try:
        for name, data in files.items():
            write_through(out / name, data)
    except RecollectError:
        shutil.rmtree(out, ignore_errors=True)
        raise


def npz(images: Tensor, labels: Tensor, class_names: Sequence[str], preprocess: Preprocess) -> bytes:
    """images (as a network sees them), pixels (uint8), labels, class_names"""
    arrays = {"images": images.numpy(), "pixels": to_pixels(preprocess.undo(images)).numpy(), "labels": labels.numpy()}
    return _bytes(np.savez_compressed, **arrays, class_names=np.array(class_names))


def _npz(memory: Memory, names: Sequence[str], images: Tensor, labels: Tensor) -> dict[str, bytes]:
    """of vectors or continuous targets X and y in their own units, beside the images as a network sees them"""
    if memory.preprocess().columns or isinstance(memory.asked, Targets):
        x, y = memory.preprocess().undo(images), _own(memory, labels)
        arrays = {"images": images.numpy(), "X": x.flatten(1).numpy() if x.shape[2:] == (1, 1) else x.numpy(), "y": y.numpy()}
        return {"": _bytes(np.savez_compressed, **arrays, class_names=np.array(names))}
    return {"": npz(images, labels, names, memory.preprocess())}


def _pt(_: Memory, __: Sequence[str], images: Tensor, labels: Tensor) -> dict[str, bytes]:
    """images.pt [N,C,H,W] float32 and labels.pt [N] int64, plain tensors: what other distillation toolkits evaluate"""
    return {"images.pt": _bytes(partial(torch.save, images.clone())), "labels.pt": _bytes(partial(torch.save, labels.clone()))}


def _own(memory: Memory, labels: Tensor) -> Tensor:
    """Labels; or targets in their own units."""
    return memory.asked.undo(labels) if isinstance(memory.asked, Targets) else labels


def _csv(memory: Memory, names: Sequence[str], images: Tensor, labels: Tensor) -> dict[str, bytes]:
    """vectors in their own units, a row each, and behind them their targets or the name of their class"""
    columns, continuous = memory.preprocess().columns, isinstance(memory.asked, Targets)
    if not columns:
        raise RecollectError(f"{memory.name} recalls images, and a .csv is for vectors: give --format npz, png, sheet or pt")
    truth = _own(memory, labels).tolist() if continuous else [[names[label]] for label in labels.tolist()]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns, *(names if continuous else ("class",))])
    for row, own in zip(memory.preprocess().undo(images).flatten(1).tolist(), truth, strict=True):
        writer.writerow([*(f"{value:.7g}" for value in row), *(f"{each:.7g}" if continuous else each for each in own)])
    return {"": text.getvalue().encode()}


def _png(memory: Memory, names: Sequence[str], images: Tensor, labels: Tensor) -> dict[str, bytes]:
    """a folder for each class, as `recollect distill FOLDER` would read it again"""
    if isinstance(memory.asked, Targets) or memory.preprocess().columns:
        raise RecollectError(f"{memory.name} has no images of classes: give --format npz, pt or csv")
    shown, files = to_pixels(memory.preprocess().undo(images)), {}
    for label in labels.unique().tolist():
        name = "".join(c if c.isalnum() or c in "-_ " else "_" for c in names[label][:80]).strip()
        for number, image in enumerate(shown[labels == label]):
            files[f"{label:03d}-{name}/{number:04d}.png"] = png(image[None])
    return files


def _sheet(memory: Memory, _: Sequence[str], images: Tensor, __: Tensor) -> dict[str, bytes]:
    """all recalled images in one picture, a row a class"""
    return {"": png(to_pixels(memory.preprocess().undo(images)), len(memory.addressing))}


def _bytes(save: Callable[..., None], **options: Any) -> bytes:
    buffer = io.BytesIO()
    save(buffer, **options)
    return buffer.getvalue()
