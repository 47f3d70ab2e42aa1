"""Fresh networks trained on a recall, and what the same floats buy without us.

The protocol is a Recipe (the paper's by default) and a number of networks; a result is every network's accuracy, their
mean and deviation. Nothing is chosen here: it reads the split it is told to, once.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from recollect import distributed, fast
from recollect.config import Recipe, fits, read_recipe
from recollect.coresets import How, chosen
from recollect.data.images import Images, Split
from recollect.data.preprocess import Preprocess
from recollect.devices import find_device
from recollect.errors import RecollectError
from recollect.fast import Compute
from recollect.fast.engine import precision
from recollect.files import as_json, read_json, write_new
from recollect.header import read_header
from recollect.memory import Memory
from recollect.nets import Constructor, Network, squared_error
from recollect.queries import STAND_INS, Targets, targets_of
from recollect.seeds import Purpose, network_seed, seeded
from recollect.training import Part, Progress, accuracy, squared_errors, train

MOST_NETWORKS = 10_000  # of one evaluation
On = Literal["test", "validation"]
FOLDER = "evaluations"  # beside a memory


class _Written(TypedDict):
    name: str
    network: str
    values: list[float]
    on: str
    protocol: str
    seconds: float
    errors: list[float]


class Options(TypedDict, total=False):
    """What every evaluation can be told; `evaluate` says what each means."""

    network: Constructor | None
    networks: int
    on: On
    seed: int
    device: str
    compute: Compute
    progress: Callable[[Progress], None] | None


@dataclass(frozen=True)
class Evaluation:
    """Accuracies of fresh networks, in percent; of continuous targets their R2.

    Examples:
        >>> found = recollect.Evaluation("memory", "mlp", (95.0, 96.0), "test", "2 networks", seconds=1.0)
        >>> found.mean, round(found.deviation, 2)
        (95.5, 0.71)
    """

    name: str
    """what they were trained on"""
    network: str
    """what was trained: its name with options"""
    values: tuple[float, ...]
    """one for each network"""
    on: str
    """the split they were judged by"""
    protocol: str
    """how they were trained, in words"""
    seconds: float
    """of training and testing"""
    errors: tuple[float, ...] = ()
    """RMSE of each network in the targets' own units; none where the values are accuracies"""

    @property
    def mean(self) -> float:
        """Of all networks."""
        return sum(self.values) / len(self.values)

    @property
    def deviation(self) -> float:
        """Standard deviation over the networks (n - 1)."""
        return _deviation(self.values)

    @property
    def rmse(self) -> tuple[float, float]:
        """Mean and deviation of the errors, where there are any."""
        return sum(self.errors) / len(self.errors), _deviation(self.errors)

    def to_json(self) -> dict[str, Any]:
        """Every field, with mean, deviation and n; of continuous targets with those of the RMSE too."""
        told = asdict(self) | {"mean": self.mean, "deviation": self.deviation, "n": len(self.values)}
        if self.errors:
            return told | {"metric": "R2", "rmse": self.rmse[0], "rmse_deviation": self.rmse[1]}
        return {name: value for name, value in told.items() if name != "errors"}

    @staticmethod
    def from_json(written: dict[str, Any], where: object = "the evaluation") -> "Evaluation":
        """What to_json gave, of the right types.

        Arguments:
            written: the dict.
            where: what the error names where it is none: the file that it was read from.
        """
        kept = {"errors": []} | {field.name: written[field.name] for field in fields(Evaluation) if field.name in written}
        if not (fits(kept, _Written) and len(kept) == len(fields(Evaluation)) and _can_be(kept["values"], kept["errors"])):
            raise RecollectError(f"{where} is no evaluation of ours: delete it, and evaluate again")
        return Evaluation(**cast(Any, kept | {name: tuple(kept[name]) for name in ("values", "errors")}))

    def entry(self) -> dict[str, Any]:
        """As it stands in a memory's header: no times, so that the same run gives the same file."""
        kept = ("network", "mean", "deviation", "n", "on", "protocol", "metric", "rmse", "rmse_deviation")
        return {name: value for name, value in self.to_json().items() if name in kept}


