"""Normalizers: how the scores of one query become weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import InputError

__all__ = [
    "EluPlusOne",
    "Entmax",
    "Hard",
    "Identity",
    "Normalizer",
    "ReLU",
    "Sigmoid",
    "Softmax",
    "Sparsemax",
]


class Normalizer:
    """Base of all normalizers.

    >>> Softmax().has_lse, Sigmoid().has_lse
    (True, False)
    """

    has_lse = False
    """Whether the log-sum-exp of the scores is what the weights are made with."""
    temperature = 1.0
    """What final scores are divided by."""


@dataclass(frozen=True, eq=False)
class Softmax(Normalizer):
    """exp(s / temperature), divided by its sum over the visible keys and, if given, exp(sink).

    `sink` is a logit that no key owns: one for each query head, shape (heads,), one for each query, shape (batch,
    heads, queries), or a number for all. It takes weight and adds nothing to the output, so weights over the keys sum
    to less than one (gpt-oss, arXiv:2508.10925; ``sink=0.0`` is Miller's softmax-off-by-one). The temperature does not
    divide it.

    `key` (heads, d) is the same with a logit that the query decides: a learned key whose value is 0, compared by the
    call's score and divided by its temperature, outside its mask and biases (the "K biases" of Gu et al. 2025,
    arXiv:2410.10781).

    >>> from qkv import attend
    >>> q = k = torch.zeros(1, 1, 1, 8)
    >>> attend(q, k, torch.ones(1, 1, 1, 8), normalizer=Softmax(sink=0.0))[0, 0, 0, 0].item()
    0.5
    """

    temperature: float = 1.0
    sink: Float[Tensor, " heads"] | Float[Tensor, "b heads nq"] | float | None = None
    key: Float[Tensor, "heads d"] | None = None
    has_lse = True

    def __post_init__(self) -> None:
        _check_temperature("Softmax", self.temperature)
        if isinstance(self.sink, Tensor) and (self.sink.ndim not in (1, 3) or not self.sink.dtype.is_floating_point):
            raise InputError(
                f"Softmax: sink is {self.sink.dtype} of shape {tuple(self.sink.shape)}, "
                "expected one float logit a query head, shape (heads,), or a query, shape (batch, heads, queries)"
            )
        if self.key is not None and (not isinstance(self.key, Tensor) or self.key.ndim != 2):
            raise InputError("Softmax: key is not a float tensor (heads, d), one key a query head")
        if self.key is not None and self.sink is not None:
            raise InputError("Softmax: got both sink and key, expected at most one of them")

    def sink_of(self, like: Float[Tensor, "b heads nq"]) -> Float[Tensor, "#b heads #nq"] | None:
        """The sink logits of the queries that `like` has a number for, in its dtype and on its device, or None."""
        if self.sink is None:
            return None
        if not isinstance(self.sink, Tensor):
            return like.new_full((1, like.shape[1], 1), float(self.sink))
        if self.sink.ndim == 3:
            if self.sink.shape != like.shape:
                raise InputError(
                    f"Softmax: sink has shape {tuple(self.sink.shape)}, expected (batch, heads, queries) = "
                    f"{tuple(like.shape)}"
                )
            return self.sink.to(like)
        if len(self.sink) != like.shape[1]:
            raise InputError(f"Softmax: sink has {len(self.sink)} logits for {like.shape[1]} query heads")
        return self.sink.to(like)[None, :, None]


def _check_temperature(name: str, temperature: float) -> None:
    if not (temperature > 0 and math.isfinite(temperature)):
        raise InputError(f"{name}: temperature is {temperature}, expected a positive number")


class Pointwise(Normalizer):
    """A weight depends on its own score; `divide` says what all weights of a query are then divided by.

    None: nothing. ``"sum"``: their sum (nothing where it is 0). ``"keys"``: the number of visible keys.
    """

    divide: str | None = None

    def weight(self, scores: Float[Tensor, "*n"], *, inplace: bool = False) -> Float[Tensor, "*n"]:
        """Weights of scores, before any division; made where the scores are, if asked to."""
        raise TypeError(f"{type(self).__name__} does not say what weight a score has")

    def slope(self, weights: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Derivative of `weight`, at the scores that have these weights."""
        raise TypeError(f"{type(self).__name__} does not say how its weights change")

    def _check_divide(self) -> None:
        if self.divide not in (None, "sum", "keys"):
            raise InputError(f"{type(self).__name__}: divide is {self.divide!r}, expected None, 'sum' or 'keys'")


