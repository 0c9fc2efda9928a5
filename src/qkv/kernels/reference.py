"""The reference kernel: the NumPy specification behind ``kernel="reference"``, to check results against."""

from __future__ import annotations

import torch

from qkv import reference
from qkv.engine.call import Call, at_least_float32
from qkv.engine.transforms import Need, unmet
from qkv.results import Result

OFFERS: tuple[Need, ...] = ("weights that are no softmax", "pairwise scores", "biases", "vectors by distance")


def unsupported_reason(call: Call) -> str | None:
    """Return why this kernel cannot serve the call, or None if it can."""
    user = call.user
    if (unknown := reference.first_undefined(user.mask, *user.biases, user.score, user.normalizer)) is not None:
        return f"the reference has no definition of {unknown}"
    return unmet(call, OFFERS)


def forward(call: Call) -> Result:
    """Compute attention and its weights by definition, in float64, returned in the dtypes of the other kernels."""
    user = call.user
    result = reference.attention(
        user.q, user.k, user.v, mask=user.mask, bias=user.biases, score=user.score, normalizer=user.normalizer
    )
    like, wide = call.v, at_least_float32(call.v.dtype)
    out, weights = (torch.from_numpy(x).to(like) for x in (result.out, result.weights))
    lse = None if result.lse is None else torch.from_numpy(result.lse).to(like.device, wide)
    return Result(out, lse, weights)
