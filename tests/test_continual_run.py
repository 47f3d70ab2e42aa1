"""The command, end to end on toy data: resumes to the same bytes, in one process or several; the table; every bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import experiment_module
from matplotlib.figure import Figure

from recollect import Memory, RecollectError, load, outer
from recollect.cli import main
from recollect.config import changed, setting
from recollect.continual import run as run_module
from recollect.continual.config import LEARNERS, STREAMS
from recollect.continual.metrics import square
from recollect.continual.run import Result, run
from recollect.continual.streams import Stream
from recollect.files import held
from recollect.runs import load_checkpoint, save_checkpoint
from recollect.show import streams as show

CONFIG = changed(
    STREAMS["rotations"], tasks=3, per_task=20, buffer=9, network="mlp:width=4", bases=2, inner_steps=2, outer_per_batch=1,
    replay=4, glances=1, gdumb_epochs=2, all_epochs=2,
)  # fmt: skip
NAMES = ["tasks", "per_task", "buffer", "network", "bases", "inner_steps", "outer_per_batch", "replay", "glances"]
NAMES += ["gdumb_epochs", "all_epochs"]
TINY = [word for name in NAMES for word in (f"--{name.replace('_', '-')}", str(setting(CONFIG, name)))]
PROGRAM = Path(sys.executable).with_name("recollect")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(capsys):
    """Run a command in this process; returns what it wrote to stdout and stderr."""

    def run(*arguments: object, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        try:
            found = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            found = stop.code
        out, err = capsys.readouterr()
        assert found == code, err
        return out, err

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory, toy_npz) -> Path:
    """A finished run of all learners; not to be written to."""
    out = tmp_path_factory.mktemp("whole") / "run"
    arguments = ["continual", "rotations", "--data", toy_npz, *TINY, "--seeds", 2, "--out", out, "--quiet"]
    assert main(list(map(str, arguments))) == 0
    return out


def memories(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


def matrices(folder: Path) -> dict[str, list]:
    return {str(p.relative_to(folder)): json.loads(p.read_text())["matrix"] for p in folder.glob("seed-*/[!s]*.json")}


# --- the command ---------------------------------------------------------------------------------------------------


def test_a_run_s_folder(whole):
    settings = json.loads((whole / "config.json").read_text())
    assert settings["stream"] == "rotations"
    assert settings["config"]["bases"] == 2
    assert settings["how"]["learners"] == list(LEARNERS)
    assert json.loads((whole / "environment.json").read_text())["torch"] == torch.__version__
    for seed in (0, 1):
        inside = whole / f"seed-{seed}"
        assert len(json.loads((inside / "stream.json").read_text())["angles"]) == 3
        assert {path.stem for path in inside.glob("*.json")} == {*LEARNERS, "stream"}
        for learner in LEARNERS:
            found = json.loads((inside / f"{learner}.json").read_text())
            assert (found["device"], found["environment"]["torch"]) == ("cpu", torch.__version__)
            assert found["told_the_task"] == (learner in ("compress", "gdumb", "all-data"))
        ours = json.loads((inside / "compress.json").read_text())
        spent = [json.loads(path.read_text())["seconds_of_all"] for path in inside.glob("compress/*-buffer.json")]
        assert len(spent) == 3
        assert ours["distilling_seconds"] == pytest.approx(sum(spent), abs=0.02)
        for task in range(3):
            memory = Memory.load(inside / "compress" / f"task-{task:02d}.safetensors")
            assert memory.header.made["task"] == task
            log = json.loads((inside / "compress" / f"task-{task:02d}-buffer.json").read_text())["log"]
            assert all(line["sample_floats"] + line["memory_floats"] <= line["total"] == 9 * 64 for line in log)
            assert log[-1] | {"task": 0, "batch": 0} == {
                "task": 0, "batch": 0, "samples": 0, "sample_floats": 0, "total": 576,
                "memory_floats": (task + 1) * memory.floats,
            }  # fmt: skip
        assert not list(inside.rglob("*.pt"))
    assert len(matrices(whole)) == 2 * len(LEARNERS)
    rows = json.loads((whole / "table.json").read_text())["rows"]
    assert [row["learner"] for row in rows][: len(LEARNERS)] == list(LEARNERS)
    assert rows[0]["paper"]["ra"] == 80.32
    assert {path.name for path in whole.glob("*.png")} == {"curve.png", *(f"matrix-{name}.png" for name in LEARNERS)}


def test_compress_never_forgets(whole):
    matrix = json.loads((whole / "seed-0" / "compress.json").read_text())["matrix"]
    assert matrix[0][0] == matrix[1][0] == matrix[2][0]
    assert json.loads((whole / "seed-0" / "compress.json").read_text())["metrics"]["bti"] == 0


def test_the_table_stands_beside_the_paper_s(call, toy_npz):
    out, err = call("continual", "rotations", "--data", toy_npz, *TINY, "--seeds", 1, "--learners", "online", "gdumb")
    lines = {line.split("│")[1].strip(): line for line in out.splitlines() if line.startswith("│")}
    assert not {"compress-then-recall", "A-GEM"} & set(lines)  # not asked for
    assert "53.38 ± 1.53 │  -5.44" in lines["Online"]
    assert "not run" not in lines["Online"]
    assert "not run" in lines["La-MAML"]
    assert "77.77 ± 0.58" in lines["Sparse-La-MAML"]
    assert "rotations of toy: accuracy on the test images in %, mean ± deviation over n seeds; BTI in points" in out
    assert "rotations: task 6.0/6  " in err  # progress, as plain lines
    assert Path("runs/continual-rotations/seed-0/online.json").exists()


@pytest.mark.parametrize("stream", ["permutations", "many", "cifar100", "rotations-60k", "permutations-60k", "split"])
def test_every_stream_runs(call, toy_npz, stream):
    kind = ["--classes-per-task", 1, "--per-task", 10] if stream in ("cifar100", "split") else []
    kind += ["--preprocess", "normalise"] if kind else []
    kind += ["--network", "lamaml:width=2,hidden=3", "--window", 1] if stream == "cifar100" else []
    out, _ = call(
        "continual", stream, "--data", toy_npz, *TINY, "--seeds", 1, "--learners", "compress", "--out", "run", *kind, "--quiet"
    )
    assert "compress-then-recall" in out
    settings = json.loads(Path("run/config.json").read_text())
    assert settings["config"]["kind"] == {"cifar100": "split"}.get(
        stream, stream.removesuffix("-60k").replace("many", "permutations")
    )
    assert settings["config"]["use_validation"] == stream.endswith("-60k")
    recorded = Path("run/seed-0/permutations.npy")
    assert recorded.exists() == (settings["config"]["kind"] == "permutations")
    if recorded.exists():
        images = load(str(toy_npz))
        config = changed(STREAMS[stream], tasks=CONFIG.stream.tasks, per_task=CONFIG.stream.per_task)
        shown = Stream(images, config).test(1).images.flatten(1)
        assert torch.equal(shown, images.test.images.flatten(1)[:, np.load(recorded)[1]])


def test_where_classes_tell_tasks_apart_the_accuracy_without_the_task_comes_first(call, toy_npz):
    options = ["--classes-per-task", 1, "--per-task", 10, "--preprocess", "normalise", "--data", toy_npz]
    chosen = ["--learners", "compress", "union", "gdumb", "er"]
    out, _ = call("continual", "split", *TINY, "--seeds", 1, *options, *chosen, "--out", "run", "--quiet")
    heads, *rows = [
        [cell.strip() for cell in line.split(bar)[1:-1]] for bar in "┃│" for line in out.splitlines() if line[:1] == bar
    ]
    assert heads == ["learner", "class-incremental", "task id", "RA", "LA", "BTI", "BWT", "n"]
    cells = {row[0]: row[1:4] for row in rows}
    assert list(cells) == ["compress-then-recall", "union of memories", "GDumb per task", "experience replay"]
    assert cells["compress-then-recall"][1:] == ["yes", "100.00"]  # one class a task
    assert cells["compress-then-recall"][0] == cells["union of memories"][0] == cells["union of memories"][2]
    assert float(cells["GDumb per task"][0]) < 100
    for file in Path("run/seed-0").glob("*.json"):  # a run of 0.1 did not tell it
        written = json.loads(file.read_text())
        written.pop("untold", None)
        file.write_text(json.dumps(written))
    assert "class-incremental" not in call("resume", "run", "--quiet")[0]


def test_defaults_are_the_stream_s(monkeypatch):
    from recollect import cli

    assert cli.parse(["continual", "many"]).config.stream.tasks == 100
    assert cli.parse(["continual", "--seeds", "2", "cifar100", "--bases", "8"]).config.inner.network == "lamaml"
    assert cli.parse(["continual", "permutations-60k"]).config.buffer.outer_per_batch == 2
    assert cli.parse(["continual", "split", "--classes-per-task", "5"]).config.memory.bases is None
    split = cli.parse(["continual", "split", "--data", "digits"]).config  # two minutes, and not twenty
    assert (split.inner.steps, split.buffer.outer_per_batch, split.memory.init) == (20, 2, "samples")


# --- resuming ------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_not_run_again(call, whole, folder, toy_npz, monkeypatch):
    copy = Path(shutil.copytree(whole, folder / "copy"))
    monkeypatch.setattr(run_module, "Job", None)
    call("continual", "rotations", "--data", toy_npz, *TINY, "--seeds", 2, "--out", copy, "--quiet")
    call("resume", copy, "--quiet")
    assert memories(copy) == memories(whole)
    table = (copy / "table.json").read_bytes()
    options = ["--seeds", 1, "--learners", "er", "er"]  # fewer, and one twice: the table is of all that the folder holds
    out, _ = call("continual", "rotations", "--data", toy_npz, *TINY, *options, "--out", copy, "--quiet")
    assert (copy / "table.json").read_bytes() == table == (whole / "table.json").read_bytes()
    assert out.count("not run") == 4  # baselines that only the paper has


def test_processes_give_the_same_bytes(whole, folder, toy_images):
    chosen = ["compress", "er"]
    found = run(toy_images, CONFIG, out="several", name="rotations", seeds=2, learners=chosen, workers=2)
    assert memories(folder / "several") == memories(whole)
    assert matrices(folder / "several") == {n: m for n, m in matrices(whole).items() if Path(n).stem in chosen}
    assert [(result.learner, result.seed) for result in found] == [(name, seed) for name in chosen for seed in (0, 1)]


def test_tasks_side_by_side_and_more_seeds_later(whole, folder, toy_images):
    run(toy_images, CONFIG, out="grown", name="rotations", seeds=1, learners=["compress"], together=2)
    assert {path.name for path in (folder / "grown").glob("seed-*")} == {"seed-0"}
    run(toy_images, CONFIG, out="grown", name="rotations", seeds=2, learners=["union", "compress"], together=3)
    assert memories(folder / "grown") == memories(whole)
    expected = {name: m for name, m in matrices(whole).items() if Path(name).stem in ("union", "compress")}
    assert matrices(folder / "grown") == expected


def test_a_run_that_was_stopped_within_a_task_goes_on_to_the_same_bytes(whole, folder, toy_images, monkeypatch):
    """Every batch is a checkpoint, and everything ends after four batches, again and again."""
    setting, observe, count = run_module.Setting, run_module.Compressor.observe, 0

    def failing(self, batches):
        nonlocal count
        count += 1
        if count % 4 == 0:
            raise KeyboardInterrupt
        observe(self, batches)

    monkeypatch.setattr(run_module, "Setting", lambda *parts: setting(*parts, checkpoint_seconds=0))
    monkeypatch.setattr(run_module.Compressor, "observe", failing)
    stops = 0
    while True:
        try:
            run(toy_images, CONFIG, out="part", name="rotations", seeds=1, learners=["compress"], together=2)
            break
        except KeyboardInterrupt:
            stops += 1
            assert stops < 9
    assert stops > 0
    expected = {name: data for name, data in memories(whole).items() if name.startswith("seed-0")}
    assert memories(folder / "part") == expected


def test_a_damaged_checkpoint_of_a_task(folder, toy_images, monkeypatch):
    """The one before it is gone on from; one of wrong types is a clear error; another number of threads is said."""
    setting, observe, seen = run_module.Setting, run_module.Compressor.observe, []

    def failing(self, batches):
        seen.append(self.seen)
        if len(seen) == 4:
            raise KeyboardInterrupt
        observe(self, batches)

    go_on = partial(run, toy_images, changed(CONFIG, batch=5), name="rotations", seeds=1, learners=["compress"], together=3)
    go_on(out="whole")
    go_on = partial(go_on, out="run")
    monkeypatch.setattr(run_module, "Setting", lambda *parts: setting(*parts, checkpoint_seconds=0))
    monkeypatch.setattr(run_module.Compressor, "observe", failing)
    with pytest.raises(KeyboardInterrupt):
        go_on()
    (path,) = (path for path in Path("run").rglob("*.pt") if "previous" not in path.name)
    saved = load_checkpoint(path)
    for wrong in ({"seen": None}, {"reservoirs": [1]}, {"states": 2}, {"logs": []}, {"seconds": [1]}):
        save_checkpoint(path, saved | wrong)
        with pytest.raises(RecollectError, match=r"holds no state of this run \(\w+\): delete it"):
            go_on()
    save_checkpoint(path, saved | {"threads": 3})
    save_checkpoint(path, saved)
    path.write_bytes(path.read_bytes()[:-1])
    with (
        pytest.warns(UserWarning, match="its checksum does not match"),
        pytest.warns(UserWarning, match="was begun with 3 threads, and goes on with 1"),
    ):
        go_on()
    assert seen == [0, 1, 2, 3, 3]  # no batch was seen twice
    assert memories(folder / "run") == memories(folder / "whole")
    assert [path.name for path in Path("run").rglob("*.pt")] == ["tasks-00-02.damaged.pt"]


def test_a_folder_is_one_process_s_alone(whole, folder, toy_images):
    copy = Path(shutil.copytree(whole, folder / "copy"))
    for out in (copy, folder / "new"):
        with held(out), pytest.raises(RecollectError, match=rf"{out} is in use by process {os.getpid()} on "):
            run(toy_images, CONFIG, out=out, name="rotations", seeds=2)
    assert memories(copy) == memories(whole)
    run(toy_images, CONFIG, out=folder / "new", name="rotations", seeds=1, learners=["online"])


def test_tasks_of_many_skipped_steps_say_so(folder, toy_images, monkeypatch):
    """While it happens and at each task's end."""
    advance = outer.advance
    nothing = lambda state, value, *rest: advance(state, value if state.step % 2 else float("nan"), *rest)  # noqa: E731
    monkeypatch.setattr(outer, "advance", nothing)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(toy_images, changed(CONFIG, outer_per_batch=12), out="run", name="rotations", seeds=1, learners=["compress"])
    words = [str(each.message) for each in caught]
    assert [line[:33] for line in words] == [
        f"task {t}: {n} outer steps were" for t in range(3) for n in ("10 of 19", "12 of 24")
    ]
    assert words[0].endswith("inner_lr is too large (0.03); try 0.015 (--inner-lr)")


