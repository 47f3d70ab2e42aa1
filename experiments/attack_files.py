"""What the attack damages, and what reads it: whole files of every kind, made once, and hurt anew for each case.

A Kind makes the files of a case, and reads them as the library and its commands do. Reading may end well, or in a RecollectError;
an assertion here fails where damage came through as if it were none.
"""

import contextlib
import hashlib
import io
import json
import math
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from attack_damage import (
    NETWORKS,
    SNIPPETS,
    TEXTS,
    Files,
    Kind,
    Tensors,
    dumped,
    hurt,
    json_file,
    program,
    safetensors_bytes,
    twisted,
)  # fmt: skip
from attack_readers import CLASSES, READERS, toy_arrays
from PIL import Image

from recollect import Classifier, Memory, Network, Recipe, compose, data, distill, outer, preset
from recollect.cli import main
from recollect.config import changed
from recollect.continual.compress import Compressor
from recollect.continual.config import STREAMS
from recollect.continual.run import run as run_stream
from recollect.continual.streams import Stream
from recollect.data.images import Images
from recollect.data.preprocess import Preprocess, Zca
from recollect.decisions import resolve
from recollect.distiller import Distiller
from recollect.errors import RecollectError
from recollect.experts import train_experts
from recollect.export import export
from recollect.header import Header, read_header
from recollect.queries import Labels, Pictures
from recollect.runs import MARK, Run, load_checkpoint, restoring
from recollect.selection import select
from recollect.show import figures, report, sources
from recollect.studio import shelf
from recollect.training import Cancelled

# --- whole files -------------------------------------------------------------------------------------------------------


SMALL = dict(network="mlp:width=4", bases=2, downsample=1, inner_steps=2, window=2, outer_steps=3, real_per_class=4)
CONFIG = preset("fast", checkpoint_seconds=0, **SMALL)
STREAM = changed(
    STREAMS["rotations"], tasks=2, per_task=20, buffer=9, network="mlp:width=4", bases=2, inner_steps=2, outer_per_batch=1,
    replay=4, glances=1,
)  # fmt: skip


def memory_tensors(seed: int = 0, one_hot: bool = False) -> tuple[Tensors, dict[str, Any]]:
    """A memory's tensors, and its header."""
    rng = np.random.default_rng(seed)
    header = json.loads(
        Header(
            "toy",
            list(CLASSES),
            [1, 8, 8],
            2,
            "one-hot" if one_hot else "learned",
            preprocessing=Preprocess((0.5,), (0.25,)).to_json(),
            budget={"name": "1 image per class", "images_per_class": 1, "numbers": 192, "used": 100},
            recipe={"network": "mlp:width=4", "epochs": 2, "batch": 8, "lr": 0.01, "momentum": 0.9, "augment": "none"},
            made={"config": {"seed": 0, "images_per_class": 1}, "steps": 3, "torch": "2.11"},
            accuracy=[{"network": "mlp", "mean": 50.0, "deviation": 1.0, "n": 2, "on": "test", "protocol": "x"}],
        ).to_json()
    )
    bases = rng.standard_normal((6, 1, 4, 4), "f4")
    addressing = rng.standard_normal((2, 3, 6), "f4")
    if one_hot:
        from recollect.memory import one_hot_addressing

        return {
            "bases": ("F32", [6, 1, 4, 4], bases.tobytes()),
            "addressing": ("U8", [2, 3, 6], one_hot_addressing(3, 2).numpy().tobytes()),
        }, header
    return {"bases": ("F32", [6, 1, 4, 4], bases.tobytes()), "addressing": ("F32", [2, 3, 6], addressing.tobytes())}, header


def asked_tensors() -> tuple[Tensors, dict[str, Any]]:
    """The same of a memory that is asked with pictures."""
    tensors, header = memory_tensors()
    header["query"] = {"encoder": "mlp:width=2", "size": 3, "ways": 2, "shots": 1, "form": "unit"}
    for name, p in Network("mlp:width=2", (1, 8, 8), 3).fresh(0).items():
        tensors[f"encoder.{name}"] = "F32", list(p.shape), p.numpy().tobytes()
    return tensors, header


