"""Tiny models with random weights, one for each way Hugging Face models attend: no downloads, milliseconds a run.

`build("llama")` is the bare model, its weights large enough that attention is far from uniform; `inputs` is what its
forward takes. Sizes differ wherever the architecture lets them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

LENGTH, TARGET = 37, 23  # tokens of a text, and of a decoder's text
VOCABULARY = 97
WINDOW = 8
PADDED = 5  # tokens of padding in the second item of a padded batch

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
HEADS = GROUPED | {"head_dim": 16}
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
STACKS = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 72,
    "decoder_start_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 3}


@dataclass(frozen=True)
class Architecture:
    """How to build a model: names of its classes, settings of its configuration, and kind of input."""

    family: str  # folder in transformers.models
    classes: str  # prefix of the classes "…Config" and "…Model"
    settings: Mapping[str, Any]
    kind: str = "decoder"  # decoder, encoder, encoder-decoder, image, audio
    suffix: str = "Model"
    padding: tuple[str, ...] = ("left", "right")
    groups: Mapping[str, int] = field(default_factory=lambda: {"self": 2})  # attention layers in each


ARCHITECTURES = {
    "gpt2": Architecture(
        "gpt2",
        "GPT2",
        {
            "vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 4,
            "bos_token_id": None, "eos_token_id": None,
        },
        groups={"self": 3},
    ),
    "gpt_neox": Architecture("gpt_neox", "GPTNeoX", SIZES | {"bos_token_id": None, "eos_token_id": None}),
    "llama": Architecture("llama", "Llama", GROUPED),
    "qwen3": Architecture("qwen3", "Qwen3", HEADS | {"head_dim": 24}),
    "mistral": Architecture("mistral", "Mistral", GROUPED | {"sliding_window": WINDOW}),
    "starcoder2": Architecture("starcoder2", "Starcoder2", GROUPED | {"sliding_window": WINDOW}),
    "qwen2": Architecture("qwen2", "Qwen2", GROUPED | WINDOWS | {"use_sliding_window": True}),
    "qwen2_moe": Architecture(  # without windows it makes a mask that nothing uses, of a window of 0 keys
        "qwen2_moe",
        "Qwen2Moe",
        GROUPED
        | {
            "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "phi3": Architecture("phi3", "Phi3", GROUPED | {"sliding_window": WINDOW}),
    "opt": Architecture(
        "opt",
        "OPT",
        {
            "vocab_size": VOCABULARY, "hidden_size": 64, "ffn_dim": 80, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 64, "pad_token_id": 1,
            "bos_token_id": None, "eos_token_id": None,
        },
    ),
    "gemma2": Architecture(
        "gemma2", "Gemma2", HEADS | WINDOWS | {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 12}
    ),
    "gemma3": Architecture(
        "gemma3", "Gemma3Text", HEADS | WINDOWS | {"query_pre_attn_scalar": 12}, suffix="Model"
    ),
    "gpt_oss": Architecture("gpt_oss", "GptOss", HEADS | WINDOWS | EXPERTS),
    "deepseek_v3": Architecture(
        "deepseek_v3",
        "DeepseekV3",
        GROUPED
        | {
            "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12, "v_head_dim": 14, "first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 2,
            "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        },
    ),
    "llama4": Architecture(
        "llama4",
        "Llama4Text",
        HEADS
        | {
            "num_hidden_layers": 4, "attention_chunk_size": 11, "intermediate_size_mlp": 72, "num_local_experts": 3,
            "num_experts_per_tok": 1,
        },
        groups={"self": 4},
    ),
    "bert": Architecture("bert", "Bert", SIZES, "encoder"),
    "distilbert": Architecture(
        "distilbert",
        "DistilBert",
        {
            "vocab_size": VOCABULARY, "dim": 64, "hidden_dim": 80, "n_layers": 2, "n_heads": 4,
            "max_position_embeddings": 64,
        },
        "encoder",
    ),
    "roberta": Architecture("roberta", "Roberta", SIZES, "encoder"),
    "albert": Architecture(
        "albert", "Albert", SIZES | {"num_hidden_layers": 3, "embedding_size": 24}, "encoder", groups={"self": 3}
    ),
    "modernbert": Architecture(
        "modernbert",
        "ModernBert",
        SIZES
        | {
            "num_hidden_layers": 4, "local_attention": 10, "global_attn_every_n_layers": 3, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
        },
        "encoder",
        groups={"self": 4},
    ),
    "bart": Architecture(
        "bart",
        "Bart",
        STACKS | {"max_position_embeddings": 64},
        "encoder-decoder",
        groups={"encoder": 2, "decoder": 3, "cross": 3},
    ),
    "t5": Architecture(
        "t5",
        "T5",
        {
            "vocab_size": VOCABULARY, "d_model": 64, "d_kv": 12, "d_ff": 80, "num_layers": 2, "num_decoder_layers": 3,
            "num_heads": 4, "relative_attention_num_buckets": 12, "relative_attention_max_distance": 20,
            "decoder_start_token_id": 0,
        },
        "encoder-decoder",
        groups={"encoder": 2, "decoder": 3, "cross": 3},
    ),
    "whisper": Architecture(
        "whisper",
        "Whisper",
        STACKS | {"num_mel_bins": 16, "max_source_positions": LENGTH, "max_target_positions": 32, "pad_token_id": 0},
        "audio",
        padding=(),
        groups={"encoder": 2, "decoder": 3, "cross": 3},
    ),
    "vit": Architecture("vit", "ViT", SIZES | {"image_size": 24, "patch_size": 4}, "image", padding=()),
    "clip_text": Architecture(
        "clip", "CLIPText", SIZES | {"eos_token_id": VOCABULARY - 1, "projection_dim": 24}, padding=("right",)
    ),
    # These models build their masks themselves, or add to the mask before attention.
    "layoutlm": Architecture("layoutlm", "LayoutLM", SIZES, "encoder"),
    "doge": Architecture("doge", "Doge", GROUPED),
    "beit": Architecture(
        "beit",
        "Beit",
        SIZES | {"image_size": 24, "patch_size": 4, "use_relative_position_bias": True},
        "image",
        padding=(),
    ),
    "switch": Architecture(
        "switch_transformers",
        "SwitchTransformers",
        {
            "vocab_size": VOCABULARY, "d_model": 64, "d_kv": 12, "d_ff": 80, "num_layers": 2, "num_decoder_layers": 3,
            "num_heads": 4, "num_experts": 3, "decoder_start_token_id": 0,
        },
        "encoder-decoder",
        groups={"encoder": 2, "decoder": 3, "cross": 3},
    ),
    "siglip_vision": Architecture(
        "siglip", "SiglipVision", SIZES | {"image_size": 24, "patch_size": 4}, "image", padding=()
    ),
    "gptj": Architecture(
        "gptj",
        "GPTJ",
        {
            "vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8,
            "bos_token_id": None, "eos_token_id": None,
        },
    ),
    "bloom": Architecture("bloom", "Bloom", {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "xglm": Architecture(
        "xglm",
        "XGLM",
        {
            "vocab_size": VOCABULARY, "d_model": 64, "ffn_dim": 80, "num_layers": 2, "attention_heads": 4,
            "max_position_embeddings": 64,
        },
    ),
}  # fmt: skip
PARTLY = {"siglip_vision": "head.attention"}  # has attention that does not pass through the interface
UNROUTED = ("gptj", "bloom", "xglm")  # none of their attention passes through the interface
ROUTED = tuple(name for name in ARCHITECTURES if name not in (*PARTLY, *UNROUTED))


def build(name: str, implementation: str | None = None, *, suffix: str | None = None, **settings: Any) -> Any:
    """The model, in evaluation mode; the same weights whenever it is built with the same sizes.

    Args:
        name: one of `ARCHITECTURES`.
        implementation: of attention, such as "eager"; the architecture's own default if None.
        suffix: which model of the family, such as "ForCausalLM"; the bare one if None.
        settings: what to change in the configuration.
    """
    what = ARCHITECTURES[name]
    package = f"transformers.models.{what.family}"
    configuration = importlib.import_module(f"{package}.configuration_{what.family}")
    modeling = importlib.import_module(f"{package}.modeling_{what.family}")
    if implementation is not None:
        settings["attn_implementation"] = implementation
    transformers.utils.logging.set_verbosity_error()  # advice on token ids that these configurations do not have
    config = getattr(configuration, what.classes + "Config")(**what.settings | settings)
    plain = suffix not in (None, "Model") and name in ("llama4", "gemma3")  # with a head they are called without Text
    stem = what.classes.removesuffix("Text") if plain else what.classes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(modeling, stem + (suffix or what.suffix))(config)
    enliven(model)
    return model.eval()


def enliven(model: nn.Module, seed: int = 3) -> None:
    """Random weights so large that heads prefer some keys, biases and norms that differ, sinks that take a share."""
    generator = torch.Generator().manual_seed(seed)

    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}

    def normal(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator)

    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.ndim == 1:
                x.add_(normal(x.shape), alpha=1.0 if name.endswith("sinks") else 0.1)
            elif id(x) in embeddings:
                x.copy_(normal(x.shape))
            else:  # a fan-in of about 64 everywhere; T5 does not divide its scores by √d, so its queries are smaller
                x.copy_(normal(x.shape) * (0.06 if name.endswith(".q.weight") else 0.2))


def inputs(name: str, padding: str | None = None, *, batch: int = 2, seed: int = 5) -> dict[str, Tensor]:
    """The arguments of the forward; `padding` on the "left" or "right" of the last item's texts."""
    kind = ARCHITECTURES[name].kind
    generator = torch.Generator().manual_seed(seed)
    if kind == "image":
        return {"pixel_values": torch.randn(batch, 3, 24, 24, generator=generator)}
    text = torch.randint(3, VOCABULARY - 1, (batch, LENGTH), generator=generator)
    target = torch.randint(3, VOCABULARY - 1, (batch, TARGET), generator=generator)
    if kind == "audio":
        sound = torch.randn(batch, 16, 2 * LENGTH, generator=generator)
        return {"input_features": sound, "decoder_input_ids": target}
    given = {"input_ids": text}
    if kind == "encoder-decoder":
        given["decoder_input_ids"] = target
    if padding is not None:
        for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
            if ids in given:
                given[mask] = torch.ones_like(given[ids])
                pad = slice(None, PADDED) if padding == "left" else slice(-PADDED, None)
                given[mask][-1, pad] = 0
                given[ids][-1, pad] = 0
    return given
