"""Jobs: whoever performs them, in whatever order, the same comes out; and nothing goes on when the program ends."""

import json
import pickle
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import recollect
from recollect.errors import RecollectError
from recollect.jobs import EXECUTORS, Inline, Job, Processes, Tell

HERE = [name for name in EXECUTORS if name != "list"]  # of the cluster: test_cluster


def double(number: int, tell: Tell) -> int:
    tell(f"doubling {number}", 0.5)
    tell(f"doubling {number}", 0.5)
    return 2 * number


def refuse(number: int, tell: Tell) -> int:
    raise RecollectError(f"{number} is not for me: give another")


@pytest.mark.parametrize("name", HERE)
def test_results_come_in_the_jobs_order_and_all_is_told(name):
    told: list[tuple[str, float]] = []
    jobs = [Job(f"job {number}", double, (number,)) for number in range(5)]
    found = EXECUTORS[name](2).run(jobs, lambda what, amount: told.append((what, amount)))
    assert found == [0, 2, 4, 6, 8]
    assert sorted(told) == sorted((f"doubling {number}", 0.5) for number in [*range(5)] * 2)
    assert EXECUTORS[name](2).run([], lambda what, amount: None) == []


@pytest.mark.parametrize("name", ["inline", "threads"])  # of processes: test_continual_run
def test_the_error_of_one_is_the_user_s(name):
    jobs = [Job("fine", double, (1,)), Job("wrong", refuse, (2,)), Job("fine too", double, (3,))]
    with pytest.raises(RecollectError, match="2 is not for me: give another"):
        EXECUTORS[name](2).run(jobs, lambda what, amount: None)


def test_what_cannot_be_sent_is_told():
    jobs = [Job(str(number), lambda tell: None) for number in range(2)]
    with pytest.raises(RecollectError, match=r"jobs cannot be sent to other processes .*: perform them in this one"):
        Processes(2).run(jobs, lambda what, amount: None)


def test_a_run_that_was_stopped_in_another_process_says_so_here():
    from recollect.runs import Stopped

    stopped = pickle.loads(pickle.dumps(Stopped(signal.SIGTERM, Path("run"), 3)))
    assert stopped.signal == signal.SIGTERM
    assert str(stopped) == "stopped after outer step 3: continue with recollect resume run"


@pytest.fixture(scope="module")
def small() -> dict:
    """A selection of two values, without where and by whom. What takes long to import is not in other processes' way."""
    from test_evaluation import SHORT, toy

    return {"images": toy(), "config": SHORT, "field": "bases", "values": [2, 3], "networks": 2}


# --- through the public interface --------------------------------------------------------------------------------------


class Backwards:
    """An executor of one's own: the last job first."""

    def __init__(self):
        self.performed: list[str] = []

    def run(self, jobs, tell):
        results = {}
        for number, job in reversed(list(enumerate(jobs))):
            self.performed.append(job.name)
            results[number] = job(tell)
        return [results[number] for number in range(len(jobs))]


class Printed:
    """Another one, that leaves the work to others."""

    def run(self, jobs, tell):
        raise RecollectError(", ".join(f"perform {job.name}" for job in jobs))


def written(folder: Path) -> dict[str, object]:
    """Memories as bytes, results without their times."""
    found: dict[str, object] = {str(path): path.read_bytes() for path in folder.rglob("*.safetensors")}
    for path in folder.rglob("*.json"):
        if path.name not in ("environment.json", "config.json") and "buffer" not in path.name:
            found[str(path)] = _timeless(json.loads(path.read_text()))
    return {name.removeprefix(f"{folder}/"): value for name, value in found.items()}


def _timeless(value):
    if isinstance(value, list):
        return [_timeless(each) for each in value]
    kept = {"seconds", "distilling_seconds", "environment"}
    return {n: _timeless(v) for n, v in value.items() if n not in kept} if isinstance(value, dict) else value


@pytest.fixture(scope="module")
def selected(tmp_path_factory, small) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("inline") / "s"
    recollect.select(**small, run=folder)
    return written(folder)


