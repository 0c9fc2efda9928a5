"""Run models of transformers with qkv's attention (`use`, `register`), or with a function around their own.

`call_of` translates the arguments of transformers' attention interface into a `Call` of qkv: every argument that
affects the weights is either supported or raises an error; only arguments known to be without effect are ignored.
(Written for transformers 5.24.)
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkv import biases
from qkv._packages import check_tested, require
from qkv.compat import autocast_dtype
from qkv.engine import Call
from qkv.errors import InputError
from qkv.huggingface.masks import MASKS, NAME, ROUTED, LazyMask, brief, lazy_mask, own_name, read_mask
from qkv.kernels import opaque, serve
from qkv.masks import Causal, Dense, Mask
from qkv.masks.convert import is_causal
from qkv.normalizers import Softmax
from qkv.scores import Dot

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# Arguments without effect on the weights: bookkeeping, or already in the mask.
INERT = {
    "cache_position",
    "deterministic",
    "is_causal",  # read where the model's own attention function reads it
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "sliding_window",
    "use_cache",
}


def call_of(
    module: nn.Module,
    name: str,
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b hkv nk d"],
    value: Float[Tensor, "b hkv nk dv"],
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " h"] | None = None,
    position_bias: Float[Tensor, "#b #h nq more"] | None = None,
    indices: Int[Tensor, "b nq few"] | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Call, Bool[Tensor, "b n_keys"] | None]:
    """The call that transformers makes, and its padding mask (True at real keys) if the attention mask has one.

    The unused slots of a static cache are left out of the call. The arguments are those that the model passes:
    `attention_mask` is a `LazyMask`, a 4-D tensor or None, `s_aux` the logit of a sink for each head, and `indices` are
    keys to which each query is restricted, in addition to the mask (DeepSeek-V3.2). Where transformers passes no mask
    to the model's own function, and this function reads `is_causal` of the module, as torch's SDPA does, so does qkv.
    """
    for argument, passed in others.items():
        if argument not in INERT and passed is not None and passed is not False:
            raise InputError(
                f"{argument} is {brief(passed)}, which {name} passes to its attention; expected only arguments that "
                "qkv supports"
            )
    if (dtype := autocast_dtype(query)) is not None:  # as for torch's attention: rotary leaves q and k in float32
        query, key, value = (x.to(dtype) for x in (query, key, value))
    mask, bias, keys = read_mask(attention_mask, query.shape[2], key.shape[2])
    causal = causality(module, others) if query.shape[2] > 1 else None
    if attention_mask is None and query.shape[2] > 1:
        if causal is None and own_implementation(module) is None and getattr(module, "is_causal", False):
            raise InputError(f"attention_mask is None in {name}, whose is_causal is True; expected a mask")
        if causal:  # the unused slots of a static cache follow
            mask, key, value = Causal(), key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    if isinstance(attention_mask, LazyMask):
        n_keys = attention_mask.grid.n_keys
        if causal not in (None, is_causal(mask)) and "flash" in str(own_implementation(module)):
            raise InputError(
                f"is_causal is {causal} in {name}, where the model has a mask that is {'not ' * bool(causal)}causal; "
                "expected the same in both, or the implementation sdpa"
            )
        key, value = key[:, :, :n_keys], value[:, :, :n_keys]
    if indices is not None:
        chosen = _chosen(name, indices, query, key)
        mask = chosen if mask is None else mask & chosen
    if position_bias is not None:
        bias = (biases.TensorBias(position_bias[..., : key.shape[2]]), *bias)
    if softcap is not None:
        bias = (biases.SoftCap(softcap), *bias)
    return Call.of(query, key, value, mask, bias, Dot(scaling), Softmax(sink=s_aux), dropout), keys


def own_implementation(module: nn.Module) -> str | None:
    """The implementation that the configuration of a module selected before qkv's; None if it does not say."""
    return own_name(getattr(module, "config", None))


def causality(module: nn.Module, arguments: Mapping[str, Any]) -> bool | None:
    """What the model's own function applies where it gets no mask: causal or not; None if it needs a mask for that.

    SDPA and FlashAttention take `is_causal` from the arguments or from the module; eager attention takes it from none.
    """
    name, given = own_implementation(module), arguments.get("is_causal")
    if name is None:
        return given
    if "sdpa" not in name and "flash" not in name:
        return None
    return bool(getattr(module, "is_causal", True) if given is None else given)


def routes(module: nn.Module) -> bool:
    """True if the module's code gets its attention function from transformers' attention interface."""
    return bool(globals_of(module))


def globals_of(module: nn.Module) -> dict[str, Any]:
    """The globals of the code of a module that calls transformers' attention interface; empty if it does not."""
    kind: type = type(module)
    return _class_globals(kind)


@functools.cache
def _class_globals(kind: type) -> dict[str, Any]:
    for cls in kind.__mro__:
        if cls is nn.Module or cls.__module__ == "transformers.modeling_utils":
            break
        for method in vars(cls).values():
            plain = inspect.unwrap(method) if callable(method) else None
            if isinstance(plain, FunctionType) and INTERFACE in plain.__code__.co_names:
                return plain.__globals__
    return {}