def test_killed_and_resumed(whole, folder, toy_npz):
    """The process itself, killed outright."""
    command = [PROGRAM, "continual", "rotations", "--data", toy_npz, *TINY, "--seeds", 2, "--out", "killed"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*map(str, command), "--learners", "compress"], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not list((folder / "killed").rglob("*.safetensors")):
        assert process.poll() is None or list((folder / "killed").rglob("*.safetensors"))
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(memories(folder / "killed"))
    assert 0 < done <= 6
    assert main(["resume", str(folder / "killed"), "--quiet"]) == 0
    assert memories(folder / "killed") == memories(whole)


def test_ctrl_c_tells_how_to_go_on(call, toy_npz, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "_distil", stop)
    _, err = call("continual", "rotations", "--data", toy_npz, *TINY, "--out", "run", "--quiet", code=130)
    assert err == "stopped: continue with recollect resume run\n"


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learners", "ours"], "unknown learner 'ours'"),
        (["--learners", "er", "--tasks", 10], "a buffer of 9 images cannot serve 10 tasks"),
        (["--kind", "permutations"], "kind is permutations, but rotations is a stream of rotations: name another stream"),
        (["--seeds", 0], "seeds is 0: give 1 to 10,000"),
        (["--workers", 0], "workers is 0: give 1 to 10,000"),
        (["--together", 0], "together is 0: give 1 to 10,000"),
        (["--kept-downsample", 9], "kept_downsample is 9 for images of 8x8: give 1 to 8"),
        (["--compute", "tf32", "--device", "cpu"], "compute is tf32, which needs a CUDA device: give fp32 or auto"),
        (["--tasks", 10], "a buffer of 9 images cannot serve 10 tasks, each with an image at least: give a buffer of 10 or"),
        (["--bases", 12], "12 bases do not fit 1/3 of a buffer of 9 images (192 numbers): at most 10 bases leave room for one"),
        (["--per-task", 0], "task 0 of toy has no samples"),
        (["--per-task", 99], "per_task is 99, but task 0 of toy has 42 training images"),
        (["--network", "mpl"], "unknown network 'mpl'"),
        (["--inner-lr", -1], "inner_lr is -1.0"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--data", "nothing"], "unknown dataset 'nothing'"),
        (["--classes-per-task", 2], "classes_per_task is for the stream split"),
    ],
)
def test_bad_input_is_one_line_and_nothing_written(call, toy_npz, arguments, message, folder):
    data = [] if "--data" in arguments else ["--data", toy_npz]
    _, err = call("continual", "rotations", *data, *TINY, *arguments, code=2)
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not list(folder.iterdir())


