"""Downloads against a server on loopback: whole, resumed, refused, damaged, and found again by `load`."""

import gzip
import hashlib
import io
import logging.handlers
import os
import pty
import tarfile
import threading
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pooch
import pytest
from PIL import Image
from urllib3 import HTTPResponse

from recollect import data
from recollect.data import fetch
from recollect.errors import RecollectError

RNG = np.random.default_rng(0)


@dataclass
class Server:
    """What the server serves, how it behaves, and what it was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    cut_after: int | None = None
    """close the connection after this many bytes of a body"""
    url: str = ""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """(file, Range header)"""
    sent: int = 0
    """bytes of the last body"""


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name, wanted = self.path.removeprefix("/mirror/"), self.headers["Range"]
            state.asked.append((name, wanted))
            if name not in state.files:
                return self.send_error(404)
            body, start = state.files[name], 0
            if wanted and state.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(body):
                    return self.send_error(416)
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            piece = body[start:][: state.cut_after]
            state.sent = len(piece)
            self.wfile.write(piece)
            self.close_connection = True

        def log_message(self, format, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.url = f"http://127.0.0.1:{http.server_port}/mirror"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        http.shutdown()
        thread.join()


@pytest.fixture
def publish(server, monkeypatch):
    """Serve these files as the dataset `name`, with their true md5 sums in the table."""
    monkeypatch.setattr(fetch, "CHUNK", 1000)

    def publish(name: str, files: dict[str, bytes]) -> None:
        server.files |= files
        sums = {file: hashlib.md5(content).hexdigest() for file, content in files.items()}
        official = fetch.SOURCES[name]
        assert set(files) == set(official.files)
        monkeypatch.setitem(fetch.SOURCES, name, fetch.Source(official.base_url, sums, official.folder))

    return publish


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return gzip.compress(header + array.tobytes())


def mnist_files() -> dict[str, bytes]:
    files = {}
    for part, n in (("train", 40), ("t10k", 10)):
        files[f"{part}-images-idx3-ubyte.gz"] = idx(RNG.integers(0, 256, (n, 28, 28), dtype=np.uint8))
        files[f"{part}-labels-idx1-ubyte.gz"] = idx(np.arange(n, dtype=np.uint8) % 10)
    return files


def tar(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def cifar10_files() -> dict[str, bytes]:
    def batch():
        labels = np.arange(20, dtype=np.uint8)[:, None] % 10
        return np.hstack([labels, RNG.integers(0, 256, (20, 3072), dtype=np.uint8)]).tobytes()

    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    return {"cifar-10-binary.tar.gz": tar({f"cifar-10-batches-bin/{name}": batch() for name in names})}


def cifar100_files() -> dict[str, bytes]:
    def batch():
        fine = np.arange(200, dtype=np.uint8)[:, None] % 100
        return np.hstack([fine // 5, fine, RNG.integers(0, 256, (200, 3072), dtype=np.uint8)]).tobytes()

    names = "\n".join(f"thing_{i}" for i in range(100)).encode()
    members = {"train.bin": batch(), "test.bin": batch(), "fine_label_names.txt": names}
    return {"cifar-100-binary.tar.gz": tar({f"cifar-100-binary/{name}": content for name, content in members.items()})}


def svhn_files() -> dict[str, bytes]:
    from scipy.io import savemat

    files = {}
    for part in ("train", "test"):
        buffer = io.BytesIO()
        labels = np.arange(1, 31, dtype=np.uint8)[:, None] % 10 + 1
        savemat(buffer, {"X": RNG.integers(0, 256, (32, 32, 3, 30), dtype=np.uint8), "y": labels})
        files[f"{part}_32x32.mat"] = buffer.getvalue()
    return files


def tiny_files() -> dict[str, bytes]:
    def picture():
        buffer = io.BytesIO()
        Image.fromarray(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(buffer, "JPEG")
        return buffer.getvalue()

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for wnid in ("n1", "n2"):
            for i in range(3):
                archive.writestr(f"tiny-imagenet-200/train/{wnid}/images/{wnid}_{i}.JPEG", picture())
            archive.writestr(f"tiny-imagenet-200/val/images/val_{wnid}.JPEG", picture())
        archive.writestr("tiny-imagenet-200/val/val_annotations.txt", "val_n1.JPEG\tn1\nval_n2.JPEG\tn2\n")
    return {"tiny-imagenet-200.zip": buffer.getvalue()}


FILES = {
    "mnist": mnist_files,
    "fashion-mnist": mnist_files,
    "cifar10": cifar10_files,
    "cifar100": cifar100_files,
    "svhn": svhn_files,
    "tinyimagenet": tiny_files,
}


@pytest.mark.parametrize("name", list(FILES))
def test_what_get_puts_load_finds(name, server, publish, tmp_path):
    publish(name, FILES[name]())
    folder = fetch.get(name, root=tmp_path / "sets", base_url=server.url, progress=False)
    assert folder == tmp_path / "sets" / fetch.SOURCES[name].folder
    found = data.load(name, root=tmp_path / "sets")
    assert found.name == name
    left = [path.name for path in (tmp_path / "sets").rglob("*") if path.is_file()]
    assert not [file for file in left if file.endswith((".part", ".tar.gz", ".zip"))]
    assert [path.name for path in (tmp_path / "sets").iterdir()] == [folder.name]  # no temporary folder either
    server.asked.clear()
    assert fetch.get(name, root=tmp_path / "sets", base_url=server.url, progress=False) == folder
    assert server.asked == []  # all of it is there


def test_every_named_dataset_has_a_source():
    assert set(fetch.SOURCES) == set(data.NAMED)
    for source in fetch.SOURCES.values():
        assert all(len(md5) == 32 and int(md5, 16) for md5 in source.files.values())


IMAGES = "train-images-idx3-ubyte.gz"


@pytest.fixture
def mnist(server, publish, tmp_path):
    """Serves a toy MNIST whose first file is the largest; returns (get, that file's content, its .part)."""
    files = mnist_files()
    publish("mnist", files)

    def get(**kwargs):
        return fetch.get("mnist", **{"root": tmp_path, "base_url": server.url + "/", "progress": False} | kwargs)

    return get, files[IMAGES], tmp_path / "mnist" / f"{IMAGES}.part"


@pytest.mark.parametrize("noticed", [True, False])
def test_interrupted_download_goes_on_where_it_stopped(noticed, mnist, server, monkeypatch):
    get, content, part = mnist
    if not noticed:  # older versions of urllib3 take the early end for the end

        def lenient(self, *args, _strict=HTTPResponse.__init__, **kwargs):
            _strict(self, *args, **kwargs | {"enforce_content_length": False})

        monkeypatch.setattr(HTTPResponse, "__init__", lenient)
    server.cut_after = 10_000
    with pytest.raises(RecollectError, match=rf"{IMAGES}.*bytes.*try again, it goes on"):
        get()
    have = part.stat().st_size
    assert 9_000 <= have <= 10_000  # at most one chunk is lost
    assert part.read_bytes() == content[:have]
    assert not part.with_suffix("").exists()
    with pytest.raises(RecollectError):
        get()  # interrupted once more
    further = part.stat().st_size
    assert server.asked[-1] == (IMAGES, f"bytes={have}-")
    assert part.read_bytes() == content[:further]
    assert further > have
    server.cut_after, server.asked[:] = None, []
    del server.files["t10k-labels-idx1-ubyte.gz"]  # stops after the other three
    with pytest.raises(RecollectError, match="404"):
        get()
    assert server.asked[0] == (IMAGES, f"bytes={further}-")
    assert part.with_suffix("").read_bytes() == content
    assert not part.exists()


def test_only_the_rest_travels(mnist, server):
    get, content, part = mnist
    part.parent.mkdir()
    part.write_bytes(content[:-123])
    server.files = {IMAGES: content}
    with pytest.raises(RecollectError, match="404"):
        get()
    assert server.sent == 123
    assert part.with_suffix("").read_bytes() == content


def test_server_without_ranges_starts_over(mnist, server):
    get, content, part = mnist
    server.ranges = False
    part.parent.mkdir()
    part.write_bytes(b"x" * 500)
    folder = get()
    assert server.asked[0] == (IMAGES, "bytes=500-")
    assert (folder / IMAGES).read_bytes() == content


def test_part_that_is_complete_needs_no_server(mnist, server):
    get, content, part = mnist
    part.parent.mkdir()
    part.write_bytes(content)
    folder = get()
    assert IMAGES not in [file for file, _ in server.asked]
    assert (folder / IMAGES).read_bytes() == content


def test_part_that_is_too_long_starts_over(mnist, server):
    get, content, part = mnist
    part.parent.mkdir()
    part.write_bytes(content + b"more")
    folder = get()
    assert server.asked[:2] == [(IMAGES, f"bytes={len(content) + 4}-"), (IMAGES, None)]
    assert (folder / IMAGES).read_bytes() == content


@pytest.mark.parametrize("part_is_bad", [False, True])
def test_wrong_checksum(part_is_bad, mnist, server):
    get, content, part = mnist
    bad = bytes([content[0] ^ 1]) + content[1:]
    if part_is_bad:
        part.parent.mkdir()
        part.write_bytes(bad[:2000])
    else:
        server.files[IMAGES] = bad
    expected, found = hashlib.md5(content).hexdigest(), hashlib.md5(bad).hexdigest()
    with pytest.raises(RecollectError, match=rf"{server.url}/{IMAGES}: md5 sum is {found} instead of {expected}"):
        get()
    assert list(part.parent.iterdir()) == []  # neither the file nor a part of it
    server.files[IMAGES] = content
    assert (get() / IMAGES).read_bytes() == content


def test_damaged_file_is_fetched_again(mnist, server):
    get, content, _ = mnist
    place = get() / IMAGES
    place.write_bytes(content[:100])
    server.asked.clear()
    get()
    assert place.read_bytes() == content
    assert [file for file, _ in server.asked] == [IMAGES]


def test_no_server(mnist, server):
    get, _, _ = mnist
    with pytest.raises(RecollectError, match=r"connection failed \(ConnectionError\).*try again"):
        get(base_url="http://127.0.0.1:9/")  # nobody listens on the discard port
    with pytest.raises(RecollectError, match="not a web address"):
        get(base_url="nonsense")
    server.files.clear()
    with pytest.raises(RecollectError, match=f"{IMAGES}: the server answered 404") as caught:
        get()
    assert "\n" not in str(caught.value)


def test_names_without_a_download():
    with pytest.raises(RecollectError, match="comes with scikit-learn"):
        fetch.get("digits")
    with pytest.raises(RecollectError, match="did you mean 'cifar10'"):
        fetch.get("cifar-10")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_full_disk(mnist):
    get, _, part = mnist
    part.parent.mkdir()
    part.symlink_to("/dev/full")
    with pytest.raises(RecollectError, match="no space left on the device: free some"):
        get()


def test_root_that_is_a_file(mnist, tmp_path):
    get, _, _ = mnist
    (tmp_path / "file").write_text("")
    with pytest.raises(RecollectError, match=r"cannot be written .*--root"):
        get(root=tmp_path / "file")


def test_somebodys_folder_is_never_overwritten(server, publish, tmp_path):
    publish("cifar10", cifar10_files())
    own = tmp_path / "cifar-10-batches-bin/notes.txt"
    own.parent.mkdir()
    own.write_text("mine")
    with pytest.raises(RecollectError, match="cifar-10-batches-bin exists but does not hold all of cifar10"):
        fetch.get("cifar10", root=tmp_path, base_url=server.url, progress=False)
    assert own.read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no archive at all", "cannot be unpacked"),
        (cifar10_files()["cifar-10-binary.tar.gz"][:-5000], "cannot be unpacked"),
        (tar({"elsewhere/data_batch_1.bin": b"x"}), "has no folder cifar-10-batches-bin"),
        (tar({"cifar-10-batches-bin/a": b"x", "../escaped": b"x"}), "cannot be unpacked"),
    ],
)
def test_bad_archive_leaves_nothing_unpacked(content, message, server, publish, tmp_path):
    publish("cifar10", {"cifar-10-binary.tar.gz": content})
    with pytest.raises(RecollectError, match=message):
        fetch.get("cifar10", root=tmp_path / "sets", base_url=server.url, progress=False)
    assert [path.name for path in (tmp_path / "sets").iterdir()] == ["cifar-10-binary.tar.gz"]
    assert not (tmp_path / "escaped").exists()


