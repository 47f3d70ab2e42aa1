"""A classifier from unlabelled pictures: what is recalled, whether it works, and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import experiment_module
from PIL import Image
from test_distillation import CONFIG, toy
from test_queries import ASKED

from recollect import Memory, Preprocess, Recipe, RecollectError, distill, queries
from recollect.classifier import Classifier
from recollect.cli import main
from recollect.composition import ask, folders
from recollect.config import changed
from recollect.files import read_json, write_json

TRAINED = changed(
    ASKED, outer_steps=150, inner_steps=15, inner_lr=0.1, outer_lr=0.05, init="unit", encoder_lr=0.01, network="mlp:width=16"
)
RECIPE = Recipe(network="mlp:width=16", epochs=60, lr=0.1)


@pytest.fixture(scope="module")
def memory() -> Memory:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queries, "ENCODER", "mlp:width=8,depth=1")
        return distill(toy(), TRAINED)


def shots(label: int, count: int = 2) -> torch.Tensor:
    test = toy().test
    return test.images[test.labels == label][:count]


def picture(folder: Path, label: int, number: int) -> Path:
    path = folder / f"{number}.png"
    Image.fromarray(shots(label, 3)[number, 0].numpy()).save(path)
    return path


def test_tells_apart_what_it_is_shown(memory):
    asked = ask(memory, {"this": shots(0), "that": shots(2), "other": shots(1)})
    assert asked.class_names == ("this", "that", "other")
    assert asked.images.shape == (3 * 2 * 3, 1, 4, 4)
    assert asked.labels.tolist() == [0] * 6 + [1] * 6 + [2] * 6
    classifier = asked.train(RECIPE, device="cpu")
    test = toy(200).train
    answers = classifier.probabilities(test.images).argmax(1)
    assert (answers == torch.tensor([0, 2, 1])[test.labels]).float().mean() > 0.7


def test_pictures_by_folder(memory, tmp_path):
    for label, name in enumerate(("b", "a")):
        (tmp_path / name).mkdir()
        for number in range(2):
            picture(tmp_path / name, label, number)
    (tmp_path / ".hidden").mkdir()
    groups = folders([tmp_path])
    assert list(groups) == ["a", "b"]
    assert folders([tmp_path / "b", tmp_path / "a"]) == {"b": groups["b"], "a": groups["a"]}
    found, expected = ask(memory, groups), ask(memory, {"a": shots(1), "b": shots(0)})
    assert torch.equal(found.images, expected.images)
    Image.new("RGB", (8, 8)).save(tmp_path / "a" / "3.png")
    found = ask(memory, folders([tmp_path]))
    assert found.notice == "a: in colour, made grey; 8x8, made 4x4"
    assert found.labels.bincount().tolist() == [9, 9]  # the smaller group's images are repeated


def test_what_is_refused(memory, tmp_path):
    with pytest.raises(RecollectError, match="group 'b' has 1 picture, and toy was made for 2: give 2 or more"):
        ask(memory, {"a": shots(0), "b": shots(1, 1)})
    with pytest.raises(RecollectError, match="needs two groups of pictures or more, not 1"):
        ask(memory, {"a": shots(0)})
    with pytest.raises(RecollectError, match="toy is asked with labels, not with pictures"):
        ask(distill(toy(), CONFIG), {"a": shots(0), "b": shots(1)})
    with pytest.raises(RecollectError, match=r"the pixels are torch.float32 \[2, 1, 4, 4\]: give uint8 \[N, 1, 4, 4\]"):
        ask(memory, {"a": shots(0).float(), "b": shots(1)})
    with pytest.raises(RecollectError, match="nothing is not a folder"):
        folders([tmp_path / "nothing"])
    (tmp_path / "x" / "a").mkdir(parents=True)
    (tmp_path / "a").mkdir()
    with pytest.raises(RecollectError, match="two folders are called 'a'"):
        folders([tmp_path / "a", tmp_path / "x" / "a"])
    (tmp_path / "a" / "broken.png").write_bytes(b"no picture")
    (tmp_path / "a" / "broken-too.png").write_bytes(b"no picture")
    with pytest.raises(RecollectError, match="not a picture, or a damaged one"):
        ask(memory, {"a": list((tmp_path / "a").iterdir()), "b": shots(1)})


def test_command(memory, tmp_path, capsys):
    memory.save(tmp_path / "toy.safetensors")
    for label, name in enumerate(("bright above", "bright below")):
        (tmp_path / "groups" / name).mkdir(parents=True)
        for number in range(2):
            picture(tmp_path / "groups" / name, 2 * label, number)
    wanted = picture(tmp_path, 0, 2)
    ask_it = ["ask", str(tmp_path / "toy.safetensors"), str(tmp_path / "groups"), "--network", "mlp:width=16", "--lr", "0.1"]
    assert main([*ask_it, "--save", str(tmp_path / "new.safetensors"), "--classify", str(wanted), "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "mlp:width=16 trained on 12 recalled images" in printed
    assert f"{wanted}: bright above, " in printed
    assert Classifier.load(tmp_path / "new.safetensors").class_names == ("bright above", "bright below")
    assert main(["classify", str(tmp_path / "new.safetensors"), str(wanted)]) == 0
    assert capsys.readouterr().out == printed[printed.index(f"{wanted}: ") :]
    assert main(["info", str(tmp_path / "toy.safetensors")]) == 0
    assert "190" in capsys.readouterr().out  # the encoder's numbers


def test_whitening_that_is_not_at_hand_comes_from_the_dataset(memory, tmp_path, capsys):
    fitted = Preprocess.fit(toy().train.images, "zca")
    whitened = Memory(memory.bases, memory.addressing, replace(memory.header, preprocessing=fitted.to_json()), memory.encoder)
    whitened.fitted = fitted
    groups = {"a": shots(0), "b": shots(1)}
    expected = ask(whitened, groups)
    whitened.save(tmp_path / "toy.safetensors")
    (sidecar,) = tmp_path.glob("zca-*")
    sidecar.unlink()
    with pytest.raises(RecollectError, match="is not beside the memory"):
        ask(Memory.load(tmp_path / "toy.safetensors"), groups)
    with pytest.raises(RecollectError, match="group 'b' has 1 picture"):  # told before anything is fitted
        ask(Memory.load(tmp_path / "toy.safetensors"), groups | {"b": shots(1, 1)}, toy())
    with pytest.warns(UserWarning, match="fitted again from the training images"):
        found = ask(Memory.load(tmp_path / "toy.safetensors"), groups, toy())
    assert torch.allclose(found.images, expected.images, atol=1e-4)
    arrays = {}
    for key, split in (("train", toy().train), ("val", toy().validation), ("test", toy().test)):
        arrays |= {f"x_{key}": split.images.numpy(), f"y_{key}": split.labels.numpy()}
    np.savez(tmp_path / "toy.npz", **arrays)
    for name, label in (("a", 0), ("b", 1)):
        (tmp_path / "groups" / name).mkdir(parents=True)
        for number in range(2):
            picture(tmp_path / "groups" / name, label, number)
    line = ["ask", str(tmp_path / "toy.safetensors"), str(tmp_path / "groups"), "--network", "mlp:width=16", "--quiet"]
    assert main(line) == 2
    assert "is not beside the memory" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="fitted again from the training images"):
        assert main([*line, "--data", str(tmp_path / "toy.npz")]) == 0
    assert "trained on 12 recalled images" in capsys.readouterr().out


MISTAKES = """
    asked.safetensors                                | no pictures named: recollect ask MEMORY
    asked.safetensors nowhere                        | nowhere is not a folder
    asked.safetensors text.png                       | text.png is not a folder
    asked.safetensors groups/a                       | groups/a is one class: give a folder of pictures for each
    asked.safetensors groups groups                  | two folders are called 'groups'
    asked.safetensors groups/a few                   | group 'few' has 1 picture, and asked was made for 2: give 2 or more
    asked.safetensors groups/a broken                | broken/text.png: not a picture, or a damaged one
    asked.safetensors groups/a nested                | nested/another is not a file
    labels.safetensors groups                        | labels is asked with labels, not with pictures: compose names its classes
    nowhere.safetensors groups                       | nowhere.safetensors does not exist
    asked.safetensors groups --classify text.png     | text.png: not a picture, or a damaged one
    asked.safetensors groups --classify float.tiff   | float.tiff: not a picture
    asked.safetensors groups --network mpl           | unknown network 'mpl': did you mean 'mlp'?
