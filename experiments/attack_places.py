"""More that the attack damages: experts, evaluations beside a memory, rows of results, the zoo's names and mirrors."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import requests
import torch
from attack_damage import EVIL, TEXTS, Files, Kind, Tensors, dumped, hurt, json_file, safetensors_bytes, twisted
from attack_files import each_of, shown, special, steers, whole

from recollect import Memory, zoo
from recollect.errors import RecollectError
from recollect.evaluation import Evaluation, keep, kept
from recollect.objectives.seam import Source
from recollect.objectives.trajectories import Expert, opened
from recollect.reproduce import page, rows
from recollect.reproduce.run import Places, show
from recollect.reproduce.scales import QUICK
from recollect.reproduce.tables import TABLES
from recollect.show import figures, report, sources
from recollect.studio import shelf

# --- experts -------------------------------------------------------------------------------------------------------------


@cache
def whole_expert() -> tuple[Tensors, dict[str, Any], bytes]:
    from safetensors import safe_open

    path = whole().folder / "experts" / "expert-000.safetensors"
    with safe_open(path, "pt") as file:
        ((_, text),) = file.metadata().items()
        tensors = {n: ("F32", list((t := file.get_tensor(n)).shape), t.numpy().tobytes()) for n in file.keys()}  # noqa: SIM118
    return tensors, json.loads(text), path.read_bytes()


def damaged_expert(rng: Random) -> Files:
    tensors, header, data = whole_expert()
    name, choice = "expert-000.safetensors", rng.random()
    if choice < 0.3:
        return {name: hurt(rng, data)}
    if choice < 0.5:
        return {name: safetensors_bytes(tensors, {"recollect-expert": dumped(header)}, rng)}
    tensors = special(rng, tensors) if choice < 0.7 else tensors
    return {name: safetensors_bytes(tensors, {"recollect-expert": dumped(twisted(rng, header))})}


def read_expert(folder: Path, rng: Random) -> None:
    distiller = whole().distiller
    header = whole_expert()[1]
    source = Source(header["fingerprint"], header["preprocessing"])
    expert = Expert.open(folder / "expert-000.safetensors")
    for found in (expert, *opened(str(folder), distiller.network, source, epochs=1)):
        weights = found.weights(rng.randrange(2))
        distiller.network.logits(weights, torch.zeros(1, *whole().images.shape))


# --- evaluations -----------------------------------------------------------------------------------------------------------


def damaged_evaluations(rng: Random) -> Files:
    """A finished run's folder and what was measured of its memory, some of it damaged."""
    files = {name: data for name, data in whole().files("distill").items() if name.endswith((".json", "jsonl", ".safetensors"))}
    told = json.loads(files.pop("evaluation.json"))
    for number in range(rng.choice((1, 2, 3))):
        name = rng.choice((f"evaluations/{number}.json", f"evaluations/{number}.json", "evaluation.json"))
        extra = {"checksum": "x"} if rng.random() < 0.1 else {}
        files[name] = json_file(rng, told | extra)
    return files


def read_evaluations(folder: Path, rng: Random) -> None:
    path = folder / "memory.safetensors"

    def add() -> None:
        Memory.load(path)
        found = Evaluation(rng.choice(("memory", EVIL)), rng.choice(TEXTS), (5.0,), rng.choice(TEXTS), rng.choice(TEXTS), 1.0)
        ours = Evaluation("memory", rng.choice(TEXTS), (5.0,), rng.choice(TEXTS), rng.choice(TEXTS), 1.0)
        before = {each: each.read_bytes() for each in (folder / "evaluations").glob("*")}
        written = keep(path, [(ours, "x"), (found, EVIL)])
        assert written.parent == folder / "evaluations", "an evaluation is kept elsewhere"
        assert written not in before, "an evaluation took the place of another"
        assert all(each.read_bytes() == data for each, data in before.items()), "an evaluation was changed"

    def serve() -> None:
        json.dumps([each.to_json() for each in shelf.stock([path], [whole().images]).entries])

    def info() -> None:
        assert not steers(shown("info", path)), "info steers the terminal"

    some = [add, serve, info, lambda: kept(path), lambda: sources.read(folder), lambda: sources.of_memory(path)]
    figure = rng.choice(("architectures", "budget", "memory"))
    seldom = rng.choice([lambda: report.write(folder), lambda: figures.save(figures.draw(figure, [folder]), folder / "out.png")])
    each_of(rng, [seldom] if rng.random() < 0.1 else some)


# --- rows of results -----------------------------------------------------------------------------------------------------------


def _row(table: str, name: str) -> dict[str, Any]:
    cell = next(cell for cell in TABLES[table].cells if cell.name == name)
    one = {
        "network": "convnet",
        "mean": 50.0,
        "deviation": 1.0,
        "n": "2 networks",
        "on": "test",
        "protocol": "x",
        "values": [50.0],
    }
    return {
        "asked": rows.asked(cell, QUICK), "command": "x", "objective": "unrolled", "minutes": 1.0, "measured_minutes": None,
        "hardware": "x", "commit": "x", "torch": "2.11", "numbers": 5, "made": {"network": "convnet", "window": None},
        "accuracies": [one] * len(cell.columns), "measures": {"x": 1.0} if cell.figure else {},
    }  # fmt: skip


DONE = {"table1": "mnist-1", "cross-architecture": "cifar10-1-convnet", "similarity": "cifar10-1", "compose": "5-way"}
EARLIER = ("memories/cifar10-1.json", "memories/mnist-1.json", "streams/rotations.json", "compose-cifar100-5-way.json")
EARLIER += ("ask-cifar100.json",)
RESULTS = Path(__file__).parent.parent / "results"