def sealed(tensors: Tensors, header: dict[str, Any]) -> dict[str, Any]:
    """The header with the checksum of these tensors."""
    names = ["bases", "addressing", *sorted(name for name in tensors if name.startswith("encoder."))]
    digest = hashlib.sha256(b"".join(tensors[name][2] for name in names if name in tensors))
    return header | {"checksum": digest.hexdigest()}


@dataclass(frozen=True)
class Whole:
    """Everything whole, made once in a folder."""

    folder: Path
    images: Images
    distiller: Distiller
    stream: Stream

    def files(self, run: str) -> Files:
        folder = self.folder / run
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


_whole: list[Whole] = []


def whole() -> Whole:
    return _whole[0]


def prepare(folder: Path) -> None:
    """Make them; takes seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    shelf.OWN = folder / "none"  # not the project's memories
    np.savez(folder / "toy.npz", **toy_arrays())
    images = data.load(folder / "toy.npz")
    told = {"name": str(folder / "toy.npz"), "root": None, "size": None, "classes": []}
    distill(images, CONFIG, run=folder / "distill", data=told)
    select(images, changed(CONFIG, bases=None), "inner_lr", [0.01, 0.02], run=folder / "select", networks=1, data=told)
    run_stream(images, STREAM, out=folder / "continual", name="rotations", seeds=1, data=told)
    train_experts(images, folder / "experts", Recipe("mlp:width=4", epochs=2, batch=8), count=1)
    composition = compose([Memory.load(folder / "distill" / "memory.safetensors")])
    composition.train(Recipe("mlp:width=2", epochs=1)).save(folder / "classifier.safetensors")
    (folder / "distill" / "evaluation.json").write_text(
        json.dumps({"memory": "memory.safetensors", "rows": [_row("memory"), _row("random real images")]})
    )
    config = resolve(CONFIG, images)
    network = Network(config.inner.network, images.shape, images.classes)
    distiller = Distiller(images, config, Preprocess.fit(images.train.images), network)
    _whole[:] = [Whole(folder, images, distiller, Stream(images, STREAM))]


def _row(name: str) -> dict[str, Any]:
    row = {"name": name, "network": "mlp:width=4", "values": [50.0, 60.0], "on": "test", "protocol": "2 networks", "seconds": 1.0}
    return row | {"mean": 55.0, "deviation": 7.07, "n": 2, "size": "8 numbers"}


# --- memories, classifiers, whitening --------------------------------------------------------------------------------------


def special(rng: Random, tensors: Tensors) -> Tensors:
    """With a number that is none, or another type or shape."""
    tensors = dict(tensors)
    name = rng.choice(list(tensors))
    kind, shape, raw = tensors[name]
    match rng.randrange(5):
        case 0:
            at = rng.randrange(len(raw))
            raw = (raw[:at] + rng.choice((b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f")) + raw[at:])[: len(raw)]
        case 1:
            kind = rng.choice(("F16", "BF16", "F64", "U8", "I64", "BOOL", "F8_E4M3", "C64", "F4", "X"))
        case 2:
            shape = rng.choice(
                ([*shape, 1], shape[1:], shape[::-1], [math.prod(shape)], [0, *shape], [2**40, *shape], [1, *shape])
            )
        case 3:
            tensors.pop(name)
            return tensors
        case 4:
            shape, raw = [*shape[:-1], shape[-1] + 1], raw + bytes(4 * math.prod(shape[:-1]))
    return tensors | {name: (kind, shape, raw)}


def coherent(rng: Random) -> tuple[Tensors, dict[str, Any]]:
    """A memory whose tensors and header agree, on sizes that nobody means."""
    one_hot, sides = rng.random() < 0.3, (1, 2, 3, 8, 64, 1024, 65536)
    _, header = memory_tensors()
    channels, height, width, down = rng.choice((1, 2, 3, 200)), rng.choice(sides), rng.choice(sides), rng.choice(sides)
    classes, r, k = rng.choice((1, 2, 3, 100, 5000)), rng.choice((1, 2, 50)), rng.choice((1, 2, 20))
    k = classes * r if one_hot else k
    base = [channels, -(-height // down), -(-width // down)]
    if k * math.prod(base) > 100_000 or r * classes * k > 200_000:
        return memory_tensors(one_hot=True)
    header |= {"image_shape": [channels, height, width], "downsample": down, "class_names": [f"c{i}" for i in range(classes)]}
    header["preprocessing"] = {"mean": [0.5] * channels, "std": [0.25] * channels, "zca": None}
    header["addressing"] = "one-hot" if one_hot else "learned"
    header["recipe"] = header["recipe"] | {"network": rng.choice(NETWORKS)}
    if one_hot:
        from recollect.memory import one_hot_addressing

        addressing = "U8", [r, classes, k], one_hot_addressing(classes, r).numpy().tobytes()
    else:
        addressing = "F32", [r, classes, k], bytes(4 * r * classes * k)
    return {"bases": ("F32", [k, *base], bytes(4 * k * math.prod(base))), "addressing": addressing}, header


@cache
def whole_memory(which: int) -> tuple[Tensors, dict[str, Any], bytes]:
    tensors, header = (memory_tensors(), memory_tensors(one_hot=True), asked_tensors())[which]
    return tensors, header, safetensors_bytes(tensors, {"recollect": dumped(sealed(tensors, header))})


def damaged_memory(rng: Random) -> Files:
    tensors, header, data = whole_memory(rng.randrange(3))
    choice = rng.random()
    if choice < 0.25:
        return {"m.safetensors": hurt(rng, data)}
    if choice < 0.4:
        return {"m.safetensors": safetensors_bytes(tensors, {"recollect": dumped(sealed(tensors, header))}, rng)}
    if choice < 0.5:
        tensors = special(rng, tensors)
    elif choice < 0.6:
        tensors, header = coherent(rng)
    if choice >= 0.6 or rng.random() < 0.2:
        header = twisted(rng, header)
    header = sealed(tensors, header) if isinstance(header, dict) else header
    return {"m.safetensors": safetensors_bytes(tensors, {"recollect": dumped(header)})}


def read_memory(folder: Path, rng: Random) -> None:
    path = folder / "m.safetensors"
    with contextlib.suppress(RecollectError):  # what says what it is, says it of a damaged one too
        if rng.random() < 0.15:
            assert not steers(shown("info", path)), "info steers the terminal"
        read_header(path)
    memory = Memory.load(path)
    assert memory.bases.isfinite().all()
    each_of(rng, uses(memory, path, folder))


def uses(memory: Memory, path: Path, folder: Path) -> list[Callable[[], object]]:
    """All that is done with a memory, each by itself."""
    out = folder / "out"

    def recall() -> None:
        images, labels = memory.recall()
        assert images.shape == (len(memory.class_names) * len(memory.addressing), *memory.image_shape)
        assert len(labels) == len(images)

    def save() -> None:
        memory.save(out / "m.safetensors")
        again = Memory.load(out / "m.safetensors")
        assert torch.equal(again.bases, memory.bases)

    def ask() -> None:
        memory.encode(memory.preprocess()(torch.zeros(1, *memory.image_shape, dtype=torch.uint8)))

    def train() -> None:
        with contextlib.suppress(Cancelled):
            compose([memory]).train(cancelled=lambda: True)

    def serve() -> None:
        (entry,) = shelf.stock([path], [whole().images]).entries
        json.dumps(entry.to_json())
        entry.pictures()
        entry.recall([0.5] * len(memory.bases))

    can_recall = [recall, train, *(partial(export, memory, None, out / kind, kind) for kind in ("npz", "png", "sheet", "pt"))]
    return [
        save,
        lambda: sources.read(path),
        serve,
        *(can_recall if isinstance(memory.asked, Labels) else [recall] if not isinstance(memory.asked, Pictures) else [ask]),
    ]


def each_of(rng: Random, calls: Sequence[Callable[[], object]]) -> None:
    """Some of them; each may refuse."""
    for call in rng.sample(list(calls), min(2, len(calls))):
        with contextlib.suppress(RecollectError):
            call()


def shown(*words: object) -> str:
    """What a command prints; it ends by itself, with an exit code of ours."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code
    assert code in (0, 2), f"exit code {code}"
    assert "Traceback" not in err.getvalue()
    return out.getvalue() + err.getvalue()


