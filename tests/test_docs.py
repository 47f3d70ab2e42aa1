"""The documentation is true: links lead somewhere, code and commands run, flags exist, sentences are short, every public name is
explained, and the site builds without a network."""

import contextlib
import doctest
import inspect
import io
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest
import record
import torchvision_cpu  # noqa: F401  # before Lightning, which imports torchvision
from conftest import make_memory
from test_hub import server  # noqa: F401  # a fixture

import recollect
from recollect.cli import main
from recollect.continual.metrics import metrics, square
from recollect.files import compact

ROOT = Path(__file__).parent.parent
SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *SITE, ROOT / "results" / "README.md"]
TAUGHT = [ROOT / "README.md", ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
"""what a new user reads: performed from top to bottom, and written in short sentences"""
SHORTER = {"--minutes 10": "--network mlp:width=32 --outer-steps 20 --inner-steps 10 --window 10"}
"""what a test does in the place of minutes"""
LEAST = {
    "README.md": {r"([\d.]+) % of the test set": 90, r"R2 ([\d.]+)": 0.2},
    "queries.md": {r"R2 ([\d.]+)": 0.2},
    "index.md": {r"([\d.]+) % of the test set": 90},
    "composing.md": {r"([\d.]+) % of the test images of 3, 5 and 8": 85},
    "asking.md": {r"([\d.]+) % of the test images of five classes": 80},
    "objective.md": {r"([\d.]+) % of the validation images": 80},
    "without-recollect.md": {r"([\d.]+) % of all digits": 75},
    "sharing.md": {r"([\d.]+) % by Lightning": 75, r"label-robust score .*?(0\.\d+) ±": 0.3},
    "first_memory.py": {r"memory +([\d.]+) ±": 90},
    "own_network.py": {r"([\d.]+) % of the test images": 80},
    "choose.py": {r"6 bases: ([\d.]+) ±": 80},
    "look_inside.ipynb": {r"torch.Size\(\[(\d+), 16\]\)": 29},
    "compose_and_ask.ipynb": {r"([\d.]+) % of the test images of 3": 85, r"([\d.]+) % of the test images of five": 80},
}
"""what a page or an example prints, and the least that it may say"""
MOST_WORDS = 14
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)
STEP = re.compile(r"^```python\n(.*?)^```$|^    (recollect (?:[^\n]*\\\n)*[^\n]*)$", re.M | re.S)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def perform(text: str, where: str) -> dict:
    """Run a page's Python and its commands in their order, in one namespace, in the current folder."""
    names: dict = {"__name__": where}
    for python, command in STEP.findall(text):
        if python:
            exec(compile(python, where, "exec"), names)
            continue
        command = command.replace("\\\n", "")
        for long, short in SHORTER.items():
            command = command.replace(long, short)
        assert main(shlex.split(command, comments=True)[1:]) == 0, command
    return names


# --- what is shown runs --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("language_model")
@pytest.mark.filterwarnings("ignore:.*left out that cannot be read:UserWarning")
@pytest.mark.parametrize("path", [*TAUGHT, *(ROOT / "docs" / name for name in ("mathematics.md", "queries.md"))], ids=name_of)
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the Hub's library
@pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.isinstance.treespec:FutureWarning")  # Lightning's own
def test_a_page_does_what_it_shows(path, tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(tmp_path)
    if "push_to_hub" in path.read_text():
        request.getfixturevalue("server")
    perform(path.read_text(), name_of(path))
    said = capsys.readouterr().out
    for pattern, least in LEAST.get(path.name, {}).items():
        found = [float(number) for number in re.findall(pattern, said)]
        assert found, f"{name_of(path)} does not print {pattern}"
        assert min(found) >= least


def test_a_stranger_recalls_the_same(tmp_path, monkeypatch):
    """docs/tutorials/without-recollect.md: ten lines without this package, and the very same tensors."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "tutorials" / "without-recollect.md").read_text()
    ours, strangers = re.findall(r"```python\n(.*?)```", text, re.S)[:2]
    assert sum(bool(line.strip()) for line in strangers.splitlines()) <= 10
    assert "recollect" not in re.sub(r'\["recollect"\]', "", strangers)
    found = perform(f"```python\n{ours}```\n```python\n{strangers}```", "without-recollect.md")
    images, labels = recollect.Memory.load("digits.safetensors").recall()
    assert found["labels"].equal(labels)
    assert found["images"].allclose(images, atol=1e-6)


def test_a_stranger_recalls_with_numpy_alone(tmp_path):
    """The lines of the same page that do without torch; of a memory whose bases are smaller than its images."""
    text = (ROOT / "docs" / "tutorials" / "without-recollect.md").read_text()
    (lines,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "import numpy" in block)
    code = f"import sys\nsys.modules['torch'] = sys.modules['recollect'] = None\n{lines}\nnp.save('arrays.npy', arrays)"
    memory = make_memory(3)
    memory.save(tmp_path / "digits.safetensors")
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert np.allclose(np.load(tmp_path / "arrays.npy"), memory.recall()[0], atol=1e-6)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").iterdir()), ids=lambda path: path.name)
def test_an_example_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    if path.suffix == ".py":
        cells = [path.read_text()]
    else:
        cells = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict = {"__name__": "__main__"}
    for cell in cells:
        exec(compile(cell, path.name, "exec"), names)
    said = capsys.readouterr().out
    for pattern, least in LEAST.get(path.name, {}).items():
        assert float(re.search(pattern, said)[1]) >= least


# --- links and flags -----------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.M)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path):
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", path.read_text()))
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|mailto:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target.read_text())):
            wrong.append(link)
    assert not wrong


def helped(*words: str) -> str:
    """What the program prints for these words and ends with."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as shown:
        patch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit):
            main(list(words))
    return shown.getvalue()


