"""A tiny Llama in a GGUF file, written with the package gguf: the same weights as a model of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

CHAT = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
LETTERS = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
"""Bytes as byte-level vocabularies spell them; the last two are the space and the newline."""
TOKENS = ["<s>", "</s>", *LETTERS, "ab", "xy"]  # no merge makes the last one
NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
    "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


def tiny_llama(seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    """A Llama of 2 layers × 4 heads on 2, with the vocabulary of `TOKENS`."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": len(TOKENS), "num_key_value_heads": 2, "max_position_embeddings": 512}
    torch.manual_seed(seed)
    config = LlamaConfig(**sizes | settings)
    return LlamaForCausalLM(config).eval()


def write_gguf(path: Path, model: LlamaForCausalLM, **changes: Any) -> Path:
    """Write a model; those of its matrices that are quantised lose precision in the model, too.

    `changes` are entries of the metadata (with "__" for "."; None leaves one out), or tensors with their names.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    config, q8 = model.config, GGMLQuantizationType.Q8_0
    changes = {name.replace("__", "."): x for name, x in changes.items()}
    writer = GGUFWriter(path, changes.pop("architecture", "llama"))
    entries = {
        "llama.context_length": config.max_position_embeddings, "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers, "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads, "llama.rope.dimension_count": config.head_dim,
        "llama.attention.head_count_kv": config.num_key_value_heads, "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }  # fmt: skip
    entries |= {
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"],
    }
    entries |= {key: changes.pop(key) for key, x in [*changes.items()] if key in entries or isinstance(x, int | float)}
    for key, number in entries.items():
        if number is not None:
            (writer.add_uint32 if isinstance(number, int) else writer.add_float32)(key, number)
    texts = {"model": "gpt2", "pre": "default", "chat_template": CHAT}
    arrays = {"tokens": TOKENS, "token_type": [3, 3] + [1] * (len(TOKENS) - 2), "merges": ["a b"]}
    for key, default in (texts | arrays).items():
        name = f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}"
        if (entry := changes.pop(name, default)) is not None:
            (writer.add_string if key in texts else writer.add_array)(name, entry)
    tensors: dict[str, np.ndarray | None] = {}
    for name, weight in model.state_dict().items():
        *place, module, end = name.removeprefix("model.").split(".")
        block = f"blk.{place[1]}." if place else ""
        x = weight.numpy()
        if module in ("q_proj", "k_proj"):  # llama.cpp rotates neighbours, transformers halves
            heads = len(x) // config.head_dim
            x = x.reshape(heads, 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(x.shape)
        tensors[f"{block}{NAMES[module]}.{end}"] = x
        if x.ndim == 2:
            weight.copy_(torch.from_numpy(quants.dequantize(quants.quantize(weight.numpy(), q8), q8)))
    for name, x in changes.items():
        if isinstance(x, str):
            writer.add_string(name, x)
        elif isinstance(x, list):
            writer.add_array(name, x)
        else:
            tensors[name] = x
    for name, x in tensors.items():
        if x is not None and x.ndim == 2:
            writer.add_tensor(name, quants.quantize(np.ascontiguousarray(x), q8), raw_dtype=q8)
        elif x is not None:
            writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
