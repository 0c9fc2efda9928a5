"""Checks on positions, complexity, and the takeaways."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

import qkv
from qkv.features import elu_plus_one
from qkv.masks import Causal
from qkv.models import DecoderConfig, DecoderLM
from qkv.nn import FeedForward, MultiHeadAttention, TransformerBlock
from qkv.normalizers import Identity
from qkv.scores import Features
from research.claims import Verdict, claim, holds, only_when
from research.claims.lesson.reversal import Model

POSITIONS, COST = "Positional information", "Complexity"


@claim(POSITIONS, "Without positions the model cannot tell [A, B, C] from [C, A, B].")
def c225() -> Verdict:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 32, dtype=torch.float64)
    change = {}
    for name, mask in (("no mask", None), ("causal", Causal())):
        attention = MultiHeadAttention(32, 4, attention=qkv.Attention(mask=mask))
        block = TransformerBlock(attention, FeedForward(32)).double()
        change[name] = (block(x).mean(1) - block(x[:, [2, 0, 1]]).mean(1)).abs().max().item()
    return only_when(
        change["no mask"] < 1e-12 and change["causal"] > 0.01,
        "Only without a mask. What a layer gives for the three tokens, averaged, then changes by "
        f"{change['no mask']:.0e} when they are turned round; under a causal mask, as in the lesson's own model, by "
        f"{change['causal']:.2f}: how many tokens one sees tells where one is.",
    )


@claim(POSITIONS, "Position embeddings are added in `TinyTransformer.__init__`.")
def c226() -> Verdict:
    model = Model(16, 13)
    made = model.places.weight.shape
    ids, mask = torch.zeros(1, 5, dtype=torch.long), torch.ones(5, 5, dtype=torch.bool).tril()
    before = model(ids, mask)[0]
    with torch.no_grad():
        model.places.weight.normal_()
    return only_when(
        not torch.equal(before, model(ids, mask)[0]),
        f"As a table of {made[0]} × {made[1]} that belongs to the model. Added to the tokens it is in `forward`, with "
        "each input: a change of the table after `__init__` changes what comes out.",
    )


def flops(n: int, d: int) -> int:
    """Of scores and weighted sum of one head, counted by torch as it computes them."""
    q, k, v = torch.randn(3, 1, n, d)
    with FlopCounterMode(display=False) as counter:
        torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)
    return counter.get_total_flops()


@claim(COST, "Attention takes $O(n^2 d)$ operations, and its weights $O(n^2)$ memory a head.")
def c230() -> Verdict:
    base = flops(64, 16)
    longer, wider = flops(128, 16) / base, flops(64, 32) / base
    weights = qkv.attend(*torch.randn(3, 1, 2, 64, 16), return_weights=True)[1]
    return holds(
        longer == 4 and wider == 2 and weights.numel() == 2 * 64**2,
        f"Twice the tokens are {longer:.0f} times the operations, twice the width {wider:.0f} times: 4 n² d, {base:,} "
        "at n = 64, d = 16. The weights are n² numbers a head, if they are formed.",
    )


@claim(COST, "1,000 tokens make 1,000,000 weights, 100,000 tokens 10,000,000,000, which is prohibitive.")
def c231() -> Verdict:
    small, large = (torch.empty(1, 1, n, 1, device="meta", dtype=torch.float16) for n in (1_000, 100_000))
    pairs = [(x @ x.mT).numel() for x in (small, large)]
    size = (large @ large.mT).nbytes
    return holds(
        pairs == [1_000_000, 10_000_000_000] and size == 2 * pairs[1],
        f"{pairs[0]:,} and {pairs[1]:,}, which is {size / 1e9:.0f} GB a head in half precision.",
    )


@claim(COST, "The quadratic term is the main cost of a Transformer.")
def c232() -> Verdict:
    d = 64

    def product(n: int, fan_in: int, fan_out: int) -> int:
        with FlopCounterMode(display=False) as counter:
            torch.mm(torch.empty(n, fan_in), torch.empty(fan_in, fan_out))
        return counter.get_total_flops()

    linear = {n: (4 * product(n, d, d), 4 * product(n, d, d) + 2 * product(n, d, 4 * d)) for n in (2 * d, 6 * d)}
    equal = flops(2 * d, d) == linear[2 * d][0] and flops(6 * d, d) == linear[6 * d][1]
    return only_when(
        equal,
        "Of long sequences. It outweighs the four projections of attention from n = 2 d on (there both are "
        f"{flops(2 * d, d):,} FLOP at d = {d}), and these with the feed-forward layer from n = 6 d on: at d = 768 from "
        f"{2 * 768:,} and {6 * 768:,} tokens.",
    )


@claim(COST, "FlashAttention gives the same result with much less memory.")
def c233() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 512, 32, dtype=torch.float64)
    tiles = [
        qkv.Partial(*qkv.attend(q, a, b, return_lse=True)) for a, b in zip(k.split(64, 2), v.split(64, 2), strict=True)
    ]
    off = (qkv.merge(*tiles).out - (q @ k.mT / 32**0.5).softmax(-1) @ v).abs().max().item()
    long = torch.empty(3, 1, 8, 16_384, 64)
    tiled, eager = (qkv.plan(*long, kernel=name).peak_bytes for name in ("tiled", "eager"))
    return holds(
        off < 1e-14 and eager > 50 * tiled,
        f"Eight tiles of keys, merged, agree with the plain formula within {off:.0e} in float64: the same up to "
        f"rounding, not bit by bit. For 8 heads and 16,384 tokens `qkv.plan` estimates {tiled / 1e6:.0f} MB in tiles "
        f"and {eager / 1e9:.0f} GB where the weights are formed.",
    )


@claim(COST, "Linear attention approximates softmax by feature maps and reaches O(n).")
def c234() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 256, 32)
    kind = {"score": Features(elu_plus_one), "normalizer": Identity("sum"), "mask": Causal()}
    work = [qkv.plan(*torch.empty(3, 1, 1, n, 32), kernel="linear", **kind).flops for n in (4_096, 8_192)]
    soft = qkv.attend(q, k, v, mask=Causal())
    off = ((qkv.attend(q, k, v, **kind) - soft).norm() / soft.norm()).item()
    return holds(
        work[1] == 2 * work[0] and off > 0.1,
        f"Twice the tokens are {work[1] / work[0]:.0f} times the work, O(n d²). It is another function, though, that a "
        f"model is trained with: with elu + 1 and random q and k it is {off:.0%} away from softmax.",
    )


@claim("Key takeaways", "Self-attention is encoder-style; cross-attention bridges two sequences.")
def c235() -> Verdict:
    model = DecoderLM(DecoderConfig(vocab_size=16, context=8, d_model=32, layers=2, heads=4))
    kinds = {block.cross is None for block in model.blocks}
    ids = torch.tensor([[1, 2, 3, 4]])
    same = torch.allclose(model(ids)[:, :2], model(ids[:, :2]), atol=1e-5)
    return only_when(
        kinds == {True} and same,
        "Without a mask it is. A decoder-only model consists of self-attention, too, under a causal mask: ours has no "
        "cross-attention, and what it gives for two tokens does not change when others follow.",
    )
