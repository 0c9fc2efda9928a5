"""Checks of the lesson: dot products, heads, causality."""

from __future__ import annotations

import html
import inspect
import io
import math
from contextlib import redirect_stdout
from dataclasses import replace

import numpy as np
import torch
from torch import nn

import qkv
from qkv.masks import Causal
from qkv.nn import MultiHeadAttention
from qkv_lab.course import EinsumAttention
from research.claims import Verdict, claim, experiment, false, holds, only_when
from research.claims.lesson.reversal import LENGTH, VOCABULARY, Layer, Model, causal
from research.claims.settle import common

SDPA = "Scaled dot-product attention"


@claim("The library analogy", "Weights sum to 1, and the output is a blend of all values.")
def c182() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 6, 8, dtype=torch.float64)
    out, weights = qkv.attend(q, k, v, return_weights=True)
    off = (weights.sum(-1) - 1).abs().max().item()
    inside = bool(((out >= v.amin(-2, keepdim=True)) & (out <= v.amax(-2, keepdim=True))).all())
    blend = torch.allclose(out, sum(weights[..., j, None] * v[..., j, None, :] for j in range(6)))
    return holds(
        off < 1e-12 and inside and blend and bool((weights > 0).all()),
        f"Rows sum to 1 within {off:.0e}, every weight is positive (the least is {weights.min():.3f}), and the output "
        "is their convex combination of the values: no coordinate leaves the range that the values span.",
    )


@claim(SDPA, "A dot product near zero means unrelated vectors, a large one the same direction.")
def c183() -> Verdict:
    def turned(degrees: float, length: float) -> torch.Tensor:
        return length * torch.tensor([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))])

    query = turned(0, 1)
    aligned, apart = (query @ turned(0, 0.1)).item(), (query @ turned(80, 10)).item()
    return only_when(
        apart > 10 * aligned,
        "Only of vectors of one length, for it is |q| |k| cos θ: a key of length 10 at 80° scores "
        f"{apart:.2f}, one of length 0.1 in the very direction of the query {aligned:.2f}.",
    )


@claim(SDPA, "With $d_k = 512$ raw dot products might be in the range [−30, 30].")
def c185() -> Verdict:
    torch.manual_seed(0)
    deviation = math.sqrt(512)
    inside = (torch.randn(2, 10_000, 512).prod(0).sum(-1).abs() <= 30).float().mean().item()
    return only_when(
        0.75 < inside < 0.9 and 3 * deviation > 30,
        f"Most are: {inside:.0%}, for it is {30 / deviation:.2f} standard deviations to both sides. As the range of "
        f"all it is too small: three deviations are {3 * deviation:.0f}. The experiment asks for 99%, so it says that "
        "the claim does not hold.",
        *experiment("C185", "random_scores").by,
    )


@claim(SDPA, "√512 ≈ 22.6, which takes ±30 to ±1.3.")
def c187() -> Verdict:
    root = math.sqrt(512)
    return holds(f"{root:.1f}" == "22.6" and f"{30 / root:.1f}" == "1.3", f"{root:.3f} and {30 / root:.3f}.")


@claim("Interactive implementation", "The NumPy cell gives weights whose rows sum to 1 and an output of (4, 8).")
def c188() -> Verdict:
    random = np.random.RandomState(42)  # as np.random.seed(42)
    x = random.randn(4, 8)
    q, k, v = (x @ (random.randn(8, 8) * 0.1) for _ in range(3))
    scores = q @ k.T / np.sqrt(8)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = weights @ v
    return holds(
        out.shape == (4, 8) and np.allclose(weights.sum(-1), 1),
        f"The output is {out.shape} and rows sum to 1. With projections this small the weights are nearly even, "
        f"{weights.min():.3f} to {weights.max():.3f}.",
    )


@claim("Interactive implementation", "The NumPy cell prints an empty line before the shape of the output.")
def c189() -> Verdict:
    attribute = r"print(f&#39;\\nOutput&#39;)"  # as the cell stands in the page: two backslashes
    with redirect_stdout(io.StringIO()) as said:
        exec(html.unescape(attribute))
    printed = said.getvalue()
    return false(
        printed == "\\nOutput\n",
        "The cell's attribute has two backslashes, which HTML leaves as they are, so Python prints a backslash and an "
        f"n: `{printed.strip()}`.",
    )


def masked(mask: torch.Tensor) -> torch.Tensor:
    """The weights of the lesson's torch function."""
    return torch.zeros(mask.shape).masked_fill(mask, -math.inf).softmax(-1)


