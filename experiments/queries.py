"""Continuous targets and vectors: digits rotated by -60 to 60 degrees, diabetes, wine, breast cancer (docs/queries.md).

    python experiments/queries.py [--out results/queries.json]

A cell is a dataset at a budget. Each candidate is distilled and judged on the validation split by 5 networks. The best one and
the baselines of the same floats are read on the test split once, by 20 networks. A row is written as soon as it is there, and is
not made again: killed, the script goes on.
"""

import argparse
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from record import begun, write
from torch.nn import functional as F

import recollect
from recollect import Images, Split, distill, evaluate, from_dataset, load, preset
from recollect.config import Recipe, to_json
from recollect.evaluation import Evaluation, full_data, mean_predictor, memory_recipe, random_real
from recollect.memory import Memory
from recollect.runs import environment

CELLS = (("rotated digits", 1), ("diabetes", 1), ("wine", 1), ("breast-cancer", 1))
COPIES = 4  # of each digit, each rotated by another angle
COMMON: dict[str, Any] = {"network": "mlp:width=64", "downsample": 1, "inner_steps": 40, "window": 25, "outer_steps": 400}
OBJECTIVES: tuple[dict[str, Any], ...] = (
    {"objective": "unrolled", "inner_lr": 0.02},
    {"objective": "unrolled", "inner_lr": 0.1},
    {"objective": "regression", "inner_lr": 0.02, "outer_steps": 2000},
)
BASES: dict[str, tuple[int | None, ...]] = {"rotated digits": (None, 4)}
EPOCHS = (30, 300)  # on all the data: the better one on validation
LAST = "all the data"
MANY = 50  # targets to recall, instead of ten


def rotated(seed: int = 0) -> Images:
    """The digits, each four times, by angles that are the target."""
    digits, generator = load("digits"), torch.Generator().manual_seed(seed)

    def turned(split: Split) -> tuple[Any, Any]:
        pixels = split.images.repeat(COPIES, 1, 1, 1).float()
        angles = torch.rand(len(pixels), generator=generator) * 120 - 60
        cos, sin, zero = angles.deg2rad().cos(), angles.deg2rad().sin(), torch.zeros(len(angles))
        by = torch.stack([torch.stack([cos, sin, zero], 1), torch.stack([-sin, cos, zero], 1)], 1)
        grid = F.affine_grid(by, list(pixels.shape), align_corners=False)
        return F.grid_sample(pixels, grid, align_corners=False).round().to(torch.uint8), angles

    parts = (turned(split) for split in (digits.train, digits.test, digits.validation))
    return from_dataset(*parts, name="rotated digits", class_names=["angle"])


def candidates(name: str) -> list[dict[str, Any]]:
    return [COMMON | objective | {"bases": bases} for objective, bases in product(OBJECTIVES, BASES.get(name, (None,)))]


def told(found: Evaluation, size: int, began: float, **more: Any) -> dict[str, Any]:
    """A row: what was measured, by how many numbers, and in what time."""
    return found.to_json() | {"size": size, "minutes": (time.perf_counter() - began) / 60} | more


def chosen_recipe(images: Images, recipe: Recipe) -> Recipe:
    """For all the data: the better number of epochs on validation."""
    tried = [Recipe(**{**vars(recipe), "epochs": epochs}) for epochs in EPOCHS]
    scores = [full_data(images, prepared(images), each, networks=3, on="validation").mean for each in tried]
    return tried[scores.index(max(scores))]


def prepared(images: Images) -> recollect.Preprocess:
    return recollect.Preprocess.fit(images.train.images, columns=images.columns)


def perform(name: str, count: int, rows: dict[str, Any], save: Any) -> None:
    images = rotated() if name == "rotated digits" else load(name)
    continuous, key = images.train.targets is not None, f"{name} {count}"
    cell = rows.setdefault(key, {"tried": {}, "test": {}, "environment": environment()})
    if LAST in cell["test"]:
        return
    made: dict[str, Memory] = {}

    def memory(number: int) -> Memory:
        config = preset("fast", images_per_class=count, **candidates(name)[number])
        return made.setdefault(str(number), distill(images, config))

    for number, settings in enumerate(candidates(name)):
        if str(number) not in cell["tried"]:
            began = time.perf_counter()
            found = evaluate(memory(number), images, networks=5, on="validation")
            cell["tried"][str(number)] = told(found, memory(number).floats, began, settings=settings)
            save()
    best = max(range(len(candidates(name))), key=lambda number: cell["tried"][str(number)]["mean"])
    cell["chosen"] = best

    def row(what: str, measure: Any) -> None:
        if what not in cell["test"]:
            began = time.perf_counter()
            cell["test"][what] = told(*measure(), began)
            save()

    recipe = memory_recipe(memory(best))
    stored = count * (10 if continuous else images.classes) * images.train.images[0].numel()
    row("memory", lambda: (evaluate(memory(best), images), memory(best).floats))
    if continuous:
        ends = memory(best).asked.undo(memory(best).recall()[1])
        between = torch.linspace(float(ends.min()), float(ends.max()), MANY)
        more = Memory(memory(best).bases, memory(best).addressing, memory(best).header, {}, memory(best).queries(between))
        row(f"memory, {MANY} targets", lambda: (evaluate(more, images), more.floats))
        row("mean of the targets", lambda: (mean_predictor(images), 1))
    else:
        plain = preset("fast", images_per_class=count, **candidates(name)[best] | {"bases": None, "addressing": "one-hot"})
        row("distilled vectors, one-hot", lambda: (evaluate(found := distill(images, plain), images), found.floats))
    row("random real examples", lambda: (random_real(images, count, prepared(images), recipe), stored))
    whole = images.train.images.numel()
    row(LAST, lambda: (full_data(images, prepared(images), chosen_recipe(images, recipe)), whole))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/queries.json"))
    given = parser.parse_args(arguments)
    given.common, given.usual = COMMON, {name: value for name, value in to_json(preset("fast")).items() if name in COMMON}
    file = begun("queries", given, ("out",), arguments)
    for name, count in CELLS:
        perform(name, count, file["rows"], lambda: write(given.out, file))
        best = file["rows"][f"{name} {count}"]["test"]["memory"]
        print(name, count, {what: best.get(what) for what in ("mean", "deviation", "rmse", "minutes")}, flush=True)


if __name__ == "__main__":
    main()
