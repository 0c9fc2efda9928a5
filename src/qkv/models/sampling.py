"""From logits to the next token: `Sampler`. Repetition penalty, temperature, top-k, top-p, min-p, in that order."""

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
    """How the next token is chosen. With the defaults, as the model says; `Sampler(temperature=0)` is greedy.

    Each setting acts on what the one before it has left, in this order, which is that of Hugging Face transformers.

    Args:
        repetition_penalty: logits of tokens already seen are divided by it where positive and multiplied by it where
            negative (Keskar et al. 2019, arXiv:1909.05858, §4.1, in transformers' form); 1 changes nothing.
        temperature: what logits are divided by; 0 takes the token of the largest logit, the first of equals.
        top_k: keep the tokens whose logit is at least the k-th largest: all of those that tie with it.
        top_p: keep the fewest tokens, likeliest first, whose probabilities sum to at least this (Holtzman et al. 2020,
            arXiv:1904.09751, §3.1); of tokens of equal probability, the first.
        min_p: keep the tokens that have at least this share of the likeliest one's probability (Nguyen et al. 2024,
            arXiv:2407.01082).

    Raises:
        InputError: for a setting out of its range.

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
        """The chance of each token to be drawn.

        Args:
            logits: of the next token.
            seen: tokens that the repetition penalty is for; what is no token of the vocabulary, such as −1 in place of
                padding, counts for nothing. Needed only with a penalty other than 1.

        Returns:
            Probabilities in float64, exactly 0 where a token is ruled out.

        Raises:
            InputError: if there is a penalty, but nothing said of what was seen.
        """
        logits = logits.double()  # temperatures near 0 and long tails are safe
        if self.repetition_penalty != 1:
            if seen is None:
                raise InputError(f"seen is None, expected tokens, as repetition_penalty is {self.repetition_penalty}")
            logits = _penalized(logits, seen, self.repetition_penalty)
        if self.temperature == 0:
            best, index = logits.max(-1, keepdim=True)
            return torch.zeros_like(logits).scatter(-1, index, 1 + 0 * best)  # NaN if the model gave NaN: see `draw`
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature  # shifted first: no overflow to +inf
        if self.top_k is not None:
            smallest = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, -math.inf)
        if self.top_p is not None:
            ordered, index = logits.sort(descending=True, stable=True)
            before = ordered.softmax(-1).cumsum(-1).roll(1, -1)  # the mass of all likelier tokens
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
            generators: one for each row, on the CPU. A row takes one number from its own, so that what is drawn for it
                does not depend on who else is in the batch; nor on the device, as the sums are made on the CPU.

        Raises:
            InputError: if a row is no distribution, as when the model gave NaN, or the generators are too few or many.
        """
        if len(generators) != len(probabilities):
            raise InputError(f"generators: {len(generators)} came, expected {len(probabilities)}, one for each row")
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
    where = logits.new_zeros(len(logits), size + 1, dtype=torch.bool)  # the last column takes what is no token
    where.scatter_(1, seen.masked_fill(~known, size), True)
    return torch.where(where[:, :-1], torch.where(logits < 0, logits * penalty, logits / penalty), logits)
