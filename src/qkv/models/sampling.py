"""Sampling of the next token from logits: repetition penalty, temperature, top-k, top-p and min-p, in that order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.errors import InputError


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen: by default from the model's distribution; `Sampler(temperature=0)` is greedy.

    Each setting filters the result of the one before it. The order is that of Hugging Face transformers.

    Args:
        repetition_penalty: logits of tokens that already occurred are divided by it where positive and multiplied by it
            where negative (Keskar et al. 2019, arXiv:1909.05858, §4.1, in transformers' form); 1 changes nothing.
        temperature: divides the logits; 0 takes the token with the largest logit, and the first of several such tokens.
        top_k: keep the tokens whose logit is at least the k-th largest, including all ties.
        top_p: keep the fewest tokens, most likely first, whose probabilities sum to at least this (Holtzman et al.
            2020, arXiv:1904.09751, §3.1); of tokens of equal probability, the first.
        min_p: keep the tokens with at least this share of the probability of the most likely token (Nguyen et al. 2024,
            arXiv:2407.01082).

    Raises:
        InputError: for a setting outside its range.

    >>> import torch
    >>> logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    >>> Sampler(top_p=0.7).probabilities(logits).round(decimals=3).tolist()
    [[0.625, 0.375, 0.0, 0.0]]
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature is {self.temperature}, expected 0 (greedy) or a positive finite number")
        if self.top_k is not None and not (isinstance(self.top_k, int) and self.top_k >= 1):
            raise InputError(f"top_k is {self.top_k}, expected a whole number of at least 1, or None")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}, expected more than 0 and at most 1, or None")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise InputError(f"min_p is {self.min_p}, expected 0 to 1, or None")
        if not 0 < self.repetition_penalty < math.inf:
            raise InputError(f"repetition_penalty is {self.repetition_penalty}, expected a positive finite number")

    def probabilities(
        self, logits: Float[Tensor, "b v"], seen: Int[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b v"]:
        """The probability of each token to be drawn.

        Args:
            logits: logits of the next token.
            seen: tokens that the repetition penalty applies to. Ids outside the vocabulary, such as −1 for padding, are
                ignored. Required if the penalty is not 1.

        Returns:
            Probabilities in float64, exactly 0 where a token is ruled out.

        Raises:
            InputError: if there is a penalty, but `seen` is None.
        """
        logits = logits.double()  # temperatures near 0 and long tails are safe
        if self.repetition_penalty != 1:
            if seen is None:
                raise InputError(f"seen is None, expected tokens, as repetition_penalty is {self.repetition_penalty}")
            logits = _penalized(logits, seen, self.repetition_penalty)
        if self.temperature == 0:
            best, index = logits.max(-1, keepdim=True)
            return torch.zeros_like(logits).scatter(-1, index, 1 + 0 * best)  # keeps NaN, which `draw` reports
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature  # without the maximum it could overflow
        if self.top_k is not None:
            smallest = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, -math.inf)
        if self.top_p is not None:
            ordered, index = logits.sort(descending=True, stable=True)
            before = ordered.softmax(-1).cumsum(-1).roll(1, -1)  # total probability of all more likely tokens
            before[:, 0] = 0
            out = before >= self.top_p
            logits = logits.masked_fill(out.scatter(-1, index, out), -math.inf)
        chances = logits.softmax(-1)
        if self.min_p is not None:
            chances = chances.masked_fill(chances < self.min_p * chances.amax(-1, keepdim=True), 0)
            chances = chances / chances.sum(-1, keepdim=True)
        return chances

    def draw(self, probabilities: Float[Tensor, "b v"], generators: Sequence[torch.Generator]) -> Int[Tensor, " b"]:
        """One token for each row: the first whose cumulative probability exceeds a uniform number.

        Args:
            probabilities: rows that sum to about 1.
            generators: one for each row, on the CPU. Each row draws one number from its own generator, so its token
                does not depend on the other rows of the batch; nor on the device, because the sums are computed on the
                CPU.

        Raises:
            InputError: if a row is not a distribution, for instance NaN, or the number of generators is wrong.
        """
        if len(generators) != len(probabilities):
            raise InputError(f"generators has {len(generators)} items, expected {len(probabilities)}, one for each row")
        total = probabilities.cpu().double().cumsum(-1)  # in order: a parallel sum need not be monotone
        broken = ~(total[:, -1] > 0) | total[:, -1].isinf()
        if broken.any():
            row = int(broken.nonzero()[0])
            raise InputError(
                f"probabilities of row {row} sum to {total[row, -1]:g}, expected 1: are its logits finite?"
            )
        uniform = torch.stack([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])
        # right=True skips tokens of probability 0, which add nothing to the sum.
        return torch.searchsorted(total, uniform * total[:, -1:], right=True)[:, 0].to(probabilities.device)


def _penalized(logits: Float[Tensor, "b v"], seen: Int[Tensor, "b t"], penalty: float) -> Float[Tensor, "b v"]:
    size = logits.shape[-1]
    known = (seen >= 0) & (seen < size)
    where = logits.new_zeros(len(logits), size + 1, dtype=torch.bool)  # the last column: ids outside the vocabulary
    where.scatter_(1, seen.masked_fill(~known, size), True)
    return torch.where(where[:, :-1], torch.where(logits < 0, logits * penalty, logits / penalty), logits)
