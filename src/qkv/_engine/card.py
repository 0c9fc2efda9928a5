"""Properties of GPUs that several kernels share, and whether Triton is there."""

from __future__ import annotations

import functools
import importlib.util
import os

GPUS = ("cuda",)
"""Types of the devices that torch's fused kernels, FlexAttention and Triton's kernels are for."""
LARGEST_HEAD = 256
"""Largest head dimension of torch's fused kernels and of the Triton kernels."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton runs its kernels on CPU tensors, as in the tests; it reads this variable when it is imported."""


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
