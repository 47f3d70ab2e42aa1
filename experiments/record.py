"""What a result file says of itself, for scripts that write rows to it as they go and are resumed."""

import ast
import shlex
import sys
from argparse import Namespace
from collections.abc import Collection
from typing import Any

from recollect import RecollectError
from recollect.files import read_json
from recollect.runs import environment


def begun(script: str, given: Namespace, not_settings: Collection[str], arguments: list[str] | None) -> dict[str, Any]:
    """The file `given.out` as far as it was written with the same settings, or a new one."""
    settings = {name: value for name, value in vars(given).items() if name not in not_settings}
    if given.out.exists():
        found = read_json(given.out)
        if found["settings"] != settings:
            raise RecollectError(f"{given.out} was begun with other settings: give another --out")
        return found
    command = shlex.join(["python", f"experiments/{script}.py", *(sys.argv[1:] if arguments is None else arguments)])
    return {"command": command, "settings": settings, "environment": environment(), "rows": {}}


def setting(text: str) -> tuple[str, Any]:
    """name=value, where the value is a word or as Python writes it."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
