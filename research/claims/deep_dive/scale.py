"""Checks on the scale √d_k, and on the interview questions about it."""

from __future__ import annotations

import math

import torch

from research.claims import Verdict, claim, experiment, false, holds

SECTION = "Why sqrt"
LAB = "[the lab's draws of scores](../experiments/README.md#random_scores)"
SCORES = torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=torch.float64)  # of its example


def shown(x: torch.Tensor, digits: int = 4) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in x.tolist())


def products(d: int, n: int = 20_000) -> tuple[torch.Tensor, torch.Tensor]:
    """Products $q_l k_l$ of one dimension, and whole dot products, of standard normal vectors."""
    q, k = torch.randn(2, n, d, generator=torch.Generator().manual_seed(0))
    return q[:, 0] * k[:, 0], (q * k).sum(-1)


@claim("C245", "deep dive", SECTION, "Each product $q_l k_l$ has mean 0 and variance 1, their sum variance $d_k$.")
def c245() -> Verdict:
    one, whole = products(64)
    mean, variance, ratio = one.mean().item(), one.var().item(), whole.var().item() / 64
    return holds(
        abs(mean) < 0.03 and abs(variance - 1) < 0.06 and abs(ratio - 1) < 0.03,
        f"Of 20,000 draws a product has mean {mean:.3f} and variance {variance:.2f}; the sum over 64 dimensions has "
        f"{ratio:.3f} times 64.",
    )


@claim("C246", "deep dive", SECTION, "At $d_k = 64$ the standard deviation of a dot product is 8.")
def c246() -> Verdict:
    found = products(64)[1].std().item()
    return holds(
        math.sqrt(64) == 8 and abs(found - 8) < 0.15, f"√64 = 8; {found:.2f} in 20,000 draws from standard normals."
    )


@claim("C247", "deep dive", SECTION, "At $d_k = 512$ the standard deviation of a dot product is about 22.7.")
def c247() -> Verdict:
    return false(f"{math.sqrt(512):.1f}" == "22.6", f"√512 = {math.sqrt(512):.3f}: 22.6, a slip of rounding.")


@claim("C248", "deep dive", SECTION, "softmax(1, 2, 0.5, 1.5) is 0.1863, 0.5064, 0.1130, 0.2943.")
def c248() -> Verdict:
    right, printed = SCORES.softmax(-1), torch.tensor([0.1863, 0.5064, 0.1130, 0.2943])
    return false(
        (right[1] - printed[1]).abs() > 0.05 and printed.sum() > 1.09,
        f"It is {shown(right)}. The printed numbers add up to {printed.sum():.2f}; those of a softmax add up to 1.",
    )


@claim("C249", "deep dive", SECTION, "softmax of 8 times these scores is 0.0003, 0.9993, 0.0000, 0.0004.")
def c249() -> Verdict:
    right = (8 * SCORES).softmax(-1)
    return false(
        abs(right[1] - 0.9817) < 1e-4,
        f"It is {shown(right)}: the scores 16 and 12 differ by 4, and $e^{{-4}}$ is {math.exp(-4):.4f}. The point, "
        "that the row saturates, stands.",
    )


@claim("C250", "deep dive", SECTION, "When softmax saturates, all gradient goes through the largest weight.")
def c250() -> Verdict:
    slopes = [(p * (1 - p)).max().item() for p in (SCORES.softmax(-1)[1:2], (8 * SCORES).softmax(-1)[1:2])]
    found = experiment("C250", "random_scores")
    return false(
        slopes[1] < slopes[0] / 10 and found.kind == "false",
        f"In its own example the slope of the largest weight by its own score falls from {slopes[0]:.3f} to "
        f"{slopes[1]:.3f}: scores get little gradient anywhere, and only the *values* get theirs by weight. "
        + found.text,
        LAB,
    )


@claim("C319", "deep dive", "Q1", "With a standard deviation of 8 scores may span −20 to 20.")
def c319() -> Verdict:
    scores = products(64)[1]
    within, rows = (scores.abs() <= 20).double().mean().item(), scores[:16_384].view(-1, 128).abs().amax(-1)
    return holds(
        abs(within - math.erf(2.5 / math.sqrt(2))) < 0.005 and rows.median() > 15,
        f"±20 is 2.5 standard deviations: {within:.1%} of 20,000 scores lie within, and the largest of 128 has a "
        f"median size of {rows.median():.0f}.",
    )


@claim(
    "C321",
    "deep dive",
    "Q4",
    "Without the scale, at $d_k = 64$ and the start, softmax is nearly one-hot: about 1.0 for one token.",
)
def c321() -> Verdict:
    found = experiment("C321", "random_scores")
    return false(
        found.kind == "false",
        f"Not of queries and keys with variance 1, and common small initial weights make less. {found.text}",
        LAB,
    )
