"""Who performs a command's jobs: the flags that select, continual, evaluate, reproduce and resume share."""

import dataclasses
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

from recollect.config import flag, group
from recollect.errors import RecollectError

if TYPE_CHECKING:
    from recollect.jobs import Executor


@dataclass(frozen=True)
class Performing:
    """Who performs the jobs."""

    executor: Literal["inline", "threads", "processes", "ray", "list"] = "processes"
    """way in which jobs are performed: inline, one after another; threads, that share a GPU; processes; ray, on a Ray cluster
    (pip install 'recollect[ray]'); or list, which prints one shell command a job for any other scheduler"""
    workers: int = 1
    """number of jobs at a time, in threads or processes"""
    address: Annotated[str, flag("ray_address")] = "auto"
    """address of the Ray cluster, as HOST:PORT; auto is the one that runs on this machine, or that of RAY_ADDRESS"""
    gpus: Annotated[float, flag("gpus_per_job")] = 0.0
    """number of GPUs of each job on a Ray cluster; with 0.25 four jobs share one, with 0 they compute on CPUs"""
    cpus: Annotated[int | None, flag("cpus_per_job")] = None
    """threads of each job on a Ray cluster. Default: as many as this process has (OMP_NUM_THREADS), or one with GPUs"""
    folders: Annotated[Literal["shared", "returned"], flag("ray_folders")] = "shared"
    """place of run folders on a Ray cluster. shared: at a path that all nodes see; returned: each job has a copy that comes back
    when it ends, and whose checkpoints do not survive its node"""

    @property
    def is_usual(self) -> bool:
        """One job after another, in this process."""
        return self.executor == "inline" or (self.executor in ("threads", "processes") and self.workers == 1)

    def chosen(self) -> "Executor":
        """The executor, with what it needs to know."""
        from recollect.jobs import EXECUTORS

        if not 1 <= self.workers <= 10_000:
            raise RecollectError(f"workers is {self.workers}: give 1 to 10,000")
        if self.executor != "ray":
            return EXECUTORS[self.executor](self.workers)
        from recollect.cluster import OnRay

        if not 0 <= self.gpus <= 1_000 or (self.gpus > 1 and self.gpus % 1):
            raise RecollectError(f"gpus_per_job is {self.gpus:g}: give a part of one, such as 0.25, or a whole number")
        if self.cpus is not None and not 1 <= self.cpus <= 10_000:
            raise RecollectError(f"cpus_per_job is {self.cpus}: give 1 or more")
        return OnRay(self.address, self.gpus, self.cpus, self.folders == "returned")


JOBS = group("jobs")
"""how the flags are a command's"""


def spelt(name: str, command: Any, *leave: str) -> tuple[str, ...]:
    """The words of a command as it would be typed, without defaults and the settings to leave out. Paths are absolute: it may be
    performed elsewhere."""
    arguments: list[str] = []
    flags: list[str] = []
    hints = typing.get_type_hints(type(command), include_extras=True)
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if field.name in leave or value == field.default or isinstance(value, Performing):
            continue
        if dataclasses.is_dataclass(value):
            flags += spelt(name, value)[2:]
            continue
        given = [
            str(each.absolute() if isinstance(each, Path) else each) for each in (value if isinstance(value, tuple) else [value])
        ]
        if Positional in typing.get_args(hints[field.name]):
            arguments += given
        else:
            flags += [f"--{field.name.replace('_', '-')}", *(given if value is not True else [])]
    return ("recollect", name, *arguments, *flags)
