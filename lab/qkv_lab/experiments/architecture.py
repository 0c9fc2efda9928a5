"""Experiments on architecture choices that should not affect sinks (Gu et al. 2025, arXiv:2410.10781, §6.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from qkv_lab.experiments.base import Results
from qkv_lab.experiments.evidence import FAILS, HOLDS, ONLY, UNSEEN, Criterion, Effect, Verdict
from qkv_lab.experiments.sinks import (
    DATED,
    LESS,
    SINK,
    STRONGEST,
    TASK,
    Change,
    Sweep,
    difference,
    model_variants,
    sink,
)

LIMIT = 14_000_000
"""The number of parameters of the smallest model with sinks, according to the sources."""


class SinkEverywhere(Sweep):
    """A sweep whose claim is that every variant has a sink."""

    what: ClassVar[str]
    """The setting that varies, as the first words of the title."""

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """One effect per variant: its weight on the first token."""
        return {self.claims[0]: [sink(results, variant) for variant in self.variants]}

    def title(self, results: Results, verdicts: Mapping[str, Verdict]) -> str:
        """Which variants have a sink."""
        verdict = verdicts[self.claims[0]]
        counted = [i for i in verdict.intervals if not i.unless]
        without = [i.condition for i in counted if i.clears is False]
        unclear = [i.condition for i in counted if i.clears is None]
        says = {
            HOLDS: "every variant that learns its task forms a sink",
            ONLY: f"no sink with {', '.join(without)}",
            FAILS: "no variant forms a sink",
            UNSEEN: "no variant learns its task",
        }
        found = says.get(verdict.holds, f"undecided for {', '.join(unclear)}")
        return f"{self.what}: {found} ({results.seeds} seeds)"


class Positions(SinkEverywhere):
    """Six position schemes, including none. The models have two layers: with one, not every scheme can copy."""

    name = "positions"
    question = "Does a sink form with every position scheme, and without positions?"
    criteria = (
        Criterion("C085", DATED, STRONGEST, SINK),
        Criterion("C048", "2026-11-24", f"{STRONGEST} with learned positions minus with rotary positions", LESS),
    )
    axis = "positions"
    what = "Position schemes"
    variants: ClassVar[Mapping[str, Change]] = {
        positions: Change(model={"positions": positions, "layers": 2, "heads": 4}, training={"steps": 1000})
        for positions in ("none", "learned", "sinusoidal", "rotary", "alibi", "t5")
    }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """The weight with each scheme, and the difference between two that were chosen after three seeds of each."""
        return {**super().effects(results), "C048": [difference(results, "learned", "rotary")]}


class NormPlace(SinkEverywhere):
    """Pre-norm against post-norm."""

    name = "norm_place"
    question = "Does a sink form both with pre-norm and with post-norm?"
    criteria = (Criterion("C086", DATED, STRONGEST, SINK),)
    axis = "place of the norms"
    what = "Pre-norm against post-norm"
    variants: ClassVar[Mapping[str, Change]] = {
        **model_variants(place=("pre", "post")),
        "post, 3 × the steps": Change(model={"place": "post"}, training={"steps": 1500}),
    }


class Activation(SinkEverywhere):
    """Three activations of the feed-forward layer."""

    name = "activation"
    question = "Does a sink form with every activation of the feed-forward layers?"
    criteria = (Criterion("C087", DATED, STRONGEST, SINK),)
    axis = "activation"
    what = "Feed-forward activations"
    variants: ClassVar[Mapping[str, Change]] = model_variants(activation=("relu", "gelu_tanh", "swiglu"))


class Heads(SinkEverywhere):
    """One to eight heads at the same model width."""

    name = "heads"
    question = "Does a sink form with any number of heads?"
    criteria = (Criterion("C088", DATED, STRONGEST, SINK),)
    axis = "heads"
    what = "Numbers of heads"
    variants: ClassVar[Mapping[str, Change]] = model_variants(heads=(1, 2, 4, 8))


class ModelSize(Sweep):
    """Models of different width and depth."""

    name = "model_size"
    question = "How small can a model be and still form a sink?"
    criteria = (
        Criterion("C066", DATED, f"{STRONGEST}, in models of fewer than {LIMIT / 1e6:.0f} million parameters", SINK),
    )
    axis = "layers × width"
    variants: ClassVar[Mapping[str, Change]] = {
        "1 × 16": Change(model={"layers": 1, "d_model": 16}, training={"steps": 1500}),
        "1 × 64": Change(),
        "1 × 128": Change(model={"layers": 1, "d_model": 128}),
        "3 × 64": Change(model={"layers": 3, "d_model": 64}),
    }

    def sizes(self) -> dict[str, str]:
        """The name of each variant with its number of parameters."""
        found = {}
        for variant, change in self.variants.items():
            model = replace(TASK, model=replace(TASK.model, **change.model)).build()
            count = sum(p.numel() for p in model.parameters())
            found[variant] = f"{variant} ({count:,} parameters)"
        return found

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """One effect per size."""
        return {"C066": [sink(results, variant, name) for variant, name in self.sizes().items()]}

    def title(self, results: Results, verdicts: Mapping[str, Verdict]) -> str:
        """The smallest model with a sink."""
        able = [i.condition for i in verdicts["C066"].intervals if not i.unless and i.clears]
        seeds = f"({results.seeds} seeds)"
        return f"Smallest model with a sink: {able[0]} {seeds}" if able else f"No model here has a sink {seeds}"
