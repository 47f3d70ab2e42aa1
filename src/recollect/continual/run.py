"""A continual run's folder: every seed and learner of one stream, side by side in processes where asked, resumable.

    continual.json, environment.json       what was asked for, and where it was begun
    seed-0/stream.json                     angles, class orders and hashes of permutations as they were drawn
    seed-0/permutations.npy                [tasks, pixels]: the pixel that each pixel of a task's images is taken from
    seed-0/compress/task-00.safetensors    the memory of each task; task-00-buffer.json: the account of its buffer
    seed-0/compress/tasks-00-19.pt         the checkpoint of tasks that are being distilled
    seed-0/LEARNER.json                    a finished learner: its accuracy matrix, its time, and where it ran

What is finished is never computed again, and everything is written atomically: killed at any moment, the same command goes on.
"""

import io
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recollect import fast
from recollect.config import to_json
from recollect.continual.buffer import Buffer
from recollect.continual.compress import Compressor, account
from recollect.continual.config import CONTINUAL, LEARNERS, ContinualConfig, check_learners
from recollect.continual.learners import Compress, accuracy, accuracy_matrix, is_told, make
from recollect.continual.metrics import Matrix, Metrics, metrics, square
from recollect.continual.streams import Stream
from recollect.data.images import Images
from recollect.devices import find_device
from recollect.errors import RecollectError
from recollect.files import read_json, sha256, write_atomically, write_json
from recollect.memory import Memory
from recollect.nets import Network
from recollect.runs import environment

DISTIL = "distil"  # the kind of job that makes memories
OURS = ("compress", "union")  # learners that need them

Progress = Callable[[str, float], None]
"""(what is being done, tasks that have been finished since the last call)"""


@dataclass(frozen=True)
class Setting:
    """What all jobs of a run share."""

    images: Images
    config: ContinualConfig
    out: Path
    device: str
    checkpoint_seconds: float = 60.0

    def folder(self, seed: int) -> Path:
        return self.out / f"seed-{seed}"

    def memory(self, seed: int, task: int) -> Path:
        return self.folder(seed) / "compress" / f"task-{task:02d}.safetensors"

    def result(self, seed: int, learner: str) -> Path:
        return self.folder(seed) / f"{learner}.json"


class Job(NamedTuple):
    """One thing to do, alone: distil some tasks, or run a learner through the stream."""

    kind: str
    """DISTIL, or a learner's name"""
    seed: int
    tasks: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """One learner on one seed's stream."""

    learner: str
    seed: int
    matrix: Matrix
    seconds: float
    """distillation included; of the union, that of its networks alone"""

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
    progress: "Callable[[int, int], Progress] | None" = None,
) -> list[Result]:
    """Run learners on a stream, for seeds 0, 1, ...; what the folder already holds is not run again.

    Arguments:
        out: the folder.
        name: of the stream, for the record.
        workers: processes that jobs are shared out to; with 1 all is done in this one.
        together: tasks that are distilled side by side in one unroll. Default: all on a GPU, 1 on a CPU.
        data: how `images` were loaded, so that `recollect resume` can load them again.
        progress: called with (tasks in all, tasks already done), gives what is called as work goes on.

    Returns:
        all that the folder then holds, what earlier calls have run too.
    """
    learners = list(dict.fromkeys(learners))
    check_learners(learners)
    for what, value in (("seeds", seeds), ("workers", workers), ("together", together)):
        if value is not None and value < 1:
            raise RecollectError(f"{what} is {value}: give 1 or more")
    setting = Setting(images, config, Path(out), find_device(device))
    fast.check(config.compute, setting.device)
    stream = Stream(images, config)
    Buffer(config.buffer.images, stream.shape, stream.tasks)  # all mistakes before the first hour is spent
    Network(config.inner.network, stream.shape, stream.classes)
    if {*OURS} & {*learners}:
        account(stream, config, stream.tasks)
    settings = {"stream": name, "data": data or {}, "config": to_json(config), "images": fingerprint(images)}
    how = {"seeds": seeds, "learners": learners, "device": device, "workers": workers, "together": together}
    _begin(setting, settings, how)
    first, then = _jobs(setting, stream, seeds, learners, together or (stream.tasks if setting.device != "cpu" else 1))
    total = seeds * stream.tasks * len({*learners} | ({"compress"} if {*OURS} & {*learners} else set()))
    show = progress(total, total - sum(len(job.tasks) for job in (*first, *then))) if progress else _silent
    _perform([first, then], setting, workers, show)
    return _finished(setting)


def _silent(_: str, __: float) -> None:
    pass


def fingerprint(images: Images) -> str:
    splits = (images.train, images.validation, images.test)
    return sha256(*(part.numpy().tobytes() for split in splits for part in (split.images, split.labels)))


