"""Kernel ridge regression on features: real images are labelled by the recalled ones, in closed form.

    J = mean square of  K_tr (K_rr + ridge tr(K_rr) / n I)^-1 y_r - y_t        K: products of a network's features

y is centred one-hot, r the recalled images of a step, t the real ones. The gradient goes through the recalled features alone.
The networks are a pool of staggered ages: each outer step looks through one of them, which then takes one Adam step on the
recalled images, and begins anew at an age of MOST_STEPS. So an outer step needs no unroll, and is cheap.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F

from recollect.config import InnerLoop
from recollect.data import augment
from recollect.nets import Network
from recollect.objectives.seam import Chance, Examples, Found

POOL, MOST_STEPS = 10, 100
RIDGE = 1e-4
POOL_LR, BETAS, EPSILON = 3e-4, (0.9, 0.999), 1e-8  # of the pool's Adam


class Drawn(NamedTuple):
    """Rows of the recalled set and their augmentation, the pool's network to look through, and the seed of its successor."""

    rows: Tensor
    augmentation: augment.Drawn
    member: int
    seed: int


class Regression:
    """The pool, and what it says of a recalled set."""

    def __init__(self, network: Network, inner: InnerLoop, device: str, *_: Any):
        self.network, self.inner, self.device = network, inner, device
        self.names = augment.parse(inner.augment)
        self.pool: list[dict[str, Any]] = []
        """params, mean, square, steps, age"""

    def draw(self, labels: Tensor, chance: Chance) -> Drawn:
        generator = chance.network(0)
        classes = len(labels.unique_consecutive())
        recalled = len(labels) // classes
        each = min(self.inner.per_class or recalled, recalled)
        picks = torch.rand(classes, recalled, generator=generator).topk(each).indices + torch.arange(classes)[:, None] * recalled
        own = augment.draw(self.names, classes * each, generator) if self.names and not chance.shared else chance.shared
        member, seed = (int(torch.randint(most, (), generator=generator)) for most in (POOL, 2**62))
        return Drawn(picks.flatten(), own, member, seed)

    def gradient(self, recalled: Examples, real: Examples, drawn: Drawn) -> Found:
        if not self.pool:
            self._fill(drawn.seed)
        member = self.pool[drawn.member]
        rows = drawn.rows.to(recalled.images.device)
        chosen, labels = recalled.images[rows].requires_grad_(), recalled.labels[rows]
        with torch.no_grad():
            theirs = self.network.features(member["params"], real.images)
        seen = augment.apply(chosen, drawn.augmentation)
        ours = self.network.features(member["params"], seen)
        value = regression(ours, self._targets(labels, ours), theirs, self._targets(real.labels, ours))
        by_images = torch.zeros_like(recalled.images).index_copy_(0, rows, torch.autograd.grad(value, chosen)[0])
        self._age(drawn.member, seen.detach(), labels, drawn.seed)
        return Found(value.detach(), by_images)

    def _targets(self, labels: Tensor, like: Tensor) -> Tensor:
        """Centred one-hot: [N, classes]; continuous targets as they are."""
        if labels.is_floating_point():
            return labels.to(like)
        return F.one_hot(labels, self.network.classes).to(like) - 1 / self.network.classes

    def _fill(self, seed: int) -> None:
        """Fresh networks, of ages that are spread out."""
        self.pool = [self._fresh(seed + number) | {"age": number * MOST_STEPS // POOL} for number in range(POOL)]

    def _fresh(self, seed: int) -> dict[str, Any]:
        params = self.network.drawn(seed, self.device)
        zeros = {name: torch.zeros_like(p) for name, p in params.items()}
        return {"params": params, "mean": zeros, "square": zeros, "steps": 0, "age": 0}

    def _age(self, number: int, images: Tensor, labels: Tensor, seed: int) -> None:
        """One Adam step on the recalled images; too old, a network begins anew. The pool before is left as it was."""
        member = self.pool[number]
        if member["age"] + 1 >= MOST_STEPS:
            new = self._fresh(seed)
        else:
            new, steps = {"age": member["age"] + 1, "steps": member["steps"] + 1}, member["steps"] + 1
            gradient = grad(self.network.loss)(member["params"], images, labels)
            kinds = {"mean": gradient, "square": {name: g.square() for name, g in gradient.items()}}
            for (kind, now), beta in zip(kinds.items(), BETAS, strict=True):
                new[kind] = {name: torch.lerp(old, now[name], 1 - beta) for name, old in member[kind].items()}
            unbias = [1 - beta**steps for beta in BETAS]
            new["params"] = {
                name: p - POOL_LR * (new["mean"][name] / unbias[0]) / ((new["square"][name] / unbias[1]).sqrt() + EPSILON)
                for name, p in member["params"].items()
            }
        self.pool = [*self.pool[:number], new, *self.pool[number + 1 :]]

    def to_dict(self) -> dict[str, Any]:
        return {"pool": self.pool}

    def load(self, saved: dict[str, Any]) -> None:
        to = lambda values: {name: value.to(self.device) for name, value in values.items()}  # noqa: E731
        self.pool = [
            {name: to(value) if isinstance(value, dict) else value for name, value in member.items()}
            for member in saved.get("pool", [])
        ]


def regression(ours: Tensor, labels: Tensor, theirs: Tensor, truth: Tensor, ridge: float = RIDGE) -> Tensor:
    """J for features of recalled [n, D] and real images [N, D], and their targets."""
    kernel, across = ours @ ours.T, theirs @ ours.T
    penalty = ridge * kernel.diagonal().mean() * torch.eye(len(ours), dtype=ours.dtype, device=ours.device)
    return (across @ torch.linalg.solve(kernel + penalty, labels) - truth).square().mean()
