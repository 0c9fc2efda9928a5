"""How far each approximation in linear time is from exact softmax attention: `python docs/linear_error.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

import qkv
from qkv.features import Favor, elu_plus_one
from qkv.linear import linear_attend, linformer
from qkv.plot.layout import ACCENT, HAIRLINE, INK, MUTED, WARM

N, D, SEEDS = 512, 32, 20
SIZES = [2**i for i in range(2, 13)]
SCALES = (0.5, 1.0)  # of the entries of queries and keys
QUARTILES = torch.tensor([0.25, 0.5, 0.75])


def linear_error(path: Path) -> None:
    """The error against the number of features (FAVOR+) or of projected keys (Linformer); elu + 1 has none to add.

    Values are standard normal, and so are queries and keys, but for their scale. Each seed draws all anew. The mean of
    all values is what attention gives that looks at no score: above it, an approximation is worse than none.
    """
    fig, axes = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained", sharey=True)
    for ax, scale in zip(axes, SCALES, strict=True):
        seeds = [_errors(scale, seed) for seed in range(SEEDS)]
        quartiles = {key: torch.tensor([x[key] for x in seeds]).quantile(QUARTILES).tolist() for key in seeds[0]}
        print(f"scale {scale}:", *(f"{name} {size}: {x[1]:.3g}" for (name, size), x in quartiles.items()), sep="\n  ")
        _panel(ax, quartiles)
        ax.set_title(f"queries and keys of standard deviation {scale:g}", loc="left", fontsize=10, color=INK)
    axes[0].set_ylabel("relative error  ‖out − exact‖ / ‖exact‖")
    fig.supxlabel("features m of FAVOR+, or projected keys r of Linformer", fontsize=10)
    fig.suptitle(
        f"Error against exact softmax attention: n = {N}, d = {D}, median and quartiles of {SEEDS} seeds",
        x=0.01, ha="left", fontsize=11, color=INK,
    )  # fmt: skip
    fig.savefig(path, dpi=150)
    plt.close(fig)


def _errors(scale: float, seed: int) -> dict[tuple[str, int], float]:
    """Relative error of each approximation at each size; 0 is the size of those that have none."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, 1, N, D, generator=generator)
    q, k = scale * q, scale * k
    exact = qkv.attend(q, k, v)
    outs: dict[tuple[str, int], Any] = {}
    for m in SIZES:
        outs["favor", m] = linear_attend(q, k, v, features=Favor(D, m, seed), causal=False)
        if m <= N:
            outs["linformer", m] = linformer(q, k, v, torch.randn(N, m, generator=generator) / m**0.5)
    outs["elu", 0] = linear_attend(q, k, v, features=elu_plus_one, causal=False)
    outs["mean", 0] = v.mean(2, keepdim=True)
    assert isinstance(exact, Tensor)
    return {key: float((out - exact).norm() / exact.norm()) for key, out in outs.items()}


def _panel(ax: Any, quartiles: dict[tuple[str, int], list[float]]) -> None:
    for name, colour, marker, label in (
        ("linformer", WARM, "s", "Linformer,\nrandom projection"),
        ("favor", ACCENT, "o", "FAVOR+"),
    ):
        sizes = [size for kind, size in quartiles if kind == name]
        low, mid, high = zip(*(quartiles[name, size] for size in sizes), strict=True)
        ax.fill_between(sizes, low, high, color=colour, alpha=0.2, linewidth=0)
        ax.plot(sizes, mid, color=colour, marker=marker, markersize=4.5, linewidth=1.6)
        at = 3 if name == "linformer" else 1
        ax.annotate(label, (sizes[at], mid[at]), (8, 8), textcoords="offset points", color=colour, fontsize=9)
    for name, style, label, beside in (("elu", "-", "elu + 1", -11), ("mean", ":", "mean of all values", 4)):
        low, mid, high = quartiles[name, 0]
        ax.axhspan(low, high, color=MUTED, alpha=0.15, linewidth=0)
        ax.axhline(mid, color=INK, linestyle=style, linewidth=1.2)
        ax.annotate(label, (SIZES[0], mid), (0, beside), textcoords="offset points", color=INK, fontsize=9)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(SIZES, [str(m) for m in SIZES], fontsize=8.5)
    ax.set_xlim(SIZES[0] * 0.85, SIZES[-1] * 1.2)
    ax.grid(color=HAIRLINE, linewidth=0.7)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    linear_error(Path(__file__).parent / "figures" / "linear_error.png")
