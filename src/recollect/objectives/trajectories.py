"""Matching trajectories (TM): training on the recall leads where training on real images led.

    J = | theta_T - expert's weights M epochs on |^2  /  | expert's way in these epochs |^2

theta_0 is an expert's too: its weights at one of its first epochs. From there it is the paper's inner loop and its adjoint, with
this J in the place of a loss on real images. Experts are trained once (`recollect experts`); of each file only the weights of two
epochs are read in an outer step.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from recollect.config import InnerLoop, Matching, fits
from recollect.errors import RecollectError
from recollect.fast import Compute
from recollect.fast.engine import Start
from recollect.fast.flat import Towards
from recollect.nets import Network, Params
from recollect.objectives.seam import Chance, Examples, Found, Problem, Source, mean
from recollect.objectives.unrolled import Unrolled
from recollect.tensorfile import Kind, checksum

EXPERT = Kind("expert trajectory", "recollect-expert", "an expert's", 1, "delete it and make it again (recollect experts)")


class About(TypedDict):
    """The header of an expert's file. Its tensors are the network's, [epochs + 1, ...]: fresh, and after each epoch."""

    format: int
    network: str
    recipe: dict[str, Any]
    dataset: str
    fingerprint: str
    """of the real images"""
    preprocessing: dict[str, Any]
    seed: int
    checksums: list[str]
    """of each epoch's weights, in the order of their names"""


@dataclass(frozen=True)
class Expert:
    """A file, of which nothing but the header is kept."""

    path: Path
    about: About
    names: tuple[str, ...]

    @property
    def epochs(self) -> int:
        return len(self.about["checksums"]) - 1

    @staticmethod
    def open(path: Path) -> "Expert":
        text, tensors = EXPERT.read(path)
        about = EXPERT.parse(text, path)
        if not fits(about, About) or not set(About.__annotations__) <= set(about) or len(about["checksums"]) < 2:
            raise EXPERT.damaged(path, "its header lacks a field")
        found = Expert(path, about, tuple(sorted(tensors)))  # pyright: ignore[reportArgumentType]
        if any(t.dtype != "F32" or t.shape[:1] != (found.epochs + 1,) for t in tensors.values()):
            raise EXPERT.damaged(path, "its tensors are not those of its epochs")
        return found

    def weights(self, epoch: int) -> Params:
        """After so many epochs, read from the file."""
        try:
            with safe_open(self.path, framework="pt") as file:
                found = {name: file.get_slice(name)[epoch] for name in self.names}
        except (SafetensorError, OSError, ValueError) as error:
            raise EXPERT.damaged(self.path, f"its tensors cannot be read: {error}") from None
        if checksum(found.values()) != self.about["checksums"][epoch]:
            raise EXPERT.damaged(self.path, f"the weights of epoch {epoch} do not match their checksum")
        return found

    def check(self, network: Network, source: Source) -> None:
        """Refuse one of another network, or of other images."""
        own = {name: tuple(p.shape) for name, p in network.module.named_parameters()}
        _, tensors = EXPERT.read(self.path)
        if {name: t.shape[1:] for name, t in tensors.items()} != own:
            made = f"{self.about['network']} for {self.about['dataset']}"
            raise RecollectError(f"{self.path} is of another network ({made}): give --network as it has it, or other experts")
        if self.about["fingerprint"] != source.fingerprint:
            raise RecollectError(
                f"{self.path} was trained on other images ({self.about['dataset']}): make experts of these, with the same "
                "classes, size and --use-validation"
            )
        if not _alike(self.about["preprocessing"], source.preprocessing):
            raise RecollectError(
                f"{self.path} was trained on images that were prepared otherwise: give --preprocess as it had it"
            )


def opened(folder: str, network: Network, source: Source, epochs: int) -> list[Expert]:
    """The experts in a folder, each of which is of this network and these images, and long enough."""
    paths = sorted(Path(folder).glob("expert-*.safetensors"))
    if not paths:
        raise RecollectError(
            f"{folder} holds no experts: make some (recollect experts DATA --out {folder}), or give another folder"
        )
    experts = [Expert.open(path) for path in paths]
    for expert in experts:
        expert.check(network, source)
        if expert.epochs < epochs:
            raise RecollectError(f"expert_epochs is {epochs}, but {expert.path} has {expert.epochs} epochs: give at most that")
    return experts


