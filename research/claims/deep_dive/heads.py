"""Checks on shared key heads (grouped-query attention), and on the roles of heads."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.resources import files

import numpy as np
import torch

import qkv
from qkv.nn import MultiHeadAttention
from research.claims import Verdict, claim, experiment, false, holds

SECTION = "GQA/MQA"
CLARK = "[Clark et al. 2019](https://arxiv.org/abs/1906.04341)"


def kept(kv_heads: int, heads: int = 32) -> int:
    """The cache size per token in numbers: keys and values of heads of size 4."""
    layer = MultiHeadAttention(4 * heads, heads, kv_heads=kv_heads)
    return sum(x.numel() for x in layer.keys_values(torch.zeros(1, 1, 4 * heads)))


@cache
def mini() -> tuple[np.ndarray, list[str]]:
    """Weights of qkv-mini on the first tokens of a program, (layer, head, query, key), and these tokens."""
    text = (files("qkv.profiler") / "default_code.txt").read_text(encoding="utf-8")[:700]
    data = qkv.profile("qkv-mini", text, probe=False, map_tokens=1000, progress=False).data
    return data["weights"].values[0], [str(token) for token in data["key_token"].values[0]]


def strongest(looks: np.ndarray) -> tuple[str, float, float]:
    """For pairs (query, key): the head with the largest mean weight, this weight, and that of uniform weights."""
    weights, _ = mini()
    rows = looks.any(1)
    by_head = (weights * looks).sum(-1)[..., rows].mean(-1)
    layer, head = np.unravel_index(by_head.argmax(), by_head.shape)
    even = (looks.sum(1) / np.arange(1, len(looks) + 1))[rows].mean()
    return f"{layer}.{head}", float(by_head.max()), float(even)


def previous() -> np.ndarray:
    """Pairs of each query and the previous token."""
    return np.eye(len(mini()[1]), k=-1, dtype=bool)


def after_earlier() -> np.ndarray:
    """Pairs of each query and the tokens after earlier occurrences of its token, as induction heads attend to."""
    tokens = np.array(mini()[1])
    looks = np.zeros((len(tokens), len(tokens)), bool)
    looks[:, 1:] = (tokens[:, None] == tokens[None])[:, :-1]
    return np.tril(looks)


@claim(
    "C305",
    "deep dive",
    SECTION,
    "Grouped-query attention with g groups has h/g key and value heads and a cache of 1/g.",
)
def c305() -> Verdict:
    share = kept(8) / kept(32)
    return false(
        MultiHeadAttention(128, 32, kv_heads=8).kv_heads == 8 and share == 1 / 4,
        f"It has g, and a cache of g/h: with h = 32 and g = 8, 8 key heads and {share:.2f} of the cache, where the "
        "table says 4 heads and 1/8. The table is right if g is the *size* of a group; the text says number.",
        "[Ainslie et al. 2023](https://arxiv.org/abs/2305.13245)",
    )


@claim("C306", "deep dive", SECTION, "Multi-query attention has one key and one value head, and the smallest cache.")
def c306() -> Verdict:
    counts = {g: kept(g) for g in (1, 2, 8, 32)}
    return holds(
        counts[1] == min(counts.values()) and counts[32] == 32 * counts[1],
        f"1/h of multi-head attention's: numbers a token for h = 32 heads of 4, by key heads: {counts}.",
    )


@claim(
    "C307",
    "deep dive",
    SECTION,
    "Grouped-query attention lies between: as many groups as heads are multi-head, one is multi-query attention.",
)
def c307() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, 6, 4, dtype=torch.float64)
    errors = []
    for groups in (8, 2, 1):
        repeated = [x[:, :groups].repeat_interleave(8 // groups, 1) for x in (k, v)]
        errors.append((qkv.attend(q, k[:, :groups], v[:, :groups]) - qkv.attend(q, *repeated)).abs().max().item())
    return holds(
        max(errors) < 1e-12,
        f"8 query heads with 8, 2 and 1 key heads agree to {max(errors):.1g} with 8 key heads of which each group's "
        "are copies.",
    )


@claim("C308", "deep dive", SECTION, "Quality: multi-head is best, grouped-query near it, multi-query slightly lower.")
def c308() -> Verdict:
    found, reported = experiment("C308", "shared_keys"), "[Ainslie et al. 2023](https://arxiv.org/abs/2305.13245)"
    return replace(found, by=(*found.by, f"{reported}, for large T5 models"))


@claim("C323", "deep dive", "Q6", "Heads specialise: in syntax, coreference, neighbours, relative positions.")
def c323() -> Verdict:
    (head, near, even), (other, again, even_again) = strongest(previous()), strongest(after_earlier())
    return holds(
        head != other and near > 5 * even and again > 5 * even_again,
        f"Some do. In `qkv-mini` head {head} puts {near:.2f} of its weight on the token before (even weights: "
        f"{even:.2f}), and head {other} {again:.2f} on what came after its token last time ({even_again:.2f}). Heads "
        "for direct objects, determiners and coreferent mentions were found in BERT, beside many without such a role.",
        CLARK,
    )
