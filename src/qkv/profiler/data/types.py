"""Classify attention heads (induction, previous token, sink, local …) by scores with fixed thresholds."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xarray as xr

from qkv.profiler.data import tables
from qkv.profiler.data.tables import over_texts, received_share, valid_keys

if TYPE_CHECKING:
    import pandas as pd


UNIFORM = 0.9  # a head is uniform if its entropy reaches this share of that of uniform attention


class Kind(NamedTuple):
    """A head type: `score` gives an array (layer, head), and a head has the type if its score reaches `threshold`."""

    definition: str
    threshold: float
    score: Callable[[xr.Dataset], np.ndarray | None]
    below: bool = False  # the head has the type if its score is at most the threshold


def _variable(name: str) -> Callable[[xr.Dataset], np.ndarray | None]:
    return lambda data: data[name].values if name in data else None


def _column(name: str) -> Callable[[xr.Dataset], np.ndarray | None]:
    return lambda data: np.asarray(tables.mean_of_heads(data, name), np.float64)


def prefix_sink_scores(data: xr.Dataset) -> np.ndarray | None:
    """Sink scores α_k of the first 64 tokens, averaged over texts: (layer, head, key)."""
    return over_texts(data["prefix_sink_scores"].values) if "prefix_sink_scores" in data else None


def _first(data: xr.Dataset) -> np.ndarray | None:
    score = prefix_sink_scores(data)
    return None if score is None else score[..., 0]


def sink_scores(data: xr.Dataset) -> np.ndarray | None:
    """Share of the row on each key, averaged over the queries that may attend to it: (text, layer, head, key).

    NaN at keys that are visible to fewer than eight queries or to less than an eighth of them, such as the last tokens
    of a causal text. If a short window leaves every key with fewer, the keys visible to the most queries count.
    """
    if "visible_queries" not in data:
        return None
    visible_queries = data["visible_queries"].values
    most = np.nanmax(visible_queries, -1, keepdims=True, initial=0)
    least = np.minimum(np.maximum(8, data["n_queries"].values / 8)[:, None, None, None], most)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(
            (visible_queries >= least) & (visible_queries > 0), data["received"].values / visible_queries, np.nan
        )


def _first_of_whole(data: xr.Dataset) -> np.ndarray | None:
    score = sink_scores(data)
    return None if score is None else over_texts(score[..., 0])


def _other_sink(data: xr.Dataset) -> np.ndarray | None:
    score = sink_scores(data)
    if score is None:
        return None
    others = score[..., 1:]
    best = np.where(np.isnan(others).all(-1), np.nan, np.nan_to_num(others).max(-1, initial=0))
    return over_texts(best)


def _delimiters(data: xr.Dataset) -> np.ndarray | None:
    """Share of the weight on delimiters, or 0 if it is less than twice their share of the keys."""
    chosen = delimiter_keys(data)
    chosen[:, 0] = False
    share = received_share(data)
    taken = (np.nan_to_num(share) * chosen[:, None, None]).sum(-1)
    expected = (chosen.sum(-1) / np.maximum(valid_keys(data).sum(-1), 1))[:, None, None]
    return over_texts(np.where(taken >= 2 * expected, taken, 0))


def delimiter_keys(data: xr.Dataset) -> np.ndarray:
    """True at special tokens, punctuation and white space: (text, key)."""
    special = set(data.attrs["special_tokens"])
    tokens = data["key_token"].values
    known = {token: token in special or is_delimiter(str(token)) for token in set(tokens.ravel())}
    chosen = np.array([[known[str(token)] for token in row] for row in tokens], bool)
    return chosen & valid_keys(data)


def _local(data: xr.Dataset) -> np.ndarray:
    near = _column("local")(data)
    assert near is not None
    return np.where(near >= 1.5 * tables.uniform_local(data), near, 0)


def _streaming(data: xr.Dataset) -> np.ndarray | None:
    """Mass on the keys that a streaming cache keeps, for queries with at least four times as many visible keys."""
    if "streaming_mass" not in data or "streaming_first" not in data.attrs:
        return None
    kept = data.attrs["streaming_first"] + data.attrs["streaming_last"]
    long = data["visible"].values >= 4 * kept
    if not long.any():
        return None
    values = np.where(long, data["streaming_mass"].values, np.nan)
    return tables.by_head(values, tables.valid_queries(data))


def _retrieval(data: xr.Dataset) -> np.ndarray | None:
    """Share of the row on keys that a streaming cache evicts, a learned sink excluded; NaN if rows are not shares.

    0 for a uniform head, which retrieves no key in particular.
    """
    kept = _streaming(data)
    if kept is None:
        return None
    if "sink_mass" in data:
        kept = kept + tables.by_head(data["sink_mass"].values, tables.valid_queries(data))
    whole = 1.0 if "row_sum" not in data else tables.by_head(data["row_sum"].values > 0, tables.valid_queries(data))
    with np.errstate(invalid="ignore"):
        uniform = tables.mean_of_heads(data, "entropy_ratio") >= UNIFORM
    evicted = np.where(uniform, 0, np.clip(whole - kept, 0, 1))
    return np.where(tables.rows_known(data)[:, None], evicted, np.nan)


ROLES = {  # the type of a head is the first role whose score reaches its threshold
    "induction": Kind(
        "on random tokens that come twice, share of the row on the token after the first occurrence "
        "(Olsson et al. 2022)",
        0.3, _variable("probe_induction"),
    ),
    "duplicate token": Kind(
        "on random tokens that come twice, share of the row on the first occurrence (Wang et al. 2023)",
        0.3, _variable("probe_duplicate"),
    ),
    "previous token": Kind("share of the row on the token before", 0.4, _column("previous")),
    "self": Kind("share of the row on the query's own token", 0.4, _column("self")),
    "first token": Kind("sink score α of the first token over the first 64 (Gu et al. 2025)", 0.3, _first),
    "other sink": Kind("the largest sink score α of any other token", 0.3, _other_sink),
    "delimiter": Kind(
        "share of the row on punctuation, white space and special tokens except the first token, if at least twice "
        "their share of the keys",
        0.4, _delimiters,
    ),
    "local": Kind(
        "share of the row on the nearest tokens, if at least 1.5 times that of uniform attention", 0.5, _local
    ),
    "uniform": Kind("entropy divided by that of uniform attention", UNIFORM, _column("entropy_ratio")),
}  # fmt: skip
TRAITS = {  # a head can have several traits
    "sparse": Kind("effective number of keys, 1 / Σ a²", 3.0, _column("effective_keys"), below=True),
    "streaming": Kind("share of the row on the first and last keys, which a streaming cache keeps", 0.95, _streaming),
    "retrieval": Kind(
        "share of the row on the keys that a streaming cache evicts, 0 for uniform heads (after Xiao et al. 2024, "
        "DuoAttention)",
        0.3, _retrieval,
    ),
    "positional": Kind("1 − total variation between the rows on random tokens and on the same shuffled", 0.8,
                       _variable("probe_positional")),
    "content": Kind(
        "1 − total variation between the rows on random tokens and on the same shuffled; low if they follow tokens",
        0.4, _variable("probe_positional"), below=True,
    ),
}  # fmt: skip
MIXED = "mixed"


def type_table(data: xr.Dataset, *, whole: bool = False) -> pd.DataFrame:
    """One row per layer and head; `Profile.types` documents the columns.

    With `whole`, the score of the first token is its sink score over the whole text.
    """
    import pandas as pd

    table, holds = tables.heads_of(data), {}
    for name, kind in (ROLES | TRAITS).items():
        score = _first_of_whole(data) if whole and name == "first token" else kind.score(data)
        table[name] = np.nan if score is None else np.asarray(score, np.float64).ravel()
        with np.errstate(invalid="ignore"):
            holds[name] = (table[name] <= kind.threshold) if kind.below else (table[name] >= kind.threshold)
    found = pd.DataFrame(holds)
    roles = found[list(ROLES)].to_numpy()
    first = np.where(roles.any(1), roles.argmax(1), len(ROLES))
    table.insert(2, "type", np.array([*ROLES, MIXED], object)[first])
    traits = [", ".join(name for name in TRAITS if row[name]) for row in found.to_dict("records")]
    table.insert(3, "traits", traits)
    return table


def is_delimiter(piece: str) -> bool:
    """True if a token, as text or in its tokenizer's spelling, is only punctuation or white space.

    >>> [is_delimiter(piece) for piece in (".", "Ġ(", "##!", "Ċ", "▁a", "")]
    [True, True, True, True, False, False]
    """
    plain = piece.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n").replace("<0x0A>", "\n")
    return plain != "" and all(unicodedata.category(c).startswith("P") for c in plain.strip().removeprefix("##"))
