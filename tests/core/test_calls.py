"""Calls as torch users make them: sources, weights, dropout and argument names of `qkv.nn` and `qkv.models`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qkv
from conftest import close, enlarged, rand, refused, unchecked
from qkv import Attention, cache, masks
from qkv.models import DecoderConfig, DecoderLM
from qkv.nn import FeedForward, MultiHeadAttention, TransformerBlock, from_torch, to_torch
from qkv.positions import Rotary
from qkv_lab.models import (
    Classifier,
    ClassifierConfig,
    EncoderDecoder,
    EncoderDecoderConfig,
    RNNSeq2Seq,
    RNNSeq2SeqConfig,
)

CAUSAL = Attention(mask=masks.Causal())


def pair_of_layers(d: int = 24, heads: int = 6, **options: Any) -> tuple[MultiHeadAttention, nn.MultiheadAttention]:
    """Our layer and torch's with the same random weights, in float64 and evaluation mode."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(d, heads, batch_first=True, **options).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.4 * rand(*parameter.shape, seed=parameter.numel()))
    return from_torch(theirs), theirs


def formula(layer: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and weights by the definition, from the parameters of a fused layer."""
    w_q, w_k, w_v = layer.in_proj.weight.chunk(3)
    b_q, b_k, b_v = layer.in_proj.bias.chunk(3)
    q, k, v = (
        (x @ w.T + b).unflatten(-1, (layer.heads, -1)).transpose(1, 2)
        for x, w, b in ((query, w_q, b_q), (key, w_k, b_k), (value, w_v, b_v))
    )
    weights = (q @ k.mT / layer.head_dim**0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2) @ layer.out_proj.weight.T + layer.out_proj.bias, weights


# --- sources and names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kdim", [None, 17])
def test_query_key_and_value_can_come_from_three_sources(kdim: int | None) -> None:
    ours, theirs = pair_of_layers(kdim=kdim, vdim=kdim)
    query, key, value = rand(2, 7, 24), rand(2, 11, kdim or 24, seed=1), rand(2, 11, kdim or 24, seed=2)
    want, want_weights = theirs(query, key, value, average_attn_weights=False)
    for got in (ours(query, key, value), ours(query=query, key=key, value=value), ours(query, key=key, value=value)):
        close(got, want)
    out, weights = ours(query, key, value, return_weights=True)
    close(out, want)
    close(weights, want_weights)
    close(ours(query, keys_values=ours.keys_values(key, value)), want)
    close(ours(query, key), ours(query, key, key))


def test_values_alone_can_come_from_another_source() -> None:
    layer, _ = pair_of_layers()
    x, value = rand(2, 7, 24), rand(2, 7, 24, seed=1)
    close(layer(x, value=value), formula(layer, x, x, value)[0])
    close(layer(x, x, value), formula(layer, x, x, value)[0])


def test_the_same_tensor_three_times_is_self_attention_with_positions_and_a_cache() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(24, 6, attention=CAUSAL, rotary=Rotary(4)).double().eval()
    x = rand(2, 7, 24)
    want = layer(x)
    close(layer(x, x, x), want)
    close(layer(x, x), want)
    store = cache.Full(9)
    with torch.no_grad():
        got = torch.cat([layer(y, y, y, cache=store) for y in x.split([4, 3], 1)], 1)
    close(got, want)
    with refused("context"):
        layer(x, x, rand(2, 7, 24, seed=1))


def test_need_weights_returns_what_torch_returns() -> None:
    ours, theirs = pair_of_layers()
    x, context = rand(2, 7, 24), rand(2, 11, 24, seed=1)
    for average in (True, False):
        got, want = (m(x, context, context, need_weights=True, average_attn_weights=average) for m in (ours, theirs))
        for a, b in zip(got, want, strict=True):
            close(a, b)
    out, nothing = ours(x, x, x, need_weights=False)
    close(out, theirs(x, x, x, need_weights=False)[0])
    assert nothing is None


@pytest.mark.parametrize("nk", [7, 11])
def test_is_causal_is_torchs_mask(nk: int) -> None:
    ours, theirs = pair_of_layers()
    x, context = rand(2, 7, 24), rand(2, nk, 24, seed=1)
    hidden = torch.ones(7, nk, dtype=torch.bool).triu(1)
    close(ours(x, context, is_causal=True), theirs(x, context, context, attn_mask=hidden)[0])
    seen = rand(2, 1, 1, nk, seed=2) > -0.7
    seen[..., 0] = True
    want = theirs(x, context, context, attn_mask=hidden, key_padding_mask=~seen[:, 0, 0])[0]
    close(ours(x, context, is_causal=True, mask=seen), want)


def test_sizes_have_torchs_names_too() -> None:
    torch.manual_seed(0)
    want = MultiHeadAttention(24, 6)
    for layer in (
        MultiHeadAttention(embed_dim=24, num_heads=6),
        MultiHeadAttention(24, num_heads=6),
        MultiHeadAttention(d_model=24, n_heads=6),
    ):
        layer.load_state_dict(want.state_dict())
        x = rand(2, 7, 24, dtype=torch.float32)
        assert torch.equal(layer(x), want(x))


@pytest.mark.parametrize(("name", "value", "ours"), [
    ("batch_first", True, "batch, length"), ("kdim", 3, "d_context="), ("add_bias_kv", True, "key_bias="),
    ("dropout_p", 0.1, "dropout="), ("proj_drop", 0.1, "output_dropout="), ("hedas", 2, "did you mean 'heads'"),
])  # fmt: skip
def test_names_of_other_libraries_are_answered_with_ours(name: str, value: Any, ours: str) -> None:
    with unchecked(), refused(name, match=ours):
        MultiHeadAttention(24, 6, **{name: value})


@pytest.mark.parametrize(("name", "ours"), [
    ("attn_mask", "mask=~attn_mask"), ("key_padding_mask", "mask=~key_padding_mask"), ("memory", "context="),
    ("return_attention", "return_weights="), ("past_key_value", "cache="),
])  # fmt: skip
def test_names_in_a_call_are_answered_with_ours(name: str, ours: str) -> None:
    x = rand(1, 3, 24, dtype=torch.float32)
    with unchecked(), refused(name, match=ours):
        MultiHeadAttention(24, 6)(x, **{name: x})


def test_arguments_that_exclude_one_another_are_refused() -> None:
    layer, x = MultiHeadAttention(24, 6), rand(1, 3, 24, dtype=torch.float32)
    with refused("num_heads", match="both passed"):
        MultiHeadAttention(24, 6, num_heads=6)
    with refused("heads"):
        MultiHeadAttention(24)
    with refused("x"):
        layer()
    with refused("query", match="both passed"):
        layer(x, query=x)
    with refused("need_weights", match="return_weights"):
        layer(x, return_weights=True, need_weights=True)  # type: ignore[call-overload]
    with refused("average_attn_weights", match="need_weights=True"):
        layer(x, average_attn_weights=False)
    with refused("context", match="keys_values"):
        layer(x, value=rand(1, 3, 24, seed=1, dtype=torch.float32), keys_values=layer.keys_values(x))
    with unchecked(), refused("context", match="mask="):
        layer(x, torch.ones(3, 3).tril())
    with unchecked(), refused("value"):
        layer(x, x, x[0])
    for options in ({"need_weights": True}, {"is_causal": True}):
        with refused(next(iter(options))), torch.no_grad():
            MultiHeadAttention(24, 6, attention=CAUSAL)(x, cache=cache.Full(4), **options)


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_are_differentiable() -> None:
    layer, _ = pair_of_layers()
    x, context = rand(2, 5, 24).requires_grad_(), rand(2, 7, 24, seed=1)
    upstream = rand(2, 6, 5, 7, seed=2)
    got = torch.autograd.grad((layer(x, context, return_weights=True)[1] * upstream).sum(), [x, layer.in_proj.weight])
    want = torch.autograd.grad((formula(layer, x, context, context)[1] * upstream).sum(), [x, layer.in_proj.weight])
    for a, b in zip(got, want, strict=True):
        close(a, b)


@pytest.mark.parametrize("place", ["pre", "post"])
def test_a_block_returns_the_weights_of_its_layers(place: Any) -> None:
    torch.manual_seed(0)
    parts = (MultiHeadAttention(24, 6, attention=CAUSAL), FeedForward(24))
    block = TransformerBlock(*parts, cross=MultiHeadAttention(24, 3), place=place).double()
    x, memory = rand(2, 5, 24), rand(2, 7, 24, seed=1)
    out, weights, cross_weights = block(x, memory, return_weights=True)
    close(out, block(x, memory))
    inner = block.attention_norm(x) if place == "pre" else x
    attended, want = block.attention(inner, return_weights=True)
    close(weights, want)
    assert block.cross is not None
    assert block.cross_norm is not None
    inner = block.cross_norm(x + attended) if place == "pre" else block.attention_norm(x + attended)
    close(cross_weights, block.cross(inner, memory, return_weights=True)[1])
    keys_values = block.cross.keys_values(memory)
    close(block(x, keys_values=keys_values, return_weights=True)[2], cross_weights)
    alone = TransformerBlock(MultiHeadAttention(24, 6), FeedForward(24), place=place).double()
    out, weights = alone(x, return_weights=True, is_causal=True)
    close(out, alone(x, mask=masks.Causal()))
    assert not weights.triu(1).any()


def outputs_of(model: nn.Module, call: Any) -> tuple[Any, dict[str, tuple[Tensor, Tensor]]]:
    """The result of a call, with the values and the output of every attention in it, by the name of its module."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [
        module.register_forward_hook(
            lambda _, given, out, name=name: found.update({name: (given[2], out[0] if isinstance(out, tuple) else out)})
        )
        for name, module in model.named_modules()
        if isinstance(module, qkv.nn.Composition)
    ]
    try:
        return call(), found
    finally:
        for hook in hooks:
            hook.remove()


