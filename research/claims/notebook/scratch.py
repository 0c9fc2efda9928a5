"""Checks for sections 3 and 4: attention from scratch, its heatmap, and the causal mask."""

from __future__ import annotations

import math

import torch
from matplotlib import colormaps

import qkv
from qkv.masks import Causal
from research.claims import Verdict, claim, false, holds, only_when


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None = None, fill: float = -1e9):
    """The notebook's attention of (batch, n, d); `hidden` is True where a key is masked."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    weights = (scores if hidden is None else scores.masked_fill(hidden, fill)).softmax(-1)
    return weights @ v, weights


def hidden(n: int) -> torch.Tensor:
    """The notebook's causal mask: True where a key is masked."""
    return torch.ones(n, n, dtype=torch.bool).triu(1)


@claim(
    "C149",
    "notebook",
    "3.1",
    "Of Q, K, V (1, 4, 8) the output is (1, 4, 8), the weights are (1, 4, 4), and rows sum to 1.",
)
def c149() -> Verdict:
    torch.manual_seed(42)
    q, k, v = (torch.randn(1, 4, 8) for _ in range(3))
    out, weights = by_hand(q, k, v)
    off = (weights.sum(-1) - 1).abs().max().item()
    same = torch.allclose(out, qkv.attend(q[:, None], k[:, None], v[:, None])[:, 0], atol=1e-6)
    return holds(
        out.shape == (1, 4, 8) and weights.shape == (1, 4, 4) and off < 1e-6 and same,
        f"Shapes are {tuple(out.shape)} and {tuple(weights.shape)}, rows sum to 1 within {off:.0e}, and the output is "
        "that of `qkv.attend`.",
    )


@claim("C150", "notebook", "3.2", "In the heatmap (YlOrRd) bright cells are high attention, dark cells low.")
def c150() -> Verdict:
    def luminance(at: float) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colormaps["YlOrRd"](at)[:3]]
        return sum(part * c for part, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = luminance(0.0), luminance(1.0)
    return false(
        low > 0.9 and high < 0.1,
        f"The other way round: this colour map goes from pale yellow at the lowest weight (luminance {low:.2f}) to "
        f"dark red at the highest ({high:.2f}). Bright is high in viridis.",
    )


@claim("C151", "notebook", "3.2", "Rows are queries, columns are keys.")
def c151() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 8), torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    weights = by_hand(q, k, v)[1][0]
    return holds(
        weights.shape == (2, 5) and torch.allclose(weights.sum(1), torch.ones(2)),
        f"With 2 queries and 5 keys the weights are {weights.shape[0]} × {weights.shape[1]}, and it is the rows that "
        f"sum to 1 (columns sum to {weights.sum(0).min():.2f} … {weights.sum(0).max():.2f}).",
    )


@claim("C152", "notebook", "3.2", "Without a mask each position can look at all positions, future ones too.")
def c152() -> Verdict:
    torch.manual_seed(42)
    weights = by_hand(*(torch.randn(1, 4, 8) for _ in range(3)))[1][0]
    future = weights[hidden(4)]
    return holds(
        bool((future > 0).all()),
        f"All {len(future)} weights above the diagonal are positive, {future.sum():.2f} in sum.",
    )


@claim("C153", "notebook", "4", "Position i may look only at positions before it, $j < i$.")
def c153() -> Verdict:
    n = 4
    drawn, strict = (~hidden(n)).sum(1), torch.ones(n, n).tril(-1).sum(1)
    agree = torch.equal(~hidden(n), Causal().dense(n, n)[0, 0])
    return only_when(
        agree and drawn[0] == 1 and strict[0] == 0,
        "Only if i is the token to be predicted, which is made at position i − 1. Of positions in the matrix the mask "
        f"allows $j ≤ i$, as it is drawn: rows see {', '.join(map(str, drawn.tolist()))} keys. With $j < i$ the first "
        "row would see none.",
    )


@claim("C154", "notebook", "4", "The 4 × 4 pattern is lower triangular: row i sees positions 0 to i.")
def c154() -> Verdict:
    seen = [row.nonzero().flatten().tolist() for row in Causal().dense(4, 4)[0, 0]]
    return holds(seen == [list(range(i + 1)) for i in range(4)], f"The rows see {', '.join(map(str, seen))}.")


@claim("C155", "notebook", "4", "The mask for 6 positions is True above the diagonal, and True means hidden.")
def c155() -> Verdict:
    mask = hidden(6)
    return holds(
        torch.equal(~mask, Causal().dense(6, 6)[0, 0]) and mask.sum() == 15,
        f"{int(mask.sum())} of 36 entries are True, all above the diagonal; it is the opposite of "
        "`qkv.masks.Causal()`, where True is visible.",
    )


@claim("C156", "notebook", "4", "Filling with −1e9 leaves exact zeros above the diagonal.")
def c156() -> Verdict:
    torch.manual_seed(42)
    x = [torch.randn(1, 4, 8) for _ in range(3)]
    largest = {
        str(t): by_hand(*(a.to(t) for a in x), hidden(4))[1][0][hidden(4)].max()
        for t in (torch.float32, torch.bfloat16)
    }
    return holds(
        all(w == 0 for w in largest.values()),
        f"The largest weight above the diagonal is {largest['torch.float32']:.0f} in float32 and in bfloat16: e to the "
        "−1e9 underflows.",
    )


@claim("C157", "notebook", "4", "−1e9 is a safe stand-in for −∞.")
def c157() -> Verdict:
    torch.manual_seed(42)
    x = [torch.randn(1, 4, 8) for _ in range(3)]
    same = torch.equal(by_hand(*x, hidden(4))[1], by_hand(*x, hidden(4), fill=-math.inf)[1])
    try:
        by_hand(*(a.half() for a in x), hidden(4))
        refused = False
    except RuntimeError:
        refused = True
    nothing = by_hand(*x, torch.ones(4, 4, dtype=torch.bool))[1]
    return only_when(
        same and refused and torch.allclose(nothing, torch.tensor(0.25)),
        "In float32 and bfloat16, in rows that see something: there the weights are the very same. float16 ends at "
        "65,504 and refuses the fill with an error, and a row that sees nothing becomes uniform "
        f"({nothing[0, 0, 0]:.2f} on each of 4 hidden keys) instead of 0. The experiment asks for both as well, so it "
        "says that the claim as it stands does not hold.",
        "[experiment `random_scores`](../experiments/README.md#random_scores)",
    )
