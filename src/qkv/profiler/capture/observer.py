"""`Observer` receives the attention calls of a model while it runs, applies edits to them, and records them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from qkv.edits import ACTIVE, Edits, Placed, applied, with_head
from qkv.engine import Call, Result, RowState, Shared, detached
from qkv.errors import InputError
from qkv.huggingface.attention import call_of, routes
from qkv.huggingface.client import EAGER_NAMES, Own, eager_of, function_of, is_known, name_of
from qkv.kernels import serving
from qkv.masks import Dense
from qkv.profiler.capture import inputs
from qkv.profiler.capture.checking import Checked, RecordedInputs, check_rows, compared, compared_weights, returned
from qkv.profiler.capture.inputs import Sequences
from qkv.profiler.capture.intercept import Intercept, all_routed, of_scores, of_weights, unwatched
from qkv.profiler.capture.layer import Layer
from qkv.profiler.capture.record import (
    PREFIX,
    WEIGHTS_ONLY,
    Measures,
    ObservedCall,
    Record,
    copied_to_cpu,
    is_causal,
    readings,
    served,
    shared_statistics,
)  # fmt: skip
from qkv.profiler.capture.texts import Forward
from qkv.statistics.measure import sweep

SDPA = "torch.nn.functional.scaled_dot_product_attention"


@dataclass
class Run:
    """What a model does in one thread."""

    running: list[str] = field(default_factory=list)  # modules whose forward is running, the innermost last
    made: dict[str, int] = field(default_factory=dict)  # number of calls of each module in this forward
    steps: dict[str, tuple[Tensor, Layer | None]] = field(default_factory=dict)  # of modules that attend step by step
    paused: bool = False
    opened: ExitStack = field(default_factory=ExitStack)  # of the forward
    # True at real tokens, by length: for queries in cross-attention, and for keys without a padding mask in the call.
    query_masks: Mapping[int, Tensor] = field(default_factory=dict)
    key_masks: Mapping[int, Tensor] = field(default_factory=dict)
    sequences: Sequences = field(default_factory=Sequences)
    forward: Forward | None = None  # whose text is known


@dataclass(eq=False)
class Observer:
    """Settings and results of one observation."""

    model: nn.Module
    layers: Collection[int] | None = None
    measures: Measures = field(default_factory=Measures)
    on_call: Callable[[str], None] = lambda module: None
    collect: Callable[[ObservedCall], Result | None] | None = None  # receives the calls instead of measuring them
    computes: bool = False  # `collect` returns the result of a call, which is used where the statistics may be fused
    query_masks: Mapping[int, Tensor] = field(default_factory=dict)  # as in `Run`
    key_masks: Mapping[int, Tensor] = field(default_factory=dict)
    sequences: Sequences = field(default_factory=Sequences)
    records: list[Record] = field(default_factory=list)
    fired: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)  # attention modules that could not be read, and the reason
    checks: list[Checked] = field(default_factory=list)  # comparisons with the model's own attention function
    group: ProcessGroup | None = None  # the processes that share the sequence, if there are several
    sources: dict[str, str] = field(default_factory=dict)  # by module: see `qkv.profile`
    partial: bool = False  # list modules whose attention cannot be read instead of raising an error
    beside: bool = False  # the model computes by its own functions, in any mode, and `collect` receives the calls
    for_edits: bool = False  # the observer only applies edits, and `collect` does not use the calls
    on_begin: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None  # of an outermost forward
    on_end: Callable[[Any, Any], None] | None = None

    def __post_init__(self) -> None:
        root = type(self.model).__name__
        self.modules = dict(self.model.named_modules())
        self.names = {id(module): name or root for name, module in self.model.named_modules()}
        routed = [module for module in self.model.modules() if routes(module)]
        self.expected = [self.names[id(module)] for module in routed]
        self.functions = {id(module): function_of(module) for module in routed}
        self.ran: set[int] = set()  # modules whose forward was running
        self._two_sided = inputs.is_two_sided(self.model)
        self._numbers: dict[tuple[str, str, int], int] = {}  # of layers: group, module, and its calls before
        self._thread = threading.get_ident()
        self._runs: dict[int, Run] = {}
        self._joining: list[tuple[int, Layer]] = []

    @property
    def run(self) -> Run:
        """What the model does in this thread."""
        thread = threading.get_ident()
        if thread not in self._runs:
            self._runs[thread] = Run(
                query_masks=self.query_masks, key_masks=self.key_masks, sequences=self.sequences
            )  # fmt: skip
        return self._runs[thread]

    def restart(self, *, paused: bool) -> None:
        """Forget the calls so far, before another forward; no call is recorded while `paused`."""
        self.run.paused = paused
        self.run.made.clear()
        self.records.clear()

    def foreign(self) -> bool:
        """True in a thread other than the one that observes, unless the observer lets the model compute."""
        return not self.beside and threading.get_ident() != self._thread

    def _skips(self) -> bool:
        """Whether a call is neither recorded nor edited."""
        return self.foreign() or (self.run.paused and not ACTIVE.get(self.model))

    def deepest(self) -> int:
        """The highest layer number of any group."""
        return max(self._numbers.values(), default=-1)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
    ) -> tuple[Tensor, None]:
        """The attention function for transformers: (batch, heads, length, head_dim) in, (batch, nq, heads, dv) out."""
        name = self.names.get(id(module), type(module).__name__)
        call, keys = call_of(module, name, query, key, value, attention_mask, **arguments)
        if self.foreign():
            return served(call).out.transpose(1, 2).contiguous(), None
        self.sources[name] = "interface"
        group = inputs.of_transformers(name, self.model)
        result = self._record(name, call, partial(served, call), group, is_causal(call.mask), keys)
        self._check(module, name, call, result.out, attention_mask, arguments)
        return result.out.transpose(1, 2).contiguous(), None

    def _check(
        self, module: nn.Module, name: str, call: Call, out: Tensor, attention_mask: Any, arguments: dict[str, Any]
    ) -> None:
        """Compare some rows of the model's first call with the model's own function, once for every model."""
        if self.checks or ACTIVE.get(self.model):
            return
        function = self.functions.get(id(module))
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
        dropped = self.beside and bool(named.get("dropout"))
        if dropped and not is_known(function):
            reason = InputError(
                f"model applies dropout {named['dropout']} in {name} by {where}, whose output cannot be compared with "
                "standard attention then; expected evaluation mode or a dropout of 0"
            )
        named = named | {"dropout": 0.0} if dropped else named
        mine = out.transpose(1, 2)
        own_result = Result(mine, None)
        for query, key, value, mask, others in () if reason else readings(module, function, *args, **named):
            try:
                call, keys = call_of(module, name, query, key, value, mask, **others)
                if not dropped and not (self.beside and place in before):
                    with torch.no_grad(), unwatched():
                        result = served(detached(call))
                        counted = None if result.lse is None else result.lse > -torch.inf
                        found = compared(name, where, mine.detach(), result.out, counted)
                    self.checks.append(found)
                    if is_known(function) or mask is not None:
                        before[place] = found
            except InputError as error:
                reason = reason or error
                continue
            self.sources[name] = "interface"
            made = self._record(name, call, lambda: own_result, group, is_causal(call.mask), keys, fused=False)
            return returned if made is own_result else (made.out.transpose(1, 2).contiguous(), *returned[1:])
        assert reason is not None
        if isinstance(weights, Tensor) and weights.ndim == 4:
            try:
                self.checks.append(compared_weights(name, where, out.detach(), weights.detach(), args[2]))
                self.intercepted(name, "returned", of_weights(weights.detach()))
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
        if self.foreign() or not self.run.running or self._skips():
            return compute()
        name = self.run.running[-1]
        self.sources[name] = "qkv"
        if isinstance(call, Shared):
            result = compute()
            self._observe_shared(name, call, result)
            return result
        causal = is_causal(call.mask)
        if self.beside:
            result = compute()
            call = replace(call, dropout_p=0.0)
            return self._record(name, call, lambda: result, self._group(name, call, causal), causal, None, fused=False)
        return self._record_step_wise(name, call, compute, causal, fused=fused)

    def _record_step_wise(
        self, name: str, call: Call, compute: Callable[[], Result], causal: bool, *, fused: bool, editable: bool = True
    ) -> Result:
        """Record a call of a model that may attend step by step, each time with one query over the same keys."""
        step = call.q.shape[2] == 1 and not causal and self.collect is None
        keys, layer = self.run.steps.get(name, (None, None))
        if step and keys is not None and torch.equal(keys, call.k):
            self._note(name, call)
            result = compute()
            if layer is not None:
                start = sum(p.count for p in layer.pieces)  # type: ignore[union-attr, misc]
                with unwatched():
                    one = ObservedCall(name, "", 0, detached(call), None, None, layer.padding, 0, False, layer.source)
                    layer.add(one, start, 0, None, stays=True)
            return result
        group = self._group(name, call, causal)
        return self._record(name, call, compute, group, causal, None, step=step, fused=fused, editable=editable)

    def _observe_shared(self, name: str, shared: Shared, result: Result) -> None:
        """Record a call whose sequence several processes share: each records the statistics of the whole sequence."""
        call, run, statistics = detached(shared.call), self.run, self.measures.statistics
        if self.collect is not None:
            raise InputError(
                f"model shares its sequence with other processes in {name}; expected a call in one process, because "
                "only statistics are exchanged between processes"
            )
        if run.key_masks or run.query_masks:
            raise InputError(
                f"inputs has padding, but {name} shares its sequence with other processes, where padding is not "
                "supported; expected no padding"
            )
        if statistics:
            raise InputError(
                f"statistics has {', '.join(s.name for s in statistics)}, but {name} shares its sequence with other "
                "processes, where custom statistics are not supported; expected none"
            )
        self.group = shared.group
        self._note(name, call)
        causal = is_causal(call.mask)
        group = "self" if shared.grid.n_queries == shared.grid.n_keys else "cross"
        layer = self._number(group, name)
        if self.layers is None or layer in self.layers:
            mass = self.measures.masses(0, shared.grid.n_keys)
            found = sweep(call, RowState(result.lse), mass=mass, prefix_keys=PREFIX, shared=shared)
            whole = shared_statistics(found, shared.group)
            self.records.append(Record(name, group, layer, whole, {}, None, None, None, causal))

    def intercept(self) -> AbstractContextManager[object]:
        """A context that observes attention which the model computes in another way, as far as it may."""
        if all_routed(self.model, self.names, self.expected):
            return nullcontext()  # reading every function of torch takes time
        return Intercept(
            self.model, self.names, self.expected, self.intercepted, self._check_torch, self.unreadable,
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

    def intercepted(
        self, name: str, source: str, call: Call, own: Tensor | None = None, *, editable: bool = True
    ) -> Result:
        """Record a call; `own` is the output that the model has computed already."""
        self.sources[name] = source
        if self.beside:
            call = replace(call, dropout_p=0.0)
        mask, real = call.mask, self.run.query_masks.get(call.q.shape[2])
        if isinstance(mask, Dense) and real is not None and len(real) == len(mask.tensor):
            mask = Dense(mask.tensor & real[:, None, :, None])  # so that padding queries cannot make it non-causal
        causal = is_causal(mask)
        known = None if own is None else Result(own, None)
        compute = partial(served, call) if known is None else lambda: known
        if not type(self.model).__module__.startswith("transformers."):
            return self._record_step_wise(name, call, compute, causal, fused=True, editable=editable)
        group = inputs.of_transformers(name, self.model)
        return self._record(name, call, compute, group, causal, None, editable=editable)

    def record_returned(self, recorded: RecordedInputs) -> None:
        """For modules whose calls could not be read, record the weights that the model itself returns, if it does."""
        unread = [n for n in self.names.values() if n in self.unreadable and n not in self.expected]
        observed = {inputs.of_transformers(name, self.model) for name in self.fired}
        for name, weights in returned(self.model, recorded, unread, observed).items():
            self.intercepted(name, "outputs", of_scores(weights.log()))
            del self.unreadable[name]

    def _group(self, name: str, call: Call, causal: bool) -> str:
        n_queries, n_keys = call.q.shape[2], call.k.shape[2]
        return inputs.of_call(
            name, n_queries=n_queries, n_keys=n_keys, causal=causal, two_sided=self._two_sided,
            sequences=self.run.sequences,
        )  # fmt: skip

    def enter(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Called at the start of a module's forward."""
        if self.foreign():
            return
        run = self.run
        if not run.running:
            if threading.get_ident() != self._thread:
                run.opened.enter_context(serving(self.observe_call))
            if self.on_begin is not None:
                self.on_begin(module, args, named)
            known = bool(self.fired) and not {"sdpa", "softmax"} & set(self.sources.values())
            if self.beside and not known and not self._skips():  # reading every torch function takes time
                run.opened.enter_context(self.intercept())
        self.ran.add(id(module))
        run.running.append(self.names[id(module)])

    def leave(self, module: nn.Module, output: Any) -> None:
        """Called at the end of the innermost module's forward, also after an error."""
        if self.foreign() or not (run := self.run).running:
            return
        run.running.pop()
        if not run.running:
            run.steps.clear()
            run.opened.close()
            if self.on_end is not None:
                self.on_end(module, output)

    def finish(self) -> None:
        """Called after the forward: join the steps of each module that attends step by step into one record."""
        for at, layer in self._joining:
            total = sum(p.count for p in layer.pieces)  # type: ignore[union-attr, misc]
            real = self.run.query_masks.get(total)
            self.records[at] = layer.record(self.measures, real, total, {})
        self._joining.clear()

    @contextmanager
    def again(self, run: Run, edits: Sequence[Edits]) -> Iterator[None]:
        """Inside, a part of a forward is computed again for its gradients, with the edits that it had, unrecorded.

        Args:
            run: a copy of what the forward was doing.
            edits: those that were active then.
        """
        thread, stack = threading.get_ident(), ACTIVE.setdefault(self.model, [])
        before, active = self.run, list(stack)
        stack[:] = edits
        self._runs[thread] = replace(run, made=dict(run.made), steps={}, paused=True, opened=ExitStack())
        try:
            with serving(self.observe_call):
                yield
        finally:
            self._runs[thread].opened.close()
            self._runs[thread] = before
            stack[:] = active

    def _place(self, observed: ObservedCall) -> Placed:
        """Where the queries and keys of a call are in the text."""
        call, forward = observed.call, self.run.forward
        if forward is not None:
            return forward.place(observed)
        start = None if observed.group == "cross" else call.k.shape[2] - call.q.shape[2]
        return Placed(start, 0, observed.queries, observed.first)

    def _note(self, name: str, call: Call) -> None:
        if call.dropout_p:
            raise InputError(
                f"model applies dropout {call.dropout_p} to the weights of {name}; expected a model in evaluation mode"
            )
        self.fired.append(name)
        self.on_call(name)

    def _number(self, group: str, name: str) -> int:
        """The number of a layer, which stays what it was in the first forward."""
        own = self.run.made.get(name, 0)
        self.run.made[name] = own + 1
        key = group, name, own
        if key not in self._numbers:
            self._numbers[key] = sum(of == group for of, _, _ in self._numbers)
        return self._numbers[key]

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
        run, layer = self.run, self._number(group, name)
        kept = self.layers is None or layer in self.layers
        if run.forward is not None:
            run.forward.attends(self.modules.get(name), group)
        n_queries, n_keys = call.q.shape[2], call.k.shape[2]
        if keys is None and group in ("self", "text", "encoder", "cross", "decoder"):
            keys = (run.query_masks if group == "decoder" else run.key_masks).get(n_keys)
        queries = keys if group != "cross" and n_queries == n_keys else run.query_masks.get(n_queries)
        first = 0 if keys is None else keys.to(torch.int8).argmax(1)
        source = self.sources[name]
        observed = ObservedCall(
            name, group, layer, call, None, None if step else queries, keys, first, causal, source, run.made[name] - 1
        )
        run.steps.pop(name, None)
        if step:  # measured when all steps are joined
            joined = Layer(name, group, layer, source, own_keys=True) if kept else None
            run.steps[name] = (call.k.detach(), joined)
        edit = partial(
            applied, self.model, name, group, layer, partial(self._place, observed), call,
            editable=editable and not step and source not in WEIGHTS_ONLY,
        )  # fmt: skip
        if not kept:
            return edit(compute())[0]
        if step and joined is not None:
            with unwatched():
                joined.add(replace(observed, call=detached(call)), 0, 0, None, stays=True)
            self._joining.append((len(self.records), joined))
            self.records.append(None)  # type: ignore[arg-type]
            return edit(compute())[0]
        if self.collect is not None:
            seen = replace(observed, call=detached(call))
            together = self.collect(seen) if self.computes and fused else None
            result, changed = edit(compute() if together is None else together)
            if changed and not self.for_edits and not run.paused:
                raise InputError(
                    f"edits changes the weights of single heads in {name}, which only qkv.profile records; expected "
                    "edits of outputs, such as 'zero', or no edits here"
                )
            if together is None:
                self.collect(replace(seen, lse=None if result.lse is None else result.lse.detach()))
            return result
        with unwatched():
            norms = observed.norms
            result, statistics, weights = self.measures.of(observed, None if fused else compute(), norms)
            vectors = observed.vectors
            result, changed = edit(result)
            for head, one in changed.items():
                _, its, of_head = self.measures.of(replace(observed, call=one), None, norms)
                statistics = with_head(statistics, its, head)
                if weights is not None and of_head is not None:
                    weights[:, head] = of_head[:, head]
        found = (statistics, vectors, weights)
        if statistics.entropy.device.type != "cpu":
            found = copied_to_cpu(found)  # those of all layers could fill a card
        self.records.append(Record(name, group, layer, *found, queries, keys, causal))
        return result


_CHECKED: WeakKeyDictionary[nn.Module, dict[Hashable, Checked]] = WeakKeyDictionary()
