"""What a model loses when its cache evicts keys: attention on evicted keys, and loss.

Policies at a budget of B keys for each layer and key head:

- ``window``: the last B keys, including the query's own (`qkv.cache.Sliding`).
- ``sinks``: the first few and the last B − few keys (StreamingLLM: Xiao et al. 2024, arXiv:2309.17453;
  `qkv.cache.Sinks`).
- ``heavy``: the last ⌈B/2⌉ keys and, of the older keys, the ⌊B/2⌋ that have received the most attention (H2O: Zhang et
  al. 2023, arXiv:2306.14048; `qkv.cache.HeavyHitters`).
- ``snapkv``, ``tova``, ``keydiff``, ``knorm``: see `qkv.profiler.analyses.policies`.
- your own: a subclass of `qkv.cache.Evicting`, or its name if an installed package registers it in the group of entry
  points ``qkv.policies``. It keeps the last ⌈B/2⌉ keys and, of the older keys, the ⌊B/2⌋ of most worth.

There are two estimates, which answer different questions:

**From the profile.** ``mass_lost`` is the share of its row that a query of the model with a full cache puts on keys
that the policy would have evicted, averaged over queries. It does not include the effect on later layers and tokens.
``snapkv``, ``tova``, ``keydiff`` and ``knorm`` decide at every query, as a cache would. For ``heavy`` and your own
policies, keys are ranked by their worth at the *end* of the text, from the weight received from all queries of the
model with a full cache, summed over the query heads that share a key head. This is an oracle: at query i a real cache
only knows the weights up to then, of queries for which keys were already evicted.

**By running.** ``delta_nats`` is the rise of the loss on the next token when every layer attends through the cache;
all policies then decide online. Models of qkv have caches for ``window``, ``sinks``, ``heavy`` and your own. Otherwise
one forward runs under the masks that a policy makes from the queries and keys of each layer.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv._files import write_atomically
from qkv._progress import Step, bar
from qkv.cache import Cache, Evicting, Full, HeavyHitters, Sinks, Sliding
from qkv.cache.evicting import POLICIES
from qkv.engine import Call
from qkv.errors import InputError, nearest
from qkv.huggingface.attention import routes
from qkv.huggingface.client import attend, routed
from qkv.kernels import changing
from qkv.masks import Mask, Predicate, Prefix, Window
from qkv.models.decoder import DecoderLM
from qkv.models.generation import evaluation_mode
from qkv.models.loading import load_if_named
from qkv.models.loss import token_loss
from qkv.profiler.analyses.policies import ONLINE, OfCache, Online, held_keys
from qkv.profiler.capture.datasets import calls_of, without_values
from qkv.profiler.capture.inputs import batches, sequences_of
from qkv.profiler.capture.record import ObservedCall
from qkv.statistics.measure import in_shares, row_state, sweep

if TYPE_CHECKING:
    import pandas as pd


BUILT_IN = ("window", "sinks", "heavy")


@dataclass(frozen=True)
class Policy:
    """One policy, for caches of any budget."""

    name: str
    cache: Callable[[int], Cache] | None
    """Makes the cache of one layer that holds a budget of keys, if there is one."""
    mask: Callable[[int], Mask] | None = None
    """The retained keys as a mask to combine with the causal one; None if they depend on the weights."""
    meaning: str = ""
    """What it keeps, for legends."""
    online: Online | None = None
    """Decides from the queries and keys of a layer, without a cache."""

    def kept(self, call: Call, budget: int) -> Mask:
        """The keys that each query of a layer can attend to, as a cache of this budget would hold them."""
        if self.mask is not None:
            return self.mask(budget)
        return held_keys(call, self.online or OfCache(self._evicting(budget)), budget)

    def worth(self, received: Tensor, budget: int) -> tuple[Tensor, int, int]:
        """The worth of every key (b, hkv, n) at the end of a text, and how many old and recent keys are retained."""
        cache = self._evicting(budget)
        queries = torch.arange(received.shape[-1], 0, -1, device=received.device).expand(received.shape)
        return cache.checked_worth(received, queries), cache.keys - cache.recent, cache.recent

    def _evicting(self, budget: int) -> Evicting:
        cache = self.cache(budget) if self.cache else None
        assert isinstance(cache, Evicting)
        return cache


def policies_of(chosen: Sequence[str | type[Evicting]], first: int) -> tuple[Policy, ...]:
    """The policies of names and of `Evicting` classes. `first` is the number of keys that "sinks" always keeps."""
    if first < 1:
        raise InputError(f"first is {first}, expected at least 1 key")
    if not chosen:
        raise InputError(f"policies is empty, expected some of {', '.join(BUILT_IN)}")
    built_in = (
        Policy("window", Sliding, Window, "the last keys"),
        Policy(
            "sinks",
            lambda budget: Sinks(first, budget - first),
            lambda budget: Prefix(first) | Window(budget - first),
            f"the first {first} and the last keys",
        ),
        Policy(
            "heavy", lambda budget: HeavyHitters(budget // 2, budget - budget // 2), None,
            "half last keys, half most attended",
        ),
    )  # fmt: skip
    by_name = {policy.name: policy for policy in built_in}
    by_name |= {one.name: Policy(one.name, None, None, one.meaning, one) for one in ONLINE}
    found = tuple(
        by_name[each] if isinstance(each, str) and each in by_name else _ranked(each, by_name) for each in chosen
    )
    names = [policy.name for policy in found]
    if len(set(names)) < len(names):
        raise InputError(f"policies is {names}, expected each policy once")
    return found


def _ranked(policy: str | type[Evicting], built_in: dict[str, Policy]) -> Policy:
    """An `Evicting` class, or one that an installed package registers: half of its keys are the last ones."""
    made: type[Evicting]
    if isinstance(policy, str):
        known = [*built_in, *(name for name in POLICIES.names() if name not in POLICIES.built_in)]
        if policy not in known:
            raise InputError(f"policies has {policy!r}, expected some of {', '.join(known)}{nearest(policy, known)}")
        made = POLICIES.load(policy)
    elif isinstance(policy, type) and issubclass(policy, Evicting):
        made = policy
    else:
        raise InputError(f"policies has {policy!r}, expected names and subclasses of qkv.cache.Evicting")
    name: str = getattr(made, "name", made.__name__)
    if name in POLICIES.built_in:
        raise InputError(f"policies has a class with the name {name!r}, which is a built-in policy")
    return Policy(
        name, lambda budget: made(budget, budget - budget // 2), None, "half last keys, half the older of most worth"
    )


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
    """A row for each policy and budget: ``nats``, the loss on the next token, and ``delta_nats``, its rise over the
    policy "full", which keeps all keys. None if the model was not run."""
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
    run: bool = True,
    tokenizer: Any = None,
    name: str = "",
    progress: bool = True,
) -> Eviction:
    """Measure the cost of each eviction policy at each budget, from the attention weights and by running the model.

    Models of qkv (`DecoderLM`) are run with the caches themselves; ``sinks`` then rotates keys by their slot in the
    cache, as StreamingLLM does. Causal language models of Hugging Face are run with masks on their own attention: the
    same keys, but in ``sinks`` not rotated by slot. So is every model with a policy that has no cache.

    Args:
        model: a causal language model as in `qkv.profile`, or a name for `qkv.load`.
        inputs: as in `qkv.profile`. Every text is run separately, without its padding.
        budgets: numbers of keys in the cache of each layer, at least 2 and more than `first`.
        policies: some of ``window``, ``sinks``, ``heavy``, ``snapkv``, ``tova``, ``keydiff``, ``knorm``, names
            registered by installed packages, and subclasses of `qkv.cache.Evicting`.
        first: number of first keys that ``sinks`` keeps.
        run: also run the model, to measure its loss.
        tokenizer: converts text to ids; if `model` is a name, its tokenizer is loaded.
        name: name of the model, kept in the attributes.
        progress: show a progress bar while it runs, if standard error is a terminal.

    Raises:
        InputError: for a model that is not causal, or cannot be run with a policy; for invalid budgets or policies.

    >>> found = eviction("qkv-mini", "def f(x):\\n    return x", budgets=[6], policies=["window"], progress=False)
    >>> found.mass.columns.tolist()
    ['policy', 'budget', 'layer', 'head', 'mass_lost']
    >>> found.loss["policy"].tolist()
    ['full', 'window']
    """
    compared = policies_of(policies, first)
    _check(budgets, compared, first)
    loaded = load_if_named(model, tokenizer, name, inputs=inputs, head=run)
    model, tokenizer = loaded.model, loaded.tokenizer
    mode = run_mode(model) if run else None  # raises before anything is computed
    texts = list(_texts(model, inputs, tokenizer))
    settings = [(policy, budget) for policy in compared for budget in budgets]
    lengths = [ids.shape[1] for ids in texts]
    lost: dict[tuple[str, int, int], Tensor] = {}
    nats: dict[tuple[Policy | None, int], float] = dict.fromkeys([(None, 0), *settings], 0.0)
    with bar("evicting", "tokens", sum(lengths) * (1 + (len(nats) if run else 0)), show=progress) as step:
        for ids in texts:
            _add_lost(lost, model, ids, settings, step)
            for (policy, budget), total in nats.items() if mode else ():
                assert mode is not None
                nats[policy, budget] = total + nats_of(mode, model, ids, policy, budget, step)
    attrs = {
        "model": loaded.name, "texts": len(texts), "tokens": sum(lengths),
        "longest": max(lengths), "first": first, "run": mode,
    }  # fmt: skip
    predicted = sum(lengths) - len(lengths)
    loss = _loss_table({key: value / predicted for key, value in nats.items()}) if run else None
    attrs["policies"] = {policy.name: policy.meaning for policy in compared}
    return Eviction(_mass_table(lost, sum(lengths), [policy.name for policy in compared]), loss, attrs)


def _check(budgets: Sequence[int], policies: Sequence[Policy], first: int) -> None:
    sinks = any(policy.name == "sinks" for policy in policies)
    least = max(2, first + 1) if sinks else 2
    if not budgets:
        raise InputError("budgets is empty, expected numbers of keys")
    if min(budgets) < least:
        why = f", because policy 'sinks' keeps the first {first}" if sinks else ""
        raise InputError(f"budgets is {list(budgets)}, expected at least {least} keys{why}")


def _texts(model: nn.Module, inputs: Any, tokenizer: Any) -> Iterator[Int[Tensor, "1 n"]]:
    """Token ids of each text, without padding."""
    for batch in batches(model, inputs, tokenizer, None):
        sequences = sequences_of(model, batch)
        if sequences.source is None or sequences.two:
            raise InputError(
                f"model {type(model).__name__} does not read one sequence of tokens, expected a language model"
            )
        for item, ids in enumerate(sequences.source):
            keep = sequences.real_source.get(len(ids))
            kept = ids if keep is None else ids[keep[item]]
            if len(kept) < 2:
                raise InputError(
                    f"inputs has a text of {len(kept)} token, expected at least 2, to predict the last one"
                )
            yield kept[None]


# --- from the profile -------------------------------------------------------------------------------------------------


def _add_lost(
    lost: dict[tuple[str, int, int], Tensor], model: nn.Module, ids: Tensor, settings: list[tuple[Policy, int]],
    step: Step,
) -> None:  # fmt: skip
    """Add the lost mass of one text, summed over its queries, to `lost`: (heads,) for each policy, budget and layer."""
    [batch] = batches(model, ids, None, None)
    calls = [without_values(observed) for observed in calls_of(model, batch)]
    calls = [observed for observed in calls if observed.causal and observed.call.q.shape[2] == observed.call.k.shape[2]]
    if not calls:
        raise InputError(
            f"model {type(model).__name__} has no causal self-attention, expected a model that can run with a cache"
        )
    for observed in calls:
        for (policy, budget), mass in mass_lost(observed, settings).items():
            key = policy.name, budget, observed.layer
            lost[key] = lost.get(key, 0) + mass[0].double().sum(-1).cpu()
        step(ids.shape[1] / len(calls))


def mass_lost(
    observed: ObservedCall, settings: Sequence[tuple[Policy, int]]
) -> dict[tuple[Policy, int], Float[Tensor, "b h nq"]]:
    """The share of every query's row on keys that each policy, at a budget, would have evicted."""
    names = {f"{policy.name} {budget}": (policy, budget) for policy, budget in settings}
    fixed = {
        name: ~policy.kept(observed.call, budget)
        for name, (policy, budget) in names.items()
        if policy.mask is not None or policy.online is not None
    }
    rows = row_state(observed.call, observed.lse)
    found = sweep(observed.call, rows, mass=fixed)
    masses = dict(in_shares(observed.call, found, mass=fixed).mass)
    ranked = {name: _evicted(found.received, observed, *names[name]) for name in names if name not in fixed}
    if ranked:
        masses |= in_shares(observed.call, sweep(observed.call, rows, mass=ranked), mass=ranked).mass
    return {names[name]: mass for name, mass in masses.items()}


