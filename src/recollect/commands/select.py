"""One setting chosen on the validation split."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, arg

from recollect.commands.inputs import Data, at_least_one, loaded, spec
from recollect.commands.performing import JOBS, Performing
from recollect.config import DistillConfig, changed, from_json, setting, to_json
from recollect.show import terminal


@dataclass(frozen=True)
class Select:
    """Choose the number of bases, or any other setting, on the validation split."""

    images: OmitArgPrefixes[Data]
    config: Annotated[OmitArgPrefixes[DistillConfig], arg(name="")]
    preset: Literal["fast", "paper"] = "fast"
    """set of defaults: fast, chosen on validation splits, or paper"""
    field: str = "bases"
    """setting to vary"""
    values: tuple[str, ...] = ()
    """values to try, as in --values 8 16 24"""
    networks: int = 5
    """number of fresh networks for each value"""
    out: Path | None = None
    """folder of the selection. Default: runs/select-DATASET-FIELD"""
    quiet: bool = False
    """print the result alone"""
    jobs: Annotated[Performing, *JOBS] = Performing()

    def perform(self) -> int:
        data = spec(self.images)
        images = loaded(data)
        folder = self.out or Path("runs") / f"select-{images.name}-{self.field}"
        values = [_parsed(self.config, self.field, text) for text in self.values]
        at_least_one(self.networks)
        chosen = {"field": self.field, "values": values, "networks": self.networks}
        return select_values(images, self.config, folder, data, self.quiet, self.jobs, **chosen)


def select_values(
    images, config, folder: Path, data, quiet: bool, jobs: Performing, field, values, networks, resume=False
) -> int:
    from recollect.selection import select
    from recollect.show import figures

    with terminal.steps(images.name, config.budget.outer_steps, quiet) as show:
        if show and not jobs.is_usual:
            steps = [changed(config, **{field: value}).budget.outer_steps for value in values]
            show = terminal.of_all(show, sum(steps))
        chosen = {"field": field, "values": values, "networks": networks, "executor": jobs.chosen()}
        selection = select(images, config, run=folder, resume=resume, data=data, progress=show, **chosen)
    rows = [(evaluation, "") for evaluation in selection.evaluations]
    terminal.accuracy_table(f"{images.name}: {terminal.metric(rows)} on the validation split ({networks} networks each)", rows)
    figures.save(figures.selection_figure(selection), folder / "select.png")
    terminal.say(f"best {field}: {selection.best}", f"curve  {folder / 'select.png'}")
    return 0


def _parsed(config: DistillConfig, field: str, text: str) -> Any:
    """A setting's value from the command line: a number, True, False or None where the setting takes one, else a word."""
    settings = to_json(config)
    if field not in settings:
        return text  # select() names the nearest setting
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    return setting(from_json(DistillConfig, settings | {field: value}, "--values"), field)
