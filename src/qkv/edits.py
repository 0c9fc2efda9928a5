"""Interventions for `qkv.edit`: on heads (output, values or weights), and on the vectors of sublayers and layers.

Your own edit inherits from `Edit` and defines `apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv import masks, normalizers
from qkv._contract import require
from qkv.engine import Call, Result
from qkv.errors import InputError, kind_of
from qkv.kernels import attention
from qkv.masks.base import Submask

__all__ = [
    "AtTokens", "Edit", "Head", "HideFirst", "Mean", "Patch", "Scale", "Steer", "Temperature", "Values", "Vectors",
    "WithMask", "WithNormalizer", "Zero",
]  # fmt: skip
__dir__ = __all__.copy


@dataclass(frozen=True, eq=False)
class Placed:
    """Where the queries and keys of a call are in the text."""

    start: int | Int[Tensor, "b n"] | None
    """Position of the first query, or of all vectors if they do not follow each other; None if the keys are not the
    tokens of the text that has the queries."""
    keys_at: int | Int[Tensor, "b hkv nk"]
    """Position of the first key, if the others follow it; else those of all keys."""
    queries: Bool[Tensor, "b nq"] | None
    """True at real tokens, False at padding; None if all are real."""
    first: int | Int[Tensor, " b"]
    """Position of the first token that is not padding; one for each batch item where padding is on the left."""


@dataclass(eq=False)
class Vectors:
    """Vectors of the tokens of a text in a model: the output of a head, its values, or the output of a module."""

    name: str
    """What they are, for errors."""
    output: Float[Tensor, "b n d"]
    """The vectors, as the model computes them or as earlier edits left them."""
    place: Callable[[], Placed]
    """Tells where they are in the text."""
    whole: bool
    """Whether these are all tokens of the text so far, and not only those of a step of generation."""

    @property
    def queries(self) -> Bool[Tensor, "b n"] | None:
        """True at real tokens, False at padding; None if all are real."""
        return self.place().queries

    @property
    def first(self) -> int | Int[Tensor, " b"]:
        """Position of the first token of the text; one for each batch item where padding is on the left."""
        return self.place().first

    @property
    def positions(self) -> Int[Tensor, "b n"]:
        """Position of each vector in the text, counted from its first token that is not padding."""
        start, (b, n, _), device = self.place().start, self.output.shape, self.output.device
        if start is None:
            raise InputError(f"edits has positions in {self.name}, whose tokens are not known; expected self-attention")
        at = torch.arange(start, start + n, device=device) if isinstance(start, int) else start.to(device)
        return (at - torch.as_tensor(self.first, device=device).view(-1, 1)).expand(b, n)

    def all_tokens(self, edit: Edit) -> None:
        """Raise `InputError` unless these are the vectors of the whole text."""
        if not self.whole:
            raise InputError(
                f"edit is {type(edit).__name__} of {self.name} in a step of generation with {self.output.shape[1]} "
                "tokens; expected a forward over the whole text, without a cache"
            )


@dataclass(eq=False)
class Head(Vectors):
    """One head in one attention call of a model; `output` is what it has before the output projection."""

    number: int
    """Number of the query head."""
    call: Call
    """The attention call of its layer, with all heads, as earlier edits left it."""
    compute: Callable[[Call], Result] = attention
    """Computes another call of the layer, with all that is requested besides the output."""
    computed: dict[Any, Any] = field(default_factory=dict)
    """What has been computed for heads of the layer: one call for all that have the same edit."""
    changed: Call | None = field(default=None, init=False)
    """The call after `recompute`."""
    result: Result | None = field(default=None, init=False)
    """Its result."""

    def values(self, group: int) -> Vectors:
        """The values of the keys of a head of keys."""
        at = self.place().keys_at
        start = at if isinstance(at, int) else at.expand(-1, self.call.k.shape[1], -1)[:, group]
        values = (self.call if self.changed is None else self.changed).user.v[:, group]
        return Vectors(f"the values of {self.name}", values, lambda: replace(self.place(), start=start), self.whole)

    def of_text(self, mask: masks.Mask) -> masks.Mask:
        """A mask of the whole text so far, for the queries and keys of the call."""
        call, place = self.call, self.place()
        (b, h, n_queries, _), (_, hkv, n_keys, _), at = call.q.shape, call.k.shape, place.keys_at
        if place.start is None or (n_queries == n_keys and isinstance(at, int) and place.start == at == 0):
            return mask
        assert isinstance(place.start, int)
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
        values: Float[Tensor, "b hkv nk dv"] | None = None,
    ) -> Float[Tensor, "b nq dv"]:
        """The output with other weights or values, in linear memory.

        Args:
            mask: of the queries and keys of the call, in addition to the mask of the model, by ``&``.
            normalizer: in place of that of the model, with its sink.
            temperature: divides the scores, in addition to the temperature of the normalizer.
            values: in place of those of the call.
        """
        call = self.call if self.changed is None else self.changed
        key, given = (id(call), id(mask), id(normalizer), temperature, id(values)), call.user
        if key not in self.computed:
            both = mask if given.mask is None else given.mask if mask is None else given.mask & mask
            chosen = given.normalizer if normalizer is None else normalizer
            if temperature != 1:
                chosen = chosen.with_temperature(chosen.temperature * temperature)
            v = given.v if values is None else values
            made = Call.of(given.q, given.k, v, both, given.biases, given.score, chosen)
            made_of = call, mask, normalizer, values  # kept, so that no other object gets their ids
            self.computed[key] = made, self.compute(made), made_of
        self.changed, self.result, _ = self.computed[key]
        return self.result.out[:, self.number]


class Edit:
    """Base of all edits. One method is required: `apply`.

    >>> class Halve(Edit):
    ...     def apply(self, head):
    ...         return head.output / 2
    """

    of_heads = False
    """Whether it can only be an edit of a head, because it changes the weights or values."""

    def apply(self, head: Any) -> Float[Tensor, "b n d"]:
        """The vectors instead of ``head.output``, of the same shape.

        Args:
            head: `Head`, or `Vectors` where the edit is not one of a head.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raise `InputError` if the edit is incomplete."""
        require(self, Edit, "apply", "head", "the output of the head (b, nq, dv)")


def edited(edit: Edit, head: Vectors) -> Tensor:
    """The vectors after an edit, checked."""
    out = edit.apply(head)
    if not isinstance(out, Tensor) or out.shape != head.output.shape:
        raise InputError(
            f"{type(edit).__name__}: apply returned {kind_of(out)} for {head.name}, expected a tensor of shape "
            f"{tuple(head.output.shape)} (batch, tokens, dimensions)"
        )
    return torch.as_tensor(out, dtype=head.output.dtype, device=head.output.device)


class Zero(Edit):
    """Removes the head, or the output of a module: it is 0."""

    def apply(self, head: Vectors) -> Float[Tensor, "b n d"]:
        return torch.zeros_like(head.output)


class Mean(Edit):
    """Replaces the output by its mean over the tokens of each text, padding left out.

    A head then tells the layers above nothing about single tokens, without the shift that `Zero` makes.
    """

    def apply(self, head: Vectors) -> Float[Tensor, "b n d"]:
        head.all_tokens(self)
        if head.queries is None:
            return head.output.mean(1, keepdim=True).expand_as(head.output)
        real = head.queries[..., None].to(head.output)
        mean = (head.output * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
        return mean.expand_as(head.output)


@dataclass(eq=False)
class Scale(Edit):
    """Multiplies the output.

    Args:
        factor: a number, or a tensor (for gradients: which heads matter) that broadcasts with (b, n, d).
    """

    factor: float | Tensor

    def apply(self, head: Vectors) -> Float[Tensor, "b n d"]:
        return head.output * self.factor


@dataclass(eq=False)
class Steer(Edit):
    """Adds a vector to the output at every token (Turner et al. 2023, arXiv:2308.10248).

    Args:
        vector: (d,), or what broadcasts with (b, n, d).
    """

    vector: Float[Tensor, "*b d"]

    def apply(self, head: Vectors) -> Float[Tensor, "b n d"]:
        if self.vector.ndim == 0 or self.vector.shape[-1] != head.output.shape[-1]:
            raise InputError(
                f"vector has shape {tuple(self.vector.shape)}, expected (…, {head.output.shape[-1]}) for {head.name}"
            )
        return head.output + self.vector.to(head.output)


@dataclass(eq=False)
class Patch(Edit):
    """Replaces the output by that of another run (activation patching).

    Args:
        output: (b, n, d), from `qkv.profiler.head_outputs` of a run on a text of the same length.
    """

    output: Float[Tensor, "b n d"]

    def apply(self, head: Vectors) -> Float[Tensor, "b n d"]:
        return self.output.to(head.output)


@dataclass(eq=False)
class AtTokens(Edit):
    """Another edit at some tokens only: `Zero`, `Mean`, `Scale`, `Steer`, `Patch`, or one of your own without weights.

    Args:
        positions: of the tokens, counted from 0 at the first token of each text that is not padding.
        edit: what is done there.

    >>> import torch, qkv
    >>> from qkv.edits import AtTokens, Values, Zero
    >>> model, tokenizer = qkv.load("qkv-mini")
    >>> with qkv.edit(model, {(0, 2): Values(AtTokens([0], Zero())), (1, "mlp"): AtTokens([0], Zero())}):
    ...     logits = model(torch.tensor([[5, 6, 7]]))
    """

    positions: Sequence[int]
    edit: Edit

    def check(self) -> None:
        at = self.positions if isinstance(self.positions, Sequence) else ()
        if not at or not all(isinstance(x, int) and x >= 0 for x in at):
            raise InputError(
                f"edits has AtTokens with positions {self.positions!r}, expected a list of numbers from 0, at least one"
            )
        _check_inner(self.edit)

    def apply(self, head: Vectors) -> Float[Tensor, "b n d"]:
        before = getattr(head, "changed", None)
        out = edited(self.edit, head)
        if getattr(head, "changed", None) is not before:
            raise InputError(
                f"edits has AtTokens of {type(self.edit).__name__}, which changes the weights of {head.name}; expected "
                "an edit of its output, such as Zero(), or WithMask(mask) with a mask of these positions"
            )
        at = torch.isin(head.positions, torch.tensor(list(self.positions), device=head.output.device))
        return torch.where(at[..., None], out, head.output)


@dataclass(eq=False)
class Values(Edit):
    """Changes the values of the keys that a head attends to, and leaves its weights as they are.

    Args:
        edit: what is done with the values, such as ``AtTokens([0], Zero())`` for those of the first token.
    """

    edit: Edit
    of_heads = True

    def check(self) -> None:
        _check_inner(self.edit)

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        call, key = head.call if head.changed is None else head.changed, (id(self), id(head.changed or head.call))
        if key not in head.computed:
            vectors = [head.values(group) for group in range(call.k.shape[1])]
            head.computed[key] = torch.stack([edited(self.edit, x) for x in vectors], 1)
        return head.recompute(values=head.computed[key])


def _check_inner(edit: object) -> None:
    if not isinstance(edit, Edit):
        raise InputError(f"edit is {kind_of(edit)}, expected one of qkv.edits, such as Zero()")
    edit.check()


class Temperature(Edit):
    """Divides the scores of the head.

    Args:
        temperature: above 1 for more even weights, below 1 for sharper ones.
    """

    of_heads = True

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

    of_heads = True

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

    of_heads = True

    def __init__(self, mask: masks.Mask) -> None:
        if not isinstance(mask, masks.Mask):
            raise InputError(f"mask is {type(mask).__name__}, expected one of qkv.masks")
        self.mask = mask

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        return head.recompute(mask=head.of_text(self.mask))


class HideFirst(Edit):
    """Hides the first token of the text from all queries but its own: the head loses its sink there."""

    of_heads = True

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        first = torch.as_tensor(head.first, device=head.output.device).view(-1, 1, 1, 1)

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            at = first if len(first) == 1 else first[b.flatten()]
            return (k != at) | (q == k)

        key = HideFirst, id(head.call)
        if key not in head.computed:
            head.computed[key] = head.of_text(masks.Predicate(sees))
        return head.recompute(mask=head.computed[key])


BY_NAME: dict[str, Edit] = {
    "zero": Zero(),
    "mean": Mean(),
    "softmax": WithNormalizer(normalizers.Softmax()),
    "off-by-one": WithNormalizer(normalizers.Softmax(sink=0.0)),
    "sigmoid": WithNormalizer(normalizers.Sigmoid()),
}
"""``softmax``, without any sink; ``off-by-one``, a softmax with an additional logit of 0 that belongs to no key;
``sigmoid``, with the library's bias of −ln of the number of visible keys."""
