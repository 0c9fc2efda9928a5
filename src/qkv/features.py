"""Feature maps: functions φ(x) ≥ 0 of vectors, whose products φ(q) · φ(k) are the weights of linear attention.

They go into `qkv.scores.Features`, or into `qkv.linear.linear_attend`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import InputError, at_least_one

__all__ = ["Favor", "elu_plus_one", "relu"]
__dir__ = __all__.copy


ROWS = 4096  # vectors per chunk when no gradient is needed


def elu_plus_one(x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
    """Return elu(x) + 1: exp(x) below 0, x + 1 above (Katharopoulos et al. 2020, arXiv:2006.16236, eq. 7).

    >>> elu_plus_one(torch.tensor([0.0, 2.0])).tolist()
    [1.0, 3.0]
    """
    # The sum elu(x) + 1 would lose exp(x) to rounding.
    if torch.is_grad_enabled() and x.requires_grad:
        return torch.exp(x.clamp(max=0)) + torch.relu(x)
    out = x.clamp(max=0).exp_()
    rows = max(-2, -x.ndim)
    for part, of in zip(out.split(ROWS, rows), x.split(ROWS, rows), strict=True):  # bounds the temporary memory
        part.add_(of.clamp(min=0))
    return out


def relu(x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
    """Return max(x, 0) (Choromanski et al. 2021, arXiv:2009.14794, §4.2); 0 for a query that shares no feature.

    >>> relu(torch.tensor([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    return torch.relu(x)


@dataclass(frozen=True, eq=False)
class Favor:
    """FAVOR+: positive random features of softmax attention (Choromanski et al. 2021, arXiv:2009.14794, §2.3–2.4).

    `φ(x) = exp(W x' − |x'|² / 2) / √m` with x' = x / d^¼, so that φ(q) · φ(k) is exp(q·k / √d) in expectation, and
    linear attention with these features, divided by its sum, estimates softmax attention. W (m, d) has orthogonal
    blocks of d rows; the length of each row is that of a Gaussian vector. `n_features` m is ⌊d ln d⌋ if None. The same
    `seed` draws the same W; nothing else is random.

    The relative variance of an estimated weight is up to `(exp(|q + k|² / √d) − 1) / m`: for queries and keys of
    large norm, no affordable m is enough. Features of float16 and bfloat16 inputs are float32. Map queries with
    `of_queries`, as `Features` does.

    >>> phi = Favor(4, n_features=10_000)
    >>> q, k = torch.tensor([0.5, -0.5, 0.0, 0.5]), torch.tensor([0.5, 0.0, 1.0, 0.5])
    >>> print(f"{phi(q) @ phi(k):.1f} {torch.exp(q @ k / 4**0.5):.1f}")
    1.3 1.3
    """

    head_dim: int
    n_features: int | None = None
    seed: int = 0
    weight: Float[Tensor, "m d"] = field(init=False, repr=False)
    """W, float64 on the CPU."""

    def __post_init__(self) -> None:
        d, m = self.head_dim, 1 if self.n_features is None else self.n_features
        at_least_one("Favor", head_dim=d, n_features=m)
        m = max(1, math.floor(d * math.log(d))) if self.n_features is None else m
        object.__setattr__(self, "n_features", m)
        # Rows are distributed as Gaussian vectors, and orthogonal within each block of d.
        generator = torch.Generator().manual_seed(self.seed)
        gaussian = torch.randn(2, -(-m // d), d, d, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(gaussian[0])
        q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # uniform over rotations only if R's diagonal is positive
        weight = (q.mT * gaussian[1].norm(dim=-1, keepdim=True)).flatten(0, 1)[:m].contiguous()
        object.__setattr__(self, "weight", weight)

    def __call__(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n m"]:
        """Return φ(x), the features of keys."""
        # No maximum over keys is subtracted: it would make a key depend on later keys and on the rest of the batch.
        # Stability does not need it: w·x − |x|²/2 = |w|²/2 − |x − w|²/2 ≤ |w|²/2 for every key. That is about d/2,
        # and its exponential fits float32 up to d ≈ 128; typical keys stay near exp(0) for any d.
        return torch.exp(self._logits(x))

    def of_queries(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n m"]:
        """Return φ(x) of queries, scaled per query so that the largest feature is 1.

        The scale cancels when the weights are divided by their sum, and only then.
        """
        logits = self._logits(x)
        return torch.exp(logits - logits.amax(-1, keepdim=True))

    def _logits(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n m"]:
        if x.shape[-1] != self.head_dim:
            raise InputError(f"Favor: x has vectors of {x.shape[-1]} entries, expected head_dim = {self.head_dim}")
        x = x.to(torch.promote_types(x.dtype, torch.float32)) * self.head_dim**-0.25
        return x @ self.weight.to(x).T - (0.5 * x.square().sum(-1, keepdim=True) + 0.5 * math.log(len(self.weight)))
