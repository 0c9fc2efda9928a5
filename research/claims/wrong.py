"""Wrong answers: what a computation might have given instead, for mutation tests of checks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from research.claims.claim import KINDS, Verdict

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Array = Tensor | np.ndarray
PLAIN = bool | int | float | complex | str


def _is_leaf(value: object) -> bool:
    """Whether a value is a number, a truth value, a text, a tensor or an array of numbers."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc"
    return isinstance(value, PLAIN | np.generic | Tensor)


def _is_answer(value: object, within: bool = False) -> bool:
    """Whether a value is such a leaf, a verdict, or a container with at least one such leaf.

    A dataclass is a container if it has tensors, collections or other dataclasses (`within` which numbers will do);
    others are settings, as the sizes of a model.
    """
    if _is_leaf(value) or isinstance(value, Verdict):
        return True
    if _is_record(value):
        parts = [getattr(value, f.name) for f in dataclasses.fields(value)]
        return any(_is_answer(x, within=True) and (within or not isinstance(x, PLAIN)) for x in parts)
    if isinstance(value, Mapping):
        return any(_is_answer(x) for x in value.values())
    return isinstance(value, tuple | list | set | frozenset) and any(_is_answer(x) for x in value)


def _is_record(value: Any) -> TypeGuard[DataclassInstance]:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_truth(value: object) -> bool:
    return isinstance(value, bool | np.bool_) or (isinstance(value, Array) and "bool" in str(value.dtype))


def _larger(value: Any) -> Any:
    if isinstance(value, str) or _is_truth(value):
        return value
    if isinstance(value, Array):
        floating = "float" in str(value.dtype) or "complex" in str(value.dtype)
        return 1.5 * value if floating else 2 * value + 1
    return 2 * value + 1 if isinstance(value, int) else 1.5 * value


def _squared(value: Any) -> Any:
    """Of small integers, which may be sizes, the same."""
    if isinstance(value, str) or _is_truth(value) or (isinstance(value, int) and value < 10_000):
        return value
    return value * value


def _shifted(value: Any) -> Any:
    return value if isinstance(value, str) or _is_truth(value) else value + 1


def _opposite(value: Any) -> Any:
    if isinstance(value, str):
        return value[::-1]
    if _is_truth(value):
        return ~value if isinstance(value, Array) else not value
    return value if isinstance(value, Array) and value.dtype == torch.uint8 else -value


