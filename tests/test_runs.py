"""A run's folder: what stands in it after a kill, a power cut or a full disk, and what is refused."""

import json
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recollect import RecollectError
from recollect.files import held, write_atomically, write_through
from recollect.runs import Run, environment, load_checkpoint, previous, save_checkpoint

SETTINGS = {"data": {"name": "toy"}, "distill": {"seed": 0}}
CHECKPOINT = {"config": {}, "data": "0", "preprocessing": {}, "state": {"step": 3, "bases": torch.arange(3.0)}}


@pytest.fixture
def run(tmp_path) -> Run:
    return Run.create(tmp_path / "run", "distill", SETTINGS)


def test_create_and_open(run):
    again = Run.open(run.folder)
    assert (again.kind, again.settings) == ("distill", SETTINGS)
    assert sorted(path.name for path in run.folder.iterdir()) == ["config.json", "environment.json"]
    known = json.loads((run.folder / "environment.json").read_text())
    assert known["torch"] == torch.__version__
    assert known.keys() == environment().keys()


def test_open_wants_a_run(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RecollectError, match="holds no run"):
            Run.open(folder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "checkpoint.pt", "memory.safetensors"])
def test_a_used_folder_is_refused_and_kept(tmp_path, name):
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(RecollectError, match=f"{tmp_path} already holds a run: resume it"):
        Run.create(tmp_path, "distill", SETTINGS)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(name, b"precious")]


def test_a_folder_with_other_files_is_fine_and_a_file_is_not(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    Run.create(tmp_path, "distill", SETTINGS)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(RecollectError, match=r"notes.txt is a file: give a folder"):
        Run.create(tmp_path / "notes.txt", "distill", SETTINGS)


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '{"data": {}}', '{"data": {}, "distill": []}', "\xff", "[" * 9999])
def test_damaged_config(run, text):
    run.config_path.write_text(text, encoding="latin-1")
    with pytest.raises(RecollectError, match=r"config\.json"):
        _ = run.settings


# --- metrics -------------------------------------------------------------------------------------------------------


def test_metrics_are_what_was_logged(run):
    assert run.metrics() == []
    lines = [{"step": step, "loss": None if step == 2 else 0.5} for step in (1, 2, 3)]
    for line in lines:
        run.log(line)
    assert run.metrics() == lines


def test_forget_after(run):
    for step in range(1, 6):
        run.log({"step": step})
    run.forget_after(3)
    assert run.metrics() == [{"step": 1}, {"step": 2}, {"step": 3}]
    run.log({"step": 4})
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]
    run.forget_after(0)
    assert run.metrics() == []


def test_half_a_line_is_no_line(run):
    run.log({"step": 1, "loss": 0.25})
    run.log({"step": 2, "loss": 0.125})
    whole = run.metrics_path.read_bytes()
    for cut in range(len(whole)):
        run.metrics_path.write_bytes(whole[:cut])
        assert [line["step"] for line in run.metrics()] == [1, 2][: whole[:cut].count(b"\n")]
    run.forget_after(9)
    run.log({"step": 2})
    assert [line["step"] for line in run.metrics()] == [1, 2]


@given(st.binary())
def test_damaged_metrics_are_left_out(tmp_path_factory, junk):
    run = Run(tmp_path_factory.mktemp("run"))
    run.log({"step": 1})
    with open(run.metrics_path, "ab") as file:
        file.write(junk + b"\n[]\n7\n\x00\x00\n")
    run.log({"step": 2})
    run.forget_after(9)
    steps = [line["step"] for line in run.metrics()]
    assert steps[0] == 1
    assert steps[-1] == 2


def test_no_space_for_metrics(run):
    run.metrics_path.symlink_to("/dev/full")
    with pytest.raises(RecollectError, match=r"no space left to write .*metrics\.jsonl: make room"):
        run.log({"step": 1})


# --- checkpoints ---------------------------------------------------------------------------------------------------


def load(run: Run) -> dict | None:
    return load_checkpoint(run.checkpoint_path, **{name: type(value) for name, value in CHECKPOINT.items()})


def test_checkpoint_round_trip(run):
    assert load(run) is None
    save_checkpoint(run.checkpoint_path, CHECKPOINT)
    found = load(run)
    assert found is not None
    assert torch.equal(found["state"].pop("bases"), CHECKPOINT["state"]["bases"])
    assert found == CHECKPOINT | {"state": {"step": 3}}
    assert [path.name for path in run.folder.iterdir() if path.name.startswith(".")] == []


