"""Algorithm 1: gradients, determinism, resume by killing the process, what is never looked at, and what goes wrong."""

import json
import math
import os
import random
import shlex
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import recollect
from recollect import Images, Memory, RecollectError, Split, distill, unroll
from recollect.config import PAPER, changed, preset
from recollect.data.preprocess import Preprocess
from recollect.decisions import resolve
from recollect.distiller import Distiller
from recollect.fast import passes
from recollect.fast.engine import Engine
from recollect.files import held
from recollect.memory import recall
from recollect.nets import Network
from recollect.objectives import seam
from recollect.objectives.unrolled import Unrolled
from recollect.outer import BACK, MOST_SKIPS, share
from recollect.runs import Run, Stopped, load_checkpoint, save_checkpoint

module = sys.modules["recollect.distillation"]

CONFIG = preset(
    "fast",
    network="mlp:width=8",
    bases=4,
    downsample=1,
    inner_steps=4,
    window=None,
    outer_steps=6,
    real_per_class=5,
    images_per_class=2,
)


def toy(count: int = 12, seed: int = 0) -> Images:
    """Three classes of 4x4 grey images, each with a bright row of its own."""
    generator = torch.Generator().manual_seed(seed)

    def split(each: int) -> Split:
        labels = torch.arange(3).repeat(each)
        images = torch.randint(0, 120, (3 * each, 1, 4, 4), generator=generator)
        images[torch.arange(3 * each), 0, labels] += 130
        return Split(images.to(torch.uint8), labels)

    return Images("toy", split(count), split(3), split(3), ("top", "middle", "bottom"))


def file_bytes(memory: Memory, path) -> bytes:
    memory.save(path)
    return path.read_bytes()


def test_outer_gradient_is_that_of_the_whole_algorithm(monkeypatch):
    """dJ/dA and dJ/dB of one outer step against one float64 graph from the memory to the real images' loss."""
    images = toy()
    config = resolve(changed(CONFIG, inner_per_class=2, networks_per_step=2, classes_per_step=2), images)
    network = Network(config.inner.network, images.shape, images.classes)
    preprocess = Preprocess.fit(images.train.images)
    distiller = Distiller(images, config, preprocess, network)
    state = distiller.begin()
    state.bases, state.addressing = (t.detach().double().requires_grad_() for t in (state.bases, state.addressing))
    monkeypatch.setattr(Preprocess, "__call__", lambda self, pixels: pixels.double() / 255)
    monkeypatch.setattr(
        Network,
        "fresh",
        lambda self, seed, device="cpu": {n: p.detach().double() for n, p in self._build(seed).named_parameters()},
    )
    seen = []
    real = unroll.metagradient
    monkeypatch.setattr(unroll, "metagradient", lambda *a, **k: (seen.append((a, k)), real(*a, **k))[1])
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    value, found = distiller.gradient(state)

    total = 0
    for (loss, params, _, labels, batches, query), options in seen:
        chosen = labels.view(2, -1)[:, 0]
        assert set(query[1].tolist()) == set(chosen.tolist())
        images_ = recall(state.bases, state.addressing, nn.functional.one_hot(chosen, 3).double(), (4, 4))
        theta, velocity = {n: p.requires_grad_() for n, p in params.items()}, {n: 0 for n in params}
        for rows in batches:
            gradient = torch.autograd.grad(loss(theta, images_[rows], labels[rows]), list(theta.values()), create_graph=True)
            for name, g in zip(list(theta), gradient, strict=True):
                velocity[name] = options["momentum"] * velocity[name] + g
                theta[name] = theta[name] - options["lr"] * velocity[name]
        total = total + loss(theta, *query) / 2
    assert len(seen) == 2
    expected = torch.autograd.grad(total, [state.bases, state.addressing])
    assert abs(value - total.item()) < 1e-12
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-10


def unrolled(config) -> Unrolled:
    return Unrolled(Network(config.inner.network, (1, 4, 4), 3), config.inner, "cpu")


