"""What the attack does to runs and to the studio: kills, two processes in one folder, full disks, hostile requests.

Runs are children of this process, forked with the library loaded, so that a kill costs a second and not ten. However a run was
disturbed, it must end with the bytes of one that was not.
"""

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from attack_damage import EVIL, TEXTS, anything, dumped, hurt, safetensors_bytes, twisted
from attack_files import CONFIG, STREAM, memory_tensors, sealed, whole
from attack_readers import damaged_picture

from recollect import distill
from recollect.cli import main
from recollect.config import changed
from recollect.continual.run import run as run_stream
from recollect.errors import RecollectError
from recollect.runs import Run
from recollect.selection import select

OVER = 300.0  # seconds of waiting for a run that should end
Play = Callable[[Any, Random, int, Path], None]


# --- runs as children ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A run: how it is begun in a folder, and how it goes on."""

    name: str
    begin: Callable[[Path, int], object]
    """of a seed"""
    go_on: Callable[[Path, int], object]


def _told() -> dict[str, Any]:
    return {"name": str(whole().folder / "toy.npz"), "root": None, "size": None, "classes": []}


LONGER = changed(CONFIG, outer_steps=12, keep_every=5)
WIDE = changed(CONFIG, network="convnet:width=4", outer_steps=4, precision="bfloat16", preprocess="zca", outer_optimiser="sgd")
ASKED = changed(CONFIG, query="images", encoder_epochs=1, shots=2, query_size=4, outer_steps=6)


def _distilled(config: Any) -> Callable[[Path, int, bool], object]:
    return lambda folder, seed, resume: distill(
        whole().images, changed(config, seed=seed), run=folder, resume=resume, data=_told()
    )


def _selected(folder: Path, seed: int, resume: bool) -> object:
    config = changed(CONFIG, seed=seed, keep_every=2)
    return select(whole().images, config, "inner_lr", [0.01, 0.02], run=folder, resume=resume, networks=1, data=_told())


def _streamed(folder: Path, seed: int, resume: bool) -> object:
    return run_stream(
        whole().images, changed(STREAM, outer_lr=0.01 * (seed + 1)), out=folder, name="rotations", seeds=1,
        learners=("compress", "gdumb"), data=_told(),
    )  # fmt: skip


def _plan(name: str, work: Callable[[Path, int, bool], object]) -> Plan:
    """It is resumed as in Python, or by the command."""

    def go_on(folder: Path, seed: int) -> object:
        if not Run(folder).is_begun:  # nothing had been written yet
            return work(folder, seed, False)
        return _command("resume", str(folder), "--quiet") if seed == 1 else work(folder, seed, True)

    return Plan(name, lambda folder, seed: work(folder, seed, False), go_on)


def _command(*words: str) -> None:
    if code := main(list(words)):
        raise RecollectError(f"exit code {code}")


PLANS = {
    "distill": _plan("distill", _distilled(LONGER)),
    "distill, ConvNet": _plan("distill, ConvNet", _distilled(WIDE)),
    "distill, pictures": _plan("distill, pictures", _distilled(ASKED)),
    "select": _plan("select", _selected),
    "continual": _plan("continual", _streamed),
}


def forked(work: Callable[[], object], told: Path, setup: Callable[[], object] = lambda: None) -> int:
    """A child that works; its exit code is 0, 2 for a RecollectError, and 3 for anything else, with words in a file."""
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        warnings.simplefilter("ignore")
        words = io.StringIO()
        with contextlib.redirect_stdout(words), contextlib.redirect_stderr(words):
            try:
                setup()
                work()
                code = 0
            except RecollectError as error:
                code = 2
                words.write(f"error: {error}")
            except BaseException:
                words.write(traceback.format_exc())
        with contextlib.suppress(OSError):
            told.write_text(words.getvalue())
    finally:
        os._exit(code)


