"""The attack on readers, guided by coverage: atheris (pip install atheris) looks for bytes that take new ways through them.

    python experiments/attack_guided.py mat --minutes 5 [--seed N]        also: header, memory, idx, pickle, checkpoint, npz

Whatever is raised but RecollectError, more than 5 s and more than 1.5 GiB end it; the bytes are then in --findings.
"""

import argparse
import gzip
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random


def header(data: bytes, _: Path) -> None:
    from recollect.header import parse

    parse(data.decode("utf-8", "replace"), "the file")


def memory(_: bytes, path: Path) -> None:
    from recollect import Memory

    Memory.load(path).recall()


def idx(_: bytes, path: Path) -> None:
    from recollect.data import readers

    readers.idx(path, 1)


def pickled(_: bytes, path: Path) -> None:
    from recollect.data import readers

    readers.cifar10([path] * 6)


def checkpoint(data: bytes, _: Path) -> None:
    from recollect.data.pickles import PickleError, check_torch

    try:
        check_torch(data)
    except (PickleError, ValueError, IndexError, TypeError, KeyError, OverflowError):  # as whoever calls it expects
        return


def mat(_: bytes, path: Path) -> None:
    from recollect.data import readers

    readers.svhn([path, path])


def npz(_: bytes, path: Path) -> None:
    from recollect.data import readers
    from recollect.data.images import make_images

    make_images("x", readers.npz(path))


TARGETS: dict[str, Callable[[bytes, Path], None]] = {
    "header": header, "memory": memory, "idx": idx, "pickle": pickled, "checkpoint": checkpoint, "mat": mat, "npz": npz,
}  # fmt: skip
"""called with bytes, and a file that has them"""


def corpus(name: str) -> list[bytes]:
    """Where it begins: whole files, and some that are damaged."""
    import attack_files
    import attack_readers

    tensors, told, whole = attack_files.whole_memory(0)
    rng = Random(0)
    return {
        "header": lambda: [attack_files.dumped(attack_files.sealed(tensors, told))],
        "memory": lambda: [whole],
        "idx": lambda: [attack_readers.idx_whole()[1], gzip.compress(attack_readers.idx_whole()[1], 1)],
        "pickle": lambda: [attack_readers.pickled(protocol)[5] for protocol in (0, 2, 4)],
        "checkpoint": lambda: [attack_readers.pickled(2)[5], b"\x80\x02}q\x00X\x01\x00\x00\x00aK\x01s."],
        "mat": lambda: [attack_readers.damaged_mat(rng)["0"] for _ in range(20)],
        "npz": lambda: [attack_readers.damaged_npz(rng)["x.npz"] for _ in range(20)],
    }[name]()


def attempt(name: str, path: Path, data: bytes) -> None:
    """One try: it ends well, or in an error of ours."""
    from recollect import RecollectError

    path.write_bytes(data)
    try:
        TARGETS[name](data, path)
    except RecollectError:
        return


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--findings", type=Path, default=Path("runs") / "attack")
    given = parser.parse_args(arguments)
    try:
        import atheris  # pyright: ignore[reportMissingImports]
    except ImportError:
        print("error: coverage is atheris's business: pip install atheris", file=sys.stderr)
        return 2
    with atheris.instrument_imports(include=["recollect"]):
        import recollect.data.readers
        import recollect.header  # noqa: F401
    with tempfile.TemporaryDirectory(prefix="attack-") as place:
        path, seeds = Path(place) / "x.npz", Path(place) / "corpus"
        seeds.mkdir()
        for number, data in enumerate(corpus(given.target)):
            (seeds / str(number)).write_bytes(data)
        given.findings.mkdir(parents=True, exist_ok=True)
        options = [f"-max_total_time={round(60 * given.minutes)}", "-timeout=5", "-rss_limit_mb=1536", f"-seed={given.seed}"]
        options += ["-max_len=4096", f"-artifact_prefix={given.findings}/{given.target}-", str(seeds)]
        atheris.Setup([sys.argv[0], *options], lambda data: attempt(given.target, path, data))
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
