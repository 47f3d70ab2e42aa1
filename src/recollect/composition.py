"""Compose: one classifier for classes of any number of memories, which need never have been seen together.

compose([a["cat"], b["truck"]])                  ->  Composition, a training set  --train-->  Classifier  ->  answers, a file
ask(memory, {"these": [...], "those": [...]})  ->  the same from a few pictures whose labels nobody knows: each group is a class
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import Tensor

from recollect.config import Recipe, from_json, to_json
from recollect.data import pictures
from recollect.data.images import Images, Split
from recollect.data.preprocess import Preprocess
from recollect.data.readers import parsing
from recollect.devices import find_device
from recollect.errors import RecollectError, unknown
from recollect.evaluation import On, memory_recipe, train
from recollect.files import sha256, write_atomically
from recollect.memory import Classes, Memory
from recollect.nets import Network, Params, Shape, constructor
from recollect.queries import Pictures
from recollect.seeds import Purpose, network_seed

FORMAT, KEY = 1, "recollect-classifier"  # of a classifier's file: its version, and where in the metadata its header is
MOST_JUDGED = 1024  # images at a time
MOST_OPTION = 2**16  # width or depth of a network: a file that asks for more is damaged
MOST_NOTICES = 3  # of a group: folders hold pictures of many sizes

Picture = Path | str | Image.Image


class Cancelled(Exception):
    """A training that was told to stop."""


class Source(NamedTuple):
    """Where a class comes from."""

    memory: str
    dataset: str
    class_name: str


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
        return _shape(self.images)

    def split(self, *datasets: Images, on: On = "test") -> Split:
        """See Classifier.split."""
        return _split(self, datasets, on)

    def train(
        self,
        recipe: Recipe | None = None,
        seed: int = 0,
        device: str = "auto",
        progress: Callable[[dict[str, Any]], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> "Classifier":
        """A fresh network, trained on these images.

        Arguments:
            recipe: how; None is the first memory's.
            progress: called after each epoch with {"epoch", "epochs", "loss"}.
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
        device, losses = find_device(device), []  # losses of all steps

        def watch(loss: float) -> None:
            losses.append(loss)
            if not math.isfinite(loss):
                raise RecollectError(
                    f"the loss is not finite after {len(losses)} steps: give a lower lr than {recipe.lr:g}"
                )
            steps = -(-len(self.labels) // recipe.batch)  # in an epoch
            if progress and len(losses) % steps == 0:
                line = {"epoch": len(losses) // steps, "epochs": recipe.epochs, "loss": sum(losses[-steps:]) / steps}
                progress(line)
            if cancelled and cancelled():
                raise Cancelled

        network = Network(recipe.network, self.image_shape, len(self.class_names))
        seeds = [network_seed(seed, Purpose.NETWORK, 0)]  # that of an evaluation's first network
        watched = None if device.startswith("cuda") and not (progress or cancelled) else watch  # or captured, faster
        (params,) = train(network, [(self.images, self.labels)], recipe, seeds, device, watch=watched)
        if not all(p.isfinite().all() for p in params.values()):
            raise RecollectError(f"the network's weights are not finite: give a lower lr than {recipe.lr:g}")
        return Classifier(recipe, params, self.class_names, self.image_shape, self.preprocess, self.sources, seed)


def compose(
    parts: "Classes | Memory | Sequence[Classes | Memory]", images: "Images | Sequence[Images]" = ()
) -> Composition:
    """Recall classes of several memories as one training set: compose([a["cat", "dog"], b["truck"]]).

    A memory as it is stands for all its classes. All must have the same image shape and whitening. Mean and standard
    deviation may differ: they are undone and done again as the first memory has them, which is exact. Where one memory recalls
    fewer images of a class than another, they are repeated.

    Arguments:
        images: datasets; from the first memory's, if it is among them, a whitening file that is not at hand is fitted again.
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
    most = max(len(memory.addressing) for memory in memories)
    recalls, sources = [], []
    for part in chosen:
        recalled, _ = part.memory.recall(part.labels)
        theirs = moved.get(id(part.memory))
        recalled = recalled if theirs is None else fits(theirs.undo(recalled) * 255)
        by_class = recalled.unflatten(0, (len(part.labels), -1))  # [Q, r, C, H, W]
        recalls.append(by_class[:, torch.arange(most) % by_class.shape[1]].flatten(0, 1))
        dataset = part.memory.header.dataset
        sources += [Source(called[id(part.memory)], dataset, name) for name in part.names]
    labels = torch.arange(len(sources)).repeat_interleave(most)
    brought = [called[key] for key, theirs in moved.items() if theirs is not None]
    notice = f"{', '.join(brought)} brought to the mean and deviation of {called[id(first)]}" if brought else ""
    names = _class_names(sources)
    return Composition(torch.cat(recalls), labels, names, fits, memory_recipe(first), tuple(sources), notice)


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
    if first.header.preprocessing == other.header.preprocessing:
        return None
    zca, another = ((memory.header.preprocessing.get("zca") or {}).get("file") for memory in (first, other))
    if zca is None and another is None:
        return other.preprocess()
    if zca and another:
        what = f"{ours} and {theirs} are whitened differently ({zca}, {another})"
    else:
        what = f"{ours if zca else theirs} is whitened (ZCA) and {theirs if zca else ours} is not"
    raise RecollectError(f"{what}: distil both with one whitening, or without (--preprocess normalise)")


# --- pictures whose labels nobody knows ---------------------------------------------------------------------------


def ask(
    memory: Memory, groups: "Mapping[str, Sequence[Picture] | Tensor]", images: "Images | None" = None
) -> Composition:
    """What a memory recalls for groups of pictures, as a training set.

    Arguments:
        memory: one that is asked with pictures (distilled with query "images").
        groups: for each new class its pictures: files, PIL images, or uint8 pixels [N, C, H, W].
        images: the memory's own dataset, from which a whitening file that is not at hand is fitted again.
    """
    if not isinstance(memory.asked, Pictures):
        raise RecollectError(
            f"{memory.name} is asked with labels, not with pictures: compose names its classes "
            "(a memory for pictures is distilled with --query images)"
        )
    if len(groups) < 2:
        raise RecollectError(f"a classifier needs two groups of pictures or more, not {len(groups)}: give another")
    shots, notices, pictures = memory.asked.shots, [], []
    for name, given in groups.items():
        if len(given) < shots:
            has = f"{len(given)} picture{'' if len(given) == 1 else 's'}"
            raise RecollectError(
                f"group '{name}' has {has}, and {memory.name} was made for {shots}: give {shots} or more, "
                f"or distil a memory for fewer (--shots {max(1, len(given))})"
            )
        pixels, notice = _pixels(given, memory)
        notices += [f"{name}: {notice}"] if notice else []
        pictures.append(pixels)
    preprocess = memory.preprocess(images)
    with torch.no_grad():
        recalled = [memory.recall(memory.encode(preprocess(pixels)))[0] for pixels in pictures]
    most = max(map(len, recalled))
    answer = torch.cat([some[torch.arange(most) % len(some)] for some in recalled])
    labels = torch.arange(len(groups)).repeat_interleave(most)
    sources = tuple(Source(memory.name, memory.header.dataset, name) for name in groups)
    return Composition(answer, labels, tuple(groups), preprocess, memory_recipe(memory), sources, "; ".join(notices))


def _pixels(given: "Sequence[Picture] | Tensor", memory: Memory) -> tuple[Tensor, str]:
    """uint8 [N, C, H, W], and a word on what had to be done to the pictures."""
    if not isinstance(given, Tensor):
        read = [read_picture(picture, memory.image_shape) for picture in given]
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
        inside = [path for path in pictures.visible(paths[0]) if path.is_dir()]
        if len(inside) < 2:
            raise RecollectError(
                f"{paths[0]} is one class: give a folder of pictures for each, or one that holds such folders"
            )
        paths = inside
    groups: dict[str, list[Path]] = {}
    for path in paths:
        name = path.resolve().name
        if name in groups:
            raise RecollectError(f"two folders are called '{name}': rename one, its name is that of the class")
        groups[name] = pictures.visible(path)
    return groups


# --- a classifier ----------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What a classifier says of a picture."""

    class_name: str
    probability: float
    probabilities: dict[str, float]
    """of every class"""
    notice: str
    """what was done to the picture first"""


@dataclass(frozen=True, eq=False)
class Classifier:
    """A trained network that knows what its inputs and outputs mean."""

    recipe: Recipe
    """its network, and how it was trained"""
    params: Params = field(repr=False)
    class_names: tuple[str, ...]
    image_shape: Shape
    preprocess: Preprocess = field(repr=False)
    sources: tuple[Source, ...]
    """where each class comes from"""
    seed: int = 0

    @cached_property
    def network(self) -> Network:
        return Network(self.recipe.network, self.image_shape, len(self.class_names))

    @torch.no_grad()
    def probabilities(self, images: Tensor) -> Tensor:
        """[N, classes] for images [N, C, H, W]: uint8 pixels, or floats as a network sees them (preprocessed)."""
        if images.ndim != 4 or _shape(images) != self.image_shape:
            shape = ", ".join(map(str, self.image_shape))
            raise RecollectError(f"the images are {list(images.shape)}: this classifier sees [N, {shape}]")
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise RecollectError(f"the images are {images.dtype}: give uint8 pixels, or floats that are preprocessed")
        device, found = next(iter(self.params.values())).device, []
        for some in images.split(MOST_JUDGED):
            some = some.to(device)
            seen = self.preprocess(some) if some.dtype == torch.uint8 else some.float()
            found.append(self.network.logits(self.params, seen).softmax(1).cpu())
        return torch.cat(found)

    def classify(self, pictures: "Picture | Sequence[Picture]") -> list[Answer]:
        """An answer for each picture, a file or a PIL image: it is resized, and made grey or coloured as the memories were."""
        listed = list(pictures) if isinstance(pictures, Sequence) and not isinstance(pictures, str) else [pictures]
        if not listed:
            raise RecollectError("there is no picture to classify: give one")
        read = [read_picture(picture, self.image_shape) for picture in listed]
        answers = []
        for row, (_, notice) in zip(self.probabilities(torch.stack([pixels for pixels, _ in read])), read, strict=True):
            best = int(row.argmax())
            each = dict(zip(self.class_names, row.tolist(), strict=True))
            answers.append(Answer(self.class_names[best], float(row[best]), each, notice))
        return answers

    def split(self, *datasets: Images, on: On = "test") -> Split:
        """The images of its classes in a split of datasets, labelled as the classifier numbers its classes.

        A class is looked for in the dataset that its memory was made of, where that is given, and else in all.
        """
        return _split(self, datasets, on)

    def confusion(self, data: "Split | Images") -> Tensor:
        """How often a class (row) was taken for a class (column): [classes, classes]. A Split has this classifier's labels;
        of Images the test split is read, matched by the classes' names."""
        split, classes = self.split(data) if isinstance(data, Images) else data, len(self.class_names)
        if len(split) == 0:
            raise RecollectError("there are no images to test the classifier on: give some of its classes")
        if not 0 <= int(split.labels.min()) <= int(split.labels.max()) < classes:
            raise RecollectError(
                f"the labels go from {int(split.labels.min())} to {int(split.labels.max())}: this classifier has "
                f"0 to {classes - 1} (split() gives them)"
            )
        answers = self.probabilities(split.images).argmax(1)
        return (split.labels.cpu() * classes + answers).bincount(minlength=classes**2).view(classes, classes)

    def accuracy(self, data: "Split | Images") -> float:
        """Share of images that are given their own class, in percent; of what, `confusion` says."""
        counts = self.confusion(data)
        return 100 * float(counts.trace()) / int(counts.sum())

    def save(self, path: "Path | str") -> None:
        """Write one .safetensors file, atomically, and beside it the whitening file that it needs, if any."""
        path = Path(path)
        tensors = {name: p.detach().cpu().contiguous() for name, p in self.params.items()}
        header = _Header(
            class_names=list(self.class_names),
            image_shape=list(self.image_shape),
            preprocessing=self.preprocess.to_json(),
            recipe=to_json(self.recipe),
            sources=[list(source) for source in self.sources],
            seed=self.seed,
            checksum=_checksum(tensors),
            format=FORMAT,
        )
        self.preprocess.save_sidecar(path.parent)
        written = json.dumps(asdict(header), sort_keys=True, allow_nan=False)
        write_atomically(path, safetensors.torch.save(tensors, {KEY: written}))

    @staticmethod
    def load(path: "Path | str") -> "Classifier":
        """Read a classifier. A damaged or foreign file gets a RecollectError; nothing in it is ever executed."""
        path = Path(path)
        try:
            return Classifier._load(path)
        except RecollectError as error:  # one line that names the file, whatever in it is wrong
            text = str(error).replace("\n", " ")
            raise RecollectError(text if str(path) in text else f"{path}: {text}") from None

    @staticmethod
    def _load(path: Path) -> "Classifier":
        header, tensors = _read(path)
        recipe = from_json(Recipe, header.recipe, f"{path}'s recipe")
        channels, height, width = header.image_shape
        shape = channels, height, width
        if _shapes(path, recipe.network, shape, len(header.class_names)) != {n: t.shape for n, t in tensors.items()}:
            raise _damaged(path, f"its tensors are not those of {recipe.network}")
        if header.checksum != _checksum(tensors) or not all(t.isfinite().all() for t in tensors.values()):
            raise _damaged(path, "its tensors do not match its checksum, or are not finite")
        preprocess = Preprocess.from_json(header.preprocessing, path.parent)
        if not preprocess.is_for(shape):
            raise _damaged(path, f"its preprocessing is not for its images of {header.image_shape}")
        sources = tuple(Source(*source) for source in header.sources)
        return Classifier(recipe, tensors, tuple(header.class_names), shape, preprocess, sources, header.seed)


def _split(of: Composition | Classifier, datasets: Sequence[Images], on: On) -> Split:
    images, labels, taken = [], [], {}
    for number, (shown, source) in enumerate(zip(of.class_names, of.sources, strict=True)):
        for data in _homes(source, datasets):
            if data.shape != of.image_shape:
                a, b = ("x".join(map(str, shape)) for shape in (data.shape, of.image_shape))
                raise RecollectError(f"{data.name} has images of {a}: this classifier sees {b}")
            other = taken.setdefault((id(data), source.class_name), shown)
            if other != shown:
                raise RecollectError(
                    f"{data.name} has one class '{source.class_name}' for both {other} and {shown}: give the datasets of both"
                )
            split = data.test if on == "test" else data.validation
            images.append(split.images[split.labels == data.class_names.index(source.class_name)])
            labels.append(torch.full((len(images[-1]),), number))
    return Split(torch.cat(images), torch.cat(labels))


def _homes(source: Source, datasets: Sequence[Images]) -> list[Images]:
    """The datasets that have images of a class: its memory's own, where that is among them."""
    homes = [data for data in datasets if data.name == source.dataset] or datasets
    found = [data for data in homes if source.class_name in data.class_names]
    if not found:
        known = [name for data in homes for name in data.class_names]
        raise unknown("class of the test data", source.class_name, known, "Add a dataset that has it (--test)")
    return found


def _shape(images: Tensor) -> Shape:
    channels, height, width = images.shape[1:]
    return channels, height, width


def read_picture(picture: Picture, shape: Shape) -> tuple[Tensor, str]:
    """A picture as uint8 pixels of this shape, and a word on what had to be done to it."""
    is_file = isinstance(picture, str | Path)
    name = str(picture) if is_file else str(getattr(picture, "filename", "") or "the picture")
    if is_file and not os.path.isfile(picture):
        raise RecollectError(f"{name} is not a file: give a PNG or JPEG file")
    if shape[0] not in (1, 3):
        raise RecollectError(f"{name} has 1 or 3 channels, and this classifier sees {shape[0]}: use probabilities()")
    with parsing(f"{name}: not a picture, or a damaged one", "give a PNG or JPEG file"):
        if is_file:
            with Image.open(picture) as opened:
                opened.load()
        else:
            opened = picture
        pixels, notices = pictures._pixels(name, opened, None, None), _lost(opened)
        if len(pixels) != shape[0]:
            notices.append("grey, made RGB" if shape[0] == 3 else "in colour, made grey")
            pixels = pictures._pixels(name, opened, None, "RGB" if shape[0] == 3 else "L")
    found = torch.from_numpy(pixels.copy())
    if found.shape[1:] != shape[1:]:
        notices.append(f"{found.shape[2]}x{found.shape[1]}, made {shape[2]}x{shape[1]}")
        found = torch.nn.functional.interpolate(found[None], shape[1:], mode="bilinear", antialias=True)[0]
    return found, "; ".join(notices)


def _lost(picture: "Image.Image") -> list[str]:
    """What a network that sees grey or RGB pixels of 8 bits will not see of it."""
    if picture.mode.startswith("I"):
        return ["of 16 bits, made 8"]
    clear = picture.has_transparency_data and np.asarray(picture.convert("RGBA"))[..., 3].min() < 255
    return ["transparent in parts, made opaque"] if clear else []


# --- its file --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Header:
    """The metadata of a classifier's file."""

    class_names: list
    image_shape: list
    preprocessing: dict
    recipe: dict
    sources: list
    seed: int
    checksum: str
    format: int


def _read(path: Path) -> tuple[_Header, Params]:
    """Header and tensors of a file, each of the right type."""
    if not os.path.isfile(path):
        raise RecollectError(f"classifier {path} does not exist: give a .safetensors file that compose has saved")
    try:
        with safe_open(path, framework="pt") as file:
            metadata, names = file.metadata() or {}, list(file.keys())
            if KEY not in metadata:
                raise _damaged(path, "a memory" if "recollect" in metadata else "without a classifier's header")
            for name in names:
                kind = file.get_slice(name).get_dtype()
                if kind != "F32":
                    raise _damaged(path, f"its tensor '{name}' is {kind}, not F32")
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise _damaged(path, f"not a whole .safetensors file: {error}") from None
    return _parsed(path, metadata[KEY]), tensors


def _parsed(path: Path, text: str) -> _Header:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raise _damaged(path, "its header is not JSON") from None
    version = raw.get("format") if isinstance(raw, dict) else None
    if type(version) is int and version > FORMAT:
        raise RecollectError(
            f"{path} has classifier format {version}, and this recollect reads up to {FORMAT}: pip install -U recollect"
        )
    if type(version) is not int or version != FORMAT:
        raise _damaged(path, f"its format is {version!r}, not {FORMAT}")
    header = from_json(_Header, raw, path)
    names, shape, sources = header.class_names, header.image_shape, header.sources
    right = {
        "class_names": all(type(name) is str for name in names) and len(set(names)) == len(names) > 0,
        "image_shape": len(shape) == 3 and all(type(side) is int and 0 < side <= MOST_OPTION for side in shape),
        "sources": len(sources) == len(names) and all(_is_source(source) for source in sources),
    }
    for name, is_right in right.items():
        if not is_right:
            raise _damaged(path, f"its '{name}' cannot be {str(getattr(header, name))[:60]!r}")
    return header


def _is_source(value: object) -> bool:
    return isinstance(value, list) and len(value) == len(Source._fields) and all(type(item) is str for item in value)


def _shapes(path: Path, network: str, shape: Shape, classes: int) -> dict[str, torch.Size]:
    """Of the parameters that a network of this name has; none is made, whatever size a damaged file asks for."""
    if any(int(number) > MOST_OPTION for number in re.findall(r"\d{1,99}", network)):
        raise _damaged(path, f"its network is '{network[:60]}'")
    with parsing(f"{path}: its network '{network[:60]}' cannot be made", "compose it again"), torch.device("meta"):
        module = constructor(network)(shape, classes)
    return {name: p.shape for name, p in module.named_parameters()}


def _checksum(tensors: Params) -> str:
    return sha256(*(tensors[name].numpy().tobytes() for name in sorted(tensors)))


def _damaged(path: Path, why: str) -> RecollectError:
    return RecollectError(f"{path} is damaged or not a classifier of recollect ({why}): compose it again")
