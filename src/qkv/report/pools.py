"""The pooled maps of all heads in one byte per bin, as pages draw them."""

from __future__ import annotations

import base64
import json
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import xarray as xr

RANGE = 1e-5  # the smallest weight with a colour, relative to the largest


def pooled_maps(one: xr.Dataset, *, average: bool) -> tuple[dict[str, Any], str] | None:
    """A description of the pooled maps of one text, and for each head its codes as JSON; None if it has no such maps.

    A head's codes are those of the largest weight of each bin, and then, if asked for, those of its average weight.
    Code c from 1 to 255 stands for ``low · (high / low) ^ ((c − 1) / 254)``, so its error is at most 2.3 %; code 0
    for a smaller weight.
    """
    if "map_max" not in one or 0 in (bins := (int(one["bin_queries"][0]), int(one["bin_keys"][0]))):
        return None
    rows, columns = -(-int(one["n_queries"][0]) // bins[0]), -(-int(one["n_keys"][0]) // bins[1])
    names = ("map_max", "map_mean") if average else ("map_max",)
    maps = np.stack([one[name].values[0, :, :, :rows, :columns] for name in names], 2)
    if not np.isfinite(maps).all():
        return None
    high = float(maps.max()) or 1.0
    low = high * RANGE
    with np.errstate(divide="ignore"):
        steps = np.rint(254 * np.log(maps.astype(np.float64) / low) / np.log(1 / RANGE)) + 1
    codes = np.where(maps >= low, np.clip(steps, 1, 255), 0).astype(np.uint8)
    packed = [
        base64.b64encode(zlib.compress(head.tobytes(), 6)).decode("ascii")
        for head in codes.reshape(-1, len(names) * rows * columns)
    ]
    about = {"rows": rows, "columns": columns, "bin_queries": bins[0], "bin_keys": bins[1], "low": low, "high": high}
    return about, json.dumps(packed)
