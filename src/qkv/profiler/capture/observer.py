"""What observes a model: `Observer` tells which module attends, as which layer, and receives its calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qkv.cache.base import Sinks, attending
from qkv.edits import Placed, Scale, Steer, Zero
from qkv.engine import Call, Result, Shared, detached
from qkv.errors import InputError
from qkv.huggingface.attention import Own, call_of, function_of, routes
from qkv.kernels import serving
from qkv.masks import Dense
from qkv.masks.convert import is_causal
from qkv.profiler.capture import inputs
from qkv.profiler.capture.calls import of_scores
from qkv.profiler.capture.checking import Checks, Inputs, returned
from qkv.profiler.capture.inputs import Sequences, arguments_of
from qkv.profiler.capture.intercept import Intercept, all_routed, calls_of_module, unwatched
from qkv.profiler.capture.interventions import ACTIVE, applied
from qkv.profiler.capture.layer import Layer
from qkv.profiler.capture.record import WEIGHTS_ONLY, ObservedCall, Receive, Record, Recorder, served, weights_of
from qkv.profiler.capture.texts import Forward, Texts


@dataclass
class Run:
    """What a model does in one thread."""

    running: list[str] = field(default_factory=list)  # modules whose forward is running, the innermost last
    made: dict[str, int] = field(default_factory=dict)  # number of calls of each module in this forward
    states: dict[str, int] = field(default_factory=dict)  # number of hidden states that each module was given
    newest: tuple[str, Any, int] | None = None  # module, cache of qkv and its tokens in the last call
    steps: dict[str, ObservedCall] = field(default_factory=dict)  # the last of each module that attends step by step
    paused: bool = False
    opened: ExitStack = field(default_factory=ExitStack)  # of the forward
    intercept: Intercept | None = None
    sequences: Sequences = field(default_factory=Sequences)
    forward: Forward | None = None  # whose text is known
    outer: Run | None = None  # the run inside of which a hook has called the model
    firsts: deque[tuple[Tensor, int | Tensor]] = field(default_factory=lambda: deque(maxlen=4))

    def first(self, keys: Tensor) -> int | Tensor:
        """`first_real` of a padding mask, read once for all layers: on a card it waits for the layers before."""
        for known, first in self.firsts:
            if known is keys:
                return first
        self.firsts.append((keys, inputs.first_real(keys)))
        return self.firsts[-1][1]


@dataclass(eq=False)
class Observer:
    """Settings and results of one observation."""

    model: nn.Module
    layers: Collection[int] | None = None
    receive: Receive = field(default_factory=Recorder)
    on_call: Callable[[str], None] = lambda module: None
    sequences: Sequences = field(default_factory=Sequences)
    unreadable: dict[str, str] = field(default_factory=dict)  # attention modules that could not be read, and the reason
    sources: dict[str, str] = field(default_factory=dict)  # by module: see `qkv.profile`
    partial: bool = False  # list modules whose attention cannot be read instead of raising an error
    texts: Texts | None = None  # which texts the model reads; it computes by its own functions then, in any mode

    def __post_init__(self) -> None:
        root = type(self.model).__name__
        self.modules: dict[str, nn.Module] = dict(self.model.named_modules())
        self.names = {id(module): name or root for name, module in self.modules.items()}
        routed = [module for module in self.modules.values() if routes(module)]
        self.expected = [self.names[id(module)] for module in routed]
        kinds = {name: inputs.of_transformers(name, self.model) for name in self.expected}
        self.stacks = {
            kind: inputs.stack_of([n for n, of in kinds.items() if of == kind]) for kind in {*kinds.values()}
        }
        """The stack of layers of each group, whose numbers of layers are kept."""
        self.differential = {name for name in self.expected if hasattr(self.modules[name], "lambda_q1")}
        """Modules that subtract the softmax of one half of the heads from that of the other (Ye et al. 2024)."""
        self.checks = Checks(self.model, {id(module): function_of(module) for module in routed})
        self.beside = self.texts is not None
        self.ran: set[int] = set()  # modules whose forward was running
        self.inputs: Inputs = []
        self.around = {name[:i] for name in self.expected for i, x in enumerate(f"{name}.") if x == "."}
        self.routed = all_routed(self.model, self.names, self.around)
        self._stepwise: list[Layer] = []  # modules that attend step by step
        self._two_sided = inputs.is_two_sided(self.modules)
        self.numbers: dict[tuple[str, str, int], int] = {}  # of layers: group, module, and its calls before
        self._thread = threading.get_ident()
        self.runs: dict[int, Run] = {}

    @property
    def records(self) -> list[Record]:
        """What a `Recorder` has measured."""
        assert isinstance(self.receive, Recorder)
        self.receive.finish()
        return self.in_order(self.receive.records)

    @property
    def run(self) -> Run:
        """What the model does in this thread."""
        thread = threading.get_ident()
        if thread not in self.runs:
            self.runs[thread] = Run(sequences=self.sequences)
        return self.runs[thread]

    def foreign(self) -> bool:
        """True in a thread other than the one that observes, unless the observer lets the model compute."""
        return not self.beside and threading.get_ident() != self._thread

    def _skips(self) -> bool:
        """Whether a call is neither recorded nor edited."""
        return self.foreign() or (self.run.paused and not ACTIVE.get(self.model))

    def in_order(self, layers: list[Any]) -> list[Any]:
        """What was received of layers, in the order in which they began to attend."""
        order = [(group, layer) for (group, _, _), layer in self.numbers.items()]
        return sorted(layers, key=lambda one: order.index((one.group, one.layer)))

    # --- where calls come from ----------------------------------------------------------------------------------------

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
    ) -> tuple[Tensor, None]:
        """The attention function for transformers: (batch, heads, length, head_dim) in, (batch, nq, heads, dv) out."""
        name = self.names.get(id(module), type(module).__name__)
        call, keys = call_of(module, name, query, key, value, attention_mask, **arguments)
        if self.foreign():
            return served(call).out.transpose(1, 2).contiguous(), None
        result = self._received(name, "interface", call, served, keys)
        if not ACTIVE.get(self.model):
            self.checks.of_rows(module, name, call, result.out, attention_mask, arguments)
        return result.out.transpose(1, 2).contiguous(), None

    def attend_own(
        self, module: nn.Module, function: Callable[..., Any], own: Own, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        """Run the model's own attention function, and record what it computes."""
        returned = own()
        if self._skips() or hasattr(function, "served"):
            return returned
        name, mine = self.names[id(module)], Result(returned[0].transpose(1, 2), None)
        try:
            call, keys, source = self.checks.of_function(
                module, name, function, returned, args, named, beside=self.beside
            )
        except InputError as error:
            if not self.partial:
                raise
            self.unreadable[name] = str(error)
            return returned
        made = self._received(name, source, call, served, keys, known=mine)
        return returned if made is mine else (made.out.transpose(1, 2).contiguous(), *returned[1:])

    def observe_call(self, call: Call | Shared, compute: Callable[[Any], Result], fused: bool) -> Result:
        """Receive a call of qkv's attention by the innermost running module, and return its result.

        `fused` allows to compute the result together with the statistics. Calls outside of the model are not received.
        """
        if self.foreign() or not self.run.running or self._skips():
            return compute(call)
        name = self.run.running[-1]
        if isinstance(call, Shared):
            return self._shared(name, call, compute(call))
        known = compute(call) if self.beside else None
        return self._received(name, "qkv", call, compute, known=known, fused=fused)

    def intercepted(
        self, name: str, source: str, call: Call, own: Result | None = None, *, keys: Tensor | None = None,
        appended: int = 0, one_state: bool = False,
    ) -> Result:  # fmt: skip
        """Receive a call that torch's functions compute.

        Args:
            name: of the module.
            source: kind of the function.
            call: the call.
            own: its result, if the model has computed it already.
            keys: True at real keys, if the padding mask is known.
            appended: how many of the last keys are no tokens.
            one_state: whether queries and keys are known to come from the same hidden states.
        """
        if one_state:
            self.run.states[name] = 1
        known = Result(call.v[:, :, :0]) if own is None and self.beside else own  # the model computes it later
        compute = served if known is None or known.weights is None else _with_weights
        return self._received(name, source, call, compute, keys, known=known, appended=appended)

    def intercept(self) -> AbstractContextManager[object]:
        """A context that observes attention which the model computes by torch's functions, as far as it may."""
        if self.routed:
            return nullcontext()  # reading every function of torch takes time
        self.run.intercept = Intercept(self)
        return self.run.intercept

    @torch.no_grad()
    def finish(self) -> None:
        """The forward has ended: receive the joined steps of modules that attend step by step, and the weights that the
        model itself returns for modules whose calls could not be read, if it does.
        """
        for layer in self._stepwise:
            self.receive(layer.joined(self.run.sequences.real_target), None, {})
        self._stepwise.clear()
        unread = [n for n in self.names.values() if n in self.unreadable and n not in self.expected]
        observed = {inputs.of_transformers(name, self.model) for name in self.sources}
        for name, weights in returned(self.model, self.inputs, unread, observed).items():
            self.intercepted(name, "outputs", of_scores(weights.log()))
            del self.unreadable[name]

    # --- what is running ----------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Called at the start of a module's forward."""
        if self.foreign():
            return
        if self.names[id(module)] in self.run.running and torch._C._current_graph_task_id() < 0:
            self._runs_again(module)
        run = self.run
        if module is self.model and not self.beside and len(self.inputs) < 2:
            self.inputs.append((args, named))
        if not run.running:
            if threading.get_ident() != self._thread:
                run.opened.enter_context(serving(self.observe_call))
            if self.texts is not None:
                self.begins(module, arguments_of(module, args, named))
            known = bool(self.sources) and not {"sdpa", "softmax"} & set(self.sources.values())
            if self.beside and not (known or run.outer is not None or self._skips()):
                run.opened.enter_context(self.intercept())
        if run.intercept is not None:
            try:
                run.intercept.begins([*args, *named.values()], outermost=not run.running)
            except InputError:
                if not run.running:
                    run.opened.close()
                    self.ends(module, None)
                raise
        self.ran.add(id(module))
        if run.sequences.two:
            run.states[self.names[id(module)]] = inputs.states_of(module, args, named)
        run.running.append(self.names[id(module)])

    def leave(self, module: nn.Module, output: Any) -> None:
        """Called at the end of the innermost module's forward, also after an error."""
        if self.foreign() or not (run := self.run).running:
            return
        try:
            if run.intercept is not None and output is not None:  # None after an error
                run.intercept.ends(module)
        finally:
            run.running.pop()
            if not run.running:
                run.steps.clear()
                run.opened.close()
                self.ends(module, output)
                if run.outer is not None:
                    self.runs[threading.get_ident()] = run.outer

    def _runs_again(self, module: nn.Module) -> None:
        """A module begins that is running: inside itself, called by a hook; or it was interrupted from the keyboard."""
        if calls_of_module(module) < 2:
            self.interrupted()
        elif not self.beside:
            raise InputError(
                f"model runs {self.names[id(module)]} inside of itself, such as in a hook; expected one forward, or "
                "qkv.watch, which records both"
            )
        else:
            again = Run(sequences=self.sequences, intercept=self.run.intercept, outer=self.run)
            self.runs[threading.get_ident()] = again

    def interrupted(self) -> None:
        """What runs in this thread has ended, though torch has called no hook."""
        run = self.run
        while run.running or run.outer is not None:
            run.running.clear()
            run.steps.clear()
            run.opened.close()
            if run.forward is not None and isinstance(run.forward.owner, nn.Module):
                self.ends(run.forward.owner, None)
            run = self.runs[threading.get_ident()] = run.outer or run

    def begins(self, owner: Any, batch: Mapping[str, Any]) -> None:
        """A forward begins: find the text that it reads. It may be part of another forward, which reads the text."""
        run = self.run
        if self.texts is None or run.forward is not None:
            return
        run.made.clear()
        if torch._C._current_graph_task_id() >= 0:  # a part of a forward that is computed again for the gradients
            run.paused = True
            return
        forward = self.texts.begin(owner, self.names.get(id(owner), ""), batch, self.model)
        run.forward, run.sequences, run.paused = forward, forward.read, not forward.recorded

    def ends(self, owner: Any, output: Any) -> None:
        """A forward has ended."""
        forward = self.run.forward
        if self.texts is not None and forward is not None and forward.owner is owner:
            self.run.forward = None
            self.texts.end(forward, output)

    # --- how a call is received ---------------------------------------------------------------------------------------

    def _received(
        self, name: str, source: str, call: Call, compute: Callable[[Any], Result], keys: Tensor | None = None, *,
        known: Result | None = None, fused: bool = True, appended: int = 0,
    ) -> Result:  # fmt: skip
        """The result of a call of a module after the edits of `qkv.edit` and the receiver.

        `keys` is True at real keys, if the mask tells. `known` is the result, if the model has computed it; otherwise
        it is computed by `compute`, or with `fused` by the receiver, together with the statistics.
        """
        if call.dropout_p and not self.beside:
            raise InputError(
                f"model applies dropout {call.dropout_p} to the weights of {name}; expected a model in evaluation mode"
            )
        call = replace(call, dropout_p=0.0) if call.dropout_p else call
        self.sources[name] = "differential" if name in self.differential else source
        self.on_call(name)
        observed = self._observed(name, source, call, keys, appended)
        again = name in self.differential and self.run.made[name] % 2 == 0  # the same softmaxes, for other values
        result, changed = known, dict[int, Call]()
        if observed.step:  # one of several queries over the same keys
            result = compute(call)
        elif self.run.forward is not None:
            self.run.forward.attends(self.modules.get(name), observed.group)
        if ACTIVE.get(self.model) and not observed.step:
            editable = observed.step is None and observed.source not in WEIGHTS_ONLY
            self._check_parts(name, observed)
            result, changed = applied(
                self.model, name, observed.group, observed.layer, partial(self._place, observed), call,
                known or compute(call), compute, editable=editable,
            )  # fmt: skip
        if again or self.run.paused or (self.layers is not None and observed.layer not in self.layers):
            return compute(call) if result is None else result
        result = compute(call) if result is None and not fused else result
        if len(changed) == call.q.shape[1] and len({id(one) for one in changed.values()}) == 1:
            call, changed = changed[0], {}  # all heads have the same edit
        observed = replace(observed, call=detached(call))
        with unwatched():
            if observed.step is not None:
                return self._step(observed, result)
            if self.texts is None:
                return self.receive(observed, result, changed)
            assert result is not None
            if self.run.forward is not None:
                self.texts.add(self.run.forward, self.modules.get(name), observed, changed)
            return result

    def _check_parts(self, name: str, observed: ObservedCall) -> None:
        """Raise `InputError` for edits of more than the output of a query, if a cache attends in several parts."""
        cache, forward = attending(), self.run.forward
        if not isinstance(cache, Sinks) or forward is None:
            return
        if forward.tokens == 1 or cache.seen + forward.tokens <= cache.sinks + cache.window:
            return
        for edits in ACTIVE[self.model]:
            for one in edits.of(name, observed.group, observed.layer).values():
                if not isinstance(one, Zero | Scale | Steer):
                    raise InputError(
                        f"edits has {type(one).__name__}, but {cache} attends to {forward.tokens} tokens in several "
                        "parts; expected one token at a time once it is full, or another cache"
                    )

    def _step(self, observed: ObservedCall, result: Result | None) -> Result:
        """Keep one of several queries over the same keys, which are received together."""
        if observed.step == 0:
            layer = Layer(observed.module, observed.group, observed.layer, observed.source, own_keys=True)
            self._stepwise.append(layer)
        layer = next(one for one in reversed(self._stepwise) if one.module == observed.module)
        layer.add(observed, observed.step or 0, 0, None)
        return served(observed.call) if result is None else result

    def _observed(self, name: str, source: str, call: Call, keys: Tensor | None, appended: int) -> ObservedCall:
        """A call with its place in the model and in the text."""
        run, n_queries, n_keys = self.run, call.q.shape[2], call.k.shape[2] - appended
        mask, real = call.mask, run.sequences.real_target.get(n_queries)
        read = source not in ("interface", "qkv")  # from torch's functions
        if read and isinstance(mask, Dense) and real is not None and len(real) == len(mask.tensor):
            mask = Dense(mask.tensor & real[:, None, :, None])  # so that padding queries cannot make it non-causal
        causal = is_causal(mask)
        causal |= attending() is not None  # in a cache of qkv, where a mask would hide nothing from a single query
        if (
            source == "interface"
            or name in self.expected
            or (read and type(self.model).__module__.startswith("transformers."))
        ):
            group, steps = inputs.of_transformers(name, self.model), False
        else:
            group = inputs.of_call(
                name, n_queries=n_queries, n_keys=n_keys, causal=causal, two_sided=self._two_sided,
                sequences=run.sequences, states=run.states.get(name, 0),
            )  # fmt: skip
            steps = self.texts is None and n_queries == 1 and not causal
        before = run.steps.pop(name, None)
        if steps and before is not None and torch.equal(before.call.k, call.k):
            run.steps[name] = replace(before, call=call, step=(before.step or 0) + 1)
            return run.steps[name]
        own, layer = self._number(group, name)
        if keys is None and group in ("self", "text", "encoder", "cross", "decoder"):
            keys = (run.sequences.real_target if group == "decoder" else run.sequences.real_source).get(n_keys)
            if keys is not None and appended:
                keys = nn.functional.pad(keys, (0, appended), value=True)
        own_keys = keys[:, :n_keys] if keys is not None and appended else keys  # the same tensor in all layers
        queries = own_keys if group != "cross" and n_queries == n_keys else run.sequences.real_target.get(n_queries)
        queries = None if steps else queries
        first = 0 if keys is None else run.first(keys)
        step = 0 if steps else None
        source = self.sources[name]
        observed = ObservedCall(name, group, layer, call, None, queries, keys, first, causal, source, own, step)
        if steps:
            run.steps[name] = observed
        return observed

    def _number(self, group: str, name: str) -> tuple[int, int]:
        """How many calls a module has made in this forward, and the number of its layer, as in the first forward."""
        cache, before = attending(), self.run.newest
        self.run.newest = None if cache is None else (name, cache, cache.seen)
        own = self.run.made.get(name, 0)
        if cache is not None and before == self.run.newest:  # a cache attends in several parts
            own -= 1
        self.run.made[name] = own + 1
        own = 0 if name in self.differential else own
        key = group, name, own
        if key not in self.numbers:
            used = {number for (of, _, _), number in self.numbers.items() if of == group}
            number = self._index(group, name)
            self.numbers[key] = max(used, default=-1) + 1 if number is None or number in used else number
        return own, self.numbers[key]

    def _index(self, group: str, name: str) -> int | None:
        """The number of the running layer in its stack: a module in several layers has the name of the first."""
        if (stack := self.stacks.get(group)) is None:
            return None
        return inputs.index_in(stack, [*self.run.running, name])

    @torch.no_grad()
    def of_layers(self, groups: Collection[str]) -> dict[str, dict[str, dict[str, Any]]]:
        """What is to be said of layers, for the attributes of a profile: by kind, group and number."""
        said: dict[str, Callable[[str], Mapping[int, Any]]] = {
            "differential": self.factors, "without_map": self.without_map,
        }  # fmt: skip
        found = {kind: {group: of(group) for group in groups} for kind, of in said.items()}
        return {
            kind: {group: {str(n): x for n, x in one.items()} for group, one in by_group.items() if one}
            for kind, by_group in found.items()
        }

    def without_map(self, group: str) -> dict[int, str]:
        """The layers of a group's stack in which nothing attends, and what they are, as far as the model says it."""
        if (stack := self.stacks.get(group)) is None or self.layers is not None:
            return {}
        layers = [int(name) for name, _ in self.modules[stack].named_children() if name.isdecimal()]
        config = inputs.config_of_text(self.model)
        kinds = list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
        has = {number for (of, _, _), number in self.numbers.items() if of == group}
        return {n: str(kinds[n]) if n < len(kinds) else "" for n in sorted({*layers} - has)} if has <= {*layers} else {}

    def factors(self, group: str) -> dict[int, float]:
        """λ of each layer with differential attention, whose map is softmax₁ − λ softmax₂ of halves of the heads."""
        found = {}
        for (of, name, _), number in self.numbers.items():
            if of == group and name in self.differential:
                at: Any = self.modules[name]
                first, second = (
                    (getattr(at, f"lambda_q{i}") * getattr(at, f"lambda_k{i}")).sum().exp() for i in (1, 2)
                )
                found[number] = float(first - second + at.lambda_init)
        return found

    @property
    def known_layers(self) -> str:
        """The numbers of the layers that attend: "0..5", or "3, 7, 11"."""
        found = sorted({*self.numbers.values()})
        return f"0..{found[-1]}" if found == [*range(len(found))] else ", ".join(map(str, found))

    def _place(self, observed: ObservedCall) -> Placed:
        """Where the queries and keys of a call are in the text."""
        call, forward = observed.call, self.run.forward
        if forward is not None:
            return forward.place(observed, self.modules.get(observed.module))
        start = None if observed.group == "cross" else call.k.shape[2] - call.q.shape[2]
        return Placed(start, 0, observed.queries, observed.first)

    def _shared(self, name: str, shared: Shared, result: Result) -> Result:
        """Record a call whose sequence several processes share: each records the statistics of the whole sequence."""
        if self.texts is not None or not isinstance(self.receive, Recorder):
            raise InputError(
                f"model shares its sequence with other processes in {name}; expected a call in one process, because "
                "only statistics are exchanged between processes"
            )
        if ACTIVE.get(self.model):
            raise InputError("group: attention that several processes share cannot be edited; expected no edits")
        if self.run.sequences.real_source or self.run.sequences.real_target:
            raise InputError(
                f"inputs has padding, but {name} shares its sequence with other processes, where padding is not "
                "supported; expected no padding"
            )
        self.sources[name] = "qkv"
        self.on_call(name)
        group = "self" if shared.grid.n_queries == shared.grid.n_keys else "cross"
        _, layer = self._number(group, name)
        if self.layers is None or layer in self.layers:
            self.receive.shared(name, group, layer, shared, result)
        return result


def _with_weights(call: Call) -> Result:
    result = served(call)
    return Result(result.out, result.lse, weights_of(call).to(result.out.dtype))


def unobserved(observer: Observer) -> list[str]:
    """Attention modules without a record: modules that ran without a call, and modules that could not be read."""
    ran = {observer.names[module] for module in observer.ran}
    silent = (set(observer.expected) & ran) - set(observer.sources)
    return sorted(silent | set(observer.unreadable))