def steers(text: str) -> bool:
    return not all(character.isprintable() or character == "\n" for character in text)


def draw_memory(folder: Path, rng: Random) -> None:
    path = folder / "m.safetensors"
    Memory.load(path)
    figure = figures.draw(rng.choice(("memory", "bases", "recalled", "similarity", "architectures", "budget")), [path])
    figures.save(figure, folder / "out.png")


def drawn_memory(rng: Random) -> Files:
    """One that can be read, and is called anything."""
    tensors, header = memory_tensors(one_hot=rng.random() < 0.5)
    words = [*TEXTS, "$x$", "$", "$\\", "a_b^c", "_" * 300, "\n" * 50, "\t", "漢字" * 40, "\U0001f600"]
    header["class_names"] = rng.sample(words, 3)
    header["dataset"] = rng.choice(words)
    header["accuracy"] = [header["accuracy"][0] | {"network": rng.choice(words), "mean": rng.choice((0, 100, 1e99, -5, 5e-324))}]
    return {"m.safetensors": safetensors_bytes(tensors, {"recollect": dumped(sealed(tensors, header))})}


@cache
def whole_classifier() -> tuple[Tensors, dict[str, Any], bytes]:
    from safetensors import safe_open

    path = whole().folder / "classifier.safetensors"
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["recollect-classifier"])
        tensors = {n: ("F32", list((t := file.get_tensor(n)).shape), t.numpy().tobytes()) for n in file.keys()}  # noqa: SIM118
    return tensors, header, path.read_bytes()


