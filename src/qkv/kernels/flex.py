"""FlexAttention with the mask as a BlockMask, and the biases, and weights other than softmax, as a score_mod.

On CUDA each composition is compiled into one Triton kernel, with linear memory and gradients. On CPU it runs torch's
eager implementation, which forms all scores and has no backward: enough to test the translation of masks and biases.
(Dong et al. 2024, arXiv:2412.05496.)
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv._contract import overrides
from qkv.biases import Bias, TensorBias
from qkv.engine.call import Call, at_least_float32, detached, user_defined
from qkv.engine.level import TOLERANCE, raise_no_level, root, sink_slope, sink_weight
from qkv.engine.sizes import GPUS, has_triton
from qkv.engine.transforms import Need, unmet
from qkv.errors import InputError
from qkv.masks import Grid, Mask
from qkv.masks.convert import block_mask, block_visibility
from qkv.normalizers import Normalizer, Pointwise, SumToOne
from qkv.partial import Partial
from qkv.results import Result

BLOCK = 128  # queries and keys per block of the mask, for which FlexAttention's kernels are tuned
SMALLEST_HEAD = 16  # smallest head dimension of Triton's matrix product
COMPOSITIONS = 256  # limit of compiled kernels
DECODED = 64  # rows, of all query heads of a key head, up to which torch 2.11 finds a tile in its kernel for decoding
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Takes the score of a pair, and its batch item, head, query and key."""
OFFERS: tuple[Need, ...] = ("weights that are no softmax", "biases", "gradients")


def unsupported_reason(call: Call) -> str | None:
    """Return why this kernel cannot serve the call, or None if it can."""
    device = call.q.device.type
    if device not in ("cpu", *GPUS):
        return f"tensors are on {device}; it is for CUDA, and for tests on CPU"
    if (why := unmet(call, OFFERS)) is not None:
        return why
    for bias in call.biases:
        if not overrides(bias, Bias, "at"):
            return f"the bias {type(bias).__name__} has no method `at` for a single score"
    if device not in GPUS and call.needs_grad:
        return "torch's FlexAttention has no backward on CPU"
    if device == "cuda" and not has_triton():
        return "it needs Triton, which is not installed"
    if device == "cuda" and call.q.dtype == torch.float64:
        return "its kernels accumulate in float32, which is not precise enough for float64"
    return None if call.normalizer.has_lse else _not_by_logarithms(call)


def forward(call: Call) -> Result:
    """Compute attention, differentiable on CUDA in q, k, v, biases and the sink, and through the lse."""
    if not call.needs_grad:
        call = detached(call)  # FlexAttention on CPU rejects tensors that require gradients, even under no_grad
    if isinstance(call.normalizer, Pointwise):
        return Result(_pointwise(call), None)
    if not call.normalizer.has_lse:
        return Result(_sum_to_one(call), None)
    part = _attend(call, _final_score(call) if call.biases else None)
    if call.sink is not None:
        part = part.with_sink(call.sink, in_place=not call.needs_grad)
    return Result(part.out, part.lse)


def _attend(call: Call, score_mod: ScoreMod | None) -> Partial:
    """Return FlexAttention of a call's queries, keys, values and mask, with a score_mod for `call.scale` · q·k."""
    from torch.nn.attention.flex_attention import AuxRequest

    q, k, v, dv = call.q, call.k, call.v, call.v.shape[3]
    blocks = empty_rows = masked_keys = None
    if call.mask is not None:
        lasting = call.mask.cacheable or is_dataclass(call.mask)  # others may change unseen
        lay = _blocked_mask if lasting else _blocked_mask.__wrapped__
        blocks, empty_rows, masked_keys = lay(call.mask, call.grid, _versions(call.mask), BLOCK)
    if masked_keys is not None:  # NaN in padding must not spread
        k, v = (x.masked_fill(masked_keys[:, None, :, None], 0) for x in (k, v))
    q, k, v = _fit(q), _fit(k), _fit(v)
    with _naming(call):
        out, aux = _attention(
            q.device.type,
            q,
            k,
            v,
            score_mod=score_mod,
            block_mask=blocks,
            scale=call.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            kernel_options={"FORCE_USE_FLEX_ATTENTION": q.shape[2] * q.shape[1] > DECODED * k.shape[1]},
            return_aux=AuxRequest(lse=True),
        )
    out, lse = out[..., :dv], aux.lse.to(at_least_float32(call.q.dtype))
    if empty_rows is not None:
        out, lse = out.masked_fill(empty_rows[..., None], 0), lse.masked_fill(empty_rows, -torch.inf)
    return Partial(out, lse)


