"""The studio in a real browser: Debian's chromium, which `make test` installs where it may."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_memory
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright
from test_studio import DIGITS, alone, asked_with_pictures, whitened  # noqa: F401 - alone is for all tests here

import recollect
from recollect import load
from recollect.memory import recall
from recollect.show.pictures import to_pixels
from recollect.studio import app as studio
from recollect.studio import shelf

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here, and make test had no right to install it: apt-get install chromium"
)
MNIST = Path(recollect.__file__).parent / "zoo" / "mnist-1.safetensors"
SEVEN = [(0.2, 0.15), (0.8, 0.15), (0.45, 0.9)]
ZERO = [(0.5 + 0.27 * np.sin(a), 0.5 - 0.4 * np.cos(a)) for a in np.linspace(0, 2 * np.pi, 17)]


@contextmanager
def serving(stocked: shelf.Shelf) -> Iterator[str]:
    """The studio in a thread; its address."""
    listening = studio.listen("127.0.0.1", 0)
    server = studio.server(studio.create_app(stocked))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(timeout=300)
        listening.close()


@pytest.fixture(scope="module")
def stocked(tmp_path_factory) -> shelf.Shelf:
    folder = tmp_path_factory.mktemp("shelf")
    make_memory().save(folder / "small.safetensors")
    make_memory(3).save(folder / "colour.safetensors")
    whitened(folder)
    files = [folder / f"{name}.safetensors" for name in ("small", "colour", "whitened")]
    return shelf.stock([DIGITS, *files], [load("digits")])


@pytest.fixture(scope="module")
def address(stocked) -> Iterator[str]:
    with serving(stocked) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] * (os.getuid() == 0))
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens pages, each a client of its own; an error on one's console fails the test."""
    contexts, said = [], []

    def opened(address: str, quiet: bool = True, **options) -> Page:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(120_000)
        if quiet:
            page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: _only_ours(request.url, address, said))
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []


def _only_ours(url: str, address: str, said: list[str]) -> None:
    if not url.startswith((address, "data:", "blob:")):
        said.append(f"a request to {url}")


def pick(page: Page, *names: str) -> None:
    for name in names:
        page.get_by_role("group", name="digits").get_by_role("checkbox", name=name, exact=True).check()


def train(page: Page, *names: str, epochs: int | None = None) -> None:
    pick(page, *names)
    if epochs:
        page.get_by_label("Epochs").fill(str(epochs))
    page.get_by_role("button", name="Train").click()


def draw(page: Page, points: list[tuple[float, float]]) -> None:
    page.locator("#paper").scroll_into_view_if_needed()
    box = page.locator("#paper").bounding_box()
    assert box
    for place, (x, y) in enumerate(points):
        page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=3 if place else 1)
        if place == 0:
            page.mouse.down()
    page.mouse.up()


def painted(page: Page) -> np.ndarray:
    """The picture on the page, [C, H, W]."""
    code = """() => { const c = document.getElementById("picture");
        return [c.height, c.width, ...c.getContext("2d").getImageData(0, 0, c.width, c.height).data]; }"""
    height, width, *data = page.evaluate(code)
    return np.array(data).reshape(height, width, 4)[..., :3].transpose(2, 0, 1)


@pytest.mark.parametrize("number", range(4), ids=["digits", "upsampled", "colour", "whitened"])
def test_sliders_recall_as_the_library_does(open_page, address, stocked, number):
    """With the keyboard alone; after each move the picture is the recall of the coefficients on the page."""
    page, memory = open_page(address), stocked[number].memory
    page.locator("input[name=memory]").nth(number).check()
    expect(page.locator("#look-title")).to_have_text(f"Look inside {memory.name}")
    page.locator("#class").select_option(label=memory.class_names[2])
    expect(page.locator("#picture-caption")).to_contain_text(f"“{memory.class_names[2]}”, recall 1")
    sliders = page.get_by_role("slider")
    expect(sliders).to_have_count(len(memory.bases))
    before = painted(page)
    for move in ("", "ArrowRight", "ArrowLeft", "Home"):
        if move:
            sliders.nth(1).focus()
            for _ in range(4):
                page.keyboard.press(move)
        coefficients = [float(sliders.nth(k).input_value()) for k in range(len(memory.bases))]
        mixing = torch.tensor(coefficients)[None, None]
        image = recall(memory.bases.float(), mixing, torch.ones(1, 1), memory.image_shape[1:])
        expected = to_pixels(memory.preprocess().undo(image))[0].numpy().astype(int)
        assert np.abs(painted(page) - expected).max() <= 1
    assert not np.array_equal(painted(page), before)
    expect(page.locator("#picture-caption")).to_contain_text("changed by hand")
    page.get_by_role("button", name="Reset").click()
    assert np.array_equal(painted(page), before)


