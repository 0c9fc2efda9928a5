"""Experiments on language models of text: when a sink forms, and what dropout does to overfitting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from qkv.models import DecoderConfig
from qkv_lab.experiments.base import Experiment, Results, Setting
from qkv_lab.experiments.evidence import FAILS, HOLDS, ONLY, Criterion, Effect, Verdict
from qkv_lab.experiments.sinks import DATED, SINK, STRONGEST
from qkv_lab.experiments.small import LEAST, Small, means_of, setting
from qkv_lab.task import Measured
from qkv_lab.tasks.language import Language

MODEL = DecoderConfig.gpt2(d_model=64, layers=2, heads=4, attention_bias=False)
"""Learned positions, pre-norm, GELU, a tied output: the chapter's Lab 5 at a smaller size."""
AS_IN_CHAPTER = "<s> first, no warm-up"
"""The chapter's training."""
CONDITIONS: Mapping[str, tuple[str, int]] = {
    AS_IN_CHAPTER: ("fixed", 0),
    "<s> first, 100-step warm-up": ("fixed", 100),
    "any token first, no warm-up": ("random", 0),
}
"""How sequences begin, and the steps over which the learning rate rises."""


class TextSink(Experiment):
    """The chapter's small Transformer on text in bytes: sequences begin with ``<s>`` or anywhere, and the learning rate
    rises at once, as in the chapter, or over 100 steps."""

    name = "text_sink"
    question = "Does a small Transformer that is trained on text develop a sink?"
    criteria = (Criterion("C139", DATED, f"{STRONGEST} at the end of training", SINK),)
    curves = ("check.sink", "evaluation.loss")

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """One model for each condition."""
        return {
            condition: setting(
                Language(context=64, model=MODEL, first=first),  # type: ignore[arg-type]
                seed, quick, steps=400, lr=5e-3, warmup=warmup, decay="none", evaluate_every=4 if quick else 100,
            )
            for condition, (first, warmup) in CONDITIONS.items()
        }  # fmt: skip

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """The strongest head's mean weight on the first token, for each condition."""
        return {"C139": [Effect(name, results.values(name, "check.sink"), (name,)) for name in CONDITIONS]}

    def title(self, results: Results, verdicts: Mapping[str, Verdict]) -> str:
        """The conditions under which a sink forms."""
        able = [i.condition for i in verdicts["C139"].intervals if i.clears]
        found = f"a sink forms with {', and with '.join(able)}" if able else "no sink forms"
        return f"On text {found} ({results.seeds} seeds)"

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The first evaluation with a sink, and the loss of each condition."""
        said = [f"Held-out loss in nats per byte: {means_of(results, list(CONDITIONS), 'evaluation.loss')}."]
        steps = []
        for outcome in results.finished(AS_IN_CHAPTER):
            curve = outcome.curves["check.sink"]
            strongest = [max(max(layer) for layer in x) for x in curve["values"]]
            seen = [step for step, x in zip(curve["steps"], strongest, strict=True) if x > SINK]
            steps += seen[:1]
        if steps:
            said.append(f"A sink without warm-up is there by step {max(steps)} (looked at every 100).")
        return {"C139": " ".join(said)}


class Dropout(Small):
    """Language models that can memorise 6,000 bytes of text, with and without dropout."""

    name = "dropout"
    question = "Does dropout in attention prevent overfitting, or make less of it?"
    says: ClassVar[Mapping[str, str]] = {
        HOLDS: "Dropout prevents overfitting",
        FAILS: "Dropout does not reduce overfitting",
        ONLY: "Dropout makes less of overfitting, but does not prevent it",
    }
    criteria = (
        Criterion("C179", DATED, "Rise of the held-out loss (nats per byte) after its minimum, trained on 6,000 bytes: "
                  "without dropout minus with 0.3, and what is left with 0.3", LEAST),
    )  # fmt: skip
    looks = (10, 20)
    rates: ClassVar[Mapping[str, float]] = {"no dropout": 0.0, "dropout 0.3": 0.3}
    curves = ("evaluation.loss",)

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """One model for each rate."""
        task = Language(context=64, tokens=6000, first="random", model=MODEL)
        return {
            name: setting(
                replace(task, model=replace(MODEL, dropout=rate)), seed, quick, steps=500, warmup=20,
                decay="none", weight_decay=0.0, evaluate_every=4 if quick else 100,
            )
            for name, rate in self.rates.items()
        }  # fmt: skip

    @torch.no_grad()
    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        """``train_loss``: the loss in nats per byte on windows of the training text, without dropout."""
        batch = setting.task.batch(10**6, 90, setting.training.seed)
        return {"train_loss": float(setting.task.loss(model, batch))}

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """Less of it, and none of it, are two readings of the claim."""
        none, some = (_rises(results, name) for name in self.rates)
        fewer = [none[seed] - some[seed] for seed in some if seed in none]
        both = tuple(self.rates)
        return {
            "C179": [
                Effect("less of it", fewer, both),
                Effect("next to none", list(some.values()), both[1:], above=False),
            ]
        }

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The means."""
        held, train = (means_of(results, list(self.rates), x) for x in ("evaluation.loss", "measured.train_loss"))
        return {"C179": f"Mean held-out losses: {held}; on the training text: {train}."}


def _rises(results: Results, variant: str) -> dict[int, float]:
    """By seed, the held-out loss at the end of training minus its minimum over training."""
    curves = {o.seed: o.curves["evaluation.loss"]["values"] for o in results.finished(variant)}
    return {seed: float(values[-1] - min(values)) for seed, values in curves.items()}
