"""A recall as files that other programs read: .npz, a folder of PNGs, one contact sheet, plain .pt tensors, .csv of vectors,
DD-Ranking's folder, or .parquet."""

import csv
import io
import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from recollect.data.preprocess import Preprocess
from recollect.ddranking import given
from recollect.errors import RecollectError
from recollect.files import write_through
from recollect.memory import Memory, Query
from recollect.queries import Targets
from recollect.show.pictures import png, to_pixels

Format = Literal["npz", "png", "sheet", "pt", "csv", "ddranking", "parquet"]


def export(memory: Memory, query: Query, out: Path, kind: Format) -> None:
    """Write a recall to `out`, a file (npz, sheet, parquet) or a folder (png, pt, ddranking) that must not be there
    yet; all of it, or nothing."""
    if out.exists():
        raise RecollectError(f"{out} already exists: give another name (--out)")
    if kind == "ddranking" and query is not None:
        raise RecollectError("DD-Ranking wants the images of all classes: leave out --classes")
    _check(memory, kind)
    files = FORMATS[kind](memory, *memory.recall(query))
    try:
        for name, data in files.items():
            write_through(out / name, data)
    except RecollectError:
        shutil.rmtree(out, ignore_errors=True)
        raise


def _check(memory: Memory, kind: Format) -> None:
    """Refuse formats of images, or of images of classes, where there are none."""
    is_vectors, continuous = bool(memory.header.preprocessing.get("columns")), isinstance(memory.asked, Targets)
    if kind in ("png", "sheet", "ddranking", "parquet") and is_vectors:
        raise RecollectError(f"{memory.name} recalls vectors, and {kind} is for images: give --format npz, pt or csv")
    if kind in ("png", "ddranking", "parquet") and continuous:
        raise RecollectError(f"{memory.name} has no classes, and {kind} is for images of classes: give --format npz, pt or sheet")
    if kind == "csv" and not is_vectors:
        raise RecollectError(f"{memory.name} recalls images, and a .csv is for vectors: give --format npz, png, sheet or pt")


def npz(images: Tensor, labels: Tensor, class_names: Sequence[str], preprocess: Preprocess) -> bytes:
    """images (as a network sees them), pixels (uint8), labels, class_names"""
    arrays = {"images": images.numpy(), "pixels": to_pixels(preprocess.undo(images)).numpy(), "labels": labels.numpy()}
    return _bytes(np.savez_compressed, **arrays, class_names=np.array(class_names))


def _npz(memory: Memory, images: Tensor, labels: Tensor) -> dict[str, bytes]:
    """of vectors or continuous targets X and y in their own units, beside the images as a network sees them"""
    if memory.preprocess().columns or isinstance(memory.asked, Targets):
        x, y = memory.preprocess().undo(images), _own(memory, labels)
        arrays = {"images": images.numpy(), "X": x.flatten(1).numpy() if x.shape[2:] == (1, 1) else x.numpy(), "y": y.numpy()}
        return {"": _bytes(np.savez_compressed, **arrays, class_names=np.array(memory.class_names))}
    return {"": npz(images, labels, memory.class_names, memory.preprocess())}


def _pt(_: Memory, images: Tensor, labels: Tensor) -> dict[str, bytes]:
    """images.pt [N,C,H,W] float32 and labels.pt [N] int64, plain tensors: what other distillation toolkits evaluate"""
    return {"images.pt": _bytes(partial(torch.save, images.clone())), "labels.pt": _bytes(partial(torch.save, labels.clone()))}


def _own(memory: Memory, labels: Tensor) -> Tensor:
    """Labels; or targets in their own units."""
    return memory.asked.undo(labels) if isinstance(memory.asked, Targets) else labels


def _csv(memory: Memory, images: Tensor, labels: Tensor) -> dict[str, bytes]:
    """vectors in their own units, a row each, and behind them their targets or the name of their class"""
    columns, continuous = memory.preprocess().columns, isinstance(memory.asked, Targets)
    truth = _own(memory, labels).tolist() if continuous else [[memory.class_names[label]] for label in labels.tolist()]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns, *(memory.class_names if continuous else ("class",))])
    for row, own in zip(memory.preprocess().undo(images).flatten(1).tolist(), truth, strict=True):
        writer.writerow([*(f"{value:.7g}" for value in row), *(f"{each:.7g}" if continuous else each for each in own)])
    return {"": text.getvalue().encode()}


def _ddranking(memory: Memory, *_: Tensor) -> dict[str, bytes]:
    """images.pt, labels.pt and lr.pt as its package's quick start loads them, and config.json for its Config.from_file"""
    found = given(memory)
    tensors = {"images.pt": found.images, "labels.pt": found.labels, "lr.pt": found.lr}
    files = {name: _bytes(partial(torch.save, tensor.clone())) for name, tensor in tensors.items()}
    return files | {"config.json": (json.dumps(found.config, indent=2) + "\n").encode()}


def parquet(memory: Memory, images: Tensor, labels: Tensor) -> bytes:
    """Columns image (PNG) and label, as Hugging Face datasets has them: its viewer shows them, and load_dataset reads them."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise RecollectError("a .parquet file needs pyarrow: pip install 'recollect[hf]'") from None
    _check(memory, "parquet")
    pixels = to_pixels(memory.preprocess().undo(images))
    rows = [{"bytes": png(image[None]), "path": f"{number:06d}.png"} for number, image in enumerate(pixels)]
    kinds = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": list(memory.class_names)}}
    picture = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    schema = pyarrow.schema(
        {"image": picture, "label": pyarrow.int64()}, {"huggingface": json.dumps({"info": {"features": kinds}})}
    )
    return _bytes(lambda file: pyarrow.parquet.write_table(pyarrow.table([rows, labels.tolist()], schema), file))


def _png(memory: Memory, images: Tensor, labels: Tensor) -> dict[str, bytes]:
    """a folder for each class, as `recollect distill FOLDER` would read it again"""
    shown, files = to_pixels(memory.preprocess().undo(images)), {}
    for label in labels.unique().tolist():
        name = "".join(c if c.isalnum() or c in "-_ " else "_" for c in memory.class_names[label][:80]).strip()
        for number, image in enumerate(shown[labels == label]):
            files[f"{label:03d}-{name}/{number:04d}.png"] = png(image[None])
    return files


def _sheet(memory: Memory, images: Tensor, _: Tensor) -> dict[str, bytes]:
    """all recalled images in one picture, a row a class"""
    return {"": png(to_pixels(memory.preprocess().undo(images)), len(memory.addressing))}


FORMATS: dict[Format, Callable[[Memory, Tensor, Tensor], dict[str, bytes]]] = {
    "npz": _npz,
    "png": _png,
    "sheet": _sheet,
    "pt": _pt,
    "csv": _csv,
    "ddranking": _ddranking,
    "parquet": lambda *recalled: {"": parquet(*recalled)},
}


def _bytes(save: Callable[..., None], **options: Any) -> bytes:
    buffer = io.BytesIO()
    save(buffer, **options)
    return buffer.getvalue()
