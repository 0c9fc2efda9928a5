"""The pooled maps that a profile stores for the heads of long texts, in the form that `map_figure` draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from qkv.statistics.maps import Picture

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class StoredMap:
    """One head of a data set of one text; `at` holds the indices of its layer and head."""

    model: str
    group: str
    data: xr.Dataset
    at: tuple[int, int]

    @property
    def layer(self) -> int:
        return int(self.data["layer"][self.at[0]])

    @property
    def head(self) -> int:
        return int(self.data["head"][self.at[1]])

    @property
    def n_queries(self) -> int:
        return int(self.data["n_queries"][0])

    @property
    def n_keys(self) -> int:
        return int(self.data["n_keys"][0])

    def query_tokens(self, rows: slice = slice(None), *, item: int = 0) -> list[str]:
        """The tokens of the queries."""
        return [str(name) for name in self.data["query_token"].values[item, : self.n_queries][rows]]

    def key_tokens(self, columns: slice = slice(None), *, item: int = 0) -> list[str]:
        """The tokens of the keys."""
        return [str(name) for name in self.data["key_token"].values[item, : self.n_keys][columns]]

    def picture(self) -> Picture | None:
        """The pooled map; None if the profile stores none for this text."""
        if "map_max" not in self.data:
            return None
        bins = int(self.data["bin_queries"][0]), int(self.data["bin_keys"][0])
        if 0 in bins:
            return None
        sides = zip((self.n_queries, self.n_keys), bins, strict=True)
        down, across = (np.array([*range(0, n, size), n]) for n, size in sides)
        largest, average = (
            self.data[name].values[0, self.at[0], self.at[1], : len(down) - 1, : len(across) - 1]
            for name in ("map_max", "map_mean")
        )
        if not np.isfinite(largest).all():
            return None
        visible = np.ones(largest.shape)
        if self.data.attrs["causal"]:  # a bin is masked if its first key comes after its last query
            visible = (across[:-1] <= down[1:, None] - 1 + self.n_keys - self.n_queries).astype(float)
        return Picture(*(torch.from_numpy(np.array(x)) for x in (largest, average, visible, down, across)))
