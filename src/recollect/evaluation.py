"""Fresh networks trained on a recall, and what the same floats buy without us.

The protocol is a Recipe (the paper's by default) and a number of networks; a result is every network's accuracy, their
mean and deviation. Nothing is chosen here: it reads the split it is told to, once.
"""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor

from recollect import fast
from recollect.config import Recipe, from_json
from recollect.data import augment
from recollect.data.images import Images
from recollect.data.preprocess import Preprocess
from recollect.devices import find_device
from recollect.errors import RecollectError
from recollect.fast import Compute
from recollect.fast.engine import precision
from recollect.fast.train import batches
from recollect.fast.train import train as train_captured
from recollect.memory import Memory
from recollect.nets import Constructor, Network, Params, threads_for
from recollect.seeds import Purpose, network_seed, seeded

On = Literal["test", "validation"]
Part = tuple[Tensor, Tensor]  # images as a network sees them, labels


class Options(TypedDict, total=False):
    """What every evaluation can be told; `evaluate` says what each means."""

    network: Constructor | None
    networks: int
    on: On
    seed: int
    device: str
    compute: Compute


@dataclass(frozen=True)
class Evaluation:
    """Accuracies of fresh networks, in percent."""

    name: str
    """what they were trained on"""
    network: str
    values: tuple[float, ...]
    """one for each network"""
    on: str
    """the split they were judged by"""
    protocol: str
    seconds: float

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def deviation(self) -> float:
        """Standard deviation over the networks (n - 1)."""
        if len(self.values) < 2:
            return 0.0
        return math.sqrt(sum((value - self.mean) ** 2 for value in self.values) / (len(self.values) - 1))

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"mean": self.mean, "deviation": self.deviation, "n": len(self.values)}

    @staticmethod
    def from_json(written: dict[str, Any]) -> "Evaluation":
        kept: dict[str, Any] = {field.name: written[field.name] for field in fields(Evaluation)}
        kept["values"] = tuple(kept["values"])
        return Evaluation(**kept)

    def entry(self) -> dict[str, Any]:
        """As it stands in a memory's header: no times, so that the same run gives the same file."""
        kept = ("network", "mean", "deviation", "n", "on", "protocol")
        return {name: value for name, value in self.to_json().items() if name in kept}


def evaluate(
    memory: Memory,
    images: Images,
    *,
    recipe: Recipe | None = None,
    network: Constructor | None = None,
    networks: int = 20,
    on: On = "test",
    seed: int = 0,
    device: str = "auto",
    compute: Compute = "auto",
    name: str = "memory",
) -> Evaluation:
    """Train fresh networks on all that a memory recalls, and read their accuracy on a split of its dataset.

    Arguments:
        recipe: how to train; None is the recipe in the memory's header.
        network: a function (image shape, classes) -> nn.Module instead of the recipe's named network.
        networks: how many.
        on: "test", or "validation" for anything that will be chosen by it.
        compute: precision of the arithmetic on a GPU: "tf32", "fp32" or "bf16"; "auto" is TF32.
    """
    if set(memory.class_names) < set(images.class_names):
        images = images.only(memory.class_names)
    if images.shape != memory.image_shape or images.class_names != memory.class_names:
        raise RecollectError(
            f"the memory is of {memory.header.dataset} ({len(memory.class_names)} classes of {list(memory.image_shape)}), "
            f"the data is {images.name} ({images.classes} classes of {list(images.shape)}): give the memory's own dataset"
        )
    options = Options(network=network, networks=networks, on=on, seed=seed, device=device, compute=compute)
    recipe, recalled = recipe or memory_recipe(memory), memory.recall()
    return _measure(name, lambda *_: recalled, images, memory.preprocess(images), recipe, **options)


def memory_recipe(memory: Memory) -> Recipe:
    return from_json(Recipe, memory.header.recipe, "the memory's recipe") if memory.header.recipe else Recipe()


def random_real(
    images: Images, per_class: int, preprocess: Preprocess, recipe: Recipe, **options: Unpack[Options]
) -> Evaluation:
    """The baseline of the same floats: `per_class` random training images of each class, drawn anew for each network."""
    device = find_device(options.get("device", "auto"))

    def draw(seed: int, number: int) -> Part:
        generator = seeded(seed, Purpose.RANDOM_REAL, number)
        rows = []
        for label in range(images.classes):
            of_class = (images.train.labels == label).nonzero().flatten()
            rows.append(of_class[torch.randperm(len(of_class), generator=generator)[:per_class]])
        split = images.train[torch.cat(rows)]
        return preprocess.on(device, split.images), split.labels

    return _measure("random real images", draw, images, preprocess, recipe, **options)


def full_data(images: Images, preprocess: Preprocess, recipe: Recipe, **options: Unpack[Options]) -> Evaluation:
    """The upper bound: all training images."""
    device = find_device(options.get("device", "auto"))
    everything = (preprocess.on(device, images.train.images), images.train.labels)
    return _measure("all the data", lambda *_: everything, images, preprocess, recipe, **options)


