"""Trial: additive, dot, scaled dot and general scores look up a value by its key, at several head dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import qkv
from qkv.normalizers import Normalizer
from qkv.scores import Additive, Dot, General, Score

SYMBOLS, SIZES, SEEDS = 64, (16, 128, 512), (0, 1, 2)


class Lookup(nn.Module):
    """Given `keys` pairs of key and value, predict the value whose key equals the query.

    Which query symbol asks for which key symbol is learnt: both have tables and projections of their own, made so
    that queries and keys start with variance 1 in each dimension.
    """

    def __init__(self, size: int, score: Callable[[nn.Module], Score], normalizer: Normalizer | None = None) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(SYMBOLS, size))
        self.keys = nn.Parameter(torch.randn(SYMBOLS, size))
        self.w_q = nn.Parameter(torch.randn(size, size) / size**0.5)
        self.w_k = nn.Parameter(torch.randn(size, size) / size**0.5)
        self.values = nn.Embedding(SYMBOLS, 64)
        self.vector = nn.Parameter(torch.randn(size) / size**0.5)  # for the additive score
        self.between = nn.Parameter(torch.randn(size, size) / size**0.5)  # for the general score
        self.out = nn.Linear(64, SYMBOLS)
        self.score, self.normalizer = score, normalizer

    def forward(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q = (self.queries @ self.w_q)[query][:, None, None]
        k = (self.keys @ self.w_k)[keys][:, None]
        v = self.values(values)[:, None]
        found = qkv.attend(q, k, v, score=self.score(self), normalizer=self.normalizer, kernel="eager")
        assert isinstance(found, Tensor)
        return self.out(found[:, 0, 0])


def batch(size: int, keys: int, generator: torch.Generator) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Queries (size,), distinct keys (size, keys), values (size, keys), and the target values (size,)."""
    chosen = torch.rand(size, SYMBOLS, generator=generator).argsort(1)[:, :keys]
    values = torch.randint(SYMBOLS, (size, keys), generator=generator)
    at = torch.randint(keys, (size,), generator=generator)
    row = torch.arange(size)
    return (chosen[row, at], chosen, values), values[row, at]


def learn(model: Lookup, seed: int, *, keys: int, steps: int, lr: float = 3e-3) -> float:
    """Train a model; returns its accuracy on 2,000 new queries."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        asked, answer = batch(64, keys, generator)
        loss = nn.functional.cross_entropy(model(*asked), answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    asked, answer = batch(2000, keys, torch.Generator().manual_seed(10_000 + seed))
    with torch.no_grad():
        return round((model(*asked).argmax(-1) == answer).double().mean().item(), 4)


SCORES: dict[str, Callable[[Any], Score]] = {
    "additive": lambda m: Additive(m.vector),
    "dot": lambda m: Dot(scale=1.0),
    "scaled dot": lambda m: Dot(),
    "general": lambda m: General(m.between),
}


def run(quick: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"keys": 8, "steps": 3 if quick else 500, "accuracy": {}}
    for name, score in SCORES.items():
        found["accuracy"][name] = {}
        for size in SIZES:
            runs = []
            for seed in SEEDS:
                torch.manual_seed(seed)
                runs.append(learn(Lookup(size, score), seed, keys=found["keys"], steps=found["steps"]))
            found["accuracy"][name][str(size)] = runs
    return found
