"""The searches behind the preset `fast` and behind `--minutes`: one change at a time, judged on the validation split alone.

    python experiments/recipe.py fashion-mnist --root DATA --out results/recipe-fashion-mnist.json [--only NAME ...]
    python experiments/recipe.py mnist --root DATA --out results/recipe-cpu-mnist.json --minutes 3 --threads 1

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
from recollect import minutes
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
WIDTH_32 = {"network": "convnet:width=32", "inner_steps": 40, "window": 25, "inner_lr": 0.02, "init": "samples"}
IN_MINUTES: dict[str, dict[str, Any]] = {
    "width 32": WIDTH_32,
    "width 32, 100 real images a class": WIDTH_32 | {"real_per_class": 100},
    "width 32, 50 real images a class": WIDTH_32 | {"real_per_class": 50},
    "width 32, 100 real, unit init": WIDTH_32 | {"real_per_class": 100, "init": "unit"},
    "width 32, 100 real, outer lr 0.01": WIDTH_32 | {"real_per_class": 100, "outer_lr": 0.01},
    "width 32, 100 real, bf16": WIDTH_32 | {"real_per_class": 100, "compute": "bf16"},
    "width 32, 100 real, flips": WIDTH_32 | {"real_per_class": 100, "augment": "flip"},
    "width 64": WIDTH_32 | {"network": "convnet:width=64", "real_per_class": 100},
    "width 128": WIDTH_32 | {"network": "convnet", "real_per_class": 100},
    "regression": {
        "objective": "regression",
        "network": "convnet:width=32",
        "init": "samples",
        "real_per_class": 50,
        "outer_lr": 0.02,
    },
}  # fmt: skip
"""rows of --minutes: the number of outer steps is what fits"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--root")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=[*ROWS, *IN_MINUTES])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--minutes", type=float, help="instead of steps, on a CPU")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--networks", type=int, default=5)
    parser.add_argument("--together", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = ROWS if arguments.minutes is None else IN_MINUTES
    images = recollect.load(arguments.data, root=arguments.root)
    done = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    names = [name for name in arguments.only or rows if name not in done]
    writing = threading.Lock()

    def row(name: str) -> None:
        with torch.cuda.stream(torch.cuda.Stream() if torch.cuda.is_available() else None):
            config = changed(recollect.DistillConfig(), **rows[name])
            spent = {"outer_steps": arguments.steps, "bases": 16} if arguments.minutes is None else {"minutes": arguments.minutes}
            found = measure(images, name, changed(config, **spent), arguments.networks)
        with writing:
            done[name] = found | {"at the same time": names if arguments.together else [name]}
            write(arguments.out, done)

    with ThreadPoolExecutor(len(names) if arguments.together else 1) as pool:
        list(pool.map(row, names))


def measure(images: recollect.Images, name: str, config: recollect.DistillConfig, networks: int) -> dict[str, Any]:
    """Judged by ConvNets of the usual width, whatever the memory was distilled with."""
    minutes.RECIPES["cpu"] = (({}, 1),)  # nothing is chosen but the number of outer steps
    began = time.perf_counter()
    memory = recollect.distill(images, config, progress=partial(show, name))
    seconds = time.perf_counter() - began
    recipe = changed(memory_recipe(memory), network="convnet", lr=0.01)
    found = recollect.evaluate(memory, images, recipe=recipe, networks=networks, on="validation")
    config = changed(config, outer_steps=memory.header.made["steps"])
    print(f"{name}: {found.mean:.2f} ± {found.deviation:.2f} after {seconds:.0f} s", flush=True)
    return {"config": to_json(config), "seconds": seconds, "evaluation": found.to_json(), "environment": environment()}


def show(name: str, line: dict[str, Any]) -> None:
    if line["step"] in (1, 2, 3) or line["step"] % 100 == 0:
        print(name, line, flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
