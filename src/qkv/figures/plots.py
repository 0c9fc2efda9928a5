"""Matplotlib figures of a profile. Each function returns a `Figure`; pyplot and its global state stay out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from qkv.errors import InputError
from qkv.figures.alignment import AFTER, alignment_figure
from qkv.figures.findings import first_token, headline, shared_by
from qkv.figures.layout import (
    COLOURS,
    LABELLED_TOKENS,
    PERCENT,
    Drawing,
    along,
    bins,
    colour_bar,
    layer_by_head,
    name_peaks,
    note,
    place,
    plain,
    titled,
    token_label,
)
from qkv.figures.style import (
    ACCENT,
    DESTINATIONS,
    HAIRLINE,
    INK,
    MUTED,
    STATISTICS,
    WARM,
    Column,
    columns_of,
    percent,
    written,
)
from qkv.profiler.data import tables
from qkv.profiler.data.words import counted, layers_and_heads

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from qkv.profiler.profiles import Profile

MOST_OVERLAYS = 35  # pictures on one sheet
SMALL_MULTIPLES = ("sink", "previous", "self", "local", "distance", "entropy_ratio")


class Plots:
    """The figures of one profile, as `profile.plot`.

    Every method returns a `matplotlib.figure.Figure`: save it with `figure.savefig("heads.pdf")`. `group`
    names the kind of attention (the main one when None); `text` is the index of a text.

    Example:
        >>> figure = profile.plot.overview()                     # doctest: +SKIP
        >>> figure.savefig("overview.pdf")                       # doctest: +SKIP
        >>> profile.plot.head(3, 1).savefig("head.svg")          # doctest: +SKIP
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def overview(self, statistic: str | None = None, text: int | None = None, group: str | None = None) -> Figure:
        """Layer × head maps: of one statistic (a column of `Profile.heads`), or six small ones when None.

        Averages over the texts unless `text` picks one.
        """
        if statistic is not None:
            return self.heads(statistic, text, group)
        data = self._data(group, text)
        heads = tables.head_table(data)
        names = tuple(name for name in SMALL_MULTIPLES if heads[name].notna().any())
        return _overview(self._name(), data, heads, names)

    def heads(self, statistic: str, text: int | None = None, group: str | None = None) -> Figure:
        """A layer × head map of one statistic, such as one of your own; the mean over texts unless `text` picks one."""
        data = self._data(group, text)
        known = columns_of(data)
        if statistic not in known:
            raise InputError(f"statistic: got {statistic!r}; expected one of {', '.join(known)}")
        return _overview(self._name(), data, tables.head_table(data), (statistic,))

    def received(self, text: int = 0, group: str | None = None) -> Figure:
        """Attention received along one text: the mean over all heads, and each layer's."""
        return _received(self._name(), self._data(group, text))

    def entropy(self, text: int | None = None, group: str | None = None) -> Figure:
        """Entropy of every head by layer, against that of uniform attention."""
        data = self._data(group, text)
        heads = tables.head_table(data)
        median = heads.groupby("layer")["entropy"].median()
        sharpest = median.idxmin()
        seen = data["visible"].values
        uniform = float(np.log(seen[seen > 0]).mean())
        if median.max() - median.min() < 0.05:  # nats: no difference that a reader would call one
            title = f"Attention is equally sharp in every layer: {median[sharpest]:.1f} nats in the median head, "
        else:
            title = f"Attention is sharpest in layer {sharpest}: {median[sharpest]:.1f} nats in its median head, "
        title += shared_by(median[sharpest])
        figure, axes = _by_layer(self._name(), data, heads, "entropy", title)
        axes.axhline(uniform, color=MUTED, lw=0.8, ls=(0, (4, 3)))
        note(axes, uniform, "uniform\nattention")
        axes.set_ylim(0, uniform * 1.1 or 1)
        return figure

    def sink(self, text: int | None = None, group: str | None = None) -> Figure:
        """Weight on the first token of every head by layer, with the 30 % threshold of an attention sink."""
        data = self._data(group, text)
        heads = tables.head_table(data)
        count = int((heads["sink"] > tables.SINK_THRESHOLD).sum())
        whose = "puts more than 30 % of its weight" if count == 1 else "put more than 30 % of their weight"
        title = f"{count} of {counted(len(heads), 'head')} {whose} on {first_token(data)}"
        figure, axes = _by_layer(self._name(), data, heads, "sink", title)
        axes.axhline(tables.SINK_THRESHOLD, color=MUTED, lw=0.8, ls=(0, (4, 3)))
        note(axes, tables.SINK_THRESHOLD, "sink\nthreshold")
        axes.set_ylim(0, max(0.4, 1.06 * float(heads["sink"].max())))
        axes.yaxis.set_major_formatter(PERCENT)
        return figure

    def sinks(self, group: str | None = None) -> Figure:
        """Sink scores of every head on three kinds of text, the sink's value, and which tokens are sinks."""
        from qkv.figures.sinks import sinks_figure

        return sinks_figure(self._name(), self._profile.group(group))

    def types(self, group: str | None = None) -> Figure:
        """What kind of head each is, layer by head: `Profile.types` as a picture."""
        from qkv.figures.types import types_figure

        return types_figure(self._name(), self._profile.types(group))

    def head(self, layer: int, head: int, text: int = 0, group: str | None = None) -> Figure:
        """The card of one head: where its weight goes, and its curves along the text."""
        data = self._data(group, text)
        return _head(self._name(), data, *_position(data, layer, head))

    def map(self, layer: int, head: int, text: int = 0, group: str | None = None) -> Figure:
        """The map of one head, query by key: all its weights, or of a long text the largest and the mean in bins.

        Raises:
            InputError: the profile keeps neither, for it was made by hand.
        """
        from qkv.figures.map import map_figure
        from qkv.figures.stored_map import StoredMap

        data = self._data(group, text)
        at = _position(data, layer, head)
        if (weights := _kept(data)) is not None:
            return _map(self._name(), data, *at, weights[at])
        found = StoredMap(self._name(), data.attrs["group"], data, at)
        if (picture := found.picture()) is not None:
            return map_figure(found, picture)
        raise _unkept("map", data, text)

    def alignment(
        self, layer: int | None = None, head: int | None = None, text: int = 0, group: str | None = "cross"
    ) -> Figure:
        """Words × words: which source words (keys, across) each target word (query, down) attends to.

        The mean of all heads, of the heads of one `layer`, or one `head` of it. In cross-attention a row has the name
        of the word that its query looks for, the one after it: weights of the query "<s>" are those of the first word.

        Raises:
            InputError: there is no such group, or the text was too long for its weights to be kept.
        """
        data = self._data(group, text)
        of, weights = _mean_of("alignment", data, layer, head, text)
        keys = data["key_token"].values[0, : weights.shape[1]].tolist()
        special = frozenset(data.attrs["special_tokens"])
        return alignment_figure(_subtitle(self._name(), data), of, weights, _looked_for(data), keys, special)

    def overlay(
        self,
        image: np.ndarray,
        grid: tuple[int, int],
        query: int | Sequence[int] | None = None,
        *,
        layer: int | None = None,
        head: int | None = None,
        text: int = 0,
        group: str | None = None,
        corners: bool = False,
    ) -> Figure:
        """Attention over the regions of an image, for a group whose keys are the cells of a grid: one picture a query.

        Args:
            image: (h, w, 3) that the keys were made from, numbers from 0 to 1 or bytes.
            grid: cells down and across. They are the last keys; those before, such as a class token, are left out.
            query: position of a query, or several; all of them by default. In cross-attention a picture has the name of
                the word that its query looks for, the one after it.
            layer: whose heads are averaged; all layers by default.
            head: one head of the layer.
            text: which of the profile's inputs.
            group: such as "cross" of a captioner.
            corners: where cells have their middle, see `qkv.figures.overlay.overlay_figure`; True for the grid of
                `qkv.models.Captioner`.

        Raises:
            InputError: for an image, a grid or a query that does not fit, or weights that were not kept.
        """
        from qkv.figures.overlay import overlay_figure

        data = self._data(group, text)
        of, weights = _mean_of("overlay", data, layer, head, text)
        n_queries, n_keys = weights.shape
        cells = grid[0] * grid[1]
        if min(grid) < 1 or cells > n_keys:
            raise InputError(f"grid: got {grid[0]} × {grid[1]} cells; expected at most the {n_keys} keys of this text")
        chosen = range(n_queries) if query is None else [query] if isinstance(query, int) else list(query)
        if not chosen or not all(0 <= at < n_queries for at in chosen):
            raise InputError(f"query: got {query}; expected positions from 0 to {n_queries - 1}")
        if len(chosen) > MOST_OVERLAYS:
            raise InputError(f"query: got {len(chosen)} of the queries; expected at most {MOST_OVERLAYS} of them")
        maps = weights[list(chosen), n_keys - cells :].reshape(-1, *grid)
        queries = _looked_for(data)
        names = [queries[at] for at in chosen]
        left_out = f" · {n_keys - cells} more keys are no cells" if n_keys > cells else ""
        subtitle = f"{_subtitle(self._name(), data)}{left_out} · pictures are as bright as the weight"
        return overlay_figure(subtitle, of, image, maps, names, corners=corners)

    def _name(self) -> str:
        return str(self._profile.attrs.get("model", "model"))

    def _data(self, group: str | None, text: int | None) -> xr.Dataset:
        data = self._profile.group(group)
        data = data.assign_attrs(group=group or self._profile.main)
        if text is None:
            return data
        if not 0 <= text < data.sizes["text"]:
            raise InputError(f"text: got {text}; this profile has texts 0 to {data.sizes['text'] - 1}")
        return data.isel(text=[text])


