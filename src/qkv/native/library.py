"""The compiled library: loading it, the structures that its functions take, and its reductions of plain tensors.

The package's build compiles it (hatch_build.py). Every argument is checked before the library gets a pointer.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.native import LIBRARY, MISSING, described

MULTIPLIED = {5: (torch.bfloat16,), 6: (torch.bfloat16, torch.float16)}
"""By level of `INSTRUCTIONS`, the dtypes that are multiplied without conversion to float32."""
GRADED = {6: (torch.bfloat16, torch.float16)}
"""The same of gradients."""
MOST_EIGENVALUES = 4  # that the library finds of a matrix

CPU = torch.device("cpu")
P, I64 = ctypes.c_void_p, ctypes.c_int64


class Arguments(ctypes.Structure):
    """`Call` of attention.c."""

    _fields_ = (
        *((name, P) for name in ("q", "k", "v")), *((name, I64) for name in ("b", "h", "hkv", "nq", "nk", "d", "dv")),
        *((name, I64 * 3) for name in ("qs", "ks", "vs")), ("scale", ctypes.c_float), ("threads", ctypes.c_int32),
        ("low", I64), ("high", I64), ("keep", P), ("cells", P), ("cs", I64 * 2), ("widest", I64),
        *((name, P) for name in ("bits", "visible", "visible_queries")), ("visible_heads", I64), ("biases", P),
        ("n_biases", I64), ("counted", P), ("firsts", P), ("sinks", P), ("ss", I64 * 3),
        ("normalizer", I64), ("power", ctypes.c_float), ("by_sum", ctypes.c_int32), ("shift", P), ("hs", I64 * 3),
        ("divisor", P), ("ds", I64 * 3),
        ("norms", P), ("ns", I64 * 2), ("ranges", P), ("n_ranges", I64), ("range_batch", I64),
        *((name, P) for name in ("out", "lse", "rows", "min_logit", "argmax", "received", "prefix", "map")),
        *((name, I64) for name in ("n_prefix", "bin_q", "bin_k")),
    )  # fmt: skip


class BiasGradient(ctypes.Structure):
    """`BiasGradient` of gradients.c."""

    _fields_ = (("kind", I64), ("sums", P), ("strides", I64 * 3), ("rows", P))


class Gradients(ctypes.Structure):
    """`Gradients` of gradients.c."""

    _fields_ = (
        ("call", Arguments), ("grad_out", P), ("gs", I64 * 3),
        *((f"grad_{name}", P) for name in ("lse", "entropy", "effective", "distance", "received", "masses")),
        *((name, P) for name in ("entropy", "effective", "distance", "masses", "mass")), ("biases", P),
        ("in_order", I64), *((name, P) for name in ("dq", "dk", "dv", "dsinks", "dshift")),
        *((name, P) for name in ("grad_sinks", "grad_max_logit", "argmax")),
    )  # fmt: skip


class Pool(ctypes.Structure):
    """`Pool` of reductions.c."""

    _fields_ = (
        ("weights", P), *((name, I64) for name in ("count", "nq", "nk", "bin_q", "bin_k")), ("most", P), ("mean", P),
        ("threads", I64),
    )  # fmt: skip


class Spectra(ctypes.Structure):
    """`Spectra` of reductions.c."""

    _fields_ = (("matrices", P), *((name, I64) for name in ("count", "n", "few")), ("shares", P), ("threads", I64))


class Nodes(ctypes.Structure):
    """`Nodes` of nodes.c."""

    _fields_ = (
        ("scores", P), *((name, I64) for name in ("rows", "n", "threads")), ("first", P), ("step", P), ("counts", P)
    )  # fmt: skip


N_NODES = 69  # as in nodes.c
FUNCTIONS = {
    "attend": Arguments, "decode": Arguments, "gradients": Gradients, "pool": Pool, "eigenvalues": Spectra,
    "nodes": Nodes,
}  # fmt: skip


@functools.cache
def compiled() -> ctypes.CDLL | str:
    """Return the compiled library, or in one sentence why there is none."""
    if not LIBRARY.exists():
        return MISSING
    try:
        found = ctypes.CDLL(str(LIBRARY))  # torch, imported above, brings the OpenMP runtime that it uses
        for name, arguments in FUNCTIONS.items():
            function = getattr(found, f"qkv_{name}")
            function.argtypes, function.restype = [ctypes.POINTER(arguments)], ctypes.c_int
        for dtype in MULTIPLIED.get(found.qkv_level(), ()):
            getattr(found, f"qkv_attend_{str(dtype)[6:]}").argtypes = [ctypes.POINTER(Arguments)]
        for dtype in GRADED.get(found.qkv_level(), ()):
            getattr(found, f"qkv_gradients_{str(dtype)[6:]}").argtypes = [ctypes.POINTER(Gradients)]
    except (OSError, AttributeError) as error:
        return f"the native library {LIBRARY.name} cannot be loaded: {error}"
    return found


def description() -> str:
    """Return what computes attention with its statistics on CPU, in one sentence."""
    found = compiled()
    return described(reason=found) if isinstance(found, str) else described(found.qkv_level())


def empty(*shape: int) -> Tensor:
    """Return a tensor that the library writes to, whatever the default dtype and device of torch are."""
    return torch.empty(shape, dtype=torch.float32, device=CPU)


def leading_shares(matrices: Float[Tensor, "*b n n"], few: int) -> Float[Tensor, "*b few"]:
    """Return the `few` largest eigenvalues of symmetric positive semidefinite matrices, as shares of their trace.

    They are in descending order; 0 if there are fewer or a matrix is 0, and NaN if one is not finite. The library finds
    them by Householder reflections and bisection, with rounding errors like those of `torch.linalg.eigvalsh`.

    >>> [round(x, 6) for x in leading_shares(torch.diag(torch.tensor([0.0, 3.0, 1.0])), 2).tolist()]
    [0.75, 0.25]
    """
    if reduces(matrices) and few <= MOST_EIGENVALUES:
        shares, n = empty(*matrices.shape[:-2], few), matrices.shape[-1]
        reduce("eigenvalues", Spectra(
            matrices.data_ptr(), shares.numel() // few, n, few, shares.data_ptr(), threads(matrices.numel() * n)
        ))  # fmt: skip
        return shares
    finite = matrices.isfinite().all(-1).all(-1, keepdim=True)
    spread = torch.linalg.eigvalsh(torch.where(finite[..., None], matrices, 0).cpu())  # which is slow on a GPU
    spread = spread.flip(-1).clamp(min=0).to(matrices.device)
    shares = spread / spread.sum(-1, keepdim=True).clamp(min=torch.finfo(spread.dtype).tiny)
    return torch.nn.functional.pad(shares[..., :few], (0, max(0, few - shares.shape[-1]))).where(finite, torch.nan)


def nodes_of_rows(scores: Float[Tensor, "*n k"]) -> tuple[Float[Tensor, "*n nodes"], Float[Tensor, "*n nodes"]] | None:
    """Return nodes and counts such that Σⱼ f(scoreⱼ) is nearly Σ count · f(node) for every smooth f, by the library.

    Scores of −inf are left out. None if the library cannot compute them.
    """
    scores, (*shape, n) = scores.contiguous(), scores.shape
    if not reduces(scores):
        return None
    first, step, counts = empty(*shape, 1), empty(*shape, 1), empty(*shape, N_NODES)
    places = (x.data_ptr() for x in (first, step, counts))
    reduce("nodes", Nodes(scores.data_ptr(), first.numel(), n, threads(scores.numel()), *places))
    return first + step * torch.arange(N_NODES, dtype=torch.float32, device=CPU), counts


def reduces(x: Tensor) -> bool:
    """Return whether there is a library, and it reads a tensor."""
    usable = x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous() and x.numel() > 0
    return usable and not isinstance(compiled(), str)


def threads(operations: int) -> int:
    """Return how many threads reduce so many numbers."""
    return torch.get_num_threads() if operations > 100_000 else 1


def reduce(function: str, arguments: ctypes.Structure) -> None:
    """Call a reduction of plain tensors."""
    if getattr(compiled(), f"qkv_{function}")(arguments):
        raise MemoryError("a reduction of weights or keys needs more memory than there is")
