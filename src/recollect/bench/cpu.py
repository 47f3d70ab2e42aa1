"""The ConvNet's passes by hand on a CPU: beside the plain way and the general path, beside the chip, and against float64."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from recollect import fast, unroll
from recollect.bench import CONVNET, OPTIONS, full_graph, medians, one_pass, problem, relative_error, timed
from recollect.config import Recipe, changed, preset
from recollect.data import load
from recollect.distillation import distill
from recollect.evaluation import evaluate
from recollect.fast.cpu import CpuConvNet
from recollect.fast.engine import Engine
from recollect.nets import Network

MNIST = Network("convnet", (1, 28, 28), 10)
SETTINGS = (
    ("T = 20, 50 images a step, 32x32", CONVNET, dict(batch=50, steps=20, real=50, per_class=20), None, True),
    ("T = 60, window 40, 100 images a step, MNIST", MNIST, dict(batch=100, steps=60, real=2000, per_class=29), 40, False),
)
"""name, network, what an unroll is given, its window, and whether the whole graph fits into the memory of a laptop; the second
is the default preset"""
ROUNDS = 3
DIGITS: dict[str, Any] = {"network": "convnet:width=32,depth=2", "inner_steps": 30, "window": 20, "outer_steps": 100}
"""a small distillation, to compare the precisions by what comes of it"""
EPOCHS = 300


def cpu() -> Iterator[dict[str, Any]]:
    """The figures so far, after each part."""
    modes = ["fp32", *(["bf16"] if fast.computes_in_bf16() else [])]
    found: dict[str, Any] = {f"convolutions, {mode}, GFLOP/s": _rate(mode) / 1e9 for mode in modes}
    yield found
    for name, network, sizes, window, fits in SETTINGS:
        arguments, options = problem(network, **sizes), OPTIONS | {"window": window}
        ways: dict[str, Callable[[], Any]] = {"general": partial(unroll.metagradient, network.loss, *arguments, **options)}
        if fits:
            ways = {"full graph": partial(full_graph, network.loss, *arguments, **OPTIONS)} | ways
        flats = {mode: CpuConvNet(network, mode) for mode in modes}
        ways |= {mode: partial(Engine(flat, mode).metagradient, *arguments, **options) for mode, flat in flats.items()}
        for mode in modes:
            ways[mode]()  # compiles
        median = medians(ways, ROUNDS)
        found |= {f"{name}: {way}, s an outer step": seconds for way, seconds in median.items()}
        plain = "full graph" if fits else "general"
        found |= {f"{name}: {plain} / {mode}": median[plain] / median[mode] for mode in modes}
        for mode, flat in flats.items():
            work = flat.operations(sizes["batch"])
            products = sizes["steps"] * work["gradient"] + (window or sizes["steps"]) * work["adjoint"]
            products += flat.operations(sizes["real"])["gradient"]
            rate = found[f"convolutions, {mode}, GFLOP/s"] * 1e9
            found[f"{name}: {mode}, of the convolutions' rate"] = products / median[mode] / rate
        yield found
    exact = problem(CONVNET, 20, 1, 1, per_class=4).to("cpu", torch.float64)
    passes = one_pass(CONVNET, exact, {mode: CpuConvNet(CONVNET, mode) for mode in modes})
    found |= {f"{name}: relative error": relative_error(*both) for name, *both in passes}
    yield found
    if "bf16" in modes:
        found |= _accuracies()
        yield found


def _rate(mode: str, images: int = 100) -> float:
    """Products a second of the library's convolution 128 -> 128 at 16x16, forward and backward."""
    kind = torch.bfloat16 if mode == "bf16" else torch.float32
    x = torch.randn(images, 128, 16, 16, dtype=kind).to(memory_format=torch.channels_last).requires_grad_()
    w = torch.randn(128, 128, 3, 3, dtype=kind).to(memory_format=torch.channels_last).requires_grad_()
    slope = torch.ones_like(x)

    def work() -> None:
        torch.autograd.grad(F.conv2d(x, w, padding=1), (x, w), slope)

    work()
    return 3 * 2 * 9 * 128 * 128 * 256 * images / min(timed(work) for _ in range(10))


def _accuracies(seeds: int = 3) -> dict[str, float]:
    """Of a small distillation in either precision, on the digits' validation split."""
    images, found = load("digits"), {}
    recipe = Recipe(DIGITS["network"], EPOCHS)
    how: Any = dict(networks=3, on="validation", device="cpu")
    for mode in ("fp32", "bf16"):
        small = preset("fast", **DIGITS, downsample=1, init="samples", compute=mode, device="cpu")
        memories = [distill(images, changed(small, seed=seed)) for seed in range(seeds)]
        means = [evaluate(memory, images, recipe=recipe, compute=mode, **how).mean for memory in memories]
        found[f"digits, {seeds} seeds: validation accuracy in {mode}, %"] = statistics.mean(means)
        found[f"digits, {seeds} seeds: deviation in {mode}"] = statistics.stdev(means)
    return found
