"""Figures of a survey: means of all heads, differences between texts, histograms, and positions of sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from qkv.plot.layout import ACCENT, PERCENT, WARM, HeadMap, charts, colour_bar, head_maps, heat, place, plain, titled
from qkv.profiler.data.frames import percent
from qkv.profiler.data.tables import SINK_THRESHOLD
from qkv.profiler.surveys.accumulators import QUANTITIES, edges

if TYPE_CHECKING:
    from qkv.profiler.surveys.data import Survey

NEGLIGIBLE = 0.005  # a quantity that no head exceeds is not drawn
SMALL_MULTIPLES = ("sink_score", "previous", "self", "local", "distance", "entropy_ratio", "special", "delimiter")
NAMES = {"sink_score": "Sink score of the first token", "special": "Special tokens", "delimiter": "Delimiters"}


def heads(survey: Survey, group: str | None = None) -> Figure:
    """Layer × head maps of means over the corpus, one for each quantity that is not negligible."""
    table = survey.heads(group)
    own = [name for name in survey.quantities if name not in QUANTITIES]
    names = [name for name in (*SMALL_MULTIPLES, *own) if table[name].max() > NEGLIGIBLE]
    first = survey.findings(group)[0]
    title = f"{first.value} {first.label}"
    subtitle = f"{_about(survey)} · means over all queries; a sink is a score above {SINK_THRESHOLD}"
    maps = [HeadMap(table, name, _title(survey, name), Normalize(0, table[name].max())) for name in names]
    return head_maps(title, subtitle, maps)[0]


def texts(survey: Survey, group: str | None = None) -> Figure:
    """The entropy ratio of each head between texts: the median of the means of sequences, and their middle 90 %."""
    label = survey.quantities["entropy_ratio"].label
    table = survey.heads(group).sort_values("entropy_ratio_text_p50", kind="stable").reset_index(drop=True)
    low, middle, high = (table[f"entropy_ratio_text_p{p}"] for p in (5, 50, 95))
    spread = high - low
    title = f"{label}: in the median head, nine texts in ten lie within {spread.median():.2g} of one another"
    subtitle = f"{_about(survey)} · the middle 90 % of sequences and their median"
    figure, (axes,) = charts(title, subtitle, [7.2], 2.85)
    axes.vlines(table.index, low, high, color=ACCENT, alpha=0.35, lw=max(0.6, min(4.0, 400 / len(table))))
    axes.plot(table.index, middle, "o", ms=2.5, color=ACCENT)
    axes.set(xlabel="heads, in order of their median", ylabel=f"{label.lower()} (1 is uniform)")
    return figure


def distribution(survey: Survey, group: str | None = None) -> Figure:
    """The exact histogram of the distance over all queries, with a row for each head."""
    about, q = survey.quantities["distance"], list(survey.quantities).index("distance")
    layers = [layer for _, layer in sorted(survey.group(group).layers.items())]
    counts = np.concatenate([layer.added["histogram"][q] for layer in layers]).astype(float)
    counts = counts[:, : min(counts.shape[1], int(np.flatnonzero(counts.sum(0)).max(initial=0)) + 2)]
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    tall = min(8.0, max(1.6, 0.1 * len(share)))
    means = survey.heads(group)["distance"]
    title = f"Mean {about.label.lower()} of a head: from {means.min():.2g} to {means.max():.3g} {about.units}"
    figure = titled(8.2, tall + 1.75, title, f"{_about(survey)} · share of each head's queries, one row per head")
    axes = place(figure, 0.75, 1.05, 6.4, tall)
    picture = heat(axes, np.sqrt(share), Normalize(0))
    borders = edges(about)
    ticks = np.linspace(0, counts.shape[1], 6).round().astype(int)
    axes.set_xticks(ticks - 0.5, [f"{borders[t]:.2g}" if borders[t] < 10 else f"{borders[t]:,.0f}" for t in ticks])
    ends = np.cumsum([layer.heads for layer in layers])
    axes.set_yticks(
        ends - [layer.heads for layer in layers] - 0.5, [str(n) for n in sorted(survey.group(group).layers)]
    )
    axes.set(xlabel=f"{about.label.lower()} ({about.units})", ylabel="layer, with a row for each head")
    plain(axes)
    colour_bar(picture, lambda root: f"{100 * root * root:.0f} %")
    return figure


def sinks(survey: Survey, group: str | None = None) -> Figure:
    """The share of texts and heads in which each of the first 64 keys is a sink."""
    table = survey.sinks(group)
    known = table["share"].notna().any()
    first, others = percent(table["share"].iloc[0]), percent(table["share"].iloc[1:].max())
    title = f"The first token is a sink in {first} of texts × heads, no other in more than {others}"
    title = title if known else "No text has 64 tokens"
    subtitle = f"{_about(survey)} · sink score above {SINK_THRESHOLD} over the first 64 tokens"
    figure, (axes,) = charts(title, subtitle, [7.2], 2.5)
    if known:
        axes.bar(table["key"], table["share"], color=WARM, width=0.8)
        axes.yaxis.set_major_formatter(PERCENT)
    axes.set(xlabel="key, counted from the beginning of the text", ylabel="of texts × heads")
    return figure


FIGURES: dict[str, Callable[..., Figure]] = {draw.__name__: draw for draw in (heads, texts, distribution, sinks)}


def _title(survey: Survey, name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    about = survey.quantities[name]
    return about.label if about.units == "1" else f"{about.label}, {about.units}"


def _about(survey: Survey) -> str:
    return f"{survey.definition['model']} on {survey.record['tokens']:,} tokens"
