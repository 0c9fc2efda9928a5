"""Biases: what happens to a score after query and key have met and before the mask.

Each bias maps a tile of scores to a tile of scores. Several are given as a tuple and apply in that order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import InputError
from qkv.masks import Grid, Region


class Bias:
    """Base of all biases."""

    additive = False  # whether `tile` says all there is, so that a stock kernel can take it as a mask

    def check(self, grid: Grid) -> None:
        """Raise `InputError` if the bias cannot be laid over `grid`."""

    def parameters(self) -> tuple[Tensor, ...]:
        """Tensors that may want a gradient."""
        return ()

    def tile(self, region: Region) -> Float[Tensor, "b h q k"]:
        """What an additive bias adds to the scores of a region; dimensions of size 1 stand for all."""
        raise TypeError(f"{type(self).__name__} does more to a score than add to it")

    def apply(self, scores: Float[Tensor, "b h q k"], region: Region) -> Float[Tensor, "b h q k"]:
        """The scores of a region with the bias in them."""
        raise TypeError(f"{type(self).__name__} does not say what it does to scores")


@dataclass(frozen=True)
class SoftCap(Bias):
    """Scores bounded smoothly: cap · tanh(score / cap) (Gemma 2, arXiv:2408.00118, §2).

    >>> SoftCap(2.0).apply(torch.tensor([[[[1e9]]]]), Region(slice(0, 1), slice(0, 1))).item()
    2.0
    """

    cap: float

    def __post_init__(self) -> None:
        if not (self.cap > 0 and math.isfinite(self.cap)):
            raise InputError(f"SoftCap: cap is {self.cap}, expected a positive number")

    def apply(self, scores: Tensor, region: Region) -> Tensor:
        return torch.tanh(scores / self.cap) * self.cap


@dataclass(frozen=True, eq=False)
class Dense(Bias):
    """A float tensor added to the scores, of a shape that broadcasts to (batch, heads, queries, keys).

    −inf hides a pair. Learnable if it requires a gradient.
    """

    tensor: Float[Tensor, "..."]
    additive = True

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor) or not self.tensor.dtype.is_floating_point:
            kind = self.tensor.dtype if isinstance(self.tensor, Tensor) else type(self.tensor).__name__
            raise InputError(
                f"bias: got {kind}, expected a float tensor to add to the scores; "
                "a boolean mask goes to mask=qkv.masks.Dense(tensor)"
            )
        if not 2 <= self.tensor.ndim <= 4:
            raise InputError(
                f"bias: a tensor of {self.tensor.ndim} dimensions, expected (nq, nk), (heads, nq, nk) "
                "or (batch, heads, nq, nk)"
            )
        object.__setattr__(self, "tensor", self.tensor[(None,) * (4 - self.tensor.ndim)])

    def check(self, grid: Grid) -> None:
        expected = (grid.batch, grid.heads, grid.n_queries, grid.n_keys)
        if any(got not in (1, want) for got, want in zip(self.tensor.shape, expected, strict=True)):
            raise InputError(
                f"bias: shape {tuple(self.tensor.shape)} does not broadcast to "
                f"(batch, heads, queries, keys) = {expected}"
            )

    def parameters(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    def tile(self, region: Region) -> Tensor:
        return region.of(self.tensor)

    def apply(self, scores: Tensor, region: Region) -> Tensor:
        return scores + self.tile(region).to(scores)
