"""Classes that were never seen together (the paper's "extrapolating between tasks").

    python experiments/compose.py cifar100 --root DATA --out results/compose-cifar100.json --memories runs/compose

The classes are dealt into tasks of `--ways`, each distilled alone to the floats of one image per class, all with the
preprocessing of the whole dataset. A test task is k tasks, drawn at random, and one class of each: a fresh network is trained
on what the memories recall of them, on random real images of the same floats (one per class), and on all the training
images. Everything is resumed where it was killed: whole memories are kept, and every `--group` trainings are written. Several
processes may share the distilling (--only 0 1 2 3 4, and so on) before one does the rest.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from record import begun, setting, show, write
from torch import Tensor

from recollect import DistillConfig, Images, Memory, Preprocess, Recipe, RecollectError, Split, compose, distill, fast, load
from recollect.config import changed, from_json, preset
from recollect.decisions import resolve, training_split
from recollect.devices import find_device
from recollect.evaluation import memory_recipe, protocol
from recollect.files import read_json
from recollect.jobs import EXECUTORS, Job, Tell
from recollect.nets import Network
from recollect.runs import environment
from recollect.seeds import Purpose, network_seed, seeded
from recollect.training import accuracy, train

Part = tuple[Tensor, Tensor]
Task = list[str]  # names of classes
SOURCES = ["memories", "random real images", "all the data"]
NOT_SETTINGS = ("root", "out", "memories", "group", "together", "only")  # where and how, but not what


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--root")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--memories", type=Path, required=True, help="folder to keep the memories in")
    parser.add_argument("--ways", type=int, default=5, help="classes of a task")
    parser.add_argument("--test-ways", type=int, nargs="+", default=[2, 5])
    parser.add_argument("--count", type=int, default=1000, help="test tasks of each kind")
    parser.add_argument("--set", nargs="+", default=[], help="settings of the distillation: outer_steps=5000 augment=flip")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=SOURCES, help="what networks are trained on")
    parser.add_argument("--epochs", type=int, help="instead of the memories' recipe")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--full-epochs", type=int, default=50, help="of the trainings on all the data")
    parser.add_argument("--full-batch", type=int, default=64)
    parser.add_argument("--on", choices=["test", "validation"], default="test")
    parser.add_argument("--group", type=int, default=100, help="trainings at a time")
    parser.add_argument("--together", type=int, default=5, help="distillations that share a GPU at a time")
    parser.add_argument("--only", type=int, nargs="+", help="distil these tasks, and stop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)

    images, device = load(given.data, root=given.root), find_device(given.device)
    config = preset("fast", seed=given.seed, device=device, **dict(map(setting, given.set)))
    tasks = deal(images, given.ways, given.seed)
    kind = resolve(config, images.only(tasks[0])).run.preprocess
    if made := sorted(given.memories.glob("task-*.safetensors")):
        first, *others = map(Memory.load, made)
        if any(other.header.preprocessing != first.header.preprocessing for other in others):
            raise RecollectError(f"the memories in {given.memories} have different preprocessing: give another folder")
        preprocess = first.preprocess(images)
    else:
        preprocess = Preprocess.fit(training_split(images, config).images, kind, device)
    if given.only:
        if wrong := [number for number in given.only if number not in range(len(tasks))]:
            raise RecollectError(f"there is no task {wrong[0]}: give some of 0 to {len(tasks) - 1}")
        distil_all(images, tasks, config, preprocess, given.memories, given.only, given.together)
        return
    found = begun("compose", given, NOT_SETTINGS, arguments)
    every = list(range(len(tasks)))
    memories = distil_all(images, tasks, config, preprocess, given.memories, every, given.together)
    found["distilled"] = {f"task-{number:02d}": told(given.memories, number, memories[number]) for number in every}
    recipe = memory_recipe(memories[0])
    recipe = replace(recipe, epochs=given.epochs or recipe.epochs, batch=given.batch or recipe.batch)
    whole = replace(recipe, epochs=given.full_epochs, batch=given.full_batch)
    real = Prepared(images.class_names, training_split(images, config), preprocess, device)
    judged = Prepared(images.class_names, getattr(images, given.on), preprocess, device)
    for ways in given.test_ways:
        drawn = draw(tasks, ways, given.count, given.seed)
        sources: dict[str, tuple[Recipe, Callable[[Task, int], Part]]] = {
            "memories": (recipe, lambda task, _: recalled(task, tasks, memories)),
            "random real images": (
                recipe,
                lambda task, number: real.some(task, 1, seeded(given.seed, Purpose.RANDOM_REAL, number)),
            ),
            "all the data": (whole, lambda task, _: real.all(task)),
        }
        for name in given.sources:
            (how, source), key = sources[name], f"{ways}-way, {name}"
            row = found["rows"].setdefault(key, {"protocol": said(how, images, ways, device), "minutes": 0.0, "values": []})
            while len(row["values"]) < len(drawn):
                measure(row, drawn, source, judged, images, how, given.seed, given.group, device)
                write(given.out, found)
            print(f"{key}: {row['mean']:.2f} ± {row['deviation']:.2f} (n {row['n']}, {row['minutes']:.1f} min)", flush=True)


def said(recipe: Recipe, images: Images, ways: int, device: str) -> str:
    """The protocol of one network a task."""
    _, used = fast.passes(Network(recipe.network, images.shape, ways), device, half=False)
    return protocol(recipe, 1, used).replace("1 networks", "1 network a task")


# --- memories --------------------------------------------------------------------------------------------------------


def deal(images: Images, ways: int, seed: int) -> list[Task]:
    """Disjoint tasks, each of `ways` classes; classes that are left over are in none."""
    order = torch.randperm(images.classes, generator=seeded(seed, 4)).tolist()
    names = [images.class_names[label] for label in order]
    return [names[first : first + ways] for first in range(0, len(names) - ways + 1, ways)]


def draw(tasks: list[Task], ways: int, count: int, seed: int) -> list[Task]:
    """Test tasks: `ways` of the tasks, and one class of each."""
    if ways > len(tasks):
        raise RecollectError(f"{ways}-way tasks need {ways} memories, and there are {len(tasks)}: give --test-ways")
    generator = seeded(seed, 5, ways)
    drawn = []
    for _ in range(count):
        places = torch.randperm(len(tasks), generator=generator)[:ways].tolist()
        picks = torch.randint(len(tasks[0]), (ways,), generator=generator).tolist()
        drawn.append([tasks[place][pick] for place, pick in zip(places, picks, strict=True)])
    return drawn


def distil_all(
    images: Images,
    tasks: list[Task],
    config: DistillConfig,
    preprocess: Preprocess,
    folder: Path,
    numbers: list[int],
    together: int,
) -> list[Memory]:
    """One memory for each of these tasks, from its file where there is one; on a GPU some at the same time."""

    def one(number: int, tell: Tell) -> Memory:
        task, path = tasks[number], folder / f"task-{number:02d}.safetensors"
        of_task = images.only(task)
        decided = changed(resolve(config, of_task), seed=config.run.seed + number)
        if not path.exists():
            began, what = time.perf_counter(), f"task {number + 1} of {len(tasks)}"
            memory = distill(of_task, decided, preprocess=preprocess, progress=lambda line: tell((what, line), 1.0))
            minutes = (time.perf_counter() - began) / 60
            made = {"classes": task, "floats": memory.floats, "minutes": minutes, "environment": environment()}
            write(path.with_suffix(".json"), made)
            memory.save(path)
        memory = Memory.load(path)
        settings = from_json(DistillConfig, memory.header.made["config"], path)
        if (changed(settings, device=decided.run.device), memory.class_names) != (decided, tuple(task)):
            raise RecollectError(f"{path} was made with other settings or classes: give another --memories")
        memory.fitted = preprocess  # the same file would be read for each of 2,000 test tasks
        return memory

    executor = EXECUTORS["inline" if config.run.device == "cpu" else "threads"](together)
    return executor.run([Job(f"task {number}", one, (number,)) for number in numbers], show)


def told(folder: Path, number: int, memory: Memory) -> dict[str, Any]:
    """What was written when a task was distilled; the project's own memories lie without it."""
    path = folder / f"task-{number:02d}.json"
    return read_json(path) if path.exists() else {"classes": [*memory.class_names], "floats": memory.floats}


