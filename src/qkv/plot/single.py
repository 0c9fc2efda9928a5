"""Figures of one panel: the map of a head, numbers of all heads, what keys receive; and weights between words."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from torch import Tensor

from qkv.errors import InputError, nearest, renamed
from qkv.figures.layout import (
    MUTED,
    Drawing,
    cell_number,
    colour_bar,
    heat,
    label_inches,
    label_side,
    layer_by_head,
    panel_title,
    place,
    plain,
    share_curve,
    write_cells,
)
from qkv.figures.map import alignment_figure, overlay_figure
from qkv.plot.given import Matrix, array, layers, masked, mean_weights, select_layer, token_lists
from qkv.profiler.data import tables
from qkv.profiler.data.frames import STATISTICS
from qkv.profiler.profiles import Profile
from qkv.statistics.measure import measure_weights

CELL, LEAST, MOST = 0.42, 1.5, 5.6  # inches: a cell, and the shortest and longest side of a matrix
PIXELS = 800  # longer sides are shown in bins, since a raster image would leave out rows


def weights(
    w: Any,
    tokens: Sequence[Any] | None = None,
    *,
    queries: Sequence[Any] | None = None,
    layer: int | None = None,
    head: int | None = None,
    item: int | None = None,
    mask: Any = None,
    vmax: float | None = None,
    power: float = 1.0,
    values: bool = False,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """The attention weights of one head: queries down, keys across; masked pairs (NaN) are grey.

    Args:
        w: the weights, (nq, nk), (h, nq, nk) or (b, h, nq, nk); the tuple of all layers that `output_attentions`
            gives; or a `qkv.Profile`. Tensors of any dtype and device, arrays of any library, or lists.
        tokens: names of the keys; without `queries`, the last of them are the queries. A profile has its own.
        queries: names of the queries, of a cross-attention for example.
        layer: the layer, if there are several.
        head: the head, if there are several.
        item: the batch item, or the text of a profile, if there are several.
        mask: pairs to show as masked: booleans (nq, nk), True where a query may attend, or a mask of `qkv.masks`.
        vmax: the weight with the darkest colour; the largest one by default.
        power: the colour is proportional to weight ** power; 0.5 shows small weights.
        values: whether to print the weights in the cells, if they are large enough.
        title: the title.
        ax: the axes to draw in; a new figure with a colour bar by default.

    Returns:
        The axes. ``.figure.savefig("map.png")`` saves the picture.

    Raises:
        InputError: for a wrong shape, numbers that are not weights, a wrong number of tokens, or a choice that is
            missing.

    >>> import torch, qkv
    >>> w = torch.randn(3, 3).softmax(-1)
    >>> qkv.plot.weights(w, ["the", "cat", "sat"]).get_ylabel()
    'query'
    """
    one = select_layer(layers(w, item), layer)
    shown = one.matrix(one.head(head), tokens, queries, mask)
    norm = norm_of([shown], 0, vmax, power)
    return drawn(shown, norm, values=values, title=title, ax=ax, what="weight")


def matrix(
    m: Any,
    tokens: Sequence[Any] | None = None,
    *,
    queries: Sequence[Any] | None = None,
    mask: Any = None,
    vmin: float | None = None,
    vmax: float | None = None,
    values: bool = False,
    labels: tuple[str, str] = ("query", "key"),
    what: str = "",
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Any matrix, such as scores, a bias or a table of positions. Negative numbers are blue, positive ones orange.

    Args:
        m: the numbers, (rows, columns); NaN is grey.
        tokens: names of the columns; without `queries`, the last of them are the rows.
        queries: names of the rows.
        mask: as in `weights`.
        vmin: the number with the first colour; 0 by default, or −vmax if any number is negative.
        vmax: the number with the last colour; the largest one by default.
        values: whether to print the numbers in the cells, if they are large enough.
        labels: labels of the axis down and of the axis across.
        what: label of the colour bar.
        title: the title.
        ax: the axes to draw in; a new figure with a colour bar by default.

    Returns:
        The axes.

    Raises:
        InputError: for anything but a matrix, or a wrong number of tokens.

    >>> import torch, qkv
    >>> scores = torch.tensor([[2.0, -1.0], [0.5, 1.0]])
    >>> qkv.plot.matrix(scores, labels=("row", "column")).images[0].norm.vmin
    -2.0
    """
    shown = matrix_of(m, "m", tokens, queries, mask)
    norm = norm_of([shown], vmin, vmax)
    return drawn(shown, norm, values=values, labels=labels, what=what, title=title, ax=ax)


def matrix_of(m: Any, name: str, tokens: Sequence[Any] | None, queries: Sequence[Any] | None, mask: Any) -> Matrix:
    """Any matrix, with the names of both sides that are given."""
    values = array(m, name)
    if values.ndim != 2 or 0 in values.shape:
        raise InputError(f"{name} has shape {values.shape}, expected a matrix (rows, columns)")
    return Matrix(masked(values, mask), *token_lists(tokens, queries, *values.shape))


