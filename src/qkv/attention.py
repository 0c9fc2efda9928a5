"""The main entry points: `Attention` is a frozen composition of mask, bias, score and normalizer; `attend` calls one.

`compute` is the way of every call. `_one_operation` is a shorter one for those that need no `Call`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from jaxtyping import Bool
from torch import Tensor

from qkv import _operator as operator
from qkv._above import above
from qkv._plan import Plan, plan
from qkv.biases import Bias
from qkv.compat import Form, composition_of, without_name
from qkv.engine.call import Call, dot_softmax
from qkv.engine.modes import dense, readable, transforming
from qkv.engine.sizes import LARGEST_HEAD
from qkv.engine.tiles import all_finite
from qkv.engine.transforms import transformed
from qkv.errors import InputError
from qkv.kernels import attention as computed
from qkv.kernels import native, opaque, serve, watched
from qkv.masks import Mask
from qkv.normalizers import Normalizer
from qkv.results import A, Result, Statistics
from qkv.scores import Score
from qkv.statistics import gradients
from qkv.statistics.measure import directly, measure, measured

SHORT = 64  # with fewer keys, torch's kernel may return 0 for a query that is NaN or infinite


class _CallOptions(TypedDict, total=False):
    """The arguments of a call on which the type of its result does not depend."""

    kernel: str
    attn_mask: Tensor | None
    is_causal: bool
    scale: float | None
    blocked: Tensor | None


class _Options(_CallOptions, total=False):
    """The same of `attend`."""

    mask: Mask | Bool[Tensor, "..."] | None
    bias: Bias | Sequence[Bias] | None
    score: Score | None
    normalizer: Normalizer | None
    dropout_p: float


@overload
def attend(
    q: A, k: A, v: A, *, return_lse: Literal[False] = False, return_weights: Literal[False] = False,
    return_statistics: Literal[False] = False, **options: Unpack[_Options],
) -> A: ...  # fmt: skip
@overload
def attend(
    q: A, k: A, v: A, *, return_lse: bool = False, return_weights: bool = False, return_statistics: bool = False,
    **options: Unpack[_Options],
) -> Result[A]: ...  # fmt: skip
def attend(
    q: Any,
    k: Any,
    v: Any,
    *others: Any,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    bias: Bias | Sequence[Bias] | None = None,
    score: Score | None = None,
    normalizer: Normalizer | None = None,
    dropout_p: float = 0.0,
    kernel: str = "auto",
    return_lse: bool = False,
    return_weights: bool = False,
    return_statistics: bool = False,
    **torch_names: Any,
) -> Any:
    """Compute attention: for every query, the sum of the values times its normalized scores with the keys.

    Args:
        q: queries, (b, h, nq, dq). Also (b, nq, dq) or (nq, dq), for one head, and NumPy arrays: results have the
            form of the inputs.
        k: keys, (b, hkv, nk, dk); ``h`` must be a multiple of ``hkv``: query head i uses key head i // (h // hkv).
        v: values, (b, hkv, nk, dv).
        *others: refused: masks and options have names.
        mask: **True where a query may attend**: a mask of `qkv.masks` or a boolean tensor that broadcasts to
            (b, h, nq, nk). With nq ≠ nk the last query is aligned with the last key. A fully masked query gives zeros.
        bias: a function of the score, applied before the mask: one of `qkv.biases`, or several in a tuple.
        score: the function that compares a query and a key: one of `qkv.scores`; `Dot`, scaled by 1/√d, if None.
        normalizer: the function from scores to weights: one of `qkv.normalizers`; `Softmax()` if None.
        dropout_p: probability with which each weight is dropped; the remaining weights are scaled up. Pass 0 at
            inference. After the same `torch.manual_seed`, every kernel drops the same pairs.
        kernel: ``"auto"``, or the name of a kernel that must serve the call: one of ``"linear"``,
            ``"native"``, ``"fused"``, ``"flex"``, ``"tiled"``, ``"eager"``, ``"reference"``; see `plan`.
        return_lse: also return the log-sum-exp of the scores, (b, h, nq), natural, float32 or better; differentiable.
            Only `Softmax` has one.
        return_weights: also return the weights, (b, h, nq, nk). They are formed only on request.
        return_statistics: also return the statistics of the weights that `measure` returns, from the same pass. They
            are those before dropout. If gradients are wanted, they carry them as with ``measure(differentiable=True)``;
            under transforms of torch.func, and for `Hard`, they are detached. If the weights are wanted, or a kernel is
            requested by name, they take another pass. `measure` has the options: masses, padded queries, thumbnails,
            the smallest scores and the keys of the largest, own statistics.
        **torch_names: torch's arguments: `attn_mask`, boolean as `mask` or numbers that are added to the scores;
            `is_causal`, a causal mask whose *first* query is aligned with the first key, combined with `mask` by AND
            (``mask=Causal()`` is the same with nq = nk); `scale`, for ``score=Dot(scale)``. And `blocked`, a boolean
            mask that is True where a query may *not* attend. Other names raise an error, which translates those of
            other libraries.

    Returns:
        ``out`` (b, h, nq, dv). If anything else is requested, a `Result` with ``out``, ``lse``, ``weights`` and
        ``statistics``, which unpacks as a tuple of what is requested, in this order.

    Raises:
        InputError: for arguments that do not fit together, a kernel that cannot serve them, or a user-defined object
            that lacks its defining method.

    Under autocast every composition is computed in the dtype of autocast. See docs/conventions.md for vmap,
    torch.func, forward mode and second derivatives.

    Source: Vaswani et al. 2017, arXiv:1706.03762, eq. 1; the sources of the kernels are in their modules.

    >>> import torch, qkv
    >>> q = k = v = torch.randn(1, 4, 100, 16)
    >>> out, lse = qkv.attend(q, k, v, mask=qkv.masks.Causal(), return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([1, 4, 100, 16]), torch.Size([1, 4, 100]))
    """
    if others:
        raise without_name("attend", "q, k and v", others)
    if torch_names:
        return attend(
            q, k, v, **composition_of(attend, torch_names, q, k, mask, bias, score), normalizer=normalizer,
            dropout_p=dropout_p, kernel=kernel, return_lse=return_lse, return_weights=return_weights,
            return_statistics=return_statistics,
        )  # fmt: skip
    if kernel == "auto" and not (dropout_p or return_lse or return_weights or watched()):
        if return_statistics:
            measurement = directly(q, k, v, mask, bias, score, normalizer)
            if measurement is not None:
                return Result(measurement[0], statistics=measurement[1])
        elif (out := _one_operation(q, k, v, mask, bias, score, normalizer)) is not None:
            return out
    result = compute(
        Attention(mask, bias, score, normalizer), q, k, v, dropout_p=dropout_p, kernel=kernel, lse=return_lse,
        weights=return_weights, statistics=return_statistics,
    )  # fmt: skip
    return result if return_lse or return_weights or return_statistics else result.out


@opaque
def compute(
    attention: Attention, q: Any, k: Any, v: Any, *, dropout_p: float = 0.0, kernel: str = "auto", lse: bool = False,
    weights: bool = False, statistics: bool = False, queries: Bool[Tensor, "b nq"] | None = None,
) -> Result[Any]:  # fmt: skip
    """Return the output of a composition, and all that is requested of lse, weights and statistics.

    `queries` are those that count in the statistics, as in `measure`; all if None.
    """
    form, (q, k, v), without_autocast = Form.of(q, k, v)
    with without_autocast:
        call = Call.of(q, k, v, attention.mask, attention.bias, attention.score, attention.normalizer, dropout_p)
        if lse and not call.user.normalizer.has_lse:
            name = type(call.user.normalizer).__name__
            raise InputError(f"return_lse is True, but {name} has no log-sum-exp; only Softmax has one")
        if statistics:
            result = _with_statistics(call, kernel, weights, queries)
        else:
            result = serve(call, kernel, weights=weights)
    return form.result(result, lse=lse, weights=weights)


def _with_statistics(call: Call, kernel: str, weights: bool, queries: Bool[Tensor, "b nq"] | None) -> Result[Tensor]:
    """Return the result of a call with the statistics of its weights: one pass each way, unless weights are wanted."""
    if kernel == "auto" and not (weights or call.dropout_p or transformed(call) or watched()):
        result = None
        if not call.needs_grad:
            result, _, statistics = measured(call, output=True, queries=queries)
        elif gradients.in_one_pass(call):
            result, statistics = gradients.with_gradients(call, measured, output=True, queries=queries)
        if result is not None:
            return Result(result.out, result.lse, None, statistics)

    def with_statistics(one: Call) -> Result[Tensor]:
        result, one = computed(one, kernel, weights=weights), replace(one, dropout_p=0.0)
        if one.needs_grad and gradients.unsupported_reason(one) is None:
            statistics = gradients.with_gradients(one, measured, queries=queries)[1]
        else:
            statistics = measured(one, queries=queries)[-1]
        return Result(result.out, result.lse, result.weights, statistics)

    return serve(call, kernel, weights=weights, compute=with_statistics)


def _one_operation(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: object, score: Score | None,
    normalizer: Normalizer | None,
) -> Tensor | None:  # fmt: skip
    """Compute softmax attention in a band by one call of the library or of torch's SDPA, or None for other calls.

    For one decoded token, or in a small model, building a `Call` takes longer than the attention. In compiled code, an
    operator also serves padding and sinks.
    """
    if (softmax := dot_softmax(score, normalizer, q, bias)) is None:
        return None
    scale, sink = softmax
    if sink is None and (out := native.plain(q, k, v, mask, bias, scale)) is not None:
        return out
    if bias is not None:
        return None
    causal = isinstance(mask, Mask) and mask.band == (0, math.inf)
    plain = sink is None and (causal or mask is None)
    if not isinstance(q, Tensor) or readable(q):
        return _sdpa(q, k, v, causal=causal, scale=scale) if plain else None
    if torch.compiler.is_compiling() and plain and not operator.is_faster(q, k):
        out = _sdpa(q, k, v, causal=causal, scale=scale)
        if out is not None:  # see `SHORT`; compiled code does not read numbers
            return torch.where(q.isfinite().all(-1, keepdim=True), out, torch.nan)
    return operator.traced(q, k, v, mask, sink, scale)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> Tensor | None:
    """Make one call of torch's SDPA, or None if its result might differ; `Call.of` reports wrong arguments."""
    if not all(isinstance(x, Tensor) and x.ndim == 4 and x.device.type in ("cpu", "cuda") for x in (q, k, v)):
        return None
    if not dense(q, k, v):
        return None
    (b, h, n_queries, d), (_, hkv, n_keys, _) = q.shape, k.shape
    if q.is_cuda and (n_keys < SHORT or d > LARGEST_HEAD or q.dtype not in (torch.bfloat16, torch.float16)):
        return None  # on a card torch chooses between libraries, all of linear memory for these
    fits = k.shape == v.shape and k.shape[0] == b and k.shape[3] == d and h % max(hkv, 1) == 0
    if not fits or 0 in q.shape or 0 in k.shape or not q.dtype == k.dtype == v.dtype:
        return None
    if not q.is_floating_point() or q.dtype.itemsize < 2:
        return None
    if (causal and n_queries not in (1, n_keys)) or not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        return None
    if not torch.compiler.is_compiling() and (transforming() or (n_keys < SHORT and not all_finite(q))):
        return None
    attention = torch.nn.functional.scaled_dot_product_attention
    if n_queries == 1:  # with symbolic sizes, `causal and n_queries > 1` is no bool
        causal = False
    if n_queries == 1 and h != hkv:  # the query heads of a group become queries of one key head
        return attention(q.reshape(b, hkv, h // hkv, d), k, v, scale=scale).reshape(b, h, 1, d)
    return attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=h != hkv)


@dataclass(frozen=True, eq=False)
class Attention:
    """A frozen composition: all arguments of `attend` except the tensors.

    Dropout is applied only with ``training=True``.

    >>> import torch, qkv
    >>> local = qkv.Attention(mask=qkv.masks.Window(64))
    >>> q = k = v = torch.randn(1, 4, 100, 16)
    >>> local(q, k, v).shape
    torch.Size([1, 4, 100, 16])
    >>> local.plan(q, k, v).kernel
    'native'
    """

    mask: Mask | Bool[Tensor, "..."] | None = None
    bias: Bias | Sequence[Bias] | None = None
    score: Score | None = None
    normalizer: Normalizer | None = None
    dropout_p: float = 0.0

    def _repr_png_(self) -> bytes | None:
        """The picture that a notebook shows."""
        picture: bytes | None = above("picture", self)
        return picture

    def _parts(self) -> dict[str, Any]:
        return {"mask": self.mask, "bias": self.bias, "score": self.score, "normalizer": self.normalizer}

    @overload
    def __call__(
        self, q: A, k: A, v: A, *, return_lse: Literal[False] = False, return_weights: Literal[False] = False,
        return_statistics: Literal[False] = False, training: bool = False, **options: Unpack[_CallOptions],
    ) -> A: ...  # fmt: skip
    @overload
    def __call__(
        self, q: A, k: A, v: A, *, return_lse: bool = False, return_weights: bool = False,
        return_statistics: bool = False, training: bool = False, **options: Unpack[_CallOptions],
    ) -> Result[A]: ...  # fmt: skip
    def __call__(
        self, q: Any, k: Any, v: Any, *, training: bool = False, kernel: str = "auto",
        return_lse: bool = False, return_weights: bool = False, return_statistics: bool = False, **torch_names: Any,
    ) -> Any:  # fmt: skip
        """Return `attend` with this composition; without dropout unless `training`."""
        parts = self._parts()
        if torch_names:
            parts |= composition_of(attend, torch_names, q, k, self.mask, self.bias, self.score)
        return attend(
            q, k, v, **parts, dropout_p=self.dropout_p if training else 0.0, kernel=kernel, return_lse=return_lse,
            return_weights=return_weights, return_statistics=return_statistics,
        )  # fmt: skip

    def plan(self, q: A, k: A, v: A, *, training: bool = False, **options: Any) -> Plan:
        """Return `plan` with this composition; `options` are its other arguments, `kernel` and `return_weights`."""
        return plan(q, k, v, **self._parts(), **options, dropout_p=self.dropout_p if training else 0.0)

    def measure(self, q: A, k: A, **options: Any) -> Statistics:
        """Return `measure` with this composition; `options` are the other arguments of `measure`."""
        return measure(q, k, **self._parts(), **options)
