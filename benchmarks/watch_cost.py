"""What `qkv.watch` adds to the time of a generation."""

from __future__ import annotations

from typing import Any

import torch

import qkv
from benchmarks.mechanisms.timing import alternating, median_ratio
from benchmarks.timing import THREADS

NEW = 64


def watched(turns: int = 7) -> dict[str, Any]:
    """A Llama of 12 layers × 9 heads × 64 with random weights, float32: greedy generation of 64 tokens, alternating."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=576, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=4096, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval()
    result: dict[str, Any] = {}
    for n in (128, 1024):
        ids = torch.randint(1, 32000, (1, n))
        seconds = alternating(
            {
                "plain": lambda ids=ids: _generate(model, ids),
                "watched": lambda ids=ids: _watched(model, ids, 1),
                "every 8": lambda ids=ids: _watched(model, ids, 8),
            },
            turns,
        )
        for job in ("watched", "every 8"):
            result[f"time: {job} / plain, {n:,} tokens and {NEW} new ones"] = median_ratio(seconds, job, "plain")
        result[f"seconds, {n:,} tokens"] = seconds
    return result


def _generate(model: Any, ids: torch.Tensor) -> None:
    model.generate(ids, max_new_tokens=NEW, do_sample=False)


def _watched(model: Any, ids: torch.Tensor, every: int) -> None:
    with qkv.watch(model, every=every):
        _generate(model, ids)
