"""What runs cost: planned beside measured, one factor at a time, and on paper up to ImageNet-1k.

    python experiments/plan.py --out results/plan.json --settings --factors --paper --page docs/scale.md

--settings: `recollect plan` for five distillations and a stream, and the same runs, each in a process of its own. --factors: an
outer step of a small distillation while one factor grows. --paper: computed, from the settings alone. Images are the digits, or
noise of other shapes: what a step takes does not depend on what is seen. What is asked for is measured anew, the rest is kept.
--page writes the tables into a page, between the comments that name them.
"""

import argparse
import multiprocessing
import resource
import statistics
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
from record import write

from recollect import Images, Split, cost, load
from recollect.bench.scale import scale
from recollect.config import DistillConfig, changed
from recollect.continual.config import STREAMS
from recollect.continual.run import run
from recollect.data.preprocess import Preprocess
from recollect.decisions import resolve
from recollect.distillation import distill
from recollect.distiller import Distiller
from recollect.files import read_json
from recollect.nets import Network
from recollect.runs import environment

DIGITS, MNIST, CIFAR = (1, 8, 8), (1, 28, 28), (3, 32, 32)
SETTINGS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "digits, mlp:width=128, T = 30": (DIGITS, dict(network="mlp:width=128", downsample=1, inner_steps=30, window=None)),
    "28x28, convnet:width=32, T = 40, window 25": (
        MNIST, dict(network="convnet:width=32", inner_steps=40, window=25, real_per_class=50),
    ),
    "28x28, convnet:width=64, T = 60, window 40, 2 networks": (
        MNIST, dict(network="convnet:width=64", real_per_class=50, networks_per_step=2),
    ),
    "32x32 in colour, convnet, T = 20, 50 images a step": (
        CIFAR, dict(network="convnet", inner_steps=20, window=None, inner_per_class=5, real_per_class=20),
    ),
    "28x28, regression, convnet:width=32": (MNIST, dict(network="convnet:width=32", objective="regression", real_per_class=50)),
}  # fmt: skip
STREAM, LEARNERS = dict(tasks=2, per_task=300), ("compress", "er", "gdumb")
SECONDS = 15.0  # of a measured run, about
BASE: dict[str, Any] = dict(
    network="convnet:width=32,depth=2", bases=16, matrices=10, inner_steps=10, window=None, inner_per_class=5, real_per_class=10,
    images_per_class=50, preprocess="normalise",
)  # fmt: skip
SIDE, CLASSES = 16, 10
FACTORS: dict[str, tuple[Any, ...]] = {
    "inner_steps": (5, 10, 20, 40), "inner_per_class": (2, 5, 10), "width": (16, 32, 64, 128), "side": (8, 16, 32),
    "classes": (5, 10, 20, 40), "bases": (4, 16, 64), "matrices": (5, 10, 40), "networks_per_step": (1, 2, 4),
}  # fmt: skip
PAPER = [
    (side, groups, per_class, devices)
    for side, groups in ((64, 1), (224, 1), (224, 10))
    for per_class in (1, 10, 50)
    for devices in (8, 64)
]
IMAGENET, OUTER_STEPS, WAYS = 1_281_167, 5_000, 100


def noise(shape: tuple[int, int, int], classes: int = 10, per_class: int = 200) -> Images:
    if shape == DIGITS and classes == 10:
        return load("digits")
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (classes * per_class, *shape), dtype=torch.uint8, generator=generator)
    split = Split(pixels, torch.arange(len(pixels)) % classes)
    return Images("noise", split, split[:classes], split[:classes], tuple(map(str, range(classes))))


# --- planned and measured ------------------------------------------------------------------------------------------------


def planned(shape: tuple[int, int, int], settings: dict[str, Any]) -> dict[str, float]:
    began = time.perf_counter()
    found = cost.measured(noise(shape), changed(DistillConfig(), **settings))
    return {"s a step": found.each, "GiB": found.memory / 2**30, "planning, s": time.perf_counter() - began}


