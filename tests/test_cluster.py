"""Jobs on a real Ray of two nodes on this machine: the same bytes as inline, also where a worker and a node are killed."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_distributed import is_alive, until
from test_jobs import double, refuse, written

import recollect
from recollect import RecollectError, cluster
from recollect.cluster import OnRay
from recollect.commands.performing import Performing
from recollect.config import preset
from recollect.continual.run import run
from recollect.jobs import Job

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("ray")]  # Ray warns; one cluster is enough
SMALL = preset(
    "fast", network="mlp:width=16", bases=6, downsample=1, real_per_class=20, inner_steps=4, window=None, outer_steps=150,
    inner_lr=0.05, init="unit", checkpoint_seconds=0.0,
)  # fmt: skip
HEALTH = {"health_check_period_ms": 500, "health_check_failure_threshold": 4, "health_check_timeout_ms": 60_000}
"""a node that is gone refuses at once; one that is only busy has a minute"""


@pytest.fixture(scope="module")
def two_nodes():
    """A cluster, and a driver that is connected to it."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    source = str(Path(recollect.__file__).parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [source, str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    node = {"num_cpus": 1, "object_store_memory": 2**27, "include_dashboard": False}
    for patience in (1, 0):  # a busy machine may be too slow for Ray's own
        try:
            made = Cluster(initialize_head=True, head_node_args=node | {"_system_config": HEALTH})
            break
        except (SystemExit, RuntimeError):
            assert patience
    made.second = made.add_node(num_cpus=1, object_store_memory=2**27)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def connected(two_nodes):
    import ray

    if not ray.is_initialized():
        ray.init(two_nodes.address, log_to_driver=False, configure_logging=False)
    return two_nodes


def select(folder: Path, executor=None, **options):
    options = {"config": SMALL, "field": "bases", "values": [4, 6, 8], "networks": 2, "network": None} | options
    return recollect.select(recollect.load("digits"), run=folder, executor=executor, **options)