def _kept(data: xr.Dataset) -> np.ndarray | None:
    """All weights (layer, head, query, key) of a data set of one text, without padding; None if they were not kept."""
    if "weights" not in data:
        return None
    weights: np.ndarray = data["weights"].values[0, :, :, : int(data["n_queries"][0]), : int(data["n_keys"][0])]
    return None if np.isnan(weights).all() else weights


def _looked_for(data: xr.Dataset) -> list[str]:
    """Names for the queries of one text: between two texts, the word that each predicts; else their own."""
    own = [str(name) for name in data["query_token"].values[0, : int(data["n_queries"][0])]]
    return [*own[1:], AFTER] if str(data.attrs["group"]).startswith("cross") else own


def _unkept(what: str, data: xr.Dataset, text: int) -> InputError:
    longest = max(int(data["n_queries"][0]), int(data["n_keys"][0]))
    return InputError(
        f"{what}: the profile holds no dense maps of text {text}, which has {longest} tokens; "
        f"profile it with map_tokens={longest} or more to keep them"
    )


def _mean_of(what: str, data: xr.Dataset, layer: int | None, head: int | None, text: int) -> tuple[str, np.ndarray]:
    """Weights (query, key) of a head, or the mean of a layer's or of all, and whose they are."""
    if head is not None and layer is None:
        raise InputError(f"layer: got None with head {head}; expected the layer of that head")
    weights = _kept(data)
    if weights is None:
        raise _unkept(what, data, text)
    layers, heads = weights.shape[:2]
    if layer is None:
        return "" if layers * heads == 1 else f"Mean of {layers * heads} heads", weights.mean((0, 1))
    if head is None:
        at = _position(data, layer, data["head"].values[0])[0]
        return f"Layer {layer}, mean of {heads} heads", weights[at].mean(0)
    return f"Layer {layer}, head {head}", weights[_position(data, layer, head)]


