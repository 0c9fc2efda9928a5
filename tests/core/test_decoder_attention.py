"""DecoderLM with any composition: against formulas, cached as uncached or refused, saved as JSON and safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import close, enlarged, rand, refused, unchecked
from qkv import Attention, biases, features, masks, models, normalizers, scores
from qkv.models import DecoderConfig, DecoderLM
from qkv.models.config import composition, described, from_dict, to_dict

N, HEADS, HEAD = 13, 3, 4
STRICT = masks.Causal() & ~masks.Window(1)
"""Every token attends to the tokens before it, and not to itself."""


def parameter(*shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(rand(*shape, seed=seed))


COMPOSITIONS: dict[str, Callable[[], Attention]] = {
    "bigbird": lambda: Attention(mask=masks.bigbird(2, 1)),
    "shaw": lambda: Attention(bias=biases.RelativePosition(parameter(7, HEAD), parameter(7, HEAD, seed=1))),
    "additive": lambda: Attention(score=scores.Additive(parameter(5), parameter(5, HEAD), parameter(5, HEAD, seed=1))),
    "linear": lambda: Attention(
        score=scores.Features(features.elu_plus_one), normalizer=normalizers.Identity(divide="sum")
    ),
    "performer": lambda: Attention(
        score=scores.Features(features.Favor(HEAD, n_features=9, seed=2)), normalizer=normalizers.Identity(divide="sum")
    ),
    "strict": lambda: Attention(mask=STRICT),
    "longformer": lambda: Attention(mask=masks.longformer(4, [0], causal=True), bias=biases.SoftCap(3.0)),
    "several": lambda: Attention(
        mask=masks.Blockwise(masks.Window(2), 2) | masks.Strided(5),
        bias=(biases.T5Bias(parameter(6, HEADS), bidirectional=False), biases.ALiBi()),
        score=scores.General(parameter(HEADS, HEAD, HEAD)),
        normalizer=normalizers.Entmax(1.5, sink=parameter(HEADS)),
    ),
}
every = pytest.mark.parametrize("name", COMPOSITIONS)
REFUSED = {"bigbird"}  # generation would need keys of another text


def build(name: str, **changes: Any) -> DecoderLM:
    config = DecoderConfig(
        vocab_size=11, context=24, d_model=12, layers=2, heads=HEADS, d_hidden=10, attention=COMPOSITIONS[name](),
        **changes,
    )  # fmt: skip
    return enlarged(DecoderLM(config))


def ids_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(seed))


def softmax_over(s: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible keys; a row of zeros where there are none."""
    return torch.nan_to_num(s.masked_fill(~visible, -torch.inf).softmax(-1), nan=0.0)


