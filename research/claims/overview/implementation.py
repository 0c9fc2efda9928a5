"""Checks of the overview: the implementation, and pitfalls."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

import qkv
from qkv.masks import Causal, Strided, Window
from research.claims import Verdict, claim, experiment, false, holds, only_when
from research.claims.deep_dive.efficient import pairs, reached
from research.claims.deep_dive.framework import CLARK, after_earlier, previous, strongest

SDPA, MHA, SEQ2SEQ = "4 SDPA", "4 MHA", "4 Seq2Seq"


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, p: float = 0.0) -> tuple[Tensor, Tensor]:
    """A reimplementation of its functions: scores are −1e9 where the mask is 0; weights are returned after dropout."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores if mask is None else scores.masked_fill(mask == 0, -1e9)
    weights = dropout(scores.softmax(-1), p=p)
    return weights @ v, weights


class Seq2Seq(nn.Module):
    """A reimplementation of its model: an LSTM encoder, and an LSTM decoder with attention in four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.said = nn.Embedding(100, 64), nn.Embedding(120, 64)
        self.encoder = nn.LSTM(64, 128, batch_first=True)
        self.decoder = nn.LSTM(64 + 128, 128, batch_first=True)
        self.attention, self.out = qkv.nn.MultiHeadAttention(128, 4), nn.Linear(128, 120)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.encoder(self.read(source))
        steps = []
        for token in target.split(1, dim=1):
            context = self.attention(state[0].transpose(0, 1), memory)
            out, state = self.decoder(torch.cat([self.said(token), context], -1), state)
            steps.append(self.out(out))
        return torch.cat(steps, 1)


def its_heads() -> tuple[Tensor, Tensor]:
    """Queries and keys (2, 8, 6, 8) of an untrained layer like the demonstration's, on random words."""
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 128), torch.randn(2, 6, 64)
    q, k = layer(x).detach().unflatten(-1, (16, 8)).transpose(1, 2).split(8, 1)
    return q, k


@claim(SDPA, "−1e9 where the mask is 0 gives a weight of about 0.")
def c352() -> Verdict:
    q = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    weights = attention(q, q, q, torch.ones(5, 5).tril())[1]
    return holds(weights.triu(1).max() == 0, "Exactly 0 in float32, for rows that see at least one key.")


@claim(SDPA, "With −1e9 a mask is complete: what is masked gets no weight.")
def c353() -> Verdict:
    q = torch.zeros(3, 8)
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    weights = attention(q, torch.randn(4, 8), torch.randn(4, 8), mask)[1]
    return only_when(
        weights[:2].mul(1 - mask[:2]).max() == 0 and torch.allclose(weights[2], torch.full((4,), 0.25)),
        "As long as each query may see a key. One that may see none spreads even weights of 0.25 over the four hidden "
        "ones, without an error.",
    )


@claim(SDPA, "In the demonstration “cat” now includes context from “The” and “sat”.")
def c354() -> Verdict:
    rng = np.random.RandomState(42)
    rng.randn(4 * 8 + 2 * 64 + 8 + 4 * 8)  # what the demonstration before it draws
    x = torch.from_numpy(rng.randn(3, 16))
    own = attention(x, x, x)[1].diagonal()
    return only_when(
        own.min() > 0.9,
        f"If a trace counts. Queries, keys and values are the same random vectors, so each word finds itself: "
        f"{', '.join(f'{value:.3f}' for value in own.tolist())} of the weight. *cat* takes {1 - own[1]:.1%} from the "
        "other two.",
    )


@claim(MHA, "The demonstration has output (2, 6, 64) and weights (2, 8, 6, 6).")
def c355() -> Verdict:
    out, weights = qkv.nn.MultiHeadAttention(64, 8)(torch.randn(2, 6, 64), return_weights=True)
    shapes = tuple(out.shape), tuple(weights.shape)
    return holds(shapes == ((2, 6, 64), (2, 8, 6, 6)), f"{shapes[0]} and {shapes[1]}.")


@claim(MHA, "Each row of the printed weights sums to 1.0.")
def c356() -> Verdict:
    q, k = its_heads()
    sums, kept = attention(q, k, k, p=0.1)[1].sum(-1), attention(q, k, k)[1].sum(-1)
    alone = dropout(torch.ones(1000), 0.1).max().item()  # the first row of a causal mask has one weight of 1
    return false(
        sums.min() < 0.95 and sums.max() > 1.05 and torch.allclose(kept, torch.ones_like(kept)),
        f"The module is in training mode, with dropout of 0.1 on the weights it returns. From initial weights like "
        f"its own rows sum to {sums.min():.2f} to {sums.max():.2f}, and the one weight of a causal first row, 1, "
        f"is kept as {alone:.3f} = 1 / 0.9. After `.eval()` they sum to 1.",
    )


@claim(MHA, "The 8 heads each learn a different pattern of attention.")
def c357() -> Verdict:
    weights = attention(*its_heads(), its_heads()[1])[1]
    even = (-(weights * weights.log()).sum(-1) / math.log(6)).mean((0, 2))
    return only_when(
        even.min() > 0.9,
        f"When trained. In the demonstration nothing is: with torch's initial weights the entropies of the 8 heads are "
        f"{even.min():.0%} to {even.max():.0%} of that of even weights.",
    )


