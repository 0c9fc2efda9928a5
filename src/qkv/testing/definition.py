"""Attention by definition: dense float64, each object by its one defining method, differentiated by autograd.

The checks compare the kernels with this module, so it shares no code with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qkv._contract import learned_tensors
from qkv.biases import Additive, Bias
from qkv.masks import Grid, Mask, Region
from qkv.normalizers import Normalizer, Pointwise, Softmax, SumToOne
from qkv.scores import Dot, Pairwise, Score
from qkv.testing.report import calling, check_returned, fail, number, shape_of
from qkv.testing.weighing import one_key, pointwise, sum_to_one


@dataclass(frozen=True)
class Composition:
    """The arguments of `attend` other than tensors; one of them is under examination."""

    subject: str
    """Name of the argument under examination."""
    mask: Mask | None = None
    bias: Bias | None = None
    score: Score | None = None
    normalizer: Normalizer | None = None
    label: str = ""
    """How this composition differs from others, for messages."""
    about: object = None
    """The object that messages name, if it is only a part of the one under examination."""

    @property
    def thing(self) -> Any:
        """The object under examination."""
        return getattr(self, self.subject)

    @property
    def reported(self) -> object:
        """The object that messages name."""
        return self.thing if self.about is None else self.about

    @property
    def method(self) -> str:
        """The method that defines the object that messages name."""
        return method_of(self.reported)

    def of(self, thing: object) -> Composition:
        """The same composition with another object under examination."""
        change: dict[str, Any] = {self.subject: thing}
        return replace(self, **change)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `attend`."""
        return {name: getattr(self, name) for name in ("mask", "bias", "score", "normalizer")}

    def learned(self) -> dict[str, Tensor]:
        """Learned tensors of all parts, by name."""
        result: dict[str, Tensor] = {}
        for name, part in self.arguments().items():
            prefix = "" if name == self.subject else f"{name}."
            result |= {prefix + tensor: x for tensor, x in learned_tensors(part).items()}
        return result


def method_of(thing: object) -> str:
    """The method that defines an object."""
    if isinstance(thing, Mask):
        return "sees"
    if isinstance(thing, Pairwise):
        return "scores"
    if isinstance(thing, Score):
        return "project"
    if isinstance(thing, Additive):
        return "tile"
    if isinstance(thing, Bias):
        return "apply" if type(thing).apply is not Bias.apply else "bound"
    return "weight"


@dataclass(frozen=True, eq=False)
class Result:
    """The result of a call by definition."""

    out: Tensor
    weights: Tensor
    level: Tensor | None
    """Log-sum-exp or threshold of weights that sum to one; −inf without visible keys."""
    scores: Tensor
    visible: Tensor
    eps: float
    """The machine epsilon of the least precise tensor that a method returned."""

    @property
    def condition(self) -> float:
        """The largest absolute sum of the weights of a query, at least 1: how far rounding errors are amplified."""
        return max(1.0, float(self.weights.detach().abs().sum(-1).max()))


def attention(c: Composition, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None = None) -> Result:
    """Attention of float64 tensors; `chosen` are the one-hot weights of a normalizer that samples keys."""
    batch, heads, queries, _ = q.shape
    grid = Grid.of(queries, k.shape[2], batch, heads)
    whole = Region(slice(0, queries), slice(0, grid.n_keys), slice(0, batch), slice(0, heads), grid.offset)
    score = Dot() if c.score is None else c.score
    normalizer = Softmax() if c.normalizer is None else c.normalizer
    eps = torch.finfo(torch.float64).eps
    visible = torch.ones(batch, heads, queries, grid.n_keys, dtype=torch.bool)
    if c.mask is not None:
        visible = visible_pairs(c.mask, whole, grid).expand_as(visible)
    projected, keys = project(score, q, k)
    final = scores(score, projected, keys)
    table = None
    if c.bias is not None:
        bias = c.bias.bound(projected, grid, score.factor(projected.shape[3]))
        final, eps = biased(bias, final, whole)
        table = c.bias.value_table
    final = final / normalizer.temperature
    visible_keys = visible.sum(-1).clamp(min=1).double()
    shown = visible & (final.detach() != -torch.inf)
    strange = visible & (final.detach().isnan() | (final.detach() == torch.inf))
    if bool(strange.any()):
        place = tuple(strange.nonzero()[0].tolist())
        fail(
            c.reported, c.method, f"the score at {place} is {number(final[place].item())} for finite queries and keys, "
            "expected a number or −inf"
        )  # fmt: skip
    level = None
    if isinstance(normalizer, SumToOne):
        weights, level = sum_to_one(normalizer, final, shown, _sink(normalizer, score, q, k, projected))
        if normalizer.one_key:
            weights = one_key(weights, final, shown) if chosen is None else weights + (chosen - weights).detach()
    else:
        assert isinstance(normalizer, Pointwise)
        weights = pointwise(normalizer, final, shown, visible_keys)
    out = weights @ per_head(v, heads)
    if table is not None:
        out = out + _of_distances(weights, table, grid)
    return Result(out, weights, level, final, visible, eps)


