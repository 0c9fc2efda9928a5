"""Partial attention results over a subset of the keys, and their exact merge.

Attention of a query over a set of keys is a pair: the normalised output, and the log-sum-exp of the scores. Pairs over
disjoint sets of keys merge exactly, in any order (Milakov & Gimelshein 2018, arXiv:1805.02867). The tiles of flash
attention, sinks, caches and sequence parallelism all use this merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import InputError


@dataclass(frozen=True, eq=False)
class Partial:
    """Attention over a subset of the keys: `out` (…, d), normalised over them, and `lse` (…), their log-sum-exp.

    Over no keys, ``out = 0`` and ``lse = −inf``; this is the identity of `merge`.

    >>> part = Partial(torch.ones(1, 4), torch.zeros(1))
    >>> nothing = Partial(torch.zeros(1, 4), torch.full((1,), -torch.inf))
    >>> merge(part, nothing).lse.item()
    0.0
    """

    out: Float[Tensor, "*n d"]
    lse: Float[Tensor, "*n"]

    def with_sink(self, sink: Float[Tensor, "*#n"], *, in_place: bool = False) -> Partial:
        """Merge with an attention sink: a logit without a value, which takes weight and adds nothing to the output.

        `in_place` overwrites the output; there is no gradient then.
        """
        if in_place:
            share = torch.sigmoid(self.lse - sink).nan_to_num_(0.0)  # NaN from ∞ − ∞: no visible key, and no sink
            return Partial(self.out.mul_(share[..., None].to(self.out.dtype)), torch.logaddexp(self.lse, sink))
        empty = self.lse == -torch.inf
        nothing = empty & (sink == -torch.inf)  # for these rows ∞ − ∞ would be NaN, also in the gradient
        both = torch.logaddexp(self.lse.masked_fill(nothing, 0), torch.where(nothing, 0.0, sink))
        share = torch.exp(self.lse - both).masked_fill(empty, 0)
        lse = both.masked_fill(nothing, -torch.inf)
        return Partial(self.out * share[..., None].to(self.out.dtype), lse)


def merge(*parts: Partial) -> Partial:
    """Compute attention over the union of disjoint sets of keys. Merging identities gives the identity.

    Associative and commutative; differentiable; sums are in the dtype of `lse` (at least float32).

    Args:
        parts: one or more results over disjoint sets of keys.

    Raises:
        InputError: without parts.

    >>> import qkv
    >>> q, k, v = torch.randn(3, 1, 2, 6, 8, dtype=torch.float64)
    >>> parts = [qkv.Partial(*qkv.attend(q, k[:, :, s], v[:, :, s], return_lse=True)) for s in (slice(2), slice(2, 6))]
    >>> torch.allclose(merge(*parts).out, qkv.attend(q, k, v))
    True
    """
    if not parts:
        raise InputError("merge: parts is empty, expected at least one Partial")
    if len(parts) == 1:
        return parts[0]
    logs = torch.stack(torch.broadcast_tensors(*[p.lse for p in parts]))
    # A row that is fully masked in all parts has lse −inf everywhere; subtracting a finite number avoids NaN, forward
    # and backward.
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
    """Return the gradient of the sink σ merged into `part`: d lse/dσ = e^(σ − lse) and d out/dσ = −out·e^(σ − lse)."""
    lse = part.lse
    inner = (grad.to(lse.dtype) * part.out.to(lse.dtype)).sum(-1)
    inner = inner if grad_lse is None else inner - grad_lse
    share = torch.where(lse == -torch.inf, 0.0, torch.exp(sink - lse))  # −inf: no visible key and no sink
    return -(share * inner).sum_to_size(sink.shape)
