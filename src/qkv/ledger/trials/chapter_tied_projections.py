"""Trial: separate or shared projections of queries, keys and values, on a task with a directed relation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import qkv

SYMBOLS, WIDTH, SEEDS = 12, 32, 3
VARIANTS = ("x itself", "one for all", "one for q and k", "one for q and k, twice as wide", "three")


class Layer(nn.Module):
    """Tokens are pairs of a symbol and a colour. The target of a token is the colour of the next symbol's token."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.symbol, self.colour = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(SYMBOLS, WIDTH)
        wide = 2 * WIDTH if variant.endswith("wide") else WIDTH

        def new(width: int) -> nn.Module:
            return nn.Linear(WIDTH, width, bias=False)

        self.q = nn.Identity() if variant == "x itself" else new(wide)
        self.k = new(wide) if variant == "three" else self.q
        self.v = self.q if variant in ("x itself", "one for all") else new(WIDTH)
        self.output = nn.Sequential(nn.Linear(2 * WIDTH, 128), nn.GELU(), nn.Linear(128, SYMBOLS))

    def forward(self, symbols: Tensor, colours: Tensor) -> Tensor:
        x = self.symbol(symbols) + self.colour(colours)
        q, k, v = (f(x)[:, None] for f in (self.q, self.k, self.v))
        return self.output(torch.cat([x, qkv.attend(q, k, v)[:, 0]], -1))


def tokens(rng: np.random.Generator, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """All symbols in random order with random colours, and the target colour of every token."""
    symbols = torch.from_numpy(np.argsort(rng.random((size, SYMBOLS)), 1))
    colours = torch.from_numpy(rng.integers(SYMBOLS, size=(size, SYMBOLS)))
    where = symbols.argsort(1).gather(1, (symbols + 1) % SYMBOLS)
    return symbols, colours, colours.gather(1, where)


def trained(variant: str, seed: int, steps: int) -> float:
    """The accuracy on new rows."""
    torch.manual_seed(seed)
    rng, model = np.random.default_rng([seed]), Layer(variant)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        symbols, colours, answer = tokens(rng, 64)
        loss = nn.functional.cross_entropy(model(symbols, colours).flatten(0, 1), answer.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    symbols, colours, answer = tokens(np.random.default_rng([9, seed]), 500)
    with torch.no_grad():
        return float((model(symbols, colours).argmax(-1) == answer).double().mean())


def run(quick: bool = False) -> dict[str, Any]:
    """The accuracy by variant and seed."""
    return {v: [trained(v, seed, 5 if quick else 1000) for seed in range(SEEDS)] for v in VARIANTS}
