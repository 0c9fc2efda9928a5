"""Checks on the common pitfalls and tricks."""

from __future__ import annotations

import torch

import qkv
from qkv.masks import Causal, Strided, Window
from research.claims import Verdict, claim, experiment, false, holds, only_when
from research.claims.deep_dive.efficient import pairs, reached
from research.claims.deep_dive.heads import CLARK, after_earlier, previous, strongest

SECTION = "Pitfalls"
LENGTHS = (16, 64, 256, 1024)


def context_norms(*, softmax: bool) -> dict[int, float]:
    """The mean norm of the output by number of keys, for 20 standard normal queries, keys and values of size 16."""
    found = {}
    for n in LENGTHS:
        generator = torch.Generator().manual_seed(n)
        q, k, v = (torch.randn(20, m, 16, generator=generator) for m in (1, n, n))
        scores = q @ k.mT / 4
        found[n] = ((scores.softmax(-1) if softmax else scores) @ v).norm(dim=-1).mean().item()
    return found


def told(norms: dict[int, float]) -> str:
    return ", ".join(f"{norm:.2f} with {n:,} keys" for n, norm in norms.items())


@claim("C376", "overview", SECTION, "Without softmax the weighted sum grows with the number of keys.")
def c376() -> Verdict:
    norms = context_norms(softmax=False)
    growth = norms[1024] / norms[16]
    return holds(
        growth > 4,
        f"Length of the sum, for random vectors: {told(norms)}. It grows about as √n: 64 times the keys, "
        f"{growth:.1f} times the length.",
    )


@claim("C377", "overview", SECTION, "With softmax the size of the context does not depend on the length.")
def c377() -> Verdict:
    norms = context_norms(softmax=True)
    return false(
        norms[1024] < norms[16] / 3,
        f"It shrinks, as means of more random values do: {told(norms)}. What softmax gives is a bound, the longest "
        "value.",
    )


@claim("C378", "overview", SECTION, "Normalizing is not optional but essential for stable training.")
def c378() -> Verdict:
    trained = experiment("C378", "normalizers")
    return false(
        trained.kind == "false",
        "Sigmoid and elu + 1 weights, which need not add up to 1, train as well as the same weights divided by their "
        f"sum, in the small models of the lab. {trained.text} What is not optional is to keep the sum in bounds, as "
        "σ(s − ln n) does from the start. Raw scores as weights, which the section warns of, were not trained.",
        *trained.by,
        "[Ramapuram et al. 2024](https://arxiv.org/abs/2409.04431)",
    )


@claim(
    "C379",
    "overview",
    SECTION,
    "Setting weights to 0 after softmax is wrong: the softmax still contains the masked positions.",
)
def c379() -> Verdict:
    torch.manual_seed(0)
    scores, values = torch.randn(6, 6, dtype=torch.float64, requires_grad=True), torch.randn(6, 4, dtype=torch.float64)
    seen = torch.ones(6, 6).tril().bool()
    zeroed = scores.softmax(-1) * seen
    (grad,) = torch.autograd.grad((zeroed @ values).sum(), scores)
    leak, least = grad[~seen].abs().max().item(), zeroed.sum(-1).min().item()
    repaired = zeroed / zeroed.sum(-1, keepdim=True)
    error = (repaired - scores.masked_fill(~seen, -torch.inf).softmax(-1)).abs().max().item()
    return holds(
        leak > 0.01 and least < 0.9 and error < 1e-12,
        f"Hidden scores get gradients of up to {leak:.2f}, and rows sum to as little as {least:.2f}. Divided by their "
        f"sums again, the weights are those of masking before softmax, to {error:.1g}.",
    )


