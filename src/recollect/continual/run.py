"""A continual run's folder: every seed and learner of one stream, as jobs; resumable.

    config.json, environment.json          what was asked for, and where it was begun
    seed-0/stream.json                     angles, class orders and hashes of permutations as they were drawn
    seed-0/permutations.npy                [tasks, pixels]: the pixel that each pixel of a task's images is taken from
    seed-0/compress/task-00.safetensors    the memory of each task; task-00-buffer.json: the account of its buffer
    seed-0/compress/tasks-00-19.pt         the checkpoint of tasks that are being distilled
    seed-0/LEARNER.json                    a finished learner: its accuracy matrix, its time, and where it ran

What is finished is never computed again, and everything is written atomically: killed at any moment, the same command goes on.
"""

import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from recollect import fast
from recollect.config import to_json
from recollect.continual.buffer import Buffer
from recollect.continual.compress import Compressor, account
from recollect.continual.config import LEARNERS, ContinualConfig, check_learners
from recollect.continual.learners import Compress, Learner, accuracy, accuracy_matrix, is_told, make, taught
from recollect.continual.metrics import Matrix, Metrics, metrics
from recollect.continual.streams import Stream
from recollect.data.images import Images
from recollect.devices import find_device
from recollect.errors import RecollectError
from recollect.files import LOCK, read_json, sha256, write_atomically, write_json
from recollect.jobs import Executor, Job, Processes, Tell
from recollect.memory import Memory
from recollect.nets import Network
from recollect.runs import Run, check_threads, environment, load_checkpoint, own, previous, restoring, save_checkpoint

MOST = 10_000  # seeds, processes, tasks side by side
OURS = ("compress", "union")  # learners that need memories


@dataclass(frozen=True)
class Setting:
    """What all jobs of a run share."""

    images: Images
    config: ContinualConfig
    out: Path
    device: str
    checkpoint_seconds: float = 60.0

    def here(self) -> "Setting":
        """With the device of the process that performs a job."""
        return replace(self, device=find_device(self.device))

    def stream(self, seed: int) -> Stream:
        return Stream(self.images, self.config, seed, device=self.device)

    def path(self, seed: int, name: str) -> Path:
        return self.out / f"seed-{seed}" / name

    def memory(self, seed: int, task: int) -> Path:
        return self.path(seed, f"compress/task-{task:02d}.safetensors")

    def account(self, seed: int, task: int) -> Path:
        return self.path(seed, f"compress/task-{task:02d}-buffer.json")


@dataclass(frozen=True)
class Result:
    """One learner on one seed's stream."""

    learner: str
    seed: int
    matrix: Matrix
    seconds: float
    """distillation included; of the union, that of its networks alone"""
    untold: float | None = None
    """accuracy on all tasks after the last, where classes tell tasks apart and the learner is not told the task"""

    @property
    def metrics(self) -> Metrics:
        return metrics(self.matrix)


def run(
    images: Images,
    config: ContinualConfig,
    *,
    out: "Path | str",
    name: str = "stream",
    seeds: int = 5,
    learners: Sequence[str] = ("compress",),
    device: str = "auto",
    workers: int = 1,
    together: int | None = None,
    data: dict[str, Any] | None = None,
    progress: "Callable[[int, float], Tell] | None" = None,
    executor: Executor | None = None,
) -> list[Result]:
    """Run learners on a stream, for seeds 0, 1, ...; what the folder already holds is not run again.

    Arguments:
        out: the folder.
        name: of the stream, for the record.
        workers: processes that jobs are shared out to; with 1 all is done in this one.
        together: tasks that are distilled side by side in one unroll. Default: all on a GPU, 1 on a CPU.
        data: how `images` were loaded, so that `recollect resume` can load them again.
        progress: called with (tasks in all, tasks already done), gives what is told as work goes on.
        executor: performs the jobs, instead of `workers` processes.

    Returns:
        all that the folder then holds, what earlier calls have run too.
    """
    learners = list(dict.fromkeys(learners))
    check_learners(learners)
    for what, value in (("seeds", seeds), ("workers", workers), ("together", together)):
        if value is not None and not 1 <= value <= MOST:
            raise RecollectError(f"{what} is {value}: give 1 to {MOST:,}")
    setting = Setting(images, config, Path(out), device)
    fast.check(config.compute, find_device(device))
    stream, needs_memories = Stream(images, config), bool({*OURS} & {*learners})
    Buffer(config.buffer.images, stream.shape, stream.tasks)  # all mistakes before the first hour is spent
    Network(config.inner.network, stream.shape, stream.classes)
    if needs_memories:
        account(stream, config, stream.tasks)
    how = {"seeds": seeds, "learners": learners, "device": device, "workers": workers, "together": together}
    others = {"stream": name, "images": fingerprint(images)}
    with _begun(Run(out), config, others, {"data": data or {}, "config": to_json(config), **others, "how": how}):
        phases = jobs(setting, seeds, learners, together)
        total = seeds * stream.tasks * len({*learners} | ({"compress"} if needs_memories else set()))
        due = sum(job.units for some in phases for job in some)
        tell = progress(total, total - due) if progress else lambda what, amount: None
        for some in phases:
            (executor or Processes(workers)).run(some, tell)
        return _finished(setting)


