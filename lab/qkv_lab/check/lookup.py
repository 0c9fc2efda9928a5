"""Checks of exercises: look-ups, and reversal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from qkv import masks, reference
from qkv_lab.check.hints import Wrong, array, draw, exercise, expect, mask_mistakes, pair, scale_mistakes, trial

Array = np.ndarray
MASKED = -math.inf
_expect = partial(expect, tolerance=1e-8)


@exercise
def stable_softmax(answer: Callable[[Array], Array]) -> None:
    """Exercise of the NumPy lab: the softmax of every row, without overflow.

    Args:
        answer: ``answer(scores)`` for a float64 array (…, n) with any number of leading dimensions. Some scores of a
            row may be −∞, but not all. Returns weights (…, n); each row sums to one.
    """

    with trial("small scores"):
        (scores,) = _normal(0, (2, 3, 5))
        given = scores.numpy().copy()
        got = _result(answer, given)
        if not np.array_equal(scores, given):
            raise Wrong("it changes the scores it was given; make a new array (`x = x - …`, not `x -= …`)")
        mistakes = {
            "the weights sum to one over the first axis; keys are the last axis: sum over axis −1": scores.softmax(0),
            "the weights sum to one down the columns; a query is a row, so the sum runs over axis −1": (
                scores.softmax(1)
            ),
            "all weights together sum to one; each row should, so the sum runs over the last axis only": (
                scores.ravel().softmax(0).reshape(scores.shape)
            ),
            "these are the powers e^s; each row has to be divided by its sum": scores.exp(),
            "these are the powers e^(s − max); each row has to be divided by its sum": (
                (scores - scores.amax(-1, keepdim=True)).exp()
            ),
            "these are logarithms of the weights": scores.log_softmax(-1),
            "these are powers of 2; a softmax takes e^s: np.exp": (math.log(2) * scores).softmax(-1),
        }
        _expect(got, scores.softmax(-1), "the answer", mistakes)

    clipped = "all weights are equal, as if the scores were clipped; subtract the row's largest score instead"
    large = (
        "e^1000 overflows to ∞ and e^−1000 underflows to 0, and ∞/∞ and 0/0 are NaN; subtract the largest score of "
        "each row first, which does not change the weights"
    )
    whole = (
        "the largest score of the whole array was subtracted; the powers of a row far below it underflow, and 0/0 is "
        "NaN; each row needs its own maximum: max(-1, keepdims=True)"
    )
    masked = (
        "a key with score −∞ has weight e^−∞ = 0; here the row becomes NaN, because −∞ − (−∞) is NaN: subtract the "
        "row's *largest* score, not its smallest or its mean"
    )
    trials: dict[str, tuple[str, list[list[list[float]]]]] = {
        "scores of 1,000 and −1,000": (large, [[[1000, 1001, 999]], [[-1000, -1001, -1003]]]),
        "rows far from each other": (whole, [[[2000, 2001], [0, 1]]]),
        "keys of score −∞": (masked, [[[0, MASKED, 1], [MASKED, MASKED, -4]]]),
    }
    for name, (hint, given_scores) in trials.items():
        with trial(name):
            for rows in given_scores:
                scores = torch.tensor(rows, dtype=torch.float64)
                mistakes = {clipped: torch.full_like(scores, 1 / scores.shape[-1])}
                _expect(_result(answer, scores.numpy()), scores.softmax(-1), "the answer", mistakes, finite=hint)


@exercise
def soft_lookup(answer: Callable[[Array, Array, Array], Array]) -> None:
    """Exercise of the NumPy lab: scaled dot-product attention.

    Args:
        answer: ``answer(q, k, v)`` for float64 queries (nq, d), keys (nk, d) and values (nk, dv). Returns (nq, dv).
    """

    with trial("3 queries, 5 keys"):
        q, k, v = _normal(1, (3, 4), (5, 4), (5, 2))
        scores = q @ k.T
        right = (scores / 2).softmax(-1)
        mistakes = {
            "these are the weights; the answer is the weighted mean of the values: weights @ v": right,
            "the scores are used as weights; apply a softmax to each row first": scores / 2 @ v,
            "the scores are used as weights, and are not scaled": scores @ v,
            **{hint: weights @ v for hint, weights in scale_mistakes(scores, 4, dv=2, nk=5).items()},
            "the weights are divided by √d; divide the scores, before the softmax": scores.softmax(-1) / 2 @ v,
            "the softmax runs over the queries; it should run over the keys of each query: the last axis": (
                (scores / 2).softmax(0) @ v
            ),
        }
        _expect(_result(answer, q.numpy(), k.numpy(), v.numpy()), _attention(q, k, v), "the answer", mistakes)

    with trial("one key"):
        q, k, v = _normal(2, (2, 3), (1, 3), (1, 4))
        what = "the answer (expected the value of the only key)"
        _expect(_result(answer, q.numpy(), k.numpy(), v.numpy()), v.repeat(2, 1), what)

    with trial("large queries"):
        q, k, v = _normal(3, (2, 3), (4, 3), (4, 2))
        hint = "large scores overflow in exp; subtract the largest of each row first"
        got = _result(answer, 1e4 * q.numpy(), k.numpy(), v.numpy())
        _expect(got, _attention(1e4 * q, k, v), "the answer", finite=hint)


@exercise
def online_softmax(answer: Callable[[Iterator[tuple[Array, Array]]], tuple[Array, float]]) -> None:
    """Exercise of the NumPy lab: attention of one query whose keys arrive in blocks.

    Args:
        answer: ``answer(blocks)`` for an iterator that can be read once. A block is the scores (m,) of m keys and their
            values (m, dv); m differs between blocks, and masked keys have score −∞. Returns the output (dv,) and the
            log-sum-exp of all scores.
    """

    trials = {
        "one block": (4, (3,), (2.0,)),
        "scores that rise": (5, (4, 1, 3), (0.0, 2.0, 4.0)),
        "scores of 1,000": (6, (3, 2, 4), (0.0, 1000.0, 999.0)),
        "a first block of masked keys": (7, (2, 3), (MASKED, 0.0)),
    }
    for name, (seed, sizes, lifts) in trials.items():
        drawn = iter(_normal(seed, *(shape for m in sizes for shape in ((m,), (m, 3)))))
        blocks = [(scores + lift, values) for scores, values, lift in zip(drawn, drawn, lifts, strict=True)]
        with trial(name):
            _check_online(answer, blocks)


Blocks = list[tuple[Tensor, Tensor]]


def _check_online(answer: Callable[..., object], blocks: Blocks) -> None:
    """One trial of `online_softmax`."""
    with np.errstate(all="ignore"):
        found = answer(_Once([(s.numpy().copy(), v.numpy().copy()) for s, v in blocks]))
    if not isinstance(found, tuple) or len(found) != 2:
        raise Wrong("expected two results: the output and the log-sum-exp")
    out, lse = array(found[0], "the output"), array(found[1], "the log-sum-exp")
    hint = "exp overflows or underflows; subtract the largest score *so far*, and update it as it rises"
    if not bool(blocks[0][0].isfinite().any()):
        hint = "after a block of masked keys the largest score is −∞, and −∞ − (−∞) is NaN; skip such a block"
    scores, values = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    means = torch.stack([s.softmax(-1) @ v for s, v in blocks if s.isfinite().any()])
    top = scores.max()
    rest = (scores - top).logsumexp(-1)
    _expect(out, scores.softmax(-1) @ values, "the output", {
        "when the largest score rises, the sum of values must be rescaled, too: multiply it by e^(old − new)": (
            _running(blocks, total=True, out=False)
        ),
        "the sum of values is rescaled when the largest score rises, but the sum of powers is not: multiply both by "
        "e^(old − new)": _running(blocks, total=False, out=True),
        "sums with different largest scores are added without rescaling: when the largest score rises, multiply the "
        "old sums by e^(old − new)": _running(blocks, total=False, out=False),
        "when the largest score rises, the sums must shrink: multiply by e^(old − new), not e^(new − old)": (
            _running(blocks, total=True, out=True, sign=-1)
        ),
        "the blocks' outputs are averaged with equal weights; weight each by its sum of powers": means.mean(0),
        "this is the output of the last block only": means[-1],
        "the output is not divided by the sum of the powers": (scores - top).exp() @ values,
    }, finite=hint)  # fmt: skip
    _expect(lse, top + rest, "the log-sum-exp", {
        "the log-sum-exp lacks the largest score that was subtracted: add it to ln Σ e^(s − max)": rest,
        "this is Σ e^(s − max), expected its logarithm plus the largest score": rest.exp(),
        "Σ e^(s − max) is added to the largest score; add its logarithm instead": top + rest.exp(),
        "this is the largest score; the log-sum-exp adds ln Σ e^(s − max) to it": top,
    }, finite=hint)  # fmt: skip


class _Once:
    """An iterator over blocks that raises `Wrong` when it is read a second time."""

    def __init__(self, blocks: list[tuple[Array, Array]]) -> None:
        self.blocks, self.ended = iter(blocks), False

    def __iter__(self) -> _Once:
        if self.ended:
            raise Wrong("the blocks are read a second time; keep everything you need during the first pass")
        return self

    def __next__(self) -> tuple[Array, Array]:
        try:
            return next(self.blocks)
        except StopIteration:
            self.ended = True
            raise


def _running(blocks: Blocks, *, total: bool, out: bool, sign: int = 1) -> Tensor:
    """The output of an online softmax that rescales only the total, only the sum of values, or neither.

    With sign −1 the factor is inverted.
    """
    top, powers_sum, sums = torch.tensor(MASKED), torch.zeros(()), torch.zeros(blocks[0][1].shape[1])
    for scores, values in blocks:
        new = torch.maximum(top, scores.max())
        powers, kept = (scores - new).exp(), (sign * (top - new)).exp() if top > MASKED else torch.zeros(())
        powers_sum = powers_sum * (kept if total else 1.0) + powers.sum()
        sums = sums * (kept if out else 1.0) + powers @ values
        top = new
    return sums / powers_sum


def _normal(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Standard normal numbers in float64, from a seed."""
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.normal(size=shape)) for shape in shapes]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.from_numpy(reference.attention(*(x.numpy()[None, None] for x in (q, k, v))).out[0, 0])


