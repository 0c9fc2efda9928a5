"""What the Triton kernels compile to, without a card: registers, spills, shared memory, instructions for each score.

Triton carries the assembler and the disassembler of CUDA. A loop over tiles is found by its branch back; its
instructions are counted for each score of a tile, by the pipe that executes them, and an estimate of the cycles of a
score follows from how many threads of a streaming multiprocessor execute one at a time. It knows neither waiting nor
memory, so that it is a lower bound.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POINTERS = {
    "fp32": "lse total_lse received audience pooled norms distances sink found mass prefix largest_norm smallest",
    "i64": "sums argmax",
    "fp64": "totals",
    "i32": "firsts bands ids query_counts key_counts",
    "i8": "counted keys dense band_keys",
}
FLOATS = "scale", "unit", "cap"
EVEN = "d", "dv", *(f"stride_{x}{y}" for x in "qkv" for y in "bhn")  # Triton is told which numbers 16 divides
OFF: dict[str, Any] = {
    **dict.fromkeys(
        ("HAS_KEYS", "HAS_IDS", "HAS_DENSE", "HAS_DISTANCE", "HAS_SINK", "HAS_COUNTED", "HAS_NORMS", "HAS_LOWS"), False
    ),
    **{
        "HAS_BAND": True,
        "CAP": 0,
        "BOTH_SIDES": False,
        "POOLED": 0,
        "POOL_M": 1,
        "POOL_N": 1,
        "PLANES": 6,
        "STEP": 2048,
    },
    **{"FLUSH": 1, "EVEN_D": True, "OUTPUT": True, "MASSES": 2, "MASS_KEYS": True, "WIDEN": False, "CARD": True},
}
PROFILE = {"HAS_NORMS": True, "PLANES": 9, "POOLED": 2, "POOL_M": 64, "POOL_N": 128, "STEP": 512, "FLUSH": 4}
EVERY = {
    **dict.fromkeys(("HAS_KEYS", "HAS_IDS", "HAS_DENSE", "HAS_DISTANCE", "HAS_SINK", "HAS_COUNTED", "HAS_NORMS"), True),
    **{"CAP": 2, "BOTH_SIDES": True, "HAS_LOWS": True, "POOLED": 1, "POOL_M": 64, "POOL_N": 32, "PLANES": 13},
}

PIPES = {  # the first pattern that an instruction matches
    "tensor": "HGMMA|HMMA|UTC.*MMA",
    "exponential": r"MUFU\.EX2",
    "other MUFU": "MUFU",
    "FMA": "FFMA|FADD|FMUL",
    "float64": "D(FMA|ADD|MUL|SETP|MNMX)",
    "conversions": "F2F|F2I|I2F|I2FP|F2FP",
    "spills": "LDL|STL",
    "shuffles": "SHFL|REDUX",
    "shared": "LDS|STS|LDSM|STSM|BAR|DEPBAR|SYNCS|WARPGROUP|FENCE|MEMBAR",
    "memory": "LDG|STG|RED|ATOM|UTMA|LDT|STT",
    "uniform": "U",
    "integer, moves, comparisons": "",
}
THREADS = {"exponential": 16, "other MUFU": 16, "conversions": 16, "shuffles": 32, "FMA": 128}
"""Threads of a streaming multiprocessor that execute an instruction in a cycle (CUDA C++ Programming Guide, arithmetic
instructions, for 8.0 and 9.0); 128 instructions of any kind are issued for threads in a cycle."""
ISSUED = 128
TENSOR = {80: 1024, 90: 2048, 100: 4096}
"""Multiplications with an addition of bfloat16 numbers in a cycle of a streaming multiprocessor, dense."""


REACHED = {64: 0.50, 128: 0.66, 256: 0.75}
"""Part of the peak that FlashAttention-3 reaches in a forward without a mask on an H100, by head dimension: 497 and 648
of 989 Tflop/s, and three quarters (Shah et al. 2024, arXiv:2407.08608, abstract and figure 5)."""


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for a card."""

    registers: int
    stack: int
    shared: int
    warps: int
    loops: tuple[dict[str, float], ...]
    """Instructions for each score of the innermost loops over tiles, by pipe; the shortest first."""
    additions: frozenset[str]
    """Types of the numbers that atomic additions add."""

    def cycles(self, d: int, capability: int) -> dict[str, float]:
        """Cycles of a streaming multiprocessor for 1,000 scores of the shortest loop, by what limits them."""
        loop = self.loops[0]
        pipes = {name: 1000 * loop.get(name, 0.0) / threads for name, threads in THREADS.items() if name in loop}
        return {"issue": 1000 * sum(loop.values()) / ISSUED, "tensor": 1000 * d / TENSOR[capability], **pipes}


