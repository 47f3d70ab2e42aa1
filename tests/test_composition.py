"""Compose: training sets out of several memories, classifiers and their files, pictures, the command, the experiment."""

import itertools
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CLASSES, experiment_module, make_memory, toy_arrays
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import recollect
from recollect import Classifier, Images, Memory, Preprocess, Recipe, RecollectError, Split, compose, evaluate, queries
from recollect.classifier import Source
from recollect.cli import main
from recollect.config import changed
from recollect.data.preprocess import Zca
from recollect.files import read_json
from recollect.reproduce import composing
from recollect.training import Cancelled, Progress

ROOT = Path(__file__).parent.parent
RECIPE = Recipe(network="mlp:width=8", epochs=5, batch=4, lr=0.05)


def make(names=CLASSES, name="toy", matrices=3, preprocess: Preprocess | None = None, channels=1) -> Memory:
    """A memory of `conftest`, called `name`, as if just distilled."""
    memory = make_memory(channels, tuple(names), matrices=matrices)
    fitted = preprocess or memory.preprocess()
    header = replace(memory.header, preprocessing=fitted.to_json(), recipe=recollect.config.to_json(RECIPE))
    memory = Memory(memory.bases, memory.addressing, header)
    memory.fitted, memory.name = fitted, name
    return memory


def whitening(seed: int = 0) -> Preprocess:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(64, 64, generator=generator) / 8
    return Preprocess((0.5,), (0.25,), Zca(torch.randn(64, generator=generator), root @ root.T + torch.eye(64)))


def make_images(names=CLASSES, name="toy", seed=0) -> Images:
    """Random images, so that what is measured depends on every one of them."""
    generator = torch.Generator().manual_seed(seed)

    def split(count: int) -> Split:
        pixels = torch.randint(256, (count, 1, 8, 8), generator=generator, dtype=torch.uint8)
        return Split(pixels, torch.arange(count) % len(names))

    return Images(name, split(30), split(20), split(40), tuple(names))


def picture(mode: str, size=(8, 8)) -> Image.Image:
    """A picture of random greys, whatever its mode."""
    grey = Image.fromarray(np.random.default_rng(0).integers(0, 256, size[::-1], dtype=np.uint8))
    if mode.startswith("I"):
        return Image.fromarray(np.asarray(grey).astype(np.uint16) << 8)
    return grey.convert(mode)


# --- classes of a memory ---------------------------------------------------------------------------------------------


def test_classes_of_a_memory():
    memory = make()
    assert memory["cat"].names == ("cat",)
    assert memory["frog", "cat"].labels == memory[2, 0].labels == memory[["frog", "cat"]].labels == (2, 0)
    with pytest.raises(RecollectError, match="unknown class 'frgo': did you mean 'frog'"):
        memory["frgo"]
    with pytest.raises(RecollectError, match="label 3 is not one of"):
        memory[3]
    with pytest.raises(RecollectError, match="class 'cat' of toy is named twice"):
        memory["cat", "dog", "cat"]
    with pytest.raises(TypeError, match="not iterable"):
        list(memory)  # pyright: ignore


def test_what_a_memory_is_called(tmp_path):
    for path, name in {"pets.safetensors": "pets", "run/memory.safetensors": "run"}.items():
        make().save(tmp_path / path)
        memory = Memory.load(tmp_path / path)
        assert memory.name == memory.with_accuracy({"mean": 1.0}).name == name
    assert make_memory().name == "toy"


# --- the training set ------------------------------------------------------------------------------------------------

