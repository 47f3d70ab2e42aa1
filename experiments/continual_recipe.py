"""The search behind the settings of the streams: a few changes at a time, judged on the validation split alone.

    python experiments/continual_recipe.py rotations --root DATA --out results/continual-recipe.json [--tasks 10]
    python experiments/continual_recipe.py rotations --root DATA --bounds --out results/continual-recipe.json

A row distils a few tasks of the stream, the buffer of each as it would be in the whole of it, and trains fresh networks on
their memories. Rows that the file already holds are not run again. --bounds: networks on all images of a task, and on its
share of real ones. The stream cifar100-halved stands in for cifar100 where there is no GPU: images of half the side, bases of
the same size, a narrower network, 1,000 images a task.
"""

import argparse
import json
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from record import write
from torch.nn import functional as F

import recollect
from recollect.config import Recipe, changed
from recollect.continual.compress import Compressor, local_labels, recall_recipe
from recollect.continual.config import DATASETS, STREAMS, ContinualConfig
from recollect.continual.streams import Batch, Stream
from recollect.devices import find_device
from recollect.files import read_json
from recollect.nets import Network
from recollect.runs import environment
from recollect.seeds import Purpose, network_seed
from recollect.training import train

LENGTHS = (1, 2, 4, 8)  # of the training at test, in unrolls

# A task's reservoir holds 180, 100 and 30 images in Rotations; in MANY all of a task's 200, and 100.
JUDGED = {
    "rotations": (2, 10, 17), "many": (60, 90), "cifar100": (2, 10, 17), "rotations-60k": (10,), "permutations-60k": (10,),
    "cifar100-halved": (10,),
}  # fmt: skip

PAPER = {
    "inner_steps": 150, "inner_lr": 0.01, "inner_momentum": 0.9, "inner_per_class": 32, "outer_optimiser": "sgd",
    "outer_lr": 0.1, "outer_momentum": 0.5, "outer_schedule": "constant", "ema": 0.0, "clip_running": 0.0,
    "init": "kaiming", "replay": 190, "kept_downsample": 1, "networks_per_step": 1, "window": None,
    "window_place": "late", "augment": "none", "test_steps": None,
}  # fmt: skip
"""and where it says nothing, its dataset distillation"""
BASE = PAPER | {
    "inner_steps": 20, "inner_lr": 0.05, "outer_optimiser": "adam", "outer_lr": 0.02, "outer_momentum": 0.9,
    "outer_schedule": "cosine", "ema": 0.99, "clip_running": 2.0, "init": "unit",
}  # fmt: skip

COLOUR = {"inner_steps": 40, "inner_lr": 0.02, "inner_per_class": 10, "outer_lr": 0.01, "init": "kaiming"}
LONG = COLOUR | {"inner_steps": 160, "window": 20, "window_place": "random", "inner_lr": 0.01}
FLIPPED = LONG | {"outer_lr": 0.08, "augment": "flip"}
SAMPLED = FLIPPED | {"init": "samples", "kept_downsample": 7, "outer_lr": 0.01, "augment": "flip+crop"}
STILL = SAMPLED | {"outer_per_batch": 1, "outer_lr": 1e-9}  # as a memory begins, not distilled
HALVED = {"per_task": 1000, "buffer": 800, "downsample": 1, "network": "lamaml:width=32,hidden=128"}
LARGE = {"per_task": 6000, "inner_steps": 40, "init": "kaiming", "replay": 10}

