"""Checks for sections 8.1 to 8.4: what sinks are, how they form, and what they are for."""

from __future__ import annotations

import torch

import qkv
from qkv import masks
from qkv.models import DecoderConfig, DecoderLM
from research.claims import Verdict, claim, holds, only_when
from research.claims.chapter.mini import heads_of_mini
from research.claims.models import everywhere


@claim("C070", "chapter", "8.3", "A small angle to a query is the same as a high dot product with it.")
def c070() -> Verdict:
    q, k, _, weights = heads_of_mini()
    products, norm = q[:, :, 1:] @ k.mT, k.norm(dim=-1)
    cosine = products / q[:, :, 1:].norm(dim=-1, keepdim=True) / norm[:, :, None]
    visible = torch.ones(cosine.shape[2:]).tril(1).bool()
    best = [x.masked_fill(~visible, -torch.inf).argmax(-1) for x in (products, cosine)]
    other = (best[0] != best[1]).double().mean().item()
    sink = weights[:, :, 1:, 0].mean(-1)
    layer, head = divmod(int(sink.argmax()), sink.shape[1])
    ratio = (norm[layer, head, 0] / norm[layer, head, 1:].mean()).item()
    computed = only_when(
        other > 0.1 and abs(ratio - 1) > 0.1,
        "Of vectors equally long: q · k = ‖q‖ ‖k‖ cos θ has the lengths, too. In qkv-mini the visible key of the "
        f"smallest angle is not that of the greatest product for {other:.0%} of the queries, over all heads. In head "
        f"{layer}.{head}, which puts {sink.max():.2f} of its weight on the first token, the length of the first key is "
        f"{ratio:.2f} of the others' mean, so that "
        f"{'the angle has to make up for the length' if ratio < 1 else 'the length adds to the angle'}.",
        "[Gu et al. 2025](https://arxiv.org/abs/2410.10781)",
    )
    return everywhere("C070", computed)


@claim("C071", "chapter", "8.3", "At position 1, under a causal mask, attention returns exactly v_1.")
def c071() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 20, 8)
    error = (qkv.attend(q, k, v, mask=masks.Causal())[:, :, 0] - v[:, :, 0]).abs().max().item()
    return holds(error == 0, f"4 heads, 20 tokens, float32: the difference is {error:g}.")


@claim(
    "C072", "chapter", "8.3", "States at position 1 never mix with others: they are MLPs of the embedding, in a row."
)
def c072() -> Verdict:
    torch.manual_seed(0)
    model = DecoderLM(DecoderConfig(vocab_size=50, d_model=32, layers=3, heads=4)).eval()
    ids, other = torch.arange(10)[None], torch.tensor([[0, *range(20, 29)]])
    alone = (model.hidden(ids) - model.hidden(other))[:, 0].abs().max().item()
    block, x = model.blocks[0], torch.randn(1, 1, 32)
    w = block.attention.in_proj.weight[64:]  # W_V
    y = x + torch.nn.functional.linear(block.attention_norm(x) @ w.T, block.attention.out_proj.weight)
    y = y + block.feed_forward(block.feed_forward_norm(y))
    error = (block(x) - y).abs().max().item()
    return only_when(
        alone < 1e-6 and error < 1e-6,
        f"As to mixing: with all later tokens changed, the first state differs by {alone:g}. But the chain is not "
        "of MLPs alone: the weight of 1 lets W_V W_O through, and norms and residuals are in it, too (a layer so "
        f"written out differs by {error:.1g}).",
    )


@claim("C075", "chapter", "8.4", "With weight 0.9 on a sink of value near 0 the output is only small contributions.")
def c075() -> Verdict:
    torch.manual_seed(0)
    v = torch.randn(1000, 31, 16, dtype=torch.float64)
    weights = 0.1 * torch.rand(1000, 31, dtype=torch.float64).softmax(-1)  # what is left for the others
    out, longest = (weights[..., None] * v).sum(1).norm(dim=-1), v.norm(dim=-1).amax(-1)
    computed = holds(
        bool((out <= 0.1 * longest).all()),
        f"It cannot be longer than 0.1 of the longest value; of 1,000 random rows of 31 other keys it is "
        f"{(out / longest).mean():.3f} of it in the mean.",
    )
    return everywhere("C075", computed)
