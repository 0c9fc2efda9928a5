"""Trial: pointer chasing. How many hops can a Transformer of 1, 2 or 3 layers follow?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qkv.nn import FeedForward, MultiHeadAttention, TransformerBlock
from qkv.positions import Learned

PLACES, WIDTH, HOPS, DEPTHS, SEEDS = 8, 64, (2, 3, 4), (1, 2, 3), 3


class Chaser(nn.Module):
    """Reads a row of pointers; predicts for every position the target after 2, 3 and 4 hops."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(PLACES, WIDTH), Learned(PLACES, WIDTH)
        nn.init.normal_(self.positions.weight)
        self.blocks = nn.Sequential(
            *(TransformerBlock(MultiHeadAttention(WIDTH, 4), FeedForward(WIDTH)) for _ in range(layers))
        )
        self.outputs = nn.Linear(WIDTH, PLACES * len(HOPS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.embedding(ids) + self.positions.weight)
        return self.outputs(x).unflatten(-1, (len(HOPS), PLACES))


def pointers(rng: np.random.Generator, size: int) -> tuple[Tensor, Tensor]:
    """Random permutations as pointers, and the targets after each number of hops."""
    first = torch.from_numpy(np.argsort(rng.random((size, PLACES)), 1))
    place, after = first, []
    for hop in range(2, max(HOPS) + 1):
        place = first.gather(1, place)
        if hop in HOPS:
            after.append(place)
    return first, torch.stack(after, -1)


def trained(layers: int, seed: int, steps: int) -> list[float]:
    """The accuracy by number of hops, on new rows."""
    torch.manual_seed(seed)
    rng, model = np.random.default_rng([seed]), Chaser(layers)
    optimiser = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(steps):
        ids, after = pointers(rng, 64)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 2), after.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    ids, after = pointers(np.random.default_rng([9, seed]), 500)
    with torch.no_grad():
        accuracy: list[float] = (model(ids).argmax(-1) == after).double().mean((0, 1)).tolist()
    return accuracy


def run(quick: bool = False) -> dict[str, Any]:
    """By depth and seed: the accuracy after 2, 3 and 4 hops."""
    steps = 5 if quick else 1500
    return {str(depth): [trained(depth, seed, steps) for seed in range(SEEDS)] for depth in DEPTHS}
