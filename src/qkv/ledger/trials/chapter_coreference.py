"""Trial: does a head learn to attend from a pronoun to its antecedent, without supervision of the link?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qkv.lab.heads import maps
from qkv.nn import FeedForward, MultiHeadAttention, TransformerBlock
from qkv.positions import Learned

ANIMALS, PLACES, TIRED, WIDE, FILLERS, WORDS = (
    range(0, 8),
    range(8, 16),
    range(16, 20),
    range(20, 24),
    range(24, 40),
    41,
)
IT, LENGTH, LAYERS, WIDTH, SEEDS = 40, 12, 2, 32, 3


class Reader(nn.Module):
    """A bidirectional Transformer of two layers, which predicts the antecedent at the pronoun."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(WORDS, WIDTH), Learned(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            TransformerBlock(MultiHeadAttention(WIDTH, 2), FeedForward(WIDTH)) for _ in range(LAYERS)
        )
        self.output = nn.Linear(WIDTH, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.output(x)


def sentences(rng: np.random.Generator, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """An animal and a place in any order among fillers, then `it`, and an adjective that fits one of them.

    Words (size, length), where the antecedent stands, and where the other noun does.
    """
    ids = rng.choice(FILLERS, (size, LENGTH))
    row = np.arange(size)
    # Positions of the animal and of the place, before `it`.
    places = np.argsort(rng.random((size, LENGTH - 3)), 1)[:, :2]
    ids[row, places[:, 0]], ids[row, places[:, 1]] = rng.choice(ANIMALS, size), rng.choice(PLACES, size)
    fits = rng.integers(2, size=size)  # the antecedent: 0 the animal, 1 the place
    ids[:, -3], ids[:, -1] = IT, np.where(fits == 0, rng.choice(TIRED, size), rng.choice(WIDE, size))
    return torch.from_numpy(ids), torch.from_numpy(places[row, fits]), torch.from_numpy(places[row, 1 - fits])


def looks(model: nn.Module, ids: Tensor, antecedent: Tensor, other: Tensor) -> dict[str, float]:
    """Accuracy, and the mean weights from the pronoun in the head with the largest weight on the antecedent."""
    with torch.no_grad():
        right = model(ids)[:, -3].argmax(-1) == ids.gather(1, antecedent[:, None])[:, 0]
    from_it = torch.from_numpy(maps(model, ids))[:, :, :, -3].double()  # (b, layer, head, key)
    to, away = (from_it.gather(3, x[:, None, None, None].expand(-1, *from_it.shape[1:3], 1))[..., 0]
                for x in (antecedent, other))  # fmt: skip
    layer, head = divmod(int(to.mean(0).argmax()), to.shape[2])
    picks = (to > away).double().mean(0)[layer, head]
    return {
        "accuracy": float(right.double().mean()), "layer": layer, "head": head, "picks": float(picks),
        "antecedent": float(to.mean(0)[layer, head]), "other": float(away.mean(0)[layer, head]),
    }  # fmt: skip


def run(quick: bool = False) -> dict[str, Any]:
    """Results of trained and untrained models on new sentences."""
    found: dict[str, Any] = {"trained": [], "untrained": []}
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        rng, model = np.random.default_rng([1, seed]), Reader()
        test = sentences(np.random.default_rng([2, seed]), 32 if quick else 500)
        found["untrained"].append(looks(model, *test))
        optimiser = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(5 if quick else 600):
            ids, antecedent, _ = sentences(rng, 64)
            loss = nn.functional.cross_entropy(model(ids)[:, -3], ids.gather(1, antecedent[:, None])[:, 0])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        found["trained"].append(looks(model, *test))
    return found
