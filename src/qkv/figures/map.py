"""Figure of one head's attention map, query by key, with every bin a whole number of pixels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from qkv.errors import InputError
from qkv.figures.layout import Drawing, heat, titled, token_label
from qkv.figures.save import DPI
from qkv.figures.style import HAIRLINE, INK, MUTED
from qkv.profiler.data.labels import percent
from qkv.statistics.maps import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

POOLS = ("max", "mean", "both")
LABELLED = 64  # up to this many tokens on a side are printed
SIDE, MIN_SIDE = 1024, 200  # pixels: the longer side of a panel, and the smallest size of a side
RANGE = 30.0  # the colour scale is logarithmic if weights differ by more than this factor
FAINTEST = 1e-4  # relative to the largest weight; smaller weights have the colour of 0


class Mapped(Protocol):
    """The head that a picture shows: `qkv.profiler.explore.attention_map.AttentionMap`, or `StoredMap` of a profile."""

    @property
    def model(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def layer(self) -> int: ...
    @property
    def head(self) -> int: ...
    @property
    def n_queries(self) -> int: ...
    @property
    def n_keys(self) -> int: ...
    def query_tokens(self, rows: slice = ..., *, item: int = ...) -> list[str]: ...
    def key_tokens(self, columns: slice = ..., *, item: int = ...) -> list[str]: ...


class _Panel(NamedTuple):
    title: str
    values: np.ndarray
    what: str


def map_figure(head_map: Mapped, picture: Picture, *, pool: str = "both", item: int = 0) -> Figure:
    """The attention map of one head: queries down, keys across, starting at the top left.

    Each bin is a whole number of pixels when saved by `qkv.figures.save.save_figure`, so that a sink one bin wide
    remains visible. Bins without a visible pair are grey. The colour scale is logarithmic if weights differ by more
    than a factor of thirty, which the colour bar states. Up to 64 tokens on a side are printed.

    Args:
        head_map: the head, for tokens and the title.
        picture: from its `picture` or `tile`.
        pool: ``"max"``, ``"mean"`` or ``"both"`` side by side; if every bin is a single pair, both are equal and drawn
            as one panel.
        item: batch item of the picture.

    Raises:
        InputError: for any other pool.

    >>> from qkv.profiler import attention_map
    >>> head_map = attention_map("qkv-mini", "def mean(values):", layer=1, head=2)
    >>> len(map_figure(head_map, head_map.picture()).axes)
    2
    """
    if pool not in POOLS:
        raise InputError(f"pool is {pool!r}, expected one of {', '.join(POOLS)}")
    down, across = picture.row_edges.tolist(), picture.column_edges.tolist()
    panels = _panels(picture, pool, down, across)
    rows, columns = (
        names(slice(edges[0], edges[-1]), item=item) if edges[-1] - edges[0] <= LABELLED else None
        for names, edges in ((head_map.query_tokens, down), (head_map.key_tokens, across))
    )
    h, w = picture.mean.shape
    whole = max(1, SIDE // max(h, w))
    tall, wide = (n * max(whole, -(-MIN_SIDE // n)) for n in (h, w))
    left, top, right, below = 0.95, 1.25, 0.75, 0.95 if columns else 0.6
    aside, under = left + wide / DPI + right, 0.45 + tall / DPI + below  # from one panel to the next
    stacked = wide > 2 * tall
    width, height = (1, len(panels)) if stacked else (len(panels), 1)
    inches = (round(x * DPI) / DPI for x in (max(width * aside, 6.4), top - 0.45 + height * under))
    figure = Drawing(figsize=(next(inches), next(inches)))
    titled(figure, sentence(head_map, picture, item), _subtitle(head_map, picture))
    for n, panel in enumerate(panels):
        x, y = (left, top + n * under) if stacked else (left + n * aside, top)
        axes = _at(figure, x, y, wide, tall)
        _draw(axes, _at(figure, x + wide / DPI + 0.1, y, round(0.1 * DPI), tall), panel, picture, down, across)
        _label(axes, rows, columns, down, across)
    return figure


def _panels(picture: Picture, pool: str, down: list[int], across: list[int]) -> list[_Panel]:
    sizes = [int(max(np.diff(edges))) for edges in (down, across)]
    if max(sizes) == 1:
        return [_Panel("Weight of each query on each key", _numpy(picture.mean), "weight")]
    bins = f"bins of {sizes[0]:,} × {sizes[1]:,} tokens" + (" at most" if _uneven(down) or _uneven(across) else "")
    both = {
        "max": _Panel(f"Largest weight in {bins}", _numpy(picture.maximum), "largest"),
        "mean": _Panel(f"Average weight in {bins}, masked pairs as 0", _numpy(picture.mean), "average"),
    }
    return list(both.values()) if pool == "both" else [both[pool]]


def _uneven(edges: list[int]) -> bool:
    return len(set(np.diff(edges).tolist())) > 1


def _numpy(x: Tensor) -> np.ndarray:
    array: np.ndarray = x.double().cpu().numpy()
    return array


def _draw(axes: Axes, bar: Axes, panel: _Panel, picture: Picture, down: list[int], across: list[int]) -> None:
    """A panel and its colour bar."""
    values = np.ma.masked_where(_numpy(picture.visible) == 0, panel.values)
    norm, logarithmic = _norm(values)
    extent = (across[0] - 0.5, across[-1] - 0.5, down[-1] - 0.5, down[0] - 0.5)
    image = heat(axes, values, norm, extent=extent)
    axes.set_title(panel.title, loc="left", fontsize=9, color=INK, pad=7)
    drawn = axes.figure.colorbar(image, cax=bar, extend="min" if logarithmic else "neither", extendfrac=0.03)
    drawn.outline.set_visible(False)
    if logarithmic:  # powers of ten, and the largest weight unless it would overlap one of them
        low, top = float(norm.vmin or 0), float(norm.vmax or 1)
        tens = [10.0**n for n in range(math.ceil(math.log10(low)), math.floor(math.log10(top)) + 1)]
        drawn.set_ticks([*(x for x in tens if x < 0.75 * top), top], minor=False)
        drawn.set_ticks([], minor=True)
    bar.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
    bar.tick_params(which="both", length=0, labelsize=7, colors=MUTED, pad=2)
    scale = f"{panel.what},\nlog scale" if logarithmic else panel.what
    bar.set_title(scale, fontsize=7.5, color=MUTED, loc="left", pad=7, linespacing=1.1)


def _norm(values: np.ma.MaskedArray) -> tuple[Normalize, bool]:
    """The norm of the colour map, and whether it is logarithmic."""
    shown = values.compressed()
    shown = shown[shown > 0]
    top = float(shown.max()) if len(shown) else 1.0
    low = max(float(np.quantile(shown, 0.05)), FAINTEST * top) if len(shown) else 1.0
    return (LogNorm(low, top), True) if top > RANGE * low else (Normalize(0, top), False)


def _label(axes: Axes, rows: list[str] | None, columns: list[str] | None, down: list[int], across: list[int]) -> None:
    """Tick labels: tokens if there are few, else positions; queries down, keys across."""
    for axis, names, edges, what in ((axes.yaxis, rows, down, "query"), (axes.xaxis, columns, across, "key")):
        vertical = axis is axes.yaxis
        if names is None:
            axis.set_major_locator(MaxNLocator(8, integer=True))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axis.set_label_text(f"{what} position", fontsize=8, color=MUTED)
            axis.set_tick_params(length=2.5, color=HAIRLINE, labelsize=7.5, labelcolor=MUTED)
            continue
        size = max(5.5, min(8.0, 380 / len(names)))
        axis.set_ticks(range(edges[0], edges[-1]), [token_label(name) for name in names])
        axis.set_tick_params(length=0, labelsize=size, labelcolor=INK, labelrotation=0 if vertical else 90)


def sentence(head_map: Mapped, picture: Picture, item: int = 0) -> str:
    """The title: the key or bin that receives most of the weight shown."""
    down, across = picture.row_edges.diff().double(), picture.column_edges.diff().double()
    mass = (picture.mean.double() * down[:, None] * across).sum(0)
    where = f"Layer {head_map.layer}, head {head_map.head}"
    total = float(mass.sum())
    if total <= 0:
        return f"{where}: no weight at all here"
    most = int(mass.argmax())
    start, stop = picture.column_edges[most : most + 2].tolist()
    name = f"keys {start:,}–{stop - 1:,}"
    if stop - start == 1:
        name = f"“{token_label(head_map.key_tokens(slice(start, stop), item=item)[0]).strip('“”')}”, key {start:,}"
    share, even = float(mass[most]) / total, float(across[most] / across.sum())
    if share > max(0.1, 5 * even):
        return f"{where}: {percent(share)} of the weight shown goes to {name}"
    return f"{where}: spread over keys, with {percent(share)} of the weight shown on {name}"


def _subtitle(head_map: Mapped, picture: Picture) -> str:
    sides = []
    for what, edges, n in (
        ("queries", picture.row_edges, head_map.n_queries),
        ("keys", picture.column_edges, head_map.n_keys),
    ):
        first, stop = edges[[0, -1]].tolist()
        sides.append(f"{n:,} {what}" if stop - first == n else f"{what} {first:,}–{stop - 1:,} of {n:,}")
    kind = "" if head_map.group == "self" else f"{head_map.group} attention · "
    masked = " · grey: masked" if (picture.visible == 0).any() else ""
    return f"{head_map.model} · {kind}{' × '.join(sides)}{masked}"


def _at(figure: Figure, left: float, top: float, wide: int, tall: int) -> Axes:
    """Axes aligned to pixels; sizes are in pixels, distances from the top left of the figure in inches."""
    across, up = (round(x * DPI) for x in figure.get_size_inches())
    x, y = round(left * DPI), round(top * DPI)
    return figure.add_axes((x / across, 1 - (y + tall) / up, wide / across, tall / up))
