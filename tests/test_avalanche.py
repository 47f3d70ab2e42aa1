"""With the real library: it runs our strategy, buffer, streams and metric, and its own strategies run on our streams."""

import importlib
import json
import math
import re
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import Mock

import avalanche_example
import baselines
import pytest
import torch
from avalanche.benchmarks import (
    benchmark_from_datasets,
    class_incremental_benchmark,
    task_incremental_benchmark,
    with_classes_timeline,
    with_task_labels,
)
from avalanche.benchmarks.utils import DataAttribute, as_classification_dataset
from avalanche.benchmarks.utils.classification_dataset import ClassificationDataset
from avalanche.checkpointing import maybe_load_checkpoint, save_checkpoint
from avalanche.evaluation.metrics import accuracy_metrics, bwt_metrics, loss_metrics
from avalanche.models import MultiTaskModule
from avalanche.training.plugins import EvaluationPlugin, ReplayPlugin
from avalanche.training.storage_policy import ExemplarsBuffer
from avalanche.training.supervised import Naive
from torch import Tensor, nn

from recollect import Memory, Preprocess, RecollectError, load
from recollect.avalanche import BTI, CompressThenRecall, DistilledBuffer, TaskNetwork, benchmark
from recollect.config import changed
from recollect.continual.config import ContinualConfig
from recollect.continual.learners import Compress, accuracy_matrix, taught
from recollect.continual.metrics import metrics, square
from recollect.continual.streams import Stream

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.filterwarnings(
    "ignore:No loggers specified:UserWarning", "ignore:Avalanche is transitioning to strategy constructors:UserWarning"
)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Avalanche calls a deprecated method of its own, which says so each time, past all filters."""
    monkeypatch.setattr(ExemplarsBuffer, "update", ExemplarsBuffer.update.__wrapped__)


DIGITS = changed(avalanche_example.CONFIG, tasks=3, buffer=60, per_task=100)
TOY = changed(
    ContinualConfig(), tasks=2, per_task=15, buffer=6, network="mlp:width=4", bases=2, inner_steps=2, outer_per_batch=1, replay=4
)
KINDS = {
    "rotations": TOY,
    "permutations": changed(TOY, kind="permutations", downsample=1),
    "split": changed(TOY, kind="split", classes_per_task=1, per_task=14, preprocess="normalise"),
}


def silent(*wanted) -> EvaluationPlugin:
    return EvaluationPlugin(*wanted, loggers=[])


# --- our streams as benchmarks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_benchmark_shows_what_the_stream_shows(toy_images, kind):
    scenario, stream = benchmark(Stream(toy_images, KINDS[kind], 1)), Stream(toy_images, KINDS[kind], 1)
    assert len(scenario.train_stream) == len(scenario.test_stream) == stream.tasks
    for number, (train, test) in enumerate(zip(scenario.train_stream, scenario.test_stream, strict=True)):
        batches = list(stream.task(number))
        shown = [torch.cat([batch.images for batch in batches]), torch.cat([batch.labels for batch in batches])]
        judged = stream.test(number)
        for experience, images, labels in ((train, *shown), (test, judged.images, judged.labels)):
            assert experience.task_label == number
            assert set(experience.classes_in_this_experience) == set(labels.tolist())
            samples = [experience.dataset[row] for row in range(len(experience.dataset))]
            assert torch.equal(torch.stack([sample[0] for sample in samples]), stream.preprocess(images))
            assert [sample[1] for sample in samples] == labels.tolist()
            assert {sample[2] for sample in samples} == {number}


def test_the_network_of_a_stream(toy_images):
    stream = Stream(toy_images, KINDS["split"])
    network, images = TaskNetwork(stream), torch.randn(2, *stream.shape)
    logits = network(images, torch.tensor([1, 0]))
    own = [stream.task_classes[1][0], stream.task_classes[0][0]]
    assert logits.isfinite().sum(1).tolist() == [1, 1]
    assert logits.argmax(1).tolist() == own
    again = TaskNetwork(Stream(toy_images, KINDS["split"], seed=1))
    assert not torch.equal(network.network[1].weight, again.network[1].weight)  # by the stream's seed
    assert TaskNetwork(Stream(toy_images, TOY))(images, torch.tensor([1, 0])).isfinite().all()


# --- the strategy ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    """The strategy after three tasks of permuted digits, and what Avalanche's evaluation said after each."""
    stream = Stream(load("digits"), DIGITS, seed=1)
    scenario = benchmark(stream)
    evaluator = silent(accuracy_metrics(experience=True), loss_metrics(experience=True), BTI())
    options = {"seed": 1, "preprocess": stream.preprocess, "evaluator": evaluator, "eval_mb_size": 1000}
    strategy = CompressThenRecall(benchmark=scenario, config=DIGITS, **options)
    said = []
    for experience in scenario.train_stream:
        strategy.train(experience, shuffle=False)
        said.append(strategy.eval(scenario.test_stream))
    return strategy, scenario, said


