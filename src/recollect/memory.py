"""Budget (eqn 4) and Memory: bases and addressing matrices, recall (eqn 2), size, save and load.

Recall is linear in the bases and in the addressing: x'_i = y^T A_i B, then bilinear upsampling to the image size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from recollect import hub, limits, zoo
from recollect.config import Sizes
from recollect.errors import RecollectError, unknown
from recollect.header import MEMORY, Header, check_tensors, parse, read_header, smaller
from recollect.queries import Pictures, Stated, Targets, Vectors
from recollect.tensorfile import TensorInfo, checksum, plain
from recollect.words import Words, vectors_of

if TYPE_CHECKING:
    from recollect.data.images import Images
    from recollect.data.preprocess import Preprocess
    from recollect.nets import Params

Precision = Literal["float32", "float16", "bfloat16"]
ENCODER = "encoder."  # what the names of its tensors begin with
PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
Query = int | str | Sequence[int] | Sequence[str] | Sequence[float] | Tensor | None
"""labels, class names, vectors [Q, d_y] (floats) or continuous targets; None is every class"""


@dataclass(frozen=True)
class Budget:
    """The floats that N images of each class would take, and what memories fit into them (eqn 4).

    K c h w + r d_y K <= N C c H W. In half precision (`precision`) the same bytes hold twice the numbers; that is a
    budget of its own name, not the paper's.

    Examples:
        >>> budget = recollect.Budget(images_per_class=1, classes=10, image_shape=(3, 32, 32))  # of CIFAR-10
        >>> budget.floats, budget.matrices(bases=16), budget.bases(matrices=51)
        (30720, 115, 24)
    """

    images_per_class: int
    classes: int
    image_shape: tuple[int, int, int]
    """(channels, height, width)"""
    downsample: int = 2
    """bases are this much smaller than images on each side"""
    precision: Precision = "float32"
    query_size: int | None = None
    """d_y: numbers in a query vector, where it is not one for each class"""
    share: int | None = None
    """floats, where they are not those of whole images of each class: a task's share of a buffer"""
    called: str = ""
    """what that share is called"""

    def __post_init__(self) -> None:
        if self.images_per_class < 1:
            raise RecollectError(f"images per class is {self.images_per_class}: give 1 or more")
        check_smaller(self.image_shape, self.downsample, "downsample")
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)

    @property
    def floats(self) -> int:
        """N C c H W: the right-hand side of eqn 4."""
        return self.share or self.images_per_class * self.classes * math.prod(self.image_shape)

    @property
    def numbers(self) -> int:
        """How many numbers of this precision the budget's bytes hold."""
        return self.floats * 4 // PRECISIONS[self.precision].itemsize

    @property
    def base_shape(self) -> tuple[int, int, int]:
        """(c, h, w) of a base"""
        return smaller(self.image_shape, self.downsample)

    @property
    def base_numbers(self) -> int:
        """c h w"""
        return math.prod(self.base_shape)

    @property
    def query_numbers(self) -> int:
        """d_y"""
        return self.query_size or self.classes

    @property
    def name(self) -> str:
        """As it stands in tables: the default counts floats as the paper does, any other says what it is."""
        images = self.called or f"{self.images_per_class} image{'s' if self.images_per_class > 1 else ''} per class"
        return images if self.precision == "float32" else f"{images} ({self.precision})"

    def matrices(self, bases: int) -> int:
        """r: how many addressing matrices fit beside K bases."""
        most = self.bases(1)
        if bases < 1:
            raise RecollectError(f"number of bases is {bases}: give 1 to {most}")
        r = (self.numbers - bases * self.base_numbers) // (self.query_numbers * bases)
        if r < 1:
            raise RecollectError(
                f"{bases} bases do not fit {self.name} ({self.numbers:,} numbers): at most {most} bases leave room for "
                f"one addressing matrix; take fewer bases, {self._more}, or a larger downsample"
            )
        return r

    def bases(self, matrices: int) -> int:
        """K: how many bases fit with r addressing matrices."""
        if matrices < 1:
            raise RecollectError(f"number of addressing matrices is {matrices}: give 1 or more")
        k = self.numbers // (self.base_numbers + matrices * self.query_numbers)
        if k < 1:
            raise RecollectError(
                f"{matrices} addressing matrices do not fit {self.name} ({self.numbers:,} numbers) beside even one base "
                f"({self.classes:,} class{'es' * (self.classes > 1)} of images of {'x'.join(map(str, self.image_shape))}): "
                f"take fewer matrices or {self._more}, larger images or more classes"
            )
        return k

    @property
    def _more(self) -> str:
        return "a larger buffer" if self.share else "more images per class"

    def default_bases(self) -> int:
        """As many as fit with one addressing matrix for every 20 numbers of a base, and with 4 or more; two where only one would.
        For 1 image per class 27 of MNIST, 26 of CIFAR-10, 67 of CIFAR-100. A rule through the few points where it was looked for.
        """
        usual = self.numbers // (self.base_numbers + max(4, self.base_numbers // 20) * self.query_numbers)
        return max(usual, min(self.bases(1), 2))

    def per_class(self) -> int:
        """How many images of each class fit without learned addressing (K = N', one-hot A)."""
        return self.numbers // (self.classes * self.base_numbers)

    def sizes(self, wanted: Sizes) -> tuple[int, int]:
        """Bases, and images that each query recalls: as wanted, where that fits, and else as many as fit."""
        if wanted.addressing == "one-hot":
            bases = self.per_class() * self.classes
            if wanted.bases not in (None, bases):
                raise RecollectError(f"bases is {wanted.bases}, but one-hot addressing has {bases} here: leave it out")
            if not bases:
                raise RecollectError(f"one-hot addressing needs an image of each class, more than {self.name}: give {self._more}")
            return bases, self.per_class()
        bases = wanted.bases or (self.bases(wanted.matrices) if wanted.matrices else self.default_bases())
        most = self.matrices(bases)
        if wanted.matrices is not None and wanted.matrices > most:
            raise RecollectError(f"matrices is {wanted.matrices}, but only {most} fit beside {bases} bases: give fewer of either")
        return bases, wanted.matrices or most


