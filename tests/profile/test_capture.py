"""Observe Hugging Face models: statistics equal those of the models' own weights, and the models are left as before."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import hf_models as hf
from conftest import largest_tensor, refused
from qkv.errors import InputError
from qkv.huggingface.masks import lazy_mask
from qkv.profiler.capture import probes
from qkv.profiler.capture.observe import Observer, Record, observe, unobserved
from qkv.profiler.run import profile
from qkv.reference import statistics

LOCAL = 3
EVERY = torch.ones(2, hf.LENGTH, dtype=torch.bool)  # tokens are real
CASES = [
    pytest.param(name, padding, id=f"{name}-{padding or 'whole'}")
    for name in hf.ROUTED
    for padding in (None, *hf.ARCHITECTURES[name].padding)
]
GROUPS = {
    "attentions": "self",
    "encoder_attentions": "encoder",
    "decoder_attentions": "decoder",
    "cross_attentions": "cross",
}


def observer_of(model: nn.Module, inputs: dict[str, Tensor], **settings: Any) -> Observer:
    """An observer that knows which tokens are real, as `profile` makes it."""
    masks = {which: inputs.get(f"{which}attention_mask") for which in ("", "decoder_")}
    known = {which: {m.shape[1]: m.bool()} for which, m in masks.items() if m is not None and m.ndim == 2}
    real = {"key_masks": known.get("", {}), "query_masks": known.get("decoder_", {})}
    return Observer(model, **{"local_window": LOCAL} | real | settings)


def observed(model: nn.Module, inputs: dict[str, Tensor], **settings: Any) -> tuple[list[Record], Any]:
    """Records of one forward, and its outputs."""
    with observe(observer_of(model, inputs, **settings)) as observer:
        outputs = model(**inputs)
    return observer.records, outputs


def own_weights(model: Any, inputs: dict[str, Any]) -> dict[str, list[Tensor]]:
    """The weights that a model in its eager implementation returns, a list for each group."""
    assert model.config._attn_implementation == "eager"
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True)
    return {group: list(outputs[key]) for key, group in GROUPS.items() if outputs.get(key)}


def twin(model: Any, name: str, **settings: Any) -> Any:
    """The same weights in the eager implementation."""
    other = hf.build(name, "eager", **settings)
    other.load_state_dict(model.state_dict())
    return other


def real(inputs: dict[str, Tensor], group: str, side: str, batch: int, length: int) -> Tensor:
    """True at queries or keys of a group that are real tokens."""
    ours = {"self": "", "encoder": "", "decoder": "decoder_", "cross": "decoder_" if side == "queries" else ""}[group]
    mask = inputs.get(f"{ours}attention_mask")
    return torch.ones(batch, length, dtype=torch.bool) if mask is None or mask.ndim == 4 else mask.bool()


def expected(weights: Tensor, queries: Tensor, keys: Tensor) -> dict[str, np.ndarray]:
    """Every statistic of one layer by its definition, from its weights (batch, head, query, key)."""
    A = (weights.double() * queries[:, None, :, None]).numpy()
    _, _, n_queries, n_keys = A.shape
    from_weights = statistics(A)
    steps = np.arange(n_queries)[:, None] + n_keys - n_queries - np.arange(n_keys)  # how far back each key is
    first = keys.int().argmax(1).numpy()
    return {
        "entropy": from_weights.entropy,
        "received": from_weights.received,
        "distance": from_weights.distance,
        "spread": from_weights.spread,
        "effective_keys": from_weights.effective_keys,
        "sink": np.stack([A[b, :, :, key] for b, key in enumerate(first)]),
        "self_": (A * (steps == 0)).sum(-1),
        "previous": (A * (steps == 1)).sum(-1),
        "next_": (A * (steps == -1)).sum(-1),
        "local": (A * (abs(steps) <= LOCAL)).sum(-1),
        "visible": (A > 0).sum(-1),
        "missing": np.where(queries[:, None, :], 1 - A.sum(-1), 0),
    }


def check(record: Record, weights: Tensor, queries: Tensor, keys: Tensor) -> None:
    """The record's statistics are those of `weights`, for every head."""
    got, want = record.statistics, expected(weights, queries, keys)
    where = f"{record.group} layer {record.layer} ({record.module})"
    for name in ("entropy", "received", "distance", "effective_keys", "sink", "self_", "previous", "next_"):
        close(getattr(got, name), want[name], f"{name} of {where}")
    close(got.mass["local"], want["local"], f"local of {where}")
    # Moments are about the middle of a tile: float32 resolves the variance to about 1e-3 token²
    np.testing.assert_allclose(got.spread.double() ** 2, want["spread"] ** 2, atol=2e-3, err_msg=f"spread of {where}")
    if got.sink_mass is None:
        np.testing.assert_allclose(want["missing"], 0, atol=1e-5, err_msg=f"sink_mass of {where}")
    else:
        close(got.sink_mass, want["missing"], f"sink_mass of {where}")
    assert record.weights is not None
    close(record.weights * queries[:, None, :, None], weights * queries[:, None, :, None], f"weights of {where}")
    visible = got.visible * queries[:, None]
    assert (visible.numpy() == want["visible"]).all(), f"visible of {where}"


