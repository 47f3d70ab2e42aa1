"""Accuracy of fresh networks on a memory, beside baselines."""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

from recollect import zoo
from recollect.commands.distill import write_report
from recollect.commands.inputs import Files, at_least_one, loaded, memory_path, write_to
from recollect.commands.performing import JOBS, Performing, spelt
from recollect.errors import RecollectError
from recollect.show import terminal

if TYPE_CHECKING:
    from recollect.config import Recipe
    from recollect.data import Images
    from recollect.distributed import Ranks
    from recollect.evaluation import Evaluation
    from recollect.header import Header
    from recollect.jobs import Job
    from recollect.memory import Memory
    from recollect.training import Progress


@dataclass(frozen=True)
class Evaluate(Files):
    """Train fresh networks on a memory, and report their accuracy, or R2 and RMSE of continuous targets, beside random real
    images of the same floats."""

    memory: Positional[Path]
    """a memory file, the folder of a run, a name (recollect zoo), or hub:owner/name"""
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
    ddranking: bool = False
    """report DD-Ranking's label-robust and augmentation-robust scores instead. They need all the data (--full), and networks
    trained with and without augmentation"""
    record: bool = False
    """write the accuracy, or R2 and RMSE, into the memory file's header"""
    json: Path | None = None
    """file to write all values to; - writes them to standard output. Default: a file in evaluations/ beside the memory, or in
    runs/zoo/NAME for a memory of the zoo (runs/hub/OWNER/NAME: of the Hub)"""
    seed: int = 0
    """seed of the networks"""
    device: str = "auto"
    """device that computes: cpu, cuda, or auto (cuda where there is one)"""
    jobs: Annotated[Performing, *JOBS] = Performing()

    def perform(self) -> int:
        path = memory_path(self.memory)
        shipped = zoo.name_of(path)
        if shipped and self.record:
            whose = "Hub" if ":" in shipped else "zoo"
            raise RecollectError(f"{shipped} is of the {whose}, whose files stay as they are: --record into a copy that you save")
        with terminal.loading(path):
            memory, images = self._loaded(path)
        from recollect.evaluation import keep, mean_predictor, memory_recipe
        from recollect.jobs import Job
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

        if self.jobs.executor == "list":
            words = spelt("evaluate", self, "architectures", "json")
            own = [Job(name, _row, command=(*words, "--architectures", name)) for name in names]
            self.jobs.chosen().run(own, lambda what, amount: None)
        ranks = self._met(path, images, options | {"recipe": dataclasses.asdict(recipe), "architectures": names})
        if self.ddranking:
            return self._ranked(memory, images, recipes, ranks, options)
        baselines, continuous = () if self.no_baselines else self.baselines, images.train.targets is not None
        jobs, sizes = self._jobs(memory, images, recipes, baselines, options)
        if self.full:
            whole = dataclasses.replace(recipe, epochs=self.full)
            jobs.append(_job("all the data", whole, options, "full_data", images, memory.preprocess(images)))
            sizes.append(images.train.images.numel())
        done = self._performed(jobs, images.name, ranks.world)
        rows = list(zip(done, (f"{numbers:,} numbers" for numbers in sizes), strict=True))
        found = [evaluation for evaluation, _ in rows[: len(names)]]
        if continuous and baselines:
            rows.insert(len(names), (mean_predictor(images, self.on), f"{images.classes:,} numbers"))
        if ranks.rank:
            return 0
        if str(self.json) != "-":
            terminal.accuracy_table(f"{images.name}: {terminal.metric(rows)} on the {self.on} set ({found[0].protocol})", rows)
        if self.json:
            write_to(
                self.json, {"memory": path.name, "rows": [evaluation.to_json() | {"size": size} for evaluation, size in rows]}
            )
        else:
            terminal.say(f"kept in {keep(path, rows, _elsewhere(shipped))}")
        if self.record:
            self._record(memory, found, path)
        if _is_of_run(path) and (self.record or not self.json):
            write_report(path.parent)
        return 0

    def _jobs(
        self, memory: "Memory", images: "Images", recipes: "list[Recipe]", baselines: tuple[str, ...], options: dict[str, Any]
    ) -> "tuple[list[Job], list[int]]":
        """One for each row of the table, and the numbers that it has of its data."""
        from recollect.evaluation import examples

        per_class, preprocess = memory.header.budget.get("images_per_class", 1), memory.preprocess(images)
        size = examples(images, per_class) * images.train.images[0].numel()
        jobs = [_job("memory", each, options, "evaluate", memory, images) for each in recipes]
        sizes = [memory.floats] * len(recipes)
        for how in baselines:
            given = images, how, per_class, preprocess
            jobs += [_job(f"{how} real images", each, options, "chosen_real", *given) for each in recipes]
            sizes += [size] * len(recipes)
        return jobs, sizes

    def _performed(self, jobs: "list[Job]", name: str, processes: int) -> "list[Evaluation]":
        """One after another, each with its own progress; or all by an executor."""
        if self.jobs.is_usual or processes > 1:
            done = []
            for number, job in enumerate(jobs, 1):
                with terminal.trainings(f"{job.name.partition(',')[0]} ({number} of {len(jobs)})") as progress:
                    done.append(job(lambda now, _, show=progress: show(now[1]) if show else None))
            return done
        total = sum(job.units for job in jobs)
        with terminal.steps(name, int(total), unit="epoch") as show:
            update = terminal.of_all(show, total) if show else lambda line: None

            def tell(now: "tuple[str, Progress]", _: float) -> None:
                step = now[1].finished * now[1].epochs + now[1].together * now[1].epoch
                update({"job": now[0], "step": step, "loss": now[1].loss, "seconds": 0.0})

            return self.jobs.chosen().run(jobs, tell)

    def _loaded(self, path: Path) -> "tuple[Memory, Images]":
        from recollect.memory import Memory

        if self.seed < 0:
            raise RecollectError(f"seed is {self.seed}: give 0 or more")
        at_least_one(self.networks)
        memory = Memory.load(path)
        return memory, _images_of(memory.header, path, self)

    def _ranked(
        self, memory: "Memory", images: "Images", recipes: "list[Recipe]", ranks: "Ranks", options: dict[str, Any]
    ) -> int:
        from recollect.ddranking import ranked

        if not self.full:
            raise RecollectError("DD-Ranking compares with networks trained on all the data: say for how many epochs (--full)")
        if len(recipes) > 1 or self.record:
            raise RecollectError(
                "DD-Ranking's scores are of one network, and are not recorded: leave out --record, name one network"
            )
        with terminal.trainings("five sets of networks") as progress:
            found = ranked(memory, images, self.full, recipe=recipes[0], progress=progress, **options)
        if ranks.rank:
            return 0
        if str(self.json) != "-":
            terminal.accuracy_table(f"{images.name}: accuracy on the {self.on} set", [(row, "") for row in found.rows])
            terminal.pairs("DD-Ranking, in [0, 1]", [(name, f"{mean:.3f} ± {dev:.3f}") for name, mean, dev in found.scores()])
        if self.json:
            write_to(self.json, found.to_json())
        return 0

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


