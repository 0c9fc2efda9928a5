"""Runs the Triton kernels: which calls they serve, their arguments, and the `Statistics` from their results."""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from qkv.biases import ByDistance, SoftCap
from qkv.engine.call import Call, RowState
from qkv.engine.sizes import GPUS, INTERPRETED, LARGEST_HEAD, has_triton
from qkv.engine.tiles import cached_for_mask
from qkv.engine.transforms import Need, unmet
from qkv.kernels import fused
from qkv.masks import Dense, Document, Grid, Mask
from qkv.masks.convert import parts
from qkv.normalizers import LOG2_E
from qkv.results import Statistics, Thumbnail, bin_size
from qkv.statistics.base import Request

SMALLEST_DOT = 16  # smallest dimension of Triton's matrix product
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HOPPER = (9, 0)
OLDEST_CARD = (8, 0)  # compute capability, from which Triton has bfloat16 products
UNBOUNDED = 2**30
OF_QUERIES = (
    "entropy",
    "sink",
    "self_",
    "previous",
    "next_",
    "distance",
    "spread",
    "effective_keys",
    "visible",
    "row_sum",
)
"""The first numbers of `found` of `kernels.by_row`; then the weight on the sink logit, the largest score, the
log-sum-exp of the queries that count, and the first key's part of Σ_j A_ij ‖v_j‖."""
SUMS = 6  # of each query, in memory, before those that are not always wanted
STEP_TILES = 32  # tiles whose sums of keys are added up in float32
MOST_KEYS = 2**21  # the sums of the second moments are 64-bit integers


@functools.cache
def _kernels() -> ModuleType:
    from qkv.statistics.triton import kernels

    return kernels


@functools.cache
def _capability(index: int | None) -> tuple[int, int]:
    """Compute capability of a card."""
    return torch.cuda.get_device_capability(index)


MaskParts = tuple[tuple[float, float], Tensor | None, Tensor | None, Tensor | None]


def _mask_parts(mask: Mask | None, grid: Grid) -> MaskParts | None:
    """Return a mask as a band, visible keys, documents of keys (1 or b, nk) and a tensor; None if it is no such.

    A pair must pass them all.
    """
    band, keys, others = parts(mask, grid)
    ids, dense = None, None
    for other in others:
        if type(other) is Document and ids is None:
            ids = torch.as_tensor(other.ids)
        elif type(other) is Dense and dense is None:
            dense = other.tensor
        else:
            return None
    return band, keys, ids, dense


def _union(mask: Mask, grid: Grid) -> tuple[tuple[float, float], Tensor | None] | None:
    """Return a mask as a band and further keys (1 or b, nk); None if it has another form."""
    band, keys = None, None
    for part in mask.alternatives():
        of_keys = part.key_mask(grid)
        if part.band is not None and band is None:
            band = part.band
        elif of_keys is not None:
            keys = of_keys if keys is None else keys | of_keys
        else:
            return None
    return (math.inf, -math.inf) if band is None else band, keys


def _unions(masks: tuple[Mask, ...], grid: Grid) -> tuple[list[tuple[float, float]], Tensor | None] | None:
    """Return the bands of masks and, if any has further keys, those of all (masks, b, nk); None for another form."""

    def unions() -> tuple[list[tuple[float, float]], Tensor | None] | None:
        found = [union for union in (_union(mask, grid) for mask in masks) if union is not None]
        if len(found) < len(masks):
            return None
        bands, keys = [band for band, _ in found], None
        if any(of_mask is not None for _, of_mask in found):
            keys = torch.zeros(len(masks), grid.batch, grid.n_keys, dtype=torch.int8, device=grid.device)
            for row, (_, of_mask) in zip(keys, found, strict=True):
                if of_mask is not None:
                    row.copy_(of_mask)
        return bands, keys

    if not all(mask.cacheable for mask in masks):
        return unions()
    return cached_for_mask(masks[0], grid, ("unions", masks[1:]), unions)


def _bias_forms(call: Call) -> tuple[ByDistance | None, SoftCap | None, bool] | None:
    """Return the bias by distance, the soft cap, and whether the cap comes first; None if there are others."""
    by_form: dict[str | None, Any] = {bias.form: bias for bias in call.biases}
    if len(by_form) < len(call.biases) or not by_form.keys() <= {"distance", "cap"}:
        return None
    return by_form.get("distance"), by_form.get("cap"), next(iter(by_form), None) == "cap"


OFFERS: tuple[Need, ...] = ("biases", "gradients", "tensors in closures")