def _overview(name: str, data: xr.Dataset, heads: pd.DataFrame, names: tuple[str, ...]) -> Figure:
    layers, columns = data.sizes["layer"], data.sizes["head"]
    across = min(len(names), 3)
    down = -(-len(names) // across)
    cell = min(0.5, 9 / columns, 9 / layers) if across == 1 else min(0.3, 3.6 / columns, 4.6 / layers)
    wide, tall = cell * columns, cell * layers
    left, top, gap_x, gap_y = 0.62, 1.2, 0.85, 0.62
    width = max(left + across * (wide + gap_x), 7.2)
    figure = Drawing(figsize=(width, top + down * (tall + gap_y)))
    titled(figure, _sentence(data, heads, names), _subtitle(name, data))
    # Shares have one scale, so that panels compare; and a tenth at least, so that next to nothing looks like it.
    known = columns_of(data)
    shares = [heads[name].max() for name in names if known[name].unit == "%"]
    for index, statistic in enumerate(names):
        row, column = divmod(index, across)
        x, y = left + column * (wide + gap_x), top + row * (tall + gap_y)
        axes, bar = place(figure, x, y, wide, tall), place(figure, x + wide + 0.09, y, 0.08, tall)
        unit = known[statistic].unit
        most = {"%": max([0.1, *shares]), "ratio": max(1.0, heads[statistic].max())}.get(unit, heads[statistic].max())
        _grid(axes, heads.pivot(index="layer", columns="head", values=statistic), known[statistic], most, cell)
        colour_bar(bar, axes.images[0], unit)
        if column == 0:
            axes.set_ylabel("layer", fontsize=8, color=MUTED)
        if row == down - 1:
            axes.set_xlabel("head", fontsize=8, color=MUTED)
    return figure


def _grid(axes: Axes, values: pd.DataFrame, column: Column, most: float, cell: float) -> None:
    """One layer × head map with its values."""
    label, unit = column[:2]
    least = min(0.0, float(np.nanmin(values.to_numpy(), initial=0)))
    norm = Normalize(least, most if most > least else least + 1.0)
    layer_by_head(axes, values, norm, ticks=12 if cell >= 0.25 else 6, written=lambda value: _in_cell(value, unit))
    suffix = {"%": ", %", "ratio": "", "": ""}.get(unit, f", {unit}")
    axes.set_title(label + suffix, loc="left", fontsize=9, color=INK, pad=5)


def _in_cell(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100 * value:.0f}"
    if unit == "ratio":
        return f"{value:.2f}".removeprefix("0")
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.1f}"