def _deviation(values: Sequence[float]) -> float:
    """Over networks (n - 1)."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _can_be(values: list[float], errors: list[float]) -> bool:
    """Whether these are percentages; or R2, each with an error."""
    if errors:
        return len(values) == len(errors) and all(value <= 1 for value in values) and all(0 <= e < math.inf for e in errors)
    return bool(values) and all(0 <= value <= 100 for value in values)


def evaluate(
    memory: Memory, images: Images, *, recipe: Recipe | None = None, name: str = "memory", **options: Unpack[Options]
) -> Evaluation:
    """Train fresh networks on all that a memory recalls, and read their accuracy on a split of its dataset.

    Arguments:
        memory: what to recall from.
        images: the memory's own dataset.
        recipe: how to train; None is the recipe in the memory's header.
        name: what to call it in tables.
        network: a function (image shape, classes) -> nn.Module instead of the recipe's named network.
        networks: how many; 20 by default.
        on: "test", or "validation" for anything that will be chosen by it.
        seed: of the networks; 0 by default.
        device: "cpu", "cuda", or "auto" (the default): cuda where there is one.
        compute: precision of the training's products: "fp32", "bf16", or "tf32" on a GPU; "auto" is TF32 there, and on a CPU
            bf16 for wide ConvNets where the processor has it, which the protocol then says.
        progress: told how far the training is.

    Returns:
        An Evaluation: every network's accuracy, their mean and deviation; of continuous targets R2 and RMSE.

    Examples:
        >>> images = recollect.load("digits")
        >>> config = recollect.preset("fast", network="mlp:width=32", inner_steps=5, window=5, outer_steps=3)
        >>> found = recollect.evaluate(recollect.distill(images, config), images, networks=2)
        >>> len(found.values), found.on
        (2, 'test')
    """
    if set(memory.class_names) < set(images.class_names):
        images = images.only(memory.class_names)
    if images.shape != memory.image_shape or images.class_names != memory.class_names:
        raise RecollectError(
            f"the memory is of {memory.header.dataset} ({len(memory.class_names)} classes of {list(memory.image_shape)}), "
            f"the data is {images.name} ({images.classes} classes of {list(images.shape)}): give the memory's own dataset"
        )
    recipe, recalled = recipe or memory_recipe(memory), memory.recall()
    targets = memory.asked if isinstance(memory.asked, Targets) else None
    if (targets is None) != (images.train.targets is None):
        raise RecollectError(f"one of {memory.name} and {images.name} has continuous targets: give the memory's own dataset")
    return _measure(name, lambda *_: recalled, images, memory.preprocess(images), recipe, targets, **options)


def keep(memory: Path, rows: Sequence[tuple[Evaluation, str]], folder: Path | None = None) -> Path:
    """Write evaluations of a memory's file, each with a word on its size, into evaluations/ beside it (or in a folder), by a name
    of their own: nothing that is there is replaced."""
    ours, stem = [found for found, _ in rows if found.name == "memory"], memory.stem if memory.stem != "memory" else ""
    networks = "+".join(dict.fromkeys(found.network for found in ours))
    epochs = re.findall(r"\d+ epochs", ours[0].protocol)
    parts = [stem, networks, ours[0].on, *epochs, f"{len(ours[0].values)} networks"]
    name = re.sub(r"[^\w.,=+-]", "_", "-".join(filter(None, parts)).replace(" ", "-"))
    name = name.encode()[:160].decode(errors="ignore")  # file systems count bytes
    paths = ((folder or memory.parent) / FOLDER / f"{name}{'' if number == 1 else f'-{number}'}.json" for number in count(1))
    known = {"memory": memory.name, "checksum": read_header(memory)[0].checksum}
    return write_new(paths, as_json(known | {"rows": [found.to_json() | {"size": size} for found, size in rows]}))


def kept(memory: Path) -> list[Path]:
    """The files of all evaluations of a memory's file as it is now, the oldest first; one of 0.1, evaluation.json, too."""
    found = [*(memory.parent / FOLDER).glob("*.json"), memory.parent / "evaluation.json"]
    written = sorted(filter(Path.is_file, found), key=lambda path: (path.stat().st_mtime_ns, path.name))
    checksum = read_header(memory)[0].checksum
    told = {path: read_json(path) for path in written}
    named = [path for path in written if told[path].get("memory", "memory.safetensors") == memory.name]
    return [path for path in named if told[path].get("checksum", checksum) == checksum]


def memory_recipe(memory: Memory) -> Recipe:
    return read_recipe(memory.header.recipe, "the memory's recipe") if memory.header.recipe else Recipe()


def examples(images: Images, per_class: int) -> int:
    """How many a budget of so many images per class stands for."""
    return per_class * (images.classes if images.train.targets is None else STAND_INS)


def random_real(images: Images, per_class: int, preprocess: Preprocess, recipe: Recipe, **options: Unpack[Options]) -> Evaluation:
    """The baseline of the same floats: `per_class` random training images of each class, drawn anew for each network; of
    continuous targets ten times as many of all."""
    device, targets = find_device(options.get("device", "auto")), _targets(images)
    classes = 1 if targets else images.classes
    count = examples(images, per_class) // classes

    def draw(seed: int, number: int) -> Part:
        generator = seeded(seed, Purpose.RANDOM_REAL, number)
        rows = []
        for label in range(classes):
            of_class = (images.train.labels == label).nonzero().flatten()
            rows.append(of_class[torch.randperm(len(of_class), generator=generator)[:count]])
        split = images.train[torch.cat(rows)]
        return preprocess.on(device, split.images), _truth(split, targets)

    return _measure("random real images", draw, images, preprocess, recipe, targets, **options)