def test_zip_cannot_write_outside(server, publish, tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("tiny-imagenet-200/wnids.txt", "n1")
        archive.writestr("../../escaped", "x")
    publish("tinyimagenet", {"tiny-imagenet-200.zip": buffer.getvalue()})
    fetch.get("tinyimagenet", root=tmp_path / "a/b/sets", base_url=server.url, progress=False)
    assert not list(tmp_path.rglob("escaped"))


def test_progress_is_lines_when_piped_and_nothing_when_quiet(mnist, server, capsys, monkeypatch):
    get, content, part = mnist
    logged = logging.handlers.BufferingHandler(1000)
    monkeypatch.setattr(pooch.get_logger(), "handlers", [logged])
    level = pooch.get_logger().level
    part.parent.mkdir()
    part.write_bytes(content[:2000])
    get(progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(f"downloading {server.url}/{IMAGES} (0.0 MB, from byte 2,000 on)")
    (part.with_suffix("")).unlink()
    get(progress=False)
    assert capsys.readouterr() == ("", "")
    assert logged.buffer == []  # pooch's own announcements
    assert pooch.get_logger().level == level


def test_progress_is_a_bar_in_a_terminal(mnist, monkeypatch):
    get, _, _ = mnist
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        get(progress=True)
        terminal.flush()
        shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert IMAGES in shown
    assert "\x1b[" in shown  # drawn, not printed line by line
    assert "downloading http" not in shown