def _begin(setting: Setting, settings: dict[str, Any], how: dict[str, Any]) -> None:
    """A new folder, or one that was begun with the same stream, data and settings; seeds and learners may differ."""
    path = setting.out / CONTINUAL
    if path.exists():
        known = to_json(ContinualConfig()) | _flat(read_json(path))  # which may be older than a setting
        for name, value in _flat(settings).items():
            if known.get(name) != value:
                raise RecollectError(
                    f"{setting.out} was begun with {name} {known.get(name)!r}, not {value!r}: "
                    "go on with the same, or give another folder (--out)"
                )
    elif setting.out.exists() and (not setting.out.is_dir() or any(setting.out.iterdir())):
        raise RecollectError(f"{setting.out} holds something else: give another folder (--out)")
    else:
        write_json(setting.out / "environment.json", environment())
    write_json(path, settings | {"how": how})


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """The names and values that must stay the same; where the data lie may change."""
    config = settings.get("config")
    kept = {name: settings.get(name) for name in ("stream", "images")}
    return (config if isinstance(config, dict) else {}) | kept


# --- jobs --------------------------------------------------------------------------------------------------------------


def _jobs(
    setting: Setting, stream: Stream, seeds: int, learners: Sequence[str], together: int
) -> tuple[list[Job], list[Job]]:
    """What is not finished yet: first memories and rivals, then what needs the memories."""
    first: list[Job] = []
    then: list[Job] = []
    everything = tuple(range(stream.tasks))
    for seed in range(seeds):
        due = [learner for learner in learners if not setting.result(seed, learner).exists()]
        if {*OURS} & {*due}:
            first += [Job(DISTIL, seed, tasks) for tasks in _groups(setting, seed, together)]
        first += [Job(learner, seed, everything) for learner in due if learner not in OURS]
        then += [Job(learner, seed, everything if learner == "union" else ()) for learner in due if learner in OURS]
    return first, then


def _groups(setting: Setting, seed: int, together: int) -> list[tuple[int, ...]]:
    """Tasks without a memory, those alike in groups that are distilled side by side."""
    stream = Stream(setting.images, setting.config, seed)
    alike: dict[tuple[int, int], list[int]] = {}
    for task in range(stream.tasks):
        if not setting.memory(seed, task).exists():
            alike.setdefault((len(stream.task_classes[task]), stream.batches(task)), []).append(task)
    return [tuple(tasks[i : i + together]) for tasks in alike.values() for i in range(0, len(tasks), together)]


def _do(job: Job, setting: Setting, progress: Progress) -> None:
    stream = Stream(setting.images, setting.config, job.seed, device=setting.device)
    record = setting.folder(job.seed) / "stream.json"
    if not record.exists():
        if stream.permutations is not None:
            _save_array(record.with_name("permutations.npy"), stream.permutations)
        write_json(record, stream.record())
    if job.kind == DISTIL:
        _distil(job, stream, setting, progress)
        return
    began, where = time.perf_counter(), {"device": setting.device, "environment": environment()}
    what = f"seed {job.seed}, {job.kind}"

    def done(task: int) -> None:
        progress(f"{what}, task {task + 1} of {stream.tasks}", 1.0)

    if job.kind in OURS:
        memories = [Memory.load(setting.memory(job.seed, task)) for task in range(stream.tasks)]
        matrix = (_recalled if job.kind == "compress" else _united)(memories, stream, setting, done)
    else:
        matrix = accuracy_matrix(job.kind, make(job.kind, stream, setting.config, setting.device), stream, done)
    found = {
        "learner": job.kind,
        "seed": job.seed,
        "told_the_task": is_told(job.kind, setting.config),
        "on": setting.config.stream.on,
    }
    values = {"matrix": matrix, "metrics": to_json(metrics(matrix)), "seconds": round(time.perf_counter() - began, 2)}
    if job.kind == "compress":
        values["distilling_seconds"] = _distilling_seconds(setting, job.seed, stream.tasks)
    write_json(setting.result(job.seed, job.kind), found | values | where)


def _distilling_seconds(setting: Setting, seed: int, tasks: int) -> float:
    """Of all memories, those that were distilled side by side sharing their time."""
    found = [read_json(_account_file(setting, seed, task)) for task in range(tasks)]
    return round(sum(each["seconds_of_all"] / each["tasks_side_by_side"] for each in found), 2)


def _account_file(setting: Setting, seed: int, task: int) -> Path:
    return setting.memory(seed, task).with_name(f"task-{task:02d}-buffer.json")


