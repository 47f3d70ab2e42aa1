"""For users of Avalanche (pip install 'recollect[avalanche]'): our streams as its benchmarks, compress-then-recall as a strategy
for any benchmark with task labels, memories as a buffer for its replay, and the paper's BTI as a metric.

All distillation is that of `recollect.continual`; here it is only fed by another loop. Images come as the benchmark gives them,
prepared for a network, and are not prepared again.
"""

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, StackDataset

from recollect.continual.config import ContinualConfig, check
from recollect.continual.learners import Compress
from recollect.continual.streams import Batch, Stream, as_pixels
from recollect.data.preprocess import Preprocess
from recollect.errors import RecollectError
from recollect.memory import Memory
from recollect.nets import Network, Shape
from recollect.seeds import Purpose, network_seed, seeded

try:
    from avalanche.benchmarks import CLExperience, CLScenario, benchmark_from_datasets, with_classes_timeline, with_task_labels
    from avalanche.benchmarks.utils import ConstantSequence, DataAttribute, TaskLabels, concat_datasets
    from avalanche.benchmarks.utils.classification_dataset import ClassificationDataset
    from avalanche.benchmarks.utils.data_attribute import has_task_labels
    from avalanche.benchmarks.utils.transform_groups import TransformGroups
    from avalanche.evaluation.metrics import StreamBWT
    from avalanche.models import MultiTaskModule
    from avalanche.training.storage_policy import ExemplarsBuffer
    from avalanche.training.templates import SupervisedTemplate
except ModuleNotFoundError as error:
    raise RecollectError(f"recollect.avalanche needs {error.name}: pip install 'recollect[avalanche]'") from None


def benchmark(stream: Stream) -> CLScenario:
    """A stream as a benchmark: an experience for each task, with the task's number as its label.

    The stream is used up: its batches are in `train_stream`, in their order (`strategy.train(experience, shuffle=False)` keeps
    to it), what each task is judged by in `test_stream`. Images are as a network sees them, by `stream.preprocess`.
    """
    train, test = [], []
    for task in range(stream.tasks):
        seen, judged = [torch.cat(parts) for parts in zip(*stream.task(task), strict=True)], stream.test(task)
        for found, images, labels in ((train, *seen[:2]), (test, judged.images.cpu(), judged.labels)):
            found.append(_dataset(images, labels.tolist(), task, stream.preprocess))
    return cast(CLScenario, with_classes_timeline(with_task_labels(benchmark_from_datasets(train=train, test=test))))


def _dataset(
    images: Tensor, labels: Tensor | list[int], task: int | None, prepare: Preprocess | None = None
) -> ClassificationDataset:
    """In Avalanche's form, each image prepared when it is asked for; with a task's label a sample is (image, label, task)."""
    attributes = [DataAttribute(cast(Any, [int(label) for label in labels]), "targets")]
    if task is not None:
        attributes.append(TaskLabels(ConstantSequence(task, len(labels))))
    shown: Any = StackDataset(cast(Any, images), cast(Any, labels))
    return ClassificationDataset([shown], data_attributes=attributes, transform_groups=TransformGroups({"train": prepare}))


class TaskNetwork(MultiTaskModule):
    """The network of a stream's config for Avalanche's own strategies: one for all tasks, with the weights that our baselines
    start from (La-MAML draws its own anew); where tasks have classes of their own, logits of other tasks' are masked, in training
    and at test."""

    masks: Tensor

    def __init__(self, stream: Stream):
        super().__init__()
        network = Network(stream.config.inner.network, stream.shape, stream.classes)
        self.network = network.module
        self.network.load_state_dict(network.fresh(network_seed(stream.seed, Purpose.FRESH)))
        self.register_buffer("masks", stream.masks)

    def adaptation(self, experience: CLExperience) -> None:
        """Nothing grows: all classes are known."""

    def forward(self, x: Tensor, task_labels: Tensor) -> Tensor:
        return self.network(x).masked_fill(~self.masks[task_labels], -torch.inf)