@pytest.fixture(scope="module")
def inline(tmp_path_factory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("inline") / "s"
    select(folder)
    return written(folder)


def test_results_errors_and_what_is_told(connected, tmp_path):
    told = []
    jobs = [Job(f"job {number}", double, (number,)) for number in range(3)]
    assert OnRay(cpus=1).run(jobs, lambda what, amount: told.append((what, amount))) == [0, 2, 4]
    assert sorted(told) == sorted((f"doubling {number}", 0.5) for number in [*range(3)] * 2)
    assert OnRay().run([], lambda what, amount: None) == []
    with pytest.raises(RecollectError, match="2 is not for me: give another"):
        OnRay(cpus=1).run([Job("wrong", refuse, (2,), folder=tmp_path), jobs[0]], lambda what, amount: None)
    assert "2 is not for me" in (tmp_path / "logs" / "wrong.txt").read_text()
    assert not (tmp_path / ".seen").exists()
    with pytest.raises(RecollectError, match="jobs cannot be sent to other processes"):
        OnRay(cpus=1).run([Job("one", lambda tell: None)], lambda what, amount: None)


def test_what_the_cluster_cannot_do(connected, tmp_path, monkeypatch):
    job = Job("job", double, (1,), folder=tmp_path)
    with pytest.raises(
        RecollectError, match=r"no node .* has 64 CPUs and 0 GPUs for a job \(they have 1 CPUs and 0 GPUs, 1 CPUs"
    ):
        OnRay(cpus=64).run([job], lambda what, amount: None)
    with pytest.raises(RecollectError, match=r"has 1 CPUs and 0.25 GPUs for a job"):
        OnRay(gpus=0.25).run([job], lambda what, amount: None)
    with monkeypatch.context() as patch:
        patch.setattr(cluster, "_token", lambda folder: contextlib.nullcontext("elsewhere"))
        with pytest.raises(RecollectError, match=rf"does not see {tmp_path}: give a folder .* or --ray-folders returned"):
            OnRay(cpus=1).run([job], lambda what, amount: None)
    monkeypatch.setattr(recollect, "__version__", "0.0.1")
    with pytest.raises(RecollectError, match=r"has recollect [\d.]+, this one 0.0.1: install the same"):
        OnRay(cpus=1).run([job], lambda what, amount: None)


def test_a_stream_is_that_of_one_process(connected, toy_images, tmp_path):
    from test_continual_run import CONFIG

    learners, told = ["compress", "union", "er"], []
    run(toy_images, CONFIG, out=tmp_path / "inline", seeds=2, learners=learners)
    run(
        toy_images, CONFIG, out=tmp_path / "ray", seeds=2, learners=learners, executor=OnRay(cpus=1),
        progress=lambda total, done: lambda what, amount: told.append(amount),
    )  # fmt: skip
    assert written(tmp_path / "ray") == written(tmp_path / "inline")
    assert sum(told) == pytest.approx(2 * 3 * CONFIG.stream.tasks)
    assert (tmp_path / "ray" / "logs" / "seed-1-er.txt").exists()


def test_folders_that_come_back(connected, tmp_path, inline):
    with pytest.warns(UserWarning, match="their checkpoints do not survive their node"):
        found = select(tmp_path / "s", OnRay(cpus=1, returned=True))
    assert written(tmp_path / "s") == inline
    assert len(found.evaluations) == 3


def worker(run: Path) -> int | None:
    """The process that has a run's folder."""
    with contextlib.suppress(OSError):
        if found := re.match(r"process (\d+)", (run / ".lock").read_text()):
            return int(found[1])
    return None


def steps(run: Path) -> int:
    with contextlib.suppress(OSError):
        return len((run / "metrics.jsonl").read_text().splitlines())
    return 0


def test_killed_workers_and_nodes(connected, tmp_path, inline):
    """Of three jobs on two nodes: the worker of one is killed, then a node. The jobs go on elsewhere, from their checkpoints."""
    folder, killed = tmp_path / "s", []

    def progress(line):
        at = next((value for value in (4, 6, 8) if steps(folder / f"bases={value}") > 20), None)
        if not killed and at and (pid := worker(folder / f"bases={at}")):
            os.kill(pid, signal.SIGKILL)
            killed.append(at)
        elif len(killed) == 1 and steps(folder / "bases=8") > 20:
            connected.remove_node(connected.second, allow_graceful=False)
            killed.append("node")

    select(folder, OnRay(cpus=1), progress=progress)
    assert killed[1:] == ["node"]
    assert written(folder) == inline
    for value in (4, 6, 8):
        assert steps(folder / f"bases={value}") == 150


COMMAND = [
    "select",
    "digits",
    "--values",
    "4",
    "--outer-steps",
    "100000",
    "--checkpoint-seconds",
    "0",
    "--network",
    "mlp:width=16",
]


def test_nothing_goes_on_when_the_program_ends(two_nodes, tmp_path):
    """Two programs at the same time: one is told to stop, one is killed."""
    words = [
        "--inner-steps",
        "3",
        "--window",
        "3",
        "--executor",
        "ray",
        "--cpus-per-job",
        "1",
        "--ray-address",
        two_nodes.address,
    ]
    program, programs = [sys.executable, "-m", "recollect", *COMMAND, *words, "--out"], {}
    try:
        for number in (signal.SIGINT, signal.SIGKILL):
            programs[number] = subprocess.Popen([*program, tmp_path / number.name], stderr=subprocess.PIPE, text=True)
        for number, process in programs.items():
            run = tmp_path / number.name / "bases=4"
            until(lambda run=run, process=process: steps(run) > 3 or process.poll() is not None)
            pid = worker(run)
            assert pid
            process.send_signal(number)
            said = process.communicate(timeout=300)[1]
            until(lambda pid=pid: not is_alive(pid))
            assert number != signal.SIGINT or (process.returncode, "Traceback" in said) == (130, False)
    finally:
        for process in programs.values():
            process.kill()


def test_without_a_cluster(monkeypatch, tmp_path):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "ANSWER", 0.5)
    with pytest.raises(RecollectError, match=r"no Ray cluster at '127.0.0.1:1' \(nobody answers there in 0 s\): start one"):
        OnRay("127.0.0.1:1").run([Job("job", double, (1,))], lambda what, amount: None)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RecollectError, match=r"Ray is not installed: pip install 'recollect\[ray\]', or give another executor"):
        OnRay().run([Job("job", double, (1,))], lambda what, amount: None)


def test_threads_of_a_job():
    assert OnRay().threads == torch.get_num_threads()
    assert OnRay(gpus=0.5).threads == 1
    assert OnRay(cpus=3, gpus=1).threads == 3


def test_the_last_node_with_room_is_lost(monkeypatch):
    """Then nobody waits for ever."""
    nodes = [{"Alive": True, "Resources": {"CPU": 2.0}}]
    performance = object.__new__(cluster._Performance)
    performance.ray = type("Ray", (), {"nodes": lambda self: nodes})()
    performance.asked, performance.without_room = {"CPU": 2.0, "GPU": 0.0}, 0.0
    performance._check_room()
    assert not performance.without_room
    nodes[0]["Alive"] = False
    performance._check_room()  # it may come back
    monkeypatch.setattr(cluster, "LOST", 0.0)
    with pytest.raises(
        RecollectError, match="no node with 2 CPUs and 0 GPUs is left in the Ray cluster: what is finished is kept"
    ):
        performance._check_room()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gpus": 1.5}, "gpus_per_job is 1.5: give a part of one, such as 0.25, or a whole number"),
        ({"gpus": -1}, "gpus_per_job is -1"),
        ({"cpus": 0}, "cpus_per_job is 0: give 1 or more"),
        ({"workers": 0}, "workers is 0: give 1 to 10,000"),
    ],
)
def test_numbers_that_cannot_be(given, said):
    with pytest.raises(RecollectError, match=said):
        Performing(executor="ray", **given).chosen()
    assert isinstance(Performing(executor="ray", gpus=0.25).chosen(), OnRay)
