"""The studio's addresses: what they answer, what they refuse, and that nothing brings them down."""

import io
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import httpx2
import hypothesis
import numpy as np
import pytest
import schemathesis
import torch
from conftest import make_memory
from fastapi.testclient import TestClient
from PIL import Image
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from recollect import Classifier, Memory, Network, Preprocess, RecollectError, compose, load
from recollect.cli import main
from recollect.data.preprocess import Zca
from recollect.header import Header
from recollect.show.pictures import to_pixels
from recollect.studio import app as studio
from recollect.studio import guard, jobs, shelf, uploads
from recollect.studio.jobs import Job, Jobs, Order

DIGITS = Path(__file__).parent / "data" / "digits.safetensors"
"""made by `distill(load("digits"), recollect.demo.CONFIG)`"""
THREES_AND_EIGHTS = {"classes": ["0:3", "0:8"], "epochs": 30}


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory):
    """Without the project's own memories, which the studio would find here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shelf, "OWN", tmp_path_factory.mktemp("none"))
        yield


@pytest.fixture(scope="module")
def stocked(tmp_path_factory) -> shelf.Shelf:
    """The digits, a toy memory with another mean, and one in colour."""
    folder = tmp_path_factory.mktemp("shelf")
    make_memory().save(folder / "toy.safetensors")
    make_memory(3).save(folder / "colour.safetensors")
    return shelf.stock([DIGITS, folder / "toy.safetensors", folder / "colour.safetensors"], [load("digits")])


@pytest.fixture
def client(stocked):
    with client_of(stocked) as client:
        yield client


def client_of(stocked: shelf.Shelf) -> TestClient:
    return TestClient(studio.create_app(stocked), "http://localhost:8765", raise_server_exceptions=False)


def trained(client, **order) -> dict:
    """A training that has ended."""
    answer = client.post("/api/trainings", json={**THREES_AND_EIGHTS, **order})
    assert answer.status_code == 201, answer.text
    return until(client, answer.json()["id"], "done", "failed", "cancelled")


def until(client, name: str, *states: str) -> dict:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        job = client.get(f"/api/trainings/{name}").json()
        if job["state"] in states:
            return job
        time.sleep(0.02)
    raise AssertionError(f"still {job['state']}")


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


# --- looking ---------------------------------------------------------------------------------------------------------


def test_the_shelf(client):
    found = client.get("/api/shelf").json()
    assert [memory["name"] for memory in found["memories"]] == ["digits", "toy", "colour"]
    digits = found["memories"][0]
    assert (digits["bases"], digits["matrices"], digits["numbers"], digits["image_shape"]) == (7, 2, 588, [1, 8, 8])
    assert digits["accuracy"]["mean"] > 90
    assert found["memories"][1]["accuracy"] is None
    assert found["data"] == ["digits"]


def whitened(folder: Path) -> Memory:
    """A memory whose images are whitened: undoing that mixes all pixels."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.eye(64) + 0.05 * torch.randn(64, 64, generator=generator)
    zca = Zca(torch.randn(64, generator=generator), (matrix + matrix.T) / 2)
    preprocess, plain = Preprocess((0.4,), (0.3,), zca), make_memory()
    preprocess.save_sidecar(folder)
    header = Header("toy", list(plain.class_names), [1, 8, 8], downsample=2, preprocessing=preprocess.to_json())
    memory = Memory(plain.bases, plain.addressing, header)
    memory.fitted = preprocess
    memory.save(folder / "whitened.safetensors")
    return memory