ROWS: dict[str, list[tuple[tuple[int, ...], dict[str, Any]]]] = {
    "rotations": [
        ((2, 10, 17), {}),
        ((2, 17), {"inner_per_class": 5}),
        ((2, 17), {"inner_per_class": 5, "outer_lr": 0.05}),
        ((2, 17), {"inner_steps": 10, "outer_lr": 0.01}),
        ((2, 17), {"inner_steps": 10, "inner_lr": 0.02, "outer_lr": 0.01}),
        ((2, 17), {"inner_steps": 10, "outer_lr": 0.01, "init": "kaiming"}),
        ((2, 17), {"inner_steps": 10, "outer_lr": 0.03, "init": "kaiming"}),
        ((2, 17), {"inner_steps": 10, "inner_lr": 0.02, "outer_lr": 0.03, "init": "kaiming"}),
        ((10,), {}),
        ((10,), {"inner_lr": 0.1}),
        ((10,), {"init": "kaiming"}),
        ((10,), {"outer_lr": 0.04}),
        ((10,), {"inner_lr": 0.1, "init": "kaiming"}),
        ((10,), {"replay": 10}),
        ((10,), {"replay": 30}),
        ((10,), {"inner_lr": 0.1, "replay": 10}),
        ((10,), {"outer_lr": 0.04, "replay": 10}),
        ((10,), {"init": "kaiming", "replay": 10}),
        ((10,), {"outer_lr": 0.01, "replay": 10}),
        ((10,), {"inner_steps": 30, "inner_lr": 0.03, "replay": 10}),
        ((10,), {"inner_lr": 0.03, "outer_lr": 0.03, "replay": 10}),
        ((10,), {"inner_lr": 0.1, "inner_momentum": 0.5, "replay": 10}),
        ((10,), {"inner_steps": 40, "inner_lr": 0.03, "replay": 10}),
        ((10,), {"inner_steps": 40, "inner_lr": 0.03, "init": "kaiming", "replay": 10}),
        ((2, 17), {"replay": 10, "inner_lr": 0.03, "inner_steps": 40, "init": "kaiming"}),
    ],
    "many": [
        ((90,), {"inner_steps": 40, "inner_lr": 0.03, "replay": 90}),
        ((90,), {"inner_steps": 40, "inner_lr": 0.03, "replay": 10}),
        ((90,), {"inner_steps": 40, "inner_lr": 0.03, "init": "kaiming", "replay": 90}),
    ],
    "cifar100": [
        ((2, 10, 17), COLOUR | {"outer_lr": 0.02}),
        ((2, 10, 17), COLOUR | {"inner_steps": 20, "inner_lr": 0.05}),
        ((2, 10, 17), COLOUR | {"window": 20}),
        *(
            ((2, 10, 17), FLIPPED | change)
            for change in (
                {},
                {"kept_downsample": 2},
                {"kept_downsample": 2, "window": 40},
                {"kept_downsample": 2, "outer_lr": 0.04},
                {"kept_downsample": 2, "inner_lr": 0.02},
                {"kept_downsample": 2, "inner_per_class": 20},
                {"kept_downsample": 4, "inner_per_class": 20},
                {"kept_downsample": 3, "inner_per_class": 20},
                {"kept_downsample": 4},
            )
        ),
        *(
            ((2, 10, 17), change)
            for change in (
                STILL,
                STILL | {"augment": "flip"},
                SAMPLED,
                SAMPLED | {"outer_lr": 0.03},
                STILL | {"kept_downsample": 8},
                STILL | {"augment": "flip+crop+cutout"},
                SAMPLED | {"outer_lr": 0.003},
                SAMPLED | {"outer_lr": 0.08},
            )
        ),
    ],
    "cifar100-halved": [
        ((10,), change)
        for change in (
            COLOUR,
            COLOUR | {"init": "unit"},
            COLOUR | {"inner_lr": 0.05},
            COLOUR | {"init": "unit", "inner_lr": 0.05},
            COLOUR | {"init": "unit", "outer_lr": 0.03},
            LONG | {"inner_lr": 0.02},
            LONG,
            COLOUR | {"inner_lr": 0.1, "inner_momentum": 0.5},
            COLOUR | {"inner_steps": 150, "inner_lr": 0.01, "per_task": 500},
            LONG | {"inner_lr": 0.005},
            LONG | {"outer_lr": 0.02},
            LONG | {"outer_lr": 0.04},
            LONG | {"outer_lr": 0.08},
            LONG | {"outer_lr": 0.04, "inner_lr": 0.005},
            LONG | {"outer_lr": 0.04, "inner_steps": 80},
            LONG | {"outer_lr": 0.04, "replay": 10},
            LONG | {"outer_lr": 0.04, "inner_steps": 320},
            FLIPPED,
            LONG | {"outer_lr": 0.08, "window": 40},
            LONG | {"outer_lr": 0.08, "inner_per_class": 20},
            FLIPPED | {"outer_lr": 0.16},
            FLIPPED | {"per_task": 2250},
            FLIPPED | {"window": 40},
        )
    ]
    + [((19,), FLIPPED | {"per_task": 2000}), ((19,), FLIPPED | {"per_task": 2000, "replay": 10})],
    # a tenth of the stream
    "rotations-60k": [((10,), LARGE | {"inner_lr": rate}) for rate in (0.03, 0.05, 0.08, 0.12)]
    + [((10,), LARGE | {"inner_lr": 0.08, "replay": 0}), ((10,), LARGE | {"inner_lr": 0.08, "inner_steps": 20})],
    "permutations-60k": [((10,), LARGE | {"inner_lr": rate}) for rate in (0.03, 0.08, 0.05, 0.12)],
}
"""of each stream: tasks that are distilled, and what is changed from the base; in the order they were tried"""


