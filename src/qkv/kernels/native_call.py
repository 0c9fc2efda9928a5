"""A call as the arguments that the compiled library takes, and the statistics that it returns.

Without a library, `unsupported_reason` says so, and the tiles of tensor operations serve every call. Every argument is
checked here before the library gets a pointer.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv.biases import Bias, SingleTensorBias
from qkv.engine.call import Call, RowState
from qkv.engine.modes import dispatching
from qkv.engine.sizes import LARGEST_HEAD
from qkv.engine.tiles import cached_for_mask
from qkv.engine.transforms import Need, unmet
from qkv.masks import And, Grid, Mask
from qkv.masks.base import in_reach
from qkv.masks.convert import MaskBits, mask_bits, parts
from qkv.native import library
from qkv.native.library import GRADED, I64, MULTIPLIED, Arguments, Gradients, P, empty
from qkv.normalizers import SumToOne

FEW_ROWS, FEW_QUERIES, FEW_KEYS = 16, 8, 128
"""Up to so many queries of a key head, keys and values are read in place (`decode.c`); but packed for more than
`FEW_QUERIES` of one query head and up to `FEW_KEYS` keys, where packing is faster: 0.7 times as long for 16 of each."""
LARGEST_SCORE = 1e28  # a masked pair has a score of −1e30
LARGEST_MASK = 2**27  # bytes, one bit a pair: 32,000 queries and keys if `Mask.classify` knows nothing of the mask
PADDING = 64  # numbers after a table of biases that the library may read

OFFERS: tuple[Need, ...] = ("weights that are no softmax", "biases", "gradients", "tensors in closures")
NORMALIZERS = {"sigmoid": 1, "relu": 2, "elu + 1": 3, "identity": 4, "entmax": 5, "softpick": 8}
"""The numbers in weights.h of the forms of normalizers; that of a softmax is 0."""


def unsupported_reason(call: Call) -> str | None:
    """Return why the library cannot compute a call, or None if it can."""
    if call.q.device.type != "cpu":
        return f"tensors are on {call.q.device.type}; the native library is for CPU"
    if isinstance(missing := library.compiled(), str):
        return missing
    if (why := unmet(call, OFFERS)) is not None:
        return why
    if not call.normalizer.has_lse and call.normalizer.form is None:
        name = type(call.user.normalizer).__name__
        return f"it computes softmax, sigmoid, ReLU, ELU + 1, the identity, entmax and softpick, not {name}"
    if call.normalizer.form == "softpick" and call.sink is not None:
        return "it computes softpick without a sink"
    for bias in call.biases:
        if bias.form is None:
            return f"the bias {type(bias).__name__} is not one by distance, a tensor, a difference, or a soft cap"
    if dispatching():
        return "it needs tensors in memory"
    if not {call.q.dtype, call.k.dtype, call.v.dtype} <= {torch.float32, torch.bfloat16, torch.float16}:
        return f"q, k and v are {call.q.dtype}, {call.k.dtype} and {call.v.dtype}, not float32, bfloat16 or float16"
    if max(call.q.shape[3], call.v.shape[3]) > LARGEST_HEAD:
        return f"the head dimension is {max(call.q.shape[3], call.v.shape[3])}, more than {LARGEST_HEAD}"
    if call.mask is not None and _visibility(call) is None:
        return f"the bits of the mask {type(call.mask).__name__} need more than {LARGEST_MASK} bytes"
    if call.sink is not None and not bool((call.sink.detach() < LARGEST_SCORE).all()):
        return "a sink logit is NaN or infinite"
    for bias in call.biases:
        if not bias_is_finite(bias):
            return f"the bias {type(bias).__name__} holds NaN, infinity, or numbers so large that scores overflow"
    if call.shift is not None and not bool((call.shift.detach().abs() < LARGEST_SCORE).all()):
        return f"the bias of {type(call.user.normalizer).__name__} is NaN or infinite"
    return None


def bias_is_finite(bias: Bias) -> bool:
    """Return whether the numbers of a bias are small enough to be added to scores, or −∞, which masks a pair."""
    if bias.constant:
        return True
    if bias.form == "difference":
        return all(float(x.detach().abs().amax()) < LARGEST_SCORE for x in bias.tensors().values())
    values: Tensor | None = getattr(bias, "tensor", None)
    if values is None:
        return True
    least, most = (float(x) for x in values.detach().aminmax())
    if least == -math.inf:
        least = float(torch.where(values == -torch.inf, 0, values.detach()).amin())
    return least > -LARGEST_SCORE and most < LARGEST_SCORE


def is_finite(call: Call) -> bool:
    """Return whether q, k and v are finite and so small that no score overflows, also where they are masked."""
    q, k, v = (x.detach() for x in (call.q, call.k, call.v))
    largest = abs(call.scale) * q.shape[3] * float(q.abs().amax()) * float(k.abs().amax())
    return largest < LARGEST_SCORE and math.isfinite(v.sum())


@dataclass(eq=False, slots=True)
class Prepared:
    """A call as the library takes it."""

    arguments: Arguments
    held: list[Any]
    """The tensors and arrays that pointers lead to."""
    function: str
    """The function of the library that computes it."""
    heads: int = 1
    """How many heads the mask tells apart."""
    grad: bool = False
    """Whether autograd records the call."""

    def with_tensors(self, **more: Any) -> Arguments:
        """Return the call's arguments and `more`: a tensor stands for a pointer to it, and None for none."""
        for name, x in more.items():
            if x is not None:
                setattr(self.arguments, name, x.data_ptr() if isinstance(x, Tensor) else x)
        self.held.append(more)
        return self.arguments

    def output(self) -> Tensor:
        """Return the tensor to which the output will be written."""
        c, q = self.arguments, self.held[0]
        out = torch.empty_like(q) if c.d == c.dv and q.is_contiguous() else q.new_empty((c.b, c.h, c.nq, c.dv))
        c.out = out.data_ptr()
        return out

    def with_biases(self, biases: Sequence[Bias], temperature: float = 1.0) -> None:
        """Add bound biases, before scores are divided by the temperature."""
        cache = vars(biases[0]).setdefault("native steps", {}) if len(biases) == 1 and biases[0].constant else {}
        if temperature not in cache:
            cache[temperature] = _steps(biases, temperature)
        steps, held = cache[temperature]
        self.held.extend((steps, *held))
        self.arguments.biases, self.arguments.n_biases = ctypes.addressof(steps), len(biases)


