"""Checks for section 7: cost, attention as a primitive, depth."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import qkv
from qkv import masks
from qkv.nn import MultiHeadAttention
from research.claims import Verdict, claim, holds, only_when


@claim("C053", "chapter", "7.1", "QKᵀ takes O(n² d_k) operations, the softmax O(n²), AV O(n² d_v).")
def c053() -> Verdict:
    def products(n: int, d_k: int, d_v: int) -> int:
        q, v, weights = (torch.empty(shape, device="meta") for shape in ((n, d_k), (n, d_v), (n, n)))
        with FlopCounterMode(display=False) as counter:
            _ = q @ q.T, weights @ v
        return counter.get_total_flops()

    wider_keys = products(64, 48, 32) - products(64, 16, 32)  # 2 n² a number of d_k
    wider_values = products(64, 16, 64) - products(64, 16, 32)
    longer = products(128, 16, 32) / products(64, 16, 32)
    return holds(
        (wider_keys, wider_values, longer) == (2 * 64**2 * 32, 2 * 64**2 * 32, 4),
        f"Counted by torch: at 64 tokens 32 more numbers a key, or a value, cost {wider_keys:,} operations, 2 n² each; "
        f"twice the tokens cost {longer:.0f} times as much. The softmax is of n² numbers.",
    )


@claim("C054", "chapter", "7.1", "The time of attention is O(n² d).")
def c054() -> Verdict:
    def share(n: int, d: int = 512) -> float:
        """Of the products' operations, those of the four projections; 8 heads."""
        x, w, q = (torch.empty(shape, device="meta") for shape in ((n, d), (d, 4 * d), (8, n, d // 8)))
        with FlopCounterMode(display=False) as counter:
            _ = x @ w
            projections = counter.get_total_flops()
            _ = q @ q.mT @ q
        return projections / counter.get_total_flops()

    found = {n: share(n) for n in (128, 1024, 8192)}
    return only_when(
        found[128] > 0.8 and found[1024] == 0.5 and found[8192] < 0.2,
        "Without the projections, which take O(n d²). At d = 512 they are "
        + ", ".join(f"{s:.0%} of the work at {n:,} tokens" for n, s in found.items())
        + ": n² d is the larger part from n = 2 d on.",
    )


def estimated(n: int, heads: int, kernel: str) -> tuple[int, int]:
    """Operations and peak memory by `qkv.plan`."""
    q = torch.empty(1, heads, n, 64)
    cost = qkv.plan(q, q, q, kernel=kernel).cost
    return cost.flops, cost.peak


@claim("C055", "chapter", "7.1", "The space of attention is O(n²), for the attention matrix.")
def c055() -> Verdict:
    eager, flash = [estimated(2048, 8, kernel)[1] / estimated(1024, 8, kernel)[1] for kernel in ("eager", "flash")]
    by_heads = estimated(1024, 8, "eager")[1] / estimated(1024, 1, "eager")[1]
    return only_when(
        3.5 < eager < 4.1 and flash < 2.1 and 7 < by_heads < 8.1,
        f"If the matrix is formed, and then one for each head: with twice the tokens the estimate of `qkv.plan` is "
        f"{eager:.1f} times as much. A kernel that works through it in tiles, such as FlashAttention, never holds it: "
        f"{flash:.1f} times.",
    )


@claim("C056", "chapter", "7.1", "FlashAttention is one of the efficient answers to the quadratic cost.")
def c056() -> Verdict:
    small, large = [[estimated(n, 1, kernel) for kernel in ("eager", "flash")] for n in (1024, 4096)]
    work, memory = [[many[i] / few[i] for few, many in zip(small, large, strict=True)] for i in (0, 1)]
    return only_when(
        work == [16, 16] and memory[0] > 15 and memory[1] < 4.1,
        f"To the quadratic memory: with 4 times the tokens it takes {memory[1]:.1f} times as much, by the estimates of "
        f"`qkv.plan`, the formed matrix {memory[0]:.1f} times (measured: C300). The "
        "work stays quadratic, 16 times for both; Longformer and BigBird, named beside it, "
        "make that linear by looking at fewer pairs.",
        "[Dao et al. 2022](https://arxiv.org/abs/2205.14135)",
    )


@claim("C057", "chapter", "7.2", "Attention routes by content; convolutions and recurrences have a fixed structure.")
def c057() -> Verdict:
    torch.manual_seed(0)
    one, other = torch.randn(2, 1, 6, 8, dtype=torch.float64)
    attention, convolution = MultiHeadAttention(8, 1).double(), nn.Conv1d(8, 8, 3, padding=1).double()

    def route(layer: object, x: torch.Tensor) -> torch.Tensor:
        """Jacobian: how each output depends on each input."""
        return torch.autograd.functional.jacobian(layer, x)[0, :, :, 0]

    def conv(x: torch.Tensor) -> torch.Tensor:
        return convolution(x.mT).mT

    differ = [(route(f, one) - route(f, other)).abs().max().item() for f in (attention, conv)]
    return holds(
        differ[0] > 0.1 and differ[1] == 0,
        f"How outputs depend on inputs changes with the text in attention (by up to {differ[0]:.2f}) and not at all "
        "in a convolution. Of a recurrence it is the path that is fixed, one token after another; what a gated one "
        "lets through depends on content.",
    )


@claim("C058", "chapter", "7.3", "After the first layer each position has direct access to all positions.")
def c058() -> Verdict:
    n = 64
    seen = {name: (mask.dense(n, n)[0, 0] if mask else torch.ones(n, n)).double().mean().item()
            for name, mask in (("no mask", None), ("causal", masks.Causal()), ("window", masks.Window(8)))}  # fmt: skip
    return only_when(
        seen["no mask"] == 1 and seen["causal"] < 0.51 and seen["window"] < 0.15,
        f"Without a mask. Of the pairs of 64 positions a causal mask lets one layer see {seen['causal']:.0%}, "
        f"positions up to the query's own, and a window of 8 {seen['window']:.0%}.",
    )


@claim("C060", "chapter", "7.3", "Mixing, repeated, can hurt: what a position has to say gets diluted.")
def c060() -> Verdict:
    def likeness(residual: bool) -> list[float]:
        """Mean cosine of two tokens' states after 0, 4 and 12 layers of attention with random weights."""
        torch.manual_seed(0)
        x, found = torch.randn(1, 32, 64), []
        for depth in range(13):
            if depth in (0, 4, 12):
                unit = nn.functional.normalize(x[0], dim=-1)
                found.append(((unit @ unit.T).sum() - 32).item() / (32 * 31))
            mixed = MultiHeadAttention(64, 4)(x)
            x = x + mixed if residual else mixed
        return found

    bare, kept = likeness(False), likeness(True)
    return holds(
        abs(bare[0]) < 0.1 and bare[1] > 0.99 and kept[1] < bare[1] and kept[2] < bare[2],
        f"Attention alone makes all tokens alike: with random weights, the mean cosine of two of 32 tokens' states is "
        f"{bare[0]:.2f}, {bare[1]:.3f} and {bare[2]:.3f} after 0, 4 and 12 layers. Residuals slow it down ("
        f"{kept[1]:.2f} after 4, {kept[2]:.2f} after 12).",
        "[Dong et al. 2021](https://arxiv.org/abs/2103.03404)",
    )
