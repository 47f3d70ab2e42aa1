"""Writing files so that nothing is ever half written: a new name first, then one rename."""

import contextlib
import errno
import hashlib
import json
import os
from pathlib import Path

from recollect.errors import RecollectError


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, or leave it as it was: a reader never sees anything between."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> RecollectError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RecollectError(
            f"no space left to write {path}: make room, then run the same command again (a run that has begun: recollect resume)"
        )
    return RecollectError(f"cannot write {path}: {error.strerror or error}")


def write_json(path: Path, value: object) -> None:
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> dict:
    try:
        value = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise RecollectError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RecollectError(f"{path} is not a readable JSON file: {error}") from None
    if not isinstance(value, dict):
        raise RecollectError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