def check_weights(weights: dict[str, Tensor], found: dict[str, tuple[Tensor, Tensor]]) -> None:
    """The weights times the values are the output of every attention, for which there are no other weights."""
    assert set(weights) == set(found)
    for name, one in weights.items():
        values, out = found[name]
        close(one @ values.repeat_interleave(one.shape[1] // values.shape[1], 1), out, eps=512)


IDS = torch.tensor([[3, 5, 8, 1, 2, 9, 10], [4, 7, 6, 2, 1, 3, 5]])


@pytest.mark.parametrize("options", [
    {}, {"positions": "rotary", "kv_heads": 2}, {"sink": True, "positions": "alibi"}, {"key_bias": True, "window": 3},
    {"normalizer": "sigmoid", "gate": "head"}, {"normalizer": "entmax", "prefix": 3, "positions": "t5"},
], ids=str)  # fmt: skip
def test_a_language_model_returns_the_weights_of_every_layer(options: dict[str, Any]) -> None:
    model = enlarged(DecoderLM(DecoderConfig(vocab_size=11, d_model=12, layers=3, heads=6, **options)))
    (logits, weights), found = outputs_of(model, lambda: model(IDS, return_weights=True))
    close(logits, model(IDS), eps=512)
    assert [x.shape for x in weights] == [(2, 6, 7, 7)] * 3
    check_weights({f"blocks.{i}.attention.composition": x for i, x in enumerate(weights)}, found)


def test_the_weights_of_a_model_are_differentiable() -> None:
    model = enlarged(DecoderLM(DecoderConfig(vocab_size=11, d_model=12, layers=2, heads=3)))

    def entropy() -> Tensor:
        last = model(IDS, return_weights=True)[1][-1]
        return -(last * last.clamp(min=1e-300).log()).sum()

    weight, step = model.blocks[1].attention.in_proj.weight, rand(36, 12, seed=4)
    slope = (torch.autograd.grad(entropy(), weight)[0] * step).sum()
    with torch.no_grad():
        weight.add_(step, alpha=1e-5)
        after = entropy()
        weight.add_(step, alpha=-2e-5)
        torch.testing.assert_close(slope, (after - entropy()) / 2e-5, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("place", ["pre", "post"])
def test_an_encoder_decoder_returns_the_weights_of_both_halves(place: Any) -> None:
    config = EncoderDecoderConfig(
        11, 13, d_model=12, heads=3, d_hidden=10, layers=2, decoder_layers=3, context=9, dropout=0.0, place=place
    )
    model, target = enlarged(EncoderDecoder(config)), torch.tensor([[1, 4, 9, 3, 2], [1, 10, 5, 2, 0]])
    source = torch.tensor([[3, 5, 8, 1, 2, 9, 10], [4, 7, 6, 2, 0, 0, 0]])
    (logits, weights), found = outputs_of(model, lambda: model(source, target, return_weights=True))
    close(logits, model(source, target), eps=512)
    assert [x.shape for x in weights.encoder] == [(2, 3, 7, 7)] * 2
    assert [x.shape for x in weights.cross] == [(2, 3, 5, 7)] * 3
    assert not any(x[1, :, :, 4:].any() for x in (*weights.encoder, *weights.cross))
    assert not any(x.triu(1).any() for x in weights.decoder)
    named = {f"encoder.blocks.{i}.attention.composition": x for i, x in enumerate(weights.encoder)}
    named |= {f"decoder.blocks.{i}.attention.composition": x for i, x in enumerate(weights.decoder)}
    named |= {f"decoder.blocks.{i}.cross.composition": x for i, x in enumerate(weights.cross)}
    check_weights(named, found)


def test_a_classifier_returns_the_weights_of_every_layer() -> None:
    model = enlarged(Classifier(ClassifierConfig(11, classes=3, d_model=12, heads=3)))
    (logits, weights), found = outputs_of(model, lambda: model(IDS, return_weights=True))
    close(logits, model(IDS), eps=512)
    check_weights({f"encoder.blocks.{i}.attention.composition": x for i, x in enumerate(weights)}, found)


def test_alignments_of_every_head_are_differentiable() -> None:
    model = enlarged(RNNSeq2Seq(RNNSeq2SeqConfig(11, 13, d_hidden=12, attention="multihead", heads=3, cell="rnn")))
    target = torch.tensor([[1, 4, 9], [1, 10, 5]])
    weights = model.alignments(IDS, target, per_head=True)
    assert weights.shape == (2, 3, 3, 7)
    assert not torch.allclose(weights[:, 0], weights[:, 1])
    close(weights.sum(-1), torch.ones(2, 3, 3))
    weights[:, 1].square().sum().backward()
    assert isinstance(model.attention, MultiHeadAttention)
    slope = model.attention.in_proj.weight.grad
    assert slope is not None
    queries = slope[:12]
    assert queries[4:8].any()
    assert not queries[:4].any()  # of the first head, which the loss does not contain


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_of_weights_is_torchs() -> None:
    layer = MultiHeadAttention(24, 6, dropout=0.25).double()
    assert layer.composition.attention.dropout_p == 0.25
    assert to_torch(layer).dropout == 0.25
    layer.load_state_dict(pair_of_layers()[0].state_dict())
    x = rand(64, 9, 24)
    _, kept = formula(layer, x, x, x)
    weights = layer(x, return_weights=True)[1]
    dropped = weights == 0
    close(weights, torch.where(dropped, 0, kept / 0.75))
    assert abs(dropped.double().mean().item() - 0.25) < 5 * (0.25 * 0.75 / dropped.numel()) ** 0.5
    close(layer.eval()(x), formula(layer, x, x, x)[0])


def test_dropout_of_the_output_acts_in_training_only() -> None:
    layer, _ = pair_of_layers()
    dropping = MultiHeadAttention(24, 6, output_dropout=0.25).double()
    dropping.load_state_dict(layer.state_dict())
    x = rand(64, 9, 24)
    close(dropping.eval()(x), layer(x))
    torch.manual_seed(3)
    got = dropping.train()(x)
    torch.manual_seed(3)
    close(got, nn.functional.dropout(layer(x), 0.25))
    dropped = got == 0
    assert abs(dropped.double().mean().item() - 0.25) < 5 * (0.25 * 0.75 / dropped.numel()) ** 0.5
    with refused("module", match="dropout of its output"):
        to_torch(dropping)
    again = copy.deepcopy(dropping).eval()
    close(again(x), layer(x))


@pytest.mark.parametrize("options", [
    {"dropout": 1.0}, {"dropout": -0.1}, {"output_dropout": 1.0},
    {"dropout": 0.1, "attention": Attention(dropout_p=0.2)},
])  # fmt: skip
def test_wrong_probabilities_are_refused(options: dict[str, Any]) -> None:
    with refused(next(iter(options))):
        qkv.nn.MultiHeadAttention(24, 6, **options)