def test_bases_matter_to_those_with_memories_alone(call, toy_npz):
    call("continual", "rotations", "--data", toy_npz, *TINY, "--bases", 12, "--seeds", 1, "--learners", "online")
    assert Path("runs/continual-rotations/seed-0/online.json").exists()


def test_overlapping_classes(call, toy_npz):
    split = ["continual", "split", "--data", toy_npz, *TINY, "--per-task", 5]
    _, err = call(*split, "--classes-per-task", 2, code=2)
    assert err == "error: 3 tasks of 2 classes would overlap: 3 classes make 1 of them\n"


def test_a_folder_of_another_run(call, whole, folder, toy_images, toy_npz):
    copy = Path(shutil.copytree(whole, folder / "copy"))
    common = ["--data", toy_npz, *TINY, "--out", copy, "--quiet"]
    _, err = call("continual", "rotations", *common, "--inner-steps", 3, code=2)
    assert (
        err == f"error: {copy} was begun with inner_steps 2, not 3: "
        "resume it unchanged, or start another run with the new setting (--out)\n"
    )
    _, err = call("continual", "permutations", *common, code=2)
    assert "was begun with kind 'rotations', not 'permutations'" in err
    other = replace(toy_images, train=toy_images.train[torch.arange(30)])
    with pytest.raises(RecollectError, match="was begun with images"):
        run(other, CONFIG, out=copy, name="rotations")
    (folder / "full").mkdir()
    (folder / "full" / "note").touch()
    _, err = call("continual", "rotations", "--data", toy_npz, *TINY, "--out", "full", code=2)
    assert err == "error: full holds something else: give another folder (--out)\n"
    assert memories(copy) == memories(whole)