def _distil(job: Job, stream: Stream, setting: Setting, progress: Progress) -> None:
    """The memories of some tasks, with checkpoints on the way."""
    compressor = Compressor(stream, setting.config, job.tasks, setting.device)
    folder = setting.memory(job.seed, 0).parent
    checkpoint = folder / f"tasks-{job.tasks[0]:02d}-{job.tasks[-1]:02d}.pt"
    saved, before = load_state(checkpoint), 0.0
    if saved and tuple(saved["tasks"]) == job.tasks:
        compressor.load(saved)
        before = saved.get("seconds", 0.0)
    tasks = [stream.task(task) for task in job.tasks]
    for task in tasks:
        task.skip(compressor.seen)
    what = f"seed {job.seed}, compress, task {job.tasks[0] + 1}"
    what += f" to {job.tasks[-1] + 1}" if len(tasks) > 1 else ""
    progress(what, len(tasks) * compressor.seen / compressor.batches)
    began = saved_at = time.perf_counter()
    for batches in zip(*tasks, strict=True):
        compressor.observe(batches)
        progress(what, len(tasks) / compressor.batches)
        if time.perf_counter() - saved_at >= setting.checkpoint_seconds:
            saved_at = time.perf_counter()
            save_state(checkpoint, compressor.to_dict() | {"seconds": before + saved_at - began})
    seconds = before + time.perf_counter() - began
    for task, memory, buffer in zip(job.tasks, compressor.memories(), compressor.buffers, strict=True):
        told = {"tasks_side_by_side": len(tasks), "seconds_of_all": round(seconds, 2), "log": buffer.log}
        write_json(_account_file(setting, job.seed, task), told)
        memory.save(setting.memory(job.seed, task))
    checkpoint.unlink(missing_ok=True)


def save_state(path: Path, state: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(path, buffer.getvalue())


def _save_array(path: Path, values: Tensor) -> None:
    buffer = io.BytesIO()
    np.save(buffer, values.numpy())
    write_atomically(path, buffer.getvalue())


def load_state(path: Path) -> dict[str, Any] | None:
    """A checkpoint, or None. Only tensors, numbers, strings and containers of them are ever unpickled."""
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has many for a damaged file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RecollectError(f"{path} cannot be read ({reason}): delete it to begin its tasks anew") from None


def _recalled(memories: list[Memory], stream: Stream, setting: Setting, _: Callable[[int], None]) -> Matrix:
    """Told the task. A memory never changes, so neither does the accuracy on its task: all columns are constant."""
    learner = Compress(stream, setting.config, setting.device, memories)
    found = [accuracy(learner, stream, task) for task in range(stream.tasks)]
    return square([found[: after + 1] for after in range(stream.tasks)])


def _united(memories: list[Memory], stream: Stream, setting: Setting, done: Callable[[int], None]) -> Matrix:
    """Not told the task: after each task one network on all memories so far."""
    rows = []
    for after in range(stream.tasks):
        learner = Compress(stream, setting.config, setting.device, memories[: after + 1])
        rows.append([accuracy(learner, stream, task, told=False) for task in range(after + 1)])
        done(after)
    return square(rows)


def _finished(setting: Setting) -> list[Result]:
    """In the order of the table, and of the seeds."""
    seeds = sorted(int(folder.name.removeprefix("seed-")) for folder in setting.out.glob("seed-*"))
    places = [(learner, seed, setting.result(seed, learner)) for learner in LEARNERS for seed in seeds]
    return [_read(path, learner, seed) for learner, seed, path in places if path.exists()]


def _read(path: Path, learner: str, seed: int) -> Result:
    found = read_json(path)
    try:
        seconds = float(found["seconds"]) + float(found.get("distilling_seconds", 0))
        result = Result(learner, seed, found["matrix"], seconds)
        _ = result.metrics
    except (KeyError, TypeError, ValueError):
        raise RecollectError(f"{path} is damaged: delete it, and run the same command again") from None
    return result


# --- processes ---------------------------------------------------------------------------------------------------------

_shared: "tuple[Setting, Any] | None" = None  # of a worker: what all jobs share, and the queue to report to


def _perform(phases: Sequence[Sequence[Job]], setting: Setting, workers: int, progress: Progress) -> None:
    """All jobs of a phase before those of the next; within a phase in any order."""
    most = min(workers, max(map(len, phases)))
    if most <= 1:
        for job in chain(*phases):
            _do(job, setting, progress)
        return
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    listener = threading.Thread(target=_listen, args=(queue, progress), daemon=True)
    listener.start()
    shared = pickle.dumps(setting), queue, max(1, torch.get_num_threads() // most)
    pool = ProcessPoolExecutor(most, context, _begin_worker, shared)
    try:
        for jobs in phases:
            for future in as_completed([pool.submit(_do_there, job) for job in jobs]):
                future.result()
    except BaseException:
        _stop(pool)
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    queue.put(None)
    listener.join()


def _stop(pool: ProcessPoolExecutor) -> None:
    """What runs would go on for long, and is safe to end: everything is written atomically."""
    for process in list((pool._processes or {}).values()):
        process.terminate()


def _listen(queue: Any, progress: Progress) -> None:
    while (event := queue.get()) is not None:
        progress(*event)


def _begin_worker(pickled: bytes, queue: Any, threads: int) -> None:
    global _shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    parent = multiprocessing.parent_process()
    if parent is not None:  # killed, it cannot say it
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(threads)
    _shared = pickle.loads(pickled), queue


def _do_there(job: Job) -> None:
    assert _shared is not None
    setting, queue = _shared
    _do(job, setting, lambda what, amount: queue.put((what, amount)))
