"""Observe the attention of a model while it runs.

Inside `observe` every call of attention comes to us: those of Hugging Face models through transformers' interface, ours
where `qkv.kernels.serve` shows them, and what a model computes in its own way through `intercept`. One kernel pass
gives the output the model goes on with *and* what the statistics follow from, so the forward is not paid twice, and no
n × n tensor is made but by models that make one themselves. The model and transformers' registries are as they were
afterwards, whatever happens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from qkv import ring
from qkv._engine.call import Call, Result, at_least_float32, detached
from qkv._engine.row_state import RowState
from qkv.errors import InputError
from qkv.huggingface.attention import call_of, routes
from qkv.huggingface.routing import routed
from qkv.kernels import eager, serve, watching
from qkv.masks import And, Dense, Mask
from qkv.nn.composition import Composition
from qkv.profiler.capture import groups
from qkv.profiler.capture.geometry import geometry
from qkv.profiler.capture.inputs import Sequences
from qkv.profiler.capture.intercept import Intercept
from qkv.profiler.capture.outputs import Inputs, recorded_inputs, returned
from qkv.profiler.capture.torch_calls import of_scores
from qkv.profiler.data.variables import UNFUSED
from qkv.ring import Shared
from qkv.statistics import Local, Statistic, Streaming
from qkv.statistics.measure import row_state, sweep
from qkv.statistics.sums import Statistics

PREFIX = 64  # tokens over which sink scores are taken (Gu et al. 2025, arXiv:2410.10781, section 3)
FORMED = ("softmax", "outputs")  # sources that give weights and nothing else: no queries, keys or values


@dataclass(frozen=True)
class Record:
    """What one attention call of the model did."""

    module: str
    group: str
    layer: int
    statistics: Statistics
    geometry: dict[str, Tensor]
    weights: Tensor | None
    queries: Tensor | None  # (batch, nq), True at real tokens, or None if all are
    keys: Tensor | None
    causal: bool


@dataclass(frozen=True, eq=False)
class Seen:
    """One attention call of the model, with what is known of the module that made it."""

    module: str
    group: str
    layer: int
    call: Call
    lse: Tensor | None
    queries: Tensor | None  # (batch, nq), True at real tokens, or None if all are
    keys: Tensor | None
    first: int | Tensor  # which key is the first of its text, one for each batch item with padding on the left
    causal: bool
    source: str  # of the numbers: see `qkv.profile`; if it is one of `FORMED`, the call knows no vectors (v is NaN)


@dataclass
class Observer:
    """Settings and findings of one observation."""

    model: nn.Module
    layers: Collection[int] | None = None
    local_window: int = 8
    map_tokens: int = 256
    map_bins: int = 64
    statistics: Sequence[Statistic] = ()  # of one's own
    on_call: Callable[[str], None] = lambda module: None
    take: Callable[[Seen], None] | None = None  # gets the calls themselves, which are then not measured
    # Real tokens by length: of queries whose keys are others; of keys where the model's own mask does not say.
    query_masks: dict[int, Tensor] = field(default_factory=dict)
    key_masks: dict[int, Tensor] = field(default_factory=dict)
    sequences: Sequences = field(default_factory=Sequences)
    records: list[Record] = field(default_factory=list)
    fired: list[str] = field(default_factory=list)
    outside: set[str] = field(default_factory=set)
    group: ProcessGroup | None = None  # of processes that share the sequence, if some do
    sources: dict[str, str] = field(default_factory=dict)  # of each module's numbers: see `qkv.profile`

    def __post_init__(self) -> None:
        whole = type(self.model).__name__
        self.names = {id(module): name or whole for name, module in self.model.named_modules()}
        self.expected = [self.names[id(module)] for module in self.model.modules() if routes(module)]
        self._two_sided = groups.is_two_sided(self.model)
        self._calls: dict[str, int] = {}
        self._running: list[str] = []  # modules whose forward is at work, the innermost last
        self._steps: dict[str, _Steps] = {}  # the last of each module in this forward
        self._unjoined: list[_Steps] = []

    def deepest(self) -> int:
        """Number of the last attention layer of the group that has most."""
        return max(self._calls.values(), default=0) - 1

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
    ) -> tuple[Tensor, None]:
        """What transformers calls for attention: (batch, heads, length, head_dim) in, (batch, nq, heads, dv) out."""
        name = self.names.get(id(module), type(module).__name__)
        call, keys = call_of(module, name, query, key, value, attention_mask, **arguments)
        with watching(None):  # it is recorded here, where the module is known for certain
            result = serve(call)
        self.sources[name] = "interface"
        self._record(name, call, result, groups.of_transformers(name, self.model), _is_causal(call.mask), keys)
        return result.out.transpose(1, 2).contiguous(), None

    def see(self, call: Call | Shared, result: Result) -> None:
        """What `serve` shows: a call of the innermost module at work. Calls outside of the model are not its own."""
        if not self._running:
            return
        if isinstance(call, Shared):
            self._see_shared(call, result)
            return
        name, n_queries = self._running[-1], call.q.shape[2]
        self.sources[name] = "qkv"
        causal = _is_causal(call.mask)
        step = n_queries == 1 and not causal and self.take is None
        before = self._steps.get(name)
        if step and before is not None and torch.equal(before.asked, call.k):
            self._note(name, call)
            of_keys = [s.name for s in self.statistics if s.over == "key"]
            if of_keys:
                raise InputError(
                    f"{name} attends step by step, one query at a time, which gives no statistics of keys; got "
                    f"{', '.join(of_keys)}, expected statistics of queries"
                )
            if before.at is not None:
                before.add(*self._measured(name, call, result, first=before.first, whole=False))
            return
        self._record(name, call, result, self._group(name, call, causal), causal, None, step=step)

    def _see_shared(self, shared: Shared, result: Result) -> None:
        """A call that several processes make together: each records the statistics of the whole sequence."""
        name, call = self._running[-1], detached(shared.call)
        if self.take is not None or self.key_masks or self.query_masks:
            what = "padding" if self.take is None else "more than statistics"
            raise InputError(f"{name} shares its sequence with other processes, of which {what} is not known here")
        if self.statistics:
            raise InputError(
                f"{name} shares its sequence with other processes, which gives no statistics of one's own; got "
                f"statistics named {', '.join(s.name for s in self.statistics)}, expected none"
            )
        self.sources[name], self.group = "qkv", shared.group
        self._note(name, call)
        causal = _is_causal(call.mask)
        group = "self" if shared.grid.n_queries == shared.grid.n_keys else "cross"
        layer = self._calls.get(group, 0)
        self._calls[group] = layer + 1
        if self.layers is None or layer in self.layers:
            statistics = sweep(
                call, RowState(result.lse), mass=self._masses(0, shared.grid.n_keys), prefix_keys=PREFIX, shared=shared
            )
            whole = shared_statistics(statistics, shared.group)
            self.records.append(Record(name, group, layer, whole, {}, None, None, None, causal))

    def _masses(self, first: int | Tensor, n_keys: int) -> dict[str, Mask]:
        """Masks inside which the weight is told."""
        return {s.name: s.mask for s in (Local(self.local_window), Streaming(first, n_keys))}

    def intercept(self) -> Intercept:
        """What sees attention that the model computes in its own way."""
        return Intercept(self.model, self.names, self.expected, self._found, self.outside)

    def _found(self, name: str, source: str, call: Call, result: Result) -> None:
        self.sources[name] = source
        mask, real = call.mask, self.query_masks.get(call.q.shape[2])
        if isinstance(mask, Dense) and real is not None and len(real) == len(mask.tensor):
            mask = Dense(mask.tensor & real[:, None, :, None])  # padding may look anywhere
        causal = _is_causal(mask)
        theirs = type(self.model).__module__.startswith("transformers.")
        group = groups.of_transformers(name, self.model) if theirs else self._group(name, call, causal)
        self._record(name, call, result, group, causal, None)

    def ask(self, asked: Inputs) -> None:
        """Of modules that could not be read, take the weights that the model itself returns, if it does."""
        unread = [name for name in self.names.values() if name in self.outside]
        seen = {groups.of_transformers(name, self.model) for name in self.fired}
        for name, weights in returned(self.model, asked, unread, seen).items():
            call = of_scores(weights.log())
            with watching(None):
                self._found(name, "outputs", call, serve(call))
            self.outside.discard(name)

    def _group(self, name: str, call: Call, causal: bool) -> str:
        n_queries, n_keys = call.q.shape[2], call.k.shape[2]
        return groups.of_call(
            name, n_queries=n_queries, n_keys=n_keys, causal=causal, two_sided=self._two_sided, sequences=self.sequences
        )

    def enter(self, name: str) -> None:
        """The forward of a module begins."""
        self._running.append(name)

    def leave(self) -> None:
        """The forward of the innermost module ends."""
        self._running.pop()
        if not self._running:
            self._steps.clear()

    def finish(self) -> None:
        """The model is done: what was computed step by step becomes one record."""
        for steps in self._unjoined:
            assert steps.at is not None
            self.records[steps.at] = steps.joined(self.records[steps.at])
        self._unjoined.clear()

    def _note(self, name: str, call: Call) -> None:
        if call.dropout_p:
            raise InputError(f"{name} applies dropout {call.dropout_p} to its weights; profile in evaluation mode")
        self.fired.append(name)
        self.on_call(name)

    def _record(
        self,
        name: str,
        call: Call,
        result: Result,
        group: str,
        causal: bool,
        keys: Tensor | None,
        *,
        step: bool = False,
    ) -> None:
        self._note(name, call)
        layer = self._calls.get(group, 0)
        self._calls[group] = layer + 1
        kept = self.layers is None or layer in self.layers
        n_queries, n_keys = call.q.shape[2], call.k.shape[2]
        if keys is None and group in ("self", "text", "encoder", "cross", "decoder"):
            keys = (self.query_masks if group == "decoder" else self.key_masks).get(n_keys)
        queries = keys if group != "cross" and n_queries == n_keys else self.query_masks.get(n_queries)
        first = 0 if keys is None else keys.to(torch.int8).argmax(1)
        queries = None if step else queries  # which of the steps count is known after the last
        self._steps.pop(name, None)
        if step:
            self._steps[name] = _Steps(self, call.k.detach(), first, len(self.records) if kept else None)
        if not kept:
            return
        if self.take is not None:
            lse = None if result.lse is None else result.lse.detach()
            seen = Seen(name, group, layer, detached(call), lse, queries, keys, first, causal, self.sources[name])
            self.take(seen)
            return
        statistics, weights = self._measured(name, call, result, first=first, queries=queries, whole=not step)
        lie = {} if step or self.sources[name] in FORMED else geometry(detached(call), first, queries, keys)
        self.records.append(Record(name, group, layer, statistics, lie, weights, queries, keys, causal))
        if step:
            self._steps[name].add(statistics, weights)
            self._unjoined.append(self._steps[name])

    def _measured(
        self,
        name: str,
        call: Call,
        result: Result,
        *,
        first: int | Tensor,
        queries: Tensor | None = None,
        whole: bool,
    ) -> tuple[Statistics, Tensor | None]:
        """Statistics of a call and, of a short one, its weights; some only if it is the `whole` of a layer."""
        call = detached(call)
        rows = row_state(call, None if result.lse is None else result.lse.detach())
        if rows.level is not None and rows.level.isnan().any():
            raise InputError(f"{name} computes scores that are NaN: the model's weights or its inputs contain NaN")
        mass = self._masses(first, call.k.shape[2])
        if not whole:
            del mass[Streaming().name]
        statistics = sweep(
            call,
            rows,
            mass=mass,
            first=first,
            queries=queries,
            prefix_keys=PREFIX if whole else None,
            bins=self.map_bins if whole and self.map_bins else None,
            statistics=(*(UNFUSED if whole else ()), *self.statistics),
        )
        if statistics.received.isnan().any():
            raise InputError(f"{name} computes weights that are NaN: the model's weights or its inputs contain NaN")
        return statistics, formed(call) if max(call.q.shape[2], call.k.shape[2]) <= self.map_tokens else None


def shared_statistics(statistics: Statistics, group: ProcessGroup) -> Statistics:
    """Statistics of a whole sequence, of which each process has those of its own queries and keys."""

    def whole(x: Tensor | None) -> Tensor | None:
        return None if x is None else ring.unshard(x, group)

    by_token = {
        f.name: whole(getattr(statistics, f.name))
        for f in fields(Statistics)
        if f.name not in ("mass", "own", "prefix_sink_scores", "thumbnail")
    }
    mass = {name: whole(x) for name, x in statistics.mass.items()}
    return replace(statistics, **by_token, mass=mass)  # type: ignore[arg-type]


class _Steps:
    """Calls of one module with one query each over the same keys: a decoder that goes step by step, as one record."""

    def __init__(self, observer: Observer, asked: Tensor, first: int | Tensor, at: int | None) -> None:
        self.observer, self.asked, self.first = observer, asked, first
        self.at = at  # which of the observer's records; None if the layer is not asked for
        self.real = next(iter(observer.query_masks.values()), None)
        self.parts: list[Statistics] = []
        self.weights: list[Tensor] = []
        self.received: Tensor | None = None
        self.received_of_real: Tensor | None = None
        self.visible_queries: Tensor | None = None
        self.visible_queries_of_real: Tensor | None = None

    def add(self, statistics: Statistics, weights: Tensor | None) -> None:
        """One more query. What keys receive is added up at once, to take no more memory than the queries do."""
        n, received = len(self.parts), statistics.received
        counts = self.real is None or n >= self.real.shape[1] or self.real[:, n, None, None]
        of_real = received * counts
        self.received = received if self.received is None else self.received + received
        self.received_of_real = of_real if self.received_of_real is None else self.received_of_real + of_real
        seen = statistics.visible_queries
        self.visible_queries = seen if self.visible_queries is None else self.visible_queries + seen
        seen = seen * counts
        self.visible_queries_of_real = (
            seen if self.visible_queries_of_real is None else self.visible_queries_of_real + seen
        )
        self.parts.append(replace(statistics, received=received[..., :0], visible_queries=received[..., :0]))
        if weights is not None and n < self.observer.map_tokens:
            self.weights.append(weights)

    def joined(self, record: Record) -> Record:
        """The record of the first step with all of them along the queries."""
        queries = self.observer.query_masks.get(len(self.parts))
        received = self.received if queries is None else self.received_of_real
        visible_queries = self.visible_queries if queries is None else self.visible_queries_of_real

        def along(values: list[Tensor | None], empty: float = 0.0) -> Tensor | None:
            kept = [x for x in values if x is not None]
            if not kept:
                return None
            row = torch.cat(kept, 2)
            return row if queries is None else row.masked_fill(~queries[:, None], empty)

        per_query = {
            f.name: along([getattr(p, f.name) for p in self.parts], -torch.inf if f.name == "lse" else 0.0)
            for f in fields(Statistics)
            if f.name not in ("received", "visible_queries", "prefix_sink_scores", "thumbnail", "mass", "own")
        }
        mass, own = (
            {name: along([getattr(p, kind)[name] for p in self.parts]) for name in getattr(self.parts[0], kind)}
            for kind in ("mass", "own")
        )
        whole = len(self.weights) == len(self.parts)
        statistics = Statistics(**per_query, received=received, visible_queries=visible_queries, mass=mass, own=own)  # type: ignore[arg-type]
        weights = torch.cat(self.weights, 2) if whole else None
        return replace(record, statistics=statistics, weights=weights, queries=queries)


@contextmanager
def observe(observer: Observer) -> Iterator[Observer]:
    """Let the model's attention pass by `observer`; restore everything on the way out.

    Which module computes is known from hooks on all of them, which are taken away again; what `serve` shows is the
    innermost's. One that calls attention step by step, each time with one query over the same keys, is one layer; of
    Hugging Face models every call is one.
    """
    model = observer.model
    training = [m for m in model.modules() if m.training]
    try:
        model.eval()
        with _uncompiled(), recorded_inputs(model) as asked, _routed(observer), _followed(observer):
            with torch.no_grad(), observer.intercept(), watching(observer.see):
                yield observer
            observer.finish()
        observer.ask(asked)
    finally:
        for module in training:
            module.training = True


def _uncompiled() -> AbstractContextManager[object]:
    """Compiled parts of the model run as they were written: nobody sees into what a compiler made of them."""
    compiler = "torch._dynamo" in sys.modules  # slow to import, and without it nothing is compiled
    return torch.compiler.set_stance("force_eager") if compiler else nullcontext()


@contextmanager
def _routed(observer: Observer) -> Iterator[None]:
    """Transformers' interface hands the attention of the model to the observer."""
    if not observer.expected:
        yield
        return
    with routed(observer.model, observer.attend):
        yield