class Evil:
    """Would write a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def refused_checkpoint(run: Run) -> None:
    with pytest.raises(RecollectError, match=r"checkpoint\.pt cannot be read .*: delete it to start this run") as caught:
        load(run)
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)


def test_damaged_checkpoints_are_refused_in_one_line(run):
    save_checkpoint(run.checkpoint_path, CHECKPOINT)
    whole = run.checkpoint_path.read_bytes()
    for cut in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        run.checkpoint_path.write_bytes(whole[:cut])
        refused_checkpoint(run)
    for junk in (b"junk", b"\x80\x04.", b"PK\x03\x04" + bytes(100)):
        run.checkpoint_path.write_bytes(junk)
        refused_checkpoint(run)
    for foreign in (torch.zeros(3), {"state": {}}, [1], CHECKPOINT | {"data": 3}):
        save_checkpoint(run.checkpoint_path, foreign)
        previous(run.checkpoint_path).unlink()
        refused_checkpoint(run)


def test_a_checkpoint_never_runs_code(run):
    save_checkpoint(run.checkpoint_path, CHECKPOINT | {"state": Evil(str(run.folder / "evil"))})
    refused_checkpoint(run)
    assert not (run.folder / "evil").exists()


@given(st.data())
def test_a_flipped_byte_is_refused(tmp_path_factory, data):
    run = Run(tmp_path_factory.mktemp("run"))
    save_checkpoint(run.checkpoint_path, CHECKPOINT)
    damaged = bytearray(run.checkpoint_path.read_bytes())
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] ^= data.draw(st.integers(1, 255))
    run.checkpoint_path.write_bytes(bytes(damaged))
    refused_checkpoint(run)


def test_of_a_damaged_checkpoint_the_one_before_is_taken_and_it_is_said(run):
    for step in (1, 2, 3):
        save_checkpoint(run.checkpoint_path, CHECKPOINT | {"state": {"step": step}})
    whole = run.checkpoint_path.read_bytes()
    run.checkpoint_path.write_bytes(whole[:-1])
    with pytest.warns(UserWarning, match=r"checkpoint\.pt cannot be read \(its checksum does not match\): going on from the"):
        assert load(run)["state"] == {"step": 2}
    assert load(run)["state"] == {"step": 2}
    assert (run.folder / "checkpoint.damaged.pt").read_bytes() == whole[:-1]
    save_checkpoint(run.checkpoint_path, CHECKPOINT | {"state": {"step": 4}})
    run.checkpoint_path.unlink()
    assert load(run)["state"] == {"step": 2}
    assert load(run)["state"] == {"step": 2}
    for path in (run.checkpoint_path, previous(run.checkpoint_path)):
        path.write_bytes(b"")
    with pytest.raises(RecollectError, match=r"checkpoint\.pt cannot be read .*; .*previous\.pt cannot be read .*: delete both"):
        load(run)


def test_without_links_the_one_before_is_kept_too(run, monkeypatch):
    def link(*_):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", link)
    for step in (1, 2):
        save_checkpoint(run.checkpoint_path, CHECKPOINT | {"state": {"step": step}})
    run.checkpoint_path.unlink()
    assert load(run)["state"] == {"step": 1}


# --- one process at a time -----------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from recollect.files import held

with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_folder_is_one_process_s_until_it_dies(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        words = rf"{tmp_path} is in use by process {process.pid} on {re.escape(socket.gethostname())}: wait for it, stop it"
        for settings in (SETTINGS, None):
            with (
                pytest.raises(RecollectError, match=words if settings else "holds no run"),
                Run.working(tmp_path, "distill", settings),
            ):
                pass
        process.kill()
        process.wait()
    with Run.working(tmp_path, "distill", SETTINGS):
        with pytest.raises(RecollectError, match=f"in use by process {os.getpid()} "), Run.working(tmp_path, "distill"):
            pass
        assert (tmp_path / ".lock").read_text().startswith("process ")
    assert not (tmp_path / ".lock").exists()


def test_a_lock_is_no_way_to_other_files(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(RecollectError, match="cannot write"), held(tmp_path):
        pass
    assert (tmp_path / "mine").read_text() == "precious"
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").write_bytes(b"\x1b[31mnobody\n")
    with held(tmp_path):
        pass


# --- where a path leads --------------------------------------------------------------------------------------------


def test_a_rename_is_settled(tmp_path, monkeypatch):
    """A power cut after the rename loses nothing: the folder is synchronised, after it."""
    done, replace, sync = [], os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("rename"), replace(*paths)))
    monkeypatch.setattr(
        os, "fsync", lambda file: (done.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file"), sync(file))
    )
    write_atomically(tmp_path / "a" / "file", b"1")
    assert done == ["file", "rename", "folder"]


def test_a_link_stays_and_a_device_too(tmp_path, capfd):
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "one").symlink_to("two")
    (tmp_path / "links" / "two").symlink_to("../real")
    for data in (b"1", b"2"):
        write_through(tmp_path / "links" / "one", data)
        assert (tmp_path / "real").read_bytes() == data
        assert (tmp_path / "links" / "one").is_symlink()
    write_through(Path("/dev/stdout"), b"seen")
    (tmp_path / "out").symlink_to("/dev/stdout")
    write_through(tmp_path / "out", b" twice")
    assert capfd.readouterr().out == "seen twice"
    write_through(Path("/dev/null"), b"gone")
    assert Path("/dev/null").is_char_device()
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(RecollectError, match="cannot write"):
        write_through(tmp_path / "round", b"")
    with pytest.raises(RecollectError, match="no space left"):
        write_through(Path("/dev/full"), b"1")
    with pytest.raises(RecollectError, match="cannot write"):
        write_through(tmp_path, b"1")