@pytest.mark.parametrize("kind", ["grey", "colour", "whitened"])
def test_a_mix_of_pictures_is_the_recall(kind, tmp_path):
    """What the browser is sent, mixed, is the library's own recall with its preprocessing undone."""
    memory = whitened(tmp_path) if kind == "whitened" else make_memory(3 if kind == "colour" else 1)
    memory.save(tmp_path / "memory.safetensors")
    memory = Memory.load(tmp_path / "memory.safetensors")
    images, _ = memory.recall(1)
    expected = to_pixels(memory.preprocess().undo(images))
    with client_of(shelf.stock([tmp_path / "memory.safetensors"])) as client:
        answer = client.get("/api/memories/0/classes/1/coefficients")
        coefficients = np.frombuffer(answer.content, "<f4").reshape(len(memory.addressing), len(memory.bases))
        assert torch.equal(torch.from_numpy(coefficients.copy()), memory.coefficients(1)[0])
        for number, row in enumerate(coefficients.tolist()):
            found = client.post("/api/memories/0/recall", json={"coefficients": row})
            pixels = np.atleast_3d(np.asarray(Image.open(io.BytesIO(found.content)))).transpose(2, 0, 1)
            assert np.abs(pixels.astype(int) - expected[number].numpy()).max() <= 1
        pictures = client.get("/api/memories/0/pictures")
        shape = tuple(map(int, pictures.headers["x-shape"].split(",")))
        assert shape == (5, len(expected[0]), *((8, 8) if kind == "whitened" else (4, 4)))
        assert len(pictures.content) == 4 * np.prod(shape)


def test_a_memory_without_its_whitening_file(tmp_path):
    whitened(tmp_path)
    next(tmp_path.glob("zca-*")).unlink()
    with client_of(shelf.stock([tmp_path / "whitened.safetensors"])) as client:
        answer = client.get("/api/memories/0/pictures")
        assert answer.status_code == 400
        assert "is not beside the memory" in answer.json()["error"]
        assert client.get("/api/shelf").status_code == 200


def asked_with_pictures(folder: Path) -> Path:
    plain, query = make_memory(), {"encoder": "mlp:width=4", "size": 3, "ways": 2, "shots": 1}
    encoder = Network("mlp:width=4", (1, 8, 8), 3).fresh(0)
    Memory(plain.bases, plain.addressing, replace(plain.header, query=query), encoder).save(folder / "asked.safetensors")
    return folder / "asked.safetensors"


def test_a_memory_that_is_asked_with_pictures(tmp_path):
    """It has bases to look at, and no classes to pick."""
    with client_of(shelf.stock([asked_with_pictures(tmp_path)])) as client:
        (found,) = client.get("/api/shelf").json()["memories"]
        assert (found["asked_with"], found["classes"]) == ("pictures", [])
        assert client.get("/api/memories/0/pictures").status_code == 200
        for answer in (
            client.get("/api/memories/0/classes/0/coefficients"),
            client.post("/api/trainings", json={"classes": ["0:0", "0:1"]}),
        ):
            assert answer.status_code == 400
            assert "asked with pictures" in answer.json()["error"]