def test_inner_batches_are_balanced_and_come_pass_by_pass():
    """None of a class comes again before the others."""
    objective = unrolled(resolve(changed(CONFIG, inner_per_class=2, bases=2), toy()))
    labels = torch.arange(3).repeat_interleave(5)
    batches = seam.batches(labels, 10, objective.inner.per_class, torch.Generator().manual_seed(0))
    assert batches.shape == (10, 6)
    for rows in batches:
        assert torch.bincount(rows // 5, minlength=3).tolist() == [2, 2, 2]
    of_first = batches[:, :2].flatten().view(4, 5)
    assert [sorted(rows.tolist()) for rows in of_first] == [[0, 1, 2, 3, 4]] * 4


def test_random_window_ends_anywhere_from_full():
    objective = unrolled(resolve(changed(CONFIG, inner_steps=6, window=2, window_place="random"), toy()))
    lengths = {objective._length(torch.Generator().manual_seed(seed)) for seed in range(200)}
    assert lengths == {2, 3, 4, 5, 6}


def test_learns(tmp_path):
    """The loss falls, and networks trained on the memory beat chance by far."""
    losses = []
    config = changed(CONFIG, outer_steps=60, inner_steps=15, inner_lr=0.1, outer_lr=0.05, init="unit")
    memory = distill(toy(), config, progress=lambda line: losses.append(line["loss"]))
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert recollect.evaluate(memory, toy(), networks=3).mean > 80


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"addressing": "one-hot", "bases": None},
        {"precision": "bfloat16"},
        {"augment": "flip+rotate+crop", "window": 2, "window_place": "random"},
        {"augment": "flip+rotate", "augment_scope": "outer", "outer_optimiser": "sgd", "ema": 0.0},
        {"classes_per_step": 2, "networks_per_step": 2, "clip_norm": 0.01, "inner_optimiser": "adam", "inner_lr": 1e-3},
        {"preprocess": "zca", "init": "kaiming", "outer_schedule": "constant"},
    ],
    ids=lambda changes: "-".join(changes) or "default",
)
def test_same_seed_same_bytes_also_when_resumed(changes, tmp_path):
    config = changed(CONFIG, **changes)
    whole = distill(toy(), config, run=tmp_path / "whole")
    assert file_bytes(distill(toy(), config), tmp_path / "a") == (tmp_path / "whole" / "memory.safetensors").read_bytes()
    other = distill(toy(), changed(config, seed=1))
    assert not torch.equal(other.bases, whole.bases)

    assert load_checkpoint(stopped(tmp_path / "parts", **changes))["state"]["step"] == 3
    assert (tmp_path / "parts" / "memory.safetensors").exists()
    distill(toy(), config, run=tmp_path / "parts", resume=True)
    memories = [(tmp_path / folder / "memory.safetensors").read_bytes() for folder in ("parts", "whole")]
    assert memories[0] == memories[1]
    assert [line["step"] for line in Run(tmp_path / "parts").metrics()] == [1, 2, 3, 4, 5, 6]


KILLED = """
import os, signal, sys
from recollect.cli import main

left, folder = int(sys.argv[1]), sys.argv[2]

def strike(event, arguments):
    global left
    if event in ("open", "os.rename") and folder in str(arguments[0]):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(strike)
main(sys.argv[3:])
"""
"""recollect, killed when it has touched so many files of its run"""


