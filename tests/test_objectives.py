"""Objectives that match real images: gradients against float64 full-graph autograd, state, resume, experts, what is refused."""

import os
import shutil
import signal

import pytest
import torch
from test_distillation import CONFIG, toy
from torch.func import functional_call
from torch.nn import functional as F

import recollect
from recollect import Recipe, RecollectError, distill, minutes
from recollect.cli import main
from recollect.config import Matching, changed
from recollect.data import augment
from recollect.experts import train_experts
from recollect.fast.cpu import CpuConvNet
from recollect.fast.engine import Engine
from recollect.nets import Network
from recollect.objectives import Chance, Examples, Source
from recollect.objectives.distributions import Distributions
from recollect.objectives.gradients import SMALLEST, Gradients
from recollect.objectives.trajectories import Expert, Trajectories
from recollect.runs import Run, Stopped

NETWORK = "convnet:width=4,depth=1"
LABELS = torch.arange(3).repeat_interleave(5)
EXPERTS = Recipe("mlp:width=8", epochs=4, batch=8, lr=0.05, momentum=0.0)
MATCHING = ("gradients", "distributions", "trajectories")


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    train_experts(toy(), folder, EXPERTS, count=2)
    return folder


def settings(name: str, experts, **changes):
    own = {"experts": str(experts)} if name == "trajectories" else {}
    return changed(CONFIG, objective=name, inner_momentum=0.5, **own | changes)


def examples(labels: torch.Tensor, seed: int) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    return Examples(torch.randn(len(labels), 1, 4, 4, generator=generator, dtype=torch.float64), labels)


def chance(shared=None) -> Chance:
    return Chance(lambda number: torch.Generator().manual_seed(number), torch.Generator().manual_seed(9), shared or {})


@pytest.fixture
def in_double(monkeypatch):
    fresh = Network.fresh
    monkeypatch.setattr(Network, "fresh", lambda self, *given: {n: p.double() for n, p in fresh(self, *given).items()})


# --- gradients and distributions against one graph of the formula ------------------------------------------------------------


def sides(drawn, images, real, place):
    """Recalled and real images of a class as they are seen, by the draws of an objective."""
    rows, label = drawn.rows[place], int(LABELS[drawn.rows[place][0]])
    ours, theirs = images[rows], real.images[real.labels == label]
    ours, theirs = (augment.apply(each, drawn.shared[place]) for each in (ours, theirs))
    return label, augment.apply(ours, drawn.own[place]), theirs


@pytest.mark.parametrize(
    ("siamese", "names", "shared"),
    [(False, "none", {}), (False, "crop+rotate", {}), (True, "scale+flip", {}), (False, "flip", {"flip": torch.zeros(1, 2)})],
)
@pytest.mark.parametrize("network", [NETWORK, "mlp:width=6"])
def test_gradients_are_autograd_s(in_double, network, siamese, names, shared):
    inner = changed(CONFIG.inner, augment=names, inner_per_class=2)
    objective = Gradients(Network(network, (1, 4, 4), 3), inner, "cpu", matching=Matching(siamese=siamese))
    recalled, real = examples(LABELS, 0), examples(torch.arange(12) % 3, 1)
    drawn = objective.draw(LABELS, chance(shared))
    found = objective.gradient(recalled, real, drawn)
    assert all(bool(each) == siamese for each in drawn.pairing.shared)
    assert all(bool(each) == (not siamese and names != "none") for each in drawn.pairing.own)

    images, params = recalled.images.clone().requires_grad_(), objective.network.fresh(drawn.seed)
    theta, value = {name: p.requires_grad_() for name, p in params.items()}, 0
    for place in range(3):
        label, *both = sides(drawn.pairing, images, real, place)
        slopes = []
        for each in both:
            logits = functional_call(objective.network.module, theta, (each,))
            loss = F.cross_entropy(logits, torch.full((len(each),), label))
            slopes.append(torch.autograd.grad(loss, list(theta.values()), create_graph=True))
        for ours, theirs in zip(*slopes, strict=True):
            if ours.ndim > 1:
                for one, other in zip(ours.flatten(1), theirs.flatten(1).detach(), strict=True):
                    value = value + 1 - (one @ other) / (one.norm() * other.norm() + SMALLEST)
    (expected,) = torch.autograd.grad(value, images)
    assert found.value.item() == pytest.approx(value.item(), rel=1e-10)
    torch.testing.assert_close(found.images, expected, rtol=1e-8, atol=1e-12)
    assert (expected.flatten(1).norm(dim=1) > 0).sum() == 6  # two of each class were drawn