@pytest.fixture(scope="module")
def ours():
    """Our own learner on the same stream, and its accuracy matrix."""
    stream = Stream(load("digits"), DIGITS, seed=1)
    learner = Compress(stream, DIGITS)
    return learner, accuracy_matrix("compress", taught(learner, stream), stream)


def exp(name: str, task: int) -> str:
    return f"{name}/eval_phase/test_stream/Task{task:03d}/Exp{task:03d}"


def test_the_strategy_is_our_learner(trained, ours):
    """The same memories to the byte, the same account, the same accuracy matrix."""
    (strategy, _, said), (learner, matrix) = trained, ours
    found = [[100 * after[exp("Top1_Acc_Exp", t)] for t in range(i + 1)] for i, after in enumerate(said)]
    assert len(strategy.memories) == len(learner.memories) == 3
    for one, other in zip(strategy.memories, learner.memories, strict=True):
        assert torch.equal(one.bases, other.bases)
        assert torch.equal(one.addressing, other.addressing)
    assert strategy.learner.buffer.log == learner.buffer.log
    for row, expected in zip(square(found), matrix, strict=True):
        assert row == pytest.approx(expected)
    assert min(found[-1]) > 25  # of ten classes: it has learnt
    assert said[-1]["BTI/eval_phase/test_stream"] == 0
    assert all(math.isfinite(after[exp("Loss_Exp", 0)]) for after in said)


def test_a_task_yet_to_come_is_guessed(trained):
    _, _, said = trained
    assert said[0][exp("Top1_Acc_Exp", 2)] < 0.2
    assert said[0][exp("Loss_Exp", 2)] == pytest.approx(math.log(10), abs=1e-4)


def test_the_account_of_the_buffer(trained):
    strategy, *_ = trained
    log = strategy.learner.buffer.log
    assert log[-1]["memory_floats"] == sum(memory.floats for memory in strategy.memories)
    assert log[-1]["samples"] == 0  # only memories remain
    assert max(line["samples"] for line in log) == (60 * 64 - 2 * 1248) // 64  # beside two memories
    assert all(line["sample_floats"] + line["memory_floats"] <= 60 * 64 == line["total"] for line in log)


def test_its_memories_are_as_any_other(trained, tmp_path):
    strategy, *_ = trained
    strategy.memories[1].save(tmp_path / "one.safetensors")
    memory = Memory.load(tmp_path / "one.safetensors")
    assert memory.header.class_names == [str(digit) for digit in range(10)]
    assert memory.preprocess() == Stream(load("digits"), DIGITS).preprocess
    assert "task 1 of 3" in memory.header.dataset


def test_what_training_says(toy_images, capsys):
    """With the default evaluator, evaluation at each experience's end, and Avalanche's shuffled batches."""
    scenario = benchmark(Stream(toy_images, TOY))
    strategy = CompressThenRecall(benchmark=scenario, config=TOY, eval_every=0)
    for experience in scenario.train_stream:
        found = strategy.train(experience, eval_streams=[scenario.test_stream])
    assert found["Top1_Acc_Epoch/train_phase/train_stream/Task001"] == 0  # nothing is trained on the stream
    assert math.isnan(found["Loss_Epoch/train_phase/train_stream/Task001"])
    assert 0 <= found[exp("Top1_Acc_Exp", 1)] <= 1
    assert "Top1_Acc_Stream/eval_phase/test_stream" in capsys.readouterr().out


