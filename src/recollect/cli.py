"""The command line: the commands put together, and what becomes of errors and of Ctrl-C."""

import io
import operator
import os
import signal
import sys
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from typing import Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff, OmitSubcommandPrefixes, PositionalMetavarFromFieldName, subcommand

import recollect
from recollect import limits
from recollect.commands import help
from recollect.commands.ask import Ask
from recollect.commands.bench import Bench
from recollect.commands.classify import Classify
from recollect.commands.compose import Compose
from recollect.commands.continual import Continual
from recollect.commands.data import DATA, DataTop
from recollect.commands.demo import Demo
from recollect.commands.distill import Distill
from recollect.commands.evaluate import Evaluate
from recollect.commands.experts import Experts
from recollect.commands.info import Info
from recollect.commands.inputs import Data
from recollect.commands.plan import Plan, PlanStream
from recollect.commands.plot import Plot
from recollect.commands.push import Push
from recollect.commands.recall import Recall
from recollect.commands.reproduce import Reproduce
from recollect.commands.resume import Resume
from recollect.commands.select import Select
from recollect.commands.studio import Studio
from recollect.commands.words import Words
from recollect.commands.zoo import Zoo
from recollect.config import PRESETS, RENAMED, REWORDED
from recollect.continual.config import STREAMS, ContinualConfig
from recollect.errors import Left, RecollectError
from recollect.show.terminal import answering, plain

KINDS: dict[str, Any] = {
    "distill": Distill,
    "resume": Resume,
    "evaluate": Evaluate,
    "select": Select,
    "plan": Plan,
    "recall": Recall,
    "compose": Compose,
    "ask": Ask,
    "classify": Classify,
    "plot": Plot,
    "info": Info,
    "data": DataTop,
    "continual": Continual,
    "experts": Experts,
    "words": Words,
    "demo": Demo,
    "reproduce": Reproduce,
    "zoo": Zoo,
    "push": Push,
    "studio": Studio,
    "bench": Bench,
}
ABOUT = "Distil a dataset into a tiny addressable memory, and recall from it what you need later."
DISTILL = Distill(Data(tyro.MISSING), PRESETS["fast"])
SELECT = Select(Data(tyro.MISSING), PRESETS["fast"])
CONTINUAL = Continual(tyro.MISSING, ContinualConfig())
PLAN = Plan(Data(tyro.MISSING), PRESETS["fast"])
PLAN_STREAM = PlanStream(tyro.MISSING, tyro.MISSING, ContinualConfig())
COMMANDS = {"distill": DISTILL, "select": SELECT, "plan": PLAN, "continual": CONTINUAL}
"""those of which one word decides the defaults of others"""
NAMED = {
    "distill": replace(DISTILL, images=Data("")),
    "select": replace(SELECT, images=Data("")),
    "plan": replace(PLAN, images=Data("")),
    "continual": replace(CONTINUAL, stream="rotations"),
}
"""the same, complete without a word: --help may be asked for before there is one"""
HELP = ("-h", "--help", "--help-all")


def parse(arguments: list[str]) -> Any:
    """The command that the arguments spell, as its dataclass; --help, --version and mistakes end the program here."""
    arguments = modern(raised(arguments))
    words = [word for word in arguments if word not in HELP]
    if arguments[:1] == ["--version"]:
        print(f"recollect {recollect.__version__}")
        raise SystemExit(0)
    defaults = dict(COMMANDS)
    kinds, named = _kinds(words)
    defaults |= {} if kinds is KINDS else {"plan": PLAN_STREAM}
    if words[:1] and words[0] in COMMANDS:
        defaults[words[0]] = _with_defaults(words, defaults[words[0]], _commands(named, kinds))
    if words != arguments and (not words or words[0] in KINDS):
        print(_help(words, kinds, defaults, "--help-all" in arguments))
        raise SystemExit(0)
    return tyro.cli(_commands(defaults, kinds), prog="recollect", description=ABOUT, args=words)


