"""An MLP whose images lie in the span of a few bases: the inner loop in their coordinates.

Recalled images are combinations of K bases. With Q for K orthonormal rows of the same span, an image is x = u Q, and all that
SGD ever adds to the first layer's weights W is in the span too. So the loop is that of an MLP with K inputs, u, and first
weights V = W0 Q', exactly: 24 columns in the place of 784, in products, trajectory and adjoint.

Real images do not lie there. What the first layer makes of one is (x Q') V' + x_ W0', where x_ is what Q leaves of x, and the
second term never changes: an offset. And the gradient by a recalled image points out of the span as well:

    sum over steps of  d. W  +  d M      where W = V Q + W0_  and  M = N Q + a S_

with d and d. as in chain.py, M for the adjoint's direction mu of the first layer, and S_ = (the gradient by the first layer's
products on the real images)' x_: nothing else ever leads out. V and N are what the loop has; W0_ and S_ do not change, so sums
of d. and of a d over the steps are enough. The factor a goes the way of mu: it is mu of a weight whose slope is 1.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recollect.fast.chain import ALIGNED, Chain, Layer, fits
from recollect.fast.engine import Engine, Start
from recollect.nets import Network, Params

SMALLEST = 1e-13  # of the bases' products, against their mean: added, so that bases may depend on each other


def pays(network: Network, bases: int) -> bool:
    """Whether the loop is shorter in coordinates: an MLP, and bases much fewer than pixels."""
    channels, height, width = network.shape
    return fits(network) and not network.convolves and 2 * bases <= channels * height * width


class Spanned(Chain):
    """The passes in coordinates. An image is [1, 1, K + 2 H], where H is the first layer's width: its coordinates, and room for
    the sums of d. and a d in its gradient. A real image is [1, 1, K + H]: its coordinates, and its offset."""

    splits = False  # a judge keeps what it found of the first layer

    def __init__(self, network: Network, bases: int):
        super().__init__(network)
        self.first, self.bases = next(iter(self.shapes)), bases
        self.width = self.shapes[self.first][0]
        self.shapes[self.first] = torch.Size((self.width, bases))
        self.inputs[self.first] = (bases, 1)
        self.size = sum(shape.numel() for shape in self.shapes.values())
        self.backs: dict[torch.Size, Tensor] = {}
        """the gradient by the first layer's products on the real images, of the last judge of each shape"""

    def pack(self, params: Params) -> Tensor:
        """With a weight of slope 1 behind the others."""
        packed = super().pack(params)
        return packed if len(packed) > self.size else torch.nn.functional.pad(packed, (0, ALIGNED))

    def _enter(self, images: Tensor) -> Tensor:
        return images.flatten(2)[..., : self.bases]

    def _first_bias(self, layer: Layer, images: Tensor) -> Tensor:
        if images.shape[-1] == self.bases + self.width:
            return layer.bias + images.flatten(2)[..., self.bases :]
        return layer.bias

    def _judged(self, slope: Tensor, back: Tensor) -> Tensor:
        slope[:, self.size] = 1
        if back.shape not in self.backs:
            self.backs[back.shape] = torch.empty_like(back)
        self.backs[back.shape].copy_(back)
        return slope

    def _by_images(self, by_seen: Tensor, back_dot: Tensor, back: Tensor, mu: Tensor, images: Tensor) -> Tensor:
        return torch.cat([by_seen, back_dot, back * mu[:, self.size, None, None]], -1).view(images.shape)


def by_images(
    engine: Engine, starts: Sequence[Start], images: Tensor, labels: Tensor, query: tuple[Tensor, Tensor], bases: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Losses [S] and metagradients by images [S, N, C, H, W] in the span of bases [S, K, C, H, W], by an engine of Spanned
    passes. For SGD, and for images that nothing takes out of the span."""
    flat = engine.flat
    assert isinstance(flat, Spanned)
    given, real, rows = (part.flatten(2) for part in (images, query[0], bases))
    frame = orthonormal(rows)  # [S, K, D]
    weights = torch.stack([start.params[flat.first] for start in starts])  # [S, H, D]
    inner = weights @ frame.mT
    outer = weights - inner @ frame
    reduced = [start._replace(params={**start.params, flat.first: v}) for start, v in zip(starts, inner, strict=True)]
    room = given.new_zeros(*given.shape[:2], 2 * flat.width)
    places = real @ frame.mT
    rest = real - places @ frame
    seen = torch.cat([given @ frame.mT, room], -1)[:, :, None, None]
    judged = torch.cat([places, rest @ weights.mT], -1)[:, :, None, None]
    found = engine.together(reduced, seen, labels, (judged, query[1]), **options, weights=False)
    within, by_weights, by_slope = torch.stack([each.images for each in found]).flatten(2).split(
        [flat.bases, flat.width, flat.width], -1
    )  # fmt: skip
    back = flat.backs[torch.Size([*real.shape[:2], flat.width])]
    by_pixels = within @ frame + by_weights @ outer + (by_slope @ back.mT) @ rest
    return torch.stack([each.loss for each in found]), by_pixels.view(images.shape)


def orthonormal(rows: Tensor) -> Tensor:
    """As many rows [..., K, D] of length 1, square to each other and of the same span; shorter ones where rows depend on each
    other to rounding, in directions that no combination of them goes far in."""
    exact = rows.double()
    products = exact @ exact.mT
    mean = products.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(torch.finfo(exact.dtype).tiny / SMALLEST)
    unit = torch.eye(rows.shape[-2], dtype=exact.dtype, device=exact.device)
    lower = torch.linalg.cholesky_ex(products + SMALLEST * mean * unit).L  # whose errors a GPU would wait for
    return torch.linalg.solve_triangular(lower, exact, upper=False).to(rows.dtype)
