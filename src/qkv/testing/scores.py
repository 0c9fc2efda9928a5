"""`check_score`: a score fulfils the contract of `Product` or `Pairwise`."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from qkv._contract import overrides
from qkv.normalizers import Identity, Softmax
from qkv.scores import Pairwise, Product, Score
from qkv.testing.agreement import Composition, check_attend, masked, method_of
from qkv.testing.inputs import (
    EPS,
    ROUNDINGS,
    SIZES,
    CheckFailed,
    Size,
    Sizes,
    calling,
    check_returned,
    converted,
    fail,
    largest,
    normal,
    parts,
    same,
    shape_of,
    sizes_of,
    triple,
    without_writing,
)


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
        _check_tiles(exact, q, k, first)
        _check_gradients(exact, q, k)
    if exact.keeps_rotation:
        _check_rotation(exact, first)
    plain, key = Composition("score", score=score), normal(first.heads, first.dim_k, seed=6).requires_grad_()
    linear = replace(plain, normalizer=Identity("keys"), label="normalizer Identity")
    learned = replace(plain, normalizer=Softmax(0.7, key=key), label="a learned key in the normalizer")
    check_attend(plain, computed, [learned, masked(linear, first)[2]])


def _project(score: Score, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """`project`, with a check of its result."""
    shapes = f"q {tuple(q.shape)} and k {tuple(k.shape)}"
    with calling(score, "project", f"called with {shapes}, {q.dtype}"):
        result = score.project(q, k)
    if not isinstance(result, tuple) or len(result) != 2:
        fail(score, "project", f"returned {shape_of(result)}, expected two tensors: queries and keys")
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


def _check_tiles(score: Pairwise, q: Tensor, k: Tensor, size: Size) -> None:
    """Scores of a tile equal those of the whole matrix, and a query or key changes only its own scores."""
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


def _check_gradients(score: Pairwise, q: Tensor, k: Tensor) -> None:
    """The shortcut `gradients` agrees with autograd through `scores`."""
    if not overrides(score, Pairwise, "gradients"):
        return
    tensors = {"q": q.requires_grad_(), "k": k.requires_grad_(), **score.tensors()}
    slope, learned = normal(*q.shape[:3], k.shape[2], seed=9), list(score.tensors().values())
    want = torch.autograd.grad(_scores(score, q, k), list(tensors.values()), slope, allow_unused=True)
    with torch.no_grad(), calling(score, "gradients", "called"):
        got = score.gradients(q.detach(), k.detach(), slope.clone(), learned)
        for (name, x), mine, theirs in zip(tensors.items(), got, want, strict=True):
            exact = torch.zeros_like(x) if theirs is None else theirs
            made = torch.zeros_like(x) if mine is None else mine
            rounding = ROUNDINGS * torch.finfo(exact.dtype).eps * largest(exact)
            same(score, "gradients", f"of {name}: ", made, exact, rounding, expected=" by autograd on scores")


def _check_rotation(score: Score, size: Size) -> None:
    """Rotating query and key by the same rotation does not change the score."""
    if size.dim != size.dim_k:
        fail(score, "keeps_rotation", f"is True, but queries have {size.dim} entries and keys {size.dim_k}")
    q, k, _ = triple(size, torch.float64)
    turn, made = torch.linalg.qr(normal(size.dim, size.dim, seed=12))[0], []
    for tensors in ((q, k), (q @ turn, k @ turn)):
        queries, keys = _project(score, *tensors)
        keys = keys.repeat_interleave(size.heads // size.key_heads, 1)
        made.append((_scores(score, queries, keys) if isinstance(score, Pairwise) else queries @ keys.mT).detach())
    what = "is True, but with queries and keys rotated by the same rotation "
    same(score, "keeps_rotation", what, made[1], made[0], ROUNDINGS * EPS * largest(made[0]), expected=" as before")