def check_smaller(shape: tuple[int, int, int], times: int, name: str) -> None:
    """Refuse images that would be smaller than a pixel."""
    if not 1 <= times <= min(shape[1:]):
        raise RecollectError(f"{name} is {times} for images of {shape[1]}x{shape[2]}: give 1 to {min(shape[1:])}")


def recall(bases: Tensor, addressing: Tensor, queries: Tensor, size: tuple[int, int]) -> Tensor:
    """Eqn 2 for each query y and matrix A_i, upsampled: [Q, d_y] -> [Q r, C, H, W], the r images of a query together."""
    coefficients = torch.einsum("qy,ryk->qrk", queries, addressing)
    images = torch.einsum("qrk,kchw->qrchw", coefficients, bases).flatten(0, 1)
    if images.shape[-2:] == size:
        return images
    return torch.nn.functional.interpolate(images, size=size, mode="bilinear", align_corners=False)


def one_hot_addressing(classes: int, per_class: int) -> Tensor:
    """A_i[m, n] = 1 where n = m (N'/C) + i: the per-class images of standard distillation as a memory. uint8 [r, C, K]"""
    item, owner = torch.arange(per_class)[:, None], torch.arange(classes)[None, :]
    addressing = torch.zeros(per_class, classes, classes * per_class, dtype=torch.uint8)
    return addressing.scatter_(2, (owner * per_class + item)[..., None], 1)


@dataclass(frozen=True)
class Classes:
    """Some classes of one memory, in this order: memory["cat", "dog"]. What `compose` takes."""

    memory: "Memory"
    labels: tuple[int, ...]

    def __post_init__(self) -> None:
        for place, label in enumerate(self.labels):
            if label in self.labels[:place]:
                raise RecollectError(f"class '{self.names[place]}' of {self.memory.name} is named twice: name it once")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.memory.class_names[label] for label in self.labels)


