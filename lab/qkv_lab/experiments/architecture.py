"""Experiments: heads, sizes, the place of norms, blocks, learning rate, dropout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from qkv.models import DecoderConfig
from qkv.nn import TransformerBlock
from qkv_lab.experiments import small
from qkv_lab.experiments.base import Experiment
from qkv_lab.experiments.evidence import Criterion, Effect
from qkv_lab.experiments.results import Outcome, Results
from qkv_lab.experiments.small import DATED, LEAST, PLAIN, SINK, STRONGEST, TASK, TRAINING, Change, Sweep
from qkv_lab.task import Measured, Training
from qkv_lab.tasks.backcopy import Backcopy

LIMIT = 14_000_000
"""The number of parameters of the smallest model with sinks, according to the sources."""


class SinkEverywhere(Sweep):
    """A sweep whose claim is that every variant has a sink."""

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return {self.claims[0]: [small.sink(results, variant) for variant in self.variants]}


class Positions(SinkEverywhere):
    """Six position schemes, including none. The models have two layers: with one, not every scheme can copy."""

    name = "positions"
    question = "Does a sink form with every position scheme, and without positions?"
    seeds = 40
    criteria = (
        Criterion("C085", DATED, STRONGEST, SINK),
        Criterion("C048", "2026-11-24", f"{STRONGEST} with learned positions minus with rotary positions", LEAST),
    )
    variants: ClassVar[Mapping[str, Change]] = {
        positions: Change(model={"positions": positions, "layers": 2, "heads": 4}, training={"steps": 1000})
        for positions in ("none", "learned", "sinusoidal", "rotary", "alibi", "t5")
    }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """The weight with each scheme, and the difference between two that were chosen after three seeds of each."""
        return {**super().effects(results), "C048": [small.difference(results, "learned", "rotary")]}


class NormPlace(SinkEverywhere):
    """Pre-norm against post-norm."""

    name = "norm_place"
    question = "Does a sink form both with pre-norm and with post-norm?"
    criteria = (Criterion("C086", DATED, STRONGEST, SINK),)
    variants: ClassVar[Mapping[str, Change]] = {
        **{place: Change(model={"place": place}) for place in ("pre", "post")},
        "post, 3 × the steps": Change(model={"place": "post"}, training={"steps": 1500}),
    }


class Activation(SinkEverywhere):
    """Three activations of the feed-forward layer."""

    name = "activation"
    question = "Does a sink form with every activation of the feed-forward layers?"
    criteria = (Criterion("C087", DATED, STRONGEST, SINK),)
    variants: ClassVar[Mapping[str, Change]] = {
        name: Change(model={"activation": name}) for name in ("relu", "gelu_tanh", "swiglu")
    }


class Heads(SinkEverywhere):
    """One to eight heads at the same model width."""

    name = "heads"
    question = "Does a sink form with any number of heads?"
    criteria = (Criterion("C088", DATED, STRONGEST, SINK),)
    variants: ClassVar[Mapping[str, Change]] = {str(n): Change(model={"heads": n}) for n in (1, 2, 4, 8)}


class ModelSize(Sweep):
    """Models of different width and depth."""

    name = "model_size"
    question = "How small can a model be and still form a sink?"
    criteria = (
        Criterion("C066", DATED, f"{STRONGEST}, in models of fewer than {LIMIT / 1e6:.0f} million parameters", SINK),
    )
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
        return {"C066": [small.sink(results, variant, name) for variant, name in self.sizes().items()]}


BOTH, BARE, CHAINED = "both", "no norms", "no residuals"
BLOCKS_RATES = (1e-3, 1e-2, 3e-2)
GAIN = 0.1
"""Nats per token by which a model must be better than token frequencies to have learnt."""


class Chained(nn.Module):
    """A block without residual connections."""

    def __init__(self, block: TransformerBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        """The block's sublayers one after the other, (b, n, d)."""
        x = self.block.attention(self.block.attention_norm(x), **given)
        out: Tensor = self.block.feed_forward(self.block.feed_forward_norm(x))
        return out