words = st.text("abx/-2", min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_composition_is_the_recalls_in_order(data):
    """Every class has its own recall, in full, as often as any other class has images; names are never the same."""
    names = st.lists(words, min_size=1, max_size=4, unique=True)
    memories = [
        make(data.draw(names), data.draw(words), data.draw(st.integers(1, 4))) for _ in range(data.draw(st.integers(1, 3)))
    ]
    every = [(m, name) for m in memories for name in m.class_names]
    picks = data.draw(st.lists(st.sampled_from(range(len(every))), min_size=min(2, len(every)), unique=True))
    chosen = [every[pick] for pick in picks]
    if len(chosen) < 2:
        with pytest.raises(RecollectError, match="two classes or more"):
            compose([memory[name] for memory, name in chosen])
        return
    found = compose([memory[name] for memory, name in chosen])
    assert len(set(found.class_names)) == len(found.class_names) == len(chosen)
    most = max(len(memory.addressing) for memory, _ in chosen)
    assert found.labels.tolist() == [label for label in range(len(chosen)) for _ in range(most)]
    for label, (memory, name) in enumerate(chosen):
        images, _ = memory.recall(name)
        assert torch.equal(found.images[found.labels == label], images.repeat(4, 1, 1, 1)[:most])
        assert found.class_names[label].endswith(name)
        assert found.sources[label].class_name == name
        assert found.class_names[label] in (name, f"{found.sources[label].memory}/{name}")


def test_clashes_are_resolved_by_naming_the_memory(tmp_path):
    a, b = make(name="a"), make(["cat", "bus"], "b")
    assert compose([a["cat", "dog"], b]).class_names == ("a/cat", "dog", "b/cat", "bus")
    for folder in ("x", "y"):
        a.save(tmp_path / folder / "pets.safetensors")
    x, y = (Memory.load(tmp_path / folder / "pets.safetensors") for folder in ("x", "y"))
    assert compose([x["cat"], y["cat"]]).class_names == ("pets/cat", "pets-2/cat")
    assert compose([make(["a/cat"], "c"), a["cat"], b["cat"]]).class_names == ("c/a/cat", "a/cat", "b/cat")
    with pytest.raises(RecollectError, match="class 'cat' of a is named twice"):
        compose([a["cat"], a["dog", "cat"]])


def test_a_whole_memory_stands_for_all_its_classes():
    memory = make()
    images, labels = memory.recall()
    for found in (compose(memory), compose([memory]), compose(memory["cat", "dog", "frog"])):
        assert torch.equal(found.images, images)
        assert torch.equal(found.labels, labels)
        assert found.class_names == CLASSES
        assert found.recipe == RECIPE


def test_other_means_are_brought_to_the_first_memorys():
    """In pixels nothing changes: what a memory recalls looks the same, whichever mean and deviation it is seen with."""
    first, other = make(name="a"), make(["bus"], "b", preprocess=Preprocess((0.1,), (0.7,)))
    found = compose([first["cat"], other["bus"]])
    assert found.preprocess == first.preprocess()
    assert found.notice == "b brought to the mean and deviation of a"
    seen, (images, _) = found.preprocess.undo(found.images[found.labels == 1]), other.recall("bus")
    assert torch.allclose(seen, other.preprocess().undo(images), atol=1e-5)
    assert compose([first["cat"], make(["bus"], "b")]).notice == ""


def test_one_whitening_for_all():
    memories = [make(name="a", preprocess=whitening()), make(["bus"], "b", preprocess=whitening())]
    assert compose(memories).preprocess.zca is not None


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (make(), make(channels=3, name="b"), "toy has images of 1x8x8, b of 3x8x8: compose memories of one image shape"),
        (make(preprocess=whitening()), make(name="b"), r"toy is whitened \(ZCA\) and b is not: distil both with one"),
        (make(), make(name="b", preprocess=whitening()), r"b is whitened \(ZCA\) and toy is not: distil both with one"),
        (
            make(preprocess=whitening(0)),
            make(name="b", preprocess=whitening(1)),
            r"toy and b are whitened differently \(zca-\w+.safetensors, zca-\w+.safetensors\): distil both with one",
        ),
    ],
)
def test_memories_that_do_not_go_together(a, b, message):
    with pytest.raises(RecollectError, match=message) as caught:
        compose([a["cat"], b["dog"]])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("parts", [[], [make()["cat"]], make()["dog"]], ids=["none", "one", "one without a list"])
