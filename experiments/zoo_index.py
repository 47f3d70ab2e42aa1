"""The index of the zoo, from its files: checksums, sizes, and what their headers say.

    python experiments/zoo_index.py

writes src/recollect/zoo/index.json. The memories in that folder ship with the package; those in memories/ are fetched. What
those in its folders give is not in their headers, since it is the accuracy of many of them together: it is taken from results/.
"""

from pathlib import Path

from record import write

from recollect import zoo
from recollect.files import read_json

ROOT = Path(__file__).parent.parent
ASKED = {"labels": "classify-then-recall, 5 shot", "1-shot": "image addressing, 1 shot", "5-shot": "image addressing, 5 shot"}


def index() -> dict[str, zoo.Entry]:
    found = {path.stem: zoo.describe(path, True) for path in sorted(zoo.HERE.glob(f"*{zoo.SUFFIX}"))}
    others = ROOT / "memories"
    for path in sorted(others.rglob(f"*{zoo.SUFFIX}")):
        alone = path.parent == others
        name = path.relative_to(others).with_suffix("").as_posix()
        found[name] = zoo.describe(path, False, None if alone else [measured(path)])
    return found


def measured(path: Path) -> zoo.Accuracy:
    """What the memories of a folder give together, of which this is one."""
    if path.parent.name == "cifar100-by-5":
        row = read_json(ROOT / "results" / "compose-cifar100-5-way.json")["rows"]["5-way, memories"]
        what, deviation, n = "5 classes of 5 of the 20 memories", row["deviation"], f"{row['n']} tasks"
        return {**common(row), "what": what, "deviation": deviation, "n": n, "protocol": row["protocol"]}
    what, found = ASKED[path.stem], read_json(ROOT / "results" / "ask-cifar100.json")
    row, protocol = found["rows"][ASKED[path.stem]], f"{found['settings']['ways']}-way tasks"
    return {**common(row), "what": what, "deviation": row["deviation over tasks and draws"], "n": row["n"], "protocol": protocol}


def common(row: dict) -> dict:
    return {"mean": row["mean"], "on": row.get("on", "test")}


if __name__ == "__main__":
    write(zoo.INDEX, index())
