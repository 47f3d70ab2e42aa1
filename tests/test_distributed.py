"""One run on many processes: torchrun's own, on this machine. This file is also the script that they run."""

import contextlib
import io
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import pytest
import torch

import recollect
from recollect import RecollectError, cli, distill, distributed, unroll
from recollect.config import changed, preset
from recollect.distributed import Ranks
from recollect.fast.engine import Engine
from recollect.fast.flat import General, Shards
from recollect.files import sha256
from recollect.nets import Network

MLP = preset(
    "fast", network="mlp:width=16", bases=6, downsample=1, real_per_class=20, inner_steps=4, window=None, outer_steps=4,
    networks_per_step=3, inner_lr=0.05, init="unit", checkpoint_seconds=0.0,
)  # fmt: skip
CONVNET = changed(MLP, network="convnet:width=16,depth=1", outer_steps=2, window=3, augment="crop")
CONFIGS = {"mlp": MLP, "convnet": CONVNET, "resumed": MLP}
RECIPE = recollect.Recipe("mlp:width=8", epochs=3, batch=32, lr=0.1)


def digits() -> recollect.Images:
    return recollect.load("digits")


# --- what each process does ----------------------------------------------------------------------------------------------------


def work(out: Path) -> dict[str, object]:
    """Distil, go on with what another number of processes began, evaluate: the same, however many processes there are."""
    found: dict[str, object] = {}
    images, said = digits(), []
    for name, config in CONFIGS.items():
        memory = distill(images, config, run=out / name, resume=name == "resumed", say=said.append)
        found[name] = sha256(memory.bases.numpy().tobytes(), memory.addressing.numpy().tobytes())
    for networks in (3, 1):
        found[f"{networks} networks"] = recollect.evaluate(memory, images, recipe=RECIPE, networks=networks).values
    return found | {"said": [line for line in said if "processes" in line]}


def split_batches(ranks: Ranks, network: str) -> float:
    """How far a metagradient is from that of one process, in float64."""
    net, generator = Network(network, (1, 8, 8), 3), torch.Generator().manual_seed(0)
    images = torch.randn(9, 1, 8, 8, generator=generator, dtype=torch.float64)
    labels, batches = torch.arange(9) % 3, torch.stack([torch.randperm(9, generator=generator)[:5] for _ in range(4)])
    query = torch.randn(7, 1, 8, 8, generator=generator, dtype=torch.float64), torch.arange(7) % 3
    params = {name: p.double() for name, p in net.fresh(0).items()}
    options = {"lr": 0.05, "momentum": 0.9, "window": 3}
    engine = Engine(Shards(General(net, unroll.eager(net.loss)), ranks))
    found = engine.metagradient(params, images, labels, batches, query, **options)
    alone = unroll.metagradient(net.loss, params, images, labels, batches, query, **options)
    value, ours = float(found.loss), ranks.total(found.images.clone())
    assert value == pytest.approx(float(alone.loss), rel=1e-13)
    return float((ours - alone.images).norm() / alone.images.norm())


def by_batch(out: Path) -> torch.Tensor:
    config = changed(CONVNET, shard="batch", outer_steps=1, inner_steps=2, window=None)
    return distill(digits(), config, run=out / "shard").bases


def main(out: Path) -> None:
    with distributed.joined() as ranks:
        found = work(out)
        if ranks.world == 3:
            found["float64"] = [split_batches(ranks, name) for name in ("mlp:width=8", "convnet:width=8,depth=1")]
            torch.save(by_batch(out), out / f"shard-{ranks.rank}.pt")
    found["threads"] = [name for path in Path("/proc/self/task").iterdir() if "gloo" in (name := (path / "comm").read_text())]
    (out / f"rank-{ranks.rank}.json").write_text(json.dumps(found))


WRONG = {
    "other settings": ("digits --outer-steps {number} --network mlp:width=8 --minutes 1", "rank 1 has outer_steps 3, rank 0 2"),
    "other data": ("{place} --network mlp", "rank 1: unknown dataset 'nowhere'"),
    "regression": ("digits --objective regression --network mlp", "objective regression has no networks to share out to 2"),
    "another command": (None, "info has nothing to share out to 2 processes: start it without torchrun"),
    "both": ("digits --network mlp:width=0", "width is '0'"),
}