def ended(pid: int, seconds: float = OVER) -> int | None:
    """The exit code of a child (minus the signal that ended it); None, and it is killed, if it does not end."""
    until, nap = time.monotonic() + seconds, 0.002
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(nap := min(0.05, 1.3 * nap))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def killed(pid: int, after: float) -> int:
    """Its exit code: -9, if SIGKILL met it alive."""
    time.sleep(after)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


TIMES = ("seconds", "distilling_seconds", "seconds_of_all", "started", "environment")


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _timeless(each) for name, each in value.items() if name not in TIMES}
    return [_timeless(each) for each in value] if isinstance(value, list) else value


def left(folder: Path) -> dict[str, Any]:
    """What a run leaves, less what no two runs share: times, figures, and the files that it works with."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not path.is_file() or path.suffix in (".png", ".html", ".pt") or path.name in ("environment.json", "table.json"):
            continue
        if path.suffix == ".jsonl":
            found[name] = [_timeless(json.loads(line)) for line in path.read_text().splitlines()]
        else:
            found[name] = _timeless(json.loads(path.read_bytes())) if path.suffix == ".json" else path.read_bytes()
    return found


@cache
def undisturbed(name: str, seed: int, place: Path) -> tuple[dict[str, Any], float]:
    """What it leaves, twice the same, and how long it takes: the shorter time, in which nothing is compiled."""
    found: list[dict[str, Any]] = []
    seconds: list[float] = []
    for number in range(2):
        folder, began = place / f"undisturbed-{name}-{seed}-{number}", time.monotonic()
        pid = forked(lambda folder=folder: PLANS[name].begin(folder, seed), place / "words")
        if ended(pid) != 0:
            raise AssertionError(f"{name} does not even run: {(place / 'words').read_text()[-2000:]}")
        found.append(left(folder))
        seconds.append(time.monotonic() - began)
    if found[0] != found[1]:
        raise AssertionError(f"{name} of seed {seed} is not reproducible")
    return found[0], min(seconds)


def differing(folder: Path, expected: dict[str, Any]) -> str:
    """Names of what is other than it should be."""
    found = left(folder)
    return ", ".join(sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)))


def _as_input(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def finish(tally: Any, target: str, number: int, plan: Plan, folder: Path, seed: int, place: Path) -> None:
    """Go on until it is done: it must end as one that nobody disturbed."""
    words = place / "words"
    words.unlink(missing_ok=True)
    code = ended(forked(lambda: plan.go_on(folder, seed), words))
    said = words.read_text()[-2500:] if words.exists() else ""
    if code != 0:
        tally.find(
            target,
            number,
            f"{plan.name} does not go on: {'hangs' if code is None else f'exit code {code}'}",
            said,
            _as_input(folder),
        )
    elif different := differing(folder, undisturbed(plan.name, seed, place)[0]):
        tally.find(target, number, f"{plan.name} of seed {seed} ends with other bytes: {different}", said, _as_input(folder))
    shutil.rmtree(folder, ignore_errors=True)


def kills(tally: Any, rng: Random, number: int, place: Path) -> None:
    """One run, killed at up to three random moments."""
    place.mkdir(parents=True, exist_ok=True)
    plan, seed = PLANS[list(PLANS)[number % len(PLANS)]], rng.randrange(2)
    _, seconds = undisturbed(plan.name, seed, place)
    folder = place / f"killed-{number}"
    begun = False
    for _ in range(rng.choice((1, 1, 2, 3))):
        work = plan.go_on if begun else plan.begin
        begun = True
        pid = forked(lambda work=work: work(folder, seed), place / "words")
        tally.tries[f"SIGKILL, {plan.name}"] += killed(pid, rng.uniform(0, 0.95) * seconds) == -9
    finish(tally, "kills", number, plan, folder, seed, place)


def pairs(tally: Any, rng: Random, number: int, place: Path) -> None:
    """Two processes in one folder, of which one may be killed: one works, the other is told so, and nothing is mixed."""
    place.mkdir(parents=True, exist_ok=True)
    plan = PLANS[rng.choice(("distill", "distill", "select", "continual"))]
    seeds = [rng.randrange(2), rng.randrange(2)]
    _, seconds = undisturbed(plan.name, 0, place)
    undisturbed(plan.name, 1, place)
    folder, words = place / f"pair-{number}", [place / "one", place / "two"]
    begun = rng.random() < 0.3
    if begun:
        killed(forked(lambda: plan.begin(folder, seeds[0]), place / "words"), rng.uniform(0.2, 0.9) * seconds)
        seeds[1] = seeds[0]
    pids = []
    for seed, word in zip(seeds, words, strict=True):
        word.unlink(missing_ok=True)
        work = plan.go_on if begun else plan.begin
        pids.append(forked(lambda seed=seed, work=work: work(folder, seed), word))
        time.sleep(rng.choice((0.0, 0.0, rng.uniform(0, 0.5) * seconds)))
    victim = rng.random() < 0.3
    codes = [killed(pids[0], rng.uniform(0, 0.5) * seconds) if victim else ended(pids[0]), ended(pids[1])]
    tally.tries[f"two processes, {plan.name}"] += 1
    said = [word.read_text() if word.exists() else "" for word in words]
    for code, text in zip(codes, said, strict=True):
        told = any(part in text for part in ("is in use by", "already holds a run", "holds something else", "was begun with"))
        if code not in (0, -9) and not (code == 2 and told):
            tally.find("pairs", number, f"{plan.name}: exit code {code}", text[-2500:], _as_input(folder))
    config = Run(folder)
    seed = seeds[0] if not config.is_begun or _is_of(config, seeds[0]) else seeds[1]
    finish(tally, "pairs", number, plan, folder, seed, place)


def _is_of(run: Run, seed: int) -> bool:
    """Whether the folder says that it is of this seed."""
    told = run.settings.get("distill") or run.settings["config"]
    return told["seed"] == seed if "seed" in told else told["outer_lr"] == 0.01 * (seed + 1)


# --- full disks --------------------------------------------------------------------------------------------------------------


def disks(tally: Any, rng: Random, number: int, place: Path) -> None:
    """A run on a disk that is soon full, or whose files may not grow: a clear error, then the same bytes once there is room."""
    place.mkdir(parents=True, exist_ok=True)
    plan, seed = PLANS[rng.choice(list(PLANS))], rng.randrange(2)
    expected, _ = undisturbed(plan.name, seed, place)
    folder, words = place / f"full-{number}", place / "words"
    most = rng.randrange(1, 2 * sum(len(each) for each in expected.values() if isinstance(each, bytes)) + 20_000)
    mounted = rng.random() < 0.5 and _mounted(folder, most)
    words.unlink(missing_ok=True)
    tally.tries["full disk" if mounted else "limited file size"] += 1
    try:
        code = ended(forked(lambda: plan.begin(folder, seed), words, (lambda: None) if mounted else lambda: _limit(most)))
        said = words.read_text() if words.exists() else ""
        fine = code == 0 or (code == 2 and ("no space left to write" in said or "cannot write" in said))
        if not fine:
            tally.find(
                "disks", number, f"{plan.name}: exit code {code} on a full disk of {most} bytes", said[-2500:], _as_input(folder)
            )
        if mounted:
            subprocess.run(["mount", "-o", "remount,size=100m", folder], check=True)
        keep = place / f"kept-{number}"
        shutil.rmtree(keep, ignore_errors=True)
        if folder.exists():
            shutil.copytree(folder, keep)
        finish(tally, "disks", number, plan, keep, seed, place)
    finally:
        if mounted:
            subprocess.run(["umount", folder], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _mounted(folder: Path, size: int) -> bool:
    """A small disk of its own, where we may have one."""
    if os.getuid() or not shutil.which("mount"):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={max(4096, size)}", "none", str(folder)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _limit(size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


# --- the studio --------------------------------------------------------------------------------------------------------------

PATHS = (
    "/",
    "/api/shelf",
    "/api/memories/{n}/pictures",
    "/api/memories/{n}/classes/{n}/coefficients",
    "/api/memories/{n}/recall",
)
PATHS += ("/api/recalled.npz", "/api/lines.py", "/api/trainings", "/api/trainings/{id}", "/api/trainings/{id}/events")
PATHS += ("/api/trainings/{id}/classify", "/api/trainings/{id}/classifier.safetensors", "/static/studio.js", "/openapi.json")
PATHS += ("/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd", "/docs", "/api/{n}", "/%00", "/x" * 500)
ORDER = {"classes": ["0:0", "0:1"], "network": "small", "epochs": 2, "seed": 0}


def requests(tally: Any, rng: Random, number: int, place: Path) -> None:
    """Two hundred requests to the studio's application, in a child with limits."""
    told = place / "words"
    place.mkdir(parents=True, exist_ok=True)
    told.unlink(missing_ok=True)
    code = ended(forked(lambda: _ask(rng, place), told))
    words = told.read_text() if told.exists() else ""
    tally.tries["request"] += 200
    if code != 0:
        tally.find("studio", number, f"requests: exit code {code}", words[-3000:])