def _result(answer: Callable[..., object], *inputs: Array) -> Tensor:
    """What an answer returns for some arrays; `Wrong` with a hint if NumPy reports shapes that do not match."""
    try:
        with np.errstate(all="ignore"):
            return array(answer(*inputs), "the answer")
    except ValueError as error:
        if "broadcast" in str(error):
            raise Wrong(
                f"shapes do not match ({error}); a row's maximum or sum keeps its axis with keepdims=True"
            ) from None
        if "matmul" in str(error):
            shapes = "scores are q @ k.T, (nq, nk), and outputs weights @ v, (nq, dv)"
            raise Wrong(f"shapes of a matrix product do not match; {shapes}") from None
        raise


OutWeights = tuple[Float[Tensor, "b n m"], Float[Tensor, "b h n n"]]


@exercise
def einsum_attention(answer: Callable[..., OutWeights]) -> None:
    """Exercise of the reversal lab: multi-head self-attention, written as einsums.

    Args:
        answer: ``answer(x, w_q, w_k, w_v, w_o, mask)`` for float64 x (b, n, m), the weights of h heads w_q, w_k and w_v
            (m, h, d) and w_o (h, d, m), and a mask (n, n), True where a query (row) may attend to a key (column), or
            None. Returns out (b, n, m) and weights (b, h, n, n).
    """
    odd = torch.tensor([[1, 0, 1, 0, 0], [1, 1, 0, 0, 1], [0, 0, 1, 1, 0], [1, 1, 1, 1, 0], [0, 1, 0, 0, 0]]).bool()
    trials: dict[str, tuple[int, int, int, int, int, Tensor | None]] = {
        "without a mask": (2, 5, 6, 3, 4, None),
        "under a causal mask": (2, 4, 6, 2, 5, torch.ones(4, 4).tril().bool()),
        "under a mask that is not causal": (1, 5, 4, 3, 2, odd),
        "one head, one token": (1, 1, 3, 1, 2, torch.ones(1, 1).bool()),
    }
    for name, sizes in trials.items():
        with trial(name):
            _check_attention(answer, *sizes)


