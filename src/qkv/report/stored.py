"""Attention maps from a saved profile: all weights of short texts, or the small pooled maps of longer ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from qkv.errors import InputError
from qkv.figures.map import Stored, StoredMap
from qkv.profiler.explore.explorer import Info
from qkv.profiler.explore.pyramid import OnProgress, Stopped, deepest, edges, never
from qkv.report.payload import trimmed
from qkv.statistics.maps import Picture

if TYPE_CHECKING:
    import xarray as xr

    from qkv.profiler.profiles import Profile


class StoredMaps:
    """Tiles, rows and columns from the data of a profile, with the methods of `qkv.profiler.Explorer`.

    Args:
        profile: with or without weights and maps.
        reason: a sentence that says why exact maps are not computed; by default, because there is no model.
    """

    def __init__(self, profile: Profile, reason: str | None = None) -> None:
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
        weights = self._weights(group, text, layer)[head]
        rows, columns = edges(zoom, i, j, (info.n_queries, info.n_keys))
        causal = bool(one.attrs["causal"]) and info.n_queries == info.n_keys
        if causal and columns[0] >= rows[-1]:
            return None
        part = weights[rows[0] : rows[-1], columns[0] : columns[-1]].astype(np.float64)
        visible = np.tri(part.shape[0], part.shape[1], rows[0] - columns[0]) if causal else np.ones_like(part)
        return _picture(part, visible, rows, columns)

    def row(
        self, group: str, text: int, layer: int, head: int | None, query: int, *, stopped: Stopped = never
    ) -> np.ndarray:
        """Weights of a query, (n_keys,) float32; with head None, the mean over heads."""
        return _select_head(self._weights(group, text, layer)[:, query], head)

    def column(
        self, group: str, text: int, layer: int, head: int | None, key: int, *, stopped: Stopped = never
    ) -> np.ndarray:
        """Weights on a key, (n_queries,); with head None, the mean over heads."""
        return _select_head(self._weights(group, text, layer)[:, :, key], head)

    def pair(
        self, group: str, text: int, layer: int, head: int | None, query: int, key: int, *, stopped: Stopped = never
    ) -> float:
        """The weight of a query on a key; with head None, the mean over heads."""
        return float(self.row(group, text, layer, head, query)[key])

    def strongest(
        self, group: str, text: int, layer: int, query: int, *, stopped: Stopped = never
    ) -> tuple[np.ndarray, np.ndarray]:
        """For every head of the layer, the key with the largest weight of a query, and that weight."""
        weights = self._weights(group, text, layer)[:, query]
        return weights.argmax(-1), weights.max(-1)

    def _weights(self, group: str, text: int, layer: int) -> np.ndarray:
        """(heads, n_queries, n_keys) of a layer."""
        info = self.info(group, text)
        if info.kind != "stored":
            raise InputError(info.why or "")
        weights: np.ndarray = self._texts[group, text]["weights"].values[0, layer]
        return weights


def _select_head(lines: np.ndarray, head: int | None) -> np.ndarray:
    """One head of (heads, n) weights, or their mean."""
    if head is not None:
        return lines[head]
    return lines.mean(0, dtype=np.float64).astype(np.float32)


def _picture(weights: np.ndarray, visible: np.ndarray, rows: list[int], columns: list[int]) -> Picture:
    """Pool weights over bins; `rows` and `columns` are the edges of the bins."""
    starts = [np.array(side[:-1]) - side[0] for side in (rows, columns)]
    sizes = np.outer(np.diff(rows), np.diff(columns))
    top = np.maximum.reduceat(np.maximum.reduceat(weights, starts[0], 0), starts[1], 1)
    sums = (np.add.reduceat(np.add.reduceat(x, starts[0], 0), starts[1], 1) for x in (weights, visible))
    largest, mean, share = (torch.from_numpy(x.astype(np.float32)) for x in (top, *(x / sizes for x in sums)))
    return Picture(largest, mean, share, torch.tensor(rows), torch.tensor(columns))
