"""Checks of the overview: the example, formulas, relations."""

from __future__ import annotations

import math
from operator import mul

import torch
from torch.utils.flop_counter import FlopCounterMode

import qkv
from qkv import kernels
from qkv.masks import Causal, Dense
from qkv.normalizers import Hard
from research.claims import Verdict, claim, false, holds, only_when
from research.claims.deep_dive.framework import CLARK, after_earlier, previous, strongest
from research.claims.deep_dive.framework import as_text as shown

SECTION = "3"
SCORES = torch.tensor([2.5, 0.8, 0.3, 0.2], dtype=torch.float64)


@claim(SECTION, "softmax(2.5, 0.8, 0.3, 0.2) is about 0.77, 0.14, 0.05, 0.04.")
def c344() -> Verdict:
    right, printed = SCORES.softmax(-1), torch.tensor([0.77, 0.14, 0.05, 0.04])
    e_17 = math.e ** (2.5 - 0.8)  # how far the first weight is above the second
    return false(
        (right - printed).abs().max() > 0.03 and abs(right.sum() - 1) < 1e-9 and abs(right[0] / right[1] - e_17) < 1e-9,
        f"It is {shown(right, 4)}. The printed numbers add up to 1 and have the right order, but are too sharp.",
    )


@claim(SECTION, "The context is 0.77 h₁ + 0.14 h₂ + 0.05 h₃ + 0.04 h₄.")
def c345() -> Verdict:
    right = [round(value, 2) for value in SCORES.softmax(-1).tolist()]
    return false(
        right == [0.72, 0.13, 0.08, 0.07],
        "With its scores it is " + " + ".join(f"{w} h{i}" for w, i in zip(right, "₁₂₃₄", strict=True)) + ".",
    )


@claim(SECTION, "0.03, 0.05, 0.12, 0.80 are weights of attention.")
def c346() -> Verdict:
    weights = torch.tensor([0.03, 0.05, 0.12, 0.80], dtype=torch.float64)
    return holds(bool((weights >= 0).all()) and abs(weights.sum() - 1) < 1e-9, "None is negative; the sum is 1.00.")


@claim(SECTION, "0.08, 0.17, 0.40, 0.35 are weights of attention.")
def c347() -> Verdict:
    weights = torch.tensor([0.08, 0.17, 0.40, 0.35], dtype=torch.float64)
    return holds(bool((weights >= 0).all()) and abs(weights.sum() - 1) < 1e-9, "None is negative; the sum is 1.00.")


