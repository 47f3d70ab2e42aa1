"""Compose: one classifier for classes of any number of memories, which need never have been seen together.

compose([a["cat"], b["truck"]])                  ->  Composition, a training set  --train-->  Classifier  ->  answers, a file
ask(memory, {"these": [...], "those": [...]})  ->  the same from a few pictures whose labels nobody knows: each group is a class
ask(memory, ["cat", "truck"])  ->  the same from names alone, which no class of the memory need have
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from recollect.classifier import Classifier, Picture, Source, read_picture, split_of
from recollect.config import Recipe
from recollect.data.folders import visible
from recollect.data.images import Images, Split
from recollect.data.preprocess import Preprocess
from recollect.devices import find_device
from recollect.errors import RecollectError
from recollect.evaluation import On, memory_recipe
from recollect.memory import Classes, Memory
from recollect.nets import Network, Shape
from recollect.queries import Pictures
from recollect.seeds import Purpose, network_seed
from recollect.training import Progress, train

MOST_NOTICES = 3  # of a group: folders hold pictures of many sizes

# --- a training set --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Composition:
    """What several memories recall of the chosen classes: a training set, the same number of images of each class."""

    images: Tensor
    """[N, C, H, W], as a network sees them"""
    labels: Tensor
    """[N], numbers of `class_names`"""
    class_names: tuple[str, ...]
    """as the memories call them; "memory/class" where two have the same name"""
    preprocess: Preprocess
    """of the first memory, and so of all"""
    recipe: Recipe
    """of the first memory"""
    sources: tuple[Source, ...]
    """of each class"""
    notice: str = ""
    """what had to be done to bring them together"""

    @property
    def image_shape(self) -> Shape:
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def split(self, *datasets: Images, on: On = "test") -> Split:
        """See Classifier.split."""
        return split_of(self.class_names, self.sources, self.image_shape, datasets, on)

    def train(
        self,
        recipe: Recipe | None = None,
        seed: int = 0,
        device: str = "auto",
        progress: Callable[[Progress], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> "Classifier":
        """A fresh network, trained on these images.

        Arguments:
            recipe: how; None is the first memory's.
            progress: told how far it is (its epoch, epochs and loss), some 100 times; it does not change the arithmetic.
            cancelled: asked after each step; once it says yes, Cancelled is raised.
        """
        recipe = recipe or self.recipe
        if recipe.network.startswith("custom "):
            raise RecollectError(
                f"the memory was distilled with a network given in Python ({recipe.network}), which no file can name: "
                "give a recipe with a named one (--network convnet)"
            )
        if seed < 0:
            raise RecollectError(f"seed is {seed}: give 0 or more")

        def told(now: Progress) -> None:
            if not math.isfinite(now.loss):
                raise RecollectError(f"the loss is not finite after epoch {now.epoch}: give a lower lr than {recipe.lr:g}")
            if progress:
                progress(now)

        network = Network(recipe.network, self.image_shape, len(self.class_names))
        seeds = [network_seed(seed, Purpose.NETWORK, 0)]  # that of an evaluation's first network
        part = self.images, self.labels
        (params,) = train(network, [part], recipe, seeds, find_device(device), progress=told, cancelled=cancelled)
        return Classifier(recipe, params, self.class_names, self.image_shape, self.preprocess, self.sources, seed)


def compose(parts: "Classes | Memory | Sequence[Classes | Memory]", images: "Images | Sequence[Images]" = ()) -> Composition:
    """Recall classes of several memories as one training set: compose([a["cat", "dog"], b["truck"]]).

    A memory as it is stands for all its classes. All must have the same image shape and whitening. Mean and standard
    deviation may differ: they are undone and done again as the first memory has them, which is exact. Where one memory recalls
    fewer images of a class than another, they are repeated.

    Arguments:
        parts: classes of memories, `memory["cat"]`, or whole memories.
        images: datasets; from the first memory's, if it is among them, a whitening file that is not at hand is fitted again.

    Returns:
        A Composition: `images` [N, C, H, W], `labels` [N], `class_names`; its `train()` gives a Classifier.

    Examples:
        >>> mnist, fashion = recollect.Memory.load("mnist-1"), recollect.Memory.load("fashion-mnist-1")
        >>> composition = recollect.compose([mnist["3"], fashion["Bag", "Coat"]])
        >>> composition.class_names, composition.images.shape
        (('3', 'Bag', 'Coat'), torch.Size([87, 1, 28, 28]))
    """
    listed = [parts] if isinstance(parts, Classes | Memory) else list(parts)
    chosen = [part[range(len(part.class_names))] if isinstance(part, Memory) else part for part in listed]
    if sum(len(part.labels) for part in chosen) < 2:
        raise RecollectError("a classifier needs two classes or more: name another")
    memories = list({id(part.memory): part.memory for part in chosen}.values())
    called = dict(zip(map(id, memories), _distinct([memory.name for memory in memories]), strict=True))
    datasets = [images] if isinstance(images, Images) else images
    first = memories[0]
    moved = {id(memory): _alike(first, memory, called) for memory in memories[1:]}
    fits = first.preprocess(next((each for each in datasets if each.name == first.header.dataset), None))
    recalls, sources = [], []
    for part in chosen:
        recalled, _ = part.memory.recall(part.labels)
        theirs = moved.get(id(part.memory))
        recalled = recalled if theirs is None else fits(theirs.undo(recalled))
        recalls += recalled.unflatten(0, (len(part.labels), -1))  # [r, C, H, W] of each class
        dataset = part.memory.header.dataset
        sources += [Source(called[id(part.memory)], dataset, name) for name in part.names]
    brought = [called[key] for key, theirs in moved.items() if theirs is not None]
    notice = f"{', '.join(brought)} brought to the mean and deviation of {called[id(first)]}" if brought else ""
    names = _class_names(sources)
    return Composition(*_as_many(recalls), names, fits, memory_recipe(first), tuple(sources), notice)


def _as_many(recalls: list[Tensor]) -> tuple[Tensor, Tensor]:
    """What is recalled of each class as images and labels, the same number of each: fewer are repeated."""
    most = max(map(len, recalls))
    images = torch.cat([some[torch.arange(most) % len(some)] for some in recalls])
    return images, torch.arange(len(recalls)).repeat_interleave(most)


def _distinct(names: list[str]) -> list[str]:
    """Names of memories, told apart by a number where they are the same; without a slash, which parts them from a class."""
    found: list[str] = []
    for name in names:
        plain = name.replace("/", "-")
        number, candidate = 1, plain
        while candidate in found:
            number += 1
            candidate = f"{plain}-{number}"
        found.append(candidate)
    return found


def _class_names(sources: list[Source]) -> tuple[str, ...]:
    """Each class by its own name, or with its memory's where another has the same."""
    for place, source in enumerate(sources):
        if source in sources[:place]:
            raise RecollectError(f"class '{source.class_name}' of {source.memory} is named twice: name it once")
    plain = [source.class_name for source in sources]
    full = [f"{source.memory}/{source.class_name}" for source in sources]
    names = [name if plain.count(name) == 1 else long for name, long in zip(plain, full, strict=True)]
    return tuple(names if len(set(names)) == len(names) else full)