def chosen_real(
    images: Images,
    how: How | Literal["random"],
    per_class: int,
    preprocess: Preprocess,
    recipe: Recipe,
    **options: Unpack[Options],
) -> Evaluation:
    """The baseline of the same floats: `per_class` training images of each class, at "random" (see `random_real`), or chosen by
    "herding" or "k-center" of the features of a network that was trained briefly (coresets.py); then all networks have the same.
    """
    if how == "random":
        return random_real(images, per_class, preprocess, recipe, **options)
    if images.train.targets is not None:
        raise RecollectError(f"{how} chooses within classes, and {images.name} has continuous targets: give --baselines random")
    device, seed = find_device(options.get("device", "auto")), options.get("seed", 0)
    prepared, network = preprocess.on(device, images.train.images), options.get("network")
    rows = chosen(images, prepared, how, per_class, recipe, network=network, seed=seed, device=device)
    part = prepared[rows.to(device)], images.train.labels[rows]
    return _measure(f"real images by {how}", lambda *_: part, images, preprocess, recipe, None, **options)


def full_data(images: Images, preprocess: Preprocess, recipe: Recipe, **options: Unpack[Options]) -> Evaluation:
    """The upper bound: all training images."""
    device, targets = find_device(options.get("device", "auto")), _targets(images)
    everything = (preprocess.on(device, images.train.images), _truth(images.train, targets))
    return _measure("all the data", lambda *_: everything, images, preprocess, recipe, targets, **options)


def mean_predictor(images: Images, on: On = "test") -> Evaluation:
    """What no network is needed for: the mean of the training targets, whatever the image."""
    targets, began = targets_of(images), time.perf_counter()
    truth = _truth(_split(images, on), targets)
    ((r2, rmse),) = _scores([truth.double().square().mean(0)], truth, targets)
    return Evaluation("mean of the targets", "none", (r2,), on, "nothing is trained", time.perf_counter() - began, (rmse,))


def _targets(images: Images) -> Targets | None:
    return None if images.train.targets is None else targets_of(images)


def _truth(split: Split, targets: Targets | None) -> Tensor:
    """What networks are trained on and judged by: labels, or standardised targets."""
    return split.labels if targets is None or split.targets is None else targets.prepare(split.targets)


def _split(images: Images, on: On) -> Split:
    if on not in ("test", "validation"):
        raise RecollectError(f"cannot evaluate on '{on}': give test or validation")
    return images.test if on == "test" else images.validation


def _scores(errors: Sequence[Tensor], truth: Tensor, targets: Targets) -> list[tuple[float, float]]:
    """(R2, RMSE) of each network from its mean squared errors [targets]: R2 is the mean over the targets, RMSE in their units."""
    spread, std = truth.double().var(0, correction=0).cpu(), torch.tensor(targets.std, dtype=torch.float64)
    squares = [error.cpu() for error in errors]
    return [(float((1 - e / spread).mean()), float((e * std.square()).mean().sqrt())) for e in squares]


def _measure(
    name: str,
    source: Callable[[int, int], Part],
    images: Images,
    preprocess: Preprocess,
    recipe: Recipe,
    targets: Targets | None,
    *,
    network: Constructor | None = None,
    networks: int = 20,
    on: On = "test",
    seed: int = 0,
    device: str = "auto",
    compute: Compute = "auto",
    progress: Callable[[Progress], None] | None = None,
) -> Evaluation:
    """Train one network on each source(seed, number), and judge it."""
    if not 1 <= networks <= MOST_NETWORKS:
        raise RecollectError(f"number of networks is {networks}: give 1 to {MOST_NETWORKS:,}")
    split, began = _split(images, on), time.perf_counter()
    device = find_device(device)
    net = Network(network or recipe.network, images.shape, images.classes, squared_error if targets else cross_entropy)
    judged = preprocess.on(device, split.images), _truth(split, targets).to(device)
    flat, used = fast.passes(net, device, compute, half=False)
    ranks, numbers = distributed.current(), range(networks)
    mine = numbers[ranks.share()]
    if len(mine) == 1 < networks and flat.stacks and device == "cpu":  # side by side its sums are rounded otherwise than alone
        numbers = [mine[0], next(number for number in numbers if number != mine[0])]
    else:
        numbers = mine
    parts = [source(seed, number) for number in numbers]
    seeds = [network_seed(seed, Purpose.NETWORK, number) for number in numbers]
    trained = train(net, parts, recipe, seeds, device, compute, progress)[: len(mine)]
    with precision(used):
        if targets:
            found = _scores([squared_errors(net, params, *judged) for params in trained], judged[1], targets)
        else:
            found = [(100 * accuracy(net, params, *judged),) for params in trained]
    rows = ranks.rows(torch.tensor(found, dtype=torch.float64).view(len(trained), 2 if targets else 1), networks)
    values, *errors = (tuple(column) for column in rows.T.tolist())
    shown = "custom " + getattr(network, "__qualname__", "network") if network else recipe.network
    return Evaluation(name, shown, values, on, protocol(recipe, networks, used), time.perf_counter() - began, *errors)


def protocol(recipe: Recipe, networks: int, used: str) -> str:
    text = f"{networks} networks, {recipe.epochs} epochs, batch {recipe.batch}, SGD {recipe.lr:g}, momentum {recipe.momentum:g}"
    return ", ".join([text, *([recipe.augment] if recipe.augment != "none" else []), *(["bf16"] if used == "bf16" else [])])
