"""Checks on the kinds of attention and the causal mask."""

from __future__ import annotations

import torch

import qkv
from qkv.masks import Causal
from research.claims import Verdict, claim, false, holds, only_when


def shown(x: torch.Tensor, digits: int = 4) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in x.tolist())


@claim("C262", "deep dive", "Varieties", "In self-attention a token's new representation sums over all other tokens.")
def c262() -> Verdict:
    torch.manual_seed(0)
    x = torch.randn(1, 1, 6, 8)
    _, weights = qkv.attend(x, x, x, return_weights=True)
    own = weights[0, 0].diagonal()
    return only_when(
        own.min() > 0,
        f"Over all tokens, itself included: of 6 random tokens each puts {own.min():.2f} to {own.max():.2f} on itself. "
        "Only a mask that hides the diagonal would leave it out.",
    )


@claim(
    "C263",
    "deep dive",
    "Varieties",
    "In cross-attention every position of the decoder can look at every one of the encoder.",
)
def c263() -> Verdict:
    torch.manual_seed(0)
    layer = qkv.nn.MultiHeadAttention(16, 2)
    decoder, encoder = torch.randn(1, 3, 16), torch.randn(1, 5, 16, requires_grad=True)
    out = layer(decoder, encoder)
    reached = torch.stack([torch.autograd.grad(o.sum(), encoder, retain_graph=True)[0].norm(dim=-1)[0] for o in out[0]])
    return holds(
        out.shape == decoder.shape and bool((reached > 0).all()),
        "3 queries and 5 keys: the output has the decoder's length, and all 15 gradients are nonzero.",
    )


@claim(
    "C264",
    "deep dive",
    "Varieties",
    "Diagram of causal attention: position 1 can attend to 2 and 3, and 3 to 1 is masked.",
)
def c264() -> Verdict:
    sees = Causal().dense(3, 3)[0, 0]
    return false(
        not sees[0, 1] and not sees[0, 2] and bool(sees[2, 0]) and bool(sees[2, 1]),
        "The reverse: 2 sees 1, and 3 sees 1 and 2; 1 sees neither. The arrows are right as a flow of *information*, "
        "from earlier to later, but are labelled as attending. Its own table a page later has it right.",
    )


@claim("C265", "deep dive", "Causal", "−∞ where `triu(diagonal=1)` is set gives later tokens a weight of 0.")
def c265() -> Verdict:
    torch.manual_seed(0)
    scores = torch.randn(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1)
    return holds(
        weights.triu(1).abs().max() == 0 and torch.allclose(weights.sum(-1), torch.ones(5)),
        "Exactly 0 above the diagonal of 5 × 5 random scores, and every row adds up to 1.",
    )


@claim("C266", "deep dive", "Causal", "The mask, drawn: 1 is allowed, 0 is blocked.")
def c266() -> Verdict:
    drawn = torch.ones(4, 4).tril().bool()
    code = torch.ones(4, 4).triu(1).bool()
    scores = torch.zeros(4, 4).masked_fill(drawn, -torch.inf)  # the drawn mask, given to the code above it
    ahead = scores[:3].softmax(-1).triu(1).sum(-1)
    return only_when(
        torch.equal(drawn, ~code) and torch.equal(ahead, torch.ones(3)) and bool(scores[3].isinf().all()),
        "Only of the drawing. The code a few lines above means the opposite, True is blocked: given the drawn mask it "
        "puts all weight on *later* tokens, and the last query sees nothing.",
    )


@claim("C267", "deep dive", "Causal", "The causal mask is computed once and serves every layer.")
def c267() -> Verdict:
    torch.manual_seed(0)
    mask = Causal().dense(6, 6)
    layers = [qkv.nn.MultiHeadAttention(8, 2).double() for _ in range(3)]
    x = torch.randn(1, 6, 8, dtype=torch.float64, requires_grad=True)
    h = x
    for layer in layers:
        h = h + layer(h, mask=mask)
    (grad,) = torch.autograd.grad(h[0, 2].sum(), x)
    return holds(
        bool((grad[0, :3].norm(dim=-1) > 0).all()) and grad[0, 3:].abs().max() == 0,
        "After three layers with one mask tensor, the third token depends on the first three and on nothing later.",
    )


@claim("C268", "deep dive", "Causal", "Setting scores to 0 before softmax does not block.")
def c268() -> Verdict:
    torch.manual_seed(0)
    weights = torch.randn(6, 6).tril().softmax(-1)
    ahead = weights.triu(1).sum().item() / 6
    return holds(ahead > 0.1, f"Of 6 random causal rows with zeros instead, {ahead:.0%} of the weight lies ahead.")


@claim("C269", "deep dive", "Causal", "softmax(1, 2, 0, 0) = 0.091, 0.247, 0.091, 0.091.")
def c269() -> Verdict:
    right, printed = torch.tensor([1.0, 2.0, 0.0, 0.0]).softmax(-1), torch.tensor([0.091, 0.247, 0.091, 0.091])
    return false(
        (right - printed).abs().max() > 0.3 and printed.sum() < 0.53,
        f"It is {shown(right)}. The printed row adds up to {printed.sum():.2f}; that hidden keys keep weight is right.",
    )


@claim("C270", "deep dive", "Causal", "softmax(1, 2, −∞, −∞) = 0.269, 0.731, 0, 0.")
def c270() -> Verdict:
    right = torch.tensor([1.0, 2.0, -torch.inf, -torch.inf]).softmax(-1)
    return holds(shown(right, 3) == "0.269, 0.731, 0.000, 0.000", f"{shown(right, 3)}.")
