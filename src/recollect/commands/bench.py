"""Benchmarks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from recollect.commands.inputs import write_to


@dataclass(frozen=True)
class Bench:
    """Benchmark this machine; each ratio is from one run."""

    what: Positional[tuple[Literal["unroll", "memory", "demo", "startup", "cpu", "scale", "engine", "exactness"], ...]] = (
        "unroll",
        "memory",
        "startup",
    )
    """benchmarks to run. unroll: an outer step against plain full-graph autograd; memory: peak memory at T = 10 and T = 100;
    demo: end to end; startup: import and --help; cpu: the ConvNet's passes by hand against the plain way, the chip and float64;
    scale: one process of torchrun against two, one thread each; and on a GPU, engine: an outer iteration against the published
    loop; exactness: each precision against float64"""
    profile: bool = False
    """show the time of each kernel too (engine)"""
    json: Path | None = None
    """file to write the figures to; - writes them to standard output"""

    def perform(self) -> int:
        from recollect.bench import bench

        path = self.json
        bench(self.what, self.profile, lambda figures: write_to(path, figures) if path else None)
        return 0
