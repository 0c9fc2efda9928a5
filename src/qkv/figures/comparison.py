"""Figure that compares two profiles: layer × head maps of the differences, and the heads that changed most."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from qkv.figures.layout import DIVERGING, Drawing, layer_by_head, place, plain, titled
from qkv.figures.style import ACCENT, INK, MUTED
from qkv.profiler.data.findings import head_name
from qkv.profiler.data.labels import STATISTICS, percent, target_change

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from qkv.profiler.comparison import Comparison

# From decrease to increase; equally dark at both ends, and distinguishable with every kind of colour blindness.
SHOWN = ("entropy", "sink", "local")
MIN_SCALE = {
    "%": 0.05,
    "nats": 0.1,
}  # smallest range of a colour scale, so that rounding errors do not look like changes
NAMED = 8  # heads that changed most


def comparison_figure(comparison: Comparison, group: str) -> Figure:
    """Maps of the differences in entropy, weight on the first token and local weight; below, the most changed heads.

    Blue is a decrease from a to b, orange an increase. All shares have the same scale.

    >>> import qkv
    >>> from qkv.profiler.comparison import compare
    >>> profile = qkv.profile("minilm", "The keeper kept two logbooks.", progress=False)
    >>> len(comparison_figure(compare(profile, profile), "self").axes)
    7
    """
    heads = comparison.heads(group)
    names = [name for name in SHOWN if heads[f"{name}_difference"].notna().any()]
    layers, columns = heads["layer"].nunique(), heads["head"].nunique()
    cell = min(0.3, 2.25 / columns, 4.6 / layers)
    wide, tall = max(cell * columns, 1.3), max(cell * layers, 0.9)
    left, top, gap, row = 0.72, 1.05, 0.85, 0.25
    most = heads.sort_values("change", ascending=False, kind="stable").head(NAMED)
    width = max(left + 3 * (wide + gap), 8.4)
    figure = Drawing(figsize=(width, top + tall + 0.9 + row * len(most) + 0.45))
    titled(figure, _sentence(heads), _subtitle(comparison, group))
    shares = [heads[f"{n}_difference"].abs().max() for n in names if STATISTICS[n].unit == "%"]
    for index, name in enumerate(names):
        x, unit = left + index * (wide + gap), STATISTICS[name].unit
        axes, bar = place(figure, x, top, wide, tall), place(figure, x + wide + 0.09, top, 0.08, tall)
        limit = np.nanmax([MIN_SCALE[unit], *(shares if unit == "%" else [heads[f"{name}_difference"].abs().max()])])
        _map(axes, bar, heads.pivot(index="layer", columns="head", values=f"{name}_difference"), name, limit)
        if index == 0:
            axes.set_ylabel("layer", fontsize=8, color=MUTED)
        axes.set_xlabel("head", fontsize=8, color=MUTED)
    _most(place(figure, left, top + tall + 0.9, width - left - 3.4, row * len(most)), most)
    return figure


def _map(axes: Axes, bar: Axes, values: pd.DataFrame, name: str, limit: float) -> None:
    label, unit = STATISTICS[name][:2]
    image = layer_by_head(axes, values, Normalize(-limit, limit), colours=DIVERGING)
    axes.set_title(label + (", % points" if unit == "%" else f", {unit}"), loc="left", fontsize=9, color=INK, pad=5)
    drawn = bar.figure.colorbar(image, cax=bar)
    drawn.outline.set_visible(False)
    drawn.locator = MaxNLocator(5)
    drawn.update_ticks()
    scale = 100 if unit == "%" else 1
    bar.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _signed(scale * value)))
    bar.tick_params(length=0, labelsize=6.5, colors=MUTED, pad=2)


def _most(axes: Axes, heads: pd.DataFrame) -> None:
    """One bar for each head: the share of its weight that moved, and its targets before and after."""
    places = np.arange(len(heads))
    axes.barh(places, 100 * heads["change"], height=0.5, color=ACCENT, lw=0)
    plain(axes)
    axes.set_ylim(len(heads) - 0.45, -0.55)
    axes.set_xlim(0, max(100 * float(heads["change"].max()), 1) * 1.02)
    axes.set_yticks(places, [head_name(row) for _, row in heads.iterrows()])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g} %"))
    axes.set_title(
        "Weight that moved to other tokens, most changed heads (bold: another target)",
        loc="left",
        fontsize=9,
        color=INK,
        pad=6,
    )
    for height, (_, row) in zip(places, heads.iterrows(), strict=True):
        words = target_change(row["goes_to_a"], row["goes_to_b"]).replace("$", r"\$")
        axes.annotate(
            words, (1, height), xycoords=axes.get_yaxis_transform(), xytext=(10, 0), textcoords="offset points",
            va="center", fontsize=7.5, color=INK, weight="bold" if row["moved"] else "normal", annotation_clip=False,
        )  # fmt: skip


def _sentence(heads: pd.DataFrame) -> str:
    if not heads["change"].any():
        return "No head attends to other tokens than before"
    moved, count = int(heads["moved"].sum()), f"{len(heads):,}"
    moved_heads = (
        "No head has another target"
        if not moved
        else f"{moved:,} of {count} heads {'has' if moved == 1 else 'have'} another target"
    )
    return f"{moved_heads}; in the median head {percent(heads['change'].median())} of the weight moved"


def _subtitle(comparison: Comparison, group: str) -> str:
    models, dtypes = (
        list(dict.fromkeys(str(p.attrs.get(key, "unknown")) for p in (comparison.a, comparison.b)))
        for key in ("model", "dtype")
    )
    names = " → ".join(m if len(m) <= 28 else f"{m[:27]}…" for m in models)
    data = comparison.groups[group]
    kind = "" if group == "self" else f"{group} attention · "
    length = f"{data['n_queries'].values.mean():,.0f} tokens"
    texts = f" · {data.sizes['text']} texts" if data.sizes["text"] > 1 else ""
    return f"{names} · {' → '.join(dtypes)} · {kind}{length}{texts} · blue: less, orange: more"


def _signed(value: float) -> str:
    return "0" if abs(value) < 1e-9 else f"{value:+.3g}".replace("-", "−")
