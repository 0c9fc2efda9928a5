"""The engine: a call of attention, and the loop over tiles that computes any composition, its gradients and statistics.

These names are for the rest of the package: the profiler, models, caches and the lab import nothing else of it.
docs/dev/engine.md describes them.

It imports the definitions (masks, biases, scores, normalizers) and the library. Read `call.py`, then `tiles.py`.
"""

from __future__ import annotations

from qkv._packages import check_tested
from qkv.engine.call import Call, RowState, as_biases, as_mask, at_least_float32, detached, inverted
from qkv.engine.level import search_level
from qkv.engine.sharded import Shared
from qkv.engine.sizes import on_card
from qkv.engine.transforms import under_vmap
from qkv.results import Result

check_tested("torch")

__all__ = [
    "Call", "Result", "RowState", "Shared", "as_biases", "as_mask", "at_least_float32", "detached", "inverted",
    "on_card", "search_level", "under_vmap",
]  # fmt: skip
