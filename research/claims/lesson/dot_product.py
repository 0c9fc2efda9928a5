"""Checks on the library analogy, and on scaled dot-product attention in NumPy and torch."""

from __future__ import annotations

import html
import io
import math
from contextlib import redirect_stdout

import numpy as np
import torch

import qkv
from research.claims import Verdict, claim, experiment, false, holds, only_when

SDPA = "Scaled dot-product attention"


@claim("C182", "lesson", "The library analogy", "Weights sum to 1, and the output is a blend of all values.")
def c182() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 6, 8, dtype=torch.float64)
    out, weights = qkv.attend(q, k, v, return_weights=True)
    off = (weights.sum(-1) - 1).abs().max().item()
    inside = bool(((out >= v.amin(-2, keepdim=True)) & (out <= v.amax(-2, keepdim=True))).all())
    blend = torch.allclose(out, sum(weights[..., j, None] * v[..., j, None, :] for j in range(6)))
    return holds(
        off < 1e-12 and inside and blend and bool((weights > 0).all()),
        f"Rows sum to 1 within {off:.0e}, every weight is positive (the least is {weights.min():.3f}), and the output "
        "is their convex combination of the values: no coordinate leaves the range that the values span.",
    )


@claim("C183", "lesson", SDPA, "A dot product near zero means unrelated vectors, a large one the same direction.")
def c183() -> Verdict:
    def turned(degrees: float, length: float) -> torch.Tensor:
        return length * torch.tensor([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))])

    query = turned(0, 1)
    aligned, apart = (query @ turned(0, 0.1)).item(), (query @ turned(80, 10)).item()
    return only_when(
        apart > 10 * aligned,
        "Only of vectors of one length, for it is |q| |k| cos θ: a key of length 10 at 80° scores "
        f"{apart:.2f}, one of length 0.1 in the very direction of the query {aligned:.2f}.",
    )


@claim("C185", "lesson", SDPA, "With $d_k = 512$ raw dot products might be in the range [−30, 30].")
def c185() -> Verdict:
    torch.manual_seed(0)
    deviation = math.sqrt(512)
    inside = (torch.randn(2, 10_000, 512).prod(0).sum(-1).abs() <= 30).float().mean().item()
    return only_when(
        0.75 < inside < 0.9 and 3 * deviation > 30,
        f"Most are: {inside:.0%}, for it is {30 / deviation:.2f} standard deviations to both sides. As the range of "
        f"all it is too small: three deviations are {3 * deviation:.0f}. The experiment asks for 99%, so it says that "
        "the claim does not hold.",
        *experiment("C185", "random_scores").by,
    )


@claim("C187", "lesson", SDPA, "√512 ≈ 22.6, which takes ±30 to ±1.3.")
def c187() -> Verdict:
    root = math.sqrt(512)
    return holds(f"{root:.1f}" == "22.6" and f"{30 / root:.1f}" == "1.3", f"{root:.3f} and {30 / root:.3f}.")


@claim(
    "C188",
    "lesson",
    "Interactive implementation",
    "The NumPy cell gives weights whose rows sum to 1 and an output of (4, 8).",
)
def c188() -> Verdict:
    random = np.random.RandomState(42)  # as np.random.seed(42)
    x = random.randn(4, 8)
    q, k, v = (x @ (random.randn(8, 8) * 0.1) for _ in range(3))
    scores = q @ k.T / np.sqrt(8)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = weights @ v
    return holds(
        out.shape == (4, 8) and np.allclose(weights.sum(-1), 1),
        f"The output is {out.shape} and rows sum to 1. With projections this small the weights are nearly even, "
        f"{weights.min():.3f} to {weights.max():.3f}.",
    )


@claim(
    "C189",
    "lesson",
    "Interactive implementation",
    "The NumPy cell prints an empty line before the shape of the output.",
)
def c189() -> Verdict:
    attribute = r"print(f&#39;\\nOutput&#39;)"  # as the cell stands in the page: two backslashes
    with redirect_stdout(io.StringIO()) as said:
        exec(html.unescape(attribute))
    printed = said.getvalue()
    return false(
        printed == "\\nOutput\n",
        "The cell's attribute has two backslashes, which HTML leaves as they are, so Python prints a backslash and an "
        f"n: `{printed.strip()}`.",
    )


def masked(mask: torch.Tensor) -> torch.Tensor:
    """The weights of the lesson's torch function."""
    return torch.zeros(mask.shape).masked_fill(mask, -math.inf).softmax(-1)


@claim("C190", "lesson", "PyTorch implementation", "Entries of the mask that are True, or 1, are blocked.")
def c190() -> Verdict:
    refused = []
    for dtype in (torch.int64, torch.uint8, torch.float32):
        try:
            masked(torch.eye(3).to(dtype))
        except RuntimeError:
            refused.append(str(dtype).removeprefix("torch."))
    works = bool((masked(torch.eye(3).bool()).diagonal() == 0).all())
    return false(
        works and len(refused) == 3,
        f"True is; 1 is an error: `masked_fill` takes boolean masks only and refuses {', '.join(refused)}. "
        "(To torch's fused attention, and in a tokenizer's mask, 1 means the opposite.)",
    )


@claim("C191", "lesson", "PyTorch implementation", "Masked positions get weight 0, since softmax gives 0 for −∞.")
def c191() -> Verdict:
    some, none = masked(torch.tensor([[True, False, False], [True, True, True]]))
    return only_when(
        some.tolist() == [0, 0.5, 0.5] and bool(none.isnan().all()),
        f"If the row has another key: {some.tolist()}. A row with nothing visible is {none.tolist()}, and this "
        "function has no guard against that.",
    )
