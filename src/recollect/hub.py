"""Files of memories on the Hugging Face Hub (pip install 'recollect[hub]'): fetched into its cache, and sent there.

A repository there has `memory.safetensors`, and beside it the whitening file that the memory needs, if any. HF_ENDPOINT names
another server, HF_TOKEN a token.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from recollect import limits
from recollect.errors import RecollectError
from recollect.header import read_header

PREFIX = "hub:"
"""what the names of these memories begin with, where others are paths or names of the zoo"""
FILE = "memory.safetensors"
_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>(?!.*\.\.)[^@\s]+))?", re.ASCII)
Kind = Literal["model", "dataset"]


def find(name: str) -> Path:
    """The file of the memory "owner/name", or of its branch, tag or commit "owner/name@revision"; fetched unless it is in the
    cache as it is there now."""
    found = _NAME.fullmatch(name)
    if not found:
        raise RecollectError(f"{PREFIX}{name} is no name of the Hub: give {PREFIX}owner/name, or {PREFIX}owner/name@revision")
    repository, revision = found["repository"], found["revision"] or "main"
    path = _fetched(repository, FILE, revision)
    zca = read_header(path)[0].preprocessing.get("zca")
    if zca and not (path.parent / zca["file"]).exists():
        with suppress(_NoSuchFile):  # whoever needs it is told what to do
            _fetched(repository, zca["file"], path.parent.name)  # of the same commit, whatever was sent meanwhile
    return path


def name_of(path: Path) -> str | None:
    """ "owner/name" of a memory's file in the cache."""
    parts = path.parts[-4:]
    if len(parts) < 4 or parts[1] != "snapshots" or not parts[0].startswith("models--"):
        return None
    return parts[0].removeprefix("models--").replace("--", "/", 1)


def send(name: str, files: Mapping[str, bytes | Path], kind: Kind, private: bool, message: str) -> str:
    """Make files a commit of the repository "owner/name", which is created where there is none; the address of its page."""
    if not (found := _NAME.fullmatch(name)) or found["revision"]:
        raise RecollectError(f"'{name}' is no name for the Hub: give owner/name")
    hub = _library(name)
    if not hub.get_token():
        raise RecollectError(f"sending {name} needs a token that may write: run hf auth login, or set HF_TOKEN")
    api = hub.HfApi(endpoint=_endpoint(), library_name="recollect")
    operations = [hub.CommitOperationAdd(path, data) for path, data in files.items()]
    with _answered(name, "to send it"):
        page = api.create_repo(name, repo_type=kind, private=private or None, exist_ok=True)
        api.create_commit(name, operations, commit_message=message, repo_type=kind)
    return str(page)


class _NoSuchFile(RecollectError):
    """The repository is there, and has no such file."""


def _fetched(repository: str, file: str, revision: str) -> Path:
    """From the cache, if it is what is there now, or if nobody can be asked."""
    hub, name = _library(repository), PREFIX + repository
    where = hub.hf_hub_url(repository, file, revision=revision, endpoint=_endpoint())
    with _answered(name, "to load it", file, revision):
        try:
            size = hub.get_hf_file_metadata(
                where, endpoint=_endpoint()
            ).size  # asked once: a download would ask for half a minute
        except _transport() as error:
            is_refused = getattr(getattr(error, "response", None), "status_code", 500) < 500
            cached = None if is_refused else hub.try_to_load_from_cache(repository, file, revision=revision)
            if isinstance(cached, str):
                return Path(cached)
            raise
        limits.check(f"{file} of {name}", size or 0)
        found = hub.hf_hub_download(repository, file, revision=revision, endpoint=_endpoint(), library_name="recollect")
    return Path(found)


def _library(name: str) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise RecollectError(f"{name}: the Hub needs huggingface_hub: pip install 'recollect[hub]'") from None
    return huggingface_hub


def _endpoint() -> str:
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")  # as it is now: constants are those of the import


@contextmanager
def _answered(name: str, purpose: str, file: str = "", revision: str = "") -> Iterator[None]:
    """What the Hub refuses, as one line."""
    from huggingface_hub import errors

    where = _endpoint()
    try:
        yield
    except errors.GatedRepoError:
        raise RecollectError(f"{name} is gated: ask for access at {where}, and log in (hf auth login, or HF_TOKEN)") from None
    except errors.RepositoryNotFoundError:
        remedy = "check the name, or log in (hf auth login, or HF_TOKEN)"
        raise RecollectError(f"{name} does not exist at {where}, or is private: {remedy}") from None
    except errors.RevisionNotFoundError:
        raise RecollectError(f"{name} has no revision '{revision}': give a branch, a tag or a commit of it") from None
    except errors.EntryNotFoundError:
        raise _NoSuchFile(f"{name} has no {file}: it is no memory of recollect, check the name") from None
    except errors.HfHubHTTPError as error:
        code = getattr(error.response, "status_code", None)
        why = {401: "the token is not valid", 403: "the token may not write there"}.get(code or 0, f"it answered {code}")
        remedy = "try again later" if (code or 500) >= 500 else "log in with another (hf auth login, or HF_TOKEN)"
        raise RecollectError(f"{where} refuses {purpose} ({name}): {why}; {remedy}") from None
    except RecollectError:
        raise
    except ValueError as error:
        raise RecollectError(f"{name} is refused: {error}") from None
    except _transport() as error:
        cause = error.__cause__ or error
        raise RecollectError(f"{where} cannot be reached {purpose} ({type(cause).__name__}): check the network") from None


def _transport() -> tuple[type[Exception], ...]:
    """What is raised where nobody answers: errors of the library that the Hub's speaks through, of the system, and its own."""
    from huggingface_hub import errors

    return (*errors.HfHubHTTPError.__bases__, OSError, RuntimeError)
