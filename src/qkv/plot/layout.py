"""What all figures share: colours, places on the page, colour maps, marks, and saving."""

from __future__ import annotations

import functools
import io
import textwrap
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, LinearSegmentedColormap, LogNorm, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.image import AxesImage
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from qkv._files import write_atomically
from qkv.profiler.data import tables

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


INK, MUTED, HAIRLINE = "#1b2126", "#626b73", "#dfe3e4"
ACCENT, WARM = "#1f6f8b", "#b8501a"

# From small to large values, evenly darker, so that it also works in greyscale. The dark page has its own ramp.
RAMP = ("#f3f6f5", "#d9e7e6", "#a8ccd0", "#66a6b4", "#2f7793", "#174a6c", "#0b2545")
RAMP_DARK = ("#1f262c", "#203d4c", "#236079", "#3a8a9a", "#6fb5b5", "#b0dccf", "#effbee")

# Destinations of weight: label, and colour on white and on the dark page. Warm: tokens that receive it regardless of
# content. Cool: by position. Grey: the rest.
DESTINATIONS = {
    "first": ("first token", "#b8501a", "#d9723b"),
    "special": ("other special tokens", "#e3a25b", "#f0c48c"),
    "sink_logit": ("learned sink", "#7c4a86", "#b98cc3"),
    "self": ("self", "#12415f", "#d3eef0"),
    "previous": ("previous", "#26748f", "#77c0cd"),
    "next": ("next", "#78b9c6", "#3f90a5"),
    "nearby": ("nearby", "#bfdcd6", "#2c5d69"),
    "elsewhere": ("elsewhere", "#c8ccd0", "#464e56"),
}

# Types of heads, on white and on the dark page. Warm: sinks, regardless of content. Blue: by position. Green: by
# content. Grey: no single role. Distinguishable with every kind of colour blindness, on both (ΔE ≥ 13 between any two).
_KINDS = {
    "induction": ("#4b7450", "#45bd80"),
    "duplicate token": ("#76b562", "#a6ee9c"),
    "previous token": ("#26748f", "#3f90a5"),
    "self": ("#12415f", "#d3eef0"),
    "first token": ("#b8501a", "#d9723b"),
    "other sink": ("#dd8e29", "#f0c061"),
    "delimiter": ("#f7d99d", "#8a5433"),
    "local": ("#74b8d9", "#215a72"),
    "uniform": ("#9aa2a8", "#8b7d80"),
    "mixed": ("#e4e7e8", "#2c3339"),
}
KINDS, KINDS_DARK = ({kind: colours[page] for kind, colours in _KINDS.items()} for page in (0, 1))


COLOURS: Colormap = LinearSegmentedColormap.from_list("qkv", RAMP)
DIVERGING: Colormap = LinearSegmentedColormap.from_list(
    "qkv-diverging", ("#0f4560", "#2f7f9b", "#9cc7d2", "#f6f6f4", "#ecb98f", "#c8682a", "#7f3208")
)
MASKED = "#e9ebeb"  # colour of pairs, or bins of pairs, that are masked
MIN_CELL = 0.2399  # inches; smaller cells have no room for a readable number


def hundredths(value: float) -> str:
    return f"{100 * value:.3g}"


def in_percent(value: float) -> str:
    return f"{hundredths(value)} %"


PERCENT = FuncFormatter(lambda value, _: in_percent(value))


class Drawing(Figure):
    """A white figure whose vector files store text as text, so that it can be searched and copied.

    >>> import io
    >>> drawing, file = Drawing(figsize=(3, 2)), io.StringIO()
    >>> _ = drawing.text(0.5, 0.5, "entropy")
    >>> drawing.savefig(file, format="svg")
    >>> ">entropy</text>" in file.getvalue()
    True
    """

    def __init__(self, *, figsize: tuple[float, float]) -> None:
        super().__init__(figsize=figsize, facecolor="white")
        self.set_layout_engine("none")  # all axes are placed in inches, independent of user settings

    def _repr_png_(self) -> bytes:
        """The PNG shown in notebooks, since pyplot does not manage this figure."""
        return png_of(self)

    def savefig(self, *args: Any, **options: Any) -> None:
        """As `Figure.savefig`; matplotlib's global font settings are changed only while the file is written."""
        with mpl.rc_context({"svg.fonttype": "none", "pdf.fonttype": 42}):
            super().savefig(*args, **options)


