"""Modules: against torch's own, against loops, against one another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qkv
from conftest import close, rand, refusals, refused
from qkv import Attention, masks, normalizers, scores
from qkv.biases import T5Bias, TensorBias
from qkv.nn import (
    Composition,
    FeedForward,
    LinearAttention,
    LinformerAttention,
    MultiHeadAttention,
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
    {"gate": "elementwise"}, {"gate": "head", "kv_heads": 2}, {"head_dim": 5}, {"head_dim": (5, 7)},
], ids=str)  # fmt: skip
def test_multi_head_attention_equals_a_loop_over_heads(options: dict[str, Any]) -> None:
    layer, x, context = layer_of(24, 6, **options), rand(2, 11, 24), rand(2, 13, 24, seed=1)
    close(layer(x), by_hand(layer, x))
    close(layer(x, context), by_hand(layer, x, context))
    causal = layer_of(24, 6, attention=CAUSAL, **options)
    close(causal(x), by_hand(causal, x, mask=torch.ones(11, 11).tril().bool()))
    seen = rand(2, 1, 1, 11, seed=3) > -0.5
    close(layer(x, mask=seen), by_hand(layer, x, mask=seen[:, 0]))
    out, weights = causal(x, return_weights=True)
    close(out, causal(x))
    close(weights.sum(-1), torch.ones(2, 6, 11))


# --- Composition ------------------------------------------------------------------------------------------------------


def learned() -> Attention:
    return Attention(
        mask=masks.Causal(),
        bias=(T5Bias(nn.Parameter(rand(8, 6)), bidirectional=False, max_distance=16), qkv.biases.SoftCap(5.0)),
        score=scores.General(nn.Parameter(rand(6, 4, 4, seed=1))),
        normalizer=normalizers.Softmax(sink=nn.Parameter(rand(6, seed=2))),
    )


def test_learned_tensors_of_a_composition_are_parameters() -> None:
    a, b = (Composition(shared) for shared in [learned()] * 2)
    assert a.score_weight is b.score_weight
    assert "mask=Causal" in repr(a)
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


@pytest.mark.parametrize("shape", [(9, 9), (6, 9, 9), (1, 6, 9, 9)])
def test_a_learned_tensor_of_pairs_is_not_trained(shape: tuple[int, ...]) -> None:
    pairs = nn.Parameter(rand(*shape))
    layer = layer_of(24, 6, attention=Attention(bias=TensorBias(pairs)))
    assert dict(layer.named_parameters())["composition.bias_tensor"] is pairs
    layer = copy.deepcopy(layer)
    q, k, v = rand(3, 2, 6, 9, 4)
    out = layer.composition(q, k, v)
    own = dict(layer.composition.named_parameters())["bias_tensor"]
    expected = ((q @ k.mT / 2 + own).softmax(-1)) @ v
    close(out, expected)
    for one, other in zip(*(torch.autograd.grad(x.square().sum(), own) for x in (out, expected)), strict=True):
        close(one, other)


def test_a_module_holds_a_learned_tensor_that_it_does_not_train() -> None:
    class Scaled(scores.Product):
        def __init__(self) -> None:
            self.by_name = {"scale": nn.Parameter(rand(4))}

        def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            return q * self.by_name["scale"], k

    for score in (scores.Concat(nn.Parameter(rand(4, 8)), rand(4), query_size=4), Scaled()):
        with refused("attention"):
            Composition(Attention(score=score))


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
    for start, stop in ((0, 7), (7, 8), (8, 19)):
        out, state = causal_layer.step(x[:, start:stop], state)
        outs.append(out)
    close(torch.cat(outs, 1), causal_layer(x))


def test_sink_tokens_come_first_and_learn() -> None:
    sink, x = layer_of(24, 3, cls=SinkToken), rand(2, 9, 24)
    close(sink.strip(sink(x)), x)
    close(sink(x)[:, :3], sink.tokens.expand(2, -1, -1))
    layer = layer_of(24, 6, attention=CAUSAL)
    sink.strip(layer(sink(x))).sum().backward()
    assert sink.tokens.grad.abs().min() > 0


@pytest.mark.parametrize(("place", "norm"), [("pre", "layernorm"), ("post", "rmsnorm")])
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


# --- to and from torch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {}, {"bias": False}, {"add_zero_attn": True, "dropout": 0.3}, {"kdim": 17, "vdim": 17},
    {"kdim": 17, "vdim": 17, "bias": False, "batch_first": False},
], ids=str)  # fmt: skip
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
    {}, {"norm_first": True, "activation": "gelu"}, {"bias": False, "layer_norm_eps": 0.1}, {"activation": nn.GELU()},
], ids=str)  # fmt: skip
def test_torch_encoder_layer_converts_both_ways(options: dict[str, Any]) -> None:
    theirs: Any = shaken(nn.TransformerEncoderLayer(24, 6, 31, batch_first=True, **options).double()).eval()
    theirs.norm2.eps = 0.5
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


# --- what is refused --------------------------------------------------------------------------------------------------


def heads_of(d_model: int = 24, heads: int = 6, **options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(d_model, heads, **options)


def block_of(*, norm_bias: bool = True, activation: str = "gelu", **options: Any) -> TransformerBlock:
    return TransformerBlock(heads_of(), FeedForward(24, activation=activation), norm_bias=norm_bias, **options)


X = torch.zeros(1, 2, 24)


class Doubled(nn.TransformerEncoderLayer):
    """A layer of torch whose output is another one."""

    def forward(self, *args: Any, **named: Any) -> torch.Tensor:
        return 2 * super().forward(*args, **named)


def uneven() -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(24, 6)
    layer.dropout2.p = 0.3
    return layer


REFUSALS: list[tuple[str, str | None, Callable[[], object]]] = [
    ("d_model", None, lambda: heads_of(heads=5)), ("kv_heads", None, lambda: heads_of(kv_heads=4)),
    ("heads", None, lambda: heads_of(heads=0)), ("head_dim", None, lambda: heads_of(head_dim=0)),
    ("rotary", None, lambda: heads_of(rotary=Rotary(6))), ("gate", None, lambda: heads_of(gate="half")),
    ("fused", None, lambda: heads_of(d_context=17)), ("attention", None, lambda: heads_of(attention=masks.Causal())),
    ("x", None, lambda: heads_of()(X[0])), ("context", "d_context", lambda: heads_of()(X, X[..., 1:])),
    ("context", "self-attention only", lambda: heads_of(rotary=Rotary(4))(X, X.clone())),
    *((name, None, lambda name=name: heads_of()(X, cache=qkv.cache.Full(4), **{name: True}))
      for name in ("return_weights", "return_statistics")),
    ("need_weights", "return_statistics", lambda: heads_of()(X, need_weights=True, return_statistics=True)),
    ("d_hidden", None, lambda: FeedForward(24, 0)), ("count", None, lambda: SinkToken(24, 0)),
    ("length", None, lambda: LinformerAttention(24, 6, length=0, rank=2)),
    ("x", "at most length", lambda: LinformerAttention(24, 6, length=1, rank=1)(X)),
    ("d_model", None, lambda: EinsumAttention(24, 5)), ("length", None, lambda: qkv.positions.Learned(0, 4)),
    ("positions", None, lambda: qkv.positions.Learned(3, 4)(torch.tensor([3]))),
    ("cross", None, lambda: block_of(cross=heads_of(12))), ("memory", "is None", lambda: block_of(cross=heads_of())(X)),
    ("memory", "is passed", lambda: block_of()(X, X)),
    ("keys_values", "is passed", lambda: block_of()(X, keys_values=heads_of().keys_values(X))),
    ("module", "add_bias_kv", lambda: from_torch(nn.MultiheadAttention(24, 6, add_bias_kv=True))),
    ("module", "kdim 5 and vdim 7", lambda: from_torch(nn.MultiheadAttention(24, 6, kdim=5, vdim=7))),
    ("module", "activation", lambda: from_torch(nn.TransformerEncoderLayer(24, 6, activation=nn.functional.silu))),
    ("module", "its own forward", lambda: from_torch(Doubled(24, 6))),
    ("module", "dropout2", lambda: from_torch(uneven())),
    ("module", "MultiheadAttention", lambda: from_torch(nn.Linear(2, 2))),  # type: ignore[arg-type]
    ("module", "TransformerBlock", lambda: to_torch(nn.Linear(2, 2))),  # type: ignore[arg-type]
    ("module", "no counterpart", lambda: to_torch(LinformerAttention(24, 6, length=9, rank=2))),
    *(("module", match, lambda options=options: to_torch(heads_of(**options))) for match, options in (
        ("grouped heads", {"kv_heads": 2}), ("a gate", {"gate": "head"}), ("rotary", {"rotary": Rotary(4)}),
        ("norms of queries", {"qk_norm": True}), ("a head dimension", {"head_dim": 5}),
        ("another normalizer", {"sink": "logit"}), ("another score", {"attention": Attention(score=scores.Cosine())}),
        ("biases of scores", {"attention": Attention(bias=qkv.biases.ALiBi())}),
    )),
    ("module", "cross-attention", lambda: to_torch(block_of(cross=heads_of()))),
    ("module", "feed-forward", lambda: to_torch(block_of(activation="swiglu"))),
    ("module", "RMSNorm", lambda: to_torch(block_of(norm="rmsnorm"))),
    ("module", "biases in some", lambda: to_torch(block_of(norm_bias=False))),
]  # fmt: skip

test_wrong_sizes_and_modules_without_counterpart_are_refused = refusals(REFUSALS)
