"""Attention you can compose, measure and explain.

>>> import torch, qkv
>>> q = k = v = torch.randn(1, 4, 100, 16)
>>> qkv.attend(q, k, v, mask=qkv.masks.Causal()).shape
torch.Size([1, 4, 100, 16])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qkv._lazy import lazy
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv import (
        biases,
        cache,
        edits,
        features,
        huggingface,
        kernels,
        masks,
        models,
        nn,
        normalizers,
        plot,
        positions,
        profiler,
        reference,
        ring,
        scores,
        statistics,
        testing,
        tracking,
    )
    from qkv._plan import Plan, plan
    from qkv._untrusted import max_size
    from qkv.attention import Attention, attend
    from qkv.choice import Choice, choose_keys
    from qkv.linear import LinearState, linear_attend, linformer
    from qkv.models.loading import load
    from qkv.partial import Partial, merge
    from qkv.profiler.analyses.sources import Sources, sources
    from qkv.profiler.editing import edit
    from qkv.results import Result, Statistics
    from qkv.runs.profiles import Profile
    from qkv.runs.run import profile
    from qkv.runs.watching import Watched, watch
    from qkv.statistics.measure import measure

__version__ = "0.1.0"
__all__ = [
    "Attention",
    "Choice",
    "InputError",
    "LinearState",
    "Partial",
    "Plan",
    "Profile",
    "Result",
    "Sources",
    "Statistics",
    "Watched",
    "attend",
    "biases",
    "cache",
    "choose_keys",
    "edit",
    "edits",
    "features",
    "huggingface",
    "kernels",
    "linear_attend",
    "linformer",
    "load",
    "masks",
    "max_size",
    "measure",
    "merge",
    "models",
    "nn",
    "normalizers",
    "plan",
    "plot",
    "positions",
    "profile",
    "profiler",
    "reference",
    "ring",
    "scores",
    "sources",
    "statistics",
    "testing",
    "tracking",
    "watch",
]

# All names but `InputError` load on first use: the command line starts without torch, the core without the profiler.
_NAMES = {
    "qkv._untrusted": ("max_size",),
    "qkv._plan": ("Plan", "plan"),
    "qkv.attention": ("Attention", "attend"),
    "qkv.choice": ("Choice", "choose_keys"),
    "qkv.linear": ("LinearState", "linear_attend", "linformer"),
    "qkv.partial": ("Partial", "merge"),
    "qkv.profiler.analyses.sources": ("Sources", "sources"),
    "qkv.profiler.editing": ("edit",),
    "qkv.models.loading": ("load",),
    "qkv.runs.profiles": ("Profile",),
    "qkv.runs.run": ("profile",),
    "qkv.runs.watching": ("Watched", "watch"),
    "qkv.statistics.measure": ("measure",),
    "qkv.results": ("Result", "Statistics"),
}
_MODULES = {*__all__}.difference(("InputError",), *_NAMES.values())
if not TYPE_CHECKING:  # to a type checker, a module with `__getattr__` has every name
    __getattr__ = lazy(__name__, _NAMES, (*_MODULES, "course", "lab"))  # the last two are in qkv-lab
__dir__ = __all__.copy
