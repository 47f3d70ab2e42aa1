"""The project's own memories: distilled in legs, watched on validation, read on test at the end.

    python experiments/memories.py --root DATA [--only mnist-1 cifar10-10] [--runs runs] [--out memories] [--steps 100]

A cell is a dataset and its images per class. Each leg is a run that starts from the memory of the one before; what
docs/recipe.md says of the settings was chosen on the validation split. All cells are distilled at the same time, in threads
that share one GPU. The results are memories/CELL.safetensors and results/memories/CELL.json (--results) with each leg's
config, losses, minutes and what memories on the way gave on validation, and 20 networks' accuracy on test. Both are written
after every leg: a leg that stands there is not run again, and one that was stopped goes on.
"""

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from record import write

import recollect
from recollect.config import changed
from recollect.files import read_json
from recollect.jobs import EXECUTORS, Job, Tell
from recollect.reproduce.scales import LEGS
from recollect.runs import Run, environment

KEPT = 5  # memories on the way, of each leg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder with the datasets' official files")
    parser.add_argument("--only", nargs="+", choices=list(LEGS), default=list(LEGS))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("memories"))
    parser.add_argument("--results", type=Path, default=Path("results/memories"))
    parser.add_argument("--steps", type=int, help="outer steps of every leg, to try the script out")
    parser.add_argument("--kept", type=int, default=KEPT, help="memories on the way of each leg that validation judges")
    arguments = parser.parse_args()

    def work(name: str, tell: Tell) -> None:
        images = recollect.load(name.rpartition("-")[0], root=arguments.root)
        path, told = arguments.out / f"{name}.safetensors", arguments.results / f"{name}.json"
        remember(images, name, arguments.runs, path, told, arguments.steps, arguments.kept, tell)

    executor = EXECUTORS["threads" if torch.cuda.is_available() else "inline"](len(arguments.only))
    executor.run([Job(name, work, (name,)) for name in arguments.only], lambda what, _: print(what, flush=True))


def remember(
    images: recollect.Images, cell: str, runs: Path, path: Path, told: Path, steps: int | None, kept: int, tell: Tell
) -> None:
    """Run the legs that are missing from the memory at `path`, then test it; all of it is recorded in `told`."""
    written: dict[str, Any] = read_json(told) if told.exists() else {"legs": []}
    for number, leg in list(enumerate(LEGS[cell], 1))[len(written["legs"]) :]:
        config = changed(recollect.DistillConfig(), **leg)
        config = changed(config, outer_steps=steps or config.budget.outer_steps, start=str(path) if number > 1 else None)
        if config.run.start:  # its bases and addressing are copied
            config = changed(config, init="kaiming")
        config = changed(config, keep_every=max(1, config.budget.outer_steps // kept))
        run = Run(runs / f"{cell}-leg-{number}")

        def show(line: dict[str, Any], number: int = number, every: int = config.run.keep_every) -> None:
            if line["step"] in (1, 10) or line["step"] % every == 0:
                tell(f"{cell} leg {number} {line}", 1.0)

        memory = recollect.distill(images, config, run=run.folder, resume=run.is_begun, progress=show)
        written = {"legs": [*written["legs"], followed(run, images)], "environment": environment()}
        path.parent.mkdir(parents=True, exist_ok=True)
        memory.save(path)
        write(told, written)
    if "test" not in written:
        memory = recollect.Memory.load(path)
        test = recollect.evaluate(memory, images, networks=20)
        print(f"{cell}: {test.mean:.2f} ± {test.deviation:.2f} on test (n = 20)", flush=True)
        memory.with_accuracy(test.entry()).save(path)
        write(told, {"test": test.to_json(), **written})


def followed(run: Run, images: recollect.Images) -> dict[str, Any]:
    """One leg: its config and losses, its minutes, and what its memories on the way give on validation."""
    lines, curve, fitted = run.metrics(), [], None
    for path in sorted(run.folder.glob("memory-*.safetensors"), key=_step):
        kept = recollect.Memory.load(path)
        kept.fitted = fitted = fitted or kept.preprocess(images)  # to the same images: whitening takes a while
        found = recollect.evaluate(kept, images, networks=5, on="validation")
        minutes = sum(line["seconds"] for line in lines[: _step(path)]) / 60
        curve.append({"step": _step(path), "minutes": minutes, **found.entry()})
        print(run.folder.name, curve[-1], flush=True)
    some = lines[:: max(1, len(lines) // 200)]
    losses = {name: [line[name] for line in some] for name in ("step", "loss")}
    minutes = sum(line["seconds"] for line in lines) / 60
    return {"config": run.settings["distill"], "minutes": minutes, "curve": curve, "losses": losses}


def _step(path: Path) -> int:
    return int(path.stem.split("-")[1])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
