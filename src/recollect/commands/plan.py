"""What a run would cost, before it is started."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, Positional, arg

from recollect.commands.inputs import Data, Files, loaded, spec, write_to
from recollect.config import DistillConfig
from recollect.continual.config import LEARNERS, ContinualConfig, check_learners
from recollect.errors import RecollectError
from recollect.show import terminal

if TYPE_CHECKING:
    from recollect.data.images import Images


@dataclass(frozen=True)
class Plan:
    """Say what a distillation would cost before it is started: seconds, memory, bytes sent. With --stream, a stream's tasks."""

    images: OmitArgPrefixes[Data]
    config: Annotated[OmitArgPrefixes[DistillConfig], arg(name="")]
    preset: Literal["fast", "paper"] = "fast"
    """set of defaults: fast, chosen on validation splits, or paper"""
    on: tuple[str, ...] = ("here",)
    """devices to plan for: here, by a measurement of some seconds; h200 and epyc-core, by measured rates; h100, a100, l40s and
    rtx4090, by their peak rates, as estimates"""
    stream: str | None = None
    """stream to plan instead of a distillation: rotations, permutations, many, cifar100 or split, with the settings of recollect
    continual (recollect plan --stream NAME --help)"""
    devices: int = 1
    """number of devices that share the run, as torchrun's processes"""
    json: Path | None = None
    """file to write the figures to; - writes them to standard output"""

    def perform(self) -> int:
        if self.devices < 1:
            raise RecollectError(f"devices is {self.devices}: give 1 or more")
        images = loaded(spec(self.images))
        rows = [self._row(images, name) for name in self.on]
        if self.json:
            write_to(self.json, {"rows": rows})
        if str(self.json) != "-":
            terminal.say(terminal.table(HEADINGS, [_shown(row) for row in rows], left=("on", "how")))
        return 0

    def _row(self, images: "Images", name: str) -> dict[str, Any]:
        from recollect import cost
        from recollect.decisions import resolve
        from recollect.devices import find_device

        config = resolve(self.config, images)
        used = cost.work(config, images.shape, images.classes, len(images.train.images), self.devices)
        row: dict[str, Any] = {"on": name, "devices": self.devices, "outer steps": config.budget.outer_steps}
        if name == "here":
            found = cost.measured(images, self.config)
            share = cost.share(config, self.devices)
            row |= {"seconds": found.each * share, "before": found.before, "bytes": found.memory}
            row |= {"how": f"measured on this {find_device(config.run.device)}"}
        else:
            there = cost.device(name)
            how = "by measured rates" if there.measured else "estimate, by the peak rate"
            row |= {"seconds": there.seconds(used), "before": 0.0, "bytes": used.memory, "how": how}
            if used.memory > there.memory:
                row["how"] += f"; does not fit into {there.memory / 1e9:.0f} GB"
        if used.idle:
            row["how"] += f"; {used.idle} idle"
        return row | {"in all": row["before"] + config.budget.outer_steps * row["seconds"], "wire": used.wire}


HEADINGS = ("on", "devices", "s a step", "steps", "in all", "GiB", "MB sent a step", "how")


def _shown(row: dict[str, Any]) -> tuple[str, ...]:
    numbers = f"{row['seconds']:.3g}", f"{row['outer steps']:,}", terminal.lasting(row["in all"])
    return row["on"], str(row["devices"]), *numbers, f"{row['bytes'] / 2**30:.2g}", f"{row['wire'] / 1e6:.2g}", row["how"]


@dataclass(frozen=True)
class PlanStream(Files):
    """Say what a stream would cost before it is started: seconds of each learner, and in all."""

    data: Positional[str]
    """images to stream: digits, mnist, cifar100, ..., a folder of class folders, a .npz file, or hf:owner/name"""
    stream: Literal["rotations", "permutations", "many", "cifar100", "rotations-60k", "permutations-60k", "split"]
    """stream to plan; it decides the defaults of all settings"""
    config: Annotated[OmitArgPrefixes[ContinualConfig], arg(name="")]
    learners: tuple[str, ...] = ()
    """learners to compare: compress, union, gdumb, online, er, agem, ewc, all-data. Default: all"""
    seeds: int = 5
    """number of runs, with seeds from 0"""
    workers: int = 1
    """number of processes that share the work"""
    device: str = "auto"
    """device that computes: cpu, cuda, or auto (cuda where there is one)"""
    json: Path | None = None
    """file to write the figures to; - writes them to standard output"""

    def perform(self) -> int:
        learners = self.learners or LEARNERS
        check_learners(learners)
        for name, value in (("seeds", self.seeds), ("workers", self.workers)):
            if value < 1:
                raise RecollectError(f"{name} is {value}: give 1 or more")
        from recollect import cost

        images = self.load(self.data)
        found = cost.measured_stream(images, self.config, learners, self.device)
        total = self.seeds * sum(found.values()) / self.workers
        if self.json:
            write_to(self.json, {"seconds a seed": found, "seconds in all": total})
        if str(self.json) != "-":
            rows = [(name, f"{seconds:.3g}") for name, seconds in found.items()]
            terminal.say(terminal.table(("learner", "s a seed"), rows, left=("learner",)))
            terminal.say(f"in all about {terminal.lasting(total)}: {self.seeds} seeds, {self.workers} at a time")
        return 0