# --- what networks are trained on and judged by ----------------------------------------------------------------------


def recalled(task: Task, tasks: list[Task], memories: list[Memory]) -> Part:
    homes = [next(memory for memory, names in zip(memories, tasks, strict=True) if name in names) for name in task]
    composition = compose([memory[name] for memory, name in zip(homes, task, strict=True)])
    return composition.images, composition.labels


class Prepared:
    """A split as networks see it, on the device, and where each class is in it."""

    def __init__(self, class_names: tuple[str, ...], split: Split, preprocess: Preprocess, device: str):
        self.images = preprocess.on(device, split.images)
        self.rows = {name: (split.labels == label).nonzero().flatten() for label, name in enumerate(class_names)}

    def all(self, task: Task) -> Part:
        return self._part([self.rows[name] for name in task])

    def some(self, task: Task, per_class: int, generator: torch.Generator) -> Part:
        rows = [self.rows[name] for name in task]
        return self._part([each[torch.randperm(len(each), generator=generator)[:per_class]] for each in rows])

    def _part(self, rows: list[Tensor]) -> Part:
        labels = torch.cat([torch.full((len(each),), label) for label, each in enumerate(rows)])
        return self.images[torch.cat(rows).to(self.images.device)], labels.to(self.images.device)


def measure(
    row: dict[str, Any],
    drawn: list[Task],
    source: Callable[[Task, int], Part],
    judged: Prepared,
    images: Images,
    recipe: Recipe,
    seed: int,
    group: int,
    device: str,
) -> None:
    """Train the next group of networks side by side (on a GPU: by one captured graph), and judge them."""
    began, first = time.perf_counter(), len(row["values"])
    numbers = range(first, min(first + group, len(drawn)))
    network = Network(recipe.network, images.shape, len(drawn[0]))
    parts = [source(drawn[number], number) for number in numbers]
    seeds = [network_seed(seed, Purpose.NETWORK, number) for number in numbers]
    for number, params in zip(numbers, train(network, parts, recipe, seeds, device), strict=True):
        row["values"].append(round(100 * accuracy(network, params, *judged.all(drawn[number])), 3))
    row["minutes"] += (time.perf_counter() - began) / 60
    row["n"] = len(row["values"])
    row["mean"] = statistics.mean(row["values"])
    row["deviation"] = statistics.stdev(row["values"]) if row["n"] > 1 else 0.0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
