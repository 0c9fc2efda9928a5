"""Convert GPT-2 and Llama checkpoints of Hugging Face to `DecoderLM`, with the same weights and the same logits.

Only the configuration and the safetensors files are read; transformers is not needed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv.errors import InputError
from qkv.models import tensors
from qkv.models.checkpoint import CONFIG, WEIGHTS, check_fit, fill, read_config, readable, valid_config
from qkv.models.decoder import DecoderConfig, DecoderLM

Config = Mapping[str, Any]
Weights = Mapping[str, Tensor]


def from_hugging_face(folder: str | Path) -> DecoderLM:
    """Load a folder with a GPT-2 or Llama checkpoint as a `DecoderLM`, in evaluation mode and the checkpoint's dtype.

    Raises:
        InputError: for another architecture, a setting that `DecoderLM` does not support, or weights that do not fit.
    """
    folder = Path(folder)
    config = read_config(folder)
    with readable(folder, WEIGHTS):
        names = tensors.files_of(folder, WEIGHTS)
    declared: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for name in names:
        with readable(folder, name):
            declared |= tensors.declared(folder / name)
    stored = sum((folder / name).stat().st_size for name in names)
    own, renamed = _flavour(config)
    with valid_config(folder):
        decoder = own(config)
        empty = tensors.build_without_memory(lambda: DecoderLM(decoder), len(declared), stored)
    check_fit(empty, renamed(decoder, declared))
    for name in names:
        with readable(folder, name):
            weights |= tensors.read(folder / name)
    return from_weights(config, weights)


def from_weights(config: Config, weights: Weights) -> DecoderLM:
    """Convert a configuration and a state dict: ``model.config.to_dict(), model.state_dict()``."""
    own, renamed = _flavour(config)
    model = DecoderLM(own(config))
    found = renamed(model.config, weights)
    check_fit(model, found)
    dtype = functools.reduce(torch.promote_types, {x.dtype for x in found.values()} or {torch.float32})
    fill(model, {name: x.to(dtype) for name, x in found.items()})
    return model.eval()


def _flavour(config: Config) -> tuple[Own, Renamed]:
    """The functions that convert the configuration and the weights of this kind of model."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FLAVOURS:
        raise InputError(f"model_type is {kind!r}, expected one of {', '.join(map(repr, FLAVOURS))}")
    own, renamed = FLAVOURS[kind]

    def converted(config: Config) -> DecoderConfig:
        try:
            return own(config)
        except KeyError as error:
            raise InputError(f"{CONFIG}: {error.args[0]} is missing, expected a configuration of {kind}") from error

    return converted, renamed


def _expect(config: Config, **settings: Any) -> None:
    """Raise `InputError` for settings that change the computation in a way that `DecoderLM` does not support."""
    for name, expected in settings.items():
        found = config.get(name, expected)
        if found != expected:
            raise InputError(f"{CONFIG}: {name} is {found!r}, which DecoderLM does not support, expected {expected!r}")


# --- GPT-2 (Radford et al. 2019) -------------------------------------------------------------------------------------

GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


