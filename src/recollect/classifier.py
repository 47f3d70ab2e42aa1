"""A classifier: a trained network that knows what its inputs and outputs mean, and its file.

It answers for pictures of any kind and size, and is tested on the classes that it has of any datasets.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from recollect.config import Recipe, from_json, read_recipe, to_json
from recollect.data.fitting import FORMATS_READ, background_for, fitted, full_size, is_clear, is_grey, named, open_picture
from recollect.data.images import Images, Split
from recollect.data.preprocess import Preprocess
from recollect.data.readers import parsing
from recollect.errors import RecollectError, unknown
from recollect.evaluation import On
from recollect.header import MAX_SIDE, can_prepare
from recollect.nets import Network, Params, Shape, shapes
from recollect.reading import Reading, reading
from recollect.tensorfile import Kind, checksum, plain

CLASSIFIER = Kind("classifier", "recollect-classifier", "a classifier's", 1, "compose it again")
MOST_JUDGED = 1024  # images at a time

Picture = Path | str | Image.Image


class Source(NamedTuple):
    """Where a class comes from."""

    memory: str
    dataset: str
    class_name: str


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
    """A trained network that knows what its inputs and outputs mean. `compose` and `ask` train one, `Classifier.load` reads one.

    Examples:
        >>> memory = recollect.Memory.load("mnist-1")
        >>> recipe = recollect.Recipe(network="mlp:width=16", epochs=2)
        >>> classifier = recollect.compose(memory["3", "8"]).train(recipe)
        >>> classifier.save("3-8.safetensors")
        >>> recollect.Classifier.load("3-8.safetensors").class_names
        ('3', '8')
    """

    recipe: Recipe
    """its network, and how it was trained"""
    params: Params = field(repr=False)
    """the network's weights"""
    class_names: tuple[str, ...]
    """in the order of its answers"""
    image_shape: Shape
    """(channels, height, width)"""
    preprocess: Preprocess = field(repr=False)
    sources: tuple[Source, ...]
    """where each class comes from"""
    seed: int = 0

    @cached_property
    def network(self) -> Network:
        """Its architecture."""
        return Network(self.recipe.network, self.image_shape, len(self.class_names))

    @torch.no_grad()
    def probabilities(self, images: Tensor) -> Tensor:
        """[N, classes] for images [N, C, H, W]: uint8 pixels, or floats as a network sees them (preprocessed)."""
        if images.ndim != 4 or tuple(images.shape[1:]) != self.image_shape:
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
        """An answer for each picture, a file or a PIL image: it is fitted, and made grey or coloured as the memories' were."""
        listed = list(pictures) if isinstance(pictures, Sequence) and not isinstance(pictures, str) else [pictures]
        if not listed:
            raise RecollectError("there is no picture to classify: give one")
        read = [read_picture(picture, self.image_shape, self.preprocess.pictures) for picture in listed]
        answers = []
        for row, (_, notice) in zip(self.probabilities(torch.stack([pixels for pixels, _ in read])), read, strict=True):
            best = int(row.argmax())
            each = dict(zip(self.class_names, row.tolist(), strict=True))
            answers.append(Answer(self.class_names[best], float(row[best]), each, notice))
        return answers

    def split(self, *datasets: Images, on: On = "test") -> Split:
        """The images of its classes in a split of datasets, labelled as the classifier numbers its classes.

        Arguments:
            datasets: a class is looked for in the dataset that its memory was made of, where that is given, and else in all.
            on: "test" or "validation".
        """
        return split_of(self.class_names, self.sources, self.image_shape, datasets, on)

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
        tensors = plain(self.params)
        header = _Header(
            class_names=list(self.class_names),
            image_shape=list(self.image_shape),
            preprocessing=self.preprocess.to_json(),
            recipe=to_json(self.recipe),
            sources=[list(source) for source in self.sources],
            seed=self.seed,
            checksum=_checksum(tensors),
            format=CLASSIFIER.format,
        )
        self.preprocess.save_sidecar(path.parent)
        CLASSIFIER.write(path, json.dumps(asdict(header), sort_keys=True, allow_nan=False), tensors)

    @staticmethod
    def load(path: "Path | str") -> "Classifier":
        """Read a classifier. A damaged or foreign file gets a RecollectError; nothing in it is ever executed."""
        path = Path(path)
        try:
            return Classifier._load(path)
        except RecollectError as error:  # one line that names the file, whatever in it is wrong
            text = str(error)
            raise RecollectError(text if str(path) in text else f"{path}: {text}") from None

    @staticmethod
    def _load(path: Path) -> "Classifier":
        text, infos = CLASSIFIER.read(path)
        header = _parsed(path, text)
        for name, info in infos.items():
            if info.dtype != "F32":
                raise CLASSIFIER.damaged(path, f"its tensor '{name}' is {info.dtype}, not F32")
        recipe = read_recipe(header.recipe, f"{path}'s recipe")
        channels, height, width = header.image_shape
        shape = channels, height, width
        if shapes(recipe.network, shape, len(header.class_names)) != {n: i.shape for n, i in infos.items()}:
            raise CLASSIFIER.damaged(path, f"its tensors are not those of {recipe.network}")
        tensors = CLASSIFIER.tensors(path)
        if header.checksum != _checksum(tensors) or not all(t.isfinite().all() for t in tensors.values()):
            raise CLASSIFIER.damaged(path, "its tensors do not match its checksum, or are not finite")
        preprocess = Preprocess.from_json(header.preprocessing, path.parent)
        if not preprocess.is_for(shape):
            raise CLASSIFIER.damaged(path, f"its preprocessing is not for its images of {header.image_shape}")
        sources = tuple(Source(*source) for source in header.sources)
        return Classifier(recipe, tensors, tuple(header.class_names), shape, preprocess, sources, header.seed)


