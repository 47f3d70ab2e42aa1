"""A recall as files that other programs read: .npz, a folder of PNGs, one contact sheet, or plain .pt tensors."""

import io
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image

from recollect.errors import RecollectError
from recollect.files import write_atomically
from recollect.memory import Memory, Query
from recollect.plots import mosaic, pixels

Format = Literal["npz", "png", "sheet", "pt"]


def export(memory: Memory, query: Query, out: Path, kind: Format) -> list[Path]:
    """Write a recall; returns the files (for PNGs, the class folders)."""
    if out.exists():
        raise RecollectError(f"{out} already exists: give another name (--out)")
    return {"npz": _npz, "png": _png, "sheet": _sheet, "pt": _pt}[kind](memory, query, out)


def _npz(memory: Memory, query: Query, out: Path) -> list[Path]:
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
    write_atomically(out, buffer.getvalue())
    return [out]


def _pt(memory: Memory, query: Query, out: Path) -> list[Path]:
    """images.pt [N,C,H,W] float32 and labels.pt [N] int64, plain tensors: what other distillation toolkits evaluate"""
    images, labels = memory.recall(query)
    for name, tensor in (("images.pt", images), ("labels.pt", labels)):
        buffer = io.BytesIO()
        torch.save(tensor.clone(), buffer)
        write_atomically(out / name, buffer.getvalue())
    return [out / "images.pt", out / "labels.pt"]


def _png(memory: Memory, query: Query, out: Path) -> list[Path]:
    """a folder for each class, as `recollect distill FOLDER` would read it again"""
    images, labels = memory.recall(query)
    shown, folders = pixels(memory, images), []
    for label in dict.fromkeys(labels.tolist()):
        safe = (
            "".join(c if c.isalnum() or c in "-_ ." else "_" for c in memory.class_names[label]).strip(". ") or "class"
        )
        folder = out / f"{label:03d}-{safe}"
        for number, image in enumerate(shown[labels == label]):
            write_atomically(folder / f"{number:04d}.png", _encoded(mosaic(image[None])))
        folders.append(folder)
    return folders


def _sheet(memory: Memory, query: Query, out: Path) -> list[Path]:
    """all recalled images in one picture, a row a class"""
    images, _ = memory.recall(query)
    write_atomically(out, _encoded(mosaic(pixels(memory, images), columns=len(memory.addressing))))
    return [out]


def _encoded(picture: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()