def test_a_folder_older_than_a_setting(call, whole, folder, toy_npz):
    copy = Path(shutil.copytree(whole, folder / "copy"))
    path = copy / "seed-0" / "compress" / "task-01.safetensors"
    path.unlink()
    (copy / "seed-0" / "compress.json").unlink()
    known = json.loads((copy / "config.json").read_text())
    del known["config"]["kept_downsample"]
    (copy / "config.json").write_text(json.dumps(known))
    call("resume", copy, "--quiet")
    assert memories(copy) == memories(whole)
    (copy / "config.json").write_text(json.dumps(known))
    common = ["--data", toy_npz, *TINY, "--out", copy, "--quiet", "--kept-downsample", 2]
    _, err = call("continual", "rotations", *common, code=2)
    assert "was begun with kept_downsample 1, not 2" in err


def test_damaged_files(call, whole, folder):
    copy = Path(shutil.copytree(whole, folder / "copy"))
    (copy / "seed-0" / "online.json").write_text('{"matrix": [[1, 2]], "seconds": 1}')
    _, err = call("resume", copy, "--quiet", code=2)
    assert err == f"error: {copy / 'seed-0' / 'online.json'} is damaged: delete it, and run the same command again\n"
    (copy / "seed-0" / "online.json").unlink()
    (copy / "seed-0" / "compress.json").unlink()
    path = copy / "seed-0" / "compress" / "task-01.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    _, err = call("resume", copy, "--quiet", code=2)
    assert "task-01.safetensors" in err
    path.unlink()
    checkpoint = path.with_name("tasks-01-01.pt")
    checkpoint.write_bytes(b"not a checkpoint")
    _, err = call("resume", copy, "--quiet", code=2)
    assert f"{checkpoint} cannot be read" in err
    checkpoint.unlink()
    call("resume", copy, "--quiet")
    assert memories(copy) == memories(whole)
    (copy / "config.json").write_text('{"kind": "continual"}')
    _, err = call("resume", copy, "--quiet", code=2)
    assert "config.json has no 'data': restore it" in err


