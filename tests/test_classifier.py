"""Classifiers: probabilities, accuracy and confusion, pictures of every kind, and their file."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from test_composition import RECIPE, make, make_images, picture, whitening, words

import recollect
from recollect import Classifier, Memory, Preprocess, RecollectError, Split, compose
from recollect.classifier import CLASSIFIER


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return compose([make(name="a")["cat", "frog"], make(["bus", "car"], "b")["car"]]).train()


# --- answers ---------------------------------------------------------------------------------------------------------


def test_probabilities(classifier, monkeypatch):
    pixels = make_images().test.images
    found = classifier.probabilities(pixels)
    assert found.shape == (40, 3)
    assert torch.allclose(found.sum(1), torch.ones(40))
    assert torch.allclose(classifier.probabilities(classifier.preprocess(pixels)), found, atol=1e-6)
    monkeypatch.setattr(sys.modules["recollect.classifier"], "MOST_JUDGED", 7)
    assert torch.allclose(classifier.probabilities(pixels), found, atol=1e-6)
    assert classifier.probabilities(pixels[:0]).shape == (0, 3)
    with pytest.raises(RecollectError, match=r"the images are \[40, 1, 8, 7\]: this classifier sees \[N, 1, 8, 8\]"):
        classifier.probabilities(pixels[..., 1:])
    with pytest.raises(RecollectError, match=r"the images are \[1, 8, 8\]"):
        classifier.probabilities(pixels[0])
    with pytest.raises(RecollectError, match=r"the images are torch.int64: give uint8 pixels"):
        classifier.probabilities(pixels.long())


def test_accuracy_and_confusion_count(classifier):
    images = make_images(("frog", "car", "bus", "cat"))
    by_hand = torch.zeros(3, 3, dtype=torch.long)
    for image, label in zip(images.test.images, images.test.labels.tolist(), strict=True):
        name = images.class_names[label]
        if name != "bus":
            by_hand[classifier.class_names.index(name), classifier.probabilities(image[None]).argmax()] += 1
    assert torch.equal(classifier.confusion(images), by_hand)
    assert by_hand.sum() == 30
    assert classifier.accuracy(images) == pytest.approx(100 * int(by_hand.diag().sum()) / 30)
    split = classifier.split(images, on="validation")
    assert len(split) == 15
    assert torch.equal(classifier.confusion(split).sum(1), split.labels.bincount())


def test_a_class_is_tested_on_its_own_dataset():
    """Of two datasets that both have cats, each memory's cats are those of its own; a third is asked where neither is."""
    a, b = make(name="a"), make(["cat", "bus"], "b")
    b = Memory(b.bases, b.addressing, replace(b.header, dataset="city"))
    found = compose([a["cat"], b["cat", "bus"]]).train()
    toy, city = make_images(), make_images(("bus", "cat"), "city", 1)
    split = found.split(toy, city)
    assert torch.equal(split.images[split.labels == 0], toy.test.images[toy.test.labels == 0])
    assert torch.equal(split.images[split.labels == 1], city.test.images[city.test.labels == 1])
    with pytest.raises(RecollectError, match="other has one class 'cat' for both a/cat and city/cat: give the data"):
        found.split(make_images(("cat", "bus"), "other"))
    with pytest.raises(RecollectError, match="unknown class of the test data 'bus': did you mean 'buss'"):
        found.split(toy, make_images(("cat", "buss"), "city"))
    wrong = Split(toy.test.images[..., 1:], toy.test.labels)
    with pytest.raises(RecollectError, match="toy has images of 1x8x7: this classifier sees 1x8x8"):
        found.split(replace(toy, train=wrong, test=wrong), city)


def test_splits_that_cannot_be(classifier):
    pixels = make_images().test.images
    with pytest.raises(RecollectError, match="the labels go from 0 to 3: this classifier has 0 to 2"):
        classifier.accuracy(Split(pixels, torch.arange(40) % 4))
    with pytest.raises(RecollectError, match="no images to test"):
        classifier.accuracy(Split(pixels[:0], torch.arange(0)))