def compiled(
    name: str, options: Mapping[str, Any], *, d: int = 128, dtype: str = "bf16", capability: int = 90
) -> Compiled:
    """Compile a kernel of `qkv.statistics.triton.kernels` with some of its options on."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qkv.statistics.triton import host, kernels

    kernel = getattr(kernels, name)
    of_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    of_card = divmod(capability, 10)
    tile = host.forward_options(d, of_dtype) if name == "forward" else host.statistics_options(d, of_dtype, of_card)
    names = [p.name for p in kernel.params]
    if name in ("masses", "prefix_scores"):
        tile["BN"] = min(tile["BN"], 64)
    every = OFF | tile | {"D": d, "DV": d, "STAGES": tile["num_stages"]} | dict(options)
    every["POOL_N"] = min(every["POOL_N"], every["BN"])
    constants = {n: x for n, x in every.items() if n in names}
    pointers = {n: element for element, all_names in POINTERS.items() for n in all_names.split()}
    pointers |= dict.fromkeys(("q", "k", "v", "out"), dtype)
    types = {
        n: "constexpr" if n in constants else f"*{pointers[n]}" if n in pointers else "fp32" if n in FLOATS else "i32"
        for n in names
    }
    even = [n for n in names if n in EVEN or types[n].startswith("*")]
    source = ASTSource(
        kernel, types, {(names.index(n),): x for n, x in constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in even},
    )  # fmt: skip
    settings = {n: x for n, x in tile.items() if n.islower()}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=settings)
    code, usage = disassembled(made.asm["cubin"])
    number = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    scores = constants["BM"] * constants["BN"] / (32 * made.metadata.num_warps)
    atomics = re.findall(r"tt\.atomic_rmw (\w+), .*?: \(tensor<[^>]*>?[^>]*>, tensor<(?:\d+x)*(\w+)", made.asm["ttgir"])
    return Compiled(
        number["REG"], number["STACK"], made.metadata.shared, made.metadata.num_warps,
        tuple({pipe: n / scores for pipe, n in loop.items()} for loop in loops(code)),
        frozenset(element for operation, element in atomics if "add" in operation),
    )  # fmt: skip


def disassembled(cubin: bytes) -> tuple[str, str]:
    """Return the instructions of a compiled kernel, and the registers and memory that it uses."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        commands = [tools / "nvdisasm", "-c", path], [tools / "cuobjdump", "--dump-resource-usage", path]
        code, usage = (subprocess.run(x, capture_output=True, text=True, check=True).stdout for x in commands)
    return code, usage


