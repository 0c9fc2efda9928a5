"""Checks of the chapter: attention sinks and their remedies."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

import qkv
from qkv import kernels, masks
from qkv.models import DecoderConfig, DecoderLM
from qkv.models.text import load_text_model
from qkv.nn import MultiHeadAttention
from qkv.normalizers import EluPlusOne, Sigmoid, Softmax
from qkv.profiler.corpora import default_text
from research.claims import Verdict, claim, false, holds, only_when
from research.claims.models import everywhere


@claim("8.3", "A small angle to a query is the same as a high dot product with it.")
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


@claim("8.3", "At position 1, under a causal mask, attention returns exactly v_1.")
def c071() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 20, 8)
    error = (qkv.attend(q, k, v, mask=masks.Causal())[:, :, 0] - v[:, :, 0]).abs().max().item()
    return holds(error == 0, f"4 heads, 20 tokens, float32: the difference is {error:g}.")


@claim("8.3", "States at position 1 never mix with others: they are MLPs of the embedding, in a row.")
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


@claim("8.4", "With weight 0.9 on a sink of value near 0 the output is only small contributions.")
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


@cache
def ids_of_mini() -> Tensor:
    """(1, 96): ``<s>`` and the beginning of the program that `qkv profile` reads by default."""
    reader = load_text_model("qkv-mini")
    return torch.tensor([reader.encode(default_text("qkv-mini"))[:96]])


def tokens_of_mini() -> list[str]:
    """The same tokens as text."""
    reader = load_text_model("qkv-mini").tokenizer
    return [reader.decode([token]) for token in ids_of_mini()[0].tolist()]


@cache
def heads_of_mini() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys (after rotation), values (layer, head, n, 32), and the causal weights (layer, head, n, n)."""
    seen = []
    with torch.no_grad(), kernels.watching(lambda call, _: seen.append((call.q[0], call.k[0], call.v[0]))):
        qkv.models.load("qkv-mini").eval()(ids_of_mini())
    q, k, v = (torch.stack(x).double() for x in zip(*seen, strict=True))
    return q, k, v, qkv.attend(q, k, v, mask=qkv.masks.Causal(), return_weights=True)[1]


@claim("8.6", "Sigmoid attention scores each pair of query and key on its own.")
def c091() -> Verdict:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 8, 4)
    changed = k.clone()
    changed[..., 3, :] += 2
    moved = {}
    for name, normalizer in (("sigmoid", Sigmoid(bias=0.0)), ("softmax", Softmax())):
        one, other = (qkv.attend(q, x, k, normalizer=normalizer, return_weights=True)[1] for x in (k, changed))
        difference = (one - other).abs()[0, 0].amax(0)
        moved[name] = difference[torch.arange(8) != 3].max().item()
    return holds(
        moved["sigmoid"] == 0 and moved["softmax"] > 0.01,
        f"One key of 8 changed: the weights of the 7 others change by {moved['sigmoid']:g} with a sigmoid and by up to "
        f"{moved['softmax']:.2f} with a softmax.",
    )


@claim("8.6", "If nothing is relevant, all sigmoid weights can be near 0.")
def c092() -> Verdict:
    q, ones = (
        torch.zeros(1, 1, 1, 8),
        torch.ones(1, 1, 1000, 8),
    )  # scores of 0: no match, as near as the dot product says
    plain = qkv.attend(q, ones, ones, normalizer=Sigmoid(bias=0.0))[0, 0, 0, 0].item()
    biased = qkv.attend(q, ones, ones, normalizer=Sigmoid())[0, 0, 0, 0].item()
    low = torch.sigmoid(torch.tensor(-10.0)).item()
    return only_when(
        plain == 500 and abs(biased - 1) < 0.01,
        f"If scores are strongly negative (σ(−10) = {low:.1g}), or have a bias. A score of 0 has weight 0.5: 1,000 "
        f"keys of value 1 add up to {plain:.0f}. With a bias of −ln n, as qkv's default and Ramapuram et al. have "
        f"it, to {biased:.2f}.",
        "[Ramapuram et al. 2024](https://arxiv.org/abs/2409.04431)",
    )


@claim("8.6", "ELU(x) + 1 is a similar weight without normalisation.")
def c093() -> Verdict:
    at = torch.tensor([-1e4, -1.0, 0.0, 2.0], dtype=torch.float64)
    weights = EluPlusOne().weight(at).tolist()
    return holds(
        weights[0] == 0 and weights[2:] == [1, 3] and abs(weights[1] - torch.e**-1) < 1e-12,
        f"At −10⁴, −1, 0 and 2 it is {', '.join(f'{w:.3g}' for w in weights)}: never negative, each on its own; "
        "unlike a sigmoid it has no upper bound.",
    )


@claim("8.7", "A learnt key bias is Attention(Q, K + K_bias, V): one vector added to every key.")
def c095() -> Verdict:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 20, 8, dtype=torch.float64)
    bias = 3 * torch.randn(8, dtype=torch.float64)
    same = (qkv.attend(q, k + bias, v) - qkv.attend(q, k, v)).abs().max().item()
    extra = (qkv.attend(q, k, v, normalizer=Softmax(key=bias[None])) - qkv.attend(q, k, v)).abs().max().item()
    return false(
        same < 1e-12 and extra > 0.1,
        "That changes nothing: all scores of a row move by the same q · b, which a softmax does not see (outputs "
        f"differ by {same:.1g}). The mechanism is one *more* key, k\\*, with value 0, in each row: outputs then "
        f"differ by up to {extra:.1f}.",
        "[Gu et al. 2025](https://arxiv.org/abs/2410.10781)",
    )


