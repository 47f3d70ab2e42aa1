"""DD-Ranking (Li et al., arXiv 2505.13300): a recall in the form that its package reads, and its two scores.

A score is (e^s - e^-1) / (e - e^-1) of a weighted sum s of differences of accuracies. Those are fractions here, so that it lies
between 0 and 1; version 0.2.0 of the package (ddranking) takes percentages.
"""

import math
import re
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from recollect.config import Recipe
from recollect.data.images import Images
from recollect.errors import RecollectError
from recollect.evaluation import Evaluation, Options, evaluate, full_data, memory_recipe, random_real
from recollect.memory import Memory
from recollect.queries import Targets

AUGMENT = "flip+rotate+scale+crop+cutout+brightness+contrast+saturation"
"""the augmentation of the augmentation-robust score where a recipe has none: DSA's transforms"""
DSA = dict(flip=0.5, rotate=15.0, scale=1.2, crop=0.125, cutout=0.5, brightness=1.0, contrast=0.5, saturation=2.0)
"""the same by the package's names"""


class Known(NamedTuple):
    """A dataset of the package's, whose classes have the same order here."""

    name: str
    classes: int
    mean: tuple[float, ...]
    """by which it normalises"""
    std: tuple[float, ...]


_CIFAR = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
KNOWN = {
    "cifar10": Known("CIFAR10", 10, *_CIFAR),
    "cifar100": Known("CIFAR100", 100, *_CIFAR),
    "tinyimagenet": Known("TinyImageNet", 200, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclass(frozen=True)
class Given:
    """What the package is given."""

    images: Tensor
    """[N, 3, 32, 32], normalised as it normalises real images"""
    labels: Tensor
    """[N]"""
    lr: Tensor
    """a scalar: the learning rate to train with"""
    config: dict[str, Any]
    """settings by its names; `ipc` is the budget: as many real images of each class are compared with"""


def given(memory: Memory) -> Given:
    """All that a memory recalls, for the package."""
    known = KNOWN.get(memory.header.dataset)
    if known is None:
        raise RecollectError(f"DD-Ranking has no dataset {memory.header.dataset}: give a memory of {', '.join(KNOWN)}")
    if len(memory.class_names) != known.classes:
        raise RecollectError(f"{memory.name} has {len(memory.class_names)} classes: DD-Ranking wants all {known.classes}")
    images, labels = memory.recall()
    centre, scale = (torch.tensor(values)[:, None, None] for values in (known.mean, known.std))
    recipe = memory_recipe(memory)
    config = _config(known.name, _per_class(memory), memory.image_shape, recipe)
    return Given((memory.preprocess().undo(images) - centre) / scale, labels, torch.tensor(recipe.lr), config)


def _per_class(memory: Memory) -> int:
    """N of the budget: as many random real images of each class a memory is compared with."""
    found = memory.header.budget.get("images_per_class")
    if type(found) is not int or found < 1:
        raise RecollectError(f"{memory.name} has a budget of {found!r} images per class: DD-Ranking wants 1 or more")
    return found


def _config(name: str, per_class: int, shape: tuple[int, int, int], recipe: Recipe) -> dict[str, Any]:
    depth = re.search(r"^convnet\b.*\bdepth=(\d+)", recipe.network)
    return {
        "dataset": name,
        "ipc": per_class,
        "im_size": list(shape[1:]),
        "real_data_path": "./datasets",
        "model_name": f"ConvNet-{depth[1] if depth else 4 if min(shape[1:]) >= 64 else 3}",
        "use_torchvision": False,
        "use_zca": False,
        "custom_train_trans": None,
        "custom_val_trans": None,
        "data_aug_func": None if recipe.augment == "none" else "dsa",
        "aug_params": None if recipe.augment == "none" else DSA,
        "optimizer": "sgd",
        "momentum": recipe.momentum,
        "weight_decay": 0.0,
        "lr_scheduler": "step",
        "step_size": recipe.epochs,
        "num_epochs": recipe.epochs,
        "num_eval": 5,
        "syn_batch_size": recipe.batch,
        "real_batch_size": 256,
        "eval_full_data": True,
        "random_data_format": "tensor",
        "random_data_path": "./random_data",
        "num_workers": 4,
        "device": "cuda",
        "dist": False,
        "save_path": "./results/scores.csv",
    }


@dataclass(frozen=True)
class Ranked:
    """Two scores of each network, and the accuracies that they are made of."""

    rows: tuple[Evaluation, ...]
    label_robust: tuple[float, ...]
    augmentation_robust: tuple[float, ...]

    def scores(self) -> list[tuple[str, float, float]]:
        """(name, mean, standard deviation over the networks)"""
        both = {"label-robust score": self.label_robust, "augmentation-robust score": self.augmentation_robust}
        return [(name, mean(each), stdev(each) if len(each) > 1 else 0.0) for name, each in both.items()]

    def to_json(self) -> dict[str, Any]:
        scores = {name: {"mean": mean, "deviation": deviation} for name, mean, deviation in self.scores()}
        return scores | {"rows": [row.to_json() for row in self.rows]}


def ranked(
    memory: Memory, images: Images, epochs: int, *, recipe: Recipe | None = None, weight: float = 0.5, **options: Unpack[Options]
) -> Ranked:
    """Both scores of a memory. The package searches a learning rate for random real images, and takes the best epoch on the test
    set; here all are trained by one recipe, and judged once, at the end.

    Arguments:
        memory: what to judge.
        images: its own dataset.
        epochs: of the networks that are trained on all the data.
        recipe: how to train; None is the memory's. Without augmentation, AUGMENT is what it is compared with.
        weight: of the gain over random real images, and of augmented networks; the package's w and gamma.
        options: those of `evaluate`.
    """
    if isinstance(memory.asked, Targets):
        raise RecollectError(f"{memory.name} is of continuous targets: DD-Ranking judges classifiers")
    recipe, per_class = recipe or memory_recipe(memory), _per_class(memory)
    plain, augmented = (
        replace(recipe, augment=augment) for augment in ("none", AUGMENT if recipe.augment == "none" else recipe.augment)
    )
    preprocess = memory.preprocess(images)
    ours = {each: evaluate(memory, images, recipe=each, **options) for each in (plain, augmented)}
    random = {each: random_real(images, per_class, preprocess, each, **options) for each in (plain, augmented)}
    everything = full_data(images, preprocess, replace(recipe, epochs=epochs), **options)
    return Ranked(
        (*ours.values(), *random.values(), everything),
        label_robust(ours[recipe], random[recipe], everything, weight),
        augmentation_robust((ours[augmented], random[augmented]), (ours[plain], random[plain]), weight),
    )


def label_robust(ours: Evaluation, random: Evaluation, everything: Evaluation, weight: float = 0.5) -> tuple[float, ...]:
    """The label-robust score of each network: how much a memory gains over random real images, and how little is missing to all
    the data. Its labels are hard, so that one accuracy serves both."""
    rows = zip(ours.values, random.values, everything.values, strict=True)
    return tuple(_score(weight * (own - chance) - (1 - weight) * (every - own)) for own, chance, every in rows)


def augmentation_robust(
    augmented: tuple[Evaluation, Evaluation], plain: tuple[Evaluation, Evaluation], weight: float = 0.5
) -> tuple[float, ...]:
    """The augmentation-robust score of each network: how much a memory gains over random real images, the pair (memory, random)
    trained with augmentation and without."""
    (with_ours, with_random), (ours, random) = augmented, plain
    rows = zip(with_ours.values, with_random.values, ours.values, random.values, strict=True)
    return tuple(_score(weight * (a - b) + (1 - weight) * (c - d)) for a, b, c, d in rows)


def _score(percent: float) -> float:
    """A weighted difference between -100 and 100 % as a score between 0 and 1."""
    return (math.exp(percent / 100) - math.exp(-1)) / (math.e - math.exp(-1))
