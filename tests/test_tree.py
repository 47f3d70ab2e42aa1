"""The shape of the tree: imports point one way, names with an underscore stay at home, files and functions stay small, and what
is tracked stays little."""

import ast
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import recollect

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "recollect"

# From top to bottom. A room may import those above it, itself, and those on its own line; a longer name goes before a shorter.
# What it is for comes after the colon.
ROOMS = """
__init__: the public names, each imported when it is first used
errors: what a user is told
limits: how much a file may become
files: writing atomically
seeds: one purpose for each use of a seed
devices: cpu or cuda
distributed: one run on many processes
config: every setting, with its help text
reading: how pictures of a folder become alike
data: images from anywhere, preprocessed and augmented
nets: networks and their first weights
queries: what a memory is asked with
tensorfile: one file of tensors and a header
header: what a memory's file says of itself
words, minilm: names as query vectors
hub: memories on the Hugging Face Hub
zoo: memories by name
budget: what a memory may take
memory: Memory: recall
starts: how bases and addressing begin
unroll: the inner loop and its adjoint
fast: the same at the speed of the chip
objectives: a recalled set's value and gradient
outer: one outer step
training: fresh networks on a recall
experts: networks trained once on real images
runs: a run's folder
jobs, cluster: independent jobs, run anywhere
decisions: every default decided for a dataset
minutes: what fits into them
own: what is given in Python, tried first
distiller: its outer step
distillation: Algorithm 1
coresets: real images chosen by their features
evaluation: accuracy of trained networks
ddranking: its form of a recall, and its scores
composition, classifier: classes of several memories, pictures without labels
selection: one setting, chosen on validation
continual: streams, learners, metrics
cost: what a run takes, before it is started
show: terminal, report, figures
export: a recall as files
publish: a memory on the Hugging Face Hub, with its card
reproduce: the paper's tables and figures
studio: the web page
demo, bench: the first example, benchmarks
commands: one file a command
cli, __main__: the command line
avalanche: the bridge to Avalanche
"""
KERNELS = ("fast/kernels.py", "fast/edge_kernels.py", "fast/patch_kernels.py")  # Triton's language: a kernel is one function
LINES, FUNCTION_LINES = 450, 60  # of functions without their docstrings
TRACKED, RESULTS, RESULTS_BYTES = 380, 40, 2 * 2**20

LEVELS = {name: level for level, line in enumerate(ROOMS.strip().splitlines()) for name in line.split(":")[0].split(", ")}
FILES = sorted(SOURCE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}


def dotted(path: Path) -> str:
    """data/images.py is data.images, data/__init__.py is data."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {dotted(path) for path in FILES}


def room(module: str) -> str | None:
    """The longest name in ROOMS that the module has or lies in."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in LEVELS), None)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports of a tree, those in functions too; not those for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not is_type_checking(child):
            yield from imports(child)


def homes() -> dict[str, str]:
    """The module of each public name, as __init__ tells type checkers."""
    (block,) = filter(is_type_checking, TREES[SOURCE / "__init__.py"].body)
    return {name.name: line.module.removeprefix("recollect.") for line in block.body for name in line.names}


HOMES = homes()


def imported(statement: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
    """(module of ours, name taken from it or "") of an import statement."""
    if isinstance(statement, ast.Import):
        names = [name.name for name in statement.names if name.name.split(".")[0] == "recollect"]
        return [(name.removeprefix("recollect").removeprefix(".") or "__init__", "") for name in names]
    assert statement.level == 0, "write imports in full"
    package, _, module = (statement.module or "").partition(".")
    if package != "recollect":
        return []
    found = []
    for name in statement.names:
        inside = f"{module}.{name.name}" if module else name.name
        if inside in MODULES:
            found.append((inside, ""))
        else:
            found.append((module or HOMES.get(name.name, "__init__"), name.name))
    return found


def said(wrong: list[str]) -> str:
    return "\n" + "\n".join(wrong)


def test_every_module_has_a_room_and_every_room_a_module():
    assert not (lost := [module for module in MODULES if room(module) is None]), f"give these a line in ROOMS: {lost}"
    assert not (empty := sorted(set(LEVELS) - {room(module) for module in MODULES})), f"no module is in {empty}"


def test_imports_point_up():
    wrong = []
    for path, tree in TREES.items():
        here = room(dotted(path))
        for statement in imports(tree):
            for module in dict.fromkeys(module for module, _ in imported(statement)):
                there = room(module)
                if here and there and LEVELS[there] > LEVELS[here]:
                    where = f"{path.relative_to(ROOT)}:{statement.lineno}"
                    wrong.append(f"{where}: {here} imports {there}, which is below it ({module})")
    assert not wrong, said(wrong)


def test_private_names_stay_at_home():
    """Neither imported by name, nor taken from an imported module."""
    wrong = []
    for path, tree in TREES.items():
        modules = set()
        for statement in imports(tree):
            where = f"{path.relative_to(ROOT)}:{statement.lineno}"
            for module, name in imported(statement):
                parts = [*module.split("."), name]
                wrong += [f"{where}: {module}.{name}" for part in parts if part.startswith("_") and part[:2] != "__"]
                if not name:
                    modules.add(module.split(".")[-1])
        wrong += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {node.value.id}.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
            if node.attr.startswith("_") and not node.attr.startswith("__")
        ]
    assert not wrong, said(wrong)


def docstring_lines(tree: ast.AST) -> int:
    """Of a tree and everything in it: what a reader is told does not count as code."""
    owners = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
    strings = [node.body[0] for node in owners if ast.get_docstring(node, clean=False) is not None]
    return sum(string.end_lineno - string.lineno + 1 for string in strings)


def test_files_and_functions_are_small():
    wrong = []
    for path, tree in TREES.items():
        where = path.relative_to(ROOT)
        if (lines := len(path.read_text().splitlines())) > LINES:
            wrong.append(f"{where}: {lines} lines, more than {LINES}")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not str(where).endswith(KERNELS):
                lines = node.end_lineno - node.lineno + 1 - docstring_lines(node)
                if lines > FUNCTION_LINES:
                    wrong.append(f"{where}:{node.lineno}: {node.name} has {lines} lines, more than {FUNCTION_LINES}")
    assert not wrong, said(wrong)


def test_no_module_is_called_like_a_public_name():
    """recollect.NAME would be the one or the other, by what was imported first."""
    assert not {module.split(".")[0] for module in MODULES} & set(recollect.__all__)


def test_little_is_tracked():
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    tracked = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    assert len(tracked) <= TRACKED
    results = [ROOT / name for name in tracked if name.startswith("results/")]
    assert len(results) <= RESULTS
    assert sum(path.stat().st_size for path in results if path.exists()) <= RESULTS_BYTES
    assert {Path(name).suffix for name in tracked if name.startswith("experiments/")} == {".py"}
