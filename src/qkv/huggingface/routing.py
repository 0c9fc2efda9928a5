"""Temporarily replace the attention function of a Hugging Face model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from qkv._packages import check_tested
from qkv.huggingface.attention import configurations
from qkv.huggingface.masks import lazy_mask

_NAMES = (f"qkv_guest_{n}" for n in itertools.count())  # without "sdpa", "flash" and "/", which transformers interprets


@contextmanager
def routed(model: nn.Module, attend: Callable[..., tuple[Tensor, Any]]) -> Iterator[None]:
    """Inside, transformers' interface calls `attend` for all attention of the model, with masks for `call_of`.

    The model and transformers' registries are restored on exit, also after an error.
    """
    check_tested("transformers")
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