@claim("C380", "overview", SECTION, "−∞ before softmax gives a weight of 0 and the right gradients.")
def c380() -> Verdict:
    torch.manual_seed(0)
    scores = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    hidden = torch.ones(5, 5).triu(1).bool()
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    (grad,) = torch.autograd.grad((weights @ torch.randn(5, 4, dtype=torch.float64)).sum(), scores)
    return holds(
        weights[hidden].abs().max() == 0 and grad[hidden].abs().max() == 0 and grad[4].abs().max() > 0,
        "Both exactly 0 on hidden pairs, and gradients elsewhere, as long as each row sees a key.",
    )


@claim(
    "C382", "overview", SECTION, "Transposing and reshaping in the wrong order keeps the shape and scrambles the data."
)
def c382() -> Verdict:
    x = torch.arange(2 * 3 * 8).view(2, 3, 8)
    right, wrong = x.view(2, 3, 4, 2).transpose(1, 2), x.view(2, 4, 3, 2)
    merged = right.reshape(2, 3, 8)  # without the transposition back
    return holds(
        right.shape == wrong.shape and not torch.equal(right, wrong) and not torch.equal(merged, x),
        f"Splitting (2, 3, 8) into 4 heads by `view(2, 4, 3, 2)` has the right shape and "
        f"{(right != wrong).double().mean():.0%} wrong entries; merging without transposing back, "
        f"{(merged != x).double().mean():.0%}.",
    )


@claim("C383", "overview", SECTION, "A test: with query = key = value and no mask the output equals the input.")
def c383() -> Verdict:
    torch.manual_seed(0)
    x = torch.randn(1, 1, 6, 8, dtype=torch.float64)
    error = ((qkv.attend(x, x, x) - x).norm() / x.norm()).item()
    one = x[:, :, :1]
    same = one.expand(1, 1, 6, 8)
    exact = [torch.allclose(qkv.attend(y, y, y), y) for y in (one, same)]
    alone = torch.allclose(qkv.attend(x, x, x, mask=torch.eye(6, dtype=torch.bool)[None, None]), x)
    return false(
        error > 0.1 and all(exact) and alone,
        f"Every output is a mean over all tokens. Six random vectors of 8 come back {error:.0%} off, and correct code "
        "fails the test. It is exact for one token, for equal tokens, or where each sees itself alone.",
    )


@claim("C384", "overview", SECTION, "A window with strided positions costs O(n √n).")
def c384() -> Verdict:
    counts = {n: pairs((Window(int(n**0.5)) | Strided(int(n**0.5))) & Causal(), n) for n in (64, 256, 1024)}
    ratio = [count / n**1.5 for n, count in counts.items()]
    return holds(
        max(ratio) < 2,
        "With both of √n: "
        + ", ".join(f"{count:,} pairs at n = {n:,}" for n, count in counts.items())
        + f", {min(ratio):.2f} to {max(ratio):.2f} times n √n; full causal attention has {pairs(Causal(), 1024):,} at "
        "1,024.",
    )


@claim("C385", "overview", SECTION, "Through several sparse layers dependencies over long distances remain possible.")
def c385() -> Verdict:
    mask = (Window(8) | Strided(8)) & Causal()
    one, two = reached(mask, 64, 1), reached(mask, 64, 2)
    return holds(
        one < 0.5 and two == 1,
        f"A causal window of 8 with every eighth position joins {one:.0%} of the pairs of 64 tokens in one layer, "
        f"{two:.0%} in two.",
    )


@claim(
    "C386", "overview", SECTION, "Maps of attention show nearby words, antecedents of pronouns, syntactic dependencies."
)
def c386() -> Verdict:
    (head, near, even), (other, again, even_again) = strongest(previous()), strongest(after_earlier())
    return only_when(
        near > 5 * even and again > 5 * even_again,
        f"Those of some heads. In `qkv-mini` head {head} shows the token before ({near:.2f} of its weight; even "
        f"weights {even:.2f}) and head {other} what followed the same token earlier ({again:.2f}; {even_again:.2f}). "
        "Heads for coreference and for syntax were found in BERT; most of its heads look at delimiters, at fixed "
        "offsets, or everywhere.",
        CLARK,
    )
