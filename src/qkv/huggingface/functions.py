"""The attention functions of a Hugging Face model: which a module calls, whether qkv knows it, and how to wrap it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from qkv.huggingface.attention import configurations, routes

INTERFACE, EAGER = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"
EAGER_NAMES = (EAGER, "sdpa_attention_forward")
"""Functions of transformers that run on every device and take masks as tensors."""

Own = Callable[[], tuple[Tensor, Any]]
"""Runs the model's attention function with the arguments of the call."""
OnCall = Callable[[nn.Module, Callable[..., Any], Own, tuple[Any, ...], dict[str, Any]], tuple[Tensor, Any]]
"""Module, its attention function, `Own`, and the arguments (query, key, value, mask) and (scaling, …) of the call."""


def function_of(module: nn.Module) -> Callable[..., Any] | None:
    """The attention function that a module of transformers calls by its configuration; None if it cannot be found."""
    found = _globals(module)
    name = getattr(getattr(module, "config", None), "_attn_implementation_internal", None)
    registered = found.get(INTERFACE, {}).get(name)
    function = found.get(EAGER) if registered is None else registered
    return function


def eager_of(module: nn.Module) -> Callable[..., Any] | None:
    """The function that a module calls in transformers' eager implementation; None if it cannot be found."""
    function: Callable[..., Any] | None = _globals(module).get(EAGER)
    return function


def is_known(function: Callable[..., Any] | None) -> bool:
    """Whether a function is one of transformers or of qkv, whose arguments `call_of` understands."""
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__module__", None) or ""
    return function is None or module.partition(".")[0] in ("transformers", "qkv")


def name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


@contextmanager
def wrapped(model: nn.Module, on_call: OnCall) -> Iterator[None]:
    """Inside, `on_call` is called in place of the attention functions of the model, which it can run as they are.

    The configuration and the masks of the model do not change, so its own functions get what they always get. Other
    models are not affected. Transformers' registries are restored on exit, also after an error.
    """
    modules = {id(module) for module in model.modules() if routes(module)}
    names = {config._attn_implementation_internal for config in configurations(model)}
    undo: list[Callable[[], None]] = []
    try:
        for interface in _interfaces(model):
            for name in names:
                undo.append(_wrap(interface, name, modules, on_call))
        yield
    finally:
        for restore in reversed(undo):
            restore()


def _wrap(interface: dict[Any, Any], name: Any, modules: set[int], on_call: OnCall) -> Callable[[], None]:
    """Replace an entry of transformers' mapping; returns the function that restores it."""
    before = interface.get(name)

    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        function: Any = _globals(module).get(EAGER) if before is None else before
        if id(module) not in modules:
            result: tuple[Tensor, Any] = function(module, *args, **kwargs)
            return result
        return on_call(module, function, functools.partial(function, module, *args, **kwargs), args, kwargs)

    attend.__module__ = __name__ if is_known(before) else "wrapped"  # so that `is_known` stays right inside
    interface[name] = attend

    def restore() -> None:
        if interface.get(name) is not attend:  # replaced by somebody else meanwhile
            return
        if before is None:
            del interface[name]
        else:
            interface[name] = before

    return restore


def _interfaces(model: nn.Module) -> list[dict[Any, Any]]:
    """Transformers' mapping of names to functions; models with functions of their own have a further one each."""
    from transformers.modeling_utils import AttentionInterface

    local = [
        interface._local_mapping
        for module in model.modules()
        if routes(module) and (interface := _globals(module).get(INTERFACE)) is not None
        if interface._local_mapping
    ]
    return [AttentionInterface._global_mapping, *{id(x): x for x in local}.values()]


def _globals(module: nn.Module) -> dict[str, Any]:
    """The globals of the code of a module that calls transformers' attention interface."""
    kind: type = type(module)
    return _class_globals(kind)


@functools.cache
def _class_globals(kind: type) -> dict[str, Any]:
    for cls in kind.__mro__:
        for method in vars(cls).values():
            plain = inspect.unwrap(method) if callable(method) else None
            if isinstance(plain, FunctionType) and INTERFACE in plain.__code__.co_names:
                return plain.__globals__
    return {}
