"""Observe the attention of a model while it runs.

Inside `observe` every attention call is recorded: calls of Hugging Face models through transformers' attention
interface, calls of qkv's own attention through `qkv.kernels.serve`, and attention that a model computes in another way
through `intercept`. One pass gives both the output for the model and the statistics, so the forward is not computed
twice. No n × n tensor is formed, except by models that form one themselves. The model and
transformers' registries are restored afterwards, also after an error.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from qkv import ring
from qkv.edits import ACTIVE, applied, with_head
from qkv.engine import Call, Result, RowState, Shared, at_least_float32, detached
from qkv.errors import InputError
from qkv.huggingface.attention import call_of, routes
from qkv.huggingface.client import EAGER_NAMES, Own, eager_of, function_of, is_known, name_of, routed, wrapped
from qkv.huggingface.masks import LazyMask
from qkv.kernels import eager, serve, serving
from qkv.masks import And, Causal, Dense, Grid, Mask, Window
from qkv.nn.composition import Composition
from qkv.profiler.capture import inputs
from qkv.profiler.capture.checking import (
    Checked,
    RecordedInputs,
    check_rows,
    compared,
    compared_weights,
    recorded_inputs,
    returned,
)
from qkv.profiler.capture.inputs import Sequences, arguments_of, real_tokens, sequences_of
from qkv.profiler.capture.intercept import Intercept, all_routed, of_scores, of_weights, unwatched
from qkv.profiler.capture.residual import geometry, value_norms
from qkv.profiler.data.variables import UNFUSED
from qkv.statistics import Local, Statistic, Streaming
from qkv.statistics.measure import in_shares, measured, row_state, sweep
from qkv.statistics.result import Statistics

PREFIX = 64  # number of first tokens that have sink scores (Gu et al. 2025, arXiv:2410.10781, section 3)
SDPA = "torch.nn.functional.scaled_dot_product_attention"
WEIGHTS_ONLY = ("softmax", "outputs", "returned")  # sources that give weights, but no queries, keys and values


@dataclass(frozen=True)
class Record:
    """The statistics of one attention call of the model."""

    module: str
    group: str
    layer: int
    statistics: Statistics
    geometry: dict[str, Tensor]
    weights: Tensor | None
    queries: Tensor | None  # (batch, nq), True at real tokens, or None if all are real
    keys: Tensor | None
    causal: bool


@dataclass(frozen=True, eq=False)
class ObservedCall:
    """One attention call of the model, with the module that made it."""

    module: str
    group: str
    layer: int
    call: Call
    lse: Tensor | None
    queries: Tensor | None  # (batch, nq), True at real tokens, or None if all are real
    keys: Tensor | None
    first: int | Tensor  # position of the first key of the text, by batch item if there is padding on the left
    causal: bool
    source: str  # as in `attrs["sources"]` of `qkv.profile`; a source in `WEIGHTS_ONLY` has no vectors (v is NaN)


@dataclass
class Observer:
    """Settings and results of one observation."""

    model: nn.Module
    layers: Collection[int] | None = None
    local_window: int = 8
    map_tokens: int = 384
    map_bins: int = 64
    statistics: Sequence[Statistic] = ()  # custom statistics
    on_call: Callable[[str], None] = lambda module: None
    collect: Callable[[ObservedCall], Result | None] | None = None  # receives the calls instead of measuring them
    computes: bool = False  # `collect` returns the result of a call, which is used where the statistics may be fused
    # True at real tokens, by length: for queries in cross-attention, and for keys without a padding mask in the call.
    query_masks: dict[int, Tensor] = field(default_factory=dict)
    key_masks: dict[int, Tensor] = field(default_factory=dict)
    sequences: Sequences = field(default_factory=Sequences)
    records: list[Record] = field(default_factory=list)
    fired: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)  # attention modules that could not be read, and the reason
    heads: Mapping[str, int] = field(default_factory=dict)  # number of heads of modules that do not state it, by name
    checks: list[Checked] = field(default_factory=list)  # comparisons with the model's own attention function
    group: ProcessGroup | None = None  # the processes that share the sequence, if there are several
    sources: dict[str, str] = field(default_factory=dict)  # by module: see `qkv.profile`
    partial: bool = False  # list modules whose attention cannot be read instead of raising an error
    beside: bool = False  # the model computes by its own functions, in any mode, and `collect` receives the calls
    for_edits: bool = False  # the observer only applies edits, and `collect` does not use the calls
    on_begin: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None] | None = None  # of an outermost forward
    on_end: Callable[[nn.Module, Any], None] | None = None

    def __post_init__(self) -> None:
        _refuse_split_heads(self.model)
        root = type(self.model).__name__
        self.names = {id(module): name or root for name, module in self.model.named_modules()}
        routed = [module for module in self.model.modules() if routes(module)]
        self.expected = [self.names[id(module)] for module in routed]
        self._functions = {id(module): function_of(module) for module in routed}
        self._two_sided = inputs.is_two_sided(self.model)
        self._calls: dict[str, int] = {}
        self._paused = False
        self._thread = threading.get_ident()
        self._interception: AbstractContextManager[object] | None = None  # of the forward, if observed beside it
        self._running: list[str] = []  # modules whose forward is running, the innermost last
        self._steps: dict[str, _Steps] = {}  # the latest steps of each module in this forward
        self._unjoined: list[_Steps] = []

    def restart(self, *, paused: bool) -> None:
        """Forget the calls so far, before another forward; no call is recorded while `paused`."""
        self._paused = paused
        self._calls.clear()
        self.records.clear()

    def foreign(self) -> bool:
        """True in a thread other than the one that observes."""
        return threading.get_ident() != self._thread

    def _skips(self) -> bool:
        """Whether a call is neither recorded nor edited."""
        return self.foreign() or (self._paused and not ACTIVE.get(self.model))

    def deepest(self) -> int:
        """The highest layer number of any group."""
        return max(self._calls.values(), default=0) - 1

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
    ) -> tuple[Tensor, None]:
        """The attention function for transformers: (batch, heads, length, head_dim) in, (batch, nq, heads, dv) out."""
        name = self.names.get(id(module), type(module).__name__)
        call, keys = call_of(module, name, query, key, value, attention_mask, **arguments)
        if self.foreign():
            return _served(call).out.transpose(1, 2).contiguous(), None
        self.sources[name] = "interface"
        group = inputs.of_transformers(name, self.model)
        result = self._record(name, call, partial(_served, call), group, _is_causal(call.mask), keys)
        self._check(module, name, call, result.out, attention_mask, arguments)
        return result.out.transpose(1, 2).contiguous(), None

    def _check(
        self, module: nn.Module, name: str, call: Call, out: Tensor, attention_mask: Any, arguments: dict[str, Any]
    ) -> None:
        """Compare some rows of the model's first call with the model's own function, once for every model."""
        if self.checks or ACTIVE.get(self.model):
            return
        function = self._functions.get(id(module))
        known = _CHECKED.setdefault(self.model, {})
        for one in (function, eager_of(module)):
            if one is None or name_of(one).rpartition(".")[2] not in EAGER_NAMES:  # needs a card, or another mask
                continue
            if name_of(one) not in known:
                with unwatched(), serving(None):
                    checked = check_rows(module, name, one, call, out, attention_mask, arguments)
                if checked is None:
                    continue
                known[name_of(one)] = checked
            self.checks.append(known[name_of(one)])
            return

    def attend_own(
        self, module: nn.Module, function: Callable[..., Any], own: Own, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        """Run the model's own attention function, and record what it computes.

        Its output is compared with that of standard attention with the same arguments: once for a function of
        transformers or qkv, otherwise in every module. If they differ, the weights that it returns are recorded, if
        their product with the values is its output.
        """
        returned = own()
        if self._skips():
            return returned
        out, weights = returned[0], returned[1] if len(returned) > 1 else None
        name, where = self.names[id(module)], name_of(function)
        group = inputs.of_transformers(name, self.model)
        reason: InputError | None = None
        before, place = _CHECKED.setdefault(self.model, {}), (where, None if is_known(function) else name)
        with_dropout = False
        if self.beside and named.get("dropout"):
            if not is_known(function):
                raise InputError(
                    f"model applies dropout {named['dropout']} in {name} by {where}, whose output cannot be compared "
                    "with standard attention then; expected evaluation mode or a dropout of 0"
                )
            named, with_dropout = named | {"dropout": 0.0}, True
        mine = out.transpose(1, 2)
        own_result = Result(mine, None)
        for query, key, value, mask, others in _readings(module, function, *args, **named):
            try:
                call, keys = call_of(module, name, query, key, value, mask, **others)
                if not with_dropout and not (self.beside and place in before):
                    with torch.no_grad(), unwatched():
                        result = _served(detached(call))
                        counted = None if result.lse is None else result.lse > -torch.inf
                        found = compared(name, where, mine.detach(), result.out, counted)
                    self.checks.append(found)
                    if is_known(function) or mask is not None:
                        before[place] = found
            except InputError as error:
                reason = reason or error
                continue
            self.sources[name] = "interface"
            made = self._record(name, call, lambda: own_result, group, _is_causal(call.mask), keys, fused=False)
            return returned if made is own_result else (made.out.transpose(1, 2).contiguous(), *returned[1:])
        assert reason is not None
        if isinstance(weights, Tensor) and weights.ndim == 4:
            try:
                self.checks.append(compared_weights(name, where, out.detach(), weights.detach(), args[2]))
                self._intercepted(name, "returned", of_weights(weights.detach()))
                return returned
            except InputError as error:
                reason = error
        if not self.partial:
            raise reason
        self.unreadable[name] = str(reason)
        return returned

    def observe_call(self, call: Call | Shared, compute: Callable[[], Result], fused: bool) -> Result:
        """Record a call of qkv's attention by the innermost running module, and return its result.

        `fused` allows to compute the result together with the statistics. Calls outside of the model are not recorded.
        """
        if not self._running or self._skips():
            return compute()
        if isinstance(call, Shared):
            result = compute()
            self._observe_shared(call, result)
            return result
        if self.beside:
            result, name = compute(), self._running[-1]
            self.sources[name] = "qkv"
            call = replace(call, dropout_p=0.0)
            causal = _is_causal(call.mask)
            return self._record(name, call, lambda: result, self._group(name, call, causal), causal, None, fused=False)
        name = self._running[-1]
        self.sources[name] = "qkv"
        causal = _is_causal(call.mask)
        return self._record_step_wise(name, call, compute, causal, fused=fused)

    def _record_step_wise(
        self, name: str, call: Call, compute: Callable[[], Result], causal: bool, *, fused: bool, editable: bool = True
    ) -> Result:
        """Record a call of a model that may attend step by step, each time with one query over the same keys."""
        step = call.q.shape[2] == 1 and not causal and self.collect is None
        before = self._steps.get(name)
        if step and before is not None and torch.equal(before.key, call.k):
            self._note(name, call)
            of_keys = [s.name for s in self.statistics if s.over == "key"]
            if of_keys:
                raise InputError(
                    f"statistics has {', '.join(of_keys)} over keys, but {name} attends step by step, one query at a "
                    "time; expected statistics over queries"
                )
            result = compute()
            if before.record is not None:
                with unwatched():
                    before.add(*self._measured(name, call, result, first=before.first, whole=False)[1:])
            return result
        group = self._group(name, call, causal)
        return self._record(name, call, compute, group, causal, None, step=step, fused=fused, editable=editable)

    def _observe_shared(self, shared: Shared, result: Result) -> None:
        """Record a call whose sequence several processes share: each records the statistics of the whole sequence."""
        name, call = self._running[-1], detached(shared.call)
        if self.collect is not None:
            raise InputError(
                f"model shares its sequence with other processes in {name}; expected a call in one process, because "
                "only statistics are exchanged between processes"
            )
        if self.key_masks or self.query_masks:
            raise InputError(
                f"inputs has padding, but {name} shares its sequence with other processes, where padding is not "
                "supported; expected no padding"
            )
        if self.statistics:
            raise InputError(
                f"statistics has {', '.join(s.name for s in self.statistics)}, but {name} shares its sequence with "
                "other processes, where custom statistics are not supported; expected none"
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
        """The masks inside which the attention mass is measured, by statistic."""
        return masses(self.local_window, first, n_keys)

    def intercept(self) -> AbstractContextManager[object]:
        """A context that observes attention which the model computes in another way, as far as it may."""
        if all_routed(self.model, self.names, self.expected):
            return nullcontext()  # reading every function of torch takes time
        return Intercept(
            self.model, self.names, self.expected, self._intercepted, self._check_torch, self.unreadable, self.heads,
            beside=self.beside,
        )  # fmt: skip

    def _check_torch(self, name: str, own: Callable[[], Tensor], result: Result) -> None:
        """Compare the result of one call with torch's own function, once for every model."""
        if self.checks or result.lse is None:
            return
        known = _CHECKED.setdefault(self.model, {})
        if SDPA not in known:
            with unwatched():
                known[SDPA] = compared(name, SDPA, own(), result.out, result.lse > -torch.inf)
        self.checks.append(known[SDPA])

    def _intercepted(
        self, name: str, source: str, call: Call, own: Tensor | None = None, *, editable: bool = True
    ) -> Result:
        """Record a call; `own` is the output that the model has computed already."""
        self.sources[name] = source
        if self.beside:
            call = replace(call, dropout_p=0.0)
        mask, real = call.mask, self.query_masks.get(call.q.shape[2])
        if isinstance(mask, Dense) and real is not None and len(real) == len(mask.tensor):
            mask = Dense(mask.tensor & real[:, None, :, None])  # so that padding queries cannot make it non-causal
        causal = _is_causal(mask)
        known = None if own is None else Result(own, None)
        compute = partial(_served, call) if known is None else lambda: known
        if not type(self.model).__module__.startswith("transformers."):
            return self._record_step_wise(name, call, compute, causal, fused=True, editable=editable)
        group = inputs.of_transformers(name, self.model)
        return self._record(name, call, compute, group, causal, None, editable=editable)

    def record_returned(self, recorded: RecordedInputs) -> None:
        """For modules whose calls could not be read, record the weights that the model itself returns, if it does."""
        unread = [n for n in self.names.values() if n in self.unreadable and n not in self.expected]
        observed = {inputs.of_transformers(name, self.model) for name in self.fired}
        for name, weights in returned(self.model, recorded, unread, observed).items():
            self._intercepted(name, "outputs", of_scores(weights.log()))
            del self.unreadable[name]

    def _group(self, name: str, call: Call, causal: bool) -> str:
        n_queries, n_keys = call.q.shape[2], call.k.shape[2]
        return inputs.of_call(
            name, n_queries=n_queries, n_keys=n_keys, causal=causal, two_sided=self._two_sided, sequences=self.sequences
        )

    def enter(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Called at the start of a module's forward."""
        if self.foreign():
            if ACTIVE.get(self.model):
                raise InputError(
                    f"model {type(self.model).__name__} runs in another thread than the one that entered qkv.edit; "
                    "expected the same thread, in which the edits hold"
                )
            return
        if not self._running:
            if self.on_begin is not None:
                self.on_begin(module, args, named)
            known = bool(self.fired) and not {"sdpa", "softmax"} & set(self.sources.values())
            if self.beside and not known and not self._skips():  # reading every torch function takes time
                self._interception = self.intercept()
                self._interception.__enter__()
        self._running.append(self.names[id(module)])

    def leave(self, module: nn.Module, output: Any) -> None:
        """Called at the end of the innermost module's forward, also after an error."""
        if self.foreign() or not self._running:
            return
        self._running.pop()
        if not self._running:
            self._steps.clear()
            if self._interception is not None:
                self._interception.__exit__(None, None, None)
                self._interception = None
            if self.on_end is not None:
                self.on_end(module, output)

    def finish(self) -> None:
        """Called after the forward: join the steps of each module that attends step by step into one record."""
        for steps in self._unjoined:
            assert steps.record is not None
            self.records[steps.record] = steps.joined(self.records[steps.record])
        self._unjoined.clear()

    def _note(self, name: str, call: Call) -> None:
        if call.dropout_p:
            raise InputError(
                f"model applies dropout {call.dropout_p} to the weights of {name}; expected a model in evaluation mode"
            )
        self.fired.append(name)
        self.on_call(name)

    def _record(
        self,
        name: str,
        call: Call,
        compute: Callable[[], Result],
        group: str,
        causal: bool,
        keys: Tensor | None,
        *,
        step: bool = False,
        fused: bool = True,
        editable: bool = True,
    ) -> Result:
        """Record a call and return its result after the edits of `qkv.edit`.

        If `fused`, the statistics may be computed together with the result.
        """
        self._note(name, call)
        layer = self._calls.get(group, 0)
        self._calls[group] = layer + 1
        kept = self.layers is None or layer in self.layers
        n_queries, n_keys = call.q.shape[2], call.k.shape[2]
        if keys is None and group in ("self", "text", "encoder", "cross", "decoder"):
            keys = (self.query_masks if group == "decoder" else self.key_masks).get(n_keys)
        queries = keys if group != "cross" and n_queries == n_keys else self.query_masks.get(n_queries)
        first = 0 if keys is None else keys.to(torch.int8).argmax(1)
        queries = None if step else queries  # the mask over all steps is applied when they are joined
        self._steps.pop(name, None)
        if step:
            self._steps[name] = _Steps(self, call.k.detach(), first, len(self.records) if kept else None)
        edit = partial(
            applied, self.model, name, group, layer, call, queries=queries, first=first,
            editable=editable and not step and self.sources[name] not in WEIGHTS_ONLY,
        )  # fmt: skip
        if not kept:
            return edit(compute())[0]
        if self.collect is not None:
            observed = ObservedCall(
                name, group, layer, detached(call), None, queries, keys, first, causal, self.sources[name]
            )
            together = self.collect(observed) if self.computes and fused else None
            result, changed = edit(compute() if together is None else together)
            if changed and not self.for_edits:
                raise InputError(
                    f"edits changes the weights of single heads in {name}, which only qkv.profile records; expected "
                    "edits of outputs, such as 'zero', or no edits here"
                )
            if together is None:
                self.collect(replace(observed, lse=None if result.lse is None else result.lse.detach()))
            return result
        with unwatched():
            known = None if fused else compute()
            no_vectors = step or self.sources[name] in WEIGHTS_ONLY
            norms = None if no_vectors or call.values is not None else value_norms(call, keys)
            result, statistics, weights = self._measured(
                name, call, known, first=first, queries=queries, norms=norms, whole=not step
            )
            vectors = {} if no_vectors else geometry(detached(call), first, queries, keys)
            result, changed = edit(result)
            for head, one in changed.items():
                _, its, of_head = self._measured(
                    name, one, None, first=first, queries=queries, norms=norms, whole=not step
                )
                statistics = with_head(statistics, its, head)
                if weights is not None and of_head is not None:
                    weights[:, head] = of_head[:, head]
        found = (statistics, vectors, weights)
        if not step and statistics.entropy.device.type != "cpu":
            found = copied_to_cpu(found)  # those of all layers could fill a card
        self.records.append(Record(name, group, layer, *found, queries, keys, causal))
        if step:
            self._steps[name].add(statistics, weights)
            self._unjoined.append(self._steps[name])
        return result

    def _measured(
        self,
        name: str,
        call: Call,
        result: Result | None,
        *,
        first: int | Tensor,
        queries: Tensor | None = None,
        norms: Tensor | None = None,
        whole: bool,
    ) -> tuple[Result, Statistics, Tensor | None]:
        """Result, statistics, and the weights of a short call; some statistics need the `whole` call of a layer."""
        call = detached(call)
        mass = self._masses(first, call.k.shape[2])
        if not whole:
            del mass[Streaming().name]
        options: dict[str, Any] = {
            "mass": mass,
            "first": first,
            "queries": queries,
            "prefix_keys": PREFIX if whole else None,
        }
        further: dict[str, Any] = {
            "bins": self.map_bins if whole and self.map_bins else None,
            "statistics": (*(UNFUSED if whole else ()), *self.statistics),
            "value_norms": norms,
        }
        if result is None:
            result, rows, statistics = measured(call, output=True, **options, **further)
            assert result is not None
        else:
            rows = row_state(call, None if result.lse is None else result.lse.detach())
            statistics = sweep(call, rows, **options, **further)
        statistics = in_shares(call, statistics, **options)
        nan = statistics.received.isnan().any()
        nan = nan if result.lse is None else nan | result.lse.isnan().any()
        if nan:  # one synchronization with a GPU a layer
            what = "scores" if result.lse is not None and result.lse.isnan().any() else "weights"
            raise InputError(f"model computes {what} that are NaN in {name}: its parameters or its inputs contain NaN")
        short = max(call.q.shape[2], call.k.shape[2]) <= self.map_tokens
        return result, statistics, weights_of(call) if short else None


T = TypeVar("T")


def copied_to_cpu(values: T) -> T:
    """The values with float32 copies of all tensors in tuples, mappings and dataclasses, made by one transfer."""

    def mapped(value: Any, one: Callable[[Tensor], Tensor]) -> Any:
        if isinstance(value, Tensor):
            return one(value)
        if isinstance(value, tuple):
            return tuple(mapped(x, one) for x in value)
        if isinstance(value, Mapping):
            return {name: mapped(x, one) for name, x in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: mapped(getattr(value, f.name), one) for f in fields(value)})
        return value

    tensors: list[Tensor] = []
    mapped(values, lambda x: tensors.append(x) or x)  # type: ignore[func-returns-value]
    together = torch.cat([x.reshape(-1).float() for x in tensors]).cpu()
    copies = iter(together.split([x.numel() for x in tensors]))
    copied: T = mapped(values, lambda x: next(copies).view(x.shape))
    return copied


