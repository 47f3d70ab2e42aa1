"""What each command does: it loads, calls the library, and reports. The commands themselves are dataclasses in cli.py."""

import ast
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from functools import partial, singledispatch
from pathlib import Path
from typing import Any

from recollect import cli
from recollect.config import DistillConfig, Recipe, from_json, to_json
from recollect.continual.config import DATASETS, LEARNERS, STREAMS, ContinualConfig, check_learners
from recollect.errors import RecollectError
from recollect.files import write_json
from recollect.header import read_header
from recollect.show import terminal


@singledispatch
def run(command: object) -> int:
    """Do it; the exit code."""
    raise TypeError(f"no such command: {command!r}")


@run.register
def _distill(command: cli.Distill) -> int:
    from recollect.data import load

    data = _spec(command.images)
    images = load(**_how(data))
    folder = command.out or Path("runs") / f"{images.name}-{command.config.budget.images_per_class}"
    return _run(images, command.config, folder, data, command.quiet, tensorboard=command.tensorboard)


def _run(images, config, folder: Path, data: dict[str, Any], quiet: bool, resume=False, tensorboard=False) -> int:
    from recollect.distillation import Stopped, distill
    from recollect.runs import Run

    done = len(Run(folder).metrics()) if resume else 0
    with (
        _tensorboard(folder, tensorboard) as write,
        terminal.steps(images.name, config.budget.outer_steps, quiet, done) as show,
    ):

        def progress(line: dict[str, Any]) -> None:
            for each in (write, show):
                if each:
                    each(line)

        try:
            say = (lambda line: None) if quiet else partial(print, file=sys.stderr)
            memory = distill(images, config, run=folder, resume=resume, data=data, progress=progress, say=say)
        except Stopped as stopped:
            print(stopped, file=sys.stderr)
            return 128 + stopped.signal
    terminal.say(f"{memory.floats:,} numbers in {Run(folder).memory_path}")
    _report(folder, quiet)
    return 0


def _report(folder: Path, quiet: bool = False) -> None:
    """The run's page, written again from what its folder holds."""
    from recollect.show import report

    written = report.write(folder)
    if not quiet:
        terminal.say(f"report in {written}")


def _tensorboard(folder: Path, wanted: bool):
    """Writes loss, norm and learning rate of each outer step, where that was asked for."""
    from contextlib import contextmanager, nullcontext

    if not wanted:
        return nullcontext(None)
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise RecollectError(
            "--tensorboard needs the package tensorboard: pip install 'recollect[tensorboard]'"
        ) from None

    @contextmanager
    def writing():
        writer = None

        def write(line: dict[str, Any]) -> None:
            nonlocal writer
            if writer is None:  # by now the run has its folder; steps that a kill undid are not shown twice
                writer = SummaryWriter(str(folder / "tensorboard"), purge_step=line["step"])
            for name in ("loss", "norm", "lr", "seconds"):
                if line.get(name) is not None:
                    writer.add_scalar(name, line[name], line["step"])

        try:
            yield write
        finally:
            if writer:
                writer.close()

    return writing()


@run.register
def _resume(command: cli.Resume) -> int:
    from recollect.runs import Run

    begun = Run.open(command.run)
    settings = begun.settings
    if "name" not in settings["data"]:
        raise RecollectError(f"{command.run} was made in Python, with images of its own: go on with it there")
    go_on = {"distill": _resume_distill, "select": _resume_select, "continual": _resume_continual}
    return go_on[begun.kind](command, settings)


def _resume_distill(command: cli.Resume, settings: dict[str, Any]) -> int:
    config, images = _begun(command, settings)
    tensorboard = (command.run / "tensorboard").is_dir()
    return _run(images, config, command.run, settings["data"], command.quiet, resume=True, tensorboard=tensorboard)


def _resume_select(command: cli.Resume, settings: dict[str, Any]) -> int:
    config, images = _begun(command, settings)
    chosen = {name: settings[name] for name in ("field", "values", "networks")}
    return _select_values(images, config, command.run, settings["data"], command.quiet, resume=True, **chosen)


def _begun(command: cli.Resume, settings: dict[str, Any]):
    """The config and the images of a distillation or a selection."""
    from recollect.data import load

    config = from_json(DistillConfig, settings["distill"], command.run)
    if config.inner.network.startswith("custom "):
        raise RecollectError(
            f"{command.run} has a network given in Python ({config.inner.network}): resume it there (resume=True)"
        )
    return config, load(**_how(settings["data"], root=command.root))


