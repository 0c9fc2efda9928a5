"""The figure of a training run: the loss over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from qkv_lab.draw import COLOURS, panels


def loss_figure(name: str, metrics: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot the training loss, and the held-out loss if the task evaluates it.

    If it also evaluates baselines, ``unigram_loss`` and ``bigram_loss``, they are dashed lines.
    """
    lines = [(m["step"], m["loss"]) for m in metrics if m.get("loss") is not None]
    held = [(m["step"], m["evaluation"]["loss"]) for m in metrics if m.get("evaluation", {}).get("loss") is not None]
    first, last = (lines[0][1], lines[-1][1]) if lines else (float("nan"), float("nan"))
    figure, (axes,) = panels(f"{name}: the loss falls from {first:.2f} to {last:.2f} nats", height=2.8)
    if lines:
        axes.plot(*zip(*lines, strict=True), color=COLOURS[0], linewidth=1.2, label="training")
    if held:
        axes.plot(
            *zip(*held, strict=True), color=COLOURS[1], marker="o", markersize=3.5, linewidth=1.4, label="held out"
        )
    last_evaluation: Mapping[str, Any] = next((m["evaluation"] for m in reversed(metrics) if m.get("evaluation")), {})
    for baseline, colour in (("unigram", COLOURS[6]), ("bigram", COLOURS[4])):
        level = last_evaluation.get(f"{baseline}_loss")
        if level is not None:
            axes.axhline(level, color=colour, linewidth=1.2, linestyle="--", label=f"{baseline} ({level:.2f})")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per prediction)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure
