"""A job: what the cells of one distillation need is distilled, or found, and each cell is measured and written as a row.

A job is resumable at every moment: runs go on from their checkpoints, and a row that is there is not made again, so that the test
split is read once.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from recollect.config import DistillConfig, Recipe, changed, setting
from recollect.continual.config import STREAMS
from recollect.continual.run import run as run_stream
from recollect.data import Images, load
from recollect.decisions import preprocess_of, resolve
from recollect.devices import find_device
from recollect.distillation import distill
from recollect.errors import RecollectError
from recollect.evaluation import evaluate, memory_recipe
from recollect.experts import train_experts
from recollect.files import read_json, write_json
from recollect.jobs import Inline, Tell
from recollect.memory import Memory
from recollect.minutes import CHOSEN
from recollect.reproduce import asking, composing, pictures, rows
from recollect.reproduce.rows import Accuracy, Row
from recollect.reproduce.scales import Scale, Settings
from recollect.reproduce.tables import LEARNERS, Cell
from recollect.runs import Run, environment


class Place(NamedTuple):
    """Where a cell is made."""

    out: Path
    """folder of the runs and rows of all scales"""
    scale: Scale
    root: str | None
    """of the datasets"""
    device: str

    def folder(self, cell: Cell) -> Path:
        return self.out / self.scale.name / cell.run

    def images(self, cell: Cell) -> Images:
        name, classes = self.scale.data(cell)
        return load(name, root=self.root, classes=classes)

    def spec(self, cell: Cell) -> dict[str, Any]:
        """How to load the images again, for a run's config.json."""
        name, classes = self.scale.data(cell)
        return {"name": name, "root": self.root, "size": None, "classes": list(classes)}


class Failed(NamedTuple):
    """Why cells were not made; the other jobs go on."""

    cells: tuple[str, ...]
    why: str


def perform(cells: tuple[Cell, ...], place: Place, tell: Tell) -> Failed | None:
    """Make the rows of cells that share a distillation."""
    try:
        MAKES[cells[0].kind](cells, place, tell)
    except RecollectError as error:
        return Failed(tuple(f"{cell.table} {cell.name}" for cell in cells), str(error))
    return None


def finish(cell: Cell, place: Place, tell: Tell, accuracies: list[Accuracy], found: dict[str, Any], began: float) -> None:
    """Write the row of a cell."""
    known = environment()
    cpu = f"{known['processor']}, {known['threads']} thread{'s' * (known['threads'] > 1)}"
    row: Row = {
        "asked": rows.asked(cell, place.scale),
        "command": f"recollect reproduce {cell.table} --scale {place.scale.name} --cells {cell.name}",
        "objective": str(cell.settings.get("objective", "unrolled")),
        "minutes": 0.0,
        "hardware": known["cuda"] if place.device.startswith("cuda") else cpu,
        "commit": known["commit"] or "",
        "torch": known["torch"],
        "accuracies": accuracies,
        "measured_minutes": (time.perf_counter() - began) / 60,
        "numbers": 0,
        "made": {},
        "measures": {},
    }
    rows.save(place.out, place.scale, cell, {**row, **found})  # pyright: ignore
    words = "; ".join(f"{each['network']} {each['mean']:.2f} ± {each['deviation']:.2f}" for each in accuracies)
    tell(("done", f"{cell.table} {cell.name}: {words or 'done'}"), 1.0)


# --- a memory ----------------------------------------------------------------------------------------------------------


def _memories(cells: tuple[Cell, ...], place: Place, tell: Tell) -> None:
    first, scale = cells[0], place.scale
    images = place.images(first)
    legs, experts = scale.legs(first), {}
    if legs[0].get("objective") == "trajectories":
        experts = _experts(images, legs[0], place, first, tell)
        legs = [leg | {"experts": str(place.folder(first) / "experts")} for leg in legs]
    runs = distilled(images, legs, place.folder(first), place.device, place.spec(first), first.run, tell)
    memory = Memory.load(runs[-1].memory_path)
    for cell in cells:
        began, accuracies = time.perf_counter(), []
        for network in cell.networks:
            recipe = replace(memory_recipe(memory), network=scale.network(cell, network), epochs=scale.epochs)
            tell((f"{cell.table} {cell.name}", f"training {scale.networks} x {recipe.network}"), 0.0)
            found = evaluate(memory, images, recipe=recipe, networks=scale.networks, on=cell.on, device=place.device)
            accuracies.append(accuracy(list(found.values), found.network, found.on, found.protocol))
        made = _made(runs) | experts
        more: dict[str, Any] = {"minutes": spent(runs), "numbers": memory.floats, "made": made, "objective": made["objective"]}
        if cell.figure:
            memory.preprocess(images)
            more["measures"] = pictures.draw(cell, memory, rows.picture(place.out, scale, cell))
        finish(cell, place, tell, accuracies, more, began)


