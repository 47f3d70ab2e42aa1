"""Choosing a setting on the validation split: one distillation for each value, judged by images that none of them saw.

config.json          what was asked for
bases=8/             the run of each value, and bases=8.json, what it gave
logs/                what jobs on a cluster have said
select.json          all of it, as far as it is there, to draw figures from
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from recollect.config import DistillConfig, changed, plain_number, to_json
from recollect.data.images import Images
from recollect.decisions import resolve
from recollect.distillation import Progress, distill
from recollect.errors import RecollectError
from recollect.evaluation import Evaluation, evaluate
from recollect.files import read_json, write_json
from recollect.jobs import Executor, Inline, Job, Tell
from recollect.nets import Constructor
from recollect.runs import Run, Stopped

FILE = "select.json"


@dataclass(frozen=True)
class Selection:
    """What each value of a setting gave on the validation split."""

    field: str
    values: list[Any]
    evaluations: list[Evaluation]

    @property
    def best(self) -> Any:
        """The value of the highest mean accuracy; of equals, the first."""
        means = [evaluation.mean for evaluation in self.evaluations]
        return self.values[means.index(max(means))]


def select(
    images: Images,
    config: DistillConfig | None = None,
    field: str = "bases",
    values: Sequence[Any] = (),
    *,
    run: "Path | str",
    resume: bool = False,
    networks: int = 5,
    network: Constructor | None = None,
    data: dict[str, Any] | None = None,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> Selection:
    """Distil once for each value of one setting, and compare on the validation split.

    Arguments:
        images: what `recollect.load` gives. Its test split is not read.
        config: all other settings; None is the preset `fast`.
        field: the setting to choose, by its name: "bases", "inner_lr", ...
        values: those to compare.
        run: a folder; each value has a run folder of its own in it.
        resume: go on with what is not finished there.
        networks: fresh networks that judge each value.
        network: a function (image shape, classes) -> nn.Module, instead of the config's named network.
        data: how `images` were loaded, so that `recollect resume` can load them again.
        progress: called with the numbers of each outer step.
        executor: performs the values' jobs; None is one after another, in this process.

    Returns:
        A Selection: `best`, `values`, and for each value an Evaluation.

    Examples:
        >>> small = recollect.preset("fast", network="mlp:width=32", inner_steps=5, window=5, outer_steps=2)
        >>> found = recollect.select(recollect.load("digits"), small, "bases", [4, 8], run="runs/bases", networks=2)
        >>> found.best in found.values
        True
    """
    config = config or DistillConfig()
    values = _checked(config, field, [plain_number(value) for value in values], images)
    settings = {"data": data or {}, "distill": to_json(config), "field": field, "values": values, "networks": networks}
    with Run.working(run, "select", None if resume else settings) as begun:
        begun.check(config, data=settings["data"], field=field, values=values, networks=networks)
        files = [_file(begun.folder, field, value) for value in values]
        for file, result in zip(files, begun.settings.get("results", []), strict=False):  # where 0.1 wrote them
            if not file.is_file():
                write_json(file, result)
        due = jobs(images, config, field, values, run=begun.folder, networks=networks, network=network, data=data)
        due = [job for job, file in zip(due, files, strict=True) if not file.is_file()]
        try:
            (executor or Inline()).run(due, lambda line, _: progress(line) if progress else None)
        except Stopped as stopped:  # of a value's run; it is the selection that goes on
            raise Stopped(stopped.signal, begun.folder, stopped.args[2]) from None
        finally:
            found = [(file, read_json(file)) for file in takewhile(Path.is_file, files)]
            results = [each for _, each in found]
            write_json(begun.folder / FILE, settings | {"results": results})
    return Selection(field, values[: len(results)], [Evaluation.from_json(each, file) for file, each in found])


def jobs(
    images: Images,
    config: DistillConfig,
    field: str,
    values: Sequence[Any],
    *,
    run: Path,
    networks: int = 5,
    network: Constructor | None = None,
    data: dict[str, Any] | None = None,
) -> list[Job]:
    """One for each value, in the folder of a selection that was begun; `select` says what the arguments are."""
    found = []
    for value in values:
        chosen, name = changed(config, **{field: value}), f"{field} {value}"
        arguments = images, chosen, name, _file(run, field, value), networks, {"network": network, "data": data}
        command = ("recollect", "resume", str(run), "--job", name)
        found.append(Job(name, _judged, arguments, chosen.budget.outer_steps, run, command))
    return found


def _file(run: Path, field: str, value: Any) -> Path:
    """What a value gave."""
    return run / f"{field}={str(value).replace('/', '_')}.json"


def _checked(config: DistillConfig, field: str, values: list[Any], images: Images) -> list[Any]:
    if config.run.use_validation or field == "use_validation":
        raise RecollectError("use_validation leaves nothing to select on: turn it off")
    if not values:
        raise RecollectError(f"no values of {field} to choose from: give at least two (--values)")
    for value in values:  # all of them before the first hour is spent
        resolve(changed(config, **{field: value}), images)
    return values


def _judged(
    images: Images, config: DistillConfig, name: str, file: Path, networks: int, options: dict[str, Any], tell: Tell
) -> None:
    """One value, unless its file is there; its run is new, to be continued, or finished."""
    if file.is_file():
        return
    run = Run(file.with_suffix(""))
    told = {"resume": run.is_begun, "progress": lambda line: tell(line | {"job": name}, 1.0)}
    memory = distill(images, config, run=run.folder, **told, **options)
    found = evaluate(memory, images, networks=networks, on="validation", network=options["network"], name=name)
    write_json(file, found.to_json())