def damaged_classifier(rng: Random) -> Files:
    tensors, header, data = whole_classifier()
    choice = rng.random()
    if choice < 0.25:
        return {"c.safetensors": hurt(rng, data)}
    if choice < 0.4:
        return {"c.safetensors": safetensors_bytes(tensors, {"recollect-classifier": dumped(header)}, rng)}
    if choice < 0.5:
        tensors = special(rng, tensors)
    header = twisted(rng, header)
    if isinstance(header, dict) and rng.random() < 0.9:
        header["checksum"] = hashlib.sha256(b"".join(tensors[name][2] for name in sorted(tensors))).hexdigest()
    return {"c.safetensors": safetensors_bytes(tensors, {"recollect-classifier": dumped(header)})}


def read_classifier(folder: Path, rng: Random) -> None:
    classifier = Classifier.load(folder / "c.safetensors")
    found = classifier.probabilities(torch.zeros(2, *classifier.image_shape, dtype=torch.uint8))
    assert found.shape == (2, len(classifier.class_names))
    with contextlib.suppress(RecollectError):
        classifier.classify(Image.new("RGB", (5, 5)))
    classifier.save(folder / "out.safetensors")


@cache
def whole_zca() -> Zca:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.eye(64) + 0.05 * torch.randn(64, 64, generator=generator)
    return Zca(torch.randn(64, generator=generator), (matrix + matrix.T) / 2)


def damaged_zca(rng: Random) -> Files:
    """A whitening file, of which the name may tell its content."""
    zca = whole_zca()
    tensors: Tensors = {
        "matrix": ("F32", [64, 64], zca.matrix.numpy().tobytes()),
        "mean": ("F32", [64], zca.mean.numpy().tobytes()),
    }
    choice = rng.random()
    if choice < 0.4:
        data = hurt(rng, zca.file_bytes())
    elif choice < 0.7:
        data = safetensors_bytes(special(rng, tensors), {})
    elif choice < 0.8:
        data = safetensors_bytes(tensors | {"matrix": ("F32", [64, 64], bytes(4 * 64 * 64))}, {})
    else:
        data = safetensors_bytes(tensors, {}, rng)
    fits = f"zca-{hashlib.sha256(data).hexdigest()[:16]}.safetensors"
    name = fits if rng.random() < 0.8 else zca.file_name
    inside, header = memory_tensors()
    header["preprocessing"] = {"mean": [0.5], "std": [0.25], "zca": {"file": name, "epsilon": 0.1}}
    memory = safetensors_bytes(inside, {"recollect": dumped(sealed(inside, header))})
    return {name: data, "m.safetensors": memory}


def read_zca(folder: Path, rng: Random) -> None:
    memory = Memory.load(folder / "m.safetensors")
    preprocess = memory.preprocess()
    preprocess.undo(memory.recall()[0])
    memory.save(folder / "out" / "m.safetensors")


# --- runs --------------------------------------------------------------------------------------------------------------


