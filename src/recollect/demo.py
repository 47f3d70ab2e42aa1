"""The front door: digits distilled to the floats of one image per class, beside what else those floats could be."""

import time
from dataclasses import replace
from pathlib import Path

from recollect.config import DistillConfig, changed, preset
from recollect.data import load
from recollect.distillation import distill
from recollect.evaluation import Evaluation, evaluate, full_data, keep, memory_recipe, random_real
from recollect.memory import Memory
from recollect.runs import Run
from recollect.show import figures, report, terminal

CONFIG = preset(
    "fast",
    bases=7,
    downsample=1,
    init="unit",
    network="mlp:width=128",
    inner_steps=30,
    inner_lr=0.05,
    window=None,
    window_place="late",
    outer_steps=600,
    outer_lr=0.1,
    real_per_class=100,
)
"""Chosen on the validation split of the digits (docs/recipe.md). At 8x8 there is nothing to gain from smaller bases."""
PER_CLASS = changed(CONFIG, addressing="one-hot", bases=None)
"""Vanilla BPTT: the same floats and steps, spent on one plain image per class."""
FULL_EPOCHS, FULL_BATCH = 20, 64  # all the data needs fewer passes over more images


def demo(out: Path, networks: int = 20, quiet: bool = False) -> list[Evaluation]:
    """Distil, retrain, compare; prints the table and leaves a run folder with the memory, a figure and the report."""
    began = time.perf_counter()
    images = load("digits")
    memory = _distilled("memory", CONFIG, out, quiet)
    per_class = _distilled("per-class images", PER_CLASS, out / "per-class", quiet)

    recipe, preprocess = memory_recipe(memory), memory.preprocess()
    whole = replace(recipe, epochs=FULL_EPOCHS, batch=FULL_BATCH)
    ours = evaluate(memory, images, networks=networks)
    rows = [
        (ours, f"{memory.floats} floats"),
        (evaluate(per_class, images, networks=networks, name="per-class images (BPTT)"), f"{per_class.floats} floats"),
        (random_real(images, 1, preprocess, recipe, networks=networks), f"{per_class.floats} floats"),
        (full_data(images, preprocess, whole, networks=networks), f"{images.train.images.numel():,} floats"),
    ]
    run = Run(out)
    memory.with_accuracy(ours.entry()).save(run.memory_path)
    keep(run.memory_path, rows)
    figures.save(figures.memory_figure(memory), out / "memory.png")
    written = report.write(out)

    terminal.accuracy_table(f"digits, 1 image per class: accuracy on the test set of {networks} fresh networks", rows)
    terminal.say(f"memory  {run.memory_path}", f"figure  {out / 'memory.png'}", f"report  {written}")
    terminal.say(f"in      {time.perf_counter() - began:.0f} s")
    return [evaluation for evaluation, _ in rows]


def _distilled(name: str, config: DistillConfig, folder: Path, quiet: bool) -> Memory:
    with terminal.steps(name, config.budget.outer_steps, quiet) as progress:
        return distill(load("digits"), config, run=folder, data={"name": "digits"}, progress=progress)