def _evicted(received: Float[Tensor, "b h nk"], observed: ObservedCall, policy: Policy, budget: int) -> Mask:
    """The pairs of a query and a key that a policy has evicted, which ranks keys by worth at the end of the text."""
    group = received.shape[1] // observed.call.k.shape[1]
    worth, old, recent = policy.worth(received.double().unflatten(1, (-1, group)).sum(2), budget)
    ends = expiry(worth, old, recent).repeat_interleave(group, 1)
    return Predicate(lambda b, h, q, k: q >= ends[b, h, k])


def expiry(worth: Float[Tensor, "b hkv nk"], old: int, recent: int) -> Int[Tensor, "b hkv nk"]:
    """The first query after each key's eviction, if the last `recent` keys and `old` older ones are retained.

    A key that has left the window of recent keys is retained while fewer than `old` other keys outside of the window
    are of more worth; of equal keys the oldest is evicted first. For a key that is never evicted the result is n_keys.

    >>> expiry(torch.tensor([[[5.0, 1, 3, 2, 1]]]), old=1, recent=2).tolist()
    [[[5, 3, 4, 5, 5]]]
    """
    b, heads, n = worth.shape
    ends = torch.full((b, heads, n), n)
    for item, head in ((i, h) for i in range(b) for h in range(heads)):
        kept: list[tuple[float, int]] = []
        for key, value in enumerate(worth[item, head, : max(0, n - recent)].tolist()):
            heapq.heappush(kept, (value, key))
            if len(kept) > old:
                ends[item, head, heapq.heappop(kept)[1]] = key + recent
    return ends.to(worth.device)


