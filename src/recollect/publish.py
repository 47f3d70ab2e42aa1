"""A memory on the Hugging Face Hub: its file, the whitening file that it needs, and a card made of its header, with a picture; or
what it recalls, as a dataset that the Hub's viewer shows."""

import json
import tempfile
from pathlib import Path
from typing import Any

from recollect import hub, zoo
from recollect.errors import RecollectError
from recollect.export import parquet
from recollect.header import Header
from recollect.memory import Memory
from recollect.queries import Targets
from recollect.show.pictures import bases, memory_figure, recalled
from recollect.show.style import encoded

PICTURE, CARD, TABLE = "memory.png", "README.md", "data/train-00000-of-00001.parquet"
LICENCES = {"CC BY-SA 3.0": "cc-by-sa-3.0", "MIT": "mit"}
"""the Hub's names of those that the zoo names"""
UNKNOWN = "unknown"  # the Hub's name of a licence that nobody states
SHOWN = f"![memory]({PICTURE})"
PAPER = "[Remember the Past](https://arxiv.org/abs/2206.02916)"


def push_to_hub(
    memory: Memory, name: str, *, dataset: bool = False, private: bool = False, licence: str | None = None, message: str = ""
) -> str:
    """Send a memory to the Hugging Face Hub (pip install 'recollect[hub]'), with a card. `Memory.from_pretrained` loads it.

    Arguments:
        memory: what to send. A whitening file that it needs travels with it.
        name: "owner/name"; created where there is no such repository.
        dataset: send what it recalls instead, as a dataset of pictures (.parquet); then pyarrow is needed too.
        private: create the repository for its owner alone.
        licence: of the data, by the Hub's name ("cc-by-4.0"); None is what is known of an official dataset.
        message: of the commit.

    Returns:
        The address of its page.

    Examples:
        >>> memory = recollect.Memory.load("mnist-1")
        >>> recollect.push_to_hub(memory, "owner/mnist-1")  # doctest: +SKIP
        'https://huggingface.co/owner/mnist-1'
    """
    with tempfile.TemporaryDirectory() as folder:
        shown = picture(memory, dataset)
        files: dict[str, bytes | Path] = {PICTURE: shown} if shown else {}
        if dataset:
            files |= {
                TABLE: parquet(memory, *memory.recall()),
                CARD: dataset_card(memory, name, licence).encode(errors="replace"),
            }
        else:
            memory.save(Path(folder) / hub.FILE)
            files |= {path.name: path for path in Path(folder).iterdir()} | {
                CARD: card(memory, name, licence).encode(errors="replace")
            }
        return hub.send(
            name, files, "dataset" if dataset else "model", private, message or f"A memory of {memory.header.dataset}"
        )


def picture(memory: Memory, dataset: bool = False) -> bytes | None:
    """A PNG for the card: bases, recalled images and similarity; the bases alone where it is not asked with classes. None where
    there is nothing to look at."""
    if not _is_of_pictures(memory):
        return None
    if not memory.asked.has_classes:
        return encoded(bases(memory))
    return encoded(recalled(memory) if dataset else memory_figure(memory))


def _is_of_pictures(memory: Memory) -> bool:
    return memory.image_shape[0] in (1, 3) and not memory.preprocess().columns


def card(memory: Memory, name: str, licence: str | None = None) -> str:
    """README.md of a memory: YAML that the Hub reads, a picture, what the header says, and how to use it."""
    header, kept = memory.header, f"{len(memory.bases)} bases, {len(memory.addressing)} addressing matrices"
    data = _front(licence or known_licence(header), header) | {"library_name": "recollect", "model-index": _results(header, name)}
    rows = {
        "dataset": header.dataset,
        "targets" if isinstance(memory.asked, Targets) else "classes": _classes(header),
        "recalls": f"{len(memory.addressing)} of {'x'.join(map(str, memory.image_shape))} for each {memory.asked.unit}",
        "kept": f"{kept}; {memory.floats:,} numbers ({header.budget.get('name', 'budget unknown')})",
        "train with": _listed(header.recipe),
        "made by": _listed({key: value for key, value in header.made.items() if not isinstance(value, dict)}),
    }
    use = ["import recollect", "", f'memory = recollect.Memory.from_pretrained("{name}")']
    if memory.asked.has_classes:
        use += [f"images, labels = memory.recall()  # {len(memory.addressing) * len(header.class_names):,} training images"]
    return _page(
        data,
        f"{name.rpartition('/')[2]}: a memory of {header.dataset}",
        SHOWN if _is_of_pictures(memory) else "",
        f"A dataset distilled into a small addressable memory ({PAPER}) by recollect. A training set is recalled from it, for "
        "any network.",
        _table(("", ""), rows.items()),
        "## Accuracy",
        _accuracies(header),
        "## Use",
        "```python\n" + "\n".join(use) + "\n```",
        f"On the command line, `hub:{name}` stands for it: `recollect info hub:{name}`.",
        "## Limits",
        "A memory may reveal training images; no privacy is promised. Recalled images train networks, and need not look real.",
    )


