"""Training and decoding speed of `DecoderLM` and the same model on plain SDPA, x-transformers and transformers."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.mechanisms.timing import alternating, median_ratio
from benchmarks.plain_gpt import PlainGPT
from benchmarks.timing import THREADS
from qkv.cache import Full
from qkv.models import pretrained
from qkv.models.decoder import DecoderLM

LAYERS, HEADS, SIZE, CONTEXT = 6, 6, 384, 512
BATCH, TOKENS = 8, 256  # of a training step
PROMPT, NEW = 128, 64  # of decoding
VOCABULARIES = (256, 50_257)  # bytes, and GPT-2's tokens
OURS = "DecoderLM"


def models(vocabulary: int) -> dict[str, torch.nn.Module]:
    """The four models; all but x-transformers' have the same weights."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from x_transformers import Decoder, TransformerWrapper

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=CONTEXT, n_embd=SIZE, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    theirs = GPT2LMHeadModel(config)
    ours = pretrained.from_weights(config.to_dict(), theirs.state_dict())
    plain = PlainGPT(ours.config)
    plain.take(ours.state_dict())
    stack = Decoder(dim=SIZE, depth=LAYERS, heads=HEADS, attn_dim_head=SIZE // HEADS, attn_flash=True)
    wrapped = TransformerWrapper(num_tokens=vocabulary, max_seq_len=CONTEXT, attn_layers=stack, tie_embedding=True)
    return {OURS: ours, "by hand on SDPA": plain, "x-transformers": wrapped, "transformers": theirs}


def training_step(model: Any, ids: Tensor) -> Callable[[], float]:
    """Forward, loss and backward of next-token prediction."""

    def loss() -> Tensor:
        if isinstance(model, DecoderLM | PlainGPT):
            return model.loss(ids)
        logits = model(ids[:, :-1])
        logits = logits if isinstance(logits, Tensor) else logits.logits
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def step() -> float:
        model.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        return value.item()

    model.train()
    return step


def decoding(model: Any, ids: Tensor) -> Callable[[], Tensor]:
    """A prompt and `NEW` greedy tokens after it, with the cache of each library."""

    def ours() -> Tensor:
        state = model.start(len(ids), cache=lambda: Full(PROMPT + NEW))
        return greedy(lambda tokens: model.step(tokens, state))

    def by_hand() -> Tensor:
        past = None

        def step(tokens: Tensor) -> Tensor:
            nonlocal past
            logits, past = model(tokens, past, last=True)
            return logits[:, -1]

        return greedy(step)

    def x_transformers() -> Tensor:
        cache, seen = None, ids[:, :0]

        def step(tokens: Tensor) -> Tensor:
            nonlocal cache, seen
            seen = torch.cat([seen, tokens], 1)
            logits, cache = model(seen, return_intermediates=True, cache=cache)
            return logits[:, -1]

        return greedy(step)

    def transformers() -> Tensor:
        from transformers import DynamicCache

        past = DynamicCache(config=model.config)
        return greedy(lambda tokens: model(tokens, past_key_values=past, logits_to_keep=1).logits[:, -1])

    def greedy(step: Callable[[Tensor], Tensor]) -> Tensor:
        tokens, out = ids, []
        with torch.inference_mode():
            for _ in range(NEW):
                tokens = step(tokens).argmax(-1, keepdim=True)
                out.append(tokens)
        return torch.cat(out, 1)

    model.eval()
    if isinstance(model, DecoderLM):
        return ours
    if isinstance(model, PlainGPT):
        return by_hand
    return transformers if hasattr(model, "config") else x_transformers


def decoder(repeats: int = 9) -> dict[str, Any]:
    """Seconds of a training step and of decoding, and the speed of `DecoderLM` over the best of the others."""
    torch.set_num_threads(THREADS)
    generator = torch.Generator().manual_seed(0)
    cells: dict[str, Any] = {}
    for vocabulary in VOCABULARIES:
        found = models(vocabulary)
        ids = torch.randint(vocabulary, (BATCH, TOKENS + 1), generator=generator)
        jobs: dict[str, Callable[[], Any]] = {name: training_step(model, ids) for name, model in found.items()}
        losses = {name: job() for name, job in jobs.items() if name != "x-transformers"}
        assert max(losses.values()) - min(losses.values()) < 1e-4, losses  # the same work
        cells[f"training, vocabulary {vocabulary}"] = _cell(alternating(jobs, repeats), BATCH * TOKENS)
        for batch in (1, 8):
            prompt = torch.randint(vocabulary, (batch, PROMPT), generator=generator)
            jobs = {name: decoding(model, prompt) for name, model in found.items()}
            same = [job() for name, job in jobs.items() if name != "x-transformers"]
            assert all(torch.equal(same[0], other) for other in same[1:])
            cells[f"decoding, vocabulary {vocabulary}, batch {batch}"] = _cell(alternating(jobs, repeats), batch * NEW)
    ratios = {name: cell["speed over the best other"] for name, cell in cells.items()}
    return {"DecoderLM's speed over the best other": ratios, "cells": cells}


def _cell(seconds: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    speed = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    best = max((name for name in speed if name != OURS), key=lambda name: speed[name])
    return {
        "tokens a second": speed,
        "best other": best,
        "speed over the best other": median_ratio(seconds, best, OURS),
        "seconds": seconds,
    }
