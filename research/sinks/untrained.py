"""A model of the same architecture with random weights."""

from __future__ import annotations

import copy

import torch
from torch import nn

from qkv.models import DecoderLM


def untrained(model: nn.Module, seed: int) -> nn.Module:
    """A new model of the same class and configuration, initialised as its class does before training.

    >>> from qkv.models import DecoderConfig
    >>> model = DecoderLM(DecoderConfig(vocab_size=9, d_model=8, layers=1, heads=2))
    >>> one, other = untrained(model, seed=1), untrained(model, seed=2)
    >>> one.config == model.config, torch.equal(one.embedding.weight, other.embedding.weight)
    (True, False)
    """
    like = next(model.parameters())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(model, DecoderLM):
            made: nn.Module = DecoderLM(model.config)
        else:
            made = type(model)(copy.deepcopy(model.config))
    return made.to(like).eval()
