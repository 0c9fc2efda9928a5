"""Normalizers: how the scores of one query become weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import InputError


@dataclass(frozen=True, eq=False)
class Softmax:
    """exp(s / temperature), divided by its sum over the visible keys and, if given, exp(sink).

    `sink` is a logit that no key owns: one for each query head, shape (heads,), or a number for all. It takes weight
    and adds nothing to the output, so weights over the keys sum to less than one (gpt-oss, arXiv:2508.10925;
    ``sink=0.0`` is Miller's softmax-off-by-one). The temperature does not divide it.

    >>> from qkv import attend
    >>> q = k = torch.zeros(1, 1, 1, 8)
    >>> attend(q, k, torch.ones(1, 1, 1, 8), normalizer=Softmax(sink=0.0))[0, 0, 0, 0].item()
    0.5
    """

    temperature: float = 1.0
    sink: Float[Tensor, " heads"] | float | None = None

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise InputError(f"Softmax: temperature is {self.temperature}, expected a positive number")
        if isinstance(self.sink, Tensor) and (self.sink.ndim != 1 or not self.sink.dtype.is_floating_point):
            raise InputError(
                f"Softmax: sink is {self.sink.dtype} of shape {tuple(self.sink.shape)}, "
                "expected one float logit a query head, shape (heads,)"
            )

    def sink_of(self, heads: int, like: Tensor) -> Float[Tensor, " heads"] | None:
        """The sink logit of each head in the dtype and on the device of `like`, or None."""
        if self.sink is None:
            return None
        if not isinstance(self.sink, Tensor):
            return torch.full((heads,), float(self.sink), dtype=like.dtype, device=like.device)
        if len(self.sink) != heads:
            raise InputError(f"Softmax: sink has {len(self.sink)} logits for {heads} query heads")
        return self.sink.to(like)
