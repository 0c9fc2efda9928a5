"""Alignments of two texts, and attention over the regions of an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from qkv.errors import InputError
from qkv.figures.alignment import alignment_figure
from qkv.figures.overlay import overlay_figure
from qkv.plot.given import array, layers, token_lists

MOST_OVERLAYS = 35  # largest number of pictures in one figure


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
    found = layers(w, item)
    if found.bins != (1, 1):
        raise InputError("w is a Profile with bins of a long text, expected all weights")
    if layer is not None or head is not None:
        found = found.layer(layer)
    of = "" if layer is None else f"Layer {layer}" if head is None else f"Layer {layer}, head {head}"
    if head is not None:
        shown = found.head(head)
    else:
        if len(set(found.sizes)) > 1:
            raise InputError("w has layers of different sizes, expected one size; pass layer=")
        shown = np.mean([x.mean(0) for x in found.maps()], axis=0)
    rows, columns = token_lists(source, target, *shown.shape)
    return alignment_figure(note, of, np.nan_to_num(shown), rows or [], columns or [])


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
    shown = layers(shown).head(0)
    n_queries, n_keys = shown.shape
    cells = grid[0] * grid[1]
    if min(grid) < 1 or cells > n_keys:
        raise InputError(f"grid is {grid[0]} × {grid[1]}, expected at most the {n_keys} keys of w")
    if n_queries > MOST_OVERLAYS:
        raise InputError(f"w has {n_queries} queries, expected at most {MOST_OVERLAYS}; pass some rows of it")
    names = [f"query {i}" for i in range(n_queries)] if queries is None else None
    names = token_lists(None, queries, n_queries, n_keys)[0] if names is None else names
    maps = np.nan_to_num(shown[:, n_keys - cells :]).reshape(-1, *grid)
    picture = image.detach().cpu().numpy() if isinstance(image, Tensor) else np.asarray(image)
    return overlay_figure(note, "", picture, maps, names or [], corners=corners)
