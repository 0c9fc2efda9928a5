"""Whether a model is still the one of an earlier call: same modules, hooks, settings and values of all parameters."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn

WIDTH = 4096  # numbers of a parameter that share one product


def fingerprint(model: nn.Module) -> Hashable | None:
    """A key that changes if the model may compute something else; None if its values cannot be read.

    It reads every parameter and buffer once, which takes less than a forward with a few tokens. Version counters are
    not enough: a change through ``parameter.data`` does not count.

    >>> layer = nn.Linear(2, 2)
    >>> before = fingerprint(layer)
    >>> fingerprint(layer) == before
    True
    >>> _ = layer.weight.data[0].mul_(2)
    >>> fingerprint(layer) == before
    False
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(type(x) not in (Tensor, nn.Parameter) or x.is_meta or x.is_sparse or x.is_quantized for x in tensors):
        return None
    modules = tuple(
        (type(m), m.training, vars(m).get("forward"), *m._forward_hooks.values(), *m._forward_pre_hooks.values())
        for m in model.modules()
    )
    with torch.no_grad():
        values = [_projected(x).cpu() for x in tensors]
    return modules, str(getattr(model, "config", "")), tuple(torch.stack(values).tolist() if values else [])


def _projected(x: Tensor) -> Tensor:
    """One number that depends on every element and its place: the product with fixed random numbers."""
    flat = x.detach().reshape(-1)
    flat = flat if flat.is_floating_point() else flat.double()
    whole = len(flat) // WIDTH * WIDTH
    total = flat[whole:].double() @ _numbers(len(flat) - whole, flat.device)
    if whole:
        rows = flat[:whole].view(-1, WIDTH) @ _numbers(WIDTH, flat.device).to(flat.dtype)
        total = total + rows.double() @ _numbers(len(rows), flat.device)
    return total


def _numbers(n: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.rand(n, dtype=torch.float64, generator=generator).to(device)
