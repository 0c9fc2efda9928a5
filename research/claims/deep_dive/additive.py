"""Checks on additive and multiplicative scores."""

from __future__ import annotations

import numpy as np
import torch

import qkv
from qkv.scores import Additive, Dot, General
from research.claims import Verdict, claim, false, holds, only_when
from research.claims.deep_dive.efficient import BENCHMARKS, measured

SECTION = "Additive vs multiplicative"


@claim("C255", "deep dive", SECTION, "The additive score is $v^T \\tanh(W_q q + W_k k)$.")
def c255() -> Verdict:
    torch.manual_seed(0)
    q, k, values = (torch.randn(1, 1, n, 4, dtype=torch.float64) for n in (3, 5, 5))
    v, w_q, w_k = (torch.randn(*shape, dtype=torch.float64) for shape in ((6,), (6, 4), (6, 4)))
    _, weights = qkv.attend(q, k, values, score=Additive(v, w_q, w_k), return_weights=True)
    rows = [[v @ torch.tanh(w_q @ a + w_k @ b) for b in k[0, 0]] for a in q[0, 0]]
    loops = torch.tensor(rows, dtype=torch.float64).softmax(-1)
    error = (weights[0, 0] - loops).abs().max().item()
    return holds(
        error < 1e-12,
        f"Bahdanau's formula; pair by pair in a loop and all at once it gives the same weights to {error:.1g}.",
        "[Bahdanau et al. 2015](https://arxiv.org/abs/1409.0473)",
    )


@claim("C256", "deep dive", SECTION, "tanh bounds the additive score to [−1, 1].")
def c256() -> Verdict:
    torch.manual_seed(0)
    v, hidden = torch.randn(64), torch.tanh(torch.randn(10_000, 64))
    largest, bound = (hidden @ v).abs().max().item(), v.abs().sum().item()
    return false(
        1 < largest <= bound and hidden.abs().max() <= 1,
        f"It bounds the 64 hidden units. The score is bounded by $\\sum_i |v_i|$, {bound:.1f} for a standard normal v, "
        f"and reaches {largest:.1f} in 10,000 draws.",
    )


@claim("C258", "deep dive", SECTION, "Additive scores are slower.")
def c258() -> Verdict:
    additive, dot = measured("additive")["cells"], measured("causal")["cells"]
    slower = {int(n): additive[n]["seconds"]["qkv"] / dot[n]["seconds"]["qkv"] for n in ("1024", "4096", "16384")}
    text = ", ".join(f"{ratio:.0f} times (n = {n:,})" for n, ratio in slower.items())
    return holds(
        min(slower.values()) > 2,
        f"Both causal, with 8 heads of 64 on a CPU: an additive score of size 16 takes {text} as long as the product. "
        "It needs a tanh for each pair and hidden unit, and no matrix product serves it.",
        BENCHMARKS,
    )


@claim("C259", "deep dive", SECTION, "An additive score is slightly more expressive for each comparison.")
def c259() -> Verdict:
    """Find the equal number: queries and keys are the numbers −3 … 3, in one dimension each."""
    x = np.arange(-3.0, 4.0)
    bump = np.tanh(4 * (x[:, None] - x) + 2) - np.tanh(4 * (x[:, None] - x) - 2)  # W_q, W_k = ±4, v = (1, −1), a bias
    bilinear = [w * np.outer(x, x) for w in (-2.0, 0.5, 2.0)]
    found = (bump.argmax(1) == np.arange(7)).mean()
    best = max((s.argmax(1) == np.arange(7)).mean() for s in bilinear)
    return holds(
        found == 1 and best < 0.5,
        f"For numbers in one dimension two hidden units, with biases, make a score that is largest where key equals "
        f"query, for all 7. $q\\,w\\,k$ is always largest at an end of the line: {best:.0%} right. More dimensions "
        "give the product such relations too.",
    )


@claim("C260", "deep dive", SECTION, "Multiplicative scores need no extra parameters.")
def c260() -> Verdict:
    plain, scaled, general = (
        sum(x.numel() for x in vars(score).values() if isinstance(x, torch.Tensor))
        for score in (Dot(scale=1.0), Dot(), General(torch.zeros(64, 64)))
    )
    return only_when(
        plain == scaled == 0 and general == 64**2,
        f"The plain and the scaled dot product have none. The *general* form that it lists with them has a matrix: "
        f"{general:,} numbers at d = 64.",
    )