def close(got: Tensor, want: Any, what: str) -> None:
    """Equal within a few roundings of float32, which accumulate over layers."""
    np.testing.assert_allclose(got.double(), np.asarray(want, np.float64), rtol=2e-5, atol=2e-5, err_msg=what)


def main_output(outputs: Any) -> Tensor:
    return outputs["last_hidden_state"] if "last_hidden_state" in outputs else outputs["logits"]


def state(model: nn.Module) -> dict[str, Any]:
    """All state that an observation changes temporarily."""
    configs = {name: m.config for name, m in model.named_modules() if hasattr(m, "config")}
    return {
        "attention": dict(AttentionInterface._global_mapping),
        "masks": dict(AttentionMaskInterface._global_mapping),
        "implementations": {name: c._attn_implementation_internal for name, c in configs.items()},
        "training": {name: m.training for name, m in model.named_modules()},
        "attributes": {name: set(vars(m)) for name, m in model.named_modules()},
        "grad": torch.is_grad_enabled(),
        "modes": torch.overrides._len_torch_function_stack(),
    }


# --- what is measured ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_statistics_equal_those_of_eager_weights(name: str, padding: str | None) -> None:
    model, inputs = hf.build(name), hf.inputs(name, padding)
    records, _ = observed(model, inputs)
    weights = own_weights(twin(model, name), inputs)
    assert {group: len(layers) for group, layers in weights.items()} == hf.ARCHITECTURES[name].groups
    found = {group: [r for r in records if r.group == group] for group in weights}
    assert sum(map(len, found.values())) == len(records)
    for group, layers in weights.items():
        assert [r.layer for r in found[group]] == list(range(len(layers)))
        for record, own in zip(found[group], layers, strict=True):
            batch, _, n_queries, n_keys = own.shape
            queries = real(inputs, group, "queries", batch, n_queries)
            keys = real(inputs, group, "keys", batch, n_keys)
            check(record, own, queries, keys)
            assert record.causal is (
                group == "decoder" or (group == "self" and hf.ARCHITECTURES[name].kind == "decoder")
            )


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_observed_model_computes_the_same_outputs(name: str, padding: str | None) -> None:
    model, inputs = hf.build(name), hf.inputs(name, padding)
    with torch.no_grad():
        before = main_output(model(**inputs))
    _, outputs = observed(model, inputs)
    with torch.no_grad():
        after = main_output(model(**inputs))
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    kept = slice(None) if mask is None else mask.bool()
    assert (main_output(outputs)[kept] - before[kept]).abs().max() < 2e-5
    assert torch.equal(after, before)


def test_test_models_have_non_uniform_attention_and_sinks() -> None:
    for name in hf.ROUTED:
        records, _ = observed(hf.build(name), hf.inputs(name))
        uniform = torch.stack([r.statistics.visible.clamp(min=1).log().mean() for r in records])
        entropy = torch.stack([r.statistics.entropy.mean() for r in records])
        assert entropy.mean() < 0.9 * uniform.mean(), name
    records, _ = observed(hf.build("gpt_oss"), hf.inputs("gpt_oss"))
    assert all(r.statistics.sink_mass is not None and r.statistics.sink_mass.max() > 0.1 for r in records)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_window_limits_visible_keys(name: str) -> None:
    records, _ = observed(hf.build(name), hf.inputs(name))
    n = torch.arange(hf.LENGTH)
    assert (records[0].statistics.visible == (n + 1).clamp(max=hf.WINDOW)).all()
    full = (n + 1).clamp(max=hf.WINDOW) if name == "mistral" else n + 1
    assert (records[1].statistics.visible == full).all()


