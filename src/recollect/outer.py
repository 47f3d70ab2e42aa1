"""The outer step, for everybody: clip or skip, step the optimiser, average. Functions of a state; one state a memory.

Tensors are changed in place, so that whoever holds them (an optimiser, a stack of tasks) goes on with them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from recollect.config import OuterStep
from recollect.nets import Params

MOST_SKIPS = 20  # outer steps in a row without a finite gradient before a run stops
WILD = 20.0  # times its running norm: an outer gradient larger than that came from an inner loop that diverged
JUMP = 2.0  # times itself: more than that a single gradient does not count in the running norm
BACK = 0.2  # of the way back to the average, where there is no usable gradient
MANY, FEW = 0.1, 10  # of the steps so far that were skipped, and steps: more than both is said
NUMBERS = ("step", "taken", "norm", "skipped", "not_finite")


@dataclass
class State:
    """All that changes of one memory from one outer step to the next."""

    bases: Tensor
    addressing: Tensor
    encoder: Params
    """what the queries learn; empty where labels are asked with"""
    optimiser: torch.optim.Optimizer
    average: list[Tensor]
    """the exponential moving average of bases, addressing and encoder"""
    step: int = 0
    taken: int = 0
    """outer steps with a usable gradient"""
    norm: float = 0.0
    """running mean of the outer gradient's norm"""
    skipped: int = 0
    """outer steps without a usable gradient, in all"""
    not_finite: int = 0
    """outer steps in a row without a finite one; one that is only large will be usual some day"""
    before: dict[str, Any] = field(default_factory=dict)
    """how the memory that this run goes on from was made"""

    @property
    def tensors(self) -> list[Tensor]:
        return [self.bases, self.addressing, *self.encoder.values()]

    @property
    def learned(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors if tensor.requires_grad]

    def to_dict(self) -> dict[str, Any]:
        tensors = {"tensors": [tensor.detach() for tensor in self.tensors], "average": self.average}
        return {name: getattr(self, name) for name in NUMBERS} | tensors | {"optimiser": self.optimiser.state_dict()}

    def load(self, saved: dict[str, Any]) -> None:
        """What to_dict gave; a TypeError, or another one, for anything else."""
        numbers = check_numbers(saved)
        with torch.no_grad():
            for name in ("tensors", "average"):
                for mine, theirs in zip(getattr(self, name), saved[name], strict=True):
                    _check_like(theirs, mine)
                    mine.copy_(theirs)
        _load_optimiser(self.optimiser, self.learned, saved["optimiser"]["state"])
        vars(self).update(numbers)


