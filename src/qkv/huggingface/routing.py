"""Attention of a Hugging Face model by a function of ours, for as long as a context lasts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from qkv.huggingface.attention import configurations
from qkv.huggingface.masks import lazy_mask

_NAMES = (f"qkv_guest_{n}" for n in itertools.count())  # transformers reads meaning into names: keep it neutral


@contextmanager
def routed(model: nn.Module, attend: Callable[..., tuple[Tensor, Any]]) -> Iterator[None]:
    """Transformers' interface hands all attention of the model to `attend`, with masks that `call_of` can read.

    The model and transformers' registries are as they were afterwards, whatever happens.
    """
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
