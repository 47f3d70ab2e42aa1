"""How much a file may become in memory. Whoever decodes one knows the size first, and asks here.

A file may take 2 GiB, or 32 times its own size where that is more: large data are not hindered, small files stay small.
"""

import math
import os

from recollect.errors import RecollectError

VARIABLE = "RECOLLECT_MOST_GIB"  # an environment variable: processes that this one starts have it too
USUAL, TIMES = 2.0, 32
MOST_SIZE = 65536  # numbers of a query vector, and others that a damaged file may name: more is refused


def most() -> float:
    """The limit in bytes."""
    given = os.environ.get(VARIABLE, "") or str(USUAL)
    try:
        gib = float(given)
        if not 0 < gib < 2**30:
            raise ValueError
    except ValueError:
        raise RecollectError(f"{VARIABLE} (--most-gib) is '{given}': give a number of GiB, such as {USUAL:g}") from None
    return gib * 2**30


def check(what: str, size: int, own: int = 0) -> None:
    """Refuse what would take `size` bytes of memory, made of a file of `own` bytes."""
    if size > max(limit := most(), TIMES * own):
        gib = min(size, 2**80) / 2**30
        remedy = f"if you trust it, raise the limit with --most-gib {math.ceil(gib)} (or {VARIABLE})"
        raise RecollectError(f"{what} would take {gib:,.1f} GiB of memory, more than the limit of {limit / 2**30:g}: {remedy}")
