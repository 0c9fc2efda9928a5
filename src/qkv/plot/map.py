"""One head: its map, query by key; the alignment of words; weights over an image."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from qkv.errors import InputError
from qkv.plot.layout import (
    DPI,
    HAIRLINE,
    INK,
    MUTED,
    WARM,
    colour_bar,
    heat,
    hundredths,
    in_percent,
    label_inches,
    label_side,
    place,
    titled,
    token_label,
    write_cells,
)
from qkv.profiler.data.frames import percent
from qkv.statistics.maps import Picture

if TYPE_CHECKING:
    import xarray as xr

    from qkv.profiler.explore.explorer import AttentionMap


POOLS = ("max", "mean", "both")
LABELLED = 64  # up to this many tokens on a side are printed
SIDE, MIN_SIDE = 1024, 200  # pixels: the longer side of a panel, and the smallest size of a side
RANGE = 30.0  # the colour scale is logarithmic if weights differ by more than this factor
FAINTEST = 1e-4  # relative to the largest weight; smaller weights have the colour of 0


def map_figure(head_map: AttentionMap | StoredMap, picture: Picture, *, pool: str = "both") -> Figure:
    """The attention map of one head, from its `picture`: queries down, keys across, from the top left.

    Each bin is a whole number of pixels when saved by `qkv.plot.layout.save_figure`, so that a sink one bin wide
    remains visible. Bins without a visible pair are grey. The colour scale is logarithmic if weights differ by more
    than a factor of thirty, which the colour bar states. Up to 64 tokens on a side are printed. `pool` is "max", "mean"
    or "both" side by side; if every bin is a single pair, both are equal and drawn as one panel.

    >>> from qkv.profiler import attention_map
    >>> head_map = attention_map("qkv-mini", "def mean(values):", layer=1, head=2)
    >>> len(map_figure(head_map, head_map.picture()).axes)
    2
    """
    if pool not in POOLS:
        raise InputError(f"pool is {pool!r}, expected one of {', '.join(POOLS)}")
    down, across = picture.row_edges.tolist(), picture.column_edges.tolist()
    sizes = [max(np.diff(edges)) for edges in (down, across)]
    bins = f"bins of {sizes[0]:,} × {sizes[1]:,} tokens at most"
    panels = {  # title, what a number is, and the numbers
        "max": (f"Largest weight in {bins}", "largest", picture.maximum),
        "mean": (f"Average weight in {bins}, masked pairs as 0", "average", picture.mean),
    }
    shown = [*panels.values()] if pool == "both" else [panels[pool]]
    if max(sizes) == 1:
        shown = [("Weight of each query on each key", "weight", picture.mean)]
    rows, columns = (
        names(slice(edges[0], edges[-1])) if edges[-1] - edges[0] <= LABELLED else None
        for names, edges in ((head_map.query_tokens, down), (head_map.key_tokens, across))
    )
    h, w = picture.mean.shape
    whole = max(1, SIDE // max(h, w))
    tall, wide = (n * max(whole, -(-MIN_SIDE // n)) for n in (h, w))
    left, top, right, below = 0.95, 1.25, 0.75, 0.95 if columns else 0.6
    aside, under = left + wide / DPI + right, 0.45 + tall / DPI + below  # from one panel to the next
    stacked = wide > 2 * tall
    width, height = (1, len(shown)) if stacked else (len(shown), 1)
    inches = [round(x * DPI) / DPI for x in (max(width * aside, 6.4), top - 0.45 + height * under)]
    figure = titled(inches[0], inches[1], sentence(head_map, picture), _subtitle(head_map, picture))
    for n, (title, what, weights) in enumerate(shown):
        x, y = (left, top + n * under) if stacked else (left + n * aside, top)
        axes = place(figure, x, y, wide / DPI, tall / DPI, title)  # whole pixels
        values = np.ma.masked_where(picture.visible.cpu().numpy() == 0, weights.double().cpu().numpy())
        norm = _norm(values)
        image = heat(axes, values, norm, extent=(across[0] - 0.5, across[-1] - 0.5, down[-1] - 0.5, down[0] - 0.5))
        _weight_bar(image, norm, what)
        for side, names, edges, of in (("y", rows, down, "query"), ("x", columns, across, "key")):
            label_side(axes, side, names, edges[-1] - edges[0], of if names else f"{of} position", first=edges[0])
    return figure


def _norm(values: np.ma.MaskedArray) -> Normalize:
    """The scale of the colours, logarithmic if weights differ much."""
    shown = values.compressed()
    shown = shown[shown > 0]
    top = float(shown.max()) if len(shown) else 1.0
    low = max(float(np.quantile(shown, 0.05)), FAINTEST * top) if len(shown) else 1.0
    return LogNorm(low, top) if top > RANGE * low else Normalize(0, top)


def _weight_bar(image: AxesImage, norm: Normalize, what: str) -> None:
    """A colour bar in percent. A logarithmic one has powers of ten, and the largest weight if it overlaps none."""
    logarithmic = isinstance(norm, LogNorm)
    bar = colour_bar(image, in_percent, extend="min" if logarithmic else "neither", extendfrac=0.03)
    if logarithmic:
        low, top = float(norm.vmin or 0), float(norm.vmax or 1)
        tens = [10.0**n for n in range(math.ceil(math.log10(low)), math.floor(math.log10(top)) + 1)]
        bar.set_yticks([*(x for x in tens if x < 0.75 * top), top])
        bar.set_yticks([], minor=True)
    scale = f"{what},\nlog scale" if logarithmic else what
    bar.set_title(scale, fontsize=7.5, color=MUTED, loc="left", pad=7, linespacing=1.1)


def sentence(head_map: AttentionMap | StoredMap, picture: Picture) -> str:
    """The title: the key or bin that receives most of the weight shown."""
    down, across = picture.row_edges.diff().double(), picture.column_edges.diff().double()
    pairs = picture.mean.double() * down[:, None] * across
    mass = pairs.sum(0)
    where = f"Layer {head_map.layer}, head {head_map.head}"
    total = float(mass.sum())
    if total <= 0:
        return f"{where}: no weight at all here"
    most = int(mass.argmax())
    start, stop = picture.column_edges[most : most + 2].tolist()
    name = f"keys {start:,}–{stop - 1:,}"
    if stop - start == 1:
        name = f"“{token_label(head_map.key_tokens(slice(start, stop))[0]).strip('“”')}”, key {start:,}"
    share, even = float(mass[most]) / total, float(across[most] / across.sum())
    if share > max(0.1, min(0.5, 5 * even)):
        return f"{where}: {percent(share)} of the weight shown goes to {name}"
    own = float(pairs.max(1).values.sum()) / total
    if own > 0.5 and len(across) > 1:  # such as the previous token, or the mirrored one
        each = "its own key" if across.max() == 1 else "its own bin of keys"
        return f"{where}: each query looks at {each}, with {percent(own)} of its weight on average"
    return f"{where}: spread over keys, with {percent(share)} of the weight shown on {name}"


def _subtitle(head_map: AttentionMap | StoredMap, picture: Picture) -> str:
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


class Stored(NamedTuple):
    """What a profile holds of the maps of one text: all weights, or the pooled maps of a long text."""

    largest: np.ndarray
    """The largest weight of each bin, (layer, head, rows, columns)."""
    average: np.ndarray
    visible: np.ndarray
    """Whether the bin has a visible pair, as far as causality tells: (rows, columns)."""
    bins: tuple[int, int]
    """The numbers of queries and keys in a bin: (1, 1) if these are all weights."""

    @classmethod
    def of(cls, data: xr.Dataset) -> Stored | None:
        """From a data set of one text; None if it holds no maps of it."""
        n_queries, n_keys = int(data["n_queries"][0]), int(data["n_keys"][0])
        names, bins = ("weights", "weights"), (1, 1)
        if "weights" not in data or np.isnan(data["weights"].values[0, :, :, :n_queries, :n_keys]).all():
            if "map_max" not in data or 0 in (bins := (int(data["bin_queries"][0]), int(data["bin_keys"][0]))):
                return None
            names = ("map_max", "map_mean")
        rows, columns = -(-n_queries // bins[0]), -(-n_keys // bins[1])
        maps = [data[name].values[0, :, :, :rows, :columns] for name in names]
        visible = np.ones((rows, columns), bool)
        if data.attrs["causal"]:  # a bin is masked if its first key comes after its last query
            last = np.minimum(np.arange(1, rows + 1) * bins[0], n_queries) - 1 + n_keys - n_queries
            visible = np.arange(columns) * bins[1] <= last[:, None]
        return cls(maps[0], maps[1], visible, bins)


class StoredMap:
    """One head of a data set of one text; `at` holds the indices of its layer and head."""

    def __init__(self, model: str, group: str, data: xr.Dataset, at: tuple[int, int]) -> None:
        self.model, self.group, self.data, self.at = model, group, data, at
        self.layer, self.head = int(data["layer"][at[0]]), int(data["head"][at[1]])
        self.n_queries, self.n_keys = int(data["n_queries"][0]), int(data["n_keys"][0])

    def query_tokens(self, rows: slice = slice(None)) -> list[str]:
        """The tokens of the queries."""
        return [str(name) for name in self.data["query_token"].values[0, : self.n_queries][rows]]

    def key_tokens(self, columns: slice = slice(None)) -> list[str]:
        """The tokens of the keys."""
        return [str(name) for name in self.data["key_token"].values[0, : self.n_keys][columns]]

    def picture(self) -> Picture | None:
        """Its weights, or its pooled map; None if the profile stores neither."""
        stored = Stored.of(self.data)
        if stored is None or not np.isfinite(stored.largest[self.at]).all():
            return None
        sides = zip((self.n_queries, self.n_keys), stored.bins, strict=True)
        edges = (np.array([*range(0, n, size), n]) for n, size in sides)
        parts = (stored.largest[self.at], stored.average[self.at], stored.visible.astype(float), *edges)
        return Picture(*(torch.from_numpy(np.array(x)) for x in parts))


ALL_TOKENS = "all tokens"  # the name of the mean over all rows, which may add up to more than 1
MOST_OVERLAYS, ACROSS = 35, 6  # pictures in one figure, and in a row
SHADE = LinearSegmentedColormap.from_list("shade", ((0, 0, 0, 0), (0, 0, 0, 0.78)))  # from the largest weight to none


def overlay_figure(
    subtitle: str, of: str, image: np.ndarray, weights: np.ndarray, grid: tuple[int, int], names: Sequence[str],
    *, corners: bool = False,
) -> Figure:  # fmt: skip
    """The image, followed by a picture for each query; the arguments are those of `qkv.plot.overlay`.

    The brightness of a picture is proportional to the weights (queries, keys), interpolated between the centres of
    cells; the cell with the largest weight is as bright as the image. Below each picture is the share of the weight on
    that cell. `of` names the head or heads of the weights; it is empty for a model with one head.
    """
    cells = grid[0] * grid[1]
    if min(grid) < 1 or cells > weights.shape[1]:
        raise InputError(f"grid is {grid[0]} × {grid[1]}, expected at most the {weights.shape[1]} keys of the weights")
    maps = weights[:, weights.shape[1] - cells :].reshape(-1, *grid)
    return maps_figure(subtitle, of, image, maps, names, corners=corners)


def maps_figure(
    subtitle: str, of: str, image: np.ndarray, maps: np.ndarray, names: Sequence[str], *, corners: bool = False,
    within: tuple[float, float, float, float] | None = None, sinks: np.ndarray | None = None,
) -> Figure:  # fmt: skip
    """The image, followed by a picture for each map (maps, down, across).

    Args:
        subtitle: the second line.
        of: the head or heads.
        image: (height, width, 3).
        maps: weights of cells.
        names: of the maps.
        corners: as in `qkv.plot.overlay`.
        within: top, left, height and width of the grid of cells, in pixels; the whole image if None.
        sinks: (down, across), True at cells that are sinks: they are framed, and do not set the scale.
    """
    if len(maps) > MOST_OVERLAYS:
        raise InputError(f"{len(maps)} queries are chosen, expected at most {MOST_OVERLAYS}")
    picture = checked(image)
    across = min(ACROSS, len(maps) + 1)
    down = -(-(len(maps) + 1) // across)
    wide = 1.45 if len(maps) > 2 else 2.6
    tall = wide * picture.shape[0] / picture.shape[1]
    left, top, gap_x, gap_y = 0.3, 1.25, 0.2, 0.55
    width = max(left + across * (wide + gap_x) + 0.1, 7.2)
    shown = maps if sinks is None or sinks.all() else np.where(sinks, 0, maps)
    sentence = _overlay_sentence(shown, names)
    if within is not None:
        most, apart = int(maps.sum((1, 2)).argmax()), "sinks apart " if sinks is not None and sinks.any() else ""
        on_image, peak = percent(float(maps[most].sum())), percent(float(shown[most].max()))
        name = token_label(names[most]).strip("“”")
        puts = "mean over all tokens" if names == [ALL_TOKENS] else f"“{name}” puts {on_image} on the image"
        sentence = f"{puts}, {apart}at most {peak} on a patch"
    sentence = f"{of}: {sentence}" if of else sentence
    figure = titled(width, top + down * (tall + gap_y), sentence, subtitle)
    panels = [place(figure, left + n % across * (wide + gap_x), top + n // across * (tall + gap_y), wide, tall)
              for n in range(len(maps) + 1)]  # fmt: skip
    show_image(panels[0], picture, "the image")
    for axes, one, name, whole in zip(panels[1:], shown, names, maps, strict=True):
        show_image(axes, picture, token_label(name), one, corners=corners, within=within, framed=sinks)
        peak = f"{percent(float(one.max()))} on one of {one.size:,} cells"
        if within is not None:
            peak = f"at most {percent(float(one.max()))} on a patch"
            peak = peak if names == [ALL_TOKENS] else f"{percent(float(whole.sum()))} on the image,\n{peak}"
        axes.set_xlabel(peak, fontsize=6.5, color=MUTED, labelpad=3, loc="left")
    return figure


def checked(image: np.ndarray) -> np.ndarray:
    """The image as numbers from 0 to 1; `InputError` for other shapes or ranges."""
    array = np.asarray(image)
    if array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        raise InputError(f"image has shape {array.shape}, expected (height, width, 3)")
    bytes_ = array.dtype == np.uint8
    numbers = array.astype(np.float64) / (255 if bytes_ else 1)
    if not (np.isfinite(numbers).all() and numbers.min() >= 0 and numbers.max() <= 1):
        span = f"{numbers.min():.3g} to {numbers.max():.3g}"
        raise InputError(f"image holds {span}, expected numbers from 0 to 1, or bytes")
    return numbers


def show_image(
    axes: Axes, picture: np.ndarray, name: str, weights: np.ndarray | None = None, *, corners: bool = False,
    within: tuple[float, float, float, float] | None = None, framed: np.ndarray | None = None,
) -> None:  # fmt: skip
    """An image without ticks, with its name above it, dark where the weights (gh, gw) of its cells are small.

    The cells cover the part `within` it: top, left, height and width in pixels. Cells that are `framed` have a frame.
    """
    axes.imshow(picture, aspect="auto", interpolation="nearest")
    if weights is not None:
        (height, width), (down, across) = picture.shape[:2], weights.shape
        top, left, whole, broad = within or (0, 0, height, width)
        tall, wide = whole / down, broad / across
        y, x = (-tall / 2, -wide / 2) if corners else (top - 0.5, left - 0.5)  # the upper left corner of the first cell
        shade = np.pad(1 - weights / (weights.max() or 1), 1, mode="edge")  # a border, into which colours are continued
        extent = (x - wide, x + broad + wide, y + whole + tall, y - tall)
        drawn = axes.imshow(
            shade, cmap=SHADE, vmin=0, vmax=1, extent=extent, aspect="auto", interpolation="bilinear",
            interpolation_stage="data",
        )  # fmt: skip
        if within is not None:  # what the model does not see is pale
            drawn.set_clip_path(Rectangle((x, y), broad, whole, transform=axes.transData))
            rows, columns = np.arange(height) + 0.5 - top, np.arange(width) + 0.5 - left
            seen = ((rows > 0) & (rows < whole))[:, None] & ((columns > 0) & (columns < broad))
            axes.imshow(np.dstack([np.ones((*seen.shape, 3)), np.where(seen, 0, 0.75)]), aspect="auto")
        axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
        for i, j in np.argwhere(framed) if framed is not None else ():
            axes.add_patch(Rectangle((x + j * wide, y + i * tall), wide, tall, fill=False, ec=WARM, lw=1.2))
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_color(HAIRLINE)
    axes.set_title(name, loc="left", fontsize=8.5, color=INK, pad=4)


def _overlay_sentence(maps: np.ndarray, names: Sequence[str]) -> str:
    peaks = maps.reshape(len(maps), -1).max(1)
    sharpest = int(peaks.argmax())
    name = token_label(names[sharpest]).strip("“”")
    return f"“{name}” is the sharpest, with {percent(float(peaks[sharpest]))} on one of {maps[0].size:,} cells"


MARKUP = re.compile(r"<[^<>\s]+>|\[[A-Z]+\]")  # special tokens that a tokenizer does not list
AFTER = "(next)"  # the unknown word that the last query of a text predicts
PRINTED = 0.01  # smaller weights are not printed in their cells


def alignment_figure(
    subtitle: str,
    of: str,
    weights: np.ndarray,
    queries: list[str],
    keys: list[str],
    special: frozenset[str] = frozenset(),
) -> Figure:
    """Target words down, source words across, for one text.

    The tokens of a word share one row and one column: the mean over the word's queries of the sum over the word's keys,
    which preserves row sums. Weights are printed in cells that are large enough. `of` names the head or heads of the
    weights (queries, keys), such as "Layer 1, head 2"; it is empty for a model with one head. Tokens in `special` are
    not part of words.
    """
    special = special | {AFTER} | {token for token in (*queries, *keys) if MARKUP.fullmatch(token)}
    rows, columns = words(queries, special), words(keys, special)
    shown = merged(weights, [len(row) for row in rows], [len(column) for column in columns])
    targets, sources = (["".join(word) for word in side] for side in (rows, columns))
    cell = min(0.46, 8.5 / len(sources), 8.5 / len(targets))
    wide, tall = max(cell * len(sources), 1.6), max(cell * len(targets), 1.0)
    # Names of keys are above the map, names of queries on its left.
    left, top = 0.45 + label_inches(targets, cell, across=False), 1.35 + label_inches(sources, cell, across=True)
    sentence = _alignment_sentence(shown, targets, sources, special)
    title = f"{of}: {sentence}" if of else sentence[0].upper() + sentence[1:]
    figure = titled(max(left + wide + 1.0, 6.4), top + tall + 0.35, title, subtitle)
    axes = place(figure, left, top, wide, tall)
    norm = Normalize(0, max(float(shown.max()), 0.1))
    image = heat(axes, shown, norm)
    label_side(axes, "y", targets, len(targets), "target: query")
    label_side(axes, "x", sources, len(sources), "source: key")
    axes.tick_params(top=False, bottom=False, labeltop=True, labelbottom=False)
    axes.xaxis.set_label_position("top")
    write_cells(axes, image, lambda weight: f"{100 * weight:.0f}", least=PRINTED)
    bar = colour_bar(image, hundredths)
    bar.set_title("weight, %", fontsize=7.5, color=MUTED, loc="left", pad=5)
    return figure


def words(tokens: list[str], special: frozenset[str] = frozenset()) -> list[list[str]]:
    """Group tokens into words by the marks of tokenizers: "##" inside words, or a space before words.

    Special tokens and punctuation are separate words. If the tokenizer has no marks, every token is a word.

    >>> words([" light", "house", " keeper", ".", "</s>"], frozenset(["</s>"]))
    [[' light', 'house'], [' keeper'], ['.'], ['</s>']]
    >>> words(["[CLS]", "gu", "##lls", "fly"])
    [['[CLS]'], ['gu', 'lls'], ['fly']]
    """
    spaced = any(token[:1] in " ▁Ġ" for token in tokens if token.strip() and token not in special)
    grouped: list[list[str]] = []
    before = ""
    for token in tokens:
        inside = token.startswith("##") or (spaced and token[:1] not in (" ", "▁", "Ġ", ""))
        ordinary = all(x not in special and any(map(str.isalnum, x)) for x in (token, before))
        if grouped and inside and ordinary:
            grouped[-1].append(token.removeprefix("##"))
        else:
            grouped.append([token])
        before = token
    return grouped


def merged(weights: np.ndarray, rows: list[int], columns: list[int]) -> np.ndarray:
    """Weights (queries, keys) of words: means over queries, sums over keys; `rows`, `columns` are tokens per word.

    >>> merged(np.array([[0.5, 0.25, 0.25], [0.0, 0.5, 0.5]]), [2], [1, 2]).tolist()
    [[0.25, 0.75]]
    """
    starts = [np.cumsum([0, *sizes[:-1]]) for sizes in (rows, columns)]
    summed = np.add.reduceat(np.add.reduceat(weights.astype(np.float64), starts[1], axis=1), starts[0], axis=0)
    result: np.ndarray = summed / np.array(rows)[:, None]
    return result


def _alignment_sentence(weights: np.ndarray, targets: list[str], sources: list[str], special: frozenset[str]) -> str:
    """The title: the mean of the largest weights, and the pair of words with the largest weight."""
    sharp = f"a target word puts {percent(float(weights.max(1).mean()))} of its weight on one source word"
    plain = [
        [i for i, word in enumerate(side) if word not in special and any(map(str.isalnum, word))]
        for side in (targets, sources)
    ]
    if not plain[0] or not plain[1]:
        return sharp
    among = weights[np.ix_(*plain)]
    row, column = np.unravel_index(among.argmax(), among.shape)
    pair = targets[plain[0][row]].strip(" ▁Ġ"), sources[plain[1][column]].strip(" ▁Ġ")
    return f"{sharp}; “{pair[0]}” attends to “{pair[1]}” with {percent(float(among.max()))}"