def _alike(theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether images are prepared in the same way; a whitening's matrix has other last digits on another processor."""
    try:
        numbers = [np.subtract(theirs[name], ours[name]) for name in ("mean", "std")]
        return np.abs(numbers).max() < 1e-6 and (theirs["zca"] is None) == (ours["zca"] is None)
    except (KeyError, TypeError, ValueError):
        return False


class Leg(NamedTuple):
    """One inner network: where it begins and what it sees, and where its expert went from there."""

    start: Start
    goal: Tensor
    """the expert's weights, [1, 1, 1, P]"""
    way: Tensor
    """squared, of the expert, [1]"""


class Trajectories:
    """Metagradients by the recalled images, the mean over `networks_per_step` stretches of experts."""

    def __init__(
        self, network: Network, inner: InnerLoop, device: str, compute: Compute = "auto", compile: bool = False,
        matching: Matching = Matching(), source: Source | None = None,
    ):  # fmt: skip
        if not matching.experts or source is None:
            made = "make them by recollect experts DATA, and give their folder (--experts)"
            raise RecollectError(f"objective trajectories needs experts: {made}")
        self.matching, self.device = matching, device
        self.experts = opened(matching.experts, network, source, matching.expert_epochs)
        self.unrolled = Unrolled(network, inner, device, compute, compile, judged=Towards)

    def to_dict(self) -> dict[str, Any]:
        return {"experts": self._known()}

    def load(self, saved: dict[str, Any]) -> None:
        if saved.get("experts") not in (None, self._known()):
            raise RecollectError(f"{self.matching.experts} had other experts when this run was begun: put them back")

    def _known(self) -> list[str]:
        """Each by its last weights."""
        return [expert.about["checksums"][-1] for expert in self.experts]

    def draw(self, labels: Tensor, chance: Chance) -> list[Leg]:
        if labels.is_floating_point():
            raise RecollectError("experts tell classes apart, and these targets are continuous: give unrolled or regression")
        goals: list[tuple[Tensor, Tensor]] = []

        def first(seed: int) -> Params:
            begins, ends = self._stretch(seed)
            goals.append((ends.view(1, 1, 1, -1), (ends - self.unrolled.flat.pack(begins)).square().sum()[None]))
            return begins

        starts = self.unrolled.starts(labels, chance, first)
        return [Leg(start, *goal) for start, goal in zip(starts, goals, strict=True)]

    def _stretch(self, seed: int) -> tuple[Params, Tensor]:
        """Weights of an expert at one of its first epochs; and some epochs later, as one vector."""
        generator, on = torch.Generator().manual_seed(seed), self.matching.expert_epochs
        expert = self.experts[int(torch.randint(len(self.experts), (), generator=generator))]
        choices = min(self.matching.expert_starts, expert.epochs - on + 1)
        epoch = int(torch.randint(choices, (), generator=generator))
        begins, ends = ({n: p.to(self.device) for n, p in expert.weights(at).items()} for at in (epoch, epoch + on))
        return begins, self.unrolled.flat.pack(ends)

    def gradient(self, recalled: Examples, real: Examples, drawn: Sequence[Leg]) -> Found:
        return mean(self.by_network(recalled, real, drawn))

    def by_network(self, recalled: Examples, real: Examples, drawn: Sequence[Leg]) -> list[Found]:
        alone = recalled._replace(span=None)  # coordinates of the span are for losses of images
        return self.unrolled.together([Problem(alone, Examples(leg.goal, leg.way), [leg.start]) for leg in drawn])


def write_expert(path: Path, about: dict[str, Any], epochs: Sequence[Params]) -> None:
    """Its weights, fresh and after each epoch."""
    names = sorted(epochs[0])
    kept = {name: torch.stack([params[name] for params in epochs]).contiguous() for name in names}
    sums = [checksum(params[name] for name in names) for params in epochs]
    EXPERT.write(path, json.dumps(about | {"format": EXPERT.format, "checksums": sums}, sort_keys=True), kept)