def title(stream: str, tasks: Sequence[int], seed: int, changes: dict[str, Any]) -> str:
    """A row's name: what differs from the base."""
    now = BASE | changes
    what = ", ".join(f"{name} {value}" for name, value in now.items() if BASE.get(name, math.nan) != value) or "base"
    return f"{stream}, tasks {' '.join(map(str, tasks))}, seed {seed}: {what}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stream", choices=list(ROWS))
    parser.add_argument("--root")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--change", help="one row that is not in the list, as JSON")
    parser.add_argument("--paper", action="store_true", help="the paper's settings instead")
    parser.add_argument("--tasks", nargs="*", type=int)
    parser.add_argument("--networks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bounds", action="store_true")
    parser.add_argument("--row", type=int, help="one of the list alone, from 0: for several processes")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    name, seed = arguments.stream, arguments.seed
    whole = name.removesuffix("-halved")
    images = recollect.load(DATASETS[whole], root=arguments.root)
    protocol = changed(STREAMS[whole], on="validation", use_validation=False)
    if name != whole:
        images, protocol = halved(images), changed(protocol, **HALVED)
    device = find_device(arguments.device)
    rows: list[tuple[tuple[int, ...], Any]] = ROWS[name]
    if arguments.row is not None:
        if arguments.row not in range(len(rows)):
            raise recollect.RecollectError(f"there is no row {arguments.row} of {name}: give 0 to {len(rows) - 1}")
        rows = rows[arguments.row :][:1]
    if arguments.bounds:
        rows = [(JUDGED[name], "all-data"), (JUDGED[name], "gdumb")]
    elif arguments.paper or arguments.change:
        rows = [(JUDGED[name], PAPER if arguments.paper else json.loads(arguments.change))]
    for tasks, row in rows:
        tasks = tuple(arguments.tasks or tasks)
        done = read_json(arguments.out) if arguments.out and arguments.out.exists() else {}
        key = f"{name}, tasks {' '.join(map(str, tasks))}, seed {seed}: {row}"
        key = key if isinstance(row, str) else title(name, tasks, seed, row)
        if key in done:
            continue
        if isinstance(row, str):
            found = bound(Stream(images, protocol, seed, device=device), protocol, tasks, arguments.networks, row)
        else:
            config = changed(protocol, **BASE | row)
            found: dict[str, Any] = {"settings": BASE | row}
            try:
                found |= measure(Stream(images, config, seed, device=device), config, tasks, arguments.networks, device)
            except recollect.RecollectError as error:
                found |= {"validation": {}, "failed": str(error)}
        found |= {"seed": seed, "tasks": list(tasks), "networks": arguments.networks, "environment": where()}
        print(f"{key}: {line(found)}", flush=True)
        if arguments.out:  # which another process may have written meanwhile
            done = read_json(arguments.out) if arguments.out.exists() else {}
            write(arguments.out, done | {key: found})


