"""Trial: recall of one marked symbol after 4 to 64 tokens of noise, by attention and by recurrent networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qkv.ledger.trials.lesson_reversal import Model, causal

KINDS, EARLY, D = 8, 4, 32
LAGS = (4, 16, 64)
QUESTION, VOCABULARY = 2 * KINDS, 2 * KINDS + 1
"""Tokens: KINDS symbols that are asked for, as many that are noise, and the question."""


class Recurrent(nn.Module):
    """One recurrent layer; the prediction is made from its last state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, D)
        self.layer: nn.Module = (
            nn.GRU(D, 2 * D, batch_first=True) if kind == "GRU" else nn.RNN(D, 2 * D, batch_first=True)
        )
        self.head = nn.Linear(2 * D, KINDS)

    def forward(self, ids: Tensor) -> Tensor:
        answer: Tensor = self.head(self.layer(self.tokens(ids))[0][:, -1])
        return answer


class Attentive(nn.Module):
    """One causal attention layer; the prediction is made at the last position."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.model, self.mask = Model(VOCABULARY, n, d=D, heads=2, layers=1), causal(n)

    def forward(self, ids: Tensor) -> Tensor:
        answer: Tensor = self.model(ids, self.mask)[0][:, -1, :KINDS]
        return answer


def sequences(size: int, lag: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences with a marked symbol near the start, noise, and a query token; and the symbol to recall."""
    ids = torch.randint(KINDS, 2 * KINDS, (size, EARLY + lag), generator=generator)
    asked = torch.randint(KINDS, (size,), generator=generator)
    ids[torch.arange(size), torch.randint(EARLY, (size,), generator=generator)] = asked
    ids[:, -1] = QUESTION
    return ids, asked


def one(kind: str, lag: int, seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    model = Attentive(EARLY + lag) if kind == "attention" else Recurrent(kind)
    adam, reached = torch.optim.Adam(model.parameters(), lr=3e-3), None
    test, asked = sequences(500, lag, generator)
    accuracy = 0.0
    for step in range(1, steps + 1):
        ids, targets = sequences(32, lag, generator)
        loss = nn.functional.cross_entropy(model(ids), targets)
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        if step % 25 == 0 or step == steps:
            with torch.no_grad():
                accuracy = (model(test).argmax(-1) == asked).float().mean().item()
            reached = step if reached is None and accuracy >= 0.95 else reached
    parameters = sum(p.numel() for p in model.parameters())
    return {"accuracy": accuracy, "steps_to_95_percent": reached, "parameters": parameters}


def run(quick: bool = False) -> dict[str, Any]:
    """The accuracy on new sequences by model, lag and seed, after equally many steps. Chance is 1/8."""
    steps, seeds = (2, 1) if quick else (250, 3)
    return {
        kind: {str(lag): {str(s): one(kind, lag, s, steps) for s in range(seeds)} for lag in LAGS}
        for kind in ("attention", "RNN", "GRU")
    }
