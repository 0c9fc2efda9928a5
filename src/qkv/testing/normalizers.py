"""`check_normalizer`: the weights of a normalizer, their derivatives, and its level."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv._contract import overrides
from qkv.normalizers import Normalizer, Pointwise, SumToOne
from qkv.testing.agreement import check_attend, masked
from qkv.testing.definition import Composition, bisect, weigh
from qkv.testing.inputs import (
    SIZES,
    CheckFailed,
    Size,
    Sizes,
    calling,
    check_returned,
    converted,
    difference,
    fail,
    key_heads_of,
    normal,
    number,
    parts,
    shape_of,
    sizes_of,
)

SCORES = (-79.3, -30.9, -12.7, -5.11, -2.07, -1.03, -0.31, -1.1e-3, -1.3e-6, 1.3e-6, 1.1e-3, 0.31, 1.03, 2.07, 5.11,
          12.7, 30.9, 79.3)  # fmt: skip
LEVELS = (-61.7, -17.3, -6.13, -2.61, -0.83, -0.017, 0.23, 0.71, 1.57, 3.37, 9.41, 37.9, 83.1)
NEAR = (-8.3, -3.1, -1.7, -0.61, -0.041, 0.037, 0.47, 1.13, 2.9, 7.7)  # score − level
ROUNDING = 1e-12  # tolerance for the same function of the same float64 number
CLOSE = 1e-9  # tolerance for shortcuts in float64, relative to 1 or to the number, whichever is larger


def points(normalizer: Normalizer, heads: int) -> tuple[Tensor, Tensor | None]:
    """Scores, (1, heads, rows, n): negative, about 0 and large; for `SumToOne` about the level of each row."""
    if isinstance(normalizer, Pointwise):
        return each(heads, *SCORES), None
    level = levels(heads)
    return level + each(heads, *NEAR), level


def each(heads: int, *numbers: float) -> Tensor:
    """Numbers, (1, heads, 1, n)."""
    return torch.tensor(numbers, dtype=torch.float64).expand(1, heads, 1, -1).contiguous()


def levels(heads: int) -> Tensor:
    """A level for each row, (1, heads, rows, 1)."""
    return each(heads, *LEVELS).transpose(2, 3).contiguous()


def at(scores: Tensor, level: Tensor | None, place: tuple[int, ...]) -> str:
    """The score at a place, and the level, as messages print them."""
    score = f"score {number(scores[place].item())}"
    return score if level is None else f"{score} and level {number(level[(*place[:3], 0)].item())}"


def size_of(x: Tensor) -> float:
    return max(1.0, float(x.detach().abs().max()))


def first(wrong: Tensor) -> tuple[int, ...]:
    """The first place that is True."""
    return tuple(int(i) for i in wrong.nonzero()[0])


# --- each weight alone ------------------------------------------------------------------------------------------------


def _call(normalizer: Normalizer, heads: int) -> tuple[Size, Tensor, Tensor | None]:
    """Scores of a small call, and levels of its rows for `SumToOne`."""
    scores = 2 * normal(2, heads, 5, 7, seed=1)
    level = normal(2, heads, 5, 1, seed=2) if isinstance(normalizer, SumToOne) else None
    return Size(2, heads, 1, 5, 7), scores, level


def check_tiles(normalizer: Pointwise | SumToOne, heads: int) -> None:
    """Weights of a tile equal those of the whole matrix, and no weight depends on another score."""
    size, scores, level = _call(normalizer, heads)
    kept = scores.clone()
    whole = weigh(normalizer, scores, level).detach()
    if not torch.equal(scores, kept):
        fail(normalizer, "weight", "changed its scores in place, expected a new tensor")
    rounding = ROUNDING * size_of(whole)
    alone = "its own score alone" if level is None else "its own score and the level of its row alone"
    for name, region in parts(size):
        row = None if level is None else level[region.batch, :, region.rows]
        wrong = difference(weigh(normalizer, region.of(scores).clone(), row), region.of(whole), rounding)
        if wrong is not None:
            fail(normalizer, "weight", f"depends on the tile: {wrong} from the whole matrix, in a tile of {name}; a "
                 f"weight may depend on {alone}")  # fmt: skip
    for place, change in (((0, 0, 2, 3), 3.7), ((1, heads - 1, 4, 0), torch.nan)):
        changed = scores.clone()
        changed[place] += change
        after = weigh(normalizer, changed, level).detach().clone()
        after[place] = whole[place]
        if (wrong := difference(after, whole, rounding)) is not None:
            fail(
                normalizer, "weight", f"the weight at {wrong.place} changes from {number(wrong.want)} to "
                f"{number(wrong.got)} when the score at {place} becomes {number(changed[place].item())}; a weight may "
                f"depend on {alone}"
            )  # fmt: skip
    if not normalizer.by_head:
        for head in range(heads):
            rows = () if level is None else (level[:, head],)
            with calling(normalizer, "weight", "called for one head, because by_head is False"):
                made = normalizer.weight(scores[:, head], *rows)
            if (wrong := difference(made, whole[:, head], rounding)) is not None:
                fail(normalizer, "by_head", f"is False, but the weights of head {head} alone differ: {wrong}")


# --- derivatives ------------------------------------------------------------------------------------------------------


def check_finite(normalizer: Normalizer, made: Tensor, scores: Tensor, level: Tensor | None) -> None:
    if not bool(made.isfinite().all()):
        place = first(~made.isfinite())
        fail(
            normalizer, "weight", f"is {number(made[place].item())} in {made.dtype} at "
            f"{at(scores, level, place)}, expected a finite number"
        )  # fmt: skip


def check_derivatives(normalizer: Normalizer, heads: int) -> Tensor:
    """Derivatives of `weight` by autograd agree with finite differences. Returns the derivative in the scores."""
    scores, level = points(normalizer, heads)
    single = converted(normalizer, torch.float32)
    check_finite(single, weigh(single, scores.float(), None if level is None else level.float()), scores, level)
    arguments = {"score": scores.clone().requires_grad_()}
    if level is not None:
        arguments["level"] = level.expand_as(scores).clone().requires_grad_()
    made = weigh(normalizer, arguments["score"], arguments.get("level"))
    check_finite(normalizer, made, scores, level)
    derivatives = {}
    for name, x in arguments.items():
        derivatives[name] = torch.zeros_like(x)
        if made.requires_grad:
            with calling(normalizer, "weight", f"differentiated in the {name}"):
                (slope,) = torch.autograd.grad(made.sum(), x, allow_unused=True, retain_graph=True)
            derivatives[name] = derivatives[name] if slope is None else slope
        step = torch.minimum(1e-5 * x.detach().abs().clamp(min=1), 1e-3 * x.detach().abs())  # kinks are at 0
        ends = []
        for sign in (1, -1):
            moved = {other: y.detach() + (sign * step if other == name else 0) for other, y in arguments.items()}
            ends.append(weigh(normalizer, moved["score"], moved.get("level")).detach())
        want = (ends[0] - ends[1]) / (2 * step)
        size = 1e-4 * (want.abs() + made.detach().abs()) + 1e-8
        if (wrong := difference(derivatives[name] / size, want / size, 1.0)) is not None:
            place = wrong.place
            fail(
                normalizer, "weight", f"its derivative in the {name} by autograd is "
                f"{number(derivatives[name][place].item())} at {at(scores, level, place)}, expected "
                f"{number(want[place].item())} by finite differences"
            )  # fmt: skip
    return derivatives["score"].detach()


# --- shortcuts --------------------------------------------------------------------------------------------------------


def compare(
    normalizer: Normalizer, method: str, got: object, want: Tensor, scores: Tensor, level: Tensor | None, what: str
) -> None:
    """Compare the result of a shortcut with the value that it replaces."""
    made = check_returned(normalizer, method, got, want.shape, want.dtype, f"{tuple(want.shape)} numbers")
    size = want.abs().clamp(min=1)
    if (wrong := difference(made.detach() / size, want / size, CLOSE)) is not None:
        place = wrong.place
        fail(
            normalizer, method, f"got {number(made[place].item())} at {at(scores, level, place)}, expected "
            f"{number(want[place].item())}, {what}"
        )  # fmt: skip


def check_shortcuts(normalizer: Pointwise | SumToOne, heads: int, slope: Tensor) -> None:
    """`weight_`, `slope_from_weights` and `zero_at_minus_infinity`; `slope` are the derivatives at `points`."""
    base = Pointwise if isinstance(normalizer, Pointwise) else SumToOne
    scores, level = points(normalizer, heads)
    rows = () if level is None else (level,)
    weights = weigh(normalizer, scores, level).detach()
    if overrides(normalizer, base, "weight_"):
        with torch.no_grad(), calling(normalizer, "weight_", "called"):
            made = normalizer.weight_(scores.clone(), *rows)
        compare(normalizer, "weight_", made, weights, scores, level, "which weight returns")
    if overrides(normalizer, base, "slope_from_weights"):
        if level is not None:
            moved = weigh(normalizer, scores + 0.37, level + 0.37).detach()
            if (wrong := difference(moved, weights, CLOSE * size_of(weights))) is not None:
                fail(
                    normalizer, "slope_from_weights", "is defined, but the weight depends on more than score − level: "
                    f"at {at(scores, level, wrong.place)} it is {number(wrong.want)}, and with both 0.37 larger "
                    f"{number(wrong.got)}"
                )  # fmt: skip
        with torch.no_grad(), calling(normalizer, "slope_from_weights", "called"):
            made = normalizer.slope_from_weights(weights.clone())
        compare(normalizer, "slope_from_weights", made, slope, scores, level, "the derivative of weight")
    if normalizer.zero_at_minus_infinity:
        lowest = each(heads, -torch.inf).requires_grad_()
        made = weigh(normalizer, lowest, None if level is None else level[:, :, :1])
        derivative = torch.autograd.grad(made.sum(), lowest, allow_unused=True)[0] if made.requires_grad else None
        for name, x in (("weight", made), ("derivative of weight", derivative)):
            if x is not None and bool((x != 0).any()):
                fail(normalizer, "zero_at_minus_infinity", f"is True, but the {name} at a score of −inf is "
                     f"{number(x[first(x != 0)].item())}, expected 0")  # fmt: skip


def check_pointwise(normalizer: Pointwise, heads: int, slope: Tensor) -> None:
    """What only `Pointwise` has: `is_identity`, `nonnegative`, `log_weight`, `slope_of_log` and `shift`."""
    if normalizer.has_lse:
        fail(normalizer, "has_lse", "is True, but the weights of a Pointwise have no log-sum-exp, expected False")
    scores, _ = points(normalizer, heads)
    weights = weigh(normalizer, scores).detach()
    if normalizer.is_identity:
        compare(normalizer, "weight", weights, scores, scores, None, "the score itself, because is_identity is True")
    if normalizer.nonnegative and bool((weights < 0).any()):
        place = first(weights < 0)
        fail(
            normalizer, "nonnegative", f"is True, but the weight at {at(scores, None, place)} is "
            f"{number(weights[place].item())}"
        )  # fmt: skip
    if overrides(normalizer, Pointwise, "log_weight") and bool((weights < 0).any()):
        place = first(weights < 0)
        fail(
            normalizer, "log_weight", f"is defined, but the weight at {at(scores, None, place)} is "
            f"{number(weights[place].item())}, which has no logarithm"
        )  # fmt: skip
    some = (weights > 1e-300).all(2).all(1)[0]
    scores, weights, slope = scores[..., some], weights[..., some], slope[..., some]
    for method, want, what in (
        ("log_weight", weights.clamp(min=1e-300).log(), "the logarithm of weight"),
        ("slope_of_log", slope / weights, "the derivative of the logarithm of weight"),
    ):
        if overrides(normalizer, Pointwise, method):
            with torch.no_grad(), calling(normalizer, method, "called"):
                made = getattr(normalizer, method)(scores.clone())
            compare(normalizer, method, made, want, scores, None, what)
    if overrides(normalizer, Pointwise, "shift"):
        _check_shift(normalizer, heads)


def _check_shift(normalizer: Pointwise, heads: int) -> None:
    shape = (2, heads, 5)
    for dtype in (torch.float64, torch.float32):
        visible = torch.arange(1, 6, dtype=dtype).expand(shape)
        with calling(normalizer, "shift", "called"):
            made = normalizer.shift(lambda visible=visible: visible, torch.empty(0, dtype=dtype))  # type: ignore[misc]
        if made is None:
            continue
        if (
            made.ndim != 3
            or made.dtype != dtype
            or any(x not in (1, y) for x, y in zip(made.shape, shape, strict=True))
        ):
            fail(normalizer, "shift", f"returned {made.dtype} of shape {tuple(made.shape)}, expected {dtype} that "
                 f"broadcasts to (batch, heads, queries) = {shape}")  # fmt: skip


def check_levels(normalizer: SumToOne, heads: int) -> None:
    """Weights are not negative, decrease in the level, and can sum to one, for one visible key and for many."""
    level = levels(heads)
    scores = each(heads, *SCORES).expand(-1, -1, len(LEVELS), -1).contiguous()
    weights = weigh(normalizer, scores, level).detach()
    wrong = weights.isnan() | (weights < 0)
    if bool(wrong.any()):
        place = first(wrong)
        fail(
            normalizer,
            "weight",
            f"is {number(weights[place].item())} at {at(scores, level, place)}, expected 0 or more",
        )
    before, after = weights[:, :, :-1], weights[:, :, 1:]
    rises = after > before * (1 + 1e-12) + 1e-300
    if bool(rises.any()):
        place = first(rises)
        row, column = place[2:]
        fail(
            normalizer, "weight", f"rises from {number(before[place].item())} to {number(after[place].item())} at "
            f"score {number(SCORES[column])} as the level rises from {number(LEVELS[row])} to "
            f"{number(LEVELS[row + 1])}, expected a weight that decreases in the level"
        )  # fmt: skip
    flat = (weights[:, :, 0] == weights[:, :, -1]).all(-1)
    if bool(flat.any()):
        fail(
            normalizer, "weight", f"is the same at level {number(LEVELS[0])} and at level {number(LEVELS[-1])} for all "
            f"scores of head {first(flat)[1]}, expected a weight that decreases in the level"
        )  # fmt: skip
    for keys in (1, 2, 200):
        scores = 2 * normal(1, heads, 3, keys, seed=keys)
        bisect(normalizer, scores, torch.ones_like(scores, dtype=torch.bool))


def check_level_of(normalizer: SumToOne, heads: int) -> None:
    """`level_of` gives the level at which weights sum to one, and 0 for rows of −inf; `has_lse` implies exp."""
    if normalizer.has_lse:
        scores, level = points(normalizer, heads)
        assert level is not None
        made, want = weigh(normalizer, scores, level).detach(), torch.exp(scores - level)
        if (wrong := difference(made / want, torch.ones_like(want), 1e-9)) is not None:
            place = wrong.place
            fail(
                normalizer, "has_lse", "is True, which means that the weight is exp(score − level), but it is "
                f"{number(made[place].item())} at {at(scores, level, place)}, expected {number(want[place].item())}"
            )  # fmt: skip
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
            if bool((level[:, :, 1] != 0).any()):
                fail(
                    normalizer, "level_of", f"got {number(level[0, 0, 1].item())} for a row of −inf alone, "
                    "expected 0"
                )  # fmt: skip
            row, shown = level[..., None], scores != -torch.inf
            weights = torch.where(shown, weigh(normalizer, torch.where(shown, scores, row), row), 0.0)
            total = weights.detach().sum(-1)
            if (wrong := difference(total, shown.any(-1).to(dtype), tolerance)) is not None:
                fail(
                    normalizer, "level_of", f"got {number(level[wrong.place].item())} for a row of {keys} scores in "
                    f"{dtype}, at which the weights sum to {number(wrong.got)}, expected a sum of {number(wrong.want)}"
                )  # fmt: skip


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
    check_tiles(exact, heads)
    if isinstance(exact, SumToOne):
        check_levels(exact, heads)
    slope = check_derivatives(exact, heads)
    check_shortcuts(exact, heads, slope)
    if isinstance(exact, SumToOne):
        check_level_of(exact, heads)
    else:
        check_pointwise(exact, heads, slope)
    _check_attend(normalizer, heads, sizes, batch)


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
