"""Trial: two look-ups at once, with one head of dimension 32 or two of dimension 16 (equally many parameters)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qkv.nn import FeedForward, MultiHeadAttention
from qkv.positions import Learned

SYMBOLS, LENGTH, WIDTH, BACK, SEEDS = 16, 12, 32, (1, 4), 3


class Layer(nn.Module):
    """One attention layer with two predictions per position: the symbols 1 and 4 positions before."""

    def __init__(self, heads: int, feed_forward: bool) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(SYMBOLS, WIDTH), Learned(LENGTH, WIDTH)
        self.attention = MultiHeadAttention(WIDTH, heads)
        self.feed_forward = FeedForward(WIDTH) if feed_forward else None
        self.outputs = nn.Linear(WIDTH, SYMBOLS * len(BACK))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions.weight
        x = x + self.attention(x)
        if self.feed_forward is not None:
            x = x + self.feed_forward(x)
        return self.outputs(x).unflatten(-1, (len(BACK), SYMBOLS))


def trained(heads: int, feed_forward: bool, seed: int, steps: int) -> dict[str, float]:
    torch.manual_seed(seed)
    rng, model = np.random.default_rng([seed]), Layer(heads, feed_forward)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    first = max(BACK)

    def answers(ids: Tensor) -> Tensor:
        return torch.stack([ids[:, first - back : LENGTH - back] for back in BACK], -1)

    for _ in range(steps):
        ids = torch.from_numpy(rng.integers(SYMBOLS, size=(64, LENGTH)))
        loss = nn.functional.cross_entropy(model(ids)[:, first:].flatten(0, 2), answers(ids).flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    ids = torch.from_numpy(np.random.default_rng([9, seed]).integers(SYMBOLS, size=(500, LENGTH)))
    with torch.no_grad():
        right = model(ids)[:, first:].argmax(-1) == answers(ids)
    return {
        "both": float(right.all(-1).double().mean()),
        "each": right.double().mean((0, 1)).tolist(),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def run(quick: bool = False) -> dict[str, Any]:
    """The share of positions at which both symbols are correct."""
    steps = 5 if quick else 800
    return {
        f"{heads} heads, {'with' if feed_forward else 'without'} feed-forward": [
            trained(heads, feed_forward, seed, steps) for seed in range(SEEDS)
        ]
        for feed_forward in (False, True)
        for heads in (1, 2)
    }
