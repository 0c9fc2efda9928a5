"""Figures of weights that you have: from tensors of any library, or a profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from torch import Tensor

from qkv.errors import InputError, nearest
from qkv.figures.layout import DIVERGING, INK, MUTED, Drawing, layer_by_head, place, plain
from qkv.figures.overview import received_curve
from qkv.masks import Mask
from qkv.plot.single import label, label_inches, scale, written
from qkv.profiler.data.labels import STATISTICS
from qkv.profiler.profiles import Profile
from qkv.statistics.given import measure_weights
from qkv.statistics.sums import Statistics

if TYPE_CHECKING:
    import xarray as xr


ROUNDING = 1.01  # weights in half precision may exceed 1 by a little


@dataclass(frozen=True)
class Layers:
    """Weights of some layers. Each layer is converted and checked when it is drawn, since all of them may be large."""

    views: list[Tensor | np.ndarray]
    """For each layer (heads, queries, keys), or its bins if `bins` is not (1, 1)."""
    names: list[str]
    """The name of each layer in errors."""
    layer_ids: list[int]
    head_ids: list[list[int]]
    sizes: list[tuple[int, int]]
    """Numbers of queries and keys of each layer, which its bins cover."""
    bins: tuple[int, int] = (1, 1)
    keys: list[str] | None = None
    queries: list[str] | None = None

    def layer(self, layer: int | None) -> Layers:
        """One layer by its id; `layer` may be None if there is only one."""
        at = _index("layer", layer, self.layer_ids)
        pick = slice(at, at + 1)
        return replace(
            self,
            views=self.views[pick],
            names=self.names[pick],
            layer_ids=self.layer_ids[pick],
            head_ids=self.head_ids[pick],
            sizes=self.sizes[pick],
        )

    def maps(self) -> Iterator[np.ndarray]:
        """The weights of each layer, (heads, queries, keys), float64."""
        for view, name in zip(self.views, self.names, strict=True):
            yield checked_weights(array(view, name), name)

    def head(self, head: int | None) -> np.ndarray:
        """The map of one head, by its id, of the only layer."""
        at = _index("head", head, self.head_ids[0])
        return checked_weights(array(self.views[0][at], self.names[0]), self.names[0])


def _index(name: str, chosen: int | None, ids: Sequence[int]) -> int:
    """The index of an id; None stands for the only one."""
    if chosen is None and len(ids) == 1:
        return 0
    if chosen is None:
        raise InputError(
            f"{name} is None with {len(ids)} {name}s, expected the {name} to draw, from {ids[0]} to {ids[-1]}"
        )
    if chosen not in ids:
        raise InputError(f"{name} is {chosen}, expected one of {ids[0]} to {ids[-1]}")
    return list(ids).index(chosen)


def array(x: Any, name: str = "w") -> np.ndarray:
    """A tensor or array of numbers as float64; booleans become 0 and 1."""
    found = _as_given(x, name)
    try:
        numbers = found.cpu().double().numpy() if isinstance(found, Tensor) else found.astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_numbers(x, name, error) from error
    result: np.ndarray = numbers
    return result


def _as_given(x: Any, name: str) -> Tensor | np.ndarray:
    """A tensor without its graph, or an array, of the dtype that it has."""
    try:
        found = x.detach() if isinstance(x, Tensor) else np.asarray(_without_tensors(x))
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_numbers(x, name, error) from error
    if isinstance(found, np.ndarray) and found.dtype.name == "bfloat16":  # NumPy has no bfloat16 itself
        return found.astype(np.float32)
    if found.is_complex() if isinstance(found, Tensor) else found.dtype.kind == "c":
        raise InputError(f"{name} is {found.dtype}, expected real numbers")
    return found


def _without_tensors(x: Any) -> Any:
    """Nested lists with arrays in place of tensors, which NumPy reads only if they are on the CPU without a graph."""
    if isinstance(x, Tensor):
        return x.detach().cpu().double().numpy()
    return [_without_tensors(part) for part in x] if isinstance(x, (list, tuple)) else x


def _no_numbers(x: Any, name: str, error: Exception) -> InputError:
    return InputError(f"{name} is {type(x).__name__}, expected numbers that form an array ({error})")


def layers(w: Any, item: int | None = None, *, stacked: bool = False) -> Layers:
    """The weights of some layers and, for a profile, their tokens.

    Args:
        w: a `Profile`; a tuple or list of layers (b, h, nq, nk) or (h, nq, nk), as `output_attentions` gives; or one
            tensor or array (nq, nk), (h, nq, nk), (b, h, nq, nk) or (layers, b, h, nq, nk).
        item: batch item, or text of a profile; None if there is only one.
        stacked: whether four dimensions are (layers, h, nq, nk).
    """
    if isinstance(w, Profile):
        return _of_profile(w, item)
    if isinstance(w, (tuple, list)) and w and (any(x is None for x in w) or any(getattr(x, "ndim", 0) > 2 for x in w)):
        names = [f"w[{n}]" for n in range(len(w))]
        made = [_layer(x, item, name) for x, name in zip(w, names, strict=True)]
    else:
        whole = _as_given(w, "w")
        parts = list(whole) if whole.ndim == 5 or (stacked and whole.ndim == 4) else [whole]
        made, names = [_layer(x, item, "w") for x in parts], ["w"] * len(parts)
    return Layers(
        made,
        names,
        list(range(len(made))),
        [list(range(len(x))) for x in made],
        [(x.shape[1], x.shape[2]) for x in made],
    )


def _layer(x: Any, item: int | None, name: str) -> Tensor | np.ndarray:
    """One layer as (h, nq, nk), a view of it if it is a tensor or an array."""
    if x is None:
        raise InputError(
            f"{name} is None, expected weights: the model did not form them; load it with "
            "attn_implementation='eager', or pass a qkv.Profile"
        )
    if isinstance(x, (tuple, list)) and any(getattr(part, "ndim", 0) > 1 for part in x):
        raise InputError(
            f"{name} is a {type(x).__name__} of tensors, expected the weights of one layer; after generate() pass "
            "the tuple of one step"
        )
    found = _as_given(x, name)
    if found.ndim not in (2, 3, 4) or 0 in found.shape:
        raise InputError(f"{name} has shape {tuple(found.shape)}, expected (nq, nk), (h, nq, nk) or (b, h, nq, nk)")
    if found.ndim == 4:
        items = len(found)
        if item is None and items > 1:
            raise InputError(f"item is None with {items} batch items, expected the one to draw, from 0 to {items - 1}")
        found = found[_index("item", item, range(items))]
    elif item not in (None, 0):
        raise InputError(f"item is {item}, expected None: {name} has no batch dimension")
    return found[None] if found.ndim == 2 else found


def checked_weights(values: np.ndarray, name: str = "w") -> np.ndarray:
    """The numbers, refused unless they are weights; NaN stands for masked pairs."""
    low, high = np.fmin.reduce(values, axis=None), np.fmax.reduce(values, axis=None)  # NaN if all numbers are
    if low < 0 or high > ROUNDING:
        raise InputError(
            f"{name} holds {low:.3g} to {high:.3g}, expected weights from 0 to 1: apply the softmax to "
            "scores first, or draw them with qkv.plot.matrix"
        )
    return values


def _of_profile(profile: Profile, item: int | None) -> Layers:
    data = profile.data
    if item is None and data.sizes["text"] > 1:
        raise InputError(f"item is None with {data.sizes['text']} texts, expected the text to draw")
    at = _index("item", item, range(data.sizes["text"]))
    one = data.isel(text=at)
    n_queries, n_keys = int(one["n_queries"]), int(one["n_keys"])
    values, bins = _stored(one, n_queries, n_keys)
    if values is None:
        raise InputError(
            f"w is a Profile without maps of text {at}, expected one made with map_tokens={n_keys} or more"
        )
    values = values.astype(np.float64)
    if one.attrs["causal"]:  # a bin is masked if its first key comes after its last query
        last = np.minimum(np.arange(1, values.shape[2] + 1) * bins[0], n_queries) - 1 + n_keys - n_queries
        values = np.where(np.arange(values.shape[3]) * bins[1] <= last[:, None], values, np.nan)
    count = len(values)
    return Layers(
        list(values),
        ["w"] * count,
        [int(x) for x in one["layer"].values],
        [[int(x) for x in one["head"].values]] * count,
        [(n_queries, n_keys)] * count,
        bins,
        [str(x) for x in one["key_token"].values[:n_keys]],
        [str(x) for x in one["query_token"].values[:n_queries]],
    )


def _stored(one: xr.Dataset, n_queries: int, n_keys: int) -> tuple[np.ndarray | None, tuple[int, int]]:
    """The weights (layer, head, query, key) that a profile stores for a text, else its pooled maps, and their bins."""
    if "weights" in one:
        weights = one["weights"].values[:, :, :n_queries, :n_keys]
        if np.isfinite(weights).any():
            return weights, (1, 1)
    if "map_max" in one:
        bins = int(one["bin_queries"]), int(one["bin_keys"])
        if 0 not in bins:
            return one["map_max"].values[:, :, : -(-n_queries // bins[0]), : -(-n_keys // bins[1])], bins
    return None, (1, 1)


def masked(values: np.ndarray, mask: Any) -> np.ndarray:
    """The values with NaN where a mask, of booleans or from `qkv.masks`, is False."""
    if mask is None:
        return values
    visible = visible_pairs(mask, *values.shape[-2:])
    result: np.ndarray = np.where(visible, values, np.nan)
    return result


def visible_pairs(mask: Any, n_queries: int, n_keys: int, name: str = "mask") -> np.ndarray:
    """A mask of `qkv.masks` or a matrix of booleans as an array (nq, nk)."""
    found = mask.dense(n_queries, n_keys) if isinstance(mask, Mask) else mask
    pairs = found.detach().cpu().numpy() if isinstance(found, Tensor) else np.asarray(found)
    if pairs.dtype != bool:
        raise InputError(f"{name} is {pairs.dtype}, expected booleans, True where a query may attend")
    while pairs.ndim > 2 and len(pairs) == 1:
        pairs = pairs[0]
    if pairs.shape != (n_queries, n_keys):
        raise InputError(
            f"{name} has shape {pairs.shape}, expected ({n_queries}, {n_keys}), the same for all items and heads"
        )
    result: np.ndarray = pairs
    return result


def token_lists(
    tokens: Sequence[Any] | None, queries: Sequence[Any] | None, n_queries: int, n_keys: int
) -> tuple[list[str] | None, list[str] | None]:
    """Labels of the queries and of the keys. Without `queries`, the last keys are the queries, as with a cache."""
    keys = None if tokens is None else _labels("tokens", tokens, n_keys, "keys")
    if queries is not None:
        return _labels("queries", queries, n_queries, "queries"), keys
    if keys is None:
        return None, None
    if n_queries > n_keys:
        raise InputError(
            f"queries is None with {n_queries} queries and {n_keys} keys, expected the names of the queries"
        )
    return keys[n_keys - n_queries :], keys


def _labels(name: str, given: Sequence[Any], n: int, what: str) -> list[str]:
    if isinstance(given, str):
        raise InputError(f"{name} is one string, expected a list of {n} strings, such as tokenizer.tokenize(text)")
    found = [str(x) for x in given]
    if len(found) != n:
        raise InputError(f"{name} has {len(found)} names, expected {n}, one for each of the {what}")
    return found


SHORTEST = 1.0  # inches of a colour bar


def by_head(
    values: Any,
    statistic: str | None = None,
    *,
    vmax: float | None = None,
    what: str | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """One number for each head: a row for each layer, a column for each head, printed where cells are large enough.

    Args:
        values: (layers, heads); a table with the columns "layer" and "head", such as `Profile.heads()` or
            `Profile.sinks()`; or a `qkv.Profile`.
        statistic: the column of a table, or the statistic of a profile.
        vmax: the number with the darkest colour; by default the largest one.
        what: label of the colour bar; by default that of the statistic.
        title: the title.
        ax: the axes to draw in; a new figure with a colour bar by default.

    Returns:
        The axes.

    Raises:
        InputError: for other shapes, or an unknown statistic.

    >>> import qkv
    >>> qkv.plot.by_head([[0.1, 0.8, 0.3], [0.2, 0.1, 0.9]], what="sink").images[0].get_array().shape
    (2, 3)
    """
    if what is None:
        known = STATISTICS.get(statistic or "")
        what = known.label.lower() if known else statistic or ""
    return _draw(_table(values, statistic), what, vmax=vmax, title=title, ax=ax)


def _draw(table: pd.DataFrame, what: str, *, vmax: float | None = None, title: str, ax: Axes | None) -> Axes:
    """Numbers by layer (index) and head (columns); see `by_head`."""
    shown = table.to_numpy(float)
    low, top = float(np.nanmin(shown, initial=0)), float(np.nanmax(shown, initial=0))
    most = max(top, -low) if vmax is None else vmax
    norm = Normalize(-most if low < 0 else 0, most or 1.0)
    bar, (rows, columns) = None, table.shape
    if ax is None:
        cell = min(0.5, 6.4 / columns, 7.0 / rows)
        wide, tall = max(cell * columns, 0.6), max(cell * rows, 0.4)
        if tall < SHORTEST:  # too short for a colour bar and its label
            title = title or what
        top_inches = 0.45 if title else 0.2
        figure = Drawing(figsize=(max(wide + 1.5, 0.09 * len(title) + 0.6), top_inches + tall + 0.5))
        ax = place(figure, 0.55, top_inches, wide, tall)
        bar = place(figure, 0.55 + wide + 0.12, top_inches, 0.1, tall) if tall >= SHORTEST else None
    image = layer_by_head(
        ax, table, norm, ticks=16, written=written, **({"colours": DIVERGING} if low < 0 else {})
    )  # fmt: skip
    ax.set_xlabel("head", fontsize=8, color=MUTED)
    ax.set_ylabel("layer", fontsize=8, color=MUTED)
    if title:
        ax.set_title(title, loc="left", fontsize=9, color=INK, pad=6)
    if bar is not None:
        scale(bar, image, what)
    return ax


def _table(values: Any, statistic: str | None) -> pd.DataFrame:
    """Numbers by layer (index) and head (columns)."""
    if isinstance(values, Profile):
        values = values.heads()
    if isinstance(values, pd.DataFrame):
        flat = values.reset_index() if {"layer", "head"} - {*values.columns} else values
        missing = {"layer", "head"} - {*flat.columns}
        if missing:
            raise InputError(
                f"values has the columns {', '.join(map(str, values.columns))}, expected layer and head, too"
            )
        if statistic not in flat.columns:
            known = [str(x) for x in flat.columns if pd.api.types.is_numeric_dtype(flat[x])]
            hint = nearest(str(statistic), known)
            raise InputError(f"statistic is {statistic!r}, expected one of {', '.join(known)}{hint}")
        return flat.pivot(index="layer", columns="head", values=statistic).astype(float)
    if statistic is not None:
        raise InputError(f"statistic is {statistic!r} with an array, expected None; name it with what=")
    found = array(values, "values")
    if found.ndim != 2 or 0 in found.shape:
        raise InputError(f"values has shape {found.shape}, expected (layers, heads)")
    return pd.DataFrame(found)


def entropy(w: Any, *, item: int | None = None, title: str = "", ax: Axes | None = None) -> Axes:
    """The entropy of every head in nats, the mean over its queries: 0 is one key, ln n is n keys with equal weights.

    Args:
        w: as in `model`, or the weights of one layer (h, nq, nk); a profile has its own entropies.
        item: as in `weights`.
        title: the title.
        ax: the axes to draw in; a new figure by default.

    Returns:
        The axes.

    Raises:
        InputError: as `weights`.

    >>> import torch, qkv
    >>> round(float(qkv.plot.entropy(torch.full((2, 4, 4), 0.25)).images[0].get_array()[0, 1]), 4)
    1.3863
    """
    found = _by_head(w, "entropy", item, lambda one: one.entropy)
    return _draw(found, "entropy, nats", title=title, ax=ax)


def sinks(w: Any, *, first: int = 0, item: int | None = None, title: str = "", ax: Axes | None = None) -> Axes:
    """The weight that every head puts on the first key, the mean over its queries.

    Args:
        w: as in `entropy`.
        first: the key, such as the first one after left padding; with a profile, its own first token.
        item: as in `weights`.
        title: the title.
        ax: the axes to draw in; a new figure by default.

    Returns:
        The axes.

    Raises:
        InputError: as `weights`.

    >>> import torch, qkv
    >>> w = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])
    >>> qkv.plot.sinks(w).images[0].get_array().tolist()
    [[0.75]]
    """
    found = _by_head(w, "sink", item, lambda one: one.sink, first)
    return _draw(found, "weight on the first key", vmax=1.0, title=title, ax=ax)


def _by_head(w: Any, statistic: str, item: int | None, of: Any, first: int = 0) -> pd.DataFrame:
    """The mean of a statistic over the queries of each head, by layer and head."""
    if isinstance(w, Profile):
        if first:
            raise InputError(f"first is {first} with a Profile, which knows the first token of each text, expected 0")
        heads = w.heads() if item is None else layers_of_text(w, item)
        return _table(heads, statistic)
    found = layers(w, item, stacked=True)
    rows = [of(_measured(one, first)).mean(-1).tolist() for one in found.maps()]
    most = max(map(len, rows))
    return pd.DataFrame([row + [np.nan] * (most - len(row)) for row in rows])


def layers_of_text(profile: Profile, text: int) -> pd.DataFrame:
    """The table of heads of one text of a profile."""
    from qkv.profiler.data import tables

    texts = profile.data.sizes["text"]
    if not 0 <= text < texts:
        raise InputError(f"item is {text}, expected a text from 0 to {texts - 1}")
    return tables.head_table(profile.data.isel(text=[text]))


def _measured(weights: np.ndarray, first: int = 0) -> Statistics:
    """The statistics of a layer (h, nq, nk); masked pairs (NaN) have weight 0."""
    return measure_weights(torch.from_numpy(np.nan_to_num(weights)), first=first, unnormalized=True)


def received(
    w: Any,
    tokens: Sequence[Any] | None = None,
    *,
    layer: int | None = None,
    head: int | None = None,
    item: int | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """The share of all attention that each key receives, on a logarithmic scale: the mean of the heads.

    Args:
        w: as in `weights`, or all layers.
        tokens: names of the keys; the largest ones are printed if there are too many for all.
        layer: one layer; by default the mean of all.
        head: one head of the layer; by default the mean of all.
        item: as in `weights`.
        title: the title.
        ax: the axes to draw in; a new figure by default.

    Returns:
        The axes.

    Raises:
        InputError: as `weights`; for layers with different numbers of keys; for the bins of a long text of a profile,
            which `Profile.plot.received` draws.

    >>> import torch, qkv
    >>> w = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    >>> qkv.plot.received(w, ["the", "cat"]).get_yscale()
    'log'
    """
    found = layers(w, item)
    if found.bins != (1, 1):
        raise InputError("w is a Profile with bins of a long text, expected all weights; use profile.plot.received()")
    if layer is not None or head is not None:
        found = found.layer(layer)
    if len({n_keys for _, n_keys in found.sizes}) > 1:
        raise InputError("w has layers with different numbers of keys, expected one number; pass layer=")
    maps = [found.head(head)[None]] if head is not None else found.maps()
    total = np.mean([np.nansum(x, axis=1).mean(0) for x in maps], axis=0)
    share = total / (total.sum() or 1.0)
    names = token_lists(tokens, [""] * found.sizes[0][0], *found.sizes[0])[1] if tokens is not None else found.keys
    if ax is None:
        above, below = 0.5 if title else 0.25, 0.35 + label_inches(names, cell=6.0 / len(share))
        figure = Drawing(figsize=(7.0, above + 1.75 + below))
        ax = place(figure, 0.75, above, 6.0, 1.75)
    plain(ax)
    labels = np.array(names if names is not None else [str(i) for i in range(len(share))], object)
    received_curve(ax, share, labels, 0 if names is None or len(share) <= 30 else 8)
    ax.set_xlim(-0.5, len(share) - 0.5)
    label(ax, "x", names, len(share), "key")
    ax.set_ylabel("share of all attention", fontsize=8, color=MUTED)
    if title:
        ax.set_title(title, loc="left", fontsize=9, color=INK, pad=8)
    return ax
