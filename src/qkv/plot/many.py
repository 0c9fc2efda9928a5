"""Small multiples: several matrices, the heads of a layer, and all heads of a model."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from qkv.errors import InputError, at_least_one
from qkv.figures.layout import Drawing, heat, place
from qkv.figures.style import INK, MUTED
from qkv.plot.given import array, layers, masked, token_lists
from qkv.plot.single import draw, label_inches, norm_of, pooled, scale

WIDTH = 7.0  # inches of a figure of several panels
SIDE = 2.5  # largest width of a panel in inches
THUMBNAIL = 96  # bins on a side of a head in the wall of a model
NARROWEST = 0.3  # inches of a head in the wall of a model


def panels(
    matrices: Mapping[str, Any],
    tokens: Sequence[Any] | None = None,
    *,
    queries: Sequence[Any] | None = None,
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
    if not matrices:
        raise InputError("matrices is empty, expected at least one matrix by its title")
    given = {name: array(m, f"matrices[{name!r}]") for name, m in matrices.items()}
    for name, m in given.items():
        if m.ndim != 2 or 0 in m.shape:
            raise InputError(f"matrices[{name!r}] has shape {m.shape}, expected a matrix (nq, nk)")
    truth = all(_is_boolean(m) for m in matrices.values())
    norm = norm_of(list(given.values()), vmin, 1.3 if truth and vmax is None else vmax, power)
    named = tokens is not None or queries is not None
    names = [token_lists(tokens, queries, *m.shape) if named else (None, None) for m in given.values()]
    return wall(given, names, norm, columns=columns, labels=labels, what=None if truth else what, title=title)


def _is_boolean(m: Any) -> bool:
    return "bool" in str(getattr(m, "dtype", ""))


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
    found = layers(w, item).layer(layer)
    given = {f"head {h}": masked(m, mask) for h, m in zip(found.head_ids[0], next(found.maps()), strict=True)}
    if tokens is None and queries is None:
        names = found.queries, found.keys
    else:
        names = token_lists(tokens, queries, *found.sizes[0])
    norm = norm_of(list(given.values()), 0, vmax, power)
    return wall(
        given, [names] * len(given), norm, columns=columns, what="weight", title=title, bins=found.bins,
        covers=found.sizes[0],
    )  # fmt: skip


def wall(
    given: Mapping[str, np.ndarray],
    names: Sequence[tuple[list[str] | None, list[str] | None]],
    norm: Normalize,
    *,
    columns: int | None,
    labels: tuple[str, str] = ("query", "key"),
    what: str | None,
    title: str,
    bins: tuple[int, int] = (1, 1),
    covers: tuple[int, int] | None = None,
) -> Figure:
    """Panels in rows, with one colour bar if `what` is not None. Only the outer panels have labels."""
    n = len(given)
    across = (n if n <= 4 else min(4, -(-n // -(-n // 4)))) if columns is None else columns
    at_least_one("panels", columns=across)
    across = min(across, n)
    down = -(-n // across)
    left = 0.45 + max(label_inches(rows) for rows, _ in names)
    gap, bar_inches = 0.22, 0.15 if what is None else 0.75
    side = min(SIDE, (WIDTH - left - bar_inches - gap * (across - 1)) / across)
    longest = max(m.shape[1] for m in given.values())
    below = 0.35 + max(label_inches(keys, cell=side / longest) for _, keys in names)
    ratios = [min(1.7, max(0.2, m.shape[0] / m.shape[1])) for m in given.values()]
    talls = [side * max(ratios[row * across : (row + 1) * across]) for row in range(down)]
    texts = [textwrap.fill(name, max(12, int(side * 15))) for name in given]
    above = [0.12 + 0.15 * max(text.count("\n") + 1 for text in texts[row * across : (row + 1) * across])
             for row in range(down)]  # fmt: skip
    lines = textwrap.wrap(title, int((left + across * (side + gap) + bar_inches) * 11)) if title else []
    head = 0.12 + 0.2 * len(lines)
    width = left + across * (side + gap) - gap + bar_inches
    figure = Drawing(figsize=(width, head + sum(above) + sum(talls) + 0.12 * (down - 1) + below))
    if lines:
        at = 1 - 0.08 / figure.get_figheight()
        figure.text(0.1 / width, at, "\n".join(lines), va="top", fontsize=10, color=INK)
    image, y = None, head
    for row in range(down):
        y += above[row]
        for column in range(across):
            if (index := row * across + column) >= n:
                break
            name, m = list(given.items())[index]
            tall = side * ratios[index]
            axes = place(figure, left + column * (side + gap), y, side, tall)
            shown, size = pooled(m, bins, 400)
            image = draw(axes, shown, norm, *names[index], bins=size, covers=covers or (m.shape[0], m.shape[1]),
                         labels=labels, title=texts[list(given).index(name)])  # fmt: skip
            axes.title.set_fontsize(8)
            _only_outer(axes, left=column == 0, bottom=index + across >= n)
        y += talls[row] + 0.12
    if what is not None and image is not None:
        tall = min(talls[0], side)
        bar = place(figure, width - bar_inches + 0.12, head + above[0], 0.1, tall)
        scale(bar, image, what)
    return figure


def _only_outer(axes: Axes, *, left: bool, bottom: bool) -> None:
    if not left:
        axes.set_ylabel("")
        axes.tick_params(labelleft=False)
    if not bottom:
        axes.set_xlabel("")
        axes.tick_params(labelbottom=False)


def model(
    w: Any,
    *,
    item: int | None = None,
    mask: Any = None,
    vmax: float | None = None,
    power: float = 0.5,
    title: str = "",
) -> Figure:
    """All heads of a model: a row for each layer and a column for each head, with one colour scale.

    Long sequences are shown in bins by the largest weight in each, so that a sink of one token remains visible.

    Args:
        w: the tuple of all layers that `output_attentions` gives; a tensor or array (layers, h, nq, nk) or
            (layers, b, h, nq, nk); or a `qkv.Profile`, which stores all weights of short texts and bins of long ones.
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
    shown = [np.stack([pooled(head, most=THUMBNAIL)[0] for head in masked(m, mask)]) for m in found.maps()]
    norm = norm_of(shown, 0, vmax, power)
    columns, rows = max(len(ids) for ids in found.head_ids), len(shown)
    cell = max(NARROWEST, min(1.1, 6.2 / columns, 7.5 / rows))
    wide, tall = cell * columns, cell * rows
    left, width = 0.5, max(0.5 + wide + 0.85, 2.2)
    lines = textwrap.wrap(title, int(width * 11))
    top = 0.5 + 0.2 * len(lines) + (0.05 if title else 0)
    figure = Drawing(figsize=(width, top + tall + 0.12))
    if title:
        at = 1 - 0.08 / figure.get_figheight()
        figure.text(0.1 / width, at, "\n".join(lines), va="top", fontsize=10, color=INK)
    axes = place(figure, left, top, wide, tall)
    gap, image = 0.04, None
    for row, layer in enumerate(shown):
        for column, m in enumerate(layer):
            image = heat(axes, m, norm, extent=(column + gap, column + 1 - gap, row + 1 - gap, row + gap))
    assert image is not None
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    widest = max(found.head_ids, key=len)
    for axis, ids, n in ((axes.xaxis, widest, columns), (axes.yaxis, found.layer_ids, rows)):
        step = -(-n // 24)
        axis.set_ticks([x + 0.5 for x in range(0, n, step)], [str(x) for x in ids[::step]])
    axes.tick_params(length=0, labelsize=7.5, labelcolor=MUTED, labeltop=True, labelbottom=False, pad=2)
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("head", fontsize=8, color=MUTED)
    axes.set_ylabel("layer", fontsize=8, color=MUTED)
    scale(place(figure, left + wide + 0.12, top, 0.1, min(tall, 2.2)), image, "weight")
    return figure
