"""Checks of the deep dive: the worked example, and the implementation."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import dropout

import qkv
from research.claims import Verdict, claim, false, holds, only_when

WORKED_EXAMPLE_SECTION = "Worked example"
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


@claim(WORKED_EXAMPLE_SECTION, "Raw scores: 1.25, 0.90, 1.05; 0.90, 1.32, 0.63; 1.10, 0.92, 0.90.")
def c271() -> Verdict:
    return holds(rounded(RAW, 6) == [1.25, 0.9, 1.05, 0.9, 1.32, 0.63, 1.1, 0.92, 0.9], f"All nine: {shown(RAW, 2)}.")


@claim(WORKED_EXAMPLE_SECTION, "Scaled scores: 0.884, 0.636, 0.742; 0.636, 0.933, 0.446; 0.778, 0.651, 0.636.")
def c272() -> Verdict:
    printed = [0.884, 0.636, 0.742, 0.636, 0.933, 0.446, 0.778, 0.651, 0.636]
    wrong = [i for i, (a, b) in enumerate(zip(rounded(SCALED), printed, strict=True)) if a != b]
    return false(
        wrong == [5], f"That of *cat* and *sat* is 0.63 / √2 = {SCALED[1, 2]:.5f}, so 0.445; the other eight are right."
    )


@claim(WORKED_EXAMPLE_SECTION, "The exponentials add up to 6.410, 5.994 and 5.983.")
def c273() -> Verdict:
    sums = SCALED.exp().sum(-1)
    from_rounded = torch.tensor([0.884, 0.636, 0.742], dtype=torch.float64).exp().sum().item()
    return holds(
        (sums - torch.tensor([6.410, 5.994, 5.983])).abs().max() < 1.5e-3,
        f"{shown(sums)}, to the rounding of what goes in: its own rounded scores give {from_rounded:.3f} for the "
        "first.",
    )


@claim(WORKED_EXAMPLE_SECTION, "Weights of “The”: 0.378, 0.295, 0.327.")
def c274() -> Verdict:
    return false(
        rounded(WEIGHTS[0]) == [0.378, 0.295, 0.328] and round(2.100 / 6.410, 3) == 0.328,
        f"{shown(WEIGHTS[0])}: the last is {WEIGHTS[0, 2]:.5f}, and its own 2.100 / 6.410 gives 0.328 too.",
    )


@claim(WORKED_EXAMPLE_SECTION, "Weights of “cat”: 0.315, 0.424, 0.260.")
def c275() -> Verdict:
    return holds(
        rounded(WEIGHTS[1]) == [0.315, 0.424, 0.260],
        f"{shown(WEIGHTS[1])}. Rounded, the row adds up to {sum(rounded(WEIGHTS[1])):.3f}.",
    )


@claim(WORKED_EXAMPLE_SECTION, "Weights of “sat”: 0.364, 0.320, 0.316.")
def c276() -> Verdict:
    return holds(rounded(WEIGHTS[2]) == [0.364, 0.320, 0.316], f"{shown(WEIGHTS[2])}.")


@claim(WORKED_EXAMPLE_SECTION, "“The” attends mostly to itself.")
def c277() -> Verdict:
    own = WEIGHTS[0, 0].item()
    return only_when(
        WEIGHTS[0].argmax() == 0 and own < 0.5,
        f"If *mostly* means more than to any other: its own weight is {own:.3f}, the largest of three but no majority, "
        f"and {1 - own:.0%} goes elsewhere.",
    )


@claim(WORKED_EXAMPLE_SECTION, "“sat” attends roughly uniformly.")
def c278() -> Verdict:
    low, high = WEIGHTS[2].min().item(), WEIGHTS[2].max().item()
    entropy = (-(WEIGHTS[2] * WEIGHTS[2].log()).sum() / math.log(3)).item()
    return holds(
        entropy > 0.99 and high - low < 0.05,
        f"From {low:.3f} to {high:.3f}; the entropy is {entropy:.1%} of that of even weights.",
    )


@claim(WORKED_EXAMPLE_SECTION, "Output of “The”: 0.284, 0.345.")
def c279() -> Verdict:
    return false(
        rounded(OUT[0]) == [0.283, 0.344], f"{shown(OUT[0], 5)}, so 0.283, 0.344: a slip of adding rounded terms."
    )


@claim(WORKED_EXAMPLE_SECTION, "Output of “cat”: 0.322, 0.428.")
def c280() -> Verdict:
    return false(rounded(OUT[1]) == [0.322, 0.429], f"{shown(OUT[1], 5)}, so 0.322, 0.429: a slip of rounding.")


@claim(WORKED_EXAMPLE_SECTION, "Output of “sat”: 0.291, 0.361.")
def c281() -> Verdict:
    return holds(rounded(OUT[2]) == [0.291, 0.361], f"{shown(OUT[2], 5)}.")


@claim("Code", "The script at the end reproduces the worked example.")
def c311() -> Verdict:
    out, weights = qkv.attend(*(x.float()[None, None] for x in (Q, K, V)), return_weights=True)
    printed = torch.tensor([[0.284, 0.345], [0.322, 0.428], [0.291, 0.361]])
    return holds(
        torch.allclose(weights[0, 0], WEIGHTS.float(), atol=1e-6) and (out[0, 0] - printed).abs().max() < 1.1e-3,
        f"To the slips of rounding noted above. In float32, weights: {shown(weights[0, 0], 4)}; outputs: "
        f"{shown(out[0, 0], 4)}.",
    )


IMPLEMENTATION_SECTION = "Code"


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, p: float = 0.0) -> tuple[Tensor, Tensor]:
    """A reimplementation of its function: True masks, rows of NaN become 0, weights are returned after dropout."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    scores = scores if mask is None else scores.masked_fill(mask, -torch.inf)
    weights = torch.nan_to_num(scores.softmax(-1), nan=0.0)
    weights = dropout(weights, p=p) if p > 0 else weights
    return weights @ v, weights


