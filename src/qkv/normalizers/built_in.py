"""The normalizers of this package: softmax, hard attention, entmax and sparsemax, and the pointwise ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv._contract import check_by_head
from qkv.errors import InputError
from qkv.normalizers.base import LOG2_E, Pointwise, SinkLogits, SumToOne, check_temperature


def log_sum_exp(scores: Float[Tensor, "*n k"]) -> Float[Tensor, "*n"]:
    """Return the log-sum-exp over the last dimension. Rows of −inf give −inf, with zero gradients."""
    top = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    total = torch.exp(scores - top).sum(-1)
    visible = total != 0  # True for NaN: it must propagate
    return torch.where(visible, top[..., 0] + torch.log(torch.where(visible, total, 1.0)), -torch.inf)


class Exponential(SumToOne):
    """Base of normalizers with softmax weights exp(s − level), where the level is the log-sum-exp of the scores."""

    by_head = False
    zero_at_minus_infinity = True

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.exp(scores - level)

    def weight_(self, scores: Tensor, level: Tensor) -> Tensor:
        return scores.sub_(level).mul_(LOG2_E).exp2_()  # base 2: MKL's exp is slow on some processors

    def level_of(self, scores: Tensor) -> Tensor:
        lse = log_sum_exp(scores)
        return lse.masked_fill(lse == -torch.inf, 0)

    def slope_from_weights(self, weights: Tensor) -> Tensor:
        return weights


@dataclass(frozen=True, eq=False)
class Softmax(Exponential):
    """exp(s / temperature), divided by its sum over the visible keys and, if given, exp(sink).

    `sink` is the logit of an attention sink: one per query head, shape (heads,), one per query, shape (batch, heads,
    queries), or one number. It takes weight and adds nothing to the output, so the weights of the keys sum to less than
    one (gpt-oss, arXiv:2508.10925; ``sink=0.0`` is Miller's softmax-off-by-one). The temperature does not divide it.

    `key` (heads, d) is a sink whose logit depends on the query: a learned key with value 0. The call's score compares
    it with the query and the temperature divides the result; mask and biases do not apply (the "K biases" of Gu et al.
    2025, arXiv:2410.10781).

    >>> from qkv import attend
    >>> q = k = torch.zeros(1, 1, 1, 8)
    >>> attend(q, k, torch.ones(1, 1, 1, 8), normalizer=Softmax(sink=0.0))[0, 0, 0, 0].item()
    0.5
    """

    temperature: float = 1.0
    sink: SinkLogits = None
    key: Float[Tensor, "heads d"] | None = None
    has_lse = True

    def __post_init__(self) -> None:
        self.check(0)


@dataclass(frozen=True, eq=False)
class Hard(Exponential):
    """Hard attention: all weight on the best key, or with ``sample=True`` on a key drawn from the softmax.

    The gradient is straight-through: the output is the value of the chosen key, and scores get the gradient of softmax
    attention (Xu et al. 2015, arXiv:1502.03044, §4.1, with the estimator of Bengio et al. 2013,
    arXiv:1308.3432). For REINFORCE use `qkv.choose_keys`, which returns the log-probability of each choice. Ties go to
    the first key. A draw takes its seed from torch's generator: ``torch.manual_seed`` makes it reproducible.

    >>> from qkv import attend
    >>> q, k = torch.ones(1, 1, 1, 1), torch.tensor([[[[1.0], [3.0], [2.0]]]])
    >>> attend(q, k, k, normalizer=Hard()).item()
    3.0
    """

    sample: bool = False
    temperature: float = 1.0
    one_key = True

    def __post_init__(self) -> None:
        check_temperature(self)


STEPS = 100  # most Newton steps for a threshold


@dataclass(frozen=True, eq=False)
class Entmax(SumToOne):
    """α-entmax: [(α − 1) (s − level)]₊^(1/(α−1)), which sum to one; exact zeros for low scores.

    1 < α ≤ 2; α = 1.5 by default, α = 2 is `Sparsemax`, and α → 1 is softmax (Peters et al. 2019, arXiv:1905.05702,
    eq. 10, whose threshold τ is (α − 1) times the level). `sink` and `key` as in `Softmax`.

    >>> from qkv import attend
    >>> q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[1.0], [0.5], [-1.0]]]])
    >>> attend(q, k, k, normalizer=Entmax(2.0), return_weights=True)[1].flatten().tolist()
    [0.75, 0.25, 0.0]
    """

    alpha: float = 1.5
    temperature: float = 1.0
    sink: SinkLogits = None
    key: Float[Tensor, "heads d"] | None = None
    by_head = False
    zero_at_minus_infinity = True

    def __post_init__(self) -> None:
        if not 1 < self.alpha <= 2:
            raise InputError(f"Entmax: alpha is {self.alpha}, expected 1 < alpha ≤ 2 (for alpha = 1 use Softmax)")
        self.check(0)

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return _powers((self.alpha - 1) * (scores - level), 1 / (self.alpha - 1))

    def weight_(self, scores: Tensor, level: Tensor) -> Tensor:
        p = 1 / (self.alpha - 1)
        above = scores.sub_(level).mul_(self.alpha - 1).relu_()
        return above if p == 1 else above.square_() if p == 2 else _powers(above, p)

    def level_of(self, scores: Tensor) -> Tensor:
        """Solve ‖[z − τ]₊‖_p = 1 with z = (α − 1) s by Newton's method: convex and falling in τ, from τ = max z − 1.

        The norm is at least 1 there, so the steps increase τ and never pass the root. For α = 2 the result is exact
        after finitely many steps (Michelot 1986).
        """
        p = 1 / (self.alpha - 1)
        z = (self.alpha - 1) * scores
        top = z.amax(-1)
        empty = top == -torch.inf
        tau = torch.where(empty, 0.0, top - 1)
        for _ in range(STEPS):
            step = _newton(z, tau, p)
            # Converged rows stop moving, so a row's result does not depend on the others in the batch.
            moving = step > 2 * torch.finfo(z.dtype).eps * (1 + tau.abs())
            if not moving.any():
                break
            tau = torch.where(moving, tau + step, tau)
        return tau / (self.alpha - 1)

    def slope_from_weights(self, weights: Tensor) -> Tensor:
        if self.alpha == 2:
            return (weights > 0).to(weights)
        if self.alpha == 1.5:
            return weights.sqrt()
        return torch.where(weights > 0, weights.clamp(min=torch.finfo(weights.dtype).tiny) ** (2 - self.alpha), 0)


def Sparsemax(temperature: float = 1.0) -> Entmax:  # noqa: N802  (named like a class because it constructs a normalizer)
    """The distribution nearest to the scores (Martins & Astudillo 2016, arXiv:1602.02068, eq. 2): `Entmax` with α = 2.

    >>> Sparsemax().alpha
    2.0
    """
    return Entmax(2.0, temperature)


def _newton(z: Float[Tensor, "*n k"], tau: Float[Tensor, "*n"], p: float) -> Float[Tensor, "*n"]:
    above = z - tau[..., None]
    total = _powers(above, p).sum(-1)
    slope = _powers(above, p - 1).sum(-1) if p != 1 else (above > 0).to(z).sum(-1)
    return (1 - total ** (-1 / p)) * total / slope  # NaN for an empty row, which stays where it is


def _powers(x: Tensor, p: float) -> Tensor:
    """Return [x]₊^p, with derivative 0 at 0 and below."""
    x = torch.relu(x)
    return x if p == 1 else x * x if p == 2 else torch.where(x > 0, x.clamp(min=torch.finfo(x.dtype).tiny) ** p, 0.0)


class _OfScore(Pointwise):
    """A weight that depends on the score alone, the same function for all heads."""

    by_head = False

    def __post_init__(self) -> None:
        self.check(0)

    def tensors(self) -> dict[str, Tensor]:
        return {}


@dataclass(frozen=True, eq=False)
class Sigmoid(_OfScore):
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
    zero_at_minus_infinity = True
    nonnegative = True

    def check(self, heads: int) -> None:
        super().check(heads)
        check_by_head("Sigmoid: bias", 0.0 if self.bias is None else self.bias, heads or None)

    def shift(self, visible: Callable[[], Tensor], like: Tensor) -> Tensor:
        if self.bias is None:
            return -torch.log(visible())
        if isinstance(self.bias, Tensor):
            return self.bias.to(like)[None, :, None]
        return like.new_full((1, 1, 1), float(self.bias))

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

    divide: str | None = None
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

    divide: str | None = None
    is_identity = True

    def weight(self, scores: Tensor) -> Tensor:
        return scores

    def weight_(self, scores: Tensor) -> Tensor:
        return scores

    def slope_from_weights(self, weights: Tensor) -> Tensor:
        return torch.ones_like(weights)
