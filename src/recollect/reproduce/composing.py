"""Classes that were never seen together (the paper's "extrapolating between tasks").

The classes are dealt into tasks, each distilled alone, all with the preprocessing of the whole dataset. A test task is k tasks,
drawn at random, and one class of each: a fresh network is trained on what the memories recall of them, on random real images of
the same floats (one per class), and on all the training images.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from recollect import fast
from recollect.composition import compose
from recollect.config import DistillConfig, Recipe, changed, from_json
from recollect.data.images import Images, Split
from recollect.data.preprocess import Preprocess
from recollect.decisions import resolve, training_split
from recollect.distillation import distill
from recollect.errors import RecollectError
from recollect.evaluation import memory_recipe, protocol
from recollect.files import read_json, write_compact
from recollect.jobs import EXECUTORS, Executor, Job, Tell
from recollect.memory import Memory
from recollect.nets import Network
from recollect.runs import environment
from recollect.seeds import Purpose, network_seed, seeded
from recollect.training import Part, accuracy, train

Task = list[str]  # names of classes
SOURCES = ("memories", "random real images", "all the data")


@dataclass(frozen=True)
class Measuring:
    """How composed classifiers are measured."""

    ways: int
    """classes of a test task"""
    count: int = 1000
    """test tasks"""
    sources: tuple[str, ...] = SOURCES
    """what networks are trained on"""
    epochs: int | None = None
    """instead of the memories' recipe"""
    batch: int | None = None
    full_epochs: int = 50
    """of the trainings on all the data"""
    full_batch: int = 64
    on: Literal["test", "validation"] = "test"
    group: int = 100
    """trainings at a time"""
    seed: int = 0


# --- memories ----------------------------------------------------------------------------------------------------------


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


def fitted(images: Images, config: DistillConfig, tasks: list[Task], folder: Path) -> Preprocess:
    """The preprocessing of the whole dataset, that of the memories in the folder where there are any."""
    if made := sorted(folder.glob("task-*.safetensors")):
        first, *others = map(Memory.load, made)
        if any(other.header.preprocessing != first.header.preprocessing for other in others):
            raise RecollectError(f"the memories in {folder} have different preprocessing: give another folder")
        return first.preprocess(images)
    kind = resolve(config, images.only(tasks[0])).run.preprocess
    return Preprocess.fit(training_split(images, config).images, kind, config.run.device)


def distil_all(
    images: Images,
    tasks: list[Task],
    config: DistillConfig,
    preprocess: Preprocess,
    folder: Path,
    numbers: list[int],
    together: int,
    tell: Tell,
    executor: Executor | None = None,
) -> list[Memory]:
    """One memory for each of these tasks, from its file where there is one; on a GPU some at the same time, or by an executor."""
    executor = executor or EXECUTORS["inline" if config.run.device == "cpu" else "threads"](together)
    given = images, tasks, config, preprocess, folder
    executor.run([Job(f"task {number}", _distilled, (*given, number), folder=folder) for number in numbers], tell)
    found = []
    for number in numbers:
        task, path = tasks[number], folder / f"task-{number:02d}.safetensors"
        decided = changed(resolve(config, images.only(task)), seed=config.run.seed + number)
        memory = Memory.load(path)
        settings = from_json(DistillConfig, memory.header.made["config"], path)
        if (changed(settings, device=decided.run.device), memory.class_names) != (decided, tuple(task)):
            raise RecollectError(f"{path} was made with other settings or classes: give another --memories")
        memory.fitted = preprocess  # the same file would be read for each of 2,000 test tasks
        found.append(memory)
    return found


def _distilled(
    images: Images, tasks: list[Task], config: DistillConfig, preprocess: Preprocess, folder: Path, number: int, tell: Tell
) -> None:
    """The memory of one task, unless it is there."""
    task, path = tasks[number], folder / f"task-{number:02d}.safetensors"
    if path.exists():
        return
    of_task = images.only(task)
    decided = changed(resolve(config, of_task), seed=config.run.seed + number)
    began, what = time.perf_counter(), f"task {number + 1} of {len(tasks)}"
    memory = distill(of_task, decided, preprocess=preprocess, progress=lambda line: tell((what, line), 0.0))
    minutes = (time.perf_counter() - began) / 60
    made = {"classes": task, "floats": memory.floats, "minutes": minutes, "environment": environment()}
    write_compact(path.with_suffix(".json"), made)
    memory.save(path)


def told(folder: Path, number: int, memory: Memory) -> dict[str, Any]:
    """What was written when a task was distilled; the project's own memories lie without it."""
    path = folder / f"task-{number:02d}.json"
    return read_json(path) if path.exists() else {"classes": [*memory.class_names], "floats": memory.floats}


# --- what networks are trained on and judged by ----------------------------------------------------------------------


def measured(
    rows: dict[str, Any],
    images: Images,
    tasks: list[Task],
    memories: list[Memory],
    preprocess: Preprocess,
    how: Measuring,
    device: str,
) -> Iterator[str]:
    """Fill the rows, a source of training images each, and say how far they are after every group of trainings."""
    config = from_json(DistillConfig, memories[0].header.made["config"], "the memories")
    recipe = memory_recipe(memories[0])
    recipe = replace(recipe, epochs=how.epochs or recipe.epochs, batch=how.batch or recipe.batch)
    whole = replace(recipe, epochs=how.full_epochs, batch=how.full_batch)
    real = Prepared(images.class_names, training_split(images, config), preprocess, device)
    judged = Prepared(images.class_names, getattr(images, how.on), preprocess, device)
    drawn = draw(tasks, how.ways, how.count, how.seed)
    sources: dict[str, tuple[Recipe, Callable[[Task, int], Part]]] = {
        "memories": (recipe, lambda task, _: recalled(task, tasks, memories)),
        "random real images": (recipe, lambda task, number: real.some(task, 1, seeded(how.seed, Purpose.RANDOM_REAL, number))),
        "all the data": (whole, lambda task, _: real.all(task)),
    }
    for name in how.sources:
        (trained, source), key = sources[name], f"{how.ways}-way, {name}"
        row = rows.setdefault(key, {"protocol": said(trained, images, how.ways, device), "minutes": 0.0, "values": []})
        while len(row["values"]) < len(drawn):
            measure(row, drawn, source, judged, images, trained, how, device)
            yield f"{key}: {row['mean']:.2f} ± {row['deviation']:.2f} (n {row['n']}, {row['minutes']:.1f} min)"


def said(recipe: Recipe, images: Images, ways: int, device: str) -> str:
    """The protocol of one network a task."""
    _, used = fast.passes(Network(recipe.network, images.shape, ways), device, half=False)
    return protocol(recipe, 1, used).replace("1 networks", "1 network a task")


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
    how: Measuring,
    device: str,
) -> None:
    """Train the next group of networks side by side (on a GPU: by one captured graph), and judge them."""
    began, first = time.perf_counter(), len(row["values"])
    numbers = range(first, min(first + how.group, len(drawn)))
    network = Network(recipe.network, images.shape, len(drawn[0]))
    parts = [source(drawn[number], number) for number in numbers]
    seeds = [network_seed(how.seed, Purpose.NETWORK, number) for number in numbers]
    for number, params in zip(numbers, train(network, parts, recipe, seeds, device), strict=True):
        row["values"].append(round(100 * accuracy(network, params, *judged.all(drawn[number])), 3))
    row["minutes"] += (time.perf_counter() - began) / 60
    row["n"] = len(row["values"])
    row["mean"] = statistics.mean(row["values"])
    row["deviation"] = statistics.stdev(row["values"]) if row["n"] > 1 else 0.0
