"""A figure of an ablation: the rise of the loss without each head, by layer and head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure

from qkv.figures.layout import Drawing, colour_bar, layer_by_head, place, titled
from qkv.figures.style import INK, MUTED

if TYPE_CHECKING:
    from qkv.profiler.ablation_run import Ablation

DIVERGING = LinearSegmentedColormap.from_list("qkv diverging", ("#26748f", "#f3f6f5", "#b5493a"))
REMOVED = {"heads": "without the head", "means": "with the head's mean over tokens", "sinks": "without the head's sink"}


def ablation_figure(ablation: Ablation) -> Figure:
    """A layer × head map of the change of the loss; red where the loss rises, blue where it falls."""
    table, attrs = ablation.table, ablation.attrs
    values = table.pivot(index="layer", columns="head", values="delta_nats")
    layers, heads = values.shape
    cell = min(0.46, 5.2 / heads, 5.0 / layers)
    wide, tall = cell * heads, cell * layers
    figure = Drawing(figsize=(max(0.65 + wide + 0.9, 7.4), 1.1 + tall + 0.5))
    worst = table.loc[table["delta_nats"].idxmax()]
    removed = REMOVED[attrs["what"]]
    name, rise = f"{int(worst['layer'])}.{int(worst['head'])}", f"{worst['delta_nats']:+.3f}"
    title = f"Head {name} matters most: {rise} nats a token {removed}"
    if worst["delta_nats"] <= 0:
        title = f"The loss rises for no head: at most {rise} nats a token {removed}"
    titled(figure, title, f"{attrs['model']} · {attrs['tokens']:,} tokens · loss {ablation.nats:.3f} nats a token")
    largest = max(1e-6, float(table["delta_nats"].abs().max()))
    axes = place(figure, 0.65, 1.1, wide, tall)
    written = _written if cell > 0.4 else None
    image = layer_by_head(
        axes, values, TwoSlopeNorm(0, -largest, largest), ticks=12, written=written, colours=DIVERGING
    )
    axes.set_title("change of the loss, nats per token", loc="left", fontsize=9, color=INK, pad=5)
    axes.set_xlabel("head", fontsize=8, color=MUTED)
    axes.set_ylabel("layer", fontsize=8, color=MUTED)
    colour_bar(place(figure, 0.65 + wide + 0.1, 1.1, 0.08, tall), image, "nats")
    return figure


def _written(value: float) -> str:
    text = f"{value:.2f}".replace("-", "−")
    return "0" if text in ("0.00", "−0.00") else text.replace("0.", ".")
