"""`profile.plot`: matplotlib figures of a profile. Every method returns a `Figure`; pyplot is not used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from qkv.errors import InputError, nearest
from qkv.plot.comparison import similarity_figure
from qkv.plot.given import Matrix, index_of, mean_weights, of_text
from qkv.plot.layout import (
    ACCENT,
    DESTINATIONS,
    HAIRLINE,
    INK,
    KINDS,
    MUTED,
    PERCENT,
    WARM,
    HeadMap,
    along,
    bins,
    chart,
    charts,
    head_map,
    head_maps,
    ink_on,
    legend,
    note,
    number_ticks,
    place,
    reference_line,
    room_below,
    share_curve,
    text_figure,
    titled,
    token_label,
)
from qkv.plot.map import AFTER, ALL_TOKENS, Stored, StoredMap, alignment_figure, map_figure, maps_figure, overlay_figure
from qkv.plot.matrices import THUMBNAIL, Style, pooled, wall_of_heads
from qkv.profiler.capture.patches import window
from qkv.profiler.data import images, tables
from qkv.profiler.data.findings import Findings
from qkv.profiler.data.frames import columns_of, counted, layers_and_heads, percent, size_of, written
from qkv.profiler.data.sinks import EPSILON, sink_table, sink_tokens, trend_by_head
from qkv.profiler.data.tables import MIXED, ROLES, TRAITS

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from qkv.profiler.data.profile import ProfileData

SMALL_MULTIPLES = ("sink", "previous", "self", "local", "distance", "entropy_ratio")
MARKS = {"sparse": "•", "streaming": "s", "retrieval": "r", "positional": "p", "content": "c"}
KINDS_OF_TEXT = {"alpha_first": "this text", "alpha_random": "random tokens", "alpha_repeated": "one token repeated"}
TOKENS = 8  # number of sink tokens listed


class Plots:
    """The figures of one profile, as `profile.plot`.

    Every method returns a `matplotlib.figure.Figure`: save it with `figure.savefig("heads.pdf")`. `group`
    names the kind of attention (the main one when None); `text` is the index of a text.

    Example:
        >>> figure = profile.plot.overview()                     # doctest: +SKIP
        >>> figure.savefig("overview.pdf")                       # doctest: +SKIP
        >>> profile.plot.head(3, 1).savefig("head.svg")          # doctest: +SKIP
    """

    def __init__(self, profile: ProfileData) -> None:
        self._profile = profile

    def overview(self, text: int | None = None, group: str | None = None) -> Figure:
        """Six layer × head maps of the main statistics; averages over the texts unless `text` picks one."""
        data = self._data(group, text)
        heads = tables.head_table(data)
        names = tuple(name for name in SMALL_MULTIPLES if heads[name].notna().any())
        return self._head_maps(data, heads, names)

    def heads(self, statistic: str, text: int | None = None, group: str | None = None) -> Figure:
        """A layer × head map of a built-in or user-defined statistic; the mean over texts unless `text` picks one."""
        data = self._data(group, text)
        known = columns_of(data)
        if statistic not in known:
            raise InputError(
                f"statistic: got {statistic!r}; expected one of {', '.join(known)}{nearest(statistic, known)}"
            )
        return self._head_maps(data, tables.head_table(data), (statistic,))

    def received(self, text: int = 0, group: str | None = None) -> Figure:
        """Attention received by each token of one text: the mean over all heads, and over each layer."""
        data = self._data(group, text)
        n_keys = int(data["n_keys"][0])
        tokens = data["key_token"].values[0, :n_keys]
        rows = tables.received_share(data)[0, ..., :n_keys].mean(1)  # (layer, key)
        mean, layers = rows.mean(0), data.sizes["layer"]
        top = int(mean.argmax())
        title = f"“{token_label(tokens[top])}” at position {top} receives {percent(mean[top])} of all attention"
        if np.sort(mean)[-1] > 5 * np.median(mean):
            title += f", {mean[top] / np.median(mean):,.0f} × the median token"
        low = max(float(np.quantile(rows, 0.05)), rows.max() * 1e-6, 1e-12)
        figure, curve, strip = text_figure(
            title, self._subtitle(data), tokens, mean, rows, LogNorm(low, rows.max()), "key"
        )
        reference_line(curve, 1 / n_keys, "equal\nshare")
        curve.set_ylabel("share of all attention")
        strip.set(ylim=(layers - 0.5, -0.5), ylabel="layer")
        number_ticks(strip.yaxis, data["layer"].values, 6)
        return figure

    def sinks(self, group: str | None = None) -> Figure:
        """Sink scores of every head on three kinds of text, norms of sink values, and the tokens that are sinks.

        For texts longer than 64 tokens, a line for each head shows its weight on the first token along the text.
        """
        data = self._profile.group(group)
        table, trend = sink_table(data), trend_by_head(data)
        long = len(trend.ranges) > 1
        kinds = {column: label for column, label in KINDS_OF_TEXT.items() if table[column].notna().any()}
        score = "mean weight on a token; above, of the first 64 queries"
        even = "" if np.isnan(mean := table["alpha_even"].mean()) else f" (even rows: {percent(mean)})"
        norm = Normalize(0, max([1.0, *(table[column].max() for column in kinds)]))
        maps = []
        for column, label in kinds.items():
            strong = f"{(table[column] > EPSILON).sum()} of {len(table)} heads"
            maps.append(HeadMap(table, column, f"{label}\n{strong}", norm))
        subtitle = f"{self._name()} · {score}{even}"
        figure, drawn, lower = head_maps(_sinks_sentence(data), subtitle, maps, below=3.1 + 3.2 * long)
        for axes, column in zip(drawn, kinds, strict=True):
            strong = table[table[column] > EPSILON]
            x, y = (np.searchsorted(data[side].values, strong[side]) for side in ("head", "layer"))
            axes.plot(x + 0.36, y - 0.36, linestyle="", marker="o", ms=2.2, mew=0, color=WARM)
        for bar in figure.axes[-1:]:  # none without kinds
            bar.axhline(EPSILON, color=WARM, lw=1.2)
            bar.set_ylabel("mean weight on the first token")
        _values(chart(figure, 0.75, lower + 0.1, 2.9, 2.4, "The value that a sink adds"), table)
        wide = figure.get_figwidth() - 5.65
        tokens = chart(figure, 5.15, lower + 0.1, wide, 2.4, "Tokens that are sinks over the whole text")
        _tokens(tokens, sink_tokens(data), len(table))
        if long:
            axes = chart(figure, 0.75, lower + 3.4, 4.4 + wide, 2.3, "Weight on the first token along the text")
            _along(axes, trend.ranges, trend.share, trend.even)
        return figure

    def types(self, group: str | None = None) -> Figure:
        """The type of each head as a layer × head map: `Profile.types` as a figure."""
        table = self._profile.types(group)
        whole = self._with_all_layers(table, group or self._profile.main)
        layer_ids, head_ids = (sorted(set(whole[side])) for side in ("layer", "head"))
        layers, heads = len(layer_ids), len(head_ids)
        cell = min(0.42, 7.5 / heads, 8.0 / layers)
        wide, tall = cell * heads, cell * layers
        present = [kind for kind in KINDS if (table["type"] == kind).any()]
        shown = [trait for trait in TRAITS if table["traits"].str.split(", ").apply(lambda x, t=trait: t in x).any()]
        key = 0.235 * (len(present) + len(shown) + (1 if shown else 0))
        left, top = 0.75, 1.05
        width = max(left + wide + 3.9, 7.2)
        subtitle = f"{self._name()} · {layers_and_heads(layers, heads)} · the first type that a head reaches"
        figure = titled(width, top + max(tall, key) + 0.7, _types_sentence(table), subtitle)
        axes = place(figure, left, top, wide, tall)
        places = whole.assign(at=whole["type"].map([*KINDS].index, na_action="ignore"))
        norm, colours = Normalize(-0.5, len(KINDS) - 0.5), ListedColormap([*KINDS.values()])
        head_map(axes, HeadMap(places, "at", "", norm, colours=colours), bar=False)
        for one in table.to_dict("records") if cell > 0.2 else []:
            marks = "".join(MARKS[t] for t in one["traits"].split(", ") if t in MARKS)
            x, y = head_ids.index(one["head"]), layer_ids.index(one["layer"])
            axes.text(x, y, marks, ha="center", va="center", fontsize=6.5, color=ink_on(KINDS[one["type"]]))
        _key(place(figure, left + wide + 0.35, top, 3.2, key), table, present, shown)
        return figure

    def states(self) -> Figure:
        """How similar the hidden states of different tokens are, by depth: whether they collapse to one direction.

        Mean cosine over all pairs of tokens (Ethayarajh 2019, arXiv:1909.00512); Dong et al. 2021, arXiv:2103.03404,
        show that attention without skip connections makes all states alike.

        A line for each stack of `Profile.residual`, and a thin one for each text.
        """
        stacks = self._profile.residual
        cosines = {stack: data["cosine"].values.astype(float) for stack, data in stacks.items() if "cosine" in data}
        cosines = {stack: values for stack, values in cosines.items() if np.isfinite(values).any()}
        if not cosines:
            raise InputError(
                "profile: it holds no similarity of hidden states; profile a text of two or more tokens again"
            )
        depths = max(values.shape[1] for values in cosines.values())
        first, values = next(iter(cosines.items()))
        size = f"{counted(len(values), 'text')}, {counted(int(stacks[first]['n_tokens'].sum()), 'token')}"
        subtitle = f"{self._name()} · {size} · mean over all pairs of tokens of a text"
        wide = min(9.9, max(5.3, 0.5 + 0.45 * depths))
        figure, (axes,) = charts(_states_sentence(np.nanmean(values, 0)), subtitle, [wide], 2.6)
        axes.axhline(0, color=HAIRLINE, lw=0.8)
        colours = (ACCENT, WARM, MUTED)
        for at, (stack, values) in enumerate(cosines.items()):
            x, colour = np.arange(values.shape[1]), colours[at % len(colours)]
            for one in values if len(values) > 1 else []:
                axes.plot(x, one, color=colour, lw=0.6, alpha=0.4)
            axes.plot(x, np.nanmean(values, 0), color=colour, lw=1.6, marker="o", ms=3.5, label=stack)
        axes.set_ylim(min(0.0, *(float(np.nanmin(values)) for values in cosines.values())) - 0.02, 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(min(depths, 16), integer=True))
        axes.set_xlabel("depth: 0 is the input of the first layer, i the output of layer i")
        axes.set_ylabel("cosine of two tokens' states")
        if len(cosines) > 1:
            legend(axes, loc="best")
        return figure

    def similarity(
        self, text: int | None = None, group: str | None = None, *, maps: Literal["weights", "pooled"] | None = None
    ) -> Figure:
        """Which heads have similar maps: `Profile.similarity` as a matrix, and as points that lie close if alike.

        Points are coloured by the type of head, and placed by classical multidimensional scaling, as in figure 6 of
        Clark et al. 2019 (arXiv:1906.04341).
        """
        subtitle = self._subtitle(self._data(group, text))
        return similarity_figure(subtitle, self._profile.similarity(text, group, maps=maps), self._profile.types(group))

    def head(self, layer: int, head: int, text: int = 0, group: str | None = None) -> Figure:
        """One head: the destinations of its weight, and its curves along the text."""
        data = self._data(group, text)
        layer, head = self._indices(data, layer, head)
        row = tables.head_table(data).iloc[layer * data.sizes["head"] + head]
        n_queries, n_keys = int(data["n_queries"][0]), int(data["n_keys"][0])
        queries, keys = data["query_token"].values[0, :n_queries], data["key_token"].values[0, :n_keys]
        one = data.isel(text=0, layer=layer, head=head)
        facts = [
            f"entropy {written(row['entropy'], 'nats')} (ratio {row['entropy_ratio']:.2f})",
            written(row["effective_keys"], "effective keys"),
            *([f"distance {written(row['distance'], 'tokens')}"] if np.isfinite(row["distance"]) else []),
            f"spread {written(row['spread'], 'tokens')}",
        ]
        distance = one["distance"].values[:n_queries]
        curves = 3 if np.isfinite(distance).any() else 2
        height, left, width = 1.05, 0.82, 7.98
        below = max(room_below(names, width) for names in (queries, keys))
        title = f"Layer {row['layer']}, head {row['head']}: {row['goes_to']}"
        subtitle = f"{self._name()} · {row['module']} · " + " · ".join(facts)
        figure = titled(9.6, 1.6 + curves * (height + 0.52) + below, title, subtitle)
        _stack(place(figure, left, 1.12, width, 0.3, "Where the weight goes"), data, layer, head)

        def axes_at(index: int, label: str, tokens: np.ndarray, what: str) -> Axes:
            axes = chart(figure, left, 2.12 + index * (height + 0.52), width, height, label)
            along(axes, tokens, what, labels=index == curves - 1)
            return axes

        received = tables.received_share(data)[0, layer, head, :n_keys]
        axes = axes_at(0, "Received by each key, share of the head's weight", keys, "key")
        share_curve(axes, received, keys, 6)

        entropy, visible = one["entropy"].values[:n_queries], one["visible"].values[:n_queries]
        uniform = np.log(np.maximum(visible, 1))
        axes = axes_at(1, "Entropy of each query, nats", queries, "query")
        _curve(axes, entropy)
        axes.plot(uniform, color=MUTED, lw=0.8, ls=(0, (4, 3)))
        axes.set_ylim(0, float(np.nanmax([*entropy, uniform.max()])) * 1.1 or 1)
        note(axes, float(uniform[-1]), "uniform\nattention")

        if curves == 3:
            axes = axes_at(2, "Mean distance to what each query attends to, tokens", queries, "query")
            _curve(axes, distance)
        return figure

    def map(self, layer: int, head: int, text: int = 0, group: str | None = None) -> Figure:
        """The map of one head, query by key: all weights, or for a long text the largest and the mean in bins."""
        data = self._data(group, text)
        stored = StoredMap(self._name(), data.attrs["group"], data, self._indices(data, layer, head))
        if (picture := stored.picture()) is None:
            longest = math.ceil(math.sqrt(stored.n_queries * stored.n_keys))
            raise InputError(
                f"text: the profile holds no maps of text {text}, which has {stored.n_keys} keys; profile it with "
                f"map_tokens={longest} or more to store them"
            )
        return map_figure(stored, picture)

    def signed(self, text: int = 0, group: str | None = None) -> Figure | None:
        """The maps that act in layers whose weights have signs: differential attention, and hidden maps.

        Differential attention is softmax₁ − λ softmax₂ (Ye et al. 2024, arXiv:2410.05258, eq. 1); the hidden map of
        linear attention has the weights of the values in the output (Ali et al. 2024, arXiv:2403.01590), as shares of
        the head's largest: the layer's norm removes their scale. Orange weights add values, blue ones subtract them;
        for a long text they are means of bins. None without such layers, or without maps.
        """
        data = self._data(group, text)
        kept, factors = Stored.of(data), self._profile.attrs.get("differential", {}).get(data.attrs["group"], {})
        hidden = "negative" in data
        layers = [n for n in data["layer"].values.tolist() if hidden or str(n) in factors]
        if not layers or kept is None:
            return None
        count, title = data.sizes["head"], "Hidden maps of linear attention"
        average = kept.average
        if hidden:
            rows, columns = kept.visible.shape
            average = data["signed" if kept.bins == (1, 1) else "map_signed"].values[0, :, :, :rows, :columns]
        else:
            count, title = count // 2, "Maps that act: softmax₁ − λ softmax₂"
        shown = list[list[Matrix]]()
        for layer in layers:
            maps = average[index_of("layer", layer, data["layer"].values)].astype(np.float64)
            largest = np.abs(maps).max((1, 2), keepdims=True)
            maps = (
                maps / np.where(largest > 0, largest, 1)
                if hidden
                else maps[:count] - factors[str(layer)] * maps[count:]
            )
            shown.append([pooled(Matrix(np.where(kept.visible, head, np.nan)), THUMBNAIL) for head in maps])
        top = max(float(np.nanmax(np.abs(head.values))) for row in shown for head in row)
        heads, names = data["head"].values[:count].tolist(), of_text(data, text)[0].names(None, None)
        said = "weight / largest of the head" if hidden else "weight"
        return wall_of_heads(shown, layers, heads, Style(title, said, vmin=-top, vmax=top), names)

    def alignment(
        self, layer: int | None = None, head: int | None = None, text: int = 0, group: str | None = "cross"
    ) -> Figure:
        """The alignment of words: the source words (keys, across) to which each target word (query, down) attends.

        The mean of all heads, of the heads of one `layer`, or one `head` of it. In cross-attention a row is labelled
        with the word that its query predicts, the next one: the query "<s>" has the label of the first word.
        """
        data = self._data(group, text)
        found, special = of_text(data, text), frozenset(data.attrs["special_tokens"])
        subtitle, (of, weights) = self._subtitle(data), mean_weights(found, layer, head)
        return alignment_figure(subtitle, of, weights, _predicted(data), found[0].keys or [], special)

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
        """Attention over the regions of an image, if keys are the cells of a grid: one picture for each query.

        Args:
            image: the image from which the keys were computed, (h, w, 3), numbers from 0 to 1 or bytes.
            grid: numbers of cells down and across. Cells are the last keys; earlier keys, such as a class token, are
                left out.
            query: position of a query, or several; all by default. In cross-attention a picture is labelled with the
                word that its query predicts, the next one.
            layer: average the heads of this layer; all layers by default.
            head: one head of the layer.
            text: index of the profile's input.
            group: the kind of attention, such as "cross" of a captioner.
            corners: where the centres of cells are, as in `qkv.plot.overlay`; True for the grid of
                `qkv.models.Captioner`.
        """
        data = self._data(group, text)
        of, weights = mean_weights(of_text(data, text), layer, head)
        n_queries, n_keys = weights.shape
        chosen = list(range(n_queries)) if query is None else [query] if isinstance(query, int) else list(query)
        if not chosen or not all(0 <= at < n_queries for at in chosen):
            raise InputError(f"query: got {query}; expected positions from 0 to {n_queries - 1}")
        queries, others = _predicted(data), n_keys - grid[0] * grid[1]
        left_out = f" · {others} keys outside the grid" if others > 0 else ""
        subtitle = f"{self._subtitle(data)}{left_out} · brightness is the weight"
        names = [queries[at] for at in chosen]
        return overlay_figure(subtitle, of, image, weights[chosen], grid, names, corners=corners)

    def image(
        self,
        image: Any,
        token: int | Sequence[int] | None = None,
        *,
        layer: int | None = None,
        head: int | None = None,
        number: int = 0,
        thumbnail: bool = False,
        text: int = 0,
        group: str | None = None,
    ) -> Figure:
        """Attention over the patches of an image that the model read: one picture for each token.

        Brightness is the share of the row, of the largest patch that is no sink. Patches that are sinks of these heads
        (a mean share above 30 %) are framed, and do not set the scale.

        Args:
            image: the image as it was before the processor, (h, w, 3) or of Pillow; numbers from 0 to 1 or bytes.
            token: position of a token, or several; negative ones count from the end: the last one, −1, chooses the
                first token of the answer. By default the mean over all tokens that may attend to a patch.
            layer: average the heads of this layer; all layers by default.
            head: one head of the layer.
            number: which image, counted from 0, if the model read several.
            thumbnail: the small whole image that some models read beside tiles.
            text: index of the profile's input.
            group: the kind of attention; the one whose keys are patches by default.

        Raises:
            InputError: if no keys are patches, their places are not known, or the profile does not keep the weights of
                the token.
        """
        group = images.group_of(self._profile.groups, self._profile.attrs, group)
        data = self._data(group, text)
        seen = self._profile.attrs["images"][group]
        if seen is None:
            raise InputError(
                "profile: how the image was cut is not known; pass tokenizer=processor to qkv.profile, with the "
                "processor of the model"
            )
        picture = np.asarray(image.detach().cpu() if hasattr(image, "detach") else image)
        grid = images.grid_of(data, number, thumbnail=thumbnail)
        of, heads = self._heads_named(data, layer, head)
        tokens = [token] if token is None or isinstance(token, int) else list(token)
        n, names = int(data["n_queries"][0]), data["query_token"].values[0]
        titles = [ALL_TOKENS if at is None else f"{names[at % n]}" for at in tokens]
        maps = np.stack([images.weights_on(data, grid, at)[heads].mean((0, 1)) for at in tokens])
        sinks = images.weights_on(data, grid, None)[heads].mean((0, 1)) > EPSILON
        if picture.ndim < 2 or 0 in picture.shape:
            raise InputError(f"image has shape {picture.shape}, expected (height, width, 3)")
        top, left, tall, wide = window(seen, *picture.shape[:2])
        edges = grid.edges
        within = (
            top + edges[0] * tall, left + edges[1] * wide, (edges[2] - edges[0]) * tall, (edges[3] - edges[1]) * wide
        )  # fmt: skip
        note = f" · {int(sinks.sum())} framed: sinks" if sinks.any() else ""
        subtitle = f"{self._subtitle(data)} · brightness is the weight{note}"
        return maps_figure(subtitle, of, picture, maps, titles, within=within, sinks=sinks)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _head_maps(self, data: xr.Dataset, heads: pd.DataFrame, names: tuple[str, ...]) -> Figure:
        """Draw a layer × head map for each statistic."""
        # All shares have the same scale, so that panels compare; at least 0.1, so that tiny shares look tiny.
        known = columns_of(data)
        shares = [heads[name].max() for name in names if known[name].unit == "%"]
        maps = []
        for statistic in names:
            (label, unit), largest = known[statistic][:2], heads[statistic].max()
            most = {"%": max([0.1, *shares]), "ratio": max(1.0, largest)}.get(unit, largest)
            least = min(0.0, float(np.nanmin(heads[statistic], initial=0)))
            title = label + {"%": ", %", "ratio": "", "": ""}.get(unit, f", {unit}")
            norm = Normalize(least, most if most > least else least + 1.0)
            rows = self._with_all_layers(heads, data.attrs["group"])
            maps.append(HeadMap(rows, statistic, title, norm, percent=unit == "%"))
        return head_maps(_maps_sentence(data, heads, names), self._subtitle(data), maps)[0]

    def _with_all_layers(self, table: pd.DataFrame, group: str) -> pd.DataFrame:
        """A table of heads with empty rows for the layers in which nothing attends."""
        import pandas as pd

        missing = self._profile.attrs.get("without_map", {}).get(group, {})
        places = [(int(layer), head) for layer in missing for head in sorted({*table["head"]})]
        return pd.concat([table, pd.DataFrame(places, columns=["layer", "head"])]) if places else table

    def _name(self) -> str:
        return str(self._profile.attrs.get("model", "model"))

    def _subtitle(self, data: xr.Dataset) -> str:
        group = data.attrs.get("group", "self")
        kind = "" if group == "self" else f"{group} attention · "
        return f"{self._name()} · {kind}{size_of(data)}" + (" · mean of the texts" if data.sizes["text"] > 1 else "")

    def _indices(self, data: xr.Dataset, layer: int, head: int) -> tuple[int, int]:
        """The indices of a layer and a head, given their ids."""
        return index_of("layer", layer, data["layer"].values), index_of("head", head, data["head"].values)

    def _heads_named(self, data: xr.Dataset, layer: int | None, head: int | None) -> tuple[str, Any]:
        """The heads of a layer, one of them, or all, in words and as an index of (layer, head)."""
        if layer is None and head is not None and data.sizes["layer"] > 1:
            raise InputError(f"head is {head} but layer is None, expected the layer of the head")
        if layer is None and head is None:
            return f"Mean of {data.sizes['layer'] * data.sizes['head']} heads", (slice(None), slice(None))
        at = index_of("layer", layer, data["layer"].values)
        if head is None:
            return f"Layer {layer}, mean of {data.sizes['head']} heads", (slice(at, at + 1), slice(None))
        number = index_of("head", head, data["head"].values)
        return f"Layer {data['layer'].values[at]}, head {head}", (slice(at, at + 1), slice(number, number + 1))

    def _data(self, group: str | None, text: int | None) -> xr.Dataset:
        return self._profile.one_text(text, group).assign_attrs(group=group or self._profile.main)


def _predicted(data: xr.Dataset) -> list[str]:
    """Labels for the queries of one text: in cross-attention the word that each predicts, else their own token."""
    tokens = [str(name) for name in data["query_token"].values[0, : int(data["n_queries"][0])]]
    return [*tokens[1:], AFTER] if str(data.attrs["group"]).startswith("cross") else tokens


def _maps_sentence(data: xr.Dataset, heads: pd.DataFrame, names: tuple[str, ...]) -> str:
    if len(names) > 1:
        return Findings(data).headline.removesuffix(".")
    label, unit = columns_of(data)[names[0]][:2]
    values = heads[names[0]]
    if values.isna().all():
        return f"{label} is not defined for this kind of attention"
    best = heads.loc[values.idxmax()]
    return (
        f"{label}: {written(values.median(), unit)} in the median head, "
        f"most in layer {best['layer']}, head {best['head']} ({written(best[names[0]], unit)})"
    )


def _key(axes: Axes, table: pd.DataFrame, present: list[str], shown: list[str]) -> None:
    """The types that heads have, with their colours, and below them their traits, with their marks."""
    axes.set_axis_off()
    axes.set(xlim=(0, 3.2), ylim=(len(present) + len(shown) + bool(shown), 0))
    for row, name in enumerate([*present, "", *shown] if shown else present):
        rule = (ROLES | TRAITS).get(name)
        bound = f"  {'≤' if rule.below else '≥'} {rule.threshold:g}" if rule else ""
        names = table["type" if name in present else "traits"].str.split(", ")
        has = names.apply(lambda x, name=name: name in x)
        if name in present:
            axes.add_patch(Rectangle((0, row + 0.15), 0.16, 0.7, color=KINDS[name], lw=0))
        axes.text(0.08, row + 0.5, MARKS.get(name, ""), va="center", ha="center", fontsize=8.5, color=INK)
        axes.text(0.25, row + 0.5, name, va="center", fontsize=8.5, color=INK)
        axes.text(1.45, row + 0.5, f"{has.sum():,}{bound}" if name else "", va="center", fontsize=8, color=MUTED)


def _types_sentence(table: pd.DataFrame) -> str:
    counts = table["type"].value_counts()
    named = counts.drop(MIXED, errors="ignore")
    parts = [f"{n:,} {kind}" for kind, n in named.head(3).items()]
    if not parts:
        return f"None of the {len(table):,} heads has a single role"
    return f"Of {len(table):,} heads: {', '.join(parts)}" + (f"; {counts[MIXED]:,} mixed" if MIXED in counts else "")


def _stack(axes: Axes, data: xr.Dataset, layer: int, head: int) -> None:
    """One stacked bar of disjoint shares, with a legend; large shares are printed inside."""
    axes.set_axis_off()
    shares = {name: float(value[0, layer, head]) for name, value in tables.destinations(data).items()}
    whole, left, shown = sum(shares.values()) or 1.0, 0.0, []
    for name, (label, colour, _) in DESTINATIONS.items():
        share = shares[name] / whole
        if share > 0:
            axes.barh(0, share, left=left, height=1, color=colour, lw=0.8, edgecolor="white")
            if share >= 0.05:
                text, at = percent(shares[name]), left + share / 2
                axes.text(at, 0, text, ha="center", va="center", fontsize=8, color=ink_on(colour))
            left += share
            if share >= 0.005:
                window = f" ±{data.attrs['local_window']}" if name == "nearby" else ""
                shown.append((label + window, colour))
    axes.set(xlim=(0, 1), ylim=(-0.5, 0.5))
    handles = [mpl.patches.Patch(color=colour, label=label) for label, colour in shown]
    legend(
        axes, handles=handles, loc="upper left", bbox_to_anchor=(-0.004, -0.18), ncols=len(handles), handlelength=0.9,
        handleheight=0.9, handletextpad=0.5, columnspacing=1.3, borderaxespad=0,
    )  # fmt: skip


def _curve(axes: Axes, values: np.ndarray) -> None:
    """A curve along the text; a long one is drawn faint, with its binned mean over it."""
    if len(values) <= 400:
        axes.plot(values, color=ACCENT, lw=1.1)
    else:
        axes.plot(values, color="#b9d3d9", lw=0.4, rasterized=True)
        mean, edges = bins(values[None], 160)
        axes.plot((edges[:-1] + edges[1:] - 1) / 2, mean[0], color=ACCENT, lw=1.3)
    axes.set_ylim(bottom=0)


def _values(axes: Axes, table: pd.DataFrame) -> None:
    """Norm of the first token's value against its sink score: values of sinks are small."""
    if "value_norm_first" not in table:
        axes.text(0.5, 0.5, "values were not recorded", ha="center", color=MUTED, fontsize=8, transform=axes.transAxes)
        return
    strong = table["alpha_first"] > EPSILON
    for chosen, colour in ((~strong, ACCENT), (strong, WARM)):
        axes.scatter(
            table.loc[chosen, "alpha_first"], table.loc[chosen, "value_norm_first"], s=16, color=colour, lw=0, alpha=0.8
        )
    axes.axhline(1, color=HAIRLINE, lw=0.8)
    axes.axvline(EPSILON, color=MUTED, lw=0.8, ls=(0, (4, 3)))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="mean weight on the first token", ylabel="norm of its value / mean of the others")


