"""Of results of `make bench`: the table of model speeds, and the figure of tokens streaming through caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from qkv.view.style import HAIRLINE, INK, MUTED


def table(result: dict[str, Any]) -> list[str]:
    """Tokens a second of each model in each cell, as Markdown."""
    cells = result["cells"]
    names = list(next(iter(cells.values()))["tokens a second"])
    lines = [
        "## Models",
        "",
        "Tokens a second of `DecoderLM`, the same GPT by hand on SDPA with a cache that grows by concatenation,",
        "x-transformers (flash on) and transformers' GPT-2: 6 layers × 6 heads × 64, float32. Training is forward,",
        "loss and backward of 8 × 256 tokens; decoding is a prompt of 128 tokens and 64 greedy tokens after it. All",
        "but x-transformers have the same weights, and give the same loss and the same tokens.",
        "",
        f"| | {' | '.join(names)} | DecoderLM / best other (≥ 1) |",
        f"|---|{'---:|' * (len(names) + 1)}",
    ]
    for name, cell in cells.items():
        speeds = " | ".join(f"{cell['tokens a second'][n]:,.0f}" for n in names)
        lines.append(f"| {name} | {speeds} | {cell['speed over the best other']:.2f} |")
    return [*lines, ""]


def stream_figure(result: dict[str, Any], path: Path) -> None:
    """Milliseconds a token and bytes in caches against tokens that came."""
    colours = dict(zip(result["caches"], ("#26748f", "#b8501a", "#7c4a86", MUTED), strict=True))
    fig, axes = plt.subplots(2, 1, figsize=(8, 5), sharex=True, layout="constrained")
    for name, series in result["caches"].items():
        tokens = (np.arange(len(series["bytes in caches"])) + 1) * result["block"]
        mebibytes = np.array(series["bytes in caches"]) / 2**20
        for ax, values in zip(axes, (series["milliseconds a token"], mebibytes), strict=True):
            ax.plot(tokens, values, lw=1.6, color=colours[name], label=name)
    for ax, what in zip(axes, ("milliseconds a token", "MiB in caches"), strict=True):
        ax.set_ylabel(what, color=MUTED)
        ax.set_ylim(bottom=0)
        ax.grid(visible=True, axis="y", linewidth=0.6, color=HAIRLINE)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(HAIRLINE)
        ax.tick_params(labelsize=8, labelcolor=MUTED, color=HAIRLINE)
    axes[1].set_xlabel("tokens so far", color=MUTED)
    axes[1].xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes[0].legend(frameon=False, fontsize=8, ncols=len(colours), loc="lower right")
    title = f"{result['budget']:,} keys a layer, however many tokens come; Full keeps all"
    axes[0].set_title(title, loc="left", color=INK, fontsize=11)
    fig.savefig(path, dpi=120)
    plt.close(fig)
