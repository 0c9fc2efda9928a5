"""`measure`: exact statistics of the weights in linear memory, also as shares of rows that do not sum to 1.

For a softmax, the native library on CPU (`qkv.native`) computes the output, the log-sum-exp and every statistic in one
pass; on a GPU, a Triton kernel computes every statistic in one pass after the output. Everything else takes two: a
kernel computes the row state, such as the log-sum-exp, of every query; then a sweep over the tiles of scores computes
the final weights and reduces them.
(tests/core/test_measure.py checks identities that give some of the statistics by other means.)

The sum of a row counts every key, and also a sink logit or a learned key, which is a key with value 0: the rows of a
softmax, of softmax off by one and of entmax sum to 1, and their shares are their weights. Rows of sigmoid, ELU + 1 and
ReLU attention have any sum, and are divided by it. A row that sums to 0 gives no key a share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv._contract import with_attributes
from qkv.biases import Bias
from qkv.compat import Form, refuse_unknown
from qkv.engine.call import Call, RowState, as_biases, at_least_float32, detached, dot_softmax
from qkv.engine.level import sink_weight
from qkv.engine.sharded import RingAccumulator, Shared, blocks, positions
from qkv.engine.sizes import on_card
from qkv.errors import InputError
from qkv.kernels import attention, native_call, opaque, tiled
from qkv.kernels import native as native_kernel
from qkv.masks import Grid, Mask
from qkv.native import library
from qkv.normalizers import Normalizer, Pointwise, SumToOne
from qkv.results import Result, Statistics, Thumbnail, share_of_first
from qkv.scores import Score
from qkv.statistics import native
from qkv.statistics.base import FIELDS, Extremes, PrefixSinkScores, Request, Statistic, check_queries, validated
from qkv.statistics.gradients import with_gradients
from qkv.statistics.reduce import StatisticsReducer, own_statistics
from qkv.statistics.triton import host as triton


@opaque
def measure(
    q: Any,
    k: Any,
    *,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    bias: Bias | Sequence[Bias] | None = None,
    score: Score | None = None,
    normalizer: Normalizer | None = None,
    mass: Mapping[str, Mask] | None = None,
    first: int | Int[Tensor, " b"] = 0,
    queries: Bool[Tensor, "b nq"] | None = None,
    bins: int | None = None,
    statistics: Sequence[Statistic | Extremes] = (),
    differentiable: bool = False,
    **unknown: object,
) -> Statistics:
    """Return exact statistics of the attention weights of `qkv.attend` with the same arguments, in linear memory.

    Args:
        q: queries, (b, h, nq, dq), (b, nq, dq) or (nq, dq), tensors or arrays as in `attend`. The results lack the same
            dimensions as q.
        k: keys, (b, hkv, nk, dk); ``h`` must be a multiple of ``hkv`` (grouped heads are contiguous).
        mask: True where a query may attend.
        bias: as in `attend`.
        score: as in `attend`.
        normalizer: as in `attend`.
        mass: masks by name; the sum of every query's weights inside each is returned under its name. Pairs outside
            `mask` have weight 0. For single tokens use ``Dense(chosen[None, :])``.
        first: the first key of the text, for `sink`; one for each batch item if padding is on the left.
        queries: True where a query counts; the rest (padding) give zeros and add nothing to `received`.
        bins: largest number of bins on each side of the `thumbnail`; a bin holds the smallest sufficient power of two
            of keys or queries. None: no thumbnail.
        statistics: further statistics, such as your own (see `qkv.statistics.Statistic`), returned as `own`; and
            `PrefixSinkScores(length)`, returned as `prefix_sink_scores`, and `Extremes()`, as `min_logit` and `argmax`.
        differentiable: whether `entropy`, `effective_keys`, `distance`, `sink`, `self_`, `previous`, `next_`,
            `sink_mass`, `lse`, `max_logit`, `received` and every `mass` carry gradients to q, k and all learned tensors
            of the composition, in linear memory. The other fields are detached. First derivatives only; cannot be
            combined with `bins`, `statistics`, NumPy arrays or `Hard`.
        **unknown: rejected, as in `attend`.

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
    if unknown:
        refuse_unknown(measure, unknown)
    if not (differentiable or mass or statistics or (type(first), first) != (int, 0)) and (
        queries is None and bins is None
    ):
        measurement = directly(q, k, k, mask, bias, score, normalizer, output=False)
        if measurement is not None:
            return measurement[1]
    options: dict[str, Any] = {"mass": mass, "first": first, "queries": queries}
    detached_options: dict[str, Any] = {"bins": bins, "statistics": statistics}
    if differentiable:
        for name, value in (detached_options | {"statistics": statistics or None}).items():
            if value is not None:
                raise InputError(f"differentiable=True with {name}, which has no gradients; expected no {name}")
    with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
        form, (q, k), without_autocast = Form.of(q, k)
        if differentiable and form.array:
            raise InputError("differentiable=True with NumPy arrays, which carry no gradients; expected tensors")
        with without_autocast:
            if differentiable and queries is not None and isinstance(q, Tensor) and q.ndim == 4:
                check_queries(queries, q)
                q = q.masked_fill(~queries[:, None, :, None], 0)  # NaN in padding must not reach gradients
            tables = [one.value_table for one in as_biases(bias) if one.value_table is not None]
            v = k[..., :1].expand(*k.shape[:-1], tables[0].shape[-1]) if tables else k  # no statistic depends on values
            call = Call.of(q, k, v, mask, bias, score, normalizer)
            if differentiable:
                return form.all_back(with_gradients(call, measured, **options)[1])
            return form.all_back(measured(call, **detached_options, **options)[-1])