def test_each_call_of_a_shared_module_is_a_layer() -> None:
    records, _ = observed(hf.build("albert"), hf.inputs("albert"))
    assert len({r.module for r in records}) == 1
    assert [r.layer for r in records] == [0, 1, 2]
    assert (records[0].statistics.entropy - records[1].statistics.entropy).abs().max() > 0.1


def test_layers_selects_layers_in_every_group() -> None:
    model, inputs = hf.build("bart"), hf.inputs("bart")
    every, _ = observed(model, inputs)
    chosen, _ = observed(model, inputs, layers={1, 2})
    assert [(r.group, r.layer) for r in chosen] == [
        ("encoder", 1), ("decoder", 1), ("cross", 1), ("decoder", 2), ("cross", 2),
    ]  # fmt: skip
    for record in chosen:
        (same,) = [r for r in every if (r.group, r.layer) == (record.group, record.layer)]
        torch.testing.assert_close(record.statistics.received, same.statistics.received, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("map_tokens", "kept"), [(0, False), (hf.LENGTH - 1, False), (hf.LENGTH, True)])
def test_weights_are_kept_up_to_map_tokens(map_tokens: int, kept: bool) -> None:
    records, _ = observed(hf.build("llama"), hf.inputs("llama"), map_tokens=map_tokens)
    assert [r.weights is not None for r in records] == [kept, kept]


# --- masks that users give ----------------------------------------------------------------------------------------


def _some_pairs(batch: int, n: int) -> Tensor:
    """A causal mask with holes, never in the diagonal."""
    holes = torch.rand(batch, 1, n, n, generator=torch.Generator().manual_seed(11)) < 0.4
    return (torch.ones(n, n, dtype=torch.bool).tril() & ~holes) | torch.eye(n, dtype=torch.bool)


@pytest.mark.parametrize(
    ("name", "lowest"),
    [
        *[(name, x) for name in ("llama", "gpt_oss", "t5") for x in (-torch.inf, torch.finfo(torch.float32).min)],
        ("llama", None),
        ("t5", None),
    ],
)
def test_four_dimensional_mask_is_applied(name: str, lowest: float | None) -> None:
    """Boolean (None), or float with masked pairs at −inf or the lowest float."""
    suffix = "EncoderModel" if name == "t5" else "Model"
    model, inputs = hf.build(name, suffix=suffix), {"input_ids": hf.inputs(name)["input_ids"]}
    seen = _some_pairs(2, hf.LENGTH)
    given = seen if lowest is None else torch.zeros(seen.shape).masked_fill(~seen, lowest)
    hidden = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    records, _ = observed(model, inputs | {"attention_mask": given})
    own = own_weights(twin(model, name, suffix=suffix), inputs | {"attention_mask": hidden})
    for record, weights in zip(records, own["self"], strict=True):
        check(record, weights, EVERY, EVERY)
        assert (record.statistics.visible == seen.sum(-1)).all()


def test_boolean_mask_that_the_model_would_add_to_its_scores_is_refused() -> None:
    """GPT-OSS in its eager implementation adds 1 to the score of every visible pair."""
    model, ids = hf.build("gpt_oss"), hf.inputs("gpt_oss")["input_ids"]
    with refused("model", match="eager_attention_forward, whose output differs"):
        observed(model, {"input_ids": ids, "attention_mask": _some_pairs(2, hf.LENGTH)})


def test_float_mask_with_finite_values_is_a_bias() -> None:
    model, inputs = hf.build("llama"), hf.inputs("llama")
    n = torch.arange(hf.LENGTH)
    bias = -0.2 * (n[:, None] - n).abs().float().expand(2, 1, -1, -1)
    bias = bias.masked_fill(~_some_pairs(2, hf.LENGTH), -torch.inf)
    records, _ = observed(model, inputs | {"attention_mask": bias})
    own = own_weights(twin(model, "llama"), inputs | {"attention_mask": bias})
    for record, weights in zip(records, own["self"], strict=True):
        check(record, weights, EVERY, EVERY)


def test_integer_mask_is_rejected() -> None:
    model, inputs = hf.build("llama"), hf.inputs("llama")
    with refused("attention_mask", match="int64"):
        observed(model, inputs | {"attention_mask": _some_pairs(2, hf.LENGTH).long()})


