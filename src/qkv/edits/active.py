"""The edits that are active, by model: whatever computes the attention of the model applies them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from qkv._engine.call import Call, Result
from qkv.edits.base import Edit, Head, edited
from qkv.errors import InputError
from qkv.statistics.sums import Statistics

Place = tuple[str | None, str | int, int]
"""Group, layer or module, and head; the group is None if it was not stated."""

SELF = ("self", "text")
"""Groups whose layers can be named without the group."""


@dataclass(eq=False)
class Edits:
    """The edits of one `qkv.edit`."""

    by_place: dict[Place, Edit]
    met: set[Place] = field(default_factory=set)
    """Places at which the model has attended."""
    ran: bool = False
    """Whether the model has attended at all."""

    def of(self, module: str, group: str, layer: int) -> dict[int, Edit]:
        """The edits of the heads of a layer."""
        self.ran = True
        names: tuple[tuple[str | None, str | int], ...] = ((group, layer), (None, module))
        if group in SELF:
            names = (*names, (None, layer))
        found = {}
        for place, edit in self.by_place.items():
            if place[:2] in names:
                self.met.add(place)
                found[place[2]] = edit
        return found


ACTIVE: WeakKeyDictionary[nn.Module, list[Edits]] = WeakKeyDictionary()


def applied(
    model: nn.Module,
    module: str,
    group: str,
    layer: int,
    call: Call,
    result: Result,
    *,
    queries: Tensor | None,
    first: int | Tensor,
    editable: bool,
) -> tuple[Result, dict[int, Call]]:
    """The result of a call after all edits of its layer, and the calls of the heads whose weights changed."""
    changed: dict[int, Call] = {}
    for edits in ACTIVE.get(model, ()):
        found = edits.of(module, group, layer)
        if found and not editable:
            raise InputError(
                f"edits has {module}, which forms its weights itself, so that its heads cannot be edited; expected "
                "attention of qkv, of transformers' attention interface or of torch's scaled_dot_product_attention"
            )
        heads = call.q.shape[1]
        for number, edit in found.items():
            if not 0 <= number < heads:
                raise InputError(f"edits has head {number} of {module}, expected 0 to {heads - 1}")
            name = f"head {number} of {module}"
            head = Head(name, number, result.out[:, number], queries, first, changed.get(number, call))
            out = result.out.clone()
            out[:, number] = edited(edit, head)
            result = replace(result, out=out)
            if head.changed is not None:
                changed[number] = head.changed
    return result, changed


def with_head(statistics: Statistics, other: Statistics, head: int) -> Statistics:
    """The statistics of a layer, with those of one head from `other`."""

    def one(mine: Any, its: Any) -> Any:
        if isinstance(mine, Tensor) or isinstance(its, Tensor):
            both = torch.full_like(its, 0) if mine is None else mine.clone()
            both[:, head] = torch.nan if its is None else its[:, head]
            return both
        if isinstance(mine, Mapping):
            return {name: one(x, its[name]) for name, x in mine.items()}
        if mine is None:
            return None
        return replace(mine, maximum=one(mine.maximum, its.maximum), mean=one(mine.mean, its.mean))  # a thumbnail

    found = {f.name: one(getattr(statistics, f.name), getattr(other, f.name)) for f in fields(Statistics)}
    if other.sink_mass is None and found["sink_mass"] is not None:
        found["sink_mass"][:, head] = 0  # no weight on a sink that is not there
    return Statistics(**found)
