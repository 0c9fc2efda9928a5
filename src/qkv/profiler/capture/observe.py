"""Observe the attention of a model while it runs.

Inside `observe` every attention call is recorded: calls of Hugging Face models through transformers' attention
interface, calls of qkv's own attention through `qkv.kernels.serve`, and attention that a model computes in another way
through `intercept`. `Observer` tells which module attends, as which layer. Each call is read as a `Call`, edited by the
edits of `qkv.edit`, and received: measured, or collected. One pass gives both the output for the model and the
statistics, so the forward is not computed twice. No n × n tensor is formed, except by models that form one themselves.
The model and transformers' registries are restored afterwards, also after an error.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.huggingface.attention import is_known, routed, routes, wrapped
from qkv.kernels import serving
from qkv.models.generation import evaluation_mode
from qkv.nn import Composition
from qkv.profiler.capture.caches import Installed, listening, overridden
from qkv.profiler.capture.intercept import standing_aside
from qkv.profiler.capture.interventions import ACTIVE, Edits
from qkv.profiler.capture.observer import Interfaces, Observer, Run


@contextmanager
def following(observer: Observer) -> Iterator[None]:
    """Inside, `observer` receives the calls of its model and tells which texts it reads, beside the model."""
    model, texts = observer.modules.model, observer.running.texts
    assert texts is not None
    # Methods of qkv's models that read tokens without `forward` count as forwards: a step of generation, and the hidden
    # states of which a loss is computed.
    names = [name for name in ("step", "hidden") if hasattr(model, name) and hasattr(model, "start")]
    counted = {name: _counted(getattr(model, name), observer) for name in names}
    with observe(observer), overridden(model, counted), listening(texts.selected):
        yield


@contextmanager
def observe(observer: Observer) -> Iterator[Observer]:
    """Inside, `observer` records all attention of its model; everything is restored on exit.

    Temporary hooks on all modules tell which one is running; a call of qkv's attention is attributed to the innermost.
    A module that attends step by step, each time with one query over the same keys, is one layer. In Hugging Face
    models every call is a layer. An observer of texts neither puts the model into evaluation mode nor detaches it from
    autograd: its own functions compute, and the calls are collected beside them.
    """
    model, interfaces = observer.modules.model, Interfaces(observer)
    _refuse_split_heads(model)
    if observer.running.model_computes:
        with _alone(observer), _computing(observer), _checkpoints(observer):
            yield observer
        return
    with _alone(observer), evaluation_mode(model):
        with (
            _uncompiled(), _routed(observer), _hooked(observer), torch.no_grad(), interfaces.torch(),
            interfaces.hidden(), serving(interfaces.qkv),
        ):  # fmt: skip
            yield observer
        observer.finish()


OBSERVERS: WeakKeyDictionary[nn.Module, list[Observer]] = WeakKeyDictionary()
"""Who observes a model."""


def _counted(own: Callable[..., Any], observer: Observer) -> Callable[..., Any]:
    """A method that reads tokens, and counts as a forward."""

    def method(tokens: Tensor, *state: Any, **named: Any) -> Any:
        cache = next(iter((*state, *named.values())), None)
        observer.running.begin(method, {"tokens": tokens, "cache": cache})
        try:
            return own(tokens, *state, **named)
        finally:
            observer.running.end(method, None)

    return method


@contextmanager
def _computing(observer: Observer) -> Iterator[None]:
    """Inside, an observer receives the calls of a model that computes its attention itself."""
    interfaces = Interfaces(observer)
    with _uncompiled(), standing_aside(), _routed(observer), _hooked(observer), serving(interfaces.qkv):
        yield


def _replaced_checkpoints() -> AbstractContextManager[None]:
    """Inside, what gradient checkpointing computes again is what the forward computed, also after the context's end.

    Both functions by which `torch.utils.checkpoint` computes again are replaced for all observers.
    """
    module: Any = torch.utils.checkpoint
    generator, kind = module._checkpoint_without_reentrant_generator, module.CheckpointFunction

    class Reentrant:
        apply = staticmethod(lambda function, *args: kind.apply(_as_it_was(function), *args))

    def again(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return generator(_as_it_was(function), *args, **named)

    return overridden(module, {"CheckpointFunction": Reentrant, "_checkpoint_without_reentrant_generator": again})


def _as_it_was(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the edits of now whenever it is computed again for the gradients."""
    then = [
        (observer, replace(run, modules=list(run.modules), calls=dict(run.calls)), tuple(edits))
        for observer in _checkpoints.users
        if (run := observer.running.run).modules
        for edits in [ACTIVE.get(observer.modules.model, ())]
    ]

    def recomputed(*args: Any, **named: Any) -> Any:
        if torch._C._current_graph_task_id() < 0:
            return function(*args, **named)
        with ExitStack() as stack:
            for observer, run, edits in then:
                if observer not in _checkpoints.users and edits:  # the context has ended
                    stack.enter_context(_computing(observer))
                stack.enter_context(_again(observer, run, edits))
            return function(*args, **named)

    return recomputed