# --- pictures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "notice"),
    [
        *((mode, "") for mode in ("L", "LA", "1")),
        ("I;16", "of 16 bits, made 8"),
        *((m, "in colour, made grey") for m in ("RGB", "RGBA", "CMYK")),
    ],
)
def test_pictures_of_every_mode(classifier, tmp_path, mode, notice):
    given = picture(mode)
    pixels = torch.from_numpy(np.array(picture("1" if mode == "1" else "L").convert("L")))[None, None]
    expected = classifier.probabilities(pixels)[0]
    (answer,) = classifier.classify(given)
    assert answer.notice == notice
    assert torch.allclose(torch.tensor(list(answer.probabilities.values())), expected, atol=0.05)
    assert answer.class_name == classifier.class_names[int(expected.argmax())]
    assert answer.probability == max(answer.probabilities.values())
    if mode != "CMYK":  # no PNG has that
        given.save(tmp_path / "picture.png")
        for same in classifier.classify([str(tmp_path / "picture.png"), tmp_path / "picture.png", given]):
            assert same.probabilities == pytest.approx(answer.probabilities, abs=1e-5)
            assert (same.class_name, same.notice) == (answer.class_name, answer.notice)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_cannot_be_seen_through_is_told(classifier, tmp_path, mode):
    clear = picture("RGBA")
    clear.putpixel((2, 3), (0, 0, 0, 0))
    clear.convert(mode).save(tmp_path / "clear.png")
    (answer,) = classifier.classify(tmp_path / "clear.png")
    assert answer.notice.startswith("transparent in parts, put on ")


def test_a_grey_picture_for_colour_memories(tmp_path):
    found = compose(make(channels=3)).train()
    (grey,), (colour,) = found.classify(picture("L")), found.classify(picture("RGB"))
    assert grey == colour._replace(notice="grey, made RGB")
    picture("P").save(tmp_path / "palette.gif")
    assert found.classify(tmp_path / "palette.gif")[0].notice in ("", "grey, made RGB")


def test_a_picture_is_resized(classifier):
    (answer,) = classifier.classify(picture("RGB", (30, 20)))
    assert answer.notice == "in colour, made grey; 30x20, made 8x8"
    flat = Image.new("L", (50, 70), 128)
    (large,), (small,) = classifier.classify(flat), classifier.classify(flat.resize((8, 8)))
    assert large.probabilities == small.probabilities


