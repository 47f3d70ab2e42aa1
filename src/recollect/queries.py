"""SEAM Query: what a memory is asked with. A query kind makes the vectors y of eqn 2, in an outer step and at recall.

Torch is imported when vectors are made, so that a file can say what it is asked with at once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

from recollect.config import DistillConfig
from recollect.errors import RecollectError
from recollect.limits import MOST_SIZE

if TYPE_CHECKING:
    from torch import Tensor

    from recollect.data.images import Images
    from recollect.nets import Network, Params, Shape

ENCODER = "convnet"  # makes query vectors of pictures
Form = Literal["unit", "probabilities"]
STAND_INS = 10  # continuous targets that stand for classes: in the budget, in an outer step, and in the file
CONSTANT = 1e-9  # of the largest target: a deviation below it is rounding
OLD_FORMS: dict[str, Form] = {"chances": "probabilities"}  # in files of 0.1


class Query(Protocol):
    """One kind of query, for a memory of some classes."""

    @property
    def size(self) -> int:
        """d_y: numbers of a vector"""
        ...

    @property
    def shots(self) -> int:
        """real pictures of each class that an outer step asks with"""
        ...

    @property
    def each(self) -> int:
        """queries of each class in an outer step"""
        ...

    @property
    def ways(self) -> int | None:
        """classes that are told apart, numbered by their places in the query; None: all, by their labels"""
        ...

    def fresh(self, seed: int, device: str) -> "Params":
        """What is learned beside bases and addressing; kept in the memory's file as its encoder."""
        ...

    def vectors(self, params: "Params", labels: "Tensor", pictures: "Tensor") -> "Tensor":
        """[Q, d_y] for classes [G] and their pictures [G, shots, C, H, W], or what stands beside these; the queries of a class
        together."""
        ...

    def header(self) -> dict[str, Any]:
        """What the memory's file says of it."""
        ...


