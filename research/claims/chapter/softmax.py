"""Checks for sections 4.3 to 4.5: softmax, the weighted sum of values, the worked example."""

from __future__ import annotations

import torch

import qkv
from research.claims import Verdict, claim, false, holds


@claim("C020", "chapter", "4.3", "The weights of a query are never negative and sum to 1.")
def c020() -> Verdict:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 4, 50, 8, dtype=torch.float64)
    _, weights = qkv.attend(q, k, k, mask=qkv.masks.Causal(), return_weights=True)
    error = (weights.sum(-1) - 1).abs().max().item()
    return holds(
        bool((weights >= 0).all()) and error < 1e-14,
        f"200 rows under a causal mask: the least weight is {weights.min():g}, sums differ from 1 by {error:.1g}. A "
        "query that sees no key at all has no such weights.",
    )


@claim("C021", "chapter", "4.3", "Softmax is monotonic: in a row a higher score gets a higher weight.")
def c021() -> Verdict:
    torch.manual_seed(0)
    s = torch.randn(100, 20, dtype=torch.float64)
    same = torch.equal(s.argsort(-1), s.softmax(-1).argsort(-1))
    return holds(same, "Scores and weights have the same order in each of 100 rows of 20.")


@claim("C024", "chapter", "4.4", "$o_i = \\sum_j A_{ij} v_j$: an output is the sum of the values by the weights.")
def c024() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 6, 4, dtype=torch.float64)
    out, weights = qkv.attend(q, k, v, return_weights=True)
    rows = [sum(weights[0, 0, i, j] * v[0, 0, j] for j in range(6)) for i in range(6)]
    error = (out[0, 0] - torch.stack(rows)).abs().max().item()
    return holds(error < 1e-14, f"Loops against `qkv.attend`, 6 queries and keys: difference {error:.1g}.")


Q = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.float64)
K = torch.tensor([[1, 1], [1, 0], [0, 1]], dtype=torch.float64)
V = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.float64)


@claim("C025", "chapter", "4.5", "In the worked example QKᵀ is (1 1 0; 1 0 1; 2 1 1).")
def c025() -> Verdict:
    return holds((Q @ K.T).tolist() == [[1, 1, 0], [1, 0, 1], [2, 1, 1]], "Recomputed: these very numbers.")


@claim("C026", "chapter", "4.5", "Over √2 the scores are (0.71 0.71 0; 0.71 0 0.71; 1.41 0.71 0.71).")
def c026() -> Verdict:
    scaled = (Q @ K.T / 2**0.5).round(decimals=2).tolist()
    return holds(scaled == [[0.71, 0.71, 0], [0.71, 0, 0.71], [1.41, 0.71, 0.71]], "Recomputed to two decimals: equal.")


@claim("C027", "chapter", "4.5", "The first two rows of weights are (0.40 0.40 0.20) and (0.40 0.20 0.40).")
def c027() -> Verdict:
    first, second, _ = (Q @ K.T / 2**0.5).softmax(-1).round(decimals=3).tolist()
    return holds(
        first == [0.401, 0.401, 0.198] and second == [0.401, 0.198, 0.401],
        f"To three decimals they are {first} and {second}.",
    )


@claim("C028", "chapter", "4.5", "The third row of weights is (0.51 0.24 0.24).")
def c028() -> Verdict:
    row = (Q @ K.T / 2**0.5).softmax(-1)[2]
    return false(
        row.round(decimals=2).tolist() == [0.5, 0.25, 0.25],
        f"It is ({row[0]:.3f} {row[1]:.3f} {row[2]:.3f}), so (0.50 0.25 0.25) to two decimals. The printed row sums to "
        f"{0.51 + 0.24 + 0.24:.2f}: a slip of rounding.",
    )


@claim("C029", "chapter", "4.5", "The first two outputs are (0.60 0.60) and (0.80 0.60).")
def c029() -> Verdict:
    first, second, _ = qkv.attend(Q[None, None], K[None, None], V[None, None])[0, 0].round(decimals=3).tolist()
    return holds(first == [0.599, 0.599] and second == [0.802, 0.599], f"To three decimals: {first} and {second}.")


@claim("C030", "chapter", "4.5", "The third output is (0.75 0.49).")
def c030() -> Verdict:
    first, second = qkv.attend(Q[None, None], K[None, None], V[None, None])[0, 0, 2].tolist()
    return false(
        (round(first, 2), round(second, 2)) == (0.75, 0.5),
        f"It is ({first:.3f} {second:.3f}), so (0.75 0.50). The second number carries on the slip of the weights, and "
        f"another: 0.24 + 0.24 is {0.24 + 0.24:.2f}.",
    )
