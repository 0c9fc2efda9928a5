"""Experiment on when in training a sink forms (Gu et al. 2025, arXiv:2410.10781, §3–4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from qkv.lab.experiments.base import Conclusion, Results, Verdict, holds_if, larger, summary
from qkv.lab.experiments.sinks import (
    ACCURACY,
    EXCESS,
    LEARNT,
    PLAIN,
    QUICK_TASK,
    SINK,
    TASK,
    Change,
    Sweep,
    alpha_over_steps,
    has_sink,
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
    claims = ("C061", "C063", "C064", "C079")
    curves = (
        "loss", "check.sink", "check.value_drain", "check.trigger_previous", "check.other_first",
        "evaluation.excess", "evaluation.backcopy_accuracy",
    )  # fmt: skip
    variants: ClassVar[Mapping[str, Change]] = {PLAIN: Change()}

    def conclude(self, results: Results) -> Conclusion:
        """By the weight on the first token at the start, half-way and at the end of training."""
        length = int(QUICK_TASK["length"]) if results.quick else TASK.length
        floor = uniform(length)
        steps, alpha = alpha_over_steps(results, PLAIN)
        start, half, end = (alpha[:, at].tolist() for at in (0, len(steps) // 2, -1))
        seen = has_sink(end)
        numbers = (
            f"{summary(start)} at step 0, {summary(half)} at step {steps[len(steps) // 2]}, {summary(end)} at the end"
        )
        verdicts = [
            Verdict("C061", holds_if(larger(end, start) and seen), f"Weight on the first token is {numbers}. It holds "
                    f"if the end is above the start by more than the spread over seeds, and above {SINK} in every "
                    "run."),
            Verdict("C063", holds_if(seen), f"At {length} tokens it ends at {summary(end)}; it holds if every run is "
                    f"above {SINK}."),
            Verdict("C064", holds_if(max(abs(x - floor) for x in start) < NEAR, seen), f"Uniform rows have "
                    f"{floor:.3f}; the runs start with {summary(start, 3)}. It holds if they are within {NEAR} of "
                    "that, and cannot be seen if no sink comes of it."),
            Verdict("C079", holds_if(larger(end, half), seen), f"It is {summary(half)} half-way and {summary(end)} at "
                    "the end; it holds if that is more, by more than the spread over seeds."),
        ]  # fmt: skip
        title = (
            f"The sink is learnt: the weight on the first token rises from {np.mean(start):.2f} to {np.mean(end):.2f}"
            if seen
            else f"No sink forms: the weight on the first token ends at {np.mean(end):.2f}"
        )
        able = results.curve(PLAIN, ACCURACY)[1].mean(0)
        drain = results.curve(PLAIN, "check.value_drain")[1].reshape(len(alpha), len(steps), -1).min(2)
        paragraph = (
            f"The weight of the strongest head on the first token is {numbers} (uniform rows: {floor:.3f}). Means over "
            f"seeds: copies are right at {LEARNT:.0%} {_first_step_above(steps, able, LEARNT)}, the weight is above "
            f"{SINK} {_first_step_above(steps, alpha.mean(0), SINK)}. The norm of the most drained first value, over "
            f"that of the others, is {summary(drain[:, 0].tolist())} at step 0 and {summary(drain[:, -1].tolist())} at "
            "the end."
        )
        return Conclusion(verdicts, title, paragraph)

    def figure(self, results: Results) -> Figure:
        """The head's mean weights, the model's metrics, and the norm of the first value, over steps."""
        from qkv.lab import draw

        figure, (looks, able, drain) = draw.panels(
            self.conclude(results).title,
            note(results, "Lines: mean; bands: range over seeds"),
            columns=3,
            width=9.4,
            height=2.7,
        )

        def curve(name: str) -> np.ndarray:
            return results.curve(PLAIN, name)[1].reshape(results.seeds, len(steps), -1).max(2)

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
        norms = results.curve(PLAIN, "check.value_drain")[1].reshape(results.seeds, len(steps), -1).min(2)
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
