"""The Hub, by its own library: against a server on loopback that answers what the library asks, a memory arrives as it was sent,
and what is refused is one line."""

import base64
import hashlib
import json
import re
import shlex
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from conftest import CLASSES, make_memory
from test_distillation import toy
from test_queries import ASKED
from test_targets import SMALL, rotating, sums

import recollect
from recollect import Memory, RecollectError, distill, hub, queries, zoo
from recollect.cli import main
from recollect.publish import card
from recollect.show.pictures import to_pixels

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of its library, which sends files so
TOKEN = "hf_writes"


class Hub:
    """Repositories by their address (datasets begin with datasets/), each a list of commits: files by name."""

    def __init__(self):
        self.commits: dict[str, list[dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.stored: dict[str, bytes] = {}
        self.fails = 0

    def files(self, repository: str, revision: str = "main") -> dict[str, bytes] | None:
        commits = self.commits[repository]
        if revision == "main":
            return commits[-1] if commits else {}
        numbers = {self.sha(number): number for number in range(len(commits))}
        return commits[numbers[revision]] if revision in numbers else None

    @staticmethod
    def sha(number: int) -> str:
        return f"{number + 1:040x}"


class Answers(BaseHTTPRequestHandler):
    """What the library asks of the Hub for a download and for a commit."""

    hub: Hub

    def do_GET(self):
        self.resolve()

    do_HEAD = do_GET

    def resolve(self):
        found = re.fullmatch(r"/((?:datasets/)?[\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", self.path)
        if self.hub.fails:
            return self.say(self.hub.fails)
        repository, revision, name = found.groups() if found else ("", "", "")
        hidden = repository in self.hub.private and not self.may_write()
        if hidden or repository not in self.hub.commits:
            return self.say(401, {"X-Error-Code": "RepoNotFound"})
        files = self.hub.files(repository, revision)
        if files is None:
            return self.say(404, {"X-Error-Code": "RevisionNotFound"})
        commit = {"X-Repo-Commit": revision if revision != "main" else Hub.sha(len(self.hub.commits[repository]) - 1)}
        if name not in files:
            return self.say(404, {"X-Error-Code": "EntryNotFound"} | commit)
        return self.say(200, {"ETag": f'"{hashlib.sha256(files[name]).hexdigest()}"'} | commit, files[name])

    def do_PUT(self):
        self.hub.stored[self.path.rpartition("/")[2]] = self.body()
        self.say(200)

    def do_POST(self):
        body = self.body()
        if not self.may_write():
            return self.say(401)
        if self.headers["Authorization"] == f"Bearer {TOKEN}_elsewhere":
            return self.say(403)
        if self.path == "/api/repos/create":
            return self.create(json.loads(body))
        if self.path == "/api/validate-yaml":
            return self.tell({"errors": [], "warnings": []})
        if self.path.endswith("/info/lfs/objects/batch"):
            return self.tell({"transfer": "basic", "objects": [self.lfs(each) for each in json.loads(body)["objects"]]})
        kind, repository, what = re.fullmatch(
            r"/api/(model|dataset)s/([\w.-]+/[\w.-]+)/(preupload|commit)/main", self.path
        ).groups()
        if what == "preupload":
            mode = lambda path: "lfs" if path.endswith((".safetensors", ".parquet")) else "regular"  # noqa: E731
            paths = [file["path"] for file in json.loads(body)["files"]]
            return self.tell({"files": [{"path": p, "uploadMode": mode(p), "shouldIgnore": False, "oid": None} for p in paths]})
        return self.commit(repository if kind == "model" else f"datasets/{repository}", map(json.loads, body.splitlines()))

    def create(self, asked):
        repository = f"{asked['organization']}/{asked['name']}"
        repository = repository if asked.get("type", "model") == "model" else f"datasets/{repository}"
        if repository in self.hub.commits:
            return self.tell({"url": self.address(repository)}, 409)
        self.hub.commits[repository] = []
        if asked.get("private") or asked.get("visibility") == "private":
            self.hub.private.add(repository)
        return self.tell({"url": self.address(repository)})

    def lfs(self, asked):
        return asked | {"actions": {"upload": {"href": self.address(f"lfs/{asked['oid']}")}}}

    def commit(self, repository, lines):
        files = dict(self.hub.files(repository))
        for line in lines:
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            if line["key"] == "lfsFile":
                files[line["value"]["path"]] = self.hub.stored[line["value"]["oid"]]
        self.hub.commits[repository].append(files)
        sha = Hub.sha(len(self.hub.commits[repository]) - 1)
        self.tell({"commitUrl": self.address(f"{repository}/commit/{sha}"), "commitOid": sha})

    def may_write(self) -> bool:
        return self.headers.get("Authorization", "").startswith(f"Bearer {TOKEN}")

    def address(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/{path}"

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def tell(self, value, status=200):
        self.say(status, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def say(self, status: int, headers: dict[str, str] | None = None, body: bytes = b""):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """An empty Hub, a token that may write, and a cache of our own; the current folder is empty too."""
    from huggingface_hub import constants

    served = Hub()
    listening = ThreadingHTTPServer(("127.0.0.1", 0), type("Served", (Answers,), {"hub": served}))
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listening.server_address[1]}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its storage is another server, in another protocol
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield served
    listening.shutdown()
    listening.server_close()


def whitened(folder: Path) -> Memory:
    """A memory with a whitening file."""
    pixels = torch.randint(0, 256, (60, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    preprocess, plain = recollect.Preprocess.fit(pixels, "zca"), make_memory()
    memory = Memory(plain.bases, plain.addressing, replace(plain.header, preprocessing=preprocess.to_json()))
    memory.fitted = preprocess
    memory.save(folder / "whitened.safetensors")
    return Memory.load(folder / "whitened.safetensors")


def test_what_is_sent_arrives(server, tmp_path):
    memory = make_memory()
    page = recollect.push_to_hub(memory, "owner/toy")
    assert page.endswith("/owner/toy")
    assert set(server.files("owner/toy")) == {"memory.safetensors", "memory.png", "README.md"}
    loaded = Memory.from_pretrained("owner/toy")
    assert torch.equal(loaded.recall()[0], memory.recall()[0])
    assert loaded.header.class_names == memory.header.class_names
    assert loaded.name == "toy"
    assert list(Path().iterdir()) == []


def test_whitening_travels_too(server, tmp_path):
    memory = whitened(tmp_path)
    recollect.push_to_hub(memory, "owner/white")
    loaded = Memory.from_pretrained("owner/white")
    assert torch.equal(loaded.preprocess().zca.matrix, memory.preprocess().zca.matrix)
    recollect.push_to_hub(memory, "owner/whiter")
    del server.commits["owner/whiter"][-1][memory.header.preprocessing["zca"]["file"]]
    with pytest.raises(RecollectError, match=r"whitening file .* is not beside the memory"):  # once it is needed
        Memory.from_pretrained("owner/whiter").preprocess()


def test_a_revision_stays_what_it_was(server):
    first, second = make_memory(bases=4), make_memory(bases=5)
    for memory in (first, second):
        recollect.push_to_hub(memory, "owner/toy")
    assert len(Memory.from_pretrained("owner/toy").bases) == 5
    assert len(Memory.from_pretrained("owner/toy", revision=Hub.sha(0)).bases) == 4
    assert len(Memory.load(f"hub:owner/toy@{Hub.sha(0)}").bases) == 4


def test_commands_take_its_name(server, toy_npz, capsys):
    make_memory().save("toy.safetensors")
    for command in (
        "push toy.safetensors owner/toy --licence cc-by-4.0",
        "info hub:owner/toy",
        "recall hub:owner/toy --classes cat --out cat.npz",
        "plot recalled hub:owner/toy --out recalled.png",
        f"evaluate hub:owner/toy --data {toy_npz} --networks 1 --epochs 1 --no-baselines",
        "compose hub:owner/toy:cat,frog --epochs 1 --network mlp:width=8 --save both.safetensors",
        "compose hub:owner/toy --epochs 1 --network mlp:width=8 --save all.safetensors",
    ):
        assert main(shlex.split(command)) == 0, command
    assert b'license: "cc-by-4.0"' in server.files("owner/toy")["README.md"]
    assert "/owner/toy\n" in capsys.readouterr().out
    assert Path("runs/hub/owner/toy/evaluations").is_dir()
    assert zoo.name_of(zoo.find("hub:owner/toy")) == "hub:owner/toy"


def test_as_a_dataset(server, monkeypatch):
    datasets = pytest.importorskip("datasets")
    memory = make_memory(3)
    recollect.push_to_hub(memory, "owner/toy", dataset=True, private=True)
    assert set(server.commits) == server.private == {"datasets/owner/toy"}
    files = server.files("datasets/owner/toy")
    for name, data in files.items():
        Path("toy", name).parent.mkdir(parents=True, exist_ok=True)
        Path("toy", name).write_bytes(data)
    rows = datasets.load_dataset("toy", split="train", cache_dir="cached")
    assert rows.features["label"].names == list(CLASSES)
    images, labels = memory.recall()
    pixels = to_pixels(memory.preprocess().undo(images))
    assert rows["label"] == labels.tolist()
    found = torch.stack([torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8) for image in rows["image"]])
    assert torch.equal(found.view(-1, 8, 8, 3).permute(0, 3, 1, 2), pixels)
    assert recollect.load("hf:toy").class_names == CLASSES


def test_the_card_says_what_the_header_says():
    yaml = pytest.importorskip("yaml")
    memory = Memory.load("mnist-1")
    _, front, text = card(memory, "owner/mnist").split("---\n", 2)
    data = yaml.safe_load(front)
    assert data["license"] == "cc-by-sa-3.0"
    ((metric,),) = [result["metrics"] for result in data["model-index"][0]["results"]]
    (entry,) = memory.header.accuracy
    assert metric["value"] == pytest.approx(entry["mean"], abs=0.005)
    assert f"{entry['mean']:.1f} ± {entry['deviation']:.1f}" in text
    assert "7,776 numbers" in text
    namespace = {"recollect": type("", (), {"Memory": type("", (), {"from_pretrained": lambda _: memory})})}
    exec(re.search(r"```python\nimport recollect\n(.*?)```", text, re.S)[1], namespace)
    assert f"{len(namespace['images']):,} training images" in text


def test_names_in_a_card_are_text():
    """A header may come from anywhere."""
    memory = make_memory(class_names=("a|b", "<script>", "new\nline"))
    text = card(memory, "owner/x")
    assert "a\\|b, \\<script\\>, new line" in text
    assert 'license: "unknown"' in text


def test_memories_without_classes(server, monkeypatch):
    """Asked with pictures, or with continuous targets of images and of vectors: they have a card; a dataset of pictures they
    are not."""
    monkeypatch.setattr(queries, "ENCODER", "mlp:width=8,depth=1")
    r2 = {
        "network": "mlp",
        "mean": 0.51,
        "deviation": 0.01,
        "n": 2,
        "on": "test",
        "protocol": "short",
        "metric": "R2",
        "rmse": 2.0,
    }
    made = {"pictures": distill(toy(), ASKED), "rows": distill(rotating(), SMALL), "sums": distill(sums(), SMALL)}
    for name, memory in made.items():
        memory = memory if name == "pictures" else memory.with_accuracy(r2)
        recollect.push_to_hub(memory, f"owner/{name}")
        assert torch.equal(Memory.from_pretrained(f"owner/{name}").bases, memory.bases)
        files = server.files(f"owner/{name}")
        assert ("memory.png" in files) == (b"![memory](memory.png)" in files["README.md"]) == (name != "sums")
        assert (b"R2 0.510" in files["README.md"]) == (name != "pictures")
        with pytest.raises(RecollectError):
            recollect.push_to_hub(memory, f"owner/{name}", dataset=True)
    assert not any(repository.startswith("datasets/") for repository in server.commits)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("info hub:owner/none", "hub:owner/none does not exist at http://127.0.0.1:"),
        ("info hub:owner/hidden", "or is private: check the name, or log in (hf auth login, or HF_TOKEN)"),
        ("info hub:owner/toy@v9", "hub:owner/toy has no revision 'v9'"),
        ("info hub:owner/empty", "hub:owner/empty has no memory.safetensors: it is no memory of recollect"),
        ("info hub:toy", "hub:toy is no name of the Hub: give hub:owner/name"),
        ("info hub:../toy", "hub:../toy is no name of the Hub"),
        ("info hub:owner/toy@../../x", "hub:owner/toy@../../x is no name of the Hub"),
        ("evaluate hub:owner/toy --record", "hub:owner/toy is of the Hub, whose files stay as they are"),
        ("push toy.safetensors toy", "'toy' is no name for the Hub: give owner/name"),
        ("push toy.safetensors owner/toy --licence 'my own'", "licence 'my own' is no name of the Hub's"),
        ("push toy.safetensors owner/other", "needs a token that may write: run hf auth login, or set HF_TOKEN"),
    ],
)
def test_what_cannot_be_is_one_line(server, monkeypatch, capsys, command, words):
    make_memory().save("toy.safetensors")
    recollect.push_to_hub(make_memory(), "owner/toy")
    recollect.push_to_hub(make_memory(), "owner/hidden", private=True)
    server.commits["owner/empty"] = []
    monkeypatch.delenv("HF_TOKEN")
    capsys.readouterr()
    assert main(shlex.split(command)) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("token", "words"),
    [("wrong", "the token is not valid; log in"), (f"{TOKEN}_elsewhere", "the token may not write there; log in")],
)
def test_another_token_is_refused(server, monkeypatch, token, words):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(RecollectError, match=words):
        recollect.push_to_hub(make_memory(), "owner/toy")


def test_without_a_network(server, monkeypatch):
    """What was fetched is still there; the rest is one line."""
    memory = make_memory()
    recollect.push_to_hub(memory, "owner/toy")
    Memory.from_pretrained("owner/toy")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert torch.equal(Memory.from_pretrained("owner/toy").bases, memory.bases)
    with pytest.raises(RecollectError, match=r"http://127.0.0.1:1 cannot be reached to load it \(ConnectError\): check"):
        Memory.from_pretrained("owner/other")
    with pytest.raises(
        RecollectError, match=r"http://127.0.0.1:1 cannot be reached to send it \(ConnectError\): check the network"
    ):
        recollect.push_to_hub(memory, "owner/toy")


def test_a_server_that_fails(server):
    server.fails = 451  # one that is not asked again and again
    with pytest.raises(RecollectError, match=r"refuses to load it .*: it answered 451"):
        Memory.from_pretrained("owner/toy")


def test_a_damaged_file_is_refused(server):
    recollect.push_to_hub(make_memory(), "owner/toy")
    files = server.commits["owner/toy"][-1]
    files["memory.safetensors"] = files["memory.safetensors"][:-1] + b"\x77"
    with pytest.raises(RecollectError, match="its tensors do not match its checksum"):
        Memory.from_pretrained("owner/toy")


def test_its_address_is_the_library_s(server, monkeypatch):
    """Without HF_ENDPOINT; and nothing is asked of it where the library is told not to."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delenv("HF_ENDPOINT")
    with pytest.raises(RecollectError, match=r"https://huggingface.co cannot be reached to load it"):
        Memory.from_pretrained("owner/toy")


def test_a_large_file_is_not_fetched(server, monkeypatch):
    recollect.push_to_hub(make_memory(), "owner/toy")
    monkeypatch.setenv("RECOLLECT_MOST_GIB", "0.000001")
    with pytest.raises(RecollectError, match=r"memory.safetensors of hub:owner/toy would take .* more than the limit"):
        Memory.from_pretrained("owner/toy")
    assert not (Path.cwd().parent / "cache").exists()


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RecollectError, match=r"the Hub needs huggingface_hub: pip install 'recollect\[hub\]'"):
        Memory.load("hub:owner/toy")
    with pytest.raises(RecollectError, match="huggingface_hub"):
        recollect.push_to_hub(make_memory(), "owner/toy")
    assert hub.name_of(Path("models--owner--toy/snapshots/0/memory.safetensors")) == "owner/toy"
