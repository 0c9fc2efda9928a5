"""Tables of attention sinks: tokens that many queries attend to regardless of content (Gu et al. 2025).

Thresholds act on shares of the row, so that all normalizers compare. Beside them stand the model's own weight, the
weight on a null key, the contribution of the first token, and the share that even rows would give it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xarray as xr

from qkv.errors import InputError
from qkv.profiler.data import tables
from qkv.profiler.data.images import place_words
from qkv.profiler.data.tables import prefix_sink_scores, readable, sink_scores

if TYPE_CHECKING:
    import pandas as pd

PREFIX = 64  # queries of the first range of a trend, those of the sink score
EPSILON = (
    tables.SINK_THRESHOLD
)  # a head has a sink where the score is larger (Gu et al. 2025, arXiv:2410.10781, section 3)


def sink_table(data: xr.Dataset, threshold: float = EPSILON) -> pd.DataFrame:
    """One row per layer and head; `Profile.sinks` documents the columns."""
    _check(data, threshold)
    layers, heads = data.sizes["layer"], data.sizes["head"]
    sink = data["sink"].values
    entries = np.where(np.isnan(sink), np.nan, sink > threshold)
    prefix, score = prefix_sink_scores(data), sink_scores(data)
    early = tables.valid_queries(data) & (np.arange(data.sizes["query"]) < data.sizes.get("prefix_key", 0))
    assert score is not None
    even = tables.even_shares(data)
    columns = {
        "sink_share": _mean(data, entries),
        "weight_first": _mean(data, tables.raw_weights(data, "sink")),
        "share_first": _mean(data, sink),
        "even_share": _mean(data, even),
        "contribution_first": _mean(data, _values(data, "first_contribution")),
        "learned_sink": _mean(data, _values(data, "sink_mass")),
        "alpha_first": None if prefix is None else prefix[..., 0],
        "alpha_even": None if prefix is None else tables.by_head(even, early),
        "alpha_whole": tables.over_texts(score[..., 0]),
    }
    if "sink_mass" not in data:
        del columns["learned_sink"]
    columns |= {f"alpha_{kind}": _values(data, f"probe_sink_{kind}") for kind in ("random", "repeated")}
    best, text, key = _best(score)
    columns |= {"alpha_best": best, "best_text": text, "best_key": key}
    blank = np.full((layers, heads), np.nan)
    flat = {name: (blank if x is None else x).ravel() for name, x in columns.items()}
    table = tables.heads_of(data).assign(**flat)
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
        "layers": [ranges(data["layer"].values[one.any(1)]) for one in is_sink[text, :, :, key]],
    }
    for name in ("key", "value"):
        if f"{name}_norm" in data:
            ratios = np.where(is_sink, relative_norm(data[f"{name}_norm"].values), np.nan)[text, :, :, key]
            known = [one[~np.isnan(one)] for one in ratios]  # empty for a text of a single token
            rows[f"{name}_norm"] = np.array([one.mean() if len(one) else np.nan for one in known])
    if "patch" in data:
        rows["place"] = [place_words(data, *at) for at in zip(text.tolist(), key.tolist(), strict=True)]
    return pd.DataFrame(rows).sort_values(["heads", "alpha"], ascending=False, kind="stable").reset_index(drop=True)


def massive_sentence(stack: xr.Dataset, tokens: np.ndarray | None = None) -> str:
    """The massive activations of a stack of layers: how many pairs of a token and a dimension, and which.

    The three largest activations of each depth are known; further ones are counted only.

    Args:
        stack: hidden states, see `qkv.profiler.capture.residual.by_stack`.
        tokens: the names of the tokens, (text, token), if they are known.
    """
    size, median = stack["largest"].values, stack["median"].values[..., None]
    with np.errstate(invalid="ignore"):
        is_massive = (size > stack.attrs["massive_above"]) & (size >= stack.attrs["massive_times_median"] * median)
    found: dict[tuple[int, int, int], list[tuple[int, float]]] = {}
    for text, depth, rank in np.argwhere(is_massive):
        at = int(stack["largest_token"][text, depth, rank]), int(stack["largest_dimension"][text, depth, rank])
        ratio = float(size[text, depth, rank] / median[text, depth, 0])
        found.setdefault((int(text), *at), []).append((int(stack["depth"][depth]), ratio))
    if not found:
        return f"no massive activations; the largest is {stack['ratio'].max().item():,.0f} × the median"
    order = sorted(found.items(), key=lambda one: -max(ratio for _, ratio in one[1]))
    parts = []
    for (text, token, dimension), seen in order[:3]:
        name = "the token" if tokens is None else f"“{readable(str(tokens[text, token]))}”"
        depths = f"depth{'' if len(seen) == 1 else 's'} {ranges(np.array([depth for depth, _ in seen]))}"
        largest = max(ratio for _, ratio in seen)
        where = f"position {token:,} in dimension {dimension:,}, at {depths}"
        parts.append(f"{name} at {where}, up to {largest:,.0f} × the median")
    more = f"; {len(found) - 3:,} more" if len(found) > 3 else ""
    further = int(stack["massive"].sum()) - int(is_massive.sum())
    more += f"; {further:,} smaller ones" if further > 0 else ""
    what = "massive activation" if len(found) == 1 else "massive activations"
    return f"{len(found):,} {what}: {'; '.join(parts)}{more}"


def first_token_table(data: xr.Dataset) -> pd.DataFrame:
    """One row per layer; `Profile.first_token` documents the columns."""
    import pandas as pd

    later = tables.later_queries(data)
    if not later.any():
        raise InputError("profile: no text has a second token, so only the first token attends to the first")
    sink = data["sink"].values
    heads = tables.by_head(sink, later)
    table = {
        "layer": data["layer"].values,
        "mean": np.nanmean(heads, 1),
        "even": np.nanmean(tables.by_head(tables.even_shares(data), later), 1),
        "strongest_head": data["head"].values[heads.argmax(1)],
        "strongest_mean": heads.max(1),
        "max": np.nanmax(np.where(later[:, None, None], sink, np.nan), (0, 2, 3)),
    }
    return pd.DataFrame(table)


class Trend(NamedTuple):
    """Weight on the first token by range of query positions."""

    ranges: list[tuple[int, int]]
    """First position of each range, and the position after its last."""
    share: np.ndarray
    """Mean share of the row on the first token: (range, layer, head)."""
    even: np.ndarray
    """The share that rows of even weights would give it: (range, layer, head)."""


def trend_by_head(data: xr.Dataset) -> Trend:
    """The weight of each head on the first token, by range of query positions; means over queries, then over texts."""
    sink, positions = data["sink"].values, np.arange(data.sizes["query"])
    even = np.where(data["visible"].values > 0, tables.even_shares(data), np.nan)
    ranges = _ranges_of_positions(data.sizes["query"])
    chosen = [tables.valid_queries(data) & (positions >= first) & (positions < stop) for first, stop in ranges]
    share, floor = (np.stack([tables.by_head(x, queries) for queries in chosen]) for x in (sink, even))
    return Trend(ranges, share, floor)


def sink_trend(data: xr.Dataset, threshold: float = EPSILON) -> pd.DataFrame:
    """One row per range of query positions; `Profile.sink_trend` documents the columns."""
    import pandas as pd

    _check(data, threshold)
    ranges, share, even = trend_by_head(data)
    with np.errstate(invalid="ignore"):
        heads = (share > threshold).sum((1, 2))
    means = {
        name: [float(tables.over_texts(x.ravel())) for x in found] for name, found in (("share", share), ("even", even))
    }
    table = pd.DataFrame([(first, stop - 1) for first, stop in ranges], columns=["first", "last"])
    return table.assign(**means, heads=heads.tolist())


def _ranges_of_positions(length: int) -> list[tuple[int, int]]:
    """Ranges 0–63, 64–127, 128–255 and so on, each as long as all before it; a last one of few queries is joined."""
    edges = [0, PREFIX]
    while edges[-1] < length:
        edges.append(2 * edges[-1])
    edges[-1] = length
    if len(edges) > 2 and edges[-1] - edges[-2] < PREFIX // 4:
        del edges[-2]
    return list(itertools.pairwise(edges))


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
        raise InputError("profile has no variable 'visible_queries' (it was built by hand): profile again")


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
    return tables.by_head(values, tables.later_queries(data))


def _values(data: xr.Dataset, name: str) -> np.ndarray | None:
    return data[name].values if name in data else None


def ranges(numbers: np.ndarray) -> str:
    """Sorted numbers as ranges: "0–3, 5" for 0, 1, 2, 3, 5."""
    parts: list[list[int]] = []
    for n in numbers.tolist():
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}–{p[-1]}" for p in parts)
