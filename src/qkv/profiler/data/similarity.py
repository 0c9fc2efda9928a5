"""Similarity of heads by their attention maps: 1 − the mean Jensen-Shannon divergence of their rows.

Clark et al. 2019 (arXiv:1906.04341, section 6) compare two heads by the sum of these divergences over all tokens. The
mean, in bits, lies between 0 and 1, so that texts of any length compare.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from qkv.errors import InputError
from qkv.profiler.data.tables import over_texts

if TYPE_CHECKING:
    import pandas as pd

PIECE = 1 << 21  # entries of a temporary tensor: about what fits into the cache of a processor
DEFINITION = (
    "1 − the mean over queries of the Jensen-Shannon divergence, in bits, between the rows of two heads "
    "(after Clark et al. 2019, arXiv:1906.04341): 1 for equal maps, 0 for maps that share no key"
)


Maps = Literal["weights", "pooled"]


def similarity_table(data: xr.Dataset, maps: Maps | None = None) -> pd.DataFrame:
    """Heads × heads; `Profile.similarity` documents it."""
    import pandas as pd

    maps = chosen_maps(data, maps)
    heads = pd.MultiIndex.from_product([data["layer"].values, data["head"].values], names=["layer", "head"])
    table = pd.DataFrame(similarities(data, range(len(heads)), maps), index=heads, columns=heads)
    table.attrs = {"units": "1", "definition": DEFINITION, "maps": maps}
    return table


def chosen_maps(data: xr.Dataset, maps: Maps | None = None) -> Maps:
    """The maps by which heads are compared; if None, all weights if every text has them, else the small pooled maps."""
    held = held_maps(data)
    if maps not in (None, "weights", "pooled"):
        raise InputError(f"maps: got {maps!r}; expected 'weights', 'pooled' or None for the most exact")
    if not held or (maps is not None and maps not in held):
        longest = max(int(data["n_queries"].max()), int(data["n_keys"].max()))
        option = f"map_tokens={longest} for all weights" if maps == "weights" else "map_bins=64 for pooled maps"
        raise InputError(f"maps: the profile does not hold {maps or 'maps'} of all texts; profile it with {option}")
    return maps or held[0]


def held_maps(data: xr.Dataset) -> list[Maps]:
    """The kinds of maps that a data set holds of all texts, the most exact first."""
    variables: dict[Maps, str] = {"weights": "weights", "pooled": "map_mean"}
    return [
        kind for kind, name in variables.items() if name in data and np.isfinite(data[name].values[:, 0, 0, 0, 0]).all()
    ]


def similarities(data: xr.Dataset, rows: range, maps: Maps) -> np.ndarray:
    """Mean similarity over texts of the heads `rows` (layer × number of heads + head) to all heads: (rows, heads)."""
    texts = (data.isel(text=text) for text in range(data.sizes["text"]))
    return over_texts(np.stack([1 - _divergences(*_distributions(one, maps), rows) for one in texts]))


def _distributions(one: xr.Dataset, maps: Maps) -> tuple[Tensor, Tensor]:
    """The rows of all heads of one text, (heads, entries), and the share of the queries that each entry stands for.

    A row is a distribution over the keys and a null key: a learned sink, or where a query attends to no key at all.
    Pooled rows are those of a bin of queries over bins of keys. Entries that are 0 in every head are left out.
    """
    n_queries, n_keys = int(one["n_queries"]), int(one["n_keys"])
    null = one["sink_mass"].values if "sink_mass" in one else np.zeros(one["entropy"].shape)
    null = np.nan_to_num(null[..., :n_queries])
    if maps == "pooled":
        queries, keys = (
            np.diff([*range(0, n, size), n])
            for n, size in ((n_queries, int(one["bin_queries"])), (n_keys, int(one["bin_keys"])))
        )
        weights = one["map_mean"].values[..., : len(queries), : len(keys)] * keys
        null = np.add.reduceat(null, np.cumsum(queries) - queries, -1) / queries
    else:
        chosen = (one["visible"].values[..., :n_queries] >= 2).any((0, 1))  # with one visible key, all heads agree
        weights, null = one["weights"].values[..., :n_queries, :n_keys][..., chosen, :], null[..., chosen]
        queries = np.ones(int(chosen.sum()), int)
    if weights.min(initial=0) < 0:
        raise InputError("maps: got negative weights; expected weights of 0 or more, which can be shares of a row")
    mass = np.concatenate([weights, null[..., None]], -1).astype(np.float32)
    mass[..., -1] += mass.sum(-1) == 0
    mass = (mass / mass.sum(-1, keepdims=True)).reshape(math.prod(mass.shape[:-2]), *mass.shape[-2:])
    used = (mass > 0).any(0)
    share = np.broadcast_to((queries / max(queries.sum(), 1))[:, None], used.shape)
    return torch.from_numpy(mass[:, used]), torch.from_numpy(share[used].astype(np.float32))


def _divergences(rows: Tensor, share: Tensor, chosen: range) -> np.ndarray:
    """The mean Jensen-Shannon divergence of the rows of the heads `chosen` and of all heads, in bits."""
    heads, entries = rows.shape
    if not entries:
        return np.full((len(chosen), heads), np.nan)
    entropy = _entropy(rows, share)
    found = torch.zeros(len(chosen), heads)
    step = max(1, PIECE // entries)
    for at, head in enumerate(chosen):
        first = head + 1 if len(chosen) == heads else 0  # the whole matrix is symmetric
        for start in range(first, heads, step):
            part = slice(start, min(start + step, heads))
            middle = _entropy((rows[part] + rows[head]) / 2, share)
            found[at, part] = middle - (entropy[part] + entropy[head]) / 2
        found[at, head] = 0
    if len(chosen) == heads:
        found += found.T.clone()
    return (found.double() / math.log(2)).clamp(0, 1).numpy()


def _entropy(rows: Tensor, share: Tensor) -> Tensor:
    return torch.special.entr(rows) @ share
