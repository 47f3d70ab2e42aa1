"""Formulas of the pages as MathML, which browsers draw themselves: no script is loaded. On GitHub they are read as they are."""

import re
from typing import Any

from latex2mathml.converter import convert

CODE = re.compile(r"(```.*?```|`[^`\n]+`)", re.S)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$", re.S)


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """A mark in the place of each formula, on pages that have one on lines of its own ($$); other pages as they are."""
    page.meta["formulas"] = formulas = []

    def mark(found: re.Match[str]) -> str:
        formulas.append(convert((found[1] or found[2]).strip(), display="block" if found[1] else "inline"))
        return f"FORMULA{len(formulas) - 1}A"

    parts = CODE.split(markdown) if "$$" in markdown else []
    parts[::2] = (FORMULA.sub(mark, text) for text in parts[::2])  # what is not code
    return "".join(parts) or markdown


def on_page_content(html: str, page: Any, **_: object) -> str:
    """The formulas themselves."""
    return re.sub(r"FORMULA(\d+)A", lambda found: page.meta["formulas"][int(found[1])], html)
