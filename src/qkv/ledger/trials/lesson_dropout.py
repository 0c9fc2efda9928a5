"""Trial: a small text that the model can memorise, with and without dropout of attention weights and outputs."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import torch
from torch import nn

from qkv.ledger.trials.lesson_reversal import Model, causal

CONTEXT, RATES = 64, (0.0, 0.1, 0.3)


def one(rate: float, seed: int, steps: int) -> dict[str, Any]:
    text = torch.tensor(list(inspect.getsource(textwrap).encode("ascii")))
    cut = 6_000
    parts = {"train": text[:cut], "held_out": text[cut : 2 * cut]}
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    model, mask = Model(128, CONTEXT, d=64, dropout=rate), causal(CONTEXT)
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        logits, _ = model(rows[:, :-1], mask)
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    def windows(part: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return part[starts[:, None] + torch.arange(CONTEXT + 1)]

    curve: list[list[float]] = []
    for step in range(1, steps + 1):
        model.train()
        starts = torch.randint(cut - CONTEXT, (16,), generator=generator)
        loss = loss_of(windows(parts["train"], starts))
        adam.zero_grad()
        loss.backward()
        adam.step()
        if step % 40 == 0 or step == steps:
            model.eval()
            with torch.no_grad():
                found = [loss_of(windows(p, torch.arange(0, len(p) - CONTEXT, CONTEXT))).item() for p in parts.values()]
            curve.append([step, *found])
    _, train, held_out = curve[-1]
    lowest = min(row[2] for row in curve)
    return {"curve": curve, "train": train, "held_out": held_out, "lowest": lowest, "rise": held_out - lowest}


def run(quick: bool = False) -> dict[str, Any]:
    """Losses (nats per byte, dropout disabled) on training and held-out text, by dropout rate and seed."""
    steps, seeds = (2, 1) if quick else (400, 3)
    return {str(rate): {str(seed): one(rate, seed, steps) for seed in range(seeds)} for rate in RATES}
