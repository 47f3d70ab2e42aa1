"""Pictures: TinyImageNet, folders of class folders and Hugging Face datasets, in every mode, and damaged."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_data import (
    assert_any_damage_is_our_error_or_a_valid_dataset,
    assert_holds,
    assert_split,
    random_images,
    refused,
    rows,
    whole,
)

from recollect import data

# --- pictures ------------------------------------------------------------------------------------------------------


def save_picture(path: Path, mode: str = "RGB", size: tuple[int, int] = (8, 6)) -> np.ndarray:
    """A random picture of width x height `size`; returns what its file decodes to, [C, H, W]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    w, h = size
    Image.fromarray(random_images(h, w, 3) if mode == "RGB" else random_images(h, w)).save(path)
    with Image.open(path) as picture:
        return np.asarray(picture.convert(mode)).reshape(h, w, -1).transpose(2, 0, 1)


WNIDS = ["n001", "n002", "n003"]


def write_tiny(folder: Path) -> tuple[tuple, tuple]:
    places = [(f"train/{wnid}/images/{wnid}_{i}.JPEG", label) for label, wnid in enumerate(WNIDS) for i in range(4)]
    train = np.stack([save_picture(folder / place, size=(64, 64)) for place, _ in places])
    (folder / "train/n001/n001_boxes.txt").write_text("n001_0.JPEG\t0\t0\t1\t1\n")
    modes, labels = ["RGB", "RGB", "RGB", "RGB", "L"], [2, 0, 1, 2, 0]  # a few official pictures are grey
    test = [save_picture(folder / f"val/images/val_{i}.JPEG", mode, (64, 64)) for i, mode in enumerate(modes)]
    lines = [f"val_{i}.JPEG\t{WNIDS[label]}\t0\t32\t44\t62\n" for i, label in enumerate(labels)]
    (folder / "val/val_annotations.txt").write_text("".join(lines))
    (folder / "words.txt").write_text("n001\tcrane\nn002\tgoldfish, Carassius auratus\nn003\tcrane, bird\nn9\tx\n")
    colour = np.stack([np.broadcast_to(image, (3, 64, 64)) for image in test])
    return (train, [label for _, label in places]), (colour, labels)


def test_tiny_imagenet(tmp_path):
    folder = tmp_path / "tiny-imagenet-200"
    train, test = write_tiny(folder)
    found = data.load("tinyimagenet", root=tmp_path)
    assert_holds(found, train, test)
    assert found.class_names == ("crane (n001)", "goldfish", "crane (n003)")
    assert data.load("tinyimagenet", root=tmp_path, size=32).shape == (3, 32, 32)
    (folder / "words.txt").unlink()
    assert data.load(folder).class_names == tuple(WNIDS)
    known = (folder / "val/val_annotations.txt").read_text()
    for wrong in ("val_5.JPEG\tn777\t0\t0\t0\t0\n", "../../train/n001/images/n001_0.JPEG\tn001\n"):
        (folder / "val/val_annotations.txt").write_text(known + wrong)
        refused("val_annotations.txt: line 6", "tinyimagenet", root=tmp_path)


def test_tiny_imagenet_with_a_missing_picture(tmp_path):
    write_tiny(tmp_path)
    (tmp_path / "val/images/val_2.JPEG").unlink()
    refused("val_2.JPEG: .*No such file", "tinyimagenet", root=tmp_path)
    long = (tmp_path / "val/val_annotations.txt").read_text().replace("val_2.JPEG", "x" * 300)
    (tmp_path / "val/val_annotations.txt").write_text(long)
    refused("xxx: .*File name too long", "tinyimagenet", root=tmp_path)


def write_folder(folder: Path, classes: str, n: int = 5, mode: str = "RGB") -> tuple[np.ndarray, list[int]]:
    images, labels = [], []
    for label, name in enumerate(classes):
        for i in range(n):
            images.append(save_picture(folder / name / f"{i}.png", mode))
            labels.append(label)
    return np.stack(images), labels


