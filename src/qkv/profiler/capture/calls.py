"""Translate what torch's functions get, and scores and weights that a model forms, into calls of qkv."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkv import masks
from qkv.biases import Bias, TensorBias
from qkv.engine import Call, at_least_float32
from qkv.errors import InputError
from qkv.huggingface.masks import MASKED, read_mask
from qkv.masks import Causal, Grid, Mask, Region, Shifted
from qkv.masks.convert import from_flex
from qkv.normalizers import Normalizer, Pointwise
from qkv.profiler.capture.tracing import FEATURES, PLAIN, UNKNOWN, Dims, WeightedSum, size_of
from qkv.scores import Dot

F = nn.functional
FAR = 5000.0  # a score so far below the query's largest has weight 0; some masks add only −10⁴
MULTI_HEAD_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def sdpa_call(
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

    All dimensions but the last three are batch; a folded dimension (batch · heads) is unfolded by the number of heads
    of the calling module, if it is known. Torch aligns `is_causal` at the top left, `Causal` at the bottom right.
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
    if attn_mask is not None:
        if len(lead) == 2 or attn_mask.ndim == 2:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
        else:
            attn_mask = _four(attn_mask.expand(*lead, n_queries, n_keys), heads)
        mask, bias, _ = read_mask(attn_mask.expand(*attn_mask.shape[:2], n_queries, n_keys), n_queries, n_keys)
    # A seed that is drawn here would change the random numbers that the model draws.
    call = Call.of(query, key, value, mask, bias, Dot(scale), dropout_p=dropout_p, seed=0)
    return call, torch.Size((*lead, n_queries, value.shape[-1]))


class ScoreMod(Bias):
    """The `score_mod` of a call of FlexAttention, called on broadcasting index tensors; rows count from 0."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def bind(self, q: Tensor, grid: Grid, scale: float) -> Bias:
        self.grid = grid
        return self

    def apply(self, scores: Float[Tensor, "b h q k"], region: Region) -> Tensor:
        b, h, _, keys = region.indices(self.grid)
        rows = torch.arange(region.rows.start, region.rows.stop, device=scores.device)[:, None]
        try:
            return self.function(scores, b, h, rows, keys).expand(scores.shape)
        except (IndexError, RuntimeError, TypeError) as error:
            raise InputError(
                f"score_mod of FlexAttention cannot be read ({error}); expected a function of scores and index tensors "
                "that broadcast"
            ) from error


def flex_call(
    query: Float[Tensor, "b h nq d"], key: Float[Tensor, "b hkv nk d"], value: Float[Tensor, "b hkv nk dv"],
    score_mod: Callable[..., Tensor], block_mask: tuple[Any, ...], scale: float, *_: Any,
) -> Call:  # fmt: skip
    """The call that the operator of FlexAttention makes: without a compiler it reads of a BlockMask the mask_mod."""
    k, v = (x.expand(len(query), -1, -1, -1) for x in (key, value))
    mask = from_flex(block_mask[-1], query.shape[2], key.shape[2])
    return Call.of(query, k, v, mask, (ScoreMod(score_mod),), Dot(scale), seed=0)


