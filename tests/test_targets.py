"""Continuous targets, given vectors, tables: gradients, what is drawn, files, resume, commands, and bad input."""

import csv
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from test_distillation import CONFIG, KILLED, toy

import recollect
from recollect import Images, Memory, RecollectError, Split, distill, evaluate, from_dataset, load, minutes
from recollect.cli import main
from recollect.config import changed
from recollect.data.preprocess import Preprocess
from recollect.decisions import resolve
from recollect.distiller import Distiller, prepared_targets
from recollect.evaluation import full_data, mean_predictor, random_real
from recollect.export import export
from recollect.nets import Network, squared_error
from recollect.objectives import regression
from recollect.queries import STAND_INS, Targets, targets_of
from recollect.show import figures
from recollect.starts import fresh

SMALL = changed(CONFIG, images_per_class=1, bases=None, outer_steps=6, real_per_class=4)


def sums(count: int = 120, numbers: int = 5, targets: int = 1, seed: int = 0) -> Images:
    """Vectors whose targets are linear in them, in units of their own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, numbers, generator=generator) * torch.arange(1.0, numbers + 1) + 7
    y = x @ torch.randn(numbers, targets, generator=generator) * 3 + 40
    return from_dataset((x.numpy(), y.numpy()), name="sums", class_names=[f"y{number}" for number in range(targets)])


def rotating(count: int = 60) -> Images:
    """4x4 images whose bright row's place is the target, from 0 to 3."""
    generator = torch.Generator().manual_seed(0)
    y = torch.rand(count, generator=generator) * 3
    near = (1 - (torch.arange(4) - y[:, None]).abs()).clamp_min(0)
    pixels = (near[:, None, :, None].expand(-1, 1, -1, 4) * 200 + 20).to(torch.uint8)
    return from_dataset((pixels.numpy(), y.numpy()), name="rows", class_names=["row"])


def vectors(rows: int = 3, size: int = 2) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(rows, size, generator=torch.Generator().manual_seed(1)), dim=1)


def beside(images: Images, kind: str) -> Images:
    """The toy's classes, or each of its training images, with a vector."""
    if kind == "class":
        return replace(images, vectors=vectors())
    own = torch.randn(len(images.train), 4, generator=torch.Generator().manual_seed(2))
    return replace(images, train=replace(images.train, vectors=own))


