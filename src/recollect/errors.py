"""The one error a user's mistake raises. It names the thing, the value and the remedy; the command line exits with 2."""

import difflib
from collections.abc import Iterable


class RecollectError(ValueError):
    """Something the user gave cannot be used; the message says what, and what to do instead, in one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))  # what it quotes may have more


class Left(Exception):
    """No error: the jobs have been left to others."""


def unknown(kind: str, name: object, known: Iterable[object], remedy: str = "") -> RecollectError:
    """An error for a name that is not among `known`, offering the nearest match."""
    names = [str(k) for k in known]
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    hint = f"did you mean '{near[0]}'? " if near else ""
    return RecollectError(f"unknown {kind} '{name}': {hint}known: {listed}{'. ' + remedy if remedy else ''}")
