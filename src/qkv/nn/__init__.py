"""Modules built on `qkv.attend`: multi-head, linear and recurrent-era attention, feed-forward layers and blocks.

It imports attention and caches. Read `composition.py`, then `multi_head.py`.
"""

from __future__ import annotations

from qkv.nn.alignment import AdditiveAttention, LuongAttention
from qkv.nn.block import FeedForward, SinkToken, TransformerBlock
from qkv.nn.composition import Composition
from qkv.nn.convert import from_torch, to_torch
from qkv.nn.differential import DifferentialAttention
from qkv.nn.latent import LatentAttention
from qkv.nn.multi_head import ForgettingAttention, LinearAttention, LinformerAttention, MultiHeadAttention
from qkv.nn.recurrent import RecurrentAttention

__all__ = [
    "AdditiveAttention",
    "Composition",
    "DifferentialAttention",
    "FeedForward",
    "ForgettingAttention",
    "LatentAttention",
    "LinearAttention",
    "LinformerAttention",
    "LuongAttention",
    "MultiHeadAttention",
    "RecurrentAttention",
    "SinkToken",
    "TransformerBlock",
    "from_torch",
    "to_torch",
]
__dir__ = __all__.copy
