"""Figures of numbers: of all heads, and of what keys receive; and of weights between words, or over an image."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from qkv.errors import InputError, nearest, renamed
from qkv.plot.given import array, layers, mean_weights, token_lists
from qkv.plot.layout import (
    MUTED,
    Drawing,
    HeadMap,
    head_map,
    label_inches,
    label_side,
    map_sides,
    panel_title,
    place,
    plain,
    share_curve,
)
from qkv.plot.map import alignment_figure, overlay_figure
from qkv.profiler.data import tables
from qkv.profiler.data.frames import STATISTICS
from qkv.profiler.data.profile import ProfileData
from qkv.statistics.weights import measure_weights


def alignment(
    w: Any,
    source: Sequence[Any],
    target: Sequence[Any],
    *,
    layer: int | None = None,
    head: int | None = None,
    item: int | None = None,
    note: str = "",
) -> Figure:
    """The source words (keys, across) to which each target word (query, down) attends.

    Tokens of one word share a row or a column, and weights are printed in percent. The title states the finding.

    Args:
        w: weights as in `weights`; the mean of all heads, unless `layer` and `head` choose.
        source: names of the keys.
        target: names of the queries. In a decoder, the word that a query predicts is the next one.
        layer: one layer; by default the mean of all.
        head: one head of the layer; by default the mean of all.
        item: as in `weights`.
        note: the second line, such as the name of the model.

    Returns:
        The figure.

    Raises:
        InputError: as `weights`.

    >>> import torch, qkv
    >>> w = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    >>> figure = qkv.plot.alignment(w, ["le", "chat"], ["the", "cat"])
    >>> [label.get_text() for label in figure.axes[0].get_xticklabels()]
    ['le', 'chat']
    """
    of, shown = mean_weights(layers(w, item), layer, head)
    with renamed(tokens="source", queries="target"):
        rows, columns = token_lists(source, target, *shown.shape)
    return alignment_figure(note, of, shown, rows or [], columns or [])


def overlay(
    image: Any,
    w: Any,
    grid: tuple[int, int],
    *,
    queries: Sequence[Any] | None = None,
    corners: bool = False,
    note: str = "brightness is the weight",
) -> Figure:
    """Attention over the regions of an image, if keys are the cells of a grid: one picture for each query.

    Args:
        image: (height, width, 3), numbers from 0 to 1 or bytes; a tensor, an array or an RGB image of Pillow.
        w: weights (nq, nk) or (nk,). Cells are the last keys, row by row; earlier keys, such as a class token, are left
            out.
        grid: numbers of cells down and across.
        queries: names of the queries; numbers by default.
        corners: whether cell (i, j) is centred on the pixel (i h / gh, j w / gw), as after strided convolutions with
            padding; otherwise on the middle of its part of the image.
        note: the second line.

    Returns:
        The figure.

    Raises:
        InputError: for an image, weights or a grid that do not fit.

    >>> import numpy as np, qkv
    >>> figure = qkv.plot.overlay(np.ones((8, 8, 3)), [[0.1, 0.2, 0.3, 0.4]], (2, 2), queries=["cat"])
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['the image', 'cat']
    """
    shown = np.atleast_2d(array(w))
    if shown.ndim != 2 or 0 in shown.shape:
        raise InputError(f"w has shape {shown.shape}, expected (nq, nk)")
    shown = layers(shown)[0].head(0)
    names = [f"query {i}" for i in range(len(shown))]
    names = names if queries is None else token_lists(None, queries, *shown.shape)[0] or []
    picture = image.detach().cpu().numpy() if isinstance(image, Tensor) else np.asarray(image)
    return overlay_figure(note, "", picture, np.nan_to_num(shown), grid, names, corners=corners)


SHORTEST = 1.2  # inches of a colour bar with its label


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
    return _head_numbers(*_table(values, statistic), what, vmax=vmax, title=title, ax=ax)


def _head_numbers(
    table: pd.DataFrame, column: str, what: str, *, vmax: float | None, title: str, ax: Axes | None
) -> Axes:
    """A column of a table with the columns "layer" and "head"; see `by_head`."""
    low, top = float(np.nanmin(table[column], initial=0)), float(np.nanmax(table[column], initial=0))
    most = max(top, -low) if vmax is None else vmax
    bar = ax is None
    if ax is None:
        layers, heads = table["layer"].nunique(), table["head"].nunique()
        wide, tall = map_sides((layers, heads), min(0.5, 6.4 / heads, 7.0 / layers))
        title = textwrap.fill(title, max(16, int((wide + 0.8) * 12.5)))
        above = 0.2 + 0.2 * len(title.splitlines())
        figure = Drawing(figsize=(0.55 + wide + 0.8, above + max(tall, SHORTEST) + 0.5))
        ax = place(figure, 0.55, above, wide, max(tall, SHORTEST))
    norm = Normalize(-most if low < 0 else 0, most or 1.0)
    head_map(ax, HeadMap(table, column, title, norm), bar=bar, label=what)
    return ax


def _table(values: Any, statistic: str | None) -> tuple[pd.DataFrame, str]:
    """A table with the columns "layer" and "head", and the name of the column to draw."""
    if isinstance(values, ProfileData):
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
        return flat, str(statistic)
    if statistic is not None:
        raise InputError(f"statistic is {statistic!r} with an array, expected None; name it with what=")
    found = array(values, "values")
    if found.ndim != 2 or 0 in found.shape:
        raise InputError(f"values has shape {found.shape}, expected (layers, heads)")
    return _by_layer(found), "value"


def _by_layer(values: Iterable[Iterable[float]]) -> pd.DataFrame:
    """A table of numbers for each head of each layer."""
    rows = [(layer, head, x) for layer, heads in enumerate(values) for head, x in enumerate(heads)]
    return pd.DataFrame(rows, columns=["layer", "head", "value"])


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
    return _head_numbers(*_by_head(w, "entropy", item), "entropy, nats", vmax=None, title=title, ax=ax)


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
    return _head_numbers(*_by_head(w, "sink", item, first), "weight on the first key", vmax=1.0, title=title, ax=ax)


def _by_head(w: Any, statistic: str, item: int | None, first: int = 0) -> tuple[pd.DataFrame, str]:
    """The mean of a statistic over the queries of each head, as of `_table`."""
    if isinstance(w, ProfileData):
        if first:
            raise InputError(f"first is {first} with a Profile, which knows the first token of each text, expected 0")
        with renamed(text="item"):
            return tables.head_table(w.one_text(item)), statistic
    rows = []
    for one in layers(w, item, stacked=True):
        weights = torch.from_numpy(np.nan_to_num(one.weights()))  # masked pairs have weight 0
        by_query = getattr(measure_weights(weights, first=first, unnormalized=True), statistic)
        later = by_query[:, first + 1 :] if statistic == "sink" else by_query
        rows.append((later if later.shape[1] else by_query).mean(-1).tolist())
    return _by_layer(rows), "value"


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
    total = mean_weights(found, layer, head)[1].sum(0)
    share = total / (total.sum() or 1.0)
    size = found[0].size
    names = token_lists(tokens, [""] * size[0], *size)[1] if tokens is not None else found[0].keys
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
