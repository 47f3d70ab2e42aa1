"""Choose a setting on the validation split: how many bases the digits want, at the same floats.

python examples/choose.py
"""

from pathlib import Path

import recollect
from recollect.show import figures

config = recollect.preset(
    "fast",
    network="mlp:width=128",
    downsample=1,
    init="samples",
    inner_steps=20,
    inner_lr=0.05,
    window=None,
    outer_lr=0.1,
    outer_steps=40,
)
found = recollect.select(recollect.load("digits"), config, "bases", [4, 6], run="runs/choose")
for value, evaluation in zip(found.values, found.evaluations, strict=True):
    print(f"{value} bases: {evaluation.mean:.1f} ± {evaluation.deviation:.1f} % of the validation images")
print("the best:", found.best, "bases")
figures.save(figures.draw("selection", [Path("runs/choose")]), Path("choose.png"))