def _experts(images: Images, leg: Settings, place: Place, cell: Cell, tell: Tell) -> dict[str, Any]:
    """Train those that are not there yet; how many there are, and the minutes that they took."""
    folder, (count, epochs) = place.folder(cell) / "experts", place.scale.experts
    network = setting(changed(DistillConfig(), **leg), "network")
    recipe = Recipe(network, epochs, batch=256, momentum=0.0)
    preprocess, clock = preprocess_of("auto", images), folder / "minutes.json"
    minutes: float = read_json(clock)["minutes"] if clock.is_file() else 0.0
    for number in range(count):
        tell((cell.run, f"expert {number + 1} of {count}"), 0.0)
        began = time.perf_counter()
        train_experts(images, folder, recipe, count=number + 1, preprocess=preprocess, device=place.device)
        minutes += (time.perf_counter() - began) / 60
        write_json(clock, {"minutes": minutes})
    return {"experts": f"{count} of {epochs} epochs in {minutes:.1f} minutes"}


def distilled(
    images: Images, legs: list[Settings], folder: Path, device: str, data: dict[str, Any], name: str, tell: Tell
) -> list[Run]:
    """The finished runs of each leg; each goes on from the memory of the one before."""
    runs: list[Run] = []
    for number, leg in enumerate(legs, 1):
        run = Run(folder / f"leg-{number}" if len(legs) > 1 else folder)
        settings = leg | {"device": find_device(device)}
        if runs:  # whose bases and addressing are copied
            settings |= {"start": str(runs[-1].memory_path), "init": "kaiming"}
        config = within(changed(DistillConfig(), **settings), images)

        def progress(line: dict[str, Any], number: int = number) -> None:
            tell((name if len(legs) == 1 else f"{name}, leg {number}", line), 0.0)

        distill(images, config, run=run.folder, resume=run.is_begun, data=data, progress=progress)
        runs.append(run)
    return runs


def within(config: DistillConfig, images: Images) -> DistillConfig:
    """The same, with no more recalled images of a class in an inner step than there are."""
    if config.inner.per_class is None:
        return config
    each = resolve(changed(config, inner_per_class=None), images).memory.matrices or 1
    return changed(config, inner_per_class=min(config.inner.per_class, each))


def spent(runs: list[Run]) -> float:
    """Minutes of distilling."""
    return sum(line["seconds"] for run in runs for line in run.metrics()) / 60


def _made(runs: list[Run]) -> dict[str, Any]:
    """What was decided for the dataset and the minutes."""
    config = Memory.load(runs[-1].memory_path).header.made["config"]
    names = (*CHOSEN, "bases", "matrices", "inner_per_class", "preprocess", "augment", "bridge", "compute")
    steps = sum(run.metrics()[-1]["step"] for run in runs)
    return {name: config[name] for name in names} | {"outer_steps": steps}


def accuracy(values: list[float], network: str, on: str, protocol: str, n: str = "networks") -> Accuracy:
    """One column of a row."""
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return {
        "network": network,
        "mean": mean,
        "deviation": variance**0.5,
        "n": f"{len(values):,} {n}",
        "on": on,
        "protocol": protocol,
        "values": [round(value, 3) for value in values],
    }


# --- streams, tasks, pictures ------------------------------------------------------------------------------------------