def halved(images: recollect.Images) -> recollect.Images:
    """The mean of every four pixels."""
    height, width = (side // 2 for side in images.shape[1:])
    splits = {name: getattr(images, name) for name in ("train", "validation", "test")}
    smaller = {name: F.interpolate(split.images.float(), (height, width), mode="area") for name, split in splits.items()}
    return replace(images, **{name: replace(splits[name], images=each.round().byte()) for name, each in smaller.items()})


def where() -> dict[str, Any]:
    kept = ("recollect", "torch", "python", "processor", "cuda", "threads", "commit", "started")
    return {name: value for name, value in environment().items() if name in kept}


def line(found: dict[str, Any]) -> str:
    parts = [
        f"{name} {each['mean']:.1f} ({' '.join(f'{value:.1f}' for value in each['by task'])})"
        for name, each in found["validation"].items()
    ]
    if not parts:
        return found["failed"]
    return "; ".join(parts) + f"; {found['CPU seconds']:.0f} s"


def measure(stream: Stream, config: ContinualConfig, tasks: Sequence[int], networks: int, device: str) -> dict[str, Any]:
    """Distil, and judge the memories by networks trained for one to eight times the unroll's length."""
    began, on_the_wall = time.process_time(), time.perf_counter()
    compressor = Compressor(stream, config, tasks, device)
    for batches in zip(*(stream.task(task) for task in tasks), strict=True):
        compressor.observe(batches)
    seconds, wall = time.process_time() - began, time.perf_counter() - on_the_wall
    parts = [memory.recall() for memory in compressor.memories()]
    lengths = [config.buffer.test_steps] if config.buffer.test_steps else [config.inner.steps * times for times in LENGTHS]
    found = {}
    for steps in lengths:
        recipe = recall_recipe(changed(config, test_steps=steps), len(parts[0][1]), compressor.classes)
        found[f"{steps} steps"] = judge(stream, config, tasks, parts, recipe, networks)
    return {
        "validation": found,
        "skipped": sum(state.skipped for state in compressor.states),
        "outer steps": compressor.step,
        "CPU seconds": seconds,
        "seconds": wall,
        "CPU seconds an outer step of a task": seconds / max(compressor.step, 1) / len(tasks),
    }


def judge(
    stream: Stream, config: ContinualConfig, tasks: Sequence[int], parts: list, recipe: Recipe, networks: int
) -> dict[str, Any]:
    """Accuracy of fresh networks on the validation split of each task, in percent."""
    network = Network(config.inner.network, stream.shape, len(stream.task_classes[tasks[0]]))
    values = []
    for task, part in zip(tasks, parts, strict=True):
        seeds = [network_seed(stream.seed, Purpose.JUDGE, task, copy) for copy in range(networks)]
        split = stream.test(task)
        inputs, truth = stream.preprocess(split.images), local_labels(stream)[task, split.labels]
        trained = train(network, [part] * networks, recipe, seeds, str(inputs.device))
        with torch.no_grad():
            right = [(network.logits(params, inputs).argmax(1).cpu() == truth).double().mean() for params in trained]
        values.append([100 * float(each) for each in right])
    by_task = [sum(each) / networks for each in values]
    return {"mean": sum(by_task) / len(tasks), "by task": by_task, "values": values}


def bound(stream: Stream, config: ContinualConfig, tasks: Sequence[int], networks: int, kind: str) -> dict[str, Any]:
    """Networks on all images of a task, or on the first of each class that fill its share of the buffer."""
    began = time.process_time()
    parts = []
    for task in tasks:
        seen = [Batch(*parts) for parts in stream.task(task)]
        images, labels = (torch.cat([getattr(batch, which) for batch in seen]) for which in ("images", "labels"))
        labels, classes = local_labels(stream)[task, labels], len(stream.task_classes[task])
        if kind == "gdumb":
            each = config.buffer.images // stream.tasks // classes
            rows = torch.cat([(labels == label).nonzero().flatten()[:each] for label in range(classes)])
            images, labels = images[rows], labels[rows]
        parts.append((stream.preprocess(images), labels))
    epochs = config.baselines.all_epochs if kind == "all-data" else config.baselines.gdumb_epochs
    recipe = Recipe(config.inner.network, epochs, config.baselines.data_batch, config.baselines.data_lr, 0.9)
    found = judge(stream, config, tasks, parts, recipe, networks)
    return {"validation": {f"{epochs} passes": found}, "CPU seconds": time.process_time() - began}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    main()