def _refuse_split_heads(model: nn.Module) -> None:
    """Raise `InputError` for tensor parallelism, in which each process computes some of the heads only."""
    parts = getattr(model, "_tp_size", None)
    of_torch = sys.modules.get("torch.distributed.tensor")
    whole = any(c.__name__ == "FSDPModule" for m in model.modules() for c in type(m).__mro__)  # gathered to be used
    if of_torch is not None and not whole:
        for p in model.parameters():
            if isinstance(p, of_torch.DTensor) and any(placement.is_shard() for placement in p.placements):
                parts = p.device_mesh.size()
    if isinstance(parts, int) and parts > 1:
        raise InputError(
            f"model is split over {parts} processes by tensor parallelism, where each has some of the heads only; "
            "expected all heads in one process, as with DDP or FSDP"
        )


def masses(local_window: int, first: int | Tensor, n_keys: int) -> dict[str, Mask]:
    """The masks inside which the attention mass is measured, by statistic."""
    return {s.name: s.mask for s in (Local(local_window), Streaming(first, n_keys))}


_CHECKED: WeakKeyDictionary[nn.Module, dict[Hashable, Checked]] = WeakKeyDictionary()


def _readings(
    module: nn.Module,
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **others: Any,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Any, dict[str, Any]]]:
    """The arguments of an attention function, in each way in which they can be meant.

    Transformers passes no mask to a function that has no mask function of its own, and some functions apply the
    causality of the module, or its window, by themselves: FlashAttention the window, torch's SDPA not, which aligns
    the first query with the first key. A tensor of 2 dimensions marks the real keys.
    """
    described = getattr(attention_mask, "qkv_mask", None)
    if described is not None and described.shape[2:] == (query.shape[2], key.shape[2]):
        yield query, key, value, described, others
        return
    if attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.ndim == 2):
        yield query, key, value, attention_mask, others
        return
    n_queries, n_keys = query.shape[2], key.shape[2]
    real = None if attention_mask is None else attention_mask[:, None, None, -n_keys:].bool()
    causal = others.get("is_causal")
    causal = getattr(module, "is_causal", False) if causal is None else causal
    window = others.get("sliding_window")
    masks: list[Mask | None] = [Causal() if causal and n_queries > 1 else None]
    flash = "flash" in name_of(function)
    if causal and isinstance(window, int) and (flash or not is_known(function)):
        masks = [Window(window), *masks]
    masks = masks[:1] if is_known(function) else [*masks, None] if masks[-1] is not None else masks
    used = n_queries if masks[0] is not None and is_known(function) and not flash else n_keys  # of a static cache
    grid = Grid(len(query), 1, n_queries, used, used - n_queries, query.device)
    for mask in masks:
        whole = mask if real is None else Dense(real) if mask is None else mask & Dense(real)
        keys = None if real is None else real[:, 0, 0]
        yield query, key, value, LazyMask(whole, grid, query.dtype, keys, n_keys), others


