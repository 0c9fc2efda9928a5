"""How the arguments of a model's attention function are read as a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from qkv import ring
from qkv.engine import Call, Result
from qkv.huggingface.client import is_known, name_of
from qkv.huggingface.masks import LazyMask
from qkv.kernels import serve, serving
from qkv.masks import And, Causal, Dense, Grid, Mask, Window
from qkv.statistics.result import Statistics


def readings(
    module: nn.Module,
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **others: Any,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Any, dict[str, Any]]]:
    """The arguments of an attention function, in each way in which they can be meant.

    Transformers passes no mask to a function that has no mask function of its own, and some functions apply the
    causality of the module, or its window, by themselves: FlashAttention the window, torch's SDPA not, which aligns
    the first query with the first key. A tensor of 2 dimensions marks the real keys.
    """
    described = getattr(attention_mask, "qkv_mask", None)
    if described is not None and described.shape[2:] == (query.shape[2], key.shape[2]):
        yield query, key, value, described, others
        return
    if attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.ndim == 2):
        yield query, key, value, attention_mask, others
        return
    n_queries, n_keys = query.shape[2], key.shape[2]
    real = None if attention_mask is None else attention_mask[:, None, None, -n_keys:].bool()
    causal = others.get("is_causal")
    causal = getattr(module, "is_causal", False) if causal is None else causal
    window = others.get("sliding_window")
    masks: list[Mask | None] = [Causal() if causal and n_queries > 1 else None]
    flash = "flash" in name_of(function)
    if causal and isinstance(window, int) and (flash or not is_known(function)):
        masks = [Window(window), *masks]
    masks = masks[:1] if is_known(function) else [*masks, None] if masks[-1] is not None else masks
    used = n_queries if masks[0] is not None and is_known(function) and not flash else n_keys  # of a static cache
    grid = Grid(len(query), 1, n_queries, used, used - n_queries, query.device)
    for mask in masks:
        whole = mask if real is None else Dense(real) if mask is None else mask & Dense(real)
        keys = None if real is None else real[:, 0, 0]
        yield query, key, value, LazyMask(whole, grid, query.dtype, keys, n_keys), others


def served(call: Call) -> Result:
    """The result of a call that the observer itself records."""
    with serving(None):
        return serve(call)


def shared_statistics(statistics: Statistics, group: ProcessGroup) -> Statistics:
    """The statistics of a whole sequence, gathered from processes that each have those of their own shard."""

    def whole(x: Tensor | None) -> Tensor | None:
        return None if x is None else ring.unshard(x, group)

    by_token = {
        f.name: whole(getattr(statistics, f.name))
        for f in fields(Statistics)
        if f.name not in ("mass", "own", "prefix_sink_scores", "thumbnail")
    }
    mass = {name: whole(x) for name, x in statistics.mass.items()}
    return replace(statistics, **by_token, mass=mass)  # type: ignore[arg-type]


def is_causal(mask: Mask | None) -> bool:
    """True if no query can attend to a later key."""
    match mask:
        case None:
            return False
        case And(left, right):
            return is_causal(left) or is_causal(right)
        case Dense(tensor):
            n_queries, n_keys = tensor.shape[2:]
            offset = n_keys - n_queries
            to_self = n_queries > 1 and bool(tensor.diagonal(offset, 2, 3).any())  # queries and keys are one text
            return to_self and not bool(tensor.triu(offset + 1).any())
    return mask.band is not None and mask.band[0] >= 0
