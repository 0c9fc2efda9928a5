"""What heads do on texts made for the purpose: random tokens, one token repeated, a sequence twice, a text shuffled.

On a natural text a head that repeats what followed before looks like many others; on random tokens that come twice
only induction explains its weights (Olsson et al. 2022, arXiv:2209.11895). Texts are short: all weights are formed.
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
from qkv.profiler.capture.observe import Seen, formed
from qkv.profiler.data.variables import VARIABLES

TOKENS = 64  # of a text (Gu et al. 2025, arXiv:2410.10781, section 3); as many as the model can read if it can less
LEAST = 8  # tokens: on fewer nothing can be told
REPEATS = 3

Scores = dict[str, Float[Tensor, " h"]]


def probe(
    model: nn.Module,
    ids: Int[Tensor, "b n"],
    special: Collection[int] = (),
    layers: Collection[int] | None = None,
    seed: int = 0,
) -> dict[tuple[str, int], Scores]:
    """Scores of every head that attends within one sequence, by module and layer: the ``probe_…`` of `VARIABLES`.

    Args:
        model: as in `qkv.profile`; it reads token ids.
        ids: of a natural text; the special tokens at its start and end stand around all texts, as the model knows them.
        special: ids that are no ordinary tokens.
        layers: which to look at; all if None.
        seed: of the random tokens.

    Raises:
        InputError: if the model reads no more than a few tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    start, body, end = _framed(ids[0].cpu(), set(special))
    size = vocabulary(model)
    limit = positions(model) or 2 * TOKENS + len(start) + len(end)
    once = min(TOKENS, (limit - len(start) - len(end)) // 2)
    if size is None:
        raise InputError(f"nobody says how many tokens {type(model).__name__} knows")
    if once < LEAST:
        raise InputError(f"{type(model).__name__} reads {limit} tokens; probes need {2 * LEAST} beside special ones")
    ordinary = torch.tensor([i for i in range(size) if i not in set(special)])
    if not len(ordinary):
        raise InputError(f"all {size} tokens of {type(model).__name__} are special")

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
            seen = calls_of(model, batch, layers=layers)
        for one in _own(seen):
            found.setdefault((one.module, one.layer), {}).update(score(formed(one.call), _audience(one.call)))

    at = len(start)
    add(random, lambda a, seen: {"probe_sink_random": (a[..., 0].sum(2) / seen).mean(0)})
    add(one, lambda a, seen: {"probe_sink_repeated": (a[..., 0].sum(2) / seen).mean(0)})
    add(twice, lambda a, _: _second_half(a, at, once))
    if len(text) >= LEAST:
        add(torch.stack([text, *shuffled]), lambda a, _: _positional(a))
    return found


def add_to(data: xr.Dataset, found: dict[tuple[str, int], Scores]) -> xr.Dataset:
    """A group's data set with the scores of its layers; NaN where a layer was not probed."""
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
    """Special tokens at the start, what is between, special tokens at the end."""
    plain = [i for i, x in enumerate(ids.tolist()) if x not in special]
    if not plain:
        return ids[:1], ids[:0], ids[:0]
    first, last = plain[0], plain[-1]
    body = ids[first : last + 1]
    return ids[:first], body[[int(x) not in special for x in body]], ids[last + 1 :]


def _own(seen: Iterable[Seen]) -> Iterable[Seen]:
    """Calls within one sequence."""
    return (s for s in seen if s.group != "cross" and s.call.q.shape[2] == s.call.k.shape[2])


def _audience(call: Call) -> Tensor:
    """How many queries may attend to the first key: (b, h), either of which may be 1."""
    n = call.q.shape[2]
    if call.mask is None:
        return call.q.new_full((1, 1), n)
    return call.mask.dense(n, n, batch=len(call.q), heads=call.q.shape[1])[..., 0].sum(2).clamp(min=1)


def _second_half(a: Float[Tensor, "b h n n"], start: int, once: int) -> Scores:
    """Of the tokens that come the second time: weight on the token before, on the first time, on what followed it."""
    query = torch.arange(start + once, start + 2 * once, device=a.device)
    offsets = {"previous": -1, "duplicate": -once, "induction": 1 - once}
    return {f"probe_{name}": a[:, :, query, query + by].mean((0, 2)) for name, by in offsets.items()}


def _positional(a: Float[Tensor, "b h n n"]) -> Scores:
    """The first is the text, the others are shuffled; early queries see too little to differ."""
    later = a[:, :, a.shape[2] // 2 :]
    apart = 0.5 * (later[1:] - later[:1]).abs().sum(-1)
    return {"probe_positional": 1 - apart.mean((0, 2))}
