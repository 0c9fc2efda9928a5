"""`profile.plot`: matplotlib figures of a profile. Every method returns a `Figure`; pyplot is not used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from matplotlib.figure import Figure

from qkv.errors import InputError, nearest
from qkv.figures.comparison import similarity_figure
from qkv.figures.map import AFTER, StoredMap, alignment_figure, map_figure, overlay_figure
from qkv.figures.profiles import (
    entropy_figure,
    head_figure,
    overview_figure,
    position,
    received_figure,
    sink_figure,
    sinks_figure,
    states_figure,
    subtitle_of,
    types_figure,
)
from qkv.plot.given import of_text
from qkv.profiler.data import tables
from qkv.profiler.data.frames import columns_of

if TYPE_CHECKING:
    import xarray as xr

    from qkv.profiler.profiles import Profile

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

    def overview(self, text: int | None = None, group: str | None = None) -> Figure:
        """Six layer × head maps of the main statistics; averages over the texts unless `text` picks one."""
        data = self._data(group, text)
        heads = tables.head_table(data)
        names = tuple(name for name in SMALL_MULTIPLES if heads[name].notna().any())
        return overview_figure(self._name(), data, heads, names)

    def heads(self, statistic: str, text: int | None = None, group: str | None = None) -> Figure:
        """A layer × head map of a built-in or user-defined statistic; the mean over texts unless `text` picks one."""
        data = self._data(group, text)
        known = columns_of(data)
        if statistic not in known:
            raise InputError(
                f"statistic: got {statistic!r}; expected one of {', '.join(known)}{nearest(statistic, known)}"
            )
        return overview_figure(self._name(), data, tables.head_table(data), (statistic,))

    def received(self, text: int = 0, group: str | None = None) -> Figure:
        """Attention received by each token of one text: the mean over all heads, and over each layer."""
        return received_figure(self._name(), self._data(group, text))

    def entropy(self, text: int | None = None, group: str | None = None) -> Figure:
        """Entropy of every head by layer, compared with uniform attention."""
        return entropy_figure(self._name(), self._data(group, text))

    def sink(self, text: int | None = None, group: str | None = None) -> Figure:
        """The sink score of the first token: every head by layer, and its weight along the text."""
        return sink_figure(self._name(), self._data(group, text))

    def sinks(self, group: str | None = None) -> Figure:
        """Sink scores of every head on three kinds of text, norms of sink values, and the tokens that are sinks."""
        return sinks_figure(self._name(), self._profile.group(group))

    def types(self, group: str | None = None) -> Figure:
        """The type of each head as a layer × head map: `Profile.types` as a figure."""
        return types_figure(self._name(), self._profile.types(group))

    def states(self) -> Figure:
        """How similar the hidden states of different tokens are, by depth: whether they collapse to one direction.

        Mean cosine over all pairs of tokens (Ethayarajh 2019, arXiv:1909.00512); Dong et al. 2021, arXiv:2103.03404,
        show that attention without skip connections makes all states alike.
        """
        return states_figure(self._name(), self._profile.residual)

    def similarity(
        self, text: int | None = None, group: str | None = None, *, maps: Literal["weights", "pooled"] | None = None
    ) -> Figure:
        """Which heads have similar maps: `Profile.similarity` as a matrix, and as points that lie close if alike.

        Points are coloured by the type of head, and placed by classical multidimensional scaling, as in figure 6 of
        Clark et al. 2019 (arXiv:1906.04341).
        """
        subtitle = subtitle_of(self._name(), self._data(group, text))
        return similarity_figure(subtitle, self._profile.similarity(text, group, maps=maps), self._profile.types(group))

    def head(self, layer: int, head: int, text: int = 0, group: str | None = None) -> Figure:
        """One head: the destinations of its weight, and its curves along the text."""
        data = self._data(group, text)
        return head_figure(self._name(), data, *position(data, layer, head))

    def map(self, layer: int, head: int, text: int = 0, group: str | None = None) -> Figure:
        """The map of one head, query by key: all weights, or for a long text the largest and the mean in bins."""
        data = self._data(group, text)
        stored = StoredMap(self._name(), data.attrs["group"], data, position(data, layer, head))
        if (picture := stored.picture()) is None:
            longest = max(stored.n_queries, stored.n_keys)
            raise InputError(
                f"text: the profile holds no maps of text {text}, which has {longest} tokens; profile it with "
                f"map_tokens={longest} or more to store them"
            )
        return map_figure(stored, picture)

    def alignment(
        self, layer: int | None = None, head: int | None = None, text: int = 0, group: str | None = "cross"
    ) -> Figure:
        """The alignment of words: the source words (keys, across) to which each target word (query, down) attends.

        The mean of all heads, of the heads of one `layer`, or one `head` of it. In cross-attention a row is labelled
        with the word that its query predicts, the next one: the query "<s>" has the label of the first word.
        """
        data = self._data(group, text)
        found, special = of_text(data, text), frozenset(data.attrs["special_tokens"])
        subtitle, (of, weights) = subtitle_of(self._name(), data), found.mean(layer, head)
        return alignment_figure(subtitle, of, weights, _predicted(data), found.keys or [], special)

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
        of, weights = of_text(data, text).mean(layer, head)
        n_queries, n_keys = weights.shape
        chosen = list(range(n_queries)) if query is None else [query] if isinstance(query, int) else list(query)
        if not chosen or not all(0 <= at < n_queries for at in chosen):
            raise InputError(f"query: got {query}; expected positions from 0 to {n_queries - 1}")
        queries, others = _predicted(data), n_keys - grid[0] * grid[1]
        left_out = f" · {others} keys outside the grid" if others > 0 else ""
        subtitle = f"{subtitle_of(self._name(), data)}{left_out} · brightness is the weight"
        names = [queries[at] for at in chosen]
        return overlay_figure(subtitle, of, image, weights[chosen], grid, names, corners=corners)

    def _name(self) -> str:
        return str(self._profile.attrs.get("model", "model"))

    def _data(self, group: str | None, text: int | None) -> xr.Dataset:
        return self._profile.one_text(text, group).assign_attrs(group=group or self._profile.main)


def _predicted(data: xr.Dataset) -> list[str]:
    """Labels for the queries of one text: in cross-attention the word that each predicts, else their own token."""
    tokens = [str(name) for name in data["query_token"].values[0, : int(data["n_queries"][0])]]
    return [*tokens[1:], AFTER] if str(data.attrs["group"]).startswith("cross") else tokens