@pytest.mark.parametrize("name", ["llama", "mistral", "llama4", "gemma3"])
def test_packed_sequences_are_masked_from_one_another(name: str) -> None:
    model, inputs = hf.build(name), hf.inputs(name)
    lengths = (13, 5, 19)
    places = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    inputs |= {"position_ids": places, "use_cache": False}
    records, outputs = observed(model, inputs)
    other = twin(model, name)
    for record, weights in zip(records, own_weights(other, inputs)["self"], strict=True):
        check(record, weights, EVERY, EVERY)
        assert (record.statistics.visible <= places[:, None] + 1).all()
    with torch.no_grad():
        alone = model(input_ids=inputs["input_ids"][:, 13:18], use_cache=False)
    assert (main_output(outputs)[:, 13:18] - main_output(alone)).abs().max() < 1e-5


def test_bert_decoder_has_separate_groups() -> None:
    """Its modules are decoder.bert.encoder.layer …"""
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel

    encoder = BertConfig(**hf.SIZES)
    decoder = BertConfig(**hf.SIZES | {"num_hidden_layers": 3}, is_decoder=True, add_cross_attention=True)
    model = EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder))
    hf.enliven(model)
    records, _ = observed(model.eval(), hf.inputs("bart", "right"))
    found = [(r.group, r.layer, r.causal) for r in records]
    assert sorted(found) == [
        ("cross", 0, False), ("cross", 1, False), ("cross", 2, False),
        ("decoder", 0, True), ("decoder", 1, True), ("decoder", 2, True),
        ("encoder", 0, False), ("encoder", 1, False),
    ]  # fmt: skip


# --- nothing stays behind -----------------------------------------------------------------------------------------


class _Model:
    """A model in training mode with some modules in evaluation mode, as when parts of it are frozen."""

    def __init__(self, name: str) -> None:
        self.model, self.inputs = hf.build(name), hf.inputs(name)
        self.model.train()
        for i, module in enumerate(self.model.modules()):
            module.training = i % 3 != 1


@pytest.mark.parametrize("name", ["gpt2", "t5", "gemma2", "whisper"])
def test_observation_restores_the_model(name: str) -> None:
    subject = _Model(name)
    before = state(subject.model)
    with observe(observer_of(subject.model, subject.inputs)):
        inside = state(subject.model)
        subject.model(**subject.inputs)
    assert state(subject.model) == before
    assert not any(inside["training"].values())
    (implementation,) = set(inside["implementations"].values())
    assert implementation not in before["attention"]
    assert implementation in inside["attention"]
    assert implementation in inside["masks"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, InputError])
def test_observation_restores_the_model_after_an_error(error: type[BaseException]) -> None:
    subject = _Model("t5")
    before = state(subject.model)

    def run() -> None:
        with observe(observer_of(subject.model, subject.inputs)):
            subject.model(**subject.inputs)
            raise error

    with pytest.raises(error):
        run()
    assert state(subject.model) == before


def test_observation_disables_dropout_in_training() -> None:
    rates = {"attention_probs_dropout_prob": 0.5, "hidden_dropout_prob": 0.5}
    model, inputs = hf.build("bert", **rates).train(), hf.inputs("bert")
    records, _ = observed(model, inputs)
    for record, weights in zip(records, own_weights(twin(model, "bert"), inputs)["self"], strict=True):
        check(record, weights, EVERY, EVERY)
    assert model.training
    assert not torch.equal(main_output(model(**inputs)), main_output(model(**inputs)))  # it is applied again


def test_repeated_observations_are_equal() -> None:
    model, inputs = hf.build("llama"), hf.inputs("llama", "left")
    first, second = (observed(model, inputs)[0] for _ in range(2))
    assert [r.layer for r in first] == [r.layer for r in second] == [0, 1]
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.statistics.entropy, other.statistics.entropy)


def test_nested_observation_records_the_calls() -> None:
    model, inputs = hf.build("llama"), hf.inputs("llama")
    before = state(model)
    with observe(observer_of(model, inputs)) as outer:
        model(**inputs)
        middle = state(model)
        with observe(observer_of(model, inputs)) as inner:
            model(**inputs)
        assert state(model) == middle
        model(**inputs)
    assert state(model) == before
    assert ([r.layer for r in inner.records], [r.layer for r in outer.records]) == ([0, 1], [0, 1, 2, 3])
    assert unobserved(inner) == unobserved(outer) == []


