"""The paper's tables and figures: a tiny version of each runs, resumes and is refused; pages and README are made of results."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import experiment_module

import recollect
from recollect import DistillConfig, Images, RecollectError, Split, queries
from recollect.cli import main
from recollect.config import changed
from recollect.decisions import resolve
from recollect.files import read_json
from recollect.objectives import OBJECTIVES
from recollect.reproduce import earlier, page, paper, rows, tables, work
from recollect.reproduce.run import Places, reproduce
from recollect.reproduce.scales import FULL, LEGS, QUICK, SCALES, Pictures, Scale, Tasks
from recollect.reproduce.tables import TABLES

ROOT = Path(__file__).parent.parent
SMALL = {
    "network": "mlp:width=8,depth=1",
    "inner_steps": 2,
    "window": None,
    "real_per_class": 5,
    "outer_steps": 2,
    "inner_lr": 0.05,
}
TINY = Scale(
    "tiny",
    networks=2,
    best=SMALL,
    compared=SMALL,
    timed=SMALL,
    experts=(2, 3),
    steps={1: 2},
    longest=3,
    tasks=Tasks(SMALL | {"bases": 2, "downsample": 1}, tests=3, epochs=2, full_epochs=1, ways=3),
    pictures=Pictures(
        SMALL | {"images_per_class": 4, "bases": 3, "matrices": 4, "downsample": 1},
        {"query": "images", "query_form": "probabilities", "query_size": 10, "encoder_epochs": 1},
        draws=1,
        ways=2,
    ),
    architectures={"convnet": "mlp:width=8", "resnet12": "mlp:width=6", "alexnet": "mlp:width=4"},
    trained={"convnet": "mlp:width=8", "resnet12": "mlp:width=6", "alexnet": "mlp:width=4"},
    stream={
        "tasks": 2, "per_task": 20, "network": "mlp:width=8,depth=1", "inner_steps": 2, "buffer": 40, "outer_per_batch": 1,
        "bases": 2, "window": None, "test_steps": 2, "inner_per_class": 2,
    },
    seeds=1,
    epochs=2,
    instead="digits",
)  # fmt: skip
"""seconds, on the digits"""
CELLS = {
    "table1": ["mnist-1", "cifar10-10"],
    "ablation": ["cifar10-1-bptt", "cifar10-1-downsampling", "cifar10-1-addressing", "cifar10-1-augmentation"],
    "momentum": ["cifar10-1"],
    "inner-steps": ["cifar10-1"],
    "cross-architecture": ["cifar10-1"],
    "bases": ["mnist-1-8"],
    "objectives": ["mnist-trajectories", "fashion-mnist-distributions"],
    "similarity": ["cifar10-1"],
    "visualisations": ["cifar100-2"],
    "continual": ["rotations"],
    "compose": [],
    "ask": [],
}


def blank(name: str, classes: tuple[str, ...], shape: tuple[int, int, int], per_class: int) -> Images:
    """Black images, enough of each class for a budget."""
    labels = torch.arange(len(classes)).repeat(per_class)
    split = Split(torch.zeros(1, dtype=torch.uint8).expand(len(labels), *shape), labels)
    return Images(name, split, split, split, classes)


@pytest.fixture
def places(tmp_path, tiny_scale) -> Places:
    return Places(tmp_path / "runs", tmp_path / "results" / "reproduce", tmp_path / "docs")


@pytest.fixture
def tiny_scale(monkeypatch):
    monkeypatch.setitem(SCALES, "tiny", TINY)
    monkeypatch.setitem(page.HEADINGS, "tiny", "Tiny scale")
    monkeypatch.setitem(page.WORDS, "tiny", "For a test.")
    monkeypatch.setattr(queries, "ENCODER", "mlp:width=8,depth=1")


@pytest.mark.parametrize("name", TABLES)
def test_a_tiny_version_of_each(name, places):
    scale = (
        replace(TINY, best=SMALL | {"bases": 3}, compared=SMALL | {"bases": 3}) if name in ("bases", "visualisations") else TINY
    )
    if name == "visualisations":
        scale = replace(scale, compared=SMALL)
    outcome = reproduce(TABLES[name], scale, CELLS[name], places=places, device="cpu")
    assert outcome.failed == []
    kept = read_json(places.results / "tiny.json")[name]
    assert list(kept) == outcome.made
    for cell in TABLES[name].cells:
        if cell.name in kept:
            row = kept[cell.name]
            assert [len(each["values"]) > 0 for each in row["accuracies"]] == [True] * len(cell.columns)
            assert row["command"] == f"recollect reproduce {name} --scale tiny --cells {cell.name}"
            assert row["hardware"]
            assert row["torch"]
            assert {each["on"] for each in row["accuracies"]} <= {cell.on}
            if cell.figure:
                assert row["measures"]
                assert (places.figures / f"tiny-{name}-{cell.name}.png").read_bytes()[:4] == b"\x89PNG"
    if TABLES[name].curve:
        assert (places.figures / f"tiny-{name}.png").is_file()
    text = outcome.page.read_text()
    assert text == page.page(TABLES[name], page.every(places.results), places.pages)
    assert "## Tiny scale" in text
    assert f"`recollect reproduce {name} --scale quick --cells CELL`" in text  # what was not run
    again = reproduce(TABLES[name], scale, CELLS[name], places=places, device="cpu")
    assert again.made == []


def test_what_is_finished_stays_and_the_rest_goes_on(places, monkeypatch):
    """A job that fails leaves the others' rows; the same call makes what is missing, and nothing else."""
    cells, evaluate, seen = ["mnist-1", "svhn-1", "cifar10-1"], work.evaluate, []

    def broken(*given, **options):
        seen.append(1)
        if len(seen) == 2:
            raise RecollectError("the network is broken: mend it")
        return evaluate(*given, **options)

    monkeypatch.setattr(work, "evaluate", broken)
    first = reproduce(TABLES["table1"], TINY, cells, places=places, device="cpu")
    assert [each.why for each in first.failed] == ["the network is broken: mend it"]
    assert list(read_json(places.results / "tiny.json")["table1"]) == ["mnist-1", "cifar10-1"]
    second = reproduce(TABLES["table1"], TINY, cells, places=places, device="cpu")
    assert second.made == ["svhn-1"]
    assert second.failed == []
    assert len(seen) == 4  # each memory was judged once by the test split, but for the broken one