@dataclass(frozen=True)
class Labels:
    """One-hot vectors of class labels: the paper's usual case."""

    size: int
    """classes"""
    shots, each, ways = 0, 1, None
    unit, has_classes = "class", True

    def fresh(self, seed: int, device: str) -> "Params":
        return {}

    def vectors(self, params: "Params", labels: "Tensor", pictures: "Tensor") -> "Tensor":
        from torch.nn.functional import one_hot

        return one_hot(labels, self.size).float()

    def header(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Pictures:
    """Features of real pictures, made by an encoder that is learned with the memory."""

    shape: "Shape"
    size: int
    form: Form = "unit"
    """unit: a vector of length 1 for each picture, as a label's is; probabilities: one of sum 1 for all pictures of a class"""
    shots: int = 5
    ways: int | None = 5
    encoder: str = ENCODER
    has_classes = False

    @property
    def each(self) -> int:
        return self.shots if self.form == "unit" else 1

    @property
    def unit(self) -> str:
        return "picture" if self.form == "unit" else "group of pictures"

    @cached_property
    def network(self) -> "Network":
        """The encoder, without weights of its own (a header may name any size)."""
        import torch

        from recollect.nets import Network

        with torch.device("meta"):
            return Network(self.encoder, self.shape, self.size)

    def fresh(self, seed: int, device: str) -> "Params":
        from recollect.nets import Network

        return {n: p.requires_grad_() for n, p in Network(self.encoder, self.shape, self.size).fresh(seed, device).items()}

    def vectors(self, params: "Params", labels: "Tensor", pictures: "Tensor") -> "Tensor":
        from torch.nn.functional import normalize

        found = self.network.logits(params, pictures.flatten(0, 1))
        if self.form == "probabilities":
            return found.unflatten(0, pictures.shape[:2]).mean(1).softmax(1)
        return normalize(found, dim=1)

    def header(self) -> dict[str, Any]:
        numbers = {"encoder": self.encoder, "size": self.size, "form": self.form}
        return numbers | {"ways": self.ways, "shots": self.shots}


@dataclass(frozen=True)
class Vectors:
    """Vectors that are given, of each class or of each training image. A file has those of its classes as the tensor `vectors`;
    one of somebody else's query kind may have none, and is asked with floats alone."""

    size: int
    kind: str = "vectors"
    shots: int = 0
    """training images of each class with whose vectors an outer step asks; 0: with the vector of the class"""
    table: "Tensor | None" = field(default=None, compare=False, repr=False)
    """[classes, d_y], where it is at hand: in a run"""
    words: dict[str, Any] = field(default_factory=dict)
    """how a word becomes a vector, if it can: see docs/queries.md"""
    ways = None
    unit = "vector"

    @property
    def each(self) -> int:
        return max(1, self.shots)

    @property
    def has_classes(self) -> bool:
        """Whether it can be asked with the names of classes: its file says what their vectors are."""
        return self.kind == "vectors"

    def fresh(self, seed: int, device: str) -> "Params":
        return {}

    def vectors(self, params: "Params", labels: "Tensor", pictures: "Tensor") -> "Tensor":
        """In the place of pictures are the vectors of training images [G, shots, d_y]."""
        if self.shots:
            return pictures.flatten(0, 1)
        assert self.table is not None
        return self.table.to(labels.device)[labels]

    def header(self) -> dict[str, Any]:
        return {"kind": self.kind, "size": self.size} | ({"words": self.words} if self.words else {})


@dataclass(frozen=True)
class Targets:
    """Continuous targets: y is a target, standardised, and behind it a 1, so that what is recalled is affine in the target."""

    mean: tuple[float, ...]
    """of each target, over the training data"""
    std: tuple[float, ...]
    shots: int = STAND_INS
    """targets that an outer step samples"""
    table: "Tensor | None" = field(default=None, compare=False, repr=False)
    """[Q, d_y]: of targets that stand for the data, where they are at hand: in a run"""
    each, ways = 1, None
    unit, has_classes = "target", False

    @property
    def size(self) -> int:
        return len(self.mean) + 1

    def prepare(self, targets: "Tensor") -> "Tensor":
        """As a network sees them: [N, targets] standardised."""
        return ((targets.double() - targets.new_tensor(self.mean).double()) / targets.new_tensor(self.std).double()).float()

    def undo(self, outputs: "Tensor") -> "Tensor":
        """What a network puts out, in the targets' own units."""
        return outputs * outputs.new_tensor(self.std) + outputs.new_tensor(self.mean)

    def fresh(self, seed: int, device: str) -> "Params":
        return {}

    def vectors(self, params: "Params", labels: "Tensor", pictures: "Tensor") -> "Tensor":
        """In the place of pictures are standardised targets [..., targets]."""
        import torch

        targets = pictures.reshape(-1, len(self.mean))
        return torch.cat([targets, torch.ones_like(targets[:, :1])], 1)

    def header(self) -> dict[str, Any]:
        return {"kind": "targets", "size": self.size, "mean": list(self.mean), "std": list(self.std)}


def _pictures(config: DistillConfig, images: "Images") -> Pictures:
    asking = config.query
    return Pictures(images.shape, asking.size, asking.form, asking.shots, config.budget.classes_per_step, ENCODER)


def _vectors(config: DistillConfig, images: "Images") -> Vectors:
    """As the dataset has them; where they are of training images, the mean of a class's is the vector of the class."""
    import torch

    own, words = images.train.vectors, {"model": images.words.model} if images.words else {}
    if images.vectors is not None:
        return Vectors(images.vectors.shape[1], table=images.vectors, words=words)
    if own is None:
        raise RecollectError(
            f"query vectors needs a vector of each class or training image, and {images.name} has none: give --vectors FILE "
            "(vectors= in Python)"
        )
    means = torch.stack([own[images.train.labels == label].mean(0) for label in range(images.classes)])
    return Vectors(own.shape[1], shots=config.query.shots, table=means, words=words)


def targets_of(images: "Images", shots: int = STAND_INS) -> Targets:
    """How a dataset's continuous targets are asked for; those that stand for the data lie at even ranks of the first target."""
    targets = images.train.targets
    if targets is None:
        raise RecollectError(f"query targets needs continuous targets, and {images.name} has classes: give query labels")
    import torch

    exact = targets.double()
    mean, std = exact.mean(0), exact.std(0, correction=0)
    for name, deviation in zip(images.class_names, std.tolist(), strict=True):
        if not math.isfinite(deviation):
            raise RecollectError(f"target '{name}' of {images.name} has NaN or infinite values: remove these examples")
        if deviation < CONSTANT * max(1e-30, float(exact.abs().max())):
            raise RecollectError(f"target '{name}' of {images.name} is constant: leave it out, there is nothing to predict")
    asked = Targets(tuple(mean.tolist()), tuple(std.tolist()), shots)
    ranks = ((torch.arange(STAND_INS) + 0.5) / STAND_INS * len(targets)).long()
    return replace(asked, table=asked.vectors({}, targets, asked.prepare(targets[targets[:, 0].argsort(stable=True)[ranks]])))


QUERIES: dict[str, Callable[[DistillConfig, "Images"], Query]] = {
    "labels": lambda config, images: Labels(images.classes),
    "images": _pictures,
    "vectors": _vectors,
    "targets": lambda config, images: targets_of(images, config.budget.classes_per_step or STAND_INS),
}
"""name -> what makes it, for a config and a dataset"""


Stated = Labels | Pictures | Vectors | Targets


def stated(header: dict[str, Any], shape: "Shape", classes: int) -> Stated:
    """The query kind that a memory's header states; `is_valid` has looked at it."""
    if not header:
        return Labels(classes)
    if "encoder" not in header:
        if header["kind"] == "targets":
            return Targets(tuple(map(float, header["mean"])), tuple(map(float, header["std"])))
        return Vectors(header["size"], header["kind"], words=header.get("words", {}))
    form = header.get("form", "unit")
    return Pictures(shape, header["size"], OLD_FORMS.get(form) or form, header["shots"], header["ways"], header["encoder"])


def is_valid(header: object) -> bool:
    """Whether a header's part on queries makes sense: empty for labels; else an encoder's name and three numbers, and a form that
    older files do not have; or the kind of its vectors and their size, and for targets their mean and deviation."""
    if header == {}:
        return True
    if not isinstance(header, dict):
        return False
    numbers = ("size", "ways", "shots") if "encoder" in header else ("size",)
    if not isinstance(header.get("encoder", header.get("kind")), str):
        return False
    if header.get("form", "unit") not in ("unit", "probabilities", *OLD_FORMS) or not _can_say_words(header.get("words", {})):
        return False
    if not all(type(header.get(name)) is int and 0 < header[name] <= MOST_SIZE for name in numbers):
        return False
    if header.get("kind") != "targets":
        return True
    known = all(_are_numbers(header.get(name), header["size"] - 1) for name in ("mean", "std"))
    return known and min(header["std"]) > 0


def _can_say_words(words: object) -> bool:
    return words == {} or (isinstance(words, dict) and isinstance(words.get("model"), str))


def _are_numbers(values: object, count: int) -> bool:
    """Finite ones, as many."""
    return (
        isinstance(values, list)
        and len(values) == count > 0
        and all(type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value) for value in values)
    )
