"""What each generated token attended to: the shares of named parts of the text, such as the question, exact.

The query at the last token before a generated one chose it, so its row says what the model looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv.engine import Call
from qkv.errors import InputError
from qkv.models.loading import rendered_chat
from qkv.profiler.capture.datasets import calls_of, without_values
from qkv.profiler.capture.inputs import batches
from qkv.profiler.capture.record import shares_of


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
        asked = tokens_of_text(found["offset_mapping"], first, first + len(question))
        start, stop = asked.start, asked.stop
        parts = {"first token": slice(0, 1), "system": slice(1, start)}
        parts |= {"question": slice(max(1, start), stop), "template": slice(stop, prompt)}
    parts["answer"] = slice(prompt, len(ids))
    return {name: part for name, part in parts.items() if part.stop > part.start}


def tokens_of_text(offsets: list[tuple[int, int]], start: int, stop: int) -> slice:
    """The tokens of the characters from `start` to `stop`, by the characters (first, last + 1) of each token."""
    return slice(sum(end <= start for _, end in offsets), sum(begin < stop for begin, _ in offsets))


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
    layers = []
    for observed in map(without_values, calls_of(model, batch)):
        rows = part_shares(observed.call, slice(prompt - 1, len(ids) - 1), parts.values())
        layers.append((observed.layer, rows[0].movedim(-1, 0).double().cpu()))
    shares = torch.stack([rows for _, rows in layers], 1)
    coords = {"part": list(parts), "layer": [layer for layer, _ in layers], "token": range(prompt, len(ids))}
    return xr.DataArray(shares.numpy(), coords, ("part", "layer", "head", "token"))


def part_shares(call: Call, rows: slice, parts: Collection[slice]) -> Float[Tensor, "b h rows parts"]:
    """The shares of parts of the keys in some rows of a call; the weights of 64 rows are formed at a time."""
    shares = (torch.stack([w[..., part].sum(-1) for part in parts], -1) for _, w in shares_of(call, rows))
    return torch.cat([*shares], 2)
