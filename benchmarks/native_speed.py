"""Output with statistics, statistics alone and attention on CPU, beside torch's SDPA and compiled FlexAttention.

Every row calls the public functions, so it stays valid when another kernel serves. `python -m benchmarks native`
measures all rows. `python -m benchmarks.native_speed --quick` prints them for 2,048 tokens in place of 8,192, and with
`--flex` also those beside FlexAttention, which needs a C++ compiler. The rate of the two products of causal attention
stands beside that of a loop of fused multiply-adds in registers, which no product exceeds, and of torch's product.
"""

from __future__ import annotations

import ctypes
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import qkv
from benchmarks.mechanisms.timing import alternating, machine, median_ratio
from benchmarks.timing import THREADS
from qkv.biases import ALiBi, SoftCap
from qkv.masks import Causal, Mask, Window, bigbird, longformer
from qkv.native.library import description

CAUSAL = Causal()
LONG, QUICK = 8192, 2048
Jobs = dict[str, Callable[[], object]]


def native(quick: bool = False, flex: bool = True) -> dict[str, Any]:
    """All rows: medians over rounds of ratios to torch, and the smallest calls in microseconds."""
    torch.set_num_threads(THREADS)
    n = QUICK if quick else LONG
    repeats = 5 if quick else 9
    with torch.no_grad():
        rows = _with_statistics(n, repeats, torch.float32) | _with_statistics(n, repeats, torch.bfloat16)
        rows |= _rates(n, repeats) | _smallest(50 if quick else 300) | _decoding(repeats)
        if flex:
            rows |= _beside_flex(n, repeats)
    return {"engine": description()} | rows | _training(repeats)


def _with_statistics(n: int, repeats: int, dtype: torch.dtype) -> dict[str, float]:
    """Causal calls of float32, or of bfloat16 as a model has them, against SDPA in the same dtype."""
    rows: dict[str, float] = {}
    name = str(dtype).removeprefix("torch.")
    for shape in ((1, 6, n, 64), (1, 8, 2048, 128), (32, 12, 128, 64), (8, 8, 64, 64)):
        q, k, v = _tensors(shape, dtype)
        seconds = alternating(_calls(q, k, v), repeats if shape[2] > 1024 else 5 * repeats)
        for what in ("output and statistics", "statistics", "output"):
            rows[f"time: {what} / SDPA, {name}, {shape}"] = median_ratio(seconds, what, "SDPA")
    return rows


def _rates(n: int, repeats: int) -> dict[str, float]:
    """Billions of operations a second in the two products of causal attention, and in loops that do nothing else."""
    shape = (1, 6, n, 64)
    q, k, v = _tensors(shape)
    a = torch.randn(1024, 1024)
    seconds = alternating(_calls(q, k, v) | {"a product of matrices": lambda: a @ a}, repeats)
    operations = dict.fromkeys(seconds, 4 * shape[1] * n * (n + 1) / 2 * shape[3])
    operations |= {"statistics": operations["SDPA"] / 2, "a product of matrices": 2 * 1024.0**3}
    rates = {f"GFLOP/s: {x}, {shape}": operations[x] / statistics.median(seconds[x]) / 1e9 for x in seconds}
    return rates | ({} if (most := _most()) is None else {"GFLOP/s: fused multiply-adds in registers": most})


FMA = """
typedef float vf __attribute__((vector_size(VL * 4)));
double loop(long n) { /* 12 sums of VL floats, each the factor of its own next step */
    double all = 0;
    #pragma omp parallel reduction(+:all)
    {
        vf x[12];
        for (int i = 0; i < 12; i++) x[i] = (vf){0} + (float)i;
        for (long j = 0; j < n; j++)
            _Pragma("GCC unroll 12") for (int i = 0; i < 12; i++) x[i] = x[i] * 0.999f + 0.001f;
        for (int i = 0; i < 12; i++) all += x[i][0];
    }
    return all;
}
"""


def _most(steps: int = 10_000_000) -> float | None:
    """Billions of operations a second of fused multiply-adds in registers; None without a C compiler."""
    if (compiler := shutil.which("cc")) is None:
        return None
    width = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "fma.c"), Path(folder, "fma.so")
        source.write_text(FMA)
        options = ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC", f"-DVL={width}"]
        subprocess.run([compiler, *options, str(source), "-o", str(library)], check=True)
        loop = ctypes.CDLL(str(library)).loop
    loop.argtypes, loop.restype = [ctypes.c_long], ctypes.c_double
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        loop(steps)
        best = min(best, time.perf_counter() - start)
    return 2.0 * 12 * width * steps * THREADS / best / 1e9


def _calls(q: Tensor, k: Tensor, v: Tensor) -> Jobs:
    return {
        "SDPA": lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
        "output": lambda: qkv.attend(q, k, v, mask=CAUSAL),
        "statistics": lambda: qkv.measure(q, k, mask=CAUSAL),
        "output and statistics": lambda: qkv.attend(q, k, v, mask=CAUSAL, return_statistics=True),
    }


