"""Checks for section 5: multi-head attention."""

from __future__ import annotations

from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

import qkv
from qkv import kernels
from qkv.models import DecoderLM
from qkv.nn import MultiHeadAttention
from qkv.profiler.data.types import is_delimiter
from research.claims import Verdict, claim, holds, only_when
from research.claims.chapter.mini import heads_of_mini, ids_of_mini, tokens_of_mini


@claim("C032", "chapter", "5.2", "h heads side by side, times W^O of (h d_v) × d_model, are d_model wide again.")
def c032() -> Verdict:
    layer = MultiHeadAttention(24, heads=3, head_dim=5, v_head_dim=7)
    out = layer(torch.randn(2, 4, 24))
    into = tuple(layer.out_proj.weight.T.shape)
    return holds(
        into == (3 * 7, 24) and out.shape == (2, 4, 24),
        f"3 heads of d_v = 7, d_model 24: W^O is {into}, the output 24.",
    )


@claim("C033", "chapter", "5.2", "With d_k = d_v = d_model / h, several heads cost about as much as one of full width.")
def c033() -> Verdict:
    cost = {}
    for h in (1, 8):
        q = torch.empty(h, 256, 512 // h, device="meta")
        with FlopCounterMode(display=False) as counter:
            weights = q @ q.mT
            _ = weights @ q
        cost[h] = counter.get_total_flops(), weights.numel()
    return only_when(
        cost[1][0] == cost[8][0] and cost[8][1] == 8 * cost[1][1],
        f"As far as products go: both take {cost[1][0] / 1e6:.0f} MFLOP at n = 256, d_model 512, and the "
        f"projections are the same. The softmax, and the weights if they are kept, are of {cost[8][1]:,} numbers "
        f"with 8 heads and {cost[1][1]:,} with one: h times as many.",
    )


@claim("C034", "chapter", "5.3", "With d_model 512 and 8 heads each has 64 numbers, and side by side they have 512.")
def c034() -> Verdict:
    layer, seen = MultiHeadAttention(512, heads=8), []
    with kernels.watching(lambda call, _: seen.append((call.q, call.k, call.v))):
        layer(torch.randn(1, 5, 512))
    out = qkv.attend(*seen[0])
    beside = out.transpose(1, 2).flatten(2)
    back = layer.out_proj(beside)
    return holds(
        out.shape == (1, 8, 5, 64) and beside.shape == (1, 5, 512) and back.shape == (1, 5, 512),
        f"Of 5 tokens, attention returns {tuple(out.shape)}: 8 heads of {out.shape[-1]}. Side by side they are "
        f"{tuple(beside.shape)}, which W^O reads.",
    )


@claim("C035", "chapter", "5.3", "The output projection combines what the heads found.")
def c035() -> Verdict:
    torch.manual_seed(0)
    heads, w = torch.randn(8, 10, 64, dtype=torch.float64), torch.randn(512, 512, dtype=torch.float64) / 512**0.5
    joined = heads.transpose(0, 1).reshape(10, 512) @ w
    summed = sum(head @ w[64 * i : 64 * (i + 1)] for i, head in enumerate(heads))
    error = (joined - summed).abs().max().item()
    return holds(error < 1e-13, f"It adds them up, each through its own 64 rows of W^O: difference {error:.1g}.")


@cache
def untrained_mini() -> torch.Tensor:
    """The causal attention weights of an untrained model with qkv-mini's architecture, on the same text."""
    torch.manual_seed(0)
    seen = []
    with torch.no_grad(), kernels.watching(lambda call, _: seen.append((call.q[0], call.k[0]))):
        DecoderLM(qkv.models.load("qkv-mini").config).eval()(ids_of_mini())
    q, k = (torch.stack(x).double() for x in zip(*seen, strict=True))
    return qkv.attend(q, k, k, mask=qkv.masks.Causal(), return_weights=True)[1]


def delimiters_of_mini() -> torch.Tensor:
    """Which tokens of the program are punctuation or line breaks, as the profiler counts them."""
    return torch.tensor([is_delimiter(token) for token in tokens_of_mini()])


def patterns(weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """(layer, head): weight on the 8 nearest keys, on delimiters (punctuation and line breaks), on the two strongest
    keys; distance in tokens; entropy over that of even rows. Means over the queries from the ninth on."""
    at = torch.arange(weights.shape[-1])
    rows, distance = weights[..., 9:, :], (at[:, None] - at)[9:]
    entropy = -(rows * rows.clamp(min=1e-30).log()).sum(-1)
    return {
        "near": (rows * (distance < 8)).sum(-1).mean(-1),
        "delimiters": (rows * delimiters_of_mini()).sum(-1).mean(-1),
        "two": rows.topk(2).values.sum(-1).mean(-1),
        "distance": (rows * distance).sum(-1).mean(-1),
        "entropy": (entropy / (at[9:] + 1.0).log()).mean(-1),
    }


def place(by_head: torch.Tensor) -> str:
    """The layer and head with the largest value: "2.5"."""
    layer, head = divmod(int(by_head.argmax()), by_head.shape[1])
    return f"{layer}.{head}"


@claim(
    "C036", "chapter", "5.3", "Heads specialise, on recent or on syntactically or semantically related tokens, untold."
)
def c036() -> Verdict:
    found, before = patterns(heads_of_mini()[3]), patterns(untrained_mini())
    near, delimiters = found["near"].max(), found["delimiters"].max()
    return holds(
        near > 0.8 and delimiters > 0.5 and before["near"].max() < 0.3 and before["delimiters"].max() < 0.3,
        f"qkv-mini has learnt nothing but to predict the next token of Python. Its head {place(found['near'])} puts "
        f"{near:.2f} of its weight on the nearest 8 tokens; head {place(found['delimiters'])} puts {delimiters:.2f} on "
        f"punctuation and line breaks, which are {delimiters_of_mini().double().mean():.2f} of the tokens and Python's "
        f"syntax. With random weights no head puts more than {before['near'].max():.2f} and "
        f"{before['delimiters'].max():.2f} there. Similar meaning was not looked for. It holds above 0.8 and 0.5.",
    )


@claim("C037", "chapter", "5.4", "Trained models have local, global, syntactic and sparse heads.")
def c037() -> Verdict:
    found, before = patterns(heads_of_mini()[3]), patterns(untrained_mini())
    counts = {
        "local (over half of the weight on the nearest 8 tokens)": (found["near"] > 0.5, before["near"] > 0.5),
        "syntactic (over half on punctuation and line breaks)": (found["delimiters"] > 0.5, before["delimiters"] > 0.5),
        "sparse (over 0.7 on two keys)": (found["two"] > 0.7, before["two"] > 0.7),
        "global (even rows, entropy over 0.9 of the greatest)": (found["entropy"] > 0.9, before["entropy"] > 0.9),
    }
    heads = found["near"].numel()
    trained = [int(x.sum()) for x, _ in counts.values()]
    untrained = [int(x.sum()) for _, x in counts.values()]
    text = "; ".join(f"{name} {n}" for name, n in zip(counts, trained, strict=True))
    return holds(
        min(trained) >= 1 and untrained == [0, 0, 0, heads],
        f"Of the {heads} heads of qkv-mini on a program are {text}. With random weights all {heads} are even and "
        f"none is local, syntactic or sparse. Mean distances go from {found['distance'].min():.0f} to "
        f"{found['distance'].max():.0f} tokens.",
    )
