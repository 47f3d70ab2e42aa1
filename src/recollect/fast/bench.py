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

from recollect import unroll
from recollect.config import Recipe
from recollect.fast import Compute
from recollect.fast.compiled import compiled
from recollect.fast.convnet import ConvNet
from recollect.fast.engine import Engine, precision
from recollect.fast.flat import Flat, General
from recollect.memory import recall
from recollect.nets import Network, Params
from recollect.show import terminal
from recollect.training import train
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
    picks = torch.stack([torch.randperm(len(labels), generator=generator)[: setting.batch] for _ in range(setting.steps)])
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
    velocity = {name: torch.zeros_like(p) for name, p in params.items()}
    for rows in batches:
        kept.append({name: p.detach().cpu() for name, p in theta.items()})
        gradient = torch.autograd.grad(loss(theta, images[rows], labels[rows]), list(theta.values()))
        velocity = {name: momentum * velocity[name] + g for name, g in zip(names, gradient, strict=True)}
        theta = {name: (p - lr * velocity[name]).detach().requires_grad_() for name, p in theta.items()}
    value = loss(theta, *query)
    slope = dict(zip(names, torch.autograd.grad(value, list(theta.values())), strict=True))
    mu, by_images = {name: torch.zeros_like(p) for name, p in slope.items()}, torch.zeros_like(images)
    for t in reversed(range(len(batches) - window, len(batches))):
        weights = {name: p.to(images.device).requires_grad_() for name, p in kept[t].items()}
        seen = images[batches[t]].requires_grad_()
        mu = {name: momentum * mu[name] - lr * slope[name] for name in names}
        inner = torch.autograd.grad(loss(weights, seen, labels[batches[t]]), list(weights.values()), create_graph=True)
        dot = torch.stack([(g * mu[name]).sum() for name, g in zip(names, inner, strict=True)]).sum()
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


def engine_speed(profile: bool, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Seconds an outer iteration and peak memory of each way, at each setting; and how near the ConvNet path is to the chip.
    `save` is called after each setting."""
    network = Network("convnet", SHAPE, CLASSES)
    rate, bandwidth = _matrix_rate(), _copy_bandwidth()
    found: dict[str, Any] = {"matrix rate, TFLOP/s": rate / 1e12, "copy bandwidth, TB/s": bandwidth / 1e12}
    terminal.say(f"bf16 matrix product {rate / 1e12:.0f} TFLOP/s, copy {bandwidth / 1e12:.2f} TB/s")
    passes = {"eager": unroll.eager(network.loss), "compiled": compiled(network.loss)}
    for setting in SETTINGS:
        rows: dict[str, Any] = {}
        for name, (mode, rounds, way) in _ways(setting, network, passes).items():
            rows[name] = _measure(way, mode, rounds)
            terminal.say(f"{setting.name}: {name}: {_shown(rows[name])}")
        work = ConvNet(network, "bf16").work(setting.batch)
        window, seconds = setting.window or setting.steps, rows["(d) ConvNet, bf16"]["seconds"]
        flops, moved = (setting.steps * a + window * b for a, b in zip(work["gradient"], work["adjoint"], strict=True))
        rows["(a) / (d)"] = rows["(a) published loop, fp32"]["seconds"] / seconds
        rows["(a) in TF32 / (d)"] = rows["(a) published loop, TF32"]["seconds"] / seconds
        rows["(d) of the matrix rate"] = flops / seconds / rate
        rows["(d) of the copy bandwidth"] = moved / seconds / bandwidth
        needs = Engine(ConvNet(network, "bf16")).needs(1, setting.batch, setting.real, window)
        rows["(d) estimated before it starts, GiB"] = needs / 2**30
        found[setting.name] = rows
        save(found)
        terminal.pairs(setting.name, [(name, _shown(value)) for name, value in rows.items()])
    found["20 networks, 300 epochs on 1,150 images"] = {mode: evaluation_seconds(mode) for mode in ("tf32", "bf16")}
    for mode, seconds in found["20 networks, 300 epochs on 1,150 images"].items():
        terminal.say(f"20 networks, 300 epochs on 1,150 images, {mode}: {seconds:.1f} s")
    if profile:
        found["profile"] = profile_steps()
        terminal.say(found["profile"])
    save(found)
    return found


def _ways(setting: Setting, network: Network, passes: dict[str, unroll.Passes]) -> dict[str, tuple[str, int, Callable]]:
    """Each way to an outer iteration: its precision, how often to time it, and a function that makes the call to time, so
    that nothing of one way lives on beside the next."""
    arguments, options = problem(setting), {**OPTIONS, "window": setting.window}

    def captured(flat: Callable[[], Flat], mode: str) -> Callable:
        def make():
            engine = Engine(flat(), mode)
            return lambda: engine.metagradient(*arguments, **options)

        return make

    loop = lambda: lambda: published_loop(*arguments, **options)  # noqa: E731
    ways: dict[str, tuple[str, int, Callable]] = {
        "(a) published loop, fp32": ("fp32", 1, loop),
        "(a) published loop, TF32": ("tf32", 1, loop),
    }
    if setting.window is None:
        from recollect.bench import full_graph

        ways["(b) full graph, TF32"] = ("tf32", 1, lambda: lambda: full_graph(network.loss, *arguments, **OPTIONS))
    for name, each in passes.items():
        ways[f"(c) general, {name}, TF32"] = ("tf32", 2, captured(lambda each=each: General(network, each), "tf32"))
    for mode in ("fp32", "tf32", "bf16"):
        ways[f"(d) ConvNet, {mode}"] = (mode, 5, captured(lambda mode=mode: ConvNet(network, mode), mode))
    return ways


def evaluation_seconds(mode: Compute, networks: int = 20) -> float:
    """The paper's protocol on a recall of CIFAR-10 at 1 image per class, once its kernels are compiled."""
    _, images, labels, _, _ = problem(Setting("", 1, 1))
    network, part = Network("convnet", SHAPE, CLASSES), (images, labels)
    train(network, [part], Recipe(epochs=2), [0], "cuda", mode)
    torch.cuda.synchronize()
    began = time.perf_counter()
    train(network, [part] * networks, Recipe(), list(range(networks)), "cuda", mode)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value['seconds']:.3f} s, {value['peak GiB']:.2f} GiB" if value["seconds"] else "does not fit"