def _smallest(repeats: int) -> dict[str, float]:
    """The fixed cost of a call: microseconds for 16 tokens."""
    q, k, v = _tensors((1, 4, 16, 32))
    window, alibi = Window(8), ALiBi()
    jobs = _calls(q, k, v) | {
        "window": lambda: qkv.attend(q, k, v, mask=window),
        "ALiBi": lambda: qkv.attend(q, k, v, mask=CAUSAL, bias=alibi),
    }
    seconds = alternating(jobs, repeats)
    return {f"microseconds: {name}, (1, 4, 16, 32)": 1e6 * statistics.median(x) for name, x in seconds.items()}


def _decoding(repeats: int) -> dict[str, float]:
    """One new query against a long cache."""
    rows: dict[str, float] = {}
    for heads, key_heads, keys in ((8, 8, 100_000), (32, 8, 20_000)):
        q, (k, v) = torch.randn(1, heads, 1, 64), torch.randn(2, 1, key_heads, keys, 64)
        grouped = heads != key_heads
        seconds = alternating(
            _calls(q, k, v)
            | {"SDPA": lambda q=q, k=k, v=v, g=grouped: scaled_dot_product_attention(q, k, v, enable_gqa=g)},  # type: ignore[misc]
            3 * repeats,
        )
        for what in ("output and statistics", "statistics", "output"):
            name = f"time: {what} / SDPA, 1 query, {heads} heads on {key_heads}, {keys:,} keys"
            rows[name] = median_ratio(seconds, what, "SDPA")
    return rows


def _training(repeats: int) -> dict[str, float]:
    """Forward and backward, also with the gradients of entropy, lse and received attention."""
    rows: dict[str, float] = {}
    for shape in ((1, 8, 2048, 64), (8, 8, 256, 64)):
        q, k, v = (x.requires_grad_() for x in _tensors(shape))
        slope = torch.randn_like(q)

        def by_torch(q: Tensor = q, k: Tensor = k, v: Tensor = v, slope: Tensor = slope) -> object:
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(out, (q, k, v), slope)

        def by_qkv(q: Tensor = q, k: Tensor = k, v: Tensor = v, slope: Tensor = slope) -> object:
            return torch.autograd.grad(qkv.attend(q, k, v, mask=CAUSAL), (q, k, v), slope)

        def with_statistics(q: Tensor = q, k: Tensor = k, v: Tensor = v, slope: Tensor = slope) -> object:
            out, of_weights = qkv.attend(q, k, v, mask=CAUSAL, return_statistics=True)
            loss = (out * slope).sum() + of_weights.received.square().sum()
            loss = loss + of_weights.entropy.sum() + of_weights.lse.sum()
            return torch.autograd.grad(loss, (q, k, v))

        jobs: Jobs = {"SDPA": by_torch, "training": by_qkv, "training with gradients of statistics": with_statistics}
        seconds = alternating(jobs, repeats)
        for what in list(jobs)[1:]:
            rows[f"time: {what} / SDPA, {shape}"] = median_ratio(seconds, what, "SDPA")
    return rows


def _beside_flex(n: int, repeats: int) -> dict[str, float]:
    """Masks and a soft cap, against FlexAttention compiled for the same mask or score."""
    q, k, v = _tensors((1, 6, n, 64))
    compiled = torch.compile(flex_attention)
    rows: dict[str, float] = {}
    table = bigbird(64).dense(n, n)[0, 0, ::64, ::64].contiguous()
    compared: dict[str, tuple[Mask, Callable[..., Any]]] = {
        "Window(256)": (Window(256), lambda b, h, i, j: (j <= i) & (i - j < 256)),
        "BigBird": (bigbird(64) & CAUSAL, lambda b, h, i, j: (j <= i) & table[i // 64, j // 64]),
        "Longformer": (
            longformer(256, range(64), causal=True),
            lambda b, h, i, j: (j <= i) & ((i - j <= 256) | (j < 64) | (i < 64)),
        ),
    }
    jobs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    for name, (mask, visible) in compared.items():
        blocks = create_block_mask(visible, None, None, n, n, device="cpu")
        jobs[name] = (
            lambda mask=mask: qkv.attend(q, k, v, mask=mask),  # type: ignore[misc]
            lambda blocks=blocks: compiled(q, k, v, block_mask=blocks),  # type: ignore[misc]
        )
    cap, causal = SoftCap(20.0), create_block_mask(lambda b, h, i, j: j <= i, None, None, n, n, device="cpu")
    jobs["SoftCap"] = (
        lambda: qkv.attend(q, k, v, mask=CAUSAL, bias=cap),
        lambda: compiled(q, k, v, score_mod=lambda s, b, h, i, j: 20 * torch.tanh(s / 20), block_mask=causal),
    )
    for name, (ours, theirs) in jobs.items():
        torch.testing.assert_close(ours(), theirs(), atol=1e-4, rtol=1e-3)
        seconds = alternating({"ours": ours, "theirs": theirs}, repeats)
        rows[f"time: {name} / FlexAttention compiled, {n:,} tokens"] = median_ratio(seconds, "ours", "theirs")
    return rows


def _tensors(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for _ in range(3)]


if __name__ == "__main__":
    for what, value in (machine(THREADS) | native("--quick" in sys.argv, "--flex" in sys.argv)).items():
        print(f"{what}: {value:.3g}" if isinstance(value, float) else f"{what}: {value}", flush=True)