def test_folder_of_class_folders(tmp_path):
    folder = tmp_path / "pets"
    images, labels = write_folder(folder, "ab")
    (folder / ".DS_Store").write_bytes(b"hidden")
    (folder / "a/.hidden.txt").write_bytes(b"hidden")
    found = data.load(str(folder))
    assert found.name == "pets"
    assert found.class_names == ("a", "b")
    assert rows(whole(found).images, whole(found).labels) == rows(images, labels)
    assert (len(found.test), len(found.validation)) == (2, 2)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_folder_with_its_own_splits(mode, tmp_path):
    train = write_folder(tmp_path / "train", "abc", 4, mode)
    held = write_folder(tmp_path / "val", "abc", 2, mode)
    (tmp_path / "README.md").write_text("not a class")
    assert_holds(data.load(tmp_path), train, held)  # a lone val is what people test on
    test = write_folder(tmp_path / "test", "bc", 1, mode)
    found = data.load(tmp_path)
    assert_split(found.train, *train)
    assert_split(found.validation, *held)
    assert_split(found.test, test[0], [1, 2])  # counted among the training classes


def test_train_may_be_a_class(tmp_path):
    write_folder(tmp_path / "vehicles", ["bus", "car", "train"])
    assert data.load(tmp_path / "vehicles").class_names == ("bus", "car", "train")


