"""Distil, and the report that every run ends with."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, arg

from recollect.commands.inputs import Data, loaded, spec
from recollect.config import DistillConfig, changed
from recollect.show import terminal


@dataclass(frozen=True)
class Distill:
    """Distil a dataset into a memory."""

    images: OmitArgPrefixes[Data]
    config: Annotated[OmitArgPrefixes[DistillConfig], arg(name="")]
    preset: Literal["fast", "paper"] = "fast"
    """set of defaults: fast, chosen on validation splits, or paper"""
    out: Path | None = None
    """folder of the run. Default: runs/DATASET-IMAGES_PER_CLASS"""
    tensorboard: bool = False
    """log for TensorBoard too, in the run's folder (pip install 'recollect[tensorboard]')"""
    quiet: bool = False
    """print the result alone"""

    def perform(self) -> int:
        from recollect import distributed
        from recollect.cost import advice
        from recollect.devices import find_device
        from recollect.minutes import MINUTES
        from recollect.runs import Run

        data = spec(self.images)
        images = loaded(data)
        folder = self.out or Path("runs") / f"{images.name}-{self.config.budget.images_per_class}"
        config = self.config
        if config == DistillConfig() and find_device("auto") == "cpu":
            config = changed(config, minutes=MINUTES)
        again = _is_restarted(folder)
        if not (self.quiet or again or distributed.current().rank):
            Run(folder).refuse_if_used()
            for line in advice(images, config):
                print(line, file=sys.stderr)
        return run_distillation(images, config, folder, data, self.quiet, resume=again, tensorboard=self.tensorboard)


def _is_restarted(folder: Path) -> bool:
    """Whether torchrun starts this run once more, since one of its processes died."""
    from recollect import distributed
    from recollect.runs import Run

    return distributed.restarted() and distributed.current().first(Run(folder).is_begun)


def run_distillation(images, config, folder: Path, data: dict[str, Any], quiet: bool, resume=False, tensorboard=False) -> int:
    from recollect import distributed
    from recollect.distillation import distill
    from recollect.runs import Run
    from recollect.show import tracking

    done, ranks = len(Run(folder).metrics()) if resume else 0, distributed.current()
    tensorboard = tensorboard and not ranks.rank
    with (
        tracking.tensorboard(folder, tensorboard) as write,
        terminal.steps(images.name, config.budget.outer_steps, quiet, done) as show,
    ):

        def progress(line: dict[str, Any]) -> None:
            for each in (write, show):
                if each:
                    each(line)

        say = (lambda line: None) if quiet else partial(print, file=sys.stderr)
        memory = distill(images, config, run=folder, resume=resume, data=data, progress=progress, say=say)
    if ranks.rank:
        return 0
    terminal.say(f"{memory.floats:,} numbers in {Run(folder).memory_path}")
    write_report(folder, quiet)
    return 0


def write_report(folder: Path, quiet: bool = False) -> None:
    """The run's page, written again from what its folder holds."""
    from recollect.show import report

    written = report.write(folder)
    if not quiet:
        terminal.say(f"report in {written}")
