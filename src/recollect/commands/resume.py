"""Go on with a run of any kind."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from recollect.commands.continual import run_stream
from recollect.commands.distill import run_distillation
from recollect.commands.inputs import loaded
from recollect.commands.select import select_values
from recollect.config import DistillConfig, from_json
from recollect.continual.config import ContinualConfig
from recollect.errors import RecollectError


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
        from recollect.runs import Run

        begun = Run.open(self.run)
        settings = begun.settings
        if "name" not in settings["data"]:
            raise RecollectError(f"{self.run} was made in Python, with images of its own: go on with it there")
        kinds = {"distill": _go_on_distilling, "select": _go_on_selecting, "continual": _go_on_streaming}
        return kinds[begun.kind](self, settings)


def _go_on_distilling(command: Resume, settings: dict[str, Any]) -> int:
    config, images = _begun(command, settings)
    tensorboard = (command.run / "tensorboard").is_dir()
    options = {"resume": True, "tensorboard": tensorboard}
    return run_distillation(images, config, command.run, settings["data"], command.quiet, **options)


def _go_on_selecting(command: Resume, settings: dict[str, Any]) -> int:
    config, images = _begun(command, settings)
    chosen = {name: settings[name] for name in ("field", "values", "networks")}
    return select_values(images, config, command.run, settings["data"], command.quiet, resume=True, **chosen)


def _begun(command: Resume, settings: dict[str, Any]):
    """The config and the images of a distillation or a selection."""
    for name in ("network", "objective", "query"):
        given = settings["distill"].get(name)
        if isinstance(given, str) and given.startswith("custom "):
            kind = name.replace("query", "query kind")
            raise RecollectError(f"{command.run} has a {kind} given in Python ({given}): resume it there (resume=True)")
    return from_json(DistillConfig, settings["distill"], command.run), loaded(settings["data"], root=command.root)


def _go_on_streaming(command: Resume, settings: dict[str, Any]) -> int:
    config = from_json(ContinualConfig, settings["config"], command.run)
    data = settings["data"] | ({"root": str(command.root)} if command.root else {})
    return run_stream(settings["stream"], config, data, settings["how"], command.run, command.quiet)