def unsupported_reason(call: Call) -> str | None:
    """Return why the kernels cannot compute the statistics of this call, or None if they can."""
    device = call.q.device.type
    if device not in GPUS and not (device == "cpu" and INTERPRETED):
        return f"tensors are on {device}; the Triton kernels are for CUDA"
    if not has_triton():
        return "they need Triton, which is not installed"
    if torch.version.hip:
        return "torch is built for AMD cards, on which the Triton kernels have not been tested"
    if device in GPUS and _capability(call.q.device.index) < OLDEST_CARD:
        major, minor = _capability(call.q.device.index)
        return f"the card has compute capability {major}.{minor}; the Triton kernels are for 8.0 (Ampere) and newer"
    if (why := unmet(call, OFFERS)) is not None:
        return why
    if _bias_forms(call) is None:
        names = ", ".join(type(bias).__name__ for bias in call.user.biases)
        return f"bias is {names}; the Triton kernels have at most one bias by distance and one SoftCap"
    if not call.q.dtype == call.k.dtype == call.v.dtype or call.q.dtype not in DTYPES:
        got = ", ".join(f"{name} is {x.dtype}" for name, x in (("q", call.q), ("k", call.k), ("v", call.v)))
        return f"{got}; the kernels take float32, bfloat16 or float16, the same for all three"
    if max(call.q.shape[3], call.v.shape[3]) > LARGEST_HEAD:
        return f"the head dimension is {max(call.q.shape[3], call.v.shape[3])}, more than {LARGEST_HEAD}"
    if call.k.shape[2] > MOST_KEYS:
        return f"there are {call.k.shape[2]:,} keys, more than {MOST_KEYS:,}"
    if _mask_parts(call.mask, call.grid) is None:
        return f"the mask {type(call.mask).__name__} has no form as a band, masked keys, documents or a tensor"
    return None


