"""Figures: pictures laid out to the pixel, every figure drawn from a small memory, run or result and checked for what it
says, and clear words for what cannot be drawn."""

import io
import json
import re
import shutil
import warnings
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_memory
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from PIL import Image

from recollect import Evaluation, Memory, Preprocess, RecollectError
from recollect.cli import main
from recollect.commands import plot
from recollect.data.preprocess import Zca
from recollect.runs import Run
from recollect.selection import Selection
from recollect.show import figures, pictures, style, tables
from recollect.show.sources import Measured, read

CIFAR100 = tuple(sorted(tables.SUPERCLASS))


def drawn(figure: Figure) -> np.ndarray:
    """As PNG, and as an SVG that is whole; a white page with the words within it, apart, and something on it."""
    assert b"</svg>" in style.encoded(figure, "svg")
    picture = np.asarray(Image.open(io.BytesIO(style.encoded(figure))).convert("RGB"))
    for edge in (picture[0], picture[-1], picture[:, 0], picture[:, -1]):
        assert (edge == 255).all()
    assert picture.std() > 5
    assert figure.get_figwidth() <= style.PAGE
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            boxes = boxes_of(axis)
            assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    return picture


def boxes_of(axis) -> list[Bbox]:
    """Where the names along an axis are drawn."""
    low, high = sorted(axis.get_view_interval())
    renderer = FigureCanvasAgg(axis.figure).get_renderer()
    shown = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        return [label.get_window_extent(renderer) for label in shown if label.get_visible() and label.get_text()]


