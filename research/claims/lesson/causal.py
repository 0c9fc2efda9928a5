"""Checks on causal masking: which keys it masks, why the diagonal stays, training without it."""

from __future__ import annotations

from dataclasses import replace

import torch

import qkv
from qkv.masks import Causal
from research.claims import Verdict, claim, experiment, holds, only_when
from research.claims.settle import common

CAUSAL = "Causal masking"


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
    blocked = torch.ones(3, 3, dtype=torch.bool).triu()
    rows = torch.zeros(3, 3).masked_fill(blocked, -torch.inf).softmax(-1)
    first = "holds" if rows[0].isnan().all() and not rows[1:].isnan().any() else "false"
    others = experiment("C199", "no_mask")
    return replace(
        others,
        kind=common([first, others.kind]),
        text="The first token needs it: without its own key its row is empty, and NaN in the lesson's code. For the "
        f"other tokens, the residual carries their own content past attention. {others.text}",
    )
