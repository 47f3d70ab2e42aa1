"""The search behind the preset `fast`: one change at a time from it, judged on the validation split alone.

    python experiments/recipe.py fashion-mnist --root DATA --out experiments/recipe-fashion-mnist.json [--only NAME]

Each row is one distillation (1 image per class) and fresh networks trained by the paper's protocol; rows that the file
already holds are not run again.
"""

import argparse
import json
import time
import warnings
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

import recollect
from recollect.runs import environment

ROWS = {
    "fast": {},
    "unit init": {"init": "unit"},
    "unit init, outer lr 0.01": {"init": "unit", "outer_lr": 0.01},
    "unit init, late window": {"init": "unit", "window_place": "late"},
    "whole unroll": {"window": None},
    "longer unroll": {"inner_steps": 150},
    "longer unroll, window 60": {"inner_steps": 150, "window": 60},
    "longer unroll, outer lr 0.01": {"inner_steps": 150, "outer_lr": 0.01},
    "20 images a class and step": {"inner_per_class": 20},
    "flips": {"augment": "flip"},
    "outer lr 0.1": {"outer_lr": 0.1},
    "no average": {"ema": 0.0},
    "no clipping": {"clip_running": 0.0},
    "64 real images a class": {"real_per_class": 64},
    "2 networks a step, half the steps": {"networks_per_step": 2, "outer_steps": 200},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--root")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=list(ROWS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--networks", type=int, default=5)
    arguments = parser.parse_args()
    images = recollect.load(arguments.data, root=arguments.root)
    done = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for name in [arguments.only] if arguments.only else ROWS:
        if name in done:
            continue
        changes = {"outer_steps": arguments.steps} | ROWS[name]
        config = replace(recollect.DistillConfig(), **changes)
        began = time.perf_counter()
        memory = recollect.distill(images, config, progress=partial(_show, name))
        seconds = time.perf_counter() - began
        found = recollect.evaluate(memory, images, networks=arguments.networks, on="validation")
        done[name] = {
            "config": asdict(config),
            "seconds": seconds,
            "evaluation": found.to_json(),
            "environment": environment(),
        }
        arguments.out.write_text(json.dumps(done, indent=1))
        print(f"{name}: {found.mean:.2f} ± {found.deviation:.2f} after {seconds:.0f} s", flush=True)


def _show(name: str, line: dict) -> None:
    if line["step"] in (1, 2, 3) or line["step"] % 100 == 0:
        print(name, line, flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
