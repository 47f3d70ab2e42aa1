"""The engine measured on a GPU: against the loop that people have, against the chip, and against float64.

`recollect bench engine` and `recollect bench exactness` print these; each ratio is from one run.
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recollect import report, unroll
from recollect.errors import RecollectError
from recollect.fast.convnet import ConvNet
from recollect.fast.engine import Engine, precision
from recollect.fast.flat import General
from recollect.memory import recall
from recollect.nets import Network, Params
from recollect.unroll import MetaGradient

SHAPE, CLASSES, PER_CLASS = (3, 32, 32), 10, 115  # a recall of CIFAR-10 at 1 image per class
OPTIONS: dict[str, Any] = {"lr": 0.01, "momentum": 0.9}


class Setting(NamedTuple):
    """One shape of outer iteration."""

    name: str
    batch: int
    steps: int
    window: int | None = None
    real: int = 640


SETTINGS = (
    Setting("320 images a step", 320, 150),
    Setting("100 images a step", 100, 150),
    Setting("320 images a step, window of 50", 320, 150, 50),
)
"""T = 150 and 640 real images; the first is that of the paper's published loop."""


def problem(setting: Setting, kind: torch.dtype = torch.float32) -> tuple[Params, Tensor, Tensor, Tensor, tuple]:
    """Weights, a recall from random bases and addressing, batches of it, and images to be judged by, on the GPU."""
    generator = torch.Generator().manual_seed(0)
    bases = torch.randn(46, 3, 16, 16, generator=generator)
    addressing = torch.randn(PER_CLASS, CLASSES, 46, generator=generator) * 46**-0.5
    images = recall(bases, addressing, torch.eye(CLASSES), SHAPE[1:])
    labels = torch.arange(CLASSES).repeat_interleave(PER_CLASS)
    picks = torch.stack(
        [torch.randperm(len(labels), generator=generator)[: setting.batch] for _ in range(setting.steps)]
    )
    real = torch.randn(setting.real, 3, 16, 16, generator=generator)
    query = nn.functional.interpolate(real, size=SHAPE[1:], mode="bilinear"), torch.arange(setting.real) % CLASSES
    params = Network("convnet", SHAPE, CLASSES).fresh(0)
    moved = [
        {name: p.to("cuda", kind) for name, p in params.items()},
        images.to("cuda", kind),
        labels.cuda(),
        picks.cuda(),
        (query[0].to("cuda", kind), query[1].cuda()),
    ]
    return tuple(moved)  # pyright: ignore[reportReturnType]


def published_loop(params: Params, images: Tensor, labels: Tensor, batches: Tensor, query, **options) -> MetaGradient:
    """What the published loop does: weights go to the host at every step and come back; each step of the way back builds
    the gradient's graph and differentiates it once more; the network is torch's own modules in eager mode."""
    lr, momentum, window = options["lr"], options["momentum"], options.get("window") or len(batches)
    network = _modules().to(images)
    names = list(params)

    def loss(weights: Params, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(torch.func.functional_call(network, weights, (x,)), y)

    kept, theta = [], {name: p.detach().requires_grad_() for name, p in params.items()}
    speed = {name: torch.zeros_like(p) for name, p in params.items()}
    for rows in batches:
        kept.append({name: p.detach().cpu() for name, p in theta.items()})
        gradient = torch.autograd.grad(loss(theta, images[rows], labels[rows]), list(theta.values()))
        speed = {name: momentum * speed[name] + g for name, g in zip(names, gradient, strict=True)}
        theta = {name: (p - lr * speed[name]).detach().requires_grad_() for name, p in theta.items()}
    value = loss(theta, *query)
    slope = dict(zip(names, torch.autograd.grad(value, list(theta.values())), strict=True))
    mu, by_images = {name: torch.zeros_like(p) for name, p in slope.items()}, torch.zeros_like(images)
    for t in reversed(range(len(batches) - window, len(batches))):
        weights = {name: p.to(images.device).requires_grad_() for name, p in kept[t].items()}
        seen = images[batches[t]].requires_grad_()
        mu = {name: momentum * mu[name] - lr * slope[name] for name in names}
        inner = torch.autograd.grad(
            loss(weights, seen, labels[batches[t]]), list(weights.values()), create_graph=True
        )
        dot = sum((g * mu[name]).sum() for name, g in zip(names, inner, strict=True))
        *curvature, by_seen = torch.autograd.grad(dot, [*weights.values(), seen], allow_unused=True)
        slope = {n: slope[n] if c is None else slope[n] + c for n, c in zip(names, curvature, strict=True)}
        by_images.index_add_(0, batches[t], by_seen)
    return MetaGradient(value.detach(), by_images, {name: p.detach() for name, p in theta.items()})


def _modules() -> nn.Module:
    """The ConvNet of torch's own modules."""
    layers, channels = [], SHAPE[0]
    for _ in range(3):
        layers += [nn.Conv2d(channels, 128, 3, padding=1), nn.GroupNorm(128, 128), nn.ReLU(), nn.AvgPool2d(2)]
        channels = 128
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, CLASSES))