@pytest.mark.parametrize(("siamese", "names"), [(False, "none"), (False, "crop"), (True, "scale+crop")])
def test_distributions_are_autograd_s(in_double, siamese, names):
    inner = changed(CONFIG.inner, augment=names, inner_per_class=3, networks_per_step=2)
    objective = Distributions(Network(NETWORK, (1, 4, 4), 3), inner, "cpu", matching=Matching(siamese=siamese))
    recalled, real = examples(LABELS, 0), examples(torch.arange(12) % 3, 1)
    drawn = objective.draw(LABELS, chance())
    found = objective.gradient(recalled, real, drawn)

    images, value = recalled.images.clone().requires_grad_(), 0
    for each in drawn:
        layers = objective.network.module[:-1]
        params = {name: each.params[name] for name, _ in layers.named_parameters()}
        for place in range(3):
            _, ours, theirs = sides(each.pairing, images, real, place)
            far = functional_call(layers, params, (ours,)).mean(0) - functional_call(layers, params, (theirs,)).mean(0)
            value = value + far.square().sum() / 2
    (expected,) = torch.autograd.grad(value, images)
    assert found.value.item() == pytest.approx(value.item(), rel=1e-10)
    torch.testing.assert_close(found.images, expected, rtol=1e-8, atol=1e-12)
    first, second = objective.by_network(recalled, real, drawn)
    assert first.value != second.value
    torch.testing.assert_close((first.images + second.images) / 2, found.images)


def test_the_network_is_trained_between_outer_steps_and_replaced(in_double):
    """By torch's own SGD on what is recalled then; what was held before a step stays."""
    inner = changed(CONFIG.inner, inner_per_class=2, inner_lr=0.1, inner_momentum=0.9)
    objective = Gradients(Network("mlp:width=6", (1, 4, 4), 3), inner, "cpu", matching=Matching(network_lasts=2, network_steps=3))
    real, first, second = examples(torch.arange(12) % 3, 1), examples(LABELS, 0), examples(LABELS, 2)
    begun = objective.draw(LABELS, chance())
    objective.gradient(first, real, begun)
    before = objective.to_dict()
    kept = {name: p.clone() for name, p in before["params"].items()}
    assert before["age"] == 1
    drawn = objective.draw(LABELS, chance())
    trained = objective._trained(second, drawn)
    theta = {name: p.clone().requires_grad_() for name, p in objective.network.fresh(begun.seed).items()}
    optimiser = torch.optim.SGD(theta.values(), 0.1, momentum=0.9)
    for rows in drawn.rows:
        optimiser.zero_grad()
        objective.network.loss(theta, second.images[rows], LABELS[rows]).backward()
        optimiser.step()
    for name, p in theta.items():
        torch.testing.assert_close(trained["params"][name], p.detach())
    objective.gradient(second, real, drawn)
    assert objective.to_dict() == {}  # two outer steps: the next has a fresh one
    assert all(torch.equal(before["params"][name], p) for name, p in kept.items())
    objective.load(before)
    assert objective.to_dict()["age"] == 1


def test_a_dead_unit_has_no_direction(in_double):
    """Rows of a gradient that are 0 give a distance of 1 and no NaN."""
    objective = Gradients(Network("mlp:width=6", (1, 4, 4), 3), CONFIG.inner, "cpu")
    dead = objective.network.fresh(0)
    dead["1.weight"][0], dead["1.bias"][0] = 0.0, -1.0
    objective.state = {"params": dead, "velocity": {}, "age": 0}
    found = objective.gradient(examples(LABELS, 0), examples(torch.arange(12) % 3, 1), objective.draw(LABELS, chance()))
    assert found.images.isfinite().all()


