"""The loss of a language model at every token of a text that it reads through caches that evict keys."""

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
    """The token loss −ln p of the next token at each of n − 1 positions, in nats, float64.

    The model reads the texts in chunks through the caches. With the cache `Full` this is the usual loss of the model.

    Args:
        model: a language model. For texts longer than those of its training, it should have rotary positions, ALiBi
            or none.
        ids: texts of at least 2 tokens.
        make_cache: makes the cache of one layer.
        chunk: tokens per step. It changes the memory needed, but not the result, except for `HeavyHitters`, which
            evicts keys only between steps: its definition is that of chunks of 1 token.
        begin: tokens of the first step, if more than `chunk`: as many as the cache keeps without evicting any.
        on_chunk: called with the number of tokens after every chunk.

    Raises:
        InputError: for ids of another shape, or a chunk below 1.

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
    state, outputs = model.start(len(ids), cache=make_cache), []
    weight, bias = (model.embedding.weight, None) if model.output is None else (model.output.weight, model.output.bias)
    # `step` returns the logits of the last token only: the hook keeps the last layer's output for all tokens.
    handle = model.blocks[-1].register_forward_hook(lambda _, __, x: outputs.append(x))
    n = ids.shape[1] - 1
    stops = [*range(max(begin, chunk), n, chunk), n]
    found = []
    try:
        for start, stop in zip([0, *stops], stops, strict=False):
            part, targets = ids[:, start:stop], ids[:, start + 1 : stop + 1]
            model.step(part, state)
            logits = project(model.norm(outputs.pop()), weight, bias).double()
            found.append(nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none"))
            on_chunk(part.shape[1])
    finally:
        handle.remove()
    return torch.cat(found, 1)
