"""Real images chosen by their features: what the same floats buy by choosing well, without distilling.

The features are those of one network that has seen the training images twice (BRIEF), of the kind that is then trained on the
choice. Rows are of a class's features [n, D]; all choices are greedy and draw nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from recollect.config import Recipe
from recollect.data.images import Images
from recollect.nets import Constructor, Network
from recollect.seeds import Purpose, network_seed
from recollect.training import train

BRIEF = 2  # epochs
MOST = 2048  # images that are looked at together
How = Literal["herding", "k-center"]


def herding(features: Tensor, count: int) -> Tensor:
    """Rows whose mean is near the mean of all, one after another: [count]"""
    mean, total, rows = features.mean(0), torch.zeros_like(features[0]), []
    for number in range(min(count, len(features))):
        far = ((total + features) / (number + 1) - mean).square().sum(1)
        far[rows] = torch.inf
        rows.append(int(far.argmin()))
        total = total + features[rows[-1]]
    return torch.tensor(rows)


def k_center(features: Tensor, count: int) -> Tensor:
    """The row nearest to the mean, and then always the one that is farthest from those before it: [count]"""
    rows = [int((features - features.mean(0)).square().sum(1).argmin())]
    nearest = (features - features[rows[0]]).square().sum(1)
    while len(rows) < min(count, len(features)):
        rows.append(int(nearest.argmax()))
        nearest = torch.minimum(nearest, (features - features[rows[-1]]).square().sum(1))
    return torch.tensor(rows)


CHOICES: dict[How, Callable[[Tensor, int], Tensor]] = {"herding": herding, "k-center": k_center}


def chosen(
    images: Images,
    prepared: Tensor,
    how: How,
    per_class: int,
    recipe: Recipe,
    *,
    network: Constructor | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Tensor:
    """Rows of the training images, `per_class` of each class.

    Arguments:
        images: the dataset; only its training split is looked at.
        prepared: its training images as a network sees them, [N, C, H, W].
        how: "herding" or "k-center".
        per_class: how many of each class.
        recipe: of the networks that will be trained on them; the one that gives features has its network, rates and batches of
            256, for two epochs.
        network: a function (image shape, classes) -> nn.Module, instead of the recipe's named network.
        seed: of that network.
        device: where it is trained.
    """
    net, labels = Network(network or recipe.network, images.shape, images.classes), images.train.labels
    brief = replace(recipe, epochs=BRIEF, batch=256)
    (params,) = train(net, [(prepared, labels)], brief, [network_seed(seed, Purpose.FEATURES)], device)
    found = []
    for label in range(images.classes):
        rows = (labels == label).nonzero().flatten()
        with torch.no_grad():
            features = torch.cat([net.features(params, prepared[some.to(prepared.device)]) for some in rows.split(MOST)])
        found.append(rows[CHOICES[how](features.double().cpu(), per_class)])
    return torch.cat(found)
