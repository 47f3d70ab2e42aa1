"""The pages of docs/results/, and the front page's table of results, made of results/.

python experiments/pages.py
"""

from pathlib import Path

from recollect.files import write_atomically
from recollect.reproduce import page

ROOT = Path(__file__).parent.parent
RESULTS, PAGES, FIGURES = (
    ROOT / "results" / "reproduce",
    ROOT / "docs" / "results",
    ROOT / "docs" / "results" / "README-figures.md",
)
BEGIN, END = "<!-- table 1, by experiments/pages.py -->\n", "\n<!-- end -->"


def main() -> None:
    for name, text in page.pages(RESULTS, PAGES).items():
        write_atomically(PAGES / name, text.encode())
    write_atomically(FIGURES, figures(FIGURES.read_text()).encode())


def figures(text: str) -> str:
    """The page of the front page's figures with the table that belongs there."""
    before, after = text.partition(BEGIN)[0], text.partition(BEGIN)[2].partition(END)[2]
    return f"{before}{BEGIN}\n{page.summary(page.every(RESULTS))}\n{END}{after}"


if __name__ == "__main__":
    main()
