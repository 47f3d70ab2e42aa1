"""What a run takes, told before it is started: arithmetic, memory and what goes over the wire by its settings alone; seconds by a
short measurement on this machine, or by the rate of another device.

The rates were measured where a DEVICE says so (docs/scale.md); others are by the chip's peak, and estimates.
"""

import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from recollect.budget import Budget
from recollect.config import DistillConfig, changed
from recollect.continual.config import ContinualConfig
from recollect.continual.run import run as run_stream
from recollect.data.images import Images
from recollect.data.preprocess import Preprocess
from recollect.decisions import query_of, resolve, training_split
from recollect.distiller import Distiller, prepared_targets
from recollect.errors import unknown
from recollect.nets import Network, Shape, squared_error
from recollect.queries import STAND_INS

GRADIENT, ADJOINT = 3, 8  # passes of the network's products in a gradient, and in a step of the adjoint
SHORT, LONG, LEAST = 2.0, 8.0, 3  # seconds of an outer step that is timed whole, of all timing of it, and how often at least
POINTS = ((2, 1), (6, 1), (6, 5))  # inner steps and windows of short unrolls, which a long one is extrapolated from
BRIEF = 1.0  # seconds of timing each of them
BATCHES = (10, 20)  # of a task, which a whole one is extrapolated from
KEPT, SEEN = 16, 5  # bytes for each number in a network's maps: of a recalled image in the adjoint, of a real one
LARGE, PATIENCE = 64, 3600.0  # pixels a side, and seconds, beyond which there is advice


# --- by the settings alone -------------------------------------------------------------------------------------------------


class Size(NamedTuple):
    """Of a network."""

    products: float
    """floating point operations of one image's way through it"""
    maps: int
    """numbers in what its layers give for one image"""
    weights: int


def size_of(network: nn.Module, shape: Shape) -> Size:
    """Counted on tensors without memory.

    Arguments:
        network: any.
        shape: of an image.
    """
    products, maps = 0.0, 0

    def count(layer: nn.Module, _: Any, found: torch.Tensor) -> None:
        nonlocal products, maps
        if isinstance(layer, nn.Conv2d | nn.Linear):
            inside = layer.weight[0].numel()
            products, maps = products + 2.0 * found.numel() * inside, maps + found.numel()

    hooks = [layer.register_forward_hook(count) for layer in network.modules()]
    network(torch.empty(1, *shape, device="meta"))
    for hook in hooks:
        hook.remove()
    return Size(products, maps, sum(p.numel() for p in network.parameters()))


@dataclass(frozen=True)
class Work:
    """What one outer step takes of each of some devices."""

    operations: float
    """floating point operations, in passes of networks"""
    a_pass: float
    """of one image after another in one inner step: how well it fills a chip"""
    memory: float
    """bytes"""
    wire: float
    """bytes that one device sends in an outer step"""
    idle: int = 0
    """devices without an inner network"""


