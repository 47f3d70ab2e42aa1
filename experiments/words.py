"""Classes that a memory never saw, recalled by their names alone: CIFAR-100, 80 classes distilled with words, the other 20 asked.

    python experiments/words.py cifar100 --root DATA --out results/words.json --runs runs/words

The size of the vectors is chosen first: for each of --sizes a memory of 64 classes is asked for 16 other ones, judged by their
validation images. The memory of the best size is then distilled again, of all 80, and asked for the 20 classes that nothing has
looked at so far, judged by their test images. Each task is 5 of these classes, a fresh network is trained on what is recalled of
them, and the same networks are trained on

    nearest seen class          what a memory of labels, of the same floats and outer steps, recalls of the seen classes whose
                                names are nearest; no two classes of a task share one
    nearest seen class, words   what the memory of words recalls of these
    N real images               training images of the classes themselves, N of each; last as many as are recalled

What comes after is no choice, but says what happened: the memory of words asked for 20 classes that it has seen, and the trial of
the best size with as many outer steps as the memories have, asked for its 16 classes and for the nearest seen ones; all judged by
validation images. Chance is 20 %. Memories lie in --runs, as runs that are resumed; rows that the file already holds are not run
again.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from record import begun, setting, show, write
from scipy.optimize import linear_sum_assignment
from torch import Tensor

import recollect
from recollect import words
from recollect.config import Recipe, changed
from recollect.data.images import Images, Split
from recollect.nets import Network
from recollect.runs import Run, environment
from recollect.seeds import Purpose, network_seed, seeded
from recollect.training import accuracy, train

MEMORY = {
    "network": "convnet:width=32", "objective": "regression", "init": "unit", "augment": "flip", "preprocess": "normalise",
    "classes_per_step": 20, "real_per_class": 15, "inner_per_class": 5,
}  # fmt: skip
NOT_SETTINGS = ("root", "out", "runs")
NEAREST, NEAREST_WORDS = "nearest seen class", "nearest seen class, words"


class Tasks(NamedTuple):
    """Some classes that a memory never saw, five at a time."""

    images: Images
    """of these classes alone"""
    split: Split
    """what networks are judged by"""
    tasks: list[Tensor]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--root")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32, 63], help="of the vectors, to choose from")
    parser.add_argument("--trial-steps", type=int, default=250, help="outer steps of each trial")
    parser.add_argument("--steps", type=int, default=800, help="outer steps of the memories")
    parser.add_argument("--unseen", type=int, nargs=2, default=[16, 20], help="classes that trials, and then memories, never see")
    parser.add_argument("--ways", type=int, default=5)
    parser.add_argument("--partitions", type=int, default=3, help="of the classes into tasks")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--real", type=int, nargs="*", default=[1, 5], help="real images of each class, to compare with")
    parser.add_argument("--set", nargs="*", default=[], help="settings of the distillations: network=mlp")
    given = parser.parse_args(arguments)
    images = recollect.load(given.data, root=given.root)
    order = torch.randperm(images.classes, generator=seeded(0, Purpose.CLASS_ORDER)).tolist()
    names = [images.class_names[label] for label in order]
    seen, fresh = names[: -given.unseen[1]], names[-given.unseen[1] :]
    trained, held = seen[: -given.unseen[0]], seen[-given.unseen[0] :]
    found = begun("words", given, NOT_SETTINGS, arguments) | {"seen": seen, "unseen": fresh}

    def told(name: str, row: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if name not in found["rows"]:
            began = time.perf_counter()
            found["rows"][name] = row() | {"seconds": time.perf_counter() - began, "environment": environment()}
            write(given.out, found)
        kept = found["rows"][name]
        print(f"{name}: {kept['mean']:.2f} ± {kept['deviation over tasks']:.2f}", flush=True)
        return kept

    tasks = five_at_a_time(images, held, "validation", given)
    trials = {}
    for size in given.sizes:
        settings = {"trained": trained, "size": size, "steps": given.trial_steps}
        trials[size] = told(f"trial, {size} numbers", lambda how=settings: by_name(distilled(images, given, **how), tasks, given))
    best = max(trials, key=lambda size: trials[size]["mean"])
    memory = lambda: distilled(images, given, seen, best, given.steps)  # noqa: E731
    trial = tasks
    tasks = five_at_a_time(images, fresh, "test", given)
    told("words", lambda: by_name(memory(), tasks, given) | {"size": best})
    told(NEAREST, lambda: by_nearest(distilled(images, given, seen, None, given.steps), memory(), tasks, given))
    told(NEAREST_WORDS, lambda: by_nearest(memory(), memory(), tasks, given))
    for count in [*given.real, len(memory().addressing)]:
        told(f"{count} real images" if count > 1 else "1 real image", lambda count=count: by_real(memory(), tasks, count, given))
    known = five_at_a_time(images, seen[: given.unseen[1]], "validation", given)
    told("words, seen classes", lambda: by_name(memory(), known, given))
    tried = lambda steps: distilled(images, given, trained, best, steps)  # noqa: E731
    shorter, longer = partial(tried, given.trial_steps), partial(tried, given.steps)
    told(f"trial, {NEAREST_WORDS}", lambda: by_nearest(shorter(), shorter(), trial, given))
    told("longer trial", lambda: by_name(longer(), trial, given))
    told(f"longer trial, {NEAREST_WORDS}", lambda: by_nearest(longer(), longer(), trial, given))


# --- memories ------------------------------------------------------------------------------------------------------------


def distilled(
    images: Images, given: argparse.Namespace, trained: Sequence[str], size: int | None, steps: int
) -> recollect.Memory:
    """A memory of these classes, asked with vectors of `size` numbers or (None) with labels: finished, resumed or new."""
    settings = MEMORY | {"outer_steps": steps} | dict(map(setting, given.set))
    folder, vectors = run_of(given, len(trained), size, steps), None
    if size:
        settings["query"], vectors = "vectors", given.runs / f"{len(trained)}-{size}.npz"
        if not vectors.exists():
            words.write(vectors, trained, words.fit(trained, size))
    some = recollect.load(given.data, root=given.root, classes=trained, vectors=vectors)

    def progress(line: dict[str, Any]) -> None:
        show((folder.name, line), 1.0)

    config = changed(recollect.DistillConfig(), **settings)
    return recollect.distill(some, config, run=folder, resume=Run(folder).is_begun, progress=progress)


def run_of(given: argparse.Namespace, classes: int, size: int | None, steps: int) -> Path:
    return given.runs / f"{classes}-{size or 'labels'}-{steps}"


def minutes(memory: recollect.Memory, given: argparse.Namespace) -> float:
    size = memory.addressing.shape[1] if memory.vectors is not None else None
    run = Run(run_of(given, len(memory.class_names), size, memory.header.made["steps"]))
    return sum(line["seconds"] for line in run.metrics()) / 60


# --- tasks ---------------------------------------------------------------------------------------------------------------


def five_at_a_time(images: Images, names: Sequence[str], on: str, given: argparse.Namespace) -> Tasks:
    some, tasks = images.only(names), []
    for number in range(given.partitions):
        order = torch.randperm(some.classes, generator=seeded(0, Purpose.TASK_ROWS, number))
        tasks += [task for task in order.split(given.ways) if len(task) == given.ways]
    return Tasks(some, getattr(some, on), tasks)


def judged(memory: recollect.Memory, tasks: Tasks, parts: Sequence[Tensor], given: argparse.Namespace) -> dict[str, Any]:
    """A fresh network on each task's images, [ways * N, C, H, W] class by class."""
    ways, prepare = given.ways, memory.preprocess()
    inner = changed(recollect.DistillConfig(), **(MEMORY | dict(map(setting, given.set)))).inner
    recipe = Recipe(inner.network, given.epochs, augment=inner.augment)
    network = Network(recipe.network, memory.image_shape, ways)
    labels = torch.arange(ways).repeat_interleave(len(parts[0]) // ways)
    seeds = [network_seed(0, Purpose.NETWORK, number) for number in range(len(parts))]
    values = []
    for task, params in zip(tasks.tasks, train(network, [(part, labels) for part in parts], recipe, seeds), strict=True):
        place = torch.full((tasks.images.classes,), -1)
        place[task] = torch.arange(ways)
        kept = tasks.split[place[tasks.split.labels] >= 0]
        values.append(100 * accuracy(network, params, prepare(kept.images), place[kept.labels]))
    return {"mean": statistics.mean(values), "deviation over tasks": statistics.stdev(values), "n": len(values), "values": values}


def by_name(memory: recollect.Memory, tasks: Tasks, given: argparse.Namespace) -> dict[str, Any]:
    parts = [memory.recall(words=[tasks.images.class_names[label] for label in task.tolist()])[0] for task in tasks.tasks]
    made = {"minutes of distilling": minutes(memory, given), "recalled of each class": len(memory.addressing)}
    return judged(memory, tasks, parts, given) | made


def by_nearest(asked: recollect.Memory, memory: recollect.Memory, tasks: Tasks, given: argparse.Namespace) -> dict[str, Any]:
    """What `asked` recalls of the classes whose vectors in the memory of words are nearest to those of a task's names."""
    parts, pairs = [], {}
    for task in tasks.tasks:
        names = [tasks.images.class_names[label] for label in task.tolist()]
        nearness = memory.queries(words=names) @ memory.queries().T  # [ways, classes]
        chosen = linear_sum_assignment(nearness.numpy(), maximize=True)[1].tolist()
        pairs |= {name: memory.class_names[label] for name, label in zip(names, chosen, strict=True)}
        parts.append(asked.recall(chosen)[0])
    made = {"minutes of distilling": minutes(asked, given)}
    return judged(memory, tasks, parts, given) | made | {"recalled of each class": len(asked.addressing), "nearest": pairs}


def by_real(memory: recollect.Memory, tasks: Tasks, count: int, given: argparse.Namespace) -> dict[str, Any]:
    real, parts = tasks.images.train, []
    for number, task in enumerate(tasks.tasks):
        generator, rows = seeded(0, Purpose.RANDOM_REAL, number), []
        for label in task.tolist():
            of_class = (real.labels == label).nonzero().flatten()
            rows.append(of_class[torch.randperm(len(of_class), generator=generator)[:count]])
        parts.append(memory.preprocess()(real.images[torch.cat(rows)]))
    return judged(memory, tasks, parts, given)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