def test_the_projects_own_memories(tmp_path, monkeypatch):
    """memories/ is on the shelf too; a damaged file there is told, and whitening files are none."""
    monkeypatch.setattr(shelf, "OWN", Path("memories"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "memories"
    folder.mkdir()
    make_memory().save(folder / "own.safetensors")
    (folder / "broken.safetensors").write_bytes(b"no")
    (folder / "zca-0.safetensors").write_bytes(b"no")
    found = shelf.stock([Path("memories/own.safetensors"), DIGITS])
    assert [entry.memory.name for entry in found.entries] == ["own", "digits"]
    assert len(found.problems) == 1
    assert "broken.safetensors" in found.problems[0]
    assert [images.name for images in found.data] == ["digits"]  # to test memories of the digits on
    assert shelf.stock([]).data == []
    shutil.copy(DIGITS, folder)
    assert [images.name for images in shelf.stock([]).data] == ["digits"]
    with pytest.raises(RecollectError, match="does not exist"):
        shelf.stock([Path("nowhere.safetensors")])


def test_an_empty_shelf(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with client_of(shelf.stock([])) as client:
        assert client.get("/api/shelf").json()["memories"] == []
        assert client.get("/").status_code == 200


# --- training --------------------------------------------------------------------------------------------------------


def test_train_and_classify(client):
    """Ten digits, tested on the test split; then real digits classified, and the file read again."""
    job = trained(client, classes=[f"0:{label}" for label in range(10)], epochs=300)
    assert job["state"] == "done", job
    assert (job["epoch"], [epoch for epoch, _ in job["losses"]], job["images"]) == (300, [1, *range(3, 301, 3)], 20)
    assert job["test"]["accuracy"] > 85
    images = load("digits").test
    assert np.sum(job["test"]["confusion"]) == len(images) == job["test"]["images"]
    right = 0
    for pixels, label in zip(images.images[:20], images.labels[:20], strict=True):
        answer = client.post(f"/api/trainings/{job['id']}/classify", content=png(pixels[0].numpy()))
        assert answer.status_code == 200
        assert sum(answer.json()["probabilities"]) == pytest.approx(1, abs=1e-5)
        right += answer.json()["class_name"] == str(int(label))
    assert right >= 16


def test_the_stream_tells_every_loss_once(client):
    name = client.post("/api/trainings", json=THREES_AND_EIGHTS).json()["id"]
    with client.stream("GET", f"/api/trainings/{name}/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        news = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line.startswith("data: ")]
    assert news[-1]["state"] == "done"
    assert [each["losses_from"] for each in news] == [0] + [each["epoch"] for each in news[:-1]]
    told = [loss for each in news for loss in each["losses"]]
    assert told == client.get(f"/api/trainings/{name}").json()["losses"]


def test_downloads_are_what_the_lines_make(client, tmp_path, monkeypatch):
    """The Python lines, run, write the very classifier that is downloaded; the recalled set is what it was trained on."""
    order = {"classes": ["0:3", "1:2", "0:8"], "epochs": 20, "seed": 4, "network": "small"}
    job = trained(client, **order)
    assert "brought to the mean" in job["notice"]
    assert "unknown class" in job["test"]["error"]
    found = client.get(f"/api/trainings/{job['id']}/classifier.safetensors")
    assert "attachment" in found.headers["content-disposition"]
    lines = client.get("/api/lines.py", params=order).text
    for entry in client.app.state.jobs.shelf.entries[:2]:
        shutil.copy(entry.path, tmp_path)
    monkeypatch.chdir(tmp_path)
    Image.new("L", (8, 8)).save("picture.png")
    exec(compile(lines, "lines.py", "exec"), {})
    assert Path("classifier.safetensors").read_bytes() == found.content
    assert Classifier.load("classifier.safetensors").class_names == ("3", "frog", "8")
    archive = np.load(io.BytesIO(client.get("/api/recalled.npz", params={"classes": order["classes"]}).content))
    memories = client.app.state.jobs.shelf.entries
    expected = compose([memories[0].memory["3"], memories[1].memory["frog"], memories[0].memory["8"]])
    assert np.array_equal(archive["images"], expected.images.numpy())
    assert archive["class_names"].tolist() == ["3", "frog", "8"]
    assert archive["pixels"].dtype == np.uint8


def test_class_names_are_not_code(tmp_path, monkeypatch):
    """Whatever a memory calls its classes, in the Python lines it stays a string."""
    names = ("'); raise SystemExit('", 'a"\n\\', "<script>alert(1)</script>")
    make_memory(1, names).save(tmp_path / "it's.safetensors")
    with client_of(shelf.stock([tmp_path / "it's.safetensors"])) as client:
        order = {"classes": ["0:0", "0:1", "0:2"], "epochs": 1, "network": "small"}
        monkeypatch.chdir(tmp_path)
        Image.new("L", (8, 8)).save("picture.png")
        exec(compile(client.get("/api/lines.py", params=order).text, "lines.py", "exec"), {})
    assert Classifier.load("classifier.safetensors").class_names == names


def test_cancel_at_once_and_the_next_begins(client):
    long = client.post("/api/trainings", json={**THREES_AND_EIGHTS, "epochs": 2000, "network": "small"}).json()
    second = client.post("/api/trainings", json=THREES_AND_EIGHTS).json()
    assert second["state"] == "waiting"
    until(client, long["id"], "training")
    assert client.delete(f"/api/trainings/{long['id']}").json()["state"] == "cancelled"
    assert until(client, second["id"], "done")["epoch"] == 30
    stopped = client.get(f"/api/trainings/{long['id']}").json()
    assert stopped["state"] == "cancelled"
    assert stopped["epoch"] < 2000
    assert client.get(f"/api/trainings/{long['id']}/classifier.safetensors").status_code == 409


@pytest.fixture
def held(monkeypatch):
    """Trainings that wait for ever."""
    monkeypatch.setattr(Jobs, "_run", lambda self, job: None)


def test_a_limit_for_each_client_each_address_and_for_all(client, held, monkeypatch):
    client.get("/")  # which names the client
    ours = [client.post("/api/trainings", json=THREES_AND_EIGHTS) for _ in range(3)]
    assert [answer.status_code for answer in ours] == [201, 201, 429]
    assert "2 trainings under way" in ours[2].json()["error"]
    assert len(client.get("/api/trainings").json()) == 2
    client.cookies.clear()  # another client, as far as one can tell; without a name, clients of one address are one
    assert client.get("/api/trainings").json() == []

    def many() -> dict:
        """By many clients: cookies cost nothing."""
        client.cookies.clear()
        for number in range(20):
            client.cookies.set("recollect-studio", f"{number:032x}")
            answer = client.post("/api/trainings", json=THREES_AND_EIGHTS)
        assert answer.status_code == 429
        return answer.json()

    assert "your address has 4 trainings under way" in many()["error"]
    assert len(client.app.state.jobs._jobs) == jobs.MOST_PER_ADDRESS
    monkeypatch.setattr(jobs, "MOST_PER_ADDRESS", 99)
    assert "the queue is full" in many()["error"]
    assert len(client.app.state.jobs._jobs) == jobs.MOST_WAITING + 1
    client.delete(f"/api/trainings/{ours[0].json()['id']}")
    assert client.post("/api/trainings", json=THREES_AND_EIGHTS).status_code == 201


def test_results_are_forgotten_in_the_end(stocked, held):
    """The oldest first, and those without a result before those with one."""
    found = Jobs(stocked)
    order = Order(classes=["0:3", "0:8"])
    done: Job = found.add(order, "one", "here")
    done.state = "done"
    for number in range(3 * jobs.MOST_KEPT):
        found.cancel(found.add(order, str(number), "here"))
    assert len(found._jobs) <= jobs.MOST_KEPT + 1
    assert found[done.id] is done


def test_a_training_that_fails_leaves_the_next_alone(client, monkeypatch, caplog):
    monkeypatch.setattr(jobs, "_tested", lambda *_: 1 / 0)
    assert trained(client)["error"] == "the training failed: ZeroDivisionError"
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(jobs, "MOST_SECONDS", 0.0)
    assert "took longer than" in trained(client)["error"]
    monkeypatch.undo()
    assert trained(client)["state"] == "done"


def test_a_whitened_classifier_names_the_file_it_needs(tmp_path):
    whitened(tmp_path)
    sidecar = next(tmp_path.glob("zca-*"))
    with client_of(shelf.stock([tmp_path / "whitened.safetensors"])) as client:
        job = trained(client, classes=["0:0", "0:2"], network="small")
        assert (job["state"], job["test"], job["whitening"]) == ("done", None, sidecar.name)
        (tmp_path / "c.safetensors").write_bytes(client.get(f"/api/trainings/{job['id']}/classifier.safetensors").content)
    assert Classifier.load(tmp_path / "c.safetensors").class_names == ("cat", "frog")


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("GET", "/api/memories/9/pictures", None, 404, "there is no memory 9"),
        ("GET", "/api/memories/0/classes/10/coefficients", None, 404, "has no class 10"),
        ("GET", "/api/memories/../pyproject.toml/pictures", None, 404, "nothing at this address"),
        ("GET", "/static/../app.py", None, 404, "nothing at this address"),
        ("GET", "/static/%2e%2e/app.py", None, 404, "nothing at this address"),
        ("GET", "/docs", None, 404, "nothing at this address"),
        ("PUT", "/api/trainings", None, 405, "does not do that"),
        ("GET", "/api/trainings/nonsense", None, 404, "no such training"),
        ("GET", "/api/trainings/nonsense/events", None, 404, "no such training"),
        ("POST", "/api/trainings/nonsense/classify", b"x", 404, "no such training"),
        ("POST", "/api/memories/0/recall", {"coefficients": [1]}, 400, "1 coefficients for 7 bases"),
        ("POST", "/api/memories/0/recall", b'{"coefficients": [NaN, 1, 1, 1, 1, 1, 1]}', 422, "finite number"),
        ("POST", "/api/memories/0/recall", b"[" * 100_000, 400, "body"),
        ("POST", "/api/trainings", {"classes": ["0:3"]}, 422, "classes: List should have at least 2"),
        ("POST", "/api/trainings", {"classes": ["0:3", "0:3"]}, 400, "named twice"),
        ("POST", "/api/trainings", {"classes": ["0:3", "2:0"]}, 400, "compose memories of one image shape"),
        ("POST", "/api/trainings", {"classes": ["0:3", "7:0"]}, 404, "no memory 7"),
        ("POST", "/api/trainings", {"classes": ["0:3", "../x"]}, 422, "classes.1"),
        ("POST", "/api/trainings", {"classes": ["0:3", "0:8"], "network": "convnet:width=99999"}, 422, "network"),
        ("POST", "/api/trainings", {"classes": ["0:3", "0:8"], "epochs": 10**9}, 422, "epochs"),
        ("GET", "/api/recalled.npz?classes=0:3", None, 422, "classes"),
    ],
)
def test_a_bad_request_gets_one_clear_line(client, method, path, body, status, words):
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    answer = client.request(method, path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert words in error
    assert "\n" not in error
    assert client.get("/api/shelf").status_code == 200


def bomb(side: int) -> bytes:
    """A PNG that claims to be large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + bytes([8, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def test_bad_uploads(client):
    address = f"/api/trainings/{trained(client)['id']}/classify"
    whole = png(np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8))
    for data, status, words in [
        (b"", 400, "not a picture"),
        (b"#!/bin/sh", 400, "not a picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 400, "not a picture"),
        (whole[:2000], 400, "cannot be read"),
        (bomb(5000), 400, "at most 16,777,216 pixels"),
        (bomb(60_000), 400, "the picture"),
        (bytes(uploads.MOST_BYTES + 1), 413, "at most 8 MB"),
    ]:
        answer = client.post(address, content=data)
        assert (answer.status_code, words in answer.json()["error"]) == (status, True), answer.text
    assert client.post(address, content=whole).status_code == 200


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_kinds_of_pictures(kind):
    buffer = io.BytesIO()
    Image.new("RGB", (20, 10), "red").save(buffer, kind)
    assert uploads.picture(buffer.getvalue()).size == (20, 10)


def test_photographs_are_turned_as_their_camera_says():
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 10)).save(buffer, "JPEG", exif=exif)
    assert uploads.picture(buffer.getvalue()).size == (10, 20)


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("localhost:8765", True),
        ("127.0.0.1:8765", True),
        ("[::1]:8765", True),
        ("192.168.0.7", True),
        ("evil.example", False),
        ("localhost.evil.example:8765", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
        ("[", False),
    ],
)
def test_only_its_own_name_is_answered_to(client, host, is_ours):
    """So that a name which was pointed at this machine later (DNS rebinding) is of no use."""
    answer = client.get("/api/shelf", headers={"Host": host})
    assert answer.status_code == (200 if is_ours else 400)


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8765", 201),
        (None, 201),
        ("http://evil.example", 403),
        ("http://localhost:9999", 403),
        ("null", 403),
        ("http://[", 403),
    ],
)
def test_other_pages_change_nothing(client, held, origin, status):
    headers = {} if origin is None else {"Origin": origin}
    assert client.post("/api/trainings", json=THREES_AND_EIGHTS, headers=headers).status_code == status


@pytest.mark.parametrize("path", ["/", "/static/studio.js", "/api/shelf", "/nonsense", "/api/memories/0/pictures"])
def test_every_answer_has_a_policy(client, path):
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "HttpOnly; SameSite=Strict" in headers["set-cookie"]


def test_the_page_asks_nothing_of_anywhere():
    """No inline scripts or styles, and no address but its own."""
    page = (studio.STATIC / "index.html").read_text()
    assert " style=" not in page
    assert " onclick=" not in page
    assert "<style" not in page
    for file in studio.STATIC.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")  # a name, which nobody fetches
        assert "://" not in text, file
        assert "innerHTML" not in text, file


# --- others can reach it ---------------------------------------------------------------------------------------------


def test_a_token_is_asked_for(stocked):
    """It leads to the page, and leaves a cookie; what has neither gets nothing."""
    app = studio.create_app(stocked, "0.0.0.0", "secret")
    with TestClient(app, "http://192.168.0.7:8765", follow_redirects=False) as client:
        for path in ("/", "/api/shelf", "/static/studio.js", "/openapi.json", "/?token=", "/?token=secre", "/api/shelf?token=S"):
            answer = client.get(path)
            assert (answer.status_code, list(answer.json())) == (403, ["error"])
            assert "secret" not in answer.text
        assert client.post("/api/trainings", json=THREES_AND_EIGHTS).status_code == 403
        assert client.get("/api/shelf?token=secret").status_code == 200
        answer = client.get("/?token=secret")
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert "HttpOnly" in answer.headers["set-cookie"]
        assert client.get("/").text.startswith("<!doctype html>")
        assert client.get("/api/shelf").status_code == 200
        assert client.post("/api/memories/0/recall", json={"coefficients": [0] * 7}).status_code == 200


@pytest.mark.parametrize(("host", "is_open"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_a_token_is_printed_wherever_others_can_reach_it(host, is_open, monkeypatch, capsys):
    served = []
    monkeypatch.setattr(studio.uvicorn.Server, "run", lambda self, sockets: served.append((self.config, sockets[0].close())))
    studio.serve([DIGITS], [], host, 0)
    said = capsys.readouterr().out
    token = re.search(rf"http://{host}:\d+/\?token=(\S{{32}}) ", said)
    assert bool(token) == is_open == ("others can reach it" in said)
    app = TestClient(served[0][0].app, "http://127.0.0.1")
    assert app.get("/api/shelf").status_code == (403 if is_open else 200)
    assert not served[0][0].proxy_headers  # X-Forwarded-For would make an address up


def test_nobody_is_told_where_files_lie(tmp_path, monkeypatch):
    folders = [tmp_path / "a b" / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir(parents=True)
        whitened(folder)
        (folder / "whitened.safetensors").rename(folder / "memory.safetensors")
        next(folder.glob("zca-*")).unlink()
    monkeypatch.setattr(shelf, "OWN", tmp_path / "a b" / "own")
    shelf.OWN.mkdir()
    (shelf.OWN / "broken.safetensors").write_bytes(b"no")
    make_memory().save(shelf.OWN / "plain.safetensors")
    with client_of(shelf.stock([folder / "memory.safetensors" for folder in folders])) as client:
        answers = [client.get("/api/shelf"), client.get("/api/memories/0/pictures")]
        order = {"classes": ["0:0", "1:1"]}
        answers += [client.get("/api/lines.py", params=order), client.post("/api/trainings", json=order)]
        answers.append(client.get("/api/lines.py", params={"classes": ["2:0", "2:1"]}))
        for answer in answers:
            assert str(tmp_path) not in answer.text
            assert "a b" not in answer.text
    assert "broken.safetensors is damaged" in answers[0].json()["problems"][0]
    assert "is not beside the memory" in answers[1].json()["error"]


def test_lines_name_files_that_are_called_alike_by_their_folders(tmp_path):
    paths = [tmp_path / name / "memory.safetensors" for name in ("one", "two")]
    for path in paths:
        make_memory().save(path)
    with client_of(shelf.stock([*paths, DIGITS])) as client:
        lines = client.get("/api/lines.py", params={"classes": ["0:0", "1:1", "0:2"]}).text
        assert "Memory.load('one/memory.safetensors')" in lines
        assert "Memory.load('two/memory.safetensors')" in lines
        assert "Memory.load('digits.safetensors')" in client.get("/api/lines.py", params={"classes": ["2:3", "2:8"]}).text


@pytest.fixture
def port(stocked):
    """A studio that answers on loopback, as it does to a user."""
    server = studio.server(studio.create_app(stocked))
    with studio.listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join()


def connected(port: int, data: bytes = b"") -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port), timeout=300)
    found.sendall(data)
    return found


def shelf_answers(port: int) -> bool:
    return httpx2.get(f"http://127.0.0.1:{port}/api/shelf", timeout=300).status_code == 200


def test_silence_keeps_nobody_out(port):
    """Connections that say nothing, or never end what they say, make room for those that ask."""
    with ExitStack() as opened:
        for number in range(200):
            begun = (
                b"",
                b"GET / HTTP/1.1\r\nX-",
                b"POST /api/memories/0/recall HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{",
            )
            opened.enter_context(connected(port, begun[number % 3]))
            if number % 40 == 39:
                assert shelf_answers(port)


@pytest.mark.parametrize(
    ("limit", "begun"),
    [
        ("HEADER_SECONDS", b""),
        ("HEADER_SECONDS", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-"),
        ("BODY_SECONDS", b"POST /api/memories/0/recall HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"),
    ],
)
def test_what_does_not_come_in_time_is_not_waited_for(limit, begun, monkeypatch, port, caplog):
    with monkeypatch.context() as short:  # for this connection alone: the next may be slow
        short.setattr(guard, limit, 0.1)
        with connected(port, begun) as late:
            assert late.recv(2**16) == b""
    assert shelf_answers(port)
    assert "Traceback" not in caplog.text


def test_an_address_has_so_many_connections(port, monkeypatch, held):
    """Those that are being answered are not closed for others."""
    monkeypatch.setattr(guard, "MOST_OF_ADDRESS", 2)
    name = httpx2.post(f"http://127.0.0.1:{port}/api/trainings", json=THREES_AND_EIGHTS).json()["id"]
    watch = f"GET /api/trainings/{name}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with connected(port, watch) as one, connected(port, watch) as two:
        assert b"200 OK" in one.recv(100)
        assert b"200 OK" in two.recv(100)
        with connected(port) as three:
            answer = three.recv(2**16)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert answer.endswith(b'{"error": "too many connections: try again in a minute"}')


# --- all of it, at random --------------------------------------------------------------------------------------------


def test_no_request_breaks_it(stocked, monkeypatch):
    """Whatever the description allows, and much that it does not: an answer that it describes, soon, and never a 500."""
    monkeypatch.setattr(jobs, "MOST_SECONDS", 0.5)  # of a training that some request orders
    app = studio.create_app(stocked)
    job = app.state.jobs.add(Order(classes=["0:3", "0:8"], epochs=5), "fuzz", "here")
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers={"Host": "localhost"})
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == 13
    for operation in operations:
        for mode in schemathesis.GenerationMode:
            fuzz(operation.as_strategy(generation_mode=mode), {"name": job.id, "number": 0, "label": 3})
    app.state.jobs.close()


def fuzz(cases, known: dict) -> None:
    """Half of the requests are for things that are there."""

    @hypothesis.settings(
        max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(cases, hypothesis.strategies.booleans())
    def each(case: schemathesis.Case, is_known: bool) -> None:
        if is_known:
            case.path_parameters.update({name: known[name] for name in case.path_parameters if name in known})
        answer = case.call(headers={"Host": "localhost"})
        checks = [not_a_server_error, status_code_conformance, content_type_conformance]
        case.validate_response(answer, checks=checks)
        if answer.status_code >= 400:
            assert set(answer.json()) == {"error"}

    with suppress(hypothesis.errors.Unsatisfiable):  # of an address that takes nothing, nothing can be wrong
        each()


def test_the_figures_of_the_docs_are_those_of_the_file():
    root = Path(__file__).parent.parent
    figures = json.loads((root / "results" / "studio-load.json").read_text())
    docs = (root / "docs" / "studio.md").read_text()
    assert figures["errors"] == 0
    for what in ("recall", "page"):
        times = figures[f"{what}, ms"]
        row = f"| {figures[f'{what}s a second']:.0f} | {times['median']} ms | {times['99th percentile']} ms | 0 |"
        assert row in docs


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command(monkeypatch, capsys):
    assert main(["studio", "nowhere.safetensors"]) == 2
    assert "does not exist" in capsys.readouterr().err
    served = []
    monkeypatch.setattr(studio, "serve", lambda *given: served.append(given))
    assert main(["studio", str(DIGITS), "--port", "0"]) == 0
    assert main(["studio", "--host", "::1", "--data", "digits"]) == 0
    (first, data, host, port), (second, same, there, default) = served
    assert (first, data, host, port) == ([DIGITS], [], "127.0.0.1", 0)
    assert [path.name for path in second] == [f"{name}-1.safetensors" for name in ("cifar10", "fashion-mnist", "mnist")]
    assert ([images.name for images in same], there, default) == (["digits"], "::1", 8765)


def test_a_port_that_is_taken():
    with studio.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RecollectError, match=f"cannot listen at 127.0.0.1, port {port}"):
            studio.listen("127.0.0.1", port)
    with pytest.raises(RecollectError, match="give another --port"):
        studio.listen("127.0.0.1", 99999)


def test_without_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "recollect.studio.app", None)
    assert main(["studio"]) == 2
    assert "pip install 'recollect[studio]'" in capsys.readouterr().err


def test_it_serves_until_it_is_told_to_stop(tmp_path):
    """As a user starts it; a stream that is open does not keep it from ending."""
    command = [sys.executable, "-m", "recollect", "studio", str(DIGITS), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        assert process.stdout is not None
        address = re.search(r"http://127.0.0.1:\d+", process.stdout.readline())[0]
        with httpx2.Client(base_url=address) as client:
            assert client.get("/").text.startswith("<!doctype html>")
            endless = (bytes(2**16) for _ in range(1000))  # does not say how long it is
            answer = client.post("/api/memories/0/recall", content=endless)
            assert (answer.status_code, answer.json()) == (413, {"error": "the upload is too large: at most 8 MB"})
            name = client.post("/api/trainings", json={**THREES_AND_EIGHTS, "epochs": 2000}).json()["id"]
            with client.stream("GET", f"/api/trainings/{name}/events") as stream:
                next(stream.iter_lines())
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=300)
        assert process.returncode == 0
        assert "Traceback" not in errors
    finally:
        process.kill()
