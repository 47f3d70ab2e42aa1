"""GEM, MER and La-MAML beside our learners: Avalanche's own strategies on our streams, judged as all others are.

    python experiments/baselines.py --root DATA --runs runs --out results/streams [--streams rotations many --seeds 5]
    python experiments/baselines.py --root DATA --runs /tmp/search --out /tmp/search --streams rotations --strategies gem \
      --seeds 1 --on validation --set lr=0.03 glances=1

Each strategy has the stream's network and buffer (in images: GEM the same number of each task, the others a reservoir), sees
each batch once, and is told the task where our own learners are (on CIFAR-100, logits of other tasks' classes are masked). A run
of one (stream, strategy, seed) is a file in RUNS/baselines-STREAM, and is not run again; killed, it goes on after the last task
that it finished (a .pt beside). A row for each strategy goes into OUT/STREAM.json. How the settings were chosen is in
docs/avalanche.md. Needs the extra `avalanche`.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision_cpu  # noqa: F401
from avalanche.benchmarks.utils.classification_dataset import ClassificationDataset
from avalanche.benchmarks.utils.data_attribute import DataAttribute, TaskLabels
from avalanche.core import SupervisedPlugin
from avalanche.training.plugins import GEMPlugin
from avalanche.training.supervised import GEM, MER
from avalanche.training.supervised.lamaml_v2 import LaMAML
from record import learner_row, write
from torch import Tensor, nn

from recollect.avalanche import TaskNetwork, benchmark
from recollect.config import changed, to_json
from recollect.continual.config import DATASETS, STREAMS, ContinualConfig
from recollect.continual.learners import accuracy
from recollect.continual.metrics import metrics, square
from recollect.continual.run import fingerprint
from recollect.continual.streams import Stream
from recollect.data import Images, load
from recollect.devices import find_device
from recollect.errors import RecollectError
from recollect.files import read_json, write_json
from recollect.runs import environment, load_checkpoint, previous, save_checkpoint
from recollect.show.streams import PAPER

NAMES = {"gem": "GEM", "mer": "MER", "lamaml": "La-MAML"}
_GEM = {"lr": 0.1, "strength": 0.5, "glances": 5}
_MER = {"lr": 0.1, "beta": 0.03, "gamma": 1.0, "inner": 5, "replay": 10, "glances": 1}
_LAMAML = {
    "alpha": 0.15, "lr_alpha": 0.1, "inner": 10, "second_order": 0, "clip": 2.0, "replay": 10, "glances": 5,
}  # fmt: skip
_LAMAML_CIFAR = {
    "alpha": 0.1, "lr_alpha": 0.25, "inner": 5, "second_order": 1, "clip": 1.0, "replay": 10, "glances": 10,
}  # fmt: skip
SETTINGS: dict[str, dict[str, dict[str, float]]] = {
    "gem": {"rotations": _GEM, "permutations": _GEM, "many": _GEM, "cifar100": {"lr": 0.03, "strength": 0.5, "glances": 2}},
    "mer": {"rotations": _MER, "permutations": _MER, "many": _MER, "cifar100": _MER | {"lr": 0.01, "beta": 0.1}},
    "lamaml": {
        "rotations": _LAMAML,
        "permutations": _LAMAML,
        "many": _LAMAML | {"alpha": 0.1, "glances": 10},
        "cifar100": _LAMAML_CIFAR,
    },
}


class Glances(SupervisedPlugin):
    """Each batch several times in a row, as the single pass of La-MAML's authors has it."""

    def __init__(self, times: int):
        super().__init__()
        self.times = times

    def before_training_exp(self, strategy: Any, *_: Any, **__: Any) -> None:
        strategy.dataloader = [batch for batch in strategy.dataloader for _ in range(self.times)]


