"""Experiments on sequences longer than those of training, with six position schemes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from qkv.models import DecoderConfig
from qkv_lab.experiments.base import Outcome, Results, Setting
from qkv_lab.experiments.evidence import FAILS, HOLDS, ONLY, Criterion, Effect
from qkv_lab.experiments.sinks import DATED
from qkv_lab.experiments.small import LEAST, Small, means_of, setting, unlearnt
from qkv_lab.tasks.language import Language
from qkv_lab.tasks.lookups import Lookups

JUDGED = ("learned", "sinusoidal", "rotary")
SCHEMES = (*JUDGED, "alibi", "t5", "none")
OTHERS = 3
TRAINED, LONGEST = 32, 128
RISE = 0.1
"""A loss that rises by more than this (nats per byte) has not generalised."""


class Extrapolation(Small):
    """Byte language models trained on 32 tokens and evaluated on 128."""

    name = "extrapolation"
    question = "Which position schemes work beyond the trained length?"
    says: ClassVar[Mapping[str, str]] = {
        HOLDS: "With sinusoidal positions the loss stays low beyond the trained length",
        FAILS: "With sinusoidal positions the loss rises beyond the trained length",
    }
    criteria = (
        Criterion("C227", DATED, f"Loss (nats per byte) with sinusoidal positions at positions 65–{LONGEST} minus that "
                  f"at 17–{TRAINED}", RISE, above=False),
        Criterion("C228", DATED, "Rise of the loss (nats per byte) beyond the trained length, with absolute positions "
                  "minus with rotary ones", 0.0),
    )  # fmt: skip
    looks = (10, 20)

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """One model for each position scheme; those that no claim is about have 3 seeds."""
        runs = {}
        for positions in SCHEMES if seed < OTHERS else JUDGED:
            model = DecoderConfig(d_model=64, layers=2, heads=4, positions=positions)
            task = Language(context=TRAINED, longest=LONGEST, model=model)
            runs[positions] = setting(task, seed, quick, steps=500, batch=32, warmup=50)
        return runs

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """By the rise of the loss over that within the trained length; near and far are conditions."""
        found = []
        for other in ("sinusoidal", "learned"):
            for at, place in ((1, "33–64"), (2, f"65–{LONGEST}")):
                mine, theirs = (_rises(results, kind, at) for kind in ("rotary", other))
                values = [theirs[seed] - mine[seed] for seed in mine if seed in theirs]
                found.append(Effect(f"{other}, positions {place},", values, ("rotary", other)))
        return {
            "C227": [Effect("", list(_rises(results, "sinusoidal", 2).values()), ("sinusoidal",))],
            "C228": found,
        }

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The mean rise of every scheme."""
        rises = {kind: list(_rises(results, kind, 2).values()) for kind in SCHEMES}
        text = ", ".join(f"{kind} {np.mean(x):.2f}" for kind, x in rises.items() if x)
        return dict.fromkeys(("C227", "C228"), f"Mean rise at positions 65–{LONGEST}: {text}.")


def _rises(results: Results, kind: str, at: int) -> dict[int, float]:
    """The rise of the loss at a range of positions, by seed."""

    def rise(outcome: Outcome) -> float:
        losses = outcome.evaluation["loss_by_place"]
        return float(losses[at] - losses[0])

    return {outcome.seed: rise(outcome) for outcome in results.finished(kind)}


class RelativePositions(Small):
    """The symbol two positions before, with absolute and relative positions, within the trained length and beyond."""

    name = "relative_positions"
    question = 'Is "attend to the word two before" easier to learn, or to carry over, with relative positions?'
    says: ClassVar[Mapping[str, str]] = {
        HOLDS: "Relative positions are learnt more quickly, and carry over to longer sequences",
        FAILS: "Relative positions are no easier",
        ONLY: "Relative positions carry over to longer sequences, but are not learnt more quickly",
    }
    criteria = (
        Criterion("C374", DATED, "Accuracy in finding the symbol two before, with relative positions (T5, rotary) "
                  "minus with absolute ones (learned, sinusoidal)", LEAST),
    )  # fmt: skip
    looks = (20, 40)
    curves = ("evaluation.accuracy",)
    kinds: Mapping[str, tuple[str, str]] = {"relative": ("t5", "rotary"), "absolute": ("learned", "sinusoidal")}
    length, longest = 16, 64

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """One layer, one look-up, four position schemes."""
        runs = {}
        for positions in (*self.kinds["relative"], *self.kinds["absolute"]):
            model = DecoderConfig(d_model=32, layers=1, heads=2, positions=positions, tied=False)
            task = Lookups(first=2, second=2, length=self.length, longest=self.longest, model=model)
            every = 4 if quick else 25
            runs[positions] = setting(task, seed, quick, steps=400, batch=32, evaluate_every=every)
        return runs

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """In training: the mean accuracy over evaluations every 25 steps, which is higher if learning is quicker."""
        variants = tuple(v for pair in self.kinds.values() for v in pair)
        why = unlearnt(results, "evaluation.accuracy", 0.9, *variants)
        quick = {
            kind: {o.seed: float(np.mean(o.curves["evaluation.accuracy"]["values"])) for o in results.finished(kind)}
            for kind in variants
        }
        far = {kind: results.by_seed(kind, "evaluation.longer_accuracy") for kind in variants}
        within = f"within the {self.length} trained positions, over training,"
        beyond = f"beyond them, up to {self.longest},"
        return {
            "C374": [Effect(within, self._gaps(quick), variants, why), Effect(beyond, self._gaps(far), variants, why)]
        }

    def _gaps(self, values: Mapping[str, Mapping[int, float]]) -> list[float]:
        """The mean of the relative schemes minus that of the absolute ones, for each seed that all have."""
        seeds = sorted(set.intersection(*(set(x) for x in values.values())))
        relative, absolute = (
            [float(np.mean([values[v][seed] for v in self.kinds[kind]])) for seed in seeds]
            for kind in ("relative", "absolute")
        )
        return [a - b for a, b in zip(relative, absolute, strict=True)]

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The means of all schemes."""
        means = means_of(results, list(results.variants), "evaluation.longer_accuracy")
        return {"C374": f"Mean accuracies beyond the trained positions: {means}."}