@claim(SECTION, "H heads of $d_v$ side by side are $d_{model}$ wide.")
def c348() -> Verdict:
    widths = {}
    for heads in (1, 8, 16):
        seen: list[torch.Tensor] = []
        with kernels.watching(lambda call, _, seen=seen: seen.append(call.v)):
            qkv.nn.MultiHeadAttention(512, heads)(torch.randn(1, 3, 512))
        beside = seen[0].transpose(1, 2).flatten(2)
        widths[heads] = tuple(seen[0].shape[1:]), beside.shape[-1]
    return holds(
        widths == {heads: ((heads, 3, 512 // heads), 512) for heads in (1, 8, 16)},
        "With $d_v = d_{model} / H$, as it is chosen: "
        + ", ".join(f"{heads} × {shape[-1]} = {width}" for heads, (shape, width) in widths.items())
        + ".",
    )


@claim(SECTION, "Without $W^O$ the heads would be completely independent.")
def c349() -> Verdict:
    torch.manual_seed(0)
    values = torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)  # two heads of 4
    q, k = torch.randn(2, 1, 2, 5, 4, dtype=torch.float64)
    joined = qkv.attend(q, k, values).transpose(1, 2).flatten(2)
    after = qkv.nn.FeedForward(8).double()(joined)
    of_second = [
        torch.autograd.grad(out[..., :4].sum(), values, retain_graph=True)[0][:, 1].norm().item()
        for out in (joined, after)
    ]
    return only_when(
        of_second[0] == 0 and of_second[1] > 0,
        f"Within the layer: the first head's half of the output has a gradient of {of_second[0]:.0f} in the second "
        f"head's values. The next feed-forward layer mixes them all the same ({of_second[1]:.2f}), and one loss trains "
        "both. $W^O$ decides where in the residual each head writes.",
    )


ADDITIVE, MULTIPLICATIVE, SCALED = "2 Additive", "2 Multiplicative", "2 Scaled"


@claim(ADDITIVE, "The score is $v_a^T \\tanh(W_a q + U_a k)$: $W_a$ for the query, $U_a$ for the key.")
def c330() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4)
    w, u = torch.randn(2, 4, 4)
    formula, code = v @ torch.tanh(w @ q + u @ k), v @ torch.tanh(w @ k + u @ q)
    rows = zip(v.tolist(), w.tolist(), u.tolist(), strict=True)
    by_hand = sum(x * math.tanh(sum(map(mul, a, q.tolist())) + sum(map(mul, b, k.tolist()))) for x, a, b in rows)
    return only_when(
        abs(formula - by_hand) < 1e-6 and abs(formula - code) > 0.1,
        f"In its formula, and in Bahdanau's paper. Its class swaps the letters, `Wa` for encoder states (keys) and "
        f"`Ua` for the decoder: the same family of scores, but with the same matrices another number ({formula:.2f}, "
        f"{code:.2f}).",
        "[Bahdanau et al. 2015](https://arxiv.org/abs/1409.0473)",
    )


@claim(ADDITIVE, "tanh bounds the scores, and so keeps softmax from saturating.")
def c331() -> Verdict:
    torch.manual_seed(0)
    v, hidden = torch.randn(64), torch.tanh(torch.randn(500, 10, 64))
    top = {c: (hidden @ (c * v)).softmax(-1).amax(-1).mean().item() for c in (0.1, 1.0, 4.0)}
    return only_when(
        top[0.1] < 0.25 and top[4.0] > 0.9,
        "While $v_a$ is small: the bound is $\\sum_i |v_{a,i}|$. With 64 hidden units and 10 keys the mean top weight "
        "is "
        + ", ".join(f"{share:.2f} for entries of size {size}" for size, share in top.items())
        + ". Nothing but the training keeps $v_a$ small.",
    )


@claim(MULTIPLICATIVE, "The general score $q^T W k$ is a dot product after transforming the key.")
def c333() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 5, 4, dtype=torch.float64)
    w = torch.randn(4, 4, dtype=torch.float64)
    general = qkv.attend(q, k, v, score=qkv.scores.General(w))
    plain = qkv.attend(q, k @ w.T, v, score=qkv.scores.Dot(scale=1.0))
    error = (general - plain).abs().max().item()
    return holds(error < 1e-12, f"The outputs differ by {error:.1g}. As well it is one after transforming the query.")


@claim(MULTIPLICATIVE, "One matrix product computes all m × n similarities.")
def c334() -> Verdict:
    torch.manual_seed(0)
    q, k = torch.randn(3, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    loop = torch.stack([torch.stack([a @ b for b in k]) for a in q])
    error = (q @ k.T - loop).abs().max().item()
    return holds(error < 1e-13, f"$QK^T$ of 3 queries and 5 keys and 15 single products differ by {error:.1g}.")


@claim(SCALED, "At $d_k = 512$ unscaled dot products have a standard deviation of √512 ≈ 22.6.")
def c335() -> Verdict:
    q, k = torch.randn(2, 20_000, 512, generator=torch.Generator().manual_seed(0))
    found = (q * k).sum(-1).std().item()
    return holds(f"{math.sqrt(512):.1f}" == "22.6" and abs(found - 22.6) < 0.4, f"22.627; {found:.1f} in 20,000 draws.")


@claim(SCALED, "$d_k = 512$ is common in Transformers.")
def c336() -> Verdict:
    import transformers

    def head_size(name: str) -> int:
        """Of a family's default sizes in transformers, which are those of its first published model."""
        config = getattr(transformers, f"{name}Config")()
        size = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
        return size or config.hidden_size // config.num_attention_heads

    families = ("Bert", "GPT2", "T5", "Bart", "OPT", "GPTNeoX", "Llama", "Mistral", "Gemma", "Qwen3")
    sizes = {name: head_size(name) for name in families}
    seen: list[torch.Tensor] = []
    with kernels.watching(lambda call, _: seen.append(call.q)):
        qkv.nn.MultiHeadAttention(512, 8)(torch.randn(1, 3, 512))
    original = seen[0].transpose(1, 2)
    return false(
        original.shape == (1, 3, 8, 64) and max(sizes.values()) <= 256 and min(sizes.values()) >= 64,
        "512 is the original's $d_{model}$; its 8 heads have $d_k$ = 64 each, with a deviation of 8, as its own "
        "paragraph on heads says. By the default sizes in transformers, $d_k$ is "
        + ", ".join(f"{size} in {name}" for name, size in sizes.items())
        + ".",
        "[Vaswani et al. 2017](https://arxiv.org/abs/1706.03762)",
    )


@claim(
    "2 Self", "Weights are $\\exp(q_i \\cdot k_j / \\sqrt{d_k})$ over their sum, outputs the weighted sums of values."
)
def c338() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 8, dtype=torch.float64)
    rows = []
    for a in q:
        powers = [math.exp(float(a @ b) / math.sqrt(8)) for b in k]
        rows.append(sum(p / sum(powers) * value for p, value in zip(powers, v, strict=True)))
    error = (qkv.attend(*(x[None, None] for x in (q, k, v)))[0, 0] - torch.stack(rows)).abs().max().item()
    return holds(error < 1e-12, f"Written out as loops it agrees with `qkv.attend` to {error:.1g}.")


