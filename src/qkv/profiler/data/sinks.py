"""Tables of attention sinks: tokens that many queries attend to regardless of content (Gu et al. 2025).

Thresholds act on shares of the row, so that all normalizers compare. Beside them stand the model's own weight, the
weight on a null key, the first token's part of what the values add, and the share that even rows would give it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from qkv.errors import InputError
from qkv.profiler.data import tables
from qkv.profiler.data.types import prefix_sink_scores, sink_scores

if TYPE_CHECKING:
    import pandas as pd

EPSILON = 0.3  # a head has a sink where α is larger (Gu et al. 2025, arXiv:2410.10781, section 3)


def sink_table(data: xr.Dataset, threshold: float = EPSILON) -> pd.DataFrame:
    """One row per layer and head; `Profile.sinks` documents the columns."""
    import pandas as pd

    _check(data, threshold)
    layers, heads = data.sizes["layer"], data.sizes["head"]
    table = pd.DataFrame(
        {"layer": np.repeat(data["layer"].values, heads), "head": np.tile(data["head"].values, layers)}
    )
    sink = data["sink"].values
    entries = np.where(np.isnan(sink), np.nan, sink > threshold)
    prefix, score = prefix_sink_scores(data), sink_scores(data)
    assert score is not None
    with np.errstate(divide="ignore", invalid="ignore"):
        even = np.where(data["visible"].values > 0, 1 / data["visible"].values, 0)
    columns = {
        "sink_share": _mean(data, entries),
        "weight_first": _mean(data, tables.raw_weights(data, "sink")),
        "share_first": _mean(data, sink),
        "even_share": _mean(data, even),
        "contribution_first": _mean(data, _values(data, "first_contribution")),
        "learned_sink": _mean(data, _values(data, "sink_mass")),
        "alpha_first": None if prefix is None else prefix[..., 0],
        "alpha_even": None if prefix is None else _over_first(data, even, prefix.shape[-1]),
    }
    if "sink_mass" not in data:
        del columns["learned_sink"]
    columns |= {f"alpha_{kind}": _values(data, f"probe_sink_{kind}") for kind in ("random", "repeated")}
    best, text, key = _best(score)
    columns |= {"alpha_best": best, "best_text": text, "best_key": key}
    table = table.assign(**{name: _flat(x, layers * heads) for name, x in columns.items()})
    table.insert(table.columns.get_loc("best_key") + 1, "best_token", data["key_token"].values[text, key].ravel())
    for name in ("key", "value"):
        if f"{name}_norm" in data:
            ratio = relative_norm(data[f"{name}_norm"].values)
            table[f"{name}_norm_first"] = tables.over_texts(ratio[..., 0]).ravel()
            table[f"{name}_norm_best"] = np.take_along_axis(
                np.moveaxis(ratio, 0, 2).reshape(layers, heads, -1), (text * ratio.shape[-1] + key)[..., None], -1
            ).ravel()
    for name in ("cosine_first", "cosine_others", "first_key_angle", "key_bias_cosine"):
        if name in data:
            table[name] = tables.over_texts(data[name].values).ravel()
    return table


def sink_tokens(data: xr.Dataset, threshold: float = EPSILON) -> pd.DataFrame:
    """One row per token that is a sink of some head; `Profile.sink_tokens` documents the columns."""
    import pandas as pd

    _check(data, threshold)
    score = sink_scores(data)
    assert score is not None
    with np.errstate(invalid="ignore"):
        is_sink = score > threshold
    text, key = np.nonzero(is_sink.any((1, 2)))
    alphas = np.nan_to_num(score[text, :, :, key])
    rows = {
        "text": text,
        "position": key,
        "token": data["key_token"].values[text, key],
        "heads": is_sink[text, :, :, key].sum((1, 2)),
        "share_of_heads": is_sink[text, :, :, key].mean((1, 2)),
        "alpha": alphas.max((1, 2), initial=0),
        "layers": [_ranges(data["layer"].values[one.any(1)]) for one in is_sink[text, :, :, key]],
    }
    for name in ("key", "value"):
        if f"{name}_norm" in data:
            ratios = np.where(is_sink, relative_norm(data[f"{name}_norm"].values), np.nan)[text, :, :, key]
            known = [one[~np.isnan(one)] for one in ratios]  # empty for a text of a single token
            rows[f"{name}_norm"] = np.array([one.mean() if len(one) else np.nan for one in known])
    return pd.DataFrame(rows).sort_values(["heads", "alpha"], ascending=False, kind="stable").reset_index(drop=True)


def sink_summary(data: xr.Dataset, threshold: float = EPSILON) -> dict[str, float]:
    """Sink scores of a whole group; scores that were not measured are left out.

    ``entries`` is the share of pairs (head, query from the second) with more than the threshold on the first token.
    ``natural``, ``random`` and ``repeated`` are the shares of heads whose sink score α of the first token exceeds the
    threshold, on the first 64 tokens of the text, on random tokens, and on one token repeated. ``anywhere`` is the
    share of heads with a sink at any token. ``even_alpha`` is the α of rows of even weights, on the text.

    Means over heads, and over the queries after the first: ``share`` is the share of the row on the first token,
    ``even`` the share that rows of even weights would give it, ``weight`` the model's own weight on it, ``learned`` the
    weight on the learned sink, and ``contribution`` the first token's part of what the values add.
    """
    table = sink_table(data, threshold)
    found = {} if table["sink_share"].isna().all() else {"entries": float(table["sink_share"].mean())}
    if table["alpha_even"].notna().any():
        found["even_alpha"] = float(table["alpha_even"].mean())
    for name, column in (("natural", "first"), ("random", "random"), ("repeated", "repeated"), ("anywhere", "best")):
        alpha = table[f"alpha_{column}"].to_numpy()
        if not np.isnan(alpha).all():
            found[name] = float((alpha[~np.isnan(alpha)] > threshold).mean())
    means = {"share": "share_first", "even": "even_share", "weight": "weight_first", "learned": "learned_sink",
             "contribution": "contribution_first"}  # fmt: skip
    for name, column in means.items():
        if column in table and table[column].notna().any():
            found[name] = float(table[column].mean())
    return found


def relative_norm(norm: np.ndarray) -> np.ndarray:
    """Each vector's norm divided by the mean norm of the others in its text and head: (text, layer, head, key)."""
    count = (~np.isnan(norm)).sum(-1, keepdims=True)
    others = (np.nansum(norm, -1, keepdims=True) - norm) / np.maximum(count - 1, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: np.ndarray = np.where(count > 1, norm / others, np.nan)
    return ratio


def _check(data: xr.Dataset, threshold: float) -> None:
    if not 0 < threshold < 1:
        raise InputError(f"threshold is {threshold}, expected a weight between 0 and 1")
    if "visible_queries" not in data:
        raise InputError(
            "profile has no variable 'visible_queries' (an older qkv wrote it, or it was built by hand): profile again"
        )


def _best(score: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The largest sink score of each head, its text and its key; NaN and (0, 0) for a head without scores."""
    flat = np.nan_to_num(np.moveaxis(score, 0, 2), nan=0.0).reshape(*score.shape[1:3], -1)
    at = flat.argmax(-1)
    text, key = np.divmod(at, score.shape[-1])
    best = np.take_along_axis(flat, at[..., None], -1)[..., 0]
    return np.where(np.isnan(score).all((0, 3)), np.nan, best), text, key


def _mean(data: xr.Dataset, values: np.ndarray | None) -> np.ndarray | None:
    """The mean over the queries after the first of each text, then over texts: (layer, head)."""
    if values is None:
        return None
    return tables.over_texts(tables.mean_over_queries(values, tables.later_queries(data)))


def _over_first(data: xr.Dataset, values: np.ndarray, queries: int) -> np.ndarray:
    """The mean over the first queries of each text, then over texts: (layer, head)."""
    first = tables.valid_queries(data) & (np.arange(data.sizes["query"]) < queries)
    return tables.over_texts(tables.mean_over_queries(values, first))


def _values(data: xr.Dataset, name: str) -> np.ndarray | None:
    return data[name].values if name in data else None


def _flat(x: np.ndarray | None, length: int) -> np.ndarray:
    return np.full(length, np.nan) if x is None else x.ravel()


def _ranges(numbers: np.ndarray) -> str:
    """Sorted numbers as ranges: "0–3, 5" for 0, 1, 2, 3, 5."""
    parts: list[list[int]] = []
    for n in numbers.tolist():
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}–{p[-1]}" for p in parts)