def test_killed_at_random_moments_and_resumed(tmp_path):
    """SIGKILL, again and again, just before a file is opened or renamed: the end is the bytes of an uninterrupted run."""
    base = [sys.executable, "-W", "ignore"]
    settings = shlex.split(
        "--network mlp:width=8 --bases 6 --downsample 1 --inner-steps 12 --window None --outer-steps 40 --real-per-class 20 "
        "--checkpoint-seconds 0 --device cpu --quiet --out"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    whole = [*base, "-m", "recollect", "distill", "digits", *settings, tmp_path / "whole"]
    subprocess.run(whole, check=True, env=environment, capture_output=True)
    folder, moments = tmp_path / "killed", random.Random(0)
    command = ["distill", "digits", *settings, folder]
    for _ in range(3):
        moment = str(moments.randint(4, 30))
        done = subprocess.run([*base, "-c", KILLED, moment, folder, *command], env=environment, capture_output=True)
        assert done.returncode == -signal.SIGKILL
        command = ["resume", folder, "--quiet"]
    done = subprocess.run([*base, "-m", "recollect", *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    memories = [(tmp_path / name / "memory.safetensors").read_bytes() for name in ("killed", "whole")]
    assert memories[0] == memories[1]
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 41))
    assert not list(folder.glob(".*tmp"))


def stopped(folder: Path, **changes) -> Path:
    """A run that was stopped after three steps; returns its checkpoint."""

    def stop_after_three(line):
        if line["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="step 3"):
        distill(toy(), changed(CONFIG, **changes), run=folder, progress=stop_after_three)
    return Run(folder).checkpoint_path


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": "3"}, {"step": None}, {"taken": 2.5}, {"norm": "0"}, {"norm": float("nan")}, {"skipped": -1}, {"tensors": None},
        {"tensors": [torch.zeros(2)]}, {"average": [torch.zeros(2, 1, 4, 4), 7]}, {"optimiser": []}, {"optimiser": {"state": 1}},
        {"optimiser": {"state": {0: {}}}}, {"optimiser": {"state": {7: {"step": 1, "exp_avg": 1, "exp_avg_sq": 1}}}},
        {"optimiser": {"state": {0: dict.fromkeys(("step", "exp_avg", "exp_avg_sq"), torch.zeros(()))}}}, {"objective": 3},
    ],
    ids=str,
)  # fmt: skip
def test_a_state_of_wrong_types_is_one_clear_error(tmp_path, wrong):
    path = stopped(tmp_path / "run", objective="regression" if "objective" in wrong else "unrolled")
    saved = load_checkpoint(path)
    saved["state"] |= wrong
    save_checkpoint(path, saved)
    config = changed(CONFIG, objective="regression" if "objective" in wrong else "unrolled")
    with pytest.raises(RecollectError, match=r"checkpoint\.pt holds no state of this run \(\w+\): delete it"):
        distill(toy(), config, run=tmp_path / "run", resume=True)


def test_a_damaged_checkpoint_costs_some_steps_and_no_bytes(tmp_path):
    """The one before it is gone on from; with one byte flipped, 0.1 made another memory."""
    whole = distill(toy(), changed(CONFIG, checkpoint_seconds=0.0))
    path = stopped(tmp_path / "run", checkpoint_seconds=0.0)
    data = bytearray(path.read_bytes())
    data[data.index(load_checkpoint(path)["state"]["tensors"][0].numpy().tobytes()) + 2] ^= 1
    path.write_bytes(data)
    with pytest.warns(UserWarning, match="its checksum does not match"):
        again = distill(toy(), changed(CONFIG, checkpoint_seconds=0.0), run=tmp_path / "run", resume=True)
    assert torch.equal(again.bases, whole.bases)
    assert [line["step"] for line in Run(tmp_path / "run").metrics()] == [1, 2, 3, 4, 5, 6]


def test_another_number_of_threads_is_said(tmp_path):
    path = stopped(tmp_path / "run")
    saved = load_checkpoint(path)
    assert saved["threads"] == 1
    save_checkpoint(path, saved | {"threads": 2})
    with pytest.warns(UserWarning, match=r"was begun with 2 threads, and goes on with 1: .*OMP_NUM_THREADS=2"):
        distill(toy(), CONFIG, run=tmp_path / "run", resume=True)


def test_a_run_is_one_process_s_alone(tmp_path):
    """New or resumed, while another has its folder; nothing is written then."""
    stopped(tmp_path / "run")
    for folder in ("run", "new"):
        with held(tmp_path / folder):
            before = {path: path.read_bytes() for path in (tmp_path / folder).iterdir()}
            with pytest.raises(RecollectError, match=rf"{folder} is in use by process {os.getpid()} on "):
                distill(toy(), CONFIG, run=tmp_path / folder, resume=folder == "run")
            assert {path: path.read_bytes() for path in (tmp_path / folder).iterdir()} == before


@pytest.mark.parametrize("objective", ["unrolled", "regression"])
def test_a_signal_drops_the_step_it_interrupts(objective, tmp_path, monkeypatch):
    """Ctrl-C in the middle of an outer step: the last finished one is saved, and the end is bit-for-bit the same."""
    config = changed(CONFIG, objective=objective, network="convnet:width=4,depth=1")
    whole = distill(toy(), config, run=tmp_path / "whole")
    gradient = Distiller.gradient

    def interrupted(self, state):
        found = gradient(self, state)
        if state.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("the signal came too late")
        return found

    monkeypatch.setattr(Distiller, "gradient", interrupted)
    with pytest.raises(Stopped, match="stopped after outer step 3"):
        distill(toy(), config, run=tmp_path / "run")
    monkeypatch.undo()
    again = distill(toy(), config, run=tmp_path / "run", resume=True)
    assert torch.equal(again.bases, whole.bases)
    assert torch.equal(again.addressing, whole.addressing)


