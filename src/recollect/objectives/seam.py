"""SEAM Objective: what drives a memory.

An objective looks at a recalled set and a batch of real images, and gives a value with its gradient by the recalled images.
Recall is linear, so one pullback by the caller makes of it the gradient by bases, addressing and whatever the queries learn.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from recollect.data import augment
from recollect.distributed import Ranks


class Examples(NamedTuple):
    """Images as a network sees them, with their labels."""

    images: Tensor
    """[N, C, H, W]"""
    labels: Tensor
    """[N]; or continuous targets, [N, targets] and standardised"""
    span: Tensor | None = None
    """[K, C, H, W], where the images are combinations of these and K is much smaller than C H W"""


class Chance(NamedTuple):
    """The generators of one outer step. Each has a purpose, so that no draw depends on another's number."""

    network: Callable[[int], torch.Generator]
    """of the k-th inner network: its weights, and what its steps see"""
    length: torch.Generator
    """of the length of an unroll; tasks side by side share it"""
    shared: augment.Drawn = {}  # noqa: RUF012 (never changed)
    """one transform for all images of the step, recalled and real; none where each draws its own"""
    share: slice = slice(None)
    """of the inner networks: which ones are drawn, where other processes have the others"""


class Source(NamedTuple):
    """The real images: for an objective that brings along something that was made of them."""

    fingerprint: str
    preprocessing: dict[str, Any]
    """as files state it"""


class Found(NamedTuple):
    """What an objective found."""

    value: Tensor
    """a scalar, to be made smaller"""
    images: Tensor
    """d value / d recalled images, [N, C, H, W]"""


@runtime_checkable
class Objective(Protocol):
    """An objective is made for a network. Its state, if it has any, goes into checkpoints."""

    def draw(self, labels: Tensor, chance: Chance) -> Any:
        """All that is random in an outer step, for a recalled set with these labels, class by class; where there are continuous
        targets, these are their numbers in the query, target by target."""
        ...

    def gradient(self, recalled: Examples, real: Examples, drawn: Any) -> Found:
        """The value and its gradient by the recalled images; a new state takes the place of the old."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """The state: tensors, numbers, strings and containers of them. A step does not change them, but puts others in their
        place: whoever holds the state from before a step can go back to it."""
        ...

    def load(self, saved: dict[str, Any]) -> None:
        """The state that to_dict gave."""
        ...


class Problem(NamedTuple):
    """What an objective is given for one memory."""

    recalled: Examples
    real: Examples
    drawn: Any


@runtime_checkable
class SideBySide(Objective, Protocol):
    """An objective that serves several memories at once, faster than one after another."""

    def together(self, problems: Sequence[Problem]) -> list[Found]: ...


@runtime_checkable
class ByNetwork(Objective, Protocol):
    """An objective that is the mean over inner networks, each of which may be computed by itself, by any process."""

    def by_network(self, recalled: Examples, real: Examples, drawn: Any) -> list[Found]:
        """Of each inner network that was drawn, in their order."""
        ...


def batches(labels: Tensor, steps: int, per_class: int | None, generator: torch.Generator) -> Tensor:
    """[T, B] rows of the recalled set, the same number of each class in each step. None of a class comes again before the
    others: metagradients vary less than if each step drew its own."""
    classes = len(labels.unique_consecutive())
    recalled = len(labels) // classes
    each = min(per_class or recalled, recalled)
    passes = torch.rand(-(-steps * each // recalled), classes, recalled, generator=generator).argsort(-1)
    picks = passes.transpose(0, 1).flatten(1)[:, : steps * each].view(classes, steps, each)
    return (picks + torch.arange(classes)[:, None, None] * recalled).transpose(0, 1).flatten(1)


def mean(found: Sequence[Found]) -> Found:
    """Over inner networks."""
    values, images = zip(*found, strict=True)
    return Found(torch.stack(values).mean(), torch.stack(images).mean(0))


@runtime_checkable
class ByBatch(ByNetwork, Protocol):
    """An objective whose passes can be split over processes, each with a part of every batch."""

    def by_batch(self, ranks: Ranks) -> None:
        """From now on: values are of whole batches, gradients by images are parts of a sum over the processes."""
        ...


def gradients(objectives: Sequence[Objective], problems: Sequence[Problem]) -> list[Found]:
    """Of several memories, each with an objective: together where one serves them all, else one after another."""
    first = objectives[0]
    if isinstance(first, SideBySide):
        return first.together(problems)
    return [objective.gradient(*problem) for objective, problem in zip(objectives, problems, strict=True)]
