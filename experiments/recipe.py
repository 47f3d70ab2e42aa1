"""The searches behind the preset `fast` and of `--minutes`: one change at a time, judged on the validation split alone.

    python experiments/recipe.py fashion-mnist --root DATA --out results/recipe-fashion-mnist.json [--only NAME ...]
    python experiments/recipe.py mnist --root DATA --out results/recipe-cpu-mnist.json --cpu --steps 300

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
from recollect.evaluation import memory_recipe
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
SHORT = {"inner_steps": 40, "window": 25, "inner_lr": 0.02, "init": "samples", "real_per_class": 100, "compute": "bf16"}
WIDTH_32 = SHORT | {"network": "convnet:width=32"}
ON_A_CPU: dict[str, tuple[float, dict[str, Any]]] = {
    "width 32": (1, WIDTH_32),
    "fp32": (2, WIDTH_32 | {"compute": "fp32"}),
    "outer lr 0.01": (1, WIDTH_32 | {"outer_lr": 0.01}),
    "random start": (1, WIDTH_32 | {"init": "kaiming"}),
    "50 real images a class": (0.95, WIDTH_32 | {"real_per_class": 50}),
    "flips": (1, WIDTH_32 | {"augment": "flip"}),
    "flips, outer lr 0.01": (1, WIDTH_32 | {"augment": "flip", "outer_lr": 0.01}),
    "unroll of 20": (0.73, WIDTH_32 | {"inner_steps": 20, "window": 20, "inner_lr": 0.05}),
    "unroll of 80": (1.7, WIDTH_32 | {"inner_steps": 80, "window": 40, "inner_lr": 0.01}),
    "5 images a class and step": (0.6, WIDTH_32 | {"inner_per_class": 5}),
    "width 64": (2, SHORT | {"network": "convnet:width=64"}),
    "width 128": (5, SHORT | {"network": "convnet"}),
    "regression": (0.1, WIDTH_32 | {"objective": "regression", "real_per_class": 50, "outer_lr": 0.02}),
}
"""rows of --cpu: about the cost of an outer step, in those of the first row; and settings"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--root")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=[*ROWS, *ON_A_CPU])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--cpu", action="store_true", help="the rows for a CPU, on one core, as long as --steps of the first")
    parser.add_argument("--networks", type=int, default=5)
    parser.add_argument("--together", action="store_true")
    arguments = parser.parse_args()
    if arguments.cpu:
        torch.set_num_threads(1)
        rows = {name: settings | {"outer_steps": int(arguments.steps / cost)} for name, (cost, settings) in ON_A_CPU.items()}
    else:
        rows = {name: settings | {"outer_steps": arguments.steps, "bases": 16} for name, settings in ROWS.items()}
    images = recollect.load(arguments.data, root=arguments.root)
    done = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    names = [name for name in arguments.only or rows if name not in done]
    writing = threading.Lock()

    def row(name: str) -> None:
        with torch.cuda.stream(torch.cuda.Stream() if torch.cuda.is_available() else None):
            config = changed(recollect.DistillConfig(), **rows[name])
            found = measure(images, name, config, arguments.networks)
        with writing:
            done[name] = found | {"at the same time": names if arguments.together else [name]}
            write(arguments.out, done)

    with ThreadPoolExecutor(len(names) if arguments.together else 1) as pool:
        list(pool.map(row, names))


def measure(images: recollect.Images, name: str, config: recollect.DistillConfig, networks: int) -> dict[str, Any]:
    """Judged by ConvNets of the usual width, whatever the memory was distilled with."""
    began, worked = time.perf_counter(), time.process_time()
    memory = recollect.distill(images, config, progress=partial(show, name))
    spent = {"seconds": time.perf_counter() - began, "cpu seconds": time.process_time() - worked}
    recipe = changed(memory_recipe(memory), network="convnet", lr=0.01)
    compute = config.run.compute if config.run.compute == "bf16" else "auto"
    found = recollect.evaluate(memory, images, recipe=recipe, networks=networks, on="validation", compute=compute)
    print(f"{name}: {found.mean:.2f} ± {found.deviation:.2f} after {spent['seconds']:.0f} s", flush=True)
    return {"config": to_json(config), **spent, "evaluation": found.to_json(), "environment": environment()}


def show(name: str, line: dict[str, Any]) -> None:
    if line["step"] in (1, 2, 3) or line["step"] % 100 == 0:
        print(name, line, flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