def test_too_few_classes(parts):
    with pytest.raises(RecollectError, match="needs two classes or more"):
        compose(parts)


def test_a_memory_that_is_asked_with_pictures(monkeypatch):
    from test_distillation import toy
    from test_queries import ASKED

    monkeypatch.setattr(queries, "ENCODER", "mlp:width=8,depth=1")
    memory = recollect.distill(toy(), changed(ASKED, outer_steps=1))
    for attempt in (lambda: memory[0, 1], lambda: compose(memory)):
        with pytest.raises(RecollectError, match="asked with pictures, not with labels"):
            attempt()


# --- training --------------------------------------------------------------------------------------------------------


def test_it_trains_as_an_evaluation_does():
    """Of all classes of one memory, the classifier is the first network of its evaluation."""
    memory, images = make(), make_images()
    for seed in (0, 1):
        expected = evaluate(memory, images, networks=1, seed=seed, device="cpu").values[0]
        assert compose(memory).train(seed=seed, device="cpu").accuracy(images) == pytest.approx(expected)


def test_progress_and_what_it_changes():
    told: list[Progress] = []
    composition = compose([make(name="a")["cat"], make(name="b")["dog"]])  # 6 images: two steps an epoch
    watched = composition.train(progress=told.append, cancelled=lambda: False)
    assert [(now.epoch, now.epochs) for now in told] == [(epoch, 5) for epoch in range(1, 6)]
    assert told[-1].loss < told[0].loss
    alone = composition.train()
    assert all(torch.equal(p, watched.params[name]) for name, p in alone.params.items())
    assert not torch.equal(composition.train(seed=1).params["1.weight"], alone.params["1.weight"])
    assert composition.train(replace(RECIPE, network="mlp:width=3")).params["1.weight"].shape == (3, 64)


def test_cancelled():
    asked, told = itertools.count(1), []
    with pytest.raises(Cancelled):
        compose(make()).train(progress=told.append, cancelled=lambda: next(asked) == 7)  # 9 images: 3 steps an epoch
    assert [now.epoch for now in told] == [1, 2]
    assert next(asked) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 1e6}, "the loss is not finite after epoch .: give a lower lr than 1e.06"),
        ({"epochs": 0}, "epochs is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"network": "mpl"}, "unknown network 'mpl': did you mean 'mlp'"),
        ({"network": "custom mine"}, "a network given in Python .custom mine., .*--network convnet"),
        ({"augment": "flp"}, "unknown augmentation 'flp'"),
    ],
)
def test_recipes_that_cannot_be(change, message):
    with pytest.raises(RecollectError, match=message):
        compose(make()).train(replace(RECIPE, **change))


def test_seeds_and_devices_that_cannot_be():
    with pytest.raises(RecollectError, match="seed is -1"):
        compose(make()).train(seed=-1)
    with pytest.raises(RecollectError, match="unknown device 'gpu'"):
        compose(make()).train(device="gpu")


# --- the images of some classes -----------------------------------------------------------------------------------------


def test_only():
    images = replace(make_images(("a", "b", "c", "d")), superclasses=(0, 0, 1, 1))
    some = images.only(["d", "b"])
    assert (some.name, some.class_names, some.superclasses) == ("toy", ("d", "b"), (1, 0))
    for part in ("train", "validation", "test"):
        whole, kept = getattr(images, part), getattr(some, part)
        for label, name in enumerate(some.class_names):
            expected = whole.images[whole.labels == images.class_names.index(name)]
            assert torch.equal(kept.images[kept.labels == label], expected)
        assert set(kept.labels.tolist()) == {0, 1}
    with pytest.raises(RecollectError, match="unknown class of toy 'e'"):
        images.only(["a", "e"])
    with pytest.raises(RecollectError, match="class 'a' of toy is named twice"):
        images.only(["a", "a"])


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    make(name="a").save(folder / "a.safetensors")
    make(["bus", "a,b", "c:d"]).save(folder / "b.safetensors")
    make().save(folder / "run" / "memory.safetensors")
    make(channels=3).save(folder / "colour.safetensors")
    make(preprocess=whitening()).save(folder / "white.safetensors")
    make([str(number) for number in range(12)]).save(folder / "twelve.safetensors")
    np.savez(folder / "toy.npz", **toy_arrays())
    np.savez(folder / "twelve.npz", images=toy_arrays()["images"], labels=np.arange(60) % 12)
    np.savez(folder / "colour.npz", **toy_arrays(3))
    picture("RGB", (30, 20)).save(folder / "picture.png")
    (folder / "text.png").write_text("no picture")
    (folder / "text.safetensors").write_text("no memory")
    return folder