def attend_and_measure(
    call: Call, request: Request, *, output: bool, rows: RowState | None = None
) -> tuple[Tensor | None, Tensor, Statistics] | None:
    """Return the output if it is wanted, the log-sum-exp of all queries, and the statistics of those that count.

    `rows` is the row state, if it is known. None if a mass is not that of a union of a band and a set of keys.
    """
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
    (b, h, n_queries, d), (_, key_heads, n_keys, dv), device = q.shape, v.shape, q.device
    grid, heads = call.grid, b * h
    mass, queries, prefix_keys, bins = request.mass, request.queries, request.prefix_keys, request.bins
    unions = _unions(tuple(mass.values()), grid) if mass else ([], None)
    if unions is None:
        return None
    mask_parts = _mask_parts(call.mask, grid)
    assert mask_parts is not None
    firsts = _on_device(tuple(request.firsts), device)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    nothing = firsts  # stands for a tensor that a kernel does not read
    sink = None if call.sink is None else call.sink.expand(b, h, n_queries)
    counted = None if queries is None else queries.contiguous().view(torch.int8)
    biased, bias_flags = _bias_arguments(call, nothing)
    place, flags = _mask_arguments(mask_parts, nothing)
    flags |= bias_flags | {
        "HAS_SINK": sink is not None,
        "WIDEN": device.type == "cpu" and q.dtype == torch.bfloat16,
        "CARD": device.type != "cpu",
    }
    of_keys = *q.stride()[:3], *k.stride()[:3]
    sinks, of_sink = (nothing, (0, 0, 0)) if sink is None else (sink, sink.stride())
    shared = (h, h // key_heads, n_queries, n_keys, grid.offset, call.scale, *biased)
    run, out = _kernels(), None
    if not output and sink is None and rows is not None and rows.level is not None:
        key_lse = lse = rows.level.contiguous()
    elif output and fused.unsupported_reason(call) is None:
        out, key_lse, lse = fused.with_key_lse(call)
    else:
        out = empty(b, h, n_queries, dv, dtype=v.dtype) if output else None
        key_lse = empty(b, h, n_queries)
        lse = key_lse if sink is None else empty(b, h, n_queries)
        block = forward_options(max(d, dv), q.dtype)
        run.forward[(_cdiv(n_queries, block["BM"]), heads)](
            q, k, v, key_lse if out is None else out, key_lse, lse, sinks, *of_keys, *v.stride()[:3], *of_sink,
            *shared, d, dv, *place, **flags, **block, OUTPUT=out is not None, D=_power_of_two(d),
            DV=_power_of_two(dv), EVEN_D=d == _power_of_two(d) and dv == _power_of_two(dv),
        )  # fmt: skip

    block = statistics_options(d, q.dtype, _capability(device.index) if device.type in GPUS else HOPPER)
    block |= {"D": _power_of_two(d)}
    pooled_shape: tuple[int, ...] = (0,)
    pools, query_bin, key_bin, step = (1, 1, 1), 1, 1, STEP_TILES * block["BM"]
    if bins is not None:  # a tile pools to bins of at most its size; the keys of larger ones are joined below
        query_bin, key_bin = bin_size(n_queries, bins), bin_size(n_keys, bins)
        pools = (1 + (query_bin > block["BM"]), min(query_bin, block["BM"]), min(key_bin, block["BN"]))
        columns = _cdiv(n_keys, key_bin) * (key_bin // pools[2])
        pooled_shape = (2, b, h, _cdiv(n_queries, query_bin), columns)
        step = min(step, query_bin) if pools[0] == 2 else step
    norms, largest = nothing, nothing
    if request.value_norms is not None:
        norms = request.value_norms.float().contiguous()
        largest = norms.amax()
    band, keys = mask_parts[:2]
    both_sides, few = band[0] < 0 < band[1], flags["HAS_IDS"] or flags["HAS_DENSE"]
    flags |= {"HAS_COUNTED": counted is not None}
    planes = SUMS + (norms is not nothing) + 2 * both_sides + few + request.extremes + len(mass)
    n_pooled, n_sums = math.prod(pooled_shape), heads * _cdiv(n_queries, block["BM"]) * block["BM"] * planes
    zeros = torch.zeros(n_sums + 2 * _cdiv(n_pooled, 4) + heads * n_keys, dtype=torch.int64, device=device)
    sums, pooled, totals = zeros.tensor_split((n_sums, len(zeros) - heads * n_keys))
    pooled, totals = pooled.view(torch.float32)[:n_pooled].view(pooled_shape), totals.view(torch.float64)
    received, audience = empty(b, h, n_keys), empty(b, h, n_keys)
    counted = nothing if counted is None else counted
    of_queries = nothing if queries is None or few else queries.cumsum(1, dtype=torch.int32)
    of_mask = nothing if keys is None or few else keys.to(device).cumsum(1, dtype=torch.int32)
    run.statistics[(_cdiv(n_keys, block["BN"]), heads)](
        q, k, key_lse, sinks, sums, received, totals, audience, pooled, counted, norms, largest, of_queries, *of_keys,
        *of_sink, *shared, d, *place, query_bin, *((0, 0) if bins is None else pooled_shape[3:]), **flags, **block,
        HAS_NORMS=norms is not nothing, BOTH_SIDES=both_sides, POOLED=0 if bins is None else pools[0], POOL_M=pools[1],
        POOL_N=pools[2], PLANES=planes, EVEN_D=d == block["D"], STEP=step, FLUSH=STEP_TILES * block["BM"] // step,
        STAGES=block["num_stages"], HAS_LOWS=request.extremes,
    )  # fmt: skip
    small = {name: block[name] for name in ("BM", "D")} | {"EVEN_D": d == block["D"], "BN": min(block["BN"], 64)}
    if mass:
        bands, inside = unions
        bounds = _on_device(tuple(bound for band in bands for bound in _bounds(band)), device)
        run.masses[(_cdiv(n_keys, small["BN"]), heads, len(mass))](
            q, k, key_lse, sums, counted, bounds, nothing if inside is None else inside, *of_keys, *shared, d, *place,
            **{name: flag for name, flag in flags.items() if name != "HAS_SINK"}, **small, MASSES=len(mass),
            MASS_KEYS=inside is not None, PLANES=planes,
        )  # fmt: skip
    smallest, argmax = None, None
    if request.extremes:
        smallest, argmax = empty(b, h, n_queries), empty(b, h, n_queries, dtype=torch.long)
        run.extremes[(_cdiv(n_queries, block["BM"]), heads)](
            q, k, key_lse, sums, counted, smallest, argmax, *of_keys, *shared, d, *place,
            **{name: flag for name, flag in flags.items() if name != "HAS_SINK"}, **small | {"BN": block["BN"]},
            PLANES=planes, LOW=planes - len(mass) - 1,
        )  # fmt: skip
    prefix = None
    if prefix_keys is not None:
        prefix = empty(b, h, prefix_keys)
        run.prefix_scores[(_cdiv(prefix_keys, small["BN"]), heads)](
            q, k, key_lse, sinks, counted, prefix, firsts, *of_keys, *of_sink, *shared, d, *place, prefix_keys,
            **flags, **small,
        )  # fmt: skip
    found, masses = empty(len(OF_QUERIES) + 4, b, h, n_queries), empty(len(mass), b, h, n_queries)
    run.by_row[(_cdiv(n_queries, block["BM"]), heads)](
        q, k, key_lse, lse, sinks, sums, found, masses, firsts, counted, norms, largest, of_mask, *of_keys, *of_sink,
        *shared, d, *place, **{name: flag for name, flag in flags.items() if name not in ("WIDEN", "CARD")},
        **small | {"BN": block["BN"]},
        HAS_NORMS=norms is not nothing, BOTH_SIDES=both_sides, MASSES=len(mass), PLANES=planes,
    )  # fmt: skip
    thumbnail = None
    if bins is not None:
        (maximum, total), joined = pooled, key_bin // pools[2]
        if joined > 1:
            maximum, total = maximum.unflatten(-1, (-1, joined)).amax(-1), total.unflatten(-1, (-1, joined)).sum(-1)
        thumbnail = Thumbnail.of(maximum, total, n_queries, n_keys, query_bin, key_bin)
    values, rest = dict(zip(OF_QUERIES, found, strict=False)), found[len(OF_QUERIES) :]
    on_sink, largest_score, counted_lse, first_contribution = rest
    return out, lse, Statistics(
        lse=lse if queries is None else counted_lse,
        max_logit=largest_score,
        **values,
        received=received,
        visible_queries=audience,
        prefix_sink_scores=prefix,
        thumbnail=thumbnail,
        sink_mass=None if sink is None else on_sink,
        first_contribution=None if request.value_norms is None else first_contribution,
        min_logit=smallest,
        argmax=argmax,
        mass=dict(zip(mass, masses, strict=True)),
    )  # fmt: skip


def forward_options(d: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return queries and keys of a tile of the forward, warps and pipeline stages: at most 99 KiB of shared memory."""
    size = d * dtype.itemsize
    tile = 32 if dtype == torch.float32 and size > 256 else 64
    stages = 3 if dtype != torch.float32 else 2 if size <= 512 else 1
    warps = 8 if tile * size > 2**14 else 4
    return {"BM": tile, "BN": tile, "num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


def statistics_options(d: int, dtype: torch.dtype, capability: tuple[int, int]) -> dict[str, Any]:
    """Return the same of the pass for statistics; what they compile to is printed by `benchmarks.gpu --static`.

    Four warps have the tensor cores of compute capability 9.0 together; elsewhere eight do not spill registers.
    """
    size, narrow = d * dtype.itemsize, dtype != torch.float32
    keys = 128 if narrow and size <= 256 else 64 if narrow or size <= 256 else 32
    rows = 64 if narrow and size <= 512 else 32
    warps = 4 if narrow and capability[0] == HOPPER[0] else 8
    return {"BM": rows, "BN": keys, "num_warps": warps, "num_stages": 2 if size <= 256 else 1, "enable_fp_fusion": True}


def _power_of_two(n: int) -> int:
    return max(SMALLEST_DOT, 1 << (n - 1).bit_length())


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _bounds(band: tuple[float, float]) -> tuple[int, int]:
    low, high = (int(max(-UNBOUNDED, min(UNBOUNDED, x))) for x in band)
    return low, high


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # cached tensors must serve training too
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers as a tensor on a device; the same in every layer and call, they are copied there once."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def _bias_arguments(call: Call, nothing: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional arguments and flags of the kernels for the biases of a call."""
    forms = _bias_forms(call)
    assert forms is not None
    distance, cap, first = forms
    unit = LOG2_E / (call.normalizer.temperature if call.biases else 1.0)  # else `call.scale` includes the temperature
    table, stride = nothing, 0
    if distance is not None:
        table = distance.tensor.to(call.q.device, torch.float32).contiguous()
        stride = table.shape[1] if len(table) > 1 else 0
    flags = {"CAP": 0 if cap is None else 1 if first else 2, "HAS_DISTANCE": distance is not None}
    return (unit, 1.0 if cap is None else float(cap.cap), table, stride), flags


def _mask_arguments(mask_parts: MaskParts, nothing: Tensor) -> tuple[tuple[Any, ...], dict[str, bool]]:
    """Return positional arguments and flags of the kernels for a mask."""
    device, (band, keys, ids, dense) = nothing.device, mask_parts
    keys, dense = (None if x is None else x.to(device).view(torch.int8) for x in (keys, dense))
    ids = None if ids is None else ids.to(device, torch.int32)
    strides = (
        [0, 0, 0, 0]
        if dense is None
        else [0 if n == 1 else s for n, s in zip(dense.shape, dense.stride(), strict=True)]
    )
    low, high = _bounds(band)
    tensors = [nothing if x is None else x.contiguous() if x.ndim == 2 else x for x in (keys, ids, dense)]
    of_batch = [0 if x is None or len(x) == 1 else x.shape[1] for x in (keys, ids)]
    flags = {f"HAS_{name}": x is not None for name, x in (("KEYS", keys), ("IDS", ids), ("DENSE", dense))} | {
        "HAS_BAND": band != (-math.inf, math.inf)
    }
    return (low, high, *tensors, *of_batch, *strides), flags
