"""Kernels: ways to compute one attention call, and the choice among them.

A kernel is a module with ``why_not(call)``, which says why it cannot serve a call or returns None, and ``run(call)``,
which serves it. None imports another.
"""

from __future__ import annotations

from types import ModuleType

from qkv.call import Call
from qkv.errors import InputError
from qkv.kernels import eager, flash, flex, linear, loops, tiled

KERNELS: dict[str, ModuleType] = {
    "linear": linear,
    "flash": flash,
    "flex": flex,
    "tiled": tiled,
    "eager": eager,
    "reference": loops,
}

PREFERENCE = {  # in this order, with the reason each is worth having
    "linear": "the weights are products of features: time and memory linear in the sequence",
    "flash": "torch's fused kernel, folded over the visible parts: linear memory, the fastest on CPU",
    "flex": "FlexAttention, compiled for this composition: linear memory, the fastest on CUDA",
    "tiled": "any composition in linear memory: tiles of plain tensor operations",
    "eager": "forms the weights: quadratic memory, serves everything",
}
FORM_WEIGHTS = ("eager", "reference")


def choose(call: Call, kernel: str, *, weights: bool = False) -> tuple[str, str, dict[str, str]]:
    """The kernel that serves `call`, why, and why each of the others does not.

    A kernel named by the user serves or raises; ``"auto"`` takes the first of `PREFERENCE` that can.
    """
    if kernel != "auto" and kernel not in KERNELS:
        raise InputError(f"kernel is {kernel!r}, expected 'auto' or one of {', '.join(map(repr, KERNELS))}")
    rejected = {}
    for name, module in KERNELS.items():
        why = "it never forms the weights that were asked for" if weights and name not in FORM_WEIGHTS else None
        why = why or module.why_not(call)
        if why is not None:
            rejected[name] = why
    if kernel != "auto":
        if kernel in rejected:
            raise InputError(f"kernel={kernel!r} cannot serve this call: {rejected[kernel]}")
        return kernel, "asked for by name", rejected
    if call.q.device.type != "cuda" and "flex" not in rejected:
        rejected["flex"] = "it forms all scores unless on CUDA: for tests"
    chosen = next(name for name in PREFERENCE if name not in rejected)
    for name in KERNELS:
        if name != chosen and name not in rejected:
            rejected[name] = "slower" if name in PREFERENCE else "the oracle: for tests and reading"
    return chosen, PREFERENCE[chosen], rejected