def test_checkpoints_of_the_library(toy_images, tmp_path, capsys):
    """Saved by Avalanche between two experiences and loaded elsewhere, it goes on to the same bytes."""

    def fresh():
        scenario = benchmark(Stream(toy_images, TOY))
        return scenario.train_stream, CompressThenRecall(benchmark=scenario, config=TOY, evaluator=silent())

    experiences, whole = fresh()
    whole.train(experiences[0], shuffle=False)
    save_checkpoint(whole, tmp_path / "strategy.pkl")
    whole.train(experiences[1], shuffle=False)
    experiences, again = fresh()
    again, seen = maybe_load_checkpoint(again, tmp_path / "strategy.pkl")
    again.train(experiences[1], shuffle=False)
    assert seen == 1
    assert len(again.memories) == 2
    for one, other in zip(whole.memories, again.memories, strict=True):
        assert torch.equal(one.bases, other.bases)


def digits_by_class(order: list[int], experiences: int):
    """Avalanche's own class-incremental benchmark of some digits, without task labels."""
    images, streams = load("digits").only([str(label) for label in order]), {}
    for name, split in (("train", images.train), ("test", images.test)):
        data = torch.utils.data.TensorDataset(split.images.float() / 255, split.labels)
        data.targets = split.labels.tolist()
        streams[name] = as_classification_dataset(data)
    places = [sorted(order).index(label) for label in order]
    return class_incremental_benchmark(streams, class_order=places, num_experiences=experiences)


SPLIT = changed(DIGITS, kind="split", classes_per_task=2, tasks=None, buffer=20, bases=4)


def test_a_benchmark_of_others():
    """Avalanche's own, whose experiences have classes of their own and come sorted by class."""
    scenario = task_incremental_benchmark(digits_by_class([7, 1, 4, 0], 2))
    strategy = CompressThenRecall(benchmark=scenario, config=SPLIT, evaluator=silent(accuracy_metrics(experience=True)))
    assert strategy.learner.stream.task_classes == [(1, 3), (0, 2)]
    torch.manual_seed(0)
    strategy.train(scenario.train_stream)
    said = strategy.eval(scenario.test_stream)
    assert min(said[exp("Top1_Acc_Exp", task)] for task in range(2)) > 0.85  # by seed 0.89 to 0.97; chance is 0.5
    assert strategy.memories[0].header.made["labels"] == [1, 3]
    assert strategy.memories[0].preprocess() == Preprocess((0.0,), (1.0,))


def labelled(scenario, labels: list):
    """The training experiences with task labels as given."""
    experiences = list(scenario.train_stream)
    for experience, label in zip(experiences, labels, strict=True):
        experience.task_labels = label
    return scenario


