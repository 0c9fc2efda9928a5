"""Checks on sparse, linear and flash attention."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

import qkv
from qkv.features import Favor
from qkv.masks import Causal, Global, Mask, RandomKeys, Strided, Window, bigbird
from research.claims import Verdict, claim, false, holds, only_when
from research.claims.results import benchmark

FLASH = "[Dao et al. 2022](https://arxiv.org/abs/2205.14135)"
FLASH_2 = "[Dao 2023](https://arxiv.org/abs/2307.08691)"
FLASH_3 = "[Shah et al. 2024](https://arxiv.org/abs/2407.08608)"
BENCHMARKS = "[benchmarks](../benchmarks.md)"


def pairs(mask: Mask, n: int) -> int:
    """The number of visible pairs of a mask."""
    return int(mask.dense(n, n)[0, 0].sum())


def reached(mask: Mask, n: int, layers: int) -> float:
    """The share of causal pairs that a path through at most so many layers connects."""
    step = mask.dense(n, n)[0, 0].double()
    paths = torch.linalg.matrix_power(step, layers) > 0
    return (paths.sum() / pairs(Causal(), n)).item()


def measured(mechanism: str) -> dict[str, dict]:
    """The benchmark of a mechanism, from benchmarks/results."""
    return benchmark("mechanisms/float32-8-forward.json")["mechanisms"][mechanism]


@claim("C292", "deep dive", "Sparse", "A window of w keys costs O(n w), g global tokens O(n g), r random keys O(n r).")
def c292() -> Verdict:
    n = 256
    window, both_ways = pairs(Window(16), n), pairs(Global(range(4)), n)
    drawn = pairs(RandomKeys(8), n)
    return holds(
        window == 16 * n - 16 * 15 // 2 and both_ways == 2 * 4 * n - 16 and drawn == 8 * n,
        f"Pairs at n = {n}: a window of 16 has {window:,}, at most 16 n = {16 * n:,}; 4 global tokens have "
        f"{both_ways:,}, nearly 2 · 4 n, as they look at all and are seen by all; 8 random keys have {drawn:,} = 8 n.",
    )


@claim("C293", "deep dive", "Sparse", "BigBird combines window, global and random keys, and is O(n).")
def c293() -> Verdict:
    counts = {n: pairs(bigbird(block=8), n) for n in (256, 512, 1024)}
    growth = [counts[512] / counts[256], counts[1024] / counts[512]]
    return holds(
        max(growth) < 2.1,
        "With their sizes fixed. Blocks of 8: "
        + ", ".join(f"{count:,} pairs at n = {n:,}" for n, count in counts.items())
        + f": twice as many for twice the length ({growth[0]:.2f}, {growth[1]:.2f}), where all pairs are four times.",
        "[Zaheer et al. 2020](https://arxiv.org/abs/2007.14062)",
    )


@claim("C294", "deep dive", "Sparse", "Sparse attention cannot model arbitrary dependencies over long distances.")
def c294() -> Verdict:
    mask, local = (Window(8) | Strided(8)) & Causal(), Window(8)
    one, two, window = reached(mask, 64, 1), reached(mask, 64, 2), reached(local, 64, 2)
    return only_when(
        one < 0.5 and two == 1 and window < 0.5,
        f"In one layer, or with a window alone. At n = 64 a window of 8 with every eighth position joins {one:.0%} of "
        f"the pairs in one layer and {two:.0%} in two; the window by itself {window:.0%} in two. What a path of two "
        "layers carries is another matter.",
    )


@claim("C295", "deep dive", "Linear", "Attention(Q, K, V) ≈ φ(Q) (φ(K)ᵀ V).")
def c295() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 6, 4, dtype=torch.float64)
    exact = qkv.attend(q, k, v)
    fq, fk = qkv.features.elu_plus_one(q), qkv.features.elu_plus_one(k)
    sums = (fq @ fk.transpose(-1, -2)).sum(-1, keepdim=True)
    without = (fq @ (fk.transpose(-1, -2) @ v) - exact).norm()
    divided = (fq @ (fk.transpose(-1, -2) @ v) / sums - exact).norm()
    return false(
        without > 10 * divided,
        f"It must be divided by $\\phi(q) \\cdot \\sum_j \\phi(k_j)$. Without, the weights of a query here add up to "
        f"{sums.min():.0f}–{sums.max():.0f} instead of 1, and the error is {without / divided:.0f} times as large "
        "(φ = elu + 1).",
        "[Katharopoulos et al. 2020](https://arxiv.org/abs/2006.16236)",
    )


@claim("C296", "deep dive", "Linear", "Forming φ(K)ᵀ V first makes it O(n d²).")
def c296() -> Verdict:
    def work(n: int, *, first: bool) -> int:
        q, k, v = torch.zeros(3, n, 64, device="meta")
        with FlopCounterMode(display=False) as counter:
            q @ (k.T @ v) if first else (q @ k.T) @ v
        return counter.get_total_flops()

    growth = {first: work(2048, first=first) / work(1024, first=first) for first in (True, False)}
    return holds(
        growth == {True: 2, False: 4} and work(1024, first=True) == 4 * 1024 * 64**2,
        "2 n d² multiplications: twice the length costs twice as much, with the weights first four times.",
    )


@claim("C297", "deep dive", "Linear", "Performer and Linformer both work by kernel functions.")
def c297() -> Verdict:
    """A kernel compares a query with one key at a time: the others decide neither how, nor does a key's place."""
    torch.manual_seed(0)
    q, k, v = 0.5 * torch.randn(3, 1, 1, 10, 4, dtype=torch.float64)
    e, phi, order = torch.randn(10, 3, dtype=torch.float64), Favor(4, n_features=64), torch.randperm(10)
    features = [torch.exp(x @ phi.weight.T / 4**0.25 - (x**2).sum(-1, keepdim=True) / 4) for x in (q, k)]
    by_kernel = features[0] @ features[1].mT
    performer = {"as it is": qkv.linear_attend(q, k, v, features=phi, causal=False)}
    performer["reordered"] = qkv.linear_attend(q, k[:, :, order], v[:, :, order], features=phi, causal=False)
    linformer = {"as it is": qkv.linformer(q, k, v, e)}
    linformer["reordered"] = qkv.linformer(q, k[:, :, order], v[:, :, order], e)
    mixed = torch.softmax(q @ (e.T @ k).mT / 4**0.5, -1) @ (e.T @ v)
    errors = [
        (performer["as it is"] - by_kernel @ v / by_kernel.sum(-1, keepdim=True)).abs().max().item(),
        (linformer["as it is"] - mixed).abs().max().item(),
    ]
    moved = [(x["reordered"] - x["as it is"]).abs().max().item() for x in (performer, linformer)]
    return false(
        max(errors) < 1e-6 and moved[0] < 1e-6 and moved[1] > 0.01,
        "Performer does: its weights are products φ(q) · φ(k), and keys in another order, with their values, give the "
        f"same output (to {moved[0]:.1g}). Linformer mixes keys and values along the *length*, here 10 into 3, and is "
        f"plain softmax attention to these: low rank, no kernel function. The other order changes its output by up to "
        f"{moved[1]:.2f}. Both formulas written out agree with qkv's to {max(errors):.1g}.",
        "[Choromanski et al. 2021](https://arxiv.org/abs/2009.14794)",
        "[Wang et al. 2020](https://arxiv.org/abs/2006.04768)",
    )


