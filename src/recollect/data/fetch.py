"""Fetch: download a named dataset into the folder where `load` looks for it.

A file that is there with the right md5 sum is kept. An interrupted download leaves `<file>.part` behind, and the next
call asks the server only for the rest.
"""

import errno
import hashlib
import os
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from recollect.data import NAMED, data_root
from recollect.errors import RecollectError, unknown

CHUNK = 1 << 16  # bytes; what an interruption loses at most
MOST = 2**30  # bytes of a file; the largest has a quarter of them
TIMEOUT = (20, 60)  # seconds to connect, and between two chunks


@dataclass(frozen=True)
class Source:
    """Where a dataset is published: the files' md5 sums, and the folder under the root that they go to or unpack to."""

    base_url: str
    files: dict[str, str]
    folder: str

    @property
    def packed(self) -> bool:
        return all(file.endswith((".tar.gz", ".zip")) for file in self.files)


def _idx(base_url: str, folder: str, *md5: str) -> Source:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return Source(base_url, {f"{name}-ubyte.gz": known for name, known in zip(names, md5, strict=True)}, folder)


TORONTO = "https://www.cs.toronto.edu/~kriz/"
SOURCES: dict[str, Source] = {
    "mnist": _idx(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "mnist",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    "fashion-mnist": _idx(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "fashion-mnist",
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    "cifar10": Source(TORONTO, {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}, "cifar-10-batches-bin"),
    "cifar100": Source(TORONTO, {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"}, "cifar-100-binary"),
    "svhn": Source(
        "http://ufldl.stanford.edu/housenumbers/",
        {"train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373", "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3"},
        "svhn",
    ),
    "tinyimagenet": Source(
        "http://cs231n.stanford.edu/", {"tiny-imagenet-200.zip": "90528d7ca1a48142e341f4ef8d21d0de"}, "tiny-imagenet-200"
    ),
}


def get(name: str, root: str | Path | None = None, base_url: str | None = None, progress: bool = True) -> Path:
    """Download a named dataset, or what is still missing of it.

    Arguments:
        name: mnist, fashion-mnist, cifar10, cifar100, svhn or tinyimagenet.
        root: the folder of the named datasets, as for `load`.
        base_url: a mirror that has the official files under their names.
        progress: a bar in a terminal, plain lines elsewhere (both on stderr); False for silence.

    Returns:
        The folder that holds the dataset's files.
    """
    name = name.lower()
    if name == "digits":
        raise RecollectError("digits comes with scikit-learn: there is nothing to download, use it as it is")
    if name not in SOURCES:
        raise unknown("dataset to download", name, SOURCES)
    source, top = SOURCES[name], data_root(root)
    folder = top / source.folder
    if source.packed and os.path.lexists(folder):
        # Unpacking is atomic, so an incomplete folder is somebody's own work: never overwrite it.
        if all(layout.find(folder)[1] for layout in NAMED[name].layouts):
            raise RecollectError(f"{folder} exists but does not hold all of {name}: move it away, then get {name} again")
        return folder
    for file, md5 in source.files.items():
        url = (base_url or source.base_url).rstrip("/") + "/" + file
        place = (top if source.packed else folder) / file
        with _file_errors(place):
            _retrieve(url, md5, place, progress)
            if source.packed:
                _unpack(place, source.folder)
    return folder


def _retrieve(url: str, md5: str, place: Path, progress: bool) -> None:
    """Bring the file with this md5 sum to its place, unless it is there."""
    part = place.with_name(f"{place.name}.part")
    if _md5(place) == md5:
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    if _md5(part) != md5:
        _resume(url, part, progress)
    found = _md5(part)
    if found != md5:
        part.unlink()
        remedy = "what arrived is thrown away; try again, or use a mirror"
        raise RecollectError(f"{url}: md5 sum is {found} instead of {md5}: {remedy}")
    os.replace(part, place)


def _resume(url: str, part: Path, progress: bool) -> None:
    """Append to `part` what it lacks of the file at `url`; what arrives before an interruption is kept."""
    import requests

    have = _size(part)
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
            if have and response.status_code == 416:  # the part is longer than the file: start over
                part.unlink()
                return _resume(url, part, progress)
            if not response.ok:
                raise RecollectError(f"{url}: the server answered {response.status_code}: try again later, or use another mirror")
            if not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                have = 0  # a server without ranges sends everything again
            length = response.raw.length_remaining or 0
            with open(part, "ab" if have else "wb") as file, _shown(url, have, have + length, progress) as advance:
                for chunk in response.iter_content(CHUNK):
                    if file.tell() > MOST:
                        part.unlink()
                        raise RecollectError(
                            f"{url}: it does not end, and no file of {MOST:,} bytes is expected: use another mirror"
                        )
                    file.write(chunk)
                    advance(len(chunk))
    except requests.RequestException as error:
        if isinstance(error, ValueError):  # a malformed URL, in one of several ways
            raise RecollectError(f"{url}: not a web address: give the mirror as http://... or https://...") from error
        what = f"the connection failed ({type(error).__name__}) with {_size(part):,} bytes here"
        raise RecollectError(f"{url}: {what}: try again, it goes on from there") from error
    if _size(part) < have + length:  # not every version of the HTTP library notices
        what = f"the connection closed at {_size(part):,} of {have + length:,} bytes"
        raise RecollectError(f"{url}: {what}: try again, it goes on there")


def _unpack(archive: Path, folder: str) -> None:
    """Unpack beside the target, then rename: the folder is there whole or not at all. The archive goes afterwards."""
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".unpacking-") as temporary:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(temporary)  # drops absolute paths and '..' by itself
        else:
            with tarfile.open(archive) as packed:
                packed.extractall(temporary, filter="data")
        if not (Path(temporary) / folder).is_dir():
            raise RecollectError(f"{archive}: has no folder {folder} in it: delete it, and use another mirror")
        os.rename(Path(temporary) / folder, archive.parent / folder)
    archive.unlink()


@contextmanager
def _shown(url: str, have: int, total: int, progress: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that is told of each chunk: a bar in a terminal, a line per file elsewhere, or nothing."""
    if progress and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(url.rpartition("/")[2], total=total or None, completed=have)
            yield lambda count: bar.advance(task, count)
        return
    if progress:
        resumed = f", from byte {have:,} on" if have else ""
        print(f"downloading {url} ({total / 1e6:.1f} MB{resumed})", file=sys.stderr, flush=True)
    yield lambda _: None


@contextmanager
def _file_errors(place: Path) -> Iterator[None]:
    """The disk's errors, and a broken archive's, in one line."""
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise RecollectError(f"{place}: cannot be unpacked ({error}): delete it, and get the dataset again") from error
    except OSError as error:
        what = f"cannot be written ({error.strerror or error}): choose a folder you may write to with --root"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free some, then try again (it goes on from there), or choose another folder with --root"
            what = f"no space left on the device: {remedy}"
        raise RecollectError(f"{place}: {what}") from error


def _md5(path: Path) -> str:
    if not _size(path):
        return ""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
