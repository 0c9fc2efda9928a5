"""The main entry points: `attend` computes any attention mechanism, `plan` predicts the kernel and its cost.

`Attention` is a frozen composition of mask, bias, score and normalizer, to be used by layers and caches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.distributed import ProcessGroup

from qkv import _operator as operator
from qkv._engine.call import Call, Result, RowState, as_biases, as_mask, dot_softmax
from qkv._engine.inputs import A, Form, autocast_dtype, from_torch_names, refuse_unknown
from qkv._engine.sizes import LARGEST_HEAD
from qkv._engine.tiles import all_finite
from qkv._engine.transforms import transformed, transforming
from qkv._plan import Cost, Step, cost, drawn, steps_of
from qkv.biases import Bias
from qkv.errors import InputError
from qkv.kernels import choose, opaque, serve, serve_shared, serve_with_call, watched
from qkv.masks import Mask
from qkv.native import kernel as native
from qkv.normalizers import Normalizer
from qkv.ring import Shared
from qkv.scores import Score
from qkv.statistics.measure import directly, engine, measure, measured, sweep
from qkv.statistics.result import Statistics

SHORT = 64  # with fewer keys, torch's kernel may return 0 for a query that is NaN or infinite


@dataclass(frozen=True)
class Plan:
    """The kernel chosen for a call, the reason, and the cost. ``print(plan)`` shows a table.

    >>> import torch
    >>> from qkv import plan
    >>> x = torch.zeros(1, 1, 512, 16)
    >>> found = plan(x, x, x)
    >>> found.kernel, sorted(found.rejected)[:2], found.flops == 4 * 512 * 512 * 16
    ('native', ['eager', 'flex'], True)
    """

    kernel: str
    reason: str
    rejected: Mapping[str, str]
    """The reason why each other kernel was not chosen."""
    cost: Cost
    share: float
    """Fraction of all query-key pairs that are computed."""
    steps: tuple[Step, ...]
    """The tensors of the call from queries to output, with their shapes, and the operations between them."""
    statistics: str
    """What computes the statistics of the weights, if they are requested."""

    @property
    def flops(self) -> int:
        """Multiplications and additions of the matrix products in the forward pass."""
        return self.cost.flops

    @property
    def bytes(self) -> int:
        """Minimum memory traffic of the forward pass, in bytes."""
        return self.cost.bytes

    @property
    def peak(self) -> int:
        """Estimated memory of the forward pass beyond its inputs, in bytes."""
        return self.cost.peak

    def diagram(self, form: Literal["text", "mermaid"] = "text") -> str:
        """The way from queries, keys and values to the output, with the shapes of this call.

        Args:
            form: ``"text"``, or ``"mermaid"`` for a flowchart that GitHub, notebooks and documentation sites draw.

        Raises:
            InputError: for another form.

        >>> import torch, qkv
        >>> q, k, v = torch.zeros(1, 4, 100, 16), torch.zeros(1, 2, 120, 16), torch.zeros(1, 2, 120, 8)
        >>> print(qkv.plan(q, k, v, mask=qkv.masks.Window(64), kernel="tiled").diagram())
        queries  1 × 4 × 100 × 16
        keys     1 × 2 × 120 × 16   each of their heads serves 2 heads of queries
        values   1 × 2 × 120 × 8    each of their heads serves 2 heads of queries
          │ dot products × 0.25
        scores   1 × 4 × 100 × 120  never formed whole: the kernel 'tiled' computes them in blocks
          │ mask Window(size=64)
          │ Softmax
        weights  1 × 4 × 100 × 120  never formed whole: the kernel 'tiled' computes them in blocks
          │ weighted sum of the values
        output   1 × 4 × 100 × 8
        """
        return drawn(self.steps, form)

    def __str__(self) -> str:
        width = max(map(len, (self.kernel, *self.rejected)))
        lines = [
            f"{self.kernel:<{width}}  {self.reason}",
            f"{'':<{width}}  work    {_amount(self.flops, 'FLOP', 1000)} over {self.share:.0%} of the pairs",
            f"{'':<{width}}  memory  {_amount(self.peak, 'B', 1024)} beside the inputs (estimate), "
            f"{_amount(self.bytes, 'B', 1024)} read and written",
            f"{'':<{width}}  statistics, if requested: {self.statistics}",
            *(f"{name:<{width}}  not: {why}" for name, why in self.rejected.items()),
        ]
        return "\n".join(lines)


def _amount(value: float, unit: str, step: int) -> str:
    prefixes = ["", "Ki", "Mi", "Gi", "Ti"] if step == 1024 else ["", "k", "M", "G", "T"]
    power = 0
    while value >= step and power < len(prefixes) - 1:
        value, power = value / step, power + 1
    return f"{value:.3g} {prefixes[power]}{unit}"


class _Options(TypedDict, total=False):
    """The arguments of `attend` on which the type of its result does not depend."""

    mask: Mask | Bool[Tensor, "..."] | None
    bias: Bias | Sequence[Bias] | None
    score: Score | None
    normalizer: Normalizer | None
    dropout_p: float
    dropout_seed: int | None
    kernel: str
    group: ProcessGroup | None
    attn_mask: Tensor | None
    is_causal: bool
    scale: float | None


@overload
def attend(
    q: A, k: A, v: A, *, return_lse: Literal[False] = False, return_weights: Literal[False] = False,
    return_statistics: Literal[False] = False, **options: Unpack[_Options],
) -> A: ...  # fmt: skip
@overload
def attend(
    q: A, k: A, v: A, *, return_lse: Literal[True], return_weights: Literal[False] = False,
    return_statistics: Literal[False] = False, **options: Unpack[_Options],
) -> tuple[A, A]: ...  # fmt: skip
@overload
def attend(
    q: A, k: A, v: A, *, return_lse: Literal[False] = False, return_weights: Literal[True],
    return_statistics: Literal[False] = False, **options: Unpack[_Options],
) -> tuple[A, A]: ...  # fmt: skip
@overload
def attend(
    q: A, k: A, v: A, *, return_lse: Literal[False] = False, return_weights: Literal[False] = False,
    return_statistics: Literal[True], **options: Unpack[_Options],
) -> tuple[A, Statistics]: ...  # fmt: skip
@overload
def attend(
    q: A, k: A, v: A, *, return_lse: bool = False, return_weights: bool = False,
    return_statistics: bool = False, **options: Unpack[_Options],
) -> Any: ...  # fmt: skip
def attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    bias: Bias | Sequence[Bias] | None = None,
    score: Score | None = None,
    normalizer: Normalizer | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
    return_weights: bool = False,
    return_statistics: bool = False,
    group: ProcessGroup | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    **unknown: object,
) -> Any:
    """Attention: for every query, the sum of the values times its normalized scores with the keys.

    Args:
        q: queries, (b, h, nq, dq). Also (b, nq, dq) or (nq, dq), for one head, and NumPy arrays: results have the
            form of the inputs.
        k: keys, (b, hkv, nk, dk); ``h`` must be a multiple of ``hkv``: query head i uses key head i // (h // hkv).
        v: values, (b, hkv, nk, dv).
        mask: **True where a query may attend**: a mask of `qkv.masks` or a boolean tensor that broadcasts to
            (b, h, nq, nk). With nq ≠ nk the last query is aligned with the last key. A fully masked query gives zeros.
        bias: a function of the score, applied before the mask: one of `qkv.biases`, or several in a tuple.
        score: the function that compares a query and a key: one of `qkv.scores`; `Dot`, scaled by 1/√d, if None.
        normalizer: the function from scores to weights: one of `qkv.normalizers`; `Softmax()` if None.
        dropout_p: probability with which each weight is dropped; the remaining weights are scaled up. Pass 0 at
            inference.
        dropout_seed: seed of dropout and of the draws of `Hard`; from torch's generator if None. The same seed drops
            the same pairs on every kernel.
        kernel: ``"auto"``, or the name of a kernel that must serve the call: one of ``"linear"``,
            ``"native"``, ``"flash"``, ``"flex"``, ``"tiled"``, ``"eager"``, ``"reference"``; see `plan`.
        return_lse: also return the log-sum-exp of the scores, (b, h, nq), natural, float32 or better; differentiable.
            Only `Softmax` has one.
        return_weights: also return the weights, (b, h, nq, nk). They are formed only on request.
        return_statistics: also return the statistics of the weights that `measure` returns, from the same pass. They
            are those before dropout, and detached. If a gradient or the weights are wanted, or a kernel is requested by
            name, they take another pass. `measure` has the options: masses, padded queries, thumbnails, own statistics.
        group: process group over which the sequence is sharded: q, k, v, ``out`` and ``lse`` are the shard of this
            process in the order of `qkv.ring.shard`; `mask` and `bias` describe the whole sequence. Every process of
            the group must make the call, forward and backward. `Softmax` only, without dropout and without
            `RelativePosition`. See docs/ring.md.
        attn_mask: torch's name and form of a mask: boolean as `mask`, or numbers that are added to the scores.
        is_causal: torch's name of a causal mask, whose *first* query is aligned with the first key; combined with
            `mask` by AND. ``mask=Causal()`` is the same with nq = nk.
        scale: torch's name of the factor of the dot products: ``score=Dot(scale)``.
        **unknown: rejected with an error, which translates the argument names of other libraries.

    Returns:
        ``out`` (b, h, nq, dv), or a tuple of ``out`` and all that is requested of ``lse``, ``weights`` and
        ``statistics``, in this order.

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
    if unknown:
        refuse_unknown(attend, unknown)
    if is_causal or attn_mask is not None or scale is not None:
        lengths = q.shape[-2], k.shape[-2]
        mask, bias, score = from_torch_names(lengths, mask, bias, score, attn_mask, is_causal, scale)
    if group is not None:
        return _shared(
            q, k, v, mask, bias, score, normalizer, dropout_p, kernel, return_lse, return_weights, return_statistics,
            group,
        )  # fmt: skip
    if kernel == "auto" and not (dropout_p or return_lse or return_weights or watched()):
        found = (directly if return_statistics else _stock)(q, k, v, mask, bias, score, normalizer)
        if found is not None:
            return found
    return _general(
        q, k, v, mask, bias, score, normalizer, dropout_p, dropout_seed, kernel, return_lse, return_weights,
        return_statistics,
    )  # fmt: skip


