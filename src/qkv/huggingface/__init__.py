"""Run Hugging Face models on qkv's kernels. Importing this package has no side effects and loads no transformers.

`AttentionCallback`, for transformers' `Trainer`, is that of `qkv.tracking`.

It imports attention, caches and models. Read `attention.py` first.
"""

from qkv._lazy import lazy
from qkv.huggingface.attention import register, use

__all__ = ["AttentionCallback", "evicting", "hidden_maps", "register", "use"]

__getattr__ = lazy(
    __name__,
    {
        "qkv.tracking.trainer": ("AttentionCallback",),
        "qkv.huggingface.generation": ("evicting",),
        "qkv.huggingface.hidden": ("hidden_maps",),
    },
)
__dir__ = __all__.copy
