"""The attack: damaged files, kills, full disks, hostile requests and impossible numbers, until the minutes are over.

    python experiments/attack.py --minutes 60 [--only files readers kills studio numbers] [--seed N] [--out results/attack.json]
    python experiments/attack.py --again "memory:1234" --seed N     one case once more, with its traceback
    python experiments/attack_guided.py                             guided by coverage, with atheris

Each case runs in a child with limits of time and memory, and loses only itself. Findings: a crash, a hang of over 5 s of
computing or 2 minutes of waiting (tried once more alone before it counts), over 1 GiB, another exception than RecollectError, an
error of several lines, a word to the terminal that steers it, a program that is started, a file touched elsewhere, and bytes that
differ. They are saved with their seed and input in --findings. The limit of what a file may take is lowered to 0.1 GiB, so 1 GiB
is ten times what is promised. Counts of tries by target are printed, and kept in --out every minute: the same command goes on
from there until its minutes are over.
"""

import argparse
import contextlib
import io
import json
import mmap
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "RECOLLECT_MOST_GIB": "0.1"}

import torch
from attack_damage import Files, Kind, put
from attack_files import FILES, prepare
from attack_places import PLACES
from attack_runs import RUNS
from record import write

from recollect import RecollectError
from recollect.files import read_json
from recollect.runs import environment

KINDS = FILES | {"files": [*FILES["files"], *PLACES]}
GROUPS = (*KINDS, *RUNS)
COMPUTING, WAITING = 5.0, 120.0  # seconds of one case
GIB = 2**30
AGAIN = 4  # exit code of a child that makes room for another
BATCH = 250  # cases of a kind at a time
OFTEN = {"kills": 6}  # in a turn; once, if not said here
FORBIDDEN = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "socket.connect",
    "socket.getaddrinfo",
    "pickle.find_class",
}
"""what no file may make the library do"""


@dataclass
class Tally:
    """What was tried, and what came of it."""

    findings_in: Path
    tries: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    """of each kind of file or run the number of the next case"""
    findings: list[dict[str, Any]] = field(default_factory=list)

    def find(self, target: str, number: object, what: str, detail: str = "", files: dict[str, bytes] | None = None) -> None:
        """Keep a finding, with what it needs to be seen again."""
        finding = {"target": target, "number": number, "what": what, "detail": detail[-3000:]}
        self.findings.append(finding)
        print(f"FINDING {target}:{number}: {what}", flush=True)
        place = (
            self.findings_in / f"{len(list(self.findings_in.glob('*'))):04d}-{target.replace(' ', '-').replace(',', '')}-{number}"
        )
        place.mkdir(parents=True)
        (place / "finding.json").write_text(json.dumps(finding, indent=1))
        for name, data in (files or {}).items():
            path = place / "input" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


# --- a child that tries damaged files ------------------------------------------------------------------------------------


class Board:
    """What a child tells: the case that it is at, how many were refused, and the finding that it ends with."""

    SIZE = 2**16

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, self.SIZE)

    def at(self, number: int, refused: int) -> None:
        self.memory[:16] = struct.pack("<qq", number, refused)

    def read(self) -> tuple[int, int]:
        return struct.unpack("<qq", self.memory[:16])

    def tell(self, what: str) -> None:
        raw = what.encode("utf-8", "backslashreplace")[: self.SIZE - 20]
        self.memory[16:20] = struct.pack("<I", len(raw))
        self.memory[20 : 20 + len(raw)] = raw

    def told(self) -> str:
        (size,) = struct.unpack("<I", self.memory[16:20])
        return self.memory[20 : 20 + size].decode()


def generator(seed: int, target: str, number: int) -> Random:
    return Random(f"{seed}/{target}/{number}")


def made(kind: Kind, rng: Random) -> Files:
    """The files of a case; what is too deep to be written is made anew."""
    while True:
        with contextlib.suppress(RecursionError):
            return kind.make(rng)


class Watched:
    """What the library does beside reading, as the interpreter's audit tells it."""

    def __init__(self, allowed: Path):
        self.allowed, self.seen, self.on = str(allowed.resolve()), [], False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, given: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in FORBIDDEN and not _is_ours(event):
            self.seen.append(f"{event} {given!r:.200}")
        elif event == "open" and isinstance(given[0], str) and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR):
            path = os.path.realpath(given[0])
            if not path.startswith((self.allowed, "/dev/null")) and "__pycache__" not in path:
                self.seen.append(f"writes {path}")


