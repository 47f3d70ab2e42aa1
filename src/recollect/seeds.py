"""Randomness that does not depend on what was drawn before."""

import numpy as np
import torch


def seeded(*numbers: int) -> torch.Generator:
    """A generator for one purpose, told apart by its numbers (zeros at their end do not count)."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1))