def _served(call: Call) -> Result:
    """The result of a call that the observer itself records."""
    with serving(None):
        return serve(call)


def shared_statistics(statistics: Statistics, group: ProcessGroup) -> Statistics:
    """The statistics of a whole sequence, gathered from processes that each have those of their own shard."""

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
    """Calls of one module with one query each over the same keys, as a step-by-step decoder makes them: one record."""

    def __init__(self, observer: Observer, key: Tensor, first: int | Tensor, record: int | None) -> None:
        self.observer, self.key, self.first = observer, key, first
        self.record = record  # index into the observer's records; None if the layer was not requested
        self.real = next(iter(observer.query_masks.values()), None)
        self.parts: list[Statistics] = []
        self.weights: list[Tensor] = []
        self.received: Tensor | None = None
        self.received_of_real: Tensor | None = None
        self.visible_queries: Tensor | None = None
        self.visible_queries_of_real: Tensor | None = None

    def add(self, statistics: Statistics, weights: Tensor | None) -> None:
        """Add a query. Sums over keys are accumulated at once, so the memory does not grow with keys × queries."""
        n, received = len(self.parts), statistics.received
        counts = self.real is None or n >= self.real.shape[1] or self.real[:, n, None, None]
        of_real = received * counts
        self.received = received if self.received is None else self.received + received
        self.received_of_real = of_real if self.received_of_real is None else self.received_of_real + of_real
        visible = statistics.visible_queries
        self.visible_queries = visible if self.visible_queries is None else self.visible_queries + visible
        visible = visible * counts
        self.visible_queries_of_real = (
            visible if self.visible_queries_of_real is None else self.visible_queries_of_real + visible
        )
        self.parts.append(replace(statistics, received=received[..., :0], visible_queries=received[..., :0]))
        if weights is not None and n < self.observer.map_tokens:
            self.weights.append(weights)

    def joined(self, record: Record) -> Record:
        """The record of the first step, extended along the queries by all steps."""
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
    """Inside, `observer` records all attention of its model; everything is restored on exit.

    Temporary hooks on all modules tell which one is running; a call of qkv's attention is attributed to the innermost.
    A module that attends step by step, each time with one query over the same keys, is one layer. In Hugging Face
    models every call is a layer. With `Observer.beside` the model is neither put into evaluation mode nor detached from
    autograd: its own functions compute, and the calls are collected beside them.
    """
    model = observer.model
    OBSERVERS[model] = OBSERVERS.get(model, 0) + 1
    try:
        with _observed(observer):
            yield observer
    finally:
        OBSERVERS[model] -= 1