def test_a_run_that_was_stopped_gives_the_same_row(places, tmp_path, monkeypatch):
    step, seen = work.distill, []

    def stopped(*given, **options):
        def progress(line):
            seen.append(line["step"])
            if len(seen) == 3:
                raise KeyboardInterrupt

        return step(*given, **{**options, "progress": progress})

    scale = replace(TINY, best=SMALL | {"outer_steps": 6, "checkpoint_seconds": 0.0})
    whole = Places(tmp_path / "whole", tmp_path / "whole" / "results" / "r", tmp_path / "whole" / "docs")
    reproduce(TABLES["table1"], scale, ["mnist-1"], places=whole, device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(work, "distill", stopped)
        with pytest.raises(KeyboardInterrupt):
            reproduce(TABLES["table1"], scale, ["mnist-1"], places=places, device="cpu")
    reproduce(TABLES["table1"], scale, ["mnist-1"], places=places, device="cpu")
    rows_of = [read_json(each.results / "tiny.json")["table1"]["mnist-1"] for each in (whole, places)]
    assert rows_of[0]["accuracies"] == rows_of[1]["accuracies"]


def test_cells_of_one_memory_are_one_distillation(places):
    """The similarity of classes is that of Table 1's memory."""
    reproduce(TABLES["table1"], TINY, ["cifar10-1"], places=places, device="cpu")
    before = (places.out / "tiny" / "table1" / "cifar10-1" / "memory.safetensors").stat().st_mtime_ns
    reproduce(TABLES["similarity"], TINY, ["cifar10-1"], places=places, device="cpu")
    assert (places.out / "tiny" / "table1" / "cifar10-1" / "memory.safetensors").stat().st_mtime_ns == before
    assert not (places.out / "tiny" / "similarity").exists()


@pytest.mark.parametrize("where", ["out", "results"])
def test_rows_of_another_config_are_refused(places, where):
    reproduce(TABLES["table1"], TINY, ["mnist-1"], places=places, device="cpu")
    other = "results" if where == "out" else "out"  # which is empty
    kept = replace(places, **{other: getattr(places, other).with_name("others")})
    for scale in (replace(TINY, networks=3), replace(TINY, best=SMALL | {"outer_steps": 3})):
        with pytest.raises(RecollectError, match=rf"was made with (count|legs) .*: delete it, or give another --{where}"):
            reproduce(TABLES["table1"], scale, ["mnist-1"], places=kept, device="cpu")
    assert not (kept.out / "tiny" / "rows").exists() or where == "out"


def test_damaged_rows_are_said(places):
    reproduce(TABLES["table1"], TINY, ["mnist-1"], places=places, device="cpu")
    path = rows.path(places.out, TINY, TABLES["table1"].cells[0])
    for damage in ("", "[]", "{}", json.dumps(read_json(path) | {"accuracies": 3})):
        path.write_text(damage)
        with pytest.raises(RecollectError, match=r"mnist-1\.json"):
            reproduce(TABLES["table1"], TINY, ["mnist-1"], places=places, device="cpu")
    path.unlink()
    (places.results / "tiny.json").write_text('{"table1": {"mnist-1": {"command": 3}}}')
    with pytest.raises(RecollectError, match=r"tiny\.json is damaged at table1 mnist-1"):
        reproduce(TABLES["table1"], TINY, ["mnist-1"], places=places, device="cpu")


def test_a_dataset_or_objective_that_is_not_there_leaves_the_others(places, monkeypatch):
    monkeypatch.delitem(work.MAKES, "best")
    monkeypatch.setattr("recollect.reproduce.run.OBJECTIVES", {"unrolled": None})
    monkeypatch.setenv("RECOLLECT_DATA", str(places.out))
    monkeypatch.setattr("recollect.data.DEBIAN", places.out)
    scale = replace(QUICK, name="tiny")
    outcome = reproduce(TABLES["similarity"], scale, places=places)
    assert [each.why.startswith("not run: dataset") for each in outcome.failed] == [True, True]
    with pytest.raises(RecollectError, match="dataset 'cifar10' is not there"):
        reproduce(TABLES["similarity"], scale, ["cifar10-1"], places=places)
    with pytest.raises(RecollectError, match="needs the objective gradients, which this version does not have"):
        reproduce(TABLES["ablation"], TINY, ["mnist-1-gradients"], places=places)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("reproduce table2", "unknown table 'table2': did you mean 'table1'"),
        ("reproduce table1 --cells cifar-1", "unknown cell of table1 'cifar-1': did you mean 'cifar10-1'"),
        ("reproduce table1 --workers 0", "workers is 0: give 1 to 10,000"),
        ("reproduce table1 --device tpu", "tpu"),
        ("reproduce table1 --cells mnist-1 --root nowhere", "dataset 'mnist' is not there"),
    ],
)
def test_what_cannot_be_is_one_line(command, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SCALES, "quick", replace(TINY, name="quick"))
    assert main(shlex.split("reproduce momentum --cells cifar10-1-none --device cpu")) == 0
    shown = capsys.readouterr()
    assert "momentum cifar10-1-none" in shown.err
    assert "40.5 ± 0.8" in shown.out
    assert "1 of 6 cells" in shown.out
    assert (tmp_path / "docs" / "results" / "momentum.md").is_file()
    assert main(["reproduce", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in TABLES)
    for name, table in TABLES.items():
        assert main(["reproduce", name, "--list"]) == 0
        shown = capsys.readouterr().out
        assert all(cell.name in shown for cell in table.cells)


# --- the scales, the paper, the pages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [QUICK, FULL], ids=lambda scale: scale.name)
@pytest.mark.parametrize("name", TABLES)
def test_every_cell_has_settings_that_can_be(name, scale):
    """As its dataset's shape and number of classes make it, without its files."""
    for cell in TABLES[name].cells:
        if cell.kind not in ("best", "compared") or cell.settings.get("objective", "unrolled") not in OBJECTIVES:
            continue
        classes, shape = earlier.SHAPES[cell.dataset]
        names = cell.classes or tuple(map(str, range(classes)))
        images = blank(cell.dataset, names, shape, cell.settings["images_per_class"])
        for leg in scale.legs(cell):
            config = resolve(work.within(changed(DistillConfig(), **leg), images), images)
            assert config.memory.bases == leg.get("bases", config.memory.bases)
            assert json.loads(json.dumps(leg)) == leg
        assert len(cell.columns) == len(cell.paper) == len(cell.networks)


def test_the_paper_s_bases_of_the_pictures_recall_a_hundred_images():
    """43 bases, 10 images per class: 99 by the paper, with the five classes that it shows."""
    budget = recollect.Budget(10, len(tables.SHOWN), (3, 32, 32), downsample=1)
    assert budget.matrices(43) == 100
    assert recollect.Budget(50, 5, (3, 32, 32), downsample=1).matrices(215) == 100
    assert recollect.Budget(10, 100, (3, 32, 32), downsample=1).matrices(43) == 683


def test_the_legs_are_those_of_the_memories_that_are_there():
    """What results/memories says of a cell's legs is what full scale would do again."""
    for path in sorted((ROOT / "results" / "memories").glob("*.json")):
        if path.stem in LEGS and path.stem != "cifar10-1":  # whose first legs were made before the script
            for leg, written in zip(LEGS[path.stem], read_json(path)["legs"], strict=False):
                differs = {name for name, value in leg.items() if written["config"][name] != value}
                assert differs <= {"init"}, path.stem  # a leg that goes on from a memory begins with its bases


def test_the_paper_s_tables_agree_with_each_other():
    assert paper.FULL["cifar10"][1] == paper.ACROSS["convnet"][1]["convnet"]
    assert paper.FULL["cifar10"][10] == paper.ACROSS["convnet"][10]["convnet"]
    assert all(paper.MOMENTUM["full"][budget] == paper.BPTT["cifar10"][budget] for budget in (1, 10))
    for dataset, row in paper.DOWNSAMPLED.items():
        for budget, (mean, _) in row.items():
            assert paper.BPTT[dataset][budget][0] <= mean <= paper.FULL[dataset][budget][0]


def test_the_pages_are_made_of_the_results():
    """None is typed: `python experiments/pages.py` makes these very bytes, and the table of the front page's figures."""
    script = experiment_module("pages")
    made = page.pages(script.RESULTS, script.PAGES)
    for name, text in made.items():
        assert (script.PAGES / name).read_text() == text, f"{name}: python experiments/pages.py"
    assert {path.name for path in script.PAGES.glob("*.md")} == {*made, script.FIGURES.name}
    figures = script.FIGURES.read_text()
    assert script.figures(figures) == figures
    for text in made.values():
        for figure in re.findall(r"\]\((figures/[^)]*)\)", text):
            assert (script.PAGES / figure).is_file()


def test_the_readme_has_the_rows_of_full_scale():
    readme = (ROOT / "README.md").read_text()
    made = page.every(ROOT / "results" / "reproduce")["full"]["table1"]
    for name in ("mnist", "fashion-mnist", "cifar10"):
        row, quoted = made[f"{name}-1"], paper.FULL[name][1][0]
        line = f"| {tables.DATASETS[name]} | 1 | {row['numbers']:,} | **{page.spread(row['accuracies'][0])}** | {quoted} |"
        assert line in readme


def test_quick_and_full_are_never_in_one_column():
    found = page.every(ROOT / "results" / "reproduce")
    one = next(iter(found["full"]["table1"].values()))
    mixed = {
        "full": {},
        "quick": {"table1": {"mnist-1": one | {"accuracies": [one["accuracies"][0] | {"mean": 12.3}]}}},
        "tiny": {},
    }
    text = page.page(TABLES["table1"], mixed, ROOT)
    full, quick = text.split("## Quick scale")
    assert "12.3" not in full
    assert "12.3" in quick.split("## ")[0]
    assert "12.3" not in page.summary(mixed)


def test_every_row_says_where_it_comes_from():
    for scale, found in page.every(ROOT / "results" / "reproduce").items():
        for table, made in found.items():
            for name, row in made.items():
                assert all(row[what] for what in ("command", "hardware", "objective")), (scale, table, name)
                assert all(each["n"] and each["values"] for each in row["accuracies"])
                if scale == "quick":
                    assert row["command"] == f"recollect reproduce {table} --scale quick --cells {name}"
