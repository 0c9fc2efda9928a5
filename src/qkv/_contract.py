"""What masks, scores, biases, normalizers and statistics have in common: the contract with classes of users.

Each base class names the one method that *defines* an object, and its *shortcuts*: methods that compute the same
numbers faster. A subclass that overrides the defining method loses the shortcuts it inherits, so no kernel can use a
shortcut of the old definition. Kernels only call methods of the base class; they never test for a concrete class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from qkv._above import above
from qkv.errors import InputError

T = TypeVar("T")


class Definition:
    """Base of the classes that users may extend. ``definitions`` maps a defining method to its shortcuts.

    >>> class Shape(Definition):
    ...     definitions = {"area": ("rounded",)}
    ...     rounded = None
    ...     def area(self): ...
    >>> class Square(Shape):
    ...     rounded = 4
    ...     def area(self): return 4
    >>> class Triangle(Square):
    ...     def area(self): return 2
    >>> Square.rounded, Triangle.rounded
    (4, None)
    """

    definitions: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def _repr_png_(self) -> bytes | None:
        """The picture that a notebook shows."""
        picture: bytes | None = above("picture", self)
        return picture

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for base in cls.__mro__[1:]:
            for method, shortcuts in base.__dict__.get("definitions", {}).items():
                inherited = [name for name in shortcuts if name not in cls.__dict__]
                if any(_stale(cls, base, method, name) for name in inherited):
                    for name in inherited:
                        setattr(cls, name, getattr(base, name))


def _stale(cls: type, base: type, method: str, name: str) -> bool:
    """Return whether an inherited shortcut belongs to another version of the defining method than the one in `cls`.

    A shortcut of a class that leaves the method abstract is valid for every definition of it.
    """
    owner = next(parent for parent in cls.__mro__ if name in parent.__dict__)
    definitions = (base.__dict__.get(method), getattr(cls, method))
    return owner not in base.__mro__ and getattr(owner, method, None) not in definitions


def with_attributes(thing: T, **attributes: object) -> T:
    """Return a copy of an object with other attributes, also of a frozen dataclass, whose checks do not run again."""
    changed = copy(thing)
    for name, value in attributes.items():
        object.__setattr__(changed, name, value)
    return changed


def overrides(thing: object, base: type, name: str) -> bool:
    """Return whether the class of `thing` overrides the attribute `name` of `base`."""
    return getattr(type(thing), name) is not getattr(base, name)


def require(thing: object, base: type, method: str, arguments: str, returns: str) -> None:
    """Raise `InputError` if the class of `thing` lacks the method that defines a `base`."""
    if not overrides(thing, base, method):
        name = type(thing).__name__
        raise InputError(
            f"{name}: no method {method}({arguments}), which {base.__name__} requires; it returns {returns}"
        )


def learned_tensors(thing: object) -> dict[str, Tensor]:
    """Return the tensors that require gradients among the attributes of a user's object, by name.

    The search descends into modules, nested objects, tuples, lists and dictionaries.

    >>> from types import SimpleNamespace
    >>> scale = nn.Parameter(torch.ones(2))
    >>> sorted(learned_tensors(SimpleNamespace(scale=scale, name="mine", parts=[nn.Linear(2, 2)])))
    ['parts.0.bias', 'parts.0.weight', 'scale']
    """
    return {name: x for name, x in _tensors(thing, "", set()) if x.requires_grad}


_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, torch.device, torch.dtype, torch.Size)


def _tensors(x: object, name: str, visited: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(x, _PLAIN) or id(x) in visited:
        return
    visited.add(id(x))
    if isinstance(x, Tensor):
        yield name, x
        return
    parts: Iterator[tuple[str, object]]
    if isinstance(x, nn.Module):
        parts = iter([*x.named_parameters(), *x.named_buffers(), *_fields(x)])
    elif isinstance(x, Mapping):
        parts = ((str(key), value) for key, value in x.items())
    elif isinstance(x, tuple | list | set | frozenset):
        parts = ((str(i), value) for i, value in enumerate(x))
    else:
        parts = iter(_fields(x))
    for part, value in parts:
        yield from _tensors(value, f"{name}.{part}" if name else part, visited)


_OF_MODULES = frozenset(vars(nn.Module()))


def _fields(x: object) -> list[tuple[str, object]]:
    """Return attributes of an object; for a module, without its parameters, buffers, children and hooks."""
    named = dict(getattr(x, "__dict__", {}))
    for kind in type(x).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(x, slot):
                named[slot] = getattr(x, slot)
    if isinstance(x, nn.Module):
        named = {name: value for name, value in named.items() if name not in _OF_MODULES}
    return list(named.items())


def check_by_head(name: str, value: object, heads: int | None = None) -> None:
    """Raise `InputError` unless `value` is a finite number, or a tensor of floats, of which there are `heads` if known.

    >>> check_by_head("Cosine: scale", 10.0)
    """
    if not isinstance(value, Tensor):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(f"{name} is {value!r}, expected a finite number, or one per query head, shape (heads,)")
    elif value.ndim != 1 or not value.dtype.is_floating_point:
        got = f"{value.dtype} of shape {tuple(value.shape)}"
        raise InputError(f"{name} is {got}, expected a number or one float per query head, shape (heads,)")
    elif heads not in (None, len(value)):
        raise InputError(f"{name} has {len(value)} numbers for {heads} query heads")


def unlisted_tensor(result: Tensor, listed: Mapping[str, Tensor]) -> bool:
    """Return whether `result` depends on a tensor that needs gradients but is not `listed`, as one in a closure."""
    ends = {x.grad_fn for x in listed.values() if x.grad_fn is not None}
    leaves = {id(x) for x in listed.values()}
    queue, visited = [result.grad_fn], set()
    while queue:
        node = queue.pop()
        if node is None or node in visited or node in ends:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in leaves:
            return True
        queue.extend(following for following, _ in node.next_functions)
    return False