@run.register
def _evaluate(command: cli.Evaluate) -> int:
    from recollect.evaluation import across, full_data, memory_recipe, random_real
    from recollect.memory import Memory
    from recollect.nets import constructor

    if command.seed < 0:
        raise RecollectError(f"seed is {command.seed}: give 0 or more")
    path = memory_path(command.memory)
    memory = Memory.load(path)
    images = _images_of(memory.header.dataset, path, command)
    recipe = memory_recipe(memory)
    if command.epochs is not None:
        recipe = dataclasses.replace(recipe, epochs=command.epochs)
    options: dict[str, Any] = dict(networks=command.networks, on=command.on, seed=command.seed, device=command.device)
    names = list(command.architectures) or [recipe.network]
    for name in names:  # all of them before the first hour is spent
        constructor(name)
    found = across(memory, images, names, recipe=recipe, **options)
    rows = [(evaluation, f"{memory.floats:,} numbers") for evaluation in found]
    preprocess = memory.preprocess(images)
    if command.baselines:
        per_class = memory.header.budget.get("images_per_class", 1)
        if type(per_class) is not int or per_class < 1:
            raise RecollectError(f"{path} has a budget of {per_class!r} images per class: add --no-baselines")
        size = f"{per_class * images.classes * images.train.images[0].numel():,} numbers"
        for name in names:
            same = dataclasses.replace(recipe, network=name)
            rows.append((random_real(images, per_class, preprocess, same, **options), size))
    if command.full:
        whole = dataclasses.replace(recipe, epochs=command.full)
        rows.append((full_data(images, preprocess, whole, **options), f"{images.train.images.numel():,} numbers"))
    terminal.accuracy_table(f"{images.name}: accuracy on the {command.on} set ({found[0].protocol})", rows)
    where = command.json or path.parent / "evaluation.json"
    written = [evaluation.to_json() | {"size": size} for evaluation, size in rows]
    write_json(where, {"memory": path.name, "rows": written})
    if command.record:
        memory.with_accuracy(*(evaluation.entry() for evaluation in found)).save(path)
    if _is_of_run(path) and (command.record or not command.json):
        _report(path.parent)
    return 0


def _is_of_run(memory: Path) -> bool:
    from recollect.runs import Run

    run = Run(memory.parent)
    return memory == run.memory_path and run.is_begun


def _images_of(name: str, memory: Path, command: cli.Evaluate):
    """A memory's dataset: as it is given, as the run beside the memory had it, or by the name in the memory's header."""
    from recollect.data import load
    from recollect.runs import Run

    if command.data:
        return load(command.data, root=command.root, size=command.size)
    beside = Run(memory.parent)
    known = beside.settings["data"] if beside.is_begun else {}
    try:
        return load(**_how({"name": name, **known}, root=command.root, size=command.size))
    except RecollectError as error:
        raise RecollectError(f"{memory} was made of '{name}': {error}. Or say where it is (--data)") from None


@run.register
def _select(command: cli.Select) -> int:
    from recollect.data import load

    data = _spec(command.images)
    images = load(**_how(data))
    folder = command.out or Path("runs") / f"select-{images.name}-{command.field}"
    values = [_parsed(command.config, command.field, text) for text in command.values]
    _at_least_one(command.networks)
    chosen = {"field": command.field, "values": values, "networks": command.networks}
    return _select_values(images, command.config, folder, data, command.quiet, **chosen)


def _select_values(images, config, folder: Path, data, quiet: bool, field, values, networks, resume=False) -> int:
    from recollect.distillation import Stopped
    from recollect.selection import select
    from recollect.show import figures

    with terminal.steps(images.name, config.budget.outer_steps, quiet) as show:
        try:
            chosen = {"field": field, "values": values, "networks": networks}
            selection = select(images, config, run=folder, resume=resume, data=data, progress=show, **chosen)
        except Stopped as stopped:
            print(f"stopped: continue with recollect resume {folder}", file=sys.stderr)
            return 128 + stopped.signal
    rows = [(evaluation, "") for evaluation in selection.evaluations]
    terminal.accuracy_table(f"{images.name}: accuracy on the validation split ({networks} networks each)", rows)
    figures.save(figures.selection_figure(selection), folder / "select.png")
    terminal.say(f"best {field}: {selection.best}\ncurve  {folder / 'select.png'}")
    return 0


