"""Checks on the worked example of three tokens: "The", "cat", "sat"."""

from __future__ import annotations

import math

import torch

import qkv
from research.claims import Verdict, claim, false, holds, only_when

SECTION = "Worked example"
Q = torch.tensor([[1.0, 0.5], [0.3, 1.2], [0.8, 0.6]], dtype=torch.float64)
K = torch.tensor([[1.0, 0.5], [0.4, 1.0], [0.9, 0.3]], dtype=torch.float64)
V = torch.tensor([[0.1, 0.2], [0.5, 0.8], [0.3, 0.1]], dtype=torch.float64)
RAW = Q @ K.T
SCALED = RAW / math.sqrt(2)
WEIGHTS = SCALED.softmax(-1)
OUT = WEIGHTS @ V


def rounded(x: torch.Tensor, digits: int = 3) -> list[float]:
    return [round(value, digits) for value in x.flatten().tolist()]


def shown(x: torch.Tensor, digits: int = 3) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in x.flatten().tolist())


@claim("C271", "deep dive", SECTION, "Raw scores: 1.25, 0.90, 1.05; 0.90, 1.32, 0.63; 1.10, 0.92, 0.90.")
def c271() -> Verdict:
    return holds(rounded(RAW, 6) == [1.25, 0.9, 1.05, 0.9, 1.32, 0.63, 1.1, 0.92, 0.9], f"All nine: {shown(RAW, 2)}.")


@claim("C272", "deep dive", SECTION, "Scaled scores: 0.884, 0.636, 0.742; 0.636, 0.933, 0.446; 0.778, 0.651, 0.636.")
def c272() -> Verdict:
    printed = [0.884, 0.636, 0.742, 0.636, 0.933, 0.446, 0.778, 0.651, 0.636]
    wrong = [i for i, (a, b) in enumerate(zip(rounded(SCALED), printed, strict=True)) if a != b]
    return false(
        wrong == [5],
        f"That of *cat* and *sat* is 0.63 / √2 = {SCALED[1, 2]:.5f}, so 0.445; the other eight are right.",
    )


@claim("C273", "deep dive", SECTION, "The exponentials add up to 6.410, 5.994 and 5.983.")
def c273() -> Verdict:
    sums = SCALED.exp().sum(-1)
    from_rounded = torch.tensor([0.884, 0.636, 0.742], dtype=torch.float64).exp().sum().item()
    return holds(
        (sums - torch.tensor([6.410, 5.994, 5.983])).abs().max() < 1.5e-3,
        f"{shown(sums)}, to the rounding of what goes in: its own rounded scores give {from_rounded:.3f} for the "
        "first.",
    )


@claim("C274", "deep dive", SECTION, "Weights of “The”: 0.378, 0.295, 0.327.")
def c274() -> Verdict:
    return false(
        rounded(WEIGHTS[0]) == [0.378, 0.295, 0.328] and round(2.100 / 6.410, 3) == 0.328,
        f"{shown(WEIGHTS[0])}: the last is {WEIGHTS[0, 2]:.5f}, and its own 2.100 / 6.410 gives 0.328 too.",
    )


@claim("C275", "deep dive", SECTION, "Weights of “cat”: 0.315, 0.424, 0.260.")
def c275() -> Verdict:
    return holds(
        rounded(WEIGHTS[1]) == [0.315, 0.424, 0.260],
        f"{shown(WEIGHTS[1])}. Rounded, the row adds up to {sum(rounded(WEIGHTS[1])):.3f}.",
    )


@claim("C276", "deep dive", SECTION, "Weights of “sat”: 0.364, 0.320, 0.316.")
def c276() -> Verdict:
    return holds(rounded(WEIGHTS[2]) == [0.364, 0.320, 0.316], f"{shown(WEIGHTS[2])}.")


@claim("C277", "deep dive", SECTION, "“The” attends mostly to itself.")
def c277() -> Verdict:
    own = WEIGHTS[0, 0].item()
    return only_when(
        WEIGHTS[0].argmax() == 0 and own < 0.5,
        f"If *mostly* means more than to any other: its own weight is {own:.3f}, the largest of three but no majority, "
        f"and {1 - own:.0%} goes elsewhere.",
    )


@claim("C278", "deep dive", SECTION, "“sat” attends roughly uniformly.")
def c278() -> Verdict:
    low, high = WEIGHTS[2].min().item(), WEIGHTS[2].max().item()
    entropy = (-(WEIGHTS[2] * WEIGHTS[2].log()).sum() / math.log(3)).item()
    return holds(
        entropy > 0.99 and high - low < 0.05,
        f"From {low:.3f} to {high:.3f}; the entropy is {entropy:.1%} of that of even weights.",
    )


@claim("C279", "deep dive", SECTION, "Output of “The”: 0.284, 0.345.")
def c279() -> Verdict:
    return false(
        rounded(OUT[0]) == [0.283, 0.344], f"{shown(OUT[0], 5)}, so 0.283, 0.344: a slip of adding rounded terms."
    )


@claim("C280", "deep dive", SECTION, "Output of “cat”: 0.322, 0.428.")
def c280() -> Verdict:
    return false(rounded(OUT[1]) == [0.322, 0.429], f"{shown(OUT[1], 5)}, so 0.322, 0.429: a slip of rounding.")


@claim("C281", "deep dive", SECTION, "Output of “sat”: 0.291, 0.361.")
def c281() -> Verdict:
    return holds(rounded(OUT[2]) == [0.291, 0.361], f"{shown(OUT[2], 5)}.")


@claim("C311", "deep dive", "Code", "The script at the end reproduces the worked example.")
def c311() -> Verdict:
    out, weights = qkv.attend(*(x.float()[None, None] for x in (Q, K, V)), return_weights=True)
    printed = torch.tensor([[0.284, 0.345], [0.322, 0.428], [0.291, 0.361]])
    return holds(
        torch.allclose(weights[0, 0], WEIGHTS.float(), atol=1e-6) and (out[0, 0] - printed).abs().max() < 1.1e-3,
        f"To the slips of rounding noted above. In float32, weights: {shown(weights[0, 0], 4)}; outputs: "
        f"{shown(out[0, 0], 4)}.",
    )
