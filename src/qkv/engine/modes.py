"""The modes in which torch may run an operation: recorded, transformed, dispatched, or without numbers to read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad


def dense(*tensors: Tensor) -> bool:
    """Return whether tensors are neither sparse nor nested."""
    return all(x.layout == torch.strided and not x.is_nested for x in tensors)


def recorded() -> bool:
    """Return whether torch.compile, torch.export or torch.jit.trace records: numbers cannot be read."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def shape_only(x: Tensor) -> bool:
    """Return whether a tensor has a shape and no numbers, on the meta device or as a fake tensor."""
    return (x.is_meta or hasattr(x, "fake_mode")) and not recorded()


def readable(x: Tensor) -> bool:
    """Return whether a decision may depend on the numbers of a tensor."""
    return not (x.is_meta or hasattr(x, "fake_mode") or recorded())


def dispatching() -> bool:
    """Return whether a dispatch mode is active, under which new tensors may be fake or wrapped."""
    return torch._C._len_torch_dispatch_stack() > 0


def transforming() -> bool:
    """Return whether a torch.func transform is active, or a level of forward-mode differentiation is open."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def plain_torch() -> bool:
    """Return whether torch runs operations as they are written: it records, transforms, intercepts and casts none."""
    return not (recorded() or transforming() or dispatching() or torch.is_autocast_enabled("cpu"))