def titled(width: float, height: float, title: str, subtitle: str = "") -> Drawing:
    """A new figure with a bold title and below it a subtitle, both wrapped; one inch has room for three lines."""
    figure = Drawing(figsize=(width, height))
    place: dict[str, Any] = {"x": 0.3 / width, "va": "top"}
    lines = _lines(title, width)
    figure.text(y=1 - 0.2 / height, s="\n".join(lines), fontsize=11.5, color=INK, weight="bold", **place)
    below = 0.25 + 0.2 * len(lines)
    wrapped = textwrap.fill(subtitle.replace("$", r"\$"), int(width * 13.3))
    figure.text(y=1 - below / height, s=wrapped, fontsize=8.5, color=MUTED, **place)
    return figure


def title_inches(title: str, width: float) -> float:
    """The height of the title of a figure of this width in inches: 0 without one."""
    return 0.2 + 0.2 * len(_lines(title, width)) if title else 0.0


def _lines(title: str, width: float) -> list[str]:
    return textwrap.wrap(title.replace("$", r"\$"), int(width * 9.3))


class Panel(Axes):
    """Axes that a notebook shows as the picture of their figure, if the figure is a `Drawing`."""

    def _repr_png_(self) -> bytes | None:
        figure = self.get_figure(root=True)
        return figure._repr_png_() if isinstance(figure, Drawing) else None


def place(figure: Figure, left: float, top: float, width: float, height: float, title: str = "") -> Axes:
    """Axes by their distance from the figure's left and top edges, in inches, and the title above them."""
    wide, tall = figure.get_size_inches()
    axes = figure.add_axes((left / wide, 1 - (top + height) / tall, width / wide, height / tall), axes_class=Panel)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(fontsize=8, color=MUTED)
    panel_title(axes, title)
    return axes


def chart(figure: Figure, left: float, top: float, width: float, height: float, title: str = "") -> Axes:
    """Axes of curves, bars or points, at a place as of `place`: without a frame, with grey ticks."""
    axes = place(figure, left, top, width, height, title)
    plain(axes)
    return axes


def charts(
    title: str, subtitle: str, wides: Sequence[float], tall: float, labels: Sequence[str] = (), *, right: float = 0.45
) -> tuple[Drawing, list[Axes]]:
    """A new figure of charts side by side, of these widths in inches, with a label above each and room on the right."""
    left, gap = 0.75, 0.9
    width = max(left + sum(wides) + gap * (len(wides) - 1) + right, 6.4)
    top = 0.75 + title_inches(title, width)
    figure = titled(width, top + tall + 0.55, title, subtitle)
    lefts = [left + sum(wides[:at]) + gap * at for at in range(len(wides))]
    labels = labels or [""] * len(wides)
    return figure, [chart(figure, x, top, wide, tall, text) for x, wide, text in zip(lefts, wides, labels, strict=True)]


def panel_title(axes: Axes, title: str) -> None:
    """The title of one panel of a figure; without one, axes of the user keep theirs."""
    if title:
        axes.set_title(title, loc="left", fontsize=9, color=INK, pad=6)


def plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(HAIRLINE)
    axes.tick_params(which="both", colors=MUTED, labelsize=7.5, length=2.5, color=HAIRLINE)
    axes.set_axisbelow(True)


def legend(axes: Axes, **options: Any) -> None:
    """A legend without a frame, in small grey type; `options` are those of `Axes.legend`."""
    axes.legend(**{"frameon": False, "fontsize": 7.5, "labelcolor": MUTED} | options)


def reference_line(axes: Axes, y: float, text: str) -> None:
    """A dashed horizontal line with a label in the right margin."""
    axes.axhline(y, color=MUTED, lw=0.7, ls=(0, (4, 3)))
    note(axes, y, text)


def note(axes: Axes, y: float, text: str) -> None:
    """Label a height in the right margin."""
    axes.annotate(
        text, (1, y), xycoords=axes.get_yaxis_transform(), xytext=(4, 0), textcoords="offset points",
        fontsize=7, color=MUTED, va="center", linespacing=1.1, annotation_clip=False,
    )  # fmt: skip


