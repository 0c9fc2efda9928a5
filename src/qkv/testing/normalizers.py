"""`check_normalizer`: the weights of a normalizer, their derivatives, and its level."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv._contract import overrides
from qkv.masks import Region
from qkv.normalizers import Normalizer, Pointwise, SumToOne
from qkv.normalizers.level import solve
from qkv.testing.agreement import Composition, check_attend, masked
from qkv.testing.inputs import (
    ROUNDINGS,
    SIZES,
    CheckFailed,
    Size,
    Sizes,
    calling,
    check_alone,
    check_returned,
    converted,
    fail,
    forbid,
    key_heads_of,
    normal,
    number,
    same,
    shape_of,
    sizes_of,
)

SCORES = (-79.3, -30.9, -12.7, -5.11, -2.07, -1.03, -0.31, -1.1e-3, -1.3e-6, 1.3e-6, 1.1e-3, 0.31, 1.03, 2.07, 5.11,
          12.7, 30.9, 79.3)  # fmt: skip
LEVELS = (-61.7, -17.3, -6.13, -2.61, -0.83, -0.017, 0.23, 0.71, 1.57, 3.37, 9.41, 37.9, 83.1)
NEAR = (-8.3, -3.1, -1.7, -0.61, -0.041, 0.037, 0.47, 1.13, 2.9, 7.7)  # score − level
CLOSE = 1e-9  # tolerance for shortcuts in float64, relative to 1 or to the number, whichever is larger


def check_normalizer(normalizer: Normalizer, *, heads: int = 4, sizes: Sizes | None = None, batch: int = 2) -> None:
    """Check that a normalizer fulfils the contract of its base class; for use in your own tests.

    It checks: the shape and dtype of ``weight``; that a weight depends on its own score (and the level of its row)
    alone, so that tiles do not change weights; for `SumToOne`, that it is not negative, decreases in the level and can
    sum to one; each shortcut against ``weight``; output, weights and gradients of `attend` on every kernel against a
    dense definition in float64, with masks, queries without visible keys, sinks and learned keys; finite differences;
    bfloat16 and float16; NaN in masked keys; `measure`; pickle and copy.deepcopy. For a normalizer that selects one
    key (`Hard`), the weights are compared with one-hot weights, and the gradient with that of its soft weights.

    Args:
        normalizer: the object. The parameters of modules in it are converted to each dtype that is checked.
        heads: number of query heads, which must fit parameters of the object that have one entry for each head.
        sizes: pairs (queries, keys), for an object that fits only some sizes, such as one with a sink for each query.
            The default has sizes of one tile and of several, and sizes on both sides of 128 × 128, above which
            `attend` picks other kernels.
        batch: number of batch items; the largest sizes of the default have one.

    Raises:
        CheckFailed: an `AssertionError` whose message says in one sentence what is wrong, and where.

    >>> from qkv.normalizers import Pointwise, Softmax
    >>> check_normalizer(Softmax(sink=0.0), sizes=[(5, 7)])
    >>> class Square(Pointwise):
    ...     def weight(self, scores):
    ...         return scores**2
    ...     def slope_from_weights(self, weights):
    ...         return 2 * weights.sqrt()
    >>> try:
    ...     check_normalizer(Square())
    ... except AssertionError as error:
    ...     print(error)
    Square.slope_from_weights: got 158.6 at score -79.3, expected -158.6, the derivative of weight
    """
    if not isinstance(normalizer, Pointwise | SumToOne):
        raise CheckFailed(
            f"check_normalizer: got {shape_of(normalizer)}, expected an object of a class that inherits from "
            "qkv.normalizers.Pointwise or from SumToOne"
        )
    with calling(normalizer, "weight", f"checked for {heads} heads"):
        normalizer.check(heads)
    exact = converted(normalizer, torch.float64)
    _check_tiles(exact, heads)
    if isinstance(exact, SumToOne):
        _check_levels(exact, heads)
    points = _Points(exact, heads)
    slope = _check_derivatives(points)
    _check_shortcuts(points, slope)
    if isinstance(exact, SumToOne):
        _check_level_of(points)
    else:
        _check_pointwise(points, slope)
    _check_attend(normalizer, heads, sizes, batch)


def _weigh(normalizer: Normalizer, scores: Tensor, level: Tensor | None = None) -> Tensor:
    """`weight` at scores (and the level of their rows), with a check of its result."""
    rows = () if level is None else (level,)
    with calling(normalizer, "weight", f"called for scores of shape {tuple(scores.shape)}"):
        result = normalizer.weight(scores, *rows)  # type: ignore[attr-defined]
    return check_returned(normalizer, "weight", result, scores.shape, scores.dtype, f"scores of {scores.dtype}")


def _each(heads: int, *numbers: float) -> Tensor:
    """Numbers, (1, heads, 1, n)."""
    return torch.tensor(numbers, dtype=torch.float64).expand(1, heads, 1, -1).contiguous()


class _Points:
    """Scores, (1, heads, rows, n): negative, about 0 and large; for `SumToOne` about the level of each row."""

    def __init__(self, normalizer: Pointwise | SumToOne, heads: int, *numbers: float) -> None:
        self.normalizer, self.heads = normalizer, heads
        self.level: Tensor | None = None
        if isinstance(normalizer, SumToOne):
            self.level = _each(heads, *LEVELS).transpose(2, 3).contiguous()
            self.scores = _each(heads, *numbers).expand(-1, -1, len(LEVELS), -1) if numbers else self.level + _each(
                heads, *NEAR)  # fmt: skip
        else:
            self.scores = _each(heads, *(numbers or SCORES))
        self.rows = () if self.level is None else (self.level,)

    def weights(self) -> Tensor:
        return _weigh(self.normalizer, self.scores, self.level).detach()

    def where(self, place: tuple[int, ...]) -> str:
        """The score at a place, and the level, as messages print them."""
        score = f"score {number(self.scores[place].item())}"
        return score if self.level is None else f"{score} and level {number(self.level[(*place[:3], 0)].item())}"

    def compare(self, method: str, got: object, want: Tensor, expected: str) -> None:
        """Fail unless a shortcut gives the numbers that it replaces."""
        result = check_returned(self.normalizer, method, got, want.shape, want.dtype, f"{tuple(want.shape)} numbers")
        close = CLOSE * want.abs().clamp(min=1)
        same(self.normalizer, method, "", result, want, close, expected=expected, where=self.where)


def _check_tiles(normalizer: Pointwise | SumToOne, heads: int) -> None:
    """Weights of a tile equal those of the whole matrix, and no weight depends on another score."""
    size, scores = Size(2, heads, 1, 5, 7), 2 * normal(2, heads, 5, 7, seed=1)
    level = normal(2, heads, 5, 1, seed=2) if isinstance(normalizer, SumToOne) else None

    def weights(some: Tensor, region: Region) -> Tensor:
        return _weigh(normalizer, some, None if level is None else level[region.batch, :, region.rows])

    alone = "its own score alone" if level is None else "its own score and the level of its row alone"
    whole = check_alone(normalizer, "weight", weights, scores, size, rule=f"a weight may depend on {alone}")
    if not normalizer.by_head:
        rows = () if level is None else (level[:, -1],)
        with calling(normalizer, "weight", "called for one head, because by_head is False"):
            made = normalizer.weight(scores[:, -1], *rows)
        rounding = ROUNDINGS * torch.finfo(torch.float64).eps
        same(normalizer, "by_head", "is False, but for the last head alone ", made, whole[:, -1], rounding)


def _check_derivatives(points: _Points) -> Tensor:
    """Derivatives of `weight` by autograd agree with finite differences. Returns the derivative in the scores."""
    normalizer, scores, level = points.normalizer, points.scores, points.level
    arguments = {"score": scores.clone().requires_grad_()}
    if level is not None:
        arguments["level"] = level.expand_as(scores).clone().requires_grad_()
    made = _weigh(normalizer, *arguments.values())
    single = [x.float() for x in (scores, *points.rows)]
    for x in (made, _weigh(converted(normalizer, torch.float32), *single)):
        what = f"in {x.dtype} a weight "
        forbid(normalizer, "weight", ~x.isfinite(), x, "a finite number", what=what, where=points.where)
    derivatives = {}
    for name, x in arguments.items():
        slope = None
        if made.requires_grad:
            with calling(normalizer, "weight", f"differentiated in the {name}"):
                (slope,) = torch.autograd.grad(made.sum(), x, allow_unused=True, retain_graph=True)
        derivatives[name] = torch.zeros_like(x) if slope is None else slope.detach()
        step = torch.minimum(1e-5 * x.detach().abs().clamp(min=1), 1e-3 * x.detach().abs())  # kinks are at 0
        ends = []
        for sign in (1, -1):
            moved = {other: y.detach() + (sign * step if other == name else 0) for other, y in arguments.items()}
            ends.append(_weigh(normalizer, *moved.values()).detach())
        want = (ends[0] - ends[1]) / (2 * step)
        close, what = 1e-4 * (want.abs() + made.detach().abs()) + 1e-8, f"its derivative in the {name} by autograd: "
        expected = " by finite differences"
        same(normalizer, "weight", what, derivatives[name], want, close, expected=expected, where=points.where)
    return derivatives["score"]


def _check_shortcuts(points: _Points, slope: Tensor) -> None:
    """`weight_`, `slope_from_weights` and `zero_at_minus_infinity`; `slope` are the derivatives at the points."""
    normalizer, scores, level = points.normalizer, points.scores, points.level
    base = Pointwise if isinstance(normalizer, Pointwise) else SumToOne
    weights = points.weights()
    if overrides(normalizer, base, "weight_"):
        with torch.no_grad(), calling(normalizer, "weight_", "called"):
            points.compare("weight_", normalizer.weight_(scores.clone(), *points.rows), weights, ", as weight returns")
    if overrides(normalizer, base, "slope_from_weights"):
        if level is not None:
            moved = _weigh(normalizer, scores + 0.37, level + 0.37).detach()
            same(
                normalizer, "slope_from_weights", "needs a weight of score − level alone, but with both 0.37 larger ",
                moved, weights, CLOSE * max(1.0, float(weights.abs().max())), where=points.where,
            )  # fmt: skip
        with torch.no_grad(), calling(normalizer, "slope_from_weights", "called"):
            made = normalizer.slope_from_weights(weights.clone())
            points.compare("slope_from_weights", made, slope, ", the derivative of weight")
    if normalizer.zero_at_minus_infinity:
        lowest = _each(points.heads, -torch.inf).requires_grad_()
        made = _weigh(normalizer, lowest, None if level is None else level[:, :, :1])
        derivative = torch.autograd.grad(made.sum(), lowest, allow_unused=True)[0] if made.requires_grad else None
        for name, x in (("weight", made), ("derivative of weight", derivative)):
            if x is not None:
                what = f"is True, but the {name} at a score of −inf "
                forbid(normalizer, "zero_at_minus_infinity", x != 0, x, "0", what=what)


def _check_pointwise(points: _Points, slope: Tensor) -> None:
    """What only `Pointwise` has: `is_identity`, `nonnegative`, `log_weight`, `slope_of_log` and `shift`."""
    normalizer, scores, weights = points.normalizer, points.scores, points.weights()
    assert isinstance(normalizer, Pointwise)
    if normalizer.has_lse:
        fail(normalizer, "has_lse", "is True, but the weights of a Pointwise have no log-sum-exp, expected False")
    if normalizer.is_identity:
        points.compare("weight", weights, scores, ", the score itself, because is_identity is True")
    logarithm = overrides(normalizer, Pointwise, "log_weight")
    for method, claimed in (("nonnegative", normalizer.nonnegative), ("log_weight", logarithm)):
        if claimed:
            wrong, what = weights < 0, "does not hold: the weight "
            forbid(normalizer, method, wrong, weights, "0 or more", what=what, where=points.where)
    some = (weights > 1e-300).all(2).all(1)[0]
    at = _Points(normalizer, points.heads, *scores[0, 0, 0, some].tolist())
    weights, slope = weights[..., some], slope[..., some]
    for method, want, what in (
        ("log_weight", weights.clamp(min=1e-300).log(), ", the logarithm of weight"),
        ("slope_of_log", slope / weights, ", the derivative of the logarithm of weight"),
    ):
        if overrides(normalizer, Pointwise, method):
            with torch.no_grad(), calling(normalizer, method, "called"):
                at.compare(method, getattr(normalizer, method)(at.scores.clone()), want, what)
    if overrides(normalizer, Pointwise, "shift"):
        shape = (2, points.heads, 5)
        for dtype in (torch.float64, torch.float32):
            visible = torch.arange(1, 6, dtype=dtype).expand(shape)
            with calling(normalizer, "shift", "called"):
                made = normalizer.shift(lambda visible=visible: visible, torch.empty(0, dtype=dtype))  # type: ignore[misc]
            if made is None or (
                made.ndim == 3 and made.dtype == dtype and torch.broadcast_shapes(made.shape, shape) == shape
            ):
                continue
            fail(normalizer, "shift", f"returned {shape_of(made)}, expected {dtype} that broadcasts to (batch, heads, "
                 f"queries) = {shape}")  # fmt: skip


def _check_levels(normalizer: SumToOne, heads: int) -> None:
    """Weights are not negative, decrease in the level, and can sum to one, for one visible key and for many."""
    points = _Points(normalizer, heads, *SCORES)
    weights = points.weights()
    wrong = weights.isnan() | (weights < 0)
    forbid(normalizer, "weight", wrong, weights, "0 or more", where=points.where)
    rises = torch.zeros_like(wrong)
    rises[:, :, 1:] = weights[:, :, 1:] > weights[:, :, :-1] * (1 + 1e-12) + 1e-300
    smaller = "a smaller one than at the next lower level"
    forbid(normalizer, "weight", rises, weights, smaller, what="rises with the level: ", where=points.where)
    flat = (weights[:, :, 0] == weights[:, :, -1]).all(-1)
    if bool(flat.any()):
        fail(normalizer, "weight", f"is the same at level {number(LEVELS[0])} and at level {number(LEVELS[-1])} for "
             "all scores of a head, expected a weight that decreases in the level")  # fmt: skip
    for keys in (1, 2, 200):
        with calling(normalizer, "weight", f"called to find the level of rows of {keys} scores"):
            solve(normalizer, 2 * normal(1, heads, 3, keys, seed=keys))


def _check_level_of(points: _Points) -> None:
    """`level_of` gives the level at which weights sum to one, and 0 for rows of −inf; `has_lse` implies exp."""
    normalizer, heads, level = points.normalizer, points.heads, points.level
    assert isinstance(normalizer, SumToOne)
    assert level is not None
    if normalizer.has_lse:
        made, want = points.weights(), torch.exp(points.scores - level)
        what, expected = "is True, but the weight: ", ", because it means that the weight is exp(score − level)"
        same(normalizer, "has_lse", what, made, want, CLOSE * want, expected=expected, where=points.where)
    if not overrides(normalizer, SumToOne, "level_of"):
        return
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        for keys in (1, 9, 300):
            scores = (2 * normal(2, heads, 5, keys, seed=keys)).to(dtype)
            scores[:, :, 1] = -torch.inf
            scores[:, :, 2, keys // 2 + 1 :] = -torch.inf
            with torch.no_grad(), calling(normalizer, "level_of", f"called for rows of {keys} scores"):
                result = normalizer.level_of(scores.clone())
            level = check_returned(normalizer, "level_of", result, scores.shape[:-1], dtype, f"rows of {keys} {dtype}")
            empty = level[:, :, 1]
            forbid(normalizer, "level_of", empty != 0, empty, "0", what="for a row of −inf alone ")
            row, shown = level[..., None], scores != -torch.inf
            weights = torch.where(shown, _weigh(normalizer, torch.where(shown, scores, row), row), 0.0)
            what = f"for a row of {keys} scores in {dtype}, the weights sum to another number at the level: "
            same(normalizer, "level_of", what, weights.sum(-1), shown.any(-1).to(dtype), tolerance)


def _check_attend(normalizer: Pointwise | SumToOne, heads: int, sizes: Sizes | None, batch: int) -> None:
    key = normalizer.key if isinstance(normalizer, SumToOne) else None
    dim = 8 if key is None else key.shape[1]
    chosen_sizes = sizes_of(sizes, SIZES, batch, heads, key_heads_of(heads), dim=dim, dim_k=dim)
    first = chosen_sizes[0]
    more = [masked(c, first)[2 - index % 2] for index, c in enumerate(_variants(normalizer, first))]
    check_attend(Composition("normalizer", normalizer=normalizer), chosen_sizes, more)


def _variants(normalizer: Pointwise | SumToOne, size: Size) -> list[Composition]:
    """The normalizer with another temperature and, for `SumToOne`, with sinks and a learned key."""
    made = [("temperature 0.7 times its own", normalizer.with_temperature(0.7 * normalizer.temperature))]
    if isinstance(normalizer, SumToOne) and not normalizer.one_key:
        sink = normal(size.heads, seed=4).requires_grad_()
        each = normal(size.batch, size.heads, size.queries, seed=5)
        key = normal(size.heads, size.dim, seed=6).requires_grad_()
        made += [
            ("a sink for each head", normalizer.with_sink(sink)),
            ("a sink for each query", normalizer.with_sink(each)),
            ("a learned key", normalizer.with_sink(None, key)),
        ]
    return [Composition("normalizer", normalizer=one, label=f"with {label}") for label, one in made]
