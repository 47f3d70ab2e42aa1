"""Formulas of the pages as MathML, which browsers draw themselves: no script is loaded. On GitHub they are read as they are."""

import re

from latex2mathml.converter import convert

CODE = re.compile(r"(```.*?```|`[^`\n]+`)", re.S)
BLOCK, INLINE = re.compile(r"\$\$(.+?)\$\$", re.S), re.compile(r"\$([^$\n]+?)\$")


def on_page_markdown(markdown: str, **_: object) -> str:
    """The text of a page that has a formula on lines of its own ($$), its formulas drawn; other pages as they are."""
    if "$$" not in markdown:
        return markdown
    parts = CODE.split(markdown)
    for number in range(0, len(parts), 2):  # what is not code
        text = BLOCK.sub(lambda found: convert(found[1].strip(), display="block"), parts[number])
        parts[number] = INLINE.sub(lambda found: convert(found[1]), text)
    return "".join(parts)
