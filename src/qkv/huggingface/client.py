"""Run models of transformers with qkv's attention (`use`, `register`), or with a function around their own."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv._packages import check_tested, require
from qkv.errors import InputError
from qkv.huggingface.attention import INTERFACE, call_of, configurations, globals_of, lazy_mask, routes
from qkv.kernels import opaque, serve

_NAMES = (f"qkv_guest_{n}" for n in itertools.count())  # without "sdpa", "flash" and "/", which transformers interprets


@contextmanager
def routed(model: nn.Module, attend: Callable[..., tuple[Tensor, Any]]) -> Iterator[None]:
    """Inside, transformers' interface calls `attend` for all attention of the model, with masks for `call_of`.

    The model and transformers' registries are restored on exit, also after an error.
    """
    check_tested("transformers")
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    name = next(_NAMES)
    configs = configurations(model)
    before = [config._attn_implementation_internal for config in configs]
    try:
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, lazy_mask)
        for config in configs:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


NAME = "qkv"  # transformers treats names that contain "sdpa", "flash" or "/" in a special way
Model = TypeVar("Model", bound=nn.Module)


def register() -> None:
    """Register the attention implementation "qkv" with transformers; it may be called repeatedly.

    Afterwards ``model.set_attn_implementation("qkv")`` or ``from_pretrained(..., attn_implementation="qkv")`` runs any
    model that uses transformers' `AttentionInterface` on qkv's kernels: forward and backward, `generate` with any
    cache, padding, windows, sinks, soft caps, position biases, cross-attention, dropout. The output of a query without
    a visible key (such as padding) is 0, where other implementations differ from one another. If a model does not use
    the interface, transformers only warns; `use` raises.
    """
    require("qkv.huggingface", "transformers")
    check_tested("transformers")
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lazy_mask)  # otherwise masks, such as windows, would be dropped silently


def use(model: Model) -> Model:
    """Switch the attention of a model to qkv's kernels; ``model.set_attn_implementation("sdpa")`` switches back.

    The code of the model's modules is inspected before anything runs. If none of them uses transformers' attention
    interface, an error is raised. Some models have single parts that do not use it, such as the pooling head of
    SigLIP; these parts do not change.

    Args:
        model: a Hugging Face model, or a module that contains some.

    Returns:
        the same object.

    Raises:
        InputError: if no attention of the model uses transformers' attention interface; the model is not changed.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = use(LlamaModel(LlamaConfig(vocab_size=50, **sizes)))
    >>> model.config._attn_implementation
    'qkv'
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is {type(model).__name__}, expected a Hugging Face model")
    if not any(map(routes, model.modules())):
        raise InputError(
            f"model {type(model).__name__} does not use transformers' attention interface (AttentionInterface), so qkv "
            "cannot compute its attention; expected a model that does, such as GPT-2, Llama or BERT"
        )
    register()
    setter: Any = getattr(model, "set_attn_implementation", None)  # None in a module that contains models
    if setter is not None:
        setter(NAME)
    for config in configurations(model):  # the setter misses copies in modules, such as those of ViT-MAE's decoder
        config._attn_implementation_internal = NAME
    return model


@opaque  # torch.compile would retrace the choice of kernels for every length of a cache
def attend(
    module: nn.Module,
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b hkv nk d"],
    value: Float[Tensor, "b hkv nk dv"],
    attention_mask: Any,
    **arguments: Any,
) -> tuple[Float[Tensor, "b nq h dv"], Float[Tensor, "b h nq nk"] | None]:
    """The attention function for transformers. It also returns the weights if `output_attentions` is set."""
    device = query.device.type
    if torch.is_autocast_enabled(device):  # cast as for torch's attention: rotary leaves q and k in float32
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    with torch.autocast(device, enabled=False):  # the kernels use float32 where they need it
        call, _ = call_of(module, type(module).__name__, query, key, value, attention_mask, **arguments)
        result = serve(call, weights=bool(arguments.get("output_attentions")))
    return result.out.transpose(1, 2).contiguous(), result.weights


EAGER = "eager_attention_forward"
EAGER_NAMES = (EAGER, "sdpa_attention_forward")
"""Functions of transformers that run on every device and take masks as tensors."""

