"""Counts the kernels that torch operations would launch on a card, and the memory that they would read and write."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qkv.engine import tiles

NO_LAUNCH = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh",
    "promote_types", "_local_scalar_dense",
}  # fmt: skip
SEVERAL = {"constant_pad_nd": 2, "masked_fill": 2}  # operations that copy or fill, and then overwrite a part


class Launches(TorchDispatchMode):
    """Context that counts operations: all but those that only allocate, make a view or read a number.

    Patterns of masks are kept, as they are without it: a second call is counted without them.

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
        self.names = list[str]()
        self.bytes = 0
        """Memory that the operations read and write, each tensor once for each operation."""

    def __enter__(self) -> Launches:
        self._keeping = mock.patch.object(tiles, "_other_tensors", return_value=False)
        self._keeping.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._keeping.stop()

    @property
    def count(self) -> int:
        return len(self.names)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name, made = func.overloadpacket.__name__, [x for x in tree_leaves(found) if isinstance(x, Tensor)]
        if not (func.is_view or name in NO_LAUNCH):
            self.names += [name] * SEVERAL.get(name, 1)
            read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.bytes += sum(map(_nbytes, read)) + sum(map(_nbytes, made))
        return found


def _nbytes(x: Tensor) -> int:
    """Bytes of the different elements of a tensor: expanded dimensions count once."""
    sizes = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride != 0)
    return math.prod(sizes) * x.element_size()
