"""The search behind the preset `fast`: one change at a time from it, judged on the validation split alone.

    python experiments/recipe.py fashion-mnist --root DATA --out results/recipe-fashion-mnist.json [--only NAME ...]

Each row is one distillation (1 image per class) and fresh networks trained by the paper's protocol; rows that the file
already holds are not run again. With --together all rows run at the same time, in threads that share one GPU.
"""

import argparse
import json
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record import write

import recollect
from recollect.config import changed, to_json
from recollect.runs import environment

ROWS = {
    "fast": {},
    "unit init": {"init": "unit"},
    "unit init, outer lr 0.01": {"init": "unit", "outer_lr": 0.01},
    "unit init, late window": {"init": "unit", "window_place": "late"},
    "whole unroll": {"window": None},
    "longer unroll": {"inner_steps": 150},
    "longer unroll, window 60": {"inner_steps": 150, "window": 60},
    "outer lr 0.1": {"outer_lr": 0.1},
    "outer lr 0.01": {"outer_lr": 0.01},
    "no average": {"ema": 0.0},
    "no clipping": {"clip_running": 0.0},
    "64 real images a class": {"real_per_class": 64},
    "20 images a class and step": {"inner_per_class": 20},
    "2 networks a step": {"networks_per_step": 2},
    "flips": {"augment": "flip"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--root")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--networks", type=int, default=5)
    parser.add_argument("--together", action="store_true")
    arguments = parser.parse_args()
    images = recollect.load(arguments.data, root=arguments.root)
    done = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    names = [name for name in arguments.only if name not in done]
    writing = threading.Lock()

    def row(name: str) -> None:
        with torch.cuda.stream(torch.cuda.Stream() if torch.cuda.is_available() else None):
            found = measure(images, name, arguments.steps, arguments.networks)
        with writing:
            done[name] = found | {"at the same time": names if arguments.together else [name]}
            write(arguments.out, done)

    with ThreadPoolExecutor(len(names) if arguments.together else 1) as pool:
        list(pool.map(row, names))


def measure(images: recollect.Images, name: str, steps: int, networks: int) -> dict[str, Any]:
    config = changed(recollect.DistillConfig(), **{"outer_steps": steps, "bases": 16} | ROWS[name])
    began = time.perf_counter()
    memory = recollect.distill(images, config, progress=partial(show, name))
    seconds = time.perf_counter() - began
    found = recollect.evaluate(memory, images, networks=networks, on="validation")
    print(f"{name}: {found.mean:.2f} ± {found.deviation:.2f} after {seconds:.0f} s", flush=True)
    return {"config": to_json(config), "seconds": seconds, "evaluation": found.to_json(), "environment": environment()}


def show(name: str, line: dict[str, Any]) -> None:
    if line["step"] in (1, 2, 3) or line["step"] % 100 == 0:
        print(name, line, flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