def test_an_error_in_a_worker_is_the_user_s_error(toy_images):
    config = changed(CONFIG, inner_lr=1e6, outer_per_batch=20, outer_optimiser="sgd", outer_lr=0.1, clip_running=0.0)
    with pytest.raises(RecollectError, match="was not finite 20 times in a row"):
        run(toy_images, config, out="wrong", seeds=1, learners=["compress"], workers=2)


def test_a_run_made_in_python_is_resumed_there(call, toy_images):
    run(toy_images, CONFIG, out="python", seeds=1, learners=["online"])
    _, err = call("resume", "python", code=2)
    assert err == "error: python was made in Python, with images of its own: go on with it there\n"


# --- what is shown -------------------------------------------------------------------------------------------------


def test_figures():
    rows = [square([[90.0], [70.0, 80.0]]), square([[80.0], [60.0, 80.0]])]
    results = [Result("er", seed, matrix, 1.0) for seed, matrix in enumerate(rows)]
    results += [Result("compress", 0, square([[50.0], [50.0, 70.0]]), 1.0)]
    figure = show.curve(results, "a title")
    assert isinstance(figure, Figure)
    line, other = figure.axes[0].lines
    assert line.get_ydata().tolist() == [85.0, 72.5]
    assert other.get_ydata().tolist() == [50.0, 60.0]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["experience replay", "compress-then-recall"]