@claim("PyTorch implementation", "Entries of the mask that are True, or 1, are blocked.")
def c190() -> Verdict:
    refused = []
    for dtype in (torch.int64, torch.uint8, torch.float32):
        try:
            masked(torch.eye(3).to(dtype))
        except RuntimeError:
            refused.append(str(dtype).removeprefix("torch."))
    works = bool((masked(torch.eye(3).bool()).diagonal() == 0).all())
    return false(
        works and len(refused) == 3,
        f"True is; 1 is an error: `masked_fill` takes boolean masks only and refuses {', '.join(refused)}. "
        "(To torch's fused attention, and in a tokenizer's mask, 1 means the opposite.)",
    )


@claim("PyTorch implementation", "Masked positions get weight 0, since softmax gives 0 for −∞.")
def c191() -> Verdict:
    some, none = masked(torch.tensor([[True, False, False], [True, True, True]]))
    return only_when(
        some.tolist() == [0, 0.5, 0.5] and bool(none.isnan().all()),
        f"If the row has another key: {some.tolist()}. A row with nothing visible is {none.tolist()}, and this "
        "function has no guard against that.",
    )


EINSUM, TINY = "Step 1: einsum", "Step 2: tiny Transformer"


@claim("Multi-head attention", "A single head computes one attention pattern, one weighted average.")
def c192() -> Verdict:
    values = torch.eye(4, dtype=torch.float64)  # four tokens; a value's halves are what two heads would carry
    wanted = torch.cat([values[1, :2], values[2, 2:]])  # one half of token 1, the other of token 2
    grid = torch.linspace(0, 1, 21, dtype=torch.float64)
    weights = torch.cartesian_prod(grid, grid, grid)
    weights = weights[weights.sum(1) <= 1]
    one = torch.cat([weights, 1 - weights.sum(1, keepdim=True)], 1) @ values
    nearest = (one - wanted).norm(dim=1).min().item()
    two = torch.cat([torch.eye(4).double()[1] @ values[:, :2], torch.eye(4).double()[2] @ values[:, 2:]])
    return holds(
        nearest > 0.5 and torch.equal(two, wanted),
        "It has one weight for a query and a key, so its output lies in the convex hull of the values. To take one "
        f"half of the value of a token and the other half of another's, any single pattern stays {nearest:.2f} away "
        "(of a length of 1.41); two heads, with a pattern each, do it exactly.",
    )


def parameters(d: int, heads: int, bias: bool) -> int:
    return sum(p.numel() for p in MultiHeadAttention(d, heads, bias=bias).parameters())


@claim("Multi-head attention", "Multi-head attention has $4 d_{model}^2$ parameters.")
def c193() -> Verdict:
    d = 64
    without, with_bias = parameters(d, 8, bias=False), parameters(d, 8, bias=True)
    return only_when(
        without == 4 * d * d and with_bias == 4 * d * d + 4 * d,
        f"Without biases: {without:,} at d = 64. The lesson's code has them (`nn.Linear`), so it has 4 d² + 4 d = "
        f"{with_bias:,}.",
    )


@claim("Multi-head attention", "That is as many as one head of full width has.")
def c194() -> Verdict:
    counts = [parameters(64, heads, bias=True) for heads in (1, 2, 8)]
    matrix = nn.Linear(64, 64)
    one = 4 * sum(p.numel() for p in matrix.parameters())
    return holds(
        counts == [one] * 3,
        f"1, 2 and 8 heads at d = 64 have {counts[0]:,} parameters each, those of four maps of 64 to 64.",
    )


@claim("Multi-head attention", "One batched product over all heads replaces h separate ones.")
def c195() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 8, 10, 16, dtype=torch.float64)
    at_once = (q @ k.mT / 4).softmax(-1) @ v
    each = torch.stack([(q[:, h] @ k[:, h].mT / 4).softmax(-1) @ v[:, h] for h in range(8)], 1)
    off = (at_once - each).abs().max().item()
    same = f"the same within {off:.1g}" if off else "the very same numbers"
    return holds(off < 1e-14, f"A loop over 8 heads gives {same} in float64.")


@claim("Self- and cross-attention", "10 decoder tokens and 50 encoder tokens give a 10 × 50 matrix.")
def c196() -> Verdict:
    layer = MultiHeadAttention(32, 4)
    _, weights = layer(torch.randn(1, 10, 32), torch.randn(1, 50, 32), return_weights=True)
    return holds(weights.shape == (1, 4, 10, 50), f"One a head: the weights are {tuple(weights.shape)}.")