def _parsed(config: DistillConfig, field: str, text: str) -> Any:
    """A setting's value from the command line: a number, True, False or None where the setting takes one, else a word."""
    settings = to_json(config)
    if field not in settings:
        return text  # select() names the nearest setting
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    return getattr(from_json(DistillConfig, settings | {field: value}, "--values"), field)


def _at_least_one(networks: int) -> None:
    if networks < 1:
        raise RecollectError(f"number of networks is {networks}: give 1 or more (--networks)")


@run.register
def _recall(command: cli.Recall) -> int:
    from recollect.export import export
    from recollect.memory import Memory

    memory = Memory.load(memory_path(command.memory))
    export(memory, list(command.classes) or None, command.out, command.format)
    terminal.say(str(command.out))
    return 0


@run.register
def _compose(command: cli.Compose) -> int:
    from recollect.composition import compose
    from recollect.data import load
    from recollect.memory import Memory

    if not command.memories:
        raise RecollectError("no memory named: recollect compose a.safetensors:cat,dog b.safetensors:truck")
    chosen = _chosen(command.memories)
    first = chosen[0] if isinstance(chosen[0], Memory) else chosen[0].memory
    _can_be_used(first.image_shape, command)
    tests = [load(name, root=command.root, size=command.size) for name in command.test]
    composition = compose(chosen, tests)
    tested = composition.split(*tests, on=command.on) if tests else None
    classifier = _trained(composition, command)
    if tested is not None:
        _confusion(classifier.class_names, classifier.confusion(tested).tolist(), command.on)
    _used(classifier, command)
    return 0


@run.register
def _ask(command: cli.Ask) -> int:
    from recollect.composition import ask, folders
    from recollect.data import load
    from recollect.memory import Memory

    groups = folders(command.pictures)
    memory = Memory.load(memory_path(command.memory))
    _can_be_used(memory.image_shape, command)
    images = load(command.data, root=command.root, size=command.size) if command.data else None
    composition = ask(memory, groups, images)
    _used(_trained(composition, command), command)
    return 0


def _can_be_used(image_shape: tuple[int, int, int], command: cli.Training) -> None:
    """Refuse what cannot be written or read, before a classifier is trained."""
    from recollect.composition import read_picture

    if command.save and command.save.exists():
        raise RecollectError(f"{command.save} already exists: give another name (--save)")
    for picture in command.classify:
        read_picture(picture, image_shape)


def _trained(composition, command: cli.Training):
    """A classifier trained on a composition, by the recipe of its memory and what the command changes of it."""
    given = {field.name: getattr(command, field.name) for field in dataclasses.fields(Recipe)}
    recipe = dataclasses.replace(composition.recipe, **{name: v for name, v in given.items() if v is not None})
    with terminal.steps("classifier", recipe.epochs, command.quiet) as show:
        classifier = composition.train(recipe, command.seed, command.device, _epochs(show) if show else None)
    where = f" ({composition.notice})" if composition.notice else ""
    terminal.say(f"{recipe.network} trained on {len(composition.labels):,} recalled images{where}")
    return classifier


def _used(classifier, command: cli.Training) -> None:
    if command.save:
        classifier.save(command.save)
        terminal.say(f"classifier  {command.save}")
    if command.classify:
        _answers(classifier, command.classify)


def _answers(classifier, pictures: Sequence[Path]) -> None:
    for picture, answer in zip(pictures, classifier.classify(pictures), strict=True):
        notice = f"  [{answer.notice}]" if answer.notice else ""
        terminal.say(f"{picture}: {answer.class_name}, {100 * answer.probability:.1f} %{notice}")


@run.register
def _classify(command: cli.Classify) -> int:
    from recollect.composition import Classifier

    if not command.pictures:
        raise RecollectError("no pictures named: recollect classify CLASSIFIER picture.png ...")
    _answers(Classifier.load(command.classifier), command.pictures)
    return 0


def _chosen(texts: Sequence[str]):
    """What each PATH or PATH:class,class stands for. A path may hold a colon, and the name of a class a comma."""
    from recollect.memory import Memory

    loaded: dict[Path, Memory] = {}
    chosen = []
    for text in texts:
        ends = [len(text), *(place for place in range(len(text) - 1, 0, -1) if text[place] == ":")]
        end = next((end for end in ends if Path(text[:end]).exists()), ends[-1])
        path, names = memory_path(Path(text[:end])), text[end + 1 :]
        if path.resolve() not in loaded:
            loaded[path.resolve()] = Memory.load(path)
        memory = loaded[path.resolve()]
        if end == len(text):
            chosen.append(memory)
        else:
            chosen.append(memory[names if names in memory.class_names else names.split(",")])
    return chosen