def labels(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_mosaic_is_exact():
    images = torch.tensor([[[[1, 2], [3, 4]]], [[[5, 6], [7, 8]]], [[[9, 10], [11, 12]]]], dtype=torch.uint8)
    assert figures.mosaic(images, 2).tolist() == [
        [1, 2, 255, 5, 6],
        [3, 4, 255, 7, 8],
        [255, 255, 255, 255, 255],
        [9, 10, 255, 255, 255],
        [11, 12, 255, 255, 255],
    ]
    colour = torch.arange(6, dtype=torch.uint8).view(2, 3, 1, 1)
    assert figures.mosaic(colour, 2, gap=0).tolist() == [[[0, 1, 2], [3, 4, 5]]]
    with pytest.raises(RecollectError, match="2 channels cannot be shown"):
        figures.mosaic(torch.zeros(1, 2, 4, 4, dtype=torch.uint8), 1)


def test_pixels_undo_the_preprocessing():
    memory = make_memory()  # mean 0.5, std 0.25
    seen = torch.tensor([-9.0, -2.0, 0.0, 1.0, 2.0, 9.0]).view(6, 1, 1, 1)
    assert pictures.to_pixels(memory.preprocess().undo(seen)).flatten().tolist() == [0, 0, 128, 191, 255, 255]


def test_stretched_from_black_to_white():
    images = torch.tensor([[-3.0, 1.0], [7.0, 7.0]]).view(2, 1, 1, 2)
    assert figures.stretched(images).flatten().tolist() == [0, 255, 0, 0]


def test_recalled_by_class_shows_the_first_images_of_each_class():
    memory = make_memory(matrices=9)
    shown, columns = figures.recalled_by_class(memory, [2, 0])
    assert columns == 8
    images, _ = memory.recall([2, 0])
    chosen = torch.cat([images[:8], images[9:17]])
    assert torch.equal(shown, figures.stretched(memory.preprocess().undo(chosen)))


def test_recalled_images_are_undone_from_whitening(tmp_path):
    """A real image, whitened, stored as a one-hot base and recalled, looks like itself again."""
    pixels = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels[:, :, 0, 0], pixels[:, :, 0, 1] = 0, 255  # so that stretching changes nothing
    size = 64
    noise = torch.randn(size, size, generator=torch.Generator().manual_seed(1)) * 0.05
    zca = Zca(torch.randn(size), torch.eye(size) + noise + noise.T)
    preprocess = Preprocess((0.4,), (0.3,), zca)
    header = replace(make_memory().header, addressing="one-hot", downsample=1, preprocessing=preprocess.to_json())
    memory = Memory(preprocess(pixels), torch.eye(3, dtype=torch.uint8)[None], header)
    memory.fitted = preprocess
    memory.save(tmp_path / "m.safetensors")
    shown, _ = figures.recalled_by_class(Memory.load(tmp_path / "m.safetensors"), [0, 1, 2])
    assert (shown.int() - pixels.int()).abs().max() <= 1


def test_bases_are_all_there_up_to_a_page():
    memory = make_memory(bases=4)
    figure = figures.bases(memory)
    (axes,) = figure.axes
    assert axes.get_title() == "toy: 4 bases of 4x4"
    shown = axes.get_images()[0].get_array()
    assert np.array_equal(shown, figures.mosaic(figures.stretched(memory.bases), 3))
    drawn(figure)
    (axes,) = figures.bases(make_memory(bases=300, channels=3)).axes
    assert axes.get_title() == "toy: the first 256 of 300 bases of 4x4"
    drawn(figures.bases(make_memory(bases=1)))


def test_recalled_names_its_classes():
    memory = make_memory()
    figure = figures.recalled(memory, ["frog", "cat"])
    (axes,) = figure.axes
    assert axes.get_title() == "recalled"
    assert labels(axes.yaxis) == ["frog", "cat"]
    shown, columns = figures.recalled_by_class(memory, [2, 0])
    assert np.array_equal(axes.get_images()[0].get_array(), figures.mosaic(shown, columns))
    drawn(figure)


def test_recalled_is_wide_where_there_are_many_classes_and_few_images():
    memory = make_memory(class_names=tuple("0123456789"), matrices=2)
    figure = figures.recalled(memory)
    (axes,) = figure.axes
    assert labels(axes.xaxis) == list("0123456789")
    assert axes.get_images()[0].get_array().shape == (2 * 9 - 1, 10 * 9 - 1)
    second = figures.stretched(memory.preprocess().undo(memory.recall(["1"])[0]))[0, 0]
    assert np.array_equal(axes.get_images()[0].get_array()[:8, 9:17], second)
    drawn(figure)
    many = figures.recalled(make_memory(class_names=CIFAR100))
    assert many.axes[0].get_title() == "recalled, 20 of 100 classes"
    drawn(many)


@pytest.mark.parametrize(
    "memory",
    [
        make_memory(),
        make_memory(channels=3),
        make_memory(class_names=("a name that is much too long to be shown whole", "$x$ {", "\\frac", "_a", "猫", "\ud800")),
        make_memory(class_names=CIFAR100, bases=64, matrices=40),
        make_memory(class_names=("only",), bases=1, matrices=1),
    ],
    ids=["grey", "colour", "odd names", "100 classes", "one of all"],
)
@pytest.mark.filterwarnings("ignore:no installed font")  # where there is none
def test_memory_figure(memory):
    figure = figures.memory_figure(memory)
    left, middle, right, _ = figure.axes
    shown = min(len(memory.class_names), 10)
    assert left.get_title() == "bases"
    assert middle.get_title() == ("recalled" if shown < 10 else "recalled, 10 of 100 classes")
    names = labels(middle.yaxis)
    assert len(names) == shown
    assert max(map(len, names)) <= figures.MOST_LETTERS
    similarity = right.get_images()[0].get_array()
    order, _ = tables.by_superclass(list(memory.class_names[:shown]))
    assert np.allclose(similarity, memory.similarity(order))
    drawn(figure)
    if "_a" in memory.class_names:
        drawn(figures.recalled(memory))
        drawn(figures.similarity(memory))


# --- heat maps --------------------------------------------------------------------------------------------------------


def test_superclasses_are_those_of_cifar100():
    assert len(CIFAR100) == 100
    assert len(tables.CIFAR100) == 20
    assert tables.SUPERCLASS["willow_tree"] == "trees"
    order, groups = tables.by_superclass(["rose", "Maple Tree", "bee", "oak_tree"])
    assert order == [0, 2, 1, 3]
    assert groups == [("flowers", 1), ("insects", 1), ("trees", 2)]
    assert tables.by_superclass(["rose", "my cat"]) == ([0, 1], [])


def test_similarity_is_ordered_by_superclass():
    memory = make_memory(class_names=CIFAR100)
    figure = figures.similarity(memory)
    axes, _ = figure.axes
    assert labels(axes.yaxis) == list(tables.CIFAR100)
    assert axes.get_yticks().tolist() == [5 * group + 2 for group in range(20)]
    order = [CIFAR100.index(name) for names in tables.CIFAR100.values() for name in names.split()]
    assert np.allclose(axes.get_images()[0].get_array(), memory.similarity(order))
    assert len(axes.lines) == 2 * 19  # between superclasses
    drawn(figure)


def test_similarity_of_a_few_classes_names_them():
    memory = make_memory(class_names=CIFAR100)
    figure = figures.similarity(memory, ["willow_tree", "rocket", "oak_tree"])
    axes, _ = figure.axes
    assert labels(axes.xaxis) == labels(axes.yaxis) == ["oak_tree", "willow_tree", "rocket"]
    assert np.allclose(axes.get_images()[0].get_array(), memory.similarity(["oak_tree", "willow_tree", "rocket"]))
    assert axes.get_images()[0].get_clim() == (-1, 1)
    drawn(figure)


def test_many_classes_without_superclasses_are_named_as_far_as_can_be_read():
    figure = figures.similarity(make_memory(class_names=tuple(f"class {i}" for i in range(200))))
    names = labels(figure.axes[0].yaxis)
    assert names[0] == "class 0"
    assert 20 < len(names) < 100
    drawn(figure)


def test_superclasses_that_are_too_narrow_for_their_names_give_way_to_classes():
    """All classes of nine superclasses, and one of each of the others."""
    groups = [names.split() for names in tables.CIFAR100.values()]
    some = [name for place, names in enumerate(groups) for name in (names if place < 9 else names[:1])]
    figure = figures.similarity(make_memory(class_names=tuple(some)))
    assert set(labels(figure.axes[0].yaxis)) < set(some)
    drawn(figure)


def test_one_hot_memories_have_no_similarity():
    header = replace(make_memory().header, addressing="one-hot")
    memory = Memory(torch.randn(3, 1, 4, 4), torch.eye(3, dtype=torch.uint8)[None], header)
    with pytest.raises(RecollectError, match="one-hot: its classes share no bases"):
        figures.similarity(memory)


def test_accuracy_matrix():
    figure = figures.accuracy_matrix([[90, None, None], [80, 85.5, None], [70, 80, 95]], title="rotations")
    axes, _ = figure.axes
    table = axes.get_images()[0].get_array()
    assert table.mask.sum() == 3 if np.ma.is_masked(table) else np.isnan(table).sum() == 3
    assert axes.get_xlabel() == "accuracy on task"
    assert axes.get_ylabel() == "after task"
    assert labels(axes.xaxis) == ["1", "2", "3"]
    ra, la, bti = (70 + 80 + 95) / 3, (90 + 85.5 + 95) / 3, (-20 - 5.5 + 0) / 3
    assert axes.get_title() == f"rotations\nRA {ra:.1f}, LA {la:.1f}, BTI {bti:.1f}".replace("-", "−")
    assert [text.get_text() for text in axes.texts] == ["90", "80", "86", "70", "80", "95"]
    drawn(figure)


def test_accuracy_matrix_of_many_tasks_and_of_a_stream_under_way():
    wide = [[50.0 if task <= row else None for task in range(100)] for row in range(100)]
    axes = figures.accuracy_matrix(wide).axes[0]
    assert labels(axes.xaxis) == ["1", *(str(n) for n in range(10, 101, 10))]
    assert not axes.texts
    begun = figures.accuracy_matrix([[50.0, None], [None, None]], title="begun")
    assert begun.axes[0].get_title() == "begun"
    drawn(begun)


def point(mean=50.0, name="memory", dataset="cifar10", on="test", **config) -> Measured:
    config = {"network": "convnet", "images_per_class": 1, "bases": 4, "inner_steps": 10, "bridge": "full"} | config
    return Measured(name, dataset, config, "convnet", on, mean, 1.0, 20, Path("results.json"))


def test_architectures():
    points = [point(60.0), replace(point(40.0), network="mlp"), point(70.0, images_per_class=10)]
    points.append(replace(point(45.0, network="mlp"), network="mlp"))
    figure = figures.architectures(points)
    first, second = figure.axes
    assert [axes.get_title() for axes in (first, second)] == ["cifar10, 1 image per class", "cifar10, 10 images per class"]
    assert labels(first.xaxis) == labels(first.yaxis) == ["convnet", "mlp"]
    table = np.ma.filled(first.get_images()[0].get_array(), np.nan)
    assert np.array_equal(table, [[60, 40], [np.nan, 45]], equal_nan=True)
    assert {text.get_text() for text in first.texts} == {"60.0\n±1.0", "40.0\n±1.0", "45.0\n±1.0"}
    assert figure.get_suptitle() == "test accuracy, %"
    drawn(figure)


# --- charts -----------------------------------------------------------------------------------------------------------


def selection(field, values) -> Selection:
    scores = [Evaluation(f"{v}", "mlp", (50.0 + i, 52.0 + i), "validation", "", 0.0) for i, v in enumerate(values)]
    return Selection(field, values, scores)


def test_selection_figure_shows_every_value():
    figure = figures.selection_figure(selection("outer_lr", [0.1, 0.01, None]))
    (axes,) = figure.axes
    assert axes.get_xlabel() == "outer lr"
    assert labels(axes.xaxis) == ["0.1", "0.01", "None"]
    assert axes.get_lines()[0].get_ydata().tolist() == [51.0, 52.0, 53.0]
    assert "2 networks" in axes.get_ylabel()
    drawn(figure)


def lines_of(axes) -> dict[str, tuple[list[float], list[float]]]:
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
        if not str(line.get_label()).startswith("_")
    }