# --- trajectories --------------------------------------------------------------------------------------------------------------


def source() -> Source:
    images = toy()
    return Source(images.train.fingerprint, recollect.Preprocess.fit(images.train.images).to_json())


def made(folder, network="mlp:width=8", **changes) -> Trajectories:
    inner = changed(CONFIG.inner, inner_per_class=2, inner_momentum=0.5, **changes)
    matching = Matching(experts=str(folder), expert_epochs=2, expert_starts=2)
    return Trajectories(Network(network, (1, 4, 4), 3), inner, "cpu", matching=matching, source=source())


def oracle(objective, recalled, drawn):
    """One graph over inner loops from experts' weights, read from their files by hand."""
    from safetensors.torch import load_file

    tables = [load_file(path) for path in sorted(objective.experts[0].path.parent.glob("*.safetensors"))]
    images, value, inner = recalled.images.clone().requires_grad_(), 0, objective.unrolled.inner
    kept = images
    for leg in drawn:
        begins = {name: p.double() for name, p in leg.start.params.items()}
        at = [(n, e) for n, t in enumerate(tables) for e in range(2) if all(torch.equal(t[k][e].double(), begins[k]) for k in t)]
        ((number, epoch),) = at
        goal = {name: table[epoch + 2].double() for name, table in tables[number].items()}
        theta = {name: p.clone().requires_grad_() for name, p in begins.items()}
        velocity = {name: torch.zeros_like(p) for name, p in theta.items()}
        for t, rows in enumerate(leg.start.batches):
            if inner.window and t == len(leg.start.batches) - inner.window:
                theta = {name: p.detach().requires_grad_() for name, p in theta.items()}
                velocity = {name: v.detach() for name, v in velocity.items()}
            inside = not inner.window or t >= len(leg.start.batches) - inner.window
            batch = (kept if inside else kept.detach())[rows]
            if leg.start.augment:
                batch = leg.start.augment(batch, t)
            loss = objective.unrolled.network.loss(theta, batch, recalled.labels[rows])
            slopes = torch.autograd.grad(loss, list(theta.values()), create_graph=True)
            for name, slope in zip(list(theta), slopes, strict=True):
                velocity[name] = inner.momentum * velocity[name] + slope
                theta[name] = theta[name] - inner.lr * velocity[name]
        way = sum((goal[name] - begins[name]).square().sum() for name in goal)
        value = value + sum((theta[name] - goal[name]).square().sum() for name in goal) / way / len(drawn)
    return value, torch.autograd.grad(value, images)[0]


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize(
    "changes", [{}, {"window": 2}, {"augment": "crop"}, {"networks_per_step": 3}, {"networks_per_step": 2, "window": 1}]
)
def test_trajectories_are_autograd_s(experts, monkeypatch, engine, changes):
    """By unroll.py, and by the engine of a GPU with its steps uncaptured."""
    weights = Expert.weights
    monkeypatch.setattr(Expert, "weights", lambda self, epoch: {n: p.double() for n, p in weights(self, epoch).items()})
    objective = made(experts, **changes)
    if engine:
        objective.unrolled.engine = Engine(objective.unrolled.flat)
    recalled = examples(LABELS, 0)
    drawn = objective.draw(LABELS, chance())
    assert len(drawn) == changes.get("networks_per_step", 1)
    found = objective.gradient(recalled, examples(LABELS, 1), drawn)
    value, expected = oracle(objective, recalled, drawn)
    assert found.value.item() == pytest.approx(value.item(), rel=1e-10)
    torch.testing.assert_close(found.images, expected, rtol=1e-8, atol=1e-13)
    assert expected.abs().sum() > 0


