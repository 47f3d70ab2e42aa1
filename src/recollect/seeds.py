"""Randomness that does not depend on what was drawn before: every generator is keyed by integers, its purpose among them."""

from enum import IntEnum, unique

import numpy as np
import torch


@unique
class Purpose(IntEnum):
    """What a generator is for. The numbers are part of every result: a seed gives the same bytes as long as they stay."""

    START = 0
    """bases and addressing of a fresh memory"""
    STEPS = 1
    """what the steps of a loop see: outer steps, or those of a network's training"""
    NETWORK = 2
    """networks that are trained to evaluate"""
    RANDOM_REAL = 3
    """the baseline of random real images"""
    TEACH = 4
    """the training of an encoder before it is distilled with"""
    EXPERT = 5
    """experts: networks that are trained on real images, for trajectories to be matched to"""
    FEATURES = 6
    """the network by whose features real images are chosen, to compare with"""
    ANGLES = 40
    CLASS_ORDER = 41
    TASK_ROWS = 42
    """streams: rotation angles, classes of tasks, training images of a task"""
    TASK_START = 50
    KEEP = 51
    REPLAY = 52
    INNER = 53
    LENGTH = 54
    """a task's memory: its start, its reservoir, replayed samples, inner networks, lengths of unrolls"""
    FRESH = 60
    DRAW = 61
    TRAIN = 62
    UNION = 63
    """learners: a first network, drawn samples, a task's network, the network of the union"""
    EXPERIENCE = 70
    """the order in which a buffer looks at an experience"""
    JUDGE = 71
    """networks that judge a trial of settings"""


def seeded(*numbers: int) -> torch.Generator:
    """A generator keyed by its integers; trailing zeros are ignored."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1))


def network_seed(*numbers: int) -> int:
    """The seed of a fresh network, keyed in the same way."""
    return int(seeded(*numbers).initial_seed())
