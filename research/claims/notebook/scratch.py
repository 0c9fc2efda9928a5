"""Checks of the notebook: attention from scratch, and its details."""

from __future__ import annotations

import math

import torch
from matplotlib import colormaps
from torch import nn

import qkv
from qkv.masks import Causal, Padding
from research.claims import Verdict, claim, false, holds, only_when
from research.claims.results import benchmark


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None = None, fill: float = -1e9):
    """The notebook's attention of (batch, n, d); `hidden` is True where a key is masked."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    weights = (scores if hidden is None else scores.masked_fill(hidden, fill)).softmax(-1)
    return weights @ v, weights


def hidden(n: int) -> torch.Tensor:
    """The notebook's causal mask: True where a key is masked."""
    return torch.ones(n, n, dtype=torch.bool).triu(1)


@claim("3.1", "Of Q, K, V (1, 4, 8) the output is (1, 4, 8), the weights are (1, 4, 4), and rows sum to 1.")
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


@claim("3.2", "In the heatmap (YlOrRd) bright cells are high attention, dark cells low.")
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


@claim("3.2", "Rows are queries, columns are keys.")
def c151() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 8), torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    weights = by_hand(q, k, v)[1][0]
    return holds(
        weights.shape == (2, 5) and torch.allclose(weights.sum(1), torch.ones(2)),
        f"With 2 queries and 5 keys the weights are {weights.shape[0]} × {weights.shape[1]}, and it is the rows that "
        f"sum to 1 (columns sum to {weights.sum(0).min():.2f} … {weights.sum(0).max():.2f}).",
    )


@claim("3.2", "Without a mask each position can look at all positions, future ones too.")
def c152() -> Verdict:
    torch.manual_seed(42)
    weights = by_hand(*(torch.randn(1, 4, 8) for _ in range(3)))[1][0]
    future = weights[hidden(4)]
    return holds(
        bool((future > 0).all()),
        f"All {len(future)} weights above the diagonal are positive, {future.sum():.2f} in sum.",
    )


@claim("4", "Position i may look only at positions before it, $j < i$.")
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


@claim("4", "The 4 × 4 pattern is lower triangular: row i sees positions 0 to i.")
def c154() -> Verdict:
    seen = [row.nonzero().flatten().tolist() for row in Causal().dense(4, 4)[0, 0]]
    return holds(seen == [list(range(i + 1)) for i in range(4)], f"The rows see {', '.join(map(str, seen))}.")


@claim("4", "The mask for 6 positions is True above the diagonal, and True means hidden.")
def c155() -> Verdict:
    mask = hidden(6)
    return holds(
        torch.equal(~mask, Causal().dense(6, 6)[0, 0]) and mask.sum() == 15,
        f"{int(mask.sum())} of 36 entries are True, all above the diagonal; it is the opposite of "
        "`qkv.masks.Causal()`, where True is visible.",
    )


@claim("4", "Filling with −1e9 leaves exact zeros above the diagonal.")
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


@claim("4", "−1e9 is a safe stand-in for −∞.")
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


INF = math.inf


@claim("8.1", "Unscaled scores have a far larger standard deviation than scaled ones ($d_k = 64$).")
def c170() -> Verdict:
    torch.manual_seed(42)
    q, k = torch.randn(1, 10, 64), torch.randn(1, 10, 64)
    scores = q @ k.mT
    many = torch.randn(2, 100_000, 64).prod(0).sum(-1).std()
    return holds(
        scores.std() > 5 * (scores / 8).std() and abs(many - 8) < 0.1,
        f"{scores.std():.2f} and {(scores / 8).std():.2f} if these are the first numbers of seed 42; √64 = 8 and 1 are "
        f"expected ({many:.2f} over 100,000 products).",
    )


@claim("8.1", "The scaling factor 1/√64 is printed as 0.1250.")
def c171() -> Verdict:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 5, 64, dtype=torch.float64)
    weights = qkv.attend(q, k, k, return_weights=True)[1]
    ratio = weights.log().diff(dim=-1) / (q @ k.mT).diff(dim=-1)  # of log weights to products: the factor applied
    printed = {f"{value:.4f}" for value in ratio.flatten().tolist()} | {f"{64**-0.5:.4f}"}
    return holds(printed == {"0.1250"}, f"It is {printed.pop()}, which is what attention applies: 1/√64.")


@claim("8.2", "The softmax of a row of nothing but −∞ is NaN.")
def c173() -> Verdict:
    row = torch.full((3,), -INF).softmax(-1)
    ours = qkv.attend(*torch.randn(3, 1, 1, 3, 4), mask=~qkv.masks.Prefix(3))
    return holds(
        bool(row.isnan().all()) and bool((ours == 0).all()),
        f"It is {row.tolist()}. `qkv` defines such a row as no attention at all: its output is 0.",
    )


