"""`check_score`: a score fulfils the contract of `Product` or `Pairwise`."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from qkv._contract import overrides
from qkv.normalizers import Identity, Softmax
from qkv.scores import Pairwise, Product, Score
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
    normal,
    number,
    parts,
    shape_of,
    sizes_of,
    triple,
)

ROUNDINGS = 2.0**12  # eps that the same function of the same numbers may be off
ROUNDING = ROUNDINGS * torch.finfo(torch.float64).eps


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
    score depends on its query and key only, so that tiles do not change scores; ``gradients``, ``keeps_rotation`` and
    ``by_head``; output, weights and gradients of `attend` on every kernel against a dense definition in float64, with
    masks, queries without visible keys and learned keys; finite differences; bfloat16 and float16; NaN in masked keys;
    `measure`; pickle and copy.deepcopy.

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
    if not isinstance(score, Product | Pairwise):
        raise CheckFailed(
            f"check_score: got {shape_of(score)}, expected an object of a class that inherits from "
            "qkv.scores.Product or from Pairwise"
        )
    with calling(score, definition.method_of(score), "checked"):
        score.check()
    computed = sizes_of(sizes, SIZES, batch, heads, key_heads, dim=dim, dim_k=dim if dim_k is None else dim_k)
    exact, first = converted(score, torch.float64), computed[0]
    _check_factor(exact, first)
    _check_tokens(exact, first)
    if isinstance(exact, Pairwise):
        _check_tiles(exact, first)
        _check_gradients(exact, first)
    if exact.keeps_rotation:
        _check_rotation(exact, first)
    plain, key = Composition("score", score=score), normal(first.heads, first.dim_k, seed=6).requires_grad_()
    linear = replace(plain, normalizer=Identity("keys"), label="normalizer Identity")
    learned = replace(plain, normalizer=Softmax(0.7, key=key), label="a learned key in the normalizer")
    check_attend(plain, computed, [learned, masked(linear, first)[2]])


def _check_factor(score: Score, size: Size) -> None:
    with calling(score, "factor", f"called with {size.dim}"):
        factor = score.factor(size.dim)
    if not isinstance(factor, int | float) or not math.isfinite(factor):
        fail(score, "factor", f"returned {factor!r}, expected a finite number")


def _check_tokens(score: Score, size: Size) -> None:
    """`project` treats each token of each batch item independently."""
    q, k, _ = triple(size, torch.float64)
    kept = q.clone(), k.clone()
    whole = [x.detach() for x in definition.project(score, q, k)]
    if not (torch.equal(q, kept[0]) and torch.equal(k, kept[1])):
        fail(score, "project", "changed queries or keys in place, expected new tensors")
    for changed, name, change in ((0, "query", 1.7), (1, "key", 1.7), (0, "query", torch.nan), (1, "key", torch.nan)):
        tensors = [q.clone(), k.clone()]
        token = tensors[changed].shape[2] // 2
        tensors[changed][0, :, token] += change
        after = [x.detach().clone() for x in definition.project(score, *tensors)]
        after[changed][0, :, token] = whole[changed][0, :, token]
        for got, want, other in zip(after, whole, ("query", "key"), strict=True):
            if (wrong := difference(got, want, ROUNDING * max(1.0, float(want.abs().max())))) is not None:
                b, h, n, d = wrong.place
                fail(
                    score, "project", f"mixes tokens: entry {d} of {other} {n} of batch item {b}, head {h} changes "
                    f"from {number(wrong.want)} to {number(wrong.got)} when {name} {token} of item 0 "
                    f"{_becomes(change)}; each token must be projected independently"
                )  # fmt: skip
    half = (q[:, :, : size.queries // 2 + 1], k[:, :, size.keys // 2 :])
    parts = [x.detach() for x in definition.project(score, *half)]
    for got, want, name in zip(
        parts, (whole[0][:, :, : size.queries // 2 + 1], whole[1][:, :, size.keys // 2 :]), ("queries", "keys"),
        strict=True,
    ):  # fmt: skip
        if (wrong := difference(got, want, ROUNDING * max(1.0, float(want.abs().max())))) is not None:
            fail(score, "project", f"mixes tokens: for a part of the {name} it {wrong}, the result for all of them")


def _becomes(change: float) -> str:
    return "becomes nan" if math.isnan(change) else "changes"


def _pairwise(score: Pairwise, size: Size) -> tuple[Tensor, Tensor]:
    """Projected queries and keys for each query head."""
    q, k, _ = triple(size, torch.float64)
    projected, keys = (x.detach() for x in definition.project(score, q, k))
    return projected, definition.per_head(keys, size.heads).contiguous()


def _check_tiles(score: Pairwise, size: Size) -> None:
    """Scores of a tile equal those of the whole matrix, and a query or key changes only its own scores."""
    q, k = _pairwise(score, size)
    kept = q.clone(), k.clone()
    whole = definition.scores(score, q, k).detach()
    if not (torch.equal(q, kept[0]) and torch.equal(k, kept[1])):
        fail(score, "scores", "changed queries or keys in place, expected a new tensor")
    rounding = ROUNDING * max(1.0, float(whole.abs().max()))
    for name, region in parts(size):
        made = definition.scores(score, q[region.batch, :, region.rows], k[region.batch, :, region.columns])
        if (wrong := difference(made, region.of(whole), rounding)) is not None:
            fail(
                score, "scores", f"depends on the tile: {wrong} from the whole matrix, in a tile of {name}; a score "
                "may depend on its own query and key alone"
            )  # fmt: skip
    head = size.heads - 1
    for changed, name, change in ((0, "query", 1.7), (1, "key", 1.7), (0, "query", torch.nan), (1, "key", torch.nan)):
        tensors = [q.clone(), k.clone()]
        token = tensors[changed].shape[2] // 2
        tensors[changed][0, head, token] += change
        after = definition.scores(score, *tensors).detach().clone()
        affected = (0, head, token) if changed == 0 else (0, head, slice(None), token)
        after[affected] = whole[affected]
        if (wrong := difference(after, whole, rounding)) is not None:
            fail(
                score, "scores", f"the score at {wrong.place} changes from {number(wrong.want)} to {number(wrong.got)} "
                f"when {name} {token} of batch item 0, head {head} {_becomes(change)}; a score may depend on its own "
                "query and key alone"
            )  # fmt: skip
    if not score.by_head:
        made = definition.scores(score, q[:, -1:], k[:, -1:])
        if (wrong := difference(made, whole[:, -1:], rounding)) is not None:
            fail(score, "by_head", f"is False, but the scores of head {head} alone differ: {wrong}")


def _check_gradients(score: Pairwise, size: Size) -> None:
    """The shortcut `gradients` agrees with autograd through `scores`."""
    if not overrides(score, Pairwise, "gradients"):
        return
    q, k = (x.requires_grad_() for x in _pairwise(score, size))
    slope = normal(*q.shape[:3], k.shape[2], seed=9)
    learned = score.tensors()
    want = torch.autograd.grad(definition.scores(score, q, k), (q, k, *learned.values()), slope, allow_unused=True)
    with torch.no_grad(), calling(score, "gradients", "called"):
        got = score.gradients(q.detach(), k.detach(), slope.clone(), list(learned.values()))
    if len(got) != 2 + len(learned):
        fail(score, "gradients", f"returned {len(got)} tensors, expected {2 + len(learned)}: of q, k and learned ones")
    for name, mine, theirs in zip(("q", "k", *learned), got, want, strict=True):
        expected = torch.zeros(()) if theirs is None else theirs
        computed = torch.zeros_like(expected) if mine is None else mine
        rounding = ROUNDINGS * torch.finfo(expected.dtype).eps * max(1.0, float(expected.abs().max()))
        if (wrong := difference(computed, expected, rounding)) is not None:
            fail(score, "gradients", f"of {name}: {wrong} by autograd on scores")


def _check_rotation(score: Score, size: Size) -> None:
    """Rotating query and key by the same rotation does not change the score."""
    if size.dim != size.dim_k:
        fail(score, "keeps_rotation", f"is True, but queries have {size.dim} entries and keys {size.dim_k}")
    q, k, _ = triple(size, torch.float64)
    turn = torch.linalg.qr(normal(size.dim, size.dim, seed=12))[0]
    made = [
        definition.scores(score, *definition.project(score, *tensors)).detach()
        for tensors in ((q, k), (q @ turn, k @ turn))
    ]
    if (wrong := difference(made[1], made[0], ROUNDING * max(1.0, float(made[0].abs().max())))) is not None:
        fail(
            score, "keeps_rotation", f"is True, but the score at {wrong.place} changes from {number(wrong.want)} to "
            f"{number(wrong.got)} when queries and keys are rotated by the same rotation"
        )  # fmt: skip
