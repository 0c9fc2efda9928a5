"""What several models ask of their input and their configurations."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.errors import InputError


def check_ids(name: str, ids: Tensor, vocabulary: int) -> None:
    """`InputError` unless `ids` are tokens of a vocabulary, (batch, length), at least one."""
    if not isinstance(ids, Tensor):
        raise InputError(f"{name} is {type(ids).__name__}, expected a tensor of integers (batch, length)")
    if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
        raise InputError(
            f"{name} is {ids.dtype} of shape {tuple(ids.shape)}, expected integers (batch, length), 1 token or more"
        )
    if not torch.compiler.is_compiling() and ids.device.type == "cpu":  # elsewhere it would wait for the device
        low, high = (int(x) for x in ids.aminmax())
        if low < 0 or high >= vocabulary:
            raise InputError(f"{name} has tokens {low}..{high}, expected 0..{vocabulary - 1}")


def check_tokens(name: str, vocabulary: int, **tokens: int) -> None:
    """`InputError` unless the special tokens of a configuration are different ones of its vocabulary."""
    if vocabulary < 1:
        raise InputError(f"{name}: the vocabulary has {vocabulary} tokens, expected at least 1")
    given = ", ".join(f"{what} {token}" for what, token in tokens.items())
    if len(set(tokens.values())) < len(tokens):
        raise InputError(f"{name}: special tokens are {given}, expected all different")
    if not all(0 <= token < vocabulary for token in tokens.values()):
        raise InputError(f"{name}: special tokens are {given}, expected each in 0..{vocabulary - 1}")


def check_dropout(name: str, dropout: float) -> None:
    """`InputError` unless it is a probability below 1."""
    if not 0 <= dropout < 1:
        raise InputError(f"{name}: dropout is {dropout}, expected 0 ≤ dropout < 1")
