"""Memories that are asked with pictures: the encoder's gradient, what is drawn, the file, and what goes wrong."""

import sys
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from test_distillation import CONFIG, toy

import recollect
from recollect import Memory, RecollectError, distill, queries
from recollect.cli import main
from recollect.composition import ask
from recollect.config import changed
from recollect.data import augment
from recollect.data.preprocess import Preprocess
from recollect.decisions import resolve
from recollect.distiller import Distiller
from recollect.fast import passes
from recollect.fast.engine import Engine
from recollect.header import read_header
from recollect.memory import recall
from recollect.nets import Network
from recollect.training import train

ASKED = changed(
    CONFIG,
    images_per_class=4,
    query="images",
    shots=2,
    query_size=6,
    matrices=3,
    classes_per_step=2,
    inner_per_class=4,
    real_per_class=4,
)


@pytest.fixture(autouse=True)
def small_encoder(monkeypatch):
    monkeypatch.setattr(queries, "ENCODER", "mlp:width=8,depth=1")


@pytest.fixture(scope="module")
def asked() -> Memory:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queries, "ENCODER", "mlp:width=8,depth=1")
        return distill(toy(), ASKED)


@pytest.mark.parametrize("form", ["unit", "probabilities"])
@pytest.mark.parametrize("engine", [False, True])
def test_gradient_reaches_the_encoder(monkeypatch, engine, form):
    """dJ by bases, addressing and encoder against one float64 graph from the pictures to the real images' loss."""
    images = toy()
    config = resolve(changed(ASKED, query_form=form, inner_per_class=3, encoder_augment="flip+crop"), images)
    network = Network(config.inner.network, images.shape, config.budget.classes_per_step)
    monkeypatch.setattr(Preprocess, "__call__", lambda self, pixels: pixels.double() / 255)
    distiller = Distiller(images, config, Preprocess.fit(images.train.images), network)
    state = distiller.begin()
    state.bases, state.addressing = (t.detach().double().requires_grad_() for t in (state.bases, state.addressing))
    state.encoder = {name: p.detach().double().requires_grad_() for name, p in state.encoder.items()}
    drawn = distiller.draw(0, len(state.addressing))
    start = drawn.objective[0]
    start = start._replace(params={name: p.double() for name, p in start.params.items()})
    distiller.ahead[0] = drawn._replace(objective=[start])
    if engine:
        distiller.draws_ahead, distiller.objective.engine = True, Engine(*passes(network, "cpu"))
    value, found = distiller.gradient(state)

    pictures, real = (images.train.images[rows].double() / 255 for rows in (drawn.shots, drawn.rows))
    assert set(drawn.seen) == {"flip", "crop"}
    pictures = augment.apply(pictures, drawn.seen)
    logits = Network("mlp:width=8,depth=1", images.shape, 6).logits(state.encoder, pictures)
    if form == "unit":  # two pictures of each class, three images of each picture
        queries, each = logits / logits.square().sum(1, keepdim=True).sqrt(), 2 * 3
    else:
        queries, each = torch.stack([logits[:2].mean(0), logits[2:].mean(0)]).softmax(1), 3
    recalled = recall(state.bases, state.addressing, queries, (4, 4))
    labels = torch.tensor([0] * each + [1] * each)
    theta, velocity = {n: p.requires_grad_() for n, p in start.params.items()}, {n: 0 for n in start.params}
    for rows in start.batches:
        loss = network.loss(theta, recalled[rows], labels[rows])
        for name, g in zip(theta, torch.autograd.grad(loss, list(theta.values()), create_graph=True), strict=True):
            velocity[name] = config.inner.momentum * velocity[name] + g
        theta = {name: p - config.inner.lr * velocity[name] for name, p in theta.items()}
    total = network.loss(theta, real, drawn.truth)
    expected = torch.autograd.grad(total, [state.bases, state.addressing, *state.encoder.values()])
    assert abs(value - total.item()) < 1e-12
    assert len(found) == len(expected) == 6
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.norm() > 0
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-10


