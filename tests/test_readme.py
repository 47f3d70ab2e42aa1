"""The README is true: its code runs, its commands run, its figures are those of the files they were taken from."""

import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import recollect
from recollect.files import read_json

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)
FIGURES = (ROOT / "docs" / "results" / "README-figures.md").read_text()
"""where each figure of the README has its command, n, hardware and time"""


def test_it_is_short():
    """One screen to read, eight lines of Python to write, and four for continuous targets."""
    for python, most in zip(PYTHON, (8, 4), strict=True):
        assert sum(bool(line.strip()) for line in python.splitlines()) <= most
    assert len(README.splitlines()) <= 90


def test_figures_are_those_of_the_files():
    """The README has each accuracy; the page of its figures has it with its command, n, hardware and time."""
    demo = read_json(RESULTS / "demo.json")
    row = next(line for line in README.splitlines() if line.startswith("| digits |"))
    for found in demo["rows"]:
        assert found["n"] == 20
        accuracy = f"{found['mean']:.1f} ± {found['deviation']:.1f}"
        assert f"{accuracy} |" in row.replace("**", "")
        assert f"{accuracy} |" in FIGURES
    bench = read_json(RESULTS / "bench.json")
    assert f"**{bench['unroll']['full graph / compiled']:.2f} times faster**" in FIGURES
    assert f"T = 100 over T = 10 | {bench['memory']['T = 100 / T = 10']:.2f} |" in FIGURES
    assert f"`recollect demo`, {bench['demo']['seconds']:.0f} s on" in FIGURES
    assert bench["environment"]["processor"] in FIGURES


def test_random_real_images_are_those_of_the_file():
    names = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
    for name, row in read_json(RESULTS / "random-real.json")["rows"].items():
        assert (row["n"], row["on"]) == (5, "test")
        accuracy = f"{row['mean']:.1f} ± {row['deviation']:.1f}"
        assert re.search(rf"^\| {names[name]} \|.*\| {re.escape(accuracy)}\* \|", README, re.M)
        assert f"{names[name]} {accuracy}" in " ".join(FIGURES.split())


FILES = sorted([*(ROOT / "src" / "recollect" / "zoo").glob("*.safetensors"), *(ROOT / "memories").glob("*.safetensors")])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_memories_are_what_the_readme_says(path):
    memory, written = recollect.Memory.load(path), read_json(RESULTS / "memories" / f"{path.stem}.json")
    test, (recorded,) = written["test"], memory.header.accuracy
    assert (test["n"], test["on"]) == (20, "test")
    assert recorded["mean"] == pytest.approx(test["mean"])
    accuracy = f"{test['mean']:.1f} ± {test['deviation']:.1f}"
    row = f"| `{path.stem}` | {memory.floats:,} | {accuracy} | "
    recipe, steps, minutes = (ROOT / "docs" / "recipe.md").read_text(), 0, 0.0
    for number, leg in enumerate(written["legs"], 1):
        for entry in leg["curve"]:
            assert entry["on"] == "validation"
            networks = "" if entry["n"] == 5 else f" (n = {entry['n']})"
            at = f"| {steps + entry['step']:,} | {minutes + entry['minutes']:.1f} |"
            found = f"{entry['mean']:.1f} ± {entry['deviation']:.1f}"
            assert f"| leg {number}, T = {leg['config']['inner_steps']} {at} {found}{networks} |" in recipe
        steps, minutes = steps + leg["config"]["outer_steps"], minutes + leg["minutes"]
    for other in (written[key] for key in ("test again", "validation") if key in written):
        assert other["n"] == 20
        assert f"{other['mean']:.1f} ± {other['deviation']:.1f}" in recipe
    if "test again" in written:
        assert abs(written["test again"]["mean"] - test["mean"]) < 2 * test["deviation"]
    paper = re.search(re.escape(row) + rf"([\d.]+) \| {minutes:.1f} \|", FIGURES)
    assert paper, row
    assert f"| {memory.header.budget['images_per_class']} | {memory.floats:,} | **{accuracy}** | {paper[1]} |" in README
    assert written["environment"]["cuda"].removeprefix("NVIDIA ") in FIGURES


