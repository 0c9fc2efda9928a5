"""The figure of a study: what its verdicts rest on, with a dot for every text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.lab import draw
from qkv.lab.experiments.evidence import FAILS, HOLDS, ONLY, UNDECIDED, UNSEEN
from qkv.sinks.criteria import MASSIVE, SINK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from qkv.sinks.studies import Study

WORDS = {
    HOLDS: "hold",
    ONLY: "hold only in part",
    FAILS: "do not hold",
    UNDECIDED: "are undecided",
    UNSEEN: "cannot be seen",
}
Found = Mapping[str, Any]


def figure(study: Study) -> Figure:
    """Eight panels at the first length of a study."""
    n, found = next(iter(study.lengths.items()))
    counts = Counter(verdict.holds for verdict in study.verdicts[n])
    title = ", ".join(f"{counts[holds]} {word}" for holds, word in WORDS.items() if counts[holds])
    texts = found["texts"]
    drawn, panels = draw.panels(
        f"Claims on attention sinks in {study.attrs['model']}: {title}",
        f"{n} tokens; {len(texts)} texts, each a dot. Sink heads: {len(found['heads'])} of "
        f"{sum(map(len, found['alpha']))}, chosen on other texts by a mean weight above {SINK} on the first token.",
        rows=2, columns=4, width=12.0, height=2.7,
    )  # fmt: skip
    _alpha(panels[0], found)
    _weights(panels[1], texts)
    _norms(panels[2], texts)
    _magnitudes(panels[3], texts)
    _dots(panels[4], "Sink when peaks at the first token are replaced", "weight on the first token", {
        label: [text["peaks"][name] for text in texts if "peaks" in text]
        for label, name in {"as it is": "kept", "by the mean": "mean", "by zero": "zero",
                            "random\ndimensions": "control"}.items()
    }, "no block writes a peak\nbefore a sink head")  # fmt: skip
    _dots(panels[5], "One token changed: the others move", "relative to their norm", {
        f"{name} sink": [text["moved"][name] for text in texts if "moved" in text] for name in ("with", "without")
    }, colour=draw.COLOURS[1])  # fmt: skip
    _cost(panels[6], texts)
    _added(panels[7], texts)
    return drawn


def _alpha(axes: Axes, found: Found) -> None:
    alpha = np.array([[*row, *[np.nan] * (max(map(len, found["alpha"])) - len(row))] for row in found["alpha"]])
    draw.heatmap(axes, np.nan_to_num(alpha), vmax=1)
    if alpha.size <= 100:
        for (layer, head), value in np.ndenumerate(alpha):
            colour = "white" if value > 0.5 else draw.INK
            axes.text(head, layer, f"{100 * value:.0f}", ha="center", va="center", size=7, color=colour)
    axes.set(xlabel="head", ylabel="layer", aspect="auto")
    axes.grid(visible=False)
    _title(axes, "Weight on the first token (%)")


def _weights(axes: Axes, texts: Sequence[Found]) -> None:
    has = [text for text in texts if text["sink"]]
    _dots(axes, "Sink heads on other texts", "weight on the first token", {
        "as it is": [mean(text["sink"]) for text in has],
        "random\nfirst token": [mean(text["other_first"]) for text in has],
        "own first\ntoken": [text["own_first"] for text in has if "own_first" in text],
        "random\ntokens": [text["random"] for text in has],
        "untrained\n(largest)": [text["untrained"]["largest"] for text in has],
    })  # fmt: skip
    axes.axhline(SINK, color=draw.MUTED, linewidth=0.9, linestyle="--")


def _norms(axes: Axes, texts: Sequence[Found]) -> None:
    has = [text["first_key"] for text in texts if text["sink"]]
    _dots(axes, "First token of the sink heads", "ratio of norms, or share", {
        label: [mean(head[name] for head in heads) for heads in has]
        for label, name in {"value over\nothers": "value_norm", "key over\nothers": "key_norm",
                            "queries whose\nnearest key\nis the first": "nearest"}.items()
    }, colour=draw.COLOURS[2])  # fmt: skip
    axes.axhline(1, color=draw.MUTED, linewidth=0.9, linestyle="--")


def _magnitudes(axes: Axes, texts: Sequence[Found]) -> None:
    depths = range(len(texts[0]["magnitudes"]))
    lines = {
        name: np.array([[at[part] / at["median"] for at in text["magnitudes"]] for text in texts])
        for name, part in {"first token": "first", "other tokens": "others"}.items()
    }
    draw.curves(axes, depths, lines, markers=True)
    axes.axhline(MASSIVE, color=draw.MUTED, linewidth=0.9, linestyle="--")
    axes.set(xlabel="depth (0: embeddings)", ylabel="largest over median magnitude", yscale="log")
    axes.set_xticks(list(depths))
    axes.legend(frameon=False, fontsize=8)
    _title(axes, f"Magnitudes (massive above {MASSIVE:g})")


def _cost(axes: Axes, texts: Sequence[Found]) -> None:
    costs = [text["cost"] for text in texts if "cost" in text]
    loss = bool(costs) and "kept" in costs[0]
    names = {"masked": "first key\nmasked", "value zero": "its value\nzero", "both": "both"}
    _dots(
        axes,
        "What the sink is for: sink heads without it",
        "rise of the loss (nats)" if loss else "change of the last states",
        {label: [one[name] - one.get("kept", 0.0) for one in costs] for name, label in names.items()},
        colour=draw.COLOURS[4],
    )
    if loss:
        axes.axhline(0, color=draw.MUTED, linewidth=0.9)


def _added(axes: Axes, texts: Sequence[Found]) -> None:
    pairs: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for text in texts:
        for one in text["added"]:
            pairs.setdefault((one["layer"], one["head"]), []).append((one["light"], one["heavy"]))
    _title(axes, "What a head adds, over the residual")
    if not pairs:
        _empty(axes, "no head has 8 rows of\neach kind in a text")
        return
    for (layer, head), values in sorted(pairs.items()):
        light, heavy = np.array(values).T
        axes.plot([0, 1], [light.mean(), heavy.mean()], color=draw.COLOURS[0], alpha=0.6, linewidth=1.1, marker="o",
                  markersize=3)  # fmt: skip
        axes.annotate(
            f"{layer}.{head}", (1, heavy.mean()), (4, -3), textcoords="offset points", size=6, color=draw.MUTED
        )
    axes.set_xticks([0, 1], ["rows < 0.3\non the first", "rows > 0.7\non the first"])
    axes.set(ylabel="ratio of norms, by head", xlim=(-0.3, 1.4), ylim=(0, None))


def _dots(
    axes: Axes,
    title: str,
    label: str,
    values: Mapping[str, Sequence[float]],
    empty: str = "no sink head",
    *,
    colour: str = draw.COLOURS[0],
) -> None:
    """A dot for every text, in columns by name; columns without values are left out."""
    _title(axes, title)
    shown = {name: found for name, found in values.items() if found}
    if not shown:
        _empty(axes, empty)
        return
    draw.by_seed(axes, shown, colour=colour)
    low, high = min(0.0, *map(min, shown.values())), max(map(max, shown.values()))
    axes.set(ylabel=label, ylim=(1.08 * low, 1.08 * high))
    axes.tick_params(axis="x", labelsize=7)


def _title(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", size=9, color=draw.INK)


def _empty(axes: Axes, reason: str) -> None:
    axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", va="center", size=8, color=draw.MUTED)
    axes.set_axis_off()
