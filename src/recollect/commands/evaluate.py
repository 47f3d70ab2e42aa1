"""Accuracy of fresh networks on a memory, beside baselines."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from recollect import zoo
from recollect.commands.distill import write_report
from recollect.commands.inputs import Files, loaded, memory_path
from recollect.errors import RecollectError
from recollect.files import write_json
from recollect.show import terminal


@dataclass(frozen=True)
class Evaluate(Files):
    """Train fresh networks on a memory, and report their accuracy beside random real images of the same floats."""

    memory: Positional[Path]
    """a memory file, the folder of a run, or a name (recollect zoo)"""
    data: str | None = None
    """dataset that the memory was made of, where its name is not enough: a folder, a .npz file, hf:owner/name"""
    networks: int = 20
    """number of fresh networks for each row of the table"""
    architectures: tuple[str, ...] = ()
    """networks to train, such as convnet resnet12, for a cross-architecture table. Default: the memory's own"""
    epochs: int | None = None
    """passes over the recalled images. Default: those of the memory's recipe"""
    on: Literal["test", "validation"] = "test"
    """split to report; choose settings on validation"""
    no_baselines: bool = False
    """leave out the networks that are trained on random real images of the same floats"""
    full: int = 0
    """epochs of networks that are trained on all the data too; with 0 there are none"""
    record: bool = False
    """write the accuracy into the memory file's header"""
    json: Path | None = None
    """write all values here. Default: evaluation.json beside the memory; of a memory of the zoo, in runs/zoo/NAME"""
    seed: int = 0
    """seed of the networks"""
    device: str = "auto"
    """device that computes: cpu, cuda, or auto (cuda where there is one)"""

    def perform(self) -> int:
        from recollect.evaluation import evaluate, full_data, memory_recipe, random_real
        from recollect.memory import Memory
        from recollect.nets import constructor

        if self.seed < 0:
            raise RecollectError(f"seed is {self.seed}: give 0 or more")
        path = memory_path(self.memory)
        shipped = zoo.name_of(path)
        if shipped and self.record:
            raise RecollectError(
                f"{shipped} is of the zoo, whose files stay as they are: save a copy, and record there (--record)"
            )
        memory = Memory.load(path)
        images = _images_of(memory.header.dataset, path, self)
        recipe = memory_recipe(memory)
        if self.epochs is not None:
            recipe = dataclasses.replace(recipe, epochs=self.epochs)
        options: dict[str, Any] = dict(networks=self.networks, on=self.on, seed=self.seed, device=self.device)
        names = list(self.architectures) or [recipe.network]
        for name in names:  # all of them before the first hour is spent
            constructor(name)
        recipes = [dataclasses.replace(recipe, network=name) for name in names]

        def measured(name: str, numbers: int, how: Callable[..., Any], *of: Any, **more: Any):
            with terminal.trainings(name) as progress:
                return how(*of, progress=progress, **options, **more), f"{numbers:,} numbers"

        rows = [measured("memory", memory.floats, evaluate, memory, images, recipe=each) for each in recipes]
        found, preprocess = [evaluation for evaluation, _ in rows], memory.preprocess(images)
        if not self.no_baselines:
            per_class = memory.header.budget.get("images_per_class", 1)
            if type(per_class) is not int or per_class < 1:
                raise RecollectError(f"{path} has a budget of {per_class!r} images per class: add --no-baselines")
            size = per_class * images.classes * images.train.images[0].numel()
            rows += [measured("random real images", size, random_real, images, per_class, preprocess, each) for each in recipes]
        if self.full:
            whole = dataclasses.replace(recipe, epochs=self.full)
            rows.append(measured("all the data", images.train.images.numel(), full_data, images, preprocess, whole))
        terminal.accuracy_table(f"{images.name}: accuracy on the {self.on} set ({found[0].protocol})", rows)
        where = self.json or (Path("runs") / "zoo" / shipped if shipped else path.parent) / "evaluation.json"
        written = [evaluation.to_json() | {"size": size} for evaluation, size in rows]
        write_json(where, {"memory": path.name, "rows": written})
        if self.record:
            memory.with_accuracy(*(evaluation.entry() for evaluation in found)).save(path)
        if _is_of_run(path) and (self.record or not self.json):
            write_report(path.parent)
        return 0


def _is_of_run(memory: Path) -> bool:
    from recollect.runs import Run

    run = Run(memory.parent)
    return memory == run.memory_path and run.is_begun


def _images_of(name: str, memory: Path, command: Evaluate):
    """A memory's dataset: as it is given, as the run beside the memory had it, or by the name in the memory's header."""
    from recollect.data import NAMED
    from recollect.runs import Run

    if command.data:
        return command.load(command.data)
    run = Run(memory.parent)
    known = run.settings["data"] if run.is_begun else {}
    if "name" not in known and name.lower() not in ("digits", *NAMED):  # a file from anywhere may name any place
        raise RecollectError(f"{memory} was made of '{name}', which is no official dataset: say where it is (--data)")
    try:
        return loaded({"name": name, **known}, root=command.root, size=command.size)
    except RecollectError as error:
        raise RecollectError(f"{memory} was made of '{name}': {error}. Or say where it is (--data)") from None