@claim(EINSUM, "The einsum strings compute multi-head attention.")
def c201() -> Verdict:
    torch.manual_seed(0)
    x, (w_q, w_k, w_v) = torch.randn(2, 7, 32).double(), torch.randn(3, 32, 4, 8).double()
    w_o, hidden = torch.randn(4, 8, 32).double(), torch.ones(7, 7, dtype=torch.bool).triu(1)
    q, k, v = (torch.einsum("bsm, mhd -> bshd", x, w) for w in (w_q, w_k, w_v))
    scores = torch.einsum("bshd, bthd -> bhst", q, k) / math.sqrt(8)
    mixed = torch.einsum("bhst, bthd -> bshd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)
    named = torch.einsum("bshd, hdm -> bsm", mixed, w_o)
    plain = nn.functional.scaled_dot_product_attention(
        *((x @ w.flatten(1)).view(2, 7, 4, 8).transpose(1, 2) for w in (w_q, w_k, w_v)), is_causal=True
    )
    off = ((plain.transpose(1, 2).flatten(2) @ w_o.flatten(0, 1) - named).abs().max() / named.abs().max()).item()
    return holds(
        off < 1e-13, f"Views, transposes and torch's own kernel give the same within a part of {off:.0e} (float64)."
    )


@claim(EINSUM, "With einsum no transpose, reshape or contiguous is needed.")
def c202() -> Verdict:
    code = inspect.getsource(EinsumAttention.forward)
    used = [name for name in (".transpose(", ".reshape(", ".view(", ".contiguous(") if name in code]
    return holds(
        not used and "torch.einsum" in code,
        "Our own layer of that kind, `qkv.course.EinsumAttention`, has none of them in its forward. Inside, einsum "
        "permutes and reshapes all the same, to make batched products.",
    )


@claim(EINSUM, "Its letters: s is the length of the source, t of the target.")
def c203() -> Verdict:
    q, k = torch.randn(1, 3, 2, 4), torch.randn(1, 5, 2, 4)  # 3 queries, 5 keys
    shape = torch.einsum("bshd, bthd -> bhst", q, k).shape
    return only_when(
        shape == (1, 2, 3, 5),
        "Only where both are one sequence, as in the lesson. In the strings s counts queries and t keys: with 3 "
        f"queries and 5 keys the scores are {tuple(shape)}. In cross-attention queries are of the target and keys of "
        "the source, so the letters are the wrong way round.",
    )


@claim(EINSUM, "The size of a head is $d_{model}$ // heads.")
def c204() -> Verdict:
    d, heads = 32, 5
    built = sum(p.numel() for p in Layer(d, heads).project) // 3 // d
    try:
        EinsumAttention(d, heads)
        refused = False
    except qkv.InputError:
        refused = True
    return only_when(
        built == 30 and refused,
        "If the number of heads divides the width. This layer does not check it, unlike the lesson's first one: with "
        f"32 and 5 heads it builds 5 × 6 = {built} dimensions without a word. `qkv.nn` refuses.",
    )


@claim(TINY, "The feed-forward layer is 4 times as wide, and norms come before the sublayers.")
def c205() -> Verdict:
    torch.manual_seed(0)
    block = qkv.nn.TransformerBlock(MultiHeadAttention(32, 4), qkv.nn.FeedForward(32, activation="gelu"))
    x = torch.randn(1, 5, 32)
    mid = x + block.attention(block.attention_norm(x))
    by_hand = mid + block.feed_forward(block.feed_forward_norm(mid))
    width = block.feed_forward.up.weight.shape[0]
    return holds(
        width == 128 and torch.allclose(by_hand, block(x), atol=1e-6),
        f"{width} for 32, and x + f(norm(x)) twice, which are the defaults of `qkv.nn` as well.",
    )


@claim(TINY, "It prints how many parameters its model has.")
def c206() -> Verdict:
    task, default = Model(VOCABULARY, 2 * LENGTH + 1), Model(VOCABULARY, 128, d=64)
    counts = [sum(p.numel() for p in model.parameters()) for model in (task, default)]
    shape = task(torch.zeros(1, 12, dtype=torch.long), causal())[0].shape
    return holds(
        counts == [26_672, 109_840] and shape == (1, 12, 16),
        f"The text does not show the number. In our rendering the model of the task has {counts[0]:,}, and one with "
        f"the defaults of the class and 16 tokens {counts[1]:,}.",
    )


CAUSAL = "Causal masking"


@claim(CAUSAL, "Each position attends only to positions before it.")
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


@claim(CAUSAL, "The mask of 5 tokens, from `triu(diagonal=1)`, is 1 where a key is blocked: above the diagonal.")
def c198() -> Verdict:
    blocked = torch.triu(torch.ones(5, 5), diagonal=1).bool()
    return holds(
        torch.equal(blocked, ~Causal().dense(5, 5)[0, 0]),
        f"Token i sees tokens 0 to i: the rows block {', '.join(map(str, blocked.sum(1).tolist()))} keys. In `qkv` the "
        "same mask is the negative, True where visible.",
    )


@claim(CAUSAL, "The diagonal must stay open, because a token's own representation is useful for its output.")
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
