"""The NumPy lab: a softmax that does not overflow, attention as a soft lookup, softmax block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from qkv import reference
from qkv.lab.check.hints import expect
from qkv.lab.check.verdict import Wrong, judge

Array = np.ndarray
Blocks = list[tuple[Array, Array]]
HIDDEN = -np.inf


def stable_softmax(answer: Callable[[Array], Array]) -> bool:
    """Exercise of the NumPy lab: the softmax of every row, without overflow.

    Args:
        answer: ``answer(scores)`` for a float64 array (…, n), with any number of dimensions before the last. Scores may
            be −∞, but not all of a row. Returns weights (…, n), each row adding up to one.

    >>> def right(scores):
    ...     powers = np.exp(scores - scores.max(-1, keepdims=True))
    ...     return powers / powers.sum(-1, keepdims=True)
    >>> stable_softmax(right)
    ✓ small scores
    ✓ scores of 1,000 and −1,000
    ✓ rows far from each other
    ✓ keys of score −∞
    True
    """

    def small() -> None:
        scores = np.random.default_rng(0).normal(size=(2, 3, 5))
        given = scores.copy()
        got = _tensor(_met(lambda: answer(given), "a maximum or sum"), "the answer")
        if not np.array_equal(scores, given):
            raise Wrong("it changes the scores it was given; make a new array (`x = x - …`, not `x -= …`)")
        mistakes = {
            "the weights add up to one over the first axis; a query is a row and its keys are the last axis: sum over "
            "axis −1": _softmax(scores, 0),
            "the weights add up to one down the columns; a query is a row, so the sum runs over axis −1": (
                _softmax(scores, 1)
            ),
            "all weights together add up to one; each row has to, so the sum runs over the last axis alone": (
                _softmax(scores.ravel()).reshape(scores.shape)
            ),
            "these are the powers e^s; each row has to be divided by its sum": np.exp(scores),
            "these are the powers e^(s − max); each row has to be divided by its sum": (
                np.exp(scores - scores.max(-1, keepdims=True))
            ),
            "these are logarithms of the weights": np.log(_softmax(scores)),
            "these are powers of 2; a softmax takes e^s: np.exp": _softmax(np.log(2) * scores),
        }
        _expect(got, _softmax(scores), "the answer", mistakes)

    def large() -> None:
        for scores in (np.array([[1000.0, 1001.0, 999.0]]), np.array([[-1000.0, -1001.0, -1003.0]])):
            got = _quietly(partial(answer, scores))
            if not got.isfinite().all():
                raise Wrong(
                    "e^1000 overflows to ∞ and e^−1000 vanishes to 0, and ∞/∞ and 0/0 are no numbers; subtract the "
                    "largest score of a row from all of it first, which changes no weight"
                )
            _expect(got, _softmax(scores), "the answer", {
                "all weights are alike, as if the scores were cut off at a limit; subtract the row's largest instead": (
                    np.full_like(scores, 1 / 3)
                ),
            })  # fmt: skip

    def far() -> None:
        scores = np.array([[2000.0, 2001.0], [0.0, 1.0]])
        got = _quietly(lambda: answer(scores))
        if not got.isfinite().all():
            raise Wrong(
                "the largest score of the whole array was subtracted; the powers of a row far below it vanish, and 0/0 "
                "are no numbers; each row needs its own: max(-1, keepdims=True)"
            )
        _expect(got, _softmax(scores), "the answer")

    def hidden() -> None:
        scores = np.array([[0.0, HIDDEN, 1.0], [HIDDEN, HIDDEN, -4.0]])
        got = _quietly(lambda: answer(scores))
        if not got.isfinite().all():
            raise Wrong(
                "a key of score −∞ has weight e^−∞ = 0; here it makes the row NaN, as any −∞ − (−∞) does: subtract the "
                "row's *largest* score, not its smallest or its mean"
            )
        _expect(got, _softmax(scores), "the answer")

    trials = {
        "small scores": small,
        "scores of 1,000 and −1,000": large,
        "rows far from each other": far,
        "keys of score −∞": hidden,
    }
    return judge(answer, trials)


def soft_lookup(answer: Callable[[Array, Array, Array], Array]) -> bool:
    """Exercise of the NumPy lab: scaled dot-product attention.

    Args:
        answer: ``answer(q, k, v)`` for float64 queries (nq, d), keys (nk, d) and values (nk, dv). Returns (nq, dv).

    >>> def right(q, k, v):
    ...     scores = q @ k.T / np.sqrt(q.shape[-1])
    ...     powers = np.exp(scores - scores.max(-1, keepdims=True))
    ...     return powers / powers.sum(-1, keepdims=True) @ v
    >>> soft_lookup(right)
    ✓ 3 queries, 5 keys
    ✓ one key
    ✓ large queries
    True
    """

    def sizes() -> None:
        rng = np.random.default_rng(1)
        q, k, v = rng.normal(size=(3, 4)), rng.normal(size=(5, 4)), rng.normal(size=(5, 2))
        scores = q @ k.T
        mistakes = {
            "these are the weights; the answer is the mean of the values by them: weights @ v": _softmax(scores / 2),
            "the scores themselves are taken for weights; make weights of each row by a softmax": scores / 2 @ v,
            "the scores themselves are taken for weights, and not scaled": scores @ v,
            "the scores are not scaled; divide them by √d, d being the size of a query": _softmax(scores) @ v,
            "the scores are divided by d; it is √d that undoes how they grow": _softmax(scores / 4) @ v,
            "the scores are divided by the root of a value's size; it is queries and keys that are multiplied: √d of "
            "those": _softmax(scores / np.sqrt(2)) @ v,
            "the scores are divided by the root of the number of keys, expected √d": _softmax(scores / np.sqrt(5)) @ v,
            "the scores are multiplied by √d, expected divided": _softmax(scores * 2) @ v,
            "the weights are divided by √d, expected the scores; after the softmax it is too late": (
                _softmax(scores) / 2 @ v
            ),
            "the softmax runs over the queries; each query shares out one unit over its keys: the last axis": (
                _softmax(scores / 2, 0) @ v
            ),
        }
        got = _met(lambda: answer(q, k, v), "a row's maximum or sum")
        _expect(_tensor(got, "the answer"), _attention(q, k, v), "the answer", mistakes)

    def one() -> None:
        rng = np.random.default_rng(2)
        q, k, v = rng.normal(size=(2, 3)), rng.normal(size=(1, 3)), rng.normal(size=(1, 4))
        _expect(_tensor(answer(q, k, v), "the answer"), np.repeat(v, 2, 0), "what should be the one key's value")

    def large() -> None:
        rng = np.random.default_rng(3)
        q, k, v = 1e4 * rng.normal(size=(2, 3)), rng.normal(size=(4, 3)), rng.normal(size=(4, 2))
        got = _quietly(lambda: answer(q, k, v))
        if not got.isfinite().all():
            raise Wrong("large scores overflow in exp; subtract the largest of each row first")
        _expect(got, _attention(q, k, v), "the answer")

    return judge(answer, {"3 queries, 5 keys": sizes, "one key": one, "large queries": large})


def online_softmax(answer: Callable[[Iterator[tuple[Array, Array]]], tuple[Array, float]]) -> bool:
    """Exercise of the NumPy lab: attention of one query whose keys come block by block.

    Args:
        answer: ``answer(blocks)`` for an iterator that can be read once. A block is the scores (m,) of m keys, another
            m each time, and their values (m, dv); hidden keys have score −∞. Returns the output (dv,) and the
            log-sum-exp of all scores.

    >>> def right(blocks):
    ...     top, total, out = -np.inf, 0.0, 0.0
    ...     for scores, values in blocks:
    ...         new = max(top, scores.max())
    ...         if new > -np.inf:
    ...             powers, kept = np.exp(scores - new), np.exp(top - new)
    ...             top, total, out = new, total * kept + powers.sum(), out * kept + powers @ values
    ...     return out / total, top + np.log(total)
    >>> online_softmax(right)
    ✓ one block
    ✓ scores that rise
    ✓ scores of 1,000
    ✓ a first block of hidden keys
    True
    """

    def tried(seed: int, sizes: tuple[int, ...], lifts: tuple[float, ...]) -> Callable[[], None]:
        rng = np.random.default_rng(seed)
        blocks = [(rng.normal(size=m) + lift, rng.normal(size=(m, 3))) for m, lift in zip(sizes, lifts, strict=True)]
        return lambda: _read(answer, blocks)

    trials = {
        "one block": tried(4, (3,), (2.0,)),
        "scores that rise": tried(5, (4, 1, 3), (0.0, 2.0, 4.0)),
        "scores of 1,000": tried(6, (3, 2, 4), (0.0, 1000.0, 999.0)),
        "a first block of hidden keys": tried(7, (2, 3), (HIDDEN, 0.0)),
    }
    return judge(answer, trials)


def _read(answer: Callable[..., object], blocks: Blocks) -> None:
    """One trial of `online_softmax`."""
    with np.errstate(all="ignore"):
        found = answer(_Once([(s.copy(), v.copy()) for s, v in blocks]))
    if not isinstance(found, tuple) or len(found) != 2:
        raise Wrong("expected two results: the output and the log-sum-exp")
    out, lse = _tensor(found[0], "the output"), _tensor(found[1], "the log-sum-exp")
    if not (out.isfinite().all() and lse.isfinite().all()):
        if not np.isfinite(blocks[0][0]).any():
            raise Wrong("after a block of hidden keys the largest score is −∞, and −∞ − (−∞) is NaN; skip such a block")
        raise Wrong("exp overflows or vanishes; subtract the largest score *so far*, and follow it as it rises")
    scores, values = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    means = [_softmax(s) @ v for s, v in blocks if np.isfinite(s).any()]
    top = scores.max()
    rest = np.log(np.exp(scores - top).sum())
    _expect(out, _softmax(scores) @ values, "the output", {
        "when the largest score rises, the sum of the values so far has to shrink, too: multiply it by e^(old − new)": (
            _running(blocks, total=True, out=False)
        ),
        "the sum of the values shrinks when the largest score rises, the sum of the powers does not: multiply both by "
        "e^(old − new)": _running(blocks, total=False, out=True),
        "sums that were made with another largest score are added as they are: when it rises, multiply what is there "
        "by e^(old − new)": _running(blocks, total=False, out=False),
        "when the largest score rises from old to new, the sums shrink: multiply them by e^(old − new), not by "
        "e^(new − old)": _running(blocks, total=True, out=True, sign=-1),
        "the blocks' outputs are averaged as if each had the same share of the weight; it has that of its sum of "
        "powers": np.mean(means, 0),
        "this is the output of the last block alone": means[-1],
        "the output is not divided by the sum of the powers": np.exp(scores - top) @ values,
    })  # fmt: skip
    _expect(lse, np.array(top + rest), "the log-sum-exp", {
        "the log-sum-exp lacks the largest score, which was subtracted: add it to ln Σ e^(s − max)": np.array(rest),
        "this is Σ e^(s − max), expected the largest score and its logarithm": np.exp(rest),
        "Σ e^(s − max) is added to the largest score, expected its logarithm": np.array(top + np.exp(rest)),
        "this is the largest score; the log-sum-exp adds ln Σ e^(s − max) to it": np.array(top),
    })  # fmt: skip


class _Once:
    """Blocks that can be read once; who asks a second time is told so."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks, self.ended = iter(blocks), False

    def __iter__(self) -> _Once:
        if self.ended:
            raise Wrong("the blocks are read a second time; what is needed of them has to be kept while they pass")
        return self

    def __next__(self) -> tuple[Array, Array]:
        try:
            return next(self.blocks)
        except StopIteration:
            self.ended = True
            raise


