"""Go on with a run of any kind."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

from tyro.conf import Positional

from recollect.commands.continual import run_stream, stream_jobs
from recollect.commands.distill import run_distillation
from recollect.commands.inputs import loaded
from recollect.commands.performing import JOBS, Performing
from recollect.commands.select import select_values
from recollect.config import DistillConfig, fits, from_json
from recollect.continual.config import ContinualConfig
from recollect.errors import RecollectError
from recollect.show import terminal

if TYPE_CHECKING:
    from recollect.jobs import Job


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
    job: str | None = None
    """name of the only job to perform, as --executor list names them; other processes may perform the others meanwhile"""
    quiet: bool = False
    """print the result alone"""
    jobs: Annotated[Performing, *JOBS] = Performing()

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
            if self.job:
                return self._alone(stream_jobs(config, loaded(data), how, self.run))
            return run_stream(settings["stream"], config, data, how, self.run, self.quiet, self.jobs)
        for name in ("network", "objective", "query", "loss", "augment", "outer_optimiser", "pool"):
            given = settings["distill"].get(name)
            if isinstance(given, str) and given.startswith("custom "):
                what = name.replace("query", "query kind")
                raise RecollectError(f"{self.run} has a {what} given in Python ({given}): resume it there (resume=True)")
        config, images = from_json(DistillConfig, settings["distill"], self.run), loaded(data, root=self.root)
        if kind == "select":
            from recollect import selection

            chosen = {name: settings[name] for name in ("field", "values", "networks")}
            if self.job:
                return self._alone(selection.jobs(images, config, run=self.run, data=data, **chosen))
            return select_values(images, config, self.run, data, self.quiet, self.jobs, resume=True, **chosen)
        if self.job:
            raise RecollectError(f"{self.run} is one distillation, and has no job '{self.job}': leave --job out")
        tensorboard = (self.run / "tensorboard").is_dir()
        return run_distillation(images, config, self.run, data, self.quiet, resume=True, tensorboard=tensorboard)

    def _alone(self, jobs: "list[Job]") -> int:
        """One job of a run, without the run's lock: each of its files is one job's alone."""
        from recollect.jobs import named

        job = named(jobs, self.job or "")
        with terminal.steps(job.name, int(job.units), self.quiet) as show:
            job(lambda what, _: show(what) if show and isinstance(what, dict) else None)
        return 0
