"""Avalanche with distilled memories: three uses of one small buffer on a stream of permuted digits.

    python experiments/avalanche_example.py --tasks 3

One network with Avalanche's replay of real images; the same with memories in the buffer, which recall more images from the same
floats; and compress-then-recall, which trains a fresh network for each task from its memory. Half a minute on a CPU. Any
benchmark with task labels goes in the place of `benchmark(stream)`.
"""

import argparse
import warnings
from typing import Any

import torch
import torchvision_cpu  # noqa: F401
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.training.plugins import EvaluationPlugin, ReplayPlugin
from avalanche.training.supervised import Naive

from recollect import load
from recollect.avalanche import BTI, CompressThenRecall, DistilledBuffer, TaskNetwork, benchmark
from recollect.config import changed
from recollect.continual.config import ContinualConfig
from recollect.continual.streams import Stream

CONFIG = changed(
    ContinualConfig(),
    kind="permutations", per_task=200, batch=20, preprocess="normalise", network="mlp:width=64,depth=1", bases=12,
    downsample=1, init="unit", inner_steps=8, inner_lr=0.1, outer_per_batch=2, outer_optimiser="adam", outer_lr=0.05,
    outer_momentum=0.9,
)  # fmt: skip


def replay(stream: Stream, buffer: Any = None) -> Naive:
    """Avalanche's own, with its own buffer or with ours."""
    network, size = TaskNetwork(stream), stream.config.buffer.images
    return Naive(
        model=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        train_mb_size=stream.config.stream.batch,
        eval_mb_size=256,
        plugins=[ReplayPlugin(mem_size=size, storage_policy=buffer)],
        evaluator=evaluator(),
    )


def evaluator() -> EvaluationPlugin:
    return EvaluationPlugin(accuracy_metrics(stream=True), BTI(), loggers=[])


def main(arguments: list[str] | None = None) -> dict[str, tuple[float, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=3)
    tasks = parser.parse_args(arguments).tasks
    warnings.filterwarnings("ignore", message="No loggers")
    torch.manual_seed(0)
    config = changed(CONFIG, tasks=tasks, buffer=20 * tasks)
    stream = Stream(load("digits"), config)
    scenario = benchmark(stream)
    strategies = {
        "replay of real images": replay(stream),
        "replay of memories": replay(stream, DistilledBuffer(scenario, config)),
        "compress-then-recall": CompressThenRecall(benchmark=scenario, config=config, evaluator=evaluator()),
    }
    found = {}
    for name, strategy in strategies.items():
        for experience in scenario.train_stream:
            strategy.train(experience)
            measured = strategy.eval(scenario.test_stream[: experience.current_experience + 1])
        accuracy = next(value for key, value in measured.items() if key.startswith("Top1_Acc_Stream"))
        found[name] = 100 * accuracy, 100 * measured["BTI/eval_phase/test_stream"]
        print(f"{name:24} RA {found[name][0]:5.1f} %   BTI {found[name][1]:+5.1f}")
    return found


if __name__ == "__main__":
    main()