def test_two_observed_models_do_not_mix() -> None:
    one, other = hf.build("llama"), hf.build("bert")
    with ExitStack() as stack:
        observers = [stack.enter_context(observe(Observer(model))) for model in (one, other)]
        one(**hf.inputs("llama"))
        other(**hf.inputs("bert"))
    assert [[r.module for r in o.records] for o in observers] == [
        ["layers.0.self_attn", "layers.1.self_attn"],
        ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"],
    ]


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "mistral", "bert", "gpt_oss"])
@pytest.mark.parametrize("padded", [False, True])
def test_observation_forms_no_quadratic_tensor(name: str, padded: bool) -> None:
    n, heads = 2048, 4
    size = "n_positions" if name == "gpt2" else "max_position_embeddings"
    depth = "n_layer" if name == "gpt2" else "num_hidden_layers"
    settings = {size: n, depth: 1} | ({"layer_types": ["sliding_attention"]} if name == "gpt_oss" else {})
    model = hf.build(name, **settings)
    ids = torch.randint(3, hf.VOCABULARY, (1, n), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids}
    if padded:
        inputs["attention_mask"] = (torch.arange(n) >= 100).long()[None]

    def run() -> None:
        records, _ = observed(model, inputs, map_tokens=0)
        assert len(records) == 1

    assert largest_tensor(run) <= heads * n * n / 16


# --- what cannot be observed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", hf.UNROUTED)
def test_unrouted_model_is_observed_and_restored(name: str) -> None:
    model, inputs = hf.build(name), hf.inputs(name)
    before, was = main_output(model(**inputs)), state(model)
    records, outputs = observed(model, inputs)
    own = own_weights(twin(model, name), inputs)["self"]
    assert len(records) == len(own) == 2
    for record, weights in zip(records, own, strict=True):
        check(record, weights, EVERY, EVERY)
        assert record.causal
    assert state(model) == was
    assert torch.equal(main_output(outputs), before)
    assert torch.equal(main_output(model(**inputs)), before)
    result = profile(model, inputs, progress=False)
    assert set(result.attrs["sources"].values()) == {"softmax"}


def test_attention_outside_of_the_interface_is_observed() -> None:
    model, inputs = hf.build("siglip_vision"), hf.inputs("siglip_vision")
    result = profile(model, inputs, progress=False)
    *layers, (head, how) = result.attrs["sources"].items()
    assert [source for _, source in layers] == ["interface"] * 2
    assert isinstance(model.get_submodule(head), nn.MultiheadAttention)
    assert how == "sdpa"
    assert result.data.sizes["layer"] == 2
    own = torch.stack(own_weights(twin(model, "siglip_vision"), inputs)["self"], 1)
    np.testing.assert_allclose(result.data["weights"], own, atol=1e-5)
    assert result.group("self-2")["weights"].shape == (2, 1, 4, 1, 36)


def test_unreadable_attention_is_named() -> None:
    """LongT5's encoder attends in blocks without the attention interface; its decoder uses the interface."""
    from transformers import LongT5Config, LongT5Model

    sizes = {"vocab_size": hf.VOCABULARY, "d_model": 64, "d_kv": 12, "d_ff": 80, "num_layers": 2, "num_heads": 4}
    model = LongT5Model(LongT5Config(**sizes, local_radius=5, encoder_attention_type="local")).eval()
    inputs = hf.inputs("t5")
    with pytest.raises(InputError, match=r"encoder\.block\.0\S+LocalSelfAttention, encoder\.block\.1\S+ \("):
        profile(model, inputs, progress=False)
    result = profile(model, inputs, progress=False, partial=True)
    assert set(result.groups) == {"decoder", "cross"}
    assert len(result.attrs["unobserved"]) == 2


def test_unknown_attention_argument_is_rejected() -> None:
    model, inputs = hf.build("llama"), hf.inputs("llama")
    with refused("sinks"):
        observed(model, inputs | {"sinks": torch.ones(4)})
    with refused("softmax_kind"):
        observed(model, inputs | {"softmax_kind": "other"})
    records, _ = observed(model, inputs | {"sinks": None, "softmax_kind": False})  # says nothing
    assert len(records) == 2


def test_indices_restrict_the_visible_keys() -> None:
    """DeepSeek-V3.2 passes them besides the mask. (test_zoo tests the model itself.)"""
    chosen = torch.tensor([[0, 0], [0, 1], [1, 2], [0, 3], [2, 4]])[None]
    record = attend_to(nn.Identity(), lazy_mask(1, 5, 5), indices=chosen.int())
    assert record.weights is not None
    assert (record.weights > 0).sum(-1)[0, 0].tolist() == [1, 2, 2, 2, 2]
    assert (record.weights[0, :, 4, [2, 4]] > 0).all()
    late = attend_to(nn.Identity(), lazy_mask(1, 5, 5), indices=chosen.flip(1).int())  # later keys stay masked
    assert late.weights is not None
    assert (late.weights > 0).sum(-1)[0, 0].tolist() == [0, 1, 2, 2, 1]
    with refused("indices"):
        attend_to(nn.Identity(), lazy_mask(1, 5, 5), indices=chosen[:, 1:])