@pytest.mark.parametrize("preprocess", ["normalise", "zca"])
def test_validation_and_test_are_never_touched(preprocess, tmp_path):
    """Poisoned with NaN and impossible labels, they leave the bytes of the memory as they are."""
    config = changed(CONFIG, preprocess=preprocess)
    clean = toy()
    poison = Split(torch.full((9, 1, 4, 4), float("nan")), torch.full((9,), 99))
    poisoned = replace(clean, validation=poison, test=poison)
    ours = file_bytes(distill(poisoned, config), tmp_path / "poisoned")
    assert ours == file_bytes(distill(clean, config), tmp_path / "clean")
    with_validation = distill(clean, changed(config, use_validation=True))
    assert not torch.equal(with_validation.bases, distill(clean, config).bases)


def test_a_network_of_the_users_own(tmp_path):
    def mine(shape, classes):
        return nn.Sequential(nn.Conv2d(shape[0], 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, classes))

    memory = distill(toy(), CONFIG, network=mine, run=tmp_path / "run")
    assert memory.header.made["config"]["network"].startswith("custom ")
    again = distill(toy(), CONFIG, network=mine, run=tmp_path / "run", resume=True)
    assert torch.equal(again.bases, memory.bases)
    assert recollect.evaluate(memory, toy(), network=mine, networks=2).network.startswith("custom ")


def test_a_whitened_memory_carries_its_whitening_wherever_it_is_saved(tmp_path):
    memory = distill(toy(), changed(CONFIG, preprocess="zca", outer_steps=1))
    prepared = memory.preprocess()(toy().train.images)
    memory.save(tmp_path / "a" / "m.safetensors")
    Memory.load(tmp_path / "a" / "m.safetensors").save(tmp_path / "b" / "m.safetensors")
    assert torch.equal(Memory.load(tmp_path / "b" / "m.safetensors").preprocess()(toy().train.images), prepared)


def test_fits_its_budget():
    memory = distill(toy(), changed(CONFIG, outer_steps=1))
    assert memory.floats <= 2 * 3 * 16
    assert memory.header.budget["used"] == memory.floats


@pytest.mark.parametrize("bang", [float("nan"), 1e6])
@pytest.mark.parametrize("when", [1, 4])
def test_a_gradient_that_exploded_is_skipped_and_counted(when, bang, monkeypatch):
    """The memory goes back towards its average, which stays."""
    clean, bad, lines = Distiller.gradient, [], []

    def gradient(self, state):
        value, found = clean(self, state)
        if state.step == when:
            bad.append((state.bases.detach().clone(), state.average[0].clone(), state.norm))
            found[0][0, 0, 0, 0] = bang
        elif bad and len(bad) == 1:
            bad.append((state.bases.detach().clone(), state.average[0].clone(), state.norm))
        return value, found

    monkeypatch.setattr(Distiller, "gradient", gradient)
    memory = distill(toy(), CONFIG, progress=lines.append)
    assert [line["loss"] is None for line in lines] == [step == when for step in range(6)]
    assert memory.header.made["skipped"] == 1
    assert memory.bases.isfinite().all()
    (before, average, norm), (after, *others) = bad
    assert torch.equal(after, before.lerp(average, BACK))
    assert torch.equal(others[0], average)
    assert others[1] == (norm if math.isnan(bang) else pytest.approx(1.1 * norm))


