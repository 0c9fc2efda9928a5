"""The native kernel: softmax attention on CPU by the compiled library, forward and backward in one pass each."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qkv._contract import overrides
from qkv.biases import Bias, ByDistance, SingleTensorBias
from qkv.engine.call import Call, RowState, as_mask, detached
from qkv.engine.modes import plain_torch
from qkv.engine.transforms import Results, differentiable, differentiable_call
from qkv.kernels import native_call
from qkv.kernels.native_call import Prepared, gradient_products, of_tensors, prepared, ranges_of, run  # fmt: skip
from qkv.masks import Grid, Mask
from qkv.native.library import CPU, BiasGradient, Gradients, empty
from qkv.partial import Partial
from qkv.results import Result

PLAIN = (Tensor, torch.nn.Parameter)
EVERYWHERE = (-math.inf, math.inf)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NEAR = {"self_": 0, "previous": -1, "next_": 1}
ROWS = {"entropy": "entropy", "effective_keys": "effective", "distance": "distance"}
BY_ROW, BY_KEY, ALONG_DIAGONALS, BY_PAIR, BY_ROW_AND_KEY = range(5)  # as in gradients.c


def unsupported_reason(call: Call) -> str | None:
    """Return why this kernel cannot serve the call, or None if it can."""
    return native_call.unsupported_reason(call) or call.untracked


def forward(call: Call) -> Result | None:
    """Compute attention in linear memory, differentiable in q, k, v, the sink and the biases, and through the lse.

    None if a score or an output is not finite.
    """
    if call.needs_grad and not native_call.is_finite(call):  # also where it is masked: 0 · NaN in the backward
        return None
    with torch.no_grad():
        results = native_call.forward(call)
    if results is None:
        return None
    shown = results if call.normalizer.has_lse else (results[0], None)
    if not call.needs_grad:
        return Result(*shown)
    return Result(*differentiable_call(call, lambda _: (shown, results[1:]), _backward, "native"))


def row_state(call: Call) -> RowState | None:
    """Return the state of the rows of a detached call; None if a score is not finite."""
    arguments, numbers = prepared(call), empty(*call.q.shape[:3])
    arguments.with_tensors(lse=numbers)
    return native_call.row_state(call, numbers) if run(arguments.function, arguments.arguments) else None


def directly(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: object, scale: float | None, *,
    no_grad: bool = False,
) -> Prepared | None:  # fmt: skip
    """Return dot-product softmax attention without a `Call`: its arguments, or None if a `Call` must describe it.

    The mask is a band in which each query sees its own position. A bias is one by distance, if no gradients are wanted,
    as with `no_grad`.
    """
    if not (plain_torch() and type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN):
        return None
    if not (q.is_cpu and k.is_cpu and v.is_cpu and q.layout is k.layout is v.layout is torch.strided) or q.is_nested:
        return None
    if not (q.dtype is k.dtype is v.dtype and q.dtype in DTYPES and q.ndim == k.ndim == v.ndim == 4):
        return None
    band = EVERYWHERE
    if mask is not None:
        if not isinstance(mask, Mask) or overrides(mask, Mask, "check") or as_mask(mask) is None:
            return None
        if (near := mask.band) is None or near[0] > 0 or near[1] < 0 or q.shape[2] > k.shape[2]:
            return None
        band = near
    arguments = of_tensors(q, k, v, scale, band)
    if arguments is None:
        return None
    arguments.grad = not no_grad and tracked(q, k, v)
    if bias is None:  # NaN in a key that no query sees must not reach gradients
        return None if arguments.grad and k.shape[2] - q.shape[2] > band[1] else arguments
    if arguments.grad or not isinstance(bias, Bias) or bias.depends_on_query or bias.value_table is not None:
        return None
    grid = Grid.of(q.shape[2], k.shape[2], q.shape[0], q.shape[1], CPU)
    bias.check(grid)
    bound = bias.bind(q, grid, q.shape[3] ** -0.5 if scale is None else scale)
    if type(bound) is not ByDistance or not native_call.bias_is_finite(bound):
        return None
    if bound.tensor.requires_grad and torch.is_grad_enabled() and not no_grad:
        return None
    arguments.with_biases((bound,))
    return arguments


def tracked(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether autograd records what is computed from the tensors."""
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: object, scale: float | None
) -> Tensor | None:
    """Return the output of a call that `directly` describes, else None: bit by bit that of `forward`.

    NaN and infinity in the inputs reach the output or the log-sum-exp of a row, and then the result is None as well.
    """
    arguments = directly(q, k, v, mask, bias, scale)
    if arguments is None:
        return None
    if not arguments.grad:
        out = arguments.output()
        if not run(arguments.function, arguments.arguments):
            return None
        return out if out.dtype is q.dtype else out.to(q.dtype)
    if arguments.held[0].dtype != q.dtype:
        wide = plain(q.float(), k.float(), v.float(), mask, bias, scale)
        return None if wide is None else wide.to(q.dtype)
    out, lse = arguments.output(), empty(*q.shape[:3])
    c = arguments.with_tensors(lse=lse)
    if not run(arguments.function, c):
        return None

    def backward(tensors: dict[str, Tensor], results: Results, more: Results, grads: Results, wanted: set[str]) -> Any:
        q, k, v = tensors["q"], tensors["k"], tensors["v"]
        dtype = gradient_products(q, k, v, results[0], grads[0])
        again = of_tensors(q, k, v, c.scale, (c.low, c.high), dtype)
        assert again is not None
        return _gradients(again, more[0], out=results[0], grad=grads[0])

    output: Tensor = differentiable({"q": q, "k": k, "v": v}, lambda: ((out,), (lse,)), backward, "native")[0]
    return output