# --- tables -----------------------------------------------------------------------------------------------------------


def _mass_table(lost: dict[tuple[str, int, int], Tensor], queries: int, names: list[str]) -> pd.DataFrame:
    import pandas as pd

    rows = [
        {"policy": policy, "budget": budget, "layer": layer, "head": head, "mass_lost": value / queries}
        for (policy, budget, layer), values in lost.items()
        for head, value in enumerate(values.tolist())
    ]
    order = {name: at for at, name in enumerate(names)}
    return pd.DataFrame(rows).sort_values(
        ["policy", "budget", "layer", "head"], key=lambda x: x.map(order) if x.name == "policy" else x,
        ignore_index=True,
    )  # fmt: skip


def _loss_table(nats: dict[tuple[Policy | None, int], float]) -> pd.DataFrame:
    import pandas as pd

    full = nats[None, 0]
    rows = [
        {"policy": getattr(policy, "name", "full"), "budget": budget or None, "nats": nat, "delta_nats": nat - full}
        for (policy, budget), nat in nats.items()
    ]
    return pd.DataFrame(rows).astype({"budget": "Int64"})


CACHES, MASKS = "caches", "masks"  # run modes


def run_mode(model: nn.Module) -> str:
    """The way to run a model: `CACHES`, or `MASKS` on its own attention."""
    kind = type(model).__name__
    if isinstance(model, DecoderLM):
        return CACHES
    if not any(map(routes, model.modules())):
        raise InputError(
            f"model {kind} cannot be run with a cache of qkv; expected a qkv.models.DecoderLM or a causal language "
            "model of Hugging Face; run=False (--no-run) estimates from its attention weights alone"
        )
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        raise InputError(
            f"model {kind} has no output head, so it has no loss; expected a causal language model, such as "
            "AutoModelForCausalLM loads; run=False (--no-run) estimates from its attention weights alone"
        )
    return MASKS


