"""What qkv costs on SmolLM2-135M-Instruct, a real language model, float32: profiles, a watch, ablation."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

import qkv
from benchmarks.mechanisms.timing import alternating, median_ratio
from benchmarks.one_run import from_weights, plain, profiled
from benchmarks.timing import THREADS
from qkv.edits import Zero
from qkv.profiler.analyses.ablation import ablation, next_token_loss

LENGTHS = {73: 9, 512: 7, 2048: 3, 8192: 1}
"""The number of rounds by the number of tokens."""
NEW = 128
LAYER = 15
"""The layer in the middle, whose heads are removed one by one."""


def llm() -> dict[str, Any]:
    """`qkv.profile`, `qkv.watch` and `qkv.profiler.ablation` against the same model without them, alternating."""
    torch.set_num_threads(THREADS)
    model, tokenizer = qkv.load("smollm2", head=True)
    text = qkv.profiler.default_text("smollm2")
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    every = ids.repeat(1, 1 + max(LENGTHS) // ids.shape[1])
    return _profiles(model, every) | _watch(model, every[:, :NEW]) | _ablation(model, every[:, :73])


def _profiles(model: Any, every: Tensor) -> dict[str, Any]:
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    result: dict[str, Any] = {}
    for tokens, repeats in LENGTHS.items():
        ids = every[:, :tokens]
        assert ids.shape[1] == tokens
        jobs = {"plain": lambda ids=ids: plain(model, ids), "profile": lambda ids=ids: profiled(model, ids)}
        if tokens <= 2048:  # 30 layers × 9 heads × 8,192² weights would be 72 GB
            jobs["weights"] = lambda ids=ids: from_weights(eager, ids)
        seconds = alternating(jobs, repeats)
        for job in ("profile", "weights"):
            if job in seconds:
                result[f"time: {job} / plain, {tokens:,} tokens"] = median_ratio(seconds, job, "plain")
        result[f"seconds, {tokens:,} tokens"] = seconds
    return result


def _watch(model: Any, ids: Tensor) -> dict[str, Any]:
    def generate() -> None:
        model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)

    def watched() -> None:
        with qkv.watch(model):
            generate()

    seconds = alternating({"plain": generate, "watch": watched}, 5)
    return {
        f"time: watch / plain, {NEW} new tokens after {NEW}": median_ratio(seconds, "watch", "plain"),
        "seconds, generation": seconds,
    }


def _ablation(model: Any, ids: Tensor) -> dict[str, Any]:
    heads = model.config.num_attention_heads

    def one_by_one() -> None:
        for removed in (*({head} for head in range(heads)), set(range(heads))):
            with qkv.edit(model, {(LAYER, head): Zero() for head in removed}):
                next_token_loss(model, ids)

    def together() -> None:
        ablation(model, ids, layers=[LAYER], progress=False)

    seconds = alternating({"one by one": one_by_one, "together": together}, 5)
    return {
        f"time: heads of layer {LAYER} one by one / qkv.profiler.ablation": median_ratio(
            seconds, "one by one", "together"
        ),
        "seconds, ablation": seconds,
    }
