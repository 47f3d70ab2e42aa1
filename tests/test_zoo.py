"""The zoo: its index is that of its files, names work where paths do, and what is fetched is what the index says."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from conftest import experiment_module, make_memory

import recollect
from recollect import Memory, RecollectError, zoo
from recollect.cli import main
from recollect.data import NAMED, data_root
from recollect.files import compact, read_json, sha256

ROOT = Path(__file__).parent.parent
FETCHED = "cifar100-by-5/task-03"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of the user's, and no address."""
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / "cache" / name)
    monkeypatch.delenv(zoo.VARIABLE, raising=False)
    return tmp_path / "cache" / "recollect" / "zoo"


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A folder that is served on loopback, and named as the zoo's address."""
    folder = tmp_path / "mirror"
    (folder / FETCHED).parent.mkdir(parents=True)
    asked = []

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv(zoo.VARIABLE, f"http://127.0.0.1:{server.server_address[1]}/")
    yield folder / f"{FETCHED}.safetensors", asked
    server.shutdown()
    server.server_close()


def test_the_index_is_that_of_the_files():
    made = experiment_module("zoo_index").index()
    assert json.loads(compact(made)) == read_json(zoo.INDEX)
    assert {name for name, entry in zoo.index().items() if entry["ships"]} == {"mnist-1", "fashion-mnist-1", "cifar10-1"}
    for name, entry in zoo.index().items():
        assert entry["accuracy"], name
        assert entry["licence"], name
        memory = recollect.Memory.load((zoo.HERE if entry["ships"] else ROOT / "memories") / f"{name}.safetensors")
        assert memory.header.made["config"], name  # its recipe


def test_a_name_works_where_a_path_does(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    memory = recollect.Memory.load("mnist-1")
    assert (memory.name, memory.floats) == ("mnist-1", 7776)
    for command in (
        "info mnist-1",
        "recall mnist-1 --classes 3 --out three.npz",
        "plot recalled mnist-1 --out recalled.png",
        "compose mnist-1:3 mnist-1:8 --epochs 1 --network mlp:width=8 --save both.safetensors",
        "zoo",
        "zoo cifar100-asked/5-shot",
    ):
        assert main(shlex.split(command)) == 0, command
    shown = capsys.readouterr().out
    assert "task-19" in shown
    assert "72.4 ± 6.6" in shown
    assert (tmp_path / "both.safetensors").exists()


def test_what_exists_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_memory().save(tmp_path / "mnist-1")
    assert recollect.Memory.load("mnist-1").class_names == ("cat", "dog", "frog")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("info mnist", "did you mean 'mnist-1'"),
        ("info cifar100-asked/6-shot", "cifar100-asked/5-shot"),
        ("zoo mnist", "did you mean 'mnist-1'"),
        ("evaluate ../mnist-1", "../mnist-1 does not exist"),
        ("evaluate mnist-1 --record", "mnist-1 is of the zoo, whose files stay as they are"),
        ("distill digits --start mnist-2 --out x", "did you mean 'mnist-1'"),
        ("compose mnist-1:3 fashion-mnist:Bag", "did you mean 'fashion-mnist-1'"),
        ("info cifar100-asked/labels", "no public address yet"),
    ],
)
def test_what_cannot_be_is_one_line(command, words, cache, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["", ".", "a/../mnist-1", "mnist-1/../../x", "\0", "x" * 5000, "hf:x/y"])
def test_no_name_leads_elsewhere(name, cache):
    with pytest.raises(RecollectError, match="does not exist"):
        Memory.load(name)


def test_others_are_fetched_once(cache, mirror):
    served, asked = mirror
    shutil.copy(ROOT / "memories" / f"{FETCHED}.safetensors", served)
    first = recollect.Memory.load(FETCHED)
    assert (cache / f"{FETCHED}.safetensors").is_file()
    again = recollect.Memory.load(Path(FETCHED))
    assert torch.equal(first.bases, again.bases)
    assert len(asked) == 1
    assert zoo.name_of(zoo.find(FETCHED)) == FETCHED
    os.environ.pop(zoo.VARIABLE)  # what is there needs no address
    recollect.Memory.load(FETCHED)
    (cache / f"{FETCHED}.safetensors").write_bytes(b"half")  # what is damaged is fetched again
    with pytest.raises(RecollectError, match="no public address"):
        recollect.Memory.load(FETCHED)


@pytest.mark.parametrize(
    ("served", "words"),
    [
        (None, r"cannot be fetched \(404\)"),
        (b"something else", "its SHA-256 differs"),
        (bytes(200_000), "is larger than the 63,640 bytes"),
    ],
)
def test_another_file_is_refused(cache, mirror, served, words):
    if served is not None:
        mirror[0].write_bytes(served)
    with pytest.raises(RecollectError, match=words):
        recollect.Memory.load(FETCHED)
    assert not [path for path in cache.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("address", "words"),
    [("nowhere", "'nowhere', no web address"), ("http://127.0.0.1:1", "cannot be fetched"), ("http://[", "cannot be fetched")],
)
def test_a_wrong_address_is_said(cache, monkeypatch, address, words):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv(zoo.VARIABLE, address)
    with pytest.raises(RecollectError, match=words):
        recollect.Memory.load(FETCHED)


def test_a_sample_is_as_good_as_its_card_says():
    """Needs MNIST's official files; a few epochs of a small network get near what 300 of the protocol's give."""
    if not all(layout.find(data_root() / "mnist")[1] == [] for layout in NAMED["mnist"].layouts):
        pytest.skip("no MNIST at hand (RECOLLECT_DATA): the zoo's memories were not evaluated again")
    images = recollect.load("mnist")
    recipe = recollect.Recipe(network="convnet:width=16", epochs=20, lr=0.05)
    found = recollect.evaluate(recollect.Memory.load("mnist-1"), images, recipe=recipe, networks=1)
    assert found.mean > 80


def test_evaluation_of_a_name_is_written_elsewhere(tmp_path, monkeypatch, toy_npz):
    """Not beside the file, which is the package's."""
    monkeypatch.chdir(tmp_path)
    make_memory().save(tmp_path / "tiny.safetensors")
    entry = {**zoo.index()["mnist-1"], "sha256": sha256((tmp_path / "tiny.safetensors").read_bytes())}
    monkeypatch.setattr(zoo, "index", lambda: {"tiny": entry})
    monkeypatch.setattr(zoo, "HERE", tmp_path)
    command = f"evaluate tiny --data {toy_npz} --networks 1 --epochs 1 --no-baselines"
    assert main(shlex.split(command)) == 0
    assert (tmp_path / "runs" / "zoo" / "tiny" / "evaluations").is_dir()
    assert not (tmp_path / "evaluations").exists()


@pytest.mark.slow
def test_an_installed_wheel_has_the_zoo(tmp_path):
    """In an empty folder, without the repository."""
    source, site, empty = tmp_path / "source", tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    code = "import recollect; print(recollect.__file__); print(recollect.Memory.load('cifar10-1').floats)"
    environment = os.environ | {"PYTHONPATH": str(site)}
    for command in (["-c", code], ["-m", "recollect", "zoo", "mnist-1"]):
        run = subprocess.run([sys.executable, *command], cwd=empty, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        if command[0] == "-c":
            assert run.stdout.split() == [str(site / "recollect" / "__init__.py"), "30688"]
