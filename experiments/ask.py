"""Recall with pictures: the paper's few-shot table on CIFAR-100, beside its two baselines.

    python experiments/ask.py cifar100 --root DATA --out results/ask-cifar100.json --runs runs/ask

A memory of 64 bases and 16 addressing matrices is distilled from the training images, to be asked with labels; for 1 and for 5
shots another goes on from it, to be asked with pictures, together with its encoder. Then each of the disjoint 5-way tasks is
asked with pictures drawn from the test split, a fresh network is trained on the answer, and judged by the other test images of
the task's classes. The baselines see the same pictures:

    nearest neighbour       the class of the nearest shot, in the features of a ConvNet trained on all training images
    classify-then-recall    that ConvNet names each group of shots, and the memory of labels recalls these classes

That ConvNet is trained as the encoder is before it is distilled with. Memories lie in --runs, as runs that are resumed or as
files (the project's: --runs memories/cifar100-asked); those of pictures are distilled at the same time on a GPU. Rows that the
file already holds are not run again.
"""

import argparse
import functools
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import begun, setting, show, write
from torch import Tensor, nn
from torch.func import functional_call

import recollect
from recollect.composition import ask
from recollect.config import changed
from recollect.decisions import resolve
from recollect.devices import find_device
from recollect.distiller import encoder_recipe
from recollect.evaluation import memory_recipe
from recollect.jobs import EXECUTORS, Job, Tell
from recollect.nets import Network, Params
from recollect.runs import Run, environment
from recollect.seeds import Purpose, network_seed, seeded
from recollect.training import train

MEMORY = {
    "bases": 64, "matrices": 16, "augment": "flip", "real_per_class": 20, "inner_lr": 0.03, "inner_steps": 40, "window": 30,
}  # fmt: skip
CLASSES = 20  # of an outer step
ASKED = {
    "query": "images", "query_form": "probabilities", "encoder_epochs": 30, "encoder_augment": "flip+crop", "encoder_lr": 1e-4,
    "outer_lr": 0.01,
}  # fmt: skip
LABELS = "labels"  # the run of the memory that is asked with names
NOT_SETTINGS = ("root", "out", "runs", "methods", "shots")  # where, and which rows

Method = Callable[[list[list[Tensor]], list[Tensor]], list[Tensor]]
"""(the shots of each class of each task, other pictures of each task) -> the class of each of these, as the method sees it"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--root")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6000, help="outer steps of the memory of labels")
    parser.add_argument("--picture-steps", type=int, default=1000, help="and then of those of pictures")
    parser.add_argument("--ways", type=int, default=5)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--shots", type=int, nargs="*", default=[1, 5])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--set", nargs="*", default=[], help="settings of the distillations: window=30")
    parser.add_argument("--on", choices=["test", "validation"], default="test")
    given = parser.parse_args(arguments)
    images = recollect.load(given.data, root=given.root)
    changes = dict(map(setting, given.set))
    device = find_device(changes.get("device", "auto"))
    shared = MEMORY | {"classes_per_step": min(CLASSES, images.classes), "outer_steps": given.steps}
    shared |= changes | {"device": device}
    found = begun("ask", given, NOT_SETTINGS, arguments)
    rows = found["rows"]
    due = [(method, shots) for shots in given.shots for method in given.methods if row_name(method, shots) not in rows]
    labels = given.runs / LABELS
    asked = shared | ASKED | {"query_size": images.classes, "outer_steps": given.picture_steps} | changes
    asked |= {"start": str(labels / "memory.safetensors"), "device": device}
    memories: dict[str, recollect.Memory] = {}
    plain = {name: value for name, value in shared.items() if not name.startswith(("encoder", "query"))}
    if any(method != "nearest neighbour" for method, _ in due):
        memories[LABELS] = distilled(images, plain, labels, show)
    runs = {f"{shots}-shot": asked | {"shots": shots} for method, shots in due if method == "image addressing"}
    jobs = [Job(name, distilled, (images, settings, given.runs / name)) for name, settings in runs.items()]
    executor = EXECUTORS["inline" if device == "cpu" else "threads"](max(1, len(jobs)))
    memories |= zip(runs, executor.run(jobs, show), strict=True)
    kind = resolve(changed(recollect.DistillConfig(), **plain), images).run.preprocess
    recipe = encoder_recipe(changed(recollect.DistillConfig(), **asked))
    trained = functools.cache(lambda: pretrained(images, recipe, kind, device))  # for both baselines, if either is due
    tasks = torch.randperm(images.classes, generator=seeded(0, 7)).split(given.ways)
    tasks = [task for task in tasks if len(task) == given.ways]
    for name, shots in due:
        began, row = time.perf_counter(), row_name(name, shots)
        run = LABELS if name == "classify-then-recall" else f"{shots}-shot"
        memory = memories[run] if name != "nearest neighbour" else None
        method = METHODS[name](trained, memory, device)
        by_draw = [accuracies(getattr(images, given.on), method, tasks, shots, draw) for draw in range(given.draws)]
        values = [value for draw in by_draw for value in draw]
        rows[row] = {
            "mean": statistics.mean(values),
            "deviation over tasks and draws": statistics.stdev(values),
            "n": f"{len(tasks)} tasks, {given.draws} draws of shots",
            "on": given.on,
            "values": by_draw,
            "seconds": time.perf_counter() - began,
            "minutes of distilling": sum(minutes(given.runs / each) for each in {LABELS, run}) if memory else None,
            "made": memory.header.made if memory else None,
            "environment": environment(),
        }
        write(given.out, found)
        print(f"{row}: {rows[row]['mean']:.2f} ± {rows[row]['deviation over tasks and draws']:.2f}", flush=True)


def row_name(method: str, shots: int) -> str:
    return f"{method}, {shots} shot"


def distilled(images: recollect.Images, settings: dict[str, Any], folder: Path, tell: Tell) -> recollect.Memory:
    """A memory from its file, or from its run's folder: finished, resumed or new."""
    if (file := folder.with_suffix(".safetensors")).exists():
        memory = recollect.Memory.load(file)
        memory.preprocess(images)
        return memory

    def progress(line: dict[str, Any]) -> None:
        tell((folder.name, line), 1.0)

    config = changed(recollect.DistillConfig(), **settings)
    return recollect.distill(images, config, run=folder, resume=Run(folder).is_begun, progress=progress)