def _measure(
    name: str,
    source: Callable[[int, int], Part],
    images: Images,
    preprocess: Preprocess,
    recipe: Recipe,
    *,
    network: Constructor | None = None,
    networks: int = 20,
    on: On = "test",
    seed: int = 0,
    device: str = "auto",
    compute: Compute = "auto",
) -> Evaluation:
    """Train on source(seed, number) and judge: side by side where that is faster, else one after another."""
    if networks < 1:
        raise RecollectError(f"number of networks is {networks}: give 1 or more")
    if on not in ("test", "validation"):
        raise RecollectError(f"cannot evaluate on '{on}': give test or validation")
    began = time.perf_counter()
    device = find_device(device)
    net = Network(network or recipe.network, images.shape, images.classes)
    split = images.test if on == "test" else images.validation
    judged = preprocess.on(device, split.images), split.labels.to(device)
    _, used = fast.passes(net, device, compute, half=False)
    group = 1 if net.convolves and device == "cpu" else networks  # one fills it
    values: list[float] = []
    for first in range(0, networks, group):
        numbers = range(first, min(first + group, networks))
        parts = [source(seed, number) for number in numbers]
        seeds = [network_seed(seed, Purpose.NETWORK, number) for number in numbers]
        trained = train(net, parts, recipe, seeds, device, compute)
        with precision(used) if device.startswith("cuda") else nullcontext():
            values += [100 * accuracy(net, params, *judged) for params in trained]
    shown = "custom " + getattr(network, "__qualname__", "network") if network else recipe.network
    return Evaluation(name, shown, tuple(values), on, protocol(recipe, networks), time.perf_counter() - began)


def protocol(recipe: Recipe, networks: int) -> str:
    text = f"{networks} networks, {recipe.epochs} epochs, batch {recipe.batch}, SGD {recipe.lr:g}, momentum {recipe.momentum:g}"
    return text if recipe.augment == "none" else f"{text}, {recipe.augment}"


def train(
    network: Network,
    parts: list[Part],
    recipe: Recipe,
    seeds: list[int],
    device: str = "cpu",
    compute: Compute = "auto",
    watch: Callable[[float], None] | None = None,
) -> list[Params]:
    """One network for each part, by SGD with momentum from fresh parameters; the same ones whether alone or together.

    `watch` is told the loss of every step, and may raise to end it: then they come one after another, uncaptured.
    """
    _check(recipe)
    if device.startswith("cuda") and not watch:
        flat, used = fast.passes(network, device, compute, half=False)
        with torch.cuda.device(device):
            return train_captured(flat, parts, recipe, seeds, device, used)
    with threads_for(network):
        if len(parts) > 1 and not watch:
            return _train_together(network, parts, recipe, seeds)
        return [_train_one(network, part, recipe, seed, device, watch) for part, seed in zip(parts, seeds, strict=True)]


def _check(recipe: Recipe) -> None:
    for name in ("epochs", "batch"):
        if getattr(recipe, name) < 1:
            raise RecollectError(f"{name} is {getattr(recipe, name)}: give 1 or more")
    if not recipe.lr > 0:
        raise RecollectError(f"lr is {recipe.lr}: give a number above 0")


def _train_one(
    network: Network,
    part: Part,
    recipe: Recipe,
    seed: int,
    device: str = "cpu",
    watch: Callable[[float], None] | None = None,
) -> Params:
    images, labels = part[0].to(device), part[1].to(device)
    params = {name: p.requires_grad_() for name, p in network.fresh(seed, device).items()}
    optimiser = torch.optim.SGD(list(params.values()), lr=recipe.lr, momentum=recipe.momentum)
    for rows, drawn in batches(len(labels), recipe, seeded(seed, Purpose.STEPS)):
        optimiser.zero_grad()
        loss = network.loss(params, augment.apply(images[rows], drawn), labels[rows])
        loss.backward()
        optimiser.step()
        if watch:
            watch(float(loss.detach()))
    return {name: p.detach() for name, p in params.items()}


def _train_together(network: Network, parts: list[Part], recipe: Recipe, seeds: list[int]) -> list[Params]:
    """All networks in one batched step; each has its own images, order and augmentation."""
    images = torch.stack([part[0] for part in parts])  # [n, N, C, H, W]
    labels = torch.stack([part[1] for part in parts])
    flat = fast.any_network(network)
    theta = torch.stack([flat.pack(network.fresh(seed)) for seed in seeds])
    speed = torch.zeros_like(theta)
    which = torch.arange(len(parts))[:, None]
    for steps in zip(*(batches(labels.shape[1], recipe, seeded(seed, Purpose.STEPS)) for seed in seeds), strict=True):
        rows = torch.stack([rows for rows, _ in steps])
        batch = torch.stack([augment.apply(x, drawn) for x, (_, drawn) in zip(images[which, rows], steps, strict=True)])
        speed.mul_(recipe.momentum).add_(flat.gradients(theta, batch, labels[which, rows]))
        theta.sub_(recipe.lr * speed)
    return [flat.unpack(vector, {}) for vector in theta]


@torch.no_grad()
def accuracy(network: Network, params: Params, images: Tensor, labels: Tensor) -> float:
    """Share of images whose highest logit is their label's."""
    right = 0
    for batch, truth in zip(images.split(2048), labels.split(2048), strict=True):
        if batch.is_cuda:
            batch = batch.contiguous(memory_format=torch.channels_last)
        right += int((network.logits(params, batch).argmax(1) == truth).sum())
    return right / len(labels)


def across(memory: Memory, images: Images, architectures: list[str], **options: Any) -> list[Evaluation]:
    """One evaluation for each architecture: a row of the cross-architecture table."""
    recipe = options.pop("recipe", None) or memory_recipe(memory)
    return [evaluate(memory, images, recipe=replace(recipe, network=name), **options) for name in architectures]
