"""`check_bias`, `check_score` and `check_normalizer`: objects whose methods are functions of scores or of tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from qkv._contract import overrides
from qkv.biases import AdditiveBias, Bias
from qkv.engine import search_level
from qkv.errors import kind_of
from qkv.masks import Region
from qkv.normalizers import Identity, Normalizer, Pointwise, Sigmoid, Softmax, SumToOne
from qkv.scores import Pairwise, Product, Score
from qkv.testing.laws import (
    EPS,
    ROUNDINGS,
    SIZES,
    Composition,
    Size,
    Sizes,
    calling,
    check_alone,
    check_attend,
    check_class,
    check_returned,
    converted,
    fail,
    forbid,
    key_heads_of,
    largest,
    masked,
    method_of,
    normal,
    number,
    parts,
    same,
    sizes_of,
    triple,
    without_writing,
)


def check_bias(
    bias: Bias, *, heads: int = 4, dim: int = 8, dim_v: int = 6, sizes: Sizes | None = None, batch: int = 2
) -> None:
    """Check that a bias fulfils the contract of its base class; for use in your own tests.

    It checks: what ``apply`` or ``tile`` returns; that each score is a function of itself and its position only, so
    that tiles do not change scores; the shortcuts ``at``, ``part``, ``position_free``
    and ``by_head``; output, weights and gradients of `attend` on every kernel against a dense definition in float64,
    with masks and queries without visible keys; finite differences; bfloat16 and float16; NaN in masked keys;
    `measure`; pickle and copy.deepcopy.

    Args:
        bias: the object. The parameters of modules in it are converted to each dtype that is checked.
        heads: number of query heads.
        dim: dimension of queries and keys.
        dim_v: dimension of values.
        sizes: pairs (queries, keys), for an object that fits only some sizes, such as ``Dense``; as in
            `check_normalizer`.
        batch: number of batch items; the largest sizes of the default have one.

    Raises:
        CheckFailed: an `AssertionError` whose message says in one sentence what is wrong, and where.

    >>> from qkv.biases import Bias, SoftCap
    >>> check_bias(SoftCap(2.0), sizes=[(5, 7)])
    >>> class Centred(Bias):
    ...     def apply(self, scores, region):
    ...         return scores - scores.mean(-1, keepdim=True)
    >>> try:
    ...     check_bias(Centred(), sizes=[(5, 7)])
    ... except AssertionError as error:
    ...     print(str(error).split(": in")[0])
    Centred.apply: depends on the tile
    """
    check_class("check_bias", bias, Bias, "qkv.biases.Bias or from AdditiveBias")
    chosen_sizes = sizes_of(sizes, SIZES, batch, heads, key_heads_of(heads), dim=dim, dim_k=dim, dim_v=dim_v)
    exact, first = converted(bias, torch.float64), chosen_sizes[0]
    q, _, _ = triple(first, torch.float64)
    with calling(bias, method_of(bias), "checked"):
        for size in chosen_sizes:
            bias.check(size.grid)
        bound = exact.bind(q, first.grid, 0.5)
        if not isinstance(bound, Bias):
            fail(bias, "bind", f"returned {type(bound).__name__}, expected a bias")
        bound.require()
    eps = _check_scores(exact, bound, first, q)
    plain = Composition(subject="bias", bias=bias, normalizer=Softmax(0.7), eps=eps)
    sigmoid = replace(plain, normalizer=Sigmoid(-1.0), label="normalizer Sigmoid")
    check_attend(plain, chosen_sizes, [masked(sigmoid, first)[1]])


def _apply(bias: Bias, scores: Tensor, region: Region) -> Tensor:
    """The scores of a region after a bias, checked."""
    with calling(bias, method_of(bias), f"called for scores of shape {tuple(scores.shape)}"):
        result = bias.apply(scores, region)
    return check_returned(bias, method_of(bias), result, scores.shape, scores.dtype, f"scores of {scores.dtype}")


def _check_scores(bias: Bias, bound: Bias, size: Size, q: Tensor) -> float:
    """Each score is a function of itself and its position, and shortcuts agree; the precision of what was added."""
    whole, before = size.whole, 2 * normal(size.batch, size.heads, size.queries, size.keys, seed=1)
    eps, method = torch.finfo(torch.float64).eps, method_of(bound)
    if isinstance(bound, AdditiveBias):
        with calling(bound, "tile", "called"):
            eps = torch.finfo(bound.added(whole).dtype).eps
    rule = "a score must be a function of itself and its position only"
    after = check_alone(bias, method, lambda x, region: _apply(bound, x, region), before, size, eps, rule=rule)
    forbid(bias, method, after.isnan() | (after == torch.inf), after, "a number or −inf", what="a score ")
    rounding, gives = ROUNDINGS * eps * largest(after), f", the score that {method} gives"

    def agree(name: str, got: Tensor, want: Tensor = after, what: str = "") -> None:
        same(bound, name, what, got, want, rounding, expected=gives)

    if not bound.by_head:
        one = replace(whole, heads=slice(size.heads - 1, size.heads))
        agree("by_head", _apply(bound, one.of(before), one), one.of(after), "is False, but for the last head alone ")
    if not bias.depends_on_query:
        other = _apply(bias.bind(3 * q, size.grid, 0.5), before, whole)
        agree("depends_on_query", other, what="is False, but with other q ")
    if bound.position_free:
        moved = replace(whole, offset=whole.offset + 3, rows=slice(2, size.queries + 2))
        agree("position_free", _apply(bound, before, moved), what="is True, but elsewhere ")
    if overrides(bound, Bias, "at"):
        indices = torch.meshgrid(*(torch.arange(n) for n in before.shape), indexing="ij")
        with calling(bound, "at", "called"):
            agree("at", bound.at(before.clone(), *indices))
    for name, region in parts(size) if overrides(bound, Bias, "part") else ():
        with calling(bound, "part", "called"):
            part = bound.part(region)
        some = region.of(before)
        moved = Region(slice(0, some.shape[2]), slice(0, some.shape[3]))
        agree("part", _apply(part, some, moved), region.of(after), f"of a tile of {name}: ")
    return float(eps)


def check_score(
    score: Score,
    *,
    heads: int = 4,
    key_heads: int = 2,
    dim: int = 8,
    dim_k: int | None = None,
    sizes: Sizes | None = None,
    batch: int = 2,
) -> None:
    """Check that a score fulfils the contract of its base class; for use in your own tests.

    It checks: what ``project`` and ``scores`` return; that ``project`` treats each token independently, and a pairwise
    score depends on its query and key only, so that tiles do not change scores; ``rotation_invariant``
    and ``by_head``; output, weights and gradients of `attend` on every kernel against a dense definition in float64,
    with masks, queries without visible keys and learned keys; finite differences; bfloat16 and float16; NaN in masked
    keys; `measure`; pickle and copy.deepcopy.

    Args:
        score: the object. The parameters of modules in it are converted to each dtype that is checked.
        heads: number of query heads.
        key_heads: number of key heads, which divides `heads`.
        dim: dimension of queries.
        dim_k: dimension of keys; `dim` if None.
        sizes: pairs (queries, keys), for an object that fits only some sizes; as in `check_normalizer`.
        batch: number of batch items; the largest sizes of the default have one.

    Raises:
        CheckFailed: an `AssertionError` whose message says in one sentence what is wrong, and where.

    >>> from qkv.scores import Cosine, Product
    >>> check_score(Cosine(), sizes=[(5, 7)])
    >>> class Centred(Product):
    ...     def project(self, q, k):
    ...         return q, k - k.mean(2, keepdim=True)
    >>> try:
    ...     check_score(Centred(), sizes=[(5, 7)])
    ... except AssertionError as error:
    ...     print(str(error).split(":")[0], "mixes tokens" in str(error))
    Centred.project True
    """
    check_class("check_score", score, (Product, Pairwise), "qkv.scores.Product or from Pairwise")
    with calling(score, method_of(score), "checked"):
        score.check()
    computed = sizes_of(sizes, SIZES, batch, heads, key_heads, dim=dim, dim_k=dim if dim_k is None else dim_k)
    exact, first = converted(score, torch.float64), computed[0]
    with calling(score, "factor", f"called with {first.dim}"):
        factor = score.factor(first.dim)
    if not isinstance(factor, int | float) or not math.isfinite(factor):
        fail(score, "factor", f"returned {factor!r}, expected a finite number")
    q, k = _check_tokens(exact, first)
    if isinstance(exact, Pairwise):
        _check_pairs(exact, q, k, first)
    if exact.rotation_invariant:
        _check_rotation(exact, first)
    plain, key = Composition(subject="score", score=score), normal(first.heads, first.dim_k, seed=6).requires_grad_()
    linear = replace(plain, normalizer=Identity("keys"), label="normalizer Identity")
    learned = replace(plain, normalizer=Softmax(0.7, key=key), label="a learned key in the normalizer")
    check_attend(plain, computed, [learned, masked(linear, first)[2]])


def _project(score: Score, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """`project`, with a check of its result."""
    shapes = f"q {tuple(q.shape)} and k {tuple(k.shape)}"
    with calling(score, "project", f"called with {shapes}, {q.dtype}"):
        result = score.project(q, k)
    if not isinstance(result, tuple) or len(result) != 2:
        fail(score, "project", f"returned {kind_of(result)}, expected two tensors: queries and keys")
    for name, x, of in (("queries", result[0], q), ("keys", result[1], k)):
        size = x.shape[3] if isinstance(x, Tensor) and x.ndim == 4 else of.shape[3]
        check_returned(score, "project", x, (*of.shape[:3], size), of.dtype, f"the {name} of {shapes}, {of.dtype}")
    if not isinstance(score, Pairwise) and result[0].shape[3] != result[1].shape[3]:
        widths = f"queries of {result[0].shape[3]} entries and keys of {result[1].shape[3]}"
        fail(score, "project", f"returned {widths} for {shapes}, expected as many")
    return result


def _scores(score: Pairwise, q: Tensor, k: Tensor) -> Tensor:
    """`scores`, with a check of its result."""
    shapes = f"q {tuple(q.shape)} and k {tuple(k.shape)}"
    with calling(score, "scores", f"called with {shapes}"):
        result = score.scores(q, k)
    return check_returned(score, "scores", result, (*q.shape[:3], k.shape[2]), q.dtype, f"{shapes}, {q.dtype}")


CHANGES = ((0, "query", 1.7), (1, "key", 1.7), (0, "query", torch.nan), (1, "key", torch.nan))


def _check_tokens(score: Score, size: Size) -> tuple[Tensor, Tensor]:
    """`project` treats each token of each batch item alone. Returns projected queries and keys, of each query head."""
    q, k, _ = triple(size, torch.float64)
    whole = [x.detach() for x in without_writing(score, "project", lambda q, k: _project(score, q, k), q, k)]
    rule = "each token must be projected independently"
    for changed, name, change in CHANGES:
        tensors = [q.clone(), k.clone()]
        token = tensors[changed].shape[2] // 2
        tensors[changed][0, :, token] += change
        after = [x.detach().clone() for x in _project(score, *tensors)]
        after[changed][0, :, token] = whole[changed][0, :, token]
        for got, want, other in zip(after, whole, ("query", "key"), strict=True):
            what = f"mixes tokens: when {name} {token} becomes another, entries of the {other}: "
            same(score, "project", what, got, want, ROUNDINGS * EPS * largest(want), expected=f" as before; {rule}")
    some = slice(0, size.queries // 2 + 1), slice(size.keys // 2, None)
    for got, want, part, name in zip(
        _project(score, q[:, :, some[0]], k[:, :, some[1]]), whole, some, ("queries", "keys"), strict=True
    ):
        what, rounding = f"mixes tokens: for a part of the {name} ", ROUNDINGS * EPS * largest(want)
        same(score, "project", what, got, want[:, :, part], rounding, expected=f" as for all of them; {rule}")
    return whole[0], whole[1].repeat_interleave(size.heads // size.key_heads, 1)


def _check_pairs(score: Pairwise, q: Tensor, k: Tensor, size: Size) -> None:
    """Scores of a tile equal those of the whole matrix, a query or key changes only its own, and shortcuts agree."""
    whole = without_writing(score, "scores", lambda q, k: _scores(score, q, k), q, k).detach()
    rounding, rule = ROUNDINGS * EPS * largest(whole), "a score may depend on its own query and key alone"
    for name, region in parts(size):
        got = _scores(score, q[region.batch, :, region.rows], k[region.batch, :, region.columns])
        what = f"depends on the tile: in a tile of {name} "
        same(score, "scores", what, got, region.of(whole), rounding, expected=f" from the whole matrix; {rule}")
    for changed, name, change in CHANGES:
        tensors = [q.clone(), k.clone()]
        token = tensors[changed].shape[2] // 2
        tensors[changed][0, -1, token] += change
        after = _scores(score, *tensors).detach().clone()
        affected = (0, -1, token) if changed == 0 else (0, -1, slice(None), token)
        after[affected] = whole[affected]
        what = f"depends on another token: when {name} {token} becomes another "
        same(score, "scores", what, after, whole, rounding, expected=f" as before; {rule}")
    if not score.by_head:
        got = _scores(score, q[:, -1:], k[:, -1:])
        same(score, "by_head", "is False, but for the last head alone ", got, whole[:, -1:], rounding)


def _check_rotation(score: Score, size: Size) -> None:
    """Rotating query and key by the same rotation does not change the score."""
    if size.dim != size.dim_k:
        fail(score, "rotation_invariant", f"is True, but queries have {size.dim} entries and keys {size.dim_k}")
    q, k, _ = triple(size, torch.float64)
    turn, made = torch.linalg.qr(normal(size.dim, size.dim, seed=12))[0], []
    for tensors in ((q, k), (q @ turn, k @ turn)):
        queries, keys = _project(score, *tensors)
        keys = keys.repeat_interleave(size.heads // size.key_heads, 1)
        made.append((_scores(score, queries, keys) if isinstance(score, Pairwise) else queries @ keys.mT).detach())
    what = "is True, but with queries and keys rotated by the same rotation "
    same(score, "rotation_invariant", what, made[1], made[0], ROUNDINGS * EPS * largest(made[0]), expected=" as before")


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
    ...     def log_weight(self, scores):
    ...         return scores.log()
    >>> try:
    ...     check_normalizer(Square())
    ... except AssertionError as error:
    ...     print(error)
    Square.log_weight: got nan at score -79.3, expected 8.7464763, the logarithm of weight
    """
    check_class("check_normalizer", normalizer, (Pointwise, SumToOne), "qkv.normalizers.Pointwise or from SumToOne")
    with calling(normalizer, "weight", f"checked for {heads} heads"):
        normalizer.check(heads)
    exact = converted(normalizer, torch.float64)
    _check_weights(exact, heads)
    if isinstance(exact, SumToOne):
        _check_levels(exact, heads)
    points = _Points(exact, heads)
    _check_derivatives(points)
    if exact.zero_at_minus_infinity:
        _check_lowest(points)
    if isinstance(exact, SumToOne):
        _check_level_of(points)
    else:
        _check_pointwise(points)
    key = normalizer.key if isinstance(normalizer, SumToOne) else None
    dim = 8 if key is None else key.shape[1]
    computed = sizes_of(sizes, SIZES, batch, heads, key_heads_of(heads), dim=dim, dim_k=dim)
    more = [masked(c, computed[0])[2 - index % 2] for index, c in enumerate(_variants(normalizer, computed[0]))]
    check_attend(Composition(subject="normalizer", normalizer=normalizer), computed, more)