@claim("8.2", "`nan_to_num` turns such rows into zeros.")
def c174() -> Verdict:
    row = torch.nan_to_num(torch.full((3,), -INF).softmax(-1), nan=0.0)
    return holds(bool((row == 0).all()), f"It gives {row.tolist()}.")


@claim("8.2", "That makes rows that see nothing safe.")
def c175() -> Verdict:
    def gradient(additive: bool) -> torch.Tensor:
        torch.manual_seed(0)
        scores, hidden = torch.randn(2, 3, requires_grad=True), torch.tensor([[True] * 3, [False] * 3])
        hides = torch.zeros(2, 3).masked_fill(hidden, -INF)
        masked = scores + hides if additive else scores.masked_fill(hidden, -INF)
        torch.nan_to_num(masked.softmax(-1), nan=0.0).square().sum().backward()
        return scores.grad

    filled, added = gradient(additive=False), gradient(additive=True)
    return only_when(
        bool(filled.isfinite().all()) and bool(added.isnan().any()),
        "Forwards always; backwards only if −∞ was put in with `masked_fill`, which passes no gradient to what it "
        f"filled (here {filled[0].tolist()}). Where −∞ was added to the scores, their gradient is {added[0].tolist()}.",
    )


@claim("8.2", "Padding tokens make whole rows of the mask hidden.")
def c176() -> Verdict:
    real = torch.tensor([False, False, True, True])  # two tokens of padding on the left
    empty = {
        "right, causal": int((~(Causal() & Padding(torch.tensor([2]))).dense(4, 4)[0, 0].any(-1)).sum()),
        "right": int((~Padding(torch.tensor([2])).dense(4, 4)[0, 0].any(-1)).sum()),
        "left": int((~real.expand(4, 4).any(-1)).sum()),
        "left, causal": int((~(real & Causal().dense(4, 4)[0, 0]).any(-1)).sum()),
    }
    return only_when(
        empty == {"right, causal": 0, "right": 0, "left": 0, "left, causal": 2},
        "Padding hides columns: keys. A whole row is left with nothing only when padding on the left meets a causal "
        f"mask ({empty['left, causal']} of 4 rows with 2 tokens of padding; {empty['right, causal']} with padding on "
        f"the right, {empty['left']} on the left without the causal mask), or when a sequence is nothing but padding.",
    )


@claim("8.2", "Its code needs `nan_to_num` against NaN.")
def c177() -> Verdict:
    hidden = torch.ones(1, 3, dtype=torch.bool)
    rows = {fill: torch.zeros(1, 3).masked_fill(hidden, fill).softmax(-1) for fill in (-INF, -1e9)}
    return only_when(
        bool(rows[-INF].isnan().all()) and torch.allclose(rows[-1e9], torch.tensor(1 / 3)),
        "Only with a fill of −∞. Section 4 fills with −1e9, and a row that sees nothing is then not NaN but uniform, "
        f"{rows[-1e9][0, 0]:.2f} each, so there the guard finds nothing to mend.",
    )


@claim("8.3", "Dropout acts on the weights after the softmax, and on the output after the projection.")
def c178() -> Verdict:
    torch.manual_seed(0)
    layer = qkv.nn.MultiHeadAttention(32, 4, attention=qkv.Attention(dropout_p=0.3))
    drop, x = nn.Dropout(0.3), torch.randn(1, 50, 32)
    with torch.no_grad():
        out = drop(layer(x))
        sums = layer(x, return_weights=True)[1].sum(-1)
        zeros = (out == 0).float().mean()
        layer.eval(), drop.eval()
        same = torch.equal(drop(layer(x)), drop(layer(x)))
        whole = layer(x, return_weights=True)[1].sum(-1)
    return holds(
        sums.std() > 0.01 and zeros > 0.2 and same and torch.allclose(whole, torch.ones(1)),
        f"With both at 0.3, in training rows of weights sum to {sums.min():.2f} … {sums.max():.2f} and {zeros:.0%} of "
        "the output is 0; in evaluation rows sum to 1 and two runs agree bit by bit.",
    )


@claim("9", "No sequential dependency is why transformers are so fast.")
def c180() -> Verdict:
    cells = benchmark("decoder.json")["cells"]
    training, decoding = (
        cells[name]["tokens a second"]["DecoderLM"]
        for name in ("training, vocabulary 256", "decoding, vocabulary 256, batch 8")
    )
    return only_when(
        training > 2 * decoding,
        "For training and for reading a prompt. To write is still one token after another: with 8 texts at once the "
        f"same model does {training:,.0f} tokens a second forward and backward, and writes {decoding:,.0f}, forward "
        "alone.",
        "[benchmarks](../benchmarks.md#models)",
    )