def test_pictures_that_cannot_be_read(classifier, tmp_path):
    (tmp_path / "text.png").write_text("not a picture")
    picture("L", (64, 64)).save(tmp_path / "whole.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "whole.png").read_bytes()[:300])
    for name in ("text.png", "half.png"):
        with pytest.raises(RecollectError, match=r"not a picture, or a damaged one.*: give a PNG, JPEG, WebP, GIF or BMP file"):
            classifier.classify(tmp_path / name)
    for name in ("nowhere.png", "."):
        with pytest.raises(RecollectError, match="is not a file: give a PNG or JPEG file"):
            classifier.classify(tmp_path / name)
    with pytest.raises(RecollectError, match="the picture: not a picture of whole numbers"):
        classifier.classify([picture("F")])
    with pytest.raises(RecollectError, match="there is no picture"):
        classifier.classify([])
    two = compose(make(channels=2)).train()
    with pytest.raises(RecollectError, match="has 1 or 3 channels, and this classifier sees 2"):
        two.classify(picture("L"))


# --- files -----------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_what_is_saved_is_what_is_loaded(tmp_path_factory, data):
    names = data.draw(st.lists(st.text(max_size=6), min_size=2, max_size=4, unique=True))
    network = data.draw(st.sampled_from(["mlp:width=4", "convnet:width=2,depth=1", "alexnet:width=1"]))
    preprocess = data.draw(st.sampled_from([Preprocess((0.3,), (0.2,)), whitening()]))
    path = tmp_path_factory.mktemp("saved") / "c.safetensors"
    made = compose(make(names, data.draw(words), preprocess=preprocess)).train(replace(RECIPE, network=network, epochs=1))
    made.save(path)
    found, pixels = Classifier.load(path), make_images().test.images
    for name in ("recipe", "class_names", "image_shape", "sources", "seed"):
        assert getattr(found, name) == getattr(made, name)
    assert torch.equal(found.probabilities(pixels), made.probabilities(pixels))
    found.save(path.with_name("again.safetensors"))
    assert path.with_name("again.safetensors").read_bytes() == path.read_bytes()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_damage_is_one_clear_error(tmp_path_factory, classifier, data):
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    classifier.save(path)
    whole = bytearray(path.read_bytes())
    end = data.draw(st.sampled_from([len(whole), 1400, 8, 0]) | st.integers(0, len(whole)))
    for _ in range(data.draw(st.integers(0 if end < len(whole) else 1, 3))):
        place = data.draw(st.integers(0, len(whole) - 1) | st.integers(0, 1400))  # the header, too
        whole[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole[:end])
    try:
        found, said = Classifier.load(path), ""
    except RecollectError as error:
        found, said = None, str(error)
    if found is None:
        assert str(path) in said
        assert "\n" not in said
    else:  # a letter of a name, say
        assert found.probabilities(make_images().test.images).shape == (40, 3)


def rewritten(classifier: Classifier, path: Path, tensors: dict | None = None, **changes) -> Path:
    """The classifier's file with another header, or other tensors."""
    classifier.save(path)
    data = path.read_bytes()
    header = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"][CLASSIFIER.key])
    save_file(load_file(path) if tensors is None else tensors, path, {CLASSIFIER.key: json.dumps(header | changes)})
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "has classifier format 2, and this recollect reads up to 1: update it .pip install -U recollect"),
        ({"format": "1"}, "its format is '1', not 1"),
        ({"class_names": ["cat", "cat", "dog"]}, "its 'class_names' cannot be"),
        ({"class_names": ["cat", "dog"]}, "its 'sources' cannot be"),
        ({"class_names": "cat"}, "class_names cannot be 'cat'"),
        ({"image_shape": [1, 8]}, "its 'image_shape' cannot be"),
        ({"image_shape": [1, 8, -8]}, "its 'image_shape' cannot be"),
        ({"image_shape": [1, 4, 8]}, "its tensors are not those of mlp:width=8"),
        ({"image_shape": [1, 65536, 65536]}, "would take 128.0 GiB of memory, more than the limit"),
        ({"sources": [["a", "b"]] * 3}, "its 'sources' cannot be"),
        ({"checksum": "0"}, "do not match its checksum"),
        ({"preprocessing": {"mean": [0.5]}}, "preprocessing .* is damaged"),
        ({"preprocessing": {"mean": [0.5] * 3, "std": [1] * 3, "zca": None}}, "its preprocessing is not for its images"),
        ({"preprocessing": {"mean": [0.5], "std": [1], "zca": {"file": "zca.safetensors"}}}, "its 'preprocessing' cannot be"),
        ({"recipe": {}}, "its tensors are not those of convnet"),
        ({"surprise": 1}, "unknown setting in .* 'surprise'"),
    ],
)  # fmt: skip
def test_headers_that_cannot_be(classifier, tmp_path, changes, message):
    with pytest.raises(RecollectError, match=message):
        Classifier.load(rewritten(classifier, tmp_path / "c.safetensors", **changes))


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("mlp:width=9", "its tensors are not those of mlp:width=9"),
        ("mlp:width=999999999999", "width is '999999999999', not a positive whole number"),
        ("mlp:width=65536,depth=9", "would take 128.0 GiB of memory"),  # 600 billion weights, never made
        ("convnet:depth=999999999", "depth is '999999999'"),
        ("mpl", "unknown network 'mpl'"),
        ("custom mine", "unknown network 'custom mine'"),
    ],
)
def test_networks_that_cannot_be(classifier, tmp_path, network, message):
    recipe = recollect.config.to_json(replace(RECIPE, network=network))
    with pytest.raises(RecollectError, match=message):
        Classifier.load(rewritten(classifier, tmp_path / "c.safetensors", recipe=recipe))


def test_files_of_other_kinds(classifier, tmp_path):
    path = tmp_path / "c.safetensors"
    half = {name: p.half() for name, p in classifier.params.items()}
    with pytest.raises(RecollectError, match=r"its tensor '1\.bias' is F16, not F32"):
        Classifier.load(rewritten(classifier, path, half))
    with pytest.raises(RecollectError, match="its tensors are not those of mlp:width=8"):
        Classifier.load(rewritten(classifier, path, {"1.bias": classifier.params["1.bias"]}))
    make().save(path)
    with pytest.raises(RecollectError, match=r"damaged or not a classifier of recollect \(a memory\)"):
        Classifier.load(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(RecollectError, match="without a classifier's header"):
        Classifier.load(path)
    with pytest.raises(RecollectError, match=r"nowhere\.safetensors does not exist"):
        Classifier.load(tmp_path / "nowhere.safetensors")
    classifier.save(path)
    with pytest.raises(RecollectError, match="without recollect's header"):
        Memory.load(path)


def test_a_save_makes_its_folder_and_takes_the_whitening_along(tmp_path):
    made = compose(make(preprocess=whitening())).train()
    made.save(tmp_path / "below" / "c.safetensors")
    assert len(list((tmp_path / "below").iterdir())) == 2
    pixels = make_images().test.images
    assert torch.equal(Classifier.load(tmp_path / "below" / "c.safetensors").probabilities(pixels), made.probabilities(pixels))
    next((tmp_path / "below").glob("zca-*")).unlink()
    with pytest.raises(RecollectError, match=r"the whitening file zca-\w+.safetensors is not beside"):
        Classifier.load(tmp_path / "below" / "c.safetensors")