def _tokens(axes: Axes, tokens: pd.DataFrame, heads: int) -> None:
    """The tokens that are sinks over the whole text, with the number of heads."""
    rows = tokens.head(TOKENS)
    if rows.empty:
        axes.set_axis_off()
        axes.text(0, 0.9, f"none: no token has more than {percent(EPSILON)} in any head", color=MUTED, fontsize=8.5)
        return
    axes.barh(np.arange(len(rows)), rows["heads"], height=0.62, color=WARM, lw=0)
    names = [f"{tables.readable(row.token)}  ({row.position:,})" for row in rows.itertuples()]
    axes.set_yticks(np.arange(len(rows)), [n.replace("$", r"\$") for n in names])
    limits = {"ylim": (max(len(rows), 4) - 0.4, -0.6), "xlim": (0, max(2, 1.15 * rows["heads"].max()))}
    axes.set(xlabel=f"heads, of {heads:,}", **limits)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.tick_params(axis="y", length=0, labelsize=8, colors=INK)


def _sinks_sentence(data: xr.Dataset) -> str:
    found = Findings(data)
    if found.sinks is None:
        return "The first token has no sink score"
    parts = [f"{found.sinks.value} {found.sinks.label}{found.whole_clause}"]
    if "sink_mass" in data and (learned := float(np.nanmean(data["sink_mass"].values))) >= 0.01:
        parts.append(f"the learned sink takes {percent(learned)}")
    return ", ".join(parts)


