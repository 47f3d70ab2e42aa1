"""Benchmarks on this machine: ratios, each from one run. `recollect bench` prints them; nothing else depends on them."""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recollect import unroll
from recollect.errors import RecollectError
from recollect.fast.compiled import compiled
from recollect.nets import Network
from recollect.runs import environment
from recollect.show import terminal
from recollect.unroll import MetaGradient, Params

SHAPE, CLASSES, BATCH = (3, 32, 32), 10, 50  # ConvNet-128 on 32x32 colour
ROUNDS = 5
Save = Callable[[dict[str, Any]], None]


def bench(what: tuple[str, ...], profile: bool, save: Save) -> None:
    """Run the named benchmarks and print them; `save` is called with the figures so far whenever there are more."""
    found: dict[str, Any] = {"environment": environment()}
    terminal.say(f"{found['environment']['processor']}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name in what:
        if name in ("engine", "exactness"):
            found[name] = _on_gpu(name, profile, lambda figures, name=name: save(found | {name: figures}))
            continue
        found[name] = {"unroll": unroll_speed, "memory": unroll_memory, "demo": demo, "startup": startup}[name]()
        terminal.pairs(name, [(key, f"{value:.3g}") for key, value in found[name].items()])
        save(found)


def _on_gpu(name: str, profile: bool, save: Save) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise RecollectError(f"the benchmark '{name}' needs a CUDA device, and torch sees none here")
    from recollect.fast import bench as gpu  # needs Triton

    return gpu.engine_speed(profile, save) if name == "engine" else gpu.exactness(save)


def full_graph(
    loss: unroll.Loss, params: Params, images: Tensor, labels: Tensor, batches: Tensor, query, lr: float, momentum: float
) -> MetaGradient:
    """The plain way: the whole inner loop as one autograd graph. What everybody writes first, and the baseline here."""
    images = images.detach().requires_grad_()
    params = {name: p.detach().requires_grad_() for name, p in params.items()}
    velocity = {name: torch.zeros_like(p) for name, p in params.items()}
    for rows in batches:
        value = loss(params, images[rows], labels[rows])
        for name, g in zip(params, torch.autograd.grad(value, list(params.values()), create_graph=True), strict=True):
            velocity[name] = momentum * velocity[name] + g
        params = {name: p - lr * velocity[name] for name, p in params.items()}
    value = loss(params, *query)
    (by_images,) = torch.autograd.grad(value, images)
    return MetaGradient(value.detach(), by_images, {name: p.detach() for name, p in params.items()})


def _setting(steps: int) -> tuple[Network, tuple]:
    generator = torch.Generator().manual_seed(0)
    network = Network("convnet", SHAPE, CLASSES)
    images = torch.randn(4 * BATCH, *SHAPE, generator=generator)
    labels = torch.arange(4 * BATCH) % CLASSES
    batches = torch.stack([torch.randperm(len(labels), generator=generator)[:BATCH] for _ in range(steps)])
    query = (torch.randn(BATCH, *SHAPE, generator=generator), torch.arange(BATCH) % CLASSES)
    return network, (network.loss, network.fresh(0), images, labels, batches, query)


def unroll_speed(steps: int = 20) -> dict[str, float]:
    """Seconds an outer step of T = 20, batch 50, in turns, each side's median of five; and how far the gradients part.

    Each pass alone agrees with float64 to about 1e-6; over an unroll in float32 two orders of summation part further,
    wherever rounding flips a ReLU.
    """
    network, arguments = _setting(steps)
    options = {"lr": 0.01, "momentum": 0.9}
    fast = compiled(network.loss)
    sides: dict[str, Callable[[], MetaGradient]] = {
        "full graph": lambda: full_graph(*arguments, **options),
        "eager": lambda: unroll.metagradient(*arguments, **options),
        "compiled": lambda: unroll.metagradient(*arguments, **options, passes=fast),
    }
    began = time.perf_counter()
    sides["compiled"]()  # compiles
    warm_up = time.perf_counter() - began
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    results: dict[str, Tensor] = {}
    for _ in range(ROUNDS):
        for name, side in sides.items():
            began = time.perf_counter()
            results[name] = side().images
            seconds[name].append(time.perf_counter() - began)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    gap = (results["compiled"] - results["full graph"]).norm() / results["full graph"].norm()
    return {
        **{f"{name}, s an outer step": value for name, value in median.items()},
        "full graph / eager": median["full graph"] / median["eager"],
        "full graph / compiled": median["full graph"] / median["compiled"],
        "compiling, s": warm_up,
        "relative difference of the gradients": float(gap),
    }


def unroll_memory() -> dict[str, float]:
    """Peak memory beside the stored weights at T = 10 and T = 100, each in a process of its own."""
    gib = {}
    for steps in (10, 100):
        code = f"from recollect.bench import _peak; print(_peak({steps}))"
        gib[steps] = float(_child([sys.executable, "-W", "ignore", "-c", code]))
    return {
        "T = 10, GiB beside the weights": gib[10],
        "T = 100, GiB beside the weights": gib[100],
        "T = 100 / T = 10": gib[100] / gib[10],
    }


def _peak(steps: int) -> float:
    """Peak resident memory of this process in GiB after one unroll, less the weights of the trajectory."""
    _, arguments = _setting(steps)
    unroll.metagradient(*arguments, lr=0.01, momentum=0.9)
    weights = sum(p.numel() * p.element_size() for p in arguments[1].values()) * steps
    status = Path("/proc/self/status")
    if status.exists():  # getrusage's peak would be the parent's, if that was higher
        peak = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 - weights / 2**30


def demo() -> dict[str, float]:
    """`recollect demo` end to end, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "demo"
        began = time.perf_counter()
        _child([sys.executable, "-m", "recollect", "demo", "--quiet", "--out", str(out)])
        seconds = time.perf_counter() - began
        rows = json.loads((out / "evaluation.json").read_text())["rows"]
    return {"seconds": seconds, **{row["name"] + ", %": row["mean"] for row in rows}}


def startup() -> dict[str, float]:
    """Best of five: import of the package with all its public names, and --help."""
    code = "import recollect\nfor name in recollect.__all__: getattr(recollect, name)"
    commands = {
        "import recollect, s": [sys.executable, "-c", "import recollect"],
        "import recollect and all its public names, s": [sys.executable, "-W", "ignore", "-c", code],
        "recollect --help, s": [sys.executable, "-m", "recollect", "--help"],
        "recollect distill --help, s": [sys.executable, "-m", "recollect", "distill", "--help"],
    }
    found = {}
    for name, command in commands.items():
        times = []
        for _ in range(5):
            began = time.perf_counter()
            _child(command)
            times.append(time.perf_counter() - began)
        found[name] = min(times)
    return found


def _child(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
