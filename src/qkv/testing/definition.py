"""The definition of a composition in float64: weights and outputs, formed densely.

From Σ_j w(s_j, level) = 1 follows that the level moves by −(Σ ∂w/∂s ds) / (Σ ∂w/∂level).

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
from qkv.testing.inputs import calling, check_returned, fail, number, shape_of

STEPS = 200  # most steps of a bisection; it ends when no number lies between the two ends of the bracket
FARTHEST = 2.0**40  # largest distance of the level from the largest score


def weigh(normalizer: Normalizer, at: Tensor, level: Tensor | None = None) -> Tensor:
    """`weight` at scores (and the level of their rows), with a check of its result."""
    with calling(normalizer, "weight", f"called for scores of shape {tuple(at.shape)}"):
        if isinstance(normalizer, SumToOne):
            assert level is not None
            made = normalizer.weight(at, level)
        else:
            assert isinstance(normalizer, Pointwise)
            made = normalizer.weight(at)
    return check_returned(normalizer, "weight", made, at.shape, at.dtype, f"scores of {at.dtype}")


def pointwise(normalizer: Pointwise, final: Tensor, shown: Tensor, visible_keys: Tensor) -> Tensor:
    """Weights of final scores, divided by keys or by their sum as the normalizer defines; 0 at masked pairs."""
    with calling(normalizer, "shift", "called"):
        shift = normalizer.shift(lambda: visible_keys, final.new_empty(0))
    if shift is not None:
        final = final + shift[..., None]
    weights = torch.where(shown, weigh(normalizer, torch.where(shown, final, 0.0)), 0.0)
    if normalizer.divide == "sum":
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total == 0, 1.0, total)
    return weights / visible_keys[..., None] if normalizer.divide == "keys" else weights


def sum_to_one(
    normalizer: SumToOne, final: Tensor, shown: Tensor, sink: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weights and level; the derivative of the level follows from the implicit function theorem."""
    if sink is not None:  # treated as one more key, without a value
        final = torch.cat([final, sink[..., None]], -1)
        shown = torch.cat([shown, sink.detach()[..., None] != -torch.inf], -1)
    level = bisect(normalizer, final.detach(), shown)
    empty = ~shown.any(-1)
    start = level.detach().requires_grad_()
    with torch.enable_grad():
        total = _total(normalizer, final.detach(), shown, start)
        (falls,) = torch.autograd.grad(total.sum(), start)
    total = _total(normalizer, final, shown, level)
    moved = torch.where(falls == 0, 0.0, (total.detach() - total) / torch.where(falls == 0, 1.0, falls))
    level = level + torch.where(empty, 0.0, moved)
    weights = _weights(normalizer, final, shown, level)
    keys = shown.shape[-1] - (sink is not None)
    return weights[..., :keys], level.masked_fill(empty, -torch.inf)


def _weights(normalizer: SumToOne, final: Tensor, shown: Tensor, level: Tensor) -> Tensor:
    row = level[..., None]
    return torch.where(shown, weigh(normalizer, torch.where(shown, final, row.detach()), row), 0.0)


def _total(normalizer: SumToOne, final: Tensor, shown: Tensor, level: Tensor) -> Tensor:
    return _weights(normalizer, final, shown, level).sum(-1)


@torch.no_grad()
def bisect(normalizer: SumToOne, final: Tensor, shown: Tensor) -> Tensor:
    """The level at which the visible weights of each row sum to one; 0 for fully masked rows."""
    empty = ~shown.any(-1)
    top = torch.where(shown, final, -torch.inf).amax(-1).masked_fill(empty, 0)

    def total(level: Tensor) -> Tensor:
        sums = _total(normalizer, final, shown, level)
        if bool(sums.isnan().any()):
            place = tuple(sums.isnan().nonzero()[0].tolist())
            near = f"a largest score of {number(top[place].item())} and level {number(level[place].item())}"
            fail(normalizer, "weight", f"the weights of a query with {near} sum to nan, expected numbers of 0 or more")
        return sums

    def end(sign: int) -> Tensor:
        """One end of the bracket: a level at which the sum is at least 1 (sign −1), or at most 1 (sign 1)."""
        level, step = top + sign, 1.0
        while True:
            sums = total(level)
            short = ((sums < 1) if sign < 0 else (sums > 1)) & ~empty
            if not bool(short.any()):
                return level
            step *= 2
            if step > FARTHEST:
                _unreachable(normalizer, sums, short, shown, below=sign < 0)
            level = level + torch.where(short, sign * step, 0.0)

    low, high = end(-1), end(1)
    for _ in range(STEPS):
        middle = low + (high - low) / 2
        if bool(((middle == low) | (middle == high)).all()):
            break
        above = total(middle) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    sums = torch.stack([total(low), total(high)])
    jumps = ((sums[0] - sums[1]).abs() > 1e-6) & ~empty
    if bool(jumps.any()):
        place = tuple(jumps.nonzero()[0].tolist())
        fail(
            normalizer, "weight", f"the weights of a query sum to {number(sums[0][place].item())} just below level "
            f"{number(high[place].item())} and to {number(sums[1][place].item())} just above, expected a weight that "
            "is continuous in the level"
        )  # fmt: skip
    return torch.where(empty, 0.0, low + (high - low) / 2)


def _unreachable(normalizer: SumToOne, sums: Tensor, short: Tensor, shown: Tensor, *, below: bool) -> None:
    place = tuple(short.nonzero()[0].tolist())
    what = f"the weights of a query with {int(shown[place].sum())} visible keys sum to {number(sums[place].item())}"
    if below:
        fail(normalizer, "weight", f"{what} at the most, however low the level, expected a sum that passes 1")
    fail(normalizer, "weight", f"{what} at the least, however high the level, expected weights that fall to 0")


def one_key(soft: Tensor, final: Tensor, shown: Tensor) -> Tensor:
    """One-hot weights on the visible key with the largest score, with the gradient of the soft weights."""
    best = torch.where(shown, final.detach(), -torch.inf).argmax(-1, keepdim=True)
    one = torch.zeros_like(soft).scatter(-1, best, 1.0) * shown.any(-1, keepdim=True)
    return soft + (one - soft).detach()


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
