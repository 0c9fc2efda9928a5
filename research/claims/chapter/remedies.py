"""Checks for sections 8.6 and 8.7: alternatives to sinks (sigmoid, key biases, off by one, gates) and their authors."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

import qkv
from qkv.nn import MultiHeadAttention
from qkv.normalizers import EluPlusOne, Sigmoid, Softmax
from research.claims import Verdict, claim, false, holds, only_when


@claim("C091", "chapter", "8.6", "Sigmoid attention scores each pair of query and key on its own.")
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


@claim("C092", "chapter", "8.6", "If nothing is relevant, all sigmoid weights can be near 0.")
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


@claim("C093", "chapter", "8.6", "ELU(x) + 1 is a similar weight without normalisation.")
def c093() -> Verdict:
    at = torch.tensor([-1e4, -1.0, 0.0, 2.0], dtype=torch.float64)
    weights = EluPlusOne().weight(at).tolist()
    return holds(
        weights[0] == 0 and weights[2:] == [1, 3] and abs(weights[1] - torch.e**-1) < 1e-12,
        f"At −10⁴, −1, 0 and 2 it is {', '.join(f'{w:.3g}' for w in weights)}: never negative, each on its own; "
        "unlike a sigmoid it has no upper bound.",
    )


@claim("C095", "chapter", "8.7", "A learnt key bias is Attention(Q, K + K_bias, V): one vector added to every key.")
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


@claim("C096", "chapter", "8.7", "GPT-OSS has learnable key biases.")
def c096() -> Verdict:
    folder = Path(find_spec("transformers").submodule_search_locations[0])
    code = (folder / "models" / "gpt_oss" / "modeling_gpt_oss.py").read_text(encoding="utf-8")
    own = MultiHeadAttention(16, 4, sink=True), MultiHeadAttention(16, 4, key_bias=True)
    added = [sum(p.numel() for p in x.composition.parameters()) for x in own]
    return false(
        "self.sinks = nn.Parameter(torch.empty(config.num_attention_heads))" in code and added == [4, 16],
        "It learns one number a head, a logit that joins the softmax and is then dropped: in transformers its "
        "attention has `sinks` of shape (heads,). There is no key, so every query has the same logit. A key bias is "
        f"a vector a head (for 4 heads of 4 numbers, {added[1]} parameters instead of {added[0]}).",
        "[gpt-oss model card](https://arxiv.org/abs/2508.10925)",
    )


@claim("C097", "chapter", "8.7", "With a value bias of 0 the extra key adds nothing to the output.")
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


@claim("C102", "chapter", "8.7", "Softmax off by one is softmax with one more column of score 0.")
def c102() -> Verdict:
    torch.manual_seed(0)
    s = torch.randn(10, 12, dtype=torch.float64)
    column = torch.cat([s, torch.zeros(10, 1)], -1).softmax(-1)[:, :-1]
    error = (column - s.exp() / (1 + s.exp().sum(-1, keepdim=True))).abs().max().item()
    return holds(error < 1e-15, f"That is exp(s) / (1 + Σ exp(s)), to {error:.1g}.")


@claim("C104", "chapter", "8.7", "A sigmoid gate on its output can shut attention off.")
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


@claim("C106", "chapter", "8.7", "Gated attention won a best-paper award of NeurIPS 2025, and Qwen3-Next has it.")
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