@opaque
def _general(
    q: Any, k: Any, v: Any, mask: Mask | Tensor | None, bias: Bias | Sequence[Bias] | None,
    score: Score | None, normalizer: Normalizer | None, dropout_p: float, dropout_seed: int | None,
    kernel: str, return_lse: bool, return_weights: bool, return_statistics: bool,
    queries: Bool[Tensor, "b nq"] | None = None,
) -> Any:  # fmt: skip
    form = None
    if not (isinstance(q, Tensor) and q.ndim == 4):
        form, (q, k, v) = Form.of(q, k, v)
    if (dtype := autocast_dtype(q)) is not None:
        with torch.autocast(q.device.type, enabled=False):
            found = _general(
                q.to(dtype), k.to(dtype), v.to(dtype), mask, bias, score, normalizer, dropout_p, dropout_seed, kernel,
                return_lse, return_weights, return_statistics, queries,
            )  # fmt: skip
        if form is None:
            return found
        return tuple(map(form.returned, found)) if isinstance(found, tuple) else form.returned(found)
    call = Call.of(q, k, v, as_mask(mask), as_biases(bias), score, normalizer, dropout_p, dropout_seed)
    if return_lse and not call.given.normalizer.has_lse:
        raise InputError(
            f"return_lse is True, but {type(call.given.normalizer).__name__} has no log-sum-exp; only Softmax has one"
        )
    statistics = None
    if return_statistics:
        result, statistics = _with_statistics(call, kernel, return_weights, queries)
    else:
        result = serve(call, kernel, weights=return_weights)
    asked = zip((return_lse, return_weights, return_statistics), (result.lse, result.weights, statistics), strict=True)
    wanted = [result.out, *(x for yes, x in asked if yes)]
    found = wanted if form is None else [form.returned(x) for x in wanted]
    return found[0] if len(found) == 1 else tuple(found)