def test_number_of_bases():
    points = [point(60.0, bases=8), point(50.0, bases=4), point(70.0, bases=8, images_per_class=10), point(62.0, bases=8)]
    figure = figures.number_of_bases(points)
    (axes,) = figure.axes
    assert lines_of(axes) == {"cifar10, 1 image per class": ([4, 8], [50.0, 61.0]), "cifar10, 10 images per class": ([8], [70.0])}
    assert legend(figure) == ["cifar10, 1 image per class", "cifar10, 10 images per class"]
    assert labels(axes.xaxis) == ["4", "8"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("number of bases", "test accuracy, %")
    drawn(figure)


def test_inner_steps_with_and_without_momentum():
    steps = (1, 10, 100)
    points = [point(40.0 + t / 10, inner_steps=t) for t in steps]
    points += [point(35.0 + t / 10, inner_steps=t, bridge="none") for t in steps[:2]]
    points += [point(45.0, inner_steps=100, inner_momentum=0), point(44.0, bridge="forward-only")]
    figure = figures.inner_steps(points)
    (axes,) = figure.axes
    assert lines_of(axes) == {
        "full momentum": ([1, 10, 100], [40.1, 41.0, 50.0]),
        "no momentum": ([1, 10, 100], [35.1, 36.0, 45.0]),
        "forward-only momentum": ([10], [44.0]),
    }
    assert axes.get_xscale() == "log"
    assert labels(axes.xaxis) == ["1", "10", "100"]
    drawn(figure)
    both = figures.inner_steps([point(), point(dataset="svhn", on="validation")])
    assert legend(both) == [
        "full momentum, cifar10, 1 image per class, test",
        "full momentum, svhn, 1 image per class, validation",
    ]
    assert both.axes[0].get_ylabel() == "accuracy, %"
    drawn(both)


def test_budget_beside_the_papers():
    points = [point(60.0), point(70.0, images_per_class=10), point(50.0, addressing="one-hot"), point(90.0, name="all the data")]
    points += [point(20.0, name="random real images"), point(30.0, dataset="my own"), point(61.0, precision="float16")]
    figure = figures.budget(points)
    first, second = figure.axes
    assert (first.get_title(), second.get_title()) == ("cifar10", "my own")
    assert lines_of(first) == {
        "memory": ([1, 10], [60.0, 70.0]),
        "per-class images": ([1], [50.0]),
        "random real images": ([1], [20.0]),
        "memory (float16)": ([1], [61.0]),
        "all the data": ([0, 1], [90.0, 90.0]),
    }
    papers = {box.get_label(): box.lines[0].get_ydata().tolist() for box in first.containers if "2022" in box.get_label()}
    assert papers == {
        "memory (Deng & Russakovsky, 2022)": [66.4, 71.2, 73.6],
        "per-class images (Deng & Russakovsky, 2022)": [49.1, 62.4, 70.5],
    }
    assert labels(first.xaxis) == ["1", "10", "50"]
    assert lines_of(second) == {"memory": ([1], [30.0])}
    assert legend(figure)[0] == "memory"
    drawn(figure)
    drawn(figures.budget([point(dataset=name) for name in tables.PAPER_MEMORY]))


def test_the_papers_numbers_are_those_of_its_table():
    tex = Path(__file__).parents[2] / "shared" / "paper" / "remember-the-past.tex"
    if not tex.exists():
        pytest.skip("the paper is not here")
    for table in (tables.PAPER_MEMORY, tables.PAPER_PER_CLASS):
        for rows in table.values():
            for mean, deviation in rows.values():
                assert re.search(rf"{mean}\$?\{{?\$?\{{?\\pm\}}?\$?{deviation}", tex.read_text()), (mean, deviation)


def metrics(steps: int, **more) -> list[dict]:
    return [{"step": n, "loss": 1 / n, "norm": 10.0**-n if n < 3 else 0.0, **more} for n in range(1, steps + 1)]


def test_curves():
    lines = metrics(4)
    lines[1]["loss"] = None  # a step that was skipped
    figure = figures.curves({"run": lines})
    loss, norm = figure.axes
    assert lines_of(loss) == {"run": ([1.0, 3.0, 4.0], [1.0, 1 / 3, 1 / 4])}
    assert lines_of(norm) == {"run": ([1.0, 2.0], [0.1, 0.01])}
    assert norm.get_yscale() == "log"
    assert (loss.get_ylabel(), norm.get_ylabel(), loss.get_xlabel()) == ("outer loss", "norm of the outer gradient", "outer step")
    assert not figure.legends
    drawn(figure)


def test_curves_of_several_runs_with_validation():
    runs = {"one": [*metrics(5), {"step": 5, "validation": 40.0}], "_two": metrics(5)}
    figure = figures.curves(runs)
    assert [axes.get_ylabel() for axes in figure.axes][2] == "validation accuracy, %"
    assert lines_of(figure.axes[2]) == {"one": ([5.0], [40.0])}
    assert legend(figure) == ["one", "two"]
    drawn(figure)


def test_long_curves_are_means_with_their_range():
    figure = figures.curves({"run": [{"step": n, "loss": float(n % 2), "norm": 1.0} for n in range(1, 50_001)]})
    (xs, ys) = lines_of(figure.axes[0])["run"]
    assert len(xs) <= 150
    assert np.allclose(ys, 0.5, atol=0.01)
    (band,) = figure.axes[0].collections
    assert {0.0, 1.0} <= set(band.get_paths()[0].vertices[:, 1])
    assert len(style.encoded(figure, "svg")) < 100_000


def test_curves_without_a_number_are_refused():
    with pytest.raises(RecollectError, match="run has no finite number"):
        figures.curves({"run": [{"step": 1, "loss": None}]})


# --- one style, and the same bytes ------------------------------------------------------------------------------------


def test_save_as_png_and_svg(tmp_path):
    figure = figures.accuracy_matrix([[50.0]], title="a title")
    figures.save(figure, tmp_path / "new" / "figure.png")
    figures.save(figure, tmp_path / "new" / "figure.SVG")
    with Image.open(tmp_path / "new" / "figure.png") as picture:
        assert picture.size == tuple(int(inches * 200) for inches in figure.get_size_inches())
    assert b"<!-- a title -->" in (tmp_path / "new" / "figure.SVG").read_bytes()
    (tmp_path / "file").write_text("")
    with pytest.raises(RecollectError, match="cannot write"):
        figures.save(figure, tmp_path / "file" / "figure.png")
    with pytest.raises(RecollectError, match=r"'figure.jpg': give a name that ends in .png or .svg"):
        figures.save(figure, tmp_path / "figure.jpg")


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_same_figure_is_the_same_bytes(kind):
    once, again = (style.encoded(figures.memory_figure(make_memory()), kind) for _ in range(2))
    assert once == again


def test_no_words_are_too_small_to_print():
    drawn = [
        figures.similarity(make_memory(class_names=CIFAR100)),
        figures.curves({"a": metrics(3), "b": metrics(3)}),
        figures.budget([point()]),
        figures.accuracy_matrix([[1.0] * 10] * 10),
    ]
    for figure in drawn:
        style.encoded(figure)  # ticks are made while drawing
        for text in figure.findobj(match=lambda artist: hasattr(artist, "get_fontsize")):
            assert text.get_fontsize() >= 6.5
        assert figure.get_figwidth() <= style.PAGE


def test_on_dark_turns_the_ink_light():
    light = style.encoded(figures.curves({"run": metrics(3)}), "svg", transparent=True)
    dark = style.on_dark(light)
    assert style.INK.encode() in light
    assert style.INK.encode() not in dark
    assert style.DARK[style.BLUE].encode() in dark


# --- from paths, and on the command line ------------------------------------------------------------------------------


def evaluation(mean=50.0, network="mlp", name="memory", on="test") -> dict:
    return Evaluation(name, network, (mean, mean + 2), on, "protocol", 1.0).to_json()


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run that was evaluated."""
    folder = Run.create(tmp_path / "run", "distill", {"data": {"name": "toy"}, "distill": {"outer_steps": 3}}).folder
    for line in metrics(3):
        Run(folder).log(line)
    made = {"config": {"network": "mlp", "images_per_class": 1, "inner_steps": 7, "bridge": "full"}, "steps": 3}
    memory = make_memory()
    Memory(memory.bases, memory.addressing, replace(memory.header, made=made)).save(folder / "memory.safetensors")
    rows = [evaluation(50.0), evaluation(40.0, "convnet"), evaluation(30.0, name="random real images")]
    (folder / "evaluation.json").write_text(json.dumps({"memory": "memory.safetensors", "rows": rows}))
    return folder


def selection_json(path: Path, field: str, values: list, results: int | None = None) -> Path:
    rows = [evaluation(50.0 + n, name=f"{field} {v}", on="validation") for n, v in enumerate(values)][:results]
    config = {"images_per_class": 1, "bases": None, "inner_steps": 5, "bridge": "full", "network": "mlp"}
    found = {"data": {"name": "/a/b/toy.npz"}, "distill": config, "field": field, "values": values, "results": rows}
    path.write_text(json.dumps(found))
    return path


EVERY = ("memory", "bases", "recalled", "similarity", "curves", "number-of-bases", "inner-steps", "budget", "architectures")


@pytest.mark.parametrize("place", range(len(EVERY)), ids=EVERY)
def test_every_figure_of_a_run(place, run, tmp_path, capsys):
    kind, begins = (("png", b"\x89PNG\r"), ("svg", b"<?xml"))[place % 2]
    out = tmp_path / f"figure.{kind}"
    assert main(["plot", EVERY[place], str(run), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_bytes().startswith(begins)


def test_what_a_run_tells(run):
    assert figures.possible(read(run)) == list(EVERY)
    assert lines_of(figures.draw("inner-steps", [run]).axes[0]) == {"full momentum": ([7], [51.0])}
    assert lines_of(figures.draw("number-of-bases", [run]).axes[0]) == {"toy, 1 image per class": ([4], [51.0])}
    assert set(lines_of(figures.draw("budget", [run]).axes[0])) == {"memory", "random real images"}
    across = figures.draw("architectures", [run]).axes[0]
    assert labels(across.xaxis) == ["mlp", "convnet"]
    assert labels(figures.draw("similarity", [run], ["frog", "cat"]).axes[0].yaxis) == ["frog", "cat"]
    copy = shutil.copytree(run, run.parent / "other" / "run")
    assert legend(figures.draw("curves", [run, copy])) == [f"{run.parent.name}/run", "other/run"]


def test_a_memory_file_gives_its_recorded_accuracy(run, tmp_path):
    path = tmp_path / "alone.safetensors"
    Memory.load(run / "memory.safetensors").with_accuracy(evaluation(77.0) | {"n": 2}).save(path)
    assert lines_of(figures.draw("budget", [path]).axes[0]) == {"memory": ([1], [78.0])}
    assert lines_of(figures.draw("budget", [run / "evaluation.json"]).axes[0])["memory"] == ([1], [51.0])


def test_memories_kept_on_the_way_give_the_curve_of_validation(run):
    memory = Memory.load(run / "memory.safetensors")
    for step, mean in ((2, 30.0), (1, 20.0)):
        header = replace(memory.header, made=memory.header.made | {"steps": step}, accuracy=[evaluation(mean, on="validation")])
        Memory(memory.bases, memory.addressing, header).save(Run(run).kept(step))
    figure = figures.draw("curves", [run])
    assert lines_of(figure.axes[2])["run"] == ([1.0, 2.0], [21.0, 31.0])


def test_selections(tmp_path):
    path = selection_json(tmp_path / "select.json", "bases", [4, 8, 16], results=2)
    for given in (path, tmp_path):
        assert lines_of(figures.draw("number-of-bases", [given]).axes[0]) == {"toy, 1 image per class": ([4, 8], [51.0, 52.0])}
        assert labels(figures.draw("selection", [given]).axes[0].xaxis) == ["4", "8"]
    path = selection_json(tmp_path / "select.json", "bridge", ["full", "none"])
    assert set(lines_of(figures.draw("inner-steps", [path]).axes[0])) == {"full momentum", "no momentum"}


def test_results_of_experiments(tmp_path):
    results = {
        f"{steps} steps": {"dataset": "svhn", "config": {"inner_steps": steps, "bridge": "full"}, "evaluation": evaluation(60.0)}
        for steps in (1, 10)
    }
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results))
    assert lines_of(figures.draw("inner-steps", [path]).axes[0]) == {"full momentum": ([1, 10], [61.0, 61.0])}


@pytest.mark.parametrize("name", ["select-digits-bases", "recipe-fashion-mnist"])
def test_the_projects_own_results_can_be_drawn(name):
    path = Path(__file__).parents[1] / "results" / f"{name}.json"
    drawn(figures.draw("number-of-bases" if "select" in name else "inner-steps", [path]))


def test_continual_matrices(tmp_path, capsys):
    """As recollect's own learners write them, row by row longer; from the file or its folder."""
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"matrix": [[90.0], [80.0, 85.0], [70, 80, 95]]}))
    (tmp_path / "other.json").write_text("[]")
    seed = tmp_path / "run" / "seed-0"
    seed.mkdir(parents=True)
    shutil.copy(path, seed / "compress.json")
    (seed / "a-rival.json").write_text('{"matrix": [[1]]}')
    for given in (path, tmp_path, tmp_path / "run"):
        axes = figures.draw("continual", [given]).axes[0]
        name, numbers = axes.get_title().split("\n")
        assert name == ("run: compress, seed-0" if given.name == "run" else "result")
        assert numbers == "RA 81.7, LA 90.0, BTI −8.3"
    assert main(["plot", "continual", str(path), "--out", str(tmp_path / "matrix.svg")]) == 0