def colour_bar(
    image: Any, number: Callable[[float], str] | None = None, *, label: str = "", beside: float = 0.1,
    height: float | None = None, **options: Any,
) -> Axes:  # fmt: skip
    """The colour bar of an image, `beside` inches on the right of its axes, and as high by default.

    `number` formats its numbers: four or one an inch, unless the scale is logarithmic. `label` names the quantity;
    `options` are those of `Figure.colorbar`. Returns the axes of the bar.
    """
    figure, box = image.axes.figure, image.axes.get_position(original=True)
    wide, tall = figure.get_size_inches()
    bar = place(figure, box.x1 * wide + beside, (1 - box.y1) * tall, 0.09, height or box.height * tall)
    drawn = figure.colorbar(image, cax=bar, **options)
    drawn.outline.set_visible(False)
    if not isinstance(image.norm, LogNorm):
        inches = bar.bbox.height / bar.figure.dpi
        drawn.locator = MaxNLocator(max(1, min(4, int(5 * inches)), round(inches)))
        drawn.update_ticks()
    if number is not None:
        bar.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
        bar.yaxis.set_minor_formatter(NullFormatter())
    bar.tick_params(which="both", length=0, labelsize=6.5, colors=MUTED, pad=2)
    bar.set_ylabel(label, fontsize=7.5, labelpad=4)
    return bar


