"""Loss, norm and learning rate of each outer step for TensorBoard."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from recollect.errors import RecollectError


@contextmanager
def tensorboard(folder: Path, wanted: bool) -> Iterator[Callable[[dict[str, Any]], None] | None]:
    """Writes a line of metrics into the run's folder, where that was asked for."""
    if not wanted:
        yield None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise RecollectError("--tensorboard needs the package tensorboard: pip install 'recollect[tensorboard]'") from None
    writer = None

    def write(line: dict[str, Any]) -> None:
        nonlocal writer
        if writer is None:  # by now the run has its folder; steps that a kill undid are not shown twice
            writer = closing.enter_context(SummaryWriter(str(folder / "tensorboard"), purge_step=line["step"]))
        for name in ("loss", "norm", "lr", "seconds"):
            if line.get(name) is not None:
                writer.add_scalar(name, line[name], line["step"])

    with ExitStack() as closing:
        yield write
