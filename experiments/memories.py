"""The project's own memories, 1 image per class: distilled in legs, watched on validation, read once on test.

    python experiments/memories.py --root DATA [--only mnist cifar10] [--runs runs] [--out memories] [--steps 100]

Each leg is a run that starts from the memory of the one before; what docs/recipe.md says of the settings was chosen on the
validation split. All datasets are distilled at the same time, in threads that share one GPU, and a run that was stopped goes
on. The result is memories/DATASET-1.safetensors; beside it a .json with the legs' configs, their losses, what memories on the
way gave on validation after how many minutes, and 20 networks' accuracy on test.
"""

import argparse
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import recollect
from recollect.files import write_json
from recollect.runs import Run, environment

LONG = {"inner_steps": 200, "window": 60, "outer_lr": 0.015, "outer_steps": 3000}
LEGS: dict[str, list[dict[str, Any]]] = {
    "mnist": [{"outer_steps": 1500}, LONG],
    "fashion-mnist": [{"outer_steps": 3500}, LONG],
    "cifar10": [
        {"augment": "flip", "inner_steps": 150, "window": 60, "outer_steps": 4000},
        {"augment": "flip", "inner_steps": 250, "window": 60, "outer_lr": 0.02, "outer_steps": 9500},
    ],
}
KEPT = 5  # memories on the way, of each leg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder with the datasets' official files")
    parser.add_argument("--only", nargs="+", choices=list(LEGS), default=list(LEGS))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("memories"))
    parser.add_argument("--steps", type=int, help="outer steps of every leg, to try the script out")
    arguments = parser.parse_args()

    def distil(name: str) -> tuple[recollect.Images, list[Run]]:
        images = recollect.load(name, root=arguments.root)
        with torch.cuda.stream(torch.cuda.Stream() if torch.cuda.is_available() else None):
            return images, distilled(images, arguments.runs, arguments.steps)

    with ThreadPoolExecutor(len(arguments.only) if torch.cuda.is_available() else 1) as pool:
        for images, runs in pool.map(distil, arguments.only):
            finish(images, runs, arguments.out)


def distilled(images: recollect.Images, folder: Path, steps: int | None) -> list[Run]:
    """The runs of all legs."""
    runs: list[Run] = []
    for number, leg in enumerate(LEGS[images.name], 1):
        run = Run(folder / f"{images.name}-leg-{number}")
        config = replace(recollect.DistillConfig(), **leg)
        config = replace(config, outer_steps=steps or config.outer_steps)
        config = replace(config, keep_every=max(1, config.outer_steps // KEPT))
        config = replace(config, start=str(runs[-1].memory_path) if runs else None)
        if len(run.metrics()) < config.outer_steps or not run.memory_path.exists():

            def show(line: dict[str, Any], number: int = number, every: int = config.keep_every) -> None:
                if line["step"] in (1, 10) or line["step"] % every == 0:
                    print(images.name, "leg", number, line, flush=True)

            recollect.distill(images, config, run=run.folder, resume=run.config_path.exists(), progress=show)
        runs.append(run)
    return runs


def finish(images: recollect.Images, runs: list[Run], out: Path) -> None:
    curve, legs, minutes, steps = [], [], 0.0, 0
    memory = recollect.Memory.load(runs[-1].memory_path)
    fitted = memory.preprocess(images)  # to the same images for all legs: whitening takes a while
    for run in runs:
        lines = run.metrics()
        for path in sorted(run.folder.glob("memory-*.safetensors"), key=_step):
            spent = minutes + sum(line["seconds"] for line in lines[: _step(path)]) / 60
            kept = recollect.Memory.load(path)
            kept.fitted = fitted
            found = recollect.evaluate(kept, images, networks=5, on="validation")
            curve.append({"step": steps + _step(path), "minutes": spent, "mean": found.mean, "n": 5})
            curve[-1]["deviation"] = found.deviation
            print(images.name, curve[-1], flush=True)
        minutes += sum(line["seconds"] for line in lines) / 60
        steps += len(lines)
        losses = [[line["step"], line["loss"]] for line in lines[:: max(1, len(lines) // 200)]]
        legs.append({"config": run.config["distill"], "losses": losses})
    test = recollect.evaluate(memory, images, networks=20)
    print(f"{images.name}: {test.mean:.2f} ± {test.deviation:.2f} on test (n = 20)", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    name = out / f"{images.name}-1.safetensors"
    memory.with_accuracy(test.entry()).save(name)
    written = {"test": test.to_json(), "minutes": minutes, "curve on validation": curve, "legs": legs}
    write_json(name.with_suffix(".json"), written | {"environment": environment()})


def _step(path: Path) -> int:
    return int(path.stem.split("-")[1])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