@pytest.mark.parametrize("kept", [True, False], ids=["in a folder", "in memory"])
def test_a_run_of_many_skipped_steps_says_so(kept, tmp_path, monkeypatch):
    """While it happens, and at its end, with the setting and a value to try; a few are nobody's concern."""
    clean, lines = Distiller.gradient, []

    def gradient(self, state):
        value, found = clean(self, state)
        return (value if state.step % 2 else float("nan")), found

    monkeypatch.setattr(Distiller, "gradient", gradient)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: caught.append((len(lines), str(message)))
        distill(toy(), changed(CONFIG, outer_steps=44), progress=lines.append, run=tmp_path / "run" if kept else None)
    steps, words = zip(*caught, strict=True)
    assert steps == (19, 39, 44)
    said = (
        "of 44 outer steps were skipped, as their gradient was not usable: inner_lr is too large (0.01); try 0.005 (--inner-lr)"
    )
    assert words[-1] == f"22 {said}"
    monkeypatch.setattr(Distiller, "gradient", clean)
    distill(toy(), changed(CONFIG, outer_steps=3))  # a warning would be an error here


def test_no_gradient_is_too_large_for_a_run_that_does_not_clip(monkeypatch):
    clean = Distiller.gradient

    def gradient(self, state):
        value, found = clean(self, state)
        return value, [1e6 * each for each in found] if state.step == 4 else found

    monkeypatch.setattr(Distiller, "gradient", gradient)
    assert distill(toy(), CONFIG).header.made["skipped"] == 1
    assert distill(toy(), changed(CONFIG, clip_running=0.0)).header.made["skipped"] == 0


@pytest.mark.parametrize("changes", [{"clip_norm": 1e-5}, {"clip_running": 0.1}, {"clip_norm": 1e-5, "clip_running": 0.1}])
def test_a_clip_is_no_explosion(changes):
    """However much is clipped, what is usual is judged by what came."""
    memory = distill(toy(), changed(CONFIG, outer_steps=60, inner_steps=3, window=None, **changes))
    assert memory.header.made["skipped"] == 0


def test_nothing_finite_any_more_stops_with_the_last_good_memory(tmp_path, monkeypatch):
    """Good for three steps, then never again."""
    clean, good = Distiller.gradient, []

    def gradient(self, state):
        value, found = clean(self, state)
        if state.step == 3 and not good:
            good.append(state.average[0].clone())
        return (value if state.step < 3 else float("nan")), found

    monkeypatch.setattr(Distiller, "gradient", gradient)
    with (
        pytest.raises(RecollectError, match=r"exploded 20 times in a row.*lower inner_lr \(0\.01\)"),
        pytest.warns(UserWarning, match="10 of 13 outer steps were skipped"),
    ):
        distill(toy(), changed(CONFIG, outer_steps=100), run=tmp_path / "run")
    with (
        pytest.raises(RecollectError, match=r"exploded 20 times in a row.*Give run="),
        pytest.warns(UserWarning, match="skipped"),
    ):
        distill(toy(), changed(CONFIG, outer_steps=100))
    memory = Memory.load(tmp_path / "run" / "memory.safetensors")
    assert memory.header.made["steps"] == 3 + MOST_SKIPS
    assert torch.equal(memory.bases, good[0])