def _job(name: str, recipe: "Recipe", options: dict[str, Any], how: str, *given: Any) -> "Job":
    """One row, measured by a function of evaluation.py."""
    from recollect.jobs import Job

    called = f"{name}, {recipe.network}, {recipe.epochs} epochs"
    return Job(called, _row, (called, recipe, options, how, given), options["networks"] * recipe.epochs)


def _row(
    called: str, recipe: "Recipe", options: dict[str, Any], how: str, given: tuple[Any, ...], tell: Callable[..., None]
) -> "Evaluation":
    from recollect import evaluation

    return getattr(evaluation, how)(*given, recipe=recipe, progress=lambda now: tell((called, now), 0.0), **options)


def _elsewhere(name: str | None) -> Path | None:
    """Where evaluations of a memory are kept that is not the user's own: runs/zoo/NAME, runs/hub/OWNER/NAME."""
    kind, colon, rest = (name or "").partition(":")
    return Path("runs", kind, rest) if colon else Path("runs", "zoo", name) if name else None


def _is_of_run(memory: Path) -> bool:
    from recollect.runs import Run

    run = Run(memory.parent)
    return memory == run.memory_path and run.is_begun


def _images_of(header: "Header", memory: Path, command: Evaluate):
    """A memory's dataset: as it is given, as the run beside the memory had it, or by the name in the memory's header."""
    from recollect.data import BUNCHES, NAMED
    from recollect.runs import Run

    if command.data:
        return command.load(command.data, header)
    run, name = Run(memory.parent), header.dataset
    known = run.settings["data"] if run.is_begun else {}
    if "name" not in known and name.lower() not in ("digits", *NAMED, *BUNCHES):  # a file from anywhere may name any place
        raise RecollectError(f"{memory} was made of '{name}', which is no official dataset: say where it is (--data)")
    try:
        return loaded({"name": name, **known}, **command.given())
    except RecollectError as error:
        raise RecollectError(f"{memory} was made of '{name}': {error}. Or say where it is (--data)") from None
