"""Softmax, with its sinks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.normalizers.base import LOG2_E, SumToOne, check_temperature


def log_sum_exp(scores: Float[Tensor, "*n k"]) -> Float[Tensor, "*n"]:
    """Log-sum-exp of the last dimension; −inf where all scores are. Differentiable, with gradients of 0 there."""
    top = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    total = torch.exp(scores - top).sum(-1)
    seen = total != 0  # NaN is not nothing
    return torch.where(seen, top[..., 0] + torch.log(torch.where(seen, total, 1.0)), -torch.inf)


class Exponential(SumToOne):
    """exp(s − level): the weights of a softmax, whose level is the log-sum-exp of the scores."""

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
        self.check(0)


@dataclass(frozen=True, eq=False)
class Hard(Exponential):
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
    one_key = True

    def __post_init__(self) -> None:
        check_temperature(self)
