"""What the attack found is closed, one test each; and a slice of it runs here."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import experiment_module, make_memory
from fastapi.testclient import TestClient
from PIL import Image
from test_distillation import CONFIG, toy
from test_hostile import saved, two_classes

from recollect import Classifier, Memory, Recipe, RecollectError, compose, distill, evaluate, load, outer, preset, select
from recollect.cli import main
from recollect.config import DistillConfig, changed, check
from recollect.continual.config import STREAMS
from recollect.continual.run import run as run_stream
from recollect.evaluation import Evaluation, keep
from recollect.export import export
from recollect.files import read_json
from recollect.nets import Network
from recollect.reproduce import page
from recollect.runs import MARK, load_checkpoint, own, save_checkpoint
from recollect.show import figures

ROOT = Path(__file__).parent.parent
STATE = {"state": {"step": 3, "bases": torch.arange(3.0)}}

# --- checkpoints -------------------------------------------------------------------------------------------------------


def sealed(archive: bytes) -> bytes:
    """With the checksum that a forger writes too."""
    return MARK + hashlib.sha256(archive).hexdigest().encode() + b"\n" + archive


def with_program(path: Path, program: bytes) -> None:
    """A checkpoint whose pickle is another."""
    save_checkpoint(path, STATE)
    inside, buffer = zipfile.ZipFile(io.BytesIO(path.read_bytes().partition(b"\n")[2])), io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in inside.namelist():
            archive.writestr(name, program if name.endswith("data.pkl") else inside.read(name))
    path.write_bytes(sealed(buffer.getvalue()))


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.",  # torch's own reader dies of it by SIGSEGV
        b"\x80\x02}()q\x00" + b"h\x00h\x00\x86q\x00" * 59 + b"u.",  # and hashes 2^60 nodes
        b"\x80\x02ccollections\nOrderedDict\n](]q\x00h\x00\x86K\x01\x86e\x85R.",
        b"\x80\x02ctorch\nload\n)R.",
    ],
    ids=["deep", "shared", "ordered", "other"],
)
def test_a_checkpoint_with_a_hostile_program(tmp_path, program):
    with_program(tmp_path / "checkpoint.pt", program)
    with pytest.raises(RecollectError, match=r"checkpoint\.pt cannot be read .*: delete it"):
        load_checkpoint(tmp_path / "checkpoint.pt", state=dict)


def test_an_archive_of_0_1_is_read_by_its_own_checksums(tmp_path):
    """Two bytes of its table of contents, which zipfile does not look at, made torch read other numbers."""
    path, buffer = tmp_path / "checkpoint.pt", io.BytesIO()
    torch.save(STATE, buffer)
    whole = buffer.getvalue()
    start = whole.index(b"PK\x01\x02")
    for place in range(start, len(whole)):
        path.write_bytes(whole[:place] + b"\x7f" + whole[place + 1 :])
        with contextlib.suppress(RecollectError):
            found = load_checkpoint(path, state=dict)
            assert found
            assert torch.equal(found["state"]["bases"], STATE["state"]["bases"])


def test_two_parts_of_one_name(tmp_path):
    path, buffer = tmp_path / "checkpoint.pt", io.BytesIO()
    torch.save(STATE, buffer)
    with zipfile.ZipFile(buffer, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(archive.namelist()[0], b"\x80\x02}.")
    path.write_bytes(sealed(buffer.getvalue()))
    with pytest.raises(RecollectError, match="cannot be read"), pytest.warns(UserWarning, match="Duplicate name"):
        load_checkpoint(path, state=dict)


def test_a_sparse_tensor_is_no_state(tmp_path):
    config = changed(CONFIG, outer_steps=2, checkpoint_seconds=0)
    distill(toy(), config, run=tmp_path)
    saved_ = load_checkpoint(tmp_path / "checkpoint.pt", state=dict)
    (tmp_path / "memory.safetensors").unlink()
    saved_["state"]["average"] = [tensor.to_sparse() for tensor in saved_["state"]["average"]]
    save_checkpoint(tmp_path / "checkpoint.pt", saved_)
    (tmp_path / "checkpoint.previous.pt").unlink()
    with pytest.raises(RecollectError, match=r"checkpoint\.pt (holds no state of this run|cannot be read)"):
        distill(toy(), config, run=tmp_path, resume=True)


def test_a_state_whose_numbers_are_one_place_in_memory():
    """An expanded tensor cannot be written to; a state takes a copy."""
    config, bases = changed(CONFIG, outer_optimiser="adam").outer, torch.zeros(2, 3, requires_grad=True)
    state = outer.begin(bases, torch.zeros(2, requires_grad=True), {}, config)
    outer.advance(state, 1.0, [torch.ones(2, 3), torch.ones(2)], config, 9)
    told = state.to_dict()
    told["optimiser"]["state"][0]["exp_avg"] = torch.ones(1).expand(2, 3)
    state.load(told)
    outer.advance(state, 1.0, [torch.ones(2, 3), torch.ones(2)], config, 9)
    assert bases.isfinite().all()


def test_damaged_preprocessing_is_one_line():
    from recollect import Preprocess

    with pytest.raises(RecollectError, match="is damaged: mean, std and zca are expected") as caught:
        Preprocess.from_json({"mean": [torch.zeros(9, 9)], "std": [1.0], "zca": None}, Path())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


# --- what files say of themselves --------------------------------------------------------------------------------------------

WRITTEN = {"name": "a", "network": "mlp", "values": [50.0], "on": "validation", "protocol": "x", "seconds": 1.0}


@pytest.mark.parametrize(
    "change", [{"values": 5}, {"values": []}, {"values": ["50"]}, {"values": [1e9]}, {"name": 0.5}, {"on": None}]
)
def test_an_evaluation_is_checked_where_it_is_read(tmp_path, change):
    with pytest.raises(RecollectError, match="is no evaluation of ours"):
        Evaluation.from_json(WRITTEN | change)
    without = {name: value for name, value in WRITTEN.items() if name not in change}
    (tmp_path / "s").mkdir()
    settings = dict(run=tmp_path / "s", networks=1)
    select(toy(), changed(CONFIG, outer_steps=1), "bases", [2, 3], **settings)
    for text in (WRITTEN | change, without):
        (tmp_path / "s" / "bases=3.json").write_text(json.dumps(text))
        with pytest.raises(RecollectError, match=r"bases=3\.json is no evaluation of ours: delete it"):
            select(toy(), changed(CONFIG, outer_steps=1), "bases", [2, 3], resume=True, **settings)


def test_evaluations_at_the_same_moment_are_both_kept(tmp_path, monkeypatch):
    """Both see that a name is free; only one gets it."""
    make_memory().save(path := tmp_path / "memory.safetensors")
    rows = [Evaluation.from_json(WRITTEN | {"name": "memory", "values": [value]}) for value in (50.0, 60.0)]
    monkeypatch.setattr("os.path.lexists", lambda _: False)
    places = [keep(path, [(row, "x")]) for row in rows]
    assert [json.loads(place.read_text())["rows"][0]["mean"] for place in places] == [50, 60]
    assert sorted(each.name for each in (tmp_path / "evaluations").iterdir()) == sorted(place.name for place in places)


def test_an_evaluation_of_a_long_name_is_kept(tmp_path):
    make_memory().save(path := tmp_path / f"{'漢' * 70}.safetensors")
    row = Evaluation.from_json(WRITTEN | {"name": "memory", "network": "mlp:width=4"})
    assert keep(path, [(row, "x")]).is_file()


def test_rows_of_results_are_checked_where_they_are_read(tmp_path):
    """Of recollect reproduce, and of scripts before it."""
    row = json.loads((ROOT / "results" / "memories" / "mnist-1.json").read_text())
    results = tmp_path / "results" / "reproduce"
    (tmp_path / "results" / "memories").mkdir(parents=True)
    for wrong in (row | {"test": {}}, row | {"legs": []}, row | {"test": row["test"] | {"values": [{}]}}, {"test": 5}):
        (tmp_path / "results" / "memories" / "mnist-1.json").write_text(json.dumps(wrong))
        with pytest.raises(RecollectError, match=r"results has a damaged result file of table1 .*: restore it"):
            page.every(results)
    shutil.rmtree(tmp_path / "results" / "memories")
    (found,) = [row for name, row in page.every(ROOT / "results" / "reproduce")["full"]["table1"].items() if name == "mnist-1"]
    one = found["accuracies"][0]
    results.mkdir()
    for wrong in (
        {"accuracies": []},
        {"accuracies": [one, one]},
        {"accuracies": [{"mean": 5.0}]},
        {"accuracies": [one | {"n": 5}]},
    ):
        (results / "full.json").write_text(json.dumps({"table1": {"mnist-1": found | {"accuracies": wrong}}}))
        with pytest.raises(RecollectError, match=r"full\.json is damaged at table1 mnist-1"):
            page.every(results)


def test_an_evaluation_without_the_memory_draws_nothing(tmp_path):
    make_memory().save(tmp_path / "memory.safetensors")
    row = WRITTEN | {"name": "random real images", "mean": 50.0}
    (tmp_path / "evaluation.json").write_text(json.dumps({"memory": "memory.safetensors", "rows": [row]}))
    with pytest.raises(RecollectError, match="has no accuracy of a memory, only of others"):
        figures.draw("architectures", [tmp_path / "memory.safetensors"])


def test_json_is_not_deep(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"kind": "distill", "data": {}, "distill": {"seed": ' + "[" * 400 + "]" * 400 + "}}")
    with pytest.raises(RecollectError, match="is JSON of more than 100 levels"):
        read_json(tmp_path / "config.json")
    assert main(["resume", str(tmp_path)]) == 2
    assert "more than 100 levels" in capsys.readouterr().err


@pytest.mark.parametrize("how", [{}, {"seeds": 1, "learners": [], "x": 1}, {"seeds": 1}])
def test_what_a_stream_was_told_is_what_it_can_be_told(tmp_path, capsys, how):
    told = {"kind": "continual", "data": {"name": "digits"}, "config": {}, "stream": "split", "how": how}
    (tmp_path / "config.json").write_text(json.dumps(told))
    assert main(["resume", str(tmp_path)]) == 2
    assert "config.json has a 'how' that is none" in capsys.readouterr().err


def test_half_a_character_is_served(tmp_path, monkeypatch):
    """It answered 500: UTF-8 does not have them."""
    from recollect.studio import app, shelf

    monkeypatch.setattr(shelf, "OWN", tmp_path / "none")
    path = saved(tmp_path / "x.safetensors", class_names=["\ud800", "b", "c"], dataset="\udfff")
    with TestClient(app.create_app(shelf.stock([path])), "http://localhost") as client:
        answer = client.get("/api/shelf")
    assert answer.status_code == 200
    assert answer.json()["memories"][0]["classes"][0] == "\ud800"


def test_an_error_is_one_line():
    with pytest.raises(RecollectError, match="unknown network 'a b c'") as caught:
        Network("a\nb\u2028c", (1, 8, 8), 2)
    assert "\n" not in str(caught.value)


# --- small things that become large ---------------------------------------------------------------------------------------


def test_what_a_network_makes_of_one_image_is_known_before(tmp_path, monkeypatch):
    """A memory of 1 kB may recall an image that takes gigabytes in a ConvNet."""
    monkeypatch.setenv("RECOLLECT_MOST_GIB", "0.2")
    with pytest.raises(
        RecollectError, match=r"an image in network 'convnet' for 3 classes of \[3, 65536, 8\] would take 0.2 GiB"
    ):
        Network("convnet", (3, 65536, 8), 3)
    assert Network("convnet:width=4", (3, 64, 64), 3)


def test_one_picture_of_a_small_file_may_be_large(tmp_path):
    """A memory of 4 kB had the studio take a gigabyte for a single picture."""
    from recollect.studio import shelf

    memory = make_memory()
    header = replace(memory.header, image_shape=[1, 1024, 65536], downsample=65536)
    Memory(memory.bases[:, :, :1, :1], memory.addressing, header).save(tmp_path / "m.safetensors")
    entry = shelf.stock([tmp_path / "m.safetensors"]).entries[0]
    with pytest.raises(RecollectError, match="m is too large for a browser"):
        entry.recall([0.0] * 4)


def test_words_of_a_table_become_columns_within_the_limit(tmp_path, monkeypatch):
    """A megabyte of letters is hundreds of one-hot columns."""
    lines = [",".join(chr(97 + (row + column) % 26) for column in range(200)) for row in range(300)]
    (tmp_path / "x.csv").write_text("\n".join([",".join(map(str, range(200))), *lines]))
    monkeypatch.setenv("RECOLLECT_MOST_GIB", "0.002")
    with pytest.raises(RecollectError, match=r"300 examples with 5,174 columns of words would take 0\.0 GiB"):
        load(tmp_path / "x.csv", label="0")


def test_no_room_for_a_step_is_said(monkeypatch):
    from recollect import training

    def full(*_):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to ...")

    monkeypatch.setattr(training._Plan, "steps", full)
    with pytest.raises(
        RecollectError, match="no room for a step of mlp:width=2 on images of 1x8x8: give a smaller batch than 640"
    ):
        compose([make_memory()]).train(Recipe("mlp:width=2", epochs=1))


@pytest.mark.parametrize("size", [2**17, 2**31, 2**62, 10**30])
def test_an_image_size_that_no_machine_has_room_for(toy_npz, tmp_path, size):
    for name in "ab":
        for number in range(4):
            (tmp_path / name).mkdir(exist_ok=True)
            Image.new("L", (4, 4)).save(tmp_path / name / f"{number}.png")
    for place in (toy_npz, tmp_path):
        with pytest.raises(RecollectError, match=f"size {size} is not an image size: give a number of pixels, 1 to 65,536"):
            load(place, size=size)
        with pytest.raises(RecollectError, match="would take"):
            load(place, size=60_000)


# --- numbers ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("window", 1.0), ("inner_steps", 2.0), ("seed", True), ("use_validation", 1), ("outer_steps", None), ("inner_lr", None)],
)
def test_settings_given_in_python_have_their_types(name, value):
    with pytest.raises(RecollectError, match=f"{name} cannot be {value}"):
        check(changed(DistillConfig(), **{name: value}))
    check(changed(DistillConfig(), window=np.int64(2), inner_lr=np.float32(0.5)))  # numbers of other makers are numbers


@pytest.mark.parametrize("momentum", [0, np.float32(0.5)])
def test_a_momentum_may_be_any_number(momentum, tmp_path):
    """Torch's Adam takes nothing but floats, and JSON no numbers of numpy."""
    config = changed(CONFIG, outer_optimiser="adam", outer_momentum=momentum, outer_steps=np.int64(2), checkpoint_seconds=0)
    memory = distill(toy(), config, run=tmp_path / "run")
    (tmp_path / "run" / "memory.safetensors").unlink()
    assert torch.equal(distill(toy(), config, run=tmp_path / "run", resume=True).bases, memory.bases)
    config = changed(CONFIG, outer_steps=1)
    assert select(toy(), config, "inner_lr", np.array([0.01, 0.02]), run=tmp_path / "s", networks=1).best in (0.01, 0.02)


