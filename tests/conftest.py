"""Toy data: three classes of small images, each class with bright rows of its own; and a memory of them. Experiments as
modules."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported: its kernels then run on the processor

from recollect import Images, Memory, Preprocess, load, minilm, words
from recollect.header import Header
from recollect.show import terminal

terminal.PATIENCE = 3600.0  # on a busy machine, too, tests see what a run says, and not that it takes a while
torch.set_num_threads(1)  # tiny tensors, and several test runs beside each other

CLASSES = ("cat", "dog", "frog")


def spelled(texts: list[str]) -> torch.Tensor:
    """A language model's stand-in, [N, 24]: texts with the same letters are near each other, and nothing else is meant by it."""
    tables = torch.randn(256, 24, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.normalize(torch.stack([tables[list(text.encode())].sum(0) for text in texts]), dim=1)


@pytest.fixture
def stand_in(monkeypatch) -> None:
    """Words without a language model."""
    monkeypatch.setitem(words.MODELS, words.USUAL, spelled)


@pytest.fixture
def language_model(request) -> None:
    """The real one, or where it is not installed its stand-in."""
    if not minilm.is_installed():
        request.getfixturevalue("stand_in")


def experiment_module(name: str) -> ModuleType:
    """The script experiments/NAME.py."""
    path = Path(__file__).parent.parent / "experiments" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"experiment_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def toy_arrays(channels: int = 1, per_class: int = 20, side: int = 8) -> dict[str, np.ndarray]:
    """What an .npz file of toy images holds."""
    labels = np.arange(len(CLASSES) * per_class) % len(CLASSES)
    images = np.random.default_rng(0).integers(0, 100, (len(labels), channels, side, side), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[:, 2 * label : 2 * label + 2] += 150
    return {"images": images, "labels": labels, "class_names": np.array(CLASSES)}


@pytest.fixture(scope="session")
def toy_npz(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "toy.npz"
    np.savez(path, **toy_arrays())
    return path


@pytest.fixture(scope="session")
def toy_images(toy_npz) -> Images:
    return load(toy_npz)


def make_memory(channels: int = 1, class_names: tuple[str, ...] = CLASSES, bases: int = 4, matrices: int = 5) -> Memory:
    """A memory of 8x8 images with 4x4 bases, nothing in it learned."""
    generator = torch.Generator().manual_seed(0)
    header = Header(
        dataset="toy",
        class_names=list(class_names),
        image_shape=[channels, 8, 8],
        downsample=2,
        preprocessing=Preprocess((0.5,) * channels, (0.25,) * channels).to_json(),
        budget={"name": "1 image per class", "images_per_class": 1},
    )
    return Memory(
        torch.randn(bases, channels, 4, 4, generator=generator),
        torch.randn(matrices, len(class_names), bases, generator=generator),
        header,
    )
