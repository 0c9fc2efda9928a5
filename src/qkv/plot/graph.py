"""Who sees whom, drawn as a graph with an arrow from each query to each of its keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from qkv.errors import InputError
from qkv.figures.layout import Drawing, place, token_label
from qkv.figures.style import ACCENT, INK, MUTED, WARM
from qkv.masks import Mask
from qkv.plot.given import array, check_weights, token_lists, visible_pairs

PAIRS = 2500  # most arrows of a figure
BEND = 0.45  # curvature of an arrow: it rises to a quarter of this times its length, twice over
FAINT = 0.005  # weights below this share of the largest one are not drawn


def arcs(
    w: Any,
    tokens: Sequence[Any] | None = None,
    *,
    queries: Sequence[Any] | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Who sees whom: an arrow from every query to every key that it may attend to, or attends to.

    Tokens are in one line. Arrows above the line point back, to earlier tokens; those below point ahead; a ring is a
    token that attends to itself. With `queries` (cross-attention), queries are below and keys above. The arrows of a
    matrix of weights are as wide and dark as the weight.

    Args:
        w: booleans (nq, nk), True where the query may attend; a mask of `qkv.masks`; or weights (nq, nk).
        tokens: names of the keys, which are the queries, too. A mask needs them.
        queries: names of the queries, if they are other tokens.
        title: the title.
        ax: the axes to draw in; a new figure by default.

    Returns:
        The axes. Each arrow is a patch whose `get_gid()` is "query>key", by their positions.

    Raises:
        InputError: for a wrong shape or number of tokens, or more than 2,500 arrows.

    >>> import qkv
    >>> axes = qkv.plot.arcs(qkv.masks.Causal(), ["the", "cat", "sat"])
    >>> [arrow.get_gid() for arrow in axes.patches]
    ['0>0', '1>0', '1>1', '2>0', '2>1', '2>2']
    """
    pairs = _pairs(w, tokens, queries)
    n_queries, n_keys = pairs.shape
    if tokens is None and queries is None:
        tokens = [str(i) for i in range(n_keys)]
    between = queries is not None or n_queries != n_keys
    if between and queries is None:
        queries = [str(i) for i in range(n_queries)]
    rows, columns = token_lists(tokens, queries, n_queries, n_keys)
    arrows = np.argwhere(np.nan_to_num(pairs) > FAINT * max(float(np.nanmax(pairs)), 1e-30))
    if len(arrows) > PAIRS:
        raise InputError(
            f"w has {len(arrows):,} arrows to draw, expected at most {PAIRS:,}; draw it with qkv.plot.weights"
        )
    n = max(n_queries, n_keys)
    lengths = [int(abs(key - query)) for query, key in arrows]
    above = max([0.5, *(x for x, (q, k) in zip(lengths, arrows, strict=True) if k <= q)]) * BEND / 2 + 0.45
    below = max([0.0, *(x for x, (q, k) in zip(lengths, arrows, strict=True) if k > q)]) * BEND / 2 + 0.6
    if between:
        above, below = 0.6, 1.8
    if ax is None:
        unit = min(0.62, 7.0 / n)
        figure = Drawing(figsize=(max(n * unit + 0.4, 2.4), (above + below) * unit + (0.65 if title else 0.35)))
        ax = place(figure, 0.2, 0.45 if title else 0.15, n * unit, (above + below) * unit)
    ax.set_xlim(-0.5, n - 0.5)
    ax.set_ylim(-below, above)
    ax.set_aspect("equal")
    ax.set_axis_off()
    if title:
        ax.set_title(title, loc="left", fontsize=9, color=INK, pad=6)
    points = min(9.0, 330 / n)
    top = float(np.nanmax(pairs)) or 1.0
    for query, key in arrows:
        ax.add_patch(_arrow(int(query), int(key), float(pairs[query, key]) / top, between=between, n=n))
    for key, name in enumerate(columns or []):
        ax.text(key, 0.08 if between else 0, token_label(name), ha="center", va="bottom" if between else "center",
                fontsize=points, color=INK, rotation=0 if n <= 14 else 90)  # fmt: skip
    if between:
        for query, name in enumerate(rows or []):
            ax.text(query, -1.38, token_label(name), ha="center", va="top", fontsize=points, color=INK)
    return ax


def _pairs(w: Any, tokens: Sequence[Any] | None, queries: Sequence[Any] | None) -> np.ndarray:
    """Weights, or 1 and 0 of a mask, (nq, nk)."""
    if isinstance(w, Mask):
        if tokens is None:
            raise InputError(f"tokens is None with the mask {type(w).__name__}, expected the tokens to draw")
        n_keys = len(tokens)
        return visible_pairs(w, n_keys if queries is None else len(queries), n_keys, "w").astype(float)
    pairs = array(w)
    while pairs.ndim > 2 and len(pairs) == 1:
        pairs = pairs[0]
    if pairs.ndim != 2 or 0 in pairs.shape:
        raise InputError(f"w has shape {pairs.shape}, expected a matrix (nq, nk) of booleans or weights")
    check_weights(pairs)
    return pairs


def _arrow(query: int, key: int, weight: float, *, between: bool, n: int) -> FancyArrowPatch:
    """The arrow of one pair, from the query to the key."""
    colour = MUTED if query == key else ACCENT if key < query else WARM
    style: dict[str, Any] = {
        "arrowstyle": "-|>", "mutation_scale": 7 if n <= 16 else 4, "lw": 0.4 + 1.1 * weight, "color": colour,
        "alpha": 0.25 + 0.65 * weight, "gid": f"{query}>{key}", "shrinkA": 0, "shrinkB": 0,
    }  # fmt: skip
    if between:
        return FancyArrowPatch((query, -1.3), (key, 0), **(style | {"color": ACCENT}))
    if query == key:  # a ring above the token
        return FancyArrowPatch((query + 0.13, 0.22), (key - 0.13, 0.22), connectionstyle="arc3,rad=1.6", **style)
    side = 1 if key < query else -1  # above the line if it points back
    start, end = (query - 0.05 * side, 0.22 * side), (key + 0.05 * side, 0.22 * side)
    return FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={BEND}", **style)