def gradients_of(
    call: Call,
    lse: Tensor,
    *,
    out: Tensor | None = None,
    grad: Tensor | None = None,
    arguments: Mapping[str, Any] | None = None,
    wanted: Collection[str] = (),
    **more: Tensor | None,
) -> dict[str, Tensor]:
    """Return gradients of q, k, v, the sink and the biases in `wanted`, at least float32; v's only with the output's.

    `lse` is the number of each row that `native_call.forward` returns; the log-sum-exp may be over more keys than those
    of the call. `out` is needed if `grad`, the gradient of the output, is given. `arguments` are fields of
    `library.Arguments` for the queries that count and the ranges of masses, and `more` those of `library.Gradients`:
    gradients of the lse and of statistics, and the statistics.
    """
    prepared_call = prepared(call, gradient_products(call.q, call.k, call.v, out, grad))
    prepared_call.with_tensors(**(arguments or {}))
    sums = {
        i: BiasSums(bias, call)
        for i, bias in enumerate(call.biases)
        if any(f"bias {i} {name}" in wanted for name in bias.tensors())
    }
    biases = (BiasGradient * len(call.biases))()
    for i, x in sums.items():
        biases[i] = x.argument
    more = {name: (x.float() if x.is_floating_point() else x).contiguous() for name, x in more.items() if x is not None}
    of_sinks = None if call.sink is None else empty(*call.q.shape[:3])
    of_shift = empty(*call.q.shape[:3]) if "shift" in wanted and call.shift is not None else None
    gradients = _gradients(
        prepared_call, lse, out=out, grad=grad, biases=ctypes.addressof(biases) if sums else None, dsinks=of_sinks,
        dshift=of_shift, in_order=any(x.in_order for x in sums.values()), **more,
    )  # fmt: skip
    if call.sink is not None and of_sinks is not None:
        gradients["sink"] = of_sinks.sum_to_size(call.sink.shape)
    if call.shift is not None and of_shift is not None:
        gradients["shift"] = of_shift.sum_to_size(call.shift.shape)
    for i, x in sums.items():
        found = x.gradients(call.normalizer.temperature)
        gradients |= {f"bias {i} {name}": y for name, y in zip(call.biases[i].tensors(), found, strict=True)}
    return gradients


