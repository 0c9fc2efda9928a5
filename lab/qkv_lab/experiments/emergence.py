"""Experiment on when in training a sink forms (Gu et al. 2025, arXiv:2410.10781, §3–4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from qkv_lab.experiments.base import Results
from qkv_lab.experiments.evidence import HOLDS, Criterion, Effect, Verdict, number
from qkv_lab.experiments.sinks import (
    ACCURACY,
    DATED,
    EXCESS,
    LEARNT,
    MAIN_LOOKS,
    PLAIN,
    QUICK_TASK,
    SINK,
    STRONGEST,
    TASK,
    Change,
    Sweep,
    alpha_over_steps,
    has_sink,
    not_learnt,
    note,
    panel_title,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEAR = 0.02  # largest difference of initial weights from uniform ones


class Emergence(Sweep):
    """The plain run, with curves over its training."""

    name = "emergence"
    question = "When in training does a sink on the first token form, and does it exist at initialisation?"
    looks = MAIN_LOOKS
    criteria = (
        Criterion("C061", DATED, f"{STRONGEST}, at the end of training", SINK),
        Criterion("C063", DATED, f"{STRONGEST}, among {TASK.length} tokens", SINK),
        Criterion("C064", DATED, f"{STRONGEST} at step 0, minus that of uniform rows, without sign", NEAR, above=False),
        Criterion("C079", DATED, f"{STRONGEST} at the end minus half-way", 0.01),
    )
    curves = (
        "loss", "check.sink", "check.value_drain", "check.trigger_previous", "check.other_first",
        "evaluation.excess", "evaluation.backcopy_accuracy",
    )  # fmt: skip
    variants: ClassVar[Mapping[str, Change]] = {PLAIN: Change()}

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """By the weight on the first token at the start, half-way and at the end of training."""
        floor = uniform(int(QUICK_TASK["length"]) if results.quick else TASK.length)
        steps, alpha = alpha_over_steps(results, PLAIN)
        start, half, end = (alpha[:, at] for at in (0, len(steps) // 2, -1))
        why = not_learnt(results, PLAIN)

        def effect(values: np.ndarray) -> Effect:
            return Effect("", values.tolist(), (PLAIN,), unless=why)

        return {
            "C061": [effect(end)],
            "C063": [effect(end)],
            "C064": [has_sink(results), effect(np.abs(start - floor))],
            "C079": [has_sink(results), effect(end - half)],
        }

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The weights over training, and when accuracy and sink appear."""
        steps, alpha = alpha_over_steps(results, PLAIN)
        start, half, end = (number(alpha[:, at].mean()) for at in (0, len(steps) // 2, -1))
        able = results.curve(PLAIN, ACCURACY)[1].mean(0)
        return {
            "C061": f"It is {start} at step 0, {half} at step {steps[len(steps) // 2]} and {end} at the end. Means: "
            f"copies are right at {LEARNT:.0%} {_first_step_above(steps, able, LEARNT)}, the weight is above "
            f"{SINK} {_first_step_above(steps, alpha.mean(0), SINK)}.",
        }

    def title(self, results: Results, verdicts: Mapping[str, Verdict]) -> str:
        """The rise of the weight on the first token."""
        alpha = alpha_over_steps(results, PLAIN)[1]
        ends = f"{alpha[:, 0].mean():.2f} to {alpha[:, -1].mean():.2f}"
        seen = verdicts["C061"].holds == HOLDS
        return (
            f"{'The sink is learnt' if seen else 'No sink'}: the weight on the first token goes from {ends} "
            f"({results.seeds} seeds)"
        )

    def figure(self, results: Results) -> Figure:
        """The head's mean weights, the model's metrics, and the norm of the first value, over steps."""
        from qkv_lab import draw

        figure, (looks, able, drain) = draw.panels(
            self.conclude(results).title,
            note(results, "Lines: mean; bands: its 95 % interval"),
            columns=3,
            width=9.4,
            height=2.7,
        )

        def curve(name: str) -> np.ndarray:
            values = results.curve(PLAIN, name)[1]
            return values.reshape(len(values), len(steps), -1).max(2)

        steps, _ = results.curve(PLAIN, "check.sink")
        weights = {
            "triggers, on the previous token": curve("check.trigger_previous"),
            "others, on the first token": curve("check.other_first"),
        }
        draw.curves(looks, steps, weights)
        looks.axhline(SINK, color=draw.MUTED, linewidth=0.9, linestyle="--")
        panel_title(looks, "Where the head attends")
        looks.set(ylabel="mean weight", ylim=(0, 1))
        looks.legend(fontsize=7, frameon=False)
        draw.curves(
            able,
            steps,
            {"accuracy of copies": curve(ACCURACY), "loss over the chain's (nats)": curve(EXCESS)},
        )
        panel_title(able, "Accuracy and loss")
        able.set(ylabel="share, nats a token", ylim=(0, 1.05))
        able.legend(fontsize=7, frameon=False)
        drains = results.curve(PLAIN, "check.value_drain")[1]
        norms = drains.reshape(len(drains), len(steps), -1).min(2)
        draw.curves(drain, steps, {"": norms})
        drain.axhline(1, color=draw.MUTED, linewidth=0.9, linestyle="--")
        panel_title(drain, "Norm of the first value, over others'")
        drain.set(ylim=(0, None), ylabel="ratio")
        for axes in (looks, able, drain):
            axes.set_xlabel("step")
        return figure


def _first_step_above(steps: list[int], values: np.ndarray, level: float) -> str:
    """The first step at which values exceed a level, as text."""
    above = np.flatnonzero(values > level)
    return f"from step {steps[above[0]]}" if len(above) else "at no step"


def uniform(length: int) -> float:
    """The mean weight of queries 2 … n on the first key if all rows are uniform: (Hₙ − 1) / (n − 1).

    >>> round(uniform(64), 3)
    0.059
    """
    return float(sum(1 / i for i in range(2, length + 1)) / (length - 1))
