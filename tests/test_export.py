"""A recall as files: each format read again by somebody else's reader, equal to Memory.recall."""

import errno
import os

import numpy as np
import pytest
import torch
from conftest import CLASSES, make_memory
from PIL import Image

from recollect import RecollectError, load
from recollect.export import export
from recollect.show.pictures import to_pixels

FORMATS = ["npz", "png", "sheet", "pt", "parquet"]


@pytest.mark.parametrize("query", [None, ["frog", "cat"]], ids=["all", "two"])
@pytest.mark.parametrize("channels", [1, 3])
class TestFormats:
    def test_npz(self, tmp_path, channels, query):
        memory = make_memory(channels)
        export(memory, query, tmp_path / "x.npz", "npz")
        images, labels = memory.recall(query)
        with np.load(tmp_path / "x.npz") as archive:  # allow_pickle is off
            assert archive["images"].dtype == np.float32
            assert np.array_equal(archive["images"], images)
            assert np.array_equal(archive["labels"], labels)
            assert np.array_equal(archive["pixels"], to_pixels(memory.preprocess().undo(images)))
            assert tuple(archive["class_names"]) == CLASSES

    def test_pt(self, tmp_path, channels, query):
        memory = make_memory(channels)
        export(memory, query, tmp_path / "x", "pt")
        images, labels = memory.recall(query)
        found = [torch.load(tmp_path / "x" / name, weights_only=True) for name in ("images.pt", "labels.pt")]
        assert torch.equal(found[0], images)
        assert torch.equal(found[1], labels)
        assert (found[0].dtype, found[1].dtype) == (torch.float32, torch.int64)

    def test_png_folder_is_a_dataset(self, tmp_path, channels, query):
        memory = make_memory(channels)
        export(memory, query, tmp_path / "x", "png")
        images, labels = memory.recall(query)
        found = load(tmp_path / "x")
        chosen = sorted(set(labels.tolist()))
        assert found.class_names == tuple(f"{label:03d}-{CLASSES[label]}" for label in chosen)
        everything = found.train + found.validation + found.test
        key = lambda image, label: (int(label), image.numpy().tobytes())  # noqa: E731
        expected = [
            key(image, chosen.index(int(label)))
            for image, label in zip(to_pixels(memory.preprocess().undo(images)), labels, strict=True)
        ]
        assert sorted(map(key, everything.images, everything.labels)) == sorted(expected)

    def test_sheet_has_a_row_a_class(self, tmp_path, channels, query):
        memory = make_memory(channels)  # five images a class, 8x8
        export(memory, query, tmp_path / "x.png", "sheet")
        images, labels = memory.recall(query)
        classes = len(labels.unique())
        with Image.open(tmp_path / "x.png") as picture:
            assert picture.size == (5 * 9 - 1, classes * 9 - 1)
            assert picture.mode == ("L" if channels == 1 else "RGB")
            last = np.asarray(picture)[-8:, -8:].reshape(8, 8, channels)
        assert np.array_equal(last.transpose(2, 0, 1), to_pixels(memory.preprocess().undo(images))[-1])


def test_png_folders_of_odd_class_names(tmp_path):
    names = ("../../up", "a/b", "...", "über 1", "x" * 300)
    export(make_memory(class_names=names), None, tmp_path / "x", "png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x"]
    folders = sorted(path.name for path in (tmp_path / "x").iterdir())
    assert folders == ["000-______up", "001-a_b", "002-___", "003-über 1", "004-" + "x" * 80]


@pytest.mark.parametrize("kind", FORMATS)
def test_nothing_is_written_over(tmp_path, kind):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(RecollectError, match=r"x already exists: give another name \(--out\)"):
        export(make_memory(), None, tmp_path / "x", kind)
    assert (tmp_path / "x").read_text() == "mine"


@pytest.mark.parametrize(("kind", "after"), [("npz", 0), ("sheet", 0), ("pt", 0), ("pt", 1), ("png", 0), ("png", 7)])
def test_no_space_leaves_nothing_behind(tmp_path, monkeypatch, kind, after):
    calls = iter(range(100))

    def full(_):
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecollectError, match="no space left to write"):
        export(make_memory(), None, tmp_path / "x", kind)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", FORMATS)
def test_unknown_class_writes_nothing(tmp_path, kind):
    with pytest.raises(RecollectError, match="unknown class 'forg': did you mean 'frog'"):
        export(make_memory(), ["forg"], tmp_path / "x", kind)
    assert list(tmp_path.iterdir()) == []
