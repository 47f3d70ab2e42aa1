"""Go on with a run of any kind."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from tyro.conf import Positional

from recollect.commands.continual import run_stream
from recollect.commands.distill import run_distillation
from recollect.commands.inputs import loaded
from recollect.commands.select import select_values
from recollect.config import DistillConfig, fits, from_json
from recollect.continual.config import ContinualConfig
from recollect.errors import RecollectError


class _How(TypedDict):
    seeds: int
    learners: list[str]
    device: str
    workers: int
    together: int | None


@dataclass(frozen=True)
class Resume:
    """Continue a run or a selection that was stopped or killed, from its last checkpoint."""

    run: Positional[Path]
    """folder of the run or selection"""
    root: Path | None = None
    """folder with the official files, where they have moved since the run was begun"""
    quiet: bool = False
    """print the result alone"""

    def perform(self) -> int:
        from recollect import distributed
        from recollect.runs import Run

        begun = Run.open(self.run)
        kind, settings = begun.kind, begun.settings
        data = settings["data"]
        if "name" not in data:
            raise RecollectError(f"{self.run} was made in Python, with images of its own: go on with it there")
        world = distributed.current().world
        if kind != "distill" and world > 1:
            raise RecollectError(
                f"a run of kind {kind} has jobs, which torchrun's {world} processes do not share: resume it alone"
            )
        if kind == "continual":
            config = from_json(ContinualConfig, settings["config"], self.run)
            data |= {"root": str(self.root)} if self.root else {}
            how = settings["how"]
            if not fits(how, _How) or not {"seeds", "learners"} <= how.keys() <= _How.__annotations__.keys():
                raise RecollectError(f"{begun.config_path} has a 'how' that is none: restore it, or start another run")
            return run_stream(settings["stream"], config, data, how, self.run, self.quiet)
        for name in ("network", "objective", "query", "loss", "augment", "outer_optimiser", "pool"):
            given = settings["distill"].get(name)
            if isinstance(given, str) and given.startswith("custom "):
                what = name.replace("query", "query kind")
                raise RecollectError(f"{self.run} has a {what} given in Python ({given}): resume it there (resume=True)")
        config, images = from_json(DistillConfig, settings["distill"], self.run), loaded(data, root=self.root)
        if kind == "select":
            chosen = {name: settings[name] for name in ("field", "values", "networks")}
            return select_values(images, config, self.run, data, self.quiet, resume=True, **chosen)
        tensorboard = (self.run / "tensorboard").is_dir()
        return run_distillation(images, config, self.run, data, self.quiet, resume=True, tensorboard=tensorboard)