@claim(MHA, "With the causal mask later positions have zero weight.")
def c358() -> Verdict:
    q, k = torch.randn(2, 2, 8, 6, 8, generator=torch.Generator().manual_seed(0))
    weights = attention(q, k, k, torch.ones(6, 6).tril(), p=0.1)[1]
    return holds(weights.triu(1).max() == 0, "Exactly, also with dropout.")


@claim(MHA, "A mask may have the shape (batch, 1, n, n) or (batch, 1, 1, n).")
def c359() -> Verdict:
    q, k = torch.randn(2, 2, 8, 6, 8, generator=torch.Generator().manual_seed(0))
    real = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    short, full = real[:, None, None], real[:, None, None].expand(2, 1, 6, 6)
    a, b = (attention(q, k, k, mask)[1] for mask in (short, full))
    return holds(
        torch.equal(a, b) and a[1, ..., 4:].max() == 0, "Both broadcast over the heads, and give the same weights."
    )


@claim(SEQ2SEQ, "Shapes: source (2, 4), target (2, 3), output (2, 3, 120).")
def c360() -> Verdict:
    with torch.no_grad():
        out = Seq2Seq()(torch.randint(100, (2, 4)), torch.randint(120, (2, 3)))
    return holds(out.shape == (2, 3, 120), f"{tuple(out.shape)}.")


@claim(SEQ2SEQ, "It is trained by teacher forcing, with the true target tokens as inputs.")
def c361() -> Verdict:
    torch.manual_seed(0)
    model, source, target = Seq2Seq().eval(), torch.randint(100, (1, 4)), torch.randint(120, (1, 3))
    changed = target.clone()
    changed[0, 1] += 1 if target[0, 1] < 119 else -1  # another second token
    with torch.no_grad():
        moved = (model(source, target) - model(source, changed))[0].abs().amax(-1) > 0
    return only_when(
        moved.tolist() == [False, True, True],
        "If the loss compares output t with token t + 1. Step t reads token t itself: with another second token the "
        "second output changes. Compared with token t, as the shapes suggest, it would learn to copy its input. There "
        "is no start token either.",
    )


@claim(SEQ2SEQ, "It handles batches of source sentences.")
def c362() -> Verdict:
    torch.manual_seed(0)
    model = Seq2Seq().eval()
    source, target = torch.randint(1, 100, (1, 4)), torch.randint(1, 120, (1, 3))
    padded = torch.cat([source, torch.zeros(1, 3, dtype=torch.long)], 1)
    with torch.no_grad():
        moved = (model(source, target) - model(padded, target)).abs().max().item()
        memory, state = model.encoder(model.read(padded))
        _, weights = model.attention(state[0].transpose(0, 1), memory, return_weights=True)
    on_padding = weights[..., 4:].sum(-1).mean().item()
    return only_when(
        moved > 1e-3 and on_padding > 0.2,
        f"Of sentences of one length. No mask is passed, so three tokens of padding after four words take "
        f"{on_padding:.0%} of the weight, and move outputs by up to {moved:.2f}. Its buffer for outputs is on the CPU "
        "wherever the model is.",
    )


@claim(SEQ2SEQ, "With vocabularies of 100 and 120 it has 359,800 parameters (not printed there).")
def c363() -> Verdict:
    count = sum(p.numel() for p in Seq2Seq().parameters())
    return holds(count == 359_800, f"{count:,}.")


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


@claim(SECTION, "Without softmax the weighted sum grows with the number of keys.")
def c376() -> Verdict:
    norms = context_norms(softmax=False)
    growth = norms[1024] / norms[16]
    return holds(
        growth > 4,
        f"Length of the sum, for random vectors: {told(norms)}. It grows about as √n: 64 times the keys, "
        f"{growth:.1f} times the length.",
    )


@claim(SECTION, "With softmax the size of the context does not depend on the length.")
def c377() -> Verdict:
    norms = context_norms(softmax=True)
    return false(
        norms[1024] < norms[16] / 3,
        f"It shrinks, as means of more random values do: {told(norms)}. What softmax gives is a bound, the longest "
        "value.",
    )


@claim(SECTION, "Normalizing is not optional but essential for stable training.")
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


@claim(SECTION, "Setting weights to 0 after softmax is wrong: the softmax still contains the masked positions.")
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


@claim(SECTION, "−∞ before softmax gives a weight of 0 and the right gradients.")
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


@claim(SECTION, "Transposing and reshaping in the wrong order keeps the shape and scrambles the data.")
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


@claim(SECTION, "A test: with query = key = value and no mask the output equals the input.")
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


@claim(SECTION, "A window with strided positions costs O(n √n).")
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


@claim(SECTION, "Through several sparse layers dependencies over long distances remain possible.")
def c385() -> Verdict:
    mask = (Window(8) | Strided(8)) & Causal()
    one, two = reached(mask, 64, 1), reached(mask, 64, 2)
    return holds(
        one < 0.5 and two == 1,
        f"A causal window of 8 with every eighth position joins {one:.0%} of the pairs of 64 tokens in one layer, "
        f"{two:.0%} in two.",
    )


@claim(SECTION, "Maps of attention show nearby words, antecedents of pronouns, syntactic dependencies.")
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