def _shelf(place: Path) -> Any:
    from recollect.studio import shelf

    shelf.OWN = place / "none"
    folder = place / "memories-of-the-server"
    folder.mkdir(exist_ok=True)
    tensors, header = memory_tensors()
    odd = header | {"class_names": ["'); x('", EVIL, "<script>"], "dataset": "$"}
    for name, each in (("a", header), ("b", odd)):
        path = folder / f"{name}.safetensors"
        path.write_bytes(safetensors_bytes(tensors, {"recollect": dumped(sealed(tensors, each))}))
    return shelf.stock([folder / "a.safetensors", folder / "b.safetensors"], [whole().images])


def _ask(rng: Random, place: Path) -> None:
    from fastapi.testclient import TestClient

    from recollect.studio import app as studio
    from recollect.studio import jobs

    jobs.MOST_SECONDS = 2.0
    stocked = _shelf(place)
    with TestClient(studio.create_app(stocked), "http://localhost:8765", raise_server_exceptions=False) as client:
        first = client.post("/api/trainings", json=ORDER).json()["id"]
        for _ in range(200):
            method, path, headers, body, query = _request(rng, first)
            began = time.monotonic()
            try:
                answer = client.request(method, path, headers=headers, content=body, params=query)
            except (UnicodeError, ValueError, TypeError):  # of the client: such a request cannot be sent by it
                continue
            what = f"{method} {path} {headers!r:.300} {body!r:.300} {query!r:.200} -> {answer.status_code} {answer.text[:300]!r}"
            assert answer.status_code < 500 or answer.status_code == 503, what
            assert str(place) not in answer.text, f"a path of the server: {what}"
            assert time.monotonic() - began < 120, f"slow: {what}"
            if answer.status_code >= 400 and method != "HEAD" and path != "/" and not path.startswith("/static/"):
                assert _is_error(answer), what
        assert client.get("/api/shelf", headers={"Host": "localhost"}).status_code == 200


