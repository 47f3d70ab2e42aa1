"""A run's folder: config.json, environment.json, metrics.jsonl, checkpoint.pt, memory.safetensors.

Everything is written atomically, or line by line; a folder that already holds a run is never written over.
"""

import io
import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from recollect.errors import RecollectError
from recollect.files import read_json, unwritable, write_atomically, write_json


class Run:
    """One run's folder. `create` makes a new one, `open` finds an old one."""

    def __init__(self, folder: "Path | str"):
        self.folder = Path(folder)
        self.config_path = self.folder / "config.json"
        self.metrics_path = self.folder / "metrics.jsonl"
        self.checkpoint_path = self.folder / "checkpoint.pt"
        self.memory_path = self.folder / "memory.safetensors"
        self.evaluation_path = self.folder / "evaluation.json"

    def kept(self, step: int) -> Path:
        """Where a memory on the way is kept."""
        return self.folder / f"memory-{step}.safetensors"

    @staticmethod
    def create(folder: "Path | str", config: dict[str, Any]) -> "Run":
        run = Run(folder)
        run.refuse_if_used()
        write_json(run.folder / "environment.json", environment())
        write_json(run.config_path, config)
        return run

    @staticmethod
    def open(folder: "Path | str") -> "Run":
        run = Run(folder)
        if not run.config_path.is_file():
            raise RecollectError(
                f"{run.folder} holds no run (no config.json): give the folder of a run that recollect made"
            )
        return run

    def refuse_if_used(self) -> None:
        """Before anything is computed: a folder with a run in it is not written over."""
        if any(path.exists() for path in (self.config_path, self.metrics_path, self.checkpoint_path, self.memory_path)):
            raise RecollectError(
                f"{self.folder} already holds a run: resume it (recollect resume {self.folder}) or give another folder (--out)"
            )
        if self.folder.exists() and not self.folder.is_dir():
            raise RecollectError(f"{self.folder} is a file: give a folder (--out)")

    @property
    def config(self) -> dict[str, Any]:
        """What `create` was given: how the data were loaded, and the settings."""
        found = read_json(self.config_path)
        for part in ("data", "distill"):
            if not isinstance(found.get(part), dict):
                raise RecollectError(f"{self.config_path} has no '{part}': restore it, or start another run")
        return found

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
        kept = [line for line in self.metrics() if line["step"] <= step]
        write_atomically(self.metrics_path, "".join(json.dumps(line) + "\n" for line in kept).encode())

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        import torch

        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomically(self.checkpoint_path, buffer.getvalue())

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The last checkpoint, or None. Only tensors, numbers, strings and containers of them are ever unpickled."""
        import torch

        if not self.checkpoint_path.exists():
            return None
        try:
            found = torch.load(self.checkpoint_path, map_location="cpu", weights_only=True)
            return {part: found[part] for part in ("config", "data", "preprocessing", "state")}
        except Exception as error:  # torch has many for a damaged file
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RecollectError(
                f"{self.checkpoint_path} cannot be read ({reason}): delete it to start this run from its beginning"
            ) from None


def _metrics_line(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None


def environment() -> dict[str, Any]:
    """Versions, device and commit, for the record."""
    import torch

    import recollect

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
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def _commit() -> str | None:
    """The commit of the checkout that the package runs from, if it does."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