def test_trajectories_of_a_convnet_by_hand(tmp_path):
    """The CPU's own passes, in float32."""
    images, name = recollect.load("digits").only(["0", "1", "2"]), "convnet:width=16,depth=1"
    train_experts(images, tmp_path, changed(EXPERTS, network=name, epochs=3), count=1)
    inner, matching = changed(CONFIG.inner, inner_per_class=2), Matching(experts=str(tmp_path), expert_starts=2)
    prepared = recollect.Preprocess.fit(images.train.images)
    given = {"matching": matching, "source": Source(images.train.fingerprint, prepared.to_json())}
    objective = Trajectories(Network(name, images.shape, 3), inner, "cpu", "fp32", **given)
    assert isinstance(objective.unrolled.flat.flat, CpuConvNet)
    recalled = Examples(prepared(images.validation.images[:15]), LABELS)
    drawn = objective.draw(LABELS, chance())
    found = objective.gradient(recalled, recalled, drawn)
    value, expected = oracle(objective, recalled._replace(images=recalled.images.double()), drawn)
    assert found.value.item() == pytest.approx(value.item(), rel=1e-4)
    assert float((found.images - expected).norm() / expected.norm()) < 1e-3


def test_experts_are_made_once(tmp_path, experts):
    """The same bytes again; what is there stays; they learn; epoch 0 is fresh."""
    train_experts(toy(), tmp_path, EXPERTS, count=1)
    first, second = sorted(experts.iterdir())[:2]
    assert (tmp_path / first.name).read_bytes() == first.read_bytes()
    train_experts(toy(), tmp_path, EXPERTS, count=2)
    assert (tmp_path / second.name).read_bytes() == second.read_bytes()
    expert, network = Expert.open(first), Network("mlp:width=8", (1, 4, 4), 3)
    assert expert.epochs == 4
    fresh = network.fresh(expert.about["seed"])
    assert all(torch.equal(p, fresh[name]) for name, p in expert.weights(0).items())
    prepared = recollect.Preprocess.fit(toy().train.images)(toy().train.images)
    losses = [float(network.loss(expert.weights(epoch), prepared, toy().train.labels)) for epoch in range(5)]
    assert losses == sorted(losses, reverse=True)
    trained = recollect.training.train(network, [(prepared, toy().train.labels)], EXPERTS, [expert.about["seed"]])[0]
    assert all(torch.equal(p, trained[name]) for name, p in expert.weights(4).items())
    with pytest.raises(RecollectError, match=r"expert-000\.safetensors was made with another recipe: give another folder"):
        train_experts(toy(), tmp_path, changed(EXPERTS, lr=0.1), count=1)
    with pytest.raises(RecollectError, match="number of experts is 0"):
        train_experts(toy(), tmp_path, EXPERTS, count=0)
    with pytest.raises(RecollectError, match=r"expert 0 diverged: lower its learning rate \(1000"):
        train_experts(toy(), tmp_path / "wild", changed(EXPERTS, lr=1000.0, epochs=40), count=1)


def broken(folder, tmp_path, change):
    shutil.copytree(folder, tmp_path / "experts", ignore=shutil.ignore_patterns(".lock"))
    path = tmp_path / "experts" / "expert-000.safetensors"
    path.write_bytes(change(bytearray(path.read_bytes())))
    return tmp_path / "experts"


def flipped(data):
    """The lowest bit of the last byte of every weight's last tensor."""
    for place in range(len(data) - 400, len(data), 4):
        data[place] ^= 1
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-40], r"expert-000\.safetensors is damaged or not a expert trajectory of recollect"),
        (lambda data: data.replace(b'\\"fingerprint\\"', b'\\"fingerprimt\\"'), "its header lacks a field"),
        (lambda data: b"nonsense", "not a whole .safetensors file"),
        (flipped, r"the weights of epoch \d do not match their checksum"),
    ],
)
def test_damaged_experts_are_one_clear_line(experts, tmp_path, change, message):
    folder = broken(experts, tmp_path, change)
    (folder / "expert-001.safetensors").unlink()
    with pytest.raises(RecollectError, match=message) as caught:
        distill(toy(), settings("trajectories", folder))
    assert "\n" not in str(caught.value)


