"""Exact statistics of one attention call, in memory linear in the sequence.

One pass of a kernel gives the log-sum-exp of every query. One sweep over the tiles of scores then has each tile of
*final* weights in hand, exp(score − lse), and every statistic is a reduction of it; the tile is all that is ever in
memory. (The identities that give some of the statistics by other means are tests: see tests/test_measure.py.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv._deprecated import warn
from qkv._engine.call import Call, as_biases, as_mask, detached
from qkv._engine.inputs import Form, autocast_dtype, refuse_unknown
from qkv._engine.row_state import RowState
from qkv.biases import Bias
from qkv.errors import InputError
from qkv.kernels import KERNELS, pick, ring, serve_shared, tiled, watching
from qkv.masks import Mask
from qkv.normalizers import Normalizer, Pointwise, SumToOne
from qkv.ring import Shared
from qkv.scores import Score
from qkv.statistics.base import Statistic, validated
from qkv.statistics.gradients import with_gradients
from qkv.statistics.reduce import Request, add_statistics
from qkv.statistics.sums import Statistics, Sums

ARGUMENTS = (
    "mask", "bias", "score", "normalizer", "mass", "first", "queries", "prefix_keys", "bins", "statistics",
    "differentiable", "group",
)  # fmt: skip


def measure(
    q: Any,
    k: Any,
    v: Any = None,
    *,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    bias: Bias | Sequence[Bias] | None = None,
    score: Score | None = None,
    normalizer: Normalizer | None = None,
    mass: Mapping[str, Mask] | None = None,
    first: int | Int[Tensor, " b"] = 0,
    queries: Bool[Tensor, "b nq"] | None = None,
    prefix_keys: int | None = None,
    bins: int | None = None,
    statistics: Sequence[Statistic] = (),
    differentiable: bool = False,
    group: dist.ProcessGroup | None = None,
    **unknown: object,
) -> Statistics:
    """Exact statistics of where `qkv.attend` with the same arguments attends. Linear memory; gradients if asked for.

    Args:
        q: queries, (b, h, nq, dq), (b, nq, dq) or (nq, dq), tensors or arrays as in `attend`; entropy and the like are
            for each of them, and come without the dimensions that q came without.
        k: keys, (b, hkv, nk, dk); ``h`` must be a multiple of ``hkv`` (grouped heads are contiguous).
        v: not needed: no statistic depends on values.
        mask: True where a query may attend.
        bias: as in `attend`.
        score: as in `attend`.
        normalizer: as in `attend`.
        mass: named masks; the weight of every query inside each is returned under its name. Pairs outside `mask` have
            weight 0. For chosen tokens use ``Dense(chosen[None, :])``.
        first: which key counts as the first of the text in `sink`; one for each batch item if padding is on the left.
        queries: True where a query counts; others (padding) give zeros and add nothing to `received`.
        prefix_keys: for how many of the first keys of the text `prefix_sink_scores` is wanted; none if None.
        bins: at most so many bins a side has the `thumbnail`; the least power of two keys, or queries, that does it
            makes a bin. None: no thumbnail.
        statistics: more of them, your own for example: see `qkv.statistics.Statistic`. They come under `own`.
        differentiable: whether `entropy`, `effective_keys`, `distance`, `sink`, `self_`, `previous`, `next_`,
            `sink_mass`, `lse`, `received` and every `mass` carry gradients to q, k and all learned tensors of the
            composition, in linear memory. Others are detached. First derivatives only; no `prefix_keys`, `bins`,
            `statistics` or `group`, no arrays, and no `Hard`.
        group: processes that share the sequence, as in `attend`: q, k and `queries` are this one's shard, and so is
            what is returned; `mask`, `bias`, `mass` and `first` are of the whole. `prefix_sink_scores` is of the whole
            on every process. No `bins`, no `statistics`.
        **unknown: refused, as in `attend`.

    Returns:
        `Statistics`, float32 (float64 for float64 inputs), on the device of the inputs.

    Raises:
        InputError: for arguments that do not fit together.

    >>> import torch, qkv
    >>> q = k = torch.zeros(1, 1, 4, 8)
    >>> s = qkv.measure(q, k, mask=qkv.masks.Causal(), mass={"last two": qkv.masks.Window(2)})
    >>> [round(x, 4) for x in s.received[0, 0].tolist()]
    [2.0833, 1.0833, 0.5833, 0.25]
    >>> [round(x, 4) for x in s.mass["last two"][0, 0].tolist()]
    [1.0, 1.0, 0.6667, 0.5]

    A penalty on the weight that queries give the first key, for training:

    >>> q = torch.zeros(1, 1, 4, 8, requires_grad=True)
    >>> qkv.measure(q, k, mask=qkv.masks.Causal(), differentiable=True).sink.sum().backward()
    >>> q.grad.shape
    torch.Size([1, 1, 4, 8])
    """
    if "early" in unknown:
        warn("measure(early=…)", "prefix_keys")
        prefix_keys = cast("int | None", unknown.pop("early"))
    if unknown:
        refuse_unknown("measure", unknown, ARGUMENTS)
    asked: dict[str, Any] = {"mass": mass, "first": first, "queries": queries}
    more: dict[str, Any] = {"prefix_keys": prefix_keys, "bins": bins, "statistics": statistics}
    if differentiable:
        for name, given in (
            ("prefix_keys", prefix_keys),
            ("bins", bins),
            ("statistics", statistics or None),
            ("group", group),
        ):
            if given is not None:
                raise InputError(f"differentiable=True with {name}, which has no gradients; expected no {name}")
    with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
        if group is not None:
            # No statistic depends on values: one column of the keys stands for them, which costs little to pass on.
            shared = Shared.of(group, q, k, k[..., :1], as_mask(mask), as_biases(bias), score, normalizer)
            with watching(None):
                level = serve_shared(shared).lse
            return sweep(shared.call, RowState(level), shared=shared, **more, **asked)
        form, (q, k, v) = Form.of(q, k, k if v is None else v)
        if differentiable and form.array:
            raise InputError("differentiable=True with NumPy arrays, which carry no gradients; expected tensors")
        dtype = autocast_dtype(q)
        if dtype is not None:
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        with torch.autocast(q.device.type, enabled=False) if dtype is not None else nullcontext():
            if differentiable and queries is not None and isinstance(q, Tensor) and q.ndim == 4:
                _check_queries(queries, q)
                q = q.masked_fill(~queries[:, None, :, None], 0)  # else NaN of padding reaches what q is made of
            call = Call.of(q, k, v, as_mask(mask), as_biases(bias), score, normalizer)
            if differentiable:
                return form.all_back(with_gradients(call, _measured, **asked))
            return form.all_back(sweep(call, row_state(call), **more, **asked))


def _measured(call: Call, **asked: Any) -> tuple[RowState, Statistics]:
    """What the rows of a call know, and its statistics."""
    rows = row_state(call)
    return rows, sweep(call, rows, **asked)


def _check_queries(queries: Bool[Tensor, "b nq"], q: Float[Tensor, "b h nq d"]) -> None:
    shape = (len(q), q.shape[2])
    if queries.dtype != torch.bool or queries.shape != shape:
        raise InputError(f"queries is {queries.dtype} of shape {tuple(queries.shape)}, expected bool of shape {shape}")


def row_state(call: Call, lse: Float[Tensor, "b h nq"] | None = None) -> RowState:
    """What the rows of `call` have to know for `sweep`; `lse`, if some kernel has found it already."""
    if isinstance(call.normalizer, Pointwise) and call.normalizer.divide != "sum":
        return RowState()  # each weight stands alone
    if not call.normalizer.has_lse:
        return tiled.row_state(call)
    return RowState(KERNELS[pick(call, "auto")].forward(call).lse if lse is None else lse)


@torch.no_grad()
def sweep(
    call: Call,
    rows: RowState | Float[Tensor, "b h nq"],
    *,
    mass: Mapping[str, Mask] | None = None,
    first: int | Int[Tensor, " b"] = 0,
    queries: Bool[Tensor, "b nq"] | None = None,
    prefix_keys: int | None = None,
    bins: int | None = None,
    statistics: Sequence[Statistic] = (),
    shared: Shared | None = None,
) -> Statistics:
    """The statistics of `measure` when the log-sum-exp of the call, or what stands for it, is already known.

    `shared`, if `call` is this process's part of a call that many make together.
    """
    call, mass = detached(call), dict(mass or {})
    grid = call.grid if shared is None else shared.grid
    rows = rows if isinstance(rows, RowState) else RowState(rows)
    b = len(call.q)
    for name, part in mass.items():
        if not isinstance(part, Mask):
            raise InputError(f"mass[{name!r}] is {type(part).__name__}, expected a mask from qkv.masks")
        part.check(grid)
    if queries is not None:
        _check_queries(queries, call.q)
        if queries.all():
            queries = None
    if queries is not None:
        if isinstance(call.normalizer, SumToOne):
            assert rows.level is not None
            rows = replace(rows, level=rows.level.masked_fill(~queries[:, None], -torch.inf))
        call = replace(call, q=call.q.masked_fill(~queries[:, None, :, None], 0))  # padding may hold NaN
    for name, number in (("prefix_keys", prefix_keys), ("bins", bins)):
        if number is not None and number < 1:
            raise InputError(f"{name} is {number}, expected at least 1, or None")
    if bins is not None and shared is not None:
        raise InputError(f"bins is {bins} with a group, expected None: bins of a thumbnail lie across processes")
    statistics = validated(statistics)
    if statistics and shared is not None:
        raise InputError(f"statistics are {', '.join(s.name for s in statistics)} with a group, expected none")
    for statistic in statistics:
        statistic.check(grid)
    sums = Sums(call, mass, prefix_keys, bins, statistics)
    firsts = [first] * b if isinstance(first, int) else first.tolist()
    if len(firsts) != b or not all(0 <= f < grid.n_keys for f in firsts):
        raise InputError(
            f"first is {first}, expected a key from 0 to {grid.n_keys - 1}, or one for each of {b} batch items"
        )
    asked = Request(mass, firsts, prefix_keys or 0, queries, grid.offset)
    if shared is None:
        add_statistics(call, rows, asked, sums)
    else:
        _add_shared(shared, call, rows, asked, sums)
    if queries is not None:
        sums.visible.masked_fill_(~queries[:, None], 0)
    return sums.statistics(call, rows)


def _add_shared(shared: Shared, call: Call, rows: RowState, asked: Request, sums: Sums) -> None:
    """Add what this process's rows give the keys of all, as they pass; what keys receive travels with them."""
    assert rows.level is not None
    carried = ring.RingAccumulator(shared)
    for source, (k,) in ring.blocks(shared, call.k):
        received, visible_queries = torch.zeros_like(sums.received), torch.zeros_like(sums.visible_queries)
        for piece in shared.pieces(source):
            here, first_key = piece.rows, piece.region.columns.start
            add_statistics(
                piece.of(call, k, k),
                RowState(rows.level[:, :, here]),
                Request(
                    {name: piece.see(mask) for name, mask in asked.mass.items()},
                    [first - first_key for first in asked.firsts],
                    asked.prefix_keys,
                    None if asked.queries is None else asked.queries[:, here],
                    piece.ahead,
                ),
                sums.of(here, piece.keys, received, visible_queries),
            )
        carried.add(received, visible_queries)
    sums.received, sums.visible_queries = carried.finish()
    if sums.prefix_sink_scores is not None:
        dist.all_reduce(sums.prefix_sink_scores, group=shared.group)
