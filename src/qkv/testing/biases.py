"""`check_bias`: a bias fulfils the contract of `Bias` or `Additive`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from qkv._contract import overrides
from qkv.biases import Additive, Bias
from qkv.masks import Region
from qkv.normalizers import Sigmoid, Softmax
from qkv.testing import definition
from qkv.testing.agreement import check_attend, masked
from qkv.testing.definition import Composition
from qkv.testing.inputs import (
    SIZES,
    CheckFailed,
    Size,
    Sizes,
    calling,
    converted,
    difference,
    fail,
    key_heads_of,
    normal,
    number,
    parts,
    shape_of,
    sizes_of,
    triple,
)

ROUNDINGS = 2.0**12  # eps that the same function of the same numbers may be off


def check_bias(
    bias: Bias, *, heads: int = 4, dim: int = 8, dim_v: int = 6, sizes: Sizes | None = None, batch: int = 2
) -> None:
    """Check that a bias fulfils the contract of its base class; for use in your own tests.

    It checks: what ``apply`` or ``tile`` returns; that each score is a function of itself and its position only, so
    that tiles do not change scores; the shortcuts ``gradients``, ``add_gradient``, ``at``, ``part``,
    ``by_distance``, ``by_score`` and ``by_head``; output, weights and gradients of `attend` on every kernel against a
    dense definition in float64, with masks and queries without visible keys; finite differences; bfloat16 and float16;
    NaN in masked keys; `measure`; pickle and copy.deepcopy.

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
    ...     print(str(error).split(": got")[0])
    Centred.apply: depends on the tile
    """
    if not isinstance(bias, Bias):
        raise CheckFailed(
            f"check_bias: got {shape_of(bias)}, expected an object of a class that inherits from qkv.biases.Bias "
            "or from Additive"
        )
    chosen_sizes = sizes_of(sizes, SIZES, batch, heads, key_heads_of(heads), dim=dim, dim_k=dim, dim_v=dim_v)
    with calling(bias, definition.method_of(bias), "checked"):
        for size in chosen_sizes:
            bias.check(size.grid)
    exact, first = converted(bias, torch.float64), chosen_sizes[0]
    bound = _bound(exact, first)
    with calling(bound, definition.method_of(bound), "checked"):
        bound.require()
    named = definition.method_of(bias)
    _check_tiles(exact, bound, first)
    _check_alone(exact, bound, first, named)
    _check_shortcuts(exact, bound, first)
    plain = Composition("bias", bias=bias, normalizer=Softmax(0.7))
    sigmoid = replace(plain, normalizer=Sigmoid(-1.0), label="normalizer Sigmoid")
    check_attend(plain, chosen_sizes, [masked(sigmoid, first)[1]])


def _bound(bias: Bias, size: Size) -> Bias:
    q, _, _ = triple(size, torch.float64)
    with calling(bias, "bound", f"called for {size}"):
        made = bias.bound(q, size.grid, 0.5)
    if not isinstance(made, Bias):
        fail(bias, "bound", f"returned {type(made).__name__}, expected a bias")
    return made


def _before(size: Size) -> Tensor:
    return 2 * normal(size.batch, size.heads, size.queries, size.keys, seed=1)


def _apply(bias: Bias, before: Tensor, region: Region) -> Tensor:
    return definition.biased(bias, before, region)[0]


def _rounding(bias: Bias, before: Tensor, region: Region) -> float:
    made, eps = definition.biased(bias, before, region)
    made = made.detach()
    return ROUNDINGS * eps * max(1.0, float(made[made.isfinite()].abs().max()) if bool(made.isfinite().any()) else 1.0)


def _check_tiles(bias: Bias, bound: Bias, size: Size) -> None:
    """Scores of a tile equal those of the whole matrix."""
    before, whole = _before(size), size.whole
    kept, method = before.clone(), definition.method_of(bound)
    after, rounding = _apply(bound, before, whole).detach(), _rounding(bound, before, whole)
    if not torch.equal(before, kept):
        fail(bias, method, "changed its scores in place, expected a new tensor")
    if bool(after.isnan().any()):
        place = tuple(after.isnan().nonzero()[0].tolist())
        fail(bias, method, f"the score at {place}, {number(before[place].item())}, becomes nan, expected a number")
    cut = list(parts(size))
    if not bound.by_head:
        last = slice(size.heads - 1, size.heads)
        cut.append(("the last head, because by_head is False", replace(whole, heads=last)))
    for name, region in cut:
        made = _apply(bound, region.of(before).clone(), region)
        if (wrong := difference(made, region.of(after), rounding)) is not None:
            fail(
                bias, method, f"depends on the tile: {wrong} from the whole matrix, in a tile of {name}; a score must "
                "be a function of itself and its position only"
            )  # fmt: skip


def _check_alone(bias: Bias, bound: Bias, size: Size, method: str) -> None:
    """No score depends on another score, nor on queries if `by_query` is False."""
    before, whole = _before(size), size.whole
    after, rounding = _apply(bound, before, whole).detach(), _rounding(bound, before, whole)
    last = (size.batch - 1, size.heads - 1, size.queries - 1, 0)
    for place, change in (((0, 0, size.queries // 2, size.keys // 2), 1.7), (last, torch.nan)):
        changed = before.clone()
        changed[place] += change
        made = _apply(bound, changed, whole).detach().clone()
        made[place] = after[place]
        if (wrong := difference(made, after, rounding)) is not None:
            fail(
                bias, method, f"the score at {wrong.place} changes from {number(wrong.want)} to {number(wrong.got)} "
                f"when that at {place} becomes {number(changed[place].item())}; a score must be "
                "a function of itself and its position only"
            )  # fmt: skip
    if not bias.by_query:
        other = bias.bound(3 * triple(size, torch.float64)[0], size.grid, 0.5)
        if (wrong := difference(_apply(other, before, whole), after, rounding)) is not None:
            fail(bias, "by_query", f"is False, but the bias differs between queries: {wrong}")


# --- shortcuts --------------------------------------------------------------------------------------------------------


def _check_shortcuts(bias: Bias, bound: Bias, size: Size) -> None:
    before, whole = _before(size), size.whole
    after, rounding = _apply(bound, before, whole).detach(), _rounding(bound, before, whole)
    if overrides(bound, Bias, "apply_"):
        with torch.no_grad(), calling(bound, "apply_", "called"):
            got = bound.apply_(before.clone(), whole)
        if (wrong := difference(got, after, rounding)) is not None:
            fail(bound, "apply_", f"{wrong}, which {definition.method_of(bound)} returns")
    _check_gradients(bias, bound, size)
    if overrides(bound, Bias, "at"):
        b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in before.shape), indexing="ij")
        with calling(bound, "at", "called"):
            made = bound.at(before.clone(), b, h, i, j)
        if (wrong := difference(made, after, rounding)) is not None:
            fail(bound, "at", f"{wrong}, the score that {definition.method_of(bound)} gives")
    for name, region in parts(size):
        with calling(bound, "part", "called"):
            made_part = bound.part(region)
        if made_part is None:
            break
        moved = Region(
            slice(0, region.rows.stop - region.rows.start), slice(0, region.columns.stop - region.columns.start)
        )
        some = region.of(before)
        if (wrong := difference(_apply(made_part, some.clone(), moved), region.of(after), rounding)) is not None:
            fail(bound, "part", f"of a tile of {name}: {wrong} from the whole")
    if (by_distance := bound.by_distance) is not None:
        expected = (size.queries + size.keys - 1,)
        if by_distance.ndim != 2 or tuple(by_distance.shape[1:]) != expected:
            fail(
                bound, "by_distance", f"has shape {tuple(by_distance.shape)}, expected (1 or {size.heads}, "
                f"{expected[0]})"
            )  # fmt: skip
        steps = torch.arange(size.queries)[:, None] - torch.arange(size.keys) + size.keys - 1
        if (wrong := difference(before + by_distance.detach()[:, steps], after, rounding)) is not None:
            fail(bound, "by_distance", f"{wrong}, the score that {definition.method_of(bound)} gives")
    if bound.by_score:
        moved = replace(whole, offset=whole.offset + 3, rows=slice(2, size.queries + 2))
        made = _apply(bound, before, moved)
        if (wrong := difference(made, after, rounding)) is not None:
            fail(bound, "by_score", f"is True, but the same score elsewhere differs: {wrong}")


def _check_gradients(bias: Bias, bound: Bias, size: Size) -> None:
    """The shortcuts `gradients` and `add_gradient` agree with autograd through the defining method."""
    base = Additive if isinstance(bound, Additive) else Bias
    whole, before = size.whole, _before(size).requires_grad_()
    slope = normal(*before.shape, seed=9)
    learned = {name: x for name, x in bound.tensors().items() if x.requires_grad}
    made = _apply(bound, before, whole)
    slope = torch.where(made.detach().isfinite(), slope, 0.0)
    want = torch.autograd.grad(made, (before, *learned.values()), slope, allow_unused=True)
    if overrides(bound, base, "gradients"):
        with torch.no_grad(), calling(bound, "gradients", "called"):
            got = bound.gradients(before.detach(), whole, slope.clone(), list(learned.values()))
        for name, mine, theirs in zip(("the scores", *learned), got, want, strict=False):
            _compare(bound, "gradients", f"of {name}", mine, theirs)
        if learned and len(got) != 1 + len(learned):
            fail(bound, "gradients", f"returned {len(got)} tensors, expected {1 + len(learned)}: of scores and learned")
    if isinstance(bound, Additive) and bound.add_gradient is not None and learned:
        ((name, tensor),) = learned.items()
        total = torch.zeros_like(tensor, dtype=torch.float64)
        for rows in (slice(0, 2), slice(2, size.queries)):
            for columns in (slice(0, 3), slice(3, size.keys)):
                region = replace(whole, rows=rows, columns=columns)
                with torch.no_grad(), calling(bound, "add_gradient", "called"):
                    bound.add_gradient(total, region, region.of(slope).clone())
        _compare(bound, "add_gradient", f"of {name}", total, want[1])


def _compare(bound: Bias, method: str, what: str, mine: Tensor | None, theirs: Tensor | None) -> None:
    theirs = torch.zeros(()) if theirs is None else theirs
    mine = torch.zeros_like(theirs) if mine is None else mine
    coarse = ROUNDINGS * torch.finfo(theirs.dtype).eps
    if (wrong := difference(mine, theirs, coarse * max(1.0, float(theirs.abs().max())))) is not None:
        fail(bound, method, f"{what}: {wrong} by autograd on {definition.method_of(bound)}")
