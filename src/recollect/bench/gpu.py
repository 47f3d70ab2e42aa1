"""The engine measured on a GPU: against the loop that people have, against the chip, and against float64.

`recollect bench engine` and `recollect bench exactness` print these; each ratio is from one run.
"""

import gc
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from triton.testing import do_bench

from recollect import unroll
from recollect.bench import CONVNET, OPTIONS, Problem, by_weights, full_graph, one_pass, problem, relative_error, timed
from recollect.config import Recipe
from recollect.fast import Compute
from recollect.fast.compiled import compiled
from recollect.fast.convnet import ConvNet
from recollect.fast.engine import Engine, precision
from recollect.fast.flat import General
from recollect.nets import InstanceNorm, Network, Params
from recollect.show import terminal
from recollect.training import train
from recollect.unroll import MetaGradient

MODES: tuple[Compute, ...] = ("fp32", "tf32", "bf16")
REAL = 640  # images
Figures = dict[str, Any]


class Setting(NamedTuple):
    """One shape of outer iteration, on a recall of CIFAR-10 at 1 image per class."""

    name: str
    batch: int
    steps: int
    window: int | None = None


SETTINGS = (
    Setting("320 images a step", 320, 150),
    Setting("100 images a step", 100, 150),
    Setting("320 images a step, window of 50", 320, 150, 50),
)
"""T = 150 and 640 real images; the first is that of the paper's published loop."""


def _problem(batch: int, steps: int) -> Problem:
    return problem(CONVNET, batch, steps, REAL).to("cuda")


def published_loop(
    params: Params, images: Tensor, labels: Tensor, batches: Tensor, query, lr: float, momentum: float, window: int | None = None
) -> MetaGradient:
    """What the published loop does: weights go to the host at every step and come back; each step of the way back builds
    the gradient's graph and differentiates it once more; the network is torch's own modules in eager mode."""
    layers = CONVNET.construct(CONVNET.shape, CONVNET.classes).children()
    modules = (nn.GroupNorm(128, 128) if isinstance(layer, InstanceNorm) else layer for layer in layers)
    network = nn.Sequential(*modules).to(images)

    def loss(weights: Params, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(torch.func.functional_call(network, weights, (x,)), y)

    once = unroll.eager(loss)
    kept, theta, velocity = [], params, {name: torch.zeros_like(p) for name, p in params.items()}
    for rows in batches:
        kept.append({name: p.detach().cpu() for name, p in theta.items()})
        gradient = once.gradient(theta, images[rows], labels[rows])
        velocity = {name: momentum * velocity[name] + g for name, g in gradient.items()}
        theta = {name: p - lr * velocity[name] for name, p in theta.items()}
    slope, value = once.judge(theta, *query)
    by_images = torch.zeros_like(images)
    mu = {name: torch.zeros_like(p) for name, p in slope.items()}
    for t in reversed(range(len(batches) - (window or len(batches)), len(batches))):
        weights = {name: p.to(images.device).requires_grad_() for name, p in kept[t].items()}
        seen = images[batches[t]].requires_grad_()
        mu = {name: momentum * mu[name] - lr * s for name, s in slope.items()}
        inner = by_weights(loss(weights, seen, labels[batches[t]]), weights)
        dot = torch.stack([(g * mu[name]).sum() for name, g in inner.items()]).sum()
        *curvature, by_seen = torch.autograd.grad(dot, [*weights.values(), seen], materialize_grads=True)
        slope = {name: s + c for (name, s), c in zip(slope.items(), curvature, strict=True)}
        by_images.index_add_(0, batches[t], by_seen)
    return MetaGradient(value, by_images, theta)


WAYS: dict[str, tuple[str, int, Callable[[], Callable[..., MetaGradient]]]] = {
    "(a) published loop, fp32": ("fp32", 1, lambda: published_loop),
    "(a) published loop, TF32": ("tf32", 1, lambda: published_loop),
    "(b) full graph, TF32": ("tf32", 1, lambda: partial(full_graph, CONVNET.loss)),
    "(c) general, eager, TF32": ("tf32", 2, lambda: Engine(General(CONVNET, unroll.eager(CONVNET.loss)), "tf32").metagradient),
    "(c) general, compiled, TF32": ("tf32", 2, lambda: Engine(General(CONVNET, compiled(CONVNET.loss)), "tf32").metagradient),
    **{f"(d) ConvNet, {mode}": (mode, 5, lambda mode=mode: Engine(ConvNet(CONVNET, mode), mode).metagradient) for mode in MODES},
}
"""To an outer iteration: its precision, how often to time it, and what makes it, so that nothing of one way lives on beside the
next."""


def engine_speed(profile: bool) -> Iterator[Figures]:
    """Seconds an outer iteration and peak memory of each way, at each setting; and how near the ConvNet path is to the chip.
    The figures so far after each setting."""
    rate, bandwidth = _chip()
    found: Figures = {"matrix rate, TFLOP/s": rate / 1e12, "copy bandwidth, TB/s": bandwidth / 1e12}
    terminal.say(f"bf16 matrix product {rate / 1e12:.0f} TFLOP/s, copy {bandwidth / 1e12:.2f} TB/s")
    for setting in SETTINGS:
        found[setting.name] = _setting_speed(setting, rate, bandwidth)
        yield found
        terminal.pairs(setting.name, [(name, _shown(value)) for name, value in found[setting.name].items()])
    name = "20 networks, 300 epochs on 1,150 images"
    found[name] = {mode: evaluation_seconds(mode) for mode in ("tf32", "bf16")}
    for mode, seconds in found[name].items():
        terminal.say(f"{name}, {mode}: {seconds:.1f} s")
    if profile:
        found["profile"] = profile_steps()
        terminal.say(found["profile"])
    yield found


def _setting_speed(setting: Setting, rate: float, bandwidth: float) -> Figures:
    rows: Figures = {}
    arguments, options = _problem(setting.batch, setting.steps), OPTIONS | ({"window": setting.window} if setting.window else {})
    for name, (mode, rounds, make) in WAYS.items():
        if not (setting.window and name.startswith("(b)")):  # a full graph has no window
            rows[name] = _measure(lambda make=make: partial(make(), *arguments, **options), mode, rounds)
            terminal.say(f"{setting.name}: {name}: {_shown(rows[name])}")
    flat = ConvNet(CONVNET, "bf16")
    work, window, seconds = flat.work(setting.batch), setting.window or setting.steps, rows["(d) ConvNet, bf16"]["seconds"]
    flops, moved = (setting.steps * a + window * b for a, b in zip(work["gradient"], work["adjoint"], strict=True))
    return rows | {
        "(a) / (d)": rows["(a) published loop, fp32"]["seconds"] / seconds,
        "(a) in TF32 / (d)": rows["(a) published loop, TF32"]["seconds"] / seconds,
        "(d) of the matrix rate": flops / seconds / rate,
        "(d) of the copy bandwidth": moved / seconds / bandwidth,
        "(d) estimated before it starts, GiB": Engine(flat).needs(1, setting.batch, REAL, window) / 2**30,
    }


def evaluation_seconds(mode: Compute, networks: int = 20) -> float:
    """The paper's protocol on a recall of CIFAR-10 at 1 image per class, once its kernels are compiled."""
    part = _problem(1, 1)[1:3]
    train(CONVNET, [part], Recipe(epochs=2), [0], "cuda", mode)
    return timed(lambda: train(CONVNET, [part] * networks, Recipe(), list(range(networks)), "cuda", mode))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value['seconds']:.3f} s, {value['peak GiB']:.2f} GiB" if value["seconds"] else "does not fit"


