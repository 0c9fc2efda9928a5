"""Statistics of attention inside vLLM, for the requests that ask: what each new token attended to, sinks, passages.

Where it is installed, vLLM loads `qkv_vllm.plugin.register`; `profile` opens the answer of a request.
"""

from typing import TYPE_CHECKING

from qkv._lazy import lazy

if TYPE_CHECKING:
    from qkv_vllm.answer import profile

__version__ = "0.1.0"
__all__ = ["profile"]
__dir__ = __all__.copy

if not TYPE_CHECKING:
    __getattr__ = lazy(__name__, {"qkv_vllm.answer": ("profile",)})
