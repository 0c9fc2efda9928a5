"""Softmax attention and all statistics of its weights on CPU in one pass, by the compiled library of `attention.c`.

The package's build compiles it (hatch_build.py). Without a compiler, `unsupported_reason` says so, and the tiles of
tensor operations serve every call. Every argument is checked here before the library gets a pointer.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv._engine.call import Call
from qkv._engine.tiles import kept
from qkv._engine.transforms import transformed
from qkv.masks import Grid, Mask
from qkv.masks.base import band_counts

LIBRARY = Path(__file__).with_name("attention.so")
OF_QUERIES = (
    "entropy", "effective_keys", "distance", "spread", "sink", "self_", "previous", "next_", "row_sum",
    "first_contribution",
)  # fmt: skip
"""The first numbers of each query that the library writes; the masses of ranges follow."""
LARGEST_HEAD = 256
LARGEST_SCORE = 1e28  # a masked pair has a score of −1e30

P, I64 = ctypes.c_void_p, ctypes.c_int64


class _Arguments(ctypes.Structure):
    """`Call` of attention.c."""

    _fields_ = (
        *((name, P) for name in ("q", "k", "v")), *((name, I64) for name in ("b", "h", "hkv", "nq", "nk", "d", "dv")),
        *((name, I64 * 3) for name in ("qs", "ks", "vs")), ("scale", ctypes.c_float), ("threads", ctypes.c_int32),
        ("low", I64), ("high", I64), ("keep", P), ("counted", P), ("firsts", P), ("sinks", P), ("ss", I64 * 3),
        ("norms", P), ("ns", I64 * 2), ("ranges", P), ("n_ranges", I64), ("range_batch", I64),
        *((name, P) for name in ("out", "lse", "rows", "received", "prefix", "map")),
        *((name, I64) for name in ("n_prefix", "bin_q", "bin_k")),
    )  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL | str:
    """The compiled library, or in one sentence why there is none."""
    if not LIBRARY.exists():
        return "the native library was not compiled when qkv was installed: there was no C compiler"
    try:
        found = ctypes.CDLL(str(LIBRARY))  # torch, imported above, brings the OpenMP runtime that it uses
        found.qkv_attend.argtypes, found.qkv_attend.restype = [ctypes.POINTER(_Arguments)], ctypes.c_int
    except (OSError, AttributeError) as error:
        return f"the native library {LIBRARY.name} cannot be loaded: {error}"
    return found


def unsupported_reason(call: Call, mass: Mapping[str, Mask], statistics: Sequence[object]) -> str | None:
    """Why the library cannot compute a call with its statistics and masses, or None if it can."""
    if call.q.device.type != "cpu":
        return f"tensors are on {call.q.device.type}; the native library is for CPU"
    if isinstance(found := library(), str):
        return found
    if statistics:
        return f"{', '.join(type(s).__name__ for s in statistics)} is computed from tiles of weights"
    if not call.normalizer.has_lse:
        return f"the weights are a softmax, not {type(call.given.normalizer).__name__}"
    if call.pairwise is not None:
        return f"the score {type(call.pairwise).__name__} is not a product of query and key"
    if call.biases or call.values is not None or call.dropout_p or call.shift is not None:
        return "biases, values that depend on the distance, dropout and shifts are not a part of the native library"
    if call.q.shape[2] == 1:
        return "one query: it packs the keys first, which takes longer than the attention itself"
    if transformed(call) or torch._C._len_torch_dispatch_stack() > 0:
        return "it computes no derivatives, and needs tensors in memory"
    if not call.q.dtype == call.k.dtype == call.v.dtype == torch.float32:
        return f"q, k and v are {call.q.dtype}, {call.k.dtype} and {call.v.dtype}, not float32"
    if max(call.q.shape[3], call.v.shape[3]) > LARGEST_HEAD:
        return f"the head dimension is {max(call.q.shape[3], call.v.shape[3])}, more than {LARGEST_HEAD}"
    if _visible(call.mask, call.grid) is None:
        return f"the mask {type(call.mask).__name__} is not a band of the diagonal and masked keys"
    for name, mask in mass.items():
        if _ranges(mask, call.grid) is None:
            return f"mass[{name!r}] is not a union of a band and the first keys"
    largest = [float(x.detach().abs().amax()) for x in (call.q, call.k)]
    if not (abs(call.scale) * call.q.shape[3] * math.prod(largest) < LARGEST_SCORE and math.isfinite(call.v.sum())):
        return "q, k or v hold NaN, infinity or numbers so large that scores overflow"
    if call.sink is not None and not bool((call.sink < LARGEST_SCORE).all()):
        return "a sink logit is NaN or infinite"
    return None


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
) -> tuple[Float[Tensor, "b h nq dv"] | None, Float[Tensor, "b h nq"], dict[str, Any]]:
    """The output if it is wanted, the log-sum-exp of all queries, and the statistics of those that count.

    The statistics are the fields of `qkv.statistics.Statistics`; the thumbnail is a tensor of the largest and of the
    mean weights, (2, b, h, query bins, key bins), and `bins` is the size of a bin.
    """
    found = library()
    assert isinstance(found, ctypes.CDLL)
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
    (b, h, n_queries, d), (_, key_heads, n_keys, dv), grid = q.shape, v.shape, call.grid
    visible = _visible(call.mask, grid)
    assert visible is not None
    (low, high), keep = visible
    spans = {name: _ranges(mask, grid) for name, mask in mass.items()}
    spans_of = {name: x for name, x in spans.items() if x is not None}
    ranges = None
    if spans_of:
        batches = max(x.shape[2] for x in spans_of.values())
        ranges = torch.cat([x.expand(-1, -1, batches, -1) for x in spans_of.values()])
    out = torch.empty(b, h, n_queries, dv) if output else None
    lse, received = torch.empty(b, h, n_queries), torch.empty(b, h, n_keys)
    rows = torch.empty(len(OF_QUERIES) + (0 if ranges is None else len(ranges)), b, h, n_queries)
    prefix = None if prefix_keys is None else torch.empty(2, b, h, prefix_keys)
    pooled = None
    if bins is not None:
        pooled = torch.empty(2, b, h, -(-n_queries // bins[0]), -(-n_keys // bins[1]))
    sink = None if call.sink is None else call.sink.to(lse.dtype).expand(b, h, n_queries)
    norms = None if value_norms is None else value_norms.contiguous()
    keep = None if keep is None else keep.expand(b, n_keys).contiguous()
    counted = None if queries is None else queries.contiguous()
    first = torch.tensor(firsts)

    def at(x: Tensor | None) -> int | None:
        return None if x is None else x.data_ptr()

    failed = found.qkv_attend(
        _Arguments(
            at(q), at(k), at(v), b, h, key_heads, n_queries, n_keys, d, dv, q.stride()[:3], k.stride()[:3],
            v.stride()[:3], call.scale, torch.get_num_threads(), low, high, at(keep), at(counted), at(first), at(sink),
            (0, 0, 0) if sink is None else sink.stride(), at(norms), (0, 0) if norms is None else norms.stride()[:2],
            at(ranges), 0 if ranges is None else len(ranges),
            0 if ranges is None or ranges.shape[2] == 1 else n_queries, at(out), at(lse), at(rows), at(received),
            at(prefix), at(pooled), prefix_keys or 0, *(bins or (1, 1)),
        )
    )  # fmt: skip
    if failed:
        raise MemoryError(f"attention of {n_queries} queries and {n_keys} keys needs more memory than there is")
    values: dict[str, Any] = dict(zip(OF_QUERIES, rows, strict=False))
    if norms is None:
        del values["first_contribution"]
    else:
        values["first_contribution"] = _share_of_first(values, norms, first)
    sums = iter(rows[len(OF_QUERIES) :])
    masses = {name: functools.reduce(torch.add, itertools.islice(sums, len(span))) for name, span in spans_of.items()}
    of_queries, of_keys = _counts((low, high), keep, counted, grid)
    shown = lse if counted is None else lse.masked_fill(~counted[:, None], -torch.inf)
    sink_mass = None
    if sink is not None:
        sink_mass = torch.exp(sink - shown).masked_fill_((shown == -torch.inf) | (sink == -torch.inf), 0)
    return (
        out,
        lse,
        values
        | {
            "lse": shown,
            "received": received,
            "visible": of_queries.float().expand(b, h, n_queries),
            "visible_queries": of_keys.float().expand(b, h, n_keys),
            "prefix_sink_scores": None if prefix is None else prefix[0] / prefix[1].clamp(min=1),
            "thumbnail": pooled,
            "sink_mass": sink_mass,
            "mass": masses,
        },
    )


def _share_of_first(values: Mapping[str, Tensor], norms: Tensor, firsts: Tensor) -> Tensor:
    """The first key's part of Σ_j A_ij ‖v_j‖."""
    whole = values["first_contribution"]
    first = values["sink"] * norms.gather(2, firsts[:, None, None].expand(*norms.shape[:2], 1))
    return (first / torch.where(whole > 0, whole, 1.0)).clamp(max=1).masked_fill(whole == 0, 0)  # rounding