def _gpt2(config: Config) -> DecoderConfig:
    _expect(
        config,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    activation = config.get("activation_function", "gelu_new")
    if activation not in GPT2_ACTIVATIONS:
        raise InputError(
            f"{CONFIG}: activation_function is {activation!r}, expected one of {', '.join(GPT2_ACTIVATIONS)}"
        )
    return DecoderConfig.gpt2(
        vocab_size=config["vocab_size"],
        context=config["n_positions"],
        d_model=config["n_embd"],
        layers=config["n_layer"],
        heads=config["n_head"],
        d_hidden=config.get("n_inner"),
        activation=GPT2_ACTIVATIONS[activation],
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        tied=config.get("tie_word_embeddings", True),
    )


GPT2_NAMES = {
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.in_proj",
    "attn.c_proj": "attention.out_proj",
    "ln_2": "feed_forward_norm",
    "mlp.c_fc": "feed_forward.up",
    "mlp.c_proj": "feed_forward.down",
}


def _gpt2_weights(config: DecoderConfig, weights: Weights) -> dict[str, Tensor]:
    out = {}
    for name, tensor in weights.items():
        name = name.removeprefix("transformer.")  # noqa: PLW2901
        if re.fullmatch(r"h\.\d+\.attn\.(bias|masked_bias)", name) or (name == "lm_head.weight" and config.tied):
            continue  # the causal mask as a table, and a copy of the embedding
        new = {
            "wte.weight": "embedding.weight",
            "wpe.weight": "positions.weight",
            "ln_f.weight": "norm.weight",
            "ln_f.bias": "norm.bias",
            "lm_head.weight": "output.weight",
        }.get(name, name)
        if found := re.fullmatch(r"h\.(\d+)\.(.+)\.(weight|bias)", name):
            layer, part, kind = found.groups()
            new = f"blocks.{layer}.{GPT2_NAMES.get(part, part)}.{kind}"
            if kind == "weight" and tensor.ndim == 2:
                tensor = tensor.T  # noqa: PLW2901  # GPT-2 stores its matrices transposed
        out[new] = tensor
    return out


# --- Llama (Touvron et al. 2023; Grattafiori et al. 2024) -------------------------------------------------------------


def _llama(config: Config) -> DecoderConfig:
    _expect(config, hidden_act="silu", pretraining_tp=1)
    if config.get("original_max_position_embeddings") is not None:
        raise InputError(
            f"{CONFIG}: original_max_position_embeddings is outside rope_parameters, expected it inside them"
        )
    rope = dict(config.get("rope_parameters") or {}) or dict(config.get("rope_scaling") or {})
    return DecoderConfig.llama(
        vocab_size=config["vocab_size"],
        context=config["max_position_embeddings"],
        d_model=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        d_hidden=config["intermediate_size"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        bias=bool(config.get("mlp_bias", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        tied=config.get("tie_word_embeddings", False),
        rotary_base=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        **_rope(rope, config["max_position_embeddings"]),
    )


ROPE_COMMON = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
ROPE_DEFAULTS = {"beta_fast": 32, "beta_slow": 1}  # YaRN settings that qkv fixes
ROPE_KEYS = {  # the settings of each kind of scaling, and their names in `DecoderConfig`
    "linear": {"factor": "rotary_factor"},
    "dynamic": {"factor": "rotary_factor"},  # it always starts at max_position_embeddings
    "yarn": {"factor": "rotary_factor", "original_max_position_embeddings": "rotary_original"},
    "llama3": {
        "factor": "rotary_factor",
        "original_max_position_embeddings": "rotary_original",
        "low_freq_factor": "rotary_low",
        "high_freq_factor": "rotary_high",
    },
}


def _rope(rope: Config, context: int) -> dict[str, Any]:
    """Entries of `DecoderConfig` for Hugging Face's rope_parameters."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(f"{CONFIG}: partial_rotary_factor is {rope['partial_rotary_factor']}, expected 1")
    if kind == "default":
        return {}
    if kind not in ROPE_KEYS:
        raise InputError(f"{CONFIG}: rope_type is {kind!r}, expected 'default' or one of {', '.join(ROPE_KEYS)}")
    keys = ROPE_KEYS[kind]
    known = keys.keys() | ROPE_COMMON
    unknown = [k for k, x in rope.items() if k not in known and x is not None and x != ROPE_DEFAULTS.get(k)]
    if unknown:
        raise InputError(f"{CONFIG}: rope_parameters has {', '.join(unknown)}, which DecoderLM does not support")
    settings = {new: rope[old] for old, new in keys.items() if rope.get(old) is not None}
    settings.setdefault("rotary_original", context)
    return {"rotary_scaling": kind, **settings}


LLAMA_NAMES = {
    "input_layernorm": "attention_norm",
    "self_attn.o_proj": "attention.out_proj",
    "post_attention_layernorm": "feed_forward_norm",
    "mlp.down_proj": "feed_forward.down",
}
LLAMA_JOINED = {  # several matrices of the checkpoint are concatenated to one, in this order
    "attention.in_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "feed_forward.up": ("mlp.gate_proj", "mlp.up_proj"),
}


def _llama_weights(config: DecoderConfig, weights: Weights) -> dict[str, Tensor]:
    weights = {name.removeprefix("model."): x for name, x in weights.items()}
    out = {}
    for i in range(config.layers):
        for kind in ("weight", "bias"):
            for new, parts in LLAMA_JOINED.items():
                names = [f"layers.{i}.{part}.{kind}" for part in parts]
                if all(name in weights for name in names):
                    out[f"blocks.{i}.{new}.{kind}"] = torch.cat([weights.pop(name) for name in names])
    for name, tensor in weights.items():
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied):
            continue
        new = {
            "embed_tokens.weight": "embedding.weight",
            "norm.weight": "norm.weight",
            "lm_head.weight": "output.weight",
        }.get(name, name)
        if found := re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", name):
            layer, part, kind = found.groups()
            new = f"blocks.{layer}.{LLAMA_NAMES.get(part, part)}.{kind}"
        out[new] = tensor
    return out


Own = Callable[[Config], DecoderConfig]
Renamed = Callable[[DecoderConfig, Weights], dict[str, Tensor]]
FLAVOURS: dict[str, tuple[Own, Renamed]] = {
    "gpt2": (_gpt2, _gpt2_weights),
    "llama": (_llama, _llama_weights),
}
