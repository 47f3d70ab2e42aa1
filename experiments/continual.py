"""The paper's table of continual learning, beside ours: every stream, every learner, five seeds.

    python experiments/continual.py --root DATA --runs runs --out results/streams [--streams rotations many]

Each stream is one `recollect continual STREAM --seeds 5 --out RUNS/continual-STREAM`, which goes on where it was stopped; the
Rotations and Permutations of 60,000 images a task are run for ours and for GDumb alone, as the paper does. OUT/STREAM.json has
a row for each learner; rows that are there already are replaced only by a run of the same learner.
"""

import argparse
from pathlib import Path
from typing import Any

from record import learner_row, write

from recollect.config import to_json
from recollect.continual.config import DATASETS, LEARNERS, STREAMS
from recollect.continual.run import Result, fingerprint, run
from recollect.data import load
from recollect.files import read_json
from recollect.show import streams as show

TABLE = [name for name in STREAMS if name != "split"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder with the official files of MNIST and CIFAR-100")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the tables, a file each stream")
    parser.add_argument("--streams", nargs="+", choices=TABLE, default=TABLE)
    parser.add_argument("--learners", nargs="+", choices=LEARNERS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    for name in arguments.streams:
        learners = arguments.learners or (["compress", "gdumb"] if name.endswith("-60k") else LEARNERS)
        images = load(DATASETS[name], root=arguments.root)
        folder = arguments.runs / f"continual-{name}"
        options = {"seeds": arguments.seeds, "workers": arguments.workers, "device": arguments.device}
        with show.progress(name) as progress:
            results = run(images, STREAMS[name], out=folder, name=name, learners=learners, progress=progress, **options)
        show.finish(results, name, folder)
        ran = list(dict.fromkeys(result.learner for result in results))  # by earlier calls too
        path = arguments.out / f"{name}.json"
        written = read_json(path)["rows"] if path.exists() else {}
        found = {
            "command": f"recollect continual {name} --seeds {arguments.seeds} --learners {' '.join(ran)}",
            "images": fingerprint(images),
            "config": to_json(STREAMS[name]),
            "environment": read_json(folder / "environment.json"),  # of the first call
            "rows": written | {learner: row(folder, results, name, learner) for learner in ran},
        }
        write(path, found)


def row(folder: Path, results: list[Result], stream: str, learner: str) -> dict[str, Any]:
    seeds = [result.seed for result in results if result.learner == learner]
    runs = [read_json(folder / f"seed-{seed}" / f"{learner}.json") for seed in seeds]
    quoted = show.PAPER[stream].get(learner)
    told = {"told_the_task": runs[0]["told_the_task"], "paper": quoted._asdict() if quoted else None}
    return told | learner_row(runs)


if __name__ == "__main__":
    main()