def _streams(cells: tuple[Cell, ...], place: Place, tell: Tell) -> None:
    (cell,), scale = cells, place.scale
    began, config = time.perf_counter(), changed(STREAMS[cell.name], **scale.stream)
    learners = cell.settings["learners"]

    def progress(total: int, done: float) -> Tell:
        del total, done
        return lambda what, amount: tell((f"{cell.table} {cell.name}", what), 0.0)

    results = run_stream(
        place.images(cell), config, out=place.folder(cell), name=cell.name, seeds=scale.seeds, learners=learners,
        device=place.device, data=place.spec(cell), progress=progress, executor=Inline(),
    )  # fmt: skip
    accuracies, network = [], setting(config, "network")
    for learner in learners:
        values = [each.metrics.ra for each in results if each.learner == learner][: scale.seeds]
        accuracies.append(accuracy(values, network, config.stream.on, LEARNERS[learner], "seeds"))
    minutes = sum(each.seconds for each in results if each.learner == "compress") / 60
    finish(cell, place, tell, accuracies, {"minutes": minutes}, began)


def _tasks(cells: tuple[Cell, ...], place: Place, tell: Tell) -> None:
    """Every cell has the same memories."""
    began, given = time.perf_counter(), place.scale.tasks
    images, folder = place.images(cells[0]), place.folder(cells[0]).parent
    config = changed(DistillConfig(), **given.settings, device=find_device(place.device))
    tasks = composing.deal(images, min(given.ways, images.classes // 2), config.run.seed)
    preprocess = composing.fitted(images, config, tasks, folder / "memories")
    numbers = list(range(len(tasks)))
    memories = composing.distil_all(images, tasks, config, preprocess, folder / "memories", numbers, 1, tell)
    minutes = sum(float(composing.told(folder / "memories", number, memories[number]).get("minutes", 0)) for number in numbers)
    for cell in cells:
        path = folder / f"{cell.name}.json"
        found = rows.partly(path, rows.asked(cell, place.scale))
        how = composing.Measuring(
            ways=min(cell.settings["ways"], len(tasks)), count=given.tests, epochs=given.epochs, full_epochs=given.full_epochs
        )
        for each in composing.measured(found, images, tasks, memories, preprocess, how, config.run.device):
            rows.save_partly(path, rows.asked(cell, place.scale), found)
            tell((f"{cell.table} {cell.name}", each), 0.0)
        network = memory_recipe(memories[0]).network
        accuracies = [accuracy(row["values"], network, "test", row["protocol"], "tasks") for row in found.values()]
        finish(cell, place, tell, accuracies, {"minutes": minutes, "numbers": memories[0].floats * len(memories)}, began)


def _pictures(cells: tuple[Cell, ...], place: Place, tell: Tell) -> None:
    """The memories that are asked with pictures go on from one that is asked with labels."""
    given, images, folder = place.scale.pictures, place.images(cells[0]), place.folder(cells[0]).parent
    device = find_device(place.device)
    labels = distilled(images, [given.labels], folder / "labels", device, place.spec(cells[0]), "ask labels", tell)
    for cell in cells:
        began, shots = time.perf_counter(), cell.settings["shots"]
        name = f"{shots}-shot"
        asked = given.labels | given.asked | {"shots": shots, "start": str(labels[-1].memory_path), "init": "kaiming"}
        run = distilled(images, [asked], folder / name, device, place.spec(cell), f"ask {name}", tell)
        named = {"labels": Memory.load(labels[-1].memory_path), name: Memory.load(run[-1].memory_path)}
        for memory in named.values():
            memory.preprocess(images)
        configs = [changed(DistillConfig(), **each, device=device) for each in (given.labels, asked)]
        trained = asking.pretraining(images, configs[0], configs[1], device)
        ways = min(given.ways, images.classes // 2)
        found = asking.measured(images, named, trained, asking.Asking(shots, ways, given.draws), device)
        n, words = f"draws of {len(next(iter(found.values()))[0])} tasks", f"{ways}-way tasks"
        network = memory_recipe(named[name]).network
        accuracies = [
            accuracy([value for draw in by_draw for value in draw], network, "test", words) | {"n": f"{given.draws} {n}"}
            for by_draw in found.values()
        ]
        more = {"minutes": spent([*labels, *run]), "numbers": named[name].floats, "made": _made(run)}
        finish(cell, place, tell, accuracies, more, began)  # pyright: ignore


MAKES = {"best": _memories, "compared": _memories, "timed": _memories, "stream": _streams, "compose": _tasks, "ask": _pictures}
"""by the kind of a cell"""
