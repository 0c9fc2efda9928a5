"""Pointwise normalizers: sigmoid, elu + 1, ReLU, and the identity."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import InputError
from qkv.normalizers.base import LOG2_E, Pointwise


@dataclass(frozen=True, eq=False)
class _OfScore(Pointwise):
    """A weight that depends on the score alone, the same function for all heads."""

    divide: str | None = None
    by_head = False

    def __post_init__(self) -> None:
        self.check(0)

    def tensors(self) -> dict[str, Tensor]:
        return {}


@dataclass(frozen=True, eq=False)
class Sigmoid(Pointwise):
    """Sigmoid attention, σ(s + b) (Ramapuram et al. 2024, arXiv:2409.04431, eq. 3).

    `bias` b is a number, or a tensor with one number per query head, shape (heads,), which may be learned. If None it
    is −ln n, where n is the number of visible keys of the query. With ``divide="sum"`` the weights of a query are
    divided by their sum (Gu et al. 2025, arXiv:2410.10781, §6.2, compares both).

    >>> from qkv import attend
    >>> q = k = torch.zeros(1, 1, 1, 8)
    >>> attend(q, k, torch.ones(1, 1, 1, 8), normalizer=Sigmoid(bias=0.0))[0, 0, 0, 0].item()
    0.5
    """

    bias: Float[Tensor, " heads"] | float | None = None
    divide: str | None = None
    by_head = False
    zero_at_minus_infinity = True
    nonnegative = True

    def __post_init__(self) -> None:
        super().check(0)
        if isinstance(self.bias, Tensor):
            if self.bias.ndim != 1 or not self.bias.dtype.is_floating_point:
                raise InputError(
                    f"Sigmoid: bias is {self.bias.dtype} of shape {tuple(self.bias.shape)}, "
                    "expected a number or one float per query head, shape (heads,)"
                )
        elif self.bias is not None and not math.isfinite(self.bias):
            raise InputError(f"Sigmoid: bias is {self.bias}, expected a finite number or None for −ln(visible keys)")

    def check(self, heads: int) -> None:
        super().check(heads)
        if isinstance(self.bias, Tensor) and len(self.bias) != heads:
            raise InputError(f"Sigmoid: bias has {len(self.bias)} numbers for {heads} query heads")

    def shift(self, visible: Callable[[], Tensor], like: Tensor) -> Tensor:
        if self.bias is None:
            return -torch.log(visible())
        if isinstance(self.bias, Tensor):
            return self.bias.to(like)[None, :, None]
        return like.new_full((1, 1, 1), float(self.bias))

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def weight(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores)

    def weight_(self, scores: Tensor) -> Tensor:
        return scores.sigmoid_()

    def slope_from_weights(self, weights: Tensor) -> Tensor:
        return weights * (1 - weights)

    def log_weight(self, scores: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(scores)

    def slope_of_log(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(-scores)


@dataclass(frozen=True, eq=False)
class EluPlusOne(_OfScore):
    """elu(s) + 1: exp(s) below 0, s + 1 above (Gu et al. 2025, arXiv:2410.10781).

    Not the feature map of linear attention, which is `qkv.features.elu_plus_one`.

    >>> EluPlusOne().weight(torch.tensor([0.0, 2.0])).tolist()
    [1.0, 3.0]
    """

    zero_at_minus_infinity = True
    nonnegative = True

    # exp(min(s, 0)) + max(s, 0): the sum elu(s) + 1 would cancel for s ≪ 0.

    def weight(self, scores: Tensor) -> Tensor:
        return torch.exp(scores.clamp(max=0)) + torch.relu(scores)

    def weight_(self, scores: Tensor) -> Tensor:
        above = torch.relu(scores)
        return scores.clamp_(max=0).mul_(LOG2_E).exp2_().add_(above)  # base 2: MKL's exp is slow on some processors

    def slope_from_weights(self, weights: Tensor) -> Tensor:
        return weights.clamp(max=1)

    def log_weight(self, scores: Tensor) -> Tensor:
        return torch.log1p(torch.relu(scores)) + scores.clamp(max=0)

    def slope_of_log(self, scores: Tensor) -> Tensor:
        return 1 / (1 + torch.relu(scores))


@dataclass(frozen=True, eq=False)
class ReLU(_OfScore):
    """max(s, 0), divided by the number of visible keys (Wortsman et al. 2023, arXiv:2309.08586).

    >>> ReLU().weight(torch.tensor([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """

    divide: str | None = "keys"
    zero_at_minus_infinity = True
    nonnegative = True

    def weight(self, scores: Tensor) -> Tensor:
        return torch.relu(scores)

    def weight_(self, scores: Tensor) -> Tensor:
        return scores.relu_()

    def slope_from_weights(self, weights: Tensor) -> Tensor:
        return (weights > 0).to(weights)


@dataclass(frozen=True, eq=False)
class Identity(_OfScore):
    """The score itself: no normalization, or with ``divide="sum"`` the weights of linear attention.

    >>> Identity().weight(torch.tensor([-1.0, 2.0])).tolist()
    [-1.0, 2.0]
    """

    is_identity = True

    def weight(self, scores: Tensor) -> Tensor:
        return scores

    def weight_(self, scores: Tensor) -> Tensor:
        return scores

    def slope_from_weights(self, weights: Tensor) -> Tensor:
        return torch.ones_like(weights)