def _zero(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    return np.zeros_like(value) if isinstance(value, np.ndarray) else type(value)()


def _moved(value: Any, axis: int) -> Any:
    """The entries moved on by one along an axis."""
    if not isinstance(value, Array) or value.ndim < -axis:
        return value
    return value.roll(1, axis) if isinstance(value, Tensor) else np.roll(value, 1, axis)


def _cut(value: Any, axis: int) -> Any:
    """Without the last entry along an axis."""
    if not isinstance(value, Array) or value.ndim < (axis + 1 if axis >= 0 else -axis) or value.shape[axis] < 2:
        return value
    if isinstance(value, Tensor):
        return value.narrow(axis, 0, value.shape[axis] - 1)
    return np.delete(value, -1, axis)


def _off_at(value: Any, index: int) -> Any:
    """One entry off by one, at the beginning (0) or the end (-1)."""
    if not isinstance(value, Array) or value.ndim == 0 or 0 in value.shape:
        return value
    changed = value.clone() if isinstance(value, Tensor) else value.copy()
    at = (index,) * value.ndim
    changed[at] = ~changed[at] if _is_truth(value) else changed[at] + 1
    return changed


def _each(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The change of each leaf of an answer."""

    def changed(value: Any) -> Any:
        if _is_leaf(value):
            return change(value)
        if not _is_answer(value) or isinstance(value, Verdict):
            return value
        if _is_record(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            return dataclasses.replace(value, **{name: changed(x) for name, x in fields.items()})
        if isinstance(value, Mapping):
            return {key: changed(x) for key, x in value.items()}
        if isinstance(value, tuple | list):
            return _like(value, [changed(x) for x in value])
        return type(value)(changed(x) for x in value)

    return changed


def _first(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The change of the first leaf of an answer."""

    def changed(value: Any) -> Any:
        done = False

        def once(leaf: Any) -> Any:
            nonlocal done
            if done:
                return leaf
            other = change(leaf)
            done = not _same(other, leaf)
            return other

        return _each(once)(value)

    return changed


def _like(value: Any, items: list[Any]) -> Any:
    """The items as a list or a tuple of the kind of `value`."""
    if hasattr(value, "_make"):
        return value._make(items)
    if isinstance(value, torch.Size):
        return torch.Size(items) if all(isinstance(x, int) and not isinstance(x, bool) for x in items) else value
    return type(value)(items)


def _reordered(value: Any) -> Any:
    """The parts of a container in another order: each under the name or in the place of another."""
    if isinstance(value, Mapping) and not _is_record(value) and len(value) > 1:
        parts = list(value.values())
        return dict(zip(value, [*parts[1:], parts[0]], strict=True))
    if isinstance(value, tuple | list) and len(value) > 1:
        return _like(value, [*value[1:], value[0]])
    return value


def _reordered_within(value: Any) -> Any:
    """The parts of each part of a container in another order."""
    if isinstance(value, Mapping) and not _is_record(value):
        return {key: _reordered(x) for key, x in value.items()}
    return _like(value, [_reordered(x) for x in value]) if isinstance(value, tuple | list) else value


def _shortened(value: Any) -> Any:
    """A container without its last part."""
    if isinstance(value, Mapping) and not _is_record(value) and len(value) > 1:
        return dict(list(value.items())[:-1])
    if isinstance(value, list) and len(value) > 1:
        return value[:-1]
    return value


def _contradicted(value: Any) -> Any:
    """A verdict of another kind."""
    if not isinstance(value, Verdict):
        return value
    return dataclasses.replace(value, kind=next(kind for kind in KINDS if kind != value.kind))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a half more": _each(_larger),
    "last axis shorter": _each(lambda leaf: _cut(leaf, -1)),
    "the opposite": _each(_opposite),
    "parts reordered": _reordered,
    "zero": _each(_zero),
    "moved along the last axis": _each(lambda leaf: _moved(leaf, -1)),
    "first entry off": _each(lambda leaf: _off_at(leaf, 0)),
    "one more": _each(_shifted),
    "first part a half more": _first(_larger),
    "the square": _each(_squared),
    "another verdict": _contradicted,
    "parts of parts reordered": _reordered_within,
    "moved along the axis before": _each(lambda leaf: _moved(leaf, -2)),
    "last entry off": _each(lambda leaf: _off_at(leaf, -1)),
    "first part the opposite": _first(_opposite),
    "last part missing": _shortened,
    "first axis shorter": _each(lambda leaf: _cut(leaf, 0)),
}
"""The wrong answers that are tried, by name, in this order. Each is a function from the right answer to a wrong one;
where it does not apply, it returns an equal value."""


def applicable(value: Any) -> Iterable[str]:
    """The names of the changes that make another answer of a value; none if the value is no answer.

    An answer is a number, a text, a tensor or an array, a verdict, or a tuple, list, dict, set or dataclass of answers.
    A single truth value is none: it is a judgement on answers, and its negation would always be noticed.

    >>> list(applicable(True)), list(applicable(None))
    ([], [])
    >>> list(applicable(0.0))
    ['one more']
    """
    if not _is_answer(value) or (_is_truth(value) and (not isinstance(value, Array) or value.ndim == 0)):
        return []
    found = []
    for name, change in CHANGES.items():
        with suppress(Exception):  # an object that refuses such a field
            found += [name] if not _same(change(value), value) else []
    return found


def _same(one: Any, other: Any) -> bool:
    """Whether two answers are equal; NaN equals NaN."""
    if isinstance(one, Array) or isinstance(other, Array):
        if type(one) is not type(other) or one.shape != other.shape:
            return False
        if isinstance(one, Tensor):
            return one.is_meta or torch.equal(one.nan_to_num(), other.nan_to_num())
        return bool(np.array_equal(one, other, equal_nan="float" in str(one.dtype)))
    if _is_record(one) and type(one) is type(other):
        return all(_same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(_same(x, y) for x, y in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return one is other or bool(one == other)
