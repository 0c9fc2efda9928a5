"""What observes a model: `Running` follows its modules and its texts, and `Observer` receives its attention calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qkv.cache.base import attending
from qkv.cache.recent import Sinks
from qkv.edits import Placed, Scale, Steer, Zero
from qkv.engine import Call, Result, Shared, detached
from qkv.errors import InputError
from qkv.huggingface.attention import Own, call_of, function_of
from qkv.huggingface.hidden import check, listening
from qkv.kernels import serving
from qkv.linear import linear_attend
from qkv.masks import Dense
from qkv.masks.convert import is_causal
from qkv.nn import RecurrentAttention
from qkv.profiler.capture import hidden
from qkv.profiler.capture.calls import softmax_call
from qkv.profiler.capture.checking import Checks, Inputs, returned
from qkv.profiler.capture.inputs import Sequences, arguments_of, first_real
from qkv.profiler.capture.intercept import Intercept, calls_of_module, unwatched
from qkv.profiler.capture.interventions import ACTIVE, applied
from qkv.profiler.capture.layer import Layer
from qkv.profiler.capture.modules import (
    AttentionModules,
    LayerNumbers,
    count_hidden_states,
    group_of_call,
    group_of_module,
)
from qkv.profiler.capture.record import WEIGHTS_ONLY, ObservedCall, Receive, Record, Recorder, served
from qkv.profiler.capture.texts import Forward, Texts

# --- what runs --------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a model does in one thread."""

    modules: list[str] = field(default_factory=list)  # those whose forward is running, the innermost last
    calls: dict[str, int] = field(default_factory=dict)  # number of calls of each module in this forward
    hidden_states: dict[str, int] = field(default_factory=dict)  # how many different ones each module was given
    newest: tuple[str, Any, int] | None = None  # module, cache of qkv and its tokens in the last call
    steps: dict[str, ObservedCall] = field(default_factory=dict)  # the last of each module that attends step by step
    paused: bool = False
    contexts: ExitStack = field(default_factory=ExitStack)  # that are open during the forward
    intercept: Intercept | None = None
    sequences: Sequences = field(default_factory=Sequences)
    forward: Forward | None = None  # whose text is known
    outer: Run | None = None  # the run inside of which a hook has called the model
    first_positions: deque[tuple[Tensor, int | Tensor]] = field(default_factory=lambda: deque(maxlen=4))

    def first(self, keys: Tensor) -> int | Tensor:
        """`first_real` of a padding mask, read once for all layers: on a card it waits for the layers before."""
        for mask, position in self.first_positions:
            if mask is keys:
                return position
        self.first_positions.append((keys, first_real(keys)))
        return self.first_positions[-1][1]

    def count_call(self, name: str) -> int:
        """How many calls a module has made before in this forward; the parts in which a cache attends are one call."""
        cache, before = attending(), self.newest
        self.newest = None if cache is None else (name, cache, cache.seen)
        count = self.calls.get(name, 0) - (cache is not None and before == self.newest)
        self.calls[name] = count + 1
        return count