# --- gradients against one float64 graph ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["targets", "vectors as data", "class", "image"])
@pytest.mark.parametrize("objective", ["unrolled", "regression"])
def test_the_outer_gradient_is_that_of_one_float64_graph(monkeypatch, kind, objective):
    """dJ/dA and dJ/dB of an outer step, from the query vectors to the loss on real examples."""
    made = {"targets": rotating, "vectors as data": lambda: sums(targets=2)}
    images = made[kind]() if kind in made else beside(toy(), kind)
    monkeypatch.setattr(regression, "POOL", 2)
    settings = {"objective": objective, "inner_per_class": 1, "images_per_class": 2 if kind == "targets" else 1, "shots": 2}
    config = resolve(changed(SMALL, **settings, classes_per_step=3), images)
    monkeypatch.setattr(Preprocess, "__call__", lambda self, pixels: (pixels.double() - 2) / 50)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    outputs = squared_error if images.train.targets is not None else torch.nn.functional.cross_entropy
    network = Network(config.inner.network, images.shape, images.classes, outputs)
    monkeypatch.setattr(network, "drawn", lambda seed, device: {n: p.double() for n, p in network.fresh(seed).items()})
    distiller = Distiller(images, config, Preprocess((0.0,) * images.shape[0], (1.0,) * images.shape[0]), network)
    if kind == "class":
        distiller.query = replace(distiller.query, table=images.vectors.double())
    for name in ("beside", "targets"):
        if getattr(distiller, name) is not None:
            setattr(distiller, name, getattr(distiller, name).double())
    state = distiller.begin()
    state.bases, state.addressing = (t.detach().double().requires_grad_() for t in (state.bases, state.addressing))
    drawn = distiller.draw(0, len(state.addressing))
    distiller.ahead[0] = drawn
    value, found = distiller.gradient(state)

    asked = distiller.query
    if images.train.targets is not None:
        scaled = prepared_targets(asked, images.train).double()
        queries = torch.cat([scaled[drawn.shots], torch.ones(3, 1)], 1).double()
        labels, truth = scaled[drawn.shots].repeat_interleave(len(state.addressing), 0), scaled[drawn.rows]
        assert not set(drawn.shots.tolist()) & set(drawn.rows.tolist())
    elif kind == "class":
        queries = images.vectors[drawn.labels].double()
        labels, truth = drawn.labels.repeat_interleave(len(state.addressing)), drawn.truth
    else:
        queries = images.train.vectors[drawn.shots].double()
        labels, truth = images.train.labels[drawn.shots].repeat_interleave(len(state.addressing)), drawn.truth
        assert torch.equal(images.train.labels[drawn.shots], drawn.labels.repeat_interleave(2))
    coefficients = torch.einsum("qy,ryk->qrk", queries, state.addressing)
    recalled = torch.einsum("qrk,kchw->qrchw", coefficients, state.bases).flatten(0, 1)
    real = (images.train.images[drawn.rows].double() - 2) / 50
    if objective == "unrolled":
        (start,) = drawn.objective
        theta = {n: p.double().requires_grad_() for n, p in start.params.items()}
        velocity = {name: torch.zeros_like(p) for name, p in theta.items()}
        for rows in start.batches:
            loss = outputs(network.logits(theta, recalled[rows]), labels[rows])
            slopes = torch.autograd.grad(loss, list(theta.values()), create_graph=True)
            for name, slope in zip(list(theta), slopes, strict=True):
                velocity[name] = 0.9 * velocity[name] + slope
                theta[name] = theta[name] - config.inner.lr * velocity[name]
        expected = outputs(network.logits(theta, real), truth)
    else:
        rows = drawn.objective.rows
        params = distiller.network.drawn(drawn.objective.seed + drawn.objective.member, "cpu")
        ours, theirs = (network.features(params, each) for each in (recalled[rows], real))
        one_hot = lambda each: torch.nn.functional.one_hot(each, images.classes).double() - 1 / images.classes  # noqa: E731
        wanted, judged = (each if each.is_floating_point() else one_hot(each) for each in (labels[rows], truth))
        kernel = ours @ ours.T
        kernel = kernel + regression.RIDGE * kernel.diagonal().mean() * torch.eye(len(rows), dtype=torch.float64)
        expected = (theirs @ ours.T @ torch.linalg.inv(kernel) @ wanted - judged).square().mean()
    assert value == pytest.approx(expected.item(), rel=1e-8)
    for mine, theirs in zip(found, torch.autograd.grad(expected, [state.bases, state.addressing]), strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-8


# --- what a memory answers -----------------------------------------------------------------------------------------------


def test_a_memory_learns_continuous_targets():
    """R2 far above the mean predictor's, which is about 0; recalled between the targets that stand for the data too."""
    images = sums(400)
    settings = {"network": "mlp:width=32", "inner_steps": 40, "inner_lr": 0.03, "outer_steps": 100, "images_per_class": 2}
    memory = distill(images, changed(SMALL, **settings, real_per_class=10, outer_lr=0.05))
    assert isinstance(memory.asked, Targets)
    found, mean = evaluate(memory, images, networks=3), mean_predictor(images)
    assert abs(mean.mean) < 0.1
    assert found.mean > 0.5
    assert found.rmse[0] < 0.75 * mean.errors[0]
    spread = float(images.test.targets.std(correction=0))
    assert found.rmse[0] == pytest.approx(spread * (1 - found.mean) ** 0.5, rel=0.05)
    low, high = memory.asked.undo(memory.vectors[:, :-1]).aminmax()
    assert low < memory.asked.mean[0] < high
    ends, _ = memory.recall([float(low), float(high)])
    middle, targets = memory.recall([float(low + high) / 2])
    half = ends.unflatten(0, (2, -1)).mean(0)
    assert torch.allclose(middle, half, atol=1e-4)  # affine in the target
    assert torch.allclose(memory.asked.undo(targets), (low + high).expand_as(targets) / 2, rtol=1e-5)


def test_the_rows_beside_it():
    images = sums(400)
    recipe = recollect.Recipe(network="mlp:width=32", epochs=100, lr=0.02)
    prepared = Preprocess.fit(images.train.images, columns=images.columns)
    whole = full_data(images, prepared, recipe, networks=2)
    few = random_real(images, 1, prepared, recipe, networks=2)
    assert whole.mean > 0.9 > few.mean
    again = recollect.Evaluation.from_json(json.loads(json.dumps(whole.to_json())))
    assert again == whole
    assert whole.entry()["metric"] == "R2"
    for wrong in ({"values": [1.5, 1.0]}, {"errors": [1.0]}, {"errors": [-1.0, 2.0]}):
        with pytest.raises(RecollectError, match="is no evaluation of ours"):
            recollect.Evaluation.from_json(whole.to_json() | wrong)


def test_targets_are_standardised_and_several():
    images = sums(targets=2)
    asked = targets_of(images)
    scaled = asked.prepare(images.train.targets)
    assert torch.allclose(scaled.mean(0), torch.zeros(2), atol=1e-5)
    assert torch.allclose(scaled.std(0, correction=0), torch.ones(2), atol=1e-5)
    assert torch.allclose(asked.undo(scaled), images.train.targets, rtol=1e-5)
    assert asked.table.shape == (STAND_INS, 3)
    assert (asked.table[1:, 0] >= asked.table[:-1, 0]).all()
    memory = distill(images, SMALL)
    assert memory.recall(torch.tensor([[1.0, 2.0]]))[1].shape == (len(memory.addressing), 2)
    assert memory.floats <= 10 * 5
    with pytest.raises(RecollectError, match=r"targets are \[3\], and this memory's are y0, y1: give floats \[Q, 2\]"):
        memory.recall([1.0, 2.0, 3.0])
    with pytest.raises(RecollectError, match="targets are not finite"):
        memory.recall([[1.0, float("nan")]])
    with pytest.raises(RecollectError, match="is asked with continuous targets"):
        memory.recall(["y0"])
    with pytest.raises(RecollectError, match="has no classes"):
        memory["y0"]


@pytest.mark.parametrize("kind", ["class", "image"])
def test_classes_with_vectors_of_their_own(kind, tmp_path):
    """Asked by name, by vector, and evaluated as a memory of labels is; the same from a file."""
    images = beside(toy(), kind)
    config = changed(SMALL, outer_steps=80, inner_steps=15, inner_lr=0.1, outer_lr=0.05, images_per_class=4, bases=4, shots=2)
    memory = distill(images, config)
    assert memory.header.query["kind"] == "vectors"
    assert memory.vectors.shape == (3, 2 if kind == "class" else 4)
    memory.save(tmp_path / "m.safetensors")
    again = Memory.load(tmp_path / "m.safetensors")
    by_name, by_vector = again.recall(["bottom"]), again.recall(memory.vectors[2:])
    assert torch.equal(by_name[0], by_vector[0])
    assert by_name[1].tolist() == [2] * len(memory.addressing)
    assert evaluate(again, images, networks=2).mean > (60 if kind == "class" else 45)
    if kind == "image":
        own = images.train.vectors[images.train.labels == 1].mean(0)
        assert torch.allclose(memory.vectors[1], own)
    two = recollect.compose([again["top"], again["bottom"]])
    assert two.class_names == ("top", "bottom")


def test_distill_takes_vectors():
    memory = distill(toy(), SMALL, vectors=vectors().numpy())
    assert torch.equal(memory.vectors, vectors())
    words = {"names": ("bottom", "other", "top", "middle")}
    from recollect.data.vectors import Given, attached

    found = attached(toy(), Given(vectors(4), **words), "words.npz")
    assert torch.equal(found.vectors, vectors(4)[[2, 3, 0]])
    assert torch.equal(found.only(["bottom", "top"]).vectors, vectors(4)[[0, 2]])


# --- files ---------------------------------------------------------------------------------------------------------------


def test_a_file_says_what_its_queries_are(tmp_path):
    memory = distill(rotating(), SMALL)
    path = tmp_path / "m.safetensors"
    memory.save(path)
    found = Memory.load(path)
    assert found.asked == memory.asked
    assert torch.equal(found.recall([1.5])[0], memory.recall([1.5])[0])
    with safetensors.safe_open(path, "pt") as file:  # what a stranger does
        header = json.loads(file.metadata()["recollect"])
        bases, addressing, queries = (file.get_tensor(name) for name in ("bases", "addressing", "vectors"))
    images = torch.einsum("qy,ryk,kchw->qrchw", queries, addressing, bases).flatten(0, 1)
    mean, std = (torch.tensor(header["query"][name]) for name in ("mean", "std"))
    ours, targets = found.recall()
    assert torch.allclose(images, ours, atol=1e-6)
    assert torch.allclose(queries[:, :-1] * std + mean, found.asked.undo(targets)[:: len(addressing)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "targets", "size": 2, "mean": [0.0]}, "header's 'query' cannot be"),
        ({"kind": "targets", "size": 2, "mean": [0.0], "std": [0.0]}, "header's 'query' cannot be"),
        ({"kind": "targets", "size": 3, "mean": [0.0, 1.0], "std": [1.0, 1.0]}, "its addressing is for 2 numbers"),
        ({"kind": "vectors", "size": 2, "words": {"model": 3}}, "header's 'query' cannot be"),
        ({"kind": "vectors", "size": 2, "words": {"model": "x"}}, "its encoder is not what its header says"),
    ],
)
def test_a_damaged_header_is_noticed(change, message):
    memory = distill(rotating(), SMALL)
    with pytest.raises(RecollectError, match=message):
        Memory(memory.bases, memory.addressing, replace(memory.header, query=change), {}, memory.vectors[:1])
    if change.get("words") == {"model": "x"}:
        encoder = {"mean": torch.zeros(7), "projection": torch.zeros(7, 2)}
        Memory(memory.bases, memory.addressing, replace(memory.header, query=change), encoder, memory.vectors[:1])


