"""Shared by several checks: queries, keys, values and weights of qkv-mini on the first 96 tokens of a program."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

import qkv
from qkv import kernels
from qkv.models.text import load_text_model
from qkv.profiler.corpora import default_text


@cache
def ids_of_mini() -> Tensor:
    """(1, 96): ``<s>`` and the beginning of the program that `qkv profile` reads by default."""
    reader = load_text_model("qkv-mini")
    return torch.tensor([reader.encode(default_text("qkv-mini"))[:96]])


def tokens_of_mini() -> list[str]:
    """The same tokens as text."""
    reader = load_text_model("qkv-mini").tokenizer
    return [reader.decode([token]) for token in ids_of_mini()[0].tolist()]


@cache
def heads_of_mini() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys (after rotation), values (layer, head, n, 32), and the causal weights (layer, head, n, n)."""
    seen = []
    with torch.no_grad(), kernels.watching(lambda call, _: seen.append((call.q[0], call.k[0], call.v[0]))):
        qkv.models.load("qkv-mini").eval()(ids_of_mini())
    q, k, v = (torch.stack(x).double() for x in zip(*seen, strict=True))
    return q, k, v, qkv.attend(q, k, v, mask=qkv.masks.Causal(), return_weights=True)[1]
