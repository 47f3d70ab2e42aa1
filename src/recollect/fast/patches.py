"""What a convolution sees: the patches of its maps, and the way back from patches to maps.

Maps are channels-last, [N, H, W, C]; a patch is one row of kernel x kernel x C numbers, so that a convolution is a product of
patches and weights. Both ways are one kernel on a GPU that has Triton; torch's own operations do the same anywhere.
"""

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

KINDS = torch.float32, torch.bfloat16  # of numbers that the kernels take
MOST = 2**31 - 1  # numbers that the kernels' offsets reach


class Window(NamedTuple):
    """How a convolution looks at its maps."""

    channels: int
    height: int
    width: int
    kernel: int
    stride: int
    padding: int

    @property
    def out_height(self) -> int:
        return (self.height + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def out_width(self) -> int:
        return (self.width + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def length(self) -> int:
        """of a patch"""
        return self.kernel * self.kernel * self.channels

    @property
    def maps(self) -> tuple[int, int, int, int]:
        """the shape of any number of them"""
        return -1, self.height, self.width, self.channels

    def spread(self, maps: Tensor, alive: Tensor | None = None) -> Tensor:
        """[N, H, W, C] -> [N, H', W', length]; with `alive` through a ReLU first, see `through_relu`."""
        if _has_kernels(maps, self):
            from recollect.fast import patch_kernels

            return patch_kernels.launch(patch_kernels.spread, maps, alive, self, self.out_height, self.out_width, self.length)
        maps = through_relu(maps, alive)
        p, k, s = self.padding, self.kernel, self.stride
        views = F.pad(maps, (0, 0, p, p, p, p)).unfold(1, k, s).unfold(2, k, s)  # [N, H', W', C, k, k]
        return views.permute(0, 1, 2, 4, 5, 3).flatten(3)

    def gather(self, patches: Tensor, alive: Tensor | None = None) -> Tensor:
        """[N, H', W', length] -> [N, H, W, C]: each number goes back to where it was seen, and is added to the others; then back
        through the ReLU."""
        if _has_kernels(patches, self):
            from recollect.fast import patch_kernels

            return patch_kernels.launch(patch_kernels.gather, patches, alive, self, *self.maps[1:])
        p, k, s = self.padding, self.kernel, self.stride
        padded = patches.new_zeros(len(patches), self.height + 2 * p, self.width + 2 * p, self.channels)
        parts = patches.unflatten(3, (k, k, self.channels))
        for i in range(k):
            for j in range(k):
                seen = padded[:, i : i + s * self.out_height : s, j : j + s * self.out_width : s]
                seen += parts[:, :, :, i, j]
        return through_relu(padded[:, p : p + self.height, p : p + self.width], alive)


def through_relu(numbers: Tensor, alive: Tensor | None) -> Tensor:
    """A ReLU's way back, its tangent's way on, and its own where both are the same. `alive` is what it was given, or gave."""
    return numbers if alive is None else torch.ops.aten.threshold_backward(numbers, alive.reshape(numbers.shape), 0)


def _has_kernels(tensor: Tensor, window: Window) -> bool:
    places = window.height * window.width * window.channels, window.out_height * window.out_width * window.length
    return tensor.is_cuda and tensor.dtype in KINDS and len(tensor) * max(places) <= MOST and _triton


_triton = importlib.util.find_spec("triton") is not None