def _measure(make: Callable[[], Callable], mode: str, rounds: int) -> dict[str, Any]:
    """Median seconds after one run to warm up, and the most memory that was held."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    try:
        with precision(mode, benchmark=True):
            way = make()
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


UNROLLS = ((20, 320), (150, 100))  # steps, images a step


def exactness(save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Each precision's metagradient against float64 autograd's: relative error and cosine similarity. `save` is called after
    each.

    Where a pixel comes as near to the ReLU's kink as rounding reaches, two roundings take different sides, and the
    metagradient, which is not continuous there, differs by more than rounding. How much is in the row of float64 against
    itself, with the first weights moved by as much as float32 rounds them. So each pass is compared on its own too, and an
    unroll so small that no pixel comes that near.
    """
    found: dict[str, Any] = {}

    def note(what: str, given: Tensor, exact: Tensor) -> None:
        error = float((given - exact).norm() / exact.norm())
        cosine = float(nn.functional.cosine_similarity(given.flatten(), exact.flatten(), 0))
        found[what] = {"relative error": error, "1 - cosine": 1 - cosine}
        save(found)
        terminal.say(f"{what}: relative error {error:.1e}, cosine {cosine:.5f}")

    modes = ("fp32", "tf32", "bf16")
    network = Network("convnet", SHAPE, CLASSES)
    params, images, labels, batches, _ = problem(Setting("", 320, 1), torch.float64)
    generator = torch.Generator("cuda").manual_seed(0)
    mu = {n: torch.randn(p.shape, generator=generator, device="cuda", dtype=p.dtype) * 0.01 for n, p in params.items()}
    seen, truth = images[batches[0]], labels[batches[0]]
    slope = unroll.eager(network.loss).gradient(params, seen, truth)
    curvature, by_seen = unroll.eager(network.loss).adjoint(params, seen, truth, mu)
    for mode in modes:
        flat = ConvNet(network, mode)
        vector, direction = (flat.pack({n: p.float() for n, p in each.items()}) for each in (params, mu))
        with precision(mode):
            given = flat.gradient(vector, seen.float(), truth)
            moved, by_images = flat.adjoint(vector, seen.float(), truth, direction)
        for name, ours, exact in (
            ("gradient", given, flat.pack(slope)),
            ("Hessian times mu", moved, flat.pack(curvature)),
            ("gradient of that by the images", by_images, by_seen),
        ):
            note(f"one pass of 320 images, {name}, {mode}", ours.double(), exact.double())

    small = Network("convnet:width=16,depth=2", (1, 8, 8), CLASSES)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(20, 1, 8, 8, generator=generator)
    batches = torch.stack([torch.randperm(20, generator=generator)[:2] for _ in range(20)]).cuda()
    query = torch.randn(10, 1, 8, 8, generator=generator).cuda(), torch.arange(10).cuda()
    settings = [("T = 20, 2 images of 8x8 a step, width 16", small, small.fresh(0), images, batches, query)]
    for steps, batch in UNROLLS:
        params, images, labels, batches, query = problem(Setting("", batch, steps))
        settings.append((f"T = {steps}, {batch} images a step", network, params, images, batches, query))
    for name, net, params, images, batches, query in settings:
        labels = (torch.arange(len(images)) * CLASSES // len(images)).cuda()
        single = ({n: p.cuda() for n, p in params.items()}, images.cuda(), labels, batches, query)
        double = _double(single)
        exact = unroll.metagradient(net.loss, *double, **OPTIONS).images
        noise = torch.Generator("cuda").manual_seed(0)
        for p in double[0].values():
            p += p * (torch.rand(p.shape, generator=noise, device="cuda", dtype=p.dtype) - 0.5) * 2**-23
        note(f"{name}, float64 from weights rounded to float32", unroll.metagradient(net.loss, *double, **OPTIONS).images, exact)
        for mode in modes:
            given = Engine(ConvNet(net, mode), mode).metagradient(*single, **OPTIONS).images
            note(f"{name}, {mode}", given.double(), exact)
    return found


def _double(arguments: tuple) -> tuple:
    params, images, labels, batches, (real, truth) = arguments
    return {n: p.double() for n, p in params.items()}, images.double(), labels, batches, (real.double(), truth)