def measured(shape: tuple[int, int, int], settings: dict[str, Any], steps: int) -> dict[str, float]:
    lines: list[dict[str, Any]] = []
    began = time.perf_counter()
    distill(noise(shape), changed(DistillConfig(), **settings, outer_steps=steps), progress=lines.append)
    seconds = time.perf_counter() - began
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    at = [line.get("seconds", 0.0) for line in lines[1:]]
    return {"s a step": statistics.mean(at) if all(at) else seconds / steps, "GiB": most, "seconds": seconds, "n": steps}


def planned_stream() -> dict[str, float]:
    return cost.measured_stream(load("digits"), changed(STREAMS["rotations"], **STREAM), LEARNERS)


def measured_stream(folder: str) -> dict[str, float]:
    found = {}
    for name in LEARNERS:
        began = time.perf_counter()
        run(load("digits"), changed(STREAMS["rotations"], **STREAM), out=Path(folder) / name, seeds=1, learners=[name])
        found[name] = time.perf_counter() - began
    return found


def alone(function: Any, *arguments: Any) -> Any:
    """In a process of its own, with nothing compiled and no memory used."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(partial(_quiet, function), *arguments).result()


def _quiet(function: Any, *arguments: Any) -> Any:
    warnings.simplefilter("ignore")
    return function(*arguments)


def settings() -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, (shape, given) in SETTINGS.items():
        plan = alone(planned, shape, given)
        found = alone(measured, shape, given, max(3, ceil(SECONDS / plan["s a step"])))
        rows[name] = {"planned": plan, "measured": found, "ratio": plan["s a step"] / found["s a step"]}
        print(f"{name}: {plan['s a step']:.3g} planned, {found['s a step']:.3g} measured, {rows[name]['ratio']:.2f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        plan, found = alone(planned_stream), alone(measured_stream, folder)
    name = f"rotations of the digits, {STREAM['tasks']} tasks of {STREAM['per_task']}"
    rows[name] = {"planned": plan, "measured": found, "ratio": sum(plan.values()) / sum(found.values())}
    print(f"{name}: {plan} planned, {found} measured, {rows[name]['ratio']:.2f}", flush=True)
    return rows


# --- one factor at a time --------------------------------------------------------------------------------------------------


def of_factor(name: str, value: Any) -> dict[str, float]:
    """Seconds of an outer step, and the operations that the plan counts."""
    side, classes, given = SIDE, CLASSES, dict(BASE)
    if name == "width":
        given["network"] = f"convnet:width={value},depth=2"
    elif name in ("side", "classes"):
        side, classes = (value, classes) if name == "side" else (side, value)
    else:
        given[name] = value
    images = noise((3, side, side), classes, 60)
    config = resolve(changed(DistillConfig(), **given), images)
    preprocess = Preprocess.fit(images.train.images, "normalise", config.run.device)
    distiller = Distiller(images, config, preprocess, Network(config.inner.network, images.shape, classes))
    state, seconds = distiller.begin(), []
    distiller.step(state)
    while len(seconds) < 3 or sum(seconds) < 1.0:
        began = time.perf_counter()
        distiller.step(state)
        seconds.append(time.perf_counter() - began)
    used = cost.work(config, images.shape, classes, len(images.train.images))
    return {"seconds": statistics.median(seconds), "operations": used.operations, "n": len(seconds)}


def factors() -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, values in FACTORS.items():
        rows[name] = {str(value): of_factor(name, value) for value in values}
        print(name, {value: round(row["seconds"], 3) for value, row in rows[name].items()}, flush=True)
    found = scale()
    rows["processes"] = {str(n): {"seconds": found[f"{n} process{'es' * (n > 1)}, s an outer step"]} for n in (1, 2)}
    return rows


# --- on paper ----------------------------------------------------------------------------------------------------------------


def on_paper(side: int, groups: int, per_class: int, devices: int) -> dict[str, Any]:
    """ImageNet-1k on H200s, one inner network each; in groups, one after another, 20 matrices, 2 images of a class a step."""
    classes, real, parted = (
        1000 // groups,
        IMAGENET // groups,
        {"matrices": 20, "downsample": 4, "inner_per_class": 2} if groups > 1 else {},
    )
    depth = 4 if side == 64 else 5
    config = changed(
        DistillConfig(), network=f"convnet:depth={depth}", images_per_class=per_class, networks_per_step=devices,
        classes_per_step=WAYS, outer_steps=OUTER_STEPS, real_per_class=10, preprocess="normalise", **parted,
    )  # fmt: skip
    config = cost.sized(config, (3, side, side), classes)
    used, chip = cost.work(config, (3, side, side), classes, real, devices), cost.DEVICES["h200"]
    whole = groups * chip.seconds(used)
    return {
        "bases": config.memory.bases, "matrices": config.memory.matrices, "hours": OUTER_STEPS * whole / 3600,
        "GB sent a step": used.wire / 1e9, "GB a device": used.memory / 1e9, "fits": used.memory < chip.memory,
    }  # fmt: skip


def paper() -> dict[str, Any]:
    return {", ".join(map(str, case)): on_paper(*case) for case in PAPER}


# --- the page ----------------------------------------------------------------------------------------------------------------

TITLES = {
    "inner_steps": "inner steps T, all in the window", "inner_per_class": "recalled images of a class in an inner step",
    "width": "width of the ConvNet", "side": "side of the images", "classes": "classes", "bases": "bases",
    "matrices": "addressing matrices", "networks_per_step": "inner networks an outer step", "processes": "processes of torchrun",
}  # fmt: skip


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(found: dict[str, Any]) -> dict[str, str]:
    """Each part as a table of the page."""
    made: dict[str, str] = {}
    if "settings" in found:
        rows = []
        for name, row in found["settings"]["rows"].items():
            if "n" in row["measured"]:
                pairs = [_cell(row[which]) for which in ("planned", "measured")]
                count = f"{row['measured']['n']:.0f} outer steps"
            else:
                pairs = [f"{sum(row[which].values()):.3g} s in all" for which in ("planned", "measured")]
                count = "1 seed"
            rows.append([name, *pairs, f"{row['ratio']:.2f}", count])
        made["settings"] = table(["setting", "planned", "measured", "planned / measured", "n"], rows)
    if "factors" in found:
        rows = []
        for name, row in found["factors"]["rows"].items():
            values = ", ".join(f"{value}: {each['seconds']:.3g} s" for value, each in row.items())
            first, *_, last = row.values()
            counted = f"{last['operations'] / first['operations']:.2g}" if "operations" in first else ""
            rows.append([TITLES[name], values, f"{last['seconds'] / first['seconds']:.2g}", counted])
        made["factors"] = table(["factor", "seconds of an outer step", "last / first", "operations, last / first"], rows)
    if "paper" in found:
        rows = []
        for name, row in found["paper"]["rows"].items():
            numbers = [f"{row[key]:.3g}" for key in ("hours", "GB sent a step", "GB a device")]
            rows.append(
                [*name.split(", "), f"{row['bases']:,}", f"{row['matrices']:,}", *numbers, "yes" if row["fits"] else "no"]
            )
        headings = [
            "pixels a side",
            "groups of classes",
            "images per class",
            "H200s",
            "bases",
            "matrices",
            "hours",
            "GB sent a step",
            "GB a device",
        ]
        made["paper"] = table([*headings, "fits"], rows)
    return made


def _cell(row: dict[str, float]) -> str:
    return f"{row['s a step']:.3g} s" + (f", {row['GiB']:.2f} GiB" if "GiB" in row else "")


def paged(text: str, found: dict[str, Any]) -> str:
    """A page with the tables in their places."""
    for name, made in tables(found).items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = f"{before}{start}\n{made}\n{end}{after}"
    return text


PARTS = {"settings": settings, "factors": factors, "paper": paper}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    for name in PARTS:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--page", type=Path, help="page to write the tables into")
    given = parser.parse_args(arguments)
    found = read_json(given.out) if given.out.exists() else {}
    for name, part in PARTS.items():
        if getattr(given, name):
            began = time.perf_counter()
            found[name] = {"rows": part()}
            if name != "paper":
                found[name] |= {"seconds": time.perf_counter() - began, "environment": environment()}
            write(given.out, {name: found[name] for name in PARTS if name in found})
    if given.page:
        given.page.write_text(paged(given.page.read_text(), read_json(given.out)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
