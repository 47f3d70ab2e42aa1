"""Classes that were never seen together (the paper's "extrapolating between tasks").

    python experiments/compose.py cifar100 --root DATA --out results/compose-cifar100.json --memories runs/compose

The classes are dealt into tasks of `--ways`, each distilled alone to the floats of one image per class, all with the
preprocessing of the whole dataset. A test task is k tasks, drawn at random, and one class of each: a fresh network is trained
on what the memories recall of them, on random real images of the same floats (one per class), and on all the training
images. Everything is resumed where it was killed: whole memories are kept, and every `--group` trainings are written. Several
processes may share the distilling (--only 0 1 2 3 4, and so on) before one does the rest.
"""

import argparse
import warnings
from pathlib import Path

from record import begun, setting, show, write

from recollect import RecollectError, load
from recollect.commands.performing import Performing
from recollect.config import preset
from recollect.devices import find_device
from recollect.reproduce import composing

SOURCES = [*composing.SOURCES]
NOT_SETTINGS = (
    "root",
    "out",
    "memories",
    "group",
    "together",
    "only",
    "executor",
    "ray_address",
    "gpus_per_job",
)  # where and how, but not what


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
    parser.add_argument("--executor", choices=["inline", "threads", "processes", "ray"], help="that distils the tasks")
    parser.add_argument("--ray-address", default="auto")
    parser.add_argument("--gpus-per-job", type=float, default=0.0)
    parser.add_argument("--only", type=int, nargs="+", help="distil these tasks, and stop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)

    images, device = load(given.data, root=given.root), find_device(given.device)
    config = preset("fast", seed=given.seed, device=device, **dict(map(setting, given.set)))
    tasks = composing.deal(images, given.ways, given.seed)
    preprocess = composing.fitted(images, config, tasks, given.memories)
    if wrong := [number for number in given.only or () if number not in range(len(tasks))]:
        raise RecollectError(f"there is no task {wrong[0]}: give some of 0 to {len(tasks) - 1}")
    numbers, found = (
        given.only or list(range(len(tasks))),
        None if given.only else begun("compose", given, NOT_SETTINGS, arguments),
    )
    executor = None
    if given.executor:
        executor = Performing(given.executor, given.together, given.ray_address, given.gpus_per_job).chosen()
    where = given.memories, numbers, given.together
    memories = composing.distil_all(images, tasks, config, preprocess, *where, show, executor)
    if found is None:
        return
    found["distilled"] = {f"task-{number:02d}": composing.told(given.memories, number, memories[number]) for number in numbers}
    names = ("count", "sources", "epochs", "batch", "full_epochs", "full_batch", "on", "group", "seed")
    for ways in given.test_ways:
        how = composing.Measuring(ways, **{name: getattr(given, name) for name in names})
        for _ in composing.measured(found["rows"], images, tasks, memories, preprocess, how, device):
            write(given.out, found)
        for name in given.sources:
            row = found["rows"][f"{ways}-way, {name}"]
            spread = f"{row['mean']:.2f} ± {row['deviation']:.2f}"
            print(f"{ways}-way, {name}: {spread} (n {row['n']}, {row['minutes']:.1f} min)", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