"""


@pytest.fixture
def place(memory, tmp_path, monkeypatch) -> Path:
    """Memories of both kinds, and folders of pictures, good and bad."""
    monkeypatch.chdir(tmp_path)
    memory.save("asked.safetensors")
    distill(toy(), CONFIG).save("labels.safetensors")
    for name in ("groups/a", "groups/b", "few", "broken", "nested/folder", "nested/another"):
        Path(name).mkdir(parents=True)
    for number in range(2):
        picture(Path("groups/a"), 0, number)
        picture(Path("groups/b"), 1, number)
        Path(f"broken/{'text' * (number + 1)}.png").write_text("no picture")
    picture(Path("few"), 0, 0)
    Path("text.png").write_text("no picture")
    Image.new("F", (4, 4)).save("float.tiff")
    return tmp_path


@pytest.mark.parametrize("line", MISTAKES.strip("\n").splitlines(), ids=lambda line: line.split("|")[0].strip())
def test_mistakes_are_one_line(place, line, capsys):
    arguments, _, expected = line.partition("|")
    assert main(["ask", *arguments.split(), "--quiet"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert expected.strip() in said


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("asked.safetensors", "no pictures named: recollect classify CLASSIFIER picture.png"),
        ("asked.safetensors few/0.png", "not a classifier of recollect"),
        ("nowhere.safetensors few/0.png", "nowhere.safetensors does not exist"),
    ],
)
def test_mistakes_in_classifying(place, line, expected, capsys):
    assert main(["classify", *line.split()]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["compose asked.safetensors:cat", "compose asked.safetensors", "recall asked.safetensors --out x"]
)
def test_labels_are_not_for_it(place, command, capsys):
    assert main(command.split()) == 2
    assert capsys.readouterr().err == "error: asked is asked with pictures, not with labels: use ask (recollect ask)\n"


def test_what_was_done_to_many_pictures_is_one_line(memory):
    given = [Image.new("RGB", (side, side)) for side in range(5, 11)]
    notice = ask(memory, {"a": given, "b": shots(1)}).notice
    assert notice == "a: in colour, made grey; 9x9, made 4x4; 8x8, made 4x4; 4 other sizes"


def test_the_experiment(tmp_path, monkeypatch):
    """All six rows; the memories of pictures go on from that of labels, and what is finished is not run again."""
    small = "mlp:width=8,depth=1"
    monkeypatch.setattr(queries, "ENCODER", small)
    experiment = experiment_module("ask")
    settings = [f'network="{small}"', "images_per_class=4", "bases=3", "matrices=4", "downsample=1", "inner_steps=3"]
    settings += ["window=2", "encoder_epochs=2", "real_per_class=5"]
    options = ["digits", "--ways", "2", "--steps", "3", "--picture-steps", "2", "--draws", "2", "--on", "validation"]
    options += ["--out", str(tmp_path / "rows.json"), "--runs", str(tmp_path / "runs"), "--set", *settings]
    experiment.main(options)
    written = read_json(tmp_path / "rows.json")
    rows = written["rows"]
    assert list(rows) == [f"{method}, {shots} shot" for shots in (1, 5) for method in experiment.METHODS]
    labels = Memory.load(tmp_path / "runs" / "labels" / "memory.safetensors")
    for name, row in rows.items():
        assert (row["on"], [len(draw) for draw in row["values"]]) == ("validation", [5, 5])
        if name.startswith("image"):
            assert row["made"]["start"]["config"] == labels.header.made["config"]
            assert row["made"]["config"]["shots"] == int(name.split()[-2])
        if name.startswith("classify"):
            assert row["made"]["config"] == labels.header.made["config"]
    del rows["nearest neighbour, 5 shot"]
    write_json(tmp_path / "rows.json", written)
    with monkeypatch.context() as patch:
        patch.setattr(experiment, "distilled", None)
        experiment.main(options)
    again = read_json(tmp_path / "rows.json")["rows"]
    assert len(again) == 6
    assert all(again[name] == row for name, row in rows.items())
    with pytest.raises(RecollectError, match=r"rows\.json was begun with other settings"):
        experiment.main([*options, "--draws", "3"])
    (tmp_path / "files").mkdir()
    for name in ("labels", "1-shot", "5-shot"):
        Memory.load(tmp_path / "runs" / name / "memory.safetensors").save(tmp_path / "files" / f"{name}.safetensors")
    experiment.main([*options, "--runs", str(tmp_path / "files"), "--out", str(tmp_path / "measured.json")])
    measured = read_json(tmp_path / "measured.json")["rows"]
    assert {name: row["values"] for name, row in measured.items()} == {name: row["values"] for name, row in again.items()}
    assert not any(row["minutes of distilling"] for row in measured.values())
