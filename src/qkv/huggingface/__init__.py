"""Run Hugging Face models on qkv's kernels. Importing this package has no side effects and loads no transformers."""

from qkv.huggingface.client import register, use

__all__ = ["register", "use"]


def __dir__() -> list[str]:
    return __all__
