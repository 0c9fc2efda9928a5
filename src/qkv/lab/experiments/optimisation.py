"""Experiments on whether learning rate and weight decay encourage sinks (Gu et al. 2025, arXiv:2410.10781, §4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from qkv.lab.experiments.base import UNSEEN, Conclusion, Holds, Outcome, Results, Verdict, holds_if, summary
from qkv.lab.experiments.sinks import (
    ACCURACY,
    ALPHA,
    LEARNT,
    PLAIN,
    TRAINING,
    Change,
    Sweep,
    learnt_variants,
    summaries,
    training_variants,
)

RATES, UNSTABLE = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), (1e-2, 3e-2)
DECAYS, SLOW = (0.0, 0.1, 0.5, 1.0, 2.0), 3e-3
KEY = "key bias, "
LEAST = 0.02  # differences of weight below this are ignored
SPIKE, SETTLED = 0.5, 100  # a spike is this far above the lowest earlier loss (nats), after this many steps


class LearningRate(Sweep):
    """Five learning rates, and the two highest also with a learned key bias."""

    name = "learning_rate"
    question = "Does a larger learning rate strengthen the sink, and does a key bias stabilise training at high rates?"
    claims = ("C078", "C100")
    curves = ("loss",)
    axis = "peak learning rate"
    variants: ClassVar[Mapping[str, Change]] = {
        **training_variants(lr=RATES),
        **{f"{KEY}{rate:g}": Change(model={"key_bias": True}, training={"lr": rate}) for rate in UNSTABLE},
    }

    def conclude(self, results: Results) -> Conclusion:
        """C078 by the ends of the range, C100 by the number of runs with loss spikes."""
        rates = [f"{rate:g}" for rate in RATES]
        holds, title, text = strengthened(results, rates, "learning rate")
        stable, stable_text = _stabilised(results)
        verdicts = [Verdict("C078", holds, text), Verdict("C100", stable, stable_text)]
        return Conclusion(verdicts, title, f"{text} {stable_text}")


class WeightDecay(Sweep):
    """Five strengths of weight decay, at a learning rate at which the sink can still become stronger."""

    name = "weight_decay"
    question = "Does stronger weight decay strengthen the sink?"
    claims = ("C082",)
    axis = f"weight decay (learning rate {SLOW:g})"
    variants: ClassVar[Mapping[str, Change]] = {
        **{f"{decay:g}": Change(training={"weight_decay": decay, "lr": SLOW}) for decay in DECAYS},
        f"{PLAIN}, rate {TRAINING.lr:g}": Change(),
    }

    def conclude(self, results: Results) -> Conclusion:
        """By the weakest and the strongest decay with which the task is learnt."""
        holds, title, text = strengthened(results, [f"{decay:g}" for decay in DECAYS], "weight decay")
        return Conclusion([Verdict("C082", holds, text)], title, text)


def strengthened(results: Results, order: list[str], what: str) -> tuple[Holds, str, str]:
    """Whether a larger value of a setting makes a stronger sink: verdict, title and text.

    The smallest value is compared with the largest at which the task is learnt.
    """
    found = {name: values for name, values in results.by_variant(ALPHA).items() if name in order}
    able = [name for name in order if name in learnt_variants(results)]
    values = f"Weight of the strongest head on the first token by {what}: {summaries(found)}."
    rule = (
        f"The claim holds if it is larger at the largest {what} at which the task is learnt (≥ {LEARNT:.0%} of copies "
        "right) than at the smallest for every seed, which stands for the same initial weights and data in both, and "
        f"by more than {LEAST} in the mean."
    )
    first = order[0]
    if not able or able[-1] == first or first not in found:
        return (
            UNSEEN,
            f"The effect of the {what} on the sink cannot be measured",
            f"{values} {rule} Too few runs learn the task.",
        )
    most = able[-1]
    more = np.subtract(found[most], found[first])
    yes = bool(more.min() > 0 and more.mean() > LEAST)
    title = (
        f"A larger {what} makes a stronger sink: {np.mean(found[first]):.2f} at {first}, {np.mean(found[most]):.2f} "
        f"at {most}"
        if yes
        else f"A larger {what} does not make a stronger sink: {np.mean(found[first]):.2f} at {first}, "
        f"{np.mean(found[most]):.2f} at {most}"
    )
    return holds_if(yes), title, f"{values} {rule} Compared are {first} and {most}."


def _stabilised(results: Results) -> tuple[Holds, str]:
    """Whether fewer runs have a loss spike with a key bias than without, at the same learning rates."""
    plain = [o for rate in UNSTABLE for o in results.variants[f"{rate:g}"]]
    biased = [o for rate in UNSTABLE for o in results.variants[f"{KEY}{rate:g}"]]
    counts = [sum(map(has_spike, runs)) for runs in (plain, biased)]
    text = (
        f"At rates {' and '.join(f'{rate:g}' for rate in UNSTABLE)} the loss jumps in {counts[0]} of {len(plain)} runs "
        f"without and {counts[1]} of {len(biased)} with a key bias (more than {SPIKE} nats above its least before, "
        f"after step {SETTLED}, or to no number). The claim holds if fewer jump with it, and cannot be seen if none "
        f"jumps without. Copies right with it: {summary(_accuracies(biased))}, without: {summary(_accuracies(plain))}."
    )
    return holds_if(counts[1] < counts[0], seen=counts[0] > 0), text


def _accuracies(runs: list[Outcome]) -> list[float]:
    return Results({"": runs}).values("", ACCURACY) or [float("nan")]


def has_spike(outcome: Outcome) -> bool:
    """True if a run's loss had a spike or diverged."""
    if outcome.diverged is not None:
        return True
    curve = outcome.curves["loss"]
    losses, late = np.asarray(curve["values"], float), np.asarray(curve["steps"]) > SETTLED
    return bool(((losses - np.minimum.accumulate(losses)) > SPIKE)[late].any())
