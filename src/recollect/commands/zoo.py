"""The zoo of distilled memories."""

from dataclasses import dataclass
from itertools import groupby

from tyro.conf import Positional

from recollect.show import terminal


@dataclass(frozen=True)
class Zoo:
    """List the memories that are to be had by name, or show the card of one. A name works wherever a memory file does."""

    name: Positional[str] = ""
    """the memory whose card to show. Default: a list of all"""

    def perform(self) -> int:
        from recollect import zoo

        if self.name:
            terminal.pairs(self.name, _card(self.name))
            return 0
        headings = ("name", "dataset", "budget", "test accuracy, %", "bytes", "objective", "licence of the data")
        rows = [_row(list(names)) for _, names in groupby(zoo.index(), _family)]
        terminal.say(terminal.table(headings, rows, left=[each for each in headings if each != "bytes"]))
        terminal.say("the card of one: recollect zoo NAME")
        return 0


def _family(name: str) -> str:
    """Memories of one folder that differ by a number alone are one row."""
    return name.rstrip("0123456789") if "/" in name else name


def _row(names: list[str]) -> tuple[str, ...]:
    from recollect import zoo

    entry, (first, *others) = zoo.named(names[0]), names
    name = f"{first} to {others[-1].rpartition('/')[2]}" if others else first
    size = f"{max(zoo.named(each)['bytes'] for each in names):,}"
    accuracy = entry["accuracy"][0]
    told = f"{_accuracy(accuracy)}; {accuracy['protocol']}"
    return name, entry["dataset"], entry["budget"], told, size, entry["objective"], entry["licence"]


def _accuracy(entry) -> str:
    return f"{entry['mean']:.1f} ± {entry['deviation']:.1f} ({entry['n']})"


def _card(name: str) -> list[tuple[str, str]]:
    from recollect import zoo

    entry = zoo.named(name)
    measured = [f"{each['what']}: {_accuracy(each)} on {each['on']}; {each['protocol']}" for each in entry["accuracy"]]
    return [
        ("dataset", f"{entry['dataset']}, {entry['classes']} classes"),
        ("licence of the data", entry["licence"]),
        ("budget", f"{entry['budget']}: {entry['numbers']:,} numbers"),
        ("bases", f"{entry['bases']} and {entry['matrices']} addressing matrices"),
        ("asked with", "labels" if entry["asked"] == "class" else f"a {entry['asked']} of each class"),
        ("objective", entry["objective"]),
        *(("accuracy, %", line) for line in measured),
        ("file", f"{entry['bytes']:,} bytes, {'in the package' if entry['ships'] else 'fetched on first use'}"),
        ("sha256", entry["sha256"]),
        ("in Python", f'recollect.Memory.load("{name}")'),
        ("its recipe", f"recollect info {name}"),
    ]
