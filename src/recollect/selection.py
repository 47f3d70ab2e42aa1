"""Choosing a setting on the validation split: one distillation for each value, judged by images that none of them saw."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from recollect.config import DistillConfig, changed, to_json
from recollect.data.images import Images
from recollect.distillation import Progress, distill, resolve
from recollect.errors import RecollectError, unknown
from recollect.evaluation import Evaluation, evaluate
from recollect.files import read_json, write_json
from recollect.memory import Memory
from recollect.nets import Constructor
from recollect.runs import Run

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
    values: "list[Any] | tuple[Any, ...]" = (),
    *,
    run: "Path | str",
    resume: bool = False,
    networks: int = 5,
    network: Constructor | None = None,
    data: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Selection:
    """Distil once for each value of one config field, and compare on the validation split.

    Each value has a run folder of its own below `run`; `resume` goes on with what is not finished there.
    """
    config = config or DistillConfig()
    values = _checked(config, field, list(values), images)
    folder = Path(run)
    settings = {"data": data or {}, "distill": to_json(config), "field": field, "values": values, "networks": networks}
    settings = json.loads(json.dumps(settings))
    results: list[dict[str, Any]] = _results(folder, settings) if resume else _begin(folder, settings)
    for value in values[len(results) :]:
        below = folder / f"{field}={str(value).replace('/', '_')}"
        chosen = changed(config, **{field: value})
        memory = _distilled(images, chosen, below, network, data, progress)
        found = evaluate(memory, images, networks=networks, on="validation", network=network, name=f"{field} {value}")
        results.append(found.to_json())
        write_json(folder / FILE, settings | {"results": results})
    evaluations = [Evaluation.from_json(result) for result in results]
    return Selection(field, values, evaluations)


def _checked(config: DistillConfig, field: str, values: list[Any], images: Images) -> list[Any]:
    known = [f.name for f in fields(DistillConfig)]
    if field not in known:
        raise unknown("setting", field, known)
    if config.run.use_validation or field == "use_validation":
        raise RecollectError("use_validation leaves nothing to select on: turn it off")
    if not values:
        raise RecollectError(f"no values of {field} to choose from: give at least two (--values)")
    for value in values:  # all of them before the first hour is spent
        resolve(changed(config, **{field: value}), images)
    return values


def _begin(folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    if (folder / FILE).exists():
        raise RecollectError(
            f"{folder} already holds a selection: resume it (recollect resume {folder}) or give another --out"
        )
    Run(folder).refuse_if_used()
    write_json(folder / FILE, settings | {"results": []})
    return []


def _results(folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    known = read_json(folder / FILE)
    for name, value in settings.items():
        if known.get(name) != value:
            raise RecollectError(
                f"{folder} was begun with {name} {known.get(name)!r}, not {value!r}: resume it unchanged"
            )
    for value, result in zip(settings["values"], known["results"], strict=False):
        if result["name"] != f"{settings['field']} {value}":
            raise RecollectError(
                f"{folder / FILE} has a result of {result['name']} where {value} is due: was it edited?"
            )
    return known["results"]


def _distilled(images, config, folder, network, data, progress) -> Memory:
    """The memory of one value: finished before, to be continued, or new."""
    begun = Run(folder).config_path.exists()
    return distill(images, config, network=network, run=folder, resume=begun, data=data, progress=progress)
