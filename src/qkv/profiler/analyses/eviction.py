"""What a model loses when its cache evicts keys: attention on evicted keys, and loss.

A policy is a subclass of `qkv.cache.Evicting`, and decides at every query, as in a cache. Two estimates answer
different questions.

**From the profile.** ``mass_lost`` is the share of its row that a query of the model with a full cache puts on keys
that the policy would have evicted, averaged over queries. It does not include the effect on later layers and tokens.

**By running.** ``delta_nats`` is the rise of the loss on the next token when every layer attends through the cache.
Models of qkv run with caches (`qkv.cache.Sliding` for ``window``, `qkv.cache.Sinks` for ``sinks``). Otherwise one
forward runs under the masks that a policy makes from the queries, keys and values of each layer.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv._files import write_atomically
from qkv._progress import Step, bar
from qkv.attention import Attention
from qkv.cache import Cache, Evicting, Full, LastKeys, Sinks, Sliding
from qkv.cache.base import attending
from qkv.cache.evicting import policies_of
from qkv.engine import Call
from qkv.errors import InputError
from qkv.huggingface.attention import attend, cache_name, routed, routes
from qkv.huggingface.presses import presses_of
from qkv.kernels import changing, serving
from qkv.masks import Mask, Predicate
from qkv.models.decoder import DecoderLM
from qkv.models.generation import evaluation_mode
from qkv.models.loading import load_if_named
from qkv.models.loss import token_loss
from qkv.models.pretrained import tell_rotary
from qkv.profiler.analyses.ablation import Kept
from qkv.profiler.capture.datasets import calls_of, without_values
from qkv.profiler.capture.inputs import batches, texts_of, vocabulary
from qkv.profiler.capture.probes import weights_hash
from qkv.profiler.capture.record import ObservedCall
from qkv.profiler.capture.residual import attention_modules, layer_around
from qkv.profiler.data.frames import confidence
from qkv.statistics.measure import in_shares, row_state, sweep

if TYPE_CHECKING:
    import pandas as pd


BUILT_IN = ("window", "sinks", "heavy")
PROGRESS = "eviction.jsonl"
ALONE = 16
"""How many tokens at the end of the first text are read one by one, to measure their time."""
NUMBERS = 2**28
"""The logits of a batch have at most so many numbers: 1 GB in float32."""
Setting = tuple[str, int]
"""The name of a policy, and its budget."""


@dataclass(frozen=True, eq=False)
class Eviction:
    """The result of `eviction`.

    >>> import qkv
    >>> mini, tokenizer = qkv.load("qkv-mini")
    >>> ids = tokenizer("for name in names: seen.append(name)", return_tensors="pt")["input_ids"]
    >>> found = eviction(mini, ids, policies=["window"], budgets=[4], run=False)
    >>> len(found.mass) == mini.config.layers * mini.config.heads
    True
    >>> found.mass["mass_lost"].between(0, 1).all().item()
    True
    """

    mass: pd.DataFrame
    """A row for each policy, budget, layer and head: ``mass_lost``, the mean share of a row on evicted keys."""
    loss: pd.DataFrame | None
    """A row for each policy and budget: ``nats``, the loss on the next token; ``delta_nats``, its rise over the policy
    "full", which keeps all keys, and ``low`` and ``high``, the ends of its 95 % confidence interval over texts (NaN for
    one text); ``seconds``, the median for a token that is read alone; ``bytes`` of the caches of all layers. Both are
    NaN where the model cannot generate with the policy. None if the model was not run."""
    attrs: dict[str, Any]
    """Model, tokens, texts, first, and whether it was run with caches or masks."""

    def save(self, folder: Path) -> list[Path]:
        """Write mass.csv, loss.csv and eviction.json (a summary averaged over heads); returns their paths."""
        by_policy = self.mass.groupby(["policy", "budget"], sort=False)["mass_lost"].mean().reset_index()
        summary = {**self.attrs, "mass_lost": by_policy.to_dict("records")}
        files = {"mass.csv": self.mass.to_csv(index=False)}
        if self.loss is not None:
            files["loss.csv"] = self.loss.to_csv(index=False)
            summary["loss"] = json.loads(self.loss.to_json(orient="records", double_precision=15))
        files["eviction.json"] = json.dumps(summary, indent=2, ensure_ascii=False)
        for name, content in files.items():
            write_atomically(folder / name, content.encode())
        return [folder / name for name in files]


def eviction(
    model: nn.Module | str,
    inputs: str | Sequence[str] | Tensor | Mapping[str, Tensor],
    *,
    budgets: Sequence[int] = (32, 64, 128, 256),
    policies: Sequence[str | type[Evicting]] = BUILT_IN,
    first: int = 4,
    advise: bool = False,
    run: bool = True,
    counted: Collection[int] | None = None,
    tokenizer: Any = None,
    folder: str | Path | None = None,
    name: str = "",
    progress: bool = True,
) -> Eviction:
    """Measure the cost of each eviction policy at each budget, from the attention weights and by running the model.

    In models of qkv (`DecoderLM`), ``sinks`` rotates keys by their slot in the cache, as StreamingLLM does. Causal
    language models of Hugging Face are run with masks: the same keys, but in ``sinks`` not rotated by slot. Time and
    memory are those of the caches themselves, at the end of the first text, where tokens are read one by one.

    Args:
        model: a causal language model as in `qkv.profile`, or a name for `qkv.load`.
        inputs: as in `qkv.profile`. Every text is run without its padding. With several texts there is an interval.
        budgets: numbers of keys in the cache of each layer, at least 2 and more than `first`. A cache that holds every
            text whole is not measured; ``attrs["whole"]`` has such budgets.
        policies: some of ``window``, ``sinks``, ``heavy``, ``snapkv``, ``pyramid``, ``tova``, ``keydiff``, ``knorm``,
            ``expected``, ``kvpress:NAME`` (the score of a press of NVIDIA's kvpress), names registered by installed
            packages, and subclasses of `qkv.cache.Evicting`.
        first: number of first keys that ``sinks`` keeps.
        advise: read the first text with the full cache, and divide each budget among layers by what the policy changes
            there. The other texts measure "sinks advised" beside "sinks". ``attrs["advice"]`` has the keys of each
            layer, which `qkv.huggingface.evicting` takes.
        run: also run the model, to measure its loss.
        counted: positions of the tokens whose loss counts; all but the first of each text if None.
        tokenizer: converts text to ids; if `model` is a name, its tokenizer is loaded.
        folder: keeps what is finished in ``eviction.jsonl``, so that an interrupted run resumes, if all policies are
            given by name.
        name: name of the model, kept in the attributes.
        progress: show a progress bar while it runs, if standard error is a terminal.

    Raises:
        InputError: for a model that is not causal, or cannot be run with a policy; for invalid budgets or policies.

    >>> found = eviction("qkv-mini", "def f(x):\\n    return x", budgets=[6], policies=["window"], progress=False)
    >>> found.mass.columns.tolist()
    ['policy', 'budget', 'layer', 'head', 'mass_lost']
    >>> found.loss.columns.tolist()
    ['policy', 'budget', 'nats', 'delta_nats', 'low', 'high', 'seconds', 'bytes']
    """
    settings = empty_caches(budgets, policies, first)
    loaded = load_if_named(model, tokenizer, name, inputs=inputs, head=run)
    model, tokenizer = loaded.model, loaded.tokenizer
    mode = run_mode(model) if run else None  # raises before anything is computed
    tell_rotary(model, settings.values())
    texts = list(token_ids(model, inputs, tokenizer))
    read = texts[0][:1]
    if advise:
        texts = [ids for ids in (texts[0][1:], *texts[1:]) if len(ids)]
        if not texts:
            raise InputError(
                "inputs is one text, expected several: advise reads the first, and measures with the others"
            )
    lengths = [ids.shape[1] for ids in texts for _ in ids]
    if counted is not None and (not counted or min(counted) < 1 or max(counted) >= min(lengths)):
        raise InputError(f"counted is {sorted(counted)}, expected positions from 1 to {min(lengths) - 1}")
    if folder is not None and not all(isinstance(one, str) for one in policies):
        folder = None  # the code of one's own class may change between two runs
    kept = Kept(None if folder is None else Path(folder) / PROGRESS, ("key", "policy", "budget", "part"), "value")
    begin = "" if folder is None else f"{weights_hash(model)}:{first}:{None if counted is None else sorted(counted)}:"
    lost: dict[tuple[str, int, int], Tensor] = {}
    work = [ids.shape[1] for ids in texts]
    work += [*work, lengths[0]] * (1 + len(settings) * (1 + advise)) if run else []
    with presses_of(model, settings.values()), bar("evicting", "tokens", sum(work), show=progress) as step:
        advice = _advice(model, read, settings, step) if advise else {}
        settings |= {(f"{name} advised", budget): cache for (name, budget), cache in advice.items()}
        nats: dict[Setting | None, list[float]] = {setting: [] for setting in (None, *settings)}
        evicting: dict[Setting, bool] = dict.fromkeys(settings, False)
        for ids in texts:
            key = begin + xxhash.xxh3_128_hexdigest(ids.cpu().contiguous().numpy().data)
            missing = {one: cache for one, cache in settings.items() if (key, *one, "lost") not in kept.rows}
            if missing:
                kept.put({(key, *one, "lost"): x for one, x in _lost(model, ids, missing, step).items()})
            step(0 if missing else ids.shape[1])
            for setting in settings:
                found = kept.rows[key, *setting, "lost"]
                layers = len(found)
                for layer, heads in found.items():
                    at = (*setting, int(layer))
                    lost[at] = lost.get(at, 0) + torch.tensor(heads, dtype=torch.float64)
            whole: list[float] = []
            for one in nats if mode else ():
                caches = settings[one].for_layers(layers) if one else None
                holds = caches is not None and _hold(caches, ids.shape[1])
                place = (key, *(one or ("full", None)), "nats")
                losses = whole if holds else kept.rows.get(place)
                if losses is None:
                    losses = nats_of(model, ids, caches, step, counted)
                    kept.put({place: losses})
                else:
                    step(ids.shape[1])
                whole = whole or losses
                nats[one] += losses
            for setting, cache in settings.items():
                evicting[setting] |= not _hold(cache.for_layers(layers), ids.shape[1])
        held = [setting for setting, evicts in evicting.items() if not evicts]
        if len(held) == len(settings):
            raise InputError(f"budgets is {list(budgets)}, expected some below {max(lengths)}, a whole text")
        settings = {setting: cache for setting, cache in settings.items() if setting not in held}
        if mode:
            costs = _costs(model, texts[0][:1], settings, layers, step)
    nats = {setting: x for setting, x in nats.items() if setting not in held}
    lost = {at: x for at, x in lost.items() if at[:2] not in held}
    attrs: dict[str, Any] = {
        "model": loaded.name, "texts": len(lengths), "tokens": sum(lengths), "longest": max(lengths), "first": first,
        "run": mode, "whole": sorted({budget for _, budget in held}),
    }  # fmt: skip
    counts = [n - 1 if counted is None else len(counted) for n in lengths]
    loss = _loss_table(nats, counts, costs) if run else None
    attrs["policies"] = {name: cache.meaning for (name, _), cache in settings.items()}
    if advise:
        attrs["advice"] = [
            {"policy": name, "budget": budget, "keys": cache.layer_keys} for (name, budget), cache in advice.items()
        ]
    return Eviction(_mass_table(lost, sum(lengths), list(settings)), loss, attrs)


def _hold(caches: Sequence[Evicting], n: int) -> bool:
    """Whether the caches of all layers hold a whole text of n tokens."""
    return min(cache.keys for cache in caches) >= n


def empty_caches(
    budgets: Sequence[int], policies: Sequence[str | type[Evicting]], first: int
) -> dict[Setting, Evicting]:
    """An empty cache for each policy and budget."""
    least = max(2, first + 1) if "sinks" in policies else 2
    if first < 1:
        raise InputError(f"first is {first}, expected at least 1 key")
    if not isinstance(budgets, Sequence) or not all(type(x) is int for x in budgets):
        raise InputError(f"budgets is {budgets!r}, expected a list of numbers of keys")
    if not budgets:
        raise InputError("budgets is empty, expected numbers of keys")
    if min(budgets) < least:
        why = f", because policy 'sinks' keeps the first {first}" if "sinks" in policies else ""
        raise InputError(f"budgets is {list(budgets)}, expected at least {least} keys{why}")
    made = {budget: policies_of(policies, budget, first) for budget in budgets}
    return {(name, budget): made[budget][name] for name in made[budgets[0]] for budget in budgets}


def token_ids(model: nn.Module, inputs: Any, tokenizer: Any) -> Iterator[Int[Tensor, "b n"]]:
    """Token ids of the texts, without padding; consecutive texts of one length together, as their logits allow."""
    for n, same in itertools.groupby(texts_of(model, inputs, tokenizer), len):
        if n < 2:
            raise InputError(f"inputs has a text of {n} token, expected at least 2, to predict the last one")
        yield from torch.stack([*same]).split(max(1, NUMBERS // n // (vocabulary(model) or 1)))


# --- from the profile -------------------------------------------------------------------------------------------------


def _lost(
    model: nn.Module, ids: Tensor, settings: Mapping[Setting, Evicting], step: Step
) -> dict[Setting, dict[int, list[float]]]:
    """The lost mass of a batch, summed over its queries: of each head, for each policy, budget and layer."""
    [batch] = batches(model, ids, None, None)
    calls = [
        observed for observed in calls_of(model, batch)
        if observed.causal and observed.call.q.shape[2] == observed.call.k.shape[2]
    ]  # fmt: skip
    if not calls:
        raise InputError(
            f"model {type(model).__name__} has no causal self-attention, expected a model that can run with a cache"
        )
    made = {setting: cache.for_layers(len(calls)) for setting, cache in settings.items()}
    lost: dict[Setting, dict[int, list[float]]] = {setting: {} for setting in settings}
    for index, observed in enumerate(calls):
        here = {one: caches[index] for one, caches in made.items() if not _hold(caches, ids.shape[1])}
        found = mass_lost(observed, here) if here else {}
        for setting, by_layer in lost.items():
            heads = found[setting].double().sum((0, -1)) if setting in found else torch.zeros(observed.call.q.shape[1])
            by_layer[observed.layer] = heads.tolist()
        step(ids.shape[1] / len(calls))
    return lost


def mass_lost(observed: ObservedCall, caches: Mapping[Setting, Evicting]) -> dict[Setting, Float[Tensor, "b h nq"]]:
    """The share of every query's row on keys that each policy, at a budget, would have evicted."""
    hidden = {str(setting): ~held_keys(observed.call, cache) for setting, cache in caches.items()}
    call = without_values(observed).call
    found = in_shares(call, sweep(call, row_state(call, observed.lse), mass=hidden), mass=hidden).mass
    return {setting: found[str(setting)] for setting in caches}


def held_keys(call: Call, cache: Evicting) -> Mask:
    """The keys that each query can attend to, as a mask to combine with the causal one; `cache` is empty."""
    mask = cache.mask()
    if mask is not None:
        return mask
    ends = expiry(call, cache).repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
    return Predicate(lambda b, h, q, k: q < ends[b, h, k])


@torch.no_grad()
def expiry(call: Call, cache: Evicting) -> Int[Tensor, "b hkv nk"]:
    """The first query that cannot attend to each key if tokens pass through an empty cache one by one.

    For a key that is never evicted the result is the number of queries.

    Raises:
        InputError: for attention that the policy cannot serve, such as one with a window.
    """
    given, n = call.user, call.k.shape[2]
    attention = Attention(given.mask, given.biases, given.score, given.normalizer)
    ends = torch.full(call.k.shape[:3], n, device=call.k.device)
    for start, stop in itertools.pairwise([0, *range(min(n, cache.keys), n + 1)]):
        with serving(None):  # these are no calls of the model
            cache.attend(attention, *(x[:, :, start:stop] for x in (given.q, given.k, given.v)))
        if cache.evicted is not None:
            ends.scatter_(2, cache.evicted, start)
    return ends


# --- budgets for each layer -------------------------------------------------------------------------------------------

TIMES = (0.25, 0.5, 1, 2, 4)
"""At these multiples of a budget the cost of a layer is measured; no layer gets less than the first."""


def _advice(model: nn.Module, ids: Tensor, settings: Mapping[Setting, Evicting], step: Step) -> dict[Setting, Evicting]:
    """The policy of each setting with a budget for each layer."""
    found, n = dict[Setting, Evicting](), ids.shape[1]
    for (name, budget), cache in settings.items():
        if len({*cache.budgets(3)}) > 1:
            raise InputError(
                f"policies has {name!r}, which divides keys itself, expected policies whose layers hold as many keys"
            )
        least = max(budget // 4, min(budget, 8))
        grid = sorted({max(least, round(budget * times)) for times in TIMES if budget * times < n})
        costs = layer_costs(model, ids, [cache.resized(keys) for keys in grid], step)
        found[name, budget] = advised = cache.fresh()
        advised.layer_keys = divided(costs, grid, n, budget)
        advised.meaning = "budgets for each layer"
    return found


def divided(costs: Float[np.ndarray, "layers grid"], grid: Sequence[int], n: int, mean: int) -> list[int]:
    """Numbers of keys with this mean: one at a time goes to the layer whose cost it lowers most.

    Costs are interpolated over the logarithm of the number of keys; with all n keys they are 0.

    >>> divided(np.array([[4.0, 2.0], [1.0, 0.5]]), [2, 8], 32, 8)
    [13, 3]
    """
    at = np.arange(grid[0], n + 1)
    known = np.log([*grid, n])
    saved = -np.diff([np.interp(np.log(at), known, [*row, 0.0]) for row in costs], append=np.inf)
    keys, every = np.full(len(costs), grid[0]), np.arange(len(costs))
    for _ in range(mean * len(costs) - int(keys.sum())):
        keys[saved[every, keys - grid[0]].argmax()] += 1
    return [int(one) for one in keys]


@torch.no_grad()
def layer_costs(
    model: nn.Module, ids: Int[Tensor, "1 n"], caches: Sequence[Evicting], step: Step
) -> Float[np.ndarray, "layers caches"]:
    """How much the output of each attention module changes if its layer alone evicts: Σ(Δ output)² / Σ(residual)².

    The mean over queries, in one forward of the model with all keys. Layer i sees the residual stream of that forward.
    """
    names = attention_modules(model)
    around = [layer_around(name, names, model) for name in names]
    if not names or None in around or len({*around}) < len(around):
        raise InputError(f"model {type(model).__name__} has layers that advise cannot tell apart, expected a decoder")
    costs, sizes = np.zeros((len(names), len(caches))), dict[int, Tensor]()
    held = list(zip(*(cache.for_layers(len(names)) for cache in caches), strict=True))

    def enter(at: int, got: tuple[Any, ...], named: dict[str, Any]) -> None:
        sizes[at] = (got[0] if got else named["hidden_states"]).double().square().sum(-1)

    def leave(at: int, module: nn.Module, got: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        for column, cache in enumerate(held[at]):
            with changing(partial(_restricted, cache)):
                change = _output(module.forward(*got, **named)) - _output(out)
            costs[at, column] = float((change.double().square().sum(-1) / sizes[at]).mean())
        step(0, note=f"layer {at + 1} of {len(names)}")

    with ExitStack() as hooks:
        for at, (name, layer) in enumerate(zip(names, around, strict=True)):
            inside, outside = model.get_submodule(name), model.get_submodule(layer or "")
            hooks.enter_context(outside.register_forward_pre_hook(
                lambda _, *given, at=at: enter(at, *given), with_kwargs=True
            ))  # fmt: skip
            hooks.enter_context(inside.register_forward_hook(
                lambda *given, at=at: leave(at, *given), with_kwargs=True
            ))  # fmt: skip
        hooks.enter_context(evaluation_mode(model))
        hooks.enter_context(nullcontext() if isinstance(model, DecoderLM) else routed(model, attend))
        [batch] = batches(model, ids, None, None)
        model(**batch)
    return costs


def _restricted(cache: Evicting, call: Call) -> Call:
    """The call with the keys that an empty cache would hold, if it is one of the model's causal layers."""
    if call.mask is None or attending() is not None:  # a cache that finds what it would hold
        return call
    return replace(call, mask=call.mask & held_keys(call, cache.fresh()))


def _output(found: Any) -> Tensor:
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out


# --- tables -----------------------------------------------------------------------------------------------------------


def _mass_table(lost: dict[tuple[str, int, int], Tensor], queries: int, settings: list[Setting]) -> pd.DataFrame:
    import pandas as pd

    by_setting = sorted(lost.items(), key=lambda one: (settings.index(one[0][:2]), one[0][2]))
    rows = [(*at, head, value / queries) for at, values in by_setting for head, value in enumerate(values.tolist())]
    return pd.DataFrame(rows, columns=["policy", "budget", "layer", "head", "mass_lost"])


def _loss_table(
    nats: Mapping[Setting | None, list[float]], tokens: list[int], costs: Mapping[Any, Any]
) -> pd.DataFrame:
    import pandas as pd

    rows = []
    for setting, sums in nats.items():
        ends = confidence([a - b for a, b in zip(sums, nats[None], strict=True)], sizes=tokens)
        if setting is None or len(tokens) == 1:
            ends = ends[0], math.nan, math.nan
        rows.append((*(setting or ("full", None)), sum(sums) / sum(tokens), *ends, *costs[setting]))
    columns = ["policy", "budget", "nats", "delta_nats", "low", "high", "seconds", "bytes"]
    return pd.DataFrame(rows, columns=columns).astype({"budget": "Int64", "bytes": "Int64"})


def run_mode(model: nn.Module) -> str:
    """The way to run a model: "caches", or "masks" on its own attention."""
    if isinstance(model, DecoderLM):
        return "caches"
    problem = None if any(map(routes, model.modules())) else "cannot be run with a cache of qkv"
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        problem = problem or "has no output head, so it has no loss"
    if problem is not None:
        raise InputError(
            f"model {type(model).__name__} {problem}; expected a qkv.models.DecoderLM or a causal language model of "
            "Hugging Face, such as AutoModelForCausalLM loads; run=False (--no-run) estimates from its attention "
            "weights alone"
        )
    return "masks"


@torch.no_grad()
def nats_of(
    model: nn.Module,
    ids: Int[Tensor, "b n"],
    caches: Sequence[Evicting] | None,
    on_tokens: Callable[[float], None],
    counted: Collection[int] | None = None,
) -> list[float]:
    """For each text the sum of the loss over its n − 1 next tokens, or those at some positions, in nats, with these
    caches of the layers; None keeps all keys."""
    at = torch.tensor(range(1, ids.shape[1]) if counted is None else sorted(counted)) - 1
    with evaluation_mode(model):
        if isinstance(model, DecoderLM):
            made = iter(_own(cache) for cache in caches) if caches else (Full(ids.shape[1]) for _ in itertools.count())
            online = caches is not None and caches[0].mask() is None
            chunk, begin = (1, min(cache.keys for cache in caches)) if caches and online else (64, 0)
            found = token_loss(model, ids, made.__next__, chunk=chunk, begin=begin, on_chunk=on_tokens)
            return found[:, at].sum(1).tolist()
        logits = _under_masks(model, ids, caches)
    on_tokens(ids.shape[1])
    loss = nn.functional.cross_entropy
    return [float(loss(x[at].double(), text[at + 1], reduction="sum")) for x, text in zip(logits, ids, strict=True)]


@torch.no_grad()
def _costs(
    model: Any, ids: Int[Tensor, "1 n"], settings: Mapping[Setting, Evicting], layers: int, step: Step
) -> dict[Setting | None, tuple[float, float]]:
    """The median seconds of the last `ALONE` tokens of a text, read one by one, and the bytes of all caches.

    All caches read a token before the next one, so that a slow moment of the machine affects all. Both numbers are NaN
    where a model of Hugging Face cannot generate with a cache.
    """
    if not (own := isinstance(model, DecoderLM)):
        from qkv.huggingface.generation import attending_through
    held, states, seconds = dict[Any, list[Any]](), dict[Any, Any](), dict[Any, list[float]]()

    def read(key: Setting | None, tokens: Tensor) -> float:
        with nullcontext() if own else attending_through(model, held[key]) as cache:
            started = time.perf_counter()
            batch = {"input_ids": tokens, cache_name(model): cache}
            logits = model.step(tokens, states[key]) if own else model(**batch).logits
            int(logits[0, -1:].argmax())  # waits for the device
            return time.perf_counter() - started

    found, alone = dict[Setting | None, tuple[float, float]](), min(ALONE, ids.shape[1] // 2)
    with evaluation_mode(model):
        for key, cache in ((None, LastKeys(ids.shape[1])), *settings.items()):
            held[key] = [_own(one) if own else one for one in cache.for_layers(layers)]
            states[key], found[key] = model.start(cache=iter(held[key]).__next__) if own else None, (math.nan, math.nan)
            with suppress(InputError):
                read(key, ids[:, :-alone])
                seconds[key] = []
            step(ids.shape[1])
        for token in ids[:, -alone:].split(1, 1):
            for key, some in seconds.items():
                some.append(read(key, token))
    return found | {key: (statistics.median(x), sum(c.nbytes for c in held[key])) for key, x in seconds.items()}


def _own(cache: Evicting) -> Cache:
    """The cache of a policy in a model of qkv: chunks of any length through those that keep keys in order."""
    if not isinstance(cache, LastKeys):
        return cache
    return Sinks(cache.first, cache.keys - cache.first) if cache.first else Sliding(cache.keys)


def _under_masks(model: nn.Module, ids: Tensor, caches: Sequence[Evicting] | None) -> Tensor:
    """The logits of a model of Hugging Face, whose causal layers attend to the keys that these caches would hold."""
    layers = iter(caches or ())

    def restricted(call: Call) -> Call:
        if caches is None or call.mask is None or attending() is not None:
            return call
        return _restricted(next(layers), call)

    with changing(restricted), routed(model, attend):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return logits