def minutes(folder: Path) -> float:
    return sum(line["seconds"] for line in Run(folder).metrics()) / 60


def accuracies(split: recollect.Split, method: Method, tasks: list[Tensor], shots: int, draw: int) -> list[float]:
    """Percent of each task's other images that its classifier gets right."""
    given, pixels, truths = [], [], []
    for number, task in enumerate(tasks):
        generator = seeded(1, draw, number)
        rows = [(split.labels == label).nonzero().flatten() for label in task.tolist()]
        rows = [each[torch.randperm(len(each), generator=generator)] for each in rows]
        given.append([split.images[each[:shots]] for each in rows])
        pixels.append(torch.cat([split.images[each[shots:]] for each in rows]))
        truths.append(torch.cat([torch.full((len(each) - shots,), place) for place, each in enumerate(rows)]))
    guesses = method(given, pixels)
    return [100 * float((guess.cpu() == truth).float().mean()) for guess, truth in zip(guesses, truths, strict=True)]


# --- methods ---------------------------------------------------------------------------------------------------------

Pretrained = tuple[Network, Params, recollect.Preprocess]


def pretrained(images: recollect.Images, recipe: recollect.Recipe, kind: str, device: str) -> Pretrained:
    """A network trained on all training images, for the baselines."""
    network = Network(recipe.network, images.shape, images.classes)
    preprocess = recollect.Preprocess.fit(images.train.images, kind, device)
    part = preprocess.on(device, images.train.images), images.train.labels
    (params,) = train(network, [part], recipe, [0], device)
    return network, params, preprocess


def addressing(_: Callable[[], Pretrained], memory: recollect.Memory, device: str) -> Method:
    """Ours: ask, train, classify."""

    def method(given: list[list[Tensor]], pixels: list[Tensor]) -> list[Tensor]:
        asked = [ask(memory, {str(place): shots for place, shots in enumerate(task)}) for task in given]
        return taught([(each.images, each.labels) for each in asked], memory, pixels, device)

    return method


def nearest(trained: Callable[[], Pretrained], _: recollect.Memory | None, device: str) -> Method:
    network, params, preprocess = trained()
    *body, last = list(network.module.named_children())
    trunk = nn.Sequential(*(layer for _, layer in body))
    kept = {name: p for name, p in params.items() if not name.startswith(f"{last[0]}.")}

    def features(pixels: Tensor) -> Tensor:
        found = [functional_call(trunk, kept, (preprocess(some.to(device)),)).flatten(1) for some in pixels.split(1024)]
        return nn.functional.normalize(torch.cat(found), dim=1)

    @torch.no_grad()
    def method(given: list[list[Tensor]], pixels: list[Tensor]) -> list[Tensor]:
        return [
            torch.cdist(features(some), features(torch.cat(task))).argmin(1) // len(task[0])
            for task, some in zip(given, pixels, strict=True)
        ]

    return method


def classify_then_recall(trained: Callable[[], Pretrained], memory: recollect.Memory, device: str) -> Method:
    network, params, preprocess = trained()

    @torch.no_grad()
    def name(shots: Tensor) -> int:
        return int(network.logits(params, preprocess(shots.to(device))).log_softmax(1).sum(0).argmax())

    def method(given: list[list[Tensor]], pixels: list[Tensor]) -> list[Tensor]:
        parts = []
        for task in given:
            recalled = [memory.recall(name(shots))[0] for shots in task]  # two groups may be given the same name
            labels = torch.arange(len(task)).repeat_interleave(len(recalled[0]))
            parts.append((torch.cat(recalled), labels))
        return taught(parts, memory, pixels, device)

    return method


def taught(parts: list[tuple[Tensor, Tensor]], memory: recollect.Memory, pixels: list[Tensor], device: str) -> list[Tensor]:
    """The classes of pixels, by a fresh network trained on each part; all are trained side by side."""
    recipe, fits = memory_recipe(memory), memory.preprocess()
    network = Network(recipe.network, memory.image_shape, int(parts[0][1].max()) + 1)
    seeds = [network_seed(0, Purpose.NETWORK, number) for number in range(len(parts))]
    trained = train(network, parts, recipe, seeds, device)
    with torch.no_grad():
        return [
            torch.cat([network.logits(params, fits(some.to(device))).argmax(1) for some in each.split(1024)])
            for params, each in zip(trained, pixels, strict=True)
        ]


METHODS: dict[str, Callable[..., Method]] = {
    "image addressing": addressing,
    "nearest neighbour": nearest,
    "classify-then-recall": classify_then_recall,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
