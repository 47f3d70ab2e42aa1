"""Recall with pictures: the paper's few-shot table on CIFAR-100, beside its two baselines.

    python experiments/ask.py cifar100 --root DATA --out experiments/ask-cifar100.json --runs runs/ask

For 1 and 5 shots: a memory of 64 bases and 16 addressing matrices is distilled with its encoder from the training images;
then each of the disjoint 5-way tasks is asked with pictures drawn from the test split, a fresh network is trained on the
answer, and judged by the other test images of the task's classes. The baselines see the same pictures:

    nearest neighbour       the class of the nearest shot, in the features of a ConvNet trained on all training images
    classify-then-recall    that ConvNet names each group of shots, and a memory of labels recalls these classes

Memories lie in --runs and are resumed; rows that the file already holds are not run again.
"""

import argparse
import functools
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import recollect
from recollect.ask import ask
from recollect.distill import find_device, seeded
from recollect.evaluate import memory_recipe, train
from recollect.nets import Network, Params
from recollect.runs import Run, environment

PRETRAINING = recollect.Recipe(epochs=100, batch=128)
ASKED = {"query": "images", "bases": 64, "matrices": 16, "query_size": 128, "classes_per_step": 5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--root")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--ways", type=int, default=5)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--shots", type=int, nargs="*", default=[1, 5])
    parser.add_argument("--set", nargs="*", default=[], help="settings of the distillations, as name=value in JSON")
    arguments = parser.parse_args()
    images = recollect.load(arguments.data, root=arguments.root)
    changes = {name: json.loads(value) for name, value in (item.split("=", 1) for item in arguments.set)}
    rows: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    tasks = torch.randperm(images.classes, generator=seeded(0, 7)).split(arguments.ways)
    tasks = [task for task in tasks if len(task) == arguments.ways]
    trained = functools.cache(lambda: pretrained(images, changes))  # for both baselines, if either is to run
    for shots in arguments.shots:
        settings = {
            **ASKED,
            "classes_per_step": arguments.ways,
            "outer_steps": arguments.steps,
            "shots": shots,
            **changes,
        }
        methods: dict[str, Callable[[], Callable]] = {
            "image addressing": lambda s=settings, n=shots: answers(distilled(images, s, arguments.runs / f"{n}-shot")),
            "nearest neighbour": lambda: nearest(*trained()),
            "classify-then-recall": lambda: named(*trained(), label_memory(images, changes, arguments)),
        }
        for name, prepare in methods.items():
            row = f"{name}, {shots} shot"
            if row in rows:
                continue
            began, method = time.perf_counter(), prepare()
            found = [task_accuracy(images, method, tasks, shots, draw) for draw in range(arguments.draws)]
            values = [value for draw in found for value in draw]
            rows[row] = {
                "mean": statistics.mean(values),
                "deviation over tasks and draws": statistics.stdev(values),
                "n": f"{len(tasks)} tasks, {arguments.draws} draws of shots",
                "values": found,
                "seconds": time.perf_counter() - began,
                "settings": settings if name == "image addressing" else {},
                "environment": environment(),
            }
            arguments.out.write_text(json.dumps(rows, indent=1))
            print(f"{row}: {rows[row]['mean']:.2f} ± {rows[row]['deviation over tasks and draws']:.2f}", flush=True)


def distilled(images: recollect.Images, settings: dict[str, Any], folder: Path) -> recollect.Memory:
    """A memory from its run's folder: finished, resumed or new."""
    if Run(folder).memory_path.exists() and len(Run(folder).metrics()) >= settings["outer_steps"]:
        return recollect.Memory.load(Run(folder).memory_path)
    config = replace(recollect.DistillConfig(), **settings)
    return recollect.distill(images, config, run=folder, resume=Run(folder).config_path.exists(), progress=show)


def label_memory(images: recollect.Images, changes: dict[str, Any], arguments: argparse.Namespace) -> recollect.Memory:
    return distilled(images, {"outer_steps": arguments.steps, **changes}, arguments.runs / "labels")


def task_accuracy(
    images: recollect.Images, method: Callable, tasks: list[Tensor], shots: int, draw: int
) -> list[float]:
    """Percent of each task's other test images that its classifier gets right."""
    found = []
    for number, task in enumerate(tasks):
        generator, given, pixels, truth = seeded(1, draw, number), [], [], []
        for place, label in enumerate(task.tolist()):
            rows = (images.test.labels == label).nonzero().flatten()
            rows = rows[torch.randperm(len(rows), generator=generator)]
            given.append(images.test.images[rows[:shots]])
            pixels.append(images.test.images[rows[shots:]])
            truth.append(torch.full((len(rows) - shots,), place))
        guesses = method(given, torch.cat(pixels))
        found.append(100 * float((guesses.cpu() == torch.cat(truth)).float().mean()))
    return found


def answers(memory: recollect.Memory) -> Callable[[list[Tensor], Tensor], Tensor]:
    """Ours: ask, train, classify."""

    def method(given: list[Tensor], pixels: Tensor) -> Tensor:
        classifier = ask(memory, {str(place): shots for place, shots in enumerate(given)}).train()
        return classifier.probabilities(pixels).argmax(1)

    return method


Pretrained = tuple[Network, Params, recollect.Preprocess, str]


def pretrained(images: recollect.Images, changes: dict[str, Any]) -> Pretrained:
    """A network trained on all training images, for the baselines."""
    device = find_device(changes.get("device", "auto"))
    recipe = replace(PRETRAINING, network=changes.get("network", PRETRAINING.network))
    network = Network(recipe.network, images.shape, images.classes)
    preprocess = recollect.Preprocess.fit(images.train.images)
    (params,) = train(network, [(preprocess(images.train.images), images.train.labels)], recipe, [0], device)
    return network, params, preprocess, device


def nearest(network: Network, params: Params, preprocess: recollect.Preprocess, device: str) -> Callable:
    *body, last = list(network.module.named_children())
    trunk = nn.Sequential(*(layer for _, layer in body))
    kept = {name: p for name, p in params.items() if not name.startswith(f"{last[0]}.")}

    def features(pixels: Tensor) -> Tensor:
        found = [functional_call(trunk, kept, (preprocess(some.to(device)),)).flatten(1) for some in pixels.split(1024)]
        return nn.functional.normalize(torch.cat(found), dim=1)

    def method(given: list[Tensor], pixels: Tensor) -> Tensor:
        with torch.no_grad():
            shots = features(torch.cat(given))
            return torch.cdist(features(pixels), shots).argmin(1) // len(given[0])

    return method


def named(
    network: Network, params: Params, preprocess: recollect.Preprocess, device: str, memory: recollect.Memory
) -> Callable:
    def method(given: list[Tensor], pixels: Tensor) -> Tensor:
        with torch.no_grad():
            scores = [network.logits(params, preprocess(shots.to(device))).log_softmax(1).sum(0) for shots in given]
        labels = [int(score.argmax()) for score in scores]
        recalled = torch.cat([memory.recall(label)[0] for label in labels])  # two groups may be given the same name
        rows = torch.arange(len(given)).repeat_interleave(len(memory.addressing))
        recipe = memory_recipe(memory)
        classifier = Network(recipe.network, memory.image_shape, len(given))
        (trained,) = train(classifier, [(recalled, rows)], recipe, [0], device)
        fits = memory.preprocess()
        with torch.no_grad():
            found = [classifier.logits(trained, fits(some.to(device))).argmax(1) for some in pixels.split(1024)]
        return torch.cat(found)

    return method


def show(line: dict[str, Any]) -> None:
    if line["step"] % 100 == 0:
        print(line, flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
