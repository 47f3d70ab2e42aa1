"""The command line: one dataclass per command, its docstrings the help. The work is done elsewhere, and torch is imported
only when a command needs it."""

import os
import sys
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
class Demo:
    """Digits, distilled and compared in two minutes; nothing is downloaded."""

    out: Path | None = None
    """folder of the run. Default: runs/demo, or the next free number after it"""
    networks: int = 20
    """fresh networks a row"""
    quiet: bool = False
    """no progress"""


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
        | Annotated[Info, subcommand("info")]
        | Annotated[DataTop, subcommand("data")]
        | Annotated[Demo, subcommand("demo")]
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


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Exit code 0; 2 for a mistake in what was given; 130 or 143 for a run that was told to stop."""
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