def configurations(model: nn.Module) -> list[Any]:
    """Every configuration that selects the attention implementation of some module of the model, each once."""
    found = dict[int, Any]()
    for module in model.modules():
        config = getattr(module, "config", None)
        if id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            continue
        if any(map(routes, module.modules())):
            found[id(config)] = config
    return list(found.values())


def _chosen(name: str, indices: Tensor, query: Tensor, key: Tensor) -> Mask:
    """The mask of the keys in `indices`; it is quadratic, but smaller than the scores by which the model chose them."""
    batch, _, n_queries, _ = query.shape
    n_keys = key.shape[2]
    if indices.ndim != 3 or indices.shape[:2] != (batch, n_queries):
        raise InputError(
            f"indices is {brief(indices)} in {name}, expected (batch, queries, chosen keys) with "
            f"(batch, queries) = {(batch, n_queries)}"
        )
    kept = indices.clamp(max=n_keys).long()  # indices may point to unused slots of a static cache
    chosen = torch.zeros(batch, n_queries, n_keys + 1, dtype=torch.bool, device=query.device)
    return Dense(chosen.scatter_(2, kept, True)[:, None, :, :n_keys])


# --- models of transformers -------------------------------------------------------------------------------------------


_GUESTS = (f"qkv_guest_{n}" for n in itertools.count())
Model = TypeVar("Model", bound=nn.Module)


def cache_name(model: nn.Module) -> str:
    """What a model calls its key-value cache, as an argument and as a field of its output."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@contextmanager
def routed(model: nn.Module, attend: Callable[..., tuple[Tensor, Any]]) -> Iterator[None]:
    """Inside, transformers' interface calls `attend` for all attention of the model, with masks for `call_of`.

    The model and transformers' registries are restored on exit, also after an error.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    configs = configurations(model)
    before = [config._attn_implementation_internal for config in configs]
    guests = {implementation: next(_GUESTS) for implementation in before}
    ROUTED.update({guest: ROUTED.get(own, own) for own, guest in guests.items()})
    try:
        for guest in guests.values():
            _register(guest, attend)
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = guests[implementation]
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation
        for guest in guests.values():
            AttentionInterface._global_mapping.pop(guest, None)
            AttentionMaskInterface._global_mapping.pop(guest, None)
            ROUTED.pop(guest)


def register() -> None:
    """Register the attention implementation "qkv" with transformers; it may be called repeatedly.

    Afterwards ``model.set_attn_implementation("qkv")`` or ``from_pretrained(..., attn_implementation="qkv")`` runs any
    model that uses transformers' `AttentionInterface` on qkv's kernels: forward and backward, `generate` with any
    cache, padding, windows, sinks, soft caps, position biases, cross-attention, dropout. The output of a query without
    a visible key (such as padding) is 0, where other implementations differ from one another. A module's `is_causal` is
    read where the implementation "sdpa" reads it. If a model does not use the interface, transformers only warns; `use`
    raises.
    """
    require("qkv.huggingface", "transformers")
    _register(NAME, attend)
    _register(MASKS, attend)


def _register(name: str, attend: Callable[..., tuple[Tensor, Any]]) -> None:
    check_tested("transformers")
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, lazy_mask)  # otherwise masks, such as windows, would be dropped silently


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
    own = [own_name(config) or "" for config in configurations(model)]
    setter: Any = getattr(model, "set_attn_implementation", None)  # None in a module that contains models
    if setter is not None:
        setter(NAME)
    for config, name in zip(
        configurations(model), own, strict=True
    ):  # the setter misses copies, as of ViT-MAE's decoder
        config._attn_implementation_internal = NAME if "sdpa" in name or "flash" in name else MASKS
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
    call, _ = call_of(module, type(module).__name__, query, key, value, attention_mask, **arguments)
    with torch.autocast(query.device.type, enabled=False):  # the kernels use float32 where they need it
        result = serve(call, weights=asks_weights(arguments))
    return result.out.transpose(1, 2).contiguous(), result.weights


def asks_weights(arguments: Mapping[str, Any]) -> bool:
    """Whether a model wants the weights of a call, which some models say to transformers' hooks only."""
    from transformers.utils import output_capturing

    asked = output_capturing._active_collector.get() or {}
    return bool(arguments.get("output_attentions")) or any("attentions" in name for name in asked)


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
    from transformers.modeling_utils import AttentionInterface

    wrapper = frozenset(id(module) for module in model.modules() if routes(module)), on_call
    names = {config._attn_implementation_internal for config in configurations(model)}
    entries: list[tuple[dict[Any, Any], Any, Callable[..., Any]]] = []
    local = (globals_of(module).get(INTERFACE) for module in model.modules())  # some models have functions of their own
    mappings = [x._local_mapping for x in local if x is not None and x._local_mapping]
    interfaces = [AttentionInterface._global_mapping, *{id(x): x for x in mappings}.values()]
    entries += [(interface, name, _calling) for interface in interfaces for name in names]
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
