"""Go on with a run of any kind."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from recollect.commands.continual import run_stream
from recollect.commands.distill import run_distillation
from recollect.commands.inputs import how
from recollect.commands.select import select_values
from recollect.config import DistillConfig, from_json
from recollect.continual.config import CONTINUAL, ContinualConfig
from recollect.errors import RecollectError
from recollect.files import read_json


@dataclass(frozen=True)
class Resume:
    """Continue a run or a selection that was stopped or killed, from its last checkpoint."""

    run: Positional[Path]
    """its folder"""
    root: Path | None = None
    """folder with the official files, where it is not the one the run was begun with"""
    quiet: bool = False
    """print the result alone"""

    def perform(self) -> int:
        from recollect.data import load
        from recollect.runs import Run
        from recollect.selection import FILE

        if (self.run / CONTINUAL).exists():
            return _resume_stream(self)
        is_selection = (self.run / FILE).exists()
        settings = _selection(self.run / FILE) if is_selection else Run.open(self.run).config
        data = settings["data"]
        if "name" not in data:
            raise RecollectError(
                f"{self.run} was made in Python, with images of its own: resume it there (resume=True)"
            )
        for name in ("network", "objective", "query"):
            given = settings["distill"].get(name)
            if isinstance(given, str) and given.startswith("custom "):
                kind = name.replace("query", "query kind")
                raise RecollectError(
                    f"{self.run} has a {kind} given in Python ({given}): resume it there (resume=True)"
                )
        config = from_json(DistillConfig, settings["distill"], self.run)
        images = load(**how(data, root=self.root))
        if is_selection:
            chosen = {name: settings[name] for name in ("field", "values", "networks")}
            return select_values(images, config, self.run, data, self.quiet, resume=True, **chosen)
        tensorboard = (self.run / "tensorboard").is_dir()
        return run_distillation(images, config, self.run, data, self.quiet, resume=True, tensorboard=tensorboard)


def _selection(path: Path) -> dict[str, Any]:
    settings = read_json(path)
    kinds: dict[str, type] = dict(data=dict, distill=dict, field=str, values=list, networks=int, results=list)
    for name, kind in kinds.items():
        if not isinstance(settings.get(name), kind):
            raise RecollectError(f"{path} has no '{name}': restore it, or start another selection")
    return settings


def _resume_stream(command: Resume) -> int:
    settings = read_json(command.run / CONTINUAL)
    data, config, stream, calls = (settings.get(part) for part in ("data", "config", "stream", "how"))
    if not (
        isinstance(data, dict) and isinstance(config, dict) and isinstance(stream, str) and isinstance(calls, dict)
    ):
        raise RecollectError(f"{command.run / CONTINUAL} is damaged: restore it, or start another run")
    if "name" not in data:
        raise RecollectError(f"{command.run} was made in Python, with images of its own: go on with it there")
    config = from_json(ContinualConfig, config, command.run / CONTINUAL)
    data = data | {"root": str(command.root) if command.root else data.get("root")}
    return run_stream(stream, config, data, calls, command.run, command.quiet)