class Memory:
    """A distilled dataset: shared bases, addressing matrices, and a header that says what they are.

    `distill` makes one, `Memory.load` reads one.

    Examples:
        >>> memory = recollect.Memory.load("mnist-1")  # a memory of the zoo, or the path of a file
        >>> memory
        Memory(mnist-1: 10 classes of 1x28x28; 16 bases, 29 matrices, 7,776 numbers)
        >>> images, labels = memory.recall(["3", "8"])
        >>> images.shape, labels.shape
        (torch.Size([58, 1, 28, 28]), torch.Size([58]))
    """

    __iter__ = None  # memory[0] is a class: not the first of a sequence

    def __init__(
        self, bases: Tensor, addressing: Tensor, header: Header, encoder: "Params | None" = None, vectors: Tensor | None = None
    ):
        kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}
        self.bases = bases
        """[K, c, h, w]"""
        self.addressing = addressing
        """[r, d_y, K]"""
        self.header = parse(header.to_json(), "the memory")  # as a reader of its file will find it
        self.folder = Path()
        """where it was loaded from; its sidecar file lies there"""
        self.name = header.dataset
        """what to call it beside others: its dataset; once loaded, its file (its folder, for a run's memory.safetensors)"""
        self.fitted: Preprocess | None = None
        """its preprocessing, once it was needed, or where it was just distilled and there is no file yet"""
        tensors = {"bases": bases, "addressing": addressing} | ({} if vectors is None else {"vectors": vectors})
        infos = {name: TensorInfo(tuple(t.shape), kinds.get(t.dtype, str(t.dtype))) for name, t in tensors.items()}
        check_tensors(self.header, infos, "the memory")
        self.encoder = encoder or {}
        """the weights of what makes query vectors of pictures or words; none where labels are asked with"""
        self.vectors = vectors
        """[classes, d_y]: the query vector of each class, where they are given ones; of continuous targets [Q, d_y], some that
        stand for the data; None where classes are one-hot"""
        _check_encoder(self.encoder, self.header, "the memory")

    def __repr__(self) -> str:
        kept = f"{len(self.bases)} bases, {len(self.addressing)} matrices, {self.floats:,} numbers"
        names = ", ".join(self.class_names[:3]) if isinstance(self.asked, Targets) else f"{len(self.class_names)} classes"
        return f"Memory({self.name}: {names} of {'x'.join(map(str, self.image_shape))}; {kept})"

    @property
    def asked(self) -> Stated:
        """What it is asked with."""
        return self.header.asked

    @property
    def class_names(self) -> tuple[str, ...]:
        """By the number of their label."""
        return tuple(self.header.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of a recalled image"""
        channels, height, width = self.header.image_shape
        return channels, height, width

    @property
    def floats(self) -> int:
        """How many numbers are counted against the budget (a one-hot addressing is implied, and not counted)."""
        return self.bases.numel() + (self.addressing.numel() if self.header.addressing == "learned" else 0)

    @property
    def nbytes(self) -> int:
        """The same in bytes."""
        return self.floats * self.bases.itemsize

    def __getitem__(self, query: "int | str | Sequence[int] | Sequence[str]") -> Classes:
        """memory["cat"], memory["cat", "dog"], memory[0, 5]: classes to `compose` a classifier of."""
        return Classes(self, tuple(self.labels(query).tolist()))

    def queries(self, query: Query = None, *, words: "str | Sequence[str] | None" = None) -> Tensor:
        """The vectors [Q, d_y] that a query stands for.

        Arguments:
            query: labels or class names (one-hot, or the vectors of the classes); vectors; continuous targets in their own units;
                None for all classes.
            words: names instead, also of classes that the memory never saw; see `recall`.
        """
        size = self.addressing.shape[1]
        if words is not None:
            return self._of_words(query, [words] if isinstance(words, str) else list(words))
        if isinstance(self.asked, Targets):
            return self._of_targets(self.asked, query)
        if isinstance(query, Tensor) and query.is_floating_point():
            if query.ndim != 2 or query.shape[1] != size or len(query) == 0:
                raise RecollectError(f"query vectors are {list(query.shape)}: give [Q, {size}], one row a query")
            return query.float()
        labels = self.labels(query)
        limits.check(f"{len(labels):,} queries of {self.name}", 8 * len(labels) * size, self.nbytes)
        return torch.nn.functional.one_hot(labels, size).float() if self.vectors is None else self.vectors[labels]

    def _of_words(self, query: Query, words: list[str]) -> Tensor:
        if query is not None:
            raise RecollectError("a query has classes or words: leave out the one or the other")
        if not (isinstance(self.asked, Vectors) and self.asked.words):
            raise RecollectError(
                f"{self.name} knows no words: distil one that does, with the vectors that recollect words makes (--vectors FILE)"
            )
        return vectors_of(Words(self.asked.words["model"], self.encoder["projection"], self.encoder["mean"]), words)

    def _of_targets(self, asked: Targets, query: Any) -> Tensor:
        if query is None:
            assert self.vectors is not None
            return self.vectors
        names, wanted = ", ".join(self.class_names), f"give floats [Q, {asked.size - 1}], one row a query"
        try:
            targets = torch.as_tensor(query, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise RecollectError(f"{self.name} is asked with continuous targets ({names}): {wanted}") from None
        targets = targets.reshape(-1, 1) if targets.ndim < 2 and asked.size == 2 else targets
        if targets.ndim != 2 or targets.shape[1] != asked.size - 1 or not len(targets) or not targets.isfinite().all():
            what = f"{list(targets.shape)}" if targets.isfinite().all() else "not finite"
            raise RecollectError(f"targets are {what}, and this memory's are {names}: {wanted}")
        return asked.vectors({}, torch.empty(0), asked.prepare(targets))

    def labels(self, query: Query = None) -> Tensor:
        """The class numbers [Q] that a query of labels or names stands for."""
        asked = self.asked
        if isinstance(asked, Pictures):
            raise RecollectError(f"{self.name} is asked with pictures, not with labels: use ask (recollect ask)")
        if isinstance(asked, Targets):
            names = ", ".join(self.class_names)
            raise RecollectError(f"{self.name} is asked with continuous targets ({names}), and has no classes: give numbers")
        if self.vectors is None and isinstance(asked, Vectors):
            raise RecollectError(f"{self.name} is asked with vectors ({asked.kind}): give floats [Q, {asked.size}]")
        if query is None:
            return torch.arange(len(self.class_names))
        if isinstance(query, Tensor):
            query = query.tolist()
        chosen = [query] if isinstance(query, str | int | Integral) else list(query)
        if not chosen:
            raise RecollectError("the query is empty: name at least one class")
        return torch.tensor([self._label(item) for item in chosen])

    def _label(self, item: "int | str | float") -> int:
        if isinstance(item, str):
            if item not in self.class_names:
                raise unknown("class", item, self.class_names)
            return self.class_names.index(item)
        whole = isinstance(item, Integral) and not isinstance(item, bool)  # numpy's too, but no mask
        if not whole or not 0 <= int(item) < len(self.class_names):
            raise RecollectError(f"label {item!r} is not one of this memory's 0 to {len(self.class_names) - 1}")
        return int(item)

    def recall(self, query: Query = None, *, words: "str | Sequence[str] | None" = None) -> tuple[Tensor, Tensor]:
        """A training set.

        Arguments:
            query: class names or labels, in any order; vectors [Q, d_y] (floats); continuous targets [Q, targets] in their own
                units, also between those of the data; None for every class, or for targets that stand for the data.
            words: names instead, also of classes that the memory never saw, if it was distilled with vectors of words
                (recollect words).

        Returns:
            images: [Q r, C, H, W] as a network sees them (preprocessed), the r images of a query together.
            labels: [Q r], this memory's class numbers; for query vectors or words, the rows of the query. For continuous targets
                [Q r, targets] as a network sees them (standardised; `memory.asked.undo` gives their own units).
        """
        queries = self.queries(query, words=words)
        count = len(queries) * len(self.addressing)
        limits.check(f"{count:,} images of {self.name}", 4 * count * math.prod(self.image_shape), self.nbytes)
        images = recall(self.bases.float(), self.addressing.float(), queries, self.image_shape[1:])
        if isinstance(self.asked, Targets):
            labels = queries[:, :-1]
        else:
            is_vectors = words is not None or (isinstance(query, Tensor) and query.is_floating_point())
            labels = torch.arange(len(queries)) if is_vectors else self.labels(query)
        return images, labels.repeat_interleave(len(self.addressing), 0)

    def of_words(self, words: "Sequence[str]") -> "Memory":
        """The same memory with other classes, those that the words name: it may never have seen them. See `recall`."""
        if twice := [word for place, word in enumerate(words) if word in words[:place]]:
            raise RecollectError(f"word '{twice[0]}' is there twice: leave one out")
        header = replace(self.header, class_names=list(words), accuracy=[])
        memory = Memory(self.bases, self.addressing, header, self.encoder, self.queries(words=words))
        memory.folder, memory.fitted, memory.name = self.folder, self.fitted, self.name
        return memory

    def encode(self, images: Tensor) -> Tensor:
        """The query vectors of pictures [N, C, H, W] of one class, prepared as a network sees them: [N, d_y], or [1, d_y]
        of a memory that is asked with all of them together."""
        if not isinstance(self.asked, Pictures):
            raise RecollectError(f"{self.name} is asked with labels, not with pictures: name its classes")
        return self.asked.vectors(self.encoder, torch.arange(1), images[None])

    def dataset(self, query: Query = None) -> torch.utils.data.TensorDataset:
        """The same as a torch Dataset of (image, label)."""
        return torch.utils.data.TensorDataset(*self.recall(query))

    def coefficients(self, query: Query = None) -> Tensor:
        """v = y^T A_i for each query and matrix: [Q, r, K]"""
        return torch.einsum("qy,ryk->qrk", self.queries(query), self.addressing.float())

    def mean_coefficients(self, query: Query = None) -> Tensor:
        """The mean of the r coefficient vectors of each query: [Q, K]"""
        return self.coefficients(query).mean(1)

    def similarity(self, query: Query = None) -> Tensor:
        """Cosine similarities of the mean coefficients of each pair of queries: [Q, Q]"""
        mean = torch.nn.functional.normalize(self.mean_coefficients(query), dim=1)
        return mean @ mean.T

    def preprocess(self, images: "Images | None" = None) -> "Preprocess":
        """How real images must be prepared for a network trained on a recall; also undoes it, for viewing.

        `images` are the memory's own dataset, from which a whitening file that is not at hand can be fitted again.
        """
        from recollect.data.preprocess import Preprocess

        if self.fitted is not None:
            return self.fitted
        pixels = None
        if images is not None:
            whole = self.header.made.get("config", {}).get("use_validation", False)
            pixels = (images.train + images.validation if whole else images.train).images
        preprocess = Preprocess.from_json(self.header.preprocessing, self.folder, pixels)
        if not preprocess.is_for(self.image_shape):
            raise RecollectError(
                f"the memory's preprocessing is not for its images of {list(self.image_shape)}: fetch or distil it again"
            )
        self.fitted = preprocess
        return preprocess

    def with_accuracy(self, *entries: dict) -> "Memory":
        """The same memory with measured accuracies in its header (an entry replaces one of the same network and split)."""
        key = lambda entry: (entry.get("network"), entry.get("on"))  # noqa: E731
        new = {key(entry) for entry in entries}
        kept = [entry for entry in self.header.accuracy if key(entry) not in new]
        header = replace(self.header, accuracy=[*kept, *entries])
        memory = Memory(self.bases, self.addressing, header, self.encoder, self.vectors)
        memory.folder, memory.fitted, memory.name = self.folder, self.fitted, self.name
        return memory

    def save(self, path: "Path | str") -> None:
        """Write one .safetensors file, atomically, and beside it the whitening file that it needs, if any."""
        path = Path(path)
        zca = self.header.preprocessing.get("zca")
        if zca and not (path.parent / zca["file"]).exists():
            preprocess = self.preprocess()
            if preprocess.to_json()["zca"] == zca:  # one that was fitted again is not the file that the header names
                preprocess.save_sidecar(path.parent)
        encoder = {f"{ENCODER}{name}": p for name, p in self.encoder.items()}
        vectors = {} if self.vectors is None else {"vectors": self.vectors}
        tensors = plain({"bases": self.bases, "addressing": self.addressing} | vectors | encoder)
        header = replace(self.header, checksum=_checksum(tensors))
        MEMORY.write(path, header.to_json(), tensors)

    @staticmethod
    def load(path: "Path | str") -> "Memory":
        """Read a memory file, or a memory of the zoo or the Hub by its name ("cifar10-1", "hub:owner/name"). A damaged or
        foreign file gets a RecollectError; nothing in it is ever executed."""
        path = zoo.find(path)
        header, _ = read_header(path)
        tensors = MEMORY.tensors(path)
        if header.checksum != _checksum(tensors):
            raise RecollectError(f"{path} is damaged: its tensors do not match its checksum; fetch or distil it again")
        ours = [name for name in tensors if name in ("bases", "addressing", "vectors") or name.startswith(ENCODER)]
        if not all(tensors[name].isfinite().all() for name in ours):
            raise RecollectError(f"{path} holds values that are not finite: distil it again with a lower learning rate")
        encoder = {name.removeprefix(ENCODER): t for name, t in tensors.items() if name.startswith(ENCODER)}
        _check_encoder(encoder, header, path)
        given = tensors.get("vectors") if isinstance(header.asked, Vectors | Targets) else None
        memory = Memory(tensors["bases"], tensors["addressing"], header, encoder, given)
        if header.addressing == "one-hot":
            implied = one_hot_addressing(len(header.class_names), len(memory.addressing))
            if not torch.equal(memory.addressing, implied):
                raise RecollectError(f"{path} is damaged: it calls its addressing one-hot, and it is not; fetch it again")
        memory.folder = path.parent
        memory.name = path.parent.resolve().name if path.name == "memory.safetensors" else path.stem
        if on_hub := hub.name_of(path):
            memory.name = on_hub.rpartition("/")[2]
        return memory

    @staticmethod
    def from_pretrained(name: str, revision: str | None = None) -> "Memory":
        """Load a memory from the Hugging Face Hub (pip install 'recollect[hub]'); `push_to_hub` sends one there.

        Arguments:
            name: "owner/name".
            revision: a branch, tag or commit; None is what is there now.
        """
        return Memory.load(f"{hub.PREFIX}{name}" + (f"@{revision}" if revision else ""))


def _check_encoder(encoder: "Params", header: Header, where: object) -> None:
    if isinstance(header.asked, Vectors) and not header.asked.has_classes:
        return  # whoever made the query kind knows
    expected = {}
    if isinstance(header.asked, Vectors) and header.asked.words:
        size = encoder["mean"].shape if "mean" in encoder else torch.Size((0,))
        expected = {"mean": (size, torch.float32), "projection": (torch.Size((*size, header.asked.size)), torch.float32)}
    if isinstance(header.asked, Pictures):
        try:
            module = header.asked.network.module
        except RecollectError as error:
            raise RecollectError(f"{where} is damaged ({error}); distil it again") from None
        expected = {name: (p.shape, torch.float32) for name, p in module.named_parameters()}
    if {name: (p.shape, p.dtype) for name, p in encoder.items()} != expected:
        what = "is not the network that its header names" if isinstance(header.asked, Pictures) else "is not what its header says"
        raise RecollectError(f"{where} is damaged: its encoder {what}; distil it again")


def _checksum(tensors: dict[str, Tensor]) -> str:
    given = ["vectors"] if "vectors" in tensors else []
    names = ["bases", "addressing", *given, *sorted(name for name in tensors if name.startswith(ENCODER))]
    return checksum(tensors[name] for name in names)
