"""The attention functions of a Hugging Face model: which a module calls, whether qkv knows it, and how to wrap it."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from qkv.huggingface.attention import configurations, routes
from qkv.huggingface.masks import lazy_mask

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
    if hasattr(registered, "replaced"):  # the model is watched
        registered = registered.replaced
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


@dataclass(frozen=True, eq=False)
class _Wrapper:
    """Who is called in place of the attention functions, and for which modules."""

    modules: frozenset[int]
    on_call: OnCall


_LOCK = threading.Lock()
_ACTIVE: dict[tuple[int, Any], list[_Wrapper]] = {}
"""The wrappers of each entry of each mapping of transformers; several threads may watch models."""


@contextmanager
def wrapped(model: nn.Module, on_call: OnCall) -> Iterator[None]:
    """Inside, `on_call` is called in place of the attention functions of the model, which it can run as they are.

    The configuration and the masks of the model do not change, so its own functions get what they always get. A mask
    that transformers makes for them also carries the `LazyMask` that describes it, as its attribute ``qkv_mask``.
    Other models are not affected. Transformers' registries are restored on exit, also after an error.
    """
    from transformers.masking_utils import AttentionMaskInterface

    wrapper = _Wrapper(frozenset(id(module) for module in model.modules() if routes(module)), on_call)
    names = {config._attn_implementation_internal for config in configurations(model)}
    entries: list[tuple[dict[Any, Any], Any, Callable[..., Any]]] = []
    entries += [(interface, name, _calling) for interface in _interfaces(model) for name in names]
    masks = AttentionMaskInterface._global_mapping
    entries += [(masks, name, _describing) for name in names if name in masks]
    try:
        with _LOCK:
            for interface, name, made in entries:
                _install(interface, name, made).append(wrapper)
        yield
    finally:
        with _LOCK:
            for interface, name, _ in entries:
                _remove(interface, name, wrapper)


def _install(interface: dict[Any, Any], name: Any, made: Callable[..., Any]) -> list[_Wrapper]:
    """The wrappers of an entry of a mapping, which is replaced if it has none yet."""
    key = id(interface), name
    if key not in _ACTIVE:
        _ACTIVE[key] = []
        interface[name] = made(interface.get(name), _ACTIVE[key])
    return _ACTIVE[key]


def _remove(interface: dict[Any, Any], name: Any, wrapper: _Wrapper) -> None:
    key = id(interface), name
    if wrapper not in _ACTIVE.get(key, []):
        return
    _ACTIVE[key].remove(wrapper)
    if not _ACTIVE[key]:
        del _ACTIVE[key]
        before = interface[name].replaced
        if before is None:
            del interface[name]
        else:
            interface[name] = before


def _calling(before: Callable[..., Any] | None, wrappers: list[_Wrapper]) -> Callable[..., Any]:
    """An attention function that calls the newest wrapper of a module; `before` is None for the eager function."""

    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        function: Any = eager_of(module) if before is None else before
        wrapper = next((w for w in reversed(wrappers) if id(module) in w.modules), None)
        if wrapper is None:
            result: tuple[Tensor, Any] = function(module, *args, **kwargs)
            return result
        return wrapper.on_call(module, function, functools.partial(function, module, *args, **kwargs), args, kwargs)

    attend.replaced = before  # type: ignore[attr-defined]
    return attend


def _describing(before: Callable[..., Any], wrappers: list[_Wrapper]) -> Callable[..., Any]:
    """A mask function whose masks carry their description."""

    def mask(*args: Any, **kwargs: Any) -> Any:
        made = before(*args, **kwargs)
        if made is not None:
            made.qkv_mask = lazy_mask(*args, **kwargs)
        return made

    mask.replaced = before  # type: ignore[attr-defined]
    return mask


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
