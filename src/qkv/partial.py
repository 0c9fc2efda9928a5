"""Attention over part of the keys, and how parts make a whole.

Attention of a query over a set of keys is a pair: the normalised output, and the log-sum-exp of the scores. Pairs over
disjoint sets of keys merge exactly, in any order (Milakov & Gimelshein 2018, arXiv:1805.02867). Tiles of flash
attention, sinks, caches and devices are all this merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import InputError


@dataclass(frozen=True, eq=False)
class Partial:
    """`out` (…, d), normalised over the keys it has seen, and `lse` (…), the log-sum-exp of their scores.

    No key seen is ``out = 0, lse = −inf``, the identity of `merge`.

    >>> seen = Partial(torch.ones(1, 4), torch.zeros(1))
    >>> nothing = Partial(torch.zeros(1, 4), torch.full((1,), -torch.inf))
    >>> merge(seen, nothing).lse.item()
    0.0
    """

    out: Float[Tensor, "*n d"]
    lse: Float[Tensor, "*n"]

    def with_sink(self, sink: Float[Tensor, "*#n"]) -> Partial:
        """Merged with a logit that carries no value: weight leaves the keys, and nothing is added."""
        empty = self.lse == -torch.inf
        nothing = empty & (sink == -torch.inf)  # ∞ − ∞ is NaN, in the gradient, too: such rows stay out of it
        both = torch.logaddexp(self.lse.masked_fill(nothing, 0), torch.where(nothing, 0.0, sink))
        share = torch.exp(self.lse - both).masked_fill(empty, 0)
        lse = both.masked_fill(nothing, -torch.inf)
        return Partial(self.out * share[..., None].to(self.out.dtype), lse)


def merge(*parts: Partial) -> Partial:
    """Attention over the union of disjoint sets of keys. Merging nothing but identities gives the identity.

    Associative and commutative; differentiable; sums in the dtype of `lse` (at least float32).

    >>> import qkv
    >>> q, k, v = torch.randn(3, 1, 2, 6, 8, dtype=torch.float64)
    >>> parts = [qkv.Partial(*qkv.attend(q, k[:, :, s], v[:, :, s], return_lse=True)) for s in (slice(2), slice(2, 6))]
    >>> torch.allclose(merge(*parts).out, qkv.attend(q, k, v))
    True
    """
    if not parts:
        raise InputError("merge: no parts given, expected at least one Partial")
    if len(parts) == 1:
        return parts[0]
    return _merge(parts)


def _merge(parts: Sequence[Partial]) -> Partial:
    logs = torch.stack(torch.broadcast_tensors(*[p.lse for p in parts]))
    # A row that no part has seen has lse −inf everywhere; subtracting a finite number keeps NaN out of it,
    # forward and backward.
    top = logs.detach().amax(0).clamp(min=torch.finfo(logs.dtype).min)
    shares = torch.exp(logs - top)
    total = shares.sum(0)
    empty = total == 0
    safe = torch.where(empty, 1.0, total)
    out = sum((p.out.to(logs.dtype) * (share / safe)[..., None] for p, share in zip(parts, shares, strict=True)))
    assert isinstance(out, Tensor)
    lse = torch.where(empty, -torch.inf, top + torch.log(safe))
    return Partial(out.to(parts[0].out.dtype), lse)


def sink_gradient(
    sink: Float[Tensor, "#b h #q"],
    part: Partial,
    grad: Float[Tensor, "b h q d"],
    grad_lse: Float[Tensor, "b h q"] | None,
) -> Float[Tensor, "#b h #q"]:
    """Gradient of the sink merged into `part`: d lse/dσ = e^(σ − lse) and d out/dσ = −out·e^(σ − lse)."""
    lse = part.lse
    inner = (grad.to(lse.dtype) * part.out.to(lse.dtype)).sum(-1)
    inner = inner if grad_lse is None else inner - grad_lse
    share = torch.where(lse == -torch.inf, 0.0, torch.exp(sink - lse))  # of a row that not even the sink has
    return -(share * inner).sum_to_size(sink.shape)
