"""Matching gradients (DC): recalled and real images of a class pull a network's weights in the same direction.

    J = sum over classes, weight tensors of two or more dimensions, and their output rows of  1 - cos(g_real, g_recalled)

g is the gradient of the loss of one class's images. With one augmentation for both sides (`siamese`) this is DSA. The network
lasts for `network_lasts` outer steps. Before each but its first it takes `network_steps` of SGD on what is recalled by then; so
its weights and velocity are a state. The gradient by the recalled images takes a second backward pass through the first.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from recollect.config import InnerLoop, Matching
from recollect.data import augment
from recollect.fast import Compute
from recollect.nets import Network, Params
from recollect.objectives.pairs import Pairing, found, pairing, pairs
from recollect.objectives.seam import Chance, Examples, Found, batches
from recollect.unroll import eager

SMALLEST = 1e-6  # added to the product of two norms


class Drawn(NamedTuple):
    """What is compared, what the network is trained on before, and the seed of one that takes its place."""

    pairing: Pairing
    rows: Tensor
    """[T, B]"""
    seen: list[augment.Drawn]
    seed: int


class Gradients:
    """The network, and what it says of a recalled set."""

    def __init__(
        self, network: Network, inner: InnerLoop, device: str, compute: Compute = "auto", compile: bool = False,
        matching: Matching = Matching(), *_: Any,
    ):  # fmt: skip
        self.network, self.inner, self.device, self.siamese = network, inner, device, matching.siamese
        self.lasts, steps = matching.network_lasts or 1, matching.network_steps or 0
        self.steps = steps if self.lasts > 1 else 0
        self.names, self.slope = augment.parse(inner.augment), eager(network.loss).gradient
        self.state: dict[str, Any] = {}
        """params, velocity, age; nothing where the next step begins with a fresh network"""

    def to_dict(self) -> dict[str, Any]:
        return self.state

    def load(self, saved: dict[str, Any]) -> None:
        to = lambda values: {name: value.to(self.device) for name, value in values.items()}  # noqa: E731
        self.state = {name: to(value) if isinstance(value, dict) else value for name, value in saved.items()}

    def draw(self, labels: Tensor, chance: Chance) -> Drawn:
        generator = chance.network(0)
        seed = int(torch.randint(2**62, (), generator=generator))
        compared = pairing(labels, self.inner, self.siamese, chance, generator)
        rows = batches(labels, self.steps, self.inner.per_class, generator)
        own = [chance.shared or augment.draw(self.names, rows.shape[1], generator) for _ in rows]
        return Drawn(compared, rows, own, seed)

    def gradient(self, recalled: Examples, real: Examples, drawn: Drawn) -> Found:
        state = self._trained(recalled, drawn) if self.state else self._fresh(drawn.seed)
        names = [name for name, p in state["params"].items() if p.ndim >= 2]
        values, rows, by_leaf = [], [], []
        for pair in pairs(recalled, real, drawn.pairing):
            theirs = self._slope(state["params"], names, pair.theirs, pair.label, graph=False)
            ours = self._slope(state["params"], names, pair.ours, pair.label, graph=True)
            value = torch.stack([distance(*each) for each in zip(ours, theirs, strict=True)]).sum()
            by_leaf.append(torch.autograd.grad(value, pair.leaf)[0])
            values.append(value.detach())
            rows.append(pair.rows)
        age = state["age"] + 1
        self.state = {} if age >= self.lasts else state | {"age": age}
        return found(torch.stack(values).sum(), recalled, rows, by_leaf)

    def _slope(self, params: Params, names: list[str], images: Tensor, label: Tensor, graph: bool) -> tuple[Tensor, ...]:
        """The loss's gradient by the weights of these names, on images of one class."""
        leaves = {name: p.detach().requires_grad_(name in names) for name, p in params.items()}
        loss = self.network.loss(leaves, images, label.expand(len(images)))
        return torch.autograd.grad(loss, [leaves[name] for name in names], create_graph=graph)

    def _fresh(self, seed: int) -> dict[str, Any]:
        params = self.network.drawn(seed, self.device)
        return {"params": params, "velocity": {name: torch.zeros_like(p) for name, p in params.items()}, "age": 0}

    def _trained(self, recalled: Examples, drawn: Drawn) -> dict[str, Any]:
        """The network after some steps on the recall; the one before is left as it was."""
        params, velocity, inner = self.state["params"], self.state["velocity"], self.inner
        for rows, seen in zip(drawn.rows.to(recalled.images.device), drawn.seen, strict=True):
            gradient = self.slope(params, augment.apply(recalled.images[rows], seen), recalled.labels[rows])
            velocity = {name: inner.momentum * v + gradient[name] for name, v in velocity.items()}
            params = {name: p - inner.lr * velocity[name] for name, p in params.items()}
        return self.state | {"params": params, "velocity": velocity}


def distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """Sum over output rows of 1 - cos, for gradients by one weight tensor [rows, ...]."""
    ours, theirs = ours.flatten(1), theirs.flatten(1)
    return (1 - (ours * theirs).sum(1) / (ours.norm(dim=1) * theirs.norm(dim=1) + SMALLEST)).sum()