@claim("8.7", "GPT-OSS has learnable key biases.")
def c096() -> Verdict:
    folder = Path(find_spec("transformers").submodule_search_locations[0])
    code = (folder / "models" / "gpt_oss" / "modeling_gpt_oss.py").read_text(encoding="utf-8")
    own = MultiHeadAttention(16, 4, sink="logit"), MultiHeadAttention(16, 4, sink="key")
    added = [sum(p.numel() for p in x.composition.parameters()) for x in own]
    return false(
        "self.sinks = nn.Parameter(torch.empty(config.num_attention_heads))" in code and added == [4, 16],
        "It learns one number a head, a logit that joins the softmax and is then dropped: in transformers its "
        "attention has `sinks` of shape (heads,). There is no key, so every query has the same logit. A key bias is "
        f"a vector a head (for 4 heads of 4 numbers, {added[1]} parameters instead of {added[0]}).",
        "[gpt-oss model card](https://arxiv.org/abs/2508.10925)",
    )


@claim("8.7", "With a value bias of 0 the extra key adds nothing to the output.")
def c097() -> Verdict:
    torch.manual_seed(0)
    q, k, v, extra = torch.randn(4, 1, 1, 6, 8, dtype=torch.float64)
    longer = torch.cat([k, extra[..., :1, :]], 2), torch.cat([v, 0 * v[..., :1, :]], 2)
    out, weights = qkv.attend(q, *longer, return_weights=True)
    without = weights[..., :6] @ v
    return holds(
        (out - without).abs().max() < 1e-15 and weights[..., :6].sum(-1).max() < 1,
        "The output is the sum over the real values alone. Their weights then sum to less than 1: here to "
        f"{weights[..., :6].sum(-1).min():.2f}–{weights[..., :6].sum(-1).max():.2f}.",
    )


@claim("8.7", "Softmax off by one is softmax with one more column of score 0.")
def c102() -> Verdict:
    torch.manual_seed(0)
    s = torch.randn(10, 12, dtype=torch.float64)
    column = torch.cat([s, torch.zeros(10, 1)], -1).softmax(-1)[:, :-1]
    error = (column - s.exp() / (1 + s.exp().sum(-1, keepdim=True))).abs().max().item()
    return holds(error < 1e-15, f"That is exp(s) / (1 + Σ exp(s)), to {error:.1g}.")


@claim("8.7", "A sigmoid gate on its output can shut attention off.")
def c104() -> Verdict:
    torch.manual_seed(0)
    layer, x = MultiHeadAttention(16, 2, gate="elementwise"), torch.randn(1, 5, 16)
    open_ = layer(x).abs().max().item()
    torch.nn.init.zeros_(layer.gate.weight)
    torch.nn.init.constant_(layer.gate.bias, -1e4)
    shut = layer(x).abs().max().item()
    return holds(shut == 0 < open_, f"With gate logits of −10⁴ the largest output is {shut:g} (before: {open_:.1f}).")


def with_gate(projected: torch.Tensor, logit: float) -> torch.Tensor:
    """The output of Qwen3-Next's query projection, two heads of 8 numbers and 8 gate logits, with other logits."""
    changed = projected.unflatten(-1, (2, 2, 8)).clone()
    changed[..., 1, :] = logit
    return changed.flatten(-3)


@claim("8.7", "Gated attention won a best-paper award of NeurIPS 2025, and Qwen3-Next has it.")
def c106() -> Verdict:
    from transformers.models.qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

    layers = [name == "full_attention" for name in Qwen3NextConfig().layer_types]
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = Qwen3NextConfig(**sizes, attn_implementation="eager")
    torch.manual_seed(0)
    layer, x = Qwen3NextAttention(config, 0), torch.randn(1, 5, 16)
    turn = torch.ones(1, 5, 2), torch.zeros(1, 5, 2)  # cosines and sines of no rotation

    def output(gate: float) -> torch.Tensor:
        """The output without its last projection, with the gate's half of the query projection set to a logit."""
        seen: list[torch.Tensor] = []
        handles = [layer.o_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))]
        handles.append(layer.q_proj.register_forward_hook(lambda *given: with_gate(given[2], gate)))
        try:
            layer(x, turn, None)
        finally:
            for handle in handles:
                handle.remove()
        return seen[0]

    shut, half, open_ = (output(logit) for logit in (-1e4, 0.0, 1e4))
    scaled = (half - open_ / 2).abs().max().item()
    return holds(
        shut.abs().max() == 0 < open_.abs().max() and scaled < 1e-6 and sum(layers) == len(layers) // 4,
        "It was one of the four best papers of the conference. Qwen3-Next has gated attention in its layers of full "
        f"attention, between layers of gated DeltaNet: {sum(layers)} of {len(layers)} by its configuration in "
        "transformers, whose layer multiplies the output of attention by the sigmoid of the gate's logit (at −10⁴ the "
        f"output is 0; at 0 it is half of that at 10⁴, to {scaled:.1g}).",
        "[the authors' repository](https://github.com/qiuzh20/gated_attention)",
        "[Qiu et al. 2025](https://arxiv.org/abs/2505.06708)",
    )
