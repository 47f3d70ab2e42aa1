"""DD-Ranking: the folder is what its package loads, and the scores are its formulas of fractions."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import make_memory
from hypothesis import given as over
from hypothesis import strategies as st
from test_targets import SMALL, rotating

from recollect import Evaluation, Memory, Recipe, RecollectError, distill
from recollect.budget import Budget
from recollect.cli import main
from recollect.ddranking import AUGMENT, KNOWN, augmentation_robust, label_robust, ranked
from recollect.export import export

USED = {  # keys that the package reads, 0.2.0: LabelRobustScoreHard and Config
    *(
        "dataset",
        "real_data_path",
        "ipc",
        "model_name",
        "data_aug_func",
        "aug_params",
        "optimizer",
        "lr_scheduler",
        "weight_decay",
    ),
    *("momentum", "step_size", "num_eval", "im_size", "num_epochs", "real_batch_size", "syn_batch_size", "save_path", "use_zca"),
    *("use_torchvision", "custom_train_trans", "custom_val_trans", "num_workers", "device", "dist", "random_data_format"),
    *("random_data_path", "eval_full_data"),
}


def of_cifar10(**fields) -> Memory:
    """A memory that says it is of CIFAR-10."""
    budget = Budget(2, 10, (3, 32, 32))
    plain = make_memory(3, tuple("0123456789"))
    known = {"dataset": "cifar10", "image_shape": [3, 8, 8], "budget": {"name": budget.name, "images_per_class": 2}}
    recipe = {"network": "convnet:depth=2", "epochs": 7, "batch": 64, "lr": 0.02, "momentum": 0.8, "augment": "none"}
    return Memory(plain.bases, plain.addressing, replace(plain.header, **known | {"recipe": recipe} | fields))


def test_the_folder(tmp_path):
    memory = of_cifar10()
    export(memory, None, tmp_path / "x", "ddranking")
    found = {name: torch.load(tmp_path / "x" / f"{name}.pt", weights_only=True) for name in ("images", "labels", "lr")}
    images, labels = memory.recall()
    assert torch.equal(found["labels"], labels)
    assert found["lr"].item() == pytest.approx(0.02)
    known = KNOWN["cifar10"]
    pixels = found["images"] * torch.tensor(known.std)[:, None, None] + torch.tensor(known.mean)[:, None, None]
    assert torch.allclose(pixels, memory.preprocess().undo(images), atol=1e-6)
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert set(config) == USED
    assert (config["dataset"], config["ipc"], config["num_epochs"], config["syn_batch_size"]) == ("CIFAR10", 2, 7, 64)
    assert (config["model_name"], config["momentum"], config["data_aug_func"]) == ("ConvNet-2", 0.8, None)
    assert len(labels) == 10 * 5  # recalled images are not what the budget counts


def test_the_recipe_s_augmentation_is_the_package_s(tmp_path):
    recipe = of_cifar10().header.recipe | {"augment": "flip+crop"}
    export(of_cifar10(recipe=recipe), None, tmp_path / "x", "ddranking")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert (config["data_aug_func"], set(config["aug_params"])) == ("dsa", set(AUGMENT.split("+")))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dataset": "mnist"}, "DD-Ranking has no dataset mnist: give a memory of cifar10, cifar100, tinyimagenet"),
        ({"dataset": "cifar100"}, "has 10 classes: DD-Ranking wants all 100"),
        ({"budget": {}}, "has a budget of None images per class"),
    ],
)
def test_what_it_cannot_judge(tmp_path, fields, words):
    with pytest.raises(RecollectError, match=words):
        export(of_cifar10(**fields), None, tmp_path / "x", "ddranking")
    with pytest.raises(RecollectError, match="images of all classes"):
        export(of_cifar10(), ["0"], tmp_path / "x", "ddranking")
    assert list(tmp_path.iterdir()) == []


def of(*values: float) -> Evaluation:
    return Evaluation("x", "mlp", values, "test", "", 0.0)


PERCENT = st.floats(0, 100)


@over(PERCENT, PERCENT, PERCENT, PERCENT, st.floats(0, 1))
def test_scores_are_fractions(a, b, c, d, weight):
    """Between 0 and 1, and the formulas of the paper."""
    scaled = lambda s: (np.exp(s) - np.exp(-1)) / (np.exp(1) - np.exp(-1))  # noqa: E731
    (found,) = label_robust(of(a), of(b), of(c), weight)
    assert found == pytest.approx(scaled(weight * (a - b) / 100 - (1 - weight) * (c - a) / 100))
    assert -1e-9 <= found <= 1 + 1e-9
    (found,) = augmentation_robust((of(a), of(b)), (of(c), of(d)), weight)
    assert found == pytest.approx(scaled(weight * (a - b) / 100 + (1 - weight) * (c - d) / 100))
    assert -1e-9 <= found <= 1 + 1e-9


def test_equal_accuracies_score_alike():
    """A memory that is no better than chance, and no worse than everything."""
    nothing = (1 - math.exp(-1)) / (math.e - math.exp(-1))
    assert label_robust(of(50, 60), of(50, 60), of(50, 60)) == pytest.approx((nothing, nothing))


def test_both_scores_of_a_memory(toy_images):
    memory, recipe = make_memory(), Recipe(network="mlp:width=8", epochs=3, augment="none")
    found = ranked(memory, toy_images, 5, recipe=recipe, networks=2)
    plain, augmented, random, _, everything = found.rows
    assert found.label_robust == label_robust(plain, random, everything)
    assert AUGMENT in augmented.protocol
    assert "5 epochs" in everything.protocol
    other = ranked(memory, toy_images, 5, recipe=replace(recipe, augment="flip"), networks=2)
    assert other.label_robust == label_robust(other.rows[1], other.rows[3], other.rows[4])
    assert other.rows[0].values == plain.values


def test_continuous_targets_are_not_ranked():
    with pytest.raises(RecollectError, match="is of continuous targets: DD-Ranking judges classifiers"):
        ranked(distill(rotating(), SMALL), rotating(), 1)


def test_the_command(toy_npz, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_memory().save(tmp_path / "toy.safetensors")
    command = f"evaluate toy.safetensors --data {toy_npz} --networks 2 --epochs 2 --ddranking"
    assert main(command.split()) == 2
    assert "for how many epochs (--full)" in capsys.readouterr().err
    assert main([*command.split(), "--full", "2", "--architectures", "mlp:width=4", "mlp:width=8"]) == 2
    assert "scores are of one network" in capsys.readouterr().err
    assert main([*command.split(), "--full", "2", "--json", "found.json"]) == 0
    written, said = json.loads((tmp_path / "found.json").read_text()), capsys.readouterr().out
    assert len(written["rows"]) == 5
    for name in ("label-robust score", "augmentation-robust score"):
        assert f"{written[name]['mean']:.3f} ± {written[name]['deviation']:.3f}" in said