def test_all_learners_look_different_in_the_curve():
    figure = show.curve([Result(name, 0, square([[50.0], [50.0, 70.0]]), 1.0) for name in LEARNERS])
    (axes,) = figure.axes
    looks = {(line.get_color(), line.get_marker(), line.get_markerfacecolor()) for line in axes.lines}
    assert len(looks) == len(LEARNERS)
    figure.draw_without_rendering()
    assert all(float(place).is_integer() for place in axes.get_xticks())


def test_the_summary_is_over_seeds():
    rows = [square([[90.0], [70.0, 80.0]]), square([[80.0], [60.0, 80.0]])]
    (row,) = (
        row
        for row in show.summary([Result("er", seed, m, 1.5) for seed, m in enumerate(rows)], "split")
        if row["learner"] == "er"
    )
    assert row["ra"] == {"mean": 72.5, "deviation": pytest.approx(50**0.5 / 2 * 2 / 2**0.5 / 2**0.5), "n": 2}
    assert (row["n"], row["seconds"], row["paper"]) == (2, 3.0, None)


def test_the_quoted_figures():
    """docs/protocols.md: ours and the best baselines."""
    ours = {stream: rows["compress"].ra for stream, rows in show.PAPER.items()}
    assert ours == {
        "rotations": 80.32, "permutations": 78.48, "many": 74.07, "cifar100": 62.58,
        "rotations-60k": 88.3, "permutations-60k": 87.3,
    }  # fmt: skip
    best = {stream: max(q.ra for name, q in rows.items() if name != "compress") for stream, rows in show.PAPER.items()}
    assert [best[stream] for stream in ("rotations", "permutations", "many", "cifar100")] == [77.77, 76.88, 51.0, 61.18]
    assert "online" not in show.PAPER["cifar100"]  # the paper repeats another cell there