WRONG = """
    plot nonsense run --out x.png                   | unknown figure 'nonsense'
    plot base run --out x.png                       | did you mean 'bases'?
    plot bases run --out x.gif                      | ends in .png or .svg
    plot bases run --out x                          | ends in .png or .svg
    plot bases --out x.png                          | nothing to draw 'bases' from
    plot bases nowhere --out x.png                  | nowhere does not exist
    plot bases nowhere.json --out x.png             | nowhere.json does not exist
    plot bases notes.txt --out x.png                | notes.txt is damaged or not a memory
    plot bases broken.json --out x.png              | broken.json is not a readable JSON file
    plot budget other.json --out x.png              | other.json is no evaluation, selection, result or accuracy matrix
    plot bases empty --out x.png                    | empty holds neither a run, nor a selection
    plot bases run run --out x.png                  | of one memory, run or file, and 2 were given
    plot bases run --classes cat --out x.png        | --classes is for recalled and similarity
    plot recalled run --classes cow --out x.png     | unknown class 'cow'
    plot curves run/memory.safetensors --out x.png  | 'curves', for which the folder of a run that has begun
    plot continual run --out x.png                  | (recollect continual): it can give memory, bases
    plot selection run --out x.png                  | run cannot give the figure 'selection'
    plot bases matrix.json --out x.png              | for which a memory is needed: it can give continual
    plot budget bare.safetensors --out x.png        | 'budget', for which no accuracy was measured yet
    plot continual flat.json --out x.png            | 'matrix' is no accuracy matrix
    plot continual high.json --out x.png            | 'matrix' is no accuracy matrix
    plot number-of-bases lr.json --out x.png        | lr.json does not tell its bases
    plot selection unbegun.json --out x.png         | unbegun.json has no result yet
    plot budget rows.json --out x.png               | its memory is not beside it
    plot budget damaged --out x.png                 | has an accuracy without mean, deviation or n
    plot curves begun --out x.png                   | is needed: it holds nothing to draw yet
    plot budget across --out x.png                  | has no accuracy of the network it was distilled with
    plot bases run --out run                        | ends in .png or .svg
"""