def test_experts_of_something_else_are_one_clear_line(experts, tmp_path):
    config = settings("trajectories", experts)
    for images, changes, message in (
        (toy(), {"network": "mlp:width=9"}, r"is of another network \(mlp:width=8 for toy\): give --network as it has it"),
        (toy(seed=1), {}, r"was trained on other images \(toy\): make experts of these"),
        (toy(), {"use_validation": True}, "was trained on other images"),
        (toy(), {"preprocess": "zca"}, "was trained on images that were prepared otherwise: give --preprocess"),
        (toy(), {"expert_epochs": 5}, r"expert_epochs is 5, but .* has 4 epochs: give at most that"),
        (toy(), {"experts": str(tmp_path)}, "holds no experts: make some"),
        (toy(), {"experts": None}, r"objective trajectories needs experts: make them by recollect experts DATA"),
        (toy(), {"objective": "gradients"}, "experts are for the objective trajectories, and this one is gradients"),
    ):
        with pytest.raises(RecollectError, match=message):
            distill(images, changed(config, **changes), run=tmp_path / "run")
        assert not (tmp_path / "run" / "config.json").exists()  # nothing is begun


def test_a_run_goes_on_with_the_experts_it_was_begun_with(experts, tmp_path):
    shutil.copytree(experts, tmp_path / "experts", ignore=shutil.ignore_patterns(".lock"))
    config = settings("trajectories", tmp_path / "experts")
    with pytest.raises(Stopped):
        distill(toy(), config, run=tmp_path / "run", progress=stop_after(3))
    (tmp_path / "experts" / "expert-001.safetensors").unlink()
    with pytest.raises(RecollectError, match="had other experts when this run was begun: put them back"):
        distill(toy(), config, run=tmp_path / "run", resume=True)


# --- as objectives ---------------------------------------------------------------------------------------------------------


def stop_after(step):
    def stop(line):
        if line["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return stop


@pytest.mark.parametrize(
    "changes",
    [{}, {"addressing": "one-hot", "bases": None}, {"augment": "crop+flip"}, {"augment": "crop+scale", "augment_scope": "outer"}],
    ids=["learned", "one-hot", "augmented", "shared"],
)
@pytest.mark.parametrize("objective", MATCHING)
def test_resumes_bit_for_bit(experts, objective, changes, tmp_path):
    config = settings(objective, experts, **changes)
    if objective == "gradients":
        config = changed(config, network_lasts=4, network_steps=2)
    if objective == "distributions" and changes.get("augment") == "crop+flip":
        config = changed(config, siamese=True)
    distill(toy(), config, run=tmp_path / "whole")
    with pytest.raises(Stopped):
        distill(toy(), config, run=tmp_path / "parts", progress=stop_after(3))
    distill(toy(), config, run=tmp_path / "parts", resume=True)
    memories = [(tmp_path / folder / "memory.safetensors").read_bytes() for folder in ("parts", "whole")]
    assert memories[0] == memories[1]


@pytest.mark.parametrize("addressing", ["learned", "one-hot"])
@pytest.mark.parametrize("objective", MATCHING)
def test_learns_and_goes_on_from_another_objective_s_memory(experts, objective, addressing, tmp_path):
    """Begun by distributions (or gradients), gone on with by each; its own value falls."""
    sizes = {"addressing": addressing, "bases": 4 if addressing == "learned" else None}
    first = settings("gradients" if objective == "distributions" else "distributions", experts, outer_steps=10, **sizes)
    distill(toy(), first).save(tmp_path / "first.safetensors")
    config = settings(objective, experts, outer_steps=60, outer_lr=0.05, start=str(tmp_path / "first.safetensors"), **sizes)
    config = changed(config, inner_lr=0.05, inner_steps=10, real_per_class=12)
    if objective == "distributions":
        config = changed(config, networks_per_step=4)
    lines = []
    memory = distill(toy(), config, progress=lines.append)
    assert memory.header.made["start"]["config"]["objective"] == first.outer.objective
    values = [line["loss"] for line in lines if line["loss"] is not None]
    assert sum(values[-10:]) < 0.9 * sum(values[:10])
    assert recollect.evaluate(memory, toy(), networks=2, recipe=Recipe("mlp:width=8", lr=0.1)).mean > 60


@pytest.mark.parametrize("objective", MATCHING)
def test_pictures_and_query_kinds_of_ones_own(experts, objective, tmp_path):
    from test_seams import TwoNumbers

    config = settings(objective, experts, outer_steps=2, images_per_class=8)
    distill(toy(), config, query=TwoNumbers)
    if objective == "trajectories":  # experts tell the classes by their labels: as many as there are
        config = changed(config, classes_per_step=3)
    memory = distill(toy(), changed(config, query="images", query_size=4, shots=2, bases=2))
    assert memory.encoder


@pytest.mark.parametrize("objective", MATCHING)
def test_minutes_leave_the_objective_as_it_was_asked_for(experts, objective, tmp_path, monkeypatch):
    monkeypatch.setattr(minutes, "seconds_a_step", lambda distiller, least: 10.0)
    distill(toy(), settings(objective, experts, minutes=1.0), run=tmp_path / "run")
    found = Run(tmp_path / "run").settings["distill"]
    assert (found["objective"], found["network"], found["outer_steps"]) == (objective, "mlp:width=8", 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "unrolled", "siamese": True}, "siamese is for the objectives gradients and distributions"),
        ({"objective": "gradients", "siamese": True}, r"siamese draws one of several augmentations .*: give --augment"),
        ({"objective": "gradients", "networks_per_step": 2}, "networks_per_step is for objectives without a state"),
        ({"objective": "gradients", "network_lasts": 0}, "network_lasts is 0: give 1 or more"),
        ({"objective": "nonsense"}, "unknown objective 'nonsense'"),
    ],
)
def test_settings_that_cannot_be_meant(changes, message):
    with pytest.raises(RecollectError, match=message):
        distill(toy(), changed(CONFIG, **changes))


