"""What transformers asks of an attention function, as a `Call`. (Written against transformers 5.23.)

Everything that says which weights result is honoured or refused; nothing is ignored but what is known to be harmless.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkv import biases
from qkv._engine.call import Call, as_mask
from qkv.errors import InputError
from qkv.huggingface.masks import LazyMask
from qkv.masks import Causal, Mask
from qkv.normalizers import Softmax
from qkv.scores import Dot

# Arguments that say nothing about which weights result: bookkeeping, or already in the mask.
INERT = {
    "cache_position",
    "deterministic",
    "is_causal",  # read where there is no mask
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
) -> tuple[Call, Bool[Tensor, "b seen"] | None]:
    """The call that transformers makes, and which of its keys are real tokens where the model's own mask says so.

    Keys beyond the last that any query may see, of a static cache with room to spare, are left out of the call.

    Args:
        module: the model's own attention module.
        name: what to call it in errors.
        query: as the model hands it over; so are all that follow.
        key: of fewer heads than the queries, if they share them.
        value: likewise.
        attention_mask: a `LazyMask`, a 4-D tensor of the model's own, or None.
        scaling: of q·k; 1/√d if None.
        softcap: scores become softcap · tanh(score / softcap).
        s_aux: logit of a sink for each head.
        position_bias: added to the scores.
        indices: the only keys that each query may attend to, of those that the mask lets it see (DeepSeek-V3.2).
        dropout: probability; the model passes 0 in evaluation mode.
        others: whatever else the model passes.

    Raises:
        InputError: for an argument that is neither known nor inert, and for a mask that cannot be read.
    """
    for argument, given in others.items():
        if argument not in INERT and given is not None and given is not False:
            raise InputError(
                f"{name} passes {argument}={_brief(given)} to its attention, "
                "which qkv does not know and will not ignore"
            )
    mask, bias, keys = read_mask(attention_mask, query.shape[2], key.shape[2])
    if attention_mask is None and query.shape[2] > 1:
        mask = _causality(name, module, others.get("is_causal"))
    if isinstance(attention_mask, LazyMask):
        seen = attention_mask.grid.n_keys
        key, value = key[:, :, :seen], value[:, :, :seen]
    if indices is not None:
        chosen = _chosen(name, indices, query, key)
        mask = chosen if mask is None else mask & chosen
    if position_bias is not None:
        bias = (biases.Dense(position_bias[..., : key.shape[2]]), *bias)
    if softcap is not None:
        bias = (biases.SoftCap(softcap), *bias)
    return Call.of(query, key, value, mask, bias, Dot(scaling), Softmax(sink=s_aux), dropout), keys


def routes(module: nn.Module) -> bool:
    """Whether the module's own code asks transformers' interface for its attention function."""
    kind: type = type(module)
    return _class_routes(kind)


@functools.cache
def _class_routes(kind: type) -> bool:
    for cls in kind.__mro__:
        if cls is nn.Module or cls.__module__ == "transformers.modeling_utils":
            return False
        for method in vars(cls).values():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
                return True
    return False


def configurations(model: nn.Module) -> list[Any]:
    """Every configuration from which attention of the model learns its implementation, each once."""
    found = (
        module.config
        for module in model.modules()
        if hasattr(getattr(module, "config", None), "_attn_implementation_internal")
        and any(map(routes, module.modules()))
    )
    return list({id(config): config for config in found}.values())


def read_mask(given: Any, n_queries: int, n_keys: int) -> tuple[Mask | None, tuple[biases.Bias, ...], Tensor | None]:
    """Mask, bias and real keys of what the model passes as its attention mask."""
    if given is None:
        return None, (), None
    if isinstance(given, LazyMask):
        if given.shape[2:] != (n_queries, n_keys):
            raise InputError(
                f"the model made an attention mask for {given.shape[2]} queries × {given.shape[3]} keys, "
                f"but attends with {n_queries} × {n_keys}"
            )
        return given.mask, (), given.keys
    known = isinstance(given, Tensor) and given.ndim == 4 and (given.dtype == torch.bool or given.is_floating_point())
    if not known:
        raise InputError(
            f"the model passes an attention mask that is {_brief(given)}, "
            "expected a tensor of 4 dimensions, bool or float"
        )
    given = given[..., :n_keys]
    if given.dtype == torch.bool:
        return as_mask(given), (), None
    hidden = given <= torch.finfo(given.dtype).min / 2  # models hide pairs by the lowest float as well as by −inf
    bias = given.masked_fill(hidden, 0)
    mask = as_mask(~hidden) if bool(hidden.any()) else None
    learned = given.requires_grad  # a learned bias may start at 0
    return mask, (biases.Dense(bias),) if learned or bool(bias.any()) else (), None


def _chosen(name: str, indices: Tensor, query: Tensor, key: Tensor) -> Mask:
    """The mask of keys chosen by number. (It is quadratic; the scores that the model chose them by were larger.)"""
    batch, _, n_queries, _ = query.shape
    n_keys = key.shape[2]
    if indices.ndim != 3 or indices.shape[:2] != (batch, n_queries):
        raise InputError(
            f"{name} passes indices={_brief(indices)} to its attention, expected (batch, queries, keys chosen) with "
            f"(batch, queries) = {(batch, n_queries)}"
        )
    kept = indices.clamp(max=n_keys).long()  # a static cache has room for keys that are left out of the call
    chosen = torch.zeros(batch, n_queries, n_keys + 1, dtype=torch.bool, device=query.device)
    return as_mask(chosen.scatter_(2, kept, True)[:, None, :, :n_keys])  # type: ignore[return-value]


def _causality(name: str, module: nn.Module, is_causal: bool | None) -> Mask | None:
    """What no mask means. Our mask function always returns one, so None is dense unless the model says otherwise."""
    if is_causal is not None:
        return Causal() if is_causal else None
    if getattr(module, "is_causal", False):
        raise InputError(f"{name} says it is causal but passes no mask, so what it may attend to is not known")
    return None


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a mapping of {', '.join(map(str, value))}"
    return repr(value) if isinstance(value, int | float | str) else type(value).__name__
