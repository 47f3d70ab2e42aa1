"""Jobs on a Ray cluster (pip install 'recollect[ray]'): Ray Core schedules them, starts them again where a worker or a node dies,
and carries what they tell.

A job goes on from what it finds in its run's folder, so all nodes must see that folder at one path. Where none is shared, each
job gets a copy, and what it wrote comes back through Ray's object store when it ends: its checkpoints die with its node.
"""

import contextlib
import io
import os
import pickle
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

import recollect
from recollect.errors import RecollectError
from recollect.files import LOCK, InUse, write_atomically
from recollect.jobs import Job, Tell

ANSWER = 30.0  # seconds that a cluster may take to answer
LOST = 60.0  # seconds to wait for a node to come back, or for a folder whose last process is about to end
TRIES = 3  # times that a job is started again
POLL, OFTEN = 0.2, 0.25  # seconds between two looks at the jobs, and between two words of one job
ALONE = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False)"


@dataclass(frozen=True)
class OnRay:
    """As many at a time as the cluster has room for."""

    address: str = "auto"
    """HOST:PORT of the cluster; auto is the one that runs here, or that of RAY_ADDRESS"""
    gpus: float = 0.0
    """of each job; several may share one"""
    cpus: int | None = None
    """threads of each job. Default: as many as this process has, one with gpus"""
    returned: bool = False
    """whether run folders come back through the object store, for want of one that all nodes see"""

    @property
    def threads(self) -> int:
        return self.cpus or (1 if self.gpus else torch.get_num_threads())

    def run(self, jobs: Sequence[Job], tell: Tell) -> list[Any]:
        if not jobs:
            return []
        folder = jobs[0].folder.absolute() if jobs[0].folder else None
        given = _pickled(jobs, folder)
        with _connected(self.address) as ray:
            asked = {"CPU": float(self.threads), "GPU": self.gpus}
            if not _fits(ray.nodes(), asked):
                raise RecollectError(
                    f"no node of the Ray cluster has {_room(asked)} for a job (they have {_rooms(ray.nodes())}): ask for less"
                )
            with _token(folder) as token:
                _check_nodes(ray, asked, folder, token, self.returned)
            files = _files(folder) if self.returned and folder else None
            if files is not None:
                warnings.warn(f"jobs get a copy of {folder}: their checkpoints do not survive their node", stacklevel=2)
            return _Performance(ray, jobs, tell, asked).results(ray.put(given), ray.put(files), folder, self.threads)


# --- the cluster ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Ray, connected; as it is, if this process is connected already."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise RecollectError("Ray is not installed: pip install 'recollect[ray]', or give another executor") from None
    if ray.is_initialized():
        yield ray
        return
    _check_answer(address)
    before = signal.getsignal(signal.SIGTERM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, of versions to come
        ray.init(address, log_to_driver=False, configure_logging=False)
    signal.signal(signal.SIGTERM, before)  # Ray has one of its own
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_answer(address: str) -> None:
    """Refuse a cluster that does not answer in time. Ray itself tries for minutes, and cannot be told to stop: another process
    tries."""
    try:
        command = [sys.executable, "-W", "ignore", "-c", ALONE, address]
        tried = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER)
    except subprocess.TimeoutExpired:
        why = f"nobody answers there in {ANSWER:.0f} s"
    else:
        if not tried.returncode:
            return
        why = next((line for line in reversed(tried.stderr.splitlines()) if line.strip()), "it cannot be reached")
        why = re.sub(r"^\w+(\.\w+)*: ", "", why)
    raise RecollectError(f"no Ray cluster at '{address}' ({why:.200}): start one by ray start --head, or give its --ray-address")


def _fits(nodes: list[dict[str, Any]], asked: dict[str, float]) -> bool:
    return any(all(node["Resources"].get(name, 0) >= value for name, value in asked.items()) for node in _alive(nodes))