def _gradients(
    prepared_call: Prepared, lse: Tensor, *, out: Tensor | None, grad: Tensor | None, **more: Any
) -> dict[str, Tensor]:
    """Return gradients of q, k and, given that of the output, v; `more` are fields of `library.Gradients`."""
    q, k, v = prepared_call.held[:3]
    gradients, scores = {"q": empty(*q.shape), "k": empty(*k.shape)}, Gradients()
    if grad is not None:
        gradients["v"], grad = empty(*v.shape), grad.to(q.dtype)
        grad = grad if grad.stride(3) == 1 else grad.contiguous()
        scores.grad_out, scores.gs, scores.dv = grad.data_ptr(), grad.stride()[:3], gradients["v"].data_ptr()
    for name, x in more.items():
        setattr(scores, name, x.data_ptr() if isinstance(x, Tensor) else x)
    scores.dq, scores.dk = gradients["q"].data_ptr(), gradients["k"].data_ptr()
    out = None if out is None else out.to(q.dtype).contiguous()
    scores.call = prepared_call.with_tensors(lse=lse.float().contiguous(), out=out)
    run("qkv_gradients" if q.dtype == torch.float32 else f"qkv_gradients_{str(q.dtype)[6:]}", scores)
    return gradients


class BiasSums:
    """The sums over batch items, heads and pairs that are the gradient of a bias."""

    def __init__(self, bias: Bias, call: Call) -> None:
        (b, h, n_queries, _), n_keys = call.q.shape, call.k.shape[2]
        self.shapes, strides = [x.shape for x in bias.tensors().values()], (0, 0, 0)
        self.by_distance = bias.form == "distance"
        self.in_order = False
        self.rows: Tensor | None = None
        if bias.form == "difference":
            kind, self.sums = BY_ROW_AND_KEY, torch.zeros(b, h, 1, n_keys, dtype=torch.float64, device=CPU)
            self.rows = torch.zeros(b, h, n_queries, 1, dtype=torch.float64, device=CPU)
            self.argument = BiasGradient(kind, self.sums.data_ptr(), strides, self.rows.data_ptr())
            return
        assert isinstance(bias, SingleTensorBias)
        shape = bias.tensor.shape
        if self.by_distance:
            kind, self.sums = ALONG_DIAGONALS, torch.zeros(b, h, shape[1], dtype=torch.float64, device=CPU)
        elif shape[3] < n_keys or n_keys == 1:
            kind, self.sums = BY_ROW, torch.zeros(b, h, n_queries, 1, dtype=torch.float64, device=CPU)
        elif shape[2] < n_queries or n_queries == 1:
            kind, self.sums = BY_KEY, torch.zeros(b, h, 1, n_keys, dtype=torch.float64, device=CPU)
        else:
            kind, self.sums = BY_PAIR, torch.zeros(shape, dtype=torch.float32, device=CPU)
            self.in_order = shape[:2] != (b, h)
            of_batch, of_head, of_query, _ = self.sums.stride()
            strides = (of_batch if shape[0] == b else 0, of_head if shape[1] == h else 0, of_query)
        self.argument = BiasGradient(kind, self.sums.data_ptr(), strides)

    def gradients(self, temperature: float) -> list[Tensor]:
        """Return the gradients of the bias's tensors; scores are divided by the temperature after their biases."""
        sums = [self.sums.sum(0).flip(-1) if self.by_distance else self.sums]
        sums = sums if self.rows is None else [self.rows, -self.sums]
        return [x.sum_to_size(shape) / temperature for x, shape in zip(sums, self.shapes, strict=True)]


def gradients(call: Call, whole: Partial, grad: Tensor, grad_lse: Tensor | None, wanted: set[str]) -> dict[str, Tensor]:
    """Return gradients of a call over a subset of the keys, given `whole`, the result over all keys; at least float32.

    `whole` may include other keys and a sink; `grad` and `grad_lse` are its gradients. `wanted` names tensors of the
    call.
    """
    return gradients_of(detached(call), whole.lse, out=whole.out, grad=grad, grad_lse=grad_lse, wanted=wanted)