def _weigh(normalizer: Normalizer, scores: Tensor, level: Tensor | None = None, *, method: str = "weight") -> Tensor:
    """`weight` (or `term`) at scores (and the level of their rows), with a check of its result."""
    rows = () if level is None else (level,)
    with calling(normalizer, method, f"called for scores of shape {tuple(scores.shape)}"):
        result = getattr(normalizer, method)(scores, *rows)
    return check_returned(normalizer, method, result, scores.shape, scores.dtype, f"scores of {scores.dtype}")


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


def _check_weights(normalizer: Pointwise | SumToOne, heads: int) -> None:
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


def _check_derivatives(points: _Points) -> None:
    """Derivatives of `weight` by autograd agree with finite differences."""
    normalizer, scores, level = points.normalizer, points.scores, points.level
    arguments = {"score": scores.clone().requires_grad_()}
    if level is not None:
        arguments["level"] = level.expand_as(scores).clone().requires_grad_()
    made = _weigh(normalizer, *arguments.values())
    single = [x.float() for x in (scores, *points.rows)]
    for x in (made, _weigh(converted(normalizer, torch.float32), *single)):
        what = f"in {x.dtype} a weight "
        forbid(normalizer, "weight", ~x.isfinite(), x, "a finite number", what=what, where=points.where)
    for name, x in arguments.items():
        slope = torch.zeros_like(x)
        if made.requires_grad:
            with calling(normalizer, "weight", f"differentiated in the {name}"):
                (slope,) = torch.autograd.grad(made.sum(), x, retain_graph=True, materialize_grads=True)
        step = torch.minimum(1e-5 * x.detach().abs().clamp(min=1), 1e-3 * x.detach().abs())  # kinks are at 0
        ends = []
        for sign in (1, -1):
            moved = {other: y.detach() + (sign * step if other == name else 0) for other, y in arguments.items()}
            ends.append(_weigh(normalizer, *moved.values()).detach())
        want = (ends[0] - ends[1]) / (2 * step)
        close, what = 1e-4 * (want.abs() + made.detach().abs()) + 1e-8, f"its derivative in the {name} by autograd: "
        expected = " by finite differences"
        same(normalizer, "weight", what, slope, want, close, expected=expected, where=points.where)


