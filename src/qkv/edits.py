"""Interventions on single heads, for `qkv.edit`: each changes the output of a head, or the weights that it has.

Your own edit inherits from `Edit` and defines `apply`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkv import masks, normalizers
from qkv._contract import require
from qkv.engine import Call, Result
from qkv.errors import InputError, kind_of
from qkv.kernels import attention
from qkv.masks.base import Submask
from qkv.statistics.result import with_head

__all__ = [
    "Edit", "Head", "HideFirst", "Mean", "Patch", "Scale", "Steer", "Temperature", "WithMask", "WithNormalizer", "Zero",
]  # fmt: skip
__dir__ = __all__.copy


@dataclass(frozen=True, eq=False)
class Placed:
    """Where the queries and keys of a call are in the text."""

    start: int | None
    """Position of the first query; None if the keys are not the tokens of the text that has the queries."""
    keys_at: int | Int[Tensor, "b hkv nk"]
    """Position of the first key, if the others follow it; else those of all keys."""
    queries: Bool[Tensor, "b nq"] | None
    """True at real tokens, False at padding; None if all are real."""
    first: int | Int[Tensor, " b"]
    """Position of the first token that is not padding; one for each batch item where padding is on the left."""


@dataclass(eq=False)
class Head:
    """One head in one attention call of a model."""

    name: str
    """The module and the head, for errors."""
    number: int
    """Number of the query head."""
    output: Float[Tensor, "b nq dv"]
    """Its output before the output projection, as the model computes it or as earlier edits left it."""
    place: Callable[[], Placed]
    """Tells where the queries and keys are in the text."""
    call: Call
    """The attention call of its layer, with all heads, as earlier edits left it."""
    compute: Callable[[Call], Result] = attention
    """Computes another call of the layer, with all that is requested besides the output."""
    computed: dict[Any, tuple[Call, Result, tuple[Any, ...]]] = field(default_factory=dict)
    """What `recompute` has computed for heads of the layer: one call for all that have the same edit."""
    changed: Call | None = field(default=None, init=False)
    """The call after `recompute`."""
    result: Result | None = field(default=None, init=False)
    """Its result."""

    @property
    def queries(self) -> Bool[Tensor, "b nq"] | None:
        """True at real tokens, False at padding; None if all are real."""
        return self.place().queries

    @property
    def first(self) -> int | Int[Tensor, " b"]:
        """Position of the first token of the text; one for each batch item where padding is on the left."""
        return self.place().first

    def of_text(self, mask: masks.Mask) -> masks.Mask:
        """A mask of the whole text so far, for the queries and keys of the call."""
        call, place = self.call, self.place()
        (b, h, n_queries, _), (_, hkv, n_keys, _), at = call.q.shape, call.k.shape, place.keys_at
        if place.start is None or (n_queries == n_keys and isinstance(at, int) and place.start == at == 0):
            return mask
        stop = max(place.start + n_queries, at + n_keys if isinstance(at, int) else 0)
        grid = masks.Grid(b, h, stop, stop, 0, call.q.device)
        mask.check(grid)
        if isinstance(at, int):
            return Submask(mask, grid, place.start - (n_keys - n_queries), at)
        shown = mask.visible(masks.Region(slice(place.start, place.start + n_queries), slice(0, stop)), grid)
        at = at.to(shown.device).repeat_interleave(h // hkv, 1)[:, :, None].expand(-1, -1, n_queries, -1)
        return masks.Dense(shown.expand(b, h, -1, -1).gather(3, at))

    def recompute(
        self,
        *,
        mask: masks.Mask | None = None,
        normalizer: normalizers.Normalizer | None = None,
        temperature: float = 1.0,
    ) -> Float[Tensor, "b nq dv"]:
        """The output with other weights, in linear memory.

        Args:
            mask: of the queries and keys of the call, in addition to the mask of the model, by ``&``.
            normalizer: in place of that of the model, with its sink.
            temperature: divides the scores, in addition to the temperature of the normalizer.
        """
        call = self.call if self.changed is None else self.changed
        key, given = (id(call), id(mask), id(normalizer), temperature), call.given
        if key not in self.computed:
            both = mask if given.mask is None else given.mask if mask is None else given.mask & mask
            chosen = given.normalizer if normalizer is None else normalizer
            if temperature != 1:
                chosen = chosen.with_temperature(chosen.temperature * temperature)
            made = Call.of(given.q, given.k, given.v, both, given.biases, given.score, chosen)
            made_of = call, mask, normalizer  # kept, so that no other object gets their ids
            self.computed[key] = made, self.compute(made), made_of
        self.changed, self.result, _ = self.computed[key]
        return self.result.out[:, self.number]


class Edit:
    """Base of all edits. One method is required: `apply`.

    >>> class Halve(Edit):
    ...     def apply(self, head):
    ...         return head.output / 2
    """

    positional = True
    """Whether it asks where queries and keys are in the text, which must be followed then."""

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        """The output of the head instead of ``head.output``, of the same shape."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise `InputError` if the edit is incomplete."""
        require(self, Edit, "apply", "head", "the output of the head (b, nq, dv)")