def go_wrong(out: Path) -> None:
    """Commands that cannot be: what each process says, and how it ends."""
    rank = int(os.environ["RANK"])
    found = {}
    for name, (words, _) in WRONG.items():
        words = "info nothing" if words is None else f"distill {words} --out {out / name.replace(' ', '-')}"
        words = words.format(number=2 + rank, place="nowhere" if rank else "digits")
        with contextlib.redirect_stderr(io.StringIO()) as told, contextlib.redirect_stdout(told):
            try:
                code = cli.main(words.split())
            except SystemExit as end:
                code = end.code
        found[name] = (code, told.getvalue())
    (out / f"rank-{rank}.json").write_text(json.dumps(found))


# --- the tests -----------------------------------------------------------------------------------------------------------------


def torchrun(processes: int, *command: object, **options) -> subprocess.Popen:
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    started += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(recollect.__file__).parent.parent)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([*started, *map(str, command)], env=environment, text=True, start_new_session=True, **pipes)


def finish(process: subprocess.Popen) -> str:
    """What it printed; nothing of it is left behind."""
    try:
        told = process.communicate(timeout=300)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    until(lambda: not ranks_of(process.pid))
    return told


def ranks_of(torchrun: int) -> dict[int, int]:
    """The processes that a torchrun started and that compute: rank -> id, by what it left in their environment."""
    found = {}
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, KeyError):  # gone, or not yet another program than torchrun
            words = dict(each.split("=", 1) for each in (path / "environ").read_text().split("\0") if "=" in each)
            if (path / "stat").read_text().rsplit(")", 1)[1].split()[1] == str(torchrun):
                found[int(words["RANK"])] = int(path.name)
    return found


def until(is_so) -> None:
    deadline = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def begin(folder: Path) -> Path:
    """A run that one process has begun."""

    def stop(line):
        if line["step"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(digits(), MLP, run=folder / "resumed", progress=stop)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, dict[str, object]]:
    out = begin(tmp_path_factory.mktemp("alone"))
    return out, work(out)


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_the_same_bytes_by_any_number_of_processes(alone, tmp_path, processes):
    folder, wanted = alone
    said = finish(process := torchrun(processes, __file__, begin(tmp_path)))
    assert process.returncode == 0, said
    for name in CONFIGS:
        ours, theirs = ((place / name / "memory.safetensors").read_bytes() for place in (tmp_path, folder))
        assert ours == theirs, said
        assert [line["loss"] for line in lines(tmp_path / name)] == [line["loss"] for line in lines(folder / name)]
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(processes)]
    idle = "4 processes share 3 inner networks an outer step: 1 idle"
    for each in found:
        assert {n: each[n] for n in wanted if n != "said"} == json.loads(
            json.dumps({n: wanted[n] for n in wanted if n != "said"})
        )
        assert each["threads"] == []  # one that is left can end the process by a signal, after all is done
        assert all(idle in line for line in each["said"])
        assert len(each["said"]) == (3 if processes == 4 else 0)
        assert max(each.get("float64", [0])) < 1e-13
    if processes == 3:
        shards = [torch.load(tmp_path / f"shard-{rank}.pt") for rank in range(3)]
        assert all(torch.equal(shard, shards[0]) for shard in shards)
        torch.testing.assert_close(shards[0], by_batch(tmp_path / "one"), rtol=1e-4, atol=1e-5)


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


SETTINGS = {
    "network": "mlp:width=16", "bases": 6, "downsample": 1, "real-per-class": 20, "inner-steps": 4, "window": 4, "init": "unit",
    "networks-per-step": 2, "outer-steps": 250, "checkpoint-seconds": 0,
}  # fmt: skip
COMMAND = ["distill", "digits", *(str(word) for name, value in SETTINGS.items() for word in (f"--{name}", value))]


def test_a_killed_rank_is_started_again_and_a_signal_saves(tmp_path):
    """In one run: rank 1 is killed, torchrun starts all again; torchrun is told to stop, and stops them after a step; one process
    goes on to the end."""
    run = tmp_path / "run"
    process = torchrun(2, "-m", "recollect", *COMMAND, "--out", run, max_restarts=1)
    try:
        until(lambda: (run / "metrics.jsonl").exists() and len(lines(run)) > 3)
        first = ranks_of(process.pid)
        assert set(first) == {0, 1}
        os.kill(first[1], signal.SIGKILL)
        until(lambda: len(again := ranks_of(process.pid)) == 2 and not set(again.values()) & set(first.values()))
        at = len(lines(run))
        until(lambda: len(lines(run)) > at + 3)
        os.kill(process.pid, signal.SIGTERM)
    finally:
        said = finish(process)
    assert "stopped after outer step" in said
    assert 'Traceback (most recent call last):\n  File "' + str(Path(recollect.__file__).parent) not in said
    assert cli.main(["resume", str(run), "--quiet"]) == 0
    assert cli.main([*COMMAND, "--out", str(tmp_path / "whole"), "--quiet"]) == 0
    ours, theirs = ((tmp_path / name / "memory.safetensors").read_bytes() for name in ("run", "whole"))
    assert ours == theirs
    assert [line["step"] for line in lines(run)] == [*range(1, 251)]


