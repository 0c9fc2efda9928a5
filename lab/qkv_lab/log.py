"""The metrics of a run: metrics.jsonl, and the figures of the loss and of the heads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from qkv._untrusted import parse_json, read_bytes
from qkv.errors import refusing
from qkv_lab.draw import COLOURS, panels

METRICS = "metrics.jsonl"
"""The file of a run's metrics: each line is a JSON object with a ``step``."""


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


OVER_TRAINING = ("sink", "accuracy", "entropy")
"""The entries of an attention check that `heads_figure` draws, if they have a number for each layer and head."""


def heads_figure(name: str, metrics: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Plot some entries of the attention check, for every head over training; None without two checks of heads."""
    checks = {m["step"]: m["check"] for m in metrics if m.get("check")}
    drawn = [entry for entry in OVER_TRAINING if all(np.ndim(check.get(entry, 0)) == 2 for check in checks.values())]
    if len(checks) < 2 or not drawn:
        return None
    note = "Entries of the attention check. One line for each head; dark: their mean."
    figure, panels_ = panels(f"{name}: the heads over training", note, columns=len(drawn), width=3.6 * len(drawn))
    for axes, entry in zip(panels_, drawn, strict=True):
        values = np.array([np.ravel(check[entry]) for check in checks.values()], float)
        axes.plot(list(checks), values, color=COLOURS[5], linewidth=0.9)
        axes.plot(list(checks), values.mean(1), color=COLOURS[0], linewidth=2.2)
        axes.set(xlabel="step", ylabel=entry, ylim=(0, None))
    return figure


def read(path: Path) -> list[dict[str, Any]]:
    """All lines up to the first that is not a JSON object with a step, which a crash may have cut short."""
    found: list[dict[str, Any]] = []
    if not path.exists():
        return found
    with refusing(f"folder: cannot read {path} ({{}})", OSError, ValueError):
        lines = read_bytes(path).decode("utf-8", errors="replace").splitlines()
    for text in lines:
        try:
            line = parse_json(text)
        except ValueError:
            break
        if not isinstance(line, dict) or type(line.get("step")) is not int:
            break
        found.append(line)
    return found


def scalars(entries: Mapping[str, Any], where: str = "") -> list[tuple[str, float]]:
    """The numbers in nested mappings, by name with slashes; lists are left out."""
    out: list[tuple[str, float]] = []
    for name, value in entries.items():
        if isinstance(value, Mapping):
            out += scalars(value, f"{where}{name}/")
        elif isinstance(value, int | float) and name != "step":
            out.append((f"{where}{name}", float(value)))
    return out


def finite(value: Any) -> Any:
    """The value with NaN and infinity replaced by None, because JSON cannot express them."""
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
