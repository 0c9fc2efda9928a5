"""Checks of the deep dive: the framework, scaling, causality, heads."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from importlib.resources import files

import numpy as np
import torch

import qkv
from qkv.masks import Causal
from qkv.nn import MultiHeadAttention
from qkv_lab import translate
from research.claims import Verdict, claim, experiment, false, holds, only_when


@claim(
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


@claim("Intuition", "A soft lookup is differentiable, a hard one is not.")
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


@claim("QKV", "The key decides who is attended to, the value what is returned.")
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


@claim("QKV", "The output projection W_O is $d_v \\times d_{model}$.")
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


@claim("Derivation", "The −∞ of the mask can be implemented as −1e9.")
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


@claim("Derivation", "Step 4 takes the softmax of the scaled scores.")
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


@claim("Derivation", "With weights of 0.7 and 0.2 an output is 70 % the one value and 20 % the other.")
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


@claim("Derivation", "Every variant of attention modifies softmax(QKᵀ/√d_k) V.")
def c244() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 6, 4, dtype=torch.float64)
    additive = qkv.scores.Additive(torch.randn(4, dtype=torch.float64))
    no_product = qkv.plan(q, k, v, score=additive).rejected["flex"]
    _, sigmoid = qkv.attend(q, k, v, normalizer=qkv.normalizers.Sigmoid(), return_weights=True)
    off = (sigmoid.sum(-1) - 1).abs().max().item()
    return only_when(
        "score" in no_product.lower() and off > 0.1,
        f"If a variant may replace every part of it. Additive scores have no $QK^T$ and came before it (2015), sigmoid "
        f"weights are no softmax (here rows miss 1 by up to {off:.1f}), and linear attention never forms the weights. "
        "What all share is a mean or sum of values, weighted by how query and key compare.",
        "[Bahdanau et al. 2015](https://arxiv.org/abs/1409.0473)",
    )


SCALE_SECTION = "Why sqrt"
LAB = "[the lab's draws of scores](../experiments/README.md#random_scores)"
SCORES = torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=torch.float64)  # of its example


def as_text(x: torch.Tensor, digits: int = 4) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in x.tolist())


def products(d: int, n: int = 20_000) -> tuple[torch.Tensor, torch.Tensor]:
    """Products $q_l k_l$ of one dimension, and whole dot products, of standard normal vectors."""
    q, k = torch.randn(2, n, d, generator=torch.Generator().manual_seed(0))
    return q[:, 0] * k[:, 0], (q * k).sum(-1)


@claim(SCALE_SECTION, "Each product $q_l k_l$ has mean 0 and variance 1, their sum variance $d_k$.")
def c245() -> Verdict:
    one, whole = products(64)
    mean, variance, ratio = one.mean().item(), one.var().item(), whole.var().item() / 64
    return holds(
        abs(mean) < 0.03 and abs(variance - 1) < 0.06 and abs(ratio - 1) < 0.03,
        f"Of 20,000 draws a product has mean {mean:.3f} and variance {variance:.2f}; the sum over 64 dimensions has "
        f"{ratio:.3f} times 64.",
    )


@claim(SCALE_SECTION, "At $d_k = 64$ the standard deviation of a dot product is 8.")
def c246() -> Verdict:
    found = products(64)[1].std().item()
    return holds(
        math.sqrt(64) == 8 and abs(found - 8) < 0.15, f"√64 = 8; {found:.2f} in 20,000 draws from standard normals."
    )


@claim(SCALE_SECTION, "At $d_k = 512$ the standard deviation of a dot product is about 22.7.")
def c247() -> Verdict:
    return false(f"{math.sqrt(512):.1f}" == "22.6", f"√512 = {math.sqrt(512):.3f}: 22.6, a slip of rounding.")


@claim(SCALE_SECTION, "softmax(1, 2, 0.5, 1.5) is 0.1863, 0.5064, 0.1130, 0.2943.")
def c248() -> Verdict:
    right, printed = SCORES.softmax(-1), torch.tensor([0.1863, 0.5064, 0.1130, 0.2943])
    return false(
        (right[1] - printed[1]).abs() > 0.05 and printed.sum() > 1.09,
        f"It is {as_text(right)}. The printed numbers add up to {printed.sum():.2f}; those of a softmax add up to 1.",
    )


@claim(SCALE_SECTION, "softmax of 8 times these scores is 0.0003, 0.9993, 0.0000, 0.0004.")
def c249() -> Verdict:
    right = (8 * SCORES).softmax(-1)
    return false(
        abs(right[1] - 0.9817) < 1e-4,
        f"It is {as_text(right)}: the scores 16 and 12 differ by 4, and $e^{{-4}}$ is {math.exp(-4):.4f}. The point, "
        "that the row saturates, stands.",
    )


@claim(SCALE_SECTION, "When softmax saturates, all gradient goes through the largest weight.")
def c250() -> Verdict:
    slopes = [(p * (1 - p)).max().item() for p in (SCORES.softmax(-1)[1:2], (8 * SCORES).softmax(-1)[1:2])]
    found = experiment("C250", "random_scores")
    return false(
        slopes[1] < slopes[0] / 10 and found.kind == "false",
        f"In its own example the slope of the largest weight by its own score falls from {slopes[0]:.3f} to "
        f"{slopes[1]:.3f}: scores get little gradient anywhere, and only the *values* get theirs by weight. "
        + found.text,
        LAB,
    )


@claim("Q1", "With a standard deviation of 8 scores may span −20 to 20.")
def c319() -> Verdict:
    scores = products(64)[1]
    within, rows = (scores.abs() <= 20).double().mean().item(), scores[:16_384].view(-1, 128).abs().amax(-1)
    return holds(
        abs(within - math.erf(2.5 / math.sqrt(2))) < 0.005 and rows.median() > 15,
        f"±20 is 2.5 standard deviations: {within:.1%} of 20,000 scores lie within, and the largest of 128 has a "
        f"median size of {rows.median():.0f}.",
    )


@claim("Q4", "Without the scale, at $d_k = 64$ and the start, softmax is nearly one-hot: about 1.0 for one token.")
def c321() -> Verdict:
    found = experiment("C321", "random_scores")
    return false(
        found.kind == "false",
        f"Not of queries and keys with variance 1, and common small initial weights make less. {found.text}",
        LAB,
    )


row = as_text


@claim("Varieties", "In self-attention a token's new representation sums over all other tokens.")
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


@claim("Varieties", "In cross-attention every position of the decoder can look at every one of the encoder.")
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


@claim("Varieties", "Diagram of causal attention: position 1 can attend to 2 and 3, and 3 to 1 is masked.")
def c264() -> Verdict:
    sees = Causal().dense(3, 3)[0, 0]
    return false(
        not sees[0, 1] and not sees[0, 2] and bool(sees[2, 0]) and bool(sees[2, 1]),
        "The reverse: 2 sees 1, and 3 sees 1 and 2; 1 sees neither. The arrows are right as a flow of *information*, "
        "from earlier to later, but are labelled as attending. Its own table a page later has it right.",
    )


@claim("Causal", "−∞ where `triu(diagonal=1)` is set gives later tokens a weight of 0.")
def c265() -> Verdict:
    torch.manual_seed(0)
    scores = torch.randn(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1)
    return holds(
        weights.triu(1).abs().max() == 0 and torch.allclose(weights.sum(-1), torch.ones(5)),
        "Exactly 0 above the diagonal of 5 × 5 random scores, and every row adds up to 1.",
    )


@claim("Causal", "The mask, drawn: 1 is allowed, 0 is blocked.")
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


@claim("Causal", "The causal mask is computed once and serves every layer.")
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


@claim("Causal", "Setting scores to 0 before softmax does not block.")
def c268() -> Verdict:
    torch.manual_seed(0)
    weights = torch.randn(6, 6).tril().softmax(-1)
    ahead = weights.triu(1).sum().item() / 6
    return holds(ahead > 0.1, f"Of 6 random causal rows with zeros instead, {ahead:.0%} of the weight lies ahead.")


@claim("Causal", "softmax(1, 2, 0, 0) = 0.091, 0.247, 0.091, 0.091.")
def c269() -> Verdict:
    right, printed = torch.tensor([1.0, 2.0, 0.0, 0.0]).softmax(-1), torch.tensor([0.091, 0.247, 0.091, 0.091])
    return false(
        (right - printed).abs().max() > 0.3 and printed.sum() < 0.53,
        f"It is {row(right)}. The printed row adds up to {printed.sum():.2f}; that hidden keys keep weight is right.",
    )


@claim("Causal", "softmax(1, 2, −∞, −∞) = 0.269, 0.731, 0, 0.")
def c270() -> Verdict:
    right = torch.tensor([1.0, 2.0, -torch.inf, -torch.inf]).softmax(-1)
    return holds(row(right, 3) == "0.269, 0.731, 0.000, 0.000", f"{row(right, 3)}.")


HEADS_SECTION = "GQA/MQA"
CLARK = "[Clark et al. 2019](https://arxiv.org/abs/1906.04341)"


def kept(kv_heads: int, heads: int = 32) -> int:
    """The cache size per token in numbers: keys and values of heads of size 4."""
    layer = MultiHeadAttention(4 * heads, heads, kv_heads=kv_heads)
    return sum(x.numel() for x in layer.keys_values(torch.zeros(1, 1, 4 * heads)))


@cache
def mini() -> tuple[np.ndarray, list[str]]:
    """Weights of qkv-mini on the first tokens of a program, (layer, head, query, key), and these tokens."""
    text = (files("qkv.profiler") / "default_code.txt").read_text(encoding="utf-8")[:700]
    data = qkv.profile("qkv-mini", text, probe=False, map_tokens=1000, progress=False).data
    return data["weights"].values[0], [str(token) for token in data["key_token"].values[0]]


def strongest(looks: np.ndarray) -> tuple[str, float, float]:
    """For pairs (query, key): the head with the largest mean weight, this weight, and that of uniform weights."""
    weights, _ = mini()
    rows = looks.any(1)
    by_head = (weights * looks).sum(-1)[..., rows].mean(-1)
    layer, head = np.unravel_index(by_head.argmax(), by_head.shape)
    even = (looks.sum(1) / np.arange(1, len(looks) + 1))[rows].mean()
    return f"{layer}.{head}", float(by_head.max()), float(even)


def previous() -> np.ndarray:
    """Pairs of each query and the previous token."""
    return np.eye(len(mini()[1]), k=-1, dtype=bool)


def after_earlier() -> np.ndarray:
    """Pairs of each query and the tokens after earlier occurrences of its token, as induction heads attend to."""
    tokens = np.array(mini()[1])
    looks = np.zeros((len(tokens), len(tokens)), bool)
    looks[:, 1:] = (tokens[:, None] == tokens[None])[:, :-1]
    return np.tril(looks)


@claim(HEADS_SECTION, "Grouped-query attention with g groups has h/g key and value heads and a cache of 1/g.")
def c305() -> Verdict:
    share = kept(8) / kept(32)
    return false(
        MultiHeadAttention(128, 32, kv_heads=8).kv_heads == 8 and share == 1 / 4,
        f"It has g, and a cache of g/h: with h = 32 and g = 8, 8 key heads and {share:.2f} of the cache, where the "
        "table says 4 heads and 1/8. The table is right if g is the *size* of a group; the text says number.",
        "[Ainslie et al. 2023](https://arxiv.org/abs/2305.13245)",
    )


@claim(HEADS_SECTION, "Multi-query attention has one key and one value head, and the smallest cache.")
def c306() -> Verdict:
    counts = {g: kept(g) for g in (1, 2, 8, 32)}
    return holds(
        counts[1] == min(counts.values()) and counts[32] == 32 * counts[1],
        f"1/h of multi-head attention's: numbers a token for h = 32 heads of 4, by key heads: {counts}.",
    )


@claim(
    HEADS_SECTION,
    "Grouped-query attention lies between: as many groups as heads are multi-head, one is multi-query attention.",
)
def c307() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, 6, 4, dtype=torch.float64)
    errors = []
    for groups in (8, 2, 1):
        repeated = [x[:, :groups].repeat_interleave(8 // groups, 1) for x in (k, v)]
        errors.append((qkv.attend(q, k[:, :groups], v[:, :groups]) - qkv.attend(q, *repeated)).abs().max().item())
    return holds(
        max(errors) < 1e-12,
        f"8 query heads with 8, 2 and 1 key heads agree to {max(errors):.1g} with 8 key heads of which each group's "
        "are copies.",
    )


@claim(HEADS_SECTION, "Quality: multi-head is best, grouped-query near it, multi-query slightly lower.")
def c308() -> Verdict:
    found, reported = experiment("C308", "shared_keys"), "[Ainslie et al. 2023](https://arxiv.org/abs/2305.13245)"
    return replace(found, by=(*found.by, f"{reported}, for large T5 models"))


@claim("Q6", "Heads specialise: in syntax, coreference, neighbours, relative positions.")
def c323() -> Verdict:
    (head, near, even), (other, again, even_again) = strongest(previous()), strongest(after_earlier())
    return holds(
        head != other and near > 5 * even and again > 5 * even_again,
        f"Some do. In `qkv-mini` head {head} puts {near:.2f} of its weight on the token before (even weights: "
        f"{even:.2f}), and head {other} {again:.2f} on what came after its token last time ({even_again:.2f}). Heads "
        "for direct objects, determiners and coreferent mentions were found in BERT, beside many without such a role.",
        CLARK,
    )
