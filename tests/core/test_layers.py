"""Layers since 2023 against the formulas of their papers, peers and caches: latent, differential, recurrent ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import close, rand, refused
from qkv import Attention, measure
from qkv.cache import Full, Latent, Recurrent, Sliding
from qkv.masks import Causal, Padding, Prefix, TopKeys, Window
from qkv.models.decoder import RECURRENT
from qkv.nn import DifferentialAttention, ForgettingAttention, LatentAttention, RecurrentAttention
from qkv.positions import Rotary
from qkv.scores import Cosine

CAUSAL = Attention(mask=Causal())


def latent_layer(**changes: Any) -> LatentAttention:
    torch.manual_seed(0)
    sizes = {"latent": 9, "head_dim": (6, 5), "rotary": Rotary(4, interleaved=True), "attention": CAUSAL} | changes
    return LatentAttention(20, 3, **sizes).double()


def test_latent_attention_differs_from_its_formula_or_its_two_forms_differ() -> None:
    layer, x = latent_layer(), rand(2, 7, 20).requires_grad_()
    latent, turned = layer.kv_a_proj_with_mqa(x).split((9, 4), -1)
    latent = latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.kv_a_layernorm.weight
    up = layer.kv_b_proj(latent).unflatten(-1, (3, 11))
    rotate = layer.rotary
    q = layer.q_proj(x).unflatten(-1, (3, 10))
    scores = torch.einsum("bihd,bjhd->bhij", q[..., :6], up[..., :6])
    at = torch.arange(7)
    turned_q, turned_k = rotate(q[..., 6:].transpose(1, 2), at), rotate(turned[:, None], at)
    scores = (scores + turned_q @ turned_k.mT) / 10**0.5
    weights = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(-1)
    want = layer.o_proj(torch.einsum("bhij,bjhd->bihd", weights, up[..., 6:]).flatten(2))
    slope = rand(*want.shape, seed=3)
    for absorbed in (False, True):
        out, found = layer(x, absorbed=absorbed, return_weights=True)
        close(out, want, eps=256)
        close(found, weights, eps=256)
        tensors = [x, *layer.parameters()]
        got, expected = (torch.autograd.grad((y * slope).sum(), tensors, retain_graph=True) for y in (out, want))
        for a, b in zip(got, expected, strict=True):
            close(a, b, eps=4096)


def test_latent_attention_is_that_of_deepseek_in_hugging_face() -> None:
    pytest.importorskip("transformers", reason="the peer is transformers' DeepSeek-V3")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    layer, x = latent_layer(q_latent=8), rand(1, 12, 20)
    config = deepseek.DeepseekV3Config(
        hidden_size=20, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=8, kv_lora_rank=9, qk_rope_head_dim=4,
        qk_nope_head_dim=6, v_head_dim=5, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip
    config._attn_implementation = "eager"
    peer = deepseek.DeepseekV3Attention(config, 0).double()
    peer.load_state_dict(layer.state_dict())
    tables = deepseek.DeepseekV3RotaryEmbedding(config)(x, torch.arange(12)[None])  # in float32
    mask = torch.full((12, 12), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    torch.testing.assert_close(layer(x), peer(x, tables, mask)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 4])
def test_caches_change_latent_and_differential_attention(chunk: int) -> None:
    x, rotary = rand(2, 12, 20), Rotary(2)
    layers = [latent_layer(), DifferentialAttention(20, 2, layer=3, attention=CAUSAL, rotary=rotary).double()]
    for layer, cache in (
        (layers[0], Latent(12)),
        (layers[0], Full(12)),
        (layers[0], Sliding(12)),
        (layers[1], Full(12)),
    ):
        with torch.no_grad():
            steps = [layer(part, cache=cache) for part in x.split(chunk, 1)]
        close(torch.cat(steps, 1), layer(x), eps=1024)
    cache = Latent(12)
    with torch.no_grad():
        layers[0](x, cache=cache)
    assert cache.nbytes == 2 * 12 * (9 + 4) * 8


def test_a_latent_cache_rejects_values_that_are_not_the_end_of_the_keys() -> None:
    q = rand(1, 2, 3, 6)
    with refused("v"):
        Latent(3).attend(CAUSAL, q, rand(1, 1, 3, 6), rand(1, 1, 3, 4, seed=1))


def test_differential_attention_differs_from_its_formula() -> None:
    torch.manual_seed(0)
    layer, x = DifferentialAttention(24, 3, layer=2, attention=CAUSAL).double(), rand(2, 7, 24)
    q, k = (part(x).view(2, 7, 3, 2, 4) for part in (layer.q_proj, layer.k_proj))
    scores = torch.einsum("bihmd,bjhmd->bhmij", q, k) / 2
    maps = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(-1)
    q1, k1, q2, k2 = layer.lambdas
    initial = 0.8 - 0.6 * torch.exp(torch.tensor(-0.6, dtype=torch.float64))
    weights = maps[:, :, 0] - (torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + initial) * maps[:, :, 1]
    heads = torch.einsum("bhij,bjhd->bihd", weights, layer.v_proj(x).view(2, 7, 3, 8))
    heads = layer.norm.weight * heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 - initial)
    want = layer.o_proj(heads.flatten(2))
    out, found = layer(x, return_weights=True)
    close(out, want, eps=1024)
    close(found, weights, eps=256)
    assert bool((found < 0).any())
    slope = rand(*want.shape, seed=3)
    for a, b in zip(
        *(torch.autograd.grad((y * slope).sum(), list(layer.parameters())) for y in (out, want)), strict=True
    ):
        close(a, b, eps=8192)


def test_forgetting_attention_differs_from_its_formula_or_takes_masks_of_later_keys() -> None:
    layer, x = ForgettingAttention(16, 2).double(), rand(2, 7, 16)
    _, found = layer(x, mask=Causal(), return_weights=True)
    q, k, _ = layer.in_proj(x).view(2, 7, 6, 8).transpose(1, 2).split(2, 1)
    gates = torch.sigmoid(layer.forget(x)).mT
    kept = torch.stack([gates[:, :, j + 1 : i + 1].prod(-1) for i in range(7) for j in range(7)], -1).unflatten(
        -1, (7, 7)
    )
    weights = ((q @ k.mT / 8**0.5).exp() * kept).tril()
    close(found, weights / weights.sum(-1, keepdim=True))
    assert torch.equal(layer(x, mask=Window(9)), layer(x, is_causal=True))
    for mask in (None, Prefix(3) | Causal()):
        with refused("mask"):
            layer(x, mask=mask)


def recurrent_layer(**changes: Any) -> RecurrentAttention:
    torch.manual_seed(0)
    return RecurrentAttention(12, 3, **changes).double()


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_attention_differs_from_the_recurrence_of_its_paper(kind: str) -> None:
    layer, x, n = recurrent_layer(head_dim=(4, 5), rotary=Rotary(4), **RECURRENT[kind]), rand(2, 9, 12), 9
    mixed = x @ layer.in_proj_qkv.weight.T
    if layer.conv1d is not None:
        padded = torch.cat([mixed.new_zeros(2, 3, mixed.shape[2]), mixed], 1)
        taps = layer.conv1d.weight[:, 0]
        mixed = torch.nn.functional.silu(torch.stack([padded[:, i : i + n] * taps[:, i] for i in range(4)]).sum(0))
    q, k, v = (part.view(2, n, 3, -1).transpose(1, 2) for part in mixed.split((12, 12, 15), -1))
    if layer.delta:
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    q, k = (Rotary(4)(y, torch.arange(n)) for y in (q, k))
    rates = torch.tensor([1 - 2**-5, 1 - 2**-6, 1 - 2**-7]).view(1, 1, 3, 1).expand(2, n, 3, 1)
    if layer.in_proj_a is not None and layer.A_log is not None:
        steps = torch.log1p(torch.exp(x @ layer.in_proj_a.weight.T + layer.dt_bias)).view(2, n, 3, -1)
        rates = torch.exp(-layer.A_log.exp()[:, None] * steps)
    elif layer.decay is None:
        rates = torch.ones(2, n, 3, 1)
    beta = torch.ones(2, n, 3) if layer.in_proj_b is None else torch.sigmoid(x @ layer.in_proj_b.weight.T)
    state, outs = torch.zeros(2, 3, 4, 5, dtype=torch.float64), []
    for t in range(n):
        state = state * rates[:, t, :, :, None]
        old = torch.einsum("bhm,bhmd->bhd", k[:, :, t], state) if layer.delta else 0
        state = state + torch.einsum("bhm,bhd->bhmd", k[:, :, t], beta[:, t, :, None] * (v[:, :, t] - old))
        outs.append(torch.einsum("bhm,bhmd->bhd", q[:, :, t], state) / 2)
    read = torch.stack(outs, 1)
    gate = x @ layer.in_proj_z.weight.T
    gate = torch.sigmoid(gate) * (gate if layer.gate == "silu" else 1)
    normed = layer.norm.weight * read / (read.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    want = layer.out_proj((normed * gate.view(2, n, 3, 5)).flatten(2))
    out, weights = layer(x, return_weights=True)
    close(out, want, eps=1e5)
    close((weights @ v).transpose(1, 2), read, eps=1e5)
    assert not weights.triu(1).any()
    slope = rand(*want.shape, seed=3)
    got, expected = (
        torch.autograd.grad((y * slope).sum(), list(layer.parameters()), retain_graph=True) for y in (out, want)
    )
    for a, b in zip(got, expected, strict=True):
        close(a, b, eps=1e6)


def test_recurrent_attention_is_that_of_hugging_face() -> None:
    pytest.importorskip("transformers", reason="the peers are transformers' Qwen3.5 and Kimi Linear")
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    x = rand(2, 70, 12).float()
    sizes: dict[str, Any] = {"hidden_size": 12, "layer_types": ["linear_attention"], "num_hidden_layers": 1}
    linear = {f"linear_{name}": 3 for name in ("num_key_heads", "num_value_heads")}
    linear |= {"linear_key_head_dim": 4, "linear_value_head_dim": 5}
    layer = recurrent_layer(head_dim=(4, 5)).float()
    peer: Any = qwen.Qwen3_5GatedDeltaNet(qwen.Qwen3_5TextConfig(**sizes, **linear), 0)
    peer.load_state_dict(layer.state_dict())
    close(layer(x), peer(x), dtype=torch.float32, eps=4096)

    sizes |= {"mlp_layer_types": ["dense"], "linear_num_heads": 3, "linear_head_dim": 4, "rms_norm_eps": 1e-6}
    config = kimi.KimiLinearConfig(**sizes)
    peer, layer = kimi.KimiLinearDeltaAttention(config, 0), recurrent_layer(**RECURRENT["kimi_delta"]).float()
    gate, theirs = peer.forget_gate, {name: y.detach() for name, y in peer.named_parameters()}
    torch.nn.init.normal_(gate.dt_bias)
    torch.nn.init.normal_(gate.A_log)
    layer.load_state_dict({
        "in_proj_qkv.weight": torch.cat([theirs[f"{name}_proj.weight"] for name in "qkv"]),
        "in_proj_z.weight": theirs["g_b_proj.weight"] @ theirs["g_a_proj.weight"],
        "in_proj_a.weight": theirs["forget_gate.f_b_proj.weight"] @ theirs["forget_gate.f_a_proj.weight"],
        "in_proj_b.weight": theirs["b_proj.weight"], "conv1d.weight": theirs["conv1d.weight"],
        "A_log": gate.A_log.flatten(), "dt_bias": gate.dt_bias, "norm.weight": theirs["o_norm.weight"],
        "out_proj.weight": theirs["o_proj.weight"],
    })  # fmt: skip
    close(layer(x), peer(x), dtype=torch.float32, eps=4096)


def test_the_state_of_a_recurrent_layer_takes_other_masks_gradients_and_layers_or_is_not_reordered() -> None:
    layer, x, cache = recurrent_layer(), rand(2, 7, 12), Recurrent()
    with refused("mask", match="Window"):
        layer(x, mask=Window(3))
    close(layer(x, mask=Padding([5, 7]) & Causal())[0, :5], layer(x)[0, :5])
    with refused("x", match="gradient"):
        layer(x, cache=cache)
    for wrong in ({"cache": Full(9)}, {"cache": cache, "return_weights": True}):
        with torch.no_grad(), refused(next(reversed(wrong))):
            layer(x, **wrong)
    with torch.no_grad():
        assert Recurrent().nbytes == 0
        layer(x[:, :4], cache=cache)
        size = cache.nbytes
        cache.reorder(torch.tensor([1, 1, 0]))
        close(layer(x[[1, 1, 0], 4:], cache=cache), layer(x)[[1, 1, 0], 4:], eps=1024)
        assert cache.nbytes == size // 2 * 3
        with refused("cache", match="Recurrent"):
            latent_layer()(rand(1, 2, 20), cache=cache)


def test_layers_refuse_sizes_scores_and_results_that_do_not_fit() -> None:
    with refused("attention"):
        latent_layer(attention=Attention(score=Cosine()))
    with refused("d_model"):
        DifferentialAttention(20, 3)
    for changes, argument in (
        ({"heads": 5}, "d_model"),
        ({"decay": "row"}, "decay"),
        ({"rotary": Rotary(6)}, "rotary"),
    ):
        with refused(argument):
            RecurrentAttention(**{"d_model": 12, "heads": 3} | changes)
    for layer in (latent_layer(), DifferentialAttention(20, 2), recurrent_layer()):
        with refused("x"):
            layer(rand(1, 3, 8))


@pytest.mark.parametrize("block", [1, 3])
def test_selected_keys_are_not_the_largest_or_rows_at_a_time_select_others(block: int) -> None:
    scores = rand(2, 3, 150, -(-160 // block))
    mask = TopKeys(scores, 5, among=Causal(), block=block, n_keys=160)
    at_a_time = TopKeys(lambda rows: scores[:, :, rows], 5, among=Causal(), block=block, n_queries=150, n_keys=160)
    assert torch.equal(mask.selected, at_a_time.selected)
    keys, queries = torch.arange(scores.shape[3]) * block, torch.arange(150)[:, None] + 10
    visible: Tensor = scores.masked_fill(keys > queries, -torch.inf)
    least = visible.topk(5).values[..., -1:]
    want = ((visible >= least) & (visible > -torch.inf)).repeat_interleave(block, 3)[..., :160]
    assert torch.equal(mask.dense(150, 160, batch=2, heads=3), want)


def test_the_mass_lost_by_a_selection_differs_from_the_weights_outside_of_it() -> None:
    q, k = rand(1, 2, 40, 6), rand(1, 2, 40, 6, seed=1)
    mask = TopKeys(q @ k.mT, 4, among=Causal())
    weights = (q @ k.mT / 6**0.5).masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf).softmax(-1)
    kept = measure(q, k, mask=Causal(), mass={"kept": mask}).mass["kept"]
    close(1 - kept, weights.masked_fill(mask.dense(40, 40, heads=2), 0).sum(-1), eps=1024)


def test_top_keys_refuse_scores_and_sizes_that_do_not_fit() -> None:
    for wrong in (torch.ones(3, 3, dtype=torch.bool), torch.ones(3), lambda rows: torch.ones(1, 3)):
        with refused("index_scores"):
            TopKeys(wrong, 2, n_queries=3)
    with refused("n_keys"):
        TopKeys(torch.ones(3, 3), 2, block=2, n_keys=9)
    with refused("k"):
        TopKeys(torch.ones(3, 3), 0)
    with refused("index_scores"):
        TopKeys(torch.ones(3, 3), 2).dense(3, 4)
