"""Translate the arguments of transformers' attention interface into a `Call` of qkv. (Written for transformers 5.23.)

Every argument that affects the weights is either supported or raises an error; only arguments known to be without
effect are ignored.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkv import biases
from qkv.engine import Call
from qkv.errors import InputError
from qkv.huggingface.masks import LazyMask
from qkv.masks import Causal, Dense, Mask
from qkv.normalizers import Softmax
from qkv.scores import Dot

MASKED = -9984.0
"""Numbers added to scores that are at most this, −10⁴ in bfloat16, mask a pair like −inf: models use −10⁴, −10⁹ and the
lowest float."""
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# Arguments without effect on the weights: bookkeeping, or already in the mask.
INERT = {
    "cache_position",
    "deterministic",
    "is_causal",  # read if there is no mask
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

    The unused slots of a static cache are left out of the call.

    Args:
        module: the model's attention module.
        name: name of the module in errors.
        query: as passed by the model, like the following arguments.
        key: with fewer heads than `query` if query heads share keys.
        value: as `key`.
        attention_mask: a `LazyMask`, a 4-D tensor of the model, or None.
        scaling: factor of q·k; 1/√d if None.
        softcap: scores become softcap · tanh(score / softcap).
        s_aux: logit of a sink for each head.
        position_bias: bias that is added to the scores.
        indices: keys to which each query is restricted, in addition to the mask (DeepSeek-V3.2).
        dropout: dropout probability; the model passes 0 in evaluation mode.
        others: further arguments of the model.
    """
    for argument, passed in others.items():
        if argument not in INERT and passed is not None and passed is not False:
            raise InputError(
                f"{argument} is {_brief(passed)}, which {name} passes to its attention; expected only arguments that "
                "qkv supports"
            )
    mask, bias, keys = read_mask(attention_mask, query.shape[2], key.shape[2])
    if attention_mask is None and query.shape[2] > 1:
        mask = _causality(name, module, others.get("is_causal"))
    if isinstance(attention_mask, LazyMask):
        n_keys = attention_mask.grid.n_keys
        key, value = key[:, :, :n_keys], value[:, :, :n_keys]
    if indices is not None:
        chosen = _chosen(name, indices, query, key)
        mask = chosen if mask is None else mask & chosen
    if position_bias is not None:
        bias = (biases.TensorBias(position_bias[..., : key.shape[2]]), *bias)
    if softcap is not None:
        bias = (biases.SoftCap(softcap), *bias)
    return Call.of(query, key, value, mask, bias, Dot(scaling), Softmax(sink=s_aux), dropout), keys


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
    found = (
        module.config
        for module in model.modules()
        if hasattr(getattr(module, "config", None), "_attn_implementation_internal")
        and any(map(routes, module.modules()))
    )
    return list({id(config): config for config in found}.values())


def read_mask(mask: Any, n_queries: int, n_keys: int) -> tuple[Mask | None, tuple[biases.Bias, ...], Tensor | None]:
    """Split the attention mask that a model passes into a mask, a bias and a padding mask (True at real keys)."""
    if mask is None:
        return None, (), None
    if isinstance(mask, LazyMask):
        if mask.shape[2:] != (n_queries, n_keys):
            raise InputError(
                f"attention_mask is for {mask.shape[2]} queries × {mask.shape[3]} keys, "
                f"but the model attends with {n_queries} × {n_keys}"
            )
        return mask.mask, (), mask.keys
    known = isinstance(mask, Tensor) and mask.ndim == 4 and (mask.dtype == torch.bool or mask.is_floating_point())
    if not known:
        raise InputError(f"attention_mask is {_brief(mask)}, expected a tensor of 4 dimensions, bool or float")
    mask = mask[..., :n_keys]
    if mask.dtype == torch.bool:
        return Dense(mask), (), None
    masked = mask <= MASKED
    bias = mask.masked_fill(masked, 0)
    learned = mask.requires_grad  # a learned bias may start at 0
    additive = (biases.TensorBias(bias),) if learned or bool(bias.any()) else ()
    return Dense(~masked) if bool(masked.any()) else None, additive, None


def _chosen(name: str, indices: Tensor, query: Tensor, key: Tensor) -> Mask:
    """The mask of the keys in `indices`; it is quadratic, but smaller than the scores by which the model chose them."""
    batch, _, n_queries, _ = query.shape
    n_keys = key.shape[2]
    if indices.ndim != 3 or indices.shape[:2] != (batch, n_queries):
        raise InputError(
            f"indices is {_brief(indices)} in {name}, expected (batch, queries, chosen keys) with "
            f"(batch, queries) = {(batch, n_queries)}"
        )
    kept = indices.clamp(max=n_keys).long()  # indices may point to unused slots of a static cache
    chosen = torch.zeros(batch, n_queries, n_keys + 1, dtype=torch.bool, device=query.device)
    return Dense(chosen.scatter_(2, kept, True)[:, None, :, :n_keys])


def _causality(name: str, module: nn.Module, is_causal: bool | None) -> Mask | None:
    """The mask for a call without one. `lazy_mask` never returns None, so None means dense unless stated otherwise."""
    if is_causal is not None:
        return Causal() if is_causal else None
    if getattr(module, "is_causal", False):
        raise InputError(f"attention_mask is None in {name}, whose is_causal is True; expected a mask")
    return None


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a mapping of {', '.join(map(str, value))}"
    return repr(value) if isinstance(value, int | float | str) else type(value).__name__
