"""Hugging Face models on qkv's kernels compute the same as with their eager attention."""

from __future__ import annotations

import doctest
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hf_models as hf
from conftest import refused
from qkv import kernels
from qkv._engine.call import Call, Result
from qkv.huggingface import client, register, use
from qkv.huggingface.attention import routes
from qkv.huggingface.client import attend
from qkv.profiler.capture.observe import Observer, observe

MODELS = (*hf.ROUTED, *hf.PARTLY)
CASES = [
    pytest.param(name, padding, id=f"{name}-{padding or 'whole'}")
    for name in MODELS
    for padding in (None, *hf.ARCHITECTURES[name].padding)
]
DECODERS = {
    "gpt2": "LMHeadModel", "gpt_neox": "ForCausalLM", "opt": "ForCausalLM", "llama": "ForCausalLM",
    "qwen2": "ForCausalLM", "mistral": "ForCausalLM", "phi3": "ForCausalLM", "gemma2": "ForCausalLM",
    "gemma3": "ForCausalLM", "gpt_oss": "ForCausalLM", "llama4": "ForCausalLM", "deepseek_v3": "ForCausalLM",
    "t5": "ForConditionalGeneration", "bart": "ForConditionalGeneration", "whisper": "ForConditionalGeneration",
}  # fmt: skip


def main_output(outputs: Any) -> Tensor:
    return outputs["last_hidden_state"] if "last_hidden_state" in outputs else outputs["logits"]


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


# --- forward and backward -----------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(("name", "padding"), CASES)
def test_output_equals_eager_attention(name: str, padding: str | None) -> None:
    model, inputs = hf.build(name, "eager"), hf.inputs(name, padding)
    want = main_output(model(**inputs))
    outputs, calls = watched(lambda: use(model)(**inputs))
    got, real = main_output(outputs), kept(inputs, want)
    close(got[real], want[real])
    assert len(calls) == sum(hf.ARCHITECTURES[name].groups.values())
    model.set_attn_implementation("eager")
    assert torch.equal(main_output(model(**inputs)), want)


def loss_gradients(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    output = main_output(model(**inputs))
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(output.shape, generator=generator) * kept(inputs, output)[..., None]
    (output * weight).sum().backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "gemma2", "gpt_oss", "deepseek_v3", "bert", "bart", "t5"])
def test_gradients_equal_eager_attention(name: str, padding: str | None) -> None:
    model, inputs = hf.build(name, "eager"), hf.inputs(name, padding)
    want = loss_gradients(model, inputs)
    got = loss_gradients(use(model), inputs)
    assert set(got) == set(want)
    for parameter, gradient in want.items():
        close(got[parameter], gradient, 1e-4)
    assert any(gradient.abs().max() > 1 for gradient in want.values())


def test_learned_bias_in_the_mask_gets_a_gradient_at_zero() -> None:
    model, inputs = hf.build("beit", "eager"), hf.inputs("beit")
    tables = [x for name, x in model.named_parameters() if "relative_position_bias_table" in name]
    with torch.no_grad():
        for table in tables:
            table.zero_()
    want = loss_gradients(model, inputs)
    got = loss_gradients(use(model), inputs)
    assert len(tables) == 2
    for name in (n for n in want if "relative_position_bias_table" in n):
        close(got[name], want[name], 1e-4)
        assert want[name].abs().max() > 0.01


def test_checkpointed_layers_repeat_their_dropout() -> None:
    rates = {"attention_probs_dropout_prob": 0.5, "hidden_dropout_prob": 0.0}
    model, inputs = use(hf.build("bert", **rates)).train(), hf.inputs("bert", "right")
    torch.manual_seed(7)
    want = loss_gradients(model, inputs)
    model.activation_checkpointing_enable()
    torch.manual_seed(7)
    for name, gradient in loss_gradients(model, inputs).items():
        close(gradient, want[name])


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5"])
def test_autocast_equals_eager_attention(name: str) -> None:
    model, inputs = hf.build(name, "eager"), hf.inputs(name)
    with torch.no_grad():
        exact = main_output(model(**inputs))
    with torch.autocast("cpu", torch.bfloat16):
        theirs = main_output(model(**inputs))
        ours, calls = watched(lambda: main_output(use(model)(**inputs)))
    assert {call.v.dtype for call, _ in calls} == {torch.bfloat16}
    assert (ours - exact).norm() < 1.2 * (theirs - exact).norm()
    ours.float().sum().backward()