def work(config: DistillConfig, shape: Shape, classes: int, real: int, devices: int = 1) -> Work:
    """What an outer step takes.

    Arguments:
        config: decided for its images: it has bases, matrices and inner_per_class.
        shape: of an image.
        classes: in the data.
        real: training images in all.
        devices: that share it (torchrun).
    """
    inner, ways = config.inner, config.budget.classes_per_step or classes
    with torch.device("meta"):
        size = size_of(Network(inner.network, shape, ways).module, shape)
    batch, seen = ways * (inner.per_class or 10), ways * min(config.budget.real_per_class, max(1, real // classes))
    pixels, learned = shape[0] * shape[1] * shape[2], _numbers(config, shape, classes)
    by_batch, networks = config.run.shard == "batch", inner.networks_per_step
    own = networks if by_batch else ceil(networks / devices)
    if by_batch:
        batch, seen = ceil(batch / devices), ceil(seen / devices)
    forward, back = unroll_of(config)
    operations = own * size.products * (batch * (GRADIENT * forward + ADJOINT * back) + GRADIENT * seen)
    trajectory = 4.0 * size.weights * (back + 9) * (1 if inner.optimiser == "sgd" else 4)
    recalled = ways * (config.memory.matrices or 1) * pixels * 4 * 3  # images, their gradient, and what is small before it
    memory = own * (trajectory + size.maps * max(KEPT * batch, SEEN * seen)) + recalled
    memory += 4 * learned * (5 + networks)  # with gradient, two moments and average; and a gradient of each network
    memory += real * pixels + 2 * 4 * seen * pixels + (pixels**2 * 4 if config.run.preprocess == "zca" else 0)
    summed = 2 / devices * size.weights * (forward + back + 1) * networks  # in a ring, as libraries do it
    sent = 4.0 * (devices - 1) * (summed if by_batch else own * learned)
    return Work(operations, batch * size.products, memory, sent, 0 if by_batch else max(0, devices - networks))


def _numbers(config: DistillConfig, shape: Shape, classes: int) -> float:
    """That are learned."""
    down, bases = config.memory.downsample, config.memory.bases or 1
    return bases * shape[0] * ceil(shape[1] / down) * ceil(shape[2] / down) + (config.memory.matrices or 1) * classes * bases


def unroll_of(config: DistillConfig) -> tuple[float, float]:
    """Mean number of inner steps of an outer step, and how many of them the adjoint covers."""
    inner, objective = config.inner, config.outer.objective
    if objective in ("regression", "distributions"):
        return 1, 0
    if objective == "gradients":
        return 1 + (config.matching.network_steps or 0), 1
    covered = inner.covered if objective == "unrolled" else inner.steps
    late = inner.window is None or inner.window_place == "late" or objective != "unrolled"
    return inner.steps if late else (covered + inner.steps) / 2, covered


def sized(config: DistillConfig, shape: Shape, classes: int) -> DistillConfig:
    """A config with the sizes that data of this shape would have; nothing is read.

    Arguments:
        config: which leaves them open.
        shape: of an image.
        classes: in the data.
    """
    limits, sizes = config.budget, config.memory
    bases, matrices = Budget(limits.images_per_class, classes, shape, sizes.downsample, limits.precision).sizes(sizes)
    return changed(config, bases=bases, matrices=matrices, inner_per_class=min(config.inner.per_class or 10, matrices))


def share(config: DistillConfig, devices: int) -> float:
    """Part of one device's outer step that each of several takes.

    Arguments:
        config: of the run.
        devices: that share it.
    """
    networks = config.inner.networks_per_step
    return 1 / devices if config.run.shard == "batch" else ceil(networks / devices) / networks


# --- other devices -----------------------------------------------------------------------------------------------------------


class Device(NamedTuple):
    """How fast it is at passes of networks."""

    rate: float
    """operations a second of large passes"""
    small: float
    """operations of a pass from which on it is slower"""
    memory: float
    """bytes"""
    wire: float
    """bytes a second to other devices"""
    measured: bool = False
    power: float = 1.0
    """how much slower it is at passes that are smaller still"""

    def seconds(self, work: Work) -> float:
        """Of an outer step."""
        rate = self.rate * (work.a_pass / (work.a_pass + self.small)) ** self.power
        return work.operations / rate + work.wire / self.wire


H200 = Device(334e12, 9.1e9, 141e9, 50e9, True)
PEAK = 989e12  # of the H200 in bf16


def _by_peak(peak: float, memory: float, wire: float = 25e9) -> Device:
    return Device(H200.rate * peak / PEAK, H200.small * peak / PEAK, memory, wire)


DEVICES = {
    "h200": H200,
    "h100": _by_peak(989e12, 80e9, 50e9),
    "a100": _by_peak(312e12, 80e9),
    "l40s": _by_peak(362e12, 48e9),
    "rtx4090": _by_peak(165e12, 24e9),
    "epyc-core": Device(350e9, 5e9, 12e9, 1e9, True, 0.35),
}
"""by name; `epyc-core` is one core of an AMD EPYC that multiplies in bf16 (AVX-512)"""


def device(name: str) -> Device:
    """One of the table.

    Arguments:
        name: its name there.
    """
    if name not in DEVICES:
        raise unknown("device", name, DEVICES)
    return DEVICES[name]


# --- this machine ------------------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """Of a run on this machine."""

    each: float
    """seconds of an outer step"""
    before: float
    """seconds until the first"""
    memory: float
    """bytes at most: of the process, or of the GPU"""


def measured(images: Images, config: DistillConfig) -> Measured:
    """A few outer steps are timed. Those of many inner steps are extrapolated from shorter ones.

    Arguments:
        images: to distil.
        config: with any settings.
    """
    began, config = time.perf_counter(), resolve(config, images)
    split, query = training_split(images, config), query_of(config, images)
    preprocess = Preprocess.fit(split.images, config.run.preprocess, config.run.device, images.columns)
    loss = cross_entropy if prepared_targets(query, split) is None else squared_error
    network = Network(config.inner.network, images.shape, query.ways or images.classes, loss)
    before = time.perf_counter() - began

    def steps(least: int, most: float, **instead: Any) -> float:
        """Seconds of an outer step."""
        chosen = changed(config, **instead)
        distiller = Distiller(images, chosen, preprocess, network)
        with distiller.threads():
            state, times = distiller.begin(), []
            distiller.step(state)  # compiles, and takes its memory
            while len(times) < least or sum(times) < most:
                at = time.perf_counter()
                distiller.step(state)
                times.append(time.perf_counter() - at)
        return sum(times) / len(times)

    forward, back = unroll_of(config)
    if config.outer.objective != "unrolled":
        return Measured(steps(LEAST, LONG / 2), before, peak(config.run.device))
    points = {(t, w): steps(1, BRIEF, inner_steps=t, window=w, window_place="late", networks_per_step=1) for t, w in POINTS}
    (short, one), (longer, _), (_, several) = POINTS
    a_step = (points[POINTS[1]] - points[POINTS[0]]) / (longer - short)
    of_adjoint = (points[POINTS[2]] - points[POINTS[1]]) / (several - one)
    rest = points[POINTS[0]] - short * a_step - one * of_adjoint
    each = config.inner.networks_per_step * (max(rest, 0) + forward * a_step + back * of_adjoint)
    weights = sum(p.numel() for p in network.module.parameters())
    memory = peak(config.run.device) + 4 * max(0, back - several) * weights * (1 if config.inner.optimiser == "sgd" else 4)
    if each < SHORT:
        each, memory = steps(LEAST, LONG), peak(config.run.device)
    return Measured(each, before, memory)


def peak(device: str) -> float:
    """Bytes that were in use at most, by now.

    Arguments:
        device: whose.
    """
    if device.startswith("cuda"):
        return float(torch.cuda.max_memory_reserved(device))
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measured_stream(images: Images, config: ContinualConfig, learners: Sequence[str], device: str = "auto") -> dict[str, float]:
    """Seconds of each learner on one seed's whole stream, extrapolated from the beginning of one task.

    Arguments:
        images: to stream.
        config: with any settings.
        learners: by their names.
        device: that computes.
    """
    stream, pixels = config.stream, len(images.train.images)
    tasks = stream.tasks or max(1, images.classes // (stream.classes_per_task or 1))
    per_task = min(stream.per_task or pixels, pixels) if stream.kind != "split" else ceil(pixels / tasks)
    small = changed(config, tasks=1, buffer=ceil(config.buffer.images / tasks))
    found: list[dict[str, float]] = []
    for batches in BATCHES:
        with tempfile.TemporaryDirectory() as folder:
            short = changed(small, per_task=min(per_task, batches * stream.batch))
            began = {name: 0.0 for name in learners}
            for name in learners:
                at = time.perf_counter()
                run_stream(images, short, out=folder, seeds=1, learners=[name], device=device)
                began[name] = time.perf_counter() - at
            found.append(began)
    few, more = (min(per_task, batches * stream.batch) for batches in BATCHES)
    if more == few:
        return {name: tasks * found[1][name] for name in learners}
    each = {name: max(0.0, (found[1][name] - found[0][name]) / (more - few)) for name in learners}
    return {name: tasks * (found[1][name] + (per_task - more) * each[name]) for name in learners}


def advice(images: Images, config: DistillConfig) -> list[str]:
    """What to expect of a distillation, in two or three lines, without a measurement: the size of the memory, the time, and what
    to change where it would take long.

    Arguments:
        images: to distil.
        config: that was asked for.
    """
    config, known = resolve(config, images), len(images.train.images)
    continuous, few = images.train.targets is not None, config.budget.images_per_class
    numbers, steps = _numbers(config, images.shape, query_of(config, images).size), config.budget.outer_steps
    shape, what = "x".join(map(str, images.shape)), f"{images.classes} {'targets' if continuous else 'classes'}"
    floats = f"{few * STAND_INS} of them" if continuous else f"{few} a class"
    lines = [
        f"{known:,} images of {shape}, {what}: a memory of {numbers:,.0f} numbers, the floats of {floats} "
        f"({100 * numbers / images.train.images.numel():.2g} % of the images'; --images-per-class)"
    ]
    used, on_cpu = work(config, images.shape, images.classes, known), config.run.device == "cpu"
    chip = DEVICES["epyc-core" if on_cpu else "h200"]
    seconds = chip.seconds(used) / (torch.get_num_threads() if on_cpu else 1)
    if config.budget.minutes is not None:
        lines.append(
            f"{config.budget.minutes:g} minutes on {config.run.device}: objective, network and outer steps that fit are chosen"
        )
    elif config.outer.objective == "unrolled":
        rough = (
            f"{steps:,} outer steps through {config.inner.network} take about {in_words(seconds * steps)} on {config.run.device}"
        )
        lines.append(f"{rough}, very roughly; recollect plan measures, --minutes 10 chooses what fits into them")
    if max(images.shape[1:]) > LARGE:
        lines.append(
            f"images above {LARGE} pixels a side have not been measured, and cost by their area: --size {LARGE} shrinks them"
        )
    elif on_cpu and config.budget.minutes is None and seconds * steps > PATIENCE and "width" not in config.inner.network:
        lines.append("on a CPU, --network convnet:width=32 takes about a tenth of that")
    return lines


def in_words(seconds: float) -> str:
    """A time as a person says it, coarsely.

    Arguments:
        seconds: of it.
    """
    unit, many = next(((unit, many) for unit, many in UNITS if seconds < 90 * many), UNITS[-1])
    return f"{seconds / many:.2g} {unit}"


UNITS = (("seconds", 1), ("minutes", 60), ("hours", 3600), ("days", 86400))