def _alike(first: Memory, other: Memory, called: dict[int, str]) -> Preprocess | None:
    """The other memory's preprocessing where its images must be brought to the first one's; None where they are alike."""
    ours, theirs = called[id(first)], called[id(other)]
    if first.image_shape != other.image_shape:
        a, b = ("x".join(map(str, memory.image_shape)) for memory in (first, other))
        raise RecollectError(f"{ours} has images of {a}, {theirs} of {b}: compose memories of one image shape")
    ours_is, theirs_is = ({**memory.header.preprocessing, "pictures": None} for memory in (first, other))
    if ours_is == theirs_is:
        return None
    zca, another = ((memory.header.preprocessing.get("zca") or {}).get("file") for memory in (first, other))
    if zca is None and another is None:
        return other.preprocess()
    if zca and another:
        what = f"{ours} and {theirs} are whitened differently ({zca}, {another})"
    else:
        what = f"{ours if zca else theirs} is whitened (ZCA) and {theirs if zca else ours} is not"
    raise RecollectError(f"{what}: distil both with one whitening, or without (--preprocess normalise)")


# --- pictures whose labels nobody knows, and words ------------------------------------------------------------------


def ask(
    memory: Memory, groups: "Mapping[str, Sequence[Picture] | Tensor] | Sequence[str]", images: "Images | None" = None
) -> Composition:
    """What a memory recalls for groups of pictures, or for words, as a training set.

    Arguments:
        memory: one that is asked with pictures (distilled with query "images"), or words (with vectors of `recollect words`).
        groups: for each new class its pictures: files, PIL images, or uint8 pixels [N, C, H, W]; or the new classes' names alone,
            for a memory of words.
        images: the memory's own dataset, from which a whitening file that is not at hand is fitted again.

    Returns:
        A Composition whose classes are the groups: `images` [N, C, H, W], `labels` [N]; its `train()` gives a Classifier.

    Examples:
        >>> digits = recollect.load("digits")
        >>> asking = dict(query="images", shots=2, query_size=8, classes_per_step=3)
        >>> small = dict(network="mlp:width=16", inner_steps=2, window=2, outer_steps=2, images_per_class=4)
        >>> memory = recollect.distill(digits, recollect.preset("fast", **asking, **small))
        >>> groups = {"these": digits.test.images[:2], "those": digits.test.images[2:4]}
        >>> recollect.ask(memory, groups).class_names
        ('these', 'those')
    """
    if not isinstance(groups, Mapping):
        return _ask_words(memory, [groups] if isinstance(groups, str) else list(groups), images)
    if not isinstance(memory.asked, Pictures):
        raise RecollectError(
            f"{memory.name} is asked with labels, not with pictures: compose names its classes "
            "(a memory for pictures is distilled with --query images)"
        )
    if len(groups) < 2:
        raise RecollectError(f"a classifier needs two groups of pictures or more, not {len(groups)}: give another")
    shots, notices, pictures, stated = memory.asked.shots, [], [], memory.header.preprocessing.get("pictures")
    for name, given in groups.items():
        if len(given) < shots:
            has = f"{len(given)} picture{'' if len(given) == 1 else 's'}"
            raise RecollectError(
                f"group '{name}' has {has}, and {memory.name} was made for {shots}: give {shots} or more, "
                f"or distil a memory for fewer (--shots {max(1, len(given))})"
            )
        pixels, notice = _pixels(given, memory, stated)
        notices += [f"{name}: {notice}"] if notice else []
        pictures.append(pixels)
    preprocess = memory.preprocess(images)
    with torch.no_grad():
        recalled = [memory.recall(memory.encode(preprocess(pixels)))[0] for pixels in pictures]
    sources = tuple(Source(memory.name, memory.header.dataset, name) for name in groups)
    return Composition(*_as_many(recalled), tuple(groups), preprocess, memory_recipe(memory), sources, "; ".join(notices))


