"""A run's folder, whatever its kind: what was asked for, where it was begun, and how far it came.

    config.json        the kind (distill, select, continual) and the settings; 0.1 had select.json and continual.json
    environment.json   versions, device and commit
    metrics.jsonl, checkpoint.pt, checkpoint.previous.pt, memory.safetensors     of a distillation
    .lock              while a process works in it: which

Everything is written atomically, or line by line; a folder that already holds a run is never written over, and one process at
a time works in it.
"""

import io
import json
import os
import pickle
import platform
import signal
import subprocess
import threading
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

import torch

import recollect
from recollect import limits
from recollect.config import fits, renewed, to_json
from recollect.data.pickles import PickleError, check_torch
from recollect.errors import RecollectError, unknown
from recollect.files import held, read_json, sha256, unwritable, write_atomically, write_json

KINDS: dict[str, dict[str, type]] = {
    "distill": {"data": dict, "distill": dict},
    "select": {"data": dict, "distill": dict, "field": str, "values": list, "networks": int},
    "continual": {"data": dict, "config": dict, "stream": str, "how": dict},
}
"""what the settings of each kind have: `data` is how the images were loaded"""
FILES = {"config.json": "distill", "select.json": "select", "continual.json": "continual"}
"""where settings may stand, and of which kind they are if they do not say (as in 0.1)"""
MARK = b"recollect checkpoint, sha256 "
"""how a checkpoint begins: a line with the checksum of what follows, which is torch's; 0.1 had none"""


class Stopped(KeyboardInterrupt):
    """A run that was told to stop, and saved first. `signal` is SIGINT or SIGTERM."""

    def __init__(self, number: int, folder: Path, step: int):
        super().__init__(number, folder, step)  # what it is made of, so that it can come from another process
        self.signal = number

    def __str__(self) -> str:
        _, folder, step = self.args
        return f"stopped after outer step {step}: continue with recollect resume {folder}"