@pytest.mark.parametrize("line", [line.strip() for line in WRONG.strip().splitlines()])
def test_what_cannot_be_drawn_is_said(line, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("not a memory")
    Path("broken.json").write_text("{")
    Path("other.json").write_text("{}")
    Path("empty").mkdir()
    Path("matrix.json").write_text('{"matrix": [[50]]}')
    Path("flat.json").write_text('{"matrix": [50]}')
    Path("high.json").write_text('{"matrix": [[101.0]]}')
    Path("rows.json").write_text('{"rows": []}')
    make_memory().save("bare.safetensors")
    selection_json(Path("lr.json"), "outer_lr", [0.1, 0.2])
    selection_json(Path("unbegun.json"), "bases", [1, 2], results=0)
    for name in ("damaged", "across"):
        shutil.copytree(run, name)
    Path("damaged/evaluation.json").write_text('{"rows": [{"name": "memory", "mean": "high"}]}')
    Path("across/evaluation.json").write_text(json.dumps({"rows": [evaluation(50.0, "alexnet")]}))
    Run.create("begun", "distill", {"data": {}, "distill": {}})
    command, said = (part.strip() for part in line.split("|"))
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not Path("x.png").exists()


def test_the_help_names_every_figure():
    help_text = Path(plot.__file__).read_text().split("class Plot:")[1].split("paths:")[0]
    assert set(figures.FIGURES) <= set(re.findall(r"[\w-]+", help_text))


def test_names_in_any_script_find_a_font_or_it_is_said_once():
    def drawn(name: str) -> Figure:
        figure = Figure((3, 2))
        axes = figure.subplots()
        axes.set_xticks([0, 1], [name, "frog"])
        return figure

    figure = drawn("\N{LATIN SMALL LETTER D WITH PALATAL HOOK} cat")  # a letter of STIX alone, which comes with matplotlib
    style.encoded(figure)
    assert "STIXGeneral" in figure.axes[0].get_xticklabels()[0].get_fontfamily()
    assert "STIXGeneral" not in figure.axes[0].get_xticklabels()[1].get_fontfamily()
    nowhere = "\N{LINEAR B SYLLABLE B008 A}"
    with pytest.warns(UserWarning, match=f"no installed font has {nowhere}"):
        style.encoded(drawn(nowhere))
    style.encoded(drawn(nowhere))  # once is enough