@contextmanager
def _again(observer: Observer, run: Run, edits: Sequence[Edits]) -> Iterator[None]:
    """Inside, a part of a forward is computed again for its gradients, with the edits that it had, unrecorded.

    Args:
        observer: what observed it.
        run: a copy of what the forward was doing.
        edits: those that were active then.
    """
    thread, stack = threading.get_ident(), ACTIVE.setdefault(observer.modules.model, [])
    runs, before, active = observer.running.runs, observer.running.run, list(stack)
    stack[:] = edits
    contexts = ExitStack()
    runs[thread] = replace(run, calls=dict(run.calls), steps={}, paused=True, contexts=contexts)
    try:
        with ExitStack() as hooks, serving(Interfaces(observer).qkv):
            for ended in set(edits) - set(active):
                hooks.enter_context(ended.hooked())
            yield
    finally:
        contexts.close()
        runs[thread] = before
        stack[:] = active


_checkpoints = Installed(_replaced_checkpoints)
_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


@contextmanager
def _alone(observer: Observer) -> Iterator[None]:
    """A model is observed by one thread at a time, because its hooks are called in all of them."""
    model = observer.modules.model
    attending = {id(x) for x in model.modules() if routes(x) or isinstance(x, Composition)}
    for other, users in list(OBSERVERS.items()):
        if users and other is not model and any(id(x) in attending for x in other.modules()):
            raise InputError(
                f"model {type(model).__name__} has the attention of {type(other).__name__}, which is profiled, watched "
                "or edited; expected one of the two in both, because a call is reported to one of them only"
            )
    lock = _LOCKS.setdefault(model, threading.RLock())
    while not lock.acquire(timeout=0.05):
        if any(o.running.model_computes for o in OBSERVERS.get(model, ())):  # for as long as the user likes
            raise InputError(
                f"model {type(model).__name__} is watched or edited by another thread; expected one thread at a time"
            )
    OBSERVERS.setdefault(model, []).append(observer)
    try:
        yield
    finally:
        OBSERVERS[model].remove(observer)
        lock.release()


FLEX = "torch.nn.attention.flex_attention"
_EAGER = {  # a process has one stance
    "torch._dynamo": Installed(lambda: torch.compiler.set_stance("force_eager")),
    FLEX: Installed(lambda: overridden(sys.modules[FLEX], {"_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True})),
}
"""By modules that are slow to import: if one is not loaded, it compiles nothing."""


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled parts of the model in eager mode, because compiled code cannot be observed."""
    with ExitStack() as stack:
        for module, eager in _EAGER.items():
            if module in sys.modules:
                stack.enter_context(eager())
        yield


@contextmanager
def _routed(observer: Observer) -> Iterator[None]:
    """Route the model's attention through transformers' interface to the observer."""
    interfaces, model = Interfaces(observer), observer.modules.model
    if not observer.modules.routed:
        yield
    elif not observer.running.model_computes and all(map(is_known, observer.checks.functions.values())):
        with routed(model, interfaces.transformers):
            yield
    else:  # the model's own functions run as they are, with the masks that they expect
        with wrapped(model, interfaces.own_function):
            yield


@contextmanager
def _hooked(observer: Observer) -> Iterator[None]:
    """Install hooks that tell the observer which modules are running.

    In layers of `nn.TransformerEncoder` functions around their forwards do so: with hooks they would compute otherwise.
    """
    modules, running = observer.modules, observer.running
    enter = functools.partial(running.enter, Interfaces(observer).open)

    layers = [x for x in modules.model.modules() if isinstance(x, nn.TransformerEncoderLayer)]
    unhooked = {id(x) for layer in layers for x in layer.modules()}
    with ExitStack() as hooks:
        for name, module in modules.by_name.items():
            of_torch = type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())
            if isinstance(module, Composition) or of_torch:  # its calls belong to the layer that contains it
                continue
            if id(module) in unhooked:
                hooks.enter_context(overridden(module, {"forward": _reporting(module, enter, running.leave)}))
            elif not name or not modules.all_routed or name in modules.enclosing:
                hooks.enter_context(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(running.leave, always_call=True))
        hooks.callback(running.interrupt)
        yield


def _reporting(module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> Callable[..., Any]:
    """The forward of a module, which tells when it begins and ends."""
    own = module.forward

    @functools.wraps(own)
    def forward(*args: Any, **named: Any) -> Any:
        enter(module, args, named)
        output = None
        try:
            output = own(*args, **named)
        finally:
            leave(module, args, output)
        return output

    return forward


def _refuse_split_heads(model: nn.Module) -> None:
    """Raise `InputError` for tensor parallelism, in which each process computes some of the heads only."""
    parts = getattr(model, "_tp_size", None)
    of_torch = sys.modules.get("torch.distributed.tensor")
    whole = any(
        c.__name__ == "FSDPModule" for kind in set(map(type, model.modules())) for c in kind.__mro__
    )  # gathered to be used
    if of_torch is not None and not whole:
        for p in model.parameters():
            if isinstance(p, of_torch.DTensor) and any(placement.is_shard() for placement in p.placements):
                parts = p.device_mesh.size()
    if isinstance(parts, int) and parts > 1:
        raise InputError(
            f"model is split over {parts} processes by tensor parallelism, where each has some of the heads only; "
            "expected all heads in one process, as with DDP or FSDP"
        )
