"""The edits of `qkv.edit` that are in force: which attention calls and modules of a model they change."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from qkv.edits import Edit, Head, Placed, Vectors, edited
from qkv.engine import Call, Result
from qkv.errors import InputError, kind_of
from qkv.results import with_head

Place = tuple[str | None, str | int, int | str]
"""Group, layer or module, and head or what else is edited; the group is None if it was not stated."""

SELF = ("self", "text")
"""Groups whose layers can be named without the group."""


@dataclass(eq=False)
class Edits:
    """The edits of one `qkv.edit`."""

    model: nn.Module
    by_place: dict[Place, Edit]
    modules: list[tuple[nn.Module, Place]]
    """The modules whose output is edited."""
    met: set[Place] = field(default_factory=set)
    """Places that the model has computed."""
    ran: bool = False
    """Whether the model has attended at all."""
    newest: tuple[int, Call, Callable[[], Placed]] | None = None
    """Layer, call and place of the newest self-attention, by which the vectors of modules have a place in the text."""

    def of(self, module: str, group: str, layer: int) -> dict[int, Edit]:
        """The edits of the heads of a layer."""
        self.ran = True
        names: tuple[tuple[str | None, str | int], ...] = ((group, layer), (None, module))
        if group in SELF:
            names = (*names, (None, layer))
        edits = {}
        for place, edit in self.by_place.items():
            if place[:2] in names and isinstance(place[2], int):
                self.met.add(place)
                edits[place[2]] = edit
        return edits

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Inside, the output of the modules is edited."""
        with ExitStack() as hooks:
            for module, place in self.modules:
                hooks.callback(module.register_forward_hook(functools.partial(self._replaced, place)).remove)
            yield

    def _replaced(self, place: Place, module: nn.Module, args: Any, output: Any) -> Any:
        """A forward hook: the output of a module after the edit."""
        if self not in ACTIVE.get(self.model, ()):  # a forward before this edit is computed again for its gradients
            return output
        several = isinstance(output, tuple)
        vectors, edit, name = output[0] if several else output, self.by_place[place], shown(place)
        if not isinstance(vectors, Tensor) or vectors.ndim != 3:
            raise InputError(
                f"edits has {name}, whose output is {kind_of(vectors)}, expected shape (batch, tokens, dimensions)"
            )
        self.met.add(place)
        newest = self.newest
        if isinstance(place[1], int) and newest is not None and newest[0] != place[1]:
            raise InputError(
                f"edits has {name}, which ran after the attention of layer {newest[0]}; expected its module"
            )
        known = newest is not None and newest[1].q.shape[2] == vectors.shape[1]

        def located() -> Placed:
            if newest is None or not known:
                raise InputError(
                    f"edits has {type(edit).__name__} of {name}, whose tokens are not known; expected a module that "
                    "runs after attention to the same tokens"
                )
            return newest[2]()

        whole = known and newest is not None and newest[1].q.shape[2] >= newest[1].k.shape[2]
        made = edited(edit, Vectors(name, vectors, located, whole))
        return (made, *output[1:]) if several else made


ACTIVE: WeakKeyDictionary[nn.Module, list[Edits]] = WeakKeyDictionary()


def applied(
    model: nn.Module, module: str, group: str, layer: int, place: Callable[[], Placed], call: Call, result: Result,
    compute: Callable[[Call], Result], *, editable: bool,
) -> tuple[Result, dict[int, Call]]:  # fmt: skip
    """The result of a call after all edits of its layer, and the calls of the heads whose weights changed.

    Args:
        model: the model that runs.
        module: the name of the module that attends.
        group: kind of attention.
        layer: number of the layer.
        place: tells where the queries and keys are in the text.
        call: the attention call.
        result: its result by the model.
        compute: computes another call of the layer.
        editable: False if its weights are all that is known of it.
    """
    changed: dict[int, Head] = {}
    outputs: dict[int, Tensor] = {}
    computed: dict[Any, Any] = {}
    heads = call.q.shape[1]
    whole = call.q.shape[2] >= call.k.shape[2]
    for edits in ACTIVE.get(model, ()):
        head_edits = edits.of(module, group, layer)
        if group in SELF and edits.modules:
            edits.newest = layer, call, place
        if head_edits and not editable:
            raise InputError(
                f"edits has {module}, which forms its weights itself, so that its heads cannot be edited; expected "
                "attention of qkv, of transformers' attention interface, of torch's scaled_dot_product_attention or of "
                "nn.MultiheadAttention"
            )
        for number, edit in head_edits.items():
            if not 0 <= number < heads:
                raise InputError(f"edits has head {number} of {module}, expected 0 to {heads - 1}")
            before = changed[number].changed if number in changed else None
            output, name = outputs.get(number, result.out[:, number]), f"head {number} of {module}"
            head = Head(name, output, place, whole, number, before or call, compute, computed)
            outputs[number] = edited(edit, head)
            if head.changed is not None:
                changed[number] = head
    if not outputs:
        return result, {}

    def joined(name: str) -> Any:
        x, columns = getattr(result, name), {n: getattr(head.result, name) for n, head in changed.items()}
        if x is None or any(y is None for y in columns.values()):
            return None
        if not isinstance(x, Tensor):
            return functools.reduce(lambda all_, n: with_head(all_, columns[n], n), columns, x)
        return _with_columns(x, {n: y[:, n] for n, y in columns.items()})

    edited_result = Result(_with_columns(result.out, outputs), joined("lse"), joined("weights"), joined("statistics"))
    return edited_result, {number: head.changed for number, head in changed.items() if head.changed is not None}


def _with_columns(x: Tensor, columns: Mapping[int, Tensor]) -> Tensor:
    """A copy with other numbers in some heads."""
    if not columns:
        return x
    x = x.clone()
    for number, column in columns.items():
        x[:, number] = column
    return x


def shown(place: Place) -> str:
    """A place as it is written in a key, and of which groups."""
    group, layer, head = place
    named = f"({group!r}, {layer}, {head})" if group else f"({layer!r}, {head!r})"
    of = "" if group or isinstance(layer, str) or isinstance(head, str) else f" of the groups {' and '.join(SELF)}"
    return f"{named}{of}"
