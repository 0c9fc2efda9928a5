"""Output and statistics of a call by the compiled library, in one pass; and its bins of weights."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.engine.call import Call, RowState
from qkv.engine.level import sink_weight
from qkv.kernels.native_call import Prepared, is_finite, prepared, ranges_of, run
from qkv.native import library
from qkv.native.library import CPU, empty
from qkv.results import Place, Statistics, Thumbnail, bin_size
from qkv.statistics.base import Request

OF_QUERIES = (
    "entropy", "effective_keys", "distance", "spread", "sink", "self_", "previous", "next_", "row_sum",
    "first_contribution", "max_logit",
)  # fmt: skip
"""The first numbers of each query that the library writes; the masses of ranges follow."""
POINTED = ("lse", "received", "visible", "visible_queries")
"""The numbers after these, to which the arguments have pointers."""


def attend_and_measure(
    call: Call, request: Request, *, output: bool, rows: RowState | None = None
) -> tuple[Float[Tensor, "b h nq dv"] | None, Float[Tensor, "b h nq"], Statistics] | None:
    """Return the output if it is wanted, the number of each row as in `forward`, and statistics of those that count.

    The state of the `rows` is computed again. None if a score or an output is not finite, a weight negative, or a mass
    not that of a union of bands and ranges of keys.
    """
    if call.normalizer.form == "identity" and not is_finite(call):
        return None
    b, h, n_queries, _ = call.q.shape
    arguments, n_keys, prefix_keys, queries = prepared(call), call.k.shape[2], request.prefix_keys, request.queries
    spans = dict[str, Tensor]()
    for name, mask in request.mass.items():
        spans_of_mask = ranges_of(mask, call.grid)
        if spans_of_mask is None:
            return None
        spans[name] = spans_of_mask
    if spans:
        batches = max(x.shape[2] for x in spans.values())
        ranges = torch.cat([x.expand(-1, -1, batches, -1) for x in spans.values()])
        arguments.with_tensors(ranges=ranges, n_ranges=len(ranges), range_batch=0 if batches == 1 else n_queries)
    if prefix_keys is not None:
        prefix = empty(2, b, h, prefix_keys)
        arguments.with_tensors(prefix=prefix, n_prefix=prefix_keys)
    if request.bins is not None:
        bins = bin_size(n_queries, request.bins), bin_size(n_keys, request.bins)
        maps = 1 if bins == (1, 1) else 2  # the largest and the mean weight of a pair are its weight
        pooled = empty(maps, b, h, -(-n_queries // bins[0]), -(-n_keys // bins[1]))
        arguments.with_tensors(map=pooled, bin_q=bins[0], bin_k=bins[1])
    if request.value_norms is not None:
        norms = request.value_norms.contiguous()
        arguments.with_tensors(norms=norms, ns=norms.stride()[:2])
    if queries is not None:
        arguments.with_tensors(counted=queries.contiguous())
    extremes = dict[str, Tensor]()
    if request.extremes:
        extremes["min_logit"] = empty(b, h, n_queries)
        extremes["argmax"] = torch.empty(b, h, n_queries, dtype=torch.long, device=CPU)
        arguments.with_tensors(**extremes)
    measurement = measured(arguments, output=output, firsts=request.firsts)
    if measurement is None:
        return None
    out, statistics = measurement
    more, lse = dict[str, Any](), statistics.lse
    assert lse is not None
    if call.normalizer.has_lse and not call.user.normalizer.has_lse:
        more["max_logit"] = None  # the scores are logarithms of pointwise weights
    else:
        more |= extremes
    if request.value_norms is not None:
        more["first_contribution"] = statistics._view("first_contribution")
    if spans:
        sums = (statistics._view(i) for i in range(len(ranges)))
        more["mass"] = {name: functools.reduce(torch.add, itertools.islice(sums, len(x))) for name, x in spans.items()}
    counted = lse if queries is None else lse.masked_fill(~queries[:, None], -torch.inf)
    more["lse"] = counted if call.user.normalizer.has_lse else None
    if call.sink is not None:
        sink, none = call.sink.to(lse.dtype).expand(b, h, n_queries), counted == -torch.inf
        of_sink = sink_weight(call.normalizer, sink, counted.masked_fill(none, 0))
        more["sink_mass"] = of_sink.masked_fill_(none | (sink == -torch.inf), 0)
    if prefix_keys is not None:
        more["prefix_sink_scores"] = prefix[0] / prefix[1].clamp(min=1)
    if request.bins is not None:
        more["thumbnail"] = Thumbnail(pooled[0], pooled[-1], *bins)
    vars(statistics).update(more)
    return None if out is None else out.to(call.v.dtype), lse, statistics


def measured(
    prepared_call: Prepared, *, output: bool, firsts: Sequence[int] = ()
) -> tuple[Tensor | None, Statistics] | None:
    """Compute the output if it is wanted, and statistics; None if a score or an output is not finite."""
    c, like = prepared_call.arguments, prepared_call.held[0]
    size, places, at = _places(c.b, c.h, prepared_call.heads, c.nq, c.nk, c.n_ranges)
    numbers = like.new_empty(size) if like.dtype is torch.float32 else empty(size)
    out = prepared_call.output() if output else None
    c.rows = start = numbers.data_ptr()
    c.lse, c.received, c.visible, c.visible_queries = start + at[0], start + at[1], start + at[2], start + at[3]
    c.visible_heads = prepared_call.heads
    if any(firsts):
        prepared_call.with_tensors(firsts=torch.tensor(firsts, device=CPU))
    return (out, Statistics._of(numbers, places)) if run(prepared_call.function, c) else None


@functools.lru_cache(maxsize=64)
def _places(
    b: int, h: int, heads: int, n_queries: int, n_keys: int, n_ranges: int
) -> tuple[int, dict[str | int, Place], tuple[int, ...]]:
    """Return how many numbers the library writes, the place of each field of `Statistics` in them, and where, in bytes,
    those begin that have pointers of their own."""
    size, places = 0, dict[str | int, Place]()
    for name in (*OF_QUERIES, *range(n_ranges), *POINTED):
        n = n_keys if name in ("received", "visible_queries") else n_queries
        own = heads if name in ("visible", "visible_queries") else h
        places[name] = (b, h, n), (own * n, n if own == h else 0, 1), size
        size += b * own * n
    return size, places, tuple(4 * places[name][2] for name in POINTED)


def thumbnail(weights: Float[Tensor, "b h nq nk"], bins: int) -> Thumbnail:
    """Return all weights of a call pooled as by `Thumbnail.of_weights`, by the library if it can."""
    b, h, n_queries, n_keys = weights.shape
    size = bin_size(n_queries, bins), bin_size(n_keys, bins)
    if size == (1, 1) or not library.reduces(weights):
        return Thumbnail.of_weights(weights, bins)
    most, mean = (empty(b, h, -(-n_queries // size[0]), -(-n_keys // size[1])) for _ in range(2))
    library.reduce("pool", library.Pool(
        weights.data_ptr(), b * h, n_queries, n_keys, *size, most.data_ptr(), mean.data_ptr(),
        library.threads(weights.numel()),
    ))  # fmt: skip
    return Thumbnail(most, mean, *size)