def test_no_cell_that_was_run_is_left_out():
    """Those that are worse than the paper's are in the README too."""
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d,]+) \| ([\d.]+ ± [\d.]+) \| ([\d.]+) \|", FIGURES, re.M)
    assert len(rows) >= 7
    for _, floats, accuracy, paper in rows:
        assert f"| {floats} | **{accuracy}** | {paper} |" in README


def test_the_search_is_that_of_the_files():
    recipe = (ROOT / "docs" / "recipe.md").read_text()
    searches = read_json(RESULTS / "searches.json")
    rows = [row for path in RESULTS.glob("recipe-*.json") for row in read_json(path).values()]
    rows += searches["fashion-mnist, 200 outer steps"].values()
    rows += searches["minutes on a CPU, cifar10"].values()
    assert len(rows) == 9
    chosen = [row for path in RESULTS.glob("select-*.json") for row in read_json(path)["results"]]
    assert len(chosen) == 14
    rates = searches["cifar10 rates"]
    chosen += [row for row in rates["trained otherwise"] if row["memory"] == "after two legs"]
    wide = read_json(RESULTS / "memories" / "cifar10-1-32-bases.json")
    chosen += [row for leg in (*rates["legs"], *wide["legs"]) for row in leg["curve"]]
    assert f"On test {wide['test']['mean']:.1f} ± {wide['test']['deviation']:.1f}." in recipe
    trials = searches["cifar10 third leg"]["trials"]
    chosen += [trial["evaluation"] for trial in trials.values() if "evaluation" in trial]
    chosen += searches["bases"]["cifar10"]["rows"]
    for row in [*(row["evaluation"] for row in rows), *chosen]:
        assert row["on"] == "validation"
        assert f"{row['mean']:.1f} ± {row['deviation']:.1f}" in recipe
    seeds = read_json(RESULTS / "precision.json")["rows"]
    for compute in ("bf16", "fp32"):
        means = [row["evaluation"]["mean"] for name, row in seeds.items() if name.startswith(compute)]
        assert len(means) == 3
        assert f"{compute} {statistics.mean(means):.2f} ± {statistics.stdev(means):.2f}" in recipe


def test_the_continual_table_is_that_of_the_files():
    pages = [(ROOT / "docs" / name).read_text() for name in ("continual.md", "continual-settings.md")]
    table = "".join(pages).replace("**", "")
    files = sorted((RESULTS / "streams").glob("*.json"))
    rows = {(file.stem, learner): row for file in files for learner, row in read_json(file)["rows"].items()}
    whole = 8 + 3 + 1  # our learners, the library's, and what is not distilled
    assert len(rows) == 4 * whole + 2 + 2 * 2  # with 640 test steps too; of 60,000 images a task ours and GDumb
    for (_, learner), row in rows.items():
        assert (row["ra"]["n"], row["on"]) == (5, "test")
        before = " " if "640 test steps" in learner else "| "
        assert f"{before}{row['ra']['mean']:.1f} ± {row['ra']['deviation']:.1f} " in table
        means = [statistics.mean(matrix[-1]) for matrix in row["matrices"]]  # each run's last row is RA's
        assert row["ra"]["mean"] == pytest.approx(statistics.mean(means), abs=1e-3)
        assert row["ra"]["deviation"] == pytest.approx(statistics.stdev(means), abs=1e-3)
    for row in read_json(RESULTS / "continual-halved.json").values():
        means = [f"{found['mean']:.1f}" for found in row["validation"].values()]
        assert ", ".join(means[:2]) in table
    distilled, not_distilled = (
        [value for matrix in rows["cifar100", name]["matrices"] for value in matrix[-1]]
        for name in ("compress", "compress, not distilled")
    )
    assert len(distilled) == 100
    gains = [after - before for after, before in zip(distilled, not_distilled, strict=True)]
    error = statistics.stdev(gains) / len(gains) ** 0.5
    assert f"gain {statistics.mean(gains):.1f} ± {error:.1f} points by it" in " ".join(table.split())
    ours = {stream: row["ra"]["mean"] for (stream, learner), row in rows.items() if learner == "compress"}
    first, second, third = (ours[name] for name in ("rotations", "permutations", "many"))
    assert f"{first:.1f}, {second:.1f} and {third:.1f} % on Rotations, Permutations and MANY" in README
    assert f"| {first:.1f}, {second:.1f} and {third:.1f} % |" in FIGURES
    assert f"{ours['cifar100']:.1f} % on CIFAR-100" in " ".join(FIGURES.split())
    large = [ours[name] for name in ("rotations-60k", "permutations-60k")]
    assert f"{large[0]:.1f} and {large[1]:.1f} % with 60,000 images a task" in " ".join(FIGURES.split())
    trials = read_json(RESULTS / "continual-recipe.json")
    for row in (row for row in trials.values() if row.get("settings", {}).get("window_place") == "random"):
        means = ", ".join(f"{found['mean']:.1f}" for found in row["validation"].values())
        assert (means or "| ended: ") in table