def _backward(call: Call, results: Results, more: Results, grads: Results, wanted: set[str]) -> dict[str, Tensor]:
    (out, _), (numbers,), (grad, grad_lse) = results, more, grads
    return gradients_of(detached(call), numbers, out=out, grad=grad, grad_lse=grad_lse, wanted=wanted)


def statistics_gradients(
    call: Call, values: Mapping[str, Tensor], grads: Mapping[str, Tensor], *, rows: RowState, mass: Tensor,
    masks: Mapping[str, Mask], firsts: Sequence[int], queries: Tensor | None, wanted: Collection[str],
    out: Tensor | None, grad_out: Tensor | None, argmax: Tensor | None,
) -> dict[str, Tensor] | None:  # fmt: skip
    """Return gradients of q, k, v, the sink and the biases in `wanted`, or None if the library cannot compute them.

    `values` are the statistics of a call without tensors that require gradients, and `grads` their gradients, 0 for
    queries that do not count and rows without visible keys; `mass` is the sum of the weights of each row. `argmax` is
    needed for the gradient of `max_logit`.
    """
    if "max_logit" in grads and argmax is None:
        return None
    if native_call.unsupported_reason(call) is not None or not native_call.is_finite(call):
        return None
    parts, grad_masses, masses = list[Tensor](), list[Tensor](), list[Tensor]()
    position = call.grid.rows(0, call.grid.n_queries)
    keys = {name: (position + offset)[None] for name, offset in NEAR.items()}
    keys["sink"] = torch.tensor(firsts, device=CPU)[:, None].expand(-1, call.grid.n_queries)
    for name, grad in grads.items():
        if name in keys:
            spans: Tensor | None = torch.stack((keys[name], keys[name] + 1))[None]
        elif name.startswith("mass "):
            spans = ranges_of(masks[name.removeprefix("mass ")], call.grid)
        else:
            continue
        if spans is None:
            return None
        for i, part in enumerate(spans):
            parts.append(part)
            grad_masses.append(grad)
            masses.append(values[name] if i == 0 else torch.zeros_like(values[name]))  # the sum of all ranges
    of_rows = {ROWS[name]: (grads[name], values[name]) for name in ROWS if name in grads}
    more = {f"grad_{name}": grad for name, (grad, _) in of_rows.items()} | {n: x for n, (_, x) in of_rows.items()}
    if "max_logit" in grads and argmax is not None:
        more |= {"grad_max_logit": grads["max_logit"], "argmax": argmax}
    grad_lse, at_sink = grads.get("lse"), None
    numbers = next((x for x in (rows.level, rows.total) if x is not None), empty(0))  # not read where there are none
    if "sink_mass" in grads and not call.normalizer.has_lse:
        more["grad_sinks"] = grads["sink_mass"]
    elif "sink_mass" in grads:
        at_sink = grads["sink_mass"] * values["sink_mass"]
        grad_lse = -at_sink if grad_lse is None else grad_lse - at_sink
    counted = None if queries is None else queries.contiguous()
    arguments: dict[str, object] = {"counted": counted}
    if parts:
        batches = max(x.shape[1] for x in parts)
        ranges = torch.stack([x.expand(-1, batches, -1) for x in parts]).int().contiguous()
        arguments |= {"ranges": ranges, "n_ranges": len(ranges)}
        arguments["range_batch"] = 0 if batches == 1 else call.grid.n_queries
        more |= {"grad_masses": torch.stack(grad_masses), "masses": torch.stack(masses)}
    back = gradients_of(
        call, numbers, out=out if grad_out is not None else None, grad=grad_out, arguments=arguments, wanted=wanted,
        grad_lse=grad_lse, grad_received=grads.get("received"),
        mass=mass if of_rows and not (call.normalizer.has_lse and call.sink is None) else None, **more,
    )  # fmt: skip
    if at_sink is not None and call.sink is not None:
        back["sink"] += at_sink.sum_to_size(call.sink.shape)
    return back
