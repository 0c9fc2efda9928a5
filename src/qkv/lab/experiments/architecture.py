"""What does not matter for whether there is a sink (Gu et al. 2025, arXiv:2410.10781, §6.1): sweeps with one rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from qkv.lab.experiments.base import Conclusion, Results, Verdict, holds_if
from qkv.lab.experiments.sinks import ALPHA, SINK, TASK, Change, Sweep, has_sink, model_variants, summaries

LIMIT = 14_000_000
"""Parameters of the smallest model in which the sources say sinks were seen."""


class Indifferent(Sweep):
    """Variants that should all have a sink."""

    what: ClassVar[str]
    """What varies: the subject of a sentence."""

    def conclude(self, results: Results) -> Conclusion:
        """It does not matter if every run of every variant has a sink."""
        found = results.by_variant(ALPHA)
        without = [v for v in results.variants if not has_sink(found.get(v, []))]
        seen = len(without) < len(results.variants)
        if not seen:
            title = f"{self.what}: no variant has a sink in every run"
        elif without:
            title = f"{self.what}: no sink in every run with {', '.join(without)}"
        else:
            title = f"{self.what}: a sink appears in every run of every variant"
        text = (
            f"Weight of the strongest head on the first token: {summaries(found)}. The claim holds if every run of "
            f"every variant has more than {SINK}, and cannot be seen if no variant has."
        )
        extra = f" Without: {', '.join(without)}." if without and seen else ""
        return Conclusion(
            [Verdict(self.claims[0], holds_if(not without, seen), text)], title, f"{title}. {text}{extra}"
        )


class Positions(Indifferent):
    """Six ways to tell a model where tokens stand."""

    name = "positions"
    question = "Is there a sink with every kind of positions, and with none?"
    claims = ("C085",)
    axis = "positions"
    what = "Position schemes"
    variants: ClassVar[Mapping[str, Change]] = model_variants(
        positions=("none", "learned", "sinusoidal", "rotary", "alibi", "t5")
    )


class NormPlace(Indifferent):
    """Norms before or after."""

    name = "norm_place"
    question = "Does it matter whether norms stand before the layers or after the residuals?"
    claims = ("C086",)
    axis = "place of the norms"
    what = "Pre- and post-norm"
    variants: ClassVar[Mapping[str, Change]] = model_variants(place=("pre", "post"))


class Activation(Indifferent):
    """Three feed-forward layers."""

    name = "activation"
    question = "Does the activation of the feed-forward layers matter?"
    claims = ("C087",)
    axis = "activation"
    what = "Feed-forward activations"
    variants: ClassVar[Mapping[str, Change]] = model_variants(activation=("relu", "gelu_tanh", "swiglu"))


class Heads(Indifferent):
    """One head to eight, in the same width."""

    name = "heads"
    question = "Does the number of heads matter?"
    claims = ("C088",)
    axis = "heads"
    what = "Numbers of heads"
    variants: ClassVar[Mapping[str, Change]] = model_variants(heads=(1, 2, 4, 8))


class ModelSize(Sweep):
    """Widths, and depths."""

    name = "model_size"
    question = "How small can a model be and still have a sink?"
    claims = ("C066",)
    axis = "layers × width"
    variants: ClassVar[Mapping[str, Change]] = {
        f"{layers} × {width}": Change(model={"layers": layers, "d_model": width})
        for layers, width in ((1, 16), (1, 64), (1, 128), (3, 64))
    }

    def conclude(self, results: Results) -> Conclusion:
        """The claim is of 14 million parameters; all models here are far smaller."""
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
