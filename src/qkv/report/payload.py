"""The data of a page as JSON, and the pooled maps of all heads in one byte per bin."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qkv.plot import layout
from qkv.profiler.data import frames, sinks, tables
from qkv.profiler.data.findings import Findings
from qkv.profiler.data.tables import MIXED, ROLES, telling_heads, type_table

if TYPE_CHECKING:
    import xarray as xr

    from qkv.profiler.data.profile import ProfileData


CELLS = 590_000  # largest number of values along the texts: 8,192 tokens of 270 heads take 3 MB; more are binned
CURVE_BINS = 256  # charts are not wider
MAP_CELLS = 24_000_000  # all weights, about half a byte each in the page
SCALES = {"log": (np.log, 1e-5), "root": (np.sqrt, 255**-2)}  # of codes of maps; their smallest weight, of the largest
SMALLEST = 8  # bins a side below which maps are not pooled further
POOLED_CHARACTERS = 3_000_000  # largest size of the pooled maps of all texts, in characters
SINK_TOKENS = 12  # number of sink tokens listed, those of most heads first
RESIDUAL = (  # variables of hidden states that a report shows, if a profile has all of them
    *("n_tokens", "largest", "largest_token", "largest_dimension", "median", "massive"),
    *("massive_above", "massive_times_median"),
)
CLOSING = frozenset(".,;:!?)]}%’”…")  # written without a space before it
CONTROL = re.compile(r"<\|?(\w+)\|?>")  # a token of a chat template, such as <|im_start|>, <start_of_turn> or <|user|>
SPEAKERS = ("system", "developer", "user", "assistant", "model", "tool")
NOT_COLUMNS = ("layer", "head", "module", "target")  # columns of the table of heads that pages get elsewhere


def payload(profile: ProfileData, *, weights: bool = True) -> tuple[dict[str, Any], dict[str, str]]:
    """The page's JSON, and its base64 blobs by element id; `weights`: whether these hold all weights of short texts."""
    views = sum(data.sizes["text"] for data in profile.groups.values())
    cells_left, blobs, groups = MAP_CELLS, dict[str, str](), list[dict[str, Any]]()
    for name, data in profile.groups.items():
        texts = []
        for text in range(data.sizes["text"]):
            place = f"{len(groups)}-{text}"
            one = trimmed(data, text)
            view, curves = _view(one, views, Findings(one, profile.attrs, name))
            blobs[f"curves-{place}"] = curves
            view["has_weights"] = "weights" in one and bool(np.isfinite(one["weights"].values).all())
            maps = dict[str, tuple[dict[str, Any], str]]()
            if weights and view["has_weights"] and one["weights"].size <= cells_left:
                cells_left -= one["weights"].size
                maps["weights"] = _weights(one)
            pooled = pooled_maps(one, average=not maps, limit=POOLED_CHARACTERS // views)
            if pooled is not None:
                maps["pooled"] = pooled
            view["maps"] = [{"kind": kind} | about for kind, (about, _) in maps.items()]  # the finest first
            blobs |= {f"{kind}-{place}": codes for kind, (_, codes) in maps.items()}
            texts.append(view)
        groups.append(
            {
                "name": name,
                "causal": bool(data.attrs["causal"]),
                "window": int(data.attrs["local_window"]),
                "layers": data["layer"].values.tolist(),
                "heads": data["head"].values.tolist(),
                "modules": data["module"].values.tolist(),
                "texts": texts,
                "telling": telling_heads(data),
                **_of_heads(data),
                "sink": _plain(pd.DataFrame([view["heads"]["sink"] for view in texts], dtype=float).mean().tolist()),
                "sink_sentence": str(Findings(data, profile.attrs, name).sinks or ""),
                **_residual(profile, name),
            }
        )
    present = {kind for group in groups for kind in group["types"]["type"]}
    page = {
        "attrs": profile.attrs,
        "main": list(profile.groups).index(profile.main),
        "groups": groups,
        "roles": [
            {"name": name, "light": layout.KINDS[name], "dark": layout.KINDS_DARK[name]}
            for name in (*ROLES, MIXED)
            if name in present
        ],
        **looks(*profile.groups.values()),
    }
    return page, blobs


def as_json(page: dict[str, Any]) -> str:
    """A page as JSON without spaces; lone surrogates, which cannot be encoded, become the replacement character."""
    text = json.dumps(page, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)


def looks(*groups: xr.Dataset) -> dict[str, Any]:
    """Labels and colours of statistics and destinations, for all pages, with user-defined statistics of `groups`."""
    statistics = frames.STATISTICS
    for data in groups:
        statistics = statistics | frames.columns_of(data)
    return {
        "statistics": {name: column._asdict() for name, column in statistics.items()},
        "destinations": [
            {"name": name, "label": label, "light": light, "dark": dark}
            for name, (label, light, dark) in layout.DESTINATIONS.items()
        ],
        "ramp": {"light": layout.RAMP, "dark": layout.RAMP_DARK},
    }


def trimmed(data: xr.Dataset, text: int) -> xr.Dataset:
    """One text, without the padding after its last query and key: a view, not a copy."""
    lengths = int(data["n_queries"][text]), int(data["n_keys"][text])
    return data.isel(text=slice(text, text + 1), query=slice(lengths[0]), key=slice(lengths[1]))


def display(tokens: list[str]) -> list[str]:
    """Tokens as running text: the marks of tokenizers become spaces and line breaks."""
    if any(token.startswith(("Ġ", "▁")) for token in tokens):
        return [token.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n") for token in tokens]
    if any(token.startswith((" ", "\n")) for token in tokens):
        return list(tokens)
    return [_piece(token) for token in tokens]


def _piece(token: str) -> str:
    """A token of a tokenizer that marks the inside of words ("##") and drops the spaces between them."""
    if token.startswith("##") and len(token) > 2:
        return token[2:]
    return token if token in CLOSING else f" {token}"


def turns(tokens: list[str]) -> list[tuple[int, int, int, str]]:
    r"""The turns of a chat, (first token, first token of the words, token after the words, role); none of another text.

    A turn begins with a token of the template that is a role, or that is followed by one and a line break or another
    such token, as in the templates of ChatML, Llama 3, Gemma and Phi; its words end before the next such token.

    >>> turns(["<|im_start|>", "user", "\n", "Why", "?", "<|im_end|>", "\n", "<|im_start|>", "ass", "istant", "\n"])
    [(0, 3, 5, 'user'), (7, 11, 11, 'assistant')]
    """
    controls = [CONTROL.fullmatch(token.strip()) for token in tokens]
    at = [place for place, control in enumerate(controls) if control]
    found = list[tuple[int, int, int, str]]()
    for first, control in ((place, controls[place]) for place in at):
        assert control is not None
        role, words = control[1], first + 1
        if role not in SPEAKERS:
            breaks = (n for n in range(first + 1, len(tokens)) if controls[n] or "\n" in tokens[n])
            head = next(breaks, len(tokens))
            role, words = "".join(tokens[first + 1 : head]).strip(), head + 1
        if role not in SPEAKERS:
            continue
        while words < len(tokens) and not tokens[words].strip():
            words += 1
        words = min(words, len(tokens))
        found.append((first, words, next((place for place in at if place >= words), len(tokens)), role))
    return found if len(found) > 1 else []


def _view(one: xr.Dataset, views: int, found: Findings) -> tuple[dict[str, Any], str]:
    """The data of one text of one group, and its packed curves."""
    heads = tables.head_table(one)
    n_heads = len(heads)
    n_queries, n_keys = one.sizes["query"], one.sizes["key"]
    received = tables.received_share(one)[0]
    curve = min(n_queries, CURVE_BINS, max(32, CELLS // (3 * views * n_heads)))
    left = CELLS // views - (len(received) + 1) * n_keys - 3 * curve * n_heads  # those of layers are kept by token
    bins = {"received": min(n_keys, max(64, left // n_heads)), "curve": curve}
    along = {name: one[name].values[0] for name in ("entropy", "distance", "sink")}
    along = {name: values for name, values in along.items() if np.isfinite(values).any()}
    along["uniform"] = np.log(np.maximum(one["visible"].values[0, :, 0], 1))  # all heads of a layer have the same mask
    arrays = {
        "received": (layout.bins(received, bins["received"])[0], "log"),
        "layers": (received.mean(1), "log"),
        "mean": (received.mean((0, 1)), "log"),
        **{name: (layout.bins(values, curve)[0], "linear") for name, values in along.items()},
    }
    index, codes = _packed(arrays)
    keys, queries = (display(one[f"{side}_token"].values[0].tolist()) for side in ("key", "query"))
    tokens = tables.token_table(one).head(25)
    tokens["token"] = tokens["token"].map(tables.names_of(one))
    view = {
        "n_queries": n_queries,
        "n_keys": n_keys,
        "headline": found.headline,
        "findings": [f._asdict() | {"steps": [step._asdict() for step in f.steps]} for f in found.all],
        "heads": {name: _plain(heads[name].tolist()) for name in heads if name not in NOT_COLUMNS},
        "shares": {name: _plain(part[0].ravel().tolist()) for name, part in tables.destinations(one).items()},
        "keys": keys,
        "queries": None if keys == queries else queries,
        "turns": turns(keys) if keys == queries else [],
        "tokens": {name: _plain(tokens[name].tolist()) for name in ("token", "share", "count", "lift", "position")},
        "bins": bins,
        "arrays": index,
    }
    return view, codes


def _of_heads(data: xr.Dataset) -> dict[str, Any]:
    """The type and the sinks of each head, over all texts; without the sinks if they were not measured."""
    types = type_table(data)
    entries = {"types": _columns(types) | {"traits": [row.split(", ") if row else [] for row in types["traits"]]}}
    if "visible_queries" in data:
        entries["sinks"] = _columns(sinks.sink_table(data))
        entries["sink_tokens"] = _columns(sinks.sink_tokens(data).head(SINK_TOKENS), every=True)
    return entries


def _columns(table: pd.DataFrame, *, every: bool = False) -> dict[str, list[Any]]:
    """The columns of a table, except the ids of heads and, unless `every`, columns without any value."""
    names = [name for name in table if name not in ("layer", "head") and (every or table[name].notna().any())]
    return {str(name): _plain(table[name].tolist()) for name in names}


def _residual(profile: ProfileData, name: str) -> dict[str, Any]:
    """Hidden states by depth of the stack that contains a group: the largest |x|.

    With several texts, the largest |x| is the maximum over texts, and the median is taken from the same text.
    """
    data = profile.groups[name]
    stack = next(
        (s for s in profile.residual.values() if str(data["module"].values[0]).startswith(f"{s.attrs.get('stack')}.")),
        None,
    )
    if stack is None or not {*RESIDUAL} <= {*stack.variables, *stack.attrs} or name.startswith("cross"):
        return {}
    if (stack["n_tokens"].values != data["n_queries"].values).any():
        return {}
    text = stack["largest"].values[..., 0].argmax(0)
    names = ("largest", "largest_token", "largest_dimension", "median")
    at = {one: stack[one].values[text, np.arange(len(text))] for one in names}
    position = at["largest_token"][:, 0]
    entries = {
        "largest": at["largest"][:, 0],
        "median": at["median"],
        "massive": stack["massive"].values.max(0),
        "position": position,
        "dimension": at["largest_dimension"][:, 0],
        "token": data["query_token"].values[text, position],
    }
    above = {"above": float(stack.attrs["massive_above"]), "times": float(stack.attrs["massive_times_median"])}
    return {"residual": {key: _plain(values.tolist()) for key, values in entries.items()} | above}


def _packed(arrays: dict[str, tuple[np.ndarray, str]]) -> tuple[dict[str, dict[str, Any]], str]:
    """Arrays with their scales as 16-bit codes in base64, and the shape, place and scale of each.

    Codes 1 to 65534 span the values of an array (their logarithms for "log"); 0 is zero or less, 65535 NaN. First come
    all low bytes, then all high bytes, which repeat and compress well.
    """
    index, parts, start = dict[str, dict[str, Any]](), list[np.ndarray](), 0
    for name, (values, scale) in arrays.items():
        with np.errstate(divide="ignore", invalid="ignore"):
            numbers = np.log(values) if scale == "log" else np.asarray(values, np.float64)
        finite = np.isfinite(numbers)
        low, high = (float(numbers[finite].min()), float(numbers[finite].max())) if finite.any() else (0.0, 0.0)
        part, steps = _steps(np.where(finite, numbers, low), low, high, 65533)
        part[~finite] = 0
        part[np.isnan(values)] = 65535
        index[name] = {"shape": values.shape, "start": start, "scale": scale, **steps}
        parts.append(part.astype(np.uint16).ravel())
        start += part.size
    codes = np.concatenate(parts)
    return index, _deflated(np.concatenate([codes & 255, codes >> 8]).astype(np.uint8))


def _steps(numbers: np.ndarray, low: float, high: float, count: int) -> tuple[np.ndarray, dict[str, float]]:
    """Numbers from `low` to `high` in `count` equal steps, as codes from 1 on, and what a page needs to read them."""
    step = (high - low) / count or 1.0
    return np.rint((numbers - low) / step) + 1, {"low": float(low), "step": float(step)}


def _deflated(values: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(values.tobytes(), 6)).decode("ascii")


def _plain(values: list[Any]) -> list[Any]:
    """Numbers rounded to six digits, for size; None for NaN and infinity, which JSON does not have."""
    return [
        (float(f"{value:.6g}") if math.isfinite(value) else None) if isinstance(value, float) else value
        for value in values
    ]


def _weights(one: xr.Dataset) -> tuple[dict[str, Any], str]:
    """All weights of one text, as `pooled_maps`; on a square-root scale, so that small ones stay apart."""
    weights = one["weights"].values[0][:, :, None]
    return _coded(weights, _seen(one, weights, (1, 1)), (1, 1), "root")


def pooled_maps(one: xr.Dataset, *, average: bool, limit: int | None = None) -> tuple[dict[str, Any], str] | None:
    """A description of the pooled maps of one text, and for each head its codes as JSON; None if it has no such maps.

    A head's codes are those of the largest weight of each bin, and then, if asked for, those of its average weight.
    They are logarithmic, so their error is at most 2.3 %. Code 0 stands for bins that are masked.

    If the JSON is longer than `limit` characters, bins are pooled two by two until it fits, or until a map has few
    bins; ``coarser`` is then true.
    """
    if "map_max" not in one or 0 in (bins := (int(one["bin_queries"][0]), int(one["bin_keys"][0]))):
        return None
    lengths = int(one["n_queries"][0]), int(one["n_keys"][0])
    rows, columns = (-(-n // size) for n, size in zip(lengths, bins, strict=True))
    names = ("map_max", "map_mean") if average else ("map_max",)
    maps = np.stack([one[name].values[0, :, :, :rows, :columns] for name in names], 2)
    if not np.isfinite(maps).all():
        return None
    seen, coarser = _seen(one, maps, bins), False
    while True:
        about, text = _coded(maps, seen, bins, "log")
        if limit is None or len(text) <= limit or max(maps.shape[-2:]) <= SMALLEST:
            return about | {"coarser": coarser}, text
        maps, seen, bins = _halved(maps, seen, bins, lengths)
        coarser = True


def _seen(one: xr.Dataset, maps: np.ndarray, bins: tuple[int, int]) -> np.ndarray:
    """Which bins of maps (layer, head, kind, row, column) surely hold visible pairs, where 0 is a tiny weight.

    Besides bins with a weight, these are bins of queries that see all keys, or in causal attention all keys up to their
    own: their visible keys are known without the mask.
    """
    n_queries, n_keys = int(one["n_queries"][0]), int(one["n_keys"][0])
    queries = np.arange(n_queries)
    last = queries + n_keys - n_queries if one.attrs["causal"] else np.full(n_queries, n_keys - 1)
    whole = one["visible"].values[0, :, 0, :n_queries] == last + 1  # all heads of a layer have the same mask
    reach = np.maximum.reduceat(np.where(whole, last, -1), np.arange(0, n_queries, bins[0]), axis=-1)
    return (np.arange(0, n_keys, bins[1]) <= reach[..., None])[:, None] | (maps[:, :, 0] > 0)


def _coded(maps: np.ndarray, seen: np.ndarray, bins: tuple[int, int], scale: str) -> tuple[dict[str, Any], str]:
    """The maps (layer, head, kind, row, column) as codes, compressed head by head, and their description."""
    function, least = SCALES[scale]
    high = float(maps.max()) or 1.0
    codes, steps = _steps(function(np.maximum(maps, high * least)), function(high * least), function(high), 254)
    codes = np.where(seen[:, :, None], codes, 0).astype(np.uint8)
    about = {
        "rows": maps.shape[-2], "columns": maps.shape[-1], "bin_queries": bins[0], "bin_keys": bins[1], "high": high,
        "scale": scale, **steps,
    }  # fmt: skip
    return about, json.dumps([_deflated(head) for head in codes.reshape(-1, codes[0, 0].size)])


def _halved(
    maps: np.ndarray, seen: np.ndarray, bins: tuple[int, int], lengths: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """Pool two by two bins, of which the last may be smaller than others."""
    tokens = [np.diff([*range(0, n, size), n]) for n, size in zip(lengths, bins, strict=True)]
    down, across = (np.arange(0, len(count), 2) for count in tokens)

    def pooled(function: np.ufunc, values: np.ndarray) -> np.ndarray:
        return function.reduceat(function.reduceat(values, down, -2), across, -1)

    pairs = tokens[0][:, None] * tokens[1]
    kinds = [pooled(np.maximum, maps[:, :, :1])]
    if maps.shape[2] > 1:
        kinds.append(pooled(np.add, maps[:, :, 1:] * pairs) / pooled(np.add, pairs))
    return np.concatenate(kinds, 2), pooled(np.logical_or, seen), (2 * bins[0], 2 * bins[1])