@pytest.mark.parametrize("count", [0, 10_001, 2**63, 10**30])
def test_so_many_networks_or_seeds_are_none(tmp_path, count):
    memory = distill(toy(), changed(CONFIG, outer_steps=1))
    with pytest.raises(RecollectError, match=f"number of networks is {count}: give 1 to 10,000"):
        evaluate(memory, toy(), networks=count)
    for name in ("seeds", "workers", "together"):
        with pytest.raises(RecollectError, match=f"{name} is {count}: give 1 to 10,000"):
            run_stream(two_classes(), STREAMS["rotations"], out=tmp_path / "r", **{name: count})
    assert not (tmp_path / "r").exists()


# --- what a path points to ---------------------------------------------------------------------------------------------------


def test_outputs_are_written_where_their_paths_lead(tmp_path):
    """A link stays a link; what it leads to is written."""
    memory = make_memory()
    classifier = compose([memory]).train(Recipe("mlp:width=2", epochs=1))
    for name, write in {
        "m.safetensors": memory.save,
        "c.safetensors": classifier.save,
        "f.png": lambda path: figures.save(figures.draw("bases", [tmp_path / "m.safetensors"]), path),
        "r.npz": lambda path: export(memory, None, path, "npz"),
    }.items():
        (tmp_path / name).symlink_to(tmp_path / f"real-{name}")
        write(tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / f"real-{name}").stat().st_size > 100
    assert Memory.load(tmp_path / "m.safetensors").floats == memory.floats
    assert Classifier.load(tmp_path / "c.safetensors").class_names == memory.class_names