def _received(name: str, data: xr.Dataset) -> Figure:
    n_keys = int(data["n_keys"][0])
    tokens = data["key_token"].values[0, :n_keys]
    by_layer = tables.received_share(data)[0, ..., :n_keys].mean(1)  # (layer, key)
    mean, layers = by_layer.mean(0), data.sizes["layer"]
    top = int(mean.argmax())
    strip = max(0.9, 0.16 * layers)
    figure = Drawing(figsize=(9.6, 3.3 + strip + 0.6))
    title = f"“{token_label(tokens[top])}” at position {top} receives {percent(mean[top])} of all attention"
    if np.sort(mean)[-1] > 5 * np.median(mean):
        title += f", {mean[top] / np.median(mean):,.0f} × the median token"
    titled(figure, title, _subtitle(name, data))
    curve = place(figure, 0.82, 0.85, 7.98, 2.3)
    heat = place(figure, 0.82, 3.27, 7.98, strip)
    bar = place(figure, 8.89, 3.27, 0.08, strip)

    plain(curve)
    _received_curve(curve, mean, tokens, 9)
    curve.axhline(1 / n_keys, color=MUTED, lw=0.7, ls=(0, (4, 3)))
    note(curve, 1 / n_keys, "equal\nshare")
    curve.set_ylabel("share of all attention", fontsize=8, color=MUTED)

    low = max(float(np.quantile(by_layer, 0.05)), by_layer.max() * 1e-6, 1e-12)
    binned, edges = bins(by_layer, 1200)
    image = heat.pcolormesh(
        edges - 0.5, np.arange(layers + 1) - 0.5, np.maximum(binned, low),
        cmap=COLOURS, norm=LogNorm(low, by_layer.max()), rasterized=True, linewidth=0,
    )  # fmt: skip
    heat.set_ylim(layers - 0.5, -0.5)
    heat.set_ylabel("layer", fontsize=8, color=MUTED)
    step = max(1, layers // 6)
    heat.set_yticks(np.arange(0, layers, step), [str(layer) for layer in data["layer"].values[::step]])
    for spine in heat.spines.values():
        spine.set_visible(False)
    heat.tick_params(length=0, labelsize=7.5, colors=MUTED)
    along(heat, tokens)
    along(curve, tokens, labels=False)
    drawn = figure.colorbar(image, cax=bar)
    drawn.outline.set_visible(False)
    bar.yaxis.set_major_formatter(PERCENT)
    bar.yaxis.set_minor_formatter(NullFormatter())
    bar.tick_params(which="both", length=0, labelsize=6.5, colors=MUTED, pad=2)
    return figure


def _by_layer(name: str, data: xr.Dataset, heads: pd.DataFrame, statistic: str, title: str) -> tuple[Figure, Axes]:
    """One dot per head, one column per layer, and the layer's median."""
    label, unit = STATISTICS[statistic][:2]
    layers = data.sizes["layer"]
    width = min(11.0, max(6.4, 1.6 + 0.62 * layers))
    figure = Drawing(figsize=(width, 4.4))
    titled(figure, title, _subtitle(name, data))
    axes = place(figure, 0.72, 1.2, width - 1.4, 2.65)
    plain(axes)
    for index, layer in enumerate(data["layer"].values):
        column = heads.loc[heads["layer"] == layer, statistic]
        values, middle = np.sort(column.to_numpy()), column.median()  # NaN where a text is too short to have any
        # Heads side by side, the extremes in the middle, so that equal values do not hide one another.
        offsets = (np.arange(len(values)) * 0.618 % 1 - 0.5) * 0.5
        axes.scatter(
            index + offsets, values, s=17, color=ACCENT, alpha=0.75, lw=0, zorder=3,
            label="one head" if index == 0 else None,
        )  # fmt: skip
        axes.plot(
            [index - 0.34, index + 0.34], [middle] * 2, color=WARM, lw=1.8, zorder=4,
            solid_capstyle="butt", label="median of the layer" if index == 0 else None,
        )  # fmt: skip
    step = max(1, layers // 16)
    axes.set_xticks(np.arange(0, layers, step), [str(layer) for layer in data["layer"].values[::step]])
    axes.set_xlim(-0.6, layers - 0.4)
    axes.set_xlabel("layer", fontsize=8, color=MUTED)
    axes.set_ylabel(label.lower() if unit == "%" else f"{label.lower()}, {unit}", fontsize=8, color=MUTED)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=7.5,
        labelcolor=MUTED, borderaxespad=0.2, handletextpad=0.5, columnspacing=1.4,
        scatteryoffsets=[0.5],
    )  # fmt: skip
    return figure, axes


def _head(name: str, data: xr.Dataset, layer: int, head: int) -> Figure:
    row = tables.head_table(data).iloc[layer * data.sizes["head"] + head]
    n_queries, n_keys = int(data["n_queries"][0]), int(data["n_keys"][0])
    queries, keys = data["query_token"].values[0, :n_queries], data["key_token"].values[0, :n_keys]
    one = data.isel(text=0, layer=layer, head=head)
    facts = [
        f"entropy {written(row['entropy'], 'nats')} (ratio {row['entropy_ratio']:.2f})",
        written(row["participation"], "effective keys"),
        *([f"distance {written(row['distance'], 'tokens')}"] if np.isfinite(row["distance"]) else []),
        f"spread {written(row['spread'], 'tokens')}",
    ]
    distance = one["distance"].values[:n_queries]
    curves = 3 if np.isfinite(distance).any() else 2
    height, left, width = 1.05, 0.82, 7.98
    figure = Drawing(figsize=(9.6, 2.0 + curves * (height + 0.52) + 0.35))
    title = f"Layer {row['layer']}, head {row['head']}: {row['goes_to']}"
    titled(figure, title, f"{name} · {row['module']} · " + " · ".join(facts))
    _stack(place(figure, left, 1.12, width, 0.3), data, layer, head)

    def axes_at(index: int, label: str, tokens: np.ndarray, what: str) -> Axes:
        axes = place(figure, left, 2.12 + index * (height + 0.52), width, height)
        axes.set_title(label, loc="left", fontsize=8.5, color=INK, pad=6)
        plain(axes)
        along(axes, tokens, labels=index == curves - 1, what=what)
        return axes

    received = tables.received_share(data)[0, layer, head, :n_keys]
    axes = axes_at(0, "Received by each key, share of the head's weight", keys, "key")
    _received_curve(axes, received, keys, 6)

    entropy, seen = one["entropy"].values[:n_queries], one["visible"].values[:n_queries]
    uniform = np.log(np.maximum(seen, 1))
    axes = axes_at(1, "Entropy of each query, nats", queries, "query")
    _curve(axes, entropy)
    axes.plot(uniform, color=MUTED, lw=0.8, ls=(0, (4, 3)))
    axes.set_ylim(0, float(np.nanmax([*entropy, uniform.max()])) * 1.1 or 1)
    note(axes, float(uniform[-1]), "uniform\nattention")

    if curves == 3:
        axes = axes_at(2, "Mean distance to what each query attends to, tokens", queries, "query")
        _curve(axes, distance)
    return figure


def _stack(axes: Axes, data: xr.Dataset, layer: int, head: int) -> None:
    """One bar of disjoint shares, each with its share printed inside and its name under or over it."""
    axes.set_axis_off()
    shares = {name: float(value[0, layer, head]) for name, value in tables.destinations(data).items()}
    whole, left, shown = sum(shares.values()) or 1.0, 0.0, []
    for name, (label, colour) in DESTINATIONS.items():
        share = shares[name] / whole
        if share > 0:
            axes.barh(0, share, left=left, height=1, color=colour, lw=0.8, edgecolor="white")
            if share >= 0.05:
                dark = name in ("first", "sink_logit", "self", "previous")
                axes.text(
                    left + share / 2, 0, percent(shares[name]), ha="center", va="center", fontsize=8,
                    color="white" if dark else INK,
                )  # fmt: skip
            left += share
            if share >= 0.005:
                window = f" ±{data.attrs['local_window']}" if name == "nearby" else ""
                shown.append((label + window, colour))
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.5, 0.5)
    handles = [mpl.patches.Patch(color=colour, label=label) for label, colour in shown]
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(-0.004, -0.18), ncols=len(handles), frameon=False,
        fontsize=7.5, labelcolor=MUTED, handlelength=0.9, handleheight=0.9, handletextpad=0.5,
        columnspacing=1.3, borderaxespad=0,
    )  # fmt: skip
    axes.set_title("Where the weight goes", loc="left", fontsize=8.5, color=INK, pad=5)


