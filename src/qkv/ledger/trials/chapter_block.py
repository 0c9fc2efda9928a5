"""Trial: language models without layer norms, or without residuals, at rising learning rates. Which of them train?"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from qkv.lab.tasks.backcopy import Backcopy
from qkv.models import DecoderConfig
from qkv.nn import TransformerBlock

VARIANTS, RATES, SEEDS = ("both", "no norms", "no residuals"), (1e-3, 3e-3, 1e-2, 3e-2), 3
TASK = Backcopy(length=32, model=DecoderConfig(layers=8, heads=2, d_model=32))


class Chained(nn.Module):
    """A block without residual connections."""

    def __init__(self, block: TransformerBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        x = self.block.attention(self.block.attention_norm(x), **given)
        return self.block.feed_forward(self.block.feed_forward_norm(x))


def trained(variant: str, rate: float, seed: int, steps: int) -> float | None:
    """The mean loss over the last tenth of the steps, in nats; None if it is NaN."""
    torch.manual_seed(seed)
    model = TASK.build()
    if variant == "no norms":
        model.norm = nn.Identity()
        for block in model.blocks:
            block.attention_norm = block.feed_forward_norm = nn.Identity()
    elif variant == "no residuals":
        model.blocks = nn.ModuleList(map(Chained, model.blocks))
    optimiser = torch.optim.Adam(model.parameters(), rate)
    losses = []
    for step in range(steps):
        loss = TASK.loss(model, TASK.batch(step, 8, seed))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 10) :]
    mean = sum(last) / len(last)
    return mean if math.isfinite(mean) else None


def run(quick: bool = False) -> dict[str, Any]:
    """The loss by variant, learning rate and seed, and the loss of uniform predictions."""
    found: dict[str, Any] = {"guessing": math.log(TASK.symbols)}
    for variant in VARIANTS:
        found[variant] = {
            f"{rate:g}": [trained(variant, rate, seed, 2 if quick else 150) for seed in range(1 if quick else SEEDS)]
            for rate in RATES
        }
    return found
