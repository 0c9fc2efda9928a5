"""The pooled maps of all heads in one byte per bin, as pages draw them."""

from __future__ import annotations

import base64
import json
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import xarray as xr

RANGE = 1e-5  # the smallest weight with a code of its own, relative to the largest
SMALLEST = 8  # bins a side below which maps are not pooled further


def pooled_maps(one: xr.Dataset, *, average: bool, limit: int | None = None) -> tuple[dict[str, Any], str] | None:
    """A description of the pooled maps of one text, and for each head its codes as JSON; None if it has no such maps.

    A head's codes are those of the largest weight of each bin, and then, if asked for, those of its average weight.
    Code c from 1 to 255 stands for ``low · (high / low) ^ ((c − 1) / 254)``, so its error is at most 2.3 %; code 1 also
    stands for smaller weights, and code 0 for bins that are masked.

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
    seen = visible_zeros(one, bins) | (maps[:, :, 0] > 0)
    coarser = False
    while True:
        about, text = _packed(maps, seen, bins)
        if limit is None or len(text) <= limit or max(maps.shape[-2:]) <= SMALLEST:
            return about | {"coarser": coarser}, text
        maps, seen, bins = _halved(maps, seen, bins, lengths)
        coarser = True


def visible_zeros(one: xr.Dataset, bins: tuple[int, int]) -> np.ndarray:
    """Which bins surely hold visible pairs, (layer, 1, rows, columns): if their weight is 0, it is tiny, not masked.

    Only queries that see all keys, or in causal attention all keys up to their own, are counted: their visible keys are
    known without the mask.
    """
    n_queries, n_keys = int(one["n_queries"][0]), int(one["n_keys"][0])
    queries = np.arange(n_queries)
    last = queries + n_keys - n_queries if one.attrs["causal"] else np.full(n_queries, n_keys - 1)
    whole = one["visible"].values[0, :, 0, :n_queries] == last + 1  # all heads of a layer have the same mask
    reach = np.maximum.reduceat(np.where(whole, last, -1), np.arange(0, n_queries, bins[0]), axis=-1)
    return (np.arange(0, n_keys, bins[1]) <= reach[..., None])[:, None]


def _packed(maps: np.ndarray, seen: np.ndarray, bins: tuple[int, int]) -> tuple[dict[str, Any], str]:
    """The maps (layer, head, kind, row, column) as codes, compressed head by head, and their description."""
    rows, columns = maps.shape[-2:]
    high = float(maps.max()) or 1.0
    low = high * RANGE
    steps = np.rint(254 * np.log(np.maximum(maps, low).astype(np.float64) / low) / np.log(1 / RANGE)) + 1
    codes = np.where(seen[:, :, None], np.clip(steps, 1, 255), 0).astype(np.uint8)
    heads = codes.reshape(-1, codes[0, 0].size)
    packed = [base64.b64encode(zlib.compress(head.tobytes(), 6)).decode("ascii") for head in heads]
    about = {"rows": rows, "columns": columns, "bin_queries": bins[0], "bin_keys": bins[1], "low": low, "high": high}
    return about, json.dumps(packed)


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