@pytest.mark.parametrize("given", [None, torch.zeros(10, 3), torch.zeros(10, 2, dtype=torch.float16)])
def test_a_file_without_its_vectors_is_damaged(given):
    memory = distill(rotating(), SMALL)
    with pytest.raises(RecollectError, match=r"its tensor 'vectors'|it has no tensor 'vectors'"):
        Memory(memory.bases, memory.addressing, memory.header, {}, given)


# --- the same bytes, whatever happens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["targets", "vectors"])
def test_killed_and_resumed_it_gives_the_same_bytes(tmp_path, what):
    """SIGKILL just before a file is touched; `recollect resume` goes on, of a table and of digits with vectors."""
    if what == "targets":
        data = [write_csv(tmp_path / "table.csv"), "--target", "price"]
    else:
        np.savez(tmp_path / "v.npz", names=[str(n) for n in range(10)], vectors=vectors(10, 4).numpy())
        data = ["digits", "--vectors", tmp_path / "v.npz"]
    settings = shlex.split(
        "--network mlp:width=8 --inner-steps 6 --window None --outer-steps 20 --real-per-class 5 --checkpoint-seconds 0 "
        "--device cpu --quiet --out"
    )
    environment, base = os.environ | {"OMP_NUM_THREADS": "1"}, [sys.executable, "-W", "ignore"]
    folder = tmp_path / "killed"
    assert main(["distill", *map(str, data), *settings, str(tmp_path / "whole")]) == 0
    command = ["distill", *data, *settings, folder]
    for moment in ("25", "18"):
        done = subprocess.run([*base, "-c", KILLED, moment, folder, *command], env=environment, capture_output=True)
        assert done.returncode == -signal.SIGKILL
        command = ["resume", folder, "--quiet"]
    assert main(["resume", str(folder), "--quiet"]) == 0
    whole, killed = (tmp_path / name / "memory.safetensors" for name in ("whole", "killed"))
    assert whole.read_bytes() == killed.read_bytes()


