"""Figures: pictures laid out to the pixel, and drawn for memories of every kind."""

import io

import numpy as np
import pytest
import torch
from conftest import make_memory
from PIL import Image

from recollect import Evaluation, RecollectError, plots
from recollect.select import Selection


def test_mosaic_is_exact():
    images = torch.tensor([[[[1, 2], [3, 4]]], [[[5, 6], [7, 8]]], [[[9, 10], [11, 12]]]], dtype=torch.uint8)
    assert plots.mosaic(images, 2).tolist() == [
        [1, 2, 255, 5, 6],
        [3, 4, 255, 7, 8],
        [255, 255, 255, 255, 255],
        [9, 10, 255, 255, 255],
        [11, 12, 255, 255, 255],
    ]
    colour = torch.arange(6, dtype=torch.uint8).view(2, 3, 1, 1)
    assert plots.mosaic(colour, 2, gap=0).tolist() == [[[0, 1, 2], [3, 4, 5]]]
    with pytest.raises(RecollectError, match="2 channels cannot be shown"):
        plots.mosaic(torch.zeros(1, 2, 4, 4, dtype=torch.uint8), 1)


def test_pixels_undo_the_preprocessing():
    memory = make_memory()  # mean 0.5, std 0.25
    seen = torch.tensor([-9.0, -2.0, 0.0, 1.0, 2.0, 9.0]).view(6, 1, 1, 1)
    assert plots.pixels(memory, seen).flatten().tolist() == [0, 0, 128, 191, 255, 255]


def test_stretched_from_black_to_white():
    images = torch.tensor([[-3.0, 1.0], [7.0, 7.0]]).view(2, 1, 1, 2)
    assert plots.stretched(images).flatten().tolist() == [0, 255, 0, 0]


def test_recalled_by_class_shows_the_first_images_of_each_class():
    memory = make_memory(matrices=9)
    shown, columns = plots.recalled_by_class(memory, [2, 0])
    assert columns == 4
    images, _ = memory.recall([2, 0])
    chosen = torch.cat([images[:4], images[9:13]])
    assert torch.equal(shown, plots.stretched(memory.preprocess().undo(chosen)))


def drawn(figure) -> np.ndarray:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=40)
    return np.asarray(Image.open(buffer).convert("RGB"))


@pytest.mark.parametrize(
    "memory",
    [
        make_memory(),
        make_memory(channels=3),
        make_memory(class_names=("a name that is much too long to be shown whole", "$x$ {", "\\frac")),
        make_memory(class_names=tuple(f"class {i}" for i in range(100))),
        make_memory(class_names=("only",), bases=1, matrices=1),
    ],
    ids=["grey", "colour", "odd names", "100 classes", "one of all"],
)
def test_memory_figure(memory):
    figure = plots.memory_figure(memory)
    left, middle, right, _ = figure.axes
    shown = min(len(memory.class_names), plots.MOST_CLASSES)
    assert left.get_title() == "bases"
    assert middle.get_title() == ("recalled" if shown < 20 else "recalled, 20 of 100 classes")
    names = [label.get_text() for label in middle.get_yticklabels()]
    assert len(names) == shown
    assert max(map(len, names)) <= plots.MOST_LETTERS
    similarity = right.get_images()[0].get_array()
    assert np.allclose(similarity, memory.similarity()[:shown, :shown])
    picture = drawn(figure)
    assert (picture[0] == 255).all()  # a white page, the words within it
    assert (picture[:, 0] == 255).all()
    assert (picture[-1] == 255).all()
    assert picture.std() > 10


def selection(field, values) -> Selection:
    scores = [Evaluation(f"{v}", "mlp", (50.0 + i, 52.0 + i), "validation", "", 0.0) for i, v in enumerate(values)]
    return Selection(field, values, scores)


def test_selection_figure_shows_every_value():
    figure = plots.selection_figure(selection("outer_lr", [0.1, 0.01, None]))
    (axes,) = figure.axes
    assert axes.get_xlabel() == "outer lr"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.1", "0.01", "None"]
    assert axes.get_lines()[0].get_ydata().tolist() == [51.0, 52.0, 53.0]
    assert "2 networks" in axes.get_ylabel()
    assert drawn(figure).std() > 1


def test_save_as_png_and_svg(tmp_path):
    figure = plots.memory_figure(make_memory(), title="a title")
    plots.save(figure, tmp_path / "new" / "figure.png")
    plots.save(figure, tmp_path / "new" / "figure.svg")
    with Image.open(tmp_path / "new" / "figure.png") as picture:
        assert picture.size == tuple(int(inches * 150) for inches in figure.get_size_inches())
    assert b"<svg" in (tmp_path / "new" / "figure.svg").read_bytes()
    (tmp_path / "file").write_text("")
    with pytest.raises(RecollectError, match="cannot write"):
        plots.save(figure, tmp_path / "file" / "figure.png")
