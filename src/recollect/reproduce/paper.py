"""What the paper prints (arXiv:2206.02916), in percent, as (mean, deviation); numbered in the order in which its source has them.

Where its tables disagree, the larger table of the appendix is taken, and `NOTES` says so.
"""

from recollect.show.tables import PAPER_MEMORY, PAPER_PER_CLASS

Quoted = tuple[float, float | None]
"""mean and deviation"""
ByBudget = dict[str, dict[int, Quoted]]
"""dataset -> images per class -> what is printed"""


def _by_budget(**rows: tuple[Quoted, ...]) -> ByBudget:
    return {name.replace("_", "-"): dict(zip((1, 10, 50), values, strict=False)) for name, values in rows.items()}


FULL: ByBudget = {dataset: dict(row) for dataset, row in PAPER_MEMORY.items()}
"""Table 1, column Ours"""
OTHERS: dict[str, ByBudget] = {
    "DC": _by_budget(
        mnist=((91.7, 0.5), (97.4, 0.2), (98.8, 0.2)), fashion_mnist=((70.5, 0.6), (82.3, 0.4), (83.6, 0.4)),
        svhn=((31.2, 1.4), (76.1, 0.6), (82.3, 0.3)), cifar10=((28.3, 0.5), (44.9, 0.5), (53.9, 0.5)),
        cifar100=((12.8, 0.3), (25.2, 0.3)),
    ),
    "DSA": _by_budget(
        mnist=((88.7, 0.6), (97.8, 0.1), (99.2, 0.1)), fashion_mnist=((70.6, 0.6), (84.6, 0.3), (88.7, 0.2)),
        svhn=((27.5, 1.4), (79.2, 0.5), (84.4, 0.4)), cifar10=((28.8, 0.7), (52.1, 0.5), (60.6, 0.5)),
        cifar100=((13.9, 0.3), (32.3, 0.3)),
    ),
    "KIP": _by_budget(
        mnist=((90.1, 0.1), (97.5, 0.0), (98.3, 0.1)), fashion_mnist=((73.5, 0.5), (86.8, 0.1), (88.0, 0.1)),
        svhn=((57.3, 0.1), (75.0, 0.1), (80.5, 0.1)), cifar10=((49.9, 0.2), (62.7, 0.3), (68.6, 0.2)),
        cifar100=((15.7, 0.2), (28.3, 0.1)),
    ),
    "CAFE": _by_budget(
        mnist=((93.1, 0.3), (97.5, 0.1), (98.9, 0.2)), fashion_mnist=((77.1, 0.9), (83.0, 0.3), (88.2, 0.3)),
        svhn=((42.9, 3.0), (77.9, 0.6), (82.3, 0.4)), cifar10=((31.6, 0.8), (50.9, 0.5), (62.3, 0.4)),
        cifar100=((14.0, 0.3), (31.5, 0.2)),
    ),
    "TM": _by_budget(
        cifar10=((46.3, 0.8), (65.3, 0.7), (71.6, 0.2)), cifar100=((24.3, 0.3), (40.1, 0.4)), tinyimagenet=((8.8, 0.3),)
    ),
    "DM": _by_budget(
        mnist=((89.7, 0.6), (97.5, 0.1), (98.6, 0.1)), cifar10=((26.0, 0.8), (48.9, 0.6), (63.0, 0.4)),
        cifar100=((11.4, 0.3), (29.7, 0.3)), tinyimagenet=((3.9, 0.2),),
    ),
}  # fmt: skip
"""Table 1, the other methods as the paper quotes them"""

BPTT: ByBudget = {dataset: dict(row) for dataset, row in PAPER_PER_CLASS.items()}
"""Table 7 (full ablation), column BPTT: per-class images"""
GRADIENTS = OTHERS["DC"]
"""Table 7, column Single-step GM, which is DC of Table 1"""
DOWNSAMPLED = _by_budget(
    mnist=((98.2, 0.1), (98.9, 0.1), (99.4, 0.1)), fashion_mnist=((86.7, 0.3), (89.1, 0.1), (90.7, 0.1)),
    svhn=((80.1, 0.5), (86.2, 0.2), (88.8, 0.2)), cifar10=((55.2, 0.5), (65.9, 0.4), (71.1, 0.5)),
    cifar100=((25.9, 0.4), (36.5, 0.4)),
)  # fmt: skip
"""Table 7, column BPTT+ds"""
WITHOUT_AUGMENTATION = _by_budget(cifar10=((64.2, 0.6), (70.9, 0.4), (72.1, 0.5)), cifar100=((33.5, 0.2), (40.6, 0.3)))
"""Table 7, column Full w/o Aug.; the other datasets are not augmented"""