def _with_statistics(
    call: Call, kernel: str, weights: bool, queries: Bool[Tensor, "b nq"] | None
) -> tuple[Result, Statistics]:
    """The result of a call and the statistics of its weights, in one pass if only the output and lse are wanted."""
    if kernel == "auto" and not (weights or call.dropout_p or call.needs_grad or transformed(call) or watched()):
        result, _, statistics = measured(call, output=True, queries=queries)
        assert result is not None
        return result, statistics
    result, served = serve_with_call(call, kernel, weights=weights)
    return result, measured(replace(served, dropout_p=0.0), queries=queries)[-1]


def attend_counting(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, queries: Bool[Tensor, "b nq"] | None, *,
    training: bool, return_weights: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """What a composition returns with statistics of the `queries` that count, as in `measure`; of all if None."""
    dropout_p = attention.dropout_p if training else 0.0
    found: tuple[Any, ...] = _general(
        q, k, v, attention.mask, attention.bias, attention.score, attention.normalizer, dropout_p, None, "auto", False,
        return_weights, True, queries,
    )  # fmt: skip
    return found


@opaque
def _shared(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Bias | Sequence[Bias] | None,
    score: Score | None, normalizer: Normalizer | None, dropout_p: float, kernel: str,
    return_lse: bool, return_weights: bool, return_statistics: bool, group: ProcessGroup,
) -> Any:  # fmt: skip
    if dropout_p:
        raise InputError(f"dropout_p is {dropout_p} with a group, expected 0: sharded attention has no dropout")
    if return_weights:
        raise InputError(
            "return_weights is True with a group, expected False: sharded attention never forms the weights"
        )
    shared = Shared.of(group, q, k, v, as_mask(mask), as_biases(bias), score, normalizer)
    result = serve_shared(shared, kernel)
    if not (return_lse or return_statistics):
        return result.out
    assert result.lse is not None
    lse = (result.lse,) if return_lse else ()
    if not return_statistics:
        return result.out, *lse
    return result.out, *lse, sweep(shared.call, RowState(result.lse.detach()), shared=shared)


def _stock(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Bias | Sequence[Bias] | None,
    score: Score | None, normalizer: Normalizer | None,
) -> Tensor | None:  # fmt: skip
    """Fast path: softmax attention in a band by one call of the library or of torch's SDPA, else None.

    For one decoded token, or in a small model, building a `Call` takes longer than the attention. In compiled code, an
    operator also serves padding and sinks.
    """
    traced = torch.compiler.is_compiling() or (isinstance(q, Tensor) and (q.is_meta or hasattr(q, "fake_mode")))
    if (traced and bias is not None) or (found := dot_softmax(score, normalizer, q, bias)) is None:
        return None
    scale, sink = found
    causal = isinstance(mask, Mask) and mask.band == (0, math.inf)
    plain = bias is None and sink is None and (causal or mask is None)
    if not traced:
        out = native.plain(q, k, v, mask, bias, scale) if sink is None else None
        return _sdpa(q, k, v, causal=causal, scale=scale) if out is None and plain else out
    if torch.compiler.is_compiling() and plain and not operator.is_faster(q, k):
        out = _sdpa(q, k, v, causal=causal, scale=scale)
        if out is not None:
            return out
    return operator.traced(q, k, v, mask, sink, scale)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> Tensor | None:
    """One call of torch's SDPA, or None if its result might differ; `Call.of` reports wrong arguments."""
    if not all(isinstance(x, Tensor) and x.ndim == 4 and x.device.type in ("cpu", "cuda") for x in (q, k, v)):
        return None
    (b, h, n_queries, d), (_, hkv, n_keys, _) = q.shape, k.shape
    if q.is_cuda and (n_keys < SHORT or d > LARGEST_HEAD or q.dtype not in (torch.bfloat16, torch.float16)):
        return None  # on a card torch chooses between libraries, all of linear memory for these
    fits = k.shape == v.shape and k.shape[0] == b and k.shape[3] == d and h % max(hkv, 1) == 0
    if not fits or 0 in q.shape or 0 in k.shape or not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
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


def plan(
    q: A,
    k: A,
    v: A,
    *,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    bias: Bias | Sequence[Bias] | None = None,
    score: Score | None = None,
    normalizer: Normalizer | None = None,
    dropout_p: float = 0.0,
    kernel: str = "auto",
    return_weights: bool = False,
) -> Plan:
    """The kernel that `attend` would choose for these arguments, the reasons against the others, and the cost.

    >>> import torch, qkv
    >>> q = k = v = torch.randn(1, 4, 100, 16)
    >>> print(qkv.plan(q, k, v, return_weights=True).kernel)
    eager
    """
    _, tensors = Form.of(q, k, v)
    dtype = autocast_dtype(tensors[0])
    queries, keys, values = (x if dtype is None else x.to(dtype) for x in tensors)
    call = Call.of(queries, keys, values, as_mask(mask), as_biases(bias), score, normalizer, dropout_p)
    name, reason, rejected = choose(call, kernel, weights=return_weights)
    found = cost(name, call)
    b, h, n_queries, _ = call.q.shape
    share = found.pairs / (b * h * n_queries * call.k.shape[2])
    return Plan(name, reason, rejected, found, share, steps_of(call, name), engine(call))


class _CallOptions(TypedDict, total=False):
    """The arguments of an `Attention` on which the type of its result does not depend."""

    training: bool
    dropout_seed: int | None
    kernel: str
    group: ProcessGroup | None


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

    def _parts(self) -> dict[str, Any]:
        return {"mask": self.mask, "bias": self.bias, "score": self.score, "normalizer": self.normalizer}

    @overload
    def __call__(
        self, q: A, k: A, v: A, *, return_lse: Literal[False] = False, return_weights: Literal[False] = False,
        return_statistics: Literal[False] = False, **options: Unpack[_CallOptions],
    ) -> A: ...  # fmt: skip
    @overload
    def __call__(
        self, q: A, k: A, v: A, *, return_lse: Literal[True], return_weights: Literal[False] = False,
        return_statistics: Literal[False] = False, **options: Unpack[_CallOptions],
    ) -> tuple[A, A]: ...  # fmt: skip
    @overload
    def __call__(
        self, q: A, k: A, v: A, *, return_lse: Literal[False] = False, return_weights: Literal[True],
        return_statistics: Literal[False] = False, **options: Unpack[_CallOptions],
    ) -> tuple[A, A]: ...  # fmt: skip
    @overload
    def __call__(
        self, q: A, k: A, v: A, *, return_lse: Literal[False] = False, return_weights: Literal[False] = False,
        return_statistics: Literal[True], **options: Unpack[_CallOptions],
    ) -> tuple[A, Statistics]: ...  # fmt: skip
    @overload
    def __call__(
        self, q: A, k: A, v: A, *, return_lse: bool = False, return_weights: bool = False,
        return_statistics: bool = False, **options: Unpack[_CallOptions],
    ) -> Any: ...  # fmt: skip
    def __call__(
        self, q: Any, k: Any, v: Any, *, training: bool = False, dropout_seed: int | None = None, kernel: str = "auto",
        return_lse: bool = False, return_weights: bool = False, return_statistics: bool = False,
        group: ProcessGroup | None = None, **unknown: Any,
    ) -> Any:  # fmt: skip
        """`attend` with this composition; without dropout unless `training`. Torch's names of `attend` work, too."""
        options: dict[str, Any] = {"kernel": kernel, "return_lse": return_lse, "return_weights": return_weights}
        options["return_statistics"] = return_statistics
        dropout: dict[str, Any] = {"dropout_p": self.dropout_p if training else 0.0, "dropout_seed": dropout_seed}
        return attend(q, k, v, **dropout, **self._parts(), **options, group=group, **unknown)

    def plan(
        self, q: A, k: A, v: A, *, training: bool = False, kernel: str = "auto", return_weights: bool = False
    ) -> Plan:
        """`plan` with this composition."""
        options: dict[str, Any] = {"kernel": kernel, "return_weights": return_weights}
        return plan(q, k, v, **self._parts(), **options, dropout_p=self.dropout_p if training else 0.0)

    def measure(self, q: A, k: A, v: A | None = None, **options: Any) -> Statistics:
        """`measure` with this composition; `options` are the other arguments of `measure`."""
        return measure(q, k, v, **self._parts(), **options)