def directly(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Bias | Sequence[Bias] | None,
    score: Score | None, normalizer: Normalizer | None, *, output: bool = True,
) -> tuple[Tensor | None, Statistics] | None:  # fmt: skip
    """Compute statistics, and the output if wanted, without a `Call`; None if the call needs one, or gradients."""
    if not isinstance(q, Tensor) or (plain := dot_softmax(score, normalizer, q, bias)) is None or plain[1] is not None:
        return None
    arguments = native_kernel.directly(q, k, v, mask, bias, plain[0], no_grad=not output)
    if arguments is None or arguments.grad:
        return None
    measurement = native.measured(arguments, output=output)
    if measurement is None or measurement[0] is None or v.dtype == torch.float32:
        return measurement
    return measurement[0].to(v.dtype), measurement[1]


def row_state(call: Call, lse: Float[Tensor, "b h nq"] | None = None) -> RowState:
    """Return the per-query log-sum-exp (or threshold) that `sweep` needs; `lse` if a kernel has computed it already."""
    if isinstance(call.normalizer, Pointwise) and call.normalizer.divide != "sum":
        return RowState()  # each weight depends on its own score only
    if not call.normalizer.has_lse:
        by_library = native_call.unsupported_reason(call) is None
        rows = native_kernel.row_state(detached(call)) if by_library else None
        return tiled.row_state(call) if rows is None else rows
    return RowState(attention(call).lse if lse is None else lse)


@torch.no_grad()
def measured(
    call: Call, rows: RowState | None = None, *, output: bool = False, shared: Shared | None = None, **options: Any
) -> tuple[Result[Tensor] | None, RowState, Statistics]:
    """Return the result of a call, if the `output` is wanted, its row state and statistics; in one pass if possible.

    `rows` is the row state, if it is known; one pass computes it again. `shared` is the whole call, if `call` is this
    process's shard of one that a group makes together. `options` are `mass`, `first`, `queries`, `bins` and
    `statistics` of `measure`, and `value_norms` (b, h, nk), the norm of each value, for `first_contribution`.
    """
    call = detached(call)
    request = checked(call, call.grid if shared is None else shared.grid, shared=shared, **options)
    if on_card(call.q):
        refused, one_pass = triton.unsupported_reason(call), triton.attend_and_measure
    else:
        refused, one_pass = native_call.unsupported_reason(call), native.attend_and_measure
    results = one_pass(call, request, output=output, rows=rows) if shared is None and refused is None else None
    if results is not None:
        out, numbers, statistics = results
        rows = native_call.row_state(call, numbers)
        if request.statistics:
            own = own_statistics(call, _counted(call, rows, request), request, statistics.row_sum)
            statistics = replace(statistics, own=own)
        lse = rows.level if call.normalizer.has_lse else None
        return None if out is None else Result(out, lse), rows, statistics
    result = attention(call) if output else None
    if rows is None:
        rows = row_state(call, None if result is None else result.lse)
    counted = _counted(call, rows, request)
    if request.queries is not None:
        call = replace(call, q=call.q.masked_fill(~request.queries[:, None, :, None], 0))  # padding may hold NaN
    reducer = StatisticsReducer(call, counted, request, grid=None if shared is None else shared.grid)
    if shared is None:
        reducer.add_tiles(call)
    else:
        _add_shared(shared, call, reducer)
    return result, rows, finished(call, reducer, shared)


def sweep(call: Call, rows: RowState, **options: Any) -> Statistics:
    """Return the statistics of `measured`, given the normalizer state of each row (log-sum-exp or threshold)."""
    return measured(call, rows, **options)[-1]