@torch.no_grad()
def nats_of(
    mode: str, model: nn.Module, ids: Int[Tensor, "1 n"], policy: Policy | None, budget: int,
    on_tokens: Callable[[float], None],
) -> float:  # fmt: skip
    """The sum of the loss over the n − 1 next tokens, in nats; without a policy all keys are kept."""
    with evaluation_mode(model):
        if isinstance(model, DecoderLM) and (policy is None or policy.cache is not None):
            online = policy is not None and policy.mask is None
            chunk, begin = (1, budget) if online else (64, 0)
            make = policy.cache if policy and policy.cache else Full
            size = budget if policy else ids.shape[1]
            found = token_loss(model, ids, lambda: make(size), chunk=chunk, begin=begin, on_chunk=on_tokens)
            return float(found.sum())
        logits = _under_masks(model, ids, lambda call: policy.kept(call, budget) if policy else None)
    on_tokens(ids.shape[1])
    return float(nn.functional.cross_entropy(logits[0, :-1].double(), ids[0, 1:], reduction="sum"))


def _under_masks(model: nn.Module, ids: Tensor, kept: Callable[[Call], Mask | None]) -> Tensor:
    """The logits of a model, each of whose causal layers is restricted to the keys that `kept` makes for its call."""

    def restricted(call: Call) -> Call:
        mask = None if call.mask is None else kept(call)
        return call if mask is None or call.mask is None else replace(call, mask=call.mask & mask)

    with changing(restricted):
        if isinstance(model, DecoderLM):
            return model(ids)
        with routed(model, attend):
            logits: Tensor = model(input_ids=ids, use_cache=False).logits
            return logits