@pytest.mark.parametrize("name", [*HERE, "backwards"])
def test_a_selection_is_the_same_by_any_executor(small, selected, tmp_path, name):
    executor, lines = EXECUTORS[name](2) if name in EXECUTORS else Backwards(), []
    found = recollect.select(**small, run=tmp_path / "s", executor=executor, progress=lines.append)
    assert written(tmp_path / "s") == selected
    assert [evaluation.name for evaluation in found.evaluations] == ["bases 2", "bases 3"]
    assert sorted(line["step"] for line in lines) == [1, 1, 2, 2]


def test_a_stream_is_the_same_by_any_executor(toy_images, tmp_path):
    from test_continual_run import CONFIG as STREAM

    from recollect.continual.run import run

    learners, told = ["compress", "union", "er"], []
    run(toy_images, STREAM, out=tmp_path / "usual", seeds=2, learners=learners)
    ours = Backwards()

    def tell(what: str, amount: float) -> None:
        told.append((what, amount))

    for folder, executor in (("backwards", ours), ("threads", EXECUTORS["threads"](2))):
        run(
            toy_images, STREAM, out=tmp_path / folder, seeds=2, learners=learners, executor=executor,
            progress=lambda total, done: tell,
        )  # fmt: skip
        assert written(tmp_path / folder) == written(tmp_path / "usual")
        assert sum(amount for _, amount in told) == pytest.approx(2 * 3 * STREAM.stream.tasks)
        told.clear()
    assert ours.performed[0] == "seed 1, er"
    assert ours.performed[-1] == "seed 0, compress"
    assert len(ours.performed) == 2 * (STREAM.stream.tasks + 3)


def test_what_others_have_performed_is_not_performed_again(small, selected, tmp_path):
    """An executor may also say what there is to do, and leave it at that; each job by itself is the work of any process."""
    options = small | {"run": tmp_path / "s"}
    with pytest.raises(RecollectError, match="perform bases 2, perform bases 3"):
        recollect.select(executor=Printed(), **options)
    only = type("Only", (), {"run": lambda self, jobs, tell: Inline().run(jobs[1:], tell)})
    assert recollect.select(executor=only(), resume=True, **options).evaluations == []
    assert (tmp_path / "s" / "bases=3.json").exists()
    again = Backwards()
    assert len(recollect.select(executor=again, resume=True, **options).evaluations) == 2
    assert written(tmp_path / "s") == selected


# --- the end -----------------------------------------------------------------------------------------------------------


