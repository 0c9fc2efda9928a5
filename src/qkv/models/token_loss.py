"""How surprised a language model is by every token of a text when it reads through caches that let keys go."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv.cache import Cache
from qkv.errors import InputError
from qkv.models.decoder import DecoderLM
from qkv.nn.projection import project


@torch.no_grad()
def token_loss(
    model: DecoderLM,
    ids: Int[Tensor, "b n"],
    make_cache: Callable[[], Cache],
    *,
    chunk: int = 64,
    begin: int = 0,
    on_chunk: Callable[[int], None] = lambda tokens: None,
) -> Float[Tensor, "b positions"]:
    """−ln p of the next token at each of n − 1 positions, in nats, float64.

    The texts pass through the caches in pieces; with `Full` that is the model's own loss.

    Args:
        model: of rotary, ALiBi or no positions, where texts are longer than those it was trained on.
        ids: texts of at least 2 tokens.
        make_cache: makes the cache of a layer.
        chunk: tokens a step. Memory, not numbers, depends on it, but for `HeavyHitters`, which lets keys go only
            between steps: there 1 is its definition.
        begin: tokens of the first step, if more than `chunk`: as many as the cache holds, all of which stay.
        on_chunk: hears how many tokens were read.

    Raises:
        InputError: for ids or a chunk that cannot be.

    >>> from qkv.cache import Sliding
    >>> from qkv.models import DecoderConfig
    >>> model = DecoderLM(DecoderConfig(vocab_size=9, d_model=8, layers=1, heads=2, positions="rotary")).eval()
    >>> token_loss(model, torch.arange(9)[None], lambda: Sliding(4)).shape
    torch.Size([1, 8])
    """
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise InputError(f"ids has shape {tuple(ids.shape)}, expected (texts, length) of at least 2 tokens")
    if chunk < 1:
        raise InputError(f"chunk is {chunk}, expected at least 1 token")
    ids = ids.to(model.embedding.weight.device)
    state, left = model.start(len(ids), cache=make_cache), []
    weight = model.embedding.weight if model.output is None else model.output.weight
    # A step gives logits of its last token; what the last layer leaves says the rest.
    handle = model.blocks[-1].register_forward_hook(lambda _, __, x: left.append(x))
    n = ids.shape[1] - 1
    stops = [*range(max(begin, chunk), n, chunk), n]
    found = []
    try:
        for start, stop in zip([0, *stops], stops, strict=False):
            part, targets = ids[:, start:stop], ids[:, start + 1 : stop + 1]
            model.step(part, state)
            logits = project(model.norm(left.pop()), weight).double()
            found.append(nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none"))
            on_chunk(part.shape[1])
    finally:
        handle.remove()
    return torch.cat(found, 1)