@contextmanager
def _followed(observer: Observer) -> Iterator[None]:
    """Hooks tell the observer which modules are at work."""

    def follow(module: nn.Module) -> tuple[Any, Any]:
        name = observer.names[id(module)]
        return (
            module.register_forward_pre_hook(lambda *_: observer.enter(name), prepend=True),
            module.register_forward_hook(lambda *_: observer.leave(), always_call=True),
        )

    handles: list[Any] = []
    try:
        for module in observer.model.modules():
            if not isinstance(module, Composition):  # part of the layer that holds it
                handles += follow(module)
        yield
    finally:
        for handle in handles:
            handle.remove()


def unobserved(observer: Observer) -> list[str]:
    """Attention modules that did not come to us: expected ones that never fired, and those that computed elsewhere."""
    silent = set(observer.expected) - set(observer.fired)
    return sorted(silent | observer.outside)


def formed(call: Call) -> Tensor:
    """The weights of a short call, float32 or better whatever its dtype."""
    q, k, v = (x.to(at_least_float32(x.dtype)) for x in (call.q, call.k, call.v))
    weights = eager.forward(replace(call, q=q, k=k, v=v)).weights
    assert weights is not None
    return weights


def _is_causal(mask: Mask | None) -> bool:
    """Whether no query sees a key after it."""
    match mask:
        case None:
            return False
        case And(left, right):
            return _is_causal(left) or _is_causal(right)
        case Dense(tensor):
            n_queries, n_keys = tensor.shape[2:]
            offset = n_keys - n_queries
            own = n_queries > 1 and bool(tensor.diagonal(offset, 2, 3).any())  # tokens see themselves, so it is a text
            return own and not bool(tensor.triu(offset + 1).any())
    return mask.band is not None and mask.band[0] >= 0