def test_what_is_refused(toy_images):
    plain = digits_by_class([7, 1, 4, 0], 2)
    for scenario, message in (
        (plain, "experience 0 has no task label, .*task_incremental_benchmark"),
        (labelled(digits_by_class([7, 1, 4, 0], 2), [[0], [0, 1]]), r"experience 1 has the task labels \[0, 1\]"),
        (labelled(digits_by_class([7, 1, 4, 0], 2), [[3], [3]]), "experiences 0 and 1 both have task label 3"),
    ):
        with pytest.raises(RecollectError, match=message):
            CompressThenRecall(benchmark=scenario, config=SPLIT)
    scenario = benchmark(Stream(toy_images, TOY))
    with pytest.raises(RecollectError, match="a buffer of 1 images cannot serve 2 tasks"):
        CompressThenRecall(benchmark=scenario, config=changed(TOY, buffer=1))
    with pytest.raises(RecollectError, match=r"9 bases do not fit 1/2 of a buffer of 6 images \(192 numbers\)"):
        DistilledBuffer(scenario, changed(TOY, bases=9, downsample=1))
    with pytest.raises(RecollectError, match="outer_per_batch is 0, which leaves memories random"):
        CompressThenRecall(benchmark=scenario, config=changed(TOY, outer_per_batch=0))
    with pytest.raises(RecollectError, match="has no training experiences"):
        DistilledBuffer(benchmark_from_datasets(train=[], test=[]), TOY)
    empty = ClassificationDataset([[]], data_attributes=[DataAttribute([], "targets")])
    first = next(iter(scenario.train_stream)).dataset
    with pytest.raises(RecollectError, match="experience 1 has no samples: leave it out"):
        DistilledBuffer(benchmark_from_datasets(train=[first, empty]), TOY)
    data = ClassificationDataset(
        [[(torch.zeros(1, 8, 8, dtype=torch.uint8), 0)]], data_attributes=[DataAttribute([0], "targets")]
    )
    with pytest.raises(RecollectError, match=r"images are \[1, 8, 8\] torch.uint8: its transforms must give float"):
        DistilledBuffer(benchmark_from_datasets(train=[data]), TOY)


def test_experiences_come_once_and_in_order(toy_images):
    scenario = benchmark(Stream(toy_images, TOY))
    strategy = CompressThenRecall(benchmark=scenario, config=TOY, evaluator=silent())
    with pytest.raises(RecollectError, match="experience 1 came, but number 0 is due"):
        strategy.train(scenario.train_stream[1])
    strategy.train(scenario.train_stream[0])
    with pytest.raises(RecollectError, match="experience 0 came, but number 1 is due"):
        strategy.train(scenario.train_stream[0])
    strategy.train(scenario.train_stream[1])
    with pytest.raises(RecollectError, match="experience 0 came, but all have been seen"):
        strategy.train(scenario.train_stream[0])
    other = benchmark(Stream(toy_images, changed(TOY, tasks=3)))
    with pytest.raises(RecollectError, match="no training experience has task label 2: the benchmark has 0, 1"):
        strategy.eval(other.test_stream[2])


def test_without_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "avalanche"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "recollect.avalanche")
    with pytest.raises(RecollectError, match=r"needs avalanche.*: pip install 'recollect\[avalanche\]'"):
        importlib.import_module("recollect.avalanche")


# --- the buffer --------------------------------------------------------------------------------------------------------


class Watch(ReplayPlugin):
    """The stock plugin, and what its strategy was shown: for each iteration the tasks of the batch."""

    def __init__(self, **options):
        super().__init__(**options)
        self.tasks: list[list[int]] = []

    def before_training_iteration(self, strategy, **_):
        self.tasks.append(strategy.mb_task_id.tolist())


def naive(model: nn.Module, *plugins) -> Naive:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    return Naive(model=model, optimizer=optimiser, train_mb_size=10, plugins=list(plugins), evaluator=silent())


def test_replay_of_memories(toy_images):
    stream = Stream(toy_images, changed(KINDS["split"], tasks=3, buffer=9))
    scenario, config = benchmark(stream), stream.config
    buffer = DistilledBuffer(scenario, config, preprocess=stream.preprocess)
    watch = Watch(mem_size=config.buffer.images, storage_policy=buffer, batch_size_mem=6)
    strategy = naive(TaskNetwork(stream), watch)
    sizes = []
    for experience in scenario.train_stream:
        strategy.train(experience)
        sizes.append(len(buffer.buffer))
    first, second, third = ([sorted(set(batch)) for batch in watch.tasks[i : i + 2]] for i in (0, 2, 4))
    assert first == [[0], [0]]  # there was nothing to replay
    assert second == [[0, 1], [0, 1]]
    assert {*third[0], *third[1]} == {0, 1, 2}
    recalled = [memory.recall()[0] for memory in buffer.memories]
    assert sizes == [sum(map(len, recalled[: n + 1])) for n in range(3)]
    images, labels, tasks = zip(*(buffer.buffer[row] for row in range(len(buffer.buffer))), strict=True)
    assert torch.equal(torch.stack(images), torch.cat(recalled))
    truth = [(classes[0], task) for task, classes in enumerate(stream.task_classes) for _ in recalled[task]]
    assert list(zip(labels, tasks, strict=True)) == truth
    assert buffer.max_size == config.buffer.images
    assert sum(memory.floats for memory in buffer.memories) <= 9 * 64
    assert len(images) > 9  # more than the real images of the same floats
    assert all(memory.preprocess() == stream.preprocess for memory in buffer.memories)