def test_the_tables_of_queries_are_those_of_the_file():
    """docs/queries.md: of each dataset the chosen candidate on validation, and on test all rows, by 20 networks."""
    page = (ROOT / "docs" / "queries.md").read_text().replace("**", "")
    cells = read_json(RESULTS / "queries.json")["rows"]
    assert len(cells) == 4
    for name, cell in cells.items():
        tried, dataset = list(cell["tried"].values()), name.rpartition(" ")[0]
        assert all((row["n"], row["on"]) == (5, "validation") for row in tried)
        assert tried[cell["chosen"]]["mean"] == max(row["mean"] for row in tried)
        settings = tried[cell["chosen"]]["settings"]
        chosen = f"{settings['objective']}, {settings['inner_lr']:g}, {settings['bases'] or 'default'}"
        minutes = sum(row["minutes"] for row in [*tried, *cell["test"].values()])
        assert f"| {dataset} | {chosen} | {score(tried[cell['chosen']])} | {minutes:.0f} |" in page
        for what, row in cell["test"].items():
            assert (row["n"], row["on"]) == (1 if what.startswith("mean of") else 20, "test")
            error = f" {row['rmse']:.3g} ± {row['rmse_deviation']:.2g} |" if "rmse" in row else ""
            assert f"| {dataset} | {what} | {row['size']:,} | {score(row)} |{error}" in page


def score(row: dict) -> str:
    """R2, or accuracy in percent."""
    return f"{row['mean']:.3f} ± {row['deviation']:.3f}" if "rmse" in row else f"{row['mean']:.1f} ± {row['deviation']:.1f}"


