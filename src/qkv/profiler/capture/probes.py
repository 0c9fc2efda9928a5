"""Probe heads on synthetic texts: random tokens, the same shuffled, one token repeated, a random sequence twice.

On natural text an induction head is hard to tell from other heads; on random tokens that come twice, only induction
explains its weights (Olsson et al. 2022, arXiv:2209.11895). The texts are short, so all weights are formed. They do
not depend on the profiled text, so a model is probed once, and again only after it has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from weakref import WeakKeyDictionary

import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv._engine.call import Call
from qkv.errors import InputError
from qkv.kernels import watched
from qkv.profiler.capture.calls import calls_of
from qkv.profiler.capture.fingerprint import fingerprint
from qkv.profiler.capture.inputs import batches, positions, vocabulary
from qkv.profiler.capture.observe import ObservedCall, weights_of
from qkv.profiler.data.variables import VARIABLES
from qkv.statistics.shares import rows_in_shares

TOKENS = 64  # length of a text (Gu et al. 2025, arXiv:2410.10781, section 3), or the longest that the model can read
LEAST = 8  # shortest text that can be probed, in tokens
REPEATS = 3

Scores = dict[str, Float[Tensor, " h"]]
Found = dict[tuple[str, int], Scores]
_KEPT: WeakKeyDictionary[nn.Module, tuple[Hashable, dict[Hashable, Found]]] = WeakKeyDictionary()


def probe(
    model: nn.Module,
    ids: Int[Tensor, "b n"],
    special: Collection[int] = (),
    layers: Collection[int] | None = None,
    seed: int = 0,
) -> Found:
    """Scores of every head of self-attention, by module and layer: the variables ``probe_…`` of `VARIABLES`.

    They are kept for the next call with the same model, which is recognised by its `fingerprint`.

    Args:
        model: as in `qkv.profile`; it must read token ids.
        ids: a text; the special tokens at its start and end are put around every synthetic text.
        special: ids of special tokens.
        layers: which layers to probe; all if None.
        seed: seed of the random tokens.

    Raises:
        InputError: if the vocabulary size is not known, or the model reads too few tokens.
    """
    start, end = _frame(ids[0].cpu(), set(special))
    of_layers = None if layers is None else frozenset(layers)
    asked = (tuple(start.tolist()), tuple(end.tolist()), frozenset(special), of_layers)
    now = None if watched() else fingerprint(model)
    before, kept = _KEPT.get(model, (None, {}))
    if now is None or now != before:
        kept = {}
    if (*asked, seed) not in kept:
        kept[*asked, seed] = _probed(model, start, end, special, layers, seed)
    if now is not None:
        _KEPT[model] = (now, kept)
    return kept[*asked, seed]


def _probed(
    model: nn.Module, start: Tensor, end: Tensor, special: Collection[int], layers: Collection[int] | None, seed: int
) -> Found:
    generator = torch.Generator().manual_seed(seed)
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

    def weights(tokens: Tensor) -> Iterable[tuple[Scores, Tensor, Call]]:
        """The shares of the rows of every layer on these texts, and where to put the scores of its heads."""
        texts = torch.cat([start.expand(len(tokens), -1), tokens, end.expand(len(tokens), -1)], 1)
        with torch.random.fork_rng(devices=[]):
            (batch,) = batches(model, texts, None, None)
            calls = calls_of(model, batch, layers=layers)
        for one in _self_attention(calls):
            shares = rows_in_shares(weights_of(one.call), one.call.normalizer)
            yield found.setdefault((one.module, one.layer), {}), shares, one.call

    found: Found = {}
    random, repeated = drawn(REPEATS, once), drawn(REPEATS, 1).expand(-1, once)
    twice = drawn(REPEATS, once).repeat(1, 2)
    shuffled = torch.stack([random[0, torch.randperm(once, generator=generator)] for _ in range(REPEATS)])
    for scores, a, call in weights(torch.cat([random, repeated, shuffled])):
        sink = a[..., 0].sum(2) / _visible_queries(call)
        scores["probe_sink_random"] = sink[:REPEATS].mean(0)
        scores["probe_sink_repeated"] = sink[REPEATS : 2 * REPEATS].mean(0)
        scores["probe_positional"] = _positional(a[0], a[2 * REPEATS :])
    for scores, a, _ in weights(twice):
        scores.update(_second_half(a, len(start), once))
    return found


def add_to(data: xr.Dataset, found: dict[tuple[str, int], Scores]) -> xr.Dataset:
    """Add the scores to a group's data set; NaN at layers that were not probed."""
    modules = list(zip(data["module"].values.tolist(), data["layer"].values.tolist(), strict=True))
    names = {name: None for key in modules for name in found.get(key, {})}
    heads = data.sizes["head"]
    missing, made = torch.full((heads,), torch.nan), {}
    for name in names:
        rows = torch.stack([found.get(key, {}).get(name, missing).float().cpu() for key in modules])
        made[name] = (VARIABLES[name].dims, rows.numpy(), VARIABLES[name].attrs)
    data.update(made)
    return data


def _frame(ids: Tensor, special: set[int]) -> tuple[Tensor, Tensor]:
    """The special tokens at the start and at the end of a text."""
    plain = [i for i, x in enumerate(ids.tolist()) if x not in special]
    return (ids[: plain[0]], ids[plain[-1] + 1 :]) if plain else (ids[:1], ids[1:][-1:])


def _self_attention(calls: Iterable[ObservedCall]) -> Iterable[ObservedCall]:
    return (c for c in calls if c.group != "cross" and c.call.q.shape[2] == c.call.k.shape[2])


def _visible_queries(call: Call) -> Tensor:
    """How many queries may attend to the first key: (b, h); a dimension is 1 if the number is the same along it."""
    n = call.q.shape[2]
    if call.mask is None:
        return call.q.new_full((1, 1), n)
    return call.mask.dense(n, n, batch=len(call.q), heads=call.q.shape[1])[..., 0].sum(2).clamp(min=1)


def _second_half(a: Float[Tensor, "b h n n"], start: int, once: int) -> Scores:
    """Shares of the rows of the second half on the previous token, the first occurrence, and the token after that."""
    query = torch.arange(start + once, start + 2 * once, device=a.device)
    offsets = {"previous": -1, "duplicate": -once, "induction": 1 - once}
    return {f"probe_{name}": a[:, :, query, query + by].mean((0, 2)) for name, by in offsets.items()}


def _positional(text: Float[Tensor, "h n n"], shuffled: Float[Tensor, "b h n n"]) -> Float[Tensor, " h"]:
    """1 − total variation between the rows. The first half of the queries has too few keys to differ."""
    half = text.shape[1] // 2
    total_variation = 0.5 * (shuffled[:, :, half:] - text[:, half:]).abs().sum(-1)
    return 1 - total_variation.mean((0, 2))