def test_a_shorter_unroll_shortens_the_window():
    """A window of more steps than there are is the whole unroll."""
    whole, longer = (distill(toy(), changed(CONFIG, window=window, inner_steps=4)) for window in (4, 9))
    assert torch.equal(whole.bases, longer.bases)
    assert preset("fast", inner_steps=10).inner.covered == 10
    assert preset("fast").inner.covered == 40


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bases": 40}, "40 bases do not fit"),
        ({"images_per_class": 0}, "images_per_class is 0"),
        ({"images_per_class": 10**9}, "no class has more than 12"),
        ({"outer_lr": 1e38}, "outer_lr is 1e"),
        ({"inner_per_class": 30}, "each class recalls only"),
        ({"classes_per_step": 4}, "classes_per_step is 4"),
        ({"network": "convmet"}, "did you mean 'convnet'"),
        ({"augment": "flipp"}, "did you mean 'flip'"),
        ({"device": "tpu9"}, "unknown device 'tpu9'"),
        ({"ema": 1.0}, "ema is 1.0"),
        ({"addressing": "one-hot", "bases": 5}, "one-hot addressing has 6"),
    ],
)
def test_bad_settings_leave_nothing_behind(changes, words, tmp_path):
    with pytest.raises(RecollectError, match=words):
        distill(toy(), changed(CONFIG, **changes), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_resume_wants_the_same_config_and_data(tmp_path):
    distill(toy(), CONFIG, run=tmp_path / "run")
    with pytest.raises(RecollectError, match="already holds a run"):
        distill(toy(), CONFIG, run=tmp_path / "run")
    with pytest.raises(RecollectError, match=r"was begun with outer_lr 0\.03, not 0\.5"):
        distill(toy(), changed(CONFIG, outer_lr=0.5), run=tmp_path / "run", resume=True)
    with pytest.raises(RecollectError, match="other training images"):
        distill(toy(seed=5), CONFIG, run=tmp_path / "run", resume=True)


def test_a_run_that_is_older_than_a_setting(tmp_path):
    whole = distill(toy(), CONFIG, run=tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    written = json.loads(path.read_text())
    del written["distill"]["query_form"]
    path.write_text(json.dumps(written))
    assert torch.equal(distill(toy(), CONFIG, run=tmp_path / "run", resume=True).bases, whole.bases)


@pytest.mark.parametrize(("clips", "limit"), [((0.0, 0.0), None), ((0.0, 1e-4), 1e-4), ((0.2, 0.0), 0.2), ((0.2, 1e-4), 1e-4)])
def test_clips(clips, limit):
    """How far plain SGD goes; the first limit is in gradients that came before."""
    images = toy()
    plain = dict(outer_optimiser="sgd", outer_momentum=0.0, outer_lr=1.0, outer_schedule="constant")
    config = resolve(changed(CONFIG, clip_running=clips[0], clip_norm=clips[1], **plain), images)
    distiller = Distiller(images, config, Preprocess.fit(images.train.images), Network(config.inner.network, images.shape, 3))
    state, moved = distiller.begin(), []
    for _ in range(2):
        before, usual = [tensor.detach().clone() for tensor in state.learned], state.norm
        line = distiller.step(state)
        gone = [now.detach() - old for now, old in zip(state.learned, before, strict=True)]
        moved.append(float(torch.cat([each.flatten() for each in gone]).norm()))
    if limit == 0.2:
        limit *= usual
    assert moved[1] == pytest.approx(limit or line["norm"], rel=1e-3)
    assert (limit is None) == (moved[1] == pytest.approx(line["norm"], rel=1e-3))


def test_schedule():
    assert share("cosine", 1, 10) == pytest.approx(1)
    assert share("cosine", 6, 10) == pytest.approx(0.5)
    assert share("constant", 6, 10) == 1


def test_average_is_what_is_saved():
    images = toy()
    config = resolve(changed(CONFIG, ema=0.9), images)
    preprocess = Preprocess.fit(images.train.images)
    distiller = Distiller(images, config, preprocess, Network(config.inner.network, images.shape, 3))
    state = distiller.begin()
    expected = state.bases.detach().clone()
    for step in range(1, 4):
        distiller.step(state)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * state.bases.detach()
    assert torch.allclose(distiller.memory(state).bases, expected, atol=1e-6)
    assert not torch.allclose(expected, state.bases.detach(), atol=1e-6)


def test_paper_preset_is_the_papers():
    assert (PAPER.outer.optimiser, PAPER.outer.lr, PAPER.outer.momentum) == ("sgd", 0.1, 0.5)
    assert (PAPER.inner.steps, PAPER.inner.lr, PAPER.inner.momentum, PAPER.inner.window) == (150, 0.01, 0.9, None)
    assert (PAPER.budget.outer_steps, PAPER.memory.init, PAPER.outer.ema, PAPER.outer.clip_running) == (
        50_000,
        "kaiming",
        0.0,
        0.0,
    )


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"networks_per_step": 3, "classes_per_step": 2},
        {"window": 2, "window_place": "random"},
        {"augment": "flip+crop"},
        {"augment": "flip+rotate", "augment_scope": "outer"},
        {"inner_optimiser": "adam", "bridge": "forward-only"},
    ],
)
def test_the_engine_gives_the_same_outer_steps(change):
    """What a GPU would run, here uncaptured on the CPU: the same losses and memory as the plain unroll."""
    images = toy()
    config = resolve(changed(CONFIG, **change), images)
    ends = []
    for engine in (False, True):
        network = Network(config.inner.network, images.shape, images.classes)
        distiller = Distiller(images, config, Preprocess.fit(images.train.images), network)
        if engine:
            distiller.draws_ahead, distiller.objective.engine = True, Engine(*passes(network, "cpu"))
        state = distiller.begin()
        losses = [distiller.step(state)["loss"] for _ in range(4)]
        assert set(distiller.ahead) == ({4} if engine else set())
        ends.append((torch.tensor(losses), *(tensor.detach() for tensor in state.average)))
    for plain, captured in zip(*ends, strict=True):
        assert torch.allclose(plain, captured, rtol=1e-4, atol=1e-6)


