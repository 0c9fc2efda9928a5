"""Checks of token ids and configurations that several models share."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.errors import InputError


def check_ids(name: str, ids: Tensor, vocabulary: int) -> None:
    """Raise `InputError` unless `ids` has shape (batch, length) and at least one token, all within the vocabulary."""
    if not isinstance(ids, Tensor):
        raise InputError(f"{name} is {type(ids).__name__}, expected a tensor of integers (batch, length)")
    if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
        raise InputError(
            f"{name} is {ids.dtype} of shape {tuple(ids.shape)}, expected integers (batch, length), 1 token or more"
        )
    if not torch.compiler.is_compiling() and ids.device.type == "cpu":  # on a GPU the check would wait for the device
        low, high = (int(x) for x in ids.aminmax())
        if low < 0 or high >= vocabulary:
            raise InputError(f"{name} has tokens {low}..{high}, expected 0..{vocabulary - 1}")


def check_tokens(name: str, vocabulary: int, **tokens: int) -> None:
    """Raise `InputError` unless the special tokens of a configuration are distinct tokens of its vocabulary."""
    if vocabulary < 1:
        raise InputError(f"{name}: vocabulary has {vocabulary} tokens, expected at least 1")
    used: dict[int, str] = {}
    for role, token in tokens.items():
        if token in used:
            raise InputError(f"{name}: {role} is {token}, expected another token than {used[token]}")
        if not 0 <= token < vocabulary:
            raise InputError(f"{name}: {role} is {token}, expected 0..{vocabulary - 1}")
        used[token] = role


def check_dropout(name: str, dropout: float) -> None:
    """Raise `InputError` unless `dropout` is a probability below 1."""
    if not 0 <= dropout < 1:
        raise InputError(f"{name}: dropout is {dropout}, expected 0 ≤ dropout < 1")