def _running(blocks: Blocks, *, total: bool, out: bool, sign: int = 1) -> Array:
    """The output of a running softmax of which the total, the sum of values, or neither shrinks as it should.

    With the sign −1 they grow instead.
    """
    top, powers_sum, sums = HIDDEN, 0.0, np.zeros(blocks[0][1].shape[1])
    with np.errstate(all="ignore"):
        for scores, values in blocks:
            new = max(top, float(scores.max()))
            powers, kept = np.exp(scores - new), np.exp(sign * (top - new)) if top > HIDDEN else 0.0
            powers_sum = powers_sum * (kept if total else 1.0) + powers.sum()
            sums = sums * (kept if out else 1.0) + powers @ values
            top = new
        return np.asarray(sums / powers_sum)


def _softmax(scores: Array, axis: int = -1) -> Array:
    powers = np.exp(scores - scores.max(axis, keepdims=True))
    return np.asarray(powers / powers.sum(axis, keepdims=True))


def _attention(q: Array, k: Array, v: Array) -> Array:
    return reference.attention(q[None, None], k[None, None], v[None, None]).out[0, 0]


def _met(call: Callable[[], object], what: str) -> object:
    """What an answer gives; arrays that do not fit each other get a hint at why."""
    try:
        return call()
    except ValueError as error:
        if "broadcast" in str(error):
            raise Wrong(f"shapes do not fit ({error}); {what} keeps its axis with keepdims=True") from None
        if "matmul" in str(error):
            shapes = "scores are q @ k.T, (nq, nk), and outputs weights @ v, (nq, dv)"
            raise Wrong(f"a matrix product does not fit; {shapes}") from None
        raise


def _quietly(call: Callable[[], object]) -> Tensor:
    with np.errstate(all="ignore"):
        return _tensor(call(), "the answer")


def _tensor(got: object, what: str) -> Tensor:
    """An array that an answer gave, as `expect` takes it."""
    try:
        if got is not None:
            return torch.tensor(np.asarray(got, dtype=np.float64))
    except (TypeError, ValueError):
        pass
    raise Wrong(f"{what} is {type(got).__name__}, expected an array of numbers")


def _expect(got: Tensor, expected: Array, what: str, mistakes: dict[str, Array] | None = None) -> None:
    known = {hint: torch.tensor(wrong) for hint, wrong in (mistakes or {}).items()}
    expect(got, torch.tensor(expected), what, known, 1e-8)
