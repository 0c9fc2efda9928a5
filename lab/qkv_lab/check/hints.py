"""Recognises typical mistakes by the numbers they produce, and raises the matching hint."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qkv_lab.check.verdict import Wrong, near


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers from a seed; torch's global generator is not used."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7919 * seed + sum(shape)))


def pair(got: object) -> tuple[Tensor, Tensor]:
    """The returned pair (out, weights); `Wrong` for anything else."""
    if not (isinstance(got, tuple) and len(got) == 2 and all(isinstance(x, Tensor) for x in got)):
        found = f"a tuple of {len(got)}" if isinstance(got, tuple) else type(got).__name__
        raise Wrong(f"it returns {found}, expected a pair of tensors: out, weights")
    return got


def expect(
    got: object, expected: Tensor, what: str, mistakes: Mapping[str, Tensor] | None = None, tolerance: float = 1e-5
) -> None:
    """Raise `Wrong` unless a tensor is the expected one. If it equals the result of a known mistake, give its hint."""
    try:
        near(got, expected, what, tolerance)
    except Wrong:
        if not isinstance(got, Tensor):
            raise
        for hint, wrong in (mistakes or {}).items():
            if same(got, wrong, tolerance):
                raise Wrong(hint) from None
        if got.shape == expected.shape and bool(got.detach().isnan().any()):
            raise Wrong(f"{what} contains NaN") from None
        raise


def same(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    """True if two tensors have the same shape and equal values within the tolerance; NaN equals NaN."""
    return a.shape == b.shape and torch.allclose(
        a.detach().double(), b.detach().double(), rtol=0, atol=tolerance, equal_nan=True
    )