def edited(edit: Edit, head: Head) -> Tensor:
    """The output of a head after an edit, checked."""
    out = edit.apply(head)
    if not isinstance(out, Tensor) or out.shape != head.output.shape:
        raise InputError(
            f"{type(edit).__name__}: apply returned {kind_of(out)} for {head.name}, expected a tensor of shape "
            f"{tuple(head.output.shape)} (batch, queries, values)"
        )
    return torch.as_tensor(out, dtype=head.output.dtype, device=head.output.device)


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
        edits = {}
        for place, edit in self.by_place.items():
            if place[:2] in names:
                self.met.add(place)
                edits[place[2]] = edit
        return edits


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
    for edits in ACTIVE.get(model, ()):
        found = edits.of(module, group, layer)
        if found and not editable:
            raise InputError(
                f"edits has {module}, which forms its weights itself, so that its heads cannot be edited; expected "
                "attention of qkv, of transformers' attention interface or of torch's scaled_dot_product_attention"
            )
        for number, edit in found.items():
            if not 0 <= number < heads:
                raise InputError(f"edits has head {number} of {module}, expected 0 to {heads - 1}")
            before = changed[number].changed if number in changed else None
            output, name = outputs.get(number, result.out[:, number]), f"head {number} of {module}"
            head = Head(name, number, output, place, before or call, compute, computed)
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

    made = Result(_with_columns(result.out, outputs), joined("lse"), joined("weights"), joined("statistics"))
    return made, {number: head.changed for number, head in changed.items() if head.changed is not None}


def _with_columns(x: Tensor, columns: Mapping[int, Tensor]) -> Tensor:
    """A copy with other numbers in some heads."""
    if not columns:
        return x
    x = x.clone()
    for number, column in columns.items():
        x[:, number] = column
    return x


class Zero(Edit):
    """Removes the head: its output is 0."""

    positional = False

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        return torch.zeros_like(head.output)


class Mean(Edit):
    """Replaces the output of the head by its mean over the tokens of each text, padding left out.

    The head then tells the layers above nothing about single tokens, without the shift that `Zero` makes.
    """

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        n_queries, n_keys = head.call.q.shape[2], head.call.k.shape[2]
        if n_queries < n_keys:  # as in a step of generation
            raise InputError(
                f"edit is Mean of {head.name}, which attends with {n_queries} queries to {n_keys} keys; expected a "
                "forward over the whole text, without a cache"
            )
        if head.queries is None:
            return head.output.mean(1, keepdim=True).expand_as(head.output)
        real = head.queries[..., None].to(head.output)
        mean = (head.output * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
        return mean.expand_as(head.output)


@dataclass(eq=False)
class Scale(Edit):
    """Multiplies the output of the head.

    Args:
        factor: a number, or a tensor (for gradients: which heads matter) that broadcasts with (b, nq, dv).
    """

    factor: float | Tensor
    positional = False

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        return head.output * self.factor


@dataclass(eq=False)
class Steer(Edit):
    """Adds a vector to the output of the head at every token (Turner et al. 2023, arXiv:2308.10248).

    Args:
        vector: (dv,), or what broadcasts with (b, nq, dv).
    """

    vector: Float[Tensor, "*b dv"]
    positional = False

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        if self.vector.ndim == 0 or self.vector.shape[-1] != head.output.shape[-1]:
            raise InputError(
                f"vector has shape {tuple(self.vector.shape)}, expected (…, {head.output.shape[-1]}) for {head.name}"
            )
        return head.output + self.vector.to(head.output)


@dataclass(eq=False)
class Patch(Edit):
    """Replaces the output of the head by that of another run (activation patching).

    Args:
        output: (b, nq, dv), from `qkv.profiler.head_outputs` of a run on a text of the same length.
    """

    output: Float[Tensor, "b nq dv"]
    positional = False

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        return self.output.to(head.output)


class Temperature(Edit):
    """Divides the scores of the head.

    Args:
        temperature: above 1 for more even weights, below 1 for sharper ones.
    """

    positional = False

    def __init__(self, temperature: float) -> None:
        if not temperature > 0:
            raise InputError(f"temperature is {temperature}, expected a positive number")
        self.temperature = temperature

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        return head.recompute(temperature=self.temperature)


class WithNormalizer(Edit):
    """Gives the head another normalizer, such as ``qkv.normalizers.Softmax(sink=0.0)``, softmax off by one.

    Args:
        normalizer: in place of the model's, whose learned sink, if it has one, is dropped.
    """

    positional = False

    def __init__(self, normalizer: normalizers.Normalizer) -> None:
        if not isinstance(normalizer, normalizers.Normalizer):
            raise InputError(f"normalizer is {type(normalizer).__name__}, expected one of qkv.normalizers")
        self.normalizer = normalizer

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        return head.recompute(normalizer=self.normalizer)


class WithMask(Edit):
    """Restricts the head by a mask besides that of the model, such as ``qkv.masks.Window(64)``.

    Args:
        mask: True where a query may attend.
    """

    def __init__(self, mask: masks.Mask) -> None:
        if not isinstance(mask, masks.Mask):
            raise InputError(f"mask is {type(mask).__name__}, expected one of qkv.masks")
        self.mask = mask

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        return head.recompute(mask=head.of_text(self.mask))


class HideFirst(Edit):
    """Hides the first token of the text from all queries but its own: the head loses its sink there."""

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        first = torch.as_tensor(head.first, device=head.output.device).view(-1, 1, 1, 1)

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            at = first if len(first) == 1 else first[b.flatten()]
            return (k != at) | (q == k)

        return head.recompute(mask=head.of_text(masks.Predicate(sees)))


BY_NAME: dict[str, Edit] = {
    "zero": Zero(),
    "mean": Mean(),
    "softmax": WithNormalizer(normalizers.Softmax()),
    "off-by-one": WithNormalizer(normalizers.Softmax(sink=0.0)),
    "sigmoid": WithNormalizer(normalizers.Sigmoid()),
}
"""``softmax``, without any sink; ``off-by-one``, a softmax with an additional logit of 0 that belongs to no key;
``sigmoid``, with the library's bias of −ln of the number of visible keys."""