def multi_head_arguments(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of ``F.multi_head_attention_forward`` by name, with its defaults."""
    bound = MULTI_HEAD_SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def multi_head_call(*args: Any, **kwargs: Any) -> Call | None:
    """The call that ``F.multi_head_attention_forward`` makes, or None if keys or values were projected before.

    (That function works in (length, batch, width), and its boolean masks are True where a query may *not* attend.)
    """
    a = multi_head_arguments(*args, **kwargs)
    if a["static_k"] is not None or a["static_v"] is not None:
        return None
    heads = a["num_heads"]
    weights = [a[f"{x}_proj_weight"] for x in "qkv"] if a["use_separate_proj_weight"] else a["in_proj_weight"].chunk(3)
    shifts = (None,) * 3 if a["in_proj_bias"] is None else a["in_proj_bias"].chunk(3)
    inputs = [x if x.ndim == 3 else x[:, None] for x in (a["query"], a["key"], a["value"])]
    q, k, v = (F.linear(x, w, b) for x, w, b in zip(inputs, weights, shifts, strict=True))
    batch = q.shape[1]
    if a["bias_k"] is not None:
        k, v = (torch.cat([x, row.expand(1, batch, -1)]) for x, row in ((k, a["bias_k"]), (v, a["bias_v"])))
    if a["add_zero_attn"]:
        k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
    q, k, v = (x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v))
    n_queries, n_keys = q.shape[2], k.shape[2]
    mask: Mask | None = None
    bias: tuple[Any, ...] = ()
    attn_mask, padding = a["attn_mask"], a["key_padding_mask"]
    if a["is_causal"] and padding is None and not a["need_weights"]:  # the mask is not read, only this says what it is
        attn_mask, mask = None, Causal() if n_queries == n_keys else Shifted(Causal(), 0)
    if attn_mask is not None:
        attn_mask = attn_mask[None, None] if attn_mask.ndim == 2 else attn_mask.unflatten(0, (batch, heads))
    if padding is not None:
        padding = padding.view(batch, 1, 1, -1)
    for masked in (attn_mask, padding):
        if masked is not None:
            wide = F.pad(masked, (0, n_keys - masked.shape[-1]))  # keys that the function appends are visible
            read, added, _ = read_mask(~wide if wide.dtype == torch.bool else wide, n_queries, n_keys)
            mask = read if mask is None else mask if read is None else mask & read
            bias += added
    dropout = a["dropout_p"] if a["training"] else 0.0
    return Call.of(q, k, v, mask, bias, dropout_p=dropout, seed=0)


def fast_path_call(
    module: nn.MultiheadAttention | nn.TransformerEncoderLayer, x: Float[Tensor, "b n d"], mask: Tensor | None,
    padding: Tensor | None, length: int | None,
) -> tuple[Call, Bool[Tensor, "b n"] | None]:  # fmt: skip
    """The call of self-attention that torch's fast path makes, and its real keys as of `real_keys`.

    Args:
        module: a module of torch with ``batch_first=True``.
        x: its input; may be nested.
        mask: as the module is given it. On the fast path, a pair is masked if the mask has any number but 0 there.
        padding: the same for keys.
        length: the number of tokens to which a nested input is padded; as many as it has if None.
    """
    if x.is_nested:
        lengths = torch.tensor([len(item) for item in x.unbind()], device=x.device)
        length = int(lengths.max()) if length is None else length
        x = x.to_padded_tensor(0.0, (len(lengths), length, x.size(2)))
        padding = torch.arange(length, device=x.device) >= lengths[:, None]
    attention = module if isinstance(module, nn.MultiheadAttention) else module.self_attn
    if isinstance(module, nn.TransformerEncoderLayer):
        norm = module.norm1
        x = F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps) if module.norm_first else x
    mask, padding = (None if item is None else item != 0 for item in (mask, padding))
    x, given = x.transpose(0, 1), {"attn_mask": mask, "key_padding_mask": padding, "training": False}
    args = (
        x, x, x, attention.embed_dim, attention.num_heads, attention.in_proj_weight, attention.in_proj_bias, None, None,
        False, 0.0, attention.out_proj.weight, attention.out_proj.bias,
    )  # fmt: skip
    call = multi_head_call(*args, **given)
    assert call is not None
    return call, real_keys(call, *args, **given)


def real_keys(call: Call, *args: Any, **kwargs: Any) -> Bool[Tensor, "b nk"] | None:
    """True at keys that the padding mask of ``F.multi_head_attention_forward`` does not hide; None if it has none."""
    padding = MULTI_HEAD_SIGNATURE.bind(*args, **kwargs).arguments.get("key_padding_mask")
    if padding is None:
        return None
    real = (~padding if padding.dtype == torch.bool else padding > MASKED).expand(len(call.q), -1)
    return F.pad(real, (0, call.k.shape[2] - real.shape[1]), value=True)  # keys that the function appends


def softmax_call(scores: Float[Tensor, "b h nq nk"]) -> Call:
    """A call whose weights are the softmax of `scores`.

    A pair counts as masked if its score is −∞, the lowest float, or so far below the query's largest score that its
    weight is 0. The values are not known, so they are NaN.
    """
    scores = scores.to(at_least_float32(scores.dtype))
    lowest = torch.finfo(scores.dtype).min / 2
    masked = scores <= (scores.amax(-1, keepdim=True) - FAR).clamp(min=lowest)
    return call_of_scores(scores.masked_fill(masked, 0), masks.Dense(~masked) if bool(masked.any()) else None)


def call_of_scores(scores: Float[Tensor, "b h nq nk"], mask: Mask | None, normalizer: Normalizer | None = None) -> Call:
    """A call with these scores, whose queries and keys are 0 and whose values are not known, so NaN."""
    zeros = scores.new_zeros(*scores.shape[:2], 1, 1)
    q, k = (zeros.expand(-1, -1, n, -1) for n in scores.shape[2:])
    return Call.of(q, k, k + torch.nan, mask, (TensorBias(scores),), normalizer=normalizer)


class AsGiven(Pointwise):
    """The score is the weight."""

    def weight(self, scores: Tensor) -> Tensor:
        return scores


def call_of_weights(weights: Float[Tensor, "b h nq nk"]) -> Call:
    """A call with these weights, whose queries and keys are 0 and whose values are not known, so NaN.

    A pair counts as masked if its weight is 0. If the weights of every query add up to 1, or to 0, the call is a
    softmax; otherwise it has the same weights without one.
    """
    weights = weights.to(at_least_float32(weights.dtype))
    if bool((weights < 0).any()):
        raise InputError(f"weights has negative entries down to {float(weights.min()):.3g}, expected weights ≥ 0")
    if are_distributions(weights):
        return softmax_call(weights.log())
    return call_of_scores(weights, masks.Dense(weights > 0), AsGiven())


def chunked(calls: Sequence[Call]) -> Call:
    """One call of several from scores or weights, whose queries follow one another, over the same keys."""
    n_keys = max(call.k.shape[2] for call in calls)
    scores, visible = [], []
    for call in calls:
        (bias,) = call.user.biases
        assert isinstance(bias, TensorBias)
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=call.q.device)
        seen = call.mask.tensor if isinstance(call.mask, masks.Dense) else seen
        short = 0, n_keys - call.k.shape[2]
        scores.append(F.pad(bias.tensor, short))
        visible.append(F.pad(seen.expand(bias.tensor.shape), short))
    seen = torch.cat(visible, 2)
    return call_of_scores(
        torch.cat(scores, 2), None if bool(seen.all()) else masks.Dense(seen), calls[0].user.normalizer
    )


def are_distributions(weights: Float[Tensor, "b h nq nk"]) -> bool:
    """True if the weights of every query add up to 1, or to 0 (at padding)."""
    total = weights.sum(-1)
    return bool((((total - 1).abs() < 1e-3) | (total == 0)).all()) and not bool((weights < 0).any())


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


# --- weights that a model forms ---------------------------------------------------------------------------------------


def heads_unknown(what: str, x: Tensor, heads: int | None) -> str:
    """Why a module cannot be read whose queries or weights have several dimensions that may be heads."""
    number = "; set its attribute num_heads" if heads is None else f" for its {heads} heads"
    return f"its {what} have shape {tuple(x.shape)}, and which of its dimensions are heads cannot be told{number}"


def arranged(x: Tensor, dims: Dims, keys: str, batches: set[int], sizes: set[int], heads: int | None) -> Tensor | str:
    """Weights or scores as (batch, heads, queries, keys), or why it cannot be told which of its dimensions are these.

    Args:
        x: the weights.
        dims: their dimensions.
        keys: whether keys are rows or columns.
        batches: the numbers of batch items that the model and the running modules read.
        sizes: all sizes of what they read; windows that divide the tokens are batch items.
        heads: the number of heads that the module states, if it does.
    """
    factors = [f for own in dims for f in own]
    lead = [i for i, f in enumerate(factors) if f.part is None and f.size > 1]
    known = [i for i in lead if factors[i].origin == FEATURES]
    open_ = [i for i in lead if factors[i].origin == UNKNOWN]

    def size(of: Iterable[int]) -> int:
        return size_of(factors[i] for i in of)

    n_keys = size(i for i, f in enumerate(factors) if f.part == keys)

    def are_items(of: Iterable[int]) -> bool:
        items = list(of)
        n, plain = size(items), all(factors[i].origin == PLAIN for i in items)
        return n in batches or (plain and any(n % b == 0 and n // b * n_keys in sizes for b in batches))

    chosen = None
    if are_items(set(lead) - set(known)) and (heads is None or not open_ or size(known) == heads):
        chosen = known
    else:
        options = [
            (*known, *more)
            for n in range(1, len(open_) + 1)
            for more in itertools.combinations(open_, n)
            if are_items(set(lead) - set(known) - set(more))
        ]
        options = [o for o in options if heads is None or size(o) == heads] if len(options) > 1 or heads else options
        chosen = sorted(options[0]) if len(options) == 1 else None
    if chosen is None:
        return heads_unknown("weights", x, heads)
    order = [
        [i for i, f in enumerate(factors) if f.part is None and i not in chosen], chosen,
        [i for i, f in enumerate(factors) if f.part not in (None, keys)],
        [i for i, f in enumerate(factors) if f.part == keys],
    ]  # fmt: skip
    split = x.reshape([f.size for f in factors]).permute([i for axes in order for i in axes])
    return split.reshape([size(axes) for axes in order])


def call_of_weighted_sum(weighted: WeightedSum, batches: set[int], sizes: set[int], heads: int | None) -> Call | str:
    """The call of weights that were found, or why they cannot be read."""
    softmax = weighted.note.softmax
    kept = softmax is not None and softmax.version is not None and softmax.output._version == softmax.version
    x, dims = (softmax.scores, softmax.dims) if softmax is not None and kept else (weighted.weights, weighted.note.dims)
    made = arranged(x, dims, weighted.keys, batches, sizes, heads)
    if isinstance(made, str):
        return made
    made = made.detach()
    if kept:
        return softmax_call(made)
    if bool((made < 0).any()):
        return "it multiplies its values with negative numbers, which are no weights"
    if weighted.note.weighted.startswith("exp") and not are_distributions(made):
        return (
            "it multiplies its values with exponentials, and divides by the sum of its exponentials afterwards or never"
        )
    return call_of_weights(made)