class _Tasks(Stream):
    """A benchmark as far as a learner must know it. The images come from Avalanche's loop, an experience for each task."""

    def __init__(self, benchmark: CLScenario, config: ContinualConfig, seed: int, preprocess: Preprocess | None):
        check(config)
        experiences = list(benchmark.streams["train"])
        if not experiences:
            raise RecollectError("the benchmark has no training experiences: give one with a task at least")
        for number, each in enumerate(experiences):
            if not len(each.dataset):
                raise RecollectError(f"experience {number} has no samples: leave it out of the benchmark")
        self.config, self.seed, self.name = config, seed, "a benchmark of Avalanche"
        self.shape = _shape(experiences[0].dataset[0][0])
        self.task_classes = [tuple(sorted({int(label) for label in each.dataset.targets})) for each in experiences]
        self.tasks, self.angles = len(experiences), None
        self.classes = max(map(max, self.task_classes)) + 1
        self.class_names = tuple(map(str, range(self.classes)))
        self.preprocess, self.prepare = preprocess or as_pixels(self.shape[0]), nn.Identity()  # they come prepared
        self._batches = [-(-len(each.dataset) // config.stream.batch) for each in experiences]

    def batches(self, number: int) -> int:
        return self._batches[number]


def _shape(image: Any) -> Shape:
    if not isinstance(image, Tensor) or image.ndim != 3 or not image.is_floating_point():
        found = f"{list(image.shape)} {image.dtype}" if isinstance(image, Tensor) else type(image).__name__
        raise RecollectError(
            f"the benchmark's images are {found}: its transforms must give float tensors [channels, height, width]"
        )
    return cast(Shape, tuple(image.shape))


class _Learner(Compress):
    """Compress-then-recall, fed with experiences of a benchmark in their order."""

    def expect(self, experience: Any) -> None:
        """Refuse an experience that is not the next one."""
        number, due = experience.current_experience, len(self.memories)
        if number != due:
            next_one = f"number {due} is due" if due < self.stream.tasks else "all have been seen"
            raise RecollectError(
                f"experience {number} came, but {next_one}: train on benchmark.train_stream in its order, each once"
            )

    def see(self, images: Tensor, labels: Tensor) -> None:
        task = torch.full_like(labels, len(self.memories), device="cpu")
        self.observe(Batch(images.cpu(), labels.cpu(), task))


class _Recall(MultiTaskModule):
    """What Avalanche takes for the model: at test, the network that the memory of each image's task trains."""

    def __init__(self, learner: _Learner, places: dict[int, int]):
        super().__init__()
        self.learner, self.places = learner, places

    def adaptation(self, experience: CLExperience) -> None:
        """Nothing grows."""

    def forward(self, x: Tensor, task_labels: Tensor) -> Tensor:
        """[N, C, H, W] and [N] -> logits [N, classes]; those of other tasks' classes are -inf, a task yet to come is guessed."""
        logits = torch.full((len(x), self.learner.stream.classes), -torch.inf, device=x.device)
        for label in task_labels.unique().tolist():
            if label not in self.places:
                known = ", ".join(map(str, self.places))
                raise RecollectError(f"no training experience has task label {label}: the benchmark has {known}")
            task = self.places[label]
            rows = (task_labels == label).nonzero()
            columns = torch.tensor(self.learner.stream.task_classes[task], device=x.device)
            logits[rows, columns] = 0.0
            if task < len(self.learner.memories):
                with torch.enable_grad():  # Avalanche evaluates without, and a network may have to be trained first
                    logits[rows, columns] = self.learner.logits(x[rows.flatten()], task)
        return logits


class CompressThenRecall(SupervisedTemplate):
    """Compress-then-recall as a strategy: distils every experience while it streams by, keeps its memory and lets the images
    go; evaluated on a task, trains a fresh network on what the task's memory recalls. It trains nothing on the stream itself:
    metrics of the training phase have accuracy 0 and loss nan.

    Arguments:
        benchmark: whose `train_stream` will be trained on, each experience once and in order; each must have one task label
            of its own.
        config: batch, buffer, network, and all of distillation; what describes our own streams (kind, tasks, per_task, ...)
            is not looked at.
        preprocess: how the benchmark normalised its pixels, for the memories' files. Default: not at all, pixels in 0..1.
        options: plugins, evaluator, eval_every, eval_mb_size (default: 256), as of any strategy.
    """

    def __init__(
        self,
        *,
        benchmark: CLScenario,
        config: ContinualConfig,
        seed: int = 0,
        preprocess: Preprocess | None = None,
        device: "str | torch.device" = "cpu",
        **options: Any,
    ):
        places = _places(benchmark)
        self.learner = _Learner(_Tasks(benchmark, config, seed, preprocess), config, str(device))
        self.memories: list[Memory] = self.learner.memories
        """one for each experience so far"""
        model, batch = _Recall(self.learner, places), config.stream.batch
        options = {"eval_mb_size": 256, "device": device} | options
        super().__init__(model=model, optimizer=cast(Any, None), train_mb_size=batch, **options)  # there is nothing to optimise

    def check_model_and_optimizer(self, *_: Any, **__: Any) -> None:
        """Neither changes."""

    def _before_training_exp(self, **kwargs: Any) -> None:
        self.learner.expect(self.experience)
        super()._before_training_exp(**kwargs)

    def _train_exp(self, *arguments: Any, **kwargs: Any) -> None:
        super()._train_exp(*arguments, **kwargs)
        self.learner.end_task()

    def training_epoch(self, **kwargs: Any) -> None:
        for batch in self.dataloader:
            if self._stop_training:
                break
            self.mbatch = batch
            self._unpack_minibatch()
            self._before_training_iteration(**kwargs)
            self.learner.see(self.mb_x, self.mb_y)
            self.mb_output = torch.full_like(self.mb_y, -1)  # no network, no answer
            self.loss = torch.full((1,), math.nan)
            self._after_training_iteration(**kwargs)


def _places(benchmark: CLScenario) -> dict[int, int]:
    """Task label -> number of its training experience; refuses a benchmark that does not tell its tasks apart."""
    places: dict[int, int] = {}
    for number, experience in enumerate(benchmark.streams["train"]):
        labels = list(getattr(experience, "task_labels", []))
        if len(labels) != 1:
            has = f"the task labels {labels}" if labels else "no task label"
            raise RecollectError(
                f"experience {number} has {has}, and compress-then-recall is told the task at test: give each experience a "
                "label of its own (avalanche.benchmarks.task_incremental_benchmark)"
            )
        if places.setdefault(labels[0], number) != number:
            raise RecollectError(
                f"experiences {places[labels[0]]} and {number} both have task label {labels[0]}, but a task has one "
                "memory: give each experience a label of its own (task_incremental_benchmark(..., reset_task_labels=True))"
            )
    return places


class DistilledBuffer(ExemplarsBuffer):
    """A storage policy for `ReplayPlugin`: instead of a few real images of each experience, all that its memory recalls.

    `ReplayPlugin(mem_size=config.buffer.images, storage_policy=DistilledBuffer(benchmark, config))`: all memories together
    have the floats of that many images. An experience is distilled when it has been trained on, in one pass over its images.
    Arguments as of `CompressThenRecall`; task labels are not needed.
    """

    def __init__(
        self,
        benchmark: CLScenario,
        config: ContinualConfig,
        seed: int = 0,
        preprocess: Preprocess | None = None,
        device: "str | torch.device" = "cpu",
    ):
        super().__init__(config.buffer.images)
        self.learner = _Learner(_Tasks(benchmark, config, seed, preprocess), config, str(device))
        self.memories: list[Memory] = self.learner.memories
        """one for each experience so far"""
        self._recalled: list[ClassificationDataset] = []

    def post_adapt(self, agent_state: Any, exp: Any) -> None:
        """Distil the experience that has been trained on."""
        learner, number = self.learner, len(self.memories)
        learner.expect(exp)
        order = seeded(learner.stream.seed, Purpose.EXPERIENCE, number)
        samples: Iterable[Any] = DataLoader(
            exp.dataset, learner.config.stream.batch, shuffle=True, generator=order, collate_fn=exp.dataset.collate_fn
        )
        for images, labels, *_ in samples:
            learner.see(images, labels)
        learner.end_task()
        recalled, places = self.memories[-1].recall()
        labels = torch.tensor(learner.stream.task_classes[number])[places]
        alike = labels if isinstance(exp.dataset[0][1], Tensor) else labels.tolist()  # they go into one batch
        task = exp.dataset.targets_task_labels[0] if has_task_labels(exp.dataset) else None
        self._recalled.append(_dataset(recalled, alike, task))
        self.buffer = concat_datasets(self._recalled)

    def update(self, strategy: Any, **_: Any) -> None:
        """What `ReplayPlugin` calls."""
        self.post_adapt(strategy, strategy.experience)

    def resize(self, strategy: Any, new_size: int) -> None:
        if new_size != self.max_size:
            raise RecollectError(
                f"a buffer of memories for {self.max_size} images cannot be made {new_size}: give buffer {new_size} from "
                "the start"
            )


class BTI(StreamBWT):
    """The paper's backward transfer and interference: the mean over all T tasks seen of R[T, t] - R[t, t], of which the last
    is 0; Avalanche's `StreamBWT` has the same sum over T - 1. In fractions, as all of Avalanche's accuracies.

    Evaluate after every experience: where R[t, t] was never measured, it is nan.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trained: set[int] = set()

    def before_training_exp(self, strategy: Any) -> None:
        super().before_training_exp(strategy)
        self.trained.add(strategy.experience.current_experience)

    def exp_result(self, k: int) -> float | None:
        """R[T, t] - R[t, t]; None for a task yet to come."""
        if k not in self.trained:
            return None
        before = self.forgetting.initial.get(k, math.nan)
        return self.forgetting.last.get(k, before) - before

    def __str__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "BTI"
