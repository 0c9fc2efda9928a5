"""What receives the attention calls of a running model: `Observer`, as far as those that find the calls know it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from qkv.engine import Call, Result
from qkv.profiler.capture.modules import AttentionModules


class Comparisons(Protocol):
    """Compares results with those of torch's own functions."""

    def of_torch(self, name: str, own: Callable[[], Tensor], result: Result) -> None: ...
    def of_flex(self, name: str, own: Tensor, call: Call) -> None: ...


class Receiver(Protocol):
    """Receives calls that torch's functions compute, or a model writes out."""

    modules: AttentionModules
    unreadable: dict[str, str]
    """By the name of a module that attends and cannot be read, the reason."""
    sources: dict[str, str]

    @property
    def checks(self) -> Comparisons: ...

    def received(
        self, name: str, source: str, call: Call, compute: Callable[[Any], Result] = ..., *,
        keys: Tensor | None = None, known: Result | None = None, appended: int = 0, one_state: bool = False,
    ) -> Result: ...  # fmt: skip
