"""Independent jobs, and who performs them: one after another here, in threads that share a GPU, in processes, or others, who are
given a list of shell commands. cluster.py has Ray.

A job is a call with a name. It is resumable: performed again, it goes on where it was stopped, and what it has finished it
reads from its files. The seam is `Executor`; whatever can call a function somewhere fits it. What a job makes does not depend on
who performs it.
"""

import multiprocessing
import os
import pickle
import shlex
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from recollect.errors import Left, RecollectError, unknown

Tell = Callable[[Any, float], None]
"""(what is being done, units that have been done since the last call)"""


class Job(NamedTuple):
    """One thing to do, alone."""

    name: str
    function: Callable[..., Any]
    """called with the arguments and a `Tell`. Other processes need all of it, and what it returns, to be picklable"""
    arguments: tuple[Any, ...] = ()
    units: float = 1.0
    """that it tells of in all"""
    folder: Path | None = None
    """where all its files are"""
    command: tuple[str, ...] = ()
    """words of a shell command that performs it alone"""

    def __call__(self, tell: Tell) -> Any:
        return self.function(*self.arguments, tell)


class Executor(Protocol):
    def run(self, jobs: Sequence[Job], tell: Tell) -> list[Any]:
        """What the jobs return, in their order. The error of one ends them all."""
        ...


@dataclass(frozen=True)
class Inline:
    """One after another, in this process, however many there may be at a time."""

    workers: int = 1

    def run(self, jobs: Sequence[Job], tell: Tell) -> list[Any]:
        return [job(tell) for job in jobs]


@dataclass(frozen=True)
class Threads:
    """Several at a time in this process, each on a stream of its own where there is a GPU to share."""

    workers: int = 1

    def run(self, jobs: Sequence[Job], tell: Tell) -> list[Any]:
        lock = threading.Lock()

        def tell_alone(what: Any, amount: float) -> None:
            with lock:
                tell(what, amount)

        def perform(job: Job) -> Any:
            with torch.cuda.stream(torch.cuda.Stream() if torch.cuda.is_available() else None):
                return job(tell_alone)

        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(perform, jobs))


@dataclass(frozen=True)
class Processes:
    """Several at a time, in processes that share this machine's cores. They end with this one."""

    workers: int = 1

    def run(self, jobs: Sequence[Job], tell: Tell) -> list[Any]:
        most = min(self.workers, len(jobs))
        if most <= 1:
            return Inline().run(jobs, tell)
        context = multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        listener = threading.Thread(target=lambda: [tell(*event) for event in iter(queue.get, None)], daemon=True)
        listener.start()
        shared = _pickled(jobs), queue, max(1, torch.get_num_threads() // most)
        pool = ProcessPoolExecutor(most, context, _begin, shared)
        try:
            futures = [pool.submit(_perform, number) for number in range(len(jobs))]
            for future in as_completed(futures):
                future.result()
        except BaseException:  # what runs would go on for long, and is safe to end: everything is written atomically
            for process in list((pool._processes or {}).values()):
                process.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        queue.put(None)
        listener.join()
        return [future.result() for future in futures]


@dataclass(frozen=True)
class Listed:
    """Nobody here: one shell command a job is printed, for a scheduler to perform in any order."""

    workers: int = 1

    def run(self, jobs: Sequence[Job], tell: Tell) -> list[Any]:
        for job in jobs:
            if not job.command:
                raise RecollectError(f"no command performs {job.name} alone: give another executor than list")
            print(shlex.join(job.command))
        if jobs:
            raise Left
        return []


EXECUTORS: dict[str, Callable[[int], Executor]] = {"inline": Inline, "threads": Threads, "processes": Processes, "list": Listed}
"""by the number of jobs at a time; cluster.OnRay is another"""


def named(jobs: Sequence[Job], name: str) -> Job:
    """One job by its name."""
    found = {job.name: job for job in jobs}
    if name not in found:
        raise unknown("job", name, found)
    return found[name]


# --- processes ---------------------------------------------------------------------------------------------------------

_given: "tuple[Sequence[Job], Any] | None" = None  # of a worker: the jobs, and the queue to tell


def _pickled(jobs: Sequence[Job]) -> bytes:
    """All at once: what jobs share (the images) is there once, and sent once to each worker."""
    try:
        return pickle.dumps(list(jobs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RecollectError(f"jobs cannot be sent to other processes ({error}): perform them in this one") from None


def _begin(pickled: bytes, queue: Any, threads: int) -> None:
    global _given
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    parent = multiprocessing.parent_process()
    if parent is not None:  # killed, it cannot say it
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(threads)
    _given = pickle.loads(pickled), queue


def _perform(number: int) -> Any:
    assert _given is not None
    jobs, queue = _given
    return jobs[number](lambda what, amount: queue.put((what, amount)))
