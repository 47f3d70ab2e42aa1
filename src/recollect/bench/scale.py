"""One process against two, with one thread each: an outer step of four inner networks, shared out by torchrun."""

import json
import os
import statistics
import subprocess
import sys
import time

import torch

from recollect import distributed
from recollect.config import preset
from recollect.data.images import Images, Split
from recollect.data.preprocess import Preprocess
from recollect.decisions import resolve
from recollect.distiller import Distiller
from recollect.errors import RecollectError
from recollect.nets import Network

CONFIG = preset(
    "fast", network="convnet:width=64", bases=12, inner_steps=6, window=4, window_place="late", inner_per_class=5,
    real_per_class=20, networks_per_step=4, device="cpu",
)  # fmt: skip
ROUNDS, STEPS = 3, 4


def images() -> Images:
    """Noise of MNIST's shape: what an outer step takes does not depend on what is seen."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (600, 1, 28, 28), dtype=torch.uint8, generator=generator)
    splits = (Split(pixels[at], torch.arange(200) % 10) for at in (slice(0, 200), slice(200, 400), slice(400, 600)))
    return Images("noise", *splits, class_names=tuple("0123456789"))


def scale() -> dict[str, float]:
    """Seconds of an outer step, medians of rounds in turns; the speed-up and the share of the time in exchanges."""
    rounds = [[_torchrun(processes) for processes in (1, 2)] for _ in range(ROUNDS)]
    alone, both = ([each[which] for each in rounds] for which in (0, 1))
    found = {
        f"{name}, s an outer step": statistics.median(each["seconds"] for each in some)
        for name, some in (("1 process", alone), ("2 processes", both))
    }
    ratios = [one["seconds"] / two["seconds"] for one, two in zip(alone, both, strict=True)]
    return found | {
        "speed-up": statistics.median(ratios),
        "lowest speed-up": min(ratios),
        "share of the time in exchanges": statistics.median(each["waited"] / each["seconds"] for each in both),
        "bytes sent by each": both[0]["bytes"],
    }


def _torchrun(processes: int) -> dict[str, float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", __name__]
    ended = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if ended.returncode:
        raise RecollectError(f"{processes} processes of torchrun failed: {ended.stderr.strip().splitlines()[-1:]}")
    return json.loads(ended.stdout.splitlines()[-1])


def main() -> None:
    """What each process does; rank 0 tells."""
    torch.set_num_threads(1)
    with distributed.joined() as ranks:
        given = images()
        config = resolve(CONFIG, given)
        preprocess = Preprocess.fit(given.train.images, config.run.preprocess, config.run.device)
        distiller = Distiller(given, config, preprocess, Network(config.inner.network, given.shape, given.classes))
        state = distiller.begin()
        distiller.step(state)  # compiles
        ranks.waited, began = 0.0, time.perf_counter()
        for _ in range(STEPS):
            distiller.step(state)
        seconds = (time.perf_counter() - began) / STEPS
        sent = 4 * len(range(config.inner.networks_per_step)[distiller.share]) * (1 + sum(t.numel() for t in state.learned))
        if ranks.rank == 0:
            print(json.dumps({"seconds": seconds, "waited": ranks.waited / STEPS, "bytes": float(sent)}))


if __name__ == "__main__":
    main()
