"""The zoo: distilled memories by name. The small ones lie in this package; the others come once, into the user's cache.

index.json has for each the SHA-256 and the size of its file, and what its header says of it; `experiments/zoo_index.py` writes
it. A name is looked up there and nowhere else, so that no address and no path can be put together from what a user gives.
"""

import difflib
import os
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from recollect import hub
from recollect.config import fits
from recollect.errors import RecollectError, unknown
from recollect.files import read_json, sha256
from recollect.header import read_header

HERE = Path(__file__).parent
INDEX = HERE / "index.json"
SUFFIX = ".safetensors"
ADDRESS = ""
"""where the folder `memories/` of the repository is published: the one address that memories outside the package come from"""
VARIABLE = "RECOLLECT_ZOO"
"""an environment variable that names another address of the same files, a mirror"""
TIMEOUT = (20, 60)  # seconds to connect, and between two chunks
LICENCES = {
    "mnist": "CC BY-SA 3.0",
    "fashion-mnist": "MIT",
    "cifar10": "none stated (to be cited)",
    "cifar100": "none stated (to be cited)",
}
"""of the data that memories were distilled from, as their publishers state it"""


class Accuracy(TypedDict):
    """A measured accuracy, in percent."""

    what: str
    mean: float
    deviation: float
    n: str
    on: str
    protocol: str


class Entry(TypedDict):
    """What the index says of one memory."""

    ships: bool
    sha256: str
    bytes: int
    dataset: str
    classes: int
    asked: str
    budget: str
    numbers: int
    bases: list[int]
    matrices: int
    objective: str
    accuracy: list[Accuracy]
    licence: str


@cache
def index() -> dict[str, Entry]:
    """Every memory of the zoo: its name, and what is known of it without its file."""
    found = read_json(INDEX)
    for name, entry in found.items():
        if not fits(entry, Entry):
            raise RecollectError(f"{INDEX} is damaged at '{name}': install recollect again")
    return found


def named(name: str) -> Entry:
    """What is known of one memory."""
    if name not in index():
        raise unknown("memory of the zoo", name, index(), "All of them: recollect zoo")
    return index()[name]


def find(given: "Path | str") -> Path:
    """The file that a path or a name stands for. What exists wins; a name of the zoo or of the Hub (hub:owner/name) is fetched
    where that is needed."""
    path, name = Path(given), Path(given).as_posix()
    if name.startswith(hub.PREFIX) and not os.path.lexists(path):
        return hub.find(name.removeprefix(hub.PREFIX))
    if name in index() and not os.path.lexists(path):
        return _place(name)
    groups = {each.partition("/")[0] for each in index()}
    is_name = not path.suffix and (len(path.parts) == 1 or (path.parts[:1] and path.parts[0] in groups))
    if is_name and len(name) < 100 and not os.path.lexists(path):
        near = difflib.get_close_matches(name, index(), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise RecollectError(
            f"memory file {name} does not exist, and the zoo has none of this name: {hint}all of them: recollect zoo"
        )
    return path


def name_of(path: Path) -> str | None:
    """The name of a file of the zoo, in the package or in the cache, or of one of the Hub: nothing is written there."""
    if on_hub := hub.name_of(path):
        return f"{hub.PREFIX}{on_hub}"
    places = {_in_package(name) if entry["ships"] else _in_cache(name): name for name, entry in index().items()}
    return places.get(path)


def _place(name: str) -> Path:
    if index()[name]["ships"]:
        return _in_package(name)
    return _fetched(name)


def _in_package(name: str) -> Path:
    return HERE / f"{name}{SUFFIX}"


def _in_cache(name: str) -> Path:
    import pooch

    return Path(pooch.os_cache("recollect")) / "zoo" / f"{name}{SUFFIX}"


def _fetched(name: str) -> Path:
    """The file in the user's cache, fetched unless it is there with the right checksum."""
    import pooch
    from requests import RequestException

    place, address = _in_cache(name), os.environ.get(VARIABLE) or ADDRESS
    known, url = f"sha256:{index()[name]['sha256']}", f"{address.rstrip('/')}/{name}{SUFFIX}"
    if not _is_whole(place, name) and not address.startswith(("http://", "https://")):
        what = f"{VARIABLE} is '{address}', no web address" if address else "the zoo's other files have no public address yet"
        raise RecollectError(
            f"{name} does not come with the package, and {what}: serve the repository's memories/ "
            f"(python -m http.server --directory memories), and set {VARIABLE}=http://127.0.0.1:8000"
        )
    pooch.get_logger().setLevel("WARNING")
    try:
        download: Any = _Download(index()[name]["bytes"])
        return Path(pooch.retrieve(url, known, place.name, place.parent, downloader=download))
    except RequestException as error:
        what = getattr(error.response, "status_code", None) or type(error).__name__
        raise RecollectError(f"{url} cannot be fetched ({what}): try again, or name a mirror with {VARIABLE}") from None
    except ValueError as error:
        if isinstance(error, RecollectError):
            raise
        raise RecollectError(
            f"{url} is not the file of {name}: its SHA-256 differs; name another mirror with {VARIABLE}"
        ) from None
    except OSError as error:
        raise RecollectError(f"cannot write {place}: {error.strerror or error}") from None


def _is_whole(place: Path, name: str) -> bool:
    return place.is_file() and sha256(place.read_bytes()) == index()[name]["sha256"]


class _Download:
    """How pooch is to fetch a file of a known size: no more than that is taken from whoever answers."""

    def __init__(self, size: int):
        self.size = size

    def __call__(self, url: str, place: Any, pooch: Any) -> None:
        import requests

        taken = 0
        with requests.get(url, stream=True, timeout=TIMEOUT) as response, open(place, "wb") as file:
            response.raise_for_status()
            for chunk in response.iter_content(2**16):
                taken += len(chunk)
                if taken > self.size:
                    raise RecollectError(
                        f"{url} is larger than the {self.size:,} bytes it should have: name another mirror with {VARIABLE}"
                    )
                file.write(chunk)


def describe(path: Path, ships: bool, accuracy: "list[Accuracy] | None" = None) -> Entry:
    """The index's entry of a memory file; `accuracy` is for files whose header has none."""
    header, tensors = read_header(path)
    data, made = path.read_bytes(), header.made
    return {
        "ships": ships,
        "sha256": sha256(data),
        "bytes": len(data),
        "dataset": header.dataset,
        "classes": len(header.class_names),
        "asked": header.asked.unit,
        "budget": str(header.budget["name"]),
        "numbers": int(header.budget["used"]),
        "bases": list(tensors["bases"].shape),
        "matrices": tensors["addressing"].shape[0],
        "objective": str(made["config"].get("objective", "unrolled")),
        "accuracy": accuracy or list(map(_stated, header.accuracy)),
        "licence": LICENCES[header.dataset],
    }


def _stated(entry: dict[str, Any]) -> Accuracy:
    """An accuracy of a header; what its protocol says of the number of networks is said once."""
    networks = f"{entry['n']} networks"
    protocol = entry["protocol"].removeprefix(f"{networks}, ")
    told = {name: entry[name] for name in ("mean", "deviation", "on")}
    return Accuracy(what=entry["network"], n=networks, protocol=protocol, **told)