def _alive(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [node for node in nodes if node["Alive"]]


def _rooms(nodes: list[dict[str, Any]]) -> str:
    return ", ".join(_room(node["Resources"]) for node in _alive(nodes)[:8]) or "nothing"


def _room(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"


@contextlib.contextmanager
def _token(folder: Path | None) -> Iterator[str]:
    """A word in a file of the folder meanwhile, by which others know it."""
    token = uuid.uuid4().hex
    if folder:
        write_atomically(_token_path(folder), token.encode())
    try:
        yield token
    finally:
        if folder:
            _token_path(folder).unlink(missing_ok=True)


def _token_path(folder: Path) -> Path:
    return folder / ".seen"


def _check_nodes(ray: Any, asked: dict[str, float], folder: Path | None, token: str, returned: bool) -> None:
    """Refuse nodes that could perform jobs, but have another version, or do not see the folder that they should."""
    here = _known(None)[0]
    found = {}
    for node in (node for node in ray.nodes() if _fits([node], asked)):
        there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        probe = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(_known)
        found[probe.remote(folder)] = node["NodeManagerAddress"], node["NodeID"]
    ray.wait(list(found), num_returns=len(found), timeout=LOST)
    for task, (address, node) in found.items():
        try:
            versions, seen = ray.get(task, timeout=0)
        except ray.exceptions.RayError as error:
            if node not in (each["NodeID"] for each in _alive(ray.nodes())):
                continue  # it has died since, and gets no job
            words = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            raise RecollectError(
                f"node {address} performs nothing ({words[0]:.200}): see that recollect is installed there"
            ) from None
        for name, version in versions.items():
            if version != here[name]:
                raise RecollectError(f"node {address} has {name} {version}, this one {here[name]}: install the same")
        if folder and not returned and seen != token:
            raise RecollectError(
                f"node {address} does not see {folder}: give a folder that all nodes see (--out), or --ray-folders returned"
            )


def _known(folder: Path | None) -> tuple[dict[str, str], str | None]:
    """Of a node: versions, and the word in the folder."""
    versions = {"recollect": recollect.__version__, "torch": torch.__version__, "Python": platform.python_version()}
    with contextlib.suppress(OSError):
        return versions, _token_path(folder).read_text() if folder else None
    return versions, None


# --- here ------------------------------------------------------------------------------------------------------------------


class _Performance:
    """Some jobs while they are performed."""

    def __init__(self, ray: Any, jobs: Sequence[Job], tell: Tell, asked: dict[str, float]):
        self.ray, self.jobs, self.tell, self.asked = ray, jobs, tell, asked
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        self.words = ray.remote(num_cpus=0, scheduling_strategy=here)(_Words).remote()
        self.told: dict[int, tuple[str, float]] = {}
        """of each job: which start of it speaks, and how much it has told of"""
        self.without_room = 0.0
        """seconds since no node could perform a job"""

    def results(self, given: Any, files: Any, folder: Path | None, threads: int) -> list[Any]:
        ray, found = self.ray, {}
        options = {"num_cpus": self.asked["CPU"], "num_gpus": self.asked["GPU"], "max_retries": TRIES}
        perform = ray.remote(**options)(_perform)
        tasks = {perform.remote(given, number, threads, self.words, folder, files): number for number in range(len(self.jobs))}
        pending = list(tasks)
        try:
            while pending:
                ready, pending = ray.wait(pending, num_returns=1, timeout=POLL)
                self._listen()
                self._check_room()
                for task in ready:
                    found[tasks[task]] = self._result(task, self.jobs[tasks[task]], folder)
            self._listen()
        except BaseException:  # what runs would go on for long, and is safe to end: everything is written atomically
            for task in pending:
                ray.cancel(task, force=True)
            raise
        finally:
            ray.kill(self.words)
        return [found[number] for number in range(len(self.jobs))]

    def _result(self, task: Any, job: Job, folder: Path | None) -> Any:
        try:
            outcome = self.ray.get(task)
        except self.ray.exceptions.RayError as error:
            raise RecollectError(
                f"{job.name} ended {TRIES + 1} times with its worker or node ({type(error).__name__}): see {folder}/logs; what "
                "is finished is kept, and the run can be resumed"
            ) from None
        for name, data in outcome.files.items():
            assert folder is not None
            write_atomically(folder / name, data)
        if outcome.error is not None:
            raise outcome.error
        return outcome.result

    def _listen(self) -> None:
        try:
            heard = self.ray.get(self.words.taken.remote(), timeout=LOST)
        except self.ray.exceptions.RayError:  # its node is gone; the jobs go on in silence
            return
        for number, start, events in heard:
            speaks, amount = self.told.get(number, (start, 0.0))
            if speaks != start:  # it was started again: what it tells of from now on counts
                self.tell(events[0][0], -amount)
                amount = 0.0
            for what, more in events:
                self.tell(what, more)
                amount += more
            self.told[number] = start, amount

    def _check_room(self) -> None:
        if _fits(self.ray.nodes(), self.asked):
            self.without_room = 0.0
            return
        self.without_room = self.without_room or time.monotonic()
        if time.monotonic() - self.without_room > LOST:
            raise RecollectError(
                f"no node with {_room(self.asked)} is left in the Ray cluster: what is finished is kept, to be resumed"
            )


# --- there -----------------------------------------------------------------------------------------------------------------


class _Words:
    """An actor that keeps what jobs tell until it is asked."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, str, list[tuple[Any, float]]]] = []

    def tell(self, number: int, start: str, events: list[tuple[Any, float]]) -> None:
        self.kept.append((number, start, events))

    def taken(self) -> list[tuple[int, str, list[tuple[Any, float]]]]:
        taken, self.kept = self.kept, []
        return taken


class _Outcome(NamedTuple):
    """Of a job: what it returned or raised, and what it wrote where its folder is a copy."""

    result: Any
    error: BaseException | None
    files: dict[str, bytes]


class _Teller:
    """Tells the actor, not too often."""

    def __init__(self, words: Any, number: int):
        self.words, self.number, self.start = words, number, uuid.uuid4().hex
        self.events: list[tuple[Any, float]] = []
        self.last = 0.0

    def __call__(self, what: Any, amount: float) -> None:
        self.events.append((what, amount))
        if time.monotonic() - self.last > OFTEN:
            self.send()

    def send(self) -> Any:
        events, self.events, self.last = self.events, [], time.monotonic()
        return self.words.tell.remote(self.number, self.start, events) if events else None


def _perform(
    given: bytes, number: int, threads: int, words: Any, folder: Path | None, files: dict[str, bytes] | None
) -> _Outcome:
    """One job, in a worker; its own output goes to a log in its folder."""
    torch.set_num_threads(threads)
    teller, result, failed = _Teller(words, number), None, None
    with contextlib.ExitStack() as stack:
        if folder and files is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for name, data in files.items():
                write_atomically(folder / name, data)
        job = _unpickled(given, folder)[number]
        if folder:
            log = stack.enter_context(open(_log(folder, job), "a", buffering=1))
            stack.enter_context(contextlib.redirect_stdout(log))
            stack.enter_context(contextlib.redirect_stderr(log))
        try:
            result = _patiently(job, teller)
        except BaseException as error:
            traceback.print_exc()
            failed = _sendable(error)
        sent, written = teller.send(), {}
        if sent is not None:
            from ray import get
            from ray.exceptions import RayError

            with contextlib.suppress(RayError):
                get(sent, timeout=LOST)
        if folder and files is not None:
            written = {name: data for name, data in _files(folder).items() if files.get(name) != data}
    return _Outcome(result, failed, written)


def _log(folder: Path, job: Job) -> Path:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    return folder / "logs" / (re.sub(r"[^\w.=-]+", "-", job.name) + ".txt")


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does there
        return RecollectError(f"{type(error).__name__}: {error}")
    return error


def _patiently(job: Job, teller: _Teller) -> Any:
    """The job; where another process has its folder, which may be about to end, a little later."""
    until = time.monotonic() + LOST
    while True:
        try:
            return job(teller)
        except InUse:
            if time.monotonic() > until:
                raise
            time.sleep(1)


# --- what travels --------------------------------------------------------------------------------------------------------


def _files(folder: Path) -> dict[str, bytes]:
    """All that is in a folder and finished."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK and path.suffix != ".tmp"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _pickled(jobs: Sequence[Job], folder: Path | None) -> bytes:
    """All at once, so that what jobs share is there once. Paths in the folder are told from it, since it may be a copy."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> str | None:
            if folder and isinstance(obj, Path) and obj.absolute().is_relative_to(folder):
                return obj.absolute().relative_to(folder).as_posix()
            return None

    buffer = io.BytesIO()
    try:
        Pickler(buffer).dump(list(jobs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RecollectError(f"jobs cannot be sent to other processes ({error}): perform them in this one") from None
    return buffer.getvalue()


def _unpickled(data: bytes, folder: Path | None) -> list[Job]:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: str) -> Path:
            assert folder is not None
            return folder / pid

    return Unpickler(io.BytesIO(data)).load()
