"""Observe Hugging Face models: statistics equal those of the models' own weights, and the models are left as before."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_watch import in_threads
from torch import Tensor, nn
from transformers import SegformerConfig, SegformerModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import hf_models as hf
import hf_zoo
import qkv
from conftest import largest_tensor, refusals, refused, set_tile
from qkv.errors import InputError
from qkv.huggingface.masks import lazy_mask
from qkv.profiler.capture import probes
from qkv.profiler.capture.inputs import sequences_of
from qkv.profiler.capture.modules import group_of_module
from qkv.profiler.capture.observe import observe
from qkv.profiler.capture.observer import Interfaces, Observer, unobserved
from qkv.profiler.capture.record import Measures, Record, Recorder


def observer_of(model: nn.Module, inputs: dict[str, Tensor], **settings: Any) -> Observer:
    """An observer that knows which tokens are real, as `profile` makes it."""
    measures = Measures(**{"local_window": hf_zoo.LOCAL} | settings)
    return Observer(model, receive=Recorder(measures), sequences=sequences_of(model, inputs))


def observed(model: nn.Module, inputs: dict[str, Tensor], **settings: Any) -> tuple[list[Record], Any]:
    """Records of one forward, and its outputs."""
    with observe(observer_of(model, inputs, **settings)) as observer:
        outputs = model(**inputs)
    return observer.records, outputs


def check(records: list[Record], eager: Any, inputs: dict[str, Any]) -> None:
    """The records have the statistics of the weights that the eager model computes (test_zoo: of every model)."""
    error, unchecked = hf_zoo.differences(records, eager, inputs)
    assert (error < 2e-5, unchecked, len(records) > 1) == (True, [], True), error


def state(model: nn.Module) -> dict[str, Any]:
    """All state that an observation changes temporarily."""
    configs = {name: m.config for name, m in model.named_modules() if hasattr(m, "config")}
    return {
        "attention": dict(AttentionInterface._global_mapping),
        "masks": dict(AttentionMaskInterface._global_mapping),
        "implementations": {name: c._attn_implementation_internal for name, c in configs.items()},
        "training": {name: m.training for name, m in model.named_modules()},
        "attributes": {name: set(vars(m)) for name, m in model.named_modules()},
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "grad": torch.is_grad_enabled(),
        "modes": torch.overrides._len_torch_function_stack(),
    }


def some_pairs(n: int) -> Tensor:
    """A causal mask with holes, never in the diagonal."""
    holes = torch.rand(2, 1, n, n, generator=torch.Generator().manual_seed(11)) < 0.4
    return (torch.ones(n, n, dtype=torch.bool).tril() & ~holes) | torch.eye(n, dtype=torch.bool)


SEEN, LOWEST = some_pairs(hf.LENGTH), torch.finfo(torch.float32).min
STEPS = -0.2 * (torch.arange(hf.LENGTH)[:, None] - torch.arange(hf.LENGTH)).abs().float().expand(2, 1, -1, -1)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("llama", SEEN), ("t5", SEEN), ("gpt_oss", torch.zeros(SEEN.shape).masked_fill(~SEEN, -torch.inf)),
        ("t5", torch.zeros(SEEN.shape).masked_fill(~SEEN, LOWEST)), ("llama", STEPS.masked_fill(~SEEN, -torch.inf)),
    ],
    ids=["llama-bool", "t5-bool", "gpt_oss-inf", "t5-lowest", "llama-bias"],
)  # fmt: skip
def test_four_dimensional_mask_is_applied(name: str, given: Tensor) -> None:
    """Boolean, or float with masked pairs at −inf or the lowest float and a bias elsewhere."""
    suffix = "EncoderModel" if name == "t5" else "Model"
    model, inputs = hf.build(name, suffix=suffix), {"input_ids": hf.inputs(name)["input_ids"]}
    bias = torch.zeros(SEEN.shape) if given.dtype == torch.bool else given
    records, _ = observed(model, inputs | {"attention_mask": given})
    theirs = inputs | {"attention_mask": bias.masked_fill(~SEEN, LOWEST)}
    check(records, hf.build(name, "eager", suffix=suffix), theirs)
    assert all((r.statistics.visible == SEEN.sum(-1)).all() for r in records)


ERRORS = {"gpt2": None, "t5": RuntimeError, "gemma2": KeyboardInterrupt, "whisper": InputError, "bloom": RuntimeError}


@pytest.mark.parametrize("name", ERRORS)
def test_observation_restores_the_model_also_after_an_error(name: str) -> None:
    """A model in training mode with some modules in evaluation mode, as when parts of it are frozen."""
    model, inputs, error = hf.build(name).train(), hf.inputs(name), ERRORS[name]
    for i, module in enumerate(model.modules()):
        module.training = i % 3 != 1
    before = state(model)

    def run() -> None:
        with observe(observer_of(model, inputs)):
            inside = state(model)
            assert not any(inside["training"].values())
            if name in hf.ROUTED:
                (implementation,) = set(inside["implementations"].values())
                assert implementation not in before["attention"]
                assert implementation in {*inside["attention"]} & {*inside["masks"]}
            model(**inputs)
            if error is not None:
                raise error

    with pytest.raises(error) if error else nullcontext():
        run()
    assert state(model) == before


def test_nested_observations_record_the_calls_of_their_models() -> None:
    model, inputs, other = hf.build("llama"), hf.inputs("llama"), hf.build("bert")
    before = state(model)
    with observe(observer_of(model, inputs)) as outer:
        model(**inputs)
        middle = state(model)
        with observe(observer_of(model, inputs)) as inner, observe(Observer(other)) as beside:
            model(**inputs)
            other(**hf.inputs("bert"))
        assert state(model) == middle
        model(**inputs)
    assert state(model) == before
    assert ([r.layer for r in inner.records], [r.layer for r in outer.records]) == ([0, 1], [0, 1, 2, 3])
    assert unobserved(inner) == unobserved(outer) == []
    assert [r.module for r in beside.records] == [f"encoder.layer.{i}.attention.self" for i in range(2)]


def test_a_model_in_training_is_evaluated_in_every_thread() -> None:
    model, modes = hf.build("gpt2").train(), list[bool]()
    model.register_forward_pre_hook(lambda *_: (time.sleep(0.02), modes.append(model.training))[0])
    in_threads([lambda: qkv.profile(model, hf.inputs("gpt2"), progress=False, probe=False)] * 3)
    assert (modes, model.training) == ([False] * 3, True)


@pytest.mark.parametrize(("name", "padding"), [("gpt2", 0), ("mistral", 100), ("bert", 100), ("gpt_oss", 100)])
def test_observation_forms_no_quadratic_tensor(name: str, padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n, heads = 768, 4
    set_tile(monkeypatch, 128)
    size, depth = ("n_positions", "n_layer") if name == "gpt2" else ("max_position_embeddings", "num_hidden_layers")
    settings: dict[str, Any] = {size: n, depth: 1, "n_inner" if name == "gpt2" else "intermediate_size": 32}
    settings |= {"layer_types": ["sliding_attention"]} if name == "gpt_oss" else {}
    model = hf.build(name, **settings)
    ids = torch.randint(3, hf.VOCABULARY, (1, n), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids} | ({"attention_mask": (torch.arange(n) >= padding).long()[None]} if padding else {})
    assert largest_tensor(lambda: observed(model, inputs, map_tokens=0)) <= heads * n * n / 16


def attend_to(module: nn.Module, mask: Any = None, **kwargs: Any) -> Record:
    """One call from a module of a tiny model, as transformers would make it."""
    model = nn.Sequential(module)
    model.config = type("Config", (), {"is_encoder_decoder": False})()
    observer = Observer(model)
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((1, 4, 5, 6), (1, 2, 5, 6), (1, 2, 5, 7)))
    out, nothing = Interfaces(observer).transformers(module, q, k, v, mask, **kwargs)
    assert out.shape == (1, 5, 4, 7)
    assert out.is_contiguous()
    assert nothing is None
    return observer.records[0]


def test_missing_mask_is_dense_or_rejected_if_causal() -> None:
    module = nn.Identity()
    assert (attend_to(module).statistics.visible == 5).all()
    for causal, visible in ((False, 5), (True, torch.arange(1, 6))):
        assert (attend_to(module, is_causal=causal).statistics.visible == visible).all()
    module.is_causal = True
    assert (attend_to(module, is_causal=False).statistics.visible == 5).all()
    with refused("attention_mask", match="is_causal"):
        attend_to(module)


def with_nan(where: str) -> Any:
    model = hf.build("llama")
    getattr(model.layers[1].self_attn, where).weight.data[5, 3] = torch.nan
    return model


def run(name: str = "llama", **given: Any) -> None:
    observed(hf.build(name), {"input_ids": hf.inputs(name)["input_ids"], **given})


REFUSED: list[tuple[str, str | None, Callable[[], object]]] = [
    ("sinks", None, lambda: run(sinks=torch.ones(4))),
    ("softmax_kind", None, lambda: run(softmax_kind="other")),
    ("attention_mask", "int64", lambda: run(attention_mask=SEEN.long())),
    # GPT-OSS in its eager implementation adds 1 to the score of every visible pair.
    ("model", "whose output differs", lambda: run("gpt_oss", attention_mask=SEEN)),
    ("model", r"NaN in layers\.1", lambda: observed(with_nan("q_proj"), hf.inputs("llama"))),
    ("model", r"NaN in layers\.1", lambda: observed(with_nan("k_proj"), hf.inputs("llama"))),
    ("model", "dropout", lambda: attend_to(nn.Identity(), dropout=0.1)),
    ("attention_mask", "5 queries × 7", lambda: attend_to(nn.Identity(), lazy_mask(1, 5, 7))),
    ("attention_mask", r"\(1, 5\)", lambda: attend_to(nn.Identity(), torch.ones(1, 5, dtype=torch.bool))),
    ("attention_mask", "mapping", lambda: attend_to(nn.Identity(), {"full": None, "sliding": None})),
    ("indices", None, lambda: attend_to(nn.Identity(), lazy_mask(1, 5, 5), indices=torch.zeros(1, 4, 2).int())),
]

test_what_cannot_be_observed_is_rejected = refusals(REFUSED)


def optimized(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(**hf.inputs("gpt2"))[0].square().sum().backward()
    optimizer.step()


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.wte.weight[50, 3] += 1e-3


def replaced(model: Any) -> None:
    weight = model.h[1].mlp.c_fc.weight.detach().clone()
    weight[1, 1] += 1e-3
    model.h[1].mlp.c_fc.weight = nn.Parameter(weight)


def row_by_data(model: Any) -> None:
    model.wte.weight.data[41] *= 1.001


def quantized(model: Any) -> None:
    model.h[0].mlp.linear = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(64, 64)), {nn.Linear})


def requantized(model: Any) -> None:
    linear = model.quantized[0]
    linear.set_weight_bias(linear.weight(), None)


def other_frequencies(model: Any) -> None:
    model.plain.mul_(2)


CHANGES: dict[str, Callable[[Any], object]] = {
    "optimizer": optimized,
    "load_state_dict": lambda m: m.h.load_state_dict(copy.deepcopy(m.h.state_dict())),
    "in place": in_place,
    "new tensor": replaced,
    "data of another tensor": lambda m: setattr(m.wte.weight, "data", m.wte.weight.data.clone()),
    "row through data": row_by_data,
    "dtype": lambda m: m.to(torch.bfloat16),
    "hook": lambda m: m.h[0].register_forward_hook(lambda *_: None),
    "hook before": lambda m: m.h[0].register_forward_pre_hook(lambda *_: None),
    "hook removed": lambda m: m.h[1]._forward_hooks.popitem(last=False),
    "forward": lambda m: setattr(m.h[0], "forward", lambda *args, **named: args[0]),
    "configuration": lambda m: setattr(m.config, "scale_attn_by_inverse_layer_idx", True),
    "implementation": lambda m: m.set_attn_implementation("eager"),
    "mode": lambda m: m.train(),
    "module": lambda m: setattr(m.h[0], "mlp", nn.Identity()),
    "quantized layer": quantized,
    "numbers of a quantized layer": requantized,
    "tensor that is no parameter": other_frequencies,
    "function": lambda m: m.own.update(function=nn.functional.gelu),
    "entry of a set": lambda m: m.own["set"].add(3),
}


def known() -> Any:
    """A model of which there is a fingerprint."""
    model = hf.build("gpt2")
    model.plain, model.own = torch.ones(3), {"set": {1, 2}, "cycle": [], "function": nn.functional.relu}
    model.own["cycle"].append(model.own)
    model.quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear})
    model.h[1].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES)
def test_fingerprint_tells_every_change_of_a_model(change: str) -> None:
    model = known()
    before = probes.fingerprint(model)
    assert before is not None
    model(**hf.inputs("gpt2"), output_attentions=True)  # installs hooks of transformers
    assert probes.fingerprint(model) == before
    CHANGES[change](model)
    after = probes.fingerprint(model)
    assert after is not None
    assert after != before


@pytest.mark.filterwarnings("ignore")
def test_fingerprint_keeps_no_part_of_a_model_alive_and_refuses_tensors_without_a_version() -> None:
    model = known()
    key, weight = probes.fingerprint(model), weakref.ref(model.wte.weight)
    del model
    gc.collect()
    assert (key is None, weight()) == (False, None)
    with torch.inference_mode():
        assert probes.fingerprint(nn.Linear(2, 2)) is None
    assert probes.fingerprint(nn.Linear(2, 2, device="meta")) is None


VLM: dict[str, Any] = {"text_config": {}, "vision_config": {}}


@pytest.mark.parametrize(("name", "config", "group"), [
    ("model.vision_tower.blocks.0.attn", VLM | {"is_encoder_decoder": True}, "vision"),  # Florence-2
    ("model.language_model.decoder.layers.0.self_attn", VLM | {"is_encoder_decoder": True}, "decoder"),
    ("decoder.layer.0.encoder_decoder_attention.attention", {"is_encoder_decoder": True}, "cross"),  # Pix2Struct
    ("model.backbone.layers.0.attention", {"is_encoder_decoder": True, "backbone_config": {}}, "vision"),  # DETR
    ("decoder.layers.0.self_attn", VLM, "decoder"),  # CLIPSeg
    ("language_model.model.decoder.layers.0.self_attn", VLM, "text"),
    ("qformer.encoder.layer.0.attention", VLM | {"qformer_config": {}}, "qformer"),  # BLIP-2
    ("mask_decoder.layers.0.self_attn", {"vision_config": {}, "mask_decoder_config": {}}, "mask_decoder"),  # SAM
    ("mask_decoder.final_attn_token_to_image", {"vision_config": {}}, "cross"),
])  # fmt: skip
def test_parts_of_image_models_have_the_group_of_another(name: str, config: dict[str, Any], group: str) -> None:
    model = nn.ModuleDict({"text_model": nn.Identity()})
    model.config = SimpleNamespace(**config)  # type: ignore[assignment]
    assert group_of_module(name, model) == group


def test_pooled_keys_of_an_image_model_have_distances_to_queries() -> None:
    sizes = {"hidden_sizes": [16, 32], "num_attention_heads": [1, 2], "sr_ratios": [4, 1], "mlp_ratios": [2, 2]}
    shapes = {"num_encoder_blocks": 2, "depths": [1, 1], "strides": [4, 2], "patch_sizes": [7, 3]}
    model = SegformerModel(SegformerConfig(**sizes, **shapes)).eval()
    profile = qkv.profile(model, {"pixel_values": torch.randn(1, 3, 64, 64)}, probe=False)
    assert [*profile.groups] == ["cross", "self"]
    assert profile.heads(group="cross")["distance"].isna().all()
