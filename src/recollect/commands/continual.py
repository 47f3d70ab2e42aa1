"""Streams of tasks."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, Positional, arg

from recollect.commands.inputs import Data, Files, loaded, spec
from recollect.commands.performing import JOBS, Performing
from recollect.continual.config import DATASETS, LEARNERS, STREAMS, ContinualConfig, check_learners
from recollect.errors import RecollectError
from recollect.show import terminal

if TYPE_CHECKING:
    from recollect.jobs import Job


@dataclass(frozen=True)
class Continual(Files):
    """Learn the tasks of a stream one after another, and compare learners by what they retain; goes on where it was stopped."""

    stream: Positional[Literal["rotations", "permutations", "many", "cifar100", "rotations-60k", "permutations-60k", "split"]]
    """rotations, permutations, many, cifar100, rotations-60k, permutations-60k, or split: any dataset by its classes. The stream
    decides the defaults of all settings"""
    config: Annotated[OmitArgPrefixes[ContinualConfig], arg(name="")]
    learners: tuple[str, ...] = ()
    """learners to compare: compress, union, gdumb, online, er, agem, ewc, all-data. Default: all; of the 60k streams, compress
    and gdumb"""
    seeds: int = 5
    """number of runs, with seeds from 0"""
    data: str | None = None
    """dataset to stream: a name, a folder, a .npz file, or hf:owner/name. Default: mnist, or cifar100 for the stream cifar100"""
    out: Path | None = None
    """folder of the run. Default: runs/continual-STREAM"""
    together: int | None = None
    """tasks distilled side by side in one unroll. Default: all on a GPU, 1 on a CPU"""
    device: str = "auto"
    """device that computes: cpu, cuda, or auto (cuda where there is one)"""
    quiet: bool = False
    """print the result alone"""
    jobs: Annotated[Performing, *JOBS] = Performing()

    def perform(self) -> int:
        data = spec(Data(self.data or DATASETS[self.stream], root=self.root, size=self.size, reading=self.reading))
        ours = ("compress", "gdumb") if self.stream.endswith("-60k") else LEARNERS
        calls = {"seeds": self.seeds, "learners": list(self.learners or ours), "device": self.device}
        calls |= {"workers": self.jobs.workers, "together": self.together}
        folder = self.out or Path("runs") / f"continual-{self.stream}"
        return run_stream(self.stream, self.config, data, calls, folder, self.quiet, self.jobs)


def run_stream(
    stream: str, config: ContinualConfig, data, calls: dict[str, Any], folder: Path, quiet: bool, jobs: Performing
) -> int:
    check_learners(calls["learners"])
    if stream in STREAMS and config.stream.kind != STREAMS[stream].stream.kind:
        raise RecollectError(
            f"kind is {config.stream.kind}, but {stream} is a stream of {STREAMS[stream].stream.kind}: name another stream"
        )
    from recollect.continual.run import run as run_stream
    from recollect.show import streams as show

    images, executor = loaded(data), None if jobs.executor == "processes" else jobs.chosen()
    try:
        with show.progress(stream, quiet) as progress:
            results = run_stream(
                images, config, out=folder, name=stream, data=data, progress=progress, executor=executor, **calls
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped: continue with recollect resume {folder}") from None
    show.finish(results, stream, folder)
    terminal.say(
        f"{stream} of {images.name}: accuracy on the {config.stream.on} images in %, mean ± deviation over n seeds; BTI in points"
    )
    terminal.say(show.table(results, stream, "mask" if config.stream.kind == "split" else "no"))
    terminal.say(f"results  {folder / 'table.json'}: these and forgetting, with deviations")
    terminal.say(f"figures  {folder / 'curve.png'}, {folder / 'matrix-LEARNER.png'}")
    return 0


def stream_jobs(config: ContinualConfig, images, how: dict[str, Any], folder: Path) -> "list[Job]":
    """All jobs of a run that was begun, finished or not."""
    from recollect.continual.run import Setting, jobs

    first, then = jobs(
        Setting(images, config, folder, how.get("device", "auto")), how["seeds"], how["learners"], how.get("together"), True
    )
    return [*first, *then]