def _check_lowest(points: _Points) -> None:
    """`zero_at_minus_infinity`: the weight and its derivative there are 0."""
    normalizer, level = points.normalizer, points.level
    lowest = _each(points.heads, -torch.inf).requires_grad_()
    made = _weigh(normalizer, lowest, None if level is None else level[:, :, :1])
    derivative = torch.autograd.grad(made.sum(), lowest, allow_unused=True)[0] if made.requires_grad else None
    for name, x in (("weight", made), ("derivative of weight", derivative)):
        if x is not None:
            what = f"is True, but the {name} at a score of −inf "
            forbid(normalizer, "zero_at_minus_infinity", x != 0, x, "0", what=what)


def _check_pointwise(points: _Points) -> None:
    """What only `Pointwise` has: `is_identity`, `nonnegative`, `log_weight` and `shift`."""
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
    if logarithm:
        some = (weights > 1e-300).all(2).all(1)[0]
        at = _Points(normalizer, points.heads, *scores[0, 0, 0, some].tolist())
        with torch.no_grad(), calling(normalizer, "log_weight", "called"):
            logs = normalizer.log_weight(at.scores.clone())
        at.compare("log_weight", logs, weights[..., some].log(), ", the logarithm of weight")
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
            fail(normalizer, "shift", f"returned {kind_of(made)}, expected {dtype} that broadcasts to (batch, heads, "
                 f"queries) = {shape}")  # fmt: skip