def _along(axes: Axes, ranges: list[tuple[int, int]], share: np.ndarray, even: np.ndarray) -> None:
    """A line for each head: its weight on the first token, by range of query positions."""
    x = np.arange(len(ranges))
    for values in share.reshape(len(ranges), -1).T:
        axes.plot(x, values, color=WARM if values[0] > EPSILON else ACCENT, lw=0.9, alpha=0.55)
    axes.plot(x, np.nanmean(share, (1, 2)), color="black", lw=2, label="mean of all heads")
    axes.plot(x, np.nanmean(even, (1, 2)), color=MUTED, lw=0.9, ls=(0, (1, 1.5)), label="rows of even weights")
    reference_line(axes, EPSILON, "")
    axes.set_xticks(x, [f"{first:,}–{stop - 1:,}" for first, stop in ranges])
    axes.set(xlim=(-0.1, len(ranges) - 0.9), ylim=(0, _top(share)))
    axes.set_xlabel("position of the query")
    axes.yaxis.set_major_formatter(PERCENT)
    legend(axes, handletextpad=0.5, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)


def _top(shares: np.ndarray) -> float:
    """The upper end of the axis; heads across two sequences have no score, so that all values may be NaN."""
    return max([0.4, *(1.08 * shares[np.isfinite(shares)])])


def _states_sentence(mean: np.ndarray) -> str:
    start, peak, end = mean[0], int(np.nanargmax(mean)), mean[-1]
    if mean[peak] > max(start, end) + 0.05:
        beside = f"against {start:.2f} at the input and {end:.2f} at the end"
        return f"States of different tokens are most alike at depth {peak}: cosine {mean[peak]:.2f}, {beside}"
    if abs(end - start) < 0.05:
        return f"States of different tokens are as alike at the end as at the input: cosine {end:.2f}"
    way = "more" if end > start else "less"
    return f"States of different tokens become {way} alike with depth: from cosine {start:.2f} to {end:.2f}"
