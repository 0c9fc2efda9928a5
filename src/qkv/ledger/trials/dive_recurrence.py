"""Trial: attention and a recurrent network of similar size on recall of a block and on running parity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qkv.models import DecoderConfig, DecoderLM

SYMBOLS, BLOCK, BITS, SEEDS = 16, 10, 24, (0, 1, 2)


class Recurrent(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(vocabulary, 64), nn.Linear(128, vocabulary)
        self.gru = nn.GRU(64, 128, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.gru(self.embedding(ids))[0])


def attention(vocabulary: int) -> DecoderLM:
    shape = {"d_model": 64, "layers": 2, "heads": 4, "positions": "alibi", "tied": False}
    return DecoderLM(DecoderConfig(vocab_size=vocabulary, context=64, d_hidden=128, **shape))


def recall(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, slice]:
    """A repeated block of different symbols: all symbols of the second copy but the first are predictable."""
    block = torch.rand(size, SYMBOLS, generator=generator).argsort(1)[:, :BLOCK]
    ids = torch.cat([block, block], 1)
    return ids[:, :-1], ids[:, 1:], slice(BLOCK, None)


def parity(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, slice]:
    """For every bit, whether the number of ones so far is odd; evaluated from the ninth bit on."""
    bits = torch.randint(2, (size, BITS), generator=generator)
    return bits, bits.cumsum(1) % 2, slice(8, None)


TASKS: dict[str, tuple[Callable[[int, torch.Generator], tuple[Tensor, Tensor, slice]], int]] = {
    "recall": (recall, SYMBOLS),
    "parity": (parity, 2),
}


def learn(model: nn.Module, task: str, seed: int, steps: int) -> float:
    draw = TASKS[task][0]
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 50, 2 * (1 - step / steps))
        ids, answer, judged = draw(32, generator)
        first = 0 if task == "parity" else judged.start  # for parity all bits are trained on
        loss = nn.functional.cross_entropy(model(ids)[:, first:].flatten(0, 1), answer[:, first:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    ids, answer, judged = draw(500, torch.Generator().manual_seed(10_000 + seed))
    with torch.no_grad():
        return round((model(ids).argmax(-1) == answer)[:, judged].double().mean().item(), 4)


def run(quick: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"steps": 3 if quick else 400, "accuracy": {}, "weights": {}}
    for task, (_, vocabulary) in TASKS.items():
        found["accuracy"][task] = {}
        for name, make in (("attention", attention), ("GRU", Recurrent)):
            runs = []
            for seed in SEEDS:
                torch.manual_seed(seed)
                model = make(vocabulary)
                runs.append(learn(model, task, seed, found["steps"]))
            found["accuracy"][task][name] = runs
            found["weights"][name] = sum(p.numel() for p in model.parameters())
    return found
