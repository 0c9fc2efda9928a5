"""Experiments on architecture choices that should not affect sinks (Gu et al. 2025, arXiv:2410.10781, §6.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from qkv.lab.experiments.base import Conclusion, Results, Verdict, holds_if
from qkv.lab.experiments.sinks import ALPHA, SINK, TASK, Change, Sweep, has_sink, model_variants, summaries

LIMIT = 14_000_000
"""The number of parameters of the smallest model with sinks, according to the sources."""


class SinkEverywhere(Sweep):
    """A sweep whose claim is that every variant has a sink."""

    what: ClassVar[str]
    """The setting that varies, as the first words of the title."""

    def conclude(self, results: Results) -> Conclusion:
        """The claim holds if every run of every variant has a sink."""
        found = results.by_variant(ALPHA)
        without = [v for v in results.variants if not has_sink(found.get(v, []))]
        seen = len(without) < len(results.variants)
        if not seen:
            title = f"{self.what}: no variant has a sink in every run"
        elif without:
            none = all(max(found.get(v, [0.0])) <= SINK for v in without)
            title = f"{self.what}: {'no' if none else 'not every'} run forms a sink with {', '.join(without)}"
        else:
            title = f"{self.what}: every run of every variant forms a sink"
        text = (
            f"Weight of the strongest head on the first token: {summaries(found)}. The claim holds if every run of "
            f"every variant has more than {SINK}, and cannot be seen if no variant has."
        )
        extra = f" Without: {', '.join(without)}." if without and seen else ""
        return Conclusion(
            [Verdict(self.claims[0], holds_if(not without, seen), text)], title, f"{title}. {text}{extra}"
        )


class Positions(SinkEverywhere):
    """Six position schemes, including none."""

    name = "positions"
    question = "Does a sink form with every position scheme, and without positions?"
    claims = ("C085",)
    axis = "positions"
    what = "Position schemes"
    variants: ClassVar[Mapping[str, Change]] = model_variants(
        positions=("none", "learned", "sinusoidal", "rotary", "alibi", "t5")
    )


class NormPlace(SinkEverywhere):
    """Pre-norm against post-norm."""

    name = "norm_place"
    question = "Does a sink form both with pre-norm and with post-norm?"
    claims = ("C086",)
    axis = "place of the norms"
    what = "Pre-norm against post-norm"
    variants: ClassVar[Mapping[str, Change]] = model_variants(place=("pre", "post"))


class Activation(SinkEverywhere):
    """Three activations of the feed-forward layer."""

    name = "activation"
    question = "Does a sink form with every activation of the feed-forward layers?"
    claims = ("C087",)
    axis = "activation"
    what = "Feed-forward activations"
    variants: ClassVar[Mapping[str, Change]] = model_variants(activation=("relu", "gelu_tanh", "swiglu"))


class Heads(SinkEverywhere):
    """One to eight heads at the same model width."""

    name = "heads"
    question = "Does a sink form with any number of heads?"
    claims = ("C088",)
    axis = "heads"
    what = "Numbers of heads"
    variants: ClassVar[Mapping[str, Change]] = model_variants(heads=(1, 2, 4, 8))


class ModelSize(Sweep):
    """Models of different width and depth."""

    name = "model_size"
    question = "How small can a model be and still form a sink?"
    claims = ("C066",)
    axis = "layers × width"
    variants: ClassVar[Mapping[str, Change]] = {
        f"{layers} × {width}": Change(model={"layers": layers, "d_model": width})
        for layers, width in ((1, 16), (1, 64), (1, 128), (3, 64))
    }

    def conclude(self, results: Results) -> Conclusion:
        """The claim is about models from 14 million parameters on; all models here are smaller."""
        found = results.by_variant(ALPHA)
        able = [variant for variant in results.variants if has_sink(found.get(variant, []))]
        sizes = {v: replace(TASK, model=replace(TASK.model, **c.model)).build() for v, c in self.variants.items()}
        counts = {v: sum(p.numel() for p in model.parameters()) for v, model in sizes.items() if v in results.variants}
        text = (
            f"Weight of the strongest head on the first token by layers × width: {summaries(found)}. Parameters: "
            f"{', '.join(f'{v} {n:,}' for v, n in counts.items())}. The claim, of 14 million, holds if a model no "
            f"larger than that has a sink (> {SINK}) in every run."
        )
        smallest = min(able, key=counts.__getitem__, default=None)
        title = (
            "No model here has a sink in every run"
            if smallest is None
            else f"A model of {counts[smallest]:,} parameters has a sink in every run"
        )
        holds = holds_if(smallest is not None and counts[smallest] <= LIMIT)
        return Conclusion([Verdict("C066", holds, text)], title, f"{title}. {text}")
