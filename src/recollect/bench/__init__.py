"""Benchmarks on this machine: ratios, each from one run. `recollect bench` prints them; nothing else depends on them.

Here is what a CPU can do, and what both share; gpu.py measures the engine on a GPU.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recollect import unroll
from recollect.errors import RecollectError
from recollect.fast.compiled import compiled
from recollect.fast.engine import precision
from recollect.fast.flat import Flat
from recollect.memory import recall
from recollect.nets import Network, Params
from recollect.runs import environment
from recollect.show import terminal
from recollect.unroll import MetaGradient

CONVNET = Network("convnet", (3, 32, 32), 10)
OPTIONS: dict[str, Any] = {"lr": 0.01, "momentum": 0.9}
BASES, ROUNDS = 46, 5
ON_GPU = ("engine", "exactness")


def bench(what: tuple[str, ...], profile: bool, save: Callable[[dict[str, Any]], None]) -> None:
    """Run the named benchmarks and print them; `save` is called with the figures so far whenever there are more."""
    found: dict[str, Any] = {"environment": environment()}
    terminal.say(f"{found['environment']['processor']}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name in what:
        for figures in _measured(name, profile):
            found[name] = figures
            save(found)
        if name not in ON_GPU:  # they tell as they go
            terminal.pairs(name, [(key, f"{value:.3g}") for key, value in found[name].items()])


def _measured(name: str, profile: bool) -> Iterable[dict[str, Any]]:
    """The figures so far, whenever there are more."""
    if name == "cpu":
        from recollect.bench.cpu import cpu  # needs numba

        return cpu()
    if name == "scale":
        from recollect.bench.scale import scale  # which torchrun starts as a program too

        return [scale()]
    if name not in ON_GPU:
        return [{"unroll": unroll_speed, "memory": unroll_memory, "demo": demo, "startup": startup}[name]()]
    if not torch.cuda.is_available():
        raise RecollectError(f"the benchmark '{name}' needs a CUDA device, and torch sees none here")
    from recollect.bench import gpu  # needs Triton

    return gpu.engine_speed(profile) if name == "engine" else gpu.exactness()


class Problem(NamedTuple):
    """What an unroll is given, beside its loss."""

    params: Params
    images: Tensor
    labels: Tensor
    batches: Tensor
    query: tuple[Tensor, Tensor]

    def to(self, device: str, kind: torch.dtype = torch.float32) -> "Problem":
        params, (real, truth) = {name: p.to(device, kind) for name, p in self.params.items()}, self.query
        rows = self.labels.to(device), self.batches.to(device)
        return Problem(params, self.images.to(device, kind), *rows, (real.to(device, kind), truth.to(device)))


def problem(network: Network, batch: int, steps: int, real: int, per_class: int = 115) -> Problem:
    """Weights, a recall from random bases and addressing, batches of it, and images to be judged by."""
    generator = torch.Generator().manual_seed(0)
    (channels, height, width), classes = network.shape, network.classes
    bases = torch.randn(BASES, channels, height // 2, width // 2, generator=generator)
    addressing = torch.randn(per_class, classes, BASES, generator=generator) * BASES**-0.5
    images = recall(bases, addressing, torch.eye(classes), (height, width))
    labels = torch.arange(classes).repeat_interleave(per_class)
    batches = torch.stack([torch.randperm(len(labels), generator=generator)[:batch] for _ in range(steps)])
    shown = torch.randn(real, channels, height // 2, width // 2, generator=generator)
    query = nn.functional.interpolate(shown, size=(height, width), mode="bilinear"), torch.arange(real) % classes
    return Problem(network.fresh(0), images, labels, batches, query)


def timed(work: Callable[[], object]) -> float:
    """Seconds of a call, to the end of what it launched."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def medians(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each way, which come in turns."""
    seconds = [{name: timed(way) for name, way in ways.items()} for _ in range(rounds)]
    return {name: statistics.median(each[name] for each in seconds) for name in ways}


