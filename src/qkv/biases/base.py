"""Base classes of biases: `Bias`, any function of a score and its position; `AdditiveBias`, a tensor added to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from qkv._contract import Definition, gradients_of, learned_tensors, overrides, require
from qkv.errors import InputError, kind_of
from qkv.masks import Grid, Region

Form = Literal["distance", "tensor", "cap"]


class Bias(Definition):
    """Base of all biases: any function of a score and its position. One method is required: `apply`.

    A bias that is added to the score inherits from `AdditiveBias` instead, which fused kernels support. Gradients come
    from autograd on the tile, also for every `nn.Parameter` among the object's attributes. `qkv.testing.check_bias`
    checks an object.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Halved(Bias):
    ...     def apply(self, scores, region):
    ...         return scores / 2
    >>> from qkv import attend
    >>> q = k = torch.ones(1, 1, 1, 4)
    >>> attend(q, k, k, return_lse=True)[1].item(), attend(q, k, k, bias=Halved(), return_lse=True)[1].item()
    (2.0, 1.0)
    """

    definitions: ClassVar = {"apply": ("apply_", "at", "gradients", "by_score", "by_head", "part", "form")}
    by_score = False
    """Whether the bias depends on the score alone, not on the positions of its query and key."""
    by_head = True
    """Whether the bias may have per-head parameters. `apply` then always gets all query heads."""
    constant: bool = False
    """Whether the bound bias is finite and never changes, so that what follows from it may be kept."""
    form: Form | None = None
    """What compiled kernels compute without calling a method: the tensor of a bound `ByDistance` or `TensorBias`, or
    the cap of a `SoftCap`; None for every other bias."""
    value_table: Tensor | None = None
    """Vectors added to the values by clipped distance, (heads, 2 reach + 1, dv): see `RelativePosition`."""

    @property
    def by_query(self) -> bool:
        """Whether the bias depends on the vector of the query."""
        return overrides(self, Bias, "bound")

    def check(self, grid: Grid) -> None:
        """Raise `InputError` if the bias does not fit `grid`."""

    def require(self) -> None:
        """Raise `InputError` if the bias is incomplete."""
        require(self, Bias, "apply", "scores, region", "the scores of a region of the matrix with the bias in them")

    def bound(self, q: Float[Tensor, "b h nq d"], grid: Grid, scale: float) -> Bias:
        """Return the bias for these projected queries on this grid; differentiable. `scale` is the factor of q·k."""
        return self

    # --- methods of a bound bias --------------------------------------------------------------------------------------

    def apply(self, scores: Float[Tensor, "b h q k"], region: Region) -> Float[Tensor, "b h q k"]:
        """Return the scores of a region with the bias applied, by torch operations that act elementwise.

        `region.queries` (q, 1) and `region.keys` (k,) are the positions of its queries and keys, and ``region.of(x)``
        is the slice of a tensor that broadcasts to (b, h, nq, nk). The region has all query heads, so a per-head
        parameter has shape (heads, 1, 1). Inputs must not be changed in place. A score of −inf masks a pair.
        """
        raise InputError(f"{type(self).__name__}: no method apply(scores, region)")

    # --- optional shortcuts; a subclass that overrides `apply` loses the inherited ones -------------------------------

    def apply_(self, scores: Float[Tensor, "b h q k"], region: Region) -> Float[Tensor, "b h q k"]:
        """Return `apply` without gradients; it may overwrite the scores."""
        return self.apply(scores, region)

    def gradients(
        self, before: Float[Tensor, "b h q k"], region: Region, slope: Float[Tensor, "b h q k"], learned: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Return gradients of Σ slope · apply(before) with respect to the scores `before` and to `learned`."""
        before = before.detach().requires_grad_()
        with torch.enable_grad():
            return gradients_of(self.apply(before, region), (before, *learned), slope)

    def at(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return the score of query i (its row, not its position) and key j with the bias, as a ``score_mod``.

        Used by FlexAttention, `choose_keys`, and the flash kernel on sparse masks.
        """
        raise InputError(f"{type(self).__name__}: no method at(score, b, h, i, j)")

    def part(self, region: Region) -> Bias:
        """Return the bound bias of a rectangle of the matrix, whose queries and keys are counted from 0."""
        return _PartOfBias(self, region)

    # --- the tensors of a bound bias, by name -------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return tensors that may need gradients; for a user-defined bias, its attributes that require gradients."""
        return learned_tensors(self)

    def with_tensors(self, tensors: dict[str, Tensor]) -> Bias:
        """Return the same bias with other tensors; a user-defined bias is returned unchanged."""
        return self


@dataclass(frozen=True, eq=False)
class _PartOfBias(Bias):
    """A bound bias of a whole matrix, applied to the rectangle `part` of it."""

    bias: Bias
    part_of: Region

    @property
    def by_head(self) -> bool:  # type: ignore[override]
        return self.bias.by_head

    def tensors(self) -> dict[str, Tensor]:
        return self.bias.tensors()

    def with_tensors(self, tensors: dict[str, Tensor]) -> Bias:
        return replace(self, bias=self.bias.with_tensors(tensors))

    def apply(self, scores: Float[Tensor, "b h q k"], region: Region) -> Float[Tensor, "b h q k"]:
        part = self.part_of
        return self.bias.apply(scores, region.moved(part.rows.start, part.columns.start, part.offset))


class AdditiveBias(Bias):
    """Base of the biases that are added to the scores. One method is required: `tile`.

    >>> class Diagonal(AdditiveBias):
    ...     def tile(self, region):
    ...         return (region.queries == region.keys).float()[None, None]
    >>> from qkv import attend
    >>> q = torch.zeros(1, 1, 2, 4)
    >>> attend(q, q, q, bias=Diagonal(), return_weights=True)[1][0, 0, 0].tolist()
    [0.7310585975646973, 0.2689414322376251]
    """

    definitions: ClassVar = {
        "tile": (
            "at", "gradients", "by_head", "part", "form", "tensors", "with_tensors", "add_gradient",
        )
    }  # fmt: skip
    add_gradient: Callable[[Tensor, Region, Tensor], None] | None = None
    """``add_gradient(total, region, slope)`` adds the gradient of the bias's only tensor to `total`, of its shape."""

    def require(self) -> None:
        require(self, AdditiveBias, "tile", "region", "the tensor to add to the scores of a region")
        if overrides(self, AdditiveBias, "apply"):
            raise InputError(
                f"{type(self).__name__}: an AdditiveBias overrides apply, but kernels add its tile; inherit from "
                "qkv.biases.Bias, or define only tile(region)"
            )

    def tile(self, region: Region) -> Float[Tensor, "#b #h #q #k"]:
        """Return the tensor to add to the scores of a region (see `Bias.apply`); −inf masks a pair.

        Dimensions of size 1 broadcast.
        """
        raise InputError(f"{type(self).__name__}: no method tile(region)")

    def added(self, region: Region) -> Float[Tensor, "#b #h #q #k"]:
        """Return `tile`, with a check of its result; missing leading dimensions are added."""
        tile = self.tile(region)
        if not isinstance(tile, Tensor) or tile.ndim > 4 or not tile.dtype.is_floating_point:
            name, got = type(self).__name__, kind_of(tile)
            raise InputError(f"{name}: tile returned {got}, expected floats that broadcast to (b, h, q, k)")
        return tile[(None,) * (4 - tile.ndim)]

    def apply(self, scores: Float[Tensor, "b h q k"], region: Region) -> Float[Tensor, "b h q k"]:
        return scores + self.added(region).to(scores)

    def apply_(self, scores: Float[Tensor, "b h q k"], region: Region) -> Float[Tensor, "b h q k"]:
        return scores.add_(self.added(region).to(scores))

    def gradients(
        self, before: Float[Tensor, "b h q k"], region: Region, slope: Float[Tensor, "b h q k"], learned: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        if not learned:
            return (slope,)
        with torch.enable_grad():
            added = self.added(region)
            return slope, *gradients_of(added, learned, slope.sum_to_size(added.shape))


class SingleTensorBias(AdditiveBias):
    """Base of the bound additive biases of this package: one tensor, which may need a gradient."""

    tensor: Tensor
    by_head = False

    def tensors(self) -> dict[str, Tensor]:
        return {"tensor": self.tensor}

    def with_tensors(self, tensors: dict[str, Tensor]) -> SingleTensorBias:
        this: Any = self
        bound: SingleTensorBias = replace(this, **tensors)
        return bound
