"""One run on many processes, as torch's own launcher starts them: torchrun --nproc-per-node 2 -m recollect distill ...

Rank 0 reads, writes and speaks, and sends the others what it read. All compute: each its share of an outer step's inner networks
(or, with shard batch, of each batch), and what they found is added in an order that does not depend on how many they are. All
take the same outer step, so every rank holds the whole memory. Processes on CPUs meet by gloo, those on GPUs by nccl.
"""

import contextlib
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed.nn  # imported once there is a group, as torch.compile does, it would keep it, and its threads, for ever
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]

import recollect
from recollect.errors import RecollectError

T = TypeVar("T")

MEETING, SENDING = 60.0, 1800.0  # seconds to wait for the other processes: until all are there, and in a step
LAST_WORD = 2.0  # seconds in which an error of all is told by rank 0


class Lost(RecollectError):
    """Another process of the run has ended, or cannot be reached."""


@dataclass
class Ranks:
    """The processes of a run, seen from one of them. Alone, whatever they exchange is one's own."""

    rank: int = 0
    world: int = 1
    store: Any = None
    """where each leaves word for the others"""
    speak: Any = field(default_factory=lambda: sys.stderr)
    """where an error of this rank alone is told"""
    waited: float = 0.0
    """seconds spent in exchanges"""
    meetings: int = 0
    """in which all have compared what they compute; each has its own words in the store"""

    def share(self, sharded: str = "networks") -> slice:
        """Which of all inner networks this process computes."""
        return slice(self.rank, None, self.world) if sharded == "networks" else slice(None)

    # --- what is exchanged ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        except RuntimeError as error:  # torch's errors of connections
            raise Lost(
                f"rank {self.rank} lost the other processes: torchrun --max-restarts starts them again, or start the same "
                f"command as recollect resume ({str(error).splitlines()[0]:.120})"
            ) from None
        finally:
            self.waited += time.perf_counter() - began

    def first(self, value: T) -> T:
        """Rank 0's."""
        if self.world == 1:
            return value
        found = [value]
        with self._exchange():
            dist.broadcast_object_list(found, 0)
        return found[0]

    def highest(self, number: int) -> int:
        """The highest number of any rank."""
        if self.world == 1:
            return number
        found = torch.tensor(number)
        with self._exchange():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def level(self, tensors: Sequence[Tensor]) -> None:
        """Give all ranks rank 0's numbers, in place."""
        for tensor in tensors if self.world > 1 else ():
            with self._exchange():
                dist.broadcast(tensor.detach(), 0)

    def rows(self, own: Tensor, count: int) -> Tensor:
        """All `count` rows [count, n] in their order, from this rank's share of them [k, n]."""
        if self.world == 1:
            return own
        mine = own.new_zeros(-(-count // self.world), own.shape[1])
        mine[: len(own)] = own
        found = [torch.empty_like(mine) for _ in range(self.world)]
        with self._exchange():
            dist.all_gather(found, mine)
        return torch.stack(found, 1).flatten(0, 1)[:count]

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place. It may be captured in a graph."""
        if self.world > 1:
            with self._exchange():
                dist.all_reduce(tensor)
        return tensor

    # --- the beginning, and the end --------------------------------------------------------------------------------------------

    def meet(self, device: str, facts: dict[str, Any]) -> None:
        """Before anything is computed: refuse processes that would compute different things."""
        if self.world == 1:
            return
        if device.startswith("cuda:"):
            raise RecollectError(f"device is {device}, but each process takes the GPU of its LOCAL_RANK: give cuda")
        local, there = _numbered("LOCAL_RANK", 0), torch.cuda.device_count()
        if device == "cuda" and local >= there:
            raise RecollectError(f"{there} GPUs for {local + 1} or more processes here: --nproc-per-node {there}, or device cpu")
        facts |= {"device": device, "torch": torch.__version__, "recollect": recollect.__version__}
        facts |= {"numpy": numpy.__version__, "Python": platform.python_version()}
        if device == "cpu":
            facts["threads (OMP_NUM_THREADS)"] = torch.get_num_threads()
        self._leave(json.loads(json.dumps(facts)))
        if self.rank == 0:
            self._compare()
        elif self._read("verdict", SENDING) != "go":
            raise SystemExit(2)  # rank 0 has said why
        self.meetings += 1

    def _compare(self) -> None:
        mine = self._read("rank 0", SENDING)
        for rank in range(1, self.world):
            theirs = self._read(f"rank {rank}", SENDING)
            if "error" in theirs:
                raise RecollectError(f"rank {rank}: {theirs['error']}")
            for name in mine:
                if theirs.get(name) != mine[name]:
                    there, here = (f"{facts.get(name)!r:.80}" for facts in (theirs, mine))
                    raise RecollectError(f"rank {rank} has {name} {there}, rank 0 {here}: start all with the same")
        self._write("verdict", "go")

    def _leave(self, facts: dict[str, Any]) -> None:
        self._write(f"rank {self.rank}", facts)

    def _write(self, key: str, value: Any) -> None:
        self.store.set(f"{self.meetings}: {key}", json.dumps(value))

    def _read(self, key: str, seconds: float) -> Any:
        try:
            self.store.wait([f"{self.meetings}: {key}"], timedelta(seconds=seconds))
            return json.loads(self.store.get(f"{self.meetings}: {key}"))
        except RuntimeError:
            raise RecollectError(f"rank {self.rank} waited {seconds:.0f} s for {key} in vain: see what it says") from None

    def tell(self, line: str) -> None:
        """An error that ends the run, told once: by rank 0, unless only another has it."""
        if self.rank == 0:
            print(line, file=sys.stderr, flush=True)
            if self.world > 1:
                self._write("verdict", "failed")
                self._write("last word", line)
            return
        with contextlib.suppress(RecollectError, RuntimeError):
            if not self.meetings:
                self._leave({"error": line.removeprefix("error: ")})
                self._read("verdict", SENDING)
                return
            self._read("last word", LAST_WORD)
            return
        print(line, file=self.speak, flush=True)


_current = Ranks()
_meetings = count(1)  # of this process: each has its own words in the store


def current() -> Ranks:
    """The processes of this run; one, where nobody has started more."""
    return _current


def restarted() -> bool:
    """Whether torchrun starts this run once more, after a process died."""
    return _numbered("TORCHELASTIC_RESTART_COUNT", 0) > 0


def _numbered(name: str, usual: int) -> int:
    """A number that torchrun says in the environment."""
    text = os.environ.get(name, str(usual))
    if not (text.isdecimal() and text.isascii() and len(text) < 10):
        raise RecollectError(
            f"the environment has {name} '{text}', no whole number: start the processes by torchrun, or unset it"
        )
    return int(text)


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """Meet the processes that torchrun has started beside this one (RANK, WORLD_SIZE, MASTER_ADDR); those but the first are
    silent. Alone without torchrun."""
    global _current
    rank, world = _numbered("RANK", 0), _numbered("WORLD_SIZE", 1)
    if world == 1 or _current.world > 1:
        yield _current
        return
    local = _numbered("LOCAL_RANK", 0)
    if torch.cuda.is_available() and local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    store = _met(rank, world)
    _end_with_torchrun()
    try:
        with contextlib.ExitStack() as silence:
            _current = Ranks(rank, world, store)
            if rank:
                nowhere = silence.enter_context(open(os.devnull, "w"))
                silence.enter_context(contextlib.redirect_stdout(nowhere))
                silence.enter_context(contextlib.redirect_stderr(nowhere))
            yield _current
    finally:
        _current = Ranks()
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _met(rank: int, world: int) -> Any:
    where = f"{os.environ.get('MASTER_ADDR', '(no MASTER_ADDR)')}:{os.environ.get('MASTER_PORT', '(no MASTER_PORT)')}"
    try:
        store, *_ = next(rendezvous("env://", timeout=timedelta(seconds=MEETING)))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # what was left before a restart is still in the store
        store = PrefixStore(f"start {again}, meeting {next(_meetings)}", store)
        sending = timedelta(seconds=SENDING)
        dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=world, timeout=sending)
    except (RuntimeError, ValueError) as error:
        raise RecollectError(
            f"rank {rank} of {world} met nobody at {where} in {MEETING:.0f} s: start all {world} processes by torchrun "
            f"({type(error).__name__})"
        ) from None
    return store


def _end_with_torchrun() -> None:
    """Killed, torchrun cannot end its processes: they see that they have another parent."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