class Blocks(Experiment):
    """Language models of 8 layers at three learning rates, with residuals and norms, and without either."""

    name = "blocks"
    question = "Do deep models train without residual connections, and is training stable without layer norms?"
    criteria = (
        Criterion("C050", DATED, "Loss (nats per token) of token frequencies minus that of models of 8 layers, at the "
                  "best of three learning rates", GAIN, parts=True),
        Criterion("C051", DATED, "Share of three learning rates at which a model of 8 layers ends worse than guessing, "
                  "without layer norms minus with them", 0.0),
    )  # fmt: skip
    task = Backcopy(length=32, model=DecoderConfig(layers=8, heads=2, d_model=32))

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        """The loss over the last tenth of the steps at each learning rate, and that of the tokens' frequencies."""
        steps = 3 if quick else 150
        last = range(steps - max(1, steps // 10), steps)
        targets = torch.cat([self.task.batch(step, 8, seed)["targets"] for step in last]).flatten()
        share = targets.bincount().double() / len(targets)
        frequencies = torch.special.entr(share).sum().item()
        found: dict[str, Measured] = {}
        for variant in (BOTH, BARE, CHAINED):
            losses = [self._loss(variant, rate, seed, steps) for rate in BLOCKS_RATES]
            found[variant] = {"losses": losses, "frequencies": frequencies}
        return found

    def _loss(self, variant: str, rate: float, seed: int, steps: int) -> float | None:
        """The mean loss of the last tenth of the steps; None if it is not finite."""
        torch.manual_seed(seed)
        model = self.task.build()
        if variant == BARE:
            model.norm = nn.Identity()
            for block in model.blocks:
                block.attention_norm = block.feed_forward_norm = nn.Identity()
        elif variant == CHAINED:
            model.blocks = nn.ModuleList(Chained(block) for block in model.blocks)  # type: ignore[arg-type]
        training = Training(steps=steps, lr=rate, warmup=0, decay="none", weight_decay=0.0, clip=0.0, beta2=0.999)
        losses = small.fit(model, lambda step: self.task.loss(model, self.task.batch(step, 8, seed)), training)
        last = losses[-max(1, steps // 10) :]
        mean = sum(last) / len(last)
        return mean if len(losses) == steps and math.isfinite(mean) else None

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """C050 has two parts: with residuals the model learns, and without them it does not at any rate."""
        gain = {v: list(results.by_seed(v, _gain)) for v in (BOTH, CHAINED)}
        return {
            "C050": [Effect("with residuals", gain[BOTH]), Effect("without", gain[CHAINED], above=False)],
            "C051": [Effect("", results.differences(BARE, BOTH, self._lost))],
        }

    def _lost(self, outcome: Outcome) -> float:
        """The share of learning rates at which the loss is above that of guessing, or not finite."""
        guess = math.log(self.task.symbols)
        return sum(x is None or x > guess for x in outcome.measured["losses"]) / len(BLOCKS_RATES)


def _gain(outcome: Outcome) -> float:
    """The loss of token frequencies minus the best loss; that of a model that never ends finite is −1."""
    losses = [x for x in outcome.measured["losses"] if x is not None]
    return float(outcome.measured["frequencies"]) - min(losses) if losses else -1.0


OPTIMISATION_RATES, UNSTABLE = (1e-3, 3e-3, 1e-2, 3e-2), (5e-2, 6e-2, 7e-2)
LONGER = "0.003, 3 × the steps"
DECAYS, SLOW = (0.0, 0.1, 0.5, 1.0, 2.0), 3e-3
KEY = "key bias, "

FEWEST = 0.2  # a share of failed runs, without which stability cannot be compared
SPIKE, SETTLED = 0.5, 100  # a spike is this far above the lowest earlier loss (nats), after this many steps


class LearningRate(Sweep):
    """Learning rates at which models learn, and rates at which training fails, with and without a key bias."""

    name = "learning_rate"
    question = "Does a larger learning rate strengthen the sink, and does a key bias stabilise training at high rates?"
    seeds = 40
    criteria = (
        Criterion("C078", DATED, "Weight of the strongest head on the first token at a learning rate minus that at a "
                  "lower one", LEAST),
        Criterion("C100", DATED, "Share of runs that fail (the loss jumps or becomes NaN, or the task is not learnt) "
                  "minus the share with a key bias, same seeds", 0.1),
    )  # fmt: skip
    curves = ("loss",)
    variants: ClassVar[Mapping[str, Change]] = {
        **{f"{rate:g}": Change(training={"lr": rate}) for rate in (*OPTIMISATION_RATES, *UNSTABLE)},
        LONGER: Change(training={"lr": 3e-3, "steps": 3 * TRAINING.steps}),
        **{f"{KEY}{rate:g}": Change(model={"key_bias": True}, training={"lr": rate}) for rate in UNSTABLE},
    }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        names = [f"{rate:g}" for rate in OPTIMISATION_RATES]
        rises = [small.difference(results, b, a, f"{b} − {a}") for a, b in pairwise(names)]
        rises.append(small.difference(results, "0.01", LONGER, "0.01 − 0.003 with 3 times the steps"))
        fails: list[Effect] = []
        for rate in UNSTABLE:
            plain, biased = ({o.seed: failed(o) for o in results.variants.get(f"{p}{rate:g}", ())} for p in ("", KEY))
            share = float(np.mean(list(plain.values()))) if plain else 0.0
            few = "" if share >= FEWEST else f"{share:.0%} of its runs fail, fewer than {FEWEST:.0%}"
            both = [float(plain[seed]) - float(biased[seed]) for seed in plain if seed in biased]
            fails.append(Effect(f"rate {rate:g}", both, unless=few))
        return {"C078": rises, "C100": fails}


class WeightDecay(Sweep):
    """Five strengths of weight decay, at a learning rate at which the sink can still become stronger."""

    name = "weight_decay"
    question = "Does stronger weight decay strengthen the sink?"
    seeds = 40
    criteria = (
        Criterion("C082", DATED, "Weight of the strongest head on the first token with weight decay minus that "
                  f"without, at learning rate {SLOW:g}", LEAST),
    )  # fmt: skip
    variants: ClassVar[Mapping[str, Change]] = {
        **{f"{decay:g}": Change(training={"weight_decay": decay, "lr": SLOW}) for decay in DECAYS},
        f"{PLAIN}, rate {TRAINING.lr:g}": Change(),
    }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return {"C082": [small.difference(results, f"{decay:g}", "0", f"{decay:g} − 0") for decay in DECAYS[-2:]]}


def failed(outcome: Outcome) -> bool:
    """True if a run's loss had a spike or diverged, or if the run did not learn its task."""
    if outcome.diverged is not None or not small.learnt(outcome):
        return True
    curve = outcome.curves["loss"]
    losses, late = np.asarray(curve["values"], float), np.asarray(curve["steps"]) > SETTLED
    return bool(((losses - np.minimum.accumulate(losses)) > SPIKE)[late].any())