def engine(call: Call) -> str:
    """Return what computes the statistics of a call, in one sentence."""
    call = replace(detached(call), dropout_p=0.0)
    if on_card(call.q):
        why = triton.unsupported_reason(call)
        return f"tiles of tensor operations: {why}" if why else "Triton, in one pass after the output"
    why = None if isinstance(library.compiled(), str) else native_call.unsupported_reason(call)
    return f"tiles of tensor operations: {why}" if why else library.description()


def _counted(call: Call, rows: RowState, request: Request) -> RowState:
    """Return the normalizer state without the rows that do not count."""
    if request.queries is None or rows.level is None or not isinstance(call.normalizer, SumToOne):
        return rows
    return replace(rows, level=rows.level.masked_fill(~request.queries[:, None], -torch.inf))


def finished(call: Call, reducer: StatisticsReducer, shared: Shared | None = None) -> Statistics:
    """Return the statistics from the totals of all tiles; its `rows` are without the queries that do not count."""
    rows, request, totals = reducer.rows, reducer.request, reducer.totals
    values = reducer.finished(totals["row_sum"], at_least_float32(call.q.dtype))
    thumbnail = prefix = contribution = sink_mass = None
    if (pooled := reducer.pooled) is not None:
        thumbnail = Thumbnail.of(pooled[0], pooled[1], call.q.shape[2], call.k.shape[2], *reducer.bins)
    if request.prefix_keys is not None:
        total, count = _of_prefix(totals["prefix_sink_scores"], request.prefix_keys, request.firsts, shared)
        prefix = (total / count.clamp(min=1)).to(values["sink"].dtype)
    if (norms := request.value_norms) is not None:
        contribution = share_of_first(values["sink"], values["value_norms"], norms, request.firsts)
    if call.sink is not None:  # 0 in rows that do not count
        assert rows.level is not None
        out = rows.level == -torch.inf
        sink_mass = sink_weight(call.normalizer, call.sink, rows.level.masked_fill(out, 0))
        sink_mass = sink_mass.masked_fill(out | (call.sink == -torch.inf), 0)
    extremes: dict[str, Any] = {"max_logit": None}
    of_logarithms = call.normalizer.has_lse and not call.user.normalizer.has_lse  # of pointwise weights, not scores
    if reducer.extremes is not None and not of_logarithms:
        scores = reducer.extremes
        extremes = {"max_logit": scores.largest, "min_logit": scores.smallest, "argmax": scores.key}
        for x, nothing in ((scores.largest, -torch.inf), (scores.smallest, torch.inf), (scores.key, -1)):
            if x is not None and request.queries is not None:
                x.masked_fill_(~request.queries[:, None], nothing)
    return Statistics(
        lse=rows.level if call.user.normalizer.has_lse else None,
        **extremes,
        **{name: values[name] for name in FIELDS},
        prefix_sink_scores=prefix,
        thumbnail=thumbnail,
        sink_mass=sink_mass,
        mass={name: values[f"mass {name}"] for name in request.mass},
        own={s.name: values[f"own {s.name}"] for s in request.statistics},
        first_contribution=contribution,
    )


def _of_prefix(x: Tensor, length: int, firsts: Sequence[int], shared: Shared | None) -> Tensor:
    """Return numbers of all keys (2, b, h, nk) for the first `length` keys of each text, of whichever process."""
    n, device = x.shape[3], x.device
    keys = torch.arange(n, device=device) if shared is None else positions(shared.grid.n_keys, shared.group, device)
    at = keys - torch.tensor(firsts, device=device)[:, None]
    at = torch.where((at >= 0) & (at < length), at, length)
    numbers = x.new_zeros(*x.shape[:3], length + 1).scatter_add_(3, at[:, None].expand_as(x), x)[..., :length]
    if shared is not None:
        numbers = numbers.contiguous()
        dist.all_reduce(numbers, group=shared.group)
    return numbers