@claim("C299", "deep dive", "Flash", "FlashAttention has exactly the output of standard attention.")
def c299() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 300, 16)
    exact = qkv.attend(q.double(), k.double(), v.double(), mask=Causal(), kernel="eager")
    errors = [
        (qkv.attend(q, k, v, mask=Causal(), kernel=kernel).double() - exact).abs().max().item()
        for kernel in ("flash", "eager")
    ]
    return holds(
        max(errors) < 2e-6,
        f"To rounding: from float64 the tiled kernel is off by {errors[0]:.1g} at most, forming the weights by "
        f"{errors[1]:.1g}, both in float32.",
    )


@claim("C300", "deep dive", "Flash", "FlashAttention needs O(n) memory.")
def c300() -> Verdict:
    found = measured("causal")
    memory = {int(n): size for n, size in found["memory"].items()}
    all_weights = 8 * 16_384**2 * 4
    return holds(
        found["exponent of memory"] < 1.1 and memory[16_384] < all_weights / 100,
        "Measured for torch's CPU kernel with 8 heads: beside the inputs "
        + ", ".join(f"{size / 1e6:.0f} MB at n = {n:,}" for n, size in memory.items())
        + f". All weights of the longest would be {all_weights / 1e9:.1f} GB.",
        BENCHMARKS,
    )


@claim("C301", "deep dive", "Flash", "FlashAttention is 2 to 4 times faster.")
def c301() -> Verdict:
    cells = measured("causal")["cells"]
    faster = {int(n): c["seconds"]["eager"] / c["seconds"]["sdpa"] for n, c in cells.items() if "eager" in c["seconds"]}
    text = ", ".join(f"{ratio:.1f} at n = {n:,}" for n, ratio in faster.items())
    return only_when(
        faster[512] < 2 and max(faster.values()) > 4,
        f"It depends on length, machine and rival. The authors say 2 to 4 against optimized baselines on GPUs, which "
        f"was not measured here. On a CPU torch's flash kernel, which also skips what a causal mask hides, over "
        f"forming the weights: {text}.",
        FLASH_2,
        BENCHMARKS,
    )


@claim(
    "C304", "deep dive", "Flash", "torch's `scaled_dot_product_attention` can take the place of the hand-written one."
)
def c304() -> Verdict:
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 5, 4, dtype=torch.float64)
    hides = torch.ones(5, 5).triu(1).bool()  # its own sense: True hides
    ours = (q @ k.transpose(-1, -2) / 2).masked_fill(hides, -torch.inf).softmax(-1) @ v
    same, inverse, flipped = sdpa(q, k, v, is_causal=True), sdpa(q, k, v, ~hides), sdpa(q, k, v, hides)
    return only_when(
        torch.allclose(same, ours) and torch.allclose(inverse, ours) and not torch.allclose(flipped, ours),
        "With `is_causal=True`, as it shows, yes. A boolean `attn_mask` means the opposite of its own function's "
        "mask: True takes part. Passed on as it is, it shows each query the later keys alone, without an error. Nor "
        "does torch return weights.",
    )
