"""The vectors of the first token compared with those of the others: norms, angles and magnitudes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkv._engine.call import Call
from research.sinks.rows import visible


class FirstKey(NamedTuple):
    """The first key and value of one head in one text."""

    value_norm: float
    """Norm of the first value divided by the mean norm of the others."""
    key_norm: float
    """The same for keys."""
    nearest: float
    """The share of the queries after the first whose cosine with the first key is the largest of all visible keys."""
    angle: float
    """The mean angle between the first key and the queries after the first, in degrees."""
    angle_others: float
    """The mean angle between these queries and the other keys that they see."""

    @staticmethod
    def of(call: Call, head: int) -> FirstKey:
        """Measure one head in the first text of the batch, after positional rotation."""
        group = call.q.shape[1] // call.k.shape[1]
        q, k, v = (x[0, i].double() for x, i in ((call.q, head), (call.k, head // group), (call.v, head // group)))
        n = len(q)
        whole = visible(call)[0]
        sees = whole[head if len(whole) > 1 else 0]
        later = torch.arange(1, n, device=q.device)
        later = later[sees[later, 0]]
        sees = sees[later]
        unit_q, unit_k = (torch.nn.functional.normalize(x, dim=-1) for x in (q[later], k))
        cosine = (unit_q @ unit_k.T).clamp(-1, 1)
        largest = cosine.masked_fill(~sees, -torch.inf).amax(1)
        angle = cosine.arccos().rad2deg()
        others = sees.clone()
        others[:, 0] = False
        return FirstKey(
            value_norm=float(v[0].norm() / v[1:].norm(dim=-1).mean()),
            key_norm=float(k[0].norm() / k[1:].norm(dim=-1).mean()),
            nearest=float((cosine[:, 0] >= largest).double().mean()),
            angle=float(angle[:, 0].mean()),
            angle_others=float(angle[others].mean()),
        )


class Magnitudes(NamedTuple):
    """The magnitudes of the hidden states of one text at one depth."""

    first: float
    """The largest magnitude at the first token."""
    others: float
    """The largest magnitude at any other token."""
    median: float
    """The median over all tokens and dimensions."""

    @staticmethod
    def of(states: Float[Tensor, "n d"]) -> Magnitudes:
        """Measure hidden states."""
        size = states.double().abs()
        return Magnitudes(float(size[0].max()), float(size[1:].max()), float(size.median()))