def same(one: object, other: object) -> bool:
    """Whether two states are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


PARTS: dict[str, type] = {"config": dict, "data": str, "preprocessing": dict, "state": dict}


@cache
def whole_checkpoint() -> tuple[bytes, dict[str, Any]]:
    path = whole().folder / "distill" / "checkpoint.pt"
    found = load_checkpoint(path, **PARTS)
    assert found
    return path.read_bytes(), found


def damaged_checkpoint(rng: Random) -> Files:
    """Damaged bytes, in today's form or in 0.1's, which had no line with a checksum."""
    data, _ = whole_checkpoint()
    files = {"checkpoint.pt": hurt(rng, data if rng.random() < 0.5 else data.partition(b"\n")[2])}
    return files | ({"checkpoint.previous.pt": hurt(rng, data)} if rng.random() < 0.3 else {})


def read_checkpoint(folder: Path, rng: Random) -> None:
    found = load_checkpoint(folder / "checkpoint.pt", **PARTS)
    assert same(found, whole_checkpoint()[1]), "a damaged checkpoint came through"


def forged_checkpoint(rng: Random) -> Files:
    """A right checksum over a state that nobody wrote."""
    _, found = whole_checkpoint()
    buffer = io.BytesIO()
    torch.save(twisted_state(rng, found), buffer)
    return {"checkpoint.pt": MARK + hashlib.sha256(buffer.getvalue()).hexdigest().encode() + b"\n" + buffer.getvalue()}


def forged_pickle(rng: Random) -> Files:
    """A right checksum over a program that nobody wrote."""
    data, _ = whole_checkpoint()
    inside, buffer = zipfile.ZipFile(io.BytesIO(data.partition(b"\n")[2])), io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in inside.namelist():
            raw = inside.read(name)
            archive.writestr(name, program(rng, raw, SNIPPETS) if name.endswith("data.pkl") else raw)
    return {"checkpoint.pt": MARK + hashlib.sha256(buffer.getvalue()).hexdigest().encode() + b"\n" + buffer.getvalue()}


def twisted_state(rng: Random, value: Any) -> Any:
    """As for JSON; tensors become others."""

    def other(tensor: torch.Tensor) -> Any:
        if rng.random() < 0.8:
            return tensor
        odd = [tensor[None], tensor.double(), tensor * math.nan, tensor.flatten()[:1], tensor.to(torch.int8), tensor.tolist()]
        odd += [torch.zeros(0), torch.zeros(1).expand(2**20), tensor.to_sparse() if tensor.ndim else tensor, tensor.bool()]
        return rng.choice(odd)

    def through(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return other(value)
        if isinstance(value, dict):
            return {key: through(each) for key, each in value.items()}
        return [through(each) for each in value] if isinstance(value, list) else value

    return through(twisted(rng, value) if rng.random() < 0.7 else value)


def read_forged(folder: Path, rng: Random) -> None:
    path, distiller = folder / "checkpoint.pt", whole().distiller
    saved = load_checkpoint(path, **PARTS)
    assert saved is not None
    state = distiller.begin()
    with restoring(path):
        outer.check_numbers(saved["state"])
        distiller.load(state, saved["state"])
    Preprocess.from_json(saved["preprocessing"], folder, whole().images.train.images)
    distiller.step(state)


@cache
def whole_compressor() -> dict[str, Any]:
    compressor = Compressor(whole().stream, STREAM, (0,))
    for batches in zip(whole().stream.task(0), strict=True):
        compressor.observe(batches)
        break
    return compressor.to_dict()


def forged_tasks(rng: Random) -> Files:
    buffer = io.BytesIO()
    torch.save(twisted_state(rng, whole_compressor()), buffer)
    return {"tasks.pt": MARK + hashlib.sha256(buffer.getvalue()).hexdigest().encode() + b"\n" + buffer.getvalue()}


def read_tasks(folder: Path, rng: Random) -> None:
    compressor = Compressor(whole().stream, STREAM, (0,))
    saved = load_checkpoint(folder / "tasks.pt", tasks=list)
    if not saved or tuple(saved["tasks"]) != (0,) or "states" not in saved:
        return
    with restoring(folder / "tasks.pt"):
        compressor.load(saved)
    stream = whole().stream.task(0)
    stream.skip(compressor.seen)
    for batches in zip(stream, strict=True):
        compressor.observe(batches)
    compressor.memories()


class Enough(BaseException):
    """The attack has seen what it wanted."""


@contextlib.contextmanager
def cut_short():
    """Runs that are asked for are taken as far as their first outer step."""
    from recollect import distillation
    from recollect.continual import run as streams
    from recollect.jobs import Inline

    def enough(*_: object, **__: object) -> Any:
        raise Enough

    def step(self: Distiller, *given: Any) -> Any:
        inner, budget = self.config.inner, self.config.budget
        if (
            max(inner.steps, inner.networks_per_step * inner.steps, budget.real_per_class // 20) <= 50
            and "width=4" in inner.network
        ):
            real(self, *given)
        raise Enough

    real, seams = Distiller.step, [(Distiller, "step", step), (Distiller, "teach", enough), (Compressor, "observe", enough)]
    seams += [(distillation, "afford", lambda config, *_: config), (streams, "Processes", lambda _: Inline())]
    seams += [(streams, "taught", enough)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in seams]
    try:
        for owner, name, value in seams:
            setattr(owner, name, value)
        yield
    except Enough:
        pass
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def damaged_run(run: str) -> Callable[[Random], Files]:
    """A run's folder, one of its JSON files damaged."""

    def make(rng: Random) -> Files:
        files = {name: data for name, data in whole().files(run).items() if not name.endswith((".png", ".html"))}
        texts = [name for name in files if name.endswith((".json", ".jsonl"))]
        name = "config.json" if rng.random() < 0.5 else rng.choice(texts)
        if name.endswith(".jsonl"):
            lines = files[name].splitlines()
            at = rng.randrange(len(lines))
            lines[at] = json_file(rng, json.loads(lines[at]))
            files[name] = b"\n".join(lines) + b"\n"
        else:
            files[name] = json_file(rng, json.loads(files[name]))
        if rng.random() < 0.5:
            files = {name: data for name, data in files.items() if not name.endswith((".pt", ".safetensors"))}
        return files

    return make