def _map(name: str, data: xr.Dataset, layer: int, head: int, weights: np.ndarray) -> Figure:
    row = tables.head_table(data).iloc[layer * data.sizes["head"] + head]
    n_queries, n_keys = weights.shape
    wide = min(5.6, 5.6 * n_keys / n_queries)
    tall = max(wide * n_queries / n_keys, 1.2)
    below = 1.0 if n_keys <= LABELLED_TOKENS else 0.6
    figure = Drawing(figsize=(max(wide + 1.9, 6.4), 1.15 + tall + below))
    titled(figure, f"Layer {row['layer']}, head {row['head']}: {row['goes_to']}", _subtitle(name, data))
    axes = place(figure, 0.95, 1.15, wide, tall)
    bar = place(figure, 0.95 + wide + 0.12, 1.15, 0.1, tall)
    norm = PowerNorm(0.5, 0, float(np.nanmax(weights)) or 1)
    image = axes.imshow(weights, cmap=COLOURS, norm=norm, aspect="auto", interpolation="nearest")
    along(axes, data["key_token"].values[0, :n_keys])
    along(axes, data["query_token"].values[0, :n_queries], vertical=True)
    axes.tick_params(length=0, colors=MUTED)
    for spine in axes.spines.values():
        spine.set_color(HAIRLINE)
    drawn = figure.colorbar(image, cax=bar)
    drawn.outline.set_visible(False)
    bar.yaxis.set_major_formatter(PERCENT)
    bar.tick_params(length=0, labelsize=7, colors=MUTED)
    bar.set_title("weight", fontsize=7.5, color=MUTED, loc="left", pad=5)
    return figure


