"""What each generated token attended to: the shares of named parts of the text, such as the question, exact.

The query at the last token before a generated one chose it, so its row says what the model looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.masks import Predicate
from qkv.models.loading import rendered_chat
from qkv.profiler.capture.datasets import calls_of, without_values
from qkv.profiler.capture.inputs import batches
from qkv.statistics.measure import in_shares, row_state, sweep


def parts_of(ids: list[int], prompt: int, tokenizer: Any = None, question: str | None = None) -> dict[str, slice]:
    """The parts of a text by name: the first token, the prompt and the answer, which starts at token `prompt`.

    With the `question` of a chat, the prompt is divided into "system" (what the chat template writes before the
    question), "question" and "template" (what it writes after it).
    """
    if question is None:
        parts = {"first token": slice(0, 1), "prompt": slice(1, prompt)}
    else:
        text = rendered_chat(tokenizer, question)
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        first = text.rfind(question)
        if found["input_ids"] != ids[:prompt] or first < 0:
            raise InputError("question: the chat template changes it, so its tokens cannot be told from the others")
        begins, ends = zip(*found["offset_mapping"], strict=True)
        start = sum(end <= first for end in ends)
        stop = sum(begin < first + len(question) for begin in begins)
        parts = {"first token": slice(0, 1), "system": slice(1, start)}
        parts |= {"question": slice(max(1, start), stop), "template": slice(stop, prompt)}
    parts["answer"] = slice(prompt, len(ids))
    return {name: part for name, part in parts.items() if part.stop > part.start}


def answer_shares(model: nn.Module, ids: Int[Tensor, " n"], parts: Mapping[str, slice], prompt: int) -> xr.DataArray:
    """The share of each part in the rows that chose the tokens after the first `prompt`: (part, layer, head, token).

    Memory is linear in the length of the text.

    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(d_model=32, layers=2, heads=4))
    >>> parts = {"prompt": slice(0, 3), "answer": slice(3, 6)}
    >>> found = answer_shares(model, torch.tensor([5, 6, 7, 8, 9, 5]), parts, 3)
    >>> dict(found.sizes), bool((found.sum("part") - 1).max() < 1e-5)
    ({'part': 2, 'layer': 2, 'head': 4, 'token': 3}, True)
    """
    if not 0 < prompt < len(ids):
        raise InputError(f"prompt is {prompt} of {len(ids)} tokens, expected at least one before and one after it")
    [batch] = batches(model, ids, None, None)
    masks = {name: Predicate(partial(_within, part)) for name, part in parts.items()}
    layers = []
    for observed in map(without_values, calls_of(model, batch)):
        call = observed.call
        found = in_shares(call, sweep(call, row_state(call, observed.lse), mass=masks), mass=masks).mass
        rows = torch.stack([found[name][0, :, prompt - 1 : -1] for name in parts])
        layers.append((observed.layer, rows.double().cpu()))
    shares = torch.stack([rows for _, rows in layers], 1)
    coords = {"part": list(parts), "layer": [layer for layer, _ in layers], "token": range(prompt, len(ids))}
    return xr.DataArray(shares.numpy(), coords, ("part", "layer", "head", "token"))


def _within(part: slice, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k >= part.start) & (k < part.stop)
