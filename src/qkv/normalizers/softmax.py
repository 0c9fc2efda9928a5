"""Softmax, with attention sinks, and hard attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.normalizers.base import LOG2_E, SumToOne, check_temperature


def log_sum_exp(scores: Float[Tensor, "*n k"]) -> Float[Tensor, "*n"]:
    """Log-sum-exp over the last dimension. Rows of −inf give −inf, with zero gradients."""
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
        found = log_sum_exp(scores)
        return found.masked_fill(found == -torch.inf, 0)

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
    sink: Float[Tensor, " heads"] | Float[Tensor, "b heads nq"] | float | None = None
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