@pytest.fixture
def call(files, tmp_path, monkeypatch, capsys):
    """`recollect compose ...` in a folder with those files; returns what it wrote to stdout and stderr."""
    monkeypatch.chdir(shutil.copytree(files, tmp_path / "here"))

    def run(arguments: str, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        found = main(["compose", *shlex.split(arguments)])
        out, err = capsys.readouterr()
        assert found == code, err
        return out, err

    return run


def test_the_command(call):
    out, err = call("a.safetensors:cat,dog run:frog --test toy.npz --save c.safetensors --classify picture.png")
    assert err == ""  # it is over before one would look
    assert out.startswith("mlp:width=8 trained on 9 recalled images\naccuracy ")
    made = compose([Memory.load("a.safetensors")["cat", "dog"], Memory.load("run/memory.safetensors")["frog"]]).train()
    images = recollect.load("toy.npz")
    assert f"accuracy {made.accuracy(images):.1f} % of 12 images of the test split\n" in out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert rows == [[name, *map(str, row)] for name, row in zip(CLASSES, made.confusion(images).tolist(), strict=True)]
    (answer,) = made.classify("picture.png")
    assert out.endswith(
        f"classifier  c.safetensors\npicture.png: {answer.class_name}, {100 * answer.probability:.1f} %  "
        "[in colour, made grey; 30x20, made 8x8]\n"
    )
    loaded = Classifier.load("c.safetensors")
    assert all(torch.equal(p, loaded.params[name]) for name, p in made.params.items())
    assert loaded.sources[2] == Source("run", "toy", "frog")


def test_recipe_and_quiet(call):
    recipe = "--network mlp:width=3 --epochs 2 --batch 5 --lr 0.1 --momentum 0.5 --augment flip"
    out, err = call(f"a.safetensors {recipe} --seed 4 --quiet --save c")
    assert (out, err) == ("mlp:width=3 trained on 9 recalled images\nclassifier  c\n", "")
    found = Classifier.load("c")
    assert found.recipe == Recipe("mlp:width=3", 2, 5, 0.1, 0.5, "flip")
    assert found.seed == 4


def test_odd_names(call):
    call("b.safetensors:a,b b.safetensors:c:d b.safetensors:bus --save c")
    assert Classifier.load("c").class_names == ("a,b", "c:d", "bus")
    shutil.copy("a.safetensors", "x:y.safetensors")
    call("x:y.safetensors a.safetensors:cat --save d")
    assert Classifier.load("d").class_names == ("x:y/cat", "dog", "frog", "a/cat")


def test_many_classes_show_the_worst_mistakes(call):
    out, _ = call("twelve.safetensors --test twelve.npz")
    assert out.count("│\n") == 10
    assert "true class" in out


def test_other_splits_and_means(call):
    other = make(["frog"], preprocess=Preprocess((0.1,), (0.7,)))
    other.save("other.safetensors")
    out, _ = call("a.safetensors:cat,dog other.safetensors:frog --test toy.npz --on validation")
    assert "recalled images (other brought to the mean and deviation of a)\n" in out
    assert "of 6 images of the validation split" in out


MISTAKES = """
                                                    | no memory named
    a.safetensors:cat                               | two classes or more
    a.safetensors:cat,dgo                           | unknown class 'dgo': did you mean 'dog'?
    a.safetensors:cat,cat                           | class 'cat' of a is named twice
    a.safetensors:cat a.safetensors:cat             | class 'cat' of a is named twice
    a.safetensors:                                  | unknown class ''
    nowhere.safetensors:cat                         | nowhere.safetensors does not exist
    nowhere                                         | nowhere does not exist
    text.safetensors:cat                            | text.safetensors is damaged or not a memory
    a.safetensors colour.safetensors                | a has images of 1x8x8, colour of 3x8x8
    a.safetensors white.safetensors                 | white is whitened (ZCA) and a is not
    a.safetensors --test minst                      | unknown dataset 'minst'
    a.safetensors --test colour.npz                 | colour has images of 3x8x8: this classifier sees 1x8x8
    a.safetensors --test twelve.npz                 | unknown class of the test data 'cat'
    a.safetensors run --test toy.npz                | toy has one class 'cat' for both a/cat and run/cat
    a.safetensors --classify text.png               | text.png: not a picture, or a damaged one
    a.safetensors --classify nowhere.png            | nowhere.png is not a file: give a PNG or JPEG file
    a.safetensors --save b.safetensors              | b.safetensors already exists: give another name (--save)
    a.safetensors --save text.png/c                 | cannot write text.png/c
    a.safetensors --network mpl                     | unknown network 'mpl': did you mean 'mlp'?
    a.safetensors --epochs 0                        | epochs is 0
    a.safetensors --lr 1e30                         | lr is 1e+30: give a number above 0
    a.safetensors --seed -1                         | seed is -1
    a.safetensors --device gpu                      | unknown device 'gpu'
"""


@pytest.mark.parametrize("line", MISTAKES.strip("\n").splitlines(), ids=lambda line: " ".join(line.split("|")[0].split()))
def test_mistakes_are_one_line(call, line):
    arguments, _, expected = line.partition("|")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    _, err = call(f"{arguments} --quiet", code=2)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert expected.strip() in err
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


# --- docs and experiment ---------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_file():
    text = (ROOT / "docs" / "compose.md").read_text()
    found = read_json(ROOT / "results" / "compose-digits.json")
    for row in found["rows"].values():
        assert f"| {row['mean']:.1f} ± {row['deviation']:.1f} |" in text
        assert row["n"] == len(row["values"]) == 200
    assert found["command"].replace("experiments/compose-", "results/compose-") in text.replace("\\\n      ", "")
    assert {each["floats"] for each in found["distilled"].values()} == {312}


def test_whitening_that_is_not_at_hand_comes_from_the_dataset(tmp_path):
    images = make_images()
    fitted = Preprocess.fit(images.train.images, "zca")
    for name in "ab":
        make(name=name, preprocess=fitted).save(tmp_path / f"{name}.safetensors")
    whole = compose([Memory.load(tmp_path / f"{name}.safetensors") for name in "ab"])
    (sidecar,) = tmp_path.glob("zca-*")
    sidecar.unlink()
    a, b = (Memory.load(tmp_path / f"{name}.safetensors") for name in "ab")
    for others in ((), make_images(name="others", seed=1)):
        with pytest.raises(RecollectError, match=r"is not beside .* as in recollect evaluate, compose --test or ask --data"):
            compose([a, b], others)
    with pytest.warns(UserWarning, match="fitted again from the training images"):
        found = compose([a, b], [make_images(name="others", seed=1), images])
    assert torch.allclose(found.preprocess(images.test.images), whole.preprocess(images.test.images), atol=1e-5)
    other = make(name="c", preprocess=Preprocess.fit(make_images(seed=1).train.images, "zca"))
    other.save(tmp_path / "c.safetensors")
    for sidecar in tmp_path.glob("zca-*"):
        sidecar.unlink()
    with pytest.raises(RecollectError, match="a and c are whitened differently"):  # which no whitening file would change
        compose([Memory.load(tmp_path / f"{name}.safetensors") for name in "ac"])


def test_what_was_chosen_for_cifar100_is_that_of_the_files():
    text = (ROOT / "docs" / "compose.md").read_text()
    searches = read_json(ROOT / "results" / "searches.json")
    tried = searches["bases"]["cifar100, tasks 0 and 1 of compose.py"]["rows"]
    assert len(tried) == 7
    for row in tried:
        own = ", ".join(f"{value:.1f}" for value in row["own tasks"])
        count = re.findall(r"bases=(\d+)", row["settings"])[0]
        assert re.search(rf"^\| {count} bases.* \| {own} \| {row['mixed']:.1f} \|$", text, re.M)
    found = read_json(ROOT / "results" / "compose-cifar100-validation.json")
    assert found["settings"]["on"] == "validation"
    for row in found["rows"].values():
        assert row["n"] == len(row["values"]) == 100
        assert f"{row['mean']:.1f} ± {row['deviation']:.1f}" in text
    memories = sorted((ROOT / "memories" / "cifar100-by-5").glob("*.safetensors"))
    assert len(memories) == len(found["distilled"]) == 20
    classes = set()
    for path in memories:
        memory = Memory.load(path)
        assert memory.floats == 15354
        assert memory.class_names == tuple(found["distilled"][path.stem]["classes"])
        classes |= {*memory.class_names}
    assert len(classes) == 100
    trials = searches["asking"]["rows"]
    assert all(f"| {row['epochs 300']:.1f} |" in text for row in trials.values())


def spread(row: dict) -> str:
    return f"{row['mean']:.1f} ± {row.get('deviation', row.get('deviation over tasks and draws')):.1f}"


def test_composing_cifar100_is_that_of_the_files():
    pages = "docs/compose.md", "README.md", "docs/results/README-figures.md"
    text, readme, figures = ((ROOT / name).read_text() for name in pages)
    found = {ways: read_json(ROOT / "results" / f"compose-cifar100-{ways}-way.json") for ways in (2, 5)}
    for source in ("memories", "random real images", "all the data"):
        two, five = (found[ways]["rows"][f"{ways}-way, {source}"] for ways in (2, 5))
        assert two["n"] == five["n"] == len(two["values"]) == len(five["values"]) == 1000
        assert re.search(rf"\| {spread(two)} \| [\d. ±]* ?\| {spread(five)} \|", text)
    row = found[5]["rows"]["5-way, memories"]
    assert f"{spread(row)} % on five classes of" in readme
    assert f"| {spread(row)} % | 1,000 tasks, one network each |" in figures
    command = text[text.index("python experiments/compose.py cifar100") :].split("\n\n")[0].replace("\\\n      ", "")
    for ways, each in found.items():
        assert each["settings"]["on"] == "test"
        assert each["settings"] == found[2]["settings"] | {"test_ways": [ways]}
        told, ran = (
            set(text.replace("results/", "").replace("runs/", "").replace("DATA", "data").split())
            for text in (command.replace("ways 2", f"ways {ways}").replace("2-way", f"{ways}-way"), each["command"])
        )
        assert told == ran


@pytest.mark.parametrize("name", ["ask-cifar100", "ask-cifar100-validation", "ask-cifar100-first"])
def test_asking_is_that_of_the_files(name):
    pages = "docs/compose.md", "README.md", "docs/results/README-figures.md"
    text, readme, figures = ((ROOT / path).read_text() for path in pages)
    if name == "ask-cifar100-first":  # of an earlier script
        found = read_json(ROOT / "results" / "searches.json")["asking, first"]
    else:
        found = read_json(ROOT / "results" / f"{name}.json")["rows"]
    assert len(found) == 6
    for key, row in found.items():
        assert row["on"] == ("test" if name == "ask-cifar100" else "validation")
        draws = 5 if row["on"] == "test" else 2
        assert [len(values) for values in row["values"]] == [20] * draws
        method, shots = key.removesuffix(" shot").split(", ")
        if name != "ask-cifar100-validation":
            place = r"[\d. ±|]*" if shots == "5" else ""
            assert re.search(rf"\| {method} \|{place} {spread(row)} \|", text)
        else:
            assert spread(row) in text
    if name == "ask-cifar100":
        row = found["image addressing, 5 shot"]
        minutes = row["minutes of distilling"]
        assert f"{spread(row)} % from five shots (paper 71.2)" in readme
        assert f"| {spread(row)} % | 20 tasks, 5 draws | one shared H200, {minutes:.0f} minutes of distilling |" in figures
        labels = found["classify-then-recall, 5 shot"]["minutes of distilling"]
        assert f"{labels:.1f} minutes for the labels' and {minutes - labels:.1f} for each" in text
        for kind in ("labels", "1-shot", "5-shot"):
            memory = Memory.load(ROOT / "memories" / "cifar100-asked" / f"{kind}.safetensors")
            assert f"({memory.floats:,} floats of" in text
            method = "classify-then-recall, 1" if kind == "labels" else f"image addressing, {kind[0]}"
            assert memory.header.made == found[f"{method} shot"]["made"]


@pytest.fixture(scope="module")
def experiment():
    return experiment_module("compose")


def test_tasks_of_the_experiment():
    images = make_images([str(number) for number in range(23)])
    tasks = composing.deal(images, 5, 0)
    assert [len(task) for task in tasks] == [5] * 4
    assert len({name for task in tasks for name in task}) == 20
    assert tasks == composing.deal(images, 5, 0) != composing.deal(images, 5, 1)
    drawn = composing.draw(tasks, 3, 200, 0)
    homes = [{place for place, task in enumerate(tasks) for name in names if name in task} for names in drawn]
    assert all(len(home) == 3 for home in homes)
    assert {name for names in drawn for name in names} == {name for task in tasks for name in task}
    with pytest.raises(RecollectError, match="5-way tasks need 5 memories, and there are 4"):
        composing.draw(tasks, 5, 1, 0)


def test_the_experiment_resumes(experiment, tmp_path, monkeypatch, capsys):
    """Killed in the middle of a row, it goes on to the same values; nothing that was done is done again."""
    tiny = "network=mlp:width=8 outer_steps=2 inner_steps=2 window=None bases=2 real_per_class=5"
    options = f"digits --ways 2 --count 5 --group 2 --epochs 3 --full-epochs 1 --device cpu --set {tiny}"

    def run(name: str, more: str = "") -> dict:
        experiment.main(shlex.split(f"{options} --out {tmp_path / name}.json --memories {tmp_path / name} {more}"))
        return json.loads((tmp_path / f"{name}.json").read_text())

    whole = run("whole")
    kinds = ("memories", "random real images", "all the data")
    assert list(whole["rows"]) == [f"{ways}-way, {kind}" for ways in (2, 5) for kind in kinds]
    assert {row["n"] for row in whole["rows"].values()} == {5}
    assert len(whole["distilled"]) == 5

    with pytest.raises(FileNotFoundError):  # a process that distils two of the tasks writes nothing else
        run("part", "--only 3 1")
    assert {path.stem for path in (tmp_path / "part").iterdir()} == {"task-01", "task-03"}
    for wrong in (5, -1):
        with pytest.raises(RecollectError, match=f"there is no task {wrong}: give some of 0 to 4"):
            run("part", f"--only {wrong}")

    measure, steps = composing.measure, itertools.count()
    monkeypatch.setattr(composing, "measure", lambda *rest: 1 / 0 if next(steps) == 4 else measure(*rest))
    with pytest.raises(ZeroDivisionError):
        run("part")
    monkeypatch.setattr(composing, "distill", None)  # the memories are there
    monkeypatch.setattr(composing, "measure", measure)
    part = run("part")
    assert {key: row["values"] for key, row in part["rows"].items()} == {k: r["values"] for k, r in whole["rows"].items()}
    assert capsys.readouterr().out.count("5-way, memories") == 2
    options = options.replace("--full-epochs 1", "--full-epochs 2")
    with pytest.raises(RecollectError, match="begun with other settings"):
        run("part")