def per_head(x: Tensor, heads: int) -> Tensor:
    """Keys or values, repeated for each query head of a group."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def visible_pairs(mask: Mask, region: Region, grid: Grid) -> Tensor:
    """`sees` of a region, checked, with four dimensions, some of which may be 1."""
    b, h, q, k = region.indices(grid)
    with calling(mask, "sees", f"called for a grid of {grid.n_queries} queries and {grid.n_keys} keys"):
        made = mask.sees(b, h, q, k, grid)
    want = (b.shape[0], h.shape[0], q.shape[0], k.shape[0])
    if not isinstance(made, Tensor) or made.dtype != torch.bool:
        fail(mask, "sees", f"returned {shape_of(made)}, expected a boolean tensor, True where a query may attend")
    made = made[(None,) * max(0, 4 - made.ndim)]
    if made.ndim != 4 or any(got not in (1, size) for got, size in zip(made.shape, want, strict=True)):
        fail(mask, "sees", f"returned {shape_of(made)}, expected a shape that broadcasts to {want}")
    return made.expand(*made.shape[:2], *want[2:])


def project(score: Score, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """`project`, with a check of its result."""
    shapes = f"q {tuple(q.shape)} and k {tuple(k.shape)}"
    with calling(score, "project", f"called with {shapes}, {q.dtype}"):
        made = score.project(q, k)
    if not isinstance(made, tuple) or len(made) != 2:
        fail(score, "project", f"returned {shape_of(made)}, expected two tensors: queries and keys")
    for name, x, of in (("queries", made[0], q), ("keys", made[1], k)):
        size = x.shape[3] if isinstance(x, Tensor) and x.ndim == 4 else of.shape[3]
        check_returned(score, "project", x, (*of.shape[:3], size), of.dtype, f"the {name} of {shapes}, {of.dtype}")
    if not isinstance(score, Pairwise) and made[0].shape[3] != made[1].shape[3]:
        fail(
            score, "project", f"returned queries of {made[0].shape[3]} entries and keys of {made[1].shape[3]} for "
            f"{shapes}, expected as many"
        )  # fmt: skip
    return made


def scores(score: Score, q: Tensor, k: Tensor) -> Tensor:
    """Scores of projected queries and keys."""
    k = per_head(k, q.shape[1])
    if not isinstance(score, Pairwise):
        return score.factor(q.shape[3]) * (q @ k.transpose(-1, -2))
    shapes = f"q {tuple(q.shape)} and k {tuple(k.shape)}"
    with calling(score, "scores", f"called with {shapes}"):
        made = score.scores(q, k)
    return check_returned(score, "scores", made, (*q.shape[:3], k.shape[2]), q.dtype, f"{shapes}, {q.dtype}")


def added(bias: Additive, region: Region, shape: torch.Size) -> Tensor:
    """`tile` of a region, checked, with four dimensions, some of which may be 1."""
    with calling(bias, "tile", f"called for rows {region.rows} and columns {region.columns}"):
        made = bias.tile(region)
    if not isinstance(made, Tensor) or made.ndim > 4 or not made.dtype.is_floating_point:
        fail(bias, "tile", f"returned {shape_of(made)}, expected floats that broadcast to {tuple(shape)}")
    made = made[(None,) * (4 - made.ndim)]
    if any(got not in (1, want) for got, want in zip(made.shape, shape, strict=True)):
        fail(bias, "tile", f"returned {shape_of(made)}, expected a shape that broadcasts to {tuple(shape)}")
    return made


def biased(bias: Bias, before: Tensor, region: Region) -> tuple[Tensor, float]:
    """The scores of a region after a bias, and the machine epsilon of the tensor that the bias returned."""
    if isinstance(bias, Additive):
        tile = added(bias, region, before.shape)
        return before + tile, float(torch.finfo(tile.dtype).eps)
    with calling(bias, "apply", f"called for scores of shape {tuple(before.shape)}"):
        made = bias.apply(before, region)
    arguments = f"scores of {before.dtype}, shape {tuple(before.shape)}"
    made = check_returned(bias, "apply", made, before.shape, before.dtype, arguments)
    return made, float(torch.finfo(made.dtype).eps)


def _sink(normalizer: SumToOne, score: Score, q: Tensor, k: Tensor, projected: Tensor) -> Tensor | None:
    """The sink logit of each query, (b, h, nq): a constant, or the score of a learned key."""
    batch, heads, queries, _ = q.shape
    if normalizer.key is not None:
        keys = normalizer.key.double().view(k.shape[1], heads // k.shape[1], -1).expand(batch, -1, -1, -1)
        key = project(score, q, keys)[1].reshape(batch, heads, 1, -1)
        return scores(score, projected, key)[..., 0] / normalizer.temperature
    if normalizer.sink is None:
        return None
    sink = torch.as_tensor(normalizer.sink, dtype=torch.float64)
    return (sink[:, None] if sink.ndim == 1 else sink).expand(batch, heads, queries)


def _of_distances(weights: Tensor, table: Tensor, grid: Grid) -> Tensor:
    """Σ_j A_ij table[clip(j − p_i)] for a table (distances, dv), or one table for each head."""
    table = table.double()
    reach = table.shape[-2] // 2
    steps = (grid.columns(0, grid.n_keys) - grid.rows(0, grid.n_queries)[:, None]).clamp(-reach, reach) + reach
    vectors = table[..., steps, :]  # (…, nq, nk, dv)
    return (weights[..., None] * (vectors if table.ndim == 3 else vectors[None])).sum(-2)