@cache
def flags_of(command: str) -> frozenset[str]:
    """What `recollect COMMAND --help-all` lists."""
    return frozenset(re.findall(r"--[a-z0-9][a-z0-9-]*", helped(*command.split(), "--help-all")))


@cache
def commands() -> tuple[str, ...]:
    return tuple(re.findall(r"^  ([a-z]+)  ", helped("--help"), re.M))


@cache
def known_flags() -> frozenset[str]:
    """Of our commands, of our scripts, and of the tools that the pages tell to run."""
    ours = frozenset().union(*map(flags_of, (*commands(), "data get", "data show", "data check")))
    scripts = [path.read_text() for path in (ROOT / "experiments").glob("*.py")]
    theirs = re.findall(r'"(--[a-z][a-z-]*)"', "\n".join(scripts))
    others = "--nproc-per-node --nnodes --max-restarts --rdzv-endpoint --rdzv-backend --strict --tyro-print-completion"
    return ours | {*theirs} | {*others.split()}


@pytest.mark.parametrize("path", [page for page in PAGES if page.name not in ("CHANGELOG.md", "CONTRIBUTING.md")], ids=name_of)
def test_flags_exist(path):
    text = path.read_text().replace("\\\n", " ")
    code = "\n".join([*re.findall(r"^    .*$", text, re.M), *re.findall(r"`[^`]+`", text)])
    written = set(re.findall(r"(?<![\w-])--[a-z0-9][a-z0-9-]*", code))
    assert not (unknown := written - known_flags()), f"no command has {sorted(unknown)}"
    for command, rest in re.findall(r"\brecollect ([a-z]+)\b([^`\n|&]*)", code):
        if command in commands():
            flags = set(re.findall(r"(?<![\w-])--[a-z0-9][a-z0-9-]*", rest))
            known = flags_of(command) | flags_of(f"data {rest.split()[0]}") if command == "data" and rest else flags_of(command)
            assert not (unknown := flags - known), f"recollect {command} has no {sorted(unknown)}"


# --- sentences -----------------------------------------------------------------------------------------------------------