@pytest.mark.parametrize("where", ["q_proj", "k_proj"])
def test_nan_scores_are_rejected(where: str) -> None:
    model = hf.build("llama")
    getattr(model.layers[1].self_attn, where).weight.data[5, 3] = torch.nan
    with refused("model", match=r"NaN in layers\.1"):
        observed(model, hf.inputs("llama"))


def attend_to(module: nn.Module, mask: Any = None, **kwargs: Any) -> Record:
    """One call from a module of a tiny model, as transformers would make it."""
    model = nn.Sequential(module)
    model.config = type("Config", (), {"is_encoder_decoder": False})()
    observer = Observer(model)
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((1, 4, 5, 6), (1, 2, 5, 6), (1, 2, 5, 7)))
    out, nothing = observer.attend(module, q, k, v, mask, **kwargs)
    assert out.shape == (1, 5, 4, 7)
    assert out.is_contiguous()
    assert nothing is None
    return observer.records[0]


def test_missing_mask_is_dense_or_rejected_if_causal() -> None:
    module = nn.Identity()
    assert (attend_to(module).statistics.visible == 5).all()
    assert (attend_to(module, is_causal=False).statistics.visible == 5).all()
    assert (attend_to(module, is_causal=True).statistics.visible == torch.arange(1, 6)).all()
    module.is_causal = True
    assert (attend_to(module, is_causal=False).statistics.visible == 5).all()
    with refused("attention_mask", match="is_causal"):
        attend_to(module)


def test_mask_for_another_number_of_keys_is_rejected() -> None:
    """Bottom-right alignment would shift it in silence."""
    assert (attend_to(nn.Identity(), lazy_mask(1, 5, 5)).statistics.visible == torch.arange(1, 6)).all()
    with pytest.raises(InputError, match="attention_mask is for 5 queries × 7 keys, but the model attends with 5 × 5"):
        attend_to(nn.Identity(), lazy_mask(1, 5, 7))


def test_dropout_and_unknown_masks_are_rejected() -> None:
    with refused("model", match="dropout"):
        attend_to(nn.Identity(), dropout=0.1)
    with refused("attention_mask", match=r"\(1, 5\)"):
        attend_to(nn.Identity(), torch.ones(1, 5, dtype=torch.bool))
    with refused("attention_mask", match="mapping"):
        attend_to(nn.Identity(), {"full": None, "sliding": None})


# --- generation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("gpt2", "LMHeadModel"),
        ("llama", "ForCausalLM"),
        ("mistral", "ForCausalLM"),
        ("gpt_oss", "ForCausalLM"),
        ("t5", "ForConditionalGeneration"),
    ],
)
def test_generation_under_observation_gives_the_same_tokens(name: str, suffix: str, cache: str) -> None:
    # (transformers' own cache fails for a T5 whose stacks differ in depth)
    model = hf.build(name, suffix=suffix, **({"num_decoder_layers": 2} if name == "t5" else {}))
    inputs = hf.inputs(name, "left")
    inputs = {k: v[:, : hf.WINDOW + 5] for k, v in inputs.items() if not k.startswith("decoder")}
    asked = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    asked["cache_implementation"] = cache if cache == "static" else None
    want = model.generate(**inputs, **asked)
    with observe(observer_of(model, inputs, map_tokens=0)) as observer:
        got = model.generate(**inputs, **asked)
    assert got.tolist() == want.tolist()
    assert len({tuple(row) for row in got.tolist()}) == 2
    assert len(observer.fired) > 7
    assert unobserved(observer) == []


@pytest.mark.parametrize("n", [1, 4, 37, 2 * probes.PART * 4 + 5])
def test_every_changed_byte_changes_the_hash_that_is_computed_on_a_gpu(n: int) -> None:
    values = torch.randint(256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before = probes.sums_of_bytes(values)
    assert probes.sums_of_bytes(values.clone()) == before
    for place in (0, n // 2, n - 1):
        changed = values.clone()
        changed[place] += 1
        assert probes.sums_of_bytes(changed) != before
    if n > 8:
        swapped = values.clone()
        swapped[[0, 8]] = swapped[[8, 0]]
        assert values[0] != values[8]
        assert probes.sums_of_bytes(swapped) != before
