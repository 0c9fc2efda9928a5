"""Experiments on whether learning rate and weight decay encourage sinks (Gu et al. 2025, arXiv:2410.10781, §4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np

from qkv_lab.experiments.base import Outcome, Results
from qkv_lab.experiments.evidence import FAILS, HOLDS, Criterion, Effect, Verdict
from qkv_lab.experiments.sinks import (
    ALPHA,
    DATED,
    MAIN_LOOKS,
    PLAIN,
    TRAINING,
    Change,
    Sweep,
    difference,
    learnt,
    mean_of,
    training_variants,
)

RATES, UNSTABLE = (1e-3, 3e-3, 1e-2, 3e-2), (5e-2, 6e-2, 7e-2)
LONGER = "0.003, 3 × the steps"
DECAYS, SLOW = (0.0, 0.1, 0.5, 1.0, 2.0), 3e-3
KEY = "key bias, "
LEAST = 0.05  # smaller differences of weight do not count as an effect
FEWEST = 0.2  # a share of failed runs, without which stability cannot be compared
SPIKE, SETTLED = 0.5, 100  # a spike is this far above the lowest earlier loss (nats), after this many steps


class LearningRate(Sweep):
    """Learning rates at which models learn, and rates at which training fails, with and without a key bias."""

    name = "learning_rate"
    question = "Does a larger learning rate strengthen the sink, and does a key bias stabilise training at high rates?"
    criteria = (
        Criterion("C078", DATED, "Weight of the strongest head on the first token at a learning rate minus that at a "
                  "lower one", LEAST),
        Criterion("C100", DATED, "Share of runs that fail (the loss jumps or becomes NaN, or the task is not learnt) "
                  "minus the share with a key bias, same seeds", 0.1),
    )  # fmt: skip
    curves = ("loss",)
    axis = "peak learning rate"
    variants: ClassVar[Mapping[str, Change]] = {
        **training_variants(lr=RATES),
        LONGER: Change(training={"lr": 3e-3, "steps": 3 * TRAINING.steps}),
        **{f"{rate:g}": Change(training={"lr": rate}) for rate in UNSTABLE},
        **{f"{KEY}{rate:g}": Change(model={"key_bias": True}, training={"lr": rate}) for rate in UNSTABLE},
    }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """C078 by neighbouring rates, and against a lower rate with more steps; C100 by the runs that fail."""
        names = [f"{rate:g}" for rate in RATES]
        rises = [difference(results, b, a, f"{b} − {a}") for a, b in pairwise(names)]
        rises.append(difference(results, "0.01", LONGER, "0.01 − 0.003 with 3 times the steps"))
        fails: list[Effect] = []
        for rate in UNSTABLE:
            plain, biased = ({o.seed: failed(o) for o in results.variants.get(f"{p}{rate:g}", ())} for p in ("", KEY))
            share = float(np.mean(list(plain.values()))) if plain else 0.0
            few = "" if share >= FEWEST else f"{share:.0%} of its runs fail, fewer than {FEWEST:.0%}"
            both = [float(plain[seed]) - float(biased[seed]) for seed in plain if seed in biased]
            fails.append(Effect(f"rate {rate:g}", both, (f"{rate:g}", f"{KEY}{rate:g}"), unless=few))
        return {"C078": rises, "C100": fails}

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The shares of runs that fail at each rate."""
        shares = []
        for rate in UNSTABLE:
            plain, biased = ([failed(o) for o in results.variants.get(f"{p}{rate:g}", ())] for p in ("", KEY))
            if plain and biased:
                shares.append(f"{rate:g}: {sum(plain)} of {len(plain)} without, {sum(biased)} of {len(biased)} with it")
        return {"C100": f"Runs that fail at rate {'; '.join(shares)}."} if shares else {}

    def title(self, results: Results, verdicts: Mapping[str, Verdict]) -> str:
        """The weights at the ends of the range."""
        low, high = (f"{RATES[at]:g}" for at in (0, -1))
        ends = f"{mean_of(results.values(low, ALPHA))} at {low}, {mean_of(results.values(high, ALPHA))} at {high}"
        says = {
            HOLDS: "A larger learning rate makes a stronger sink",
            FAILS: "A larger learning rate does not make a stronger sink",
        }
        start = says.get(verdicts["C078"].holds, "Not every larger learning rate makes a stronger sink")
        return f"{start}: {ends} ({results.seeds} seeds)"


class WeightDecay(Sweep):
    """Five strengths of weight decay, at a learning rate at which the sink can still become stronger."""

    name = "weight_decay"
    question = "Does stronger weight decay strengthen the sink?"
    looks = MAIN_LOOKS
    criteria = (
        Criterion("C082", DATED, "Weight of the strongest head on the first token with weight decay minus that "
                  f"without, at learning rate {SLOW:g}", LEAST),
    )  # fmt: skip
    axis = f"weight decay (learning rate {SLOW:g})"
    variants: ClassVar[Mapping[str, Change]] = {
        **{f"{decay:g}": Change(training={"weight_decay": decay, "lr": SLOW}) for decay in DECAYS},
        f"{PLAIN}, rate {TRAINING.lr:g}": Change(),
    }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """The two strongest decays against none."""
        return {"C082": [difference(results, f"{decay:g}", "0", f"{decay:g} − 0") for decay in DECAYS[-2:]]}

    def title(self, results: Results, verdicts: Mapping[str, Verdict]) -> str:
        """The change from no decay to the strongest."""
        last = verdicts["C082"].intervals[-1]
        return (
            f"From no weight decay to {DECAYS[-1]:g} the weight on the first token changes by {last.mean:+.2f} "
            f"({last.low:+.2f} to {last.high:+.2f}, {last.n} seeds)"
        )


def failed(outcome: Outcome) -> bool:
    """True if a run's loss had a spike or diverged, or if the run did not learn its task."""
    if outcome.diverged is not None or not learnt(outcome):
        return True
    curve = outcome.curves["loss"]
    losses, late = np.asarray(curve["values"], float), np.asarray(curve["steps"]) > SETTLED
    return bool(((losses - np.minimum.accumulate(losses)) > SPIKE)[late].any())