def read_run(folder: Path, rng: Random) -> None:
    def resume() -> None:
        with cut_short():
            assert not steers(shown("resume", folder, "--quiet")), "resume steers the terminal"

    def look() -> None:
        run = Run.open(folder)
        _ = run.settings
        run.metrics()
        run.forget_after(2)

    calls = [resume, look, lambda: sources.read(folder), lambda: figures.draw(rng.choice(sorted(figures.FIGURES)), [folder])]
    if rng.random() < 0.05:
        calls = [lambda: report.write(folder)]
    each_of(rng, calls)


# --- settings -----------------------------------------------------------------------------------------------------------

EXTREMES = [
    0,
    1,
    2,
    -1,
    3,
    50,
    10**6,
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    10**12,
    10**30,
    0.0,
    1e-300,
    0.5,
    1.0,
    1e6,
    1e7,
    1e300,
]
EXTREMES += [math.nan, math.inf, -math.inf, True, None]


def extreme(rng: Random, known: dict[str, Any]) -> dict[str, Any]:
    """Some settings at the ends of what they can be, or beyond."""
    values = dict(known)
    for name in rng.sample(sorted(known), rng.choice((1, 1, 2, 3))):
        old = known[name]
        if isinstance(old, str):
            options = [
                "zca",
                "samples",
                "one-hot",
                "images",
                "regression",
                "sgd",
                "adam",
                "none",
                "late",
                "float16",
                "probabilities",
            ]
            values[name] = rng.choice([*NETWORKS, *TEXTS, *options, *options])
        else:
            values[name] = rng.choice(EXTREMES)
    return values


def settings_file(rng: Random) -> Files:
    from recollect.config import to_json

    command = rng.choice(("distill", "distill", "continual", "select"))
    if command == "continual":
        values = {
            "config": extreme(rng, to_json(STREAM)),
            "how": extreme(rng, {"seeds": 1, "workers": 1, "together": 1, "size": None}),
        }
    else:
        values = {"config": extreme(rng, to_json(CONFIG)), "how": extreme(rng, {"networks": 1, "size": None, "seed": 0})}
    return {"settings.json": dumped({"command": command, **values})}