OBSERVERS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""How many contexts observe a model."""


def prepare(observer: Observer, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Before another forward: forget the calls so far, and find the real tokens among its arguments."""
    batch = {name: x for name, x in arguments_of(module, args, named).items() if isinstance(x, Tensor)}
    observer.sequences = sequences_of(module, batch)
    observer.key_masks, observer.query_masks = real_tokens(module, batch, observer.sequences)
    observer.restart(paused=False)


@contextmanager
def _observed(observer: Observer) -> Iterator[Observer]:
    model = observer.model
    if observer.beside:
        with _alone(observer), _uncompiled(), _routed(observer), _hooked(observer), serving(observer.observe_call):
            yield observer
        return
    training = [m for m in model.modules() if m.training]
    try:
        model.eval()
        with _alone(observer), _uncompiled(), recorded_inputs(model) as recorded, _routed(observer), _hooked(observer):
            with torch.no_grad(), observer.intercept(), serving(observer.observe_call):
                yield observer
            observer.finish()
        observer.record_returned(recorded)
    finally:
        for module in training:
            module.training = True


_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_BESIDE: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""How many contexts watch or edit a model: they last as long as the user likes."""


@contextmanager
def _alone(observer: Observer) -> Iterator[None]:
    """A model is observed by one thread at a time, because its hooks are called in all of them."""
    model = observer.model
    lock = _LOCKS.setdefault(model, threading.RLock())
    while not lock.acquire(timeout=0.05):
        if _BESIDE.get(model, 0):
            raise InputError(
                f"model {type(model).__name__} is watched or edited by another thread; expected one thread at a time"
            )
    _BESIDE[model] = _BESIDE.get(model, 0) + observer.beside
    try:
        yield
    finally:
        _BESIDE[model] -= observer.beside
        lock.release()


class _EagerMode:
    """torch.compile has one stance in a process: the first context sets it, and the last that ends restores it."""

    def __init__(self) -> None:
        self.lock, self.contexts, self.previous = threading.Lock(), 0, ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run compiled parts of the model in eager mode, because compiled code cannot be observed."""
        if "torch._dynamo" not in sys.modules:  # slow to import; if it is not loaded, nothing is compiled
            yield
            return
        with self.lock:
            if not self.contexts:
                self.previous.enter_context(torch.compiler.set_stance("force_eager"))
            self.contexts += 1
        try:
            yield
        finally:
            with self.lock:
                self.contexts -= 1
                if not self.contexts:
                    self.previous.close()


