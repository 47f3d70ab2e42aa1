"""The project's own memories: distilled, chosen on the validation split, and read once on the test split.

    python experiments/memories.py --root DATA [--only mnist cifar10] [--runs runs] [--out memories] [--steps 100]

All candidates of all datasets are distilled at the same time, in threads that share one GPU; a run that was stopped goes on. Of
each dataset's candidates the best on validation (5 networks) becomes memories/DATASET-1.safetensors, and 20 networks are read
on test. The file beside it, .json, has the config, the candidates' accuracies, the losses, what the memories on the way gave
on validation after how many minutes, and the result.
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

CANDIDATES: dict[str, dict[str, dict[str, Any]]] = {
    "mnist": {"fast": {"outer_steps": 1500}},
    "fashion-mnist": {"fast": {"outer_steps": 3500}},
    "cifar10": {
        "flips": {"augment": "flip", "outer_steps": 7000},
        "flips, longer unroll": {"augment": "flip", "inner_steps": 150, "window": 60, "outer_steps": 4000},
    },
}
KEPT = 8  # memories on the way


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder with the datasets' official files")
    parser.add_argument("--only", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("memories"))
    parser.add_argument("--steps", type=int, help="outer steps of every candidate, to try the script out")
    arguments = parser.parse_args()
    loaded = {name: recollect.load(name, root=arguments.root) for name in arguments.only}
    jobs = [(name, candidate) for name in arguments.only for candidate in CANDIDATES[name]]

    def distil(job: tuple[str, str]) -> recollect.Memory:
        with torch.cuda.stream(torch.cuda.Stream() if torch.cuda.is_available() else None):
            return distilled(loaded[job[0]], *job, folder(arguments.runs, *job), arguments.steps)

    with ThreadPoolExecutor(len(jobs) if torch.cuda.is_available() else 1) as pool:
        memories = dict(zip(jobs, pool.map(distil, jobs), strict=True))
    for name in arguments.only:
        found = {candidate: memories[name, candidate] for candidate in CANDIDATES[name]}
        finish(
            loaded[name], found, {candidate: folder(arguments.runs, name, candidate) for candidate in found}, arguments
        )


def folder(runs: Path, name: str, candidate: str) -> Path:
    return runs / f"{name}-{candidate.replace(', ', '-').replace(' ', '-')}"


def distilled(images: recollect.Images, name: str, candidate: str, run: Path, steps: int | None) -> recollect.Memory:
    config = replace(recollect.DistillConfig(), **CANDIDATES[name][candidate])
    config = replace(config, outer_steps=steps or config.outer_steps)
    config = replace(config, keep_every=max(1, config.outer_steps // KEPT))

    def show(line: dict[str, Any]) -> None:
        if line["step"] in (1, 10) or line["step"] % config.keep_every == 0:
            print(name, candidate, line, flush=True)

    return recollect.distill(images, config, run=run, resume=Run(run).config_path.exists(), progress=show)


def finish(
    images: recollect.Images, found: dict[str, recollect.Memory], runs: dict[str, Path], arguments: argparse.Namespace
) -> None:
    validation = {
        name: recollect.evaluate(memory, images, networks=5, on="validation") for name, memory in found.items()
    }
    best = max(found, key=lambda name: validation[name].mean)
    print(images.name, {name: round(each.mean, 2) for name, each in validation.items()}, "->", best, flush=True)
    run = Run(runs[best])
    lines = run.metrics()
    minutes = {line["step"]: sum(each["seconds"] for each in lines[: line["step"]]) / 60 for line in lines}
    curve = []
    for path in sorted(run.folder.glob("memory-*.safetensors"), key=lambda path: int(path.stem.split("-")[1])):
        step = int(path.stem.split("-")[1])
        each = recollect.evaluate(recollect.Memory.load(path), images, networks=5, on="validation")
        curve.append({"step": step, "minutes": minutes[step], "mean": each.mean, "deviation": each.deviation, "n": 5})
        print(images.name, curve[-1], flush=True)
    test = recollect.evaluate(found[best], images, networks=20)
    print(f"{images.name}: {test.mean:.2f} ± {test.deviation:.2f} on test (n = 20)", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = arguments.out / f"{images.name}-1.safetensors"
    found[best].with_accuracy(test.entry()).save(name)
    write_json(
        name.with_suffix(".json"),
        {
            "candidate": best,
            "candidates": {name: each.to_json() for name, each in validation.items()},
            "config": found[best].header.made["config"],
            "test": test.to_json(),
            "curve on validation": curve,
            "losses": [[line["step"], line["loss"]] for line in lines[:: max(1, len(lines) // 200)]],
            "minutes": sum(line["seconds"] for line in lines) / 60,
            "environment": environment(),
        },
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
