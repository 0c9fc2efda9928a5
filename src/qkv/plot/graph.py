"""Who sees whom, drawn as a graph with an arrow from each query to each of its keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from qkv.errors import InputError
from qkv.figures.layout import Drawing, place, token_label
from qkv.figures.style import ACCENT, INK, MUTED, WARM
from qkv.masks import Mask
from qkv.plot.given import array, checked_weights, token_lists, visible_pairs
from qkv.plot.single import CHARACTER

PAIRS = 2500  # most arrows of a figure
BEND = 0.45  # curvature of an arrow: it rises to a quarter of this times its length, twice over
RING = 0.26  # height of the arrow of a token to itself, in tokens
BETWEEN = 1.3  # distance between the lines of keys and of queries, in tokens
FAINT = 0.005  # weights below this share of the largest one are not drawn
UNIT, WIDTH = 0.62, 7.0  # inches: from one token to the next unless names need more, and the widest figure
DIRECTION = "arrows point from query to key"


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
    keys = [token_label(name) for name in columns or map(str, range(n_keys))]
    names = (keys, [token_label(name) for name in rows or []]) if between else (keys,)
    top = float(pairs.max()) or 1.0
    arrows = [(int(query), int(key)) for query, key in np.argwhere(pairs > FAINT * top)]
    if len(arrows) > PAIRS:
        raise InputError(
            f"w has {len(arrows):,} arrows to draw, expected at most {PAIRS:,}; draw it with qkv.plot.weights"
        )
    form = _Form.of(names, arrows, ax)
    if ax is None:
        head, wide, tall = 0.45 if title else 0.15, form.n * form.unit, form.height * form.unit
        figure = Drawing(figsize=(max(wide + 0.4, 2.4), head + tall + 0.1))
        ax = place(figure, 0.2, head, wide, tall)
    ax.set_xlim(-0.5, form.n - 0.5)
    ax.set_ylim(form.above - form.height, form.above)
    ax.set_aspect("equal")
    ax.set_axis_off()
    if title:
        ax.set_title(title, loc="left", fontsize=9, color=INK, pad=6)
    for query, key in arrows:
        ax.add_patch(form.arrow(query, key, float(pairs[query, key]) / top))
    for number, side in enumerate(names):
        form.write(ax, side, number)
    ax.text(0, 0, DIRECTION, transform=ax.transAxes, va="bottom", fontsize=7, color=MUTED)
    return ax


@dataclass(frozen=True)
class _Form:
    """The places of tokens and arrows. Distances are in tokens; `unit` is that of two neighbours, in inches."""

    sizes: tuple[int, ...]
    """The number of tokens, or of keys and of queries if they are on two lines."""
    unit: float
    points: float
    turned: bool
    """Whether names are turned by 90 degrees, since the longest is wider than a token."""
    room: float
    """Half of the height of the names."""
    hanging: bool
    """Whether names begin at the arrows above them, since there are no arrows below."""
    above: float
    """The distance from the middle of the names, of keys if there are two lines, to the upper edge."""
    height: float

    @classmethod
    def of(cls, names: tuple[list[str], ...], arrows: list[tuple[int, int]], ax: Axes | None) -> _Form:
        sizes = tuple(map(len, names))
        n, longest = max(sizes), max(len(name) for side in names for name in side)
        points, character = min(9.0, 330 / n), CHARACTER / 8  # inches for each point
        if ax is None:
            unit = max(UNIT, longest * character * points + 0.1)
            unit = unit if unit * n <= WIDTH else min(UNIT, WIDTH / n)
        else:
            unit = ax.bbox.width / ax.get_figure(root=True).dpi / n  # type: ignore[union-attr]
            points = min(points, 72 * unit)
        turned = longest * character * points > unit
        room = (longest * character * points / 2 + 0.05 if turned else 0.14) / unit
        foot = 0.25 / unit  # for the direction of the arrows
        if len(names) == 2:
            return cls(sizes, unit, points, turned, room, False, room + 0.1, 4 * room + 0.2 + BETWEEN + foot)
        back = max([0.0, *(BEND / 2 * (query - key) for query, key in arrows if key < query)])
        ahead = max([0.0, *(BEND / 2 * (key - query) for query, key in arrows if key > query)])
        ring = RING if any(query == key for query, key in arrows) else 0.0
        above = room + max(back, ring) + 0.1
        return cls(sizes, unit, points, turned, room, turned and not ahead, above, above + room + ahead + 0.1 + foot)

    @property
    def n(self) -> int:
        return max(self.sizes)

    def x(self, at: int, line: int = 0) -> float:
        """The place of a token; the shorter of two lines is centred."""
        return at + (self.n - self.sizes[line]) / 2

    def write(self, ax: Axes, names: list[str], line: int) -> None:
        """The names of one line: of the tokens, or of the keys (0) and of the queries (1)."""
        y, align = (self.room - 0.12, "top") if self.hanging else (0.0, "center")
        if len(self.sizes) == 2:
            y, align = (-self.room - BETWEEN, "top") if line else (-self.room, "bottom")
        for at, name in enumerate(names):
            ax.text(self.x(at, line), y, name, ha="center", va=align, fontsize=self.points, color=INK,
                    rotation=90 if self.turned else 0)  # fmt: skip

    def arrow(self, query: int, key: int, weight: float) -> FancyArrowPatch:
        """The arrow of one pair, from the query to the key."""
        colour = MUTED if query == key else ACCENT if key < query else WARM
        thin = min(1.0, 16 / self.n)
        style: dict[str, Any] = {
            "arrowstyle": "-|>", "mutation_scale": max(2.5, 7 * thin), "lw": (0.4 + 1.1 * weight) * thin,
            "color": colour, "alpha": 0.25 + 0.65 * weight, "gid": f"{query}>{key}", "shrinkA": 0, "shrinkB": 0,
        }  # fmt: skip
        if len(self.sizes) == 2:
            ends = (self.x(query, 1), -self.room - BETWEEN + 0.08), (self.x(key), -self.room - 0.08)
            return FancyArrowPatch(*ends, **(style | {"color": ACCENT}))
        if query == key:  # a ring above the token
            ends = (query + 0.13, self.room), (key - 0.13, self.room)
            return FancyArrowPatch(*ends, connectionstyle="arc3,rad=1.6", **style)
        side = 1 if key < query else -1  # above the names if it points back
        ends = (query - 0.05 * side, self.room * side), (key + 0.05 * side, self.room * side)
        return FancyArrowPatch(*ends, connectionstyle=f"arc3,rad={BEND}", **style)


def _pairs(w: Any, tokens: Sequence[Any] | None, queries: Sequence[Any] | None) -> np.ndarray:
    """Weights, or 1 and 0 of a mask, (nq, nk); 0 at NaN."""
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
    return np.nan_to_num(checked_weights(pairs))