def test_a_run_goes_on_with_its_own_vectors_alone(tmp_path):
    config = changed(SMALL, checkpoint_seconds=0.0)

    def stop(line):
        if line["step"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(toy(), config, vectors=vectors(), run=tmp_path / "run", progress=stop)
    with pytest.raises(RecollectError, match="was begun with other training images"):
        distill(toy(), config, vectors=vectors() * 2, run=tmp_path / "run", resume=True)
    parts = distill(toy(), config, vectors=vectors(), run=tmp_path / "run", resume=True)
    assert torch.equal(parts.bases, distill(toy(), config, vectors=vectors()).bases)


def test_it_goes_on_from_a_memory_of_the_same_queries(tmp_path):
    images, path = sums(), tmp_path / "m.safetensors"
    distill(images, SMALL).save(path)
    start = changed(SMALL, start=str(path))
    assert distill(images, changed(start, objective="regression")).header.made["start"]
    shifted = replace(images, train=replace(images.train, targets=images.train.targets + 1))
    with pytest.raises(RecollectError, match="has mean of the targets"):
        resolve(start, shifted)
    distill(toy(), SMALL, vectors=vectors()).save(path)
    with pytest.raises(RecollectError, match="is asked with other vectors"):
        resolve(start, replace(toy(), vectors=-vectors()))


# --- tables and datasets -------------------------------------------------------------------------------------------------


def write_csv(path, rows: int = 60, **instead):
    """Numbers, a column of words, a target and classes."""
    generator = np.random.default_rng(0)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["length", "colour", "price", "kind", "code"])
        for row in range(rows):
            length, colour = generator.normal(5, 2), ["red", "blue", "green"][row % 3]
            values = {"length": length, "colour": colour, "price": 3 * length + 10 * (colour == "red")}
            values |= {"kind": "dear" if values["price"] > 20 else "cheap", "code": row % 2} | instead.get(str(row), {})
            writer.writerow(values.values())
    return path


