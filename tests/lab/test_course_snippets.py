"""Lessons of five courses: each runs with its import changed, and gives what the lesson's formula gives.

The names, the order and the masks of the calls are those that students of the courses type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import close, rand
from qkv import course, masks
from qkv.course import MultiHeadAttention, create_causal_mask, scaled_dot_product_attention

CAUSAL = torch.ones(6, 6).tril()
X, MEMORY = rand(2, 6, 24, dtype=torch.float32), rand(2, 9, 24, seed=1, dtype=torch.float32)


def formula(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ / √d) v and the weights, in float64; zeros where a query sees nothing."""
    s = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    s = s if visible is None else s.masked_fill(~visible, -torch.inf)
    weights = s.softmax(-1).nan_to_num(nan=0.0)
    return weights @ v.double(), weights


def heads_formula(
    mha: course.MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Concat(head_1, …, head_h) W_O with the parameters of a layer."""
    layer = mha.layer
    split = [
        (x @ w.T + b).unflatten(-1, (layer.heads, layer.head_dim)).transpose(1, 2).double()
        for x, w, b in zip((query, key, value), layer.in_proj.weight.chunk(3), layer.in_proj.bias.chunk(3), strict=True)
    ]
    out, weights = formula(*split, visible)
    return out.transpose(1, 2).flatten(2) @ layer.out_proj.weight.T.double() + layer.out_proj.bias, weights


def close32(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """Equal within roundings of float32, in which lessons compute."""
    for one, other in zip(got, want, strict=True):
        close(one, other, eps=256, dtype=torch.float32)


# --- the function -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 8), (2, 4, 8), (2, 1, 4, 8)], ids=str)
def test_function_takes_tokens_with_and_without_batch_and_heads(shape: tuple[int, ...]) -> None:
    q, k, v = (rand(*shape, seed=i, dtype=torch.float32) for i in range(3))
    close32(scaled_dot_product_attention(q, k, v), formula(q, k, v))
    visible = create_causal_mask(4)
    close32(scaled_dot_product_attention(q, k, v, visible), formula(q, k, v, visible))
    arrays = scaled_dot_product_attention(q.numpy(), k.numpy(), v.numpy(), visible.numpy())
    assert all(isinstance(x, np.ndarray) for x in arrays)
    close32(tuple(map(torch.from_numpy, arrays)), formula(q, k, v, visible))


def test_a_mask_of_items_may_hide_all_keys_of_a_query() -> None:
    x, mask = X[:, :4], torch.ones(2, 4, 4)
    mask[1, 2] = 0
    close32(scaled_dot_product_attention(x, x, x, mask), formula(x, x, x, mask > 0))


# --- the layer --------------------------------------------------------------------------------------------------------

Call = Callable[[Any], tuple[Tensor, Tensor]]
CALLS: dict[str, tuple[Call, bool]] = {  # and whether it is causal
    "one input": (lambda mha: mha(X), False),
    "three inputs": (lambda mha: mha(X, X, X), False),
    "names": (lambda mha: mha(query=X, key=X, value=X), False),
    "capital names": (lambda mha: mha(Q=X, K=X, V=X), False),
    "x": (lambda mha: mha(x=X), False),
    "mask as the second": (lambda mha: mha(X, CAUSAL[None, None]), True),
    "mask of two dimensions as the second": (lambda mha: mha(X, create_causal_mask(6)), True),
    "mask by name": (lambda mha: mha(X, X, X, mask=CAUSAL), True),
    "mask of integers": (lambda mha: mha(query=X, key=X, value=X, mask=CAUSAL.int()[None, None]), True),
    "mask object": (lambda mha: mha(X, masks.Causal()), True),
}


@pytest.mark.parametrize("name", CALLS)
def test_layer_is_called_as_lessons_call_it(name: str) -> None:
    torch.manual_seed(0)
    mha = MultiHeadAttention(24, n_heads=4)
    assert mha.head_dim == 6
    call, causal = CALLS[name]
    close32(call(mha), heads_formula(mha, X, X, X, CAUSAL > 0 if causal else None))


def test_layer_attends_to_a_memory_without_weights_if_asked() -> None:
    mha = MultiHeadAttention(d_model=24, num_heads=4)
    want = heads_formula(mha, X, MEMORY, MEMORY)
    close32(mha(Q=X, K=MEMORY, V=MEMORY), want)
    out, nothing = mha(X, MEMORY, return_attention=False)
    close32((out,), want[:1])
    assert nothing is None
