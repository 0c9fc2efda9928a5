"""The table of model speeds and the figure of streaming caches in docs/benchmarks.md, from results of `make bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from qkv.plot.layout import HAIRLINE, INK, MUTED


def table(result: dict[str, Any]) -> list[str]:
    """Tokens per second of each model in each cell, as Markdown."""
    cells = result["cells"]
    names = list(next(iter(cells.values()))["tokens a second"])
    lines = [
        "## Models",
        "",
        "Tokens per second of `DecoderLM`, the same GPT written by hand on SDPA with a cache that grows by",
        "concatenation, x-transformers (flash on) and transformers' GPT-2: 6 layers × 6 heads × 64, float32. Training",
        "is forward, loss and backward of 8 × 256 tokens; decoding is a prompt of 128 tokens and 64 greedy tokens",
        "after it. All but x-transformers have the same weights, and give the same loss and the same tokens.",
        "",
        f"| | {' | '.join(names)} | DecoderLM / best other (≥ 1) |",
        f"|---|{'---:|' * (len(names) + 1)}",
    ]
    for name, cell in cells.items():
        speeds = " | ".join(f"{cell['tokens a second'][n]:,.0f}" for n in names)
        lines.append(f"| {name} | {speeds} | {cell['speed over the best other']:.2f} |")
    return [*lines, ""]


def stream_figure(result: dict[str, Any], path: Path) -> None:
    """Milliseconds per token and bytes in caches against the number of tokens."""
    colours = dict(zip(result["caches"], ("#26748f", "#b8501a", "#7c4a86", MUTED), strict=True))
    shape = {"sharex": True, "layout": "constrained", "height_ratios": (3, 1.2)}
    fig, (above, below) = plt.subplots(2, 1, figsize=(8.4, 4.8), **shape)
    for name, series in result["caches"].items():
        tokens = (np.arange(len(series["bytes in caches"])) + 1) * result["block"]
        mebibytes = np.array(series["bytes in caches"]) / 2**20
        above.plot(tokens, series["milliseconds a token"], lw=1.6, color=colours[name])
        below.plot(tokens, mebibytes, lw=1.6, color=colours[name])
        _label(above, name, tokens[-1], np.mean(series["milliseconds a token"][-5:]), colours[name])
    full = result["caches"]["Full"]["bytes in caches"]
    others = [x["bytes in caches"][-1] / 2**20 for name, x in result["caches"].items() if name != "Full"]
    capacity = f"Full, capacity {len(full) * result['block']:,} tokens"
    _label(below, capacity, len(full) * result["block"], full[-1] / 2**20, MUTED)
    held = f"{min(others):.1f}–{max(others):.1f} MiB"
    _label(below, held, 100 * result["block"], max(others), INK)
    for ax, what in ((above, "milliseconds per token"), (below, "MiB in caches")):
        ax.set_ylabel(what, color=MUTED, fontsize=9)
        ax.set_ylim(bottom=0)
        ax.grid(visible=True, axis="y", linewidth=0.6, color=HAIRLINE)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(HAIRLINE)
        ax.tick_params(labelsize=8, labelcolor=MUTED, color=HAIRLINE)
    above.margins(x=0.01)
    below.set_xlabel("tokens so far", color=MUTED, fontsize=9)
    below.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    above.set_title(
        f"With {result['budget']:,} keys per layer the cost of a token is constant", loc="left", fontsize=11
    )
    fig.savefig(path, dpi=120)
    plt.close(fig)


def _label(ax: Any, text: str, x: float, y: float, colour: str) -> None:
    """A label at the right end of a line."""
    place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
    ax.annotate(text, (x, y), color=colour, **place)