def test_a_table(tmp_path):
    path = write_csv(tmp_path / "shop.csv")
    images = load(path, target="price")
    assert images.columns == ("length", "colour=blue", "colour=green", "colour=red", "kind=cheap", "kind=dear", "code")
    assert images.shape == (7, 1, 1)
    assert images.class_names == ("price",)
    assert (len(images.train), len(images.validation), len(images.test)) == (43, 5, 12)
    one_hot = images.train.images[:, 1:4, 0, 0]
    assert torch.equal(one_hot.sum(1), torch.ones(43))
    prepared = Preprocess.fit(images.train.images, columns=images.columns)
    seen = prepared(images.train.images)
    assert torch.allclose(seen.mean(0), torch.zeros_like(seen[0]), atol=1e-5)
    assert torch.allclose(prepared.undo(seen), images.train.images, atol=1e-5)
    again = Preprocess.from_json(json.loads(json.dumps(prepared.to_json())), tmp_path)
    assert again == prepared
    assert load(path, target=["price", "length"]).train.targets.shape == (43, 2)
    assert load(path, target="kind").class_names == ("cheap", "dear")
    assert load(path, label="code").class_names == ("0", "1")
    config = resolve(recollect.preset("fast"), images)
    assert (config.query.kind, config.inner.network, config.memory.downsample) == ("targets", "mlp", 1)


@pytest.mark.parametrize(
    ("instead", "options", "message"),
    [
        ({}, {}, "which column is to be predicted.* columns: length, colour, price, kind, code"),
        ({}, {"target": "prise"}, r"unknown column of shop.csv 'prise': did you mean 'price'"),
        ({}, {"target": ["price", "kind"]}, "column 'kind' has 'dear' in example 1: give a number"),
        ({"4": {"price": "nan"}}, {"target": "price"}, "column 'price' has 'nan' in example 5: give a number"),
        ({"4": {"length": ""}}, {"target": "price"}, "column 'length' has '' in example 5"),
        ({str(n): {"price": 7} for n in range(60)}, {"target": "price"}, "target 'price' of shop is constant: leave it out"),
        ({"2": {"more": 1}}, {"target": "price"}, "example 3 has 6 values for 5 columns"),
        ({str(n): {"kind": f"id {n}"} for n in range(60)}, {"target": "price", "label": "kind"}, "cannot both be predicted"),
    ],
    ids=str,
)
def test_a_table_that_cannot_be_meant(tmp_path, instead, options, message):
    path = write_csv(tmp_path / "shop.csv", **instead)
    with pytest.raises(RecollectError, match=message):
        distill(load(path, **options), SMALL)


def test_words_that_are_names(tmp_path, monkeypatch):
    monkeypatch.setattr(recollect.data.tables, "MOST_WORDS", 2)
    with pytest.raises(RecollectError, match="column 'colour' has 3 different words: leave it out"):
        load(write_csv(tmp_path / "shop.csv"), target="price")
    with pytest.raises(RecollectError, match=r"target price is a column of a .csv, and digits is none"):
        load("digits", target="price")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(RecollectError, match="needs a first line of column names"):
        load(tmp_path / "empty.csv", target="a")


