"""Synthetic texts that tell the types of heads, whose results are kept as long as the model is the same.

On natural text an induction head is hard to tell from other heads; on random tokens that come twice, only induction
explains its weights (Olsson et al. 2022, arXiv:2209.11895). The texts are short, so all weights are formed. They do
not depend on the profiled text, so a model is probed once, and again only after it has changed.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Collection, Hashable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xarray as xr
import xxhash
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from qkv.engine import Call
from qkv.errors import InputError
from qkv.profiler.capture.datasets import calls_of
from qkv.profiler.capture.inputs import batches, positions, vocabulary
from qkv.profiler.capture.interventions import ACTIVE
from qkv.profiler.capture.record import weights_of
from qkv.profiler.data.variables import VARIABLES
from qkv.statistics.measure import rows_in_shares


def fingerprint(model: nn.Module) -> Hashable | None:
    """A key that differs whenever the model may compute something else, or None if that cannot be told.

    It covers the class of every module, all their attributes (so also the configuration and the training mode), the
    bytes of all parameters and buffers, and autocast. Version counters of tensors would not be enough, as a change
    through ``parameter.data`` does not count. A model with forward hooks, with a replaced ``forward``, or with an
    attribute that cannot be pickled, such as a cycle of objects, gives None. It does not see a function that was
    replaced in a Python module, nor a new entry in a registry that the model reads. Equal attributes have equal keys,
    whether they are one object or several.

    >>> layer = nn.Linear(2, 2)
    >>> before = fingerprint(layer)
    >>> fingerprint(layer) == before
    True
    >>> _ = layer.weight.data[0].mul_(2)
    >>> fingerprint(layer) == before
    False
    """
    modules = list(model.modules())
    if any(map(_hooked, modules)) or torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return None
    try:
        places, digests = {id(m): i for i, m in enumerate(modules)}, dict[int, bytes]()

        def digest(x: Any) -> bytes:
            if id(x) not in digests:  # all modules have the same configuration
                digests[id(x)] = xxhash.xxh3_128_digest(_StatePickler.pickled(x, places))
            return digests[id(x)]

        attributes = ((name, x) for module in modules for name, x in vars(module).items() if name not in BOOKKEEPING)
        state = tuple((name, digest(x)) for name, x in attributes)
    except Exception:  # pickling runs code of the attributes, which can raise anything
        return None
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    )
    return tuple((type(m), type(m).forward) for m in modules), autocast, state


BOOKKEEPING = vars(nn.Module()).keys() - {"training", "_parameters", "_buffers", "_modules"}  # such as empty hooks


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in vars(module)


class _StatePickler(pickle.Pickler):
    """Pickles attributes by their values, with a module as its place in the model and a tensor as a hash of its bytes.

    Without a memo, an object that occurs again is pickled again. A set is pickled in the order of its elements' bytes.
    """

    places: dict[int, int]

    @classmethod
    def pickled(cls, value: object, places: dict[int, int]) -> bytes:
        file = io.BytesIO()
        pickler = cls(file)
        pickler.fast, pickler.places = True, places
        pickler.dump(value)
        return file.getvalue()

    def persistent_id(self, obj: Any) -> Hashable | None:
        if id(obj) in self.places:
            return self.places[id(obj)]
        if isinstance(obj, set | frozenset):
            return type(obj), tuple(sorted(self.pickled(x, self.places) for x in obj))
        return _hashed(obj) if isinstance(obj, Tensor) else None


def _hashed(x: Tensor) -> Hashable:
    if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.is_meta or x.is_quantized:
        raise TypeError(f"the values of a {type(x).__name__} cannot be read")
    values = x.detach().contiguous().reshape(-1).view(torch.uint8)
    digest = xxhash.xxh3_128_digest(values.numpy().data) if x.device.type == "cpu" else sums_of_bytes(values)
    return str(x.dtype), tuple(x.shape), str(x.device), digest


def weights_hash(model: nn.Module) -> str:
    """A hash of names, shapes, dtypes and bytes of all parameters and buffers, which is the same in every process."""
    state = xxhash.xxh3_128()
    for name, x in model.state_dict().items():
        state.update(f"{name} {type(x).__name__}".encode())
        if isinstance(x, Tensor):
            state.update(f"{tuple(x.shape)} {x.dtype}".encode())
            state.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


PART = 2**22  # numbers summed at a time: 32 MB


def sums_of_bytes(values: Tensor) -> tuple[int, ...]:
    """A hash of bytes that is computed where they are, as moving a model off a GPU would take seconds.

    The sum, modulo 2⁶⁴, of each four bytes times a random odd number: one changed number always changes it, and other
    changes with a probability of 1 − 2⁻⁶⁴.
    """
    numbers = nn.functional.pad(values, (0, -len(values) % 4)).view(torch.int32)
    factors = _factors(values.device)
    sums = [(part.long() * factors[: len(part)]).sum() for part in numbers.split(PART)]
    return tuple(torch.stack(sums).tolist()) if sums else ()


@functools.cache
def _factors(device: torch.device) -> Tensor:
    numbers = torch.randint(-(2**62), 2**62, (PART,), generator=torch.Generator().manual_seed(0))
    return (2 * numbers + 1).to(device)


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
    """
    start, end = _frame(ids[0].cpu(), set(special))
    of_layers = None if layers is None else frozenset(layers)
    asked = (tuple(start.tolist()), tuple(end.tolist()), frozenset(special), of_layers)
    now = None if ACTIVE.get(model) else fingerprint(model)
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
        for one in calls:
            if one.group == "cross" or one.call.q.shape[2] != one.call.k.shape[2]:
                continue
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
