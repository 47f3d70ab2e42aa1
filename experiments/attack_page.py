"""What was attacked, gathered in results/attack.json, and shown in docs/security.md.

python experiments/attack_page.py [the --out of attacks ...]      without any: the page is made anew of results/attack.json
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from record import write

from recollect.files import read_json, write_atomically

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "results" / "attack.json", ROOT / "docs" / "security.md"
BEGIN, END = "<!-- what was tried, by experiments/attack_page.py -->\n", "\n<!-- end -->"
HARMS = ("SIGKILL, ", "two processes, ", "full disk", "limited file size", "request", "connection")


def main(paths: list[str]) -> None:
    if paths:
        write(RESULTS, {"attacks": [read_json(Path(path)) for path in paths]})
    write_atomically(PAGE, page(PAGE.read_text()).encode())


def page(text: str) -> str:
    """The page with the table that belongs there."""
    before, after = text.partition(BEGIN)[0], text.partition(BEGIN)[2].partition(END)[2]
    return f"{before}{BEGIN}\n{tried(read_json(RESULTS)['attacks'])}\n{END}{after}"


def tried(attacks: list[dict[str, Any]]) -> str:
    """How long, where, and how often each target."""
    tries, refused = (sum((Counter(each[name]) for each in attacks), Counter()) for name in ("tries", "refused"))
    findings = sum(len(each["findings"]) for each in attacks)
    runs = {name: tries[name] for name in sorted(tries) if name.startswith(HARMS)}
    files = {name: count for name, count in sorted(tries.items()) if name not in runs}
    lines = ["| target | tries | refused |", "|---|---|---|"]
    lines += [f"| {name} | {count:,} | {f'{refused[name]:,}' if refused[name] else ''} |" for name, count in files.items()]
    lines.append(f"| **damaged files and impossible numbers** | **{sum(files.values()):,}** | **{sum(refused.values()):,}** |")
    lines += [f"| {name} | {count:,} | |" for name, count in runs.items()]
    environment, commits = attacks[0]["environment"], dict.fromkeys(name for each in attacks for name in each["commits"])
    told = "; ".join(map(_told, attacks))
    where = f"{environment['processor']}, one core, shared; {environment['platform']}; torch {environment['torch']}"
    return "\n".join([f"{told}.", f"{where}; commit {', '.join(commits)}. **Findings: {findings}.**", "", *lines])


def _told(attack: dict[str, Any]) -> str:
    command = f"{attack['command']} --only {' '.join(attack['groups'])}"
    return f"`{command}`: {attack['minutes']:g} minutes, {attack['computed minutes']:g} of them computing"


if __name__ == "__main__":
    main(sys.argv[1:])
