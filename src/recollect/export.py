"""A recall as files that other programs read: .npz, a folder of PNGs, one contact sheet, or plain .pt tensors."""

import io
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from recollect.errors import RecollectError
from recollect.files import write_atomically
from recollect.memory import Memory, Query
from recollect.show.figures import mosaic, pixels

Format = Literal["npz", "png", "sheet", "pt"]


def export(memory: Memory, query: Query, out: Path, kind: Format) -> None:
    """Write a recall to `out`, a file (npz, sheet) or a folder (png, pt) that must not be there yet; all of it, or nothing."""
    if out.exists():
        raise RecollectError(f"{out} already exists: give another name (--out)")
    files = {"npz": _npz, "png": _png, "sheet": _sheet, "pt": _pt}[kind](memory, query)
    try:
        for name, data in files.items():
            write_atomically(out / name, data)
    except RecollectError:
        shutil.rmtree(out, ignore_errors=True)
        raise


def _npz(memory: Memory, query: Query) -> dict[str, bytes]:
    """images (as a network sees them), pixels (uint8), labels, class_names"""
    images, labels = memory.recall(query)
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        images=images.numpy(),
        pixels=pixels(memory, images).numpy(),
        labels=labels.numpy(),
        class_names=np.array(memory.class_names),
    )
    return {"": buffer.getvalue()}


def _pt(memory: Memory, query: Query) -> dict[str, bytes]:
    """images.pt [N,C,H,W] float32 and labels.pt [N] int64, plain tensors: what other distillation toolkits evaluate"""
    images, labels = memory.recall(query)
    return {"images.pt": _saved(images), "labels.pt": _saved(labels)}


def _saved(tensor: Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor.clone(), buffer)
    return buffer.getvalue()


def _png(memory: Memory, query: Query) -> dict[str, bytes]:
    """a folder for each class, as `recollect distill FOLDER` would read it again"""
    images, labels = memory.recall(query)
    shown, files = pixels(memory, images), {}
    for label in labels.unique().tolist():
        name = "".join(c if c.isalnum() or c in "-_ " else "_" for c in memory.class_names[label][:80]).strip()
        for number, image in enumerate(shown[labels == label]):
            files[f"{label:03d}-{name}/{number:04d}.png"] = _encoded(mosaic(image[None], 1))
    return files


def _sheet(memory: Memory, query: Query) -> dict[str, bytes]:
    """all recalled images in one picture, a row a class"""
    images, _ = memory.recall(query)
    return {"": _encoded(mosaic(pixels(memory, images), len(memory.addressing)))}


def _encoded(picture: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()