def read_settings(folder: Path, rng: Random) -> None:
    """As config.json or a Python call bring them."""
    from recollect.config import DistillConfig, from_json
    from recollect.continual.config import ContinualConfig

    given = json.loads((folder / "settings.json").read_bytes())
    how, images = given["how"], whole().images
    if given["command"] == "continual":
        config = from_json(ContinualConfig, given["config"], "the attack")
        with cut_short():
            run_stream(
                images, config, out=folder / "run", seeds=_whole_number(how["seeds"]), workers=_whole_number(how["workers"]),
                together=_whole_number(how["together"]), learners=("compress", "gdumb"),
            )  # fmt: skip
        return
    config = from_json(DistillConfig, given["config"], "the attack")
    if rng.random() < 0.1 and how["size"] is not None:
        data.load(whole().folder / "toy.npz", size=_whole_number(how["size"]))
    with cut_short():
        if given["command"] == "select":
            values = [rng.choice([value for value in EXTREMES if not isinstance(value, bool)])]
            field = rng.choice(("bases", "inner_lr", "outer_steps", "window"))
            select(images, config, field, values, run=folder / "run", networks=_whole_number(how["networks"]))
        else:
            distill(images, config, run=folder / "run" if rng.random() < 0.5 else None)


def _whole_number(value: Any) -> int:
    """What a flag or an argument of this type lets through."""
    if type(value) is not int:
        raise RecollectError("no whole number")
    return value


COMMANDS = (
    ["distill", "{toy}", "--network", "mlp:width=4", "--out", "{out}", "--{setting}", "{value}"],
    ["data", "show", "{toy}", "--size", "{value}"],
    ["recall", "{memory}", "--classes", "{value}", "--out", "{out}"],
    ["evaluate", "{memory}", "--data", "{toy}", "--networks", "1", "--epochs", "1", "--json", "{out}", "--seed", "{value}"],
    ["compose", "{memory}", "--network", "mlp:width=2", "--{recipe}", "{value}"],
    ["info", "{memory}", "--most-gib", "{value}"],
    ["studio", "{memory}", "--port", "{value}", "--host", "256.0.0.1"],
    ["plot", "memory", "{memory}", "--out", "{value}.png"],
)


def command_line(rng: Random) -> Files:
    settings = [
        "images-per-class",
        "bases",
        "inner-steps",
        "window",
        "outer-lr",
        "downsample",
        "seed",
        "classes-per-step",
        "minutes",
    ]
    given = {"setting": rng.choice(settings), "recipe": rng.choice(("batch", "lr", "momentum", "seed"))}
    value = rng.choice([*EXTREMES, *TEXTS[:-6], -5, "1e5", "0x10", "1_000", "９"])
    line = rng.choice(COMMANDS)
    return {
        "line.json": dumped([*([word.format_map(_Kept(given)) for word in line]), repr(value) if value != value else str(value)])
    }


class _Kept(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return f"{{{key}}}"


def read_command(folder: Path, rng: Random) -> None:
    *line, value = json.loads((folder / "line.json").read_bytes())
    value = value.replace("/", "_").replace("\0", "0")[:100]
    known = {"toy": whole().folder / "toy.npz", "memory": whole().folder / "distill" / "memory.safetensors"}
    words = [word.format_map(_Kept(known | {"out": str(folder / "out"), "value": value})) for word in line]
    words = [str(folder / word) if word.endswith(".png") else word for word in words]
    with cut_short():
        assert not steers(shown(*words)), "a command line steers the terminal"


FILES: dict[str, list[Kind]] = {
    "files": [
        Kind("memory", damaged_memory, read_memory, 30),
        Kind("memory, drawn", drawn_memory, draw_memory, 1),
        Kind("classifier", damaged_classifier, read_classifier, 15),
        Kind("whitening", damaged_zca, read_zca, 8),
        Kind("checkpoint", damaged_checkpoint, read_checkpoint, 15),
        Kind("checkpoint, forged", forged_checkpoint, read_forged, 8),
        Kind("checkpoint, forged pickle", forged_pickle, read_forged, 8),
        Kind("checkpoint of a stream, forged", forged_tasks, read_tasks, 3),
        Kind("run", damaged_run("distill"), read_run, 4),
        Kind("selection", damaged_run("select"), read_run, 3),
        Kind("stream", damaged_run("continual"), read_run, 3),
    ],
    "readers": READERS,
    "numbers": [Kind("settings", settings_file, read_settings, 5), Kind("command line", command_line, read_command, 1)],
}
"""group -> its kinds"""
