"""Where the keys are in a layer's cache, by the backend of its attention."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor


def keys_of(module: Any, cache: Float[Tensor, "blocks hkv size two_d"]) -> Float[Tensor, "blocks hkv size d"]:
    """The keys in the cache of a vLLM `Attention`, as a view.

    A token has its key and its value beside each other; on CPU, a block has all its keys, of which each dimension has
    those of all tokens, before its values. The first keys of each layer are compared with what the view has, so that a
    backend with another layout, such as that for AMX, is refused.
    """
    d = module.head_size
    if module.attn_backend.get_name() != "CPU_ATTN":
        return cache[..., :d]
    blocks, heads, size, _ = cache.shape
    return cache.view(blocks, heads, 2, d, size)[:, :, 0].transpose(2, 3)
