"""Kernels: implementations of one attention call, and the choice between them.

A kernel is a module with ``unsupported_reason(call)``, which returns the reason why it cannot serve a call or None,
and ``forward(call)``, which computes it. Kernels do not import one another.

They import the engine and the library. Read this file, then `tiled.py`, which serves every call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, TypeVar, cast

import torch

from qkv.engine import sharded
from qkv.engine.call import Call, at_least_float32
from qkv.engine.modes import recorded, shape_only
from qkv.engine.sharded import Shared
from qkv.engine.sizes import sizes
from qkv.errors import InputError
from qkv.kernels import eager, flex, fused, linear, native, reference, tiled
from qkv.kernels.native_call import FEW_ROWS, is_finite
from qkv.normalizers import SumToOne
from qkv.results import Result

__all__ = ["KERNELS", "Call", "Result"]
__dir__ = __all__.copy


KERNELS: dict[str, ModuleType] = {
    "linear": linear,
    "native": native,
    "fused": fused,
    "flex": flex,
    "tiled": tiled,
    "eager": eager,
    "reference": reference,
}
"""All kernels by the name that `attend` takes. Add your own kernel here."""

PREFERENCE = {  # in order of preference, with the reason that `plan` shows
    "linear": "the weights are products of features: time and memory linear in the sequence",
    "native": "the compiled library, one pass over the visible blocks: linear memory, the fastest on CPU",
    "fused": "torch's FlashAttention or memory-efficient kernel, one launch: linear memory, the fastest on CUDA",
    "flex": "FlexAttention, compiled for this composition: linear memory, almost any mask, bias and normalizer on CUDA",
    "tiled": "any composition in linear memory: tiles of plain tensor operations",
    "eager": "forms the weights: quadratic memory, every derivative by autograd",
}
FORM_WEIGHTS = ("eager", "reference")
FEW_REASON = "so few scores that forming the weights is the fastest"


def _few_scores(call: Call) -> bool:
    n_queries, n_keys = call.q.shape[2], call.k.shape[2]
    return n_queries == 1 or n_queries * n_keys <= sizes(call.q.device).few_scores


F = TypeVar("F", bound=Callable[..., object])
Watcher = Callable[[Call | Shared, Result], None]
Server = Callable[[Any, Callable[[Any], Result], bool], Result]
_SERVERS: ContextVar[tuple[list[Server | None], ...]] = ContextVar("qkv servers", default=())


def _server() -> Server | None:
    servers = _SERVERS.get()
    return servers[-1][0] if servers else None


@contextmanager
def serving(server: Server | None) -> Iterator[None]:
    """Let `server` return the result of every call inside, on this thread; None for the kernel's own result.

    It gets the call, a function that computes the result of this or another call, and whether it may compute the result
    in another way: not if a kernel was requested by name, or more than the output. Calls are watched, profiled and
    edited in this way only. Contexts may end in any order: each takes its own server away.
    """
    entry = [server]
    _SERVERS.set((*_SERVERS.get(), entry))
    try:
        yield
    finally:
        _SERVERS.set(tuple(x for x in _SERVERS.get() if x is not entry))


def watching(watcher: Watcher) -> AbstractContextManager[None]:
    """Open a context in which `watcher` is called with every call and its result, on this thread."""
    return _intercepting(lambda call: call, watcher)


def changing(change: Callable[[Call], Call]) -> AbstractContextManager[None]:
    """Open a context in which `change` replaces every call, on this thread, before it is served."""
    return _intercepting(change, lambda call, result: None)


def _intercepting(change: Callable[[Any], Any], watcher: Watcher) -> AbstractContextManager[None]:
    """Open a context in which the server of the context around it, such as an edit, gets every call after `change`."""

    def server(call: Any, compute: Callable[[Any], Result], fused: bool) -> Result:
        servers, call = [entry[0] for entry in _SERVERS.get()], change(call)
        at = servers.index(server)
        around = servers[at - 1] if at else None
        result = compute(call) if around is None else around(call, compute, fused)
        watcher(call, result)
        return result

    return serving(server)


def watched() -> bool:
    """Return whether calls are watched, profiled or edited. Inside compiled code they are not."""
    return not torch.compiler.is_compiling() and _server() is not None


def opaque(function: F) -> F:
    """Keep the compiler from tracing `function`, whose tiles and caches it cannot fuse, as `torch.compiler.disable`.

    `torch.compiler.disable` is applied only once torch._dynamo has been imported, because that import is slow.
    """
    disabled: list[F] = []

    @functools.wraps(function)
    def run(*args: object, **named: object) -> object:
        if not disabled:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **named)
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **named)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]  # nor is the wrapper traced
    return cast(F, run)


def serve(
    call: Call, kernel: str = "auto", *, weights: bool = False, compute: Callable[[Call], Result] | None = None
) -> Result:
    """Compute `call` on the chosen kernel. All attention passes here, so this is where calls are watched and edited.

    `compute` computes the result of a call, if it is more than that of `attention`.
    """
    server = _server()
    if server is None:
        return attention(call, kernel, weights=weights) if compute is None else compute(call)
    fused = kernel == "auto" and not weights and compute is None
    return server(call, compute or functools.partial(attention, kernel=kernel, weights=weights), fused)


def attention(call: Call, kernel: str = "auto", *, weights: bool = False) -> Result:
    """Compute a call on the chosen kernel, or, if its scores or outputs are not finite, on one that takes them."""
    if shape_only(call.q):
        return _shapes(call, weights=weights)
    if recorded():
        return _recorded(call, kernel)
    result: Result | None = KERNELS[pick(call, kernel, weights=weights)].forward(call)
    if result is None and kernel != "auto":
        raise InputError(
            f"kernel={kernel!r} cannot serve this call: q, k or v hold NaN, infinity or numbers so large that scores "
            "overflow; expected finite numbers, or kernel='tiled'"
        )
    return tiled.forward(call) if result is None else result


def _shapes(call: Call, *, weights: bool) -> Result:
    """Return the result of tensors without numbers."""
    shape, dtype = call.q.shape[:3], at_least_float32(call.q.dtype)
    out = call.v.new_empty(*shape, call.v.shape[3])
    if call.needs_grad:
        out = out + sum(0 * x.sum() for x in call.tensors().values() if x.requires_grad)
    lse = call.q.new_empty(shape, dtype=dtype) if call.user.normalizer.has_lse else None
    return Result(out, lse, call.q.new_empty(*shape, call.k.shape[2]) if weights else None)


def _recorded(call: Call, kernel: str) -> Result:
    """Return the result in a program that torch records, which has no decisions by numbers."""
    if kernel not in ("auto", "eager"):
        raise InputError(f"kernel is {kernel!r} in a program that torch records, expected 'auto' or 'eager'")
    if torch._C._is_tracing() and isinstance(call.normalizer, SumToOne) and not call.normalizer.has_lse:
        raise InputError(
            f"normalizer is {type(call.normalizer).__name__}, whose rows are solved in as many steps as their numbers "
            "need, so that torch.jit.trace cannot record it; expected Softmax or a Pointwise normalizer"
        )
    try:
        return eager.forward(call)
    except RuntimeError as error:
        if "DataDependent" not in type(error).__name__:
            raise
        raise InputError(
            "normalizer or mask of this call decides by numbers, so torch.export cannot record it; expected another "
            "composition, such as a Softmax"
        ) from error


BLOCK_KERNELS = ("native", "flex", "tiled")  # kernels for the blocks of a sharded call, in order of preference
BLOCK_KERNELS_WITH_GRADIENTS = ("native", "tiled")  # with gradients of a block from the row's out and lse


def serve_shared(shared: Shared, kernel: str = "auto") -> Result:
    """Compute a call that is sharded over a group of processes; `kernel` computes each block."""
    if kernel != "auto" and kernel not in BLOCK_KERNELS:
        raise InputError(
            f"kernel is {kernel!r} with a group, expected 'auto' or one of {', '.join(map(repr, BLOCK_KERNELS))}"
        )
    if kernel != "auto":
        pick(shared.call, kernel)
    compute = functools.partial(sharded.run, choose=functools.partial(_block_kernel, kernel))
    server = _server()
    return compute(shared) if server is None else server(shared, compute, False)


def _block_kernel(kernel: str, call: Call, wanted: set[str]) -> ModuleType:
    """Return the kernel for a block of a sharded call, of which the tensors named in `wanted` need gradients."""
    names = BLOCK_KERNELS_WITH_GRADIENTS if wanted else BLOCK_KERNELS
    for name in (kernel,) if kernel in names and kernel != "native" else names:  # native refuses NaN and infinity
        if name == "native" and not (wanted.isdisjoint(call.learned) and is_finite(call)):
            continue
        if _unsupported_reason(name, call, chosen=kernel == name) is None:
            return KERNELS[name]
    raise AssertionError("tiled serves every block, and a kernel requested by name was checked for the whole call")


def _unsupported_reason(name: str, call: Call, *, weights: bool = False, chosen: bool = True) -> str | None:
    """Return why a kernel cannot serve a call; unless it is `chosen` by name, also why it should not."""
    if weights and name not in FORM_WEIGHTS:
        return "it never forms the weights, which were requested"
    why: str | None = KERNELS[name].unsupported_reason(call)
    if why is None and name == "flex" and call.q.device.type != "cuda" and not chosen:
        return "it forms all scores unless on CUDA: for tests"
    few = call.q.shape[2] * call.q.shape[1] <= FEW_ROWS * call.k.shape[1]
    if why is None and name == "native" and few and call.normalizer.form in ("entmax", "softpick") and not chosen:
        return f"few queries of {call.normalizer.form}: their weights are formed without packing the keys"
    return why


def pick(call: Call, kernel: str, *, weights: bool = False) -> str:
    """Return the kernel that serves `call`: the requested one, or for ``"auto"`` the first of `PREFERENCE` that can."""
    if kernel != "auto" and kernel not in KERNELS:
        raise InputError(f"kernel is {kernel!r}, expected 'auto' or one of {', '.join(map(repr, KERNELS))}")
    why, names = None, [kernel]
    if kernel == "auto":  # the best first; with few scores, forming the weights is better than tiles
        names = sorted(PREFERENCE, key=lambda name: name == "tiled") if _few_scores(call) else list(PREFERENCE)
    for name in names:
        why = _unsupported_reason(name, call, weights=weights, chosen=kernel != "auto")
        if why is None:
            return name
    if kernel == "auto":
        raise InputError(
            f"kernel is 'auto', but no kernel can serve this call: {KERNELS['eager'].unsupported_reason(call)}"
        )
    raise InputError(f"kernel={kernel!r} cannot serve this call: {why}")


def choose(call: Call, kernel: str, *, weights: bool = False) -> tuple[str, str, dict[str, str]]:
    """Return the kernel that serves `call`, the reason, and the reason against each other kernel."""
    chosen, auto = pick(call, kernel, weights=weights), kernel == "auto"
    whys = {name: _unsupported_reason(name, call, weights=weights, chosen=not auto) for name in KERNELS}
    if not auto:
        return chosen, "requested by name", {name: why for name, why in whys.items() if why is not None}
    few = chosen == "eager" and not weights and _few_scores(call)
    other = {name: "slower" if name in PREFERENCE else "the specification: for tests and reading" for name in KERNELS}
    rejected = {name: why or other[name] for name, why in whys.items() if name != chosen}
    return chosen, FEW_REASON if few else PREFERENCE[chosen], rejected