@pytest.mark.parametrize(("name", "shape", "names"), [("diabetes", 10, 1), ("wine", 13, 3), ("breast-cancer", 30, 2)])
def test_tables_that_come_along(name, shape, names):
    images = load(name)
    assert images.shape == (shape, 1, 1)
    assert images.classes == names
    assert (images.train.targets is not None) == (name == "diabetes")
    memory = distill(images, recollect.preset("fast", outer_steps=2, inner_steps=3))
    assert memory.image_shape == (shape, 1, 1)
    assert memory.header.preprocessing["columns"] == list(images.columns)
    assert memory.header.recipe["network"] == "mlp"


def test_arrays_of_vectors(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 4))
    np.savez(tmp_path / "classes.npz", X=x, y=np.arange(60) % 3)
    np.savez(tmp_path / "targets.npz", X=x, y=x[:, 0])
    assert load(tmp_path / "classes.npz").classes == 3
    images = load(tmp_path / "targets.npz")
    assert images.class_names == ("target",)
    assert images.columns == ("0", "1", "2", "3")
    grids = np.random.default_rng(0).normal(size=(60, 3, 5)) * 4
    np.savez(tmp_path / "grids.npz", X=grids, y=np.arange(60) % 3)  # spectrograms, say
    assert load(tmp_path / "grids.npz").shape == (1, 3, 5)
    assert float(load(tmp_path / "grids.npz").train.images.min()) == pytest.approx(float(grids.min()), abs=4)
    np.savez(tmp_path / "nan.npz", X=x, y=np.where(np.arange(60) == 7, np.nan, x[:, 0]))
    with pytest.raises(RecollectError, match=r"nan \(train\): the target of example 8 is NaN or infinite: remove it"):
        load(tmp_path / "nan.npz")
    x[3] = np.inf
    np.savez(tmp_path / "inf.npz", X=x, y=np.arange(60) % 3)
    with pytest.raises(RecollectError, match="has NaN or infinite values"):
        load(tmp_path / "inf.npz")


class Squares(torch.utils.data.Dataset):
    """Grey pictures of one channel, as floats of any range, and their class."""

    classes = ("dark", "light")

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int):
        return torch.full((6, 5), float(row % 2)) * 3 - 1 + torch.linspace(0, 0.1, 5), row % 2


def test_a_torch_dataset_goes_everywhere(tmp_path):
    images = from_dataset(Squares(), name="squares")
    assert images.shape == (1, 6, 5)
    assert images.class_names == ("dark", "light")
    assert len(from_dataset(Squares(), test=Squares()).test) == 40
    config = changed(SMALL, images_per_class=2, real_per_class=4, outer_steps=40, inner_steps=10, inner_lr=0.1, outer_lr=0.1)
    memory = distill(images, config)
    assert evaluate(memory, images, networks=2).mean == 100
    whole = from_dataset(torch.utils.data.TensorDataset(torch.rand(30, 4), torch.rand(30)))
    assert whole.train.targets.shape == (22, 1)
    with pytest.raises(RecollectError, match="not examples of one size"):
        from_dataset((np.zeros((3, 2)), [1, [2, 3], 4]))
    with pytest.raises(RecollectError, match=r"targets are \[30, 2\] for 1 names: give \[N, 1\]"):
        from_dataset((np.zeros((30, 2)), np.random.rand(30, 2)), class_names=["one"])


