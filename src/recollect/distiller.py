"""The gradient of one outer step: draw, recall, objective (lines 4 to 15 of Algorithm 1), and the memory that a state stands for.

Every outer step draws from generators of its own, keyed by (seed, step), so that a resumed run needs no generator's state.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import recollect
from recollect import distributed, outer, queries, starts
from recollect.budget import PRECISIONS, Budget
from recollect.config import DistillConfig, Recipe, to_json
from recollect.data import augment
from recollect.data.images import Images, Split
from recollect.data.preprocess import Preprocess
from recollect.decisions import MakesQuery, budget, query_of, start_memory, training_split
from recollect.devices import device_name
from recollect.errors import RecollectError
from recollect.header import Header
from recollect.memory import Memory, recall
from recollect.nets import Network, threads_for
from recollect.objectives import OBJECTIVES, ByBatch, ByNetwork, Chance, Examples, Objective, Source
from recollect.objectives.unrolled import Unrolled
from recollect.outer import State
from recollect.own import Optimiser, blamed, called, checked
from recollect.queries import Pictures, Targets, Vectors
from recollect.runs import Signals
from recollect.seeds import Purpose, network_seed, seeded
from recollect.training import train

MakesObjective = Callable[..., Objective]


class Draws(NamedTuple):
    """What one outer step draws: labels, a transform shared by all its images, real images, and what the objective needs."""

    labels: Tensor
    shared: augment.Drawn
    shots: Tensor
    """rows of the images that the memory is asked with, or with whose vectors or targets it is, class by class; none where it is
    asked with labels"""
    seen: augment.Drawn
    """how the encoder sees them"""
    rows: Tensor
    truth: Tensor
    """labels of the real images, or their targets"""
    objective: Any


class Distiller:
    """The data, the query kind and the objective of one run, and the gradient they give."""

    def __init__(
        self,
        images: Images,
        config: DistillConfig,
        preprocess: Preprocess,
        network: Network,
        objective: MakesObjective | None = None,
        query: MakesQuery | None = None,
        augmented: augment.Own | None = None,
        optimiser: Optimiser | None = None,
    ):
        self.images, self.config, self.network, self.device = images, config, network, config.run.device
        self.inner = replace(config.inner, augment=augmented) if augmented else config.inner
        self.optimiser, self.own = optimiser, called(objective).removeprefix("custom ") if objective else ""
        self.stated, self.preprocess = preprocess, preprocess.to(self.device)  # for files, for images
        self.shape, self.classes = images.shape, images.classes
        real = training_split(images, config)
        self.pixels, self.labels = real.images.to(self.device), real.labels
        self.by_class = [(real.labels == label).nonzero().flatten() for label in range(images.classes)]
        self.query = query_of(config, images, query)
        self.targets = prepared_targets(self.query, real)
        self.beside = real.vectors if isinstance(self.query, Vectors) and self.query.shots else self.targets
        """what a query is made of beside its label or picture: vectors or targets of the training images, [N, ...]"""
        given = network, self.inner, self.device, config.run.compute, config.run.compile
        with self._blamed():
            self.objective = objective(*given) if objective else self._named_objective(real, *given)
        self.ranks = distributed.current()
        if self.ranks.world > 1:
            self._share_out()
        self.draws_ahead = self.device.startswith("cuda")
        """while the device is busy"""
        self.ahead: dict[int, Draws] = {}

    def _named_objective(self, real: Split, *given: Any) -> Objective:
        matching = self.config.matching
        source = Source(real.fingerprint, self.stated.to_json()) if matching.experts else None
        return OBJECTIVES[self.config.outer.objective](*given, matching, source)

    def _share_out(self) -> None:
        what = self.config.run.shard
        if not isinstance(self.objective, ByNetwork if what == "networks" else ByBatch):
            called = what if what == "networks" else "batches"
            raise RecollectError(
                f"objective {self.config.outer.objective} has no {called} to share out to {self.ranks.world} processes: "
                "start it without torchrun"
            )
        if what == "batch" and isinstance(self.objective, ByBatch):
            self.objective.by_batch(self.ranks)

    def _blamed(self) -> AbstractContextManager[None]:
        return blamed(f"objective {self.own}") if self.own else nullcontext()

    def threads(self) -> AbstractContextManager[None]:
        """As many as pay for its steps; a GPU, or an encoder with convolutions, may have them all."""
        alone = self.draws_ahead or isinstance(self.query, Pictures)
        return nullcontext() if alone else threads_for(self.network)

    @property
    def share(self) -> slice:
        """Of the inner networks, those that this process computes."""
        return self.ranks.share(self.config.run.shard)

    @property
    def needs(self) -> int | None:
        """About how many bytes of GPU memory an outer step takes; None where nobody knows."""
        if not (self.draws_ahead and isinstance(self.objective, Unrolled)):
            return None
        chosen = self._groups
        query = chosen * self.config.budget.real_per_class
        networks = len(range(self.config.inner.networks_per_step)[self.share]) or 1
        unrolls = self.objective.needs(chosen * (self.config.inner.per_class or 0), query, networks)
        return unrolls + self.pixels.numel() + 2 * query * self.pixels[0].numel() * 4

    # --- the beginning, and the end ----------------------------------------------------------------------------------------

    def begin(self) -> State:
        """Fresh bases and addressing, or those of the memory to go on from, and the outer optimiser."""
        config = self.config
        bases, addressing = self._fresh()
        bases = bases.to(self.device).requires_grad_()
        addressing = addressing.to(self.device).requires_grad_(config.memory.addressing == "learned")
        encoder, before = self.query.fresh(config.run.seed, self.device), {}
        if config.run.start:
            start = start_memory(config, self.images, self.query)
            before = start.header.made
            learned = [start.bases, start.addressing, *start.encoder.values()]
            with torch.no_grad():  # one of labels has no encoder
                for mine, theirs in zip([bases, addressing, *encoder.values()], learned, strict=bool(start.encoder)):
                    mine.copy_(theirs)
        state = outer.begin(bases, addressing, encoder, config.outer, config.query.encoder_lr, self.optimiser)
        state.before = before
        return state

    def _fresh(self) -> tuple[Tensor, Tensor]:
        sizes, generator = self.config.memory, seeded(self.config.run.seed, Purpose.START)
        bases, addressing = starts.fresh(sizes, budget(self.config, self.images, self.query), generator)
        if sizes.init == "samples":
            rows = torch.cat([of[torch.randperm(len(of), generator=generator)[: sizes.matrices]] for of in self.by_class])
            pixels = self.preprocess(self.pixels[rows.to(self.device)]).cpu()
            starts.begin_as_samples(bases, addressing, pixels, self.labels[rows], sizes.addressing == "one-hot")
        return bases, addressing

    def to_dict(self, state: State) -> dict[str, Any]:
        return state.to_dict() | {"objective": self.objective.to_dict()}

    def load(self, state: State, saved: dict[str, Any]) -> None:
        state.load(saved)
        self.objective.load(saved.get("objective", {}))

    def memory(self, state: State) -> Memory:
        """The memory that a state stands for: the average, in the precision of the file."""
        config, images = self.config, self.images
        bases, addressing, *rest = (tensor.detach().cpu() for tensor in state.average)
        encoder, kind = dict(zip(state.encoder, rest, strict=True)), PRECISIONS[config.budget.precision]
        one_hot = config.memory.addressing == "one-hot"
        beside = {"encoder": sum(p.numel() for p in encoder.values())} if encoder else {}
        allowed = budget(config, images, self.query)
        header = Header(
            dataset=images.name,
            class_names=list(images.class_names),
            image_shape=list(images.shape),
            downsample=config.memory.downsample,
            addressing=config.memory.addressing,
            query=self.query.header(),
            preprocessing=self.stated.to_json(),
            recipe=to_json(_recipe(config)),
            made=made(config, state, config.run.seed, self.device),
            budget=counted(allowed, bases, addressing, one_hot) | beside,
        )
        asked = self.query if isinstance(self.query, Vectors | Targets) else None
        if asked and images.words:
            encoder = {"projection": images.words.projection, "mean": images.words.mean}
        addressing = addressing.to(torch.uint8 if one_hot else kind)
        memory = Memory(bases.to(kind), addressing, header, encoder, asked.table if asked else None)
        memory.fitted = self.stated
        return memory

    # --- an outer step -------------------------------------------------------------------------------------------------------

    def step(self, state: State, signals: Signals | None = None) -> dict[str, Any]:
        """One outer step, in place; a signal may drop it until its gradient is there. Returns what to log of it."""
        with nullcontext() if self.ranks.world > 1 else (signals or Signals()).drops():  # the others wait for its part
            value, gradients = self.gradient(state)
        return outer.advance(state, value, gradients, self.config.outer, self.config.budget.outer_steps)

    def gradient(self, state: State) -> tuple[float, list[Tensor]]:
        """J and its gradient by the learned tensors at one outer step (lines 4-15 of Algorithm 1)."""
        found = self._found(state)
        if len(found) == self.ranks.world == 1:
            return float(found[0][0]), found[0][1]
        rows = [torch.cat([value[None], *(gradient.flatten() for gradient in by_learned)]) for value, by_learned in found]
        if self.ranks.world > 1:
            rows = self._of_all(rows, 1 + sum(tensor.numel() for tensor in state.learned))
        value, *gradients = (sum(rows[1:], rows[0]) / len(rows)).split([1, *(tensor.numel() for tensor in state.learned)])
        return float(value), [each.view_as(tensor) for each, tensor in zip(gradients, state.learned, strict=True)]

    def _of_all(self, rows: list[Tensor], numbers: int) -> list[Tensor]:
        """The rows of all inner networks, in their order, whoever computed them."""
        own = torch.stack(rows) if rows else torch.empty(0, numbers, device=self.device)
        if self.config.run.shard == "batch":
            own[:, 1:] = self.ranks.total(own[:, 1:].contiguous())
            return list(own)
        return list(self.ranks.rows(own, self.config.inner.networks_per_step))

    def _found(self, state: State) -> list[tuple[Tensor, list[Tensor]]]:
        """Value and gradient by the learned tensors of each inner network; of all, where the objective does not part them."""
        drawn = self.ahead.pop(state.step, None) or self.draw(state.step, len(state.addressing))
        recalled = self._recall(drawn, state)
        pixels = self.preprocess(self.pixels[drawn.rows.to(self.device)])
        real = Examples(augment.apply(pixels, drawn.shared), drawn.truth.to(self.device))
        given = recalled._replace(images=recalled.images.detach()), real, drawn.objective
        with self._blamed():
            if isinstance(self.objective, ByNetwork):
                has_any = range(self.config.inner.networks_per_step)[self.share]
                found = self.objective.by_network(*given) if has_any else []
            else:
                found = [self.objective.gradient(*given)]
        if self.own:
            found = [checked(each, recalled.images, self.own) for each in found]
        if self.draws_ahead:
            self.ahead[state.step + 1] = self.draw(state.step + 1, len(state.addressing))
        pull = partial(torch.autograd.grad, recalled.images, state.learned, retain_graph=len(found) > 1)
        return [(each.value, list(pull(each.images))) for each in found]

    def _recall(self, drawn: Draws, state: State) -> Examples:
        """Line 5: the recalled set."""
        matrices, shown = len(state.addressing), self._shown(drawn).to(self.device)
        groups = shown.unflatten(0, (len(drawn.labels), -1)) if len(drawn.shots) else shown
        queries = self.query.vectors(state.encoder, drawn.labels.to(self.device), groups)
        images = recall(state.bases, state.addressing, queries, self.shape[1:])
        if self.targets is not None:
            return Examples(images, shown.repeat_interleave(matrices, 0))
        return Examples(images, self._recalled_labels(drawn.labels, matrices).to(self.device))

    def _shown(self, drawn: Draws) -> Tensor:
        """Of the rows that the memory is asked with: pictures, or what stands beside them."""
        if self.beside is not None:
            return self.beside[drawn.shots]
        return augment.apply(self.preprocess(self.pixels[drawn.shots.to(self.device)]), drawn.seen)

    def _recalled_labels(self, labels: Tensor, matrices: int) -> Tensor:
        """[N]: class labels; or places in the query, where classes have no labels, and of targets."""
        numbers = labels if self.query.ways is None else torch.arange(len(labels))
        return numbers.repeat_interleave(self.query.each * matrices)

    # --- draws -----------------------------------------------------------------------------------------------------------

    def draw(self, step: int, matrices: int) -> Draws:
        """All that is random in an outer step."""
        config, seed = self.config, self.config.run.seed
        generator = seeded(seed, Purpose.STEPS, step)
        labels = self._labels(generator)
        names = augment.parse(self.inner.augment)
        shared = augment.draw_shared(names, generator) if config.inner.augment_scope == "outer" else {}
        shots, rows, truth = self._real(labels, generator)
        seen = augment.draw(augment.parse(config.query.encoder_augment), len(shots), generator)

        def network(number: int) -> torch.Generator:
            """The first goes on with the step's generator; the others have their own, whoever computes them."""
            return seeded(seed, Purpose.STEPS, step, number) if number else generator

        chance = Chance(network, generator, shared, self.share)
        with self._blamed():
            objective = self.objective.draw(self._recalled_labels(labels, matrices), chance)
        return Draws(labels, shared, shots, seen, rows, truth, objective)

    def _labels(self, generator: torch.Generator) -> Tensor:
        """Line 4: a subset of the labels, in order; for targets their places."""
        if self.targets is not None:
            return torch.arange(self._groups)
        return torch.randperm(self.classes, generator=generator)[: self._groups].sort().values

    @property
    def _groups(self) -> int:
        """Classes, or targets, of an outer step."""
        usual = self.query.shots if isinstance(self.query, Targets) else self.classes
        return self.config.budget.classes_per_step or usual

    def _real(self, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Line 14: rows and labels of real images of the chosen classes; before them, the rows of other ones to ask with."""
        ask, count = self.query.shots, self.config.budget.real_per_class
        if self.targets is not None:
            order = torch.randperm(len(self.targets), generator=generator)
            pick = order[ask : ask * (1 + count)]
            return order[:ask], pick, self.targets[pick]
        shots, rows, truth = [], [], []
        for place, label in enumerate(labels.tolist()):
            of_class = self.by_class[label]
            order = of_class[torch.randperm(len(of_class), generator=generator)]
            pick = order[ask : ask + count]
            shots.append(order[:ask])
            rows.append(pick)
            truth.append(torch.full_like(pick, label if self.query.ways is None else place))
        return torch.cat(shots), torch.cat(rows), torch.cat(truth)

    def teach(self, state: State) -> None:
        """The encoder learns to name the classes: its query vectors are then evidence for each."""
        config, query = self.config, self.query
        assert isinstance(query, Pictures)
        network, seed = Network(query.encoder, self.shape, query.size), network_seed(config.run.seed, Purpose.TEACH)
        part = self.preprocess.on(self.device, self.pixels), self.labels
        (params,) = train(network, [part], encoder_recipe(config), [seed], self.device, config.run.compute)
        with torch.no_grad():
            for name, p in params.items():
                state.encoder[name].copy_(p)
        outer.forget(state)


def prepared_targets(query: queries.Query, split: Split) -> Tensor | None:
    """Continuous targets [N, targets] as a network sees them, of a memory that is asked with these."""
    return query.prepare(split.targets) if isinstance(query, Targets) and split.targets is not None else None


def encoder_recipe(config: DistillConfig) -> Recipe:
    """How an encoder is taught to name classes, before it is distilled with."""
    return Recipe(queries.ENCODER, config.query.encoder_epochs, batch=128, augment=config.query.encoder_augment)


# --- the memory ------------------------------------------------------------------------------------------------------------


def _recipe(config: DistillConfig) -> Recipe:
    """The paper's protocol, at the inner loop's rates and with its augmentation."""
    inner = config.inner
    named = inner.augment_scope == "sample" and not inner.augment.startswith("custom ")
    augmentation = inner.augment if named else "none"
    if inner.optimiser == "adam":
        return Recipe(network=inner.network, augment=augmentation)
    return Recipe(network=inner.network, lr=inner.lr, momentum=inner.momentum, augment=augmentation)


def made(config: Any, state: State, seed: int, device: str) -> dict[str, Any]:
    """How a memory was made, for its header."""
    told = {"config": to_json(config), "steps": state.step, "skipped": state.skipped, "seed": seed}
    told |= {"recollect": recollect.__version__, "torch": torch.__version__, "device": device_name(device)}
    return told | ({"start": state.before} if state.before else {})


def counted(budget: Budget, bases: Tensor, addressing: Tensor, one_hot: bool) -> dict[str, Any]:
    """What was allowed and what is used (eqn 4), for its header."""
    return {
        "name": budget.name,
        "images_per_class": budget.images_per_class,
        "numbers": budget.numbers,
        "used": bases.numel() + (0 if one_hot else addressing.numel()),
        "counted": "bases alone; one-hot addressing is implied" if one_hot else "bases and addressing",
    }
