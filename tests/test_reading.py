"""Messy folders of pictures: what `data check` lists, what each option does of it, and that memories and classifiers make new
pictures as theirs were made."""

import json
import os
import re
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from test_hostile import png

from recollect import Classifier, Memory, Preprocess, RecollectError, data, distill, preset
from recollect.classifier import read_picture
from recollect.cli import main, parse
from recollect.commands.evaluate import Evaluate
from recollect.commands.performing import spelt
from recollect.data.check import ALIKE, check, leaders
from recollect.data.fitting import fitted, full_size, open_picture
from recollect.header import can_prepare
from recollect.reading import Reading
from recollect.runs import Run

RNG = np.random.default_rng(0)
TINY = ["--network", "mlp:width=8", "--outer-steps", "2", "--inner-steps", "2", "--window", "2", "--device", "cpu", "--quiet"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "pets"


def noise(height: int = 6, width: int = 6, channels: int = 3) -> np.ndarray:
    return RNG.integers(0, 256, (height, width, channels), dtype=np.uint8).squeeze()


def save(path: Path, pixels: np.ndarray | Image.Image, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(path, **options)
    return path


def pets(folder: Path, classes: str = "ab", n: int = 5, **sizes) -> Path:
    for name in classes:
        for number in range(n):
            save(folder / name / f"{number}.png", noise(**sizes))
    return folder


def icon(shade: int, side: int = 8) -> Image.Image:
    """A square of one shade in a transparent picture, whose hidden pixels are of that shade too."""
    pixels = np.full((side, side, 4), shade, np.uint8)
    pixels[..., 3] = 0
    pixels[2:6, 2:6, 3] = 255
    return Image.fromarray(pixels)


def in_order(pixels: torch.Tensor) -> torch.Tensor:
    return torch.stack(sorted(pixels, key=lambda each: each.numpy().tobytes()))


def whole(images: data.Images) -> torch.Tensor:
    return in_order((images.train + images.validation + images.test).images)


def load(*args, **options) -> tuple[data.Images, list[str]]:
    """A dataset, and the notices that came with it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        images = data.load(*args, **options)
    return images, [str(each.message) for each in caught]


def refused(match: str, *args, **options) -> None:
    with pytest.raises(RecollectError, match=match) as caught:
        data.load(*args, **options)
    assert "\n" not in str(caught.value)


# --- one picture ----------------------------------------------------------------------------------------------------------


def test_fits_of_a_wide_picture():
    """Four columns of one colour each, twice as wide as high: crop keeps the two in the middle, pad all of them."""
    columns = np.repeat(np.array([10, 60, 110, 160], np.uint8), 4)[None].repeat(8, 0)
    wide = Image.fromarray(columns)
    of = {fit: fitted("x", wide, (4, 4), Reading(fit=fit)) for fit in ("stretch", "crop", "pad")}
    assert np.abs(of["stretch"].pixels[0] - [10, 60, 110, 160]).max() < 20
    assert np.abs(of["crop"].pixels[0, :, [0, 3]] - np.array([[60], [110]])).max() < 10
    assert of["stretch"].alpha is None
    assert of["pad"].alpha.tolist() == [[0] * 4, [255] * 4, [255] * 4, [0] * 4]
    assert of["pad"].on("white")[0, 0].tolist() == [255] * 4
    assert (of["pad"].on("black")[0, 1:3] == of["pad"].pixels[0, 1:3]).all()
    thin = fitted("x", Image.fromarray(noise(1, 900, 1)[None]), (4, 4), Reading(fit="pad"))
    assert (thin.alpha > 0).any(1).sum() == 1  # a line stays a line


@pytest.mark.parametrize("fit", ["stretch", "crop", "pad"])
def test_a_square_of_the_right_size_stays_as_it_is(fit):
    pixels = noise(6, 6)
    found = fitted("x", Image.fromarray(pixels), (6, 6), Reading(fit=fit))
    assert np.array_equal(found.on("white"), pixels.transpose(2, 0, 1))


def test_colour():
    pixels, grey = noise(), noise(channels=1)
    made = fitted("x", Image.fromarray(pixels), None, Reading(colour="grey")).pixels
    assert np.array_equal(made, np.asarray(Image.fromarray(pixels).convert("L"))[None])
    assert np.array_equal(fitted("x", Image.fromarray(grey), None, Reading(colour="rgb")).pixels, np.stack([grey] * 3))


def test_transparency_is_mixed_with_the_background():
    pixels = noise(channels=4)
    on = fitted("x", Image.fromarray(pixels), None, Reading()).on("#ff8000")
    share = pixels[..., 3:] / 255
    assert np.abs(on.transpose(1, 2, 0) - (share * pixels[..., :3] + (1 - share) * [255, 128, 0])).max() <= 0.51
    grey = fitted("x", icon(0), None, Reading(colour="grey")).on("#ff8000")
    assert grey[0, 0, 0] == round(0.299 * 255 + 0.587 * 128)
    opaque = Image.fromarray(np.concatenate([pixels[..., :3], np.full((6, 6, 1), 255, np.uint8)], 2))
    assert fitted("x", opaque, None, Reading()).alpha is None


def test_phones_turn_pictures(folder):
    pixels, exif = noise(4, 6), Image.Exif()
    exif[0x112] = 6  # to be turned by 90 degrees
    turned = open_picture(save(folder / "x.png", pixels, exif=exif))
    assert np.array_equal(turned, np.rot90(pixels, -1))
    for orientation in range(10):
        exif[0x112] = orientation
        path = save(folder / "x.png", pixels, exif=exif)
        assert np.array_equal(open_picture(path), ImageOps.exif_transpose(Image.open(path)))
        assert full_size(open_picture(path)) == open_picture(path).size
    for raw in (b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + bytes(9), b"Exif\0\0nonsense"):  # a whole picture all the same
        assert np.array_equal(open_picture(save(folder / "y.png", pixels, exif=raw)), pixels)


def test_a_large_jpeg_is_decoded_small(folder):
    """Which changes it by less than can be seen, and what is said of its size not at all."""
    exif = Image.Exif()
    exif[0x112] = 6
    path = save(folder / "x.jpg", Image.fromarray(noise(12, 16)).resize((640, 480)), quality=90, exif=exif)
    small, whole = open_picture(path, 16), open_picture(path)
    assert (small.size, whole.size) == ((60, 80), (480, 640))
    assert full_size(small) == full_size(whole) == (480, 640)
    pixels = [fitted("x", each, (16, 16), Reading(fit="crop")).pixels.astype(int) for each in (small, whole)]
    assert np.abs(pixels[0] - pixels[1]).max() <= 3


# --- a folder -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shades", "name", "ground"), [((0, 20), "white", 255), ((255, 240), "black", 0), ((0, 255), "grey", 128)]
)
def test_icons_do_not_vanish(folder, shades, name, ground):
    """24 black icons on transparent ground were black on black once."""
    for label, shade in zip("ab", shades, strict=True):
        for number in range(12):
            save(folder / label / f"{number}.png", icon(shade))
    images, notices = load(folder)
    assert notices == [f"24 of 24 pictures are transparent in parts: put on {name}, on which they stand out (--background)"]
    assert (images.train.images[..., 0, 0] == ground).all()
    assert sorted(images.train.images[..., 3, 3].flatten().unique().tolist()) == sorted(shades)
    assert images.pictures.stated() == {"fit": "stretch", "background": f"#{ground:02x}" + f"{ground:02x}" * 2}
    images, notices = load(folder, background="#0000ff", colour="rgb")
    assert images.train.images[0, :, 0, 0].tolist() == [0, 0, 255]
    assert notices == ["24 of 24 pictures are transparent in parts: put on #0000ff"]


def test_the_background_is_chosen_on_training_pictures(folder):
    for part, shade, n in (("train", 255, 4), ("test", 0, 9)):
        for label in "ab":
            for number in range(n):
                save(folder / part / label / f"{number}.png", icon(shade))
    images, (notice,) = load(folder)
    assert "put on black" in notice
    assert (images.test.images == 0).all()


def test_padding_alone_is_black(folder):
    images, notices = load(pets(folder, height=4, width=8), size=8, fit="pad")
    assert (images.train.images[:, :, [0, 1, 6, 7]] == 0).all()
    assert notices == []


def test_what_is_bad_is_left_out_and_said(folder):
    expected = whole(data.load(pets(folder)))
    (folder / "a/broken.png").write_bytes((folder / "a/0.png").read_bytes()[:60])
    (folder / "b/Thumbs.db").write_bytes(b"\0")
    (folder / "list.txt").write_text("a")
    refused("list.txt: a file beside the class folders has no class: .*--skip-bad", folder)
    images, (notice,) = load(folder, skip_bad=True)
    assert torch.equal(whole(images), expected)
    assert re.match(r"3 files left out that cannot be read: .*list.txt, .*broken.png, .*Thumbs.db \(recollect data", notice)
    for number in range(5):
        (folder / f"a/{number}.png").write_text("x")
    with pytest.warns(UserWarning, match="left out"), pytest.raises(RecollectError, match="class 'a' has no training images"):
        data.load(folder, skip_bad=True)
    for number in range(5):
        (folder / f"b/{number}.png").write_text("x")
    refused("none of 12 files is a picture that can be read", folder, skip_bad=True)


def test_labels_from_a_table(folder):
    expected = whole(data.load(pets(folder)))
    flat = folder.parent / "flat"
    names = {}
    for number, path in enumerate(sorted(folder.rglob("*.png"))):
        place = flat / ("deep/er" if number % 2 else "") / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(path.read_bytes())
        names[place.relative_to(flat).as_posix()] = path.parent.name
    table = folder.parent / "labels.csv"
    for head, mark, encoding in (("file,label", ",", "utf-8"), ("more;Label;File", ";", "utf-8-sig")):
        rows = (f"{name}{mark}{label}" if mark == "," else f"x;{label};{name}" for name, label in names.items())
        table.write_text("\n".join([head, *rows, "", ""]), encoding=encoding)
        images = data.load(flat, labels=table)
        assert images.class_names == ("a", "b")
        assert torch.equal(whole(images), expected)
    refused("a file beside the class folders", flat)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"no columns file and label \(it has nothing\)"),
        ("id,breed\n1,a", r"no columns file and label \(it has id, breed\)"),
        ("file,label\n0.png,", "row 2 lacks a file or a label"),
        ("file,label\n/etc/hostname,a", "row 2 names /etc/hostname, outside of"),
        ("file,label\n../x.png,a", r"row 2 names \.\./x.png, outside of"),
        ("file,label\na/0.png,a\na/0.png,b", "a/0.png has two labels, a and b"),
        ("file,label\n", "names no file"),
        ("file,label\na/9.png,a\na/1.png,b", "a/9.png: cannot be read"),
        ('file,label\n"' + "x" * 200_000, "not a readable .csv file"),
    ],
)
def test_tables_that_cannot_be(folder, text, message):
    (folder.parent / "t.csv").write_text(text)
    refused(message, pets(folder), labels=folder.parent / "t.csv")


@pytest.mark.parametrize(
    ("pattern", "places"),
    [
        ("{label}/**/*.png", ["a/0.png", "a/x/1.png", "a/x/y/2.PNG", "b/0.png", "b/x/1.png", "b/2.png"]),
        ("i/{label}_*.jp*g", ["i/a_b_0.jpg", "i/a_b_1.jpeg", "i/a_b_2.jpg", "i/c_0.jpg", "i/c_1.jpg", "i/c_2.jpg"]),
        ("**/{label}/?.png", ["x/y/a/0.png", "a/1.png", "z/a/2.png", "b/0.png", "q/b/1.png", "b/2.png"]),
    ],
)  # fmt: skip
def test_labels_from_a_pattern(folder, pattern, places):
    for place in places:
        save(folder / place, noise())
    save(folder / "else/where/long-name.bmp", noise())
    images = data.load(folder, pattern=pattern)
    assert images.class_names == (("a_b", "c") if "_" in pattern else ("a", "b"))
    assert [len(images.train) + len(images.validation) + len(images.test)] == [6]


def test_splits_from_a_pattern(folder):
    for label in "ab":
        for number in range(6):
            save(folder / label / ("train" if number < 4 else "val") / "x" / f"{number}.png", noise())
    images = data.load(folder, pattern="{label}/{split}/**/*.png")
    assert (len(images.train) + len(images.validation), len(images.test)) == (8, 4)
    save(folder / "c/val/9.png", noise())
    refused("class 'c' is not among the training classes", folder, pattern="{label}/{split}/**/*.png")
    save(folder / "a/else/9.png", noise())
    refused("the splits are else, train, val: name them train and test", folder, pattern="{label}/{split}/**/*.png")


@pytest.mark.parametrize("pattern", ["*.png", "{label}/{label}/*", "{class}/*", "{label}/*.gif", "/{label}/*"])
def test_patterns_that_cannot_be(folder, pattern):
    refused(f"pattern '{re.escape(pattern)}'", pets(folder), pattern=pattern)


def test_a_link_to_a_folder_above_is_followed_once(folder):
    pets(folder)
    (folder / "a/loop").symlink_to("..")
    assert len(data.load(folder, pattern="{label}/*.png").train) > 0
    assert len(whole(data.load(folder, pattern="{label}/**/*"))) <= 20


def test_options_that_cannot_be(folder, toy_npz):
    pets(folder)
    refused("unknown option of pictures 'color': did you mean 'colour'", folder, color="rgb")
    refused("unknown colour 'blue': known: rgb, grey", folder, colour="blue")
    refused("unknown fit 'squeeze'", folder, fit="squeeze")
    refused("background 'nothing' is no colour", folder, background="nothing")
    refused("give --labels or --pattern", folder, labels=Path("x.csv"), pattern="{label}/*")
    refused("fit crop needs a size", folder, fit="crop")
    refused("toy is no folder of pictures: leave out colour, skip_bad", toy_npz, colour="rgb", skip_bad=True)


# --- check ----------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*left out that cannot be read:UserWarning")
def test_everything_is_listed_at_once(folder, capsys):
    pets(folder, n=24, height=20, width=20)
    (folder / "a/broken.png").write_bytes((folder / "a/0.png").read_bytes()[:60])
    (folder / "list.txt").write_text("a")
    save(folder / "a/deep/er.png", noise(20, 20))
    save(folder / "b/wide.png", noise(20, 40))
    save(folder / "b/grey.png", noise(20, 20, 1))
    save(folder / "b/clear.png", icon(0, 20))
    save(folder / "b/sixteen.png", np.arange(400, dtype=np.uint16).reshape(20, 20) * 100)
    save(folder / "c/one.png", Image.open(folder / "a/1.png").resize((30, 30)), quality=90)
    for number in range(20):
        save(folder / f"a/copy{number}.png", Image.open(folder / "a/3.png"))
    assert main(["data", "check", str(folder), "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)
    by = {each["kind"]: each for each in found["findings"]}
    files = {kind: each["files"] for kind, each in by.items()}
    assert found["pictures"] == 24 * 2 + 6 + 20
    assert (found["classes"], found["sizes"]) == ({"a": 45, "b": 28, "c": 1}, {"20x20": 72, "40x20": 1, "30x30": 1})
    assert files["stray"] == ["list.txt"]
    assert files["nested"] == ["a/deep"]
    assert [each.partition(":")[0] for each in files["unreadable"]] == ["a/broken.png"]
    assert files["sizes"] == ["b/wide.png", "c/one.png"]
    assert files["proportions"] == ["b/wide.png"]
    assert files["colour"] == ["b/grey.png", "b/sixteen.png"]
    assert files["depth"] == ["b/sixteen.png"]
    assert files["transparency"] == ["b/clear.png"]
    assert files["classes"] == ["c (1)"]
    assert files["split"] == ["c"]
    assert files["labels"] == ["a/1.png = c/one.png"]
    assert all(re.fullmatch(r"a/3.png \(\w+\) = a/copy\d+.png \(\w+\)", pair) for pair in files["duplicates"])
    assert len(files["duplicates"]) > 1
    stops = {kind for kind, each in by.items() if each["stops"]}
    assert stops == {"stray", "nested", "unreadable", "sizes", "colour"}
    assert not found["readable"]
    assert main(["data", "check", str(folder)]) == 1
    told = capsys.readouterr().out
    assert "    b/wide.png\n" in told
    (flags,) = re.findall(r"Options to try: (.*)", told)
    assert flags == "--skip-bad --pattern '{label}/**/*' --size 32 --colour rgb" == found["flags"]
    settled = ["--skip-bad", "--pattern", "{label}/**/*", "--size", "32", "--colour", "rgb"]
    assert main(["data", "check", str(folder), *settled]) == 0
    told = capsys.readouterr().out
    assert told.endswith("It can be read with these options.\n")
    assert "- unreadable files: 1\n" in told
    with pytest.warns(UserWarning, match="^1 file left out that cannot be read: .*broken.png .*; 1 of 75 pictures are transp"):
        assert main(["data", "show", str(folder), *settled]) == 0


def test_a_folder_in_order_says_little(folder, capsys):
    assert main(["data", "check", str(pets(folder, n=20))]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "It can be read with these options."
    assert check(folder).findings == ()
    assert main(["data", "check", "nowhere"]) == 2


MESSES = ["stray", "nested", "broken", "size", "grey", "clear", "class", "single", "empty", "bomb", "pipe", "test", "named"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_what_check_calls_readable_is_read(tmp_path_factory, data_):
    """And nothing else is, whatever is wrong with the folder and whichever options are given."""
    folder = tmp_path_factory.mktemp("any") / "pets"
    for part in data_.draw(st.sampled_from([[""], ["train", "test"], ["train", "val", "test"]])):
        pets(folder / part, n=data_.draw(st.integers(1, 4)))
    base = folder / "train" if (folder / "train").exists() else folder
    mess = data_.draw(st.sets(st.sampled_from(MESSES), max_size=3))
    for name in sorted(mess):
        match name:
            case "stray":
                (base / "list.txt").write_text("x")
            case "nested":
                save(base / "a/deep/0.png", noise())
            case "broken":
                (base / "a/x.png").write_bytes(png(8, 8)[:40])
            case "size":
                save(base / "a/large.png", noise(9, 12))
            case "grey":
                save(base / "b/grey.png", noise(channels=1))
            case "clear":
                save(base / "b/clear.gif", icon(200, 6))
            case "class":
                save(folder / "test/z/0.png", noise())
            case "single":
                save(base / "c/0.png", noise())
            case "empty":
                (base / "d").mkdir()
            case "bomb":
                (base / "b/bomb.png").write_bytes(png(13_000, 13_000))
            case "pipe" if hasattr(os, "mkfifo"):
                os.mkfifo(base / "a/pipe")
            case "test":
                (folder / "val/a").mkdir(parents=True, exist_ok=True)
            case "named":
                save(folder / "train.png", noise())
    options = {"skip_bad": data_.draw(st.booleans()), "colour": data_.draw(st.sampled_from([None, "rgb", "grey"]))}
    options["pattern"] = data_.draw(st.sampled_from([None, None, "{label}/**/*.png", "{split}/{label}/*"]))
    size = data_.draw(st.sampled_from([None, 5]))
    with warnings.catch_warnings(action="ignore"):
        try:
            readable = check(folder, size, **options).is_readable
        except RecollectError:
            readable = False
        try:
            data.load(folder, size=size, **options)
            read, why = True, ""
        except RecollectError as error:
            read, why = False, str(error)
    assert read == readable, why


def test_leaders_are_their_definition(monkeypatch):
    """The first that correlates, over pixels and channels, block by block or at once."""
    thumbs = RNG.integers(0, 256, (40, 3, 4, 4)).astype(np.uint8)
    for number in range(0, 20, 3):  # darker, and slightly other, copies
        thumbs[39 - number] = thumbs[number] * 0.8 + RNG.integers(0, 4, (3, 4, 4))
    thumbs[5] = thumbs[25] = 100
    rows = thumbs.reshape(40, -1)
    correlation = np.corrcoef(rows + 1e-9 * RNG.normal(size=rows.shape))
    expected = [min([n] + [m for m in range(n) if correlation[n, m] >= ALIKE]) for n in range(40)]
    assert leaders(thumbs) == expected
    assert sum(first != n for n, first in enumerate(expected)) == 7
    monkeypatch.setattr("recollect.data.check.BLOCK", 7)
    assert leaders(thumbs) == expected


def test_near_duplicates_survive_a_format_and_a_size(folder):
    pets(folder, "a", 6, height=40, width=40)
    smooth = Image.fromarray(noise(5, 5)).resize((60, 60), Image.Resampling.BICUBIC)
    save(folder / "b/one.png", smooth)
    save(folder / "b/two.jpg", smooth.resize((33, 33)), quality=60)
    save(folder / "b/three.webp", smooth.point(lambda value: value * 0.9))
    save(folder / "a/mirrored.png", smooth.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    found = [each for each in check(folder, 32).findings if each.kind in ("duplicates", "labels")]
    assert {name for each in found for name in re.findall(r"\w/\w+\.\w+", " ".join(each.files))} <= {
        "b/one.png", "b/two.jpg", "b/three.webp"
    }  # fmt: skip
    assert [each.kind for each in found] == ["duplicates"]


# --- runs, memories and classifiers ---------------------------------------------------------------------------------------


@pytest.fixture
def wide(folder) -> Path:
    """Wide pictures of two classes, some transparent, one broken, all one folder too deep."""
    for label, bright in (("dark", 40), ("light", 200)):
        for number in range(12):
            pixels = noise(12, 20, 4) // 4 + bright
            pixels[..., 3] = 255 if number % 2 else 140
            save(folder / label / "deep" / f"{number}.png", pixels)
    (folder / "dark/deep/broken.png").write_bytes(b"\x89PNG")
    return folder


READ = ["--size", "8", "--pattern", "{label}/**/*.png", "--skip-bad"]


@pytest.mark.parametrize("fit", ["crop", "pad"])
def test_new_pictures_are_made_as_those_of_the_memory(wide, fit, capsys):
    with pytest.warns(UserWarning, match="transparent"):
        images = data.load(wide, size=8, fit=fit, pattern="{label}/**/*.png", skip_bad=True)
    config = preset("fast", network="mlp:width=8", inner_steps=2, window=2, outer_steps=1)
    memory = distill(images, config)
    assert memory.header.preprocessing["pictures"] == images.pictures.stated()
    memory.save(wide.parent / "m.safetensors")
    stated = Memory.load(wide.parent / "m.safetensors").preprocess().pictures
    assert stated == {"fit": fit, "background": images.pictures.background}
    pixels = [read_picture(path, images.shape, stated)[0] for path in sorted(wide.rglob("[0-9]*.png"))]
    assert torch.equal(in_order(torch.stack(pixels)), whole(images))
    _, notice = read_picture(wide / "dark/deep/0.png", images.shape, stated)
    assert images.pictures.background == "#ffffff"
    assert notice == f"transparent in parts, put on white; 20x12, {fit}{'p' * (fit == 'crop') or 'd'}ed to 8x8"
    assert f'"fit": "{fit}"' in json.dumps(memory.header.preprocessing)


@pytest.mark.filterwarnings("ignore:.*left out that cannot be read:UserWarning")
def test_a_run_keeps_how_its_pictures_are_read(wide, capsys):
    assert (
        main(["distill", str(wide), *READ, "--fit", "pad", "--background", "red", "--colour", "grey", *TINY, "--out", "run"]) == 0
    )
    kept = Run("run").settings["data"]
    assert {name: kept[name] for name in ("fit", "background", "colour", "pattern", "skip_bad", "size")} == {
        "fit": "pad", "background": "red", "colour": "grey", "pattern": "{label}/**/*.png", "skip_bad": True, "size": 8,
    }  # fmt: skip
    before = Path("run/memory.safetensors").read_bytes()
    assert main(["resume", "run", "--quiet"]) == 0
    assert Path("run/memory.safetensors").read_bytes() == before
    assert Memory.load("run/memory.safetensors").header.preprocessing["pictures"] == {"fit": "pad", "background": "#ff0000"}
    quick = ["--networks", "1", "--epochs", "1", "--no-baselines"]
    assert main(["evaluate", "run", *quick]) == 0
    capsys.readouterr()
    elsewhere = [*quick, "--data", str(wide), "--pattern", "{label}/**/*.png", "--skip-bad"]  # the rest is the memory's
    Path("run/memory.safetensors").rename("alone.safetensors")
    for name in ("alone.safetensors",):
        assert main(["evaluate", name, *elsewhere, "--json", f"{name}.json"]) == 0
    (ours,) = Path("run/evaluations").glob("*.json")
    (first,), (second,) = (json.loads(path.read_text())["rows"] for path in (ours, Path("alone.safetensors.json")))
    assert first["values"] == second["values"]
    test = ["--test", str(wide), "--pattern", "{label}/**/*.png", "--skip-bad", "--epochs", "1", "--save", "c.safetensors"]
    assert main(["compose", "alone.safetensors", *test]) == 0
    classifier = Classifier.load("c.safetensors")
    assert classifier.preprocess.pictures == {"fit": "pad", "background": "#ff0000"}
    capsys.readouterr()
    assert main(["classify", "c.safetensors", str(wide / "dark/deep/0.png")]) == 0
    said = "transparent in parts, put on #ff0000; in colour, made grey; 20x12, padded to 8x8"
    assert said in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*left out that cannot be read:UserWarning")
def test_labels_of_a_run_are_found_from_anywhere(wide, monkeypatch):
    rows = [f"{path.relative_to(wide)},{path.parent.parent.name}" for path in sorted(wide.rglob("*.png"))]
    Path("labels.csv").write_text("\n".join(["file,label", *rows]))
    assert main(["distill", "pets", "--size", "8", "--labels", "labels.csv", "--skip-bad", *TINY, "--out", "run"]) == 0
    assert Run("run").settings["data"]["labels"] == str(Path("labels.csv").resolve())
    (run := Path("run").resolve()).is_dir()
    Path("below").mkdir()
    monkeypatch.chdir("below")
    assert main(["evaluate", str(run), "--networks", "1", "--epochs", "1", "--no-baselines"]) == 0


def test_memories_of_pictures_fitted_otherwise_compose():
    plain = Preprocess((0.5,), (0.25,))
    assert replace(plain, pictures={"fit": "crop"}).to_json() == plain.to_json() | {"pictures": {"fit": "crop"}}
    assert "pictures" not in plain.to_json()
    for value in ({"fit": "crop"}, {"fit": "pad", "background": "#00ff00"}, None):
        assert can_prepare(plain.to_json() | {"pictures": value})
        assert Preprocess.from_json(plain.to_json() | {"pictures": value}, Path()).pictures == value
    for value in ({"fit": "x"}, {"fit": "pad", "background": "red; rm"}, {"fit": ["pad"]}, {"background": "#00ff00"}, "pad", 3):
        assert not can_prepare(plain.to_json() | {"pictures": value})
        with pytest.raises(RecollectError, match="is damaged"):
            Preprocess.from_json(plain.to_json() | {"pictures": value}, Path())


def test_a_reading_is_the_same_after_json():
    for how in (Reading(), Reading(colour="grey", fit="pad", background="red", pattern="{label}/*", skip_bad=True)):
        kept = json.loads(json.dumps(how.given()))
        assert Reading(**kept) == how
        assert len(kept) == sum(value != asdict(Reading())[name] for name, value in asdict(how).items())


def test_a_job_s_command_has_the_options_too(tmp_path):
    """As other schedulers get it."""
    how = Reading(colour="grey", pattern="{label}/**/*", skip_bad=True)
    words = spelt("evaluate", Evaluate(memory=tmp_path, size=8, reading=how, networks=3))
    assert parse([*words[1:]]) == Evaluate(memory=tmp_path, size=8, reading=how, networks=3)