def _check_levels(normalizer: SumToOne, heads: int) -> None:
    """Weights are not negative, decrease in the level, and can sum to one, for one visible key and for many."""
    points = _Points(normalizer, heads, *SCORES)
    for method in ("weight", "term"):
        weights = _weigh(normalizer, points.scores, points.level, method=method).detach()
        wrong = weights.isnan() | (weights < 0)
        forbid(normalizer, method, wrong, weights, "0 or more", where=points.where)
        rises = torch.zeros_like(wrong)
        rises[:, :, 1:] = weights[:, :, 1:] > weights[:, :, :-1] * (1 + 1e-12) + 1e-300
        smaller = "a smaller one than at the next lower level"
        forbid(normalizer, method, rises, weights, smaller, what="rises with the level: ", where=points.where)
    flat = (weights[:, :, 0] == weights[:, :, -1]).all(-1)
    if bool(flat.any()):
        fail(normalizer, "weight", f"is the same at level {number(LEVELS[0])} and at level {number(LEVELS[-1])} for "
             "all scores of a head, expected a weight that decreases in the level")  # fmt: skip
    for keys in (1, 2, 200):
        with calling(normalizer, "weight", f"called to find the level of rows of {keys} scores"):
            search_level(normalizer, 2 * normal(1, heads, 3, keys, seed=keys))


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
            terms = torch.where(shown, _weigh(normalizer, torch.where(shown, scores, row), row, method="term"), 0.0)
            what = f"for a row of {keys} scores in {dtype}, the weights sum to another number at the level: "
            same(normalizer, "level_of", what, terms.sum(-1), shown.any(-1).to(dtype), tolerance)


def _variants(normalizer: Normalizer, size: Size) -> list[Composition]:
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
    return [Composition(subject="normalizer", normalizer=one, label=f"with {label}") for label, one in made]
