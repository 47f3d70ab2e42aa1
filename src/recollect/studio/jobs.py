"""Trainings: a bounded queue, one worker, and a bounded number of results that are kept."""

import logging
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from recollect.classifier import Classifier
from recollect.composition import Composition
from recollect.config import Recipe
from recollect.errors import RecollectError
from recollect.studio.shelf import Choice, Missing, Shelf
from recollect.training import Cancelled, Progress

MOST_WAITING = 8  # trainings in the queue
MOST_PER_CLIENT = 2  # of them, and of the one that runs
MOST_PER_ADDRESS = 4  # a client is a cookie, which anyone can have many of
MOST_KEPT = 32  # finished ones; the oldest is forgotten first
MOST_SECONDS = 600.0  # of one training
MOST_CLASSES = 1000  # in one classifier
MOST_TESTED = 2000  # test images, so that testing takes seconds too

# Seconds on a CPU, where the recipe of a memory for a larger network takes minutes.
SMALL = {"network": "convnet:width=32", "batch": 64, "epochs": 20}

Chosen = Annotated[str, Field(pattern=r"^[0-9]{1,6}:[0-9]{1,6}$", description="memory:label", examples=["0:3"])]
State = Literal["waiting", "training", "testing", "done", "failed", "cancelled"]
FINISHED = ("done", "failed", "cancelled")


class Busy(RecollectError):
    """There is no room for another training now."""


class Order(BaseModel):
    """What to train: classes of memories on the shelf, and how. As a page orders it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    classes: Annotated[list[Chosen], Field(min_length=2, max_length=MOST_CLASSES)]
    network: Literal["memory", "small"] = "memory"
    epochs: Annotated[int, Field(ge=1, le=2000)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0

    @property
    def choices(self) -> list[Choice]:
        return [(int(memory), int(label)) for memory, label in (text.split(":") for text in self.classes)]

    @property
    def changes(self) -> dict[str, Any]:
        """What is other than in the first memory's recipe."""
        return (SMALL if self.network == "small" else {}) | ({} if self.epochs is None else {"epochs": self.epochs})

    def recipe(self, composition: Composition) -> Recipe:
        return replace(composition.recipe, **self.changes)


@dataclass
class Job:
    """One training: what was ordered, how far it is, and what came out."""

    order: Order
    client: str
    address: str
    # nobody can guess it: whoever has it may look, cancel and use the result
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    state: State = "waiting"
    epochs: int = 0  # how many there will be
    losses: list[tuple[int, float]] = field(default_factory=list)  # (epoch, loss), of some 100 epochs
    error: str = ""
    class_names: tuple[str, ...] = ()
    images: int = 0  # that it is trained on
    notice: str = ""  # what had to be done to bring the memories together
    whitening: str = ""  # the file that the classifier needs beside it, if any
    classifier: Classifier | None = None
    test: dict[str, Any] | None = None  # accuracy and confusion matrix, or why there are none
    seconds: float = 0.0

    @property
    def is_finished(self) -> bool:
        return self.state in FINISHED

    def to_json(self, known: int = 0) -> dict[str, Any]:
        """For the page; of the losses only those after the first `known`."""
        state, losses = self.state, list(self.losses)  # the worker may go on meanwhile: the state comes first
        result = self.classifier if state == "done" else None
        same = ("id", "epochs", "error", "class_names", "images", "notice", "whitening")
        return {name: getattr(self, name) for name in same} | {
            "state": state,
            "epoch": losses[-1][0] if losses else 0,
            "losses_from": known,
            "losses": losses[known:],
            "seconds": round(self.seconds, 2),
            "test": self.test if state == "done" else None,
            "order": self.order.model_dump(exclude_none=True),
            # what a drawing should be like: how many pixels high, and light on dark or dark on light
            "draw": result and {"side": max(result.image_shape[1:]), "dark": fmean(result.preprocess.mean) < 0.5},
        }