def fingerprint(images: Images) -> str:
    splits = (images.train, images.validation, images.test)
    return sha256(*(part.numpy().tobytes() for split in splits for part in (split.images, split.labels)))


@contextmanager
def _begun(run: Run, config: ContinualConfig, others: dict[str, Any], settings: dict[str, Any]) -> Iterator[None]:
    """A new folder, or one that was begun with the same config and others (stream, images); the rest may differ. It is this
    process's alone meanwhile."""
    if not (run.is_begun and run.kind == "continual"):
        known = {"environment.json", LOCK}
        if run.folder.exists() and (not run.folder.is_dir() or {*os.listdir(run.folder)} - known):
            raise RecollectError(f"{run.folder} holds something else: give another folder (--out)")
        with Run.working(run.folder, "continual", settings):
            yield
        return
    with Run.working(run.folder, "continual"):
        run.check(config, **others)
        run.write("continual", settings)
        for leftover in run.folder.glob("seed-*/**/.*.tmp"):  # of a kill
            leftover.unlink(missing_ok=True)
        yield


def jobs(
    setting: Setting, seeds: int, learners: Sequence[str], together: int | None, finished: bool = False
) -> tuple[list[Job], list[Job]]:
    """What is not finished yet, or all of it: first memories and baselines, then what needs the memories."""
    first: list[Job] = []
    then: list[Job] = []

    def job(what: str, function: Callable[..., None], rest: tuple[Any, ...], units: float) -> Job:
        command = ("recollect", "resume", str(setting.out), "--job", what)
        return Job(what, function, (setting, *rest, what), units, setting.out, command)

    for seed in range(seeds):
        due = [learner for learner in learners if finished or not setting.path(seed, f"{learner}.json").exists()]
        if not due:
            continue
        stream = Stream(setting.images, setting.config, seed)
        _record(stream, setting.path(seed, "stream.json"))
        if {*OURS} & {*due}:
            beside = together or (stream.tasks if find_device(setting.device) != "cpu" else 1)
            for tasks in _groups(setting, stream, beside, finished):
                what = f"seed {seed}, compress, task {tasks[0] + 1}" + (f" to {tasks[-1] + 1}" if tasks[1:] else "")
                first.append(job(what, _distil, (seed, tasks), len(tasks)))
        for learner in due:
            units = 0 if learner == "compress" else stream.tasks  # its memories have been counted
            (then if learner in OURS else first).append(job(f"seed {seed}, {learner}", _learn, (seed, learner), units))
    return first, then


def _record(stream: Stream, path: Path) -> None:
    if not path.exists():
        if stream.permutations is not None:
            buffer = io.BytesIO()
            np.save(buffer, stream.permutations.numpy())
            write_atomically(path.with_name("permutations.npy"), buffer.getvalue())
        write_json(path, stream.record())


def _groups(setting: Setting, stream: Stream, together: int, finished: bool) -> list[tuple[int, ...]]:
    """Tasks without a memory, or all, those alike in groups that are distilled side by side."""
    alike: dict[tuple[int, int], list[int]] = {}
    for task in range(stream.tasks):
        if finished or not setting.memory(stream.seed, task).exists():
            alike.setdefault((len(stream.task_classes[task]), stream.batches(task)), []).append(task)
    return [tuple(tasks[i : i + together]) for tasks in alike.values() for i in range(0, len(tasks), together)]


