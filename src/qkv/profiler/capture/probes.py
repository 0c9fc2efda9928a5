"""Synthetic texts that tell the types of heads, whose results are kept as long as the model is the same.

On natural text an induction head is hard to tell from other heads; on random tokens that come twice, only induction
explains its weights (Olsson et al. 2022, arXiv:2209.11895). The texts are short, so all weights are formed. They do
not depend on the profiled text, so a model is probed once, and again only after it has changed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Hashable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdRef

from qkv.engine import Call
from qkv.errors import InputError
from qkv.masks import Region
from qkv.profiler.capture.datasets import calls_of
from qkv.profiler.capture.inputs import batches, positions, vocabulary
from qkv.profiler.capture.interventions import ACTIVE
from qkv.profiler.capture.record import copied_to_cpu, weights_of
from qkv.statistics.measure import rows_in_shares


@torch.no_grad()
def fingerprint(model: nn.Module) -> Key | None:
    """A key that differs whenever the model may compute something else, or None if that cannot be told.

    It covers the class of every module, all their attributes (so also the configuration and the training mode), the
    forward hooks, and autocast. Tensors are not read whole. A tensor is known by its identity, its address, its version
    counter, which every operation in place raises, and at most `SAMPLE` of its numbers, spread evenly. So a change of
    single numbers through ``parameter.data``, which leaves the version, may go unnoticed. Hooks, functions and replaced
    forwards are known by their identity: what they read is not seen, nor is a function that was replaced in a Python
    module. Other attributes are known by their values.

    None are models with an attribute that cannot be pickled, or with a tensor whose changes cannot be seen: one of
    inference mode, which has no version, or one without numbers, unless a hook of accelerate brings them.

    >>> layer = nn.Linear(2, 2)
    >>> before = fingerprint(layer)
    >>> fingerprint(layer) == before
    True
    >>> _ = layer.weight.detach().mul_(2)
    >>> fingerprint(layer) == before
    False
    """
    modules = list(model.modules())
    reader = _Reader({id(m): i for i, m in enumerate(modules)}, any("_hf_hook" in vars(m) for m in modules))
    try:
        state, numbers = [reader.module(m) for m in modules], reader.sampled()
    except Exception:  # reading runs code of the attributes, which can raise anything
        return None
    autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return (
        state,
        numbers,
        autocast,
        list(torch_module._global_forward_pre_hooks),
        list(torch_module._global_forward_hooks),
    )


Key = tuple[Any, ...]
"""Keys are compared, not hashed, and keep no part of a model alive."""

SAMPLE = 1024
"""How many numbers of a tensor are read at most."""

BOOKKEEPING = vars(nn.Module()).keys() - {"training"} | {"_output_capturing_hooks_installed"}
"""Attributes that are read by other means, or tell nothing: transformers sets the last one beside its own hooks."""
PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
BY_IDENTITY = (type, FunctionType, BuiltinFunctionType, MethodType, functools.partial, torch.ScriptObject)


class _Reader:
    """Keys of modules and of their attributes.

    Args:
        places: the places of the modules in the model, by their ids.
        offloaded: whether hooks of accelerate bring the numbers of tensors that have none.
    """

    def __init__(self, places: Mapping[int, int], offloaded: bool) -> None:
        self.places, self.offloaded = places, offloaded
        self.known: dict[int, tuple[object, Any]] = {}
        """Objects and their keys by their ids: all modules have the same configuration."""
        self.samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}

    def module(self, module: nn.Module) -> Key:
        tensors = (*module._parameters.items(), *module._buffers.items())
        hooks = (*module._forward_pre_hooks.items(), *module._forward_hooks.items())
        return (
            type(module),
            WeakIdRef(type(module).forward),
            [(name, self.places[id(x)]) for name, x in module._modules.items() if x is not None],
            [(name, type(x), self._of_tensor(x)) for name, x in tensors if x is not None],
            [
                (name, repr(x) if type(x) in PLAIN else self.key(x))
                for name, x in vars(module).items()
                if name not in BOOKKEEPING
            ],
            [n for n, hook in hooks if getattr(hook, "__module__", "") != "transformers.utils.output_capturing"],
        )

    def key(self, x: Any) -> Any:
        """The key of a value; in a cycle of objects, the number of the object."""
        if type(x) in PLAIN:
            return repr(x)
        if id(x) in self.places:
            return self.places[id(x)]
        if id(x) not in self.known:
            self.known[id(x)] = x, ("cycle", len(self.known))
            self.known[id(x)] = x, (type(x), self._of(x))
        return self.known[id(x)][1]

    def _of(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._of_tensor(x)
        if isinstance(x, BY_IDENTITY):
            return WeakIdRef(x)
        if isinstance(x, set | frozenset):
            return sorted(repr(self.key(item)) for item in x)
        if type(x) in (list, tuple):
            return [self.key(item) for item in x]
        if type(x) is dict:
            return [(self.key(name), self.key(item)) for name, item in x.items()]
        reduced = x.__reduce_ex__(4)  # what a pickle holds
        if isinstance(reduced, str):
            return reduced
        parts: list[Any] = [*reduced, None, None, None]
        return [self.key(item) for item in (*parts[:3], [*(parts[3] or ())], [*(parts[4] or ())])]

    def _of_tensor(self, x: Tensor) -> Any:
        about = x.dtype, x.shape, [(name, self.key(value)) for name, value in vars(x).items()]
        if type(x) not in (Tensor, nn.Parameter) and is_traceable_wrapper_subclass(x):
            names, context = x.__tensor_flatten__()
            return about, self.key(context), [self.key(getattr(x, name)) for name in names]
        if x.is_meta and self.offloaded:
            return about
        if x.is_meta or x.layout != torch.strided or x.is_inference():
            raise TypeError(f"changes of a {type(x).__name__} cannot be seen")
        self._sample(x.int_repr() if x.is_quantized else x)
        return about, WeakIdRef(x), x.data_ptr(), x._version, x.stride()

    def _sample(self, x: Tensor) -> None:
        """Take numbers of a tensor, from all its columns if there are no more of them than numbers."""
        n, step = x.numel(), max(1, -(-x.numel() // SAMPLE))
        x = x if x.is_contiguous() else x.permute(sorted(range(x.ndim), key=x.stride, reverse=True)).contiguous()
        while step > 1 and math.gcd(step, x.shape[-1]) > 1:
            step += 1
        numbers = x.as_strided((-(-n // step),), (step,))
        self.samples.setdefault((x.device, x.dtype), []).append(numbers)

    def sampled(self) -> list[bytes]:
        """Hashes of all numbers taken, which are read from a device together."""
        together = (torch.cat(numbers).view(torch.uint8).cpu().numpy() for numbers in self.samples.values())
        return [xxhash.xxh3_128_digest(numbers.data) for numbers in together]


def weights_hash(model: nn.Module) -> str:
    """A hash of names, shapes, dtypes and bytes of all parameters and buffers, which is the same in every process."""
    state = xxhash.xxh3_128()
    for name, x in model.state_dict().items():
        state.update(f"{name} {type(x).__name__}".encode())
        if isinstance(x, Tensor):
            state.update(f"{tuple(x.shape)} {x.dtype}".encode())
            state.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


TOKENS = 64  # length of a text (Gu et al. 2025, arXiv:2410.10781, section 3), or the longest that the model can read
LEAST = 8  # shortest text that can be probed, in tokens
REPEATS = 3

Scores = dict[str, Float[Tensor, " h"]]
ScoresByLayer = dict[tuple[str, int], Scores]
_KEPT: WeakKeyDictionary[nn.Module, tuple[Key | None, dict[Hashable, ScoresByLayer]]] = WeakKeyDictionary()


def probe(
    model: nn.Module,
    ids: Int[Tensor, "b n"],
    special: Collection[int] = (),
    layers: Collection[int] | None = None,
    seed: int = 0,
    *,
    again: bool = False,
) -> ScoresByLayer:
    """Scores of every head of self-attention, by module and layer: the variables ``probe_…`` of `VARIABLES`.

    They are kept for the next call with the same model, which is recognised by its `fingerprint`.

    Args:
        model: as in `qkv.profile`; it must read token ids.
        ids: a text; the special tokens at its start and end are put around every synthetic text.
        special: ids of special tokens.
        layers: which layers to probe; all if None.
        seed: seed of the random tokens.
        again: run the model even if it seems to be the same.
    """
    start, end = _frame(ids[0].cpu(), set(special))
    of_layers = None if layers is None else frozenset(layers)
    asked = (tuple(start.tolist()), tuple(end.tolist()), frozenset(special), of_layers)
    now = None if ACTIVE.get(model) else fingerprint(model)
    before, kept = _KEPT.get(model, (None, {}))
    if again or now is None or now != before:
        kept = {}
    if (*asked, seed) not in kept:
        kept[*asked, seed] = _probed(model, start, end, special, layers, seed)
    if now is not None:
        _KEPT[model] = (now, kept)
    return kept[*asked, seed]


def _probed(
    model: nn.Module, start: Tensor, end: Tensor, special: Collection[int], layers: Collection[int] | None, seed: int
) -> ScoresByLayer:
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
        for observed in calls:
            if observed.group == "cross" or observed.call.q.shape[2] != observed.call.k.shape[2]:
                continue
            shares = rows_in_shares(weights_of(observed.call), observed.call.normalizer)
            yield by_layer.setdefault((observed.module, observed.layer), {}), shares, observed.call

    by_layer: ScoresByLayer = {}
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
    return copied_to_cpu(by_layer)


def _frame(ids: Tensor, special: set[int]) -> tuple[Tensor, Tensor]:
    """The special tokens at the start and at the end of a text."""
    plain = [i for i, x in enumerate(ids.tolist()) if x not in special]
    return (ids[: plain[0]], ids[plain[-1] + 1 :]) if plain else (ids[:1], ids[1:][-1:])


def _visible_queries(call: Call) -> Tensor:
    """How many queries may attend to the first key: (b, h); a dimension is 1 if the number is the same along it."""
    n = call.q.shape[2]
    if call.mask is None:
        return call.q.new_full((1, 1), n)
    return call.mask.visible(Region(slice(0, n), slice(0, 1)), call.grid)[..., 0].sum(2).clamp(min=1)


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
