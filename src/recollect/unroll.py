"""The inner loop and its exact adjoint, for any network: pure functions of tensors, to be read beside the equations.

    m_t = beta m_{t-1} + g(theta_{t-1}, x_t),    theta_t = theta_{t-1} - alpha m_t,    g = dL/dtheta      (Algorithm 1, 8-13)

With lambda_T = dJ/dtheta_T and mu_{T+1} = 0, for t = T..1:

    mu_t         = beta mu_{t+1} - alpha lambda_t
    lambda_{t-1} = lambda_t + H(theta_{t-1}, x_t) mu_t
    dJ/dx_t      = (d/dx) <g(theta_{t-1}, x_t), mu_t>

The last two come from one forward-over-reverse pass: the jvp of grad_{theta,x} L along (mu_t, 0). Of the trajectory only
the weights are kept (for Adam its two averages and gradients too), so activation memory does not grow with T.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jvp, vjp

from recollect.errors import RecollectError

Params = dict[str, Tensor]
Loss = Callable[[Params, Tensor, Tensor], Tensor]
Step = int | Tensor  # its number, or a tensor of one number on the device
Augment = Callable[[Tensor, Any], Tensor]
Bridge = Literal["full", "forward-only", "none"]
Optimiser = Literal["sgd", "adam"]

ADAM_BETA2, ADAM_EPSILON = 0.999, 1e-8


class MetaGradient(NamedTuple):
    """What an unroll gives back."""

    loss: Tensor
    """J, the loss of theta_T on the query"""
    images: Tensor
    """dJ / d images, [N, C, H, W]"""
    params: Params
    """theta_T"""


@dataclass(frozen=True)
class Passes:
    """The passes over a network that make up an unroll; fast/ has the same ones, faster."""

    gradient: Callable[[Params, Tensor, Tensor], Params]
    """g(theta, x)"""
    adjoint: Callable[[Params, Tensor, Tensor, Params], tuple[Params, Tensor]]
    """(H(theta, x) mu, (d/dx) <g(theta, x), mu>)"""
    judge: Callable[[Params, Tensor, Tensor], tuple[Params, Tensor]]
    """(dJ/dtheta, J) on the query"""


def eager(loss: Loss) -> Passes:
    """The passes of a loss, run operation by operation."""

    def gradient(params: Params, images: Tensor, labels: Tensor) -> Params:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        found = torch.autograd.grad(loss(leaves, images, labels), list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, found, strict=True))

    def adjoint(params: Params, images: Tensor, labels: Tensor, mu: Params) -> tuple[Params, Tensor]:
        gradients = grad(loss, argnums=(0, 1))
        return jvp(lambda theta: gradients(theta, images, labels), (params,), (mu,))[1]

    return Passes(gradient, adjoint, grad_and_value(loss))


def metagradient(
    loss: Loss,
    params: Params,
    images: Tensor,
    labels: Tensor,
    batches: Tensor,
    query: tuple[Tensor, Tensor],
    *,
    lr: float,
    momentum: float,
    bridge: Bridge = "full",
    window: int | None = None,
    optimiser: Optimiser = "sgd",
    augment: Augment | None = None,
    passes: Passes | None = None,
) -> MetaGradient:
    """Train `params` on the recalled set, and differentiate the trained network's loss by that set.

    Arguments:
        loss: (params, images, labels) -> scalar.
        params: theta_0.
        images: the recalled set, [N, C, H, W].
        labels: theirs, [N].
        batches: [T, B], the rows of the recalled set that each inner step sees.
        query: (real images, real labels), what the trained network is judged by; what `passes.judge` takes, if that is another.
        lr: alpha.
        momentum: beta; for Adam, its first decay rate.
        bridge: how the adjoint crosses steps through the momentum: "full"; "forward-only", which keeps momentum in the
            inner loop but not in its adjoint; "none", an inner loop without momentum.
        window: how many last steps the adjoint covers (None: all of them).
        optimiser: "sgd" or "adam", the inner optimiser.
        augment: (images of a batch, step) -> images, differentiable and the same at every call with the same step.
        passes: the network's passes, where they were prepared before.

    Returns:
        loss: J, a scalar.
        images: dJ / d images, [N, C, H, W].
        params: theta_T.

    Examples:
        >>> import torch
        >>> network = recollect.Network("mlp:width=16", (1, 8, 8), 10)
        >>> images, labels = torch.randn(20, 1, 8, 8), torch.arange(20) % 10
        >>> batches = torch.arange(20).repeat(5, 1)  # [T, B]: five steps on all images
        >>> real = torch.randn(50, 1, 8, 8), torch.arange(50) % 10
        >>> found = recollect.metagradient(network.loss, network.fresh(0), images, labels, batches, real, lr=0.05, momentum=0.9)
        >>> found.images.shape
        torch.Size([20, 1, 8, 8])
    """
    window = checked_window(window, len(batches))
    run = passes or eager(loss)
    beta = 0.0 if bridge == "none" else momentum
    kept, params = _train(run, params, images, labels, batches, window, lr, beta, optimiser, augment)
    slope, value = run.judge(params, *query)  # lambda_T = dJ / dtheta_T, and J

    # The adjoint, last step first
    first, by_images = len(batches) - window, torch.zeros_like(images)
    mu = {name: torch.zeros_like(p) for name, p in params.items()}
    by_mean, by_square = mu, mu
    for t in reversed(range(first, len(batches))):
        before, *adam = ({name: tensors[t - first].clone() for name, tensors in block.items()} for block in kept)
        if optimiser == "sgd":
            keep = beta if bridge == "full" else 0.0
            mu = {name: keep * mu[name] - lr * slope[name] for name in mu}
        else:
            mu, by_mean, by_square = _each(partial(adam_adjoint, lr, beta, t + 1, bridge), *adam, slope, by_mean, by_square)
        seen, pull = with_pullback(augment, images[batches[t]], t)
        curvature, by_seen = run.adjoint(before, seen, labels[batches[t]], mu)
        slope = {name: s + curvature[name] for name, s in slope.items()}
        by_images.index_add_(0, batches[t], pull(by_seen))
    return MetaGradient(value, by_images, params)


def _train(
    run: Passes, params: Params, images: Tensor, labels: Tensor, batches: Tensor, window: int, lr: float, beta: float,
    optimiser: Optimiser, augment: Augment | None,
) -> tuple[list[Params], Params]:  # fmt: skip
    """The inner loop: what the adjoint needs of the last `window` steps (theta_{t-1}; for Adam g_t, m_t, v_t too), and theta_T.

    It is kept in one block a tensor: weights kept one by one would scatter over the heap, and every activation after them
    would need new memory.
    """
    first, kinds = len(batches) - window, 1 if optimiser == "sgd" else 4
    kept = [{name: p.new_empty(window, *p.shape) for name, p in params.items()} for _ in range(kinds)]
    mean = {name: torch.zeros_like(p) for name, p in params.items()}
    square = mean
    for t, rows in enumerate(batches):
        seen = augment(images[rows], t) if augment else images[rows]
        gradient, before = run.gradient(params, seen, labels[rows]), params
        if optimiser == "sgd":
            mean = {name: beta * m + gradient[name] for name, m in mean.items()}
            params = {name: p - lr * mean[name] for name, p in params.items()}
        else:
            params, mean, square = _each(partial(adam_step, lr, beta, t + 1), params, gradient, mean, square)
        if t >= first:
            for block, kind in zip(kept, (before, gradient, mean, square)[:kinds], strict=True):
                for name, p in kind.items():
                    block[name][t - first].copy_(p)
    return kept, params


def _each(function: Callable[..., tuple[Tensor, Tensor, Tensor]], *of: Params) -> tuple[Params, Params, Params]:
    """A function of tensors, for every name."""
    found = {name: function(*(each[name] for each in of)) for name in of[0]}
    first, second, third = ({name: tensors[number] for name, tensors in found.items()} for number in range(3))
    return first, second, third


def with_pullback(augment: Augment | None, images: Tensor, t: Step) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """What step t saw of these images, and the way back from a gradient by what it saw to one by the images."""
    if augment is None:
        return images, lambda gradient: gradient
    seen, pull, *_ = vjp(lambda x: augment(x, t), images)
    return seen, lambda gradient: pull(gradient)[0]


def checked_window(window: int | None, steps: int) -> int:
    if window is None:
        return steps
    if not 1 <= window <= steps:
        raise RecollectError(f"window of {window} steps in an unroll of {steps}: give 1 to {steps}")
    return window


def adam_step(
    lr: float, beta: float, t: Step, theta: Tensor, gradient: Tensor, mean: Tensor, square: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of Adam: (theta_t, m_t, v_t)."""
    mean = beta * mean + (1 - beta) * gradient
    square = ADAM_BETA2 * square + (1 - ADAM_BETA2) * gradient**2
    root = (square / (1 - ADAM_BETA2**t)).sqrt()
    return theta - lr * (mean / (1 - beta**t)) / (root + ADAM_EPSILON), mean, square


def adam_adjoint(
    lr: float, beta: float, t: Step, bridge: Bridge,
    gradient: Tensor, mean: Tensor, square: Tensor, slope: Tensor, by_mean: Tensor, by_square: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """mu_t = dJ/dg_t of an Adam step, and dJ/dm_{t-1}, dJ/dv_{t-1} to carry on ("forward-only" carries nothing).

    Where v_t is 0 the gradient never was anything else, and the root's infinite slope meets a factor of 0: its term is 0.
    """
    unbias, scale = 1 - ADAM_BETA2**t, lr / (1 - beta**t)
    root = (square / unbias).sqrt()
    by_mean = by_mean - scale * slope / (root + ADAM_EPSILON)
    by_root = scale * slope * mean / (root + ADAM_EPSILON) ** 2
    by_square = by_square + torch.where(root > 0, by_root / (2 * root * unbias), 0.0)
    mu = (1 - beta) * by_mean + (1 - ADAM_BETA2) * 2 * gradient * by_square
    if bridge == "forward-only":
        return mu, torch.zeros_like(mu), torch.zeros_like(mu)
    return mu, beta * by_mean, ADAM_BETA2 * by_square
