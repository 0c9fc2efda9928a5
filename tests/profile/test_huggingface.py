"""Hugging Face models on qkv's kernels compute the same as with their eager attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import hf_models as hf
from conftest import refused
from qkv import kernels
from qkv.engine import Call, Result
from qkv.huggingface import register, use
from qkv.profiler.capture.observe import observe
from qkv.profiler.capture.observer import Observer

CASES = [  # the first text is whole, the second is padded at one of its sides
    (name, sides[(place + 1) % len(sides)] if (sides := hf.ARCHITECTURES[name].padding) else None)
    for place, name in enumerate((*hf.ROUTED, *hf.PARTLY))
]
DECODERS = dict.fromkeys(
    ("llama", "mistral", "gemma2", "gemma3", "gpt_oss", "llama4", "deepseek_v3"), "ForCausalLM"
) | {"gpt2": "LMHeadModel"} | dict.fromkeys(("t5", "bart", "whisper"), "ForConditionalGeneration")  # fmt: skip


def kept(inputs: dict[str, Tensor], output: Tensor) -> Tensor:
    """Which positions of the output are those of real tokens."""
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    return torch.ones(output.shape[:2], dtype=torch.bool) if mask is None else mask.bool()


def watched(run: Callable[[], Any]) -> tuple[Any, list[tuple[Call, Result]]]:
    """The result of `run`, and the attention calls that qkv served during it."""
    calls: list[tuple[Call, Result]] = []
    with kernels.watching(lambda call, result: calls.append((call, result))):
        return run(), calls


def close(got: Tensor, want: Tensor, tolerance: float = 2e-5) -> None:
    """Within a few roundings of float32, which layers gather; relative to the largest number."""
    assert got.shape == want.shape
    assert (got - want).abs().max() <= tolerance * max(1.0, float(want.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize(("name", "padding"), CASES)
def test_output_equals_eager_attention(name: str, padding: str | None) -> None:
    model, inputs = hf.build(name, "eager"), hf.inputs(name, padding)
    want = hf.main_output(model(**inputs))
    outputs, calls = watched(lambda: use(model)(**inputs))
    got, real = hf.main_output(outputs), kept(inputs, want)
    close(got[real], want[real])
    assert len(calls) == sum(hf.ARCHITECTURES[name].groups.values())
    model.set_attn_implementation("eager")
    assert torch.equal(hf.main_output(model(**inputs)), want)


def loss_gradients(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    output = hf.main_output(model(**inputs))
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(output.shape, generator=generator) * kept(inputs, output)[..., None]
    (output * weight).sum().backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


GRADIENTS = ("gpt2", "llama", "qwen2", "gemma2", "gpt_oss", "deepseek_v3", "bert", "bart", "t5", "beit")


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_equal_eager_attention(name: str) -> None:
    """Also that of a learned bias in the mask (of BEiT) which is zero."""
    model, inputs = hf.build(name, "eager"), hf.inputs(name, "left")
    tables = [key for key in model.state_dict() if "relative_position_bias_table" in key]
    for key in tables:
        model.get_parameter(key).data.zero_()
    want = loss_gradients(model, inputs)
    got = loss_gradients(use(model), inputs)
    assert set(got) == set(want)
    for parameter, gradient in want.items():
        close(got[parameter], gradient, 1e-4)
    assert any(gradient.abs().max() > 1 for gradient in want.values())
    assert len(tables) == 2 * (name == "beit")
    assert all(want[key].abs().max() > 0.01 for key in tables)


def test_checkpointed_layers_repeat_their_dropout() -> None:
    rates = {"attention_probs_dropout_prob": 0.5, "hidden_dropout_prob": 0.0}
    model, inputs = use(hf.build("bert", **rates)).train(), hf.inputs("bert", "right")
    torch.manual_seed(7)
    want = loss_gradients(model, inputs)
    model.activation_checkpointing_enable()
    torch.manual_seed(7)
    for name, gradient in loss_gradients(model, inputs).items():
        close(gradient, want[name])


@pytest.mark.parametrize(
    ("name", "autocast"), [("llama", True), ("gemma2", True), ("t5", True), ("gpt_oss", False), ("t5", False)]
)
def test_half_precision_is_as_exact_as_eager_attention(name: str, autocast: bool) -> None:
    model, inputs = hf.build(name, "eager"), hf.inputs(name)
    with torch.no_grad():
        exact = hf.main_output(model(**inputs))
    if not autocast:
        model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        theirs = hf.main_output(model(**inputs))
        ours, calls = watched(lambda: hf.main_output(use(model)(**inputs)))
    assert {call.v.dtype for call, _ in calls} == {torch.bfloat16}
    assert ours.dtype == theirs.dtype
    assert (ours - exact).norm() < 1.2 * (theirs - exact).norm()
    ours.float().sum().backward()


@torch.no_grad()
@pytest.mark.slow
def test_compiled_model_computes_the_same() -> None:
    model, inputs = use(hf.build("llama", num_hidden_layers=1)), hf.inputs("llama", "left")
    want = hf.main_output(model(**inputs))
    model.layers[0].self_attn.compile(backend="eager")
    got = hf.main_output(model(**inputs))
    close(got[kept(inputs, want)], want[kept(inputs, want)])


@torch.no_grad()
@pytest.mark.parametrize("name", ["t5", "gpt_oss", "gpt2"])
def test_output_attentions_equal_eager_attention(name: str) -> None:
    model, inputs = hf.build(name, "eager"), hf.inputs(name)
    want = model(**inputs, output_attentions=True)
    got = use(model)(**inputs, output_attentions=True)
    keys = [key for key in want if key.endswith("attentions")]
    assert keys == [key for key in got if key.endswith("attentions")] != []
    for ours, theirs in ((x, y) for key in keys for x, y in zip(got[key], want[key], strict=True)):
        close(ours, theirs)


@torch.no_grad()
def test_dropout_is_applied_only_in_training() -> None:
    rates = {"attention_probs_dropout_prob": 0.3, "hidden_dropout_prob": 0.0}
    model, inputs = use(hf.build("bert", **rates)), hf.inputs("bert", "right")

    def run() -> Tensor:
        return hf.main_output(model(**inputs))

    still = run()
    assert torch.equal(run(), still)
    model.train()
    assert not torch.allclose(run(), still, atol=0.01)
    torch.manual_seed(1)
    first = run()
    torch.manual_seed(1)
    assert torch.equal(run(), first)
    _, calls = watched(run)
    assert {call.dropout_p for call, _ in calls} == {0.3}
    none = use(hf.build("t5", dropout_rate=0.0)).train()
    assert torch.equal(hf.main_output(none(**hf.inputs("t5"))), hf.main_output(none.eval()(**hf.inputs("t5"))))


@torch.no_grad()
def generated(model: Any, name: str, length: int, padded: bool, **settings: Any) -> tuple[Tensor, Tensor]:
    """The tokens, and the scores that each was chosen by."""
    inputs = hf.inputs(name, "left" if padded else None)
    given = {key: x[:, :length] for key, x in inputs.items() if not key.startswith("decoder_")}
    if name == "whisper":
        given = {"input_features": inputs["input_features"], "decoder_input_ids": inputs["decoder_input_ids"][:, :5]}
    elif not padded:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    # No end token: random weights would say it at random
    plan = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plan |= {"use_cache": True, "return_dict_in_generate": True, "output_scores": True}
    config = transformers.GenerationConfig(**plan | settings)
    config.decoder_start_token_id = getattr(model.config, "decoder_start_token_id", None)
    model.generation_config = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0)
    found = model.generate(**given, generation_config=config)
    return found.sequences, torch.stack(found.scores)


SEARCHES: dict[str, dict[str, Any]] = {
    "greedy, growing cache": {},
    "greedy, static cache": {"cache_implementation": "static"},
    "beams, growing cache": {"num_beams": 3},
    "beams, static cache": {"num_beams": 3, "cache_implementation": "static"},
    "greedy, no cache": {"use_cache": False},
}
SEARCHED = [(name, [*SEARCHES][place % 4]) for place, name in enumerate(DECODERS)]
SEARCHED += [("t5", "beams, static cache"), ("gpt_oss", "greedy, no cache")]


@pytest.mark.parametrize(("name", "search"), SEARCHED)
def test_generation_gives_the_same_tokens(name: str, search: str) -> None:
    """A prompt shorter than the window, left-padded, that grows beyond it; and one that is longer from the start."""
    # A cache of T5 has as many layers as the encoder, and room for none of a longer decoder
    settings = {"num_decoder_layers": 2} if name == "t5" else {}
    model = hf.build(name, "eager", suffix=DECODERS[name], **settings)
    for length, padded, new in ((hf.PADDED + 2, name not in ("whisper", "llama4"), 7), (hf.LENGTH, False, 3)):
        model.set_attn_implementation("eager")
        asked = {"max_new_tokens": new, **SEARCHES[search]}
        tokens, scores = generated(model, name, length, padded, **asked)
        got, calls = watched(lambda: generated(use(model), name, length, padded, **asked))  # noqa: B023
        assert torch.equal(got[0], tokens)
        torch.testing.assert_close(got[1], scores, rtol=1e-4, atol=1e-4)
        assert len(calls) > new


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "cache"), [("llama", "static"), ("mistral", "growing"), ("mistral", "static"), ("gpt_oss", "growing")]
)
def test_chunked_prefill_equals_one_forward(name: str, cache: str) -> None:
    """Several queries at once on a cache that holds keys already: neither prefill nor one token of decoding."""
    model, inputs = hf.build(name, "eager"), hf.inputs(name)
    want = hf.main_output(model(**inputs))
    use(model)
    kind, size = {
        "static": (transformers.StaticCache, {"max_cache_len": 50}), "growing": (transformers.DynamicCache, {}),
    }[cache]  # fmt: skip
    held = kind(config=model.config, **size)
    pieces = [
        hf.main_output(model(input_ids=piece, past_key_values=held, use_cache=True))
        for piece in inputs["input_ids"].split([5, 11, 1, 20], dim=1)
    ]
    close(torch.cat(pieces, 1), want)


@torch.no_grad()
def test_unused_slots_of_a_static_cache_are_left_out() -> None:
    model, ids = use(hf.build("llama")), hf.inputs("llama")["input_ids"]
    held = transformers.StaticCache(config=model.config, max_cache_len=1000)
    _, calls = watched(lambda: [model(input_ids=x, past_key_values=held) for x in (ids[:, :20], ids[:, 20:21])])
    assert [call.k.shape[2] for call, _ in calls] == [20, 20, 21, 21]
    assert all(call.mask is not None and call.mask.band == (0, float("inf")) for call, _ in calls)


@torch.no_grad()
def test_models_inside_a_user_module_and_with_the_implementation_by_name_are_switched() -> None:
    register()
    model, inputs = hf.build("bert", "eager"), hf.inputs("bert")
    want = hf.main_output(model(**inputs))
    outer = nn.ModuleDict({"tower": model})
    assert use(outer) is outer
    other = hf.build("bert", "eager")
    other.set_attn_implementation("qkv")
    for switched in (model, other, hf.build("bert", "qkv")):
        outputs, calls = watched(lambda: switched(**inputs))  # noqa: B023
        close(hf.main_output(outputs), want)
        assert len(calls) == 2


@torch.no_grad()
def test_rejected_model_is_not_changed() -> None:
    model, inputs = hf.build("xglm"), hf.inputs("xglm", "left")
    before, implementation = hf.main_output(model(**inputs)), model.config._attn_implementation
    for match, given in (("AttentionInterface", model), ("is str", "gpt2"), ("Linear does not", nn.Linear(2, 2))):
        with refused("model", match):
            use(given)  # type: ignore[arg-type]
    assert model.config._attn_implementation == implementation
    assert torch.equal(hf.main_output(model(**inputs)), before)


def test_unknown_attention_arguments_are_rejected() -> None:
    model, inputs = use(hf.build("llama")), hf.inputs("llama")
    with refused("cu_seq_lens_q"):
        model(**inputs, cu_seq_lens_q=torch.tensor([0, 7, hf.LENGTH], dtype=torch.int32))
    model(**inputs, num_items_in_batch=torch.tensor(3), use_cache=None)  # as the Trainer does


@torch.no_grad()
def test_register_is_idempotent_and_profiling_restores_the_implementation() -> None:
    register()
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    register()
    model, inputs = hf.build("llama"), hf.inputs("llama")
    assert use(use(model)) is model
    want = hf.main_output(model(**inputs))
    with observe(Observer(model)) as observer:
        model(**inputs)
    assert len(observer.records) == 2
    assert model.config._attn_implementation == "qkv"
    assert "qkv" not in model.config.to_json_string()
    assert torch.equal(hf.main_output(model(**inputs)), want)
    assert (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping) == before