_uncompiled = _EagerMode()


@contextmanager
def _routed(observer: Observer) -> Iterator[None]:
    """Route the model's attention through transformers' interface to the observer."""
    if not observer.expected:
        yield
    elif not observer.beside and all(map(is_known, observer._functions.values())):
        with routed(observer.model, observer.attend):
            yield
    else:  # the model's own functions run as they are, with the masks that they expect
        with wrapped(observer.model, observer.attend_own):
            yield


@contextmanager
def _hooked(observer: Observer) -> Iterator[None]:
    """Install hooks that tell the observer which modules are running."""

    def hooks(module: nn.Module) -> tuple[Any, Any]:
        return (
            module.register_forward_pre_hook(observer.enter, prepend=True, with_kwargs=True),
            module.register_forward_hook(lambda this, _, output: observer.leave(this, output), always_call=True),
        )

    handles: list[Any] = []
    try:
        for module in observer.model.modules():
            if not isinstance(module, Composition):  # its calls belong to the layer that contains it
                handles += hooks(module)
        yield
    finally:
        for handle in handles:
            handle.remove()


def unobserved(observer: Observer) -> list[str]:
    """Attention modules without a record: expected modules that made no call, and modules that could not be read."""
    silent = set(observer.expected) - set(observer.fired)
    return sorted(silent | set(observer.unreadable))


def weights_of(call: Call) -> Tensor:
    """The weights of a short call, in float32 or a wider dtype."""
    q, k, v = (x.to(at_least_float32(x.dtype)) for x in (call.q, call.k, call.v))
    weights = eager.forward(replace(call, q=q, k=k, v=v)).weights
    assert weights is not None
    return weights


def _is_causal(mask: Mask | None) -> bool:
    """True if no query can attend to a later key."""
    match mask:
        case None:
            return False
        case And(left, right):
            return _is_causal(left) or _is_causal(right)
        case Dense(tensor):
            n_queries, n_keys = tensor.shape[2:]
            offset = n_keys - n_queries
            to_self = n_queries > 1 and bool(tensor.diagonal(offset, 2, 3).any())  # queries and keys are one text
            return to_self and not bool(tensor.triu(offset + 1).any())
    return mask.band is not None and mask.band[0] >= 0