class Run:
    """One run's folder. `create` makes a new one, `open` finds an old one."""

    def __init__(self, folder: "Path | str"):
        self.folder = Path(folder)
        places = [self.folder / name for name in FILES]
        self.config_path = next(filter(Path.is_file, places), places[0])
        self.metrics_path = self.folder / "metrics.jsonl"
        self.checkpoint_path = self.folder / "checkpoint.pt"
        self.memory_path = self.folder / "memory.safetensors"

    def kept(self, step: int) -> Path:
        """Where a memory on the way is kept."""
        return self.folder / f"memory-{step}.safetensors"

    @staticmethod
    def create(folder: "Path | str", kind: str, settings: dict[str, Any]) -> "Run":
        run = Run(folder)
        run.refuse_if_used()
        write_json(run.folder / "environment.json", environment())
        run.write(kind, settings)
        return run

    @staticmethod
    def open(folder: "Path | str", kind: str | None = None) -> "Run":
        """A run that was begun; of this kind, if one is given."""
        run = Run(folder)
        if not run.is_begun:
            raise RecollectError(f"{run.folder} holds no run (no config.json): give the folder of a run that recollect made")
        if kind and run.kind != kind:
            raise RecollectError(f"{run.folder} holds a run of kind {run.kind}, not {kind}: give another folder")
        return run

    def refuse_if_used(self) -> None:
        """Before anything is computed: a folder with a run in it is not written over."""
        kept = (self.metrics_path, self.checkpoint_path, previous(self.checkpoint_path), self.memory_path)
        if self.is_begun or any(map(Path.exists, kept)):
            raise RecollectError(
                f"{self.folder} already holds a run: resume it (recollect resume {self.folder}) or give another folder (--out)"
            )
        if self.folder.exists() and not self.folder.is_dir():
            raise RecollectError(f"{self.folder} is a file: give a folder (--out)")
        nearest = next(filter(Path.exists, self.folder.absolute().parents))
        if not nearest.is_dir():
            raise RecollectError(f"cannot write {self.folder}: {nearest.name} is a file")

    @staticmethod
    @contextmanager
    def working(folder: "Path | str", kind: str, settings: dict[str, Any] | None = None) -> Iterator["Run"]:
        """A new run of these settings, or, without any, one that was begun: this process's alone meanwhile."""
        run = Run(folder)
        _ = Run.open(folder, kind) if settings is None else run.refuse_if_used()
        with held(run.folder):
            yield run if settings is None else Run.create(folder, kind, settings)

    @property
    def is_begun(self) -> bool:
        return self.config_path.is_file()

    @property
    def kind(self) -> str:
        kind = str(read_json(self.config_path).get("kind", FILES[self.config_path.name]))
        if kind not in KINDS:
            raise unknown(f"kind of run in {self.config_path}", kind, KINDS)
        return kind

    @property
    def settings(self) -> dict[str, Any]:
        """What was asked for."""
        found = read_json(self.config_path)
        for part, kind in KINDS[self.kind].items():
            if not isinstance(found.get(part), kind):
                raise RecollectError(f"{self.config_path} has no '{part}': restore it, or start another run")
        return {name: value for name, value in found.items() if name != "kind"}

    def write(self, kind: str, settings: dict[str, Any]) -> None:
        write_json(self.config_path, {"kind": kind, **settings})

    def check(self, config: Any, **others: Any) -> None:
        """Refuse a config, or other settings, that the run was not begun with."""
        begun = self.settings
        check_same(self.folder, begun | begun.get("distill", begun.get("config", {})), config, **others)

    def log(self, values: dict[str, Any]) -> None:
        """One line of metrics."""
        try:
            with open(self.metrics_path, "a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
        except OSError as error:
            raise unwritable(self.metrics_path, error) from error

    def metrics(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl (a kill can leave half a line, a power cut worse)."""
        if not self.metrics_path.exists():
            return []
        return [line for line in map(_metrics_line, self.metrics_path.read_bytes().splitlines(keepends=True)) if line]

    def forget_after(self, step: int) -> None:
        """Drop metrics of outer steps that the checkpoint does not know of, which will be made again, and files that a kill
        left half written."""
        for leftover in self.folder.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        if not self.metrics_path.exists():
            return
        kept = [line for line in self.metrics() if line["step"] <= step]
        write_atomically(self.metrics_path, "".join(json.dumps(line) + "\n" for line in kept).encode())


def own(path: Path) -> Path:
    """A place in a run's folder for what is written where its path leads: a link there, which whoever made the folder may have
    put, gives way."""
    if path.is_symlink():
        path.unlink()
    return path


def check_same(where: Path, begun: dict[str, Any], config: Any, **others: Any) -> None:
    """Refuse a config, or other settings, than what was begun with. What was not written is younger, and had its default."""
    known = to_json(type(config)()) | renewed(begun)
    for name, value in (to_json(config) | others).items():
        if known.get(name) != value:
            raise RecollectError(
                f"{where} was begun with {name} {known.get(name)!r}, not {value!r}: "
                "resume it unchanged, or start another run with the new setting (--out)"
            )


def previous(path: Path) -> Path:
    """Where the checkpoint before this one is kept."""
    return path.with_suffix(".previous.pt")


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """With its checksum; the one before it is kept beside it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    if path.exists():
        _keep(path, previous(path))
    write_atomically(path, MARK + sha256(data).encode() + b"\n" + data)


def _keep(path: Path, name: Path) -> None:
    """Give a file a second name, in the place of what had it: at every moment it has one."""
    link = name.with_name(f".{name.name}.{os.getpid()}.tmp")
    try:
        link.unlink(missing_ok=True)
        os.link(path, link)
        os.replace(link, name)
        link.unlink(missing_ok=True)  # left where both were the same file already
    except OSError:  # a file system without links
        os.replace(path, name)


def load_checkpoint(path: Path, **parts: type) -> dict[str, Any] | None:
    """A checkpoint with these parts, or None; where it is damaged, the one before it. Only tensors, numbers, strings and
    containers of them are ever unpickled."""
    wrong: list[str] = []
    for place in (path, previous(path)):
        if not place.exists():
            continue
        try:
            found = _read_checkpoint(place, parts)
        except _Damaged as error:
            wrong.append(f"{place} cannot be read ({error})")
            continue
        if wrong:
            warnings.warn(f"{wrong[0]}: going on from the checkpoint before it, {place.name}", stacklevel=2)
            os.replace(path, path.with_suffix(".damaged.pt"))
            _keep(place, path)
        return found
    if wrong:
        which = "both" if wrong[1:] else "it"
        raise RecollectError(f"{'; '.join(wrong)}: delete {which} to start this run, or these tasks, from the beginning")
    return None


class _Damaged(Exception):
    """A checkpoint that cannot be used, and why."""


def _read_checkpoint(path: Path, parts: dict[str, type]) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        if data.startswith(MARK):
            mark, _, data = data.partition(b"\n")
            if mark != MARK + sha256(data).encode():
                raise _Damaged("its checksum does not match")
        elif not data.startswith(b"PK"):
            raise _Damaged("it is no whole checkpoint")
        found = torch.load(_repacked(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, PickleError):
        raise _Damaged("it holds other things than tensors, numbers and words") from None
    except OSError as error:
        raise _Damaged(error.strerror or "no file") from None
    except Exception as error:  # torch and zipfile have many for a damaged file
        raise error if isinstance(error, _Damaged) else _Damaged("it is no whole checkpoint") from None
    for part, kind in parts.items():
        if not (isinstance(found, dict) and isinstance(found.get(part), kind)):
            raise _Damaged(f"it has no '{part}' of type {kind.__name__}")
    return found


def _repacked(data: bytes) -> io.BytesIO:
    """What torch gets to read: an archive of ours, with the parts that match their checksums, and a program that makes nothing
    but tensors and plain values. Its own reader looks at neither. (The only checksums of 0.1 are the archive's.)"""
    found = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as whole, zipfile.ZipFile(found, "w") as parts:
        names = {part.filename for part in whole.infolist()}
        limits.check("it", sum(part.file_size for part in whole.infolist()), len(data))
        for part in whole.infolist():
            content = whole.read(part)
            if part.filename.endswith(".pkl"):
                check_torch(content)
            parts.writestr(part.filename, content)
    if len(names) < len(parts.infolist()):
        raise _Damaged("it has two parts of one name")
    found.seek(0)
    return found


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """While what a checkpoint holds is put in place: whatever does not fit is one clear error."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, RecollectError):
            raise
        raise RecollectError(
            f"{path} holds no state of this run ({type(error).__name__}): delete it to start from the beginning"
        ) from error


def check_threads(where: Path, saved: dict[str, Any]) -> None:
    """A note where a run goes on with another number of threads: a ConvNet's sums round otherwise then."""
    before, now = saved.get("threads"), torch.get_num_threads()
    if isinstance(before, int) and before != now:
        warnings.warn(
            f"{where} was begun with {before} threads, and goes on with {now}: its bytes will differ in the last digits "
            f"(the same: OMP_NUM_THREADS={before})",
            stacklevel=2,
        )


class _Line(TypedDict):
    step: int
    loss: float | None
    norm: float | None
    lr: float
    skipped: int
    seconds: float


def _metrics_line(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or "step" not in values or not fits(values, _Line):
        return None
    return None if any(isinstance(value, list | dict) for value in values.values()) else values


def environment() -> dict[str, Any]:
    """Versions, device and commit, for the record."""
    return {
        "recollect": recollect.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": _commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    """The processor's name as Linux tells it; elsewhere what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def _commit() -> str | None:
    """The commit of the checkout that the package runs from, if it does."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


class Interrupted(Exception):
    """What a run was doing is dropped: it is told to stop."""


class Signals:
    """Ctrl-C and SIGTERM while a run works: collected, so that it can save; a second one stops at once."""

    def __init__(self) -> None:
        self.caught: list[int] = []
        self._drops = False

    @contextmanager
    def drops(self) -> Iterator[None]:
        """What is done here may be dropped: a signal ends it by Interrupted."""
        self._drops = True
        try:
            yield
        finally:
            self._drops = False

    @contextmanager
    def collected(self) -> Iterator["Signals"]:
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def remember(number: int, _: object) -> None:
            self.caught.append(number)
            restore()
            if self._drops:
                raise Interrupted

        for number in before:
            signal.signal(number, remember)
        try:
            yield self
        finally:
            restore()
