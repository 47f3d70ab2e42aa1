"""The command line: one dataclass per command, its docstrings the help. The work is done elsewhere, and torch is imported
only when a command needs it."""

import os
import sys
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import (
    FlagCreatePairsOff,
    OmitArgPrefixes,
    OmitSubcommandPrefixes,
    Positional,
    PositionalMetavarFromFieldName,
    subcommand,
)

from recollect.config import PRESETS, DistillConfig
from recollect.continual.config import STREAMS, ContinualConfig
from recollect.errors import RecollectError


@dataclass(frozen=True)
class Data:
    """Which images."""

    data: Positional[str]
    """digits, mnist, fashion-mnist, cifar10, cifar100, svhn, tinyimagenet, a folder of class folders, a .npz file, or
    hf:owner/name"""
    root: Path | None = None
    """folder with the official files of named datasets. Default: $RECOLLECT_DATA, else the user's cache"""
    size: int | None = None
    """resize the images of a folder to this many pixels on each side"""
    classes: tuple[str, ...] = ()
    """names of the only classes to take. Default: all"""


@dataclass(frozen=True)
class Distill:
    """Distil a dataset into a memory."""

    images: OmitArgPrefixes[Data]
    config: OmitArgPrefixes[DistillConfig]
    preset: Literal["fast", "paper"] = "fast"
    """where the defaults below come from"""
    out: Path | None = None
    """folder of the run. Default: runs/DATASET-IMAGES_PER_CLASS"""
    tensorboard: bool = False
    """also log for TensorBoard, in the run's folder (pip install 'recollect[tensorboard]')"""
    quiet: bool = False
    """print the result alone"""


@dataclass(frozen=True)
class Resume:
    """Continue a run or a selection that was stopped or killed, from its last checkpoint."""

    run: Positional[Path]
    """its folder"""
    root: Path | None = None
    """folder with the official files, where it is not the one the run was begun with"""
    quiet: bool = False
    """print the result alone"""


@dataclass(frozen=True)
class Evaluate:
    """Train fresh networks on a memory, and report their accuracy beside random real images of the same floats."""

    memory: Positional[Path]
    """a memory file, or the folder of a run"""
    data: str | None = None
    """the memory's dataset, where its name is not enough: a folder, a .npz file, hf:owner/name"""
    root: Path | None = None
    """folder with the official files"""
    size: int | None = None
    """resize the images of a folder"""
    networks: int = 20
    """how many fresh networks of each kind"""
    architectures: tuple[str, ...] = ()
    """networks to train: the cross-architecture table. Default: the memory's own"""
    epochs: int | None = None
    """instead of the memory's recipe"""
    on: Literal["test", "validation"] = "test"
    """the split to report; whatever you choose by it, choose on validation"""
    baselines: bool = True
    """also train on random real images of the same floats"""
    full: int = 0
    """also train on all the data, for this many epochs"""
    record: bool = False
    """write the accuracy into the memory file's header"""
    json: Path | None = None
    """write all values here. Default: evaluation.json beside the memory"""
    seed: int = 0
    """of the networks"""
    device: str = "auto"
    """cpu, cuda or auto"""


@dataclass(frozen=True)
class Select:
    """Choose the number of bases, or any one setting, on the validation split; prints and plots the curve."""

    images: OmitArgPrefixes[Data]
    config: OmitArgPrefixes[DistillConfig]
    preset: Literal["fast", "paper"] = "fast"
    """where the defaults below come from"""
    field: str = "bases"
    """the setting to vary"""
    values: tuple[str, ...] = ()
    """what to try: --values 8 16 24"""
    networks: int = 5
    """fresh networks for each value"""
    out: Path | None = None
    """folder of the selection. Default: runs/select-DATASET-FIELD"""
    quiet: bool = False
    """print the result alone"""


@dataclass(frozen=True)
class Recall:
    """Export what a memory recalls."""

    memory: Positional[Path]
    """a memory file, or the folder of a run"""
    out: Path
    """file (npz, sheet) or folder (png, pt) to write"""
    classes: tuple[str, ...] = ()
    """names of the classes to recall, in this order. Default: all"""
    format: Literal["npz", "png", "sheet", "pt"] = "npz"
    """npz: one archive; png: a folder for each class; sheet: one picture; pt: images.pt and labels.pt as plain tensors"""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a classifier is trained, and what becomes of it."""

    save: Path | None = None
    """write the classifier here, as one .safetensors file"""
    classify: tuple[Path, ...] = ()
    """pictures to classify"""
    network: str | None = None
    """to train, instead of the memory's own; so are the five below"""
    epochs: int | None = None
    """passes over the recalled images"""
    batch: int | None = None
    """images a step"""
    lr: float | None = None
    """learning rate, constant"""
    momentum: float | None = None
    """of SGD"""
    augment: str | None = None
    """any of flip, rotate, crop, cutout, brightness, contrast, saturation, joined by +"""
    seed: int = 0
    """of the network"""
    device: str = "auto"
    """cpu, cuda or auto"""
    quiet: bool = False
    """print the result alone"""


