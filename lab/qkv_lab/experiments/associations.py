"""Experiments on looking a value up by its key: additive and dot-product scores, linear and hard attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from qkv.features import elu_plus_one
from qkv.normalizers import Hard, Identity
from qkv.scores import Additive, Dot, Features, Score
from qkv_lab.experiments.base import Results
from qkv_lab.experiments.evidence import FAILS, HOLDS, ONLY, Criterion, Effect
from qkv_lab.experiments.lookup import Asked, Lookup, learn, plain, reinforce, straight_through
from qkv_lab.experiments.sinks import DATED
from qkv_lab.experiments.small import LEAST, Small, means_of, minus
from qkv_lab.task import Measured

ACCURACY = "measured.accuracy"
RIGHT = 0.9
"""A model can do the task if it finds this share of the values."""


class ScoreFunctions(Small):
    """Additive, dot-product and scaled dot-product scores at several head dimensions."""

    name = "score_functions"
    question = "Which scores learn a look-up: additive, dot-product, scaled dot-product, at several head dimensions?"
    says: ClassVar[Mapping[str, str]] = {
        HOLDS: "Additive scores learn a look-up without a scale at every size",
        FAILS: "Additive scores need a scale, too",
        ONLY: "Additive scores learn a look-up without a scale at some sizes only",
    }
    criteria = (
        Criterion("C257", DATED, "Share of values that additive scores find, without a scale", RIGHT),
        Criterion("C261", DATED, "Absolute difference of the shares that additive and scaled dot-product scores find",
                  LEAST, above=False),
        Criterion("C332", DATED, "Share of values that dot products find without a scale minus that of additive scores",
                  -LEAST),
        Criterion("C337", DATED, "Share of values that dot products find at head dimension 256, with 1/√d minus "
                  "without a scale", LEAST),
    )  # fmt: skip
    looks = (20, 40)
    sizes = (16, 64, 256)
    scores: Mapping[str, Callable[[Any], Score]] = {
        "additive": lambda m: Additive(m.vector),
        "dot": lambda m: Dot(scale=1.0),
        "scaled dot": lambda m: Dot(),
    }

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        """One model for each score and size."""
        found = {}
        for size in self.sizes:
            for name, score in self.scores.items():
                torch.manual_seed(seed)
                found[f"{name}, {size}"] = learn(Lookup(size, score), seed, keys=8, steps=3 if quick else 600)
        return found

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """One effect per head dimension."""
        sizes = [n for n in self.sizes if results.finished(f"additive, {n}")]
        works, differs, plain_minus = [], [], []
        for n in sizes:
            a, b = f"additive, {n}", f"scaled dot, {n}"
            works.append(Effect(f"head dimension {n}", results.values(a, ACCURACY), (a,)))
            gaps = [abs(x) for x in results.differences(a, b, ACCURACY)]
            differs.append(Effect(f"head dimension {n}", gaps, (a, b)))
            plain_minus.append(minus(results, f"dot, {n}", a, ACCURACY, f"head dimension {n}"))
        largest = self.sizes[-1]
        scale = minus(results, f"scaled dot, {largest}", f"dot, {largest}", ACCURACY)
        return {"C257": works, "C261": differs, "C332": plain_minus, "C337": [scale]}

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The means of all scores."""
        unscaled = means_of(results, [f"dot, {n}" for n in self.sizes], ACCURACY)
        scaled = means_of(results, [v for v in results.variants if not v.startswith("dot")], ACCURACY)
        return {
            "C257": f"Dot products without a scale: {unscaled}.",
            "C261": f"Means: {scaled}.",
            "C332": f"Means: {unscaled}.",
            "C337": f"Without a scale: {unscaled}. Queries and keys have unit variance at the start.",
        }


class LinearAttention(Small):
    """Softmax and linear attention with the same projections, on lists of 4 and of 48 pairs."""

    name = "linear_attention"
    question = "Does linear attention find fewer values than softmax attention in a long list?"
    says: ClassVar[Mapping[str, str]] = {
        HOLDS: "Linear attention finds fewer values in a long list than softmax",
        FAILS: "Linear attention finds as many values as softmax",
    }
    criteria = (
        Criterion("C298", DATED, "Share of values that a head of 16 dimensions finds among 48 pairs, with softmax "
                  "minus with linear attention", LEAST),
    )  # fmt: skip
    looks = (20, 40)
    size = 16
    lengths = (4, 48)

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        """One model for each kind of attention and number of pairs."""
        found = {}
        for keys in self.lengths:
            for name in ("softmax", "linear"):
                torch.manual_seed(seed)
                score = (lambda _: Dot()) if name == "softmax" else (lambda _: Features(elu_plus_one))
                model = Lookup(self.size, score, None if name == "softmax" else Identity("sum"))
                found[f"{name}, {keys} pairs"] = learn(model, seed, keys=keys, steps=3 if quick else 600)
        return found

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """By the longest list: what is less expressive fails there first."""
        return {"C298": [minus(results, "softmax, 48 pairs", "linear, 48 pairs", ACCURACY)]}

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The means of all runs."""
        means = means_of(results, list(results.variants), ACCURACY)
        return {"C298": f"Means: {means} (linear: φ = elu + 1). Its sum of 16 × 64 numbers must hold all pairs."}


class HardAttention(Small):
    """Hard attention to one of 4 keys, trained in three ways."""

    name = "hard_attention"
    question = "Can hard attention be trained without reinforcement learning?"
    says: ClassVar[Mapping[str, str]] = {
        HOLDS: "Hard attention learns only with REINFORCE",
        FAILS: "Hard attention learns without reinforcement",
    }
    criteria = (
        Criterion("C365", DATED, "Share of values that hard attention finds when trained without reinforcement "
                  "learning, in the better of two ways", RIGHT, above=False),
    )  # fmt: skip
    looks = (20, 40)
    ways: Mapping[str, Callable[[Lookup, Asked, Tensor], Tensor]] = {
        "plain backpropagation": plain,
        "straight-through": straight_through,
        "REINFORCE": reinforce,
    }

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        """One model for each way of training."""
        found = {}
        for name, loss in self.ways.items():
            torch.manual_seed(seed)
            model = Lookup(32, lambda _: Dot(), Hard())
            found[name] = learn(model, seed, keys=4, steps=3 if quick else 1000, loss=loss)
        return found

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """The claim fails if a way without rewards learns the task."""
        without = [results.by_seed(name, ACCURACY) for name in ("plain backpropagation", "straight-through")]
        better = [max(x[seed] for x in without) for seed in without[0] if all(seed in x for x in without)]
        learnt = Effect("the share with REINFORCE", results.values("REINFORCE", ACCURACY), bound=RIGHT, above=True,
                        premise=True)  # fmt: skip
        return {"C365": [learnt, Effect("", better, ("plain backpropagation", "straight-through"))]}

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The means of all ways; a guess among 4 is right in a quarter of the cases."""
        return {"C365": f"Means: {means_of(results, list(self.ways), ACCURACY)}; guessing one of 4 would be 0.25."}
