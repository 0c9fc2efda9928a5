"""Checks of measured values (numbers and nested lists by name), of batches, and of a model's state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qkv.testing.inputs import difference, fail, shape_of
from qkv_lab import log


def check_entries(thing: object, method: str, made: object) -> None:
    """Fail unless a method returned a mapping that JSON can hold."""
    if not isinstance(made, Mapping):
        fail(thing, method, f"returned {shape_of(made)}, expected numbers, or nested lists of numbers, by name")
    wrong = _not_json(made)
    if wrong is not None:
        fail(
            thing, method, f"returned {wrong}, expected int, float, text, or nested lists of these, which JSON can hold"
        )


def _not_json(value: object, where: str = "") -> str | None:
    """The first entry that JSON cannot hold, with its place."""
    if isinstance(value, Mapping):
        for name, x in value.items():
            if not isinstance(name, str):
                return f"the name {name!r}{f' in {where}' if where else ''}"
            if (found := _not_json(x, f"{where}[{name!r}]")) is not None:
                return found
        return None
    if isinstance(value, list | tuple):
        return next((found for i, x in enumerate(value) if (found := _not_json(x, f"{where}[{i}]")) is not None), None)
    return None if value is None or isinstance(value, int | float | str) else f"{shape_of(value)} at {where}"


def first_difference(a: object, b: object, where: str = "") -> str | None:
    """The first entry in which two measured values differ as JSON: ``"['loss'] is 1.0, then 2.0"``."""
    return _differs(json.loads(json.dumps(log.finite(a))), json.loads(json.dumps(log.finite(b))), where)


def _differs(a: Any, b: Any, where: str) -> str | None:
    if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
        pairs = [(a[name], b[name], f"{where}[{name!r}]") for name in a]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(x, y, f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        return None if a == b else f"{where or 'the result'} is {_short(a)}, then {_short(b)}"
    return next((found for x, y, at in pairs if (found := _differs(x, y, at)) is not None), None)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> str | None:
    """The first tensor that differs between two sets of tensors by name, as text; None if they are equal."""
    if list(before) != list(after):
        return f"the names are {', '.join(after)}, expected {', '.join(before)}"
    for name, x in before.items():
        y = after[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{name!r} is {shape_of(y)}, expected {shape_of(x)}"
        wrong = difference(y, x)
        if wrong is not None:
            return f"{name!r}: {wrong}"
    return None


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all that a method must leave as it is in a model.

    These are parameters, buffers, whether each parameter is trained, and for each module its mode and number of hooks.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {name: x.detach().cpu().clone() for name, x in tensors.items()}
    found |= {f"{name}.requires_grad": torch.tensor(x.requires_grad) for name, x in model.named_parameters()}
    for name, module in model.named_modules():
        found[f"{name or 'model'}.training"] = torch.tensor(module.training)
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        found[f"hooks of {name or 'model'}"] = torch.tensor(hooks)
    return found
