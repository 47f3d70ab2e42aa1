"""Benchmarks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from recollect.files import write_json


@dataclass(frozen=True)
class Bench:
    """Measure this machine: ratios, each from one run."""

    what: Positional[tuple[Literal["unroll", "memory", "demo", "startup", "cpu", "engine", "exactness"], ...]] = (
        "unroll",
        "memory",
        "startup",
    )
    """unroll: an outer step against plain full-graph autograd; memory: peak memory at T = 10 and T = 100; demo: end to end;
    startup: import and --help; cpu: the ConvNet's passes by hand against the plain way, the chip and float64; and on a GPU,
    engine: an outer iteration against the published loop; exactness: each precision against float64"""
    profile: bool = False
    """engine: time by kernel too"""
    json: Path | None = None
    """write the figures here"""

    def perform(self) -> int:
        from recollect.bench import bench

        path = self.json
        bench(self.what, self.profile, lambda figures: write_json(path, figures) if path else None)
        return 0
