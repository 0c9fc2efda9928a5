"""Checks on causal masking: which keys it masks, why the diagonal stays, training without it."""

from __future__ import annotations

import torch

import qkv
from qkv.ledger import Verdict, claim, holds, only_when, trial
from qkv.masks import Causal

CAUSAL = "Causal masking"
TRIAL = "trial `lesson_no_mask`"


@claim("C197", "lesson", CAUSAL, "Each position attends only to positions before it.")
def c197() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 5, 8)
    _, weights = qkv.attend(q, k, v, mask=Causal(), return_weights=True)
    own, future = weights.diagonal(dim1=-2, dim2=-1), weights.triu(1)
    return only_when(
        bool((own > 0).all()) and future.max() == 0,
        f"Before it, and to itself: the weights on the diagonal are {own.min():.2f} to {own.max():.2f}, those above it "
        "0. The lesson's mask, its note on the diagonal and its summary say so.",
    )


@claim(
    "C198",
    "lesson",
    CAUSAL,
    "The mask of 5 tokens, from `triu(diagonal=1)`, is 1 where a key is blocked: above the diagonal.",
)
def c198() -> Verdict:
    blocked = torch.triu(torch.ones(5, 5), diagonal=1).bool()
    return holds(
        torch.equal(blocked, ~Causal().dense(5, 5)[0, 0]),
        f"Token i sees tokens 0 to i: the rows block {', '.join(map(str, blocked.sum(1).tolist()))} keys. In `qkv` the "
        "same mask is the negative, True where visible.",
    )


@claim(
    "C199",
    "lesson",
    CAUSAL,
    "The diagonal must stay open, because a token's own representation is useful for its output.",
)
def c199() -> Verdict:
    found = trial("lesson_no_mask")["chains"]
    loss = {name: [run["alone"] for run in found[name].values()] for name in ("causal", "strict")}
    worst = max(s - c for s, c in zip(loss["strict"], loss["causal"], strict=True))
    blocked = torch.ones(3, 3, dtype=torch.bool).triu()
    first = torch.zeros(3, 3).masked_fill(blocked, -torch.inf).softmax(-1)[0]
    return only_when(
        worst < 0.05 and bool(first.isnan().all()),
        "It must for the first token, whose row would be empty, and NaN in the lesson's code. The own content does not "
        "need it, for the residual carries it past attention: with the diagonal hidden (and an empty row as 0) the "
        "next state of a Markov chain, which depends on the own token alone, is predicted within "
        f"{max(worst, 0):.3f} nats as well (three seeds; 0.05 would count as a difference).",
        TRIAL,
    )


@claim("C200", "lesson", CAUSAL, "Without the causal mask training loss is perfect and generalisation zero.")
def c200() -> Verdict:
    found = trial("lesson_no_mask")
    chain, reversal = found["chains"]["none"].values(), found["reversal"]["none"].values()
    fed, alone = [run["fed_with_the_truth"] for run in chain], [run["alone"] for run in chain]
    said, last = [run["alone"] for run in reversal], found["entropy_of_chains"] / 12
    return only_when(
        max(fed) < last + 0.05 and min(alone) > found["uniform"] and min(said) > 0.95,
        "Where the future is the only place to read the answer. So it is in a Markov chain: fed with the truth the "
        f"loss is {min(fed):.2f} to {max(fed):.2f} nats, and {last:.2f} of it must be at the last place of 12, which "
        "has no future; "
        f"knowing only the past it is {min(alone):.1f} to {max(alone):.1f}, worse than a blind guess "
        f"({found['uniform']:.2f}). But on the lesson's own task, where the answer stands in the input, too, "
        f"{min(said):.1%} or more of the symbols are right without any mask, each made from the model's own (three "
        "seeds each; what counts as perfect was set after the first runs).",
        TRIAL,
    )
