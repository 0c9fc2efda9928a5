"""The NumPy oracle as a kernel, so that anything can be checked by ``kernel="reference"``."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from qkv import reference
from qkv.call import Call


def why_not(call: Call) -> str | None:
    """Why this kernel cannot serve the call, or None if it can."""
    if call.needs_grad:
        return "it has no gradients; detach the inputs or use torch.no_grad()"
    if call.dropout_p:
        return "it has no dropout"
    return None


def run(call: Call) -> tuple[Partial, Float[Tensor, "b h nq nk"]]:
    """Attention and its weights by definition, in float64, returned in the dtypes of the other kernels."""
    n_queries, n_keys = call.q.shape[2], call.k.shape[2]

    def visible(b: int, h: int, i: int, j: int) -> bool:
        return reference.sees(call.mask, b, h, i, j, n_queries, n_keys)

    def bend(score: float, b: int, h: int, i: int, j: int) -> float:
        for bias in call.biases:
            score = reference.bends(bias, score, b, h, i, j)
        return score

    result = reference.attention(
        *(x.detach().cpu().double().numpy() for x in (call.q, call.k, call.v)),
        visible=visible,
        bend=bend,
        scale=call.score.scale,
        temperature=call.normalizer.temperature,
        sink=None if call.sink is None else call.sink.detach().cpu().double().numpy(),
    )
    out, lse, weights = (torch.from_numpy(x).to(call.q.device) for x in (result.out, result.lse, result.weights))
    wide = torch.promote_types(call.q.dtype, torch.float32)
    return Partial(out.to(call.q.dtype), lse.to(wide)), weights.to(call.q.dtype)