def one_pass(network: Network, given: Problem, flats: Mapping[str, Flat]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each pass over a problem's first batch: its name, what it gives in a precision, and what float64 autograd gives."""
    params, images, labels, (rows, *_), _ = given
    generator, exact = torch.Generator(images.device).manual_seed(0), unroll.eager(network.loss)
    mu = {n: torch.randn(p.shape, generator=generator, device=p.device, dtype=p.dtype) * 0.01 for n, p in params.items()}
    seen, truth = images[rows], labels[rows]
    slope, (curvature, by_seen) = exact.gradient(params, seen, truth), exact.adjoint(params, seen, truth, mu)
    for mode, flat in flats.items():
        vector, direction = (flat.pack({n: p.float() for n, p in each.items()})[None] for each in (params, mu))
        batch = seen.float()[None], truth[None]
        with precision(mode):
            found = flat.gradient(vector, *batch)
            moved, by_images = flat.adjoint(vector, *batch, direction)
        at = f"one pass of {len(seen)} images, "
        yield f"{at}gradient, {mode}", found[0].double(), flat.pack(slope).double()
        yield f"{at}Hessian times mu, {mode}", moved[0].double(), flat.pack(curvature).double()
        yield f"{at}gradient of that by the images, {mode}", by_images[0].double(), by_seen


def relative_error(given: Tensor, exact: Tensor) -> float:
    return float((given - exact).norm() / exact.norm())


def by_weights(value: Tensor, weights: Params) -> Params:
    """The gradient, to be differentiated once more."""
    return dict(zip(weights, torch.autograd.grad(value, list(weights.values()), create_graph=True), strict=True))


def full_graph(
    loss: unroll.Loss, params: Params, images: Tensor, labels: Tensor, batches: Tensor, query, lr: float, momentum: float
) -> MetaGradient:
    """The plain way: the whole inner loop as one autograd graph. What everybody writes first, and the baseline here."""
    images = images.detach().requires_grad_()
    params = {name: p.detach().requires_grad_() for name, p in params.items()}
    velocity = {name: torch.zeros_like(p) for name, p in params.items()}
    for rows in batches:
        gradient = by_weights(loss(params, images[rows], labels[rows]), params)
        velocity = {name: momentum * velocity[name] + g for name, g in gradient.items()}
        params = {name: p - lr * velocity[name] for name, p in params.items()}
    value = loss(params, *query)
    (by_images,) = torch.autograd.grad(value, images)
    return MetaGradient(value.detach(), by_images, {name: p.detach() for name, p in params.items()})


def unroll_speed() -> dict[str, float]:
    """Seconds an outer step of T = 20, batch 50, in turns, each side's median of five; and how far the gradients part.

    Each pass alone agrees with float64 to about 1e-6; over an unroll in float32 two orders of summation part further,
    wherever rounding flips a ReLU.
    """
    arguments, fast = (CONVNET.loss, *problem(CONVNET, 50, 20, 50, per_class=20)), compiled(CONVNET.loss)
    sides: dict[str, Callable[[], MetaGradient]] = {
        "full graph": partial(full_graph, *arguments, **OPTIONS),
        "eager": partial(unroll.metagradient, *arguments, **OPTIONS),
        "compiled": partial(unroll.metagradient, *arguments, **OPTIONS, passes=fast),
    }
    warm_up = timed(sides["compiled"])  # compiles
    median = medians(sides, ROUNDS)
    given, exact = sides["compiled"]().images, sides["full graph"]().images
    return {
        **{f"{name}, s an outer step": value for name, value in median.items()},
        "full graph / eager": median["full graph"] / median["eager"],
        "full graph / compiled": median["full graph"] / median["compiled"],
        "compiling, s": warm_up,
        "relative difference of the gradients": relative_error(given, exact),
    }


def unroll_memory() -> dict[str, float]:
    """Peak memory beside the stored weights at T = 10 and T = 100, each in a process of its own."""
    code = "from recollect.bench import peak; print(peak({}))"
    gib = {steps: float(_child("-W", "ignore", "-c", code.format(steps))) for steps in (10, 100)}
    figures = {f"T = {steps}, GiB beside the weights": value for steps, value in gib.items()}
    return figures | {"T = 100 / T = 10": gib[100] / gib[10]}


def peak(steps: int) -> float:
    """Peak resident memory of this process in GiB after one unroll, less the weights of the trajectory."""
    given = problem(CONVNET, 50, steps, 50, per_class=20)
    unroll.metagradient(CONVNET.loss, *given, **OPTIONS)
    weights = sum(p.nbytes for p in given.params.values()) * steps
    status = Path("/proc/self/status")
    if status.exists():  # getrusage's peak would be the parent's, if that was higher
        most = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    else:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 2**20 - weights / 2**30


def demo() -> dict[str, float]:
    """`recollect demo` end to end, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "demo"
        seconds = timed(lambda: _child("-m", "recollect", "demo", "--quiet", "--out", str(out)))
        rows = json.loads(next((out / "evaluations").iterdir()).read_text())["rows"]
    return {"seconds": seconds, **{row["name"] + ", %": row["mean"] for row in rows}}


def startup() -> dict[str, float]:
    """Best of five: import of the package with all its public names, and --help."""
    code = "import recollect\nfor name in recollect.__all__: getattr(recollect, name)"
    commands = {
        "import recollect, s": ("-c", "import recollect"),
        "import recollect and all its public names, s": ("-W", "ignore", "-c", code),
        "recollect --help, s": ("-m", "recollect", "--help"),
        "recollect distill --help, s": ("-m", "recollect", "distill", "--help"),
    }
    return {name: min(timed(partial(_child, *command)) for _ in range(5)) for name, command in commands.items()}


def _child(*command: str) -> str:
    return subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True).stdout