@claim("2 Self", "A position reaches any other in one step, not in |i − j| steps.")
def c339() -> Verdict:
    torch.manual_seed(0)
    layer, x = qkv.nn.MultiHeadAttention(16, 2), torch.randn(1, 200, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x)[0, 0].sum(), x)
    norms = grad[0].norm(dim=-1)
    return holds(
        bool((norms > 0).all()),
        f"After one layer the first output has a gradient in all 200 inputs; that of the last, 199 away, is "
        f"{norms[-1] / norms[1:].median():.1f} times the median.",
    )


@claim("2 Multi-head", "Heads specialise: in syntax, in meaning, in nearby words.")
def c340() -> Verdict:
    (head, near, even), (other, again, even_again) = strongest(previous()), strongest(after_earlier())
    return holds(
        head != other and near > 5 * even and again > 5 * even_again,
        f"Some do: head {head} of `qkv-mini` puts {near:.2f} on the token before (even weights: {even:.2f}), head "
        f"{other} {again:.2f} on what followed its token last time ({even_again:.2f}). Heads of syntax and of "
        "coreference were found in BERT, beside many without such a role.",
        CLARK,
    )


@claim("2 Multi-head", "8 heads of 64 cost as much as one of 512.")
def c341() -> Verdict:
    def cost(heads: int, n: int = 1024) -> tuple[int, int]:
        q = torch.zeros(heads, n, 512 // heads, device="meta")
        with FlopCounterMode(display=False) as counter:
            weights = q @ q.mT
            weights @ q
        return counter.get_total_flops(), weights.numel()

    (one, weights_1), (eight, weights_8) = cost(1), cost(8)
    return only_when(
        one == eight and weights_8 == 8 * weights_1,
        f"Counting matrix products, the same {one / 1e9:.1f} GFLOP at n = 1,024. There are 8 times as many weights, so "
        "8 times as many exponentials, and 8 times the memory where weights are kept.",
    )


@claim("2 Masking", "A padding mask gives padded keys no weight.")
def c342() -> Verdict:
    torch.manual_seed(0)
    x = torch.randn(1, 1, 6, 8, dtype=torch.float64)
    real = Dense(torch.tensor([1, 1, 1, 1, 0, 0]).bool()[None, None, None])
    out, weights = qkv.attend(x, x, x, mask=real, return_weights=True)
    alone = qkv.attend(x[:, :, :4], x[:, :, :4], x[:, :, :4])
    return holds(
        weights[..., 4:].abs().max() == 0 and torch.allclose(out[:, :, :4], alone),
        "4 words padded to 6: exactly 0 on padding, and the 4 outputs are those without padding.",
    )


@claim("2 Masking", "A mask of ones and zeros and an added matrix of 0 and −∞ are the same.")
def c343() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 5, 4, dtype=torch.float64)
    ones = torch.ones(5, 5).tril()
    added = torch.zeros(5, 5, dtype=torch.float64).masked_fill(ones == 0, -torch.inf)
    by_sum = (q @ k.mT / 2 + added).softmax(-1) @ v
    return holds(torch.allclose(by_sum, qkv.attend(q, k, v, mask=Causal())), "The causal outputs agree to rounding.")


