"""The command line, end to end on toy data; every bad input is one line, exit code 2, and nothing written or lost."""

import contextlib
import errno
import functools
import http.server
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_memory, toy_arrays
from PIL import Image
from safetensors.torch import save_file

from recollect import Evaluation, Memory, demo, load
from recollect.cli import main
from recollect.config import PAPER, changed, preset, to_json
from recollect.evaluation import kept
from recollect.runs import Run
from recollect.show import terminal
from recollect.studio.shelf import stock
from recollect.training import Progress

SMALL = {"network": "mlp:width=8", "outer_steps": 3, "inner_steps": 3, "window": None, "outer_lr": 0.01, "device": "cpu"}
TINY = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
RUN_FILES = {"config.json", "environment.json", "metrics.jsonl", "checkpoint.pt", "memory.safetensors"}
REPORTED = RUN_FILES | {"report.html"}
PROGRAM = Path(sys.executable).with_name("recollect")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Everything happens in a folder of its own."""
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
    """A finished run; not to be written to."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main(["distill", str(toy_npz), *TINY, "--out", str(out), "--quiet"]) == 0
    return out


@pytest.fixture
def run(whole, folder) -> Path:
    """A finished run of one's own."""
    return Path(shutil.copytree(whole, folder / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every path below, and the bytes of every file."""
    paths = [path for path in folder.rglob("*") if not path.is_symlink()]
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in paths}


# --- each command --------------------------------------------------------------------------------------------------


def test_distill(call, toy_npz, toy_images, folder):
    out, err = call("distill", toy_npz, *TINY)
    assert out == "186 numbers in runs/toy-1/memory.safetensors\nreport in runs/toy-1/report.html\n"
    advice, steps = err[: err.index("toy: step")].splitlines(), err[err.index("toy: step") :]
    assert steps.startswith("toy: step 1/3  loss ")
    assert advice[0].startswith("42 images of 1x8x8, 3 classes: a memory of 186 numbers, the floats of 1 a class (")
    assert 2 <= len(advice) <= 3
    run = Run(folder / "runs" / "toy-1")
    assert {path.name for path in run.folder.iterdir()} == REPORTED
    assert run.settings["data"] == {"name": str(toy_npz), "root": None, "size": None, "classes": []}
    assert run.settings["distill"]["network"] == "mlp:width=8"
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    memory = Memory.load(run.memory_path)
    assert memory.class_names == toy_images.class_names
    assert memory.header.made["config"] == run.settings["distill"]
    python = json.loads((run.folder / "environment.json").read_text())["python"]
    assert sys.version.startswith(python)


def test_the_python_call_gives_the_same_memory(whole, toy_images):
    from recollect import distill

    memory = distill(toy_images, preset("fast", **SMALL))
    memory.save("memory.safetensors")
    assert Path("memory.safetensors").read_bytes() == (whole / "memory.safetensors").read_bytes()


def test_quiet_prints_the_result_alone(call, toy_npz):
    out, err = call("distill", toy_npz, *TINY, "--quiet")
    assert out.count("\n") == 1
    assert err == ""


def test_resume_of_a_finished_run_changes_nothing(call, run):
    before = contents(run)
    out, _ = call("resume", run)
    lines = f"186 numbers in {run / 'memory.safetensors'}\nreport in {run / 'report.html'}\n"
    assert out == lines  # however long the path
    assert contents(run) == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_resumes_to_the_same_bytes(call, toy_npz, whole, folder, monkeypatch, number, code):
    distiller = sys.modules["recollect.distillation"].Distiller
    step = distiller.step

    def stopping(self, state, signals):
        if state.step == 1:
            signal.raise_signal(number)
        return step(self, state, signals)

    monkeypatch.setattr(distiller, "step", stopping)
    _, err = call("distill", toy_npz, *TINY, "--out", "part", "--quiet", code=code)
    assert err == "stopped after outer step 2: continue with recollect resume part\n"
    monkeypatch.undo()
    os.chdir(folder)
    _, err = call("resume", "part")
    assert err.startswith("toy: step 3/3")
    found, expected = contents(folder / "part"), contents(whole)
    assert found["memory.safetensors"] == expected["memory.safetensors"]
    assert [line["step"] for line in Run("part").metrics()] == [1, 2, 3]


def test_resume_finds_data_elsewhere(call, folder):
    """The config keeps an absolute path, so that a run can be resumed from any folder."""
    np.savez("here.npz", **toy_arrays())
    call("distill", "here.npz", *TINY, "--out", "run")
    (folder / "below").mkdir()
    os.chdir("below")
    call("resume", "../run")


def test_evaluate(call, run, toy_images):
    options = ["--epochs", 2, "--networks", 2]
    out, _ = call("evaluate", run, *options, "--architectures", "mlp:width=8", "convnet:width=2,depth=1", "--full", 1)
    assert out.startswith("toy: accuracy on the test set (2 networks, 2 epochs, batch 640, SGD 0.01, momentum 0.9)\n")
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    both = ["mlp:width=8", "convnet:width=2,depth=1"]
    pixels = f"{toy_images.train.images.numel():,} numbers"
    assert [row[:3] for row in table] == [
        *(["memory", "186 numbers", name] for name in both),
        *(["random real images", "192 numbers", name] for name in both),
        ["all the data", pixels, "mlp:width=8"],
    ]
    (file,) = (run / "evaluations").iterdir()
    assert file.name == "mlp_width=8+convnet_width=2,depth=1-test-2-epochs-2-networks.json"
    rows = json.loads(file.read_text())["rows"]
    assert [f"{row['mean']:.1f} ± {row['deviation']:.1f}" for row in rows] == [row[3] for row in table]
    assert all(len(row["values"]) == row["n"] == 2 and row["on"] == "test" for row in rows)
    assert Memory.load(run / "memory.safetensors").header.accuracy == []  # not asked to --record


def test_evaluate_beside_chosen_images(call, run):
    call("evaluate", run, "--epochs", 1, "--networks", 1, "--baselines", "herding", "k-center", "--json", "here.json")
    rows = json.loads(Path("here.json").read_text())["rows"]
    assert [(row["name"], row["size"]) for row in rows][1:] == [
        ("real images by herding", "192 numbers"),
        ("real images by k-center", "192 numbers"),
    ]
    call("evaluate", run, "--epochs", 1, "--networks", 1, "--no-baselines", "--json", "here.json")
    assert len(json.loads(Path("here.json").read_text())["rows"]) == 1


def test_evaluate_records_in_the_header(call, run):
    options = ["--epochs", 1, "--networks", 2, "--no-baselines", "--json", "here.json"]
    before = Memory.load(run / "memory.safetensors")
    call("evaluate", run, *options, "--record")
    call("evaluate", run / "memory.safetensors", *options, "--record", "--on", "validation")
    assert not (run / "evaluations").exists()
    (row,) = json.loads(Path("here.json").read_text())["rows"]
    after = Memory.load(run / "memory.safetensors")
    assert torch.equal(after.bases, before.bases)
    assert [entry["on"] for entry in after.header.accuracy] == ["test", "validation"]
    assert after.header.accuracy[1]["mean"] == row["mean"]
    out, _ = call("info", run)
    assert out.count("accuracy") == 2


def test_evaluations_are_kept_side_by_side_and_a_quick_look_replaces_none(call, run):
    best = ["evaluate", run, "--epochs", 3, "--networks", 3, "--record"]
    call(*best)
    shown = json.loads(call("info", run, "--json")[0])["accuracy"]
    files = {path.name: path.read_bytes() for path in (run / "evaluations").iterdir()}
    page = (run / "report.html").read_text()
    _, err = call("evaluate", run, "--epochs", 3, "--networks", 1, "--no-baselines", "--record")
    assert "not recorded: the header has an accuracy of more networks (mlp:width=8, test)" in err
    for options in (["--epochs", 1, "--networks", 3], ["--on", "validation"]):
        call("evaluate", run, "--networks", 1, *options)
    call(*best)
    after = {path.name: path.read_bytes() for path in (run / "evaluations").iterdir()}
    assert len(after) == len(files) + 4  # the same one again, too
    assert files.items() <= after.items()
    accuracy = lambda text: re.findall(r"<b>(.*?)</b>", text.split('id="accuracy"')[1].split("</table>")[0])  # noqa: E731
    assert accuracy((run / "report.html").read_text()) == accuracy(page)
    assert json.loads(call("info", run, "--json")[0])["accuracy"] == shown
    (entry,) = [each.to_json() for each in stock([run / "memory.safetensors"]).entries if each.path.parent == run]
    assert (entry["accuracy"]["n"], entry["accuracy"]["mean"]) == (3, shown[0]["mean"])


def test_evaluations_of_another_memory_of_that_name_do_not_count(call, run):
    call("evaluate", run, "--epochs", 1, "--networks", 1, "--no-baselines")
    assert len(kept(run / "memory.safetensors")) == 1
    make_memory().save(run / "memory.safetensors")
    assert kept(run / "memory.safetensors") == []


def test_json_to_standard_output(call, run, folder):
    out, err = call("evaluate", run, "--networks", 1, "--epochs", 1, "--json", "-")
    assert [row["name"] for row in json.loads(out)["rows"]] == ["memory", "random real images"]
    assert "memory (1 of 2)" in err or err == ""
    assert not (run / "evaluations").exists()
    found = json.loads(call("info", run, "--json")[0])
    assert found["class_names"] == ["cat", "dog", "frog"]
    assert found["tensors"]["bases"]["shape"][1:] == [1, 4, 4]
    link = folder / "link.json"
    link.symlink_to("target.json")
    call("evaluate", run, "--networks", 1, "--epochs", 1, "--no-baselines", "--json", link)
    assert link.is_symlink()
    assert json.loads(Path("target.json").read_text())["memory"] == "memory.safetensors"


def test_classify_a_folder_and_as_json(call, run, folder):
    (folder / "some" / "more").mkdir(parents=True)
    for name in ("b.png", "a.png", "more/c.png"):
        Image.new("L", (8, 8)).save(folder / "some" / name)
    (folder / "some" / "notes.txt").write_text("no picture")
    call("compose", run, "--epochs", 1, "--save", "c.safetensors", "--quiet")
    out, err = call("classify", "c.safetensors", "some", "--json")
    answers = json.loads(out)
    assert [each["picture"] for each in answers] == ["some/a.png", "some/b.png", "some/more/c.png"]
    assert sum(answers[0]["probabilities"].values()) == pytest.approx(1)
    assert err.startswith("left out: some/notes.txt: not a picture")
    assert call("classify", "c.safetensors", "some")[0].startswith(f"some/a.png: {answers[0]['class_name']}, ")
    call("classify", "c.safetensors", "some/notes.txt", code=2)


def test_evaluate_a_memory_without_its_run(call, whole, toy_npz):
    shutil.copy(whole / "memory.safetensors", "alone.safetensors")
    options = ["--epochs", 1, "--networks", 1, "--no-baselines"]
    _, err = call("evaluate", "alone.safetensors", *options, code=2)
    assert err == "error: alone.safetensors was made of 'toy', which is no official dataset: say where it is (--data)\n"
    call("evaluate", "alone.safetensors", *options, "--data", toy_npz)
    assert Path("evaluations/alone-mlp_width=8-test-1-epochs-1-networks.json").exists()


def test_select_and_resume(call, toy_npz, folder):
    out, err = call("select", toy_npz, *TINY, "--values", 2, 3, "--networks", 2, "--out", "s")
    assert err.count("step 1/3") == 2
    found = json.loads(Path("s/select.json").read_text())
    means = [row["mean"] for row in found["results"]]
    assert f"best bases: {found['values'][means.index(max(means))]}\n" in out
    assert {row["on"] for row in found["results"]} == {"validation"}
    for value in (2, 3):
        assert {path.name for path in Path(f"s/bases={value}").iterdir()} == RUN_FILES
        assert len(Memory.load(f"s/bases={value}/memory.safetensors").bases) == value
    with Image.open("s/select.png") as picture:
        assert picture.size == (750, 510)

    # as if killed while the second value was judged: it is judged again, and nothing is distilled again
    Path("s/select.json").write_text(json.dumps(found | {"results": found["results"][:1]}))
    again, err = call("resume", "s")
    assert again == out
    assert err == ""
    results = [{k: v for k, v in row.items() if k != "seconds"} for row in found["results"]]
    known = json.loads(Path("s/select.json").read_text())["results"]
    assert [{k: v for k, v in row.items() if k != "seconds"} for row in known] == results


def test_select_any_setting(call, toy_npz):
    options = [*TINY, "--networks", 1, "--quiet", "--out", "s", "--field"]
    call("select", toy_npz, *options, "outer_lr", "--values", "0.1", "1e-2")
    assert json.loads(Path("s/select.json").read_text())["values"] == [0.1, 0.01]
    shutil.rmtree("s")
    call("select", toy_npz, *options, "network", "--values", "mlp:width=4", "convnet:width=2,depth=1")
    assert {path.name for path in Path("s").iterdir() if path.is_dir()} == {
        "network=mlp:width=4",
        "network=convnet:width=2,depth=1",
    }
    shutil.rmtree("s")
    call("select", toy_npz, *options, "window", "--values", "None", 2)
    assert json.loads(Path("s/select.json").read_text())["values"] == [None, 2]


@pytest.mark.parametrize("kind", ["npz", "png", "sheet", "pt"])
def test_recall(call, run, kind):
    memory = Memory.load(run / "memory.safetensors")
    images, labels = memory.recall(["frog", "cat"])
    out, _ = call("recall", run, "--out", f"x.{kind}", "--classes", "frog", "cat", "--format", kind)
    assert out == f"x.{kind}\n"
    if kind == "npz":
        with np.load("x.npz") as archive:
            assert np.array_equal(archive["images"], images)
            assert np.array_equal(archive["labels"], labels)
    elif kind == "png":
        assert load(Path("x.png")).class_names == ("000-cat", "002-frog")
    elif kind == "sheet":
        with Image.open("x.sheet") as picture:
            assert picture.size == (len(memory.addressing) * 9 - 1, 2 * 9 - 1)
    else:
        assert torch.equal(torch.load("x.pt/images.pt", weights_only=True), images)
        assert torch.equal(torch.load("x.pt/labels.pt", weights_only=True), labels)


def test_info(call, whole):
    for path in (whole, whole / "memory.safetensors"):
        out, err = call("info", path)
        assert out.startswith(f"{whole / 'memory.safetensors'}\n")
        for text in ("3: cat, dog, frog", "1x8x8", "[6, 1, 4, 4] F32", "186 of 192 numbers", "network mlp:width=8"):
            assert text in out
        assert err == ""


def test_info_of_odd_headers(call):
    """Whatever a header holds is shown as it is, and nothing in it is taken for a style or a picture."""
    memory = make_memory(class_names=("[red]", "[/x]", ":smile:", "a" * 200))
    header = replace(memory.header, made={"config": {"a": [1, {"b": None}]}}, budget={"used": {}}, accuracy=[{"mean": 0.123456}])
    Memory(memory.bases, memory.addressing, header).save("odd.safetensors")
    out, _ = call("info", "odd.safetensors")
    assert "[red], [/x], :smile:" in out
    assert "mean 0.1235" in out


def test_data_show(call, toy_npz):
    out, _ = call("data", "show", toy_npz)
    assert out.startswith("toy\n")
    for text in ("1x8x8", "3: cat, dog, frog", "42, 6, 12"):
        assert text in out


def test_demo(call, monkeypatch):
    short = changed(demo.CONFIG, outer_steps=2, inner_steps=3, network="mlp:width=8")
    monkeypatch.setattr(demo, "CONFIG", short)
    monkeypatch.setattr(demo, "PER_CLASS", changed(short, addressing="one-hot", bases=None))
    monkeypatch.setattr(demo, "FULL_EPOCHS", 1)
    out, err = call("demo", "--networks", 2)
    assert err.count("step 2/2") == 2
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert [row[0] for row in table] == ["memory", "per-class images (BPTT)", "random real images", "all the data"]
    assert [row[1] for row in table][1:3] == ["640 floats", "640 floats"]
    assert int(table[0][1].split()[0]) <= 640
    run = Path("runs/demo")
    assert {path.name for path in run.iterdir()} == REPORTED | {"per-class", "memory.png", "evaluations"}
    with Image.open(run / "memory.png") as picture:
        assert min(picture.size) > 500
    accuracy = Memory.load(run / "memory.safetensors").header.accuracy
    assert [entry["n"] for entry in accuracy] == [2]
    assert "figure  runs/demo/memory.png\n" in out

    before = contents(run)
    _, err = call("demo", "--networks", 1, "--out", "runs/demo", code=2)
    assert "already holds a run" in err
    call("demo", "--networks", 1, "--quiet")
    assert contents(run) == before
    assert Path("runs/demo-2/memory.png").exists()


def test_a_stopped_demo(call, monkeypatch):
    distiller = sys.modules["recollect.distillation"].Distiller
    monkeypatch.setattr(distiller, "step", lambda *_: signal.raise_signal(signal.SIGINT) or {"step": 0, "loss": 0.0})
    monkeypatch.setattr(demo, "CONFIG", changed(demo.CONFIG, inner_steps=1))
    _, err = call("demo", "--quiet", code=130)
    assert err == "stopped: start the demo again\n"


def test_a_stopped_selection(call, toy_npz, monkeypatch):
    """It says how the selection goes on, and not the run of a value."""
    distiller = sys.modules["recollect.distillation"].Distiller
    monkeypatch.setattr(distiller, "step", lambda *_: signal.raise_signal(signal.SIGINT) or {"step": 0, "loss": 0.0})
    _, err = call("select", toy_npz, *TINY, "--values", 1, 2, "--out", "chosen", "--quiet", code=130)
    assert err == "stopped after outer step 0: continue with recollect resume chosen\n"


def test_tensorboard(call, toy_npz, folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    call("distill", toy_npz, *TINY, "--tensorboard", "--out", "run", "--quiet")
    assert {path.name for path in Path("run").iterdir()} == REPORTED | {"tensorboard"}
    events = EventAccumulator("run/tensorboard").Reload()
    logged = [(event.step, event.value) for event in events.Scalars("loss")]
    assert logged == [(line["step"], pytest.approx(line["loss"])) for line in Run("run").metrics()]


def test_tensorboard_is_an_extra(call, toy_npz, monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    _, err = call("distill", toy_npz, *TINY, "--tensorboard", "--out", "run", code=2)
    assert "pip install 'recollect[tensorboard]'" in err
    assert contents(folder) == {}


# --- presets and help ----------------------------------------------------------------------------------------------


def test_preset_is_in_the_help(call):
    fast, _ = call("distill", "--help")
    paper, _ = call("distill", "--preset", "paper", "--help")
    assert "(default: 1000)" in fast
    assert "(default: 50000)" in paper
    assert "(default: 50000)" in call("select", "--preset=paper", "--help")[0]


def test_preset_is_in_the_saved_config(call, toy_npz):
    options = ["--preset", "paper", "--outer-steps", 1, "--inner-steps", 2, "--inner-per-class", 3]
    call("distill", toy_npz, *options, "--network", "mlp:width=4", "--out", "run", "--quiet")
    saved = Run("run").settings["distill"]
    changed = {name for name, value in to_json(PAPER).items() if saved[name] != value}
    assert changed == {"outer_steps", "inner_steps", "inner_per_class", "network", "bases", "matrices", "preprocess", "device"}


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "distil digits",
        "distill",
        "distill digits --preset papre",
        "distill digits --bridge half",
        "distill digits --bases many",
        "distill digits --inner-step 3",
        "recall memory.safetensors",
        "recall memory.safetensors --out x --format gif",
        "bench nothing",
    ],
)
def test_mistakes_of_spelling(call, folder, arguments):
    _, err = call(*arguments.split(), code=2)
    assert "recollect" in err  # where to find help
    assert "Traceback" not in err
    assert contents(folder) == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("name", ["engine", "exactness"])
def test_benchmarks_of_a_gpu_without_one(call, name):
    _, err = call("bench", name, code=2)
    assert f"error: the benchmark '{name}' needs a CUDA device" in err


# --- bad input -----------------------------------------------------------------------------------------------------


def bad_data(folder: Path) -> None:
    """Datasets, each wrong in one way, named by it."""
    good = toy_arrays()
    np.savez(folder / "good.npz", **good)
    whole = (folder / "good.npz").read_bytes()
    (folder / "truncated.npz").write_bytes(whole[: len(whole) // 2])
    (folder / "corrupt.npz").write_bytes(whole[:500] + b"\xff" * 50 + whole[550:])
    (folder / "text.npz").write_text("not an archive")
    pixels = good["images"] / np.float32(255)
    pixels[7, 0, 3, 3] = np.nan
    np.savez(folder / "nan.npz", **good | {"images": pixels})
    np.savez(folder / "label3.npz", **good | {"labels": np.where(good["labels"] == 0, 3, good["labels"])})
    np.savez(folder / "label-1.npz", **good | {"labels": good["labels"] - 1})
    np.savez(folder / "empty-class.npz", **good | {"labels": good["labels"] % 2})
    np.savez(folder / "mixed.npz", x_train=good["images"], y_train=good["labels"], x_test=good["images"][..., 1:],
             y_test=good["labels"])  # fmt: skip
    for name, modes in {"sizes": "LL", "channels": ["L", "RGB"]}.items():
        for number in range(6):
            path = folder / name / ("cat", "dog")[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new(modes[number % 2], (8 + (name == "sizes") * (number % 2), 8)).save(path)
    shutil.copytree(folder / "sizes" / "cat", folder / "no-images" / "cat")
    (folder / "no-images" / "dog").mkdir()
    (folder / "mnist").mkdir()
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / "mnist" / f"{name}-ubyte.gz").write_bytes(b"\x1f\x8b\x08")


def bad_memories(folder: Path, whole: Path) -> None:
    """Memory files, each wrong in one way."""
    memory = Memory.load(whole / "memory.safetensors")
    data = (whole / "memory.safetensors").read_bytes()
    shutil.copy(whole / "memory.safetensors", folder / "good.safetensors")
    (folder / "truncated.safetensors").write_bytes(data[: len(data) // 2])
    (folder / "cut.safetensors").write_bytes(data[:-1])
    (folder / "empty.safetensors").write_bytes(b"")
    (folder / "text.safetensors").write_text("not a memory at all")
    tensors = {"bases": memory.bases, "addressing": memory.addressing}
    save_file({"weight": torch.zeros(3)}, folder / "foreign.safetensors")

    def write(name: str, **changes) -> None:
        header = json.loads(memory.header.to_json()) | {"checksum": json.loads(_metadata(data))["checksum"]}
        save_file(tensors, folder / f"{name}.safetensors", {"recollect": json.dumps(header | changes)})

    write("newer", format=2)
    write("shape", image_shape=[1, 10, 10])
    write("classes", class_names=["cat", "dog"])
    write("checksum", checksum="0" * 64)
    write("network", recipe=json.loads(memory.header.to_json())["recipe"] | {"network": "convnot"})
    write("good-again")


def _metadata(data: bytes) -> str:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length])["__metadata__"]["recollect"]


def bad_runs(folder: Path, whole: Path) -> None:
    """Run folders, each wrong in one way."""
    shutil.copytree(whole, folder / "run")
    (folder / "file").write_text("")

    def copy(name: str, **changes) -> Path:
        copied = Path(shutil.copytree(whole, folder / name))
        config = Run(copied).settings
        config["distill"] |= changes
        (copied / "config.json").write_text(json.dumps(config))
        return copied

    copy("changed", outer_lr=0.5)
    copy("retyped", inner_steps="three")
    copy("misspelt", innr_lr=0.1)
    copy("custom", network="custom mine")
    (copy("config") / "config.json").write_text("{")
    (copy("checkpoint") / "checkpoint.pt").write_bytes(b"junk")
    config = Run(copy("other-data")).settings
    config["data"]["name"] = str(folder / "good2.npz")
    (folder / "other-data" / "config.json").write_text(json.dumps(config))
    good = toy_arrays()
    np.savez(folder / "good2.npz", **good | {"images": good["images"] // 2})
    (copy("python") / "config.json").write_text(json.dumps(config | {"data": {}}))
    (folder / "selection").mkdir()
    (folder / "selection" / "select.json").write_text('{"data": {}}')


@pytest.fixture(scope="module")
def bad(tmp_path_factory, whole) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    bad_data(folder)
    bad_memories(folder, whole)
    bad_runs(folder, whole)
    return folder


MISTAKES = """
    distill minst                               | unknown dataset 'minst': did you mean 'mnist'?
    distill nowhere/x                           | no such file or folder: nowhere/x
    distill cifar10 --root .                    | dataset 'cifar10' is not there: looked for data_batch_1.bin
    distill cifar10 --root .                    | Get it with `recollect data get cifar10`, or point --root
    distill mnist --root .                      | train-images-idx3-ubyte.gz
    distill truncated.npz                       | truncated.npz
    distill corrupt.npz                         | corrupt.npz
    distill text.npz                            | text.npz
    distill nan.npz                             | nan.npz: 'images' has NaN or infinite values
    distill label3.npz                          | label 3 is out of range for 3 classes
    distill label-1.npz                         | label -1 is out of range for 3 classes
    distill empty-class.npz                     | class 'frog' has no training images
    distill mixed.npz                           | images of [1, 8, 7] beside training images of [1, 8, 8]
    distill sizes                               | give one size to resize all to, as in --size 8
    distill channels                            | channels
    distill no-images                           | dog
    distill good.npz --size 0                   | size 0 is not an image size
    data show minst                             | did you mean 'mnist'?
    data show nan.npz                           | NaN
    data get                                    | no dataset named
    data get minst                              | did you mean 'mnist'?
    data get digits                             | digits
    data get mnist --root . --mirror http://127.0.0.1:9/ | 127.0.0.1

    distill good.npz --network convnt           | unknown network 'convnt': did you mean 'convnet'?
    distill good.npz --network mlp:wdth=3       | unknown option of mlp 'wdth': did you mean 'width'?
    distill good.npz --network mlp:width=0      | width is '0', not a positive whole number
    distill good.npz --augment flp              | 'flp'
    distill good.npz --device gpu               | unknown device 'gpu'
    distill good.npz --images-per-class 0       | images_per_class is 0: give 1 or more
    distill good.npz --images-per-class -3      | images_per_class is -3: give 1 or more
    distill good.npz --bases 0                  | bases is 0: give 1 or more
    distill good.npz --bases -1                 | bases is -1: give 1 or more
    distill good.npz --bases 99                 | 99 bases do not fit 1 image per class (192 numbers): at most 10 bases
    distill good.npz --bases 2 --addressing one-hot | bases is 2, but one-hot addressing has
    distill good.npz --downsample 9             | downsample is 9 for images of 8x8: give 1 to 8
    distill good.npz --inner-per-class 11       | inner_per_class is 11, but each class recalls only 5 images
    distill good.npz --classes-per-step 4       | classes_per_step is 4, but there are 3 classes
    distill good.npz --inner-lr nan             | inner_lr is nan: give a number above 0
    distill good.npz --outer-lr 0               | outer_lr is 0.0: give a number above 0
    distill good.npz --ema 1                    | ema is 1.0
    distill good.npz --ema nan                  | ema is nan
    distill good.npz --outer-momentum nan       | outer_momentum is nan
    distill good.npz --clip-norm inf            | clip_norm is inf
    distill good.npz --seed -1                  | seed is -1
    distill good.npz --device meta              | unknown device 'meta'
    distill good.npz --out run                  | run already holds a run: resume it (recollect resume run)
    distill good.npz --out run --tensorboard    | run already holds a run
    distill good.npz --bases 99 --tensorboard   | 99 bases do not fit
    distill good.npz --out file                 | file is a file: give a folder
    distill good.npz --out file/run             | cannot write file/run
    select good.npz                             | no values of bases to choose from
    select good.npz --values 4 99               | 99 bases do not fit
    select good.npz --values 4 many             | bases cannot be 'many'
    select good.npz --field base --values 4     | unknown setting 'base': did you mean 'bases'?
    select good.npz --values 4 --networks 0     | number of networks is 0
    select good.npz --values 4 --network convnt | unknown network 'convnt'
    select good.npz --field network --values mlp convnt | unknown network 'convnt'
    select good.npz --values 4 --out run        | run already holds a run
    select good.npz --values 4 --out selection  | selection already holds a run
    select good.npz --values 4 --use-validation | use_validation leaves nothing to select on
    demo --networks 0                           | number of networks is 0
    demo --out run                              | run already holds a run

    resume nowhere                              | nowhere holds no run (no config.json)
    resume file                                 | file holds no run
    resume changed                              | changed was begun with outer_lr 0.01, not 0.5: resume it unchanged
    resume retyped                              | retyped: inner_steps cannot be 'three'
    resume misspelt                             | 'innr_lr': did you mean 'inner_lr'?
    resume custom                               | custom has a network given in Python
    resume python                               | python was made in Python
    resume config                               | config.json is not a readable JSON file
    resume checkpoint                           | checkpoint.pt cannot be read
    resume other-data                           | other-data was begun with other training images
    resume selection                            | select.json has no 'distill'

    {memory} nowhere.safetensors                | nowhere.safetensors does not exist
    {memory} .                                  | memory.safetensors does not exist
    {memory} truncated.safetensors              | truncated.safetensors is damaged or not a memory
    {memory} cut.safetensors                    | cut.safetensors is damaged or not a memory
    {memory} empty.safetensors                  | empty.safetensors is damaged or not a memory
    {memory} text.safetensors                   | text.safetensors is damaged or not a memory
    {memory} foreign.safetensors                | a .safetensors file without recollect's header
    {memory} newer.safetensors                  | newer.safetensors has memory format 2, and this recollect reads up to 1
    {memory} shape.safetensors                  | bases are [1, 4, 4] where the header tells [1, 5, 5]
    {memory} classes.safetensors                | addressing is for 3 classes, and the header names 2
    evaluate checksum.safetensors               | do not match its checksum
    recall checksum.safetensors --out x         | do not match its checksum
    recall run --out file                       | file already exists
    recall run --out file/x                     | cannot write file/x
    recall run --out x --classes cat forg       | unknown class 'forg': did you mean 'frog'?
    evaluate run --networks 0                   | number of networks is 0
    evaluate run --epochs 0                     | epochs is 0: give 1 or more
    evaluate run --architectures mlp convnt     | unknown network 'convnt'
    evaluate run --seed -1                      | seed is -1
    evaluate run --data digits                  | give the memory's own dataset
    evaluate network.safetensors --data good.npz | unknown network 'convnot': did you mean 'convnet'?
"""


def mistakes():
    for line in filter(str.strip, MISTAKES.splitlines()):
        arguments, expected = (part.strip() for part in line.split("|", 1))
        commands = ["info", "evaluate", "recall --out x"] if "{memory}" in arguments else [""]
        for command in commands:
            yield arguments.format(memory=command), expected


@pytest.mark.parametrize(("arguments", "expected"), list(mistakes()))
def test_bad_input_is_one_line_and_nothing_is_written_or_lost(call, bad, monkeypatch, arguments, expected):
    monkeypatch.chdir(bad)
    monkeypatch.setattr(sys.modules["recollect.distillation"].Distiller, "step", None)  # it never gets that far
    before = contents(bad)
    out, err = call(*arguments.split(), code=2)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert expected in err
    assert out == ""
    after = contents(bad)
    assert after.keys() == before.keys()
    assert after == before


def test_the_files_that_are_not_bad(call, bad, folder):
    """The memory that the others were made from by one change each is fine."""
    call("info", bad / "good-again.safetensors")
    call("recall", bad / "good-again.safetensors", "--out", "x.npz")


def test_a_download_with_a_wrong_checksum(call, folder):
    (folder / "served").mkdir()
    (folder / "served" / "train-images-idx3-ubyte.gz").write_bytes(b"something else")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder / "served")))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        mirror = f"http://127.0.0.1:{server.server_port}/"
        _, err = call("data", "get", "mnist", "--root", "root", "--mirror", mirror, "--quiet", code=2)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert err.count("\n") == 1
    assert "train-images-idx3-ubyte.gz" in err
    assert not list(folder.rglob("root/**/*ubyte.gz"))


def test_a_run_killed_before_its_first_checkpoint(call, run):
    (run / "checkpoint.pt").unlink()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    call("resume", run)
    assert [line["step"] for line in Run(run).metrics()] == [1, 2, 3]


def test_resume_keeps_a_recorded_accuracy(call, run):
    call("evaluate", run, "--networks", 1, "--epochs", 1, "--no-baselines", "--record")
    before = (run / "memory.safetensors").read_bytes()
    call("resume", run)
    assert (run / "memory.safetensors").read_bytes() == before


# --- no space left -------------------------------------------------------------------------------------------------


def fill_after(monkeypatch, count: int) -> None:
    """The disk is full from the count-th file on."""
    calls = iter(range(1000))
    real = os.fsync

    def full(descriptor: int) -> None:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode) and next(calls) >= count:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)


@pytest.mark.parametrize("count", range(4))
def test_no_space_for_a_run_that_can_then_be_finished(call, toy_npz, whole, monkeypatch, folder, count):
    """Whichever file the space runs out at, the run ends in the bytes of one that had enough."""
    with monkeypatch.context() as patch:
        fill_after(patch, count)
        _, err = call("distill", toy_npz, *TINY, "--out", "run", "--quiet", code=2)
    files = ["environment.json", "config.json", "checkpoint.pt", "memory.safetensors"]
    assert err.startswith(f"error: no space left to write run/{files[count]}: make room")
    assert err.count("\n") == 1
    assert {path.name for path in Path("run").iterdir()} - {"metrics.jsonl"} == set(files[:count])
    call(*(["resume", "run"] if count >= 2 else ["distill", toy_npz, *TINY, "--out", "run"]))
    assert contents(Path("run"))["memory.safetensors"] == contents(whole)["memory.safetensors"]
    assert [line["step"] for line in Run("run").metrics()] == [1, 2, 3]


@pytest.mark.parametrize(
    "arguments",
    [
        "evaluate run --networks 1 --epochs 1 --record",
        "recall run --out x",
        "recall run --out x --format png",
        "recall run --out x --format sheet",
        "recall run --out x --format pt",
    ],
)
def test_no_space_keeps_what_there_was(call, run, folder, monkeypatch, arguments):
    before = contents(folder)
    with monkeypatch.context() as patch:
        fill_after(patch, 0)
        _, err = call(*arguments.split(), code=2)
    assert err.startswith("error: no space left to write ")
    assert {name: data for name, data in contents(folder).items() if name != "run/evaluations"} == before


# --- the program itself --------------------------------------------------------------------------------------------


def program(*arguments: object, **options) -> subprocess.CompletedProcess:
    command = [str(PROGRAM), *map(str, arguments)]
    return subprocess.run(command, stdin=subprocess.DEVNULL, text=True, timeout=600, check=False, **options)


def test_exit_codes_of_the_program(whole, folder):
    for command in ([str(PROGRAM)], [sys.executable, "-m", "recollect"]):
        good = subprocess.run([*command, "info", whole], capture_output=True, text=True, check=False)
        assert (good.returncode, good.stderr) == (0, "")
        assert "3: cat, dog, frog" in good.stdout
        wrong = subprocess.run([*command, "info", "nowhere"], capture_output=True, text=True, check=False)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert wrong.stderr.startswith("error: memory file nowhere does not exist")
        assert wrong.stderr.count("\n") == 1


def test_help_and_info_do_not_wait_for_torch(whole):
    code = f"""
import sys
from recollect.cli import main
for arguments in (["--help"], ["distill", "--help"], ["data", "get", "--help"], ["info", {str(whole)!r}]):
    try:
        main(arguments)
    except SystemExit as stop:
        assert stop.code == 0
import recollect
print(sorted({{"torch", "matplotlib", "scipy", "sklearn"}} & set(sys.modules)), file=sys.stderr)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stderr == "[]\n"


@pytest.mark.parametrize("arguments", ["--help", "distill --help", "info {run}", "data show {data}"])
def test_a_closed_pipe_is_no_traceback(whole, toy_npz, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = program(*arguments.format(run=whole, data=toy_npz).split(), stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode in (1, 141)


def test_a_full_stdout_is_one_line(whole):
    with open("/dev/full", "w") as full:
        done = program("info", whole, stdout=full, stderr=subprocess.PIPE)
    assert done.stderr == "error: [Errno 28] No space left on device\n"
    assert done.returncode == 2


# --- what a person sees --------------------------------------------------------------------------------------------


def show_steps(steps, total: int, **options) -> None:
    with terminal.steps("toy", total, **options) as show:
        for step in steps:
            if show:
                show({"step": step, "loss": None if step == 2 else 0.5, "seconds": 0.25})


def test_plain_lines_when_piped(capsys, monkeypatch):
    times = iter([100.0, 101.0, 107.0, 108.0, 109.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(times))
    show_steps([1, 2, 3, 4], 4)
    assert capsys.readouterr().err.splitlines() == [
        "toy: step 1/4  loss 0.5000  0.25 s/step  0.8 s left",
        "toy: step 3/4  loss 0.5000  2.42 s/step  2.4 s left",  # five seconds after the last
        "toy: step 4/4  loss 0.5000  2.06 s/step  0.0 s left",  # and the last step always
    ]


def test_lines_of_a_resumed_run_and_of_a_selection(capsys, monkeypatch):
    times = iter([10.0, 11.0, 500.0, 501.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(times))
    show_steps([3, 4, 1, 2], 4)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("loss")[0].strip() for line in lines] == ["toy: step 3/4", "toy: step 4/4", "toy: step 1/4"]
    assert "0.25 s/step" in lines[2]  # the time before a run's first step is not its own


def test_quiet_silences(capsys):
    show_steps([1, 2], 2, quiet=True)
    assert capsys.readouterr() == ("", "")


def steps_in_a_terminal(monkeypatch, *arguments, **options) -> str:
    """What a terminal of 120 columns gets to see."""
    master, slave = os.openpty()
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(slave, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        show_steps(*arguments, **options)
    seen = b""
    with contextlib.suppress(OSError):  # how Linux tells that the other end is closed
        while chunk := os.read(master, 1 << 16):
            seen += chunk
    os.close(master)
    return seen.decode()


def test_a_bar_in_a_terminal(monkeypatch):
    text = steps_in_a_terminal(monkeypatch, [1, 2, 3], 4)
    for part in ("toy", "3/4", "loss 0.5000", " s/step", " s left", "━"):
        assert part in text
    assert "step 1/4" not in text


def test_the_bar_starts_again_with_the_next_run(monkeypatch):
    text = steps_in_a_terminal(monkeypatch, [3, 4, 1], 4, done=2)
    assert text.rindex("1/4") > text.rindex("2/4")


def test_a_bar_is_there_before_the_first_step(monkeypatch):
    """As an evaluation needs it, whose first epoch may take minutes."""
    text = steps_in_a_terminal(monkeypatch, [], 4)
    assert "toy" in text
    assert "0/4" in text


def test_a_training_tells_the_time_left_from_its_second_second(capsys, monkeypatch):
    """Networks are trained some at a time: epochs of all of them are counted."""
    times = iter([100.0, 100.5, 102.0, 102.0, 400.0, 400.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(times))
    with terminal.trainings("memory") as progress:
        for finished, epoch in ((0, 1), (0, 2), (2, 3)):
            progress(Progress(finished, 2, 4, epoch, 10, 0.5))
    assert capsys.readouterr().err.splitlines() == [
        "memory: epoch 4/40  loss 0.5000  0.50 s/epoch  18 s left",
        "memory: epoch 26/40  loss 0.5000  12.98 s/epoch  3 min left",
    ]


def test_times_are_said_in_minutes_and_hours():
    said = [terminal.lasting(seconds) for seconds in (0.04, 9.94, 12.3, 119.0, 121.0, 5400.0, 7300.0, 36_000.0)]
    assert said == ["0.0 s", "9.9 s", "12 s", "119 s", "2 min", "90 min", "2 h 2 min", "10 h 0 min"]


def test_ctrl_c_is_answered_while_an_operation_cannot_be_interrupted(monkeypatch):
    said = threading.Event()
    stream = SimpleNamespace(write=lambda text: said.set() if "stopping" in text else None, flush=lambda: None)
    monkeypatch.setattr(terminal, "PATIENCE", 0.0)
    monkeypatch.setattr(sys, "stderr", stream)
    before = signal.signal(signal.SIGINT, lambda *_: said.wait(60))  # the main thread is busy until then
    try:
        with terminal.answering():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert said.is_set()
    assert signal.set_wakeup_fd(-1) == -1


def test_long_lines_are_not_broken(capsys):
    terminal.say("x" * 300)
    terminal.say("[bold]/[/nothing] :smile:")
    assert capsys.readouterr().out == "x" * 300 + "\n[bold]/[/nothing] :smile:\n"


def test_accuracy_table(capsys):
    rows = [(Evaluation("memory", "mlp", (50.0, 60.0), "test", "", 0.0), "640 floats")]
    terminal.accuracy_table("a title that is longer than the table below it, and " * 2, rows)
    title, *table = capsys.readouterr().out.splitlines()
    assert title.startswith("a title")
    assert [cell.strip() for cell in table[3].split("│")[1:-1]] == ["memory", "640 floats", "mlp", "55.0 ± 7.1", "2"]


def test_some_classes_of_a_dataset(call, folder):
    """Distilled, resumed and evaluated without naming them again."""
    settings = "--network mlp:width=8 --bases 2 --inner-steps 2 --window None --outer-steps 2 --out run"
    call(*f"distill digits --classes 7 3 {settings}".split())
    assert Memory.load(folder / "run" / "memory.safetensors").class_names == ("7", "3")
    call("resume", "run")
    (folder / "run" / "memory.safetensors").rename(folder / "alone.safetensors")
    out, _ = call(*["evaluate", "alone.safetensors", "--networks", "1", "--epochs", "1", "--no-baselines"])
    assert "mlp:width=8" in out
    _, err = call(*["distill", "digits", "--classes", "seven", "--out", "other"], code=2)
    assert "unknown class of digits 'seven'" in err


def test_a_warning_is_one_line(call):
    call("info", "nowhere.safetensors", code=2)
    assert warnings.formatwarning("fitted again", UserWarning, "memory.py", 7) == "note: fitted again\n"
