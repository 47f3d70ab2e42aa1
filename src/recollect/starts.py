"""How bases and addressing begin: at random, or as samples."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from recollect.budget import Budget
from recollect.config import Sizes
from recollect.memory import one_hot_addressing, recall


def fresh(wanted: Sizes, budget: Budget, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random bases [K, c, h, w] and addressing [r, d_y, K], of the sizes that fit a budget."""
    count, matrices = budget.sizes(wanted)
    bases = torch.empty(count, *budget.base_shape)
    if wanted.addressing == "one-hot":
        return bases.normal_(generator=generator), one_hot_addressing(budget.classes, matrices).float()
    addressing = torch.empty(matrices, budget.query_numbers, count)
    if wanted.init == "unit":  # variance of a recalled pixel: K * 1 * (1/K)
        return bases.normal_(generator=generator), addressing.normal_(std=count**-0.5, generator=generator)
    fill = torch.nn.init.xavier_uniform_ if wanted.init == "xavier" else torch.nn.init.kaiming_uniform_
    for part in (bases, *addressing):
        fill(part, generator=generator)
    return bases, addressing


def begin_as_samples(bases: Tensor, addressing: Tensor, images: Tensor, labels: Tensor, one_hot: bool) -> None:
    """Make a memory recall these images [N, C, H, W], each class its own, as nearly as its bases allow. Bases beyond their
    number, and the addressing of a class that has none, stay as they are."""
    rows_of = {label: (labels == label).nonzero().flatten() for label in labels.unique().tolist()}
    if one_hot:
        small, each = torch.nn.functional.interpolate(images, bases.shape[-2:], mode="area"), len(addressing)
        for label, rows in rows_of.items():
            bases[label * each : label * each + len(rows)] = small[rows[:each]].to(bases)
        return
    found, coefficients = described(images, bases.shape)
    bases[: len(found)] = found.to(bases)
    for label, rows in rows_of.items():
        chosen = coefficients[rows[torch.arange(len(addressing)) % len(rows)]]
        addressing[:, label] = torch.nn.functional.pad(chosen, (0, len(bases) - len(found))).to(addressing)


def described(images: Tensor, bases: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Up to K bases [K, c, h, w] and coefficients [N, K] that recall images [N, c, H, W] with the least squared error: singular
    vectors of what such bases can recall of them. Component by component, both have the same scale."""
    most, _, *small = bases
    units = torch.eye(math.prod(small))
    recalled = recall(units.view(-1, 1, *small), units[None], units, (images.shape[-2], images.shape[-1]))
    span, mixed = torch.linalg.qr(recalled.flatten(1).double().T)  # a base's pixels are recalled as span @ mixed @ pixels
    within = (images.flatten(2).double() @ span).flatten(1)
    left, sizes, right = torch.linalg.svd(within, full_matrices=False)
    scales = (sizes[:most] / math.sqrt(within.numel())).sqrt()
    vectors = right[:most].unflatten(1, (-1, len(units))) * math.sqrt(within.shape[1])
    found = torch.linalg.solve(mixed, vectors.mT).mT * scales[:, None, None]
    coefficients = left[:, :most] * math.sqrt(len(within)) * scales
    return found.reshape(-1, *bases[1:]).float(), coefficients.float()
