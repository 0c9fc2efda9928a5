"""Modules: against torch's own, against loops, against one another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import qkv
from conftest import close, rand, refused, unchecked
from qkv import Attention, masks, normalizers, scores
from qkv.biases import T5Bias
from qkv.nn import (
    Composition,
    FeedForward,
    LinearAttention,
    LinformerAttention,
    MultiHeadAttention,
    Projection,
    SinkToken,
    TransformerBlock,
    from_torch,
    to_torch,
)
from qkv.positions import Rotary
from qkv_lab.course import EinsumAttention

CAUSAL = Attention(mask=masks.Causal())


def layer_of(*args: Any, seed: int = 0, cls: Any = MultiHeadAttention, **options: Any) -> Any:
    """A float64 module with random parameters, so that biases and gains matter."""
    torch.manual_seed(seed)
    return shaken(cls(*args, **options).double(), seed)


def shaken(module: nn.Module, seed: int = 0) -> nn.Module:
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.add_(rand(*parameter.shape, seed=seed + i, dtype=parameter.dtype), alpha=0.3)
    return module


def by_hand(layer: MultiHeadAttention, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """The definition as a loop over heads, which uses only the weights of the module."""
    context = x if context is None else context
    d, dv, groups = layer.head_dim, layer.v_head_dim, layer.heads // layer.kv_heads
    if layer.fused:
        w_q, w_k, w_v = layer.in_proj.weight.split(layer.widths)
        b = layer.in_proj.bias
        b_q, b_k, b_v = (0, 0, 0) if b is None else b.split(layer.widths)
    else:
        (w_q, b_q), (w_k, b_k), (w_v, b_v) = (
            (p.weight, 0 if p.bias is None else p.bias) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
    q, k, v = x @ w_q.T + b_q, context @ w_k.T + b_k, context @ w_v.T + b_v
    outs = []
    for h in range(layer.heads):
        g = h // groups
        one_q, one_k, one_v = q[..., h * d : (h + 1) * d], k[..., g * d : (g + 1) * d], v[..., g * dv : (g + 1) * dv]
        if layer.q_norm is not None and layer.k_norm is not None:
            one_q, one_k = (
                y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
                for y, norm in ((one_q, layer.q_norm), (one_k, layer.k_norm))
            )
        s = one_q @ one_k.transpose(1, 2) / d**0.5
        if mask is not None:
            s = s.masked_fill(~mask, -torch.inf)
        outs.append(s.softmax(-1) @ one_v)
    out = torch.stack(outs, 2)  # b n h dv
    if layer.gate is not None:
        gate = torch.sigmoid(x @ layer.gate.weight.T + (0 if layer.gate.bias is None else layer.gate.bias))
        out = out * gate.view(*gate.shape[:2], layer.heads, -1)
    out = out.flatten(2) @ layer.out_proj.weight.T
    return out if layer.out_proj.bias is None else out + layer.out_proj.bias


# --- MultiHeadAttention -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {}, {"bias": False}, {"fused": False}, {"kv_heads": 3}, {"kv_heads": 1, "fused": False}, {"qk_norm": True},
    {"gate": "elementwise"}, {"gate": "head", "kv_heads": 2}, {"head_dim": 5}, {"head_dim": 5, "v_head_dim": 7},
], ids=str)  # fmt: skip
def test_multi_head_attention_equals_a_loop_over_heads(options: dict[str, Any]) -> None:
    layer, x = layer_of(24, 6, **options), rand(2, 11, 24)
    close(layer(x), by_hand(layer, x))
    causal = layer_of(24, 6, attention=CAUSAL, **options)
    close(causal(x), by_hand(causal, x, mask=torch.ones(11, 11).tril().bool()))
    seen = rand(2, 1, 1, 11, seed=3) > -0.5
    close(layer(x, mask=seen), by_hand(layer, x, mask=seen[:, 0]))
    out, weights = causal(x, return_weights=True)
    close(out, causal(x))
    close(weights.sum(-1), torch.ones(2, 6, 11))


@pytest.mark.parametrize("fused", [True, False])
def test_cross_attention(fused: bool) -> None:
    width = 24 if fused else 17
    layer = layer_of(24, 4, d_context=width, kv_heads=2, qk_norm=True, fused=fused)
    x, context = rand(2, 7, 24), rand(2, 13, width, seed=1)
    out, weights = layer(x, context, return_weights=True)
    assert weights.shape == (2, 4, 7, 13)
    close(out, by_hand(layer, x, context))
    close(layer(x, keys_values=layer.keys_values(context)), out)
    close(layer(x, x) if fused else layer(x, context), layer(x) if fused else out)


def test_fused_and_separate_projections_agree() -> None:
    fused, separate = layer_of(24, 6, kv_heads=2), layer_of(24, 6, kv_heads=2, fused=False)
    three = (separate.q_proj, separate.k_proj, separate.v_proj)
    with torch.no_grad():
        fused.in_proj.weight.copy_(torch.cat([p.weight for p in three]))
        fused.in_proj.bias.copy_(torch.cat([p.bias for p in three]))
        fused.out_proj.load_state_dict(separate.out_proj.state_dict())
    x = rand(2, 9, 24)
    close(fused(x), separate(x))


def test_grouped_heads_are_repeated_heads() -> None:
    grouped, full = layer_of(24, 6, kv_heads=2), layer_of(24, 6)
    x = rand(2, 9, 24)
    with torch.no_grad():
        for kind in ("weight", "bias"):
            q, k, v = getattr(grouped.in_proj, kind).split(grouped.widths)
            k, v = (y.unflatten(0, (2, 4)).repeat_interleave(3, 0).flatten(0, 1) for y in (k, v))
            getattr(full.in_proj, kind).copy_(torch.cat([q, k, v]))
        full.out_proj.load_state_dict(grouped.out_proj.state_dict())
    close(grouped(x), full(x))


def test_einsum_attention_equals_multi_head_attention() -> None:
    layer, x = layer_of(24, 6), rand(2, 9, 24)
    mask = rand(2, 1, 9, 9, seed=1) > 0
    mask[0, 0, 3] = False  # a query without visible keys
    for one in (None, mask):
        out, weights = layer(x, mask=one, return_weights=True)
        close(EinsumAttention.of(layer)(x, one)[0], out)
        close(EinsumAttention.of(layer)(x, one)[1], weights)
    with refused("layer", match="grouped heads"):
        EinsumAttention.of(layer_of(24, 6, kv_heads=2))
    for more in (
        layer_of(24, 6, attention=CAUSAL), layer_of(24, 6, sink=True), layer_of(24, 6, head_dim=2),
        layer_of(24, 6, cls=LinformerAttention, length=9, rank=2),
    ):  # fmt: skip
        with refused("layer", match="composition"):
            EinsumAttention.of(more)


def test_with_rotary_positions_scores_depend_only_on_the_offset() -> None:
    layer, x = layer_of(24, 4, rotary=Rotary(6)), rand(1, 8, 24)
    close(layer(x, positions=torch.arange(8) + 1000), layer(x), eps=4096)
    close(layer(x, positions=torch.arange(8).expand(1, 8)), layer(x))
    assert not torch.allclose(layer(x, positions=torch.arange(8) * 2), layer(x))


@given(n=st.integers(1, 12), seed=st.integers(0, 5))
def test_self_attention_without_positions_is_permutation_equivariant(n: int, seed: int) -> None:
    layer, x = layer_of(12, 3), rand(2, n, 12, seed=seed)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    close(layer(x[:, order]), layer(x)[:, order])


def test_a_sink_and_a_key_bias_take_weight() -> None:
    x = rand(2, 9, 24)
    for options, name in (({"sink": True}, "normalizer_sink"), ({"key_bias": True}, "normalizer_key")):
        layer = layer_of(24, 6, attention=CAUSAL, **options)
        assert name in dict(layer.composition.named_parameters())
        weights = layer(x, return_weights=True)[1]
        assert (weights.sum(-1) < 1).all()
        layer(x).square().sum().backward()
        assert layer.composition.get_parameter(name).grad.abs().sum() > 0


def test_a_closed_gate_gives_the_output_bias() -> None:
    layer, x = layer_of(24, 6, gate="elementwise"), rand(1, 5, 24)
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.bias.fill_(-1e9)
    close(layer(x), layer.out_proj.bias.expand(1, 5, 24))


@pytest.mark.parametrize(("options", "count"), [
    ({"bias": False}, 4 * 24**2),
    ({}, 4 * 24**2 + 4 * 24),
    ({"bias": False, "kv_heads": 2}, 2 * 24**2 + 2 * 24 * 8),
    ({"bias": False, "kv_heads": 1, "fused": False}, 2 * 24**2 + 2 * 24 * 4),
    ({"bias": False, "gate": "elementwise"}, 5 * 24**2),
    ({"bias": False, "gate": "head"}, 4 * 24**2 + 24 * 6),
    ({"bias": False, "qk_norm": True}, 4 * 24**2 + 2 * 4),
    ({"bias": False, "sink": True}, 4 * 24**2 + 6),
    ({"bias": False, "key_bias": True}, 4 * 24**2 + 24),
], ids=str)  # fmt: skip
def test_number_of_parameters(options: dict[str, Any], count: int) -> None:
    assert sum(p.numel() for p in MultiHeadAttention(24, 6, **options).parameters()) == count


def test_each_projection_starts_xavier_uniform() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(512, 8, kv_heads=2)
    q, k, v = layer.in_proj.weight.split(layer.widths)
    for weight in (q, k, v, layer.out_proj.weight):
        limit = (6 / sum(weight.shape)) ** 0.5
        assert weight.abs().max() <= limit
        assert weight.std().item() == pytest.approx(limit / 3**0.5, rel=0.02)
    assert layer.in_proj.bias.abs().max() == layer.out_proj.bias.abs().max() == 0


@pytest.mark.parametrize("options", [
    {}, {"kv_heads": 2, "qk_norm": True, "gate": "head", "sink": True}, {"rotary": Rotary(4), "key_bias": True},
], ids=str)  # fmt: skip
def test_gradcheck(options: dict[str, Any]) -> None:
    layer, x = layer_of(8, 2 if "rotary" in options else 4, attention=CAUSAL, **options), rand(1, 5, 8)
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    inputs = (x.requires_grad_(), *(p.detach().clone().requires_grad_() for p in layer.parameters()))
    assert torch.autograd.gradcheck(run, inputs)


def test_dropout_acts_in_training_only() -> None:
    layer, x = layer_of(24, 6, attention=Attention(dropout_p=0.5)), rand(1, 9, 24)
    plain = layer_of(24, 6)
    close(layer.eval()(x), plain(x))
    torch.manual_seed(0)
    first = layer.train()(x)
    assert not torch.allclose(first, layer(x))
    torch.manual_seed(0)
    close(first, layer(x))


# --- Composition ------------------------------------------------------------------------------------------------------


def learned() -> Attention:
    return Attention(
        mask=masks.Causal(),
        bias=(T5Bias(nn.Parameter(rand(8, 6)), bidirectional=False, max_distance=16), qkv.biases.SoftCap(5.0)),
        score=scores.General(nn.Parameter(rand(6, 4, 4, seed=1))),
        normalizer=normalizers.Softmax(sink=nn.Parameter(rand(6, seed=2))),
    )


def test_learned_tensors_of_a_composition_are_parameters() -> None:
    layer = layer_of(24, 6, attention=learned())
    x = rand(2, 9, 24)
    names = {"bias_0_table", "score_weight", "normalizer_sink"}
    assert dict(layer.composition.named_parameters()).keys() == names
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    before, out = {n: p.detach().clone() for n, p in layer.composition.named_parameters()}, layer(x)
    out.square().sum().backward()
    optimizer.step()
    for name, parameter in layer.composition.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    assert not torch.allclose(layer(x), out)
    twin = layer_of(24, 6, attention=learned(), seed=5)
    assert not torch.allclose(twin(x), layer(x))
    twin.load_state_dict(layer.state_dict())
    close(twin(x), layer(x))
    copied = copy.deepcopy(layer)
    close(copied(x), layer(x))
    with torch.no_grad():
        copied.composition.score_weight.zero_()
    assert not torch.allclose(copied(x), layer(x))  # the copy's own
    assert layer.float()(x.float()).dtype == torch.float32


def test_a_module_in_a_composition_is_registered() -> None:
    features = nn.Sequential(nn.Linear(4, 8), nn.Softplus()).double()
    layer = layer_of(24, 6, cls=LinearAttention, features=features)
    assert {"composition.score_map.0.weight", "composition.score_map.0.bias"} <= dict(layer.named_parameters()).keys()
    layer(rand(1, 9, 24)).square().sum().backward()
    assert features[0].weight.grad.abs().sum() > 0


def test_modules_with_one_composition_share_its_parameters() -> None:
    shared = learned()
    a, b = (Composition(shared) for _ in range(2))
    assert a.score_weight is b.score_weight
    assert "mask=Causal" in repr(a)


# --- others -----------------------------------------------------------------------------------------------------------


def test_feed_forward() -> None:
    x = rand(2, 3, 7)
    plain = layer_of(7, 11, cls=FeedForward, activation="gelu_tanh")
    up, down = plain.up, plain.down
    inner = x @ up.weight.T + up.bias
    gelu = 0.5 * inner * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (inner + 0.044715 * inner**3)))
    close(plain(x), gelu @ down.weight.T + down.bias)
    gated = layer_of(7, 11, cls=FeedForward, activation="swiglu", bias=False)
    gate, value = (x @ gated.up.weight.T).split(11, -1)
    close(gated(x), (gate * torch.sigmoid(gate) * value) @ gated.down.weight.T)
    count = {
        a: sum(p.numel() for p in FeedForward(96, activation=a, bias=False).parameters()) for a in ("gelu", "swiglu")
    }
    assert count["gelu"] == count["swiglu"] == 8 * 96**2


def test_linear_attention() -> None:
    x = rand(2, 19, 24)
    for causal in (True, False):
        layer = layer_of(24, 6, cls=LinearAttention, kv_heads=2, causal=causal)
        q, k, v = (
            y.unflatten(-1, (h, 4)).transpose(1, 2)
            for y, h in zip(layer.in_proj(x).split(layer.widths, -1), (6, 2, 2), strict=True)
        )
        phi = [(nn.functional.elu(y) + 1) for y in (q, k.repeat_interleave(3, 1))]
        weights = phi[0] @ phi[1].transpose(2, 3)
        weights = weights.tril() if causal else weights
        out = weights / weights.sum(-1, keepdim=True) @ v.repeat_interleave(3, 1)
        close(layer(x), layer.out_proj(out.transpose(1, 2).flatten(2)))
    with refused("causal"):
        layer.step(x)
    causal_layer, state, outs = layer_of(24, 6, cls=LinearAttention), None, []
    for start in (0, 7, 8):
        out, state = causal_layer.step(x[:, start : {0: 7, 7: 8, 8: 19}[start]], state)
        outs.append(out)
    close(torch.cat(outs, 1), causal_layer(x))


def test_linformer() -> None:
    layer, x = layer_of(24, 6, cls=LinformerAttention, length=19, rank=5), rand(2, 13, 24)
    q, k, v = (y.unflatten(-1, (6, 4)).transpose(1, 2) for y in layer.in_proj(x).chunk(3, -1))
    k, v = layer.e[:13].T @ k, layer.f[:13].T @ v
    out = (q @ k.transpose(2, 3) / 2).softmax(-1) @ v
    close(layer(x), layer.out_proj(out.transpose(1, 2).flatten(2)))
    padded = nn.functional.pad(x, (0, 0, 0, 4), value=3.0)
    close(layer(padded, lengths=torch.tensor([13, 13]))[:, :13], layer(x))
    with refused("x", match="at most length"):
        layer(rand(1, 20, 24))
    assert layer_of(24, 6, cls=LinformerAttention, length=9, rank=2, shared=True).f is None


def test_sink_tokens_come_first_and_learn() -> None:
    sink, x = layer_of(24, 3, cls=SinkToken), rand(2, 9, 24)
    close(sink.strip(sink(x)), x)
    close(sink(x)[:, :3], sink.tokens.expand(2, -1, -1))
    layer = layer_of(24, 6, attention=CAUSAL)
    sink.strip(layer(sink(x))).sum().backward()
    assert sink.tokens.grad.abs().min() > 0


@pytest.mark.parametrize("place", ["pre", "post"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_block(place: Any, norm: Any) -> None:
    def heads() -> MultiHeadAttention:
        return layer_of(24, 6)

    block = shaken(TransformerBlock(heads(), FeedForward(24), cross=heads(), place=place, norm=norm).double())
    x, memory, seen = rand(2, 7, 24), rand(2, 5, 24, seed=1), rand(2, 1, 1, 5, seed=2) > -1
    y = x
    for normalise, layer in (
        (block.attention_norm, lambda z: block.attention(z, mask=masks.Causal())),
        (block.cross_norm, lambda z: block.cross(z, memory, mask=seen)),
        (block.feed_forward_norm, block.feed_forward),
    ):
        y = y + layer(normalise(y)) if place == "pre" else normalise(y + layer(y))
    close(block(x, memory, mask=masks.Causal(), memory_mask=seen), y)
    close(block(x, keys_values=block.cross.keys_values(memory), mask=masks.Causal(), memory_mask=seen), y)
    with refused("memory", match="is None"):
        block(x)
    with refused("memory", match="memory is passed"):
        TransformerBlock(heads(), FeedForward(24).double()).double()(x, memory)
    with refused("keys_values", match="is passed"):
        TransformerBlock(heads(), FeedForward(24)).double()(x, keys_values=block.cross.keys_values(memory))


# --- to and from torch ------------------------------------------------------------------------------------------------

MHA: list[dict[str, Any]] = [
    {}, {"bias": False}, {"add_zero_attn": True}, {"kdim": 17, "vdim": 17}, {"kdim": 17, "vdim": 17, "bias": False},
    {"dropout": 0.3}, {"batch_first": False},
]  # fmt: skip


@pytest.mark.parametrize("options", MHA, ids=str)
def test_torch_multihead_attention_converts_both_ways(options: dict[str, Any]) -> None:
    options = {"batch_first": True, **options}
    theirs = shaken(nn.MultiheadAttention(24, 6, **options).double()).eval()
    ours = from_torch(theirs)
    x, context = rand(2, 7, 24), rand(2, 11, options.get("kdim", 24), seed=1)
    mask = torch.ones(7, 11, dtype=torch.bool).tril(3)
    padding = torch.arange(11) >= torch.tensor([[11], [8]])
    order = (lambda y: y) if options["batch_first"] else (lambda y: y.transpose(0, 1))
    for module in (theirs, to_torch(ours)):
        turn = order if module is theirs else (lambda y: y)
        out, weights = module(
            turn(x), turn(context), turn(context), attn_mask=~mask, key_padding_mask=padding, average_attn_weights=False
        )
        mine, my_weights = ours(x, context, mask=mask & ~padding[:, None, None], return_weights=True)
        close(mine, turn(out).detach())
        close(my_weights, weights[..., :11].detach())
    assert not ours.training
    assert to_torch(ours).dropout == theirs.dropout


@pytest.mark.parametrize("options", [
    {}, {"norm_first": True}, {"activation": "gelu"}, {"bias": False}, {"layer_norm_eps": 0.1},
    {"activation": nn.GELU()},
], ids=str)  # fmt: skip
def test_torch_encoder_layer_converts_both_ways(options: dict[str, Any]) -> None:
    theirs = shaken(nn.TransformerEncoderLayer(24, 6, 31, batch_first=True, **options).double()).eval()
    ours, x = from_torch(theirs), rand(2, 7, 24)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    for module in (theirs, to_torch(ours)):
        close(ours(x), module(x).detach())
        close(ours(x, mask=causal), module(x, src_mask=~causal).detach())
    grads = []
    for module in (ours, theirs):
        module.zero_grad()
        module(x).square().sum().backward()
        grads.append(sorted(float(p.grad.norm()) for p in module.parameters()))
    close(torch.tensor(grads[0]), torch.tensor(grads[1]), eps=4096)


def test_converters_reject_unsupported_settings() -> None:
    with pytest.raises(qkv.InputError, match="add_bias_kv"):
        from_torch(nn.MultiheadAttention(24, 6, add_bias_kv=True))
    with pytest.raises(qkv.InputError, match="kdim 5 and vdim 7"):
        from_torch(nn.MultiheadAttention(24, 6, kdim=5, vdim=7))
    with pytest.raises(qkv.InputError, match="activation"):
        from_torch(nn.TransformerEncoderLayer(24, 6, activation=nn.functional.silu))
    for options, message in (
        ({"kv_heads": 2}, "grouped heads"), ({"gate": "head"}, "a gate"), ({"rotary": Rotary(4)}, "rotary"),
        ({"qk_norm": True}, "norms of queries"), ({"head_dim": 5}, "a head dimension"),
        ({"sink": True}, "another normalizer"),
        ({"attention": Attention(score=scores.Cosine())}, "another score"),
        ({"attention": Attention(bias=qkv.biases.ALiBi())}, "biases of scores"),
    ):  # fmt: skip
        with pytest.raises(qkv.InputError, match=message):
            to_torch(MultiHeadAttention(24, 6, **options))
    with refused("module", match="no counterpart"):
        to_torch(LinformerAttention(24, 6, length=9, rank=2))
    assert isinstance(
        to_torch(MultiHeadAttention(24, 6, attention=Attention(score=scores.Dot()))), nn.MultiheadAttention
    )
    heads = MultiHeadAttention(24, 6)
    for block, message in (
        (TransformerBlock(heads, FeedForward(24), cross=heads), "cross-attention"),
        (TransformerBlock(heads, FeedForward(24, activation="swiglu")), "feed-forward"),
        (TransformerBlock(heads, FeedForward(24), norm="rmsnorm"), "RMSNorm"),
        (TransformerBlock(heads, FeedForward(24), norm_bias=False), "biases in some"),
    ):
        with pytest.raises(qkv.InputError, match=message):
            to_torch(block)
    with unchecked(), refused("module", match="MultiheadAttention"):
        from_torch(nn.Linear(2, 2))  # type: ignore[arg-type]
    with unchecked(), refused("module", match="TransformerBlock"):
        to_torch(nn.Linear(2, 2))  # type: ignore[arg-type]


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "argument"), [
    ({"heads": 5}, "d_model"),
    ({"kv_heads": 4}, "kv_heads"),
    ({"heads": 0}, "heads"),
    ({"head_dim": 0}, "head_dim"),
    ({"rotary": Rotary(6)}, "rotary"),
    ({"gate": "half"}, "gate"),
    ({"d_context": 17}, "fused"),
    ({"attention": masks.Causal()}, "attention"),
])  # fmt: skip
def test_multi_head_attention_rejects_sizes_that_do_not_fit(options: dict[str, Any], argument: str) -> None:
    with unchecked(), refused(argument):
        MultiHeadAttention(**{"d_model": 24, "heads": 6, **options})


def test_modules_reject_wrong_shapes_and_sizes() -> None:
    layer = MultiHeadAttention(24, 6, rotary=Rotary(4))
    with unchecked():
        with refused("x"):
            layer(torch.zeros(2, 24))
        with pytest.raises(qkv.InputError, match="for self-attention only"):
            layer(torch.zeros(1, 2, 24), torch.zeros(1, 2, 24))
        with refused("context", match="d_context"):
            MultiHeadAttention(24, 6)(torch.zeros(1, 2, 24), torch.zeros(1, 2, 23))
        with refused("return_weights"):
            layer(torch.zeros(1, 2, 24), cache=qkv.cache.Full(4), return_weights=True)
    for make, argument in (
        (lambda: FeedForward(24, 0), "d_hidden"), (lambda: SinkToken(24, 0), "count"),
        (lambda: LinformerAttention(24, 6, length=0, rank=2), "length"),
        (lambda: EinsumAttention(24, 5), "d_model"),
        (lambda: qkv.positions.Learned(0, 4), "length"),
        (lambda: qkv.positions.Learned(3, 4)(torch.tensor([3])), "positions"),
        (lambda: TransformerBlock(layer, FeedForward(24), cross=MultiHeadAttention(12, 6)), "cross"),
    ):  # fmt: skip
        with refused(argument):
            make()


# --- Projection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 4, 31, 33, 127, 128, 130])
@pytest.mark.parametrize("out", [128, 257, 258])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_projection_equals_linear(
    rows: int, out: int, bias: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every implementation, forward and every gradient are as exact as torch's."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    layer = Projection(256, out, bias=bias)
    x = rand(1, rows, 256, dtype=torch.float32).requires_grad_()
    slope = rand(1, rows, out, seed=1, dtype=torch.float32)
    exact = layer.weight.double(), x.double(), slope.double()
    y = layer(x)
    want = exact[1] @ exact[0].T + (layer.bias.double() if bias else 0)
    close(y, want.detach(), eps=32)
    y.backward(slope)
    close(x.grad, (exact[2] @ exact[0]).detach(), eps=32)
    close(layer.weight.grad, (exact[2][0].T @ exact[1][0]).detach(), eps=256)
    if bias:
        close(layer.bias.grad, exact[2].sum((0, 1)).detach(), eps=64)


def test_a_projection_takes_any_shape_and_stride() -> None:
    layer = Projection(256, 131)
    x = rand(256, 5, 30, dtype=torch.float32).permute(2, 1, 0)
    close(layer(x), nn.functional.linear(x, layer.weight, layer.bias).detach(), eps=64)
    assert layer(x).is_contiguous()
    close(layer(x[:1, 0]), nn.functional.linear(x[:1, 0], layer.weight, layer.bias).detach(), eps=64)
    assert layer(x[:0]).shape == (0, 5, 131)
    half = copy.deepcopy(layer).bfloat16()
    assert half(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