def _learn(setting: Setting, seed: int, name: str, what: str, tell: Tell) -> None:
    """The whole of a learner's life, unless it is over."""
    if setting.path(seed, f"{name}.json").exists():
        return
    setting = setting.here()
    began, stream = time.perf_counter(), setting.stream(seed)
    each = 0.0 if name == "compress" else 1.0

    def done(task: int) -> None:
        tell(f"{what}, task {task + 1} of {stream.tasks}", each)

    learner = _learner(setting, stream, name)
    matrix = accuracy_matrix(name, taught(learner, stream), stream, done)
    found = {"learner": name, "seed": seed, "told_the_task": is_told(name, setting.config), "on": setting.config.stream.on}
    found |= {"matrix": matrix, "metrics": to_json(metrics(matrix)), "seconds": round(time.perf_counter() - began, 2)}
    if setting.config.stream.kind == "split":
        found["untold"] = fmean(accuracy(learner, stream, task, told=False) for task in range(stream.tasks))
    if name == "compress":
        spent = [read_json(setting.account(seed, task)) for task in range(stream.tasks)]
        seconds = sum(each["seconds_of_all"] / each["tasks_side_by_side"] for each in spent)  # side by side, they share it
        found["distilling_seconds"] = round(seconds, 2)
    write_json(setting.path(seed, f"{name}.json"), found | {"device": setting.device, "environment": environment()})


def _learner(setting: Setting, stream: Stream, name: str) -> Learner:
    """With the memories that have been distilled, where it needs them."""
    if name not in OURS:
        return make(name, stream, setting.config, setting.device)
    if lacking := [task + 1 for task in range(stream.tasks) if not setting.memory(stream.seed, task).exists()]:
        raise RecollectError(f"{name} needs the memories of all tasks, and task {lacking[0]} has none: perform its job first")
    memories = [Memory.load(setting.memory(stream.seed, task)) for task in range(stream.tasks)]
    return Compress(stream, setting.config, setting.device, memories, seen=False)


def _distil(setting: Setting, seed: int, tasks: tuple[int, ...], what: str, tell: Tell) -> None:
    """The memories of some tasks, with checkpoints on the way, unless all are there."""
    if all(setting.memory(seed, task).exists() for task in tasks):
        return
    setting = setting.here()
    stream = setting.stream(seed)
    compressor = Compressor(stream, setting.config, tasks, setting.device)
    checkpoint = setting.path(seed, f"compress/tasks-{tasks[0]:02d}-{tasks[-1]:02d}.pt")
    saved, before = load_checkpoint(checkpoint, tasks=list), 0.0
    threads = {} if setting.device != "cpu" else {"threads": torch.get_num_threads()}
    if saved and tuple(saved["tasks"]) == tasks and "states" in saved:  # 0.1 had another form: these tasks begin anew
        with restoring(checkpoint):
            compressor.load(saved)
            before = float(saved.get("seconds", 0.0))
        check_threads(checkpoint.parent, saved if threads else {})
    streams = [stream.task(task) for task in tasks]
    for task in streams:
        task.skip(compressor.seen)
    tell(what, len(tasks) * compressor.seen / compressor.batches)
    began = saved_at = time.perf_counter()
    for batches in zip(*streams, strict=True):
        compressor.observe(batches)
        tell(what, len(tasks) / compressor.batches)
        if time.perf_counter() - saved_at >= setting.checkpoint_seconds:
            saved_at = time.perf_counter()
            save_checkpoint(checkpoint, compressor.to_dict() | threads | {"seconds": before + saved_at - began})
    seconds = before + time.perf_counter() - began
    for task, memory, buffer in zip(tasks, compressor.memories(), compressor.buffers, strict=True):
        told = {"tasks_side_by_side": len(tasks), "seconds_of_all": round(seconds, 2), "log": buffer.log}
        write_json(setting.account(seed, task), told)
        memory.save(own(setting.memory(seed, task)))
    for path in (previous(checkpoint), checkpoint):
        path.unlink(missing_ok=True)


def _finished(setting: Setting) -> list[Result]:
    """In the order of the table, and of the seeds."""
    seeds = sorted(int(folder.name.removeprefix("seed-")) for folder in setting.out.glob("seed-*"))
    places = [(setting.path(seed, f"{learner}.json"), learner, seed) for learner in LEARNERS for seed in seeds]
    return [_read(*place) for place in places if place[0].exists()]


def _read(path: Path, learner: str, seed: int) -> Result:
    found = read_json(path)
    try:
        seconds = float(found["seconds"]) + float(found.get("distilling_seconds", 0))
        untold = None if found.get("untold") is None else float(found["untold"])
        result = Result(learner, seed, found["matrix"], seconds, untold)
        _ = result.metrics
    except (KeyError, TypeError, ValueError):
        raise RecollectError(f"{path} is damaged: delete it, and run the same command again") from None
    return result