def test_the_search_of_settings(toy_images, folder, monkeypatch, capsys):
    """A row of the list is run once, on the stream or on its stand-in of half the side."""
    script = experiment_module("continual_recipe")
    monkeypatch.setattr(script.recollect, "load", lambda name, root: toy_images)
    split = changed(CONFIG, kind="split", tasks=None, classes_per_task=1, per_task=8, batch=4)
    monkeypatch.setitem(script.STREAMS, "cifar100", split)
    monkeypatch.setattr(script, "HALVED", {"downsample": 1, "buffer": 36})
    seen, measure = [], script.measure

    def watched(stream, config, *rest):
        seen.append((stream.shape, config.memory.downsample, config.buffer.images))
        return measure(stream, config, *rest)

    monkeypatch.setattr(script, "measure", watched)
    row = {"inner_steps": 2, "window": 1, "window_place": "random", "inner_per_class": 2, "replay": 4}
    for name in ("cifar100", "cifar100-halved"):
        monkeypatch.setitem(script.ROWS, name, [((9,), {}), ((1,), row)])
        monkeypatch.setattr(sys, "argv", ["x", name, "--row", "1", "--out", "found.json", "--networks", "2"])
        script.main()
        assert "2 steps" in capsys.readouterr().out
        script.main()
        assert not capsys.readouterr().out
    assert seen == [((1, 8, 8), 2, 9), ((1, 4, 4), 1, 36)]
    found = json.loads((folder / "found.json").read_text())
    assert [each["settings"]["window_place"] for each in found.values()] == ["random"] * 2
    assert script.halved(toy_images).shape == (1, 4, 4)
    four = toy_images.test.images[0, 0, 2:4, 6:8].double().mean()
    assert abs(four - script.halved(toy_images).test.images[0, 0, 1, 3]) <= 0.5
    monkeypatch.setattr(sys, "argv", ["x", "cifar100", "--bounds", "--tasks", "1", "--networks", "1"])
    script.main()
    assert capsys.readouterr().out.count("passes 100.0 (100.0)") == 2  # of one class
    monkeypatch.setattr(sys, "argv", ["x", "cifar100", "--row", "2"])
    with pytest.raises(RecollectError, match=r"no row 2 of cifar100: give 0 to 1"):
        script.main()
