"""Trial: predict the token two positions before, with absolute or relative positions, beyond the trained length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qkv.models import DecoderConfig, DecoderLM

SYMBOLS, SHORT, LONG, SEEDS = 32, 16, 64, (0, 1, 2)
ABSOLUTE, RELATIVE = ("learned", "sinusoidal"), ("t5", "rotary")


def batch(size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    ids = torch.randint(SYMBOLS, (size, length), generator=generator)
    return ids, ids.roll(2, 1)


def learn(positions: str, seed: int, steps: int) -> dict[str, float]:
    """Accuracies at both lengths, and the first step (checked every 10) with 90 % accuracy on the next batch."""
    torch.manual_seed(seed)
    shape = {"d_model": 32, "layers": 1, "heads": 2, "tied": False}
    model = DecoderLM(DecoderConfig(vocab_size=SYMBOLS, context=LONG, positions=positions, **shape))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(seed)
    learnt = steps
    for step in range(steps):
        ids, answer = batch(32, SHORT, generator)
        said = model(ids)[:, 2:]
        loss = nn.functional.cross_entropy(said.flatten(0, 1), answer[:, 2:].flatten())
        if step % 10 == 0 and learnt == steps and (said.argmax(-1) == answer[:, 2:]).double().mean() >= 0.9:
            learnt = step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found: dict[str, float] = {"steps until 90 %": learnt}
    with torch.no_grad():
        for length in (SHORT, LONG):
            ids, answer = batch(200, length, torch.Generator().manual_seed(10_000 + seed))
            right = (model(ids).argmax(-1) == answer)[:, 2:].double().mean().item()
            found[str(length)] = round(right, 4)
    return found


def run(quick: bool = False) -> dict[str, Any]:
    steps = 3 if quick else 600
    runs = {p: [learn(p, seed, steps) for seed in SEEDS] for p in (*ABSOLUTE, *RELATIVE)}
    return {"steps": steps, "runs": runs}