def test_a_buffer_without_task_labels():
    scenario = digits_by_class([7, 1, 4, 0], 2)
    buffer = DistilledBuffer(scenario, SPLIT)
    strategy = naive(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), ReplayPlugin(20, storage_policy=buffer))
    strategy.train(scenario.train_stream)
    assert len(buffer.memories) == 2
    assert {len(buffer.buffer[row]) for row in range(len(buffer.buffer))} == {2}
    assert set(buffer.buffer.targets) == {0, 1, 2, 3}
    buffer.resize(strategy, 20)
    with pytest.raises(RecollectError, match="a buffer of memories for 20 images cannot be made 10"):
        buffer.resize(strategy, 10)
    with pytest.raises(RecollectError, match="experience 0 came, but all have been seen"):
        buffer.post_adapt(strategy, scenario.train_stream[0])


# --- the metric --------------------------------------------------------------------------------------------------------

R = [[1.0], [0.5, 0.75], [0.25, 0.5, 1.0]]  # task t after task i


class Scripted(MultiTaskModule):
    """Of the four test images of a task, which are their own numbers, as many right as the matrix says."""

    def __init__(self):
        super().__init__()
        self.weight, self.after = nn.Parameter(torch.zeros(())), 0

    def adaptation(self, experience) -> None:
        pass

    def forward(self, x: Tensor, task_labels: Tensor) -> Tensor:
        row = torch.tensor([*R[self.after], 0.0, 0.0])
        right = x.flatten() < 4 * row[task_labels]
        return torch.stack([right, ~right], 1).float() + 0 * self.weight


def four_images():
    """Three tasks; every image has label 0."""
    samples = [(torch.full((1, 1, 1), float(number)), 0) for number in range(4)]

    def data():
        return [ClassificationDataset([samples], data_attributes=[DataAttribute([0] * 4, "targets")]) for _ in R]

    scenario = task_incremental_benchmark(benchmark_from_datasets(train=data(), test=data()))
    return with_classes_timeline(with_task_labels(scenario))


def test_bti_by_hand():
    scenario, model = four_images(), Scripted()
    strategy = naive(model)
    strategy.plugins[0] = strategy.evaluator = silent(bwt_metrics(stream=True), BTI())
    strategy.eval_mb_size, found = 3, []
    for after, experience in enumerate(scenario.train_stream):
        strategy.train(experience)
        model.after = after
        found.append(strategy.eval(scenario.test_stream))
    bti = [row["BTI/eval_phase/test_stream"] for row in found]
    assert bti == pytest.approx([0, (0.5 - 1) / 2, ((0.25 - 1) + (0.5 - 0.75)) / 3])
    assert found[-1]["StreamBWT/eval_phase/test_stream"] == pytest.approx(bti[-1] * 3 / 2)  # over T - 1
    assert bti[-1] == pytest.approx(metrics(square(R)).bti)


def test_bti_needs_every_diagonal():
    scenario, model = four_images(), Scripted()
    strategy = naive(model)
    strategy.plugins[0] = strategy.evaluator = silent(BTI())
    strategy.train(scenario.train_stream[:2])
    model.after = 1
    assert math.isnan(strategy.eval(scenario.test_stream)["BTI/eval_phase/test_stream"])