def test_a_link_in_a_runs_folder_leads_nowhere(tmp_path):
    """Whoever made the folder does not choose what is written over."""
    (tmp_path / "mine").write_text("precious")
    config = changed(CONFIG, outer_steps=2, checkpoint_seconds=0, keep_every=1)
    distill(toy(), changed(config, outer_steps=1), run=tmp_path / "first")
    told = json.loads((tmp_path / "first" / "config.json").read_text())
    (tmp_path / "run").mkdir()
    told["distill"]["outer_steps"] = 2
    (tmp_path / "run" / "config.json").write_text(json.dumps(told))
    for name in ("memory.safetensors", "memory-1.safetensors", "checkpoint.pt", "checkpoint.previous.pt", "metrics.jsonl"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "mine")
    (tmp_path / "run" / "checkpoint.pt").unlink()
    (tmp_path / "run" / "checkpoint.previous.pt").unlink()
    distill(toy(), changed(config, outer_steps=2), run=tmp_path / "run", resume=True)
    assert (tmp_path / "mine").read_text() == "precious"
    assert not (tmp_path / "run" / "memory.safetensors").is_symlink()
    assert own(tmp_path / "mine") == tmp_path / "mine"


# --- a slice of the attack ------------------------------------------------------------------------------------------------


HARMS = """
import json, os, sys
from pathlib import Path
import attack
from recollect import RecollectError

place = Path(sys.argv[1])
attack.COMPUTING = 0.5
harms = {
    "crash": lambda: os.kill(os.getpid(), 11),
    "hang": lambda: all(True for _ in iter(int, 1)),
    "memory": lambda: bytearray(2**31),
    "exception": lambda: {}["x"],
    "program": lambda: os.system("true"),
    "elsewhere": lambda: (place / "elsewhere").write_text("x"),
    "busy": lambda: os.path.exists(place / "met") or (os.mkdir(place / "met"), all(True for _ in iter(int, 1))),
    "fine": lambda: (_ for _ in ()).throw(RecollectError("no")),
}
tally = attack.Tally(place / "findings")
for name, harm in harms.items():
    kind = attack.Kind(name, lambda rng: {"x": rng.randbytes(3)}, lambda folder, rng, harm=harm: harm())
    attack.batch(tally, kind, 0, range(2), place / "cases")
found = [[each["target"], each["what"].split()[0]] for each in tally.findings]
print(json.dumps({"found": found, "tries": tally.tries, "refused": tally.refused}))
"""