def _is_ours(event: str) -> bool:
    """What the record of a run's environment starts (git, for the commit), and numba's cache of what it has compiled."""
    frame = sys._getframe(2)
    while frame:
        if frame.f_code.co_name in ("environment", "_commit") or "/numba/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def complaint(error: BaseException) -> str | None:
    """What is wrong with how a case ended; None for an error that a user can be told."""
    if not isinstance(error, RecollectError):
        return f"{type(error).__name__}: {str(error)[:300]}\n{traceback.format_exc()[-2500:]}"
    if "\n" in str(error):
        return f"an error of several lines: {str(error)[:500]!r}"
    seen: BaseException | None = error
    while seen is not None:
        if (isinstance(seen, MemoryError) or "allocate" in str(seen)) and "no room for a step" not in str(error):  # of a training
            return f"memory ran out first: {error!s:.300}\n{traceback.format_exc()[-2500:]}"
        seen = seen.__cause__ or seen.__context__
    return None


def attempt(kind: Kind, folder: Path, rng: Random) -> tuple[bool, str | None]:
    """(whether it was refused, what is wrong)"""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            kind.read(folder, rng)
    except BaseException as error:
        return True, complaint(error)
    return False, None


def child(board: Board, kind: Kind, seed: int, numbers: range, place: Path) -> None:
    """Cases one after another, until the first finding."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    watched, case, refused = Watched(place), place / "case", 0
    before, most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, _address_space() + GIB
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for number in numbers:
        board.at(number, refused)
        rng = generator(seed, kind.name, number)
        put(case, made(kind, rng))
        watched.on = True
        was_refused, wrong = attempt(kind, case, rng)
        watched.on = False
        refused += was_refused
        if watched.seen:
            wrong = f"it {watched.seen[:3]}"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        if grown > GIB // 1024:
            wrong = f"took {grown / 2**20:.1f} GiB"
        if wrong:
            board.tell(wrong)
            os._exit(1)
        if _address_space() > most - GIB // 2:  # what a process has had, it keeps
            os._exit(AGAIN)
    board.at(numbers.stop, refused)
    os._exit(0)


def _address_space() -> int:
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
    return 8 * GIB


def computed(pid: int) -> float:
    """Seconds that a process has computed."""
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/stat") as file:
        words = file.read().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def batch(tally: Tally, kind: Kind, seed: int, numbers: range, place: Path) -> None:
    """Some cases of a kind, in children: what ends one early, or stalls it, is a finding."""
    first = numbers.start
    while first < numbers.stop:
        board = Board()
        pid = os.fork()
        if not pid:
            try:
                child(board, kind, seed, range(first, numbers.stop), place)
            except BaseException:
                board.tell(f"the attack itself failed\n{traceback.format_exc()}")
            finally:
                os._exit(3)
        status, stalled = watch(pid, board)
        at, refused = board.read()
        if stalled and not hangs_alone(kind, seed, at, place):
            stalled, status = "", AGAIN << 8
        tally.refused[kind.name] += refused
        if os.waitstatus_to_exitcode(status) == AGAIN and not stalled:
            tally.tries[kind.name] += at - first + 1
            first = at + 1
            continue
        if status == 0 and not stalled:
            tally.tries[kind.name] += numbers.stop - first
            return
        tally.tries[kind.name] += at - first + 1
        how = f"signal {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
        what = stalled or board.told() or f"the process died ({how})"
        tally.find(kind.name, at, what.splitlines()[0], what, made(kind, generator(seed, kind.name, at)))
        first = at + 1


def hangs_alone(kind: Kind, seed: int, number: int, place: Path) -> bool:
    """Whether a case hangs once more, where it is given twice the time: what merely met a busy machine does not."""
    board = Board()
    pid = os.fork()
    if not pid:
        try:
            child(board, kind, seed, range(number, number + 1), place)
        finally:
            os._exit(3)
    return bool(watch(pid, board, 2)[1])


def watch(pid: int, board: Board, patience: int = 1) -> tuple[int, str]:
    """Its exit status, once it is over; and whether it had to be ended."""
    at, since, began, nap = (-1, 0), computed(pid), time.monotonic(), 0.002
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status, ""
        if (now := board.read()) != at:
            at, since, began = now, computed(pid), time.monotonic()
        computing, waiting = computed(pid) - since, time.monotonic() - began
        if computing > patience * COMPUTING or waiting > patience * WAITING:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            return status, f"hangs: {computing:.1f} s of computing, {waiting:.1f} s in all"
        time.sleep(nap := min(0.1, 1.5 * nap))


# --- all of it -----------------------------------------------------------------------------------------------------------


def rounds(given: argparse.Namespace, tally: Tally, place: Path) -> Iterator[None]:
    """Every kind and every kind of run in turns, for ever; or so many cases of files in all."""
    kinds = [kind for group in given.only if group in KINDS for kind in KINDS[group]]
    total, cases, done, turn = sum(kind.share for kind in kinds), given.cases, tally.done, 0
    most = {kind.name: max(3, round(cases * kind.share / total)) if cases else 2**40 for kind in kinds}
    while True:
        turn += 1
        for kind in kinds:
            first, due = done[kind.name], max(1, round(BATCH * given.share * kind.share / 10))
            numbers = range(first, min(first + due, most[kind.name]))
            if numbers:
                batch(tally, kind, given.seed, numbers, place)
                done[kind.name] = numbers.stop
                yield
        for name, play in ((name, play) for group in given.only for name, play in RUNS.get(group, {}).items()):
            for _ in range(1 if cases else OFTEN.get(name, 1)):
                number = done[name]
                done[name] += 1
                if not cases or number < max(1, cases // 400):
                    play(tally, generator(given.seed, name, number), number, place / "runs")
                    yield
        if cases and all(done[kind.name] >= most[kind.name] for kind in kinds) and turn >= max(1, cases // 400):
            return


def again(what: str, seed: int, place: Path) -> int:
    """One case in this process, with all that it says."""
    name, _, number = what.rpartition(":")
    kind = next(kind for kinds in KINDS.values() for kind in kinds if kind.name == name)
    rng = generator(seed, name, int(number))
    put(place / "case", made(kind, rng))
    kind.read(place / "case", rng)
    return 0


def begun(given: argparse.Namespace) -> dict[str, Any]:
    """What --out has of an attack of the same seed and groups, to go on from."""
    if not (given.out and given.out.exists()):
        return {}
    found = read_json(given.out)
    for name in ("seed", "groups"):
        if found[name] != {"seed": given.seed, "groups": given.only}[name]:
            raise SystemExit(f"{given.out} is of other {name} ({found[name]}): give another --out, or delete it")
    return found


def attack(given: argparse.Namespace) -> dict[str, Any]:
    """Try until the minutes are over; what was tried, with what an earlier call has tried."""
    before, began = begun(given), time.monotonic()
    tally = Tally(given.findings, *(Counter(before.get(name, {})) for name in ("tries", "refused", "done")))
    tally.findings += before.get("findings", [])

    def found() -> dict[str, Any]:
        computed = sum(map(_spent, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
        known = environment()
        return {
            "command": f"python experiments/attack.py --minutes {given.minutes:g} --seed {given.seed}",
            "minutes": round(before.get("minutes", 0) + (time.monotonic() - began) / 60, 1),
            "computed minutes": round(before.get("computed minutes", 0) + computed / 60, 1),
            "seed": given.seed,
            "groups": given.only,
            **{name: dict(sorted(getattr(tally, name).items())) for name in ("tries", "refused", "done")},
            "findings": tally.findings,
            "commits": list(dict.fromkeys([*before.get("commits", []), known.pop("commit")])),
            "environment": known,
        }

    place = Path(tempfile.mkdtemp(prefix="attack-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        prepare(place / "whole")
        told = time.monotonic()
        for _ in rounds(given, tally, place):
            if time.monotonic() - told > 60:
                told = time.monotonic()
                print(f"{sum(tally.tries.values()):,} tries, {len(tally.findings)} findings", flush=True)
                if given.out:
                    write(given.out, found())
            if before.get("minutes", 0) + (time.monotonic() - began) / 60 > given.minutes:
                break
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if given.out:
        write(given.out, found())
    return found()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=0, help="so many damaged files, and a run for every 400, instead of minutes")
    parser.add_argument("--share", type=float, default=1.0, help="of files beside runs in a turn")
    parser.add_argument("--out", type=Path, help="keep the counts here, as JSON")
    parser.add_argument("--findings", type=Path, default=Path("runs") / "attack")
    parser.add_argument("--again", help="KIND:NUMBER, a case to see once more")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # read when these are first imported
    if given.again:
        with tempfile.TemporaryDirectory(prefix="attack-") as place:
            prepare(Path(place) / "whole")
            return again(given.again, given.seed, Path(place))
    found = attack(given)
    shown = found | {"findings": [f"{each['target']}:{each['number']}: {each['what']}" for each in found["findings"]]}
    print(json.dumps({name: shown[name] for name in ("minutes", "tries", "findings")}, indent=1))
    return 1 if found["findings"] else 0


def _spent(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
