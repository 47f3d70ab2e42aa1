"""The paper's table of continual learning, beside ours: every stream, every learner, five seeds.

    python experiments/continual.py --root DATA --runs runs --out experiments/continual.json [--streams rotations many]

Each stream is one `recollect continual STREAM --seeds 5 --out RUNS/continual-STREAM`, which goes on where it was stopped; the
Rotations and Permutations of 60,000 images a task are run for ours and for GDumb alone, as the paper does. What is in the file
already is replaced only by a run of the same stream.
"""

import argparse
from pathlib import Path

from recollect.config import to_json
from recollect.continual.config import DATASETS, LEARNERS, STREAMS
from recollect.continual.run import run
from recollect.data import load
from recollect.files import read_json, write_json
from recollect.show import streams as show

TABLE = [name for name in STREAMS if name != "split"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder with the official files of MNIST and CIFAR-100")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, required=True)
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
        found = {
            "command": f"recollect continual {name} --seeds {arguments.seeds} --learners {' '.join(ran)}",
            "rows": show.summary(results, name),
            "config": to_json(STREAMS[name]),
            "environment": read_json(folder / "environment.json"),  # of the first call
            "where": {learner: where(folder, learner) for learner in ran},
        }
        written = read_json(arguments.out) if arguments.out.exists() else {}
        write_json(arguments.out, written | {name: found})


def where(folder: Path, learner: str) -> list[str]:
    """What its seeds ran on, as far as their files say."""
    found = [read_json(path) for path in folder.glob(f"seed-*/{learner}.json")]
    told = [
        each["environment"]["processor" if each["device"] == "cpu" else "cuda"] for each in found if "device" in each
    ]
    return sorted(set(told))


if __name__ == "__main__":
    main()
