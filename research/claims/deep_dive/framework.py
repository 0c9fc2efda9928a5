"""Checks on the intuition, queries, keys and values, and the derivation of the formula."""

from __future__ import annotations

import torch

import qkv
from qkv_lab import translate
from research.claims import Verdict, claim, experiment, holds, only_when


@claim(
    "C237",
    "deep dive",
    "Intuition",
    "A word being generated attends to its source word: “chat” to “cat”, “assis” to “sat”, “tapis” to “mat”.",
)
def c237() -> Verdict:
    """The bundled translator, which was trained without alignments, on the same sentence."""
    found = translate("qkv-translation", "the cat sat on the mat")
    looked = {
        french: found.weights[found.target.index(french), found.source.index(english)].item()
        for french, english in (("chat", "cat"), ("assis", "sat"), ("tapis", "mat"))
    }
    text = ", ".join(f"*{word}* {weight:.2f}" for word, weight in looked.items())
    trained = experiment("C325", "bottleneck", f"Weights on the true source word in a model trained here: {text}.")
    return holds(min(looked.values()) > 0.9 and trained.kind == "holds", trained.text, *trained.by)


@claim("C238", "deep dive", "Intuition", "A soft lookup is differentiable, a hard one is not.")
def c238() -> Verdict:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 3, dtype=torch.float64, requires_grad=True) for n in (1, 4, 4))
    soft = torch.autograd.gradcheck(qkv.attend, (q, k, v))
    nudged = q.detach() + 1e-6 * torch.randn_like(q)
    chosen = [(one @ k.detach().transpose(-1, -2)).argmax(-1) for one in (q.detach(), nudged)]
    return holds(
        soft and torch.equal(*chosen),
        "Softmax attention passes a numerical check of its gradients. The index of the best key does not move with a "
        "small change of the query: its gradient is 0 wherever it has one.",
    )


@claim("C239", "deep dive", "QKV", "The key decides who is attended to, the value what is returned.")
def c239() -> Verdict:
    torch.manual_seed(0)
    q, k, v, other = torch.randn(4, 1, 1, 5, 8, dtype=torch.float64)
    out, weights = qkv.attend(q, k, v, return_weights=True)
    out_v, weights_v = qkv.attend(q, k, other, return_weights=True)
    _, weights_k = qkv.attend(q, other, v, return_weights=True)
    moved = (weights_k - weights).abs().max().item()
    return holds(
        torch.equal(weights, weights_v) and not torch.allclose(out, out_v) and moved > 0.1,
        f"With other values the weights stay the same to the last bit; with other keys they move by up to {moved:.2f}.",
    )


@claim("C240", "deep dive", "QKV", "The output projection W_O is $d_v \\times d_{model}$.")
def c240() -> Verdict:
    def shape(heads: int, size: int) -> tuple[int, int]:
        """Rows and columns of W_O, from what it takes and returns: the outputs of the unit vectors."""
        layer = qkv.nn.MultiHeadAttention(512, heads=heads, head_dim=size, bias=False)
        return tuple(layer.out_proj(torch.eye(heads * size)).shape)

    one, eight = shape(1, 64), shape(8, 64)
    return holds(
        one == (64, 512) and eight == (512, 512),
        f"For one head of 64, of which the section speaks: {one[0]} × {one[1]}. For $h$ heads side by side it is "
        f"$h\\,d_v \\times d_{{model}}$: {eight[0]} × {eight[1]} with 8.",
    )


@claim("C241", "deep dive", "Derivation", "The −∞ of the mask can be implemented as −1e9.")
def c241() -> Verdict:
    hidden = torch.tensor([True, False, False])  # which keys are hidden
    mixed = torch.zeros(3).masked_fill(hidden, -1e9).softmax(-1)
    nothing = torch.zeros(3).masked_fill(torch.ones(3, dtype=torch.bool), -1e9).softmax(-1)
    try:
        torch.zeros(3, dtype=torch.float16).masked_fill(hidden, -1e9)
        refused = False
    except RuntimeError:
        refused = True
    return only_when(
        mixed[0] == 0 and torch.allclose(nothing, torch.full((3,), 1 / 3)) and refused,
        "Yes in float32 when the query sees some key: the hidden weight is exactly 0. A row that sees nothing gets "
        "even weights of 0.33 over hidden keys, and float16 refuses the number, which is beyond its 65,504.",
    )


@claim("C242", "deep dive", "Derivation", "Step 4 takes the softmax of the scaled scores.")
def c242() -> Verdict:
    torch.manual_seed(0)
    scaled = torch.randn(4, 4)
    masked = scaled.masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
    ahead, none = (s.softmax(-1).triu(1).sum().item() for s in (scaled, masked))
    return only_when(
        ahead > 0.1 and none == 0,
        f"Only without a mask. After step 3 it must be the *masked* scores: as written, {ahead / 4:.0%} of the weight "
        "of 4 causal queries lies on later keys.",
    )


@claim(
    "C243", "deep dive", "Derivation", "With weights of 0.7 and 0.2 an output is 70 % the one value and 20 % the other."
)
def c243() -> Verdict:
    weights = torch.tensor([0.7, 0.2, 0.1])

    def share(lengths: list[float]) -> float:
        """Of the output's squared length, what the first value brings; values at right angles."""
        parts = (weights * torch.tensor(lengths)) ** 2
        return (parts[0] / parts.sum()).item()

    even, drained = share([1, 1, 1]), share([0.1, 1, 1])
    return only_when(
        even > 0.9 and drained < 0.1,
        f"As shares of the weight. What arrives is weight × length of the value: a value a tenth as long as the others "
        f"has a weight of 0.7 and {drained:.0%} of the output's squared length ({even:.0%} when all are as long). "
        "Attention sinks live on that.",
    )


@claim("C244", "deep dive", "Derivation", "Every variant of attention modifies softmax(QKᵀ/√d_k) V.")
def c244() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 6, 4, dtype=torch.float64)
    additive = qkv.scores.Additive(torch.randn(4, dtype=torch.float64))
    no_product = qkv.plan(q, k, v, score=additive).rejected["flash"]
    _, sigmoid = qkv.attend(q, k, v, normalizer=qkv.normalizers.Sigmoid(), return_weights=True)
    off = (sigmoid.sum(-1) - 1).abs().max().item()
    return only_when(
        "score" in no_product.lower() and off > 0.1,
        f"If a variant may replace every part of it. Additive scores have no $QK^T$ and came before it (2015), sigmoid "
        f"weights are no softmax (here rows miss 1 by up to {off:.1f}), and linear attention never forms the weights. "
        "What all share is a mean or sum of values, weighted by how query and key compare.",
        "[Bahdanau et al. 2015](https://arxiv.org/abs/1409.0473)",
    )