def test_out_of_gpu_memory_in_the_middle_can_be_resumed(tmp_path, monkeypatch):
    step = Distiller.step

    def full(self, state, signals):
        if state.step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, state, signals)

    monkeypatch.setattr(Distiller, "step", full)
    with pytest.raises(RecollectError, match=r"out of GPU memory after outer step 3: .* last good memory is"):
        distill(toy(), CONFIG, run=tmp_path / "run")
    monkeypatch.undo()
    distill(toy(), CONFIG, run=tmp_path / "run", resume=True)
    whole = distill(toy(), CONFIG, run=tmp_path / "whole")
    assert file_bytes(whole, tmp_path / "a") == (tmp_path / "run" / "memory.safetensors").read_bytes()


def test_memory_is_estimated_for_a_gpu(monkeypatch):
    images = toy()
    config = resolve(CONFIG, images)
    network = Network(config.inner.network, images.shape, images.classes)
    distiller = Distiller(images, config, Preprocess.fit(images.train.images), network)
    assert distiller.needs is None
    distiller.draws_ahead, distiller.objective.engine = True, Engine(*passes(network, "cpu"))
    weights = sum(p.numel() for p in network.module.parameters())
    assert distiller.needs > 4 * weights * (config.inner.steps + 1)
    said = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, 8 * 2**30))
    module._tell(distiller, said.append)
    assert said == ["needs about 0.0 GiB of GPU memory, of which 3.0 GiB are free"]


def test_tf32_needs_a_gpu():
    with pytest.raises(RecollectError, match="compute is tf32, which needs a CUDA device"):
        resolve(changed(CONFIG, compute="tf32", device="cpu"), toy())


def test_memories_on_the_way_are_kept(tmp_path):
    """Of a run that was killed between them, too."""
    config = changed(CONFIG, keep_every=2, preprocess="zca")
    whole = distill(toy(), config, run=tmp_path / "whole")
    step = Distiller.step

    def stop(self, state, signals):
        if state.step == 3:
            raise torch.OutOfMemoryError
        return step(self, state, signals)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Distiller, "step", stop)
        with pytest.raises(RecollectError):
            distill(toy(), config, run=tmp_path / "run")
    next((tmp_path / "run").glob("zca-*")).unlink()
    with pytest.warns(UserWarning, match="fitted again from the training images"):
        distill(toy(), config, run=tmp_path / "run", resume=True)
    for number in (2, 4, 6):
        name = f"memory-{number}.safetensors"
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    last = Memory.load(tmp_path / "whole" / "memory-6.safetensors")
    assert torch.equal(last.bases, whole.bases)
    assert last.header.made["steps"] == 6


def test_goes_on_from_a_memory(tmp_path):
    path = tmp_path / "first.safetensors"
    first = distill(toy(), CONFIG)
    first.save(path)
    config = changed(CONFIG, bases=None, start=str(path), inner_steps=6, outer_steps=1, outer_lr=1e-9)
    again = distill(toy(), config, run=tmp_path / "run")
    for ours, theirs in ((again.bases, first.bases), (again.addressing, first.addressing)):
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert again.header.made["start"] == first.header.made
    with pytest.raises(RecollectError, match=r"has downsample 1, this run 2: give a memory of the same kind"):
        distill(toy(), changed(config, downsample=2))
    with pytest.raises(RecollectError, match=r"'bases': 4.* cannot become {'bases': 3}"):
        distill(toy(), changed(config, bases=3))
    with pytest.raises(RecollectError, match="nowhere"):
        distill(toy(), changed(config, start=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(("scope", "augmentation"), [("sample", "flip"), ("outer", "none")])
def test_networks_are_trained_with_the_augmentation_of_the_inner_loop(scope, augmentation):
    memory = distill(toy(), changed(CONFIG, outer_steps=1, augment="flip", augment_scope=scope))
    assert memory.header.recipe["augment"] == augmentation
