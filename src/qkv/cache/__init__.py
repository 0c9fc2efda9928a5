"""Key-value caches for decoding: one object per layer.

`Full` keeps all keys, and so does `Latent`, for values that are part of the keys; `Recurrent` is the state of a layer
of linear attention. The others have a fixed size and evict keys: `Sliding` keeps the last keys, `Sinks` (StreamingLLM)
the first and the last, and each policy, such as `HeavyHitters` (H2O), the keys of most worth. A policy
of your own is a subclass of `Evicting` with one method, `worth`.

It imports attention and what lies below it. Read `base.py` first.

>>> import torch, qkv
>>> from qkv.cache import Sliding
>>> cache, causal = Sliding(64), qkv.Attention(mask=qkv.masks.Causal())
>>> for n in (100, 1, 1):  # a prompt, then token by token
...     q = k = v = torch.randn(1, 4, n, 16)
...     out = cache.attend(causal, q, k, v, rotary=qkv.positions.Rotary(16))
>>> out.shape, cache
(torch.Size([1, 4, 1, 16]), Sliding(window=64, seen=102, length=64))
"""

from qkv.cache.base import Cache, Full, Latent, Recurrent
from qkv.cache.evicting import (
    TOVA,
    Evicting,
    ExpectedAttention,
    HeavyHitters,
    Held,
    KeyDiff,
    KNorm,
    LastKeys,
    PyramidKV,
    SnapKV,
)
from qkv.cache.recent import Sinks, Sliding

__all__ = [
    "TOVA", "Cache", "Evicting", "ExpectedAttention", "Full", "HeavyHitters", "Held", "KNorm", "KeyDiff",
    "LastKeys", "Latent", "PyramidKV", "Recurrent", "Sinks", "Sliding", "SnapKV",
]  # fmt: skip
__dir__ = __all__.copy