@pytest.mark.parametrize("per_class", [1, 10, 50])
def test_how_long_a_network_lasts_follows_the_budget(per_class):
    from recollect.decisions import resolve

    found = resolve(changed(CONFIG, objective="gradients", images_per_class=per_class, bases=None), toy(60)).matching
    assert (found.network_lasts, found.network_steps) == {1: (1, 50), 10: (10, 50), 50: (50, 10)}[per_class]


@pytest.mark.parametrize("objective", ["gradients", "distributions"])
def test_continuous_targets_have_no_classes_to_compare(objective):
    net = Network(NETWORK, (1, 4, 4), 2, criterion=recollect.nets.squared_error)
    made = {"gradients": Gradients, "distributions": Distributions}[objective](net, CONFIG.inner, "cpu")
    with pytest.raises(RecollectError, match="these targets are continuous: give objective unrolled"):
        made.draw(torch.randn(6, 2), chance())


def test_on_the_command_line(tmp_path, monkeypatch, capsys):
    """Experts, then a memory that is matched to them; the folder's name says which data."""
    monkeypatch.chdir(tmp_path)
    assert main(["experts", "digits", "--network", "mlp:width=8", "--epochs", "3", "--count", "1", "--quiet"]) == 0
    assert "1 experts of 3 epochs in experts/digits" in capsys.readouterr().out
    line = "distill digits --network mlp:width=8 --bases 6 --downsample 1 --inner-steps 2 --window 2 --outer-steps 2 --quiet"
    given = {"trajectories": "--experts experts/digits --expert-epochs 1", "gradients": "--siamese --augment crop+rotate"}
    for name in MATCHING:
        assert main([*line.split(), "--objective", name, *given.get(name, "").split(), "--out", name]) == 0
        assert main(["resume", name, "--quiet"]) == 0
    assert main([*line.split(), "--objective", "trajectories", "--out", "lost"]) == 2
    assert "error: objective trajectories needs experts" in capsys.readouterr().err