def _curve(axes: Axes, values: np.ndarray) -> None:
    """A curve along the text; a long one is drawn faint, with its running mean over it."""
    if len(values) <= 400:
        axes.plot(values, color=ACCENT, lw=1.1)
    else:
        axes.plot(values, color="#b9d3d9", lw=0.4, rasterized=True)
        mean, edges = bins(values[None], 160)
        axes.plot((edges[:-1] + edges[1:] - 1) / 2, mean[0], color=ACCENT, lw=1.3)
    axes.set_ylim(bottom=0)


def _received_curve(axes: Axes, share: np.ndarray, tokens: np.ndarray, named: int) -> None:
    """Received attention by key on a logarithmic scale: a sink takes a thousand times what others do."""
    top = float(share.max()) or 1.0
    low = max(float(np.quantile(share, 0.02)), top * 1e-6)
    edges = np.arange(len(share) + 1) - 0.5
    shown = np.maximum(share, low)
    axes.set_yscale("log")
    axes.stairs(shown, edges, baseline=low / 2, fill=True, color="#cfe1e4", lw=0)
    axes.stairs(shown, edges, baseline=None, color=ACCENT, lw=0.9 if len(share) < 500 else 0.5)
    axes.set_ylim(low / 1.3, top * (top / low) ** 0.25 * 1.2)
    axes.yaxis.set_major_formatter(PERCENT)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    if top < 100 * low:  # too little for powers of ten alone
        axes.yaxis.set_major_locator(FixedLocator([m * 10.0**p for p in range(-9, 1) for m in (1, 2, 5)]))
    name_peaks(axes, share, tokens, named)