@contextlib.contextmanager
def _naming(call: Call) -> Iterator[None]:
    """Name a normalizer whose weight torch.compile rejects inside of FlexAttention, and the kernel that serves it."""
    if call.normalizer.has_lse:
        yield
        return
    try:
        yield
    except RuntimeError as error:
        if not type(error).__module__.startswith("torch._"):  # those of the compiler
            raise
        raise InputError(
            f"kernel='flex' cannot serve this call: torch.compile rejects weight of {type(call.normalizer).__name__} "
            f"({type(error).__name__}), expected elementwise torch operations; pass kernel='tiled'"
        ) from error


def _fit(x: Tensor) -> Tensor:
    """Pad heads with zeros to Triton's smallest head dimension."""
    if x.device.type not in GPUS:
        return x
    x = torch.nn.functional.pad(x, (0, SMALLEST_HEAD - x.shape[3])) if x.shape[3] < SMALLEST_HEAD else x
    return x if x.stride(-1) == 1 else x.contiguous()


# --- FlexAttention itself --------------------------------------------------------------------------------------------


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # fullgraph raises an error instead of falling back silently to forming all scores. torch compiles for the first
    # shapes, and recompiles once with dynamic shapes when they change.
    return torch.compile(flex_attention, fullgraph=True)


def _attention(device: str, *args: Any, **kwargs: Any) -> Any:
    """Call FlexAttention, compiled on CUDA, and torch's eager implementation elsewhere."""
    from torch.nn.attention.flex_attention import flex_attention

    run: Any = _compiled() if device == "cuda" else flex_attention
    with _quiet(), _recompiling() if device == "cuda" else contextlib.nullcontext():
        return run(*args, **kwargs)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warnings that scores are formed, which is intended on CPU, and about its own use of .grad and
    torch.jit when it compiles."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"flex_attention called without torch\.compile")
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.script")
        yield


def _final_score(call: Call) -> ScoreMod:
    """Return FlexAttention's score_mod for softmax: the final score of a pair from `call.scale` · q·k."""
    biases, temperature = [_ready(bias, call) for bias in call.biases], call.normalizer.temperature
    temperature = temperature if call.biases else 1.0  # else `call.scale` includes it
    shift = None if call.shift is None else _ready(TensorBias(call.shift[..., None]), call)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        for bias in biases:
            score = bias.at(score, b, h, q, k)
        score = score / temperature
        return score if shift is None else shift.at(score, b, h, q, k)

    return score_mod


def _ready(bias: Bias, call: Call) -> Bias:
    """Move a bias to the call's device, not wider than the scores, nor narrower if it accumulates gradients."""
    tensors = bias.tensors()
    if set(tensors) != {"tensor"}:
        return bias
    tensor, wide = tensors["tensor"], at_least_float32(call.q.dtype)
    narrow = torch.promote_types(tensor.dtype, wide) == wide and not tensor.requires_grad
    bound = bias.with_tensors({"tensor": tensor.to(call.q.device, tensor.dtype if narrow else wide)})
    tensor = bound.tensors()["tensor"]
    if bound.form == "tensor" and tensor.requires_grad and tensor.shape[2:] == (1, 1):
        # torch 2.11 compiles no gradient for an element that depends on neither query nor key.
        bound = bound.with_tensors({"tensor": tensor.expand(-1, -1, call.q.shape[2], 1).contiguous()})
        tensor = bound.tensors()["tensor"]
    if tensor.requires_grad and tensor._is_view():
        # torch.compile gives no gradient, and no error, to a view that a score_mod captures (torch 2.13).
        object.__setattr__(bound, "tensor", tensor.clone())  # the constructor would make a view again
    return bound


# --- the mask as blocks ----------------------------------------------------------------------------------------------


BlockedMask = tuple[Any, Bool[Tensor, "b h nq"] | None, Bool[Tensor, "b nk"] | None]
"""The BlockMask of a mask, its fully masked queries, and the keys that are masked for all queries; None for none."""