def test_both_commands_are_shown():
    makefile = (ROOT / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"make {command}" in README
        assert re.search(rf"^{command}:", makefile, re.M)


def test_import_is_light_and_complete():
    """`import recollect` loads none of its heavy dependencies; every public name is there all the same."""
    code = "import sys, recollect; print(sorted({'torch', 'numpy', 'tyro', 'matplotlib', 'sklearn'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    for name in recollect.__all__:
        assert getattr(recollect, name) is not None
    assert callable(recollect.distill)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        recollect.nonsense  # noqa: B018


def test_imports_with_only_the_core_dependencies():
    """With everything that only an extra or development brings hidden, every module imports but for the extras' own."""
    code = """
import sys, importlib, pkgutil, warnings
warnings.simplefilter("ignore")
for name in ("datasets", "tensorboard", "pytest", "hypothesis", "pyarrow", "pandas", "huggingface_hub"):
    sys.modules[name] = None
import recollect
for module in pkgutil.walk_packages(recollect.__path__, "recollect."):
    if not module.name.endswith(("__main__", ".avalanche")):
        importlib.import_module(module.name)
print("ok")
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.strip() == "ok", found.stderr


def test_the_engine_is_as_fast_and_exact_as_its_page_says():
    pages = [(ROOT / "docs" / name).read_text() for name in ("engine.md", "exactness.md")]
    page = "".join(pages).replace("**", "")
    runs = read_json(RESULTS / "engine.json")["runs"]
    settings = {name: rows for run in runs for name, rows in run["engine"].items() if "images a step" in name}
    assert len(settings) == 3
    for way in {way for rows in settings.values() for way in rows if "estimated" not in way and " of the " not in way}:
        cells = []
        for rows in settings.values():
            found = rows.get(way, "not run")
            if isinstance(found, dict):
                found = f"{found['seconds']:.3f} s, {found['peak GiB']:.2f} GiB" if found["seconds"] else "does not fit"
            cells.append(found if isinstance(found, str) else f"{found:.1f}")
        assert f"| {way} | {' | '.join(cells)} |" in page
    first = settings["320 images a step"]
    for way, more in {
        "(a) published loop, fp32": "",
        "(c) general, compiled, TF32": "",
        "(d) ConvNet, bf16": f", **{first['(a) / (d)']:.1f} times faster**",
    }.items():
        assert f"| {first[way]['seconds']:.3f} s, {first[way]['peak GiB']:.2f} GiB{more} |" in FIGURES
    shares = [[rows[f"(d) of the {what}"] for what in ("matrix rate", "copy bandwidth")] for rows in settings.values()]
    assert f"| {' | '.join(f'{100 * matrix:.0f} %; {100 * copy:.0f} %' for matrix, copy in shares)} |" in page
    chip = runs[0]["engine"]
    assert f"{chip['matrix rate, TFLOP/s']:.0f} TFLOP/s and copied {chip['copy bandwidth, TB/s']:.2f} TB/s" in page
    for mode, seconds in runs[1]["engine"]["20 networks, 300 epochs on 1,150 images"].items():
        assert f"{seconds:.1f} s in {mode.replace('tf', 'TF')}" in page
    for what, row in read_json(RESULTS / "exactness.json")["exactness"].items():
        line = next(
            line
            for line in page.splitlines()
            if line.startswith(f"| {what.removeprefix('one pass of 320 images, ').rsplit(', ', 1)[0]} |")
        )
        assert f"| {row['relative error']:.1e}, {1 - row['1 - cosine']:.4f} |" in line


def test_a_cpu_is_as_fast_as_the_pages_say():
    page, found = (ROOT / "docs" / "engine.md").read_text(), read_json(RESULTS / "cpu.json")["cpu"]
    names = ("T = 20, 50 images a step, 32x32", "T = 60, window 40, 100 images a step, MNIST")
    ways = {"full graph": "plain full-graph autograd", "general": "general path", "fp32": "engine, fp32", "bf16": "engine, bf16"}
    for way, called in ways.items():
        seconds = [found.get(f"{name}: {way}, s an outer step") for name in names]
        assert f"| {called} | {' | '.join('not run' if each is None else f'{each:.2f} s' for each in seconds)} |" in page
    for mode in ("fp32", "bf16"):
        faster = [found[f"{name}: {plain} / {mode}"] for name, plain in zip(names, ("full graph", "general"), strict=True)]
        assert f"| {mode} faster than the first row that ran | {faster[0]:.2f} | {faster[1]:.2f} |" in page
        shares = [100 * found[f"{name}: {mode}, of the convolutions' rate"] for name in names]
        assert f"| {mode}, of the convolutions' rate | {shares[0]:.0f} % | {shares[1]:.0f} % |" in page
        mean, deviation = (
            found[f"digits, 3 seeds: validation accuracy in {mode}, %"],
            found[f"digits, 3 seeds: deviation in {mode}"],
        )
        assert f"{mean:.1f} ± {deviation:.1f} % in {mode}" in page
    page, found = (ROOT / "docs" / "scale.md").read_text(), read_json(RESULTS / "cpu.json")["scale"]
    assert f"**{found['speed-up']:.2f}** times\n(the lowest round {found['lowest speed-up']:.2f})" in page
