"""Softmax attention and all statistics of its weights on CPU in one pass, by a compiled library."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.engine.call import Call
from qkv.engine.tiles import cached_for_mask
from qkv.masks import Grid, Mask
from qkv.native import binding
from qkv.native.binding import Prepared, attend, empty, prepared
from qkv.statistics.result import Place, Statistics, Thumbnail, bin_size, share_of_first

if TYPE_CHECKING:
    from qkv.statistics.reduce import Request

OF_QUERIES = (
    "entropy", "effective_keys", "distance", "spread", "sink", "self_", "previous", "next_", "row_sum",
    "first_contribution",
)  # fmt: skip
"""The first numbers of each query that the library writes; the masses of ranges follow."""


def unsupported_reason(call: Call, mass: Mapping[str, Mask]) -> str | None:
    """Why the library cannot compute a call with its masses, or None if it can."""
    if (why := binding.unsupported_reason(call)) is not None:
        return why
    missing = (name for name, ranges in _ranges(call, mass).items() if ranges is None)
    return next((f"mass[{name!r}] is not a union of a band and the first keys" for name in missing), None)


def _ranges(call: Call, mass: Mapping[str, Mask]) -> dict[str, Tensor | None]:
    """`ranges_of` each mask, found once for a call."""
    cache = vars(call).setdefault("native ranges", {})
    for mask in mass.values():
        if id(mask) not in cache:
            cache[id(mask)] = mask, ranges_of(mask, call.grid)
    return {name: cache[id(mask)][1] for name, mask in mass.items()}


def attend_and_measure(
    call: Call, request: Request, *, output: bool
) -> tuple[Float[Tensor, "b h nq dv"] | None, Float[Tensor, "b h nq"], Statistics] | None:
    """The output if it is wanted, the log-sum-exp of all queries, and the statistics of those that count.

    None if a score or an output is not finite.
    """
    b, h, n_queries, _ = call.q.shape
    arguments, n_keys, prefix_keys, queries = prepared(call), call.k.shape[2], request.prefix_keys, request.queries
    spans = {name: x for name, x in _ranges(call, request.mass).items() if x is not None}
    if spans:
        batches = max(x.shape[2] for x in spans.values())
        ranges = torch.cat([x.expand(-1, -1, batches, -1) for x in spans.values()])
        arguments.with_tensors(ranges=ranges, n_ranges=len(ranges), range_batch=0 if batches == 1 else n_queries)
    if prefix_keys is not None:
        prefix = empty(2, b, h, prefix_keys)
        arguments.with_tensors(prefix=prefix, n_prefix=prefix_keys)
    if request.bins is not None:
        bins = bin_size(n_queries, request.bins), bin_size(n_keys, request.bins)
        pooled = empty(2, b, h, -(-n_queries // bins[0]), -(-n_keys // bins[1]))
        arguments.with_tensors(map=pooled, bin_q=bins[0], bin_k=bins[1])
    if request.value_norms is not None:
        norms = request.value_norms.contiguous()
        arguments.with_tensors(norms=norms, ns=norms.stride()[:2])
    if queries is not None:
        arguments.with_tensors(counted=queries.contiguous())
    measurement = measured(arguments, output=output, firsts=request.firsts)
    if measurement is None:
        return None
    out, statistics = measurement
    more, lse = dict[str, Any](), statistics.lse
    assert lse is not None
    if request.value_norms is not None:
        whole = statistics._view("first_contribution")
        more["first_contribution"] = share_of_first(statistics.sink, whole, norms, request.firsts)
    if spans:
        sums = (statistics._view(i) for i in range(len(ranges)))
        more["mass"] = {name: functools.reduce(torch.add, itertools.islice(sums, len(x))) for name, x in spans.items()}
    if queries is not None:
        more["lse"] = lse.masked_fill(~queries[:, None], -torch.inf)
    if call.sink is not None:
        shown, sink = more.get("lse", lse), call.sink.to(lse.dtype).expand(b, h, n_queries)
        more["sink_mass"] = torch.exp(sink - shown).masked_fill_((shown == -torch.inf) | (sink == -torch.inf), 0)
    if prefix_keys is not None:
        more["prefix_sink_scores"] = prefix[0] / prefix[1].clamp(min=1)
    if request.bins is not None:
        more["thumbnail"] = Thumbnail(pooled[0], pooled[1], *bins)
    vars(statistics).update(more)
    return None if out is None else out.to(call.v.dtype), lse, statistics


def measured(made: Prepared, *, output: bool, firsts: Sequence[int]) -> tuple[Tensor | None, Statistics] | None:
    """The output if it is wanted, and the statistics of every call; None if a score or an output is not finite."""
    c = made.arguments
    size, places = _places(c.b, c.h, made.heads, c.nq, c.nk, c.n_ranges)
    numbers, out = empty(size), made.output() if output else None
    start = numbers.data_ptr()
    c.rows, c.visible_heads, c.firsts = start, made.heads, (binding.I64 * c.b)(*firsts)
    c.lse, c.received = start + 4 * places["lse"][2], start + 4 * places["received"][2]
    c.visible, c.visible_queries = start + 4 * places["visible"][2], start + 4 * places["visible_queries"][2]
    return (out, Statistics._of(numbers, places)) if attend(made) else None


@functools.lru_cache(maxsize=64)
def _places(
    b: int, h: int, heads: int, n_queries: int, n_keys: int, n_ranges: int
) -> tuple[int, dict[str | int, Place]]:
    """How many numbers the library writes, and the sizes, strides and start of the fields of `Statistics` in them."""
    size, places = 0, dict[str | int, Place]()
    for name in (*OF_QUERIES, *range(n_ranges), "lse", "received", "visible", "visible_queries"):
        n = n_keys if name in ("received", "visible_queries") else n_queries
        own = heads if name in ("visible", "visible_queries") else h
        places[name] = (b, h, n), (own * n, n if own == h else 0, 1), size
        size += b * own * n
    return size, places


def ranges_of(mask: Mask, grid: Grid) -> Tensor | None:
    """The keys of each query inside a mask as ranges that do not overlap (ranges, 2, 1 or b, nq); else None."""

    def ranges() -> Tensor | None:
        spans: list[tuple[Tensor, Tensor]] = []
        for part in mask.alternatives():
            keys = part.key_mask(grid)
            if part.band is not None:
                low, high = binding.in_reach(part.band, grid.n_queries + grid.n_keys)
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
            for other_start, other_end in spans:  # what the others have is theirs
                pieces = [
                    piece
                    for first, stop in pieces
                    for piece in (
                        (first, torch.minimum(stop, torch.maximum(first, other_start))),
                        (torch.maximum(first, torch.minimum(stop, other_end)), stop),
                    )
                ]
            spans += pieces
        batch = max(len(x) for pair in spans for x in pair)
        each = [torch.stack([x.expand(batch, -1) for x in pair]) for pair in spans]
        return torch.stack(each).int().contiguous()

    return cached_for_mask(mask, grid, "native ranges", ranges)