@functools.lru_cache(maxsize=8)
def _blocked_mask(mask: Mask, grid: Grid, versions: tuple[int, ...], size: int) -> BlockedMask:
    """Lay out a mask, once for all layers and steps; `versions` change when its tensors are written to."""
    with torch.inference_mode(False), torch.no_grad():  # cached tensors must serve training too
        status, queries, keys = block_visibility(mask, grid, size)
        empty_rows, masked_keys = (None if some.all() else ~some for some in (queries, keys))
        return block_mask(mask, grid, status, size), empty_rows, masked_keys


def _versions(x: object) -> tuple[int, ...]:
    """Return version counters of the tensors of a mask, which count in-place writes."""
    if isinstance(x, Tensor):
        return (0 if x.is_inference() else x._version,)
    if not is_dataclass(x):
        return ()
    return tuple(n for field in fields(x) for n in _versions(getattr(x, field.name)))


# --- normalizers other than softmax, by the logarithms of their weights -----------------------------------------------
#
# If score_mod returns ln w(s), the numerators of FlexAttention's softmax are the weights, and exp(lse) is their sum, so
# Σ w v = out · exp(lse). A weight of 0 becomes a score of −inf, whose derivative is 0: right for weights that are never
# negative, because a differentiable one has its minimum there.
#
# A `SumToOne` normalizer needs its level first. The search of `qkv.engine.level` finds it; each step is one call,
# whose lse is ln Σ w. The level enters the last call as a constant. By the implicit function theorem its gradient is
# −mean · d(Σ w), where `mean` averages the values by −∂w/∂level; it is added to the output as a term that is 0.


def _not_by_logarithms(call: Call) -> str | None:
    """Return why the weights of a call's normalizer cannot be computed from their logarithms, or None if they can."""
    normalizer, name = call.normalizer, type(call.user.normalizer).__name__
    if normalizer.one_key:
        return f"{name} takes the value of one key, and it sums over keys"
    if isinstance(normalizer, SumToOne) and overrides(normalizer, SumToOne, "term"):
        return f"the weights of {name} are divided by another sum than their own"
    if isinstance(normalizer, Pointwise) and not normalizer.nonnegative:
        return f"it takes logarithms of weights, and {name} does not declare that its weights are nonnegative"
    if call.needs_grad and normalizer.tensors():
        return f"it has no gradients for tensors inside the weight of {name}"
    return _not_elementwise(call) if user_defined(normalizer) else None


def _not_elementwise(call: Call) -> str | None:
    """Return why `weight` cannot be called for single scores, as a score_mod is; None if it can."""
    normalizer, ones = call.normalizer, torch.ones(2, device=call.q.device)

    def weight(score: Tensor, level: Tensor) -> Tensor:
        return normalizer.weigh(score, level)

    def falls(score: Tensor, level: Tensor) -> Tensor:
        slope: Tensor = torch.func.jvp(lambda at: weight(score, at), (level,), (torch.ones_like(level),))[0]
        return slope

    name, probe = type(normalizer).__name__, falls if call.needs_grad else weight
    try:
        shape = torch.func.vmap(probe)(ones, ones).shape
        if shape == ones.shape and call.q.device.type in GPUS:
            with _recompiling():
                torch.compile(probe, backend="eager", fullgraph=True)(ones[0], ones[0])
    except Exception as error:  # whatever a user's function, or the tracing of it, raises
        line = (str(error).strip().splitlines() or [""])[0]
        return f"weight of {name} does not take single scores, traced: {type(error).__name__}: {line}"
    if shape != ones.shape:
        return f"weight of {name} has parameters for each head, and a score_mod takes single scores"
    return None


@contextlib.contextmanager
def _recompiling() -> Iterator[None]:
    """Raise torch's limit of 8 compiled variants, which is meant for one function, not for a library.

    Numbers, such as the width of a window or the scale, are constants of a variant: torch 2.11 cannot compile a mask or
    a scale that it was given as variables.
    """
    import torch._dynamo

    with torch._dynamo.config.patch(
        recompile_limit=COMPOSITIONS,
        accumulated_recompile_limit=4 * COMPOSITIONS,
        specialize_int=True,
        specialize_float=True,
    ):
        yield