def engine_speed(profile: bool = False, slow: bool = True) -> dict[str, Any]:
    """Seconds an outer iteration and peak memory of each way, at each setting; and how near the ConvNet path is to the chip.

    `slow` includes the general path through torch.compile (a minute to compile for each shape) and full-graph autograd.
    """
    _need_cuda()
    network = Network("convnet", SHAPE, CLASSES)
    rate, bandwidth = _matrix_rate(), _copy_bandwidth()
    found: dict[str, Any] = {"matrix rate, TFLOP/s": rate / 1e12, "copy bandwidth, TB/s": bandwidth / 1e12}
    report.say(f"bf16 matrix product {rate / 1e12:.0f} TFLOP/s, copy {bandwidth / 1e12:.2f} TB/s")
    for setting in SETTINGS:
        arguments = problem(setting)
        options = {**OPTIONS, "window": setting.window}
        ways: dict[str, tuple[str, int, Callable[[], object]]] = {
            "(a) published loop, fp32": ("fp32", 1, lambda: published_loop(*arguments, **options)),
            "(a) published loop, TF32": ("tf32", 1, lambda: published_loop(*arguments, **options)),
        }
        if slow and setting.window is None:
            from recollect.bench import full_graph

            ways["(b) full graph, TF32"] = ("tf32", 1, lambda: full_graph(network.loss, *arguments, **OPTIONS))
        general = {"eager": unroll.eager, "compiled": unroll.compiled} if slow else {"eager": unroll.eager}
        for name, make in general.items():
            engine = Engine(General(network, make(network.loss)), "tf32")
            ways[f"(c) general, {name}, TF32"] = ("tf32", 3, lambda e=engine: e.metagradient(*arguments, **options))
        for mode in ("fp32", "tf32", "bf16"):
            engine = Engine(ConvNet(network, mode), mode)
            ways[f"(d) ConvNet, {mode}"] = (mode, 5, lambda e=engine: e.metagradient(*arguments, **options))
        rows: dict[str, Any] = {}
        while ways:
            name, (mode, rounds, way) = next(iter(ways.items()))
            del ways[name]  # with its captured graphs, before the next one's memory is measured
            rows[name] = _measure(way, mode, rounds)
            del way
            seconds, peak = rows[name]["seconds"], rows[name]["peak GiB"]
            report.say(f"{setting.name}: {name}: " + (f"{seconds:.3f} s, {peak:.2f} GiB" if seconds else "does not fit"))
        work = ConvNet(network, "bf16").work(setting.batch)
        window, fast = setting.window or setting.steps, rows["(d) ConvNet, bf16"]["seconds"]
        flops, moved = (setting.steps * a + window * b for a, b in zip(work["gradient"], work["adjoint"], strict=True))
        rows["(a) / (d)"] = rows["(a) published loop, fp32"]["seconds"] / fast
        rows["(a) in TF32 / (d)"] = rows["(a) published loop, TF32"]["seconds"] / fast
        rows["(d) of the matrix rate"] = flops / fast / rate
        rows["(d) of the copy bandwidth"] = moved / fast / bandwidth
        found[setting.name] = rows
        report.pairs(setting.name, [(name, _shown(value)) for name, value in rows.items()])
    if profile:
        found["profile"] = profile_steps()
        report.say(found["profile"])
    return found


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value['seconds']:.3f} s, {value['peak GiB']:.2f} GiB" if value["seconds"] else "does not fit"


def _measure(way: Callable[[], object], mode: str, rounds: int) -> dict[str, Any]:
    """Median seconds after one run to warm up, and the most memory that was held."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        with precision(mode):
            way()
            seconds = []
            for _ in range(rounds):
                torch.cuda.synchronize()
                began = time.perf_counter()
                way()
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
    except torch.OutOfMemoryError:
        return {"seconds": None, "peak GiB": None}
    return {"seconds": statistics.median(seconds), "peak GiB": (torch.cuda.max_memory_reserved() - before) / 2**30}


def _need_cuda() -> None:
    if not torch.cuda.is_available():
        raise RecollectError("this benchmark needs a CUDA device, and torch sees none here")


def _matrix_rate(size: int = 8192) -> float:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / _device_seconds(lambda: a @ b)


def _copy_bandwidth(size: int = 2**30) -> float:
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * size / _device_seconds(lambda: target.copy_(source))


def _device_seconds(work: Callable[[], object], rounds: int = 20) -> float:
    """Median time between events on the device."""
    for _ in range(3):
        work()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


def profile_steps(batch: int = 320) -> str:
    """Time by kernel of 10 inner steps and 10 adjoint steps of the ConvNet path in bf16."""
    from torch.profiler import ProfilerActivity, profile

    network = Network("convnet", SHAPE, CLASSES)
    params, images, labels, _, _ = problem(Setting("", batch, 1))
    flat = ConvNet(network, "bf16")
    vector, mu = flat.pack(params), flat.pack(params)
    for _ in range(2):
        flat.adjoint(vector, images[:batch], labels[:batch], mu)
        flat.gradient(vector, images[:batch], labels[:batch])
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(10):
            flat.gradient(vector, images[:batch], labels[:batch])
            flat.adjoint(vector, images[:batch], labels[:batch], mu)
        torch.cuda.synchronize()
    return found.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=70)


def exactness(lengths: tuple[int, ...] = (20, 150), batch: int = 320) -> dict[str, Any]:
    """Each precision's metagradient against float64 autograd's: relative error and cosine similarity."""
    _need_cuda()
    network = Network("convnet", SHAPE, CLASSES)
    found: dict[str, Any] = {}
    for steps in lengths:
        setting = Setting("", batch, steps)
        exact = unroll.metagradient(network.loss, *problem(setting, torch.float64), **OPTIONS).images
        arguments = problem(setting)
        for mode in ("fp32", "tf32", "bf16"):
            given = Engine(ConvNet(network, mode), mode).metagradient(*arguments, **OPTIONS).images.double()
            error = float((given - exact).norm() / exact.norm())
            cosine = float(nn.functional.cosine_similarity(given.flatten(), exact.flatten(), 0))
            found[f"T = {steps}, {mode}"] = {"relative error": error, "cosine": cosine}
            report.say(f"T = {steps}, {batch} images a step, {mode}: relative error {error:.2e}, cosine {cosine:.5f}")
    return found
