"""Does bf16 end where fp32 ends? The same small distillation in both, three seeds each, judged on the validation split.

    python experiments/precision.py mnist --root DATA --out results/precision.json

Rows that the file already holds are not run again. Needs a CUDA device.
"""

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path

from record import write

import recollect
from recollect.runs import environment

SETTING = {"network": "convnet:width=64", "inner_steps": 30, "window": 20, "outer_steps": 300, "inner_per_class": 5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--root")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--networks", type=int, default=5)
    arguments = parser.parse_args()
    images = recollect.load(arguments.data, root=arguments.root)
    done = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"setting": SETTING, "rows": {}}
    for compute in ("bf16", "fp32"):
        for seed in range(arguments.seeds):
            name = f"{compute}, seed {seed}"
            if name in done["rows"]:
                continue
            began = time.perf_counter()
            memory = recollect.distill(images, recollect.preset("fast", **SETTING, bases=16, compute=compute, seed=seed))
            seconds = time.perf_counter() - began
            found = recollect.evaluate(memory, images, networks=arguments.networks, on="validation", compute="fp32")
            done["rows"][name] = {"seconds": seconds, "evaluation": found.to_json()}
            done["environment"] = environment()
            write(arguments.out, done)
            print(f"{name}: {found.mean:.2f} ± {found.deviation:.2f} after {seconds:.0f} s", flush=True)
    for compute in ("bf16", "fp32"):
        means = [row["evaluation"]["mean"] for name, row in done["rows"].items() if name.startswith(compute)]
        print(f"{compute}: {statistics.mean(means):.2f} ± {statistics.stdev(means):.2f} over {len(means)} seeds")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
