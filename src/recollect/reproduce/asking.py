"""Recall with pictures: the paper's few-shot table on CIFAR-100, and its two baselines.

Each of the disjoint tasks is asked with pictures drawn from the test split, a fresh network is trained on the answer, and judged
by the other test images of the task's classes. The baselines see the same pictures:

    nearest neighbour       the class of the nearest shot, in the features of a ConvNet trained on all training images
    classify-then-recall    that ConvNet names each group of shots, and the memory of labels recalls these classes

That ConvNet is trained as the encoder is before it is distilled with.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from recollect.composition import ask
from recollect.config import DistillConfig, Recipe
from recollect.data.images import Images, Split
from recollect.data.preprocess import Preprocess
from recollect.decisions import resolve
from recollect.distiller import encoder_recipe
from recollect.evaluation import memory_recipe
from recollect.memory import Memory
from recollect.nets import Network, Params
from recollect.seeds import Purpose, network_seed, seeded
from recollect.training import train

LABELS = "labels"  # the memory that is asked with names
Method = Callable[[list[list[Tensor]], list[Tensor]], list[Tensor]]
"""(the shots of each class of each task, other pictures of each task) -> the class of each of these, as the method sees it"""
Pretrained = tuple[Network, Params, Preprocess]


class Asking(NamedTuple):
    """How a method is measured."""

    shots: int
    ways: int = 5
    draws: int = 5
    on: Literal["test", "validation"] = "test"


def measured(
    images: Images,
    memories: Mapping[str, Memory],
    trained: Callable[[], Pretrained],
    how: Asking,
    device: str,
    methods: Sequence[str] = (),
) -> dict[str, list[list[float]]]:
    """Method -> for each draw of pictures, the accuracy of each task.

    Arguments:
        memories: that of labels, and that of so many shots (`5-shot`).
        trained: gives the baselines' network.
        methods: some of METHODS. Default: all.
    """
    tasks = [task for task in torch.randperm(images.classes, generator=seeded(0, 7)).split(how.ways) if len(task) == how.ways]
    split, found = getattr(images, how.on), {}
    for name in methods or METHODS:
        memory = memories.get(LABELS if name == "classify-then-recall" else f"{how.shots}-shot")
        method = METHODS[name](trained, memory, device)
        found[name] = [accuracies(split, method, tasks, how.shots, draw) for draw in range(how.draws)]
    return found


def accuracies(split: Split, method: Method, tasks: list[Tensor], shots: int, draw: int) -> list[float]:
    """Percent of each task's other images that its classifier gets right."""
    given, pixels, truths = [], [], []
    for number, task in enumerate(tasks):
        generator = seeded(1, draw, number)
        rows = [(split.labels == label).nonzero().flatten() for label in task.tolist()]
        rows = [each[torch.randperm(len(each), generator=generator)] for each in rows]
        given.append([split.images[each[:shots]] for each in rows])
        pixels.append(torch.cat([split.images[each[shots:]] for each in rows]))
        truths.append(torch.cat([torch.full((len(each) - shots,), place) for place, each in enumerate(rows)]))
    guesses = method(given, pixels)
    return [100 * float((guess.cpu() == truth).float().mean()) for guess, truth in zip(guesses, truths, strict=True)]


# --- methods ---------------------------------------------------------------------------------------------------------


def pretraining(images: Images, labels: DistillConfig, asked: DistillConfig, device: str) -> Callable[[], Pretrained]:
    """Trains the baselines' network once it is asked for: prepared as for the memory of labels, taught as the encoder of that of
    pictures is."""
    kind = resolve(labels, images).run.preprocess
    return functools.cache(lambda: pretrained(images, encoder_recipe(asked), kind, device))


def pretrained(images: Images, recipe: Recipe, kind: str, device: str) -> Pretrained:
    """A network trained on all training images, for the baselines."""
    network = Network(recipe.network, images.shape, images.classes)
    preprocess = Preprocess.fit(images.train.images, kind, device)
    part = preprocess.on(device, images.train.images), images.train.labels
    (params,) = train(network, [part], recipe, [0], device)
    return network, params, preprocess


def addressing(_: Callable[[], Pretrained], memory: Memory, device: str) -> Method:
    """Ours: ask, train, classify."""

    def method(given: list[list[Tensor]], pixels: list[Tensor]) -> list[Tensor]:
        asked = [ask(memory, {str(place): shots for place, shots in enumerate(task)}) for task in given]
        return taught([(each.images, each.labels) for each in asked], memory, pixels, device)

    return method


def nearest(trained: Callable[[], Pretrained], _: Memory | None, device: str) -> Method:
    network, params, preprocess = trained()
    *body, last = list(network.module.named_children())
    trunk = nn.Sequential(*(layer for _, layer in body))
    kept = {name: p for name, p in params.items() if not name.startswith(f"{last[0]}.")}

    def features(pixels: Tensor) -> Tensor:
        found = [functional_call(trunk, kept, (preprocess(some.to(device)),)).flatten(1) for some in pixels.split(1024)]
        return nn.functional.normalize(torch.cat(found), dim=1)

    @torch.no_grad()
    def method(given: list[list[Tensor]], pixels: list[Tensor]) -> list[Tensor]:
        return [
            torch.cdist(features(some), features(torch.cat(task))).argmin(1) // len(task[0])
            for task, some in zip(given, pixels, strict=True)
        ]

    return method


def classify_then_recall(trained: Callable[[], Pretrained], memory: Memory, device: str) -> Method:
    network, params, preprocess = trained()

    @torch.no_grad()
    def name(shots: Tensor) -> int:
        return int(network.logits(params, preprocess(shots.to(device))).log_softmax(1).sum(0).argmax())

    def method(given: list[list[Tensor]], pixels: list[Tensor]) -> list[Tensor]:
        parts = []
        for task in given:
            recalled = [memory.recall(name(shots))[0] for shots in task]  # two groups may be given the same name
            labels = torch.arange(len(task)).repeat_interleave(len(recalled[0]))
            parts.append((torch.cat(recalled), labels))
        return taught(parts, memory, pixels, device)

    return method


def taught(parts: list[tuple[Tensor, Tensor]], memory: Memory, pixels: list[Tensor], device: str) -> list[Tensor]:
    """The classes of pixels, by a fresh network trained on each part; all are trained side by side."""
    recipe, fits = memory_recipe(memory), memory.preprocess()
    network = Network(recipe.network, memory.image_shape, int(parts[0][1].max()) + 1)
    seeds = [network_seed(0, Purpose.NETWORK, number) for number in range(len(parts))]
    trained = train(network, parts, recipe, seeds, device)
    with torch.no_grad():
        return [
            torch.cat([network.logits(params, fits(some.to(device))).argmax(1) for some in each.split(1024)])
            for params, each in zip(trained, pixels, strict=True)
        ]


METHODS: dict[str, Callable[..., Method]] = {
    "image addressing": addressing,
    "nearest neighbour": nearest,
    "classify-then-recall": classify_then_recall,
}