def _kinds(words: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The commands, and those that are complete without a word: what is planned may be a stream."""
    if words[:1] == ["plan"] and any(word.partition("=")[0] == "--stream" for word in words):
        return KINDS | {"plan": PlanStream}, NAMED | {"plan": replace(PLAN_STREAM, data="", stream="rotations")}
    return KINDS, NAMED


def _help(words: list[str], kinds: dict[str, Any], defaults: dict[str, Any], everything: bool) -> str:
    name = words[0] if words else ""
    if not name:
        return help.overview("recollect", KINDS, ABOUT)
    if kinds[name] is not DataTop:
        return help.page(name, kinds[name], defaults.get(name), everything)
    below = words[1] if words[1:] and words[1] in DATA else ""
    return help.page(f"data {below}", DATA[below]) if below else help.overview("recollect data", DATA, help.about(DataTop))


def _with_defaults(words: list[str], command: Any, named: Any) -> Any:
    """The preset or the stream decides the other defaults: they are parsed once to learn which it is."""
    try:
        found = tyro.cli(named, args=words, console_outputs=False)
    except SystemExit:  # what is wrong is said by the parser that follows
        return command
    if isinstance(found, Continual | PlanStream):
        return replace(command, config=STREAMS[found.stream])
    return replace(command, config=PRESETS[found.preset])


def _commands(defaults: dict[str, Any], kinds: dict[str, Any] = KINDS) -> Any:
    each = (
        Annotated[kind, subcommand(name, default=defaults[name]) if name in defaults else subcommand(name)]
        for name, kind in kinds.items()
    )
    joined = reduce(operator.or_, each)
    return PositionalMetavarFromFieldName[OmitSubcommandPrefixes[FlagCreatePairsOff[joined]]]  # pyright: ignore


def raised(arguments: list[str]) -> list[str]:
    """The arguments without --most-gib, which sets how much any file may become."""
    kept = list(arguments)
    while found := [word for word in kept if word.partition("=")[0] in ("--most-gib", "--most_gib")]:
        place = kept.index(found[0])
        _, equals, value = kept.pop(place).partition("=")
        given = value if equals else kept.pop(place) if place < len(kept) else "missing"
        os.environ[limits.VARIABLE] = plain(given)  # which has no zeros and no half characters
        limits.most()
    return kept


def modern(arguments: list[str]) -> list[str]:
    """Flags and values of 0.1 by their present names."""
    found: list[str] = []
    for word in arguments:
        name, equals, value = word.removeprefix("--").replace("-", "_").partition("=") if word[:2] == "--" else ("", "", "")
        if name in RENAMED:
            word = f"--{RENAMED[name].replace('_', '-')}{equals}{value}"
        before = found[-1].removeprefix("--").replace("-", "_") if found else ""
        found.append(REWORDED.get((before, word), word))
    return found


def _joined() -> Any:
    """The processes that torchrun has started beside this one, if it has."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return nullcontext()
    from recollect import distributed  # needs torch, which --help does not wait for

    return distributed.joined()


def _performed(command: Any, ranks: Any) -> int:
    if ranks is None or ranks.world == 1:
        return command.perform()
    try:
        if not isinstance(command, Distill | Evaluate | Resume):
            name = type(command).__name__.lower()
            raise RecollectError(f"{name} has nothing to share out to {ranks.world} processes: start it without torchrun")
        return command.perform()
    except RecollectError as error:
        ranks.tell(f"error: {plain(str(error))}")
        return 2
    except KeyboardInterrupt:
        if ranks.rank:  # rank 0 says it
            return 128 + signal.SIGINT
        raise


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Exit code 0; 2 for a mistake in what was given; 130 or 143 for a run that was told to stop."""
    warnings.formatwarning = lambda message, *_, **__: f"note: {plain(str(message))}\n"  # without a line of our code
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may not have every character
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            with answering(), _joined() as ranks:
                return _performed(parse(sys.argv[1:] if arguments is None else arguments), ranks)
        finally:
            sys.stdout.flush()  # a closed pipe is met here, and not when Python ends
    except Left:
        return 0
    except RecollectError as error:
        print(f"error: {plain(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # nobody reads on, as in `recollect info MEMORY | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as error:
        print(f"error: {plain(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:  # a run says how to go on, and by which signal it was stopped
        print(str(stopped) or "stopped", file=sys.stderr)
        return 128 + getattr(stopped, "signal", signal.SIGINT)
