"""Checks for section 3: the example "I love deep learning", and multi-head attention."""

from __future__ import annotations

import math

import torch

import qkv
from qkv import kernels
from research.claims import Verdict, claim, false, holds, only_when

SECTION = "3"
SCORES = torch.tensor([2.5, 0.8, 0.3, 0.2], dtype=torch.float64)


def shown(x: torch.Tensor, digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in x.tolist())


@claim("C344", "overview", SECTION, "softmax(2.5, 0.8, 0.3, 0.2) is about 0.77, 0.14, 0.05, 0.04.")
def c344() -> Verdict:
    right, printed = SCORES.softmax(-1), torch.tensor([0.77, 0.14, 0.05, 0.04])
    e_17 = math.e ** (2.5 - 0.8)  # how far the first weight is above the second
    return false(
        (right - printed).abs().max() > 0.03 and abs(right.sum() - 1) < 1e-9 and abs(right[0] / right[1] - e_17) < 1e-9,
        f"It is {shown(right, 4)}. The printed numbers add up to 1 and have the right order, but are too sharp.",
    )


@claim("C345", "overview", SECTION, "The context is 0.77 h₁ + 0.14 h₂ + 0.05 h₃ + 0.04 h₄.")
def c345() -> Verdict:
    right = [round(value, 2) for value in SCORES.softmax(-1).tolist()]
    return false(
        right == [0.72, 0.13, 0.08, 0.07],
        "With its scores it is " + " + ".join(f"{w} h{i}" for w, i in zip(right, "₁₂₃₄", strict=True)) + ".",
    )


@claim("C346", "overview", SECTION, "0.03, 0.05, 0.12, 0.80 are weights of attention.")
def c346() -> Verdict:
    weights = torch.tensor([0.03, 0.05, 0.12, 0.80], dtype=torch.float64)
    return holds(bool((weights >= 0).all()) and abs(weights.sum() - 1) < 1e-9, "None is negative; the sum is 1.00.")


@claim("C347", "overview", SECTION, "0.08, 0.17, 0.40, 0.35 are weights of attention.")
def c347() -> Verdict:
    weights = torch.tensor([0.08, 0.17, 0.40, 0.35], dtype=torch.float64)
    return holds(bool((weights >= 0).all()) and abs(weights.sum() - 1) < 1e-9, "None is negative; the sum is 1.00.")


@claim("C348", "overview", SECTION, "H heads of $d_v$ side by side are $d_{model}$ wide.")
def c348() -> Verdict:
    widths = {}
    for heads in (1, 8, 16):
        seen: list[torch.Tensor] = []
        with kernels.watching(lambda call, _, seen=seen: seen.append(call.v)):
            qkv.nn.MultiHeadAttention(512, heads)(torch.randn(1, 3, 512))
        beside = seen[0].transpose(1, 2).flatten(2)
        widths[heads] = tuple(seen[0].shape[1:]), beside.shape[-1]
    return holds(
        widths == {heads: ((heads, 3, 512 // heads), 512) for heads in (1, 8, 16)},
        "With $d_v = d_{model} / H$, as it is chosen: "
        + ", ".join(f"{heads} × {shape[-1]} = {width}" for heads, (shape, width) in widths.items())
        + ".",
    )


@claim("C349", "overview", SECTION, "Without $W^O$ the heads would be completely independent.")
def c349() -> Verdict:
    torch.manual_seed(0)
    values = torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)  # two heads of 4
    q, k = torch.randn(2, 1, 2, 5, 4, dtype=torch.float64)
    joined = qkv.attend(q, k, values).transpose(1, 2).flatten(2)
    after = qkv.nn.FeedForward(8).double()(joined)
    of_second = [
        torch.autograd.grad(out[..., :4].sum(), values, retain_graph=True)[0][:, 1].norm().item()
        for out in (joined, after)
    ]
    return only_when(
        of_second[0] == 0 and of_second[1] > 0,
        f"Within the layer: the first head's half of the output has a gradient of {of_second[0]:.0f} in the second "
        f"head's values. The next feed-forward layer mixes them all the same ({of_second[1]:.2f}), and one loss trains "
        "both. $W^O$ decides where in the residual each head writes.",
    )