def later(n: int) -> Tensor:
    """Its causal mask: True above the diagonal."""
    return torch.ones(n, n, dtype=torch.bool).triu(1)


@claim(IMPLEMENTATION_SECTION, "After softmax a row in which all is masked sums to 0.")
def c310() -> Verdict:
    row = torch.full((4,), -torch.inf).softmax(-1)
    return only_when(
        bool(row.isnan().all()) and torch.nan_to_num(row).sum() == 0,
        "After the *next* line. Softmax of nothing but −∞ is 0/0: all four weights are NaN, until `nan_to_num` makes "
        "them 0.",
    )


@claim(IMPLEMENTATION_SECTION, "Dropout of attention weights is applied in training only.")
def c312() -> Verdict:
    torch.manual_seed(0)
    q = torch.randn(1, 2, 8, 4)
    with torch.no_grad():
        _, weights = attention(q, q, q, p=0.5)
    dropped = (weights == 0).double().mean().item()
    return only_when(
        dropped > 0.3,
        f"Through the module, which passes 0 when it evaluates. The function itself drops whenever p > 0: called alone "
        f"with p = 0.5 it loses {dropped:.0%} of the weights, also without gradients.",
    )


@claim(IMPLEMENTATION_SECTION, "In the mask, True or 1 means: mask this position.")
def c313() -> Verdict:
    q = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(0))
    _, weights = attention(q, q, q, later(3))
    try:
        attention(q, q, q, later(3).int())
        refused = False
    except RuntimeError:
        refused = True
    return only_when(
        refused and weights.triu(1).abs().max() == 0,
        "True does. A mask of ones and zeros raises a RuntimeError, since `masked_fill` takes booleans only.",
    )


@claim(
    IMPLEMENTATION_SECTION, "The demo has output (2, 10, 512), weights (2, 8, 10, 10), and zeros above the diagonal."
)
def c314() -> Verdict:
    torch.manual_seed(0)
    layer, x = qkv.nn.MultiHeadAttention(512, 8, bias=False), torch.randn(2, 10, 512)
    out, weights = layer(x, mask=~later(10), return_weights=True)
    ahead = dropout(weights, 0.1).triu(1).abs().max()
    return holds(
        out.shape == (2, 10, 512) and weights.shape == (2, 8, 10, 10) and ahead == 0,
        f"{tuple(out.shape)}, {tuple(weights.shape)}, and exact zeros, also after dropout.",
    )


@claim(IMPLEMENTATION_SECTION, "The returned weights are a distribution for each query.")
def c315() -> Verdict:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 8, 10, 64)
    evaluated, trained = (attention(q, k, k, p=p)[1].sum(-1) for p in (0.0, 0.1))
    return only_when(
        torch.allclose(evaluated, torch.ones_like(evaluated)) and trained.max() > 1.02 and trained.min() < 0.98,
        f"In evaluation. In training, as in its demo with p = 0.1, weights are returned after dropout: random rows "
        f"of 10 then sum to {trained.min():.2f} to {trained.max():.2f}.",
    )


@claim(IMPLEMENTATION_SECTION, "Multi-head attention of width 512 without biases has 1,048,576 parameters.")
def c316() -> Verdict:
    count = sum(p.numel() for p in qkv.nn.MultiHeadAttention(512, 8, bias=False).parameters())
    return holds(count == 1_048_576, f"4 × 512² = {count:,}, for any number of heads.")


@claim(IMPLEMENTATION_SECTION, "Merging heads undoes splitting them.")
def c317() -> Verdict:
    x = torch.randn(2, 10, 512)
    heads = x.view(2, 10, 8, 64).transpose(1, 2)
    merged = heads.transpose(1, 2).contiguous().view(2, 10, 512)
    return holds(torch.equal(x, merged), "To the last bit, on (2, 10, 512) and 8 heads.")


@claim(IMPLEMENTATION_SECTION, "The function that draws weights takes any tensor of them.")
def c318() -> Verdict:
    refused = []
    for weights in (torch.ones(1, 8, 4, 4, dtype=torch.bfloat16), torch.ones(1, 8, 4, 4, device="meta")):
        try:
            weights[0, 0].detach().numpy()
        except (TypeError, NotImplementedError):
            refused.append(weights)
    return only_when(
        len(refused) == 2,
        "Any on the CPU whose type NumPy has. It calls `.detach().numpy()`, which raises for bfloat16 and for a tensor "
        "on another device (tried: torch's device without data); `.float().cpu()` before it would do.",
    )