MAIN = """
import os, sys, time
from pathlib import Path
from recollect.jobs import Job, Processes

def wait_here(folder, tell):
    (folder / str(os.getpid())).touch()
    time.sleep(600)

if __name__ == "__main__":
    Processes(2).run([Job(str(n), wait_here, (Path(sys.argv[1]),)) for n in range(3)], lambda what, amount: None)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_the_program(tmp_path, number):
    script, folder = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(MAIN)
    folder.mkdir()
    process = subprocess.Popen([sys.executable, script, folder], stderr=subprocess.DEVNULL)
    try:
        until(lambda: len(list(folder.iterdir())) == 2)
        process.send_signal(number)
        assert process.wait(60) != 0
        until(lambda: not any(is_alive(path.name) for path in folder.iterdir()))
    finally:
        process.kill()


def is_alive(pid: str) -> bool:
    try:
        return Path("/proc", pid, "cmdline").read_bytes() != b""  # nothing is left of a zombie's
    except OSError:
        return False


def until(is_so) -> None:
    deadline = time.monotonic() + 600
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- a list of commands --------------------------------------------------------------------------------------------------


def commands(capsys, *words: object) -> list[list[str]]:
    from recollect.cli import main

    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("recollect ")]


def test_a_selection_as_commands(capsys, tmp_path, toy_npz):
    from recollect.cli import main

    short = ["--outer-steps", 2, "--network", "mlp:width=4", "--inner-steps", 2, "--networks", 2, "--values", 2, 3]
    words = ["select", toy_npz, *short, "--out"]
    assert main([str(word) for word in [*words, tmp_path / "inline", "--quiet"]]) == 0
    listed = commands(capsys, *words, tmp_path / "listed", "--executor", "list")
    assert [line[-1] for line in listed] == ["bases 2", "bases 3"]
    for line in reversed(listed):
        assert main(line[1:]) == 0
    assert commands(capsys, "resume", tmp_path / "listed", "--executor", "list") == []
    assert main(["resume", str(tmp_path / "listed"), "--quiet"]) == 0
    assert written(tmp_path / "listed") == written(tmp_path / "inline")
    assert main(["resume", str(tmp_path / "listed"), "--job", "bases 4"]) == 2
    assert "unknown job 'bases 4': did you mean" in capsys.readouterr().err


def test_a_stream_as_commands(capsys, tmp_path, toy_npz):
    from test_continual_run import TINY

    from recollect.cli import main

    words = ["continual", "rotations", "--data", toy_npz, *TINY, "--seeds", 1, "--learners", "compress", "union", "er", "--out"]
    assert main([str(word) for word in [*words, tmp_path / "inline", "--quiet"]]) == 0
    first = commands(capsys, *words, tmp_path / "listed", "--executor", "list")
    assert [line[-1] for line in first] == [*(f"seed 0, compress, task {task}" for task in (1, 2, 3)), "seed 0, er"]
    assert main(["resume", str(tmp_path / "listed"), "--job", "seed 0, union"]) == 2
    assert "union needs the memories of all tasks, and task 1 has none" in capsys.readouterr().err
    for line in [*first, first[0]]:  # one that is finished, too
        assert main(line[1:]) == 0
    then = commands(capsys, *words, tmp_path / "listed", "--executor", "list")
    assert [line[-1] for line in then] == ["seed 0, compress", "seed 0, union"]
    for line in then:
        assert main(line[1:]) == 0
    assert main(["resume", str(tmp_path / "listed"), "--quiet"]) == 0
    ours, theirs = (written(tmp_path / name) for name in ("listed", "inline"))
    assert {n: v for n, v in ours.items() if n != "table.json"} == {n: v for n, v in theirs.items() if n != "table.json"}


def test_an_evaluation_as_commands_and_by_processes(capsys, tmp_path):
    from recollect.cli import main

    config = recollect.preset("fast", network="mlp:width=8", inner_steps=2, window=2, outer_steps=2)
    recollect.distill(recollect.load("digits"), config).save(tmp_path / "m.safetensors")
    short = ["--epochs", 2, "--networks", 2, "--architectures", "mlp:width=8", "mlp:width=4"]
    words = ["evaluate", tmp_path / "m.safetensors", *short]
    listed = commands(capsys, *words, "--executor", "list", "--json", "x.json")
    assert [line[-1] for line in listed] == ["mlp:width=8", "mlp:width=4"]
    for line in listed:
        assert main(line[1:]) == 0
    assert len(list((tmp_path / "evaluations").iterdir())) == 2
    found = {}
    for name in ("inline", "processes"):
        path = tmp_path / f"{name}.json"
        assert main([str(word) for word in [*words, "--executor", name, "--workers", 2, "--json", path]]) == 0
        found[name] = [(row["name"], row["network"], row["values"]) for row in json.loads(path.read_text())["rows"]]
    assert found["inline"] == found["processes"]
    assert len(found["inline"]) == 4


def test_cells_as_commands(capsys, tmp_path, monkeypatch):
    from recollect.reproduce import run as module

    monkeypatch.setattr(module, "_lacks", lambda *_: "")
    folders = ["--out", tmp_path / "out", "--results", tmp_path / "results", "--pages", tmp_path / "pages"]
    listed = commands(capsys, "reproduce", "table1", *folders, "--cells", "mnist-1", "svhn-1", "--executor", "list")
    assert [line[:5] for line in listed] == [
        ["recollect", "reproduce", "table1", "--cells", name] for name in ("mnist-1", "svhn-1")
    ]
    for line in listed:
        assert line[line.index("--out") + 1] == str(tmp_path / "out")
    assert not [*tmp_path.rglob("*.safetensors")]