MOMENTUM: dict[str, dict[int, Quoted]] = {
    "none": {1: (40.5, 0.8), 10: (50.0, 0.5)},
    "forward-only": {1: (45.6, 0.7), 10: (57.4, 0.3)},
    "full": {1: (49.1, 0.6), 10: (62.4, 0.4)},
}
"""Table 8: BPTT on CIFAR-10 with 200 inner steps"""

_NETWORKS = ("alexnet", "resnet12", "convnet")
_ACROSS: dict[str, dict[int, tuple[Quoted, ...]]] = {
    "alexnet": {1: ((58.5, 0.5), (53.6, 0.6), (57.3, 0.6)), 10: ((65.6, 0.5), (60.2, 0.6), (63.7, 0.6))},
    "resnet12": {1: ((53.2, 0.8), (58.5, 0.5), (57.0, 0.3)), 10: ((62.3, 0.9), (67.8, 0.3), (65.2, 0.6))},
    "convnet": {1: ((50.5, 1.3), (55.9, 0.6), (66.4, 0.4)), 10: ((63.8, 0.8), (67.5, 0.4), (71.2, 0.4))},
}
ACROSS: dict[str, dict[int, dict[str, Quoted]]] = {
    made: {budget: dict(zip(_NETWORKS, row, strict=True)) for budget, row in rows.items()} for made, rows in _ACROSS.items()
}
"""Table 6: distilled with -> images per class -> trained -> what is printed, on CIFAR-10"""

COMPOSED: dict[int, dict[str, Quoted]] = {
    2: {"memories": (72.53, 8.74), "all the data": (92.23, 4.76)},
    5: {"memories": (46.54, 6.42), "all the data": (82.72, 4.29)},
}
"""Section 5.3.1: classes of a task -> trained on -> mean and deviation over 1,000 tasks"""

ASKED: dict[int, dict[str, Quoted]] = {
    1: {"image addressing": (55.74, None), "nearest neighbour": (48.55, None), "classify-then-recall": (50.58, None)},
    5: {"image addressing": (71.20, None), "nearest neighbour": (61.72, None), "classify-then-recall": (58.46, None)},
}
"""Table 4: shots -> method"""

NOTES = {
    "table1": "Table 2 prints 73.8 ± 0.4 for CIFAR-10 with 50 images per class, Table 1 and Table 7 73.6 ± 0.5.",
    "ablation": "Tables 2 and 7 disagree on single-step gradient matching: Table 2 has DSA's figures (28.8, 52.1 and 60.6 on "
    "CIFAR-10, 13.9 and 32.3 on CIFAR-100), Table 7 those of DC, which are shown here.",
    "inner-steps": "The paper has a figure without numbers (Figure 4). Its text: momentum adds 7.0 points with 10 inner steps "
    "and 9.2 with 100 on CIFAR-10; long unrolls add 18.2 on CIFAR-10 and 42.3 on SVHN to those of one step.",
    "bases": "The paper has curves without numbers (Figures 2 and 5), of the validation split.",
    "similarity": "The paper has matrices without numbers (Figures 3 and 6): classes of one superclass are alike.",
    "visualisations": "The paper has pictures without numbers (Figures 8 to 14). With the five classes that they show, its 43 "
    "bases and 10 images per class recall 100 images of each, which it calls 99; with all hundred classes they would recall 683.",
    "continual": "The paper's Online on CIFAR-100 repeats that on MANY, and is left out.",
    "compose": "Section 5.3.1; each of 1,000 tasks has classes of as many memories.",
    "ask": "Table 4 has no deviations.",
}
"""what must be known to compare"""
