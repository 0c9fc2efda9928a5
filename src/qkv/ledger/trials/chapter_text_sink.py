"""Trial: the chapter's small Transformer on text. Does its sink score rise above that of uniform rows, and when?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import qkv
from qkv.lab.tasks.language import Language
from qkv.models import DecoderConfig, DecoderLM

CONTEXT, STEPS, EVERY, SEEDS, TEXTS = 64, 600, 100, 3, 16
MODEL = DecoderConfig.gpt2(d_model=64, layers=2, heads=4, attention_bias=False)
"""Learned positions, pre-norm, GELU, a tied output: Lab 5 at a smaller size."""


def looks(model: DecoderLM, ids: torch.Tensor) -> dict[str, Any]:
    """The lab's sink score (share of queries from the second on with more than 0.3 on the first key), also by head."""
    data = qkv.profile(model, ids, probe=False, progress=False).data
    first = data["sink"].values[..., 1:]  # (text, layer, head, query)
    return {
        "score": float((first > 0.3).mean()),
        "strongest head": float(first.mean((0, 3)).max()),
    }


def trained(first: str, seed: int, steps: int) -> list[dict[str, Any]]:
    torch.manual_seed(seed)
    task = Language(context=CONTEXT, model=MODEL, first=first)
    model, unseen = task.build(), task.unseen[:TEXTS, :-1]
    optimiser = torch.optim.AdamW(model.parameters(), 5e-3, weight_decay=0.1)
    kept = []
    for step in range(steps + 1):
        if step % EVERY == 0:
            kept.append({"step": step, **looks(model, unseen), "loss": task.evaluate(model)["loss"]})
        loss = task.loss(model, task.batch(step, 16, seed))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return kept


def run(quick: bool = False) -> dict[str, Any]:
    """Results by first token: a fixed <s>, or any byte of the text. The corpus is Python's library, in bytes."""
    even = np.concatenate([1 / np.arange(2, CONTEXT + 1)])
    return {
        "even rows": {"score": float((even > 0.3).mean()), "head": float(even.mean())},
        **{first: [trained(first, s, 0 if quick else STEPS) for s in range(SEEDS)] for first in ("fixed", "random")},
    }
