"""Trial: queries that need four keys at once, with eight heads, grouped or shared key heads, and one wide head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qkv.nn import FeedForward, MultiHeadAttention

WIDTH, SYMBOLS, VALUES, SLOTS, PAIRS, SEEDS = 64, 32, 16, 4, 12, (0, 1, 2)
VARIANTS = {"8 heads": (8, 8), "8 heads, 2 key heads": (8, 2), "8 heads, 1 key head": (8, 1), "1 head": (1, 1)}


class FourQuestions(nn.Module):
    """A query is the sum of four key symbols, each in a slot of its own; the answer is the four values, in order.

    The feed-forward layer is widened by as many weights as shared key heads save, so that all variants are as large.
    """

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.asked = nn.Parameter(torch.randn(SLOTS, SYMBOLS, WIDTH) / SLOTS**0.5)
        self.keys, self.values = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(VALUES, WIDTH)
        self.attention = MultiHeadAttention(WIDTH, heads, kv_heads=kv_heads, bias=False)
        saved = 2 * WIDTH * WIDTH - 2 * WIDTH * (WIDTH // heads) * kv_heads
        self.after = FeedForward(WIDTH, 2 * WIDTH + saved // (2 * WIDTH), bias=False)
        self.out = nn.Linear(WIDTH, SLOTS * VALUES)

    def forward(self, asked: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        query = sum(self.asked[slot, asked[:, slot]] for slot in range(SLOTS))
        found = self.attention(query[:, None], self.keys(keys) + self.values(values))[:, 0]
        return self.out(found + self.after(found)).unflatten(-1, (SLOTS, VALUES))


def batch(size: int, generator: torch.Generator) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Four of the keys (size, 4), keys (size, pairs), values (size, pairs); and the four values."""
    keys = torch.rand(size, SYMBOLS, generator=generator).argsort(1)[:, :PAIRS]
    values = torch.randint(VALUES, (size, PAIRS), generator=generator)
    at = torch.rand(size, PAIRS, generator=generator).argsort(1)[:, :SLOTS]
    return (keys.gather(1, at), keys, values), values.gather(1, at)


def learn(heads: int, kv_heads: int, seed: int, steps: int) -> tuple[float, int]:
    """The accuracy on 1,000 new queries, and the number of parameters."""
    torch.manual_seed(seed)
    model = FourQuestions(heads, kv_heads)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, 2 * (1 - step / steps))
        given, answer = batch(64, generator)
        loss = nn.functional.cross_entropy(model(*given).flatten(0, 1), answer.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    given, answer = batch(1000, torch.Generator().manual_seed(10_000 + seed))
    with torch.no_grad():
        right = (model(*given).argmax(-1) == answer).double().mean().item()
    return round(right, 4), sum(p.numel() for p in model.parameters())


def run(quick: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"steps": 3 if quick else 1000, "accuracy": {}, "weights": {}}
    for name, (heads, kv_heads) in VARIANTS.items():
        runs = [learn(heads, kv_heads, seed, found["steps"]) for seed in SEEDS]
        found["accuracy"][name], found["weights"][name] = [right for right, _ in runs], runs[0][1]
    return found