def make(name: str, model: nn.Module, stream: Stream, chosen: dict[str, float], device: str) -> Any:
    """One of Avalanche's strategies, with the stream's buffer."""
    config = stream.config
    options: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=chosen.get("lr", 0.1)),  # La-MAML learns its own rates
        "criterion": nn.CrossEntropyLoss(),
        "train_mb_size": config.stream.batch,
        "device": device,
        "plugins": [Glances(int(chosen["glances"]))],
        "evaluator": None,
    }
    if name == "gem":
        return GEM(patterns_per_exp=config.buffer.images // stream.tasks, memory_strength=chosen["strength"], **options)
    if name == "mer":
        return MER(
            mem_size=config.buffer.images, batch_size_mem=int(chosen["replay"]), n_inner_steps=int(chosen["inner"]),
            beta=chosen["beta"], gamma=chosen["gamma"], **options,
        )  # fmt: skip
    kind = CapturedLaMAML if device.startswith("cuda") else LaMAML
    return kind(
        max_buffer_size=config.buffer.images, buffer_mb_size=int(chosen["replay"]), n_inner_updates=int(chosen["inner"]),
        second_order=bool(chosen["second_order"]), grad_clip_norm=chosen["clip"], lr_alpha=chosen["lr_alpha"],
        alpha_init=chosen["alpha"], **options,
    )  # fmt: skip


class CapturedLaMAML(LaMAML):
    """Its iteration as a CUDA graph, one for each shape of batches: the strategy's own code without Python's time."""

    WARM = 3  # iterations as they are before one is captured

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.stream = torch.cuda.Stream()
        self.seen: dict[Any, int] = {}
        self.graphs: dict[Any, tuple[torch.cuda.CUDAGraph, list[Tensor]]] = {}
        self.sample = self.buffer.get_buffer_batch

    def _inner_updates(self, **_: Any) -> None:
        """Those and the outer one."""
        replayed = self.sample() if self.clock.train_exp_counter else ()
        inputs = [self.mb_x, self.mb_y, self.mb_task_id, *replayed]
        shapes = tuple(part.shape for part in inputs)
        self.seen[shapes] = self.seen.get(shapes, 0) + 1
        self.stream.wait_stream(torch.cuda.current_stream())
        if self.seen[shapes] <= self.WARM:
            with torch.cuda.stream(self.stream):
                self._whole(inputs)
        else:
            if shapes not in self.graphs:
                graph, held = torch.cuda.CUDAGraph(), [part.clone() for part in inputs]
                with torch.cuda.graph(graph, stream=self.stream):
                    self._whole(held)
                self.graphs[shapes] = graph, held
            graph, held = self.graphs[shapes]
            for kept, part in zip(held, inputs, strict=True):
                kept.copy_(part)
            graph.replay()
        torch.cuda.current_stream().wait_stream(self.stream)

    def _whole(self, inputs: list[Tensor]) -> None:
        """An iteration that leaves parameters where they were in memory."""
        self.mbatch = inputs[:3]
        self.buffer.get_buffer_batch = lambda: inputs[3:]
        places = [parameter.data for parameter in self.model.parameters()]
        super()._inner_updates()
        super()._outer_update()
        for parameter, place in zip(self.model.parameters(), places, strict=True):
            parameter.data = place.copy_(parameter.data)
        self.meta_losses, self.initial_fast_params, self.loss = [], {}, self.loss.detach()

    def _outer_update(self, **_: Any) -> None:
        """Done with the inner ones."""


class Judged:
    """A strategy's network, as our learners are judged."""

    def __init__(self, model: nn.Module, stream: Stream, device: str):
        self.model, self.stream, self.device = model, stream, device

    def predict(self, images: Tensor, task: int) -> Tensor:
        self.model.eval()
        tasks = torch.full((len(images),), task, device=self.device)
        with torch.no_grad():
            return self.model(self.stream.preprocess(images.to(self.device)), tasks).argmax(1)


def state(strategy: Any) -> dict[str, Any]:
    """All that a strategy carries from one task to the next, in tensors and numbers."""
    clock = {name: value for name, value in vars(strategy.clock).items() if isinstance(value, int)}
    found: dict[str, Any] = {"model": dict(strategy.model.state_dict()), "clock": clock, "random": torch.get_rng_state()}
    for plugin in strategy.plugins:
        if isinstance(plugin, GEMPlugin):
            found["gem"] = [plugin.memory_x, plugin.memory_y, plugin.memory_tid]
    if policy := _reservoir(strategy):
        kept, labels, tasks = zip(*policy.buffer, strict=True)
        found["reservoir"] = [torch.stack(kept), list(labels), list(tasks), policy._buffer_weights]
    if isinstance(strategy, LaMAML):
        found["rates"] = dict(strategy.alpha_params.state_dict())
    return found


def restore(strategy: Any, saved: dict[str, Any]) -> None:
    strategy.model.load_state_dict(saved["model"])
    vars(strategy.clock).update(saved["clock"])
    for plugin in strategy.plugins:
        if isinstance(plugin, GEMPlugin):
            plugin.memory_x, plugin.memory_y, plugin.memory_tid = saved["gem"]
    if policy := _reservoir(strategy):
        images, labels, tasks, policy._buffer_weights = saved["reservoir"]
        attributes = [DataAttribute(labels, "targets"), TaskLabels(tasks)]
        policy.buffer = ClassificationDataset([list(zip(images, labels, strict=True))], data_attributes=attributes)
    if isinstance(strategy, LaMAML):
        strategy.alpha_params_initialized = True
        for name, value in saved["rates"].items():  # in their order, which a whole dict would lose
            strategy.alpha_params[name] = nn.Parameter(value)
    torch.set_rng_state(saved["random"])


def _reservoir(strategy: Any) -> Any:
    return strategy.buffer.storage_policy if isinstance(strategy, MER | LaMAML) else None


def run(
    images: Images, config: ContinualConfig, name: str, seed: int, chosen: dict[str, float], device: str,
    progress: Callable[[str], None] = lambda _: None, checkpoint: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The accuracy matrix of one strategy on one seed's stream; from the last task that a checkpoint has."""
    began = time.perf_counter()
    torch.manual_seed(seed)  # Avalanche draws from the default generator
    judge = Stream(images, config, seed, device=device)
    model = TaskNetwork(judge)
    strategy = make(name, model, judge, chosen, device)
    learner, rows, seconds = Judged(model, judge, device), [], 0.0
    asked = {"strategy": name, "seed": seed, "on": config.stream.on, "settings": chosen}
    experiences = list(benchmark(Stream(images, config, seed)).train_stream)
    stream = {"config": to_json(config), "images": fingerprint(images)}
    if checkpoint and (saved := load_checkpoint(checkpoint, asked=dict, stream=dict)):
        if (saved["asked"], saved["stream"]) != (asked, stream):
            raise RecollectError(f"{checkpoint} was begun with other settings: give another folder (--runs)")
        rows, seconds = saved["rows"], saved["seconds"]
        restore(strategy, saved["state"])
    began -= seconds
    for task, experience in enumerate(experiences[len(rows) :], len(rows)):
        strategy.train(experience, shuffle=False)
        rows.append([accuracy(learner, judge, seen) for seen in range(task + 1)])
        seconds = time.perf_counter() - began
        if checkpoint:
            kept = {"asked": asked, "stream": stream, "rows": rows, "seconds": seconds, "state": state(strategy)}
            save_checkpoint(checkpoint, kept)
        progress(f"task {task + 1} of {judge.tasks}: {sum(rows[-1]) / len(rows[-1]):.1f} %, {seconds:.0f} s")
    matrix = square(rows)
    return asked | {"matrix": matrix, "metrics": to_json(metrics(matrix)), "seconds": round(seconds, 1)}


def summary(results: list[dict[str, Any]], stream: str, name: str) -> dict[str, Any]:
    told = {"settings": results[0]["settings"], "paper": PAPER[stream][NAMES[name]]._asdict()}
    return told | learner_row(results) | {"environment": environment()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder with the official files of MNIST and CIFAR-100")
    parser.add_argument("--data", help="stream another dataset")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the tables, a file each stream")
    streams = list(SETTINGS["gem"])
    parser.add_argument("--streams", nargs="+", choices=streams, default=streams)
    parser.add_argument("--strategies", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", type=int, nargs="+", help="run these seeds, and stop: for several processes")
    parser.add_argument("--on", choices=("test", "validation"), default="test")
    parser.add_argument("--tasks", type=int, help="fewer, to try it out")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the strategies")
    asked = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="avalanche")
    device = find_device(asked.device)
    given = {name: float(value) for name, value in (each.split("=") for each in asked.set)}
    for stream in asked.streams:
        config = changed(STREAMS[stream], on=asked.on, tasks=asked.tasks or STREAMS[stream].stream.tasks)
        images = load(asked.data or DATASETS[stream], root=asked.root)
        for name in asked.strategies:
            chosen = SETTINGS[name][stream] | given
            results = []
            for seed in asked.only or range(asked.seeds):
                path = asked.runs / f"baselines-{stream}" / f"{name}-{seed}.json"
                what = f"{stream}, {NAMES[name]}, seed {seed}"
                if not path.exists():
                    found = run(
                        images, config, name, seed, chosen, device, lambda line, w=what: print(w, line, flush=True),
                        path.with_suffix(".pt"),
                    )  # fmt: skip
                    write_json(path, found | {"device": device, "environment": environment()})
                for done in (path.with_suffix(".pt"), previous(path.with_suffix(".pt"))):
                    done.unlink(missing_ok=True)
                results.append(read_json(path))
                if (results[-1]["settings"], results[-1]["on"]) != (chosen, asked.on):
                    raise RecollectError(f"{path} was run with other settings: give another folder (--runs)")
            if asked.only:
                continue
            row = summary(results, stream, name)
            print(f"{stream}, {NAMES[name]}: RA {row['ra']['mean']:.2f}, BTI {row['bti']['mean']:.2f}", flush=True)
            path = asked.out / f"{stream}.json"
            written = read_json(path) if path.exists() else {"config": to_json(config), "rows": {}}
            written["rows"][name] = row
            write(path, written)


if __name__ == "__main__":
    main()
