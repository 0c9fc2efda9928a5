"""Hugging Face models on qkv's kernels. Importing this changes nothing and does not import transformers."""

from qkv.huggingface.client import register, use

__all__ = ["register", "use"]


def __dir__() -> list[str]:
    return __all__
