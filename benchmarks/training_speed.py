"""A training step of `DecoderLM` with each mechanism, beside the same model with plain causal attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.decoder_speed import HEADS, LAYERS, SIZE, training_step
from benchmarks.mechanisms.timing import alternating, median_ratio
from benchmarks.timing import THREADS
from qkv import Attention
from qkv.masks import Causal, bigbird
from qkv.models.decoder import DecoderConfig, DecoderLM
from qkv.nn import Composition

MECHANISMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sink": {"sink": True},
    "window of 64": {"window": 64},
    "ALiBi": {"positions": "alibi"},
    "rotary": {"positions": "rotary"},
    "sigmoid": {"normalizer": "sigmoid"},
    "gate of each head": {"gate": "head"},
    "elementwise gate": {"gate": "elementwise"},
    "BigBird": {},
}
SHAPES = ((8, 256), (1, 2048))  # batch, tokens


def mechanisms(repeats: int = 7) -> dict[str, Any]:
    """The time of a step with each mechanism over that of a plain causal model, for short and for long texts."""
    torch.set_num_threads(THREADS)
    result: dict[str, Any] = {}
    for batch, tokens in SHAPES:
        ids = torch.randint(256, (batch, tokens + 1), generator=torch.Generator().manual_seed(0))
        jobs: dict[str, Callable[[], float]] = {name: training_step(model(name, tokens), ids) for name in MECHANISMS}
        seconds = alternating(jobs, repeats)
        for name in MECHANISMS:
            if name != "plain":
                ratio = median_ratio(seconds, name, "plain")
                result[f"time: {name} / plain causal, batch {batch}, {tokens:,} tokens"] = ratio
        result[f"seconds, {tokens} tokens"] = seconds
    return result


def model(name: str, tokens: int) -> DecoderLM:
    """A model of 6 layers × 6 heads × 64 with one of the mechanisms."""
    torch.manual_seed(0)
    config = DecoderConfig(context=tokens, d_model=SIZE, layers=LAYERS, heads=HEADS, **MECHANISMS[name])
    made = DecoderLM(config)
    if name == "BigBird":
        for block in made.blocks:
            block.attention.composition = Composition(Attention(mask=bigbird() & Causal()))
    return made
