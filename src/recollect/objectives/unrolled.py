"""The paper's objective: the loss of networks that were trained on the recall, differentiated through their training.

The one place where the engine is picked: captured steps on a GPU, the ConvNet's passes by hand on a CPU, else the plain
adjoint; and for MLPs whose images lie in the span of a few bases the same loop in coordinates.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recollect import fast, unroll
from recollect.config import InnerLoop
from recollect.data import augment
from recollect.distributed import Ranks
from recollect.fast import Compute, span
from recollect.fast.engine import Engine, Start
from recollect.fast.flat import General, Shards, Towards
from recollect.nets import Network, Params
from recollect.objectives.seam import Chance, Examples, Found, Problem, batches


class Unrolled:
    """Metagradients by the recalled images, the mean over `networks_per_step` fresh networks."""

    def __init__(
        self, network: Network, inner: InnerLoop, device: str, compute: Compute = "auto", compile: bool = False,
        *_: Any, judged: type[Towards] | None = None,
    ):  # fmt: skip
        self.network, self.inner, self.device = network, inner, device
        flat, self.used = fast.passes(network, device, compute, compile)
        captures = device.startswith("cuda") and isinstance(inner.augment, str)  # which a function of somebody's own cannot be
        flat = flat if captures or device == "cpu" else fast.any_network(network, compile)
        plain = isinstance(flat, General) and not captures
        self.flat = judged(flat) if judged else flat
        self.engine = None if plain else Engine(self.flat, self.used)
        self.passes = self.flat.passes if isinstance(flat, General) and isinstance(self.flat, General | Towards) else None
        self.augmentation = augment.parse(inner.augment)
        self.spanned: dict[int, Engine] = {}
        """engines in coordinates, by the number of bases"""
        self.room = True
        """for coordinates; where there is none, the other way may do with less, in pieces"""

    def to_dict(self) -> dict[str, Any]:
        return {}

    def load(self, saved: dict[str, Any]) -> None:
        pass

    # --- draws (lines 6 and 9 of Algorithm 1) ---------------------------------------------------------------------------

    def draw(self, labels: Tensor, chance: Chance) -> list[Start]:
        return self.starts(labels, chance, lambda seed: self.network.drawn(seed, self.device))

    def starts(self, labels: Tensor, chance: Chance, first: Callable[[int], Params]) -> list[Start]:
        """The inner networks, whose first weights come from a seed."""
        starts: list[Start] = []
        steps, numbers = 0, range(self.inner.networks_per_step)
        for number in numbers:
            generator = chance.network(number)
            seed = int(torch.randint(2**62, (), generator=generator))
            steps = steps or self._length(chance.length)  # which may be what the first network draws from
            if number in numbers[chance.share]:
                params, rows = first(seed), batches(labels, steps, self.inner.per_class, generator)
                starts.append(Start(params, rows, self._augmentation(chance.shared, rows.shape, generator)))
        return starts

    def _length(self, generator: torch.Generator) -> int:
        """Inner steps: all, or where the window ends at random, any number that fills it."""
        inner = self.inner
        if not inner.window or inner.window_place == "late":
            return inner.steps
        return int(torch.randint(inner.covered, inner.steps + 1, (), generator=generator))

    def _augmentation(self, shared: augment.Drawn, shape: torch.Size, generator: torch.Generator) -> augment.Schedule | None:
        """What happens to the batch of each inner step."""
        if shared:
            return augment.Schedule({name: numbers.expand(shape[0], 1, 2) for name, numbers in shared.items()})
        if not self.augmentation:
            return None
        return augment.Schedule.of([augment.draw(self.augmentation, shape[1], generator) for _ in range(shape[0])])

    # --- the gradient (lines 8 to 15) -------------------------------------------------------------------------------------

    def gradient(self, recalled: Examples, real: Examples, drawn: list[Start]) -> Found:
        return self.together([Problem(recalled, real, drawn)])[0]

    def together(self, problems: Sequence[Problem]) -> list[Found]:
        """All inner networks of all problems, on a GPU side by side. One by one a CPU gives the same bytes, whoever is beside."""
        copies = len(problems[0].drawn)
        pairs = zip(*(each.unflatten(0, (-1, copies)) for each in self._unroll(problems)), strict=True)
        return [Found(value.mean(), images.mean(0)) for value, images in pairs]

    def by_batch(self, ranks: Ranks) -> None:
        self.engine = Engine(Shards(self.flat, ranks), self.used)

    def by_network(self, recalled: Examples, real: Examples, drawn: list[Start]) -> list[Found]:
        return [Found(*each) for each in zip(*self._unroll([Problem(recalled, real, drawn)]), strict=True)]

    def _unroll(self, problems: Sequence[Problem]) -> tuple[Tensor, Tensor]:
        """Values [S] and gradients [S, N, C, H, W] of all inner networks."""
        starts = [start for problem in problems for start in problem.drawn]
        copies, steps = len(problems[0].drawn), len(starts[0].batches)
        window = min(self.inner.window or steps, steps)
        options: dict[str, Any] = {"lr": self.inner.lr, "momentum": self.inner.momentum}
        options |= {"bridge": self.inner.bridge, "window": window}
        in_span = problems[0].recalled.span is not None and self.inner.optimiser == "sgd" and not starts[0].augment
        if in_span and self.room:
            try:
                return self._in_coordinates(problems, starts, copies, options | {"longest": self.inner.steps})
            except torch.OutOfMemoryError:
                self.spanned.clear()
                self.room = False
        options |= {"optimiser": self.inner.optimiser}
        if self.engine:
            recalled, real = _stacked(problems, copies) if len(problems) > 1 else problems[0][:2]
            query = (real.images, real.labels)
            found = self.engine.together(
                starts, recalled.images, recalled.labels, query, longest=self.inner.steps, weights=False, **options
            )
        else:
            found = [
                unroll.metagradient(
                    self.network.loss, start.params, problem.recalled.images, problem.recalled.labels, start.batches,
                    (problem.real.images, problem.real.labels), augment=start.augment, passes=self.passes, **options,
                )
                for problem in problems
                for start in problem.drawn
            ]  # fmt: skip
        return torch.stack([each.loss for each in found]), torch.stack([each.images for each in found])

    def _in_coordinates(
        self, problems: Sequence[Problem], starts: list[Start], copies: int, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        (images, labels, bases), (real, truth, _) = _stacked(problems, copies)
        assert bases is not None
        if (count := bases.shape[1]) not in self.spanned:
            self.spanned[count] = Engine(span.Spanned(self.network, count), self.engine.compute if self.engine else "fp32")
        step = len(starts) if self.engine else 1
        found = [
            span.by_images(self.spanned[count], starts[at], images[at], labels[at], (real[at], truth[at]), bases[at], **options)
            for at in (slice(first, first + step) for first in range(0, len(starts), step))
        ]
        return torch.cat([values for values, _ in found]), torch.cat([by_images for _, by_images in found])

    def needs(self, recalled: int, real: int, networks: int | None = None) -> int:
        """About how many bytes of memory an outer step takes, with so many recalled and real images in a step, and so many inner
        networks side by side."""
        window, count = self.inner.covered, networks or self.inner.networks_per_step
        return (self.engine or Engine(self.flat)).needs(count, recalled, real, window, self.inner.optimiser)


def _stacked(problems: Sequence[Problem], copies: int) -> tuple[Examples, Examples]:
    """(recalled, real) with the inner networks in front, [S, ...]."""

    def several(tensors: tuple[Tensor, ...]) -> Tensor:
        return torch.stack(tensors).repeat_interleave(copies, 0)

    def stack(parts: list[Examples]) -> Examples:
        images, labels, spans = zip(*parts, strict=True)
        return Examples(several(images), several(labels), None if spans[0] is None else several(spans))

    return stack([each.recalled for each in problems]), stack([each.real for each in problems])