def _visible(mask: Mask | None, grid: Grid) -> tuple[tuple[int, int], Tensor | None] | None:
    """A mask as a band of distances and the visible keys (1 or b, nk); None if it has another form."""
    low, high, keys = -math.inf, math.inf, None
    for factor in () if mask is None else mask.factors():
        of_keys = factor.key_mask(grid)
        if factor.band is not None:
            low, high = max(low, factor.band[0]), min(high, factor.band[1])
        elif of_keys is not None:
            keys = of_keys if keys is None else keys & of_keys
        else:
            return None
    far = grid.n_queries + grid.n_keys
    low, high = math.ceil(min(max(low, -far), far)), math.floor(min(max(high, -far), far))
    return (
        low,
        max(high, low - 1),
    ), keys  # the library allocates memory by the width, which is 0 if nothing is visible


def _ranges(mask: Mask, grid: Grid) -> Tensor | None:
    """The keys of each query inside a mask as ranges that do not overlap (ranges, 2, 1 or b, nq); else None."""

    def ranges() -> Tensor | None:
        found: list[tuple[Tensor, Tensor]] = []
        for part in mask.alternatives():
            keys = part.key_mask(grid)
            if part.band is not None:
                (low, high), _ = _visible(part, grid)  # type: ignore[misc]
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


def _counts(band: tuple[int, int], keep: Tensor | None, counted: Tensor | None, grid: Grid) -> tuple[Tensor, Tensor]:
    """The number of visible keys of each query (1 or b, 1, nq) and of visible queries of each key (1 or b, 1, nk)."""
    of_queries, of_keys = band_counts(band, grid)
    if keep is None and counted is None:
        return of_queries, of_keys
    low, high = band
    position = grid.rows(0, grid.n_queries)
    start, end = (position - high).clamp(0, grid.n_keys), (position - low + 1).clamp(0, grid.n_keys)
    end = torch.maximum(start, end)
    if keep is not None:
        before = torch.nn.functional.pad(keep.cumsum(1), (1, 0))
        of_queries = (before[:, end] - before[:, start])[:, None]
    if counted is not None:
        of_queries = of_queries * counted[:, None]
        steps = torch.zeros(len(counted), grid.n_keys + 1, dtype=torch.long)
        ones = counted.long()
        steps.scatter_add_(1, start.expand_as(ones), ones).scatter_add_(1, end.expand_as(ones), -ones)
        of_keys = steps.cumsum(1)[:, None, :-1]
    return of_queries, of_keys if keep is None else of_keys * keep[:, None]
