"""Softmax attention and all statistics of its weights on CPU in one pass, by a compiled library."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv._engine.call import Call
from qkv._engine.tiles import kept
from qkv.masks import Grid, Mask
from qkv.native import binding
from qkv.native.binding import attend, empty, prepared, products, visibility

OF_QUERIES = (
    "entropy", "effective_keys", "distance", "spread", "sink", "self_", "previous", "next_", "row_sum",
    "first_contribution",
)  # fmt: skip
"""The first numbers of each query that the library writes; the masses of ranges follow."""


def unsupported_reason(call: Call, mass: Mapping[str, Mask], statistics: Sequence[object]) -> str | None:
    """Why the library cannot compute a call with its statistics and masses, or None if it can."""
    if statistics:
        return f"{', '.join(type(s).__name__ for s in statistics)} is computed from tiles of weights"
    if (why := binding.unsupported_reason(call)) is not None:
        return why
    missing = (name for name, ranges in _ranges(call, mass).items() if ranges is None)
    return next((f"mass[{name!r}] is not a union of a band and the first keys" for name in missing), None)


def _ranges(call: Call, mass: Mapping[str, Mask]) -> dict[str, Tensor | None]:
    """`ranges_of` each mask, found once for a call."""
    known = vars(call).setdefault("native ranges", {})
    for mask in mass.values():
        if id(mask) not in known:
            known[id(mask)] = mask, ranges_of(mask, call.grid)
    return {name: known[id(mask)][1] for name, mask in mass.items()}


def attend_and_measure(
    call: Call,
    *,
    output: bool,
    mass: Mapping[str, Mask],
    firsts: Sequence[int],
    queries: Bool[Tensor, "b nq"] | None,
    prefix_keys: int | None,
    bins: tuple[int, int] | None,
    value_norms: Float[Tensor, "b h nk"] | None,
) -> tuple[Float[Tensor, "b h nq dv"] | None, Float[Tensor, "b h nq"], dict[str, Any]] | None:
    """The output if it is wanted, the log-sum-exp of all queries, and the statistics of those that count.

    None if a score or an output is not finite.

    The statistics are the fields of `qkv.statistics.Statistics`; the thumbnail is a tensor of the largest and of the
    mean weights, (2, b, h, query bins, key bins), and `bins` is the size of a bin.
    """
    b, h, n_queries, _ = call.q.shape
    dtype = products(call.q, call.k, call.v)
    made, n_keys = prepared(call, dtype), call.k.shape[2]
    spans = {name: x for name, x in _ranges(call, mass).items() if x is not None}
    ranges = None
    if spans:
        batches = max(x.shape[2] for x in spans.values())
        ranges = torch.cat([x.expand(-1, -1, batches, -1) for x in spans.values()])
        made.with_tensors(ranges=ranges, n_ranges=len(ranges), range_batch=0 if batches == 1 else n_queries)
    out = empty(b, h, n_queries, call.v.shape[3], dtype=dtype) if output else None
    all_rows = empty(len(OF_QUERIES) + sum(map(len, spans.values())) + 1, b, h, n_queries)
    *rows, lse = all_rows.unbind()
    heads = 1 if made.seen.cells is None else made.seen.cells.status.shape[1]
    received, of_queries = (empty(b, h, n_keys), empty(b, heads, n_queries))
    of_keys = empty(b, heads, n_keys)
    prefix = None if prefix_keys is None else empty(2, b, h, prefix_keys)
    pooled = None
    if bins is not None:
        pooled = empty(2, b, h, -(-n_queries // bins[0]), -(-n_keys // bins[1]))
        made.with_tensors(map=pooled, bin_q=bins[0], bin_k=bins[1])
    norms = None if value_norms is None else value_norms.contiguous()
    if norms is not None:
        made.with_tensors(norms=norms, ns=norms.stride()[:2])
    counted = None if queries is None else queries.contiguous()
    arguments = made.with_tensors(
        counted=counted, firsts=(binding.I64 * b)(*firsts), out=out, lse=lse, rows=all_rows, received=received,
        prefix=prefix, n_prefix=prefix_keys, visible=of_queries, visible_queries=of_keys, visible_heads=heads,
    )  # fmt: skip
    if not attend(arguments, call.q, call.k, dtype):
        return None
    values: dict[str, Any] = dict(zip(OF_QUERIES, rows, strict=False))
    if norms is None:
        del values["first_contribution"]
    else:
        values["first_contribution"] = _share_of_first(values, norms, torch.tensor(firsts))
    sums = iter(rows[len(OF_QUERIES) :])
    masses = {name: functools.reduce(torch.add, itertools.islice(sums, len(x))) for name, x in spans.items()}
    shown = lse if counted is None else lse.masked_fill(~counted[:, None], -torch.inf)
    sink_mass = None
    if call.sink is not None:
        sink = call.sink.to(lse.dtype).expand(b, h, n_queries)
        sink_mass = torch.exp(sink - shown).masked_fill_((shown == -torch.inf) | (sink == -torch.inf), 0)
    values |= {
        "lse": shown,
        "received": received,
        "visible": of_queries.expand(b, h, n_queries),
        "visible_queries": of_keys.expand(b, h, n_keys),
        "prefix_sink_scores": None if prefix is None else prefix[0] / prefix[1].clamp(min=1),
        "thumbnail": pooled,
        "sink_mass": sink_mass,
        "mass": masses,
    }
    return out, lse, values


def _share_of_first(values: Mapping[str, Tensor], norms: Tensor, firsts: Tensor) -> Tensor:
    """The first key's part of Σ_j A_ij ‖v_j‖."""
    whole = values["first_contribution"]
    first = values["sink"] * norms.gather(2, firsts[:, None, None].expand(*norms.shape[:2], 1))
    return (first / torch.where(whole > 0, whole, 1.0)).clamp(max=1).masked_fill(whole == 0, 0)  # rounding


def ranges_of(mask: Mask, grid: Grid) -> Tensor | None:
    """The keys of each query inside a mask as ranges that do not overlap (ranges, 2, 1 or b, nq); else None."""

    def ranges() -> Tensor | None:
        found: list[tuple[Tensor, Tensor]] = []
        for part in mask.alternatives():
            keys = part.key_mask(grid)
            if part.band is not None:
                seen = visibility(part, grid)
                assert seen is not None
                low, high = seen.band
                position = grid.rows(0, grid.n_queries)[None]
                start, end = (position - high).clamp(0, grid.n_keys), (position - low + 1).clamp(0, grid.n_keys)
            elif keys is not None:
                start, end = keys.int().argmax(1, keepdim=True), keys.sum(1, keepdim=True)
                end = start + end
                last = grid.n_keys - keys.flip(1).int().argmax(1, keepdim=True)
                if not bool(((last == end) | (end == start)).all()):
                    return None
                start, end = (x.expand(-1, grid.n_queries) for x in (start, end))
            else:
                return None
            pieces = [(start, end)]
            for other_start, other_end in found:  # what the others have is theirs
                pieces = [
                    piece
                    for first, stop in pieces
                    for piece in (
                        (first, torch.minimum(stop, torch.maximum(first, other_start))),
                        (torch.maximum(first, torch.minimum(stop, other_end)), stop),
                    )
                ]
            found += pieces
        batch = max(len(x) for pair in found for x in pair)
        each = [torch.stack([x.expand(batch, -1) for x in pair]) for pair in found]
        return torch.stack(each).int().contiguous()

    return kept(mask, grid, "native ranges", ranges)
