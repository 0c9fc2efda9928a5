"""Cache policies by name: the built-in ones, and those that installed packages register as entry points."""

from __future__ import annotations

from typing import Any

from qkv._registry import Registry
from qkv.cache.evicting import Evicting

BUILT_IN = {
    "full": "full.Full",
    "sliding": "sliding.Sliding",
    "window": "sliding.Sliding",
    "sinks": "sinks.Sinks",
    "heavy": "heavy_hitters.HeavyHitters",
}


def _problem(cls: Any) -> str | None:
    """Why a class that an installed package registers cannot be used as a policy."""
    if not issubclass(cls, Evicting):
        return "is not a subclass of qkv.cache.Evicting"
    return None if isinstance(getattr(cls, "name", None), str) else "has no class attribute name"


POLICIES = Registry("policy", "qkv.cache", BUILT_IN, "qkv.policies", _problem)
"""Commands find policies of other packages here, in the group of entry points ``qkv.policies``."""
