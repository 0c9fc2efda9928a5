"""Attention maps from a saved profile: all weights of short texts, or the small pooled maps of longer ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from qkv.errors import InputError
from qkv.plot.map import Stored, StoredMap
from qkv.profiler.explore.explorer import Info, Maps
from qkv.profiler.explore.pyramid import OnProgress, Stopped, deepest, edges, never
from qkv.report.payload import trimmed
from qkv.statistics.maps import Picture

if TYPE_CHECKING:
    import xarray as xr

    from qkv.profiler.data.profile import ProfileData


class StoredMaps(Maps):
    """Tiles, rows and columns from the data of a profile, with the methods of `qkv.profiler.Explorer`.

    Args:
        profile: with or without weights and maps.
        reason: a sentence that says why exact maps are not computed; by default, because there is no model.
    """

    def __init__(self, profile: ProfileData, reason: str | None = None) -> None:
        self._reason = reason
        self._texts = {
            (group, text): trimmed(data, text)
            for group, data in profile.groups.items()
            for text in range(data.sizes["text"])
        }
        self._infos = {place: self._info(one) for place, one in self._texts.items()}

    def info(self, group: str, text: int) -> Info:
        """The size and resolution of the maps of a text."""
        return self._infos[group, text]

    def _info(self, one: xr.Dataset) -> Info:
        sizes, stored = (one.sizes["query"], one.sizes["key"]), Stored.of(one)
        if stored is None or not np.isfinite(stored.largest).any():
            return Info(*sizes, 0, 0, "none", why=self._explanation("no maps"))
        if "weights" in one and stored.bins == (1, 1):
            return Info(*sizes, deepest(*sizes), 0, "stored")
        return Info(*sizes, 0, 0, "small", *stored.bins, self._explanation("only small pooled maps"))

    def _explanation(self, available: str) -> str:
        if self._reason is not None:
            return f"There are {available}: {self._reason}"
        return f"The profile has {available}; for exact maps, open the model on its text: qkv view MODEL --file TEXT."

    def tile(
        self, group: str, text: int, layer: int, head: int, zoom: int, i: int, j: int,
        *, stopped: Stopped = never, on_progress: OnProgress = lambda share: None,
    ) -> Picture | None:  # fmt: skip
        """A tile as in `Pyramid.tile`; None if causality masks all of it."""
        info, one = self.info(group, text), self._texts[group, text]
        if info.kind == "small":
            if (zoom, i, j) != (0, 0, 0):
                raise InputError(f"tile is {zoom}/{i}/{j}, expected 0/0/0: the profile stores one small map")
            return StoredMap("", group, one, (layer, head)).picture()
        weights = self.weights(group, text, layer, head, None, None)[0]
        rows, columns = edges(zoom, i, j, (info.n_queries, info.n_keys))
        causal = bool(one.attrs["causal"]) and info.n_queries == info.n_keys
        if causal and columns[0] >= rows[-1]:
            return None
        part = weights[rows[0] : rows[-1], columns[0] : columns[-1]].astype(np.float64)
        visible = np.tri(part.shape[0], part.shape[1], rows[0] - columns[0]) if causal else np.ones_like(part)
        return _picture(part, visible, rows, columns)

    def weights(
        self, group: str, text: int, layer: int, head: int | None, query: int | None, key: int | None,
        stopped: Stopped = never,
    ) -> np.ndarray:  # fmt: skip
        """The weights of one head, or of every head, by query and key; None selects all of them."""
        info = self.info(group, text)
        if info.kind != "stored":
            raise InputError(info.why or "")
        part = tuple(slice(None) if at is None else slice(at, at + 1) for at in (head, query, key))
        weights: np.ndarray = self._texts[group, text]["weights"].values[0, layer][part]
        return weights


def _picture(weights: np.ndarray, visible: np.ndarray, rows: list[int], columns: list[int]) -> Picture:
    """Pool weights over bins; `rows` and `columns` are the edges of the bins."""
    starts = [np.array(side[:-1]) - side[0] for side in (rows, columns)]
    sizes = np.outer(np.diff(rows), np.diff(columns))
    top = np.maximum.reduceat(np.maximum.reduceat(weights, starts[0], 0), starts[1], 1)
    sums = (np.add.reduceat(np.add.reduceat(x, starts[0], 0), starts[1], 1) for x in (weights, visible))
    largest, mean, share = (torch.from_numpy(x.astype(np.float32)) for x in (top, *(x / sizes for x in sums)))
    return Picture(largest, mean, share, torch.tensor(rows), torch.tensor(columns))