Own = Callable[[], tuple[Tensor, Any]]
"""Runs the model's attention function with the arguments of the call."""
OnCall = Callable[[nn.Module, Callable[..., Any], Own, tuple[Any, ...], dict[str, Any]], tuple[Tensor, Any]]
"""Module, its attention function, `Own`, and the arguments (query, key, value, mask) and (scaling, …) of the call."""


def function_of(module: nn.Module) -> Callable[..., Any] | None:
    """The attention function that a module of transformers calls by its configuration; None if it cannot be found."""
    found = globals_of(module)
    name = getattr(getattr(module, "config", None), "_attn_implementation_internal", None)
    registered = found.get(INTERFACE, {}).get(name)
    if hasattr(registered, "replaced"):  # the model is watched
        registered = registered.replaced
    function = found.get(EAGER) if registered is None else registered
    return function


def eager_of(module: nn.Module) -> Callable[..., Any] | None:
    """The function that a module calls in transformers' eager implementation; None if it cannot be found."""
    function: Callable[..., Any] | None = globals_of(module).get(EAGER)
    return function


def is_known(function: Callable[..., Any] | None) -> bool:
    """Whether a function is one of transformers or of qkv, whose arguments `call_of` understands."""
    return function is None or name_of(function).partition(".")[0] in ("transformers", "qkv")


def name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


_LOCK = threading.Lock()  # several threads may watch models


@contextmanager
def wrapped(model: nn.Module, on_call: OnCall) -> Iterator[None]:
    """Inside, `on_call` is called in place of the attention functions of the model, which it can run as they are.

    The configuration and the masks of the model do not change, so its own functions get what they always get. A mask
    that transformers makes for them also carries the `LazyMask` that describes it, as its attribute ``qkv_mask``.
    Other models are not affected. Transformers' registries are restored on exit, also after an error.
    """
    from transformers.masking_utils import AttentionMaskInterface

    wrapper = frozenset(id(module) for module in model.modules() if routes(module)), on_call
    names = {config._attn_implementation_internal for config in configurations(model)}
    entries: list[tuple[dict[Any, Any], Any, Callable[..., Any]]] = []
    entries += [(interface, name, _calling) for interface in _interfaces(model) for name in names]
    masks = AttentionMaskInterface._global_mapping
    entries += [(masks, name, _describing) for name in names if name in masks]
    try:
        with _LOCK:
            for interface, name, made in entries:
                if not hasattr(interface.get(name), "wrappers"):
                    interface[name] = made(interface.get(name))
                interface[name].wrappers.append(wrapper)
        yield
    finally:
        with _LOCK:
            for interface, name, _ in entries:
                function: Any = interface.get(name)
                if wrapper in getattr(function, "wrappers", ()):
                    function.wrappers.remove(wrapper)
                    if not function.wrappers:
                        del interface[name]
                        if function.replaced is not None:
                            interface[name] = function.replaced


def _calling(before: Callable[..., Any] | None) -> Callable[..., Any]:
    """An attention function that calls the newest of its `wrappers` that has the module.

    `before` is what it replaces, None for the eager function.
    """
    wrappers: list[tuple[frozenset[int], OnCall]] = []

    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        function: Any = eager_of(module) if before is None else before
        on_call = next((call for modules, call in reversed(wrappers) if id(module) in modules), None)
        if on_call is None:
            result: tuple[Tensor, Any] = function(module, *args, **kwargs)
            return result
        return on_call(module, function, functools.partial(function, module, *args, **kwargs), args, kwargs)

    attend.replaced, attend.wrappers = before, wrappers  # type: ignore[attr-defined]
    return attend


def _describing(before: Callable[..., Any]) -> Callable[..., Any]:
    """A mask function whose masks carry their description."""

    def mask(*args: Any, **kwargs: Any) -> Any:
        made = before(*args, **kwargs)
        if made is not None:
            made.qkv_mask = lazy_mask(*args, **kwargs)
        return made

    mask.replaced, mask.wrappers = before, []  # type: ignore[attr-defined]
    return mask


def _interfaces(model: nn.Module) -> list[dict[Any, Any]]:
    """Transformers' mapping of names to functions; models with functions of their own have a further one each."""
    from transformers.modeling_utils import AttentionInterface

    local = [
        interface._local_mapping
        for module in model.modules()
        if routes(module) and (interface := globals_of(module).get(INTERFACE)) is not None
        if interface._local_mapping
    ]
    return [AttentionInterface._global_mapping, *{id(x): x for x in local}.values()]
