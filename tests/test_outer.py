"""The outer step: torch's own update, clipping, skipping, averaging; and the same whoever is beside it."""

import math

import pytest
import torch

from recollect.config import OuterStep
from recollect.outer import BACK, JUMP, MOST_SKIPS, WILD, State, advance, begin, forget, share

CONSTANT = OuterStep(schedule="constant", clip_running=0.0, ema=0.0, lr=0.1)


def state(config: OuterStep = CONSTANT, learned: bool = True) -> State:
    generator = torch.Generator().manual_seed(0)
    bases = torch.randn(3, 1, 2, 2, generator=generator).requires_grad_()
    addressing = torch.randn(2, 3, 3, generator=generator).requires_grad_(learned)
    return begin(bases, addressing, {}, config)


def ones(of: State, times: float = 1.0) -> list[torch.Tensor]:
    return [torch.full_like(tensor, times) for tensor in of.learned]


def copied(tensors) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_the_update_is_torch_s_own(optimiser):
    config = OuterStep(optimiser=optimiser, lr=0.1, momentum=0.7, schedule="constant", clip_running=0.0, ema=0.0)
    ours = state(config)
    mine = [tensor.detach().clone().requires_grad_() for tensor in ours.learned]
    theirs = torch.optim.SGD(mine, 0.1, 0.7) if optimiser == "sgd" else torch.optim.Adam(mine, 0.1, (0.7, 0.999))
    for _ in range(3):
        for tensor in mine:
            tensor.grad = torch.randn_like(tensor)
        advance(ours, 1.0, [tensor.grad for tensor in mine], config, 10)
        theirs.step()
    for tensor, expected in zip(ours.learned, mine, strict=True):
        assert torch.equal(tensor, expected)
    assert torch.equal(ours.average[0], ours.bases)


def test_only_what_is_learned_moves():
    one = state(learned=False)
    before = copied(one.tensors)
    advance(one, 1.0, ones(one), CONSTANT, 10)
    assert not torch.equal(one.bases, before[0])
    assert torch.equal(one.addressing, before[1])


def test_a_clip_is_a_length():
    config = OuterStep(optimiser="sgd", lr=1.0, momentum=0.0, schedule="constant", clip_running=0.0, clip_norm=1.0, ema=0.0)
    for times in (1.0, 1e-3):
        one = state(config)
        before = copied(one.learned)
        advance(one, 1.0, ones(one, times), config, 10)
        moved = [old - now.detach() for old, now in zip(before, one.learned, strict=True)]
        length = torch.cat([each.flatten() for each in moved]).norm().item()
        assert length == pytest.approx(min(1.0, times * math.sqrt(12 + 18)), rel=1e-4)


@pytest.mark.parametrize("what", ["value", "gradient"])
def test_without_a_finite_gradient_it_waits(what):
    one = state()
    advance(one, 1.0, ones(one), CONSTANT, 10)
    norm, average = one.norm, copied(one.average)
    gradients = ones(one)
    if what == "gradient":
        gradients[1][0, 0, 0] = torch.inf
    line = advance(one, math.nan if what == "value" else 1.0, gradients, CONSTANT, 10)
    assert (line["loss"], line["skipped"]) == (None, 1)
    assert (one.step, one.taken, one.skipped, one.not_finite) == (2, 1, 1, 1)
    assert one.norm == pytest.approx(norm)
    assert all(torch.equal(a, b) for a, b in zip(one.average, average, strict=True))
    advance(one, 1.0, ones(one), CONSTANT, 10)
    assert (one.taken, one.not_finite) == (2, 0)


def test_a_gradient_that_explodes_takes_the_memory_back_towards_its_average():
    config = OuterStep(schedule="constant", clip_running=2.0, ema=0.9)
    one = state(config)
    for _ in range(3):
        advance(one, 1.0, ones(one), config, 1000)
    before, average, norm = copied(one.tensors), copied(one.average), one.norm
    advance(one, 1.0, ones(one, 1.01 * WILD), config, 1000)
    assert (one.skipped, one.not_finite) == (1, 0)
    assert one.norm == pytest.approx((0.9 + 0.1 * JUMP) * norm)
    for now, old, mean in zip(one.tensors, before, average, strict=True):
        torch.testing.assert_close(now.detach(), old.lerp(mean, BACK))
    assert all(torch.equal(a, b) for a, b in zip(one.average, average, strict=True))
    while one.skipped < 200 and one.taken == 3:
        advance(one, 1.0, ones(one, 1e6), config, 1000)
    assert MOST_SKIPS < one.skipped < 200  # one that stays large becomes the usual
    assert one.not_finite == 0


def test_the_average_counts_the_steps_that_were_taken():
    config = OuterStep(schedule="constant", clip_running=0.0, ema=0.9)
    one, other = state(config), state(config)
    for _ in range(5):
        advance(other, math.nan, ones(other), config, 10)
    for each in (one, other):
        forget(each)
        each.bases.data.fill_(0)
        advance(each, 1.0, ones(each), config, 10)
    torch.testing.assert_close(one.average[0], other.average[0])


def test_a_schedule_goes_from_one_to_nothing():
    assert share("cosine", 1, 10) == 1
    assert 0 < share("cosine", 10, 10) < 0.05
    assert share("constant", 10, 10) == 1


def test_a_state_goes_on_after_a_checkpoint(tmp_path):
    config = OuterStep(ema=0.9)
    whole, parts = state(config), state(config)
    for number in range(6):
        advance(whole, 1.0, ones(whole, number + 1.0), config, 6)
    for number in range(3):
        advance(parts, 1.0, ones(parts, number + 1.0), config, 6)
    torch.save(parts.to_dict(), tmp_path / "state.pt")
    resumed = state(config)
    resumed.load(torch.load(tmp_path / "state.pt", weights_only=True))
    for number in range(3, 6):
        advance(resumed, 1.0, ones(resumed, number + 1.0), config, 6)
    for mine, theirs in zip([*resumed.tensors, *resumed.average], [*whole.tensors, *whole.average], strict=True):
        assert torch.equal(mine, theirs)
    assert (resumed.norm, resumed.taken) == (whole.norm, whole.taken)