def loops(code: str) -> list[Counter[str]]:
    """Count the instructions of the innermost loops with a matrix product, by pipe; the shortest loop first."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_\S+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?);", line):
            lines.append(instruction[1])
    ends = ((i, re.search(r"BRA.*`\((\.L_[^)]+)\)", line)) for i, line in enumerate(lines))
    spans = [(labels[to[1]], i) for i, to in ends if to and labels.get(to[1], i + 1) <= i]
    spans = [(a, b) for a, b in spans if any(re.match(PIPES["tensor"], x) for x in lines[a : b + 1])]
    inner = [(a, b) for a, b in spans if not any((a, b) != (c, e) and a <= c and e <= b for c, e in spans)]
    return sorted((Counter(map(pipe, lines[a : b + 1])) for a, b in inner), key=Counter.total)


def pipe(instruction: str) -> str:
    """Return the pipe of an instruction.

    >>> pipe("MUFU.EX2 R1, R2"), pipe("FFMA R1, R2, R3, R4"), pipe("ISETP.GE.AND P0, PT, R1, R2, PT")
    ('exponential', 'FMA', 'integer, moves, comparisons')
    """
    return next(name for name, pattern in PIPES.items() if re.match(pattern, instruction))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "statistics, causal": ("statistics", {}),
    "statistics with map and norms, causal": ("statistics", PROFILE),
    "statistics, full attention": ("statistics", {"HAS_BAND": False, "BOTH_SIDES": True, "PLANES": 8}),
    "statistics, every option": ("statistics", EVERY),
    "forward, every option": ("forward", EVERY),
    "masses, every option": ("masses", EVERY),
    "prefix_scores, every option": ("prefix_scores", EVERY),
    "by_row, every option": ("by_row", EVERY),
}
SHAPES = ("bf16", 128), ("bf16", 64), ("bf16", 256), ("fp32", 64)


def table(capabilities: Iterable[int]) -> Iterator[str]:
    """Make the lines of a table of all kernels: of every shape for the first two cases, of one for the others."""
    yield (
        "| kernel | for | head | registers | stack, bytes | shared, KiB | warps of 64 | instructions for each score "
        "| of them FMA | cycles for 1,000 scores, at least | with a forward / forward |"
    )
    yield "|---|---:|---|---:|---:|---:|---:|---:|---:|---|---:|"
    for capability in capabilities:
        for at, (title, (name, options)) in enumerate(CASES.items()):
            for dtype, d in SHAPES if at < 2 else SHAPES[:1]:
                try:
                    made = compiled(name, options, d=d, dtype=dtype, capability=capability)
                except (RuntimeError, subprocess.CalledProcessError) as error:
                    yield f"| {title} | {capability / 10} | {dtype}, {d} | {type(error).__name__} |" + " – |" * 7
                    continue
                head = f"| {title} | {capability / 10} | {dtype}, {d} | {made.registers} | {made.stack} "
                head += f"| {made.shared / 1024:.0f} | {resident(made, capability)} |"
                if not made.loops:
                    yield head + " – |" * 4
                    continue
                loop, cycles = made.loops[0], made.cycles(d, capability)
                shown = ", ".join(f"{pipe} {cycles[pipe]:.0f}" for pipe in ("issue", "tensor", "exponential"))
                ratio = (
                    f"{ratio_to_forward(made, d, capability):.2f}" if name == "statistics" and dtype == "bf16" else "–"
                )
                yield f"{head} {sum(loop.values()):.1f} | {loop['FMA']:.1f} | {shown} | {ratio} |"


def resident(made: Compiled, capability: int) -> int:
    """Return how many warps a streaming multiprocessor holds at a time."""
    registers = 32 * made.warps * math.ceil(max(made.registers, 1) / 8) * 8
    room = {80: 164, 90: 228, 100: 228}[capability] * 1024
    return made.warps * min(65536 // registers, room // (made.shared + 1024), 64 // made.warps)


def ratio_to_forward(made: Compiled, d: int = 128, capability: int = 90) -> float:
    """Estimate (forward + statistics) / forward, both without waiting.

    A forward has two matrix products of a score, and reaches the `REACHED` part of the peak; the statistics take what
    their slowest pipe takes.
    """
    forward = 1000 * 2 * d / TENSOR[capability] / REACHED[d]
    return 1 + max(made.cycles(d, capability).values()) / forward


def main(capabilities: Iterable[int]) -> None:
    """Print the table."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET is 1, expected 0: the interpreter compiles nothing")
    for line in table(capabilities):
        print(line, flush=True)
