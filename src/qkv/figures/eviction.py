"""Figures of the cost of cache eviction policies: by budget, and for each head."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from qkv.errors import InputError
from qkv.figures.layout import PERCENT, Drawing, colour_bar, layer_by_head, place, plain, titled
from qkv.figures.style import INK, MUTED, WARM
from qkv.profiler.data.labels import layers_and_heads, percent

if TYPE_CHECKING:
    import pandas as pd

    from qkv.profiler.analyses.eviction import Eviction

LINES = {"window": ("#26748f", "s"), "sinks": (WARM, "o"), "heavy": ("#7c4a86", "^")}
OTHERS = (("#5b7f2b", "D"), ("#a05195", "v"), ("#4d5b6a", "P"), ("#b8860b", "X"))
"""Colours and markers of other policies, in their order."""


def budget_figure(eviction: Eviction) -> Figure:
    """Cost by budget, a line for each policy: the increase of the loss, if it was measured, and attention lost."""
    mean = eviction.mass.groupby(["policy", "budget"], sort=False)["mass_lost"].mean().reset_index()
    panels = [(mean, "mass_lost", "Attention on evicted keys, mean of all heads")]
    if eviction.loss is not None:
        panels.insert(
            0, (eviction.loss[eviction.loss["policy"] != "full"], "delta_nats", "Increase of the loss, nats per token")
        )
    wide, gap = (4.0, 0.95) if len(panels) > 1 else (6.4, 0)
    figure = Drawing(figsize=(max(0.85 + len(panels) * (wide + gap), 7.4), 4.5))
    whole = "" if eviction.loss is None else f" · loss with all keys {eviction.loss['nats'].iloc[0]:.2f} nats"
    titled(figure, _sentence(eviction, mean), _subtitle(eviction) + whole)
    for index, (table, column, label) in enumerate(panels):
        axes = place(figure, 0.75 + index * (wide + gap), 1.2, wide, 2.75)
        plain(axes)
        axes.set_title(label, loc="left", fontsize=9, color=INK, pad=7)
        _lines(axes, table, column, eviction.attrs["policies"])
        if column == "mass_lost":
            axes.yaxis.set_major_formatter(PERCENT)
        if index == 0:
            axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="upper right", borderaxespad=0.1)
    return figure


def heads_figure(eviction: Eviction, budget: int | None = None) -> Figure:
    """The attention that each head loses at one budget (the smallest if None): a layer × head map for each policy.

    Raises:
        InputError: for a budget that was not measured.
    """
    budgets = sorted(set(eviction.mass["budget"]))
    budget = budgets[0] if budget is None else budget
    if budget not in budgets:
        raise InputError(f"budget is {budget}, expected one of {', '.join(map(str, budgets))}")
    table = eviction.mass[eviction.mass["budget"] == budget]
    policies = list(dict.fromkeys(table["policy"]))
    layers, heads = table["layer"].nunique(), table["head"].nunique()
    cell = min(0.46, 3.4 / heads, 4.6 / layers)
    wide, tall, gap = cell * heads, cell * layers, 0.45
    width = max(0.65 + len(policies) * (wide + gap) + 0.5, 7.4)
    figure = Drawing(figsize=(width, 1.1 + tall + 0.5))
    worst = table.loc[table["mass_lost"].idxmax()]
    title = (
        f"With {budget} keys, head {worst['layer']}.{worst['head']} loses {percent(worst['mass_lost'])} "
        f"of its attention to “{worst['policy']}”"
    )
    titled(figure, title, f"share of each head's attention on evicted keys · {_subtitle(eviction)}")
    norm = Normalize(0, max(0.1, float(table["mass_lost"].max())))
    for index, policy in enumerate(policies):
        axes = place(figure, 0.65 + index * (wide + gap), 1.1, wide, tall)
        values = table[table["policy"] == policy].pivot(index="layer", columns="head", values="mass_lost")
        image = layer_by_head(axes, values, norm, ticks=12, written=lambda value: f"{100 * value:.0f}")
        mean = values.to_numpy().mean()
        axes.set_title(f"{policy}, mean {percent(mean)}", loc="left", fontsize=9, color=INK, pad=5)
        axes.set_xlabel("head", fontsize=8, color=MUTED)
        if index == 0:
            axes.set_ylabel("layer", fontsize=8, color=MUTED)
    right = 0.65 + len(policies) * (wide + gap) - gap + 0.1
    colour_bar(place(figure, right, 1.1, 0.08, tall), image, "%")
    return figure


def _lines(axes: Axes, table: pd.DataFrame, column: str, meanings: dict[str, str]) -> None:
    others = cycle(OTHERS)
    looks = {policy: LINES.get(policy) or next(others) for policy in meanings}
    labels = {policy: f"{policy}: {meaning}" for policy, meaning in meanings.items()}
    budgets = sorted(int(b) for b in set(table["budget"]))
    for policy, rows in table.groupby("policy", sort=False):
        colour, marker = looks[str(policy)]
        budget = rows["budget"].astype(float)
        style: dict[str, Any] = {"color": colour, "marker": marker, "ms": 5, "lw": 1.6}
        axes.plot(budget, rows[column], **style, label=labels[str(policy)], clip_on=False, zorder=3)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(budgets))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("keys cached in each layer", fontsize=8, color=MUTED)
    low, high = float(table[column].min()), float(table[column].max())
    axes.set_ylim(min(0.0, low) - (0.03 * (high - low) if low < 0 else 0), max(high, 1e-6) * 1.12)
    axes.axhline(0, color=MUTED, lw=0.6)


def _sentence(eviction: Eviction, mean: pd.DataFrame) -> str:
    """The title: the policies with the lowest and the highest cost at the smallest budget."""
    if eviction.loss is None:
        table, column = mean, "mass_lost"
    else:
        table, column = eviction.loss[eviction.loss["policy"] != "full"], "delta_nats"
    least = table[table["budget"] == table["budget"].min()].sort_values(column)

    def cost(row: Any) -> str:
        return percent(row[column]) if column == "mass_lost" else f"{row[column]:.2f} nats"

    best, worst = least.iloc[0], least.iloc[-1]
    verb = "loses" if column == "mass_lost" else "costs"
    what = " of the attention" if column == "mass_lost" else " per token"
    title = f"With {best['budget']} keys, “{best['policy']}” {verb} {cost(best)}{what}"
    return title if len(least) == 1 else f"{title}, “{worst['policy']}” {cost(worst)}"


def _subtitle(eviction: Eviction) -> str:
    attrs = eviction.attrs
    layers, heads = eviction.mass["layer"].nunique(), eviction.mass["head"].nunique()
    texts = f"{attrs['tokens']:,} tokens" + (f" in {attrs['texts']} texts" if attrs["texts"] > 1 else "")
    return f"{attrs['model']} · {layers_and_heads(layers, heads)} · {texts}"