class Jobs:
    """The trainings of all clients. One at a time is worked on, in the background."""

    def __init__(self, shelf: Shelf):
        self.shelf = shelf
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()  # guards them
        self._worker = ThreadPoolExecutor(1, "trainings")

    def add(self, order: Order, client: str, address: str) -> Job:
        """Put a training in the queue, or say why not."""
        with self._lock:
            unfinished = [job for job in self._jobs.values() if not job.is_finished]
            if sum(job.client == client for job in unfinished) >= MOST_PER_CLIENT:
                raise Busy(f"you have {MOST_PER_CLIENT} trainings under way: wait for one, or cancel it")
            if sum(job.address == address for job in unfinished) >= MOST_PER_ADDRESS:
                raise Busy(f"your address has {MOST_PER_ADDRESS} trainings under way: wait for one")
            if len(unfinished) > MOST_WAITING:
                raise Busy("the queue is full: try again in a minute")
            job = Job(order, client, address)
            finished = [job for job in self._jobs.values() if job.is_finished]
            finished.sort(key=lambda job: job.state == "done")  # those without a result are forgotten before the others
            for old in finished[: max(0, len(finished) - MOST_KEPT)]:
                del self._jobs[old.id]
            self._jobs[job.id] = job
            self._worker.submit(self._run, job)
        return job

    def __getitem__(self, name: str) -> Job:
        job = self._jobs.get(name)
        if job is None:
            raise Missing("there is no such training, or none any more: train again")
        return job

    def of(self, client: str) -> list[Job]:
        """A client's trainings, the newest last."""
        with self._lock:
            return [job for job in self._jobs.values() if job.client == client]

    def cancel(self, job: Job) -> None:
        """At once, for all to see; the worker notices after the step it is in."""
        with self._lock:
            if not job.is_finished:
                job.state, job.classifier = "cancelled", None

    def close(self) -> None:
        """Cancel everything, and let the worker end."""
        for job in list(self._jobs.values()):
            self.cancel(job)
        self._worker.shutdown()

    def _run(self, job: Job) -> None:
        if job.is_finished:  # cancelled while it waited
            return
        began = time.monotonic()
        try:
            self._train(job, began)
            self._move(job, "done")
        except (Cancelled, RecollectError) as error:  # of a cancelled one nothing changes
            self._move(job, "failed", self.shelf.without_paths(str(error)))
        except Exception as error:
            logging.getLogger(__name__).exception("a training failed")
            self._move(job, "failed", f"the training failed: {type(error).__name__}")
        job.seconds = time.monotonic() - began

    def _move(self, job: Job, state: State, error: str = "") -> None:
        """To another state, unless it was cancelled meanwhile."""
        with self._lock:
            if not job.is_finished:
                job.error = error
                job.state = state

    def _train(self, job: Job, began: float) -> None:
        composition = self.shelf.compose(job.order.choices)
        recipe = job.order.recipe(composition)
        job.class_names, job.notice = composition.class_names, composition.notice
        job.images, job.epochs = len(composition.labels), recipe.epochs
        if zca := composition.preprocess.zca:
            job.whitening = zca.file_name
        self._move(job, "training")

        def progress(now: Progress) -> None:
            job.losses.append((now.epoch, now.loss))
            job.seconds = time.monotonic() - began

        def cancelled() -> bool:
            if time.monotonic() - began > MOST_SECONDS:
                raise RecollectError(f"it took longer than {MOST_SECONDS:.0f} s: take fewer epochs or a smaller network")
            return job.is_finished

        job.classifier = composition.train(recipe, job.order.seed, "cpu", progress, cancelled)
        if self.shelf.data:
            self._move(job, "testing")
            job.test = _tested(job.classifier, self.shelf)


def _tested(classifier: Classifier, shelf: Shelf) -> dict[str, Any]:
    """Accuracy and confusion matrix, on the same images each time; where the datasets lack a class, in words why not."""
    try:
        split = classifier.split(*shelf.data)
    except RecollectError as error:
        return {"error": shelf.without_paths(str(error))}
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:MOST_TESTED]
    counts = classifier.confusion(split[order])
    accuracy = 100 * float(counts.trace()) / len(order)
    return {"accuracy": accuracy, "confusion": counts.tolist(), "images": len(order), "of": len(split)}


def python_lines(shelf: Shelf, order: Order) -> str:
    """The Python that does the same as the page."""
    parts = shelf.parts(order.choices)
    recipe = shelf.compose(order.choices).recipe
    entries = list({entry.number: entry for entry, _ in parts}.values())
    names = {entry.number: f"memory_{place}" if len(entries) > 1 else "memory" for place, entry in enumerate(entries, 1)}
    chosen = [f"{names[entry.number]}[{', '.join(map(repr, classes.names))}]" for entry, classes in parts]
    changed = [f"{name}={value!r}" for name, value in order.changes.items() if value != getattr(recipe, name)]
    lines = [
        *(["import dataclasses", ""] if changed else []),
        "import recollect",
        "",
        *(f"{names[entry.number]} = recollect.Memory.load({shelf.file_name(entry)!r})" for entry in entries),
        f"composition = recollect.compose([{', '.join(chosen)}])",
        *([f"recipe = dataclasses.replace(composition.recipe, {', '.join(changed)})"] if changed else []),
        f"classifier = composition.train({'recipe, ' if changed else ''}seed={order.seed}, device='cpu')",
        "classifier.save('classifier.safetensors')",
        "print(classifier.classify('picture.png'))",
    ]
    return "\n".join(lines) + "\n"