def formula(name: str, module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output of one layer's attention, with a matrix of all pairs."""
    p = dict(module.named_parameters())
    n = q.shape[2]
    past, s = torch.ones(n, n, dtype=torch.bool).tril(), q @ k.mT / HEAD**0.5
    if name == "bigbird":
        return softmax_over(s, past & masks.bigbird(2, 1).dense(n, n)[0, 0]) @ v
    if name == "strict":
        return softmax_over(s, past.tril(-1)) @ v
    if name == "linear":
        weights = (features.elu_plus_one(q) @ features.elu_plus_one(k).mT) * past
        return weights / weights.sum(-1, keepdim=True) @ v
    if name == "additive":
        inner = (q @ p["score_w_q"].T)[..., :, None, :] + (k @ p["score_w_k"].T)[..., None, :, :]
        return softmax_over(inner.tanh() @ p["score_vector"], past) @ v
    assert name == "shaw"
    place = torch.arange(n)
    distance = (place - place[:, None]).clamp(-3, 3) + 3
    keys, values = (p[x][distance] for x in ("bias_keys", "bias_values"))
    weights = softmax_over(s + torch.einsum("bhqd,qkd->bhqk", q, keys) / HEAD**0.5, past)
    return weights @ v + torch.einsum("bhqk,qkd->bhqd", weights, values)


@pytest.mark.parametrize("name", ["bigbird", "shaw", "additive", "linear", "strict"])
def test_every_layer_computes_the_composition(name: str) -> None:
    model, seen = build(name), []
    for block in model.blocks:
        module = block.attention.composition
        module.register_forward_hook(lambda module, given, out: seen.append((module, given, out)))
    model(ids_of(2, N))
    assert len(seen) == 2
    for module, given, out in seen:
        close(out, formula(name, module, *given), eps=1024)


def test_the_first_token_of_a_strictly_causal_model_attends_to_nothing() -> None:
    model = build("strict")
    logits, weights = model(ids_of(2, N), return_weights=True)
    assert logits.isfinite().all()
    for one in weights:
        assert not one[:, :, 0].any()
        assert not one.triu().any()
        close(one[:, :, 1:].sum(-1), torch.ones(2, HEADS, N - 1))


@every
def test_later_tokens_do_not_change_earlier_logits(name: str) -> None:
    model, ids = build(name), ids_of(2, N)
    other = ids.clone()
    other[:, 8:] = (other[:, 8:] + 1) % 11
    torch.testing.assert_close(model(ids)[:, :8], model(other)[:, :8], rtol=0, atol=1e-12)
    assert not torch.allclose(model(ids)[:, 8], model(other)[:, 8])


@every
@pytest.mark.parametrize("chunk", [1, 5])
def test_cached_is_uncached_or_refused(name: str, chunk: int) -> None:
    model, ids = build(name), ids_of(2, N)
    if name in REFUSED:
        with refused("attention", match="number of tokens"):
            model.start(2)
        return
    whole, state = model(ids), model.start(2)
    for start in range(0, N, chunk):
        logits = model.step(ids[:, start : start + chunk], state)
        close(logits, whole[:, min(start + chunk, N) - 1].detach(), eps=4096)


@every
def test_padding_on_the_left_changes_nothing_or_is_refused(name: str) -> None:
    model, ids = build(name, positions="rotary"), ids_of(2, 6)
    padded = torch.cat([torch.full((2, 4), 7), ids], 1)
    pads = torch.tensor([4, 4])
    if name in REFUSED | {"longformer", "several"}:
        with refused("padding" if name not in REFUSED else "attention"):
            model.start(2, padding=pads)
        return
    close(model.step(padded, model.start(2, padding=pads)), model(ids)[:, -1].detach(), eps=4096)


@pytest.mark.parametrize("mask", [
    masks.RandomKeys(2), masks.Global([-1]), masks.Shifted(masks.Causal(), 0), masks.Dense(torch.ones(24, 24) > 0),
    masks.Blockwise(masks.Global([0, -1]), 4), ~masks.RandomKeys(1),
], ids=repr)  # fmt: skip
def test_masks_that_depend_on_the_length_are_refused_in_generation(mask: masks.Mask) -> None:
    model = DecoderLM(DecoderConfig(d_model=12, layers=1, heads=3, context=24, attention=Attention(mask=mask)))
    with refused("attention", match="number of tokens"):
        model.start()


def test_every_layer_and_every_model_has_learned_tensors_of_its_own() -> None:
    own = COMPOSITIONS["shaw"]()
    config = DecoderConfig(vocab_size=11, d_model=12, layers=2, heads=HEADS, attention=own)
    first, second = DecoderLM(config).double(), DecoderLM(config).double()
    tables = [m.blocks[i].attention.composition.bias_keys for m in (first, second) for i in (0, 1)]
    assert isinstance(own.bias, biases.RelativePosition)
    for table in tables:
        close(table, own.bias.keys.detach())
    assert len({x.data_ptr() for x in (*tables, own.bias.keys)}) == 5
    first.loss(ids_of(2, N)).backward()
    assert tables[0].grad is not None
    assert tables[0].grad.any()
    assert own.bias.keys.grad is None


def test_dropout_of_the_composition_goes_before_that_of_the_configuration() -> None:
    for own, want in ((0.0, 0.2), (0.3, 0.3)):
        config = DecoderConfig(d_model=12, layers=1, heads=3, dropout=0.2, attention=Attention(dropout_p=own))
        assert DecoderLM(config).blocks[0].attention.composition.attention.dropout_p == want


def test_a_feature_map_that_is_a_module_keeps_its_initial_weights() -> None:
    torch.manual_seed(0)
    learned = nn.Sequential(nn.Linear(4, 6), nn.Softplus())
    attention = Attention(score=scores.Features(learned), normalizer=normalizers.Identity(divide="sum"))
    model = DecoderLM(DecoderConfig(d_model=12, layers=2, heads=3, attention=attention))
    for block in model.blocks:
        assert torch.equal(block.attention.composition.score_map[0].weight, learned[0].weight)


# --- files ------------------------------------------------------------------------------------------------------------


@every
def test_saved_models_load_with_their_composition(name: str, tmp_path: Path) -> None:
    model, ids = build(name), ids_of(2, N)
    models.save(model, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    again = models.load(tmp_path)
    assert isinstance(again, DecoderLM)
    assert torch.equal(again(ids), model(ids))
    assert [n for n, _ in again.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert to_dict(again.config) == to_dict(model.config)
    assert json.loads(json.dumps(to_dict(model.config))) == json.loads((tmp_path / "config.json").read_text())["config"]


def test_a_configuration_without_composition_is_saved_as_before() -> None:
    config = DecoderConfig(window=5)
    assert "attention" not in to_dict(config)
    assert from_dict(DecoderConfig, to_dict(config)) == config


def test_fixed_parameters_stay_fixed() -> None:
    fixed = nn.Parameter(torch.ones(7, 4), requires_grad=False)
    again = composition(described(Attention(bias=biases.RelativePosition(fixed))))
    assert isinstance(again.bias, biases.RelativePosition)
    assert not again.bias.keys.requires_grad


class OwnMask(masks.Mask):
    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: masks.Grid) -> Tensor:
        return k < q


class OwnWindow(masks.Window):
    pass


@pytest.mark.parametrize("attention", [
    Attention(mask=OwnMask()), Attention(mask=OwnWindow(3)), Attention(mask=masks.Predicate(lambda b, h, q, k: k <= q)),
    Attention(score=scores.Features(torch.exp)), Attention(score=scores.Features(nn.Softplus())),
    Attention(bias=biases.ALiBi(torch.ones(3))), Attention(mask=torch.ones(9, 9).tril() > 0),
    Attention(normalizer=normalizers.Softmax(sink=float("inf"))),
], ids=range(8))  # fmt: skip
def test_compositions_without_a_form_in_json_are_refused_at_saving(attention: Attention, tmp_path: Path) -> None:
    model = DecoderLM(DecoderConfig(vocab_size=11, d_model=12, layers=1, heads=3, attention=attention))
    model(ids_of(1, 9))
    with refused("attention"):
        models.save(model, tmp_path)
    assert not list(tmp_path.glob("*"))


@pytest.mark.parametrize("entries", [
    3, {"masks": None}, {"mask": {"type": "os.system"}}, {"mask": {"type": "masks.Window", "width": 3}},
    {"mask": {"size": 3}}, {"mask": {"type": "masks.bigbird"}}, {"score": {"function": "features.exp"}},
    {"mask": {"type": "masks.__class__"}},
], ids=str)  # fmt: skip
def test_other_entries_are_refused_at_loading(entries: Any) -> None:
    with unchecked(), refused("attention"):
        composition(entries)


@pytest.mark.parametrize(("changes", "argument"), [
    ({"window": 3}, "window"), ({"prefix": 3}, "prefix"), ({"normalizer": "relu"}, "normalizer"),
    ({"score_scale": 2.0}, "score_scale"), ({"positions": "alibi"}, "positions"), ({"positions": "t5"}, "positions"),
    ({"attention": masks.Causal()}, "attention"),
])  # fmt: skip
def test_settings_that_the_composition_replaces_are_refused(changes: dict[str, Any], argument: str) -> None:
    with unchecked(), refused(argument):
        DecoderConfig(**{"attention": Attention(), **changes})
    with unchecked(), refused("mask", match="the class Causal"):
        DecoderConfig(attention=Attention(mask=masks.Causal))  # type: ignore[arg-type]