def checked(
    call: Call, grid: Grid, *, mass: Mapping[str, Mask] | None = None, first: int | Int[Tensor, " b"] = 0,
    queries: Bool[Tensor, "b nq"] | None = None, bins: int | None = None,
    statistics: Sequence[Statistic | Extremes] = (), value_norms: Float[Tensor, "b h nk"] | None = None,
    shared: Shared | None = None,
) -> Request:  # fmt: skip
    """Return the options of `measure`, checked."""
    mass = dict(mass) if mass else {}
    b = len(call.q)
    for name, part in mass.items():
        if not isinstance(part, Mask):
            raise InputError(f"mass[{name!r}] is {type(part).__name__}, expected a mask from qkv.masks")
        part.check(grid)
    if queries is not None:
        check_queries(queries, call.q)
        if not on_card(queries) and queries.all():  # on a card, the answer would be waited for
            queries = None
    if bins is not None and bins < 1:
        raise InputError(f"bins is {bins}, expected at least 1, or None")
    if bins is not None and shared is not None:
        raise InputError(f"bins is {bins} with a group, expected None: a bin of a thumbnail may span processes")
    asked = tuple(statistics) if isinstance(statistics, Iterable) else validated(statistics)  # which refuses one alone
    own = validated(x for x in asked if not isinstance(x, Extremes))
    extremes = any(isinstance(x, Extremes) for x in asked)
    prefix_keys = next((x.length for x in own if isinstance(x, PrefixSinkScores)), None)
    own = tuple(x for x in own if not isinstance(x, PrefixSinkScores))
    if own and shared is not None:
        raise InputError(f"statistics are {', '.join(s.name for s in own)} with a group, expected none")
    for statistic in own:
        statistic.check(grid)
    firsts = [first] * b if isinstance(first, int) else first.tolist()
    if len(firsts) != b or not all(0 <= f < grid.n_keys for f in firsts):
        raise InputError(
            f"first is {first}, expected a key from 0 to {grid.n_keys - 1}, or one for each of {b} batch items"
        )
    return Request(mass, firsts, queries, prefix_keys, bins, own, value_norms, extremes)


def _add_shared(shared: Shared, call: Call, reducer: StatisticsReducer) -> None:
    """Add the statistics of this process's rows over all shards of keys, which travel around the ring.

    The totals of a shard of keys travel with it.
    """
    level, queries = reducer.rows.level, reducer.request.queries
    assert level is not None
    key_totals = RingAccumulator(shared)
    of_keys = {name: x for name, x in reducer.totals.items() if reducer.statistics[name].over == "key"}
    for source, (k,) in blocks(shared, call.k):
        here = {name: torch.zeros_like(x) for name, x in of_keys.items()}
        for piece in shared.pieces(source):
            part = copy(reducer)
            part.rows, part.corner = (
                RowState(level[:, :, piece.rows]),
                (piece.region.rows.start, piece.region.columns.start),
            )
            part.request = replace(reducer.request, queries=None if queries is None else queries[:, piece.rows])
            part.totals = {name: x[..., piece.rows] for name, x in reducer.totals.items()}
            assert reducer.extremes is not None
            part.extremes = reducer.extremes.part(piece.rows, piece.region.columns.start)
            part.totals |= {name: x[..., piece.keys] for name, x in here.items()}
            part.add_tiles(shared.part(call, k, k, piece))
        key_totals.add(*here.values())
    reducer.totals |= dict(zip(of_keys, key_totals.finish(), strict=True))


WEIGHTS = ("sink", "self_", "previous", "next_", "received", "prefix_sink_scores", "mass")
"""The fields of `Statistics` that are weights, or sums or means of weights."""


def sums_to_one(normalizer: Normalizer | None) -> bool:
    """Return whether the weights of a row, with that of a sink logit, sum to 1; None is a softmax.

    >>> from qkv.normalizers import EluPlusOne, Sigmoid, Softmax
    >>> [sums_to_one(x) for x in (Softmax(sink=0.0), EluPlusOne(divide="sum"), EluPlusOne(), Sigmoid())]
    [True, True, False, False]
    """
    return not isinstance(normalizer, Pointwise) or normalizer.divide == "sum"


def in_shares(call: Call, measured: Statistics, **options: Any) -> Statistics:
    """Return the statistics `measured` of a call with shares in place of weights, from a second sweep over the scores.

    `row_sum`, `thumbnail` and `own` stay those of the weights. No sweep is needed if the rows sum to one. The options
    are `mass`, `first`, `queries` and, for `PrefixSinkScores`, `statistics`, as in `qkv.measure`.
    """
    if sums_to_one(call.normalizer):
        return measured
    total = torch.where(measured.row_sum > 0, measured.row_sum, 1.0)
    divided = replace(call, normalizer=with_attributes(call.normalizer, divide="sum"))
    shares = sweep(divided, RowState(total=total), **options)
    return replace(measured, **{name: getattr(shares, name) for name in WEIGHTS})


def rows_in_shares(weights: Float[Tensor, "*b nq nk"], normalizer: Normalizer) -> Float[Tensor, "*b nq nk"]:
    """Return a matrix of weights with the rows of `in_shares`."""
    if sums_to_one(normalizer):
        return weights
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)
