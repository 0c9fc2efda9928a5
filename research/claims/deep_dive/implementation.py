"""Checks on the PyTorch code: return values, parameter counts, accepted arguments."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout

import qkv
from research.claims import Verdict, claim, holds, only_when

SECTION = "Code"


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


@claim("C310", "deep dive", SECTION, "After softmax a row in which all is masked sums to 0.")
def c310() -> Verdict:
    row = torch.full((4,), -torch.inf).softmax(-1)
    return only_when(
        bool(row.isnan().all()) and torch.nan_to_num(row).sum() == 0,
        "After the *next* line. Softmax of nothing but −∞ is 0/0: all four weights are NaN, until `nan_to_num` makes "
        "them 0.",
    )


@claim("C312", "deep dive", SECTION, "Dropout of attention weights is applied in training only.")
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


@claim("C313", "deep dive", SECTION, "In the mask, True or 1 means: mask this position.")
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
    "C314",
    "deep dive",
    SECTION,
    "The demo has output (2, 10, 512), weights (2, 8, 10, 10), and zeros above the diagonal.",
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


@claim("C315", "deep dive", SECTION, "The returned weights are a distribution for each query.")
def c315() -> Verdict:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 8, 10, 64)
    evaluated, trained = (attention(q, k, k, p=p)[1].sum(-1) for p in (0.0, 0.1))
    return only_when(
        torch.allclose(evaluated, torch.ones_like(evaluated)) and trained.max() > 1.02 and trained.min() < 0.98,
        f"In evaluation. In training, as in its demo with p = 0.1, weights are returned after dropout: random rows "
        f"of 10 then sum to {trained.min():.2f} to {trained.max():.2f}.",
    )


@claim("C316", "deep dive", SECTION, "Multi-head attention of width 512 without biases has 1,048,576 parameters.")
def c316() -> Verdict:
    count = sum(p.numel() for p in qkv.nn.MultiHeadAttention(512, 8, bias=False).parameters())
    return holds(count == 1_048_576, f"4 × 512² = {count:,}, for any number of heads.")


@claim("C317", "deep dive", SECTION, "Merging heads undoes splitting them.")
def c317() -> Verdict:
    x = torch.randn(2, 10, 512)
    heads = x.view(2, 10, 8, 64).transpose(1, 2)
    merged = heads.transpose(1, 2).contiguous().view(2, 10, 512)
    return holds(torch.equal(x, merged), "To the last bit, on (2, 10, 512) and 8 heads.")


@claim("C318", "deep dive", SECTION, "The function that draws weights takes any tensor of them.")
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