def _epochs(show):
    """Epochs of a training, shown as outer steps are."""
    began = time.perf_counter()

    def progress(line: dict[str, Any]) -> None:
        seconds = (time.perf_counter() - began) / line["epoch"]
        show({"step": line["epoch"], "loss": line["loss"], "seconds": seconds})

    return progress


def _confusion(names: Sequence[str], counts: list[list[int]], on: str) -> None:
    """Accuracy, and how often each class was taken for each; of many classes only the most frequent mistakes."""
    from rich.table import Table

    total, right = sum(map(sum, counts)), sum(counts[i][i] for i in range(len(names)))
    table = Table()
    if len(names) <= 10:
        table.add_column("true class \\ answer", overflow="fold")
        for name in names:
            table.add_column(name, justify="right", overflow="fold")
        for name, row in zip(names, counts, strict=True):
            table.add_row(name, *map(str, row))
    else:
        for heading in ("true class", "answer", "images"):
            table.add_column(heading, overflow="fold")
        mistakes = [(counts[i][j], names[i], names[j]) for i in range(len(names)) for j in range(len(names)) if i != j]
        for count, truth, answer in sorted(mistakes, key=lambda mistake: -mistake[0])[:10]:
            table.add_row(truth, answer, str(count))
    terminal.say(f"accuracy {100 * right / total:.1f} % of {total:,} images of the {on} split")
    terminal.say(table)


@run.register
def _plot(command: cli.Plot) -> int:
    from recollect.show import figures

    figures.kind_of(command.out)
    figures.save(figures.draw(command.figure, command.paths, command.classes), command.out)
    terminal.say(str(command.out))
    return 0


@run.register
def _info(command: cli.Info) -> int:
    path = memory_path(command.memory)
    header, tensors = read_header(path)
    bases, addressing = tensors["bases"], tensors["addressing"]
    made, budget = dict(header.made), header.budget
    numbers = sum(math.prod(info.shape) for name, info in tensors.items() if name.startswith("encoder."))
    config = made.pop("config", {})
    if isinstance(made.get("start"), dict):
        made["start"] = f"a memory of {made['start'].get('steps', '?')} steps"
    rows = [
        ("dataset", header.dataset),
        ("classes", _class_names(header.class_names)),
        ("image", "x".join(map(str, header.image_shape))),
        ("bases", f"{list(bases.shape)} {bases.dtype}"),
        ("addressing", f"{list(addressing.shape)} {addressing.dtype}, {header.addressing}"),
        ("recalls", f"{addressing.shape[0]} images a {header.asked.unit}"),
        *(
            [("asked with", f"{_listed(header.query)}; encoder of {numbers:,} numbers beside the budget")]
            if header.query
            else []
        ),
        ("budget", f"{budget.get('name', '?')}: {budget.get('used', '?')} of {budget.get('numbers', '?')} numbers"),
        ("file", f"{path.stat().st_size:,} bytes, format {header.format}"),
        ("preprocessing", _listed(header.preprocessing)),
        ("train with", _listed(header.recipe)),
        ("made by", _listed(made)),
        ("config", _listed(config)),
        *(("accuracy", _listed(entry)) for entry in header.accuracy),
    ]
    terminal.pairs(str(path), rows)
    return 0


def _class_names(names: Sequence[str]) -> str:
    return f"{len(names)}: {', '.join(names[:20])}{' ...' * (len(names) > 20)}"