def _is_error(answer: Any) -> bool:
    with contextlib.suppress(ValueError):
        return set(answer.json()) == {"error"}
    return False


def _request(rng: Random, job: str) -> tuple[str, str, dict[str, str], bytes, dict[str, Any]]:
    path = rng.choice(PATHS)
    while "{n}" in path:
        path = path.replace("{n}", str(rng.choice((0, 0, 1, 1, 2, 3, -1, 10**7, "x", "٣", "0x0", "1e3"))), 1)
    path = path.replace("{id}", job if rng.random() < 0.7 else rng.choice(("x", "..", "%2e%2e", "a" * 3000)))
    method = rng.choice(("GET", "GET", "POST", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"))
    if method == "GET" and path.endswith("/events") and job in path:
        method = "POST"  # it lasts as long as the training
    body = b""
    if method in ("POST", "PUT") or rng.random() < 0.1:
        mix = {"coefficients": [0.1] * 6}
        body = rng.choice(
            [
                lambda: dumped(twisted(rng, ORDER)),
                lambda: dumped(twisted(rng, mix)),
                lambda: json.dumps(mix).encode(),
                lambda: hurt(rng, json.dumps(ORDER).encode()),
                lambda: damaged_picture(rng)["x.png"],
                lambda: dumped(anything(rng)),
            ]
        )()
    headers = {"Host": "localhost:8765"}
    if rng.random() < 0.3:
        name = rng.choice(
            ("Host", "Origin", "Content-Length", "Content-Type", "Cookie", "Accept-Encoding", "Range", "Transfer-Encoding")
        )
        values = [
            "",
            "x",
            "-1",
            "9" * 30,
            "null",
            "http://[",
            "localhost",
            "recollect-studio=" + "0" * 32,
            "bytes=0-",
            "bytes=5-1,9-",
            "chunked",
        ]
        values += ["multipart/form-data", "application/json; charset=x", "127.0.0.1", "a" * 9000]
        headers[name] = rng.choice(values)
    query = {
        key: rng.choice(ORDER["classes"] if key == "classes" else TEXTS[:12]) for key in rng.sample(list(ORDER), rng.randrange(3))
    }
    return method, path, headers, body, query if rng.random() < 0.4 else {}


def sockets(tally: Any, rng: Random, number: int, place: Path) -> None:
    """A studio on loopback: connections that send anything, or nothing. It goes on answering."""
    place.mkdir(parents=True, exist_ok=True)
    told, port_file = place / "words", place / "port"
    for path in (told, port_file):
        path.unlink(missing_ok=True)
    pid = forked(lambda: _serve(place, port_file), told)
    try:
        until = time.monotonic() + 120
        while not port_file.exists() and time.monotonic() < until:
            time.sleep(0.02)
        port, opened = int(port_file.read_text()), []
        for _ in range(60):
            with contextlib.suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", port), timeout=20)
                connection.sendall(_garbage(rng))
                opened.append(connection) if rng.random() < 0.8 else connection.close()
        tally.tries["connection"] += 60
        if not _answers(port):
            tally.find("studio", number, "does not answer 200 beside hostile connections")
        for connection in opened:
            connection.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        code = ended(pid, 60)
        words = told.read_text() if told.exists() else ""
        if code not in (0, -15) or "Traceback" in words:
            tally.find("studio", number, f"the server ended with {code}", words[-3000:])


def _serve(place: Path, port_file: Path) -> None:
    from recollect.studio import app as studio

    server = studio.server(studio.create_app(_shelf(place)))
    with studio.listen("127.0.0.1", 0) as listening:
        temporary = port_file.with_suffix(".tmp")
        temporary.write_text(str(listening.getsockname()[1]))
        temporary.rename(port_file)
        server.run(sockets=[listening])


def _answers(port: int) -> bool:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/api/shelf")
        return connection.getresponse().status == 200
    return False


def _garbage(rng: Random) -> bytes:
    good = b"POST /api/memories/0/recall HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
    begun = [
        b"",
        b"GET / HTTP/1.1\r\nX-",
        good,
        rng.randbytes(500),
        b"\x16\x03\x01\x02\x00" + rng.randbytes(100),
        b"PRI * HTTP/2.0\r\n\r\n",
    ]
    begun += [b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5000, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", hurt(rng, good)]
    begun += [
        b"POST /api/trainings HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        good + b"x" * 100,
    ]
    begun += [b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"]
    return rng.choice(begun)


RUNS: dict[str, dict[str, Play]] = {
    "kills": {"kills": kills, "pairs": pairs, "disks": disks},
    "studio": {"requests": requests, "sockets": sockets},
}
"""group -> what is done to runs, one after another"""
