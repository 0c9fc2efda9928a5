"""Experiment on the parts of a block: deep models without residual connections, or without layer norms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qkv.models import DecoderConfig
from qkv.nn import TransformerBlock
from qkv_lab.experiments.base import Outcome, Results
from qkv_lab.experiments.evidence import FAILS, HOLDS, Criterion, Effect
from qkv_lab.experiments.sinks import DATED
from qkv_lab.experiments.small import Small, fit
from qkv_lab.task import Measured, Training
from qkv_lab.tasks.backcopy import Backcopy

BOTH, BARE, CHAINED = "both", "no norms", "no residuals"
RATES = (1e-3, 1e-2, 3e-2)
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


class Blocks(Small):
    """Language models of 8 layers at three learning rates, with residuals and norms, and without either."""

    name = "blocks"
    question = "Do deep models train without residual connections, and is training stable without layer norms?"
    says: ClassVar[Mapping[str, str]] = {
        HOLDS: "Eight layers learn with residual connections, and not without",
        FAILS: "Eight layers learn without residual connections, or not even with them",
    }
    criteria = (
        Criterion("C050", DATED, "Loss (nats per token) of token frequencies minus that of models of 8 layers, at the "
                  "best of three learning rates", GAIN, parts=True),
        Criterion("C051", DATED, "Share of three learning rates at which a model of 8 layers ends worse than guessing, "
                  "without layer norms minus with them", 0.0),
    )  # fmt: skip
    looks: ClassVar[tuple[int, ...]] = (10, 20, 40)
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
            losses = [self._loss(variant, rate, seed, steps) for rate in RATES]
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
        losses = fit(model, lambda step: self.task.loss(model, self.task.batch(step, 8, seed)), training)
        last = losses[-max(1, steps // 10) :]
        mean = sum(last) / len(last)
        return mean if len(losses) == steps and math.isfinite(mean) else None

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """C050 has two parts: with residuals the model learns, and without them it does not at any rate."""
        gain = {v: [_gain(o) for o in results.finished(v)] for v in (BOTH, CHAINED)}
        lost = {v: {o.seed: self._lost(o) for o in results.finished(v)} for v in (BOTH, BARE)}
        return {
            "C050": [
                Effect("with residuals", gain[BOTH], (BOTH,)),
                Effect("without", gain[CHAINED], (CHAINED,), above=False),
            ],
            "C051": [Effect("", [lost[BARE][s] - lost[BOTH][s] for s in lost[BARE] if s in lost[BOTH]], (BOTH, BARE))],
        }

    def _lost(self, outcome: Outcome) -> float:
        """The share of learning rates at which the loss is above that of guessing, or not finite."""
        guess = math.log(self.task.symbols)
        return sum(x is None or x > guess for x in outcome.measured["losses"]) / len(RATES)

    def remarks(self, results: Results) -> Mapping[str, str]:
        """At which rates training fails."""
        parts = []
        for variant in (BOTH, BARE):
            runs = results.finished(variant)
            guess = math.log(self.task.symbols)
            lost = [sum(o.measured["losses"][i] is None or o.measured["losses"][i] > guess for o in runs)
                    for i in range(len(RATES))]  # fmt: skip
            parts.append(f"{variant}: {', '.join(f'{n} at {r:g}' for n, r in zip(lost, RATES, strict=True))}")
        return {"C051": f"Runs that end worse than guessing, by learning rate, of {results.seeds}: {'; '.join(parts)}."}


def _gain(outcome: Outcome) -> float:
    """The loss of token frequencies minus the best loss; that of a model that never ends finite is −1."""
    losses = [x for x in outcome.measured["losses"] if x is not None]
    return float(outcome.measured["frequencies"]) - min(losses) if losses else -1.0
