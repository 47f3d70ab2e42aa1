"""Words as query vectors: a language model embeds a name, and a projection makes d_y numbers of that, of length 1.

The projection is onto the principal directions of the names that a memory is distilled with. Addressing learns in the span of
its queries alone: what a new word has outside of it would only meet the numbers that addressing began with, and is dropped. The
mean of the names goes too, since what all of them share tells none apart. Model, projection and mean stay with the vectors, so
that new words become vectors of the same kind.
"""

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from recollect import minilm
from recollect.data.images import Words
from recollect.errors import RecollectError, unknown
from recollect.files import write_through

Embeds = Callable[[Sequence[str]], Tensor]
"""texts -> [N, D]"""
MODELS: dict[str, Embeds] = {"all-MiniLM-L6-v2": minilm.embed}
"""SEAM: name -> what embeds texts"""
USUAL = "all-MiniLM-L6-v2"
MOST = 64  # numbers of a vector, where nobody says how many
LEAST_VALUE = 1e-4  # a singular value of the names' embeddings, which have length 1: below it is rounding


def fit(names: Sequence[str], size: int | None = None, model: str = USUAL) -> Words:
    """How words become vectors of `size` numbers for a memory of these names; None is as many as the names span, 64 at most."""
    found = _embedded(model, names).double()
    _, values, directions = torch.linalg.svd(found - found.mean(0), full_matrices=False)
    span = int((values > LEAST_VALUE).sum())
    if span < 2:
        raise RecollectError(f"{len(names)} names tell too little apart: give three or more different ones")
    if size is not None and not 2 <= size <= span:
        raise RecollectError(f"query_size is {size}, and {len(names)} names span {span} directions: give 2 to {span}")
    kept = directions[: size or min(span, MOST)]
    signs = kept.gather(1, kept.abs().argmax(1, keepdim=True)).sign()  # a decomposition's own are arbitrary
    return Words(model, (kept * signs).T.float().contiguous(), found.mean(0).float())


def vectors_of(words: Words, names: Sequence[str]) -> Tensor:
    """[N, d_y], each of length 1."""
    found = _embedded(words.model, names)
    if found.shape[1:] != words.mean.shape:
        raise RecollectError(
            f"{words.model} gives {found.shape[1]} numbers, and these words need {len(words.mean)}: make them anew"
        )
    return normalize((found - words.mean) @ words.projection, dim=1)


def write(path: Path, names: Sequence[str], words: Words) -> None:
    """The .npz file that `--vectors` takes: a vector for each name, and how other words get theirs."""
    arrays = {"vectors": vectors_of(words, names).numpy(), "projection": words.projection.numpy(), "mean": words.mean.numpy()}
    arrays |= {"names": np.array(names), "model": np.array(words.model)}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_through(path, buffer.getvalue())


def _embedded(model: str, names: Sequence[str]) -> Tensor:
    """[N, D], of names as a class has them: maple_tree is read as maple tree."""
    if model not in MODELS:
        raise unknown("language model", model, MODELS, "Update recollect (pip install -U recollect), or distil the memory again")
    if not names or not all(isinstance(name, str) for name in names):
        raise RecollectError(f"words are {f'{list(names)!r:.60}'}: give at least one, each a string")
    texts = [" ".join(name.replace("_", " ").split()) for name in names]
    if "" in texts:
        raise RecollectError(f"word {texts.index('') + 1} of {len(texts)} is empty: give each class a name")
    return MODELS[model](texts)
