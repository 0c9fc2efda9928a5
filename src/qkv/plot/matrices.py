"""Figures of matrices: one head, several, or all of a model; and attention as a graph."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from qkv.errors import InputError, at_least_one, kind_of
from qkv.masks import Mask
from qkv.plot.given import Matrix, array, layers, masked, mean_weights, select_layer, token_lists, visible_pairs
from qkv.plot.layout import (
    ACCENT,
    CHARACTER,
    INK,
    MUTED,
    WARM,
    Drawing,
    are_readable,
    cell_number,
    colour_bar,
    heat,
    label_inches,
    label_side,
    panel_title,
    place,
    title_inches,
    titled,
    token_label,
    write_cells,
)

CELL, LEAST, MOST = 0.42, 1.5, 5.6  # inches: a cell, and the shortest and longest side of a matrix
PIXELS = 800  # longer sides are shown in bins, since a raster image would leave out rows
MANY_WIDTH = 7.0  # inches of a figure of several panels
SIDE = 2.5  # largest width of a panel in inches
THUMBNAIL = 96  # bins on a side of a head in the wall of a model
NARROWEST = 0.3  # inches of a head in the wall of a model


@dataclass(frozen=True)
class Style:
    """How matrices are drawn; `matrix` and `weights` explain the fields."""

    title: str
    what: str | None
    """The label of the colour bar; none is drawn if it is None."""
    labels: tuple[str, str] = ("query", "key")
    vmin: float | None = None
    vmax: float | None = None
    power: float = 1.0
    values: bool = False

    def norm(self, shown: Sequence[Matrix]) -> Normalize:
        """The colour scale of some matrices: from 0, or symmetrical if any number is negative."""
        known = np.concatenate([x.values[np.isfinite(x.values)] for x in shown])
        low, top = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
        vmin, vmax = self.vmin, self.vmax
        if vmin is None and low < 0:
            vmax = max(-low, top) if vmax is None else vmax
            vmin = -vmax
        vmin = 0.0 if vmin is None else vmin
        vmax = top if vmax is None else vmax
        vmax = vmax if vmax > vmin else vmin + 1.0
        if not self.power > 0:
            raise InputError(f"power is {self.power}, expected more than 0")
        return Normalize(vmin, vmax) if self.power == 1 else PowerNorm(self.power, vmin, vmax)


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
    return drawn(shown, Style(title, "weight", vmin=0, vmax=vmax, power=power, values=values), ax)


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
    return drawn(shown, Style(title, what, labels, vmin, vmax, values=values), ax)


def panels(
    matrices: Mapping[str, Any],
    tokens: Sequence[Any] | None = None,
    *,
    queries: Sequence[Any] | None = None,
    mask: Any = None,
    columns: int | None = None,
    vmin: float | None = None,
    vmax: float | None = None,
    power: float = 1.0,
    labels: tuple[str, str] = ("query", "key"),
    what: str = "",
    title: str = "",
) -> Figure:
    """Several matrices side by side, with one colour scale.

    Args:
        matrices: the matrices by their titles, numbers or booleans, (nq, nk); NaN is grey.
        tokens: names of the keys of all of them; without `queries`, the last of them are the queries.
        queries: names of the queries.
        mask: as in `weights`, the same for all matrices.
        columns: panels in a row; by default up to four.
        vmin: the number with the first colour; 0 by default, or −vmax if any number is negative.
        vmax: the number with the last colour; the largest one by default.
        power: the colour is proportional to number ** power, of numbers of 0 or more.
        labels: labels of the axis down and of the axis across.
        what: label of the colour bar; none is drawn for booleans.
        title: the title, of the whole figure.

    Returns:
        The figure; its `axes` are those of the panels, in order.

    Raises:
        InputError: for anything but matrices, or a wrong number of tokens.

    >>> import qkv
    >>> seen = {name: mask.dense(6, 6)[0, 0] for name, mask in
    ...         {"causal": qkv.masks.Causal(), "window": qkv.masks.Window(2)}.items()}
    >>> len(qkv.plot.panels(seen).axes)
    2
    """
    if not isinstance(matrices, Mapping) or not matrices:
        got = "empty" if isinstance(matrices, Mapping) else kind_of(matrices)
        raise InputError(f"matrices is {got}, expected a dictionary with at least one matrix by its title")
    shown = {name: matrix_of(m, f"matrices[{name!r}]", tokens, queries, mask) for name, m in matrices.items()}
    truth = all("bool" in str(getattr(m, "dtype", "")) for m in matrices.values())
    vmax = 1.3 if truth and vmax is None else vmax
    return wall(shown, Style(title, None if truth else what, labels, vmin, vmax, power), columns)


def heads(
    w: Any,
    tokens: Sequence[Any] | None = None,
    *,
    queries: Sequence[Any] | None = None,
    layer: int | None = None,
    item: int | None = None,
    mask: Any = None,
    columns: int | None = None,
    vmax: float | None = None,
    power: float = 1.0,
    title: str = "",
) -> Figure:
    """The heads of one layer side by side, with one colour scale.

    Args:
        w: as in `weights`; all heads of the layer are drawn.
        tokens: as in `weights`.
        queries: as in `weights`.
        layer: the layer, if there are several.
        item: as in `weights`.
        mask: as in `weights`.
        columns: heads in a row; by default up to four.
        vmax: as in `weights`; by default the largest weight of all heads.
        power: as in `weights`.
        title: the title.

    Returns:
        The figure; its `axes` are those of the heads, in order, and last the colour bar.

    Raises:
        InputError: as `weights`.

    >>> import torch, qkv
    >>> figure = qkv.plot.heads(torch.randn(1, 4, 5, 5).softmax(-1))
    >>> [axes.get_title(loc="left") for axes in figure.axes[:4]]
    ['head 0', 'head 1', 'head 2', 'head 3']
    """
    one = select_layer(layers(w, item), layer)
    maps = zip(one.heads, one.weights(), strict=True)
    shown = {f"head {number}": one.matrix(m, tokens, queries, mask) for number, m in maps}
    return wall(shown, Style(title, "weight", vmin=0, vmax=vmax, power=power), columns)


def matrix_of(m: Any, name: str, tokens: Sequence[Any] | None, queries: Sequence[Any] | None, mask: Any) -> Matrix:
    """Any matrix, with the names of both sides that are given."""
    values = array(m, name)
    if values.ndim != 2 or 0 in values.shape:
        raise InputError(f"{name} has shape {values.shape}, expected a matrix (rows, columns)")
    return Matrix(masked(values, mask), *token_lists(tokens, queries, *values.shape))


def drawn(shown: Matrix, style: Style, ax: Axes | None) -> Axes:
    """A matrix in new axes with a colour bar, or in `ax`; see `weights` and `matrix`."""
    if ax is None:
        return wall({style.title: shown}, replace(style, title="")).axes[0]
    draw(ax, pooled(shown), style.norm([shown]), style, style.title)
    return ax


def wall(given: Mapping[str, Matrix], style: Style, columns: int | None = None) -> Figure:
    """Panels in rows, with one colour scale; one matrix is larger. Only the outer panels have labels."""
    n = len(given)
    across = (n if n <= 4 else min(4, -(-n // -(-n // 4)))) if columns is None else columns
    at_least_one("panels", columns=across)
    across = min(across, n)
    shown = [pooled(m, PIXELS if n == 1 else 400) for m in given.values()]
    rows, keys = (max(m.size[axis] for m in shown) for axis in (0, 1))
    gap, bar_inches, norm = 0.22, 0.15 if style.what is None else 0.75, style.norm(list(given.values()))
    side, tall = sides(rows, keys) if n == 1 else (SIDE, SIDE)
    left = 0.45 + max(label_inches(m.queries, tall / rows, across=False) for m in shown)
    talls = [tall]
    if n > 1:
        side = min(SIDE, (MANY_WIDTH - left - bar_inches - gap * (across - 1)) / across)
        talls = [side * min(1.7, max(0.2, m.size[0] / m.size[1])) for m in shown]
    below = 0.35 + max(label_inches(m.keys, side / keys, across=True) for m in shown)
    texts = [textwrap.fill(name, max(12, int((side + (0.8 if n == 1 else 0)) * 13))) for name in given]
    width = left + across * (side + gap) - gap + bar_inches
    tops, y = list[float](), 0.12 + title_inches(style.title, width)
    for row in range(0, n, across):  # the upper edges of the panels, below their titles
        y += 0.12 + 0.16 * max(len(text.splitlines()) for text in texts[row : row + across])
        tops.append(y)
        y += max(talls[row : row + across]) + 0.12
    figure = titled(width, y - 0.12 + below, style.title)
    for index, (m, high, text) in enumerate(zip(shown, talls, texts, strict=True)):
        row, column = divmod(index, across)
        axes = place(figure, left + column * (side + gap), tops[row], side, high)
        draw(axes, m, norm, style, text)
        if column:
            axes.set_ylabel("")
            axes.tick_params(labelleft=False)
        if index + across < n:
            axes.set_xlabel("")
            axes.tick_params(labelbottom=False)
    if style.what is not None:
        down, right = shown[0].bins
        binned = f"largest {style.what or 'value'} in bins of {down} × {right}"
        label = style.what if shown[0].bins == (1, 1) else binned
        colour_bar(figure.axes[across - 1].images[0], label=label, height=max(talls[:across]))
    return figure


def draw(ax: Axes, shown: Matrix, norm: Normalize, style: Style, title: str) -> None:
    """Draw a matrix, or its bins, with labels on both sides."""
    rows, columns = shown.size
    down, across = (size * n for size, n in zip(shown.bins, shown.values.shape, strict=True))
    image = heat(ax, shown.values, norm, extent=(-0.5, across - 0.5, down - 0.5, -0.5))
    ax.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
    panel_title(ax, title)
    label_side(ax, "y", shown.queries, rows, style.labels[0])
    label_side(ax, "x", shown.keys, columns, style.labels[1])
    if style.values and shown.bins == (1, 1):
        write_cells(ax, image, cell_number)


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


def model(
    w: Any,
    tokens: Sequence[Any] | None = None,
    *,
    queries: Sequence[Any] | None = None,
    item: int | None = None,
    mask: Any = None,
    vmax: float | None = None,
    power: float = 0.5,
    title: str = "",
) -> Figure:
    """All heads of a model: a row for each layer and a column for each head, with one colour scale.

    Long sequences are shown in bins by the largest weight in each, so that a sink of one token remains visible. Tokens
    are printed at the outer heads if they are large enough to be read.

    Args:
        w: the tuple of all layers that `output_attentions` gives; a tensor or array (layers, h, nq, nk) or
            (layers, b, h, nq, nk); or a `qkv.Profile`, which stores all weights of short texts and bins of long ones.
        tokens: as in `weights`.
        queries: as in `weights`.
        item: as in `weights`.
        mask: as in `weights`.
        vmax: as in `weights`; by default the largest weight of all heads.
        power: as in `weights`. By default the square root, since heads differ.
        title: the title.

    Returns:
        The figure; its first axes are the wall, the second ones the colour bar.

    Raises:
        InputError: as `weights`.

    >>> import torch, qkv
    >>> attentions = tuple(torch.randn(1, 3, 5, 5).softmax(-1) for _ in range(2))  # as output_attentions=True gives
    >>> len(qkv.plot.model(attentions).axes[0].images)
    6
    """
    found = layers(w, item, stacked=True)
    if (tokens is not None or queries is not None) and len({one.size for one in found}) > 1:
        raise InputError("tokens is given with layers of different sizes, expected None")
    shown = [[pooled(Matrix(head), THUMBNAIL) for head in masked(one.weights(), mask)] for one in found]
    style = Style(title, "weight", vmin=0, vmax=vmax, power=power)
    widest = max((one.heads for one in found), key=len)
    return wall_of_heads(shown, [one.number for one in found], widest, style, found[0].names(tokens, queries))


def wall_of_heads(
    shown: list[list[Matrix]], numbers: list[int], heads: list[int], style: Style, names: tuple[Any, Any]
) -> Figure:
    """The figure of `model`: a row for each layer and a column for each head, and the names of queries and keys."""
    title, norm = style.title, style.norm([m for layer in shown for m in layer])
    rows, columns = len(shown), len(heads)
    cell = max(NARROWEST, min(1.1, 6.2 / columns, 7.5 / rows))
    wide, tall, gap = cell * columns, cell * rows, 0.04
    inner = cell * (1 - 2 * gap)
    rights, belows = (x if x and are_readable(inner / len(x)) else None for x in names)
    beside = 0.12 + (label_inches(rights, inner / len(rights), across=False) if rights else 0.0)
    below = 0.12 + (label_inches(belows, inner / len(belows), across=True) if belows else 0.0)
    left, width = 0.5, max(0.5 + wide + beside + 0.73, 2.2)
    top = 0.5 + title_inches(title, width)
    figure = titled(width, top + tall + below, title)
    axes, image = place(figure, left, top, wide, tall), None
    for row, layer in enumerate(shown):
        for column, m in enumerate(layer):
            image = heat(axes, m.values, norm, extent=(column + gap, column + 1 - gap, row + 1 - gap, row + gap))
    assert image is not None
    axes.set(xlim=(0, columns), ylim=(rows, 0), xlabel="head", ylabel="layer")
    axes.spines[:].set_visible(False)
    for axis, ids, n in ((axes.xaxis, heads, columns), (axes.yaxis, numbers, rows)):
        step = -(-n // 24)
        axis.set_ticks([x + 0.5 for x in range(0, n, step)], [str(x) for x in ids[::step]])
    axes.tick_params(length=0, labelsize=7.5, labelcolor=MUTED, labeltop=True, labelbottom=False, pad=2)
    axes.xaxis.set_label_position("top")
    colour_bar(image, label="weight", beside=beside, height=min(tall, 2.2))
    for side, tokens, count in (("y", rights, rows), ("x", belows, columns)):
        if tokens is None:
            continue
        for at in range(count):  # the heads of the last column, or of the last row
            column, row = (columns - 1, at) if side == "y" else (at, rows - 1)
            outer = place(figure, left + cell * (column + gap), top + cell * (row + gap), inner, inner)
            outer.set(
                xlim=(-0.5, len(tokens) - 0.5), ylim=(len(tokens) - 0.5, -0.5), xticks=[], yticks=[], facecolor="none"
            )
            outer.spines[:].set_visible(False)
            outer.yaxis.tick_right()
            label_side(outer, side, tokens, len(tokens), "")
    return figure


PAIRS = 2500  # most arrows of a figure
BEND = 0.45  # curvature of an arrow: it rises to a quarter of this times its length, twice over
RING_BEND, RING = 1.6, 0.26  # curvature of the arrow of a token to itself, and its height in tokens
FAINT = 0.005  # weights below this share of the largest one are not drawn
UNIT, GRAPH_WIDTH = 0.62, 7.0  # inches: from one token to the next unless names need more, and the widest figure
DIRECTION = "arrows point from query to key"


def arcs(
    w: Any, tokens: Sequence[Any] | None = None, *, item: int | None = None, title: str = "", ax: Axes | None = None
) -> Axes:
    """Who sees whom: an arrow from every query to every key that it may attend to, or attends to.

    Tokens are in one line. Arrows above the line point back, to earlier tokens; those below point ahead; a ring is a
    token that attends to itself. The arrows of a matrix of weights are as wide and dark as the weight.

    Args:
        w: booleans (n, n), True where the query may attend; a mask of `qkv.masks`; or weights as in `weights`, of
            which the mean of all heads is drawn.
        tokens: names of the tokens. A mask needs them.
        item: as in `weights`.
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
    pairs, names = _pairs(w, tokens, item)
    n, top = len(pairs), float(pairs.max()) or 1.0
    names = [token_label(name) for name in names or map(str, range(n))]
    arrows = [(int(query), int(key)) for query, key in np.argwhere(pairs > FAINT * top)]
    if len(arrows) > PAIRS:
        raise InputError(
            f"w has {len(arrows):,} arrows to draw, expected at most {PAIRS:,}; draw it with qkv.plot.weights"
        )
    points = min(9.0, 330 / n)
    longest = max(map(len, names)) * CHARACTER / 8  # inches for each point of the font size
    if ax is None:
        unit = max(UNIT, longest * points + 0.1)
        unit = unit if unit * n <= GRAPH_WIDTH else min(UNIT, GRAPH_WIDTH / n)
    else:
        unit = ax.bbox.width / ax.get_figure(root=True).dpi / n  # type: ignore[union-attr]
        points = min(points, 72 * unit)
    # Distances are in tokens from now on, upwards from the names.
    turned = longest * points > unit
    room = (longest * points / 2 + 0.05 if turned else 0.14) / unit  # half of the height of the names
    back, ahead = (max([0.0, *(BEND / 2 * side * (q - k) for q, k in arrows)]) for side in (1, -1))
    ring = RING if any(query == key for query, key in arrows) else 0.0
    above, below = (
        room + max(back, ring) + 0.1,
        room + ahead + 0.1 + 0.25 / unit,
    )  # room for the direction of the arrows
    if ax is None:
        head = 0.45 if title else 0.15
        figure = Drawing(figsize=(max(n * unit + 0.4, 2.4), head + (above + below) * unit + 0.1))
        ax = place(figure, 0.2, head, n * unit, (above + below) * unit)
    ax.set(xlim=(-0.5, n - 0.5), ylim=(-below, above), aspect="equal")
    ax.set_axis_off()
    panel_title(ax, title)
    thin = min(1.0, 16 / n)
    for query, key in arrows:
        weight, y = float(pairs[query, key]) / top, room if key <= query else -room
        colour, gap, bend = (ACCENT, 0.05, BEND) if key < query else (WARM, -0.05, BEND)
        if key == query:
            colour, gap, bend = MUTED, -0.13, RING_BEND
        ax.add_patch(FancyArrowPatch(
            (query - gap, y), (key + gap, y), arrowstyle="-|>", mutation_scale=max(2.5, 7 * thin),
            lw=(0.4 + 1.1 * weight) * thin, color=colour, alpha=0.25 + 0.65 * weight, gid=f"{query}>{key}", shrinkA=0,
            shrinkB=0, connectionstyle=f"arc3,rad={bend}",
        ))  # fmt: skip
    hanging = turned and not ahead  # names begin at the arrows above them
    y, align = (room - 0.12, "top") if hanging else (0.0, "center")
    for x, name in enumerate(names):
        ax.text(x, y, name, ha="center", va=align, fontsize=points, color=INK, rotation=90 if turned else 0)
    ax.text(0, 0, DIRECTION, transform=ax.transAxes, va="bottom", fontsize=7, color=MUTED)
    return ax


def _pairs(w: Any, tokens: Sequence[Any] | None, item: int | None) -> tuple[np.ndarray, list[str] | None]:
    """Weights, or 1 and 0 of a mask, (n, n), 0 at masked pairs; and the names of the tokens."""
    if isinstance(w, Mask) and tokens is None:
        raise InputError(f"tokens is None with the mask {type(w).__name__}, expected the tokens to draw")
    if isinstance(w, Mask) or "bool" in str(getattr(w, "dtype", "")):
        n = w.shape[-1] if tokens is None else len(tokens)
        return visible_pairs(w, n, n, "w").astype(float), token_lists(tokens, None, n, n)[1]
    found = layers(w, item)
    pairs = mean_weights(found, None, None)[1]
    if len(pairs) != len(pairs[0]):
        raise InputError(
            f"w has {len(pairs)} queries and {len(pairs[0])} keys, expected the same; qkv.plot.weights draws two texts"
        )
    return pairs, found[0].names(tokens, None)[1]
