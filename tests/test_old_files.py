"""What 0.1 wrote (tests/data/0.1.zip) is still read, shown, and gone on with to what 0.1 would have made."""

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from recollect.cli import main
from recollect.runs import Run

ZIP = Path(__file__).parent / "data" / "0.1.zip"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    zipfile.ZipFile(ZIP).extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(folder, capsys):
    """Run a command on these files; returns what it wrote to stdout and stderr."""

    def run(*arguments: object, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        found = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert found == code, err
        return out, err

    return run


def same_tensors(one: Path, other: Path) -> bool:
    """To rounding: the files were written on another processor."""
    ours, theirs = load_file(one), load_file(other)
    return ours.keys() == theirs.keys() and all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in ours)


def test_what_they_are(folder):
    assert [Run.open(name).kind for name in ("run", "select", "stream")] == ["distill", "select", "continual"]


def test_a_distillation_goes_on(call):
    call("resume", "run", "--quiet")
    assert same_tensors(Path("run/memory.safetensors"), Path("whole/memory.safetensors"))
    assert [line["step"] for line in Run("run").metrics()] == [1, 2, 3, 4]


def test_a_finished_distillation_stays_and_is_shown(call):
    before = Path("whole/memory.safetensors").read_bytes()
    call("resume", "whole", "--quiet")
    assert Path("whole/memory.safetensors").read_bytes() == before
    assert "digits" in call("info", "whole")[0]
    call("plot", "curves", "whole", "run", "--out", "curves.svg")
    call("plot", "recalled", "whole", "--out", "recalled.png")
    call("evaluate", "whole", "--networks", 1, "--epochs", 1, "--no-baselines")
    assert Path("whole/report.html").exists()


def test_an_old_run_keeps_its_settings(call):
    written = json.loads(Path("run/config.json").read_text())
    written["distill"]["outer_lr"] = 0.5
    Path("run/config.json").write_text(json.dumps(written))
    _, err = call("resume", "run", code=2)
    assert "run was begun with outer_lr 0.03, not 0.5: resume it unchanged" in err


def test_a_selection_goes_on(call):
    known = json.loads(Path("select/select.json").read_text())
    assert [row["name"] for row in known["results"]] == ["bases 5"]
    call("plot", "selection", "select", "--out", "selection.svg")
    out, _ = call("resume", "select", "--quiet")
    found = json.loads(Path("select/select.json").read_text())
    assert found["results"][0] == known["results"][0]
    assert [row["name"] for row in found["results"]] == ["bases 5", "bases 7"]
    assert "best bases: " in out
    assert call("resume", "select", "--quiet")[0] == out


def test_a_stream_goes_on(call):
    online = Path("stream/seed-0/er.json").read_bytes()
    out, _ = call("resume", "stream", "--quiet")
    for task in ("task-00.safetensors", "task-01.safetensors"):
        assert same_tensors(Path("stream/seed-0/compress", task), Path("stream-whole/seed-0/compress", task))
    ours, theirs = (json.loads(Path(name, "seed-0/compress.json").read_text()) for name in ("stream", "stream-whole"))
    assert ours["matrix"] == theirs["matrix"]
    assert Path("stream/seed-0/er.json").read_bytes() == online
    assert "experience replay" in out
    call("plot", "continual", "stream", "--out", "matrix.svg")


def test_a_stream_with_other_settings(call):
    arguments = ["continual", "split", "--data", "digits", "--out", "stream-whole", "--quiet"]
    _, err = call(*arguments, "--classes-per-task", 5, code=2)
    assert "stream-whole was begun with per_task 30, not None" in err


def test_a_classifier_and_a_memory_that_is_asked_with_pictures(call):
    generator = np.random.default_rng(0)
    for place in ("one", "two"):
        Path("pictures", place).mkdir(parents=True)
        for name in ("0.png", "1.png"):
            Image.fromarray(generator.integers(0, 256, (8, 8), dtype=np.uint8)).save(Path("pictures", place, name))
    picture = Path("pictures/one/0.png")
    assert str(picture) in call("classify", "classifier.safetensors", picture)[0]
    assert "asked with" in call("info", "pictures.safetensors")[0]
    call("ask", "pictures.safetensors", "pictures", "--epochs", 1, "--save", "c.safetensors", "--quiet")
    assert str(picture) in call("classify", "c.safetensors", picture)[0]


def test_an_old_checkpoint_with_a_flipped_byte(call):
    """The archive's own checksums find it: torch does not look at them."""
    path = Path("run/checkpoint.pt")
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(b"numbers") if b"numbers" in damaged else len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    _, err = call("resume", "run", "--quiet", code=2)
    assert "error: run/checkpoint.pt cannot be read (" in err
    assert "weights_only" not in err


@pytest.mark.parametrize("name", ["run", "select", "stream"])
def test_an_old_folder_is_not_written_over(call, name):
    kept = {path: path.read_bytes() for path in Path(name).rglob("*") if path.is_file()}
    _, err = call("distill", "digits", "--out", name, code=2)
    assert f"{name} already holds a run: resume it" in err
    assert {path: path.read_bytes() for path in Path(name).rglob("*") if path.is_file()} == kept
    shutil.rmtree(name)