def attacking(*words: object, cwd: Path) -> subprocess.CompletedProcess:
    """In a process of its own: children are forked from it."""
    places = os.pathsep.join(map(str, (ROOT / "src", ROOT / "experiments")))
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": places}, cwd=cwd)


def test_a_slice_of_the_attack(tmp_path):
    """Two thousand damaged files of every kind, kills, full disks and requests, all of one seed; see experiments/attack.py."""
    words = ["--minutes", 30, "--cases", 2000, "--seed", 0, "--out", "attack.json", "--findings", "findings"]
    done = attacking(ROOT / "experiments" / "attack.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "attack.json").read_text())
    assert found["findings"] == []
    assert sum(found["tries"].values()) > 2500
    assert sum(number for name, number in found["tries"].items() if name.startswith("SIGKILL")) >= 4


def test_the_attack_notices(tmp_path):
    """Crashes, hangs, memory, other exceptions, programs and files elsewhere, each told and saved with its input. What hangs only
    once has met a busy machine."""
    done = attacking("-c", HARMS, tmp_path, cwd=tmp_path)
    seen = json.loads(done.stdout.splitlines()[-1])
    words = {
        "crash": "the",
        "hang": "hangs:",
        "memory": "MemoryError:",
        "exception": "KeyError:",
        "program": "it",
        "elsewhere": "it",
    }
    assert seen["found"] == [[name, words[name]] for name in words for _ in range(2)]
    assert seen["tries"] == dict.fromkeys([*words, "busy", "fine"], 2)
    assert seen["refused"]["fine"] == 2
    assert len(list((tmp_path / "findings").glob("*/input/x"))) == 12


def test_an_attack_goes_on_where_it_was(tmp_path):
    words = [
        ROOT / "experiments" / "attack.py",
        "--only",
        "readers",
        "--share",
        0.01,
        "--out",
        "attack.json",
        "--findings",
        "found",
    ]
    told = []
    for _ in range(2):
        done = attacking(*words, "--minutes", 0, "--seed", 3, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        told.append(json.loads((tmp_path / "attack.json").read_text()))
        told[-1]["environment"] = None
    assert told[0]["tries"] == told[0]["done"] != {}
    assert sum(told[1]["tries"].values()) > sum(told[0]["tries"].values())
    assert told[1]["tries"] == told[1]["done"]
    done = attacking(*words, "--seed", 4, cwd=tmp_path)
    assert "attack.json is of other seed (3): give another --out" in done.stderr


def test_the_page_has_the_counts_of_the_file(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    attack_page = experiment_module("attack_page")
    assert attack_page.page(attack_page.PAGE.read_text()) == attack_page.PAGE.read_text()
    attacks = json.loads(attack_page.RESULTS.read_text())["attacks"]
    assert all(each["findings"] == [] for each in attacks)
    assert {group for each in attacks for group in each["groups"]} == {"files", "readers", "numbers", "kills", "studio"}


def test_readers_hold_where_the_guided_attack_begins(tmp_path, monkeypatch):
    """Without atheris it says how to get it."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    guided = experiment_module("attack_guided")
    for name in guided.TARGETS:
        for data in guided.corpus(name):
            for damaged in (data, data[: len(data) // 2], data[::-1]):
                guided.attempt(name, tmp_path / "x.npz", damaged)
    monkeypatch.setitem(sys.modules, "atheris", None)
    assert guided.main(["mat"]) == 2


def test_the_same_seed_gives_the_same_cases(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    for name in ("RECOLLECT_MOST_GIB", "OMP_NUM_THREADS"):  # which the program sets for itself
        monkeypatch.setenv(name, "")
    attack = experiment_module("attack")
    attack.prepare(tmp_path / "whole")
    for kinds in attack.KINDS.values():
        for kind in kinds:
            one, two = (kind.make(attack.generator(5, kind.name, 7)) for _ in range(2))
            assert one == two
    assert preset("fast") == DistillConfig()