def damaged_rows(rng: Random) -> Files:
    """A row that was made, those that are kept, and files of earlier scripts: one of them damaged."""
    table = rng.choice(list(DONE))
    cell = rng.choice([DONE[table], TABLES[table].cells[-1].name])
    made, rest = f"runs/quick/rows/{table}/{cell}.json", {each: {DONE[each]: _row(each, DONE[each])} for each in DONE}
    files: dict[str, Any] = {made: _row(table, cell), "results/reproduce/quick.json": rest}
    files |= {f"results/{name}": json.loads((RESULTS / name).read_bytes()) for name in EARLIER if rng.random() < 0.5}
    bad = rng.choice(list(files)) if rng.random() < 0.7 else made
    raw = {name: json.dumps(value).encode() for name, value in files.items()}
    return raw | {bad: json_file(rng, files[bad]), "table": table.encode()}


def read_rows(folder: Path, rng: Random) -> None:
    table = TABLES[(folder / "table").read_text()]
    places = Places(folder / "runs", folder / "results" / "reproduce", folder / "docs")
    words = [table.name, "--out", places.out, "--results", places.results, "--pages", places.pages, "--root", folder / "none"]
    cells = [cell.name for cell in table.cells if not cell.dataset.endswith("mnist")]  # which Debian may bring

    def listed() -> None:
        assert not steers(shown("reproduce", *words, "--cells", rng.choice(cells), "--quiet")), "reproduce steers the terminal"

    calls = [lambda: show(table, QUICK, places), lambda: page.pages(places.results, places.pages), listed]
    calls.append(lambda: page.summary(page.every(places.results)))
    calls.append(lambda: rows.check_kept(places.results, QUICK, list(table.cells)))
    each_of(rng, calls)


# --- the zoo ---------------------------------------------------------------------------------------------------------------


class Answer:
    """Of a mirror that sends what it likes."""

    def __init__(self, rng: Random, raw: bytes):
        self.rng, self.raw, self.status_code = rng, raw, rng.choice((200, 200, 200, 206, 302, 404, 500))

    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def raise_for_status(self) -> None:
        if self.status_code >= 400:
            raise requests.HTTPError("no", response=self)  # pyright: ignore[reportArgumentType]

    def iter_content(self, size: int) -> Iterator[bytes]:
        for place in range(0, len(self.raw), size):
            yield self.raw[place : place + size]
            if self.rng.random() < 0.05:
                raise self.rng.choice([requests.ConnectionError, requests.exceptions.ChunkedEncodingError, requests.Timeout])("x")
        while self.rng.random() < 0.2:
            yield bytes(10 * size)


OWN = {"tiny": "toy", "a/tiny-1": "toy"}


def _entry(data: bytes) -> dict[str, Any]:
    return dict(zoo.index()["mnist-1"]) | {"ships": False, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def hostile_mirror(rng: Random) -> Files:
    """A name as a user may write it, an index, and what a mirror sends."""
    data = whole().files("distill")["memory.safetensors"]
    names = [
        *OWN,
        *OWN,
        "mnist-1",
        "cifar10-1",
        "",
        ".",
        "..",
        "../mnist-1",
        "a/../tiny",
        "/etc/passwd",
        "A/tiny-1",
        "tiny.safetensors",
    ]
    names += [*TEXTS[:16], "cifar10", "x" * 5000, "tiny\0", "mnist-1/", "hf:x/y", "file:///etc/passwd", "٣"]
    told = {
        "name": rng.choice(names),
        "address": rng.choice(("http://127.0.0.1:9", "https://x", "", "ftp://x", "x", "http://[", "\0")),
    }
    index = {name: _entry(data) for name in OWN} | {"mnist-1": dict(zoo.index()["mnist-1"])}
    sent = data if rng.random() < 0.4 else hurt(rng, data)
    return {"told.json": dumped(told), "index.json": dumped(index), "sent": sent}


def read_mirror(folder: Path, rng: Random) -> None:
    try:
        told = json.loads((folder / "told.json").read_bytes())
    except (ValueError, RecursionError):
        return
    right, sent = whole().files("distill")["memory.safetensors"], (folder / "sent").read_bytes()
    seams: list[tuple[Any, str, Any]] = [(zoo, "INDEX", folder / "index.json"), (zoo, "ADDRESS", told["address"])]
    seams += [(zoo, "_in_cache", lambda name: folder / "cache" / f"{name}.safetensors")]
    seams += [(requests, "get", lambda *_, **__: Answer(rng, sent))]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in seams]
    zoo.index.cache_clear()
    try:
        for owner, name, value in seams:
            setattr(owner, name, value)
        with contextlib.suppress(RecollectError):
            Memory.load(told["name"])
        if rng.random() < 0.2:
            assert not steers(shown(rng.choice(("info", "zoo")), told["name"])), "a name steers the terminal"
            assert not steers(shown("zoo")), "the list steers the terminal"
        for path in (folder / "cache").rglob("*.safetensors"):
            assert path.read_bytes() == right, "another file than the zoo's is in the cache"
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        zoo.index.cache_clear()


PLACES = [
    Kind("expert", damaged_expert, read_expert, 8),
    Kind("evaluations", damaged_evaluations, read_evaluations, 3),
    Kind("rows of results", damaged_rows, read_rows, 2),
    Kind("names and mirrors of the zoo", hostile_mirror, read_mirror, 5),
]