def _in_place(heads: int, key_heads: int, n_queries: int, n_keys: int) -> bool:
    """Return whether keys and values are read in place."""
    return n_queries * heads <= FEW_ROWS * key_heads and (n_queries <= FEW_QUERIES or n_keys > FEW_KEYS)


def products(q: Tensor, k: Tensor, v: Tensor, levels: Mapping[int, Sequence[torch.dtype]] = MULTIPLIED) -> torch.dtype:
    """Return the dtype of a call in the library: that of q, k and v if they have one that the processor multiplies."""
    if q.dtype == torch.float32 or k.dtype != q.dtype or v.dtype != q.dtype:
        return torch.float32
    many, compiled = not _in_place(q.shape[1], k.shape[1], q.shape[2], k.shape[2]), library.compiled()
    multiplied = () if isinstance(compiled, str) else levels.get(compiled.qkv_level(), ())
    return q.dtype if many and q.dtype in multiplied else torch.float32


def gradient_products(q: Tensor, k: Tensor, v: Tensor, *results: Tensor | None) -> torch.dtype:
    """Return the dtype of gradients in the library, as `products`: also that of the output and its gradient."""
    dtype = products(q, k, v, GRADED)
    return dtype if all(x is None or x.dtype == dtype for x in results) else torch.float32


