"""Convert GPT-2 and Llama models of Hugging Face to `DecoderLM`, with the same weights and the same logits."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qkv.cache import Evicting
from qkv.errors import InputError, one_of
from qkv.models.checkpoint import CONFIG, Weights, fill
from qkv.models.decoder import DecoderConfig, DecoderLM, rotary_of

Config = Mapping[str, Any]


def from_weights(config: Config, weights: Weights) -> DecoderLM:
    """Convert a configuration and a state dict: ``model.config.to_dict(), model.state_dict()``."""
    model = DecoderLM(_decoder(config))
    fill(model, _renamed(model.config, weights))
    return model.eval()


def _decoder(config: Config) -> DecoderConfig:
    """The configuration of the same model as a `DecoderLM`."""
    one_of("model_type", config.get("model_type"), tuple(KINDS))
    return KINDS[config["model_type"]](config)


ROTATE_AS_LLAMA = ("mistral", "qwen2", "qwen2_moe", "qwen3")
"""Architectures, by Hugging Face's ``model_type``, that rotate queries as Llama does, whatever else differs."""


def tell_rotary(model: nn.Module, caches: Iterable[Evicting]) -> None:
    """Tell the caches whose policy needs queries as they were before rotation how the model rotates them.

    Raises:
        InputError: for a model that is neither one of qkv nor GPT-2, Llama or one that rotates as Llama does.
    """
    for cache in (one for one in caches if "queries" in one.needs):
        config: Any = getattr(model, "config", None)
        try:
            if not isinstance(model, DecoderLM):
                given = config.to_dict()
                config = _llama(given) if given["model_type"] in ROTATE_AS_LLAMA else _decoder(given)
            cache.rotary = rotary_of(config)
        except InputError as error:
            raise InputError(
                f"policies has {cache.name!r}, but how {type(model).__name__} rotates queries is not known: {error}"
            ) from error


NAMES = {
    # GPT-2: of the whole model, then of a block
    "wte": "embedding", "wpe": "positions", "ln_f": "norm", "lm_head": "output", "ln_1": "attention_norm",
    "attn.c_attn": "attention.in_proj", "attn.c_proj": "attention.out_proj", "ln_2": "feed_forward_norm",
    "mlp.c_fc": "feed_forward.up", "mlp.c_proj": "feed_forward.down",
    # Llama, in which some tensors of ours are parts, in the order of its modules
    "embed_tokens": "embedding", "input_layernorm": "attention_norm", "self_attn.o_proj": "attention.out_proj",
    "post_attention_layernorm": "feed_forward_norm", "mlp.down_proj": "feed_forward.down",
    "self_attn.q_proj": "attention.in_proj", "self_attn.k_proj": "attention.in_proj",
    "self_attn.v_proj": "attention.in_proj", "mlp.gate_proj": "feed_forward.up", "mlp.up_proj": "feed_forward.up",
}  # fmt: skip
"""Modules of the checkpoints, and their names in `DecoderLM`."""


def _renamed(config: DecoderConfig, weights: Weights) -> dict[str, Tensor]:
    """The tensors of a state dict under their names in `DecoderLM`, in the widest of their dtypes."""
    dtype = functools.reduce(torch.promote_types, {x.dtype for x in weights.values()} or {torch.float32})
    parts: dict[str, list[Tensor]] = {}
    for full, tensor in weights.items():
        name = re.sub(r"^(transformer|model)\.", "", full)
        if name == "lm_head.weight" and config.tied:
            continue
        place = re.fullmatch(r"(?:(h|layers)\.(\d+)\.)?(?:(.+)\.)?([^.]+)", name)
        assert place is not None
        stack, layer, module, end = place.groups()
        x = tensor.T if stack == "h" and end == "weight" and tensor.ndim == 2 else tensor  # GPT-2 has them transposed
        new = [*((f"blocks.{layer}",) if stack else ()), *((NAMES.get(module, module),) if module else ()), end]
        parts.setdefault(".".join(new), []).append(x.to(dtype))
    return {name: torch.cat(found) for name, found in parts.items()}


def _expect(config: Config, **settings: Any) -> None:
    """Raise `InputError` for settings that change the computation in a way that `DecoderLM` does not support."""
    for name, expected in settings.items():
        found = config.get(name, expected)
        if found != expected:
            raise InputError(f"{CONFIG}: {name} is {found!r}, which DecoderLM does not support, expected {expected!r}")


GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


def _gpt2(config: Config) -> DecoderConfig:
    """GPT-2 (Radford et al. 2019)."""
    _expect(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    activation = config["activation_function"]
    one_of(f"{CONFIG}: activation_function", activation, tuple(GPT2_ACTIVATIONS))
    return DecoderConfig.gpt2(
        vocab_size=config["vocab_size"], context=config["n_positions"], d_model=config["n_embd"],
        layers=config["n_layer"], heads=config["n_head"], d_hidden=config["n_inner"],
        activation=GPT2_ACTIVATIONS[activation], norm_eps=config["layer_norm_epsilon"],
        tied=config["tie_word_embeddings"],
    )  # fmt: skip


def _llama(config: Config) -> DecoderConfig:
    """Llama (Touvron et al. 2023; Grattafiori et al. 2024)."""
    _expect(config, hidden_act="silu", pretraining_tp=1, original_max_position_embeddings=None)
    rope, context = config["rope_parameters"], config["max_position_embeddings"]
    return DecoderConfig.llama(
        vocab_size=config["vocab_size"], context=context, d_model=config["hidden_size"],
        layers=config["num_hidden_layers"], heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"], head_dim=config.get("head_dim"),
        d_hidden=config["intermediate_size"], norm_eps=config["rms_norm_eps"], tied=config["tie_word_embeddings"],
        bias=bool(config.get("mlp_bias")), attention_bias=bool(config.get("attention_bias")),
        rotary_base=float(rope["rope_theta"]), **_rope(rope, context),
    )  # fmt: skip


ROPE_KEYS = {
    "factor": "rotary_factor", "original_max_position_embeddings": "rotary_original", "low_freq_factor": "rotary_low",
    "high_freq_factor": "rotary_high",
}  # fmt: skip
ROPE_KINDS = {"linear": 1, "dynamic": 1, "yarn": 2, "llama3": 4}
"""How many of `ROPE_KEYS` each kind of scaling has; the dynamic one always starts at max_position_embeddings."""
ROPE_FIXED = {"partial_rotary_factor": 1.0, "beta_fast": 32, "beta_slow": 1}
"""Settings of which qkv has one value."""


def _rope(rope: Config, context: int) -> dict[str, Any]:
    """Entries of `DecoderConfig` for the rope_parameters of transformers."""
    _expect(rope, **ROPE_FIXED)
    kind, left = rope["rope_type"], {k: x for k, x in rope.items() if x is not None and k not in ROPE_FIXED}
    one_of(f"{CONFIG}: rope_type", kind, ("default", *ROPE_KINDS))
    if kind == "default":
        return {}
    keys = dict([*ROPE_KEYS.items()][: ROPE_KINDS[kind]])
    if unknown := left.keys() - keys.keys() - {"rope_theta", "rope_type"}:
        raise InputError(f"{CONFIG}: rope_parameters has {', '.join(unknown)}, which DecoderLM does not support")
    settings = {new: left[old] for old, new in keys.items() if old in left}
    return {"rotary_scaling": kind, "rotary_original": context, **settings}


KINDS = {"gpt2": _gpt2, "llama": _llama}  # by Hugging Face's ``model_type``