# --- the library's strategies on our streams ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gem", "mer", "lamaml"])
def test_strategies_of_the_library(name):
    config = changed(DIGITS, kind="split", classes_per_task=2, tasks=2, per_task=60, batch=10, buffer=12)
    chosen = baselines.SETTINGS[name]["cifar100"] | {"glances": 4, "inner": 2}
    found = [baselines.run(load("digits"), config, name, seed, chosen, "cpu") for seed in (0, 0)]
    assert found[0]["matrix"] == found[1]["matrix"]  # by seed
    assert found[0]["matrix"][0][1] is None
    assert metrics(found[0]["matrix"]).ra > 85  # of two classes: it has learnt


@pytest.mark.parametrize("name", ["gem", "mer", "lamaml"])
def test_a_strategy_goes_on_after_the_last_task_it_finished(name, tmp_path):
    config = changed(DIGITS, kind="split", classes_per_task=2, tasks=3, per_task=40, batch=10, buffer=12)
    chosen = baselines.SETTINGS[name]["cifar100"] | {"glances": 2, "inner": 2}
    whole = baselines.run(load("digits"), config, name, 0, chosen, "cpu")
    path, told = tmp_path / "one.pt", []

    def killed(line: str) -> None:
        told.append(line)
        raise KeyboardInterrupt

    for _ in range(3):  # after each task
        with pytest.raises(KeyboardInterrupt):
            baselines.run(load("digits"), config, name, 0, chosen, "cpu", killed, path)
    assert [line[:6] for line in told] == ["task 1", "task 2", "task 3"]
    found = baselines.run(load("digits"), config, name, 0, chosen, "cpu", killed, path)
    assert found["matrix"] == whole["matrix"]
    assert found["seconds"] > 0
    for seed, change in ((1, {}), (0, {"buffer": 15})):
        with pytest.raises(RecollectError, match="was begun with other settings"):
            baselines.run(load("digits"), changed(config, **change), name, seed, chosen, "cpu", killed, path)


class Emulated:
    """What takes the place of a CUDA graph on a processor: an iteration that is captured does not run, but whenever replayed."""

    capturing = None

    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1
        self.iteration()


@contextmanager
def emulated_capture(graph, stream):
    Emulated.capturing = graph
    yield
    Emulated.capturing = None