class Running:
    """Which modules of a model run in each thread, and which text the forward reads.

    Args:
        modules: of the model.
        sequences: what it reads, if it is known before.
        texts: find which text a forward reads; then the model computes its attention itself, in any mode and thread.
    """

    def __init__(self, modules: AttentionModules, sequences: Sequences, texts: Texts | None) -> None:
        self.model_computes = texts is not None
        """Whether the model computes its attention itself; otherwise the observer does, with the statistics."""
        self.texts, self.runs, self.entered = texts, dict[int, Run](), set[str]()
        """`runs` has the run of each thread by its id, `entered` the names of modules whose forward was running."""
        self.inputs: Inputs = []
        self._modules, self._sequences, self._thread = modules, sequences, threading.get_ident()

    @property
    def run(self) -> Run:
        """What the model does in this thread."""
        thread = threading.get_ident()
        if thread not in self.runs:
            self.runs[thread] = Run(sequences=self._sequences)
        return self.runs[thread]

    @property
    def in_other_thread(self) -> bool:
        """Whether this is not the thread that observes."""
        return threading.get_ident() != self._thread

    def enter(
        self, open_interfaces: Callable[[Run], None], module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Called at the start of a module's forward; `open_interfaces` at that of the outermost one."""
        if self.in_other_thread and not self.model_computes:
            return
        name = self._modules.names[id(module)]
        if name in self.run.modules and torch._C._current_graph_task_id() < 0:
            self._nest(module)
        run = self.run
        if module is self._modules.model and not self.model_computes and len(self.inputs) < 2:
            self.inputs.append((args, named))
        if not run.modules:
            if self.texts is not None:
                self.begin(module, arguments_of(module, args, named))
            open_interfaces(run)
        if run.intercept is not None:
            try:
                run.intercept.begins([*args, *named.values()], outermost=not run.modules)
            except InputError:
                if not run.modules:
                    run.contexts.close()
                    self.end(module, None)
                raise
        self.entered.add(name)
        if run.sequences.two:
            run.hidden_states[name] = count_hidden_states(module, args, named)
        run.modules.append(name)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Called at the end of the innermost module's forward, also after an error."""
        if (self.in_other_thread and not self.model_computes) or not (run := self.run).modules:
            return
        try:
            if run.intercept is not None and output is not None:  # None after an error
                run.intercept.ends(module)
        finally:
            run.modules.pop()
            if not run.modules:
                run.steps.clear()
                run.contexts.close()
                self.end(module, output)
                if run.outer is not None:
                    self.runs[threading.get_ident()] = run.outer

    def _nest(self, module: nn.Module) -> None:
        """A module begins that is running: inside itself, called by a hook; or it was interrupted from the keyboard."""
        if calls_of_module(module) < 2:
            self.interrupt()
        elif not self.model_computes:
            raise InputError(
                f"model runs {self._modules.names[id(module)]} inside of itself, such as in a hook; expected one "
                "forward, or qkv.watch, which records both"
            )
        else:
            nested = Run(sequences=self._sequences, intercept=self.run.intercept, outer=self.run)
            self.runs[threading.get_ident()] = nested

    def interrupt(self) -> None:
        """What runs in this thread has ended, though torch has called no hook."""
        run = self.run
        while run.modules or run.outer is not None:
            run.modules.clear()
            run.steps.clear()
            run.contexts.close()
            if run.forward is not None and isinstance(run.forward.owner, nn.Module):
                self.end(run.forward.owner, None)
            run = self.runs[threading.get_ident()] = run.outer or run

    def begin(self, owner: Any, batch: Mapping[str, Any]) -> None:
        """A forward begins: find the text that it reads. It may be part of another forward, which reads the text."""
        run = self.run
        if self.texts is None or run.forward is not None:
            return
        run.calls.clear()
        if torch._C._current_graph_task_id() >= 0:  # a part of a forward that is computed again for the gradients
            run.paused = True
            return
        forward = self.texts.begin(owner, self._modules.names.get(id(owner), ""), batch, self._modules.model)
        run.forward, run.sequences, run.paused = forward, forward.read, not forward.recorded

    def end(self, owner: Any, output: Any) -> None:
        """A forward has ended."""
        forward = self.run.forward
        if self.texts is not None and forward is not None and forward.owner is owner:
            self.run.forward = None
            self.texts.end(forward, output)


# --- how calls are received -------------------------------------------------------------------------------------------


class Observer:
    """Receives the attention calls of a model, and tells their module, layer and text.

    Args:
        model: the model.
        layers: which layers to receive; all if None.
        receive: gets every call; by default a new `Recorder`.
        on_call: called with the name of every module that attends.
        sequences: what the model reads.
        unreadable: gets the modules that attend and could not be read, and the reasons.
        partial: list these modules instead of raising an error.
        texts: which texts the model reads; then it computes its attention itself, in any mode.
        hidden_maps: receive the hidden maps of linear attention, too, as the group "linear".
    """

    def __init__(
        self, model: nn.Module, layers: Collection[int] | None = None, receive: Receive | None = None,
        on_call: Callable[[str], None] = lambda module: None, sequences: Sequences | None = None,
        unreadable: dict[str, str] | None = None, *, partial: bool = False, texts: Texts | None = None,
        hidden_maps: bool = False,
    ) -> None:  # fmt: skip
        self.modules = AttentionModules(model, hidden_maps=hidden_maps)
        self.numbers = LayerNumbers(self.modules)
        self.running = Running(self.modules, sequences or Sequences(), texts)
        self.sources: dict[str, str] = {}
        """By module, as in `qkv.profile`."""
        self.unreadable = {} if unreadable is None else unreadable
        self.checks = Checks(model, {id(module): function_of(module) for module in self.modules.routed.values()})
        self._model, self._layers, self._receive, self._on_call = model, layers, receive or Recorder(), on_call
        self._partial, self._texts = partial, texts
        self._stepwise: list[Layer] = []  # modules that attend step by step

    @property
    def records(self) -> list[Record]:
        """What a `Recorder` has measured."""
        assert isinstance(self._receive, Recorder)
        self._receive.finish()
        return self.numbers.in_order(self._receive.records)

    @torch.no_grad()
    def finish(self) -> None:
        """The forward has ended: receive the joined steps of modules that attend step by step, and the weights that the
        model itself returns for modules whose calls could not be read, if it does.
        """
        for layer in self._stepwise:
            self._receive(layer.joined(self.running.run.sequences.real_target), None, {})
        self._stepwise.clear()
        unread = [n for n in self.modules.names.values() if n in self.unreadable and n not in self.modules.routed]
        observed = {group_of_module(name, self._model) for name in self.sources}
        for name, weights in returned(self._model, self.running.inputs, unread, observed).items():
            self.received(name, "outputs", softmax_call(weights.log()))
            del self.unreadable[name]

    def received(
        self, name: str, source: str, call: Call, compute: Callable[[Any], Result] = served, *,
        keys: Tensor | None = None, known: Result | None = None, fused: bool = True, appended: int = 0,
        one_state: bool = False,
    ) -> Result:  # fmt: skip
        """The result of a call of a module after the edits of `qkv.edit` and the receiver.

        Args:
            name: of the module.
            source: of the statistics, as in `qkv.profile`.
            call: the call.
            compute: computes it, if its result is not `known`.
            keys: True at real keys, if the mask tells.
            known: its result, if the model has computed it.
            fused: whether the receiver may compute the result, together with the statistics.
            appended: how many of the last keys are no tokens.
            one_state: whether queries and keys are known to come from the same hidden states.
        """
        run, module = self.running.run, self.modules.by_name.get(name)
        if one_state:
            run.hidden_states[name] = 1
        if call.dropout_p and not self.running.model_computes:
            raise InputError(
                f"model applies dropout {call.dropout_p} to the weights of {name}; expected a model in evaluation mode"
            )
        call = replace(call, dropout_p=0.0) if call.dropout_p else call
        self.sources[name] = "differential" if name in self.modules.differential else source
        self._on_call(name)
        observed = self._observed(name, source, call, keys, appended)
        # The same softmaxes again, for other values.
        again = name in self.modules.differential and run.calls[name] % 2 == 0
        result, changed = known, dict[int, Call]()
        if observed.step:  # one of several queries over the same keys
            result = compute(call)
        elif run.forward is not None:
            run.forward.attends(module, observed.group)
        if ACTIVE.get(self._model) and not observed.step:
            editable = observed.step is None and observed.source not in WEIGHTS_ONLY
            self._check_parts(name, observed)
            result, changed = applied(
                self._model, name, observed.group, observed.layer, partial(self._place, observed), call,
                known or compute(call), compute, editable=editable,
            )  # fmt: skip
        if again or run.paused or (self._layers is not None and observed.layer not in self._layers):
            return compute(call) if result is None else result
        result = compute(call) if result is None and not fused else result
        if len(changed) == call.q.shape[1] and len(set(map(id, changed.values()))) == 1:
            call, changed = changed[0], {}  # all heads have the same edit
        observed = replace(observed, call=detached(call))
        with unwatched():
            if observed.step is not None:
                return self._step(observed, result)
            if self._texts is None:
                return self._receive(observed, result, changed)
            assert result is not None
            if run.forward is not None:
                self._texts.add(run.forward, module, observed, changed)
            return result

    def _check_parts(self, name: str, observed: ObservedCall) -> None:
        """Raise `InputError` for edits of more than the output of a query, if a cache attends in several parts."""
        cache, forward = attending(), self.running.run.forward
        if not isinstance(cache, Sinks) or forward is None:
            return
        if forward.tokens == 1 or cache.seen + forward.tokens <= cache.sinks + cache.window:
            return
        for edits in ACTIVE[self._model]:
            for edit in edits.of(name, observed.group, observed.layer).values():
                if not isinstance(edit, Zero | Scale | Steer):
                    raise InputError(
                        f"edits has {type(edit).__name__}, but {cache} attends to {forward.tokens} tokens in several "
                        "parts; expected one token at a time once it is full, or another cache"
                    )

    def _step(self, observed: ObservedCall, result: Result | None) -> Result:
        """Keep one of several queries over the same keys, which are received together."""
        if observed.step == 0:
            layer = Layer(observed.module, observed.group, observed.layer, observed.source, own_keys=True)
            self._stepwise.append(layer)
        layer = next(layer for layer in reversed(self._stepwise) if layer.module == observed.module)
        layer.add(observed, observed.step or 0, 0, None)
        return served(observed.call) if result is None else result

    def _observed(self, name: str, source: str, call: Call, keys: Tensor | None, appended: int) -> ObservedCall:
        """A call with its place in the model and in the text."""
        run, n_queries, n_keys = self.running.run, call.q.shape[2], call.k.shape[2] - appended
        mask, real = call.mask, run.sequences.real_target.get(n_queries)
        read = source not in ("interface", "qkv")  # from torch's functions
        if read and isinstance(mask, Dense) and real is not None and len(real) == len(mask.tensor):
            mask = Dense(mask.tensor & real[:, None, :, None])  # so that padding queries cannot make it non-causal
        causal = is_causal(mask)
        causal |= attending() is not None  # in a cache of qkv, where a mask would hide nothing from a single query
        if source == "hidden":
            group, steps = "linear", False
        elif (
            source == "interface"
            or name in self.modules.routed
            or (read and type(self._model).__module__.startswith("transformers."))
        ):
            group, steps = group_of_module(name, self._model), False
            if n_keys < n_queries and not causal:
                group = "cross"  # pooled keys, as Segformer's: they are no tokens, and have no distances
        else:
            group = group_of_call(
                name, n_queries=n_queries, n_keys=n_keys, causal=causal, two_sided=self.modules.two_sided,
                sequences=run.sequences, states=run.hidden_states.get(name, 0),
            )  # fmt: skip
            steps = self._texts is None and n_queries == 1 and not causal
        before = run.steps.pop(name, None)
        if steps and before is not None and torch.equal(before.call.k, call.k):
            run.steps[name] = replace(before, call=call, step=(before.step or 0) + 1)
            return run.steps[name]
        calls = run.count_call(name)
        calls = 0 if name in self.modules.differential else calls
        layer = self.numbers.number(group, name, calls, run.modules)
        if keys is None and group in ("self", "text", "linear", "encoder", "cross", "decoder"):
            keys = (run.sequences.real_target if group == "decoder" else run.sequences.real_source).get(n_keys)
            if keys is not None and appended:
                keys = nn.functional.pad(keys, (0, appended), value=True)
        of_tokens = keys[:, :n_keys] if keys is not None and appended else keys  # the same tensor in all layers
        queries = of_tokens if group != "cross" and n_queries == n_keys else run.sequences.real_target.get(n_queries)
        queries = None if steps else queries
        first = 0 if keys is None else run.first(keys)
        step = 0 if steps else None
        source = self.sources[name]
        observed = ObservedCall(name, group, layer, call, None, queries, keys, first, causal, source, calls, step)
        if steps:
            run.steps[name] = observed
        return observed

    def _place(self, observed: ObservedCall) -> Placed:
        """Where the queries and keys of a call are in the text."""
        call, forward = observed.call, self.running.run.forward
        if forward is not None:
            return forward.place(observed, self.modules.by_name.get(observed.module))
        start = None if observed.group == "cross" else call.k.shape[2] - call.q.shape[2]
        return Placed(start, 0, observed.queries, observed.first)

    def received_shared(self, name: str, shared: Shared, result: Result) -> Result:
        """Record a call whose sequence several processes share: each records the statistics of the whole sequence."""
        if self._texts is not None or not isinstance(self._receive, Recorder):
            raise InputError(
                f"model shares its sequence with other processes in {name}; expected a call in one process, because "
                "only statistics are exchanged between processes"
            )
        if ACTIVE.get(self._model):
            raise InputError("group: attention that several processes share cannot be edited; expected no edits")
        if self.running.run.sequences.real_source or self.running.run.sequences.real_target:
            raise InputError(
                f"inputs has padding, but {name} shares its sequence with other processes, where padding is not "
                "supported; expected no padding"
            )
        self.sources[name] = "qkv"
        self._on_call(name)
        group = "self" if shared.grid.n_queries == shared.grid.n_keys else "cross"
        run = self.running.run
        layer = self.numbers.number(group, name, run.count_call(name), run.modules)
        if self._layers is None or layer in self._layers:
            self._receive.shared(name, group, layer, shared, result)
        return result


class Interfaces:
    """The interfaces by which attention calls of a model come in: transformers', qkv's, torch's and the model's own."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def open(self, run: Run) -> None:
        """A forward begins: receive the calls of qkv in other threads, and those of torch while the model computes."""
        observer = self._observer
        if observer.running.in_other_thread:
            run.contexts.enter_context(serving(self.qkv))
        known = bool(observer.sources) and not {"sdpa", "softmax"} & set(observer.sources.values())
        if observer.running.model_computes and not (known or run.outer is not None or self._ignore()):
            run.contexts.enter_context(self.torch())

    def torch(self) -> AbstractContextManager[object]:
        """A context that observes attention which the model computes by torch's functions, as far as it may."""
        observer = self._observer
        if observer.modules.all_routed:
            return nullcontext()  # reading every function of torch takes time
        observer.running.run.intercept = Intercept(observer, observer.running.model_computes)
        return observer.running.run.intercept

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside, linear attention is received by its hidden map; other libraries' is compared with its output."""
        observer = self._observer

        def receive(*inputs: Tensor | None) -> None:
            call = hidden.call_of(*inputs)  # type: ignore[arg-type]
            observer.received(observer.running.run.modules[-1], "hidden", call, known=Result(call.v))

        def report(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, out: Tensor, most: float) -> None:
            again = linear_attend(q, k, v, features=lambda x: x, normalize=False, decay=decay, beta=beta)
            check(observer.running.run.modules[-1], again, out, most)
            receive(q, k, v, decay, beta)

        def begins(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            given: Any = arguments_of(module, args, named)
            if given.get("cache") is None and isinstance(module, RecurrentAttention):
                q, k, v, gates, _ = module.heads_of(given["x"], given.get("mask"), given.get("positions"))
                receive(q, k, v, gates["decay"], gates["beta"])

        with ExitStack() as stack:
            for module in observer.modules.linear.values() if observer.modules.hidden_maps else ():
                if isinstance(module, RecurrentAttention):  # after the hook that tells that it runs
                    stack.callback(module.register_forward_pre_hook(begins, with_kwargs=True).remove)
            if observer.modules.hidden_maps:
                stack.enter_context(listening(observer.modules.model, report))
            yield

    def transformers(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
    ) -> tuple[Tensor, None]:
        """The attention function for transformers: (batch, heads, length, head_dim) in, (batch, nq, heads, dv) out."""
        observer = self._observer
        name = observer.modules.names.get(id(module), type(module).__name__)
        call, keys = call_of(module, name, query, key, value, attention_mask, **arguments)
        if observer.running.in_other_thread and not observer.running.model_computes:
            return served(call).out.transpose(1, 2).contiguous(), None
        result = observer.received(name, "interface", call, keys=keys)
        if not ACTIVE.get(observer.modules.model):
            observer.checks.of_rows(module, name, call, result.out, attention_mask, arguments)
        return result.out.transpose(1, 2).contiguous(), None

    def own_function(
        self, module: nn.Module, function: Callable[..., Any], own: Own, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        """Run the model's own attention function, and record what it computes."""
        returned, observer = own(), self._observer
        if self._ignore() or hasattr(function, "served"):
            return returned
        name, mine = observer.modules.names[id(module)], Result(returned[0].transpose(1, 2), None)
        try:
            call, keys, source = observer.checks.of_function(
                module, name, function, returned, args, named, once=observer.running.model_computes
            )
        except InputError as error:
            if not observer._partial:
                raise
            observer.unreadable[name] = str(error)
            return returned
        result = observer.received(name, source, call, keys=keys, known=mine)
        return returned if result is mine else (result.out.transpose(1, 2).contiguous(), *returned[1:])

    def qkv(self, call: Call | Shared, compute: Callable[[Any], Result], fused: bool) -> Result:
        """Receive a call of qkv's attention by the innermost running module, and return its result.

        `fused` allows to compute the result together with the statistics. Calls outside of the model are not received.
        """
        running = self._observer.running
        if self._ignore() or not running.run.modules:
            return compute(call)
        name = running.run.modules[-1]
        if isinstance(call, Shared):
            return self._observer.received_shared(name, call, compute(call))
        known = compute(call) if running.model_computes else None
        return self._observer.received(name, "qkv", call, compute, known=known, fused=fused)

    def _ignore(self) -> bool:
        """Whether a call is neither recorded nor edited."""
        running = self._observer.running
        elsewhere = running.in_other_thread and not running.model_computes
        return elsewhere or (running.run.paused and not ACTIVE.get(self._observer.modules.model))


def unobserved(observer: Observer) -> list[str]:
    """Attention modules without a record: modules that ran without a call, and modules that could not be read."""
    silent = (observer.modules.routed.keys() & observer.running.entered) - observer.sources.keys()
    return sorted(silent | observer.unreadable.keys())