def test_asks_and_judges_with_different_images_of_the_same_classes():
    images = toy()
    config = resolve(ASKED, images)
    network = Network(config.inner.network, images.shape, 2)
    distiller = Distiller(images, config, Preprocess.fit(images.train.images), network)
    for step in range(30):
        drawn = distiller.draw(step, 3)
        asked, judged = images.train.labels[drawn.shots], images.train.labels[drawn.rows]
        assert asked.tolist() == drawn.labels.repeat_interleave(2).tolist()
        assert judged.tolist() == drawn.labels[drawn.truth].tolist()
        assert not set(drawn.shots.tolist()) & set(drawn.rows.tolist())
        for rows in drawn.objective[0].batches:  # of 2 classes, 2 shots and 3 matrices
            assert torch.bincount(rows // 6, minlength=2).tolist() == [4, 4]


def test_learns_to_answer(monkeypatch):
    """Asked with two pictures of each class it has never seen, a network trained on the answer tells the classes apart."""
    changes = {"outer_steps": 150, "inner_steps": 15, "inner_lr": 0.1, "outer_lr": 0.05, "init": "unit", "encoder_lr": 0.01}
    memory = distill(toy(), changed(ASKED, **changes))
    test = toy().test
    prepared = memory.preprocess()(test.images)
    shots = torch.cat([(test.labels == label).nonzero().flatten()[:2] for label in range(3)])
    recalled, rows = memory.recall(memory.encode(prepared[shots]))
    network = Network("mlp:width=8", (1, 4, 4), 3)
    recipe = recollect.Recipe(network="mlp:width=8", epochs=60, lr=0.1)
    (params,) = train(network, [(recalled, rows // 2)], recipe, [0])
    guesses = network.logits(params, prepared).argmax(1)
    assert (guesses == test.labels).float().mean() > 0.7


def test_file(asked, tmp_path):
    asked.save(tmp_path / "asked.safetensors")
    found = Memory.load(tmp_path / "asked.safetensors")
    assert found.header.query == {
        "encoder": "mlp:width=8,depth=1", "size": 6, "form": "unit", "ways": 2, "shots": 2,
    }  # fmt: skip
    assert found.header.budget["encoder"] == sum(p.numel() for p in asked.encoder.values()) == 16 * 8 + 8 + 8 * 6 + 6
    assert found.floats == found.header.budget["used"] == found.bases.numel() + 3 * 6 * 4
    assert all(torch.equal(p, found.encoder[name]) for name, p in asked.encoder.items())
    pictures = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    queries = found.encode(pictures)
    assert torch.allclose(queries.norm(dim=1), torch.ones(3))
    images, rows = found.recall(queries)
    assert images.shape == (9, 1, 4, 4)
    assert rows.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    again = found.with_accuracy({"network": "mlp", "on": "test", "mean": 1.0})
    assert torch.equal(again.encode(pictures), queries)


def test_pictures_of_a_class_asked_together(asked, tmp_path, capsys):
    """One query for all of them, however many: probabilities, which sum to 1. Files from before there were forms have none."""
    config = changed(ASKED, query_form="probabilities", query_size=3, inner_per_class=3)
    memory = distill(toy(), config)
    memory.save(tmp_path / "asked.safetensors")
    found = Memory.load(tmp_path / "asked.safetensors")
    assert main(["info", str(tmp_path / "asked.safetensors")]) == 0
    assert "3 images a group of pictures" in capsys.readouterr().out
    pictures = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    query = found.encode(pictures)
    assert query.shape == (1, 3)
    assert float(query.sum()) == pytest.approx(1)
    logits = Network("mlp:width=8,depth=1", (1, 4, 4), 3).logits(found.encoder, pictures)
    assert torch.allclose(query[0], logits.mean(0).softmax(0))
    groups = {"these": toy().test.images[:2], "those": toy().test.images[2:7]}
    assert ask(found, groups).labels.tolist() == [0, 0, 0, 1, 1, 1]
    with pytest.raises(RecollectError, match="has query form probabilities, this run unit: give a memory of the same kind"):
        resolve(changed(ASKED, query_size=3, start=str(tmp_path / "asked.safetensors")), toy())
    older = {name: value for name, value in asked.header.query.items() if name != "form"}
    older = Memory(asked.bases, asked.addressing, replace(asked.header, query=older), asked.encoder)
    assert torch.equal(older.encode(pictures), asked.encode(pictures))


def test_same_seed_same_bytes_also_when_resumed(tmp_path, monkeypatch):
    whole = distill(toy(), ASKED, run=tmp_path / "whole")
    step = Distiller.step

    def stop(self, state, signals):
        if state.step == 3:
            raise torch.OutOfMemoryError
        return step(self, state, signals)

    with monkeypatch.context() as patch:
        patch.setattr(Distiller, "step", stop)
        with pytest.raises(RecollectError):
            distill(toy(), ASKED, run=tmp_path / "run")
    distill(toy(), ASKED, run=tmp_path / "run", resume=True)
    names = [tmp_path / name / "memory.safetensors" for name in ("whole", "run")]
    assert names[0].read_bytes() == names[1].read_bytes()
    assert whole.encoder


def test_each_kind_of_query_in_its_place(asked):
    with pytest.raises(RecollectError, match="toy is asked with pictures, not with labels: use ask"):
        asked.recall("top")
    with pytest.raises(RecollectError, match="toy is asked with pictures"):
        recollect.evaluate(asked, toy(), networks=1)
    with pytest.raises(RecollectError, match="toy is asked with labels, not with pictures: name its classes"):
        distill(toy(), CONFIG).encode(torch.randn(1, 1, 4, 4))
    with pytest.raises(RecollectError, match=r"query vectors are \[2, 3\]: give \[Q, 6\]"):
        asked.recall(torch.eye(3)[:2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shots": 12}, "shots is 12, but a class has only 12 images: give at most 11"),
        ({"shots": 0}, "shots is 0: give 1 or more"),
        ({"matrices": 9999}, "matrices is 9999, but only .* fit beside 4 bases"),
        ({"addressing": "one-hot", "bases": None}, "one-hot addressing supports label queries only"),
        ({"classes_per_step": 4}, "classes_per_step is 4, but there are 3 classes"),
        ({"inner_per_class": 7}, "inner_per_class is 7, but each class recalls only 6 images"),
        ({"query_size": 1}, "query_size is 1: give 2 or more"),
        ({"encoder_lr": 0.0}, "encoder_lr is 0.0: give a number above 0"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(RecollectError, match=message):
        resolve(changed(ASKED, **change), toy())


@pytest.mark.parametrize("damage", ["none", "shape", "more", "not finite", "huge"])
def test_a_damaged_encoder_is_noticed(asked, tmp_path, damage):
    path = tmp_path / "asked.safetensors"
    memory = Memory(asked.bases, asked.addressing, asked.header, dict(asked.encoder))
    memory.save(path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(path)
    name = next(name for name in tensors if name.startswith("encoder."))
    if damage == "none":
        tensors = {name: t for name, t in tensors.items() if not name.startswith("encoder.")}
    elif damage == "shape":
        tensors[name] = tensors[name][:-1].clone()
    elif damage == "more":
        tensors["encoder.other"] = torch.zeros(2)
    elif damage == "not finite":
        tensors[name][0] = torch.nan
    else:
        metadata = {"recollect": metadata["recollect"].replace("mlp:width=8,depth=1", "mlp:width=99999999")}
    header = sys.modules["recollect.header"].parse(metadata["recollect"], path)
    checksum = sys.modules["recollect.memory"]._checksum(tensors)
    safetensors.torch.save_file(tensors, path, {"recollect": replace(header, checksum=checksum).to_json()})
    with pytest.raises(RecollectError, match=r"damaged|not finite"):
        Memory.load(path)


def test_header_names_a_query_or_none(asked, tmp_path):
    odd = {"encoder": "mlp", "size": 6, "ways": 2, "shots": 2, "form": "round"}
    for query in (odd, {"encoder": "mlp"}, {"encoder": 1, "size": 6, "ways": 2, "shots": 2}, [], {"size": 6}):
        with pytest.raises(RecollectError, match="header's 'query' cannot be"):
            Memory(asked.bases, asked.addressing, replace(asked.header, query=query), asked.encoder)
    asked.save(tmp_path / "asked.safetensors")
    assert read_header(tmp_path / "asked.safetensors")[0].query["shots"] == 2


def test_an_encoder_that_first_learns_to_name_classes(tmp_path, monkeypatch):
    """It names the training images; it is taught once, however often the run is stopped and goes on."""
    images, taught = toy(), []
    config = changed(ASKED, encoder_epochs=200, encoder_lr=1e-9, outer_steps=3)
    memory = distill(images, config)
    assert not torch.equal(
        memory.encoder["1.weight"], distill(images, changed(config, encoder_augment="flip")).encoder["1.weight"]
    )
    shown = memory.preprocess(images)(images.train.images)
    named = memory.encode(shown)[:, : images.classes].argmax(1)
    assert (named == images.train.labels).float().mean() > 0.9
    assert (distill(images, ASKED).encode(shown)[:, : images.classes].argmax(1) == images.train.labels).float().mean() < 0.7

    real = Distiller.teach
    monkeypatch.setattr(Distiller, "teach", lambda *given: (taught.append(1), real(*given)))

    def stop(line):
        raise KeyboardInterrupt

    config = changed(config, checkpoint_seconds=0.0)
    with pytest.raises(KeyboardInterrupt):
        distill(images, config, run=tmp_path / "run", progress=lambda line: stop(line) if line["step"] == 2 else None)
    resumed = distill(images, config, run=tmp_path / "run", resume=True)
    assert len(taught) == 1
    assert all(torch.equal(resumed.encoder[name], p) for name, p in memory.encoder.items())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"query_size": 2, "encoder_epochs": 1}, "query_size is 2, too small for an encoder that learns to name"),
        ({"query": "labels", "encoder_epochs": 1}, "encoder_epochs is 1, and a memory that is asked with labels has no"),
        ({"encoder_epochs": -1}, "encoder_epochs is -1: give 0 or more"),
        ({"encoder_augment": "flop"}, "unknown augmentation 'flop'"),
        ({"query": "labels", "encoder_augment": "flip"}, "encoder_augment is flip, and a memory that is asked with labels"),
        (
            {"query": "labels", "query_form": "probabilities"},
            "query_form is probabilities, and a memory that is asked with labels",
        ),
    ],
)
def test_an_encoder_that_cannot_be_taught(changes, error):
    with pytest.raises(RecollectError, match=error):
        distill(toy(), changed(ASKED, **changes))


def test_an_encoder_that_was_taught_before(asked, tmp_path):
    asked.save(tmp_path / "asked.safetensors")
    config = changed(ASKED, start=str(tmp_path / "asked.safetensors"), encoder_epochs=1)
    with pytest.raises(RecollectError, match=r"asked\.safetensors has an encoder that has learnt: leave out"):
        distill(toy(), config)


def test_a_memory_of_labels_goes_on_with_pictures(tmp_path):
    """It answers as before what the taught encoder is sure of; what it learns then starts there."""
    images, path = toy(), tmp_path / "labels.safetensors"
    labels = distill(images, changed(ASKED, query="labels", inner_per_class=3, outer_steps=2))
    labels.save(path)
    probabilities = {"query_form": "probabilities", "query_size": images.classes, "matrices": None, "start": str(path)}
    config = changed(ASKED, **probabilities, inner_per_class=3, encoder_epochs=200, encoder_lr=1e-9, outer_lr=1e-9, outer_steps=1)
    asked = distill(images, config)
    assert asked.encoder
    assert torch.allclose(asked.bases, labels.bases, atol=1e-6)
    assert torch.allclose(asked.addressing, labels.addressing, atol=1e-6)
    assert asked.header.made["start"] == labels.header.made
    shown = asked.preprocess(images)(images.train.images)
    for label in range(images.classes):
        query = asked.encode(shown[images.train.labels == label])
        assert query.shape == (1, images.classes)
        assert query.argmax() == label
    for change, message in (
        ({"encoder_epochs": 0}, r"labels\.safetensors is asked with labels: to go on .* give query_form probabilities"),
        ({"query_form": "unit"}, "give query_form probabilities, query_size 3, and encoder_epochs"),
        ({"query_size": images.classes + 1}, "give query_form probabilities, query_size 3, and encoder_epochs"),
    ):
        with pytest.raises(RecollectError, match=message):
            distill(images, changed(config, **change))


def test_matrices_without_bases_leave_room_for_them():
    assert resolve(changed(ASKED, bases=None, matrices=9), toy()).memory.matrices == 9
