"""The help of each command, made of the dataclass that is its flags: the most used first, the others with --help-all."""

import ast
import dataclasses
import inspect
import shutil
import textwrap
import typing
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple

from tyro import MISSING
from tyro.conf import Positional, Suppress

MANY = 16  # options that are all shown at once
FIRST = {
    "distill": "out images_per_class minutes network bases inner_steps inner_lr outer_steps outer_lr augment preset classes root "
    "size device seed",
    "evaluate": "data networks epochs on architectures baselines no_baselines full record json seed root size device",
    "select": "field values networks out images_per_class network bases inner_steps outer_steps augment preset classes root size "
    "device seed",
    "plan": "on devices stream images_per_class network bases inner_steps inner_per_class networks_per_step outer_steps "
    "objective preset classes root size device",
    "continual": "learners seeds data out tasks per_task classes_per_task buffer network outer_per_batch on executor workers "
    "device root",
    "compose": "test on save classify network epochs device seed root",
    "ask": "words data save classify network epochs device seed root",
}
"""the most used options of commands that have many"""
HIDDEN = Suppress[Any].__metadata__  # of settings that Python alone has
METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


class Option(NamedTuple):
    """A flag or an argument, as its help shows it."""

    name: str
    """of the setting"""
    shown: str
    """--inner-steps INT"""
    words: str
    """its help text, and the default"""
    group: str
    """what it belongs to, in words; "" for the command's own"""

    @property
    def is_flag(self) -> bool:
        return self.shown.startswith("-")


def options(kind: Any, default: Any = None, group: str = "") -> Iterator[Option]:
    """All options of a command's dataclass, nested ones too; `default` is an instance that has the defaults."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint, usual = hints[field.name], field.default
        plain, *extras = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
        value = usual if default is None else getattr(default, field.name)
        if any(extra in extras for extra in HIDDEN):
            continue
        if dataclasses.is_dataclass(plain):
            inside = None if value is MISSING or value is dataclasses.MISSING else value
            yield from options(plain, inside, "" if field.name in ("config", "images") else about(plain))
            continue
        called = next((extra.name for extra in extras if getattr(extra, "name", None)), field.name).replace("_", "-")
        metavar, words = _metavar(plain), documented(kind)[field.name]
        if Positional in extras:
            shown = called.upper() + (" ..." if metavar.endswith(" ...") else "")
            yield Option(field.name, shown, words, "")
        else:
            if usually := _worded(value):
                words = f"{words.partition('. Default: ')[0]} (default:\N{NO-BREAK SPACE}{usually})"
            yield Option(called.replace("-", "_"), f"--{called} {metavar}".strip(), words, group)


@cache
def documented(kind: type) -> dict[str, str]:
    """Each field's docstring, on one line."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if dataclasses.is_dataclass(each):
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
            body = typing.cast(ast.ClassDef, tree).body
            for field, text in pairwise(body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def _metavar(hint: Any) -> str:
    inside = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return f"{{{','.join(map(str, inside))}}}"
    if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union:
        return "|".join(_metavar(each) for each in inside if each is not NoneType)
    if typing.get_origin(hint) is tuple:
        return f"{_metavar(inside[0])} ..."
    return "" if hint is bool else METAVARS[hint]


def _worded(value: Any) -> str:
    """A default; those that the help text tells in words are left out."""
    if value is None or value is MISSING or value is dataclasses.MISSING or isinstance(value, bool):
        return ""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def about(kind: Any) -> str:
    """What a command is for, or a group of settings."""
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


def overview(program: str, commands: dict[str, Any], words: str) -> str:
    """What `recollect --help` prints, or that of a command that has commands."""
    rows = [(name, about(kind)) for name, kind in commands.items()]
    more = [("--help, --help-all", "show this help; after a command, its most used options, or all of them")]
    more += [("--version", "show the version")]
    more += [("--most-gib FLOAT", "with any command, raise the limit of what a small file may take of memory (default: 2)")]
    return _page(f"{program} COMMAND [options]", words, [("commands", rows), ("options", more)])


def page(name: str, kind: Any, default: Any = None, everything: bool = False) -> str:
    """What `recollect NAME --help` prints, or --help-all."""
    found = list(options(kind, default))
    arguments, flags = [each for each in found if not each.is_flag], [each for each in found if each.is_flag]
    first = FIRST[name].split() if name in FIRST and len(flags) > MANY and not everything else []
    shown = sorted((f for f in flags if f.name in first), key=lambda f: first.index(f.name)) if first else flags
    groups: dict[str, list[tuple[str, str]]] = {"arguments": [each[1:3] for each in arguments]}
    for each in shown:
        groups.setdefault("" if first else each.group, []).append(each[1:3])
    titled = [(title or ("most used options" if first else "options"), rows) for title, rows in groups.items() if rows]
    more = f"{len(flags) - len(shown)} more options: recollect {name} --help-all" if first else ""
    usage = f"recollect {name} {' '.join(each.shown for each in arguments)} [options]".replace("  ", " ")
    return _page(usage, about(kind), titled, more)


def _page(usage: str, about: str, groups: list[tuple[str, list[tuple[str, str]]]], more: str = "") -> str:
    width = min(shutil.get_terminal_size((110, 24)).columns, 120)
    lines = [f"usage: {usage}", "", *textwrap.wrap(about, width)]
    for title, rows in groups:
        lines += ["", *textwrap.wrap(title.rstrip(".") + ":", width)]
        for shown, words in rows:
            beside = len(shown) <= 24
            lines += [] if beside else [f"  {shown}"]
            first = f"  {shown if beside else '':24}  "
            lines += textwrap.wrap(
                words, max(width, 50), initial_indent=first, subsequent_indent=" " * 28, break_on_hyphens=False
            )
    return "\n".join([*lines, *(["", more] if more else [])]).replace("\N{NO-BREAK SPACE}", " ")
