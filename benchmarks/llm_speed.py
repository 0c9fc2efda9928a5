"""What qkv costs on SmolLM2-135M-Instruct, a real language model, float32, against the same model without it."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import qkv
from benchmarks import survey_speed
from benchmarks.mechanisms.timing import alternating, median_ratio
from benchmarks.one_run import from_weights, plain, profiled
from benchmarks.timing import THREADS
from qkv.cache import Full, HeavyHitters, Sinks, Sliding
from qkv.cache.evicting import policies_of
from qkv.edits import Zero
from qkv.huggingface.generation import attending_through
from qkv.models.pretrained import tell_rotary
from qkv.models.text import load_text_model
from qkv.profiler.analyses.ablation import ablation, next_token_loss
from qkv.profiler.analyses.eviction import eviction

LENGTHS = {73: 9, 512: 7, 2048: 3, 8192: 1}
"""The number of rounds by the number of tokens."""
NEW = 128
LAYER = 15
"""The layer in the middle, whose heads are removed one by one."""
POLICIES = ("window", "sinks", "heavy", "snapkv", "pyramid", "tova", "keydiff", "knorm", "expected")
STREAM, BLOCK, ALONE, BUDGET = 4000, 500, 32, 1024
"""Tokens that stream through a cache of 1,024 keys; of each 500 the last 32 are read one by one, and timed."""


def llm() -> dict[str, Any]:
    """Profiles, a watch and the ablation of a layer; about seven minutes on two cores."""
    model, every = _loaded()
    return _profiles(model, every) | _watch(model, every[:, :NEW]) | _ablation(model, every[:, :73])


def _loaded() -> tuple[Any, Tensor]:
    """The model, and 8,192 tokens: a passage again and again."""
    torch.set_num_threads(THREADS)
    model, tokenizer = qkv.load("smollm2", head=True)
    ids = tokenizer(qkv.profiler.default_text("smollm2"), return_tensors="pt")["input_ids"]
    return model, ids.repeat(1, 1 + max(LENGTHS) // ids.shape[1])


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


def evicted() -> dict[str, Any]:
    """`qkv.profiler.eviction` with all policies, against as many plain forwards."""
    model, every = _loaded()
    texts = every[:, :1024].view(4, 256)
    forwards = 2 + len(POLICIES)  # of the profile, with all keys, and with each policy

    def evict() -> None:
        eviction(model, texts, policies=POLICIES, budgets=[64], progress=False)

    seconds = alternating({"plain": lambda: plain(model, texts), "evict": evict}, 2)
    what = f"time: evict, {len(POLICIES)} policies, 4 × 256 tokens / {forwards} plain forwards"
    return {what: median_ratio(seconds, "evict", "plain") / forwards, "seconds, eviction": seconds}


def surveyed() -> dict[str, Any]:
    """A survey of 100 texts against plain inference in the same batches."""
    found = survey_speed.against_plain(texts=100, turns=4, model="smollm2", length=256)
    return {
        f"{name} of SmolLM2" if name == "seconds" else f"{name}, SmolLM2, 100 texts of 256 tokens": value
        for name, value in found.items() if name.startswith(("throughput", "seconds"))
    }  # fmt: skip


def streamed() -> dict[str, Any]:
    """Seconds of a token in each cache, against transformers' own, at the same places of a text."""
    model, every = _loaded()
    ids = every[:, :STREAM]
    own: dict[str, Callable[[], Any]] = {
        "Full": lambda: Full(STREAM), "Sliding": lambda: Sliding(BUDGET), "Sinks": lambda: Sinks(4, BUDGET - 4),
        "HeavyHitters": lambda: HeavyHitters(BUDGET // 2, BUDGET // 2),
    }  # fmt: skip
    ours = load_text_model("smollm2").model
    policies = policies_of(POLICIES, BUDGET)
    tell_rotary(model, policies.values())
    layers = model.config.num_hidden_layers
    read: dict[str, Callable[[Tensor], float]] = {"transformers": _through(model, DynamicCache())}
    read |= {
        f"qkv.cache.{name}": partial(_timed, partial(ours.step, state=ours.start(cache=c))) for name, c in own.items()
    }
    read |= {f"evicting {name}": _evicting(model, policy.for_layers(layers)) for name, policy in policies.items()}
    seconds: dict[str, list[float]] = {name: [] for name in read}
    for start in range(0, STREAM, BLOCK):
        first, *alone = ids[:, start : start + BLOCK].split([BLOCK - ALONE, *[1] * ALONE], 1)
        for one in read.values():
            one(first)
        rounds = [{name: one(token) for name, one in read.items()} for token in alone]
        for name, some in seconds.items():
            some.append(statistics.median(times[name] for times in rounds))
    result: dict[str, Any] = {f"seconds of a token, by {BLOCK} tokens": seconds}
    for name in list(seconds)[1:]:
        what = f"time: {STREAM:,} tokens through {name} / transformers' own cache"
        result[what] = median_ratio(seconds, name, "transformers")
    return result


def _timed(forward: Callable[[Tensor], Tensor], tokens: Tensor) -> float:
    """Seconds of a forward and of the choice of the next token."""
    started = time.perf_counter()
    with torch.no_grad():
        int(forward(tokens)[0, -1:].argmax())
    return time.perf_counter() - started


def _through(model: Any, cache: Any) -> Callable[[Tensor], float]:
    return partial(_timed, lambda tokens: model(input_ids=tokens, past_key_values=cache, logits_to_keep=1).logits)


def _evicting(model: Any, held: Any) -> Callable[[Tensor], float]:
    def read(tokens: Tensor) -> float:
        with attending_through(model, held) as cache:
            return _through(model, cache)(tokens)

    return read
