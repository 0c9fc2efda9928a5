"""`Edit`, the base of all edits of a head, and `Head`, what an edit gets."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv._contract import require
from qkv._engine.call import Call
from qkv.errors import InputError
from qkv.kernels import serve, serving
from qkv.masks import Mask
from qkv.normalizers import Normalizer


@dataclass(eq=False)
class Head:
    """One head in one attention call of a model."""

    name: str
    """The module and the head, for errors."""
    number: int
    """Number of the query head."""
    output: Float[Tensor, "b nq dv"]
    """Its output before the output projection, as the model computes it or as earlier edits left it."""
    queries: Bool[Tensor, "b nq"] | None
    """True at real tokens, False at padding; None if all are real."""
    first: int | Int[Tensor, " b"]
    """Position of the first key of the text; one for each batch item where padding is on the left."""
    call: Call
    """The attention call of its layer, with all heads."""
    changed: Call | None = field(default=None, init=False)
    """The call after `recompute`."""

    def recompute(
        self, *, mask: Mask | None = None, normalizer: Normalizer | None = None, temperature: float = 1.0
    ) -> Float[Tensor, "b nq dv"]:
        """The output with other weights, in linear memory.

        Args:
            mask: in addition to the mask of the model, by ``&``.
            normalizer: in place of that of the model, with its sink.
            temperature: divides the scores, in addition to the temperature of the normalizer.
        """
        call = self.call if self.changed is None else self.changed
        given = call.given
        both = mask if given.mask is None else given.mask if mask is None else given.mask & mask
        chosen = given.normalizer if normalizer is None else normalizer
        if temperature != 1:
            chosen = chosen.with_temperature(chosen.temperature * temperature)
        self.changed = Call.of(given.q, given.k, given.v, both, given.biases, given.score, chosen)
        with serving(None):
            return serve(self.changed).out[:, self.number]

    def all_keys(self, edit: Edit) -> None:
        """Raise `InputError` if the call has fewer queries than keys, as a step of generation has."""
        n_queries, n_keys = self.call.q.shape[2], self.call.k.shape[2]
        if n_queries < n_keys:
            raise InputError(
                f"edit is {type(edit).__name__} of {self.name}, which attends with {n_queries} queries to {n_keys} "
                "keys; expected a forward over the whole text, without a cache"
            )


class Edit:
    """Base of all edits. One method is required: `apply`.

    >>> class Halve(Edit):
    ...     def apply(self, head):
    ...         return head.output / 2
    """

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
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise InputError(
            f"{type(edit).__name__}: apply returned {got} for {head.name}, expected a tensor of shape "
            f"{tuple(head.output.shape)} (batch, queries, values)"
        )
    return torch.as_tensor(out, dtype=head.output.dtype, device=head.output.device)
