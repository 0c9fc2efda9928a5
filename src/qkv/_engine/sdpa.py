"""The arguments of torch's `scaled_dot_product_attention` as a mask, biases and a score."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qkv._engine.call import as_biases, as_mask
from qkv.biases import Bias, Dense
from qkv.errors import InputError
from qkv.masks import Mask, from_sdpa
from qkv.scores import Dot, Score


def from_torch_names(
    lengths: tuple[int, int], mask: Mask | Tensor | None, bias: Bias | Sequence[Bias] | None, score: Score | None,
    attn_mask: Tensor | None, is_causal: bool, scale: float | None,
) -> tuple[Mask | Tensor | None, Bias | Sequence[Bias] | None, Score | None]:  # fmt: skip
    """Mask, bias and score with torch's arguments added; `lengths` are the numbers of queries and keys.

    >>> from_torch_names((3, 3), None, None, None, None, True, 0.5)
    (Causal(), None, Dot(scale=0.5))
    """
    if scale is not None:
        if score is not None:
            raise InputError(f"scale is {scale} with score={type(score).__name__}, expected one of them")
        score = Dot(scale)
    if isinstance(attn_mask, Tensor) and attn_mask.dtype.is_floating_point:
        bias = (*as_biases(bias), Dense(attn_mask))
        attn_mask = None
    if attn_mask is not None or is_causal:
        if attn_mask is not None and mask is not None:
            raise InputError("attn_mask is passed with a mask, expected one of them: True means may attend in both")
        if attn_mask is not None and is_causal:
            raise InputError("attn_mask is passed with is_causal=True, expected one of them, as in torch")
        n_queries, n_keys = lengths
        visible = from_sdpa(attn_mask, is_causal=is_causal, n_queries=n_queries, n_keys=n_keys)
        own = as_mask(mask)
        mask = visible if own is None else own & visible
    return mask, bias, score