def _sentence(data: xr.Dataset, heads: pd.DataFrame, names: tuple[str, ...]) -> str:
    if len(names) > 1:
        return headline(data, heads).removesuffix(".")
    label, unit = columns_of(data)[names[0]][:2]
    values = heads[names[0]]
    if values.isna().all():
        return f"{label} is not defined for this kind of attention"
    best = heads.loc[values.idxmax()]
    return (
        f"{label}: {written(values.median(), unit)} in the median head, "
        f"most in layer {best['layer']}, head {best['head']} ({written(best[names[0]], unit)})"
    )


def _subtitle(name: str, data: xr.Dataset) -> str:
    n_queries, n_keys = data["n_queries"].values, data["n_keys"].values
    length = counted(round(n_queries.mean()), "token")
    if (n_queries != n_keys).any():
        length = f"{n_queries.mean():,.0f} queries × {n_keys.mean():,.0f} keys"
    texts = f" · mean of {len(n_queries)} texts" if len(n_queries) > 1 else ""
    group = data.attrs.get("group", "self")
    kind = "" if group == "self" else f"{group} attention · "
    return f"{name} · {kind}{layers_and_heads(data.sizes['layer'], data.sizes['head'])} · {length}{texts}"


def _position(data: xr.Dataset, layer: int, head: int) -> tuple[int, int]:
    """The places of a layer and a head, by their ids."""
    found = []
    for name, value in (("layer", layer), ("head", head)):
        places = np.flatnonzero(data[name].values == value)
        if not len(places):
            ids = data[name].values
            raise InputError(f"{name}: got {value}; this group has {name}s {ids[0]} to {ids[-1]}")
        found.append(int(places[0]))
    return found[0], found[1]
