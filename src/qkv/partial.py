"""`qkv.Partial` and `qkv.merge`: attention over a subset of the keys, and the exact merge of such results.

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
from qkv.normalizers import log_sum_exp


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
        lse = log_sum_exp(torch.stack(torch.broadcast_tensors(self.lse, sink), -1))
        share = _share(self.lse, lse)[..., None].to(self.out.dtype)
        return Partial(self.out.mul_(share) if in_place else self.out * share, lse)


def _share(part: Float[Tensor, "*#n"], whole: Float[Tensor, "*#n"]) -> Float[Tensor, "*n"]:
    """Return e^(part − whole), the share of a part's log-sum-exp in that of the whole; 0 if both are −inf."""
    return torch.exp(part - whole.masked_fill(whole == -torch.inf, 0))


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
    logs = torch.stack(torch.broadcast_tensors(*[p.lse for p in parts]), -1)
    lse = log_sum_exp(logs)
    shares = _share(logs, lse[..., None]).unbind(-1)
    out = sum(p.out.to(lse.dtype) * share[..., None] for p, share in zip(parts, shares, strict=True))
    assert isinstance(out, Tensor)
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
    return -(_share(sink, lse) * inner).sum_to_size(sink.shape)
