"""How bases and addressing begin: at random, or as samples."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from recollect.memory import recall


def initialise(bases: Tensor, addressing: Tensor, init: str, generator: torch.Generator) -> None:
    """Random bases and addressing, in place."""
    if init == "unit":  # variance of a recalled pixel: K * 1 * (1/K)
        bases.normal_(generator=generator)
        addressing.normal_(std=len(bases) ** -0.5, generator=generator)
        return
    fill = torch.nn.init.xavier_uniform_ if init == "xavier" else torch.nn.init.kaiming_uniform_
    fill(bases, generator=generator)
    for matrix in addressing:
        fill(matrix, generator=generator)


def begin_as_samples(bases: Tensor, addressing: Tensor, images: Tensor, labels: Tensor) -> None:
    """Make bases and learned addressing recall these images [N, C, H, W], each class its own, as nearly as the bases allow. Bases
    beyond their number, and the addressing of a class that has none, stay as they are."""
    found, coefficients = described(images, bases.shape)
    bases[: len(found)] = found.to(bases)
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero().flatten()
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
