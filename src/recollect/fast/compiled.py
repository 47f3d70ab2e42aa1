"""The passes of unroll.py through torch.compile, for any network."""

import shutil
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jvp

from recollect.fast.prune import PruneConvolutions
from recollect.unroll import Loss, Params, Passes, eager


def compiled(loss: Loss) -> Passes:
    """The same passes through torch.compile; without a C++ compiler it says so once, and gives the eager ones.

    The adjoint is taken the other way round, as the gradient of the directional derivative <g, mu>: the same two products,
    for one convolution in nine less. Channels-last is what the processor's convolutions like best.
    """
    if not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
        warnings.warn("no C++ compiler (g++ or clang++) found: the unroll runs uncompiled, slower", stacklevel=2)
        return eager(loss)

    def gradient(params: Params, images: Tensor, labels: Tensor) -> Params:
        return grad(loss)(*_channels_last(params, images), labels)

    def adjoint(params: Params, images: Tensor, labels: Tensor, mu: Params) -> tuple[Params, Tensor]:
        direction, _ = _channels_last(mu, images)

        def slope(theta: Params, x: Tensor) -> Tensor:
            return jvp(lambda p: loss(p, x, labels), (theta,), (direction,))[1]

        return grad(slope, argnums=(0, 1))(*_channels_last(params, images))

    def judge(params: Params, images: Tensor, labels: Tensor) -> tuple[Params, Tensor]:
        return grad_and_value(loss)(*_channels_last(params, images), labels)

    options: dict[str, Any] = {"post_grad_custom_pre_pass": PruneConvolutions()}
    faster = partial(torch.compile, dynamic=False, options=options)
    return Passes(faster(gradient), faster(adjoint), faster(judge))


def _channels_last(params: Params, images: Tensor) -> tuple[Params, Tensor]:
    laid = {n: p.contiguous(memory_format=torch.channels_last) if p.ndim == 4 else p for n, p in params.items()}
    return laid, images.contiguous(memory_format=torch.channels_last)