def sentences(text: str) -> list[str]:
    """The prose of a page: no code, tables, headings, formulas or quotations. An item of a list ends a sentence, and so do
    . ! ? before a space. A piece of code in a line is one word, and of a link its text stands."""
    text = re.sub(r"\$\$.*?\$\$", "", FENCE.sub("\n\n", text), flags=re.S)
    kept = []
    for line in text.splitlines():
        if re.match(r"    (?! *[-*\d])|\s*[|#>]|!\[|\s*<", line):
            kept.append("")
            continue
        kept.append(re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n", line))
    text = re.sub(r"`[^`]*`|\$[^$\n]*\$", "code", "\n".join(kept))
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("**", "").replace("*", "")
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        found += re.split(r"(?<=[.!?])[\")]*\s+", " ".join(paragraph.split()))
    return [sentence for sentence in found if re.search(r"\w", sentence)]


def words(sentence: str) -> int:
    return len(re.findall(r"[\w'%±-]*\w[\w'%.-]*", sentence))


def test_the_measure_of_sentences():
    text = "# Title\n\nOne two three. Four `recollect distill --x y` six!\n\n    code here\n\n- an item of five [words](a.md)\n"
    assert [words(each) for each in sentences(text)] == [3, 3, 5]


@pytest.mark.parametrize("path", TAUGHT, ids=name_of)
def test_sentences_are_short(path):
    lengths = [words(sentence) for sentence in sentences(path.read_text())]
    assert statistics.median(lengths) <= MOST_WORDS
    assert sorted(lengths)[-len(lengths) // 10] <= 2 * MOST_WORDS, "a tenth of the sentences are too long"


# --- the reference -------------------------------------------------------------------------------------------------------


@dataclass
class Explained:
    """A public function, class or method, and what its docstring has."""

    name: str
    value: object

    @property
    def text(self) -> str:
        return inspect.getdoc(self.value) or ""

    @property
    def parameters(self) -> list[str]:
        found = inspect.signature(self.value).parameters.values()
        return [each.name for each in found if each.name not in ("self", "cls") and each.kind not in (4,)]

    def section(self, title: str) -> str:
        found = re.search(rf"^{title}:\n((?:    .*\n?|\n)+)", self.text, re.M)
        return found[1] if found else ""


def public() -> list[Explained]:
    return [Explained(name, getattr(recollect, name)) for name in recollect.__all__]


@pytest.mark.parametrize("each", public(), ids=lambda each: each.name)
def test_a_public_name_is_explained(each):
    """A function: Arguments (each of them), Returns and Examples. A class: Examples, and every public method a docstring that
    explains its arguments where it has two or more."""
    if each.name == "RecollectError":
        assert each.text
        return
    assert each.section("Examples"), f"{each.name} lacks an example"
    assert ">>> " in each.section("Examples")
    if not inspect.isclass(each.value):
        assert each.section("Returns"), f"{each.name} does not say what it returns"
        named = re.findall(r"^    ([\w, ]+):", each.section("Arguments"), re.M)
        known = {name.strip() for line in named for name in line.split(",")}
        assert not (lacking := set(each.parameters) - known), f"{each.name} does not explain {lacking}"
        return
    for name, member in vars(each.value).items():
        if name.startswith("_") or not isinstance(member, property | cached_property | staticmethod | FunctionType):
            continue
        function = inspect.unwrap(getattr(member, "__func__", None) or getattr(member, "fget", None) or member)
        method = Explained(f"{each.name}.{name}", function)
        assert method.text, f"{method.name} has no docstring"
        if isinstance(member, FunctionType | staticmethod) and len(method.parameters) >= 2:
            assert method.section("Arguments"), f"{method.name} does not explain its arguments"


@pytest.mark.parametrize("each", public(), ids=lambda each: each.name)
def test_examples_of_the_reference_run(each, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder(recurse=False).find(each.value, each.name, globs={"recollect": recollect}):
        said: list[str] = []
        runner.run(test, out=said.append)
        assert runner.summarize(verbose=False).failed == 0, "".join(said)


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs" / "reference.md").read_text()
    assert sorted(re.findall(r"^::: recollect\.(\w+)$", page, re.M)) == sorted(recollect.__all__)


# --- the site ------------------------------------------------------------------------------------------------------------


def test_the_site_builds_and_loads_nothing_from_outside(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"}
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stderr
    wrong = []
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img|iframe|source)\b[^>]*?\bsrc="?([^"\s>]+)', text)
        loaded += re.findall(r'<link\b[^>]*?\brel="?(?:stylesheet|icon|preload|preconnect)"?[^>]*?\bhref="?([^"\s>]+)', text)
        wrong += [(page.name, link) for link in loaded if re.match(r"(?:https?:)?//", link)]
        assert "$$" not in text
        assert "merror" not in text
    for sheet in tmp_path.rglob("*.css"):
        wrong += [(sheet.name, link) for link in re.findall(r"url\(\s*[\"']?((?:https?:)?//[^)\"']+)", sheet.read_text())]
    assert not wrong
    reference = (tmp_path / "reference" / "index.html").read_text()
    for name in recollect.__all__:
        assert f'id="recollect.{name}"' in reference


# --- results/, as the scripts of experiments/ write it ---------------------------------------------------------------------


def test_what_holds_nothing_else_is_one_line(tmp_path):
    value = {"command": 'a "b"', "config": {"lr": 1e-09, "window": None}, "rows": [[1.25, 2], [True, 1 / 3]], "empty": []}
    path = tmp_path / "deeper" / "found.json"
    record.write(path, value)
    assert path.read_text().splitlines() == [
        "{",
        ' "command": "a \\"b\\"",',
        ' "config": {"lr": 1e-09, "window": null},',
        ' "rows": [',
        "  [1.25,2],",
        "  [true,0.333333]",
        " ],",
        ' "empty": []',
        "}",
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "results").rglob("*.json")), ids=lambda path: path.stem)
def test_results_are_written_so(path):
    assert compact(json.loads(path.read_text())) + "\n" == path.read_text()


def test_a_learner_s_row():
    forgets, constant = square([[90.0], [70.0, 80.0]]), square([[50.0], [50.0, 70.0]])
    runs = [{"matrix": forgets, "on": "test", "seconds": 1.0}, {"matrix": constant, "on": "test", "seconds": 2.0}]
    runs[1] |= {"device": "cpu", "environment": {"processor": "AMD EPYC", "cuda": None}}
    row = record.learner_row(runs)
    assert row["matrices"] == [[[90.0], [70.0, 80.0]], [[50.0, 70.0]]]
    assert row["bti"]["mean"] == (metrics(forgets).bti + metrics(constant).bti) / 2 == -5
    assert (row["ra"]["mean"], row["ra"]["n"], row["seconds"], row["where"]) == (67.5, 2, [1.0, 2.0], ["AMD EPYC"])
    assert record.learner_row([{"matrix": [[90.0]], "on": "test", "seconds": 1.0}])["bwt"] is None