def _listed(value: Any) -> str:
    """A header's value in words; four digits of a number are enough here."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_listed(each)}" for name, each in value.items())
    if isinstance(value, list):
        return " ".join(map(_listed, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@run.register
def _data(command: cli.DataTop) -> int:
    return run(command.command)


@run.register
def _get(command: cli.DataGet) -> int:
    from recollect.data.fetch import get

    if not command.names:
        raise RecollectError("no dataset named: recollect data get mnist")
    for name in command.names:
        terminal.say(str(get(name, root=command.root, base_url=command.mirror, progress=not command.quiet)))
    return 0


@run.register
def _show(command: cli.DataShow) -> int:
    from recollect.data import load

    data = _spec(command.images)
    images = load(**_how(data))
    rows = [
        ("image", "x".join(map(str, images.shape))),
        ("classes", _class_names(images.class_names)),
        ("train, validation, test", ", ".join(f"{len(s):,}" for s in (images.train, images.validation, images.test))),
    ]
    terminal.pairs(images.name, rows)
    return 0


@run.register
def _continual(command: cli.Continual) -> int:
    data = _spec(cli.Data(command.data or DATASETS[command.stream], command.root, command.size))
    ours = ("compress", "gdumb") if command.stream.endswith("-60k") else LEARNERS
    how = {"seeds": command.seeds, "learners": list(command.learners or ours), "device": command.device}
    how |= {"workers": command.workers, "together": command.together}
    folder = command.out or Path("runs") / f"continual-{command.stream}"
    return _run_continual(command.stream, command.config, data, how, folder, command.quiet)


def _resume_continual(command: cli.Resume, settings: dict[str, Any]) -> int:
    data = settings["data"] | ({"root": str(command.root)} if command.root else {})
    config = from_json(ContinualConfig, settings["config"], command.run)
    return _run_continual(settings["stream"], config, data, settings["how"], command.run, command.quiet)


def _run_continual(stream: str, config: ContinualConfig, data, how: dict[str, Any], folder: Path, quiet: bool) -> int:
    check_learners(how["learners"])
    if stream in STREAMS and config.stream.kind != STREAMS[stream].stream.kind:
        raise RecollectError(
            f"kind is {config.stream.kind}, but {stream} is a stream of {STREAMS[stream].stream.kind}: name another stream"
        )
    from recollect.continual.run import run as run_stream
    from recollect.data import load
    from recollect.show import streams as show

    images = load(**_how(data))
    try:
        with show.progress(stream, quiet) as progress:
            results = run_stream(images, config, out=folder, name=stream, data=data, progress=progress, **how)
    except KeyboardInterrupt:
        print(f"stopped: continue with recollect resume {folder}", file=sys.stderr)
        return 130
    show.finish(results, stream, folder)
    terminal.say(f"{stream} of {images.name}: accuracy on the {config.stream.on} images, mean ± deviation over n seeds")
    terminal.say(show.table(results, stream, "mask" if config.stream.kind == "split" else "no"))
    terminal.say(f"results  {folder / 'table.json'}: these and forgetting, with deviations")
    terminal.say(f"figures  {folder / 'curve.png'}, {folder / 'matrix-LEARNER.png'}")
    return 0


@run.register
def _demo(command: cli.Demo) -> int:
    _at_least_one(command.networks)
    from recollect.demo import demo
    from recollect.distillation import Stopped
    from recollect.runs import Run

    folder = command.out or _free(Path("runs") / "demo")
    Run(folder).refuse_if_used()
    try:
        demo(folder, command.networks, command.quiet)
    except Stopped as stopped:
        print("stopped: start the demo again", file=sys.stderr)
        return 128 + stopped.signal
    return 0


def _free(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3, ... that is not there yet."""
    number, candidate = 1, folder
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


@run.register
def _studio(command: cli.Studio) -> int:
    try:
        from recollect.studio.app import serve
    except ImportError as error:
        raise RecollectError(f"the studio needs {error.name}: pip install 'recollect[studio]'") from None
    from recollect.data import load

    memories = [memory_path(path) for path in command.memories]
    data = [load(name, root=command.root, size=command.size) for name in command.data]
    serve(memories, data, command.host, command.port)
    return 0


@run.register
def _bench(command: cli.Bench) -> int:
    from recollect.bench import bench

    path = command.json
    bench(command.what, command.profile, lambda figures: write_json(path, figures) if path else None)
    return 0


def memory_path(path: Path) -> Path:
    """A memory file, given as itself or as the folder of its run."""
    return path / "memory.safetensors" if path.is_dir() else path


def _spec(data: cli.Data) -> dict[str, Any]:
    """How to load the images again: what a run's config.json keeps."""
    name = data.data
    if Path(name).exists():
        name = str(Path(name).resolve())
    root = str(data.root.resolve()) if data.root else None
    return {"name": name, "root": root, "size": data.size, "classes": list(data.classes)}


def _how(data: dict[str, Any], **instead: Any) -> dict[str, Any]:
    """The arguments of `load` for what `_spec` wrote, with what is given instead."""
    known = {name: data.get(name) for name in ("root", "size", "classes")}
    known |= {name: value for name, value in instead.items() if value is not None}
    return {"name_or_path": data["name"], **known, "classes": known["classes"] or ()}
