"""What a bias is: any function of a score and its place, or something that is added to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from qkv._contract import Definition, gradients_of, learned_tensors, overrides, require
from qkv.errors import InputError
from qkv.masks import Grid, Region


class Bias(Definition):
    """Base of all biases: any function of a score and its place. One method is required: `apply`.

    A bias that adds something to the score inherits from `Additive` instead, which fused kernels can take. Gradients
    come from autograd on the tile, of every `nn.Parameter` among the object's attributes, too.
    `qkv.testing.check_bias` checks an object.

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

    definitions: ClassVar = {"apply": ("apply_", "at", "gradients", "by_score", "by_head", "part")}
    by_score = False
    """Whether the bias depends on the score alone, not on where its query and key stand."""
    by_head = True
    """Whether something in the object differs between heads. `apply` is then always given all query heads."""
    by_distance: Tensor | None = None
    """A number for each distance, (heads or 1, nq + nk − 1), if that is all the bound bias adds: see `ByDistance`."""
    value_table: Tensor | None = None
    """Vectors added to the values by clipped distance, (heads, 2 reach + 1, dv): see `RelativePosition`."""

    @property
    def by_query(self) -> bool:
        """Whether the bias depends on the vector of the query."""
        return overrides(self, Bias, "bound")

    def check(self, grid: Grid) -> None:
        """Raise `InputError` if the bias cannot be laid over `grid`."""

    def require(self) -> None:
        """Raise `InputError` if the bias is incomplete."""
        require(self, Bias, "apply", "scores, region", "the scores of a region of the matrix with the bias in them")

    def bound(self, q: Float[Tensor, "b h nq d"], grid: Grid, scale: float) -> Bias:
        """The bias for these queries, already projected, on this grid; differentiable. `scale` multiplies q·k."""
        return self

    # --- of a bound bias ---------------------------------------------------------------------------------------------

    def apply(self, scores: Float[Tensor, "b h q k"], region: Region) -> Float[Tensor, "b h q k"]:
        """The scores of a region with the bias in them, from torch operations that act on each score alone.

        `region.queries` (q, 1) and `region.keys` (k,) are the positions of its queries and keys, and ``region.of(x)``
        its part of a tensor (b, h, nq, nk) whose dimensions of size 1 stand for all. The region has all query heads,
        so a parameter for each head has shape (heads, 1, 1). Nothing may be changed in place. −inf hides a pair.
        """
        raise InputError(f"{type(self).__name__}: no method apply(scores, region)")

    # --- shortcuts: none is needed; a subclass that redefines `apply` loses those it inherits -------------------------

    def apply_(self, scores: Float[Tensor, "b h q k"], region: Region) -> Float[Tensor, "b h q k"]:
        """`apply` without a gradient, which may change the scores in place."""
        return self.apply(scores, region)

    def gradients(
        self, before: Float[Tensor, "b h q k"], region: Region, slope: Float[Tensor, "b h q k"], learned: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of Σ slope · apply(before) in the scores `before` and each of `learned`."""
        before = before.detach().requires_grad_()
        with torch.enable_grad():
            return gradients_of(self.apply(before, region), (before, *learned), slope)

    def at(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The score of query i (its row, not its position) and key j with the bias in it, as in a ``score_mod``.

        Only for FlexAttention, `choose_keys` and masks whose tiles are gathered.
        """
        raise InputError(f"{type(self).__name__}: no method at(score, b, h, i, j)")

    def part(self, region: Region) -> Bias | None:
        """The bound bias of a rectangle of the matrix, whose rows and columns count from 0; None if it has none."""
        return None

    # --- the tensors of a bound bias, by name -------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that may want a gradient; of a user's own bias, those among its attributes that require one."""
        return learned_tensors(self)

    def with_tensors(self, tensors: dict[str, Tensor]) -> Bias:
        """The same bias made of other tensors; one of a user's own keeps its own."""
        return self


class Additive(Bias):
    """Base of the biases that add something to a score. One method is required: `tile`.

    >>> class Diagonal(Additive):
    ...     def tile(self, region):
    ...         return (region.queries == region.keys).float()[None, None]
    >>> from qkv import attend
    >>> q = torch.zeros(1, 1, 2, 4)
    >>> attend(q, q, q, bias=Diagonal(), return_weights=True)[1][0, 0, 0].tolist()
    [0.7310585975646973, 0.2689414322376251]
    """

    definitions: ClassVar = {
        "tile": ("at", "gradients", "by_distance", "by_head", "part", "tensors", "with_tensors", "add_gradient"),
    }
    by_head = True
    by_distance = None
    add_gradient: Callable[[Tensor, Region, Tensor], None] | None = None
    """``add_gradient(total, region, slope)`` adds to `total`, shaped like the one tensor of the bias, its gradient."""

    def require(self) -> None:
        require(self, Additive, "tile", "region", "what is added to the scores of a region")
        if overrides(self, Additive, "apply"):
            raise InputError(
                f"{type(self).__name__}: an Additive bias overrides apply, but kernels add its tile; inherit from "
                "qkv.biases.Bias, or give tile(region) alone"
            )

    def tile(self, region: Region) -> Float[Tensor, "#b #h #q #k"]:
        """What is added to the scores of a region, whose places are as in `Bias.apply`; −inf hides a pair.

        Dimensions of size 1 stand for all.
        """
        raise InputError(f"{type(self).__name__}: no method tile(region)")

    def added(self, region: Region) -> Float[Tensor, "#b #h #q #k"]:
        """`tile`, with a check of what it returned; missing dimensions stand for all."""
        made = self.tile(region)
        if not isinstance(made, Tensor) or made.ndim > 4 or not made.dtype.is_floating_point:
            got = f"{made.dtype} of shape {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
            raise InputError(
                f"{type(self).__name__}: tile returned {got}, expected floats that broadcast to (b, h, q, k)"
            )
        return made[(None,) * (4 - made.ndim)]

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

    at, part, tensors, with_tensors = Bias.at, Bias.part, Bias.tensors, Bias.with_tensors


class TensorBias(Additive):
    """Base of the additive biases of this package once bound: made of one tensor, which may want a gradient."""

    tensor: Tensor
    by_head = False

    def tensors(self) -> dict[str, Tensor]:
        return {"tensor": self.tensor}

    def with_tensors(self, tensors: dict[str, Tensor]) -> TensorBias:
        made: Any = self
        bound: TensorBias = replace(made, **tensors)
        return bound