# --- refused -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (sums, {"objective": "gradients"}, "objective gradients compares class by class, and sums has continuous targets: give"),
        (sums, {"objective": "distributions"}, "objective distributions compares class by class"),
        (sums, {"objective": "trajectories", "experts": "x"}, "objective trajectories compares class by class"),
        (sums, {"query": "images"}, "sums has continuous targets, which are its queries: leave out query images"),
        (sums, {"addressing": "one-hot"}, "one-hot addressing supports label queries only"),
        (sums, {"init": "samples"}, "init samples supports label queries only"),
        (sums, {"images_per_class": 9}, "images_per_class is 9, 90 images with continuous targets, and there are 86: give fewer"),
        (sums, {"classes_per_step": 60}, "classes_per_step is 60 targets of 86: give at most 43"),
        (sums, {"encoder_epochs": 1}, "encoder_epochs is 1, and a memory that is asked with targets has no encoder"),
        (toy, {"query": "vectors"}, "query vectors needs a vector of each class or training image, and toy has none"),
        (toy, {"query": "targets"}, "query targets needs continuous targets, and toy has classes"),
        (lambda: beside(toy(), "image"), {"shots": 12}, "shots is 12, but a class has only 12 images: give at most 11"),
        (lambda: beside(toy(), "image"), {"use_validation": True}, "one of two splits has targets or query vectors"),
        (sums, {"network": "convnet:width=16"}, "too small for 'convnet:width=16': use mlp"),
    ],
)
def test_what_cannot_be(make, change, message):
    with pytest.raises(RecollectError, match=message):
        distill(make(), changed(SMALL, **change))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((4, 2)), "vectors: 4 vectors, but toy has 3 classes and 36 training images"),
        (np.full((3, 2), np.nan), "vectors have NaN or infinite values"),
        (np.zeros(3), r"vectors are \[3\]: give \[classes or training images, numbers\]"),
        ([["a"]], "vectors are no numbers"),
    ],
)
def test_vectors_that_cannot_be(given, message):
    with pytest.raises(RecollectError, match=message):
        distill(toy(), SMALL, vectors=given)
    with pytest.raises(RecollectError, match="has continuous targets, which are its queries: leave out vectors"):
        distill(sums(), SMALL, vectors=vectors())


def test_a_file_of_vectors_that_cannot_be(tmp_path):
    from recollect.data.vectors import read

    path = tmp_path / "v.npz"
    names = [str(number) for number in range(10)]
    for arrays, message in (
        ({"names": names}, "has no array 'vectors': write it anew"),
        ({"names": names, "vectors": np.zeros((9, 2))}, "has 10 names and 9 vectors"),
        ({"names": names[:9], "vectors": np.zeros((9, 2))}, "no vector for class '9' of digits: give every class one"),
        (
            {"names": names, "vectors": np.ones((10, 2)), "model": "m", "projection": np.ones((3, 3)), "mean": np.ones(3)},
            r"projection is \[3, 3\], not \[3, 2\]",
        ),
    ):
        np.savez(path, **arrays)
        with pytest.raises(RecollectError, match=message):
            load("digits", vectors=path)
    with pytest.raises(RecollectError, match=r"vectors file .* does not exist"):
        load("digits", vectors=tmp_path / "none.npz")
    path.write_bytes(b"no archive")
    with pytest.raises(RecollectError, match=r"not a readable \.npz"):
        read(path)
    words = {"model": "m", "projection": np.ones((3, 2)), "mean": np.zeros(3)}
    np.savez(path, names=names[::-1], vectors=np.arange(20.0).reshape(10, 2), **words)
    found = load("digits", vectors=path)
    assert found.vectors[9].tolist() == [0.0, 1.0]
    memory = distill(found, changed(SMALL, network="mlp:width=8", outer_steps=2))
    assert memory.header.query["words"] == {"model": "m"}
    assert torch.equal(memory.encoder["projection"], torch.ones(3, 2))


def test_who_needs_classes_says_so(tmp_path):
    with pytest.raises(RecollectError, match="sums has continuous targets, and no classes to choose from"):
        sums().only(["y0"])
    memory = distill(sums(), SMALL)
    with pytest.raises(RecollectError, match="has continuous targets: give the memory's own dataset"):
        evaluate(memory, replace(sums(), train=Split(sums().train.images, sums().train.labels)))
    with pytest.raises(RecollectError, match="herding chooses within classes"):
        recollect.evaluation.chosen_real(sums(), "herding", 1, memory.preprocess(), recollect.Recipe())
    from recollect.experts import train_experts

    with pytest.raises(RecollectError, match="experts tell classes apart"):
        train_experts(sums(), tmp_path, recollect.Recipe())


# --- commands ------------------------------------------------------------------------------------------------------------


