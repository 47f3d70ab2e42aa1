"""What is given in Python, instead of what a config names. It is tried before anything is begun: a mistake is one clear line."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from recollect.config import DistillConfig
from recollect.data.augment import Own, apply, draw
from recollect.decisions import MakesQuery
from recollect.errors import RecollectError
from recollect.nets import Constructor, Criterion, Network, Params, Shape
from recollect.objectives import Found, Objective
from recollect.runs import Interrupted
from recollect.tensorfile import checksum
from recollect.unroll import eager, with_pullback

Optimiser = Callable[..., torch.optim.Optimizer]
"""a class of torch.optim, or anything that is called as one: (groups of tensors, lr=...)"""
FEW = 4  # images that it is tried on
Pool = Sequence["nn.Module | Params"]
"""networks, or their weights by name"""


def called(thing: object) -> str:
    """What a config says of it; of a pool how many networks it has, and their checksum."""
    if isinstance(thing, list | tuple):
        with blamed("pool"):
            tensors = [p for each in thing for p in (each.state_dict() if isinstance(each, nn.Module) else each).values()]
            return f"custom {len(thing)} networks, {checksum(t.detach().cpu() for t in tensors)[:8]}"
    return f"custom {getattr(thing, '__qualname__', type(thing).__name__)}"


@dataclass(frozen=True)
class Given:
    """What a distillation is given; `distill` says what each is."""

    network: Constructor | None = None
    objective: Callable[..., Objective] | None = None
    query: MakesQuery | None = None
    loss: Criterion | None = None
    augment: Own | None = None
    optimiser: Optimiser | None = None
    pool: Pool | None = None

    def named(self) -> dict[str, str]:
        """As a config says it, by its settings."""
        renamed = {"optimiser": "outer_optimiser"}
        given = {renamed.get(each.name, each.name): getattr(self, each.name) for each in fields(self)}
        return {name: called(value) for name, value in given.items() if value is not None}

    def network_for(self, config: DistillConfig, shape: Shape, outputs: int, usual: Criterion) -> Network:
        """The network of its inner loops."""
        made = Network(self.network or config.inner.network, shape, outputs, self.loss or usual)
        made.pool = weights(self.pool, made, config.inner.network) if self.pool is not None else ()
        return made

    def check(self, config: DistillConfig, network: Network, images: Tensor, labels: Tensor) -> None:
        """Refuse what cannot serve, tried on a few images [N, C, H, W] and their labels."""
        if self.network or self.loss:
            labels = labels if labels.is_floating_point() else labels % network.classes
            name = called(self.network).removeprefix("custom ") if self.network else config.inner.network
            check_outputs(network, images, labels.to(images.device), name, self.loss)
        if self.augment:
            if config.inner.augment_scope == "outer":
                raise RecollectError("augment is a function, which images of an outer step cannot share: drop augment_scope")
            check_augment(self.augment, images)
        if self.optimiser:
            check_optimiser(self.optimiser)
        if network.pool and config.outer.objective == "trajectories":
            raise RecollectError("objective trajectories begins with its experts' weights: leave out the pool")


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Whatever goes wrong here is the mistake of `what`, and one line."""
    try:
        yield
    except (RecollectError, Interrupted, torch.OutOfMemoryError):
        raise
    except Exception as error:
        words = (str(error).strip() or "no message").splitlines()[0]
        raise RecollectError(f"{what} fails ({type(error).__name__}: {words}): correct it") from error


def check_outputs(network: Network, images: Tensor, labels: Tensor, name: str, loss: object) -> None:
    """Refuse a network or a loss that an unroll cannot differentiate, by a pass over a few real images."""
    theta = {n: p.requires_grad_() for n, p in network.fresh(0, images.device).items()}
    with blamed(f"network {name}"):
        outputs = network.logits(theta, images)
        if not isinstance(outputs, Tensor) or outputs.shape != (len(images), network.classes):
            shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise RecollectError(
                f"network {name} gives {shape} for {len(images)} images: give [{len(images)}, {network.classes}]"
            )
    what = f"loss {called(loss).removeprefix('custom ')}" if loss else f"network {name}"
    with blamed(what):
        value = network.criterion(outputs, labels)
        if not isinstance(value, Tensor) or value.ndim:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise RecollectError(f"{what} gives {shape}, not one number: give the mean over the examples, a scalar tensor")
        if not value.requires_grad:
            raise RecollectError(f"{what} has no gradient by the network's outputs: leave out argmax, detach, item and the like")
        plain, passes = {n: p.detach() for n, p in theta.items()}, eager(network.loss)
        passes.judge(plain, images, labels)
        passes.adjoint(plain, images, labels, passes.gradient(plain, images, labels))


def check_augment(function: Own, images: Tensor) -> None:
    """Refuse one that changes the size, cuts the gradient, or is another function at the second call."""
    what = f"augment {called(function).removeprefix('custom ')}"
    drawn = draw((function,), len(images), torch.Generator().manual_seed(0))
    with blamed(what):
        seen = apply(images, drawn)
        if not isinstance(seen, Tensor) or seen.shape != images.shape or not seen.is_floating_point():
            shape = f"{seen.dtype} {list(seen.shape)}" if isinstance(seen, Tensor) else type(seen).__name__
            raise RecollectError(f"{what} makes {shape} of images of {list(images.shape)}: it must keep their size and type")
        if not torch.equal(seen, apply(images, drawn)):
            raise RecollectError(f"{what} gives other images when it is called again: draw from the generator it is given alone")
        pulled = with_pullback(lambda x, _: apply(x, drawn), images, 0)[1](torch.ones_like(images))
        if not pulled.any():
            raise RecollectError(f"{what} has no gradient by the images: leave out detach, rounding and the like")


def check_optimiser(make: Optimiser) -> None:
    """Refuse what cannot make a step by itself."""
    what, tensor = f"optimiser {called(make).removeprefix('custom ')}", torch.zeros(2, requires_grad=True)
    with blamed(what):
        made = make([{"params": [tensor], "first": 0.1}], lr=0.1)
        if not isinstance(made, torch.optim.Optimizer):
            raise RecollectError(f"{what} is none of torch.optim: give a class such as torch.optim.RMSprop")
        tensor.grad = torch.ones(2)
        made.step()


def weights(pool: Pool, network: Network, name: str) -> list[Params]:
    """Of a pool's networks, by name."""
    shapes = {n: tuple(p.shape) for n, p in network.module.named_parameters()}
    if not len(pool):
        raise RecollectError("pool is empty: give one or more networks, or leave it out")
    found: list[Params] = []
    for number, each in enumerate(pool):
        theirs: Any = dict(each.named_parameters()) if isinstance(each, nn.Module) else each
        if not isinstance(theirs, dict) or {n: tuple(getattr(p, "shape", ())) for n, p in theirs.items()} != shapes:
            raise RecollectError(f"network {number} of the pool has other weights than {name}: give networks of that kind")
        found.append({n: theirs[n].detach().float() for n in shapes})
    return found


def checked(found: Any, images: Tensor, name: str) -> Found:
    """What an objective of somebody's own found, if it is a value and a gradient."""
    if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(each, Tensor) for each in found):
        raise RecollectError(f"objective {name} gives {type(found).__name__}, not Found(value, gradient by the recalled images)")
    value, by_images = found
    if value.numel() != 1 or by_images.shape != images.shape:
        shapes = f"a value of {list(value.shape)} and a gradient of {list(by_images.shape)}"
        raise RecollectError(f"objective {name} gives {shapes}: give one number, and {list(images.shape)}")
    return Found(value.detach().reshape(()), by_images.detach())
