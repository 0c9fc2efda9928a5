"""The eager kernel: forms the weight matrix. Quadratic memory, any composition, all derivatives by autograd."""

from __future__ import annotations

from qkv.engine.call import Call
from qkv.engine.rows import attend_rows
from qkv.engine.tiles import Tile
from qkv.engine.transforms import NEEDS, Need, transformed, under_vmap
from qkv.masks import FULL, PARTIAL
from qkv.normalizers import SumToOne
from qkv.results import Result

OFFERS: tuple[Need, ...] = tuple(NEEDS)


def unsupported_reason(call: Call) -> str | None:
    """Return why this kernel cannot serve the call, or None if it can."""
    if under_vmap(call):
        return "torch.func.vmap maps it; put the mapped dimension into the batch or the heads"
    solved = isinstance(call.normalizer, SumToOne) and not call.normalizer.has_lse
    if transformed(call) and solved:
        return (
            f"{type(call.normalizer).__name__} has no derivatives in torch.func transforms and in forward mode, "
            "because the level of its rows is found by search; expected Softmax or a Pointwise normalizer"
        )
    return None


def forward(call: Call) -> Result:
    """Compute attention, and its weights after dropout; both in the dtype of the inputs."""
    batch, heads, queries, keys = (slice(0, n) for n in (*call.q.shape[:3], call.k.shape[2]))
    out, rows = attend_rows([Tile(call, batch, heads, queries, keys, FULL if call.mask is None else PARTIAL)])
    (weights,) = rows.weights()
    weights = weights if rows.dropout is None else weights * rows.dropout[0]
    return Result(out.to(call.v.dtype), rows.level if call.normalizer.has_lse else None, weights.to(call.v.dtype))
