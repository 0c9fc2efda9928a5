"""Trial: byte language models with three position schemes, trained on 32 tokens and evaluated on 128."""

from __future__ import annotations

import argparse
import inspect
import textwrap
from typing import Any

import torch
from torch import nn

from qkv.models import DecoderConfig, DecoderLM

TRAINED, READ = 32, 128
KINDS = ("sinusoidal", "rotary", "alibi")
PLACES = {"17-32": (16, 32), "33-64": (32, 64), "65-128": (64, 128)}


def one(kind: str, seed: int, steps: int) -> dict[str, Any]:
    train = torch.tensor(list(inspect.getsource(argparse).encode("ascii", "replace")))
    rest = torch.tensor(list(inspect.getsource(textwrap).encode("ascii")))
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    model = DecoderLM(DecoderConfig(vocab_size=128, context=TRAINED, d_model=64, layers=2, heads=4, positions=kind))
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        for group in adam.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 50, (steps - step) / (steps / 2))
        starts = torch.randint(len(train) - TRAINED - 1, (32,), generator=generator)
        loss = model.loss(train[starts[:, None] + torch.arange(TRAINED + 1)])
        adam.zero_grad()
        loss.backward()
        adam.step()
    rows = rest[torch.arange(0, len(rest) - READ - 1, 50)[:, None] + torch.arange(READ + 1)]
    with torch.no_grad():
        logits = model(rows[:, :-1])
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").mean(0)
    return {name: losses[a:b].mean().item() for name, (a, b) in PLACES.items()}


def run(quick: bool = False) -> dict[str, Any]:
    """Held-out loss (nats per byte) within and beyond the training length, by position scheme and seed."""
    steps, seeds = (3, 1) if quick else (600, 3)
    return {kind: {str(seed): one(kind, seed, steps) for seed in range(seeds)} for kind in KINDS}
