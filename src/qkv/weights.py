"""From the scores of one query to its weights, given what it needs to know of all of them: its level.

The level is the log-sum-exp of a softmax, the threshold of an entmax, nothing for weights that stand alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.normalizers import Entmax, Normalizer, Pointwise

Scores = Float[Tensor, "*n k"]
Level = Float[Tensor, "*n"]

STEPS = 100  # Newton's steps to a threshold, at most


@dataclass(frozen=True, eq=False)
class Rows:
    """What a query needs to know of all its scores before one of them becomes a weight."""

    level: Float[Tensor, "b h nq"] | None = None
    """Log-sum-exp (−inf where nothing is visible) or threshold."""
    total: Float[Tensor, "b h nq"] | None = None
    """Sum of pointwise weights, where they are divided by it; 1 where it is 0."""
    chosen: Int[Tensor, "b h nq"] | None = None
    """The key that hard attention took; −1 for none."""


def weigh(normalizer: Normalizer, scores: Scores, level: Level | None) -> Scores:
    """Weights of final scores, −inf where hidden; not yet divided, if the normalizer is pointwise."""
    if isinstance(normalizer, Pointwise):
        return torch.where(scores == -torch.inf, 0.0, normalizer.weight(scores))
    assert level is not None
    if isinstance(normalizer, Entmax):
        return _powers((normalizer.alpha - 1) * scores - level[..., None], 1 / (normalizer.alpha - 1))
    return torch.exp(scores - level[..., None])


def slopes(normalizer: Normalizer, weights: Scores) -> Scores:
    """Derivative of each weight, not yet divided, by its own score at a fixed level."""
    if isinstance(normalizer, Pointwise):
        return normalizer.slope(weights)
    if isinstance(normalizer, Entmax) and normalizer.alpha == 2:
        return (weights > 0).to(weights)
    if isinstance(normalizer, Entmax):
        return torch.where(weights > 0, weights.clamp(min=torch.finfo(weights.dtype).tiny) ** (2 - normalizer.alpha), 0)
    return weights


def log_sum_exp(scores: Scores) -> Level:
    """Log-sum-exp of the last dimension; −inf where all scores are."""
    top = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    total = torch.exp(scores - top).sum(-1)
    seen = total != 0  # NaN is not nothing
    return torch.where(seen, top[..., 0] + torch.log(torch.where(seen, total, 1.0)), -torch.inf)


def level(normalizer: Normalizer, scores: Scores) -> Level | None:
    """The level of rows that are here whole; finite (0) for rows that see nothing, so that exp(−inf − level) is 0."""
    if isinstance(normalizer, Pointwise):
        return None
    if isinstance(normalizer, Entmax):
        return threshold(normalizer, scores)
    found = log_sum_exp(scores)
    return found.masked_fill(found == -torch.inf, 0)


def threshold(normalizer: Entmax, scores: Scores) -> Level:
    """τ with Σ [(α − 1) s − τ]₊^p = 1, p = 1 / (α − 1), differentiable.

    Newton on ‖[z − τ]₊‖_p = 1, which is convex and decreasing in τ, from τ = max z − 1, where it is at least 1: the
    steps only go up, never past the root. For α = 2 it is exact after finitely many (Michelot 1986).
    """
    p = 1 / (normalizer.alpha - 1)
    z = (normalizer.alpha - 1) * scores
    with torch.no_grad():
        top = z.amax(-1)
        empty = top == -torch.inf
        tau = torch.where(empty, 0.0, top - 1)
        for _ in range(STEPS):
            step = _newton(z, tau, p)
            moving = step > 2 * torch.finfo(z.dtype).eps * (1 + tau.abs())  # a row rests when it is there: what others
            if not moving.any():  # do is nothing to it
                break
            tau = torch.where(moving, tau + step, tau)
    # One more step from the root moves it nowhere, and its derivative is that of the root by the implicit function.
    return torch.where(empty, 0.0, tau + _newton(z, tau, p)) if z.requires_grad else tau


def _newton(z: Scores, tau: Level, p: float) -> Level:
    above = z - tau[..., None]
    total = _powers(above, p).sum(-1)
    slope = _powers(above, p - 1).sum(-1) if p != 1 else (above > 0).to(z).sum(-1)
    safe = total > 0
    total = torch.where(safe, total, 1.0)
    return (1 - total ** (-1 / p)) * total / torch.where(safe, slope.detach() if p == 1 else slope, 1.0)


def _powers(x: Scores, p: float) -> Scores:
    """[x]₊^p, with derivative 0 at 0 and below."""
    x = torch.relu(x)
    return x if p == 1 else x * x if p == 2 else torch.where(x > 0, x.clamp(min=torch.finfo(x.dtype).tiny) ** p, 0.0)
