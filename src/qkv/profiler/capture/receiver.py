"""What receives the attention calls of a running model: `Observer`, as far as those that find the calls know it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from qkv.engine import Call, Result


class Comparisons(Protocol):
    """Compares results with those of torch's own functions."""

    def of_torch(self, name: str, own: Callable[[], Tensor], result: Result) -> None: ...


class Receiver(Protocol):
    """Receives calls that torch's functions compute, or a model writes out."""

    model: nn.Module
    names: dict[int, str]
    """The name of each module, by its id."""
    unreadable: dict[str, str]
    """By the name of a module that attends and cannot be read, the reason."""
    sources: dict[str, str]
    expected: list[str]
    """The names of modules that report their calls themselves."""
    beside: bool
    """Whether the model computes its attention itself."""

    @property
    def checks(self) -> Comparisons: ...

    def intercepted(
        self, name: str, source: str, call: Call, own: Result | None = None, *, keys: Tensor | None = None,
        appended: int = 0, one_state: bool = False,
    ) -> Result: ...  # fmt: skip
