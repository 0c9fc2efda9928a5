"""Statistics of weights: one number for each head, or the attention that each key receives."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from qkv.errors import InputError, nearest, renamed
from qkv.figures.layout import (
    COLOURS,
    DIVERGING,
    MUTED,
    Drawing,
    cell_number,
    colour_bar,
    label_inches,
    label_side,
    layer_by_head,
    panel_title,
    place,
    plain,
)
from qkv.figures.profiles import share_curve
from qkv.plot.given import array, layers, token_lists
from qkv.plot.single import framed
from qkv.profiler.data import tables
from qkv.profiler.data.frames import STATISTICS
from qkv.profiler.profiles import Profile
from qkv.statistics.measure import measure_weights

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
    bar: Axes | None = None
    rows, columns = table.shape
    if ax is None:
        cell = min(0.5, 6.4 / columns, 7.0 / rows)
        wide, tall = max(cell * columns, 0.6), max(cell * rows, 0.4)
        is_short = tall < SHORTEST  # too short for a colour bar and its label
        title = textwrap.fill(title or (what if is_short else ""), max(16, int((wide + 0.8) * 12.5)))
        ax, bar = framed(wide, tall, title, left=0.55, below=0.5)
        if is_short:
            bar.remove()
            bar = None
    image = layer_by_head(ax, table, norm, ticks=16, written=cell_number, colours=DIVERGING if low < 0 else COLOURS)
    ax.set_xlabel("head", fontsize=8, color=MUTED)
    ax.set_ylabel("layer", fontsize=8, color=MUTED)
    panel_title(ax, title)
    if bar is not None:
        colour_bar(bar, image, ticks=4, label=what)
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
    return _draw(_by_head(w, "entropy", item), "entropy, nats", title=title, ax=ax)


def sinks(w: Any, *, first: int = 0, item: int | None = None, title: str = "", ax: Axes | None = None) -> Axes:
    """The weight that every head puts on the first key: the mean over the queries after it, as in a profile.

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
    [[0.5]]
    """
    return _draw(_by_head(w, "sink", item, first), "weight on the first key", vmax=1.0, title=title, ax=ax)


def _by_head(w: Any, statistic: str, item: int | None, first: int = 0) -> pd.DataFrame:
    """The mean of a statistic over the queries of each head, by layer and head."""
    if isinstance(w, Profile):
        if first:
            raise InputError(f"first is {first} with a Profile, which knows the first token of each text, expected 0")
        with renamed(text="item"):
            return _table(tables.head_table(w.one_text(item)), statistic)
    found = layers(w, item, stacked=True)
    rows = []
    for one in found.maps():
        weights = torch.from_numpy(np.nan_to_num(one))  # masked pairs have weight 0
        by_query = getattr(measure_weights(weights, first=first, unnormalized=True), statistic)
        later = by_query[:, first + 1 :] if statistic == "sink" else by_query
        rows.append((later if later.shape[1] else by_query).mean(-1).tolist())
    most = max(map(len, rows))
    return pd.DataFrame([row + [np.nan] * (most - len(row)) for row in rows])


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
    total = found.mean(layer, head)[1].sum(0)
    share = total / (total.sum() or 1.0)
    size = found.found[0].size
    names = token_lists(tokens, [""] * size[0], *size)[1] if tokens is not None else found.keys
    if ax is None:
        above, below = 0.5 if title else 0.25, 0.35 + label_inches(names, 6.0 / len(share), across=True)
        figure = Drawing(figsize=(7.0, above + 1.75 + below))
        ax = place(figure, 0.75, above, 6.0, 1.75)
    plain(ax)
    labels = np.array(names if names is not None else [str(i) for i in range(len(share))], object)
    share_curve(ax, share, labels, 0 if names is None or len(share) <= 30 else 8)
    ax.set_xlim(-0.5, len(share) - 0.5)
    label_side(ax, "x", names, len(share), "key")
    ax.set_ylabel("share of all attention", fontsize=8, color=MUTED)
    panel_title(ax, title)
    return ax