def _measure(make: Callable[[], Callable[[], object]], mode: str, rounds: int) -> Figures:
    """Median seconds after one run to warm up, and the most memory that was held."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    try:
        with precision(mode, benchmark=True):
            way = make()
            way()
            seconds = statistics.median(timed(way) for _ in range(rounds))
    except torch.OutOfMemoryError:
        return {"seconds": None, "peak GiB": None}
    return {"seconds": seconds, "peak GiB": (torch.cuda.max_memory_reserved() - before) / 2**30}


def _chip() -> tuple[float, float]:
    """Operations a second of bf16 matrix products, and bytes a second of copies."""

    def rate(amount: int, work: Callable[[], object]) -> float:
        return 1000 * amount / cast(float, do_bench(work, return_mode="median"))

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source, target = (torch.zeros(2**30, dtype=torch.uint8, device="cuda") for _ in range(2))
    source.random_()
    return rate(2 * 8192**3, lambda: a @ b), rate(2 * 2**30, lambda: target.copy_(source))


def profile_steps(batch: int = 320) -> str:
    """Time by kernel of 10 inner steps and 10 adjoint steps of the ConvNet path in bf16."""
    given, flat = _problem(batch, 1), ConvNet(CONVNET, "bf16")
    vector, seen = flat.pack(given.params)[None], (given.images[None, :batch], given.labels[None, :batch])

    def steps(count: int) -> None:
        for _ in range(count):
            flat.gradient(vector, *seen)
            flat.adjoint(vector, *seen, vector)
        torch.cuda.synchronize()

    steps(2)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        steps(10)
    return found.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=70)


def exactness() -> Iterator[Figures]:
    """Each precision's metagradient against float64 autograd's: relative error and cosine similarity. The figures so far after
    each.

    Where a pixel comes as near to the ReLU's kink as rounding reaches, two roundings take different sides, and the
    metagradient, which is not continuous there, differs by more than rounding. How much is in the row of float64 against
    itself, with the first weights moved by as much as float32 rounds them. So each pass is compared on its own too, and an
    unroll so small that no pixel comes that near.
    """
    found: Figures = {}
    small = Network("convnet:width=16,depth=2", (1, 8, 8), 10)
    tiny = _unrolls("T = 20, 2 images of 8x8 a step, width 16", small, problem(small, 2, 20, 10, per_class=2).to("cuda"))
    sizes = (20, 320), (150, 100)
    large = [_unrolls(f"T = {steps}, {batch} images a step", CONVNET, _problem(batch, steps)) for steps, batch in sizes]
    passes = one_pass(CONVNET, _problem(320, 1).to("cuda", torch.float64), {mode: ConvNet(CONVNET, mode) for mode in MODES})
    for what, given, exact in chain(passes, tiny, *large):
        error = relative_error(given, exact)
        cosine = float(nn.functional.cosine_similarity(given.flatten(), exact.flatten(), 0))
        found[what] = {"relative error": error, "1 - cosine": 1 - cosine}
        yield found
        terminal.say(f"{what}: relative error {error:.1e}, cosine {cosine:.5f}")


def _unrolls(name: str, network: Network, single: Problem) -> Iterator[tuple[str, Tensor, Tensor]]:
    double = single.to("cuda", torch.float64)
    exact = unroll.metagradient(network.loss, *double, **OPTIONS).images
    noise = torch.Generator("cuda").manual_seed(0)
    for p in double.params.values():
        p += p * (torch.rand(p.shape, generator=noise, device="cuda", dtype=p.dtype) - 0.5) * 2**-23
    rounded = unroll.metagradient(network.loss, *double, **OPTIONS).images
    yield f"{name}, float64 from weights rounded to float32", rounded, exact
    for mode in MODES:
        yield f"{name}, {mode}", Engine(ConvNet(network, mode), mode).metagradient(*single, **OPTIONS).images.double(), exact
