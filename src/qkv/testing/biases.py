"""`check_bias`: a bias fulfils the contract of `Bias` or `Additive`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from qkv._contract import overrides
from qkv.biases import Additive, Bias
from qkv.masks import Region
from qkv.normalizers import Sigmoid, Softmax
from qkv.testing.agreement import Composition, check_attend, masked, method_of
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
    largest,
    normal,
    parts,
    same,
    shape_of,
    sizes_of,
    triple,
)


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
    ...     print(str(error).split(": in")[0])
    Centred.apply: depends on the tile
    """
    if not isinstance(bias, Bias):
        raise CheckFailed(
            f"check_bias: got {shape_of(bias)}, expected an object of a class that inherits from qkv.biases.Bias "
            "or from Additive"
        )
    chosen_sizes = sizes_of(sizes, SIZES, batch, heads, key_heads_of(heads), dim=dim, dim_k=dim, dim_v=dim_v)
    exact, first = converted(bias, torch.float64), chosen_sizes[0]
    q, _, _ = triple(first, torch.float64)
    with calling(bias, method_of(bias), "checked"):
        for size in chosen_sizes:
            bias.check(size.grid)
        bound = exact.bound(q, first.grid, 0.5)
        if not isinstance(bound, Bias):
            fail(bias, "bound", f"returned {type(bound).__name__}, expected a bias")
        bound.require()
    eps = _check_scores(exact, bound, first, q)
    plain = Composition("bias", bias=bias, normalizer=Softmax(0.7), eps=eps)
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
    if isinstance(bound, Additive):
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
    if not bias.by_query:
        agree("by_query", _apply(bias.bound(3 * q, size.grid, 0.5), before, whole), what="is False, but with other q ")
    if bound.by_score:
        moved = replace(whole, offset=whole.offset + 3, rows=slice(2, size.queries + 2))
        agree("by_score", _apply(bound, before, moved), what="is True, but elsewhere ")
    if overrides(bound, Bias, "apply_"):
        with torch.no_grad(), calling(bound, "apply_", "called"):
            agree("apply_", bound.apply_(before.clone(), whole))
    if overrides(bound, Bias, "at"):
        indices = torch.meshgrid(*(torch.arange(n) for n in before.shape), indexing="ij")
        with calling(bound, "at", "called"):
            agree("at", bound.at(before.clone(), *indices))
    for name, region in parts(size):
        with calling(bound, "part", "called"):
            part = bound.part(region)
        if part is not None:
            some = region.of(before)
            moved = Region(slice(0, some.shape[2]), slice(0, some.shape[3]))
            agree("part", _apply(part, some, moved), region.of(after), f"of a tile of {name}: ")
    if (by_distance := bound.by_distance) is not None:
        distances = size.queries + size.keys - 1
        if by_distance.ndim != 2 or by_distance.shape[1] != distances:
            fail(bound, "by_distance", f"has shape {tuple(by_distance.shape)}, expected (1 or {size.heads}, "
                 f"{distances})")  # fmt: skip
        steps = torch.arange(size.queries)[:, None] - torch.arange(size.keys) + size.keys - 1
        agree("by_distance", before + by_distance.detach()[:, steps])
    _check_gradients(bound, before.requires_grad_(), whole)
    return float(eps)


def _check_gradients(bound: Bias, before: Tensor, whole: Region) -> None:
    """The shortcuts `gradients` and `add_gradient` agree with autograd through the defining method."""
    base = Additive if isinstance(bound, Additive) else Bias
    learned = {name: x for name, x in bound.tensors().items() if x.requires_grad}
    after = _apply(bound, before, whole)
    slope = torch.where(after.detach().isfinite(), normal(*before.shape, seed=9), 0.0)
    tensors = {"the scores": before, **learned}
    found = torch.autograd.grad(after, list(tensors.values()), slope, allow_unused=True)
    want = [torch.zeros_like(x) if g is None else g for x, g in zip(tensors.values(), found, strict=True)]

    def compare(method: str, name: str, mine: Tensor | None, theirs: Tensor) -> None:
        rounding = ROUNDINGS * torch.finfo(theirs.dtype).eps * largest(theirs)
        mine = torch.zeros_like(theirs) if mine is None else mine
        same(bound, method, f"of {name}: ", mine, theirs, rounding, expected=f" by autograd on {method_of(bound)}")

    if overrides(bound, base, "gradients"):
        with torch.no_grad(), calling(bound, "gradients", "called"):
            got = bound.gradients(before.detach(), whole, slope.clone(), list(learned.values()))
            for name, mine, theirs in zip(tensors, got, want, strict=bool(learned)):
                compare("gradients", name, mine, theirs)
    if isinstance(bound, Additive) and bound.add_gradient is not None and learned:
        ((name, tensor),) = learned.items()
        total = torch.zeros_like(tensor, dtype=torch.float64)
        for rows in (slice(0, 2), slice(2, whole.rows.stop)):
            for columns in (slice(0, 3), slice(3, whole.columns.stop)):
                region = replace(whole, rows=rows, columns=columns)
                with torch.no_grad(), calling(bound, "add_gradient", "called"):
                    bound.add_gradient(total, region, region.of(slope).clone())
        compare("add_gradient", name, total, want[1])
