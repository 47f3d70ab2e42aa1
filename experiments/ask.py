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
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

from record import begun, setting, show, write

import recollect
from recollect.config import changed
from recollect.devices import find_device
from recollect.jobs import EXECUTORS, Job, Tell
from recollect.reproduce import asking
from recollect.reproduce.asking import LABELS, METHODS
from recollect.runs import Run, environment

MEMORY = {
    "bases": 64, "matrices": 16, "augment": "flip", "real_per_class": 20, "inner_lr": 0.03, "inner_steps": 40, "window": 30,
}  # fmt: skip
CLASSES = 20  # of an outer step
ASKED = {
    "query": "images", "query_form": "probabilities", "encoder_epochs": 30, "encoder_augment": "flip+crop", "encoder_lr": 1e-4,
    "outer_lr": 0.01,
}  # fmt: skip
NOT_SETTINGS = ("root", "out", "runs", "methods", "shots")  # where, and which rows


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
    configs = [changed(recollect.DistillConfig(), **each) for each in (plain, asked)]
    trained = asking.pretraining(images, *configs, device)  # for both baselines, if either is due
    for name, shots in due:
        began, row = time.perf_counter(), row_name(name, shots)
        run = LABELS if name == "classify-then-recall" else f"{shots}-shot"
        memory = memories[run] if name != "nearest neighbour" else None
        how = asking.Asking(shots, given.ways, given.draws, given.on)
        by_draw = asking.measured(images, memories, trained, how, device, [name])[name]
        values = [value for draw in by_draw for value in draw]
        rows[row] = {
            "mean": statistics.mean(values),
            "deviation over tasks and draws": statistics.stdev(values),
            "n": f"{len(by_draw[0])} tasks, {given.draws} draws of shots",
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


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