def test_the_same_commands(tmp_path, monkeypatch, capsys):
    """distill, evaluate, select, info, recall, plot, report and minutes, of a table with a continuous target."""
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "shop.csv", 120)
    small = shlex.split(
        "--network mlp:width=8 --inner-steps 5 --window None --outer-steps 4 --real-per-class 5 --device cpu --quiet"
    )
    data = ["shop.csv", "--target", "price"]
    assert main(["distill", *data, *small, "--out", "run"]) == 0
    assert main(["evaluate", "run", "--networks", "2", "--full", "5", "--record", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    for words in ("R2", "RMSE", "mean of the targets", "random real images", "all the data"):
        assert words in said
    report = (tmp_path / "run" / "report.html").read_text()
    assert "asked with continuous targets (price)" in report
    assert "RMSE" in report
    assert "Not shown: run is asked with continuous targets (price), and has no classes" in report
    assert main(["info", "run"]) == 0
    said = capsys.readouterr().out
    assert "images a target" in said
    assert "colour=red" in said
    assert main(["recall", "run", "--targets", "10", "20.5", "--format", "csv", "--out", "again.csv"]) == 0
    lines = list(csv.DictReader((tmp_path / "again.csv").read_text().splitlines()))
    assert {float(line["price"]) for line in lines} == {10.0, 20.5}
    assert main(["recall", "run", "--out", "all.npz"]) == 0
    arrays = np.load(tmp_path / "all.npz")
    assert arrays["X"].shape == (10 * len(lines) // 2, 7)
    assert load("again.csv", target="price").columns[0] == "length"
    for figure in ("bases", "recalled", "curves"):
        assert main(["plot", figure, "run", "--out", f"{figure}.png"]) == 0
    assert main(["plot", "similarity", "run", "--out", "s.png"]) == 2
    assert main(["select", *data, *small, "--field", "bases", "--values", "2", "3", "--networks", "2", "--out", "sel"]) == 0
    assert "R2" in capsys.readouterr().out
    ticks = itertools.count()  # a clock that a busy machine does not hurry
    monkeypatch.setattr(minutes.time, "perf_counter", lambda: next(ticks) / 100)
    assert main(["distill", *data, "--minutes", "0.03", "--device", "cpu", "--quiet", "--out", "short"]) == 0
    assert Memory.load("short/memory.safetensors").header.recipe["network"] == "mlp"
    for wrong in (["recall", "run", "--targets", "1", "--classes", "price", "--out", "x"], ["recall", "run", "--format", "png"]):
        assert main([*wrong, *([] if "--out" in wrong else ["--out", "x"])]) == 2


def test_a_figure_of_targets():
    memory = distill(rotating(), SMALL)
    assert figures.recalled_by_class(memory, [1.0, 2.0])[0].shape[1:] == (1, 4, 4)
    assert figures.FIGURES["recalled"]


def test_files_of_a_recall(tmp_path):
    export(distill(rotating(), SMALL), [0.5, 2.0], tmp_path / "rows.npz", "npz")
    found = np.load(tmp_path / "rows.npz")
    assert sorted(set(np.round(found["y"][:, 0], 4).tolist())) == [0.5, 2.0]
    assert found["X"].shape[1:] == (1, 4, 4)
    with pytest.raises(RecollectError, match=r"recalls images, and a \.csv is for vectors"):
        export(distill(toy(), SMALL), None, tmp_path / "toy.csv", "csv")
    for kind in ("png", "parquet", "ddranking"):
        with pytest.raises(RecollectError, match="has no classes"):
            export(distill(rotating(), SMALL), None, tmp_path / "rows", kind)
    memory = distill(load("wine"), changed(SMALL, network="mlp:width=8"))
    with pytest.raises(RecollectError, match="recalls vectors, and sheet is for images"):
        export(memory, None, tmp_path / "wine.png", "sheet")
    export(memory, ["class_1"], tmp_path / "wine.csv", "csv")
    assert {line["class"] for line in csv.DictReader((tmp_path / "wine.csv").read_text().splitlines())} == {"class_1"}


def test_small_budgets_have_two_bases():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        budget = recollect.Budget(1, 3, (13, 1, 1), downsample=1)
        assert budget.default_bases() == 2
        bases, addressing = fresh(SMALL.memory, budget, torch.Generator())
    assert (bases.numel() + addressing.numel()) <= 39