def _ask_words(memory: Memory, names: list[str], images: Images | None) -> Composition:
    if len(set(names)) < max(2, len(names)):
        raise RecollectError(f"a classifier needs two different words or more, not {', '.join(map(repr, names)) or 'none'}")
    recalled, labels = memory.recall(words=names)
    sources = tuple(Source(memory.name, memory.header.dataset, name) for name in names)
    return Composition(recalled, labels, tuple(names), memory.preprocess(images), memory_recipe(memory), sources)


def _pixels(given: "Sequence[Picture] | Tensor", memory: Memory, stated: dict[str, str] | None) -> tuple[Tensor, str]:
    """uint8 [N, C, H, W], and a word on what had to be done to the pictures."""
    if not isinstance(given, Tensor):
        read = [read_picture(picture, memory.image_shape, stated) for picture in given]
        notices = sorted({each for _, notice in read for each in notice.split("; ") if each}, reverse=True)
        more = [f"{len(notices) - MOST_NOTICES} other sizes"] * (len(notices) > MOST_NOTICES)
        return torch.stack([pixels for pixels, _ in read]), "; ".join([*notices[:MOST_NOTICES], *more])
    if given.dtype != torch.uint8 or given.shape[1:] != torch.Size(memory.image_shape):
        shape = ", ".join(map(str, memory.image_shape))
        raise RecollectError(f"the pixels are {given.dtype} {list(given.shape)}: give uint8 [N, {shape}]")
    return given, ""


def folders(paths: Sequence[Path]) -> dict[str, list[Path]]:
    """Groups of pictures by folder: the folders given, or those inside the one folder given."""
    if not paths:
        raise RecollectError("no pictures named: recollect ask MEMORY these-pictures those-pictures")
    for path in paths:
        if not path.is_dir():
            raise RecollectError(f"{path} is not a folder: give a folder of pictures for each class")
    if len(paths) == 1:
        inside = [path for path in visible(paths[0]) if path.is_dir()]
        if len(inside) < 2:
            raise RecollectError(f"{paths[0]} is one class: give a folder of pictures for each, or one that holds such folders")
        paths = inside
    groups: dict[str, list[Path]] = {}
    for path in paths:
        name = path.resolve().name
        if name in groups:
            raise RecollectError(f"two folders are called '{name}': rename one, its name is that of the class")
        groups[name] = visible(path)
    return groups