@exercise
def reversal_score(answer: Callable[[Tensor, int], Float[Tensor, " h"]]) -> None:
    """Exercise of the reversal lab: how often each head's strongest key is the mirrored position.

    A sequence is `length` symbols, a separator, and the symbols again, last one first. Reversed symbol p is predicted
    by query length + p (the separator for p = 0), and is key length − 1 − p.

    Args:
        answer: ``answer(weights, length)`` for weights (b, h, n, n) of b sequences; n is 2 · length, or
            2 · length + 1 if the input includes the last token. Returns (h,) numbers from 0 to 1.
    """
    sometimes = (3 * draw(3, 4, 8, 8)).softmax(-1)
    sometimes[:, 1] += _head_weights(4, 8, 7)
    sometimes[1:, 2, 5] += _head_weights(4, 8, 7)[5]
    sometimes[:, 2, 4] += _head_weights(4, 8, 7)[4]
    both = torch.stack([_head_weights(5, 10, 9), _head_weights(5, 10, 10)])[None].repeat(2, 1, 1, 1)
    whole = torch.stack([_head_weights(3, 7, 5), _head_weights(3, 7, 6)])[None]
    trials = {
        "a head that mirrors, and one that does not": (both, 5),
        "heads that mirror sometimes": (sometimes, 4),
        "with the last token": (whole, 3),
    }
    for name, (weights, length) in trials.items():
        with trial(name):
            _check_score(answer, weights, length)