@torch.no_grad()
@pytest.mark.slow
def test_compiled_model_computes_the_same() -> None:
    model, inputs = use(hf.build("llama")), hf.inputs("llama", "left")
    want = main_output(model(**inputs))
    got = main_output(torch.compile(model, backend="eager")(**inputs))
    close(got[kept(inputs, want)], want[kept(inputs, want)])


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "t5"])
def test_half_precision_is_as_exact_as_eager_attention(name: str) -> None:
    model, inputs = hf.build(name, "eager"), hf.inputs(name)
    exact = main_output(model(**inputs))
    theirs = main_output(model.bfloat16()(**inputs))
    ours = main_output(use(model)(**inputs))
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).norm() < 1.2 * (theirs - exact).norm()


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "llama", "t5", "gpt_oss"])
def test_output_attentions_equal_eager_attention(name: str) -> None:
    model, inputs = hf.build(name, "eager"), hf.inputs(name)
    want = model(**inputs, output_attentions=True)
    got = use(model)(**inputs, output_attentions=True)
    for key in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        assert len(got.get(key) or ()) == len(want.get(key) or ())
        for ours, theirs in zip(got.get(key) or (), want.get(key) or (), strict=True):
            close(ours, theirs)


# --- dropout ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_dropout_is_applied_only_in_training() -> None:
    rates = {"attention_probs_dropout_prob": 0.3, "hidden_dropout_prob": 0.0}
    model, inputs = use(hf.build("bert", **rates)), hf.inputs("bert", "right")

    def run() -> Tensor:
        return main_output(model(**inputs))

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


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_training_without_dropout_equals_evaluation(name: str) -> None:
    none = {
        "bert": {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
        "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        "t5": {"dropout_rate": 0.0},
    }[name]
    model, inputs = use(hf.build(name, **none)), hf.inputs(name)
    still = main_output(model(**inputs))
    assert torch.equal(main_output(model.train()(**inputs)), still)


def test_dropout_keeps_the_mean() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 2, 6, 4, generator=generator) for _ in range(3))
    torch.manual_seed(0)
    still, _ = attend(nn.Identity(), q, k, v, None)
    drawn = torch.stack([attend(nn.Identity(), q, k, v, None, dropout=0.4)[0] for _ in range(400)])
    error = drawn.std(0) / 400**0.5
    assert ((drawn.mean(0) - still).abs() < 5 * error).all()
    assert (drawn[0] - still).abs().max() > 0.1


# --- generation ---------------------------------------------------------------------------------------------------


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


SEARCHES = {
    "greedy, growing cache": {},
    "greedy, static cache": {"cache_implementation": "static"},
    "beams, growing cache": {"num_beams": 3},
    "beams, static cache": {"num_beams": 3, "cache_implementation": "static"},
    "greedy, no cache": {"use_cache": False},
}


EVERYWHERE = ("greedy, growing cache", "greedy, static cache", "beams, growing cache")  # the others for three models


