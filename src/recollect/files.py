"""Writing files so that nothing is ever half written (a new name first, then one rename), and folders that one process has
for itself."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import socket
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from recollect.errors import RecollectError

MOST_DEPTH = 100  # of JSON
LOCK = ".lock"  # in a folder that is held: by whom


class InUse(RecollectError):
    """A folder is another process's now."""


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, or leave it as it was: a reader never sees anything between, and a power cut loses nothing."""
    with _beside(Path(path), data) as temporary:
        os.replace(temporary, path)


def write_new(paths: Iterable[Path], data: bytes) -> Path:
    """Write the first of these paths that is not there, whole: never over another's file, whoever writes meanwhile."""
    for path in itertools.filterfalse(os.path.lexists, paths):
        with _beside(path, data) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                continue
            except OSError:  # a file system without links
                os.replace(temporary, path)
        return path
    raise ValueError("no path is free")


@contextlib.contextmanager
def _beside(path: Path, data: bytes) -> Iterator[Path]:
    """A file of these bytes beside `path`, on the disk, to be given its name meanwhile."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
        settle(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def settle(folder: Path) -> None:
    """Renames in a folder outlast a power cut, where the system can promise it."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def write_through(path: Path, data: bytes) -> None:
    """Write where a user's own path leads: a link is followed and stays, a device, a pipe or an open file gets the bytes."""
    path = Path(path)
    for _ in range(40):  # as many links as Linux follows
        if not os.path.islink(path) or _is_open(path):  # os.path says no where Path raises: a name that is too long
            break
        path = path.parent / os.readlink(path)
    else:
        raise unwritable(path, OSError(errno.ELOOP, os.strerror(errno.ELOOP)))
    if not _is_open(path) and (not os.path.exists(path) or os.path.isfile(path)):
        return write_atomically(path, data)
    try:
        with open(path, "ab") as file:
            file.write(data)
    except OSError as error:
        raise unwritable(path, error) from error


def _is_open(path: Path) -> bool:
    """Whether it is another name of a file that this process has open, as /dev/stdout is."""
    return os.path.realpath(path.parent).startswith(("/proc/", "/dev/fd"))


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """The folder is this process's alone until this ends, or until the process does; otherwise the error says whose it is."""
    path, file = Path(folder) / LOCK, None
    while file is None:
        file = _locked(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(file)


def _locked(path: Path) -> int | None:
    """The open lock, with our name in it; None if its last holder took the file away meanwhile."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        written = re.fullmatch(rb"process \d+ on [\w.-]+", os.read(file, 300))
        os.close(file)
        holder = written[0].decode() if written else "another process"
        raise InUse(f"{path.parent} is in use by {holder}: wait for it, stop it, or give another folder") from None
    except OSError as error:  # a file system without locks
        warnings.warn(f"{path.parent} cannot be locked ({error.strerror}): keep other processes out of it", stacklevel=3)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(file), os.stat(path)):
            os.ftruncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
            return file
    os.close(file)
    return None


def unwritable(path: Path, error: OSError) -> RecollectError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RecollectError(
            f"no space left to write {path}: make room, then run the same command again (a run that has begun: recollect resume)"
        )
    return RecollectError(f"cannot write {path}: {error.strerror or error}")


def write_json(path: Path, value: object) -> None:
    write_atomically(path, as_json(value))


def as_json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def write_compact(path: Path, value: object) -> None:
    """As result files are written: see `compact`."""
    write_atomically(path, (compact(value) + "\n").encode())


def compact(value: Any, margin: str = "\n") -> str:
    """JSON in which only what holds other lists or objects is more than a line; numbers to six digits."""
    if isinstance(value, float):
        return json.dumps(float(f"{value:.6g}"))
    if not isinstance(value, dict | list | tuple):
        return json.dumps(value)
    items = [*value.values()] if isinstance(value, dict) else [*value]
    parts = [compact(item, margin + " ") for item in items]
    if isinstance(value, dict):
        parts = [f"{json.dumps(str(name))}: {part}" for name, part in zip(value, parts, strict=True)]
    opening, closing, between = ("{", "}", ", ") if isinstance(value, dict) else ("[", "]", ",")
    if any(isinstance(item, dict | list | tuple) and item for item in items):
        opening, closing, between = f"{opening}{margin} ", margin + closing, f",{margin} "
    return opening + between.join(parts) + closing


def read_json(path: Path) -> dict:
    try:
        value = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise RecollectError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RecollectError(f"{path} is not a readable JSON file: {error}") from None
    if not isinstance(value, dict):
        raise RecollectError(f"{path} holds {type(value).__name__}, not a JSON object")
    if is_deep(value):
        raise RecollectError(f"{path} is JSON of more than {MOST_DEPTH} levels, and no file of ours")
    return value


def is_deep(value: object) -> bool:
    """Whether lists and objects are nested beyond what any of ours is; without recursion, which has its own limit."""
    level = [value]
    for _ in range(MOST_DEPTH):
        inside = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [child for each in inside for child in each]
    return bool(level)


def sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