def test_pick_train_and_draw(open_page, address, tmp_path):
    """All the digits; a seven and a zero that are drawn are taken for what they are."""
    page = open_page(address)
    page.get_by_role("button", name="all of digits").click()
    expect(page.locator("#picked")).to_have_text("10 classes, 20 recalled images")
    train(page)
    expect(page.locator("#accuracy")).to_be_visible()
    assert float(page.locator("#accuracy").inner_text().split()[0]) > 85
    assert page.locator(".confusion tbody tr").count() == 10
    for points, digit in ((SEVEN, "7"), (ZERO, "0")):
        page.get_by_role("button", name="Clear").click()
        draw(page, points)
        expect(page.locator("#answered")).to_have_text(digit)
    page.get_by_text("The Python lines").click()
    expect(page.locator("pre").last).to_contain_text("recollect.compose([memory['0', '1'")
    for words, name in (("Classifier", "classifier.safetensors"), ("Recalled set", "recalled.npz"), ("Python", "classifier.py")):
        with page.expect_download() as download:
            page.get_by_role("link", name=words).click()
        assert download.value.suggested_filename == name
        download.value.save_as(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 100
    page.reload()  # what was trained is still there
    expect(page.locator("#accuracy")).to_be_visible()
    draw(page, SEVEN)
    expect(page.locator("#answered")).to_have_text("7")


def test_a_memory_of_a_large_network(open_page):
    """The project's own of MNIST: its recipe would take minutes here, what the page offers takes seconds."""
    with serving(shelf.stock([MNIST])) as address:
        page = open_page(address)
        page.get_by_role("button", name="all of mnist").click()
        expect(page.locator("#network")).to_have_value("small")
        page.get_by_role("button", name="Train").click()
        expect(page.locator("#status")).to_have_text("Trained", timeout=300_000)
        expect(page.locator("#numbers")).to_contain_text("epoch 20 of 20")
        for points, digit in ((SEVEN, "7"), (ZERO, "0")):
            page.get_by_role("button", name="Clear").click()
            draw(page, points)
            expect(page.locator("#answered")).to_have_text(digit)


def test_cancel(open_page, address):
    page = open_page(address)
    page.get_by_label("Network").select_option("small ConvNet")
    train(page, "3", "8", epochs=2000)
    expect(page.locator("#status")).to_contain_text("Training on 4 images")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#status")).to_have_text("Cancelled")
    expect(page.locator("#try-empty")).to_be_visible()
    train(page, epochs=5)
    expect(page.locator("#status")).to_have_text("Trained")


def test_a_bad_upload_is_survived(open_page, address, tmp_path):
    page = open_page(address, quiet=False)  # a browser writes a refused request to its console
    train(page, "3", "8", epochs=30)
    expect(page.locator("#try-body")).to_be_visible()
    (tmp_path / "bad.png").write_text("not at all")
    page.locator("#file").set_input_files(tmp_path / "bad.png")
    expect(page.get_by_role("alert")).to_contain_text("this is not a picture: give a PNG")
    (tmp_path / "large.png").write_bytes(bytes(9 * 2**20))
    page.locator("#file").set_input_files(tmp_path / "large.png")
    expect(page.get_by_role("alert")).to_contain_text("at most 8 MB")
    images = load("digits").test
    three = images.images[images.labels == 3][0, 0].numpy()
    Image.fromarray(three).convert("RGB").resize((80, 80)).save(tmp_path / "good.png")
    page.locator("#file").set_input_files(tmp_path / "good.png")
    expect(page.locator("#answered")).to_have_text("3")
    expect(page.locator("#answer")).to_contain_text("made grey; 80x80, made 8x8")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_two_clients_at_once(open_page, address):
    """Each has its own training and its own answers."""
    first, second = open_page(address), open_page(address)
    train(first, "0", "7", "1", epochs=200)
    train(second, "2", "0", "4", epochs=200)
    for page in (first, second):
        expect(page.locator("#status")).to_have_text("Trained")
    assert first.locator(".confusion thead th").all_inner_texts() == ["0", "7", "1"]
    assert second.locator(".confusion thead th").all_inner_texts() == ["2", "0", "4"]
    draw(first, SEVEN)
    draw(second, ZERO)
    expect(first.locator("#answered")).to_have_text("7")
    expect(second.locator("#answered")).to_have_text("0")


def test_with_the_keyboard_alone(open_page, address):
    """From the first key: each stop has a name and a visible focus, and a classifier can be trained."""
    page = open_page(address)
    expect(page.locator(".slider").first).to_be_visible()
    stops = []
    for _ in range(80):
        page.keyboard.press("Tab")
        focused = page.evaluate("""() => { const e = document.activeElement;
            const shown = e.matches(".chip input") ? e.nextSibling : e.matches(".card input") ? e.parentElement : e;
            const name = e.getAttribute("aria-label") ?? e.labels?.[0]?.innerText ?? e.innerText;
            return [e.id || e.value, name, getComputedStyle(shown).outlineStyle]; }""")
        stops.append(focused)
        if focused[0] in ("0:3", "0:8"):
            page.keyboard.press("Space")
        if focused[0] == "epochs":
            page.keyboard.type("20")
        if focused[0] == "train":
            page.keyboard.press("Enter")
            break
    assert [stop for stop in stops if not stop[1] or stop[2] == "none"] == []
    assert stops[-1][0] == "train"
    expect(page.locator("#status")).to_have_text("Trained")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(open_page, address, scheme):
    """Nothing is wider than 360 pixels, from the first look to the answer; in the dark it is dark."""
    page = open_page(address, viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page.get_by_role("button", name="all of digits").click()
    train(page, epochs=20)
    expect(page.locator("#accuracy")).to_be_visible()
    draw(page, SEVEN)
    expect(page.locator("#answered")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 28)")


def test_an_empty_shelf(open_page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving(shelf.stock([])) as address:
        page = open_page(address)
        expect(page.locator("#shelf")).to_contain_text("There is no memory on the shelf yet.")
        expect(page.locator("#build")).to_be_hidden()


def test_a_memory_that_is_asked_with_pictures(open_page, tmp_path):
    with serving(shelf.stock([asked_with_pictures(tmp_path)])) as address:
        page = open_page(address)
        expect(page.locator("#mixer-note")).to_contain_text("asked with pictures")
        expect(page.get_by_role("slider")).to_have_count(4)
        expect(page.locator("#build")).to_be_hidden()


def test_errors_are_told(open_page, tmp_path: Path):
    """A memory that cannot be shown, and a studio that has gone."""
    whitened(tmp_path)
    next(tmp_path.glob("zca-*")).unlink()
    with serving(shelf.stock([tmp_path / "whitened.safetensors", DIGITS])) as address:
        page = open_page(address, quiet=False)
        expect(page.get_by_role("alert")).to_contain_text("is not beside the memory")
        page.get_by_label("digits").first.check()
        expect(page.get_by_role("alert")).to_have_count(0)
    train(page, "3", "8")
    expect(page.get_by_role("alert")).to_contain_text("the studio does not answer")


def test_a_studio_that_ends_during_a_training(open_page):
    with serving(shelf.stock([DIGITS])) as address:
        page = open_page(address, quiet=False)
        page.get_by_label("Network").select_option("small ConvNet")
        train(page, "3", "8", epochs=2000)
        expect(page.locator("#status")).to_contain_text("Training on 4 images")
    expect(page.get_by_role("alert")).to_contain_text("the studio does not answer: waiting for it")


def test_a_memory_that_takes_its_time(open_page, address, stocked):
    """Until it is there, what is shown is of another: it says so, and nothing of it can be moved."""
    page, held = open_page(address), []
    expect(page.locator("#picture-caption")).to_contain_text("recall 1 of 2")
    page.route("**/api/memories/2/pictures", lambda route: held.append(route))
    page.locator("input[name=memory]").nth(2).check()
    expect(page.locator("#picture-caption")).to_have_text("Reading the memory …")
    assert page.locator("#look-body").evaluate("body => body.inert")
    assert page.locator("#look").get_attribute("aria-busy") == "true"
    held[0].continue_()
    expect(page.get_by_role("slider")).to_have_count(len(stocked[2].memory.bases))
    expect(page.locator("#look")).to_have_attribute("aria-busy", "false")
    assert not page.locator("#look-body").evaluate("body => body.inert")
