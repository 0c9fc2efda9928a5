"""Counts the kernels that torch operations would launch on a card, and the memory that they would read and write."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NO_LAUNCH = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh",
    "promote_types", "_local_scalar_dense",
}  # fmt: skip
SEVERAL = {"constant_pad_nd": 2, "masked_fill": 2}  # operations that copy or fill, and then overwrite a part


class Launches(TorchDispatchMode):
    """Context that counts operations: all but those that only allocate, make a view or read a number.

    >>> import torch
    >>> with Launches() as found:
    ...     torch.ones(3)[None].T.exp()
    tensor([[2.7183],
            [2.7183],
            [2.7183]])
    >>> found.names
    ['ones', 'exp']
    """

    def __init__(self, device: str | None = None) -> None:
        """`device` is the type of the devices on which operations count; None for all."""
        super().__init__()
        self.device, self.names = device, list[str]()
        self.bytes = 0
        """Memory that the operations read and write, each tensor once for each operation."""

    @property
    def count(self) -> int:
        return len(self.names)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name, made = func.overloadpacket.__name__, [x for x in tree_leaves(found) if isinstance(x, Tensor)]
        on = {x.device.type for x in made}
        if not (func.is_view or name in NO_LAUNCH) and (self.device is None or self.device in on):
            self.names += [name] * SEVERAL.get(name, 1)
            read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.bytes += sum(map(_nbytes, read)) + sum(map(_nbytes, made))
        return found


def _nbytes(x: Tensor) -> int:
    """Bytes of the different elements of a tensor: expanded dimensions count once."""
    sizes = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride != 0)
    return math.prod(sizes) * x.element_size()