def heat(
    axes: Axes,
    values: np.ndarray,
    norm: Normalize,
    colours: Colormap | None = None,
    extent: tuple[float, float, float, float] | None = None,
    missing: str = MASKED,
) -> AxesImage:
    """A matrix as colours, one cell for each number; NaN and masked values have the colour `missing`.

    Without `colours`, numbers of both signs are blue and orange. All maps of weights, of heads and of words are drawn
    here.
    """
    colours = colours or (DIVERGING if (norm.vmin or 0) < 0 else COLOURS)
    colours = colours.with_extremes(bad=missing, under=colours(0.0))
    image = axes.imshow(values, cmap=colours, norm=norm, extent=extent, aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    axes.spines[:].set(visible=True, color=HAIRLINE)
    return image


def token_strip(
    axes: Axes, values: np.ndarray, norm: LogNorm, *, under: str | None = None, extend: float = 0.0
) -> None:
    """Rows of values along a text, (rows, tokens) averaged over bins of a long text, and their colour bar in percent.

    Values below the logarithmic scale have the colour `under`, by default the first one; the share `extend` of the
    colour bar shows it. Tokens are labelled by `along`.
    """
    binned, edges = bins(values, 1200)
    below = under or COLOURS(0.0)
    colours = COLOURS.with_extremes(under=below, bad=below)  # a logarithmic scale counts 0 as bad
    rows = np.arange(len(values) + 1) - 0.5
    image = axes.pcolormesh(edges - 0.5, rows, binned, cmap=colours, norm=norm, rasterized=True, linewidth=0)
    axes.tick_params(length=0, labelsize=7.5, colors=MUTED)
    colour_bar(image, in_percent, extend="min" if extend else "neither", extendfrac=extend or None)


def number_ticks(axis: Axis, ids: Any, most: int = 16) -> None:
    """At most `most` ticks at the ids of layers, heads or depths, which stand at 0, 1, 2 …"""
    step = max(1, -(-len(ids) // most))
    axis.set_ticks(np.arange(0, len(ids), step), [str(x) for x in ids[::step]])


def write_cells(axes: Axes, image: AxesImage, written: Callable[[float], str], *, least: float = -np.inf) -> None:
    """Print the values of a map in its cells, if the cells are large enough; NaN and values below `least` are blank."""
    values: np.ndarray = np.ma.filled(np.ma.asarray(image.get_array(), dtype=float), np.nan)
    rows, columns = values.shape
    cell = min(axes.bbox.width / columns, axes.bbox.height / rows) / axes.figure.dpi  # inches
    if cell < MIN_CELL:
        return
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value) and value >= least:
            axes.text(
                column, row, written(value), ha="center", va="center", fontsize=6.2 if cell < 0.4 else 8,
                color=ink_on(image.to_rgba(np.array([value]))[0]),
            )  # fmt: skip


class HeadMap(NamedTuple):
    """What a map of all heads shows: a column of a table with the columns "layer" and "head"."""

    table: pd.DataFrame
    column: str
    title: str
    norm: Normalize
    percent: bool = False
    """Whether the numbers are shares, printed in percent."""
    colours: Colormap | None = None
    """By default those of `heat`."""


def head_map(axes: Axes, shown: HeadMap, *, bar: bool = True, label: str = "") -> None:
    """A map of all heads in axes of their final size, with a row for each layer, and its colour bar with a label.

    NaN leaves a cell blank, and a row of nothing else grey: a layer without a map. Numbers are printed in cells that
    are large enough, if the map has no colours of its own.
    """
    grid = shown.table.pivot(index="layer", columns="head", values=shown.column).astype(float)
    image = heat(axes, grid.to_numpy(), shown.norm, shown.colours, missing="white")
    axes.spines[:].set_visible(False)
    empty = grid.isna().all(axis=1).to_numpy()
    for row in np.flatnonzero(empty) if not empty.all() else ():
        axes.axhspan(row - 0.5, row + 0.5, color=MASKED, lw=0, zorder=1.2)
    rows, columns = grid.shape
    sides = np.array([axes.bbox.width / columns, axes.bbox.height / rows]) / axes.figure.dpi  # of a cell, in inches
    number_ticks(axes.xaxis, grid.columns, most=int(columns * sides[0] / 0.2))
    number_ticks(axes.yaxis, grid.index, most=int(rows * sides[1] / 0.2))
    across, down = np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5  # minor ticks would take far longer to draw
    lines = [[(x, -0.5), (x, rows - 0.5)] for x in across] + [[(-0.5, y), (columns - 0.5, y)] for y in down]
    grid_lines = LineCollection(
        lines, colors="white", linewidths=min(1.0, 3 * sides.min()), capstyle="projecting", zorder=1.5
    )
    axes.add_collection(grid_lines, autolim=False)
    axes.tick_params(length=0, labelsize=7, labelcolor=MUTED, pad=3)
    axes.set_xlabel("head", fontsize=8, color=MUTED)
    axes.set_ylabel("layer", fontsize=8, color=MUTED)
    panel_title(axes, shown.title)
    signed, scale = (shown.norm.vmin or 0) < 0, 100 if shown.percent else 1

    def number(value: float) -> str:
        return "0" if abs(value) < 1e-9 else f"{scale * value:{'+' if signed else ''}.3g}".replace("-", "−")

    if shown.colours is None and (not signed or sides.min() >= 0.3):  # signs need more room
        rounded = (lambda value: f"{round(100 * value)}".replace("-", "−")) if shown.percent else cell_number
        write_cells(axes, image, rounded)
    if bar:
        colour_bar(image, number, label=label)


def map_sides(shape: tuple[int, ...], cell: float) -> tuple[float, float]:
    """Width and height in inches of a map of all heads, (layers, heads), with room for a title and a colour bar."""
    return max(cell * shape[1], 1.2), max(cell * shape[0], 0.8)


def head_maps(
    title: str, subtitle: str, maps: Sequence[HeadMap], *, below: float = 0.0
) -> tuple[Drawing, list[Axes], float]:
    """A new figure of maps of all heads, at most four in a row. Maps of one `Normalize` share a colour bar.

    Returns the figure, the maps, and the place in inches of what is drawn below them, which is `below` high.
    """
    layers, heads = (max([1, *(shown.table[side].nunique() for shown in maps)]) for side in ("layer", "head"))
    across = max(1, len(maps) if len(maps) < 4 else -(-len(maps) // -(-len(maps) // 4)))
    down = -(-len(maps) // across)
    cell = min(0.5 if across == 1 else 0.32, 9 / across / heads, (9 if across == 1 else 4.6) / layers)
    wide, tall = map_sides((layers, heads), cell)
    shared = len({id(shown.norm) for shown in maps}) == 1
    left, gap_x, gap_y = 0.65, 0.45 if shared else 0.9, 0.75
    width = max(left + across * (wide + gap_x) + (0.6 if shared else 0.1), 8.4)
    top = 0.75 + title_inches(title, width) + 0.15 * max([0, *(shown.title.count("\n") for shown in maps)])
    figure = titled(width, top + down * (tall + gap_y) + below, title, subtitle)
    drawn = []
    for at, shown in enumerate(maps):
        row, column = divmod(at, across)
        x, y = left + column * (wide + gap_x), top + row * (tall + gap_y)
        axes = place(figure, x, y, wide, tall)
        head_map(axes, shown, bar=not shared or at + 1 == min(across, len(maps)))
        axes.set(xlabel="head" if at + across >= len(maps) else "", ylabel="" if column else "layer")
        drawn.append(axes)
    return figure, drawn, top + down * (tall + gap_y)


def cell_number(value: float) -> str:
    """A number in a cell: ".25", "1", "−2.50", "12"."""
    if value in (1, -1) or abs(value) < 0.005:
        return f"{round(value)}".replace("-", "−")
    text = f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
    return (text.replace("0.", ".", 1) if abs(value) < 1 else text).replace("-", "−")


def ink_on(colour: Any) -> str:
    """The colour of text that is easier to read on a colour, by its relative luminance: white or `INK`."""
    red, green, blue = to_rgb(colour)
    return "white" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.52 else INK


def along(axes: Axes, tokens: np.ndarray, what: str, *, labels: bool = True) -> None:
    """The tokens of a text below axes with a column for each, or below the lowest of several (`labels`)."""
    axes.set_xlim(-0.5, len(tokens) - 0.5)
    label_side(axes, "x", tokens, len(tokens), what)
    if not labels:
        axes.tick_params(labelbottom=False)
        axes.set_xlabel("")


Names = Sequence[str] | np.ndarray | None
CHARACTER = 0.078  # inches of a character of a label, at 8 points
READABLE = 4.6  # points: labels of tokens are at least as large, else positions are printed


def label_side(ax: Axes, side: str, names: Names, n: int, what: str, *, first: int = 0) -> None:
    """Ticks of one side of a map: tokens if they are readable, else positions, which begin at `first`."""
    axis = ax.xaxis if side == "x" else ax.yaxis
    inches = (ax.bbox.width if side == "x" else ax.bbox.height) / ax.get_figure(root=True).dpi  # type: ignore[union-attr]
    points = _points(inches / n)
    if names is not None and points >= READABLE:
        texts = [token_label(name) for name in names]
        turned = side == "x" and is_turned(max(map(len, texts)) * CHARACTER * points / 8, inches / n)
        axis.set_ticks(range(first, first + n), texts)
        axis.set_tick_params(labelsize=points, labelrotation=90 if turned else 0, length=0, labelcolor=INK)
        axis.set_label_text(what, fontsize=8, color=MUTED)
        return
    axis.set_major_locator(MaxNLocator(max(1, min(8, int(inches / 0.3))), integer=True))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(value):,}" if value == round(value) else ""))
    axis.set_tick_params(length=2.5, color=HAIRLINE, labelsize=7, labelcolor=MUTED)
    axis.set_label_text(what if names is None else f"{what} position", fontsize=8, color=MUTED)


def are_readable(cell: float) -> bool:
    """Whether names of cells of this size, in inches, are large enough to be read."""
    return _points(cell) >= READABLE


def _points(cell: float) -> float:
    """The size of names of cells of this size, in inches."""
    return min(8.0, 0.85 * 72 * cell)


def is_turned(longest: float, cell: float) -> bool:
    """Whether names are turned by 90 degrees: the longest, in inches, does not fit into a cell."""
    return longest > 0.95 * cell


def label_inches(names: Names, cell: float, *, across: bool) -> float:
    """The room in inches that `label_side` needs for the names of cells of this size, below axes or on their left."""
    points = _points(cell)
    if names is None or points < READABLE:
        return 0.2
    longest = CHARACTER * points / 8 * max(len(token_label(name)) for name in names)
    return 0.2 if across and not is_turned(longest, cell) else 0.1 + longest


def room_below(names: np.ndarray, width: float) -> float:
    """The room in inches that `along` needs below axes of this width."""
    return 0.35 + label_inches(names, width / len(names), across=True)


def token_label(token: str) -> str:
    """A token as a label: short, with whitespace made visible, and without matplotlib's math markup."""
    plain = drawable(tables.readable(str(token)))
    plain = plain if len(plain) <= 14 else plain[:13] + "…"
    return (plain if any(map(str.isalnum, plain)) else f"“{plain}”").replace("$", r"\$")


def bins(values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Means over at most `most` equal bins of the last axis, and the bins' edges.

    Bin b starts at ⌊b·n/bins⌋. NaN is ignored, unless a bin is all NaN.
    """
    length = values.shape[-1]
    count = min(length, most)
    edges = np.arange(count + 1) * length // count
    if count == length:
        return values, edges
    finite = np.isfinite(values)
    total = np.add.reduceat(np.where(finite, values, 0).astype(np.float64), edges[:-1], axis=-1)
    number = np.add.reduceat(finite, edges[:-1], axis=-1, dtype=np.int64)
    return np.divide(total, number, out=np.full(total.shape, np.nan), where=number > 0), edges


def name_peaks(axes: Axes, values: np.ndarray, tokens: np.ndarray, most: int) -> None:
    """Print the tokens of the largest values that do not overlap."""
    chosen: list[int] = []
    for position in np.argsort(values, kind="stable")[::-1][:200]:
        if len(chosen) < most and all(abs(position - other) > 0.065 * len(values) for other in chosen):
            chosen.append(int(position))
            axes.annotate(
                token_label(tokens[position]), (position, values[position]), xytext=(0, 3),
                textcoords="offset points", ha="left" if position < 0.03 * len(values) else "center",
                va="bottom", fontsize=7.5, color=WARM,
            )  # fmt: skip


def text_figure(
    title: str, subtitle: str, tokens: np.ndarray, share: np.ndarray, rows: np.ndarray, norm: LogNorm, what: str
) -> tuple[Figure, Axes, Axes]:
    """Shares along a text as a curve, and below it a strip of rows along the text; returns the figure and both axes."""
    left, wide, tall = 1.02, 7.98, max(0.9, 0.16 * len(rows))
    figure = titled(9.8, 3.27 + tall + room_below(tokens, wide), title, subtitle)
    curve, strip = chart(figure, left, 0.95, wide, 2.2), place(figure, left, 3.27, wide, tall)
    share_curve(curve, share, tokens, 9)
    token_strip(strip, rows, norm)
    strip.spines[:].set_visible(False)
    along(curve, tokens, what, labels=False)
    along(strip, tokens, what)
    return figure, curve, strip


def share_curve(axes: Axes, share: np.ndarray, tokens: np.ndarray, named: int) -> None:
    """Shares along a text on a logarithmic scale, with the largest named; shares of 0 are left blank.

    A sink receives a thousand times more than other keys.
    """
    positive = share[share > 0] if (share > 0).any() else np.ones(1)
    top = float(positive.max())
    low = min(max(float(np.quantile(positive, 0.02)), top * 1e-6), top / 4)
    edges, shown = np.arange(len(share) + 1) - 0.5, np.where(share > 0, np.maximum(share, low), np.nan)
    axes.set_yscale("log")
    axes.stairs(shown, edges, baseline=low / 2, fill=True, color="#cfe1e4", lw=0)
    axes.stairs(shown, edges, baseline=None, color=ACCENT, lw=0.9 if len(share) < 500 else 0.5)
    axes.set_ylim(low / 1.3, top * (top / low) ** 0.25 * 1.2)
    steps = (1, 2, 5) if top < 100 * low else (1,)  # in a narrow range, powers of ten would give too few ticks
    axes.yaxis.set_major_locator(FixedLocator([m * 10.0**p for p in range(-9, 1) for m in steps if m * 10.0**p <= 1]))
    axes.yaxis.set_major_formatter(PERCENT)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    name_peaks(axes, share, tokens, named)


DPI = 160


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, atomically."""
    write_atomically(path, png_of(figure))


def png_of(figure: Figure) -> bytes:
    """A figure as the content of a PNG file."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    return drawn.getvalue()


IGNORED = ("Cf", "Mn", "Cc")  # joiners, marks and control characters: they are dropped, since they stand for nothing


def drawable(text: str) -> str:
    """The text as matplotlib can draw it: a character that no font of the figure has is named by its code point.

    >>> drawable("café"), drawable("\\U000e0fff")
    ('café', '[U+E0FFF]')
    """
    known = _characters(tuple(FontProperties().get_family()))
    if all(ord(x) in known for x in text):
        return text
    made = []
    for x in text:
        if ord(x) in known:
            made.append(x)
        elif unicodedata.category(x) not in IGNORED:
            made.append(f"[U+{ord(x):04X}]")
    return "".join(made)


@functools.lru_cache(maxsize=8)
def _characters(families: tuple[str, ...]) -> frozenset[int]:
    """The code points that the fonts of these families have; matplotlib falls back from one to the next."""
    files = set()
    for family in families:
        with_default = family in font_manager.font_family_aliases
        try:
            files.add(findfont(FontProperties(family=[family]), fallback_to_default=with_default))
        except ValueError:  # matplotlib skips a family that is not installed, too
            continue
    files = files or {findfont(FontProperties())}
    return frozenset(code for file in files for code in get_font(file).get_charmap())
