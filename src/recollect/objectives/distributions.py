"""Matching distributions (DM): recalled and real images of a class have the same mean features.

    J = sum over classes of  | mean of f(recalled images) - mean of f(real images) |^2        f: a fresh network's features

Every outer step looks through networks that nobody has trained (`networks_per_step`), so there is no state, and none is needed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from recollect.config import InnerLoop, Matching
from recollect.fast import Compute
from recollect.nets import Network, Params
from recollect.objectives.pairs import Pairing, found, pairing, pairs
from recollect.objectives.seam import Chance, Examples, Found, mean


class Drawn(NamedTuple):
    """Of one network: its weights, and what it looks at."""

    params: Params
    pairing: Pairing


class Distributions:
    """Gradients by the recalled images, the mean over `networks_per_step` fresh networks."""

    def __init__(
        self, network: Network, inner: InnerLoop, device: str, compute: Compute = "auto", compile: bool = False,
        matching: Matching = Matching(), *_: Any,
    ):  # fmt: skip
        self.network, self.inner, self.device, self.siamese = network, inner, device, matching.siamese

    def to_dict(self) -> dict[str, Any]:
        return {}

    def load(self, saved: dict[str, Any]) -> None:
        pass

    def draw(self, labels: torch.Tensor, chance: Chance) -> list[Drawn]:
        drawn = []
        for number in range(self.inner.networks_per_step)[chance.share]:
            generator = chance.network(number)
            params = self.network.drawn(int(torch.randint(2**62, (), generator=generator)), self.device)
            drawn.append(Drawn(params, pairing(labels, self.inner, self.siamese, chance, generator)))
        return drawn

    def gradient(self, recalled: Examples, real: Examples, drawn: Sequence[Drawn]) -> Found:
        return mean(self.by_network(recalled, real, drawn))

    def by_network(self, recalled: Examples, real: Examples, drawn: Sequence[Drawn]) -> list[Found]:
        return [self._through(each.params, recalled, real, each.pairing) for each in drawn]

    def _through(self, params: Params, recalled: Examples, real: Examples, drawn: Pairing) -> Found:
        classes = list(pairs(recalled, real, drawn))
        ours = self.network.features(params, torch.cat([pair.ours for pair in classes])).unflatten(0, (len(classes), -1))
        with torch.no_grad():
            theirs = torch.stack([self.network.features(params, pair.theirs).mean(0) for pair in classes])
        value = (ours.mean(1) - theirs).square().sum()
        by_leaf = torch.autograd.grad(value, [pair.leaf for pair in classes])
        return found(value.detach(), recalled, [pair.rows for pair in classes], by_leaf)
