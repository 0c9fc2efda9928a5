"""Checks for sections 8 and 9 and the reading list: scaling, fully masked rows, dropout, speed."""

from __future__ import annotations

import math

import torch
from torch import nn

import qkv
from qkv.masks import Causal, Padding
from research.claims import Verdict, claim, holds, only_when
from research.claims.results import benchmark

INF = math.inf


@claim("C170", "notebook", "8.1", "Unscaled scores have a far larger standard deviation than scaled ones ($d_k = 64$).")
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


@claim("C171", "notebook", "8.1", "The scaling factor 1/√64 is printed as 0.1250.")
def c171() -> Verdict:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 5, 64, dtype=torch.float64)
    weights = qkv.attend(q, k, k, return_weights=True)[1]
    ratio = weights.log().diff(dim=-1) / (q @ k.mT).diff(dim=-1)  # of log weights to products: the factor applied
    printed = {f"{value:.4f}" for value in ratio.flatten().tolist()} | {f"{64**-0.5:.4f}"}
    return holds(printed == {"0.1250"}, f"It is {printed.pop()}, which is what attention applies: 1/√64.")


@claim("C173", "notebook", "8.2", "The softmax of a row of nothing but −∞ is NaN.")
def c173() -> Verdict:
    row = torch.full((3,), -INF).softmax(-1)
    ours = qkv.attend(*torch.randn(3, 1, 1, 3, 4), mask=torch.zeros(3, 3, dtype=torch.bool))
    return holds(
        bool(row.isnan().all()) and bool((ours == 0).all()),
        f"It is {row.tolist()}. `qkv` defines such a row as no attention at all: its output is 0.",
    )


@claim("C174", "notebook", "8.2", "`nan_to_num` turns such rows into zeros.")
def c174() -> Verdict:
    row = torch.nan_to_num(torch.full((3,), -INF).softmax(-1), nan=0.0)
    return holds(bool((row == 0).all()), f"It gives {row.tolist()}.")


@claim("C175", "notebook", "8.2", "That makes rows that see nothing safe.")
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


@claim("C176", "notebook", "8.2", "Padding tokens make whole rows of the mask hidden.")
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


@claim("C177", "notebook", "8.2", "Its code needs `nan_to_num` against NaN.")
def c177() -> Verdict:
    hidden = torch.ones(1, 3, dtype=torch.bool)
    rows = {fill: torch.zeros(1, 3).masked_fill(hidden, fill).softmax(-1) for fill in (-INF, -1e9)}
    return only_when(
        bool(rows[-INF].isnan().all()) and torch.allclose(rows[-1e9], torch.tensor(1 / 3)),
        "Only with a fill of −∞. Section 4 fills with −1e9, and a row that sees nothing is then not NaN but uniform, "
        f"{rows[-1e9][0, 0]:.2f} each, so there the guard finds nothing to mend.",
    )


@claim(
    "C178", "notebook", "8.3", "Dropout acts on the weights after the softmax, and on the output after the projection."
)
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


@claim("C180", "notebook", "9", "No sequential dependency is why transformers are so fast.")
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
