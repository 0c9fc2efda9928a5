"""Softmax attention and all statistics of its weights on CPU in one pass, by a compiled library.

This module names the library and says which instructions it uses, without loading it or torch.

It imports nothing of qkv. Read `attention.c`; `library.py` loads it, and `kernels/native.py` calls it.
"""

from __future__ import annotations

import platform
from pathlib import Path

LIBRARY = Path(__file__).parent / "attention.so"
MISSING = "the native library was not compiled when qkv was installed: there was no C compiler"
INSTRUCTIONS = {
    2: "SSE4.2", 3: "AVX2", 4: "AVX-512", 5: "AVX-512, bfloat16 products", 6: "AVX-512, AMX tiles",
    7: "AVX-512; the operating system does not allow the AMX tiles of this processor",
}  # fmt: skip
"""By level of x86-64, the instructions that the library uses; from 5 on it is level 4, and 5 has AMD's AVX512_BF16."""


def described(level: int | None = None, reason: str | None = None) -> str:
    """What computes attention with its statistics on CPU.

    `level` is that of `INSTRUCTIONS` which the library uses here, 0 on other processors, and `reason` is why it cannot
    be used; both are None if they are not known.

    >>> described(5)
    'the native library (AVX-512, bfloat16 products) computes attention with its statistics on CPU'
    >>> described(reason="there is no library")
    'there is no library; tiles of tensor operations serve'
    """
    if reason is None and level is None and not LIBRARY.exists():
        reason = MISSING
    if reason is not None:
        return f"{reason}; tiles of tensor operations serve"
    level_name = "" if level is None else f" ({INSTRUCTIONS.get(level, platform.machine())})"
    return f"the native library{level_name} computes attention with its statistics on CPU"
