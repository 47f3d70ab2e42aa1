"""The report of a run: whole, true to the folder, safe with any names, and asking nothing of anywhere."""

import base64
import io
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from conftest import make_memory
from PIL import Image
from playwright.sync_api import sync_playwright

from recollect import Evaluation, Memory, Preprocess, RecollectError
from recollect.cli import main
from recollect.config import DistillConfig, changed, to_json
from recollect.data.preprocess import Zca
from recollect.nets import Network
from recollect.runs import Run
from recollect.show import figures, report

SECTIONS = ["accuracy", "training", "bases", "recalled", "similarity", "use", "cost", "config", "environment"]
HOSTILE = ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a & b", "'{}$x$\ud800\x00\n--><b>")
VOID = {"meta", "link", "img", "source"}
CHROMIUM = shutil.which("chromium")
BROKEN = """cells => cells.filter(cell => { const words = document.createRange(); words.selectNodeContents(cell);
    return words.getClientRects().length > 1; }).map(cell => cell.innerText)"""


class Page(HTMLParser):
    """What a browser would make of it: elements that are closed in order, with their attributes and words."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[tuple[tuple[str, ...], str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs)
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append((tuple(self.open), data))

    def inside(self, tag: str) -> list[str]:
        return [words for path, words in self.words if tag in path]

    def every(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def rows(self) -> list[str]:
        return [" ".join(words.split()) for path, words in self.words if "td" in path or "th" in path]


def checked(text: str) -> Page:
    """No scripts, no address but data in the page and places on it, a policy that forbids the rest, pictures that are whole."""
    found = Page(text)
    names = {name for name, _ in found.tags}
    assert not names & {"script", "iframe", "object", "embed", "form", "base", "audio", "video"}
    for name, attributes in found.tags:
        for key, value in attributes.items():
            assert not key.startswith("on")
            assert "://" not in value
            if key in ("src", "srcset", "href"):
                assert re.match("data:|#" if name == "a" else "data:", value), (name, key)
    css = "".join(found.inside("style"))
    assert "url(" not in css
    assert "@import" not in css
    (policy,) = [a["content"] for a in found.every("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy
    for image in found.every("img"):
        kind, data = re.fullmatch(r"data:image/([\w+]+);base64,(.*)", image["src"]).groups()
        assert image["alt"]
        if kind == "png":
            Image.open(io.BytesIO(base64.b64decode(data))).verify()
        else:
            ElementTree.fromstring(base64.b64decode(data))
    assert [a["id"] for a in found.every("section")] == SECTIONS
    assert [a["href"] for a in found.every("a")] == [f"#{name}" for name in SECTIONS]
    assert len(found.inside("h2")) == len(SECTIONS)
    return found


def make_run(folder: Path, memory: Memory | None = None, **config) -> Path:
    """A run of three outer steps whose memory this is."""
    settings = to_json(changed(DistillConfig(), outer_steps=3, network="mlp", **config))
    run = Run.create(folder, "distill", {"data": {"name": "toy", "root": None, "size": None}, "distill": settings})
    for step in (1, 2, 3):
        run.log({"step": step, "loss": 1 / step, "norm": 0.5 / step, "seconds": 0.25})
    memory = memory or make_memory()
    made = {"config": settings, "steps": 3, "skipped": 0, "device": "cpu"}
    fitted, memory = (memory.fitted, Memory(memory.bases, memory.addressing, replace(memory.header, made=made), memory.encoder))
    memory.fitted = fitted
    memory.save(run.memory_path)
    return folder


def evaluated(folder: Path, **more) -> Path:
    rows = [
        Evaluation("memory", "mlp", (91.0, 93.0), "test", "2 networks, 300 epochs", 1.5).to_json() | {"size": "123 numbers"},
        Evaluation("random real images", "mlp", (60.0, 64.0), "test", "2 networks, 300 epochs", 1.5).to_json() | more,
    ]
    (folder / "evaluation.json").write_text(json.dumps({"memory": "memory.safetensors", "rows": rows}))
    return folder


def test_the_report_says_what_the_folder_holds(tmp_path):
    path = report.write(evaluated(make_run(tmp_path / "run")))
    assert path == tmp_path / "run" / "report.html"
    found = checked(path.read_text())
    rows = found.rows()
    first = rows.index("memory")
    assert rows[first : first + 5] == ["memory", "92.0 ± 1.4", "123 numbers", "mlp", "2"]
    assert rows[first + 5 : first + 10] == ["random real images", "62.0 ± 2.8", "–", "mlp", "2"]
    assert found.inside("h1") == ["toy, 1 image per class"]
    assert found.inside("dd") == ["92.0 ± 1.4", "124", "496 bytes", "0.8 s"]
    for name, value in (("outer steps", "3 of 3"), ("distilling", "0.8 s"), ("evaluating", "3.0 s"), ("device", "cpu")):
        assert rows[rows.index(name) + 1] == value
    assert rows[rows.index("outer_steps") + 1] == "3"  # of the config
    assert rows[rows.index("data, name") + 1] == "toy"
    assert rows[rows.index("torch") + 1] == torch.__version__
    assert found.inside("figcaption") == ["cat", "dog", "frog"]
    assert found.inside("summary") == [f"{len(to_json(DistillConfig()))} settings"]
    assert "3" in found.inside("b")  # settings that are not the preset's
    assert "0.01" not in found.inside("b")


def test_pictures_are_the_memorys(tmp_path):
    folder = make_run(tmp_path / "run")
    found = checked(report.write(folder).read_text())
    shown = [image for image in found.every("img") if "pixels" in image["class"]]
    assert [image["alt"] for image in shown] == ["the bases", *(f"recalled images of {n}" for n in ("cat", "dog", "frog"))]
    memory = Memory.load(folder / "memory.safetensors")
    images, columns = figures.recalled_by_class(memory, [1])
    with Image.open(io.BytesIO(base64.b64decode(shown[2]["src"].split(",")[1]))) as picture:
        light, alpha = picture.split()
    assert np.array_equal(light, figures.mosaic(images, columns))
    assert (np.asarray(alpha)[:, :8] == 255).all()
    assert (np.asarray(alpha)[:, 8] == 0).all()  # the gap


def test_charts_are_there_for_light_and_dark(tmp_path):
    found = checked(report.write(make_run(tmp_path / "run")).read_text())
    charts = [image for image in found.every("img") if "chart" in image["class"]]
    assert [image["alt"] for image in charts] == [
        "outer loss by outer step",
        "norm of the outer gradient by outer step",
        "similarity of classes",
    ]
    dark = found.every("source")
    assert len(dark) == 3
    assert {source["media"] for source in dark} == {"(prefers-color-scheme: dark)"}
    for source, image in zip(dark, charts, strict=True):
        svg = base64.b64decode(source["srcset"].split(",")[1])
        ElementTree.fromstring(svg)
        assert b"#222222" not in svg
        assert b"#222222" in base64.b64decode(image["src"].split(",")[1])


def test_names_are_text_whatever_they_hold(tmp_path):
    memory = make_memory(class_names=HOSTILE)
    memory = Memory(memory.bases, memory.addressing, replace(memory.header, dataset="</title><script>alert(2)</script>"))
    folder = evaluated(make_run(tmp_path / "run", memory, augment="<i>none</i>"), size="<b>big</b>")
    config = json.loads((folder / "config.json").read_text())
    config["data"]["<u>"] = {"<s>": ['"']}
    (folder / "config.json").write_text(json.dumps(config))
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(environment | {"commit": "<img src='https://x'>"}))
    text = report.write(folder).read_text()
    found = checked(text)
    assert found.inside("figcaption")[:3] == list(HOSTILE[:3])
    assert found.inside("title") == ["</title><script>alert(2)</script>, 1 image per class: a memory of recollect"]
    assert "<script" not in text
    assert "<b>big</b>" in found.rows()
    assert "<img src='https://x'>" in found.rows()
    alts = [image["alt"] for image in found.every("img")]
    assert f"recalled images of {HOSTILE[1]}" in alts


def test_the_lines_of_python_run(tmp_path, monkeypatch):
    for number, names in enumerate((("cat", "dog", "frog"), HOSTILE, ("x" * 50, "y"), ("x" * 50,))):
        folder = make_run(tmp_path / str(number), make_memory(class_names=names))
        monkeypatch.chdir(folder)
        (code,) = [words for words in Page(report.write(folder).read_text()).inside("pre")]
        values: dict = {}
        exec(compile(code, "report.html", "exec"), values)
        assert torch.equal(values["images"], Memory.load("memory.safetensors").recall(list(range(min(2, len(names)))))[0])
        assert callable(values["preprocess"])


def test_a_run_that_was_not_evaluated_says_so(tmp_path):
    found = checked(report.write(make_run(tmp_path / "run")).read_text())
    assert "recollect evaluate ." in found.inside("code")
    assert found.inside("dd")[0] == "–"


def test_recorded_accuracy_is_enough(tmp_path):
    folder = make_run(tmp_path / "run")
    memory = Memory.load(folder / "memory.safetensors")
    entry = {"network": "mlp", "mean": 77.25, "deviation": 0.5, "n": 4, "on": "validation", "protocol": "short"}
    memory.with_accuracy(entry).save(folder / "memory.safetensors")
    found = checked(report.write(folder).read_text())
    assert "77.2 ± 0.5" in found.rows()
    assert "% validation accuracy, 4 networks" in found.inside("dt")


def test_the_same_run_gives_the_same_page_anywhere(tmp_path):
    first = report.write(evaluated(make_run(tmp_path / "run"))).read_bytes()
    assert report.write(tmp_path / "run").read_bytes() == first
    copy = shutil.copytree(tmp_path / "run", tmp_path / "elsewhere")
    assert report.write(copy).read_bytes() == first


def test_memories_of_every_kind(tmp_path):
    one_hot = replace(make_memory().header, addressing="one-hot")
    kinds = {
        "one-hot": Memory(torch.randn(3, 1, 4, 4), torch.eye(3, dtype=torch.uint8)[None], one_hot),
        "colour": make_memory(channels=3),
        "two channels": make_memory(channels=2),
        "many": make_memory(class_names=tuple(f"class {n}" for n in range(150)), bases=300),
        "half": make_memory(),
    }
    kinds["half"] = Memory(kinds["half"].bases.half(), kinds["half"].addressing.half(), kinds["half"].header)
    pages = {}
    for name, memory in kinds.items():
        path = report.write(make_run(tmp_path / name, memory))
        pages[name] = path.read_text()
        checked(pages[name])
        assert path.stat().st_size < 2_000_000
    assert "addressing is one-hot: its classes share no bases" in pages["one-hot"]
    assert "images of 2 channels cannot be shown" in pages["two channels"]
    assert "2 of 5 recalled images of each class, as pixels again; the first 120 of 150 classes" in pages["many"]
    assert "the first 256 of 300 bases" in pages["many"].lower()
    assert "as float16" in pages["half"]


def test_a_memory_that_is_asked_with_pictures(tmp_path, monkeypatch, capsys):
    query = {"encoder": "mlp:width=4", "size": 6, "ways": 2, "shots": 1}
    encoder = Network("mlp:width=4", (1, 8, 8), 6).fresh(0)
    header = replace(make_memory().header, query=query)
    folder = make_run(tmp_path / "run", Memory(torch.randn(4, 1, 4, 4), torch.randn(5, 6, 4), header, encoder))
    text = report.write(folder).read_text()
    checked(text)
    assert text.count("Not shown: run is asked with pictures, not with labels") == 3
    assert "recollect evaluate" not in text  # which refuses it
    assert "asked with pictures." in text
    (code,) = Page(text).inside("pre")
    monkeypatch.chdir(folder)
    for name in ("these/1.png", "those/1.png", "picture.png"):
        Path(name).parent.mkdir(exist_ok=True)
        Image.new("L", (8, 8), len(name)).save(name)
    exec(compile(code, "report.html", "exec"), {})
    assert "Answer(class_name='th" in capsys.readouterr().out
    figures.draw("bases", [folder])
    with pytest.raises(
        RecollectError, match="must be asked with the names of classes, or with continuous targets: it can give bases, curves"
    ):
        figures.draw("recalled", [folder])


def test_large_images_are_shown_small(tmp_path):
    header = replace(make_memory().header, image_shape=[1, 300, 200], downsample=2)
    memory = Memory(torch.randn(4, 1, 150, 100), torch.randn(5, 3, 4), header)
    path = report.write(make_run(tmp_path / "run", memory))
    checked(path.read_text())
    assert path.stat().st_size < 500_000


def test_a_whitening_file_that_was_left_behind(tmp_path):
    memory = make_memory()
    memory.fitted = Preprocess((0.4,), (0.3,), Zca(torch.zeros(64), torch.eye(64)))
    header = replace(memory.header, preprocessing=memory.fitted.to_json())
    whole = Memory(memory.bases, memory.addressing, header)
    whole.fitted = memory.fitted
    folder = make_run(tmp_path / "run", whole)
    found = checked(report.write(folder).read_text())
    assert "its whitening file" in found.rows()
    for sidecar in folder.glob("zca-*"):
        sidecar.unlink()
    assert "Not shown: the whitening file" in report.write(folder).read_text()


def test_metrics_with_holes(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": null, "norm": null}\n{"step": 2, "loss": "x"}\n')
    (folder / "environment.json").unlink()
    text = report.write(folder).read_text()
    checked(text)
    assert "No metrics were kept." in text
    assert "Not kept." in text


def test_not_a_run(tmp_path):
    with pytest.raises(RecollectError, match="holds no run"):
        report.write(tmp_path)
    folder = make_run(tmp_path / "run")
    (folder / "evaluation.json").write_text('{"rows": [{}]}')
    with pytest.raises(RecollectError, match=r"evaluation.json has an accuracy without mean"):
        report.write(folder)
    (folder / "evaluation.json").unlink()
    (folder / "memory.safetensors").unlink()
    with pytest.raises(RecollectError, match=r"memory.safetensors does not exist"):
        report.write(folder)


def test_every_run_ends_with_it(tmp_path, toy_npz, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = f"distill {toy_npz} --network mlp:width=8 --outer-steps 2 --inner-steps 2 --window None --device cpu --out run"
    assert main(command.split()) == 0
    assert capsys.readouterr().out.endswith("report in run/report.html\n")
    report = Path("run/report.html")
    before = report.read_bytes()
    assert "Not measured yet" in report.read_text()
    report.unlink()
    assert main(["resume", "run", "--quiet"]) == 0
    assert "report" not in capsys.readouterr().out
    assert report.read_bytes() == before

    evaluate = ["evaluate", "run", "--networks", "2", "--epochs", "1"]
    assert main([*evaluate, "--json", "other.json"]) == 0
    assert report.read_bytes() == before  # nothing new is in the folder
    assert main(evaluate) == 0
    assert capsys.readouterr().out.endswith("report in run/report.html\n")
    rows = checked(report.read_text()).rows()
    first = rows.index("memory")
    assert re.fullmatch(r"[\d.]+ ± [\d.]+", rows[first + 1])
    assert rows[first + 2].endswith(" numbers")
    assert "random real images" in rows

    shutil.copy("run/memory.safetensors", "alone.safetensors")
    assert main(["evaluate", "alone.safetensors", "--data", str(toy_npz), "--networks", "1", "--epochs", "1"]) == 0
    assert not Path("report.html").exists()


@pytest.mark.skipif(not CHROMIUM, reason="no chromium here (apt-get install chromium)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_chromium(tmp_path, scheme):
    """It has nothing to say and asks for nothing; on a phone nothing is too wide, and no name of a setting is broken."""
    path = report.write(evaluated(make_run(tmp_path / "run", make_memory(class_names=HOSTILE))))
    said, asked = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
        opened.on("console", lambda message: said.append(message.text))
        opened.on("pageerror", lambda error: said.append(str(error)))
        opened.on("request", lambda request: asked.append(request.url))
        opened.goto(path.resolve().as_uri())
        assert "Similarity of classes" in opened.inner_text("main")
        assert opened.evaluate("document.documentElement.scrollWidth") == 360
        opened.set_viewport_size({"width": 390, "height": 844})
        assert opened.evaluate("document.documentElement.scrollWidth") == 390
        tables = opened.locator("#accuracy .scroll, #cost .scroll, #environment .scroll")
        assert all(tables.evaluate_all("all => all.map(each => each.scrollWidth <= each.clientWidth)"))
        broken = opened.locator("#environment th").evaluate_all(BROKEN)
        browser.close()
    assert broken == []
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [path.resolve().as_uri()]
