"""What a memory file says about itself."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from tyro.conf import Positional

from recollect.commands.inputs import memory_path, write_to
from recollect.header import read_header
from recollect.queries import Targets
from recollect.show import terminal


@dataclass(frozen=True)
class Info:
    """Show what a memory file says about itself."""

    memory: Positional[Path]
    """a memory file, the folder of a run, a name (recollect zoo), or hub:owner/name"""
    json: bool = False
    """print the header as JSON, with the shapes of all tensors"""

    def perform(self) -> int:
        path = memory_path(self.memory)
        header, tensors = read_header(path)
        if self.json:
            shapes = {name: {"shape": list(info.shape), "dtype": info.dtype} for name, info in tensors.items()}
            write_to(Path("-"), asdict(header) | {"file": str(path), "bytes": path.stat().st_size, "tensors": shapes})
            return 0
        bases, addressing = tensors["bases"], tensors["addressing"]
        made, budget = dict(header.made), header.budget
        numbers = sum(math.prod(info.shape) for name, info in tensors.items() if name.startswith("encoder.") or name == "vectors")
        config = made.pop("config", {})
        if isinstance(made.get("start"), dict):
            made["start"] = f"a memory of {made['start'].get('steps', '?')} steps"
        rows = [
            ("dataset", header.dataset),
            ("classes" if not isinstance(header.asked, Targets) else "targets", terminal.class_names(header.class_names)),
            ("image", "x".join(map(str, header.image_shape))),
            ("bases", f"{list(bases.shape)} {bases.dtype}"),
            ("addressing", f"{list(addressing.shape)} {addressing.dtype}, {header.addressing}"),
            ("recalls", f"{addressing.shape[0]} images a {header.asked.unit}"),
            *(
                [("asked with", f"{terminal.listed(header.query)}; {numbers:,} numbers for queries beside the budget")]
                if header.query
                else []
            ),
            ("budget", f"{budget.get('name', '?')}: {budget.get('used', '?')} of {budget.get('numbers', '?')} numbers"),
            ("file", f"{path.stat().st_size:,} bytes, format {header.format}"),
            ("preprocessing", terminal.listed(header.preprocessing)),
            ("train with", terminal.listed(header.recipe)),
            ("made by", terminal.listed(made)),
            ("config", terminal.listed(config)),
            *(("accuracy", terminal.listed(entry)) for entry in header.accuracy),
        ]
        terminal.pairs(str(path), rows)
        return 0
