"""Accuracy of fresh networks on a memory, beside baselines."""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from recollect import zoo
from recollect.commands.distill import write_report
from recollect.commands.inputs import Files, at_least_one, loaded, memory_path, write_to
from recollect.errors import RecollectError
from recollect.show import terminal

if TYPE_CHECKING:
    from recollect.data import Images
    from recollect.distributed import Ranks
    from recollect.memory import Memory


@dataclass(frozen=True)
class Evaluate(Files):
    """Train fresh networks on a memory, and report their accuracy, or R2 and RMSE of continuous targets, beside random real
    images of the same floats."""

    memory: Positional[Path]
    """a memory file, the folder of a run, or a name (recollect zoo)"""
    data: str | None = None
    """dataset that the memory was made of, where its name is not enough: a folder, a .npz or .csv file, hf:owner/name"""
    networks: int = 20
    """number of fresh networks for each row of the table"""
    architectures: tuple[str, ...] = ()
    """networks to train, such as convnet resnet12, for a cross-architecture table. Default: the memory's own"""
    epochs: int | None = None
    """passes over the recalled images. Default: those of the memory's recipe"""
    on: Literal["test", "validation"] = "test"
    """split to report; choose settings on validation"""
    baselines: tuple[Literal["random", "herding", "k-center"], ...] = ("random",)
    """real images of the same floats to compare with: random ones, or those that herding or k-center of features choose"""
    no_baselines: bool = False
    """leave out the networks that are trained on random real images of the same floats, or on chosen ones"""
    full: int = 0
    """epochs of networks that are trained on all the data too; with 0 there are none"""
    record: bool = False
    """write the accuracy, or R2 and RMSE, into the memory file's header"""
    json: Path | None = None
    """file to write all values to; - writes them to standard output. Default: a file in evaluations/ beside the memory, or in
    runs/zoo/NAME for a memory of the zoo"""
    seed: int = 0
    """seed of the networks"""
    device: str = "auto"
    """device that computes: cpu, cuda, or auto (cuda where there is one)"""

    def perform(self) -> int:
        path = memory_path(self.memory)
        shipped = zoo.name_of(path)
        if shipped and self.record:
            raise RecollectError(
                f"{shipped} is of the zoo, whose files stay as they are: save a copy, and record there (--record)"
            )
        with terminal.loading(path):
            memory, images = self._loaded(path)
        from recollect.evaluation import chosen_real, evaluate, examples, full_data, keep, mean_predictor, memory_recipe
        from recollect.nets import constructor

        recipe = memory_recipe(memory)
        if self.epochs is not None:
            recipe = dataclasses.replace(recipe, epochs=self.epochs)
        options: dict[str, Any] = dict(networks=self.networks, on=self.on, seed=self.seed, device=self.device)
        names = list(self.architectures) or [recipe.network]
        for name in names:  # all of them before the first hour is spent
            constructor(name)
        per_class = memory.header.budget.get("images_per_class", 1)
        if not self.no_baselines and (type(per_class) is not int or per_class < 1):
            raise RecollectError(f"{path} has a budget of {per_class!r} images per class: add --no-baselines")
        recipes = [dataclasses.replace(recipe, network=name) for name in names]

        ranks = self._met(path, images, options | {"recipe": dataclasses.asdict(recipe), "architectures": names})
        baselines, continuous = () if self.no_baselines else self.baselines, images.train.targets is not None
        rows_in_all = len(names) * (1 + len(baselines)) + (self.full > 0)
        rows: list[tuple[Any, str]] = []

        def measure(name: str, numbers: int, how: Callable[..., Any], *of: Any, **more: Any) -> None:
            with terminal.trainings(f"{name} ({len(rows) + 1} of {rows_in_all})") as progress:
                rows.append((how(*of, progress=progress, **options, **more), f"{numbers:,} numbers"))

        for each in recipes:
            measure("memory", memory.floats, evaluate, memory, images, recipe=each)
        found, preprocess = [evaluation for evaluation, _ in rows], memory.preprocess(images)
        if continuous and baselines:
            rows.append((mean_predictor(images, self.on), f"{images.classes:,} numbers"))
        for how in baselines:
            size = examples(images, per_class) * images.train.images[0].numel()
            for each in recipes:
                measure(f"{how} real images", size, chosen_real, images, how, per_class, preprocess, each)
        if self.full:
            whole = dataclasses.replace(recipe, epochs=self.full)
            measure("all the data", images.train.images.numel(), full_data, images, preprocess, whole)
        if ranks.rank:
            return 0
        if str(self.json) != "-":
            terminal.accuracy_table(f"{images.name}: {terminal.metric(rows)} on the {self.on} set ({found[0].protocol})", rows)
        if self.json:
            write_to(
                self.json, {"memory": path.name, "rows": [evaluation.to_json() | {"size": size} for evaluation, size in rows]}
            )
        else:
            terminal.say(f"kept in {keep(path, rows, Path('runs') / 'zoo' / shipped if shipped else None)}")
        if self.record:
            self._record(memory, found, path)
        if _is_of_run(path) and (self.record or not self.json):
            write_report(path.parent)
        return 0

    def _loaded(self, path: Path) -> "tuple[Memory, Images]":
        from recollect.memory import Memory

        if self.seed < 0:
            raise RecollectError(f"seed is {self.seed}: give 0 or more")
        at_least_one(self.networks)
        memory = Memory.load(path)
        return memory, _images_of(memory.header.dataset, path, self)

    def _met(self, path: Path, images: "Images", settings: dict[str, Any]) -> "Ranks":
        """The other processes, if there are any: they must evaluate the same."""
        from recollect import distributed
        from recollect.devices import find_device
        from recollect.files import sha256

        ranks, facts = distributed.current(), {"memory": sha256(path.read_bytes()), "images": images.train.fingerprint}
        ranks.meet(find_device(self.device), settings | facts)
        return ranks

    def _record(self, memory: "Memory", found: list[Any], path: Path) -> None:
        """In the header; what more networks have given there stays."""
        known = {(entry.get("network"), entry.get("on")): entry.get("n", 1) for entry in memory.header.accuracy}
        better = [each for each in found if known.get((each.network, each.on), 0) <= len(each.values)]
        for each in found:
            if each not in better:
                print(f"not recorded: the header has an accuracy of more networks ({each.network}, {each.on})", file=sys.stderr)
        memory.with_accuracy(*(evaluation.entry() for evaluation in better)).save(path)


def _is_of_run(memory: Path) -> bool:
    from recollect.runs import Run

    run = Run(memory.parent)
    return memory == run.memory_path and run.is_begun


def _images_of(name: str, memory: Path, command: Evaluate):
    """A memory's dataset: as it is given, as the run beside the memory had it, or by the name in the memory's header."""
    from recollect.data import BUNCHES, NAMED
    from recollect.runs import Run

    if command.data:
        return command.load(command.data)
    run = Run(memory.parent)
    known = run.settings["data"] if run.is_begun else {}
    if "name" not in known and name.lower() not in ("digits", *NAMED, *BUNCHES):  # a file from anywhere may name any place
        raise RecollectError(f"{memory} was made of '{name}', which is no official dataset: say where it is (--data)")
    try:
        return loaded({"name": name, **known}, root=command.root, size=command.size, target=command.target, label=command.label)
    except RecollectError as error:
        raise RecollectError(f"{memory} was made of '{name}': {error}. Or say where it is (--data)") from None
