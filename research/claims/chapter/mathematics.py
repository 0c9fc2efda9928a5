"""Checks for sections 3 to 4.2: projections, scores, the formula, the scale."""

from __future__ import annotations

import math

import torch

import qkv
from qkv.nn import MultiHeadAttention
from research.claims import Drifted, Verdict, claim, experiment, holds, only_when


@claim("C007", "chapter", "3.1", "Queries and keys have shape n × d_k, values n × d_v, the output n × d_v.")
def c007() -> Verdict:
    n, d_model, d_k, d_v = 5, 12, 3, 7
    x, w_q, w_k, w_v = (torch.randn(shape) for shape in ((n, d_model), (d_model, d_k), (d_model, d_k), (d_model, d_v)))
    q, k, v = x @ w_q, x @ w_k, x @ w_v
    out = qkv.attend(q[None, None], k[None, None], v[None, None])[0, 0]
    shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape), tuple(out.shape)
    return holds(shapes == ((n, d_k), (n, d_k), (n, d_v), (n, d_v)), f"n = 5, d_k = 3, d_v = 7: {shapes}.")


@claim("C008", "chapter", "3.1", "Queries, keys and values are all linear projections of one and the same input X.")
def c008() -> Verdict:
    torch.manual_seed(0)
    layer = MultiHeadAttention(8, 2, d_context=6, fused=False)  # keys and values of vectors 6 wide
    target, source = torch.randn(1, 3, 8), torch.randn(1, 5, 6)
    out = layer(target, context=source)
    moved = layer(target, context=source + 1)
    return only_when(
        out.shape == (1, 3, 8) and not torch.allclose(out, moved),
        "In self-attention. In cross-attention, the chapter's own section 6.1, keys and values are projections of "
        "another sequence: here 3 queries 8 wide attend to 5 vectors 6 wide.",
    )


@claim("C009", "chapter", "3.2", "Separate W_Q, W_K and W_V can express more than X itself in all three places.")
def c009() -> Verdict:
    x, w = torch.randn(6, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    scores = (x @ w) @ (x @ w).T
    if not torch.allclose(scores, scores.T):
        raise Drifted("with W_Q = W_K the scores are not symmetric")
    return experiment(
        "C009",
        "projections",
        "With W_Q = W_K the scores are symmetric, so that no relation has a direction. One layer has to find the "
        "colour of the *next* symbol.",
    )


@claim("C010", "chapter", "3.3", "$q \\cdot k = \\|q\\| \\|k\\| \\cos\\theta$.")
def c010() -> Verdict:
    torch.manual_seed(0)
    length, other, angle = torch.rand(3, 100, dtype=torch.float64) * 3
    q = torch.stack([length, torch.zeros(100)], -1)
    k = torch.stack([other * angle.cos(), other * angle.sin()], -1)  # turned from q by `angle`
    error = ((q * k).sum(-1) - length * other * angle.cos()).abs().max().item()
    return holds(error < 1e-14, f"100 pairs of known lengths and angles: the largest difference is {error:.1g}.")


@claim("C011", "chapter", "3.3", "$QK^T$ is n × n, and its entry (i, j) is $q_i \\cdot k_j$.")
def c011() -> Verdict:
    torch.manual_seed(0)
    q, k = torch.randn(2, 6, 4, dtype=torch.float64)
    by_hand = [[sum(a * b for a, b in zip(x, y, strict=True)) for y in k.tolist()] for x in q.tolist()]
    error = (q @ k.T - torch.tensor(by_hand, dtype=torch.float64)).abs().max().item()
    return holds(error < 1e-14, f"Loops and the product, 6 queries and keys: shape 6 × 6, difference {error:.1g}.")


@claim("C012", "chapter", "4.1", "Score, scale, softmax, sum: the four steps are softmax(QKᵀ / √d_k) V.")
def c012() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 20, 16)
    scores = q @ k.mT
    scaled = scores / math.sqrt(16)
    weights = scaled.exp() / scaled.exp().sum(-1, keepdim=True)
    steps = weights @ v
    own = (qkv.attend(q, k, v) - steps).abs().max().item()
    torchs = (torch.nn.functional.scaled_dot_product_attention(q, k, v) - steps).abs().max().item()
    return holds(
        max(own, torchs) < 2e-6,
        f"In float32 the four steps differ from torch's kernel by {torchs:.1g} and from `qkv.attend` by {own:.1g}.",
    )


@claim("C013", "chapter", "4.1", "$A_{ij} = \\exp(s_{ij}) / \\sum_l \\exp(s_{il})$, along each row.")
def c013() -> Verdict:
    torch.manual_seed(0)
    s = torch.randn(4, 5, dtype=torch.float64)
    rows = [[math.exp(x) / sum(math.exp(y) for y in row) for x in row] for row in s.tolist()]
    error = (torch.softmax(s, -1) - torch.tensor(rows, dtype=torch.float64)).abs().max().item()
    return holds(error < 1e-15, f"Loops and torch's softmax of the last dimension: difference {error:.1g}.")


@claim("C014", "chapter", "4.2", "For independent parts of mean 0 and variance 1, Var(q · k) = d_k.")
def c014() -> Verdict:
    generator = torch.Generator().manual_seed(0)
    ratio = {}
    for d in (4, 64, 512):
        q, k = torch.randn(2, 20_000, d, generator=generator)
        ratio[d] = ((q * k).sum(-1).var() / d).item()
    found = ", ".join(f"{d}: {r:.3f}" for d, r in ratio.items())
    return holds(all(abs(r - 1) < 0.05 for r in ratio.values()), f"Variance over d_k of 20,000 products, {found}.")


@claim(
    "C017", "chapter", "4.2", "At d_k of 64 or 128 unscaled scores saturate the softmax, and its gradient is near 0."
)
def c017() -> Verdict:
    torch.manual_seed(0)

    def slopes(deviation: float) -> tuple[torch.Tensor, torch.Tensor]:
        p = torch.softmax(torch.randn(20_000, 10, dtype=torch.float64) * deviation, -1)
        return (torch.diag_embed(p) - p[:, :, None] * p[:, None]).flatten(1).norm(dim=1), p.amax(-1)

    scaled, (at_64, top) = slopes(1.0)[0].mean().item(), slopes(8.0)
    at_128, one_hot = slopes(128**0.5)[0].mean().item(), at_64[top > 0.99].mean().item()
    return only_when(
        one_hot < 0.05 * scaled and at_128 > 0.25 * scaled,
        "For a row that does saturate: where the top of 10 weights is above 0.99, the softmax's Jacobian has norm "
        f"{one_hot:.3f}, against {scaled:.2f} for scaled scores. Not all rows do: over all of them it is "
        f"{at_64.mean().item():.2f} at d_k = 64 and {at_128:.2f} at 128, about half and a third.",
        "[experiment `random_scores`](../experiments/README.md#random_scores)",
    )