@dataclass(frozen=True)
class Compose(Training):
    """Train a classifier for classes of several memories, which need never have been seen together."""

    memories: Positional[tuple[str, ...]]
    """memory files (or folders of runs), each with its classes: a.safetensors:cat,dog b.safetensors:truck. Without a
    colon: all its classes"""
    test: tuple[str, ...] = ()
    """datasets to test it on: its accuracy, and what it takes for what"""
    root: Path | None = None
    """folder with the official files"""
    size: int | None = None
    """resize the images of a folder"""
    on: Literal["test", "validation"] = "test"
    """the split to report; whatever you choose by it, choose on validation"""


@dataclass(frozen=True)
class Ask(Training):
    """Train a classifier from pictures whose labels nobody knows, with a memory that was distilled with --query images."""

    memory: Positional[Path]
    """a memory file, or the folder of a run"""
    pictures: Positional[tuple[Path, ...]]
    """a folder of pictures for each class, or one folder with such folders in it"""
    data: str | None = None
    """the memory's own dataset, from which a whitening file that is not beside the memory is fitted again"""
    root: Path | None = None
    """folder with the official files"""
    size: int | None = None
    """resize the images of --data, where that is a folder"""


@dataclass(frozen=True)
class Classify:
    """Say what pictures show, by a classifier that compose or ask has saved."""

    classifier: Positional[Path]
    """its .safetensors file"""
    pictures: Positional[tuple[Path, ...]]
    """files; they are resized, and made grey or RGB"""


@dataclass(frozen=True)
class Plot:
    """Draw a figure from memories, runs and results."""

    figure: Positional[str]
    """memory, bases, recalled, similarity (of a memory); curves (of runs); number-of-bases, inner-steps, budget,
    architectures (of measured accuracies); selection; continual (of an accuracy matrix)"""
    paths: Positional[tuple[Path, ...]]
    """memory files, folders of runs or selections, JSON results; one, or several to compare"""
    out: Path
    """the file to write, .png or .svg"""
    classes: tuple[str, ...] = ()
    """names of the classes to show, in this order (recalled, similarity)"""


@dataclass(frozen=True)
class Info:
    """Show what a memory file says about itself."""

    memory: Positional[Path]
    """a memory file, or the folder of a run"""


@dataclass(frozen=True)
class DataGet:
    """Download the official files of datasets, with checksums; an interrupted download resumes."""

    names: Positional[tuple[str, ...]]
    """mnist, fashion-mnist, cifar10, cifar100, svhn, tinyimagenet"""
    root: Path | None = None
    """where to put them. Default: $RECOLLECT_DATA, else the user's cache"""
    mirror: str | None = None
    """address of a folder with the same files"""
    quiet: bool = False
    """no progress"""


@dataclass(frozen=True)
class DataShow:
    """Read a dataset and tell its sizes and classes."""

    images: OmitArgPrefixes[Data]