def emulate(monkeypatch) -> list[Emulated]:
    """La-MAML captured on a processor; the list of its graphs."""
    stream, made, whole = Mock(), [], baselines.CapturedLaMAML._whole

    def graph() -> Emulated:
        made.append(Emulated())
        return made[-1]

    def captured(self, inputs) -> None:
        if Emulated.capturing:
            Emulated.capturing.iteration = lambda: whole(self, inputs)
        else:
            whole(self, inputs)

    for name, fake in {
        "Stream": lambda: stream, "current_stream": lambda: stream, "stream": lambda _: nullcontext(),
        "CUDAGraph": graph, "graph": emulated_capture,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(baselines.CapturedLaMAML, "_whole", captured)
    monkeypatch.setattr(baselines, "LaMAML", baselines.CapturedLaMAML)
    return made


LA_MAML = baselines.SETTINGS["lamaml"]["cifar100"] | {"glances": 4, "inner": 2}


def test_la_maml_captured_is_la_maml(monkeypatch):
    """A graph for the first task, which replays nothing, and one for all others; three iterations of each run as they are."""
    config = changed(DIGITS, kind="split", classes_per_task=2, tasks=3, per_task=60, batch=10, buffer=12)
    usual = baselines.run(load("digits"), config, "lamaml", 0, LA_MAML, "cpu")
    graphs = emulate(monkeypatch)
    found = baselines.run(load("digits"), config, "lamaml", 0, LA_MAML, "cpu")
    assert found["matrix"] == usual["matrix"]
    assert [graph.replays for graph in graphs] == [24 - 3, 2 * 24 - 3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: captures CUDA graphs")
def test_la_maml_captured_on_a_gpu(monkeypatch):
    config = changed(DIGITS, kind="split", classes_per_task=2, tasks=2, per_task=60, batch=10, buffer=12)
    weights = []
    for kind in (baselines.LaMAML, baselines.CapturedLaMAML):
        monkeypatch.setattr(baselines, "CapturedLaMAML", kind)
        torch.manual_seed(0)
        stream = Stream(load("digits"), config, device="cuda")
        model = TaskNetwork(stream)
        strategy = baselines.make("lamaml", model, stream, LA_MAML, "cuda")
        for experience in benchmark(Stream(load("digits"), config)).train_stream:
            strategy.train(experience, shuffle=False)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-2, atol=1e-3)


def test_their_buffers_are_the_streams():
    config = changed(DIGITS, tasks=2, per_task=60, batch=10, buffer=12)
    stream = Stream(load("digits"), config)
    kept = {}
    for name in baselines.NAMES:
        chosen = baselines.SETTINGS[name]["rotations"] | {"glances": 1, "inner": 1}
        strategy = baselines.make(name, TaskNetwork(stream), stream, chosen, "cpu")
        strategy.train(benchmark(Stream(load("digits"), config)).train_stream)
        kept[name] = strategy
    gem = next(plugin for plugin in kept["gem"].plugins if hasattr(plugin, "memory_x"))
    assert [len(images) for images in gem.memory_x.values()] == [6, 6]
    assert len(kept["mer"].buffer) == len(kept["lamaml"].buffer) == 12


def test_baselines_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(baselines.STREAMS, "rotations", changed(TOY, per_task=60, batch=10))
    asked = ["--data", "digits", "--runs", str(tmp_path), "--out", str(tmp_path / "found"), "--seeds", "2"]
    asked += ["--streams", "rotations", "--strategies", "gem", "--device", "cpu"]
    baselines.main(asked)
    row = json.loads((tmp_path / "found" / "rotations.json").read_text())["rows"]["gem"]
    assert (row["ra"]["n"], row["paper"]["ra"], row["settings"]["strength"]) == (2, 67.38, 0.5)
    runs = {path.name: path.read_bytes() for path in (tmp_path / "baselines-rotations").iterdir()}
    matrices = [json.loads(runs[f"gem-{seed}.json"])["matrix"] for seed in (0, 1)]
    assert row["bti"]["mean"] == pytest.approx(sum(metrics(matrix).bti for matrix in matrices) / 2)
    for path in ("baselines-rotations/gem-0.json", "baselines-rotations/gem-1.json", "found/rotations.json"):
        (tmp_path / path).unlink()
    baselines.main([*asked, "--only", "1"])
    assert [path.name for path in (tmp_path / "baselines-rotations").iterdir()] == ["gem-1.json"]
    assert not (tmp_path / "found/rotations.json").exists()
    capsys.readouterr()
    baselines.main(asked)
    assert "seed 1 task" not in capsys.readouterr().out  # it was there
    assert json.loads((tmp_path / "baselines-rotations" / "gem-1.json").read_bytes())["matrix"] == matrices[1]
    assert json.loads((tmp_path / "found" / "rotations.json").read_text())["rows"]["gem"]["ra"] == row["ra"]
    with pytest.raises(RecollectError, match=r"gem-0\.json was run with other settings"):
        baselines.main([*asked, "--set", "lr=0.5"])


# --- the example, and what the docs show -------------------------------------------------------------------------------


def test_the_example(capsys):
    found = avalanche_example.main(["--tasks", "3"])
    assert list(found) == ["replay of real images", "replay of memories", "compress-then-recall"]
    assert all(accuracy > 40 for accuracy, _ in found.values())
    assert found["compress-then-recall"][1] == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_search_is_that_of_the_file():
    docs = (ROOT / "docs" / "avalanche.md").read_text()
    rows = json.loads((ROOT / "results" / "searches.json").read_text())["baselines"]["rows"]
    for row in rows:
        assert f"{row['ra']:.1f}" in docs
    for name in ("gem", "mer", "lamaml"):
        found = [row for row in rows if (row["strategy"], row["stream"]) == (name, "rotations")]
        assert baselines.SETTINGS[name]["rotations"] == max(found, key=lambda row: row["ra"])["settings"]


def test_the_docs_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "avalanche.md").read_text(), re.S)
    exec(compile(code, "avalanche.md", "exec"), {})
    assert Memory.load(tmp_path / "task-0.safetensors").header.class_names
