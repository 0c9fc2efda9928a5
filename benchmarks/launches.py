"""Counts the kernels that would be launched on a card, the memory that they would read and write, and the waits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qkv.engine import tiles
from qkv.kernels import fused
from qkv.statistics.triton import host

KERNELS = "forward", "statistics", "masses", "prefix_scores", "by_row"
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
        self._keeping = mock.patch.object(tiles, "dispatching", return_value=False)
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
        name, (made, read) = func.overloadpacket.__name__, map(_tensors, (found, (args, kwargs)))
        if not (func.is_view or name in NO_LAUNCH):
            self.names += [name] * SEVERAL.get(name, 1)
            self.bytes += sum(map(_nbytes, read)) + sum(map(_nbytes, made))
        return found


class Card(Launches):
    """Context in which meta tensors stand for tensors on a card: counts what is launched there, and what waits for it.

    Triton's kernels are counted, and not run. A copy of a meta tensor to the CPU holds ones, and a number that is read
    of it is 1. (PyTorch has no fake CUDA tensors in a build for CPUs.)

    >>> import torch
    >>> with Card() as found:
    ...     x = torch.ones(3, device="meta").exp()
    ...     bool(x.any()), x.cpu().tolist()
    (True, [1.0, 1.0, 1.0])
    >>> found.names, found.waits
    (['ones', 'exp', 'any'], ['_local_scalar_dense', '_to_copy'])
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits = list[str]()
        """Operations that read a number of the card, and copies to it and from it."""

    def __enter__(self) -> Card:
        def launch(*arguments: object, **named: object) -> None:
            self.names.append("Triton")
            self.bytes += sum({id(x): x.nbytes for x in arguments if isinstance(x, Tensor)}.values())

        kernel = mock.MagicMock()
        kernel.__getitem__.return_value = launch  # of any grid
        self._patches = ExitStack()
        for place, name, value in (
            (host, "GPUS", ("meta",)), (host, "_capability", lambda index: (9, 0)),
            (host, "_kernels", lambda: SimpleNamespace(**dict.fromkeys(KERNELS, kernel))),
            (fused, "GPUS", ("meta",)), (fused, "_wrong", lambda device, dtype: None),
        ):  # fmt: skip
            self._patches.enter_context(mock.patch.object(place, name, value))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, given = func.overloadpacket.__name__, kwargs or {}
        if name == "_local_scalar_dense" and args[0].is_meta:
            self.waits.append(name)
            return 1
        if name == "nonzero" and args[0].is_meta:
            self.waits.append(name)
            return torch.zeros(args[0].numel(), args[0].ndim, dtype=torch.int64, device="meta")
        if name == "_to_copy" and "device" in given and args[0].is_meta != (given["device"].type == "meta"):
            self.waits.append(name)
            if args[0].is_meta:
                return torch.ones(args[0].shape, dtype=given.get("dtype") or args[0].dtype)
        counted = len(self.names), self.bytes
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if not any(x.is_meta for x in _tensors((args, kwargs, found))):
            self.names, self.bytes = self.names[: counted[0]], counted[1]
        return found


def _tensors(values: object) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _nbytes(x: Tensor) -> int:
    """Bytes of the different elements of a tensor: expanded dimensions count once."""
    sizes = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride != 0)
    return math.prod(sizes) * x.element_size()