@dataclass(frozen=True)
class Continual:
    """Learn the tasks of a stream one after another, and compare learners by what they retain; goes on where it was stopped."""

    stream: Positional[
        Literal["rotations", "permutations", "many", "cifar100", "rotations-60k", "permutations-60k", "split"]
    ]
    """rotations, permutations, many, cifar100, rotations-60k, permutations-60k, or split: any dataset by its classes. The
    settings below have its protocol for defaults, and how we distil it"""
    config: OmitArgPrefixes[ContinualConfig]
    learners: tuple[str, ...] = ()
    """compress, union, gdumb, online, er, agem, ewc, all-data. Default: all; of the 60k streams, compress and gdumb"""
    seeds: int = 5
    """how many runs: seeds 0, 1, ..."""
    data: str | None = None
    """images instead of the stream's own (mnist, cifar100): a dataset's name, a folder, a .npz file, hf:owner/name"""
    root: Path | None = None
    """folder with the official files of named datasets. Default: $RECOLLECT_DATA, else the user's cache"""
    size: int | None = None
    """resize the images of a folder"""
    out: Path | None = None
    """folder of the run. Default: runs/continual-STREAM"""
    workers: int = 1
    """processes that share the work"""
    together: int | None = None
    """tasks distilled side by side in one unroll. Default: all on a GPU, 1 on a CPU"""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one"""
    quiet: bool = False
    """print the result alone"""


@dataclass(frozen=True)
class Demo:
    """Digits, distilled and compared in two minutes; nothing is downloaded."""

    out: Path | None = None
    """folder of the run. Default: runs/demo, or the next free number after it"""
    networks: int = 20
    """fresh networks a row"""
    quiet: bool = False
    """no progress"""


@dataclass(frozen=True)
class Studio:
    """Look into memories, and build and try classifiers of their classes, on a web page (pip install 'recollect[studio]')."""

    memories: Positional[tuple[Path, ...]] = ()
    """memory files, or folders of runs; the files in memories/ are added"""
    port: int = 8765
    """where to serve it; 0: any that is free"""
    host: str = "127.0.0.1"
    """address to serve it at; other than the default, whoever reaches this machine can use it"""
    data: tuple[str, ...] = ()
    """datasets to test classifiers on: their accuracy, and what they take for what. Default: digits, for memories of them"""
    root: Path | None = None
    """folder with the official files"""
    size: int | None = None
    """resize the images of a folder"""


@dataclass(frozen=True)
class Bench:
    """Measure this machine: ratios, each from one run."""

    what: Positional[tuple[Literal["unroll", "memory", "demo", "startup", "engine", "exactness"], ...]] = (
        "unroll",
        "memory",
        "startup",
    )
    """unroll: an outer step against plain full-graph autograd; memory: peak memory at T = 10 and T = 100; demo: end to
    end; startup: import and --help; and on a GPU, engine: an outer iteration against the published loop; exactness:
    each precision against float64"""
    profile: bool = False
    """engine: time by kernel too"""
    json: Path | None = None
    """write the figures here"""


@dataclass(frozen=True)
class DataTop:
    """Get or look at datasets."""

    command: OmitArgPrefixes[Annotated[DataGet, subcommand("get")] | Annotated[DataShow, subcommand("show")]]


def parse(arguments: list[str]) -> object:
    """The command that the arguments spell, as its dataclass; --help and mistakes end the program here."""
    config = PRESETS.get(_preset(arguments), PRESETS["fast"])
    missing = Data(tyro.MISSING)
    commands = (
        Annotated[Distill, subcommand("distill", default=Distill(missing, config))]
        | Annotated[Resume, subcommand("resume")]
        | Annotated[Evaluate, subcommand("evaluate")]
        | Annotated[Select, subcommand("select", default=Select(missing, config))]
        | Annotated[Recall, subcommand("recall")]
        | Annotated[Compose, subcommand("compose")]
        | Annotated[Ask, subcommand("ask")]
        | Annotated[Classify, subcommand("classify")]
        | Annotated[Plot, subcommand("plot")]
        | Annotated[Info, subcommand("info")]
        | Annotated[DataTop, subcommand("data")]
        | Annotated[Continual, subcommand("continual", default=Continual(tyro.MISSING, _stream(arguments)))]
        | Annotated[Demo, subcommand("demo")]
        | Annotated[Studio, subcommand("studio")]
        | Annotated[Bench, subcommand("bench")]
    )
    return tyro.cli(
        PositionalMetavarFromFieldName[OmitSubcommandPrefixes[FlagCreatePairsOff[commands]]],  # pyright: ignore
        prog="recollect",
        description="Distil a dataset into a tiny addressable memory, and recall from it what you need later.",
        args=arguments,
    )


def _preset(arguments: list[str]) -> str:
    """The preset decides the other defaults, so it is looked up before the rest is parsed."""
    for word, following in pairwise([*arguments, ""]):
        if word == "--preset":
            return following
        if word.startswith("--preset="):
            return word.partition("=")[2]
    return "fast"


def _stream(arguments: list[str]) -> ContinualConfig:
    """So does the stream of a continual run."""
    return next((STREAMS[word] for word in arguments if word in STREAMS), ContinualConfig())


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Exit code 0; 2 for a mistake in what was given; 130 or 143 for a run that was told to stop."""
    warnings.formatwarning = lambda message, *_, **__: f"note: {message}\n"  # without a line of our code
    try:
        try:
            command = parse(sys.argv[1:] if arguments is None else arguments)
            from recollect import commands

            return commands.run(command)
        finally:
            sys.stdout.flush()  # a closed pipe is met here, and not when Python ends
    except RecollectError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # nobody reads on, as in `recollect info MEMORY | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