def split_of(class_names: Sequence[str], sources: Sequence[Source], shape: Shape, datasets: Sequence[Images], on: On) -> Split:
    """The images of these classes in a split of datasets, labelled by their places. See Classifier.split."""
    images, labels, taken = [], [], {}
    for number, (shown, source) in enumerate(zip(class_names, sources, strict=True)):
        for data in _homes(source, datasets):
            if data.shape != shape:
                a, b = ("x".join(map(str, each)) for each in (data.shape, shape))
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


def read_picture(picture: Picture, shape: Shape, stated: dict[str, str] | None = None) -> tuple[Tensor, str]:
    """A picture as uint8 pixels of this shape, and a word on what had to be done to it.

    Arguments:
        picture: a file, or a PIL image.
        shape: (channels, height, width).
        stated: how the training pictures were fitted, as a header has it. Default: stretched.
    """
    is_file = isinstance(picture, str | Path)
    name = str(picture) if is_file else str(getattr(picture, "filename", "") or "the picture")
    if is_file and not os.path.isfile(picture):
        raise RecollectError(f"{name} is not a file: give a PNG or JPEG file")
    if shape[0] not in (1, 3):
        raise RecollectError(f"{name} has 1 or 3 channels, and this classifier sees {shape[0]}: use probabilities()")
    how = reading(**(stated or {}), colour="rgb" if shape[0] == 3 else "grey")
    with parsing(f"{name}: not a picture, or a damaged one", f"give a {FORMATS_READ} file"):
        opened = open_picture(Path(picture), max(shape[1:])) if isinstance(picture, str | Path) else picture
        found = fitted(name, opened, shape[1:], how)
        background = background_for(how, [found]) or "white"
        return torch.from_numpy(found.on(background).copy()), "; ".join(_done(opened, shape, how, background))


def _done(picture: "Image.Image", shape: Shape, how: Reading, background: str) -> list[str]:
    """What a network that sees grey or RGB pixels of 8 bits and one size will not see of a picture."""
    notices = []
    if picture.mode.startswith("I"):
        notices.append("of 16 bits, made 8")
    elif is_clear(picture):
        notices.append(f"transparent in parts, put on {named(background)}")
    if is_grey(picture) != (shape[0] == 1):
        notices.append("grey, made RGB" if shape[0] == 3 else "in colour, made grey")
    if (full := full_size(picture)) != (shape[2], shape[1]):
        done = {"stretch": "made", "crop": "cropped to", "pad": "padded to"}[how.fit]
        notices.append(f"{full[0]}x{full[1]}, {done} {shape[2]}x{shape[1]}")
    return notices


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


def _parsed(path: Path, text: str) -> _Header:
    header = from_json(_Header, CLASSIFIER.parse(text, path), path)
    names, shape, sources = header.class_names, header.image_shape, header.sources
    right = {
        "class_names": all(type(name) is str for name in names) and len(set(names)) == len(names) > 0,
        "image_shape": len(shape) == 3 and all(type(side) is int and 0 < side <= MAX_SIDE for side in shape),
        "preprocessing": can_prepare(header.preprocessing),
        "sources": len(sources) == len(names) and all(_is_source(source) for source in sources),
    }
    for name, is_right in right.items():
        if not is_right:
            raise CLASSIFIER.damaged(path, f"its '{name}' cannot be {str(getattr(header, name))[:60]!r}")
    return header


def _is_source(value: object) -> bool:
    return isinstance(value, list) and len(value) == len(Source._fields) and all(type(item) is str for item in value)


def _checksum(tensors: Params) -> str:
    return checksum(tensors[name] for name in sorted(tensors))