LUONG = "[Luong et al. 2015](https://arxiv.org/abs/1508.04025)"


@claim("5", "Attention is like kernel smoothing, with a kernel that is learnt.")
def c366() -> Verdict:
    torch.manual_seed(0)
    q, k = torch.randn(2, 6, 8, dtype=torch.float64)

    def difference(keys: torch.Tensor) -> float:
        """Between a Gaussian kernel's weights and those of softmax, of q · k without a scale."""
        gaussian = torch.exp(-(torch.cdist(q, keys) ** 2) / 2)
        return (gaussian / gaussian.sum(-1, keepdim=True) - (q @ keys.T).softmax(-1)).abs().max().item()

    same, other = difference(torch.nn.functional.normalize(k, dim=-1)), difference(k)
    return holds(
        same < 1e-12 and other > 0.01,
        f"With keys of one length its weights are those of a Gaussian kernel smoother, to {same:.1g}. With other "
        f"lengths long keys gain, and weights differ by up to {other:.2f}; what is learnt are the projections.",
    )


@claim("5", "Attention can be seen as a convolution whose kernel depends on the input.")
def c367() -> Verdict:
    torch.manual_seed(0)
    a, b = torch.randn(2, 1, 1, 9, 8, dtype=torch.float64)
    conv = torch.nn.Conv1d(8, 8, 3, padding=1).double()
    near = qkv.masks.Window(2, ahead=1)
    kernels = [qkv.attend(x, x, x, mask=near, return_weights=True)[1][0, 0, 4, 3:6] for x in (a, b)]
    x, y = (z[0].mT for z in (a, b))
    linear = torch.allclose(conv(x + y), conv(x) + conv(y) - conv(torch.zeros_like(x)))
    return holds(
        linear and (kernels[0] - kernels[1]).abs().max() > 0.01,
        "A window of 3 weighs the middle one of 9 tokens and its neighbours by "
        + " and ".join(", ".join(f"{w:.2f}" for w in kernel.tolist()) for kernel in kernels)
        + " for two inputs. A convolution has one kernel for all, but with weights of their own for each channel.",
    )


@claim("5", "A 1 × 1 convolution is nearly attention with queries equal to keys, where all positions attend equally.")
def c368() -> Verdict:
    torch.manual_seed(0)
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    conv = torch.nn.Conv1d(8, 8, 1, bias=False).double()
    w = conv.weight[..., 0]
    itself = qkv.attend(x[None], x[None], (x @ w.T)[None], mask=torch.eye(6, dtype=torch.bool)[None, None])[0]
    _, equal = qkv.attend(x[None], x[None], x[None], return_weights=True)
    return false(
        torch.allclose(conv(x.mT).mT, itself) and equal.max() - equal.min() > 0.5,
        "It is attention in which each position sees *itself* alone: no mixing at all. Equal weights would be the mean "
        f"over all positions, and queries equal to keys do not give equal weights either: here {equal.min():.3f} to "
        f"{equal.max():.2f}.",
    )


@claim("5", "Soft attention lets gradients flow through all paths.")
def c369() -> Verdict:
    torch.manual_seed(0)
    counts = {}
    for name, normalizer in (("softmax", None), ("hard, values", Hard())):
        q, k, v = torch.randn(3, 1, 1, 6, 8, dtype=torch.float64).unbind()
        v.requires_grad_()
        qkv.attend(q[:, :, :1], k, v, normalizer=normalizer).sum().backward()
        counts[name] = int((v.grad[0, 0].norm(dim=-1) > 0).sum())
    return holds(
        counts["softmax"] == 6 and counts["hard, values"] == 1,
        "All 6 values get a gradient from one query, by their weights; with hard attention the chosen one does. Where "
        "softmax saturates, the paths are open but narrow.",
    )
