"""Counts the kernels that torch operations would launch on a card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

NO_LAUNCH = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh",
    "promote_types",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Context that counts operations: all but those that only allocate or make a view. A few launch several kernels.

    >>> import torch
    >>> with Launches() as found:
    ...     torch.ones(3)[None].T.exp()
    tensor([[2.7183],
            [2.7183],
            [2.7183]])
    >>> found.names
    ['ones', 'exp']
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @property
    def count(self) -> int:
        return len(self.names)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not (func.is_view or name in NO_LAUNCH):
            self.names.append(name)
        return func(*args, **(kwargs or {}))
