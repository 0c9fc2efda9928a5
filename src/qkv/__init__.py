"""Attention you can compose, measure and explain.

>>> import torch, qkv
>>> q = k = v = torch.randn(1, 4, 100, 16)
>>> qkv.attend(q, k, v, mask=qkv.masks.Causal()).shape
torch.Size([1, 4, 100, 16])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qkv import biases, cache, features, masks, models, nn, normalizers, positions, ring, scores
from qkv.attention import Attention, Plan, attend, plan
from qkv.choice import Choice, choose_keys
from qkv.errors import InputError
from qkv.linear import LinearState, linear_attend, linformer
from qkv.partial import Partial, merge
from qkv.statistics.measure import Statistics, measure

if TYPE_CHECKING:
    from qkv import testing
    from qkv.profiler import Profile, profile

__version__ = "0.1.0"
__all__ = [
    "Attention",
    "Choice",
    "InputError",
    "LinearState",
    "Partial",
    "Plan",
    "Profile",
    "Statistics",
    "attend",
    "biases",
    "cache",
    "choose_keys",
    "features",
    "linear_attend",
    "linformer",
    "masks",
    "measure",
    "merge",
    "models",
    "nn",
    "normalizers",
    "plan",
    "positions",
    "profile",
    "ring",
    "scores",
    "testing",
]


def __getattr__(name: str) -> Any:
    """The profiler loads on first use: it needs xarray, and most users of `attend` do not. So do the checks."""
    if name == "testing":
        return importlib.import_module("qkv.testing")
    if name in ("Profile", "profile"):
        from qkv import profiler

        globals().update(Profile=profiler.Profile, profile=profiler.profile)
        return globals()[name]
    raise AttributeError(f"module 'qkv' has no attribute {name!r}")
