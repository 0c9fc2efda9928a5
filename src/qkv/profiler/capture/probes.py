"""Probe heads on synthetic texts: random tokens, one token repeated, a random sequence twice, the text shuffled.

On natural text an induction head is hard to tell from other heads; on random tokens that come twice, only induction
explains its weights (Olsson et al. 2022, arXiv:2209.11895). The texts are short, so all weights are formed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv._engine.call import Call
from qkv.errors import InputError
from qkv.profiler.capture.calls import calls_of
from qkv.profiler.capture.inputs import batches, positions, vocabulary
from qkv.profiler.capture.observe import ObservedCall, weights_of
from qkv.profiler.data.variables import VARIABLES

TOKENS = 64  # length of a text (Gu et al. 2025, arXiv:2410.10781, section 3), or the longest that the model can read
LEAST = 8  # shortest text that can be probed, in tokens
REPEATS = 3

Scores = dict[str, Float[Tensor, " h"]]


def probe(
    model: nn.Module,
    ids: Int[Tensor, "b n"],
    special: Collection[int] = (),
    layers: Collection[int] | None = None,
    seed: int = 0,
) -> dict[tuple[str, int], Scores]:
    """Scores of every head of self-attention, by module and layer: the variables ``probe_…`` of `VARIABLES`.

    Args:
        model: as in `qkv.profile`; it must read token ids.
        ids: a natural text; the special tokens at its start and end are put around every synthetic text.
        special: ids of special tokens.
        layers: which layers to probe; all if None.
        seed: seed of the random tokens.

    Raises:
        InputError: if the vocabulary size is not known, or the model reads too few tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    start, body, end = _framed(ids[0].cpu(), set(special))
    size = vocabulary(model)
    limit = positions(model) or 2 * TOKENS + len(start) + len(end)
    once = min(TOKENS, (limit - len(start) - len(end)) // 2)
    if size is None:
        raise InputError(f"model {type(model).__name__} does not state its vocabulary size in its configuration")
    if once < LEAST:
        raise InputError(
            f"model {type(model).__name__} reads {limit} tokens, expected at least {2 * LEAST} besides special tokens"
        )
    ordinary = torch.tensor([i for i in range(size) if i not in set(special)])
    if not len(ordinary):
        raise InputError(f"model {type(model).__name__} has {size} tokens, all of them special; expected ordinary ones")

    def drawn(rows: int, n: int) -> Tensor:
        return ordinary[torch.randint(len(ordinary), (rows, n), generator=generator)]

    def framed(tokens: Tensor) -> Tensor:
        rows = len(tokens)
        return torch.cat([start.expand(rows, -1), tokens, end.expand(rows, -1)], 1)

    random, one = drawn(REPEATS, once), drawn(REPEATS, 1).expand(-1, once)
    twice = drawn(REPEATS, once).repeat(1, 2)
    text = body[:once]
    shuffled = [text[torch.randperm(len(text), generator=generator)] for _ in range(REPEATS)]
    found: dict[tuple[str, int], Scores] = {}

    def add(tokens: Tensor, score: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            (batch,) = batches(model, framed(tokens), None, None)
            calls = calls_of(model, batch, layers=layers)
        for one in _self_attention(calls):
            found.setdefault((one.module, one.layer), {}).update(
                score(weights_of(one.call), _visible_queries(one.call))
            )

    at = len(start)
    add(random, lambda a, visible: {"probe_sink_random": (a[..., 0].sum(2) / visible).mean(0)})
    add(one, lambda a, visible: {"probe_sink_repeated": (a[..., 0].sum(2) / visible).mean(0)})
    add(twice, lambda a, _: _second_half(a, at, once))
    if len(text) >= LEAST:
        add(torch.stack([text, *shuffled]), lambda a, _: _positional(a))
    return found


def add_to(data: xr.Dataset, found: dict[tuple[str, int], Scores]) -> xr.Dataset:
    """Add the scores to a group's data set; NaN at layers that were not probed."""
    modules = list(zip(data["module"].values.tolist(), data["layer"].values.tolist(), strict=True))
    names = {name: None for key in modules for name in found.get(key, {})}
    heads = data.sizes["head"]
    for name in names:
        missing = torch.full((heads,), torch.nan)
        rows = torch.stack([found.get(key, {}).get(name, missing).float().cpu() for key in modules])
        about = VARIABLES[name]
        data[name] = (about.dims, rows.numpy(), about.attrs)
    return data


def _framed(ids: Tensor, special: set[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Split ids into special tokens at the start, ordinary tokens, and special tokens at the end."""
    plain = [i for i, x in enumerate(ids.tolist()) if x not in special]
    if not plain:
        return ids[:1], ids[:0], ids[:0]
    first, last = plain[0], plain[-1]
    body = ids[first : last + 1]
    return ids[:first], body[[int(x) not in special for x in body]], ids[last + 1 :]


def _self_attention(calls: Iterable[ObservedCall]) -> Iterable[ObservedCall]:
    return (c for c in calls if c.group != "cross" and c.call.q.shape[2] == c.call.k.shape[2])


def _visible_queries(call: Call) -> Tensor:
    """How many queries may attend to the first key: (b, h); a dimension is 1 if the number is the same along it."""
    n = call.q.shape[2]
    if call.mask is None:
        return call.q.new_full((1, 1), n)
    return call.mask.dense(n, n, batch=len(call.q), heads=call.q.shape[1])[..., 0].sum(2).clamp(min=1)


def _second_half(a: Float[Tensor, "b h n n"], start: int, once: int) -> Scores:
    """Weights of the second occurrence: on the previous token, the first occurrence, and the token after that."""
    query = torch.arange(start + once, start + 2 * once, device=a.device)
    offsets = {"previous": -1, "duplicate": -once, "induction": 1 - once}
    return {f"probe_{name}": a[:, :, query, query + by].mean((0, 2)) for name, by in offsets.items()}


def _positional(a: Float[Tensor, "b h n n"]) -> Scores:
    """Item 0 is the text, the other items are shuffled. The first half of the queries has too few keys to differ."""
    later = a[:, :, a.shape[2] // 2 :]
    total_variation = 0.5 * (later[1:] - later[:1]).abs().sum(-1)
    return {"probe_positional": 1 - total_variation.mean((0, 2))}
