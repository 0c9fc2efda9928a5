"""Convert GPT-2 and Llama checkpoints of Hugging Face to `DecoderLM`, with the same weights and the same logits.

Only the configuration and the safetensors files are read; transformers is not needed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv.errors import InputError
from qkv.models import tensors
from qkv.models.checkpoint import CONFIG, WEIGHTS, Weights, fill, read_config, read_model, readable, valid_config
from qkv.models.decoder import DecoderConfig, DecoderLM

Config = Mapping[str, Any]


def from_hugging_face(folder: str | Path) -> DecoderLM:
    """Load a folder with a GPT-2 or Llama checkpoint as a `DecoderLM`, in evaluation mode and the checkpoint's dtype.

    Raises:
        InputError: for another architecture, a setting that `DecoderLM` does not support, or weights that do not fit.
    """
    folder = Path(folder)
    config = read_config(folder)
    with readable(folder, WEIGHTS):
        files = tensors.files_of(folder, WEIGHTS)
    with valid_config(folder):
        decoder = _decoder(config)
    renamed = functools.partial(_renamed, _kind(config), decoder)
    return read_model(folder, files, lambda: DecoderLM(decoder), renamed)


def from_weights(config: Config, weights: Weights) -> DecoderLM:
    """Convert a configuration and a state dict: ``model.config.to_dict(), model.state_dict()``."""
    model = DecoderLM(_decoder(config))
    fill(model, _renamed(_kind(config), model.config, weights))
    return model.eval()


@dataclass(frozen=True)
class Kind:
    """How `DecoderLM` reads the checkpoints of one architecture."""

    config: Callable[[Config], DecoderConfig]
    prefix: str  # what the names of tensors may begin with
    block: str  # what the names of a block's tensors begin with, after the prefix; the block's number follows
    unused: str  # pattern of tensors that are not weights
    names: Mapping[str, str]  # modules, in a block and outside of blocks, and their names in `DecoderLM`
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules of a block whose tensor is a concatenation of several of the checkpoint, in this order."""
    transposed: bool = False  # True if the matrices of blocks are stored transposed


def _kind(config: Config) -> Kind:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(f"model_type is {kind!r}, expected one of {', '.join(map(repr, KINDS))}")
    return KINDS[kind]


def _decoder(config: Config) -> DecoderConfig:
    """The configuration of the same model as a `DecoderLM`."""
    kind = _kind(config)
    try:
        return kind.config(config)
    except KeyError as error:
        missing = f"{error.args[0]} is missing, expected a configuration of {config['model_type']}"
        raise InputError(f"{CONFIG}: {missing}") from error


def _renamed(kind: Kind, config: DecoderConfig, weights: Weights) -> dict[str, Tensor]:
    """The tensors of a checkpoint under their names in `DecoderLM`, in the widest of their dtypes."""
    weights = {name.removeprefix(kind.prefix): x for name, x in weights.items()}
    out = {}
    for i in range(config.layers):
        for new, parts in kind.joined.items():
            for end in ("weight", "bias"):
                names = [f"{kind.block}.{i}.{part}.{end}" for part in parts]
                if all(name in weights for name in names):
                    out[f"blocks.{i}.{new}.{end}"] = torch.cat([weights.pop(name) for name in names])
    for name, tensor in weights.items():
        if re.fullmatch(kind.unused, name) or (name == "lm_head.weight" and config.tied):
            continue  # such as the causal mask as a table, and a copy of the embedding
        if found := re.fullmatch(rf"{kind.block}\.(\d+)\.(.+)\.(weight|bias)", name):
            layer, part, end = found.groups()
            turned = kind.transposed and end == "weight" and tensor.ndim == 2
            out[f"blocks.{layer}.{kind.names.get(part, part)}.{end}"] = tensor.T if turned else tensor
        else:
            part, dot, end = name.rpartition(".")
            out[kind.names.get(part, part) + dot + end] = tensor
    dtypes = {x.dtype for x in out.values() if x.is_floating_point()}
    dtype = functools.reduce(torch.promote_types, dtypes or {torch.float32})
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in out.items()}


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
    activation = config.get("activation_function", "gelu_new")
    if activation not in GPT2_ACTIVATIONS:
        known = ", ".join(GPT2_ACTIVATIONS)
        raise InputError(f"{CONFIG}: activation_function is {activation!r}, expected one of {known}")
    return DecoderConfig.gpt2(
        vocab_size=config["vocab_size"], context=config["n_positions"], d_model=config["n_embd"],
        layers=config["n_layer"], heads=config["n_head"], d_hidden=config.get("n_inner"),
        activation=GPT2_ACTIVATIONS[activation], norm_eps=config.get("layer_norm_epsilon", 1e-5),
        tied=config.get("tie_word_embeddings", True),
    )  # fmt: skip


