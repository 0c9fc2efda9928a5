"""Calls as torch users make them: sources, weights, dropout and argument names of `qkv.nn` and `qkv.models`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qkv
from conftest import close, enlarged, rand, refused
from qkv import Attention, cache, masks
from qkv.models import DecoderConfig, DecoderLM
from qkv.nn import MultiHeadAttention, from_torch, to_torch
from qkv.positions import Rotary
from qkv_lab.models import Classifier, ClassifierConfig

CAUSAL = Attention(mask=masks.Causal())
X = rand(1, 3, 24, dtype=torch.float32)
LAYER, OWN = MultiHeadAttention(24, 6), MultiHeadAttention(24, 6, attention=CAUSAL)


def pair_of_layers(d: int = 24, heads: int = 6, **options: Any) -> tuple[MultiHeadAttention, nn.MultiheadAttention]:
    """Our layer and torch's with the same random weights, in float64 and evaluation mode."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(d, heads, batch_first=True, **options).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.4 * rand(*parameter.shape, seed=parameter.numel()))
    return from_torch(theirs), theirs


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
    if kdim is None:
        for got in (ours(query, value=query + 1), ours(query, query, query + 1)):
            close(got, theirs(query, query, query + 1)[0])


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


def test_need_weights_and_is_causal_are_torchs() -> None:
    ours, theirs = pair_of_layers()
    x, context = rand(2, 7, 24), rand(2, 11, 24, seed=1)
    for average in (True, False):
        got, want = (m(x, context, context, need_weights=True, average_attn_weights=average) for m in (ours, theirs))
        for a, b in zip(got, want, strict=True):
            close(a, b)
    out, nothing = ours(x, x, x, need_weights=False)
    close(out, theirs(x, x, x, need_weights=False)[0])
    assert nothing is None
    hidden = torch.ones(7, 11, dtype=torch.bool).triu(1)
    close(ours(x, context, is_causal=True), theirs(x, context, context, attn_mask=hidden)[0])
    seen = rand(2, 1, 1, 11, seed=2) > -0.7
    seen[..., 0] = True
    want = theirs(x, context, context, attn_mask=hidden, key_padding_mask=~seen[:, 0, 0])[0]
    close(ours(x, context, is_causal=True, mask=seen), want)


def made(**options: Any) -> Callable[[], object]:
    return lambda: MultiHeadAttention(24, 6, **options)


def called(*inputs: Tensor, **options: Any) -> Callable[[], object]:
    return lambda: LAYER(*inputs, **options)


REFUSALS: list[tuple[str, Callable[[], object], str | None]] = [
    # names of other libraries are answered with ours
    ("batch_first", made(batch_first=True), "batch, length"),
    ("kdim", made(kdim=3), "d_context="),
    ("proj_drop", made(proj_drop=0.1), "torch.nn.Dropout"),
    ("hedas", made(hedas=2), "'heads'"),
    ("attn_mask", called(X, attn_mask=X), "mask=~attn_mask"),
    ("others", called(X, X, X, X), "mask="),
    ("others", lambda: qkv.attend(X, X, X, torch.ones(3, 3).bool()), "mask="),
    ("past_key_value", called(X, past_key_value=X), "cache="),
    # arguments that exclude one another
    ("num_heads", made(num_heads=6), "both passed"),
    ("heads", lambda: MultiHeadAttention(24), None),
    ("x", called(), None),
    ("query", called(X, query=X), "both passed"),
    ("need_weights", called(X, return_weights=True, need_weights=True), "return_weights"),
    ("average_attn_weights", called(X, average_attn_weights=False), "need_weights=True"),
    ("context", called(X, value=X, keys_values=LAYER.keys_values(X)), "keys_values"),
    ("context", called(X, torch.ones(3, 3).tril()), "mask="),
    ("value", called(X, X, X[0]), None),
    ("need_weights", lambda: OWN(X, cache=cache.Full(4), need_weights=True), None),
    ("is_causal", lambda: OWN(X, cache=cache.Full(4), is_causal=True), None),
    # probabilities
    ("dropout", made(dropout=1.0), None),
    ("dropout", made(dropout=-0.1), None),
    ("dropout", made(dropout=0.1, attention=Attention(dropout_p=0.2)), None),
]


@pytest.mark.parametrize(("argument", "call", "match"), REFUSALS)
def test_wrong_arguments_are_refused(argument: str, call: Callable[[], object], match: str | None) -> None:
    with torch.no_grad(), refused(argument, match):
        call()


# --- weights ----------------------------------------------------------------------------------------------------------


def outputs_of(model: nn.Module, call: Any) -> tuple[Any, dict[str, tuple[Tensor, Tensor]]]:
    """The result of a call, with the values and the output of every attention in it, by the name of its module."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, qkv.nn.Composition):
            module.register_forward_hook(lambda _, given, out, name=name: found.update({name: (given[2], out[0])}))
    return call(), found


def check_weights(weights: dict[str, Tensor], found: dict[str, tuple[Tensor, Tensor]]) -> None:
    """The weights times the values are the output of every attention, for which there are no other weights."""
    assert set(weights) == set(found)
    for name, one in weights.items():
        values, out = found[name]
        close(one @ values.repeat_interleave(one.shape[1] // values.shape[1], 1), out, eps=512)


IDS = torch.tensor([[3, 5, 8, 1, 2, 9, 10], [4, 7, 6, 2, 1, 3, 5]])


LANGUAGE_MODELS = [
    {"positions": "rotary", "kv_heads": 2}, {"sink": True, "positions": "alibi"}, {"key_bias": True, "window": 3},
    {"normalizer": "sigmoid", "gate": "head"}, {"normalizer": "entmax", "prefix": 3, "positions": "t5"},
]  # fmt: skip


@pytest.mark.parametrize("options", [*LANGUAGE_MODELS, None], ids=str)
def test_a_model_returns_the_weights_of_every_layer(options: dict[str, Any] | None) -> None:
    model: nn.Module
    if options is None:
        name, model = "encoder.", Classifier(ClassifierConfig(11, classes=3, d_model=12, heads=6, layers=3))
    else:
        name, model = "", DecoderLM(DecoderConfig(vocab_size=11, d_model=12, layers=3, heads=6, **options))
    enlarged(model)
    logits = model(IDS)
    (again, weights), found = outputs_of(model, lambda: model(IDS, return_weights=True))
    close(again, logits, eps=512)
    assert [x.shape for x in weights] == [(2, 6, 7, 7)] * 3
    check_weights({f"{name}blocks.{i}.attention.composition": x for i, x in enumerate(weights)}, found)


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_of_weights_is_torchs() -> None:
    torch.manual_seed(3)
    layer = MultiHeadAttention(24, 6, dropout=0.25).double()
    assert layer.composition.attention.dropout_p == 0.25
    assert to_torch(layer).dropout == 0.25
    ours, theirs = pair_of_layers()
    layer.load_state_dict(ours.state_dict())
    x = rand(64, 9, 24)
    out, kept = theirs(x, x, x, average_attn_weights=False)
    weights = layer(x, return_weights=True)[1]
    dropped = weights == 0
    close(weights, torch.where(dropped, 0, kept / 0.75))
    assert abs(dropped.double().mean().item() - 0.25) < 5 * (0.25 * 0.75 / dropped.numel()) ** 0.5
    close(layer.eval()(x), out)
