"""What ablation, eviction, attention rollout and over-mixing found."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import cycle
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from qkv.plot.layout import (
    ACCENT,
    HAIRLINE,
    INK,
    MUTED,
    PERCENT,
    WARM,
    HeadMap,
    along,
    chart,
    charts,
    drawable,
    head_map,
    head_maps,
    heat,
    legend,
    map_sides,
    number_ticks,
    place,
    reference_line,
    room_below,
    text_figure,
    titled,
    token_label,
    token_strip,
    write_cells,
)
from qkv.profiler.data import tables
from qkv.profiler.data.frames import counted, layers_and_heads, percent, signed

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from qkv.profiler.analyses.ablation import Ablation
    from qkv.profiler.analyses.eviction import Eviction
    from qkv.profiler.analyses.sources import Sources


PARTS = ("#b5493a", "#26748f", "#5b7f2b", "#b8860b", "#7c4a86")
REMOVED = {
    "heads": "without the head", "means": "with the head's mean over tokens", "sinks": "without the head's sink",
    "values": "without the first token's value",
}  # fmt: skip


def ablation_figure(ablation: Ablation) -> Figure:
    """A layer × head map of the change of the loss, orange where it rises, and beside it bars without whole layers."""
    table, attrs = ablation.table, ablation.attrs
    layers, heads = table["layer"].nunique(), table["head"].nunique()
    cell = min(0.46, 5.2 / heads, 5.0 / layers)
    wide, tall = map_sides((layers, heads), cell)
    beside = max(1.8, 7.4 - 0.65 - wide - 1.3)
    worst = table.loc[table["delta_nats"].idxmax()]
    removed = REMOVED[attrs["what"]]
    name, rise = f"{int(worst['layer'])}.{int(worst['head'])}", f"{worst['delta_nats']:+.3f}"
    title = f"Head {name} matters most: {rise} nats a token {removed}"
    if worst["delta_nats"] <= 0:
        title = f"The loss rises for no head: at most {rise} nats a token {removed}"
    together = f"all heads of these layers at once {ablation.all_nats - ablation.nats:+.3f}"
    head = f"{attrs['model']} · {attrs['tokens']:,} tokens · loss {ablation.nats:.3f} nats a token · {together}"
    figure = titled(0.65 + wide + 1.0 + beside + 0.3, 1.1 + tall + 0.5, title, head)
    largest = max(1e-6, float(table["delta_nats"].abs().max()))
    shown = HeadMap(table, "delta_nats", "change of the loss, nats per token", Normalize(-largest, largest))
    axes = place(figure, 0.65, 1.1, wide, tall)
    head_map(axes, shown)
    bars = chart(figure, 0.65 + wide + 1.0, 1.1, beside, tall, "all heads of the layer at once")
    bars.barh(range(layers), ablation.layers["delta_nats"], height=0.7, color=WARM)
    bars.set(ylim=axes.get_ylim(), yticks=axes.get_yticks(), yticklabels=[], xlabel="nats per token")
    bars.axvline(0, color=HAIRLINE, linewidth=0.8)
    return figure


LINES = {"window": ("#26748f", "s"), "sinks": (WARM, "o"), "heavy": ("#7c4a86", "^")}
OTHERS = (("#5b7f2b", "D"), ("#a05195", "v"), ("#4d5b6a", "P"), ("#b8860b", "X"), ("#b5493a", "<"), ("#8a9b3f", ">"))
"""Colours and markers of other policies, in their order."""
BESIDE: dict[str, Any] = {"fontsize": 8, "labelcolor": INK, "loc": "upper left",
                          "bbox_to_anchor": (1.05, 1.02)}  # fmt: skip


def budget_figure(eviction: Eviction) -> Figure:
    """Cost by budget, a line for each policy: the increase of the loss, if it was measured, and attention lost."""
    mean = eviction.mass.groupby(["policy", "budget"], sort=False)["mass_lost"].mean().reset_index()
    panels = [(mean, "mass_lost", "Attention on evicted keys, mean of all heads")]
    subtitle = _eviction_subtitle(eviction)
    if eviction.loss is not None:
        label = "Increase of the loss, nats per token" + " (bars: 95 %)" * (eviction.attrs["texts"] > 1)
        panels.insert(0, (eviction.loss[eviction.loss["policy"] != "full"], "delta_nats", label))
        subtitle += f" · loss with all keys {eviction.loss['nats'].iloc[0]:.2f} nats"
    wides = [4.0, 4.0] if len(panels) > 1 else [6.2]
    many = len(eviction.attrs["policies"]) > 4  # too many for a legend between the lines
    figure, drawn = charts(
        _eviction_sentence(*panels[0][:2]), subtitle, wides, 2.75, [label for *_, label in panels],
        right=4.2 if many else 0.5,
    )  # fmt: skip
    for axes, (table, column, _) in zip(drawn, panels, strict=True):
        _lines(axes, table, column, eviction.attrs["policies"])
    drawn[-1].yaxis.set_major_formatter(PERCENT)
    if many:
        legend(drawn[-1], **BESIDE)
    else:
        legend(drawn[0], fontsize=8, labelcolor=INK, loc="upper right", borderaxespad=0.1)
    return figure


def needle_figure(found: pd.DataFrame) -> Figure:
    """The loss of the answer for a hidden fact by budget, a line for each policy, from `qkv.profiler.needle`."""
    by = found.groupby(["policy", "budget"], sort=False)[["nats", "right"]].mean().reset_index()
    full = found[found["policy"] == "full"]
    best = by.sort_values(["right", "nats"], ascending=[False, True]).iloc[0]
    title = f"“{best['policy']}” with {best['budget']:,} keys finds {percent(best['right'])} of the hidden facts"
    whole = f"with all keys {percent(full['right'].mean())}, {full['nats'].mean():.2f} nats"
    subtitle = f"{found.attrs['model']} · a fact hidden in {found.attrs['tokens']:,} tokens · {whole}"
    figure, (axes,) = charts(title, subtitle, [4.6], 2.75, ["Loss of the answer, nats per token"], right=4.4)
    _lines(axes, by, "nats", found.attrs["policies"])
    reference_line(axes, float(full["nats"].mean()), "all keys")
    legend(axes, **BESIDE)
    return figure


def heads_figure(eviction: Eviction) -> Figure:
    """The attention that each head loses at the smallest budget: a layer × head map for each policy."""
    budget = eviction.mass["budget"].min()
    table = eviction.mass[eviction.mass["budget"] == budget]
    worst = table.loc[table["mass_lost"].idxmax()]
    title = (
        f"With {budget} keys, head {worst['layer']}.{worst['head']} loses {percent(worst['mass_lost'])} "
        f"of its attention to “{worst['policy']}”"
    )
    subtitle = f"share of each head's attention on evicted keys · {_eviction_subtitle(eviction)}"
    norm = Normalize(0, max(0.1, float(table["mass_lost"].max())))
    by_policy = table.groupby("policy", sort=False)
    maps = [
        HeadMap(rows, "mass_lost", f"{policy}, mean {percent(rows['mass_lost'].mean())}", norm, percent=True)
        for policy, rows in by_policy
    ]
    return head_maps(title, subtitle, maps)[0]


def _lines(axes: Axes, table: pd.DataFrame, column: str, meanings: dict[str, str]) -> None:
    others = cycle(OTHERS)
    looks = {policy: LINES.get(policy) or next(others) for policy in meanings}
    labels = {policy: f"{policy}: {meaning}" for policy, meaning in meanings.items()}
    budgets = sorted(int(b) for b in set(table["budget"]))
    ends = table[[name for name in (column, "low", "high") if name in table]]
    for at, (policy, rows) in enumerate(table.groupby("policy", sort=False)):
        colour, marker = looks[str(policy)]
        budget = rows["budget"].astype(float)
        if "low" in table:
            budget *= 2 ** (0.03 * (at - (len(meanings) - 1) / 2))  # beside one another
            axes.vlines(budget, rows["low"], rows["high"], color=colour, lw=1, alpha=0.6)
        style: dict[str, Any] = {"color": colour, "marker": marker, "ms": 5, "lw": 1.6}
        axes.plot(budget, rows[column], **style, label=labels[str(policy)], clip_on=False, zorder=3)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(budgets))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("keys cached in each layer")
    low, high = float(ends.min(axis=None)), float(ends.max(axis=None))
    axes.set_ylim(min(0.0, low) - (0.03 * (high - low) if low < 0 else 0), max(high, 1e-6) * 1.12)
    axes.axhline(0, color=MUTED, lw=0.6)


def _eviction_sentence(table: pd.DataFrame, column: str) -> str:
    """The title: the policies with the lowest and the highest cost at the smallest budget."""
    least = table[table["budget"] == table["budget"].min()].sort_values(column)

    best, worst = least.iloc[0], least.iloc[-1]
    if column == "mass_lost":
        costs, verb, what = least[column].map(percent), "loses", "of the attention"
    else:
        costs, verb, what = least[column].map("{:.2f} nats".format), "costs", "per token"
    title = f"With {best['budget']} keys, “{best['policy']}” {verb} {costs.iloc[0]} {what}"
    return title if len(least) == 1 else f"{title}, “{worst['policy']}” {costs.iloc[-1]}"


def _eviction_subtitle(eviction: Eviction) -> str:
    attrs = eviction.attrs
    layers, heads = eviction.mass["layer"].nunique(), eviction.mass["head"].nunique()
    texts = f"{attrs['tokens']:,} tokens" + (f" in {attrs['texts']} texts" if attrs["texts"] > 1 else "")
    return f"{attrs['model']} · {layers_and_heads(layers, heads)} · {texts}"


def flow_figure(rollout: xr.DataArray, chosen: int = 0) -> Figure:
    """The rollout of one chosen token of a text, from `rollout`: shares along the text, and by layer."""
    n = int(rollout["n_tokens"].values[0])
    by_depth = rollout.values[0, chosen, :, :n]
    tokens, position = rollout["token_name"].values[0, :n], int(rollout["chosen_position"].values[0, chosen])
    backward = rollout.attrs["of"] == "queries"
    share = by_depth[0 if backward else -1]
    positive = by_depth[by_depth > 0]
    low = max(float(np.quantile(positive, 0.05)), 1e-6)
    norm = LogNorm(low, max(float(by_depth.max()), 10 * low))  # logarithmic: a token's own share exceeds all others
    title, subtitle = _flow_sentence(share, tokens, position, backward), _flow_subtitle(rollout, n)
    figure, curve, strip = text_figure(title, subtitle, tokens, share, by_depth, norm, "token")
    reference_line(curve, 1 / n if backward else float(share.mean()), "equal\nshare" if backward else "mean")
    curve.set_ylabel("share of its final state\nfrom each token" if backward else "share of each token's\nfinal state")
    top = len(by_depth) - 1  # the embeddings are at the bottom
    step = max(1, top // 6)
    strip.set_yticks([*range(0, top, step), top], ["embeddings", *map(str, range(step, top, step)), "final"])
    strip.set_ylabel("after layer")
    return figure


def _flow_sentence(share: np.ndarray, tokens: np.ndarray, position: int, backward: bool) -> str:
    others = share.copy()
    others[position] = -1
    top = int(others.argmax())
    here, there = (f"{_quoted(tokens[at])} (token {at:,})" for at in (position, top))
    if others[top] <= 0:
        return f"The final state of {here} is all its own" if backward else f"{here} takes part in no token but itself"
    if backward:
        return (
            f"{percent(share[position])} of the final state of {here} is its own; {percent(share[top])} is from {there}"
        )
    return (
        f"{percent(share.mean())} of the average final state is from {here}; {percent(share[top])} of that of {there}"
    )


def _quoted(token: str) -> str:
    label = token_label(token)
    return label if label.startswith("“") else f"“{label}”"


def _flow_subtitle(rollout: xr.DataArray, n: int) -> str:
    group = rollout.attrs["group"]
    kind = "" if group == "self" else f" · {group} attention"
    layers = rollout.sizes["depth"] - 1
    by = {"values": " by weights times norms of values", "without-first": " without the first token"}
    what = f"attention rollout{by.get(rollout.attrs['by'], '')}, residual weight {rollout.attrs['residual']:g}"
    rest = f"{what} · {layers} layers · {n:,} tokens"
    return f"{rollout.attrs['model']}{kind} · {rest}"


FAINTEST = 1e-3  # relative to the norm of a hidden state; smaller movements are drawn as none


def answer_figure(shares: xr.DataArray, names: Sequence[str], model: str) -> Figure:
    """What generated tokens attend to, by layer and by token: stacked shares of the parts of the text.

    `shares` are those of `qkv.profiler.analyses.answers.answer_shares`, `names` those of the generated tokens.
    """
    mean = shares.mean(("layer", "head", "token"))
    largest = int(mean.values.argmax())
    title = (
        f"{percent(float(mean[largest]))} of the attention of new tokens goes to the {shares['part'].values[largest]}"
    )
    subtitle = f"{model} · {counted(len(names), 'new token')} · mean shares of the rows that chose them"
    figure, drawn = charts(title, subtitle, [4.3, 4.3], 2.9)
    panels = (("head", "token"), "layer"), (("layer", "head"), "token")
    for axes, (others, along_) in zip(drawn, panels, strict=True):
        at, values = np.arange(shares.sizes[along_]), shares.mean(others).transpose("part", along_).values
        axes.stackplot(at, values, labels=shares["part"].values, colors=PARTS, step="mid")
        step = -(-len(at) // 14)
        labels = [token_label(name) for name in names] if along_ == "token" else shares["layer"].values
        axes.set_xticks(at[::step], labels[::step], rotation=45 if along_ == "token" else 0, fontsize=7)
        axes.set(xlim=(-0.5, len(at) - 0.5), ylim=(0, 1))
        axes.yaxis.set_major_formatter(PERCENT)
        axes.set_title(f"by {along_}", loc="left", fontsize=9, color=INK, pad=20)
    legend(axes, loc="lower right", bbox_to_anchor=(1, 1), ncols=5)
    return figure


def sources_figure(found: Sources) -> Figure:
    """The share of each passage in each sentence of an answer, and beside it the effect of hiding the passage."""
    table, sentences = found.table, found.sentences["text"]
    panels = [("share", "Share of attention, heads that read passages", Normalize(0, 1), lambda x: f"{100 * x:.0f}")]
    if "hidden" in table:
        largest = max(1.0, float(table["hidden"].abs().max()))
        nats = "Rise of the sentence's loss without it, nats"
        panels.append(("hidden", nats, Normalize(-largest, largest), partial(signed, digits=1)))
    names = [shorten(drawable(text), 44, placeholder=" …") for text in sentences]
    cell = min(0.42, 4.2 / len(found.passages))
    wide, tall, left = cell * len(found.passages), 0.42 * len(names), 3.1
    read = int((found.sentences["read"] >= 0).sum())
    title = f"{read} of {counted(len(names), 'sentence')} {'was' if read == 1 else 'were'} read from a passage"
    step = max(wide, 3.2) + 0.9
    width = left + step * len(panels)
    figure = titled(width, 1.35 + tall, title, f"{found.model} · {shorten(found.question, 90, placeholder=' …')}")
    for at, (column, label, norm, written) in enumerate(panels):
        axes = place(figure, left + at * step, 0.95, wide, tall, label)
        image = heat(axes, table.pivot(index="sentence", columns="passage", values=column).to_numpy(), norm)
        write_cells(axes, image, written)
        number_ticks(axes.xaxis, range(1, len(found.passages) + 1))
        axes.set_yticks(range(len(names)), names if at == 0 else [""] * len(names), fontsize=8)
        axes.set_xlabel("passage")
        axes.tick_params(length=0, labelsize=8, colors=MUTED)
    return figure


def mixing_figure(data: xr.Dataset, name: str) -> Figure:
    """The result of `mixing` on one text: the response at every depth and token, and its mean over later tokens.

    >>> from qkv.profiler.analyses.mixing import mixing
    >>> figure = mixing_figure(mixing("qkv-mini", "def mean(values):", position=3), "qkv-mini")
    >>> len(figure.axes)
    3
    """
    one = data.isel(text=0)
    moved = one["response"].values
    moved = moved[:, np.isfinite(moved).any(0)]
    depths, n = moved.shape
    tall = min(0.3 * depths, 4.6) if depths > 3 else 0.9
    tokens = one["token_name"].values[:n]
    height = 1.05 + tall + max(0.8, room_below(tokens, 5.45))
    figure = titled(9.6, height, _mixing_sentence(one), _mixing_subtitle(one, name))
    heat = place(figure, 0.72, 1.05, 5.45, tall, "Movement of each token, share of its norm")
    curve = chart(figure, 7.3, 1.05, 2.0, tall, "Mean of later tokens")

    most = max(float(np.nanmax(moved)), 2 * FAINTEST)
    token_strip(heat, moved, LogNorm(FAINTEST, most), under="white", extend=0.06)
    along(heat, tokens, "token")
    heat.spines[:].set_color(HAIRLINE)

    curve.plot(100 * one["later"].values, np.arange(depths), color=ACCENT, lw=1.3, marker="o", ms=3)
    curve.set_xlim(left=0)
    curve.xaxis.set_major_locator(MaxNLocator(4))
    curve.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g} %"))
    for axes in (heat, curve):  # the depth axis, downwards as in all figures, with the embeddings at the top
        number_ticks(axes.yaxis, ["emb.", *range(1, depths)], 12)
        axes.set(ylim=(depths - 0.5, -0.5), ylabel="after layer" if axes is heat else "")
    return figure


def _mixing_sentence(one: xr.Dataset) -> str:
    later = float(one["later"].values[-1])
    if np.isnan(later):
        return "No token comes after the changed one"
    return f"A changed token moves later ones by {percent(later)} of their norm"


def _mixing_subtitle(one: xr.Dataset, name: str) -> str:
    position, count = one.attrs["position"], one.sizes["replacement"]
    place = int(np.flatnonzero(one["token"].values == position)[0])
    token = tables.readable(str(one["token_name"].values[place]))
    kind = "without the first token" if one.attrs["without_first"] else "whole text"
    others = f"mean of {count} other tokens in its place" if count > 1 else "one other token in its place"
    return f"{name} · “{token}” at position {position} changed · {others} · {kind}"