def _llama(config: Config) -> DecoderConfig:
    """Llama (Touvron et al. 2023; Grattafiori et al. 2024)."""
    _expect(config, hidden_act="silu", pretraining_tp=1)
    if config.get("original_max_position_embeddings") is not None:
        raise InputError(
            f"{CONFIG}: original_max_position_embeddings is outside rope_parameters, expected it inside them"
        )
    rope = dict(config.get("rope_parameters") or {}) or dict(config.get("rope_scaling") or {})
    return DecoderConfig.llama(
        vocab_size=config["vocab_size"], context=config["max_position_embeddings"], d_model=config["hidden_size"],
        layers=config["num_hidden_layers"], heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads"), head_dim=config.get("head_dim"),
        d_hidden=config["intermediate_size"], norm_eps=config.get("rms_norm_eps", 1e-6),
        bias=bool(config.get("mlp_bias", False)), attention_bias=bool(config.get("attention_bias", False)),
        tied=config.get("tie_word_embeddings", False),
        rotary_base=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        **_rope(rope, config["max_position_embeddings"]),
    )  # fmt: skip


ROPE_COMMON = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
ROPE_DEFAULTS = {"beta_fast": 32, "beta_slow": 1}  # YaRN settings that qkv fixes
FACTOR = {"factor": "rotary_factor"}
ORIGINAL = {"original_max_position_embeddings": "rotary_original"}
ROPE_KEYS = {  # the settings of each kind of scaling, and their names in `DecoderConfig`
    "linear": FACTOR,
    "dynamic": FACTOR,  # it always starts at max_position_embeddings
    "yarn": FACTOR | ORIGINAL,
    "llama3": FACTOR | ORIGINAL | {"low_freq_factor": "rotary_low", "high_freq_factor": "rotary_high"},
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
    return {"rotary_scaling": kind, "rotary_original": context, **settings}


KINDS = {
    "gpt2": Kind(
        _gpt2, prefix="transformer.", block="h", unused=r"h\.\d+\.attn\.(bias|masked_bias)", transposed=True,
        names={
            "wte": "embedding", "wpe": "positions", "ln_f": "norm", "lm_head": "output", "ln_1": "attention_norm",
            "attn.c_attn": "attention.in_proj", "attn.c_proj": "attention.out_proj", "ln_2": "feed_forward_norm",
            "mlp.c_fc": "feed_forward.up", "mlp.c_proj": "feed_forward.down",
        },
    ),
    "llama": Kind(
        _llama, prefix="model.", block="layers", unused=r".*rotary_emb\.inv_freq",
        names={
            "embed_tokens": "embedding", "norm": "norm", "lm_head": "output", "input_layernorm": "attention_norm",
            "self_attn.o_proj": "attention.out_proj", "post_attention_layernorm": "feed_forward_norm",
            "mlp.down_proj": "feed_forward.down",
        },
        joined={
            "attention.in_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "feed_forward.up": ("mlp.gate_proj", "mlp.up_proj"),
        },
    ),
}  # fmt: skip
"""The architectures, by Hugging Face's ``model_type``."""