def _check_attention(
    answer: Callable[..., object], b: int, n: int, m: int, h: int, d: int, mask: Tensor | None
) -> None:
    """One trial of `einsum_attention`."""
    shapes = ((b, n, m), (m, h, d), (m, h, d), (m, h, d), (h, d, m))
    x, w_q, w_k, w_v, w_o = (draw(*shape, seed=i).double() for i, shape in enumerate(shapes))
    out, weights = pair(answer(x, w_q, w_k, w_v, w_o, mask))
    q, k, v = (torch.einsum("bnm,mhd->bhnd", x, w) for w in (w_q, w_k, w_v))
    dense = None if mask is None else masks.Dense(mask[None, None])
    found = reference.attention(q, k, v, mask=dense)
    right_weights, means = torch.from_numpy(found.weights), torch.from_numpy(found.out)
    each = torch.einsum("bhnd,hdm->bhnm", means, w_o)
    scores = q @ k.mT / d**0.5
    masked = torch.zeros(n, n, dtype=torch.bool) if mask is None else ~mask
    mistakes = {
        **scale_mistakes(q @ k.mT, d, mask, m=m),
        "the softmax runs over the queries; it should run over the keys of each query: the last dimension": (
            scores.masked_fill(masked, -torch.inf).softmax(-2)
        ),
        "queries and keys are swapped: rows are queries, so the first factor must come from w_q": (
            scores.mT.masked_fill(masked, -torch.inf).softmax(-1)
        ),
        **({} if mask is None else mask_mistakes(scores, mask)),
    }
    expect(weights, right_weights, "weights", mistakes, 1e-9)
    expect(out, each.sum(1), "out", {
        "these are the heads' means of the values; project them by w_o, and sum over the heads": means,
        "these are the heads' means of the values; project them by w_o, and sum over h and d": means.transpose(1, 2),
        "these are the heads' means, concatenated; project them by w_o": means.transpose(1, 2).flatten(2),
        "the heads are not summed; the result has no dimension h": each,
        "the heads are averaged, expected summed": each.mean(1),
        "tokens and heads are mixed: (b, h, n, d) was reshaped before it was transposed": (
            means.reshape(b, n, h * d) @ w_o.flatten(0, 1)
        ),
    }, 1e-9)  # fmt: skip


def _check_score(answer: Callable[[Tensor, int], Tensor], weights: Tensor, length: int) -> None:
    """One trial of `reversal_score`."""
    place = torch.arange(length)
    strongest = weights.argmax(-1)
    right = (strongest[:, :, length + place] == length - 1 - place).double()
    inside = length + 1 + place < weights.shape[2]
    late = (strongest[:, :, (length + 1 + place)[inside]] == (length - 1 - place)[inside]).double()
    columns = (weights.argmax(-2)[:, :, length - 1 - place] == length + place).double()
    one_late = (
        "you count query + key = 2 · length, one too late: reversed symbol 0 is predicted *at* the separator, query "
        "length, not after it, and is key length − 1"
    )
    mistakes = {
        one_late: late.mean((0, 2)),
        f"{one_late} (and the divisor counts positions that were left out)": late.sum(2).mean(0) / length,
        "the separator is left out, but it is the query that predicts the first reversed symbol": (
            right[..., 1:].mean((0, 2))
        ),
        "the strongest key is compared with p, expected length − 1 − p: the last symbol comes first": (
            (strongest[:, :, length + place] == place).double().mean((0, 2))
        ),
        "this uses the strongest query of each key; queries are rows, so take argmax over the last dimension": (
            columns.mean((0, 2))
        ),
        "these are counts, expected shares": right.sum((0, 2)),
        "the counts are divided by the number of positions only; divide by that of sequences, too": (
            right.sum((0, 2)) / length
        ),
        "this is the mean weight on the mirrored position, expected how often it is the strongest key": (
            weights[:, :, length + place, length - 1 - place].double().mean((0, 2))
        ),
        "there is a number for each sequence; average over them, too": right.mean(2),
        "these are shares for each position; average over positions and sequences, not over heads": right.mean((0, 1)),
    }
    try:
        got = answer(weights.clone(), length)
    except IndexError as error:
        raise Wrong(f"{error}: a query index is out of range; use queries length … 2 · length − 1") from None
    expect(got.double() if isinstance(got, Tensor) else got, right.mean((0, 2)), "the answer", mistakes, 1e-6)


def _head_weights(length: int, n: int, total: int) -> Tensor:
    """Weights (n, n) of a head whose queries from `length` on attend to key total − query, and others to themselves."""
    weights = torch.eye(n)
    for query in range(length, n):
        weights[query] = 0.1 / n
        weights[query, total - query] = 0.9
    return weights