def dataset_card(memory: Memory, name: str, licence: str | None = None) -> str:
    """README.md of what a memory recalls, as a dataset of pictures."""
    header, count = memory.header, len(memory.addressing) * len(memory.class_names)
    data = _front(licence or known_licence(header), header) | {
        "task_categories": ["image-classification"],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*"}]}],
    }
    return _page(
        data,
        f"{name.rpartition('/')[2]}: {count:,} images recalled from a memory of {header.dataset}",
        SHOWN,
        f"Recalled from {memory.floats:,} numbers that a dataset was distilled into ({PAPER}, by recollect). They are "
        "synthetic, and rounded to pixels of 8 bits. A network that is trained on them classifies real images.",
        _table(("", ""), {"classes": _classes(header), "images of each class": f"{len(memory.addressing)}"}.items()),
        "## Use",
        f'```python\nimport datasets\n\nrows = datasets.load_dataset("{name}", split="train")\n```',
        f'In recollect, `recollect.load("hf:{name}")`.',
    )


def known_licence(header: Header) -> str:
    """The licence of the data that a memory was distilled from, by the Hub's name."""
    return LICENCES.get(zoo.LICENCES.get(header.dataset, ""), UNKNOWN)


def _front(licence: str, header: Header) -> dict[str, Any]:
    if not licence.replace("-", "").replace(".", "").isalnum():
        raise RecollectError(f"licence '{licence}' is no name of the Hub's: give one such as mit, cc-by-4.0 or {UNKNOWN}")
    return {"license": licence, "tags": ["dataset-distillation", "recollect", *_tag(header)]}


def _tag(header: Header) -> list[str]:
    return [header.dataset] if header.dataset in zoo.LICENCES else []


def _measured(header: Header) -> list[dict[str, Any]]:
    """Accuracies that say what they are of; a foreign header may lack some of it."""
    return [each for each in header.accuracy if {"network", "mean", "deviation", "on", "protocol"} <= each.keys()]


def _results(header: Header, name: str) -> list[dict[str, Any]]:
    """As the Hub's leaderboards have them."""
    results = [
        {
            "task": {"type": "image-classification"},
            "dataset": {"name": header.dataset, "type": header.dataset, "split": entry["on"]},
            "metrics": [_metric(entry)],
        }
        for entry in _measured(header)
    ]
    return [{"name": name.rpartition("/")[2], "results": results}] if results else []


def _metric(entry: dict[str, Any]) -> dict[str, Any]:
    """Accuracy in percent; R2 of continuous targets."""
    kind, words = ("r_squared", "R2") if entry.get("metric") == "R2" else ("accuracy", "accuracy in %")
    return {"type": kind, "value": round(entry["mean"], 4), "name": f"{words} of fresh {entry['network']}"}


def _accuracies(header: Header) -> str:
    rows = [(each["network"], _score(each), each["on"], each["protocol"]) for each in _measured(header)]
    table = _table(("fresh networks", "accuracy", "split", "protocol"), rows)
    return table if rows else "None is recorded (`recollect evaluate --record`)."


def _score(entry: dict[str, Any]) -> str:
    if entry.get("metric") == "R2":
        return f"R2 {entry['mean']:.3f} ± {entry['deviation']:.3f}"
    return f"{entry['mean']:.1f} ± {entry['deviation']:.1f} %"


def _classes(header: Header) -> str:
    names = header.class_names
    return f"{len(names):,}: {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _table(headings: tuple[str, ...], rows: Any) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(_plain, line))} |" for line in lines)


def _plain(cell: str) -> str:
    """Text of a file, in a cell: no line breaks, no marks that Markdown or HTML reads."""
    printed = "".join(letter if letter.isprintable() else " " for letter in cell)
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|#" else letter for letter in printed)


def _page(data: dict[str, Any], title: str, *parts: str) -> str:
    """A part that is empty is left out."""
    front = [f"{key}: {json.dumps(value)}" for key, value in data.items() if value]
    return "\n".join(["---", *front, "---", f"# {_plain(title)}", "", "\n\n".join(filter(None, parts)), ""])
