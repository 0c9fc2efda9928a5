"""Attention over part of the keys, and how parts make a whole.

Attention of a query over a set of keys is a pair: the normalised output, and the log-sum-exp of the scores. Pairs over
disjoint sets of keys merge exactly, in any order (Milakov & Gimelshein 2018, arXiv:1805.02867). Tiles of flash
attention, sinks, caches and devices are all this merge.

Everything in this package that is computed in parts keeps one small protocol, `Mergeable`: `Partial` over sets of keys,
`LinearState` over keys, a `Statistic` over tiles of weights, the sums of a `Survey` over texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import InputError

T = TypeVar("T")


class Mergeable(Protocol):
    """A result over a part of something, such that results over disjoint parts make that of the whole.

    Merging is associative and commutative. The result over nothing, made by the class's `zero`, changes nothing. (In
    algebra: a commutative monoid.) Where the sums are not yet what one wants to know, a method `finish` makes it.
    """

    def merge(self: T, other: T, /) -> T:
        """The result over both parts."""
        ...


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

    @staticmethod
    def zero(like: Float[Tensor, "*n d"]) -> Partial:
        """The result over no keys, for outputs of this shape, dtype and device; lse is at least float32."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        return Partial(torch.zeros_like(like), like.new_full(like.shape[:-1], -torch.inf, dtype=dtype))

    def merge(self, other: Partial, /) -> Partial:
        """Attention over the keys of both: see `qkv.merge`."""
        return merge(self, other)

    def with_sink(self, sink: Float[Tensor, "*#n"], *, in_place: bool = False) -> Partial:
        """Merged with a logit that carries no value: weight leaves the keys, and nothing is added.

        `in_place`: without a gradient, in the memory of the output.
        """
        if in_place:
            share = torch.sigmoid(self.lse - sink).nan_to_num_(0.0)  # ∞ − ∞: neither a key nor the sink has weight
            return Partial(self.out.mul_(share[..., None].to(self.out.dtype)), torch.logaddexp(self.lse, sink))
        empty = self.lse == -torch.inf
        nothing = empty & (sink == -torch.inf)  # ∞ − ∞ is NaN, in the gradient, too: such rows stay out of it
        both = torch.logaddexp(self.lse.masked_fill(nothing, 0), torch.where(nothing, 0.0, sink))
        share = torch.exp(self.lse - both).masked_fill(empty, 0)
        lse = both.masked_fill(nothing, -torch.inf)
        return Partial(self.out * share[..., None].to(self.out.dtype), lse)


def merge(*parts: Partial, out: Partial | None = None) -> Partial:
    """Attention over the union of disjoint sets of keys. Merging nothing but identities gives the identity.

    Associative and commutative; differentiable; sums in the dtype of `lse` (at least float32).

    Args:
        parts: one or more.
        out: where to write the result, which may be one of the parts; then there is no gradient.

    Raises:
        InputError: if no part is given.

    >>> import qkv
    >>> q, k, v = torch.randn(3, 1, 2, 6, 8, dtype=torch.float64)
    >>> parts = [qkv.Partial(*qkv.attend(q, k[:, :, s], v[:, :, s], return_lse=True)) for s in (slice(2), slice(2, 6))]
    >>> torch.allclose(merge(*parts).out, qkv.attend(q, k, v))
    True
    """
    if not parts:
        raise InputError("merge: no parts given, expected at least one Partial")
    if out is not None:
        return _merge_into(out, parts)
    if len(parts) == 1:
        return parts[0]
    return _merge(parts)


@torch.no_grad()
def _merge_into(out: Partial, parts: Sequence[Partial]) -> Partial:
    """One pass over the outputs for each part after the first; `out`, which may be a part, is written to last."""
    whole = parts[0]
    for number, part in enumerate(parts[1:], start=2):
        nothing = (whole.lse == -torch.inf) & (part.lse == -torch.inf)
        share = torch.sigmoid(part.lse - whole.lse).masked_fill_(nothing, 0)[..., None].to(whole.out.dtype)
        lse = torch.logaddexp(whole.lse, part.lse)
        if number < len(parts):
            whole = Partial(torch.lerp(whole.out, part.out, share), lse)
        else:
            whole = Partial(torch.lerp(whole.out, part.out, share, out=out.out), lse)
    if whole.out is not out.out:
        out.out.copy_(whole.out)
    out.lse.copy_(whole.lse)
    return out


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