@pytest.mark.parametrize(
    ("name", "search"),
    [
        (name, search)
        for name in DECODERS
        for search in SEARCHES
        if search in EVERYWHERE or name in ("llama", "t5", "gpt_oss")
    ],
)
def test_generation_gives_the_same_tokens(name: str, search: str) -> None:
    """A prompt shorter than the window, left-padded, that grows beyond it; and one that is longer from the start."""
    # A cache of T5 has as many layers as the encoder, and room for none of a longer decoder
    settings = {"num_decoder_layers": 2} if name == "t5" else {}
    model = hf.build(name, "eager", suffix=DECODERS[name], **settings)
    for length, padded in ((hf.PADDED + 2, name not in ("whisper", "llama4")), (hf.LENGTH, False)):
        model.set_attn_implementation("eager")
        tokens, scores = generated(model, name, length, padded, **SEARCHES[search])
        got, calls = watched(lambda: generated(use(model), name, length, padded, **SEARCHES[search]))  # noqa: B023
        assert torch.equal(got[0], tokens)
        torch.testing.assert_close(got[1], scores, rtol=1e-4, atol=1e-4)
        assert len(calls) > 12


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
@pytest.mark.parametrize("cache", ["growing", "static"])
def test_chunked_prefill_equals_one_forward(name: str, cache: str) -> None:
    """Several queries at once on a cache that holds keys already: neither prefill nor one token of decoding."""
    model, inputs = hf.build(name, "eager"), hf.inputs(name)
    want = main_output(model(**inputs))
    use(model)
    if cache == "static":
        held: Any = transformers.StaticCache(config=model.config, max_cache_len=50)
    else:
        held = transformers.DynamicCache(config=model.config)
    pieces = [
        main_output(model(input_ids=piece, past_key_values=held, use_cache=True))
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


# --- what reaches us, and what does not ---------------------------------------------------------------------------


@torch.no_grad()
def test_copies_of_the_configuration_are_switched() -> None:
    """ViT-MAE's decoder has a copy that `set_attn_implementation` does not reach."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    sizes = {f"decoder_{name}": hf.SIZES[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    given = {name: x for name, x in (hf.SIZES | sizes).items() if "vocab" not in name and "position" not in name}
    config = ViTMAEConfig(**given, decoder_num_hidden_layers=3, image_size=24, patch_size=4)
    model = ViTMAEForPreTraining(config).eval()
    hf.enliven(model)
    noise = torch.rand(2, 36, generator=torch.Generator().manual_seed(4))
    inputs = hf.inputs("vit") | {"noise": noise}
    model.set_attn_implementation("eager")
    want = model(**inputs).logits
    outputs, calls = watched(lambda: use(model)(**inputs))
    close(outputs.logits, want)
    assert len(calls) == 5
    assert {m.config._attn_implementation for m in model.modules() if routes(m)} == {"qkv"}


@torch.no_grad()
def test_models_inside_a_user_module_are_switched() -> None:
    model, inputs = hf.build("bert", "eager"), hf.inputs("bert")
    want = main_output(model(**inputs))
    outer = nn.ModuleDict({"tower": model})
    assert use(outer) is outer
    outputs, calls = watched(lambda: model(**inputs))
    close(main_output(outputs), want)
    assert len(calls) == 2


@torch.no_grad()
def test_set_attn_implementation_does_the_same() -> None:
    register()
    for name in ("llama", "gpt_oss", "t5"):
        model, inputs = hf.build(name, "eager"), hf.inputs(name, "left")
        want = main_output(model(**inputs))
        model.set_attn_implementation("qkv")
        outputs, calls = watched(lambda: model(**inputs))  # noqa: B023
        real = kept(inputs, want)
        close(main_output(outputs)[real], want[real])
        assert len(calls) == sum(hf.ARCHITECTURES[name].groups.values())
    model, calls = hf.build("llama", "qkv"), []
    _, calls = watched(lambda: model(**hf.inputs("llama")))
    assert len(calls) == 2


@torch.no_grad()
@pytest.mark.parametrize("name", hf.UNROUTED)
def test_unrouted_model_is_rejected_and_not_changed(name: str) -> None:
    model, inputs = hf.build(name), hf.inputs(name, "left")
    before, implementation = main_output(model(**inputs)), model.config._attn_implementation
    with refused("model", match="AttentionInterface"):
        use(model)
    assert model.config._attn_implementation == implementation
    assert torch.equal(main_output(model(**inputs)), before)


def test_use_rejects_other_objects() -> None:
    not_a_model: Any = "gpt2"
    with refused("model", match="is str"):
        use(not_a_model)
    with refused("model", match="Linear does not"):
        use(nn.Linear(2, 2))


def test_unknown_attention_arguments_are_rejected() -> None:
    model, inputs = use(hf.build("llama")), hf.inputs("llama")
    where = torch.tensor([0, 7, hf.LENGTH], dtype=torch.int32)
    with refused("cu_seq_lens_q"):
        model(**inputs, cu_seq_lens_q=where)
    model(**inputs, num_items_in_batch=torch.tensor(3), use_cache=None)  # as the Trainer does


@torch.no_grad()
def test_profiling_restores_the_implementation() -> None:
    model, inputs = use(hf.build("llama")), hf.inputs("llama")
    want = main_output(model(**inputs))
    with observe(Observer(model)) as observer:
        model(**inputs)
    assert len(observer.records) == 2
    assert model.config._attn_implementation == "qkv"
    assert torch.equal(main_output(model(**inputs)), want)


# --- registering --------------------------------------------------------------------------------------------------


def test_register_is_idempotent() -> None:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    register()
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    register()
    model = hf.build("llama")
    assert use(use(model)) is model
    assert (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping) == before


def test_saved_configuration_does_not_mention_qkv() -> None:
    assert "qkv" not in use(hf.build("llama")).config.to_json_string()


def test_example_runs() -> None:
    assert doctest.testmod(client) == (0, 4)


def python(code: str) -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_import_neither_loads_transformers_nor_registers() -> None:
    python("""
import sys, qkv.huggingface
assert callable(qkv.huggingface.use)
assert "transformers" not in sys.modules, "transformers is loaded"
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
def names():
    return set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)
attention, masks = names()
assert "qkv" not in attention | masks, "registered by import"
qkv.huggingface.register()
assert names() == (attention | {"qkv"}, masks | {"qkv"})
""")