def _in_memory(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a dtype whose last dimension is contiguous."""
    x = x if x.dtype == dtype else x.detach().to(dtype)
    return x if x.stride(3) == 1 else x.detach().contiguous()


@functools.lru_cache(maxsize=256)
def _layout(
    dtype: torch.dtype, scale: float | None, band: tuple[float, float], q: Sequence[int], k: Sequence[int],
    v: Sequence[int], *strides: Sequence[int],
) -> tuple[Arguments, str] | None:  # fmt: skip
    """Return the arguments for such tensors without pointers, and the function that takes them.

    None if the tensors do not fit together or are too wide.
    """
    (b, h, n_queries, d), (_, key_heads, n_keys, dv) = q, v
    if k != (b, key_heads, n_keys, d) or v[0] != b or 0 in q or 0 in v or h % key_heads or max(d, dv) > LARGEST_HEAD:
        return None
    low, high = in_reach(band, n_queries + n_keys)  # the library allocates memory by its width
    qs, ks, vs = (x[:3] for x in strides)
    arguments = Arguments(
        b=b, h=h, hkv=key_heads, nq=n_queries, nk=n_keys, d=d, dv=dv, qs=qs, ks=ks, vs=vs, low=low, high=high, bin_q=1,
        bin_k=1, scale=d**-0.5 if scale is None else scale,
    )  # fmt: skip
    if dtype != torch.float32:
        return arguments, f"qkv_attend_{str(dtype).removeprefix('torch.')}"
    return arguments, "qkv_decode" if _in_place(h, key_heads, n_queries, n_keys) else "qkv_attend"


def of_tensors(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, band: tuple[float, float], dtype: torch.dtype | None = None
) -> Prepared | None:
    """Return dot products of tensors (b, h, n, d), times `scale`, in a band; None if the library cannot take them.

    They are made in `dtype`, or as `products` says; `scale` is 1/√d if None.
    """
    if dtype is None:
        dtype = torch.float32 if q.dtype is torch.float32 else products(q, k, v)
    strides = q.stride(), k.stride(), v.stride()
    if not (q.dtype is k.dtype is v.dtype is dtype and strides[0][3] == strides[1][3] == strides[2][3] == 1):
        q, k, v = _in_memory(q, dtype), _in_memory(k, dtype), _in_memory(v, dtype)
        strides = q.stride(), k.stride(), v.stride()
    layout = _layout(dtype, scale, band, q.shape, k.shape, v.shape, *strides)
    if layout is None or isinstance(library.compiled(), str):
        return None
    arguments = Arguments.from_buffer_copy(layout[0])
    arguments.q, arguments.k, arguments.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    arguments.threads = torch.get_num_threads()
    return Prepared(arguments, [q, k, v], layout[1])


def prepared(call: Call, dtype: torch.dtype | None = None) -> Prepared:
    """Return the arguments of a call for which there is no `unsupported_reason`; `dtype` as of `of_tensors`."""
    visibility = _visibility(call)
    assert visibility is not None
    band, keep, cells = visibility
    arguments = of_tensors(call.q, call.k, call.v, call.factor / call.normalizer.temperature, band, dtype)
    assert arguments is not None
    if keep is not None:
        arguments.with_tensors(keep=keep)
    if call.sink is not None:
        sink = call.sink.detach().float().expand(call.q.shape[:3])
        arguments.with_tensors(sinks=sink, ss=sink.stride())
    normalizer = call.normalizer
    if not normalizer.has_lse:
        arguments.arguments.normalizer = NORMALIZERS[str(normalizer.form)]
        arguments.arguments.by_sum = normalizer.divide == "sum"
        if normalizer.form == "entmax":  # two of its powers have numbers of their own
            power = 1 / (vars(normalizer)["alpha"] - 1)
            arguments.arguments.power = power
            arguments.arguments.normalizer += {1.0: 0, 2.0: 1}.get(power, 2)
        if normalizer.form in ("entmax", "softpick"):  # levels need packed keys
            arguments.function = arguments.function.replace("decode", "attend")
        for name, strides_of, x in (("shift", "hs", call.shift), ("divisor", "ds", call.divisor)):
            if x is not None:
                numbers = x.detach().float().expand(call.q.shape[:3])
                arguments.with_tensors(**{name: numbers, strides_of: numbers.stride()})
    if cells is not None:
        status = cells.status
        strides = tuple(0 if n == 1 else step for n, step in zip(status.shape[:2], status.stride(), strict=False))
        arguments.heads = status.shape[1]
        arguments.with_tensors(cells=status, bits=cells.bits, cs=strides, widest=int((status != 0).sum(3).max()))
    if call.biases:
        arguments.with_biases(call.biases, call.normalizer.temperature)
    return arguments


LOGS = ("log sigmoid", "log elu + 1")
"""The forms of biases that are logarithms of weights, whose numbers follow that of a soft cap."""


class _Step(ctypes.Structure):
    """`Bias` of attention.c."""

    _fields_ = (
        ("kind", I64), ("values", P), ("strides", I64 * 4), ("rows", P), ("row_strides", I64 * 2),
        ("factor", ctypes.c_float),
    )  # fmt: skip


def _steps(biases: Sequence[Bias], temperature: float) -> tuple[Any, list[Tensor]]:
    """Return bound biases in the library's form, and their tensors."""
    steps, held = (_Step * len(biases))(), list[Tensor]()
    for step, bias in zip(steps, biases, strict=True):
        step.factor = math.log2(math.e) / temperature
        if bias.form == "cap":
            step.kind, step.factor = 3, vars(bias)["cap"] * step.factor
            continue
        if bias.form in LOGS:
            step.kind, step.factor = 4 + LOGS.index(bias.form), 1 / vars(bias)["normalizer"].temperature
            continue
        if bias.form == "difference":
            rows, columns = (x.detach().double() for x in bias.tensors().values())
            x, of_rows = _two_parts(columns[..., 0, :], -2), _two_parts(rows[..., 0], -1)
            step.kind, step.strides, step.rows = 2, (*_strides(x)[:2], x.stride(2), 1), of_rows.data_ptr()
            step.row_strides, step.values = _strides(of_rows)[:2], x.data_ptr()
            held += [x, of_rows]
            continue
        assert isinstance(bias, SingleTensorBias)
        if bias.form == "distance":
            x = torch.nn.functional.pad(bias.tensor.detach().float().flip(1), (0, PADDING))
            step.kind, step.strides = 0, (0, 0 if len(x) == 1 else x.stride(0), 0, 1)
        else:
            x = bias.tensor.detach().float()
            x = x if x.shape[3] == 1 or x.stride(3) == 1 else x.contiguous()
            step.kind = 1
            step.strides = _strides(x)
        step.values = x.data_ptr()
        held.append(x)
    return steps, held


def _strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, 0 where it broadcasts."""
    return tuple(0 if n == 1 else y for n, y in zip(x.shape, x.stride(), strict=True))


def _two_parts(x: Tensor, dim: int) -> Tensor:
    """Return float64 numbers as a float32 and what its rounding leaves, along a new dimension."""
    first = x.float()
    return torch.stack([first, (x - first).float()], dim)


def forward(call: Call) -> tuple[Float[Tensor, "b h nq dv"], Float[Tensor, "b h nq"]] | None:
    """Return the output and a number of each row, without statistics; None if a score or an output is not finite.

    The number is the log-sum-exp, the level, or the sum that the weights are divided by.
    """
    if call.normalizer.form == "identity" and not is_finite(call):  # the library does not see the lowest scores
        return None
    arguments = prepared(call)
    out, lse = arguments.output(), empty(*call.q.shape[:3])
    arguments.with_tensors(lse=lse)
    return (out.to(call.v.dtype), lse) if run(arguments.function, arguments.arguments) else None


def run(function: str, arguments: Arguments | Gradients) -> bool:
    """Compute attention, or its gradients, by a function of the library.

    False if a score or an output is not finite: the results are not to be used.
    """
    status: int = getattr(library.compiled(), function)(arguments)
    if status == 1:
        c = arguments.call if isinstance(arguments, Gradients) else arguments
        raise MemoryError(f"attention of {c.nq} queries and {c.nk} keys needs more memory than there is")
    return status == 0


Visibility = tuple[tuple[int, int], Bool[Tensor, "b nk"] | None, MaskBits | None]


def _visibility(call: Call) -> Visibility | None:
    """Return the parts of a call's mask as the library takes them, found once; None if its bits need too much memory.

    They are the least and the largest distance of a visible key before its query, the keys that are not masked for all
    queries, and the cells of 64 × 64 pairs; a pair is visible where all of them say so.
    """
    cache, grid = vars(call), call.grid
    if "native visibility" not in cache:
        (low, high), keys, others = parts(call.mask, grid)
        keys = None if keys is None else keys.expand(grid.batch, grid.n_keys).contiguous()
        cells = None
        if others:
            other = functools.reduce(And, others)
            cells = cached_for_mask(
                other, grid, "native bits", lambda: mask_bits(other, grid, LARGEST_MASK), lambda x: x.nbytes if x else 0
            )
        fits = cells is not None or not others
        band = in_reach((low, high), grid.n_queries + grid.n_keys)
        cache["native visibility"] = (band, keys, cells) if fits else None
    seen: Visibility | None = cache["native visibility"]
    return seen


def row_state(call: Call, numbers: Float[Tensor, "b h nq"]) -> RowState:
    """Return the state of the rows of a call from the number of each row that the library writes."""
    if isinstance(call.normalizer, SumToOne):
        return RowState(numbers)
    return RowState(total=numbers) if call.normalizer.divide == "sum" else RowState()


def ranges_of(mask: Mask, grid: Grid) -> Tensor | None:
    """Return the keys of each query inside a mask as ranges that do not overlap (ranges, 2, 1 or b, nq); else None."""

    def ranges() -> Tensor | None:
        spans: list[tuple[Tensor, Tensor]] = []
        for part in mask.alternatives():
            keys = part.key_mask(grid)
            if part.band is not None:
                low, high = in_reach(part.band, grid.n_queries + grid.n_keys)
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
