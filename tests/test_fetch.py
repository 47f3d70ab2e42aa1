"""Downloads against a server on loopback: whole, resumed, refused, damaged, and found again by `load`."""

import hashlib
import io
import os
import pty
import shutil
import tarfile
import threading
import zipfile
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from test_data import write_cifar10, write_cifar100, write_idx, write_svhn
from test_pictures import write_tiny
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


WRITERS = {
    "mnist": lambda folder: write_idx(folder, gz=True),
    "fashion-mnist": lambda folder: write_idx(folder, gz=True),
    "cifar10": write_cifar10,
    "cifar100": write_cifar100,
    "svhn": write_svhn,
    "tinyimagenet": write_tiny,
}


def published(name: str, folder: Path) -> dict[str, bytes]:
    """A toy version of the dataset, as the files that its authors publish."""
    source = fetch.SOURCES[name]
    WRITERS[name](folder / source.folder)
    if not source.packed:
        return {file: (folder / source.folder / file).read_bytes() for file in source.files}
    (file,) = source.files
    packed = shutil.make_archive(str(folder / "packed"), "zip" if ".zip" in file else "gztar", folder, source.folder)
    return {file: Path(packed).read_bytes()}


def tar(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def publish(server, monkeypatch, tmp_path_factory):
    """Serve these files, or toy ones, as the dataset `name`, with their true md5 sums in the table."""
    monkeypatch.setattr(fetch, "CHUNK", 1000)

    def publish(name: str, files: dict[str, bytes] | None = None) -> dict[str, bytes]:
        files = files or published(name, tmp_path_factory.mktemp("published"))
        server.files |= files
        sums = {file: hashlib.md5(content).hexdigest() for file, content in files.items()}
        assert set(files) == set(fetch.SOURCES[name].files)
        monkeypatch.setitem(fetch.SOURCES, name, replace(fetch.SOURCES[name], files=sums))
        return files

    return publish


@pytest.fixture
def get(server, tmp_path):
    """`fetch.get` from the server to tmp_path/sets, silently."""
    usual = {"root": tmp_path / "sets", "base_url": server.url, "progress": False}
    return lambda name, **kwargs: fetch.get(name, **usual | kwargs)


IMAGES = "train-images-idx3-ubyte.gz"


@pytest.fixture
def images(publish, tmp_path):
    """Publishes a toy MNIST; returns the content of its first and largest file, that file's .part, and its place."""
    content, place = publish("mnist")[IMAGES], tmp_path / "sets/mnist" / IMAGES
    place.parent.mkdir(parents=True)
    return content, place.with_name(f"{IMAGES}.part"), place


@pytest.mark.parametrize("name", WRITERS)
def test_what_get_puts_load_finds(name, get, server, publish, tmp_path):
    publish(name)
    folder = get(name)
    assert folder == tmp_path / "sets" / fetch.SOURCES[name].folder
    assert data.load(name, root=tmp_path / "sets").name == name
    left = [path.name for path in (tmp_path / "sets").rglob("*") if path.is_file()]
    assert not [file for file in left if file.endswith((".part", ".tar.gz", ".zip"))]
    assert [path.name for path in (tmp_path / "sets").iterdir()] == [folder.name]  # no temporary folder either
    server.asked.clear()
    assert get(name) == folder
    assert server.asked == []  # all of it is there


def test_every_named_dataset_has_a_source():
    assert set(fetch.SOURCES) == set(data.NAMED) == set(WRITERS)
    for source in fetch.SOURCES.values():
        assert all(len(md5) == 32 and int(md5, 16) for md5 in source.files.values())


@pytest.mark.parametrize("noticed", [True, False])
def test_interrupted_download_goes_on_where_it_stopped(noticed, images, get, server, monkeypatch):
    content, part, place = images
    if not noticed:  # older versions of urllib3 take the early end for the end

        def lenient(self, *args, _strict=HTTPResponse.__init__, **kwargs):
            _strict(self, *args, **kwargs | {"enforce_content_length": False})

        monkeypatch.setattr(HTTPResponse, "__init__", lenient)
    server.cut_after = 10_000
    with pytest.raises(RecollectError, match=rf"{IMAGES}.*bytes.*try again, it goes on"):
        get("mnist")
    have = part.stat().st_size
    assert 9_000 <= have <= 10_000  # at most one chunk is lost
    assert part.read_bytes() == content[:have]
    assert not place.exists()
    with pytest.raises(RecollectError):
        get("mnist")  # interrupted once more
    further = part.stat().st_size
    assert server.asked[-1] == (IMAGES, f"bytes={have}-")
    assert part.read_bytes() == content[:further]
    assert further > have
    server.cut_after, server.asked[:] = None, []
    get("mnist")
    assert server.asked[0] == (IMAGES, f"bytes={further}-")
    assert place.read_bytes() == content
    assert not part.exists()


def test_only_the_rest_travels(images, get, server):
    content, part, place = images
    part.write_bytes(content[:-123])
    server.files = {IMAGES: content}  # so that its body is the last
    with pytest.raises(RecollectError, match="404"):
        get("mnist")
    assert server.sent == 123
    assert place.read_bytes() == content


def test_server_without_ranges_starts_over(images, get, server):
    content, part, place = images
    server.ranges = False
    part.write_bytes(b"x" * 500)
    get("mnist")
    assert server.asked[0] == (IMAGES, "bytes=500-")
    assert place.read_bytes() == content


def test_part_that_is_complete_needs_no_server(images, get, server):
    content, part, place = images
    part.write_bytes(content)
    get("mnist")
    assert IMAGES not in [file for file, _ in server.asked]
    assert place.read_bytes() == content


def test_part_that_is_too_long_starts_over(images, get, server):
    content, part, place = images
    part.write_bytes(content + b"more")
    get("mnist")
    assert server.asked[:2] == [(IMAGES, f"bytes={len(content) + 4}-"), (IMAGES, None)]
    assert place.read_bytes() == content


@pytest.mark.parametrize("part_is_bad", [False, True])
def test_wrong_checksum(part_is_bad, images, get, server):
    content, part, place = images
    bad = bytes([content[0] ^ 1]) + content[1:]
    if part_is_bad:
        part.write_bytes(bad[:2000])
    else:
        server.files[IMAGES] = bad
    expected, found = hashlib.md5(content).hexdigest(), hashlib.md5(bad).hexdigest()
    with pytest.raises(RecollectError, match=rf"{server.url}/{IMAGES}: md5 sum is {found} instead of {expected}"):
        get("mnist")
    assert list(part.parent.iterdir()) == []  # neither the file nor a part of it
    server.files[IMAGES] = content
    get("mnist")
    assert place.read_bytes() == content


def test_a_mirror_that_never_ends(images, get, server, monkeypatch):
    _, part, _ = images
    monkeypatch.setattr(fetch, "MOST", 2**20)
    server.files[IMAGES] = bytes(2**23)
    with pytest.raises(RecollectError, match="it does not end, and no file of 1,048,576 bytes is expected: use another mirror"):
        get("mnist")
    assert list(part.parent.iterdir()) == []


def test_damaged_file_is_fetched_again(images, get, server):
    content, _, place = images
    get("mnist")
    place.write_bytes(content[:100])
    server.asked.clear()
    get("mnist")
    assert place.read_bytes() == content
    assert [file for file, _ in server.asked] == [IMAGES]


def test_no_server(images, get, server):
    with pytest.raises(RecollectError, match=r"connection failed \(ConnectionError\).*try again"):
        get("mnist", base_url="http://127.0.0.1:9/")  # nobody listens on the discard port
    for address in ("nonsense", "gopher://127.0.0.1", "http://"):
        with pytest.raises(RecollectError, match="not a web address"):
            get("mnist", base_url=address)
    server.files.clear()
    with pytest.raises(RecollectError, match=f"{IMAGES}: the server answered 404") as caught:
        get("mnist", base_url=server.url + "/")
    assert "\n" not in str(caught.value)


def test_names_without_a_download(get):
    with pytest.raises(RecollectError, match="comes with scikit-learn"):
        get("digits")
    with pytest.raises(RecollectError, match="did you mean 'cifar10'"):
        get("cifar-10")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_full_disk(images, get):
    _, part, _ = images
    part.symlink_to("/dev/full")
    with pytest.raises(RecollectError, match="no space left on the device: free some"):
        get("mnist")


def test_root_that_is_a_file(images, get, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecollectError, match=r"cannot be written .*--root"):
        get("mnist", root=tmp_path / "file")


def test_somebodys_folder_is_never_overwritten(get, publish, tmp_path):
    publish("cifar10")
    own = tmp_path / "sets/cifar-10-batches-bin/notes.txt"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    with pytest.raises(RecollectError, match="cifar-10-batches-bin exists but does not hold all of cifar10"):
        get("cifar10")
    assert own.read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no archive at all", "cannot be unpacked"),
        (tar({"cifar-10-batches-bin/a": RNG.bytes(20_000)})[:-5000], "cannot be unpacked"),
        (tar({"elsewhere/data_batch_1.bin": b"x"}), "has no folder cifar-10-batches-bin"),
        (tar({"cifar-10-batches-bin/a": b"x", "../escaped": b"x"}), "cannot be unpacked"),
    ],
)
def test_bad_archive_leaves_nothing_unpacked(content, message, get, publish, tmp_path):
    publish("cifar10", {"cifar-10-binary.tar.gz": content})
    with pytest.raises(RecollectError, match=message):
        get("cifar10")
    assert [path.name for path in (tmp_path / "sets").iterdir()] == ["cifar-10-binary.tar.gz"]
    assert not (tmp_path / "escaped").exists()


def test_zip_cannot_write_outside(get, publish, tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("tiny-imagenet-200/wnids.txt", "n1")
        archive.writestr("../../escaped", "x")
    publish("tinyimagenet", {"tiny-imagenet-200.zip": buffer.getvalue()})
    get("tinyimagenet", root=tmp_path / "a/b/sets")
    assert not list(tmp_path.rglob("escaped"))


def test_progress_is_lines_when_piped_and_nothing_when_quiet(images, get, server, capsys):
    content, part, place = images
    part.write_bytes(content[:2000])
    get("mnist", progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(f"downloading {server.url}/{IMAGES} (0.0 MB, from byte 2,000 on)")
    place.unlink()
    get("mnist", progress=False)
    assert capsys.readouterr() == ("", "")


def test_progress_is_a_bar_in_a_terminal(images, get, monkeypatch):
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        get("mnist", progress=True)
        terminal.flush()
        shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert IMAGES in shown
    assert "\x1b[" in shown  # drawn, not printed line by line
    assert "downloading http" not in shown