def check_numbers(saved: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a saved state, those of 0.1 too; a TypeError where one is none."""
    known = {"taken": saved["step"] - saved["skipped"], "not_finite": 0} | saved  # what 0.1 did not write
    numbers = {name: known[name] for name in NUMBERS}
    for name, value in numbers.items():
        if type(value) is not (float if name == "norm" else int) or not value >= 0:
            raise TypeError(f"{name} is {value!r}")
    return numbers


def _check_like(theirs: object, mine: Tensor) -> None:
    plain = theirs if isinstance(theirs, Tensor) and theirs.layout == torch.strided else None
    if plain is None or plain.shape != mine.shape or plain.dtype != mine.dtype:
        raise TypeError(f"a tensor like {list(mine.shape)} is expected")


def _load_optimiser(optimiser: torch.optim.Optimizer, learned: Sequence[Tensor], saved: dict[int, dict[str, Any]]) -> None:
    """What it keeps of each tensor; torch would take anything, and fail in a step."""
    known = {torch.optim.SGD: {"momentum_buffer"}, torch.optim.Adam: {"step", "exp_avg", "exp_avg_sq"}}
    names = next((names for kind, names in known.items() if isinstance(optimiser, kind)), set())
    for place, kept in saved.items():
        if not names <= kept.keys():
            raise TypeError(f"the optimiser keeps {sorted(names)}")
        for name in names:
            if name != "momentum_buffer" or kept[name] is not None:
                _check_like(kept[name], torch.zeros(()) if name == "step" else learned[place])
    own = {place: {n: v.clone() if isinstance(v, Tensor) else v for n, v in kept.items()} for place, kept in saved.items()}
    optimiser.load_state_dict({"state": own, "param_groups": optimiser.state_dict()["param_groups"]})


def begin(
    bases: Tensor, addressing: Tensor, encoder: Params, config: OuterStep, encoder_lr: float = 0.0,
    make: Callable[..., torch.optim.Optimizer] | None = None,
) -> State:  # fmt: skip
    """The state before the first step; what requires a gradient is learned. `make` is another optimiser than the config's."""
    groups = [{"params": [t for t in (bases, addressing) if t.requires_grad], "first": config.lr}]
    if encoder:
        groups.append({"params": list(encoder.values()), "first": encoder_lr})
    if make:
        optimiser = make(groups, lr=config.lr)
    elif config.optimiser == "sgd":
        optimiser = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    else:
        optimiser = torch.optim.Adam(groups, lr=config.lr, betas=(float(config.momentum), 0.999))
    state = State(bases, addressing, encoder, optimiser, [])
    forget(state)
    return state


def forget(state: State) -> None:
    """The average begins anew with the tensors as they are."""
    state.average = [tensor.detach().clone() for tensor in state.tensors]


def share(schedule: str, step: int, steps: int) -> float:
    """Of the learning rate, at this outer step, from 1 on."""
    return 1.0 if schedule == "constant" else 0.5 * (1 + math.cos(math.pi * (step - 1) / steps))


def advance(state: State, value: float, gradients: Sequence[Tensor], config: OuterStep, steps: int) -> dict[str, Any]:
    """One outer step: clip, update, average; without a usable gradient, a part of the way back to the average.

    Arguments:
        value, gradients: the objective's, the latter by `state.learned`.
        steps: outer steps in all, for the schedule.

    Returns:
        what to log of it.
    """
    norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
    state.step += 1
    usual = state.norm or math.inf  # before the first there is none, and nothing is too large
    if math.isfinite(norm):
        state.norm = 0.9 * usual + 0.1 * min(norm, JUMP * usual) if state.norm else norm
    finite = math.isfinite(value) and math.isfinite(norm)
    state.not_finite = 0 if finite else state.not_finite + 1
    if not finite or (config.clip_running and norm > WILD * usual):
        _go_back(state)
        return {"step": state.step, "loss": None, "norm": None, "skipped": state.skipped}
    limit = min(config.clip_norm or math.inf, (config.clip_running or math.inf) * usual)
    rate = share(config.schedule, state.step, steps)
    _move(state, gradients, min(1.0, limit / norm) if norm > 0 else 1.0, rate)
    decay = min(config.ema, (1 + state.taken) / (10 + state.taken))  # a short memory while there is little to remember
    for mean, now in zip(state.average, state.tensors, strict=True):
        mean.lerp_(now.detach(), 1 - decay)
    return {"step": state.step, "loss": value, "norm": norm, "lr": config.lr * rate, "skipped": state.skipped}


def complaint(state: State, inner_lr: float) -> str | None:
    """What to say of a memory of which many outer steps were skipped."""
    if state.skipped < FEW or state.skipped <= MANY * state.step:
        return None
    return (
        f"{state.skipped} of {state.step} outer steps were skipped, as their gradient was not usable: inner_lr is too large "
        f"({inner_lr:g}); try {inner_lr / 2:g}"
    )


def is_round(count: int) -> bool:
    """FEW, twice as many, and so on: when something is said again."""
    return count % FEW == 0 and (count // FEW).bit_count() == 1


@torch.no_grad()
def _go_back(state: State) -> None:
    state.skipped += 1
    for mean, now in zip(state.average, state.tensors, strict=True):
        now.lerp_(mean, BACK)


def _move(state: State, gradients: Sequence[Tensor], scale: float, rate: float) -> None:
    state.taken += 1
    for each in state.optimiser.param_groups:
        each["lr"] = each["first"] * rate
    for tensor, gradient in zip(state.learned, gradients, strict=True):
        tensor.grad = gradient * scale
    state.optimiser.step()