@dataclass(frozen=True, eq=False)
class Sigmoid(Pointwise):
    """σ(s + b): each key on its own (Ramapuram et al. 2024, arXiv:2409.04431, eq. 3).

    `bias` b is −ln n when None, where n is the number of keys the query may attend to; else a number for all, or one
    for each query head, shape (heads,), which may be learned.

    >>> from qkv import attend
    >>> q = k = torch.zeros(1, 1, 1, 8)
    >>> attend(q, k, torch.ones(1, 1, 1, 8), normalizer=Sigmoid(bias=0.0))[0, 0, 0, 0].item()
    0.5
    """

    bias: Float[Tensor, " heads"] | float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.bias, Tensor):
            if self.bias.ndim != 1 or not self.bias.dtype.is_floating_point:
                raise InputError(
                    f"Sigmoid: bias is {self.bias.dtype} of shape {tuple(self.bias.shape)}, "
                    "expected a number or one float a query head, shape (heads,)"
                )
        elif self.bias is not None and not math.isfinite(self.bias):
            raise InputError(f"Sigmoid: bias is {self.bias}, expected a finite number or None for −ln(visible keys)")

    def weight(self, scores: Tensor, *, inplace: bool = False) -> Tensor:
        return scores.sigmoid_() if inplace else torch.sigmoid(scores)

    def slope(self, weights: Tensor) -> Tensor:
        return weights * (1 - weights)


@dataclass(frozen=True, eq=False)
class EluPlusOne(Pointwise):
    """elu(s) + 1: exp(s) below 0, s + 1 above (Gu et al. 2025, arXiv:2410.10781).

    Not the feature map of linear attention, which is `qkv.features.elu_plus_one`.

    >>> EluPlusOne().weight(torch.tensor([0.0, 2.0])).tolist()
    [1.0, 3.0]
    """

    divide: str | None = None

    def __post_init__(self) -> None:
        self._check_divide()

    def weight(self, scores: Tensor, *, inplace: bool = False) -> Tensor:
        return (
            torch.nn.functional.elu(scores, inplace=inplace).add_(1) if inplace else torch.nn.functional.elu(scores) + 1
        )

    def slope(self, weights: Tensor) -> Tensor:
        return weights.clamp(max=1)


@dataclass(frozen=True, eq=False)
class ReLU(Pointwise):
    """max(s, 0), divided by the number of visible keys (Wortsman et al. 2023, arXiv:2309.08586).

    >>> ReLU().weight(torch.tensor([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """

    divide: str | None = "keys"

    def __post_init__(self) -> None:
        self._check_divide()

    def weight(self, scores: Tensor, *, inplace: bool = False) -> Tensor:
        return scores.relu_() if inplace else torch.relu(scores)

    def slope(self, weights: Tensor) -> Tensor:
        return (weights > 0).to(weights)


@dataclass(frozen=True, eq=False)
class Identity(Pointwise):
    """The score itself: no normalizer at all, or with ``divide="sum"`` the weights of linear attention.

    >>> Identity().weight(torch.tensor([-1.0, 2.0])).tolist()
    [-1.0, 2.0]
    """

    divide: str | None = None

    def __post_init__(self) -> None:
        self._check_divide()

    def weight(self, scores: Tensor, *, inplace: bool = False) -> Tensor:
        return scores

    def slope(self, weights: Tensor) -> Tensor:
        return torch.ones_like(weights)


@dataclass(frozen=True, eq=False)
class Entmax(Normalizer):
    """α-entmax: [(α − 1) s − τ]₊^(1/(α−1)), τ such that weights sum to one; exact zeros for low scores.

    1 < α ≤ 2; α = 1.5 by default, α = 2 is `Sparsemax`, and α → 1 is softmax (Peters et al. 2019, arXiv:1905.05702,
    eq. 10).

    >>> from qkv import attend
    >>> q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[1.0], [0.5], [-1.0]]]])
    >>> attend(q, k, k, normalizer=Entmax(2.0), return_weights=True)[1].flatten().tolist()
    [0.75, 0.25, 0.0]
    """

    alpha: float = 1.5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check_temperature("Entmax", self.temperature)
        if not 1 < self.alpha <= 2:
            raise InputError(f"Entmax: alpha is {self.alpha}, expected 1 < alpha ≤ 2 (for alpha = 1 use Softmax)")


def Sparsemax(temperature: float = 1.0) -> Entmax:  # noqa: N802  (a normalizer like the others)
    """The nearest distribution to the scores (Martins & Astudillo 2016, arXiv:1602.02068, eq. 2): `Entmax` of α = 2.

    >>> Sparsemax().alpha
    2.0
    """
    return Entmax(2.0, temperature)


@dataclass(frozen=True, eq=False)
class Hard(Normalizer):
    """All weight on one key: the best, or with ``sample=True`` one drawn by the softmax of the scores.

    The gradient is straight-through: the output is that of the chosen key, and scores get the gradient they would
    have under softmax (Xu et al. 2015, arXiv:1502.03044, §4.1, with the estimator of Bengio et al. 2013,
    arXiv:1308.3432). For REINFORCE use `qkv.choose_keys`, which returns the log-probability of each choice. Ties go to
    the first key. A draw takes its seed from torch's generator: ``torch.manual_seed`` makes it repeat.

    >>> from qkv import attend
    >>> q, k = torch.ones(1, 1, 1, 1), torch.tensor([[[[1.0], [3.0], [2.0]]]])
    >>> attend(q, k, k, normalizer=Hard()).item()
    3.0
    """

    sample: bool = False
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check_temperature("Hard", self.temperature)
