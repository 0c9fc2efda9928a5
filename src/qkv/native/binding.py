"""The compiled library of `attention.c`: loading it, and a call as the arguments that it takes.

The package's build compiles it (hatch_build.py). Without a compiler, `unsupported_reason` says so, and the tiles of
tensor operations serve every call. Every argument is checked here before the library gets a pointer.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from qkv._compiled import LIBRARY, MISSING, described
from qkv._engine.call import Call
from qkv._engine.transforms import transformed
from qkv.masks import Grid, Mask

LARGEST_HEAD = 256
LARGEST_SCORE = 1e28  # a masked pair has a score of −1e30

P, I64 = ctypes.c_void_p, ctypes.c_int64


class Arguments(ctypes.Structure):
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
        return MISSING
    try:
        found = ctypes.CDLL(str(LIBRARY))  # torch, imported above, brings the OpenMP runtime that it uses
        found.qkv_attend.argtypes, found.qkv_attend.restype = [ctypes.POINTER(Arguments)], ctypes.c_int
    except (OSError, AttributeError) as error:
        return f"the native library {LIBRARY.name} cannot be loaded: {error}"
    return found


def description() -> str:
    """What computes attention with its statistics on CPU, in one sentence."""
    found = library()
    return described(reason=found) if isinstance(found, str) else described(found.qkv_level())


def unsupported_reason(call: Call) -> str | None:
    """Why the library cannot compute a call, or None if it can."""
    if call.q.device.type != "cpu":
        return f"tensors are on {call.q.device.type}; the native library is for CPU"
    if isinstance(found := library(), str):
        return found
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
    if visible(call.mask, call.grid) is None:
        return f"the mask {type(call.mask).__name__} is not a band of the diagonal and masked keys"
    largest = [float(x.detach().abs().amax()) for x in (call.q, call.k)]
    if not (abs(call.scale) * call.q.shape[3] * math.prod(largest) < LARGEST_SCORE and math.isfinite(call.v.sum())):
        return "q, k or v hold NaN, infinity or numbers so large that scores overflow"
    if call.sink is not None and not bool((call.sink < LARGEST_SCORE).all()):
        return "a sink logit is NaN or infinite"
    return None


@dataclass(frozen=True, eq=False)
class Prepared:
    """A call as the library takes it."""

    arguments: dict[str, Any]
    band: tuple[int, int]
    """Least and largest distance of a visible key before its query."""
    keep: Bool[Tensor, "b nk"] | None
    """The keys that are not masked for all queries."""
    held: list[Tensor] = field(default_factory=list)
    """The tensors that pointers lead to."""

    def with_tensors(self, **more: Any) -> Arguments:
        """The call's arguments and `more`, in which a tensor stands for a pointer to it."""
        self.held.extend(x for x in more.values() if isinstance(x, Tensor))
        return Arguments(**self.arguments, **{name: pointer(x) for name, x in more.items()})


def pointer(x: Any) -> Any:
    """The address of a tensor's data; anything else as it is."""
    return x.data_ptr() if isinstance(x, Tensor) else x


def prepared(call: Call) -> Prepared:
    """The arguments of a call for which there is no `unsupported_reason`."""
    q, k, v = (x.detach() if x.stride(3) == 1 else x.detach().contiguous() for x in (call.q, call.k, call.v))
    (b, h, n_queries, d), (_, key_heads, n_keys, dv) = q.shape, v.shape
    found = visible(call.mask, call.grid)
    assert found is not None
    band, keep = found
    keep = None if keep is None else keep.expand(b, n_keys).contiguous()
    sink = None if call.sink is None else call.sink.detach().float().expand(b, h, n_queries)
    sizes = {"b": b, "h": h, "hkv": key_heads, "nq": n_queries, "nk": n_keys, "d": d, "dv": dv}
    strides = {
        "qs": q.stride()[:3],
        "ks": k.stride()[:3],
        "vs": v.stride()[:3],
        "ss": (0, 0, 0) if sink is None else sink.stride(),
    }
    held = {"q": q, "k": k, "v": v, "keep": keep, "sinks": sink}
    arguments = sizes | strides | {name: pointer(x) for name, x in held.items()}
    arguments |= {
        "scale": call.scale,
        "threads": torch.get_num_threads(),
        "low": band[0],
        "high": band[1],
        "bin_q": 1,
        "bin_k": 1,
    }
    return Prepared(arguments, band, keep, [x for x in held.values() if x is not None])


def run(function: Any, arguments: ctypes.Structure, call: Call) -> None:
    """Call a function of the library."""
    if function(arguments):
        raise MemoryError(
            f"attention of {call.q.shape[2]} queries and {call.k.shape[2]} keys needs more memory than there is"
        )


def visible(mask: Mask | None, grid: Grid) -> tuple[tuple[int, int], Bool[Tensor, "#b nk"] | None] | None:
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
    # The library allocates memory by the width of the band, which is 0 if nothing is visible.
    return (low, max(high, low - 1)), keys