def test_folder_resized(tmp_path):
    write_folder(tmp_path, "ab")
    save_picture(tmp_path / "a/large.png", size=(31, 17))
    message = refused("--size", tmp_path)
    assert "a/0.png is 8x6 but" in message
    assert "a/large.png is 31x17" in message
    found = data.load(tmp_path, size=5)
    assert found.shape == (3, 5, 5)
    with Image.open(tmp_path / "a/large.png") as picture:
        expected = np.asarray(picture.resize((5, 5), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert any(np.array_equal(image, expected) for image in whole(found).images)


def test_modes_of_pictures(tmp_path):
    folder = tmp_path / "grey"
    write_folder(folder, "ab", 3, "L")
    Image.fromarray(np.full((6, 8), 0x1234, np.uint16)).save(folder / "a/deep.png")
    Image.fromarray(np.eye(6, 8, dtype=bool)).save(folder / "a/bits.png")
    Image.fromarray(random_images(6, 8)).convert("LA").save(folder / "b/alpha.png")
    found = data.load(folder)
    assert found.shape == (1, 6, 8)
    images = whole(found).images.numpy()
    assert any((image == 0x12).all() for image in images)
    assert any((image == np.eye(6, 8) * 255).all() for image in images)
    colour = tmp_path / "colour"
    write_folder(colour, "ab", 3)
    for name, mode in (
        ("a.png", "RGBA"),
        ("b.png", "P"),
        ("c.jpeg", "CMYK"),
        ("d.webp", "RGBA"),
        ("e.gif", "P"),
        ("f.bmp", "RGB"),
    ):
        Image.fromarray(random_images(6, 8, 3)).convert(mode).save(colour / "a" / name)
    Image.fromarray(random_images(6, 8, 3)).convert("P").save(colour / "a/see-through.png", transparency=b"\0\1")
    assert data.load(colour).shape == (3, 6, 8)
    save_picture(colour / "b/9.png", "L")
    assert "colour/a/0.png is in colour" in refused("b/9.png is grey but", colour)
    Image.fromarray(np.zeros((6, 8), np.float32)).save(folder / "a/float.tiff")
    refused("float.tiff: not a picture, or a damaged one: give a PNG, JPEG, WebP, GIF or BMP file", folder)


def test_bad_folders(tmp_path):
    (tmp_path / "empty").mkdir()
    refused("empty: no class folders in it", tmp_path / "empty")
    folder = tmp_path / "pets"
    write_folder(folder, "ab")
    (folder / "c").mkdir()
    refused("class 'c' has no training images", folder)
    (folder / "c").rmdir()
    (folder / "a/notes.txt").write_text("not a picture")
    refused("a/notes.txt: not a picture, or a damaged one", folder)
    (folder / "a/notes.txt").unlink()
    whole = (folder / "a/0.png").read_bytes()
    (folder / "a/0.png").write_bytes(whole[:-60])
    refused("a/0.png: not a picture, or a damaged one", folder)
    (folder / "a/0.png").unlink()
    (folder / "a/0.png").mkdir()
    refused(r"a/0.png: a folder inside a class folder: give --pattern .\{label\}/\*\*/\*., or move", folder)
    (folder / "a/0.png").rmdir()
    (folder / "list.csv").write_text("x")
    refused("list.csv: a file beside the class folders", folder)
    write_folder(tmp_path / "sets/train", "ab")
    write_folder(tmp_path / "sets/test", "ac")
    refused("class 'c' is not among the training classes", tmp_path / "sets")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_fuzz_pictures(kind, tmp_path):
    write_folder(tmp_path, "ab")
    save_picture(path := tmp_path / f"a/x.{kind}")
    assert_any_damage_is_our_error_or_a_valid_dataset(path, tmp_path)


# --- Hugging Face --------------------------------------------------------------------------------------------------


@pytest.fixture
def hf(tmp_path, monkeypatch):
    """The datasets package, offline and with its cache in the test's folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, tmp_path / "cache" / name.lower())
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    return datasets


def hf_rows(datasets, n: int, label, mode: str = "RGB"):
    shape = (6, 8, 3) if mode == "RGB" else (6, 8)
    images = [random_images(1, *shape)[0] for _ in range(n)]
    columns = {"picture": [Image.fromarray(image) for image in images], "label": [i % 2 for i in range(n)]}
    features = datasets.Features({"picture": datasets.Image(), "label": label})
    pixels = np.stack(images).reshape(n, 6, 8, -1).transpose(0, 3, 1, 2)
    return datasets.Dataset.from_dict(columns, features=features), (pixels, columns["label"])


def test_hugging_face_parquet(hf, tmp_path):
    folder = tmp_path / "owner/name"
    (folder / "data").mkdir(parents=True)
    kept = {}
    for part, n in (("train", 12), ("validation", 4), ("test", 6)):
        rows_, kept[part] = hf_rows(hf, n, hf.ClassLabel(names=["cat", "dog"]))
        rows_.to_parquet(folder / f"data/{part}-00000-of-00001.parquet")
    found = data.load(f"hf:{folder}")
    assert found.name == f"hf:{folder}"
    assert found.class_names == ("cat", "dog")
    for part, (images, labels) in kept.items():
        assert_split(getattr(found, part), images, labels)
    assert data.load(f"hf:{folder}", size=4).shape == (3, 4, 4)


def test_hugging_face_saved_to_disk_with_plain_numbers(hf, tmp_path):
    rows_, train = hf_rows(hf, 12, hf.Value("int64"), "L")
    held, test = hf_rows(hf, 4, hf.Value("int64"), "L")
    hf.DatasetDict(train=rows_, valid=held).save_to_disk(tmp_path / "saved")
    found = data.load(f"hf:{tmp_path}/saved")
    assert_holds(found, train, test)  # a lone validation split is the test set
    assert found.class_names == ("0", "1")


def test_hugging_face_folder_of_pictures(hf, tmp_path):
    images, labels = write_folder(tmp_path / "pets/train", ["cat", "dog"])
    found = data.load(f"hf:{tmp_path}/pets")
    assert found.class_names == ("cat", "dog")
    assert rows(whole(found).images, whole(found).labels) == rows(images, labels)


def test_bad_hugging_face(hf, tmp_path, monkeypatch):
    refused("hf:nobody/nothing: cannot be loaded", "hf:nobody/nothing")
    texts = hf.Dataset.from_dict({"text": ["a"], "label": [0]})
    hf.DatasetDict(train=texts).save_to_disk(tmp_path / "texts")
    refused("needs a column of images and one of class labels, but has text, label", f"hf:{tmp_path}/texts")
    hf.DatasetDict(test=texts).save_to_disk(tmp_path / "tests")
    refused(r"no split named train \(it has test\)", f"hf:{tmp_path}/tests")
    rows_, _ = hf_rows(hf, 6, hf.ClassLabel(names=["cat", "dog"]))
    features = rows_.features
    holes = hf.Dataset.from_dict({"picture": rows_["picture"], "label": [0, 1, None, 1, 0, 1]}, features=features)
    holes.save_to_disk(tmp_path / "holes")
    refused(r"train\[2\]: has no 'label'", f"hf:{tmp_path}/holes")
    broken = hf.Dataset.from_dict({"picture": [{"bytes": b"nonsense", "path": None}] * 6, "label": [0, 1] * 3}, features=features)
    broken.save_to_disk(tmp_path / "broken")
    refused(r"train\[0\]: not a picture, or a damaged one", f"hf:{tmp_path}/broken")
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%EOF\n"
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", None)
    for number, raw in enumerate((eps, eps[:2] + b"x")):
        foreign = hf.Dataset.from_dict({"picture": [{"bytes": raw, "path": None}] * 6, "label": [0, 1] * 3}, features=features)
        foreign.save_to_disk(tmp_path / f"foreign-{number}")
        refused(r"train\[0\]: not a picture, or a damaged one: give a PNG", f"hf:{tmp_path}/foreign-{number}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(r"pip install 'recollect\[hf\]'", "hf:owner/name")
