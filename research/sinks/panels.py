"""The panels of the figure of a study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.profiler.capture.residual import TIMES_MEDIAN
from qkv_lab import draw
from research.sinks.criteria import SINK, geometric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMED = 8
"""Most heads whose lines have names."""
Found = Mapping[str, Any]


def alpha_of_heads(axes: Axes, found: Found) -> None:
    alpha = np.array([[*row, *[np.nan] * (max(map(len, found["alpha"])) - len(row))] for row in found["alpha"]])
    draw.heatmap(axes, np.nan_to_num(alpha), vmax=1)
    if alpha.size <= 100:
        for (layer, head), value in np.ndenumerate(alpha):
            colour = "white" if value > 0.5 else draw.INK
            axes.text(head, layer, f"{100 * value:.0f}", ha="center", va="center", size=7, color=colour)
    axes.set(xlabel="head", ylabel="layer", aspect="auto", xticks=_few(alpha.shape[1]), yticks=_few(alpha.shape[0]))
    axes.grid(visible=False)
    _title(axes, "Weight on the first token (%)")


def weights(axes: Axes, texts: Sequence[Found]) -> None:
    has = [text for text in texts if text["sink"]]
    _dots(axes, "Sink heads on other texts", "weight on the first token", {
        "as it is": [mean(text["sink"]) for text in has],
        "random\nfirst token": [mean(text["other_first"]) for text in has],
        "own first\ntoken": [text["own_first"] for text in has if "own_first" in text],
        "random\ntokens": [text["random"] for text in has],
        "untrained\n(largest)": [text["untrained"]["largest"] for text in has],
    })  # fmt: skip
    axes.axhline(SINK, color=draw.MUTED, linewidth=0.9, linestyle="--")


def norms(axes: Axes, texts: Sequence[Found]) -> None:
    has = [text["first_key"] for text in texts if text["sink"]]
    columns: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {
        "norm of value\nover others": ("value_norm", geometric),
        "norm of key\nover others": ("key_norm", geometric),
        "queries whose\nnearest key\nis the first": ("nearest", mean),
    }
    _dots(axes, "First token of the sink heads", "ratio, or share", {
        label: [average([head[name] for head in heads]) for heads in has]
        for label, (name, average) in columns.items()
    }, colour=draw.COLOURS[2])  # fmt: skip
    axes.axhline(1, color=draw.MUTED, linewidth=0.9, linestyle="--")


def magnitudes(axes: Axes, texts: Sequence[Found]) -> None:
    depths = range(len(texts[0]["magnitudes"]))
    lines = {
        name: np.array([[at[part] / at["median"] for at in text["magnitudes"]] for text in texts])
        for name, part in {"first token": "first", "other tokens": "others"}.items()
    }
    draw.curves(axes, depths, lines, markers=True)
    axes.axhline(TIMES_MEDIAN, color=draw.MUTED, linewidth=0.9, linestyle="--")
    axes.set(xlabel="depth (0: embeddings)", ylabel="largest over median magnitude", yscale="log")
    axes.set_xticks(_few(len(depths)))
    axes.set_ylim(top=5 * max(TIMES_MEDIAN, *(float(line.max()) for line in lines.values())))
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    _title(axes, f"Magnitudes (massive above {TIMES_MEDIAN:,.0f})")


def peaks(axes: Axes, texts: Sequence[Found]) -> None:
    columns = {
        "as it is": "kept",
        "peaks: their\nmean": "mean",
        "peaks:\nzero": "zero",
        "random\ndimensions": "control",
    }
    found = {label: [text["peaks"][name] for text in texts if "peaks" in text] for label, name in columns.items()}
    embedded = {"also of the\nembedding": [text["all_peaks"] for text in texts if "all_peaks" in text]}
    _dots(axes, "Sink heads after peaks are replaced", "weight on the first token", {**found, **embedded})


def moved(axes: Axes, texts: Sequence[Found]) -> None:
    pairs = [(text["moved"]["with"], text["moved"]["without"]) for text in texts if "moved" in text]
    _title(axes, "Other tokens, if one is changed")
    if not pairs:
        _empty(axes, "no sink head")
        return
    _lines(axes, dict(enumerate(pairs)), draw.COLOURS[1])
    axes.set_xticks([0, 1], ["with the sink", "without the sink"])
    axes.set(ylabel="movement, relative to their norm")


def cost(axes: Axes, texts: Sequence[Found]) -> None:
    costs = [text["cost"] for text in texts if "cost" in text]
    loss = bool(costs) and "kept" in costs[0]
    names = {"masked": "first key\nmasked", "value zero": "its value\nzero", "both": "both"}
    _dots(
        axes,
        "Sink heads without the sink",
        "rise of the loss (nats)" if loss else "change of the last states",
        {label: [one[name] - one.get("kept", 0.0) for one in costs] for name, label in names.items()},
        colour=draw.COLOURS[4],
    )
    if loss:
        axes.axhline(0, color=draw.MUTED, linewidth=0.9)


def added(axes: Axes, texts: Sequence[Found]) -> None:
    found: dict[str, list[tuple[float, float]]] = {}
    for text in texts:
        for one in text["added"]:
            found.setdefault(f"{one['layer']}.{one['head']}", []).append((one["light"], one["heavy"]))
    _title(axes, "What a head adds, over the residual")
    if not found:
        _empty(axes, "no head has 8 rows of\neach kind in a text")
        return
    pairs = {name: np.mean(values, 0) for name, values in found.items()}
    _lines(axes, pairs, draw.COLOURS[0])
    for name, (_, heavy) in pairs.items() if len(pairs) <= NAMED else ():
        axes.annotate(name, (1, heavy), (6, -3), textcoords="offset points", size=6, color=draw.MUTED)
    axes.set_xticks([0, 1], ["rows < 0.3\non the first", "rows > 0.7\non the first"])
    axes.set(ylabel="ratio of norms, by head")


def _lines(axes: Axes, pairs: Mapping[Any, Any], colour: str) -> None:
    """A line for every pair of numbers, from left to right."""
    for pair in pairs.values():
        axes.plot([0, 1], pair, color=colour, alpha=0.6, linewidth=1.1, marker="o", markersize=3)
    axes.set(xlim=(-0.3, 1.4), ylim=(0, None))
    axes.tick_params(axis="x", labelsize=6.5)


def _few(count: int) -> list[int]:
    """At most eight of so many ticks."""
    return list(range(0, count, -(-count // 8)))


def _dots(
    axes: Axes,
    title: str,
    label: str,
    values: Mapping[str, Sequence[float]],
    *,
    colour: str = draw.COLOURS[0],
) -> None:
    """A dot for every text, in columns by name; columns without values are left out."""
    _title(axes, title)
    shown = {name: found for name, found in values.items() if found}
    if not shown:
        _empty(axes, "no sink head")
        return
    draw.by_seed(axes, {name: dict(enumerate(found)) for name, found in shown.items()}, colour=colour)
    low, high = min(0.0, *map(min, shown.values())), max(map(max, shown.values()))
    axes.set(ylabel=label, ylim=(1.08 * low, 1.08 * high))
    axes.tick_params(axis="x", labelsize=6.5)


def _title(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", size=9, color=draw.INK)


def _empty(axes: Axes, reason: str) -> None:
    axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", va="center", size=8, color=draw.MUTED)
    axes.set_axis_off()