def drawn(
    shown: Matrix,
    norm: Normalize,
    *,
    values: bool = False,
    labels: tuple[str, str] = ("query", "key"),
    what: str = "",
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """A matrix in new axes with a colour bar, or in `ax`; see `weights` and `matrix`."""
    bar, shown = None, pooled(shown)
    if ax is None:
        (rows, columns), (wide, tall) = shown.size, sides(*shown.size)
        left = 0.45 + label_inches(shown.queries, tall / rows, across=False)
        below = 0.35 + label_inches(shown.keys, wide / columns, across=True)
        title = textwrap.fill(title, max(16, int((wide + 0.8) * 12.5)))
        ax, bar = framed(wide, tall, title, left=left, below=below)
    image = draw(ax, shown, norm, labels=labels, title=title)
    if values and shown.bins == (1, 1):
        write_cells(ax, image, cell_number)
    if bar is not None:
        down, across = shown.bins
        largest = "" if shown.bins == (1, 1) else f"largest {what or 'value'} in bins of {down} × {across}"
        colour_bar(bar, image, label=largest or what)
    return ax


def draw(
    ax: Axes, shown: Matrix, norm: Normalize, *, labels: tuple[str, str] = ("query", "key"), title: str = ""
) -> AxesImage:
    """Draw a matrix, or its bins, with labels on both sides."""
    (rows, columns), (down, across) = (
        shown.size,
        (size * n for size, n in zip(shown.bins, shown.values.shape, strict=True)),
    )
    image = heat(ax, shown.values, norm, extent=(-0.5, across - 0.5, down - 0.5, -0.5))
    ax.set_xlim(-0.5, columns - 0.5)
    ax.set_ylim(rows - 0.5, -0.5)
    panel_title(ax, title)
    label_side(ax, "y", shown.queries, rows, labels[0])
    label_side(ax, "x", shown.keys, columns, labels[1])
    return image


def norm_of(shown: Sequence[Matrix], vmin: float | None, vmax: float | None, power: float = 1.0) -> Normalize:
    """The colour scale of some matrices: from 0, or symmetrical if any number is negative."""
    known = np.concatenate([x.values[np.isfinite(x.values)] for x in shown])
    low, top = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    if vmin is None and low < 0:
        vmax = max(-low, top) if vmax is None else vmax
        vmin = -vmax
    vmin = 0.0 if vmin is None else vmin
    vmax = top if vmax is None else vmax
    vmax = vmax if vmax > vmin else vmin + 1.0
    if not power > 0:
        raise InputError(f"power is {power}, expected more than 0")
    return Normalize(vmin, vmax) if power == 1 else PowerNorm(power, vmin, vmax)


def pooled(shown: Matrix, most: int = PIXELS) -> Matrix:
    """The number of largest magnitude in each bin, with at most `most` bins on a side."""
    values, sizes = shown.values, [-(-n // most) for n in shown.values.shape]
    for axis, size in enumerate(sizes):
        if size > 1:
            at = np.arange(0, values.shape[axis], size)
            high, low = np.fmax.reduceat(values, at, axis=axis), np.fmin.reduceat(values, at, axis=axis)
            values = np.where(-low > high, low, high)
    bins = shown.bins[0] * sizes[0], shown.bins[1] * sizes[1]
    return replace(shown, values=values, bins=bins, of=shown.size)


def sides(n_queries: int, n_keys: int) -> tuple[float, float]:
    """Width and height of a matrix in inches, with square cells unless it is very long."""
    cell = min(CELL, MOST / max(n_queries, n_keys))
    return max(cell * n_keys, min(LEAST, CELL * 2 * n_keys)), max(cell * n_queries, min(LEAST, CELL * 2 * n_queries))


def framed(wide: float, tall: float, title: str, *, left: float, below: float) -> tuple[Axes, Axes]:
    """Axes in a new figure with room for a title and for labels, and on their right those of a colour bar."""
    top = 0.2 + 0.2 * len(title.splitlines())
    figure = Drawing(figsize=(left + wide + 0.8, top + tall + below))
    return place(figure, left, top, wide, tall), place(figure, left + wide + 0.12, top, 0.1, tall)


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
    return _head_numbers(_table(values, statistic), what, vmax=vmax, title=title, ax=ax)


def _head_numbers(table: pd.DataFrame, what: str, *, vmax: float | None = None, title: str, ax: Axes | None) -> Axes:
    """Numbers by layer (index) and head (columns); see `by_head`."""
    shown = table.to_numpy(float)
    low, top = float(np.nanmin(shown, initial=0)), float(np.nanmax(shown, initial=0))
    most = max(top, -low) if vmax is None else vmax
    norm = Normalize(-most if low < 0 else 0, most or 1.0)
    bar: Axes | None = None
    rows, columns = table.shape
    if ax is None:
        cell = min(0.5, 6.4 / columns, 7.0 / rows)
        wide, tall = max(cell * columns, 0.6), max(cell * rows, SHORTEST)
        title = textwrap.fill(title, max(16, int((wide + 0.8) * 12.5)))
        ax, bar = framed(wide, tall, title, left=0.55, below=0.5)
    image = layer_by_head(ax, table, norm, written=cell_number)
    ax.set_xlabel("head", fontsize=8, color=MUTED)
    ax.set_ylabel("layer", fontsize=8, color=MUTED)
    panel_title(ax, title)
    if bar is not None:
        colour_bar(bar, image, label=what)
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
    return _head_numbers(_by_head(w, "entropy", item), "entropy, nats", title=title, ax=ax)


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
    return _head_numbers(_by_head(w, "sink", item, first), "weight on the first key", vmax=1.0, title=title, ax=ax)


def _by_head(w: Any, statistic: str, item: int | None, first: int = 0) -> pd.DataFrame:
    """The mean of a statistic over the queries of each head, by layer and head."""
    if isinstance(w, Profile):
        if first:
            raise InputError(f"first is {first} with a Profile, which knows the first token of each text, expected 0")
        with renamed(text="item"):
            return _table(tables.head_table(w.one_text(item)), statistic)
    found = layers(w, item, stacked=True)
    rows = []
    for one in found:
        weights = torch.from_numpy(np.nan_to_num(one.weights()))  # masked pairs have weight 0
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