def _pointwise(call: Call) -> Float[Tensor, "b h nq dv"]:
    """Return the output of a `Pointwise` normalizer."""
    part = _attend(call, _log_weight(call.normalizer, _final_score(call)))
    if call.normalizer.divide == "sum":
        nothing = part.lse < math.log(torch.finfo(part.lse.dtype).tiny)  # the sum is 0
        return part.out.masked_fill(nothing[..., None], 0)
    log_total = part.lse if call.divisor is None else part.lse - torch.log(call.divisor)
    out = part.out.masked_fill((part.lse == -torch.inf)[..., None], 0)
    return (out.to(log_total.dtype) * torch.exp(log_total)[..., None]).to(out.dtype)


def _sum_to_one(call: Call) -> Float[Tensor, "b h nq dv"]:
    """Return the output of a `SumToOne` normalizer."""
    normalizer, final = call.normalizer, _final_score(call)
    with torch.no_grad():
        still = detached(call, learned=True)
        level = _level(still, final)
    part = _attend(call, _log_weight(normalizer, final, level))
    total = torch.exp(part.lse)
    out = part.out.masked_fill((part.lse == -torch.inf)[..., None], 0).to(total.dtype)
    if call.sink is not None:
        keys, total = total, total + sink_weight(normalizer, call.sink, level)
        out = out * (keys / torch.where(total == 0, 1.0, total))[..., None]
    if call.needs_grad:
        mean = _mean(still, final, level).to(total.dtype)
        out = out - (mean - out).detach() * (total - total.detach())[..., None]
    return out.to(part.out.dtype)


def _level(call: Call, final: ScoreMod) -> Float[Tensor, "b h nq"]:
    """Find the level of each query at which its weights and that of the sink sum to one; 0 if fully masked."""
    normalizer = call.normalizer
    few = call.v[..., :1]  # only log-sum-exps are needed
    narrow = call.with_tensors({"v": few})
    start = _attend(narrow, final).lse
    start = start if call.sink is None else torch.logaddexp(start, call.sink)
    empty = start == -torch.inf
    start = start.masked_fill(empty, 0)

    def total(level: Tensor) -> Tensor:
        keys = torch.exp(_attend(narrow, _log_weight(normalizer, final, level)).lse)
        return keys if call.sink is None else keys + sink_weight(normalizer, call.sink, level)

    tolerance = TOLERANCE * torch.finfo(start.dtype).eps
    level, _, sure = root(total, start, torch.ones_like(start), empty, tolerance)
    if not bool(sure.all()):
        raise_no_level(normalizer, start, level, total(level), sure)
    return level


def _mean(call: Call, final: ScoreMod, level: Tensor) -> Float[Tensor, "b h nq dv"]:
    """Return the mean of the values, weighted by −∂ weight / ∂ level; the sink's value is 0."""
    normalizer = call.normalizer
    with torch.no_grad():
        part = _attend(call, _log_weight(normalizer, final, level, falling=True))
        out = part.out.masked_fill((part.lse == -torch.inf)[..., None], 0)
        if call.sink is None:
            return out
        keys = torch.exp(part.lse)
        whole = keys + sink_slope(normalizer, call.sink, level)
        return out * (keys / torch.where(keys == 0, 1.0, whole))[..., None].to(out.dtype)


def _log_weight(
    normalizer: Normalizer, final: ScoreMod, level: Tensor | None = None, *, falling: bool = False
) -> ScoreMod:
    """Return a score_mod of ln w(s), or `falling` ln −∂w/∂level; −inf for a weight of 0 and a score of −inf."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = final(score, b, h, i, j)
        row = None if level is None else level[b, h, i]
        masked = score == -torch.inf
        score = torch.where(masked, torch.zeros_like(score) if row is None else row, score)
        if falling:
            # torch.func.grad gives wrong numbers inside a score_mod (torch 2.13); forward mode is right.
            weight = -torch.func.jvp(lambda at: normalizer.weigh(score, at), (row,), (torch.ones_like(score),))[1]
        else:
            weight = normalizer.weigh(score, row)
        zero = masked | (weight == 0)
        return torch.where(zero, -torch.inf, torch.log(torch.where(zero, 1.0, weight))).to(score.dtype)

    return score_mod