def test_without_torchrun_its_processes_end(tmp_path):
    process = torchrun(2, "-m", "recollect", *COMMAND, "--out", tmp_path / "run")
    try:
        until(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
        started = [*ranks_of(process.pid).values()]
        process.kill()
        process.wait()
        until(lambda: not any(is_alive(pid) for pid in started))
    finally:
        finish(process)


def is_alive(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes() != b""
    except OSError:
        return False


def test_what_cannot_be_is_said_once(tmp_path):
    said = finish(torchrun(2, __file__, tmp_path, "wrong"))
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    for name, (_, error) in WRONG.items():
        (code, told), (other_code, other_told) = first[name], second[name]
        assert (code, other_code) == (2, 2), said
        assert told.startswith("error: "), (name, told)
        assert told.count("\n") == 1
        assert error in told
        assert other_told == ""


def test_nobody_to_meet():
    with socket.socket() as taken:  # until the end: nobody else can listen there
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        code = "from recollect import cli, distributed as d; d.MEETING = 1; import sys; sys.exit(cli.main(['distill', 'digits']))"
        environment = os.environ | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment |= {"PYTHONPATH": str(Path(recollect.__file__).parent.parent), "TORCH_CPP_LOG_LEVEL": "FATAL"}
        ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2
    assert f"error: rank 1 of 2 met nobody at 127.0.0.1:{port} in 1 s: start all 2 processes by torchrun" in ended.stderr


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "many"), ("RANK", "-1"), ("RANK", "1" * 4400), ("LOCAL_RANK", "٣")])
def test_an_environment_that_is_none(name, value, monkeypatch, capsys):
    for each, usual in {"WORLD_SIZE": "2", "RANK": "0", name: value}.items():
        monkeypatch.setenv(each, value if each == name else usual)
    assert cli.main(["distill", "digits"]) == 2
    assert f"error: the environment has {name} '{value}', no whole number" in capsys.readouterr().err


def met(*facts: dict[str, object]) -> list[str]:
    """What each of some processes is told when they meet; nothing if they may go on."""
    store, told = torch.distributed.HashStore(), [""] * len(facts)

    def meet(rank: int) -> None:
        try:
            Ranks(rank, len(facts), store).meet(str(facts[rank].get("device", "cpu")), dict(facts[rank]))
        except (RecollectError, SystemExit) as error:
            told[rank] = str(error)
            store.set("0: verdict", json.dumps("failed"))  # as `tell` does

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(len(facts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_processes_are_compared_before_anything_is_computed():
    assert met({"seed": 1}, {"seed": 1}, {"seed": 1}) == ["", "", ""]
    assert met({"seed": 1}, {"seed": 1}, {"seed": 2})[0] == "rank 2 has seed 2, rank 0 1: start all with the same"
    assert met({"torch": "x"}, {})[1] == ""  # of torch's version it asks torch
    cuda = met({"device": "cuda"}, {"device": "cuda"})
    assert torch.cuda.is_available() or "--nproc-per-node 0, or device cpu" in cuda[0]
    assert "each process takes the GPU of its LOCAL_RANK: give cuda" in met({"device": "cuda:1"}, {})[0]


@pytest.mark.parametrize(("what", "there"), [("torch", "0.4"), ("recollect", "9"), ("Python", "2.7"), ("numpy", "1.0")])
def test_another_version_is_refused(what, there):
    """By rank 0, which says whose it is."""
    store = torch.distributed.HashStore()
    versions = {"torch": torch.__version__, "recollect": recollect.__version__, "numpy": numpy.__version__}
    versions |= {"Python": platform.python_version(), "threads (OMP_NUM_THREADS)": torch.get_num_threads(), "device": "cpu"}
    store.set("0: rank 1", json.dumps(versions | {what: there}))
    with pytest.raises(RecollectError, match=rf"rank 1 has {what} '{there}', rank 0 '.*': start all with the same"):
        Ranks(0, 2, store).meet("cpu", {})


if __name__ == "__main__":
    torch.set_num_threads(1)
    (go_wrong if sys.argv[2:] else main)(Path(sys.argv[1]))
