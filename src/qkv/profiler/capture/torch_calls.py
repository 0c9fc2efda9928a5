"""Translate calls of torch's attention functions, and softmaxes of scores, into a `Call` of qkv."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv._engine.call import Call, as_mask, at_least_float32
from qkv.biases import Dense
from qkv.errors import InputError
from qkv.huggingface.attention import read_mask
from qkv.masks import Causal, Mask, Shifted
from qkv.normalizers import Pointwise
from qkv.scores import Dot

F = nn.functional
FAR = 5000.0  # a score so far below the query's largest has weight 0; some masks add only −10⁴
MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


def of_sdpa(
    heads: int | None,
    query: Float[Tensor, "*b nq d"],
    key: Float[Tensor, "*b nk d"],
    value: Float[Tensor, "*b nk dv"],
    attn_mask: Float[Tensor, "..."] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Call, torch.Size]:
    """The call that ``F.scaled_dot_product_attention`` makes with these arguments, and the shape of its output.

    Args:
        heads: number of heads of the calling module, if known: a folded dimension (batch · heads) is unfolded by it.
        query: (batch, heads, nq, d); if there are more than 4 dimensions, all but the last three are batch.
        key: as `query`; with fewer heads if `enable_gqa`.
        value: as `key`.
        attn_mask: True where a query may attend, or a bias that is added to the scores.
        dropout_p: dropout probability.
        is_causal: query i attends to keys up to i. Torch aligns this at the top left, `Causal` at the bottom right.
        scale: factor of q·k; 1/√d if None.
        enable_gqa: True if groups of query heads share a key head.

    Raises:
        InputError: for tensors that do not fit together.
    """
    if torch.is_autocast_enabled(query.device.type):  # as autocast does for the function itself
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    n_queries, n_keys = query.shape[-2], key.shape[-2]
    if not enable_gqa:
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        query, key, value = (x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))
    lead = query.shape[:-2]
    query, key, value = (_four(x, heads) for x in (query, key, value))
    mask: Mask | None = None
    if is_causal:
        mask = Causal() if n_queries == n_keys else Shifted(Causal(), 0)
    bias: tuple[Any, ...] = ()
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.masked_fill(attn_mask <= attn_mask.amax(-1, keepdim=True) - FAR, -torch.inf)
    if attn_mask is not None:
        if len(lead) == 2 or attn_mask.ndim == 2:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
        else:
            attn_mask = _four(attn_mask.expand(*lead, n_queries, n_keys), heads)
        mask, bias, _ = read_mask(attn_mask.expand(*attn_mask.shape[:2], n_queries, n_keys), n_queries, n_keys)
    call = Call.of(query, key, value, mask, bias, Dot(scale), dropout_p=dropout_p)
    return call, torch.Size((*lead, n_queries, value.shape[-1]))


def of_multi_head(*args: Any, **kwargs: Any) -> Call | None:
    """The call that ``F.multi_head_attention_forward`` makes, or None if keys or values were projected before.

    (That function works in (length, batch, width), and its boolean masks are True where a query may *not* attend.)
    """
    bound = MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    if a["static_k"] is not None or a["static_v"] is not None:
        return None
    heads = a["num_heads"]
    weights = [a[f"{x}_proj_weight"] for x in "qkv"] if a["use_separate_proj_weight"] else a["in_proj_weight"].chunk(3)
    shifts = (None,) * 3 if a["in_proj_bias"] is None else a["in_proj_bias"].chunk(3)
    inputs = [x if x.ndim == 3 else x[:, None] for x in (a["query"], a["key"], a["value"])]
    q, k, v = (F.linear(x, w, b) for x, w, b in zip(inputs, weights, shifts, strict=True))
    batch = q.shape[1]
    if a["bias_k"] is not None:
        k, v = (torch.cat([x, one.expand(1, batch, -1)]) for x, one in ((k, a["bias_k"]), (v, a["bias_v"])))
    if a["add_zero_attn"]:
        k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
    q, k, v = (x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v))
    n_queries, n_keys = q.shape[2], k.shape[2]
    mask: Mask | None = None
    bias: tuple[Any, ...] = ()
    attn_mask = a["attn_mask"]
    if attn_mask is not None:
        attn_mask = attn_mask[None, None] if attn_mask.ndim == 2 else attn_mask.unflatten(0, (batch, heads))
    padding = a["key_padding_mask"]
    if padding is not None:
        padding = padding.view(batch, 1, 1, -1)
    for masked in (attn_mask, padding):
        if masked is not None:
            wide = F.pad(masked, (0, n_keys - masked.shape[-1]))  # keys that the function appends are visible
            read, added, _ = read_mask(~wide if wide.dtype == torch.bool else wide, n_queries, n_keys)
            mask = read if mask is None else mask if read is None else mask & read
            bias += added
    dropout = a["dropout_p"] if a["training"] else 0.0
    return Call.of(q, k, v, mask, bias, dropout_p=dropout)


def of_scores(scores: Float[Tensor, "b h nq nk"]) -> Call:
    """A call whose weights are the softmax of `scores`: the scores are its bias, and its queries and keys are 0.

    A pair counts as masked if its score is −∞, the lowest float, or so far below the query's largest score that its
    weight is 0. The values are not known, so they are NaN.
    """
    b, h, n_queries, n_keys = scores.shape
    scores = scores.to(at_least_float32(scores.dtype))
    lowest = torch.finfo(scores.dtype).min / 2
    masked = scores <= (scores.amax(-1, keepdim=True) - FAR).clamp(min=lowest)
    mask = as_mask(~masked) if bool(masked.any()) else None
    zeros = scores.new_zeros(b, h, 1, 1)
    q, k = zeros.expand(-1, -1, n_queries, -1), zeros.expand(-1, -1, n_keys, -1)
    return Call.of(q, k, k + torch.nan, mask, (Dense(scores.masked_fill(masked, 0)),))


class _AsGiven(Pointwise):
    """The score is the weight."""

    def weight(self, scores: Tensor) -> Tensor:
        return scores


def of_weights(weights: Float[Tensor, "b h nq nk"]) -> Call:
    """A call with these weights, whose queries and keys are 0 and whose values are not known, so NaN.

    A pair counts as masked if its weight is 0. If the weights of every query add up to 1, or to 0, the call is a
    softmax; otherwise it has the same weights without one.

    Raises:
        InputError: for a negative weight.
    """
    weights = weights.to(at_least_float32(weights.dtype))
    if bool((weights < 0).any()):
        raise InputError(f"weights has negative entries down to {float(weights.min()):.3g}, expected weights ≥ 0")
    total = weights.sum(-1)
    if bool((((total - 1).abs() < 1e-3) | (total == 0)).all()):
        return of_scores(weights.log())
    b, h, n_queries, n_keys = weights.shape
    zeros = weights.new_zeros(b, h, 1, 1)
    q, k = zeros.expand(-1, -1, n_queries, -1), zeros.expand(-1, -1, n_keys, -1)
    return Call.of(q, k, k + torch.nan, as_mask(weights > 0), (Dense(weights),), normalizer=_AsGiven())


def as_scores(x: Tensor, heads: int | None) -> Tensor | None:
    """Scores in 4 dimensions (batch, heads, nq, nk), or None if the meaning of the dimensions is ambiguous.

    Args:
        x: the input of a softmax over the last dimension.
        heads: number of heads of the module, if known.
    """
    if x.ndim == 4 and heads == x.shape[1]:
        return x
    if x.ndim == 3 and heads is not None and x.shape[0] % heads == 0:
        return x.unflatten(0, (-1, heads))
    if (
        x.ndim == 5 and heads == x.shape[1] != x.shape[2]
    ):  # (batch, heads, windows, …): each window becomes a batch item
        return x.transpose(1, 2).flatten(0, 1)
    return None


def _four(x: Tensor, heads: int | None) -> Tensor:
    """Reshape a tensor with any batch dimensions to (batch, heads, length, width)."""
    if x.ndim < 2:
        raise InputError(
            f"scaled_dot_product_attention got a tensor of shape {tuple(x.shape)}, expected 2 or more dimensions"
        )
    if x.ndim == 2:
        return x[None, None]
    if x.ndim == 3:
        return x.unflatten(0, (-1, heads)) if heads and x.shape[0] % heads == 0 else x[:, None]
    return x.flatten(0, -4)
